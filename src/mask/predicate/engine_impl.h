// The interpreter itself, compiled once per instruction set: engine.cpp (baseline), engine_v3.cpp
// and engine_v4.cpp include this. Everything is in an unnamed namespace, so that no instance can be
// taken for another's. Loops run over blocks of kLanes, a number that the compiler knows.
#pragma once

#include "mask/leaf_functions.h"
#include "mask/predicate/engine.h"

namespace jali::predicate {
namespace {

/// One operand of an instruction: a lane each, or the same for all lanes.
template <class T>
struct Lanes {
  const T* at;
  JALI_HD T operator()(i32 c) const { return at[c]; }
};
template <class T>
struct Same {
  T value;
  JALI_HD T operator()(i32) const { return value; }
};

template <class Out, class F>
JALI_HD void each(Out* __restrict out, i32 n, F f) {
  for (i32 k = 0; k < n; k += kLanes) {
    for (i32 c = 0; c < kLanes; ++c) out[k + c] = f(k + c);
  }
}

/// The lanes of all steps, while a tile is evaluated.
template <class Int>
class Machine {
 public:
  Machine(const Code& code, const Frame& f, i64 row_offset, void* scratch)
      : code_(code), frame_(f), row_offset_(row_offset), scratch_(static_cast<char*>(scratch)) {
    run(Stage::kFrame, kLanes);
  }

  /// Rows [begin, begin + count), count <= kLanes; the last one fills the lanes beyond.
  void set_rows(i32 begin, i32 count) {
    first_ = begin;
    last_ = begin + count - 1;
    run(Stage::kRow, kLanes);
  }
  /// Keys [begin, begin + count), count <= kMaxKeys.
  void set_keys(i32 begin, i32 count) {
    num_lanes_ = ceil_div(count, kLanes) * kLanes;
    first_ = begin;
    last_ = begin + count - 1;
    run(Stage::kKey, num_lanes_);
  }
  /// All cells of one of the rows and the keys.
  void set_row(i32 row_lane) {
    row_lane_ = row_lane;
    run(Stage::kCell, num_lanes_);
  }

  template <class T>
  T* slot(i32 step) const {
    return reinterpret_cast<T*>(scratch_ + code_.slots[step]);
  }
  /// Calls f with the operand's lanes, as a step of `stage` sees them.
  template <class T, class F>
  JALI_HD void operand(i32 step, Stage stage, F f) const {
    if (is_vector(step, stage)) {
      f(Lanes<T>{slot<T>(step)});
    } else {
      f(Same<T>{value<T>(step)});
    }
  }

 private:
  bool is_vector(i32 step, Stage stage) const {
    const Stage own = code_.steps[step].stage;
    return own == stage || (stage == Stage::kCell && own == Stage::kKey);
  }
  template <class T>
  T value(i32 step) const {
    return slot<T>(step)[code_.steps[step].stage == Stage::kRow ? row_lane_ : 0];
  }

  void run(Stage stage, i32 n) {
    for (i32 s = 0; s < code_.num_steps; ++s) {
      if (code_.steps[s].stage == stage) execute(s, n);
    }
  }

  template <class In, class Out, class F>
  void unary(i32 s, i32 n, F f) {
    const Step& step = code_.steps[s];
    Out* out = slot<Out>(s);
    operand<In>(step.args[0], step.stage,
                [&](auto a) { each(out, n, [&](i32 c) { return f(a(c)); }); });
  }
  template <class In, class Out, class F>
  void binary(i32 s, i32 n, F f) {
    const Step& step = code_.steps[s];
    Out* out = slot<Out>(s);
    operand<In>(step.args[0], step.stage, [&](auto a) {
      operand<In>(step.args[1], step.stage,
                  [&](auto b) { each(out, n, [&](i32 c) { return f(a(c), b(c)); }); });
    });
  }
  template <class T>
  void where(i32 s, i32 n) {
    const Step& step = code_.steps[s];
    T* out = slot<T>(s);
    operand<u8>(step.args[0], step.stage, [&](auto c) {
      operand<T>(step.args[1], step.stage, [&](auto a) {
        operand<T>(step.args[2], step.stage,
                   [&](auto b) { each(out, n, [&](i32 k) { return c(k) ? a(k) : b(k); }); });
      });
    });
  }

  /// Division has no vector instruction for integers. A known power of two is a shift; another known
  /// divisor a product with its reciprocal, off by at most one; else doubles are exact for 32 bits.
  template <bool kRemainder>
  void divide(i32 s, i32 n) {
    const Step& step = code_.steps[s];
    if (!is_vector(step.args[1], step.stage)) {
      const Int b = value<Int>(step.args[1]);
      if (b > 0 && (b & (b - 1)) == 0) {
        const int shift = __builtin_ctzll(static_cast<u64>(b));
        return unary<Int, Int>(s, n, [=](Int a) { return kRemainder ? a & (b - 1) : a >> shift; });
      }
      if (b > 0 && sizeof(Int) == 4) {
        const double reciprocal = 1.0 / static_cast<double>(b);
        return unary<Int, Int>(s, n, [=](Int a) {
          const Int q = static_cast<Int>(static_cast<double>(a) * reciprocal);
          const Int r = sub(a, mul(q, b));  // in [-b, 2 b): q was cut, or rounded
          const Int below = r < 0, above = r >= b;
          return kRemainder ? add(r, mul(b, below - above)) : q - below + above;
        });
      }
    }
    binary<Int, Int>(s, n, [](Int a, Int b) {
      if constexpr (sizeof(Int) == 8) {
        return kRemainder ? remainder(a, b) : quotient(a, b);
      } else {
        const double x = static_cast<double>(a) / static_cast<double>(b == 0 ? Int{1} : b);
        Int q = static_cast<Int>(x);
        q -= x < static_cast<double>(q);
        return b == 0 ? Int{0} : kRemainder ? sub(a, mul(q, b)) : q;
      }
    });
  }

  template <class T, class Out>
  void load(i32 s, i32 n) {
    const Step& step = code_.steps[s];
    const Table& table = code_.tables[step.index];
    const T* data = static_cast<const T*>(table.data);
    i64 base = 0;
    i64 offsets[kMaxKeys];
    int vectors = 0;
    for (int d = 0; d < step.num_args; ++d) {
      const Int last = static_cast<Int>(table.size[d] - 1);
      const i64 stride = table.stride[d];
      if (!is_vector(step.args[d], step.stage)) {
        base += clamp_to<i64>(value<Int>(step.args[d]), 0, table.size[d] - 1) * stride;
        continue;
      }
      const Int* index = slot<Int>(step.args[d]);
      if (vectors++ == 0) {
        each(offsets, n, [&](i32 c) { return clamp_to<Int>(index[c], 0, last) * stride; });
      } else {
        for (i32 c = 0; c < n; ++c) offsets[c] += clamp_to<Int>(index[c], 0, last) * stride;
      }
    }
    data += base;
    Out* out = slot<Out>(s);
    if (vectors == 0) {
      const Out x = static_cast<Out>(data[0]);
      each(out, n, [&](i32) { return x; });
    } else {
      each(out, n, [&](i32 c) { return static_cast<Out>(data[offsets[c]]); });
    }
  }

  void execute(i32 s, i32 n);
  template <class T>
  void arithmetic(i32 s, i32 n, Op op);
  void integer(i32 s, i32 n, Op op);
  template <class T>
  void compare(i32 s, i32 n, Op op);
  template <class T>
  void convert(i32 s, i32 n, Type to);

  const Code& code_;
  const Frame& frame_;
  i64 row_offset_;
  char* scratch_;
  i32 first_ = 0, last_ = 0, num_lanes_ = 0, row_lane_ = 0;
};

template <class Int>
template <class T>
void Machine<Int>::arithmetic(i32 s, i32 n, Op op) {
  switch (op) {
    case Op::kAdd:
      return binary<T, T>(s, n, [](T a, T b) { return add(a, b); });
    case Op::kSub:
      return binary<T, T>(s, n, [](T a, T b) { return sub(a, b); });
    case Op::kMul:
      return binary<T, T>(s, n, [](T a, T b) { return mul(a, b); });
    case Op::kMin:
      return binary<T, T>(s, n, [](T a, T b) { return minimum(a, b); });
    case Op::kMax:
      return binary<T, T>(s, n, [](T a, T b) { return maximum(a, b); });
    case Op::kNeg:
      return unary<T, T>(s, n, [](T a) { return negate(a); });
    default:
      return unary<T, T>(s, n, [](T a) { return absolute(a); });
  }
}

template <class Int>
void Machine<Int>::integer(i32 s, i32 n, Op op) {
  switch (op) {
    case Op::kFloorDiv:
      return divide<false>(s, n);
    case Op::kMod:
      return divide<true>(s, n);
    case Op::kShl:
      return binary<Int, Int>(s, n, [](Int a, Int b) { return shift_left(a, b); });
    case Op::kShr:
      return binary<Int, Int>(s, n, [](Int a, Int b) { return shift_right(a, b); });
    case Op::kAnd:
      return binary<Int, Int>(s, n, [](Int a, Int b) { return a & b; });
    case Op::kOr:
      return binary<Int, Int>(s, n, [](Int a, Int b) { return a | b; });
    case Op::kXor:
      return binary<Int, Int>(s, n, [](Int a, Int b) { return a ^ b; });
    default:
      return unary<Int, Int>(s, n, [](Int a) { return ~a; });
  }
}

template <class Int>
template <class T>
void Machine<Int>::compare(i32 s, i32 n, Op op) {
  switch (op) {
    case Op::kLt:
      return binary<T, u8>(s, n, [](T a, T b) -> u8 { return a < b; });
    case Op::kLe:
      return binary<T, u8>(s, n, [](T a, T b) -> u8 { return a <= b; });
    case Op::kEq:
      return binary<T, u8>(s, n, [](T a, T b) -> u8 { return a == b; });
    default:
      return binary<T, u8>(s, n, [](T a, T b) -> u8 { return a != b; });
  }
}

template <class Int>
template <class T>
void Machine<Int>::convert(i32 s, i32 n, Type to) {
  switch (to) {
    case Type::kBool:
      return unary<T, u8>(s, n, [](T a) -> u8 { return a != 0; });
    case Type::kFloat:
      return unary<T, float>(s, n, [](T a) { return static_cast<float>(a); });
    default:
      return unary<T, Int>(s, n, [](T a) {
        if constexpr (static_cast<T>(0.5f) != T{0}) {
          return to_int<Int>(a);
        } else {
          return static_cast<Int>(a);
        }
      });
  }
}

template <class Int>
void Machine<Int>::execute(i32 s, i32 n) {
  const Step& step = code_.steps[s];
  const Type in = step.num_args ? code_.steps[step.args[0]].type : step.type;
  auto fill = [&](auto x) { each(slot<decltype(x)>(s), n, [&](i32) { return x; }); };
  auto count = [&](i64 offset) {
    const i32 first = first_, last = last_;
    each(slot<Int>(s), n,
         [=](i32 c) { return static_cast<Int>(offset + (first + c < last ? first + c : last)); });
  };
  switch (step.op) {
    case Op::kConst:
      if (step.type == Type::kBool) return fill(static_cast<u8>(code_.consts[step.index].i != 0));
      if (step.type == Type::kFloat) return fill(code_.consts[step.index].f);
      return fill(static_cast<Int>(code_.consts[step.index].i));
    case Op::kBatch:
      return fill(static_cast<Int>(frame_.b));
    case Op::kHead:
      return fill(static_cast<Int>(frame_.h));
    case Op::kRow:
      return count(row_offset_);
    case Op::kKey:
      return count(0);
    case Op::kLoad:
      switch (code_.tables[step.index].dtype) {
        case DType::kBool:
          return load<u8, u8>(s, n);
        case DType::kI32:
          return load<i32, Int>(s, n);
        case DType::kI64:
          return load<i64, Int>(s, n);
        default:
          return load<float, float>(s, n);
      }
    case Op::kToInt:
    case Op::kToBool:
    case Op::kToFloat:
      if (in == Type::kBool) return convert<u8>(s, n, step.type);
      if (in == Type::kFloat) return convert<float>(s, n, step.type);
      return convert<Int>(s, n, step.type);
    case Op::kLt:
    case Op::kLe:
    case Op::kEq:
    case Op::kNe:
      if (in == Type::kBool) return compare<u8>(s, n, step.op);
      if (in == Type::kFloat) return compare<float>(s, n, step.op);
      return compare<Int>(s, n, step.op);
    case Op::kWhere:
      if (step.type == Type::kBool) return where<u8>(s, n);
      if (step.type == Type::kFloat) return where<float>(s, n);
      return where<Int>(s, n);
    case Op::kAnd:
      if (in == Type::kInt) return integer(s, n, step.op);
      return binary<u8, u8>(s, n, [](u8 a, u8 b) -> u8 { return a & b; });
    case Op::kOr:
      if (in == Type::kInt) return integer(s, n, step.op);
      return binary<u8, u8>(s, n, [](u8 a, u8 b) -> u8 { return a | b; });
    case Op::kXor:
      if (in == Type::kInt) return integer(s, n, step.op);
      return binary<u8, u8>(s, n, [](u8 a, u8 b) -> u8 { return a ^ b; });
    case Op::kNot:
      if (in == Type::kInt) return integer(s, n, step.op);
      return unary<u8, u8>(s, n, [](u8 a) -> u8 { return a ^ 1; });
    case Op::kFloorDiv:
    case Op::kMod:
    case Op::kShl:
    case Op::kShr:
      return integer(s, n, step.op);
    default:
      if (in == Type::kFloat) return arithmetic<float>(s, n, step.op);
      return arithmetic<Int>(s, n, step.op);
  }
}

template <class Int>
void fill_cells(const Code& code, const Frame& f, i64 row_offset, i32 i0, i32 i1, i32 j0, i32 j1,
                void* scratch, u64* bits, i64 stride) {
  const i32 result = code.num_steps - 1;
  Machine<Int> machine(code, f, row_offset, scratch);
  for (i32 j = j0; j < j1; j += kMaxKeys) {
    const i32 keys = min_of(kMaxKeys, j1 - j);
    machine.set_keys(j, keys);
    for (i32 i = i0; i < i1; i += kLanes) {
      const i32 rows = min_of(kLanes, i1 - i);
      machine.set_rows(i, rows);
      for (i32 r = 0; r < rows; ++r) {
        machine.set_row(r);
        u64* out = bits + (i - i0 + r) * stride + (j - j0) / 64;
        machine.template operand<u8>(result, Stage::kCell, [&](auto cell) {
          for (i32 k = 0; k < keys; k += 64) {
            alignas(64) u8 block[64];
            for (i32 c = 0; c < 64; ++c) block[c] = cell(k + c);
            const u64 tail = keys - k >= 64 ? ~u64{0} : (u64{1} << (keys - k)) - 1;
            out[k / 64] = pack_bits(block) & tail;
          }
        });
      }
    }
  }
}

template <class T>
void collect(Bound& bound, const T* lanes) {
  T lo = lanes[0], hi = lanes[0];
  for (i32 c = 0; c < kLanes; ++c) {
    lo = min_of(lo, lanes[c]);
    hi = max_of(hi, lanes[c]);
  }
  bound.i = hull(bound.i, {lo, hi});
}
template <>
void collect(Bound& bound, const float* lanes) {
  for (i32 c = 0; c < kLanes; ++c) bound.f = widen(bound.f, lanes[c]);
}

template <class Int>
void measure_ranges(const Code& code, const Frame& f, i64 row_offset, Stage stage, i32 begin,
                    i32 end, void* scratch, const i32* steps, i32 num_steps, Bound* out) {
  for (i32 k = 0; k < num_steps; ++k) {
    out[k] = {nothing(), no_float()};
  }
  Machine<Int> machine(code, f, row_offset, scratch);
  for (i32 at = begin; at < end; at += kLanes) {
    const i32 count = min_of(kLanes, end - at);
    stage == Stage::kRow ? machine.set_rows(at, count) : machine.set_keys(at, count);
    for (i32 k = 0; k < num_steps; ++k) {
      switch (code.steps[steps[k]].type) {
        case Type::kBool:
          collect(out[k], machine.template slot<u8>(steps[k]));
          break;
        case Type::kInt:
          collect(out[k], machine.template slot<Int>(steps[k]));
          break;
        case Type::kFloat:
          collect(out[k], machine.template slot<float>(steps[k]));
          break;
      }
    }
  }
}

void fill_any(const Code& code, const Frame& f, i64 row_offset, i32 i0, i32 i1, i32 j0, i32 j1,
              void* scratch, u64* bits, i64 stride) {
  auto run = code.wide ? fill_cells<i64> : fill_cells<i32>;
  run(code, f, row_offset, i0, i1, j0, j1, scratch, bits, stride);
}
void measure_any(const Code& code, const Frame& f, i64 row_offset, Stage stage, i32 begin, i32 end,
                 void* scratch, const i32* steps, i32 num_steps, Bound* out) {
  auto run = code.wide ? measure_ranges<i64> : measure_ranges<i32>;
  run(code, f, row_offset, stage, begin, end, scratch, steps, num_steps, out);
}

constexpr Engine kEngine = {fill_any, measure_any};

}  // namespace
}  // namespace jali::predicate
