// The mask of a call without a mask: every cell is visible.
#pragma once

#include "mask/leaf.h"

namespace jali::cuda {

struct NoMask {
  static constexpr bool kRowsReadTables = false, kColsReadTables = false;
  struct Row {};
  struct Col {};
  using RowBlock = Row;
  using ColBlock = Col;
  JALI_HD Row row(const Frame&, i32) const { return {}; }
  JALI_HD Col col(const Frame&, i32) const { return {}; }
  JALI_HD bool visible(Row, Col) const { return true; }
  JALI_HD RowBlock rows(const Frame&, i32, i32) const { return {}; }
  JALI_HD ColBlock cols(const Frame&, i32, i32) const { return {}; }
  JALI_HD Tile classify(const Frame&, RowBlock, ColBlock) const { return Tile::kFull; }
  JALI_HD Span key_span(const Frame&, RowBlock) const { return everything(); }
  JALI_HD Span row_span(const Frame&, ColBlock) const { return everything(); }
};

template <class M>
constexpr bool is_no_mask = false;
template <>
constexpr bool is_no_mask<NoMask> = true;

}  // namespace jali::cuda
