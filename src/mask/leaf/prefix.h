// Prefix: the first keys of a sequence, for every row. Also attention sinks and key lengths.
#pragma once

#include "mask/leaf.h"

namespace jali::leaf {

/// Key j is visible when j < length.
struct Prefix {
  static constexpr const char* kName = "prefix";
  static constexpr bool kRowsReadTables = false, kColsReadTables = false;
  Scalar length;

  template <class V>
  void fields(V&& v) {
    v("length", length, "B", "number of visible keys, int or [B]");
  }

  struct Row {
    i32 length;
  };
  struct Col {
    i32 j;
  };
  JALI_HD Row row(const Frame& f, i32) const { return {length.at_batch(f.b)}; }
  JALI_HD Col col(const Frame&, i32 j) const { return {j}; }
  JALI_HD bool visible(Row r, Col c) const { return c.j < r.length; }
  template <class Keys>
  JALI_HD auto among(Row r, Keys keys) const {
    return keys.between(-kFar, max_of(r.length, 0) - 1);
  }
  template <class Rows>
  JALI_HD auto seen_by(const Frame& f, i32 j, Rows rows) const {
    return rows.between(j < length.at_batch(f.b) ? -kFar : kFar, kFar);
  }
  JALI_HD u64 word(Row r, i32 j, i32 n) const { return among(r, Run{j, n}); }

  using RowBlock = Row;
  using ColBlock = Range;
  JALI_HD RowBlock rows(const Frame& f, i32 i0, i32) const { return row(f, i0); }
  JALI_HD ColBlock cols(const Frame&, i32 j0, i32 j1) const { return {j0, j1 - 1}; }
  JALI_HD Tile classify(const Frame&, RowBlock r, ColBlock c) const {
    return tile_of(c.lo >= r.length, c.hi < r.length);
  }
  JALI_HD Span key_span(const Frame&, RowBlock r) const { return {-kFar, r.length}; }
  JALI_HD Span row_span(const Frame& f, ColBlock c) const {
    return c.lo < length.at_batch(f.b) ? everything() : Span{0, 0};
  }
};

}  // namespace jali::leaf
