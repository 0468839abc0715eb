// The order of work: every unit once, long ones first, section by section.
#include "cuda/kernel/work_order.h"

#include <algorithm>
#include <set>
#include <vector>

#include "check.h"

using namespace jali;
using cuda::WorkOrder;

namespace {

void check_order(const WorkOrder& order) {
  const i32 count = order.num_first();
  std::set<std::pair<i32, i32>> seen;
  i32 last_section = 0;
  for (i32 n = 0; n < order.total(); ++n) {
    const WorkOrder::Place at = order.place(n);
    CHECK(at.unit >= 0 && at.unit < order.per_head && at.head >= 0 && at.head < order.heads);
    CHECK_EQ(at.section, at.head / order.section);
    CHECK(at.section <= order.reach(n));
    CHECK(seen.insert({at.head, at.unit}).second);
    bool is_first = false;
    for (i32 k = 0; k < count; ++k) is_first |= order.first[1 + k] == at.unit;
    CHECK_EQ(is_first, n < count * order.heads);
    if (is_first) continue;
    const bool by_length = at.head >= order.in_order();
    CHECK_EQ(by_length, n >= count * order.heads + order.in_order() * (order.per_head - count));
    if (by_length) continue;
    CHECK(at.section >= last_section);
    last_section = at.section;
  }
  i32 in_sections = 0;
  for (i32 n = 0; n * order.section < order.heads; ++n) in_sections += order.in_section(n);
  CHECK_EQ(in_sections, order.total());
}

}  // namespace

TEST(every_unit_comes_once_and_long_ones_come_first) {
  for (bool down : {false, true}) {
    for (i32 section : {1, 3, 8}) {
      check_order({7, section, 50, down, nullptr});
      for (const std::vector<i32>& first :
           {std::vector<i32>{0}, {1, 0}, {2, 0, 49}, {3, 4, 5, 9}}) {
        check_order({7, section, 50, down, first.data()});
        std::vector<i32> others;
        for (i32 unit = 49; unit >= 0; --unit) {
          if (std::find(first.begin() + 1, first.end(), unit) == first.end())
            others.push_back(unit);
        }
        for (i32 last : {1, 3, 7}) {
          check_order({7, section, 50, down, nullptr, nullptr, last, true});
          const WorkOrder order{7, section, 50, down, first.data(), others.data(), last};
          check_order(order);
          const i32 begin = order.total() - last * static_cast<i32>(others.size());
          for (i32 n = begin; n < order.total(); ++n) {
            CHECK_EQ(order.place(n).unit, others[(n - begin) / last]);
          }
        }
      }
    }
  }
  const WorkOrder order{2, 1, 4, true, nullptr};
  CHECK_EQ(order.place(0).unit, 3);
  CHECK_EQ(order.place(5).head, 1);
  CHECK_EQ(order.place(5).unit, 2);
}

TEST(units_of_a_head_come_from_the_last_one_on_but_of_the_last_heads_from_the_first) {
  for (i32 last : {0, 1, 3, 7}) {
    const WorkOrder order{7, 2, 50, true, nullptr, nullptr, last, true};
    CHECK_EQ(order.in_order(), 7 - last);
    std::vector<i32> units(7, -1);
    for (i32 n = 0; n < order.total(); ++n) {
      const WorkOrder::Place at = order.place(n);
      i32& before = units[static_cast<std::size_t>(at.head)];
      const bool rises = at.head >= order.in_order();
      CHECK_EQ(at.unit, before < 0 ? (rises ? 0 : 49) : before + (rises ? 1 : -1));
      before = at.unit;
    }
  }
}

TEST(the_last_heads_keep_all_processors_busy) {
  CHECK_EQ(cuda::heads_by_length(32, 64, 132), 3);
  CHECK_EQ(cuda::heads_by_length(16, 256, 132), 2);
  CHECK_EQ(cuda::heads_by_length(16, 8192, 132), 2);
  CHECK_EQ(cuda::heads_by_length(16, 1, 132), 16);
  CHECK_EQ(cuda::heads_by_length(0, 0, 132), 0);
}
