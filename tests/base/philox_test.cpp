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

TEST(sixteen_numbers_of_one_call) {
  const Philox x = {{0xffff0000, 0x81234567, 0x00000000, 0x80ff7fff}};
  // Row 0: halves of the words 0 and 1, without their top bits; row 8: the words are 0x00ffff00 and 0x67812345.
  const int keys[] = {0, 1, 8, 9};
  const u32 want[4][4] = {{0, 0x7fff, 0x4567, 0x0123},
                          {0, 0, 0x7fff, 0x00ff},
                          {0x7f00, 0x00ff, 0x2345, 0x6781},
                          {0, 0, 0x7f7f, 0x7f80}};
  const int rows[] = {0, 1, 8, 9};
  for (int r = 0; r < 4; ++r) {
    for (int c = 0; c < 4; ++c) CHECK_EQ(dropout_number(x, rows[r], keys[c]), want[r][c]);
  }
  // Any two rows, and any two keys, that are equal but for bits 0 and 3 share a call.
  CHECK_EQ(dropout_counter(0), dropout_counter(9));
  CHECK_EQ(dropout_counter(38), 11u);
  CHECK_EQ(dropout_counter(47), 11u);
}

TEST(threshold_rule_and_scale) {
  CHECK_EQ(dropout_threshold(0), 0u);
  CHECK_EQ(dropout_threshold(1), 32768u);
  CHECK_EQ(dropout_threshold(0.5), 16384u);
  CHECK_EQ(dropout_scale(0), 1.0);
  CHECK_EQ(dropout_scale(16384), 2.0);
  CHECK_EQ(dropout_scale(32768), 0.0);
  for (u32 threshold : {0u, 1u, 100u, 16384u, 16385u, 32767u, 32768u}) {
    u32 kept = 0;
    for (u32 number = 0; number < 32768; ++number) kept += DropoutRule(threshold).kept(number);
    CHECK_EQ(kept, 32768 - threshold);
    CHECK(DropoutRule(threshold).limit <= 16384);
  }
}
