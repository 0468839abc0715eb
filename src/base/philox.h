// Random numbers of dropout: addressed by (seed, b, h, i, j), so that every backend, tile shape and
// number of threads drops the same cells.
//
// One Philox4x32-7 call per (b, h, i, j / 8): key = the seed (low word, high word), counter =
// (j / 8, i, h, b). Its four words are eight 16-bit numbers, low half first; cell j takes number
// j % 8. A cell is kept when its number >= threshold = round(p * 65536).
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

/// Number n (0..7) of one call.
JALI_HD u32 dropout_number(const Philox& x, i32 n) {
  return (x.word[n / 2] >> (n % 2 * 16)) & 0xffff;
}

/// 0 keeps everything, 65536 nothing.
JALI_HD u32 dropout_threshold(double p) { return static_cast<u32>(p * 65536 + 0.5); }

/// What kept values are multiplied by.
JALI_HD double dropout_scale(u32 threshold) {
  return threshold >= 65536 ? 0 : 65536.0 / (65536 - threshold);
}

}  // namespace jali
