// Accumulators to 16-bit rows in global memory.
#pragma once

#include "cuda/ptx/bulk.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/matrix.h"
#include "cuda/ptx/shared.h"

namespace jali::tile {

/// 16 bytes, if `condition`; without a branch.
JALI_DEVICE void store_if(u16* to, const u32 (&w)[4], bool condition) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
      "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(static_cast<i32>(condition))
      : "memory");
}

/// Stores scale[e] · acc, a warp's 16 rows, 8 for each e: `to` is its first row, `rows` how many of them
/// there are (any number), `cols` the columns that exist (a multiple of 8). A 4 x 4 transpose in each quad
/// of lanes gives every lane 16 bytes of a row.
template <class T, i32 kCount>
JALI_DEVICE void store_rows(const float (&acc)[kCount], const float (&scale)[2], u16* to,
                            i64 stride, i32 rows, i32 cols, i32 lane) {
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
        w[x] = n < kCount ? T::pack(acc[n < kCount ? n : 0] * scale[e],
                                    acc[n + 1 < kCount ? n + 1 : 0] * scale[e])
                          : 0;
      }
      ptx::transpose_quad(w, quad);
      store_if(at + 32 * g, w, row < rows && 32 * g + 8 * quad < cols);
    }
  }
}

/// Of a warp's 16 rows 64 columns in shared memory: row r at 128 r, its 8 columns c at 16 (c ^ r % 8), as the copy
/// engine's 128-byte swizzle has them.
constexpr i32 kStagedBytes = 2048;
/// scale[e] · acc there, from acc[begin] on, which is 64 columns or what there is.
template <class T, i32 kCount>
JALI_DEVICE void stage_rows(const float (&acc)[kCount], i32 begin, const float (&scale)[2],
                            u32 shared, i32 lane) {
  const u32 own = shared + lane % 16 * 128 + ((lane / 16 ^ lane % 8) << 4);  // no two use a bank
#pragma unroll
  for (i32 n = begin; n < begin + 32 && n < kCount; n += 8) {
    u32 w[4];
#pragma unroll
    for (i32 m = 0; m < 4; ++m) {
      w[m] = T::pack(acc[n + 2 * m] * scale[m % 2], acc[n + 2 * m + 1] * scale[m % 2]);
    }
    ptx::store_matrices(own ^ (n - begin) * 4, w);
  }
}
/// Copies what was staged of the first `rows` rows and `cols` columns (a multiple of 8), to `to` on.
JALI_DEVICE void copy_staged_rows(u32 shared, u16* to, i64 stride, i32 rows, i32 cols, i32 lane) {
#pragma unroll 1
  for (i32 n = lane; n < rows * 8; n += 32) {
    const i32 row = n / 8, part = n % 8;
#pragma unroll 1
    for (i32 c = 8 * part; c < cols; c += 64) {
      u32 w[4];
      ptx::load_array(shared + c / 64 * kStagedBytes + row * 128 + ((part ^ row % 8) << 4), w);
      store_if(to + row * stride + c, w, true);
    }
  }
}

/// store_rows() by way of shared memory, kStagedBytes of the warp's own: 64 columns at a time. PERF: a third
/// of the instructions.
template <class T, i32 kCount>
JALI_DEVICE void store_rows_staged(const float (&acc)[kCount], const float (&scale)[2], u32 shared,
                                   u16* to, i64 stride, i32 rows, i32 cols, i32 lane) {
  const i32 first = lane / 8, column = lane % 8 * 8;
  u16* at = to + first * stride + column;
#pragma unroll
  for (i32 begin = 0; begin < kCount; begin += 32) {
    __syncwarp();  // what lay there before was read
    stage_rows<T>(acc, begin, scale, shared, lane);
    __syncwarp();
    u32 w[4][4];
#pragma unroll
    for (i32 n = 0; n < 4; ++n) {
      const i32 row = 4 * n + first;
      ptx::load_array(shared + row * 128 + ((lane % 8 ^ row % 8) << 4), w[n]);
    }
#pragma unroll
    for (i32 n = 0; n < 4; ++n) {
      at = ptx::opaque(at);  // PERF: or each address is computed from all strides anew
      store_if(at, w[n], (4 * n + first < rows) & (2 * begin + column < cols));
      at += 4 * stride;
    }
    at += 64 - 16 * stride;
  }
}

/// Where a warp's 16 rows go: so many of them, and box coordinates 1 to 4.
struct RowsTo {
  i32 rows, token, head, b, end;
};
/// The first part of store_boxes(), below: boxes from number `begin` on to shared memory.
template <class T, i32 kBoxes, i32 kCount>
JALI_DEVICE void stage_boxes(const float (&acc)[kCount], i32 begin, const float (&scale)[2],
                             u32 shared, i32 lane) {
  constexpr i32 kParts = (kCount + 31) / 32;
  ptx::bulk_wait_read();  // what lay there before
  __syncwarp();
#pragma unroll
  for (i32 c = begin; c < begin + kBoxes && c < kParts; ++c) {
    // PERF: lanes and places anew wherever they are needed, or the forward of D64 would spill.
    stage_rows<T>(acc, 32 * c, scale, shared + (c - begin) * kStagedBytes, ptx::opaque(lane));
  }
}
/// The second part: `boxes` of them, from number `begin` on, from there to global memory.
template <class FirstRow>
JALI_DEVICE void send_boxes(i32 begin, i32 boxes, u32 shared, const ptx::TensorMap& map, i64 stride,
                            i32 cols, i32 lane, const RowsTo& to, FirstRow first_row) {
  ptx::fence_async();
  __syncwarp();
  if (to.rows >= 16) {
    if (ptx::elect()) {
#pragma unroll
      for (i32 c = begin; c < begin + boxes; ++c) {
        ptx::store_box(map, shared + (c - begin) * kStagedBytes, 64 * c, to.token, to.head, to.b,
                       to.end);
      }
      ptx::bulk_commit();
    }
  } else {
    copy_staged_rows(shared, first_row() + 64 * begin, stride, to.rows,
                     min_of(cols - 64 * begin, 64 * boxes), ptx::opaque(lane));
  }
}
/// store_rows() by the copy engine, from kBoxes boxes of kStagedBytes in shared memory, as many at a time as
/// there are; fewer than 16 rows by each thread, since behind them another sequence may begin: first_row() is the
/// address of the first one. Before the boxes are used for something else, bulk_wait_read(). PERF: half the
/// instructions of store_rows_staged(); but whoever needs the boxes again at once waits for the engine. `shared` and
/// `to` are known to be uniform (broadcast()), or ptxas makes a loop over lanes of each box.
template <class T, i32 kBoxes, i32 kCount, class FirstRow>
JALI_DEVICE void store_boxes(const float (&acc)[kCount], const float (&scale)[2], u32 shared,
                             const ptx::TensorMap& map, i64 stride, i32 cols, i32 lane,
                             const RowsTo& to, FirstRow first_row) {
  constexpr i32 kParts = (kCount + 31) / 32;
#pragma unroll
  for (i32 begin = 0; begin < kParts; begin += kBoxes) {
    stage_boxes<T, kBoxes>(acc, begin, scale, shared, lane);
    send_boxes(begin, min_of(kBoxes, kParts - begin), shared, map, stride, cols, lane, to,
               first_row);
  }
}

}  // namespace jali::tile
