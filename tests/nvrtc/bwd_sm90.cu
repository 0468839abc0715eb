// The backward kernels for Hopper, with and without a mask: they must compile without spills.
#include "cuda/variant/bwd_sm90.cuh"
#include "mask/leaf/causal.h"
#include "mask/leaf/prefix.h"
#include "mask/leaf/window.h"

using namespace jali;
using namespace jali::cuda;

#define BACKWARD(name, T, D, Dv, ...)                                                          \
  using Mask_##name = __VA_ARGS__;                                                             \
  using Kernel_##name = Backward<ptx::T, D, Dv, Mask_##name>;                                  \
  extern "C" __global__ void __launch_bounds__(384, 1)                                         \
      name(const __grid_constant__ ptx::TensorMap q, const __grid_constant__ ptx::TensorMap k, \
           const __grid_constant__ ptx::TensorMap v, const __grid_constant__ ptx::TensorMap o, \
           const __grid_constant__ BackwardArgs a, const __grid_constant__ Mask_##name mask) { \
    Kernel_##name::run<40, 232>(q, k, v, o, a, mask);                                          \
  }                                                                                            \
  extern "C" __global__ void __launch_bounds__(256)                                            \
      name##_prepare(const __grid_constant__ BackwardArgs a) {                                 \
    Kernel_##name::Rows::prepare(a);                                                           \
  }                                                                                            \
  extern "C" __global__ void __launch_bounds__(256)                                            \
      name##_finish(const __grid_constant__ BackwardArgs a) {                                  \
    Kernel_##name::Rows::finish(a);                                                            \
  }
BACKWARD(full_128, BF16, 128, 128, NoMask)
BACKWARD(causal_64, FP16, 64, 64, leaf::Causal)
BACKWARD(streaming_128, FP16, 128, 128, And<leaf::Causal, Or<leaf::Window, leaf::Prefix>>)
BACKWARD(mixed_96, BF16, 96, 80, leaf::Window)
