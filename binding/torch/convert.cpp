#include "convert.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace jali::binding {
namespace {

struct TypePair {
  ScalarType torch;
  DType jali;
};
constexpr TypePair kTypes[] = {
    {ScalarType::Double, DType::kF64},    {ScalarType::Float, DType::kF32},
    {ScalarType::BFloat16, DType::kBF16}, {ScalarType::Half, DType::kF16},
    {ScalarType::Long, DType::kI64},      {ScalarType::Int, DType::kI32},
    {ScalarType::Bool, DType::kBool},     {ScalarType::Char, DType::kBool},  // tile classes: bytes
};

DType dtype_of(ScalarType type) {
  for (const TypePair& pair : kTypes) {
    if (pair.torch == type) return pair.jali;
  }
  throw Error(Error::Kind::kType,
              std::string("jali takes tensors of float64, float32, bfloat16, float16, int64, "
                          "int32 or bool, got ") +
                  toString(type) + "; convert it with .to(dtype)");
}

/// The first one of those that dtype_of takes for `type`.
ScalarType scalar_type_of(DType type) {
  const TypePair* pair = kTypes;
  while (pair->jali != type) ++pair;
  return pair->torch;
}

Tensor empty_strided(std::int64_t rank, const std::int64_t* shape, const std::int64_t* strides,
                     ScalarType dtype, DeviceType device, int device_index) {
  AtenTensorHandle handle;
  std::int32_t type =
      device == DeviceType::kCUDA ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
  auto number = torch::stable::detail::to<std::int32_t>(torch::stable::detail::from(dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(rank, shape, strides, number, type, device_index, &handle));
  return Tensor(handle);
}

TensorView view_without_place(const Tensor& tensor) {
  TensorView result;
  auto shape = tensor.sizes();
  auto strides = tensor.strides();
  if (shape.size() > TensorView::kMaxRank) {
    throw Error(Error::Kind::kValue,
                "jali takes tensors of at most 5 dims, got " + std::to_string(shape.size()));
  }
  result.dtype = dtype_of(tensor.scalar_type());
  result.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), result.shape);
  std::copy(strides.begin(), strides.end(), result.stride);
  return result;
}

}  // namespace

TensorView view(const Tensor& tensor) {
  TensorView result = view_without_place(tensor);
  if (tensor.is_cuda()) {
    result.device = DeviceType::kCUDA;
    result.device_index = tensor.get_device_index();
  } else if (!tensor.is_cpu()) {
    throw Error(Error::Kind::kUnsupported,
                "jali takes tensors on the CPU and on NVIDIA GPUs; move them there with .cpu() or "
                ".cuda()");
  }
  result.data = tensor.data_ptr();
  return result;
}

TensorView view(const MaybeTensor& tensor) { return tensor ? view(*tensor) : TensorView(); }

TensorView view_as_if_on_gpu(const Tensor& tensor) {
  constexpr std::uintptr_t kAligned = 4096;
  TensorView result = view_without_place(tensor);
  result.device = DeviceType::kCUDA;
  result.data = reinterpret_cast<void*>(kAligned);
  return result;
}

TensorView with_dense_strides(TensorView view) {
  std::int64_t stride = 1;
  for (int d = view.rank; d-- > 0; stride *= std::max<std::int64_t>(view.shape[d], 1)) {
    view.stride[d] = stride;
  }
  return view;
}

std::vector<TensorView> views(const std::vector<Tensor>& tensors, Viewer see) {
  std::vector<TensorView> result;
  result.reserve(tensors.size());
  for (const Tensor& tensor : tensors) result.push_back(see(tensor));
  return result;
}

Tensor empty(const std::vector<std::int64_t>& shape, ScalarType dtype, const Tensor* like) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;) {
    strides[d - 1] = strides[d] * std::max<std::int64_t>(shape[d], 1);
  }
  const bool gpu = like && like->is_cuda();
  return empty_strided(static_cast<std::int64_t>(shape.size()), shape.data(), strides.data(), dtype,
                       gpu ? DeviceType::kCUDA : DeviceType::kCPU,
                       gpu ? like->get_device_index() : 0);
}

namespace {

/// What empty_in_order() makes, but for the memory.
TensorView in_order(const TensorView& like, std::int64_t last) {
  const int rank = like.rank;
  TensorView made = like;
  if (rank > 0) made.shape[rank - 1] = last;
  // NOTE: _empty_in_order in python/jali/_ops.py repeats this; both must give the same strides.
  int order[TensorView::kMaxRank];
  for (int d = 0; d < rank; ++d) order[d] = d;
  std::sort(order, order + std::max(rank - 1, 0), [&](int a, int b) {
    return like.stride[a] != like.stride[b] ? like.stride[a] > like.stride[b] : a < b;
  });
  std::int64_t stride = 1;
  for (int n = rank; n-- > 0;) {
    made.stride[order[n]] = stride;
    stride *= std::max<std::int64_t>(made.shape[order[n]], 1);
  }
  return made;
}

Tensor empty_as(const TensorView& made) {
  return empty_strided(made.rank, made.shape, made.stride, scalar_type_of(made.dtype), made.device,
                       made.device_index);
}

}  // namespace

Tensor empty_in_order(const TensorView& like, std::int64_t last) {
  return empty_as(in_order(like, last));
}

std::array<Tensor, 3> three_in_order(const std::array<const TensorView*, 3>& likes,
                                     const std::array<std::int64_t, 3>& lasts, bool together) {
  // In elements. Whoever keeps one of the three keeps the others' memory, too: a megabyte of 16-bit numbers.
  constexpr std::int64_t kMost = 1 << 19, kAlignment = 256;
  std::array<TensorView, 3> made;
  std::int64_t offsets[3], total = 0;
  for (int n = 0; n < 3; ++n) {
    made[n] = in_order(*likes[n], lasts[n]);
    together &= made[n].dtype == made[0].dtype && made[n].device == made[0].device &&
                made[n].device_index == made[0].device_index;
    offsets[n] = total;
    total += (made[n].num_elements() + kAlignment - 1) / kAlignment * kAlignment;
  }
  if (!together || total > kMost) return {empty_as(made[0]), empty_as(made[1]), empty_as(made[2])};
  TensorView whole = made[0];
  whole.rank = 1;
  whole.shape[0] = total;
  whole.stride[0] = 1;
  const Tensor storage = empty_as(whole);
  auto part = [&](int n) {
    AtenTensorHandle handle;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
        storage.get(), made[n].rank, made[n].shape, made[n].stride, offsets[n], &handle));
    return Tensor(handle);
  };
  return {part(0), part(1), part(2)};
}

void call_guarded(void (*kernel)(StableIValue*, std::uint64_t, std::uint64_t), StableIValue* stack,
                  std::uint64_t num_args, std::uint64_t num_outputs) {
  try {
    kernel(stack, num_args, num_outputs);
  } catch (const Error& error) {
    switch (error.kind()) {
      case Error::Kind::kValue:
        throw std::invalid_argument(error.what());
      case Error::Kind::kType:
        throw std::runtime_error(std::string("TypeError: ") + error.what());
      case Error::Kind::kUnsupported:
        throw std::runtime_error(std::string("NotImplementedError: ") + error.what());
    }
  }
}

}  // namespace jali::binding
