// All that a generated predicate needs; see codegen.h.
#pragma once

#include "mask/leaf.h"
#include "mask/predicate/interval.h"
