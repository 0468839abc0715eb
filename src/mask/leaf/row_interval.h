// Row interval: each row sees one run of keys.
#pragma once

#include "mask/leaf.h"

namespace jali::leaf {

/// Key j is visible to row i when start[b, h, i] <= j < end[b, h, i]; an absent table does not
/// restrict.
struct RowInterval {
  static constexpr const char* kName = "row_interval";
  static constexpr bool kRowsReadTables = true, kColsReadTables = false;
  TokenTable<i32> start, end;

  template <class V>
  void fields(V&& v) {
    v("start", start, "BHQ?", "first key of each row [B, H, Lq]; absent: from the first");
    v("end", end, "BHQ?", "end of its keys [B, H, Lq], exclusive; absent: to the last");
  }

  struct Row {
    i32 start, end;
  };
  struct Col {
    i32 j;
  };
  JALI_HD Row row(const Frame& f, i32 i) const {
    return {start.given() ? start.at(f.b, f.h, f.q_start, i) : -kFar,
            end.given() ? end.at(f.b, f.h, f.q_start, i) : kFar};
  }
  JALI_HD Col col(const Frame&, i32 j) const { return {j}; }
  JALI_HD bool visible(Row r, Col c) const { return (r.start <= c.j) & (c.j < r.end); }
  JALI_HD u64 word(Row r, i32 j, i32 n) const {
    return key_bits(r.start, max_of(r.end, -kFar) - 1, j, n);
  }

  using RowBlock = Intervals;
  using ColBlock = Range;  // keys
  JALI_HD static RowBlock merge(RowBlock a, RowBlock b) { return jali::merge(a, b); }
  JALI_HD RowBlock rows(const Frame& f, i32 i0, i32 i1) const {
    Row r = row(f, i0);
    RowBlock x = intervals_of({r.start, r.end});
    for (i32 i = i0 + 1; i < i1; ++i) {
      r = row(f, i);
      x = merge(x, intervals_of({r.start, r.end}));
    }
    return x;
  }
  JALI_HD ColBlock cols(const Frame&, i32 j0, i32 j1) const { return {j0, j1 - 1}; }
  JALI_HD Tile classify(const Frame&, RowBlock r, ColBlock c) const { return jali::classify(r, c); }
  JALI_HD Span key_span(const Frame&, RowBlock r) const { return r.reach; }
  JALI_HD Span row_span(const Frame&, ColBlock) const { return everything(); }
};

}  // namespace jali::leaf
