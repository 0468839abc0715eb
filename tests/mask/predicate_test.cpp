// Predicates: interval arithmetic against every value in it, random programs against an evaluator
// that knows no vectors and no tiles, classes and spans of the common masks.
#include <cmath>
#include <random>

#include "check.h"
#include "mask/bound.h"
#include "mask/predicate/interval.h"
#include "predicate_programs.h"

using namespace jali;
using namespace jali::predicate;
using namespace predicate_programs;

namespace {

// ---- Random programs. ----

struct Rng {
  std::mt19937 engine;
  explicit Rng(unsigned seed) : engine(seed) {}
  int in(int lo, int hi) { return std::uniform_int_distribution<int>(lo, hi)(engine); }
  template <class T>
  T pick(const std::vector<T>& list) {
    return list[in(0, static_cast<int>(list.size()) - 1)];
  }
};

struct Tables {
  std::vector<i32> sorted, random;
  std::vector<i64> big;
  std::vector<u8> flags;
  std::vector<float> reals;
  explicit Tables(Rng& rng) {
    for (int n = 0; n < 200; ++n) {
      sorted.push_back(n / 23);
      random.push_back(rng.in(-50, 50));
      big.push_back(rng.pick<i64>({0, 1, -1, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, n}));
      flags.push_back(rng.in(0, 20) > 0);
      reals.push_back(
          rng.pick<float>({0.0f, -0.0f, 1.5f, NAN, INFINITY, -INFINITY, 1e30f, 0.1f * n}));
    }
  }
};

/// A random program with every operation; `wild` ones also overflow and hold NaN.
Assembler random_program(Rng& rng, Tables& t, bool wild) {
  Assembler a;
  std::vector<int> of[3];
  auto keep = [&](int s) { of[static_cast<int>(a.types[s])].push_back(s); };
  for (Op op : {Op::kBatch, Op::kHead, Op::kRow, Op::kKey, Op::kRow, Op::kKey}) keep(a.input(op));
  keep(a.number(rng.in(-9, 150)));
  keep(a.number(wild ? rng.pick<i64>({INT64_MAX, INT32_MAX, 1 << 20}) : rng.in(1, 5)));
  keep(a.real(rng.in(-8, 8) * 0.3));
  std::vector<int> tables = {
      a.add_table(TensorView(t.sorted.data(), DType::kI32, {200})),
      a.add_table(TensorView(t.random.data(), DType::kI32, {10, 20})),
      a.add_table(TensorView(t.flags.data(), DType::kBool, {200})),
      a.add_table(TensorView(t.flags.data(), DType::kBool, {2, 5, 20})),
      a.add_table(TensorView(t.sorted.data(), DType::kI32, {200})),
  };
  if (wild) {
    tables.push_back(a.add_table(TensorView(t.big.data(), DType::kI64, {200})));
    tables.push_back(a.add_table(TensorView(t.reals.data(), DType::kF32, {200})));
  }
  auto ints = [&] { return rng.pick(of[1]); };
  keep(a.load(tables[0], {2}));
  keep(a.load(tables[0], {3}));
  const int length = rng.in(1, 25);
  for (int n = 0; n < length; ++n) {
    const Op op = static_cast<Op>(rng.in(static_cast<int>(Op::kLoad), kNumOps - 1));
    const bool real = rng.in(0, 3) == 0;
    auto number = [&] { return rng.pick(of[real ? 2 : 1]); };
    switch (op) {
      case Op::kLoad: {
        const int table = rng.pick(tables);
        const int rank = a.tables[table].rank;
        keep(rank == 1   ? a.load(table, {ints()})
             : rank == 2 ? a.load(table, {ints(), ints()})
                         : a.load(table, {ints(), ints(), ints()}));
        break;
      }
      case Op::kToInt:
        keep(a.emit(Type::kInt, op, {rng.pick(of[rng.in(1, 2)])}));
        break;
      case Op::kToBool:
        keep(a.emit(Type::kBool, op, {number()}));
        break;
      case Op::kToFloat:
        keep(a.emit(Type::kFloat, op, {ints()}));
        break;
      case Op::kFloorDiv:
      case Op::kMod:
      case Op::kShl:
      case Op::kShr:
        keep(a.emit(Type::kInt, op, {ints(), ints()}));
        break;
      case Op::kNeg:
      case Op::kAbs: {
        const int x = number();
        keep(a.emit(a.types[x], op, {x}));
        break;
      }
      case Op::kAnd:
      case Op::kOr:
      case Op::kXor:
      case Op::kNot: {
        const int type = of[0].empty() ? 1 : rng.in(0, 1);
        const int x = rng.pick(of[type]);
        if (op == Op::kNot) {
          keep(a.emit(a.types[x], op, {x}));
        } else {
          keep(a.binary(op, x, rng.pick(of[type])));
        }
        break;
      }
      case Op::kWhere: {
        if (of[0].empty()) break;
        const int x = number(), c = rng.pick(of[0]);
        keep(a.emit(a.types[x], op, {c, x, number()}));
        break;
      }
      default: {
        const int x = number();
        keep(a.binary(op, x, number()));
      }
    }
  }
  if (of[0].size() > 1) {
    a.binary(rng.pick<Op>({Op::kAnd, Op::kOr, Op::kXor}), of[0].back(), of[0][of[0].size() - 2]);
  } else {
    a.binary(Op::kLe, of[1].back(), of[1][of[1].size() - 2]);
  }
  return a;
}

struct Block {
  alignas(8) char bytes[LeafNode::kMaxBlockBytes];
};

struct Cells {
  int rows, keys;
  std::vector<char> seen;
  bool at(int i, int j) const { return seen[std::size_t(i) * keys + j] != 0; }
  Tile tile(Span r, Span c) const {
    bool any = false, all = true;
    for (int i = r.begin; i < r.end; ++i) {
      for (int j = c.begin; j < c.end; ++j) {
        any |= at(i, j);
        all &= at(i, j);
      }
    }
    return tile_of(!any, all);
  }
};

bool check_fill(const LeafNode& leaf, const Frame& f, const Cells& cells, Span r, Span c) {
  const int words = ceil_div(c.end - c.begin, 64), stride = words + 1;
  std::vector<u64> bits(std::size_t(r.end - r.begin) * stride, 0x5a5a);
  leaf.fill(f, r.begin, r.end, c.begin, c.end, bits.data(), stride);
  for (int i = r.begin; i < r.end; ++i) {
    const u64* row = &bits[std::size_t(i - r.begin) * stride];
    for (int j = c.begin; j < c.begin + 64 * words; ++j) {
      const bool bit = row[(j - c.begin) / 64] >> ((j - c.begin) % 64) & 1;
      if (!CHECK_EQ(bit, j < c.end && cells.at(i, j))) return false;
    }
    if (!CHECK_EQ(row[words], u64{0x5a5a})) return false;
  }
  return true;
}

struct Score {
  long tiles = 0, exact = 0;
};

/// Fill, classes, merged blocks and spans of random ranges.
bool check_leaf(const LeafNode& leaf, const Frame& f, const Cells& cells, Rng& rng, Score& score) {
  if (!check_fill(leaf, f, cells, {0, f.num_rows}, {0, f.num_keys})) return false;
  for (int n = 0; n < 10; ++n) {
    auto range = [&](int length) {
      const int begin = rng.in(0, length - 1);
      return Span{begin, std::min(length, begin + rng.pick<int>({1, 3, 16, 64, 100}))};
    };
    const Span r = range(f.num_rows), c = range(f.num_keys);
    if (!check_fill(leaf, f, cells, r, c)) return false;
    Block rows, cols, more;
    const int mid = rng.in(r.begin, r.end);
    leaf.rows(f, r.begin, mid > r.begin ? mid : r.end, rows.bytes);
    if (mid > r.begin && mid < r.end) {
      leaf.rows(f, mid, r.end, more.bytes);
      leaf.merge_rows(rows.bytes, more.bytes);
    } else {
      leaf.rows(f, r.begin, r.end, rows.bytes);
    }
    leaf.cols(f, c.begin, c.end, cols.bytes);
    const Tile said = leaf.classify(f, rows.bytes, cols.bytes), truth = cells.tile(r, c);
    ++score.tiles;
    score.exact += said == truth;
    if (said != Tile::kPartial && !CHECK_EQ(said, truth)) return false;
    const Span keys = leaf.key_span(f, rows.bytes), back = leaf.row_span(f, cols.bytes);
    for (int i = r.begin; i < r.end; ++i) {
      for (int j = 0; j < f.num_keys; ++j) {
        if (cells.at(i, j) && !CHECK(keys.begin <= j && j < keys.end)) return false;
      }
    }
    for (int i = 0; i < f.num_rows; ++i) {
      for (int j = c.begin; j < c.end; ++j) {
        if (cells.at(i, j) && !CHECK(back.begin <= i && i < back.end)) return false;
      }
    }
  }
  return true;
}

Shape shape_of(int Lq, int Lk) {
  Shape shape;
  shape.B = 2;
  shape.Hq = shape.Hkv = 2;
  shape.Lq = Lq;
  shape.Lk = Lk;
  return shape;
}

Score check_program(const Assembler& a, const Shape& shape, int offset, Rng& rng, bool& ok) {
  Score score;
  const Mask mask = a.mask(offset);
  const BoundMask bound(mask, shape);
  for (int b = 0; b < 2; ++b) {
    for (int h = 0; h < 2; ++h) {
      const Frame f = bound.frame(b, h);
      Cells cells{f.num_rows, f.num_keys, {}};
      for (int i = 0; i < f.num_rows; ++i) {
        for (int j = 0; j < f.num_keys; ++j) {
          cells.seen.push_back(evaluate(a, b, h, i + offset, j));
        }
      }
      ok = ok && check_leaf(*bound.leaves().at(0), f, cells, rng, score);
    }
  }
  return score;
}

void check_random(unsigned first_seed, int count, bool wild) {
  Score all;
  for (int n = 0; n < count; ++n) {
    Rng rng(first_seed + n);
    Tables tables(rng);
    const Assembler a = random_program(rng, tables, wild);
    bool ok = true;
    const Score s =
        check_program(a, shape_of(rng.in(1, 80), rng.in(1, 90)), rng.in(-30, 30), rng, ok);
    all.tiles += s.tiles;
    all.exact += s.exact;
    if (!ok) {
      std::printf("the program of seed %u is wrong\n", first_seed + n);
      return;
    }
  }
  std::printf("%d programs, %ld tiles, %.1f%% of the classes exact\n", count, all.tiles,
              100.0 * all.exact / all.tiles);
}

TEST(random_programs) { check_random(1000, 120, false); }
TEST(random_programs_that_overflow_and_hold_nan) { check_random(5000, 120, true); }

// ---- Intervals. ----

std::vector<Interval> small_intervals() {
  std::vector<Interval> all;
  for (i64 lo = -7; lo <= 7; ++lo) {
    for (i64 hi = lo; hi <= 7; ++hi) all.push_back({lo, hi});
  }
  return all;
}

/// The interval result holds every value; tight: and nothing that the ends do not reach.
template <class OnIntervals, class OnValues>
void check_binary(const char* name, OnIntervals wide, OnValues narrow, bool tight) {
  for (Interval a : small_intervals()) {
    for (Interval b : small_intervals()) {
      const Interval said = wide(a, b);
      Interval truth = {kMaxInt, kMinInt};
      for (i64 x = a.lo; x <= a.hi; ++x) {
        for (i64 y = b.lo; y <= b.hi; ++y) truth = hull(truth, point(narrow(x, y)));
      }
      const bool holds = said.lo <= truth.lo && truth.hi <= said.hi;
      const bool same = said.lo == truth.lo && said.hi == truth.hi;
      if (!CHECK(tight ? same : holds)) {
        std::printf("%s of [%lld, %lld] and [%lld, %lld]: said [%lld, %lld], true [%lld, %lld]\n",
                    name, (long long)a.lo, (long long)a.hi, (long long)b.lo, (long long)b.hi,
                    (long long)said.lo, (long long)said.hi, (long long)truth.lo,
                    (long long)truth.hi);
        return;
      }
    }
  }
}
#define CHECK_BINARY(f, tight)                                       \
  check_binary(                                                      \
      #f, [](Interval a, Interval b) { return predicate::f(a, b); }, \
      [](i64 a, i64 b) { return predicate::f(a, b); }, tight)

TEST(intervals_hold_every_value) {
  CHECK_BINARY(add, true);
  CHECK_BINARY(sub, true);
  CHECK_BINARY(mul, true);
  CHECK_BINARY(minimum, true);
  CHECK_BINARY(maximum, true);
  CHECK_BINARY(quotient, true);
  CHECK_BINARY(remainder, false);
  CHECK_BINARY(shift_left, false);
  CHECK_BINARY(shift_right, false);
  using I = Interval;
  check_binary(
      "and", [](I a, I b) { return bit_and(a, b); }, [](i64 a, i64 b) { return a & b; }, false);
  check_binary(
      "or", [](I a, I b) { return bit_or(a, b); }, [](i64 a, i64 b) { return a | b; }, false);
  check_binary(
      "xor", [](I a, I b) { return bit_xor(a, b); }, [](i64 a, i64 b) { return a ^ b; }, false);
  check_binary("<", [](I a, I b) { return less(a, b); }, [](i64 a, i64 b) { return a < b; }, true);
  check_binary(
      "<=", [](I a, I b) { return less_equal(a, b); }, [](i64 a, i64 b) { return a <= b; }, true);
  check_binary(
      "==", [](I a, I b) { return equal(a, b); }, [](i64 a, i64 b) { return a == b; }, true);
  check_binary(
      "!=", [](I a, I b) { return differ(a, b); }, [](i64 a, i64 b) { return a != b; }, true);
  check_binary("neg", [](I a, I) { return negate(a); }, [](i64 a, i64) { return -a; }, true);
  check_binary(
      "abs", [](I a, I) { return absolute(a); }, [](i64 a, i64) { return std::abs(a); }, true);
  check_binary("not", [](I a, I) { return bit_not(a); }, [](i64 a, i64) { return ~a; }, true);
}

TEST(intervals_that_overflow_are_unbounded) {
  const Interval ends[] = {{kMinInt, kMinInt},
                           {kMaxInt - 1, kMaxInt},
                           {kMinInt, -1},
                           {-1, 0},
                           {i64{1} << 62, i64{1} << 62},
                           {-3, 7},
                           {0, kMaxInt}};
  std::mt19937_64 rng(1);
  for (Interval a : ends) {
    for (Interval b : ends) {
      for (int n = 0; n < 50; ++n) {
        auto draw = [&](Interval x) {
          if (n < 4) return n % 2 ? x.lo : x.hi;
          const u64 width = static_cast<u64>(x.hi) - static_cast<u64>(x.lo) + 1;
          return static_cast<i64>(static_cast<u64>(x.lo) + (width ? rng() % width : rng()));
        };
        const i64 x = draw(a), y = n < 2 ? b.lo : draw(b);
        CHECK(predicate::add(a, b).has(predicate::add(x, y)));
        CHECK(predicate::sub(a, b).has(predicate::sub(x, y)));
        CHECK(predicate::mul(a, b).has(predicate::mul(x, y)));
        CHECK(predicate::quotient(a, b).has(predicate::quotient(x, y)));
        CHECK(predicate::remainder(a, b).has(predicate::remainder(x, y)));
        CHECK(predicate::negate(a).has(predicate::negate(x)));
        CHECK(predicate::absolute(a).has(predicate::absolute(x)));
        CHECK(bit_and(a, b).has(x & y));
        CHECK(bit_or(a, b).has(x | y));
        CHECK(bit_xor(a, b).has(x ^ y));
        for (i64 s : {i64{0}, i64{1}, i64{40}, i64{63}, i64{64}, i64{-1}}) {
          CHECK(predicate::shift_left(a, point(s)).has(predicate::shift_left(x, s)));
          CHECK(predicate::shift_right(a, point(s)).has(predicate::shift_right(x, s)));
          CHECK(predicate::shift_right(a, {-2, 70}).has(predicate::shift_right(x, s)));
        }
      }
    }
  }
}

// Pairs of small sets of floats, with NaN and infinities: every result lies in the range of results.
TEST(float_intervals_hold_every_value) {
  const float all[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1.0f, -2.5f, 3e38f, -3e38f, 0.1f};
  constexpr int kCount = sizeof all / sizeof *all;
  auto holds = [](FloatInterval r, float x) {
    return x != x ? r.nan != 0 : r.lo <= x && x <= r.hi;
  };
  auto range = [&](int x, int y) { return settled(widen(widen(no_float(), all[x]), all[y])); };
  for (int n = 0; n < kCount * kCount * kCount * kCount; ++n) {
    const int x0 = n % kCount, x1 = n / kCount % kCount, y0 = n / kCount / kCount % kCount,
              y1 = n / kCount / kCount / kCount;
    const FloatInterval a = range(x0, x1), b = range(y0, y1);
    bool ok = true;
    for (float x : {all[x0], all[x1]}) {
      for (float y : {all[y0], all[y1]}) {
        ok &= holds(predicate::add(a, b), x + y) && holds(predicate::sub(a, b), x - y);
        ok &= holds(predicate::mul(a, b), x * y);
        ok &= holds(predicate::minimum(a, b), predicate::minimum(x, y));
        ok &= holds(predicate::maximum(a, b), predicate::maximum(x, y));
        ok &= holds(predicate::negate(a), -x) && holds(predicate::absolute(a), std::fabs(x));
        ok &= holds(choose(maybe(), a, b), x) && holds(choose(maybe(), a, b), y);
        ok &= less(a, b).has(x < y) && less_equal(a, b).has(x <= y);
        ok &= equal(a, b).has(x == y) && differ(a, b).has(x != y) && nonzero(a).has(x != 0);
        ok &= int_of(a).has(to_int<i64>(x));
      }
    }
    if (!CHECK(ok)) {
      std::printf("values %g, %g and %g, %g\n", all[x0], all[x1], all[y0], all[y1]);
      return;
    }
  }
}

// ---- Exactness on the masks that people write. ----

/// The share of aligned tiles whose class is exact.
double exactness(const Assembler& a, int length, int tile) {
  const BoundMask bound(a.mask(), shape_of(length, length));
  MaskCursor cursor(bound);
  cursor.set_frame(0, 0);
  Score s;
  for (int i = 0; i < length; i += tile) {
    cursor.set_rows(i, std::min(i + tile, length));
    for (int j = 0; j < length; j += tile) {
      cursor.set_cols(j, std::min(j + tile, length));
      const Tile said = cursor.classify();
      ++s.tiles;
      s.exact += said == cursor.exact_class();
    }
  }
  return static_cast<double>(s.exact) / s.tiles;
}

struct Common {
  Assembler a;
  int q = a.input(Op::kRow), k = a.input(Op::kKey);
  int le(int x, int y) { return a.binary(Op::kLe, x, y); }
  int op(Op o, int x, int y) { return a.binary(o, x, y); }
};

TEST(common_masks_are_exact) {
  {
    Common c;  // causal
    c.le(c.k, c.q);
    CHECK_EQ(exactness(c.a, 700, 64), 1.0);
  }
  {
    Common c;  // |q - k| <= 100
    const int distance = c.a.emit(Type::kInt, Op::kAbs, {c.op(Op::kSub, c.q, c.k)});
    c.le(distance, c.a.number(100));
    CHECK_EQ(exactness(c.a, 700, 32), 1.0);
  }
  for (int n : {1, 48, 64, 100, 1000}) {
    Common c;  // q // n == k // n
    const int a = c.op(Op::kFloorDiv, c.q, c.a.number(n)),
              b = c.op(Op::kFloorDiv, c.k, c.a.number(n));
    c.op(Op::kEq, a, b);
    CHECK_EQ(exactness(c.a, 700, 64), 1.0);
  }
  for (int n : {64, 128, 512}) {
    Common c;  // q % n >= k % n, n a multiple of the tile
    const int a = c.op(Op::kMod, c.q, c.a.number(n)), b = c.op(Op::kMod, c.k, c.a.number(n));
    c.le(b, a);
    CHECK_EQ(exactness(c.a, 1024, 64), 1.0);
  }
  {
    Common c;  // the shared part cancels: q + k <= k + q - 1 is never true
    c.le(c.op(Op::kAdd, c.q, c.k), c.op(Op::kSub, c.op(Op::kAdd, c.k, c.q), c.a.number(1)));
    CHECK_EQ(exactness(c.a, 300, 64), 1.0);
  }
  {
    std::vector<i32> ids(700);
    for (int n = 0; n < 700; ++n) ids[n] = n / 90;
    Common c;  // sorted documents
    const int t = c.a.add_table(TensorView(ids.data(), DType::kI32, {700}));
    c.op(Op::kEq, c.a.load(t, {c.q}), c.a.load(t, {c.k}));
    CHECK_EQ(exactness(c.a, 700, 64), 1.0);
  }
  {
    std::vector<u8> blocks(11 * 11);
    for (int n = 0; n < 121; ++n) blocks[n] = n * 7 % 3 == 0;
    Common c;  // blocks[q // 64, k // 64]
    const int t = c.a.add_table(TensorView(blocks.data(), DType::kBool, {11, 11}));
    const int n = c.a.number(64);
    c.a.load(t, {c.op(Op::kFloorDiv, c.q, n), c.op(Op::kFloorDiv, c.k, n)});
    CHECK_EQ(exactness(c.a, 700, 64), 1.0);
    CHECK_EQ(exactness(c.a, 700, 32), 1.0);
    CHECK_EQ(exactness(c.a, 700, 128), 1.0);
  }
  {
    std::vector<i32> start(700);
    for (int n = 0; n < 700; ++n) start[n] = n / 100 * 100;
    Common c;  // k >= start[q], of rows
    const int t = c.a.add_table(TensorView(start.data(), DType::kI32, {700}));
    c.le(c.a.load(t, {c.q}), c.k);
    CHECK_EQ(exactness(c.a, 700, 64), 1.0);
  }
}

TEST(spans_are_as_narrow_as_a_block) {
  Common c;  // q - 100 <= k <= q, written with a quotient and a difference
  const int low = c.le(c.op(Op::kSub, c.q, c.a.number(100)), c.k);
  const int chunk = c.a.number(64);
  const int high = c.le(c.op(Op::kFloorDiv, c.k, chunk), c.op(Op::kFloorDiv, c.q, c.a.number(64)));
  c.op(Op::kAnd, low, high);
  const BoundMask bound(c.a.mask(), shape_of(1 << 20, 1 << 20));
  MaskCursor cursor(bound);
  cursor.set_frame(0, 0);
  for (int i : {0, 64, 6400, 524288, (1 << 20) - 64}) {
    cursor.set_rows(i, i + 64);
    const Span keys = cursor.key_span();
    CHECK(keys.begin >= i - 100 - 64 && keys.begin <= std::max(0, i - 100));
    CHECK_EQ(keys.end, i + 64);
    cursor.set_cols(i, i + 64);
    const Span rows = cursor.row_span();
    CHECK_EQ(rows.begin, i);
    CHECK(rows.end <= i + 64 + 100 + 64 && rows.end >= std::min(1 << 20, i + 164));
  }
  Common never;
  never.op(Op::kLt, never.a.number(3), never.a.number(2));
  const BoundMask empty(never.a.mask(), shape_of(1000, 1000));
  MaskCursor at(empty);
  at.set_rows(0, 64);
  CHECK_EQ(at.key_span().end, 0);
}

// ---- Division in 32-bit lanes, where vectors take other ways. ----

TEST(division_in_vectors) {
  std::vector<i32> values = {0, 1, -1, 2, -2, 7, -7, 63, 64, 65, -64, 99999, -99999};
  for (i32 x : {INT32_MAX, INT32_MIN + 1, 1 << 30, -(1 << 30)}) {
    for (i32 d : {0, 1, 2, 3}) values.push_back(x > 0 ? x - d : x + d);
  }
  for (i32 n = 1; n < 2000; ++n) values.push_back(n * 1048573);  // all over the range
  const int count = static_cast<int>(values.size());
  for (std::int64_t divisor : {1ll, 2ll, 3ll, 7ll, 64ll, 100ll, 65537ll, 1073741824ll, 1073741827ll,
                               2147483647ll, -1ll, -2ll, -3ll, -100ll, -2147483647ll}) {
    for (Op op : {Op::kFloorDiv, Op::kMod}) {
      Common c;
      const int t = c.a.add_table(TensorView(values.data(), DType::kI32, {count}));
      const int x = c.a.load(t, {c.k}), d = c.a.number(divisor);
      const int result = c.op(op, x, d);
      // 16 bits of the result in 16 rows, low and high half.
      const int bit = c.op(Op::kAnd, c.op(Op::kShr, result, c.q), c.a.number(1));
      c.a.emit(Type::kBool, Op::kToBool, {bit});
      const BoundMask bound(c.a.mask(), shape_of(32, count));
      MaskCursor cursor(bound);
      cursor.set_rows(0, 32);
      cursor.set_cols(0, count);
      const int words = ceil_div(count, 64);
      std::vector<u64> bits(32 * words);
      cursor.fill(bits.data(), words);
      for (int j = 0; j < count; ++j) {
        const __int128 a = values[j], b = divisor;
        const __int128 q = a / b - (a % b != 0 && (a % b < 0) != (b < 0));
        const std::int64_t truth = static_cast<std::int64_t>(op == Op::kMod ? a - q * b : q);
        u32 got = 0;
        for (int i = 0; i < 32; ++i)
          got |= static_cast<u32>(bits[i * words + j / 64] >> (j % 64) & 1) << i;
        if (!CHECK_EQ(static_cast<i32>(got), static_cast<i32>(truth))) return;
      }
    }
  }
}

// ---- Malformed programs, and wrong tables. ----

void bind(std::vector<std::int64_t> own, std::vector<std::int64_t> scalars = {0, 1, 2, 3},
          std::vector<TensorView> tables = {}) {
  own.insert(own.begin(), {leaf_kind("predicate"), static_cast<std::int64_t>(own.size())});
  BoundMask(Mask(own, scalars, tables), shape_of(4, 4));
}

TEST(malformed_programs_are_refused) {
  const int row = static_cast<int>(Op::kRow), key = static_cast<int>(Op::kKey),
            le = static_cast<int>(Op::kLe), konst = static_cast<int>(Op::kConst),
            load = static_cast<int>(Op::kLoad), land = static_cast<int>(Op::kAnd);
  bind({1, 0, row, key, le, 1, 0}, {0});  // this one is good
  CHECK_THROWS(bind({}), Error, "the offset's tag");
  CHECK_THROWS(bind({1, 0}), Error, "last instruction");
  CHECK_THROWS(bind({1, 0, row}), Error, "must give a bool");
  CHECK_THROWS(bind({1, 0, 99}), Error, "an operation at int 2 is 99");
  CHECK_THROWS(bind({1, 0, row, le, 0, 1}), Error, "an operand at int 5 is 1; expected 0 to 0");
  CHECK_THROWS(bind({1, 0, row, le, 0}), Error, "ends where an operand");
  CHECK_THROWS(bind({1, 0, row, key, le, 0, 1, land, 2, 0}), Error, "wrong type");
  CHECK_THROWS(bind({1, 0, konst, 5}), Error, "a literal's type");
  CHECK_THROWS(bind({1, 0, load, 0}), Error, "a table at int 3");
  CHECK_THROWS(bind({1, 0, row, konst, 1, le, 0, 1}, {0}), Error, "no scalar left");
  CHECK_THROWS(bind({1, 1, 0, 1, row, load, 0, 0}, {0}), Error, "no table left");
  std::vector<i32> data(4);
  const TensorView ints(data.data(), DType::kI32, {4}), none(data.data(), DType::kI32, {0});
  CHECK_THROWS(bind({1, 1, 0, 1, row, load, 0, 0}, {0}, {ints}), Error, "expects bool with 1 dims");
  CHECK_THROWS(bind({1, 1, 1, 1, row, load, 0, 0, key, le, 1, 2}, {0}, {none}), Error,
               "no elements to read");
  TensorView far = ints;
  far.device = DeviceType::kCUDA;
  CHECK_THROWS(bind({1, 1, 1, 1, row, load, 0, 0, key, le, 1, 2}, {0}, {far}), Error,
               "is on GPU 0, the call's tensors on the CPU");
}

}  // namespace
