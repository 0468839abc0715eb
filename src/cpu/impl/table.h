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
  const DropoutRule rule(threshold);
  u32 of_keys[8];  // of blocks of 8
  for (i32 m = 0; m < 8; ++m) of_keys[m] = dropout_factor_of_key(j0 + 8 * m);
  const u32 shift = dropout_shift_of_key(j0);
  // Rows that share calls.
  for (i32 first = 0; first < 8; first += 2) {
    Philox calls[4];
    i32 block = -1;  // of these calls
    for (i32 r = 0; r < rows; ++r) {
      const i32 i = i0 + r;
      if (i % 8 / 2 * 2 != first) continue;
      if (i / static_cast<i32>(kDropoutRows) != block) {
        block = i / static_cast<i32>(kDropoutRows);
        for (i32 n = 0; n < 4; ++n) calls[n] = dropout_call(seed, b, h, i, j0 + 2 * n);
      }
      u32 words[kTileKeys / 2];  // by call, then by block of 8 keys
      for (i32 n = 0; n < 4; ++n) {
        const DropoutLine line = DropoutLine::of_row(calls[n], i).moved(0, shift);
        for (i32 m = 0; m < 8; ++m) words[8 * n + m] = line.word(of_keys[m]);
      }
      // PERF: all at once, which dropout_number() is not compiled to.
      u64 below = 0;
      for (i32 n = 0; n < kTileKeys / 2; ++n) {
        const u64 low = (words[n] & 0x7fff) < rule.limit,
                  high = (words[n] >> 16 & 0x7fff) < rule.limit;
        below |= (low | high << 1) << (n % 8 * 8 + n / 8 * 2);
      }
      kept[r] = rule.keeps ? below : ~below;
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
