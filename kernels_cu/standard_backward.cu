// Standard attention's backward, Algorithm 3 (arXiv 2205.14135, appendix B): dV = P^T dO, dP = dO V^T,
// dS = P * (dP - rowsum(P * dP)), dQ = scale dS K, dK = scale dS^T Q, with P, dP and dS in HBM in the element type. Nobody kept
// P, which the paper takes for granted: a kernel before the five makes it again, P = exp(S - L), with S = scale Q K^T rounded as the
// forward kept it, from which L is, and 0 where a row does not see a key; in float32 from m and log(l), which row_bases.cu finds. With a score function dS is multiplied by its slopes: those lie in dS until then. Of dropped weights dP is 0, and dV
// takes none. Nothing is skipped.
//
// Constants, all from the tile schedule:
//   ELEMENT     __half, __nv_bfloat16 or float       HEAD_DIM, VALUE_DIM  d of Q and K, of V and O
//   BR, BC      rows and columns of a tile           SUB            depth of a product held at a time; divides BR and BC
//   CAUSAL, WINDOW, MASK, BIAS, SCORE, PADDED, DROPOUT  0 or 1: mask.cuh, score.cuh, dropout.cuh
//   COPY_BYTES  width of a copy                      SOFTMAX_WARPS  rows that a block of the third step does at a time
//   SCORE_TYPE  of the forward's S in HBM: ELEMENT where it is not defined
#include "dropout.cuh"
#include "element.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "tiled_products.cuh"
#include "weight.cuh"
#ifndef SCORE_TYPE
#define SCORE_TYPE Element
#endif

// P = exp(scale Q K^T - L), and in dS the slopes of a score function, a BR x BC tile a thread block
extern "C" __global__ void __launch_bounds__(THREADS, 1)
standard_backward_weights(__grid_constant__ const Params given) {
  const Params p = given;
  extern __shared__ __align__(16) unsigned char sram[];
  const Place at(p);
  const int keys = count_keys(p, at.batch, p.Nk, sram);
  Masks masks = masks_of(p, at.batch, at.head, p.Nq, p.Nk, keys);
  masks.of_head = score_of_head(p, at.batch, at.head, p.Nq, p.Nk, sram);
  const int lane = threadIdx.x % 32;
  Element* dS = p.dS + at.score;

  OfRow of_rows[2];  // of this thread: L, or m and log(l); one of the four lanes that share a row reads them
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = threadIdx.x / 32 * 16 + lane / 4 + 8 * h;
    of_rows[h] = of_first(where_nothing_is_seen(lane % 4 == 0 && row < at.rows ? given_of_rows(p)[at.row0 + row] : OfRow()));
  }
  tile_product<HEAD_DIM>(sram, at.query(p.Q), at.keys(p.K), at, keys, p.P + at.score, p.Nk,
                         [&](float(&S_regs)[SUB / 8][4], int row, int col) {
                           float slopes[SUB / 8][4];
                           scale_and_mask<SCORE>(S_regs, SCALED || !EXACT ? p.scale : 1.f, 1.f, masks, at.i * BR + row, at.j * BC + col,
                                                 p.Nq, true, slopes);
#pragma unroll
                           for (int n = 0; n < SUB / 8; n++)
#pragma unroll
                             for (int e = 0; e < 4; e++) {
                               const float s = to_float(from_float<SCORE_TYPE>(S_regs[n][e]));
                               S_regs[n][e] = s == NEG_INF ? 0.f : exp_of(exponent_of(of_rows[e / 2], s, SCALED ? 1.f : p.scale));
                               const int own_row = row + e / 2 * 8, own_col = col + 8 * n + 2 * (lane % 4) + e % 2;
                               if (SCORE && own_row < at.rows && own_col < at.cols)
                                 dS[static_cast<long long>(own_row) * p.Nk + own_col] = from_float<Element>(slopes[n][e]);
                             }
                         });
}

// Line 2: dP = dO V^T, a BR x BC tile a thread block
extern "C" __global__ void __launch_bounds__(THREADS, 1)
standard_backward_weight_gradients(__grid_constant__ const Params given) {
  const Params p = given;
  extern __shared__ __align__(16) unsigned char sram[];
  const Place at(p);
  const int keys = count_keys(p, at.batch, p.Nk, sram);
  const Dropout dropout = dropout_of(p, at.batch, at.head);
  tile_product<VALUE_DIM>(sram, at.query(p.dO), at.keys(p.V), at, keys, p.dP + at.score, p.Nk,
                          [&](float(&dP_regs)[SUB / 8][4], int row, int col) {
                            if constexpr (DROPOUT)
                              each_weight(dP_regs, dropout, at.i * BR + row / 16 * 16, at.j * BC + col,
                                          [&](float& dp, bool kept) { dp = kept ? dropout.scale * dp : 0.f; });
                          });
}

// Line 3: dS = P * (dP - rowsum(P * dP)), times the slopes, a row a warp: one pass over P and dP for the sum, one for dS
extern "C" __global__ void __launch_bounds__(SOFTMAX_WARPS * 32, 1)
standard_backward_softmax(__grid_constant__ const Params given) {
  const Params p = given;
  const int lane = threadIdx.x % 32;
  const long long row = static_cast<long long>(blockIdx.x) * SOFTMAX_WARPS + threadIdx.x / 32;
  if (row >= p.rows) return;
  const int Nk = p.Nk;
  const Element *P = p.P + row * Nk, *dP = p.dP + row * Nk;
  Element* dS = p.dS + row * Nk;
  float sum = 0.f;
  for (int col = lane; col < Nk; col += 32) sum += to_float(P[col]) * to_float(dP[col]);
#pragma unroll
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  for (int col = lane; col < Nk; col += 32) {
    float ds = to_float(P[col]) * (to_float(dP[col]) - sum);
    if constexpr (SCORE) ds = of_given_score(ds, to_float(dS[col]));
    dS[col] = from_float<Element>(ds);
  }
}

// Line 4: dQ = scale dS K, BR rows a thread block
extern "C" __global__ void __launch_bounds__(THREADS, 1)
standard_backward_queries(__grid_constant__ const Params given) {
  const Params p = given;
  extern __shared__ __align__(16) unsigned char sram[];
  const Band at(p.Nq, BR, p.heads);
  const int keys = count_keys(p, at.batch, p.Nk, sram);
  float dQ_regs[D_PAD / 8][4] = {};
  add_tiled_product<HEAD_DIM, BC>(dQ_regs, reinterpret_cast<Element*>(sram), p.dS + at.pair * p.Nq * p.Nk, p.Nk, 1, at.row0, p.Nq, p.Nk,
                                  p.K.matrix(at.batch, at.head / p.group), keys, THREADS);
  store_product<HEAD_DIM>(p.dQ.matrix(at.batch, at.head), at.row0, p.Nq, dQ_regs, p.scale);
}

// Lines 1 and 5: out = factor A^T B, summed over the query heads of a key head, BC keys a thread block
//   A (Nq x Nk) a query head, where it is of weights (WEIGHTS) without the dropped ones, B (Nq x WIDTH) a query head,
//   out (Nk x WIDTH) a key head
template <int WIDTH, bool WEIGHTS>
__device__ __forceinline__ void transposed_products(const Params& p, const Element* A, const Rows<const Element>& B,
                                                    const Rows<Element>& out, float factor) {
  extern __shared__ __align__(16) unsigned char sram[];
  const Band at(p.Nk, BC, p.heads / p.group);
  float sum_regs[padded(WIDTH) / 8][4] = {};
  for (int head = at.head * p.group; head < (at.head + 1) * p.group; head++) {
    const Element* of_head = A + (static_cast<long long>(at.batch) * p.heads + head) * p.Nq * p.Nk;
    add_tiled_product<WIDTH, BR>(sum_regs, reinterpret_cast<Element*>(sram), of_head, 1, p.Nk, at.row0, p.Nk, p.Nq,
                                 B.matrix(at.batch, head), p.Nq, BC / 16 * 32, [&](float(&A_regs)[SUB / 8][4], int query) {
                                   if constexpr (DROPOUT && WEIGHTS)
                                     each_weight_transposed<BR % 32 == 0 && SUB % 32 == 0>(A_regs, dropout_of(p, at.batch, head), at.row0,
                                                                                           query, Drop());
                                 });
  }
  store_product<WIDTH>(out.matrix(at.batch, at.head), at.row0, p.Nk, sum_regs, factor);
}

extern "C" __global__ void __launch_bounds__(BC / 16 * 32, 1) standard_backward_values(__grid_constant__ const Params given) {
  const Params p = given;
  transposed_products<VALUE_DIM, true>(p, p.P, p.dO, p.dV, DROPOUT ? dropout_of(p, 0, 0).scale : 1.f);
}

extern "C" __global__ void __launch_bounds__(BC / 16 * 32, 1) standard_backward_keys(__grid_constant__ const Params given) {
  const Params p = given;
  transposed_products<HEAD_DIM, false>(p, p.dS, p.Q, p.dK, p.scale);
}
