#include "gpu.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <string>

namespace jali::binding {
namespace {

constexpr std::int64_t kElements = 8;  // of 16 bits: 16 bytes

// Found at run time, so that one library serves a PyTorch without CUDA too.
void* current_stream(int device) {
  using Get = AOTITorchError (*)(std::int32_t, void**);
  static const Get get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_NOW);
    return library ? reinterpret_cast<Get>(dlsym(library, "aoti_torch_get_current_cuda_stream"))
                   : nullptr;
  }();
  if (!get) {
    throw Error(Error::Kind::kUnsupported,
                "this PyTorch tells no CUDA stream: libtorch_cuda.so is not loaded or too old");
  }
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(get(device, &stream));
  return stream;
}

bool suited(const TensorView& t) {
  const int last = t.rank - 1;
  if (last < 0) return true;  // refused later
  bool suited = t.shape[last] % kElements == 0 &&
                reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 &&
                (t.shape[last] <= 1 || t.stride[last] == 1);
  for (int d = 0; d < last; ++d) {
    suited = suited && (t.shape[d] <= 1 || (t.stride[d] > 0 && t.stride[d] % kElements == 0));
  }
  return suited;
}

}  // namespace

GpuCall::GpuCall(const Tensor& like, AttentionOptions& options) : like_(like) {
  options.stream = current_stream(like.get_device_index());
  options.allocate = allocate;
  options.allocate_context = this;
}

void* GpuCall::allocate(void* call, std::size_t bytes) {
  GpuCall& self = *static_cast<GpuCall*>(call);
  self.memory_.push_back(empty({static_cast<std::int64_t>(bytes)}, ScalarType::Bool, &self.like_));
  return self.memory_.back().mutable_data_ptr();
}

std::int64_t suited_width(std::int64_t width) {
  return (width + kElements - 1) / kElements * kElements;
}

TensorView view_suited_to_gpu(const Tensor& tensor) {
  TensorView view = view_as_if_on_gpu(tensor);
  if (view.rank > 0) view.shape[view.rank - 1] = suited_width(view.size(-1));
  return with_dense_strides(view);
}

Input::Input(const Tensor& tensor) : given(view(tensor)), taken(given) {
  if (given.device == DeviceType::kCPU || suited(given)) return;
  const std::int64_t missing = suited_width(given.size(-1)) - given.size(-1);
  copy = missing > 0 ? torch::stable::pad(tensor, {0, missing}) : torch::stable::contiguous(tensor);
  taken = view(*copy);
}

}  // namespace jali::binding
