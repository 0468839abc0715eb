// Copies from global to shared memory: boxes of a tensor by the bulk copy engine (TMA), 16 bytes by a
// thread.
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
                          i32 c3, i32 c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

/// Stores the map's box from shared memory, but for elements outside the tensor; part of the thread's
/// group (bulk.h).
JALI_DEVICE void store_box(const TensorMap& map, u32 shared, i32 c0, i32 c1, i32 c2, i32 c3,
                           i32 c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], "
      "[%1];" ::"l"(&map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Copies of 16 bytes by each thread, past the L1 cache; they do not queue at the engine.

/// Begins one, or clears the 16 bytes of shared memory unless `condition`.
JALI_DEVICE void copy_or_clear(u32 shared, const void* global, bool condition) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(condition ? 16 : 0)
               : "memory");
}
/// Begins one of the first `bytes` of 16, the others become zeros, if `condition`. Predicated, not branched,
/// as barrier_arrive_if.
JALI_DEVICE void copy_some_if(u32 shared, u64 global, i32 bytes, bool condition) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n"
      "@p cp.async.cg.shared.global [%0], [%1], 16, %2;\n}" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(static_cast<i32>(condition))
      : "memory");
}
/// Makes a group of those that this thread began since the last one.
JALI_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Until all but the newest `kGroups` groups of this thread are there.
template <i32 kGroups>
JALI_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace jali::ptx
