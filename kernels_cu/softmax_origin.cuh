// What the weights of a row are relative to.
#pragma once
#include "element.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
// A larger maximum rescales O and l only when the weights would grow beyond 2 to this; until then they are relative to
// the old one. That changes no result, since O and l are relative to the same.
constexpr float MOST_GROWTH = 8.f, MOST_WEIGHT = 256.f;
constexpr float MOST_OFFSET = 4096.f;  // up to here what float32 rounds off it changes no weight of a half type

// Weights are exp2((S - score) factor + offset), about 1 where S is m. The offset alone costs least. It is rounded, by which all weights
// of the row are off alike: where m is large, by powers of two, beyond their range.
struct Origin {
  float score, offset;
};
__device__ __forceinline__ Origin origin_of(float m, float factor) {
  if (m == NEG_INF) return {0.f, 0.f};  // no key was seen
  const float offset = -m * factor;
  return fabsf(offset) > MOST_OFFSET ? Origin{m, 0.f} : Origin{0.f, offset};
}
// What is left of weights relative to m when they become relative to `now`
__device__ __forceinline__ float weight_kept(float m, Origin now, float factor) {
  const Origin before = origin_of(m, factor);
  return m == NEG_INF ? 0.f : exp2_of(fmaf(before.score - now.score, factor, now.offset - before.offset));
}
