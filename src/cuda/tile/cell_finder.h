// Finds out which cells of a partial tile are visible: 32 rows by 64 keys at a time, a row a lane.
//
// Leaves are asked one by one, and their bits combined as the tree says. A leaf that has words gives
// them. Of another a warp looks up its rows and keys once; then either neighbouring keys are mostly
// alike (documents), and a lane asks once for each run of them, or all lanes vote, row by row.
#pragma once

#include "cuda/kernel/stored.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/shared.h"
#include "mask/combine.h"

namespace jali::tile {

/// A lane's row: bit c of word g is key 32 g + c of 64.
struct RowWords {
  u32 words[2];
};

/// Whether all words are the same; what pads a type may differ.
template <class T>
JALI_DEVICE bool same_words(const T& x, const T& y) {
  const ptx::Words<T> a(x), b(y);
  bool same = true;
#pragma unroll
  for (i32 n = 0; n < ptx::Words<T>::kCount; ++n) same &= a.words[n] == b.words[n];
  return same;
}

/// Keys are mostly like their neighbours: `starts` has the first of each run of them.
template <class L>
JALI_DEVICE RowWords words_by_runs(const L& leaf, const typename L::Row& row,
                                   const typename L::Col (&cols)[2], const u32 (&starts)[2]) {
  RowWords found = {};
#pragma unroll
  for (i32 g = 0; g < 2; ++g) {
    u32 left = starts[g];
#pragma unroll 1
    while (left) {
      const i32 first = __ffs(left) - 1;
      left &= left - 1;
      const u32 run = (left ? (left & -left) - 1 : ~0u) & ~0u << first;
      const typename L::Col col =
          ptx::by_words(cols[g], [&](u32 word) { return __shfl_sync(0xffffffffu, word, first); });
      if (leaf.visible(row, col)) found.words[g] |= run;
    }
  }
  return found;
}

/// Any keys: all lanes have two of them, and vote on one row after the other.
template <class L>
JALI_DEVICE RowWords words_by_votes(const L& leaf, const typename L::Row& row,
                                    const typename L::Col (&cols)[2], i32 lane) {
  // As much together as few registers allow; addresses mean that visible() loads.
  constexpr bool kLoads = alignof(typename L::Row) > 4 || alignof(typename L::Col) > 4;
  constexpr i32 kTogether = kLoads || sizeof(typename L::Row) > 8 ? 2 : 4;
  RowWords found = {};
#pragma unroll kTogether
  for (i32 n = 0; n < 32; ++n) {
    const typename L::Row of =
        ptx::by_words(row, [&](u32 word) { return __shfl_sync(0xffffffffu, word, n); });
#pragma unroll
    for (i32 g = 0; g < 2; ++g) {
      const u32 word = __ballot_sync(0xffffffffu, leaf.visible(of, cols[g]));
      found.words[g] = lane == n ? word : found.words[g];
    }
  }
  return found;
}

/// What a lane looks up of a mask, its row and, where they are needed, two of 64 keys; and what the
/// warp makes of that together.
template <class L>
struct Lookup {
  typename L::Row row;
  typename L::Col cols[HasWord<L> ? 1 : 2];

  /// Row i, keys j and j + 32.
  JALI_DEVICE void look_up(const L& leaf, const Frame& f, i32 i, i32 j) {
    row = leaf.row(f, i);
    if constexpr (!HasWord<L>) {
#pragma unroll
      for (i32 g = 0; g < 2; ++g) cols[g] = leaf.col(f, j + 32 * g);
    }
  }
  /// Of the 64 keys from `key` on.
  JALI_DEVICE RowWords words(const L& leaf, i32 key, i32 lane) const {
    if constexpr (HasWord<L>) {
      const u64 word = leaf.word(row, key, 64);
      return {{static_cast<u32>(word), static_cast<u32>(word >> 32)}};
    } else {
      constexpr i32 kFewRuns = 12;
      u32 starts[2];
#pragma unroll
      for (i32 g = 0; g < 2; ++g) {
        const typename L::Col before =
            ptx::by_words(cols[g], [&](u32 word) { return __shfl_up_sync(0xffffffffu, word, 1); });
        const bool differs = !__is_empty(typename L::Col) && !same_words(before, cols[g]);
        starts[g] = __ballot_sync(0xffffffffu, lane == 0 || differs);
      }
      return __popc(starts[0]) + __popc(starts[1]) <= kFewRuns
                 ? words_by_runs(leaf, row, cols, starts)
                 : words_by_votes(leaf, row, cols, lane);
    }
  }
};
template <class A, class B>
struct PairLookup {
  Lookup<A> a;
  Lookup<B> b;
  JALI_DEVICE void look_up(const Pair<A, B>& m, const Frame& f, i32 i, i32 j) {
    a.look_up(m.a, f, i, j);
    b.look_up(m.b, f, i, j);
  }
};
template <class A, class B>
struct Lookup<And<A, B>> : PairLookup<A, B> {
  JALI_DEVICE RowWords words(const And<A, B>& m, i32 key, i32 lane) const {
    const RowWords x = this->a.words(m.a, key, lane), y = this->b.words(m.b, key, lane);
    return {{x.words[0] & y.words[0], x.words[1] & y.words[1]}};
  }
};
template <class A, class B>
struct Lookup<Or<A, B>> : PairLookup<A, B> {
  JALI_DEVICE RowWords words(const Or<A, B>& m, i32 key, i32 lane) const {
    const RowWords x = this->a.words(m.a, key, lane), y = this->b.words(m.b, key, lane);
    return {{x.words[0] | y.words[0], x.words[1] | y.words[1]}};
  }
};
template <class A>
struct Lookup<Not<A>> {
  Lookup<A> a;
  JALI_DEVICE void look_up(const Not<A>& m, const Frame& f, i32 i, i32 j) {
    a.look_up(m.a, f, i, j);
  }
  JALI_DEVICE RowWords words(const Not<A>& m, i32 key, i32 lane) const {
    const RowWords x = a.words(m.a, key, lane);
    return {{~x.words[0], ~x.words[1]}};
  }
};

/// Bit c of lane r and bit r of lane c change places.
JALI_DEVICE u32 transposed(u32 word, i32 lane) {
#pragma unroll
  for (i32 n = 16; n > 0; n /= 2) {
    constexpr u32 kLow[5] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu, 0x00ff00ffu, 0x0000ffffu};
    const u32 low = kLow[n == 16 ? 4 : n == 8 ? 3 : n == 4 ? 2 : n / 2];
    const u32 other = ptx::shuffle_xor(word, n);
    word = lane & n ? (word & ~low) | (other >> n & low) : (word & low) | (other & low) << n;
  }
  return word;
}

/// The class of rows [i0, i1) and keys [j0, j1) by asking every cell; all lanes of a warp together.
template <class M>
JALI_DEVICE Tile class_of_cells(const M& mask, const Frame& f, i32 i0, i32 i1, i32 j0, i32 j1) {
  const i32 lane = threadIdx.x & 31;
  bool any = false, all = true;
#pragma unroll 1
  for (i32 i = i0; i < i1 && (all || !any); i += 32) {
    bool seen = false, hidden = false;
#pragma unroll 1
    for (i32 j = j0; j < j1; j += 64) {
      Lookup<M> found;
      // Lanes behind the last row repeat it.
      found.look_up(mask, f, min_of(i + lane, i1 - 1), j + lane);
      const RowWords bits = found.words(mask, j, lane);
      const u64 word = u64{bits.words[1]} << 32 | bits.words[0],
                inside = key_bits(j0, j1 - 1, j, 64);
      seen |= (word & inside) != 0;
      hidden |= (~word & inside) != 0;
    }
    any |= __any_sync(0xffffffffu, seen) != 0;
    all &= __any_sync(0xffffffffu, hidden) == 0;
  }
  return tile_of(!any, all);
}

/// A tile to look at: its first row and key.
struct TileAt {
  Frame f;
  i32 row, key;
};

/// The cells of kRows rows and kKeys keys as bits in shared memory: lines of rows, [row][kKeys / 32
/// words], or, if kKeyLines, of keys, [key][kRows / 32 words]. Warps 1 to kFinders do a share each.
/// Cells behind the end of the sequence may have any value. tile(): what to look at, read anew every
/// time. kBytes: how much to look up before the first answer is used. PERF: so that lookups wait for
/// memory together; registers are few.
template <i32 kRows, i32 kKeys, bool kKeyLines, i32 kFinders, i32 kBytes, class M, class Tile>
JALI_DEVICE void find_cells(const M& mask, Tile tile, u32 shared) {
  constexpr i32 kAcross = kKeys / 64, kUnits = kRows / 32 * kAcross;
  constexpr i32 kTogether =
      clamp_to<i32>(kBytes / sizeof(Lookup<M>), 1, ceil_div(kUnits, kFinders));
  const i32 finder = ptx::broadcast(ptx::opaque(threadIdx.x) >> 5) - 1;
  auto row_of = [](i32 n) { return n / kAcross * 32; };
  auto key_of = [](i32 n) { return n % kAcross * 64; };
#pragma unroll 1
  for (i32 first = finder; first < kUnits; first += kTogether * kFinders) {
    const i32 lane = ptx::opaque(threadIdx.x & 31);
    const TileAt at = ptx::by_words(tile(), [](u32 word) { return ptx::broadcast(word); });
    Lookup<M> found[kTogether];
#pragma unroll
    for (i32 x = 0; x < kTogether; ++x) {
      const i32 n = min_of(first + x * kFinders, kUnits - 1);
      found[x].look_up(mask, at.f, at.row + row_of(n) + lane, at.key + key_of(n) + lane);
    }
#pragma unroll
    for (i32 x = 0; x < kTogether; ++x) {
      const i32 n = first + x * kFinders;
      if (n >= kUnits) break;
      const i32 r = row_of(n), k = key_of(n);
      const RowWords bits = found[x].words(mask, at.key + k, lane);
      if constexpr (kKeyLines) {
#pragma unroll
        for (i32 g = 0; g < 2; ++g) {
          const u32 line[1] = {transposed(bits.words[g], lane)};
          ptx::store_array(shared + ((k + 32 * g + lane) * (kRows / 32) + r / 32) * 4, line);
        }
      } else {
        ptx::store_array(shared + ((r + lane) * (kKeys / 32) + k / 32) * 4, bits.words);
      }
    }
  }
}

}  // namespace jali::tile
