// Up to sixteen bytes of shared memory at once, by address.
#pragma once

#include "cuda/ptx/barrier.h"

namespace jali::ptx {

JALI_DEVICE void store_shared(u32 shared, i32 a, i32 b, i32 c, i32 d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
JALI_DEVICE void load_shared(u32 shared, i32& a, i32& b, i32& c, i32& d) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(shared)
               : "memory");
}
JALI_DEVICE void store_shared(u32 shared, i32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}
/// PERF: predicated, as barrier_arrive_if.
JALI_DEVICE void store_shared_if(u32 shared, i32 x, bool condition) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.shared.b32 [%0], %1;\n}" ::"r"(shared),
      "r"(x), "r"(static_cast<i32>(condition))
      : "memory");
}
JALI_DEVICE i32 load_shared(u32 shared) {
  i32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  return x;
}

/// Brings the sector of `global` to the L2 cache.
JALI_DEVICE void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

/// One, two or four words at an address that is a multiple of their size.
template <i32 kCount>
JALI_DEVICE void load_array(u32 shared, u32 (&w)[kCount]) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4);
  if constexpr (kCount == 4) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(shared)
                 : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(w[0]), "=r"(w[1])
                 : "r"(shared)
                 : "memory");
  } else {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(w[0]) : "r"(shared) : "memory");
  }
}
template <i32 kCount>
JALI_DEVICE void store_array(u32 shared, const u32 (&w)[kCount]) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4);
  if constexpr (kCount == 4) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(w[0]), "r"(w[1]),
                 "r"(w[2]), "r"(w[3])
                 : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared), "r"(w[0]), "r"(w[1]) : "memory");
  } else {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(w[0]) : "memory");
  }
}

}  // namespace jali::ptx
