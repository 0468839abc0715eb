// Which of the compiled instruction sets this machine runs. Files named *_v2.cpp, *_v3.cpp and
// *_v4.cpp are compiled for the x86-64 levels of that name (SSE4.2, AVX2 + FMA, AVX-512).
#pragma once

namespace jali {

enum class Isa { kV2 = 0, kV3 = 1, kV4 = 2 };
constexpr int kNumIsas = 3;

/// The best level that the machine has, or the one that JALI_FORCE names (an error if it lacks it).
Isa current_isa();
const char* isa_name(Isa isa);

}  // namespace jali
