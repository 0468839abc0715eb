// Matrix fragments between registers and shared memory.
#pragma once

#include "cuda/ptx/barrier.h"

namespace jali::ptx {

/// Two neighbouring columns' floats, as an accumulator's thread holds them.
JALI_DEVICE void load_pair(u32 shared, float& x, float& y) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(shared) : "memory");
}
JALI_DEVICE void store_pair(u32 shared, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(x), "f"(y) : "memory");
}
JALI_DEVICE void store_four(u32 shared, const float* x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}
JALI_DEVICE void load_words(u32 shared, u32* w) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(shared)
               : "memory");
}
/// Adds four floats to those at `global`, if `condition`.
JALI_DEVICE void add_four_if(float* global, const float* x, bool condition) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n}" ::"l"(global),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(static_cast<i32>(condition))
      : "memory");
}
/// Adds a float to that at `global`, if `condition`.
JALI_DEVICE void add_if(float* global, float x, bool condition) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p red.relaxed.gpu.global.add.f32 [%0], %1;\n}" ::
          "l"(global),
      "f"(x), "r"(static_cast<i32>(condition))
      : "memory");
}
/// Four 8 x 8 matrices of 16-bit pairs: lane 8 m + i gives the address of row i of matrix m; word m
/// of a lane is row lane / 4, columns 2 (lane % 4) and the next of matrix m.
JALI_DEVICE void store_matrices(u32 shared, const u32* w) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}
JALI_DEVICE void load_matrices(u32 shared, u32 (&w)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(shared)
               : "memory");
}
/// A warp's 16 rows as a left operand, four words for 16 columns, from boxes of 64 columns under the 128-byte swizzle,
/// kBox bytes apart. `row`: where row lane % 16 of these begins; r: its number in a box, whose last three bits matter.
template <i32 kBox, i32 kCount>
JALI_DEVICE void load_left(u32 (&x)[kCount], u32 row, i32 r, i32 lane) {
#pragma unroll
  for (i32 t = 0; t < kCount / 4; ++t) {
    u32 words[4];
    load_matrices(row + t / 4 * kBox + ((2 * (t % 4) + (lane >> 4) ^ r & 7) << 4), words);
#pragma unroll
    for (i32 n = 0; n < 4; ++n) x[4 * t + n] = words[n];
  }
}
/// Of the transposes: rows 2 (lane % 4) and the next, column lane / 4.
JALI_DEVICE void load_transposed(u32 shared, u32 (&w)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(shared)
               : "memory");
}
/// The transpose of an 8 x 8 matrix of 16-bit numbers: a lane has row lane / 4, columns 2 (lane % 4) and
/// the next.
JALI_DEVICE u32 transpose_matrix(u32 word) {
  u32 to;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(word));
  return to;
}

}  // namespace jali::ptx
