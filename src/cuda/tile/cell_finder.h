// Finds out which cells of a partial tile are visible. A lane holds lines and gets their bits in words:
// lines are rows, with words over 64 keys, or keys, with words over 32 or 64 rows.
//
// Leaves are asked one by one, and their bits combined as the tree says. A leaf that has words gives
// them, of rows; where lines are keys, it is asked by key if it is light so, and else its words are
// transposed. Of another a warp looks up its lines and what lies across them. Then either neighbours
// across are mostly alike (documents), and a lane asks once for each run of them, or, if one run of
// rows sees each key, it is asked by key and the words are transposed, or, unless all cells are known
// to be of one class, it asks cell by cell. PERF: shuffles take hundreds of cycles beside the tensor
// cores, so that few wait for each other.
#pragma once

#include "cuda/kernel/stored.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/shared.h"
#include "mask/combine.h"

namespace jali::tile {

/// Where to look: the first row and key of a tile, or of a part of it.
struct TileAt {
  Frame f;
  i32 row, key;
};

/// A leaf's lines and what lies across them: rows and keys, or the other way round. n counts from t on.
template <class L, bool kKeyLines>
struct Sides {
  template <bool kKey>
  using Side = typename Conditional<kKey, typename L::Col, typename L::Row>::Type;
  using Line = Side<kKeyLines>;
  using Across = Side<!kKeyLines>;

  JALI_DEVICE static Line line(const L& leaf, const TileAt& t, i32 n) {
    return look_up<kKeyLines>(leaf, t, n);
  }
  JALI_DEVICE static Across across(const L& leaf, const TileAt& t, i32 n) {
    return look_up<!kKeyLines>(leaf, t, n);
  }
  JALI_DEVICE static bool visible(const L& leaf, const Line& line, const Across& across) {
    if constexpr (kKeyLines) {
      return leaf.visible(across, line);
    } else {
      return leaf.visible(line, across);
    }
  }

 private:
  template <bool kKey>
  JALI_DEVICE static Side<kKey> look_up(const L& leaf, const TileAt& t, i32 n) {
    if constexpr (kKey) {
      return leaf.col(t.f, t.key + n);
    } else {
      return leaf.row(t.f, t.row + n);
    }
  }
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

/// What a warp finds: bit c of words[n][w] is cell 32 w + c of line 32 n + lane.
template <i32 kLines, i32 kWords>
struct Found {
  u32 words[kLines][kWords];

  JALI_DEVICE u32& word(i32 n) { return words[n / kWords][n % kWords]; }
  /// What a loop finds goes in at the end, and the rest moves on. PERF: registers have no index, and
  /// an unrolled loop would miss the instruction cache.
  JALI_DEVICE void push(u32 last) {
#pragma unroll
    for (i32 n = 0; n < kLines * kWords - 1; ++n) word(n) = word(n + 1);
    word(kLines * kWords - 1) = last;
  }
  /// One word of every line.
  JALI_DEVICE void push(const u32 (&last)[kLines]) {
#pragma unroll
    for (i32 n = 0; n < kLines; ++n) {
#pragma unroll
      for (i32 w = 0; w < kWords - 1; ++w) words[n][w] = words[n][w + 1];
      words[n][kWords - 1] = last[n];
    }
  }
};

/// By runs of neighbours across that are alike, kMostRuns a word at most on average; else false. across: for
/// each word, one a lane. PERF: a run of every word at a time, the first ones before it is known how long
/// they are.
template <class S, i32 kMostRuns, i32 kLines, i32 kWords, class L>
JALI_DEVICE bool find_by_runs(const L& leaf, const typename S::Line (&lines)[kLines],
                              const typename S::Across (&across)[kWords], i32 lane,
                              Found<kLines, kWords>& found) {
  using Across = typename S::Across;
  Across first[kWords];
  u32 starts[kWords];
  i32 count = 0;
#pragma unroll
  for (i32 w = 0; w < kWords; ++w) {
    const Across before =
        ptx::by_words(across[w], [](u32 x) { return __shfl_up_sync(0xffffffffu, x, 1); });
    first[w] = ptx::by_words(across[w], [](u32 x) { return __shfl_sync(0xffffffffu, x, 0); });
    const bool differs = !__is_empty(Across) && !same_words(before, across[w]);
    starts[w] = __ballot_sync(0xffffffffu, lane == 0 || differs);
    count += __popc(starts[w]);
  }
  if (kMostRuns < 32 && count > kMostRuns * kWords) return false;
#pragma unroll
  for (i32 n = 0; n < kLines * kWords; ++n) found.word(n) = 0;
#pragma unroll 1
  while (true) {
    u32 left = 0;
#pragma unroll
    for (i32 w = 0; w < kWords; ++w) {
      const u32 start = starts[w] & -starts[w];
      starts[w] ^= start;
      left |= starts[w];
      const u32 run = (starts[w] & -starts[w]) - start;  // none left: 0
#pragma unroll
      for (i32 n = 0; n < kLines; ++n) {
        if (S::visible(leaf, lines[n], first[w])) found.words[n][w] |= run;
      }
    }
    if (!left) return true;
#pragma unroll
    for (i32 w = 0; w < kWords; ++w) {
      const i32 at = __ffs(starts[w]) - 1;
      first[w] = ptx::by_words(across[w], [&](u32 x) { return __shfl_sync(0xffffffffu, x, at); });
    }
  }
}

/// 32 cells of each line, from `first` on, one by one; all lanes look up the same across. PERF: rows
/// shuffled to all lanes, which voted on each, took 25 to 35 us a tile.
template <class S, i32 kLines, class L>
JALI_DEVICE void ask_cells(const L& leaf, const typename S::Line (&lines)[kLines], const TileAt& t,
                           i32 first, u32 (&words)[kLines]) {
  constexpr i32 kTogether = 2;  // PERF: 4 would spill beside options of the scores
#pragma unroll
  for (i32 n = 0; n < kLines; ++n) words[n] = 0;
#pragma unroll 1
  for (i32 c = 0; c < 32; c += kTogether) {
    typename S::Across across[kTogether];
#pragma unroll
    for (i32 x = 0; x < kTogether; ++x) across[x] = S::across(leaf, t, first + c + x);
#pragma unroll
    for (i32 x = 0; x < kTogether; ++x) {
#pragma unroll
      for (i32 n = 0; n < kLines; ++n) {
        if (S::visible(leaf, lines[n], across[x])) words[n] |= 1u << x << c;
      }
    }
  }
}

/// In each word, bit c of lane r and bit r of lane c change places. PERF: two words share a shuffle,
/// and pairs of them wait together.
template <i32 kLines, i32 kWords>
JALI_DEVICE void transpose(Found<kLines, kWords>& found, i32 lane) {
  static_assert(kLines * kWords % 2 == 0);
#pragma unroll
  for (i32 n = 16; n > 0; n /= 2) {
    constexpr u32 kLow[5] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu, 0x00ff00ffu, 0x0000ffffu};
    const u32 low = kLow[n == 16 ? 4 : n == 8 ? 3 : n == 4 ? 2 : n / 2];
    const bool upper = lane & n;
#pragma unroll
    for (i32 w = 0; w < kLines * kWords; w += 2) {
      u32 &a = found.word(w), &b = found.word(w + 1);
      const u32 mine = upper ? (a & low) | (b & low) << n : (a >> n & low) | (b & ~low);
      const u32 other = ptx::shuffle_xor(mine, n);
      a = upper ? (a & ~low) | (other & low) : (a & low) | (other & low) << n;
      b = upper ? (b & ~low) | (other >> n & low) : (b & low) | (other & ~low);
    }
  }
}

template <class L>
struct HasUnsure {
  static constexpr bool value = requires { L::kUnsure; };
};
/// Whether a leaf of the tree has kUnsure.
template <class M>
constexpr bool is_unsure = any_leaf<HasUnsure, M>;

/// The cells of 32 kLines lines; all lanes of a warp together. at(): where, asked anew for every leaf.
/// kClasses, where lines are rows: asks for classes before it asks cell by cell, which takes registers.
/// Rows and keys behind the end may be visible or not. PERF: more lines hide each other's latencies, and
/// share the runs.
template <bool kKeyLines, bool kClasses, i32 kLines, i32 kWords, class L, class At>
JALI_DEVICE void find_words(const L& leaf, At at, i32 lane, Found<kLines, kWords>& found) {
  if constexpr (kKeyLines ? seen_in_one_run<L> || (HasWord<L> && IsLightByKey<L>) : HasWord<L>) {
    const TileAt t = at();
#pragma unroll
    for (i32 n = 0; n < kLines; ++n) {
      u64 word;
      if constexpr (kKeyLines) {
        word = leaf.seen_by(t.f, t.key + 32 * n + lane, Run{t.row, 32 * kWords});
      } else {
        word = leaf.word(leaf.row(t.f, t.row + 32 * n + lane), t.key, 32 * kWords);
      }
#pragma unroll
      for (i32 w = 0; w < kWords; ++w) found.words[n][w] = static_cast<u32>(word >> 32 * w);
    }
  } else if constexpr (HasWord<L>) {
    // As many rows together as few registers allow.
    constexpr i32 kTogether = sizeof(typename L::Row) <= 16 ? kWords : 1;
#pragma unroll 1
    for (i32 w = 0; w < kWords; w += kTogether) {
      const TileAt t = at();
      typename L::Row rows[kTogether];
#pragma unroll
      for (i32 x = 0; x < kTogether; ++x) rows[x] = leaf.row(t.f, t.row + 32 * (w + x) + lane);
#pragma unroll
      for (i32 x = 0; x < kTogether; ++x) {
        const u64 word = leaf.word(rows[x], t.key, 32 * kLines);
        u32 last[kLines];
#pragma unroll
        for (i32 n = 0; n < kLines; ++n) last[n] = static_cast<u32>(word >> 32 * n);
        found.push(last);
      }
    }
    transpose(found, lane);
  } else {
    using S = Sides<L, kKeyLines>;
    // PERF: what is read from tables on both sides is quickly compared, however short the runs; to ask by
    // cell, too, would take a tenth of the time that a forward takes to compile.
    constexpr bool kByRuns = L::kRowsReadTables && L::kColsReadTables;
    typename S::Line lines[kLines];
    {
      const TileAt t = at();
      typename S::Across across[kWords];
#pragma unroll
      for (i32 n = 0; n < kLines; ++n) lines[n] = S::line(leaf, t, 32 * n + lane);
#pragma unroll
      for (i32 w = 0; w < kWords; ++w) across[w] = S::across(leaf, t, 32 * w + lane);
      if (find_by_runs<S, kByRuns ? 32 : 12>(leaf, lines, across, lane, found)) return;
    }
    if constexpr (kByRuns) {
      return;
    } else if constexpr (seen_in_one_run<L>) {          // where lines are keys, it was asked by key
      constexpr i32 kAtOnce = kLines % 2 ? kWords : 1;  // words are transposed in pairs
#pragma unroll 1
      for (i32 w = 0; w < kWords; w += kAtOnce) {
        const TileAt t = at();
        const i32 last_row = t.row + 32 * kLines - 1;
        Found<kLines, kAtOnce> some;
#pragma unroll
        for (i32 x = 0; x < kAtOnce; ++x) {
          const AllRows::Between rows = leaf.seen_by(t.f, t.key + 32 * (w + x) + lane, AllRows{});
          const i32 begin = max_of(rows.lo, t.row) - t.row;
          const i32 end = max_of(min_of(rows.hi, last_row), t.row - 1) - (t.row - 1);
#pragma unroll
          for (i32 n = 0; n < kLines; ++n) {
            some.words[n][x] = ptx::bit_mask(0, max_of(end - 32 * n, 0)) &
                               ~ptx::bit_mask(0, max_of(begin - 32 * n, 0));
          }
        }
        transpose(some, lane);
#pragma unroll
        for (i32 x = 0; x < kAtOnce; ++x) {
          u32 last[kLines];
#pragma unroll
          for (i32 n = 0; n < kLines; ++n) last[n] = some.words[n][x];
          found.push(last);
        }
      }
    } else if constexpr (kClasses && !is_unsure<L>) {
      static_assert(!kKeyLines);
      // A lane for each word.
      ::jali::Tile cls = ::jali::Tile::kEmpty;
      {
        const TileAt t = at();
        const i32 row = t.row + lane / kWords * 32, row_end = min_of(row + 32, t.f.num_rows);
        const i32 key = t.key + lane % kWords * 32, key_end = min_of(key + 32, t.f.num_keys);
        if (lane < kLines * kWords && row < row_end && key < key_end) {
          cls = leaf.classify(t.f, leaf.rows(t.f, row, row_end), leaf.cols(t.f, key, key_end));
        }
      }
      const u32 partial = __ballot_sync(0xffffffffu, cls == ::jali::Tile::kPartial);
      const u32 full = __ballot_sync(0xffffffffu, cls == ::jali::Tile::kFull);
#pragma unroll 1
      for (i32 n = 0; n < kLines * kWords; ++n) {
        u32 last[1] = {full >> n & 1 ? ~0u : 0u};
        if (partial >> n & 1) {
          const TileAt t = at();
          const typename S::Line line[1] = {S::line(leaf, t, n / kWords * 32 + lane)};
          ask_cells<S>(leaf, line, t, n % kWords * 32, last);
        }
        found.push(last[0]);
      }
    } else {
#pragma unroll 1
      for (i32 w = 0; w < kWords; ++w) {
        u32 last[kLines];
        ask_cells<S>(leaf, lines, at(), 32 * w, last);
        found.push(last);
      }
    }
  }
}
/// Of a pair, joined word by word.
template <bool kKeyLines, bool kClasses, i32 kLines, i32 kWords, class P, class At, class Join>
JALI_DEVICE void find_words_of_pair(const P& m, At at, i32 lane, Found<kLines, kWords>& found,
                                    Join join) {
  Found<kLines, kWords> other;
  // PERF: what has words last: it takes few registers beside what was found.
  if constexpr (HasWord<decltype(m.a)>) {
    find_words<kKeyLines, kClasses>(m.b, at, lane, found);
    find_words<kKeyLines, kClasses>(m.a, at, lane, other);
  } else {
    find_words<kKeyLines, kClasses>(m.a, at, lane, found);
    find_words<kKeyLines, kClasses>(m.b, at, lane, other);
  }
#pragma unroll
  for (i32 n = 0; n < kLines * kWords; ++n) found.word(n) = join(found.word(n), other.word(n));
}
template <bool kKeyLines, bool kClasses, i32 kLines, i32 kWords, class A, class B, class At>
  requires(!HasWord<And<A, B>>)
JALI_DEVICE void find_words(const And<A, B>& m, At at, i32 lane, Found<kLines, kWords>& found) {
  find_words_of_pair<kKeyLines, kClasses>(m, at, lane, found, [](u32 x, u32 y) { return x & y; });
}
template <bool kKeyLines, bool kClasses, i32 kLines, i32 kWords, class A, class B, class At>
  requires(!HasWord<Or<A, B>>)
JALI_DEVICE void find_words(const Or<A, B>& m, At at, i32 lane, Found<kLines, kWords>& found) {
  find_words_of_pair<kKeyLines, kClasses>(m, at, lane, found, [](u32 x, u32 y) { return x | y; });
}
template <bool kKeyLines, bool kClasses, i32 kLines, i32 kWords, class A, class At>
  requires(!HasWord<Not<A>>)
JALI_DEVICE void find_words(const Not<A>& m, At at, i32 lane, Found<kLines, kWords>& found) {
  find_words<kKeyLines, kClasses>(m.a, at, lane, found);
#pragma unroll
  for (i32 n = 0; n < kLines * kWords; ++n) found.word(n) = ~found.word(n);
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
      Found<1, 2> found;
      find_words<false, false>(mask, [&] { return TileAt{f, i, j}; }, lane, found);
      const u64 word = u64{found.word(1)} << 32 | found.word(0),
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
JALI_DEVICE void find_cells(const M& mask, TileOf tile, u32 shared,
                            i32 warp = ptx::broadcast(ptx::opaque(threadIdx.x) >> 5)) {
  constexpr i32 kTogether = min_of(kMost, max_of(kRows / 32 * (kKeys / 64) / kFinders, 1));
  constexpr i32 kDown = kRows / 32 / kTogether, kUnits = kDown * (kKeys / 64);
  static_assert(kDown * kTogether * 32 == kRows);
#pragma unroll 1
  for (i32 n = warp - (4 - kFinders); n < kUnits; n += kFinders) {
    const i32 lane = ptx::opaque(threadIdx.x & 31);
    const i32 r = n % kDown * (32 * kTogether), k = n / kDown * 64;
    auto at = [&] {
      TileAt t = tile();
      t.row += r;
      t.key += k;
      return t;
    };
    Found<kKeyLines ? 2 : kTogether, kKeyLines ? kTogether : 2> found;
    if constexpr (kKeyLines) {
      const TileAt t = at();
      find_words<true, false>(mask, [&] { return t; }, lane, found);
#pragma unroll
      for (i32 g = 0; g < 2; ++g) {
        u32 line[kTogether];
#pragma unroll
        for (i32 w = 0; w < kTogether; ++w) line[w] = by_quad_lanes(found.words[g][w]);
        ptx::store_array(shared + ((k + 32 * g + lane) * (kRows / 32) + r / 32) * 4, line);
      }
    } else {
      find_words<false, true>(mask, at, lane, found);
      const TileAt t = at();
      u32 inside[2];
#pragma unroll
      for (i32 g = 0; g < 2; ++g) {
        inside[g] = ptx::bit_mask(0, max_of(t.f.num_keys - t.key - 32 * g, 0));
      }
#pragma unroll
      for (i32 x = 0; x < kTogether; ++x) {
        const u32 line[2] = {by_quad_lanes(found.words[x][0] & inside[0]),
                             by_quad_lanes(found.words[x][1] & inside[1])};
        ptx::store_array(shared + ((r + 32 * x + lane) * (kKeys / 32) + k / 32) * 4, line);
      }
    }
  }
}

}  // namespace jali::tile
