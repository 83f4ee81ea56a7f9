// FlashAttention-2's forward (arXiv 2307.08691, Algorithm 1): one thread block a row block of Q, which streams the K/V
// blocks that it sees through a ring of SRAM slots. O, l and m stay in registers to the end; each warp owns whole rows.
//
// Constants, all from the tile schedule:
//   ELEMENT     __half, __nv_bfloat16 or float       HEAD_DIM, VALUE_DIM  d of Q and K, of V and O
//   BR, BC      rows of a Q block, of a K/V block    WARP_ROWS  rows that a warp owns: 16 or 32
//   COL_WARPS   warps that share their rows: 1, or 2 where d_v is above 256 (column_warps.cuh)
//   STAGES      slots of the ring, a K and a V block each: 1 or 2          BLOCKS  thread blocks that share a multiprocessor
//   Q_IN_REGS   whether Q stays in registers too     COPY_BYTES width of a copy
//   SCALE_FIRST whether S is scaled before its maximum is taken: with a bias, or a scale that is not positive
//   CAUSAL, WINDOW, MASK, BIAS, PADDED, SPARSE, TILES, SINKS  mask.cuh, mask_function.cuh, block_mask.cuh, sinks.cuh
//   DROPOUT     whether weights are dropped: dropout.cuh
//   VARLEN      whether batches are sequences of their own lengths, packed one behind the other: sequence.cuh
#define SUB (BC / COL_WARPS)
// Whether registers are scarce: O takes up to half of them, and masks, the addresses of narrow copies or, before sm_80, what
// is being copied would make ptxas spill. Fewer loads are then under way at once.
constexpr int SCARCE =
    VALUE_DIM / COL_WARPS > 176 && (COPY_BYTES < 16 || __CUDA_ARCH__ < 800 || MASK || BIAS || WINDOW || SPARSE || VARLEN) ? 4 : 0;
#include "block_mask.cuh"
#include "dropout.cuh"
#include "element.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "row_products.cuh"
#include "sequence.cuh"
#include "sinks.cuh"
#include "softmax_origin.cuh"

constexpr int ROW_WARPS = BR / WARP_ROWS, WARPS = ROW_WARPS * COL_WARPS, THREADS = 32 * WARPS;
constexpr int M = WARP_ROWS / 16, N = BC / 8;  // tensor core tiles of a warp's part of S
#include "column_warps.cuh"

// Whether no block goes unmasked: every score has something of its own, or to know which blocks all rows see would take more
// registers than there are.
constexpr bool ALL_MASKED = SCALE_FIRST || (SCARCE && (WINDOW || MASK));

typedef SwizzledTile<HEAD_DIM, Element, 16 * COL_WARPS> KeyTile;     // of Q and K
typedef SwizzledTile<VALUE_DIM, Element, 16 * COL_WARPS> ValueTile;  // of V and O
typedef PartOf<KeyTile, COL_WARPS, ROW_WARPS> KeyPart;               // a warp's columns of them
typedef PartOf<ValueTile, COL_WARPS, ROW_WARPS> ValuePart;
constexpr int C = ValuePart::PAD / 8;  // tensor core tiles of a warp's columns of O
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int ROW_SIZE = larger(KeyTile::PAD, ValueTile::PAD);  // elements that a row of any tile has room for

// Fragments of Q that are loaded before a turn's barrier, so that fewer are asked for at once behind it
constexpr int EARLY = !Q_IN_REGS && !SCARCE && sizeof(Element) == 2 ? (KeyPart::PAD > 16 ? 2 : 1) : 0;

// The stream of the visited blocks, from the last one down, through STAGES slots for a K_j and its V_j each. With two, the next block
// is asked for among the products of P V_j, and a turn takes one barrier; with one, V_j is under way during S = Q K_j^T and the next K_j
// from then on. Only the last block may be short; all of that is fetched at the start.
struct Stream {
  const Element *K, *V;  // the last rows that this thread copies: of block 0; without a block mask, of the block to be fetched next
  const Element* anywhere;  // can be read, as rows that there are not cannot
  long long K_row, V_row;
  int keys;
  Blocks blocks;
  StreamOfParts<BC, THREADS> parts;
  unsigned slot, both;  // where the block at hand is in shared memory, and the sum of that and where the other slot is

  static constexpr int SLOT = 2 * BC * ROW_SIZE * sizeof(Element);

  // ring: STAGES x 2 x (BC x ROW_SIZE)
  __device__ __forceinline__ void start(const Element* ring, int j) {
    if constexpr (!SKIPS) {
      K += static_cast<long long>(j) * BC * K_row;
      V += static_cast<long long>(j) * BC * V_row;
    }
    const unsigned first = unknown(shared_address(ring));  // or it would be found anew in each turn
    slot = first + (STAGES - 1) * SLOT;
    both = 2 * first + (STAGES - 1) * SLOT;
    if (j >= blocks.begin) {
      fetch_keys<false>(j, true);
      if (STAGES == 2 || is_short(j)) fetch_values<false>(j, true);
    }
    close_group();
  }

  // K_j, as soon as it is there for all threads, which are done with the block before.
  __device__ __forceinline__ unsigned next_keys(int j) {
    wait_for_groups<0>();
    __syncthreads();
    slot = other_slot();
    if constexpr (STAGES == 1) {
      if (!is_short(j)) fetch_values<true>(j, true);
      close_group();
    }
    return slot;
  }

  // What a score function has for the keys of block j, which are there with K_j; asks for what it has for the next block's.
  __device__ __forceinline__ void next_parts(int j, Masks& masks, int Nq) {
    if constexpr (KEY_LOADS > 0) {
      masks.of_keys = parts.turn(j * BC);
      ask_for_parts(blocks.below(j), masks, Nq);
    }
  }
  __device__ __forceinline__ void ask_for_parts(int j, const Masks& masks, int Nq) {
    const bool wanted = j >= blocks.begin, asks = MASK && wanted && blocks.asks(j);
    parts.ask(*masks.p, masks.of_head, score_at(masks, 0, j * BC, Nq), wanted ? keys - j * BC : 0, asks);
  }

  // V_j, as soon as it is there for all threads, which with one slot are done with K_j.
  __device__ __forceinline__ unsigned next_values(int j) {
    if constexpr (STAGES == 1) {
      wait_for_groups<0>();
      __syncthreads();
      const int next = blocks.below(j);
      if (next >= blocks.begin) fetch_keys<true>(next, true);
      close_group();
    }
    return slot + SLOT / 2;
  }

  // With two slots: asks for the next block, where there is one.
  __device__ __forceinline__ void ask_for_next(int j) {
    if constexpr (STAGES == 2) {
      const int next = blocks.below(j);
      fetch_keys<true>(next, next >= blocks.begin);
      fetch_values<true>(next, next >= blocks.begin);
      close_group();
    }
  }

 private:
  __device__ __forceinline__ bool is_short(int j) const { return keys - j * BC < BC; }
  __device__ __forceinline__ unsigned other_slot() const { return both - slot; }

  // Into the other slot, or the only one
  template <bool WHOLE> __device__ __forceinline__ void fetch_keys(int j, bool wanted) {
    fetch<KeyTile, WHOLE>(j, other_slot(), K, K_row, wanted);
  }
  template <bool WHOLE> __device__ __forceinline__ void fetch_values(int j, bool wanted) {
    fetch<ValueTile, WHOLE>(j, other_slot() + SLOT / 2, V, V_row, wanted);
  }
  template <class Tile, bool WHOLE>
  __device__ __forceinline__ void fetch(int j, unsigned to, const Element*& next, long long row, bool wanted) const {
    if constexpr (SKIPS) {
      const Element* from = next + static_cast<long long>(j) * BC * row;
      Tile::load_back<BC, THREADS, WHOLE>(to, from, anywhere, row, keys - j * BC, threadIdx.x, wanted);
    } else {
      Tile::load_back<BC, THREADS, WHOLE>(to, next, anywhere, row, keys - j * BC, threadIdx.x, wanted);
    }
  }
};

#include "online_softmax.cuh"

// Where a warp and its partner put parts of S, behind Q and the ring
constexpr int PAIR_ROOMS = (BR + STAGES * 2 * BC) * ROW_SIZE * sizeof(Element);
constexpr int PAIR_BYTES = COL_WARPS == 1 ? 0 : BR * BC * sizeof(float);
__device__ __forceinline__ float4* pair_room() {
  extern __shared__ __align__(128) unsigned char sram[];
  return reinterpret_cast<float4*>(sram + PAIR_ROOMS) + row_warp_of(threadIdx.x / 32) * (M * N * 32);
}

// A warp's part of lines 6 to 11 for one K/V block: S = Q K_j^T, P = exp(S - m), O += P V_j
struct Warp {
  int row, Nq;  // the first of its rows
  float scale_log2, factor;
  unsigned at_keys;  // place_of_keys

  // Whether any of its rows sees a key of block j
  __device__ __forceinline__ bool sees(int j, const Masks& masks) const {
    const int last = min(row + WARP_ROWS, Nq) - 1;
    return row < Nq && j * BC < visible_end(masks, last) && (j + 1) * BC > visible_begin(masks, row);
  }

  // A block of which it sees nothing: it only keeps step with the others.
  __device__ __forceinline__ void pass(int j, Stream& stream, Masks& masks) const {
    stream.next_keys(j);
    stream.next_parts(j, masks, Nq);
    stream.next_values(j);
    stream.ask_for_next(j);
    stream.parts.put();
  }

  // Of the weights of 16 keys, from `key` on, behind their part of l: some are dropped. Its row is unknown, or some of Philox's first
  // rounds would be kept in all turns.
  template <int COLS>
  __device__ __forceinline__ void drop(float (&P)[M][COLS][4], int n, int key, const Masks& masks) const {
    if constexpr (DROPOUT) each_weight(P, dropout_of(*masks.p, masks.batch, masks.head), n, unknown(row), key, Drop());
  }

  // A block of which, if `masked`, some row may not see every key
  template <class Rows>
  __device__ __forceinline__ void visit(int j, bool masked, State& state, Rows& Q_rows, Stream& stream, Masks& masks) const {
    float S[M][N][4];
    if constexpr (EARLY > 0) Q_rows.keep();
    const unsigned K_at = stream.next_keys(j);
    stream.next_parts(j, masks, Nq);
    scores(S, Q_rows, K_at, at_keys);
    const bool asks = MASK && stream.blocks.asks(j);
    // Its place is found again: kept, it would take registers in all turns.
    auto mask = [&](float (&S)[M][N / COL_WARPS][4]) {
      const int first = (VARLEN ? row : find_block<BR>(Nq) * BR + row_warp_of(threadIdx.x / 32) * WARP_ROWS) + threadIdx.x % 32 / 4;
#pragma unroll
      for (int m = 0; m < M; m++)
        scale_and_mask(S[m], SCALE_FIRST ? scale_log2 : 1.f, LOG2_E, masks, first + 16 * m, j * BC + col_warp() * SUB, Nq, asks);
    };
    if constexpr (ALL_MASKED && COL_WARPS == 1) mask(S);
    unsigned V_at;
    auto values = [&] { V_at = stream.next_values(j); };
    if constexpr (COL_WARPS == 1) {
      values();
    } else {
      add_partner<STAGES == 1>(S, pair_room(), values, [&](float (&half)[M][N / COL_WARPS][4]) {
        if (ALL_MASKED || masked) mask(half);
      });
    }
    float offset[M][2];
    if constexpr (sizeof(Element) == 2) {
      // The exponentials of 16 keys come right before the product that takes them, so that they run beside the one before it.
      float P[M][2][4];
      if constexpr (COL_WARPS == 1) {
        rescale_and_weigh(S, state, factor, offset, !ALL_MASKED && masked, mask, P);
      } else {
        rescale_and_weigh(S, state, factor, offset, false, [](float (&)[M][N][4]) {}, P);
      }
      drop(P, 0, j * BC, masks);
      add_sixteen<ValuePart>(state.O, P, V_at, 0);
      stream.ask_for_next(j);
#pragma unroll
      for (int k = 1; k < N / 2; k++) {
        weigh(S, state.l, factor, offset, k);
        drop(S, 2 * k, j * BC + 16 * k, masks);
        add_sixteen<ValuePart>(state.O, S, V_at + k * 16 * ValuePart::ROW_BYTES, k);
      }
    } else {
      stream.ask_for_next(j);
      rescale(S, state, factor, offset, !ALL_MASKED && masked, mask);
      weigh_tile(S, state, factor, offset);
#pragma unroll
      for (int k = 0; k < N / 2; k++) drop(S, 2 * k, j * BC + 16 * k, masks);
      add_tile_of_values<ValueTile>(state.O, S, V_at);
    }
    stream.parts.put();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fa2_forward(__grid_constant__ const Params given) {
  const Params p = given;
  extern __shared__ __align__(128) unsigned char sram[];
  Element* Q_smem = reinterpret_cast<Element*>(sram);  // (BR x d), at the end O (BR x d_v)
  Element* ring = Q_smem + BR * ROW_SIZE;              // STAGES x 2 x (BC x d or d_v), behind it the pairs' rooms

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row_warp = COL_WARPS == 1 ? warp : warp % ROW_WARPS;
  const RowBlock place = find_row_block<BR>(p, sram);
  if (!place.exists) return;
  const int Nq = place.Nq, row_block = place.i * BR, rows = min(BR, Nq - row_block);
  const int keys = count_keys(p, place.batch, place.Nk, sram);
  Masks masks = masks_of(p, place.batch, place.head, Nq, place.Nk, keys);
  masks.batch = place.sequence;
  masks.of_head = score_of_head(p, place.sequence, place.head, Nq, place.Nk, sram);

  // The K/V blocks that some row sees. Every row sees all of those from `whole_begin` to `whole_end`.
  const int last_row = row_block + rows - 1;
  const int first_key = visible_begin(masks, row_block), end_key = visible_end(masks, last_row);
  unsigned* row_parts = reinterpret_cast<unsigned*>(sram + PAIR_ROOMS + PAIR_BYTES);  // score_parts.cuh
  unsigned* key_parts = row_parts + ROW_LOADS * BR;                             // two blocks'
  unsigned* kept = key_parts + 2 * KEY_LOADS * BC;
  const Blocks blocks = {first_key / BC, first_key < end_key ? (end_key + BC - 1) / BC : 0, kept};
  const int whole_begin = (visible_begin(masks, last_row) + BC - 1) / BC;
  const int whole_end = visible_end(masks, row_block) / BC;
  if constexpr (SKIPS) {
    read_block_mask(kept, block_mask_of(p, place.batch, place.head, place.first_block<BR>()), place.i, blocks.begin, blocks.end, warp, WARPS);
    __syncthreads();
  }
  const int first_block = blocks.below(blocks.end);
  const bool seen = first_block >= blocks.begin;

  if (seen) KeyTile::load<BR, THREADS, false>(Q_smem, place.query(p.Q, row_block), p.Q.row, rows, threadIdx.x);
  close_group();
  Stream stream = {place.keys(p.K) + KeyTile::begin<THREADS>(p.K.row, threadIdx.x) + KeyTile::last_rows(BC, THREADS) * p.K.row,
                   place.keys(p.V) + ValueTile::begin<THREADS>(p.V.row, threadIdx.x) + ValueTile::last_rows(BC, THREADS) * p.V.row,
                   p.K.at, p.K.row, p.V.row, keys, blocks};
  stream.start(ring, first_block);
  if constexpr (KEY_LOADS > 0) {
    stream.parts.start(shared_address(key_parts));
    stream.ask_for_parts(first_block, masks, Nq);
    stream.parts.put();
  }
  if constexpr (ROW_LOADS > 0) {
    RowParts<BR, THREADS> own;
    own.ask(p, masks.of_head, score_at(masks, row_block, 0, Nq), seen ? rows : 0, true);
    own.store(shared_address(row_parts));
    masks.of_rows = shared_address(row_parts) - 4 * row_block;
  }

  const int warp_row = row_block + row_warp * WARP_ROWS;  // the first of the warp's rows
  State state = {};
#pragma unroll
  for (int m = 0; m < M; m++) state.minus_m[m][0] = state.minus_m[m][1] = -NEG_INF;
  const float factor = SCALE_FIRST ? 1.f : p.scale_log2;

  QueryRows<KeyPart, M, Q_IN_REGS, EARLY> Q_rows;
  Q_rows.smem = Q_smem + row_warp * WARP_ROWS * KeyTile::PAD;
  if constexpr (Q_rows.HELD > 0) {
    wait_for_groups<1>();
    __syncthreads();
    if (Q_IN_REGS && seen) Q_rows.keep();
  }

  // Lines 6 to 11: S = Q K_j^T, P = exp(S - m), O += P V_j
  // By a shuffle: ptxas would else find it anew in each turn.
  const unsigned at_keys = __shfl_sync(~0u, place_of_keys<KeyPart>(), lane);
  const Warp work = {warp_row, Nq, p.scale_log2, factor, at_keys};
  int j = first_block;
  for (; j >= blocks.begin && !work.sees(j, masks); j = blocks.below(j)) work.pass(j, stream, masks);
  for (; j >= blocks.begin && (!WINDOW || work.sees(j, masks)); j = blocks.below(j))
    work.visit(j, j < whole_begin || j >= whole_end || (MASK && blocks.asks(j)), state, Q_rows, stream, masks);
  if constexpr (WINDOW) {
    for (; j >= blocks.begin; j = blocks.below(j)) work.pass(j, stream, masks);
  }

  // Lines 12 to 15: O = diag(l)^-1 O, L = m + log(l). O goes through the room of the Q block: with one slot all are done with that since
  // the last barrier; with two, each warp with its own rows, which is enough where they are as wide as O's.
  if constexpr (STAGES == 2) {
    if constexpr (KeyTile::PAD == ROW_SIZE) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
  const RowBlock end = VARLEN ? place : find_row_block<BR>(p, sram);  // what `place` is; registers are free again
  const int end_row = end.i * BR + row_warp * WARP_ROWS, end_rows = end.Nq - end_row;
  Element* O_warp = Q_smem + row_warp * WARP_ROWS * ROW_SIZE;
  // Each of the four lanes that share rows finds what one of them is divided by, for all.
  const int own = t % (2 * M), own_row = own * 8 + g;
  float l = 0.f, minus_m = 0.f;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float sum = row_sum(state.l[m][h]);
      if (own == 2 * m + h) l = sum, minus_m = state.minus_m[m][h];
    }
  const Origin origin = origin_of(-minus_m, factor);
  float inverse = l == 0.f ? 0.f : 1.f / l;
  float L = (SCALE_FIRST ? LN_2 : p.scale) * origin.score + LN_2 * (log2f(l) - origin.offset);
  const bool writes = t == own && own_row < end_rows && col_warp() == 0;
  inverse *= join_sink(L, sink_of<1>(p, end.head, writes));
  if constexpr (SINKS && COL_WARPS > 1) inverse = of_first(pair_room(), inverse);
  if constexpr (DROPOUT) inverse *= dropout_of(p, 0, 0).scale;
  if (p.L && writes) p.L[end.L_row + end_row + own_row] = L;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float of_row = __shfl_sync(~0u, inverse, 2 * m + h, 4);
#pragma unroll
      for (int n = 0; n < C; n++) {
        state.O[m][n][2 * h] *= of_row;
        state.O[m][n][2 * h + 1] *= of_row;
      }
    }
  put_tile<ValuePart>(O_warp, state.O);
  if constexpr (COL_WARPS == 1) {
    __syncwarp();
  } else {
    meet_partner();
  }
  constexpr int STORED = WARP_ROWS / COL_WARPS;  // rows, by each of those that share them
  const int first = col_warp() * STORED;
  ValueTile::store<STORED>(end.query(p.O, end_row + first), O_warp + first * ValueTile::PAD, p.O.row, end_rows - first, lane);
}
