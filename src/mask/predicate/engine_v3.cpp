#include "mask/predicate/engine_impl.h"

namespace jali::predicate {

const Engine& engine_v3() { return kEngine; }

}  // namespace jali::predicate
