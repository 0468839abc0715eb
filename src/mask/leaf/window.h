// Window: a row sees the keys within a distance of its own position, both ends included.
#pragma once

#include "mask/leaf.h"

namespace jali::leaf {

/// Key j is visible to the row at position p = i + offset when p - left <= j <= p + right.
struct Window {
  static constexpr const char* kName = "window";
  static constexpr bool kRowsReadTables = false, kColsReadTables = false, kEven = true,
                        kRelative = true;
  Scalar left, right, offset;

  template <class V>
  void fields(V&& v) {
    v("left", left, "H?", "keys before the position, int or [H]; absent: unlimited");
    v("right", right, "H?", "keys after the position, int or [H]; absent: unlimited");
    v("offset", offset, "B?", "position of row 0, int or [B]; absent: the call's q_offset");
  }

  // The position p sees [p - back, p + ahead]; kFar: unlimited.
  JALI_HD i32 back(const Frame& f) const { return left.given ? left.at_head(f.h) : kFar; }
  JALI_HD i32 ahead(const Frame& f) const { return right.given ? right.at_head(f.h) : kFar; }
  JALI_HD static i32 minus(i32 p, i32 n) { return n == kFar ? -kFar : saturate(i64(p) - n); }
  JALI_HD static i32 plus(i32 p, i32 n) { return n == kFar ? kFar : saturate(i64(p) + n); }

  struct Row {
    i32 lo, hi;
  };
  struct Col {
    i32 j;
  };
  JALI_HD Row row(const Frame& f, i32 i) const {
    i32 p = position(f, offset, i);
    return {minus(p, back(f)), plus(p, ahead(f))};
  }
  JALI_HD Col col(const Frame&, i32 j) const { return {j}; }
  JALI_HD bool visible(Row r, Col c) const { return (r.lo <= c.j) & (c.j <= r.hi); }
  template <class Keys>
  JALI_HD auto among(Row r, Keys keys) const {
    return keys.between(r.lo, r.hi);
  }
  template <class Rows>
  JALI_HD auto seen_by(const Frame& f, i32 j, Rows rows) const {
    const Span span = row_span(f, {j, j});
    return rows.between(span.begin, span.end - 1);
  }
  JALI_HD u64 word(Row r, i32 j, i32 n) const { return among(r, Run{j, n}); }

  /// First and last key of the first row and of the last row; both ends grow with the row.
  struct RowBlock {
    Range first, last;
  };
  using ColBlock = Range;
  JALI_HD RowBlock rows(const Frame& f, i32 i0, i32 i1) const {
    Row a = row(f, i0), z = row(f, i1 - 1);
    return {{a.lo, a.hi}, {z.lo, z.hi}};
  }
  JALI_HD ColBlock cols(const Frame&, i32 j0, i32 j1) const { return {j0, j1 - 1}; }
  JALI_HD Tile classify(const Frame&, RowBlock r, ColBlock c) const {
    bool empty = c.lo > r.last.hi || c.hi < r.first.lo || r.first.hi < r.first.lo;
    return tile_of(empty, c.lo >= r.last.lo && c.hi <= r.first.hi);
  }
  JALI_HD Span key_span(const Frame&, RowBlock r) const {
    return {r.first.lo, r.last.hi == kFar ? kFar : saturate(i64(r.last.hi) + 1)};
  }
  JALI_HD Span row_span(const Frame& f, ColBlock c) const {
    i64 p0 = position(f, offset, 0);
    i32 a = ahead(f), b = back(f);
    return {a == kFar ? -kFar : saturate(c.lo - i64(a) - p0),
            b == kFar ? kFar : saturate(c.hi + i64(b) - p0 + 1)};
  }
};

}  // namespace jali::leaf
