// What the GPU backend refuses, said without a GPU.
#include <jali/jali.h>

#include <string>

#include "check.h"

using namespace jali;

namespace {

TensorView on_gpu(TensorView t) {
  t.device = DeviceType::kCUDA;
  return t;
}
/// Nobody reads these addresses.
TensorView table(DType dtype, std::initializer_list<std::int64_t> shape) {
  return on_gpu(TensorView(reinterpret_cast<void*>(4096), dtype, shape));
}
TensorView tokens(DType dtype, int heads, int length, int dim) {
  return table(dtype, {2, heads, length, dim});
}

std::size_t made(const Mask& mask, int D, int Dv, DType dtype, bool backward,
                 const AttentionOptions& options = {}) {
  return prebuild(tokens(dtype, 4, 300, D), tokens(dtype, 2, 500, D), tokens(dtype, 2, 500, Dv),
                  mask, options, backward, {}, "sm_90a")
      .size();
}

}  // namespace

TEST(what_no_kernel_serves_is_refused) {
  CHECK_THROWS(made(causal(), 64, 64, DType::kF32, false), Error, "bfloat16 and float16");
  CHECK_THROWS(made(causal(), 512, 64, DType::kBF16, false), Error, "up to 256");
  CHECK_THROWS(made(causal(), 36, 64, DType::kBF16, false), Error, "multiples of 8");
}
