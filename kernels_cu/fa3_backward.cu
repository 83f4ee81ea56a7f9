// A backward pass for Hopper: FlashAttention-2's (arXiv 2307.08691, Algorithm 2) by warpgroups with roles, as FlashAttention-3 has
// them (arXiv 2407.08608). A thread block has a K/V block of a key head; a producer warp streams the Q and dO blocks that see it, by
// TMA; consumer warpgroups have 64 keys each. S^T = K Q^T and dP^T = V dO^T (keys x queries) make P^T and dS^T, which stay in registers for
// dV += P^T dO and dK += dS^T Q; dS goes through shared memory besides, where dQ = dS K takes the keys of all warpgroups. A warp
// of its own adds dQ to its sum in HBM by bulk reductions, in the order in which accumulators lie (query_sum.cuh). With ORDERED the
// thread blocks of a head add to the sum of a row block one after the other, in the order of their keys, so that its bits are
// always the same; none waits for one that begins later.
//
// Of WIDE heads registers hold dK and dV of 64 keys by halves of their columns: two warpgroups have the same keys, both make S^T and
// dP^T, and each has half of the columns of dV, dK and dQ. dQ is then added from registers: shared memory has no room for it. Of these heads two
// thread blocks may be a cluster (PAIRED): the keys of both take half of the additions. Q and dO come to both at once, dS goes from
// each to the other, and each makes half of the columns of dQ over the keys of both, in the turn in which dS is made: dS has one room.
//
// The kernels before and behind are FlashAttention-2's (fa2_backward_rows.cuh).
//
// Constants, all from the tile schedule:
//   ELEMENT     __half or __nv_bfloat16               HEAD_DIM, VALUE_DIM  d of Q and K, of V and O
//   BR, BC      rows of a Q block, of a K/V block     STAGES     slots of the rings of Q and of dO
//   CONSUMERS   warpgroups                            CONSUMER_REGISTERS, PRODUCER_REGISTERS  of a thread, once the roles are known
//   PING_PONG   whether warpgroups issue their products in turns        CLUSTER    thread blocks of a cluster
//   LATE        whether dP^T is begun behind P^T, whose registers it then has not beside it
//   QUERY_REGISTERS  of a thread of the warpgroup that makes dQ; 0 if the consumers make it
//   ORDERED     whether dQ is summed in one order
//   CAUSAL, WINDOW, PADDED, BIAS  0 or 1: mask.cuh     COPY_BYTES, SINKS  fa2_backward_rows.cuh
//   MASK, TILES, SCORE  mask_function.cuh, block_mask.cuh, score.cuh      DBIAS      whether the gradient of the bias is summed, by atomics
//   VARLEN      whether batches are sequences of their own lengths, packed one behind the other: sequence.cuh
//   DROPOUT     whether weights are dropped: dropout.cuh
#define SUB BR
#define WITH_DQ 1
#include "block_mask.cuh"
#include "cluster.cuh"
#include "dropout.cuh"
#include "fa2_backward_rows.cuh"
#include "mask.cuh"
#include "mma.cuh"
#include "sequence.cuh"
#include "warp_roles.cuh"
#include "weight.cuh"

constexpr bool APART = QUERY_REGISTERS > 0;  // whether dQ has a warpgroup of its own
constexpr int WARPS = 4 * CONSUMERS, THREADS = WARPGROUP * (1 + CONSUMERS + APART);
constexpr bool WIDE = BC < 64 * CONSUMERS;
constexpr bool PAIRED = CLUSTER > 1;
constexpr int OWN_KEYS = WIDE ? 0 : 64;  // from a warpgroup's first key to the next one's
constexpr int K_SLABS = slabs(HEAD_DIM), V_SLABS = slabs(VALUE_DIM), Q_SLABS = slabs(BR);  // Q's: of the columns of dS^T
constexpr int K_BYTES = BC * SLAB_ROW * K_SLABS, V_BYTES = BC * SLAB_ROW * V_SLABS;
constexpr int Q_BYTES = BR * SLAB_ROW * K_SLABS, dO_BYTES = BR * SLAB_ROW * V_SLABS;
constexpr int dS_BYTES = BC * SLAB_ROW * Q_SLABS, SENT_BYTES = PAIRED ? BC * SLAB_ROW : 0;  // of dS, to the other thread block of a pair: one slab
constexpr bool ONE_ROOM = PAIRED && WIDE;  // of dS, beside what the other one sends
constexpr int ROOM_BYTES = dS_BYTES + SENT_BYTES, PIECE_BYTES = SUM_PIECE * 4, dQ_BYTES = WIDE || APART ? 0 : (BR / 8 + VARLEN) * SUM_TILES * PIECE_BYTES;
constexpr int BOTH = 1, OWN = 2, TURN = OWN + CONSUMERS + APART;  // named barriers: of all consumers; OWN + g, TURN + g of warpgroup g
// dQ_i is BR x d: a warpgroup makes 64 rows or, where there are no more, 64 columns of it.
constexpr bool BY_ROWS = BR > 64;
constexpr bool NUMBERED = VARLEN && (DROPOUT || MASK);  // whether a packed sequence's number matters
static_assert(CLUSTER == 1 || (CLUSTER == 2 && (WIDE ? K_SLABS > 1 && !PING_PONG : APART) && !VARLEN && !SKIPS), "what a pair of thread blocks does");
// Whether P^T is rounded before dP^T is there: under its product where there are registers, and where it takes those of S^T.
constexpr bool EARLY = APART || (BR == 64 && !DROPOUT && !MASK);
static_assert(!APART || !(WIDE || SCALED || DROPOUT) && LATE, "registers: P is rounded before dP^T is begun");
static_assert(!(SKIPS && ORDERED), "a thread block waits for all those of its head before it");
static_assert(STAGES == 2, "dS of a turn and of the one before, by their slots");
static_assert(BR == 64 * (BY_ROWS ? CONSUMERS : 1) && (WIDE || K_SLABS <= (BY_ROWS ? 1 : CONSUMERS)), "a part of dQ a warpgroup");

// The columns of a tile of DIM that a warpgroup has, in its accumulators one behind the other: ENTIRE of whole slabs and, of a slab that two
// share, HALF. That is ALL columns, unless each has ONE_SLAB, or heads are WIDE; or one piece of those, of a slab or the half of one.
constexpr int ALL = -2, ONE_SLAB = -1;
template <int DIM, int PIECE = ALL> struct Columns {
  static constexpr int SLABS = slabs(DIM), OWN_SLABS = SLABS / 2, NEXT = PIECE == ONE_SLAB || WIDE ? SLABS - OWN_SLABS : 0;
  static constexpr int FIRST = PIECE < 0 ? 0 : PIECE, PIECES = WIDE ? NEXT : 1;
  static constexpr int ENTIRE = !WIDE ? (PIECE == ONE_SLAB && DIM > 64 ? 64 : padded(DIM)) : 64 * (PIECE < 0 ? OWN_SLABS : PIECE < OWN_SLABS);
  static constexpr int HALF = WIDE && SLABS % 2 && (PIECE < 0 || PIECE == OWN_SLABS) ? 32 : 0, COUNT = ENTIRE + HALF;
  static constexpr bool LAST = FIRST + 1 == PIECES;
  typedef float Accumulators[COUNT ? COUNT / 8 : 1][4];

  // Bytes from a tile of so many rows to the whole slabs, and to the half of one
  static __device__ __forceinline__ int entire(int group, int rows) { return ((SLABS > 1 ? group * NEXT : 0) + FIRST) * rows * SLAB_ROW; }
  static __device__ __forceinline__ int half(int group, int rows) { return OWN_SLABS * rows * SLAB_ROW + group * (SLAB_ROW / 2); }
  // Which 16 columns of the tile accumulators 16 n to 16 n + 15 are
  static __device__ __forceinline__ int tile(int group, int n) {
    return 16 * n < ENTIRE ? n + (group * NEXT + FIRST) * 4 : n - ENTIRE / 16 + OWN_SLABS * 4 + group * 2;
  }
};
// A QUARTER of them, of a row of slabs or of halves of slabs; of three slabs the last quarter is computed from the third one, and is none.
constexpr int QUARTER = -3;
template <int DIM> struct Columns<DIM, QUARTER> {
  static constexpr int SLABS = slabs(DIM), PARTS = SLABS > 2 ? 1 : 2;  // of a slab
  static constexpr int FIRST = 0, PIECES = 1, ENTIRE = PARTS == 1 ? 64 : 0, HALF = 32 * (PARTS - 1), COUNT = ENTIRE + HALF;
  static constexpr bool LAST = true;
  typedef float Accumulators[COUNT / 8][4];

  static __device__ __forceinline__ int entire(int quarter, int rows) { return min(quarter, SLABS - 1) * rows * SLAB_ROW; }
  static __device__ __forceinline__ int half(int quarter, int rows) { return quarter / 2 * rows * SLAB_ROW + quarter % 2 * (SLAB_ROW / 2); }
  static __device__ __forceinline__ int tile(int quarter, int n) { return quarter * (COUNT / 16) + n; }
};
constexpr int PEER_SLABS = PAIRED ? (K_SLABS + 1) / 2 : 0;  // that have the columns of dQ of a thread block of a pair
constexpr int PEER_BYTES = PEER_SLABS * BC * SLAB_ROW;

typedef Columns<HEAD_DIM> KeyColumns;
typedef Columns<VALUE_DIM> ValueColumns;
typedef Columns<HEAD_DIM, ONE_ROOM ? QUARTER : WIDE ? 0 : BY_ROWS ? ALL : ONE_SLAB> QueryColumns;  // of dQ, or of its first piece
constexpr int QUERY_PARTS = BY_ROWS ? BR / 64 : K_SLABS;  // of dQ: 64 rows, or a slab, unless heads are WIDE
typedef Columns<HEAD_DIM, 1> LastColumns;                                    // of its second one, if there is one

// Calls product(its accumulators, B's first columns) for the whole slabs and for the half of one; B is a tile of so many ROWS.
template <class Own, int ROWS, class Product>
__device__ __forceinline__ void each_product(typename Own::Accumulators& C, unsigned B, int group, Product product) {
  if constexpr (Own::ENTIRE > 0)
    product(reinterpret_cast<float(&)[Own::ENTIRE / 8][4]>(C[0]), Operand::columns(B + Own::entire(group, ROWS), ROWS * SLAB_ROW));
  if constexpr (Own::HALF > 0)
    product(reinterpret_cast<float(&)[Own::HALF / 8][4]>(C[Own::ENTIRE / 8]), Operand::columns(B + Own::half(group, ROWS), ROWS * SLAB_ROW));
}

__device__ __forceinline__ void announce(unsigned full) {
  if (threadIdx.x % 32 == 0) arrive(full);
}
// Of a pair for both
__device__ __forceinline__ void release(unsigned empty) {
  if constexpr (!PAIRED) return announce(empty);
  if (threadIdx.x % 32 < CLUSTER) arrive_in(empty, threadIdx.x % 32);
}

// Shared memory: addresses
struct Shared {
  unsigned K, V, Q, dO, dS, dQ, K_peer;  // (BC x d), (BC x d_v), later dK, dV; STAGES x (BR x d), x (BR x d_v); 2 x (BC x BR); (BR x d) of float32; the other one's keys, this one's columns
  unsigned offsets, origins, D, large;  // of the rows of each slot: what exponents are relative to (weight.cuh), D; whether an origin is not 0
  unsigned kept;  // what a mask says of the row blocks of each query head (block_mask.cuh)
  unsigned work, came, KV_full, Q_full, Q_empty, dO_full, dO_empty, dS_full, dS_empty, dQ_full, dQ_empty;
  unsigned dS_came, K_came;  // from the other thread block of a pair, in the room of barriers that it does not need

  __device__ __forceinline__ explicit Shared(unsigned base) {
    K = base, V = K + K_BYTES, Q = V + V_BYTES, dO = Q + STAGES * Q_BYTES, dS = dO + STAGES * dO_BYTES, dQ = dS + (ONE_ROOM ? 1 : 2) * ROOM_BYTES;
    K_peer = dQ + dQ_BYTES, offsets = K_peer + PEER_BYTES, origins = offsets + STAGES * BR * 4, D = origins + STAGES * BR * 4;
    came = D + STAGES * BR * 4, KV_full = came + 8, dQ_full = came + 16, dQ_empty = came + 24;
    work = came + 32, Q_full = work + 48, Q_empty = Q_full + 8 * STAGES, dO_full = Q_empty + 8 * STAGES, dO_empty = dO_full + 8 * STAGES;
    dS_full = dO_empty + 8 * STAGES, dS_empty = dS_full + 16, large = dS_empty + 16;
    kept = large + 4 * STAGES, dS_came = ONE_ROOM ? dS_full + 8 : dQ_full, K_came = ONE_ROOM ? dS_empty + 8 : dS_came;
  }
  __device__ __forceinline__ void init_barriers() const {
    init_barrier(came, 1), init_barrier(KV_full, 1), init_barrier(dQ_full, APART ? 1 : WARPS), init_barrier(dQ_empty, 1);
    for (int slot = 0; slot < STAGES; slot++) {
      init_barrier(Q_full + 8 * slot, 2), init_barrier(Q_empty + 8 * slot, CLUSTER * WARPS);
      init_barrier(dO_full + 8 * slot, 2), init_barrier(dO_empty + 8 * slot, CLUSTER * WARPS);
      const bool of_peer = ONE_ROOM && slot > 0;
      init_barrier(dS_full + 8 * slot, of_peer ? 1 : WARPS), init_barrier(dS_empty + 8 * slot, of_peer ? 1 : CLUSTER * (APART ? 4 : WARPS));
    }
    publish_barriers();
  }
};

// What a thread block has: a K/V block, and the Q blocks from `end - 1` down to `first` of each query head of the group; of a
// sequence with so many `queries` and `keys`, where it begins among packed ones, and its number. If it has none, j is -1. Where a mask
// leaves out row blocks, `visits` are those of all heads that it keeps.
struct Work {
  int batch, kv_head, j, keys, first, end, queries, first_query, first_key, number, visits;
  __device__ __forceinline__ int rows(const Params& p) const { return VARLEN ? queries : p.Nq; }
  __device__ __forceinline__ int row(int i) const { return (VARLEN ? first_query : 0) + i * BR; }
  __device__ __forceinline__ int key() const { return (VARLEN ? first_key : 0) + j * BC; }
  __device__ __forceinline__ int turns(const Params& p) const { return SKIPS ? visits : max(0, end - first) * p.group; }
  __device__ __forceinline__ int head(const Params& p, int h) const { return kv_head * p.group + h; }
  // Among those of all batches
  __device__ __forceinline__ long long plane(const Params& p, int h) const { return static_cast<long long>(batch) * p.heads + head(p, h); }
  // The first row of a row block of a query head, in L and D
  __device__ __forceinline__ long long row_of(const Params& p, int h, int i) const { return plane(p, h) * p.total_q + row(i); }
};

// Whose turn it is to add to dQ of a row block, at its first row: how many thread blocks or pairs have, or of wide heads their warps. Of the first one of a key head the
// upper half counts those that have begun.
constexpr int BEGUN = 1 << 16, ADDERS = WIDE || APART ? CLUSTER * (APART ? 4 : WARPS) : 1;

// The Q blocks that see a K/V block, or one of those of a pair
__device__ __forceinline__ void find_rows(const Params& p, Work& w, int Nk) {
  const int first_key = w.j / CLUSTER * CLUSTER * BC;  // of all that have the same rows
  const int Nq = w.rows(p), cols = min(CLUSTER * BC, w.keys - first_key), diagonal = Nk - Nq;
  const int first_row = CAUSAL || WINDOW ? max(0, first_key - diagonal - (WINDOW ? p.right : 0)) : 0;
  const int last_row = WINDOW ? min(Nq - 1ll, first_key + cols - 1ll - diagonal + p.left) : Nq - 1;
  w.first = first_row / BR, w.end = cols > 0 && first_row <= last_row ? last_row / BR + 1 : w.first;
}

// Words of shared memory for a head's row blocks up to the last
__device__ __forceinline__ int kept_words(const Work& w) { return (w.end + 31) / 32 * BITS; }
// What a mask says of the row blocks of each head, by one warp, and how many it keeps
__device__ __forceinline__ void read_kept(const Params& p, Work& w, unsigned* kept) {
  const int words = kept_words(w), lane = threadIdx.x % 32;
  for (int h = 0; h < p.group; h++) {
    const BlockMask states = block_mask_of(p, w.batch, w.head(p, h), VARLEN ? w.first_query / BR + w.number : 0).transposed();
    read_block_mask(kept + h * words, states, w.j, w.first, w.end, 0, 1);
  }
  __syncwarp();
  for (int word = w.first / 32 * BITS + lane * BITS; word < words; word += 32 * BITS)
    for (int h = 0; h < p.group; h++) w.visits += __popc(kept[h * words + word]);
#pragma unroll
  for (int other = 16; other > 0; other /= 2) w.visits += __shfl_xor_sync(~0u, w.visits, other);
}
// What it says of one row block: in bit 0 whether that is visited, in bit 1 whether the mask is asked for its scores
__device__ __forceinline__ int kept_at(const Shared& s, const Work& w, int h, int i) {
  if constexpr (!SKIPS) return MASK ? 3 : 1;
  unsigned kept, mixed;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(kept), "=r"(mixed) : "r"(s.kept + (h * kept_words(w) + i / 32 * BITS) * 4) : "memory");
  return (kept >> i % 32 & 1) | (mixed >> i % 32 & 1) << 1;
}

// The first warp finds the work, and each role reads it for itself: kept for all of them, it would take registers of all.
__device__ __forceinline__ Work find_work(const Params& p, unsigned* kept) {
  const int kv_heads = p.heads / p.group, blocks = VARLEN ? gridDim.x / kv_heads : (p.Nk + CLUSTER * BC - 1) / (CLUSTER * BC);  // or clusters, of a key head
  // Thread blocks of `alternate` key heads alternate.
  const int first_pair = blockIdx.x / CLUSTER / blocks / p.alternate * p.alternate, index = blockIdx.x / CLUSTER - first_pair * blocks;
  const int beside = min(p.alternate, static_cast<int>(gridDim.x) / CLUSTER / blocks - first_pair), pair = first_pair + index % beside;
  Work w = {pair / kv_heads, pair % kv_heads, index / beside * CLUSTER, p.Nk, 0, 0, 0, 0, 0, pair / kv_heads, 0};
  if constexpr (VARLEN) {
    int bound = 0;
    const int number = search_sequence<BC>(p, p.cu_seqlens_k, w.j, bound), end_query = __shfl_sync(~0u, bound, 1), end_key = __shfl_sync(~0u, bound, 3);
    w.first_query = __shfl_sync(~0u, bound, 0), w.first_key = __shfl_sync(~0u, bound, 2);
    w.queries = end_query - w.first_query, w.keys = end_key - w.first_key;
    w.number = number;
    w.j -= w.first_key / BC + number;
    if (w.j * BC >= w.keys) w.j = -1;
  }
#if ORDERED
  // The next one of its head, whose blocks before it have all begun; of a pair the first one asks.
  if (w.j >= 0 && w.rows(p) > 0 && threadIdx.x == 0) w.j = static_cast<unsigned>(atomicAdd(p.turns + w.row_of(p, 0, 0), BEGUN)) / BEGUN * CLUSTER;
#endif
  const int Nk = w.keys;
  if constexpr (PADDED) {
    if (threadIdx.x == 0) w.keys = max(0, min(p.Nk, p.key_lengths[w.batch]));
    if constexpr (SKIPS) w.keys = __shfl_sync(~0u, w.keys, 0);
  }
  find_rows(p, w, Nk);
  if constexpr (SKIPS) {
    if (w.j >= 0) read_kept(p, w, kept);
  }
  return w;
}

__device__ __forceinline__ void write_work(unsigned at, const Work& w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\nst.shared.v2.b32 [%0+16], {%5, %6};" ::"r"(at), "r"(w.batch), "r"(w.kv_head),
               "r"(w.j), "r"(w.keys), "r"(w.first), "r"(w.end) : "memory");
  if constexpr (VARLEN)
    asm volatile("st.shared.v2.b32 [%0+24], {%1, %2};\nst.shared.b32 [%0+32], %3;" ::"r"(at), "r"(w.queries), "r"(w.first_query),
                 "r"(w.first_key) : "memory");
  if constexpr (NUMBERED) asm volatile("st.shared.b32 [%0+36], %1;" ::"r"(at), "r"(w.number) : "memory");
  if constexpr (SKIPS) asm volatile("st.shared.b32 [%0+40], %1;" ::"r"(at), "r"(w.visits) : "memory");
}
__device__ __forceinline__ Work read_work(unsigned at) {
  Work w;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%6];\nld.shared.v2.b32 {%4, %5}, [%6+16];"
               : "=r"(w.batch), "=r"(w.kv_head), "=r"(w.j), "=r"(w.keys), "=r"(w.first), "=r"(w.end) : "r"(at) : "memory");
  if constexpr (VARLEN)
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%3+24];\nld.shared.b32 %2, [%3+32];"
                 : "=r"(w.queries), "=r"(w.first_query), "=r"(w.first_key) : "r"(at) : "memory");
  w.number = w.batch;
  if constexpr (NUMBERED) asm volatile("ld.shared.b32 %0, [%1+36];" : "=r"(w.number) : "r"(at) : "memory");
  if constexpr (SKIPS) asm volatile("ld.shared.b32 %0, [%1+40];" : "=r"(w.visits) : "r"(at) : "memory");
  return w;
}

// What a pair has to do, for the second one from the first
__device__ __forceinline__ void send_work(unsigned at, const Work& w) {
  const int words[6] = {w.batch, w.kv_head, w.j + 1, w.keys, w.first, w.end};
#pragma unroll
  for (int n = 0; n < 6; n++) store_in(at + 4 * n, 1, words[n]);
}

// Calls visit(h, i) for each turn, h being a query head of the group. A row block has its turns together, so that thread blocks with
// other numbers of row blocks still come to the same ones at the same time.
template <class Visit> __device__ __forceinline__ void each_turn(const Params& p, const Shared& s, const Work& w, Visit visit) {
#pragma unroll 1
  for (int i = w.end - 1; i >= w.first; i--)
#pragma unroll 1
    for (int h = 0; h < p.group; h++)
      if (!SKIPS || kept_at(s, w, h, i)) visit(h, i);
}

// --- the producer: a warp, whose first lane copies

// A tile of Q or dO: of a pair each loads every other slab, for both.
__device__ __forceinline__ void load_rows_tile(unsigned to, const TensorMap& map, unsigned full, int slabs, int row, int head, const Work& w) {
  if constexpr (!PAIRED) return load_tile<BR>(to, map, full, slabs, row, head, w.batch);
#pragma unroll 1
  for (int slab = unknown(w.j) % CLUSTER; slab < slabs; slab += CLUSTER)
    load_box_for_all<CLUSTER>(to + slab * BR * SLAB_ROW, map, full, slab * SLAB, row, head, w.batch);
}

__device__ __forceinline__ void store_shared(unsigned at, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory"); }

// A warp that brings what rows are given: calls bring(at, row, rows, slot) for each turn, with where this lane's rows go in the slots' room,
// which is its first, how many there are from that one on, and the slot. It has the rows from that one on, 32 apart.
template <class Bring>
__device__ __forceinline__ void produce_rows(const Params& p, const Shared& s, const Work& work, unsigned full, unsigned empty, Bring bring) {
  const int lane = threadIdx.x % 32;
  Slot slot = {0, 1};  // empty at first, as if a phase before had ended
  each_turn(p, s, work, [&](int h, int i) {
    const Work w = VARLEN ? read_work(s.work) : work;  // again, since a producer has few registers
    bring((slot.index * BR + lane) * 4, w.row_of(p, h, i) + lane, w.rows(p) - i * BR - lane, slot, empty + 8 * slot.index);
    __syncwarp();
    if (lane == 0) arrive(full + 8 * slot.index);
    slot = slot.next();
  });
}

// What exponents are relative to (weight.cuh). A row that does not exist has weights of 0.
__device__ __forceinline__ void produce_bases(const Params& p, const Shared& s, const Work& w) {
  produce_rows(p, s, w, s.Q_full, s.Q_empty, [&](unsigned at, long long row, int rows, Slot slot, unsigned empty) {
    float L[BR / 32];
#pragma unroll
    for (int n = 0; n < BR / 32; n++) L[n] = 32 * n < rows ? p.L[row + 32 * n] : -NEG_INF;
    wait_for(empty, slot.parity);
    bool large = false;
#pragma unroll
    for (int n = 0; n < BR / 32; n++) {
      large |= 32 * n < rows && is_large(L[n]);
      store_shared(s.offsets + at + 128 * n, L[n] == NEG_INF ? 0.f : L[n] * -UNIT);  // 0 where nothing is seen and scores are -inf
      if constexpr (SCALED) store_shared(s.origins + at + 128 * n, 0.f);  // which scaled scores take, large or not
    }
    large = __any_sync(~0u, large);
    if (large) {
#pragma unroll 1
      for (int n = 0; n < BR / 32; n++) {
        const Base base = 32 * n < rows ? base_of(p.L[row + 32 * n], p.bases, row + 32 * n) : Base{0.f, -NEG_INF};
        store_shared(s.offsets + at + 128 * n, -base.log_sum);
        store_shared(s.origins + at + 128 * n, base.score);
      }
    }
    if (threadIdx.x % 32 == 0)
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(s.large + 4 * slot.index), "r"(static_cast<int>(large)) : "memory");
  });
}
__device__ __forceinline__ void produce_D(const Params& p, const Shared& s, const Work& w) {
  produce_rows(p, s, w, s.dO_full, s.dO_empty, [&](unsigned at, long long row, int rows, Slot slot, unsigned empty) {
    float D[BR / 32];
#pragma unroll
    for (int n = 0; n < BR / 32; n++) D[n] = 32 * n < rows ? p.D[row + 32 * n] : 0.f;
    wait_for(empty, slot.parity);
#pragma unroll
    for (int n = 0; n < BR / 32; n++) store_shared(s.D + at + 128 * n, D[n]);
  });
}

// Q_i or dO_i to its slot, when that is empty. Behind the last row of a packed sequence there is another: the warp makes zeros of it.
template <class Load>
__device__ __forceinline__ void produce_block(const Shared& s, unsigned tile, int bytes, int slabs, int rows, unsigned full, unsigned empty, int parity, int& came,
                                              Load load) {
  const bool copies = threadIdx.x == 0, cut = VARLEN && rows < BR;
  wait_for(empty, parity);
  if (copies) {
    arrive_expecting(cut ? s.came : full, bytes);
    load(cut ? s.came : full);
  }
  if (cut) {
    wait_for(s.came, came);
    came ^= 1;
    clear_rows<BR>(tile, slabs, rows);
    publish_writes();
    __syncwarp();
    if (copies) arrive(full);
  }
}

// The warp that copies tiles, by its first lane
__device__ __forceinline__ void produce(const Params& given, const Shared& s, const Work& work) {
  const bool copies = threadIdx.x == 0;
  const Work& w = work;
  if (w.turns(given) == 0) return;
  const bool cut = (PADDED || VARLEN) && (w.j + 1) * BC > w.keys;
  if (copies) {
    const unsigned full = cut ? s.came : s.KV_full;
    arrive_expecting(full, K_BYTES + V_BYTES);
    load_tile<BC>(s.K, given.K_tiles, full, K_SLABS, w.key(), w.kv_head, w.batch);
    load_tile<BC>(s.V, given.V_tiles, full, V_SLABS, w.key(), w.kv_head, w.batch);
  }
  if (cut) {
    wait_for(s.came, 0);
    const int there = max(0, w.keys - w.j * BC);  // of a pair one may have none
    clear_rows<BC>(s.K, K_SLABS, there);
    clear_rows<BC>(s.V, V_SLABS, there);
    publish_writes();
    __syncwarp();
    if (copies) arrive(s.KV_full);
  }
  if (!VARLEN && !copies) return;
  Slot slot = {0, 1};
  int came = cut;  // the parity of the next phase
  each_turn(given, s, w, [&](int h, int i) {
    const Work w = PAIRED ? read_work(s.work) : work;  // again, since a producer has few registers
    const int index = slot.index, rows = w.rows(given) - i * BR;
    produce_block(s, s.Q + index * Q_BYTES, Q_BYTES, K_SLABS, rows, s.Q_full + 8 * index, s.Q_empty + 8 * index, slot.parity, came, [&](unsigned full) {
      load_rows_tile(s.Q + index * Q_BYTES, given.Q_tiles, full, K_SLABS, w.row(i), w.head(given, h), w);
    });
    produce_block(s, s.dO + index * dO_BYTES, dO_BYTES, V_SLABS, rows, s.dO_full + 8 * index, s.dO_empty + 8 * index, slot.parity, came, [&](unsigned full) {
      load_rows_tile(s.dO + index * dO_BYTES, given.dO_tiles, full, V_SLABS, w.row(i), w.head(given, h), w);
    });
    slot = slot.next();
  });
}

// --- the lane that sends the other thread block of a pair what makes its columns of dQ: K once, dS in each turn

__device__ __forceinline__ void send_keys(const Params& p, const Shared& s, const Work& w) {
  const int turns = w.turns(p), peer = 1 - w.j % CLUSTER;
  if (turns == 0) return;
  const auto share = [](int rank) { return (BY_ROWS ? 1 : min(PEER_SLABS, K_SLABS - rank * PEER_SLABS)) * BC * SLAB_ROW; };  // bytes of its columns
  wait_for(s.KV_full, 0);
  if (ONE_ROOM) arrive_expecting(s.K_came, share(1 - peer));
  copy_to(s.K_peer, s.K + (BY_ROWS ? 0 : peer * PEER_BYTES), share(peer), s.K_came, peer);
  for (int turn = 0; turn < turns; turn++) {
    const int room = ONE_ROOM ? 0 : turn % 2;
    const unsigned dS = s.dS + room * ROOM_BYTES, came = s.dS_came + 8 * room;
    wait_for(s.dS_full + 8 * room, ONE_ROOM ? turn % 2 : turn / 2 % 2);
    arrive_expecting(came, ONE_ROOM || turn ? SENT_BYTES : SENT_BYTES + share(1 - peer));  // K's share comes with the first dS
    copy_to(dS + dS_BYTES, dS + (BY_ROWS ? peer * SENT_BYTES : 0), SENT_BYTES, came, peer);
  }
}

// --- the lane that adds dQ_i to its sum

#if ORDERED
__device__ __forceinline__ void wait_for_turn(const int* added, unsigned before) {
  unsigned found;
  do {
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(found) : "l"(__cvta_generic_to_global(added)) : "memory");
  } while (ADDERS > 1 ? found % BEGUN < before : found % BEGUN != before);  // of several warps of this block some may have added
  asm volatile("fence.proxy.async.global;" ::: "memory");  // what is added behind it is added after the others'
}
__device__ __forceinline__ void pass_turn_on(int* added) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(__cvta_generic_to_global(added)) : "memory");
}
#endif

// Rows `from` to `from + rows - 1` of 8 that are side by side
__device__ __forceinline__ void add_some(float* sums, unsigned dQ, int from, int rows) {
#pragma unroll 1
  for (int tile = 0; tile < SUM_TILES; tile++)
    add_floats(sums + tile * SUM_PIECE + from * (SUM_PIECE / 8), dQ + tile * PIECE_BYTES + from * (PIECE_BYTES / 8), rows * (PIECE_BYTES / 8));
}

__device__ __forceinline__ void add_queries(const Params& p, const Shared& s, const Work& w) {
  if (w.turns(p) == 0) return;
  wait_for(s.dQ_full, 0);
  arrive(s.dQ_empty);  // the first dQ is of no turn
  int parity = 1;
  const int before = VARLEN ? w.first_query % 8 : 0;  // rows of other sequences among the first 8
  [[maybe_unused]] const Masks masks = masks_of(p, 0, 0, w.rows(p), VARLEN ? w.keys : p.Nk, p.Nk);
  each_turn(p, s, w, [&](int h, int i) {
    const int end = before + min(BR, w.rows(p) - i * BR), first = before > 0, whole = end / 8 - first;
    float* sums = sums_of(p.dQ_acc, w.plane(p, h), p.total_q, w.row(i) - before, 0);
    wait_for(s.dQ_full, parity);
    parity ^= 1;
#if ORDERED
    int* added = p.turns + w.row_of(p, h, i);
    wait_for_turn(added, w.j - visible_begin(masks, i * BR) / BC);
#endif
    if (before) add_some(sums, s.dQ, before, min(8, end) - before);
    if (whole > 0) add_floats(sums + first * SUM_TILES * SUM_PIECE, s.dQ + first * SUM_TILES * PIECE_BYTES, whole * SUM_TILES * PIECE_BYTES);
    if (end % 8 && whole >= 0) add_some(sums + end / 8 * SUM_TILES * SUM_PIECE, s.dQ + end / 8 * SUM_TILES * PIECE_BYTES, 0, end % 8);
    wait_for_stores();
    arrive(s.dQ_empty);
#if ORDERED
    wait_for_additions();
    pass_turn_on(added);
#endif
  });
}

// --- dQ = dS K_j

// A part of it from dS in its room: of 64 rows, of a slab or a piece of the columns; of a pair of thread blocks over the keys of both
template <class Own> __device__ __forceinline__ void multiply_keys(const Shared& s, typename Own::Accumulators& dQ, int room, int part) {
  const int slab = BY_ROWS ? part * BC * SLAB_ROW : 0;
  const Operand A = Operand::columns(s.dS + room * ROOM_BYTES + slab, BC * SLAB_ROW);
  // From behind this one's rows to the other's, of a pair
  const int to_K = s.K_peer - s.K - BC * SLAB_ROW - (BY_ROWS ? 0 : (APART ? part : part / CONSUMERS) * PEER_BYTES), to_dS = dS_BYTES - BC * SLAB_ROW - slab;
  begin_products();
  each_product<Own, BC>(dQ, s.K, part, [&](auto& columns_of, Operand columns) {
#pragma unroll
    for (int k = 0; k < CLUSTER * BC / 16; k++)
      multiply_columns<sizeof(columns_of) / sizeof(columns_of[0]) * 8>(columns_of, A + (k * 16 * SLAB_ROW + (k < BC / 16 ? 0 : to_dS)),
                                                                       columns + (k * 16 * SLAB_ROW + (k < BC / 16 ? 0 : to_K)), k > 0);
  });
  commit_products();
}

// A warp's rows of such a part to their sums
template <class Own>
__device__ __forceinline__ void add_part(const Params& p, const Work& w, const typename Own::Accumulators& dQ, int thread, int part, int i, int h) {
  const int row = (BY_ROWS ? part * 64 : 0) + thread / 32 * 16 + thread % 32 / 4, rows = w.rows(p) - i * BR;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (row + 8 * half >= rows) break;
    float* sums = sums_of(p.dQ_acc, w.plane(p, h), p.total_q, w.row(i) + row + 8 * half, 0, thread % 4);
#pragma unroll
    for (int c = 0; c < Own::COUNT / 16; c++) {
      const int tile = Own::tile(part, c);
      if (tile < SUM_TILES)
        add_to_sums(sums + tile * SUM_PIECE, dQ[2 * c][2 * half], dQ[2 * c][2 * half + 1], dQ[2 * c + 1][2 * half], dQ[2 * c + 1][2 * half + 1]);
    }
  }
}
// Before a warpgroup adds, all thread blocks before this one have; behind it each warp says that it has.
__device__ __forceinline__ void begin_to_add(const Params& p, const Work& w, int thread, int barrier, int i, int h, const Masks& masks) {
#if ORDERED
  if (thread == 0) wait_for_turn(p.turns + w.row_of(p, h, i), (w.j / CLUSTER - visible_begin(masks, i * BR) / (CLUSTER * BC)) * ADDERS);
  meet(barrier, WARPGROUP);
#endif
}
__device__ __forceinline__ void end_to_add(const Params& p, const Work& w, int thread, int i, int h) {
#if ORDERED
  __syncwarp();
  if (thread % 32 == 0) pass_turn_on(p.turns + w.row_of(p, h, i));
#endif
}

// The warpgroup that makes all of it, of each turn, if there is one
__device__ __forceinline__ void make_queries(const Params& p, const Shared& s, const Work& w) {
  if (w.turns(p) == 0) return;
  Slot slot = {0, 0};
  wait_for(s.KV_full, 0);
  each_turn(p, s, w, [&](int h, int i) {
    wait_for(s.dS_full + 8 * slot.index, slot.parity);
    if constexpr (PAIRED) wait_for(s.dS_came + 8 * slot.index, slot.parity);
#pragma unroll 1
    for (int n = 0; n < (PAIRED ? 1 : QUERY_PARTS); n++) {
      const Work place = read_work(s.work);  // again, since registers are few
      const int part = PAIRED ? place.j % CLUSTER : unknown(n);
      QueryColumns::Accumulators dQ;
      multiply_keys<QueryColumns>(s, dQ, slot.index, part);
      wait_for_products<0>(dQ);
      if (PAIRED || n + 1 == QUERY_PARTS) release(s.dS_empty + 8 * slot.index);
      if (ORDERED && n == 0) {
        const Masks masks = masks_of(p, 0, 0, place.rows(p), VARLEN ? place.keys : p.Nk, p.Nk);
        begin_to_add(p, place, threadIdx.x % WARPGROUP, OWN + CONSUMERS, i, h, masks);
      }
      add_part<QueryColumns>(p, place, dQ, threadIdx.x % WARPGROUP, part, i, h);
    }
    end_to_add(p, read_work(s.work), threadIdx.x % WARPGROUP, i, h);
    slot = slot.next();
  });
}

// --- a consumer: one warpgroup, each warp of which has 16 keys, each lane parts of keys g and g + 8 of those

__device__ __forceinline__ float2 load_pair(unsigned at) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(at) : "memory");
  return pair;
}

// The elements of a bias that each_score_transposed visits, one after the other: one address, since registers are scarce
template <class At> struct InTurn {
  At at;
  long long row, col;
  __device__ __forceinline__ InTurn(At first, long long row_stride, long long col_stride, int first_row, int first_key)
      : at(first + first_row * row_stride + first_key * col_stride), row(row_stride), col(col_stride) {}
  __device__ __forceinline__ At next(int n, int e) {
    const At now = at;
    at = unknown(at + ((e % 2 ? 7 : 1) * row + (n == BR / 8 - 1 && e == 1 ? 8 * col - BR * row : 0)));
    return now;
  }
};

struct Consumer {
  const Shared& s;
  int group, thread;  // of the warpgroup; kept, since asking for it takes longer than a turn has
  int share;          // of the columns of dQ: the number of this warpgroup, or of it among those of a pair
  float factor;       // of S, for exponents of two
  Slot slot;          // of the Q and dO block of this turn

  KeyColumns::Accumulators dK;
  ValueColumns::Accumulators dV;
  float S[BR / 8][4], dP[BR / 8][4];    // transposed; then P, with a score function times its derivative, and dS
  float slopes[BR / 8][4];              // that derivative, where P is wanted without it
  unsigned P[BR / 16][4], dS[BR / 16][4];  // transposed and rounded: an accumulator's layout is that of a factor

  // Fragments of a tile's rows: K and V of this warpgroup's 64 keys, all rows of Q and dO
  template <int DIM, int A_ROWS>
  __device__ __forceinline__ void multiply_rows(float (&C)[BR / 8][4], Operand A, Operand B) {
    begin_products();
#pragma unroll
    for (int k = 0; k < padded(DIM) / 16; k++) {
      const int inside = k % 4 * 32;
      multiply<BR>(C, A + (k / 4 * A_ROWS * SLAB_ROW + inside), B + (k / 4 * BR * SLAB_ROW + inside), k > 0);
    }
    commit_products();
  }
  // This warpgroup's rows of K or V; where they are is found in each turn, since all steps' descriptors would take registers.
  __device__ __forceinline__ Operand own_keys(unsigned tile) const {
    return WIDE ? Operand::rows(unknown(tile)) : Operand::rows(tile) + unknown(group) * (OWN_KEYS * SLAB_ROW);
  }
  // S^T = K_j Q_i^T
  template <bool NOW = true> __device__ __forceinline__ void multiply_scores(Slot at) {
    if constexpr (!NOW) return;
    wait_for(s.Q_full + 8 * at.index, at.parity);
    multiply_rows<HEAD_DIM, BC>(S, own_keys(s.K), Operand::rows(s.Q) + at.index * Q_BYTES);
  }
  // dP^T = V_j dO_i^T
  template <bool NOW> __device__ __forceinline__ void multiply_output_gradients() {
    if constexpr (!NOW) return;
    wait_for(s.dO_full + 8 * slot.index, slot.parity);
    multiply_rows<VALUE_DIM, BC>(dP, own_keys(s.V), Operand::rows(s.dO) + slot.index * dO_BYTES);
  }
  // C += A B_i, with Q_i or dO_i for B
  template <class Own> __device__ __forceinline__ void add_weighted(typename Own::Accumulators& C, const unsigned (&A)[BR / 16][4], unsigned B) {
    begin_products();
    each_product<Own, BR>(C, B, group, [&](auto& part, Operand columns) {
#pragma unroll
      for (int k = 0; k < BR / 16; k++) multiply<sizeof(part) / sizeof(part[0]) * 8>(part, A[k], columns + k * 16 * SLAB_ROW);
    });
    commit_products();
  }

  // What the rows of a lane's columns have, of one of a slot's arrays
  __device__ __forceinline__ void load_rows(float2 (&x)[BR / 8], unsigned array) const {
#pragma unroll
    for (int n = 0; n < BR / 8; n++) x[n] = load_pair(array + slot.index * (BR * 4) + thread % 4 * 8 + 32 * n);
  }
  // The first of this lane's two keys
  __device__ __forceinline__ int first_key(int j) const { return j * BC + group * OWN_KEYS + thread / 32 * 16 + thread % 32 / 4; }
  // The same of scaled scores, which a function or a bias changes, score by score: P^T is rounded at once, so that S may be as said above.
  __device__ __forceinline__ void weigh_scaled(const Masks& masks, int i, int j, int Nq, bool asks) {
    const unsigned rows = slot.index * (BR * 4) + thread % 4 * 8;
    float2 offset, origin;
    float before;
    InTurn<Bias> bias(masks.bias, masks.bias_row, masks.bias_col, i * BR + thread % 4 * 2, first_key(j));
    wait_for_products<LATE ? 0 : 1>(S);
    each_score_transposed<BR / 8>(masks, first_key(j), i * BR, Nq, [&](int n, int e, int row, int key, bool seen) {
      if (e % 2 == 0) offset = load_pair(s.offsets + rows + 32 * n), origin = load_pair(s.origins + rows + 32 * n);
      Scored scored = {};
      if (seen || !SCORE_LOADS) scored = scored_at(masks, {}, __fmul_rn(S[n][e], SCORE ? masks.p->scale : factor), row, key, Nq);
      float score = (SCORE ? UNIT : 1.f) * scored.value;  // rounded as scale_and_mask does
      if constexpr (BIAS) {
        const Bias at = bias.next(n, e);
        if (seen) score = fmaf(UNIT, load_in_place(at), score);
      }
      if constexpr (MASK) {
        if (seen && asks) seen = mask_says(masks, {}, row, key, Nq);
      }
      const float weight = seen ? exp2_of(score - (e % 2 ? origin.y : origin.x) + (e % 2 ? offset.y : offset.x)) : 0.f;
      S[n][e] = DBIAS ? weight : of_given_score(weight, scored.slope);
      if constexpr (DBIAS) slopes[n][e] = scored.slope;
      if (e % 2) P[n / 2][n % 2 * 2 + e / 2] = pack(Element(), before, weight);
      before = weight;
    });
  }
  // P^T = exp(S^T - L), as soon as S^T is there
  __device__ __forceinline__ void weigh(const Masks& masks, int i, int j, int Nq, bool whole, bool asks) {
    if constexpr (SCALED) return weigh_scaled(masks, i, j, Nq, asks);
    float2 offset[BR / 8];
    if constexpr (!APART) load_rows(offset, s.offsets);
    int large;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(large) : "r"(s.large + 4 * slot.index) : "memory");
    wait_for_products<LATE ? 0 : 1>(S);
    if (large) {
#pragma unroll
      for (int n = 0; n < BR / 8; n++) {
        const float2 origin = load_pair(s.origins + slot.index * (BR * 4) + thread % 4 * 8 + 32 * n);
#pragma unroll
        for (int e = 0; e < 4; e++) S[n][e] -= e % 2 ? origin.y : origin.x;
      }
    }
    if (!whole || asks) {
      each_score_transposed<BR / 8>(masks, first_key(j), i * BR, Nq, [&](int n, int e, int row, int key, bool seen) {
        if constexpr (MASK) {
          if (seen && asks) seen = mask_says(masks, {}, row, key, Nq);
        }
        if (!seen) S[n][e] = NEG_INF;
      });
    }
#pragma unroll
    for (int n = 0; n < BR / 8; n++) {
      if constexpr (APART) offset[n] = load_pair(s.offsets + slot.index * (BR * 4) + thread % 4 * 8 + 32 * n);
#pragma unroll
      for (int e = 0; e < 4; e++) S[n][e] = exp2_of(fmaf(S[n][e], factor, e % 2 ? offset[n].y : offset[n].x));
    }
    if constexpr (EARLY) round(P, S);
  }
  // Which of the weights of scaled scores are kept, a bit each, since P is rounded and S has a sign of its own; by a loop that is not
  // unrolled: Philox's numbers would take registers.
  static __device__ __forceinline__ unsigned find_kept(const Dropout& dropout, int key0, int row0) {
    unsigned kept = 0;
#pragma unroll 1
    for (int n = BR / 8 - 4; n >= 0; n -= 4) {
      float weights[4][4];
      each_weight_transposed<true>(weights, dropout, key0, row0 + 8 * n, [&](float&, bool keeps) { kept = kept << 1 | keeps; });
    }
    return kept;
  }
  static __device__ __forceinline__ bool is_kept(unsigned kept, int n, int e) {
    return kept >> (n / 4 * 16 + 15 - (e % 2 * 8 + n % 4 * 2 + e / 2)) & 1;  // from the last that was found
  }
  // dS^T = P^T * (dP^T - D), as soon as dP^T is there: not before it are there registers for the random numbers of P^T.
  __device__ __forceinline__ void find_score_gradients(const Dropout& dropout, int i, int j) {
    float2 D[BR / 8];
    const int key = j * BC + group * OWN_KEYS + thread / 32 * 16;
    unsigned kept = 0;
    if constexpr (DROPOUT && SCALED) {
      kept = find_kept(dropout, key, i * BR);
#pragma unroll
      for (int n = 0; n < BR / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (!is_kept(kept, n, e)) P[n / 2][n % 2 * 2 + e / 2] &= e % 2 ? 0xffffu : 0xffff0000u;
    }
    multiply_output_gradients<LATE>();
    if constexpr (!DROPOUT && !APART) load_rows(D, s.D);
    // It is there; but the compiler moves no exponentials behind a branch, and would move them behind the next wait.
    if constexpr (!LATE) wait_for(s.dO_full + 8 * slot.index, slot.parity);
    wait_for_products<0>(dP);
    if constexpr (DROPOUT) {
      if constexpr (!SCALED) each_weight_transposed<true>(S, dropout, key, i * BR, MarkDropped());
      load_rows(D, s.D);
    }
#pragma unroll
    for (int n = 0; n < BR / 8; n++) {
      if constexpr (!DROPOUT && APART) D[n] = load_pair(s.D + slot.index * (BR * 4) + thread % 4 * 8 + 32 * n);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float d = e % 2 ? D[n].y : D[n].x;
        if constexpr (SCALED) {
          if constexpr (DROPOUT) dP[n][e] *= is_kept(kept, n, e) ? dropout.scale : 0.f;
          dP[n][e] = S[n][e] * (dP[n][e] - d);
        } else {
          // Where dQ has a warpgroup, there are no registers for P as it was.
          dP[n][e] = score_gradient(APART ? to_float(reinterpret_cast<const Element*>(P[n / 2])[n % 2 * 4 + e]) : S[n][e], dP[n][e], d, dropout.scale);
        }
      }
    }
  }
  // The bias is added to scaled scores, for each query head by itself.
  __device__ __forceinline__ void add_bias_gradients(const Masks& masks, float* sums, int i, int j, int Nq) const {
    InTurn<float*> sum(sums, masks.p->dbias.row, masks.p->dbias.col, i * BR + thread % 4 * 2, first_key(j));
    each_score_transposed<BR / 8>(masks, first_key(j), i * BR, Nq, [&](int n, int e, int, int, bool seen) {
      float* at = sum.next(n, e);
      if (seen && (!WIDE || n / (BR / 16) == group)) atomicAdd(at, dP[n][e]);
    });
  }
  static __device__ __forceinline__ void round(unsigned (&to)[BR / 16][4], const float (&from)[BR / 8][4]) {
#pragma unroll
    for (int n = 0; n < BR / 8; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) to[n / 2][n % 2 * 2 + h] = pack(Element(), from[n][2 * h], from[n][2 * h + 1]);
  }
  // Where warpgroups issue their products in turns: one after the other, so that the exponentials of one are under the other's
  // products
  __device__ __forceinline__ void take_turn() const {
    if constexpr (PING_PONG) meet(TURN + group, 2 * WARPGROUP);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (PING_PONG) let_pass(TURN + (group + 1 < CONSUMERS ? group + 1 : 0), 2 * WARPGROUP);
  }

  // Before the first turn the other room of dS has zeros.
  __device__ __forceinline__ void begin_score_gradients() const {
#pragma unroll
    for (int at = 0; at < dS_BYTES; at += CONSUMERS * WARPGROUP * 16)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(s.dS + dS_BYTES + at + (group * WARPGROUP + thread) * 16), "r"(0) : "memory");
    publish_writes();
    __syncwarp();
    announce(s.dS_full + 8);
  }
  // dS^T to its room, for the products of all warpgroups, when the products of the turn before the last are done with it
  __device__ __forceinline__ void share_score_gradients() const {
    const int row = group * OWN_KEYS + thread / 32 * 16 + thread % 16;  // of four 8 x 8 matrices, whose address this lane gives
    const int room = ONE_ROOM ? 0 : slot.index;
    const unsigned to = s.dS + room * ROOM_BYTES + row * SLAB_ROW;
    wait_for(s.dS_empty + 8 * room, ONE_ROOM ? 1 - slot.index : 1 ^ slot.parity ^ (APART ? 0 : slot.index));
#pragma unroll
    for (int k = 0; k < BR / 16; k++) {
      if (WIDE && k / (BR / 32) != group) continue;  // the other half of the queries is the other warpgroup's
      const unsigned chunk = (k % 4 * 2 + thread % 32 / 16) ^ row % 8;
      store_matrices(to + k / 4 * BC * SLAB_ROW + chunk * 16, dS[k][0], dS[k][1], dS[k][2], dS[k][3]);
    }
    publish_writes();
    __syncwarp();
    announce(s.dS_full + 8 * room);
  }
  // This warpgroup's part of dQ of the block before that of `at`, or of a pair of that block, when all of dS is there
  template <class Own> __device__ __forceinline__ void multiply_shared(typename Own::Accumulators& dQ, Slot at) {
    const int room = PAIRED ? 0 : 1 - at.index;
    wait_for(s.dS_full + 8 * room, PAIRED ? at.index : at.parity);
    if constexpr (PAIRED) wait_for(s.dS_came, at.index);
    multiply_keys<Own>(s, dQ, room, unknown(share));
  }
  // That part to the room of dQ
  __device__ __forceinline__ void store_queries(const QueryColumns::Accumulators& dQ, Slot at) const {
    const int warp = thread / 32;
    int at_lane = thread % 32 * 16;
    if constexpr (VARLEN) {  // behind as many rows as are another sequence's: in 8 rows of dQ, or the next ones
      int first_query;  // read again in each turn, since registers are scarce
      asm volatile("ld.shared.b32 %0, [%1+28];" : "=r"(first_query) : "r"(s.work) : "memory");
      const int row = thread % 32 / 4 + first_query % 8;
      at_lane = row / 8 * SUM_TILES * PIECE_BYTES + (row % 8 * 4 + thread % 4) * 16;
    }
    wait_for(s.dQ_empty, 1 - at.index);  // its phases are as many as turns, and slots alternate
#pragma unroll
    for (int c = 0; c < QueryColumns::COUNT / 16; c++) {
      if (QueryColumns::tile(group, c) >= SUM_TILES) break;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int piece = ((BY_ROWS ? group * 8 : 0) + warp * 2 + h) * SUM_TILES + QueryColumns::tile(group, c);
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(s.dQ + piece * PIECE_BYTES + at_lane),
                     "f"(dQ[2 * c][2 * h]), "f"(dQ[2 * c][2 * h + 1]), "f"(dQ[2 * c + 1][2 * h]), "f"(dQ[2 * c + 1][2 * h + 1]) : "memory");
      }
    }
  }
  __device__ __forceinline__ void hand_on_queries() const {
    if constexpr (WIDE) return;
    publish_writes();
    __syncwarp();
    announce(s.dQ_full);
  }
  // dQ when it is there, and its second piece: to its room or, of wide heads, by `add` to its sum. What `begin` begins runs beside.
  template <bool BESIDE, class Begin, class Add>
  __device__ __forceinline__ void finish_queries(QueryColumns::Accumulators& dQ, Slot at, Begin begin, Add add) {
    LastColumns::Accumulators last;
    if constexpr (WIDE && QueryColumns::PIECES > 1) {
      multiply_shared<LastColumns>(last, at);
      wait_for_products<1>(dQ);
      add(QueryColumns(), dQ);
      begin();
      wait_for_products<BESIDE>(last);
    } else {
      begin();
      wait_for_products<BESIDE>(dQ);
    }
    release(s.dS_empty + (PAIRED ? 0 : 8 * (1 - at.index)));
    if constexpr (!WIDE) {
      store_queries(dQ, at);
    } else if constexpr (QueryColumns::PIECES > 1) {
      add(LastColumns(), last);
    } else {
      add(QueryColumns(), dQ);
    }
  }

  // Of P^T and dS^T: dV and dK. `beside` begins dQ of the block before, for which no warpgroup has to wait, if it is not made apart.
  template <class Beside> __device__ __forceinline__ void find_gradients(Beside beside) {
    if constexpr (!SCALED && !EARLY) round(P, KeptWeights(S).of);
    round(dS, dP);
    share_score_gradients();
    take_turn();
    add_weighted<ValueColumns>(dV, P, s.dO + slot.index * dO_BYTES);
    add_weighted<KeyColumns>(dK, dS, s.Q + slot.index * Q_BYTES);
    beside();
    wait_for_products<1 + !APART>(dV);
    release(s.dO_empty + 8 * slot.index);
    wait_for_products<!APART>(dK);
    release(s.Q_empty + 8 * slot.index);
  }

  // All turns, the last one apart: the compiler has a loop's products run by themselves if none are under way where it is left.
  // `find` makes P^T and dS^T of block i and query head h, as far as `visits` has them; `add` has dQ of those, where heads are wide.
  template <class Visits, class Find, class Add>
  __device__ __forceinline__ void turns(int end, int heads, int left, Visits visits, Find find, Add add) {
    int i = end - 1, of_block = heads;  // turns of this row block
    const auto advance = [&] {
      do {
        if (--of_block == 0) i--, of_block = heads;
      } while (SKIPS && !visits(i, heads - of_block));
    };
    if (SKIPS && !visits(i, 0)) advance();
    if (PING_PONG && group == CONSUMERS - 1) pass_turn();
    if constexpr (!PAIRED && !APART) begin_score_gradients();
    multiply_scores(slot);
    wait_for_products<0>(S);  // what is set to 0 may not be so while products are on their way
    multiply_output_gradients<!LATE>();
    find(i, heads - of_block);
    int last = end, last_head = 0;  // of the turn before: at first there is none
    const auto add_last = [&](auto own, const auto& dQ) {
      if constexpr (PAIRED)
        add(own, dQ, i, heads - of_block);
      else if (last < end)
        add(own, dQ, last, last_head);
    };
    if constexpr (APART) {
#pragma unroll 1
      while (--left > 0) {
        find_gradients([] {});
        slot = slot.next();
        multiply_scores(slot);
        pass_turn();
        advance();
        find(i, heads - of_block);
      }
      find_gradients([] {});
      pass_turn();
      if (PING_PONG && group == 0) take_turn();
      return wait_for(s.dS_empty + 8 * slot.index, slot.parity);  // dQ's warpgroup is done with K_j, and that of the other one of a pair
    }
#pragma unroll 1
    while (--left > 0) {
      QueryColumns::Accumulators dQ;
      find_gradients([&] { multiply_shared<QueryColumns>(dQ, slot); });
      finish_queries<!LATE>(dQ, slot, [&] { multiply_scores<!LATE>(slot.next()), pass_turn(); }, add_last);
      multiply_scores<LATE>(slot.next());
      slot = slot.next();
      last = i, last_head = heads - of_block;
      multiply_output_gradients<!LATE>();
      hand_on_queries();
      advance();
      find(i, heads - of_block);
    }
    QueryColumns::Accumulators dQ;
    find_gradients([&] { multiply_shared<QueryColumns>(dQ, slot); });
    finish_queries<false>(dQ, slot, [&] { pass_turn(); }, add_last);
    if constexpr (PAIRED) return wait_for(s.dS_empty, slot.index);  // the other one is done with what lies here
    hand_on_queries();
    last = i, last_head = heads - of_block;
    multiply_shared<QueryColumns>(dQ, slot.next());
    finish_queries<false>(dQ, slot.next(), [] {}, add_last);
    hand_on_queries();
    if (PING_PONG && group == 0) take_turn();  // which is passed once more than it is taken
  }
};

// The gradient of this warpgroup's keys leaves through the room of what it is the gradient of.
template <class Own>
__device__ __forceinline__ void write_rows(const typename Own::Accumulators& C, float scale, unsigned room, const TensorMap& map, const TensorMap& map_of_row, int slabs,
                                           int group, const Work& w) {
  const int first = group * OWN_KEYS, row = first + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 16;
#pragma unroll
  for (int n = 0; n < Own::COUNT / 16; n++) {
    const int tile = Own::tile(group, n);
    const unsigned chunk = (tile % 4 * 2 + threadIdx.x % 32 / 16) ^ row % 8;
    const float(&left)[4] = C[2 * n], (&right)[4] = C[2 * n + 1];
    store_matrices(room + tile / 4 * BC * SLAB_ROW + row * SLAB_ROW + chunk * 16, pack(Element(), scale * left[0], scale * left[1]),
                   pack(Element(), scale * left[2], scale * left[3]), pack(Element(), scale * right[0], scale * right[1]),
                   pack(Element(), scale * right[2], scale * right[3]));
  }
  publish_writes();
  meet(WIDE ? BOTH : OWN + group, WIDE ? WARPGROUP * CONSUMERS : WARPGROUP);
  const unsigned from = room + first * SLAB_ROW;
  const int slab0 = WIDE ? group : 0, step = WIDE ? CONSUMERS : 1;  // slabs that this warpgroup stores
  if constexpr (VARLEN) {
    // Of the last keys of a sequence each goes by itself, since those behind them are another sequence's.
    const int keys = w.keys - w.j * BC - first, lane = threadIdx.x % WARPGROUP;
    if (keys < 64) {
      if (lane < keys) {
        for (int slab = slab0; slab < slabs; slab += step)
          store_box<1>(map_of_row, from + (slab * BC + lane) * SLAB_ROW, slab * SLAB, w.key() + first + lane, w.kv_head, w.batch);
        wait_for_stores();
      }
      return;
    }
  }
  if (threadIdx.x % WARPGROUP == 0) {
    for (int slab = slab0; slab < slabs; slab += step)
      store_box<1>(map, from + slab * BC * SLAB_ROW, slab * SLAB, w.key() + first, w.kv_head, w.batch);
    wait_for_stores();
  }
}

// A warp's part of dQ_i of wide heads, or of a piece of it, to its sum, when all thread blocks before this one have added theirs
template <class Own>
__device__ __forceinline__ void add_rows(const Params& p, const Work& w, const typename Own::Accumulators& dQ, int thread, int group, int i, int h,
                                         const Masks& masks) {
  if constexpr (Own::FIRST == 0) begin_to_add(p, w, thread, OWN + group % CONSUMERS, i, h, masks);
  add_part<Own>(p, w, dQ, thread, group, i, h);
  if constexpr (Own::LAST) end_to_add(p, w, thread, i, h);
}

// Masks with what is a query head's own
__device__ __forceinline__ Masks masks_of_head(const Params& p, const Masks& masks, const Work& w, int head, bool asks) {
  Masks own = masks_of(p, w.batch, head, w.rows(p), w.rows(p) + masks.diagonal, masks.keys);
  own.batch = w.number;
  if (SCORE || asks) own.of_head = score_of_heads<1>(p, score_at(own, 0, 0, w.rows(p)), 0);
  return own;
}

__device__ __forceinline__ void consume(const Params& p, const Params& given, const Shared& s, const Work& w, int group) {
  Consumer c = {s, group, unknown(static_cast<int>(threadIdx.x % WARPGROUP)), w.j % CLUSTER * CONSUMERS + group, p.scale * UNIT, {0, 0}};
#pragma unroll
  for (int n = 0; n < KeyColumns::COUNT / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) c.dK[n][e] = 0.f;
#pragma unroll
  for (int n = 0; n < ValueColumns::COUNT / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) c.dV[n][e] = 0.f;
  const int turns = w.turns(p);
  if (turns > 0) {
    wait_for(s.KV_full, 0);
    if constexpr (ONE_ROOM) wait_for(s.K_came, 0);
    const int Nq = w.rows(p);
    const Masks masks = masks_of(p, 0, 0, Nq, VARLEN ? w.keys : p.Nk, PADDED || VARLEN ? w.keys : p.Nk);
    const auto visits = [&](int i, int h) { return kept_at(s, w, h, i) != 0; };
    c.turns(w.end, p.group, turns, visits, [&](int i, int h) {
      const int last = min((i + 1) * BR, Nq) - 1, head = w.head(p, h);
      const bool whole = (w.j + 1) * BC <= visible_end(masks, i * BR) && (!WINDOW || w.j * BC >= visible_begin(masks, last));
      const bool asks = MASK && kept_at(s, w, h, i) & 2;
      const Masks& own = MASK || SCALED ? masks_of_head(p, masks, w, head, asks) : masks;
      c.weigh(own, i, w.j, Nq, whole, asks);
      c.find_score_gradients(dropout_of(p, w.number, head), i, w.j);
      if constexpr (DBIAS) {
        c.add_bias_gradients(own, p.dbias.of(w.batch, head), i, w.j, Nq);
        if constexpr (SCORE) of_given_scores(c.dP, c.slopes);
      }
    }, [&](auto own, const auto& dQ, int i, int h) { add_rows<decltype(own)>(p, w, dQ, c.thread, PAIRED ? c.share : group, i, h, masks); });
    if constexpr (!PAIRED && !APART) meet(BOTH, WARPGROUP * CONSUMERS);  // all are done with K_j
  }
  const Work place = read_work(s.work);  // the same; registers are free again
#if VARLEN
  const TensorMap &dK_row = given.dK_row, &dV_row = given.dV_row;
#else
  const TensorMap &dK_row = given.dK_tiles, &dV_row = given.dV_tiles;
#endif
  write_rows<ValueColumns>(c.dV, DROPOUT ? dropout_of(p, 0, 0).scale : 1.f, s.V, given.dV_tiles, dV_row, V_SLABS, group, place);
  write_rows<KeyColumns>(c.dK, p.scale, s.K, given.dK_tiles, dK_row, K_SLABS, group, place);
}

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif
extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1) fa3_backward(const __grid_constant__ Params given) {
  const Params p = given;
  extern __shared__ __align__(1024) unsigned char sram[];
  const Shared s(shared_address(sram));
  if (threadIdx.x == 0) s.init_barriers();
  if constexpr (PAIRED) meet_cluster();  // the other one has begun
  if (threadIdx.x < (VARLEN || SKIPS ? 32 : 1) && blockIdx.x % CLUSTER == 0) {
    const Work w = find_work(p, reinterpret_cast<unsigned*>(sram + (s.kept - s.K)));
    if (threadIdx.x == 0) write_work(s.work, w);
    if constexpr (PAIRED) send_work(s.work, w);
  }
  if constexpr (PAIRED)
    meet_cluster();
  else
    __syncthreads();
  if (VARLEN && read_work(s.work).j < 0) return;
  const int group = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == 0) {
      produce(given, s, read_work(s.work));
    } else if (warp == 1) {
      produce_bases(given, s, read_work(s.work));
    } else if (warp == 2) {
      produce_D(given, s, read_work(s.work));
    } else if (PAIRED && threadIdx.x == 96) {
      send_keys(given, s, read_work(s.work));
    } else if (!WIDE && !APART && threadIdx.x == 96) {
      add_queries(given, s, read_work(s.work));
    }
  } else if (APART && group > CONSUMERS) {
#if QUERY_REGISTERS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(QUERY_REGISTERS));
#endif
    make_queries(p, s, read_work(s.work));
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    consume(p, given, s, read_work(s.work), group - 1);
  }
  if constexpr (PAIRED && APART) meet_cluster();  // neither is done before the other arrives no more at its barriers
}
