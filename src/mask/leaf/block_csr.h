// Block CSR: the visible blocks of each block row, as a sorted list. Also token lists (blocks of
// one key).
#pragma once

#include "mask/leaf.h"

namespace jali::leaf {

/// Key j is visible to row i when j / block_keys is in the list of block row y = i / block_rows:
/// col_idx[b, h, row_ptr[b, h, y] : row_ptr[b, h, y + 1]], strictly increasing.
struct BlockCsr {
  static constexpr const char* kName = "block_csr";
  static constexpr bool kRowsReadTables = false, kColsReadTables = false;
  static constexpr bool kByBlocks = true, kAnywhere = true;
  TokenTable<i32> row_ptr, col_idx;
  Scalar block_rows, block_keys;

  template <class V>
  void fields(V&& v) {
    v("row_ptr", row_ptr, "BHP", "where each block row's list begins [B, H, block rows + 1]");
    v("col_idx", col_idx, "BHP", "block columns [B, H, n], increasing within each list");
    v("block_rows", block_rows, "", "rows per block, at least 1");
    v("block_keys", block_keys, "", "keys per block, at least 1");
  }

  /// One block row's list.
  struct Row {
    const i32* list;
    i32 count;
  };
  struct Col {
    i32 block;
  };
  /// Whatever row_ptr holds, the list lies inside col_idx.
  JALI_HD Row list(const Frame& f, i32 y) const {
    i32 begin = clamp_to(row_ptr.at(f.b, f.h, 0, y), 0, col_idx.length);
    i32 end = clamp_to(row_ptr.at(f.b, f.h, 0, y + 1), begin, col_idx.length);
    return {col_idx.data + f.b * col_idx.stride_b + (f.h / col_idx.head_div) * col_idx.stride_h +
                begin * col_idx.stride_l,
            end - begin};
  }
  JALI_HD i32 entry(Row r, i32 n) const { return r.list[n * col_idx.stride_l]; }
  /// Number of entries below x.
  JALI_HD i32 lower_bound(Row r, i32 x) const {
    i32 base = 0;
    for (i32 n = r.count; n > 0;) {
      i32 half = (n + 1) / 2;
      base += entry(r, base + half - 1) < x ? half : 0;
      n -= half;
    }
    return base;
  }
  JALI_HD Row row(const Frame& f, i32 i) const { return list(f, i / block_rows.value); }
  JALI_HD Col col(const Frame&, i32 j) const { return {j / block_keys.value}; }
  JALI_HD bool visible(Row r, Col c) const {
    i32 at = lower_bound(r, c.block);
    return at < r.count && entry(r, at) == c.block;
  }

  JALI_HD u64 word(Row r, i32 j, i32 n) const {
    u64 bits = 0;
    i64 end = i64(j) + n, size = block_keys.value;
    for (i32 at = lower_bound(r, j / block_keys.value); at < r.count; ++at) {
      i64 key = entry(r, at) * size;
      if (key >= end) break;
      bits |= bit_range(static_cast<i32>(max_of<i64>(key - j, 0)),
                        static_cast<i32>(min_of<i64>(key + size - j, n)));
    }
    return bits;
  }

  JALI_HD const char* valid(i32 Lq, i32) const {
    i32 m = block_rows.value, n = block_keys.value;
    if (m < 1 || n < 1) return "the block must be at least 1 row by 1 key";
    if (row_ptr.length < ceil_div(Lq, m) + 1)
      return "row_ptr is too short: ceil(Lq / block_rows) + 1 entries are needed";
    return nullptr;
  }
  JALI_HD const char* valid_tables(const Frame& f) const {
    for (i32 y = 0; y < ceil_div(f.num_rows, block_rows.value); ++y) {
      i32 begin = row_ptr.at(f.b, f.h, 0, y), end = row_ptr.at(f.b, f.h, 0, y + 1);
      if (begin < 0 || begin > end || end > col_idx.length)
        return "row_ptr must not decrease and must stay within 0 and the length of col_idx";
      Row r = list(f, y);
      for (i32 x = 0; x < r.count; ++x)
        if (entry(r, x) < 0 || (x > 0 && entry(r, x) <= entry(r, x - 1)))
          return "col_idx must not be negative and must increase strictly within each list: sort "
                 "every list and drop its duplicates";
    }
    return nullptr;
  }

  using RowBlock = Range;  // block rows
  using ColBlock = Range;  // block columns
  JALI_HD RowBlock rows(const Frame&, i32 i0, i32 i1) const {
    return {i0 / block_rows.value, (i1 - 1) / block_rows.value};
  }
  JALI_HD ColBlock cols(const Frame&, i32 j0, i32 j1) const {
    return {j0 / block_keys.value, (j1 - 1) / block_keys.value};
  }
  /// Counts the entries within the tile's block columns, list by list.
  JALI_HD Tile classify(const Frame& f, RowBlock r, ColBlock c) const {
    bool any = false, all = true;
    for (i32 y = r.lo; y <= r.hi; ++y) {
      Row x = list(f, y);
      i32 count = lower_bound(x, c.hi + 1) - lower_bound(x, c.lo);
      any |= count > 0;
      all &= count == c.hi - c.lo + 1;
      if (any && !all) return Tile::kPartial;
    }
    return tile_of(!any, all);
  }
  /// From the first block of any list to the last one.
  JALI_HD Span key_span(const Frame& f, RowBlock r) const {
    i64 lo = kFar, hi = -1;
    for (i32 y = r.lo; y <= r.hi; ++y) {
      Row x = list(f, y);
      if (x.count == 0) continue;
      lo = min_of<i64>(lo, entry(x, 0));
      hi = max_of<i64>(hi, entry(x, x.count - 1));
    }
    return {saturate(lo * block_keys.value), saturate((hi + 1) * block_keys.value)};
  }
  JALI_HD Span row_span(const Frame&, ColBlock) const { return everything(); }
};

}  // namespace jali::leaf
