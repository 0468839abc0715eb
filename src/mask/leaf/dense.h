// Dense: a table of cells, for masks that nothing shorter describes.
#pragma once

#include "mask/leaf.h"

namespace jali::leaf {

/// Key j is visible to row i when tensor[b, h, i, j].
struct Dense {
  static constexpr const char* kName = "dense";
  static constexpr bool kRowsReadTables = true, kColsReadTables = true;
  static constexpr bool kUnsure = true, kAnywhere = true;
  GridTable<u8> tensor;

  template <class V>
  void fields(V&& v) {
    v("tensor", tensor, "BHQK", "bool [B, H, Lq, Lk], each dim may be 1");
  }

  struct Row {
    const u8* cells;
  };
  struct Col {
    i64 at;
  };
  JALI_HD Row row(const Frame& f, i32 i) const { return {tensor.row(f.b, f.h, i)}; }
  JALI_HD Col col(const Frame&, i32 j) const {
    return {clamp_to(j, 0, tensor.num_cols - 1) * tensor.stride_c};
  }
  JALI_HD bool visible(Row r, Col c) const { return r.cells[c.at] != 0; }
#if defined(__CUDACC_RTC__)
  /// 64 cells that lie side by side come as aligned words, shifted into place.
  __device__ u64 word(Row r, i32 j, i32 n) const {
    u64 bits = 0;
    if (tensor.stride_c != 1 || n < 64 || j + 64 > tensor.num_cols) {
      for (i32 c = 0; c < n; ++c) bits |= u64{visible(r, col({}, j + c))} << c;
      return bits;
    }
    const u64 at = reinterpret_cast<u64>(r.cells + j);
    const u32* const words = reinterpret_cast<const u32*>(at & ~u64{3});
    const u32 shift = 8 * static_cast<u32>(at & 3);
    u32 low = words[0];
#pragma unroll 8
    for (i32 c = 0; c < 16; ++c) {
      const u32 high = c < 15 || shift ? words[c + 1] : 0;
      // Four bytes, each 0 or 1, to four bits.
      const u32 four = __vsetne4(__funnelshift_r(low, high, shift), 0) * 0x01020408u >> 24;
      bits |= u64{four} << 4 * c;
      low = high;
    }
    return bits;
  }
#endif

  /// Whether any and all cells of these rows (keys) are visible, where the table has one value per
  /// row (per key). Otherwise nothing is known short of reading every cell.
  struct Block {
    i32 any, all;
  };
  using RowBlock = Block;
  using ColBlock = Block;
  JALI_HD static Block merge(Block a, Block b) { return {a.any | b.any, a.all & b.all}; }
  JALI_HD RowBlock rows(const Frame& f, i32 i0, i32 i1) const {
    if (tensor.num_cols > 1) return {1, 0};
    Block x{0, 1};
    for (i32 i = i0; i < i1; ++i) {
      i32 seen = tensor.at(f.b, f.h, i, 0) != 0;
      x = merge(x, {seen, seen});
    }
    return x;
  }
  JALI_HD ColBlock cols(const Frame& f, i32 j0, i32 j1) const {
    if (tensor.num_rows > 1) return {1, 0};
    Block x{0, 1};
    for (i32 j = j0; j < j1; ++j) {
      i32 seen = tensor.at(f.b, f.h, 0, j) != 0;
      x = merge(x, {seen, seen});
    }
    return x;
  }
  JALI_HD Tile classify(const Frame&, RowBlock r, ColBlock c) const {
    return tile_of(!(r.any & c.any), r.all | c.all);
  }
  JALI_HD Span key_span(const Frame&, RowBlock r) const {
    return r.any ? everything() : Span{0, 0};
  }
  JALI_HD Span row_span(const Frame&, ColBlock c) const {
    return c.any ? everything() : Span{0, 0};
  }
};

}  // namespace jali::leaf
