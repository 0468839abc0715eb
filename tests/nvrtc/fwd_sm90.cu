// The forward kernel for Hopper, with and without a mask: it must compile without spills.
#include "cuda/variant/fwd_sm90.cuh"
#include "mask/leaf/causal.h"
#include "mask/leaf/prefix.h"
#include "mask/leaf/window.h"

using namespace jali;
using namespace jali::cuda;

#define FORWARD(name, T, ...)                                                                  \
  using Mask_##name = __VA_ARGS__;                                                             \
  extern "C" __global__ void __launch_bounds__(384, 1)                                         \
      name(const __grid_constant__ ptx::TensorMap q, const __grid_constant__ ptx::TensorMap k, \
           const __grid_constant__ ptx::TensorMap v, const __grid_constant__ ForwardArgs a,    \
           const __grid_constant__ Mask_##name mask) {                                         \
    Forward<ptx::T, 128, 128, 128, Mask_##name, true>::run<40, 232>(q, k, v, a, mask);         \
  }
FORWARD(full, BF16, NoMask)
FORWARD(causal, FP16, leaf::Causal)
FORWARD(streaming, BF16, And<leaf::Causal, Or<leaf::Window, leaf::Prefix>>)
