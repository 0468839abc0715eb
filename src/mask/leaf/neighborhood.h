// Neighborhood: tokens of a 1-, 2- or 3-D grid see the tokens around them (NATTEN's meaning).
#pragma once

#include "mask/leaf.h"

namespace jali::leaf {

/// Rows and keys are the points of a grid, the last dim running fastest. Key j is visible to row i
/// when in every dim their coordinates are congruent mod dilation and, counted in steps of the
/// dilation, the key is among the `kernel` nearest of the row's: the window is centred (an even
/// kernel has one more before than after) and shifted back inside at the edges, so that every row
/// sees `kernel` keys; in a causal dim it is the row and the kernel - 1 before it. Rows and keys
/// beyond the grid see and are seen by none. Fewer than 3 dims: the leading ones are 1.
struct Neighborhood {
  static constexpr const char* kName = "neighborhood";
  static constexpr bool kRowsReadTables = false, kColsReadTables = false, kMapped = true;
  static constexpr i32 kDims = 3;
  Scalar shape[kDims], kernel[kDims], dilation[kDims], causal[kDims];

  template <class V>
  void fields(V&& v) {
    v("shape0", shape[0], "", "points of the grid, slowest dim; 1 if the grid has fewer dims");
    v("shape1", shape[1], "", "points of the grid, middle dim; 1 for a 1-D grid");
    v("shape2", shape[2], "", "points of the grid, fastest dim");
    v("kernel0", kernel[0], "", "points that a row sees along dim 0, in its own dilation group");
    v("kernel1", kernel[1], "", "the same along dim 1");
    v("kernel2", kernel[2], "", "the same along dim 2");
    v("dilation0", dilation[0], "", "distance between neighbours along dim 0, at least 1");
    v("dilation1", dilation[1], "", "the same along dim 1");
    v("dilation2", dilation[2], "", "the same along dim 2");
    v("causal0", causal[0], "", "1: along dim 0 only points at or before the row's; else 0");
    v("causal1", causal[1], "", "the same along dim 1");
    v("causal2", causal[2], "", "the same along dim 2");
  }
  JALI_HD const char* valid(i32, i32) const {
    i64 points = 1;
    for (i32 d = 0; d < kDims; ++d) {
      if (shape[d].value < 1 || kernel[d].value < 1 || dilation[d].value < 1)
        return "shape, kernel and dilation must be at least 1 in every dim";
      if (i64(kernel[d].value) * dilation[d].value > shape[d].value)
        return "kernel * dilation must not exceed the grid's shape in any dim";
      if (causal[d].value != 0 && causal[d].value != 1) return "causal must be 0 or 1 in every dim";
      points *= shape[d].value;
      if (points > kMaxLength) return "the grid has more points than the longest sequence (2^30)";
    }
    return nullptr;
  }

  JALI_HD i32 num_points() const { return shape[0].value * shape[1].value * shape[2].value; }
  JALI_HD i32 coordinate(i32 i, i32 d) const {
    if (d == 2) return i % shape[2].value;
    i /= shape[2].value;
    return d == 1 ? i % shape[1].value : i / shape[1].value;
  }
  /// Keys before and after a row in an unshifted window along dim d, in points of the grid.
  JALI_HD i32 before(i32 d) const {
    i32 n = causal[d].value ? kernel[d].value - 1 : kernel[d].value / 2;
    return n * dilation[d].value;
  }
  JALI_HD i32 after(i32 d) const {
    return causal[d].value ? 0 : (kernel[d].value - 1 - kernel[d].value / 2) * dilation[d].value;
  }
  /// First and last point (inclusive) of the window of point x along dim d. `first` and `last` are
  /// the end points of x's dilation group.
  JALI_HD Range window(i32 x, i32 d, i32 first, i32 last) const {
    if (causal[d].value) return {max_of(x - before(d), first), x};
    i32 reach = (kernel[d].value - 1) * dilation[d].value;
    i32 lo = max_of(min_of(x - before(d), last - reach), first);
    return {lo, lo + reach};
  }

  /// Visible: in every dim the key's coordinate is at most `size` past `lo`, and in the same group.
  struct Row {
    i32 lo[kDims];
    u32 size[kDims];
    i32 group;
  };
  struct Col {
    i32 x[kDims];
    i32 group;
  };
  JALI_HD Row row(const Frame&, i32 i) const {
    Row r{};
    for (i32 d = 0; d < kDims; ++d) {
      i32 x = coordinate(i, d), step = dilation[d].value, rest = x % step;
      Range w = window(x, d, rest, rest + (shape[d].value - 1 - rest) / step * step);
      r.lo[d] = w.lo;
      r.size[d] = static_cast<u32>(w.hi - w.lo);
      r.group = r.group * step + rest;
    }
    if (i >= num_points()) r.group = -1;
    return r;
  }
  JALI_HD Col col(const Frame&, i32 j) const {
    Col c{};
    for (i32 d = 0; d < kDims; ++d) {
      c.x[d] = coordinate(j, d);
      c.group = c.group * dilation[d].value + c.x[d] % dilation[d].value;
    }
    if (j >= num_points()) c.group = -2;
    return c;
  }
  JALI_HD bool visible(Row r, Col c) const {
    return (r.group == c.group) & (static_cast<u32>(c.x[0] - r.lo[0]) <= r.size[0]) &
           (static_cast<u32>(c.x[1] - r.lo[1]) <= r.size[1]) &
           (static_cast<u32>(c.x[2] - r.lo[2]) <= r.size[2]);
  }
  JALI_HD bool dilated() const {
    return dilation[0].value > 1 || dilation[1].value > 1 || dilation[2].value > 1;
  }
  /// Without dilation: line by line of the grid.
  template <class Keys>
  JALI_HD auto among(const Row& r, Keys keys) const {
    if (dilated()) return keys.each([&](i32 j) { return visible(r, col({}, j)); });
    auto bits = keys.between(0, -1) | keys.between(0, -1);  // none; no run (leaf.h)
    if (r.group < 0) return bits;
    i32 line = keys.first / shape[2].value;
    i32 first = line * shape[2].value, x0 = line / shape[1].value, x1 = line % shape[1].value;
    for (; first <= keys.last(); first += shape[2].value) {
      if ((static_cast<u32>(x0 - r.lo[0]) <= r.size[0]) &
          (static_cast<u32>(x1 - r.lo[1]) <= r.size[1])) {
        const i32 begin = first + r.lo[2];
        bits |= keys.between(begin, begin + static_cast<i32>(r.size[2]));
      }
      if (++x1 == shape[1].value) {
        x1 = 0;
        ++x0;
      }
    }
    return bits;
  }
  JALI_HD u64 word(Row r, i32 j, i32 n) const { return among(r, Run{j, n}); }

  using RowBlock = Range;  // points, before any check against the grid
  using ColBlock = Range;
  JALI_HD RowBlock rows(const Frame&, i32 i0, i32 i1) const { return {i0, i1 - 1}; }
  JALI_HD ColBlock cols(const Frame&, i32 j0, i32 j1) const { return {j0, j1 - 1}; }

  /// Smallest box of the grid that holds a run of points; its end is cut off at the grid's.
  struct Box {
    Range x[kDims];
  };
  JALI_HD Box box(Range points) const {
    i32 hi = min_of(points.hi, num_points() - 1);
    Box out;
    bool one = true;  // so far both ends have the same coordinates
    for (i32 d = 0; d < kDims; ++d) {
      Range ends{coordinate(points.lo, d), coordinate(hi, d)};
      out.x[d] = one ? ends : Range{0, shape[d].value - 1};
      one = one && ends.lo == ends.hi;
    }
    return out;
  }
  /// What the rows of [x.lo, x.hi] see along dim d at most. The end points of the dilation groups
  /// lie anywhere in the first and in the last `dilation` points.
  JALI_HD Range reach(Range x, i32 d) const {
    if (causal[d].value) return {max_of(x.lo - before(d), 0), x.hi};
    i32 n = shape[d].value, slack = dilation[d].value - 1;
    i32 size = (kernel[d].value - 1) * dilation[d].value;
    i32 lo = max_of(min_of(x.lo - before(d), n - 1 - slack - size), 0);
    i32 hi = max_of(min_of(x.hi - before(d), n - 1 - size), slack) + size;
    return {lo, min_of(hi, n - 1)};
  }
  JALI_HD Span span(const Box& b) const {
    i32 lo = 0, hi = 0;
    for (i32 d = 0; d < kDims; ++d) {
      if (b.x[d].hi < b.x[d].lo) return {0, 0};
      lo = lo * shape[d].value + b.x[d].lo;
      hi = hi * shape[d].value + b.x[d].hi;
    }
    return {lo, hi + 1};
  }
  JALI_HD Tile classify(const Frame&, RowBlock r, ColBlock c) const {
    if (max_of(r.lo, c.lo) >= num_points()) return Tile::kEmpty;
    Box rows = box(r), cols = box(c);
    bool empty = false, full = max_of(r.hi, c.hi) < num_points();
    for (i32 d = 0; d < kDims; ++d) {
      Range x = rows.x[d], y = cols.x[d], seen = reach(x, d);
      i32 n = shape[d].value, step = dilation[d].value;
      // Distances between the two ranges: is a multiple of the dilation among them?
      i32 near = x.lo - y.hi, far = x.hi - y.lo;
      empty |= y.hi < seen.lo || y.lo > seen.hi || far - floor_mod(far, step) < near;
      // All see all: the last row's first key and the first row's last key bound it.
      i32 lo = window(x.hi, d, 0, n - 1).lo, hi = window(x.lo, d, 0, n - 1).hi;
      full = full && step == 1 && lo <= y.lo && y.hi <= hi;
    }
    return tile_of(empty, full);
  }
  JALI_HD Span key_span(const Frame&, RowBlock r) const {
    if (r.lo >= num_points()) return {0, 0};
    Box b = box(r);
    for (i32 d = 0; d < kDims; ++d) b.x[d] = reach(b.x[d], d);
    return span(b);
  }
  /// The transpose: at an edge the window does not move, so all rows before it see the same keys.
  JALI_HD Span row_span(const Frame&, ColBlock c) const {
    if (c.lo >= num_points()) return {0, 0};
    Box b = box(c);
    for (i32 d = 0; d < kDims; ++d) {
      i32 n = shape[d].value, wide = kernel[d].value * dilation[d].value;
      Range y = b.x[d];
      b.x[d] = {max_of(y.lo - after(d), 0), min_of(y.hi + before(d), n - 1)};
      if (causal[d].value) continue;
      if (y.lo < wide) b.x[d].lo = 0;
      if (y.hi >= n - wide) b.x[d].hi = n - 1;
    }
    return span(b);
  }
};

}  // namespace jali::leaf
