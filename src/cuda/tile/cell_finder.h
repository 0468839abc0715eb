// Finds out which cells of a partial tile are visible: 32 rows by 64 keys at a time, a row a lane.
//
// Leaves are asked one by one, and their bits combined as the tree says. A leaf that has words gives
// them. Of another a warp looks up its rows and keys; then either neighbouring keys are mostly alike
// (documents), and a lane asks once for each run of them, or, unless all cells are known to be of one
// class, all lanes vote, row by row.
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
template <class L, i32 kRows>
JALI_DEVICE void words_by_runs(const L& leaf, const typename L::Row (&rows)[kRows],
                               const typename L::Col (&cols)[2], const u32 (&starts)[2],
                               RowWords (&found)[kRows]) {
#pragma unroll
  for (i32 g = 0; g < 2; ++g) {
    u32 left = starts[g];
#pragma unroll
    for (i32 n = 0; n < kRows; ++n) found[n].words[g] = 0;
#pragma unroll 1
    while (left) {
      const i32 first = __ffs(left) - 1;
      left &= left - 1;
      const u32 run = (left ? (left & -left) - 1 : ~0u) & ~0u << first;
      const typename L::Col col =
          ptx::by_words(cols[g], [&](u32 word) { return __shfl_sync(0xffffffffu, word, first); });
#pragma unroll
      for (i32 n = 0; n < kRows; ++n) {
        if (leaf.visible(rows[n], col)) found[n].words[g] |= run;
      }
    }
  }
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

/// Where to look: the first row and key of a tile, or of 32 rows and 64 keys of it.
struct TileAt {
  Frame f;
  i32 row, key;
};

/// Whether a leaf of the tree has kUnsure.
template <class M>
constexpr bool is_unsure = requires { M::kUnsure; };
template <class A, class B>
constexpr bool is_unsure<And<A, B>> = is_unsure<A> || is_unsure<B>;
template <class A, class B>
constexpr bool is_unsure<Or<A, B>> = is_unsure<A> || is_unsure<B>;
template <class A>
constexpr bool is_unsure<Not<A>> = is_unsure<A>;

/// What a warp looks up of 64 keys for a mask: two a lane.
template <class L>
struct KeySide {
  typename L::Col cols[2];

  JALI_DEVICE void look_up(const L& leaf, const Frame& f, i32 key, i32 lane) {
#pragma unroll
    for (i32 g = 0; g < 2; ++g) cols[g] = leaf.col(f, key + 32 * g + lane);
  }
  /// The first keys of runs of alike ones. PERF: not before rows are looked up, too, so that both are
  /// under way together.
  JALI_DEVICE void find_runs(u32 (&starts)[2], i32 lane) const {
#pragma unroll
    for (i32 g = 0; g < 2; ++g) {
      const typename L::Col before =
          ptx::by_words(cols[g], [&](u32 word) { return __shfl_up_sync(0xffffffffu, word, 1); });
      const bool differs = !__is_empty(typename L::Col) && !same_words(before, cols[g]);
      starts[g] = __ballot_sync(0xffffffffu, lane == 0 || differs);
    }
  }
};
template <class L>
  requires HasWord<L>
struct KeySide<L> {
  JALI_DEVICE void look_up(const L&, const Frame&, i32, i32) {}
};
template <class A, class B>
struct PairSide {
  KeySide<A> a;
  KeySide<B> b;
  JALI_DEVICE void look_up(const Pair<A, B>& m, const Frame& f, i32 key, i32 lane) {
    a.look_up(m.a, f, key, lane);
    b.look_up(m.b, f, key, lane);
  }
};
template <class A, class B>
  requires(!HasWord<And<A, B>>)
struct KeySide<And<A, B>> : PairSide<A, B> {};
template <class A, class B>
  requires(!HasWord<Or<A, B>>)
struct KeySide<Or<A, B>> : PairSide<A, B> {};
template <class A>
  requires(!HasWord<Not<A>>)
struct KeySide<Not<A>> {
  KeySide<A> a;
  JALI_DEVICE void look_up(const Not<A>& m, const Frame& f, i32 key, i32 lane) {
    a.look_up(m.a, f, key, lane);
  }
};

/// The cells of kRows times 32 rows by 64 keys, whose side is `keys`; all lanes of a warp together.
/// at(): where, asked anew for every leaf. kClasses: asks for the class of all cells before a vote,
/// which takes registers. Rows and keys behind the end may be visible or not. PERF: more rows at once
/// hide each other's latencies, and share the runs.
template <bool kClasses, i32 kRows, class L, class At>
JALI_DEVICE void find_words(const L& leaf, const KeySide<L>& keys, At at, i32 lane,
                            RowWords (&found)[kRows]) {
  if constexpr (HasWord<L>) {
    const TileAt t = at();
#pragma unroll
    for (i32 n = 0; n < kRows; ++n) {
      const u64 word = leaf.word(leaf.row(t.f, t.row + 32 * n + lane), t.key, 64);
      found[n] = {{static_cast<u32>(word), static_cast<u32>(word >> 32)}};
    }
  } else {
    constexpr i32 kFewRuns = 12;
    typename L::Row rows[kRows];
    {
      const TileAt t = at();
#pragma unroll
      for (i32 n = 0; n < kRows; ++n) rows[n] = leaf.row(t.f, t.row + 32 * n + lane);
    }
    u32 starts[2];
    keys.find_runs(starts, lane);
    if (__popc(starts[0]) + __popc(starts[1]) <= kFewRuns) {
      words_by_runs(leaf, rows, keys.cols, starts, found);
      return;
    }
    // PERF: one text for all rows, or the instruction cache misses: each in turn is the first.
#pragma unroll 1
    for (i32 n = 0; n < kRows; ++n) {
      ::jali::Tile cls = ::jali::Tile::kPartial;
      if constexpr (kClasses && !is_unsure<L>) {
        const TileAt t = at();
        const i32 row = t.row + 32 * n, row_end = min_of(row + 32, t.f.num_rows);
        const i32 key_end = min_of(t.key + 64, t.f.num_keys);
        cls = ::jali::Tile::kEmpty;
        if (row < row_end && t.key < key_end) {
          cls = leaf.classify(t.f, leaf.rows(t.f, row, row_end), leaf.cols(t.f, t.key, key_end));
        }
      }
      const u32 all = cls == ::jali::Tile::kFull ? ~0u : 0u;
      RowWords last = {{all, all}};
      if (cls == ::jali::Tile::kPartial) last = words_by_votes(leaf, rows[0], keys.cols, lane);
#pragma unroll
      for (i32 x = 0; x < kRows - 1; ++x) {
        rows[x] = rows[x + 1];
        found[x] = found[x + 1];
      }
      found[kRows - 1] = last;
    }
  }
}
/// Of a pair, joined word by word.
template <bool kClasses, i32 kRows, class P, class At, class Join>
JALI_DEVICE void find_words_of_pair(const P& m, const KeySide<P>& keys, At at, i32 lane,
                                    RowWords (&found)[kRows], Join join) {
  RowWords other[kRows];
  find_words<kClasses>(m.a, keys.a, at, lane, found);
  find_words<kClasses>(m.b, keys.b, at, lane, other);
#pragma unroll
  for (i32 n = 0; n < 2 * kRows; ++n) {
    u32& word = found[n / 2].words[n % 2];
    word = join(word, other[n / 2].words[n % 2]);
  }
}
template <bool kClasses, i32 kRows, class A, class B, class At>
  requires(!HasWord<And<A, B>>)
JALI_DEVICE void find_words(const And<A, B>& m, const KeySide<And<A, B>>& keys, At at, i32 lane,
                            RowWords (&found)[kRows]) {
  find_words_of_pair<kClasses>(m, keys, at, lane, found, [](u32 x, u32 y) { return x & y; });
}
template <bool kClasses, i32 kRows, class A, class B, class At>
  requires(!HasWord<Or<A, B>>)
JALI_DEVICE void find_words(const Or<A, B>& m, const KeySide<Or<A, B>>& keys, At at, i32 lane,
                            RowWords (&found)[kRows]) {
  find_words_of_pair<kClasses>(m, keys, at, lane, found, [](u32 x, u32 y) { return x | y; });
}
template <bool kClasses, i32 kRows, class A, class At>
  requires(!HasWord<Not<A>>)
JALI_DEVICE void find_words(const Not<A>& m, const KeySide<Not<A>>& keys, At at, i32 lane,
                            RowWords (&found)[kRows]) {
  find_words<kClasses>(m.a, keys.a, at, lane, found);
#pragma unroll
  for (i32 n = 0; n < 2 * kRows; ++n) found[n / 2].words[n % 2] = ~found[n / 2].words[n % 2];
}

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
      KeySide<M> keys;
      keys.look_up(mask, f, j, lane);
      RowWords bits[1];
      find_words<false>(mask, keys, [&] { return TileAt{f, i, j}; }, lane, bits);
      const u64 word = u64{bits[0].words[1]} << 32 | bits[0].words[0],
                inside = i + lane < i1 ? key_bits(j0, j1 - 1, j, 64) : 0;
      seen |= (word & inside) != 0;
      hidden |= (~word & inside) != 0;
    }
    any |= __any_sync(0xffffffffu, seen) != 0;
    all &= __any_sync(0xffffffffu, hidden) == 0;
  }
  return tile_of(!any, all);
}

/// Bits 8 n + 2 q + x and 8 q + 2 n + x change places: byte q has what lane q of a quad needs
/// (visible_bits.h).
JALI_DEVICE u32 by_quad_lanes(u32 word) {
  u32 moved = (word ^ word >> 6) & 0x00cc00ccu;
  word ^= moved ^ moved << 6;
  moved = (word ^ word >> 12) & 0x0000f0f0u;
  return word ^ moved ^ moved << 12;
}

/// The cells of kRows rows and kKeys keys as bits in shared memory: lines of rows, [row][kKeys / 32
/// words], or, if kKeyLines, of keys, [key][kRows / 32 words]; the bits of a word as visible_bits.h
/// wants them. The last kFinders warps of a warpgroup do a share each. Behind the end of the sequence
/// lines may say anything, but cells of lines of rows are hidden. tile(): what to look at, asked again
/// and again. kMost: how many times 32 rows a warp may look at together, by its registers.
template <i32 kRows, i32 kKeys, bool kKeyLines, i32 kFinders, i32 kMost, class M, class TileOf>
JALI_DEVICE void find_cells(const M& mask, TileOf tile, u32 shared) {
  constexpr i32 kTogether = min_of(kMost, max_of(kRows / 32 * (kKeys / 64) / kFinders, 1));
  constexpr i32 kDown = kRows / 32 / kTogether, kUnits = kDown * (kKeys / 64);
  static_assert(kDown * kTogether * 32 == kRows);
#pragma unroll 1
  for (i32 n = ptx::broadcast(ptx::opaque(threadIdx.x) >> 5) - (4 - kFinders); n < kUnits;
       n += kFinders) {
    const i32 lane = ptx::opaque(threadIdx.x & 31);
    const i32 r = n % kDown * (32 * kTogether), k = n / kDown * 64;
    auto at = [&] {
      TileAt t = tile();
      t.row += r;
      t.key += k;
      return t;
    };
    KeySide<M> keys;
    {
      const TileAt t = at();
      keys.look_up(mask, t.f, t.key, lane);
    }
    RowWords bits[kTogether];
    find_words<!kKeyLines>(mask, keys, at, lane, bits);
    if constexpr (kKeyLines) {
      static_assert(kTogether == 1);
#pragma unroll
      for (i32 g = 0; g < 2; ++g) {
        const u32 line[1] = {by_quad_lanes(transposed(bits[0].words[g], lane))};
        ptx::store_array(shared + ((k + 32 * g + lane) * (kRows / 32) + r / 32) * 4, line);
      }
    } else {
      const TileAt t = at();
      u32 inside[2];
#pragma unroll
      for (i32 g = 0; g < 2; ++g) {
        inside[g] = ptx::bit_mask(0, max_of(t.f.num_keys - t.key - 32 * g, 0));
      }
#pragma unroll
      for (i32 x = 0; x < kTogether; ++x) {
        const u32 line[2] = {by_quad_lanes(bits[x].words[0] & inside[0]),
                             by_quad_lanes(bits[x].words[1] & inside[1])};
        ptx::store_array(shared + ((r + 32 * x + lane) * (kKeys / 32) + k / 32) * 4, line);
      }
    }
  }
}

}  // namespace jali::tile
