// What the GPU backend finds on this machine, for people.
#pragma once

#include <string>

namespace jali::cuda {

/// Lines "<kind>\t<text>": gpu, driver, compiler, cache.
std::string describe();

}  // namespace jali::cuda
