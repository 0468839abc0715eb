#include "base/hd.h"

#include "check.h"

using namespace jali;

TEST(floor_division_is_pythons) {
  for (i32 a = -7; a <= 7; ++a) {
    for (i32 b : {-3, -2, -1, 1, 2, 3}) {
      CHECK_EQ(floor_div(a, b), static_cast<i32>(std::floor(double(a) / b)));
      CHECK_EQ(floor_div(a, b) * b + floor_mod(a, b), a);
      CHECK(floor_mod(a, b) == 0 || (floor_mod(a, b) < 0) == (b < 0));
    }
  }
}

TEST(saturation_keeps_the_sign) {
  CHECK_EQ(saturate(i64{1} << 40), kFar);
  CHECK_EQ(saturate(-(i64{1} << 40)), -kFar);
  CHECK_EQ(saturate(-5), -5);
}

TEST(ceil_division_covers) {
  CHECK_EQ(ceil_div(0, 64), 0);
  CHECK_EQ(ceil_div(1, 64), 1);
  CHECK_EQ(ceil_div(64, 64), 1);
  CHECK_EQ(ceil_div(65, 64), 2);
}
