#include "mask/predicate/engine_impl.h"

namespace jali::predicate {

const Engine& engine(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kV4) return engine_v4();
  if (isa == Isa::kV3) return engine_v3();
#endif
  return kEngine;
}

}  // namespace jali::predicate
