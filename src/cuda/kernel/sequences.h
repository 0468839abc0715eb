// The sequences of a call, as kernels see them: lengths, positions and, where tiles begin anew with packed
// sequences (varlen) or with documents, which tile of rows or keys belongs to which of them.
#pragma once

#include "mask/leaf.h"

namespace jali::cuda {

/// Elements between neighbours; b is 0 where tokens are packed (varlen).
struct Strides {
  i64 b = 0, h = 0, l = 0;
};
JALI_HD constexpr i64 offset(const Strides& s, i32 b, i32 h, i64 l) {
  return b * s.b + h * s.h + l * s.l;
}

/// Of warp_slot_by_length(): a lane each.
constexpr i32 kMostSortedPieces = 32;

/// What a kernel knows of Sequences::cut() when it is compiled: that calls with pieces, or calls without, are all that it
/// serves. PERF: nothing of the other kind is compiled, a backward in 0.94 of the time, and loaders have less to do.
#if !defined(JALI_CUT)
#define JALI_CUT (pieces > 0)
#endif

/// Passed to kernels by value. Nothing of it was read on the host where it is a table.
struct Sequences {
  i32 B = 1, Hq = 1;
  i32 group = 1;                   // Hq / Hkv
  i32 Lq = 0, Lk = 0;              // padded layouts: of every sequence; varlen: unused
  i32 q_offset = kFar;             // of every sequence; kFar: num_keys - num_rows of each
  const i32* q_offsets = nullptr;  // [B], or null
  i64 q_offsets_step = 0;          // elements
  // Where tiles begin anew, with each piece: a packed sequence (varlen), or a document of a padded one.
  const i32 *cu_q = nullptr, *cu_k = nullptr;  // [pieces + 1], of each padded sequence
  i32 cu_step = 0;                             // elements from one padded sequence to the next
  i32 pieces = 0;
  i32 tokens_q = 0, tokens_k = 0;  // that are cut, also those behind the last piece
  bool packed = false;
  JALI_HD bool varlen() const { return cut() && packed; }
  JALI_HD bool cut() const { return JALI_CUT; }
  /// Whether their tiles come by length (warp_slot_by_length), where a kernel asks for it.
  JALI_HD bool sorted() const { return cut() && pieces <= kMostSortedPieces; }
};

/// Padded sequence b, or piece n of it; of packed tokens: b = 0, piece n, which is sequence n.
JALI_HD Frame frame_of(const Sequences& s, i32 b, i32 n, i32 h) {
  Frame f;
  f.b = s.varlen() ? n : b;
  f.h = h;
  f.num_rows = s.Lq;
  f.num_keys = s.Lk;
  if (s.cut()) {
    // A wrong table must not lead out of memory.
    const i32 *const q = s.cu_q + b * s.cu_step + n, *const k = s.cu_k + b * s.cu_step + n;
    f.q_start = clamp_to(q[0], 0, s.tokens_q);
    f.k_start = clamp_to(k[0], 0, s.tokens_k);
    f.num_rows = max_of(min_of(q[1], s.tokens_q) - f.q_start, 0);
    f.num_keys = max_of(min_of(k[1], s.tokens_k) - f.k_start, 0);
  }
#if defined(__CUDACC_RTC__)
  // PERF: or loops keep q_offset, where all sequences have the same, and spill.
  asm volatile("" : "+r"(f.num_keys));
#endif
  f.q_offset = s.q_offset != kFar ? s.q_offset : f.num_keys - f.num_rows;
  if (s.q_offsets)
    f.q_offset = clamp_to(s.q_offsets[f.b * s.q_offsets_step], -kMaxLength, kMaxLength);
  return f;
}
/// Behind the last piece may be tokens that belong to none: where these end, if that piece of a frame's
/// sequence which ends before token `end` is the last one, or a document that only empty ones follow; else
/// `end`. b: the frame's.
JALI_HD i32 end_with_tail(const Sequences& s, i32 b, i32 end, bool rows) {
  if (!s.cut()) return end;
  const i32 tokens = rows ? s.tokens_q : s.tokens_k;
  const bool last =
      s.varlen() ? b == s.pieces - 1 : end >= min_of(s.cu_q[b * s.cu_step + s.pieces], tokens);
  return last ? tokens : end;
}

/// Tokens are cut into tiles of `size` piece by piece without reading the lengths on the host: piece n
/// owns the slots from start / size + n on, at least as many as it has tiles. Some slots lie behind the
/// end of their piece: they are empty.
JALI_HD constexpr i32 first_slot(i32 start, i32 n, i32 size) { return start / size + n; }
JALI_HD constexpr i64 num_slots(i64 tokens, i32 pieces, i32 size) { return tokens / size + pieces; }
/// The first row or key of a slot in its piece, which starts at token `start`.
JALI_HD constexpr i32 begin_of_slot(i32 slot, i32 start, i32 n, i32 size) {
  return max_of(slot - first_slot(start, n, size), 0) * size;  // a wrong table, as above
}

/// Where the copy engine finds a token (call.h, tensor_map). Packed tokens are counted in such a way
/// that the tensor ends where their sequence does: what is behind arrives as zeros, not as what
/// another sequence, or nobody, wrote there. The method is that of Triton's ragged tensor
/// descriptors: two dims more that advance by tokens, of which one takes back what the others are too
/// much, modulo 2^64.
constexpr i32 kPackedEnd = 1 << 30;
struct BoxPlace {
  i32 token, b;  // coordinates 1 and 3
};
JALI_HD BoxPlace box_place(const Sequences& s, i32 b, i32 start, i32 length, i32 token) {
  if (!s.varlen()) return {start + token, b};
  return {kPackedEnd - length + token, start + length};
}
JALI_HD i32 box_end(const Sequences& s) { return s.varlen() ? kPackedEnd : 0; }  // coordinate 4

#if defined(__CUDACC_RTC__)
/// Work is handed out by a counter: [0] what was taken, [1] blocks done. One thread of each block says
/// that it is done; the last one leaves the counter as it was found.
__device__ __forceinline__ void leave(i32* counter) {
  if (atomicAdd(counter + 1, 1) == static_cast<i32>(gridDim.x) - 1) {
    counter[0] = 0;
    counter[1] = 0;
  }
}

/// The piece that owns a slot, by all lanes of a warp together: 32 probes a step, since each waits for
/// memory.
__device__ __forceinline__ i32 warp_piece_of(const i32* cuts, i32 pieces, i32 slot, i32 size) {
  i32 lane = threadIdx.x & 31;
  asm volatile("" : "+r"(lane));  // PERF: not kept in a register by callers' loops
  // low owns or precedes the slot, high comes after it.
  i32 low = 0, high = pieces;
#pragma unroll 1
  while (high - low > 1) {
    const i32 step = ceil_div(high - low, 32), probe = low + (lane + 1) * step;
    const bool below = probe < high && first_slot(cuts[probe], probe, size) <= slot;
    low += __popc(__ballot_sync(0xffffffffu, below)) * step;
    high = min_of(low + step, high);
  }
  return low;
}

/// Of the slots of at most kMostSortedPieces pieces, `slots` in all, that which comes at place `rank` if those come
/// first that have more of their piece's slots behind them: under a causal mask these are the longest key tiles. For a
/// whole warp.
__device__ __forceinline__ i32 warp_slot_by_length(const i32* cuts, i32 pieces, i32 slots, i32 rank,
                                                   i32 size) {
  i32 lane = threadIdx.x & 31;
  asm volatile("" : "+r"(lane));  // as above
  const i32 first = lane < pieces ? first_slot(cuts[lane], lane, size) : slots;
  const i32 next = __shfl_down_sync(0xffffffffu, first, 1);
  const i32 own = (lane < 31 ? next : slots) - first;
  // The slot has at least `low` left, itself counted, and fewer than `high`, which `before` slots have.
  i32 low = 1, high = slots + 1, before = 0;
#pragma unroll 1
  while (high - low > 1) {
    const i32 middle = (low + high) / 2;
    const i32 longer = __reduce_add_sync(0xffffffffu, max_of(own - middle + 1, 0));
    if (longer > rank) {
      low = middle;
    } else {
      high = middle;
      before = longer;
    }
  }
  const bool has = own >= low;
  const u32 below = __ballot_sync(0xffffffffu, has) & ((1u << lane) - 1);
  const u32 here = __ballot_sync(0xffffffffu, has && __popc(below) == rank - before);
  // A wrong table, as above.
  return clamp_to(__shfl_sync(0xffffffffu, first + own - low, __ffs(here) - 1), 0, slots - 1);
}

/// Where a tile of rows or keys lies: its frame, piece, and first row or key there.
struct TilePlace {
  Frame f;
  i32 piece, first;
};
/// Tile `slot` of `size` rows (or keys) of padded sequence b, 0 if varlen, and head h; for a whole warp.
__device__ __forceinline__ TilePlace warp_tile(const Sequences& s, i32 b, i32 h, i32 slot, i32 size,
                                               bool rows) {
  const i32* const cu = rows ? s.cu_q : s.cu_k;
  TilePlace at;
  at.piece = s.cut() ? warp_piece_of(cu + b * s.cu_step, s.pieces, slot, size) : 0;
  at.f = frame_of(s, b, at.piece, h);
  at.first = slot * size;
  if (s.cut()) at.first = begin_of_slot(slot, rows ? at.f.q_start : at.f.k_start, at.piece, size);
  return at;
}
#endif

}  // namespace jali::cuda
