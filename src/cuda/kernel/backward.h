// What the kernels of a backward pass share: tile shapes, scratch memory, arguments.
//
// A pass is one kernel, and, where gradients of biases are wanted, small ones before and after it. A
// block owns a tile of keys at a time: it writes dk and dv and adds to the fp32 sum of dq
// (variant/bwd_*.cuh). Beside that a warp of it prepares row tiles (a statistic of every row, a clear
// sum) and rounds the sums that are complete to dq (tile/backward_rows.h). Work goes by sections of KV
// heads: the row tiles of a section are prepared before its first key tile is begun, and rounded
// when its last one is done; what takes long comes early (work_order.h). Scratch, fp32,
// `row_tiles · Hq` tiles in the order of the work, by sequence, then head, none of it cleared by the host:
//   neg_lse, neg_delta  rows a tile     dq_sum  dq_floats a tile
// or, where the tensor cores add the statistics to products, kStatisticBytes for 64 rows, each number as
// a sum of three in bf16 (tile/backward_rows.h).
// The gradients of what was added to scores are sums of the scores' gradients. For a bias over keys
// the kernel sums the rows that see its key tile; for one over rows and keys it writes or adds cells;
// those of a bias over rows alone, and of sinks, are known when a row tile is prepared.
// tile/backward_sums.h finishes them.
#pragma once

#include "cuda/kernel/limits.h"
#include "cuda/kernel/sequences.h"
#include "cuda/kernel/tile_map.h"
#include "cuda/kernel/work_order.h"
#include "cuda/tile/scores.h"

namespace jali::cuda {

/// The kernel's tile and what a host needs to launch it.
struct BackwardTile {
  i32 rows, keys;
  i32 dq_floats;     // of dq_sum a row tile and head
  i32 row_stages;    // buffers of kBackwardRowBytes
  i32 shared_bytes;  // dynamic
  i32 threads;       // without BackwardTiles::kTurnGroup
  i32 loader_registers, consumer_registers;
  i32 blocks = 1;  // that share a tile, each with its part of the keys: a cluster
};

constexpr i32 kBackwardConsumerWarps = 8;
/// Barriers; the loader's notes; and at the end 16 x 8 ones, by which sums over rows are multiplied.
constexpr i32 kBackwardBarrierBytes = 256, kBackwardOnesBytes = 256,
              kBackwardNotesBytes = kBackwardBarrierBytes + 448 + kBackwardOnesBytes;
/// Slots for cells of partial tiles: in tiles of 128 keys as many as notes, so that they are looked up
/// ahead.
template <i32 kKeys>
constexpr i32 kBackwardCellSlots = kKeys == 128 ? 4 : 2;
/// Row tiles are prepared and rounded in parts of so many rows.
constexpr i32 kBackwardPartRows = 16;
/// 64 columns of that many of out and dout, or of dq_sum.
constexpr i32 kBackwardRowBytes = 4096;
/// How many of those a kernel has room for that needs `bytes` besides.
JALI_HD constexpr i32 backward_row_stages(i32 bytes) {
  return min_of((kMostSharedBytes - bytes) / kBackwardRowBytes, 6);
}

/// Of a statistic of 64 rows as a matrix: three lines of 64 numbers in bf16, in shared memory eight.
constexpr i32 kStatisticBytes = 384, kStatisticMatrixBytes = 1024;

/// How the gradient of a bias over rows and keys leaves the main kernel. kHalf, kFloat: every cell
/// has one (sequence, query head), which stores it in that dtype (kHalf: q's; kPairs, kFours: two or four
/// neighbouring keys of a row at once). kAdd: several add.
enum class CellGradient : u8 { kNone, kHalf, kPairs, kFours, kFloat, kAdd };
/// The gradients of biases that a kernel is compiled for.
struct BiasGradients {
  CellGradient cells = CellGradient::kNone;
  bool keys = false;  // sums over rows
  bool rows = false;  // sums over keys

  /// Whether several keys of a row leave at once.
  constexpr bool in_words() const {
    return cells == CellGradient::kPairs || cells == CellGradient::kFours;
  }
  constexpr bool per_cell() const { return cells != CellGradient::kNone; }
  /// Whether the main kernel has to do with it.
  constexpr bool per_tile() const { return per_cell() || keys; }
  constexpr bool operator==(const BiasGradients&) const = default;
};

/// Whether all that is done to scores is an addition: then they start at it, beside LSE, and there is
/// nothing to do when the product is there.
constexpr bool adds_to_scores(const ScoreOptions& options) {
  return (options.alibi || options.loads()) && !options.any_scale && !options.softcap;
}
/// Whether that is a bias of keys alone.
constexpr bool adds_of_keys(const ScoreOptions& options) {
  return adds_to_scores(options) && options.bias == BiasType::kNone && !options.alibi;
}
/// Whether products become scores by more than a positive factor.
constexpr bool adjusts_products(const ScoreOptions& options) {
  return options.adjusts() && !adds_to_scores(options);
}

/// Cells (b, h / head_div, i, j); stride 0 where they are shared. Only i < rows, j < keys are
/// written.
struct CellTable {
  void* data = nullptr;                                        // kAdd: fp32
  i64 stride_b = 0, stride_h = 0, stride_q = 0, stride_k = 0;  // elements
  i32 head_div = 1;
  i32 rows = 1, keys = 1;
};

/// Sums over (head, token): `head_div` query heads are summed together.
struct TokenSums {
  float* data = nullptr;  // [Hq / head_div][tokens], tokens = B · L or, packed, all
  i64 tokens = 0;
  i32 head_div = 1;
  /// Of query head h, one of KV head h_kv, if head_div is 1 or the heads of the group. PERF: no division.
  JALI_HD float* at(i32 h, i32 h_kv, i64 token) const {
    return data + (head_div == 1 ? h : h_kv) * tokens + token;
  }
};

/// Softcap by a polynomial of two terms. K is multiplied by a power of two (k_factors: a pair of it in bf16), so that of
/// products x, as far as x² + above is at most 1, the score over softcap is nearly x (terms[0] + terms[1] (x² + above)).
/// That no score of a row is above that, and that those below its other end weigh too little to matter, its LSE tells:
/// -log2(e) LSE is between `least` and `most` then.
struct LowScores {
  u32 k_factors = 0x3f803f80;
  float above = 0, terms[2] = {}, least = 1, most = 0;  // between these is nothing
};

/// What differs from call to call; passed by value.
struct BackwardArgs {
  Sequences seq;
  i32 D = 0, Dv = 0;  // as in memory: the kernel's own may be larger
  // Of one query head, of all sequences: num_tiles() of call.h. For the host; but without it here ptxas spills 4 bytes
  // of a D 64 kernel.
  i32 row_tiles = 0;
  i32 row_tiles_of_sequence = 0;  // of those; varlen: all
  i32 row_parts = 0;              // of the row tiles of a head of `heads`, kBackwardPartRows each
  i32 key_tiles = 0;              // of one head of `heads`: the same for keys
  i32 heads = 0;                  // B · Hkv; varlen: Hkv
  i32 section = 1;                // heads whose q and dout stay in L2 together
  i32 last = 0;                   // heads_by_length()
  bool falling = false;           // the key tiles of these come in order: WorkOrder::falling
  // Of row_order(): what the first key tiles of all blocks need, and what the last ones add to. These
  // parts are taken one by one, since all wait for the last of them, others by row tiles.
  i32 first_parts = 0, last_parts = 0;
  float scale = 0, scale_log2 = 0;  // scale_log2 = scale · log2(e)
  float lse_factor = 0;  // from LSE to neg_lse: -1 / scale, what raw scores start at; where
                         // options adjust products -log2(e), added to what they become
  float dq_scale = 0;    // of the sums of dq: scale, but for what K is multiplied by
  // Dropout: gradients of scores are computed without what it multiplies kept weights by, ds_scale, and from delta times
  // delta_scale, 1 / ds_scale. scale and dq_scale are times ds_scale already.
  float ds_scale = 1, delta_scale = 1;
  TileMap key_map, row_map;  // of a mask; of row tiles: deterministic only
  // What blocks tell each other: so many counters, zero before and after, of which turns are not.
  i32 num_counters = 0;
  i32* taken = nullptr;     // [6] key tiles; first parts; other parts to prepare; to round;
                            // last parts; warps that are done
  i32* prepared = nullptr;  // [sections] parts of row tiles
  i32* added = nullptr;     // [sections] key tiles whose dQ is added, times the consumers' warps
  // [row_tiles · Hq · blocks that share a key tile] the same of a row tile; deterministic only, zero before
  i32* turns = nullptr;
  float *neg_lse = nullptr, *neg_delta = nullptr, *dq_sum = nullptr;
  const void *out = nullptr, *dout = nullptr;   // [B, Hq, Lq, Dv]
  const float *lse = nullptr, *dlse = nullptr;  // [B, Hq, Lq]; dlse may be null
  void *dq = nullptr, *dk = nullptr, *dv = nullptr;
  Strides out_strides, dout_strides, lse_strides, dlse_strides, dq_strides, dk_strides, dv_strides;
  ScoreArgs scores;
  LowScores low;                 // where K is multiplied, as scores.scale knows
  CellTable dbias;               // BiasGradients::cells
  TokenSums key_sums, row_sums;  // ::keys, ::rows; head_div of row_sums is 1
  float* sink_sums = nullptr;    // [sequences][Hq][parts of a head's row tiles]; may be null

  JALI_HD WorkOrder key_order() const {
    return {heads, section, key_tiles, false, key_map.long_lines, key_map.by_length, last, falling};
  }
  /// Of parts of row tiles; in a section head by head.
  JALI_HD WorkOrder row_order() const { return {heads, section, row_parts}; }
};

}  // namespace jali::cuda
