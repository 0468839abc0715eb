// Which cells of a partial tile are visible, as bits where accumulators want them (found by
// cell_finder.h).
//
// A warp's part of a tile is 16 lines of 32 kGroups cells: rows of keys (forward), keys of rows
// (backward). Element 4 j + 2 e + x of a thread's accumulators is line lane / 4 + 8 e, cell
// 8 j + 2 (lane % 4) + x.
#pragma once

#include "cuda/ptx/shared.h"
#include "mask/combine.h"

namespace jali::tile {

/// For one thread: bit 8 (j % 4) + x of [e][j / 4].
template <i32 kGroups>
struct VisibleBits {
  u32 words[2][kGroups];

  /// From shared memory, lines of kGroups words.
  JALI_DEVICE void load(u32 shared) {
#pragma unroll
    for (i32 e = 0; e < 2; ++e) ptx::load_array(shared + e * 8 * 4 * kGroups, words[e]);
  }
  /// Of row `row` and row + 8 from key j on.
  template <class M>
  JALI_DEVICE void look_up(const M& mask, const Frame& f, i32 row, i32 j) {
#pragma unroll
    for (i32 e = 0; e < 2; ++e) {
      const typename M::Row of = mask.row(f, row + 8 * e);
#pragma unroll
      for (i32 g = 0; g < kGroups; g += 2) {
        const u64 word = mask.word(of, j + 32 * g, 64);
        words[e][g] = static_cast<u32>(word);
        words[e][g + 1] = static_cast<u32>(word >> 32);
      }
    }
  }
  /// From whole lines: bit c of [e][g] is cell 32 g + c of line lane / 4 + 8 e.
  JALI_DEVICE void shift(i32 lane) {
#pragma unroll
    for (i32 e = 0; e < 2; ++e) {
#pragma unroll
      for (i32 g = 0; g < kGroups; ++g) words[e][g] >>= 2 * (lane & 3);
    }
  }
  /// Only the first `count` cells from this thread's first one on are left.
  JALI_DEVICE void cut(i32 count) {
#pragma unroll
    for (i32 g = 0; g < kGroups; ++g) {
      const i32 here = count - 32 * g;
      const u32 left = here >= 32 ? ~0u : here > 0 ? (1u << here) - 1 : 0u;
      words[0][g] &= left;
      words[1][g] &= left;
    }
  }
  JALI_DEVICE bool at(i32 j, i32 e, i32 x) const {
    return words[e][j / 4] >> (8 * (j % 4) + x) & 1;
  }
  /// Every accumulator whose cell is hidden gets this value.
  JALI_DEVICE void hide(float (&s)[16 * kGroups], float value) const {
#pragma unroll
    for (i32 j = 0; j < 4 * kGroups; ++j) {
#pragma unroll
      for (i32 m = 0; m < 4; ++m) s[4 * j + m] = at(j, m / 2, m % 2) ? s[4 * j + m] : value;
    }
  }
};

}  // namespace jali::tile
