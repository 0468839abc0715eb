// The CPU backend: any problem in CPU memory.
#pragma once

#include "backend/backend.h"

namespace jali {

const Backend& cpu_backend();

}  // namespace jali
