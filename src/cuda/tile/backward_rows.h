// The small kernels before and after a backward pass's main kernel; see kernel/backward.h.
#pragma once

#include "cuda/kernel/backward.h"
#include "cuda/tile/backward_sums.h"

namespace jali::tile {

/// kRows: of a row tile; kD: columns of dq_sum (a multiple of 64); kDv: at least Dv. kSinks: there
/// are sinks. kRowBias: the gradient of a bias over rows alone is wanted.
template <class T, i32 kRows, i32 kD, i32 kDv, bool kSinks, bool kRowBias>
struct BackwardRows {
  static constexpr i32 kThreads = 256;
  using Args = cuda::BackwardArgs;

  struct Tile {
    Frame f;
    i32 first;   // row of the sequence
    i64 number;  // of all row tiles and heads
  };
  JALI_DEVICE static Tile tile(const Args& a) {
    const i32 t = blockIdx.x % a.row_tiles, h = blockIdx.x / a.row_tiles;
    const cuda::TilePlace at = cuda::tile_place(a.seq, a.seq.cu_q, a.seq.Lq, t, kRows);
    return {cuda::frame_of(a.seq, at.b, h), at.first, i64(h) * a.row_tiles + t};
  }

  /// -LSE as raw scores have it, -delta = dlse - sum(dout · out), and a clear sum of dq. A row that
  /// sees nothing, or that is none, gets weights of zero: exp2(-infinity).
  ///
  /// The sink of a row weighs exp(sink - LSE) and has no value: its gradient is that times -delta.
  /// A number added to all scores of a row has the sum of theirs, sum(P (dP - delta)). Together with
  /// the sink's that is dlse (more of all alike changes LSE alone): exp(sink - LSE) · delta + dlse.
  JALI_DEVICE static void prepare(const Args& a) {
    constexpr i32 kLanes = kDv <= 64 ? 8 : kDv <= 128 ? 16 : 32;  // of a row, 8 columns each
    const Tile at = tile(a);
    if (a.turns && threadIdx.x == 0) a.turns[at.number] = 0;
    float sink_sum = 0;
    if (at.first >= at.f.num_rows) {
      if (kSinks) write_sink_sum(a, at, sink_sum);
      return;
    }
    float4* sum = reinterpret_cast<float4*>(a.dq_sum + at.number * (kRows * kD));
#pragma unroll
    for (i32 n = threadIdx.x; n < kRows * kD / 4; n += kThreads) sum[n] = make_float4(0, 0, 0, 0);
    const i32 column = threadIdx.x % kLanes * 8;
#pragma unroll
    for (i32 r = threadIdx.x / kLanes; r < kRows; r += kThreads / kLanes) {
      const i32 row = at.first + r;
      const i64 token = at.f.q_start + row;
      const bool in = row < at.f.num_rows;
      float delta = 0;
      if (in && column < a.Dv) {
        using cuda::offset;
        const uint4 o = *reinterpret_cast<const uint4*>(
            static_cast<const u16*>(a.out) + offset(a.out_strides, at.f.b, at.f.h, token) + column);
        const uint4 g =
            *reinterpret_cast<const uint4*>(static_cast<const u16*>(a.dout) +
                                            offset(a.dout_strides, at.f.b, at.f.h, token) + column);
        const u32 os[4] = {o.x, o.y, o.z, o.w}, gs[4] = {g.x, g.y, g.z, g.w};
#pragma unroll
        for (i32 n = 0; n < 4; ++n) {
          delta += T::value(os[n]) * T::value(gs[n]);
          delta += T::value(os[n] >> 16) * T::value(gs[n] >> 16);
        }
      }
#pragma unroll
      for (i32 lanes = kLanes / 2; lanes > 0; lanes /= 2) delta += ptx::shuffle_xor(delta, lanes);
      if (column == 0) {
        const float nothing = a.lse_factor < 0 ? -ptx::infinity() : ptx::infinity();
        float neg_lse = nothing;
        if (in) {
          const float lse = a.lse[cuda::offset(a.lse_strides, at.f.b, at.f.h, token)];
          const bool sees = lse != -ptx::infinity();
          if (sees) neg_lse = lse * a.lse_factor;
          const float dlse =
              a.dlse ? a.dlse[cuda::offset(a.dlse_strides, at.f.b, at.f.h, token)] : 0;
          if (a.dlse) delta -= dlse;
          float sink = 0;  // its share of what the row sees, times delta
          if constexpr (kSinks) {
            if (sees) sink = ptx::exp2_fast((a.scores.sinks[at.f.h] - lse) * cuda::kLog2E) * delta;
            sink_sum -= sink;
          }
          if constexpr (kRowBias) {
            const i64 first = a.seq.varlen() ? i64{at.f.q_start} : i64{at.f.b} * a.seq.Lq;
            *a.row_sums.at(at.f.h, first + row) = sees ? sink + dlse : 0;
          }
        }
        a.neg_lse[at.number * kRows + r] = neg_lse;
        a.neg_delta[at.number * kRows + r] = neg_lse == nothing ? 0 : -delta;
      }
    }
    if (kSinks) write_sink_sum(a, at, sink_sum);
  }
  /// The block's sum, in an order that never changes.
  JALI_DEVICE static void write_sink_sum(const Args& a, const Tile& at, float x) {
    if (!a.sink_sums) return;
    const float sum = sum_of_block(x);
    if (threadIdx.x == 0) a.sink_sums[at.number] = sum;
  }

  /// dq = scale · dq_sum. The sum lies as accumulators do: blocks of 64 x 64, each
  /// [warp][8 columns][lane][4]. A thread rounds 8 columns of rows r and r + 8.
  JALI_DEVICE static void finish(const Args& a) {
    const Tile at = tile(a);
    if (at.first >= at.f.num_rows) return;
    const float4* sum = reinterpret_cast<const float4*>(a.dq_sum + at.number * (kRows * kD));
#pragma unroll
    for (i32 n = threadIdx.x; n < kRows / 2 * (kD / 8); n += kThreads) {
      const i32 j = n % (kD / 8), r = n / (kD / 8);  // r: of 8 rows a warp
      const i32 block = r / 32 * (kD / 64) + j / 8, warp = r % 32 / 8;
      const float4* quad = sum + block * 1024 + warp * 256 + j % 8 * 32 + r % 8 * 4;
      if (8 * j >= a.D) continue;
      u32 words[2][4];
#pragma unroll
      for (i32 c = 0; c < 4; ++c) {
        const float4 x = quad[c];
        words[0][c] = T::pack(x.x * a.scale, x.y * a.scale);
        words[1][c] = T::pack(x.z * a.scale, x.w * a.scale);
      }
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        const i32 row = at.first + r / 32 * 64 + warp * 16 + r % 8 + 8 * e;
        if (row >= at.f.num_rows) continue;
        u16* to = static_cast<u16*>(a.dq) +
                  cuda::offset(a.dq_strides, at.f.b, at.f.h, i64(at.f.q_start) + row) + 8 * j;
        *reinterpret_cast<uint4*>(to) =
            make_uint4(words[e][0], words[e][1], words[e][2], words[e][3]);
      }
    }
  }
};

}  // namespace jali::tile
