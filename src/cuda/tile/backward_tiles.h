// What the backward kernels share: the layout of a key tile's shared memory, the loader, and the steps
// of a consumer warpgroup that do not depend on who owns what.
//
// Here, all of BackwardTiles, in this order: Note, Item, Head, Notes, Shared; Loader, item_of,
// classify_and_visit, take_for_pair, produce (warp 0); find_cells (finders); steps of the consumers, Hiding among
// them; run.
#pragma once

#include "cuda/kernel/backward.h"
#include "cuda/ptx/bulk.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/matrix.h"
#include "cuda/ptx/order.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tile/backward_rows.h"
#include "cuda/tile/backward_scores.h"
#include "cuda/tile/backward_turns.h"
#include "cuda/tile/cell_finder.h"
#include "cuda/tile/no_mask.h"
#include "cuda/tile/store.h"
#include "cuda/tile/visible_bits.h"
#include "mask/combine.h"

namespace jali::tile {

using namespace ptx;
using cuda::BackwardArgs;
using cuda::Sequences;

/// Whether a leaf lacks kEven.
template <class L>
struct IsUneven {
  static constexpr bool value = !requires { L::kEven; };
};

/// T: BF16 or FP16. kRows, kKeys: of a tile. kRestBytes: of the variant's own memory, after K, V and
/// two stages of Q and dO (1024-aligned). kRowStages: of BackwardTile. M: the mask. kOrdered: the sums
/// of dq are made in the order of the key tiles, so that they are the same every time. kOptions: of
/// the scores. kWanted: gradients of biases. kFillsOnce: q_full is o_full, too. kForcesMap: no tile is
/// classified as it comes. kPair: the two blocks of a cluster share key tiles of 2 kKeys, and each owns half of the
/// keys, its item's from `key` on. All matrices lie as [dim / 64][rows][64] under the 128-byte swizzle.
template <class T, i32 kD, i32 kDv, i32 kRows, i32 kKeys, i32 kRestBytes, i32 kRowStages, class M,
          bool kOrdered, cuda::ScoreOptions kOptions, cuda::BiasGradients kWanted, bool kMatrices,
          bool kFillsOnce, bool kForcesMap, bool kPair = false>
struct BackwardTiles {
  static constexpr i32 kStages = 2;
  static constexpr i32 kOStages = kPair ? 1 : kStages;
  static constexpr i32 kTileKeys = kPair ? 2 * kKeys : kKeys;
  static constexpr i32 kNoteSlots = 4;
  static constexpr i32 kConsumerWarps = cuda::kBackwardConsumerWarps;
  static constexpr i32 kHalves = ceil_div(kD, 64), kHalvesV = ceil_div(kDv, 64);  // 64 columns each
  static constexpr i32 kQHalf = kRows * 128, kKHalf = kKeys * 128;                // bytes
  static constexpr i32 kQBytes = kHalves * kQHalf, kOBytes = kHalvesV * kQHalf;
  static constexpr i32 kKBytes = kHalves * kKHalf, kVBytes = kHalvesV * kKHalf;
  // Of a statistic: what is copied, and what it takes in shared memory.
  static constexpr i32 kStatBytes = kMatrices ? kRows / 64 * cuda::kStatisticBytes : kRows * 4;
  static constexpr i32 kStatPlace =
      kMatrices ? kRows / 64 * cuda::kStatisticMatrixBytes : kRows * 4;
  static constexpr i32 kK = 0, kV = kK + kKBytes, kQ = kV + kVBytes, kO = kQ + kStages * kQBytes;
  static constexpr i32 kRest = kO + kOStages * kOBytes;
  static constexpr i32 kStats = kRest + kRestBytes;
  // A bias over rows and keys goes by way of the variant's own memory.
  static constexpr bool kStagesBias = kKeys == 128 && kOptions.bias_eights;
  // What a loader notes of heads: where that begins, or slopes.
  static constexpr bool kNotesHead = kStagesBias || (kKeys == 128 && kOptions.alibi);
  // Under a mask there are cells to look up, and maps, unless the loader classifies row tiles itself. PERF:
  // a kernel less to launch, before all others.
  static constexpr bool kMasked = !cuda::is_no_mask<M>;
  static constexpr bool kClassifies = kMasked && !kOrdered && !kForcesMap && !any_leaf<IsUneven, M>;
  static constexpr bool kMapped = kMasked && !kClassifies;
  // Deterministic under a mask: key tiles go from a head's last one to its first, each from its first row tile on, so
  // that under a causal mask each comes to a row tile when its turn is there. But the long ones would then be left to
  // the end: of BackwardArgs::last heads key tiles go the other way round, from the last row tile on, which all of them
  // see.
  static constexpr bool kDown = kOrdered && kMapped;
  // The other warps of the loader's warpgroup: kRowWarps that care for row tiles; one that tells other
  // blocks what consumers have added (Turns), unless consumers or the fourth warpgroup do so; then kFinders
  // that look up cells, where consumers cannot tell them by key.
  // Where one run of rows sees a key (causal masks, windows, paddings), a warp finds the runs of its keys once a head,
  // not for each partial tile; so that they may come from tables.
  static constexpr bool kRuns = kMasked && seen_in_one_run<M>;
  static constexpr bool kFinds =
      kMasked && !kRuns && (M::kColsReadTables || M::kRowsReadTables || !IsLightByKey<M>);
  // Sums over rows for the gradient of a bias of keys come from the tensor cores, in tiles of 128 keys. PERF: but
  // beside a mask turns leave no register for them, nor beside finders row tiles of 128.
  static constexpr bool kMultipliesOnes =
      kWanted.keys && kKeys == 128 && !(kOrdered && kMasked) && !(kFinds && kRows == 128);
  static_assert(!kPair || !kMultipliesOnes);
  // PERF: tiles of 64 keys are looked up by one: 12 causal documents of 8K, D256 770, with two 720 us.
  static constexpr i32 kFinders = kFinds ? kKeys / 64 : 0;
  // Whether a warp hands dQ to the copy engine when its turn comes, so that consumers wait for none. PERF: they did, in
  // 1.02 of the time (16 heads of 8K), causal 1.03, 1K 1.06 and 1.08.
  static constexpr bool kSends = kOrdered && !kPair && kTileKeys == 128;
  static constexpr bool kPlain = !kOptions.adjusts() && !kOptions.dropout;
  // Whether that warp, and the one that tells, are of a fourth warpgroup, for which consumers have fewer registers; a
  // second warp cares for row tiles then. PERF: beside finders, where consumers sent and told, 0.84 of the time (short
  // documents by ids), D 64 0.97 (16K), D 128 1K causal 0.87, 12 causal documents of 8K 0.94, 16K 1.02, no mask 1.02 to
  // 1.04. Other masks, and options, would spill.
  static constexpr bool kTurnGroup = kSends && (kFinds || kRows == 128 || (kRuns && kPlain));
  // PERF: not turns of blocks alone with tiles of 64 keys: D256 causal 16K 7.97 ms, else 7.09; of pairs 5.65, else 6.82.
  static constexpr bool kTells = kSends || (!kFinds && !(kOrdered && kTileKeys == 64));
  static constexpr i32 kTurnWarps = kTurnGroup ? 0 : kTells + kSends;  // of the loader's warpgroup
  // PERF: beside a bias, or what dropout drops, in shared memory, which takes half of the stages, one: ptxas spills with
  // one stage each.
  static constexpr i32 kRowWarps = kStagesBias || (kOptions.dropout && kRows == 128)
                                       ? 1
                                       : 3 - max_of(kFinders + kTurnWarps, i32{kTurnGroup});
  static constexpr i32 kStagesEach = kRowStages / kRowWarps;
  // Beside the loader.
  static constexpr i32 kCountingWarps = kRowWarps + kTells + kSends + kConsumerWarps;
  static constexpr i32 kCellBytes = kRows * kKeys / 8;  // of a tile
  static constexpr i32 kCellSlots = cuda::kBackwardCellSlots<kKeys>;
  static_assert(kCellSlots == kStages || kCellSlots == kNoteSlots);
  static constexpr i32 kStatsBytes = 2 * kStages * kStatPlace, kOnes = kStats + kStatsBytes;
  static constexpr i32 kCells = kOnes + (kMatrices ? cuda::kStatisticMatrixBytes : 0);
  static_assert(!kMatrices || kStats % 1024 == 0);
  static constexpr i32 kRowBuffers = kCells + kCellSlots * kCellBytes;
  static constexpr i32 kBarriers = kRowBuffers + kRowStages * cuda::kBackwardRowBytes;
  static constexpr i32 kNotes = kBarriers + cuda::kBackwardBarrierBytes;
  static constexpr i32 kSharedBytes = kBarriers + cuda::kBackwardNotesBytes;
  template <i32 kStages, i32 kLoads>
  using RowWork = BackwardRows<T, kRows, kHalves * 64, kHalvesV * 64, kMatrices, kOptions.sinks,
                               kWanted.rows, kStages, kLoads, (kPair ? 2 : 1) * kConsumerWarps>;
  using Turns = BackwardTurns<BackwardTiles, kOrdered, kPair>;
  using Rows = RowWork<kStagesEach, 4>;  // of the loader's warpgroup
  using ConsumerRows = RowWork<0, 8>;    // these have registers before and after their own work
  // PERF: as many as the registers hold beside dv.
  static constexpr i32 kTogether = kOptions.bias != cuda::BiasType::kNone && kDv > 128 ? 1 : 4;
  using Scores = BackwardScores<T, kRows, kOptions, kWanted, kTogether>;

  // What the loader says of a row tile:
  static constexpr i32 kFirst = 1, kPartial = 2;  // the first of a key tile; some cells are hidden
  static constexpr i32 kEnd = 4;                  // there is none
  static constexpr i32 kMore = 8;                 // another one of the key tile surely follows
  static constexpr i32 kDraws = 32;  // dropout: Philox was not called for its rows and head yet
  struct alignas(32) Note {
    i32 flags, number;  // of the row tile among all (dq_sum)
    i32 row, h;         // its first row, its query head
    i32 turn;           // kOrdered: key tiles that add to its dq before this one
    u32 shift;          // dropout_shift_of_row() of its first row
    u64 adds;           // Scores::of_head()
  };
  struct alignas(8) Item {  // a key tile
    Frame f;
    i32 key, h_kv;
    i32 section;   // of the work
    i32 row_tile;  // the first one of its rows, of its first query head, among all
    bool before;   // whether the block had another one before
    bool down;     // whether its head's key tiles come from the last one on
  };
  struct Head {             // the query head that the loader is at
    i32 h, base, key_tile;  // base: number of its first row tile
    bool down;              // of the key tile
    const u64* row_words;   // kOrdered: its lines of the map
    u64 adds;               // Scores::of_head()
  };
  /// Written by the loader; items: 4, so that the one in use is never the one written.
  struct Notes {
    Note note[kNoteSlots];
    Item item[4];
    Head head;
    volatile i32 wanted;  // the last section whose row tiles are to be prepared
    i32 first_units[1 + cuda::kMostLongLines];  // of the order of work
  };
  static_assert(kNotes + sizeof(Notes) + 32 <= kSharedBytes - cuda::kBackwardOnesBytes);
  static_assert(8 * 32 <= cuda::kBackwardBarrierBytes);

  struct Shared {
    u32 base;
    JALI_DEVICE u32 k() const { return base + kK; }
    JALI_DEVICE u32 v() const { return base + kV; }
    JALI_DEVICE u32 q(u32 stage) const { return base + kQ + stage * kQBytes; }
    JALI_DEVICE u32 o(u32 stage) const { return base + kO + (kPair ? 0 : stage) * kOBytes; }
    JALI_DEVICE u32 rest() const { return base + kRest; }
    JALI_DEVICE u32 neg_lse(u32 stage) const { return base + kStats + stage * kStatPlace; }
    JALI_DEVICE u32 neg_delta(u32 stage) const { return neg_lse(stage) + kStages * kStatPlace; }
    JALI_DEVICE u32 note(u32 n) const { return base + kNotes + n % kNoteSlots * sizeof(Note); }
    // For the loader alone: the item after this one in the order of work, and a section of which it
    // knows that the row tiles are prepared. PERF: an address in a register of its own would spill.
    JALI_DEVICE u32 next() const { return base + kNotes + sizeof(Notes); }
    JALI_DEVICE u32 ready_section() const { return next() + 4; }
    // For Turns::tell_others: section, turn; for Turns::send_sums: section.
    JALI_DEVICE u32 added() const { return next() + 8; }
    JALI_DEVICE u32 staged() const { return next() + 16; }
    JALI_DEVICE u32 ones() const { return base + kOnes; }
    JALI_DEVICE u32 ones_by_eight() const { return base + kSharedBytes - cuda::kBackwardOnesBytes; }
    // Barriers, notes and cells are found by a stage, or by the number of the row tile (n).
    JALI_DEVICE u32 barrier(i32 n) const { return base + kBarriers + 8 * n; }
    JALI_DEVICE u32 k_full() const { return barrier(0); }
    JALI_DEVICE u32 v_full() const { return barrier(1); }
    JALI_DEVICE u32 k_empty() const { return barrier(2); }
    JALI_DEVICE u32 v_empty() const { return barrier(3); }
    JALI_DEVICE u32 q_full(u32 stage) const { return barrier(4 + stage); }
    JALI_DEVICE u32 o_full(u32 stage) const {
      return kFillsOnce ? q_full(stage) : barrier(6 + (kPair ? 0 : stage));
    }
    JALI_DEVICE u32 o_empty() const { return barrier(7); }  // kPair
    // kPair: of the other block's K the two halves with the columns of dQ that this block adds; 1024-aligned.
    JALI_DEVICE u32 peer_k() const { return base + kStats - 2 * kKHalf; }
    JALI_DEVICE u32 rows_empty(u32 stage) const { return barrier(8 + stage); }
    JALI_DEVICE u32 note_full(u32 n) const { return barrier(10 + n % kNoteSlots); }
    JALI_DEVICE u32 own(i32 n) const { return barrier(14 + n); }  // of the variant, n < 4
    JALI_DEVICE u32 cells_full(u32 n) const { return barrier(18 + n % kNoteSlots); }
    JALI_DEVICE u32 note_empty(u32 n) const { return barrier(22 + n % kNoteSlots); }
    JALI_DEVICE u32 added_full() const { return barrier(26); }
    JALI_DEVICE u32 added_empty() const { return barrier(27); }
    // kSends: a dQ is there; the copy engine has read it.
    JALI_DEVICE u32 staged_full() const { return barrier(28); }
    JALI_DEVICE u32 staged_empty() const { return barrier(29); }
    // kPair: of the variant, n < 4.
    JALI_DEVICE u32 of_pair(i32 n) const { return barrier(28 + n); }
    // kPair, in the place of ones: the first block tells the other one which key tile comes next; the number, and
    // that it was read.
    JALI_DEVICE u32 told_full() const { return ones_by_eight(); }
    JALI_DEVICE u32 told_empty() const { return told_full() + 8; }
    JALI_DEVICE u32 told() const { return told_full() + 16; }
    JALI_DEVICE u32 times_told() const { return told_full() + 20; }  // for the loader alone
    /// Bits of a partial tile's cells, [key][kRows / 32].
    JALI_DEVICE u32 cells(u32 n) const { return base + kCells + n % kCellSlots * kCellBytes; }
    /// kRuns, in the place of cells: first and last row that see a key, and of 16 keys the head that these are of.
    JALI_DEVICE u32 run(i32 key) const { return base + kCells + key * 8; }
    JALI_DEVICE u32 head_of_runs(i32 key) const { return run(kKeys) + key / 16 * 4; }
  };
  JALI_DEVICE static void init_barriers(const Shared& sm) {
    barrier_init(sm.k_full(), 1);
    barrier_init(sm.v_full(), 1);
    barrier_init(sm.k_empty(), kConsumerWarps);
    barrier_init(sm.v_empty(), kConsumerWarps);
    for (i32 n = 0; n < kNoteSlots; ++n) {
      barrier_init(sm.note_full(n), 1);
      if (kFinds || kSends) barrier_init(sm.note_empty(n), kFinders + kSends);
      if (kFinds) barrier_init(sm.cells_full(n), kFinders);
    }
    for (i32 n = 0; n < kStages; ++n) {
      barrier_init(sm.q_full(n), kFillsOnce ? 2 : 1);
      if (!kFillsOnce && n < kOStages) barrier_init(sm.o_full(n), 1);
      barrier_init(sm.rows_empty(n), kConsumerWarps);
    }
    if constexpr (kPair) {
      barrier_init(sm.o_empty(), kConsumerWarps);
      barrier_init(sm.told_full(), 1);
      barrier_init(sm.told_empty(), 1);
    }
    barrier_init(sm.added_full(), kSends ? 1 : kConsumerWarps);
    barrier_init(sm.added_empty(), 1);
    if constexpr (kSends) {
      barrier_init(sm.staged_full(), kConsumerWarps);
      barrier_init(sm.staged_empty(), 1);
    }
  }
  /// The first of this block's own keys in a key tile.
  JALI_DEVICE static i32 own_first() {
    if constexpr (!kPair) return 0;
    return static_cast<i32>(cluster_rank()) * kKeys;
  }

  /// Field by field.
  JALI_DEVICE static Item copy(const volatile Item& at) {
    Item item;
    item.f.b = at.f.b;
    item.f.h = at.f.h;
    item.f.num_rows = at.f.num_rows;
    item.f.num_keys = at.f.num_keys;
    item.f.q_offset = at.f.q_offset;
    item.f.q_start = at.f.q_start;
    item.f.k_start = at.f.k_start;
    item.key = at.key;
    item.h_kv = at.h_kv;
    item.section = at.section;
    item.row_tile = at.row_tile;
    item.before = at.before;
    item.down = at.down;
    return item;
  }

  // ---- loader ---------------------------------------------------------------------------------
  struct Loader {
    const BackwardArgs& a;
    const Shared& sm;
    Notes* notes;
    const TensorMap &map_q, &map_k, &map_v, &map_o;
    u32 steps = 0, items = 0;  // sent off

    template <i32 kBoxes, i32 kBox>
    JALI_DEVICE void load(u32 shared, const TensorMap& map, u32 barrier, const cuda::BoxPlace& at,
                          i32 h) {
#pragma unroll
      for (i32 n = 0; n < kBoxes; ++n) {
        load_box(shared + n * kBox, map, barrier, 64 * n, at.token, h, at.b, box_end(a.seq));
      }
    }
    /// kPair: of four halves the first two, or the last two; of three they share the second one.
    JALI_DEVICE void load_peer_k(const volatile Item& item) {
      const i32 rank = cluster_rank(), key = item.key + (rank == 0 ? kKeys : -kKeys);
      const cuda::BoxPlace at = box_place(a.seq, item.f.b, item.f.k_start, item.f.num_keys, key);
#pragma unroll
      for (i32 n = 0; n < 2; ++n) {
        load_box(sm.peer_k() + n * kKHalf, map_k, sm.k_full(), 64 * (rank * (kHalves - 2) + n),
                 at.token, item.h_kv, at.b, box_end(a.seq));
      }
    }
    /// Of row tile `number`.
    JALI_DEVICE static void load_statistic(u32 shared, const float* from, i32 number, u32 barrier) {
      constexpr i32 kPieces = kMatrices ? kRows / 64 : 1, kBytes = kStatBytes / kPieces;
#pragma unroll
      for (i32 n = 0; n < kPieces; ++n) {
        load_bulk(shared + n * (kStatPlace / kPieces),
                  from + (i64(number) * kPieces + n) * (kBytes / 4), kBytes, barrier);
      }
    }
    /// The item that the next row tile with kFirst opens, for the whole warp. PERF: it is kept in
    /// shared memory, since the loader has few registers. Its place is not in use: consumers are at
    /// most three items behind; finders, which may be four notes behind, look at an item for partial
    /// tiles alone, which consumers do not finish without them.
    JALI_DEVICE void prepare(const Item& item) {
      if ((threadIdx.x & 31) == 0) {
        notes->item[items % 4] = item;
        notes->item[items % 4].before = items > 0;
      }
      __syncwarp();
    }
    /// It again, to be read field by field; opened: whether a row tile of it was sent.
    JALI_DEVICE const volatile Item& prepared(bool opened) const {
      return notes->item[(items - (opened ? 1 : 0)) % 4];
    }
    JALI_DEVICE void prepare(const Head& head) {
      __syncwarp();  // the last one is read no more
      if ((threadIdx.x & 31) == 0) notes->head = head;
      __syncwarp();
    }
    /// Until the next note's slot was read by those who do not arrive at rows_empty.
    JALI_DEVICE void await_slot() {
      if (kFinds || kSends) barrier_wait(sm.note_empty(steps), steps / kNoteSlots & 1 ^ 1);
    }
    /// Sends off a row tile of the prepared item, and the keys if it opens that; for the whole warp.
    JALI_DEVICE void send(const Note& note, bool opens) {
      if (elect()) send_alone(prepared(!opens), note, opens);
      ++steps;
      items += opens;
    }
    /// What one thread does of that. The note first, since the consumers free the keys of the item
    /// before only when they have seen it.
    JALI_DEVICE void send_alone(const volatile Item& item, const Note& note, bool opens) {
      const u32 stage = steps % kStages, parity = steps / kStages & 1;
      // PERF: before there is room for what it tells of.
      await_slot();
      notes->note[steps % kNoteSlots] = note;
      barrier_arrive(sm.note_full(steps));
      barrier_wait(sm.rows_empty(stage), parity ^ 1);
      const cuda::BoxPlace rows =
          box_place(a.seq, item.f.b, item.f.q_start, item.f.num_rows, note.row);
      barrier_expect(sm.q_full(stage), kQBytes + kStatBytes);
      load<kHalves, kQHalf>(sm.q(stage), map_q, sm.q_full(stage), rows, note.h);
      load_statistic(sm.neg_lse(stage), a.neg_lse, note.number, sm.q_full(stage));
      if (opens) {
        const cuda::BoxPlace keys =
            box_place(a.seq, item.f.b, item.f.k_start, item.f.num_keys, item.key);
        barrier_wait(sm.v_empty(), items & 1 ^ 1);  // before K: dQ of the last row tile needs that
        barrier_expect(sm.v_full(), kVBytes);
        load<kHalvesV, kKHalf>(sm.v(), map_v, sm.v_full(), keys, item.h_kv);
        barrier_wait(sm.k_empty(), items & 1 ^ 1);
        barrier_expect(sm.k_full(), kKBytes + (kPair ? 2 * kKHalf : 0));
        load<kHalves, kKHalf>(sm.k(), map_k, sm.k_full(), keys, item.h_kv);
        if constexpr (kPair) load_peer_k(item);
      }
      if constexpr (kPair) barrier_wait(sm.o_empty(), steps & 1 ^ 1);
      barrier_expect(sm.o_full(stage), kOBytes + kStatBytes);
      load<kHalvesV, kQHalf>(sm.o(stage), map_o, sm.o_full(stage), rows, note.h);
      load_statistic(sm.neg_delta(stage), a.neg_delta, note.number, sm.o_full(stage));
    }
    JALI_DEVICE void finish() {
      await_slot();
      notes->note[steps % kNoteSlots].flags = kEnd;
      barrier_arrive(sm.note_full(steps));
    }
  };

  /// Keys that nobody sees: all, unless `any` row tile is active, and tokens behind the last piece.
  JALI_DEVICE static void write_zeros(const BackwardArgs& a, const Item& item, bool any, i32 lane) {
    const Frame& f = item.f;
    const i32 last = end_with_tail(a.seq, f.b, f.k_start + f.num_keys, false);
    const i32 end = min_of(item.key + kKeys, last - f.k_start);
#pragma unroll 1
    for (i32 key = any ? max_of(item.key, f.num_keys) : item.key; key < end; ++key) {
      const i64 token = i64(f.k_start) + key;
      u16* dk = static_cast<u16*>(a.dk) + cuda::offset(a.dk_strides, item.f.b, item.h_kv, token);
      u16* dv = static_cast<u16*>(a.dv) + cuda::offset(a.dv_strides, item.f.b, item.h_kv, token);
      for (i32 d = lane; d < a.D; d += 32) dk[d] = 0;
      for (i32 d = lane; d < a.Dv; d += 32) dv[d] = 0;
    }
  }

  /// A key tile in the order of work, for a whole warp.
  JALI_DEVICE static Item item_of(const BackwardArgs& a, const cuda::WorkOrder::Place& at) {
    const Sequences& s = a.seq;
    // PERF: opaque, or the quotient would be kept, and spill.
    const i32 num_heads = s.Hq / opaque(s.group), b = at.head / num_heads;
    Item item;
    item.section = at.section;
    item.down = kDown && at.head < a.heads - a.last;
    item.h_kv = at.head - b * num_heads;
    i32 unit = at.unit;
    if (kClassifies && s.sorted() && at.head >= a.key_order().in_order()) {
      const i32* const cuts = s.cu_k + b * s.cu_step;
      unit = cuda::warp_slot_by_length(cuts, s.pieces, a.key_tiles, unit, kTileKeys);
    }
    const cuda::TilePlace place =
        cuda::warp_tile(s, b, item.h_kv * s.group, unit, kTileKeys, false);
    item.f = place.f;
    item.key = place.first + own_first();
    item.row_tile = at.head * s.group * a.row_tiles_of_sequence;
    if (s.cut()) item.row_tile += cuda::first_slot(item.f.q_start, place.piece, kRows);
    return item;
  }

  /// How many of the key tiles before key tile n, or behind it if `down`, are active in a row tile, whose line of
  /// the map has so many words. All lanes call it.
  JALI_DEVICE static i32 turn_of(const u64* line, i32 words, i32 n, bool down) {
    i32 turn = 0;
#pragma unroll 1
    for (i32 begin = 0; begin < words; begin += 32) {
      const i32 word = begin + (threadIdx.x & 31),
                place = n - 32 * word;  // of n in this lane's word
      u32 active = word < words ? static_cast<u32>(line[word]) : 0;
      const u32 from = place <= 0 ? ~0u : place < 32 ? ~0u << place : 0;  // it, and those behind it
      const u32 own = place >= 0 && place < 32 ? 1u << place : 0;
      active &= down ? from ^ own : ~from;
      turn += __reduce_add_sync(0xffffffffu, __popc(active));
    }
    return turn;
  }

  /// visit(index, partial, more, last) of the active row tiles of a key tile, as for_each_active does.
  /// item(): the key tile, with a frame of the head. PERF: asked again and again, since registers are few.
  template <class ItemOf, class Visit>
  JALI_DEVICE static void classify_and_visit(const M& mask, ItemOf item, Visit visit) {
    i32 begin = 0;
    bool more = true;
#pragma unroll 1
    while (more) {
      u32 active, partial;
      {
        const Item at = item();
        const i32 key = at.key - own_first(), key_end = min_of(key + kTileKeys, at.f.num_keys);
        const typename M::ColBlock keys = mask.cols(at.f, key, key_end);
        const Span span = mask.row_span(at.f, keys);
        const i32 rows = at.f.num_rows, end = min_of(span.end, rows);
        begin = max_of(begin, min_of(span.begin, rows) / kRows);
        const i32 row = (begin + (threadIdx.x & 31)) * kRows;
        ::jali::Tile cls = ::jali::Tile::kEmpty;
        if (row < end) {
          cls = mask.classify(at.f, mask.rows(at.f, row, min_of(row + kRows, rows)), keys);
        }
        active = __ballot_sync(0xffffffffu, cls != ::jali::Tile::kEmpty);
        // A tile that hangs over the last key has columns to hide.
        const bool full = cls == ::jali::Tile::kFull && key + kTileKeys <= at.f.num_keys;
        partial = ~__ballot_sync(0xffffffffu, full);
        more = (begin + 32) * kRows < end;
      }
#pragma unroll 1
      while (active) {
        const i32 bit = __ffs(active) - 1;
        active &= active - 1;
        visit(begin + bit, partial >> bit & 1, active != 0, active == 0 && !more);
      }
      begin += 32;
    }
  }

  /// kPair: the number of the key tile that both blocks take next, for the whole warp. One lane waits: others that
  /// did, and were late, would find a phase passed twice.
  JALI_DEVICE static i32 take_for_pair(const BackwardArgs& a, const Shared& shared) {
    const Shared sm{static_cast<u32>(opaque(static_cast<i32>(shared.base)))};
    i32 number = 0;
    if (lane_id() == 0) {
      const i32 times = load_shared(sm.times_told());
      if (cluster_rank() == 0) {
        number = atomicAdd(a.taken, 1);
        barrier_wait(sm.told_empty(), times & 1 ^ 1);
        store_at_peer(sm.told(), number, sm.told_full());
      } else {
        barrier_expect(sm.told_full(), 4);
        barrier_wait(sm.told_full(), times & 1);
        number = load_shared(sm.told());
        barrier_arrive_at_peer_if(sm.told_empty(), number >= 0);  // it always is, once it is here
      }
      store_shared(sm.times_told(), times + 1);
    }
    __syncwarp();
    return broadcast(number);
  }

  JALI_DEVICE static void produce(const BackwardArgs& a, const M& mask, Loader loader) {
    const i32 lane = threadIdx.x & 31;
    // From the counter, the first one too: where not all blocks fit the device at once, those that do
    // must hold the work that others' turns wait for.
    i32 n = 0;
    if (kPair) {
      if (lane == 0) store_shared(loader.sm.times_told(), 0);
      __syncwarp();
      n = take_for_pair(a, loader.sm);
    } else {
      if (lane == 0) n = atomicAdd(a.taken, 1);
      n = broadcast(n);
    }
    constexpr bool kLongFirst = kMapped && !kOrdered;  // kOrdered: the host gives none
    if (kLongFirst && lane <= cuda::kMostLongLines) {
      loader.notes->first_units[lane] = a.key_map.long_lines ? a.key_map.long_lines[lane] : 0;
    }
    auto order = [&] {
      cuda::WorkOrder of = a.key_order();
      of.first = kLongFirst ? loader.notes->first_units : nullptr;  // PERF: a copy that is near
      if (!kLongFirst) of.by_length = nullptr;
      of.down = kDown;
      if (kOrdered) of.falling = kDown;
      return of;
    };
    if (lane == 0) store_shared(loader.sm.ready_section(), -1);
    __syncwarp();
#pragma unroll 1
    while (n < opaque(a.key_tiles) * a.heads) {  // PERF: or the product would be kept, and spill
      loader.prepare(item_of(a, order().place(n)));
      if (lane == 0) {
        store_shared(loader.sm.next(), -1);
        // PERF: what other blocks, or pairs of them, have begun, and as much again.
        constexpr i32 kAhead = kPair ? 1 : 2;
        loader.notes->wanted = order().reach(n + kAhead * (kOrdered ? num_blocks() : gridDim.x));
        const i32 section = loader.prepared(false).section;
        if (section != load_shared(loader.sm.ready_section())) {
          wait_at_least(a.prepared + section, a.row_order().in_section(section));
          store_shared(loader.sm.ready_section(), section);
        }
      }
      // PERF: while the last row tile waits for its place, and not earlier, or blocks would hold work
      // back from others, and work on different heads.
      auto take_next = [&] {
        if (lane == 0 && load_shared(loader.sm.next()) < 0) {
          store_shared(loader.sm.next(), atomicAdd(a.taken, 1));
        }
      };
      bool first = true;
      // The row tiles of one query head.
      auto visit_head = [&](const Item& item, const Frame& f) {
        const i32 row_line = item.row_tile % a.row_tiles_of_sequence;  // the first one of its piece
        const i32 base = item.row_tile + (f.h - item.f.h) * a.row_tiles_of_sequence;
        const i32 tile_key = item.key - own_first();
        const Head head{f.h,
                        base,
                        tile_key / kTileKeys,
                        item.down,
                        kDown ? a.row_map.line(f, row_line) : nullptr,
                        kNotesHead ? Scores::template of_head<kStagesBias>(a, f) : 0};
        loader.prepare(head);
        const bool last_head = f.h == item.f.h + a.seq.group - 1;
        i32 drawn = -1;  // the rows that the last call was for
        auto visit = [&](i32 t, bool partial, bool more, bool last) {
          if (!kPair && last && last_head) take_next();
          i32 flags = (first ? kFirst : 0) | (partial ? kPartial : 0) | (more ? kMore : 0);
          if constexpr (kOptions.dropout) {
            const i32 rows = t * kRows / static_cast<i32>(kDropoutRows);
            if (rows != drawn) flags |= kDraws;
            drawn = rows;
          }
          const volatile Head& at = loader.notes->head;
          i32 turn = at.key_tile;
          if (kDown) {
            const i32 words = a.row_map.words;
            turn = turn_of(at.row_words + i64{t} * words, words, turn, at.down);
          }
          const u32 shift = kOptions.dropout ? dropout_shift_of_row(t * kRows) : 0;
          const Note note = {
              flags, at.base + t, t * kRows, at.h, turn, shift, kNotesHead ? at.adds : 0};
          loader.send(note, first);
          first = false;
        };
        if constexpr (kClassifies) {
          auto item_again = [&] {
            Item again = copy(loader.prepared(!first));
            again.f.h = loader.notes->head.h;
            return again;
          };
          classify_and_visit(mask, item_again, visit);
        } else if constexpr (kMapped) {
          const i32 piece = row_line - f.q_start / kRows;
          const i32 key_line = a.seq.cut() ? cuda::first_slot(f.k_start, piece, kTileKeys) : 0;
          const i32 line = key_line + head.key_tile;
          const i32 words = ceil_div(f.num_rows, 32 * kRows);
          cuda::for_each_active(kOrdered && !loader.notes->head.down, a.key_map.line(f, line),
                                words, visit);
        } else {
          // Keys behind the end have to be hidden; rows there weigh nothing as they are.
          const bool partial = tile_key + kTileKeys > f.num_keys;
#pragma unroll 1
          for (i32 t = 0; t * kRows < f.num_rows; ++t) {
            const bool last = (t + 1) * kRows >= f.num_rows;
            visit(t, partial, !last, last);
          }
        }
      };
#pragma unroll 1
      for (i32 g = 0; g < a.seq.group; ++g) {
        const Item item = copy(loader.prepared(!first));
        // Where pieces leave a tile without keys, there is nothing to do.
        if (item.key - own_first() >= item.f.num_keys) break;
        Frame f = item.f;
        f.h += g;
        visit_head(item, f);
      }
      if (first || a.seq.cut()) {
        const Item item = copy(loader.prepared(!first));
        write_zeros(a, item, !first, lane);
        // Consumers will not hear of it.
        if (first && lane == 0) atomicAdd(a.added + item.section, kConsumerWarps);
      }
      if constexpr (kPair) {
        n = take_for_pair(a, loader.sm);
        continue;
      }
      take_next();
      __syncwarp();
      n = broadcast(load_shared(loader.sm.next()));
    }
    if (lane == 0) {
      loader.notes->wanted = Rows::kAll;
      loader.finish();
    }
  }

  // ---- finders --------------------------------------------------------------------------------
  /// The other warps of the loader's warpgroup look up the cells of partial tiles.
  JALI_DEVICE static void find_cells(const M& mask, const Shared& shared, const Notes* notes,
                                     i32 warp) {
    u32 items = 0;
#pragma unroll 1
    for (u32 steps = 0;; ++steps) {
      // Addresses are made anew, since registers are few.
      const Shared sm{static_cast<u32>(opaque(static_cast<i32>(shared.base)))};
      barrier_wait(sm.note_full(steps), steps / kNoteSlots & 1);
      i32 flags, number, row, h;
      load_shared(sm.note(steps), flags, number, row, h);
      flags = broadcast(flags);
      if (flags & kEnd) break;
      if (flags & kFirst) ++items;
      if (flags & kPartial) {
        // Where there are as many cells as notes, these were free when the note came. NOTE: only here:
        // consumers could be done with a full tile, and another, before this warp looks.
        if constexpr (kCellSlots < kNoteSlots) {
          barrier_wait(sm.rows_empty(steps % kStages), steps / kStages & 1 ^ 1);
        }
        auto tile = [&] {
          // PERF: in pairs of fields, since each load takes its turn beside the tensor cores.
          const u32 from = shared_address(&notes->item[(items - 1) % 4]);
          Words<Item> item;
#pragma unroll
          for (i32 n = 0; n < 8; n += 2) {
            u32 pair[2];
            load_array(from + 4 * n, pair);
            item.words[n] = pair[0];
            item.words[n + 1] = pair[1];
          }
          TileAt at{item.value.f, 0, item.value.key};
          load_shared(sm.note(steps), flags, number, at.row, at.f.h);
          return at;
        };
        tile::find_cells<kRows, kKeys, true, kFinders, 2>(mask, tile, sm.cells(steps), warp);
      }
      __syncwarp();
      const i32 lane = opaque(threadIdx.x & 31);
      // For compute-sanitizer: nobody waits for the cells of a full tile, which it takes for an error.
      barrier_wait(sm.cells_full(steps), steps / kNoteSlots & 1 ^ 1);
      barrier_arrive_if(sm.cells_full(steps), lane == 0);
      barrier_arrive_if(sm.note_empty(steps), lane == 0);
    }
  }

  // ---- steps of the consumers -----------------------------------------------------------------
  /// Waits for the note of row tile number `steps`; its Q comes later.
  JALI_DEVICE static void next_note(const Shared& sm, u32 steps, i32& flags, i32& number, i32& row,
                                    i32& h) {
    barrier_wait(sm.note_full(steps), steps / kNoteSlots & 1);
    load_shared(sm.note(steps), flags, number, row, h);
    flags = broadcast(flags);
    number = broadcast(number);
  }
  /// The same of its flags alone.
  JALI_DEVICE static i32 next_flags(const Shared& sm, u32 steps) {
    barrier_wait(sm.note_full(steps), steps / kNoteSlots & 1);
    return broadcast(load_shared(sm.note(steps)));
  }
  /// The ALiBi slope of that row tile's head.
  JALI_DEVICE static float slope_of_note(const Shared& sm, u32 steps) {
    return __uint_as_float(load_shared(sm.note(steps) + 24));
  }
  /// The turn of that row tile.
  JALI_DEVICE static i32 turn_of_note(const Shared& sm, u32 steps) {
    return broadcast(load_shared(sm.note(steps) + 16));
  }
  /// What accumulators start at: anything, if their first product does not add to them; the statistics of the rows;
  /// or zeros.
  template <bool kAnything, bool kStatistics>
  JALI_DEVICE static void start(float (&x)[kRows / 2], u32 shared, i32 lane) {
    if constexpr (kAnything) {
      forget(x);
    } else if constexpr (kStatistics) {
      load_statistics(x, shared + (lane & 3) * 8);
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
  /// kMatrices: d = ones' X, if kAdds added to what it is, X the parts of a statistic of the rows, in `shared`. PERF: a
  /// step at D64 keeps shared memory busy for 3,300 cycles, of which consumers that loaded statistics took 512, this
  /// 192: causal masks 4.5 % faster, windows 6 %, a bias of keys 7 %.
  template <bool kAdds>
  JALI_DEVICE static void multiply_statistic(float (&d)[kRows / 2], const Shared& sm, u32 shared) {
    if constexpr (!kMatrices) return;
    const u32 x = descriptor(shared, cuda::kStatisticMatrixBytes);
    Wgmma<BF16, kRows, true>::template ss<false, kSwizzle128Once>(d, descriptor(sm.ones(), 16), x,
                                                                  kAdds);
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
  /// d += W' 1, W as above: the sums over the rows, in each of 8 columns.
  JALI_DEVICE static void multiply_ones(float (&d)[4], const u32* w, const Shared& sm) {
#pragma unroll
    for (i32 t = 0; t < kRows / 16; ++t) {
      Wgmma<T, 8, false>::template rs<kEightRows>(d, w + 4 * t, descriptor(sm.ones_by_eight(), 128),
                                                  1);
    }
  }
  /// Where a thread's cells are; `first`: the first of the warp's keys in the key tile.
  JALI_DEVICE static CellPlace place(const Item& item, const Note& note, i32 first, i32 lane) {
    const i32 line = first + lane / 4;
    CellPlace at{item.f, note.row + 2 * (lane & 3), item.key + line, line};
    at.f.h = note.h;
    return at;
  }
  /// kRuns: finds where the rows of query head h are that see a warp's 16 keys, from `first` of the key tile on.
  JALI_DEVICE static void find_runs(const M& mask, const Item& item, i32 h, i32 first,
                                    const Shared& sm) {
    static_assert(!kRuns || kKeys * 8 + kKeys / 4 <= kCellSlots * kCellBytes);
    if constexpr (kRuns) {
      const i32 lane = opaque(threadIdx.x & 31), line = first + (lane & 15), key = item.key + line;
      Frame f = item.f;
      f.h = h;
      AllRows::Between rows = mask.seen_by(f, key, AllRows{});
      if (key >= f.num_keys) rows = {0, -1};
      __syncwarp();
      store_shared_if(sm.run(line), rows.lo, lane < 16);
      store_shared_if(sm.run(line) + 4, rows.hi, lane < 16);
      store_shared_if(sm.head_of_runs(first), h, lane == 0);
      __syncwarp();
    }
  }
  /// What hiding the cells of a partial tile needs: those of the thread's two keys.
  struct Hiding {
    VisibleBits<kRows / 32> visible;

    /// first: of the warp's keys in the key tile.
    JALI_DEVICE void look_up(const M& mask, const Item& item, const Note& note, i32 first,
                             const Shared& sm, u32 steps, i32 lane) {
      if constexpr (kRuns) {
        const i32 h = broadcast(note.h), line = first + lane / 4;
        if (broadcast(load_shared(sm.head_of_runs(first))) != h) {
          find_runs(mask, item, h, first, sm);
        }
        const QuadRun<kRows / 32> rows{note.row + 2 * (lane & 3), kFar};
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          u32 run[2];
          load_array(sm.run(line + 8 * e), run);
          visible.words[e] = rows.between(run[0], run[1]);
        }
      } else {
        ask(mask, place(item, note, first, lane), sm, steps, lane);
      }
    }
    JALI_DEVICE void ask(const M& mask, const CellPlace& at, const Shared& sm, u32 steps,
                         i32 lane) {
      if constexpr (kFinds) {
        barrier_wait(sm.cells_full(steps), steps / kNoteSlots & 1);
        // PERF: not an address that is kept.
        visible.load(sm.cells(steps) + opaque(at.line) * (kRows / 8), lane);
      } else if constexpr (kMasked) {
        QuadRun<kRows / 32> rows{at.row, kFar};
        visible.words[0] = mask.seen_by(at.f, at.key, rows);
        // PERF: one key after the other, or what both need would spill.
        asm volatile("" : "+r"(rows.first) : "r"(visible.words[0]));
        visible.words[1] = mask.seen_by(at.f, at.key + 8, rows);
      } else {
        visible.words[0] = visible.words[1] = ~0u;
      }
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        if (at.key + 8 * e >= at.f.num_keys) visible.words[e] = 0;
      }
    }
    JALI_DEVICE bool shows() const {
      constexpr u32 kCells = kRows == 64 ? 0xffffu : ~0u;  // bits above may say anything
      return ((visible.words[0] | visible.words[1]) & kCells) != 0;
    }
    /// Cells of block n of 8 rows that are not visible become `hidden`: they weigh nothing.
    JALI_DEVICE void hide(float (&s)[kRows / 2], i32 n, float hidden = 0) const {
#pragma unroll
      for (i32 m = 0; m < 4; ++m) {
        if (!visible.at(n, m / 2, m % 2)) s[4 * n + m] = hidden;
      }
    }
    JALI_DEVICE void hide_all(float (&s)[kRows / 2], float hidden) const {
#pragma unroll
      for (i32 n = 0; n < kRows / 8; ++n) hide(s, n, hidden);
    }
  };
  /// Products, or raw scores less LSE, to weights, where options are on. take(n, p, slopes) gets
  /// them rounded, two words for each block n of 8 rows. PERF: block by block, so that fp32 weights
  /// and what comes of them are not all there at once: they would not fit the registers.
  template <bool kHides, class Take>
  JALI_DEVICE static void weigh_blocks(float (&s)[kRows / 2], const BackwardArgs& a, const M& mask,
                                       const Item& item, const Note& note, i32 first,
                                       const Shared& sm, u32 steps, i32 lane, Take take) {
    const CellPlace at = place(item, note, first, lane);
    const Scores scores(a, at, sm.neg_lse(steps % kStages) + (lane & 3) * 8);
    Hiding hiding;
    if constexpr (kHides) hiding.look_up(mask, item, note, first, sm, steps, lane);
#pragma unroll
    for (i32 n = 0; n < kRows / 8; ++n) {
      u32 slopes[2];
      scores.weigh(s, n, slopes);
      if constexpr (kHides) hiding.hide(s, n);
      const u32 p[2] = {T::pack(s[4 * n], s[4 * n + 1]), T::pack(s[4 * n + 2], s[4 * n + 3])};
      take(n, p, slopes);
    }
  }
  /// A warp's 16 keys of dk or dv; `first` as above. kStaged: by way of `shared` (store_rows_staged).
  template <bool kStaged, i32 kCount>
  JALI_DEVICE static void store(const float (&x)[kCount], float scale, void* out,
                                const cuda::Strides& strides, i32 cols, const Item& item, i32 first,
                                i32 lane, u32 shared = 0) {
    const i32 key = item.key + first;
    u16* to = static_cast<u16*>(out) +
              cuda::offset(strides, item.f.b, item.h_kv, i64(item.f.k_start) + key);
    const i32 keys = item.f.num_keys - key;
    if constexpr (kStaged) {
      store_rows_staged<T>(x, {scale, scale}, shared, to, strides.l, keys, cols, lane);
    } else {
      store_rows<T>(x, {scale, scale}, to, strides.l, keys, cols, lane);
    }
  }

  /// What does not change: of the statistics' matrices the lines that are zero, and ones in the first three
  /// of 16 columns of 8 rows.
  JALI_DEVICE static void write_constants(const Shared& sm) {
    constexpr i32 kPlace = cuda::kStatisticMatrixBytes, kUsed = cuda::kStatisticBytes;
    for (i32 at = 16 * threadIdx.x; at < kStatsBytes; at += 16 * blockDim.x) {
      if (at % kPlace >= kUsed) store_shared(sm.neg_lse(0) + at, 0, 0, 0, 0);
    }
    const i32 row = threadIdx.x / 8, chunk = threadIdx.x % 8 ^ row;
    constexpr i32 kOnes = 0x3f803f80;
    if (row < 8) {
      store_shared(sm.ones() + 16 * threadIdx.x, chunk == 0 ? kOnes : 0,
                   chunk == 0 ? kOnes & 0xffff : 0, 0, 0);
    }
    fence_async();
  }
  JALI_DEVICE static void write_ones(const Shared& sm) {
    if (4 * threadIdx.x < cuda::kBackwardOnesBytes) {
      store_shared(sm.ones_by_eight() + 4 * threadIdx.x, static_cast<i32>(T::pack(1, 1)));
    }
    fence_async();
  }
  /// Runs the roles: consume(sm, notes, warpgroup), the consumers' part; own_barriers(sm); send(sm, number, lane), as
  /// Turns::send_sums takes it.
  template <i32 kLoaderRegisters, i32 kConsumerRegisters, class Barriers, class Consume, class Send>
  JALI_DEVICE static void run(const TensorMap& map_q, const TensorMap& map_k,
                              const TensorMap& map_v, const TensorMap& map_o, const BackwardArgs& a,
                              const M& mask, Barriers own_barriers, Consume consume, Send send) {
    extern __shared__ __align__(1024) char raw[];
    const Shared sm{shared_address(raw)};
    Notes* notes = reinterpret_cast<Notes*>(raw + kNotes);
    const i32 wg = broadcast(threadIdx.x >> 7);
    if (threadIdx.x == 0) {
      for (const TensorMap* map : {&map_q, &map_k, &map_v, &map_o}) prefetch(*map);
      init_barriers(sm);
      own_barriers(sm);
      notes->wanted = 0;
      barrier_init_fence();
    }
    if constexpr (kMatrices) write_constants(sm);
    if constexpr (kMultipliesOnes) write_ones(sm);
    if constexpr (kPair) {
      cluster_sync();  // the other block's barriers are there, too
    } else {
      __syncthreads();
    }
    begin_kernel();
    // For warp n of those that do.
    auto take_turns = [&](i32 n) {
      if (kSends && n == 0) {
        Turns::send_sums(a, sm, send);
      } else if (kTells && n == kSends) {
        Turns::tell_others(a, sm);
      } else {
        return;
      }
      Rows{a}.leave(kCountingWarps);
    };
    if (wg == 0) {
      give_registers<kLoaderRegisters>();
      const i32 warp = broadcast(threadIdx.x >> 5);
      if (warp == 0) {
        produce(a, mask, {a, sm, notes, map_q, map_k, map_v, map_o});
      } else if (warp <= kRowWarps) {
        const i32 first = (warp - 1) * kStagesEach;
        const u32 stages = sm.base + kRowBuffers + first * cuda::kBackwardRowBytes;
        // PERF: opaque, or what it is made of is kept, too, and spills.
        Rows rows{a, static_cast<u32>(opaque(static_cast<i32>(stages)))};
        rows.work(notes->wanted);
        rows.leave(kCountingWarps);
      } else if (warp <= kRowWarps + kTurnWarps) {
        take_turns(warp - kRowWarps - 1);
      } else if constexpr (kFinds) {
        find_cells(mask, sm, notes, warp);
      }
    } else if (kTurnGroup && wg == 3) {
      constexpr i32 kTurnRegisters = 24;
      static_assert(!kTurnGroup ||
                    kLoaderRegisters + 2 * kConsumerRegisters + kTurnRegisters <= 512);
      give_registers<kTurnRegisters>();
      take_turns(broadcast(threadIdx.x >> 5) - 12);
    } else {
      take_registers<kConsumerRegisters>();
      ConsumerRows rows{a};
      rows.begin();
      consume(sm, notes, wg - 1);
      rows.end();
      rows.leave(kCountingWarps);
      if constexpr (kPair) cluster_sync();  // the other block may still arrive at barriers here
    }
  }
};

}  // namespace jali::tile
