// The generator against Random123's published answers, and how dropout reads it.
#include "base/philox.h"

#include <bit>
#include <cmath>
#include <vector>

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

TEST(numbers_of_a_call) {
  // Rows 5 and 12 of a block of 64 have factors 1 and 2, keys 16 and 41 of a block of 128 factors 2 and 5; rows from 192
  // on of a call's 1024 have shift 3, keys from 5120 on of its 8192 shift 40.
  const u64 seed = 0x123456789abcdef0;
  const Philox x = philox4x32_7(seed, 4 * 3 + 0, 4 * 2 + 2, 7, 1);
  auto word = [&](u32 key, u32 row) {
    const u32 E = dropout_factor(key), S = dropout_shift(40);
    const u32 F = dropout_factor(row), R = dropout_shift(3);
    return x.word[0] * (E + S) * (F + R) + x.word[1] * (E + S) + x.word[2] * (F + R) + x.word[3] +
           E * (S / 1024) + F * (R / 1024);
  };
  const u32 i = 2048 + 192, j = 3 * 8192 + 5120;
  CHECK_EQ(dropout_number(seed, 1, 7, i + 5, j + 16), word(2, 1) & 0x7fff);
  CHECK_EQ(dropout_number(seed, 1, 7, i + 12, j + 41), word(5, 2) >> 16 & 0x7fff);
  // By keys, as the backward has them, it is the same; also of the upper halves of words.
  const DropoutLine keys = DropoutLine::of_keys(x, j + 16);
  CHECK_EQ(keys.moved(0, dropout_shift(3)).word(dropout_factor(1)), word(2, 1));
  const DropoutLine halves{keys.times * 0x10000, keys.plus * 0x10000};
  CHECK_EQ(halves.moved(0, dropout_shift(3), 0x10000).word(dropout_factor(1)),
           word(2, 1) * 0x10000);
}

TEST(differences_of_constants_have_few_factors_of_2) {
  std::vector<u32> sums;
  for (u32 n = 0; n < 64 * 16; ++n) {
    sums.push_back(dropout_factor(n % 16) + dropout_shift(n / 16));
    for (u32 m = 0; m < n; ++m) {
      const int most = n % 16 == m % 16 ? 4 + std::countr_zero(n / 16 ^ m / 16) : 3;
      CHECK(std::countr_zero(sums[n] - sums[m]) <= most);
    }
  }
}

/// Over many calls: how often a cell is dropped, and two of a call together, against what chance would make of it.
/// far_rows, far_keys: 64 rows, 128 keys from each other, or as near as a call has them.
void check_cells_of_a_call(bool far_rows, bool far_keys) {
  const int cells = 512, calls = 20000;
  for (double p : {0.1, 0.5}) {
    const u32 limit = dropout_threshold(p);
    std::vector<int> alone(cells), both(cells);
    double squares = 0;
    for (int n = 0; n < calls; ++n) {
      std::vector<bool> dropped;
      for (u32 row = 0; row < 16; ++row) {
        for (u32 key = 0; key < 32; ++key) {
          const u32 i = far_rows ? 1024 * n + 64 * row : 1024 * n + row / 2 * 8 + row % 2;
          const u32 j = far_keys ? 128 * key : key / 2 * 8 + key % 2;
          dropped.push_back(dropout_number(5, 0, 0, i, j) < limit);
        }
      }
      int count = 0;
      for (int c = 0; c < cells; ++c) {
        const int other = (c + 1 + n % 5 * 53) % cells;
        alone[c] += dropped[c];
        both[c] += dropped[c] && dropped[other];
        count += dropped[c];
      }
      squares += (count - cells * p) * (count - cells * p);
    }
    auto is_near = [&](double count, double chance) {
      return std::abs(count - calls * chance) < 5 * std::sqrt(calls * chance * (1 - chance));
    };
    for (int c = 0; c < cells; ++c) {
      CHECK(is_near(alone[c], p));
      CHECK(is_near(both[c], p * p));
    }
    // The variance of their number, as of independent ones.
    CHECK(std::abs(squares / calls / (cells * p * (1 - p)) - 1) < 0.05);
  }
}

TEST(cells_of_64_rows_are_independent) { check_cells_of_a_call(false, false); }
TEST(cells_of_rows_64_apart_are_independent) { check_cells_of_a_call(true, false); }
TEST(cells_of_keys_128_apart_are_independent) { check_cells_of_a_call(false, true); }
TEST(cells_far_apart_are_independent) { check_cells_of_a_call(true, true); }

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
