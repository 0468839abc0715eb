// The kernel that makes tile maps (kernel/tile_map.h).
#pragma once

#include "cuda/kernel/tile_map.h"
#include "cuda/tile/cell_finder.h"

namespace jali::cuda {

/// Lines are row tiles of kRows (or key tiles of kKeys). A block classifies 32 tiles at a time for an
/// unsure mask, whose cells its 8 warps ask for four tiles each; one warp for others.
/// lines: of one head, of all sequences where tokens are packed.
template <class M, i32 kRows, i32 kKeys, bool kKeyLines>
__device__ void map_tiles(const M& mask, const Sequences& s, const TileMap& map, i32 lines,
                          i32 num_heads) {
  constexpr i32 kLine = kKeyLines ? kKeys : kRows, kAcross = kKeyLines ? kRows : kKeys;
  const i32* cu = kKeyLines ? s.cu_k : s.cu_q;
  constexpr bool kUnsure = tile::is_unsure<M>;
  const i32 lane = threadIdx.x & 31, warp_of_block = threadIdx.x / 32, warps = blockDim.x / 32;
  const i64 first = kUnsure ? blockIdx.x : blockIdx.x * i64{warps} + warp_of_block;
  const i64 step = kUnsure ? gridDim.x : gridDim.x * i64{warps};
  const i32 batches = map.stride_b ? s.B : 1;
  const i64 units = i64{lines} * map.words * num_heads * batches;
  for (i64 unit = first; unit < units; unit += step) {
    const i32 word = static_cast<i32>(unit % map.words);
    const i64 rest = unit / map.words;
    const i32 n = static_cast<i32>(rest % lines);
    const i32 h = static_cast<i32>(rest / lines % num_heads) * map.head_div;
    i32 b = static_cast<i32>(rest / lines / num_heads), begin = n * kLine;
    if (cu) {
      b = sequence_of(cu, s.B, n, kLine);
      begin = (n - first_slot(cu[b], b, kLine)) * kLine;
    }
    const Frame f = frame_of(s, b, h);
    const i32 length = kKeyLines ? f.num_keys : f.num_rows;
    const i32 across = kKeyLines ? f.num_rows : f.num_keys;
    if (begin >= length || word * 32 * kAcross >= across) continue;  // nobody asks for it
    const i32 end = min_of(begin + kLine, length);
    const i32 at = (word * 32 + lane) * kAcross;
    Tile cls = Tile::kEmpty;
    if (at < across) {
      const i32 to = min_of(at + kAcross, across);
      const i32 i0 = kKeyLines ? at : begin, i1 = kKeyLines ? to : end;
      const i32 j0 = kKeyLines ? begin : at, j1 = kKeyLines ? end : to;
      cls = mask.classify(f, mask.rows(f, i0, i1), mask.cols(f, j0, j1));
    }
    u32 active = __ballot_sync(0xffffffffu, cls != Tile::kEmpty);
    u32 full = __ballot_sync(0xffffffffu, cls == Tile::kFull);
    if constexpr (kUnsure) {
      __shared__ u32 found[2];
      if (threadIdx.x == 0) {
        found[0] = active;
        found[1] = full;
      }
      __syncthreads();
      u32 unsure = active & ~full & 0x01010101u * (1u << warp_of_block);
      while (unsure) {
        const i32 bit = __ffs(unsure) - 1;
        unsure &= unsure - 1;
        const i32 from = (word * 32 + bit) * kAcross, to = min_of(from + kAcross, across);
        const Tile exact = kKeyLines ? tile::class_of_cells(mask, f, from, to, begin, end)
                                     : tile::class_of_cells(mask, f, begin, end, from, to);
        if (lane == 0 && exact == Tile::kEmpty) atomicAnd(&found[0], ~(1u << bit));
        if (lane == 0 && exact == Tile::kFull) atomicOr(&found[1], 1u << bit);
      }
      __syncthreads();
      active = found[0];
      full = found[1];
      __syncthreads();  // the next unit writes them
    }
    // A tile that hangs over the last key has columns to hide.
    full &= ~__ballot_sync(0xffffffffu, (kKeyLines ? begin : at) + kKeys > f.num_keys);
    if (kUnsure ? threadIdx.x == 0 : lane == 0) map.line(f, n)[word] = u64{full} << 32 | active;
  }
}

}  // namespace jali::cuda
