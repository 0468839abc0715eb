// What every mask leaf is made of: the frame it is evaluated in, its parameters, its tile classes.
//
// A leaf is a POD struct in src/mask/leaf/<name>.h with
//   kName                                  its name, equal to the file's stem
//   fields(visitor)                        visits (name, member, dims, doc) of every parameter
//   const char* valid(Lq, Lk)              optional: what is wrong with the parameters, or null
//   const char* valid_tables(frame)        optional: the same for contents of tables (CPU only)
//   Row row(frame, i), Col col(frame, j)   what can be hoisted out of the inner loop
//   bool visible(Row, Col)                 THE MEANING; everything else follows from it
//   u64 word(Row, j, n)                    optional, where quicker than cell by cell: keys [j, j + n),
//                                          n <= 64; bit c is key j + c, the bits from n on are 0
//   RowBlock rows(frame, i0, i1)           what rows [i0, i1) can hold; i0 < i1, inside [0, Lq)
//   ColBlock cols(frame, j0, j1)           the same for keys
//   Tile classify(frame, RowBlock, ColBlock)   O(1); kPartial when unsure, never wrongly else
//   Span key_span(frame, RowBlock)         the keys that these rows can reach at all
//   Span row_span(frame, ColBlock)         the rows that can reach these keys at all
//   among(Row, keys)                       optional, where it is keys.between() of a few numbers or
//                                          keys.each() of a few steps, combined with & | ~: which of
//                                          some keys the row sees, as bits, those of no key anything;
//                                          a lone between() and what & makes of two may be a run yet.
//                                          GPU kernels call it between MMAs (light leaves)
//   seen_by(frame, j, rows)                optional, the same the other way round: which of some rows
//                                          see key j, by rows.between() or rows.each(). Of a lone between(),
//                                          or what & makes of some, GPU kernels note the two ends once, so
//                                          that these may come from tables
//   kRelative = true                       optional: row i sees key j as row i + n sees key j + n
//   kEven = true                           optional, of a leaf with seen_by(): a key is seen by about as
//                                          many rows as the next one, or fewer: the backward needs no map
//                                          to have long tiles come first, and classifies as it goes
//   kMapped = true                         optional, of a light leaf: classify() is much work, so that
//                                          the forward has tiles looked up in a map
//   kUnsure = true                         optional: classify() mostly knows nothing, so that a map of
//                                          tiles had better ask their cells
//   kAnywhere = true                       optional: what a row sees may lie anywhere among the keys, and
//                                          its neighbours see other keys: the forward loads them again
//                                          and again, so that it works on few heads at a time
//   kByBlocks = true                       optional: classify() looks at all blocks of the leaf's own
//                                          that a tile touches, so that it takes long for large tiles
// A leaf whose rows()/cols() read a table (O(i1 - i0)) says so by kRowsReadTables/kColsReadTables
// and defines merge(RowBlock, RowBlock) / merge(ColBlock, ColBlock); the plan then stores one block
// per 64 rows/keys. Host, CPU kernels and GPU kernels compile this same text.
#pragma once

#include "base/hd.h"

namespace jali {

/// One (sequence, query head) of a call. Rows 0 <= i < num_rows, keys 0 <= j < num_keys.
struct Frame {
  i32 b = 0;         // sequence
  i32 h = 0;         // query head
  i32 num_rows = 0;  // Lq of this sequence
  i32 num_keys = 0;  // Lk of this sequence
  i32 q_offset = 0;  // row i stands at position p = i + q_offset
  i32 q_start = 0;   // first token of this sequence in packed per-row tables (varlen), else 0
  i32 k_start = 0;   // the same for keys
};

/// Tile classes, ordered so that AND = min, OR = max, NOT = 2 - x (Kleene's three-valued logic).
enum class Tile : u8 { kEmpty = 0, kPartial = 1, kFull = 2 };

JALI_HD constexpr Tile tile_of(bool empty, bool full) {
  return empty ? Tile::kEmpty : (full ? Tile::kFull : Tile::kPartial);
}

/// Half-open range of keys or rows; empty when end <= begin. May exceed the bounds of the frame.
struct Span {
  i32 begin, end;
};
JALI_HD constexpr Span everything() { return {-kFar, kFar}; }

/// Inclusive range of integers, the usual content of a RowBlock or ColBlock; empty when hi < lo.
struct Range {
  i32 lo, hi;
};
JALI_HD constexpr Range merge(Range a, Range b) { return {min_of(a.lo, b.lo), max_of(a.hi, b.hi)}; }

/// Extremes of half-open intervals [lo, hi), one per row or key. An empty interval leaves `reach`
/// as it is and empties `common`.
struct Intervals {
  Span reach;   // hull of the intervals; empty when end <= begin
  Span common;  // their intersection
};
JALI_HD constexpr Intervals intervals_of(Span x) {
  return x.begin < x.end ? Intervals{x, x} : Intervals{{kFar, -kFar}, {kFar, -kFar}};
}
JALI_HD constexpr Intervals merge(Intervals a, Intervals b) {
  return {{min_of(a.reach.begin, b.reach.begin), max_of(a.reach.end, b.reach.end)},
          {max_of(a.common.begin, b.common.begin), min_of(a.common.end, b.common.end)}};
}
/// Do the points lie in no interval, or in all of them?
JALI_HD constexpr Tile classify(Intervals x, Range points) {
  return tile_of(points.hi < x.reach.begin || points.lo >= x.reach.end,
                 points.lo >= x.common.begin && points.hi < x.common.end);
}

/// Bits [begin, end) of a word, 0 <= begin < end <= 64.
JALI_HD constexpr u64 bit_range(i32 begin, i32 end) {
  return (~u64(0) >> (64 - end + begin)) << begin;
}

/// The keys lo to hi, both included, as bits of the word of keys [j, j + n), 0 < n <= 64.
JALI_HD constexpr u64 key_bits(i32 lo, i32 hi, i32 j, i32 n) {
  const i32 begin = max_of(lo, j) - j, end = max_of(min_of(hi, j + n - 1), j - 1) - j + 1;
  return begin < end ? bit_range(begin, end) : 0;
}

/// Keys or rows [first, first + n), 0 < n <= 64, for a leaf's among() or seen_by().
struct Run {
  i32 first, n;
  JALI_HD constexpr i32 last() const { return first + n - 1; }
  JALI_HD constexpr u64 between(i32 lo, i32 hi) const { return key_bits(lo, hi, first, n); }
  /// The bits of those that fit.
  template <class Fits>
  JALI_HD constexpr u64 each(Fits fits) const {
    u64 bits = 0;
    for (i32 x = 0; x < n; ++x) bits |= u64{fits(first + x)} << x;
    return bits;
  }
};

/// Query heads that GPU kernels take.
constexpr i32 kMostHeads = 1 << 20;
/// h / head_div: which head of a table query head h reads.
JALI_HD i32 table_head(i32 h, i32 head_div) {
#if defined(__CUDACC_RTC__)
  // PERF: `/` is 25 instructions in line. Up to kMostHeads, (h + 1/2) / head_div is further from whole
  // numbers than it is from what it is rounded to.
  return static_cast<i32>(__fdividef(static_cast<float>(h) + 0.5f, static_cast<float>(head_div)));
#else
  return h / head_div;
#endif
}
/// Where head h of a table with a stride for its heads begins; most have one head, no division then.
JALI_HD i64 head_offset(i64 stride_h, i32 h, i32 head_div) {
  return stride_h == 0 ? 0 : table_head(h, head_div) * stride_h;
}

/// An integer parameter: absent, one number, or one number per batch entry or head (int32 table).
struct Scalar {
  i32 value = 0;
  i32 given = 0;              // 0: absent
  const i32* data = nullptr;  // null: `value` holds for all
  i64 stride = 0;
  i32 size = 1;
  i32 head_div = 1;  // dims "H": Hq / size
  JALI_HD i32 at_batch(i32 b) const {
    return data ? data[clamp_to(b, 0, size - 1) * stride] : value;
  }
  JALI_HD i32 at_head(i32 h) const {
    return data ? data[clamp_to(table_head(h, head_div), 0, size - 1) * stride] : value;
  }
};

/// The position that row i stands at for a leaf with an own (optional, per-batch) offset.
JALI_HD i32 position(const Frame& f, const Scalar& offset, i32 i) {
  return i + (offset.given ? offset.at_batch(f.b) : f.q_offset);
}

/// A per-token table, dims "BHQ" (per row), "BHK" (per key) or "BHP" (any length), or one of another
/// length, never packed, "BHN"; H optional: data[b, h, l], where a batch or head dim of size 1
/// broadcasts (stride 0). `packed`: one row of Tq or Tk tokens for all sequences, read at the sequence's
/// first token + l. Reads are clamped.
template <class T>
struct TokenTable {
  const T* data = nullptr;  // null: absent
  i64 stride_b = 0, stride_h = 0, stride_l = 1;
  i32 length = 0;
  i32 head_div = 1;  // Hq / (heads of the table)
  i32 packed = 0;
  JALI_HD bool given() const { return data != nullptr; }
  /// Entries [l0, l1) where they lie side by side in memory and in the table, else null: a loop
  /// over them vectorises, one over at() does not.
  JALI_HD const T* run(i32 b, i32 h, i32 start, i32 l0, i32 l1) const {
    i32 first = packed ? start + l0 : l0;
    bool plain = stride_l == 1 && first >= 0 && first + (l1 - l0) <= length;
    return plain ? data + b * stride_b + head_offset(stride_h, h, head_div) + first : nullptr;
  }
  JALI_HD T at(i32 b, i32 h, i32 start, i32 l) const {
    i32 at = packed ? start + l : l;
    return data[b * stride_b + head_offset(stride_h, h, head_div) +
                clamp_to(at, 0, length - 1) * stride_l];
  }
};

/// A table over two index dims, dims "BHQK": data[b, h, r, c]; a dim of size 1 broadcasts.
template <class T>
struct GridTable {
  const T* data = nullptr;
  i64 stride_b = 0, stride_h = 0, stride_r = 0, stride_c = 1;
  i32 num_rows = 0, num_cols = 0;
  i32 head_div = 1;
  JALI_HD bool given() const { return data != nullptr; }
  JALI_HD const T* row(i32 b, i32 h, i32 r) const {
    return data + b * stride_b + head_offset(stride_h, h, head_div) +
           clamp_to(r, 0, num_rows - 1) * stride_r;
  }
  JALI_HD T at(i32 b, i32 h, i32 r, i32 c) const {
    return row(b, h, r)[clamp_to(c, 0, num_cols - 1) * stride_c];
  }
};

}  // namespace jali
