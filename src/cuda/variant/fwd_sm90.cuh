// Forward, sm_90a: tiles from an inline source, D and Dv up to 256.
//
// Serves    fp16, bf16; GQA; padded and packed (varlen) layouts; any mask of closed-form leaves or
//           stored blocks; softcap, biases, ALiBi, sinks, dropout. kD and kDv: D and Dv rounded up
//           to multiples of 16.
// Tensors   q, k, v, out by the tensor maps of call.h, in boxes of 64 columns x rows or keys under
//           the 128-byte swizzle: one copy per 64 columns, the engine fills zeros beyond D. lse, and
//           out where a sequence ends or shared memory has no room, by pointer and strides; rows of
//           out start at multiples of 16 bytes.
// Roles     warpgroup 0: warp 1 plans (persistent; takes row tiles from a counter, longest first within
//           a section of heads (work_order.h), classifies 32 key tiles at a time or reads a tile map,
//           and notes the active ones); one thread of warp 0 loads what the notes say; warps 2 and 3
//           find out what consumers need to know of a mask: of a light one the numbers of each row, of
//           a heavy one the cells of partial tiles; and they bring what keys add to scores. The other
//           warpgroups: 64 rows each; S of the next key tile is in flight with O += P V of the last one,
//           across row tiles too. Three take turns at the tensor cores; two, too, under a light mask, beside
//           some options, and at D 129 to 192.
// Options   what keys add, a bias of theirs or ALiBi, the tensor cores add to S; all else consumers do
//           when S is there. What each costs: docs/performance.md.
// Shared    Q slots, K and V stages, each [dim / 64][rows][64]; what is found of the mask; what keys
//           add; a bias over rows and keys, of which a consumer warp copies its rows; out on its way to
//           whole rows, where there is room; notes of key tiles, and the row tiles they belong to.
// Barriers  q_full, k_full, v_full: 1 arrival + bytes, by the loader (k_full: each finder warp, too, if
//           keys add something); q_empty, k_empty, v_empty: one arrival a consumer warp, when the
//           tensor cores have read the slot. note_full: 1, by the planner; note_empty: the loader and, if
//           they find anything, each finder warp; consumers need not arrive (Loader::run). cells_full: one
//           a finder warp; cells_empty: one a consumer warp.
// Here      for host and kernel: forward_shape, forward_section; Forward, the consumers, in this order: Q and
//           the products; draw, prepare, adjust, visible_bits; close_sums, store, send; S again; S to P, by maxima
//           (begin_weights, end_weights), or cell by cell (weigh_rows) by guessed ones (guess_weights, raise_maxima)
//           or none (capped_weights); multiply, wait_s, step, run, end.
//           Warpgroup 0 is in tile/forward_tiles.h.
#pragma once

#include "cuda/kernel/forward.h"

namespace jali::cuda {

/// The shape for kD and kDv, multiples of 16 up to 256. Up to 64, tiles may be large, of 192 rows, or under a light mask of
/// 192 keys; small: none is, for calls that would leave much of them empty. PERF: TFLOP/s on one H200, 16K tokens.
constexpr ForwardShape forward_shape(i32 kD, i32 kDv, ScoreOptions options, MaskKind mask,
                                     bool small = false) {
  ForwardShape s;
  const bool bias = options.bias != BiasType::kNone;
  const bool of_keys = options.key_bias != BiasType::kNone;
  const bool lean = !options.per_cell();  // few registers beside the tiles
  const bool narrow = kD <= 64 && kDv <= 64;
  // What registers lack room for beside what a mask needs.
  const bool many = options.alibi || (options.softcap && !options.bounded) || options.any_scale;
  // What the tensor cores add for keys leaves registers, too. PERF: a bias of keys at D64 1.51 to 1.09 of the time
  // without; causal, by two warpgroups in turns, 1.25 to 1.16, D96 1.10 to 1.03, but D128 1.09 to 1.10.
  const bool adds = of_keys && !bias && !options.dropout && multiplies_added(options);
  // Dropout alone, too. PERF: 0.94 of the time of two.
  const bool drops = options.dropout && !options.adjusts();
  const bool tall = mask == MaskKind::kNone && narrow && (lean || adds || drops);  // unless small
  if (tall && !small) {
    // D64 517, with two 460; with tiles of 192 keys 504, 1K tokens 5 % less; D32 0.90 of the time of two, 512 tokens 0.96,
    // a bias of keys 0.86, dropout 0.88.
    s.warpgroups = 3;
    s.turns = Turns::kIssued;
    s.loader_registers = 32;
    s.consumer_registers = 160;
  }
  // Or two may fall into step, and then wait for the tensor cores together. PERF: causal D96 2.28, not
  // 2.65 million cycles, D128 1K 2 % less time; dense D128 4 % more, random blocks 3 %. Up to D48 each until its S is
  // there: windows of 1024 0.94 of the time, 16K causal 0.98; D64 1.02.
  if ((tall && small && !options.dropout) ||
      (mask == MaskKind::kLight && kD <= 128 && kDv <= 128 && !many &&
       ((lean && (kD > 64 || narrow)) || (adds && kD > 32 && kD <= 96)))) {
    s.turns = small || kD <= 48 ? Turns::kScored : Turns::kIssued;
    // PERF: three warpgroups lack registers for guessed maxima beside a mask. Two with tiles of 192 keys take 0.87 to 0.89
    // of their time (causal, documents; softcap 1.01), with tiles of 128 keys 0.92 to 0.94. D32, tiles of 192 keys in place
    // of 128: 16K causal 0.91, 12 causal documents of 32K 0.92.
    if (narrow && lean && !small) {
      s.keys = 192;
      s.loader_registers = 40;
      s.consumer_registers = 232;
    }
    // One slot is enough then, and there is room for all boxes of out. PERF: causal D128 16K 2 % less time, 12
    // documents 32K 2 %, windows as much; dense as much, too.
    s.q_held = !options.softcap;
    s.slots = s.q_held ? 1 : 2;
  }
  // Above 128, up to 192, where nothing is masked, too. PERF: windows 0.95 to 0.965 of the time, 1K causal 0.94, 1K 0.97,
  // 12 causal documents of 8K 0.955 to 0.97, 16K causal 0.99, 16K 1.00 to 1.01; D224 and D256 as much.
  const bool wide = (kD > 128 || kDv > 128) && kD <= 192 && kDv <= 192;
  if (wide && !has_map(mask) && lean && !many && !options.softcap) s.turns = Turns::kIssued;
  // PERF (us, H200, 8K): a bias over rows and keys, D64 1993 to 1922, D128 1303 to 1260; softcap, D128 831 to 804; dropout
  // 0.99 to 1.01 of the time, but without turns 1.1 by what else stands in a step. A bias of keys as much; Longformer 1.3 of
  // the time.
  if (s.turns == Turns::kNone && !has_map(mask) && kDv <= 128 &&
      (options.bias_eights || options.dropout || options.bounded)) {
    s.turns = Turns::kScored;
  }
  // 1K tokens: 549, without 534; a window of 1024: 2 % faster.
  if (mask != MaskKind::kHeavy && kD > 96 && kD <= 128 && !bias) s.early = 4;
  if (mask != MaskKind::kNone) {
    s.cells = mask == MaskKind::kHeavy ? 4 : 2;
    s.row_bytes = mask == MaskKind::kHeavy ? kHeavyRowBytes : kLightRowBytes;
  }
  if (mask == MaskKind::kHeavy && lean) {
    s.loader_registers = 72;  // lookups take many, consumers none for the mask
    s.consumer_registers = 216;
  }
  if (mask == MaskKind::kMapped && kDv > 128) {  // what a consumer asks of cells
    s.loader_registers = 40;
    s.consumer_registers = 232;
  }
  // What these need of a tile of 128 keys would spill.
  if ((options.loads() && options.dropout) || (bias && of_keys)) s.keys = 64;
  if ((options.per_cell() || (options.alibi && kD <= 128)) && kDv > 128) s.keys = 64;
  s.bias = options.bias_eights;
  if (bias && !s.bias && (!options.bias_pairs || options.bias == BiasType::kFloat)) s.keys = 64;
  // PERF: 3 % less time so for three warpgroups; for two, which should not free K before they compute weights, 1 to 2 %
  // more, as if it kept them apart.
  s.added_bytes = added_bytes(options, s.warpgroups == 3 ? kAddedSlots : s.stages, s.keys);
  // Out is staged where shared memory is left, and registers.
  auto with_staging = [&](ForwardShape shape) {
    if (shape.warpgroups == 3 && options.softcap) return shape;
    shape.boxes = ceil_div(kDv, 64);
    while (shape.boxes > 0 && !shape.fits(kD, kDv)) --shape.boxes;
    return shape;
  };
  if (!s.fits(kD, kDv)) s.slots = 1;
  // Or these would spill, and ptxas serialize their WGMMAs.
  const bool splits = lean && options.softcap && kDv > 160;
  if (s.fits(kD, kDv) && !splits) return with_staging(s);
  // One and a half key tiles of V: D192 691, with tiles of 64 keys 608.
  if (lean) {
    ForwardShape split = s;
    split.v_split = 2;
    split.v_stages = 3;
    if (mask == MaskKind::kHeavy) {
      split.loader_registers = 56;
      split.consumer_registers = 224;
    }
    // PERF: rather ALiBi by consumers than smaller tiles.
    if (!split.fits(kD, kDv)) split.added_bytes = 0;
    if (split.fits(kD, kDv)) return with_staging(split);
  }
  s.slots = 2;
  s.keys = 64;
  s.added_bytes = added_bytes(options, s.stages, s.keys);
  if (!s.fits(kD, kDv)) s.slots = 1;
  return with_staging(s);
}

/// What a row tile needs of its head's keys: all, as every other; all on one side; few, and its neighbours the
/// same; or some that may lie anywhere.
enum class Reach : u8 { kAll, kFar, kNear, kAnywhere };
/// How many heads to work on together: one KV head's where row tiles take the same time, else enough that the
/// longest ones hide the last ones' idle processors; but K and V shall stay in L2 until neighbours have read
/// them, too. That has 50 MB, of which they may take 16: 32 are too many.
/// PERF: D128, 256 heads of 1K, 64 heads together read 0.63 GB of DRAM, 2.4 times all that there is: 264 us, 1 to
/// 32 heads 232; causal 155 for 64, 149 for 32, 153 for 16; 64 heads of 4K causal 489, 471, 442, 433 for 1, 4, 8,
/// 16; 16 heads of 16K causal 1661, 1627 us for 4, 16. 12 causal documents, 16 heads of 32K: 1732, 1635, 1592, 1569
/// us for 2, 4, 8, 16; 32 heads of 8K, by ids, 234, 218, 243, 267 for 8, 16, 24, 32, by pieces as long. Random blocks,
/// 10 %, 16 heads of 32K: 1527, 1487, 1550, 1637 us for 1, 2, 4, 16, of which 16 read 5.8 GB.
constexpr i32 forward_section(i32 heads, i32 group, i32 tiles_per_head, i64 kv_bytes_per_head,
                              Reach reach) {
  const i64 bytes = max_of(kv_bytes_per_head, i64{1});
  const i32 tiles = max_of(tiles_per_head, 1);
  i64 wanted = group;
  if (reach != Reach::kAll) {
    i64 together = 2;
    if (reach == Reach::kNear) together = min_of(ceil_div(4096, tiles), 16);
    if (reach == Reach::kFar) together = min_of((i64{128} << 20) / bytes * group, i64{16});
    const i64 cached = (i64{16} << 20) / bytes * group, filled = ceil_div(256, tiles);
    wanted = ceil_div(max_of(max_of(cached, filled), together), i64{group}) * group;
  }
  return static_cast<i32>(clamp_to(wanted, i64{1}, i64{max_of(heads, 1)}));
}

}  // namespace jali::cuda

#if defined(__CUDACC_RTC__)
#include "cuda/ptx/bulk.h"
#include "cuda/ptx/matrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/shared.h"
#include "cuda/tile/forward_scores.h"
#include "cuda/tile/forward_tiles.h"
#include "cuda/tile/no_mask.h"
#include "cuda/tile/softcap.h"
#include "cuda/tile/softmax.h"
#include "cuda/tile/store.h"
#include "cuda/tile/visible_bits.h"

namespace jali::cuda {

using namespace ptx;

/// T: BF16 or FP16. M: the mask. kMask: what it asks, as the host says.
template <class T, i32 kD, i32 kDv, class M, ScoreOptions kOptions, MaskKind kMask,
          ForwardShape kShape>
struct Forward {
  using Tiles = tile::ForwardTiles<T, kD, kDv, M, kOptions, kMask, kShape>;
  using Shared = typename Tiles::Shared;
  using RowTile = typename Tiles::RowTile;
  static constexpr i32 kKeys = Tiles::kKeys, kConsumers = Tiles::kConsumers;
  static constexpr i32 kSlots = Tiles::kSlots, kStages = Tiles::kStages;
  static constexpr i32 kVSplit = Tiles::kVSplit, kVStages = Tiles::kVStages;
  static constexpr i32 kRowBytes = Tiles::kRowBytes, kQBytes = Tiles::kQBytes;
  static constexpr bool kMasked = Tiles::kMasked, kHeavy = Tiles::kHeavy, kByRows = Tiles::kByRows;
  static constexpr i32 kCellSlots = Tiles::kCellSlots, kGroups = Tiles::kGroups;
  static constexpr bool kQHeld = Tiles::kQHeld, kKeyBias = Tiles::kKeyBias;
  static constexpr bool kMultiplies = Tiles::kMultiplies, kLinear = Tiles::kLinear;
  static constexpr i32 kFirst = Tiles::kFirst, kPartial = Tiles::kPartial, kEnd = Tiles::kEnd;
  static constexpr Turns kTurns = kShape.turns;
  static constexpr bool kBias = kOptions.bias != BiasType::kNone;

  // PERF: without maxima all of the first row's, where registers hold them.
  static constexpr i32 kEarly = kOptions.bounded && kConsumers < 3 ? kKeys / 8 : kShape.early;
  // A bias of keys that consumers add is loaded beside S, if it fits there.
  static constexpr bool kKeysEarly = kKeyBias && !kMultiplies && kDv <= 160;
  static constexpr bool kKeysLate = kKeyBias && !kMultiplies && !kKeysEarly;
  // prepare() comes behind the MMAs. PERF: or ptxas puts what it loads between them, and what waits for that (ALiBi,
  // when it loaded a slope in each step: 1.04 of the time). Not the loads of a bias over rows and keys, which are late.
  static constexpr bool kHoldsBack = (kOptions.alibi && !kLinear) || kKeysEarly;
  // PERF: tanh takes the exponentials' units, but instructions are dear, too: D64 1.57, 1.59, 1.66 times
  // the time without for 2, 1, 0 of 8; D128 1.38, 1.36, 1.24.
  static constexpr i32 kPolynomials = kOptions.softcap && kDv <= 64 ? 2 : 0;

  // Consumers guess that full tiles bring no new maxima: they do not look for any, and raise them afterwards where
  // sums of weights say that the guess was wrong (raise_maxima). Not where that takes more than S and what is added for
  // keys. PERF: D128 7 % less time, D64 7 %, ALiBi 21 %, since its maxima come first; D256 as much, softcap 2 % more. Partial
  // tiles, too: windows 8 % more.
  static constexpr bool kGuesses =
      kDv <= 128 && kKeyBias <= kMultiplies &&
      !(kBias || kOptions.any_scale || kOptions.softcap || kOptions.alibi > kLinear);

  // What keys add may be needed again.
  static constexpr bool kHolds = kGuesses && kMultiplies && !Tiles::kAddedAhead;
  // K is freed with V, not as soon as S is there. PERF: dropout, whose weights the next products wait for, D128 0.93 to 0.95
  // of the time; D64 1.02, others 0.99 to 1.02.
  static constexpr bool kFreesLate = kGuesses && !kHolds && kOptions.dropout && kD > 64;
  // No P V beside work that needs P's registers.
  template <bool kAny>
  static constexpr bool kTight =
      (kDv > 160 && (kAny || kOptions.per_cell())) || (kAny && kShape.consumer_registers <= 160);

  // Cells that ptxas may mix. PERF: fewer leave less to it, but each time takes an instruction (docs/design.md).
  static constexpr i32 kTogether = kOptions.softcap ? 4 : 2;

  struct Consumer {
    const ForwardArgs& a;
    const M& mask;
    const Shared& sm;
    const TensorMap& map_out;
    i32 wg, lane;

    u32 count = 0;           // key tiles whose S was made
    u32 hidden = 0;          // those with hidden cells, if these are looked up
    i32 opened = 0;          // row tiles
    i32 note = 0, next = 0;  // the key tile and the one after it
    i32 staged = -1;         // the row tile whose O is in shared memory (kSendsLate), or none

    float s[kKeys / 2], o[kDv / 2];
    u32 p[kKeys / 4];
    // kQHeld: this warp's rows; words 4 t to 4 t + 3 are the operand A of k16 step t.
    u32 q[kQHeld ? kD / 4 : 1];
    tile::Kept<kKeys, kOptions.keeps> kept;
    tile::RowState state;
    float shift[2], rescale[2];
    // kGuesses: rows have seen nothing, so that the next key tile's maxima are needed. bounded: scores go by tanh.
    bool looks = true;
    bool beyond = false;         // bounded: scores of this row tile were beyond the polynomial
    float row_added[2];          // kLinear: to all scores of a row in this key tile,
    float behind_added[2];       // and in those behind the diagonal
    u32 ones[4] = {0, 0, 0, 0};  // kMultiplies: rows of 16, the first three ones
    tile::Alibi alibi;
    tile::OfKeys<kKeys> of_keys;
    typename Conditional<kShape.bias, tile::StagedBias<T, kOptions, kKeys>,
                         tile::CellBias<T, kOptions, kKeys>>::Type bias;

    /// Waits for K number `count`. From then on the note of the tile after it can be read.
    JALI_DEVICE void wait_k() { barrier_wait(sm.k_full(count % kStages), count / kStages & 1); }
    JALI_DEVICE i32 read_note(u32 n) { return broadcast(load_shared(sm.note(n))); }
    /// Waits for the next Q.
    JALI_DEVICE void begin_row_tile() {
      barrier_wait(sm.q_full(opened % kSlots), opened / kSlots & 1);
      if constexpr (kQHeld) hold_q(opened % kSlots);
      if constexpr (kOptions.bounded) {
        multiply_q(opened % kSlots);
        looks = beyond;
        beyond = false;
      }
      ++opened;
      if constexpr (kShape.bias) {
        const RowTile t = row_tile();
        bias.open({a.scores, t.f}, t.row + row());
        bias.copy(a.scores.bias, sm.bias(warp()), first_key(), lane, true);
      }
    }
    /// bounded: the warpgroup's rows of Q where they lie, by q_factor.
    JALI_DEVICE void multiply_q(i32 slot) {
      static_assert(!kQHeld);
      constexpr i32 kBytes = kQBytes / kConsumers;
      tile::multiply_shared<kBytes>(sm.q(slot) + wg * kBytes, a.scores.q_factors);
      fence_async();
      named_sync(Tiles::kQBarrier + wg, 128);
    }
    /// Copies this warp's rows of Q to registers, and frees the slot.
    JALI_DEVICE void hold_q(i32 slot) {
      const i32 r = (warp() & 3) * 16 + (lane & 15);  // of the warpgroup's
      const u32 from = sm.q(slot) + wg * (kQBytes / kConsumers) + r * kRowBytes;
      load_left<64 * kRowBytes>(q, from, r, lane);
      __syncwarp();
      barrier_arrive_if(sm.q_empty(slot), lane == 0);
    }
    JALI_DEVICE i32 warp() { return (threadIdx.x - 128) / 32; }  // of the consumers
    /// The row of the row tile that this thread's first row is.
    JALI_DEVICE i32 row() { return warp() * 16 + (lane >> 2); }
    /// Of the scores in s, to units of log2(e).
    JALI_DEVICE float scale() { return tile::score_unit<kOptions>(a.scores) * kLog2E; }
    JALI_DEVICE RowTile row_tile() { return RowTile::load(sm.tile(opened - 1)); }
    JALI_DEVICE i32 first_key() { return Tiles::first_key(note); }
    /// The first key of this thread in the accumulators' block j of 8 keys.
    JALI_DEVICE i32 key_of(i32 j) { return first_key() + 8 * j + 2 * (lane & 3); }

    JALI_DEVICE void multiply_qk(i32 slot) {
      const u32 stage = count % kStages;
      const u32 from = descriptor(sm.q(slot) + wg * (kQBytes / kConsumers), 16);
      const u32 k = descriptor(sm.k(stage), 16);
#pragma unroll
      for (i32 t = 0; t < kD / 16; ++t) {
        const u32 keys = k + t / 4 * (kKeys * kRowBytes / 16) + t % 4 * 2;
        if constexpr (kQHeld) {
          Wgmma<T, kKeys, false>::rs(s, q + 4 * t, keys, t > 0);
        } else {
          Wgmma<T, kKeys, false>::ss(s, from + t / 4 * (64 * kRowBytes / 16) + t % 4 * 2, keys,
                                     t > 0);
        }
      }
      if constexpr (kMultiplies) {
        Wgmma<BF16, kKeys, true>::rs(s, ones, descriptor(sm.added(count), kAddedMatrixBytes), 1);
      }
    }
    /// O += P V of key tile n, as soon as V is there; O = P V if it is the first one of its row tile.
    JALI_DEVICE void multiply_pv(u32 n, bool first) {
      constexpr i32 kSteps = kKeys / kVSplit / 16;
#pragma unroll
      for (i32 i = 0; i < kVSplit; ++i) {
        const u32 at = Tiles::v_number(n, i), stage = at % kVStages;
        barrier_wait(sm.v_full(stage), at / kVStages & 1);
        const u32 v = descriptor(sm.v(stage), kKeys / kVSplit * kRowBytes);
        wgmma_fence();
#pragma unroll
        for (i32 t = 0; t < kSteps; ++t) {
          Wgmma<T, kDv, true>::rs(o, p + 4 * (i * kSteps + t), v + t * (16 * kRowBytes / 16),
                                  i + t > 0 || !first);
        }
      }
      wgmma_commit();
    }
    JALI_DEVICE void finish_pv(u32 n) {
      wgmma_wait<0>();
      tie(o);
      tie(p);
#pragma unroll
      for (i32 i = 0; i < kVSplit; ++i) {
        barrier_arrive_if(sm.v_empty(Tiles::v_number(n, i) % kVStages), lane == 0);
      }
    }
    /// The tensor cores have read K, and Q for the last time if the next key tile needs another.
    JALI_DEVICE void free_k(i32 stage) {
      barrier_arrive_if(sm.k_empty(stage), lane == 0);
      if constexpr (!kQHeld) {
        barrier_arrive_if(sm.q_empty((opened - 1) % kSlots),
                          lane == 0 && (next & (kFirst | kEnd)) != 0);
      }
    }

    /// Dropout: whether the next key tile needs another call of Philox than this one, of its row tile.
    JALI_DEVICE bool draws() const { return kOptions.dropout && Tiles::draws_between(note, next); }
    /// Calls Philox for the next key tile.
    JALI_DEVICE void draw() {
      if constexpr (kOptions.dropout) {
        const RowTile t = row_tile();
        kept.draw(*a.scores.seed, t.f, t.row + row(), Tiles::first_key(next) + 2 * (lane & 3));
      }
    }
    /// What the options need of the key tile, while the tensor cores make S. kAny: as of step().
    template <bool kAny>
    JALI_DEVICE void prepare() {
      bool across = false;  // the diagonal
      if constexpr (kOptions.alibi && (kAny || !kLinear)) {
        const RowTile t = row_tile();
        // PERF: one register while S is made, not what it comes from.
        alibi.distance = static_cast<float>(opaque(t.place() + row() - key_of(0)));
        alibi.slope =
            __fdividef(-a.scores.alibi_slopes[t.f.h], tile::score_unit<kOptions>(a.scores));
        if constexpr (kLinear) {
          behind_added[0] = -2 * alibi.slope * static_cast<float>(row());
          behind_added[1] = __fmaf_rn(alibi.slope, -16, behind_added[0]);
          across = t.side(first_key()) == Tiles::Side::kAcross;
          if (!across) alibi.slope = 0;
        }
      }
      if constexpr (kLinear) {
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          row_added[e] = note & Tiles::kBehind ? behind_added[e]
                         : across              ? 0.5f * behind_added[e]
                                               : 0;
        }
      }
      if constexpr (kBias && !kShape.bias) {
        if constexpr (kAny) {  // it may open a row tile
          const RowTile t = row_tile();
          bias.open({a.scores, t.f}, t.row + row());
        }
        bias.template begin<kAny>(a.scores.bias, key_of(0));
      }
      if constexpr (kOptions.dropout) kept.take(first_key());
      if constexpr (kKeysEarly) of_keys.load(sm.added(count) + 8 * (lane & 3));
    }
    /// Products to scores.
    template <bool kAny>
    JALI_DEVICE void adjust() {
      if constexpr (kOptions.softcap || kOptions.any_scale) {
        const float factor = kOptions.softcap ? a.scores.scale / a.scores.softcap : a.scores.scale;
#pragma unroll
        for (i32 n = 0; n < kKeys / 2; ++n) {
          s[n] = kOptions.softcap ? tanh_fast(s[n] * factor) : s[n] * factor;
        }
      }
      if constexpr (kKeysLate) of_keys.load(sm.added(count) + 8 * (lane & 3));
      if constexpr (kKeysEarly || kKeysLate) of_keys.add(s);
      if constexpr (kBias) {
        const float factor = __fdividef(1.0f, tile::score_unit<kOptions>(a.scores));
        if constexpr (kShape.bias) {
          bias.add(s, factor, sm.bias(warp()), lane);
          // Of the same rows; there is a whole step for it.
          bias.copy(a.scores.bias, sm.bias(warp()), Tiles::first_key(next), lane,
                    !(next & (kFirst | kEnd)));
        } else {
          bias.template add<kAny>(s, factor);
        }
      }
      if constexpr (kOptions.alibi && (kAny || !kLinear)) alibi.add(s);
    }
    /// Which cells of the key tile are visible; before the wait for S, which does not need them yet.
    /// PERF: of full tiles, too, where they open a row tile: one more kind of step costs more, in misses
    /// of the instruction cache.
    JALI_DEVICE tile::VisibleBits<kGroups> visible_bits() {
      tile::VisibleBits<kGroups> bits;
      if constexpr (kHeavy) {
        const bool partial = note & kPartial;
        const u32 slot = hidden % kCellSlots;
        barrier_wait_if(sm.cells_full(slot), hidden / kCellSlots & 1, partial);
        bits.load(sm.cells(slot) + row() * (4 * kGroups), lane);
        bits.show_all_if(!partial);
        __syncwarp();
        barrier_arrive_if(sm.cells_empty(slot), partial & lane == 0);
        hidden += partial;
      } else {
        const tile::QuadRun<kGroups> keys{key_of(0), load_shared(sm.num_keys(opened - 1))};
        if constexpr (kByRows) {
          const u32 slot = (opened - 1) % kCellSlots;
          barrier_wait(sm.cells_full(slot), (opened - 1) / kCellSlots & 1);
          bits.template look_up<kLightRowBytes>(mask, sm.cells(slot) + row() * kLightRowBytes,
                                                keys);
        } else {
          bits.show(keys);
        }
      }
      u32 all = 0;
      for (u32 word : bits.words) all ^= word;
      pin(all, sm.base);
      return bits;
    }
    /// A row tile whose sums are complete; O is, or will be.
    struct Closed {
      i32 tile = -1;     // none
      float inverse[2];  // of the sums
    };
    /// Where this warp's rows of O go.
    JALI_DEVICE tile::RowsTo rows_to(const RowTile& t) {
      const i32 first = t.row + warp() * 16;
      const BoxPlace at = box_place(a.seq, t.f.b, t.f.q_start, t.f.num_rows, first);
      return {broadcast(t.f.num_rows - first), broadcast(at.token), broadcast(t.f.h),
              broadcast(at.b), box_end(a.seq)};
    }
    /// Stores the LSE of row tile n.
    JALI_DEVICE Closed close_sums(i32 n) {
      Closed closed{n};
      const RowTile t = RowTile::load(sm.tile(n));
      float* to_lse = opaque(a.lse + t.lse(a, t.row + row()));
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        float total = sum_of_quad(state.sum[e]);
        float top = state.max[e] * scale(), factor = 1;
        if constexpr (kLinear) {  // take off what rows are measured with
          const float slope = a.scores.alibi_slopes[t.f.h] * kLog2E;
          top = __fmaf_rn(-slope, static_cast<float>(row() + 8 * e), top);
        }
        if constexpr (kOptions.sinks) {
          const float sink = a.scores.sinks[t.f.h] * kLog2E, higher = maximum(top, sink);
          // Neither anything seen nor a sink: no infinities are subtracted.
          const float finite = higher == -infinity() ? 0.0f : higher;
          factor = exp2_fast(top - finite);
          total = __fmaf_rn(total, factor, exp2_fast(sink - finite));
          top = higher;
        }
        if constexpr (kOptions.dropout) factor *= a.scores.keep_scale;
        // A NaN must come through.
        closed.inverse[e] = total == 0.0f ? 0.0f : __fdividef(factor, total);
        const i32 r = t.row + row() + 8 * e;
        const float lse = total == 0.0f ? -infinity() : (top + log2_fast(total)) * kLn2;
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}" ::"l"(to_lse),
            "f"(lse), "r"(static_cast<i32>((r < t.f.num_rows) & ((lane & 3) == 0)))
            : "memory");
        to_lse += 8 * a.lse_stride_l;
      }
      return closed;
    }
    // If all of O fits in shared memory, it stays there until products are in flight that its way to the copy engine need not
    // delay. PERF: windows 0.983 to 0.988 of the time; windows, documents and 1K tokens 0.985 to 0.99 since where it goes is
    // found beside these products. Three warpgroups lack the registers.
    static constexpr bool kSendsLate = kShape.boxes == ceil_div(kDv, 64) && kConsumers < 3;
    /// The first of this warp's rows of O.
    JALI_DEVICE u16* first_row(const RowTile& t) {
      return static_cast<u16*>(a.out) + t.out(a, t.row + opaque(warp()) * 16);
    }
    /// Stores the row tile's O; kSendsLate: with the next send().
    JALI_DEVICE void store(const Closed& closed) {
      const u32 boxes = sm.boxes(broadcast(warp()));
      if constexpr (kSendsLate) {
        tile::stage_boxes<T, kShape.boxes>(o, 0, closed.inverse, boxes, lane);
        staged = closed.tile;
        return;
      }
      const RowTile t = RowTile::load(sm.tile(closed.tile));
      if constexpr (kShape.boxes > 0) {
        tile::store_boxes<T, kShape.boxes>(o, closed.inverse, boxes, map_out, a.out_stride_l, a.Dv,
                                           lane, rows_to(t), [&] { return first_row(t); });
      } else {
        tile::store_rows<T>(o, closed.inverse, first_row(t), a.out_stride_l,
                            t.f.num_rows - t.row - warp() * 16, a.Dv, lane);
      }
    }
    /// O that is in shared memory leaves it.
    JALI_DEVICE void send() {
      if (!kSendsLate || staged < 0) return;
      const RowTile t = RowTile::load(sm.tile(staged));
      tile::send_boxes(0, kShape.boxes, sm.boxes(broadcast(warp())), map_out, a.out_stride_l, a.Dv,
                       lane, rows_to(t), [&] { return first_row(t); });
      staged = -1;
    }

    /// S as multiply_qk() made it, by the warp alone and from global memory: K is free already, and no
    /// other warp need wait.
    JALI_DEVICE void score_again() {
      const RowTile t = row_tile();
      const i32 own = lane_id(), column = 2 * (own & 3);  // the first of this lane
      auto pair = [](const u16* from) { return *reinterpret_cast<const u32*>(from); };
      const u16* rows[2];
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        const i64 r =
            t.f.q_start + min_of(t.row + warp() * 16 + (own >> 2) + 8 * e, t.f.num_rows - 1);
        rows[e] = static_cast<const u16*>(a.q) + offset(a.q_strides, t.f.b, t.f.h, r) + column;
      }
      const i64 key = t.f.k_start + first_key() + (own >> 2);
      const u16* const keys = static_cast<const u16*>(a.k) + column +
                              offset(a.k_strides, t.f.b, t.f.h / a.seq.group, key);
#pragma unroll
      for (i32 n = 0; n < kKeys / 2; ++n) s[n] = 0;
#pragma unroll 1
      for (i32 d = 0; d < a.D; d += 8) {
        const u32 of_rows[2] = {pair(rows[0] + d), pair(rows[1] + d)};
        const u16* of_key = keys + d;
#pragma unroll
        for (i32 j = 0; j < kKeys / 8; ++j) {
          mma_k8<T>(s + 4 * j, of_rows, pair(of_key));
          of_key = opaque(of_key + 8 * a.k_strides.l);  // PERF: one address, not sixteen
        }
      }
      if constexpr (kMultiplies) {
        const u32 added = sm.added(count) + lane % 8 * kRowBytes;
#pragma unroll
        for (i32 j = 0; j < kKeys / 8; j += 4) {
          u32 of_keys[4];
          load_transposed(added + j / 8 * kAddedMatrixBytes + ((j % 8 + lane / 8 ^ lane % 8) << 4),
                          of_keys);
#pragma unroll
          for (i32 n = 0; n < 4; ++n) mma_k8<BF16>(s + 4 * (j + n), {ones[0], ones[1]}, of_keys[n]);
        }
      }
    }
    template <i32 e, bool kHides>
    JALI_DEVICE void take_maximum(float slack = kGuesses ? tile::kSmallSlack : tile::kSlack) {
      if constexpr (kOptions.bounded) {
        state.max[e] = shift[e] = 0;
        rescale[e] = 1;
        return;
      }
      tile::take_maximum<e, kHides, kLinear>(s, row_added, scale(), slack, state, shift, rescale);
    }
    /// Of blocks [kBegin, kEnd) of row e.
    template <i32 e, i32 kBegin, i32 kEnd = kKeys / 8>
    JALI_DEVICE void exponentials(float (&total)[4]) {
      tile::exponentials<e, kBegin, kEnd, kPolynomials>(s, scale(), shift, total);
    }
    /// Takes the maxima of S into the state, and begins with the weights. PERF: ptxas mixes the
    /// exponentials of the first row with the maxima of the second, which other units compute.
    template <bool kHides>
    JALI_DEVICE void begin_weights(float (&total)[4]) {
      take_maximum<0, kHides>();
      exponentials<0, 0, kEarly>(total);
      take_maximum<1, kHides>();
    }
    /// S to P, of which begin_weights() has made some. Leaves O to be rescaled.
    JALI_DEVICE void end_weights(float (&total)[4]) {
      exponentials<0, kEarly>(total);
      exponentials<1, 0>(total);
      weights_to_operand();
    }
    /// Weights 2 j and 2 j + 1 of row e as P has them: the accumulators' layout is the A operand's, k16 step t is words
    /// 4 t to 4 t + 3.
    JALI_DEVICE u32 pair(i32 j, i32 e) const {
      return T::pack(s[4 * j + 2 * e], s[4 * j + 2 * e + 1]);
    }
    JALI_DEVICE void weights_to_operand() {
#pragma unroll
      for (i32 i = 0; i < kKeys / 4; ++i) p[i] = pair(i / 2, i % 2);
      if constexpr (kOptions.dropout) {
#pragma unroll
        for (i32 i = 0; i < kKeys / 4; ++i) {
          p[i] = kept.drop(p[i], kept.below(kept.word(i / 2, i % 2), a.scores));
        }
      }
    }
    /// S that was made again to P, and new sums.
    JALI_DEVICE void weigh_again(float (&total)[4]) {
      if constexpr (kOptions.dropout) kept.forget();
#pragma unroll
      for (float& x : total) x = 0;
      exponentials<0, 0>(total);
      exponentials<1, 0>(total);
      weights_to_operand();
    }
    /// S to P: weights exp2(argument(row, score)), and their sums. finish(): the last P V, which needs P.
    /// PERF: before it all of the first row. A quarter of it, or the second one, too: 2 to 5 % slower.
    template <class Argument, class Finish>
    JALI_DEVICE void weigh_rows(float (&total)[4], Argument argument, Finish finish) {
      constexpr i32 kPairs = kKeys / 8, kCells = kKeys / 4, kBehind = tile::kBehind;  // of a row
      // Dropout: numbers of pairs and what is dropped of these, of the first row and then of the second one; and the
      // first row's weights until P is free. PERF: three pairs where two come to their exponentials, since there is less
      // to do beside those of the first row, and a pair later than its numbers: 0.985 of the time.
      u32 words[2 * kPairs] = {}, below[2 * kPairs] = {}, first[kPairs] = {};
      auto compare = [&](i32 pair) {
#pragma unroll
        for (i32 m = pair * 3 / 2; m < (pair + 1) * 3 / 2; ++m) {
          if (m < 2 * kPairs) words[m] = kept.word(m % kPairs, m / kPairs);
          if (m > 0 && m <= 2 * kPairs) below[m - 1] = kept.below(words[m - 1], a.scores);
        }
      };
      // Each second cell ends a pair.
      static_assert(kBehind % 2 == 0);
      auto to_operand = [&](i32 n) {
        const i32 ended = (n - kBehind - 1) / 2, waiting = (n - kBehind - kCells) / 2;
        const bool ends = n % 2 == 1 && n > kBehind;
        auto kept_of = [&](u32 pair, i32 m) {
          return kOptions.dropout ? kept.drop(pair, below[m]) : pair;
        };
        if constexpr (kOptions.dropout) {
          if (n % 2 == 0) compare(n / 2);
          if (ends && ended < kPairs) first[ended] = pair(ended, 0);
        }
        if (n % 2 == 0 && n >= kCells + kBehind) {
          p[2 * waiting] = kept_of(kOptions.dropout ? first[waiting] : pair(waiting, 0), waiting);
        }
        if (ends && ended >= kPairs) {
          p[2 * (ended - kPairs) + 1] = kept_of(pair(ended - kPairs, 1), ended);
        }
      };
      tile::weigh_in_order<kTogether>(s, total, argument, to_operand, finish);
    }
    /// Whether sums of weights are at most that, and the condition holds, for all lanes.
    JALI_DEVICE bool sums_are_below(const float (&total)[4], float most, bool condition = true) {
      // NaNs are not below anything.
      const float sum = maximum_or_nan(total[0] + total[1], total[2] + total[3]);
      return __all_sync(0xffffffffu, (sum <= most) & condition);
    }
    /// S to P by the maxima that are known; their sums say whether these will do.
    JALI_DEVICE void guess_weights(float (&total)[4]) {
      // Elsewhere rows seldom have seen nothing yet, and raise_maxima() takes theirs.
      constexpr bool kMayHide = kMasked || kKeyBias;
      if (kMayHide && looks) {
        // The others keep theirs, whatever comes; these have nothing to be rescaled.
        constexpr float kAnySlack = 3e38f;
        take_maximum<0, true>(kAnySlack);
        take_maximum<1, true>(kAnySlack);
        looks = state.any_new();
      } else {
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          shift[e] = (kLinear ? state.max[e] - row_added[e] : state.max[e]) * scale();
        }
      }
      weigh_rows(
          total, [&](i32 e, float x) { return __fmaf_rn(x, scale(), -shift[e]); },
          [&] {
            finish_pv(count - 1);
            if (kFreesLate) free_k(count % kStages);
          });
      rescale[0] = rescale[1] = 1;
    }
    /// If they will not: raises maxima by what sums say, P and O with them; or where sums are above kMost, makes S again
    /// and takes its maxima. O is complete up to the key tile before; the state has not got `total` yet.
    JALI_DEVICE void raise_maxima(float (&total)[4]) {
      if (sums_are_below(total, tile::kMost<T>)) {
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          const float sum = sum_of_quad(total[2 * e] + total[2 * e + 1]);
          // By a power of two, so that nothing is rounded.
          const float raised = floorf(log2_fast(maximum(sum, 1.0f)));
          rescale[e] = exp2_fast(-raised);
          state.max[e] += __fdividef(raised, scale());
          total[2 * e] *= rescale[e];
          total[2 * e + 1] *= rescale[e];
        }
        const u32 factors[2] = {T::pack(rescale[0], rescale[0]), T::pack(rescale[1], rescale[1])};
#pragma unroll
        for (i32 i = 0; i < kKeys / 4; ++i) p[i] = T::multiply(p[i], factors[i % 2]);
      } else {
        score_again();
        take_maximum<0, true>();
        take_maximum<1, true>();
        weigh_again(total);
      }
      rescale_outputs();
    }
    JALI_DEVICE void rescale_outputs() {
#pragma unroll
      for (i32 n = 0; n < kDv / 2; ++n) o[n] *= rescale[n / 2 % 2];
    }
    /// bounded: products to P, where no cell is hidden, by the polynomial of tile/softcap.h. finish: the last P V, if that
    /// is still to do. If sums of weights say that scores are beyond that, S is made again, and they go by tanh, as all
    /// others of the row tile then, and those of the next one. PERF: tanh beside exponentials of their own, 0.9 of its
    /// time, but for three warpgroups, which lack the registers.
    template <class Finish>
    JALI_DEVICE void capped_weights(Finish finish) {
      constexpr bool kShares = kConsumers == 3;
      float total[4] = {0, 0, 0, 0};
      float terms[2] = {a.scores.tanh_terms[0], a.scores.tanh_terms[1]};
      take_maximum<0, false>();
      take_maximum<1, false>();
      if (kShares || !looks) {
        if (looks) {
          adjust<false>();
          terms[0] = scale();
          terms[1] = 0;
        }
        weigh_rows(total, [&](i32, float x) { return tile::capped(x, terms); }, finish);
        if (!capped_sums_are_right(total)) {
          beyond = true;
          if (!looks) {
            looks = true;
            score_again();
#pragma unroll
            for (float& x : s) x *= a.scores.q_factor;
            adjust<false>();
            weigh_again(total);
          }
        }
      } else {
        adjust<false>();
        exponentials<0, 0>(total);
        pin(total[0] + total[1], sm.base + Tiles::kBarriers);
        finish();
        exponentials<1, 0>(total);
        weights_to_operand();
        beyond |= !capped_sums_are_right(total);
      }
      tile::add_sums(state, rescale, total);
    }
    /// Neither a score above the polynomial's end, nor sums that those below its other end matter to.
    JALI_DEVICE bool capped_sums_are_right(const float (&total)[4]) {
      const float least = fminf(total[0] + total[1], total[2] + total[3]);
      return sums_are_below(total, a.scores.most_sum, least >= a.scores.least_sum);
    }
    JALI_DEVICE void give_turn() { named_arrive(wg == kConsumers - 1 ? 1 : 2 + wg, 256); }
    JALI_DEVICE void close_row_tile(const Closed& closed) {
      store(closed);
      if constexpr (kByRows) barrier_arrive_if(sm.cells_empty(closed.tile % kCellSlots), lane == 0);
    }

    /// S of this key tile in flight with O += P V of the last one, and what the scores need besides.
    template <bool kAny>
    JALI_DEVICE void multiply(bool first) {
      const i32 slot = (opened - 1) % kSlots;
      if (kTurns != Turns::kNone) named_sync(1 + wg, 256);
      tie(p);
      tie(o);
      tie(s);
      if constexpr (kQHeld) tie(q);
      if constexpr (kMultiplies) tie(ones);
      // PERF: not behind the products, where a warp stands until the tensor cores have nearly made S.
      const i32 loaded = load_shared(sm.note(count + 1));
      wgmma_fence();
      multiply_qk(slot);
      wgmma_commit();
      multiply_pv(count - 1, first);
      if (kTurns == Turns::kIssued) give_turn();
      // PERF: passes at once; but nothing of what follows moves up, between the MMAs.
      if (kHoldsBack || kAny) wait_k();
      next = broadcast(opaque(loaded));  // PERF: not before the products, which would wait for it
      prepare<kAny>();
    }
    JALI_DEVICE void wait_s() {
      wgmma_wait<1>();
      tie(s);
      if (kTurns == Turns::kScored) give_turn();
    }
    /// One step; the very first one, which has no O += P V, multiplies what happens to be there, and nobody looks at it.
    /// kAny: this key tile may be partial, and may open a row tile, where the last one closed the row tile before: that
    /// is returned. PERF: a template, since a branch while WGMMAs are in flight costs 6 %; not more of them, which the
    /// instruction cache misses.
    template <bool kAny>
    JALI_DEVICE Closed step() {
      const u32 stage = count % kStages;
      const bool first = note & kFirst;  // the last one
      const bool draws = this->draws();
      note = next;
      // PERF: of three warpgroups not a bit that is known ahead, or D 64 with ALiBi would spill.
      const bool opens = kAny && ((kConsumers == 3 ? opaque(note) : note) & kFirst) != 0;
      wait_k();
      if (opens) begin_row_tile();
      if (opens || draws) draw();
      multiply<kAny>(first);
      Closed closed;
      tile::VisibleBits<kGroups> bits;
      if constexpr (kAny) {
        send();
        bits = visible_bits();
        if (opens && opened > 1) closed = close_sums(opened - 2);
      }
      wait_s();
      free_k(stage);
      if (kTight<kAny>) finish_pv(count - 1);
      auto finish = [&] {
        if (!kTight<kAny>) finish_pv(count - 1);
      };
      if constexpr (kOptions.bounded && !kAny) {
        capped_weights(finish);
      } else {
        if (kOptions.adjusts()) adjust<kAny>();
        if constexpr (kAny) bits.template hide<!kOptions.loads()>(s);
        if constexpr (kAny) state.begin_if(opens);
        float total[4] = {0, 0, 0, 0};
        begin_weights<kAny || kOptions.loads()>(total);
        if (kEarly > 0) pin(total[0] + total[1], sm.base + Tiles::kBarriers);
        finish();
        end_weights(total);
        if (opens) rescale[0] = rescale[1] = 1;  // nothing yet
        tile::add_sums(state, rescale, total);
        if constexpr (kGuesses) looks = state.any_new();
      }
      // PERF: or the sums are made behind the branch, not beside the exponentials.
      if constexpr (kAny) tie(state.sum);
      if (!kOptions.bounded &&
          __any_sync(0xffffffffu, (rescale[0] != 1.0f) | (rescale[1] != 1.0f))) {
        rescale_outputs();
      }
      ++count;
      return closed;
    }
    /// kGuesses: steps over full key tiles, up to one that is not, or that opens a row tile. PERF: nothing that
    /// is seldom needed stands in the loop: warps with wrong guesses, or that draw, leave it for a moment. Votes on
    /// maxima and on whether to rescale, and a branch for each, took a seventh of the time of D64 with dropout, D128 7 %,
    /// a bias of keys 2 %.
    JALI_DEVICE void run() {
      bool first = note & kFirst, ends;
      do {
        float total[4];
        u32 stage;
        if (draws()) draw();
        while (true) {
          stage = count % kStages;
          note = next;
          wait_k();
          multiply<false>(first);
          first = false;
          wait_s();
          if (!kHolds && !kFreesLate) free_k(stage);
#pragma unroll
          for (float& x : total) x = 0;
          guess_weights(total);
          ends = next & (kFirst | kPartial | kEnd);
          if (!sums_are_below(total, tile::kRoom, !(ends | draws()))) break;
          tile::add_sums(state, rescale, total);
          if (kHolds) free_k(stage);
          ++count;
        }
        if (!sums_are_below(total, tile::kRoom)) raise_maxima(total);
        tile::add_sums(state, rescale, total);
        if (kHolds) free_k(stage);
        ++count;
      } while (!ends);
    }

    /// The last P V.
    JALI_DEVICE Closed end() {
      tie(p);
      tie(o);
      multiply_pv(count - 1, note & kFirst);
      send();
      const Closed closed = close_sums(opened - 1);
      wgmma_wait<0>();
      tie(o);
      return closed;
    }
  };

  JALI_DEVICE static void consume(const ForwardArgs& a, const M& mask, const Shared& sm,
                                  const TensorMap& map_out, i32 wg) {
    Consumer c{a, mask, sm, map_out, wg, static_cast<i32>(threadIdx.x & 31)};
    if constexpr (kMultiplies) {
      const i32 quad = c.lane & 3;
      c.ones[0] = c.ones[1] = quad == 0 ? 0x3f803f80 : quad == 1 ? 0x3f80 : 0;
    }
    if (kTurns != Turns::kNone && wg == 0) named_arrive(1, 256);
    c.wait_k();
    c.next = c.read_note(0);
    if (c.next & kEnd) return;
    while (true) {
      if constexpr (kGuesses) {
        if (!(c.next & (kFirst | kPartial | kEnd))) c.run();
      } else {
        while (!(c.next & (kFirst | kPartial | kEnd))) c.template step<false>();
      }
      // PERF: all row tiles are closed here, the last one, too: a tenth less to compile.
      const bool ends = c.next & kEnd;
      const typename Consumer::Closed closed = ends ? c.end() : c.template step<true>();
      if (closed.tile >= 0) c.close_row_tile(closed);
      if (ends) break;
    }
    c.send();
    bulk_wait_read();
  }

  JALI_DEVICE static void run(const TensorMap& map_q, const TensorMap& map_k,
                              const TensorMap& map_v, const TensorMap& map_out,
                              const ForwardArgs& a, const M& mask) {
    if constexpr (kGuesses || kOptions.bounded) declare_order();
    Tiles::run(map_q, map_k, map_v, map_out, a, mask,
               [&](const Shared& sm, i32 wg) { consume(a, mask, sm, map_out, wg); });
  }
};

}  // namespace jali::cuda
#endif
