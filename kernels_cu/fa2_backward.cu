// FlashAttention-2's backward (arXiv 2307.08691, Algorithm 2): one thread block a K/V block of a key head, which streams the Q
// and dO blocks that see it. dK and dV stay in registers to the end, each warp owning some of the keys; dQ is summed in HBM by
// atomics, in float32. Products are of S^T = K Q^T (keys x queries), so that P^T and dS^T lie in registers as dV += P^T dO and
// dK += dS^T Q want them.
//
// Three kernels: D = rowsum(dO * O) and dQ = 0; the gradients; dQ in its own type, where no kernel of its own makes it
// (fa2_backward_queries.cu). large_rows.cu comes before the second.
//
// Constants, all from the tile schedule:
//   ELEMENT     __half, __nv_bfloat16 or float       D, DV      d of Q and K, of V and O
//   BR, BC      rows of a Q block, of a K/V block    STAGES     Q and dO blocks that there is room for: 1 or 2
//   WITH_DK, WITH_DV  whether a launch makes dK, and dV: wide heads take one for each
//   WITH_DQ     whether dQ is summed by atomics      COPY_BYTES width of a copy
//   CAUSAL, WINDOW, MASK, BIAS, PADDED, SPARSE  0 or 1: mask.cuh, block_mask.cuh
//   DBIAS       whether the gradient of the bias is summed, by atomics
//   KEPT_ROWS, KEPT_COLS  row blocks and column blocks that share an element of the block mask
//   VARLEN      whether batches are sequences of their own lengths, packed one behind the other: sequence.cuh
#define SUB BR
constexpr int SCARCE = 2;  // registers are: gradients, S and dP are in them
#include "block_mask.cuh"
#include "element.cuh"
#include "mask.cuh"
#include "row_piece.cuh"
#include "row_products.cuh"
#include "sequence.cuh"
#include "weight.cuh"

constexpr int WARP_KEYS = 16;  // that a warp owns: of 32, registers do not hold the gradients at d 64
constexpr int WARPS = BC / WARP_KEYS, THREADS = 32 * WARPS;
constexpr int M = WARP_KEYS / 16, N = BR / 8;  // tensor core tiles of a warp's part of S^T

typedef SwizzledTile<D> KeyTile;     // of Q, K and their gradients
typedef SwizzledTile<DV> ValueTile;  // of V, O and their gradients
typedef SwizzledTile<BR> ScoreTile;  // of dS^T

// The first and last kernel give a row to so many lanes, a piece each at a time.
__device__ constexpr int lanes_for(int pieces, int lanes = 1) {
  return lanes >= pieces || lanes == 32 ? lanes : lanes_for(pieces, 2 * lanes);
}
constexpr int ROW_LANES = lanes_for((D > DV ? D : DV) / PIECE), ROW_THREADS = 128, ROWS = ROW_THREADS / ROW_LANES;

// Which row of which head a thread of those kernels has
struct RowPlace {
  int batch, head, row;
  long long at;  // in L, D and dQ_acc
  __device__ __forceinline__ RowPlace(int total_q, int heads) {
    const int blocks = (total_q + ROWS - 1) / ROWS, pair = blockIdx.x / blocks;
    batch = pair / heads;
    head = pair % heads;
    row = blockIdx.x % blocks * ROWS + threadIdx.x / ROW_LANES;
    at = static_cast<long long>(pair) * total_q + row;
  }
};

// D = rowsum(dO * O) of every row, and dQ_acc = 0
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
fa2_backward_rows(const Element* O, const Element* dO, float* D_rows, float* dQ_acc, int total_q, int heads,
                  long long O_batch, long long O_head, long long O_row, long long dO_batch, long long dO_head, long long dO_row) {
  const RowPlace place(total_q, heads);
  const int first = threadIdx.x % ROW_LANES * PIECE;
  float sum = 0.f;
  if (place.row < total_q) {
    O += place.batch * O_batch + place.head * O_head + place.row * O_row;
    dO += place.batch * dO_batch + place.head * dO_head + place.row * dO_row;
    for (int col = first; col < DV; col += ROW_LANES * PIECE) {
      float o[PIECE], g[PIECE];
      load_piece(o, O + col);
      load_piece(g, dO + col);
#pragma unroll
      for (int c = 0; c < PIECE; c++) sum = fmaf(o[c], g[c], sum);
    }
    if constexpr (WITH_DQ) {
      const float zeros[PIECE] = {};
      for (int col = first; col < D; col += ROW_LANES * PIECE) store_piece(dQ_acc + place.at * D + col, zeros);
    }
  }
#pragma unroll
  for (int other = ROW_LANES / 2; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  if (first == 0 && place.row < total_q) D_rows[place.at] = sum;
}

// dQ = scale dQ_acc
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
fa2_backward_finish(const float* dQ_acc, Element* dQ, int total_q, int heads, float scale,
                    long long dQ_batch, long long dQ_head, long long dQ_row) {
  const RowPlace place(total_q, heads);
  if (place.row >= total_q) return;
  dQ += place.batch * dQ_batch + place.head * dQ_head + place.row * dQ_row;
  for (int col = threadIdx.x % ROW_LANES * PIECE; col < D; col += ROW_LANES * PIECE) {
    float sum[PIECE];
    load_piece(sum, dQ_acc + place.at * D + col);
#pragma unroll
    for (int c = 0; c < PIECE; c++) sum[c] *= scale;
    store_piece(dQ + col, sum);
  }
}

// Room in SRAM for what a row block brings
struct Slot {
  Element *Q, *dO;  // (BR x D), (BR x DV)
  float *L, *D_i;   // (BR), (BR)
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fa2_backward(const Element* Q, const Element* K, const Element* V, const Element* dO, const float* L, const Base* bases,
             const float* D_rows, float* dQ_acc, Element* dK, Element* dV, int Nq, int Nk, int heads, int group, float scale,
             long long Q_batch, long long Q_head, long long Q_row, long long K_batch, long long K_head, long long K_row,
             long long V_batch, long long V_head, long long V_row, long long dO_batch, long long dO_head, long long dO_row,
             long long dK_batch, long long dK_head, long long dK_row, long long dV_batch, long long dV_head, long long dV_row,
             const unsigned char* mask, long long mask_batch, long long mask_head, long long mask_row, long long mask_col,
             const Element* bias, long long bias_batch, long long bias_head, long long bias_row, long long bias_col,
             const int* key_lengths, int left, int right,
             const unsigned char* block_mask, long long block_mask_batch, long long block_mask_head, long long block_mask_row,
             long long block_mask_col, float* dbias, long long dbias_batch, long long dbias_head, long long dbias_row,
             long long dbias_col, const int* cu_seqlens_q, const int* cu_seqlens_k, int total_q, int sequences) {
  extern __shared__ __align__(128) unsigned char sram[];
  Element* K_smem = reinterpret_cast<Element*>(sram);     // (BC x D), at the end dK
  Element* V_smem = K_smem + BC * KeyTile::PAD;           // (BC x DV), at the end dV
  Element* dS_smem = V_smem + BC * ValueTile::PAD;        // (BC x BR), transposed
  Element* ring = dS_smem + BC * ScoreTile::PAD;          // STAGES x (BR x D), (BR x DV)
  float* row_ring = reinterpret_cast<float*>(ring + STAGES * BR * (KeyTile::PAD + ValueTile::PAD));  // STAGES x 2 BR
  unsigned* kept = reinterpret_cast<unsigned*>(row_ring + STAGES * 2 * BR);
  auto slot_at = [&](int s) {
    Element* at = ring + s * BR * (KeyTile::PAD + ValueTile::PAD);
    return Slot{at, at + BR * KeyTile::PAD, row_ring + s * 2 * BR, row_ring + s * 2 * BR + BR};
  };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int kv_heads = heads / group;
  int batch = 0, kv_head, j;
  long long first_query = 0;  // row 0 of the sequence, in L, D and dQ_acc
  if constexpr (VARLEN) {
    const int blocks = gridDim.x / kv_heads;  // of a key head
    kv_head = blockIdx.x / blocks;
    const Sequence sequence = find_sequence<BC>(cu_seqlens_k, cu_seqlens_q, cu_seqlens_k, sequences, blockIdx.x % blocks, sram);
    Nq = sequence.queries;
    Nk = sequence.keys;
    j = sequence.block;
    if (j * BC >= Nk) return;
    first_query = sequence.first_query;
    Q += first_query * Q_row;
    dO += first_query * dO_row;
    K += sequence.first_key * K_row;
    V += sequence.first_key * V_row;
    dK += sequence.first_key * dK_row;
    dV += sequence.first_key * dV_row;
  } else {
    const int Tc = (Nk + BC - 1) / BC, pair = blockIdx.x / Tc;
    batch = pair / kv_heads;
    kv_head = pair % kv_heads;
    j = blockIdx.x % Tc;
  }
  K += batch * K_batch + kv_head * K_head + static_cast<long long>(j) * BC * K_row;
  V += batch * V_batch + kv_head * V_head + static_cast<long long>(j) * BC * V_row;
  const int keys = count_keys(key_lengths, batch, Nk, sram);
  const int cols = min(BC, keys - j * BC);  // keys that there are
  const int warp_key = j * BC + warp * WARP_KEYS;

  // The row blocks that see any of these keys for their position, and of those the ones that a block mask keeps, by query head.
  const Masks positions = {keys, Nk - Nq, left, right};
  const int first_row = CAUSAL || WINDOW ? max(0, j * BC - positions.diagonal - (WINDOW ? right : 0)) : 0;
  const int last_row = WINDOW ? min(Nq - 1ll, j * BC + cols - 1ll - positions.diagonal + left) : Nq - 1;
  const int first_block = first_row / BR, end_block = cols > 0 && first_row <= last_row ? last_row / BR + 1 : 0;
  const int words = (end_block + 31) / 32;
  bool visited = first_block < end_block;
  if constexpr (SPARSE) {
    bool any = false;
    for (int h = 0; h < group; h++) {
      const BlockMask keep = {block_mask + batch * block_mask_batch + (kv_head * group + h) * block_mask_head, block_mask_col,
                              block_mask_row};
      any |= read_block_mask<KEPT_ROWS>(kept + h * words, keep, j / KEPT_COLS, first_block, end_block, warp, WARPS);
    }
    visited = __syncthreads_or(any);
  }
  if (visited) {
    KeyTile::load<BC, THREADS, false>(K_smem, K, K_row, cols, threadIdx.x);
    if constexpr (WITH_DK) ValueTile::load<BC, THREADS, false>(V_smem, V, V_row, cols, threadIdx.x);
  }

  float dK_regs[WITH_DK ? M : 1][KeyTile::PAD / 8][4] = {}, dV_regs[WITH_DV ? M : 1][ValueTile::PAD / 8][4] = {};
  const QueryRows<KeyTile, M, false> K_rows = {K_smem + warp * WARP_KEYS * KeyTile::PAD};
  const QueryRows<ValueTile, M, false> V_rows = {V_smem + warp * WARP_KEYS * ValueTile::PAD};

  for (int h = 0; h < group; h++) {
    const int head = kv_head * group + h;
    const Element* Q_head_rows = Q + batch * Q_batch + head * Q_head;
    const Element* dO_head_rows = dO + batch * dO_batch + head * dO_head;
    const long long row0 = (VARLEN ? head : static_cast<long long>(batch) * heads + head) * total_q + first_query;
    const Masks masks = {keys, Nk - Nq, left, right, mask + batch * mask_batch + head * mask_head, mask_row, mask_col,
                         bias + batch * bias_batch + head * bias_head, bias_row, bias_col};
    const Blocks blocks = {first_block, end_block, kept + h * words};
    int i = blocks.below(blocks.end);
    if (i < blocks.begin) continue;

    auto fetch = [&](int i, const Slot& slot) {
      const int rows = Nq - i * BR;
      KeyTile::load<BR, THREADS, false>(slot.Q, Q_head_rows + static_cast<long long>(i) * BR * Q_row, Q_row, rows, threadIdx.x);
      ValueTile::load<BR, THREADS, false>(slot.dO, dO_head_rows + static_cast<long long>(i) * BR * dO_row, dO_row, rows,
                                          threadIdx.x);
      for (int r = threadIdx.x; r < BR; r += THREADS) {
        const bool inside = r < rows;
        copy_float(slot.L + r, inside ? L + row0 + i * BR + r : L, inside);
        if constexpr (WITH_DK) copy_float(slot.D_i + r, inside ? D_rows + row0 + i * BR + r : D_rows, inside);
      }
    };
    int which = 0;
    fetch(i, slot_at(which));
    close_group();

    while (i >= blocks.begin) {
      const int next = blocks.below(i);
      const Slot slot = slot_at(which);
      wait_for_groups<0>();
      bool large = false;  // any of the rows whose L this thread copied
#pragma unroll 1
      for (int r = threadIdx.x; r < BR; r += THREADS) {
        large |= is_large(slot.L[r]);
        if (slot.L[r] == NEG_INF) slot.L[r] = 0.f;  // a row that sees nothing, and has scores of -inf where they are not masked
      }
      large = __syncthreads_or(large);  // Q_i and dO_i are there for all; all are done with the step before
      if constexpr (STAGES == 2) {
        which ^= 1;
        if (next >= blocks.begin) fetch(next, slot_at(which));
        close_group();
      }

      const int first = i * BR, last = min(first + BR, Nq) - 1;
      const bool whole = !MASK && warp_key + WARP_KEYS <= visible_end(masks, first) && warp_key >= visible_begin(masks, last);
      const bool seen = warp_key < visible_end(masks, last) && warp_key + WARP_KEYS > visible_begin(masks, first);
      float dS[M][N][4] = {};
      if (seen) {
        // S^T = K_j Q_i^T, P^T = exp(S^T - L)
        float P[M][N][4];
        scores(P, K_rows, slot.Q);
        if constexpr (BIAS) {
#pragma unroll
          for (int m = 0; m < M; m++)
            each_score_transposed(P[m], masks, warp_key + 16 * m + g, first, Nq, [&](float& s, int row, int key, bool seen) {
              s = __fmul_rn(s, scale * UNIT);  // rounded as scale_and_mask does
              if (seen) s = fmaf(UNIT, load_in_place(masks.bias + row * masks.bias_row + key * masks.bias_col), s);
            });
        }
        const float factor = BIAS ? 1.f : scale * UNIT;
        if (large) {
#pragma unroll
          for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const int row = 8 * n + 2 * t + e;
              const Base base = base_of(slot.L[row], bases, row0 + first + row);
#pragma unroll
              for (int m = 0; m < M; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                  float& p = P[m][n][2 * h + e];
                  p = weight_of(fmaf(p - base.score, factor, -base.log_sum));
                }
            }
        } else {
#pragma unroll
          for (int n = 0; n < N; n++) {
            const float2 l = *reinterpret_cast<const float2*>(slot.L + 8 * n + 2 * t);
            const float offset[2] = {-l.x * UNIT, -l.y * UNIT};
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
              for (int e = 0; e < 4; e++) P[m][n][e] = weight_of(fmaf(P[m][n][e], factor, offset[e % 2]));
          }
        }
        if (!whole) {
#pragma unroll
          for (int m = 0; m < M; m++)
            each_score_transposed(P[m], masks, warp_key + 16 * m + g, first, Nq, [&](float& p, int row, int key, bool seen) {
              if constexpr (MASK) {
                if (seen) seen = load_in_place(masks.mask + row * masks.mask_row + key * masks.mask_col);
              }
              if (!seen) p = 0.f;
            });
        }
        // dV_j += P^T dO_i
        if constexpr (WITH_DV) add_weighted_values<ValueTile, 8>(dV_regs, P, slot.dO);
        if constexpr (WITH_DK) {
          // dP^T = V_j dO_i^T, dS^T = P^T * (dP^T - D_i), dK_j += dS^T Q_i
          scores(dS, V_rows, slot.dO);
#pragma unroll
          for (int n = 0; n < N; n++) {
            const float2 d = *reinterpret_cast<const float2*>(slot.D_i + 8 * n + 2 * t);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
              for (int e = 0; e < 4; e++) dS[m][n][e] = P[m][n][e] * (dS[m][n][e] - (e % 2 ? d.y : d.x));
          }
          if constexpr (DBIAS) {
            float* sum = dbias + batch * dbias_batch + head * dbias_head;
#pragma unroll
            for (int m = 0; m < M; m++)
              each_score_transposed(dS[m], masks, warp_key + 16 * m + g, first, Nq, [&](float ds, int row, int key, bool seen) {
                if (seen) atomicAdd(sum + row * dbias_row + key * dbias_col, ds);
              });
          }
          add_weighted_values<KeyTile, 8>(dK_regs, dS, slot.Q);
        }
      }
      if constexpr (WITH_DQ) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
          for (int n = 0; n < N; n++)
#pragma unroll
            for (int h = 0; h < 2; h++)
              store_two(dS_smem + ScoreTile::index(warp * WARP_KEYS + 16 * m + g + 8 * h, 8 * n + 2 * t), dS[m][n][2 * h],
                        dS[m][n][2 * h + 1]);
      }
      __syncthreads();  // dS is there for all; all are done with Q_i and dO_i
      if constexpr (STAGES == 1) {
        if (next >= blocks.begin) fetch(next, slot);
        close_group();
      }
      if constexpr (WITH_DQ) {
        // dQ_i += dS K_j, 16 rows and some of the columns a warp
        constexpr int ROW_TILES = BR / 16, PARTS = (WARPS + ROW_TILES - 1) / ROW_TILES;
        constexpr int COL_TILES = KeyTile::PAD / 16, PART = (COL_TILES + PARTS - 1) / PARTS;  // of 16 columns
        for (int item = warp; item < ROW_TILES * PARTS; item += WARPS) {
          const int row = item % ROW_TILES * 16, tile = item / ROW_TILES * PART;
          float dQ_regs[PART][2][4];
          transposed_product<KeyTile, ScoreTile, BC>(dQ_regs, dS_smem, row, K_smem, tile);
#pragma unroll
          for (int c = 0; c < PART; c++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
              for (int e = 0; e < 4; e++) {
                const int r = first + row + g + e / 2 * 8, col = 16 * (tile + c) + 8 * half + 2 * t + e % 2;
                if (r < Nq && col < D) atomicAdd(dQ_acc + (row0 + r) * D + col, dQ_regs[c][half][e]);
              }
        }
      }
      i = next;
    }
  }

  // dK and dV go through the room of K and V. Keys that do not exist have gradients of 0.
  __syncthreads();
  const int rows = Nk - warp_key;
  if constexpr (WITH_DK) {
    Element* dK_smem = K_smem + warp * WARP_KEYS * KeyTile::PAD;
    put_tile<KeyTile>(dK_smem, dK_regs, scale);
    __syncwarp();
    KeyTile::store<WARP_KEYS>(dK + batch * dK_batch + kv_head * dK_head + warp_key * dK_row, dK_smem, dK_row, rows, lane);
  }
  if constexpr (WITH_DV) {
    Element* dV_smem = V_smem + warp * WARP_KEYS * ValueTile::PAD;
    put_tile<ValueTile>(dV_smem, dV_regs, 1.f);
    __syncwarp();
    ValueTile::store<WARP_KEYS>(dV + batch * dV_batch + kv_head * dV_head + warp_key * dV_row, dV_smem, dV_row, rows, lane);
  }
}
