// Stored tile maps: which tiles a kernel visits, found out once per call by the kernel `map_tiles`,
// so that a loader reads two bits a tile where it would have to read a mask's blocks and wait.
//
// A line is a row tile (forward) or a key tile (backward); its words hold the classes of 32 tiles of
// the other side each, the low half active, the high half full.
#pragma once

#include "cuda/kernel/sequences.h"

namespace jali::cuda {

/// Line n of (sequence b, head h) begins at word
///   (b * stride_b + (h / head_div) * stride_h + n) * words;
/// packed layouts number the lines of all sequences by slots (sequences.h) and have stride_b = 0.
struct TileMap {
  u64* data = nullptr;
  i64 stride_b = 0, stride_h = 0;  // lines
  i32 head_div = 1;
  i32 words = 0;  // of a line, enough for the longest sequence

  JALI_HD u64* line(const Frame& f, i32 n) const {
    return data + (f.b * stride_b + f.h / head_div * stride_h + n) * words;
  }
};

}  // namespace jali::cuda

#if defined(__CUDACC_RTC__)
namespace jali::cuda {

/// Lines are row tiles of kRows (or key tiles of kKeys); one warp classifies 32 tiles at a time.
/// lines: of one head, of all sequences where tokens are packed.
template <class M, i32 kRows, i32 kKeys, bool kKeyLines>
__device__ void map_tiles(const M& mask, const Sequences& s, const TileMap& map, i32 lines,
                          i32 num_heads) {
  constexpr i32 kLine = kKeyLines ? kKeys : kRows, kAcross = kKeyLines ? kRows : kKeys;
  const i32* cu = kKeyLines ? s.cu_k : s.cu_q;
  const i32 lane = threadIdx.x & 31;
  const i64 warp = (blockIdx.x * i64{blockDim.x} + threadIdx.x) / 32;
  const i64 num_warps = gridDim.x * i64{blockDim.x} / 32;
  const i32 batches = map.stride_b ? s.B : 1;
  const i64 units = i64{lines} * map.words * num_heads * batches;
  for (i64 unit = warp; unit < units; unit += num_warps) {
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
      // A tile that hangs over the last key has columns to hide.
      if (cls == Tile::kFull && j0 + kKeys > f.num_keys) cls = Tile::kPartial;
    }
    const u32 active = __ballot_sync(0xffffffffu, cls != Tile::kEmpty);
    const u32 full = __ballot_sync(0xffffffffu, cls == Tile::kFull);
    if (lane == 0) map.line(f, n)[word] = u64{full} << 32 | active;
  }
}

/// Visits the active tiles of a line, the last one first if kDown; all lanes of a warp together.
/// visit(index, partial)
template <bool kDown, class Visit>
__device__ __forceinline__ void for_each_active(const u64* line, i32 words, Visit visit) {
  const i32 lane = threadIdx.x & 31;
#pragma unroll 1
  for (i32 begin = 0; begin < words; begin += 32) {
    const i32 place = begin + lane;
    u32 mine = 0;
    if (place < words) mine = static_cast<u32>(line[kDown ? words - 1 - place : place]);
    u32 some = __ballot_sync(0xffffffffu, mine != 0);
#pragma unroll 1
    while (some) {
      const i32 from = __ffs(some) - 1;
      some &= some - 1;
      const i32 word = kDown ? words - 1 - begin - from : begin + from;
      const u64 classes = line[word];  // once more: callers have few registers
      u32 active = static_cast<u32>(classes);
      const u32 full = static_cast<u32>(classes >> 32);
#pragma unroll 1
      while (active) {
        const i32 bit = kDown ? 31 - __clz(active) : __ffs(active) - 1;
        active ^= 1u << bit;
        visit(word * 32 + bit, !(full >> bit & 1));
      }
    }
  }
}

}  // namespace jali::cuda
#endif
