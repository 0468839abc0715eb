// Stored tile maps: which tiles a kernel visits, found out once per call by the kernel `map_tiles`,
// so that a loader reads two bits a tile where it would have to read a mask's blocks and wait.
//
// A line is a row tile (forward) or a key tile (backward); its words hold the classes of 32 tiles of
// the other side each, the low half active, the high half full.
#pragma once

#include "cuda/kernel/sequences.h"

namespace jali::cuda {

constexpr i32 kMapThreads = 256;  // of a block of map_tiles
constexpr i32 kMostLongLines = 8;
constexpr i32 kLeastOfLongLine = 32;  // active tiles
/// Long lines are looked for in maps that one block reads in microseconds: of so many lines, and words.
constexpr i64 kMostLinesToSearch = 1 << 12, kMostWordsToSearch = 1 << 15;

/// Line n of (sequence b, head h) begins at word
///   (b * stride_b + (h / head_div) * stride_h + n) * words;
/// packed layouts number the lines of all sequences by slots (sequences.h) and have stride_b = 0.
struct TileMap {
  u64* data = nullptr;
  i64 stride_b = 0, stride_h = 0;  // lines
  i32 head_div = 1;
  i32 words = 0;  // of a line, enough for the longest sequence
  // Lines with far more active tiles than others, kMostLongLines at most: how many, then which,
  // ascending. All others, roughly by falling numbers of active tiles. Null: not looked for.
  i32 *long_lines = nullptr, *by_length = nullptr;

  JALI_HD u64* line(const Frame& f, i32 n) const {
    return data + (f.b * stride_b + f.h / head_div * stride_h + n) * words;
  }
};

}  // namespace jali::cuda

#if defined(__CUDACC_RTC__)
namespace jali::cuda {

/// Visits the words of a line that have active tiles, the last one first if `down`; all lanes of a warp
/// together. visit(n, classes, more, last): tiles from 32 n on; more, last: as of for_each_active.
template <class Visit>
__device__ __forceinline__ void for_each_word(bool down, const u64* line, i32 words, Visit visit) {
  const i32 lane = threadIdx.x & 31;
#pragma unroll 1
  for (i32 begin = 0; begin < words; begin += 32) {
    const i32 place = begin + lane;
    u32 mine = 0;
    if (place < words) mine = static_cast<u32>(line[down ? words - 1 - place : place]);
    u32 some = __ballot_sync(0xffffffffu, mine != 0);
#pragma unroll 1
    while (some) {
      const i32 from = __ffs(some) - 1;
      some &= some - 1;
      const i32 word = down ? words - 1 - begin - from : begin + from;
      // Once more: callers have few registers.
      visit(word, line[word], some != 0, some == 0 && begin + 32 >= words);
    }
  }
}
/// Visits the active tiles of a line, the last one first if `down`; all lanes of a warp together.
/// visit(index, partial, more, last); more: another one surely follows, last: surely none does
template <class Visit>
__device__ __forceinline__ void for_each_active(bool down, const u64* line, i32 words,
                                                Visit visit) {
  for_each_word(down, line, words, [&](i32 word, u64 classes, bool more, bool last) {
    u32 active = static_cast<u32>(classes);
    const u32 full = static_cast<u32>(classes >> 32);
#pragma unroll 1
    while (active) {
      const i32 bit = down ? 31 - __clz(active) : __ffs(active) - 1;
      active ^= 1u << bit;
      visit(word * 32 + bit, !(full >> bit & 1), active != 0 || more, active == 0 && last);
    }
  });
}

}  // namespace jali::cuda
#endif
