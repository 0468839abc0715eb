// The one matrix product: C[M x N] (+)= A[M x K] B[K x N]. A is read element by element with any
// two strides (so a transposed A costs nothing), B and C by rows of whole vectors.
//
// Ownership: a block of kBlockRows x kBlockVecs vectors of C lives in registers over all of K.
#pragma once

#include "cpu/impl/vec.h"

namespace jali::JALI_ISA {

/// What C holds before: nothing, a value to add to, or a value to scale by row_scale[row] first.
enum class Into { kNothing, kSum, kScaledSum };

template <class T, int kRows, int kVecs>
JALI_INLINE void gemm_block(Into into, i64 K, const T* a, i64 a_row, i64 a_k, const T* b, i64 ldb,
                            T* c, i64 ldc, const T* row_scale) {
  Vec<T> acc[kRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) acc[r][v] = Vec<T>{};
  }
  for (i64 k = 0; k < K; ++k) {
    Vec<T> row[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) row[v] = load(b + v * kLanes<T>);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      T x = a[r * a_row];
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) acc[r][v] += x * row[v];
    }
    a += a_k;
    b += ldb;
  }
  // Added last: K terms are summed apart from what earlier products left. One chain over all keys
  // would lose bits with the length, most where the terms are alike.
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    T factor = into == Into::kScaledSum ? row_scale[r] : T(1);
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      T* at = c + r * ldc + v * kLanes<T>;
      store(at, into == Into::kNothing ? acc[r][v] : acc[r][v] + factor * load(at));
    }
  }
}

/// All rows of one panel of kVecs vectors.
template <class T, int kVecs>
static void gemm_panel(Into into, i32 M, i64 K, const T* a, i64 a_row, i64 a_k, const T* b, i64 ldb,
                       T* c, i64 ldc, const T* row_scale) {
  i32 m = 0;
  for (; m + kBlockRows <= M; m += kBlockRows) {
    gemm_block<T, kBlockRows, kVecs>(into, K, a + m * a_row, a_row, a_k, b, ldb, c + m * ldc, ldc,
                                     row_scale + m);
  }
  a += m * a_row;
  c += m * ldc;
  row_scale += m;
  switch (M - m) {
    case 5:
      if constexpr (kBlockRows > 5) {
        gemm_block<T, 5, kVecs>(into, K, a, a_row, a_k, b, ldb, c, ldc, row_scale);
      }
      break;
    case 4:
      if constexpr (kBlockRows > 4) {
        gemm_block<T, 4, kVecs>(into, K, a, a_row, a_k, b, ldb, c, ldc, row_scale);
      }
      break;
    case 3:
      gemm_block<T, 3, kVecs>(into, K, a, a_row, a_k, b, ldb, c, ldc, row_scale);
      break;
    case 2:
      gemm_block<T, 2, kVecs>(into, K, a, a_row, a_k, b, ldb, c, ldc, row_scale);
      break;
    case 1:
      gemm_block<T, 1, kVecs>(into, K, a, a_row, a_k, b, ldb, c, ldc, row_scale);
      break;
    default:
      break;
  }
}

/// N is a multiple of kLanes<T>; row_scale is read only with Into::kScaledSum.
template <class T>
static void gemm(Into into, i32 M, i32 N, i64 K, const T* a, i64 a_row, i64 a_k, const T* b,
                 i64 ldb, T* c, i64 ldc, const T* row_scale = nullptr) {
  constexpr i32 kPanel = kBlockVecs * kLanes<T>;
  i32 n = 0;
  for (; n + kPanel <= N; n += kPanel) {
    gemm_panel<T, kBlockVecs>(into, M, K, a, a_row, a_k, b + n, ldb, c + n, ldc, row_scale);
  }
  // PERF: D = 32 on AVX-512 is two vectors; one at a time leaves half of the adders idle.
  for (; kBlockVecs > 2 && n + 2 * kLanes<T> <= N; n += 2 * kLanes<T>) {
    gemm_panel<T, 2>(into, M, K, a, a_row, a_k, b + n, ldb, c + n, ldc, row_scale);
  }
  for (; n < N; n += kLanes<T>) {
    gemm_panel<T, 1>(into, M, K, a, a_row, a_k, b + n, ldb, c + n, ldc, row_scale);
  }
}

}  // namespace jali::JALI_ISA
