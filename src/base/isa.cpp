#include "base/isa.h"

#include "base/env.h"
#include "base/error.h"

namespace jali {
namespace {

bool machine_has(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kV2:
      return true;
    case Isa::kV3:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
    case Isa::kV4:
      return machine_has(Isa::kV3) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
  }
  return false;
#else
  return isa == Isa::kV2;  // elsewhere one generic build takes this place
#endif
}

Isa choose() {
  const std::string name = forced({"v2", "v3", "v4"});
  Isa best = Isa::kV2;
  for (Isa isa : {Isa::kV2, Isa::kV3, Isa::kV4}) {
    if (!machine_has(isa)) continue;
    best = isa;
    if (name == isa_name(isa)) return isa;
  }
  if (!name.empty()) {
    value_error("JALI_FORCE=", name, ": this machine runs at most ", isa_name(best),
                "; unset it to get that");
  }
  return best;
}

}  // namespace

Isa current_isa() {
  static const Isa isa = choose();
  return isa;
}

const char* isa_name(Isa isa) {
  static const char* const names[] = {"v2", "v3", "v4"};
  return names[static_cast<int>(isa)];
}

}  // namespace jali
