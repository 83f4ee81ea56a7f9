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
#include "tiled_products.cuh"

// S = scale Q K^T, a BR x BC tile a thread block
extern "C" __global__ void __launch_bounds__(THREADS, 1)
standard_scores(const Element* Q, const Element* K, Element* S, int Nq, int Nk, int heads, int group, float scale,
                long long Q_batch, long long Q_head, long long Q_row, long long K_batch, long long K_head, long long K_row,
                const unsigned char* mask, long long mask_batch, long long mask_head, long long mask_row, long long mask_col,
                const Element* bias, long long bias_batch, long long bias_head, long long bias_row, long long bias_col,
                const int* key_lengths, int left, int right) {
  extern __shared__ __align__(16) unsigned char sram[];
  const Place at(Nq, Nk, heads);
  const Masks masks = {count_keys(key_lengths, at.batch, Nk, sram), Nk - Nq, left, right,
                       mask + at.batch * mask_batch + at.head * mask_head, mask_row, mask_col,
                       bias + at.batch * bias_batch + at.head * bias_head, bias_row, bias_col};
  Q += at.batch * Q_batch + at.head * Q_head + static_cast<long long>(at.i) * BR * Q_row;
  K += at.batch * K_batch + at.head / group * K_head + static_cast<long long>(at.j) * BC * K_row;
  S += (at.pair * Nq + at.i * BR) * Nk + at.j * BC;
  tile_product<D>(sram, Q, Q_row, K, K_row, at.rows, at.cols, masks.keys - at.j * BC, S, Nk,
                  [&](float(&S_regs)[SUB / 8][4], int row, int col) {
                    scale_and_mask(S_regs, scale, 1.f, masks, at.i * BR + row, at.j * BC + col, Nq);
                  });
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
  const int Tr = (Nq + BR - 1) / BR;
  const long long pair = blockIdx.x / Tr, batch = pair / heads, head = pair % heads;
  const int row0 = blockIdx.x % Tr * BR + threadIdx.x / 32 * 16;
  const int keys = count_keys(key_lengths, batch, Nk, sram);  // rows of V behind them are not read: P is 0 there
  float O_regs[DV_PAD / 8][4] = {};                           // (16 x DV_PAD)
  add_tiled_product<DV, BC>(O_regs, reinterpret_cast<Element*>(sram), P + pair * Nq * Nk, Nk, 1, row0, Nq, Nk,
                            V + batch * V_batch + head / group * V_head, V_row, keys, THREADS);
  store_product<DV>(O + batch * O_batch + head * O_head, O_row, row0, Nq, O_regs, 1.f);
}
