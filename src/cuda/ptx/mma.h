// Products of small matrices by one warp, all of them in registers.
#pragma once

#include "cuda/ptx/math.h"

namespace jali::ptx {

/// d += A B, A 16 x 16 and B 16 x 8. With g = lane / 4, t = lane % 4: word a[0] is row g, columns 2 t
/// and the next, a[1] row g + 8, a[2] columns + 8, a[3] both; b[0] is rows 2 t and the next of column
/// g, b[1] rows + 8; d[2 e + x] is row g + 8 e, column 2 t + x (PTX ISA, mma.m16n8k16).
template <class T>
JALI_DEVICE void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]);

#define JALI_MMA(T, type)                                                      \
  template <>                                                                  \
  JALI_DEVICE void mma<T>(float (&d)[4], const u32(&a)[4], const u32(&b)[2]) { \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));   \
  }
JALI_MMA(BF16, "bf16")
JALI_MMA(FP16, "f16")
#undef JALI_MMA

}  // namespace jali::ptx
