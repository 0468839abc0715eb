// The kernel that makes tile maps (kernel/tile_map.h); where it makes the first one of a call, it also
// stores what the mask's leaves say of 64 rows or keys (kernel/stored.h).
#pragma once

#include "cuda/kernel/tile_map.h"
#include "cuda/ptx/order.h"
#include "cuda/tile/cell_finder.h"

namespace jali::cuda {

/// The first `storing` blocks of the grid to begin store the mask's blocks; the others wait for them.
/// Returns how many of those others began before this block, negative if it stored. NOTE: a barrier of the
/// whole grid could hang, since blocks may have to wait for room; whoever waits here waits for running ones.
template <class M>
__device__ i32 store_or_wait(const M& mask, const Sequences& s, i32 storing, i32* counter) {
  __shared__ i32 begun;
  if (threadIdx.x == 0) begun = atomicAdd(counter, 1);
  __syncthreads();
  const i32 own = begun - storing, warps = blockDim.x / 32;
  if (own < 0) {
    Storer storer{s, begun * warps + static_cast<i32>(threadIdx.x / 32), storing * warps};
    for_each_stored(mask, storer);
    __syncthreads();
    ptx::release_if(counter + 1, 1, threadIdx.x == 0);
    return own;
  }
  if (threadIdx.x == 0) {
    // Those that store are the only ones counted so far: others are when they have waited.
    while (ptx::glance(counter + 1) < storing) __nanosleep(32);
    ptx::fence_device();
  }
  __syncthreads();
  return own;
}

/// Lists the lines that have more than four times as many active tiles as the mean, and not a few, and
/// the others by length, to a quarter of the mean: by the block that is done last, which clears the
/// counter (as leave() does).
__device__ inline void list_lines(const TileMap& map, i32 lines, i32* counter) {
  constexpr i32 kLengths = kMapThreads / 32, kLong = kLengths;
  __shared__ i32 rank, total, count, found[kMostLongLines], size[kLengths];
  __shared__ i32 of_line[kMostLinesToSearch];  // active tiles, then the length
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    rank = atomicAdd(counter + 1, 1);
    total = count = 0;
  }
  __syncthreads();
  if (rank != static_cast<i32>(gridDim.x) - 1) return;
#pragma unroll 1
  for (i32 n = threadIdx.x; n < lines; n += blockDim.x) {
    const u64* const words = map.data + i64{n} * map.words;
    i32 active = 0;
#pragma unroll 8
    for (i32 w = 0; w < map.words; ++w) active += __popc(static_cast<u32>(__ldcg(words + w)));
    of_line[n] = active;
    atomicAdd(&total, active);
  }
  __syncthreads();
#pragma unroll 1
  for (i32 n = threadIdx.x; n < lines; n += blockDim.x) {
    const i64 share = i64{of_line[n]} * lines;
    const bool far = of_line[n] >= kLeastOfLongLine && share > i64{4} * total;
    const i64 quarters = 4 * share / max_of(total, 1);
    of_line[n] = far ? kLong : static_cast<i32>(min_of<i64>(quarters, kLengths - 1));
    if (!far) continue;
    const i32 at = atomicAdd(&count, 1);
    if (at < kMostLongLines) found[at] = n;
  }
  __syncthreads();
  const i32 num = count <= kMostLongLines ? count : 0;  // many are no exception
  if (threadIdx.x == 0) {
    counter[0] = counter[1] = 0;
    map.long_lines[0] = num;
    for (i32 n = 0; n < num; ++n) {
      i32 before = 0;
      for (i32 x = 0; x < num; ++x) before += found[x] < found[n];
      map.long_lines[1 + before] = found[n];
    }
    for (i32 n = num; n < kMostLongLines; ++n) map.long_lines[1 + n] = 0;  // a warp reads them all
  }
  // Each warp has a length. Ascending: neighbours share what they load.
  const i32 lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  auto for_each_of_length = [&](auto visit) {  // visit(line, whether it has this warp's length)
#pragma unroll 1
    for (i32 begin = 0; begin < lines; begin += 32) {
      const i32 n = begin + lane;
      i32 length = n < lines ? of_line[n] : -1;
      if (length == kLong && num == 0) length = kLengths - 1;
      visit(n, length == kLengths - 1 - warp);
    }
  };
  i32 own = 0;
  for_each_of_length([&](i32, bool has) { own += __popc(__ballot_sync(0xffffffffu, has)); });
  if (lane == 0) size[warp] = own;
  __syncthreads();
  i32 at = 0;
  for (i32 n = 0; n < warp; ++n) at += size[n];
  for_each_of_length([&](i32 line, bool has) {
    const u32 all = __ballot_sync(0xffffffffu, has);
    if (has) map.by_length[at + __popc(all & ((1u << lane) - 1))] = line;
    at += __popc(all);
  });
}

template <class L>
struct HasByBlocks {
  static constexpr bool value = requires { L::kByBlocks; };
};

/// The first n of 32 tiles, as bits.
JALI_HD constexpr u32 first_tiles(i32 n) { return n <= 0 ? 0 : ~0u >> (32 - min_of(n, 32)); }

/// Lines are row tiles of kRows (or key tiles of kKeys). A unit is `together` <= 32 words of a line: one
/// lane classifies all 32 tiles of a word as one large tile, and tile by tile are looked at only the
/// words that this leaves open. PERF: a window's map of 1M x 1M tokens is 33 MB of zeros and 24,000
/// words to look into. A unit is a block's for an unsure mask, whose cells its 8 warps ask for four
/// tiles each; one warp's for others.
/// lines: of one head, of all sequences where tokens are packed. by_tiles: every tile is classified by itself,
/// so that maps by row tiles and by key tiles agree; spans, which spare whole words, may drop a tile in one of
/// them that its class keeps in the other. all: every tile is active, and none full, whatever the mask says.
/// storing: see store_or_wait; 0: what there is to store was stored before. counter: [0] blocks that began, if
/// some store, [1] blocks done; zero before and after; null if none store and no lines are listed.
template <class M, i32 kRows, i32 kKeys, bool kKeyLines>
__device__ void map_tiles(const M& mask, const Sequences& s, const TileMap& map, i32 lines,
                          i32 num_heads, i32 together, bool by_tiles, bool all, i32 storing,
                          i32* counter) {
  ptx::begin_kernel();
  constexpr i32 kLine = kKeyLines ? kKeys : kRows, kAcross = kKeyLines ? kRows : kKeys;
  constexpr i32 kWord = 32 * kAcross;
  // What many tiles hold takes long to read from as many blocks: their span alone is looked at.
  constexpr bool kBlocks =
      any_leaf<HasByBlocks, M> || (kKeyLines ? M::kRowsReadTables : M::kColsReadTables);
  constexpr bool kUnsure = tile::is_unsure<M>;
  const i32 lane = threadIdx.x & 31, warp_of_block = threadIdx.x / 32, warps = blockDim.x / 32;
  i32 block = blockIdx.x;
  if constexpr (M::kRowsReadTables || M::kColsReadTables) {
    if (storing > 0) block = store_or_wait(mask, s, storing, counter);
    if (block < 0) return;
  }
  const u32 blocks = gridDim.x - storing;
  const u32 first = kUnsure ? block : block * warps + warp_of_block;
  const u32 step = kUnsure ? blocks : blocks * warps;
  const bool writes = !kUnsure || warp_of_block == 0;
  const u32 units_of_line = ceil_div(map.words, together);
  // 2^32 words would be 32 GB.
  const u32 units = lines * units_of_line * num_heads * (map.stride_b ? s.B : 1);
  for (u32 unit = first; unit < units; unit += step) {
    const u32 rest = unit / units_of_line, head = rest / lines;
    const i32 n = static_cast<i32>(rest % lines);
    const i32 first_word = static_cast<i32>(unit % units_of_line) * together;
    const i32 h = static_cast<i32>(head % num_heads) * map.head_div;
    const i32 b = static_cast<i32>(head / num_heads);
    const TilePlace place = warp_tile(s, b, h, n, kLine, !kKeyLines);
    const Frame& f = place.f;
    const i32 begin = place.first;
    const i32 length = kKeyLines ? f.num_keys : f.num_rows;
    const i32 across = begin < length ? (kKeyLines ? f.num_rows : f.num_keys) : 0;
    const i32 end = min_of(begin + kLine, length);
    u64* const line = map.line(f, n);
    auto class_of = [&](i32 at, i32 to) {
      const i32 i0 = kKeyLines ? at : begin, i1 = kKeyLines ? to : end;
      const i32 j0 = kKeyLines ? begin : at, j1 = kKeyLines ? end : to;
      return mask.classify(f, mask.rows(f, i0, i1), mask.cols(f, j0, j1));
    };
    auto outside_span = [&](i32 at, i32 to) {
      Span span;
      if constexpr (kKeyLines) {
        span = mask.row_span(f, mask.cols(f, begin, end));
      } else {
        span = mask.key_span(f, mask.rows(f, begin, end));
      }
      return span.begin >= to || span.end <= at;
    };
    // Of the tiles from `at` on, those that are full if all their cells in bounds are visible: a tile
    // that hangs over the last key has columns to hide.
    auto can_be_full = [&](i32 at) {
      const i32 whole = kKeyLines ? begin + kKeys <= f.num_keys ? 32 : 0 : (across - at) / kKeys;
      return all ? 0 : first_tiles(whole);
    };

    bool open = false;
    const i32 own = first_word + lane;
    if (lane < together && own < map.words) {
      const i32 at = own * kWord, to = min_of(at + kWord, across);
      Tile cls = Tile::kEmpty;
      if (at < across) {
        if (all) {
          cls = Tile::kFull;
        } else if (by_tiles) {
          cls = Tile::kPartial;
        } else if constexpr (kBlocks) {
          cls = outside_span(at, to) ? Tile::kEmpty : Tile::kPartial;
        } else {
          cls = class_of(at, to);
        }
      }
      open = cls == Tile::kPartial;
      if (!open && writes) {
        const u32 active = cls == Tile::kFull ? first_tiles(ceil_div(to - at, kAcross)) : 0;
        line[own] = u64{active & can_be_full(at)} << 32 | active;
      }
    }
    u32 left = __ballot_sync(0xffffffffu, open);
#pragma unroll 1
    while (left) {
      const i32 word = first_word + __ffs(left) - 1;
      left &= left - 1;
      const i32 at = word * kWord + lane * kAcross;
      Tile cls = Tile::kEmpty;
      if (at < across) cls = class_of(at, min_of(at + kAcross, across));
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
        __syncthreads();  // the next word writes them
      }
      full &= can_be_full(word * kWord);
      if (writes && lane == 0) line[word] = u64{full} << 32 | active;
    }
  }
  if (map.long_lines) {
    list_lines(map, lines, counter);
  } else if (storing > 0 && threadIdx.x == 0) {
    leave(counter);
  }
}

}  // namespace jali::cuda
