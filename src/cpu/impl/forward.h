// The forward of one tile: S = Q K^T, adjust, online softmax, O += P V.
//
// The running maximum `top` and `sum` follow the usual recurrence; `sum` keeps one partial sum per
// lane, added up once at the end. A row that has seen nothing has top = -inf and sum = 0.
#pragma once

#include "cpu/impl/scores.h"

namespace jali::JALI_ISA {

using cpu::ForwardTile;

/// S from K by rows: dot products, for too few query rows to pay for transposing K.
template <class T, int kRows>
JALI_INLINE void dot_rows(const ForwardTile<T>& t, i32 r, i32 width) {
  for (i32 j = 0; j < t.keys; ++j) {
    Vec<T> acc[kRows] = {};
    const T* k = t.k + j * t.k_stride;
    for (i32 d = 0; d < width; d += kLanes<T>) {
      const Vec<T> x = load(k + d);
      for (int i = 0; i < kRows; ++i) acc[i] += x * load(t.q + (r + i) * t.q_stride + d);
    }
    for (int i = 0; i < kRows; ++i) t.s[(r + i) * kTileKeys + j] = sum_lanes<T>(acc[i]);
  }
}
template <class T>
static void dot_scores(const ForwardTile<T>& t) {
  const i32 width = padded<T>(t.D);
  i32 r = 0;
  for (; r + 4 <= t.rows; r += 4) dot_rows<T, 4>(t, r, width);
  for (; r < t.rows; ++r) dot_rows<T, 1>(t, r, width);
  // Whole vectors follow; what lies behind the last key is masked, but must not be NaN by chance.
  for (r = 0; r < t.rows; ++r) {
    for (i32 j = t.keys; j < padded<T>(t.keys); ++j) t.s[r * kTileKeys + j] = 0;
  }
}

/// Adjusts the scores; factor[r] = the maximum of the row so far. kVecs 0: `vecs` at run time.
template <class T, Adjust kAdjust, int kVecs>
static void adjust_and_top(const ForwardTile<T>& t, int vecs) {
  const int n = kVecs ? kVecs : vecs;
  for (i32 r = 0; r < t.rows; ++r) {
    T* s = t.s + r * kTileKeys;
    Vec<T> top = splat(kMinusInf<T>), unused = {};
#pragma GCC unroll 8
    for (int v = 0; v < n; ++v) {
      const Vec<T> x =
          adjusted<T, kAdjust>(t.rules, load(s + v * kLanes<T>), r, v * kLanes<T>, unused);
      if (kAdjust != Adjust::kNone) store(s + v * kLanes<T>, x);
      top = max_second(x, top);  // NaN is ignored here and shows in the sum
    }
    const T most = max_lanes<T>(top);
    t.factor[r] = most > t.top[r] ? most : t.top[r];
  }
}

/// Moves `top` to the new maximum; factor = how much that shrinks what was summed so far.
template <class T>
static void move_tops(const ForwardTile<T>& t) {
  for (i32 r = 0; r < t.rows; r += kLanes<T>) {
    const Vec<T> top = load(t.factor + r);
    const Vec<T> from = top == kMinusInf<T> ? Vec<T>{} : top;
    store(t.factor + r, exp2_of<T>((load(t.top + r) - from) * kLog2E<T>));
    store(t.top + r, top);
  }
}

/// S becomes P.
template <class T, bool kDropout, int kVecs>
static void weights(const ForwardTile<T>& t, int vecs) {
  const int n = kVecs ? kVecs : vecs;
  for (i32 r = 0; r < t.rows; ++r) {
    T* s = t.s + r * kTileKeys;
    const T top = t.top[r] == kMinusInf<T> ? T(0) : t.top[r];
    Vec<T> sum = t.factor[r] * load(t.sum + r * kLanes<T>);
#pragma GCC unroll 8
    for (int v = 0; v < n; ++v) {
      Vec<T> p = exp2_of<T>((load(s + v * kLanes<T>) - top) * kLog2E<T>);
      sum += p;
      if constexpr (kDropout) {
        p = kept_lanes(t.rules, r, v * kLanes<T>) ? t.rules.keep_scale * p : Vec<T>{};
      }
      store(s + v * kLanes<T>, p);
    }
    store(t.sum + r * kLanes<T>, sum);
  }
}

template <class T>
static void forward_tile(const ForwardTile<T>& t) {
  constexpr int kFull = kTileKeys / kLanes<T>;
  const int vecs = padded<T>(t.keys) / kLanes<T>;
  if (t.k_stride == 0) {
    gemm<T>(Into::kNothing, t.rows, vecs * kLanes<T>, t.D, t.q, t.q_stride, 1, t.k, kTileKeys, t.s,
            kTileKeys);
  } else {
    dot_scores(t);
  }
  with_adjustment(t.rules, [&]<Adjust kAdjust>() {
    if (vecs == kFull) {
      adjust_and_top<T, kAdjust, kFull>(t, vecs);
    } else {
      adjust_and_top<T, kAdjust, 0>(t, vecs);
    }
  });
  move_tops(t);
  if (t.rules.kept) {
    weights<T, true, 0>(t, vecs);
  } else if (vecs == kFull) {
    weights<T, false, kFull>(t, vecs);
  } else {
    weights<T, false, 0>(t, vecs);
  }
  gemm_cells<T>(Into::kScaledSum, t.rows, padded<T>(t.Dv), t.keys, t.s, kTileKeys, 1, t.v,
                t.v_stride, t.o, padded<T>(t.Dv), t.factor, t.rules, false);
}

template <class T>
static void forward_end(const ForwardTile<T>& t) {
  for (i32 r = 0; r < t.rows; ++r) {
    const T sum = sum_lanes<T>(load(t.sum + r * kLanes<T>));
    t.factor[r] = sum == 0 ? T(0) : T(1) / sum;
    t.top[r] = sum == 0 ? kMinusInf<T> : static_cast<T>(t.top[r] + __builtin_log(sum));
  }
}

}  // namespace jali::JALI_ISA
