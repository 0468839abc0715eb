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
  constexpr int kCalls = kTileKeys / 4;  // each of two keys, and the two 8 further
  auto key_of = [](int call) { return call / 4 * 16 + call % 4 * 2; };
  const DropoutRule rule(threshold);
  for (i32 first = i0 & ~15; first < i0 + rows; first += 16) {
    for (i32 pair = first; pair < first + 8; pair += 2) {
      u32 words[2][4][kCalls];  // of the pair of rows; of that 8 further
      for (int call = 0; call < kCalls; ++call) {
        const u32 counter = dropout_counter(j0 + key_of(call));
        const Philox x = philox4x32_7(seed, counter, dropout_counter(pair), h, b);
        for (int w = 0; w < 4; ++w) {
          words[0][w][call] = x.word[w];
          words[1][w][call] = dropout_turned(x.word[w]);
        }
      }
      for (int n = 0; n < 4; ++n) {
        const i32 row = pair + n % 2 + n / 2 * 8 - i0;
        if (row < 0 || row >= rows) continue;
        const auto& of_row = words[n / 2];
        // PERF: the numbers of all calls at once, which dropout_number() is not compiled to.
        u64 below = 0;
        for (int call = 0; call < kCalls; ++call) {
          const u32 near = of_row[n % 2 * 2][call], far = of_row[n % 2 * 2 + 1][call];
          const u64 cells[] = {(near & 0x7fff) < rule.limit, (near >> 16 & 0x7fff) < rule.limit,
                               (far & 0x7fff) < rule.limit, (far >> 16 & 0x7fff) < rule.limit};
          const u64 four = cells[0] | cells[1] << 1 | cells[2] << 8 | cells[3] << 9;
          below |= four << key_of(call);
        }
        kept[row] = rule.keeps ? below : ~below;
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
