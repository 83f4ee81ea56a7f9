// Roles of warps on Hopper, as FlashAttention-3's kernels have them: a producer warp fills the slots of a ring by TMA, consumer warpgroups
// meet at named barriers.
// Constants: STAGES (slots of a ring).
#pragma once
#include "tma.cuh"
#include "wgmma.cuh"

// A place in a ring: the slot, and the parity of the phase in which it is filled
struct Slot {
  int index, parity;
  __device__ __forceinline__ Slot next() const { return index + 1 < STAGES ? Slot{index + 1, parity} : Slot{0, parity ^ 1}; }
};

// --- the producer

template <int ROWS, int HEADS = 1>
__device__ __forceinline__ void load_tile(unsigned to, const TensorMap& map, unsigned full, int slabs, int row, int head, int batch) {
  for (int slab = 0; slab < slabs; slab++) load_box<HEADS>(to + slab * ROWS * SLAB_ROW, map, full, slab * SLAB, row, head, batch);
}
// Rows of a tile that are not there, though the tensor has something in their place: zeros, since a weight of 0 does not make nothing of
// an infinity. A warp writes them; publish_writes() and __syncwarp() are to follow.
template <int ROWS> __device__ __forceinline__ void clear_rows(unsigned tile, int slabs, int from) {
  for (int chunk = from * 8 + threadIdx.x % 32; chunk < ROWS * 8; chunk += 32)
    for (int slab = 0; slab < slabs; slab++)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + slab * ROWS * SLAB_ROW + chunk * 16), "r"(0) : "memory");
}

// --- consumers

// Named barriers: wait for the others of so many threads, or let them pass without a wait
__device__ __forceinline__ void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void let_pass(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
