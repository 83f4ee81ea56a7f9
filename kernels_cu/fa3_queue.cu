// The queue that FlashAttention-3's thread blocks take their row blocks from, before they start: the longest first, so that all end
// together, but those of `alike` turns and more are one class, in which sequences whose K and V are in L2 together come one behind the
// other, and of those the heads by sections. Sequences from `last_key` on are all together, and of their heads those from `last_head` on
// are one section, the last. What all thread blocks have taken is counted from 0.
//
// A thread has one block of rows of all heads, and counts how many come before it.
//
// Constants: as fa3_forward.cu has them.
#define SUB BC
#include "params.cuh"
#include "fa3_work.cuh"

constexpr int THREADS = 128;

// A block of rows of a head: its class, of which the lower come first; its K/V blocks, -1 of a block that its sequence has not; and the head
// from which on all are one section
struct Item {
  long long level;
  int turns, last_head;
};

// A thread looks for the sequence of a block by itself.
__device__ __forceinline__ Sequence sequence_of(const Params& p, int block) {
  int b = 0, step = 1;
  while (2 * step < p.sequences) step *= 2;
  for (; step > 0; step /= 2) {
    const int next = min(b + step, p.sequences - 1);
    if (p.cu_seqlens_q[next] / BR + next <= block) b = next;
  }
  const int query = p.cu_seqlens_q[b], end_query = p.cu_seqlens_q[b + 1];
  const int key = p.cu_seqlens_k[b], end_key = p.cu_seqlens_k[b + 1];
  return {b, block - query / BR - b, end_query - query, end_key - key, query, key};
}

__device__ __forceinline__ Item item_of(const Params& p, int item) {
  RowBlock place;
  if constexpr (VARLEN) {
    place = packed_place(p, 0, sequence_of(p, item));
  } else {
    const int blocks = blocks_of(p), batch = item / blocks;
    place = {item - batch * blocks, batch, 0, 0, p.Nq, p.Nk, 0, static_cast<long long>(batch) * p.Nk, 0, true, batch};
  }
  const int turns = place.exists ? work_at(p, place, keys_of(p, place)).turns() : -1;
  const long long length = min(turns, p.alike);
  const bool last = place.first_key >= p.last_key;
  return {-length << 32 | min(static_cast<long long>(place.first_key), p.last_key) / p.keys_together, turns, last ? p.last_head : p.heads / PACK};
}

// What fa3_forward calls this block of rows of a head
__device__ __forceinline__ int number_of(const Params& p, int heads, int item, int head) {
  const int blocks = blocks_of(p), batch = VARLEN ? 0 : item / blocks;
  return (batch * heads + head) * blocks + item - batch * blocks;
}

extern "C" __global__ void __launch_bounds__(THREADS) fa3_queue(const __grid_constant__ Params given) {
  const Params p = given;
  __shared__ Item tile[THREADS];
  const int heads = p.heads / PACK, items = p.works / heads, own = blockIdx.x * THREADS + threadIdx.x;
  Item mine = {};
  if (own < items) mine = item_of(p, own);
  int lower = 0, alike = 0, before = 0;  // items of lower classes, of its own, and of its own before it
  for (int first = 0; first < items; first += THREADS) {
    const int there = min(THREADS, items - first);
    __syncthreads();
    if (threadIdx.x < there) tile[threadIdx.x] = item_of(p, first + threadIdx.x);
    __syncthreads();
    for (int n = 0; n < there; n++) {
      const Item other = tile[n];
      const bool same = other.level == mine.level, longer = other.turns > mine.turns;
      lower += other.level < mine.level;
      alike += same;
      before += same && (longer || (other.turns == mine.turns && first + n < own));
    }
  }
  if (own == 0) *p.taken = 0;
  if (own >= items) return;
  for (int head = 0; head < heads; head++) {
    const bool last = head >= mine.last_head;
    const int begin = last ? mine.last_head : head / p.section * p.section;
    const int together = last ? heads - begin : min(p.section, mine.last_head - begin);
    p.queue[lower * heads + begin * alike + before * together + head - begin] = number_of(p, heads, own, head);
  }
}
