// The simulator's yardstick: attention in a single pass over the keys (FlashAttention-2's loop order, arXiv 2307.08691),
// float16, d 64, tiles of 64 x 64, four warps of 16 rows, K and V in two stages. Made of the parts in kernels_cu/.
//
// Constants: ELEMENT __half, D and DV 64, SUB 64, COPY_BYTES 16; CAUSAL 0 or 1.
#include "row_pair.cuh"
#include "tile_copy.cuh"
#include "warp_product.cuh"

constexpr int B = SUB, THREADS = B / 16 * 32, TILE = B * D_ROW;  // rows of a tile of Q, K or V; elements of a tile

// S = -inf where the key does not exist or, when causal, comes after the query.
__device__ __forceinline__ void mask_scores(float (&S_regs)[B / 8][4], int row, int col, int N) {
#pragma unroll
  for (int n = 0; n < B / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int key = col + 8 * n + 2 * (threadIdx.x % 4) + e % 2;
      if (key >= N || (CAUSAL && key > row + 8 * (e / 2))) S_regs[n][e] = NEG_INF;
    }
}

// Q, K, V, O (heads x N x D) and L (heads x N) are contiguous; a block does B rows (blockIdx.x) of a head (blockIdx.y).
extern "C" __global__ void __launch_bounds__(THREADS)
single_pass(const Element* Q, const Element* K, const Element* V, Element* O, float* L, int N, float scale) {
  extern __shared__ __align__(16) unsigned char sram[];
  Element* Q_smem = reinterpret_cast<Element*>(sram);                 // (B x D_ROW)
  Element *K_smem = Q_smem + TILE, *V_smem = K_smem + 2 * TILE;       // (2 x B x D_ROW) each
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row0 = blockIdx.x * B, row = row0 + warp * 16 + g;
  const long long head = static_cast<long long>(blockIdx.y) * N;

  auto load_keys = [&](int j) {
    const long long from = (head + j * B) * HEAD_DIM;
    const int valid = min(B, N - j * B);
    copy_tile<HEAD_DIM>(K_smem + j % 2 * TILE, K + from, HEAD_DIM, B, valid, threadIdx.x, THREADS);
    copy_tile<HEAD_DIM>(V_smem + j % 2 * TILE, V + from, HEAD_DIM, B, valid, threadIdx.x, THREADS);
  };
  copy_tile<HEAD_DIM>(Q_smem, Q + (head + row0) * HEAD_DIM, HEAD_DIM, B, min(B, N - row0), threadIdx.x, THREADS);
  load_keys(0);

  float O_regs[HEAD_DIM / 8][4] = {}, m[2] = {NEG_INF, NEG_INF}, l[2] = {};
  const int tiles = (min(N, CAUSAL ? row0 + B : N) + B - 1) / B;
  for (int j = 0; j < tiles; j++) {
    wait_for_copies();
    __syncthreads();  // stage j is there, and every warp is done with the other one
    if (j + 1 < tiles) load_keys(j + 1);

    float S_regs[B / 8][4];  // (16 x B)
    scores(S_regs, Q_smem + warp * 16 * D_ROW, K_smem + j % 2 * TILE);
    if ((j + 1) * B > N || (CAUSAL && (j + 1) * B > row0)) mask_scores(S_regs, row, j * B, N);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float largest = m[h];
#pragma unroll
      for (int n = 0; n < B / 8; n++) largest = fmaxf(largest, fmaxf(S_regs[n][2 * h], S_regs[n][2 * h + 1]));
      largest = row_max(largest);
      const float shift = largest * scale, rescale = exp2f(m[h] * scale - shift);
      m[h] = largest;
      l[h] *= rescale;
#pragma unroll
      for (int n = 0; n < B / 8; n++)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; e++) l[h] += S_regs[n][e] = exp2f(S_regs[n][e] * scale - shift);
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n++) {
        O_regs[n][2 * h] *= rescale;
        O_regs[n][2 * h + 1] *= rescale;
      }
    }
    add_weighted_values(O_regs, S_regs, V_smem + j % 2 * TILE);
  }

#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float sum = row_sum(l[h]), inverse = 1.f / sum;
    if (row + 8 * h >= N) continue;
    Element* O_row = O + (head + row + 8 * h) * HEAD_DIM;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++) {
      store_row_pair<HEAD_DIM>(O_row, 8 * n + 2 * t, O_regs[n][2 * h] * inverse, O_regs[n][2 * h + 1] * inverse);
    }
    // The scores came in units of log2(e): scale is that of the scores times log2(e).
    if (t == 0) L[head + row + 8 * h] = m[h] * scale * 0.69314718f + logf(sum);
  }
}
