// The CUDA backend: kernels compiled at run time, on whatever GPU a variant serves.
#pragma once

#include "backend/backend.h"

namespace jali {

const Backend& cuda_backend();

}  // namespace jali
