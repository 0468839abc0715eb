// What a backend is: it says whether and at what cost it can run a problem, and runs it. Everything
// it is given was checked before (src/api); a backend throws only for what it cannot know earlier.
#pragma once

#include <jali/jali.h>

#include <optional>
#include <string>
#include <vector>

#include "base/hd.h"
#include "mask/bound.h"

namespace jali {

/// A tensor over (sequence, head, token, element), in one form for padded and packed (varlen)
/// layouts: element (b, h, l, d) stands at
///   data + b * stride_b + (h / head_div) * stride_h + (start_b + l) * stride_l + d * stride_d,
/// where h is a query head and start_b the frame's q_start or k_start (0 when padded; packed
/// layouts have stride_b = 0). A broadcast dim has stride 0. Strides count elements.
struct HeadView {
  void* data = nullptr;  // null: absent
  DType dtype = DType::kF32;
  i64 stride_b = 0, stride_h = 0, stride_l = 0, stride_d = 1;
  i32 head_div = 1;  // Hq / (heads of the tensor)
  bool given() const { return data != nullptr; }
};

/// A tensor over (sequence, head, row, key): element (b, h, i, j) stands at
///   data + b * stride_b + (h / head_div) * stride_h + i * stride_i + j * stride_j.
/// Never packed. A broadcast dim has stride 0.
struct CellView {
  void* data = nullptr;  // null: absent
  DType dtype = DType::kF32;
  i64 stride_b = 0, stride_h = 0, stride_i = 0, stride_j = 0;
  i32 num_rows = 1, num_keys = 1;  // of the tensor, which may be longer than any sequence
  i32 head_div = 1;                // Hq / (heads of the tensor)
  bool given() const { return data != nullptr; }
};

/// Where a kernel has its tiles from: all are visited; each is classified as it comes; or a map was made before.
enum class TileSource : u8 { kDense, kInline, kStored };
const char* source_name(TileSource source);
/// What JALI_FORCE asks GPU kernels to do.
std::optional<TileSource> forced_source();

/// One attention call, checked and resolved.
struct AttentionProblem {
  DType dtype = DType::kF32;  // of q, k, v and out
  i32 B = 1, Hq = 1, Hkv = 1;
  i32 Lq = 0, Lk = 0;  // of the longest sequence
  i32 D = 1, Dv = 1;
  i64 Tq = 0, Tk = 0;  // varlen: tokens of all sequences
  bool varlen = false;

  HeadView q, k, v;                     // k and v: head_div = Hq / Hkv
  CellView bias;                        // dtype of q or fp32
  HeadView key_bias;                    // over (b, h, key); dtype of q or fp32
  const float* alibi_slopes = nullptr;  // [Hq], contiguous; null: off
  HeadView sinks;                       // over h alone (stride_h); dtype of q or fp32

  double scale = 1;  // resolved, never NaN
  double softcap = 0;
  double dropout_p = 0;
  u64 seed = 0;
  bool deterministic = true;
  int num_threads = 0;                   // 0: one per core
  DeviceType device = DeviceType::kCPU;  // of every tensor
  int device_index = 0;

  // CUDA: see AttentionOptions
  void* stream = nullptr;
  const i64* seed_on_gpu = nullptr;
  void* (*allocate)(void* context, std::size_t bytes) = nullptr;
  void* allocate_context = nullptr;
  bool expect_backward = false;
  std::optional<TileSource> forced_source;
  /// A map is wanted also where tiles could be classified as they come.
  bool forces_map() const { return forced_source && *forced_source != TileSource::kInline; }

  /// GPU, padded: sequences may be cut into documents, none of which sees another. Document n of
  /// sequence b is the tokens documents[b, n] to documents[b, n + 1] - 1; the mask counts rows and
  /// keys from its first token on. Tokens behind the last one see nothing and are not seen.
  std::optional<TokenTable<i32>> documents;
  /// Whether tiles begin anew with each document, or packed sequence.
  bool cut() const { return varlen || documents; }

  /// Always given; trivial() when nothing is masked. Its frame(b, h) also says the lengths, starts
  /// and q_offset of every sequence.
  const BoundMask* mask = nullptr;
};

/// Where a backward writes: every element, once. dq, dk and dv are given. Dtypes, broadcast dims
/// (stride 0) and head_div are those of the inputs: an element of dbias, dkey_bias, dsinks is the
/// sum over the dims that its input was broadcast to.
struct BackwardViews {
  HeadView dq, dk, dv;
  CellView dbias;
  HeadView dkey_bias, dsinks;
};

/// Whether a backend can run a problem: its estimated cost in seconds (the lowest wins), or the
/// reason why not, as a sentence for the user: what is required, what is supported.
struct Fit {
  bool ok = false;
  double cost = 0;
  std::string reason;
};

/// Rows and keys of one tile: what classes are asked for, and what explain() counts.
struct TileShape {
  i32 rows = 0, keys = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;
  virtual DeviceType device() const = 0;
  virtual Fit fits(const AttentionProblem& problem) const = 0;
  virtual TileShape forward_tile(const AttentionProblem& problem) const = 0;
  virtual TileSource forward_source(const AttentionProblem& problem) const = 0;

  /// out is over (b, h, row, Dv) in the problem's dtype; lse over (b, h, row) in fp32, fp64 for
  /// fp64 problems; it may be absent. Tokens outside every sequence are not written.
  virtual void forward(const AttentionProblem& problem, const HeadView& out,
                       const HeadView& lse) const = 0;

  /// out and lse are the forward's results; dlse (like lse) may be absent.
  virtual void backward(const AttentionProblem& problem, const HeadView& out, const HeadView& lse,
                        const HeadView& dout, const HeadView& dlse,
                        const BackwardViews& grads) const = 0;

  /// Compiles for `arch` what such a problem would run, if the backend compiles at run time, with or
  /// without what a backward pass needs; of grads, those of biases count. Reads no memory.
  virtual std::vector<BuiltModule> prebuild(const AttentionProblem&, bool /*backward*/,
                                            const BackwardViews& /*grads*/,
                                            const std::string& /*arch*/) const {
    return {};
  }

  /// What it finds on this machine: lines "<kind>\t<text>".
  virtual std::string describe() const { return {}; }
};

/// All backends of this library.
const std::vector<const Backend*>& all_backends();

}  // namespace jali
