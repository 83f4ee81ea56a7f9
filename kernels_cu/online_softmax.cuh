// Online softmax for the rows that a warp owns, 16 M of them, block of keys by block of keys: fa2_forward.cu and decode.cu.
// What includes this has M, N and C: tensor core tiles of a warp's part of S (M x N) and of O (M x C).
#pragma once
#include "mma.cuh"
#include "row_products.cuh"
#include "softmax_origin.cuh"

// What a warp carries from one K/V block to the next
struct State {
  float O[M][C][4];
  float minus_m[M][2], l[M][2];  // of rows 16 i + g + 8 h: -m, which saves negating it; l is this lane's part of the sum
};

// Whether some of a lane's scores, of columns from 8 FROM on, are far beyond m, or offsets are so large that S itself must be taken. What
// exponents of P are offset by. That a row's maximum has grown shows in one of its lanes: they need not tell each other.
template <int FROM>
__device__ __forceinline__ bool outgrown(const float (&S)[M][N][4], const State& state, float factor, float (&offset)[M][2]) {
  float growth = NEG_INF, most = 0.f;
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      offset[i][h] = state.minus_m[i][h] * factor;  // infinite before any key was seen
      most = fmaxf(most, fabsf(offset[i][h]));
      if constexpr (FROM < N) {
        float largest = S[i][FROM][2 * h];
#pragma unroll
        for (int n = FROM; n < N; n++) largest = fmaxf(largest, fmaxf(S[i][n][2 * h], S[i][n][2 * h + 1]));
        growth = fmaxf(growth, fmaf(largest, factor, offset[i][h]));
      }
    }
  return (growth > MOST_GROWTH) | (most > MOST_OFFSET);
}

// Lines 8 to 10, but for P: m grows to the largest score of each row, O and l are rescaled. What exponents of P are offset by, and S if
// that is not to be rounded.
__device__ __forceinline__ void raise(float (&S)[M][N][4], State& state, float factor, float (&offset)[M][2]) {
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float largest = S[i][0][2 * h];
#pragma unroll
      for (int n = 0; n < N; n++) largest = fmaxf(largest, fmaxf(S[i][n][2 * h], S[i][n][2 * h + 1]));
      const float m = -state.minus_m[i][h], m_new = fmaxf(m, row_max(largest));
      const Origin now = origin_of(m_new, factor);
      const float rescale = weight_kept(m, now, factor);
      state.minus_m[i][h] = -m_new;
      state.l[i][h] *= rescale;
      offset[i][h] = now.offset;
#pragma unroll
      for (int n = 0; n < N; n++) {
        S[i][n][2 * h] -= now.score;
        S[i][n][2 * h + 1] -= now.score;
      }
#pragma unroll
      for (int n = 0; n < C; n++) {
        state.O[i][n][2 * h] *= rescale;
        state.O[i][n][2 * h + 1] *= rescale;
      }
    }
}

// `raise` where m has to grow, which is rare. Where a block is `masked`, which is rare as well, `mask(S)` comes before.
template <class Mask>
__device__ __forceinline__ void rescale(float (&S)[M][N][4], State& state, float factor, float (&offset)[M][2], bool masked, Mask mask) {
  if (__any_sync(~0u, masked | outgrown<0>(S, state, factor, offset))) {
    if (__any_sync(~0u, masked)) mask(S);
    raise(S, state, factor, offset);
  }
}

// P = exp2(S factor + offset) and l += rowsum(P), of columns 16 k to 16 k + 15
__device__ __forceinline__ void weigh(float (&S)[M][N][4], float (&l)[M][2], float factor, const float (&offset)[M][2], int k) {
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int n = 2 * k; n < 2 * k + 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        S[i][n][e] = exp2_of(fmaf(S[i][n][e], factor, offset[i][e / 2]));
        l[i][e / 2] += S[i][n][e];
      }
}

// The same for all columns. Floats are summed before they are added to l, as add_tile_of_values does.
__device__ __forceinline__ void weigh_tile(float (&S)[M][N][4], State& state, float factor, const float (&offset)[M][2]) {
  constexpr bool APART = sizeof(Element) == 4;
  float part[M][2] = {};
#pragma unroll
  for (int k = 0; k < (N + 1) / 2; k++) weigh(S, APART ? part : state.l, factor, offset, k);
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int h = 0; h < 2; h++)
      if (APART) state.l[i][h] += part[i][h];
}

// The same for the first 16 columns apart from S, of which sums are to be
__device__ __forceinline__ void weigh(const float (&S)[M][N][4], float factor, const float (&offset)[M][2], float (&P)[M][2][4],
                                      float (&sum)[M][2]) {
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        P[i][n][e] = exp2_of(fmaf(S[i][n][e], factor, offset[i][e / 2]));
        sum[i][e / 2] = n == 0 && e % 2 == 0 ? P[i][n][e] : sum[i][e / 2] + P[i][n][e];
      }
}

// `rescale`, and the weights of the first 16 columns. Those are made before it is known whether m has to grow, beside the products of
// S, and tell by their sums whether it has; if so, again.
template <class Mask>
__device__ __forceinline__ void rescale_and_weigh(float (&S)[M][N][4], State& state, float factor, float (&offset)[M][2], bool masked,
                                                  Mask mask, float (&P)[M][2][4]) {
  float sum[M][2];
  const bool rare = masked | outgrown<2>(S, state, factor, offset);
  weigh(S, factor, offset, P, sum);
  float most = sum[0][0];
#pragma unroll
  for (int i = 0; i < M; i++) most = fmaxf(most, fmaxf(sum[i][0], sum[i][1]));
  if (__any_sync(~0u, rare | (most > MOST_WEIGHT))) {
    if (__any_sync(~0u, masked)) mask(S);
    raise(S, state, factor, offset);
    weigh(S, factor, offset, P, sum);
  }
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) state.l[i][h] += sum[i][h];
}
