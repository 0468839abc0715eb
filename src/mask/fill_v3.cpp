#include "leaf_list.h"
#include "mask/fill.h"

namespace jali {

const FillFunction* fill_functions_v3() {
  static constexpr FillFunction table[] = {
#define JALI_FILL(Name, name) fill_cells<Isa::kV3, leaf::Name>,
      JALI_FOR_EACH_LEAF(JALI_FILL)
#undef JALI_FILL
  };
  return table;
}

}  // namespace jali
