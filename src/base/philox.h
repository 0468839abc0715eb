// Random numbers of dropout: addressed by (seed, b, h, i, j), so that every backend, tile shape and
// number of threads drops the same cells.
//
// One Philox4x32-7 call per 8192 cells: of 1024 rows and 128 keys, from multiples of these on, the rows of one
// i % 8 / 2 and the keys of one j % 8 / 2. key = the seed (low word, high word), counter = (4 (j / 128) + j % 8 / 2,
// 4 (i / 1024) + i % 8 / 2, h, b). Its words a, b, c, d give keys j and j + 1, for even j, of row i the word
//
//     a e f + b e + c f + d  (modulo 2^32),  e = kDropoutFactors[j % 128 / 8],
//                                            f = kDropoutFactors[i % 64 / 8 * 2 + i % 2] + kDropoutShifts[i / 64 % 16],
//
// the first key its low half, the other one its high half. The low 15 bits of that are the cell's number. A number is
// uniform, and any two are independent but for their last three bits, or seven in different 64 rows, as in Carter and
// Wegman's universal classes of hash functions (1979): words of two places differ by a multiple of b or c that has at
// most so many factors of 2, and a word itself is uniform by d. So sums of what is kept have the mean and the variance
// that they have where each cell has numbers of its own.
// PERF: rows i and i + 8 and all keys of a tile are what a GPU thread has of S, keys j and j + 8 and all rows of a tile
// what it has of its transpose: one call each, and as a e f + ... = (a f + b) e + (c f + d) = (a e + c) f + (b e + d), a
// multiplication for two cells. A backward, which goes through rows, calls once for 1024 of them.
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

constexpr u32 kDropoutRows = 1024;  // of a call
/// The first 16 words of the fraction of pi, their low four bits replaced by their index: no difference of two has more
/// than three factors of 2.
constexpr u32 kDropoutFactors[16] = {
    0x243F6A80, 0x85A308D1, 0x13198A22, 0x03707343, 0xA4093824, 0x299F31D5, 0x082EFA96, 0xEC4E6C87,
    0x452821E8, 0x38D01379, 0xBE5466CA, 0x34E90C6B, 0xC0AC29BC, 0xC97C50DD, 0x3F84D5BE, 0xB547091F};
/// The next 16, their low eight bits replaced by 16 times their index: of sums of one there and one here no difference has
/// more than seven.
constexpr u32 kDropoutShifts[16] = {
    0x9216D500, 0x8979FB10, 0xD1310B20, 0x98DFB530, 0x2FFD7240, 0xD01ADF50, 0xB8E1AF60, 0x6A267E70,
    0xBA7C9080, 0xF12C7F90, 0x24A199A0, 0xB3916CB0, 0x0801F2C0, 0x858EFCD0, 0x636920E0, 0x71574EF0};
JALI_HD u32 dropout_shift(u32 i) { return kDropoutShifts[i / 64 % 16]; }
/// Indices of factors: of row i, of keys j and j ^ 1.
JALI_HD u32 dropout_factor_of_row(u32 i) { return i % 64 / 8 * 2 + i % 2; }
JALI_HD u32 dropout_factor_of_key(u32 j) { return j % 128 / 8; }

/// The call that a cell belongs to, for factors of rows with their shifts.
JALI_HD Philox dropout_call(u64 seed, u32 b, u32 h, u32 i, u32 j) {
  return philox4x32_7(seed, j / 128 * 4 + j % 8 / 2, i / kDropoutRows * 4 + i % 8 / 2, h, b);
}

/// Its words for factors without, of the 64 rows that row i is one of: a (f + shift) + b = a f + (b + a shift).
JALI_HD Philox dropout_call_of_64(u64 seed, u32 b, u32 h, u32 i, u32 j) {
  Philox x = dropout_call(seed, b, h, i, j);
  const u32 shift = dropout_shift(i);
  x.word[1] += x.word[0] * shift;
  x.word[3] += x.word[2] * shift;
  return x;
}

/// What a call says of a row, or of a pair of keys: words are `times` times the factor of the other, plus `plus`.
struct DropoutLine {
  u32 times, plus;

  JALI_HD static DropoutLine of_row(const Philox& x, u32 factor) {
    return {x.word[0] * factor + x.word[1], x.word[2] * factor + x.word[3]};
  }
  JALI_HD static DropoutLine of_keys(const Philox& x, u32 factor) {
    return {x.word[0] * factor + x.word[2], x.word[1] * factor + x.word[3]};
  }
  JALI_HD u32 word(u32 factor) const { return times * factor + plus; }
  /// The line whose word of a factor is this one's of the factor and that more.
  JALI_HD DropoutLine shifted(u32 factor) const { return {times, word(factor)}; }
};

/// The number of a cell, below 32768. Kernels find those of many cells at once.
JALI_HD u32 dropout_number(u64 seed, u32 b, u32 h, u32 i, u32 j) {
  const Philox x = dropout_call_of_64(seed, b, h, i, j);
  const DropoutLine row = DropoutLine::of_row(x, kDropoutFactors[dropout_factor_of_row(i)]);
  return row.word(kDropoutFactors[dropout_factor_of_key(j)]) >> j % 2 * 16 & 0x7fff;
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
