#define JALI_ISA isa_v4
#include "cpu/impl/table.h"

namespace jali::cpu {

const KernelTable& kernels_v4() { return isa_v4::kTable; }

}  // namespace jali::cpu
