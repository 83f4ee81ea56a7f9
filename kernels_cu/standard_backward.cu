// Standard attention's backward, Algorithm 3 (arXiv 2205.14135, appendix B): dV = P^T dO, dP = dO V^T,
// dS = P * (dP - rowsum(P * dP)), dQ = scale dS K, dK = scale dS^T Q, with P, dP and dS in HBM in the element type. Nobody kept
// P, which the paper takes for granted: a kernel before the five makes it again, P = exp(scale Q K^T - L), 0 where a row does not
// see a key. Nothing is skipped.
//
// Constants, all from the tile schedule:
//   ELEMENT     __half, __nv_bfloat16 or float       D, DV          d of Q and K, of V and O
//   BR, BC      rows and columns of a tile           SUB            depth of a product held at a time; divides BR and BC
//   CAUSAL, WINDOW, MASK, BIAS, PADDED  0 or 1: mask.cuh     SOFTMAX_WARPS  rows that a block of the third step does at a time
//   COPY_BYTES  width of a copy
#include "element.cuh"
#include "mask.cuh"
#include "tiled_products.cuh"

// P = exp(scale Q K^T - L), a BR x BC tile a thread block
extern "C" __global__ void __launch_bounds__(THREADS, 1)
standard_backward_weights(const Element* Q, const Element* K, const float* L, Element* P, int Nq, int Nk, int heads, int group,
                          float scale, long long Q_batch, long long Q_head, long long Q_row,
                          long long K_batch, long long K_head, long long K_row,
                          const unsigned char* mask, long long mask_batch, long long mask_head, long long mask_row,
                          long long mask_col, const Element* bias, long long bias_batch, long long bias_head, long long bias_row,
                          long long bias_col, const int* key_lengths, int left, int right) {
  extern __shared__ __align__(16) unsigned char sram[];
  const Place at(Nq, Nk, heads);
  const Masks masks = {count_keys(key_lengths, at.batch, Nk, sram), Nk - Nq, left, right,
                       mask + at.batch * mask_batch + at.head * mask_head, mask_row, mask_col,
                       bias + at.batch * bias_batch + at.head * bias_head, bias_row, bias_col};
  Q += at.batch * Q_batch + at.head * Q_head + static_cast<long long>(at.i) * BR * Q_row;
  K += at.batch * K_batch + at.head / group * K_head + static_cast<long long>(at.j) * BC * K_row;
  P += (at.pair * Nq + at.i * BR) * Nk + at.j * BC;
  const int lane = threadIdx.x % 32;

  float offset[2];  // L of the rows of this thread, which one of the four lanes that share a row reads
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = threadIdx.x / 32 * 16 + lane / 4 + 8 * h;
    const float l = lane % 4 == 0 && row < at.rows ? L[at.pair * Nq + at.i * BR + row] : 0.f;
    offset[h] = __shfl_sync(~0u, l == NEG_INF ? 0.f : l, 0, 4);  // a row that sees nothing
  }
  tile_product<D>(sram, Q, Q_row, K, K_row, at.rows, at.cols, masks.keys - at.j * BC, P, Nk,
                  [&](float(&S_regs)[SUB / 8][4], int row, int col) {
                    scale_and_mask(S_regs, scale, 1.f, masks, at.i * BR + row, at.j * BC + col, Nq);
#pragma unroll
                    for (int n = 0; n < SUB / 8; n++)
#pragma unroll
                      for (int e = 0; e < 4; e++) S_regs[n][e] = exp_of(S_regs[n][e] - offset[e / 2]);
                  });
}

// Line 2: dP = dO V^T, a BR x BC tile a thread block
extern "C" __global__ void __launch_bounds__(THREADS, 1)
standard_backward_weight_gradients(const Element* dO, const Element* V, Element* dP, int Nq, int Nk, int heads, int group,
                                   long long dO_batch, long long dO_head, long long dO_row,
                                   long long V_batch, long long V_head, long long V_row, const int* key_lengths) {
  extern __shared__ __align__(16) unsigned char sram[];
  const Place at(Nq, Nk, heads);
  const int keys = count_keys(key_lengths, at.batch, Nk, sram);
  dO += at.batch * dO_batch + at.head * dO_head + static_cast<long long>(at.i) * BR * dO_row;
  V += at.batch * V_batch + at.head / group * V_head + static_cast<long long>(at.j) * BC * V_row;
  dP += (at.pair * Nq + at.i * BR) * Nk + at.j * BC;
  tile_product<DV>(sram, dO, dO_row, V, V_row, at.rows, at.cols, keys - at.j * BC, dP, Nk,
                   [](float(&)[SUB / 8][4], int, int) {});
}

// Line 3: dS = P * (dP - rowsum(P * dP)), a row a warp: one pass over P and dP for the sum, one for dS
extern "C" __global__ void __launch_bounds__(SOFTMAX_WARPS * 32, 1)
standard_backward_softmax(const Element* P, const Element* dP, Element* dS, long long rows, int Nk) {
  const int lane = threadIdx.x % 32;
  const long long row = static_cast<long long>(blockIdx.x) * SOFTMAX_WARPS + threadIdx.x / 32;
  if (row >= rows) return;
  P += row * Nk;
  dP += row * Nk;
  dS += row * Nk;
  float sum = 0.f;
  for (int col = lane; col < Nk; col += 32) sum += to_float(P[col]) * to_float(dP[col]);
#pragma unroll
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  for (int col = lane; col < Nk; col += 32) dS[col] = from_float<Element>(to_float(P[col]) * (to_float(dP[col]) - sum));
}

// Line 4: dQ = scale dS K, BR rows a thread block
extern "C" __global__ void __launch_bounds__(THREADS, 1)
standard_backward_queries(const Element* dS, const Element* K, Element* dQ, int Nq, int Nk, int heads, int group, float scale,
                          long long K_batch, long long K_head, long long K_row,
                          long long dQ_batch, long long dQ_head, long long dQ_row, const int* key_lengths) {
  extern __shared__ __align__(16) unsigned char sram[];
  const int Tr = (Nq + BR - 1) / BR;
  const long long pair = blockIdx.x / Tr, batch = pair / heads, head = pair % heads;
  const int row0 = blockIdx.x % Tr * BR + threadIdx.x / 32 * 16;
  const int keys = count_keys(key_lengths, batch, Nk, sram);
  float dQ_regs[D_PAD / 8][4] = {};
  add_tiled_product<D, BC>(dQ_regs, reinterpret_cast<Element*>(sram), dS + pair * Nq * Nk, Nk, 1, row0, Nq, Nk,
                           K + batch * K_batch + head / group * K_head, K_row, keys, THREADS);
  store_product<D>(dQ + batch * dQ_batch + head * dQ_head, dQ_row, row0, Nq, dQ_regs, scale);
}

// Lines 1 and 5: out = factor A^T B, summed over the query heads of a key head, BC keys a thread block
//   A (Nq x Nk) a query head, B (Nq x WIDTH) a query head, out (Nk x WIDTH) a key head
template <int WIDTH>
__device__ __forceinline__ void transposed_products(unsigned char* sram, const Element* A, const Element* B, Element* out, int Nq,
                                                    int Nk, int heads, int group, float factor, long long B_batch,
                                                    long long B_head, long long B_row, long long out_batch, long long out_head,
                                                    long long out_row) {
  const int Tc = (Nk + BC - 1) / BC, kv_heads = heads / group;
  const long long batch = blockIdx.x / Tc / kv_heads, kv_head = blockIdx.x / Tc % kv_heads;
  const int key0 = blockIdx.x % Tc * BC + threadIdx.x / 32 * 16;
  float sum_regs[padded(WIDTH) / 8][4] = {};
  for (long long head = kv_head * group; head < (kv_head + 1) * group; head++)
    add_tiled_product<WIDTH, BR>(sum_regs, reinterpret_cast<Element*>(sram), A + (batch * heads + head) * Nq * Nk, 1, Nk, key0, Nk,
                                 Nq, B + batch * B_batch + head * B_head, B_row, Nq, BC / 16 * 32);
  store_product<WIDTH>(out + batch * out_batch + kv_head * out_head, out_row, key0, Nk, sum_regs, factor);
}

extern "C" __global__ void __launch_bounds__(BC / 16 * 32, 1)
standard_backward_values(const Element* P, const Element* dO, Element* dV, int Nq, int Nk, int heads, int group,
                         long long dO_batch, long long dO_head, long long dO_row,
                         long long dV_batch, long long dV_head, long long dV_row) {
  extern __shared__ __align__(16) unsigned char sram[];
  transposed_products<DV>(sram, P, dO, dV, Nq, Nk, heads, group, 1.f, dO_batch, dO_head, dO_row, dV_batch, dV_head, dV_row);
}

extern "C" __global__ void __launch_bounds__(BC / 16 * 32, 1)
standard_backward_keys(const Element* dS, const Element* Q, Element* dK, int Nq, int Nk, int heads, int group, float scale,
                       long long Q_batch, long long Q_head, long long Q_row,
                       long long dK_batch, long long dK_head, long long dK_row) {
  extern __shared__ __align__(16) unsigned char sram[];
  transposed_products<D>(sram, dS, Q, dK, Nq, Nk, heads, group, scale, Q_batch, Q_head, Q_row, dK_batch, dK_head, dK_row);
}
