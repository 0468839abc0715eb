#include "base/tensor.h"

namespace jali {

TensorView::TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> sizes)
    : data(data), dtype(dtype), rank(static_cast<int>(sizes.size())) {
  if (rank > kMaxRank) {
    throw Error(Error::Kind::kValue, "TensorView: rank " + std::to_string(rank) + ", at most 5");
  }
  int dim = 0;
  for (std::int64_t n : sizes) shape[dim++] = n;
  std::int64_t step = 1;
  for (dim = rank - 1; dim >= 0; --dim) {
    stride[dim] = step;
    step *= shape[dim];
  }
}

std::int64_t TensorView::num_elements() const {
  std::int64_t n = 1;
  for (int dim = 0; dim < rank; ++dim) n *= shape[dim];
  return n;
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return "float64";
    case DType::kF32:
      return "float32";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    case DType::kI64:
      return "int64";
    case DType::kI32:
      return "int32";
    case DType::kBool:
      return "bool";
  }
  return "?";
}

std::int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kBool:
      return 1;
  }
  return 0;
}

std::string shape_text(const TensorView& t) {
  std::string text = "[";
  for (int dim = 0; dim < t.rank; ++dim) {
    text += (dim ? ", " : "") + std::to_string(t.shape[dim]);
  }
  return text + "]";
}

void check_device(const char* name, const TensorView& t, DeviceType device, int index,
                  const char* leaf) {
  if (t.device == device && (device == DeviceType::kCPU || t.device_index == index)) return;
  auto place = [](DeviceType type, int at) {
    return type == DeviceType::kCPU ? std::string("the CPU") : "GPU " + std::to_string(at);
  };
  const std::string of = leaf ? std::string(leaf) + ": " : "";
  throw Error(Error::Kind::kType, of + name + " is on " + place(t.device, t.device_index) +
                                      ", the call's tensors on " + place(device, index) +
                                      "; move it there with .to()");
}

}  // namespace jali
