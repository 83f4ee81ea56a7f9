// The row blocks of FlashAttention-3's kernel: which one a number is, and which K/V blocks it visits.
// Constants: BR, BC; PACK (query heads of one K/V head whose rows share blocks); those of mask.cuh and sequence.cuh.
#pragma once
#include "mask.cuh"
#include "sequence.cuh"

constexpr int NO_WORK = -1;

// Row blocks of a batch (of a head, or of PACK heads); of packed sequences, of all of them
__device__ __forceinline__ int blocks_of(const Params& p) {
  return VARLEN ? p.total_q / BR + p.sequences : (p.Nq * PACK + BR - 1) / BR;
}

// Row blocks are numbered by head, those of all batches one behind the other; `sequence` is whose the block is.
__device__ __forceinline__ RowBlock packed_place(const Params& p, int head, const Sequence& sequence) {
  const long long L_row = head * static_cast<long long>(p.total_q) + sequence.first_query;
  return {sequence.block, 0,     head, head / p.group, sequence.queries, sequence.keys, sequence.first_query, sequence.first_key,
          L_row,          sequence.block * BR < sequence.queries, sequence.number};
}
__device__ __forceinline__ RowBlock place_of(const Params& p, int work) {
  const int blocks = blocks_of(p), pair = work / blocks, i = work - pair * blocks;
  if constexpr (VARLEN) return packed_place(p, pair, find_sequence<BR>(p, i));
  const int batch = pair / (p.heads / PACK), head = pair * PACK - batch * p.heads;
  return {i, batch, head, head / p.group, p.Nq, p.Nk, 0, 0, static_cast<long long>(pair) * PACK * p.Nq, true, batch};
}

// A row block of a query head (of PACK heads from that one on), and the K/V blocks that some row of it sees: from `first` to before
// `end`. Every row sees all of those from `whole_begin` to `whole_end`.
struct Work {
  RowBlock place;
  Masks masks;
  int first, end, whole_begin, whole_end;

  __device__ __forceinline__ int row() const { return place.i * BR; }
  __device__ __forceinline__ int turns() const { return end - first; }
};

// `keys`: how many its batch has
__device__ __forceinline__ Work work_at(const Params& p, const RowBlock& place, int keys) {
  Work w;
  w.place = place;
  w.masks = masks_of(p, place.batch, place.head, place.Nq, place.Nk, keys);
  const int row = w.row() / PACK, last_row = min((w.row() + BR) / PACK, place.Nq) - 1;
  const int first_key = visible_begin(w.masks, row), end_key = visible_end(w.masks, last_row);
  w.first = first_key / BC, w.end = first_key < end_key ? (end_key + BC - 1) / BC : w.first;
  w.whole_begin = (visible_begin(w.masks, last_row) + BC - 1) / BC, w.whole_end = visible_end(w.masks, row) / BC;
  return w;
}
__device__ __forceinline__ int keys_of(const Params& p, const RowBlock& place) {
  return PADDED ? max(0, min(place.Nk, p.key_lengths[place.batch])) : place.Nk;
}
// A warp's; its first lane asks for the keys.
__device__ __forceinline__ Work work_of(const Params& p, const RowBlock& place) {
  int keys = place.Nk;
  if constexpr (PADDED) {
    if (threadIdx.x % 32 == 0) keys = keys_of(p, place);
    keys = __shfl_sync(~0u, keys, 0);
  }
  return work_at(p, place, keys);
}
