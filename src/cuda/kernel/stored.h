// Stored blocks: what 64 rows or keys of a leaf that reads tables can hold, reduced once per call by
// the kernel that makes its first tile map, so that classifying a tile reads two blocks instead of its
// tables.
#pragma once

#include "cuda/kernel/sequences.h"
#include "mask/combine.h"

namespace jali::cuda {

/// Rows or keys per stored block.
constexpr i32 kStoredSpan = 64;

/// The blocks of one side of one leaf: block n of (sequence b, head h) stands at index
///   b * stride_b + (h / head_div) * stride_h + n,
/// packed layouts number the blocks of all sequences by slots (sequences.h) and have stride_b = 0.
struct StoredBlocks {
  void* data = nullptr;
  i64 stride_b = 0, stride_h = 0;
  i32 num = 0;  // of a sequence and head; packed: of all sequences
  i32 head_div = 1;
  i32 packed = 0;
};

/// A leaf's own merge() wins over the free one for Range and Intervals.
template <class L, class Block>
JALI_HD Block merged(Block a, Block b) {
  if constexpr (requires { L::merge(a, b); }) {
    return L::merge(a, b);
  } else {
    return merge(a, b);
  }
}

/// A leaf whose rows() and cols() come from stored blocks: ranges must begin at multiples of
/// kStoredSpan and end at one or at the end of the sequence.
template <class L>
struct Stored : L {
  StoredBlocks row_blocks, col_blocks;
  using typename L::RowBlock, typename L::ColBlock;

  template <class Block>
  JALI_HD static Block* find(const StoredBlocks& stored, const Frame& f, i32 start, i32 at) {
    return static_cast<Block*>(stored.data) + f.b * stored.stride_b +
           head_offset(stored.stride_h, f.h, stored.head_div) +
           (stored.packed ? first_slot(start, f.b, kStoredSpan) : 0) + at / kStoredSpan;
  }
  template <class Block>
  JALI_HD static Block range(const StoredBlocks& stored, const Frame& f, i32 start, i32 begin,
                             i32 end) {
    const Block* at = find<Block>(stored, f, start, begin);
    Block all = *at;
    for (i32 n = begin + kStoredSpan; n < end; n += kStoredSpan) all = merged<L>(all, *++at);
    return all;
  }

  JALI_HD RowBlock rows(const Frame& f, i32 i0, i32 i1) const {
    if constexpr (L::kRowsReadTables) return range<RowBlock>(row_blocks, f, f.q_start, i0, i1);
    return L::rows(f, i0, i1);
  }
  JALI_HD ColBlock cols(const Frame& f, i32 j0, i32 j1) const {
    if constexpr (L::kColsReadTables) return range<ColBlock>(col_blocks, f, f.k_start, j0, j1);
    return L::cols(f, j0, j1);
  }
};

/// Visits every Stored leaf of a tree.
template <class Leaf, class Visit>
JALI_HD void for_each_stored(const Leaf&, Visit&) {}
template <class L, class Visit>
JALI_HD void for_each_stored(const Stored<L>& leaf, Visit& visit) {
  visit(leaf);
}
template <class A, class B, class Visit>
JALI_HD void for_each_stored(const And<A, B>& m, Visit& visit) {
  for_each_stored(m.a, visit);
  for_each_stored(m.b, visit);
}
template <class A, class B, class Visit>
JALI_HD void for_each_stored(const Or<A, B>& m, Visit& visit) {
  for_each_stored(m.a, visit);
  for_each_stored(m.b, visit);
}
template <class A, class Visit>
JALI_HD void for_each_stored(const Not<A>& m, Visit& visit) {
  for_each_stored(m.a, visit);
}

}  // namespace jali::cuda

#if defined(__CUDACC_RTC__)
#include "cuda/ptx/math.h"

namespace jali::cuda {

/// A warp's share of storing the blocks of all leaves; to be handed to for_each_stored. Sides follow each
/// other like one long side.
struct Storer {
  const Sequences& s;
  i64 next;  // its next block, counted from the first one of the side at hand
  i32 num_warps;

  template <class L>
  __device__ void operator()(const Stored<L>& leaf) {
    if constexpr (L::kRowsReadTables) {
      store<L, typename L::RowBlock>(leaf.row_blocks, true, [&](const Frame& f, i32 i0, i32 i1) {
        return leaf.L::rows(f, i0, i1);
      });
    }
    if constexpr (L::kColsReadTables) {
      store<L, typename L::ColBlock>(leaf.col_blocks, false, [&](const Frame& f, i32 j0, i32 j1) {
        return leaf.L::cols(f, j0, j1);
      });
    }
  }

 private:
  /// `make(f, begin, end)` reads the tables. PERF: each lane has two of 64 rows or keys one by one, since
  /// ranges would be loops, unrolled: a third less of code.
  template <class L, class Block, class Make>
  __device__ void store(const StoredBlocks& stored, bool rows, Make make) {
    const i32 lane = threadIdx.x & 31, num_heads = s.Hq / stored.head_div;
    const i64 end_of_side = i64{stored.num} * num_heads * (stored.stride_b ? s.B : 1);
    for (; next < end_of_side; next += num_warps) {
      // 2^32 blocks would be 32 GB.
      const u32 rest = static_cast<u32>(next) / stored.num;
      const i32 n = static_cast<i32>(static_cast<u32>(next) % stored.num);
      const i32 h = static_cast<i32>(rest % num_heads) * stored.head_div;
      const i32 b = static_cast<i32>(rest / num_heads);
      const TilePlace at = warp_tile(s, b, h, n, kStoredSpan, rows);
      const Frame& f = at.f;
      const i32 begin = at.first;
      const i32 end = min_of(begin + kStoredSpan, rows ? f.num_rows : f.num_keys);
      if (begin >= end) continue;
      // Lanes beyond the end repeat the last one: merging is idempotent.
      const i32 one = min_of(begin + lane, end - 1), other = min_of(one + 32, end - 1);
      Block block = merged<L>(make(f, one, one + 1), make(f, other, other + 1));
#pragma unroll
      for (i32 lanes = 1; lanes < 32; lanes *= 2) {
        block = merged<L>(
            block, ptx::by_words(block, [&](u32 word) { return ptx::shuffle_xor(word, lanes); }));
      }
      if (lane == 0)
        *Stored<L>::template find<Block>(stored, f, rows ? f.q_start : f.k_start, begin) = block;
    }
    next -= end_of_side;
  }
};

}  // namespace jali::cuda
#endif
