// Small helpers on TensorView.
#pragma once

#include <jali/jali.h>

#include <string>

namespace jali {

const char* dtype_name(DType dtype);
std::int64_t dtype_bytes(DType dtype);
/// "[2, 8, 128, 64]", for messages.
std::string shape_text(const TensorView& t);

/// Throws unless the tensor, of a leaf if one is named, is on that device.
void check_device(const char* name, const TensorView& t, DeviceType device, int index,
                  const char* leaf = nullptr);

template <class T>
T* data_of(const TensorView& t) {
  return static_cast<T*>(t.data);
}

}  // namespace jali
