// Vectors of the widest kind that this translation unit may use, by GCC/Clang vector extensions.
//
// Everything in src/cpu/impl is compiled once per instruction set, inside namespace JALI_ISA, and
// uses neither the standard library nor anything else that could leave a shared out-of-line copy
// behind: the linker would be free to pick the copy of the newest instruction set for all.
#pragma once

#include "base/hd.h"

#ifndef JALI_ISA
#error "define JALI_ISA, the namespace of this instruction set, before including src/cpu/impl"
#endif

#define JALI_INLINE static inline __attribute__((always_inline))

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are only passed to always_inline functions
#endif

namespace jali::JALI_ISA {

#if defined(__AVX512F__)
constexpr int kVecBytes = 64;
constexpr int kBlockRows = 6, kBlockVecs = 4;  // gemm block: 24 accumulators of 32 registers
#elif defined(__AVX__)
constexpr int kVecBytes = 32;
constexpr int kBlockRows = 6, kBlockVecs = 2;  // 12 of 16
#else
constexpr int kVecBytes = 16;
constexpr int kBlockRows = 4, kBlockVecs = 2;
#endif

template <class T, int kBytes>
struct VecOf {
  typedef T type __attribute__((vector_size(kBytes)));
  typedef T unaligned __attribute__((vector_size(kBytes), aligned(alignof(T)), may_alias));
};
template <class T>
using Vec = typename VecOf<T, kVecBytes>::type;
template <class T>
constexpr int kLanes = kVecBytes / static_cast<int>(sizeof(T));

/// The integer of the same size.
template <class T>
struct IntOf;
template <>
struct IntOf<float> {
  using type = i32;
};
template <>
struct IntOf<double> {
  using type = i64;
};
template <class T>
using IVec = Vec<typename IntOf<T>::type>;

template <class T>
JALI_INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename VecOf<T, kVecBytes>::unaligned*>(p);
}
template <class T>
JALI_INLINE void store(T* p, Vec<T> v) {
  *reinterpret_cast<typename VecOf<T, kVecBytes>::unaligned*>(p) = v;
}
template <class T>
JALI_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};
}
/// max(a, b), and b where either is NaN.
template <class V>
JALI_INLINE V max_second(V a, V b) {
  return a > b ? a : b;
}
/// 0, 1, 2, ...
template <class T>
JALI_INLINE Vec<T> iota() {
  Vec<T> v;
  for (int i = 0; i < kLanes<T>; ++i) v[i] = static_cast<T>(i);
  return v;
}

// Reductions, halving the vector: a fixed order for every instruction set width.
template <class T, int kBytes>
JALI_INLINE auto low_half(typename VecOf<T, kBytes>::type v) {
  typename VecOf<T, kBytes / 2>::type r;
  __builtin_memcpy(&r, &v, kBytes / 2);
  return r;
}
template <class T, int kBytes>
JALI_INLINE auto high_half(typename VecOf<T, kBytes>::type v) {
  typename VecOf<T, kBytes / 2>::type r;
  __builtin_memcpy(&r, reinterpret_cast<const char*>(&v) + kBytes / 2, kBytes / 2);
  return r;
}
template <class T, int kBytes>
JALI_INLINE T max_lanes_of(typename VecOf<T, kBytes>::type v) {
  if constexpr (kBytes == 2 * sizeof(T)) {
    return v[0] > v[1] ? v[0] : v[1];
  } else {
    return max_lanes_of<T, kBytes / 2>(max_second(low_half<T, kBytes>(v), high_half<T, kBytes>(v)));
  }
}
template <class T, int kBytes>
JALI_INLINE T sum_lanes_of(typename VecOf<T, kBytes>::type v) {
  if constexpr (kBytes == 2 * sizeof(T)) {
    return v[0] + v[1];
  } else {
    return sum_lanes_of<T, kBytes / 2>(low_half<T, kBytes>(v) + high_half<T, kBytes>(v));
  }
}
template <class T>
JALI_INLINE T max_lanes(Vec<T> v) {
  return max_lanes_of<T, kVecBytes>(v);
}
template <class T>
JALI_INLINE T sum_lanes(Vec<T> v) {
  return sum_lanes_of<T, kVecBytes>(v);
}

}  // namespace jali::JALI_ISA
