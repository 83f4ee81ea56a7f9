// FlashAttention-2's backward (arXiv 2307.08691, Algorithm 2): one thread block a K/V block of a key head, which streams the Q
// and dO blocks that see it. dK and dV stay in registers to the end, each warp owning some of the keys; dQ is summed in HBM by
// atomics, in float32 (query_sum.cuh). Products are of S^T = K Q^T (keys x queries), so that P^T and dS^T lie in registers as
// dV += P^T dO and dK += dS^T Q want them.
//
// Where two warps share their keys (ROW_WARPS), each makes P^T and dS^T of half of the rows and owns half of the columns of dK and
// dV; what the other one made goes through SRAM. So it is where a gradient has more columns than a warp's registers hold (d or d_v
// above 256): each product is made once. Of 16 rows one of the two makes all.
//
// Three kernels: what is done for each row before and behind (fa2_backward_rows.cuh; dQ has its own type from there, where no kernel
// of its own makes it, fa2_backward_queries.cu), and between them the gradients. row_bases.cu comes before them.
//
// Constants, all from the tile schedule:
//   ELEMENT     __half, __nv_bfloat16 or float       HEAD_DIM, VALUE_DIM  d of Q and K, of V and O
//   BR, BC      rows of a Q block, of a K/V block    STAGES     Q and dO blocks that there is room for: 1 or 2; 0, where the dO block
//               has to go before the Q block comes
//   WARP_KEYS   keys that a warp has                 WARP_ROWS  rows of which it makes P^T and dS^T at once
//   ROW_WARPS   warps that share their keys: 1 or 2
//   WITH_DK, WITH_DV  whether a launch makes dK, and dV: wide heads take one for each
//   WITH_DQ     whether dQ is summed by atomics      COPY_BYTES width of a copy
//   CAUSAL, WINDOW, MASK, BIAS, SCORE, PADDED, SPARSE, TILES, SINKS  mask.cuh, mask_function.cuh, score.cuh, block_mask.cuh, sinks.cuh
//   DROPOUT     whether weights are dropped: dropout.cuh
//   DBIAS       whether the gradient of the bias is summed, by atomics
//   KEPT_ROWS, KEPT_COLS  row blocks and column blocks that share an element of the block mask
//   VARLEN      whether batches are sequences of their own lengths, packed one behind the other: sequence.cuh
#define SUB BR
constexpr int SCARCE = WARP_KEYS == 16 ? 2 : 0;  // registers are, where there are not many keys a warp and so fewer loads
#include "block_mask.cuh"
#include "column_parts.cuh"
#include "dropout.cuh"
#include "element.cuh"
#include "fa2_backward_rows.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "query_sum.cuh"
#include "row_products.cuh"
#include "sequence.cuh"
#include "weight.cuh"

constexpr int KEY_WARPS = BC / WARP_KEYS, WARPS = KEY_WARPS * ROW_WARPS, THREADS = 32 * WARPS;
constexpr int M = WARP_KEYS / 16, N = WARP_ROWS / 8;  // tensor core tiles of a warp's part of S^T
constexpr bool ALONE = WARP_ROWS == BR;  // whether one of the warps that share keys makes all P^T and dS^T
constexpr int PARTS = ALONE ? 1 : BR / (ROW_WARPS * WARP_ROWS);
constexpr bool WIDE = ROW_WARPS > 1 && !(WITH_DK && WITH_DV);  // whether a gradient has more columns than a warp's registers hold
static_assert(ROW_WARPS == 1 || !SCORE || WIDE, "P is not kept for another warp");
static_assert(ROW_WARPS == 1 || PARTS == 1, "Q_i and dO_i are read to the end of a turn");
constexpr bool BY_TURNS = STAGES == 0;  // dP^T is made before S^T; a launch of dV, which needs no V, has dO where V would be
constexpr int SLOTS = BY_TURNS ? 1 : STAGES;
static_assert(!BY_TURNS || (WIDE && ALONE && BR == BC), "the least blocks of wide heads");
// The next Q and dO are asked for as soon as there is room; where products without a branch follow later, and compute capability 9.0,
// which has no registers left, does not mind, among those, which hide what it issues.
constexpr bool FETCH_LATER = ROW_WARPS == 2 && __CUDA_ARCH__ < 900;

typedef SwizzledTile<HEAD_DIM, Element, 16 * ROW_WARPS> KeyTile;     // of Q, K and their gradients
typedef SwizzledTile<VALUE_DIM, Element, 16 * ROW_WARPS> ValueTile;  // of V, O and their gradients
typedef SwizzledTile<BR> ScoreTile;                                  // of P^T and dS^T
// A warp's columns of gradients: those of wide heads are not halves side by side, whose chunks need not be permuted among themselves.
typedef PartOf<KeyTile, WIDE ? ROW_WARPS : 1, KEY_WARPS> KeyPart;
typedef PartOf<ValueTile, WIDE ? ROW_WARPS : 1, KEY_WARPS> ValuePart;

// dQ_i in items of 16 A rows and 16 C columns, as many as warps where they come out even
constexpr int A = BR % (16 * M) == 0 ? M : 1, ROW_ITEMS = BR / (16 * A), COL_ITEMS = (WARPS + ROW_ITEMS - 1) / ROW_ITEMS;
constexpr int MOST_TILES = !WIDE ? SUM_TILES : MASK || BIAS ? 2 : 4;  // of an item, beside the gradients of wide heads, and addresses
constexpr int EVEN = (SUM_TILES + COL_ITEMS - 1) / COL_ITEMS, C = EVEN < MOST_TILES ? EVEN : MOST_TILES, ITEMS = ROW_ITEMS * ((SUM_TILES + C - 1) / C);
struct Item {
  int row, tile, sum;  // the first row, the first of 16 columns, and where the sum of both is behind that of row 0
};
__device__ __forceinline__ Item item_at(int n) {
  const int row = n % ROW_ITEMS * 16 * A, tile = n / ROW_ITEMS * C;
  return {row, tile, (row / 8 * SUM_TILES + tile) * SUM_PIECE};
}

// Elements that a Q block and a dO block have room for
constexpr int SLOT = BR * (!BY_TURNS ? KeyTile::PAD + ValueTile::PAD : KeyTile::PAD > ValueTile::PAD ? KeyTile::PAD : ValueTile::PAD);

// Floats of what a row block's rows are given, and of its D
constexpr int ROW_SLOT = BR * (sizeof(OfRow) / sizeof(float) + 1);

// What a thread block has
struct ColumnBlock {
  int batch, kv_head, j;
};
__device__ __forceinline__ ColumnBlock column_block(int Nk, int kv_heads, int index) {
  const int Tc = (Nk + BC - 1) / BC, pair = index / Tc;
  return {pair / kv_heads, pair % kv_heads, index % Tc};
}

// Room in SRAM for what a row block brings
struct Slot {
  Element *Q, *dO;  // (BR x d), (BR x d_v)
  OfRow* of_rows;   // (BR): L, or what the row's weights are relative to
  float* D_i;       // (BR)
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fa2_backward(__grid_constant__ const Params given) {
  const Params p = given;
  extern __shared__ __align__(128) unsigned char sram[];
  Element* K_smem = reinterpret_cast<Element*>(sram);     // (BC x d), at the end dK
  Element* V_smem = K_smem + BC * KeyTile::PAD;           // (BC x d_v), at the end dV
  Element* dS_smem = V_smem + BC * ValueTile::PAD;        // (BC x BR), transposed
  Element* P_smem = dS_smem + (WIDE ? 0 : BC * ScoreTile::PAD);  // (BC x BR), transposed, where two warps share their keys
  Element* ring = P_smem + (WIDE ? 1 : ROW_WARPS - 1) * BC * ScoreTile::PAD;  // SLOTS x (BR x d), (BR x d_v)
  float* row_ring = reinterpret_cast<float*>(ring + SLOTS * SLOT);                       // SLOTS x (BR of OfRow, BR)
  unsigned* row_parts = reinterpret_cast<unsigned*>(row_ring + SLOTS * ROW_SLOT);  // SLOTS x those of score_parts.cuh
  unsigned* key_parts = row_parts + SLOTS * ROW_LOADS * BR;
  unsigned* kept = key_parts + KEY_LOADS * BC;
  auto slot_at = [&](int s) {
    Element* at = ring + s * SLOT;
    float* of_rows = row_ring + s * ROW_SLOT;
    return Slot{at, !BY_TURNS ? at + BR * KeyTile::PAD : WITH_DK ? at : V_smem, reinterpret_cast<OfRow*>(of_rows), of_rows + ROW_SLOT - BR};
  };

  auto parts_at = [&](int s) { return shared_address(row_parts + s * ROW_LOADS * BR); };

  // By a shuffle: what all lanes of a warp have in common can be known to be so, and kept once for all of them.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int kv_heads = p.heads / p.group;
  ColumnBlock place;
  int Nq = p.Nq, Nk = p.Nk;
  long long first_query = 0, first_key = 0;  // row 0 of the sequence
  int number;                                // of the sequence, or of the batch
  if constexpr (VARLEN) {
    const int blocks = gridDim.x / kv_heads;  // of a key head
    const Sequence sequence = find_sequence<BC>(p, p.cu_seqlens_k, blockIdx.x % blocks, sram);
    Nq = sequence.queries;
    Nk = sequence.keys;
    place = {0, static_cast<int>(blockIdx.x) / blocks, sequence.block};
    if (place.j * BC >= Nk) return;
    number = sequence.number;
    first_query = sequence.first_query;
    first_key = sequence.first_key;
  } else {
    place = column_block(Nk, kv_heads, blockIdx.x);
    number = place.batch;
  }
  const int batch = place.batch, kv_head = place.kv_head, j = place.j;
  const int keys = count_keys(p, batch, Nk, sram);
  const int cols = min(BC, keys - j * BC);  // keys that there are
  const int own_keys = warp % KEY_WARPS * WARP_KEYS, warp_key = j * BC + own_keys;  // of this warp: the first, here and of all
  const int row_warp = warp / KEY_WARPS;

  // The row blocks that see any of these keys for their position, and of those the ones that a block mask keeps, by query head.
  const int diagonal = Nk - Nq;
  const int first_row = CAUSAL || WINDOW ? max(0, j * BC - diagonal - (WINDOW ? p.right : 0)) : 0;
  const int last_row = WINDOW ? min(Nq - 1ll, j * BC + cols - 1ll - diagonal + p.left) : Nq - 1;
  const int first_block = first_row / BR, end_block = cols > 0 && first_row <= last_row ? last_row / BR + 1 : 0;
  const int words = (end_block + 31) / 32 * BITS;
  bool visited = first_block < end_block;
  if constexpr (SKIPS) {
    bool any = false;
    const long long first_of_all = VARLEN ? first_query / BR + number : 0;  // of its row blocks
    for (int h = 0; h < p.group; h++) {
      const BlockMask keep = block_mask_of(p, batch, kv_head * p.group + h, first_of_all).transposed();
      any |= read_block_mask<KEPT_COLS, KEPT_ROWS>(kept + h * words, keep, j, first_block, end_block, warp, WARPS);
    }
    visited = __syncthreads_or(any);
  }
  if (visited) {
    const long long row = first_key + static_cast<long long>(j) * BC;
    KeyTile::load<BC, THREADS, false>(K_smem, p.K.of(batch, kv_head) + row * p.K.row, p.K.row, cols, threadIdx.x);
    if constexpr (WITH_DK)
      ValueTile::load<BC, THREADS, false>(V_smem, p.V.of(batch, kv_head) + row * p.V.row, p.V.row, cols, threadIdx.x);
  }

  // A warp's columns of dK and dV, and the first of them
  constexpr int KEY_COLS = KeyTile::PAD / ROW_WARPS, VALUE_COLS = ValueTile::PAD / ROW_WARPS;
  const int key_col = WIDE ? 0 : row_warp * KEY_COLS, value_col = WIDE ? 0 : row_warp * VALUE_COLS;
  float dK_regs[WITH_DK ? M : 1][KEY_COLS / 8][4] = {}, dV_regs[WITH_DV ? M : 1][VALUE_COLS / 8][4] = {};

  // What this thread copies of Q and dO, and adds to of dQ's sum, from row 0 of the first query head on; row 0 in L and D
  const long long pair = static_cast<long long>(batch) * p.heads + kv_head * p.group;
  const Element* Q = p.Q.of(batch, kv_head * p.group) + first_query * p.Q.row + KeyTile::begin<THREADS>(p.Q.row, threadIdx.x);
  const Element* dO = p.dO.of(batch, kv_head * p.group) + first_query * p.dO.row + ValueTile::begin<THREADS>(p.dO.row, threadIdx.x);
  float* sums = sums_of(p.dQ_acc, pair, p.total_q, first_query + g, 0, t) + item_at(warp).sum;
  long long row0 = pair * p.total_q + first_query;
  int which = 0;  // slot: not the last one of the head before, which other warps may still read
  for (int h = 0; h < p.group; h++, Q += p.Q.head, dO += p.dO.head, sums += sums_of_a_head(unknown(p.total_q)), row0 += p.total_q) {
    Q = unknown(Q), dO = unknown(dO), sums = unknown(sums);  // and not sums of other things that would all be kept
    const int head = kv_head * p.group + h;
    Masks masks = masks_of(p, batch, head, Nq, Nk, keys);
    masks.batch = number;
    masks.of_head = score_of_head(p, number, head, Nq, Nk, ring);
    const Dropout dropout = dropout_of(p, number, head);
    const Blocks blocks = {first_block, end_block, kept + h * words};
    int i = blocks.below(blocks.end);
    if (i < blocks.begin) continue;
    if constexpr (KEY_LOADS > 0) {
      KeyParts<BC, THREADS> own;
      own.ask(p, masks.of_head, score_at(masks, 0, j * BC, Nq), cols, true);
      own.store(shared_address(key_parts));
      masks.of_keys = shared_address(key_parts) - 4 * j * BC;
    }
    RowParts<BR, THREADS> coming;  // those of the block that is asked for, until the end of the turn

    auto fetch_queries = [&](int i, const Slot& slot) {
      const Element* Q_i = Q + static_cast<long long>(i) * BR * p.Q.row;
      KeyTile::load_from<BR, THREADS, false>(slot.Q, Q_i, p.Q.at, p.Q.row, Nq - i * BR, threadIdx.x);
    };
    auto fetch = [&](int i, const Slot& slot) {
      const int rows = Nq - i * BR;
      const Element* Q_i = Q + static_cast<long long>(i) * BR * p.Q.row;
      const Element* dO_i = dO + static_cast<long long>(i) * BR * p.dO.row;
      if constexpr (BY_TURNS) {
        if constexpr (WITH_DV) fetch_queries(i, slot);
        ValueTile::load_from<BR, THREADS, false>(slot.dO, dO_i, p.dO.at, p.dO.row, rows, threadIdx.x);
      } else if (rows >= BR) {
        KeyTile::load_from<BR, THREADS, true>(slot.Q, Q_i, p.Q.at, p.Q.row, rows, threadIdx.x);
        ValueTile::load_from<BR, THREADS, true>(slot.dO, dO_i, p.dO.at, p.dO.row, rows, threadIdx.x);
      } else {
        KeyTile::load_from<BR, THREADS, false>(slot.Q, Q_i, p.Q.at, p.Q.row, rows, threadIdx.x);
        ValueTile::load_from<BR, THREADS, false>(slot.dO, dO_i, p.dO.at, p.dO.row, rows, threadIdx.x);
      }
#pragma unroll
      for (int r0 = 0; r0 < BR; r0 += THREADS) {
        const int r = r0 + threadIdx.x;
        if (BR % THREADS != 0 && r >= BR) break;
        const bool inside = r < rows;
        const OfRow* given = given_of_rows(p);
        copy_floats(slot.of_rows + r, inside ? given + row0 + i * BR + r : given, inside);
        if constexpr (WITH_DK) copy_floats(slot.D_i + r, inside ? p.D + row0 + i * BR + r : p.D, inside);
      }
      if constexpr (ROW_LOADS > 0)
        coming.ask(p, masks.of_head, score_at(masks, i * BR, 0, Nq), rows, MASK && blocks.asks(i));
    };
    fetch(i, slot_at(which));
    close_group();
    coming.store(parts_at(which));

    while (i >= blocks.begin) {
      const int next = blocks.below(i);
      const Slot slot = slot_at(which);
      if constexpr (ROW_LOADS > 0) masks.of_rows = parts_at(which) - 4 * i * BR;
      wait_for_groups<0>();
      const bool large = any_large<BR, THREADS>(slot.of_rows);  // Q_i and dO_i are there for all; all are done with the step before
      auto fetch_next = [&] {
        which = STAGES == 2 ? 1 - which : 0;
        if (next >= blocks.begin) fetch(next, slot_at(which));
        close_group();
      };
      if constexpr (STAGES == 2 && !FETCH_LATER) fetch_next();

      float dP[M][N][4];  // transposed; where dO_i has to go
      if constexpr (BY_TURNS && WITH_DK) {
        const QueryRows<ValueTile, M, false> V_rows = {V_smem + own_keys * ValueTile::PAD};
        if (row_warp == 0) scores<ValueTile, 2>(dP, V_rows, slot.dO);
        __syncthreads();  // all are done with dO_i
        fetch_queries(i, slot);
        close_group();
        wait_for_groups<0>();
        __syncthreads();  // Q_i is there for all
      }
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        if (ROW_WARPS > 1 && ALONE && row_warp > 0) continue;
        const int row = (part * ROW_WARPS + row_warp) * WARP_ROWS;  // the first of the warp's, in the block
        const int first = i * BR + row, last = min(first + WARP_ROWS, Nq) - 1;
        const bool asks = MASK && blocks.asks(i);
        const bool whole = !asks && warp_key + WARP_KEYS <= visible_end(masks, first) && warp_key >= visible_begin(masks, last);
        const bool seen = first < Nq && warp_key < visible_end(masks, last) && warp_key + WARP_KEYS > visible_begin(masks, first);
        auto share = [&](const float (&P)[M][N][4], const float (&dS)[M][N][4]) {
          if constexpr (WITH_DQ || (ROW_WARPS > 1 && WITH_DK)) put_tile<ScoreTile>(dS_smem + own_keys * ScoreTile::PAD, dS, row);
          if constexpr (ROW_WARPS > 1 && WITH_DV) put_tile<ScoreTile>(P_smem + own_keys * ScoreTile::PAD, KeptWeights(P).of, row);
        };
        if (seen) {
          float P[M][N][4], made[M][N][4], slopes[M][N][4];
          float(&dS)[M][N][4] = BY_TURNS ? dP : made;
          // All their addresses, kept through the loop, would take registers.
          const int here = unknown(own_keys);
          const QueryRows<KeyTile, M, false> K_rows = {K_smem + here * KeyTile::PAD};
          const QueryRows<ValueTile, M, false> V_rows = {V_smem + here * ValueTile::PAD};
          // S^T = K_j Q_i^T, P^T = exp(S^T - L)
          scores(P, K_rows, slot.Q + row * KeyTile::PAD);
          if constexpr (SCALED) {
#pragma unroll
            for (int m = 0; m < M; m++)
              each_score_transposed<N>(masks, warp_key + 16 * m + g, first, Nq, [&](int n, int e, int row, int key, bool seen) {
                float& s = P[m][n][e];
                s = __fmul_rn(s, SCORE ? p.scale : p.scale * UNIT);  // rounded as scale_and_mask does
                if constexpr (SCORE) {
                  Scored scored = {};
                  if (seen || !SCORE_LOADS) scored = scored_at(masks, of_row(masks, row), s, row, key, Nq);
                  s = UNIT * scored.value, slopes[m][n][e] = scored.slope;
                }
                if constexpr (BIAS) {
                  if (seen) s = fmaf(UNIT, load_in_place(masks.bias + row * masks.bias_row + key * masks.bias_col), s);
                }
              });
          }
          const float factor = SCALED ? 1.f : p.scale * UNIT;
          auto subtract = [&] {
#pragma unroll
            for (int n = 0; n < N; n++) {
              const TwoRows of_two(slot.of_rows + row + 8 * n + 2 * t);
#pragma unroll
              for (int m = 0; m < M; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) P[m][n][e] = of_two.exponent(P[m][n][e], e % 2, factor);
            }
          };
          auto subtract_large = [&] {
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
              for (int e = 0; e < 2; e++) {
                const int r = 8 * n + 2 * t + e;
                const Base base = base_of(slot.of_rows[row + r], p.bases, row0 + unknown(first) + r);
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                  for (int h = 0; h < 2; h++) P[m][n][2 * h + e] = base.exponent(P[m][n][2 * h + e], factor);
              }
          };
          if (large || !whole) {
            if (large) {
              subtract_large();
            } else {
              subtract();
            }
#pragma unroll
            for (int m = 0; m < M; m++)
              each_score_transposed<N>(masks, warp_key + 16 * m + g, first, Nq, [&](int n, int e, int row, int key, bool seen) {
                if constexpr (MASK) {
                  if (seen && asks) seen = mask_says(masks, asked_of_row(masks, row), row, key, Nq);
                }
                if (!seen) P[m][n][e] = NEG_INF;
              });
          } else {
            subtract();
          }
          // Nothing branches from here on, so that weights are made beside products.
          to_weights(P);
          if constexpr (DROPOUT) {
#pragma unroll
            for (int m = 0; m < M; m++)
              each_weight_transposed<BR % 32 == 0 && WARP_ROWS % 32 == 0>(P[m], dropout, warp_key + 16 * m, first, MarkDropped());
          }
          // dV_j += P^T dO_i
          if constexpr (WITH_DV) add_weighted_values<ValuePart>(dV_regs, KeptWeights(P).of, slot.dO + row * ValueTile::PAD + value_col);
          if constexpr (SCORE && !DBIAS && !DROPOUT && !(WIDE && WITH_DV)) {
#pragma unroll
            for (int m = 0; m < M; m++) of_given_scores(P[m], slopes[m]);
          }
          // dP^T = V_j dO_i^T, a loop: with all its fragments loaded ahead, registers spill
          if constexpr (WITH_DK && !BY_TURNS) scores<ValueTile, 2>(dS, V_rows, slot.dO + row * ValueTile::PAD);
          if constexpr (WITH_DK) {
            // dS^T = P^T * (dP^T - D_i), dK_j += dS^T Q_i
#pragma unroll
            for (int n = 0; n < N; n++) {
              const float2 d = *reinterpret_cast<const float2*>(slot.D_i + row + 8 * n + 2 * t);
#pragma unroll
              for (int m = 0; m < M; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) dS[m][n][e] = score_gradient(P[m][n][e], dS[m][n][e], e % 2 ? d.y : d.x, dropout.scale);
            }
            if constexpr (DBIAS) {
              float* sum = p.dbias.of(batch, head);
#pragma unroll
              for (int m = 0; m < M; m++)
                each_score_transposed<N>(masks, warp_key + 16 * m + g, first, Nq, [&](int n, int e, int row, int key, bool seen) {
                  if (seen) atomicAdd(sum + row * p.dbias.row + key * p.dbias.col, dS[m][n][e]);
                });
            }
            if constexpr (SCORE && (DBIAS || DROPOUT)) {  // until here of what the bias is added to; P had a sign
#pragma unroll
              for (int m = 0; m < M; m++) of_given_scores(dS[m], slopes[m]);
            }
            add_weighted_values<KeyPart>(dK_regs, dS, slot.Q + row * KeyTile::PAD + key_col);
          }
          share(P, dS);
        } else {
          const float zeros[M][N][4] = {};
          share(zeros, zeros);
        }
      }
      __syncthreads();  // dS is there for all, and P; all are done with Q_i and dO_i, but for what a warp takes of another's
      if constexpr (ROW_WARPS > 1) {
        // dV_j += P^T dO_i, dK_j += dS^T Q_i for the other warp's rows
        const int row = (1 - row_warp) * WARP_ROWS;
        const int here = unknown(own_keys) * ScoreTile::PAD;
        const bool made = !ALONE || row_warp > 0;
        if constexpr (WITH_DV) {
          if (made) add_stored_values<ValuePart, ScoreTile, N / 2>(dV_regs, P_smem + here, row, slot.dO + row * ValueTile::PAD + value_col);
        }
        if constexpr (STAGES == 2 && FETCH_LATER) fetch_next();
        if constexpr (WITH_DK) {
          if (made) add_stored_values<KeyPart, ScoreTile, N / 2>(dK_regs, dS_smem + here, row, slot.Q + row * KeyTile::PAD + key_col);
        }
        if constexpr (STAGES < 2) __syncthreads();  // all are done with Q_i and dO_i
      }
      if constexpr (STAGES < 2) fetch_next();
      if constexpr (WITH_DQ) {
        // dQ_i += dS K_j, some of the rows and columns a warp
        auto add_item = [&](const Item& item, int beyond) {
          float dQ_regs[A][C][2][4];
          transposed_product<KeyTile, ScoreTile, BC>(dQ_regs, dS_smem, item.row, K_smem, item.tile);
          float* own = unknown(sums + static_cast<long long>(i) * (BR * D_PAD) + beyond);
          const int first = i * BR + item.row + g;  // of this lane's rows
#pragma unroll
          for (int a = 0; a < A; a++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
              if (first + 16 * a + 8 * h >= Nq) continue;
#pragma unroll
              for (int c = 0; c < C; c++) {
                if (SUM_TILES % C != 0 && item.tile + c >= SUM_TILES) continue;
                const float(&dQ)[2][4] = dQ_regs[a][c];
                add_to_sums(own + ((2 * a + h) * SUM_TILES + c) * SUM_PIECE, dQ[0][2 * h], dQ[0][2 * h + 1], dQ[1][2 * h],
                            dQ[1][2 * h + 1]);
              }
            }
        };
        // Addresses of the items are not kept through the loop.
        if constexpr (ITEMS == WARPS) {
          add_item(item_at(unknown(warp)), 0);
        } else {
          for (int n = unknown(warp); n < ITEMS; n += WARPS) add_item(item_at(n), item_at(n).sum - item_at(warp).sum);
        }
      }
      if (ROW_LOADS > 0 && next >= blocks.begin) coming.store(parts_at(which));
      i = next;
    }
  }

  // dK and dV go through the room of K and V. Keys that do not exist have gradients of 0.
  __syncthreads();
  if constexpr (WITH_DK) {
    multiply(dK_regs, p.scale);
    put_tile<KeyPart>(K_smem + own_keys * KeyTile::PAD + key_col, dK_regs);
  }
  if constexpr (WITH_DV && DROPOUT) multiply(dV_regs, dropout_of(p, 0, 0).scale);
  if constexpr (WITH_DV) put_tile<ValuePart>(V_smem + own_keys * ValueTile::PAD + value_col, dV_regs);
  __syncthreads();
  // Whose keys they are is computed again: kept through the loop, it would take registers.
  if constexpr (!VARLEN) place = column_block(Nk, kv_heads, unknown(blockIdx.x));
  constexpr int LEAVING = BC / WARPS;  // keys whose gradients a warp takes to HBM
  const int key = warp * LEAVING, rows = Nk - place.j * BC - key;
  const long long to = first_key + place.j * BC + key;
  if constexpr (WITH_DK)
    KeyTile::store<LEAVING>(p.dK.of(place.batch, place.kv_head) + to * p.dK.row, K_smem + key * KeyTile::PAD, p.dK.row, rows, lane);
  if constexpr (WITH_DV)
    ValueTile::store<LEAVING>(p.dV.of(place.batch, place.kv_head) + to * p.dV.row, V_smem + key * ValueTile::PAD, p.dV.row, rows, lane);
}
