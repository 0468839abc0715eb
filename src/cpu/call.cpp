#include "cpu/call.h"

#include <cstring>

#include "base/isa.h"

namespace jali::cpu {
namespace {

const KernelTable& table() {
#if defined(__x86_64__)
  switch (current_isa()) {
    case Isa::kV4:
      return kernels_v4();
    case Isa::kV3:
      return kernels_v3();
    default:
      return kernels_v2();
  }
#else
  return kernels_generic();
#endif
}

}  // namespace

template <>
const Kernels<float>& kernels<float>() {
  return table().f32;
}
template <>
const Kernels<double>& kernels<double>() {
  return table().f64;
}

// Through the kernels, so that every dtype is rounded in one place.
double load_element(const Rows& rows, i64 r, i64 d) {
  const Rows one{offset_bytes(rows.data, rows.dtype, r * rows.stride + d * rows.stride_d),
                 rows.dtype, 0, 1};
  if (rows.dtype == DType::kF64) return *static_cast<const double*>(one.data);
  if (rows.dtype == DType::kF32) return *reinterpret_cast<const float*>(one.data);
  float x[16];
  kernels<float>().pack(one, 1, 1, x, 16);
  return x[0];
}

void store_element(const Rows& rows, i64 r, i64 d, double x) {
  void* at = offset_bytes(rows.data, rows.dtype, r * rows.stride + d * rows.stride_d);
  if (rows.dtype == DType::kF64) {
    *static_cast<double*>(at) = x;
  } else if (rows.dtype == DType::kF32) {
    *static_cast<float*>(at) = static_cast<float>(x);
  } else {
    float from[16] = {static_cast<float>(x)};
    kernels<float>().unpack(from, 16, 1, 1, nullptr, {at, rows.dtype, 0, 1});
  }
}

TileIndex::TileIndex(const BoundMask& mask, Of of) {
  first_.reserve(mask.num_batches() + 1);
  first_.push_back(0);
  for (i32 b = 0; b < mask.num_batches(); ++b) {
    const Frame f = mask.frame(b, 0);
    const i32 tiles =
        of == Of::kRows ? ceil_div(f.num_rows, kTileRows) : ceil_div(f.num_keys, kTileKeys);
    first_.push_back(first_.back() + tiles);
  }
}

i32 TileIndex::sequence(i64 tile) const {
  return static_cast<i32>(std::upper_bound(first_.begin(), first_.end(), tile) - first_.begin()) -
         1;
}

}  // namespace jali::cpu
