// What the backward kernels share: the layout of a key tile's shared memory, the loader, and the steps
// of a consumer warpgroup that do not depend on who owns what.
#pragma once

#include "cuda/kernel/backward.h"
#include "cuda/ptx/bulk.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/matrix.h"
#include "cuda/ptx/order.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tile/backward_rows.h"
#include "cuda/tile/backward_scores.h"
#include "cuda/tile/no_mask.h"
#include "cuda/tile/store.h"
#include "mask/combine.h"

namespace jali::tile {

using namespace ptx;
using cuda::BackwardArgs;
using cuda::Sequences;

/// T: BF16 or FP16. kRows, kKeys: of a tile. kRestBytes: of the variant's own memory, after K, V and
/// two stages of Q and dO (1024-aligned). M: the mask. kOrdered: the sums of dq are made in the order
/// of the key tiles, so that they are the same every time. kOptions: of the scores. kWanted:
/// gradients of biases. All matrices lie as [dim / 64][rows][64] under the 128-byte swizzle.
template <class T, i32 kD, i32 kDv, i32 kRows, i32 kKeys, i32 kRestBytes, class M, bool kOrdered,
          cuda::ScoreOptions kOptions, cuda::BiasGradients kWanted>
struct BackwardTiles {
  static constexpr i32 kStages = 2;
  static constexpr i32 kConsumerWarps = 8;
  static constexpr i32 kHalves = ceil_div(kD, 64), kHalvesV = ceil_div(kDv, 64);  // 64 columns each
  static constexpr i32 kQHalf = kRows * 128, kKHalf = kKeys * 128;                // bytes
  static constexpr i32 kQBytes = kHalves * kQHalf, kOBytes = kHalvesV * kQHalf;
  static constexpr i32 kKBytes = kHalves * kKHalf, kVBytes = kHalvesV * kKHalf;
  static constexpr i32 kStatBytes = kRows * 4;
  static constexpr i32 kK = 0, kV = kK + kKBytes, kQ = kV + kVBytes, kO = kQ + kStages * kQBytes;
  static constexpr i32 kRest = kO + kStages * kOBytes;
  static constexpr i32 kStats = kRest + kRestBytes;
  static constexpr i32 kBarriers = kStats + 2 * kStages * kStatBytes;
  static constexpr i32 kNotes = kBarriers + 128;
  static constexpr i32 kSharedBytes = kBarriers + cuda::kBackwardNotesBytes;
  using Rows = BackwardRows<T, kRows, kHalves * 64, kDv, kOptions.sinks, kWanted.rows>;
  // PERF: as many as the registers hold beside dv.
  static constexpr i32 kTogether = kOptions.bias != cuda::BiasType::kNone && kDv > 128 ? 1 : 4;
  using Scores = BackwardScores<T, kRows, kOptions, kWanted, kTogether>;

  // What the loader says of a row tile:
  static constexpr i32 kFirst = 1, kPartial = 2, kEnd = 4;  // the first of a key tile; no more
  struct alignas(32) Note {
    i32 flags, number;  // of the row tile among all (dq_sum)
    i32 row, h;         // its first row, its query head
    i32 turn;           // kOrdered: key tiles that add to its dq before this one
  };
  struct Item {  // a key tile
    Frame f;
    i32 key, h_kv;
  };
  /// Written by the loader; items: 4, so that the one in use is never the one written.
  struct Notes {
    Note note[kStages];
    Item item[4];
  };
  static_assert(kNotes + sizeof(Notes) + 1024 <= kSharedBytes, "the base is aligned by hand");

  struct Shared {
    u32 base;
    JALI_DEVICE u32 k() const { return base + kK; }
    JALI_DEVICE u32 v() const { return base + kV; }
    JALI_DEVICE u32 q(u32 stage) const { return base + kQ + stage * kQBytes; }
    JALI_DEVICE u32 o(u32 stage) const { return base + kO + stage * kOBytes; }
    JALI_DEVICE u32 rest() const { return base + kRest; }
    JALI_DEVICE u32 neg_lse(u32 stage) const { return base + kStats + stage * kStatBytes; }
    JALI_DEVICE u32 neg_delta(u32 stage) const { return neg_lse(stage) + kStages * kStatBytes; }
    JALI_DEVICE u32 note(u32 stage) const { return base + kNotes + stage * sizeof(Note); }
    JALI_DEVICE u32 barrier(i32 n) const { return base + kBarriers + 8 * n; }
    JALI_DEVICE u32 k_full() const { return barrier(0); }
    JALI_DEVICE u32 v_full() const { return barrier(1); }
    JALI_DEVICE u32 k_empty() const { return barrier(2); }
    JALI_DEVICE u32 v_empty() const { return barrier(3); }
    JALI_DEVICE u32 q_full(u32 stage) const { return barrier(4 + stage); }
    JALI_DEVICE u32 o_full(u32 stage) const { return barrier(6 + stage); }
    JALI_DEVICE u32 rows_empty(u32 stage) const { return barrier(8 + stage); }
    JALI_DEVICE u32 note_full(u32 stage) const { return barrier(10 + stage); }
    JALI_DEVICE u32 own(i32 n) const { return barrier(12 + n); }  // of the variant, n < 4
  };
  JALI_DEVICE static void init_barriers(const Shared& sm) {
    barrier_init(sm.k_full(), 1);
    barrier_init(sm.v_full(), 1);
    barrier_init(sm.k_empty(), kConsumerWarps);
    barrier_init(sm.v_empty(), kConsumerWarps);
    for (i32 n = 0; n < kStages; ++n) {
      barrier_init(sm.note_full(n), 1);
      barrier_init(sm.q_full(n), 1);
      barrier_init(sm.o_full(n), 1);
      barrier_init(sm.rows_empty(n), kConsumerWarps);
    }
  }

  // ---- loader ---------------------------------------------------------------------------------
  struct Loader {
    const BackwardArgs& a;
    const Shared& sm;
    Notes* notes;
    const TensorMap &map_q, &map_k, &map_v, &map_o;
    u32 steps = 0, items = 0;  // sent off; lane 0 counts

    template <i32 kBoxes, i32 kBox>
    JALI_DEVICE static void load(u32 shared, const TensorMap& map, u32 barrier, i32 token, i32 h,
                                 i32 b) {
#pragma unroll
      for (i32 n = 0; n < kBoxes; ++n) {
        load_box(shared + n * kBox, map, barrier, 64 * n, token, h, b);
      }
    }
    /// Sends off a row tile, and, before its dO, the keys of the item that it opens; the note first,
    /// since the consumers free the keys of the item before only when they have seen it.
    JALI_DEVICE void send(const Item& item, const Note& note) {
      const u32 stage = steps % kStages, parity = steps / kStages & 1;
      const bool opens = note.flags & kFirst;
      const i32 b = a.seq.varlen() ? 0 : item.f.b;
      const i32 token = item.f.q_start + note.row;
      barrier_wait(sm.rows_empty(stage), parity ^ 1);
      if (opens) notes->item[items % 4] = item;
      notes->note[stage] = note;
      barrier_arrive(sm.note_full(stage));
      barrier_expect(sm.q_full(stage), kQBytes + kStatBytes);
      load<kHalves, kQHalf>(sm.q(stage), map_q, sm.q_full(stage), token, note.h, b);
      load_bulk(sm.neg_lse(stage), a.neg_lse + i64(note.number) * kRows, kStatBytes,
                sm.q_full(stage));
      if (opens) {
        const i32 key_token = item.f.k_start + item.key;
        barrier_wait(sm.v_empty(), items & 1 ^ 1);  // before K: dQ of the last row tile needs that
        barrier_expect(sm.v_full(), kVBytes);
        load<kHalvesV, kKHalf>(sm.v(), map_v, sm.v_full(), key_token, item.h_kv, b);
        barrier_wait(sm.k_empty(), items & 1 ^ 1);
        barrier_expect(sm.k_full(), kKBytes);
        load<kHalves, kKHalf>(sm.k(), map_k, sm.k_full(), key_token, item.h_kv, b);
        ++items;
      }
      barrier_expect(sm.o_full(stage), kOBytes + kStatBytes);
      load<kHalvesV, kQHalf>(sm.o(stage), map_o, sm.o_full(stage), token, note.h, b);
      load_bulk(sm.neg_delta(stage), a.neg_delta + i64(note.number) * kRows, kStatBytes,
                sm.o_full(stage));
      ++steps;
    }
    JALI_DEVICE void finish() {
      const u32 stage = steps % kStages;
      barrier_wait(sm.rows_empty(stage), (steps / kStages & 1) ^ 1);
      notes->note[stage].flags = kEnd;
      barrier_arrive(sm.note_full(stage));
    }
  };

  /// Keys that nobody sees.
  JALI_DEVICE static void write_zeros(const BackwardArgs& a, const Item& item, i32 lane) {
    const i32 keys = min_of(kKeys, item.f.num_keys - item.key);
    for (i32 r = 0; r < keys; ++r) {
      const i64 token = i64(item.f.k_start) + item.key + r;
      u16* dk = static_cast<u16*>(a.dk) + cuda::offset(a.dk_strides, item.f.b, item.h_kv, token);
      u16* dv = static_cast<u16*>(a.dv) + cuda::offset(a.dv_strides, item.f.b, item.h_kv, token);
      for (i32 d = lane; d < a.D; d += 32) dk[d] = 0;
      for (i32 d = lane; d < a.Dv; d += 32) dv[d] = 0;
    }
  }

  /// Key tile number n in the order of work: within a section of heads, tile by tile.
  JALI_DEVICE static Item item_of(const BackwardArgs& a, i32 n) {
    const Sequences& s = a.seq;
    const i32 tiles = s.varlen() ? a.key_tiles : ceil_div(s.Lk, kKeys);
    const i32 first = n / (a.section * tiles) * a.section, rest = n % (a.section * tiles);
    const i32 heads = min_of(a.section, a.heads - first);
    const i32 head = first + rest % heads, tile = rest / heads;
    Item item;
    if (s.varlen()) {
      const cuda::TilePlace at = cuda::tile_place(s, s.cu_k, 0, tile, kKeys);
      item.h_kv = head;
      item.key = at.first;
      item.f = cuda::frame_of(s, at.b, head * s.group);
    } else {
      const i32 num_heads = s.Hq / s.group;
      item.h_kv = head % num_heads;
      item.key = tile * kKeys;
      item.f = cuda::frame_of(s, head / num_heads, item.h_kv * s.group);
    }
    return item;
  }

  /// The row tiles that can see the keys of `cols` at all, as a range of tiles.
  JALI_DEVICE static Span row_tiles(const M& mask, const Frame& f,
                                    const typename M::ColBlock& cols) {
    const Span span = mask.row_span(f, cols);
    return {max_of(span.begin, 0) / kRows, ceil_div(min_of(span.end, f.num_rows), kRows)};
  }
  /// How many of the key tiles before `keys` are active in row tile t. All lanes call it.
  JALI_DEVICE static i32 turn_of(const M& mask, const Frame& f, i32 t, i32 keys) {
    const typename M::RowBlock rows = mask.rows(f, t * kRows, min_of((t + 1) * kRows, f.num_rows));
    i32 turn = 0;
#pragma unroll 1
    for (i32 begin = 0; begin < keys; begin += 32) {
      const i32 n = begin + (threadIdx.x & 31);
      bool active = false;
      if (n < keys) {
        const typename M::ColBlock cols =
            mask.cols(f, n * kKeys, min_of((n + 1) * kKeys, f.num_keys));
        const Span tiles = row_tiles(mask, f, cols);
        active = t >= tiles.begin && t < tiles.end && mask.classify(f, rows, cols) != Tile::kEmpty;
      }
      turn += __popc(__ballot_sync(0xffffffffu, active));
    }
    return turn;
  }

  JALI_DEVICE static void produce(const BackwardArgs& a, const M& mask, Loader loader) {
    const i32 lane = threadIdx.x & 31;
    const i32 num_items = a.heads * a.key_tiles;
    // From the counter, the first one too: where not all blocks fit the device at once, those that do
    // must hold the work that others' turns wait for.
    i32 n = 0;
    if (lane == 0) n = atomicAdd(a.counter, 1);
    n = broadcast(n);
#pragma unroll 1
    while (n < num_items) {
      Item item = item_of(a, n);
      Frame& f = item.f;
      const i32 key_end = min_of(item.key + kKeys, item.f.num_keys);
      // Where packed tokens leave a tile without keys, there is nothing to do.
      const i32 heads = item.key < item.f.num_keys ? a.seq.group : 0;
      bool first = true;
#pragma unroll 1
      for (i32 g = 0; g < heads; ++g) {
        f.h = item.h_kv * a.seq.group + g;
        const typename M::ColBlock cols = mask.cols(f, item.key, key_end);
        const Span tiles = row_tiles(mask, f, cols);
#pragma unroll 1
        for (i32 begin = tiles.begin; begin < tiles.end; begin += 32) {
          const i32 t = begin + lane;
          Tile cls = Tile::kEmpty;
          if (t < tiles.end) {
            cls = mask.classify(f, mask.rows(f, t * kRows, min_of((t + 1) * kRows, f.num_rows)),
                                cols);
            // Keys behind the end have to be hidden; rows there weigh nothing as they are.
            if (cls == Tile::kFull && item.key + kKeys > f.num_keys) cls = Tile::kPartial;
          }
          u32 active = __ballot_sync(0xffffffffu, cls != Tile::kEmpty);
          const u32 partial = __ballot_sync(0xffffffffu, cls == Tile::kPartial);
#pragma unroll 1
          while (active) {
            const i32 bit = __ffs(active) - 1;
            active &= active - 1;
            const i32 turn = kOrdered ? turn_of(mask, f, begin + bit, item.key / kKeys) : 0;
            if (lane == 0) {
              const i32 row_tile0 = a.seq.varlen() ? cuda::first_slot(f.q_start, f.b, kRows)
                                                   : f.b * ceil_div(f.num_rows, kRows);
              loader.send(item, {(first ? kFirst : 0) | (partial >> bit & 1 ? kPartial : 0),
                                 f.h * a.row_tiles + row_tile0 + begin + bit, (begin + bit) * kRows,
                                 f.h, turn});
            }
            first = false;
          }
        }
      }
      if (first) write_zeros(a, item, lane);
      // PERF: not earlier, or blocks hold work back from others at the end.
      if (lane == 0) n = atomicAdd(a.counter, 1);
      n = broadcast(n);
    }
    if (lane == 0) {
      loader.finish();
      cuda::leave(a.counter);
    }
  }

  // ---- steps of the consumers -----------------------------------------------------------------
  /// What accumulators start at: the statistics of the rows; zeros where options come between.
  template <bool kStatistics>
  JALI_DEVICE static void start(float (&x)[kRows / 2], u32 shared) {
    if constexpr (kStatistics) {
      load_statistics(x, shared);
    } else {
      // PERF: not by the first MMA's leave: ptxas takes more registers then, and spills.
#pragma unroll
      for (i32 n = 0; n < kRows / 2; ++n) x[n] = 0;
    }
  }
  JALI_DEVICE static void load_statistics(float (&x)[kRows / 2], u32 shared) {
#pragma unroll
    for (i32 j = 0; j < kRows / 8; ++j) {
      load_pair(shared + 32 * j, x[4 * j], x[4 * j + 1]);
      x[4 * j + 2] = x[4 * j];
      x[4 * j + 3] = x[4 * j + 1];
    }
  }
  /// d += A B', A 64 of the keys, B the row tile, both with the head dim as the inner one.
  template <i32 kDim>
  JALI_DEVICE static void multiply_dim(float (&d)[kRows / 2], u32 keys, u32 rows) {
    const u32 x = descriptor(keys, 16), y = descriptor(rows, 16);
#pragma unroll
    for (i32 t = 0; t < kDim / 16; ++t) {
      Wgmma<T, kRows, false>::ss(d, x + t / 4 * (kKHalf / 16) + t % 4 * 2,
                                 y + t / 4 * (kQHalf / 16) + t % 4 * 2, 1);
    }
  }
  /// d += W' X, W in registers, X the row tile.
  template <i32 kDim>
  JALI_DEVICE static void multiply_rows(float (&d)[kDim / 2], const u32* w, u32 rows) {
    const u32 x = descriptor(rows, kQHalf);
#pragma unroll
    for (i32 t = 0; t < kRows / 16; ++t) {
      Wgmma<T, kDim, true>::rs(d, w + 4 * t, x + t * (2048 / 16), 1);
    }
  }
  /// Where a thread's cells are; `first`: the first of the warp's keys in the key tile.
  JALI_DEVICE static CellPlace place(const Item& item, const Note& note, i32 first, i32 lane) {
    CellPlace at{item.f, note.row + 2 * (lane & 3), item.key + first + lane / 4};
    at.f.h = note.h;
    return at;
  }
  /// Cells of a partial tile that are not visible weigh nothing.
  /// `first`: the first of the warp's keys in the key tile.
  JALI_DEVICE static void hide(float (&s)[kRows / 2], const M& mask, const Item& item,
                               const Note& note, i32 first, i32 lane) {
    Frame f = item.f;
    f.h = note.h;
    const i32 key = item.key + first + lane / 4;
    const bool in0 = key < f.num_keys, in1 = key + 8 < f.num_keys;
    const typename M::Col c0 = mask.col(f, key), c1 = mask.col(f, key + 8);
#pragma unroll
    for (i32 j = 0; j < kRows / 8; ++j) {
#pragma unroll
      for (i32 x = 0; x < 2; ++x) {
        const typename M::Row r = mask.row(f, note.row + 8 * j + 2 * (lane & 3) + x);
        if (!(in0 & mask.visible(r, c0))) s[4 * j + x] = 0;
        if (!(in1 & mask.visible(r, c1))) s[4 * j + 2 + x] = 0;
      }
    }
  }
  /// The same for block n of 8 rows; `cols`: of the thread's two keys.
  JALI_DEVICE static void hide_block(float (&s)[kRows / 2], i32 n, const M& mask,
                                     const CellPlace& at, const typename M::Col (&cols)[2]) {
#pragma unroll
    for (i32 x = 0; x < 2; ++x) {
      const typename M::Row r = mask.row(at.f, at.row + 8 * n + x);
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        if (!(at.key + 8 * e < at.f.num_keys & mask.visible(r, cols[e]))) s[4 * n + 2 * e + x] = 0;
      }
    }
  }
  /// Products, or raw scores less LSE, to weights, where options are on. take(n, p, slopes) gets
  /// them rounded, two words for each block n of 8 rows. PERF: block by block, so that fp32 weights
  /// and what comes of them are not all there at once: they would not fit the registers.
  template <bool kHides, class Take>
  JALI_DEVICE static void weigh_blocks(float (&s)[kRows / 2], const BackwardArgs& a, const M& mask,
                                       const CellPlace& at, u32 neg_lse, Take take) {
    const Scores scores(a, at, neg_lse);
    const typename M::Col cols[2] = {mask.col(at.f, at.key), mask.col(at.f, at.key + 8)};
#pragma unroll
    for (i32 n = 0; n < kRows / 8; ++n) {
      u32 slopes[2];
      scores.weigh(s, n, slopes);
      if (kHides) hide_block(s, n, mask, at, cols);
      const u32 p[2] = {T::pack(s[4 * n], s[4 * n + 1]), T::pack(s[4 * n + 2], s[4 * n + 3])};
      take(n, p, slopes);
    }
  }
  /// A warp's 16 keys of dk or dv; `first` as above.
  template <i32 kCount>
  JALI_DEVICE static void store(const float (&x)[kCount], float scale, void* out,
                                const cuda::Strides& strides, i32 cols, const Item& item, i32 first,
                                i32 lane) {
    const i32 key = item.key + first;
    u16* to = static_cast<u16*>(out) +
              cuda::offset(strides, item.f.b, item.h_kv, i64(item.f.k_start) + key);
    store_rows<T>(x, scale, to, strides.l, item.f.num_keys - key, cols, lane);
  }

  /// Runs the roles: consume(sm, notes, warpgroup), the consumers' part; own_barriers(sm).
  template <i32 kLoaderRegisters, i32 kConsumerRegisters, class Barriers, class Consume>
  JALI_DEVICE static void run(const TensorMap& map_q, const TensorMap& map_k,
                              const TensorMap& map_v, const TensorMap& map_o, const BackwardArgs& a,
                              const M& mask, Barriers own_barriers, Consume consume) {
    extern __shared__ char raw[];
    const u32 unaligned = shared_address(raw);
    const Shared sm{(unaligned + 1023) & ~1023u};
    Notes* notes = reinterpret_cast<Notes*>(raw + (sm.base - unaligned) + kNotes);
    const i32 wg = broadcast(threadIdx.x >> 7);
    if (threadIdx.x == 0) {
      init_barriers(sm);
      own_barriers(sm);
      barrier_init_fence();
    }
    __syncthreads();
    if (wg == 0) {
      give_registers<kLoaderRegisters>();
      if (threadIdx.x < 32) produce(a, mask, {a, sm, notes, map_q, map_k, map_v, map_o});
    } else {
      take_registers<kConsumerRegisters>();
      consume(sm, notes, wg - 1);
    }
  }
};

}  // namespace jali::tile
