// Backward, sm_90a: dq, dk, dv over tiles of 64 keys, D and Dv up to 256.
//
// Speed     H100, bf16, H16 16K, a whole pass, TFLOP/s: D 192 causal 458, where bwd_sm90_pair.cuh has 537.
// Serves    what bwd_sm90.cuh does, for the head dims and the options that fit neither it nor bwd_sm90_pair.cuh: D up
//           to 128 beside a larger Dv, and options of which bwd_sm90.cuh says that they would spill.
// Tensors   as there; boxes {64, 64, 1, 1}, and of 16 rows.
// Roles     warpgroup 0 loads, as there. Warpgroup 1, the value side, owns dv: S' = K Q', P, and
//           dV += P' dO with P in registers. Warpgroup 2, the key side, owns dk: dP' = V dO', dS from
//           the other's P, and dK += dS' Q with dS in registers. Each has D + Dv columns to multiply
//           a step, whatever the two are. dQ = dS K, one step late, by columns: the value side the
//           first half (of 64-column blocks, rounded up); from registers to dq_sum.
// Shared    K, V; Q, dO 2 stages each; P and dS 2 buffers each, P as the threads hold it, dS
//           [64 keys][64 rows] swizzled; statistics; cells; up to 6 stages of row tiles; notes.
//           226 KB at D = Dv = 256, where there is no room for stages of row tiles.
// Barriers  as there, but p_full: one arrival a warp of the value side (4), ds_full: one a warp of the
//           key side (4). Nobody frees a buffer by a barrier: the value side writes P of step n + 2
//           after it waited for dS of step n, made from P of step n; the key side writes dS of step
//           n + 2 when it has P of that step, written after dQ of step n was multiplied.
// Options   the value side adjusts scores and draws for dropout; where that drops a cell, the P
//           that it hands over has its sign set. Softcap's slope goes with P, as a factor; where
//           gradients of biases need P without it, by itself: then P and slopes have one buffer
//           each, written in step n + 1 after the wait for dS of step n.
#pragma once

#include "cuda/kernel/backward.h"

namespace jali::cuda {

/// For host and kernel: D and Dv are those of the kernel.
JALI_HD constexpr bool backward_wide_fits(i32 D, i32 Dv) { return D <= 256 && Dv <= 256; }
JALI_HD constexpr BackwardTile backward_wide_tile(i32 D, i32 Dv) {
  const i32 rows = 64, keys = 64;
  const i32 dim = ceil_div(D, 64) * 64, dim_v = ceil_div(Dv, 64) * 64;
  const i32 bytes = 2 * (keys + 2 * rows) * (dim + dim_v)  // K, V; Q, dO
                    + 4 * 2 * rows * keys                  // P, dS
                    + 4 * 4 * rows                         // statistics
                    + kBackwardCellSlots<keys> * rows * keys / 8 + kBackwardNotesBytes;
  const i32 stages = backward_row_stages(bytes);
  const i32 shared = bytes + stages * kBackwardRowBytes;
  return {rows, keys, rows * dim, stages, shared, 384, 56, 224};
}
JALI_HD constexpr bool backward_pair_fits(i32 D, i32 Dv) {
  return D > 128 && D <= 256 && Dv <= 256;
}
/// What of a step has a place of its own in shared memory, of the kernel of bwd_sm90_pair.cuh.
struct PairLayout {
  i32 buffers;  // 2 each of P, dS, and the other block's dS; where 4, dS comes in place of the P it was made from
  i32 key_cols;  // of dQ, the key side's
  i32 staged_cols;  // of dQ, on their way to the copy engine: the key side's, then the value side's if there is room
  i32 shared_bytes;  // without stages of row tiles
};
JALI_HD constexpr i32 backward_pair_bytes(i32 dim, i32 dim_v, i32 buffers, i32 staged_cols) {
  const i32 rows = 64, own = 64;
  return 2 * own * (dim + dim_v + 128)   // K, V; 128 columns of the other block's K
         + 2 * rows * (2 * dim + dim_v)  // two Q, dO
         + buffers * 2 * rows * own      // P, dS
         + 4 * rows * staged_cols        // dQ
         + 4 * 4 * rows                  // statistics
         + kBackwardCellSlots<own> * rows * own / 8 + kBackwardNotesBytes;
}
JALI_HD constexpr PairLayout backward_pair_layout(i32 D, i32 Dv) {
  const i32 dim = ceil_div(D, 64) * 64, dim_v = ceil_div(Dv, 64) * 64;
  const i32 key_cols = dim == 192 ? 32 : 64, cols = key_cols + 64, most = kMostSharedBytes;
  const i32 buffers = backward_pair_bytes(dim, dim_v, 6, cols) <= most ? 6 : 4;
  const i32 staged = backward_pair_bytes(dim, dim_v, buffers, cols) <= most ? cols : key_cols;
  return {buffers, key_cols, staged, backward_pair_bytes(dim, dim_v, buffers, staged)};
}
JALI_HD constexpr BackwardTile backward_pair_tile(i32 D, i32 Dv) {
  const PairLayout layout = backward_pair_layout(D, Dv);
  const i32 stages = backward_row_stages(layout.shared_bytes);
  const i32 shared = layout.shared_bytes + stages * kBackwardRowBytes;
  const bool narrow = max_of(D, Dv) <= 192;  // the loader's warpgroup would spill
  const i32 loader = narrow ? 88 : 56, consumer = narrow ? 208 : 224;
  return {64, 128, 64 * ceil_div(D, 64) * 64, stages, shared, 384, loader, consumer, 2};
}

}  // namespace jali::cuda

#if defined(__CUDACC_RTC__)
#include "cuda/tile/backward_tiles.h"

namespace jali::cuda {

using namespace ptx;

/// T: BF16 or FP16. M: the mask. kOrdered: deterministic. kWanted: gradients of biases.
/// kForcesMap: see BackwardTiles. kPair: see bwd_sm90_pair.cuh.
template <class T, i32 kD, i32 kDv, class M, bool kOrdered = false,
          ScoreOptions kOptions = ScoreOptions{}, BiasGradients kWanted = BiasGradients{},
          bool kForcesMap = false, bool kPair = false>
struct BackwardWide {
  static constexpr BackwardTile kTile =
      kPair ? backward_pair_tile(kD, kDv) : backward_wide_tile(kD, kDv);
  static constexpr i32 kRows = kTile.rows, kKeys = kTile.keys / kTile.blocks;
  static constexpr i32 kBufferBytes = kRows * kKeys * 2;  // of P or dS
  static constexpr PairLayout kLayout = backward_pair_layout(kD, kDv);
  static constexpr i32 kBuffers = kPair ? kLayout.buffers : 4;
  // kPair: dQ, 128 columns of the other block's K.
  static constexpr i32 kPairBytes = kPair ? 4 * kRows * kLayout.staged_cols + kKeys * 256 : 0;
  using Tiles = tile::BackwardTiles<T, kD, kDv, kRows, kKeys, kBuffers * kBufferBytes + kPairBytes,
                                    kTile.row_stages, M, kOrdered, kOptions, kWanted, false, false,
                                    kForcesMap, kPair>;
  using Rows = typename Tiles::Rows;
  using Turns = typename Tiles::Turns;
  static constexpr i32 kThreads = kTile.threads;
  using Scores = typename Tiles::Scores;
  using Shared = typename Tiles::Shared;
  using Notes = typename Tiles::Notes;
  using Item = typename Tiles::Item;
  using Note = typename Tiles::Note;
  static_assert(Tiles::kSharedBytes == kTile.shared_bytes &&
                kTile.shared_bytes <= kMostSharedBytes);
  static constexpr i32 kStages = Tiles::kStages;
  static constexpr bool kSendsSlopes = kOptions.softcap && kWanted.per_tile();
  // dS comes in place of the P that it was made from. PERF: not with options, whose value side would wait for the
  // key side before it weighs; then they lie apart in the place of dQ.
  static constexpr bool kOverlays = kPair && kBuffers == 4 && !Scores::kOn && !kWanted.per_tile();
  static constexpr bool kStagesDq = kPair && (kBuffers == 6 || kOverlays);

  JALI_DEVICE static u32 p_buffer(const Shared& sm, u32 n) { return sm.rest() + n * kBufferBytes; }
  JALI_DEVICE static u32 ds_buffer(const Shared& sm, u32 n) {
    return p_buffer(sm, (kOverlays ? 0 : 2) + n);
  }
  JALI_DEVICE static u32 peer_ds(const Shared& sm, u32 n) {
    return p_buffer(sm, (kOverlays ? 2 : 4) + n);
  }
  JALI_DEVICE static u32 p_full(const Shared& sm, u32 n) { return sm.own(n); }
  JALI_DEVICE static u32 ds_full(const Shared& sm, u32 n) { return sm.own(2 + n); }
  // kPair: the other block's dS is here; the other block has multiplied this block's dS.
  JALI_DEVICE static u32 peer_full(const Shared& sm, u32 n) { return sm.of_pair(n); }
  JALI_DEVICE static u32 peer_done(const Shared& sm, u32 n) { return sm.of_pair(2 + n); }

  /// kKeySide: warpgroup 2.
  template <bool kKeySide>
  struct Consumer {
    // Blocks of 64 columns of dQ.
    static constexpr i32 kBegin = kKeySide ? (Tiles::kHalves + 1) / 2 : 0;
    static constexpr i32 kBlocks =
        kPair ? 1 : (kKeySide ? Tiles::kHalves : (Tiles::kHalves + 1) / 2) - kBegin;
    // kPair: of three halves the second one is shared.
    static constexpr i32 kCols = kPair && kKeySide ? kLayout.key_cols : 64;
    JALI_DEVICE static i32 first_half() {
      if constexpr (!kPair) return kBegin;
      const i32 rank = cluster_rank();
      return Tiles::kHalves == 4 ? rank * 2 + kKeySide : kKeySide ? 1 : rank * 2;
    }
    /// Among those of the other block's K that are here.
    JALI_DEVICE static i32 peer_half() {
      if constexpr (Tiles::kHalves == 4) return kKeySide;
      const i32 rank = cluster_rank();
      return kKeySide ? 1 - rank : rank;
    }
    /// The first column in its half.
    JALI_DEVICE static i32 first_col() {
      return kCols == 32 ? static_cast<i32>(cluster_rank()) * 32 : 0;
    }
    static constexpr i32 kDim = kKeySide ? kD : kDv;
    // By whom its dQ is added. PERF: by the copy engine, no warp waits while it is.
    static constexpr i32 kStagedAt = kKeySide ? 0 : kLayout.key_cols;  // columns before its own
    static constexpr bool kByEngine = kStagesDq && kStagedAt + kCols <= kLayout.staged_cols;
    static_assert(kBlocks <= 2 && (!kPair || Tiles::kHalves == 3 || Tiles::kHalves == 4));

    const BackwardArgs& a;
    const M& mask;
    const Shared& sm;
    const Notes* notes;
    i32 warp, lane;  // warp: of the warpgroup

    u32 steps = 0, items = 0;
    i32 flags = 0;                    // of the row tile that comes next
    i32 number = 0, last_number = 0;  // its number; that of the one whose dQ is due
    i32 turn = 0, last_turn = 0;      // kOrdered: their turns
    i32 sent = -1;                    // kOrdered: the row tile whose dQ was sent, not yet counted

    float sum[kDim / 2];  // dk or dv
    float x[32];          // S or dP, then a block of dQ
    u32 w[16];            // dS or P
    tile::Dropped<kOptions.keeps, kOptions.saturates> dropped;

    JALI_DEVICE float (&dq()) [kCols / 2] { return reinterpret_cast<float (&)[kCols / 2]>(x); }
    /// One of this side's blocks of dQ = dS K. PERF: two at once would not fit the registers.
    JALI_DEVICE void multiply_dq(u32 buffer, i32 block) {
      const u32 y = descriptor(ds_buffer(sm, buffer), 16);
      const u32 k =
          descriptor(sm.k() + (first_half() + block) * Tiles::kKHalf + first_col() * 2, 16);
#pragma unroll
      for (i32 t = 0; t < kKeys / 16; ++t) {
        Wgmma<T, kCols, true>::template ss<true>(dq(), y + t * (2048 / 16), k + t * (2048 / 16),
                                                 t > 0);
      }
      if constexpr (kPair) {
        const u32 peer_y = descriptor(peer_ds(sm, buffer), 16);
        const u32 peer_k =
            descriptor(sm.peer_k() + peer_half() * Tiles::kKHalf + first_col() * 2, 16);
#pragma unroll
        for (i32 t = 0; t < kKeys / 16; ++t) {
          Wgmma<T, kCols, true>::template ss<true>(dq(), peer_y + t * (2048 / 16),
                                                   peer_k + t * (2048 / 16), 1);
        }
      }
      wgmma_commit();
    }
    JALI_DEVICE void send_dq(i32 block, bool due) {
      float* to = a.dq_sum + i64(last_number) * kTile.dq_floats + (first_half() + block) * 4096 +
                  first_col() * 16 + warp * 1024;
      if constexpr (kByEngine) {
        const u32 from = sm.rest() + kBuffers * kBufferBytes + (kStagedAt * 4 + warp * kCols) * 64;
        Turns::await_place(sm, steps);
        Turns::template stage_dq<kCols>(from, x, lane);
        add_bulk_if(to, from, kCols * 64, due & lane == 0);
        bulk_commit();
      } else {
#pragma unroll
        for (i32 j = 0; j < kCols / 8; ++j) {
          add_four_if(to + j * 128 + lane * 4, x + 4 * j, due);
        }
      }
    }

    /// Waits for what the loader says of the row tile that comes next.
    JALI_DEVICE void next_note(i32& row, i32& h) {
      Tiles::next_note(sm, steps, flags, number, row, h);
      if (kOrdered) turn = Tiles::turn_of_note(sm, steps);
    }
    JALI_DEVICE const Item& item() const { return notes->item[(items - 1) % 4]; }
    JALI_DEVICE const Note& note() const { return notes->note[steps % Tiles::kNoteSlots]; }
    JALI_DEVICE tile::CellPlace place() { return Tiles::place(item(), note(), warp * 16, lane); }
    /// Value side: draws the numbers of dropout for the row tile.
    JALI_DEVICE void draw() {
      if constexpr (kOptions.dropout) {
        const tile::CellPlace at = place();
        dropped.draw(a.scores, at);
        dropped.go_to(note().shift, at.key);
      }
    }
    // Between the four words of a thread. kOverlays: those of a warp lie where its dS comes to.
    static constexpr i32 kWordStride = kOverlays ? 512 : 2048;
    JALI_DEVICE u32 p_words(u32 buffer) const {
      if (kOverlays) return p_buffer(sm, buffer) + warp * 2048 + lane * 16;
      return p_buffer(sm, kSendsSlopes ? 0 : buffer) + (warp * 32 + lane) * 16;
    }
    /// kOverlays, value side: until all that was made of the dS that P comes in place of.
    JALI_DEVICE void wait_for_buffer() {
      barrier_wait(sm.rows_empty((steps - 1) % kStages), (steps - 1) / kStages & 1);
      barrier_wait(peer_done(sm, steps % 2), steps / 2 & 1 ^ 1);
    }
    JALI_DEVICE u32 slope_words() const { return p_words(0) + kBufferBytes; }
    template <bool kHides>
    JALI_DEVICE void weigh_with_options(u32 buffer) {
      if (kSendsSlopes) barrier_wait(ds_full(sm, (steps + 1) % 2), (steps - 1) / 2 & 1);
      u32 sent[4], sent_slopes[4];
      Tiles::template weigh_blocks<kHides>(
          x, a, mask, item(), note(), warp * 16, sm, steps, lane,
          [&](i32 n, const u32(&p)[2], const u32(&slopes)[2]) {
#pragma unroll
            for (i32 e = 0; e < 2; ++e) {
              u32& word = sent[n % 2 * 2 + e];
              word = w[2 * n + e] = p[e];
              if constexpr (kSendsSlopes) {
                sent_slopes[n % 2 * 2 + e] = slopes[e];
              } else if constexpr (kOptions.softcap) {
                const i32 i = 4 * n + 2 * e;
                word = T::pack(x[i] * FP16::value(static_cast<u16>(slopes[e])),
                               x[i + 1] * FP16::value(static_cast<u16>(slopes[e] >> 16)));
              }
              if constexpr (kOptions.dropout) {
                const u32 halves = dropped.halves(a.scores, 2 * n + e);
                word |= halves & 0x80008000u;
                w[2 * n + e] &= ~halves;
              }
            }
            if (n % 2 == 0) return;
            store_shared(p_words(buffer) + n / 2 * 2048, sent[0], sent[1], sent[2], sent[3]);
            if constexpr (kSendsSlopes) {
              store_shared(slope_words() + n / 2 * 2048, sent_slopes[0], sent_slopes[1],
                           sent_slopes[2], sent_slopes[3]);
            }
          });
    }
    /// Value side: raw scores less LSE to weights, for both sides.
    template <bool kHides>
    JALI_DEVICE void weigh(u32 buffer) {
      if constexpr (Scores::kOn) {
        weigh_with_options<kHides>(buffer);
      } else {
#pragma unroll
        for (i32 n = 0; n < 32; ++n) x[n] = exp2_fast(x[n] * a.scale_log2);
        if constexpr (kHides) {
          typename Tiles::Hiding hiding;
          hiding.look_up(mask, item(), note(), warp * 16, sm, steps, lane);
          hiding.hide_all(x, 0);
        }
#pragma unroll
        for (i32 n = 0; n < 16; ++n) w[n] = T::pack(x[2 * n], x[2 * n + 1]);
        if constexpr (kOverlays) wait_for_buffer();
#pragma unroll
        for (i32 n = 0; n < 4; ++n) {
          store_shared(p_words(buffer) + n * kWordStride, w[4 * n], w[4 * n + 1], w[4 * n + 2],
                       w[4 * n + 3]);
        }
      }
      __syncwarp();
      barrier_arrive_if(p_full(sm, buffer), lane == 0);
    }
    /// Key side: dP - delta and P to dS, for the tensor cores of both sides.
    /// NOTE: its warps may write a dS over that of two steps ago since the fences of their WGMMAs keep the
    /// warps of a warpgroup together; no barrier does.
    JALI_DEVICE void differentiate(u32 buffer) {
      if constexpr (kOptions.dropout) undrop();
#pragma unroll
      for (i32 n = 0; n < 16; ++n) {
        const float low = T::value(static_cast<u16>(w[n])), high = T::value(w[n] >> 16);
        w[n] = T::pack(x[2 * n] * low, x[2 * n + 1] * high);
        if constexpr (kWanted.per_tile()) {
          x[2 * n] *= low;
          x[2 * n + 1] *= high;
        }
      }
      if constexpr (kSendsSlopes) {
        u32 slopes[4];
#pragma unroll
        for (i32 n = 0; n < 16; ++n) {
          if (n % 4 == 0) load_words(slope_words() + n / 4 * 2048, slopes);
          w[n] = T::pack(x[2 * n] * FP16::value(static_cast<u16>(slopes[n % 4])),
                         x[2 * n + 1] * FP16::value(static_cast<u16>(slopes[n % 4] >> 16)));
        }
      }
      if constexpr (kOverlays) {
        __syncwarp();  // all have read their P there
      } else if constexpr (kPair) {
        barrier_wait(peer_done(sm, buffer), steps / 2 & 1 ^ 1);
      }
      const i32 row = warp * 16 + (lane >> 3 & 1) * 8 + (lane & 7);
      const u32 to = ds_buffer(sm, buffer) + row * 128 + ((lane >> 4 ^ (lane & 7)) << 4);
#pragma unroll
      for (i32 t = 0; t < 4; ++t) store_matrices(to ^ t * 32, w + 4 * t);
      fence_async();
      __syncwarp();
      barrier_arrive_if(ds_full(sm, buffer), lane == 0);
      if constexpr (kPair) {
        const u32 part = warp * 2048;
        copy_to_peer_if(peer_ds(sm, buffer) + part, ds_buffer(sm, buffer) + part, 2048,
                        peer_full(sm, buffer), lane == 0);
      }
      if constexpr (kWanted.keys) {
        Scores::add_keys(Scores::sum_keys(x, lane), a, place(), item().h_kv, lane);
      }
      if constexpr (kWanted.per_cell()) Scores::emit(x, a, place(), lane);
    }
    /// Key side: dP to dP - delta, with dropout; P loses its signs.
    JALI_DEVICE void undrop() {
      const u32 neg_delta = sm.neg_delta(steps % kStages) + (lane & 3) * 8;
#pragma unroll
      for (i32 n = 0; n < 8; ++n) {
        float delta[2];
        load_pair(neg_delta + 32 * n, delta[0], delta[1]);
#pragma unroll
        for (i32 m = 0; m < 4; ++m) {
          const bool kept = !(w[2 * n + m / 2] >> (m % 2 * 16 + 15) & 1);
          float& dp = x[4 * n + m];
          dp = (kept ? dp : 0.0f) + delta[m % 2];
        }
        w[2 * n] &= 0x7fff7fffu;
        w[2 * n + 1] &= 0x7fff7fffu;
      }
    }

    /// Of the row tile that comes: whether a dQ is due before it; its stage of rows, its buffer of P and dS, that of
    /// the one before, and the parities of their barriers.
    struct Step {
      bool due;
      u32 stage, parity, buffer, buffer_parity, last_buffer, last_parity;
    };
    JALI_DEVICE Step this_step() const {
      return {!(flags & Tiles::kFirst),
              steps % kStages,
              steps / kStages & 1,
              steps % 2,
              steps / 2 & 1,
              (steps + 1) % 2,
              (steps - 1) / 2 & 1};
    }
    /// What S or dP of a row tile is added to.
    JALI_DEVICE void start(u32 stage) {
      const u32 statistics = kKeySide ? sm.neg_delta(stage) : sm.neg_lse(stage);
      constexpr bool kRaw = kKeySide ? !kOptions.dropout : !Scores::kAdjusts;
      Tiles::template start<false, kRaw>(x, statistics, lane);
      if constexpr (!kKeySide && Scores::kAdds) {
        typename Scores::Added added;
        added.load(a, place(), lane);
        added.add_to(x, a);
      }
      tie(x);
      wgmma_fence();
    }
    /// kPair: says that the dQ that was sent a step ago is added. PERF: beside a product, for others wait for it.
    JALI_DEVICE void end_last_turn() {
      if constexpr (kPair) Turns::template end_turn<kByEngine>(a, sm, sent, steps - 2);
    }
    /// Value side: S of a row tile, and P.
    template <bool kHides>
    JALI_DEVICE void score(u32 stage, u32 buffer) {
      Tiles::template multiply_dim<kD>(x, sm.k(), sm.q(stage));
      wgmma_commit();
      end_last_turn();
      draw();
      wgmma_wait<0>();
      tie(x);
      weigh<kHides>(buffer);
    }
    /// Key side: the value side's P.
    JALI_DEVICE void take_p(u32 buffer, u32 parity) {
      barrier_wait(p_full(sm, buffer), parity);
#pragma unroll
      for (i32 n = 0; n < 4; ++n) load_words(p_words(buffer) + n * kWordStride, w + 4 * n);
    }
    /// One row tile. kHides: it is partial. The first of a key tile multiplies a dQ as well, but
    /// sends none.
    template <bool kHides>
    JALI_DEVICE void step() {
      const auto [due, stage, parity, buffer, buffer_parity, last_buffer, last_parity] =
          this_step();
      const i32 this_number = number, this_turn = turn;
      barrier_wait(kKeySide ? sm.o_full(stage) : sm.q_full(stage), parity);
      start(stage);
      if constexpr (kKeySide) {
        Tiles::template multiply_dim<kDv>(x, sm.v(), sm.o(stage));
        wgmma_commit();
        take_p(buffer, buffer_parity);
        wgmma_wait<0>();
        tie(x);
        differentiate(buffer);
      } else {
        score<kHides>(stage, buffer);
      }
      barrier_wait(kKeySide ? sm.q_full(stage) : sm.o_full(stage), parity);
      const i32 turns = Turns::turns_of(a, last_number);
      barrier_wait(ds_full(sm, last_buffer), last_parity);
      tie(x);
      tie(w);
      tie(sum);
      wgmma_fence();
      if (kBlocks > 0) multiply_dq(last_buffer, 0);
      Tiles::template multiply_rows<kDim>(sum, w, kKeySide ? sm.q(stage) : sm.o(stage));
      wgmma_commit();
      ++steps;
      wgmma_wait<1>();
      tie(x);
      Turns::template end_turn<false>(a, sm, sent, steps - 3);
      Turns::wait_turn(a, due, last_number, last_turn, turns, sent);
      if (kBlocks > 0) send_dq(0, due);
      if (kBlocks > 1) {
        tie(x);
        wgmma_fence();
        multiply_dq(last_buffer, 1);
      }
      i32 row, h;
      next_note(row, h);
      wgmma_wait<0>();
      tie(w);
      tie(x);
      tie(sum);
      barrier_arrive_if(sm.rows_empty(stage), lane == 0);
      if (kBlocks > 1) send_dq(1, due);
      last_number = this_number;
      last_turn = this_turn;
    }

    /// kPair: the same with one block of dQ, which needs the other block's dS. dV comes before it, since there is one
    /// stage of dO.
    template <bool kHides>
    JALI_DEVICE void step_of_pair() {
      const auto [due, stage, parity, buffer, buffer_parity, last_buffer, last_parity] =
          this_step();
      const i32 this_number = number, this_turn = turn;
      barrier_wait(kKeySide ? sm.o_full(0) : sm.q_full(stage), kKeySide ? steps & 1 : parity);
      start(stage);
      if constexpr (kKeySide) {
        Tiles::template multiply_dim<kDv>(x, sm.v(), sm.o(0));
        wgmma_commit();
        end_last_turn();
        if (warp == 0 && lane == 0) barrier_expect(peer_full(sm, buffer), kBufferBytes);
        take_p(buffer, buffer_parity);
        wgmma_wait<0>();
        tie(x);
        barrier_arrive_if(sm.o_empty(), lane == 0);
        differentiate(buffer);
        barrier_wait(sm.q_full(stage), parity);
      } else {
        score<kHides>(stage, buffer);
        barrier_wait(sm.o_full(0), steps & 1);
        tie(w);
        tie(sum);
        wgmma_fence();
        Tiles::template multiply_rows<kDv>(sum, w, sm.o(0));
        wgmma_commit();
      }
      const i32 turns = Turns::turns_of(a, last_number);
      barrier_wait(ds_full(sm, last_buffer), last_parity);
      // NOTE: not where a key tile begins: the other block may be so far ahead of a slow warp that the phase has passed
      // twice.
      barrier_wait_if(peer_full(sm, last_buffer), last_parity, due);
      tie(x);
      wgmma_fence();
      multiply_dq(last_buffer, 0);
      if constexpr (kKeySide) {
        tie(w);
        tie(sum);
        wgmma_fence();
        Tiles::template multiply_rows<kD>(sum, w, sm.q(stage));
        wgmma_commit();
      }
      ++steps;
      wgmma_wait<1>();
      if constexpr (kKeySide) {
        tie(x);
      } else {
        tie(w);
        tie(sum);
        barrier_arrive_if(sm.o_empty(), lane == 0);
        wgmma_wait<0>();
        tie(x);
        barrier_arrive_if(sm.rows_empty(stage), lane == 0);
      }
      barrier_arrive_at_peer_if(peer_done(sm, last_buffer), due & lane == 0);
      Turns::wait_turn(a, due, last_number, last_turn, turns, sent);
      send_dq(0, due);
      i32 row, h;
      next_note(row, h);
      if constexpr (kKeySide) {
        wgmma_wait<0>();
        tie(w);
        tie(sum);
        barrier_arrive_if(sm.rows_empty(stage), lane == 0);
      }
      last_number = this_number;
      last_turn = this_turn;
    }
    template <bool kHides>
    JALI_DEVICE void any_step() {
      if constexpr (kPair) {
        step_of_pair<kHides>();
      } else {
        step<kHides>();
      }
    }
    /// Says that dQ of the key tile before is added, if there was one.
    JALI_DEVICE void end_last_item() {
      if (kByEngine) bulk_wait();
      if (items > 0) Turns::end_item(a, sm, item(), items - 1);
    }
    /// A key tile: all its row tiles.
    JALI_DEVICE void run_item() {
      if (!kKeySide) {
        const Item& item = notes->item[items % 4];  // the next one
        Tiles::find_runs(mask, item, item.f.h, warp * 16, sm);
      }
      barrier_wait(sm.k_full(), items & 1);
      barrier_wait(sm.v_full(), items & 1);
      end_last_item();
      ++items;
#pragma unroll
      for (i32 n = 0; n < kDim / 2; ++n) sum[n] = 0;
      do {
        if (!kKeySide && flags & Tiles::kPartial) {
          any_step<true>();
        } else {
          any_step<false>();
        }
      } while (!(flags & (Tiles::kFirst | Tiles::kEnd)));
      barrier_arrive_if(sm.v_empty(), lane == 0);
      const u32 buffer = (steps - 1) % 2;
      barrier_wait(ds_full(sm, buffer), (steps - 1) / 2 & 1);
      Turns::template end_turn<kByEngine>(a, sm, sent, steps - 2);
      Turns::wait_turn(a, true, last_number, last_turn, Turns::turns_of(a, last_number), sent);
      if constexpr (kPair) barrier_wait(peer_full(sm, buffer), (steps - 1) / 2 & 1);
#pragma unroll
      for (i32 block = 0; block < kBlocks; ++block) {
        tie(x);
        wgmma_fence();
        multiply_dq(buffer, block);
        wgmma_wait<0>();
        tie(x);
        if (block == kBlocks - 1) barrier_arrive_if(sm.k_empty(), lane == 0);
        if constexpr (kPair) barrier_arrive_at_peer_if(peer_done(sm, buffer), lane == 0);
        send_dq(block, true);
      }
      if (kBlocks == 0) barrier_arrive_if(sm.k_empty(), lane == 0);
      // The loader is at most two items ahead: it leaves this one's slot alone.
      const Item& item = this->item();
      if constexpr (kKeySide) {
        Tiles::template store<false>(sum, a.scale, a.dk, a.dk_strides, a.D, item, warp * 16, lane);
      } else {
        Tiles::template store<false>(sum, kOptions.dropout ? a.scores.keep_scale : 1.0f, a.dv,
                                     a.dv_strides, a.Dv, item, warp * 16, lane);
      }
      Turns::template end_turn<kByEngine>(a, sm, sent, steps - 1);
    }
    JALI_DEVICE void run() {
      i32 row, h;
      next_note(row, h);
      while (!(flags & Tiles::kEnd)) run_item();
      end_last_item();
      Turns::end(sm, items, steps);
    }
  };

  JALI_DEVICE static void run(const TensorMap& map_q, const TensorMap& map_k,
                              const TensorMap& map_v, const TensorMap& map_o, const BackwardArgs& a,
                              const M& mask) {
    Tiles::template run<kTile.loader_registers, kTile.consumer_registers>(
        map_q, map_k, map_v, map_o, a, mask,
        [](const Shared& sm) {
          for (i32 n = 0; n < 4; ++n) barrier_init(sm.own(n), Tiles::kConsumerWarps / 2);
          for (i32 n = 0; n < (kPair ? 4 : 0); ++n) {
            barrier_init(sm.of_pair(n), n < 2 ? 1 : Tiles::kConsumerWarps);
          }
        },
        [&](const Shared& sm, const Notes* notes, i32 wg) {
          const i32 lane = threadIdx.x & 31, warp = broadcast(threadIdx.x >> 5) & 3;
          if (wg == 0) {
            Consumer<false>{a, mask, sm, notes, warp, lane}.run();
          } else {
            Consumer<true>{a, mask, sm, notes, warp, lane}.run();
          }
        },
        [](const Shared&, i32, i32) {});
  }
};

}  // namespace jali::cuda
#endif
