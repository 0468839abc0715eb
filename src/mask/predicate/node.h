// The predicate as a leaf at run time.
#pragma once

#include "mask/leaf_node.h"

namespace jali {

/// The leaf kind "predicate": not in leaf_kinds(), because its parameters are a program.
const LeafKind& predicate_kind();

}  // namespace jali
