// From raw scores to adjusted ones: softcap, biases, ALiBi, mask bits, for one vector at a time.
#pragma once

#include "cpu/impl/gemm.h"
#include "cpu/impl/math.h"
#include "cpu/kernels.h"

namespace jali::JALI_ISA {

using cpu::kTileKeys;
using cpu::ScoreRules;

template <class T>
constexpr T kMinusInf = -__builtin_inf();
template <class T>
constexpr T kLog2E = T(1.442695040888963407359924681);

template <class T>
JALI_INLINE i32 padded(i32 n) {
  return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

/// Lanes whose bit is set, as a mask.
template <class T>
JALI_INLINE IVec<T> lanes_of(u64 bits) {
  using I = typename IntOf<T>::type;
  IVec<T> bit;
  for (int i = 0; i < kLanes<T>; ++i) bit[i] = I(1) << i;
  return ((static_cast<I>(bits) - IVec<T>{}) & bit) != 0;
}

/// How much of the rules a tile needs; a constant, so that plain tiles pay for nothing.
enum class Adjust { kNone, kMask, kAll };

template <class T>
JALI_INLINE Adjust adjustment(const ScoreRules<T>& rules) {
  if (rules.softcap != 0 || rules.adds()) return Adjust::kAll;
  return rules.visible ? Adjust::kMask : Adjust::kNone;
}
template <class T>
JALI_INLINE IVec<T> visible_lanes(const ScoreRules<T>& rules, i32 r, i32 c) {
  return lanes_of<T>(rules.visible[r * rules.visible_row] >> c);
}
template <class T>
JALI_INLINE IVec<T> kept_lanes(const ScoreRules<T>& rules, i32 r, i32 c) {
  return lanes_of<T>(rules.kept[r] >> c);
}

/// The adjusted scores of row r, keys c.. of the tile. capped becomes the softcap's own slope.
template <class T, Adjust kAdjust>
JALI_INLINE Vec<T> adjusted(const ScoreRules<T>& rules, Vec<T> x, i32 r, i32 c, Vec<T>& capped) {
  if constexpr (kAdjust == Adjust::kAll) {
    if (rules.softcap != 0) {
      const Vec<T> t = tanh_of<T>(x);
      capped = T(1) - t * t;
      x = rules.softcap * t;
    }
    if (rules.bias) x += load(rules.bias + r * rules.bias_row + c);
    if (rules.key_bias) x += load(rules.key_bias + c);
    if (rules.slope != 0) {
      const Vec<T> d = static_cast<T>(rules.distance + r - c) - iota<T>();
      x -= rules.slope * (d < T(0) ? -d : d);
    }
  }
  if constexpr (kAdjust != Adjust::kNone) {
    if (kAdjust == Adjust::kMask || rules.visible) {
      x = visible_lanes(rules, r, c) ? x : splat(kMinusInf<T>);
    }
  }
  return x;
}

/// Calls f with the adjustment as a constant.
template <class T, class F>
JALI_INLINE void with_adjustment(const ScoreRules<T>& rules, F f) {
  switch (adjustment(rules)) {
    case Adjust::kNone:
      return f.template operator()<Adjust::kNone>();
    case Adjust::kMask:
      return f.template operator()<Adjust::kMask>();
    case Adjust::kAll:
      return f.template operator()<Adjust::kAll>();
  }
}

/// Whether a NaN or an infinity is among rows of whole vectors.
template <class T>
static bool has_nonfinite(const T* x, i64 stride, i32 rows, i32 width) {
  // PERF: four sums, or each addition waits for the last: partial tiles 8 % quicker at D = 32.
  constexpr int kSums = 4;
  Vec<T> zero[kSums] = {};
  for (i32 d = 0; d < width; d += kLanes<T>) {
    i32 r = 0;
    for (; r + kSums <= rows; r += kSums) {
#pragma GCC unroll 4
      for (int n = 0; n < kSums; ++n) {
        const Vec<T> v = load(x + (r + n) * stride + d);
        zero[n] += v - v;
      }
    }
    for (; r < rows; ++r) {
      const Vec<T> v = load(x + r * stride + d);
      zero[0] += v - v;
    }
  }
  return !(sum_lanes<T>((zero[0] + zero[1]) + (zero[2] + zero[3])) == 0);
}

/// gemm over visible cells only: 0 * NaN must not carry a NaN of B from a key (row) to a row (key)
/// that does not see it. Cells are (m, k), or (k, m) where the rows of A are keys. Slow and rare.
template <class T>
static void gemm_visible(Into into, i32 M, i32 N, i32 K, const T* a, i64 a_row, i64 a_k, const T* b,
                         i64 ldb, T* c, i64 ldc, const T* row_scale, const ScoreRules<T>& rules,
                         bool rows_are_keys) {
  for (i32 m = 0; m < M; ++m) {
    for (i32 n = 0; n < N; n += kLanes<T>) {
      Vec<T> sum = {};
      for (i32 k = 0; k < K; ++k) {
        const i32 row = rows_are_keys ? k : m, key = rows_are_keys ? m : k;
        if (!(rules.visible[row * rules.visible_row] >> key & 1)) continue;
        sum += a[m * a_row + k * a_k] * load(b + k * ldb + n);
      }
      const T factor = into == Into::kScaledSum ? row_scale[m] : T(1);
      T* at = c + m * ldc + n;
      store(at, sum + factor * load(at));  // added last, as in gemm: the same bits
    }
  }
}

/// C += A B (or C = row_scale C + A B) where A holds weights or gradients of the tile's cells.
template <class T>
static void gemm_cells(Into into, i32 M, i32 N, i32 K, const T* a, i64 a_row, i64 a_k, const T* b,
                       i64 ldb, T* c, i64 ldc, const T* row_scale, const ScoreRules<T>& rules,
                       bool rows_are_keys) {
  if (rules.visible && has_nonfinite(b, ldb, K, N)) {
    gemm_visible(into, M, N, K, a, a_row, a_k, b, ldb, c, ldc, row_scale, rules, rows_are_keys);
  } else {
    gemm(into, M, N, K, a, a_row, a_k, b, ldb, c, ldc, row_scale);
  }
}

}  // namespace jali::JALI_ISA
