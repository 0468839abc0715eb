// The options of the scores in a backward pass, and the gradients of biases, on a warp's 16 keys of
// a transposed tile: element 4 n + 2 e + x of a thread is the cell (row + 8 n + x, key + 8 e).
#pragma once

#include "cuda/kernel/backward.h"
#include "cuda/ptx/matrix.h"
#include "cuda/ptx/wgmma.h"

namespace jali::tile {

/// A thread's first cell.
struct CellPlace {
  Frame f;
  i32 row, key;
  i32 line;  // the key in its tile
};

/// Bit n of the word of lane 4 q + r changes places with bit q of the word of lane 4 n + r, in each
/// byte of the words by itself.
JALI_DEVICE u32 transpose_bits(u32 word, i32 lane) {
  constexpr u32 kLow[3] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu};
#pragma unroll
  for (i32 n = 0; n < 3; ++n) {
    const i32 shift = 1 << n;
    const u32 other = ptx::shuffle_xor(word, 4 * shift);
    word = lane & 4 * shift ? (word & ~kLow[n]) | (other >> shift & kLow[n])
                            : (word & kLow[n]) | (other & kLow[n]) << shift;
  }
  return word;
}

/// Ones in the low half where bit 0 is set, in the high half where bit 1 is.
JALI_DEVICE u32 kept_halves(u32 bits) {
  return (bits & 1 ? 0x0000ffffu : 0) | (bits & 2 ? 0xffff0000u : 0);
}

/// kTogether: blocks of 8 rows whose loads may be under way together.
template <class T, i32 kRows, cuda::ScoreOptions kOptions, cuda::BiasGradients kWanted,
          i32 kTogether>
struct BackwardScores {
  using Args = cuda::BackwardArgs;
  /// Whether the main kernel has anything to do with the options.
  static constexpr bool kOn = cuda::in_main_kernel(kOptions, kWanted);

  const Args& a;
  const CellPlace& at;
  const cuda::Scores<T, kOptions> scores;
  u32 neg_lse;  // of this thread's rows, in shared memory
  float of_key[2];

  JALI_DEVICE BackwardScores(const Args& args, const CellPlace& place, u32 statistics)
      : a(args), at(place), scores(args.scores, place.f), neg_lse(statistics) {
    of_key[0] = scores.key_bias(at.key);
    of_key[1] = scores.key_bias(at.key + 8);
  }

  /// Block n of 8 rows: products, or raw scores less LSE, to weights. `slopes`: softcap's, pairs of
  /// fp16.
  JALI_DEVICE void weigh(float (&s)[kRows / 2], i32 n, u32 (&slopes)[2]) const {
    if constexpr (!kOptions.adjusts()) {
#pragma unroll
      for (i32 m = 0; m < 4; ++m) s[4 * n + m] = ptx::exp2_fast(s[4 * n + m] * a.scale_log2);
    } else {
      float lse[2], slope[4];
      ptx::load_pair(neg_lse + 32 * n, lse[0], lse[1]);
#pragma unroll
      for (i32 x = 0; x < 2; ++x) {
        const i32 i = at.row + 8 * n + x;
        const i64 row = scores.bias_row(i);
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          float& cell = s[4 * n + 2 * e + x];
          const float score = scores.score(cell, of_key[e] + scores.bias(row, at.key + 8 * e), i,
                                           at.key + 8 * e, slope[2 * e + x]);
          // A row that sees nothing, or that is none, whatever its bias says.
          cell = lse[x] == -ptx::infinity() ? 0 : ptx::exp2_fast(score + lse[x]);
        }
      }
      if constexpr (kOptions.softcap) {
        slopes[0] = ptx::FP16::pack(slope[0], slope[1]);
        slopes[1] = ptx::FP16::pack(slope[2], slope[3]);
      }
      if ((n + 1) % kTogether == 0) ptx::hold_loads(s[4 * n + 3], a.taken);
    }
  }

  /// What dropout keeps: bit m of word n is element 32 n + m. One call of Philox has eight keys of
  /// a row, each of them another lane's: lanes of equal lane % 4 call for the 32 (row, block of
  /// keys) that they share, lane 4 q + r for the elements 8 m + q, then they change places.
  JALI_DEVICE static void draw(u32 (&kept)[kRows / 64], const cuda::ScoreArgs& a,
                               const CellPlace& at, i32 lane) {
    const u64 seed = *a.seed;
    const i32 q = lane >> 2;
    const i32 first = at.row + (q >> 2) * 8 + (q & 1);
    const u32 block = static_cast<u32>(at.key / 8 + (q >> 1 & 1));
#pragma unroll
    for (i32 n = 0; n < kRows / 64; ++n) {
      u32 bits = 0;
#pragma unroll
      for (i32 m = 0; m < 4; ++m) {
        const Philox x = philox4x32_7(seed, block, static_cast<u32>(first + 64 * n + 16 * m),
                                      static_cast<u32>(at.f.h), static_cast<u32>(at.f.b));
#pragma unroll
        for (i32 j = 0; j < 8; ++j) {
          bits |= static_cast<u32>(dropout_number(x, j) >= a.dropout_threshold) << (8 * m + j);
        }
      }
      kept[n] = transpose_bits(bits, lane);
    }
  }
  /// dP less delta where dropout is on: the scale belongs to dP alone.
  JALI_DEVICE static float undrop(float dp, bool kept, float neg_delta, const cuda::ScoreArgs& a) {
    return __fmaf_rn(kept ? dp : 0.0f, a.keep_scale, neg_delta);
  }

  /// Writes or adds the scores' gradients to those of the biases.
  JALI_DEVICE static void emit(const float (&d)[kRows / 2], const Args& a, const CellPlace& at,
                               i32 lane) {
    if constexpr (kWanted.keys) {
      const Frame& f = at.f;
      float* const to =
          a.key_sums.at(f.h, (a.seq.varlen() ? i64{f.k_start} : i64{f.b} * a.seq.Lk) + at.key);
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        float sum = 0;
#pragma unroll
        for (i32 n = 0; n < kRows / 8; ++n) sum += d[4 * n + 2 * e] + d[4 * n + 2 * e + 1];
        sum += ptx::shuffle_xor(sum, 1);
        sum += ptx::shuffle_xor(sum, 2);
        // One thread adds to a key of a KV head, row tile by row tile: the same order every time.
        ptx::add_if(to + 8 * e, sum, (lane & 3) == 0 & at.key + 8 * e < f.num_keys);
      }
    }
    if constexpr (kWanted.cells != cuda::CellGradient::kNone) {
      const cuda::CellTable& t = a.dbias;
      const i32 rows = min_of(at.f.num_rows, t.rows) - at.row;
      const i32 keys = min_of(at.f.num_keys, t.keys) - at.key;
      const i64 first = at.f.b * t.stride_b + at.f.h / t.head_div * t.stride_h +
                        at.row * t.stride_q + at.key * t.stride_k;
#pragma unroll
      for (i32 n = 0; n < kRows / 8; ++n) {
#pragma unroll
        for (i32 x = 0; x < 2; ++x) {
#pragma unroll
          for (i32 e = 0; e < 2; ++e) {
            const float cell = d[4 * n + 2 * e + x];
            const i64 to = first + (8 * n + x) * t.stride_q + 8 * e * t.stride_k;
            const bool in = 8 * n + x < rows & 8 * e < keys;
            if constexpr (kWanted.cells == cuda::CellGradient::kAdd) {
              // As for keys, where no sequences and no KV heads share the cell.
              ptx::add_if(static_cast<float*>(t.data) + to, cell, in);
            } else if constexpr (kWanted.cells == cuda::CellGradient::kFloat) {
              if (in) static_cast<float*>(t.data)[to] = cell;
            } else {
              if (in) static_cast<u16*>(t.data)[to] = static_cast<u16>(T::pack(cell, 0));
            }
          }
        }
      }
    }
  }
};

}  // namespace jali::tile
