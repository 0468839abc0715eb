// Stored blocks: what 64 rows or keys of a leaf that reads tables can hold, reduced once per call by
// the kernel `summarize`, so that classifying a tile reads two blocks instead of its tables.
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

// ---- the kernel that stores them ----------------------------------------------------------------

/// One warp reduces 64 rows or keys: each lane two of them. `make(f, begin, end)` reads the tables.
template <class L, class Block, class Make>
__device__ void store_side(const Sequences& s, const StoredBlocks& stored, bool rows, i32 warp,
                           i32 num_warps, i32 num_heads, i64 tokens, Make make) {
  const i32* cu = rows ? s.cu_q : s.cu_k;
  const i32 length = rows ? s.Lq : s.Lk;
  const i64 blocks =
      stored.packed ? num_slots(tokens, s.B, kStoredSpan) : ceil_div(length, kStoredSpan);
  const i32 batches = stored.stride_b ? s.B : 1;
  const i32 lane = threadIdx.x & 31;
  for (i64 unit = warp; unit < blocks * num_heads * batches; unit += num_warps) {
    const i32 n = static_cast<i32>(unit % blocks);
    const i32 h = static_cast<i32>(unit / blocks % num_heads) * stored.head_div;
    i32 b = static_cast<i32>(unit / blocks / num_heads);
    i32 begin = n * kStoredSpan;
    if (stored.packed) {
      b = sequence_of(cu, s.B, n, kStoredSpan);
      begin = (n - first_slot(cu[b], b, kStoredSpan)) * kStoredSpan;
    }
    const Frame f = frame_of(s, b, h);
    const i32 end = min_of(begin + kStoredSpan, rows ? f.num_rows : f.num_keys);
    if (begin >= end) continue;
    // Lanes beyond the end repeat the last pair: merging is idempotent.
    const i32 first = begin + 2 * min_of(lane, (end - begin - 1) / 2);
    Block block = make(f, first, min_of(first + 2, end));
#pragma unroll
    for (i32 lanes = 1; lanes < 32; lanes *= 2) {
      block = merged<L>(
          block, ptx::by_words(block, [&](u32 word) { return ptx::shuffle_xor(word, lanes); }));
    }
    if (lane == 0)
      *Stored<L>::template find<Block>(stored, f, rows ? f.q_start : f.k_start, begin) = block;
  }
}

/// Stores the blocks of a leaf; to be handed to for_each_stored.
struct Summarizer {
  const Sequences& s;
  i64 Tq, Tk;
  i32 warp, num_warps;

  template <class L>
  __device__ void operator()(const Stored<L>& leaf) const {
    if constexpr (L::kRowsReadTables) {
      store_side<L, typename L::RowBlock>(
          s, leaf.row_blocks, true, warp, num_warps, s.Hq / leaf.row_blocks.head_div, Tq,
          [&](const Frame& f, i32 i0, i32 i1) { return leaf.L::rows(f, i0, i1); });
    }
    if constexpr (L::kColsReadTables) {
      store_side<L, typename L::ColBlock>(
          s, leaf.col_blocks, false, warp, num_warps, s.Hq / leaf.col_blocks.head_div, Tk,
          [&](const Frame& f, i32 j0, i32 j1) { return leaf.L::cols(f, j0, j1); });
    }
  }
};

}  // namespace jali::cuda
#endif
