#include "mask/leaf_functions.h"

#include "leaf_list.h"

namespace jali {

const LeafFunctions* leaf_functions(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kV4) return leaf_functions_v4();
  if (isa == Isa::kV3) return leaf_functions_v3();
#endif
  static constexpr LeafFunctions table[] = {
#define JALI_FILL(Name, name) functions_of<Isa::kV2, leaf::Name>(),
      JALI_FOR_EACH_LEAF(JALI_FILL)
#undef JALI_FILL
  };
  return table;
}

}  // namespace jali
