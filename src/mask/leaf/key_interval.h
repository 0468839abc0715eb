// Key interval: each key says which rows may see it. Eviction, FlashMask columns, dynamic masks.
#pragma once

#include "mask/leaf.h"

namespace jali::leaf {

/// Key j is visible when start[b, h, j] <= i + offset < end[b, h, j]; an absent table does not
/// restrict.
struct KeyInterval {
  static constexpr const char* kName = "key_interval";
  static constexpr bool kRowsReadTables = false, kColsReadTables = true;
  TokenTable<i32> start, end;
  Scalar offset;

  template <class V>
  void fields(V&& v) {
    v("start", start, "BHK?",
      "first position that sees the key [B, H, Lk]; absent: from the first");
    v("end", end, "BHK?", "first position that no longer sees it [B, H, Lk]; absent: to the last");
    v("offset", offset, "B?", "position of row 0, int or [B]; absent: the call's q_offset");
  }

  struct Row {
    i32 p;
  };
  struct Col {
    i32 start, end;
  };
  JALI_HD Row row(const Frame& f, i32 i) const { return {position(f, offset, i)}; }
  JALI_HD Col col(const Frame& f, i32 j) const {
    return {start.given() ? start.at(f.b, f.h, f.k_start, j) : -kFar,
            end.given() ? end.at(f.b, f.h, f.k_start, j) : kFar};
  }
  JALI_HD bool visible(Row r, Col c) const { return (c.start <= r.p) & (r.p < c.end); }
  template <class Rows>
  JALI_HD auto seen_by(const Frame& f, i32 j, Rows rows) const {
    const Col c = col(f, j);
    const i64 p0 = position(f, offset, 0);
    return rows.between(c.start == -kFar ? -kFar : saturate(c.start - p0),
                        c.end == kFar ? kFar : saturate(c.end - p0 - 1));
  }

  using RowBlock = Range;  // positions
  using ColBlock = Intervals;
  JALI_HD static ColBlock merge(ColBlock a, ColBlock b) { return jali::merge(a, b); }
  JALI_HD RowBlock rows(const Frame& f, i32 i0, i32 i1) const {
    i32 p = position(f, offset, i0);
    return {p, p + (i1 - i0) - 1};
  }
  JALI_HD ColBlock cols(const Frame& f, i32 j0, i32 j1) const {
    Col c = col(f, j0);
    ColBlock x = intervals_of({c.start, c.end});
    for (i32 j = j0 + 1; j < j1; ++j) {
      c = col(f, j);
      x = merge(x, intervals_of({c.start, c.end}));
    }
    return x;
  }
  JALI_HD Tile classify(const Frame&, RowBlock r, ColBlock c) const { return jali::classify(c, r); }
  JALI_HD Span key_span(const Frame&, RowBlock) const { return everything(); }
  JALI_HD Span row_span(const Frame& f, ColBlock c) const {
    i64 p0 = position(f, offset, 0);
    return {c.reach.begin == -kFar ? -kFar : saturate(c.reach.begin - p0),
            c.reach.end == kFar ? kFar : saturate(c.reach.end - p0)};
  }
};

}  // namespace jali::leaf
