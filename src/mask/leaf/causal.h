// Causal: a row sees the keys at or before its own position.
#pragma once

#include "mask/leaf.h"

namespace jali::leaf {

/// Key j is visible to the row at position p = i + offset when j <= p.
struct Causal {
  static constexpr const char* kName = "causal";
  static constexpr bool kRowsReadTables = false, kColsReadTables = false, kEven = true,
                        kRelative = true;
  Scalar offset;

  template <class V>
  void fields(V&& v) {
    v("offset", offset, "B?", "position of row 0, int or [B]; absent: the call's q_offset");
  }

  struct Row {
    i32 p;
  };
  struct Col {
    i32 j;
  };
  JALI_HD Row row(const Frame& f, i32 i) const { return {position(f, offset, i)}; }
  JALI_HD Col col(const Frame&, i32 j) const { return {j}; }
  JALI_HD bool visible(Row r, Col c) const { return c.j <= r.p; }
  template <class Keys>
  JALI_HD auto among(Row r, Keys keys) const {
    return keys.between(-kFar, r.p);
  }
  template <class Rows>
  JALI_HD auto seen_by(const Frame& f, i32 j, Rows rows) const {
    return rows.between(saturate(i64(j) - position(f, offset, 0)), kFar);
  }
  JALI_HD u64 word(Row r, i32 j, i32 n) const { return among(r, Run{j, n}); }

  using RowBlock = Range;  // positions
  using ColBlock = Range;  // keys
  JALI_HD RowBlock rows(const Frame& f, i32 i0, i32 i1) const {
    i32 p = position(f, offset, i0);
    return {p, p + (i1 - i0) - 1};
  }
  JALI_HD ColBlock cols(const Frame&, i32 j0, i32 j1) const { return {j0, j1 - 1}; }
  JALI_HD Tile classify(const Frame&, RowBlock r, ColBlock c) const {
    return tile_of(c.lo > r.hi, c.hi <= r.lo);
  }
  JALI_HD Span key_span(const Frame&, RowBlock r) const { return {-kFar, saturate(i64(r.hi) + 1)}; }
  JALI_HD Span row_span(const Frame& f, ColBlock c) const {
    return {saturate(i64(c.lo) - position(f, offset, 0)), kFar};
  }
};

}  // namespace jali::leaf
