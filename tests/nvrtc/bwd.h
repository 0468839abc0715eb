// The kernels of a backward pass. BACKWARD(kernel, name, T, D, Dv, mask, ordered): without options;
// BACKWARD_OPTIONS(kernel, name, T, D, Dv, mask, ordered, options, wanted): both in parentheses.
#pragma once

#include "cuda/kernel/stored.h"
#include "cuda/variant/bwd_sm90.cuh"
#include "cuda/variant/bwd_sm90_pair.cuh"
#include "cuda/variant/bwd_sm90_wide.cuh"
#include "mask/leaf/causal.h"
#include "mask/leaf/document.h"
#include "mask/leaf/key_interval.h"
#include "mask/leaf/key_padding.h"
#include "mask/leaf/prefix.h"
#include "mask/leaf/window.h"
#include "mask/predicate_generated.h"

using namespace jali;
using namespace jali::cuda;

using Streaming = And<leaf::Causal, Or<leaf::Window, leaf::Prefix>>;
using Documents = And<leaf::Causal, Stored<leaf::Document>>;
using Padded = And<leaf::Causal, Stored<leaf::KeyPadding>>;
using KeyIntervals = Stored<leaf::KeyInterval>;

#define BACKWARD_KERNELS(name, T, M)                                                           \
  extern "C" __global__ void __launch_bounds__(Kernel_##name::kThreads, 1)                     \
      name(const __grid_constant__ ptx::TensorMap q, const __grid_constant__ ptx::TensorMap k, \
           const __grid_constant__ ptx::TensorMap v, const __grid_constant__ ptx::TensorMap o, \
           const __grid_constant__ BackwardArgs a, const __grid_constant__ M mask) {           \
    Kernel_##name::run(q, k, v, o, a, mask);                                                   \
  }
#define BACKWARD(Kernel, name, T, D, Dv, M, ordered)       \
  using Kernel_##name = Kernel<ptx::T, D, Dv, M, ordered>; \
  BACKWARD_KERNELS(name, T, M)
#define BACKWARD_BRACES(...) {__VA_ARGS__}
#define BACKWARD_OPTIONS(Kernel, name, T, D, Dv, M, ordered, options, wanted)               \
  constexpr ScoreOptions kOptions_##name BACKWARD_BRACES options;                           \
  constexpr BiasGradients kWanted_##name BACKWARD_BRACES wanted;                            \
  using Kernel_##name = Kernel<ptx::T, D, Dv, M, ordered, kOptions_##name, kWanted_##name>; \
  BACKWARD_KERNELS(name, T, M)
