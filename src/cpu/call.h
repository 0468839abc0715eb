// What forward and backward share: one call seen by the CPU backend, its tensors cut into tiles.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "backend/backend.h"
#include "base/philox.h"
#include "base/pool.h"
#include "base/tensor.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"

namespace jali::cpu {

/// Calls f(n) for 0 <= n < count, in this order, on several threads.
template <class F>
void for_each(int threads, i64 count, F&& f) {
  std::atomic<i64> next{0};
  parallel(threads, [&](int) {
    for (i64 n; (n = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(n);
  });
}

template <class T>
constexpr DType kDTypeOf = sizeof(T) == 8 ? DType::kF64 : DType::kF32;

/// The call's constants.
template <class T>
struct Call {
  explicit Call(const AttentionProblem& problem)
      : p(problem),
        kernels(cpu::kernels<T>()),
        group(problem.Hq / problem.Hkv),
        D(padded(problem.D)),
        Dv(padded(problem.Dv)),
        max_rows(min_of(kTileRows, problem.Lq)),
        threshold(dropout_threshold(problem.dropout_p)) {}
  i32 padded(i32 n) const { return ceil_div(n, kernels.lanes) * kernels.lanes; }
  /// What q · k is multiplied by to give the raw scores of ScoreRules.
  T score_factor() const { return static_cast<T>(p.softcap > 0 ? p.scale / p.softcap : p.scale); }
  /// Threads for this many multiply-adds in this many pieces.
  int threads(double work, i64 pieces) const {
    // PERF: waking a thread costs some microseconds, as much as 1e6 multiply-adds.
    constexpr double kWorthAThread = 1e6;
    const int most = p.num_threads > 0 ? p.num_threads : num_cores();
    const double worth = min_of(work / kWorthAThread, static_cast<double>(pieces));
    return static_cast<int>(clamp_to<double>(worth, 1, most));
  }

  const AttentionProblem& p;
  const Kernels<T>& kernels;
  i32 group;     // query heads per head of k and v
  i32 D, Dv;     // padded to whole vectors
  i32 max_rows;  // of a row tile
  u32 threshold;
};

inline char* offset_bytes(void* data, DType dtype, i64 elements) {
  return static_cast<char*>(data) + elements * dtype_bytes(dtype);
}
/// The rows of sequence b and query head h from token l on; l counts from the start of the tensor
/// where that is packed.
inline Rows rows_at(const HeadView& v, i32 b, i32 h, i64 l) {
  const i64 at = b * v.stride_b + (h / v.head_div) * v.stride_h + l * v.stride_l;
  return {offset_bytes(v.data, v.dtype, at), v.dtype, v.stride_l, v.stride_d};
}
inline Rows cells_at(const CellView& v, i32 b, i32 h, i64 i, i64 j) {
  const i64 at = b * v.stride_b + (h / v.head_div) * v.stride_h + i * v.stride_i + j * v.stride_j;
  return {offset_bytes(v.data, v.dtype, at), v.dtype, v.stride_i, v.stride_j};
}

/// One element, for what is not worth a kernel.
double load_element(const Rows& rows, i64 r, i64 d);
void store_element(const Rows& rows, i64 r, i64 d, double x);

/// Numbers the tiles of all sequences: those of sequence b are first(b) .. first(b + 1) - 1.
class TileIndex {
 public:
  enum class Of { kRows, kKeys };
  TileIndex(const BoundMask& mask, Of of);
  i64 first(i32 b) const { return first_[b]; }
  i64 total() const { return first_.back(); }
  /// The sequence that a tile belongs to.
  i32 sequence(i64 tile) const;

 private:
  std::vector<i64> first_;
};

/// A tensor as rows of the compute type that kernels may read in whole vectors: where it stands if
/// it is such already, else a copy, tile by tile, which pack() makes.
template <class T>
class TiledRows {
 public:
  /// `heads`: how many different ones; `width`: elements of a row.
  TiledRows(const Call<T>& call, const TileIndex& tiles, const HeadView& view, i32 heads, i32 width)
      : call_(call), tiles_(tiles), view_(view), heads_(heads), width_(width) {
    // Rows far apart are copied too: in the cache they would fall on each other.
    in_place_ = view.dtype == kDTypeOf<T> && view.stride_d == 1 &&
                width % call.kernels.lanes == 0 && view.stride_l == width;
    ld_ = call.padded(width);
    if (!in_place_) memory_ = Buffer<T>(heads * tiles.total() * kTileRows * ld_);
  }
  bool in_place() const { return in_place_; }
  i64 stride() const { return ld_; }
  /// Tile n of sequence b for query head h; `start`: first token of the sequence.
  T* tile(i32 b, i32 h, i32 n, i64 start) const {
    if (in_place_) {
      return reinterpret_cast<T*>(rows_at(view_, b, h, start + i64{n} * kTileRows).data);
    }
    return memory_.get() +
           (h / view_.head_div * tiles_.total() + tiles_.first(b) + n) * kTileRows * ld_;
  }
  /// Copies one tile of `rows` rows; nothing to do in place.
  void pack(i32 b, i32 h, i32 n, i64 start, i32 rows) const {
    if (in_place_) return;
    call_.kernels.pack(rows_at(view_, b, h, start + i64{n} * kTileRows), rows, width_,
                       tile(b, h, n, start), ld_);
  }

 private:
  const Call<T>& call_;
  const TileIndex& tiles_;
  HeadView view_;
  i32 heads_, width_;
  bool in_place_;
  i64 ld_;
  Buffer<T> memory_;
};

/// A tensor over keys, transposed tile by tile: [D][kTileKeys].
template <class T>
class TransposedTiles {
 public:
  TransposedTiles(const Call<T>& call, const TileIndex& tiles, const HeadView& view, i32 width,
                  T factor)
      : call_(call),
        tiles_(tiles),
        view_(view),
        width_(width),
        factor_(factor),
        memory_(call.p.Hkv * tiles.total() * kTileKeys * width) {}
  T* tile(i32 b, i32 h, i32 n) const {
    return memory_.get() +
           (h / view_.head_div * tiles_.total() + tiles_.first(b) + n) * kTileKeys * width_;
  }
  void pack(i32 b, i32 h, i32 n, i64 start, i32 keys) const {
    call_.kernels.pack_transposed(rows_at(view_, b, h, start + i64{n} * kTileKeys), keys, width_,
                                  factor_, tile(b, h, n));
  }

 private:
  const Call<T>& call_;
  const TileIndex& tiles_;
  HeadView view_;
  i32 width_;
  T factor_;
  Buffer<T> memory_;
};

template <class T>
void forward(const AttentionProblem& problem, const HeadView& out, const HeadView& lse);
template <class T>
void backward(const AttentionProblem& problem, const HeadView& out, const HeadView& lse,
              const HeadView& dout, const HeadView& dlse, const BackwardViews& grads);

}  // namespace jali::cpu
