#include "mask/fill.h"

#include "leaf_list.h"

namespace jali {

const FillFunction* fill_functions(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kV4) return fill_functions_v4();
  if (isa == Isa::kV3) return fill_functions_v3();
#endif
  static constexpr FillFunction table[] = {
#define JALI_FILL(Name, name) fill_cells<Isa::kV2, leaf::Name>,
      JALI_FOR_EACH_LEAF(JALI_FILL)
#undef JALI_FILL
  };
  return table;
}

}  // namespace jali
