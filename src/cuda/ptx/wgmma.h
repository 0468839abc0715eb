// WGMMA: a warpgroup multiplies a 64 x 16 tile by a 16 x N tile and adds to accumulators in registers.
//
// Accumulator `d[4 j + 2 e + x]` of a thread is row 16 warp + lane / 4 + 8 e, column
// 8 j + 2 (lane % 4) + x of the 64 x N result (PTX ISA, wgmma register fragments).
#pragma once

#include "cuda/ptx/math.h"

namespace jali::ptx {

/// Orders register writes before the first WGMMA that reads them.
JALI_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
JALI_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most kPending committed groups are in flight.
template <i32 kPending>
JALI_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Ties registers to this point of the program, so that no access crosses a fence or a wait.
template <i32 kCount>
JALI_DEVICE void tie(float (&x)[kCount]) {
#pragma unroll
  for (i32 i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <i32 kCount>
JALI_DEVICE void tie(u32 (&x)[kCount]) {
#pragma unroll
  for (i32 i = 0; i < kCount; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

/// What registers hold is not needed: they are free until they are written.
template <i32 kCount>
JALI_DEVICE void forget(float (&x)[kCount]) {
#pragma unroll
  for (i32 i = 0; i < kCount; ++i) asm volatile("" : "=f"(x[i]));
}

/// A matrix in shared memory under the 128-byte swizzle, the low word of its descriptor: address and
/// `leading`, the bytes between 64-column halves (MN-major only). Adding n moves it by 16 n bytes.
/// The high word is kSwizzle128 for all: 8-row groups stand 1024 bytes apart.
constexpr u32 kSwizzle128 = 0x40000040;
/// Or nowhere else: all groups of 8 rows are the same.
constexpr u32 kSwizzle128Once = 0x40000000;
/// Without a swizzle, of 8 rows alone: two blocks of 8 rows x 16 bytes, `leading` bytes apart.
constexpr u32 kEightRows = 0;
JALI_DEVICE u32 descriptor(u32 shared, u32 leading) {
  return ((shared & 0x3ffff) >> 4) | ((leading >> 4) << 16);
}

/// d += A B for one step of 16: A and B in shared memory, or A in registers. kN columns; kTransA,
/// kTransB: the operand is MN-major. `accumulate` 0 overwrites d.
template <class T, i32 kN, bool kTransB>
struct Wgmma;

// Operand lists, but for the first one in blocks of 8 accumulators.
#define JALI_S8 "%0, %1, %2, %3"
#define JALI_D8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define JALI_R8(k)                                                                                \
  "+f"(d[8 * k]), "+f"(d[8 * k + 1]), "+f"(d[8 * k + 2]), "+f"(d[8 * k + 3]), "+f"(d[8 * k + 4]), \
      "+f"(d[8 * k + 5]), "+f"(d[8 * k + 6]), "+f"(d[8 * k + 7])
#define JALI_S16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define JALI_D16 JALI_R8(0)
#define JALI_S32 JALI_S16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define JALI_D32 JALI_D16, JALI_R8(1)
#define JALI_S48 JALI_S32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define JALI_D48 JALI_D32, JALI_R8(2)
#define JALI_S64 JALI_S48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define JALI_D64 JALI_D48, JALI_R8(3)
#define JALI_S80 JALI_S64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define JALI_D80 JALI_D64, JALI_R8(4)
#define JALI_S96 JALI_S80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define JALI_D96 JALI_D80, JALI_R8(5)
#define JALI_S112 JALI_S96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define JALI_D112 JALI_D96, JALI_R8(6)
#define JALI_S128 JALI_S112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define JALI_D128 JALI_D112, JALI_R8(7)
#define JALI_S144 JALI_S128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define JALI_D144 JALI_D128, JALI_R8(8)
#define JALI_S160 JALI_S144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define JALI_D160 JALI_D144, JALI_R8(9)
#define JALI_S176 JALI_S160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define JALI_D176 JALI_D160, JALI_R8(10)
#define JALI_S192 JALI_S176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define JALI_D192 JALI_D176, JALI_R8(11)
#define JALI_S208 JALI_S192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define JALI_D208 JALI_D192, JALI_R8(12)
#define JALI_S224 JALI_S208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define JALI_D224 JALI_D208, JALI_R8(13)
#define JALI_S240 JALI_S224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define JALI_D240 JALI_D224, JALI_R8(14)
#define JALI_S256 JALI_S240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define JALI_D256 JALI_D240, JALI_R8(15)

// What follows the n / 2 accumulators in the operand lists, by number.
//   ss: A's descriptor p0, B's p1, accumulate p2, their high word p3, transposed B p4, transposed A p5
//   rs: A's registers p0 to p3, B's descriptor p4, accumulate p5, its high word p6, transposed B p7
#define JALI_WGMMA(T, type, n, p0, p1, p2, p3, p4, p5, p6, p7)                               \
  template <bool kTransB>                                                                    \
  struct Wgmma<T, n, kTransB> {                                                              \
    template <bool kTransA = false, u32 kHigh = kSwizzle128>                                 \
    JALI_DEVICE static void ss(float (&d)[n / 2], u32 a, u32 b, i32 accumulate) {            \
      asm volatile(                                                                          \
          "{\n.reg .pred p;\n.reg .b64 da, db;\n"                                            \
          "mov.b64 da, {%" #p0 ", %" #p3 "};\nmov.b64 db, {%" #p1 ", %" #p3                  \
          "};\n"                                                                             \
          "setp.ne.b32 p, %" #p2                                                             \
          ", 0;\n"                                                                           \
          "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" JALI_S##n     \
          "}, "                                                                              \
          "da, db, p, 1, 1, %" #p5 ", %" #p4 ";\n}"                                          \
          : JALI_D##n                                                                        \
          : "r"(a), "r"(b), "r"(accumulate), "n"(kHigh), "n"(kTransB ? 1 : 0),               \
            "n"(kTransA ? 1 : 0));                                                           \
    }                                                                                        \
    template <u32 kHigh = kSwizzle128>                                                       \
    JALI_DEVICE static void rs(float (&d)[n / 2], const u32* a, u32 b, i32 accumulate) {     \
      asm volatile(                                                                          \
          "{\n.reg .pred p;\n.reg .b64 db;\n"                                                \
          "mov.b64 db, {%" #p4 ", %" #p6                                                     \
          "};\n"                                                                             \
          "setp.ne.b32 p, %" #p5                                                             \
          ", 0;\n"                                                                           \
          "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" JALI_S##n     \
          "}, "                                                                              \
          "{%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, db, p, 1, 1, %" #p7 ";\n}"              \
          : JALI_D##n                                                                        \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(kHigh), \
            "n"(kTransB ? 1 : 0));                                                           \
    }                                                                                        \
  };
#define JALI_WGMMA_BOTH(n, ...) \
  JALI_WGMMA(BF16, "bf16", n, __VA_ARGS__) JALI_WGMMA(FP16, "f16", n, __VA_ARGS__)
JALI_WGMMA_BOTH(8, 4, 5, 6, 7, 8, 9, 10, 11)
JALI_WGMMA_BOTH(16, 8, 9, 10, 11, 12, 13, 14, 15)
JALI_WGMMA_BOTH(32, 16, 17, 18, 19, 20, 21, 22, 23)
JALI_WGMMA_BOTH(48, 24, 25, 26, 27, 28, 29, 30, 31)
JALI_WGMMA_BOTH(64, 32, 33, 34, 35, 36, 37, 38, 39)
JALI_WGMMA_BOTH(80, 40, 41, 42, 43, 44, 45, 46, 47)
JALI_WGMMA_BOTH(96, 48, 49, 50, 51, 52, 53, 54, 55)
JALI_WGMMA_BOTH(112, 56, 57, 58, 59, 60, 61, 62, 63)
JALI_WGMMA_BOTH(128, 64, 65, 66, 67, 68, 69, 70, 71)
JALI_WGMMA_BOTH(144, 72, 73, 74, 75, 76, 77, 78, 79)
JALI_WGMMA_BOTH(160, 80, 81, 82, 83, 84, 85, 86, 87)
JALI_WGMMA_BOTH(176, 88, 89, 90, 91, 92, 93, 94, 95)
JALI_WGMMA_BOTH(192, 96, 97, 98, 99, 100, 101, 102, 103)
JALI_WGMMA_BOTH(208, 104, 105, 106, 107, 108, 109, 110, 111)
JALI_WGMMA_BOTH(224, 112, 113, 114, 115, 116, 117, 118, 119)
JALI_WGMMA_BOTH(240, 120, 121, 122, 123, 124, 125, 126, 127)
JALI_WGMMA_BOTH(256, 128, 129, 130, 131, 132, 133, 134, 135)
#undef JALI_WGMMA_BOTH
#undef JALI_WGMMA

}  // namespace jali::ptx
