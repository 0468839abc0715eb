// Random numbers of dropout: addressed by (seed, b, h, i, j), so that every backend, tile shape and
// number of threads drops the same cells.
//
// One Philox4x32-7 call per 16 cells, those of rows {i, i + 1, i + 8, i + 9} and keys {j, j + 1, j + 8, j + 9}
// (even i % 8, j % 8, below 8): what one thread has of a 16 x 16 block of scores, or of their transpose, in the
// layout of the GPU's accumulators, but for one exchange. key = the seed (low word, high word), counter =
// (4 (j / 16) + j % 8 / 2, 4 (i / 16) + i % 8 / 2, h, b).
//
// Rows of i % 2 and keys of j / 8 % 2 have word 2 (i % 2) + j / 8 % 2: for the key with j % 2 its low or high
// half, for rows with i / 8 % 2 = 1 the same of the word rotated right by 8 bits. The low 15 bits are the
// cell's number. So a word gives four numbers; each byte is the more significant one of one number and the less
// significant one of another. A number alone is uniform; the correlation of two cells that share a byte is below
// 0.01, and that of others 0.
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

/// The call that a cell belongs to: counter[0] and counter[1] by key and row.
JALI_HD u32 dropout_counter(i32 at) {
  const u32 n = static_cast<u32>(at);
  return n / 16 * 4 + n % 8 / 2;
}

/// A word as rows with i / 8 % 2 = 1 read it.
JALI_HD u32 dropout_turned(u32 word) { return word >> 8 | word << 24; }

/// The number of cell (i, j) of its call, below 32768.
JALI_HD u32 dropout_number(const Philox& x, i32 i, i32 j) {
  const u32 word = x.word[i % 2 * 2 + j / 8 % 2];
  return (i / 8 % 2 ? dropout_turned(word) : word) >> (j % 2 * 16) & 0x7fff;
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
