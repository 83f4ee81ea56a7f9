// Clusters of Hopper: thread blocks on neighbouring multiprocessors, each of which reaches the others' shared memory. A block is named by
// its rank among them. What lies in the other blocks has the addresses that it has in this one.
#pragma once
#include "tma.cuh"

// All threads of all blocks of the cluster meet; what they have written, barriers included, is there for all behind it.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Where an address of this block's shared memory is in that of block `rank`
__device__ __forceinline__ unsigned address_in(unsigned address, int rank) {
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// An arrival at the barrier of block `rank`
__device__ __forceinline__ void arrive_in(unsigned barrier, int rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in(barrier, rank)) : "memory");
}
__device__ __forceinline__ void store_in(unsigned to, int rank, int x) {
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(address_in(to, rank)), "r"(x) : "memory");
}
// Copies bytes of this block to block `rank`, whose barrier has to expect them.
__device__ __forceinline__ void copy_to(unsigned to, unsigned from, int bytes, unsigned barrier, int rank) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(address_in(to, rank)), "r"(from), "r"(bytes), "r"(address_in(barrier, rank)) : "memory");
}
// A box for the first COUNT blocks, to the same place of each, where the same barrier of each has to expect it
template <int COUNT>
__device__ __forceinline__ void load_box_for_all(unsigned to, const TensorMap& map, unsigned barrier, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
               ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "h"(static_cast<short>((1 << COUNT) - 1)) : "memory");
}
