// Jali: attention through the openings of a mask. The public C++ API; needs the standard library
// only. Every function reports a wrong argument by throwing jali::Error before any work starts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// The library hides everything but what this header declares.
#pragma GCC visibility push(default)

namespace jali {

/// What was wrong, what was expected, how to mend it.
class Error : public std::runtime_error {
 public:
  /// Decides the Python exception: ValueError, TypeError or NotImplementedError.
  enum class Kind { kValue, kType, kUnsupported };
  Error(Kind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  Kind kind() const { return kind_; }

 private:
  Kind kind_;
};

enum class DType : std::uint8_t { kF64, kF32, kBF16, kF16, kI64, kI32, kBool };
enum class DeviceType : std::uint8_t { kCPU, kCUDA };

/// A strided array in memory that somebody else owns. Strides count elements and may be 0.
struct TensorView {
  static constexpr int kMaxRank = 5;
  void* data = nullptr;
  DType dtype = DType::kF32;
  DeviceType device = DeviceType::kCPU;
  int device_index = 0;
  int rank = -1;  // -1: absent
  std::int64_t shape[kMaxRank] = {};
  std::int64_t stride[kMaxRank] = {};

  TensorView() = default;
  /// A contiguous array in CPU memory.
  TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> shape);
  bool given() const { return rank >= 0; }
  std::int64_t size(int dim) const { return shape[dim < 0 ? rank + dim : dim]; }
  std::int64_t num_elements() const;
};

/// Which (row, key) cells attention may use: an expression over leaves, without a shape.
/// Held flat, as kernels and graphs need it: `program` is the structure (postfix: kAnd, kOr, kNot,
/// or a leaf's kind, its number of fields and per field 0 absent, 1 scalar, 2 table), `scalars` and
/// `tables` are what it consumes, in order. An empty program makes every cell visible. Tables are
/// views: their memory must outlive every call with the mask.
class Mask {
 public:
  static constexpr std::int64_t kAnd = -1, kOr = -2, kNot = -3;
  Mask() = default;
  Mask(std::vector<std::int64_t> program, std::vector<std::int64_t> scalars,
       std::vector<TensorView> tables)
      : program_(std::move(program)), scalars_(std::move(scalars)), tables_(std::move(tables)) {}

  const std::vector<std::int64_t>& program() const { return program_; }
  const std::vector<std::int64_t>& scalars() const { return scalars_; }
  const std::vector<TensorView>& tables() const { return tables_; }

 private:
  std::vector<std::int64_t> program_, scalars_;
  std::vector<TensorView> tables_;
};
Mask operator&(const Mask& a, const Mask& b);
Mask operator|(const Mask& a, const Mask& b);
Mask operator~(const Mask& a);

/// The number that stands for a leaf in a program: FNV-1a of its name, 31 bits.
constexpr std::int64_t leaf_kind(const char* name) {
  std::uint32_t x = 2166136261u;
  for (; *name; ++name) x = (x ^ static_cast<unsigned char>(*name)) * 16777619u;
  return x & 0x7fffffff;
}

/// An optional integer parameter of a mask: absent, a number, or an int32 tensor.
struct IntParam {
  enum class Tag : std::uint8_t { kAbsent, kNumber, kTable } tag = Tag::kAbsent;
  std::int64_t number = 0;
  TensorView table;
  IntParam() = default;
  IntParam(std::int64_t n) : tag(Tag::kNumber), number(n) {}     // NOLINT: implicit
  IntParam(int n) : tag(Tag::kNumber), number(n) {}              // NOLINT: implicit
  IntParam(const TensorView& t) : tag(Tag::kTable), table(t) {}  // NOLINT: implicit
};

// Mask factories, one per leaf: see the leaf's header in src/mask/leaf/ for its exact meaning.
// i = query row, p = i + q_offset = its position, j = key. Tables broadcast: a batch or head dim
// may be 1 or missing; a head dim counts 1, Hkv or Hq.
/// j <= p.
Mask causal(IntParam offset = {});
/// p - left <= j <= p + right; absent: unlimited.
Mask window(IntParam left, IntParam right, IntParam offset = {});
/// j < length.
Mask prefix(IntParam length);
/// keep[b, j] (bool).
Mask key_padding(const TensorView& keep);
/// q_ids[b, i] == k_ids[b, j] >= 0 (int32); with one table, row i reads ids[b, p].
Mask document(const TensorView& q_ids, const TensorView& k_ids = {});
/// Tokens cu_seqlens[b, n] to cu_seqlens[b, n + 1] - 1 (int32, from 0, not decreasing) are a document:
/// p and j are in the same one.
Mask packed_document(const TensorView& cu_seqlens);
/// start[b, h, j] <= i + offset < end[b, h, j] (int32); either may be absent; offset absent: i is
/// taken at its position p.
Mask key_interval(const TensorView& start, const TensorView& end, IntParam offset = 0);
/// start[b, h, i] <= j < end[b, h, i] (int32).
Mask row_interval(const TensorView& start, const TensorView& end);
/// (p - j) mod step == 0.
Mask dilated(std::int64_t step, IntParam offset = {});
/// j is in i's neighbourhood on a grid of 1 to 3 dims.
Mask neighborhood(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& kernel,
                  const std::vector<std::int64_t>& dilation = {},
                  const std::vector<bool>& causal = {});
/// blocks[b, h, i / block_rows, j / block_keys] (bool).
Mask block_sparse(const TensorView& blocks, std::int64_t block_rows = 128,
                  std::int64_t block_keys = 128);
/// The same from sorted block columns per block row: row_ptr [B, H, rows + 1], col_idx [B, H, nnz].
Mask block_csr(const TensorView& row_ptr, const TensorView& col_idx, std::int64_t block_rows = 128,
               std::int64_t block_keys = 128);
/// tensor[b, h, i, j] (bool); each dim may be 1.
Mask dense(const TensorView& tensor);

/// What dynamic_ends selects from, and how much.
struct DynamicOptions {
  std::int64_t keep = -1;  // candidates that a row keeps; negative: no limit
  float threshold = -std::numeric_limits<float>::infinity();  // lower scores are never kept
  bool causal = true;  // rows keep the best of their own past; false: all rows share one set
  std::vector<TensorView> documents;  // int32 [B|1, Lk]: keys that agree in all of them select
                                      // together, apart from the others; negative: never kept
  std::vector<TensorView> keep_keys;  // bool [B|1, Lk]: false: never kept
  TensorView cu_seqlens_k;            // varlen: int32 [N + 1]; tables packed or padded
  int num_threads = 0;                // 0: one per core
};
/// Selection by score, in O(L): scores [B|1, H, Lk] fp32 -> ends [B, H, Lk] int32 (varlen: packed
/// [1, H, Tk]). The row at position p keeps key j exactly when j <= p < ends[b, h, j] (absolute key
/// positions, so chunks and decoding read the same table); with causal = false when ends[b, h, j]
/// is not 0. Higher scores rank above lower ones (-0 = +0), of equal scores the newer key; NaN and
/// -inf are never kept. Tokens behind the last sequence get 0.
void dynamic_ends(const TensorView& scores, const DynamicOptions& options, const TensorView& ends);
/// The mask of such a table; & it with the documents and keys that it was made for.
Mask dynamic(const TensorView& ends, bool causal = true, IntParam offset = {});

/// The names of all mask leaves, sorted.
std::vector<std::string> leaf_names();

/// For people and tools, lines of fields separated by tabs. Every mask leaf, "leaf <name>", followed
/// by its parameters, "field <name> <dims> <doc>".
std::string describe_leaves();
/// "isa <name>" in use, "backend <name>" of each, what these find on the machine ("gpu <text>",
/// "driver", "compiler", "cache"), "variable <name> <value> <values> <doc>" of each
/// JALI_* environment variable.
std::string describe_library();

/// Folders to look for NVIDIA's run-time compiler (libnvrtc) in, beside the loader's own: its wheels
/// put it into site-packages/nvidia/*/lib. To be called before the first call on a GPU.
void add_library_folders(const std::vector<std::string>& folders);
/// Folders of compiled GPU kernels that are looked into before anything is compiled, and never
/// written: what prebuild left in the folder JALI_CACHE.
void add_kernel_packs(const std::vector<std::string>& folders);

/// The index space of a call, for everything that looks at a mask alone.
struct Shape {
  std::int64_t B = 1, Hq = 1, Hkv = 1, Lq = 0, Lk = 0;
  IntParam q_offset;              // int32 [B] or a number; absent: Lk - Lq of each sequence
  TensorView cu_seqlens_q;        // int32 [B + 1] on the CPU; absent: B sequences of length Lq
  TensorView cu_seqlens_k;        // with them, Lq and Lk are taken from here
  std::int64_t Tq = -1, Tk = -1;  // with them: tokens in packed tables; -1: as many as they cover
  // Where every table and cu_seqlens is. The functions that look at a mask alone need the CPU.
  DeviceType device = DeviceType::kCPU;
  int device_index = 0;
};

/// Writes the mask's cells: out bool [B, Hq, Lq, Lk], any strides. O(B Hq Lq Lk).
void mask_dense(const Mask& mask, const Shape& shape, const TensorView& out);
/// Writes exact tile classes (0 empty, 1 partial, 2 full; cells in bounds only) into out int8-sized
/// kBool storage [B|1, Hq|1, ceil(Lq / tile_rows), ceil(Lk / tile_keys)]; a dim of 1 is allowed
/// where the mask does not vary over it (mask_varies tells).
void mask_tiles(const Mask& mask, const Shape& shape, std::int64_t tile_rows,
                std::int64_t tile_keys, const TensorView& out);
/// Whether the mask may differ between sequences (first) and heads (second) of this shape.
std::pair<bool, bool> mask_varies(const Mask& mask, const Shape& shape);

/// Counters of what a call computes. Tiles are those of the chosen backend.
struct Explanation {
  std::string backend, source;
  std::int64_t tile_rows = 0, tile_keys = 0;
  std::int64_t num_empty = 0, num_partial = 0, num_full = 0;
  std::int64_t num_visible = 0;  // cells
  std::int64_t plan_bytes = 0;
  double plan_seconds = 0;
};
/// `device`: whose backend is asked; the mask and the shape are on the CPU whatever it is.
Explanation explain(const Mask& mask, const Shape& shape, std::int64_t D, std::int64_t Dv,
                    DType dtype, DeviceType device = DeviceType::kCPU, int device_index = 0);

/// Everything beside q, k, v and the mask. Absent views mean "off".
struct AttentionOptions {
  double scale = std::numeric_limits<double>::quiet_NaN();  // NaN: 1 / sqrt(D)
  double softcap = 0;                                       // 0: off
  double dropout_p = 0;                                     // chance to drop a weight, to 2^-15
  std::int64_t seed = 0;                                    // of the dropout
  IntParam q_offset;                                        // see Shape
  TensorView bias;          // [B|1, Hq|Hkv|1, Lq|1, Lk|1], q's dtype or fp32
  TensorView key_bias;      // [B|1, Hq|Hkv|1, Lk]; varlen [1|Hkv|Hq, Tk]
  TensorView alibi_slopes;  // [Hq] fp32: -slope |p - j| is added
  TensorView sinks;         // [Hq]: extra logits without a value
  TensorView cu_seqlens_q;  // int32 [N + 1]: varlen; q is [Tq, Hq, D], k and v are [Tk, Hkv, *]
  TensorView cu_seqlens_k;
  bool deterministic = true;  // the CPU backend always is
  int num_threads = 0;        // 0: one per core

  // CUDA only. Nothing waits for the GPU: tables, cu_seqlens and offsets are read when the kernels
  // run, and their contents are not checked (reads stay inside the tables).
  void* stream = nullptr;                     // CUstream; null: the default stream
  const std::int64_t* seed_on_gpu = nullptr;  // instead of `seed`
  // Memory on the device that lives until what was launched on the stream has run; null: from the
  // driver's stream-ordered allocator.
  void* (*allocate)(void* context, std::size_t bytes) = nullptr;
  void* allocate_context = nullptr;
  // attention_backward will follow this forward: where the forward's kernels have to be compiled,
  // those of the backward are, too, in the background; see wait_for_compilation.
  bool expect_backward = false;
};
/// Waits until nothing is compiled in the background. Call it before the process ends if a forward had
/// expect_backward: NVRTC crashes when exit() finds it at work.
void wait_for_compilation();

/// Attention, on the device of q. q [B, Hq, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv] (or varlen, see options);
/// fp64, fp32, bf16 or fp16, last dim contiguous, Hkv divides Hq, D and Dv in 1..1024.
/// Writes out (q's shape with Dv, q's dtype) and lse [B, Hq, Lq] (varlen [Hq, Tq]; fp32, fp64 for
/// fp64 inputs; natural log, includes the sink; -inf where a row sees nothing). lse may be absent.
void attention_forward(const TensorView& q, const TensorView& k, const TensorView& v,
                       const Mask& mask, const AttentionOptions& options, const TensorView& out,
                       const TensorView& lse);

/// Where attention_backward writes; an absent view is not computed (dq, dk, dv are required).
/// Shapes and dtypes are those of the inputs they belong to.
struct AttentionGrads {
  TensorView dq, dk, dv, dbias, dkey_bias, dsinks;
};
/// Gradients of attention_forward. dout is out's shape; dlse [like lse] may be absent.
void attention_backward(const TensorView& q, const TensorView& k, const TensorView& v,
                        const TensorView& out, const TensorView& lse, const TensorView& dout,
                        const TensorView& dlse, const Mask& mask, const AttentionOptions& options,
                        const AttentionGrads& grads);

/// What prebuild compiled, or found in the cache: one or more kernels.
struct BuiltModule {
  std::string name;        // the variant, its dtype, dims and options, and the mask's type
  std::string log;         // the compiler's: registers, stack and spills of every kernel
  std::int64_t bytes = 0;  // of machine code and log
  bool compiled = false;   // now; else it was in the cache
};
/// Compiles the GPU kernels that attention_forward (and, with `backward`, attention_backward) would
/// use for such a call into the cache on disk; needs no GPU. The views tell dtypes, shapes and
/// strides; they and the mask's tables must say DeviceType::kCUDA, and no memory is read. Of grads,
/// dbias and dkey_bias are looked at: whether these are wanted. arch: e.g. "sm_90a".
std::vector<BuiltModule> prebuild(const TensorView& q, const TensorView& k, const TensorView& v,
                                  const Mask& mask, const AttentionOptions& options, bool backward,
                                  const AttentionGrads& grads, const std::string& arch);

/// The slow, independent fp64 specification of attention_forward (and, where grads.dq is given, of
/// attention_backward with dout and dlse): every cell in turn. Inputs of any supported dtype; out,
/// lse and grads are fp64.
void attention_truth(const TensorView& q, const TensorView& k, const TensorView& v,
                     const Mask& mask, const AttentionOptions& options, const TensorView& out,
                     const TensorView& lse, const TensorView& dout, const TensorView& dlse,
                     const AttentionGrads& grads);

}  // namespace jali

#pragma GCC visibility pop
