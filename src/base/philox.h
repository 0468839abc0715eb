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

JALI_HD Philox philox4x32_7(u64 seed, u32 c0, u32 c1, u32 c2, u32 c3) {
  u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
  for (int round = 0; round < 7; ++round) {
    const u64 a = u64{0xD2511F53u} * c0, b = u64{0xCD9E8D57u} * c2;
    c0 = static_cast<u32>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<u32>(b);
    c2 = static_cast<u32>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<u32>(a);
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
