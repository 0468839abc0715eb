// Random numbers of dropout: addressed by (seed, b, h, i, j), so that every backend, tile shape and
// number of threads drops the same cells.
//
// One Philox4x32-7 call per 524288 cells: of 1024 rows and 8192 keys, from multiples of these on, the rows of one
// i % 8 / 2 and the keys of one j % 8 / 2. key = the seed (low word, high word), counter = (4 (j / 8192) + j % 8 / 2,
// 4 (i / 1024) + i % 8 / 2, h, b). Its words a, b, c, d give keys j and j + 1, for even j, of row i the word
//
//     a (E + S) (F + R) + b (E + S) + c (F + R) + d + E [S / 1024] + F [R / 1024]  (modulo 2^32),
//         E = dropout_factor(j % 128 / 8),               S = dropout_shift(j / 128 % 64),
//         F = dropout_factor(i % 64 / 8 * 2 + i % 2),    R = dropout_shift(i / 64 % 16),
//
// the first key its low half, the other one its high half. The low 15 bits of that are the cell's number. A number is
// uniform, and any two are independent but for their last three bits, or in different 64 rows seven, in different 128
// keys nine, as in Carter and Wegman's universal classes of hash functions (1979): words of two places differ by a
// multiple of b or c that has at most so many factors of 2, and a word itself is uniform by d. So sums of what is kept
// have the mean and the variance that they have where each cell has numbers of its own. The last two terms keep what is
// alike in one block, where factors of 2 in a, b and c make it so, from being alike in all of them.
// PERF: rows i and i + 8 and all keys of a tile are what a GPU thread has of S, keys j and j + 8 and all rows of a tile
// what it has of its transpose: one call each, and as a word is linear in E, and in F, a multiplication for two cells. A
// forward, which goes through keys, calls once for 8192 of them, a backward, which goes through rows, once for 1024.
#pragma once

#include "base/hd.h"

namespace jali {

struct Philox {
  u32 word[4];
};

JALI_HD void multiply_wide(u32 a, u32 b, u32& low, u32& high) {
#if defined(__CUDACC_RTC__)
  // PERF: of a 64-bit product in C++, ptxas adds a zero to every high word.
  asm("{\n.reg .b64 t;\nmul.wide.u32 t, %2, %3;\nmov.b64 {%0, %1}, t;\n}"
      : "=r"(low), "=r"(high)
      : "r"(a), "r"(b));
#else
  const u64 product = u64{a} * b;
  low = static_cast<u32>(product);
  high = static_cast<u32>(product >> 32);
#endif
}

JALI_HD Philox philox4x32_7(u64 seed, u32 c0, u32 c1, u32 c2, u32 c3) {
  u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
  for (int round = 0; round < 7; ++round) {
    u32 a_low, a_high, b_low, b_high;
    multiply_wide(0xD2511F53u, c0, a_low, a_high);
    multiply_wide(0xCD9E8D57u, c2, b_low, b_high);
    c0 = b_high ^ c1 ^ k0;
    c1 = b_low;
    c2 = a_high ^ c3 ^ k1;
    c3 = a_low;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

constexpr u32 kDropoutRows = 1024, kDropoutKeys = 8192;  // of a call
/// Mixes a small number, by words of the fraction of pi. PERF: of a table of such numbers a GPU loads from global
/// memory what is not known at compile time.
JALI_HD constexpr u32 dropout_mix(u32 n) {
  u32 x = (n + 1) * 0x9216D5D9u;
  x ^= x >> 15;
  x *= 0x8979FB1Bu;
  return x ^ x >> 16;
}
/// Of n below 16. Its last four bits are n, so that no difference of two has more than three factors of 2.
JALI_HD constexpr u32 dropout_factor(u32 n) { return (dropout_mix(n) & ~0xfu) + n; }
/// What is added to factors of the n-th 64 rows or 128 keys of a call. Its last ten bits are 16 n, so that the difference
/// of two sums of a factor and a shift has at most three factors of 2, or four more than that of two n.
JALI_HD constexpr u32 dropout_shift(u32 n) { return (dropout_mix(16 + n) & ~0x3ffu) + 16 * n; }
JALI_HD u32 dropout_factor_of_row(u32 i) { return dropout_factor(i % 64 / 8 * 2 + i % 2); }
JALI_HD u32 dropout_factor_of_key(u32 j) { return dropout_factor(j % 128 / 8); }
JALI_HD u32 dropout_shift_of_row(u32 i) { return dropout_shift(i / 64 % (kDropoutRows / 64)); }
JALI_HD u32 dropout_shift_of_key(u32 j) { return dropout_shift(j / 128 % (kDropoutKeys / 128)); }

/// The call that a cell belongs to.
JALI_HD Philox dropout_call(u64 seed, u32 b, u32 h, u32 i, u32 j) {
  return philox4x32_7(seed, j / kDropoutKeys * 4 + j % 8 / 2, i / kDropoutRows * 4 + i % 8 / 2, h,
                      b);
}

/// What a call says of a row, or of a pair of keys: in a block of the others, of 128 keys or 64 rows, words are `times`
/// times their factors, plus `plus`.
struct DropoutLine {
  u32 times, plus;

  /// In no block yet: moved() is to follow, from 0.
  JALI_HD static DropoutLine of_row(const Philox& x, u32 i) {
    return of(x.word[0], x.word[1], x.word[2], x.word[3], dropout_factor_of_row(i),
              dropout_shift_of_row(i));
  }
  JALI_HD static DropoutLine of_keys(const Philox& x, u32 j) {
    return of(x.word[0], x.word[2], x.word[1], x.word[3], dropout_factor_of_key(j),
              dropout_shift_of_key(j));
  }
  JALI_HD static DropoutLine of(u32 a, u32 b, u32 c, u32 d, u32 factor, u32 shift) {
    const u32 sum = factor + shift;
    return {a * sum + b, c * sum + d + factor * (shift >> 10)};
  }
  /// From the block that has one shift to that which has the other. unit: what this line was multiplied by.
  JALI_HD DropoutLine moved(u32 from, u32 to, u32 unit = 1) const {
    const u32 base = times - (from >> 10) * unit;
    return {base + (to >> 10) * unit, base * (to - from) + plus};
  }
  JALI_HD u32 word(u32 factor) const { return times * factor + plus; }
};

/// The number of a cell, below 32768. Kernels find those of many cells at once.
JALI_HD u32 dropout_number(u64 seed, u32 b, u32 h, u32 i, u32 j) {
  const DropoutLine row = DropoutLine::of_row(dropout_call(seed, b, h, i, j), i);
  const u32 word = row.moved(0, dropout_shift_of_key(j)).word(dropout_factor_of_key(j));
  return word >> j % 2 * 16 & 0x7fff;
}

/// Cells dropped of 32768: 0 keeps everything, 32768 nothing.
JALI_HD u32 dropout_threshold(double p) { return static_cast<u32>(p * 32768 + 0.5); }

/// Numbers below `limit` are those of the cells that are dropped, or if `keeps` of those that are kept, whichever are
/// fewer. PERF: a limit up to 16384 can be compared as a half-precision number is.
struct DropoutRule {
  u32 limit;
  bool keeps;
  JALI_HD explicit DropoutRule(u32 threshold)
      : limit(threshold <= 16384 ? threshold : 32768 - threshold), keeps(threshold > 16384) {}
  JALI_HD bool kept(u32 number) const { return (number < limit) == keeps; }
};

/// What kept values are multiplied by.
JALI_HD double dropout_scale(u32 threshold) {
  return threshold >= 32768 ? 0 : 32768.0 / (32768 - threshold);
}

}  // namespace jali
