// The rules of one tile: its class and mask bits, its biases, its dropout. One per worker.
#pragma once

#include <optional>

#include "cpu/call.h"

namespace jali::cpu {

template <class T>
class TileRules {
 public:
  TileRules(const Call<T>& call, Bump& scratch)
      : call_(call),
        bits_(scratch.take<u64>(call.max_rows)),
        kept_(call.threshold > 0 ? scratch.take<u64>(call.max_rows) : nullptr),
        bias_(call.p.bias.given() ? scratch.take<T>(i64{call.max_rows} * kTileKeys) : nullptr),
        key_bias_(call.p.key_bias.given() ? scratch.take<T>(kTileKeys) : nullptr) {}

  void set_head(i32 b, i32 h) {
    const AttentionProblem& p = call_.p;
    frame_ = p.mask->frame(b, h);
    if (p.mask->trivial()) return;
    if (!cursor_) cursor_.emplace(*p.mask);
    cursor_->set_frame(b, h);
  }
  const Frame& frame() const { return frame_; }
  void set_rows(i32 i0, i32 rows) {
    i0_ = i0;
    rows_ = rows;
    if (cursor_) cursor_->set_rows(i0, i0 + rows);
  }
  void set_keys(i32 j0, i32 keys) {
    j0_ = j0;
    keys_ = keys;
    if (cursor_) cursor_->set_cols(j0, j0 + keys);
  }
  /// Keys that the rows reach at all; rows that reach the keys at all.
  Span key_span() { return cursor_ ? cursor_->key_span() : Span{0, frame_.num_keys}; }
  Span row_span() { return cursor_ ? cursor_->row_span() : Span{0, frame_.num_rows}; }

  /// The first key tile from j on (before `end`) that the rows may see something of, row tile that
  /// may see something of the keys. Asks for wide ranges first, so that far-off tiles are passed
  /// over together. Leaves the keys (rows) set to anything.
  i32 next_key_tile(i32 j, i32 end) {
    return next_tile(j, end, [&](i32 from, i32 to) {
      cursor_->set_cols(from * kTileKeys, min_of(to * kTileKeys, frame_.num_keys));
    });
  }
  i32 next_row_tile(i32 r, i32 end) {
    return next_tile(r, end, [&](i32 from, i32 to) {
      cursor_->set_rows(from * kTileRows, min_of(to * kTileRows, frame_.num_rows));
    });
  }

  /// The rules of the tile (rows, keys); false if nothing in it is visible.
  bool prepare(ScoreRules<T>& rules) {
    const AttentionProblem& p = call_.p;
    rules = {};
    if (cursor_) {
      Tile tile = cursor_->classify();
      if (tile == Tile::kPartial) tile = cursor_->fill(bits_, 1);
      if (tile == Tile::kEmpty) return false;
      if (tile == Tile::kPartial) {
        rules.visible = bits_;
        rules.visible_row = 1;
      }
    }
    if (!rules.visible && keys_ % call_.kernels.lanes != 0) {
      tail_ = (u64{1} << keys_) - 1;
      rules.visible = &tail_;
    }
    rules.softcap = static_cast<T>(p.softcap);
    if (p.bias.given()) {
      const Rows from = cells_at(p.bias, frame_.b, frame_.h, i0_, j0_);
      call_.kernels.pack(from, from.stride == 0 ? 1 : rows_, keys_, bias_, kTileKeys);
      rules.bias = bias_;
      rules.bias_row = from.stride == 0 ? 0 : kTileKeys;
    }
    if (p.key_bias.given()) {
      Rows from = rows_at(p.key_bias, frame_.b, frame_.h, frame_.k_start + i64{j0_});
      from.stride_d = from.stride;
      call_.kernels.pack(from, 1, keys_, key_bias_, kTileKeys);
      rules.key_bias = key_bias_;
    }
    if (p.alibi_slopes) {
      rules.slope = static_cast<T>(p.alibi_slopes[frame_.h]);
      rules.distance = i64{i0_} + frame_.q_offset - j0_;
    }
    if (call_.threshold > 0) {
      call_.kernels.dropout_bits(p.seed, call_.threshold, frame_.b, frame_.h, i0_, rows_, j0_,
                                 kept_);
      rules.kept = kept_;
      rules.keep_scale = static_cast<T>(dropout_scale(call_.threshold));
    }
    return true;
  }

 private:
  template <class Set>
  i32 next_tile(i32 n, i32 end, Set set) {
    if (!cursor_) return n;
    auto is_empty = [&](i32 width) {
      if (n % width != 0 || n + width > end) return false;
      set(n, n + width);
      return cursor_->classify() == Tile::kEmpty;
    };
    while (n < end) {
      if (is_empty(256)) {
        n += 256;
      } else if (is_empty(16)) {
        n += 16;
      } else {
        break;
      }
    }
    return n;
  }

  const Call<T>& call_;
  std::optional<MaskCursor> cursor_;
  Frame frame_;
  i32 i0_ = 0, rows_ = 0, j0_ = 0, keys_ = 0;
  u64 tail_ = 0;
  u64 *bits_, *kept_;
  T *bias_, *key_bias_;
};

}  // namespace jali::cpu
