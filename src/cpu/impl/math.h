// exp2 and tanh of whole vectors, by range reduction and a polynomial: about 1e-7 relative in fp32
// and 1e-16 in fp64. NaN stays NaN.
#pragma once

#include "cpu/impl/vec.h"

namespace jali::JALI_ISA {

template <class T>
struct Exp2;
// (2^f - 1) / f on [-1/2, 1/2], minimax for the error relative to 2^f: 2e-9 and 4e-18. `magic`
// added to |x| < 2^22 (2^51) rounds it to an integer, which then stands in the low bits.
template <>
struct Exp2<float> {
  static constexpr int kMantissa = 23;
  static constexpr float kMagic = 12582912.0f, kLowest = -127.0f;
  static constexpr i32 kBias = 127;
  static constexpr float kPoly[] = {6.931472029380028143e-01f, 2.402264791776037875e-01f,
                                    5.550332366157090348e-02f, 9.618436724004721130e-03f,
                                    1.339890423226297829e-03f, 1.535355928870651467e-04f};
};
template <>
struct Exp2<double> {
  static constexpr int kMantissa = 52;
  static constexpr double kMagic = 6755399441055744.0, kLowest = -1023.0;
  static constexpr i64 kBias = 1023;
  static constexpr double kPoly[] = {
      6.931471805599453243e-01, 2.402265069591013056e-01, 5.550410866482006557e-02,
      9.618129107594473957e-03, 1.333355814678419724e-03, 1.540353045660560512e-04,
      1.525273348151851799e-05, 1.321543554436717557e-06, 1.017820491091133854e-07,
      7.073738179361970194e-09, 4.433929428988334582e-10};
};

/// 2^x = scale * (1 + rest), rest the accurate 2^f - 1. Below kLowest + 1/2, scale is 0.
template <class T>
struct Exp2Parts {
  Vec<T> scale, rest;
};
template <class T>
JALI_INLINE Exp2Parts<T> exp2_parts(Vec<T> x) {
  using E = Exp2<T>;
  const Vec<T> lowest = splat<T>(E::kLowest);
  x = max_second(lowest, x);  // NaN stays
  const Vec<T> rounded = x + E::kMagic;
  const Vec<T> f = x - (rounded - E::kMagic);
  constexpr int kDegree = sizeof(E::kPoly) / sizeof(T) - 1;
  Vec<T> poly = splat<T>(E::kPoly[kDegree]);
#pragma GCC unroll 16
  for (int n = kDegree - 1; n >= 0; --n) poly = poly * f + E::kPoly[n];
  const IVec<T> bits = (reinterpret_cast<IVec<T>>(rounded) + E::kBias) << E::kMantissa;
  return {reinterpret_cast<Vec<T>>(bits), poly * f};
}

/// 2^x for x <= 128 (1024); exactly 0 below -126.5 (-1022.5) and for -inf.
template <class T>
JALI_INLINE Vec<T> exp2_of(Vec<T> x) {
  const Exp2Parts<T> e = exp2_parts<T>(x);
  return e.rest * e.scale + e.scale;
}

/// tanh x = t / (t + 2), t = e^(2x) - 1 without cancellation near 0.
template <class T>
JALI_INLINE Vec<T> tanh_of(Vec<T> x) {
  const Vec<T> limit = splat<T>(T(22));  // tanh is 1 to the last bit beyond
  x = x > limit ? limit : x;
  x = x < -limit ? -limit : x;
  const Exp2Parts<T> e = exp2_parts<T>(x * T(2.885390081777926814719849362));
  const Vec<T> t = e.rest * e.scale + (e.scale - T(1));
  return t / (t + T(2));
}

}  // namespace jali::JALI_ISA
