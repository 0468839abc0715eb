// Products of small matrices by one warp, all of them in registers.
#pragma once

#include "cuda/ptx/math.h"

namespace jali::ptx {

/// d += A B, A 16 x 8 and B 8 x 8. With g = lane / 4, t = lane % 4: word a[0] is row g, columns 2 t and
/// the next, a[1] row g + 8; b is rows 2 t and the next of column g; d[2 e + x] is row g + 8 e, column
/// 2 t + x (PTX ISA, mma.m16n8k8).
template <class T>
JALI_DEVICE void mma_k8(float* d, const u32 (&a)[2], u32 b);

#define JALI_MMA_K8(T, type)                                       \
  template <>                                                      \
  JALI_DEVICE void mma_k8<T>(float* d, const u32(&a)[2], u32 b) {  \
    asm("mma.sync.aligned.m16n8k8.row.col.f32." type "." type      \
        ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])           \
        : "r"(a[0]), "r"(a[1]), "r"(b));                           \
  }
JALI_MMA_K8(BF16, "bf16")
JALI_MMA_K8(FP16, "f16")
#undef JALI_MMA_K8

}  // namespace jali::ptx
