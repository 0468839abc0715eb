// The order in which persistent blocks take the work of a call, from a counter.
#pragma once

#include "base/hd.h"

namespace jali::cuda {

/// `per_head` units (row tiles, or key tiles) of each of `heads` heads: section by section, `section`
/// heads each, whose data stay in the L2 cache together; there unit by unit.
struct WorkOrder {
  i32 heads, section, per_head;

  struct Place {
    i32 section, head, unit;
  };
  JALI_HD i32 total() const { return heads * per_head; }
  JALI_HD i32 in_section(i32 n) const { return min_of(section, heads - n * section) * per_head; }
  JALI_HD i32 section_of(i32 n) const { return n / (section * per_head); }
  JALI_HD Place place(i32 n) const {
    const i32 at = section_of(n), rest = n - at * section * per_head;
    const i32 among = min_of(section, heads - at * section);
    return {at, at * section + rest % among, rest / among};
  }
};

}  // namespace jali::cuda
