// Between torch's stable ABI and jali.h: views of tensors, new tensors, errors.
#pragma once

#include <jali/jali.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace jali::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

/// What a Tensor argument of a schema arrives as; an absent one has no value.
using MaybeTensor = std::optional<Tensor>;

/// A view of the tensor's memory. Throws kUnsupported for devices other than CPUs and NVIDIA GPUs.
TensorView view(const Tensor& tensor);
TensorView view(const MaybeTensor& tensor);
/// A view that says of a tensor, wherever it is (meta too), that it is on the first GPU; its address
/// must not be read.
TensorView view_as_if_on_gpu(const Tensor& tensor);

/// The same shape, contiguous.
TensorView with_dense_strides(TensorView view);

/// One of the functions above that take a tensor.
using Viewer = TensorView (*)(const Tensor& tensor);
std::vector<TensorView> views(const std::vector<Tensor>& tensors, Viewer see = view);

/// A new tensor, contiguous, on the CPU or where `like` is.
Tensor empty(const std::vector<std::int64_t>& shape, ScalarType dtype,
             const Tensor* like = nullptr);
/// A new tensor where `like` is, of its dtype and shape but for the size of the last dim, dense, whose
/// dims lie in memory in the order of `like`'s strides (largest first, equal ones as they stand) except
/// for the last dim, which is innermost.
Tensor empty_in_order(const TensorView& like, std::int64_t last);
/// Three such tensors for `likes` and the sizes of their last dims. together: if they are small, in one
/// allocation; then they share a storage. PERF: in the thread of autograd three allocations take 14 us.
std::array<Tensor, 3> three_in_order(const std::array<const TensorView*, 3>& likes,
                                     const std::array<std::int64_t, 3>& lasts, bool together);

/// Calls a boxed kernel and lets jali::Error reach Python: kValue as ValueError, the others as a
/// RuntimeError whose text begins with the name of the exception that jali._library raises instead.
void call_guarded(void (*kernel)(StableIValue*, std::uint64_t, std::uint64_t), StableIValue* stack,
                  std::uint64_t num_args, std::uint64_t num_outputs);

template <void (*kernel)(StableIValue*, std::uint64_t, std::uint64_t)>
void guarded(StableIValue* stack, std::uint64_t num_args, std::uint64_t num_outputs) {
  call_guarded(kernel, stack, num_args, num_outputs);
}

}  // namespace jali::binding

/// The kernel of an operator from a plain function.
#define JALI_KERNEL(function) &jali::binding::guarded<TORCH_BOX(&function)>
