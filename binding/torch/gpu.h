// What a call on a GPU needs of PyTorch: the current stream, memory, tensors that the copy engine
// can load.
#pragma once

#include "convert.h"

namespace jali::binding {

/// Sets the stream and the allocator of a call while it lives. What it allocated goes back to
/// PyTorch's allocator, which hands it out again only behind the work on that stream.
class GpuCall {
 public:
  /// `like`: a tensor on the GPU of the call.
  GpuCall(const Tensor& like, AttentionOptions& options);
  GpuCall(const GpuCall&) = delete;
  GpuCall& operator=(const GpuCall&) = delete;

 private:
  static void* allocate(void* call, std::size_t bytes);
  const Tensor& like_;
  std::vector<Tensor> memory_;
};

/// A width of rows that suits the copy engine, at least the given one.
std::int64_t suited_width(std::int64_t width);
/// What Input would take of such a tensor, as view_as_if_on_gpu says it.
TensorView view_suited_to_gpu(const Tensor& tensor);

/// A tensor as a call takes it: itself where it is on the CPU, or its address and strides are multiples
/// of 16 bytes and its last dim one of 8 elements; else a contiguous copy, its last dim padded with zeros.
struct Input {
  /// The tensor must outlive it.
  explicit Input(const Tensor& tensor);
  TensorView given;  // the tensor
  TensorView taken;  // what the call takes
  MaybeTensor copy;
};

}  // namespace jali::binding
