// Division by a number that the host knows, without the 25 instructions that a GPU takes for `/`.
#pragma once

#include "base/hd.h"

namespace jali {

/// A divisor from 1 on, made by the host. n / d and n % d take a multiplication each, for 0 <= n < 2^31. The method is
/// that of Granlund and Montgomery (1994): n / d is the high word of n (2^32 + multiplier), shifted.
class Divisor {
 public:
#if !defined(__CUDACC_RTC__)
  constexpr Divisor(i32 value = 1) : value_(value) {
    if (value < 1) return;  // of what there is none
    while ((i64{1} << shift_) < value) ++shift_;
    multiplier_ =
        static_cast<u32>(((u64{1} << 32) * ((u64{1} << shift_) - static_cast<u64>(value))) /
                             static_cast<u64>(value) +
                         1);
  }
#endif
  JALI_HD constexpr operator i32() const { return value_; }
  friend JALI_HD i32 operator/(i32 n, const Divisor& d) {
    const u32 m = static_cast<u32>(n);
#if defined(__CUDACC_RTC__)
    const u32 high = __umulhi(m, d.multiplier_);
#else
    const u32 high = static_cast<u32>((u64{m} * d.multiplier_) >> 32);
#endif
    return static_cast<i32>((high + m) >> d.shift_);
  }
  friend JALI_HD i32 operator%(i32 n, const Divisor& d) { return n - n / d * d.value_; }

 private:
  i32 value_ = 1;
  u32 multiplier_ = 1;
  i32 shift_ = 0;
};

}  // namespace jali
