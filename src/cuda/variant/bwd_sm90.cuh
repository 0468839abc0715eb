// Backward, sm_90a: dq, dk, dv over tiles of 128 keys, D and Dv up to 128.
//
// Serves    fp16, bf16; D and Dv any multiple of 8 (kD, kDv: of 16, at least those); GQA; varlen;
//           any mask: empty tiles cost nothing, the cells of partial ones are masked one by one.
// Tensors   q, dout [B, Hq, Lq, D | Dv] in boxes of {64, kRows, 1, 1}, k, v [B, Hkv, Lk, D | Dv] of
//           {64, 128, 1, 1}, rank-4 maps (D, L or tokens, heads, B); the rest as BackwardArgs say.
// Roles     warpgroup 0: warp 0 loads (persistent; takes key tiles from a counter, first ones first
//           within a section of heads; walks the row tiles of all query heads of the KV head and
//           classifies 32 of them at a time). Warpgroups 1 and 2: 64 keys each.
// A step    one row tile: S' = K Q' and dP' = V dO' (' transposed), P and dS stay in registers as
//           left operands of dV += P' dO and dK += dS' Q. dS goes to shared memory as well, where
//           both warpgroups' keys meet in dQ = dS K, one step late: 64 x 64 of it a warpgroup, in
//           columns (kRows 64) or rows (kRows 128), added to dq_sum by the copy engine.
//           PERF: dQ of the last step before dK of this one, so that it leaves beside dK: +13 %.
// Shared    K, V; Q, dO 2 stages each, all as [dim / 64][rows][64] under the 128-byte swizzle; dS 2
//           buffers [rows / 64][128 keys][64]; dQ; statistics of 2 stages; notes. 199 KB at D 128.
// Barriers  k_full, v_full, q_full, o_full: 1 arrival + bytes, by the loader (q_full: the note of the
//           row tile too); keys_empty, rows_empty: one arrival a consumer warp (8), when the tensor
//           cores have read K and V, Q and dO; ds_full, ds_empty: one a consumer warp (8).
#pragma once

#include "cuda/kernel/backward.h"

namespace jali::cuda {

/// For host and kernel: D and Dv are those of the kernel.
JALI_HD constexpr BackwardTile backward_tile(i32 D, i32 Dv) {
  const bool narrow = D <= 64 && Dv <= 64;
  const i32 keys = 128, rows = narrow ? 128 : 64;
  const i32 dim = ceil_div(D, 64) * 64, dim_v = ceil_div(Dv, 64) * 64;
  const i32 shared = 2 * (keys + 2 * rows) * (dim + dim_v)   // K, V; Q, dO
                     + 2 * 2 * rows * keys + 4 * rows * dim  // dS, dQ
                     + 4 * 4 * rows + 512 + 1024;            // statistics, notes, alignment
  return {rows, keys, rows * dim, shared, 384, 1};
}

}  // namespace jali::cuda

#if defined(__CUDACC_RTC__)
#include "cuda/ptx/bulk.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/matrix.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tile/backward_rows.h"
#include "cuda/tile/no_mask.h"
#include "cuda/tile/store.h"
#include "mask/combine.h"

namespace jali::cuda {

using namespace ptx;

/// T: BF16 or FP16. M: the mask.
template <class T, i32 kD, i32 kDv, class M>
struct Backward {
  static constexpr BackwardTile kTile = backward_tile(kD, kDv);
  static constexpr i32 kRows = kTile.rows, kKeys = kTile.keys, kStages = 2;
  static constexpr i32 kConsumerWarps = 8;
  static constexpr i32 kHalves = ceil_div(kD, 64), kHalvesV = ceil_div(kDv, 64);  // 64 columns each
  static constexpr i32 kQHalf = kRows * 128, kKHalf = kKeys * 128;                // bytes
  static constexpr i32 kQBytes = kHalves * kQHalf, kOBytes = kHalvesV * kQHalf;
  static constexpr i32 kKBytes = kHalves * kKHalf, kVBytes = kHalvesV * kKHalf;
  static constexpr i32 kDsBytes = kRows * kKeys * 2, kStatBytes = kRows * 4;
  static constexpr bool kSplitsRows = kRows == 128;  // dQ among the warpgroups
  static_assert(kSplitsRows ? kHalves == 1 : kHalves == 2, "dQ is 64 x 64 a warpgroup");
  static constexpr i32 kK = 0, kV = kK + kKBytes, kQ = kV + kVBytes, kO = kQ + kStages * kQBytes;
  static constexpr i32 kDs = kO + kStages * kOBytes, kDq = kDs + 2 * kDsBytes;
  static constexpr i32 kStats = kDq + kTile.dq_floats * 4;
  static constexpr i32 kBarriers = kStats + 2 * kStages * kStatBytes;
  static constexpr i32 kNotes = kBarriers + 128;
  static_assert(kNotes + 384 + 1024 <= kTile.shared_bytes, "the base is aligned to 1024 by hand");
  using Rows = tile::BackwardRows<T, kRows, kHalves * 64, kDv>;

  // What the loader says of a row tile:
  static constexpr i32 kFirst = 1, kPartial = 2, kEnd = 4;  // the first of a key tile; no more
  struct Note {
    i32 flags, number;  // of the row tile among all (dq_sum)
    i32 row, h;         // its first row, its query head
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
  static_assert(sizeof(Notes) <= 384);

  struct Shared {
    u32 base;
    JALI_DEVICE u32 k() const { return base + kK; }
    JALI_DEVICE u32 v() const { return base + kV; }
    JALI_DEVICE u32 q(u32 stage) const { return base + kQ + stage * kQBytes; }
    JALI_DEVICE u32 o(u32 stage) const { return base + kO + stage * kOBytes; }
    JALI_DEVICE u32 ds(u32 buffer) const { return base + kDs + buffer * kDsBytes; }
    JALI_DEVICE u32 dq(i32 warp) const { return base + kDq + warp * 4096; }
    JALI_DEVICE u32 neg_lse(u32 stage) const { return base + kStats + stage * kStatBytes; }
    JALI_DEVICE u32 neg_delta(u32 stage) const { return neg_lse(stage) + kStages * kStatBytes; }
    JALI_DEVICE u32 note(u32 stage) const { return base + kNotes + stage * sizeof(Note); }
    JALI_DEVICE u32 barrier(i32 n) const { return base + kBarriers + 8 * n; }
    JALI_DEVICE u32 k_full() const { return barrier(0); }
    JALI_DEVICE u32 v_full() const { return barrier(1); }
    JALI_DEVICE u32 keys_empty() const { return barrier(2); }
    JALI_DEVICE u32 q_full(u32 stage) const { return barrier(3 + stage); }
    JALI_DEVICE u32 o_full(u32 stage) const { return barrier(5 + stage); }
    JALI_DEVICE u32 rows_empty(u32 stage) const { return barrier(7 + stage); }
    JALI_DEVICE u32 ds_full(u32 buffer) const { return barrier(9 + buffer); }
    JALI_DEVICE u32 ds_empty(u32 buffer) const { return barrier(11 + buffer); }
  };

  // ---- loader ---------------------------------------------------------------------------------
  struct Loader {
    const BackwardArgs& a;
    const Shared& sm;
    Notes* notes;
    const TensorMap &map_q, &map_k, &map_v, &map_o;
    u32 steps = 0, items = 0;  // sent off

    template <i32 kBoxes, i32 kBox>
    JALI_DEVICE static void load(u32 shared, const TensorMap& map, u32 barrier, i32 token, i32 h,
                                 i32 b) {
#pragma unroll
      for (i32 n = 0; n < kBoxes; ++n) {
        load_box(shared + n * kBox, map, barrier, 64 * n, token, h, b);
      }
    }
    /// Sends off a row tile, and, before its dO, the keys of the item that it opens. Q and the note
    /// before the keys: the consumers free those only when they have seen that note.
    JALI_DEVICE void send(const Item& item, const Note& note) {
      const u32 stage = steps % kStages, parity = steps / kStages & 1;
      const bool opens = note.flags & kFirst;
      const i32 b = a.seq.varlen() ? 0 : item.f.b;
      const i32 token = item.f.q_start + note.row;
      barrier_wait(sm.rows_empty(stage), parity ^ 1);
      if (opens) notes->item[items % 4] = item;
      notes->note[stage] = note;
      barrier_expect(sm.q_full(stage), kQBytes + kStatBytes);
      load<kHalves, kQHalf>(sm.q(stage), map_q, sm.q_full(stage), token, note.h, b);
      load_bulk(sm.neg_lse(stage), a.neg_lse + i64(note.number) * kRows, kStatBytes,
                sm.q_full(stage));
      if (opens) {
        const i32 key_token = item.f.k_start + item.key;
        barrier_wait(sm.keys_empty(), items & 1 ^ 1);
        barrier_expect(sm.k_full(), kKBytes);
        load<kHalves, kKHalf>(sm.k(), map_k, sm.k_full(), key_token, item.h_kv, b);
        barrier_expect(sm.v_full(), kVBytes);
        load<kHalvesV, kKHalf>(sm.v(), map_v, sm.v_full(), key_token, item.h_kv, b);
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
      barrier_arrive(sm.q_full(stage));
    }
  };

  /// Keys that nobody sees.
  JALI_DEVICE static void write_zeros(const BackwardArgs& a, const Item& item, i32 lane) {
    const i32 keys = min_of(kKeys, item.f.num_keys - item.key);
    for (i32 r = 0; r < keys; ++r) {
      const i64 token = i64(item.f.k_start) + item.key + r;
      u16* dk = static_cast<u16*>(a.dk) + offset(a.dk_strides, item.f.b, item.h_kv, token);
      u16* dv = static_cast<u16*>(a.dv) + offset(a.dv_strides, item.f.b, item.h_kv, token);
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
      const TilePlace at = tile_place(s, s.cu_k, 0, tile, kKeys);
      item.h_kv = head;
      item.key = at.first;
      item.f = frame_of(s, at.b, head * s.group);
    } else {
      const i32 num_heads = s.Hq / s.group;
      item.h_kv = head % num_heads;
      item.key = tile * kKeys;
      item.f = frame_of(s, head / num_heads, item.h_kv * s.group);
    }
    return item;
  }

  JALI_DEVICE static void produce(const BackwardArgs& a, const M& mask, Loader loader) {
    const i32 lane = threadIdx.x & 31;
    const i32 num_items = a.heads * a.key_tiles;
    i32 n = blockIdx.x;
#pragma unroll 1
    while (n < num_items) {
      i32 next = 0;
      if (lane == 0) next = gridDim.x + atomicAdd(a.counter, 1);
      Item item = item_of(a, n);
      Frame& f = item.f;
      const i32 key_end = min_of(item.key + kKeys, f.num_keys);
      // Where packed tokens leave a tile without keys, there is nothing to do.
      const i32 heads = item.key < f.num_keys ? a.seq.group : 0;
      const i32 row_tile0 =
          a.seq.varlen() ? first_slot(f.q_start, f.b, kRows) : f.b * ceil_div(f.num_rows, kRows);
      bool first = true;
#pragma unroll 1
      for (i32 g = 0; g < heads; ++g) {
        f.h = item.h_kv * a.seq.group + g;
        const typename M::ColBlock cols = mask.cols(f, item.key, key_end);
        const Span span = mask.row_span(f, cols);
        const i32 end = ceil_div(min_of(span.end, f.num_rows), kRows);
#pragma unroll 1
        for (i32 begin = max_of(span.begin, 0) / kRows; begin < end; begin += 32) {
          const i32 t = begin + lane;
          Tile cls = Tile::kEmpty;
          if (t < end) {
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
            if (lane == 0) {
              loader.send(
                  item, {(first ? kFirst : 0) | (partial >> bit & 1 ? kPartial : 0),
                         f.h * a.row_tiles + row_tile0 + begin + bit, (begin + bit) * kRows, f.h});
            }
            first = false;
          }
        }
      }
      if (first) write_zeros(a, item, lane);
      n = broadcast(next);
    }
    if (lane == 0) {
      loader.finish();
      // The last block to finish leaves the counter as it was found.
      if (atomicAdd(a.counter + 1, 1) == static_cast<i32>(gridDim.x) - 1) {
        a.counter[0] = 0;
        a.counter[1] = 0;
      }
    }
  }

  // ---- consumers ------------------------------------------------------------------------------
  struct Consumer {
    const BackwardArgs& a;
    const M& mask;
    const Shared& sm;
    const Notes* notes;
    i32 wg, warp, lane;  // warp: of the consumers, 0 to 7
    u32 ds_row;          // where this lane's rows of dS go, in buffer 0

    u32 steps = 0, items = 0;
    i32 flags = 0;                    // of the row tile that comes next
    i32 number = 0, last_number = 0;  // its number; that of the one whose dQ is due

    float dk[kD / 2], dv[kDv / 2];
    float s[kRows / 2], dp[kRows / 2];
    u32 p[kRows / 4], ds[kRows / 4];
    // PERF: dQ takes the registers of S by name; left to ptxas, it copies.
    JALI_DEVICE float (&dq())[32] { return reinterpret_cast<float (&)[32]>(s); }

    /// Waits for the next row tile's Q and note.
    JALI_DEVICE void next_note() {
      const u32 stage = steps % kStages;
      barrier_wait(sm.q_full(stage), steps / kStages & 1);
      i32 row, h;
      load_shared(sm.note(stage), flags, number, row, h);
      flags = broadcast(flags);
      number = broadcast(number);
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
    /// This warpgroup's part of dQ = dS K.
    JALI_DEVICE void multiply_dq(u32 buffer) {
      const u32 x = descriptor(sm.ds(buffer) + (kSplitsRows ? wg * kKHalf : 0), 16);
      const u32 k = descriptor(sm.k() + (kSplitsRows ? 0 : wg * kKHalf), 16);
#pragma unroll
      for (i32 t = 0; t < kKeys / 16; ++t) {
        Wgmma<T, 64, true>::template ss<true>(dq(), x + t * (2048 / 16), k + t * (2048 / 16),
                                              t > 0);
      }
    }

    /// Raw scores less LSE to weights.
    template <bool kHides>
    JALI_DEVICE void weigh() {
#pragma unroll
      for (i32 n = 0; n < kRows / 2; ++n) s[n] = exp2_fast(s[n] * a.scale_log2);
      if (kHides) hide();
    }
    /// Cells of a partial tile that are not visible weigh nothing.
    JALI_DEVICE void hide() {
      const Item& item = notes->item[(items - 1) % 4];
      const Note& note = notes->note[steps % kStages];
      Frame f = item.f;
      f.h = note.h;
      const i32 key = item.key + wg * 64 + warp % 4 * 16 + lane / 4;
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
    /// dP - delta to dS, and both P and dS to operands: k16 step t is words 4 t to 4 t + 3.
    JALI_DEVICE void differentiate() {
#pragma unroll
      for (i32 n = 0; n < kRows / 4; ++n) {
        dp[2 * n] *= s[2 * n];
        dp[2 * n + 1] *= s[2 * n + 1];
        ds[n] = T::pack(dp[2 * n], dp[2 * n + 1]);
        p[n] = T::pack(s[2 * n], s[2 * n + 1]);
      }
    }
    JALI_DEVICE void share_ds(u32 buffer) {
#pragma unroll
      for (i32 t = 0; t < kRows / 16; ++t) {
        store_matrices((ds_row + buffer * kDsBytes + t / 4 * kKHalf) ^ (t % 4 * 32), ds + 4 * t);
      }
    }
    /// Hands this warp's dQ to the copy engine, if one is due.
    JALI_DEVICE void send_dq(u32 buffer, bool due) {
      constexpr i32 kOddBlocks = (kD % 64 ? kD % 64 : 64) / 8;  // of 8 columns, in the last half
      barrier_arrive_if(sm.ds_empty(buffer), due & lane == 0);
      bulk_wait_read();
      __syncwarp();
      const u32 from = sm.dq(warp);
#pragma unroll
      for (i32 j = 0; j < 8; ++j) {
        store_four(from + j * 512 + lane * 16, dq() + 4 * j);
      }
      fence_async();
      __syncwarp();
      const u32 bytes = (kSplitsRows || wg == 1 ? kOddBlocks : 8) * 512;
      add_bulk_if(a.dq_sum + i64(last_number) * kTile.dq_floats + warp * 1024, from, bytes,
                  due & lane == 0);
      bulk_commit();
    }

    /// One row tile. kHides: it is partial. PERF: a template, since a branch while WGMMAs are in
    /// flight is dear. The first of a key tile multiplies a dQ as well, but sends none.
    template <bool kHides>
    JALI_DEVICE void step() {
      const bool due = !(flags & kFirst);
      const u32 stage = steps % kStages, parity = steps / kStages & 1;
      const u32 buffer = steps % 2, buffer_parity = steps / 2 & 1;
      const u32 last_buffer = (steps + 1) % 2, last_parity = (steps - 1) / 2 & 1;
      const i32 this_number = number;
      barrier_wait(sm.o_full(stage), parity);
      // PERF: accumulators start at the statistics, read before any MMA is in flight.
      load_statistics(s, sm.neg_lse(stage) + (lane & 3) * 8);
      load_statistics(dp, sm.neg_delta(stage) + (lane & 3) * 8);
      tie(s);
      tie(dp);
      wgmma_fence();
      multiply_dim<kD>(s, sm.k() + wg * 8192, sm.q(stage));
      wgmma_commit();
      multiply_dim<kDv>(dp, sm.v() + wg * 8192, sm.o(stage));
      wgmma_commit();
      wgmma_wait<1>();
      tie(s);
      weigh<kHides>();
      pin_weights();
      wgmma_wait<0>();
      tie(dp);
      differentiate();
      barrier_wait(sm.ds_empty(buffer), buffer_parity ^ 1);
      share_ds(buffer);
      tie(p);
      tie(ds);
      tie(dk);
      tie(dv);
      wgmma_fence();
      multiply_rows<kDv>(dv, p, sm.o(stage));
      wgmma_commit();
      fence_async();
      __syncwarp();
      barrier_arrive_if(sm.ds_full(buffer), lane == 0);
      barrier_wait(sm.ds_full(last_buffer), last_parity);
      tie(dq());
      wgmma_fence();
      multiply_dq(last_buffer);
      wgmma_commit();
      tie(ds);
      tie(dk);
      wgmma_fence();
      multiply_rows<kD>(dk, ds, sm.q(stage));
      wgmma_commit();
      ++steps;
      wgmma_wait<1>();
      tie(dq());
      send_dq(last_buffer, due);
      next_note();
      wgmma_wait<0>();
      tie(p);
      tie(ds);
      tie(dk);
      tie(dv);
      barrier_arrive_if(sm.rows_empty(stage), lane == 0);
      last_number = this_number;
    }
    /// Keeps the exponentials before the wait that follows them.
    JALI_DEVICE void pin_weights() {
      float sum = 0;
#pragma unroll
      for (i32 j = 0; j < kRows / 8; j += 2) sum += s[4 * j + 3];
      pin(sum, sm.base + kBarriers);
    }

    /// A key tile: all its row tiles.
    JALI_DEVICE void run_item() {
      barrier_wait(sm.k_full(), items & 1);
      barrier_wait(sm.v_full(), items & 1);
      ++items;
#pragma unroll
      for (i32 n = 0; n < kD / 2; ++n) dk[n] = 0;
#pragma unroll
      for (i32 n = 0; n < kDv / 2; ++n) dv[n] = 0;
      do {
        if (flags & kPartial) {
          step<true>();
        } else {
          do step<false>();
          while (flags == 0);
        }
      } while (!(flags & (kFirst | kEnd)));
      const u32 buffer = (steps - 1) % 2;
      barrier_wait(sm.ds_full(buffer), (steps - 1) / 2 & 1);
      tie(dq());
      wgmma_fence();
      multiply_dq(buffer);
      wgmma_commit();
      wgmma_wait<0>();
      tie(dq());
      barrier_arrive_if(sm.keys_empty(), lane == 0);
      send_dq(buffer, true);
      // The loader is at most one item ahead: it leaves this one's slot alone.
      store<kDv>(dv, 1.0f, a.dv, a.dv_strides, a.Dv);
      store<kD>(dk, a.scale, a.dk, a.dk_strides, a.D);
    }
    template <i32 kDim>
    JALI_DEVICE void store(const float (&x)[kDim / 2], float scale, void* out,
                           const Strides& strides, i32 cols) {
      const Item& item = notes->item[(items - 1) % 4];
      const i32 key = item.key + wg * 64 + warp % 4 * 16;
      u16* to =
          static_cast<u16*>(out) + offset(strides, item.f.b, item.h_kv, i64(item.f.k_start) + key);
      tile::store_rows<T>(x, scale, to, strides.l, item.f.num_keys - key, cols, lane);
    }
  };

  JALI_DEVICE static void consume(const BackwardArgs& a, const M& mask, const Shared& sm,
                                  const Notes* notes, i32 wg) {
    const i32 lane = threadIdx.x & 31, warp = broadcast(threadIdx.x >> 5) - 4;
    const i32 row = warp * 16 + (lane >> 3 & 1) * 8 + (lane & 7);
    const u32 ds_row = sm.ds(0) + row * 128 + ((lane >> 4 ^ (lane & 7)) << 4);
    Consumer c{a, mask, sm, notes, wg, warp, lane, ds_row};
    c.next_note();
    while (!(c.flags & kEnd)) c.run_item();
    bulk_wait();
  }

  template <i32 kLoaderRegisters, i32 kConsumerRegisters>
  JALI_DEVICE static void run(const TensorMap& map_q, const TensorMap& map_k,
                              const TensorMap& map_v, const TensorMap& map_o, const BackwardArgs& a,
                              const M& mask) {
    extern __shared__ char raw[];
    const u32 unaligned = shared_address(raw);
    const Shared sm{(unaligned + 1023) & ~1023u};
    Notes* notes = reinterpret_cast<Notes*>(raw + (sm.base - unaligned) + kNotes);
    const i32 wg = broadcast(threadIdx.x >> 7);
    if (threadIdx.x == 0) {
      barrier_init(sm.k_full(), 1);
      barrier_init(sm.v_full(), 1);
      barrier_init(sm.keys_empty(), kConsumerWarps);
      for (i32 n = 0; n < 2; ++n) {
        barrier_init(sm.q_full(n), 1);
        barrier_init(sm.o_full(n), 1);
        barrier_init(sm.rows_empty(n), kConsumerWarps);
        barrier_init(sm.ds_full(n), kConsumerWarps);
        barrier_init(sm.ds_empty(n), kConsumerWarps);
      }
      barrier_init_fence();
    }
    __syncthreads();
    if (wg == 0) {
      give_registers<kLoaderRegisters>();
      if (threadIdx.x < 32) produce(a, mask, {a, sm, notes, map_q, map_k, map_v, map_o});
    } else {
      take_registers<kConsumerRegisters>();
      consume(a, mask, sm, notes, wg - 1);
    }
  }
};

}  // namespace jali::cuda
#endif
