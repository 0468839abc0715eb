// Prints a predicate as a leaf: a struct with the interface of mask/leaf.h, for a kernel that is
// compiled for it.
#pragma once

#include <string>

#include "mask/predicate/program.h"

namespace jali::predicate {

/// The struct `name`, to stand in namespace jali::predicate behind #include
/// "mask/predicate/generated.h". It depends on the structure alone. Its members are
///   Scalar offset                  the row offset, like a leaf's field
///   c<n>                           literal n: Int, bool or float
///   t<n>, range<n>                 table n (TableOf<T, rank>) and what it can hold: an Interval, or
///                                  a FloatInterval
/// wide: integers in 64 bits; the caller proves that 32 are enough, or asks for it.
/// Members stand in the order of the literals and tables of canonical(program).
std::string generate(const Program& program, const std::string& name, bool wide);

/// The program that is printed: equal steps once, unneeded ones dropped, whatever the literals are.
Program canonical(const Program& program);

/// Bounds sizeof Row of the struct of a canonical program where it has among() (mask/leaf.h); 0: it has
/// none.
i32 light_row_bytes(const Program& program, bool wide);

}  // namespace jali::predicate
