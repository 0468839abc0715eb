// What the operations of a predicate mean, for one value each. The interpreter and generated code
// call these same functions. T is i32 (where no overflow was proven) or i64 (wraps).
#pragma once

#include "base/hd.h"

namespace jali::predicate {

template <class T>
struct UnsignedOf;
template <>
struct UnsignedOf<i32> {
  using Type = u32;
};
template <>
struct UnsignedOf<i64> {
  using Type = u64;
};
template <class T>
using Unsigned = typename UnsignedOf<T>::Type;

template <class T>
JALI_HD T add(T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
}
template <class T>
JALI_HD T sub(T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
}
template <class T>
JALI_HD T mul(T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) * static_cast<Unsigned<T>>(b));
}
template <class T>
JALI_HD T negate(T a) {
  return sub(T{0}, a);
}
template <class T>
JALI_HD T absolute(T a) {
  return a < 0 ? negate(a) : a;
}
/// Rounded down, as in Python; 0 when b is 0.
template <class T>
JALI_HD T quotient(T a, T b) {
  if (b == 0) return 0;
  return b == -1 ? negate(a) : floor_div(a, b);  // the smallest number / -1 traps
}
/// Has b's sign, as in Python; 0 when b is 0.
template <class T>
JALI_HD T remainder(T a, T b) {
  return b == 0 || b == -1 ? T{0} : floor_mod(a, b);
}
/// 0 when n is not in 0..63; in i32, the proof leaves only a = 0 beyond 31.
template <class T>
JALI_HD T shift_left(T a, T n) {
  constexpr T kBits = sizeof(T) * 8;
  return n < 0 || n >= kBits ? T{0} : static_cast<T>(static_cast<Unsigned<T>>(a) << n);
}
/// The sign (0 or -1) when n is not in 0..63.
template <class T>
JALI_HD T shift_right(T a, T n) {
  constexpr T kBits = sizeof(T) * 8;
  return a >> (n < 0 || n >= kBits ? kBits - 1 : n);
}
template <class T>
JALI_HD T minimum(T a, T b) {
  return min_of(a, b);
}
template <class T>
JALI_HD T maximum(T a, T b) {
  return max_of(a, b);
}

// Floats: every operation is rounded to float (no contraction); NaN wins min and max, as in torch.
#if defined(__CUDACC_RTC__)
JALI_HD float add(float a, float b) { return __fadd_rn(a, b); }
JALI_HD float sub(float a, float b) { return __fsub_rn(a, b); }
JALI_HD float mul(float a, float b) { return __fmul_rn(a, b); }
#else
JALI_HD float add(float a, float b) { return a + b; }
JALI_HD float sub(float a, float b) { return a - b; }
JALI_HD float mul(float a, float b) { return a * b; }
#endif
JALI_HD float negate(float a) { return -a; }
JALI_HD float absolute(float a) { return a < 0 ? -a : a; }
JALI_HD float minimum(float a, float b) { return a != a || a < b ? a : b; }
JALI_HD float maximum(float a, float b) { return a != a || b < a ? a : b; }

/// Cut towards zero, limited to T; NaN gives 0.
template <class T>
JALI_HD T to_int(float a) {
  constexpr float kLimit = sizeof(T) == 4 ? 2147483648.0f : 9223372036854775808.0f;
  constexpr T kMax = static_cast<T>(~Unsigned<T>{0} >> 1);
  if (!(a == a)) return 0;
  return a >= kLimit ? kMax : a < -kLimit ? static_cast<T>(-kMax - 1) : static_cast<T>(a);
}

/// A captured tensor; reads are clamped.
template <class T, int kRank>
struct TableOf {
  const T* data;
  i64 size[kRank > 0 ? kRank : 1], stride[kRank > 0 ? kRank : 1];
  template <class... Index>
  JALI_HD T at(Index... index) const {
    static_assert(sizeof...(Index) == kRank);
    const i64 place[] = {index..., 0};
    i64 offset = 0;
    for (int d = 0; d < kRank; ++d) offset += clamp_to<i64>(place[d], 0, size[d] - 1) * stride[d];
    return data[offset];
  }
};

}  // namespace jali::predicate
