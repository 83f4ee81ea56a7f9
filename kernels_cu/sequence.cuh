// Batches of sequences of their own lengths, packed along one axis: sequence b has the queries cu_seqlens_q[b] to
// cu_seqlens_q[b + 1] - 1, and the keys likewise.
#pragma once

struct Sequence {
  int queries, keys;
  long long first_query, first_key;
};

// Four threads read a sequence's bounds for the block, through 16 bytes of `scratch` in shared memory, which are free again
// when this returns.
__device__ __forceinline__ Sequence find_sequence(const int* cu_seqlens_q, const int* cu_seqlens_k, int batch, void* scratch) {
  int* bounds = static_cast<int*>(scratch);
  if (threadIdx.x < 4) bounds[threadIdx.x] = (threadIdx.x < 2 ? cu_seqlens_q : cu_seqlens_k)[batch + threadIdx.x % 2];
  __syncthreads();
  const Sequence found = {bounds[1] - bounds[0], bounds[3] - bounds[2], bounds[0], bounds[2]};
  __syncthreads();
  return found;
}
