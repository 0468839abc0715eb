// Block bitset: a table of blocks of cells, each wholly visible or wholly hidden.
#pragma once

#include "mask/leaf.h"

namespace jali::leaf {

/// Key j is visible to row i when blocks[b, h, i / block_rows, j / block_keys].
struct BlockBitset {
  static constexpr const char* kName = "block_bitset";
  static constexpr bool kRowsReadTables = false, kColsReadTables = false;
  static constexpr bool kByBlocks = true, kAnywhere = true;
  GridTable<u8> blocks;
  Scalar block_rows, block_keys;

  template <class V>
  void fields(V&& v) {
    v("blocks", blocks, "BHRC", "bool [B, H, Lq / block_rows, Lk / block_keys], rounded up");
    v("block_rows", block_rows, "", "rows per block, at least 1");
    v("block_keys", block_keys, "", "keys per block, at least 1");
  }
  JALI_HD const char* valid(i32 Lq, i32 Lk) const {
    i32 m = block_rows.value, n = block_keys.value;
    if (m < 1 || n < 1) return "the block must be at least 1 row by 1 key";
    if (blocks.num_rows > 1 && i64(blocks.num_rows) * m < Lq)
      return "blocks has too few block rows: ceil(Lq / block_rows) are needed (or 1, for all)";
    if (blocks.num_cols > 1 && i64(blocks.num_cols) * n < Lk)
      return "blocks has too few block columns: ceil(Lk / block_keys) are needed (or 1, for all)";
    return nullptr;
  }

  struct Row {
    const u8* cells;
  };
  struct Col {
    i64 at;
  };
  JALI_HD Row row(const Frame& f, i32 i) const {
    return {blocks.row(f.b, f.h, i / block_rows.value)};
  }
  JALI_HD Col col(const Frame&, i32 j) const {
    return {clamp_to(j / block_keys.value, 0, blocks.num_cols - 1) * blocks.stride_c};
  }
  JALI_HD bool visible(Row r, Col c) const { return r.cells[c.at] != 0; }

  JALI_HD u64 word(Row r, i32 j, i32 n) const {
    u64 bits = 0;
    for (i32 at = j; at < j + n;) {
      i32 end = min_of((at / block_keys.value + 1) * i64(block_keys.value), i64(j) + n);
      if (visible(r, col({}, at))) bits |= bit_range(at - j, end - j);
      at = end;
    }
    return bits;
  }

  using RowBlock = Range;  // block rows
  using ColBlock = Range;  // block columns
  JALI_HD RowBlock rows(const Frame&, i32 i0, i32 i1) const {
    i32 last = blocks.num_rows - 1;
    return {min_of(i0 / block_rows.value, last), min_of((i1 - 1) / block_rows.value, last)};
  }
  JALI_HD ColBlock cols(const Frame&, i32 j0, i32 j1) const {
    i32 last = blocks.num_cols - 1;
    return {min_of(j0 / block_keys.value, last), min_of((j1 - 1) / block_keys.value, last)};
  }
  /// Looks at the blocks that the tile touches, until two differ.
  JALI_HD Tile classify(const Frame& f, RowBlock r, ColBlock c) const {
    bool any = false, all = true;
    for (i32 y = r.lo; y <= r.hi; ++y) {
      const u8* cells = blocks.row(f.b, f.h, y);
      for (i32 x = c.lo; x <= c.hi; ++x) {
        bool seen = cells[x * blocks.stride_c] != 0;
        any |= seen;
        all &= seen;
        if (any && !all) return Tile::kPartial;
      }
    }
    return tile_of(!any, all);
  }
  // Finding the ends of a block row takes as long as classifying its tiles.
  JALI_HD Span key_span(const Frame&, RowBlock) const { return everything(); }
  JALI_HD Span row_span(const Frame&, ColBlock) const { return everything(); }
};

}  // namespace jali::leaf
