// One call on a GPU: its device made current, memory that lives as long as what it launches, the
// mask as kernels need it, launches on its stream.
#pragma once

#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "cuda/device_mask.h"
#include "cuda/jit/driver.h"
#include "cuda/jit/kernel.h"
#include "cuda/kernel/tile_map.h"

namespace jali::cuda {

/// The text of a module for some mask M: whatever it says depends on `key`, the mask's type and whether calls are cut
/// (JALI_CUT) alone.
struct KernelText {
  std::string key;
  // Behind JALI_CUT, the mask's definitions and "using M = <type>".
  std::function<std::string()> body;
  /// Whether ptxas may leave it at -O1: where nothing is done to scores, else it spills, and nobody asks
  /// cell by cell. PERF: compiled in 0.87 (backward) and 0.92 (forward) of the time, and as fast; but
  /// finders of a neighbourhood took twice the time (backward 2,000, not 1,490 us), of spans of documents
  /// joined with a causal mask the forward 4 % more, a forward of D64 2 %, a backward of D256 3 %, one of
  /// D64 without maps 1 %.
  bool quick = false;
  int effort = 0;  // of compiling it: maps 0, forwards 1, backwards 2
};
/// What is compiled for calls that are cut(), or for those that are not.
Source source_of(const KernelText& text, const DeviceMask& mask, bool cut);
std::vector<Source> sources_of(const std::vector<KernelText>& texts, const DeviceMask& mask,
                               bool cut);
/// Tiles of `size` rows (or keys) of a head, of one sequence where tokens are not packed.
i32 num_tiles(const AttentionProblem& problem, bool rows, i32 size);
/// The module with the kernel that makes tile maps.
KernelText map_text(i32 rows, i32 keys, bool key_lines);

inline Strides strides_of(const HeadView& view) {
  return {view.stride_b, view.stride_h, view.stride_l};
}

class Call {
 public:
  explicit Call(const AttentionProblem& problem);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const AttentionProblem& problem() const { return problem_; }
  const DeviceMask& mask() const { return mask_; }
  const Sequences& sequences() const { return sequences_; }
  const DeviceInfo& device() const { return device_; }

  /// Device memory, aligned to 256, until the work of this call has run.
  void* allocate(i64 bytes);
  /// Zeroes such memory on the stream; bytes: a multiple of 4.
  void clear(void* at, i64 bytes) const;
  struct RowStrides {
    u64 token, head, batch;  // in bytes; of a single one, any
  };
  /// Throws unless all rows of a tensor of 16-bit numbers, with `tokens` a sequence, or packed, start at
  /// multiples of 16 bytes.
  RowStrides row_strides(const char* name, const HeadView& view, i64 tokens) const;
  /// What the copy engine needs to load boxes of 64 columns x `rows` tokens of one head from a tensor
  /// of `tokens` a sequence, or packed: coordinates (column, token, head, sequence, 0), of packed
  /// tokens as box_place() has them. Throws as row_strides() does.
  TensorMap tensor_map(const char* name, const HeadView& view, i32 width, i64 tokens,
                       i32 rows) const;
  /// A number in device memory.
  const u64* upload(u64 number);
  /// `count` zeroed ints that kernels leave as they found them.
  i32* counters(i32 count);
  /// The mask's bytes for a kernel parameter. Its stored blocks are there behind the first tile_map().
  void* mask_parameters();
  /// The classes of all tiles of rows x keys, by row tiles (or by key tiles): the source "stored". If
  /// all heads and sequences share them, with their long lines. by_tiles: see map_tiles; where both kinds
  /// of map are wanted. Where the source "dense" is forced all tiles are active, and none is full.
  TileMap tile_map(i32 rows, i32 keys, bool key_lines, bool by_tiles = false);

  /// Modules that another call will need; they are asked for, and compiled in the background, where
  /// this call has to compile.
  void expect(std::function<std::vector<KernelText>()> texts) { expected_ = std::move(texts); }
  /// A kernel of a text for this call's mask, which is written when it is not loaded yet. `all`: the
  /// modules that the call needs, this text first; where it has to be compiled, all are, at the same
  /// time.
  const Kernel& kernel(const KernelText& text, const char* name, int shared_bytes,
                       const std::function<std::vector<KernelText>()>& all = {}) const;
  /// The kernel begins with ptx::begin_kernel.
  void launch(const Kernel& kernel, i64 blocks, int threads, int shared_bytes,
              std::initializer_list<const void*> parameters) const;

 private:
  void* allocate_alone(i64 bytes);
  /// Takes the stream's workspace until this call is done, unless it is captured into a graph: then false.
  bool hold_workspace();

  const AttentionProblem& problem_;
  const DeviceGuard guard_;
  const Driver& driver_;
  const DeviceInfo& device_;
  DeviceMask mask_;
  Sequences sequences_;
  std::vector<u64> mask_bytes_;
  bool stored_ = false;  // a kernel that stores the mask's blocks was launched
  std::vector<DevicePtr> own_memory_;
  char* chunk_ = nullptr;  // where small pieces come from, the last ones first
  i64 chunk_left_ = 0;
  DevicePtr workspace_ = 0;  // of the stream, held by this call
  bool captured_ = false;    // into a graph: there is none
  std::function<std::vector<KernelText>()> expected_;
};

}  // namespace jali::cuda
