// P = exp(S - L) in a backward pass, which knows L. Half types take powers of two, exp2(x log2(e)): one instruction; float32
// gets the exact exponential. Of a large L float32 has too few digits: large_rows.cu then finds what P is relative to.
// Constants: ELEMENT (element.cuh).
#pragma once
#include "element.cuh"

// What exponents are multiples of
constexpr float UNIT = sizeof(Element) == 4 ? 1.f : 1.4426950408889634f;
// Up to here what float32 rounds off L changes no weight of a half type.
constexpr float LARGE = 4096.f;

__device__ __forceinline__ float weight_of(float x) { return sizeof(Element) == 4 ? expf(x) : exp2_of(x); }
template <int M, int N> __device__ __forceinline__ void to_weights(float (&P)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) P[m][n][e] = weight_of(P[m][n][e]);
}
__device__ __forceinline__ bool is_large(float l) { return fabsf(l) > LARGE && l != NEG_INF; }

// What the weights of a row are relative to: P = weight_of((S - score) factor - log_sum)
struct Base {
  float score, log_sum;
};
// Of a row with this L; `bases` has those of large rows.
__device__ __forceinline__ Base base_of(float l, const Base* bases, long long row) {
  if (is_large(l)) return bases[row];
  return {0.f, l == NEG_INF ? 0.f : l * UNIT};  // a row that sees nothing, and has scores of -inf
}
