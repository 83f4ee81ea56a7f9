// O = 2 Q, a tile of BR x COLUMNS at a time, in and out by tensor maps: what tests of maps in a struct run, a row block a thread block.
#include "tensor_map.cuh"
#include "params.cuh"

__device__ __forceinline__ unsigned shared(const void* at) { return static_cast<unsigned>(__cvta_generic_to_shared(at)); }

extern "C" __global__ void copy_tiles(const __grid_constant__ Params given) {
  extern __shared__ __align__(1024) unsigned char tile[];
  __shared__ __align__(8) unsigned long long full;
  const int blocks = (given.Nq + BR - 1) / BR, row = blockIdx.x % blocks * BR;
  const int head = blockIdx.x / blocks % given.heads, batch = blockIdx.x / blocks / given.heads;
  Element* elements = reinterpret_cast<Element*>(tile);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&full)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(&full)), "n"(BR * COLUMNS * sizeof(Element))
                 : "memory");
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
                 ::"r"(shared(tile)), "l"(&given.Q_map), "r"(0), "r"(row), "r"(head), "r"(batch), "r"(shared(&full)) : "memory");
  }
  asm volatile("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n@!done bra AGAIN;\n}"
               ::"r"(shared(&full)) : "memory");
  for (int i = threadIdx.x; i < BR * COLUMNS; i += blockDim.x) elements[i] = elements[i] + elements[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
                 ::"l"(&given.O_map), "r"(0), "r"(row), "r"(head), "r"(batch), "r"(shared(tile)) : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
  }
}
