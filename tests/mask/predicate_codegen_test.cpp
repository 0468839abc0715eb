// Generated predicates: tests/mask/predicate_generated.h holds what the generator prints for the
// programs below. It must be current (JALI_UPDATE=1 rewrites it), and must mean what they mean.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>

#include "check.h"
#include "mask/combine.h"
#include "mask/predicate/codegen.h"
#include "predicate_generated.h"
#include "predicate_programs.h"

using namespace jali;
using namespace jali::predicate;
using namespace predicate_programs;

namespace {

std::vector<i32> ids(300), random_ints(40);
std::vector<i64> starts(8);
std::vector<u8> flags(300);
std::vector<float> reals(300);

void fill_tables() {
  std::mt19937 rng(3);
  for (int n = 0; n < 300; ++n) {
    ids[n] = n / 37;
    flags[n] = rng() % 16 > 0;
    reals[n] = static_cast<float>(static_cast<int>(rng() % 200) - 100) / 7;
  }
  reals[17] = NAN;
  reals[90] = INFINITY;
  for (int n = 0; n < 40; ++n) random_ints[n] = static_cast<int>(rng() % 90) - 10;
  for (int n = 0; n < 8; ++n) starts[n] = (i64{1} << 33) * n - 5;
}

TensorView ids_view() { return TensorView(ids.data(), DType::kI32, {300}); }

/// (k <= q) & (q - k < 64) & (t0[q] == t0[k])
Assembler documents() {
  Assembler a;
  const int q = a.input(Op::kRow), k = a.input(Op::kKey);
  const int causal = a.binary(Op::kLe, k, q);
  const int near = a.binary(Op::kLt, a.binary(Op::kSub, q, k), a.number(64));
  const int t = a.add_table(ids_view());
  const int same = a.binary(Op::kEq, a.load(t, {q}), a.load(t, {k}));
  a.binary(Op::kAnd, a.binary(Op::kAnd, causal, near), same);
  return a;
}

/// A 2-D neighbourhood: rows and columns of a grid, centres clamped to it.
Assembler neighborhood() {
  Assembler a;
  const int q = a.input(Op::kRow), k = a.input(Op::kKey);
  int inside[2];
  for (int axis = 0; axis < 2; ++axis) {
    const Op op = axis ? Op::kMod : Op::kFloorDiv;
    const int x = a.binary(op, q, a.number(16)), y = a.binary(op, k, a.number(16));
    const int low = a.number(2), high = a.number(13);
    const int centre = a.binary(Op::kMin, a.binary(Op::kMax, x, low), high);
    const int distance = a.emit(Type::kInt, Op::kAbs, {a.binary(Op::kSub, centre, y)});
    inside[axis] = a.binary(Op::kLe, distance, a.number(2));
  }
  a.binary(Op::kAnd, inside[0], inside[1]);
  return a;
}

/// Per sequence and head, with a 2-D table, 64 bits and a key mask.
Assembler ragged() {
  Assembler a;
  const int b = a.input(Op::kBatch), h = a.input(Op::kHead);
  const int q = a.input(Op::kRow), k = a.input(Op::kKey);
  const int limits = a.add_table(TensorView(random_ints.data(), DType::kI32, {4, 10}));
  const int keep = a.add_table(TensorView(flags.data(), DType::kBool, {300}));
  const int wide = a.add_table(TensorView(starts.data(), DType::kI64, {8}));
  const int limit = a.load(limits, {b, a.binary(Op::kShr, q, a.number(4))});
  const int far = a.binary(Op::kLt, a.binary(Op::kAdd, limit, h), k);
  const int big = a.load(wide, {a.binary(Op::kAnd, k, a.number(7))});
  const int odd = a.emit(Type::kBool, Op::kToBool, {a.binary(Op::kMod, big, a.number(3))});
  const int some = a.binary(Op::kXor, far, a.emit(Type::kBool, Op::kNot, {odd}));
  a.binary(Op::kOr, a.binary(Op::kAnd, some, a.load(keep, {k})), a.binary(Op::kEq, q, k));
  return a;
}

/// Floats, casts, choices, shifts and the bitwise rest.
Assembler scores() {
  Assembler a;
  const int q = a.input(Op::kRow), k = a.input(Op::kKey);
  const int t = a.add_table(TensorView(reals.data(), DType::kF32, {300}));
  const int x = a.load(t, {q}), y = a.load(t, {k});
  const int sum = a.binary(Op::kAdd, a.binary(Op::kMul, x, a.real(0.5)), y);
  const int least = a.binary(Op::kMin, sum, a.emit(Type::kFloat, Op::kNeg, {y}));
  const int most = a.binary(Op::kMax, least, a.emit(Type::kFloat, Op::kAbs, {x}));
  const int cut = a.emit(Type::kInt, Op::kToInt, {a.binary(Op::kSub, most, x)});
  const int above = a.binary(Op::kLt, y, x);
  const int chosen =
      a.emit(Type::kInt, Op::kWhere, {above, cut, a.emit(Type::kInt, Op::kNeg, {k})});
  const int some = a.binary(Op::kOr, chosen, a.number(5));
  const int others = a.emit(Type::kInt, Op::kNot, {a.binary(Op::kAnd, q, a.number(12))});
  const int bits = a.binary(Op::kXor, some, others);
  const int tripled = a.binary(Op::kMul, bits, a.number(3));
  const int shifted = a.binary(Op::kShl, tripled, a.number(2));
  const int positive = a.binary(Op::kNe, a.emit(Type::kInt, Op::kToInt, {above}), shifted);
  const int more = a.binary(Op::kLe, a.emit(Type::kFloat, Op::kToFloat, {bits}), a.real(20.25));
  a.binary(Op::kEq, positive, more);
  return a;
}

Program program_of(const Assembler& a) {
  const std::vector<std::int64_t> code = a.leaf_code();
  return parse(code.data(), static_cast<std::int64_t>(code.size()));
}

std::string all_text() {
  fill_tables();
  return "// Printed by the generator: see predicate_codegen_test.cpp.\n#pragma once\n\n"
         "// clang-format off\n#include \"mask/predicate/generated.h\"\n\n"
         "namespace jali::predicate {\n\n" +
         generate(program_of(documents()), "Documents", false) + "\n" +
         generate(program_of(neighborhood()), "Neighborhood", false) + "\n" +
         generate(program_of(ragged()), "Ragged", true) + "\n" +
         generate(program_of(scores()), "Scores", false) + "\n}  // namespace jali::predicate\n";
}

TEST(generated_text_is_current) {
  const auto path = std::filesystem::path(__FILE__).parent_path() / "predicate_generated.h";
  const std::string text = all_text();
  if (std::getenv("JALI_UPDATE")) std::ofstream(path) << text;
  std::ifstream file(path);
  std::stringstream stored;
  stored << file.rdbuf();
  CHECK(stored.str() == text);
}

TEST(constants_are_no_structure) {
  fill_tables();
  Assembler a = documents(), b = documents();
  b.scalars[0] = 5;
  CHECK_EQ(generate(program_of(a), "X", false), generate(program_of(b), "X", false));
}

template <class T, int kRank>
void bind(TableOf<T, kRank>& table, const TensorView& t) {
  table.data = static_cast<const T*>(t.data);
  for (int d = 0; d < kRank; ++d) {
    table.size[d] = t.shape[d];
    table.stride[d] = t.stride[d];
  }
}

/// Cells, and classes and merged blocks of random ranges.
template <class Leaf>
void check_leaf(const Leaf& leaf, const Assembler& a) {
  std::mt19937 rng(11);
  auto in = [&](int lo, int hi) { return lo + static_cast<int>(rng() % (hi - lo + 1)); };
  long decided = 0;
  for (int n = 0; n < 300; ++n) {
    Frame f;
    f.b = in(0, 3);
    f.h = in(0, 2);
    f.num_rows = 256;
    f.num_keys = 300;
    const int i0 = in(0, 250), i1 = in(i0 + 1, std::min(256, i0 + 1 + in(0, 70)));
    const int j0 = in(0, 290), j1 = in(j0 + 1, std::min(300, j0 + 1 + in(0, 70)));
    const i32 offset = leaf.offset.value;
    bool any = false, all = true;
    for (int i = i0; i < i1; ++i) {
      const typename Leaf::Row row = leaf.row(f, i);
      for (int j = j0; j < j1; ++j) {
        const bool cell = leaf.visible(row, leaf.col(f, j));
        if (!CHECK_EQ(cell, evaluate(a, f.b, f.h, i + offset, j))) return;
        any |= cell;
        all &= cell;
      }
    }
    const int i = in(i0, i1 - 1), j = in(j0, j1 - 1);
    auto check_bits = [](u64 seen, int n, auto cell) {
      for (int x = 0; x < n; ++x) {
        if (!CHECK_EQ(seen >> x & 1, u64{cell(x)})) return false;
      }
      return true;
    };
    if constexpr (IsLight<Leaf>) {
      const Run keys{j0, std::min(j1 - j0, 64)};
      auto cell = [&](int x) { return evaluate(a, f.b, f.h, i + offset, j0 + x); };
      if (!check_bits(leaf.among(leaf.row(f, i), keys), keys.n, cell)) return;
    }
    if constexpr (IsLightByKey<Leaf>) {
      const Run rows{i0, std::min(i1 - i0, 64)};
      auto cell = [&](int x) { return evaluate(a, f.b, f.h, i0 + x + offset, j); };
      if (!check_bits(leaf.seen_by(f, j, rows), rows.n, cell)) return;
    }
    typename Leaf::RowBlock rows = leaf.rows(f, i, i1);
    if (i > i0) rows = Leaf::merge(leaf.rows(f, i0, i), rows);
    typename Leaf::ColBlock cols = leaf.cols(f, j, j1);
    if (j > j0) cols = Leaf::merge(cols, leaf.cols(f, j0, j));
    const Tile said = leaf.classify(f, rows, cols);
    decided += said != Tile::kPartial;
    if (said != Tile::kPartial && !CHECK_EQ(said, tile_of(!any, all))) return;
  }
  CHECK(decided > 0);
}

TEST(generated_documents) {
  fill_tables();
  Documents leaf;
  leaf.offset = {};
  leaf.offset.given = 1;
  leaf.offset.value = 9;
  leaf.c0 = 64;
  bind(leaf.t0, ids_view());
  leaf.range0 = {0, 8};
  check_leaf(leaf, documents());
}

TEST(generated_neighborhood) {
  Neighborhood leaf = {};
  leaf.offset.given = 1;
  const Assembler a = neighborhood();
  Neighborhood::Int* const members[] = {&leaf.c0, &leaf.c1, &leaf.c2, &leaf.c3, &leaf.c4,
                                        &leaf.c5, &leaf.c6, &leaf.c7, &leaf.c8, &leaf.c9};
  for (int n = 0; n < 10; ++n) *members[n] = static_cast<i32>(a.scalars[n]);
  check_leaf(leaf, a);
}

TEST(generated_ragged) {
  fill_tables();
  Ragged leaf = {};
  leaf.offset.given = 1;
  leaf.offset.value = -20;
  const Assembler a = ragged();
  leaf.c0 = a.scalars[0];
  leaf.c1 = a.scalars[1];
  leaf.c2 = a.scalars[2];
  bind(leaf.t0, a.tables[0]);
  bind(leaf.t1, a.tables[1]);
  bind(leaf.t2, a.tables[2]);
  leaf.range0 = {-10, 79};
  leaf.range1 = {0, 1};
  leaf.range2 = {-5, (i64{1} << 33) * 7};
  check_leaf(leaf, a);
}

TEST(generated_scores) {
  fill_tables();
  Scores leaf = {};
  leaf.offset.given = 1;
  const Assembler a = scores();
  leaf.c0 = 0.5f;
  leaf.c5 = 20.25f;
  leaf.c1 = static_cast<i32>(a.scalars[1]);
  leaf.c2 = static_cast<i32>(a.scalars[2]);
  leaf.c3 = static_cast<i32>(a.scalars[3]);
  leaf.c4 = static_cast<i32>(a.scalars[4]);
  bind(leaf.t0, a.tables[0]);
  leaf.range0 = any_float();
  check_leaf(leaf, a);
}

}  // namespace
