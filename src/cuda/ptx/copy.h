// The bulk copy engine (TMA): boxes of a tensor between global and shared memory.
#pragma once

#include "cuda/ptx/barrier.h"

namespace jali::ptx {

/// 128 bytes made by cuTensorMapEncodeTiled; a __grid_constant__ kernel parameter.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

/// Fetches the map itself, so that the first copy need not wait for it.
JALI_DEVICE void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Loads the map's box at (c0, …), innermost first, to shared memory; its bytes count towards the
/// barrier's phase. Elements outside the tensor arrive as zeros.
JALI_DEVICE void load_box(u32 shared, const TensorMap& map, u32 barrier, i32 c0, i32 c1, i32 c2,
                          i32 c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
JALI_DEVICE void load_box(u32 shared, const TensorMap& map, u32 barrier, i32 c0, i32 c1, i32 c2,
                          i32 c3, i32 c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

}  // namespace jali::ptx
