// P = exp(S - L) in a backward pass, which knows L. Half types take powers of two, exp2(x log2(e)): one instruction; float32
// gets the exact exponential.
#pragma once
#include "element.cuh"

// What exponents are multiples of
constexpr float UNIT = sizeof(Element) == 4 ? 1.f : 1.4426950408889634f;

__device__ __forceinline__ float weight_of(float x) { return sizeof(Element) == 4 ? expf(x) : exp2_of(x); }
