// Attention sinks, where SINKS is 1: a score a head that joins the softmax of its rows and has no value; keys share what it leaves.
#pragma once
#include "mask.cuh"

// A head's, for the LANES lanes that share a row; the first of them reads it, where it is wanted.
template <int LANES = 4> __device__ __forceinline__ float sink_of(const Params& p, int head, bool wanted) {
  if constexpr (!SINKS) return NEG_INF;
  return __shfl_sync(~0u, wanted && threadIdx.x % LANES == 0 ? load_in_place(p.sinks + head) : NEG_INF, 0, LANES);
}

// L = log(exp(L) + exp(sink)); returns the part of the weights that the keys keep.
__device__ __forceinline__ float join_sink(float& L, float sink) {
  const float of_keys = L;
  if (!SINKS || sink == NEG_INF) return 1.f;
  const float smaller = expf(-fabsf(of_keys - sink));
  L = fmaxf(of_keys, sink) + log1pf(smaller);
  return (of_keys < sink ? smaller : 1.f) / (1.f + smaller);
}
