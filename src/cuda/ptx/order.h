// Order between kernels of a stream; between blocks: counters in global memory.
#pragma once

#include "cuda/ptx/barrier.h"

namespace jali::ptx {

/// Waits until what came before this kernel in its stream is complete, and visible: it may have been launched while
/// that still ran (Call::launch). The next kernel may be, too. Before any access to global memory, in all threads.
JALI_DEVICE void begin_kernel() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

JALI_DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
/// Between ordinary accesses and those of the copy engine, to global memory. PERF: to any memory it would be
/// a fence of the device, too: thousands of cycles.
JALI_DEVICE void fence_proxies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/// Until *counter >= value; what was released before that is visible then, to the copy engine too.
/// PERF: acquired once, since that empties the L1 cache.
JALI_DEVICE void wait_at_least(const i32* counter, i32 value) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b32 x;\nwait:\nld.relaxed.gpu.global.b32 x, [%0];\n"
      "setp.ge.s32 p, x, %1;\n@p bra done;\nbra wait;\ndone:\n"
      "ld.acquire.gpu.global.b32 x, [%0];\n}" ::"l"(counter),
      "r"(value)
      : "memory");
  fence_proxies();
}
/// Until *counter >= value, `seen` being a value that it had before. It says nothing of other memory.
JALI_DEVICE void await_count(const i32* counter, i32 value, i32 seen) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b32 x;\nmov.b32 x, %2;\nwait:\nsetp.ge.s32 p, x, %1;\n@p bra done;\n"
      "ld.relaxed.gpu.global.b32 x, [%0];\nbra wait;\ndone:\n}" ::"l"(counter),
      "r"(value), "r"(seen)
      : "memory");
}
/// Counts as `count` if `condition`, and says nothing of other memory.
JALI_DEVICE void add_if(i32* counter, i32 count, bool condition) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p red.relaxed.gpu.global.add.s32 [%0], %1;\n}" ::
          "l"(counter),
      "r"(count), "r"(static_cast<i32>(condition))
      : "memory");
}
/// Of a counter that others change.
JALI_DEVICE i32 glance(const i32* counter) {
  i32 x;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  return x;
}
/// Whether *counter >= value; if so, what was released before that is visible, as above.
JALI_DEVICE bool is_at_least(const i32* counter, i32 value) {
  if (glance(counter) < value) return false;
  asm volatile("{\n.reg .b32 x;\nld.acquire.gpu.global.b32 x, [%0];\n}" ::"l"(counter) : "memory");
  fence_proxies();
  return true;
}
/// Releases what this thread did, and counts it as `count` if `condition`.
JALI_DEVICE void release_if(i32* counter, i32 count, bool condition) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n"
      "@p red.release.gpu.global.add.s32 [%0], %1;\n}" ::"l"(counter),
      "r"(count), "r"(static_cast<i32>(condition))
      : "memory");
}

}  // namespace jali::ptx
