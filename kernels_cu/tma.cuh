// Hopper's copies of whole tiles between HBM and shared memory (TMA), and the barriers in shared memory that say when they are there.
// Addresses of shared memory are 32-bit ones.
#pragma once
#include "params.cuh"

// --- mbarriers: `arrivals` and all announced bytes complete a phase, and phases are told apart by their parity, 0 first.

__device__ __forceinline__ void init_barrier(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes what was initialised visible to copies; other threads want a __syncthreads() besides.
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// An arrival, and so many bytes that copies will bring
__device__ __forceinline__ void arrive_expecting(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_for(unsigned barrier, int parity) {
  asm volatile("{\n.reg .pred done;\nAGAIN_%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN_%=;\n}"
               ::"r"(barrier), "r"(parity) : "memory");
}

// --- copies: a box of a tensor (d, row, head, batch), as its map says. What lies outside of the tensor comes as zeros, and stays
// unwritten. Where the map takes HEADS heads together, it is (d, head of them, row, which of these sets, batch).

template <int HEADS>
__device__ __forceinline__ void load_box(unsigned to, const TensorMap& map, unsigned barrier, int column, int row, int head, int batch) {
  if constexpr (HEADS == 1) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
  } else {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, 0, %4, %5, %6}], [%2];"
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
  }
}
template <int HEADS>
__device__ __forceinline__ void store_box(const TensorMap& map, unsigned from, int column, int row, int head, int batch) {
  if constexpr (HEADS == 1) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 ::"l"(&map), "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
  } else {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, 0, %3, %4, %5}], [%1];"
                 ::"l"(&map), "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
  }
}
// Adds float32 numbers that lie together, by their number of bytes, a multiple of 16, as both addresses are.
__device__ __forceinline__ void add_floats(float* to, unsigned from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               ::"l"(__cvta_generic_to_global(to)), "r"(from), "r"(bytes) : "memory");
}
// Until the stores and additions have read shared memory
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Until they have been made
__device__ __forceinline__ void wait_for_additions() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// What this thread has written to shared memory is there for copies and warpgroup products that begin behind a barrier.
__device__ __forceinline__ void publish_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
