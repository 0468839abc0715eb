// The table of this instruction set's kernels, and the few that need no file of their own.
#pragma once

#include "base/philox.h"
#include "cpu/impl/backward.h"
#include "cpu/impl/forward.h"
#include "cpu/impl/pack.h"

namespace jali::JALI_ISA {

template <class T>
static void scale(T* x, i64 n, T factor) {
  for (i64 i = 0; i < n; ++i) x[i] *= factor;
}

template <class T>
static void row_dots(const T* a, i64 a_stride, const T* b, i64 b_stride, i32 rows, i32 width,
                     T* delta) {
  for (i32 r = 0; r < rows; ++r) {
    Vec<T> sum = {};
    for (i32 d = 0; d < width; d += kLanes<T>) {
      sum += load(a + r * a_stride + d) * load(b + r * b_stride + d);
    }
    delta[r] = sum_lanes<T>(sum);
  }
}

static void dropout_bits(u64 seed, u32 threshold, i32 b, i32 h, i32 i0, i32 rows, i32 j0,
                         u64* kept) {
  constexpr int kCalls = kTileKeys / 8;
  for (i32 r = 0; r < rows; ++r) {
    u32 words[4][kCalls];
    for (int call = 0; call < kCalls; ++call) {
      const Philox x = philox4x32_7(seed, j0 / 8 + call, i0 + r, h, b);
      for (int w = 0; w < 4; ++w) words[w][call] = x.word[w];
    }
    u64 bits = 0;
    for (int call = 0; call < kCalls; ++call) {
      for (int w = 0; w < 4; ++w) {
        const u64 low = (words[w][call] & 0xffff) >= threshold;
        const u64 high = (words[w][call] >> 16) >= threshold;
        bits |= (low | high << 1) << (8 * call + 2 * w);
      }
    }
    kept[r] = bits;
  }
}

template <class T>
static constexpr cpu::Kernels<T> table_of() {
  return {kLanes<T>,      pack<T>,          pack_transposed<T>, unpack<T>,
          scale<T>,       row_dots<T>,      dropout_bits,       forward_tile<T>,
          forward_end<T>, backward_tile<T>, backward_dq<T>};
}

static constexpr cpu::KernelTable kTable = {table_of<float>(), table_of<double>()};

}  // namespace jali::JALI_ISA
