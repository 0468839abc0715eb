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
  constexpr int kCalls = kTileKeys / 4;  // of two keys, and the two 8 further
  const DropoutRule rule(threshold);
  for (i32 first = i0 & ~15; first < i0 + rows; first += 16) {
    for (i32 pair = first; pair < first + 8; pair += 2) {
      u32 words[4][kCalls];
      for (int call = 0; call < kCalls; ++call) {
        const i32 j = j0 + call / 4 * 16 + call % 4 * 2;
        const Philox x = philox4x32_7(seed, dropout_counter(j), dropout_counter(pair), h, b);
        for (int w = 0; w < 4; ++w) words[w][call] = x.word[w];
      }
      for (i32 i : {pair, pair + 1, pair + 8, pair + 9}) {
        if (i < i0 || i >= i0 + rows) continue;
        u64 bits = 0;
        for (int call = 0; call < kCalls; ++call) {
          Philox x;
          for (int w = 0; w < 4; ++w) x.word[w] = words[w][call];
          for (int j : {0, 1, 8, 9}) {
            bits |= u64{rule.kept(dropout_number(x, i, j))} << (call / 4 * 16 + call % 4 * 2 + j);
          }
        }
        kept[i - i0] = bits;
      }
    }
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
