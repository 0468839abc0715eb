// The order in which persistent blocks take the work of a call, from a counter.
#pragma once

#include "base/hd.h"

namespace jali::cuda {

/// `per_head` units (row tiles, or key tiles) of each of `heads` heads: section by section, `section`
/// heads each, whose data stay in the L2 cache together; there unit by unit. What takes long must not
/// begin when the rest is done: units that take much longer than others come before that, those of all
/// heads, and of the last few heads together all units come by length. Which ones these are the device
/// alone knows: with `first` or `by_length`, only total() and in_section() are for the host.
struct WorkOrder {
  i32 heads, section, per_head;
  bool down = false;           // units in order (not by length): from the last one to the first
  const i32* first = nullptr;  // units that come first: how many, then which, ascending; or null
  const i32* by_length = nullptr;  // the others, roughly the longest one first; or null
  i32 last = 0;                    // heads whose units come by length
  bool falling = false;  // without `by_length`: they do so in order, from the first one on

  struct Place {
    i32 section, head, unit;
  };
  JALI_HD i32 total() const { return heads * per_head; }
  JALI_HD i32 in_section(i32 n) const { return min_of(section, heads - n * section) * per_head; }
  /// Units of the sections before n, which may be any number from `heads` on for all.
  JALI_HD i32 before(i32 n) const {
    return n >= heads ? total() : min_of(n * section, heads) * per_head;
  }
  JALI_HD i32 num_first() const { return first ? first[0] : 0; }
  /// The section of a unit where none come first.
  JALI_HD i32 section_of(i32 n) const { return n / (section * per_head); }
  /// The last section that the units up to n belong to.
  JALI_HD i32 reach(i32 n) const {
    const bool any = num_first() > 0 || n >= in_order() * per_head;
    return section_of(any ? total() - 1 : n);  // PERF: one quotient to make, and to keep
  }
  JALI_HD i32 at_length(i32 n) const {
#if defined(__CUDACC_RTC__)
    i32 unit;  // PERF: with a load in C++ ptxas runs out of registers, far from here
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(unit) : "l"(by_length + n));
    return unit;
#else
    return by_length[n];
#endif
  }
  /// Heads whose units do not come by length.
  JALI_HD i32 in_order() const { return by_length || falling ? heads - last : heads; }
  JALI_HD Place place(i32 n) const {
    const i32 count = num_first(), left = per_head - count;
    if (count > 0 && n < count * heads)
      return {n % heads / section, n % heads, first[1 + n / heads]};
    n -= count * heads;
    if (n >= in_order() * left) {
      n -= in_order() * left;
      const i32 head = in_order() + n % last, unit = n / last;
      return {head / section, head, by_length ? at_length(unit) : unit};
    }
    const i32 at = n / (section * left), rest = n - at * section * left;
    const i32 among = min_of(section, in_order() - at * section);
    i32 unit = rest / among;
    if (down) unit = left - 1 - unit;
#pragma unroll 1
    for (i32 k = 0; k < count; ++k) unit += first[1 + k] <= unit;
    return {at, at * section + rest % among, unit};
  }
};

/// WorkOrder::last: so many heads that their units keep all processors busy for a while, two at
/// least; not more, which would share less of what they load. PERF: backward of 12 causal documents,
/// 16 heads of 32K: 4230, 4208, 4087, 4096 us for 0, 1, 2, 3 heads; 32 heads of 8K: 626, 623, 625,
/// 632, 643 for 0, 2, 3, 5, 7.
JALI_HD constexpr i32 heads_by_length(i32 heads, i32 per_head, i32 num_sms) {
  return min_of(max_of(ceil_div(num_sms, max_of(per_head, 1)), 2), heads);
}

}  // namespace jali::cuda
