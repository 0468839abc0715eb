// Evaluates a predicate's cells: an interpreter whose every instruction works on a vector of rows
// or keys. What depends on neither is computed once, what depends on the row or the key alone
// once per row and key of a tile; only the rest runs per cell.
#pragma once

#include "base/isa.h"
#include "mask/leaf.h"
#include "mask/predicate/interval.h"
#include "mask/predicate/program.h"

namespace jali::predicate {

struct Table {
  const void* data;
  DType dtype;
  i32 rank;
  i64 size[kMaxRank], stride[kMaxRank];
  bool readable = true;  // false: in GPU memory
};

union Word {
  i64 i;
  float f;
};

/// What a bound predicate is, as plain data: the instruction-set dependent code uses nothing else.
struct Code {
  const Step* steps;
  i32 num_steps;
  const i32* slots;    // where each step's lanes stand in the scratch, in bytes
  const Word* consts;  // by Step::index
  const Table* tables;
  bool wide;  // integers in 64 bits
};

/// Lanes per vector: rows are always one block; keys are up to kMaxKeys.
constexpr i32 kLanes = 64, kMaxKeys = 256;
constexpr i32 lanes_of(Stage stage) { return stage >= Stage::kKey ? kMaxKeys : kLanes; }
constexpr i32 lane_bytes(Type type, bool wide) {
  return type == Type::kBool ? 1 : type == Type::kFloat || !wide ? 4 : 8;
}

/// A bound on the values of one step over a range.
struct Bound {
  Interval i;       // bool, int
  FloatInterval f;  // float
};

struct Engine {
  /// See LeafNode::fill. `row_offset` is added to rows before the predicate sees them.
  void (*fill)(const Code& code, const Frame& f, i64 row_offset, i32 i0, i32 i1, i32 j0, i32 j1,
               void* scratch, u64* bits, i64 stride);
  /// The exact ranges of the listed steps (all of `stage`: kRow or kKey) over [begin, end).
  void (*measure)(const Code& code, const Frame& f, i64 row_offset, Stage stage, i32 begin, i32 end,
                  void* scratch, const i32* steps, i32 num_steps, Bound* out);
};
const Engine& engine(Isa isa);
const Engine& engine_v3();
const Engine& engine_v4();

}  // namespace jali::predicate
