// Programs of predicates by hand, and what they mean: an evaluator without vectors, ranges or tiles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "mask/predicate/program.h"

namespace predicate_programs {

using namespace jali;
using namespace jali::predicate;

/// Writes a program; each call returns the number of its instruction.
struct Assembler {
  std::vector<std::int64_t> header, code, scalars;
  std::vector<TensorView> tables;
  std::vector<Type> types;

  int emit(Type type, Op op, std::initializer_list<int> args = {}) {
    code.push_back(static_cast<int>(op));
    code.insert(code.end(), args.begin(), args.end());
    types.push_back(type);
    return static_cast<int>(types.size()) - 1;
  }
  int input(Op op) { return emit(Type::kInt, op); }
  int number(std::int64_t x) {
    scalars.push_back(x);
    return emit(Type::kInt, Op::kConst, {static_cast<int>(Type::kInt)});
  }
  int real(double x) {
    std::int64_t bits;
    std::memcpy(&bits, &x, 8);
    scalars.push_back(bits);
    return emit(Type::kFloat, Op::kConst, {static_cast<int>(Type::kFloat)});
  }
  int binary(Op op, int a, int b) {
    const bool compares = op >= Op::kLt && op <= Op::kNe;
    return emit(compares ? Type::kBool : types[a], op, {a, b});
  }
  int add_table(const TensorView& t) {
    const int code = t.dtype == DType::kBool  ? 0
                     : t.dtype == DType::kI32 ? 1
                     : t.dtype == DType::kI64 ? 2
                                              : 3;
    header.push_back(code);
    header.push_back(t.rank);
    tables.push_back(t);
    return static_cast<int>(tables.size()) - 1;
  }
  int load(int table, std::initializer_list<int> index) {
    const DType dtype = tables[table].dtype;
    code.push_back(static_cast<int>(Op::kLoad));
    code.push_back(table);
    code.insert(code.end(), index.begin(), index.end());
    types.push_back(dtype == DType::kBool  ? Type::kBool
                    : dtype == DType::kF32 ? Type::kFloat
                                           : Type::kInt);
    return static_cast<int>(types.size()) - 1;
  }
  std::vector<std::int64_t> leaf_code() const {
    std::vector<std::int64_t> all = {1, static_cast<std::int64_t>(tables.size())};
    all.insert(all.end(), header.begin(), header.end());
    all.insert(all.end(), code.begin(), code.end());
    return all;
  }
  Mask mask(std::int64_t offset = 0) const {
    const std::vector<std::int64_t> own = leaf_code();
    std::vector<std::int64_t> program = {leaf_kind("predicate"),
                                         static_cast<std::int64_t>(own.size())};
    program.insert(program.end(), own.begin(), own.end());
    std::vector<std::int64_t> numbers = {offset};
    numbers.insert(numbers.end(), scalars.begin(), scalars.end());
    return Mask(program, numbers, tables);
  }
};

/// One value, of whatever type.
struct Number {
  std::int64_t i = 0;
  float f = 0;
};

inline std::int64_t read_int(const TensorView& t, std::int64_t at) {
  if (t.dtype == DType::kBool) return static_cast<const u8*>(t.data)[at] != 0;
  if (t.dtype == DType::kI32) return static_cast<const i32*>(t.data)[at];
  return static_cast<const i64*>(t.data)[at];
}

/// The meaning, cell by cell, in 64 bits: written for clarity and independent of the interpreter.
inline bool evaluate(const Assembler& a, std::int64_t b, std::int64_t h, std::int64_t q,
                     std::int64_t k) {
  const std::vector<std::int64_t> code = a.leaf_code();
  const Program p = parse(code.data(), static_cast<std::int64_t>(code.size()));
  std::vector<Number> v;
  auto wrap = [](__int128 x) { return static_cast<std::int64_t>(x); };
  for (const Step& s : p.steps) {
    Number out;
    const Number x = s.num_args > 0 ? v[s.args[0]] : out, y = s.num_args > 1 ? v[s.args[1]] : out,
                 z = s.num_args > 2 ? v[s.args[2]] : out;
    const Type in = s.num_args ? p.steps[s.args[0]].type : s.type;
    const bool floats = in == Type::kFloat, bools = in == Type::kBool;
    __int128 i = x.i, j = y.i;
    switch (s.op) {
      case Op::kConst: {
        double real;
        std::memcpy(&real, &a.scalars[s.index], 8);
        out = {a.scalars[s.index], static_cast<float>(real)};
        break;
      }
      case Op::kBatch:
        out.i = b;
        break;
      case Op::kHead:
        out.i = h;
        break;
      case Op::kRow:
        out.i = q;
        break;
      case Op::kKey:
        out.i = k;
        break;
      case Op::kLoad: {
        const TensorView& t = a.tables[s.index];
        std::int64_t at = 0;
        for (int d = 0; d < t.rank; ++d) {
          at += std::clamp<std::int64_t>(v[s.args[d]].i, 0, t.shape[d] - 1) * t.stride[d];
        }
        if (t.dtype == DType::kF32) {
          out.f = static_cast<const float*>(t.data)[at];
        } else {
          out.i = read_int(t, at);
        }
        break;
      }
      case Op::kToInt:
        out.i = !floats                         ? x.i
                : std::isnan(x.f)               ? 0
                : x.f >= 9.2233720368547758e18f ? INT64_MAX
                : x.f < -9.2233720368547758e18f ? INT64_MIN
                                                : static_cast<std::int64_t>(x.f);
        break;
      case Op::kToBool:
        out.i = floats ? x.f != 0 : x.i != 0;
        break;
      case Op::kToFloat:
        out.f = static_cast<float>(x.i);
        break;
      case Op::kAdd:
        out = {wrap(i + j), x.f + y.f};
        break;
      case Op::kSub:
        out = {wrap(i - j), x.f - y.f};
        break;
      case Op::kMul:
        out = {wrap(i * j), x.f * y.f};
        break;
      case Op::kFloorDiv:
      case Op::kMod: {
        const __int128 d = j == 0 ? 0 : i / j - (i % j != 0 && (i % j < 0) != (j < 0));
        out.i = wrap(s.op == Op::kFloorDiv ? d : j == 0 ? 0 : i - d * j);
        break;
      }
      case Op::kNeg:
        out = {wrap(-i), -x.f};
        break;
      case Op::kAbs:
        out = {wrap(i < 0 ? -i : i), std::fabs(x.f)};
        break;
      case Op::kMin:
        out.i = std::min(x.i, y.i);
        out.f = std::isnan(x.f) || std::isnan(y.f) ? NAN : std::min(x.f, y.f);
        break;
      case Op::kMax:
        out.i = std::max(x.i, y.i);
        out.f = std::isnan(x.f) || std::isnan(y.f) ? NAN : std::max(x.f, y.f);
        break;
      case Op::kShl:
        out.i = j < 0 || j > 63 ? 0 : wrap(i << static_cast<int>(j));
        break;
      case Op::kShr:
        out.i = x.i >> (j < 0 || j > 63 ? 63 : static_cast<int>(j));
        break;
      case Op::kAnd:
        out.i = x.i & y.i;
        break;
      case Op::kOr:
        out.i = x.i | y.i;
        break;
      case Op::kXor:
        out.i = x.i ^ y.i;
        break;
      case Op::kNot:
        out.i = bools ? !x.i : ~x.i;
        break;
      case Op::kLt:
        out.i = floats ? x.f < y.f : x.i < y.i;
        break;
      case Op::kLe:
        out.i = floats ? x.f <= y.f : x.i <= y.i;
        break;
      case Op::kEq:
        out.i = floats ? x.f == y.f : x.i == y.i;
        break;
      case Op::kNe:
        out.i = floats ? x.f != y.f : x.i != y.i;
        break;
      case Op::kWhere:
        out = x.i ? y : z;
        break;
    }
    v.push_back(out);
  }
  return v.back().i != 0;
}

}  // namespace predicate_programs
