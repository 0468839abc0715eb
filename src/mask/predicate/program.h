// A predicate's program: what a traced Python function computes, as instructions in order.
//
// The ints behind the leaf's kind are
//   0 absent, 1 scalar, 2 table          the row offset, like a field of any leaf
//   number of captured tables, and for each: dtype (0 bool, 1 int32, 2 int64, 3 float32), rank
//   per instruction: its Op, then
//     kConst: its Type (the value is the next scalar; a float's is the bits of a double)
//     kLoad:  the table, then one index per dim
//     else    its operands
// Operands are the numbers of earlier instructions; the last instruction, a bool, is the result.
// Operand types agree (the tracer inserts casts). All of it is structure; no value is in it.
#pragma once

#include <jali/jali.h>

#include <vector>

#include "base/hd.h"

namespace jali::predicate {

enum class Op : u8 {
  kConst,
  kBatch,
  kHead,
  kRow,
  kKey,
  kLoad,
  kToInt,
  kToBool,
  kToFloat,
  kAdd,
  kSub,
  kMul,
  kFloorDiv,
  kMod,
  kNeg,
  kAbs,
  kMin,
  kMax,
  kShl,
  kShr,
  kAnd,
  kOr,
  kXor,
  kNot,
  kLt,
  kLe,
  kEq,
  kNe,
  kWhere,
};  // python/jali/_trace.py has the same order
constexpr int kNumOps = static_cast<int>(Op::kWhere) + 1;

enum class Type : u8 { kBool, kInt, kFloat };

/// What a value changes with: nothing inside a (sequence, head), the row, the key, or both.
enum class Stage : u8 { kFrame = 0, kRow = 1, kKey = 2, kCell = 3 };

constexpr int kMaxRank = TensorView::kMaxRank;

struct Step {
  Op op;
  Type type;
  Stage stage;
  u8 num_args = 0;
  i32 index = 0;  // kConst: which scalar; kLoad: which table
  i32 args[kMaxRank] = {};
};

struct TableType {
  DType dtype;
  i32 rank;
};

struct Program {
  enum class Offset : u8 { kAbsent, kScalar, kTable } offset = Offset::kAbsent;
  std::vector<TableType> tables;
  std::vector<Step> steps;
  i32 num_consts = 0;

  bool uses(Op op) const;
};

/// Checks and decodes; throws Error on anything malformed.
Program parse(const std::int64_t* code, std::int64_t size);

/// The same program with equal steps computed once and unneeded ones dropped. `same_const(a, b)`
/// says whether two literals are known to be equal.
template <class SameConst>
Program compact(const Program& program, SameConst same_const);

/// Measured steps are the largest values of the row (of the key) alone that read a table with it: a
/// block of rows stores their ranges, found by evaluating them once per row, which no analysis could
/// better. `order` lists the other steps that a class depends on.
struct Measured {
  std::vector<i32> rows, keys, order;
};
/// At most `limit` per side; the rest is left to analysis.
Measured measured_steps(const Program& program, std::size_t limit);

bool equal_steps(const Step& a, const Step& b);
Program without_unused(const Program& program);

template <class SameConst>
Program compact(const Program& program, SameConst same_const) {
  Program out = program;
  out.steps.clear();
  std::vector<i32> at;  // where each old step is now
  for (Step step : program.steps) {
    for (int a = 0; a < step.num_args; ++a) step.args[a] = at[step.args[a]];
    i32 place = 0;
    for (; place < static_cast<i32>(out.steps.size()); ++place) {
      const Step& known = out.steps[place];
      const bool both_const = known.op == Op::kConst && step.op == Op::kConst;
      if (both_const ? known.type == step.type && same_const(known.index, step.index)
                     : equal_steps(known, step)) {
        break;
      }
    }
    if (place == static_cast<i32>(out.steps.size())) out.steps.push_back(step);
    at.push_back(place);
  }
  out.steps.resize(at.back() + 1);  // the result stays last
  return without_unused(out);
}

}  // namespace jali::predicate
