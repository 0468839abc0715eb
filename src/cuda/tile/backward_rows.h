// What row tiles need before key tiles see them, and after that: they are prepared, and their sums of
// dq are rounded, by warps beside the loader, and by consumers before and after their own work.
#pragma once

#include "cuda/kernel/backward.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/matrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/order.h"

namespace jali::tile {

/// kRows: of a row tile; kD, kDv: columns of dq_sum and of dout, multiples of 64. kMatrices: each statistic
/// is written as the sum of three numbers in bf16, [3][64] for 64 rows, under the 128-byte swizzle. kSinks:
/// there are sinks. kRowBias: the gradient of a bias over rows alone is wanted. kStages: buffers of a warp
/// that its threads fill ahead; 0: what is read is read where it is, by kLoads instructions at once, four
/// registers each. kAdders: warps that add to the sums of dq for a key tile.
template <class T, i32 kRows, i32 kD, i32 kDv, bool kMatrices, bool kSinks, bool kRowBias,
          i32 kStages, i32 kLoads, i32 kAdders>
struct BackwardRows {
  using Args = cuda::BackwardArgs;
  static constexpr i32 kPartRows = cuda::kBackwardPartRows;
  static constexpr i32 kParts = kRows / kPartRows;  // of a row tile
  static_assert(kPartRows == 16);
  static constexpr i32 kHalves = kD / 64, kHalvesV = kDv / 64;
  static constexpr i32 kBlocks = kAdders / cuda::kBackwardConsumerWarps;  // that share a key tile
  // A unit is 64 columns of a part.
  static constexpr i32 kPieceFloats = 1024;  // of dq_sum
  static constexpr i32 kBoxBytes = 2048;     // of out or dout
  static constexpr i32 kStageBytes = cuda::kBackwardRowBytes;
  static_assert(kStageBytes == 4 * kPieceFloats && kStageBytes == 2 * kBoxBytes);
  static_assert(kLoads % 4 == 0);

  /// Parts of 16 rows of one row tile, one after another.
  struct Run {
    i32 b, h;          // sequence, query head
    i32 token, rows;   // the first one; how many there are from it to the end, may be less than one
    i32 place, parts;  // the first one among the parts of all heads, by sequence and head; how many
    JALI_DEVICE i32 tile() const { return place / kParts; }
    JALI_DEVICE i32 part() const { return place % kParts; }
  };

  const Args& a;
  u32 stages = 0;  // shared memory

  // PERF: made anew wherever it is needed, since registers are few.
  JALI_DEVICE static i32 this_lane() { return ptx::lane_id(); }

  /// Parts n to n + parts - 1 of the row order, all of one row tile. All lanes call it.
  JALI_DEVICE Run run_of(i32 n, i32 parts) const {
    const cuda::Sequences& s = a.seq;
    const i32 per_head = a.row_order().per_head;
    const i32 head = n / per_head, rest = n - head * per_head;
    const i32 part = rest % kParts;
    Run run;
    run.parts = parts;
    i32 t = rest / kParts, g = 0;
    if (s.group > 1) {
      g = t % s.group;
      t /= s.group;
    }
    run.h = head * s.group + g;
    run.b = 0;
    run.place = (run.h * a.row_tiles_of_sequence + t) * kParts + part;
    if (!s.varlen() && s.B > 1) {
      run.b = run.h / s.Hq;
      run.h -= run.b * s.Hq;
    }
    const cuda::TilePlace at = cuda::warp_tile(s, run.b, run.h, t, kRows, true);
    const i32 first = at.first + part * kPartRows;
    run.b = at.f.b;
    run.token = at.f.q_start + first;
    run.rows = at.f.num_rows - first;
    return run;
  }
  /// 64 columns of part n of a run, of dq_sum, as accumulators lie: [8 columns][lane][4].
  JALI_DEVICE float* piece(const Run& run, i32 n, i32 half) const {
    const i32 place = ptx::opaque(run.place) + n, part = place % kParts;
    return a.dq_sum + i64{place / kParts} * (kRows * kD) +
           (part / 4 * kHalves * 4 + half * 4 + part % 4) * kPieceFloats;
  }
  JALI_DEVICE static u16* row_at(const void* of, const cuda::Strides& strides, const Run& run,
                                 i32 row) {
    return static_cast<u16*>(const_cast<void*>(of)) +
           cuda::offset(strides, run.b, run.h, i64{run.token} + row);
  }

  // Stages: load(unit, shared) begins to fill one; use(unit, shared) follows, unit by unit.
  // PERF: each thread copies. By the bulk copy engine D64 took 10.8 for 10.2 ms, D128 about as long as this.
  template <class Load>
  JALI_DEVICE void begin_units(Load load, i32 count) const {
#pragma unroll 1
    for (i32 unit = 0; unit < kStages; ++unit) {
      if (unit < count) load(unit, stages + unit * kStageBytes);
      ptx::copy_commit();
    }
  }
  template <class Load, class Use>
  JALI_DEVICE void use_units(Load load, i32 count, Use use) const {
    u32 stage = stages;
#pragma unroll 1
    for (i32 unit = 0; unit < count; ++unit) {
      if constexpr (kStages > 0) {
        ptx::copy_wait<max_of(kStages - 1, 0)>();
        __syncwarp();
      }
      use(unit, stage);
      if constexpr (kStages > 0) {
        __syncwarp();
        if (unit + kStages < count) load(unit + kStages, stage);
        ptx::copy_commit();
        stage = stage - stages < (kStages - 1) * kStageBytes ? stage + kStageBytes : stages;
      }
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
  JALI_DEVICE void prepare(i32 n) {
    const Run run = run_of(n, n < a.first_parts ? 1 : kParts);
    if (run.part() * kPartRows + run.rows > 0) {  // all of a row tile is read, if any
      const i32 count = run.parts * kHalvesV;
      auto load = [&](i32 unit, u32 shared) {
        const i32 lane = this_lane(), column = unit % kHalvesV * 64 + lane % 8 * 8;
        const i32 row = unit / kHalvesV * kPartRows + lane / 8;
        const u16* from_out = row_at(a.out, a.out_strides, run, row) + column;
        const u16* from_dout = row_at(a.dout, a.dout_strides, run, row) + column;
        shared += lane * 16;
#pragma unroll
        for (i32 n = 0; n < kPartRows; n += 4) {
          const bool inside = row + n < run.rows && column < a.Dv;
          ptx::copy_or_clear(shared + n * 128, from_out + n * a.out_strides.l, inside);
          ptx::copy_or_clear(shared + n * 128 + kBoxBytes, from_dout + n * a.dout_strides.l,
                             inside);
        }
      };
      begin_units(load, count);
      write_lse(run);
#pragma unroll 1
      for (i32 n = 0; n < run.parts; ++n) {
#pragma unroll
        for (i32 half = 0; half < kHalves; ++half) {
          float4* const sum = reinterpret_cast<float4*>(piece(run, n, half)) + this_lane();
#pragma unroll
          for (i32 x = 0; x < kPieceFloats / 128; ++x) sum[32 * x] = make_float4(0, 0, 0, 0);
        }
      }
      float low = 0, high = 0;
      use_units(load, count, [&](i32 unit, u32 stage) {
        const i32 part = unit / kHalvesV, half = unit % kHalvesV;
        multiply(run, part, half, stage, low, high);
        if (half == kHalvesV - 1) {
          const float sink = write_delta(run, part, diagonal(low, high));
          if (kSinks && a.sink_sums) write_sink(run, part, sink);
          low = high = 0;
        }
      });
    } else if (kSinks && a.sink_sums) {
      for (i32 n = 0; n < run.parts; ++n) write_sink(run, n, 0);
    }
    __syncwarp();
    if (a.seq.cut()) clear_tail(run);
    ptx::release_if(a.prepared + a.row_order().section_of(n), run.parts, this_lane() == 0);
  }
  /// Tokens behind the last piece have no gradient; where they are padded, they see sinks alone.
  JALI_DEVICE void clear_tail(const Run& run) const {
    const i32 last = end_with_tail(a.seq, run.b, run.token + run.rows, true);
    const i32 begin = max_of(run.rows, 0), end = min_of(run.parts * kPartRows, last - run.token);
    if (kSinks && a.sink_sums && a.dlse && !a.seq.varlen() && of_last_piece(run)) {
      float sum = 0;
#pragma unroll 1
      for (i32 row = begin + this_lane(); row < end; row += 32) {
        sum += a.dlse[cuda::offset(a.dlse_strides, run.b, run.h, i64{run.token} + row)];
      }
      sum = sum_of_lanes(sum);
      if (this_lane() == 0) a.sink_sums[run.place] += sum;
    }
#pragma unroll 1
    for (i32 row = begin; row < end; ++row) {
      u16* const to = row_at(a.dq, a.dq_strides, run, row);
#pragma unroll 1
      for (i32 d = this_lane(); d < a.D; d += 32) to[d] = 0;
    }
  }
  /// Whether a run is of the last document. Where others before it are empty, they end where it begins.
  JALI_DEVICE bool of_last_piece(const Run& run) const {
    const cuda::Sequences& s = a.seq;
    const i32 slot = run.tile() % a.row_tiles_of_sequence;
    const i32 last = s.pieces - 1, begin = s.cu_q[run.b * s.cu_step + last];
    return slot >= cuda::first_slot(clamp_to(begin, 0, s.tokens_q), last, kRows);
  }
  /// Adds the products of 64 columns of 16 rows of out and dout that this lane has of the diagonal, of rows
  /// 0 to 7 and 8 to 15. Which columns a lane multiplies first does not matter as long as they are the same
  /// of both.
  ///
  /// PERF: of two words in a row the mma takes the second for rows 8 to 15: as they are loaded, without a
  /// move, words 2 n count in the upper half of the product, 2 n + 1 in the lower half of another.
  JALI_DEVICE void multiply(const Run& run, i32 part, i32 half, u32 stage, float& low,
                            float& high) const {
    const i32 lane = this_lane(), line = lane / 4;
    // PERF: odd rows begin with the other 32 columns, so that banks do not collide.
    const u32 from = stage + line * 128 + ((lane & 3) << 4 ^ (line & 1) << 6);
    constexpr i32 kTogether = kLoads / 4;  // times 8 rows
#pragma unroll
    for (i32 begin = 0; begin < 2; begin += kTogether) {
      u32 o[kTogether][2][4], g[kTogether][2][4];
#pragma unroll
      for (i32 x = 0; x < kTogether; ++x) {
        const i32 eight = (begin + x) * 8;
        // Behind the end others are read: of rows, whose delta is not looked at, or of columns, which
        // count as 0.
        const u16 *from_out = nullptr, *from_dout = nullptr;
        if constexpr (kStages == 0) {
          const i32 row = min_of(kPartRows * part + line + eight, run.rows - 1);
          from_out = row_at(a.out, a.out_strides, run, row);
          from_dout = row_at(a.dout, a.dout_strides, run, row);
        }
#pragma unroll
        for (i32 n = 0; n < 2; ++n) {
          const i32 column = 64 * half + (n ^ line & 1) * 32 + lane % 4 * 8;
          const i32 inside = column < a.Dv ? column : 0;
          const u32 shared = (from ^ n * 64) + eight * 128;
          read(shared, from_out + inside, o[x][n]);
          read(shared + kBoxBytes, from_dout + inside, g[x][n]);
          if (kStages == 0 && column >= a.Dv) {
#pragma unroll
            for (i32 w = 0; w < 4; ++w) o[x][n][w] = g[x][n][w] = 0;
          }
        }
      }
#pragma unroll
      for (i32 x = 0; x < kTogether; ++x) {
        float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
#pragma unroll
        for (i32 n = 0; n < 2; ++n) {
#pragma unroll
          for (i32 w = 0; w < 4; w += 2) {
            ptx::mma_k8<T>(even, {o[x][n][w], o[x][n][w + 1]}, g[x][n][w]);
            ptx::mma_k8<T>(odd, {o[x][n][w], o[x][n][w + 1]}, g[x][n][w + 1]);
          }
        }
        (begin + x ? high : low) += line & 1 ? even[1] + odd[3] : even[0] + odd[2];
        // PERF: the loads of the other 8 rows stay behind, or some kernels would spill.
        if (kStages > 0 && begin + x == 0) ptx::pin(low, stages);
      }
    }
  }
  /// Element (n, n) for lane n < 16: it is in lane 4 m + m / 2, m = n % 8.
  JALI_DEVICE static float diagonal(float low, float high) {
    const i32 lane = this_lane(), from = (lane & 7) * 4 + (lane & 7) / 2;
    low = __shfl_sync(0xffffffffu, low, from);
    high = __shfl_sync(0xffffffffu, high, from);
    return lane & 8 ? high : low;
  }
  JALI_DEVICE void write_lse(const Run& run) const {
#pragma unroll 1
    for (i32 row = this_lane(); row < run.parts * kPartRows; row += 32) {
      float lse = ptx::infinity();
      const i64 token = i64{run.token} + row;
      if (row < run.rows) lse = a.lse[cuda::offset(a.lse_strides, run.b, run.h, token)];
      if (lse == -ptx::infinity()) lse = ptx::infinity();  // weighs nothing
      write_statistic(a.neg_lse, run, row, lse * a.lse_factor);
    }
  }
  /// The sum over the lanes of what a sink weighs in a part.
  JALI_DEVICE void write_sink(const Run& run, i32 part, float sum) const {
    sum = sum_of_lanes(sum);
    if (this_lane() == 0) a.sink_sums[run.place + part] = sum;
  }
  JALI_DEVICE static float sum_of_lanes(float x) {
#pragma unroll
    for (i32 lanes = 16; lanes > 0; lanes /= 2) x += ptx::shuffle_xor(x, lanes);
    return x;
  }
  /// Of 16 rows, by lanes 0 to 15; delta: sum(dout · out), 0 where a row sees nothing. Returns this lane's
  /// share of the sink's gradient.
  JALI_DEVICE float write_delta(const Run& run, i32 part, float delta) const {
    const i32 lane = this_lane(), row = kPartRows * part + lane;
    float sink_share = 0;
    if (lane >= kPartRows) return sink_share;
    if (row >= run.rows) delta = 0;
    if (row < run.rows && (kSinks || kRowBias || a.dlse)) {
      const i64 token = i64{run.token} + row;
      // PERF: places are found here; ahead of the loop they would spill.
      const i32 b = ptx::opaque(run.b), h = ptx::opaque(run.h);
      const float lse = a.lse[cuda::offset(a.lse_strides, b, h, token)];
      const bool sees = lse != -ptx::infinity();
      const float dlse = a.dlse ? a.dlse[cuda::offset(a.dlse_strides, b, h, token)] : 0.0f;
      delta = sees ? delta - dlse : 0;
      float sink = 0;  // its share of what the row sees, times delta
      if constexpr (kSinks) {
        if (sees) sink = ptx::exp2_fast((a.scores.sinks[run.h] - lse) * cuda::kLog2E) * delta;
        sink_share = -sink;
      }
      if constexpr (kRowBias) {
        const i64 first = a.seq.varlen() ? 0 : i64{run.b} * a.seq.Lq;
        *a.row_sums.at(run.h, 0, first + token) = sees ? sink + dlse : 0;
      }
    }
    write_statistic(a.neg_delta, run, row, -delta * a.delta_scale);
    return sink_share;
  }
  /// kMatrices: infinities become very large, since zeros multiply them, too.
  JALI_DEVICE static void write_statistic(float* to, const Run& run, i32 row, float value) {
    if constexpr (!kMatrices) {
      to[i64{ptx::opaque(run.place)} * kPartRows + row] = value;
    } else {
      row += run.part() * kPartRows;
      constexpr float kMost = 3e38f;
      const i64 place = i64{run.tile()} * (kRows / 64) + row / 64;
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

  /// dq = dq_scale · dq_sum. Returns what comes after the parts.
  ///
  /// A unit is 64 columns of 16 rows, two blocks of 8 columns at a time. The lanes of a pair exchange, so
  /// that each has four columns of one of the blocks.
  JALI_DEVICE i32 finish(i32 n) {
    const Run run = run_of(n, n < before_last() ? kParts : 1);
    if (run.rows <= 0) return n + run.parts;
    const i32 count = run.parts * kHalves;
    auto load = [&](i32 unit, u32 shared) {
      const i32 lane = this_lane();
      const float* const from = piece(run, unit / kHalves, unit % kHalves) + lane * 4;
#pragma unroll
      for (i32 n = 0; n < 8; ++n) {
        ptx::copy_or_clear(shared + n * 512 + lane * 16, from + n * 128, true);
      }
    };
    begin_units(load, count);
    const i32 lane = this_lane(), odd = lane & 1, column = odd * 8 + (lane & 2) * 2;
    u16* to = row_at(a.dq, a.dq_strides, run, lane / 4) + column;
    const i64 eight = 8 * a.dq_strides.l;
    i32 rows = run.rows - lane / 4, columns = a.D - column;  // to the ends, from `to` on
    use_units(load, count, [&](i32 unit, u32 stage) {
      const float* global = nullptr;
      if (kStages == 0) global = piece(run, unit / kHalves, unit % kHalves) + lane * 4;
#pragma unroll
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
              w[n] = T::pack(__uint_as_float(x[j + n][2 * e]) * a.dq_scale,
                             __uint_as_float(x[j + n][2 * e + 1]) * a.dq_scale);
            }
            ptx::exchange(w[0], w[1], odd, 1);
            const i32 at_column = 8 * (begin + j);
            if (8 * e < rows && at_column < columns) {
              *reinterpret_cast<uint2*>(to + e * eight + at_column) = make_uint2(w[0], w[1]);
            }
          }
        }
      }
      const bool last = unit % kHalves == kHalves - 1;
      to += last ? 2 * eight - 64 * (kHalves - 1) : i64{64};
      columns += last ? 64 * (kHalves - 1) : -64;
      if (last) rows -= kPartRows;
    });
    return n + run.parts;
  }

  /// Whether all key tiles of a section have added to its sums, as this lane sees it.
  JALI_DEVICE bool complete(i32 section) const {
    return ptx::is_at_least(a.added + section, a.key_order().in_section(section) * kAdders) &&
           ptx::is_at_least(a.prepared + section, a.row_order().in_section(section));
  }
  /// Takes parts from one of four counters.
  JALI_DEVICE static i32 take(i32* counter, i32 parts) {
    i32 n = 0;
    if (this_lane() == 0) n = atomicAdd(counter, parts);
    return ptx::broadcast(n);
  }
  JALI_DEVICE i32 take_first() const { return take(a.taken + 1, 1); }
  JALI_DEVICE i32 take_to_prepare() const { return a.first_parts + take(a.taken + 2, kParts); }
  JALI_DEVICE i32 take_to_finish() const { return take(a.taken + 3, kParts); }
  JALI_DEVICE i32 before_last() const { return a.row_order().total() - a.last_parts; }
  JALI_DEVICE i32 take_last() const { return before_last() + take(a.taken + 4, 1); }
  JALI_DEVICE static i32 seen(const i32* counter) { return ptx::broadcast(ptx::glance(counter)); }

  /// A warp's work beside that of others: prepares what is wanted, and rounds what is complete. wanted:
  /// the last section to prepare, as the loader goes on; kAll when it is done.
  static constexpr i32 kAll = 0x7ffffffe;  // one may be added
  JALI_DEVICE void work(const volatile i32& wanted) {
    const cuda::WorkOrder order = a.row_order();
    const i32 total = order.total();
    // What is to be prepared next, and finished (if it was taken, ~own), as it was seen last; what is
    // before complete_to is complete, from `own` on.
    i32 next = 0, own = 0, complete_to = 0;
#pragma unroll 1
    while (next < total || own < total) {
      i32 n = total;
      if (next < a.first_parts) {
        n = take_first();
        next = min_of(n, a.first_parts);  // NOTE: not what a counter says that is run out
        if (n >= a.first_parts) continue;
      } else if (next < total) {
        const i32 last = ptx::broadcast(wanted);
        // Looked at before one is taken: who holds one that is not wanted yet would keep others waiting.
        if (next >= order.before(last)) next = a.first_parts + seen(a.taken + 2);
        if (next < order.before(last + 1)) n = next = take_to_prepare();
      }
      if (n < total) {
        prepare(n);
        continue;
      }
      if (own >= complete_to && own < total) {
        own = seen(a.taken + 3);
        if (own >= before_last()) own = before_last() + seen(a.taken + 4);
      }
      n = own < 0 ? ~own : own;
      if (n < total && n >= complete_to) {
        const i32 section = order.section_of(n);
        if (__all_sync(0xffffffffu, complete(section))) complete_to = order.before(section + 1);
      }
      if (n >= complete_to) {
        if (n < total) __nanosleep(1000);
        continue;
      }
      const bool single = n >= before_last();
      if (own < 0) {
        own = finish(n);
      } else {
        const i32 end = single ? total : before_last();
        own = min_of(single ? take_last() : take_to_finish(), end);
        if (own < end) own = ~own;
      }
    }
  }
  /// For warps that have nothing else to do at the beginning: prepares what the first key tiles of all
  /// blocks need; more than the first parts where long lines come first.
  JALI_DEVICE void begin() {
    const cuda::WorkOrder order = a.row_order(), keys = a.key_order();
    const i32 wanted = keys.total() > 0 ? order.before(keys.reach(gridDim.x / kBlocks - 1) + 1) : 0;
    bool first = true;
#pragma unroll 1
    while (first || a.first_parts + seen(a.taken + 2) < wanted) {
      const i32 n = first ? take_first() : take_to_prepare();
      if (first && n >= a.first_parts) {
        first = false;
      } else if (n < order.total()) {
        prepare(n);
      }
    }
  }
  /// And at the end: rounds.
  JALI_DEVICE void end() {
    const cuda::WorkOrder order = a.row_order();
    bool single = false;
    i32 known = -1;  // a section that is complete
#pragma unroll 1
    while (true) {
      const i32 n = single ? take_last() : take_to_finish();
      if (n >= (single ? order.total() : before_last())) {
        if (single) break;
        single = true;
        continue;
      }
      const i32 section = order.section_of(n);
      while (section != known && !__all_sync(0xffffffffu, complete(section))) __nanosleep(200);
      known = section;
      finish(n);
    }
  }
  /// A warp looks at counters no more; the last one of `warps` a block leaves them as they were found. (The
  /// loader is done with them before consumers are.)
  JALI_DEVICE void leave(i32 warps) const {
    if (this_lane() != 0) return;
    ptx::fence_device();  // what this warp counted comes before
    if (atomicAdd(a.taken + 5, 1) != warps * static_cast<i32>(gridDim.x) - 1) return;
#pragma unroll 1
    for (i32 n = 0; n < a.num_counters; ++n) a.taken[n] = 0;
  }
};

}  // namespace jali::tile
