// Division by multiplication is division.
#include "base/divisor.h"

#include <vector>

#include "check.h"

using namespace jali;

namespace {

constexpr i32 kLargest = 0x7fffffff;

void check_divisor(i32 value) {
  const Divisor divisor(value);
  CHECK_EQ(static_cast<i32>(divisor), value);
  std::vector<i64> numbers{0, 1, 2, kLargest - 1, kLargest};
  // Quotients change at multiples.
  for (i64 quotient : {i64{1}, i64{2}, i64{3}, i64{1000}, i64{kLargest / value}}) {
    for (i64 n : {quotient * value - 1, quotient * value, quotient * value + 1})
      numbers.push_back(n);
  }
  for (i32 bit = 1; bit < 31; ++bit) numbers.push_back((i64{1} << bit) - 1);
  for (i64 number : numbers) {
    if (number > kLargest) continue;
    const i32 n = static_cast<i32>(number);
    CHECK_EQ(n / divisor, n / value);
    CHECK_EQ(n % divisor, n % value);
  }
}

}  // namespace

TEST(a_divisor_divides_all_numbers_below_two_to_the_31st) {
  for (i32 value = 1; value <= 3000; ++value) check_divisor(value);
  for (i32 bit = 12; bit < 31; ++bit) {
    for (i32 more : {-1, 0, 1, 3}) check_divisor((1 << bit) + more);
  }
  check_divisor(kLargest - 1);
  check_divisor(kLargest);
}

TEST(what_there_is_none_of_can_be_counted_but_not_divided_by) {
  CHECK_EQ(static_cast<i32>(Divisor(0)), 0);
  CHECK_EQ(static_cast<i32>(Divisor()), 1);
}
