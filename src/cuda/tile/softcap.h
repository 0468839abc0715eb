// Softcap by a polynomial, where scores are well below the cap.
//
// PERF: beside the tensor cores the unit of exponentials, which makes tanh, too, takes 10 cycles an instruction (8
// alone), an fp32 multiplication or addition 1.1, a comparison, logical or 16-bit one 3.6 (2 alone). So nothing is
// clamped or compared, which took back what polynomials gain.
#pragma once

#include "cuda/ptx/math.h"
#include "cuda/tile/scores.h"

namespace jali::tile {

/// Whether capped_exponentials() may be taken of all raw scores of the warp, none of which is a NaN then. All lanes
/// call it.
template <i32 kScores>
JALI_DEVICE bool below_cap(const float (&s)[kScores], const cuda::ScoreArgs& a) {
  constexpr i32 kSums = 8;  // of squares, since sums need no comparison
  float sums[kSums] = {};
#pragma unroll
  for (i32 n = 0; n < kScores; ++n) sums[n % kSums] = __fmaf_rn(s[n], s[n], sums[n % kSums]);
#pragma unroll
  for (i32 n = 1; n < kSums; ++n) sums[0] = ptx::maximum_or_nan(sums[0], sums[n]);
  return __all_sync(0xffffffffu, sums[0] < a.tanh_limit);
}

/// Raw scores of row e to weights exp2(log2(e) softcap tanh(scale s / softcap) - shift); adds them.
template <i32 e, i32 kScores>
JALI_DEVICE void capped_exponentials(float (&s)[kScores], const cuda::ScoreArgs& a, float shift,
                                     float (&total)[4]) {
#pragma unroll
  for (i32 j = 0; j < kScores / 4; ++j) {
#pragma unroll
    for (i32 x = 0; x < 2; ++x) {
      float& at = s[4 * j + 2 * e + x];
      const float square = at * at;
      float y = __fmaf_rn(square, a.tanh_terms[2], a.tanh_terms[1]);
      y = __fmaf_rn(y, square, a.tanh_terms[0]);
      at = ptx::exp2_fast(__fmaf_rn(at, y, -shift));
      total[2 * e + x] += at;
    }
  }
}

}  // namespace jali::tile
