// What is compiled once per instruction set: work on one tile, called through a table of functions.
// Everything else (tasks, masks, threads, memory) is compiled once, in forward.cpp and
// backward.cpp.
//
// T, the compute type, is float for 32- and 16-bit inputs and double for fp64. All tiles in scratch
// memory have rows of kTileKeys elements; widths called "padded" are multiples of `lanes`.
#pragma once

#include <jali/jali.h>

#include "base/hd.h"
#include "base/isa.h"

namespace jali::cpu {

// PERF: 64 x 64 keeps K^T, V, Q and the scores of one tile near L1 up to D = 128; it is also the
// block of the masks' stored summaries.
constexpr i32 kTileRows = 64;
constexpr i32 kTileKeys = 64;  // one u64 of mask bits per row

/// Rows in the user's memory: element (r, d) at data + r * stride + d * stride_d.
struct Rows {
  void* data;
  DType dtype;
  i64 stride;
  i64 stride_d;
};

/// What happens to the raw scores of a tile before the softmax, and to weights after it.
template <class T>
struct ScoreRules {
  T softcap = 0;                // 0: off; else raw scores x become softcap * tanh(x)
  const T* bias = nullptr;      // [rows or 1][kTileKeys]
  i64 bias_row = 0;             // 0: one row for all
  const T* key_bias = nullptr;  // [kTileKeys]
  T slope = 0;                  // ALiBi: -slope * |distance + r - c| is added
  i64 distance = 0;
  const u64* visible = nullptr;  // bits per row; null: all
  i64 visible_row = 0;           // 0: one word for all rows
  const u64* kept = nullptr;     // bits per row left by dropout; null: no dropout
  T keep_scale = 1;
  bool adds() const { return bias || key_bias || slope != 0; }
};

/// One key tile for one tile of query rows with their running softmax.
template <class T>
struct ForwardTile {
  i32 rows, keys;  // keys: valid ones
  i32 D, Dv;
  const T* q;  // [rows][D], padded with zeros unless k is transposed
  i64 q_stride;
  const T* k;    // transposed: [D][kTileKeys], else padded rows [keys][D]
  i64 k_stride;  // 0: transposed
  const T* v;    // [keys][Dv], padded
  i64 v_stride;
  T* s;       // [rows][kTileKeys], scratch
  T* o;       // [rows][padded Dv], sum of weights times v, relative to `top`
  T* top;     // [padded rows], running maximum
  T* factor;  // [padded rows], scratch
  T* sum;     // [rows][lanes], running sum of weights, relative to `top`
  ScoreRules<T> rules;
};

/// One (row tile, key tile) of the backward.
template <class T>
struct BackwardTile {
  i32 rows, keys;
  i32 D, Dv;
  const T *q, *dout;  // [rows][D], [rows][Dv], padded
  i64 q_stride, dout_stride;
  const T *kt, *vt;  // [D][kTileKeys] with its factor, [Dv][kTileKeys]
  const T* k;        // [keys][D], padded
  i64 k_stride;
  const T *lse, *delta;  // [rows]; lse +inf for rows that see nothing
  T *p, *ds;             // [rows][kTileKeys], scratch; ds becomes the gradient of q . k
  T* dscore;             // [rows][kTileKeys], gradient of the adjusted score; null: not wanted
  T *dk, *dv;            // [kTileKeys][padded D or Dv], added to
  T* dq;                 // [rows][padded D], added to by backward_dq
  i64 dq_stride;
  T scale;  // of q . k
  ScoreRules<T> rules;
};

template <class T>
struct Kernels {
  i32 lanes;  // elements of one vector
  /// dst[r * ld + d] = src(r, d) in T; zero for width <= d < padded width.
  void (*pack)(const Rows& src, i32 rows, i32 width, T* dst, i64 ld);
  /// dst[d * kTileKeys + r] = factor * src(r, d); zero for r >= rows (rows <= kTileKeys).
  void (*pack_transposed)(const Rows& src, i32 rows, i32 width, T factor, T* dst);
  /// dst(r, d) = factor[r] * src[r * ld + d], rounded; factor null: 1.
  void (*unpack)(const T* src, i64 ld, i32 rows, i32 width, const T* factor, const Rows& dst);
  /// x[0..n) *= factor.
  void (*scale)(T* x, i64 n, T factor);
  /// delta[r] = sum over d of a(r, d) b(r, d).
  void (*row_dots)(const T* a, i64 a_stride, const T* b, i64 b_stride, i32 rows, i32 width,
                   T* delta);
  /// kept[r] bit c: whether dropout keeps the cell (i0 + r, j0 + c); j0 is a multiple of kTileKeys.
  void (*dropout_bits)(u64 seed, u32 threshold, i32 b, i32 h, i32 i0, i32 rows, i32 j0, u64* kept);
  void (*forward_tile)(const ForwardTile<T>& tile);
  /// Ends the softmax: factor[r] = 1 / sum (0 where nothing was seen), top[r] = LSE.
  void (*forward_end)(const ForwardTile<T>& tile);
  /// Everything but dq, which other key tiles add to as well.
  void (*backward_tile)(const BackwardTile<T>& tile);
  void (*backward_dq)(const BackwardTile<T>& tile);
};

struct KernelTable {
  Kernels<float> f32;
  Kernels<double> f64;
};

#if defined(__x86_64__)
const KernelTable& kernels_v2();
const KernelTable& kernels_v3();
const KernelTable& kernels_v4();
#else
const KernelTable& kernels_generic();
#endif

/// The kernels of current_isa().
template <class T>
const Kernels<T>& kernels();

}  // namespace jali::cpu
