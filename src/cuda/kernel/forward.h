// What host and forward kernels share: how a kernel divides its work, and its arguments.
#pragma once

#include "cuda/kernel/limits.h"
#include "cuda/kernel/sequences.h"
#include "cuda/kernel/tile_map.h"
#include "cuda/tile/scores.h"

namespace jali::cuda {

/// What a mask may say of a row: of a heavy one a bit for each of 128 keys, of a light one its numbers.
constexpr i32 kHeavyRowBytes = 16, kLightRowBytes = 32;

/// Whether consumers take turns at the tensor cores, and when one lets the next one issue its products: when its own are
/// issued; or later, when its S is there.
enum class Turns : u8 { kNone, kIssued, kScored };

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
  Turns turns = Turns::kNone;
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
    return tile_bytes(D, Dv) + cell_bytes() + added_bytes + bias_bytes() + staged_bytes() + 2048;
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
/// Key tiles for which shared memory has what their keys add: that of the consumers, who may need it when they have
/// freed its K, two more whose K is there or loaded, and one more, which is brought ahead of its K.
constexpr i32 kAddedSlots = 4;
/// Of 64 keys, a matrix of 16 rows that is multiplied.
constexpr i32 kAddedMatrixBytes = 2048;
/// Shared memory for what keys add: matrices, for so many key tiles, at least as many as stages of K; or a float a key.
JALI_HD constexpr i32 added_bytes(ScoreOptions options, i32 matrices, i32 keys) {
  if (multiplies_added(options)) return matrices * (keys / 64) * kAddedMatrixBytes;
  return options.key_bias != BiasType::kNone ? 4 * kAddedSlots * keys : 0;
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
