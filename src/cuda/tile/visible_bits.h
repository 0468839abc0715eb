// Which cells of a partial tile are visible, as bits where accumulators want them: made from the numbers
// of a light mask, or found by others (cell_finder.h).
//
// A warp's part of a tile is 16 lines of 32 kGroups cells: rows of keys (forward), keys of rows
// (backward). Element 4 j + 2 e + x of a thread's accumulators is line lane / 4 + 8 e, cell
// 8 j + 2 (lane % 4) + x.
#pragma once

#include "cuda/ptx/math.h"
#include "cuda/ptx/shared.h"
#include "mask/combine.h"

namespace jali::tile {

/// A thread's cells along a line of accumulators, for a leaf's among() or seen_by(): bit 2 n + x is
/// key (or row) first + 8 n + x, of 32 kGroups. Those from `end` on are behind the last one.
template <i32 kGroups>
struct QuadRun {
  i32 first, end;

  JALI_DEVICE i32 last() const { return first + 32 * kGroups - 1; }
  /// Those from lo to hi, both included. PERF: no bits before they are asked for, since what two runs
  /// share is found with two instructions, and the bits of a run with 14.
  struct Between {
    i32 first, lo, hi;

    JALI_DEVICE operator u32() const {
      const i32 begin = before(max_of(lo, first) - first);
      const i32 end = before(static_cast<u32>(max_of(hi, first - 1)) - (first - 1));
      return ptx::bit_mask(0, end) & ~ptx::bit_mask(0, begin);
    }
    JALI_DEVICE friend Between operator&(const Between& a, const Between& b) {
      return {a.first, max_of(a.lo, b.lo), min_of(a.hi, b.hi)};
    }
  };
  JALI_DEVICE Between between(i32 lo, i32 hi) const { return {first, lo, hi}; }
  /// The bits of those that fit. PERF: in a loop, or the code would not fit the instruction cache.
  template <class Fits>
  JALI_DEVICE u32 each(Fits fits) const {
    u32 bits = 0;
#pragma unroll 2
    for (i32 n = 0; n < 8 * kGroups; ++n) bits |= u32{fits(first + n / 2 * 8 + n % 2)} << n;
    return bits;
  }
  JALI_DEVICE u32 all() const { return ptx::bit_mask(0, before(max_of(end - first, 0))); }
  /// How many of them come before the key `distance` after the first.
  JALI_DEVICE static i32 before(u32 distance) {
    return static_cast<i32>((distance + 7) / 8 + (distance + 6) / 8);
  }
};

/// For one thread: the first 128 keys as bits 2 j + x of [e], more as those of [2 + e].
template <i32 kGroups>
struct VisibleBits {
  static constexpr i32 kParts = ceil_div(kGroups, 4);
  u32 words[2 * kParts];

  /// Those of its cells that are in part n, of 128 keys or what there is.
  template <i32 n>
  JALI_DEVICE static QuadRun<min_of(kGroups - 4 * n, 4)> part(const QuadRun<kGroups>& keys) {
    return {keys.first + 128 * n, keys.end};
  }

  /// From shared memory, lines of kGroups words: byte q of one is what lane q of a quad needs of 32
  /// cells.
  JALI_DEVICE void load(u32 shared, i32 lane) {
    static_assert(kGroups == 2 || kGroups == 4);
    const u32 pick = (lane & 3) * 0x11 + 0x40;
#pragma unroll
    for (i32 e = 0; e < 2; ++e) {
      u32 line[kGroups];
      ptx::load_array(shared + e * 8 * 4 * kGroups, line);
      words[e] = __byte_perm(line[0], line[1], pick);
      if constexpr (kGroups == 4) {
        words[e] = __byte_perm(words[e], __byte_perm(line[2], line[3], pick), 0x5410);
      }
    }
  }
  /// By a light mask, whose rows lie in shared memory, kRowBytes each: this thread's first.
  template <i32 kRowBytes, class M>
  JALI_DEVICE void look_up(const M& mask, u32 shared, const QuadRun<kGroups>& keys) {
    using Row = ptx::Words<typename M::Row>;
#pragma unroll
    for (i32 e = 0; e < 2; ++e) {
      u32 loaded[kRowBytes / 16][4];
#pragma unroll
      for (i32 n = 0; n < ceil_div(Row::kCount, 4); ++n) {
        ptx::load_array(shared + e * 8 * kRowBytes + 16 * n, loaded[n]);
      }
      Row row;
#pragma unroll
      for (i32 w = 0; w < Row::kCount; ++w) row.words[w] = loaded[w / 4][w % 4];
      auto of = [&](auto run) {
        return mask.among(row.value, run) & run.between(-kFar, run.end - 1);
      };
      words[e] = of(part<0>(keys));
      if constexpr (kParts > 1) words[2 + e] = of(part<1>(keys));
    }
  }
  JALI_DEVICE void show(const QuadRun<kGroups>& keys) {
    words[0] = words[1] = part<0>(keys).all();
    if constexpr (kParts > 1) words[2] = words[3] = part<1>(keys).all();
  }
  JALI_DEVICE void show_all_if(bool condition) {
    for (u32& word : words) word |= condition ? ~0u : 0;
  }
  JALI_DEVICE bool at(i32 j, i32 e, i32 x) const {
    return words[j / 16 * 2 + e] >> (j % 16 * 2 + x) & 1;
  }
  /// Scores of hidden cells become -infinity. kOfProducts: of products alone, where a NaN of a hidden key or row may
  /// stay one; not where biases were added. PERF: then by an addition, since a selection takes the units of maxima and
  /// of rounding: windows 2 % less time.
  template <bool kOfProducts>
  JALI_DEVICE void hide(float (&s)[16 * kGroups]) const {
#pragma unroll
    for (i32 n = 0; n < 16 * kGroups; ++n) {
      const u32 word = words[n / 64 * 2 + n / 2 % 2], bit = 1u << (n / 4 % 16 * 2 + n % 2);
      if constexpr (kOfProducts) {
        asm("{\n.reg .pred p;\n.reg .b32 x;\nand.b32 x, %1, %2;\nsetp.eq.u32 p, x, 0;\n"
            "@p add.f32 %0, %0, 0fff800000;\n}"
            : "+f"(s[n])
            : "r"(word), "r"(bit));
      } else {
        s[n] = word & bit ? s[n] : -ptx::infinity();
      }
    }
  }
};

}  // namespace jali::tile
