// What the kernels that finish the gradients of biases and sinks are told (tile/backward_sums.h).
#pragma once

#include "cuda/kernel/backward.h"

namespace jali::cuda {

/// The gradient of a bias over (b, h, token); the sinks' is one without tokens.
struct TokenGradient {
  TokenSums sums;
  i32 B = 1;                // sequences
  i32 length = 0;           // of each; unused if packed
  i64 stride = 0;           // from the sums of one to the next's; unused if packed
  const i32* cu = nullptr;  // [B + 1]: where they start in `sums`, packed
  void* to = nullptr;
  i32 is_float = 0;  // else q's dtype
  Strides strides;
  i32 num_b = 1, num_h = 1, num_l = 1;  // of `to`
  i32 joined = 1;                       // heads of `sums` per head of `to`
  i32 all_tokens = 0;                   // whether an element of `to` has the sum of all tokens

  JALI_HD i64 elements() const { return i64{num_b} * num_h * num_l; }
};

/// The gradient of a bias over (b, h, row, key).
struct CellGradients {
  const float* sums = nullptr;  // [num_b][num_h][num_q][num_k]; null: none
  void* to = nullptr;
  i32 is_float = 0;
  Strides strides;  // b, h, row
  i64 stride_k = 0;
  i32 num_h = 1, num_q = 1, num_k = 1;
};

}  // namespace jali::cuda
