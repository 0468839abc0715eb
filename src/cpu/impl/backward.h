// The backward of one tile: P from S and LSE again, dP = dO V^T, dS = P (dP - delta), then
// dV += P^T dO, dK += dS^T Q and, in a second call, dQ += dS K.
#pragma once

#include "cpu/impl/scores.h"

namespace jali::JALI_ISA {

using cpu::BackwardTile;

/// p: raw scores to (dropped) weights; ds: dP to the gradient of q . k.
template <class T, Adjust kAdjust, bool kDropout, int kVecs>
static void weights_and_gradients(const BackwardTile<T>& t, int vecs) {
  const int n = kVecs ? kVecs : vecs;
  const bool capped = kAdjust == Adjust::kAll && t.rules.softcap != 0;
  for (i32 r = 0; r < t.rows; ++r) {
    const T lse = t.lse[r], delta = t.delta[r];
#pragma GCC unroll 8
    for (int v = 0; v < n; ++v) {
      const i32 c = v * kLanes<T>;
      T* p_at = t.p + r * kTileKeys + c;
      T* ds_at = t.ds + r * kTileKeys + c;
      Vec<T> slope = {};
      const Vec<T> x = adjusted<T, kAdjust>(t.rules, load(p_at), r, c, slope);
      Vec<T> p = exp2_of<T>((x - lse) * kLog2E<T>);
      Vec<T> dp = load(ds_at), dropped = p;
      if constexpr (kDropout) {
        const IVec<T> kept = kept_lanes(t.rules, r, c);
        dropped = kept ? t.rules.keep_scale * p : Vec<T>{};
        dp = kept ? t.rules.keep_scale * dp : Vec<T>{};
      }
      Vec<T> ds = p * (dp - delta);
      if (kAdjust == Adjust::kMask || (kAdjust == Adjust::kAll && t.rules.visible)) {
        ds = visible_lanes(t.rules, r, c) ? ds : Vec<T>{};
      }
      if (t.dscore) store(t.dscore + r * kTileKeys + c, ds);
      if (capped) ds *= slope;
      store(p_at, dropped);
      store(ds_at, t.scale * ds);
    }
  }
}

template <class T>
static void backward_tile(const BackwardTile<T>& t) {
  constexpr int kFull = kTileKeys / kLanes<T>;
  const int vecs = padded<T>(t.keys) / kLanes<T>;
  const i32 width = vecs * kLanes<T>;
  gemm<T>(Into::kNothing, t.rows, width, t.D, t.q, t.q_stride, 1, t.kt, kTileKeys, t.p, kTileKeys);
  gemm<T>(Into::kNothing, t.rows, width, t.Dv, t.dout, t.dout_stride, 1, t.vt, kTileKeys, t.ds,
          kTileKeys);
  with_adjustment(t.rules, [&]<Adjust kAdjust>() {
    if (t.rules.kept) {
      weights_and_gradients<T, kAdjust, true, 0>(t, vecs);
    } else if (vecs == kFull) {
      weights_and_gradients<T, kAdjust, false, kFull>(t, vecs);
    } else {
      weights_and_gradients<T, kAdjust, false, 0>(t, vecs);
    }
  });
  gemm_cells<T>(Into::kSum, t.keys, padded<T>(t.Dv), t.rows, t.p, 1, kTileKeys, t.dout,
                t.dout_stride, t.dv, padded<T>(t.Dv), nullptr, t.rules, true);
  gemm_cells<T>(Into::kSum, t.keys, padded<T>(t.D), t.rows, t.ds, 1, kTileKeys, t.q, t.q_stride,
                t.dk, padded<T>(t.D), nullptr, t.rules, true);
}

template <class T>
static void backward_dq(const BackwardTile<T>& t) {
  gemm_cells<T>(Into::kSum, t.rows, padded<T>(t.D), t.keys, t.ds, kTileKeys, 1, t.k, t.k_stride,
                t.dq, t.dq_stride, nullptr, t.rules, false);
}

}  // namespace jali::JALI_ISA
