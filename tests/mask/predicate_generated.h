// Printed by the generator: see predicate_codegen_test.cpp.
#pragma once

// clang-format off
#include "mask/predicate/generated.h"

namespace jali::predicate {

struct Documents {
  static constexpr const char* kName = "predicate";
  static constexpr bool kRowsReadTables = true;
  static constexpr bool kColsReadTables = true;
  using Int = i32;
  Scalar offset;
  Int c0;
  TableOf<i32, 1> t0;
  Interval range0;

  struct Row {
    Int v0;
    Int v7;
  };
  JALI_HD Row row([[maybe_unused]] const Frame& f, i32 i) const {
    [[maybe_unused]] const Int v0 = position(f, offset, i);
    [[maybe_unused]] const Int v7 = static_cast<Int>(t0.at(v0));
    return {v0, v7};
  }

  struct Col {
    Int v1;
    Int v6;
  };
  JALI_HD Col col([[maybe_unused]] const Frame& f, i32 j) const {
    [[maybe_unused]] const Int v1 = j;
    [[maybe_unused]] const Int v6 = static_cast<Int>(t0.at(v1));
    return {v1, v6};
  }

  JALI_HD bool visible([[maybe_unused]] Row r, [[maybe_unused]] Col c) const {
    const bool v2 = c.v1 <= r.v0;
    const Int v4 = sub(r.v0, c.v1);
    const bool v5 = v4 < c0;
    const bool v8 = r.v7 == c.v6;
    const bool v9 = v2 & v5;
    const bool v10 = v9 & v8;
    return v10;
  }

  struct RowBlock {
    Range at;
    Interval v7;
  };
  JALI_HD RowBlock rows([[maybe_unused]] const Frame& f, i32 i0, i32 i1) const {
    const i32 p = position(f, offset, i0);
    RowBlock x = {{p, p + (i1 - i0) - 1}, nothing()};
    for (i32 i = i0; i < i1; ++i) {
      [[maybe_unused]] const Int v0 = position(f, offset, i);
      [[maybe_unused]] const Int v7 = static_cast<Int>(t0.at(v0));
      x.v7 = widen(x.v7, v7);
    }
    return x;
  }
  JALI_HD static RowBlock merge(RowBlock a, RowBlock b) {
    return {jali::merge(a.at, b.at), hull(a.v7, b.v7)};
  }

  struct ColBlock {
    Range at;
    Interval v6;
  };
  JALI_HD ColBlock cols([[maybe_unused]] const Frame& f, i32 j0, i32 j1) const {
    ColBlock x = {{j0, j1 - 1}, nothing()};
    for (i32 j = j0; j < j1; ++j) {
      [[maybe_unused]] const Int v1 = j;
      [[maybe_unused]] const Int v6 = static_cast<Int>(t0.at(v1));
      x.v6 = widen(x.v6, v6);
    }
    return x;
  }
  JALI_HD static ColBlock merge(ColBlock a, ColBlock b) {
    return {jali::merge(a.at, b.at), hull(a.v6, b.v6)};
  }

  JALI_HD Tile classify([[maybe_unused]] const Frame& f, [[maybe_unused]] RowBlock r,
                        [[maybe_unused]] ColBlock c) const {
    const Interval v7 = r.v7;
    const Interval v6 = c.v6;
    const Interval v0 = {r.at.lo, r.at.hi};
    const Interval v1 = {c.at.lo, c.at.hi};
    const Interval v2 = less_equal(v1, v0);
    const Interval v3 = point(c0);
    const Interval v4 = sub(v0, v1);
    const Interval v5 = less(v4, v3);
    const Interval v8 = equal(v7, v6);
    const Interval v9 = both(v2, v5);
    const Interval v10 = both(v9, v8);
    return tile_of(v10.hi == 0, v10.lo == 1);
  }
  JALI_HD Span key_span(const Frame&, RowBlock) const { return everything(); }
  JALI_HD Span row_span(const Frame&, ColBlock) const { return everything(); }
};

struct Neighborhood {
  static constexpr const char* kName = "predicate";
  static constexpr bool kRowsReadTables = false;
  static constexpr bool kColsReadTables = false;
  using Int = i32;
  Scalar offset;
  Int c0;
  Int c1;
  Int c2;
  Int c3;
  Int c4;
  Int c5;
  Int c6;
  Int c7;
  Int c8;
  Int c9;

  struct Row {
    Int v9;
    Int v21;
  };
  JALI_HD Row row([[maybe_unused]] const Frame& f, i32 i) const {
    [[maybe_unused]] const Int v0 = position(f, offset, i);
    [[maybe_unused]] const Int v3 = quotient(v0, c0);
    [[maybe_unused]] const Int v8 = maximum(v3, c2);
    [[maybe_unused]] const Int v9 = minimum(v8, c3);
    [[maybe_unused]] const Int v15 = remainder(v0, c5);
    [[maybe_unused]] const Int v20 = maximum(v15, c7);
    [[maybe_unused]] const Int v21 = minimum(v20, c8);
    return {v9, v21};
  }

  struct Col {
    Int v5;
    Int v17;
  };
  JALI_HD Col col([[maybe_unused]] const Frame& f, i32 j) const {
    [[maybe_unused]] const Int v1 = j;
    [[maybe_unused]] const Int v5 = quotient(v1, c1);
    [[maybe_unused]] const Int v17 = remainder(v1, c6);
    return {v5, v17};
  }

  JALI_HD bool visible([[maybe_unused]] Row r, [[maybe_unused]] Col c) const {
    const Int v10 = sub(r.v9, c.v5);
    const Int v11 = absolute(v10);
    const bool v13 = v11 <= c4;
    const Int v22 = sub(r.v21, c.v17);
    const Int v23 = absolute(v22);
    const bool v25 = v23 <= c9;
    const bool v26 = v13 & v25;
    return v26;
  }
  template <class Keys>
  JALI_HD auto among([[maybe_unused]] Row r, Keys keys) const {
    return keys.each([&](i32 j) { return visible(r, col({}, j)); });
  }
  template <class Rows>
  JALI_HD auto seen_by(const Frame& f, i32 j, Rows rows) const {
    const Col c = col(f, j);
    return rows.each([&](i32 i) { return visible(row(f, i), c); });
  }

  struct RowBlock {
    Range at;
  };
  JALI_HD RowBlock rows([[maybe_unused]] const Frame& f, i32 i0, i32 i1) const {
    const i32 p = position(f, offset, i0);
    RowBlock x = {{p, p + (i1 - i0) - 1}};
    return x;
  }
  JALI_HD static RowBlock merge(RowBlock a, RowBlock b) {
    return {jali::merge(a.at, b.at)};
  }

  struct ColBlock {
    Range at;
  };
  JALI_HD ColBlock cols([[maybe_unused]] const Frame& f, i32 j0, i32 j1) const {
    ColBlock x = {{j0, j1 - 1}};
    return x;
  }
  JALI_HD static ColBlock merge(ColBlock a, ColBlock b) {
    return {jali::merge(a.at, b.at)};
  }

  JALI_HD Tile classify([[maybe_unused]] const Frame& f, [[maybe_unused]] RowBlock r,
                        [[maybe_unused]] ColBlock c) const {
    const Interval v0 = {r.at.lo, r.at.hi};
    const Interval v1 = {c.at.lo, c.at.hi};
    const Interval v2 = point(c0);
    const Interval v3 = quotient(v0, v2);
    const Interval v4 = point(c1);
    const Interval v5 = quotient(v1, v4);
    const Interval v6 = point(c2);
    const Interval v7 = point(c3);
    const Interval v8 = maximum(v3, v6);
    const Interval v9 = minimum(v8, v7);
    const Interval v10 = sub(v9, v5);
    const Interval v11 = absolute(v10);
    const Interval v12 = point(c4);
    const Interval v13 = less_equal(v11, v12);
    const Interval v14 = point(c5);
    const Interval v15 = remainder(v0, v14);
    const Interval v16 = point(c6);
    const Interval v17 = remainder(v1, v16);
    const Interval v18 = point(c7);
    const Interval v19 = point(c8);
    const Interval v20 = maximum(v15, v18);
    const Interval v21 = minimum(v20, v19);
    const Interval v22 = sub(v21, v17);
    const Interval v23 = absolute(v22);
    const Interval v24 = point(c9);
    const Interval v25 = less_equal(v23, v24);
    const Interval v26 = both(v13, v25);
    return tile_of(v26.hi == 0, v26.lo == 1);
  }
  JALI_HD Span key_span(const Frame&, RowBlock) const { return everything(); }
  JALI_HD Span row_span(const Frame&, ColBlock) const { return everything(); }
};

struct Ragged {
  static constexpr const char* kName = "predicate";
  static constexpr bool kRowsReadTables = true;
  static constexpr bool kColsReadTables = true;
  using Int = i64;
  Scalar offset;
  Int c0;
  Int c1;
  Int c2;
  TableOf<i32, 2> t0;
  Interval range0;
  TableOf<u8, 1> t1;
  Interval range1;
  TableOf<i64, 1> t2;
  Interval range2;

  struct Row {
    Int v2;
    Int v7;
  };
  JALI_HD Row row([[maybe_unused]] const Frame& f, i32 i) const {
    [[maybe_unused]] const Int v0 = f.b;
    [[maybe_unused]] const Int v1 = f.h;
    [[maybe_unused]] const Int v2 = position(f, offset, i);
    [[maybe_unused]] const Int v5 = shift_right(v2, c0);
    [[maybe_unused]] const Int v6 = static_cast<Int>(t0.at(v0, v5));
    [[maybe_unused]] const Int v7 = add(v6, v1);
    return {v2, v7};
  }

  struct Col {
    Int v3;
    bool v15;
    bool v18;
  };
  JALI_HD Col col([[maybe_unused]] const Frame& f, i32 j) const {
    [[maybe_unused]] const Int v0 = f.b;
    [[maybe_unused]] const Int v1 = f.h;
    [[maybe_unused]] const Int v3 = j;
    [[maybe_unused]] const Int v10 = v3 & c1;
    [[maybe_unused]] const Int v11 = static_cast<Int>(t2.at(v10));
    [[maybe_unused]] const Int v13 = remainder(v11, c2);
    [[maybe_unused]] const bool v14 = v13 != 0;
    [[maybe_unused]] const bool v15 = !v14;
    [[maybe_unused]] const bool v18 = t1.at(v3) != 0;
    return {v3, v15, v18};
  }

  JALI_HD bool visible([[maybe_unused]] Row r, [[maybe_unused]] Col c) const {
    const bool v8 = r.v7 < c.v3;
    const bool v16 = v8 ^ c.v15;
    const bool v17 = r.v2 == c.v3;
    const bool v19 = v16 & c.v18;
    const bool v20 = v19 | v17;
    return v20;
  }

  struct RowBlock {
    Range at;
    Interval v7;
  };
  JALI_HD RowBlock rows([[maybe_unused]] const Frame& f, i32 i0, i32 i1) const {
    const i32 p = position(f, offset, i0);
    RowBlock x = {{p, p + (i1 - i0) - 1}, nothing()};
    for (i32 i = i0; i < i1; ++i) {
      [[maybe_unused]] const Int v0 = f.b;
      [[maybe_unused]] const Int v1 = f.h;
      [[maybe_unused]] const Int v2 = position(f, offset, i);
      [[maybe_unused]] const Int v5 = shift_right(v2, c0);
      [[maybe_unused]] const Int v6 = static_cast<Int>(t0.at(v0, v5));
      [[maybe_unused]] const Int v7 = add(v6, v1);
      x.v7 = widen(x.v7, v7);
    }
    return x;
  }
  JALI_HD static RowBlock merge(RowBlock a, RowBlock b) {
    return {jali::merge(a.at, b.at), hull(a.v7, b.v7)};
  }

  struct ColBlock {
    Range at;
    Interval v18;
    Interval v15;
  };
  JALI_HD ColBlock cols([[maybe_unused]] const Frame& f, i32 j0, i32 j1) const {
    ColBlock x = {{j0, j1 - 1}, nothing(), nothing()};
    for (i32 j = j0; j < j1; ++j) {
      [[maybe_unused]] const Int v0 = f.b;
      [[maybe_unused]] const Int v1 = f.h;
      [[maybe_unused]] const Int v3 = j;
      [[maybe_unused]] const Int v10 = v3 & c1;
      [[maybe_unused]] const Int v11 = static_cast<Int>(t2.at(v10));
      [[maybe_unused]] const Int v13 = remainder(v11, c2);
      [[maybe_unused]] const bool v14 = v13 != 0;
      [[maybe_unused]] const bool v15 = !v14;
      [[maybe_unused]] const bool v18 = t1.at(v3) != 0;
      x.v18 = widen(x.v18, v18);
      x.v15 = widen(x.v15, v15);
    }
    return x;
  }
  JALI_HD static ColBlock merge(ColBlock a, ColBlock b) {
    return {jali::merge(a.at, b.at), hull(a.v18, b.v18), hull(a.v15, b.v15)};
  }

  JALI_HD Tile classify([[maybe_unused]] const Frame& f, [[maybe_unused]] RowBlock r,
                        [[maybe_unused]] ColBlock c) const {
    const Interval v7 = r.v7;
    const Interval v18 = c.v18;
    const Interval v15 = c.v15;
    const Interval v2 = {r.at.lo, r.at.hi};
    const Interval v3 = {c.at.lo, c.at.hi};
    const Interval v8 = less(v7, v3);
    const Interval v16 = differ(v8, v15);
    const Interval v17 = equal(v2, v3);
    const Interval v19 = both(v16, v18);
    const Interval v20 = either(v19, v17);
    return tile_of(v20.hi == 0, v20.lo == 1);
  }
  JALI_HD Span key_span(const Frame&, RowBlock) const { return everything(); }
  JALI_HD Span row_span(const Frame&, ColBlock) const { return everything(); }
};

struct Scores {
  static constexpr const char* kName = "predicate";
  static constexpr bool kRowsReadTables = true;
  static constexpr bool kColsReadTables = true;
  using Int = i32;
  Scalar offset;
  float c0;
  Int c1;
  Int c2;
  Int c3;
  Int c4;
  float c5;
  TableOf<float, 1> t0;
  FloatInterval range0;

  struct Row {
    float v2;
    float v5;
    float v9;
    Int v20;
  };
  JALI_HD Row row([[maybe_unused]] const Frame& f, i32 i) const {
    [[maybe_unused]] const Int v0 = position(f, offset, i);
    [[maybe_unused]] const float v2 = t0.at(v0);
    [[maybe_unused]] const float v5 = mul(v2, c0);
    [[maybe_unused]] const float v9 = absolute(v2);
    [[maybe_unused]] const Int v19 = v0 & c2;
    [[maybe_unused]] const Int v20 = ~v19;
    return {v2, v5, v9, v20};
  }

  struct Col {
    float v3;
    float v7;
    Int v14;
  };
  JALI_HD Col col([[maybe_unused]] const Frame& f, i32 j) const {
    [[maybe_unused]] const Int v1 = j;
    [[maybe_unused]] const float v3 = t0.at(v1);
    [[maybe_unused]] const float v7 = negate(v3);
    [[maybe_unused]] const Int v14 = negate(v1);
    return {v3, v7, v14};
  }

  JALI_HD bool visible([[maybe_unused]] Row r, [[maybe_unused]] Col c) const {
    const float v6 = add(r.v5, c.v3);
    const float v8 = minimum(v6, c.v7);
    const float v10 = maximum(v8, r.v9);
    const float v11 = sub(v10, r.v2);
    const Int v12 = to_int<Int>(v11);
    const bool v13 = c.v3 < r.v2;
    const Int v15 = v13 ? v12 : c.v14;
    const Int v17 = v15 | c1;
    const Int v21 = v17 ^ r.v20;
    const Int v23 = mul(v21, c3);
    const Int v25 = shift_left(v23, c4);
    const Int v26 = v13;
    const bool v27 = v26 != v25;
    const float v29 = static_cast<float>(v21);
    const bool v30 = v29 <= c5;
    const bool v31 = v27 == v30;
    return v31;
  }

  struct RowBlock {
    Range at;
    FloatInterval v9;
    FloatInterval v5;
    FloatInterval v2;
  };
  JALI_HD RowBlock rows([[maybe_unused]] const Frame& f, i32 i0, i32 i1) const {
    const i32 p = position(f, offset, i0);
    RowBlock x = {{p, p + (i1 - i0) - 1}, no_float(), no_float(), no_float()};
    for (i32 i = i0; i < i1; ++i) {
      [[maybe_unused]] const Int v0 = position(f, offset, i);
      [[maybe_unused]] const float v2 = t0.at(v0);
      [[maybe_unused]] const float v5 = mul(v2, c0);
      [[maybe_unused]] const float v9 = absolute(v2);
      [[maybe_unused]] const Int v19 = v0 & c2;
      [[maybe_unused]] const Int v20 = ~v19;
      x.v9 = widen(x.v9, v9);
      x.v5 = widen(x.v5, v5);
      x.v2 = widen(x.v2, v2);
    }
    return x;
  }
  JALI_HD static RowBlock merge(RowBlock a, RowBlock b) {
    return {jali::merge(a.at, b.at), hull(a.v9, b.v9), hull(a.v5, b.v5), hull(a.v2, b.v2)};
  }

  struct ColBlock {
    Range at;
    FloatInterval v7;
    FloatInterval v3;
  };
  JALI_HD ColBlock cols([[maybe_unused]] const Frame& f, i32 j0, i32 j1) const {
    ColBlock x = {{j0, j1 - 1}, no_float(), no_float()};
    for (i32 j = j0; j < j1; ++j) {
      [[maybe_unused]] const Int v1 = j;
      [[maybe_unused]] const float v3 = t0.at(v1);
      [[maybe_unused]] const float v7 = negate(v3);
      [[maybe_unused]] const Int v14 = negate(v1);
      x.v7 = widen(x.v7, v7);
      x.v3 = widen(x.v3, v3);
    }
    return x;
  }
  JALI_HD static ColBlock merge(ColBlock a, ColBlock b) {
    return {jali::merge(a.at, b.at), hull(a.v7, b.v7), hull(a.v3, b.v3)};
  }

  JALI_HD Tile classify([[maybe_unused]] const Frame& f, [[maybe_unused]] RowBlock r,
                        [[maybe_unused]] ColBlock c) const {
    const FloatInterval v9 = settled(r.v9);
    const FloatInterval v5 = settled(r.v5);
    const FloatInterval v2 = settled(r.v2);
    const FloatInterval v7 = settled(c.v7);
    const FloatInterval v3 = settled(c.v3);
    const Interval v0 = {r.at.lo, r.at.hi};
    const Interval v1 = {c.at.lo, c.at.hi};
    const FloatInterval v6 = add(v5, v3);
    const FloatInterval v8 = minimum(v6, v7);
    const FloatInterval v10 = maximum(v8, v9);
    const FloatInterval v11 = sub(v10, v2);
    const Interval v12 = int_of(v11);
    const Interval v13 = less(v3, v2);
    const Interval v14 = negate(v1);
    const Interval v15 = choose(v13, v12, v14);
    const Interval v16 = point(c1);
    const Interval v17 = bit_or(v15, v16);
    const Interval v18 = point(c2);
    const Interval v19 = bit_and(v0, v18);
    const Interval v20 = bit_not(v19);
    const Interval v21 = bit_xor(v17, v20);
    const Interval v22 = point(c3);
    const Interval v23 = mul(v21, v22);
    const Interval v24 = point(c4);
    const Interval v25 = shift_left(v23, v24);
    const Interval v26 = v13;
    const Interval v27 = differ(v26, v25);
    const FloatInterval v28 = float_point(c5);
    const FloatInterval v29 = float_of(v21);
    const Interval v30 = less_equal(v29, v28);
    const Interval v31 = equal(v27, v30);
    return tile_of(v31.hi == 0, v31.lo == 1);
  }
  JALI_HD Span key_span(const Frame&, RowBlock) const { return everything(); }
  JALI_HD Span row_span(const Frame&, ColBlock) const { return everything(); }
};

}  // namespace jali::predicate
