// Plain bulk copies and reductions between shared and global memory, beside the tensor maps' boxes.
#pragma once

#include "cuda/ptx/barrier.h"

namespace jali::ptx {

/// Loads bytes (a multiple of 16, both addresses aligned to 16); they count towards the barrier.
JALI_DEVICE void load_bulk(u32 shared, const void* global, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

/// Adds floats in shared memory to those at `global`, if `condition`; part of the thread's group.
/// Predicated, not branched, as barrier_arrive_if.
JALI_DEVICE void add_bulk_if(float* global, u32 shared, u32 bytes, bool condition) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n"
      "@p cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n}" ::"l"(
          global),
      "r"(shared), "r"(bytes), "r"(static_cast<i32>(condition))
      : "memory");
}
JALI_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Until all groups of this thread have read their shared memory.
JALI_DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
/// Until all groups of this thread are done: what they wrote is visible to the thread.
JALI_DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace jali::ptx
