// Runs a predicate's program on ranges instead of numbers.
#pragma once

#include <vector>

#include "mask/predicate/engine.h"

namespace jali::predicate {

/// Everything known of one step while rows and keys run over a block: i of a bool or int, f of a
/// float, affine of an int.
struct Value {
  Interval i;
  FloatInterval f;
  Affine affine;
};

/// Where b, h, the row (as the function sees it, offset included) and the key run.
struct Domain {
  Interval batch, head, row, key;
};

/// Evaluates the steps listed in `order` (ascending); operands outside of it are in `values` already.
/// `ranges` bounds the contents of each table.
void analyse(const Code& code, const Bound* ranges, const Domain& domain,
             const std::vector<i32>& order, Value* values);

/// Smallest and largest element of a table; reads all of it, but no bools. Of one that cannot be read:
/// what its type can hold.
Bound range_of(const Table& table);

}  // namespace jali::predicate
