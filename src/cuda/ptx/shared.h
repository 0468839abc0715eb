// Sixteen bytes of shared memory at once, by address.
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
JALI_DEVICE i32 load_shared(u32 shared) {
  i32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  return x;
}

}  // namespace jali::ptx
