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

/// What dropout drops of a thread's cells, of its two keys and 64 rows. Pair k of elements, 2 k and 2 k + 1, are those of
/// rows x (0, 1) of a block of 8 rows, k / 2, and of key + 8 (k % 2). kKeeps: DropoutRule::keeps. kSaturates: numbers are
/// less the limit, modulo 32768, so that those of dropped cells are the highest.
template <bool kKeeps, bool kSaturates>
struct Dropped {
  static_assert(!(kKeeps && kSaturates), "cuda::saturates()");
  DropoutLine keys[2];  // times what makes this thread's numbers the upper halves of words

  /// For the kDropoutRows that at.row is one of; go_to() is to follow. PERF: each thread for itself; that 16 do the same
  /// at the same time takes no more time than words that the loader draws for all.
  JALI_DEVICE void draw(const cuda::ScoreArgs& a, const CellPlace& at) {
    const Philox numbers = dropout_call(*a.seed, at.f.b, at.f.h, at.row, at.key);
    const u32 less = kSaturates ? a.dropout_limit & 0xffff0000u : 0;
#pragma unroll
    for (i32 e = 0; e < 2; ++e) {
      const DropoutLine line = DropoutLine::of_keys(numbers, at.key + 8 * e);
      keys[e] = {line.times * unit(at.key), line.plus * unit(at.key) - less};
    }
  }
  JALI_DEVICE static u32 unit(i32 key) { return key & 1 ? 1 : 0x10000; }
  /// To the 64 rows that have this dropout_shift_of_row(). key: any of this thread's, or less an even number.
  JALI_DEVICE void go_to(u32 shift, i32 key) {
    for (DropoutLine& line : keys) line = line.moved(0, shift, unit(key));
  }
  /// What there is of it, to be kept elsewhere.
  using Words = u32[4];
  JALI_DEVICE Words& words() { return reinterpret_cast<Words&>(keys); }
  JALI_DEVICE u32 word(i32 k, i32 x) const {
    return keys[k % 2].word(dropout_factor(k / 2 * 2 + x));
  }

  /// Ones in the half of each element of pair k that is dropped.
  JALI_DEVICE u32 halves(const cuda::ScoreArgs& a, i32 k) const {
    static_assert(!kSaturates);
    const u32 numbers = ptx::permute(word(k, 0), word(k, 1), 0x7632);
    const u32 below = ptx::magnitudes_below(numbers, a.dropout_limit);
    return kKeeps ? ~below : below;
  }
  /// 1 if an element is kept, else 0. PERF: a comparison that gives a number is one instruction, and fp32
  /// multiplications are cheaper beside the tensor cores than selections are: 2,690 to 2,595 us. So is a difference than a
  /// comparison (backward_tells_by_differences).
  JALI_DEVICE float kept(const cuda::ScoreArgs& a, i32 k, i32 x) const {
    if constexpr (kSaturates) return ptx::saturated_difference(a.dropout_end, word(k, x));
    return ptx::compare_magnitude<kKeeps>(word(k, x), a.dropout_limit & 0xffff0000u);
  }
};

/// kTogether: blocks of 8 rows whose loads may be under way together.
template <class T, i32 kRows, cuda::ScoreOptions kOptions, cuda::BiasGradients kWanted,
          i32 kTogether>
struct BackwardScores {
  using Args = cuda::BackwardArgs;
  static constexpr bool kAdds = cuda::adds_to_scores(kOptions);
  static constexpr bool kAdjusts = cuda::adjusts_products(kOptions);
  /// Whether a bias of keys is all that is added.
  static constexpr bool kAddsKeys = cuda::adds_of_keys(kOptions);
  /// Whether there is anything to do besides exponentials when the products are there.
  static constexpr bool kOn = kAdjusts || kOptions.dropout || kWanted.per_tile();

  const Args& a;
  const CellPlace& at;
  const cuda::Scores<T, kOptions> scores;
  u32 neg_lse;  // of this thread's rows, in shared memory
  float of_key[2];

  JALI_DEVICE BackwardScores(const Args& args, const CellPlace& place, u32 statistics)
      : a(args), at(place), scores(args.scores, place.f), neg_lse(statistics) {
    if constexpr (kAdjusts) load_of_keys(of_key, scores, at);
  }

  /// A bias of this thread's two keys.
  JALI_DEVICE static void load_of_keys(float (&of_key)[2], const cuda::Scores<T, kOptions>& scores,
                                       const CellPlace& at) {
    of_key[0] = scores.key_bias(at.key);
    of_key[1] = scores.key_bias(at.key + 8);
  }

  /// What is added to the scores of a tile, where it is all that is done to them.
  struct Added {
    // PERF: pairs of keys are loaded as rows, coalesced, and transposed.
    static constexpr bool kPairs = kOptions.bias_pairs;
    static constexpr bool kBias = kAdds && kOptions.bias != cuda::BiasType::kNone;
    u32 bias[kBias ? kRows / (kPairs ? 4 : 2) : 1];  // as stored
    float of_key[2], slope, distance;                // of the first cell

    /// PERF: early; the rows behind it are brought near.
    JALI_DEVICE void load(const Args& a, const CellPlace& at, i32 lane) {
      const cuda::Scores<T, kOptions> scores(a.scores, at.f);
      slope = scores.slope;
      distance = static_cast<float>(at.row + at.f.q_offset - at.key);
      load_of_keys(of_key, scores, at);
      if constexpr (kBias) load_bias(a.scores.bias, at, lane);
    }
    JALI_DEVICE void load_bias(const cuda::BiasTable& t, const CellPlace& at, i32 lane) {
      using Element = typename Conditional<kOptions.bias == cuda::BiasType::kFloat, u32, u16>::Type;
      const Element* const head = static_cast<const Element*>(t.data) + at.f.b * t.stride_b +
                                  at.f.h / t.head_div * t.stride_h;
      // The thread's first cell as it loads them: keys along lanes.
      const i32 first_row = at.row - 2 * (lane & 3), first_key = at.key - (lane >> 2);
      const i32 row = kPairs ? first_row + (lane >> 2) : at.row;
      const i32 key = kPairs ? first_key + 2 * (lane & 3) : at.key;
      // What weighs nothing must not become NaN by what pads a bias.
      const i32 last_row = min_of(at.f.num_rows, t.rows) - 1;
      i64 of_key[2];
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        of_key[e] = min_of(key + 8 * e, t.keys - (kPairs ? 2 : 1)) * t.stride_k;
      }
#pragma unroll
      for (i32 n = 0; n < kRows / 8; ++n) {
#pragma unroll
        for (i32 x = 0; x < (kPairs ? 1 : 2); ++x) {
          const Element* const from = head + clamp_to(row + 8 * n + x, 0, last_row) * t.stride_q;
#pragma unroll
          for (i32 e = 0; e < 2; ++e) {
            if constexpr (kPairs) {
              bias[2 * n + e] = *reinterpret_cast<const u32*>(from + of_key[e]);
            } else {
              bias[4 * n + 2 * e + x] = from[of_key[e]];
            }
          }
        }
      }
      if constexpr (kPairs) {
#pragma unroll
        for (i32 n = 0; n < kRows / 32; ++n) {
          const i32 i = clamp_to(first_row + kRows + 32 * n + lane, 0, last_row);
          ptx::prefetch_l2(head + i * t.stride_q + min_of(first_key, t.keys - 2) * t.stride_k);
        }
      }
    }
    // ALiBi alone.
    static constexpr bool kSlopes =
        kOptions.alibi && !kBias && kOptions.key_bias == cuda::BiasType::kNone;
    /// kSlopes: raw scores that start at it. PERF: on one side of the diagonal an instruction a distance, not two: D 64 0.96
    /// of the time. Where statistics start there, too, it would take as many.
    JALI_DEVICE void start(float (&s)[kRows / 2], const Args& a) const {
      float of_one = slope * a.lse_factor;
      if (__all_sync(0xffffffffu, distance >= 8 | distance <= 7 - kRows)) {
        if (distance < 0) of_one = -of_one;
        const float of_first = of_one * distance;
        set_cells(s, [&](float apart) { return __fmaf_rn(apart, of_one, of_first); });
      } else {
        set_cells(s, [&](float apart) { return fabsf(distance + apart) * of_one; });
      }
    }
    /// To what is given by how much further apart they are than the first.
    template <class Value>
    JALI_DEVICE static void set_cells(float (&s)[kRows / 2], Value value) {
#pragma unroll
      for (i32 m = 0; m < kRows / 2; ++m) {
        s[m] = value(static_cast<float>(8 * (m / 4 - m / 2 % 2) + m % 2));
      }
    }
    /// Adds it to raw scores.
    JALI_DEVICE void add_to(float (&s)[kRows / 2], const Args& a) const {
      const float unscale = -a.lse_factor;
#pragma unroll
      for (i32 n = 0; n < kRows / 8; ++n) {
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          u32 pair = 0;
          if constexpr (kBias && kPairs) pair = ptx::transpose_matrix(bias[2 * n + e]);
#pragma unroll
          for (i32 x = 0; x < 2; ++x) {
            float& cell = s[4 * n + 2 * e + x];
            if constexpr (kOptions.key_bias != cuda::BiasType::kNone) {
              cell = __fmaf_rn(of_key[e], unscale, cell);
            }
            if constexpr (kOptions.alibi) {
              const float far = fabsf(distance + static_cast<float>(8 * (n - e) + x));
              cell = __fmaf_rn(far, slope * a.lse_factor, cell);
            }
            if constexpr (kBias) cell = __fmaf_rn(value(pair, 4 * n + 2 * e + x), unscale, cell);
          }
        }
      }
    }
    JALI_DEVICE float value(u32 pair, i32 cell) const {
      if constexpr (kOptions.bias == cuda::BiasType::kFloat) return __uint_as_float(bias[cell]);
      return T::value(static_cast<u16>(kPairs ? pair >> cell % 2 * 16 : bias[cell]));
    }
  };

  /// A bias over rows and keys by way of shared memory: [kRows][16 keys of a warp], eight keys of row r where
  /// they are ^ r / 4 % 2. A warp copies its own. PERF: where pairs of keys were loaded from global memory
  /// instead, D 128 H16 8K took 3,450 us for 2,900, with the bias' gradient 4,120 for 3,590.
  struct StagedBias {
    static constexpr i32 kBytes = kRows * 32;
    u32 shared;

    /// Begins to copy that of a row tile from `row` on, if `condition`; `key` is the warp's first. Rows from
    /// num_rows on weigh nothing, and must not become NaN by what pads a bias.
    JALI_DEVICE void copy(const cuda::BiasTable& t, u64 head, i32 row, i32 num_rows, i32 key,
                          i32 lane, bool condition) const {
      const i32 last_row = min_of(num_rows, t.rows) - 1, eight = lane & 1;
      key += 8 * eight;
      row += lane / 2;
      head += 2 * i64{key};
      const u32 to = shared + lane / 2 * 32 + ((eight ^ lane >> 3 & 1) << 4);
      const i32 bytes = key < t.keys ? 16 : 0;
#pragma unroll
      for (i32 n = 0; n < kRows; n += 16) {
        ptx::copy_some_if(to + 32 * n, head + 2 * min_of(row + n, last_row) * t.stride_q, bytes,
                          condition);
      }
      ptx::copy_commit();
    }
    /// Waits for it, and adds it to raw scores. Then the next may be copied.
    JALI_DEVICE void add_to(float (&s)[kRows / 2], const Args& a, i32 lane) const {
      ptx::copy_wait<0>();
      __syncwarp();
      const float unscale = -a.lse_factor;
      const i32 row = (lane >> 4) * 8 + (lane & 7);
      const u32 from = shared + row * 32 + ((lane >> 3 & 1 ^ row >> 2 & 1) << 4);
#pragma unroll
      for (i32 n = 0; n < kRows / 8; n += 2) {
        u32 w[4];
        ptx::load_transposed(from + 256 * n, w);
#pragma unroll
        for (i32 m = 0; m < 8; ++m) {
          float& cell = s[4 * n + m];
          cell = __fmaf_rn(T::value(static_cast<u16>(w[m / 2] >> m % 2 * 16)), unscale, cell);
        }
      }
      __syncwarp();
    }
  };

  /// What a loader notes of a head: where its bias begins, if that is staged, else the bits of its slope.
  template <bool kStagesBias>
  JALI_DEVICE static u64 of_head(const Args& a, const Frame& f) {
    if constexpr (kStagesBias) {
      const cuda::BiasTable& t = a.scores.bias;
      return reinterpret_cast<u64>(t.data) + 2 * (f.b * t.stride_b + f.h / t.head_div * t.stride_h);
    }
    return __float_as_uint(cuda::Scores<T, kOptions>(a.scores, f).slope);
  }

  /// Block n of 8 rows: products, or raw scores less LSE, to weights. `slopes`: softcap's, pairs of
  /// fp16.
  JALI_DEVICE void weigh(float (&s)[kRows / 2], i32 n, u32 (&slopes)[2]) const {
    if constexpr (!kAdjusts) {
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

  /// The gradient of a score, of one without what dropout multiplies all by.
  JALI_DEVICE static float gradient(float d, const Args& a) {
    return kOptions.dropout ? d * a.ds_scale : d;
  }
  /// The sum over rows of the scores' gradients, of two lanes' rows and one of their two keys, in odd lanes
  /// the second. PERF: in fp32; rounded and times ones by mma.sync, beside WGMMAs, a pass took 7 % more.
  JALI_DEVICE static float sum_keys(const float (&d)[kRows / 2], i32 lane) {
    float sums[2];
#pragma unroll
    for (i32 e = 0; e < 2; ++e) {
      float even = d[2 * e], odd = d[2 * e + 1];  // two chains: half the latency
#pragma unroll
      for (i32 n = 1; n < kRows / 8; ++n) {
        even += d[4 * n + 2 * e];
        odd += d[4 * n + 2 * e + 1];
      }
      sums[e] = even + odd;
    }
    const bool second = lane & 1;
    return (second ? sums[1] : sums[0]) + ptx::shuffle_xor(second ? sums[0] : sums[1], 1);
  }
  /// Where the sum of this thread's first key is.
  JALI_DEVICE static float* key_sum(const Args& a, const CellPlace& at, i32 h_kv) {
    const i64 first = a.seq.varlen() ? 0 : i64{at.f.b} * a.seq.Lk;
    return a.key_sums.at(at.f.h, h_kv, first + at.f.k_start + at.key);
  }
  /// Adds what sum_keys() gave to the sums of a bias over keys.
  JALI_DEVICE static void add_keys(float sum, const Args& a, const CellPlace& at, i32 h_kv,
                                   i32 lane) {
    const i32 second = 8 * (lane & 1);
    sum += ptx::shuffle_xor(sum, 2);
    // One thread adds to a key of a KV head, row tile by row tile: the same order every time.
    ptx::add_if(key_sum(a, at, h_kv) + second, gradient(sum, a),
                (lane & 2) == 0 & at.key + second < at.f.num_keys);
  }
  /// Writes or adds the scores' gradients to those of a bias over rows and keys.
  JALI_DEVICE static void emit(const float (&d)[kRows / 2], const Args& a, const CellPlace& at,
                               i32 lane) {
    constexpr bool kFours = kWanted.cells == cuda::CellGradient::kFours;
    if constexpr (kWanted.in_words()) {
      // PERF: transposed back, so that lanes store rows. A warp's 16 keys of a row are a sector, which fours fill at
      // once, of pairs each store a half: D 128 H16 8K 3,288 us, by pairs 3,531; by eights 3,340 (H100).
      const cuda::CellTable& t = a.dbias;
      const i32 row = at.row - 2 * (lane & 3) + (lane >> 2);
      const i32 key =
          at.key - (lane >> 2) + (kFours ? 2 * (lane & 2) + 8 * (lane & 1) : 2 * (lane & 3));
      const i32 rows = min_of(at.f.num_rows, t.rows) - row;
      const i32 keys = min_of(at.f.num_keys, t.keys) - key;
      u16* const first = static_cast<u16*>(t.data) + at.f.b * t.stride_b +
                         at.f.h / t.head_div * t.stride_h + row * t.stride_q + key;
#pragma unroll
      for (i32 n = 0; n < kRows / 8; ++n) {
        u32 pair[2];
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          const i32 even = 4 * n + 2 * e;
          pair[e] = ptx::transpose_matrix(T::pack(gradient(d[even], a), gradient(d[even + 1], a)));
        }
        u16* const to = first + 8 * n * t.stride_q;
        if constexpr (kFours) {
          ptx::exchange(pair[0], pair[1], lane & 1, 1);
          if (8 * n < rows & 0 < keys) *reinterpret_cast<u64*>(to) = u64{pair[1]} << 32 | pair[0];
        } else {
#pragma unroll
          for (i32 e = 0; e < 2; ++e) {
            if (8 * n < rows & 8 * e < keys) *reinterpret_cast<u32*>(to + 8 * e) = pair[e];
          }
        }
      }
    } else if constexpr (kWanted.cells != cuda::CellGradient::kNone) {
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
            const float cell = gradient(d[4 * n + 2 * e + x], a);
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
