// From q · k to scores: scale, softcap, biases, ALiBi; sinks and dropout. Forward and backward
// kernels share this text. Order and meaning are those of the CPU (cpu/impl/scores.h).
#pragma once

#include "base/philox.h"
#include "mask/leaf.h"

namespace jali::cuda {

/// What a bias is stored as.
enum class BiasType : u8 { kNone, kHalf, kFloat };  // kHalf: the dtype of q

/// What a kernel is compiled for; an option that is off costs nothing.
struct ScoreOptions {
  bool any_scale = false;  // the scale may be zero or negative
  bool softcap = false;
  BiasType bias = BiasType::kNone;
  bool bias_pairs = false;   // keys 2 n and 2 n + 1 of a row of `bias` can be loaded as one
  bool bias_eights = false;  // of kHalf, besides: keys 8 n to 8 n + 7
  BiasType key_bias = BiasType::kNone;
  bool alibi = false, sinks = false, dropout = false;
  bool keeps = false;      // dropout: DropoutRule::keeps
  bool saturates = false;  // dropout in a backward that tells by differences: cuda::saturates()
  bool bounded = false;    // forward: softcap's weights need no maxima: they are exp(score)

  /// Whether something is loaded for cells.
  constexpr bool loads() const { return bias != BiasType::kNone || key_bias != BiasType::kNone; }
  /// Whether something is loaded or drawn for every cell.
  constexpr bool per_cell() const { return loads() || dropout; }
  /// Whether scores are more than a positive number times q · k.
  constexpr bool adjusts() const { return any_scale || softcap || alibi || loads(); }
  constexpr bool operator==(const ScoreOptions&) const = default;
};

/// Whether a difference of floats can tell what is kept. Let n be a cell's number less the limit, modulo 32768: it is kept
/// if n < 32768 - limit. As upper halves of floats, the larger less the smaller is then at least 1, if the larger is at
/// least 2^24; clamped to [0, 1] it is 1, else 0, also where n makes a NaN, which 32768 - limit must not.
JALI_HD bool saturates(const DropoutRule& rule) {
  return !rule.keeps && rule.limit >= 0x8000 - 0x7f80 && rule.limit <= 0x8000 - 0x4b80;
}

/// bias [b, h / head_div, i, j] or key_bias [b, h / head_div, j]; stride 0 broadcasts. Rows and keys
/// are clamped to [0, rows) and [0, keys). NOTE: keys of a packed key_bias count from the first
/// token of all.
struct BiasTable {
  const void* data = nullptr;
  i64 stride_b = 0, stride_h = 0, stride_q = 0, stride_k = 0;  // elements
  i32 head_div = 1;
  i32 rows = 1, keys = 1;
};

/// The numbers of the options.
struct ScoreArgs {
  // Of q · k; where Q (bounded) or K (LowScores) is multiplied, of the products then.
  float scale = 1;
  float softcap = 0;  // > 0 where the option is on
  // bounded: what Q is multiplied by, a power of two, so that of its products x, up to 1 without sign,
  // log2(e) softcap tanh(scale x / softcap) is nearly x (tanh_terms[0] + tanh_terms[1] x²); as a pair of bf16, too; and
  // what sums of weights made so may be (tile/softcap.h).
  float q_factor = 1, tanh_terms[2] = {}, least_sum = 0, most_sum = 0;
  u32 q_factors = 0;
  BiasTable bias, key_bias;
  const float* alibi_slopes = nullptr;  // [Hq]
  const float* sinks = nullptr;         // [Hq]
  const u64* seed = nullptr;            // of dropout, on the device
  u32 dropout_limit = 0;                // of DropoutRule, in both halves
  float dropout_end = 0;  // saturates(): its upper half is 32768 - limit, the lower one 0
  float keep_scale = 1;   // of what is kept
};

constexpr float kLog2E = 1.44269504088896f;
constexpr float kLn2 = 0.693147180559945f;

}  // namespace jali::cuda

#if defined(__CUDACC_RTC__)
#include "cuda/ptx/math.h"

namespace jali::cuda {

/// The scores of one head. T: q's dtype.
template <class T, ScoreOptions kOptions>
struct Scores {
  const ScoreArgs& a;
  Frame f;
  float slope = 0;  // ALiBi's

  JALI_DEVICE Scores(const ScoreArgs& args, const Frame& frame) : a(args), f(frame) {
    if constexpr (kOptions.alibi) slope = a.alibi_slopes[f.h];
  }

  template <BiasType kType>
  JALI_DEVICE static float load(const void* data, i64 at) {
    if constexpr (kType == BiasType::kFloat) return static_cast<const float*>(data)[at];
    return T::value(static_cast<const u16*>(data)[at]);
  }
  /// Where row i of this head's bias starts.
  JALI_DEVICE i64 bias_row(i32 i) const {
    const BiasTable& t = a.bias;
    return f.b * t.stride_b + f.h / t.head_div * t.stride_h +
           clamp_to(i, 0, t.rows - 1) * t.stride_q;
  }
  /// The bias of key j of the row that starts at `row`.
  JALI_DEVICE float bias(i64 row, i32 j) const {
    if constexpr (kOptions.bias == BiasType::kNone) return 0;
    return load<kOptions.bias>(a.bias.data, row + min_of(j, a.bias.keys - 1) * a.bias.stride_k);
  }
  /// Where this head's bias of keys starts, and the last key that has one, or that may be loaded.
  JALI_DEVICE i64 key_bias_row() const {
    const BiasTable& t = a.key_bias;
    return f.b * t.stride_b + f.h / t.head_div * t.stride_h + f.k_start * t.stride_k;
  }
  JALI_DEVICE i32 last_key() const { return a.key_bias.keys - 1 - f.k_start; }
  JALI_DEVICE static float key_bias(const ScoreArgs& a, i64 row, i32 last, i32 j) {
    if constexpr (kOptions.key_bias == BiasType::kNone) return 0;
    return load<kOptions.key_bias>(a.key_bias.data, row + min_of(j, last) * a.key_bias.stride_k);
  }
  JALI_DEVICE float key_bias(i32 j) const { return key_bias(a, key_bias_row(), last_key(), j); }

  /// The score in units of log2(e), from q · k and what the biases add at (i, j). `steepness`
  /// becomes d score / d (scale q · k).
  JALI_DEVICE float score(float product, float added, i32 i, i32 j, float& steepness) const {
    float x;
    steepness = 1;
    if constexpr (kOptions.softcap) {
      const float t = ptx::tanh_fast(product * (a.scale / a.softcap));
      steepness = 1 - t * t;
      x = t * (a.softcap * kLog2E);
    } else {
      x = product * (a.scale * kLog2E);
    }
    if constexpr (kOptions.loads()) x = __fmaf_rn(added, kLog2E, x);
    if constexpr (kOptions.alibi) {
      const float distance = fabsf(static_cast<float>(i + f.q_offset - j));
      x = __fmaf_rn(distance, -slope * kLog2E, x);
    }
    return x;
  }
};

}  // namespace jali::cuda
#endif
