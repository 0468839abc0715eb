// What Hopper gives a block.
#pragma once

#include "base/hd.h"

namespace jali::cuda {

/// Dynamic shared memory (CUDA C++ guide, compute capability 9.0).
constexpr i32 kMostSharedBytes = 227 * 1024;

}  // namespace jali::cuda
