#include "mask/predicate/program.h"

#include <algorithm>

#include "base/error.h"

namespace jali::predicate {
namespace {

/// Reads the ints one by one and names the place where they are wrong.
class Reader {
 public:
  Reader(const std::int64_t* code, std::int64_t size) : code_(code), size_(size) {}
  bool done() const { return at_ == size_; }
  std::int64_t next(const char* what, std::int64_t low, std::int64_t high) {
    if (done()) value_error("predicate program: it ends where ", what, " should stand");
    const std::int64_t x = code_[at_++];
    if (x < low || x > high) {
      value_error("predicate program: ", what, " at int ", at_ - 1, " is ", x, "; expected ", low,
                  " to ", high);
    }
    return x;
  }

 private:
  const std::int64_t* code_;
  std::int64_t size_, at_ = 0;
};

int num_operands(Op op) {
  switch (op) {
    case Op::kConst:
    case Op::kBatch:
    case Op::kHead:
    case Op::kRow:
    case Op::kKey:
    case Op::kLoad:
      return 0;
    case Op::kToInt:
    case Op::kToBool:
    case Op::kToFloat:
    case Op::kNeg:
    case Op::kAbs:
    case Op::kNot:
      return 1;
    case Op::kWhere:
      return 3;
    default:
      return 2;
  }
}

Stage own_stage(Op op) {
  return op == Op::kRow ? Stage::kRow : op == Op::kKey ? Stage::kKey : Stage::kFrame;
}

/// The type of a step's result; throws when its operands do not go with it.
Type result_type(const Step& step, const std::vector<Step>& steps) {
  auto type = [&](int a) { return steps[step.args[a]].type; };
  auto require = [&](bool ok) {
    if (!ok) {
      value_error("predicate program: instruction ", steps.size(), " (operation ",
                  static_cast<int>(step.op), ") has operands of the wrong type");
    }
  };
  switch (step.op) {
    case Op::kBatch:
    case Op::kHead:
    case Op::kRow:
    case Op::kKey:
      return Type::kInt;
    case Op::kToInt:
      return Type::kInt;
    case Op::kToBool:
      return Type::kBool;
    case Op::kToFloat:
      return Type::kFloat;
    case Op::kNeg:
    case Op::kAbs:
      require(type(0) != Type::kBool);
      return type(0);
    case Op::kNot:
      require(type(0) != Type::kFloat);
      return type(0);
    case Op::kAdd:
    case Op::kSub:
    case Op::kMul:
    case Op::kMin:
    case Op::kMax:
      require(type(0) == type(1) && type(0) != Type::kBool);
      return type(0);
    case Op::kFloorDiv:
    case Op::kMod:
    case Op::kShl:
    case Op::kShr:
      require(type(0) == Type::kInt && type(1) == Type::kInt);
      return Type::kInt;
    case Op::kAnd:
    case Op::kOr:
    case Op::kXor:
      require(type(0) == type(1) && type(0) != Type::kFloat);
      return type(0);
    case Op::kLt:
    case Op::kLe:
      require(type(0) == type(1) && type(0) != Type::kBool);
      return Type::kBool;
    case Op::kEq:
    case Op::kNe:
      require(type(0) == type(1));
      return Type::kBool;
    case Op::kWhere:
      require(type(0) == Type::kBool && type(1) == type(2));
      return type(1);
    default:  // kConst and kLoad know theirs
      return step.type;
  }
}

Type type_of(DType dtype) {
  return dtype == DType::kBool ? Type::kBool : dtype == DType::kF32 ? Type::kFloat : Type::kInt;
}

}  // namespace

bool Program::uses(Op op) const {
  return std::any_of(steps.begin(), steps.end(), [op](const Step& s) { return s.op == op; });
}

Program parse(const std::int64_t* code, std::int64_t size) {
  static constexpr DType kDTypes[] = {DType::kBool, DType::kI32, DType::kI64, DType::kF32};
  Reader in(code, size);
  Program p;
  p.offset = static_cast<Program::Offset>(in.next("the offset's tag", 0, 2));
  const std::int64_t num_tables = in.next("the number of tables", 0, 1 << 20);
  for (std::int64_t n = 0; n < num_tables; ++n) {
    const DType dtype = kDTypes[in.next("a table's dtype", 0, 3)];
    p.tables.push_back({dtype, static_cast<i32>(in.next("a table's rank", 0, kMaxRank))});
  }
  while (!in.done()) {
    Step step{static_cast<Op>(in.next("an operation", 0, kNumOps - 1)), Type::kInt, Stage::kFrame};
    step.num_args = static_cast<u8>(num_operands(step.op));
    step.stage = own_stage(step.op);
    if (step.op == Op::kConst) {
      step.type = static_cast<Type>(in.next("a literal's type", 0, 2));
      step.index = p.num_consts++;
    } else if (step.op == Op::kLoad) {
      step.index = static_cast<i32>(in.next("a table", 0, num_tables - 1));
      step.num_args = static_cast<u8>(p.tables[step.index].rank);
      step.type = type_of(p.tables[step.index].dtype);
    }
    for (int a = 0; a < step.num_args; ++a) {
      step.args[a] =
          static_cast<i32>(in.next("an operand", 0, static_cast<std::int64_t>(p.steps.size()) - 1));
      const Step& arg = p.steps[step.args[a]];
      step.stage = static_cast<Stage>(static_cast<u8>(step.stage) | static_cast<u8>(arg.stage));
      if (step.op == Op::kLoad && arg.type != Type::kInt) {
        value_error("predicate program: instruction ", p.steps.size(), " has an index that is no ",
                    "integer");
      }
    }
    step.type = result_type(step, p.steps);
    p.steps.push_back(step);
  }
  if (p.steps.empty() || p.steps.back().type != Type::kBool) {
    value_error("predicate program: its last instruction must give a bool");
  }
  return p;
}

bool equal_steps(const Step& a, const Step& b) {
  return a.op == b.op && a.type == b.type && a.index == b.index && a.num_args == b.num_args &&
         std::equal(a.args, a.args + a.num_args, b.args);
}

Program without_unused(const Program& program) {
  std::vector<bool> needed(program.steps.size());
  needed.back() = true;
  for (std::size_t n = program.steps.size(); n-- > 0;) {
    if (!needed[n]) continue;
    const Step& step = program.steps[n];
    for (int a = 0; a < step.num_args; ++a) needed[step.args[a]] = true;
  }
  Program out = program;
  out.steps.clear();
  std::vector<i32> at(program.steps.size(), -1);
  for (std::size_t n = 0; n < program.steps.size(); ++n) {
    if (!needed[n]) continue;
    Step step = program.steps[n];
    for (int a = 0; a < step.num_args; ++a) step.args[a] = at[step.args[a]];
    at[n] = static_cast<i32>(out.steps.size());
    out.steps.push_back(step);
  }
  return out;
}

Measured measured_steps(const Program& program, std::size_t limit) {
  const std::vector<Step>& steps = program.steps;
  const i32 n = static_cast<i32>(steps.size());
  auto one_sided = [&](i32 s) {
    return steps[s].stage == Stage::kRow || steps[s].stage == Stage::kKey;
  };
  std::vector<bool> reads(n), outermost(n), needed(n);
  outermost[n - 1] = needed[n - 1] = true;
  for (i32 s = 0; s < n; ++s) {
    reads[s] = one_sided(s) && steps[s].op == Op::kLoad;
    for (int a = 0; a < steps[s].num_args; ++a) {
      const i32 arg = steps[s].args[a];
      if (one_sided(s)) {
        reads[s] = reads[s] || reads[arg];
      } else {
        outermost[arg] = true;
      }
    }
  }
  Measured found;
  for (i32 s = n - 1; s >= 0; --s) {
    if (!needed[s]) continue;
    std::vector<i32>& list = steps[s].stage == Stage::kRow ? found.rows : found.keys;
    if (reads[s] && outermost[s] && list.size() < limit) {
      list.push_back(s);
      continue;
    }
    found.order.push_back(s);
    for (int a = 0; a < steps[s].num_args; ++a) needed[steps[s].args[a]] = true;
  }
  std::reverse(found.order.begin(), found.order.end());
  return found;
}

}  // namespace jali::predicate
