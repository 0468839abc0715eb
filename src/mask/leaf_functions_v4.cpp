#include "leaf_list.h"
#include "mask/leaf_functions.h"

namespace jali {

const LeafFunctions* leaf_functions_v4() {
  static constexpr LeafFunctions table[] = {
#define JALI_FILL(Name, name) functions_of<Isa::kV4, leaf::Name>(),
      JALI_FOR_EACH_LEAF(JALI_FILL)
#undef JALI_FILL
  };
  return table;
}

}  // namespace jali
