// Forward, sm_90a: tiles from an inline source, D and Dv up to 256.
//
// Serves    fp16, bf16; GQA; padded and packed (varlen) layouts; any mask of closed-form leaves or
//           stored blocks; softcap, biases, ALiBi, sinks, dropout. kD and kDv: D and Dv rounded up
//           to multiples of 32.
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
//           across row tiles too. Three take turns at the tensor cores, under a light mask two, too.
// Options   what keys add, a bias of theirs or ALiBi, the tensor cores add to S; all else consumers do
//           when S is there. What each costs: docs/performance.md.
// Shared    Q slots, K and V stages, each [dim / 64][rows][64]; what is found of the mask; what keys
//           add; a bias over rows and keys, of which a consumer warp copies its rows; out on its way to
//           whole rows, where there is room; notes of key tiles, and the row tiles they belong to.
// Barriers  q_full, k_full, v_full: 1 arrival + bytes, by the loader (k_full: each finder warp, too, if
//           keys add something); q_empty, k_empty, v_empty: one arrival a consumer warp, when the tensor
//           cores have read the slot. note_full: 1, by the planner; note_empty: the loader and, if they
//           find anything, each finder warp; consumers need not arrive (Loader::run). cells_full: one a
//           finder warp; cells_empty: one a consumer warp.
// Here      for host and kernel: ForwardShape, forward_shape, forward_section, ForwardArgs; Forward:
//           Shared, RowTile, plan, Loader, find, Consumer and consume, run.
#pragma once

#include "cuda/kernel/limits.h"
#include "cuda/kernel/sequences.h"
#include "cuda/kernel/tile_map.h"
#include "cuda/kernel/work_order.h"
#include "cuda/tile/scores.h"

namespace jali::cuda {

/// What a mask may say of a row: of a heavy one a bit for each of 128 keys, of a light one its numbers.
constexpr i32 kHeavyRowBytes = 16, kLightRowBytes = 32;

/// How a kernel divides its work. Every constant here is one that the host needs, too.
struct ForwardShape {
  i32 warpgroups = 2;  // consumers, 64 rows each
  i32 keys = 128;      // of a key tile, a multiple of 64
  i32 slots = 2;       // of Q
  i32 stages = 2;      // of K
  i32 v_split = 1;     // a V stage holds keys / v_split keys
  i32 v_stages = 2;
  i32 cells = 0;        // slots for what a mask says of a tile's rows,
  i32 row_bytes = 0;    // so much of each
  i32 added_bytes = 0;  // added_bytes()
  bool bias = false;    // one over rows and keys goes by way of shared memory
  i32 boxes = 0;  // of out that a warp has in shared memory; none: out is stored from registers
  bool turns = false;   // consumers take turns at the tensor cores
  bool q_held = false;  // Q is copied to registers when a row tile opens
  i32 early = 0;        // blocks of 8 keys with exponentials before the wait for P V
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
  constexpr i32 cell_bytes() const { return cells * rows() * row_bytes; }
  constexpr i32 bias_bytes() const { return bias ? 2 * rows() * keys : 0; }
  static constexpr i32 kBoxBytes = 2048;  // 64 columns of a warp's 16 rows
  constexpr i32 staged_bytes() const { return rows() / 16 * boxes * kBoxBytes; }
  /// Dynamic shared memory: tiles, barriers and notes, and room to align the base to 1024.
  constexpr i32 shared_bytes(i32 D, i32 Dv) const {
    return tile_bytes(D, Dv) + cell_bytes() + added_bytes + bias_bytes() + staged_bytes() + 1024 +
           1024;
  }
  constexpr bool fits(i32 D, i32 Dv) const {
    return shared_bytes(D, Dv) <= kMostSharedBytes && keys * 3 / 4 + Dv / 2 <= 192;
  }
};
/// What a mask asks of a kernel: nothing; leaves that are all light (mask/leaf.h) and together have
/// few numbers a row, of which consumers make bits themselves, and whose tiles the planner classifies
/// or reads from a map; or more, which others look up for them.
enum class MaskKind : u8 { kNone, kLight, kMapped, kHeavy };
JALI_HD constexpr bool has_map(MaskKind mask) { return mask >= MaskKind::kMapped; }

/// Whether the tensor cores can add to S what keys add to it, a bias of theirs or ALiBi (find_added); they
/// do where shared memory has room for it.
/// PERF: where consumers added it, or S began at it, D128 took 1.24 times as long as without.
JALI_HD constexpr bool multiplies_added(ScoreOptions options) {
  return (options.key_bias != BiasType::kNone || options.alibi) && !options.softcap &&
         !options.any_scale;
}
/// Key tiles whose bias is in shared memory where consumers add it: theirs, two more whose K is there or
/// loaded, and one more.
constexpr i32 kKeyBiasSlots = 4;
/// Of 64 keys, a matrix of 16 rows that is multiplied.
constexpr i32 kAddedMatrixBytes = 2048;
/// Shared memory for what keys add: matrices for each stage of K, or a float a key.
JALI_HD constexpr i32 added_bytes(ScoreOptions options, i32 stages, i32 keys) {
  if (multiplies_added(options)) return stages * (keys / 64) * kAddedMatrixBytes;
  return options.key_bias != BiasType::kNone ? 4 * kKeyBiasSlots * keys : 0;
}

/// The shape for kD and kDv, multiples of 32 up to 256. PERF: TFLOP/s on one H200, 16K tokens.
constexpr ForwardShape forward_shape(i32 kD, i32 kDv, ScoreOptions options, MaskKind mask) {
  ForwardShape s;
  const bool bias = options.bias != BiasType::kNone;
  const bool of_keys = options.key_bias != BiasType::kNone;
  const bool lean = !options.per_cell();  // few registers beside the tiles
  // Beside a mask, what 160 registers do not hold.
  const bool many =
      (options.alibi || options.softcap || options.any_scale) && mask != MaskKind::kNone;
  if (kD == 64 && kDv == 64 && lean && !many && !has_map(mask)) {
    s.warpgroups = 3;  // 517, with two 460
    s.turns = true;
    s.loader_registers = 32;
    s.consumer_registers = 160;
  }
  // Or two may fall into step, and then wait for the tensor cores together. PERF: causal D96 2.28, not
  // 2.65 million cycles, D128 1K 2 % less time; dense D128 4 % more, random blocks 3 %, D192 and D256 as much.
  if (mask == MaskKind::kLight && kD > 64 && kD <= 128 && kDv <= 128 && lean && !many) {
    s.turns = true;
    // One slot is enough then, and there is room for all boxes of out. PERF: causal D128 16K 2 % less time, 12
    // documents 32K 2 %, windows as much; dense as much, too.
    s.q_held = true;
    s.slots = 1;
  }
  // 1K tokens: 549, without 534; a window of 1024: 2 % faster.
  if (mask != MaskKind::kHeavy && kD == 128 && !bias) s.early = 4;
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
  s.added_bytes = added_bytes(options, s.stages, s.keys);
  // Out is staged where shared memory is left, and registers.
  auto with_staging = [&](ForwardShape shape) {
    if (shape.warpgroups == 3 && options.softcap) return shape;
    shape.boxes = ceil_div(kDv, 64);
    while (shape.boxes > 0 && !shape.fits(kD, kDv)) --shape.boxes;
    return shape;
  };
  if (!s.fits(kD, kDv)) s.slots = 1;
  if (s.fits(kD, kDv)) return with_staging(s);
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

/// What differs from call to call; passed by value.
struct ForwardArgs {
  Sequences seq;
  ScoreArgs scores;
  i32 D, Dv;           // at most kD and kDv, multiples of 8
  i32 heads;           // B · Hq; varlen: Hq
  i32 num_tiles;       // row tiles of all heads: tiles_per_head · heads
  i32 num_blocks;      // launched; they begin with the first row tiles
  i32 tiles_per_head;  // num_tiles() of call.h
  i32 section;         // forward_section()
  i32 last;            // heads_by_length(), at least a section, whole groups
  TileMap map;         // of row tiles, if has_map()
  i32* counter;        // [0] row tiles taken, [1] blocks done; zero before and after
  const void *q, *k;   // of score_again()
  Strides q_strides, k_strides;
  void* out;   // [b, h, l, Dv]; packed: [h, token, Dv] with stride_b 0
  float* lse;  // [b, h, l]
  i64 out_stride_b, out_stride_h, out_stride_l;  // elements
  i64 lse_stride_b, lse_stride_h, lse_stride_l;
};

}  // namespace jali::cuda

#if defined(__CUDACC_RTC__)
#include "cuda/ptx/bulk.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/matrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/shared.h"
#include "cuda/tile/cell_finder.h"
#include "cuda/tile/forward_scores.h"
#include "cuda/tile/no_mask.h"
#include "cuda/tile/softmax.h"
#include "cuda/tile/store.h"
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
  static constexpr bool kMasked = kMask != MaskKind::kNone, kHeavy = kMask == MaskKind::kHeavy;
  static constexpr bool kByRows = kMasked && !kHeavy;
  static constexpr i32 kFinders = 2, kGroups = kKeys / 32;  // warps; words of a row of cells
  static constexpr i32 kFinderBarrier = 4;                  // 1 to 3: turns
  static constexpr i32 kCellSlots = kShape.cells, kCellBytes = kRows * kShape.row_bytes;
  // NOTE: while the planner writes a row tile, consumers are at most 9 notes behind, and read the row
  // tile before theirs, too. Each has a note or more: 11 slots would do.
  static constexpr i32 kNoteSlots = 8, kTileSlots = 16;
  static constexpr i32 kCells = kV + kVStages * kVBytes;
  static constexpr i32 kAdded = kCells + kCellSlots * kCellBytes;
  static constexpr i32 kBiasAt = kAdded + kShape.added_bytes;
  static constexpr i32 kStaged = kBiasAt + kShape.bias_bytes();
  static constexpr i32 kBarriers = kStaged + kShape.staged_bytes();
  static constexpr i32 kNotes = kBarriers + 320, kTiles = kNotes + kNoteSlots * 16,
                       kSlopes = kTiles + kTileSlots * 32;
  static_assert(kShape.loader_registers + kConsumers * kShape.consumer_registers <=
                65536 / kShape.threads() / 8 * 8 * (1 + kConsumers));
  static_assert(kStaged % 1024 == 0 && kShape.kBoxBytes == tile::kStagedBytes);
  static_assert(kKeys % 64 == 0 && kStages == 2 && kVStages <= 4 && kSlots <= 2);
  static_assert(kCellSlots <= 4 && kMasked == (kCellSlots > 0));
  static_assert(!kByRows || sizeof(typename M::Row) <= kLightRowBytes);
  static_assert(kSlopes + kStages * 8 + 1024 <= kShape.shared_bytes(kD, kDv));

  // PERF: without maxima all of the first row's, where registers hold them.
  static constexpr i32 kEarly = kOptions.bounded && kConsumers < 3 ? kKeys / 8 : kShape.early;
  static constexpr bool kQHeld = kShape.q_held;
  static constexpr bool kBias = kOptions.bias != BiasType::kNone,
                        kKeyBias = kOptions.key_bias != BiasType::kNone;
  static constexpr bool kMultiplies = multiplies_added(kOptions) && kShape.added_bytes > 0;
  // ALiBi is linear in the key but for the diagonal: slope (key - first row of the tile) before it, the
  // same less behind it. What is left depends on the row alone (row_added), and rows are measured with
  // slope (row - first row) added, which softmax does not see.
  static constexpr bool kLinear = kMultiplies && kOptions.alibi;
  static constexpr bool kOfKeys = kMultiplies || kKeyBias;
  static constexpr bool kFinds = kMasked || kOfKeys;
  // A bias of keys that consumers add is loaded beside S, if it fits there.
  static constexpr bool kKeysEarly = kKeyBias && !kMultiplies && kDv < 192;
  static constexpr bool kKeysLate = kKeyBias && !kMultiplies && !kKeysEarly;
  static_assert(kAdded % 1024 == 0 && kKeys <= 64 * kFinders);
  // prepare() comes behind the MMAs. PERF: not the loads of a bias over rows and keys, which are late.
  static constexpr bool kHoldsBack = (kOptions.alibi && !kLinear) || kKeysEarly || kOptions.dropout;
  // PERF: tanh takes the exponentials' units, but instructions are dear, too: D64 1.57, 1.59, 1.66 times
  // the time without for 2, 1, 0 of 8; D128 1.38, 1.36, 1.24.
  static constexpr i32 kPolynomials = kOptions.softcap && kDv <= 64 ? 2 : 0;

  // Consumers guess that full tiles bring no new maxima: they do not look for any, and make S again
  // where sums of weights say that the guess was wrong (guess_weights). Not where that takes more than S
  // and what is added for keys, or registers that three warpgroups lack. PERF: D128 7 % less time, D64
  // 7 %, ALiBi 21 %, since its maxima come first; D256 as much, softcap 2 % more, dropout 9 %. Partial
  // tiles, too: windows 8 % more.
  static constexpr bool kGuesses = kDv <= 128 && kKeyBias <= kMultiplies &&
                                   !(kConsumers == 3 && kMasked) &&
                                   !(kBias || kOptions.any_scale || kOptions.softcap ||
                                     kOptions.alibi > kLinear || kOptions.dropout);

  // What the planner notes of a key tile: its index times 8, and
  static constexpr i32 kFirst = 1, kPartial = 2, kEnd = 4;
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
    JALI_DEVICE u32 added(u32 n) const {
      return base + kAdded +
             (kMultiplies ? n % kStages * (kKeys / 64 * kAddedMatrixBytes)
                          : n % kKeyBiasSlots * (4 * kKeys));
    }
    /// What a row of tile n adds for each row before it in its tile; what cells add for their distance.
    JALI_DEVICE u32 slopes(u32 n) const { return base + kSlopes + n % kStages * 8; }
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
  /// Row tile number `tile`, for a whole warp; behind the end of its sequence if row >= num_rows.
  JALI_DEVICE static RowTile row_tile(const ForwardArgs& a, i32 tile) {
    // The last rows come first: under a causal mask they are the longest.
    constexpr bool kMapped = has_map(kMask);
    const WorkOrder order{a.heads,
                          a.section,
                          a.tiles_per_head,
                          true,
                          kMapped ? a.map.long_lines : nullptr,
                          kMapped ? a.map.by_length : nullptr,
                          a.last};
    const WorkOrder::Place at = order.place(tile);
    const i32 head = at.head, slot = at.unit;
    const i32 b = head / a.seq.Hq;
    const TilePlace place = warp_tile(a.seq, b, head - b * a.seq.Hq, slot, kRows, true);
    return {place.f, place.first};
  }

  // ---- planner --------------------------------------------------------------------------------
  /// Zeros for the rows of a tile that see no key: all, unless `any` key tile is active, and tokens behind
  /// the last piece, which are no rows at all where they are packed.
  JALI_DEVICE static void write_empty(const ForwardArgs& a, const RowTile& t, bool any, i32 lane) {
    const i32 last = end_with_tail(a.seq, t.f.b, t.f.q_start + t.f.num_rows, true);
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

  /// The same by a map, if there is one. tile: where the row tile lies in shared memory.
  template <class Visit>
  JALI_DEVICE static void visit_tiles(const ForwardArgs& a, const M& mask, u32 tile, i32 lane,
                                      Visit visit) {
    if constexpr (has_map(kMask)) {
      const RowTile t = RowTile::load(tile);
      const i32 line = a.seq.varlen() ? first_slot(t.f.q_start, t.f.b, kRows) : 0;
      const i32 words = ceil_div(t.f.num_keys, 32 * kKeys);
      for_each_word<true>(a.map.line(t.f, line + t.row / kRows), words,
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
      {
        const RowTile t = row_tile(a, tile);
        if (lane == 0) t.store(own);
        __syncwarp();
      }
      if (lane == 0) tile = atomicAdd(a.counter, 1) + a.num_blocks;
      bool any = false;  // key tile is active
      if (RowTile::load(own).has_rows()) {
        auto visit = [&](i32 index, bool active, bool partial) {
          if constexpr (kLinear) {
            partial |= RowTile::load(own).side(index * kKeys) == Side::kAcross;
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
              const BoxPlace keys =
                  box_place(a.seq, t.f.b, t.f.k_start, t.f.num_keys, index * kKeys);
              note(num_notes + before,
                   index << 3 | (any || before > 0 ? 0 : kFirst) | (partial ? kPartial : 0),
                   keys.token, keys.b, t.f.h / a.seq.group);
            }
            const u32 noted = __ballot_sync(0xffffffffu, now);
            left ^= noted;
            num_notes += __popc(noted);
            any = true;
          }
        };
        visit_tiles(a, mask, own, lane, visit);
      }
      write_empty(a, RowTile::load(own), any, lane);
      opened += any;
      tile = broadcast(tile);
    }
    if (lane == 0) {
      note(num_notes, kEnd, 0, 0, 0);
      leave(a.counter);
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
                 from.b, box_end(a.seq));
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
      const BoxPlace at = box_place(a.seq, t.f.b, t.f.q_start, t.f.num_rows, t.row);
      barrier_expect(sm.q_full(slot), kQBytes);
      for (i32 wg = 0; wg < kConsumers; ++wg) {
        for (i32 part = 0; part < kParts; ++part) {
          load_box(sm.q(slot) + (wg * kParts + part) * 64 * kRowBytes, map_q, sm.q_full(slot),
                   64 * part, at.token + 64 * wg, t.f.h, at.b, box_end(a.seq));
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
            return tile::TileAt{t.f, t.row, (note >> 3) * kKeys};
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
      if constexpr (kOfKeys) find_added(a, sm, of_tile, n, (note >> 3) * kKeys);
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
    const Scores<T, kOptions> scores(a.scores, t.f);
    return {scores.key_bias_row(), scores.last_key(), t,
            __fdividef(scores.slope, tile::score_unit<kOptions>(a.scores))};
  }
  /// Brings what the keys of tile n, which begins with `key`, add to scores, in the unit of these, to
  /// shared memory. kMultiplies: a number is the sum of three in bf16, the first rows of a matrix that
  /// ones multiply; fp16 has not the range. PERF: where consumers loaded it from global memory, dense
  /// attention took 2.4 times as long.
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
      added[x] = Scores<T, kOptions>::key_bias(a.scores, of.bias, of.last, k) * factor;
      if constexpr (kLinear) added[x] += of_key * static_cast<float>(k - of.at.place());
    }
    // Whoever is done with K of the last tile but one has used what was added to it, and before.
    barrier_wait(sm.k_empty(n % kStages), (n / kStages & 1) ^ 1);
    if (2 * pair < kKeys) {
      if constexpr (kMultiplies) {
        const u32 to = sm.added(n) + pair / 32 * kAddedMatrixBytes + pair % 4 * 4;
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
    if (kLinear && pair == 0) {
      const float rows = side == Side::kBefore ? 0.0f : side == Side::kBehind ? 2 * slope : slope;
      store_shared(sm.slopes(n), __float_as_int(rows));
      store_shared(sm.slopes(n) + 4, __float_as_int(side == Side::kAcross ? -slope : 0.0f));
    }
    fence_async();
    arrive_k(sm, n);
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
        store_array(shared + r * kLightRowBytes + 16 * n, words);
      }
    }
  }

  // ---- consumers ------------------------------------------------------------------------------
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

    float s[kKeys / 2], o[kDv / 2];
    u32 p[kKeys / 4];
    // kQHeld: this warp's rows; words 4 t to 4 t + 3 are the operand A of k16 step t.
    u32 q[kQHeld ? kD / 4 : 1];
    tile::Kept<kKeys, kOptions.dropout> kept;
    tile::RowState state;
    float shift[2], rescale[2];
    bool looks = true;   // kGuesses: for maxima of the next key tile; rows may have seen nothing
    float row_added[2];  // kLinear: to all scores of a row in this key tile
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
      ++opened;
      if constexpr (kShape.bias) {
        const RowTile t = row_tile();
        bias.open({a.scores, t.f}, t.row + row());
        bias.copy(a.scores.bias, sm.bias(warp()), first_key(), lane, true);
      }
    }
    /// Copies this warp's rows of Q to registers, and frees the slot.
    JALI_DEVICE void hold_q(i32 slot) {
      const i32 r = (warp() & 3) * 16 + (lane & 15);  // of the warpgroup's
      const u32 from = sm.q(slot) + wg * (kQBytes / kConsumers) + r * kRowBytes;
#pragma unroll
      for (i32 t = 0; t < kD / 16; ++t) {
        u32 words[4];
        load_matrices(from + t / 4 * (64 * kRowBytes) + ((2 * (t % 4) + (lane >> 4) ^ r & 7) << 4),
                      words);
#pragma unroll
        for (i32 n = 0; n < 4; ++n) q[4 * t + n] = words[n];
      }
      __syncwarp();
      barrier_arrive_if(sm.q_empty(slot), lane == 0);
    }
    JALI_DEVICE i32 warp() { return (threadIdx.x - 128) / 32; }  // of the consumers
    /// The row of the row tile that this thread's first row is.
    JALI_DEVICE i32 row() { return warp() * 16 + (lane >> 2); }
    /// Of the scores in s, to units of log2(e).
    JALI_DEVICE float scale() { return tile::score_unit<kOptions>(a.scores) * kLog2E; }
    JALI_DEVICE RowTile row_tile() { return RowTile::load(sm.tile(opened - 1)); }
    JALI_DEVICE i32 first_key() { return (note >> 3) * kKeys; }
    /// The first key of this thread in the accumulators' block j of 8 keys.
    JALI_DEVICE i32 key_of(i32 j) { return first_key() + 8 * j + 2 * (lane & 3); }

    JALI_DEVICE void multiply_qk(i32 slot, i32 stage) {
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
        Wgmma<BF16, kKeys, true>::rs(s, ones, descriptor(sm.added(stage), kAddedMatrixBytes), 1);
      }
    }
    /// O += P V of key tile n, as soon as V is there; O = P V if it is the first one of its row tile.
    JALI_DEVICE void multiply_pv(u32 n, bool first) {
      constexpr i32 kSteps = kKeys / kVSplit / 16;
#pragma unroll
      for (i32 i = 0; i < kVSplit; ++i) {
        const u32 at = v_number(n, i), stage = at % kVStages;
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
        barrier_arrive_if(sm.v_empty(v_number(n, i) % kVStages), lane == 0);
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

    /// What the options need of the key tile, while the tensor cores make S. kAny: as of step().
    template <bool kAny>
    JALI_DEVICE void prepare() {
      if constexpr (kLinear) {
        const float slope = __int_as_float(load_shared(sm.slopes(count)));
        row_added[0] = slope * static_cast<float>(row());
        row_added[1] = __fmaf_rn(slope, 8, row_added[0]);
      }
      if constexpr (kOptions.alibi && (kAny || !kLinear)) {
        const RowTile t = row_tile();
        // PERF: one register while S is made, not what it comes from.
        alibi.distance = static_cast<float>(opaque(t.place() + row() - key_of(0)));
        alibi.slope = kLinear ? __int_as_float(load_shared(sm.slopes(count) + 4))
                              : __fdividef(-a.scores.alibi_slopes[t.f.h],
                                           tile::score_unit<kOptions>(a.scores));
      }
      if constexpr (kBias && !kShape.bias) {
        if constexpr (kAny) {  // it may open a row tile
          const RowTile t = row_tile();
          bias.open({a.scores, t.f}, t.row + row());
        }
        bias.template begin<kAny>(a.scores.bias, key_of(0));
      }
      if constexpr (kOptions.dropout) {
        const RowTile t = row_tile();
        kept.draw(*a.scores.seed, t.f, t.row + row(), first_key());
      }
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
          bias.copy(a.scores.bias, sm.bias(warp()), (next >> 3) * kKeys, lane,
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
      pin(bits.words[0] ^ bits.words[1], sm.base);
      return bits;
    }
    /// A row tile whose sums are complete; O is, or will be.
    struct Closed {
      i32 tile = -1;     // none
      float inverse[2];  // of the sums
    };
    /// Stores the LSE of row tile n.
    JALI_DEVICE Closed close_sums(i32 n) {
      Closed closed{n};
      const RowTile t = RowTile::load(sm.tile(n));
      float* to_lse = opaque(a.lse + t.lse(a, t.row + row()));
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        float total = state.sum[e] + shuffle_xor(state.sum[e], 1);
        total += shuffle_xor(total, 2);
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
    /// Stores O of row tile n.
    JALI_DEVICE void store(i32 n, const float (&inverse)[2]) {
      auto rows = [&] {
        const RowTile t = RowTile::load(sm.tile(n));
        const i32 first = t.row + opaque(warp()) * 16;
        const BoxPlace at = box_place(a.seq, t.f.b, t.f.q_start, t.f.num_rows, first);
        u16* const out = static_cast<u16*>(a.out) + t.out(a, first);
        return tile::RowsTo{t.f.num_rows - first, at.token, t.f.h, at.b, box_end(a.seq), out};
      };
      if constexpr (kShape.boxes > 0) {
        tile::store_boxes<T, kShape.boxes>(o, inverse, sm.boxes(opaque(warp())), map_out,
                                           a.out_stride_l, a.Dv, lane, rows);
      } else {
        const tile::RowsTo to = rows();
        tile::store_rows<T>(o, inverse, to.first, a.out_stride_l, to.rows, a.Dv, lane);
      }
    }

    /// S as multiply_qk() made it, by the warp alone and from global memory: K is free already, and no
    /// other warp need wait. stage: of what keys add.
    JALI_DEVICE void score_again(i32 stage) {
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
        const u32 added = sm.added(stage) + lane % 8 * kRowBytes;
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
    template <i32 e, bool kHides, i32 kSlack = tile::kSlack>
    JALI_DEVICE void take_maximum() {
      if constexpr (kOptions.bounded) {
        state.max[e] = a.scores.weight_one;
        shift[e] = state.max[e] * scale();
        rescale[e] = 1;
        return;
      }
      tile::take_maximum<e, kHides, kLinear, kSlack>(s, row_added, scale(), state, shift, rescale);
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
      tile::add_sums(state, rescale, total);
      tile::to_operand<T>(s, p);
      if constexpr (kOptions.dropout) kept.drop(p, a.scores);
    }
    /// S to P by the maxima that are known. If sums are above kMost by these, S is made again, and maxima
    /// are taken; if above kRoom, they are taken of the next key tile.
    JALI_DEVICE void guess_weights(i32 stage) {
      float total[4] = {0, 0, 0, 0};
      if (looks) {
        look_for_maxima();
      } else {
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          shift[e] = (kLinear ? state.max[e] - row_added[e] : state.max[e]) * scale();
          rescale[e] = 1;
        }
      }
      // PERF: before the wait all of the first row. A quarter of it, or the second one, too: 2 to 5 %
      // slower.
      exponentials<0, 0>(total);
      pin(total[0] + total[1], sm.base + kBarriers);
      finish_pv(count - 1);
      exponentials<1, 0>(total);
      tile::to_operand<T>(s, p);
      if (!sums_are_below(total, tile::kRoom)) {
        looks = true;
        if (!sums_are_below(total, tile::kMost<T>)) {
          score_again(stage);
          look_for_maxima();
#pragma unroll
          for (i32 n = 0; n < 4; ++n) total[n] = 0;
          exponentials<0, 0>(total);
          exponentials<1, 0>(total);
          tile::to_operand<T>(s, p);
          looks |= !sums_are_below(total, tile::kRoom);
        }
      }
      tile::add_sums(state, rescale, total);
    }
    JALI_DEVICE bool sums_are_below(const float (&total)[4], float most) {
      // NaNs are not below anything.
      const float sum = maximum_or_nan(total[0] + total[1], total[2] + total[3]);
      return __all_sync(0xffffffffu, sum <= most);
    }
    JALI_DEVICE void look_for_maxima() {
      take_maximum<0, true, tile::kSmallSlack>();
      take_maximum<1, true, tile::kSmallSlack>();
      // What rises may go on to do so.
      looks =
          __any_sync(0xffffffffu, (rescale[0] != 1.0f) | (rescale[1] != 1.0f)) | state.any_new();
    }
    JALI_DEVICE void close_row_tile(const Closed& closed) {
      store(closed.tile, closed.inverse);
      if constexpr (kByRows) barrier_arrive_if(sm.cells_empty(closed.tile % kCellSlots), lane == 0);
    }

    /// S of this key tile in flight with O += P V of the last one; the very first step, which has none,
    /// multiplies what happens to be there, and nobody looks at it. kAny: this key tile may be partial, and
    /// may open a row tile, where the last one closed the row tile before: that is returned. PERF: a
    /// template, since a branch while WGMMAs are in flight costs 6 %; not more of them, which the
    /// instruction cache misses.
    template <bool kAny>
    JALI_DEVICE Closed step() {
      const u32 stage = count % kStages;
      const bool first = note & kFirst;  // the last one
      note = next;
      const bool opens = kAny && (note & kFirst) != 0;
      wait_k();
      if (opens) begin_row_tile();
      const i32 slot = (opened - 1) % kSlots;
      if (kShape.turns) named_sync(1 + wg, 256);
      tie(p);
      tie(o);
      tie(s);
      if constexpr (kQHeld) tie(q);
      if constexpr (kMultiplies) tie(ones);
      wgmma_fence();
      multiply_qk(slot, stage);
      wgmma_commit();
      multiply_pv(count - 1, first);
      if (kShape.turns) named_arrive(wg == kConsumers - 1 ? 1 : 2 + wg, 256);
      // PERF: passes at once; but nothing of what follows moves up, between the MMAs.
      if (kHoldsBack || kAny) wait_k();
      next = read_note(count + 1);  // PERF: beside the MMAs, not before them
      prepare<kAny>();
      Closed closed;
      tile::VisibleBits<kGroups> bits;
      if constexpr (kAny) {
        bits = visible_bits();
        if (opens && opened > 1) closed = close_sums(opened - 2);
      }
      wgmma_wait<1>();
      tie(s);
      // What keys add may be needed again.
      constexpr bool kGuess = kGuesses && !kAny, kHolds = kGuess && kMultiplies;
      if (!kHolds) free_k(stage);
      // No P V beside work that needs P's registers.
      constexpr bool kTight = (kDv >= 192 && (kAny || kOptions.per_cell())) ||
                              (kAny && kShape.consumer_registers <= 160);
      if (kTight) finish_pv(count - 1);
      if constexpr (kGuess) {
        guess_weights(stage);
        if (kHolds) free_k(stage);
      } else {
        if (kOptions.adjusts()) adjust<kAny>();
        if constexpr (kAny) bits.hide(s, -infinity());
        if constexpr (kAny) state.begin_if(opens);
        float total[4] = {0, 0, 0, 0};
        begin_weights<kAny || kOptions.loads()>(total);
        if (opens) rescale[0] = rescale[1] = 1;  // nothing yet
        if (kEarly > 0) pin(total[0] + total[1], sm.base + kBarriers);
        if (!kTight) finish_pv(count - 1);
        end_weights(total);
        if constexpr (kGuesses) looks = state.any_new();
      }
      // PERF: or the sums are made behind the branch, not beside the exponentials.
      if constexpr (kAny) tie(state.sum);
      if (!kOptions.bounded &&
          __any_sync(0xffffffffu, (rescale[0] != 1.0f) | (rescale[1] != 1.0f))) {
#pragma unroll
        for (i32 n = 0; n < kDv / 8; ++n) {
          o[4 * n] *= rescale[0];
          o[4 * n + 1] *= rescale[0];
          o[4 * n + 2] *= rescale[1];
          o[4 * n + 3] *= rescale[1];
        }
      }
      ++count;
      return closed;
    }

    /// The last P V.
    JALI_DEVICE Closed end() {
      tie(p);
      tie(o);
      multiply_pv(count - 1, note & kFirst);
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
    if (kShape.turns && wg == 0) named_arrive(1, 256);
    c.wait_k();
    c.next = c.read_note(0);
    if (c.next & kEnd) return;
    while (true) {
      while (!(c.next & (kFirst | kPartial | kEnd))) c.template step<false>();
      // PERF: all row tiles are closed here, the last one, too: a tenth less to compile.
      const bool ends = c.next & kEnd;
      const typename Consumer::Closed closed = ends ? c.end() : c.template step<true>();
      if (closed.tile >= 0) c.close_row_tile(closed);
      if (ends) break;
    }
    bulk_wait_read();
  }

  JALI_DEVICE static void run(const TensorMap& map_q, const TensorMap& map_k,
                              const TensorMap& map_v, const TensorMap& map_out,
                              const ForwardArgs& a, const M& mask) {
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
      consume(a, mask, sm, map_out, wg - 1);
    }
  }
};

}  // namespace jali::cuda
#endif
