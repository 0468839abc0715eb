// Two blocks of a cluster: each reaches the other's shared memory.
#pragma once

#include "cuda/ptx/barrier.h"

namespace jali::ptx {

/// Which of the two this block is.
JALI_DEVICE u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// Until all threads of the cluster that have not ended come here.
JALI_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}
/// The address in the cluster of what lies at `shared` in the other block.
JALI_DEVICE u32 of_peer(u32 shared) {
  u32 address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(shared), "r"(cluster_rank() ^ 1));
  return address;
}
/// Arrives at a barrier of the other block. PERF: not `.release.cluster`, of which ptxas makes a fence. NOTE: so it
/// overtakes loads that nobody has waited for; `condition` may ask for what they bring.
JALI_DEVICE void barrier_arrive_at_peer_if(u32 barrier, bool condition) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n}" ::"r"(of_peer(barrier)),
      "r"(static_cast<i32>(condition))
      : "memory");
}
/// Writes a word to the same place in the other block; its 4 bytes count towards that block's barrier.
JALI_DEVICE void store_at_peer(u32 to, i32 value, u32 barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
          of_peer(to)),
      "r"(value), "r"(of_peer(barrier))
      : "memory");
}
/// Copies bytes (a multiple of 16) to the same place in the other block; they count towards that block's barrier.
JALI_DEVICE void copy_to_peer_if(u32 to, u32 from, u32 bytes, u32 barrier, bool condition) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
      "@p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];\n}" ::"r"(of_peer(to)),
      "r"(from), "r"(bytes), "r"(of_peer(barrier)), "r"(static_cast<i32>(condition))
      : "memory");
}

}  // namespace jali::ptx
