// The generator against Random123's published answers, and how dropout reads it.
#include "base/philox.h"

#include "check.h"

using namespace jali;

TEST(published_answers_of_philox4x32_7) {
  struct Answer {
    u32 counter[4], key[2], want[4];
  };
  const u32 ones = 0xffffffff;
  const Answer answers[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
      {{ones, ones, ones, ones}, {ones, ones}, {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {0xa4093822, 0x299f31d0},
       {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}}};
  for (const Answer& a : answers) {
    const u64 seed = u64{a.key[1]} << 32 | a.key[0];
    const Philox got = philox4x32_7(seed, a.counter[0], a.counter[1], a.counter[2], a.counter[3]);
    for (int n = 0; n < 4; ++n) CHECK_EQ(got.word[n], a.want[n]);
  }
}

TEST(eight_numbers_of_one_call) {
  const Philox x = {{0x00020001, 0x00040003, 0x00060005, 0x00080007}};
  for (int n = 0; n < 8; ++n) CHECK_EQ(dropout_number(x, n), u32(n + 1));
}

TEST(threshold_and_scale) {
  CHECK_EQ(dropout_threshold(0), 0u);
  CHECK_EQ(dropout_threshold(1), 65536u);
  CHECK_EQ(dropout_threshold(0.5), 32768u);
  CHECK_EQ(dropout_scale(0), 1.0);
  CHECK_EQ(dropout_scale(32768), 2.0);
  CHECK_EQ(dropout_scale(65536), 0.0);
}
