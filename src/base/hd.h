// The C++ subset that the host compiler and NVRTC both take: integer names, JALI_HD, tiny helpers.
// Leaves and everything that a kernel includes may use nothing but this (no standard headers).
#pragma once

#if defined(__CUDACC_RTC__)
#define JALI_HD __host__ __device__ __forceinline__
#else
#include <cstdint>
// always_inline: a leaf is compiled once per ISA, and no out-of-line copy of it may ever be shared
// between translation units built for different ISAs.
#define JALI_HD inline __attribute__((always_inline))
#endif

namespace jali {

#if defined(__CUDACC_RTC__)
using u8 = unsigned char;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
#else
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using i32 = std::int32_t;
using u32 = std::uint32_t;
using i64 = std::int64_t;
using u64 = std::uint64_t;
#endif

/// Stands for "no limit" wherever a position is compared. Lengths and positions stay below it.
constexpr i32 kFar = 0x7fffffff;
/// Longest supported sequence; a position i + offset then always fits 32 bits.
constexpr i32 kMaxLength = 1 << 30;

/// A or B, types.
template <bool kFirst, class A, class B>
struct Conditional {
  using Type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
  using Type = B;
};

template <class T>
JALI_HD constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
JALI_HD constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}
template <class T>
JALI_HD constexpr T clamp_to(T x, T lo, T hi) {
  return min_of(max_of(x, lo), hi);
}
/// 64-bit position to 32 bits, saturating at ±kFar.
JALI_HD constexpr i32 saturate(i64 x) {
  return static_cast<i32>(clamp_to<i64>(x, -static_cast<i64>(kFar), kFar));
}
/// Floor division and its remainder, as in Python. The divisor is not 0.
template <class T>
JALI_HD constexpr T floor_div(T a, T b) {
  return a / b - ((a % b != 0) && ((a % b < 0) != (b < 0)));
}
template <class T>
JALI_HD constexpr T floor_mod(T a, T b) {
  T r = a % b;
  return (r != 0 && ((r < 0) != (b < 0))) ? r + b : r;
}
template <class T>
JALI_HD constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

}  // namespace jali
