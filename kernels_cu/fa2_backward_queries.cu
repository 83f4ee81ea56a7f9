// dQ of FlashAttention-2's backward by itself, in a fixed order: one thread block a row block of Q, which streams the K/V blocks
// that it sees, as the forward does. It computes S and dP once more, and needs no atomics and no float32 dQ in HBM.
//
// Constants, all from the tile schedule:
//   ELEMENT     __half, __nv_bfloat16 or float       HEAD_DIM, VALUE_DIM  d of Q and K, of V and O
//   BR, BC      rows of a Q block, of a K/V block    COPY_BYTES width of a copy
//   CAUSAL, WINDOW, MASK, BIAS, PADDED, SPARSE  0 or 1: mask.cuh, block_mask.cuh
//   KEPT_ROWS, KEPT_COLS  row blocks and column blocks that share an element of the block mask
//   VARLEN      whether batches are sequences of their own lengths, packed one behind the other: sequence.cuh
#define SUB BC
constexpr int SCARCE = 2;  // registers are: gradients, S and dP are in them
#include "block_mask.cuh"
#include "element.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "row_products.cuh"
#include "sequence.cuh"
#include "weight.cuh"

constexpr int WARPS = BR / 16, THREADS = 32 * WARPS, N = BC / 8;

typedef SwizzledTile<HEAD_DIM> KeyTile;     // of Q, K and dQ
typedef SwizzledTile<VALUE_DIM> ValueTile;  // of V and dO

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fa2_backward_queries(__grid_constant__ const Params given) {
  const Params p = given;
  extern __shared__ __align__(128) unsigned char sram[];
  Element* Q_smem = reinterpret_cast<Element*>(sram);  // (BR x d), at the end dQ
  Element* dO_smem = Q_smem + BR * KeyTile::PAD;       // (BR x d_v)
  Element* K_smem = dO_smem + BR * ValueTile::PAD;     // (BC x d)
  Element* V_smem = K_smem + BC * KeyTile::PAD;        // (BC x d_v)
  unsigned* kept = reinterpret_cast<unsigned*>(V_smem + BC * ValueTile::PAD);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const RowBlock place = find_row_block<BR>(p, sram);
  if (!place.exists) return;
  const int Nq = place.Nq, row_block = place.i * BR, rows = min(BR, Nq - row_block);
  const long long row0 = place.L_row + row_block;
  const Element *K = place.keys(p.K), *V = place.keys(p.V);
  const int keys = count_keys(p, place.batch, place.Nk, sram);
  const Masks masks = masks_of(p, place.batch, place.head, Nq, place.Nk, keys);

  // The K/V blocks that some row sees
  const int last_row = row_block + rows - 1;
  const int first_key = visible_begin(masks, row_block), end_key = visible_end(masks, last_row);
  const Blocks blocks = {first_key / BC, first_key < end_key ? (end_key + BC - 1) / BC : 0, kept};
  if constexpr (SPARSE) {
    const BlockMask keep = block_mask_of(p, place.batch, place.head);
    read_block_mask<KEPT_COLS>(kept, keep, place.i / KEPT_ROWS, blocks.begin, blocks.end, warp, WARPS);
    __syncthreads();
  }
  int j = blocks.below(blocks.end);

  const int warp_row = row_block + warp * 16;
  Base base[2] = {};  // of rows g and g + 8
  float D_i[2] = {};
  bool large = false;
  if (j >= blocks.begin) {
    KeyTile::load<BR, THREADS, false>(Q_smem, place.query(p.Q, row_block), p.Q.row, rows, threadIdx.x);
    ValueTile::load<BR, THREADS, false>(dO_smem, place.query(p.dO, row_block), p.dO.row, rows, threadIdx.x);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      // One of the four lanes that share a row reads for them.
      const int row = warp * 16 + g + 8 * h;
      if (t == 0 && row < rows) {
        const float l = p.L[row0 + row];
        large |= is_large(l);
        base[h] = base_of(l, p.bases, row0 + row);
        D_i[h] = p.D[row0 + row];
      }
      base[h].score = __shfl_sync(~0u, base[h].score, 0, 4);
      base[h].log_sum = __shfl_sync(~0u, base[h].log_sum, 0, 4);
      D_i[h] = __shfl_sync(~0u, D_i[h], 0, 4);
    }
    large = __any_sync(~0u, large);
  }
  const QueryRows<KeyTile, 1, false> Q_rows = {Q_smem + warp * 16 * KeyTile::PAD};
  const QueryRows<ValueTile, 1, false> dO_rows = {dO_smem + warp * 16 * ValueTile::PAD};

  float dQ_regs[1][KeyTile::PAD / 8][4] = {};
  for (; j >= blocks.begin; j = blocks.below(j)) {
    const int cols = keys - j * BC;
    __syncthreads();  // all are done with the blocks before
    KeyTile::load<BC, THREADS, false>(K_smem, K + static_cast<long long>(j) * BC * p.K.row, p.K.row, cols, threadIdx.x);
    close_group();
    ValueTile::load<BC, THREADS, false>(V_smem, V + static_cast<long long>(j) * BC * p.V.row, p.V.row, cols, threadIdx.x);
    close_group();
    const int last = min(warp_row + 16, Nq) - 1;
    const bool seen = warp_row < Nq && j * BC < visible_end(masks, last) && (j + 1) * BC > visible_begin(masks, warp_row);

    // S = Q K_j^T, P = exp(S - L)
    float P[1][N][4], dS[1][N][4];
    wait_for_groups<1>();
    __syncthreads();
    if (seen) {
      scores(P, Q_rows, K_smem);
      const bool whole = !MASK && !BIAS && (j + 1) * BC <= visible_end(masks, warp_row) && j * BC >= visible_begin(masks, last);
      if (large) {
        scale_and_mask(P[0], BIAS ? p.scale * UNIT : 1.f, UNIT, masks, warp_row + g, j * BC, Nq);
        const float factor = BIAS ? 1.f : p.scale * UNIT;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
          for (int e = 0; e < 4; e++)
            P[0][n][e] = P[0][n][e] == NEG_INF ? 0.f : weight_of(fmaf(P[0][n][e] - base[e / 2].score, factor, -base[e / 2].log_sum));
      } else if (whole) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) P[0][n][e] = weight_of(fmaf(P[0][n][e], p.scale * UNIT, -base[e / 2].log_sum));
      } else {
        scale_and_mask(P[0], p.scale * UNIT, UNIT, masks, warp_row + g, j * BC, Nq);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) P[0][n][e] = weight_of(P[0][n][e] - base[e / 2].log_sum);
      }
    }
    wait_for_groups<0>();
    __syncthreads();
    if (seen) {
      // dP = dO V_j^T, dS = P * (dP - D), dQ += dS K_j
      scores(dS, dO_rows, V_smem);
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) dS[0][n][e] = P[0][n][e] * (dS[0][n][e] - D_i[e / 2]);
      add_weighted_values<KeyTile, 8>(dQ_regs, dS, K_smem);
    }
  }

  // dQ goes through the room of Q, of which a warp reads its own rows only, and not since the last barrier.
  Element* dQ_smem = Q_smem + warp * 16 * KeyTile::PAD;
  put_tile<KeyTile>(dQ_smem, dQ_regs, p.scale);
  __syncwarp();
  KeyTile::store<16>(place.query(p.dQ, warp_row), dQ_smem, p.dQ.row, rows - warp * 16, lane);
}
