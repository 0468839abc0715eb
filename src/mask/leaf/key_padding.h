// Key padding: keys that are switched off for every row.
#pragma once

#include "mask/leaf.h"

namespace jali::leaf {

/// Key j is visible when keep[b, j].
struct KeyPadding {
  static constexpr const char* kName = "key_padding";
  static constexpr bool kRowsReadTables = false, kColsReadTables = true;
  TokenTable<u8> keep;

  template <class V>
  void fields(V&& v) {
    v("keep", keep, "BK", "bool [B, Lk]: the keys that may be seen");
  }

  struct Row {};
  struct Col {
    i32 keep;
  };
  JALI_HD Row row(const Frame&, i32) const { return {}; }
  JALI_HD Col col(const Frame& f, i32 j) const { return {keep.at(f.b, f.h, f.k_start, j) != 0}; }
  JALI_HD bool visible(Row, Col c) const { return c.keep != 0; }
  template <class Rows>
  JALI_HD auto seen_by(const Frame& f, i32 j, Rows rows) const {
    return rows.between(col(f, j).keep ? -kFar : kFar, kFar);
  }

  using RowBlock = Row;
  /// Is any key kept, are all?
  struct ColBlock {
    i32 any, all;
  };
  JALI_HD static ColBlock merge(ColBlock a, ColBlock b) { return {a.any | b.any, a.all & b.all}; }
  JALI_HD RowBlock rows(const Frame&, i32, i32) const { return {}; }
  JALI_HD ColBlock cols(const Frame& f, i32 j0, i32 j1) const {
    ColBlock x{0, 1};
    for (i32 j = j0; j < j1; ++j) {
      i32 k = col(f, j).keep;
      x = merge(x, {k, k});
    }
    return x;
  }
  JALI_HD Tile classify(const Frame&, RowBlock, ColBlock c) const {
    return tile_of(!c.any, c.all != 0);
  }
  JALI_HD Span key_span(const Frame&, RowBlock) const { return everything(); }
  JALI_HD Span row_span(const Frame&, ColBlock c) const {
    return c.any ? everything() : Span{0, 0};
  }
};

}  // namespace jali::leaf
