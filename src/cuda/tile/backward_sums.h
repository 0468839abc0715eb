// From sums of the scores' gradients to the gradients of biases and sinks.
#pragma once

#include "cuda/kernel/backward_sums.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/order.h"

namespace jali::tile {

constexpr i32 kSumThreads = 256;

/// The sum of all threads of a block of 256: thread 0 has it.
JALI_DEVICE float sum_of_block(float x) {
  __shared__ float of_warp[kSumThreads / 32];
#pragma unroll
  for (i32 lanes = 16; lanes > 0; lanes /= 2) x += ptx::shuffle_xor(x, lanes);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
  for (float part : of_warp) sum += part;
  return sum;
}

/// Rounds x to an element of the gradient.
template <class T>
JALI_DEVICE void write_element(void* to, i64 at, float x, i32 is_float) {
  if (is_float) {
    static_cast<float*>(to)[at] = x;
  } else {
    static_cast<u16*>(to)[at] = static_cast<u16>(T::pack(x, 0));
  }
}

/// Sums over the query heads and sequences that share an element of `a.to`: one thread an element,
/// or, where tokens share it, too, one block. The order of the terms never changes.
template <class T>
JALI_DEVICE void sum_tokens(const cuda::TokenGradient& a) {
  ptx::begin_kernel();
  const i64 thread = i64{blockIdx.x} * kSumThreads + threadIdx.x;
  const i64 n = a.all_tokens ? blockIdx.x : thread;
  if (n >= a.elements()) return;  // all threads of a block, if they work together
  const i32 l = static_cast<i32>(n % a.num_l);
  const i32 h = static_cast<i32>(n / a.num_l % a.num_h),
            b = static_cast<i32>(n / a.num_l / a.num_h);
  const i32 b_end = a.num_b == 1 ? a.B : b + 1;
  float total = 0;
  for (i32 from_b = b; from_b < b_end; ++from_b) {
    const i64 start = a.cu ? a.cu[from_b] : from_b * a.stride;
    // A wrong table must not lead out of memory.
    const i64 end = a.cu ? min_of<i64>(a.cu[from_b + 1], a.sums.tokens) : start + a.length;
    for (i32 from_h = h * a.joined; from_h < (h + 1) * a.joined; ++from_h) {
      const float* const from = a.sums.data + from_h * a.sums.tokens;
      if (a.all_tokens) {
        for (i64 t = start + threadIdx.x; t < end; t += kSumThreads) total += from[t];
      } else if (start + l < end) {
        total += from[start + l];
      }
    }
  }
  if (a.all_tokens) total = sum_of_block(total);
  if (!a.all_tokens || threadIdx.x == 0) {
    write_element<T>(a.to, cuda::offset(a.strides, b, h, l), total, a.is_float);
  }
}

/// Rounds sums of cells, or clears the cells where there are none: a block a row.
template <class T>
JALI_DEVICE void write_cells(const cuda::CellGradients& a) {
  ptx::begin_kernel();
  const i64 row = blockIdx.x;
  const i64 i = row % a.num_q, h = row / a.num_q % a.num_h, b = row / a.num_q / a.num_h;
  const i64 to = b * a.strides.b + h * a.strides.h + i * a.strides.l;
  for (i32 j = threadIdx.x; j < a.num_k; j += kSumThreads) {
    write_element<T>(a.to, to + j * a.stride_k, a.sums ? a.sums[row * a.num_k + j] : 0.0f,
                     a.is_float);
  }
}

}  // namespace jali::tile
