#define JALI_ISA isa_v3
#include "cpu/impl/table.h"

namespace jali::cpu {

const KernelTable& kernels_v3() { return isa_v3::kTable; }

}  // namespace jali::cpu
