// The forward beside its consumers: the layout of shared memory, the planner, the loader, and the finders.
//
// Here, all of ForwardTiles, in this order: Shared, RowTile; plan, Loader, find; run.
#pragma once

#include "cuda/kernel/forward.h"
#include "cuda/kernel/work_order.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/order.h"
#include "cuda/ptx/shared.h"
#include "cuda/tile/cell_finder.h"
#include "cuda/tile/forward_scores.h"
#include "cuda/tile/store.h"
#include "mask/combine.h"

namespace jali::tile {

using namespace ptx;
using cuda::ForwardArgs;

/// T: BF16 or FP16. kD, kDv: head dims, multiples of 16. M: the mask. kOptions: of the scores. kMask: what the
/// mask asks, as the host says. kShape: how the work is divided.
template <class T, i32 kD, i32 kDv, class M, cuda::ScoreOptions kOptions, cuda::MaskKind kMask,
          cuda::ForwardShape kShape>
struct ForwardTiles {
  static constexpr i32 kRows = kShape.rows(), kKeys = kShape.keys;
  static constexpr i32 kSlots = kShape.slots, kStages = kShape.stages;
  static constexpr i32 kVSplit = kShape.v_split, kVStages = kShape.v_stages;
  static constexpr i32 kConsumers = kShape.warpgroups;
  static constexpr i32 kParts = ceil_div(kD, 64), kPartsV = ceil_div(kDv, 64);
  static constexpr i32 kRowBytes = 128;  // of 64 columns
  static constexpr i32 kQBytes = kRows * kParts * kRowBytes, kKBytes = kKeys * kParts * kRowBytes,
                       kVBytes = kKeys / kVSplit * kPartsV * kRowBytes;
  static constexpr i32 kQ = 0, kK = kQ + kSlots * kQBytes, kV = kK + kStages * kKBytes;
  static constexpr bool kMasked = kMask != cuda::MaskKind::kNone,
                        kHeavy = kMask == cuda::MaskKind::kHeavy;
  static constexpr bool kByRows = kMasked && !kHeavy;
  static constexpr i32 kFinders = 2, kGroups = kKeys / 32;  // warps; words of a row of cells
  static constexpr i32 kFinderBarrier = 4;                  // 1 to 3: turns
  static constexpr i32 kQBarrier = 5;                       // and the next ones, one a warpgroup
  static constexpr i32 kCellSlots = kShape.cells, kCellBytes = kRows * kShape.row_bytes;
  // NOTE: while the planner writes a row tile, consumers are at most 9 notes behind, and read the two row
  // tiles before theirs, too. Each has a note or more: 12 slots would do.
  static constexpr i32 kNoteSlots = 8, kTileSlots = 16;
  static constexpr i32 kCells = kV + kVStages * kVBytes;
  static constexpr i32 kAdded = kCells + kCellSlots * kCellBytes;
  static constexpr i32 kBiasAt = kAdded + kShape.added_bytes;
  static constexpr i32 kStaged = kBiasAt + kShape.bias_bytes();
  static constexpr i32 kBarriers = kStaged + kShape.staged_bytes();
  static constexpr i32 kNotes = kBarriers + 320, kTiles = kNotes + kNoteSlots * 16;
  static_assert(kShape.loader_registers + kConsumers * kShape.consumer_registers <=
                65536 / kShape.threads() / 8 * 8 * (1 + kConsumers));
  static_assert(kStaged % 1024 == 0 && kShape.kBoxBytes == tile::kStagedBytes);
  static_assert(kKeys % 64 == 0 && kStages == 2 && kVStages <= 4 && kSlots <= 2);
  static_assert(kCellSlots <= 4 && kMasked == (kCellSlots > 0));
  static_assert(!kByRows || sizeof(typename M::Row) <= cuda::kLightRowBytes);
  static_assert(kTiles + kTileSlots * 32 + 1024 <= kShape.shared_bytes(kD, kDv));

  static constexpr bool kQHeld = kShape.q_held;
  static constexpr bool kKeyBias = kOptions.key_bias != cuda::BiasType::kNone;
  static constexpr bool kMultiplies = cuda::multiplies_added(kOptions) && kShape.added_bytes > 0;
  // ALiBi is linear in the key but for the diagonal: slope (key - first row of the tile) before it, the
  // same less behind it. What is left depends on the row alone (row_added), and rows are measured with
  // slope (row - first row) added, which softmax does not see.
  static constexpr bool kLinear = kMultiplies && kOptions.alibi;
  static constexpr bool kOfKeys = kMultiplies || kKeyBias;
  static constexpr i32 kAddedBytes = kMultiplies ? kKeys / 64 * cuda::kAddedMatrixBytes : 4 * kKeys;
  // Or as many as stages of K, which must then not be freed before what their keys add.
  static constexpr i32 kAddedSlots = kOfKeys ? kShape.added_bytes / kAddedBytes : 1;
  static constexpr bool kAddedAhead = kAddedSlots == cuda::kAddedSlots;
  static constexpr bool kFinds = kMasked || kOfKeys;
  static_assert(kAdded % 1024 == 0 && (!kOfKeys || kKeys <= 64 * kFinders));

  // What the planner notes of a key tile: its index << kIndexShift, and (kBehind, if kLinear: the diagonal)
  static constexpr i32 kFirst = 1, kPartial = 2, kEnd = 4, kBehind = 8, kIndexShift = 4;
  JALI_DEVICE static i32 first_key(i32 note) { return (note >> kIndexShift) * kKeys; }
  /// Whether two key tiles of a row tile belong to different calls of Philox.
  JALI_DEVICE static bool draws_between(i32 note, i32 next) {
    constexpr u32 kTiles = kDropoutKeys / kKeys;
    return static_cast<u32>(note ^ next) >= kTiles << kIndexShift;
  }
  // and for the loader: where its K and V are (BoxPlace), and their head. PERF: the note of a key tile is
  // there before k_full of the tile before it, so that no consumer waits for it. Whoever needs a note
  // or a row tile reads it again whenever it needs it, which costs no registers.

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
    JALI_DEVICE u32 v_empty(i32 stage) const { return barrier(12 + stage); }
    JALI_DEVICE u32 cells_full(i32 slot) const { return barrier(16 + slot); }
    JALI_DEVICE u32 cells_empty(i32 slot) const { return barrier(20 + slot); }
    JALI_DEVICE u32 note_full(u32 n) const { return barrier(24 + n % kNoteSlots); }
    JALI_DEVICE u32 note_empty(u32 n) const { return barrier(32 + n % kNoteSlots); }
    /// A consumer warp's part of a bias over rows and keys.
    JALI_DEVICE u32 bias(i32 warp) const { return base + kBiasAt + warp * (32 * kKeys); }
    /// A consumer warp's of out.
    JALI_DEVICE u32 boxes(i32 warp) const {
      return base + kStaged + warp * (kShape.boxes * kShape.kBoxBytes);
    }
    /// Heavy masks: bits of a partial tile's cells, [row][kGroups words]. Light ones: of row tile n
    /// modulo kCellSlots, [row][kLightRowBytes].
    JALI_DEVICE u32 cells(i32 slot) const { return base + kCells + slot * kCellBytes; }
    /// What the keys of tile n add: [keys / 64][16][64] under the 128-byte swizzle; or a float a key.
    JALI_DEVICE u32 added(u32 n) const { return base + kAdded + n % kAddedSlots * kAddedBytes; }
    JALI_DEVICE u32 note(u32 n) const { return base + kNotes + n % kNoteSlots * 16; }
    JALI_DEVICE u32 num_keys(i32 n) const { return tile(n) + 16; }  // of a RowTile
    JALI_DEVICE u32 tile(i32 n) const { return base + kTiles + n % kTileSlots * 32; }
  };

  /// The number of part i of key tile n's V among all. Number 0 is what the very first step multiplies.
  JALI_DEVICE static u32 v_number(u32 n, i32 i) { return (n + 1) * kVSplit + i; }

  /// Where a key tile lies: before the diagonal of a row tile, across it, or behind it.
  enum class Side : u8 { kBefore, kAcross, kBehind };
  /// A row tile: rows [row, row + kRows) of a sequence and head.
  struct RowTile {
    Frame f;
    i32 row;

    JALI_DEVICE bool has_rows() const { return row < f.num_rows; }
    /// Where the first row stands among the keys.
    JALI_DEVICE i32 place() const { return row + f.q_offset; }
    JALI_DEVICE Side side(i32 key) const {
      if (key + kKeys - 1 <= place()) return Side::kBefore;
      return key >= place() + kRows - 1 ? Side::kBehind : Side::kAcross;
    }
    JALI_DEVICE void store(u32 shared) const {
      store_shared(shared, f.b, f.h, row, f.num_rows);
      store_shared(shared + 16, f.num_keys, f.q_offset, f.q_start, f.k_start);
    }
    JALI_DEVICE static RowTile load(u32 shared) {
      RowTile t;
      load_shared(shared, t.f.b, t.f.h, t.row, t.f.num_rows);
      load_shared(shared + 16, t.f.num_keys, t.f.q_offset, t.f.q_start, t.f.k_start);
      return t;
    }
    JALI_DEVICE i64 out(const ForwardArgs& a, i32 r) const {
      return f.b * a.out_stride_b + f.h * a.out_stride_h + i64{f.q_start + r} * a.out_stride_l;
    }
    JALI_DEVICE i64 lse(const ForwardArgs& a, i32 r) const {
      return f.b * a.lse_stride_b + f.h * a.lse_stride_h + i64{f.q_start + r} * a.lse_stride_l;
    }
  };
  /// Row tile number `tile`, for a whole warp; behind the end of its sequence if row >= num_rows. slot: which it is
  /// among its head's, also its line of the map.
  JALI_DEVICE static RowTile row_tile(const ForwardArgs& a, i32 tile, i32& slot) {
    // The last rows come first: under a causal mask they are the longest.
    constexpr bool kMapped = cuda::has_map(kMask);
    const cuda::WorkOrder order{a.heads,
                                a.section,
                                a.tiles_per_head,
                                true,
                                kMapped ? a.map.long_lines : nullptr,
                                kMapped ? a.map.by_length : nullptr,
                                a.last};
    const cuda::WorkOrder::Place at = order.place(tile);
    const i32 head = at.head;
    slot = at.unit;
    const i32 b = head / a.seq.Hq;
    const cuda::TilePlace place = cuda::warp_tile(a.seq, b, head - b * a.seq.Hq, slot, kRows, true);
    return {place.f, place.first};
  }

  // ---- planner --------------------------------------------------------------------------------
  /// Zeros for the rows of a tile that see no key: all, unless `any` key tile is active, and tokens behind
  /// the last piece, which are no rows at all where they are packed.
  JALI_DEVICE static void write_empty(const ForwardArgs& a, const RowTile& t, bool any, i32 lane) {
    const i32 last = cuda::end_with_tail(a.seq, t.f.b, t.f.q_start + t.f.num_rows, true);
    const i32 rows = last - t.f.q_start;
    const i32 begin = any ? max_of(t.row, t.f.num_rows) : t.row, end = min_of(t.row + kRows, rows);
    const i32 parts = opaque(a.Dv) / 8;
#pragma unroll 1
    for (i32 n = lane; n < (end - begin) * parts; n += 32) {
      u16* out = static_cast<u16*>(a.out) + t.out(a, begin + n / parts) + n % parts * 8;
      *reinterpret_cast<uint4*>(out) = uint4{0, 0, 0, 0};
    }
#pragma unroll 1
    for (i32 r = begin + lane; r < end; r += 32) {
      const bool sinks = kOptions.sinks && (r < t.f.num_rows || !a.seq.varlen());
      a.lse[t.lse(a, r)] = sinks ? a.scores.sinks[t.f.h] : -infinity();
    }
  }

  /// visit(index, active, partial) of the key tiles of a row tile, 32 at a time, one a lane, the last one
  /// first. ALiBi: first those from the diagonal on, where maxima are, then those behind it.
  template <class Visit>
  JALI_DEVICE static void classify_and_visit(const M& mask, u32 tile, i32 lane, Visit visit) {
    auto rows_of = [&](const RowTile& t) {
      return mask.rows(t.f, t.row, min_of(t.row + kRows, t.f.num_rows));
    };
    i32 begin, count, first;  // visited: first, first - 1, …, begin, begin + count - 1, …
    {
      const RowTile t = RowTile::load(tile);
      const Span span = mask.key_span(t.f, rows_of(t));
      begin = max_of(span.begin, 0) / kKeys;
      count = ceil_div(min_of(span.end, t.f.num_keys), kKeys) - begin;
      first = begin + count - 1;
      if constexpr (kLinear) first = clamp_to((t.place() + kRows - 1) / kKeys, begin, first);
    }
    auto index_of = [&](i32 n) { return first - n + (kLinear && first - n < begin ? count : 0); };
#pragma unroll 1
    for (i32 done = 0; done < count; done += 32) {
      const i32 n = done + opaque(lane);
      const RowTile t = RowTile::load(tile);
      const typename M::RowBlock rows = rows_of(t);
      const i32 num_keys = t.f.num_keys;
      Tile cls = Tile::kEmpty;
      if (n < count) {
        const i32 c = index_of(n), key_end = min_of((c + 1) * kKeys, num_keys);
        cls = mask.classify(t.f, rows, mask.cols(t.f, c * kKeys, key_end));
        // A tile that hangs over the end has columns to hide.
        if (cls == Tile::kFull && (c + 1) * kKeys > num_keys) cls = Tile::kPartial;
      }
      visit(index_of(n), cls != Tile::kEmpty, cls == Tile::kPartial);
    }
  }

  /// The same by a map, if there is one. tile: where the row tile lies in shared memory; slot: of row_tile().
  template <class Visit>
  JALI_DEVICE static void visit_tiles(const ForwardArgs& a, const M& mask, u32 tile, i32 slot,
                                      i32 lane, Visit visit) {
    if constexpr (cuda::has_map(kMask)) {
      const RowTile t = RowTile::load(tile);
      const i32 words = ceil_div(t.f.num_keys, 32 * kKeys);
      cuda::for_each_word(true, a.map.line(t.f, slot), words,
                          [&](i32 word, u64 classes, bool, bool) {
                            const u64 own = classes >> (31 - lane);
                            visit(word * 32 + 31 - lane, own & 1, !(own >> 32 & 1));
                          });
    } else {
      classify_and_visit(mask, tile, lane, visit);
    }
  }

  /// Notes all key tiles of all row tiles, up to 8 ahead of the loader. PERF: where the loader did
  /// that itself, consumers waited for the first loads of each row tile.
  JALI_DEVICE static void plan(const ForwardArgs& a, const M& mask, const Shared& sm) {
    const i32 lane = opaque(threadIdx.x & 31);
    u32 num_notes = 0;
    i32 opened = 0;  // row tiles with at least one active key tile
    auto note = [&](u32 n, i32 what, i32 token, i32 b, i32 h) {
      barrier_wait(sm.note_empty(n), (n / kNoteSlots & 1) ^ 1);
      store_shared(sm.note(n), what, token, b, h);
      barrier_arrive(sm.note_full(n));
    };
    i32 tile = blockIdx.x;
#pragma unroll 1
    while (tile < a.num_tiles) {
      const u32 own = sm.tile(opened);
      i32 slot;
      {
        const RowTile t = row_tile(a, tile, slot);
        if (lane == 0) t.store(own);
        __syncwarp();
      }
      if (lane == 0) tile = atomicAdd(a.counter, 1) + a.num_blocks;
      bool any = false;  // key tile is active
      if (RowTile::load(own).has_rows()) {
        auto visit = [&](i32 index, bool active, bool partial) {
          i32 behind = 0;
          if constexpr (kLinear) {
            const Side side = RowTile::load(own).side(index * kKeys);
            partial |= side == Side::kAcross;
            behind = side == Side::kBehind ? kBehind : 0;
          }
          // Where a table of lengths leads beyond it.
          if constexpr (kOptions.bias_pairs) {
            partial |= (index + 1) * kKeys > a.scores.bias.keys;
          }
          // PERF: some lanes at the same time, with the instructions of one. All slots at once would have
          // to be empty, and the loader would wait for the next notes.
          constexpr i32 kTogether = kNoteSlots / 2;
          u32 left = __ballot_sync(0xffffffffu, active);
#pragma unroll 1
          while (left) {
            const i32 before = __popc(left & ((1u << lane) - 1));
            const bool now = active && before < kTogether;
            active &= !now;
            if (now) {
              // PERF: read anew, or D64 would spill.
              const RowTile t = RowTile::load(own);
              const cuda::BoxPlace keys =
                  cuda::box_place(a.seq, t.f.b, t.f.k_start, t.f.num_keys, index * kKeys);
              note(num_notes + before,
                   index << kIndexShift | behind | (any || before > 0 ? 0 : kFirst) |
                       (partial ? kPartial : 0),
                   keys.token, keys.b, t.f.h / a.seq.group);
            }
            const u32 noted = __ballot_sync(0xffffffffu, now);
            left ^= noted;
            num_notes += __popc(noted);
            any = true;
          }
        };
        visit_tiles(a, mask, own, slot, lane, visit);
      }
      write_empty(a, RowTile::load(own), any, lane);
      opened += any;
      tile = broadcast(tile);
    }
    if (lane == 0) {
      note(num_notes, kEnd, 0, 0, 0);
      cuda::leave(a.counter);
    }
  }

  // ---- loader ---------------------------------------------------------------------------------
  /// One thread.
  struct Loader {
    const ForwardArgs& a;
    const Shared& sm;
    const TensorMap &map_q, &map_k, &map_v;

    struct Note {
      i32 what, token, b, h;
    };
    /// 64 columns at a time from `skip` keys behind where the note says.
    template <i32 kCopies, i32 kCopyKeys>
    JALI_DEVICE void load(const Note& from, i32 skip, const TensorMap& map, u32 to, u32 full,
                          u32 empty, u32 parity) {
      barrier_wait(empty, parity ^ 1);
      barrier_expect(full, kCopies * kCopyKeys * kRowBytes);
#pragma unroll
      for (i32 c = 0; c < kCopies; ++c) {
        load_box(to + c * kCopyKeys * kRowBytes, map, full, 64 * c, from.token + skip, from.h,
                 from.b, cuda::box_end(a.seq));
      }
    }
    JALI_DEVICE void load_k(u32 n, const Note& from) {
      const u32 stage = n % kStages;
      load<kParts, kKeys>(from, 0, map_k, sm.k(stage), sm.k_full(stage), sm.k_empty(stage),
                          n / kStages & 1);
    }
    JALI_DEVICE void load_v(u32 n, const Note& from) {
#pragma unroll
      for (i32 i = 0; i < kVSplit; ++i) {
        const u32 at = v_number(n, i), stage = at % kVStages;
        load<kPartsV, kKeys / kVSplit>(from, i * (kKeys / kVSplit), map_v, sm.v(stage),
                                       sm.v_full(stage), sm.v_empty(stage), at / kVStages & 1);
      }
    }
    JALI_DEVICE void load_q(i32 opened) {
      const i32 slot = opened % kSlots;
      barrier_wait(sm.q_empty(slot), (opened / kSlots & 1) ^ 1);
      const RowTile t = RowTile::load(sm.tile(opened));
      const cuda::BoxPlace at = cuda::box_place(a.seq, t.f.b, t.f.q_start, t.f.num_rows, t.row);
      barrier_expect(sm.q_full(slot), kQBytes);
      for (i32 wg = 0; wg < kConsumers; ++wg) {
        for (i32 part = 0; part < kParts; ++part) {
          load_box(sm.q(slot) + (wg * kParts + part) * 64 * kRowBytes, map_q, sm.q_full(slot),
                   64 * part, at.token + 64 * wg, t.f.h, at.b, cuda::box_end(a.seq));
        }
      }
    }
    JALI_DEVICE void run() {
      i32 opened = 0;
      u32 n = 0;
      for (i32 i = 0; i < kVSplit; ++i) barrier_expect(sm.v_full(i), 0);  // of number 0: nothing
      barrier_wait(sm.note_full(0), 0);
      Note last{};
#pragma unroll 1
      for (;; ++n) {
        Note note;
        load_shared(sm.note(n), note.what, note.token, note.b, note.h);
        if (note.what & kEnd) break;
        // Consumers read the note after that of a K as soon as this K is there.
        barrier_wait(sm.note_full(n + 1), (n + 1) / kNoteSlots & 1);
        if ((kSlots > 1 || kQHeld) && note.what & kFirst) load_q(opened++);
        load_k(n, note);
        if (n > 0) load_v(n - 1, last);
        last = note;
        // Consumers have read it, too: the first note before its own K is freed, any other before K
        // of the tile before it.
        if (n > 1) barrier_arrive(sm.note_empty(n - 2));
        // With one slot, Q is free when the K before this one has been used: later than the others,
        // unless registers hold it.
        if (kSlots == 1 && !kQHeld && note.what & kFirst) load_q(opened++);
      }
      if (n > 0) {
        load_v(n - 1, last);
      } else {  // nothing at all: the consumers wait for the first K
        barrier_expect(sm.k_full(0), 0);
      }
    }
  };

  // ---- finders --------------------------------------------------------------------------------
  /// What keys add to scores, and what consumers need to know of a mask: if it is heavy, the cells of
  /// partial tiles, if it is light, what the rows of each row tile are to it. PERF: where consumers looked
  /// up cells, a partial tile took three times as long as a full one, mostly waiting.
  JALI_DEVICE static void find(const ForwardArgs& a, const M& mask, const Shared& sm) {
    i32 opened = 0;
    u32 found = 0;
    OfRowTile of_tile;
    if constexpr (kMultiplies) clear_added(sm);
#pragma unroll 1
    for (u32 n = 0;; ++n) {
      barrier_wait(sm.note_full(n), n / kNoteSlots & 1);
      const i32 note = broadcast(load_shared(sm.note(n)));
      if (note & kEnd) {
        if (kOfKeys && n == 0) arrive_k(sm, 0);
        break;
      }
      if (note & kFirst) {
        if constexpr (kOfKeys) of_tile = of_row_tile(a, RowTile::load(sm.tile(opened)));
        ++opened;
      }
      if (kMasked && note & (kHeavy ? kPartial : kFirst)) {
        constexpr i32 kModulus = max_of(kCellSlots, 1);
        const u32 slot = found % kModulus;
        barrier_wait(sm.cells_empty(slot), (found / kModulus & 1) ^ 1);
        if constexpr (kHeavy) {
          auto tile = [&] {
            const RowTile t = RowTile::load(sm.tile(opened - 1));
            return tile::TileAt{t.f, t.row, first_key(note)};
          };
          constexpr i32 kMost = kShape.loader_registers > 56 ? 4 : 2;
          tile::find_cells<kRows, kKeys, false, kFinders, kMost>(mask, tile, sm.cells(slot));
        } else if constexpr (kByRows) {
          find_rows(mask, RowTile::load(sm.tile(opened - 1)), sm.cells(slot));
        }
        ++found;
        __syncwarp();
        barrier_arrive_if(sm.cells_full(slot), (threadIdx.x & 31) == 0);
      }
      // PERF: behind the cells, since it waits until there is room for this K.
      const i32 key = first_key(note);
      if constexpr (kOfKeys) find_added(a, sm, of_tile, n, key);
      if constexpr (kOfKeys) arrive_k(sm, n);
      __syncwarp();
      barrier_arrive_if(sm.note_empty(n), (threadIdx.x & 31) == 0);
    }
  }
  /// A finder warp's part of K number n is there.
  JALI_DEVICE static void arrive_k(const Shared& sm, u32 n) {
    __syncwarp();
    barrier_arrive_if(sm.k_full(n % kStages), (threadIdx.x & 31) == 0);
  }
  JALI_DEVICE static i32 finder_thread() { return threadIdx.x - (128 - 32 * kFinders); }
  JALI_DEVICE static u32 finder_warp() { return broadcast(finder_thread() / 32); }
  /// What is added begins as zeros; most of its rows stay so.
  JALI_DEVICE static void clear_added(const Shared& sm) {
    for (i32 n = finder_thread(); n < kShape.added_bytes / 16; n += 32 * kFinders) {
      store_shared(sm.added(0) + 16 * n, 0, 0, 0, 0);
    }
    named_sync(kFinderBarrier, 32 * kFinders);
  }
  /// What find_added needs of a row tile. PERF: found for each key tile, it took as many instructions
  /// as all else here; schedulers issue them in place of a consumer's.
  struct OfRowTile {
    i64 bias;  // Scores::key_bias_row()
    i32 last;  // Scores::last_key()
    RowTile at;
    float slope;  // ALiBi's, in the unit of scores
  };
  JALI_DEVICE static OfRowTile of_row_tile(const ForwardArgs& a, const RowTile& t) {
    const cuda::Scores<T, kOptions> scores(a.scores, t.f);
    return {scores.key_bias_row(), scores.last_key(), t,
            __fdividef(scores.slope, tile::score_unit<kOptions>(a.scores))};
  }
  /// Brings what the keys of tile n, which begins with `key`, add to scores, in the unit of these, to
  /// shared memory. kMultiplies: a number is the sum of three in bf16, the first rows of a matrix that
  /// ones multiply; fp16 has not the range. PERF: where consumers loaded it from global memory, dense
  /// attention took 2.4 times as long. NOTE: kAddedAhead: its place had what the keys of tile n - 4 add, which was used
  /// when there was room for tile n - 1.
  JALI_DEVICE static void find_added(const ForwardArgs& a, const Shared& sm, const OfRowTile& of,
                                     u32 n, i32 key) {
    const i32 pair = finder_thread();
    const float factor = __fdividef(1.0f, tile::score_unit<kOptions>(a.scores));
    const Side side = of.at.side(key);
    const float slope = of.slope;
    const float of_key = side == Side::kBefore ? slope : side == Side::kBehind ? -slope : 0.0f;
    float added[2];
#pragma unroll
    for (i32 x = 0; x < 2; ++x) {
      const i32 k = key + 2 * pair + x;
      added[x] = cuda::Scores<T, kOptions>::key_bias(a.scores, of.bias, of.last, k) * factor;
      if constexpr (kLinear) added[x] += of_key * static_cast<float>(k - of.at.place());
    }
    if (!kAddedAhead) wait_for_room(sm, n);
    if (2 * pair < kKeys) {
      if constexpr (kMultiplies) {
        const u32 to = sm.added(n) + pair / 32 * cuda::kAddedMatrixBytes + pair % 4 * 4;
#pragma unroll
        for (i32 r = 0; r < 3; ++r) {
          const u32 word = BF16::pack(added[0], added[1]);
          store_shared(to + r * 128 + ((pair % 32 / 4 ^ r) << 4), static_cast<i32>(word));
#pragma unroll
          for (i32 x = 0; x < 2; ++x) {
            const float part = BF16::value(static_cast<u16>(word >> 16 * x));
            added[x] = fabsf(part) == infinity() ? 0.0f : added[x] - part;
          }
        }
      } else {
        for (i32 x = 0; x < 2; ++x) {
          store_shared(sm.added(n) + 8 * pair + 4 * x, __float_as_int(added[x]));
        }
      }
    }
    fence_async();
    if (kAddedAhead) wait_for_room(sm, n);
  }
  /// Whoever is done with K of the last tile but one has used what came with it, and before.
  JALI_DEVICE static void wait_for_room(const Shared& sm, u32 n) {
    barrier_wait(sm.k_empty(n % kStages), (n / kStages & 1) ^ 1);
  }
  JALI_DEVICE static void find_rows(const M& mask, const RowTile& t, u32 shared) {
    using Row = Words<typename M::Row>;
#pragma unroll 1
    for (i32 r = opaque(finder_thread()); r < kRows; r += 32 * kFinders) {
      const Row row(mask.row(t.f, t.row + r));
#pragma unroll
      for (i32 n = 0; n < ceil_div(Row::kCount, 4); ++n) {
        u32 words[4];
#pragma unroll
        for (i32 w = 0; w < 4; ++w) words[w] = 4 * n + w < Row::kCount ? row.words[4 * n + w] : 0;
        store_array(shared + r * cuda::kLightRowBytes + 16 * n, words);
      }
    }
  }

  // ---- roles ----------------------------------------------------------------------------------
  /// Runs the roles: consume(sm, warpgroup), the consumers' part.
  template <class Consume>
  JALI_DEVICE static void run(const TensorMap& map_q, const TensorMap& map_k,
                              const TensorMap& map_v, const TensorMap& map_out,
                              const ForwardArgs& a, const M& mask, Consume consume) {
    extern __shared__ char raw[];
    const Shared sm{(shared_address(raw) + 1023) & ~1023u};
    const i32 wg = broadcast(threadIdx.x >> 7);
    if (threadIdx.x == 0) {
      for (const TensorMap* map : {&map_q, &map_k, &map_v, &map_out}) prefetch(*map);
      for (i32 n = 0; n < kSlots; ++n) {
        barrier_init(sm.q_full(n), 1);
        barrier_init(sm.q_empty(n), 4 * kConsumers);
      }
      for (i32 n = 0; n < kStages; ++n) {
        barrier_init(sm.k_full(n), 1 + (kOfKeys ? kFinders : 0));
        barrier_init(sm.k_empty(n), 4 * kConsumers);
      }
      for (i32 n = 0; n < kVStages; ++n) {
        barrier_init(sm.v_full(n), 1);
        barrier_init(sm.v_empty(n), 4 * kConsumers);
      }
      for (i32 n = 0; n < kCellSlots; ++n) {
        barrier_init(sm.cells_full(n), kFinders);
        barrier_init(sm.cells_empty(n), 4 * kConsumers);
      }
      for (i32 n = 0; n < kNoteSlots; ++n) {
        barrier_init(sm.note_full(n), 1);
        barrier_init(sm.note_empty(n), 1 + (kFinds ? kFinders : 0));
      }
      barrier_init_fence();
    }
    __syncthreads();
    begin_kernel();
    if (wg == 0) {
      give_registers<kShape.loader_registers>();
      if (threadIdx.x < 32) {
        if (elect()) Loader{a, sm, map_q, map_k, map_v}.run();
      } else if (threadIdx.x < 64) {
        plan(a, mask, sm);
      } else if constexpr (kFinds) {
        find(a, mask, sm);
      }
    } else {
      take_registers<kShape.consumer_registers>();
      consume(sm, wg - 1);
    }
  }
};

}  // namespace jali::tile
