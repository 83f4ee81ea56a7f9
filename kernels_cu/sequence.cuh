// Which rows or keys a thread block has.
// Constants: VARLEN (whether batches are sequences of their own lengths, packed one behind the other).
//
// Batches of sequences of their own lengths, packed along one axis: sequence b has the queries cu_seqlens_q[b] to
// cu_seqlens_q[b + 1] - 1, and the keys likewise.
#pragma once

struct Sequence {
  int block;  // of this thread block: which of the sequence's blocks, if it has so many
  int queries, keys;
  long long first_query, first_key;
};

// Whose blocks of SIZE rows thread block `index` of a head has. Along one axis, of which `cu_seqlens` has the bounds, sequence b has the
// thread blocks from cu_seqlens[b] / SIZE + b on: enough for its rows, wherever they begin, and at most one too many. The first warp looks
// for b among 32 bounds at a time, and tells the others through 20 bytes of `scratch` in shared memory, which are free again when
// this returns.
template <int SIZE>
__device__ __forceinline__ Sequence find_sequence(const int* cu_seqlens, const int* cu_seqlens_q, const int* cu_seqlens_k,
                                                  int sequences, int index, void* scratch) {
  int* found = static_cast<int*>(scratch);
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int step = 1, first = 0;  // the thread blocks of sequence `first` begin at `index` or before
    while (32 * step < sequences) step *= 32;
    for (; step > 0; step /= 32) {
      const int b = first + lane * step;
      const bool before = cu_seqlens[min(b, sequences - 1)] / SIZE + b <= index && b < sequences;
      first += (__popc(__ballot_sync(~0u, before)) - 1) * step;
    }
    if (lane < 4) found[lane] = (lane < 2 ? cu_seqlens_q : cu_seqlens_k)[first + lane % 2];
    if (lane == 0) found[4] = first;
  }
  __syncthreads();
  const int begin = cu_seqlens == cu_seqlens_q ? found[0] : found[2];
  const Sequence sequence = {index - begin / SIZE - found[4], found[1] - found[0], found[3] - found[2], found[0], found[2]};
  __syncthreads();
  return sequence;
}

// Of the kernels whose thread blocks are row blocks of SIZE rows of a query head
struct RowBlock {
  int i, batch, head;
  int queries, keys;  // of the batch, or of the sequence
  long long first_query, first_key, L_row;  // row 0 of Q and of K among packed ones, and of L
  bool exists;
};

// Row blocks of one head are neighbours, so that they share K and V in L2; the longest (of a sequence) come first.
template <int SIZE>
__device__ __forceinline__ RowBlock find_row_block(int Nq, int Nk, int heads, const int* cu_seqlens_q, const int* cu_seqlens_k,
                                                   int total_q, int sequences, void* scratch) {
  if constexpr (VARLEN) {
    const int blocks = gridDim.x / heads, head = blockIdx.x / blocks;
    const Sequence sequence = find_sequence<SIZE>(cu_seqlens_q, cu_seqlens_q, cu_seqlens_k, sequences, blockIdx.x % blocks, scratch);
    const int Tr = (sequence.queries + SIZE - 1) / SIZE;
    const long long L_row = head * static_cast<long long>(total_q) + sequence.first_query;
    return {Tr - 1 - sequence.block, 0,     head, sequence.queries, sequence.keys, sequence.first_query, sequence.first_key,
            L_row,                   sequence.block < Tr};
  } else {
    const int Tr = (Nq + SIZE - 1) / SIZE, pair = blockIdx.x / Tr;
    const int i = Tr - 1 - blockIdx.x % Tr;
    return {i, pair / heads, pair % heads, Nq, Nk, 0, 0, static_cast<long long>(pair) * total_q, true};
  }
}
