// P = exp(S - L) in a backward pass, which knows L. Half types take powers of two, exp2(x log2(e)): one instruction; float32
// gets the exact exponential. In float32, and of a large L, row_bases.cu finds what P is relative to: L has too few digits.
// Constants: ELEMENT (element.cuh).
#pragma once
#include "element.cuh"
#include "params.cuh"

// What exponents are multiples of
constexpr float UNIT = sizeof(Element) == 4 ? 1.f : 1.4426950408889634f;
// Whether the weights of every row are relative to its own m and l
constexpr bool EXACT = sizeof(Element) == 4;
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

// What the weights of a row are relative to: P = weight_of((S - score) factor - log_sum)
struct __align__(8) Base {
  float score, log_sum;
  __device__ __forceinline__ float exponent(float s, float factor) const { return fmaf(s - score, factor, -log_sum); }
};
// What a kernel is given for a row: its base where all have one, else L.
template <bool BASES> struct GivenFor {
  typedef float Type;
};
template <> struct GivenFor<true> {
  typedef Base Type;
};
typedef GivenFor<EXACT>::Type OfRow;
template <typename T = OfRow> __device__ __forceinline__ const T* given_of_rows(const Params& p) {
  if constexpr (sizeof(T) == sizeof(Base)) {
    return p.bases;
  } else {
    return p.L;
  }
}

__device__ __forceinline__ bool is_large(float l) { return fabsf(l) > LARGE && l != NEG_INF; }
__device__ __forceinline__ bool is_large(Base) { return false; }
// Of a row of which this is given; `bases` has those of large rows.
__device__ __forceinline__ Base base_of(float l, const Base* bases, long long row) {
  if (is_large(l)) return bases[row];
  return {0.f, l == NEG_INF ? 0.f : l * UNIT};  // a row that sees nothing, and has scores of -inf
}
__device__ __forceinline__ Base base_of(Base given, const Base*, long long) { return given; }

// The exponent of a score in a row, in natural units, and what a row is given where it sees nothing and has scores of -inf
__device__ __forceinline__ float exponent_of(float L, float s, float) { return s - L; }
__device__ __forceinline__ float exponent_of(Base base, float s, float factor) { return base.exponent(s, factor); }
__device__ __forceinline__ float where_nothing_is_seen(float L) { return L == NEG_INF ? 0.f : L; }
__device__ __forceinline__ Base where_nothing_is_seen(Base base) { return base; }
// That of the first of the four lanes that share a row
__device__ __forceinline__ float of_first(float L) { return __shfl_sync(~0u, L, 0, 4); }
__device__ __forceinline__ Base of_first(Base base) {
  return {__shfl_sync(~0u, base.score, 0, 4), __shfl_sync(~0u, base.log_sum, 0, 4)};
}

// The weight of a sink in a row: exp(sink - L). `scale` is what a base's score is to be multiplied by.
__device__ __forceinline__ float sink_weight(float sink, float L, float) { return L == NEG_INF ? 0.f : expf(sink - L); }
__device__ __forceinline__ float sink_weight(float sink, Base base, float scale) {
  return expf(fmaf(-base.score, scale, sink) - base.log_sum);
}

// The barrier behind the copies of what ROWS rows are given; whether any of them is large. Each thread looks at what it has copied. A row
// that sees nothing, and has scores of -inf where they are not masked, has an L of 0 from then on.
template <int ROWS, int THREADS> __device__ __forceinline__ bool any_large(float* L_smem) {
  bool large = false;
#pragma unroll
  for (int r0 = 0; r0 < ROWS; r0 += THREADS) {
    const int r = r0 + threadIdx.x;
    if (ROWS % THREADS != 0 && r >= ROWS) break;
    large |= is_large(L_smem[r]);
    if (L_smem[r] == NEG_INF) L_smem[r] = 0.f;
  }
  return __syncthreads_or(large);
}
template <int ROWS, int THREADS> __device__ __forceinline__ bool any_large(const Base*) {
  __syncthreads();
  return false;
}

// What two neighbouring rows are given, in shared memory, as their weights' exponents want it
template <typename T> struct PairOf;
template <> struct PairOf<float> {
  float offset[2];
  __device__ __forceinline__ explicit PairOf(const float* L_smem) {
    const float2 l = *reinterpret_cast<const float2*>(L_smem);
    offset[0] = -l.x * UNIT, offset[1] = -l.y * UNIT;
  }
  __device__ __forceinline__ float exponent(float s, int which, float factor) const { return fmaf(s, factor, offset[which]); }
};
template <> struct PairOf<Base> {
  Base base[2];
  __device__ __forceinline__ explicit PairOf(const Base* bases_smem) {
    const float4 both = *reinterpret_cast<const float4*>(bases_smem);
    base[0] = {both.x, both.y}, base[1] = {both.z, both.w};
  }
  __device__ __forceinline__ float exponent(float s, int which, float factor) const { return base[which].exponent(s, factor); }
};
typedef PairOf<OfRow> TwoRows;
