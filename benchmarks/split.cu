// Who computes what of a tile, for docs/performance.md: each warp some rows (split-Q, as fa2_forward.cu), or each warp some keys
// (SPLIT_K, as the first FlashAttention), whose parts of O go through SRAM at every tile. One thread block, whole tiles.
// Constants: ELEMENT, D, DV, BR, BC (element.cuh, tile_copy.cuh), SPLIT_K 0 or 1
#define COPY_BYTES 16
constexpr bool SCARCE = false;  // registers are not
#include "row_products.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int M = (SPLIT_K ? BR : BR / WARPS) / 16, N = (SPLIT_K ? BC / WARPS : BC) / 8;  // tensor core tiles of a warp's part of S
constexpr int O_COLS = SPLIT_K ? VALUE_DIM / WARPS : VALUE_DIM;  // that a warp keeps of O, of all its rows
constexpr int PART_ROW = VALUE_DIM + 8;                   // elements from one row of a part of O to the next
constexpr float LOG2_E = 1.4426950408889634f;
typedef SwizzledTile<HEAD_DIM> KeyTile;
typedef SwizzledTile<VALUE_DIM> ValueTile;

extern "C" __global__ void __launch_bounds__(THREADS) split(const Element* Q, const Element* K, const Element* V, float* O, int tiles) {
  __shared__ __align__(128) Element Q_smem[BR * HEAD_DIM], K_smem[BC * HEAD_DIM], V_smem[BC * VALUE_DIM];
#if SPLIT_K
  __shared__ __align__(16) float O_part[WARPS][BR * PART_ROW], m_part[WARPS][BR];
#endif
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first_row = SPLIT_K ? 0 : warp * 16 * M, first_key = SPLIT_K ? warp * 8 * N : 0;
  QueryRows<KeyTile, M, false> rows;
  rows.smem = Q_smem + first_row * KeyTile::PAD;
  float O_regs[M][O_COLS / 8][4] = {}, m[M][2], l[M][2] = {};
#pragma unroll
  for (int i = 0; i < M; i++) m[i][0] = m[i][1] = NEG_INF;

  KeyTile::load<BR, THREADS, true>(Q_smem, Q, HEAD_DIM, BR, threadIdx.x);
  for (int j = 0; j < tiles; j++) {
    KeyTile::load<BC, THREADS, true>(K_smem, K + j * BC * HEAD_DIM, HEAD_DIM, BC, threadIdx.x);
    ValueTile::load<BC, THREADS, true>(V_smem, V + j * BC * VALUE_DIM, VALUE_DIM, BC, threadIdx.x);
    close_group();
    wait_for_groups<0>();
    __syncthreads();
    float S[M][N][4];
    scores(S, rows, K_smem + first_key * KeyTile::PAD);
    float largest[M][2];
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float x = NEG_INF;
#pragma unroll
        for (int n = 0; n < N; n++) x = fmaxf(x, fmaxf(S[i][n][2 * h], S[i][n][2 * h + 1]));
        largest[i][h] = row_max(x);
      }
#if SPLIT_K
    // Every warp needs every row's maximum over all keys: each of the four lanes of a row reads one warp's.
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (t == 0) m_part[warp][16 * i + 8 * h + g] = largest[i][h];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) largest[i][h] = row_max(m_part[t][16 * i + 8 * h + g]);
#endif
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float m_new = fmaxf(m[i][h], largest[i][h]), rescale = exp2_of((m[i][h] - m_new) * LOG2_E);
        m[i][h] = m_new;
        l[i][h] *= rescale;
#pragma unroll
        for (int n = 0; n < O_COLS / 8; n++) O_regs[i][n][2 * h] *= rescale, O_regs[i][n][2 * h + 1] *= rescale;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; e++) l[i][h] += S[i][n][e] = exp2_of((S[i][n][e] - m_new) * LOG2_E);
      }
#if SPLIT_K
    float part[M][VALUE_DIM / 8][4] = {};
    add_weighted_values<ValueTile>(part, S, V_smem + first_key * ValueTile::PAD);
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
      for (int n = 0; n < VALUE_DIM / 8; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
          store_two(&O_part[warp][(16 * i + 8 * h + g) * PART_ROW + 8 * n + 2 * t], part[i][n][2 * h], part[i][n][2 * h + 1]);
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++)
#pragma unroll
      for (int i = 0; i < M; i++)
#pragma unroll
        for (int n = 0; n < O_COLS / 8; n++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const float2 two = *reinterpret_cast<const float2*>(
                &O_part[w][(16 * i + 8 * h + g) * PART_ROW + warp * O_COLS + 8 * n + 2 * t]);
            O_regs[i][n][2 * h] += two.x, O_regs[i][n][2 * h + 1] += two.y;
          }
#else
    add_weighted_values<ValueTile>(O_regs, S, V_smem);
#endif
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float sum = row_sum(l[i][h]);
      const int row = first_row + 16 * i + 8 * h + g;
#if SPLIT_K
      if (t == 0) m_part[warp][row] = sum;
      __syncthreads();
      sum = row_sum(m_part[t][row]);
#endif
#pragma unroll
      for (int n = 0; n < O_COLS / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) O[row * VALUE_DIM + (SPLIT_K ? warp * O_COLS : 0) + 8 * n + 2 * t + e] = O_regs[i][n][2 * h + e] / sum;
    }
}
