// Forward, sm_90a: tiles from an inline source, D and Dv up to 256.
//
// Serves    fp16, bf16; GQA; padded and packed (varlen) layouts; any mask of closed-form leaves or
//           stored blocks; softcap, biases, ALiBi, sinks, dropout. kD and kDv: D and Dv rounded up
//           to multiples of 32.
// Tensors   q, k, v as rank-4 TMA maps {D, tokens, heads, B} with boxes {64, rows or keys, 1, 1} under
//           the 128-byte swizzle: one copy per 64 columns, the engine fills zeros beyond D. out and
//           lse by pointer and strides; rows of out start at multiples of 16 bytes.
// Roles     warpgroup 0: warp 0 loads (persistent; takes row tiles from a counter, longest first
//           within a section of heads, classifies 32 key tiles at a time or, for a heavy mask, reads
//           a tile map); warps 1 to 3 look up the cells of a heavy mask's partial tiles, up to a row
//           tile ahead. The other warpgroups: 64 rows each; S of the next key tile is in flight with
//           O += P V of the last one, across row tiles too, and they take turns at the tensor cores.
// Shared    Q slots, K and V stages, each [dim / 64][rows][64]; bits of cells [rows][keys]; notes
//           from the loader.
// Barriers  q_full, k_full, v_full: 1 arrival + bytes, by the loader; q_empty, k_empty, v_empty: one
//           arrival a consumer warp, when the tensor cores have read the slot. asked_full: 1, by the
//           loader; asked_empty, cells_full: one a finder warp; cells_empty: one a consumer warp.
// Here      for host and kernel: ForwardShape, forward_shape, ForwardArgs; Forward: Shared, RowTile,
//           Loader and produce (warp 0), find_cells (warps 1 to 3), Consumer and consume, run.
#pragma once

#include "cuda/kernel/sequences.h"
#include "cuda/kernel/tile_map.h"
#include "cuda/tile/scores.h"

namespace jali::cuda {

/// How a kernel divides its work. Every constant here is one that the host needs, too.
struct ForwardShape {
  i32 warpgroups = 2;  // consumers, 64 rows each
  i32 keys = 128;      // of a key tile, a multiple of 64
  i32 slots = 2;       // of Q
  i32 stages = 2;      // of K
  i32 v_split = 1;     // a V stage holds keys / v_split keys
  i32 v_stages = 2;
  i32 cells = 0;      // slots for the bits of a partial tile's cells: heavy masks
  bool turns = true;  // consumers take turns at the tensor cores
  i32 early = 0;      // blocks of 8 keys with exponentials before the wait for P V
  // NOTE: together at most what the launch was given, or the consumers wait for ever for theirs.
  i32 loader_registers = 56, consumer_registers = 224;

  constexpr i32 rows() const { return 64 * warpgroups; }
  constexpr i32 threads() const { return 128 * (1 + warpgroups); }
  static constexpr i32 padded(i32 D) { return (D + 63) / 64 * 64; }
  constexpr i32 v_keys() const { return keys / v_split; }
  constexpr i32 tile_bytes(i32 D, i32 Dv) const {
    return 2 * (slots * rows() * padded(D) + stages * keys * padded(D) +
                v_stages * v_keys() * padded(Dv));
  }
  constexpr i32 cell_bytes() const { return cells * rows() * keys / 8; }
  /// Dynamic shared memory: tiles, barriers and notes, and room to align the base to 1024.
  constexpr i32 shared_bytes(i32 D, i32 Dv) const {
    return tile_bytes(D, Dv) + cell_bytes() + 576 + 1024;
  }
  constexpr bool fits(i32 D, i32 Dv) const {
    return shared_bytes(D, Dv) <= 227 * 1024 && keys * 3 / 4 + Dv / 2 <= 192;
  }
};
/// What a mask asks of a kernel: nothing; leaves that are all light (mask/leaf.h), so that consumers
/// make the bits of their rows themselves; or more, which others look up for them.
enum class MaskKind : u8 { kNone, kLight, kHeavy };

/// The shape for kD and kDv, multiples of 32 up to 256. PERF: TFLOP/s on one H200, 16K tokens.
constexpr ForwardShape forward_shape(i32 kD, i32 kDv, ScoreOptions options, MaskKind mask) {
  ForwardShape s;
  const bool lean = !options.per_cell() && !options.alibi;  // few registers beside the tiles
  if (kD == 64 && kDv == 64 && lean && mask != MaskKind::kHeavy) {
    s.warpgroups = 3;  // 517, with two 460
    s.loader_registers = 32;
    s.consumer_registers = 160;
  } else if (mask == MaskKind::kNone || kD == 96) {
    s.turns = false;  // D96 555, in turns 535; D256 660, 653; D128 621, 617
  }
  if (mask == MaskKind::kNone && kD == 128 && lean) s.early = 4;  // 1K tokens: 549, without 534
  if (mask == MaskKind::kHeavy) s.cells = 4;
  if (mask == MaskKind::kHeavy && lean) {
    s.loader_registers = 72;  // lookups take many, consumers none for the mask
    s.consumer_registers = 216;
  }
  // What options load or draw for a tile of 128 keys would spill.
  if (options.per_cell() || (!lean && kDv > 128)) s.keys = 64;
  if (!s.fits(kD, kDv)) s.slots = 1;
  if (s.fits(kD, kDv)) return s;
  if (lean) {  // one and a half key tiles of V: D192 691, with tiles of 64 keys 608
    ForwardShape split = s;
    split.v_split = 2;
    split.v_stages = 3;
    split.loader_registers = 56;
    split.consumer_registers = 224;
    if (split.fits(kD, kDv)) return split;
  }
  s.slots = 2;
  s.keys = 64;
  if (!s.fits(kD, kDv)) s.slots = 1;
  return s;
}

/// How many heads to work on together: enough that the longest row tiles hide the last ones' idle
/// processors, and that K and V of all stay in L2. PERF: D128 causal, 256 heads of 1K: 404, 422, 437,
/// 372 TFLOP/s for 1, 16, 64, 256 heads; 16 heads of 16K: 570, 612, 624 for 1, 4, 16.
constexpr i32 forward_section(i32 heads, i32 group, i32 tiles_per_head, i64 kv_bytes_per_head) {
  const i64 cached = (i64{32} << 20) / max_of(kv_bytes_per_head, i64{1}) * group;
  const i64 filled = ceil_div(512, max_of(tiles_per_head, 1));
  const i64 wanted = ceil_div(max_of(cached, filled), i64{group}) * group;
  return static_cast<i32>(clamp_to(wanted, i64{1}, i64{max_of(heads, 1)}));
}

/// What differs from call to call; passed by value.
struct ForwardArgs {
  Sequences seq;
  ScoreArgs scores;
  i32 Dv;              // at most kDv, a multiple of 8
  i32 num_tiles;       // row tiles of all heads: tiles_per_head · heads()
  i32 tiles_per_head;  // ceil(Lq / rows); varlen: num_slots(Tq, B, rows)
  i32 section;         // forward_section()
  TileMap map;         // of row tiles, for a heavy mask; for others the loader classifies
  i32* counter;        // [0] row tiles taken, [1] blocks done; zero before and after
  void* out;           // [b, h, l, Dv]; packed: [h, token, Dv] with stride_b 0
  float* lse;          // [b, h, l]
  i64 out_stride_b, out_stride_h, out_stride_l;  // elements
  i64 lse_stride_b, lse_stride_h, lse_stride_l;

  JALI_HD i32 heads() const { return seq.varlen() ? seq.Hq : seq.B * seq.Hq; }
};

}  // namespace jali::cuda

#if defined(__CUDACC_RTC__)
#include "cuda/ptx/copy.h"
#include "cuda/ptx/shared.h"
#include "cuda/tile/cell_finder.h"
#include "cuda/tile/no_mask.h"
#include "cuda/tile/softmax.h"
#include "cuda/tile/visible_bits.h"
#include "mask/combine.h"

namespace jali::cuda {

using namespace ptx;

/// T: BF16 or FP16. M: the mask. kMask: what it asks, as the host says.
template <class T, i32 kD, i32 kDv, class M, ScoreOptions kOptions, MaskKind kMask,
          ForwardShape kShape = forward_shape(kD, kDv, kOptions, kMask)>
struct Forward {
  static constexpr i32 kRows = kShape.rows(), kKeys = kShape.keys;
  static constexpr i32 kSlots = kShape.slots, kStages = kShape.stages;
  static constexpr i32 kVSplit = kShape.v_split, kVStages = kShape.v_stages;
  static constexpr i32 kConsumers = kShape.warpgroups;
  static constexpr i32 kParts = ceil_div(kD, 64), kPartsV = ceil_div(kDv, 64);
  static constexpr i32 kRowBytes = 128;  // of 64 columns
  static constexpr i32 kQBytes = kRows * kParts * kRowBytes, kKBytes = kKeys * kParts * kRowBytes,
                       kVBytes = kKeys / kVSplit * kPartsV * kRowBytes;
  static constexpr i32 kQ = 0, kK = kQ + kSlots * kQBytes, kV = kK + kStages * kKBytes;
  static constexpr bool kHeavy = kMask == MaskKind::kHeavy;
  static constexpr i32 kFinders = 3, kGroups = kKeys / 32;  // warps; words of a row of cells
  static constexpr i32 kCellSlots = kShape.cells, kCellBytes = kRows * kGroups * 4;
  static constexpr i32 kLookupBytes = kShape.loader_registers > 56 ? 64 : 20;
  static constexpr i32 kCells = kV + kVStages * kVBytes;
  static constexpr i32 kBarriers = kCells + kCellSlots * kCellBytes;
  static constexpr i32 kNotes = kBarriers + 256, kTiles = kNotes + 128, kAsked = kTiles + 128;
  static_assert(kShape.loader_registers + kConsumers * kShape.consumer_registers <=
                65536 / kShape.threads() / 8 * 8 * (1 + kConsumers));
  static_assert(kKeys % 64 == 0 && kStages <= 4 && kSlots <= 2);
  static_assert(kHeavy ? kCellSlots > 1 && kCellSlots <= 4 : kCellSlots == 0);
  static_assert(kAsked + 2 * 32 + 1024 <= kShape.shared_bytes(kD, kDv));

  static constexpr i32 kEarly = kShape.early;

  // What the loader notes of a key tile: its index times 8, and
  static constexpr i32 kFirst = 1, kPartial = 2, kEnd = 4;
  // and for itself: token, batch entry and head of its K and V. PERF: notes lie in a ring of 8; that
  // of a key tile is there one tile ahead, before k_full of the tile before it, so that no consumer
  // waits for it. Row tiles lie in a ring of 4, written before q_full. Consumers and loader read
  // them again whenever they need them, which costs no registers.

  struct Shared {
    u32 base;
    JALI_DEVICE u32 q(i32 slot) const { return base + kQ + slot * kQBytes; }
    JALI_DEVICE u32 k(i32 stage) const { return base + kK + stage * kKBytes; }
    JALI_DEVICE u32 v(i32 stage) const { return base + kV + stage * kVBytes; }
    JALI_DEVICE u32 barrier(i32 n) const { return base + kBarriers + 8 * n; }
    JALI_DEVICE u32 q_full(i32 slot) const { return barrier(slot); }
    JALI_DEVICE u32 q_empty(i32 slot) const { return barrier(2 + slot); }
    JALI_DEVICE u32 k_full(i32 stage) const { return barrier(4 + stage); }
    JALI_DEVICE u32 k_empty(i32 stage) const { return barrier(8 + stage); }
    JALI_DEVICE u32 v_full(i32 stage) const { return barrier(12 + stage); }
    JALI_DEVICE u32 v_empty(i32 stage) const { return barrier(16 + stage); }
    JALI_DEVICE u32 cells_full(i32 slot) const { return barrier(20 + slot); }
    JALI_DEVICE u32 cells_empty(i32 slot) const { return barrier(24 + slot); }
    JALI_DEVICE u32 asked_full(i32 slot) const { return barrier(28 + slot); }
    JALI_DEVICE u32 asked_empty(i32 slot) const { return barrier(30 + slot); }
    JALI_DEVICE u32 cells(i32 slot) const { return base + kCells + slot * kCellBytes; }
    JALI_DEVICE u32 asked(i32 slot) const { return base + kAsked + slot * 32; }
    JALI_DEVICE u32 note(u32 n) const { return base + kNotes + n % 8 * 16; }
    JALI_DEVICE u32 num_keys(i32 n) const { return tile(n) + 16; }  // of a RowTile
    JALI_DEVICE u32 tile(i32 n) const { return base + kTiles + n % 4 * 32; }
  };

  /// A row tile: rows [row, row + kRows) of a sequence and head.
  struct RowTile {
    Frame f;
    i32 row;

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
  /// Row tile number `tile`, for a whole warp; behind the end of its sequence if row >= num_rows.
  JALI_DEVICE static RowTile row_tile(const ForwardArgs& a, i32 tile) {
    const i32 per_section = a.section * a.tiles_per_head;
    const i32 first = tile / per_section * a.section;
    const i32 heads = min_of(a.section, a.heads() - first);
    const i32 rest = tile % per_section;
    const i32 head = first + rest % heads;
    // The last rows come first: under a causal mask they are the longest.
    const i32 slot = a.tiles_per_head - 1 - rest / heads;
    if (!a.seq.varlen()) {
      return {frame_of(a.seq, head / a.seq.Hq, head % a.seq.Hq), slot * kRows};
    }
    const i32 b = warp_sequence_of(a.seq.cu_q, a.seq.B, slot, kRows);
    const Frame f = frame_of(a.seq, b, head);
    return {f, (slot - first_slot(f.q_start, b, kRows)) * kRows};
  }

  // ---- loader ---------------------------------------------------------------------------------
  struct Loader {
    const Shared& sm;
    const TensorMap &map_k, &map_v;
    u32 num_notes = 0, num_k = 0, num_v = 0;  // key tiles announced, whose K / V went out

    /// 64 columns at a time from the token, batch entry and head of note n.
    template <i32 kCopies, i32 kCopyKeys>
    JALI_DEVICE void load(u32 n, i32 skip, const TensorMap& map, u32 to, u32 full, u32 empty,
                          u32 parity) {
      barrier_wait(empty, parity ^ 1);
      barrier_expect(full, kCopies * kCopyKeys * kRowBytes);
      i32 note, token, b, h;
      load_shared(sm.note(n), note, token, b, h);
      token += skip;
#pragma unroll
      for (i32 c = 0; c < kCopies; ++c) {
        load_box(to + c * kCopyKeys * kRowBytes, map, full, 64 * c, token, h, b);
      }
    }
    JALI_DEVICE void load_v() {
#pragma unroll
      for (i32 i = 0; i < kVSplit; ++i) {
        const u32 n = num_v * kVSplit + i, stage = n % kVStages;
        load<kPartsV, kKeys / kVSplit>(num_v, i * (kKeys / kVSplit), map_v, sm.v(stage),
                                       sm.v_full(stage), sm.v_empty(stage), n / kVStages & 1);
      }
      ++num_v;
    }
    /// Announces a tile, then loads the one announced before: its K, and V of the one before that,
    /// which is the consumers' order.
    JALI_DEVICE void announce(i32 note, i32 token, i32 b, i32 h) {
      store_shared(sm.note(num_notes), note, token, b, h);
      if (num_notes > 0) {
        const u32 stage = num_k % kStages;
        load<kParts, kKeys>(num_k, 0, map_k, sm.k(stage), sm.k_full(stage), sm.k_empty(stage),
                            num_k / kStages & 1);
        if (num_k > 0) load_v();
        ++num_k;
      }
      ++num_notes;
    }
    JALI_DEVICE void finish() {
      announce(kEnd, 0, 0, 0);
      if (num_k == 0) {  // nothing at all: the consumers wait for the first K
        barrier_expect(sm.k_full(0), 0);
      } else {
        load_v();
      }
    }
  };

  /// A row tile whose rows see no key: zeros.
  JALI_DEVICE static void write_empty(const ForwardArgs& a, const RowTile& t, i32 lane) {
    const i32 rows = min_of(kRows, t.f.num_rows - t.row), parts = a.Dv / 8;
    const float lse = kOptions.sinks ? a.scores.sinks[t.f.h] : -infinity();
#pragma unroll 1
    for (i32 n = lane; n < rows * parts; n += 32) {
      u16* out = static_cast<u16*>(a.out) + t.out(a, t.row + n / parts) + n % parts * 8;
      *reinterpret_cast<uint4*>(out) = uint4{0, 0, 0, 0};
    }
#pragma unroll 1
    for (i32 r = lane; r < rows; r += 32) a.lse[t.lse(a, t.row + r)] = lse;
  }

  /// Q of a row tile, and the tile itself for the consumers.
  JALI_DEVICE static void load_q(const ForwardArgs& a, const Shared& sm, const TensorMap& map,
                                 const RowTile& t, i32 b, i32 opened) {
    const i32 slot = opened % kSlots;
    barrier_wait(sm.q_empty(slot), (opened / kSlots & 1) ^ 1);
    t.store(sm.tile(opened));
    barrier_expect(sm.q_full(slot), kQBytes);
    for (i32 wg = 0; wg < kConsumers; ++wg) {
      for (i32 part = 0; part < kParts; ++part) {
        load_box(sm.q(slot) + (wg * kParts + part) * 64 * kRowBytes, map, sm.q_full(slot),
                 64 * part, t.f.q_start + t.row + 64 * wg, t.f.h, b);
      }
    }
  }

  /// The active key tiles of a row tile, the last one first, 32 classified at a time.
  template <class Visit>
  JALI_DEVICE static void classify_and_visit(const M& mask, const RowTile& t, i32 lane,
                                             Visit visit) {
    const i32 row_end = min_of(t.row + kRows, t.f.num_rows), num_keys = t.f.num_keys;
    const typename M::RowBlock rows = mask.rows(t.f, t.row, row_end);
    const Span span = mask.key_span(t.f, rows);
    const i32 begin = max_of(span.begin, 0) / kKeys;
#pragma unroll 1
    for (i32 end = ceil_div(min_of(span.end, num_keys), kKeys); end > begin; end -= 32) {
      const i32 c = end - 1 - lane;  // lane 0 has the last one
      Tile cls = Tile::kEmpty;
      if (c >= begin) {
        const i32 key_end = min_of((c + 1) * kKeys, num_keys);
        cls = mask.classify(t.f, rows, mask.cols(t.f, c * kKeys, key_end));
        // A tile that hangs over the end has columns to hide.
        if (cls == Tile::kFull && (c + 1) * kKeys > num_keys) cls = Tile::kPartial;
      }
      u32 active = __ballot_sync(0xffffffffu, cls != Tile::kEmpty);
      const u32 partial = __ballot_sync(0xffffffffu, cls == Tile::kPartial);
#pragma unroll 1
      while (active) {
        const i32 n = __ffs(active) - 1;
        active &= active - 1;
        visit(end - 1 - n, partial >> n & 1);
      }
    }
  }

  /// visit(index, partial) of the active key tiles of a row tile, the last one first.
  template <class Visit>
  JALI_DEVICE static void visit_tiles(const ForwardArgs& a, const M& mask, const RowTile& t,
                                      i32 lane, Visit visit) {
    if constexpr (kHeavy) {
      const i32 line = a.seq.varlen() ? first_slot(t.f.q_start, t.f.b, kRows) : 0;
      const i32 words = ceil_div(t.f.num_keys, 32 * kKeys);
      for_each_active<true>(a.map.line(t.f, line + t.row / kRows), words, visit);
    } else {
      classify_and_visit(mask, t, lane, visit);
    }
  }

  /// Tells the finders of row tile number `tile` (none: they are done); the loader reads it, too.
  JALI_DEVICE static void ask(const ForwardArgs& a, const Shared& sm, i32 tile, u32 n, i32 lane) {
    const RowTile t = tile < a.num_tiles ? row_tile(a, tile) : RowTile{{-1}};
    if (lane == 0) {
      barrier_wait(sm.asked_empty(n % 2), (n / 2 & 1) ^ 1);
      t.store(sm.asked(n % 2));
      barrier_arrive(sm.asked_full(n % 2));
    }
    __syncwarp();
  }

  JALI_DEVICE static void produce(const ForwardArgs& a, const M& mask, const Shared& sm,
                                  const TensorMap& map_q, const TensorMap& map_k,
                                  const TensorMap& map_v) {
    const i32 lane = opaque(threadIdx.x & 31);
    const bool varlen = a.seq.varlen();
    Loader loader{sm, map_k, map_v};
    i32 opened = 0;  // row tiles with at least one active key tile
    i32 tile = blockIdx.x;
    u32 num_asked = 0;
    if constexpr (kHeavy) ask(a, sm, tile, num_asked++, lane);
#pragma unroll 1
    while (tile < a.num_tiles) {
      i32 next = 0;
      if (lane == 0) next = gridDim.x + atomicAdd(a.counter, 1);
      const u32 own = sm.asked((num_asked - 1) % 2);
      const RowTile t = kHeavy ? RowTile::load(own) : row_tile(a, tile);
      // PERF: finders hear of the next row tile as soon as this one is under way.
      bool asked = !kHeavy;
      auto ask_next = [&] {
        if (!asked) ask(a, sm, broadcast(next), num_asked++, lane);
        asked = true;
      };
      if (t.row < t.f.num_rows) {
        bool first = true;
        auto visit = [&](i32 index, bool partial) {
          if (lane == 0) {
            // PERF: read again, since registers are few.
            const RowTile now = kHeavy ? RowTile::load(own) : t;
            const i32 b = varlen ? 0 : now.f.b;
            const i32 note = index << 3 | (first ? kFirst : 0) | (partial ? kPartial : 0);
            // Q after the announcement: it sends off the last key tile of the row tile before,
            // without which the consumers may never free Q's slot.
            loader.announce(note, now.f.k_start + index * kKeys, b, now.f.h / a.seq.group);
            if (first) load_q(a, sm, map_q, now, b, opened);
          }
          if (first) ++opened;
          first = false;
          ask_next();
        };
        visit_tiles(a, mask, t, lane, visit);
        if (first) write_empty(a, kHeavy ? RowTile::load(own) : t, lane);
      }
      ask_next();
      tile = broadcast(next);
    }
    if (lane == 0) {
      loader.finish();
      leave(a.counter);
    }
  }

  // ---- finders --------------------------------------------------------------------------------
  /// The cells of partial tiles, as bits [row][key]. PERF: where consumers looked them up, a partial
  /// tile took three times as long as a full one, mostly waiting: 12 documents, causal, 8K: 396 us,
  /// so 252.
  JALI_DEVICE static void find_cells(const ForwardArgs& a, const M& mask, const Shared& sm) {
    const i32 lane = threadIdx.x & 31;
    u32 found = 0;
#pragma unroll 1
    for (u32 n = 0;; ++n) {
      const u32 asked = n % 2;
      barrier_wait(sm.asked_full(asked), n / 2 & 1);
      const RowTile t = RowTile::load(sm.asked(asked));
      if (t.f.b < 0) break;
      auto visit = [&](i32 index, bool partial) {
        if (!partial) return;
        const u32 slot = found % kCellSlots;
        barrier_wait(sm.cells_empty(slot), (found / kCellSlots & 1) ^ 1);
        auto tile = [&] {
          const RowTile of = RowTile::load(sm.asked(asked));
          return tile::TileAt{of.f, of.row, index * kKeys};
        };
        tile::find_cells<kRows, kKeys, false, kFinders, kLookupBytes>(mask, tile, sm.cells(slot));
        __syncwarp();
        barrier_arrive_if(sm.cells_full(slot), lane == 0);
        ++found;
      };
      if (t.row < t.f.num_rows) visit_tiles(a, mask, t, lane, visit);
      __syncwarp();
      barrier_arrive_if(sm.asked_empty(asked), lane == 0);
    }
  }

  // ---- consumers ------------------------------------------------------------------------------
  struct Consumer {
    const ForwardArgs& a;
    const M& mask;
    const Shared& sm;
    i32 wg, lane;
    u64 seed;  // of dropout

    u32 count = 0;           // key tiles whose S was made
    u32 hidden = 0;          // those with hidden cells, if these are looked up
    i32 opened = 0;          // row tiles
    i32 note = 0, next = 0;  // the key tile and the one after it

    float s[kKeys / 2], o[kDv / 2];
    u32 p[kKeys / 4];
    u32 kept[kKeys / 16];  // dropout_bits of 32 keys: [keys / 32][2 rows]
    tile::RowState state;
    float shift[2], rescale[2];

    /// Waits for K number `count`. From then on the note of the tile after it can be read.
    JALI_DEVICE void wait_k() { barrier_wait(sm.k_full(count % kStages), count / kStages & 1); }
    JALI_DEVICE i32 read_note(u32 n) { return broadcast(load_shared(sm.note(n))); }
    /// Waits for the next Q.
    JALI_DEVICE void begin_row_tile() {
      barrier_wait(sm.q_full(opened % kSlots), opened / kSlots & 1);
      ++opened;
    }
    /// The row of the row tile that this thread's first row is.
    JALI_DEVICE i32 row() { return (threadIdx.x - 128) / 32 * 16 + (lane >> 2); }
    /// Of the scores in s, to units of log2(e).
    JALI_DEVICE float scale() { return kOptions.adjusts() ? 1.0f : a.scores.scale * kLog2E; }
    JALI_DEVICE RowTile row_tile() { return RowTile::load(sm.tile(opened - 1)); }
    JALI_DEVICE i32 first_key() { return (note >> 3) * kKeys; }
    /// The first key of this thread in the accumulators' block j of 8 keys.
    JALI_DEVICE i32 key_of(i32 j) { return first_key() + 8 * j + 2 * (lane & 3); }

    JALI_DEVICE void multiply_qk(i32 slot, i32 stage) {
      const u32 q = descriptor(sm.q(slot) + wg * (kQBytes / kConsumers), 16);
      const u32 k = descriptor(sm.k(stage), 16);
#pragma unroll
      for (i32 t = 0; t < kD / 16; ++t) {
        Wgmma<T, kKeys, false>::ss(s, q + t / 4 * (64 * kRowBytes / 16) + t % 4 * 2,
                                   k + t / 4 * (kKeys * kRowBytes / 16) + t % 4 * 2, t > 0);
      }
    }
    /// O += P V of key tile n, as soon as V is there.
    JALI_DEVICE void multiply_pv(u32 n) {
      constexpr i32 kSteps = kKeys / kVSplit / 16;
#pragma unroll
      for (i32 i = 0; i < kVSplit; ++i) {
        const u32 at = n * kVSplit + i, stage = at % kVStages;
        barrier_wait(sm.v_full(stage), at / kVStages & 1);
        const u32 v = descriptor(sm.v(stage), kKeys / kVSplit * kRowBytes);
        wgmma_fence();
#pragma unroll
        for (i32 t = 0; t < kSteps; ++t) {
          Wgmma<T, kDv, true>::rs(o, p + 4 * (i * kSteps + t), v + t * (16 * kRowBytes / 16), 1);
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
        barrier_arrive_if(sm.v_empty((n * kVSplit + i) % kVStages), lane == 0);
      }
    }
    /// The tensor cores have read K, and Q for the last time if the next key tile needs another.
    JALI_DEVICE void free_k(i32 stage) {
      barrier_arrive_if(sm.k_empty(stage), lane == 0);
      barrier_arrive_if(sm.q_empty((opened - 1) % kSlots),
                        lane == 0 && (next & (kFirst | kEnd)) != 0);
    }

    /// Products to scores.
    JALI_DEVICE void adjust() {
      const RowTile t = row_tile();
      const Scores<T, kOptions> scores(a.scores, t.f);
      const i32 i0 = t.row + row();
      const i64 bias[2] = {scores.bias_row(i0), scores.bias_row(i0 + 8)};
#pragma unroll
      for (i32 j = 0; j < kKeys / 8; ++j) {
        const i32 key = key_of(j);
        // PERF: no load moves across; ptxas would load for the whole tile at once, and spill.
        if (kOptions.loads() && j % 4 == 0) __syncwarp();
        const float shared[2] = {scores.key_bias(key), scores.key_bias(key + 1)};
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          float added[2] = {shared[0], shared[1]}, steepness;
          scores.add_bias(bias[e], key, added);
#pragma unroll
          for (i32 x = 0; x < 2; ++x) {
            float& at = s[4 * j + 2 * e + x];
            at = scores.score(at, added[x], i0 + 8 * e, key + x, steepness);
          }
        }
      }
    }
    /// Cells of a partial tile that are not visible get a score of -infinity.
    JALI_DEVICE void hide() {
      tile::VisibleBits<kGroups> bits;
      if constexpr (kHeavy) {
        const u32 slot = hidden % kCellSlots;
        barrier_wait(sm.cells_full(slot), hidden / kCellSlots & 1);
        bits.load(sm.cells(slot) + row() * (4 * kGroups));
        __syncwarp();
        barrier_arrive_if(sm.cells_empty(slot), lane == 0);
        ++hidden;
      } else {
        const RowTile t = row_tile();
        bits.look_up(mask, t.f, t.row + row(), first_key());
      }
      bits.shift(lane);
      bits.cut(load_shared(sm.num_keys(opened - 1)) - first_key() - 2 * (lane & 3));
      bits.hide(s, -infinity());
    }
    /// Draws the numbers of dropout for the key tile.
    JALI_DEVICE void draw() {
      if constexpr (kOptions.dropout) {
        const RowTile t = row_tile();
#pragma unroll
        for (i32 n = 0; n < kKeys / 16; ++n) {
          kept[n] = dropout_bits(seed, a.scores.dropout_threshold, t.f, t.row + row() + 8 * (n % 2),
                                 first_key() + 32 * (n / 2));
        }
      }
    }
    JALI_DEVICE void drop() {
      if constexpr (kOptions.dropout) {
#pragma unroll
        for (i32 n = 0; n < kKeys / 16; ++n) {
#pragma unroll
          for (i32 c = 0; c < 8; ++c) {
            float& at = s[16 * (n / 2) + 4 * (c / 2) + 2 * (n % 2) + c % 2];
            at = kept[n] >> c & 1 ? at : 0.0f;
          }
        }
      }
    }

    /// Out and LSE straight from registers: a 4 x 4 transpose in a quad, 16 bytes a lane.
    JALI_DEVICE void store(const RowTile& t, const tile::RowState& end) {
      const i32 quad = lane & 3;
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        float total = end.sum[e] + shuffle_xor(end.sum[e], 1);
        total += shuffle_xor(total, 2);
        float top = end.max[e] * scale(), factor = 1;
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
        const float inverse = total == 0.0f ? 0.0f : __fdividef(factor, total);
        const i32 r = t.row + row() + 8 * e;
        const bool in = r < t.f.num_rows;
        u16* out = static_cast<u16*>(a.out) + t.out(a, r) + quad * 8;
#pragma unroll
        for (i32 g = 0; g < kDv / 32; ++g) {
          u32 w[4];
#pragma unroll
          for (i32 x = 0; x < 4; ++x) {
            w[x] = T::pack(o[16 * g + 4 * x + 2 * e] * inverse,
                           o[16 * g + 4 * x + 2 * e + 1] * inverse);
          }
          transpose_quad(w, quad);
          asm volatile(
              "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
              "@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(out + 32 * g),
              "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]),
              "r"(static_cast<i32>(in & (32 * g + 8 * quad < a.Dv)))
              : "memory");
        }
        const float lse = total == 0.0f ? -infinity() : (top + log2_fast(total)) * kLn2;
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}" ::"l"(
                         a.lse + t.lse(a, r)),
                     "f"(lse), "r"(static_cast<i32>(in & (quad == 0)))
                     : "memory");
      }
    }

    /// Takes the maxima of S into the state, and begins with the weights. PERF: ptxas mixes the
    /// exponentials of the first row with the maxima of the second, which other units compute.
    template <bool kOpens, bool kHides>
    JALI_DEVICE void begin_weights(float (&total)[4]) {
      tile::take_maximum<0, kOpens, kHides>(s, scale(), state, shift, rescale);
      tile::exponentials<0, 0, kEarly>(s, scale(), shift, total);
      tile::take_maximum<1, kOpens, kHides>(s, scale(), state, shift, rescale);
    }
    /// S to P. Leaves O to be rescaled.
    template <bool kOpens>
    JALI_DEVICE void end_weights(float (&total)[4]) {
      tile::exponentials<0, kEarly, kKeys / 8>(s, scale(), shift, total);
      tile::exponentials<1, 0, kKeys / 8>(s, scale(), shift, total);
      tile::add_sums<kOpens>(state, rescale, total);
      drop();
      tile::to_operand<T>(s, p);
    }
    JALI_DEVICE void clear_output() {
#pragma unroll
      for (i32 n = 0; n < kDv / 2; ++n) o[n] = 0.0f;
    }
    JALI_DEVICE void close_row_tile(i32 n, const tile::RowState& end) {
      store(RowTile::load(sm.tile(n)), end);
      clear_output();
    }

    /// The very first S, which has no P V to run beside.
    JALI_DEVICE void open() {
      begin_row_tile();
      tie(s);
      wgmma_fence();
      multiply_qk(0, 0);
      wgmma_commit();
      next = read_note(1);
      draw();
      wgmma_wait<0>();
      tie(s);
      free_k(0);
      if (kOptions.adjusts()) adjust();
      if (note & kPartial) hide();
      float total[4] = {0, 0, 0, 0};
      begin_weights<true, true>(total);
      end_weights<true>(total);
      clear_output();
      count = 1;
    }

    /// S of this key tile in flight with O += P V of the last one. kOpens: this key tile opens a row
    /// tile, and the last one closed the row tile before. kHides: this key tile is partial.
    /// PERF: both are templates, since a branch while WGMMAs are in flight costs 6 %.
    template <bool kOpens, bool kHides>
    JALI_DEVICE void step() {
      const u32 stage = count % kStages;
      note = next;
      wait_k();
      if (kOpens) begin_row_tile();
      const i32 slot = (opened - 1) % kSlots;
      if (kShape.turns) named_sync(1 + wg, 256);
      tie(p);
      tie(o);
      tie(s);
      wgmma_fence();
      multiply_qk(slot, stage);
      wgmma_commit();
      multiply_pv(count - 1);
      if (kShape.turns) named_arrive(wg == kConsumers - 1 ? 1 : 2 + wg, 256);
      next = read_note(count + 1);  // PERF: beside the MMAs, not before them
      draw();
      wgmma_wait<1>();
      tie(s);
      free_k(stage);
      // No P V beside work that needs P's registers.
      constexpr bool kTight = kDv > 192 && (kHides || kOptions.per_cell());
      if (kTight) finish_pv(count - 1);
      if (kTight && kOpens) close_row_tile(opened - 2, state);
      if (kOptions.adjusts()) adjust();
      if (kHides) hide();
      const tile::RowState before = state;
      float total[4] = {0, 0, 0, 0};
      begin_weights<kOpens, kHides || kOptions.adjusts()>(total);
      if (kEarly > 0) pin(total[0] + total[1], sm.base + kBarriers);
      if (!kTight) finish_pv(count - 1);
      end_weights<kOpens>(total);
      if (kOpens) {
        if (!kTight) close_row_tile(opened - 2, before);
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
      tie(p);
      tie(o);
      multiply_pv(count - 1);
      wgmma_wait<0>();
      tie(o);
      store(row_tile(), state);
    }
  };

  JALI_DEVICE static void consume(const ForwardArgs& a, const M& mask, const Shared& sm, i32 wg) {
    Consumer c{a, mask, sm, wg, static_cast<i32>(threadIdx.x & 31)};
    if constexpr (kOptions.dropout) c.seed = *a.scores.seed;
    if (kShape.turns && wg == 0) named_arrive(1, 256);
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

  JALI_DEVICE static void run(const TensorMap& map_q, const TensorMap& map_k,
                              const TensorMap& map_v, const ForwardArgs& a, const M& mask) {
    extern __shared__ char raw[];
    const Shared sm{(shared_address(raw) + 1023) & ~1023u};
    const i32 wg = broadcast(threadIdx.x >> 7);
    if (threadIdx.x == 0) {
      for (i32 n = 0; n < kSlots; ++n) {
        barrier_init(sm.q_full(n), 1);
        barrier_init(sm.q_empty(n), 4 * kConsumers);
      }
      for (i32 n = 0; n < kStages; ++n) {
        barrier_init(sm.k_full(n), 1);
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
      for (i32 n = 0; n < 2; ++n) {
        barrier_init(sm.asked_full(n), 1);
        barrier_init(sm.asked_empty(n), kFinders);
      }
      barrier_init_fence();
    }
    __syncthreads();
    if (wg == 0) {
      give_registers<kShape.loader_registers>();
      if (threadIdx.x < 32) {
        produce(a, mask, sm, map_q, map_k, map_v);
      } else if constexpr (kHeavy) {
        find_cells(a, mask, sm);
      }
    } else {
      take_registers<kShape.consumer_registers>();
      consume(a, mask, sm, wg - 1);
    }
  }
};

}  // namespace jali::cuda
#endif
