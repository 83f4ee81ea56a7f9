// FlashAttention-2's backward (arXiv 2307.08691, Algorithm 2): one thread block a K/V block of a key head, which streams the Q
// and dO blocks that see it. dK and dV stay in registers to the end, each warp owning some of the keys; dQ is summed in HBM by
// atomics, in float32. Products are of S^T = K Q^T (keys x queries), so that P^T and dS^T lie in registers as dV += P^T dO and
// dK += dS^T Q want them.
//
// Three kernels: D = rowsum(dO * O) and dQ = 0; the gradients; dQ in its own type, where no kernel of its own makes it
// (fa2_backward_queries.cu). large_rows.cu comes before the second.
//
// Constants, all from the tile schedule:
//   ELEMENT     __half, __nv_bfloat16 or float       HEAD_DIM, VALUE_DIM  d of Q and K, of V and O
//   BR, BC      rows of a Q block, of a K/V block    STAGES     Q and dO blocks that there is room for: 1 or 2
//   WITH_DK, WITH_DV  whether a launch makes dK, and dV: wide heads take one for each
//   WITH_DQ     whether dQ is summed by atomics      COPY_BYTES width of a copy
//   CAUSAL, WINDOW, MASK, BIAS, PADDED, SPARSE, SINKS  0 or 1: mask.cuh, block_mask.cuh, sinks.cuh
//   DBIAS       whether the gradient of the bias is summed, by atomics
//   KEPT_ROWS, KEPT_COLS  row blocks and column blocks that share an element of the block mask
//   VARLEN      whether batches are sequences of their own lengths, packed one behind the other: sequence.cuh
#define SUB BR
constexpr int SCARCE = 2;  // registers are: gradients, S and dP are in them
#include "block_mask.cuh"
#include "element.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "row_piece.cuh"
#include "row_products.cuh"
#include "sequence.cuh"
#include "weight.cuh"

constexpr int WARP_KEYS = 16;  // that a warp owns: of 32, registers do not hold the gradients at d 64
constexpr int WARPS = BC / WARP_KEYS, THREADS = 32 * WARPS;
constexpr int M = WARP_KEYS / 16, N = BR / 8;  // tensor core tiles of a warp's part of S^T

typedef SwizzledTile<HEAD_DIM> KeyTile;     // of Q, K and their gradients
typedef SwizzledTile<VALUE_DIM> ValueTile;  // of V, O and their gradients
typedef SwizzledTile<BR> ScoreTile;  // of dS^T

// The first and last kernel give a row to so many lanes, a piece each at a time.
__device__ constexpr int lanes_for(int pieces, int lanes = 1) {
  return lanes >= pieces || lanes == 32 ? lanes : lanes_for(pieces, 2 * lanes);
}
constexpr int ROW_LANES = lanes_for((HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM) / PIECE), ROW_THREADS = 128, ROWS = ROW_THREADS / ROW_LANES;

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
  template <typename T> __device__ __forceinline__ T* of(const Rows<T>& tensor) const {
    return tensor.of(batch, head) + row * tensor.row;
  }
};

// D = rowsum(dO * O) of every row, and dQ_acc = 0
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
fa2_backward_rows(__grid_constant__ const Params given) {
  const Params p = given;
  const RowPlace place(p.total_q, p.heads);
  const int first = threadIdx.x % ROW_LANES * PIECE;
  float sum = 0.f;
  if (place.row < p.total_q) {
    const Element *O = place.of(p.O), *dO = place.of(p.dO);
    for (int col = first; col < VALUE_DIM; col += ROW_LANES * PIECE) {
      float o[PIECE], g[PIECE];
      load_piece(o, O + col);
      load_piece(g, dO + col);
#pragma unroll
      for (int c = 0; c < PIECE; c++) sum = fmaf(o[c], g[c], sum);
    }
    if constexpr (WITH_DQ) {
      const float zeros[PIECE] = {};
      for (int col = first; col < HEAD_DIM; col += ROW_LANES * PIECE) store_piece(p.dQ_acc + place.at * HEAD_DIM + col, zeros);
    }
  }
#pragma unroll
  for (int other = ROW_LANES / 2; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  if (first == 0 && place.row < p.total_q) p.D[place.at] = sum;
  if (SINKS && first == 0 && place.row < p.total_q)
    p.dsinks[place.at] = p.L[place.at] == NEG_INF ? 0.f : -sum * expf(p.sinks[place.head] - p.L[place.at]);
}

// dQ = scale dQ_acc
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
fa2_backward_finish(__grid_constant__ const Params given) {
  const Params p = given;
  const RowPlace place(p.total_q, p.heads);
  if (place.row >= p.total_q) return;
  Element* dQ = place.of(p.dQ);
  for (int col = threadIdx.x % ROW_LANES * PIECE; col < HEAD_DIM; col += ROW_LANES * PIECE) {
    float sum[PIECE];
    load_piece(sum, p.dQ_acc + place.at * HEAD_DIM + col);
#pragma unroll
    for (int c = 0; c < PIECE; c++) sum[c] *= p.scale;
    store_piece(dQ + col, sum);
  }
}

// Room in SRAM for what a row block brings
struct Slot {
  Element *Q, *dO;  // (BR x d), (BR x d_v)
  float *L, *D_i;   // (BR), (BR)
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fa2_backward(__grid_constant__ const Params given) {
  const Params p = given;
  extern __shared__ __align__(128) unsigned char sram[];
  Element* K_smem = reinterpret_cast<Element*>(sram);     // (BC x d), at the end dK
  Element* V_smem = K_smem + BC * KeyTile::PAD;           // (BC x d_v), at the end dV
  Element* dS_smem = V_smem + BC * ValueTile::PAD;        // (BC x BR), transposed
  Element* ring = dS_smem + BC * ScoreTile::PAD;          // STAGES x (BR x d), (BR x d_v)
  float* row_ring = reinterpret_cast<float*>(ring + STAGES * BR * (KeyTile::PAD + ValueTile::PAD));  // STAGES x 2 BR
  unsigned* kept = reinterpret_cast<unsigned*>(row_ring + STAGES * 2 * BR);
  auto slot_at = [&](int s) {
    Element* at = ring + s * BR * (KeyTile::PAD + ValueTile::PAD);
    return Slot{at, at + BR * KeyTile::PAD, row_ring + s * 2 * BR, row_ring + s * 2 * BR + BR};
  };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int kv_heads = p.heads / p.group;
  int batch = 0, kv_head, j, Nq = p.Nq, Nk = p.Nk;
  long long first_query = 0, first_key = 0;  // row 0 of the sequence
  if constexpr (VARLEN) {
    const int blocks = gridDim.x / kv_heads;  // of a key head
    kv_head = blockIdx.x / blocks;
    const Sequence sequence = find_sequence<BC>(p, p.cu_seqlens_k, blockIdx.x % blocks, sram);
    Nq = sequence.queries;
    Nk = sequence.keys;
    j = sequence.block;
    if (j * BC >= Nk) return;
    first_query = sequence.first_query;
    first_key = sequence.first_key;
  } else {
    const int Tc = (Nk + BC - 1) / BC, pair = blockIdx.x / Tc;
    batch = pair / kv_heads;
    kv_head = pair % kv_heads;
    j = blockIdx.x % Tc;
  }
  const int keys = count_keys(p, batch, Nk, sram);
  const int cols = min(BC, keys - j * BC);  // keys that there are
  const int warp_key = j * BC + warp * WARP_KEYS;

  // The row blocks that see any of these keys for their position, and of those the ones that a block mask keeps, by query head.
  const int diagonal = Nk - Nq;
  const int first_row = CAUSAL || WINDOW ? max(0, j * BC - diagonal - (WINDOW ? p.right : 0)) : 0;
  const int last_row = WINDOW ? min(Nq - 1ll, j * BC + cols - 1ll - diagonal + p.left) : Nq - 1;
  const int first_block = first_row / BR, end_block = cols > 0 && first_row <= last_row ? last_row / BR + 1 : 0;
  const int words = (end_block + 31) / 32;
  bool visited = first_block < end_block;
  if constexpr (SPARSE) {
    bool any = false;
    for (int h = 0; h < p.group; h++) {
      const BlockMask keep = block_mask_of(p, batch, kv_head * p.group + h).transposed();
      any |= read_block_mask<KEPT_ROWS>(kept + h * words, keep, j / KEPT_COLS, first_block, end_block, warp, WARPS);
    }
    visited = __syncthreads_or(any);
  }
  if (visited) {
    const long long row = first_key + static_cast<long long>(j) * BC;
    KeyTile::load<BC, THREADS, false>(K_smem, p.K.of(batch, kv_head) + row * p.K.row, p.K.row, cols, threadIdx.x);
    if constexpr (WITH_DK)
      ValueTile::load<BC, THREADS, false>(V_smem, p.V.of(batch, kv_head) + row * p.V.row, p.V.row, cols, threadIdx.x);
  }

  float dK_regs[WITH_DK ? M : 1][KeyTile::PAD / 8][4] = {}, dV_regs[WITH_DV ? M : 1][ValueTile::PAD / 8][4] = {};
  const QueryRows<KeyTile, M, false> K_rows = {K_smem + warp * WARP_KEYS * KeyTile::PAD};
  const QueryRows<ValueTile, M, false> V_rows = {V_smem + warp * WARP_KEYS * ValueTile::PAD};

  for (int h = 0; h < p.group; h++) {
    const int head = kv_head * p.group + h;
    const Element* Q = p.Q.of(batch, head) + first_query * p.Q.row;
    const Element* dO = p.dO.of(batch, head) + first_query * p.dO.row;
    const long long row0 = (static_cast<long long>(batch) * p.heads + head) * p.total_q + first_query;  // in L, D and dQ_acc
    const Masks masks = masks_of(p, batch, head, Nq, Nk, keys);
    const Blocks blocks = {first_block, end_block, kept + h * words};
    int i = blocks.below(blocks.end);
    if (i < blocks.begin) continue;

    auto fetch = [&](int i, const Slot& slot) {
      const int rows = Nq - i * BR;
      KeyTile::load<BR, THREADS, false>(slot.Q, Q + static_cast<long long>(i) * BR * p.Q.row, p.Q.row, rows, threadIdx.x);
      ValueTile::load<BR, THREADS, false>(slot.dO, dO + static_cast<long long>(i) * BR * p.dO.row, p.dO.row, rows, threadIdx.x);
      for (int r = threadIdx.x; r < BR; r += THREADS) {
        const bool inside = r < rows;
        copy_float(slot.L + r, inside ? p.L + row0 + i * BR + r : p.L, inside);
        if constexpr (WITH_DK) copy_float(slot.D_i + r, inside ? p.D + row0 + i * BR + r : p.D, inside);
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
              s = __fmul_rn(s, p.scale * UNIT);  // rounded as scale_and_mask does
              if (seen) s = fmaf(UNIT, load_in_place(masks.bias + row * masks.bias_row + key * masks.bias_col), s);
            });
        }
        const float factor = BIAS ? 1.f : p.scale * UNIT;
        if (large) {
#pragma unroll
          for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const int row = 8 * n + 2 * t + e;
              const Base base = base_of(slot.L[row], p.bases, row0 + first + row);
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
            float* sum = p.dbias.of(batch, head);
#pragma unroll
            for (int m = 0; m < M; m++)
              each_score_transposed(dS[m], masks, warp_key + 16 * m + g, first, Nq, [&](float ds, int row, int key, bool seen) {
                if (seen) atomicAdd(sum + row * p.dbias.row + key * p.dbias.col, ds);
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
                if (r < Nq && col < HEAD_DIM) atomicAdd(p.dQ_acc + (row0 + r) * HEAD_DIM + col, dQ_regs[c][half][e]);
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
    put_tile<KeyTile>(dK_smem, dK_regs, p.scale);
    __syncwarp();
    KeyTile::store<WARP_KEYS>(p.dK.of(batch, kv_head) + (first_key + warp_key) * p.dK.row, dK_smem, p.dK.row, rows, lane);
  }
  if constexpr (WITH_DV) {
    Element* dV_smem = V_smem + warp * WARP_KEYS * ValueTile::PAD;
    put_tile<ValueTile>(dV_smem, dV_regs, 1.f);
    __syncwarp();
    ValueTile::store<WARP_KEYS>(p.dV.of(batch, kv_head) + (first_key + warp_key) * p.dV.row, dV_smem, p.dV.row, rows, lane);
  }
}
