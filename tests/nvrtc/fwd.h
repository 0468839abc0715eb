// FORWARD(name, T, D, Dv, mask, options…): one forward kernel. FORWARD_SMALL: of small tiles, see forward_shape().
#pragma once

#include "cuda/kernel/stored.h"
#include "cuda/variant/fwd_sm90.cuh"
#include "mask/leaf/causal.h"
#include "mask/leaf/document.h"
#include "mask/leaf/prefix.h"
#include "mask/leaf/window.h"
#include "mask/predicate_generated.h"

using namespace jali;
using namespace jali::cuda;

using Streaming = And<leaf::Causal, Or<leaf::Window, leaf::Prefix>>;
using Documents = And<leaf::Causal, Stored<leaf::Document>>;
using CausalNeighborhood = And<leaf::Causal, predicate::Neighborhood>;

/// What the host finds for the masks of these tests.
template <class M>
constexpr MaskKind kKind = M::kColsReadTables ? MaskKind::kHeavy : MaskKind::kLight;
template <>
inline constexpr MaskKind kKind<NoMask> = MaskKind::kNone;
template <>
inline constexpr MaskKind kKind<predicate::Neighborhood> = MaskKind::kMapped;
template <>
inline constexpr MaskKind kKind<CausalNeighborhood> = MaskKind::kMapped;

#define FORWARD(name, T, D, Dv, M, ...) FORWARD_OF(false, name, T, D, Dv, M, __VA_ARGS__)
#define FORWARD_SMALL(name, T, D, Dv, M, ...) FORWARD_OF(true, name, T, D, Dv, M, __VA_ARGS__)
#define FORWARD_OF(small, name, T, D, Dv, M, ...)                                                \
  constexpr ScoreOptions kOptions_##name{__VA_ARGS__};                                           \
  constexpr ForwardShape kShape_##name = forward_shape(D, Dv, kOptions_##name, kKind<M>, small); \
  extern "C" __global__ void __launch_bounds__(kShape_##name.threads(), 1)                       \
      name(const __grid_constant__ ptx::TensorMap q, const __grid_constant__ ptx::TensorMap k,   \
           const __grid_constant__ ptx::TensorMap v, const __grid_constant__ ptx::TensorMap out, \
           const __grid_constant__ ForwardArgs a, const __grid_constant__ M mask) {              \
    Forward<ptx::T, D, Dv, M, kOptions_##name, kKind<M>, kShape_##name>::run(q, k, v, out, a,    \
                                                                             mask);              \
  }
