// The order in which persistent blocks take the work of a call, from a counter.
#pragma once

#include "base/hd.h"

namespace jali::cuda {

/// `per_head` units (row tiles, or key tiles) of each of `heads` heads: section by section, `section`
/// heads each, whose data stay in the L2 cache together; there unit by unit. Units that take much
/// longer than others come before that, those of all heads, or some would begin when the rest is done;
/// which ones the device alone knows: with `first`, only total() and in_section() are for the host.
struct WorkOrder {
  i32 heads, section, per_head;
  bool down = false;           // a head's units from the last one to the first
  const i32* first = nullptr;  // units that come first: how many, then which, ascending; or null

  struct Place {
    i32 section, head, unit;
  };
  JALI_HD i32 total() const { return heads * per_head; }
  JALI_HD i32 in_section(i32 n) const { return min_of(section, heads - n * section) * per_head; }
  JALI_HD i32 num_first() const { return first ? first[0] : 0; }
  /// The section of a unit where none come first.
  JALI_HD i32 section_of(i32 n) const { return n / (section * per_head); }
  /// The last section that the units up to n belong to.
  JALI_HD i32 reach(i32 n) const { return num_first() > 0 ? (heads - 1) / section : section_of(n); }
  JALI_HD Place place(i32 n) const {
    const i32 count = num_first(), left = per_head - count;
    if (count > 0 && n < count * heads)
      return {n % heads / section, n % heads, first[1 + n / heads]};
    n -= count * heads;
    const i32 at = n / (section * left), rest = n - at * section * left;
    const i32 among = min_of(section, heads - at * section);
    i32 unit = rest / among;
    if (down) unit = left - 1 - unit;
#pragma unroll 1
    for (i32 k = 0; k < count; ++k) unit += first[1 + k] <= unit;
    return {at, at * section + rest % among, unit};
  }
};

}  // namespace jali::cuda
