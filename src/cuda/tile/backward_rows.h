// What row tiles need before key tiles see them, and after that: they are prepared, and their sums of
// dq are rounded, by warps beside the loader, and by consumers before and after their own work.
#pragma once

#include "cuda/kernel/backward.h"
#include "cuda/ptx/bulk.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/matrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/order.h"

namespace jali::tile {

/// kRows: of a row tile; kD, kDv: columns of dq_sum and of dout, multiples of 64. kMatrices: each statistic
/// is written as the sum of three numbers in bf16, [3][64] for 64 rows, under the 128-byte swizzle. kSinks:
/// there are sinks. kRowBias: the gradient of a bias over rows alone is wanted. kStages: buffers of a warp
/// that the copy engine fills; 0: what is read is read where it is, by kLoads instructions at once, four
/// registers each.
template <class T, i32 kRows, i32 kD, i32 kDv, bool kMatrices, bool kSinks, bool kRowBias,
          i32 kStages, i32 kLoads>
struct BackwardRows {
  using Args = cuda::BackwardArgs;
  // Of a row tile, which goes by units: 64 columns of a part.
  static constexpr i32 kParts = kRows / 16;
  static constexpr i32 kHalves = kD / 64, kHalvesV = kDv / 64;
  static constexpr i32 kPieceFloats = 1024;  // of dq_sum: a unit
  static constexpr i32 kBoxBytes = 2048;     // of out or dout: a unit
  static constexpr i32 kStageBytes = cuda::kBackwardRowBytes;
  static_assert(kStageBytes == 4 * kPieceFloats && kStageBytes == 2 * kBoxBytes);

  struct RowTile {
    i32 b, h;     // sequence, query head
    i32 token;    // its first
    i32 rows;     // to the end of the sequence; may be less than one
    i32 section;  // of the work
    i32 number;   // of all row tiles and heads
  };

  const Args& a;
  const ptx::TensorMap &out, &dout;
  u32 stages, barriers;  // shared memory; a barrier a stage
  u32 units = 0;         // that went through this warp's stages

  // PERF: made anew wherever it is needed, since registers are few.
  JALI_DEVICE static i32 this_lane() { return ptx::opaque(threadIdx.x & 31); }

  /// Unit n of the row order. All lanes call it.
  JALI_DEVICE RowTile row_tile(i32 n) const {
    const cuda::Sequences& s = a.seq;
    const cuda::WorkOrder::Place at = a.row_order().place(n);
    const i32 g = at.unit % s.group, t = at.unit / s.group;
    RowTile tile;
    tile.section = at.section;
    tile.h = at.head * s.group + g;
    tile.b = 0;
    tile.number = t;
    i32 length = s.Lq, slot = t;
    if (s.varlen()) {
      tile.b = cuda::warp_sequence_of(s.cu_q, s.B, t, kRows);
      tile.token = s.cu_q[tile.b];
      length = s.cu_q[tile.b + 1] - tile.token;
      slot -= cuda::first_slot(tile.token, tile.b, kRows);
    } else {
      tile.b = tile.h / s.Hq;
      tile.h %= s.Hq;
      tile.token = 0;
      tile.number += tile.b * a.row_tiles_of_sequence();
    }
    tile.number += tile.h * a.row_tiles;
    tile.token += slot * kRows;
    tile.rows = length - slot * kRows;
    return tile;
  }
  /// The columns [64 half, 64 half + 64) of a part of dq_sum, as accumulators lie: [8 columns][lane][4].
  JALI_DEVICE float* piece(const RowTile& at, i32 part, i32 half) const {
    return a.dq_sum + i64{at.number} * (kRows * kD) +
           (part / 4 * kHalves * 4 + half * 4 + part % 4) * kPieceFloats;
  }
  JALI_DEVICE static const u16* row_at(const void* of, const cuda::Strides& strides,
                                       const RowTile& at, i32 row) {
    return static_cast<const u16*>(of) + cuda::offset(strides, at.b, at.h, i64{at.token} + row);
  }

  /// load(unit, shared, barrier) begins to fill a stage; use(unit, stage) follows, unit by unit.
  template <i32 kCount, class Load, class Use>
  JALI_DEVICE void stream(Load load, Use use) {
    if constexpr (kStages == 0) {
#pragma unroll 1
      for (i32 unit = 0; unit < kCount; ++unit) use(unit, 0);
    } else {
      auto begin = [&](i32 unit) {
        const u32 stage = (units + unit) % kStages;
        load(unit, stages + stage * kStageBytes, barriers + 8 * stage);
      };
#pragma unroll 1
      for (i32 unit = 0; unit < min_of(kStages, kCount); ++unit) begin(unit);
#pragma unroll 1
      for (i32 unit = 0; unit < kCount; ++unit) {
        const u32 n = units + unit, stage = n % kStages;
        ptx::barrier_wait(barriers + 8 * stage, n / kStages & 1);
        use(unit, stages + stage * kStageBytes);
        __syncwarp();
        if (unit + kStages < kCount) begin(unit + kStages);
      }
      units += kCount;
    }
  }
  /// Four words of shared memory, or of global memory where there are no stages. PERF: without a branch,
  /// so that others are under way, too.
  JALI_DEVICE static void read(u32 shared, const void* global, u32 (&words)[4]) {
    if constexpr (kStages > 0) {
      ptx::load_words(shared, words);
    } else {
      const uint4 from = *static_cast<const uint4*>(global);
      words[0] = from.x;
      words[1] = from.y;
      words[2] = from.z;
      words[3] = from.w;
    }
  }

  /// -LSE as raw scores have it, -delta = dlse - sum(dout · out), and a clear sum of dq. A row that
  /// sees nothing, or that is none, gets weights of zero: exp2(-infinity).
  ///
  /// The sink of a row weighs exp(sink - LSE) and has no value: its gradient is that times -delta.
  /// A number added to all scores of a row has the sum of theirs, sum(P (dP - delta)). Together with
  /// the sink's that is dlse (more of all alike changes LSE alone): exp(sink - LSE) · delta + dlse.
  JALI_DEVICE void prepare(const RowTile& at) {
    float sink_sum = 0;
    if (at.rows > 0) {
      write_lse(at);
      float low[4], high[4];  // out times rows 0 to 7, and 8 to 15, of dout
      stream<kParts * kHalvesV>(
          [&](i32 unit, u32 shared, u32 barrier) {
            if (this_lane() != 0) return;
            const i32 column = unit % kHalvesV * 64, token = at.token + unit / kHalvesV * 16;
            const i32 b = a.seq.varlen() ? 0 : at.b;
            ptx::barrier_expect(barrier, 2 * kBoxBytes);
            ptx::load_box(shared, out, barrier, column, token, at.h, b);
            ptx::load_box(shared + kBoxBytes, dout, barrier, column, token, at.h, b);
          },
          [&](i32 unit, u32 stage) {
            const i32 part = unit / kHalvesV, half = unit % kHalvesV;
            if (half == 0) {
#pragma unroll
              for (i32 n = 0; n < 4; ++n) low[n] = high[n] = 0;
            }
            multiply(at, part, half, stage, low, high);
            if (half == kHalvesV - 1) write_delta(at, part, diagonal(low, high), sink_sum);
          });
      float4* const sum = reinterpret_cast<float4*>(piece(at, 0, 0)) + this_lane();
#pragma unroll 8
      for (i32 n = 0; n < kRows * kD / 128; ++n) sum[32 * n] = make_float4(0, 0, 0, 0);
    }
    if (kSinks && a.sink_sums) {
#pragma unroll
      for (i32 lanes = 16; lanes > 0; lanes /= 2) sink_sum += ptx::shuffle_xor(sink_sum, lanes);
      if (this_lane() == 0) a.sink_sums[at.number] = sink_sum;
    }
    __syncwarp();
    ptx::release_if(a.prepared + at.section, this_lane() == 0);
  }
  /// Adds products of 64 columns of 16 rows of out and dout; what counts of them is the diagonal. Which
  /// columns a lane multiplies first does not matter as long as they are the same of both.
  JALI_DEVICE void multiply(const RowTile& at, i32 part, i32 half, u32 stage, float (&low)[4],
                            float (&high)[4]) const {
    const i32 lane = this_lane(), line = lane / 4;
    // The swizzle; PERF: odd rows begin with the other 32 columns, so that banks do not collide.
    const u32 from = stage + line * 128 + ((lane & 3) << 4 ^ line << 4 ^ (line & 1) << 6);
    constexpr i32 kTogether = kLoads / 2;
#pragma unroll 1
    for (i32 begin = 0; begin < 4; begin += kTogether) {
      u32 o[kTogether][4], g[kTogether][4];
#pragma unroll
      for (i32 x = 0; x < kTogether; ++x) {
        const i32 n = begin + x, eight = n % 2 * 8;
        // Behind the end others are read: of rows, whose delta is not looked at, or of columns, which
        // count as 0.
        const i32 row = min_of(16 * part + line + eight, at.rows - 1);
        const i32 column = 64 * half + (n / 2 ^ line & 1) * 32 + lane % 4 * 8;
        const i32 inside = column < a.Dv ? column : 0;
        const u32 shared = (from ^ n / 2 * 64) + eight * 128;
        read(shared, row_at(a.out, a.out_strides, at, row) + inside, o[x]);
        read(shared + kBoxBytes, row_at(a.dout, a.dout_strides, at, row) + inside, g[x]);
        if (kStages == 0 && column >= a.Dv) o[x][0] = o[x][1] = o[x][2] = o[x][3] = 0;
        if (kStages == 0 && column >= a.Dv) g[x][0] = g[x][1] = g[x][2] = g[x][3] = 0;
      }
#pragma unroll
      for (i32 x = 0; x < kTogether; ++x) {
        float (&d)[4] = x % 2 ? high : low;
#pragma unroll
        for (i32 w = 0; w < 4; w += 2) {  // the other 8 rows of the product are not looked at
          ptx::mma<T>(d, {o[x][w], o[x][w], o[x][w + 1], o[x][w + 1]}, {g[x][w], g[x][w + 1]});
        }
      }
    }
  }
  /// Element (n, n) for lane n < 16: it is in lane 4 m + m / 2, m = n % 8.
  JALI_DEVICE static float diagonal(const float (&low)[4], const float (&high)[4]) {
    const i32 lane = this_lane(), from = (lane & 7) * 4 + (lane & 7) / 2;
    const bool odd = lane >> 2 & 1;
    const float first = __shfl_sync(0xffffffffu, odd ? low[1] : low[0], from);
    const float second = __shfl_sync(0xffffffffu, odd ? high[1] : high[0], from);
    return lane & 8 ? second : first;
  }
  JALI_DEVICE float lse_of(const RowTile& at, i32 row) const {
    return a.lse[cuda::offset(a.lse_strides, at.b, at.h, i64{at.token} + row)];
  }
  JALI_DEVICE void write_lse(const RowTile& at) const {
#pragma unroll
    for (i32 n = 0; n < kRows / 32; ++n) {
      const i32 row = 32 * n + this_lane();
      float lse = row < at.rows ? lse_of(at, row) : ptx::infinity();
      if (lse == -ptx::infinity()) lse = ptx::infinity();  // weighs nothing
      write_statistic(a.neg_lse, at, row, lse * a.lse_factor);
    }
  }
  /// Of 16 rows, by lanes 0 to 15; delta: sum(dout · out), 0 where a row sees nothing.
  JALI_DEVICE void write_delta(const RowTile& at, i32 part, float delta, float& sink_sum) const {
    const i32 lane = this_lane(), row = 16 * part + lane;
    if (lane >= 16) return;
    if (row >= at.rows) delta = 0;
    if (row < at.rows && (kSinks || kRowBias || a.dlse)) {
      const i64 token = i64{at.token} + row;
      const float lse = lse_of(at, row);
      const bool sees = lse != -ptx::infinity();
      const float dlse = a.dlse ? a.dlse[cuda::offset(a.dlse_strides, at.b, at.h, token)] : 0.0f;
      delta = sees ? delta - dlse : 0;
      float sink = 0;  // its share of what the row sees, times delta
      if constexpr (kSinks) {
        if (sees) sink = ptx::exp2_fast((a.scores.sinks[at.h] - lse) * cuda::kLog2E) * delta;
        sink_sum -= sink;
      }
      if constexpr (kRowBias) {
        const i64 first = a.seq.varlen() ? 0 : i64{at.b} * a.seq.Lq;
        *a.row_sums.at(at.h, first + token) = sees ? sink + dlse : 0;
      }
    }
    write_statistic(a.neg_delta, at, row, -delta);
  }
  /// kMatrices: infinities become very large, since zeros multiply them, too.
  JALI_DEVICE static void write_statistic(float* to, const RowTile& at, i32 row, float value) {
    if constexpr (!kMatrices) {
      to[i64{at.number} * kRows + row] = value;
    } else {
      constexpr float kMost = 3e38f;
      const i64 place = i64{at.number} * (kRows / 64) + row / 64;
      u16* const matrix = reinterpret_cast<u16*>(to) + place * (cuda::kStatisticBytes / 2);
      const i32 column = row % 64;
      if (fabsf(value) > kMost) value = value > 0 ? kMost : -kMost;
#pragma unroll
      for (i32 r = 0; r < 3; ++r) {
        const u16 part = static_cast<u16>(ptx::BF16::pack(value, 0));
        matrix[r * 64 + (column / 8 ^ r) * 8 + column % 8] = part;
        value -= ptx::BF16::value(part);
      }
    }
  }

  /// dq = scale · dq_sum.
  JALI_DEVICE void finish(const RowTile& at) {
    if (at.rows <= 0) return;
    stream<kParts * kHalves>(
        [&](i32 unit, u32 shared, u32 barrier) {
          if (this_lane() != 0) return;
          ptx::barrier_expect(barrier, kStageBytes);
          ptx::load_bulk(shared, piece(at, unit / kHalves, unit % kHalves), kStageBytes, barrier);
        },
        [&](i32 unit, u32 stage) { round(at, unit / kHalves, unit % kHalves, stage); });
  }
  /// 64 columns of 16 rows, two blocks of 8 columns at a time. The lanes of a pair exchange, so that
  /// each has four columns of one of the blocks.
  JALI_DEVICE void round(const RowTile& at, i32 part, i32 half, u32 stage) const {
    const i32 lane = this_lane(), odd = lane & 1;
    const i32 column = 64 * half + odd * 8 + (lane & 2) * 2;
    const float* const global = piece(at, part, half) + lane * 4;
    u16* const to = const_cast<u16*>(row_at(a.dq, a.dq_strides, at, 16 * part + lane / 4)) + column;
#pragma unroll 1
    for (i32 begin = 0; begin < 8; begin += kLoads) {
      u32 x[kLoads][4];
#pragma unroll
      for (i32 n = 0; n < kLoads; ++n) {
        read(stage + (begin + n) * 512 + lane * 16, global + (begin + n) * 128, x[n]);
      }
#pragma unroll
      for (i32 j = 0; j < kLoads; j += 2) {
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          u32 w[2];
#pragma unroll
          for (i32 n = 0; n < 2; ++n) {
            w[n] = T::pack(__uint_as_float(x[j + n][2 * e]) * a.scale,
                           __uint_as_float(x[j + n][2 * e + 1]) * a.scale);
          }
          ptx::exchange(w[0], w[1], odd, 1);
          const i32 at_column = 8 * (begin + j);
          if (16 * part + lane / 4 + 8 * e < at.rows && column + at_column < a.D) {
            *reinterpret_cast<uint2*>(to + 8 * e * a.dq_strides.l + at_column) =
                make_uint2(w[0], w[1]);
          }
        }
      }
    }
  }

  /// Whether all key tiles of a section have added to its sums, as this lane sees it.
  JALI_DEVICE bool complete(i32 section) const {
    constexpr i32 kEach = cuda::kBackwardConsumerWarps;
    return ptx::is_at_least(a.added + section, a.key_order().in_section(section) * kEach) &&
           ptx::is_at_least(a.prepared + section, a.row_order().in_section(section));
  }
  JALI_DEVICE static i32 take(i32* counter) {
    i32 n = 0;
    if (this_lane() == 0) n = atomicAdd(counter, 1);
    return ptx::broadcast(n);
  }

  /// A warp's work beside that of others: prepares what is wanted, and rounds what is complete. wanted:
  /// the last section to prepare, as the loader goes on; kAll when it is done.
  static constexpr i32 kAll = 0x7fffffff;
  JALI_DEVICE void work(const volatile i32& wanted) {
    const cuda::WorkOrder order = a.row_order();
    const i32 total = order.total();
    i32 taken = -1, known = -1;  // known: a section that is complete
    i32 own = take(a.taken + 2);
#pragma unroll 1
    while (own < total || taken + 1 < total) {
      const i32 last = ptx::broadcast(wanted);
      // Looked at before one is taken: who holds one that is not wanted yet would keep others waiting.
      if (taken < total && order.section_of(taken + 1) >= last) {
        taken = ptx::broadcast(ptx::glance(a.taken + 1)) - 1;
      }
      if (taken + 1 < total && order.section_of(taken + 1) <= last) {
        taken = take(a.taken + 1);
        if (taken < total) prepare(row_tile(taken));
        continue;
      }
      if (own < total) {
        const i32 at = order.section_of(own);
        if (at == known || __all_sync(0xffffffffu, complete(at))) {
          known = at;
          finish(row_tile(own));
          own = take(a.taken + 2);
          continue;
        }
      }
      __nanosleep(1000);
    }
  }
  /// For warps that have nothing else to do at the beginning: prepares what the first key tiles of all
  /// blocks need.
  JALI_DEVICE void begin() {
    const cuda::WorkOrder order = a.row_order();
    if (a.key_order().total() == 0) return;
    const i32 last = a.key_order().reach(gridDim.x - 1);
    const i32 count = min_of(order.total(), (last + 1) * order.section * order.per_head);
#pragma unroll 1
    while (ptx::broadcast(ptx::glance(a.taken + 1)) < count) {
      const i32 n = take(a.taken + 1);
      if (n < order.total()) prepare(row_tile(n));
    }
  }
  /// And at the end: rounds.
  JALI_DEVICE void end() {
    const cuda::WorkOrder order = a.row_order();
#pragma unroll 1
    for (i32 n = take(a.taken + 2); n < order.total(); n = take(a.taken + 2)) {
      while (!__all_sync(0xffffffffu, complete(order.section_of(n)))) __nanosleep(200);
      finish(row_tile(n));
    }
  }
};

}  // namespace jali::tile
