// Forward, sm_90a: dense tiles from an inline source, D and Dv multiples of 64 up to 128.
//
// Serves    fp16, bf16; GQA; any mask of closed-form leaves.
// Tensors   q [B, Hq, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv] as TMA boxes {64, rows, 1, 1,
//           dim / 64}; out and lse by pointer and strides.
// Roles     warpgroup 0: warp 0 loads (persistent; takes row tiles from a counter, longest first
//           within a section of heads, classifies 32 key tiles at a time). Warpgroups 1 and 2:
//           64 rows each; S of the next key tile is in flight with O += P V of the last one, across
//           row tiles too, and the two take turns at the tensor cores.
// Shared    Q 2 slots, K and V 2 stages each, as [dim / 64][rows][64] under the 128-byte swizzle.
// Barriers  q_full, k_full, v_full: 1 arrival + bytes, by the loader; q_empty, k_empty, v_empty: one
//           arrival a consumer warp (8), when the tensor cores have read the slot.
#pragma once

#include "base/hd.h"

namespace jali::cuda {

/// What differs from call to call; passed by value.
struct ForwardArgs {
  i32 num_tiles;       // row tiles of all heads and sequences
  i32 tiles_per_head;  // ceil(Lq / kRows)
  i32 section;         // heads whose K and V stay in L2 together
  i32 B, Hq, group;    // group: Hq / Hkv
  i32 Lq, Lk, q_offset;
  float scale_log2;  // scale · log2(e)
  i32* counter;      // [0] row tiles taken, [1] blocks done; zero before and after
  void* out;
  float* lse;
  i64 out_stride_b, out_stride_h, out_stride_l;  // elements
  i64 lse_stride_b, lse_stride_h;
};

}  // namespace jali::cuda

#if defined(__CUDACC_RTC__)
#include "cuda/ptx/copy.h"
#include "cuda/tile/softmax.h"
#include "mask/combine.h"

namespace jali::cuda {

using namespace ptx;

/// Every cell is visible.
struct NoMask {
  struct Row {};
  struct Col {};
  using RowBlock = Row;
  using ColBlock = Col;
  JALI_HD Row row(const Frame&, i32) const { return {}; }
  JALI_HD Col col(const Frame&, i32) const { return {}; }
  JALI_HD bool visible(Row, Col) const { return true; }
  JALI_HD RowBlock rows(const Frame&, i32, i32) const { return {}; }
  JALI_HD ColBlock cols(const Frame&, i32, i32) const { return {}; }
  JALI_HD Tile classify(const Frame&, RowBlock, ColBlock) const { return Tile::kFull; }
  JALI_HD Span key_span(const Frame&, RowBlock) const { return everything(); }
};

/// T: BF16 or FP16. kKeys: keys of a tile. M: the mask.
template <class T, i32 kD, i32 kDv, i32 kKeys, class M, bool kPingPong, bool kPin = true>
struct Forward {
  static constexpr i32 kRows = 128, kStages = 2, kSlots = 2;
  static constexpr i32 kConsumerWarps = 8;
  static constexpr i32 kQBytes = kRows * kD * 2, kKBytes = kKeys * kD * 2,
                       kVBytes = kKeys * kDv * 2;
  static constexpr i32 kQ = 0, kK = kQ + kSlots * kQBytes, kV = kK + kStages * kKBytes;
  static constexpr i32 kBarriers = kV + kStages * kVBytes;
  static constexpr i32 kNotes = kBarriers + 128;
  static constexpr i32 kSharedBytes = kNotes + 64 + 1024;  // the base is aligned to 1024 by hand

  // What the loader says of a key tile: its index times 8, and
  static constexpr i32 kFirst = 1, kPartial = 2, kEnd = 4;

  struct Shared {
    u32 base;
    JALI_DEVICE u32 q(i32 slot) const { return base + kQ + slot * kQBytes; }
    JALI_DEVICE u32 k(i32 stage) const { return base + kK + stage * kKBytes; }
    JALI_DEVICE u32 v(i32 stage) const { return base + kV + stage * kVBytes; }
    JALI_DEVICE u32 barrier(i32 n) const { return base + kBarriers + 8 * n; }
    JALI_DEVICE u32 q_full(i32 slot) const { return barrier(slot); }
    JALI_DEVICE u32 q_empty(i32 slot) const { return barrier(2 + slot); }
    JALI_DEVICE u32 k_full(i32 stage) const { return barrier(4 + stage); }
    JALI_DEVICE u32 k_empty(i32 stage) const { return barrier(6 + stage); }
    JALI_DEVICE u32 v_full(i32 stage) const { return barrier(8 + stage); }
    JALI_DEVICE u32 v_empty(i32 stage) const { return barrier(10 + stage); }
  };
  /// Written by the loader. PERF: the note of a key tile is there one tile ahead, before k_full of
  /// the tile before it, so that no consumer waits for it; the row tile before q_full.
  struct Notes {
    i32 note[4], tile[2];
  };

  struct Place {
    i32 b, h, row;
  };
  JALI_DEVICE static Place place(const ForwardArgs& a, i32 tile) {
    const i32 per_section = a.section * a.tiles_per_head;
    const i32 first = tile / per_section * a.section;
    const i32 heads = min_of(a.section, a.B * a.Hq - first);
    const i32 rest = tile % per_section;
    const i32 head = first + rest % heads;
    // The last rows come first: under a causal mask they are the longest.
    return {head / a.Hq, head % a.Hq, (a.tiles_per_head - 1 - rest / heads) * kRows};
  }
  JALI_DEVICE static Frame frame(const ForwardArgs& a, Place at) {
    Frame f;
    f.b = at.b;
    f.h = at.h;
    f.num_rows = a.Lq;
    f.num_keys = a.Lk;
    f.q_offset = a.q_offset;
    return f;
  }

  // ---- loader ---------------------------------------------------------------------------------
  struct Loader {
    const Shared& sm;
    volatile Notes* notes;
    const TensorMap &map_k, &map_v;
    u32 num_k = 0, num_v = 0;         // key tiles whose K / V went out
    i32 k_key = 0, k_b = 0, k_h = 0;  // of the tile whose K is due (its note is out)
    i32 v_key = 0, v_b = 0, v_h = 0;  // of the tile whose V is due
    bool pending = false;

    JALI_DEVICE void load_v() {
      const u32 stage = num_v % kStages, parity = num_v / kStages & 1;
      ++num_v;
      barrier_wait(sm.v_empty(stage), parity ^ 1);
      barrier_expect(sm.v_full(stage), kVBytes);
      load_box(sm.v(stage), map_v, sm.v_full(stage), 0, v_key, v_h, v_b, 0);
    }
    /// Announces a tile, then loads the one announced before: its K, and V of the one before that,
    /// which is the consumers' order.
    JALI_DEVICE void announce(i32 note, i32 b, i32 h) {
      notes->note[(num_k + pending) % 4] = note;
      if (pending) {
        const u32 stage = num_k % kStages, parity = num_k / kStages & 1;
        barrier_wait(sm.k_empty(stage), parity ^ 1);
        barrier_expect(sm.k_full(stage), kKBytes);
        load_box(sm.k(stage), map_k, sm.k_full(stage), 0, k_key, k_h, k_b, 0);
        if (num_k > 0) load_v();
        ++num_k;
        v_key = k_key;
        v_b = k_b;
        v_h = k_h;
      }
      pending = true;
      k_key = (note >> 3) * kKeys;
      k_b = b;
      k_h = h;
    }
    JALI_DEVICE void finish() {
      announce(kEnd, 0, 0);
      if (num_k == 0) {  // nothing at all: the consumers wait for the first K
        barrier_expect(sm.k_full(0), 0);
      } else {
        load_v();
      }
    }
  };

  JALI_DEVICE static void write_empty(const ForwardArgs& a, Place at, i32 lane) {
    using Half = u16;
    for (i32 r = 0; r < kRows && at.row + r < a.Lq; ++r) {
      Half* out = static_cast<Half*>(a.out) + at.b * a.out_stride_b + at.h * a.out_stride_h +
                  (at.row + r) * a.out_stride_l;
      for (i32 d = lane; d < kDv; d += 32) out[d] = 0;
      if (lane == 0)
        a.lse[at.b * a.lse_stride_b + at.h * a.lse_stride_h + at.row + r] = -infinity();
    }
  }

  JALI_DEVICE static void produce(const ForwardArgs& a, const M& mask, const Shared& sm,
                                  volatile Notes* notes, const TensorMap& map_q,
                                  const TensorMap& map_k, const TensorMap& map_v) {
    const i32 lane = threadIdx.x & 31;
    Loader loader{sm, notes, map_k, map_v};
    i32 opened = 0;  // row tiles with at least one active key tile
    i32 tile = blockIdx.x;
#pragma unroll 1
    while (tile < a.num_tiles) {
      i32 next = 0;
      if (lane == 0) next = gridDim.x + atomicAdd(a.counter, 1);
      const Place at = place(a, tile);
      const Frame f = frame(a, at);
      const i32 h_kv = at.h / a.group;
      const typename M::RowBlock rows = mask.rows(f, at.row, min_of(at.row + kRows, a.Lq));
      const Span span = mask.key_span(f, rows);
      const i32 begin = max_of(span.begin, 0) / kKeys;
      i32 end = ceil_div(min_of(span.end, a.Lk), kKeys);
      bool first = true;
#pragma unroll 1
      for (; end > begin; end -= 32) {
        const i32 c = end - 1 - lane;  // lane 0 has the last one
        Tile cls = Tile::kEmpty;
        if (c >= begin) {
          cls = mask.classify(f, rows, mask.cols(f, c * kKeys, min_of((c + 1) * kKeys, a.Lk)));
          // A tile that hangs over the end has columns to hide.
          if (cls == Tile::kFull && (c + 1) * kKeys > a.Lk) cls = Tile::kPartial;
        }
        u32 active = __ballot_sync(0xffffffffu, cls != Tile::kEmpty);
        const u32 partial = __ballot_sync(0xffffffffu, cls == Tile::kPartial);
#pragma unroll 1
        while (active) {
          const i32 n = __ffs(active) - 1;
          active &= active - 1;
          if (lane == 0) {
            // Q after the announcement: it sends off the last key tile of the row tile before,
            // without which the consumers may never free Q's slot.
            loader.announce(
                (end - 1 - n) << 3 | (first ? kFirst : 0) | (partial >> n & 1) * kPartial, at.b,
                h_kv);
            if (first) {
              const i32 slot = opened % kSlots;
              barrier_wait(sm.q_empty(slot), (opened / kSlots & 1) ^ 1);
              notes->tile[slot] = tile;
              barrier_expect(sm.q_full(slot), kQBytes);
              for (i32 half = 0; half < 2; ++half) {  // one box a consumer warpgroup
                load_box(sm.q(slot) + half * (kQBytes / 2), map_q, sm.q_full(slot), 0,
                         at.row + 64 * half, at.h, at.b, 0);
              }
            }
          }
          if (first) ++opened;
          first = false;
        }
      }
      if (first) write_empty(a, at, lane);
      tile = broadcast(next);
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
    const ForwardArgs& a;
    const M& mask;
    const Shared& sm;
    volatile Notes* notes;
    i32 wg, lane, row;  // row: of this thread's first row in the row tile

    u32 count = 0;           // key tiles whose S was made
    i32 opened = 0;          // row tiles
    Place at{};              // the row tile
    i32 note = 0, next = 0;  // the key tile and the one after it

    float s[kKeys / 2], o[kDv / 2];
    u32 p[kKeys / 4];
    tile::RowState state;
    float shift[2], rescale[2];

    /// Waits for K number `count`. From then on the note of the tile after it can be read.
    JALI_DEVICE void wait_k() { barrier_wait(sm.k_full(count % kStages), count / kStages & 1); }
    JALI_DEVICE i32 read_note(u32 n) { return broadcast(notes->note[n % 4]); }
    /// Waits for the next Q.
    JALI_DEVICE void begin_row_tile() {
      const i32 slot = opened % kSlots;
      barrier_wait(sm.q_full(slot), opened / kSlots & 1);
      at = place(a, broadcast(notes->tile[slot]));
      ++opened;
    }

    JALI_DEVICE void multiply_qk(i32 slot, i32 stage) {
      const u32 q = descriptor(sm.q(slot) + wg * (kQBytes / 2), 16);
      const u32 k = descriptor(sm.k(stage), 16);
#pragma unroll
      for (i32 t = 0; t < kD / 16; ++t) {
        Wgmma<T, kKeys, false>::ss(s, q + t / 4 * (64 * 128 / 16) + t % 4 * 2,
                                   k + t / 4 * (kKeys * 128 / 16) + t % 4 * 2, t > 0);
      }
    }
    JALI_DEVICE void multiply_pv(i32 stage) {
      const u32 v = descriptor(sm.v(stage), kKeys * 128);
#pragma unroll
      for (i32 t = 0; t < kKeys / 16; ++t) {
        Wgmma<T, kDv, true>::rs(o, p + 4 * t, v + t * (2048 / 16), 1);
      }
    }

    /// Cells of a partial tile that are not visible get a score of -infinity.
    JALI_DEVICE void hide() {
      const Frame f = frame(a, at);
      const i32 key0 = (note >> 3) * kKeys;
      const typename M::Row r0 = mask.row(f, at.row + row), r1 = mask.row(f, at.row + row + 8);
#pragma unroll
      for (i32 j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (i32 x = 0; x < 2; ++x) {
          const i32 key = key0 + 8 * j + 2 * (lane & 3) + x;
          const typename M::Col c = mask.col(f, key);
          const bool in = key < a.Lk;
          if (!(in & mask.visible(r0, c))) s[4 * j + x] = -infinity();
          if (!(in & mask.visible(r1, c))) s[4 * j + 2 + x] = -infinity();
        }
      }
    }

    /// Half a 2 x 2 transpose with the lane `lanes` away: the upper lane gives x, the lower one y.
    JALI_DEVICE static void exchange(u32& x, u32& y, bool upper, i32 lanes) {
      const u32 other = shuffle_xor(upper ? x : y, lanes);
      x = upper ? other : x;
      y = upper ? y : other;
    }

    /// Out and LSE straight from registers: a 4 x 4 transpose in a quad, 16 bytes a lane.
    JALI_DEVICE void store(const Place& at, const float (&max)[2], const float (&sum)[2]) {
      const i32 quad = lane & 3;
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        float total = sum[e] + shuffle_xor(sum[e], 1);
        total += shuffle_xor(total, 2);
        const float inverse = total > 0.0f ? __fdividef(1.0f, total) : 0.0f;
        const i32 r = at.row + row + 8 * e;
        const bool in = r < a.Lq;
        u16* out = static_cast<u16*>(a.out) + at.b * a.out_stride_b + at.h * a.out_stride_h +
                   r * a.out_stride_l + quad * 8;
#pragma unroll
        for (i32 g = 0; g < kDv / 32; ++g) {
          u32 w[4];
#pragma unroll
          for (i32 x = 0; x < 4; ++x) {
            w[x] = T::pack(o[16 * g + 4 * x + 2 * e] * inverse,
                           o[16 * g + 4 * x + 2 * e + 1] * inverse);
          }
          exchange(w[0], w[1], quad & 1, 1);
          exchange(w[2], w[3], quad & 1, 1);
          exchange(w[0], w[2], quad & 2, 2);
          exchange(w[1], w[3], quad & 2, 2);
          asm volatile(
              "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
              "@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(out + 32 * g),
              "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(static_cast<i32>(in))
              : "memory");
        }
        const float lse =
            total > 0.0f ? (max[e] * a.scale_log2 + log2_fast(total)) * 0.693147182f : -infinity();
        float* to = a.lse + at.b * a.lse_stride_b + at.h * a.lse_stride_h + r;
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}" ::"l"(to),
            "f"(lse), "r"(static_cast<i32>(in && quad == 0))
            : "memory");
      }
    }

    /// S to P, with the running state. Leaves O to be rescaled.
    template <bool kOpens>
    JALI_DEVICE void weigh() {
      float total[4] = {0, 0, 0, 0};
      tile::exponentials<0, kKeys / 8>(s, a.scale_log2, shift, total);
      tile::add_sums<kOpens>(state, rescale, total);
      tile::to_operand<T>(s, p);
    }
    JALI_DEVICE void clear_output() {
#pragma unroll
      for (i32 n = 0; n < kDv / 2; ++n) o[n] = 0.0f;
    }

    /// The very first S, which has no P V to run beside.
    JALI_DEVICE void open() {
      begin_row_tile();
      tie(s);
      wgmma_fence();
      multiply_qk(0, 0);
      wgmma_commit();
      next = read_note(1);
      wgmma_wait<0>();
      tie(s);
      barrier_arrive_if(sm.k_empty(0), lane == 0);
      if (note & kPartial) hide();
      tile::take_maximum<true>(s, a.scale_log2, state, shift, rescale);
      weigh<true>();
      clear_output();
      count = 1;
    }

    /// S of this key tile in flight with O += P V of the last one. kOpens: this key tile opens a row
    /// tile, and the last one closed the row tile before. kHides: this key tile is partial.
    /// PERF: both are templates, since a branch while WGMMAs are in flight costs 6 %.
    template <bool kOpens, bool kHides>
    JALI_DEVICE void step() {
      const u32 v_stage = (count - 1) % kStages, v_parity = (count - 1) / kStages & 1;
      const u32 stage = count % kStages;
      const Place before = at;
      note = next;
      wait_k();
      if (kOpens) begin_row_tile();
      const i32 slot = (opened - 1) % kSlots;
      if (kPingPong) named_sync(1 + wg, 256);
      tie(p);
      tie(o);
      tie(s);
      wgmma_fence();
      multiply_qk(slot, stage);
      wgmma_commit();
      barrier_wait(sm.v_full(v_stage), v_parity);
      wgmma_fence();
      multiply_pv(v_stage);
      wgmma_commit();
      if (kPingPong) named_arrive(2 - wg, 256);
      next = read_note(count + 1);
      wgmma_wait<1>();
      tie(s);
      barrier_arrive_if(sm.k_empty(stage), lane == 0);
      if (kOpens) barrier_arrive_if(sm.q_empty(slot ^ 1), lane == 0);
      if (kHides) hide();
      const float max[2] = {state.max[0], state.max[1]};
      const float sum[2] = {state.sum[0], state.sum[1]};
      tile::take_maximum<kOpens>(s, a.scale_log2, state, shift, rescale);
      if (kPin) pin(shift[0] + shift[1], sm.base + kBarriers);
      wgmma_wait<0>();
      tie(o);
      tie(p);
      barrier_arrive_if(sm.v_empty(v_stage), lane == 0);
      weigh<kOpens>();
      if (kOpens) {
        store(before, max, sum);
        clear_output();
      } else {
#pragma unroll
        for (i32 n = 0; n < kDv / 8; ++n) {
          o[4 * n] *= rescale[0];
          o[4 * n + 1] *= rescale[0];
          o[4 * n + 2] *= rescale[1];
          o[4 * n + 3] *= rescale[1];
        }
      }
      ++count;
    }

    /// The last P V.
    JALI_DEVICE void close() {
      const u32 stage = (count - 1) % kStages;
      barrier_wait(sm.v_full(stage), (count - 1) / kStages & 1);
      tie(p);
      tie(o);
      wgmma_fence();
      multiply_pv(stage);
      wgmma_commit();
      wgmma_wait<0>();
      tie(o);
      store(at, state.max, state.sum);
    }
  };

  JALI_DEVICE static void consume(const ForwardArgs& a, const M& mask, const Shared& sm,
                                  volatile Notes* notes, i32 wg) {
    const i32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    Consumer c{a, mask, sm, notes, wg, lane, wg * 64 + warp * 16 + (lane >> 2)};
    if (kPingPong && wg == 0) named_arrive(1, 256);
    c.wait_k();
    c.note = c.read_note(0);
    if (c.note & kEnd) return;
    c.open();
    while (true) {
      while (!(c.next & (kFirst | kPartial | kEnd))) c.template step<false, false>();
      if (c.next & kEnd) break;
      if (c.next & kFirst) {
        c.next& kPartial ? c.template step<true, true>() : c.template step<true, false>();
      } else {
        c.template step<false, true>();
      }
    }
    c.close();
  }

  template <i32 kLoaderRegisters, i32 kConsumerRegisters>
  JALI_DEVICE static void run(const TensorMap& map_q, const TensorMap& map_k,
                              const TensorMap& map_v, const ForwardArgs& a, const M& mask) {
    extern __shared__ char raw[];
    const u32 unaligned = shared_address(raw);
    const Shared sm{(unaligned + 1023) & ~1023u};
    volatile Notes* notes = reinterpret_cast<volatile Notes*>(raw + (sm.base - unaligned) + kNotes);
    const i32 wg = broadcast(threadIdx.x >> 7);
    if (threadIdx.x == 0) {
      for (i32 n = 0; n < 2; ++n) {
        barrier_init(sm.q_full(n), 1);
        barrier_init(sm.k_full(n), 1);
        barrier_init(sm.v_full(n), 1);
        barrier_init(sm.q_empty(n), kConsumerWarps);
        barrier_init(sm.k_empty(n), kConsumerWarps);
        barrier_init(sm.v_empty(n), kConsumerWarps);
      }
      barrier_init_fence();
    }
    __syncthreads();
    if (wg == 0) {
      give_registers<kLoaderRegisters>();
      if (threadIdx.x < 32) produce(a, mask, sm, notes, map_q, map_k, map_v);
    } else {
      take_registers<kConsumerRegisters>();
      consume(a, mask, sm, notes, wg - 1);
    }
  }
};

}  // namespace jali::cuda
#endif
