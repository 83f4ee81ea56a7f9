// Which rows or keys a thread block has.
// Constants: VARLEN (whether batches are sequences of their own lengths, packed one behind the other).
//
// Batches of sequences of their own lengths, packed along one axis: sequence b has the queries cu_seqlens_q[b] to
// cu_seqlens_q[b + 1] - 1, and the keys likewise.
#pragma once
#include "params.cuh"

struct Sequence {
  int number;
  int block;  // of this thread block: which of the sequence's blocks, if it has so many
  int queries, keys;
  long long first_query, first_key;
};

// Whose blocks of SIZE rows thread block `index` of a head has. Along one axis, of which `cu_seqlens` has the bounds, sequence b has the
// thread blocks from cu_seqlens[b] / SIZE + b on: enough for its rows, wherever they begin, and at most one too many. A warp looks
// for b among 32 bounds at a time; its lanes 0 to 3 then have the bounds of b's queries and of its keys.
template <int SIZE>
__device__ __forceinline__ int search_sequence(const Params& p, const int* cu_seqlens, int index, int& bound) {
  const int lane = threadIdx.x % 32;
  int step = 1, first = 0;  // the thread blocks of sequence `first` begin at `index` or before
  while (32 * step < p.sequences) step *= 32;
  for (; step > 0; step /= 32) {
    const int b = first + lane * step;
    const bool before = cu_seqlens[min(b, p.sequences - 1)] / SIZE + b <= index && b < p.sequences;
    first += (__popc(__ballot_sync(~0u, before)) - 1) * step;
  }
  if (lane < 4) bound = (lane < 2 ? p.cu_seqlens_q : p.cu_seqlens_k)[first + lane % 2];
  return first;
}

// The first warp looks for all, and tells the others through 20 bytes of `scratch` in shared memory, which are free again when this
// returns.
template <int SIZE>
__device__ __forceinline__ Sequence find_sequence(const Params& p, const int* cu_seqlens, int index, void* scratch) {
  int* found = static_cast<int*>(scratch);
  if (threadIdx.x < 32) {
    int bound;
    const int first = search_sequence<SIZE>(p, cu_seqlens, index, bound);
    if (threadIdx.x < 4) found[threadIdx.x] = bound;
    if (threadIdx.x == 0) found[4] = first;
  }
  __syncthreads();
  const int begin = cu_seqlens == p.cu_seqlens_q ? found[0] : found[2];
  const Sequence sequence = {found[4], index - begin / SIZE - found[4], found[1] - found[0], found[3] - found[2], found[0], found[2]};
  __syncthreads();
  return sequence;
}

// Each warp looks for itself, among the bounds of the queries.
template <int SIZE> __device__ __forceinline__ Sequence find_sequence(const Params& p, int index) {
  int bound = 0;
  const int first = search_sequence<SIZE>(p, p.cu_seqlens_q, index, bound);
  const int query = __shfl_sync(~0u, bound, 0), end_query = __shfl_sync(~0u, bound, 1);
  const int key = __shfl_sync(~0u, bound, 2), end_key = __shfl_sync(~0u, bound, 3);
  return {first, index - query / SIZE - first, end_query - query, end_key - key, query, key};
}

// What a thread block has that is a row block of a query head
struct RowBlock {
  int i, batch, head, kv_head;
  int Nq, Nk;  // of the batch, or of the sequence
  long long first_query, first_key, L_row;  // row 0 of Q and of K among packed ones, and of L
  bool exists;
  int sequence;  // which of the batch, or of the packed ones

  // Which of all sequences' row blocks of SIZE rows is this one's first, 0 where they are not packed
  template <int SIZE> __device__ __forceinline__ long long first_block() const { return VARLEN ? first_query / SIZE + sequence : 0; }
  // Where row `row` of the head begins in Q and what is like it, and where row 0 in K and V
  template <typename T> __device__ __forceinline__ T* query(const Rows<T>& tensor, int row) const {
    return tensor.of(batch, head) + (first_query + row) * tensor.row;
  }
  template <typename T> __device__ __forceinline__ T* keys(const Rows<T>& tensor) const {
    return tensor.of(batch, kv_head) + first_key * tensor.row;
  }
};

// blockIdx.x, read again wherever this is asked for, so that what follows from it need not be kept through a loop.
__device__ __forceinline__ int block_index() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// Which row block of SIZE rows this is, of sequences that are alike
template <int SIZE> __device__ __forceinline__ int find_block(int Nq) {
  const int Tr = (Nq + SIZE - 1) / SIZE;
  return Tr - 1 - block_index() % Tr;
}

// Row blocks of SIZE rows of one head are neighbours, so that they share K and V in L2; the longest (of a sequence) come first.
template <int SIZE> __device__ __forceinline__ RowBlock find_row_block(const Params& p, void* scratch) {
  if constexpr (VARLEN) {
    const int blocks = gridDim.x / p.heads, head = blockIdx.x / blocks;
    const Sequence sequence = find_sequence<SIZE>(p, p.cu_seqlens_q, blockIdx.x % blocks, scratch);
    const int Tr = (sequence.queries + SIZE - 1) / SIZE;
    const long long L_row = head * static_cast<long long>(p.total_q) + sequence.first_query;
    return {Tr - 1 - sequence.block, 0,     head, head / p.group, sequence.queries, sequence.keys, sequence.first_query,
            sequence.first_key,      L_row, sequence.block < Tr, sequence.number};
  } else {
    const int Tr = (p.Nq + SIZE - 1) / SIZE, index = block_index(), pair = index / Tr, head = pair % p.heads;
    const int i = Tr - 1 - index % Tr, batch = pair / p.heads;
    return {i, batch, head, head / p.group, p.Nq, p.Nk, 0, 0, static_cast<long long>(pair) * p.total_q, true, batch};
  }
}
