// What the kernels of a backward pass share: tile shapes, scratch memory, arguments.
//
// A pass is three kernels. `prepare` (a block of 256 threads a row tile and query head: grid row_tiles · Hq) writes a statistic of
// every row and clears the fp32 sum of dq; the main kernel (variant/bwd_*.cuh; one block owns a tile
// of keys at a time) writes dk and dv and adds to that sum; `finish` (grid as prepare) rounds it to
// dq. Scratch, all fp32, `row_tiles · Hq` tiles, none of it has to be cleared by the host:
//   neg_lse, neg_delta  rows a tile     dq_sum  dq_floats a tile
#pragma once

#include "cuda/kernel/sequences.h"

namespace jali::cuda {

/// The main kernel's tile and what a host needs to launch it. dims: of q and k, and of v.
struct BackwardTile {
  i32 rows, keys;
  i32 dq_floats;     // of dq_sum a row tile and head
  i32 shared_bytes;  // dynamic
  i32 threads;
  i32 loader_registers, consumer_registers;
};

/// Barriers, the loader's notes, and what aligning to 1024 by hand may take.
constexpr i32 kBackwardNotesBytes = 128 + 384 + 1024;

/// Elements between neighbours; b is 0 where tokens are packed (varlen).
struct Strides {
  i64 b = 0, h = 0, l = 0;
};
JALI_HD constexpr i64 offset(const Strides& s, i32 b, i32 h, i64 l) {
  return b * s.b + h * s.h + l * s.l;
}

/// What differs from call to call; passed by value.
struct BackwardArgs {
  Sequences seq;
  i32 D = 0, Dv = 0;  // as in memory: the kernel's own may be larger
  i32 row_tiles = 0;  // of one query head: B · ceil(Lq / rows); varlen: num_slots(Tq, B, rows)
  i32 key_tiles = 0;  // of one head of `heads`: ceil(Lk / keys); varlen: num_slots(Tk, B, keys)
  i32 heads = 0;      // B · Hkv; varlen: Hkv
  i32 section = 1;    // heads whose q and dout stay in L2 together
  float scale = 0, scale_log2 = 0;  // scale_log2 = scale · log2(e)
  float lse_factor = 0;             // -1 / scale: from LSE to what raw scores start at
  i32* counter = nullptr;           // [0] key tiles taken, [1] blocks done; zero before and after
  i32* turns = nullptr;             // [row_tiles · Hq], deterministic only: prepare clears it
  float *neg_lse = nullptr, *neg_delta = nullptr, *dq_sum = nullptr;
  const void *out = nullptr, *dout = nullptr;   // [B, Hq, Lq, Dv]
  const float *lse = nullptr, *dlse = nullptr;  // [B, Hq, Lq]; dlse may be null
  void *dq = nullptr, *dk = nullptr, *dv = nullptr;
  Strides out_strides, dout_strides, lse_strides, dlse_strides, dq_strides, dk_strides, dv_strides;
};

/// A tile of rows or keys: its sequence and its first row or key there. Where tokens are packed, the
/// tile may lie behind the end of its sequence.
struct TilePlace {
  i32 b, first;
};
/// Tile t of all sequences, `size` rows (or keys) each.
JALI_HD TilePlace tile_place(const Sequences& s, const i32* cu, i32 length, i32 t, i32 size) {
  if (cu) {
    const i32 b = sequence_of(cu, s.B, t, size);
    return {b, (t - first_slot(cu[b], b, size)) * size};
  }
  const i32 per_sequence = ceil_div(length, size);
  return {t / per_sequence, t % per_sequence * size};
}

}  // namespace jali::cuda
