// Machines other than x86-64: the same kernels with 16-byte vectors.
#if !defined(__x86_64__)
#define JALI_ISA isa_generic
#include "cpu/impl/table.h"

namespace jali::cpu {

const KernelTable& kernels_generic() { return isa_generic::kTable; }

}  // namespace jali::cpu
#endif
