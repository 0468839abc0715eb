#define JALI_ISA isa_v2
#include "cpu/impl/table.h"

namespace jali::cpu {

const KernelTable& kernels_v2() { return isa_v2::kTable; }

}  // namespace jali::cpu
