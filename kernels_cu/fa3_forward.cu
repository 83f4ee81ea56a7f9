// A forward pass for Hopper (FlashAttention-3, arXiv 2407.08608, Algorithm 2): a producer warp copies tiles by TMA, warpgroups of 64
// rows each consume them. S = Q K_j^T and O += P V_j are warpgroup products that run by themselves; under O += P V_j of one block the
// warpgroup takes the exponentials of the next, and between two warpgroups one multiplies while the other takes exponentials.
//
// Constants, all from the tile schedule:
//   ELEMENT     __half or __nv_bfloat16               HEAD_DIM, VALUE_DIM  d of Q and K, of V and O
//   BR, BC      rows of a Q block, of a K/V block     STAGES     slots of the ring, a K and a V block each
//   CONSUMER_REGISTERS, PRODUCER_REGISTERS            of a thread, once the roles are known
//   PING_PONG   whether warpgroups issue their products in turns
//   O_APART     whether O has room of its own, where it leaves while the next Q comes; else it leaves through Q's
//   PACK        query heads of one K/V head whose rows share blocks: row r of a block is of query r / PACK, of the head r % PACK
//   CAUSAL, WINDOW, PADDED, BIAS, SINKS  0 or 1: mask.cuh, sinks.cuh      VARLEN  sequence.cuh            SCORE  score.cuh
//   MASK, TILES  mask_function.cuh, block_mask.cuh                        DROPOUT whether weights are dropped: dropout.cuh
#define SUB BC
#include "params.cuh"
#include "block_mask.cuh"
#include "dropout.cuh"
#include "fa3_work.cuh"
#include "mma.cuh"
#include "sinks.cuh"
#include "softmax_origin.cuh"
#include "warp_roles.cuh"

constexpr int CONSUMERS = BR / 64, WARPS = 4 * CONSUMERS, THREADS = WARPGROUP * (1 + CONSUMERS);
constexpr int K_SLABS = slabs(HEAD_DIM), V_SLABS = slabs(VALUE_DIM);
constexpr int DV = (VALUE_DIM + 15) / 16 * 16;  // columns of O that products make
constexpr int Q_BYTES = BR * SLAB_ROW * (O_APART || K_SLABS > V_SLABS ? K_SLABS : V_SLABS), O_BYTES = BR * SLAB_ROW * V_SLABS;
constexpr int K_BYTES = BC * SLAB_ROW * K_SLABS, V_BYTES = BC * SLAB_ROW * V_SLABS;
// Parts in which Q comes: where warpgroups take turns each one's rows, else all; without turns there are no registers for it (d 256).
constexpr int Q_PARTS = PING_PONG ? CONSUMERS : 1, Q_ROWS = BR / Q_PARTS;
// Whether no block goes unmasked: every score has something of its own, or there are no states of tiles.
constexpr bool ALL_MASKED = SCALED || (MASK && !STATES);
constexpr int TURN = 1 + CONSUMERS;  // named barriers: 1 + g where a warpgroup meets itself, TURN + g where it waits for its turn

// Shared memory: addresses. Of a slot's barriers `full` says that a block is there, `empty` that all warps are done with it. Each
// part of Q has its own: the first warpgroup's next rows come while the others are not done.
struct Shared {
  unsigned Q, O, K, V;  // (BR x d); (BR x d_v), which may be Q's; STAGES x (BC x d); STAGES x (BC x d_v)
  unsigned Q_full, Q_empty, V_came, work_full, work_empty, work, K_full, K_empty, V_full, V_empty;
  unsigned begin, next;  // where blocks are left out: visits, with each part of Q the first, with each K block the one behind it

  __device__ __forceinline__ explicit Shared(unsigned base) {
    Q = base, O = O_APART ? Q + Q_BYTES : Q, K = Q + Q_BYTES + (O_APART ? O_BYTES : 0), V = K + STAGES * K_BYTES;
    Q_full = V + STAGES * V_BYTES, Q_empty = Q_full + 8 * Q_PARTS, V_came = Q_empty + 8 * Q_PARTS;
    work_full = V_came + 8, work_empty = V_came + 16, work = V_came + 24, K_full = V_came + 32;
    K_empty = K_full + 8 * STAGES, V_full = K_full + 16 * STAGES, V_empty = K_full + 24 * STAGES;
    begin = V_empty + 8 * STAGES, next = begin + 4 * Q_PARTS;
  }
  // The barrier by which a consumer gives back its rows of Q, found from its thread: no register is kept for it.
  __device__ __forceinline__ unsigned own_Q_empty() const { return Q_PARTS == 1 ? Q_empty : Q_empty + (threadIdx.x / WARPGROUP - 1) * 8; }
  __device__ __forceinline__ void init_barriers() const {
    for (int part = 0; part < Q_PARTS; part++)
      init_barrier(Q_full + 8 * part, 1), init_barrier(Q_empty + 8 * part, Q_ROWS / 64 * (O_APART ? 4 : 1));
    init_barrier(V_came, 1), init_barrier(work_full, 1), init_barrier(work_empty, WARPS);
    for (int slot = 0; slot < STAGES; slot++) {
      init_barrier(K_full + 8 * slot, 1), init_barrier(K_empty + 8 * slot, WARPS);
      init_barrier(V_full + 8 * slot, 1), init_barrier(V_empty + 8 * slot, WARPS);
    }
    publish_barriers();
  }
};

__device__ __forceinline__ int read_shared(unsigned at) {
  int value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
  return value;
}
__device__ __forceinline__ void write_shared(unsigned at, int value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}

// A block that is visited, where masks leave out others: its number, with CUT where its place keeps some row from a key, ASKS where the mask is
// asked for each score; or NO_VISIT
constexpr int CUT = 1 << 29, ASKS = 1 << 30, NO_VISIT = -1;
__device__ __forceinline__ int block_of(int visit) { return SKIPS ? visit & (CUT - 1) : visit; }
__device__ __forceinline__ bool asks(int visit) { return !STATES || visit & ASKS; }

// --- the producer: one warp, whose first lane copies

// What a mask says of a row block's K/V blocks, of 32 at a time: each lane reads what it says of one.
struct Tiles {
  const Work& w;
  BlockMask mask;
  int word;  // which 32 blocks: -1 before the first
  unsigned kept, mixed;

  __device__ __forceinline__ void read(int which) {
    const int j = which * 32 + threadIdx.x % 32;
    const TileState state = w.first <= j && j < w.end ? mask.state[w.place.i * mask.state_row + j * mask.state_col] : EMPTY;
    word = which, kept = __ballot_sync(~0u, state != EMPTY), mixed = __ballot_sync(~0u, state == MIXED);
  }
  // The last visit of a block below j
  __device__ __forceinline__ int below(int j) {
    for (j--; j >= w.first; j = j / 32 * 32 - 1) {
      if (j / 32 != word) read(j / 32);
      const unsigned rest = kept << (31 - j % 32);  // block j and those before it of the same word
      if (!rest) continue;
      j -= __clz(rest);
      return j | (j < w.whole_begin || j >= w.whole_end ? CUT : 0) | (mixed >> j % 32 & 1 ? ASKS : 0);
    }
    return NO_VISIT;
  }
};

// The row block at a place: of the queue, or where row blocks have none, being alike or no more than thread blocks, the one of that
// number. The first lane asks.
__device__ __forceinline__ int take(const Params& p, int place) {
  const int work = threadIdx.x > 0 || place >= p.works ? NO_WORK : p.queue ? p.queue[place] : place;
  return __shfl_sync(~0u, work, 0);
}
// The next place: one that nobody has, or the one a grid further. Asked for late: who takes a row block before it can begin keeps it
// from those who could.
__device__ __forceinline__ int next_place(const Params& p, const Shared& s) {
  if (threadIdx.x > 0) return 0;
  return gridDim.x + (p.queue ? atomicAdd(p.taken, 1) : read_shared(s.work));
}

// To the consumers, behind their having read the one before
__device__ __forceinline__ void hand_on(const Shared& s, int work, int parity) {
  wait_for(s.work_empty, parity);
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(s.work), "r"(work) : "memory");
  arrive(s.work_full);
}

__device__ __forceinline__ void produce(const Params& p, const Params& given, const Shared& s) {
  const bool copies = threadIdx.x == 0;
  Slot K_slot = {0, 1}, V_slot = {0, 1};  // a slot is empty at first, as if a phase before had ended
  int parity = 1, came = 0;

  const auto load_keys = [&](const Work& w, int j, int next = NO_VISIT) {
    if (copies) {
      wait_for(s.K_empty + 8 * K_slot.index, K_slot.parity);
      if constexpr (SKIPS) write_shared(s.next + 4 * K_slot.index, next);
      arrive_expecting(s.K_full + 8 * K_slot.index, K_BYTES);
      load_tile<BC>(s.K + K_slot.index * K_BYTES, given.K, s.K_full + 8 * K_slot.index, K_SLABS, w.place.first_key + j * BC,
                    w.place.kv_head, w.place.batch);
    }
    K_slot = K_slot.next();
  };
  const auto load_values = [&](const Work& w, int j) {
    const unsigned full = s.V_full + 8 * V_slot.index, V = s.V + V_slot.index * V_BYTES;
    const bool cut = (PADDED || VARLEN) && (j + 1) * BC > w.masks.keys;  // then the warp has something to do to it
    if (copies) {
      wait_for(s.V_empty + 8 * V_slot.index, V_slot.parity);
      arrive_expecting(cut ? s.V_came : full, V_BYTES);
      load_tile<BC>(V, given.V, cut ? s.V_came : full, V_SLABS, w.place.first_key + j * BC, w.place.kv_head, w.place.batch);
    }
    if (cut) {
      wait_for(s.V_came, came);
      came ^= 1;
      clear_rows<BC>(V, V_SLABS, w.masks.keys - j * BC);
      publish_writes();
      __syncwarp();
      if (copies) arrive(full);
    }
    V_slot = V_slot.next();
  };

  for (int work = take(p, block_index());; work = take(p, next_place(p, s))) {
    if (work == NO_WORK) {
      if (copies) hand_on(s, NO_WORK, parity);
      break;
    }
    const Work w = work_of(p, place_of(p, work));
    if (copies) hand_on(s, w.place.exists ? work : NO_WORK, parity);
    if (!w.place.exists) break;  // a block that its sequence has not: all after it in the queue are such
    Tiles tiles = {w, block_mask_of(p, w.place.batch, w.place.head, w.place.first_block<BR>()), -1};
    int visit = NO_VISIT, next = NO_VISIT;
    if constexpr (SKIPS) {
      visit = tiles.below(w.end);
      if (visit >= 0) {
        next = tiles.below(block_of(visit));
        load_keys(w, block_of(visit), next);
      }
    } else {
      if (w.turns() > 0) load_keys(w, w.end - 1);
    }
    const bool seen = SKIPS ? visit >= 0 : w.turns() > 0;
    if (copies) {
#pragma unroll 1
      for (int part = 0; part < Q_PARTS; part++) {
        const unsigned full = s.Q_full + 8 * part;
        wait_for(s.Q_empty + 8 * part, parity);
        if constexpr (SKIPS) write_shared(s.begin + 4 * part, visit);
        if (seen) {
          arrive_expecting(full, Q_ROWS * SLAB_ROW * K_SLABS);
          load_tile<BR, PACK>(s.Q + part * Q_ROWS * SLAB_ROW, given.Q, full, K_SLABS, w.place.first_query + (w.row() + part * Q_ROWS) / PACK,
                              w.place.head / PACK, w.place.batch);
        } else {
          arrive(full);
        }
      }
    }
    parity ^= 1;
    if constexpr (SKIPS) {
      while (visit >= 0) {
        const int one = block_of(visit);
        visit = next;
        if (visit >= 0) {
          next = tiles.below(block_of(visit));
          load_keys(w, block_of(visit), next);
        }
        load_values(w, one);
      }
    } else {
      for (int j = w.end - 1; j >= w.first; j--) {
        if (j > w.first) load_keys(w, j - 1);
        load_values(w, j);
      }
    }
  }
}

// --- a consumer: one warpgroup, each warp of which has 16 rows, each lane parts of rows g and g + 8 of those

constexpr int EARLY = BC / 8 < 4 ? BC / 8 : 4;  // of BC / 8, the exponentials that stand before the wait for O

struct Consumer {
  const Shared& s;
  int group;
  float factor;  // of S, for exponents of two
  Slot slot;     // of the K and V block of this turn

  float S[BC / 8][4], O[DV / 8][4];
  unsigned P[BC / 16][4];
  float minus_m[2], l[2];  // l is this lane's part of the sum

  // Where warpgroups issue their products in turns: one after the other, so that the exponentials of one are under the next one's
  // products
  __device__ __forceinline__ void take_turn() const {
    if constexpr (PING_PONG) meet(TURN + group, 2 * WARPGROUP);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (PING_PONG) let_pass(TURN + (group + 1 < CONSUMERS ? group + 1 : 0), 2 * WARPGROUP);
  }
  __device__ __forceinline__ void release(unsigned empty) const {
    if (threadIdx.x % 32 == 0) arrive(empty);
  }

  // S = Q K_j^T
  __device__ __forceinline__ void multiply_scores(Slot at) {
    const Operand Q = Operand::rows(s.Q) + group * 64 * SLAB_ROW, K = Operand::rows(s.K) + at.index * K_BYTES;
    begin_products();
#pragma unroll
    for (int k = 0; k < (HEAD_DIM + 15) / 16; k++) {
      const int inside = k % 4 * 32;
      multiply<BC>(S, Q + (k / 4 * BR * SLAB_ROW + inside), K + (k / 4 * BC * SLAB_ROW + inside), k > 0);
    }
    commit_products();
  }
  // O += P V_j
  __device__ __forceinline__ void multiply_values(Slot at) {
    const Operand V = Operand::columns(s.V, BC * SLAB_ROW) + at.index * V_BYTES;
    begin_products();
#pragma unroll
    for (int k = 0; k < BC / 16; k++) multiply<DV>(O, P[k], V + k * 16 * SLAB_ROW);
    commit_products();
  }

  // Line 10 but for m: each row's largest score, and whether m and l are to follow it. The weights are relative to the m that there is
  // until they would grow beyond 2 to MOST_GROWTH. `offset` is what their exponents are offset by.
  __device__ __forceinline__ bool find_maximum(float (&m_tilde)[2], float (&offset)[2]) const {
    float growth = NEG_INF, most = 0.f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float largest = S[0][2 * h];
#pragma unroll
      for (int n = 0; n < BC / 8; n++) largest = fmaxf(largest, fmaxf(S[n][2 * h], S[n][2 * h + 1]));
      m_tilde[h] = row_max(largest);
      offset[h] = minus_m[h] * factor;  // infinite before any key was seen
      growth = fmaxf(growth, fmaf(m_tilde[h], factor, offset[h]));
      most = fmaxf(most, fabsf(offset[h]));
    }
    return __any_sync(~0u, (growth > MOST_GROWTH) | (most > MOST_OFFSET));
  }
  // m grows, and l with it; O is to be multiplied by `rescale`.
  __device__ __forceinline__ void raise_maximum(const float (&m_tilde)[2], float (&offset)[2], float (&rescale)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float m = -minus_m[h], m_new = fmaxf(m, m_tilde[h]);
      const Origin now = origin_of(m_new, factor);
      rescale[h] = weight_kept(m, now, factor);
      minus_m[h] = -m_new;
      l[h] *= rescale[h];
      offset[h] = now.offset;
#pragma unroll
      for (int n = 0; n < BC / 8; n++) S[n][2 * h] -= now.score, S[n][2 * h + 1] -= now.score;
    }
  }
  // S = exp(S - m), l += rowsum(S), of columns 8 FIRST to 8 END - 1
  template <int FIRST = 0, int END = BC / 8> __device__ __forceinline__ void weigh(const float (&offset)[2]) {
#pragma unroll
    for (int n = FIRST; n < END; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        S[n][e] = exp2_of(fmaf(S[n][e], factor, offset[e / 2]));
        l[e / 2] += S[n][e];
      }
  }
  // Of the weights of K/V block j, behind their part of l, some are dropped. Which ones of 64 keys is found first, a bit each, by a loop that
  // is not unrolled: Philox's numbers would take registers.
  __device__ __forceinline__ void drop(int j, const Work& w, int row) {
#pragma unroll
    for (int first = 0; DROPOUT && first < BC / 8; first += 8) {
      const int end = first + 8 < BC / 8 ? first + 8 : BC / 8;
      unsigned kept = 0;
#pragma unroll 1
      for (int n = end - 2; n >= first; n -= 2) {
        float weights[1][2][4];
        each_weight(weights, dropout_of(*w.masks.p, w.masks.batch, w.masks.head), 0, row / 16 * 16, j * BC + 8 * n,
                    [&](float&, bool keeps) { kept = kept << 1 | keeps; });
      }
      int bit = 0;
#pragma unroll
      for (int n = first; n < end; n += 2)
#pragma unroll
        for (int e = 3; e >= 0; e--)  // from the last that was found
#pragma unroll
          for (int upper = 1; upper >= 0; upper--, bit++) Drop()(S[n + upper][e % 2 * 2 + e / 2], kept >> bit & 1);
    }
  }
  // P = S, rounded; an accumulator's layout is that of a factor
  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int n = 0; n < BC / 8; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) P[n / 2][n % 2 * 2 + h] = pack(Element(), S[n][2 * h], S[n][2 * h + 1]);
  }
  __device__ __forceinline__ void scale_values(const float (&by)[2]) {
#pragma unroll
    for (int n = 0; n < DV / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) O[n][e] *= by[e / 2];
  }

  // The visit behind this turn's, which came with its K block
  __device__ __forceinline__ int next_visit() const { return SKIPS ? read_shared(s.next + 4 * slot.index) : NO_VISIT; }
  __device__ __forceinline__ void mask(int j, const Work& w, int row) {
    scale_and_mask(S, BIAS ? w.masks.p->scale_log2 : 1.f, LOG2_E, w.masks, row, block_of(j) * BC, w.place.Nq, asks(j));
  }

  // The first block: nothing to add to O yet. Returns the next visit.
  __device__ __forceinline__ int begin(int j, const Work& w, int row) {
    wait_for(s.K_full + 8 * slot.index, slot.parity);
    const int next = next_visit();
    multiply_scores(slot);
    wait_for_products<0>(S);
    release(s.K_empty + 8 * slot.index);
    mask(j, w, row);
    float m_tilde[2], offset[2], rescale[2];
    find_maximum(m_tilde, offset);
    raise_maximum(m_tilde, offset, rescale);
    weigh(offset);
    drop(block_of(j), w, row);
    round_weights();
    if (SKIPS ? next >= 0 : j > w.first) wait_for(s.K_full + 8 * slot.next().index, slot.next().parity);
    return next;
  }

  // A turn's first half: both products under way, S_j as soon as it is there
  __device__ __forceinline__ void multiply_both(Slot before) {
    take_turn();
    multiply_scores(slot);
    wait_for(s.V_full + 8 * before.index, before.parity);
    multiply_values(before);
    pass_turn();
    wait_for_products<1>(S);
    release(s.K_empty + 8 * slot.index);
  }
  // Its second half, behind the first exponentials: the others, and P_j, as soon as P V of the block before has been added to O, which
  // follows Q K^T and ends about when the maximum is found. An exponential is issued every eighth clock; weights are rounded between
  // them. The wait for the next K block stands first, to keep the compiler from moving the wait for O in front of the maximum.
  __device__ __forceinline__ void end_turn(Slot before, bool more, int j, const Work& w, int row, const float (&offset)[2]) {
    if (more) wait_for(s.K_full + 8 * slot.next().index, slot.next().parity);
    wait_for_products<0>(O);
    release(s.V_empty + 8 * before.index);
    weigh<EARLY>(offset);
    drop(block_of(j), w, row);
    round_weights();
  }

  // Turns from block j down to `until`. Where m grows, there is a copy of the first exponentials for that, and O is rescaled behind the inner
  // loop: what every turn needs stays straight code.
  template <bool MASKED> __device__ __forceinline__ void turns(int& j, int until, const Work& w, int row) {
    while (j >= until) {
      bool grown;
      int next = NO_VISIT;
      float rescale[2];
#pragma unroll 1
      do {
        const Slot before = slot;
        slot = slot.next();
        if constexpr (SKIPS) next = next_visit();
        multiply_both(before);
        if constexpr (MASKED) {
          if (!SKIPS || ALL_MASKED || j >= CUT) mask(j, w, row);
        }
        float m_tilde[2], offset[2];
        grown = find_maximum(m_tilde, offset);
        if (!grown) {
          weigh<0, EARLY>(offset);
        } else {
          raise_maximum(m_tilde, offset, rescale);
          weigh<0, EARLY>(offset);
        }
        end_turn(before, SKIPS ? next >= 0 : j > w.first, j, w, row, offset);
      } while ((SKIPS ? j = next : --j) >= until && !grown);
      if (grown) scale_values(rescale);
    }
  }

  // The last block is to be added to O
  __device__ __forceinline__ void end() {
    wait_for(s.V_full + 8 * slot.index, slot.parity);
    multiply_values(slot);
    wait_for_products<0>(O);
    release(s.V_empty + 8 * slot.index);
    slot = slot.next();
  }
};

// O = diag(l)^-1 O, L = m + log(l). The first warp stores what its warpgroup has put into O's room, or that of its rows of Q.
__device__ __forceinline__ void write_rows(Consumer& c, const Params& p, const Params& given, const RowBlock& place, int warp, int lane) {
  const Shared& s = c.s;
  float by[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = place.i * BR + c.group * 64 + warp * 16 + lane / 4 + 8 * h, query = row / PACK, of_pack = row % PACK;
    const float l = row_sum(c.l[h]);
    const Origin origin = origin_of(-c.minus_m[h], c.factor);
    by[h] = l == 0.f ? 0.f : 1.f / l;
    float L = (SCALED ? LN_2 : p.scale) * origin.score + LN_2 * (log2f(l) - origin.offset);
    by[h] *= join_sink(L, sink_of(p, place.head + of_pack, query < place.Nq));
    if constexpr (DROPOUT) by[h] *= dropout_of(p, 0, 0).scale;
    if (p.L && lane % 4 == 0 && query < place.Nq) p.L[place.L_row + static_cast<long long>(of_pack) * place.Nq + query] = L;
  }
  c.scale_values(by);
  if constexpr (O_APART) meet(1 + c.group, WARPGROUP);  // the one before has left
  const int row = c.group * 64 + warp * 16 + lane % 16;  // of four 8 x 8 matrices, the row whose address this lane gives
#pragma unroll
  for (int n = 0; n < DV / 16; n++) {
    const unsigned chunk = (n % 4 * 2 + lane / 16) ^ row % 8, at = s.O + n / 4 * BR * SLAB_ROW + row * SLAB_ROW + chunk * 16;
    const float(&left)[4] = c.O[2 * n], (&right)[4] = c.O[2 * n + 1];
    store_matrices(at, pack(Element(), left[0], left[1]), pack(Element(), left[2], left[3]), pack(Element(), right[0], right[1]),
                   pack(Element(), right[2], right[3]));
  }
  publish_writes();
  meet(1 + c.group, WARPGROUP);
  const int first = place.i * BR + c.group * 64;
  const long long query = place.first_query + first / PACK;
  const unsigned from = s.O + c.group * 64 * SLAB_ROW;
#if VARLEN
  // Of the last rows of a sequence each goes by itself, since those behind them are another sequence's.
  const int rows = place.Nq - first;
  if (rows < 64) {
    if (warp == 0) {
      for (int r = lane; r < rows; r += 32)
        for (int slab = 0; slab < V_SLABS; slab++) {
          store_box<1>(given.O_row, from + (slab * BR + r) * SLAB_ROW, slab * SLAB, query + r, place.head, place.batch);
        }
      wait_for_stores();
      __syncwarp();
      if (!O_APART && lane == 0) arrive(s.own_Q_empty());
    }
    return;
  }
#endif
  if (warp == 0 && lane == 0) {
    for (int slab = 0; slab < V_SLABS; slab++)
      store_box<PACK>(given.O, from + slab * BR * SLAB_ROW, slab * SLAB, query, place.head / PACK, place.batch);
    wait_for_stores();
    if constexpr (!O_APART) arrive(s.own_Q_empty());
  }
}

// What the producer has handed on; each warp reads it.
__device__ __forceinline__ int next_work(const Shared& s, int parity) {
  wait_for(s.work_full, parity);
  const int work = read_shared(s.work);
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(s.work_empty);
  return work;
}

__device__ __forceinline__ void consume(const Params& p, const Params& given, const Shared& s, int group) {
  const int warp = threadIdx.x % WARPGROUP / 32, lane = threadIdx.x % 32;
  Consumer c = {s, group, SCALED ? 1.f : p.scale_log2, {0, 0}};
  if (PING_PONG && group == CONSUMERS - 1) c.pass_turn();
  for (int parity = 0;; parity ^= 1) {
    const int work = next_work(s, parity);
    if (work == NO_WORK) break;
    Work w = work_of(p, place_of(p, work));
    const int row = w.row() + group * 64 + warp * 16 + lane / 4;
    if constexpr (SCORE || MASK == 2 || DROPOUT) {
      static_assert(!SCORE || 8 % PACK == 0, "rows g and g + 8 are of one head");
      w.masks.batch = w.place.sequence, w.masks.head += row % PACK;
      w.masks.of_head = score_of_heads<PACK>(p, {w.place.sequence, w.place.head, 0, 0, w.place.Nq, w.place.Nk}, row % PACK);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) c.minus_m[h] = -NEG_INF, c.l[h] = 0.f;
#pragma unroll
    for (int n = 0; n < DV / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) c.O[n][e] = 0.f;
    wait_for(Q_PARTS == 1 ? s.Q_full : s.Q_full + 8 * group, parity);
    const int visit = SKIPS ? read_shared(Q_PARTS == 1 ? s.begin : s.begin + 4 * group) : NO_VISIT;
    if (SKIPS ? visit >= 0 : w.turns() > 0) {
      int j = SKIPS ? visit : w.end - 1;
      const int next = c.begin(j, w, row);
      j--;
      if constexpr (SKIPS) {
        j = next;
        c.turns<true>(j, 0, w, row);
      } else if constexpr (ALL_MASKED) {
        c.turns<true>(j, w.first, w, row);
      } else {
        if constexpr (CAUSAL || WINDOW) c.turns<true>(j, max(w.whole_end, w.first), w, row);
        c.turns<false>(j, max(w.whole_begin, w.first), w, row);
        if constexpr (WINDOW) c.turns<true>(j, w.first, w, row);
      }
      if constexpr (O_APART) c.release(s.own_Q_empty());
      c.end();
    } else if constexpr (O_APART) {
      c.release(s.own_Q_empty());
    }
    const RowBlock place = VARLEN ? w.place : place_of(p, work);  // the same; registers are free again
    write_rows(c, p, given, place, warp, lane);
  }
  if (PING_PONG && group == 0) c.take_turn();  // which is passed once more than it is taken
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fa3_forward(const __grid_constant__ Params given) {
  const Params p = given;
  extern __shared__ __align__(1024) unsigned char sram[];
  const Shared s(shared_address(sram));
  if (threadIdx.x == 0) s.init_barriers();
  __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (threadIdx.x < 32) produce(p, given, s);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    consume(p, given, s, group - 1);
  }
}
