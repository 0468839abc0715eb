// The backward kernels for Hopper, with and without a mask: they must compile without spills.
#include "cuda/variant/bwd_sm90.cuh"
#include "cuda/variant/bwd_sm90_wide.cuh"
#include "mask/leaf/causal.h"
#include "mask/leaf/prefix.h"
#include "mask/leaf/window.h"

using namespace jali;
using namespace jali::cuda;

#define BACKWARD(Kernel, name, T, D, Dv, ordered, ...)                                         \
  using Mask_##name = __VA_ARGS__;                                                             \
  using Kernel_##name = Kernel<ptx::T, D, Dv, Mask_##name, ordered>;                           \
  extern "C" __global__ void __launch_bounds__(384, 1)                                         \
      name(const __grid_constant__ ptx::TensorMap q, const __grid_constant__ ptx::TensorMap k, \
           const __grid_constant__ ptx::TensorMap v, const __grid_constant__ ptx::TensorMap o, \
           const __grid_constant__ BackwardArgs a, const __grid_constant__ Mask_##name mask) { \
    Kernel_##name::run(q, k, v, o, a, mask);                                                   \
  }                                                                                            \
  extern "C" __global__ void __launch_bounds__(256)                                            \
      name##_prepare(const __grid_constant__ BackwardArgs a) {                                 \
    Kernel_##name::Rows::prepare(a);                                                           \
  }                                                                                            \
  extern "C" __global__ void __launch_bounds__(256)                                            \
      name##_finish(const __grid_constant__ BackwardArgs a) {                                  \
    Kernel_##name::Rows::finish(a);                                                            \
  }
BACKWARD(Backward, full_128, BF16, 128, 128, false, NoMask)
BACKWARD(Backward, causal_64, FP16, 64, 64, false, leaf::Causal)
BACKWARD(Backward, streaming_128, FP16, 128, 128, false,
         And<leaf::Causal, Or<leaf::Window, leaf::Prefix>>)
BACKWARD(Backward, mixed_96, BF16, 96, 80, false, leaf::Window)
BACKWARD(BackwardWide, causal_256, BF16, 256, 256, false, leaf::Causal)
BACKWARD(BackwardWide, full_192_128, FP16, 192, 128, false, NoMask)
BACKWARD(BackwardWide, window_64_256, BF16, 64, 256, false, leaf::Window)
BACKWARD(Backward, ordered_128, BF16, 128, 128, true, leaf::Causal)
BACKWARD(BackwardWide, ordered_192, BF16, 192, 192, true, And<leaf::Causal, leaf::Prefix>)
