// Backward, sm_90a: dq, dk, dv over tiles of 128 keys, D and Dv up to 128, but not D <= 64 < Dv.
//
// Speed     H200, bf16, a whole pass, TFLOP/s (cuDNN): D 128 H16 16K full 634 (524),
//           causal 657 (526); 1K b16 486 (396), 390 (282). D 64 H32 16K 590 (429), 606 (422).
// Serves    fp16, bf16; D and Dv any multiple of 8 (kD, kDv: of 16, at least those); GQA; varlen;
//           any mask: empty tiles cost nothing, the cells of partial ones are masked one by one;
//           options of the scores, but not all: backward_fits_options.
// Tensors   q, dout [B, Hq, Lq, D | Dv] in boxes of {64, kRows, 1, 1}, k, v [B, Hkv, Lk, D | Dv] of
//           {64, 128, 1, 1}, by the tensor maps of call.h; the rest as BackwardArgs say.
// Roles     warpgroup 0: warp 0 loads (persistent; takes key tiles from a counter, in the
//           order of kernel/work_order.h; walks the row tiles of all query heads of the KV head,
//           which under a mask it classifies, or finds in a tile map); warp 1 cares for row tiles
//           (tile/backward_rows.h); warps 2 and 3 look up the cells of partial tiles, or, where
//           consumers can tell them by key, warp 2 does as warp 1, and warp 3 tells other blocks what
//           consumers have added (beside a staged bias warp 2, and warp 3 nothing). Warpgroups 1 and 2: 64
//           keys each; before and after that, row tiles, too. If kOrdered, a warp adds for consumers, in turns,
//           and another one tells that: two of a fourth warpgroup, or, without that (kTurnGroup), warps 2 and 3.
// A step    one row tile: S' = K Q' and dP' = V dO' (' transposed), P and dS stay in registers as
//           left operands of dV += P' dO and dK += dS' Q. dS goes to shared memory as well, where
//           both warpgroups' keys meet in dQ = dS K, one step late: 64 x 64 of it a warpgroup, in
//           columns (kRows 64; at D 64 32 of them) or rows (kRows 128), added to dq_sum by the copy engine;
//           if kOrdered, in the order of the key tiles, by a counter per row tile.
//           PERF: dQ of the last step before dK of this one, so that it leaves beside dK: +13 %.
// Options   what is added to scores is what S' starts at (else: kStartsAtAdded), loaded beside dK of the
//           step before; dropout draws once for many row tiles; a bias over rows and keys, if it can be
//           copied eight keys at a time, a warp copies for itself, as soon as it has used that of the row tile
//           before; a bias of keys it brings to shared memory once a head, from where exponents add it;
//           softcap's slopes go into P as soon as that is rounded, and its scores by a polynomial where LSE says
//           that they may (LowScores). What each costs: docs/performance.md.
// Turns     kAlternates: the warpgroups multiply one after the other, S and dP of the first one, of the second
//           one, dV and dQ of the first, of the second; dK goes with what comes next.
// Shared    K, V; Q, dO 2 stages each, all as [dim / 64][rows][64] under the 128-byte swizzle; dS 2
//           buffers [rows / 64][128 keys][64]; dQ, by way of whose place dk and dv go, too; statistics
//           of 2 stages (at D 64 as matrices, which the tensor cores add); cells; up to 6 stages of row
//           tiles, 4 KB each; a bias over rows and keys, [8 warps][rows][16 keys], or of keys, [8 warps][8][2],
//           keys n and n + 8 side by side; notes; ones, by which dS is multiplied for the gradient of a bias of
//           keys; what dropout drew. 222 KB at D 128, with a bias 226. Where a bias over rows and
//           keys leaves no place for dQ (kDqAtDs), that goes by way of the dS that it was made from.
// Barriers  note_full: 1, by the loader; k_full, v_full, q_full, o_full: 1 arrival + bytes (kAlternates: 2 of
//           q_full, which is o_full, too); k_empty, v_empty, rows_empty: one arrival a consumer warp (8), when
//           the tensor cores have read K, V, Q and dO; ds_full, ds_empty: one a consumer warp (8); kDqAtDs:
//           ds_empty when dQ was read from there, a step later. Where cells are looked up, cells_full and
//           note_empty: one a finder warp (2), of every row tile; else added_full: one a consumer warp (8),
//           added_empty: 1. kOrdered: staged_full as added_full, that is 1 then; staged_empty: 1, and one more of
//           note_empty, by the warp that adds.
// Here      for host and kernel: what fits, backward_rows, backward_tile; Backward: what options and masks leave of a
//           step; Consumer, in this order: products; what is prepared for the next row tile; look_at_lse; weigh,
//           differentiate, share_ds, send_dq; step, step_partial, run_item. Warpgroup 0 is in tile/backward_tiles.h.
#pragma once

#include "cuda/kernel/backward.h"

namespace jali::cuda {

/// For host and kernel: D and Dv are those of the kernel.
JALI_HD constexpr bool backward_fits(i32 D, i32 Dv) {
  return D <= 128 && Dv <= 128 && (D > 64 || Dv <= 64);
}
/// Whether products become scores by softcap alone.
JALI_HD constexpr bool caps_products(const ScoreOptions& options) {
  return options.softcap && !options.any_scale && !options.alibi && !options.loads();
}
/// Whether softcap goes by a polynomial where LSE says that it may (LowScores), and K is multiplied for that. Not in half
/// precision, which has more digits.
JALI_HD constexpr bool backward_scales_keys(const ScoreOptions& options, bool bf16) {
  return bf16 && caps_products(options) && !options.dropout;
}
/// PERF: what would spill is for bwd_sm90_wide.cuh: what else is done to products; a bias over rows and
/// keys that is not loaded and its gradient not stored in words, or beside others.
JALI_HD constexpr bool backward_fits_options(const ScoreOptions& options,
                                             const BiasGradients& wanted) {
  const bool beside = options.key_bias != BiasType::kNone || options.alibi || options.dropout;
  const bool pairs =
      options.bias_pairs && (wanted.cells == CellGradient::kNone || wanted.in_words());
  return (!adjusts_products(options) || caps_products(options)) &&
         (options.bias == BiasType::kNone || (pairs && !beside));
}
/// Rows of a row tile: at D 64 128, unless options leave no registers for them. PERF (D 64 H32 8K, us): 2,440 with
/// 128, 3,060 with 64; softcap 3,090 and 3,290, dropout 3,020 and 3,640, in tiles of 64 keys (bwd_sm90_wide) 5,450 and
/// 5,380; a bias over rows and keys 3,250 and 4,520, its gradient 4,480 and 5,000.
JALI_HD constexpr i32 backward_rows(i32 D, i32 Dv, const ScoreOptions& options,
                                    bool deterministic) {
  if (D > 64 || Dv > 64) return 64;
  if (options.bias != BiasType::kNone) return options.bias_eights && !deterministic ? 128 : 64;
  if (!options.softcap && !options.dropout) return 128;
  const bool alone = options.softcap ? !options.dropout : !options.adjusts();
  return alone && !deterministic ? 128 : 64;
}
/// Whether differences of floats tell what dropout keeps, where they can. PERF: D 128 2,490 to 2,400 us, causal as long; row
/// tiles of 128 0 to 1 % more.
JALI_HD constexpr bool backward_tells_by_differences(i32 D, i32 Dv, const ScoreOptions& options,
                                                     bool deterministic) {
  return backward_rows(D, Dv, options, deterministic) == 64;
}
/// Shared memory for a bias over rows and keys, or of keys: beside row tiles of 128 a multiple of 1 KB, as the matrices
/// that lie behind it need.
JALI_HD constexpr i32 backward_bias_bytes(const ScoreOptions& options, i32 rows) {
  return adds_of_keys(options) ? 8 * rows : options.bias_eights ? 2 * rows * 128 : 0;
}
/// The same for what dropout drops: a tile::Dropped of each thread.
JALI_HD constexpr i32 backward_dropped_bytes(const ScoreOptions& options) {
  return options.dropout ? 256 * 16 : 0;
}
/// Whether dQ goes by way of the place of the dS that it was made from. PERF: only where there is no other place, since
/// each warpgroup then waits for the other one: 1.04 to 1.10 of the time.
JALI_HD constexpr bool backward_dq_at_ds(const ScoreOptions& options, i32 rows) {
  return rows == 128 && options.bias_eights;
}
JALI_HD constexpr BackwardTile backward_tile(i32 D, i32 Dv, const ScoreOptions& options,
                                             bool deterministic) {
  const i32 keys = 128, rows = backward_rows(D, Dv, options, deterministic);
  const i32 dim = ceil_div(D, 64) * 64, dim_v = ceil_div(Dv, 64) * 64;
  const i32 bytes = 2 * (keys + 2 * rows) * (dim + dim_v)                      // K, V; Q, dO
                    + 2 * 2 * rows * keys                                      // dS
                    + (backward_dq_at_ds(options, rows) ? 0 : 4 * rows * dim)  // dQ
                    + (rows == 128 ? 64 * rows + 1024 : 16 * rows)             // statistics; ones
                    + kBackwardCellSlots<keys> * rows * keys / 8 + kBackwardNotesBytes +
                    backward_bias_bytes(options, rows) + backward_dropped_bytes(options);
  const i32 stages = backward_row_stages(bytes);
  const i32 shared = bytes + stages * kBackwardRowBytes;
  return {rows, keys, rows * dim, stages, shared, 384, 40, 232};
}

}  // namespace jali::cuda

#if defined(__CUDACC_RTC__)
#include "cuda/tile/backward_tiles.h"
#include "cuda/tile/softcap.h"
#include "cuda/tile/softmax.h"

namespace jali::cuda {

using namespace ptx;

/// T: BF16 or FP16. M: the mask. kOrdered: deterministic. kWanted: gradients of biases.
/// kForcesMap: see BackwardTiles.
template <class T, i32 kD, i32 kDv, class M, bool kOrdered = false,
          ScoreOptions kOptions = ScoreOptions{}, BiasGradients kWanted = BiasGradients{},
          bool kForcesMap = false>
struct Backward {
  static constexpr BackwardTile kTile = backward_tile(kD, kDv, kOptions, kOrdered);
  static constexpr i32 kRows = kTile.rows, kKeys = kTile.keys;
  static constexpr i32 kDsBytes = kRows * kKeys * 2;
  // The tensor cores add both statistics where nothing comes between these and the products. PERF: D128 is 3 % slower
  // so. One of them alone: that of dP beside softcap 1.04, that of S beside dropout 1.00 to 1.02.
  static constexpr bool kMatrices =
      kRows == 128 && !adjusts_products(kOptions) && !kOptions.dropout &&
      !(kOrdered && kOptions.alibi);  // which would spill under documents
  static constexpr bool kDqAtDs = backward_dq_at_ds(kOptions, kRows);
  static_assert(!kDqAtDs || !kOrdered, "a warp that adds in turns knows of no dS");
  static constexpr i32 kBiasAt = 2 * kDsBytes + (kDqAtDs ? 0 : kTile.dq_floats * 4);
  static constexpr i32 kDroppedAt = kBiasAt + backward_bias_bytes(kOptions, kRows);
  static constexpr i32 kOwnBytes = kDroppedAt + backward_dropped_bytes(kOptions);
  static constexpr bool kCaps = caps_products(kOptions);
  // Whether the warpgroups take turns, and await Q and dO at once. PERF: else both multiply slowly at the same time, and
  // compute at the same time. D 128 softcap 0.96 of the time, dropout 0.95; D 64 0.975, softcap 0.97, dropout 0.98,
  // ALiBi 0.99, a bias of keys 1.00, its gradient 0.98, but one over rows and keys 1.03; D 128 without an option 1.01.
  // Deterministic, D 64 gains nothing under a mask, and would spill.
  static constexpr bool kAlternates =
      kCaps || kOptions.dropout ||
      (kD <= 64 && kOptions.bias == BiasType::kNone && (!kOrdered || is_no_mask<M>));
  using Tiles =
      tile::BackwardTiles<T, kD, kDv, kRows, kKeys, kOwnBytes, kTile.row_stages, M, kOrdered,
                          kOptions, kWanted, kMatrices, kAlternates, kForcesMap>;
  static constexpr bool kStagesBias = Tiles::kStagesBias;
  using Rows = typename Tiles::Rows;
  using Turns = typename Tiles::Turns;
  using Scores = typename Tiles::Scores;
  using Shared = typename Tiles::Shared;
  using Notes = typename Tiles::Notes;
  using Item = typename Tiles::Item;
  using Note = typename Tiles::Note;
  using Hiding = typename Tiles::Hiding;
  static_assert(kMatrices || kRows == 64 ? Tiles::kSharedBytes == kTile.shared_bytes
                                         : Tiles::kSharedBytes < kTile.shared_bytes,
                "the host's is for matrices where row tiles are of 128");
  static_assert(backward_fits(kD, kDv), "dQ is 64 x 64 a warpgroup at most");
  static_assert(backward_fits_options(kOptions, kWanted));
  static constexpr i32 kStages = Tiles::kStages, kKHalf = Tiles::kKHalf;
  static constexpr bool kSplitsRows = kRows == 128;                 // dQ among the warpgroups
  static constexpr i32 kDqCols = kSplitsRows || kD > 64 ? 64 : 32;  // of a warpgroup
  static constexpr i32 kDqBytes = kDqCols * 64;                     // of a warp
  // S starts at what is added to scores; but a bias of keys is added to exponents, by the instruction that
  // multiplies them (PERF: 5 % less time), from shared memory, where a warp puts that of its keys once a head.
  static constexpr bool kStartsAtAdded = Scores::kAdds && !Scores::kAddsKeys;
  static constexpr bool kMultipliesOnes = Tiles::kMultipliesOnes;
  static constexpr bool kTurnGroup = Tiles::kTurnGroup;
  static constexpr i32 kThreads = kTile.threads + (kTurnGroup ? 128 : 0);
  static constexpr i32 kConsumerRegisters = kTile.consumer_registers - (kTurnGroup ? 8 : 0);
  // Whether options leave registers for what shortens a step at D 128.
  static constexpr bool kSpares =
      kRows == 64 && !Scores::kAdjusts && !kStartsAtAdded && !kWanted.per_tile();
  // Notes are read a step early. PERF: dropout 0.98 to 1.00 of the time. D 64 is slower so; beside a fourth warpgroup it
  // would spill.
  static constexpr bool kReadsEarly = kSpares && !kTurnGroup;
  static_assert(Tiles::kSends == kOrdered, "consumers know no turns");
  static_assert(tile::kStagedBytes <= kDqBytes, "dk and dv go by way of a warp's dQ");
  // K and V are left operands from registers, too, of which at D 64 row tiles of 64 leave enough. PERF: shared memory is
  // read less: 0.95 of the time. A bias without a gradient 1.00, dropout 1.02.
  static constexpr bool kHoldsKeys = kRows == 64 && kD <= 64 && kDv <= 64 && kWanted.per_cell();
  // In row tiles of 128 tanh alone comes before dP, since P and weights times slopes would not both fit the registers.
  // PERF: what is needed of statistics is loaded for so many pairs of a thread's cells at once; ptxas would load all of
  // it, and spill.
  static constexpr bool kWeighsLate = kCaps && kRows == 128;
  static constexpr i32 kLoadsLate = kRows == 128 && (kCaps || kOptions.dropout) ? 4 : 0;
  // Low scores have steps of their own, since a branch while WGMMAs are in flight is dear. kLow: beside the flags of a
  // row tile.
  static constexpr bool kLooksLow = backward_scales_keys(kOptions, T::kDigits == 8);
  static constexpr i32 kLow = 16;
  // Exponentials before dP is there. PERF: D 64 in row tiles of 128 1 to 2 % less time (of 64 not measured), deterministic
  // 4 % (under a mask 0, and some would spill), D 128 1 % more, with softcap or dropout 4 %.
  static constexpr bool kInOrder =
      kD <= 64 && !kCaps && !kOptions.dropout && !(kOrdered && (Tiles::kMasked || Scores::kAdds));
  static constexpr float kHiddenTanh = -1e15f;  // of no weight, and its slope is finite

  JALI_DEVICE static u32 ds_buffer(const Shared& sm, u32 buffer) {
    return sm.rest() + buffer * kDsBytes;
  }
  /// Of a warp; its dQ is made from the dS of `buffer`.
  JALI_DEVICE static u32 dq_buffer(const Shared& sm, i32 warp, u32 buffer) {
    return sm.rest() + (kDqAtDs ? buffer * kDsBytes : 2 * kDsBytes) + warp * kDqBytes;
  }
  JALI_DEVICE static typename Scores::StagedBias bias(const Shared& sm, i32 warp) {
    return {sm.rest() + kBiasAt + warp * Scores::StagedBias::kBytes};
  }
  JALI_DEVICE static u32 ds_full(const Shared& sm, u32 buffer) { return sm.own(buffer); }
  JALI_DEVICE static u32 ds_empty(const Shared& sm, u32 buffer) { return sm.own(2 + buffer); }

  /// What a warpgroup's keys see of a row tile.
  enum class Sees : u8 { kAll, kSome, kNothing };
  // Nothing is multiplied for a warpgroup whose keys see nothing of a partial tile. Not where gradients of cells
  // are stored, or summed up by consumers; nor where row tiles are as long as key tiles: diagonals seldom leave such
  // halves.
  // PERF: nor beside a bias over rows and keys, for which registers are too few. Without a mask there is nothing
  // to skip, but a full step is 2 % shorter: ptxas keeps an address that it computed anew.
  static constexpr bool kSums = kWanted.keys && !(kMultipliesOnes && Scores::kAddsKeys);
  static constexpr bool kSkips =
      !kWanted.per_cell() && !kSums && kRows < kKeys && kOptions.bias == BiasType::kNone;
  // Then scores of hidden cells start at -infinity; not where a bias of keys comes later, which may be NaN. PERF: there
  // is less to do while dP is being multiplied than when weights are cleared: windows 2 % less time, with find_runs().
  static constexpr bool kStartsHidden = kSkips && !kCaps && !Scores::kAddsKeys;

  /// Begins to add what a consumer warp, of the second warpgroup or not, has staged, if `condition`.
  JALI_DEVICE static void add_dq(const BackwardArgs& a, const Shared& sm, i32 number, i32 warp,
                                 u32 buffer, bool second, bool condition) {
    // Blocks of 8 columns: of the first warpgroup, or of both alike, and of the second one.
    constexpr i32 kBlocks = min_of(kD, kSplitsRows ? 64 : kDqCols) / 8;
    constexpr i32 kOthers = kSplitsRows ? kBlocks : max_of(kD / 8 - kBlocks, 0);
    const i32 place = kDqCols == 64 ? warp * 1024 : warp % 4 * 1024 + warp / 4 * 512;
    add_bulk_if(a.dq_sum + i64(number) * kTile.dq_floats + place, dq_buffer(sm, warp, buffer),
                (second ? kOthers : kBlocks) * 512, condition & (kOthers > 0 | !second));
    bulk_commit();
  }

  struct Consumer {
    const BackwardArgs& a;
    const M& mask;
    const Shared& sm;
    const Notes* notes;
    i32 warp, lane;  // warp: of the consumers, 0 to 7
    /// The warpgroup. PERF: not a register of its own, and beside a staged bias made anew, or they would spill.
    JALI_DEVICE i32 wg() const { return (kStagesBias ? opaque(warp) : warp) / 4; }
    /// Of the warp's in the key tile. PERF: opaque, or it would spill.
    JALI_DEVICE i32 first_key() const { return 16 * opaque(warp); }

    u32 counts = 0;  // of row tiles, times 4, and of key tiles modulo 4
    i32 flags = 0;   // of the row tile that comes next
    // Unless kOrdered: its number; that of the one whose dQ is due.
    i32 number = 0, last_number = 0;

    float dk[kD / 2], dv[kDv / 2];
    float s[kRows / 2], dp[kRows / 2];
    u32 p[kRows / 4], ds[kRows / 4];
    u32 k[kHoldsKeys ? kD / 4 : 1], v[kHoldsKeys ? kDv / 4 : 1];  // of the warp's 16 keys
    // kMultipliesOnes: of dS over the rows of a head that the key tile has seen; [0] and [2] are this thread's
    // two keys'.
    float key_sums[4] = {0, 0, 0, 0};
    tile::Dropped<kOptions.keeps, kOptions.saturates> dropped;  // of 64 rows
    /// Where that of this thread is, before go_to().
    JALI_DEVICE u32 drawn() const {
      return sm.rest() + kDroppedAt + opaque(warp) * 512 + opaque(lane) * 16;
    }
    /// Dropout: calls Philox for the row tile that the block is at, and others of its head.
    JALI_DEVICE void draw() {
      dropped.draw(a.scores, place());
      store_array(drawn(), dropped.words());
    }
    /// For the n-th 64 rows of the row tile. PERF: opaque, or D 64 would spill.
    JALI_DEVICE void load_dropped(i32 n) {
      const Note& note = notes->note[opaque(steps()) % Tiles::kNoteSlots];
      load_array(drawn(), dropped.words());
      dropped.go_to(n == 0 ? note.shift : dropout_shift_of_row(note.row + 64 * n), lane >> 2);
    }
    typename Scores::Added added;  // to the scores of the row tile that comes next
    // PERF: dQ takes the registers of S by name; left to ptxas, it copies.
    using Dq = float[kDqCols / 2];
    JALI_DEVICE Dq& dq() { return reinterpret_cast<Dq&>(s); }

    // PERF: one register for both.
    JALI_DEVICE u32 steps() const { return counts >> 2; }
    JALI_DEVICE u32 items() const { return counts & 3; }
    /// d += X Y', X this warpgroup's part of K or V, Y the row tile.
    template <i32 kDim, i32 kCount>
    JALI_DEVICE void multiply_keys(float (&d)[kRows / 2], const u32 (&held)[kCount], u32 keys,
                                   u32 rows) {
      if constexpr (kHoldsKeys) {
        const u32 y = descriptor(rows, 16);
#pragma unroll
        for (i32 t = 0; t < kDim / 16; ++t) {
          Wgmma<T, kRows, false>::rs(d, held + 4 * t, y + 2 * t, 1);
        }
      } else {
        Tiles::template multiply_dim<kDim>(d, keys + wg() * 8192, rows);
      }
    }
    /// This warpgroup's part of dQ = dS K.
    JALI_DEVICE void multiply_dq(u32 buffer) {
      const u32 x = descriptor(ds_buffer(sm, buffer) + (kSplitsRows ? wg() * kKHalf : 0), 16);
      // 32 columns are half a line of the swizzle, which goes by the address.
      constexpr i32 kColumns = kSplitsRows ? 0 : kDqCols == 64 ? kKHalf : 64;
      const u32 k = descriptor(sm.k() + wg() * kColumns, 16);
#pragma unroll
      for (i32 t = 0; t < kKeys / 16; ++t) {
        Wgmma<T, kDqCols, true>::template ss<true>(dq(), x + t * (2048 / 16), k + t * (2048 / 16),
                                                   t > 0);
      }
    }

    JALI_DEVICE tile::CellPlace place() {
      return Tiles::place(notes->item[(items() - 1) % 4], notes->note[steps() % Tiles::kNoteSlots],
                          first_key(), Scores::kAdds ? opaque(lane) : lane);
    }
    /// Adds the sums over the rows of the last step's head; one thread adds to a key of a KV head, in the order
    /// of the row tiles. The loader leaves that step's note alone until this one arrives at rows_empty.
    JALI_DEVICE void add_key_sums() {
      const Item& item = notes->item[(items() - 1) % 4];
      const tile::CellPlace at = Tiles::place(item, notes->note[(steps() - 1) % Tiles::kNoteSlots],
                                              first_key(), opaque(lane));
      float* const to = Scores::key_sum(a, at, item.h_kv);
      const bool adds = (opaque(lane) & 3) == 0;
      add_if(to, Scores::gradient(key_sums[0], a), adds & at.key < at.f.num_keys);
      add_if(to + 8, Scores::gradient(key_sums[2], a), adds & at.key + 8 < at.f.num_keys);
      for (float& x : key_sums) x = 0;
    }
    static constexpr bool kPreparesNext = kStartsAtAdded && !kStagesBias;  // by row and head
    /// Begins to load what is added in the row tile whose row and head are given.
    JALI_DEVICE void prepare(i32 row, i32 h) {
      const Item& item = notes->item[(items() - 1) % 4];
      tile::CellPlace at = Tiles::place(item, Note{}, first_key(), lane);
      at.row += row;
      at.f.h = h;
      added.load(a, at, opaque(lane));
      // PERF: D 128 0.99 of the time with slopes from global memory.
      if constexpr (kOptions.alibi) added.slope = Tiles::slope_of_note(sm, steps());
    }
    /// kAddsKeys: what is added to exponents of this thread's two keys, in shared memory.
    JALI_DEVICE u32 of_keys() const {
      return sm.rest() + kBiasAt + first_key() * 4 + opaque(lane) / 4 * 8;
    }
    /// That of the head that the block is at.
    JALI_DEVICE void load_of_keys() {
      const tile::CellPlace at = place();
      float of_key[2];
      Scores::load_of_keys(of_key, {a.scores, at.f}, at);
      __syncwarp();
      store_pair(of_keys(), of_key[0] * kLog2E, of_key[1] * kLog2E);
      __syncwarp();
    }
    /// The row tile that the block is at.
    JALI_DEVICE void prepare() {
      if constexpr (Scores::kAddsKeys) load_of_keys();
      if constexpr (kStagesBias) {
        copy_bias(steps(), true);
      } else if constexpr (kStartsAtAdded) {
        const Note& note = notes->note[steps() % Tiles::kNoteSlots];
        prepare(note.row, note.h);
      }
      if constexpr (kOptions.dropout) draw();
    }
    /// kStagesBias: that of row tile number n, which is of this key tile, if `condition`.
    JALI_DEVICE void copy_bias(u32 n, bool condition) {
      const Note& note = notes->note[n % Tiles::kNoteSlots];
      const Item& item = notes->item[(items() - 1) % 4];
      bias(sm, warp).copy(a.scores.bias, note.adds, note.row, item.f.num_rows,
                          item.key + first_key(), opaque(lane), condition);
    }
    JALI_DEVICE void look_up(Hiding& hiding) {
      hiding.look_up(mask, notes->item[(items() - 1) % 4], notes->note[steps() % Tiles::kNoteSlots],
                     first_key(), sm, steps(), lane);
    }
    /// kLooksLow: this warpgroup's K where it lies.
    JALI_DEVICE void multiply_k() {
      if constexpr (kLooksLow) {
#pragma unroll
        for (i32 half = 0; half < Tiles::kHalves; ++half) {
          tile::multiply_shared<8192>(sm.k() + half * kKHalf + wg() * 8192, a.low.k_factors);
        }
        fence_async();
        named_sync(1 + wg(), 128);
      }
    }
    /// To the flags of the row tile that comes next, if `condition`: whether its scores are low. All warps see the same.
    JALI_DEVICE void look_at_lse(bool condition) {
      if constexpr (kLooksLow) {
        const u32 stage = steps() % kStages;
        barrier_wait_if(sm.q_full(stage), steps() / kStages & 1, condition);
        bool low = condition;
#pragma unroll
        for (i32 n = 0; n < kRows; n += 64) {
          float lse[2];
          load_pair(sm.neg_lse(stage) + n * 4 + opaque(lane) * 8, lse[0], lse[1]);
          for (const float x : lse) low &= (x >= a.low.least & x <= a.low.most) | x == -infinity();
        }
        if (__all_sync(0xffffffffu, low)) flags |= kLow;
      }
    }
    /// Raw scores less LSE, which are still being multiplied, to weights; with softcap, to what tanh makes of them, if
    /// they are low (kIsLow) by the polynomial, and that, unless kWeighsLate, to weights.
    template <bool kHides, bool kIsLow>
    JALI_DEVICE void weigh(Hiding hiding) {
      // PERF: beside the MMAs; what others look up comes later.
      constexpr bool kLooks = kHides && !kSkips;
      if constexpr (kLooks && !Tiles::kFinds) look_up(hiding);
      float of_key[2];
      if constexpr (Scores::kAddsKeys) load_pair(of_keys(), of_key[0], of_key[1]);
      wgmma_wait<1>();
      tie(s);
      const float factor = kCaps ? a.scores.scale / a.scores.softcap : a.scale_log2;
      auto to_argument = [&](i32 n) {
        if constexpr (kIsLow) {
          const float square = square_to_one(s[n], a.low.above);
          s[n] *= __fmaf_rn(square, a.low.terms[1], a.low.terms[0]);
        } else if constexpr (Scores::kAddsKeys) {
          s[n] = __fmaf_rn(s[n], factor, of_key[n / 2 % 2]);
        } else {
          s[n] *= factor;
        }
      };
      auto exponential = [&](i32 n) {
        if constexpr (!kIsLow) s[n] = kCaps ? tanh_fast(s[n]) : exp2_fast(s[n]);
      };
      if constexpr (kInOrder) {
        tile::in_order<kRows / 2, 2, 0>(to_argument, exponential);
        keep_order();
      } else {
#pragma unroll
        for (i32 n = 0; n < kRows / 2; ++n) {
          to_argument(n);
          exponential(n);
        }
      }
      // PERF: ptxas would wait for dP before all of them.
      if constexpr (kSpares && !kOptions.dropout && (!kHides || kStartsHidden)) {
        float some = 0;
#pragma unroll
        for (i32 n = 3; n < kRows / 2; n += 8) some += s[n];
        pin(some, sm.barrier(0));
      }
      if constexpr (kLooks && Tiles::kFinds) look_up(hiding);
      if constexpr (kHides && !kStartsHidden) hiding.hide_all(s, kCaps ? kHiddenTanh : 0.0f);
      if constexpr (kCaps && !kWeighsLate) weigh_tanh();
    }
    /// Softcap: tanh to rounded weights, and to weights times slopes.
    JALI_DEVICE void weigh_tanh() {
      const u32 neg_lse = sm.neg_lse(steps() % kStages) + (lane & 3) * 8;
#pragma unroll
      for (i32 n = 0; n < kRows / 4; n += 2) {
        float lse[2];
        load_pair(neg_lse + n / 2 * 32, lse[0], lse[1]);
#pragma unroll
        for (i32 m = n; m < n + 2; ++m) {
          p[m] = weigh_tanh(reinterpret_cast<float (&)[2]>(s[2 * m]), lse);
        }
      }
    }
    /// Those of two cells.
    JALI_DEVICE u32 weigh_tanh(float (&t)[2], const float (&lse)[2]) {
      float weight[2];
#pragma unroll
      for (i32 x = 0; x < 2; ++x) {
        weight[x] = exp2_fast(__fmaf_rn(t[x], a.scores.softcap * kLog2E, lse[x]));
        t[x] = weight[x] * __fmaf_rn(-t[x], t[x], 1);
      }
      return T::pack(weight[0], weight[1]);
    }
    /// dP - delta to dS, and both P and dS to operands: k16 step t is words 4 t to 4 t + 3. kCaps: s
    /// has slopes in it, and P is rounded, or kWeighsLate: s has tanh; dropout: dP comes without delta.
    JALI_DEVICE void differentiate() {
      const i32 lane = kRows == 128 ? opaque(this->lane) : this->lane;  // PERF: or it would spill
      const u32 statistics = sm.neg_lse(steps() % kStages) + (lane & 3) * 8;
#pragma unroll
      for (i32 n = 0; n < kRows / 4; ++n) {
        float (&d)[2] = reinterpret_cast<float (&)[2]>(dp[2 * n]);
        float (&w)[2] = reinterpret_cast<float (&)[2]>(s[2 * n]);
        if constexpr (kOptions.dropout) {
          if (n == 16) load_dropped(1);
          float delta[2];
          load_pair(statistics + kStages * Tiles::kStatPlace + n / 2 * 32, delta[0], delta[1]);
#pragma unroll
          for (i32 x = 0; x < 2; ++x) {
            const float kept = dropped.kept(a.scores, n % 16, x);
            d[x] = __fmaf_rn(d[x], kept, delta[x]) * w[x];
            w[x] *= kept;
            if (kCaps && kept == 0.0f) p[n] &= x ? 0xffff : 0xffff0000;
          }
        } else {
          if constexpr (kWeighsLate) {
            float lse[2];
            load_pair(statistics + n / 2 * 32, lse[0], lse[1]);
            p[n] = weigh_tanh(w, lse);
          }
          d[0] *= w[0];
          d[1] *= w[1];
        }
        ds[n] = T::pack(d[0], d[1]);
        if constexpr (!kCaps) p[n] = T::pack(w[0], w[1]);
        if constexpr (kLoadsLate > 0) {
          if ((n + 1) % kLoadsLate == 0) pin(p[n], sm.barrier(0));
        }
      }
    }
    JALI_DEVICE void share_ds(u32 buffer) {
      constexpr bool kFewRegisters = kOrdered || Scores::kAdds;
      const i32 lane = kFewRegisters ? opaque(this->lane) : this->lane;
      const i32 warp = kFewRegisters ? opaque(this->warp) : this->warp;
      const i32 row = warp * 16 + (lane >> 3 & 1) * 8 + (lane & 7);
      const u32 to = ds_buffer(sm, buffer) + row * 128 + ((lane >> 4 ^ (lane & 7)) << 4);
#pragma unroll
      for (i32 t = 0; t < kRows / 16; ++t) {
        store_matrices((to + t / 4 * kKHalf) ^ (t % 4 * 32), ds + 4 * t);
      }
    }
    /// Hands this warp's dQ, the n-th, to the copy engine, or to the warp that does so in turns, if one is due. section:
    /// of the key tile, if it is the last one of that.
    JALI_DEVICE void send_dq(u32 buffer, bool due, u32 n, i32 section) {
      if constexpr (kDqAtDs) {
        named_sync(1 + wg(), 128);  // all of the warpgroup's dQ is multiplied
      } else {
        barrier_arrive_if(ds_empty(sm, buffer), due & lane == 0);
      }
      Turns::await_place(sm, n);
      Turns::template stage_dq<kDqCols>(dq_buffer(sm, warp, buffer), dq(), lane);
      if constexpr (kOrdered) {
        Turns::hand_over_dq(sm, section, due);
      } else {
        add_dq(a, sm, last_number, warp, buffer, wg() == 1, due & lane == 0);
      }
    }

    // Of the named barriers from 3 on each says that a warpgroup may begin a phase: S and dP, or dV and dQ.
    enum Phase : i32 { kScores, kGradients };
    static constexpr i32 may_begin(i32 phase, i32 warpgroup) { return 3 + 2 * phase + warpgroup; }
    template <Phase kPhase>
    JALI_DEVICE void await_cores() {
      if constexpr (kAlternates) named_sync(may_begin(kPhase, wg()), 256);
    }
    template <Phase kPhase>
    JALI_DEVICE void leave_cores() {
      if constexpr (kAlternates) {
        named_arrive(wg() == 0 ? may_begin(kPhase, 1) : may_begin(1 - kPhase, 0), 256);
      }
    }
    /// One row tile. kSees: what the warpgroup's keys see of it: all; some, with kSkips what `hiding` says;
    /// or nothing, then dS is zero, and dQ of the last step all there is to multiply. PERF: a template, since a
    /// branch while WGMMAs are in flight is dear. The first of a key tile multiplies a dQ as well, but
    /// sends none.
    template <Sees kSees, bool kIsLow = false>
    JALI_DEVICE void step(const Hiding& hiding = {}) {
      constexpr bool kHides = kSees == Sees::kSome, kNothing = kSees == Sees::kNothing;
      const bool due = !(flags & Tiles::kFirst);
      const u32 stage = steps() % kStages, parity = steps() / kStages & 1;
      const u32 buffer = steps() % 2, buffer_parity = steps() / 2 & 1;
      const u32 last_buffer = (steps() + 1) % 2, last_parity = (steps() - 1) / 2 & 1;
      const i32 this_number = number;
      const bool more = flags & Tiles::kMore;
      u32 early[2] = {0, 0};  // flags and number of the next row tile
      barrier_wait(sm.q_full(stage), parity);
      if constexpr (!kAlternates) barrier_wait(sm.o_full(stage), parity);
      if constexpr (!kNothing) {
        Tiles::template start<kMatrices && !kStartsAtAdded, !kMatrices && !kCaps>(
            s, sm.neg_lse(stage), lane);
        if constexpr (kStagesBias) {
          bias(sm, warp).add_to(s, a, opaque(lane));
        } else if constexpr (kStartsAtAdded) {
          if constexpr (kMatrices && Scores::Added::kSlopes) {
            added.start(s, a);
          } else {
            added.add_to(s, a);
          }
        }
        if constexpr (kHides && kStartsHidden) hiding.hide_all(s, -infinity());
        Tiles::template start<kMatrices, !kOptions.dropout>(dp, sm.neg_delta(stage), lane);
      }
      await_cores<kScores>();
      if constexpr (!kNothing) {
        tie(s);
        tie(dp);
        wgmma_fence();
        Tiles::template multiply_statistic<kStartsAtAdded>(s, sm, sm.neg_lse(stage));
        multiply_keys<kD>(s, k, sm.k(), sm.q(stage));
        wgmma_commit();
        Tiles::template multiply_statistic<false>(dp, sm, sm.neg_delta(stage));
        multiply_keys<kDv>(dp, v, sm.v(), sm.o(stage));
        wgmma_commit();
      }
      leave_cores<kScores>();
      if constexpr (kDqAtDs) {  // the copy engine has read what it lies in
        bulk_wait_read();
        barrier_arrive_if(ds_empty(sm, buffer), lane == 0);
      }
      // PERF: shared memory answers late while the tensor cores read it. Where a key tile ends, nobody
      // may wait for the next one here.
      if constexpr (kReadsEarly) {
        barrier_wait_if(sm.note_full(steps() + 1), (steps() + 1) / Tiles::kNoteSlots & 1, more);
        load_array(sm.note(steps() + more), early);
      }
      if constexpr (kStagesBias) {  // PERF: there is nearly a step for it
        barrier_wait_if(sm.note_full(steps() + 1), (steps() + 1) / Tiles::kNoteSlots & 1, more);
        copy_bias(steps() + more, more);
      }
      if constexpr (!kNothing) weigh<kHides, kIsLow>(hiding);
      if constexpr (!kNothing) {
        if constexpr (kOptions.dropout) load_dropped(0);  // PERF: beside dP; D 64 0.985 of the time
        wgmma_wait<0>();
        tie(dp);
      }
      // PERF: not earlier, which would keep the warpgroups in step (-7 % at D 64); not later, since
      // ptxas would round P and dS behind it.
      barrier_wait(ds_empty(sm, buffer), kDqAtDs ? buffer_parity : buffer_parity ^ 1);
      if constexpr (kReadsEarly) {
        for (u32& word : early) word = broadcast(word);
      }
      if constexpr (kNothing) {
        for (u32& pair : ds) pair = 0;
      } else {
        differentiate();
      }
      // PERF: or causal D 128 would spill.
      if constexpr (kOrdered && Tiles::kMasked && kSees == Sees::kAll) pin(dp[0], sm.base);
      // PERF: an address made anew, here or where dQ is multiplied, changes how ptxas orders the step: softcap at D 64 0.975
      // of the time, at D 128 0.995, dropout 0.99. Under some masks softcap would spill.
      share_ds(kCaps && !Tiles::kMasked ? opaque(static_cast<i32>(buffer)) : buffer);
      if constexpr (!kNothing) {
        if constexpr (kWanted.keys && !kMultipliesOnes) {
          const i32 h_kv = notes->item[(items() - 1) % 4].h_kv;
          Scores::add_keys(Scores::sum_keys(dp, opaque(lane)), a, place(), h_kv, opaque(lane));
        }
      }
      await_cores<kGradients>();
      if constexpr (!kNothing) {
        tie(p);
        tie(ds);
        tie(dk);
        tie(dv);
        wgmma_fence();
        Tiles::template multiply_rows<kDv>(dv, p, sm.o(stage));
        wgmma_commit();
      }
      fence_async();
      __syncwarp();
      barrier_arrive_if(ds_full(sm, buffer), lane == 0);
      // PERF: beside the MMA.
      if constexpr (kWanted.per_cell()) Scores::emit(dp, a, place(), opaque(lane));
      barrier_wait(ds_full(sm, last_buffer), last_parity);
      tie(dq());
      wgmma_fence();
      multiply_dq(kOptions.dropout && !kCaps ? opaque(static_cast<i32>(last_buffer)) : last_buffer);
      wgmma_commit();
      leave_cores<kGradients>();
      if constexpr (!kNothing) {
        tie(ds);
        tie(dk);
        if constexpr (kMultipliesOnes) tie(key_sums);
        wgmma_fence();
        Tiles::template multiply_rows<kD>(dk, ds, sm.q(stage));
        // PERF: of dS in half precision, as dK takes it; 64 additions a step took 7 % of the pass.
        if constexpr (kMultipliesOnes) Tiles::multiply_ones(key_sums, ds, sm);
        wgmma_commit();
      }
      counts += 4;
      wgmma_wait<kNothing ? 0 : 1>();
      tie(dq());
      send_dq(last_buffer, due, steps() - (due ? 2 : 1), Turns::kNone);
      if constexpr (!kReadsEarly && kOrdered && !kPreparesNext) {
        flags = Tiles::next_flags(sm, steps());  // PERF: four words in a row would spill
      } else if constexpr (!kReadsEarly) {
        i32 row, h;
        Tiles::next_note(sm, steps(), flags, number, row, h);
        if constexpr (kPreparesNext) {
          if (flags & Tiles::kEnd) row = h = 0;
          prepare(row, h);
        }
      }
      look_at_lse(!(flags & (Tiles::kFirst | Tiles::kEnd)));
      wgmma_wait<0>();
      tie(p);
      tie(ds);
      tie(dk);
      tie(dv);
      if constexpr (kMultipliesOnes) {
        tie(key_sums);
        // The next row tile may be of another head, or of another key tile.
        if (a.seq.group > 1 || flags & (Tiles::kFirst | Tiles::kEnd)) add_key_sums();
      }
      barrier_arrive_if(sm.rows_empty(stage), lane == 0);
      last_number = this_number;
      if constexpr (kStagesBias) {
        if (!more && !(flags & (Tiles::kFirst | Tiles::kEnd))) prepare();
      }
      if constexpr (kReadsEarly) {
        flags = early[0];
        number = early[1];
        i32 row, h;
        if (!more) Tiles::next_note(sm, steps(), flags, number, row, h);
      }
      if constexpr (kOptions.dropout) {
        if ((flags & (Tiles::kDraws | Tiles::kFirst | Tiles::kEnd)) == Tiles::kDraws) draw();
      }
      if constexpr (Scores::kAddsKeys) {
        if (a.seq.group > 1 && !(flags & (Tiles::kFirst | Tiles::kEnd))) load_of_keys();
      }
    }
    JALI_DEVICE void step_partial() {
      if constexpr (kSkips) {
        Hiding hiding;
        look_up(hiding);
        if (broadcast(named_any(1 + wg(), 128, hiding.shows()))) {
          step<Sees::kSome>(hiding);
        } else {
          step<Sees::kNothing>();
        }
      } else {
        step<Sees::kSome>();
      }
    }
    /// A key tile: all its row tiles.
    JALI_DEVICE void run_item() {
      {
        const Item& item = notes->item[items() % 4];
        Tiles::find_runs(mask, item, item.f.h, first_key(), sm);
      }
      barrier_wait(sm.k_full(), items() & 1);
      barrier_wait(sm.v_full(), items() & 1);
      counts = (counts & ~3u) | ((counts + 1) & 3);
      prepare();
#pragma unroll
      for (i32 n = 0; n < kD / 2; ++n) dk[n] = 0;
#pragma unroll
      for (i32 n = 0; n < kDv / 2; ++n) dv[n] = 0;
      multiply_k();
      if constexpr (kHoldsKeys) {
        const u32 row = (first_key() + (lane & 15)) * 128;
        load_left<kKHalf>(k, sm.k() + row, lane, lane);
        load_left<kKHalf>(v, sm.v() + row, lane, lane);
      }
      look_at_lse(true);
      do {
        if (flags & Tiles::kPartial) {
          step_partial();
        } else if (kLooksLow && flags & kLow) {
          do step<Sees::kAll, kLooksLow>();
          while ((flags & (Tiles::kFirst | Tiles::kPartial | Tiles::kEnd | kLow)) == kLow);
        } else {
          do step<Sees::kAll>();
          while (!(flags & (Tiles::kFirst | Tiles::kPartial | Tiles::kEnd | kLow)));
        }
      } while (!(flags & (Tiles::kFirst | Tiles::kEnd)));
      barrier_arrive_if(sm.v_empty(), lane == 0);
      const u32 buffer = (steps() - 1) % 2;
      if (!kOrdered && notes->item[(items() - 1) % 4].before) {
        bulk_wait();
        Turns::end_item(a, sm, notes->item[(items() - 2) % 4], items() - 2);
      }
      barrier_wait(ds_full(sm, buffer), (steps() - 1) / 2 & 1);
      tie(dq());
      wgmma_fence();
      multiply_dq(buffer);
      wgmma_commit();
      // The loader is at most two items ahead: it leaves this one's slot alone. PERF: beside the MMA.
      const Item& item = notes->item[(items() - 1) % 4];
      const u32 staged = dq_buffer(sm, warp, buffer ^ 1);
      Turns::await_place(sm, steps() - 1);
      Tiles::template store<true>(dv, kOptions.dropout ? a.scores.keep_scale : 1.0f, a.dv,
                                  a.dv_strides, a.Dv, item, first_key(), lane, staged);
      wgmma_wait<0>();
      tie(dq());
      barrier_arrive_if(sm.k_empty(), lane == 0);
      Tiles::template store<true>(dk, a.scale, a.dk, a.dk_strides, a.D, item, first_key(), lane,
                                  staged);
      send_dq(buffer, true, steps() - 1, item.section);
    }
  };

  JALI_DEVICE static void run(const TensorMap& map_q, const TensorMap& map_k,
                              const TensorMap& map_v, const TensorMap& map_o, const BackwardArgs& a,
                              const M& mask) {
    if constexpr (kInOrder) declare_order();
    Tiles::template run<kTile.loader_registers, kConsumerRegisters>(
        map_q, map_k, map_v, map_o, a, mask,
        [](const Shared& sm) {
          for (i32 n = 0; n < 4; ++n) barrier_init(sm.own(n), Tiles::kConsumerWarps);
        },
        [&](const Shared& sm, const Notes* notes, i32) {
          const i32 lane = threadIdx.x & 31, warp = broadcast(threadIdx.x >> 5) - 4;
          Consumer c{a, mask, sm, notes, warp, lane};
          if (c.wg() == 1) c.template leave_cores<Consumer::kGradients>();
          i32 row, h;
          Tiles::next_note(sm, 0, c.flags, c.number, row, h);
          while (!(c.flags & Tiles::kEnd)) c.run_item();
          if (!kOrdered && c.steps() > 0) {
            bulk_wait();
            Turns::end_item(a, sm, notes->item[(c.items() - 1) % 4], c.items() - 1);
          }
          Turns::end(sm, c.items(), c.steps());
        },
        [&](const Shared& sm, i32 number, i32 lane) {
          add_dq(a, sm, number, lane, 0, lane >= 4, lane < Tiles::kConsumerWarps);
        });
  }
};

}  // namespace jali::cuda
#endif
