// Online softmax for the rows that a warp owns, 16 M of them, block of keys by block of keys: fa2_forward.cu and decode.cu.
// What includes this has M and N (tensor core tiles of a warp's part of S) and ValueTile (of V and O).
#pragma once
#include "mma.cuh"
#include "row_products.cuh"
#include "softmax_origin.cuh"

// What a warp carries from one K/V block to the next
struct State {
  float O[M][ValueTile::PAD / 8][4];
  float minus_m[M][2], l[M][2];  // of rows 16 i + g + 8 h: -m, which saves negating it; l is this lane's part of the sum
};

// The largest score of each row; `growth` and `most`: by how much that is beyond m, and the largest offset, of any row.
__device__ __forceinline__ void find_maxima(const float (&S)[M][N][4], const State& state, float factor, float (&m_tilde)[M][2],
                                            float (&offset)[M][2], float& growth, float& most) {
  growth = NEG_INF, most = 0.f;
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float largest = S[i][0][2 * h];
#pragma unroll
      for (int n = 0; n < N; n++) largest = fmaxf(largest, fmaxf(S[i][n][2 * h], S[i][n][2 * h + 1]));
      m_tilde[i][h] = row_max(largest);
      offset[i][h] = state.minus_m[i][h] * factor;  // infinite before any key was seen
      growth = fmaxf(growth, fmaf(m_tilde[i][h], factor, offset[i][h]));
      most = fmaxf(most, fabsf(offset[i][h]));
    }
}

// Lines 8 to 10, but for P: O and l rescaled where m has grown; what exponents of P are offset by. Where a block is `masked`, which is
// rare as well, `mask(S)` comes before.
template <class Mask>
__device__ __forceinline__ void rescale(float (&S)[M][N][4], State& state, float factor, float (&offset)[M][2], bool masked, Mask mask) {
  float m_tilde[M][2], growth, most;
  find_maxima(S, state, factor, m_tilde, offset, growth, most);
  if (__any_sync(~0u, masked | (growth > MOST_GROWTH) | (most > MOST_OFFSET))) {
    if (__any_sync(~0u, masked)) {
      mask(S);
      find_maxima(S, state, factor, m_tilde, offset, growth, most);
    }
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float m = -state.minus_m[i][h], m_new = fmaxf(m, m_tilde[i][h]);
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
        for (int n = 0; n < ValueTile::PAD / 8; n++) {
          state.O[i][n][2 * h] *= rescale;
          state.O[i][n][2 * h + 1] *= rescale;
        }
      }
  }
}

// P = exp2(S factor + offset) and l += rowsum(P), of columns 16 k to 16 k + 15
__device__ __forceinline__ void weigh(float (&S)[M][N][4], State& state, float factor, const float (&offset)[M][2], int k) {
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int n = 2 * k; n < 2 * k + 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        S[i][n][e] = exp2_of(fmaf(S[i][n][e], factor, offset[i][e / 2]));
        state.l[i][e / 2] += S[i][n][e];
      }
}
