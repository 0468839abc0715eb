// Softcap by a polynomial of two terms, where scores are well below the cap.
//
// PERF: beside the tensor cores the unit of exponentials, which makes tanh, too, takes 10 cycles an instruction (8
// alone), an fp32 multiplication or addition 1.1, a comparison, logical or 16-bit one 3.6 (2 alone). So nothing is
// clamped or compared, but what a multiplication clamps to [0, 1] for nothing: the square of a product. For that a
// power of two that Q is multiplied by makes products 1 where the polynomial ends (ScoreArgs::q_factor).
//
// Beyond that it goes on as a line. So a score that is too high has a weight that no other one has, which shows in the
// sum of weights; and one that is too low has a wrong weight, but one so small that it does not matter beside a sum that
// is not small itself.
#pragma once

#include "cuda/ptx/math.h"
#include "cuda/ptx/shared.h"

namespace jali::tile {

/// What the exponential of a product takes, by ScoreArgs::tanh_terms.
JALI_DEVICE float capped(float product, const float (&terms)[2]) {
  return product * __fmaf_rn(ptx::square_to_one(product), terms[1], terms[0]);
}

/// Multiplies kBytes of shared memory, pairs of bf16, by a pair of factors, by the 128 threads of a warpgroup.
template <i32 kBytes>
JALI_DEVICE void multiply_shared(u32 shared, u32 factors) {
  static_assert(kBytes % (128 * 16) == 0);
  const u32 own = shared + threadIdx.x % 128 * 16;
#pragma unroll
  for (i32 n = 0; n < kBytes; n += 128 * 16) {
    u32 words[4];
    ptx::load_array(own + n, words);
    for (u32& pair : words) pair = ptx::BF16::multiply(pair, factors);
    ptx::store_array(own + n, words);
  }
}

}  // namespace jali::tile
