// Accumulators to 16-bit rows in global memory.
#pragma once

#include "cuda/ptx/math.h"

namespace jali::tile {

/// Stores scale · acc, a warp's 16 rows: `to` is its first row, `rows` how many of them there are
/// (any number), `cols` the columns that exist (a multiple of 8). A 4 x 4 transpose in each quad of
/// lanes gives every lane 16 bytes of a row. Predicated, without a branch.
template <class T, i32 kCount>
JALI_DEVICE void store_rows(const float (&acc)[kCount], float scale, u16* to, i64 stride, i32 rows,
                            i32 cols, i32 lane) {
  const i32 quad = lane & 3;
#pragma unroll
  for (i32 e = 0; e < 2; ++e) {
    const i32 row = (lane >> 2) + 8 * e;
    u16* at = to + row * stride + quad * 8;
#pragma unroll
    for (i32 g = 0; g < (kCount + 15) / 16; ++g) {
      u32 w[4];
#pragma unroll
      for (i32 x = 0; x < 4; ++x) {
        const i32 n = 16 * g + 4 * x + 2 * e;  // the last group may be half a one
        w[x] = n < kCount ? T::pack(acc[n < kCount ? n : 0] * scale,
                                    acc[n + 1 < kCount ? n + 1 : 0] * scale)
                          : 0;
      }
      ptx::transpose_quad(w, quad);
      asm volatile(
          "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
          "@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(at + 32 * g),
          "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]),
          "r"(static_cast<i32>(row < rows && 32 * g + 8 * quad < cols))
          : "memory");
    }
  }
}

}  // namespace jali::tile
