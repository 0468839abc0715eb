// Dilated: a row sees every step-th key, counted from its own position.
#pragma once

#include "mask/leaf.h"

namespace jali::leaf {

/// Key j is visible to the row at position p = i + offset when (p - j) mod step == 0.
struct Dilated {
  static constexpr const char* kName = "dilated";
  static constexpr bool kRowsReadTables = false, kColsReadTables = false;
  Scalar step, offset;

  template <class V>
  void fields(V&& v) {
    v("step", step, "", "distance between visible keys, at least 1");
    v("offset", offset, "B?", "position of row 0, int or [B]; absent: the call's q_offset");
  }
  JALI_HD const char* valid(i32, i32) const {
    return step.value >= 1 ? nullptr : "step must be at least 1";
  }

  struct Row {
    i32 rest;
  };
  struct Col {
    i32 rest;
  };
  JALI_HD Row row(const Frame& f, i32 i) const {
    return {floor_mod(position(f, offset, i), step.value)};
  }
  JALI_HD Col col(const Frame&, i32 j) const { return {j % step.value}; }
  JALI_HD bool visible(Row r, Col c) const { return r.rest == c.rest; }
  JALI_HD u64 word(Row r, i32 j, i32 n) const {
    u64 bits = 0;
    for (i32 c = floor_mod(r.rest - j % step.value, step.value); c < n; c += step.value) {
      bits |= u64{1} << c;
      if (step.value >= n) break;  // and c + step may be too large a number
    }
    return bits;
  }

  using RowBlock = Range;  // positions
  using ColBlock = Range;  // keys
  JALI_HD RowBlock rows(const Frame& f, i32 i0, i32 i1) const {
    i32 p = position(f, offset, i0);
    return {p, p + (i1 - i0) - 1};
  }
  JALI_HD ColBlock cols(const Frame&, i32 j0, i32 j1) const { return {j0, j1 - 1}; }
  /// The tile holds every distance from lo to hi: is a multiple of the step among them, is all?
  JALI_HD Tile classify(const Frame&, RowBlock r, ColBlock c) const {
    i64 lo = i64(r.lo) - c.hi, hi = i64(r.hi) - c.lo;
    bool some = hi - floor_mod<i64>(hi, step.value) >= lo;
    return tile_of(!some, step.value == 1 || lo == hi);
  }
  JALI_HD Span key_span(const Frame&, RowBlock) const { return everything(); }
  JALI_HD Span row_span(const Frame&, ColBlock) const { return everything(); }
};

}  // namespace jali::leaf
