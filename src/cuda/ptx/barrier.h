// Synchronisation: mbarriers in shared memory, named barriers, fences, register hand-over.
#pragma once

#include "base/hd.h"

#define JALI_DEVICE __device__ __forceinline__

namespace jali::ptx {

/// The 32-bit shared-memory address that the instructions take.
JALI_DEVICE u32 shared_address(const void* p) {
  u32 address;
  asm("{\n.reg .u64 t;\ncvta.to.shared.u64 t, %1;\ncvt.u32.u64 %0, t;\n}" : "=r"(address) : "l"(p));
  return address;
}

// An mbarrier completes a phase when `count` arrivals and all announced bytes are in. Whoever waits
// names the parity of the phase; waiting for parity 1 on a fresh barrier passes at once.
JALI_DEVICE void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
/// Makes initialised barriers visible to the copy engine; before the block's first sync.
JALI_DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// Arrives and announces bytes that a copy will bring.
JALI_DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
JALI_DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// PERF: predicated, not branched: a branch while WGMMAs are in flight costs 2 to 5 %.
JALI_DEVICE void barrier_arrive_if(u32 barrier, bool condition) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier),
      "r"(static_cast<i32>(condition))
      : "memory");
}
JALI_DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\nbra wait;\ndone:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// Passes at once unless `condition`.
JALI_DEVICE void barrier_wait_if(u32 barrier, u32 parity, bool condition) {
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.eq.b32 q, %2, 0;\n@q bra done;\n"
      "wait:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\nbra wait;\ndone:\n}" ::"r"(barrier),
      "r"(parity), "r"(static_cast<i32>(condition))
      : "memory");
}

// Named barriers 1 to 15 (0 is __syncthreads): `threads` of the block, those that wait and those
// that only arrive.
JALI_DEVICE void named_sync(i32 id, i32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
JALI_DEVICE void named_arrive(i32 id, i32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Whether the condition holds for any of the `threads`, which all wait for each other.
JALI_DEVICE bool named_any(i32 id, i32 threads, bool condition) {
  i32 any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %3, 0;\nbar.red.or.pred q, %1, %2, p;\n"
      "selp.b32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<i32>(condition))
      : "memory");
  return any != 0;
}

/// Between ordinary writes to shared memory and their use by the copy engine or the tensor cores.
JALI_DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// NOTE: takes effect only with __launch_bounds__(threads, 1) and one role per warpgroup (PTX,
/// setmaxnreg); the compiler says C7508 when it ignores it.
template <u32 kRegisters>
JALI_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <u32 kRegisters>
JALI_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace jali::ptx
