// SHA-256 (FIPS 180-4), for cache keys and checksums.
#pragma once

#include <string>
#include <string_view>

namespace jali::cuda {

/// 64 hexadecimal digits.
std::string sha256(std::string_view data);

}  // namespace jali::cuda
