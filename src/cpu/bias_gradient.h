// Gradients of bias and key_bias: sums of the scores' gradients over all that a bias was added to.
//
// - A bias with rows and keys is summed cell by cell where it stands (or in a copy of the compute
//   type), so heads and sequences that share it must be walked by one task, in order.
// - A bias over keys alone (key_bias too) is summed over rows per head and key tile, one over rows
//   alone over key tiles per head in the order of dQ; then over heads and sequences at the end.
//   Sums of tiles are added in fp64: one fp32 chain over all rows would lose bits with the length.
#pragma once

#include "cpu/call.h"

namespace jali::cpu {

template <class T>
class BiasGradient {
 public:
  BiasGradient(const Call<T>& call, const BackwardViews& grads, const TileIndex& row_tiles,
               const TileIndex& key_tiles)
      : call_(call), grads_(grads), row_tiles_(row_tiles), key_tiles_(key_tiles) {
    const AttentionProblem& p = call.p;
    const CellView& d = grads.dbias;
    if (d.given()) {
      form_ = d.stride_i == 0 ? Form::kKeys : d.stride_j == 0 ? Form::kRows : Form::kCells;
    }
    if (form_ == Form::kCells) begin_cells();
    if (form_ == Form::kKeys || grads.dkey_bias.given()) {
      key_sums_ = Buffer<double>(p.Hq * key_tiles.total() * kTileKeys);
      std::fill_n(key_sums_.get(), p.Hq * key_tiles.total() * kTileKeys, 0.0);
    }
    if (form_ == Form::kRows) {
      row_sums_ = Buffer<double>(p.Hq * row_tiles.total() * kTileRows);
      std::fill_n(row_sums_.get(), p.Hq * row_tiles.total() * kTileRows, 0.0);
    }
  }

  bool wanted() const { return grads_.dbias.given() || grads_.dkey_bias.given(); }
  /// Whether one task must walk all sequences (all heads) because they share cells.
  bool joins_batches() const { return form_ == Form::kCells && cells_.stride_b == 0; }
  bool joins_heads() const { return form_ == Form::kCells && cells_.stride_h == 0; }

  /// Adds the tile's cells and key sums: of the own task's keys alone.
  void add_cells(const BackwardTile<T>& t, i32 b, i32 h, i32 i0, i32 j0) {
    if (form_ == Form::kCells) {
      const Rows to = cells_at(cells_, b, h, i0, j0);
      for (i32 r = 0; r < t.rows; ++r) {
        T* row = static_cast<T*>(to.data) + r * to.stride;
        for (i32 c = 0; c < t.keys; ++c) row[c * to.stride_d] += t.dscore[r * kTileKeys + c];
      }
    }
    if (key_sums_.get()) {
      T of_tile[kTileKeys] = {};
      for (i32 r = 0; r < t.rows; ++r) {
        for (i32 c = 0; c < t.keys; ++c) of_tile[c] += t.dscore[r * kTileKeys + c];
      }
      const i64 first = (h * key_tiles_.total() + key_tiles_.first(b)) * kTileKeys + j0;
      for (i32 c = 0; c < t.keys; ++c) key_sums_.get()[first + c] += of_tile[c];
    }
  }
  /// Adds the tile's row sums; tasks come in the order of their keys.
  void add_rows(const BackwardTile<T>& t, i32 b, i32 h, i32 n) {
    if (form_ != Form::kRows) return;
    const i64 first = (h * row_tiles_.total() + row_tiles_.first(b) + n) * kTileRows;
    for (i32 r = 0; r < t.rows; ++r) {
      T of_tile = 0;
      for (i32 c = 0; c < t.keys; ++c) of_tile += t.dscore[r * kTileKeys + c];
      row_sums_.get()[first + r] += of_tile;
    }
  }

  void finish(int threads) {
    const CellView& d = grads_.dbias;
    if (form_ == Form::kCells) finish_cells(threads);
    if (form_ == Form::kKeys || form_ == Form::kRows) {
      HeadView to;
      to.data = d.data;
      to.dtype = d.dtype;
      to.stride_b = d.stride_b;
      to.stride_h = d.stride_h;
      to.stride_l = form_ == Form::kKeys ? d.stride_j : d.stride_i;
      to.head_div = d.head_div;
      if (form_ == Form::kKeys) {
        reduce(
            threads, key_sums_, key_tiles_, to, false, [](const Frame& f) { return f.num_keys; },
            call_.p.Lk);
      } else {
        reduce(
            threads, row_sums_, row_tiles_, to, false, [](const Frame& f) { return f.num_rows; },
            call_.p.Lq);
      }
    }
    if (grads_.dkey_bias.given()) {
      reduce(
          threads, key_sums_, key_tiles_, grads_.dkey_bias, call_.p.varlen,
          [](const Frame& f) { return f.num_keys; }, call_.p.Lk);
    }
  }

 private:
  enum class Form { kNone, kCells, kKeys, kRows };

  i32 num_b() const { return grads_.dbias.stride_b == 0 ? 1 : call_.p.B; }
  i32 num_h() const { return grads_.dbias.stride_h == 0 ? 1 : call_.p.Hq / grads_.dbias.head_div; }

  void begin_cells() {
    const AttentionProblem& p = call_.p;
    cells_ = grads_.dbias;
    if (cells_.dtype != kDTypeOf<T>) {
      const i64 area = i64{p.Lq} * p.Lk;
      copy_ = Buffer<T>(num_b() * num_h() * area + call_.kernels.lanes);
      cells_.data = copy_.get();
      cells_.dtype = kDTypeOf<T>;
      cells_.stride_b = cells_.stride_b ? num_h() * area : 0;
      cells_.stride_h = cells_.stride_h ? area : 0;
      cells_.stride_i = p.Lk;
      cells_.stride_j = 1;
    }
    each_row([&](i32 b, i32 h, i32 i) {
      const Rows row = cells_at(cells_, b, h, i, 0);
      for (i32 j = 0; j < p.Lk; ++j) static_cast<T*>(row.data)[j * row.stride_d] = 0;
    });
  }
  void finish_cells(int) {
    if (!copy_.get()) return;
    each_row([&](i32 b, i32 h, i32 i) {
      call_.kernels.unpack(static_cast<const T*>(cells_at(cells_, b, h, i, 0).data), call_.p.Lk, 1,
                           call_.p.Lk, nullptr, cells_at(grads_.dbias, b, h, i, 0));
    });
  }
  template <class F>
  void each_row(F f) {
    for (i32 b = 0; b < num_b(); ++b) {
      for (i32 h = 0; h < num_h(); ++h) {
        for (i32 i = 0; i < call_.p.Lq; ++i) f(b, h * (call_.p.Hq / num_h()), i);
      }
    }
  }

  /// Writes sums over the heads and sequences that share an element of `to`, a tensor over (b, h,
  /// token); one without a token dim (stride 0) gets the sum of all tokens. packed: the sequences
  /// of a varlen call stand one after another in `to`.
  template <class Length>
  void reduce(int threads, const Buffer<double>& sums, const TileIndex& tiles, const HeadView& to,
              bool packed, Length length, i32 longest) {
    const AttentionProblem& p = call_.p;
    const i32 joined_b = !packed && to.stride_b == 0 ? p.B : 1;
    const i32 joined_h = to.stride_h == 0 ? p.Hq : to.head_div;
    const i64 num_h = p.Hq / joined_h;
    for_each(threads, p.B / joined_b * num_h, [&](i64 n) {
      const i32 b0 = static_cast<i32>(n / num_h) * joined_b;
      const i32 h0 = static_cast<i32>(n % num_h) * joined_h;
      const Buffer<double> total(longest);
      std::fill_n(total.get(), longest, 0.0);
      for (i32 b = b0; b < b0 + joined_b; ++b) {
        for (i32 h = h0; h < h0 + joined_h; ++h) {
          const double* from = sums.get() + (h * tiles.total() + tiles.first(b)) * kTileKeys;
          const i32 end = length(p.mask->frame(b, h));
          for (i32 l = 0; l < end; ++l) total.get()[l] += from[l];
        }
      }
      const Frame f = p.mask->frame(b0, h0);
      const Rows at = rows_at(to, b0, h0, packed ? f.k_start : 0);
      if (to.stride_l == 0) {
        for (i32 l = 1; l < longest; ++l) total.get()[0] += total.get()[l];
        if (longest > 0) store_element(at, 0, 0, total.get()[0]);
      } else {
        const Buffer<T> rounded(longest + call_.kernels.lanes);
        std::fill_n(std::copy_n(total.get(), longest, rounded.get()), call_.kernels.lanes, T(0));
        call_.kernels.unpack(rounded.get(), 0, 1, packed ? length(f) : longest, nullptr,
                             {at.data, at.dtype, 0, to.stride_l});
      }
    });
  }

  static_assert(kTileRows == kTileKeys);  // reduce() counts on it
  const Call<T>& call_;
  const BackwardViews& grads_;
  const TileIndex &row_tiles_, &key_tiles_;
  Form form_ = Form::kNone;
  CellView cells_;  // where cells are summed
  Buffer<T> copy_;
  Buffer<double> key_sums_, row_sums_;  // [Hq][tiles][kTileKeys]
};

}  // namespace jali::cpu
