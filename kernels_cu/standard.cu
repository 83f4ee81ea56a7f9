// Standard attention, Algorithm 0 (arXiv 2205.14135): S = scale Q K^T, P = softmax(S), O = P V, with S and P in HBM in
// the element type. Three kernels; masked entries of S are stored as -inf, and nothing is skipped.
//
// Constants, all from the tile schedule:
//   ELEMENT     __half, __nv_bfloat16 or float       D, DV          d of Q and K, of V and O
//   BR, BC      rows and columns of a tile           SUB            columns of S held at a time; divides BC
//   CAUSAL, WINDOW, MASK, BIAS, PADDED  0 or 1: mask.cuh     SOFTMAX_WARPS  rows that a softmax block does at a time
//   COPY_BYTES  width of a copy
#include "element.cuh"
#include "mask.cuh"
#include "row_pair.cuh"
#include "tile_copy.cuh"
#include "warp_product.cuh"

constexpr int THREADS = BR / 16 * 32;  // a warp for every 16 rows of a tile

// S = scale Q K^T, a BR x BC tile a thread block
extern "C" __global__ void __launch_bounds__(THREADS, 1)
standard_scores(const Element* Q, const Element* K, Element* S, int Nq, int Nk, int heads, int group, float scale,
                long long Q_batch, long long Q_head, long long Q_row, long long K_batch, long long K_head, long long K_row,
                const unsigned char* mask, long long mask_batch, long long mask_head, long long mask_row, long long mask_col,
                const Element* bias, long long bias_batch, long long bias_head, long long bias_row, long long bias_col,
                const int* key_lengths, int left, int right) {
  extern __shared__ __align__(16) unsigned char sram[];
  Element* Q_smem = reinterpret_cast<Element*>(sram);  // (BR x D_ROW)
  Element* K_smem = Q_smem + BR * D_ROW;               // (BC x D_ROW)

  const int Tr = (Nq + BR - 1) / BR, Tc = (Nk + BC - 1) / BC;
  const int j = blockIdx.x % Tc, i = blockIdx.x / Tc % Tr;
  const long long pair = blockIdx.x / Tc / Tr, batch = pair / heads, head = pair % heads;
  const int rows = min(BR, Nq - i * BR), cols = min(BC, Nk - j * BC);
  Q += batch * Q_batch + head * Q_head + static_cast<long long>(i) * BR * Q_row;
  K += batch * K_batch + head / group * K_head + static_cast<long long>(j) * BC * K_row;
  S += (pair * Nq + i * BR) * Nk + j * BC;
  const Masks masks = {count_keys(key_lengths, batch, Nk, sram), Nk - Nq, left, right,
                       mask + batch * mask_batch + head * mask_head, mask_row, mask_col,
                       bias + batch * bias_batch + head * bias_head, bias_row, bias_col};

  copy_tile<D>(Q_smem, Q, Q_row, BR, rows, threadIdx.x, THREADS);
  // Keys that do not exist are not read, though S has columns for them.
  copy_tile<D>(K_smem, K, K_row, (cols + SUB - 1) / SUB * SUB, masks.keys - j * BC, threadIdx.x, THREADS);
  wait_for_copies();
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row0 = warp * 16 + g;
  for (int col = 0; col < cols; col += SUB) {
    float S_regs[SUB / 8][4];  // (16 x SUB)
    scores(S_regs, Q_smem + warp * 16 * D_ROW, K_smem + col * D_ROW);
    scale_and_mask(S_regs, scale, 1.f, masks, i * BR + row0, j * BC + col, Nq);
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int n = 0; n < SUB / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int row = row0 + 8 * h, c = col + 8 * n + 2 * t + e;
          if (row < rows && c < cols) S[static_cast<long long>(row) * Nk + c] = from_float<Element>(S_regs[n][2 * h + e]);
        }
  }
}

// P = softmax(S), a row a warp: one pass over S for m and l, one for P
extern "C" __global__ void __launch_bounds__(SOFTMAX_WARPS * 32, 1)
standard_softmax(const Element* S, Element* P, float* L, long long rows, int Nk) {
  const int lane = threadIdx.x % 32;
  const long long row = static_cast<long long>(blockIdx.x) * SOFTMAX_WARPS + threadIdx.x / 32;
  if (row >= rows) return;
  S += row * Nk;
  P += row * Nk;

  float m = NEG_INF, l = 0.f;  // of the columns that this lane saw
  for (int col = lane; col < Nk; col += 32) {
    const float s = to_float(S[col]), m_new = fmaxf(m, s), safe = m_new == NEG_INF ? 0.f : m_new;
    l = l * expf(m - safe) + expf(s - safe);
    m = m_new;
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) {
    const float m_other = __shfl_xor_sync(~0u, m, other), l_other = __shfl_xor_sync(~0u, l, other);
    const float m_new = fmaxf(m, m_other), safe = m_new == NEG_INF ? 0.f : m_new;
    l = l * expf(m - safe) + l_other * expf(m_other - safe);
    m = m_new;
  }

  const float safe = m == NEG_INF ? 0.f : m;
  const float inverse = l == 0.f ? 0.f : 1.f / l;  // a row that sees no key: P = 0
  for (int col = lane; col < Nk; col += 32) P[col] = from_float<Element>(expf(to_float(S[col]) - safe) * inverse);
  if (L && lane == 0) L[row] = m + logf(l);
}

// O = P V, BR rows a thread block
extern "C" __global__ void __launch_bounds__(THREADS, 1)
standard_values(const Element* P, const Element* V, Element* O, int Nq, int Nk, int heads, int group,
                long long V_batch, long long V_head, long long V_row, long long O_batch, long long O_head, long long O_row,
                const int* key_lengths) {
  extern __shared__ __align__(16) unsigned char sram[];
  Element* V_smem = reinterpret_cast<Element*>(sram);  // (BC x DV_ROW)

  const int Tr = (Nq + BR - 1) / BR, i = blockIdx.x % Tr;
  const long long pair = blockIdx.x / Tr, batch = pair / heads, head = pair % heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row0 = i * BR + warp * 16 + g;
  V += batch * V_batch + head / group * V_head;
  O += batch * O_batch + head * O_head;
  P += pair * Nq * Nk;

  const int keys = count_keys(key_lengths, batch, Nk, sram);  // rows of V behind them are not read: P is 0 there
  float O_regs[DV_PAD / 8][4] = {};  // (16 x DV_PAD)
  for (int first = 0; first < Nk; first += BC) {
    const int cols = min(BC, Nk - first);
    __syncthreads();  // every warp is done with the V tile before
    copy_tile<DV>(V_smem, V + first * V_row, V_row, (cols + SUB - 1) / SUB * SUB, keys - first, threadIdx.x, THREADS);
    wait_for_copies();
    __syncthreads();
    for (int col = 0; col < cols; col += SUB) {
      float P_regs[SUB / 8][4];  // (16 x SUB)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < SUB / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int row = row0 + 8 * h, c = first + col + 8 * n + 2 * t + e;
            P_regs[n][2 * h + e] = row < Nq && c < Nk ? to_float(P[static_cast<long long>(row) * Nk + c]) : 0.f;
          }
      add_weighted_values(O_regs, P_regs, V_smem + col * DV_ROW);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = row0 + 8 * h;
    if (row >= Nq) continue;
#pragma unroll
    for (int n = 0; n < DV_PAD / 8; n++) store_row_pair<DV>(O + row * O_row, 8 * n + 2 * t, O_regs[n][2 * h], O_regs[n][2 * h + 1]);
  }
}
