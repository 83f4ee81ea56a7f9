// Standard attention, Algorithm 0 (arXiv 2205.14135): S = scale Q K^T, P = softmax(S), O = P V, with S and P in HBM in
// the element type, or S in float32 (SCORE_TYPE), which scores beyond float16's range take. Three kernels; masked entries of S are stored as -inf, and nothing is skipped.
//
// Constants, all from the tile schedule:
//   ELEMENT     __half, __nv_bfloat16 or float       HEAD_DIM, VALUE_DIM  d of Q and K, of V and O
//   BR, BC      rows and columns of a tile           SUB            columns of S held at a time; divides BC
//   CAUSAL, WINDOW, MASK, BIAS, PADDED, SINKS, DROPOUT  0 or 1: mask.cuh, sinks.cuh, dropout.cuh     SOFTMAX_WARPS  rows that a softmax block does at a time
//   COPY_BYTES  width of a copy                      SCORE_TYPE     of S in HBM: ELEMENT where it is not defined
#include "dropout.cuh"
#include "element.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "sinks.cuh"
#include "tiled_products.cuh"
#ifndef SCORE_TYPE
#define SCORE_TYPE Element
#endif

// S = scale Q K^T, a BR x BC tile a thread block
extern "C" __global__ void __launch_bounds__(THREADS, 1)
standard_scores(__grid_constant__ const Params given) {
  const Params p = given;
  extern __shared__ __align__(16) unsigned char sram[];
  const Place at(p);
  const int keys = count_keys(p, at.batch, p.Nk, sram);
  Masks masks = masks_of(p, at.batch, at.head, p.Nq, p.Nk, keys);
  masks.of_head = score_of_head(p, at.batch, at.head, p.Nq, p.Nk, sram);
  tile_product<HEAD_DIM>(sram, at.query(p.Q), at.keys(p.K), at, keys, p.S + at.score, p.Nk,
                         [&](float(&S_regs)[SUB / 8][4], int row, int col) {
                           scale_and_mask(S_regs, p.scale, 1.f, masks, at.i * BR + row, at.j * BC + col, p.Nq);
                         });
}

// P = softmax(S), a row a warp: one pass over S for m and l, one for P, of which dropped weights are 0 and the others multiplied
extern "C" __global__ void __launch_bounds__(SOFTMAX_WARPS * 32, 1)
standard_softmax(__grid_constant__ const Params given) {
  const Params p = given;
  const int lane = threadIdx.x % 32;
  const long long row = static_cast<long long>(blockIdx.x) * SOFTMAX_WARPS + threadIdx.x / 32;
  if (row >= p.rows) return;
  const int Nk = p.Nk;
  const SCORE_TYPE* S = p.S + row * Nk;
  Element* P = p.P + row * Nk;

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
  float L = m + logf(l), inverse = l == 0.f ? 0.f : 1.f / l;  // a row that sees no key: P = 0
  inverse *= join_sink(L, sink_of<32>(p, row / p.Nq % p.heads, true));
  if constexpr (DROPOUT) {
    const Dropout dropout = dropout_of(p, row / p.Nq / p.heads, row / p.Nq % p.heads);
    const int query = row % p.Nq;
    for (int col = lane; col < Nk; col += 32) {
      const float weight = expf(to_float(S[col]) - safe) * inverse * dropout.scale;
      P[col] = from_float<Element>(dropout.keeps_at(query, col) ? weight : 0.f);
    }
  } else {
    for (int col = lane; col < Nk; col += 32) P[col] = from_float<Element>(expf(to_float(S[col]) - safe) * inverse);
  }
  if (p.L && lane == 0) p.L[row] = L;
}

// O = P V, BR rows a thread block
extern "C" __global__ void __launch_bounds__(THREADS, 1)
standard_values(__grid_constant__ const Params given) {
  const Params p = given;
  extern __shared__ __align__(16) unsigned char sram[];
  const Band at(p.Nq, BR, p.heads);
  const int keys = count_keys(p, at.batch, p.Nk, sram);  // rows of V behind them are not read: P is 0 there
  float O_regs[DV_PAD / 8][4] = {};                      // (16 x DV_PAD)
  add_tiled_product<VALUE_DIM, BC>(O_regs, reinterpret_cast<Element*>(sram), p.P + at.pair * p.Nq * p.Nk, p.Nk, 1, at.row0, p.Nq, p.Nk,
                                   p.V.matrix(at.batch, at.head / p.group), keys, THREADS);
  store_product<VALUE_DIM>(p.O.matrix(at.batch, at.head), at.row0, p.Nq, O_regs, 1.f);
}
