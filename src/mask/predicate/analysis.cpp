#include "mask/predicate/analysis.h"

namespace jali::predicate {
namespace {

/// A load whose indices reach no more elements than this reads them; it knows them exactly then.
constexpr i64 kMaxReads = 64;

/// Calls f(pointer) for every element of the box of indices [lo, hi].
template <class T, class F>
void visit(const Table& t, const i64* lo, const i64* hi, F f) {
  i64 at[kMaxRank] = {};
  for (int d = 0; d < t.rank; ++d) at[d] = lo[d];
  while (true) {
    i64 offset = 0;
    for (int d = 0; d < t.rank; ++d) offset += at[d] * t.stride[d];
    const T* data = static_cast<const T*>(t.data) + offset;
    const int last = t.rank - 1;
    const i64 count = t.rank ? hi[last] - lo[last] + 1 : 1;
    for (i64 k = 0; k < count; ++k) f(data[k * (t.rank ? t.stride[last] : 0)]);
    int d = last - 1;
    for (; d >= 0 && at[d] == hi[d]; --d) at[d] = lo[d];
    if (d < 0) return;
    ++at[d];
  }
}

Bound range_within(const Table& t, const i64* lo, const i64* hi) {
  Bound x = {nothing(), no_float()};
  auto take = [&](auto v) { x.i = widen(x.i, v); };
  switch (t.dtype) {
    case DType::kBool:
      visit<u8>(t, lo, hi, [&](u8 v) { take(v != 0); });
      break;
    case DType::kI32:
      visit<i32>(t, lo, hi, take);
      break;
    case DType::kI64:
      visit<i64>(t, lo, hi, take);
      break;
    default:
      visit<float>(t, lo, hi, [&](float v) { x.f = widen(x.f, v); });
      x.f = settled(x.f);
  }
  return x;
}

Bound load(const Table& t, const Bound& whole, const Step& step, const Value* values) {
  i64 lo[kMaxRank] = {}, hi[kMaxRank] = {}, count = 1;
  for (int d = 0; d < t.rank; ++d) {
    const Interval index = values[step.args[d]].i;
    lo[d] = clamp_to<i64>(index.lo, 0, t.size[d] - 1);
    hi[d] = clamp_to<i64>(index.hi, 0, t.size[d] - 1);
    count = min_of(count * (hi[d] - lo[d] + 1), kMaxReads + 1);
  }
  return t.readable && count <= kMaxReads ? range_within(t, lo, hi) : whole;
}

Value of(Interval i) { return {i, any_float(), not_affine()}; }
Value of(FloatInterval f) { return {unbounded(), f, not_affine()}; }
Value of(Affine affine, Interval i) { return {i, any_float(), affine}; }
Value input(Interval range, i64 row, i64 key) {
  return of(range.one() ? Affine{1, 0, 0, range.lo} : Affine{1, row, key, 0}, range);
}

/// An integer result of + - * or unary minus: `exact` holds if nothing wraps, and says more than
/// `range` only if the operands share the row or the key.
Value linear(Interval range, Affine exact, bool shared, const Domain& domain) {
  if (range.lo == kMinInt && range.hi == kMaxInt) exact.known = 0;  // it may wrap
  if (!exact.known || !shared) return of(exact, range);
  return of(exact, meet(range, range_of(exact, domain.row, domain.key)));
}

Value arithmetic(const Step& step, const Value& a, const Value& b, const Domain& domain) {
  if (step.type == Type::kFloat) {
    switch (step.op) {
      case Op::kAdd:
        return of(add(a.f, b.f));
      case Op::kSub:
        return of(sub(a.f, b.f));
      case Op::kMul:
        return of(mul(a.f, b.f));
      case Op::kMin:
        return of(minimum(a.f, b.f));
      case Op::kMax:
        return of(maximum(a.f, b.f));
      case Op::kNeg:
        return of(negate(a.f));
      default:
        return of(absolute(a.f));
    }
  }
  switch (step.op) {
    case Op::kAdd:
      return linear(add(a.i, b.i), add(a.affine, b.affine), share(a.affine, b.affine), domain);
    case Op::kSub:
      return linear(sub(a.i, b.i), sub(a.affine, b.affine), share(a.affine, b.affine), domain);
    case Op::kMul: {
      const Affine exact = b.i.one()   ? scale(a.affine, b.i.lo)
                           : a.i.one() ? scale(b.affine, a.i.lo)
                                       : not_affine();
      return linear(mul(a.i, b.i), exact, false, domain);
    }
    case Op::kMin:
      return of(minimum(a.i, b.i));
    case Op::kMax:
      return of(maximum(a.i, b.i));
    case Op::kNeg:
      return linear(negate(a.i), scale(a.affine, -1), false, domain);
    default:
      return of(absolute(a.i));
  }
}

Interval compare(Op op, bool floats, const Value& a, const Value& b, const Domain& domain) {
  if (floats) {
    return op == Op::kLt   ? less(a.f, b.f)
           : op == Op::kLe ? less_equal(a.f, b.f)
           : op == Op::kEq ? equal(a.f, b.f)
                           : differ(a.f, b.f);
  }
  Interval x = a.i, y = b.i;
  // Of two affine values the difference is exact, whatever they share.
  const Affine difference = sub(a.affine, b.affine);
  if (difference.known && share(a.affine, b.affine)) {
    const Interval range = range_of(difference, domain.row, domain.key);
    if (range.lo != kMinInt || range.hi != kMaxInt) {
      x = range;
      y = point(0);
    }
  }
  return op == Op::kLt   ? less(x, y)
         : op == Op::kLe ? less_equal(x, y)
         : op == Op::kEq ? equal(x, y)
                         : differ(x, y);
}

Interval bitwise(const Step& step, const Interval& a, const Interval& b) {
  const bool bools = step.type == Type::kBool;
  switch (step.op) {
    case Op::kAnd:
      return bools ? both(a, b) : bit_and(a, b);
    case Op::kOr:
      return bools ? either(a, b) : bit_or(a, b);
    case Op::kXor:
      return bools ? differ(a, b) : bit_xor(a, b);
    default:
      return bools ? invert(a) : bit_not(a);
  }
}

Value evaluate(const Code& code, const Bound* ranges, const Domain& domain, const Step& step,
               const Value* values) {
  static constexpr Value kNone = {};
  const Value& a = step.num_args > 0 ? values[step.args[0]] : kNone;
  const Value& b = step.num_args > 1 ? values[step.args[1]] : kNone;
  const Value& c = step.num_args > 2 ? values[step.args[2]] : kNone;
  const Type in = step.num_args ? code.steps[step.args[0]].type : step.type;
  switch (step.op) {
    case Op::kConst:
      if (step.type == Type::kFloat) return of(float_point(code.consts[step.index].f));
      return input(point(code.consts[step.index].i), 0, 0);
    case Op::kBatch:  // not affine unless it is one number
      return domain.batch.one() ? input(domain.batch, 0, 0) : of(domain.batch);
    case Op::kHead:
      return domain.head.one() ? input(domain.head, 0, 0) : of(domain.head);
    case Op::kRow:
      return input(domain.row, 1, 0);
    case Op::kKey:
      return input(domain.key, 0, 1);
    case Op::kLoad: {
      const Bound x = load(code.tables[step.index], ranges[step.index], step, values);
      if (step.type == Type::kFloat) return of(x.f);
      return x.i.one() ? input(x.i, 0, 0) : of(x.i);
    }
    case Op::kToInt:
      return in == Type::kFloat ? of(int_of(a.f)) : of(a.i);
    case Op::kToBool:
      return in == Type::kFloat ? of(nonzero(a.f)) : of(nonzero(a.i));
    case Op::kToFloat:
      return of(float_of(a.i));
    case Op::kFloorDiv:
      return of(quotient(a.i, b.i));
    case Op::kMod:
      return of(remainder(a.i, b.i));
    case Op::kShl:
      return of(shift_left(a.i, b.i));
    case Op::kShr:
      return of(shift_right(a.i, b.i));
    case Op::kAnd:
    case Op::kOr:
    case Op::kXor:
    case Op::kNot:
      return of(bitwise(step, a.i, b.i));
    case Op::kLt:
    case Op::kLe:
    case Op::kEq:
    case Op::kNe:
      return of(compare(step.op, in == Type::kFloat, a, b, domain));
    case Op::kWhere: {
      Value x = of(choose(a.i, b.i, c.i));
      x.f = choose(a.i, b.f, c.f);
      if (a.i.one()) x.affine = a.i.lo ? b.affine : c.affine;
      return x;
    }
    default:
      return arithmetic(step, a, b, domain);
  }
}

}  // namespace

void analyse(const Code& code, const Bound* ranges, const Domain& domain,
             const std::vector<i32>& order, Value* values) {
  for (i32 s : order) values[s] = evaluate(code, ranges, domain, code.steps[s], values);
}

Bound range_of(const Table& table) {
  if (table.dtype == DType::kBool) return {maybe(), any_float()};
  if (!table.readable) {
    const Interval narrow = {-kFar - 1ll, kFar};
    return {table.dtype == DType::kI32 ? narrow : unbounded(), any_float()};
  }
  i64 lo[kMaxRank] = {}, hi[kMaxRank] = {};
  for (int d = 0; d < table.rank; ++d) hi[d] = table.size[d] - 1;
  return range_within(table, lo, hi);
}

}  // namespace jali::predicate
