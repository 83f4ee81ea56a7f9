// The gradients of what a score function has captured (cupyflash/request/score_sums.py), where SCORE_SUMS is not 0:
//   SCORE_SUMS            1: sums of float32 by atomics, in any order. Or in the same bits each time, by two launches: 2 finds the largest
//                         size of what is added to an array; 3 adds multiples of a fraction of that, as integers of 64 bits
//   SCORE_SUM_ARRAYS      how many arrays have sums       SCORE_SUM_TERMS  how many terms a score adds at most to one of them
//   SCORE_SUMS_OF_HEAD    declarations of the sums of elements that are one for a head, which each thread keeps to the end
//   SCORE_SUM_LINES       statements that add what a score's `gradient` makes of each element: to its array, or to those sums
//   SCORE_HEAD_SUM_LINES  statements that add those sums to their arrays
// A gradient is that of what the function makes of a score, before the function's own derivative.
#pragma once
#include "mask.cuh"
#ifndef SCORE_SUMS
#define SCORE_SUMS 0
#define SCORE_SUM_ARRAYS 1
#define SCORE_SUM_TERMS 1
#define SCORE_SUMS_OF_HEAD
#define SCORE_SUM_LINES
#define SCORE_HEAD_SUM_LINES
#endif

struct SumsOfHead {
  SCORE_SUMS_OF_HEAD
};
struct Sums {
  SumsOfHead of_head;
  unsigned largest[SCORE_SUM_ARRAYS];  // SCORE_SUMS 2: the bits of the largest size; those of a NaN are beyond all others
  double factor[SCORE_SUM_ARRAYS];     // SCORE_SUMS 3
};

__device__ __forceinline__ void add_captured(Sums& sums, int which, const float* array, long long place, float value) {
  atomicAdd(const_cast<float*>(array) + place, value);
}
__device__ __forceinline__ void add_captured(Sums& sums, int which, const long long* array, long long place, float value) {
  if constexpr (SCORE_SUMS == 2) {
    sums.largest[which] = max(sums.largest[which], __float_as_uint(value) & 0x7fffffffu);
  } else {
    auto sum = reinterpret_cast<unsigned long long*>(const_cast<long long*>(array)) + place;
    atomicAdd(sum, static_cast<unsigned long long>(__double2ll_rn(value * sums.factor[which])));
  }
}

// The sums that a thread begins with. For integers, one thread reads the largest sizes for the block, through `scratch` in shared
// memory, which is free again when this returns: 2^exponent is beyond a size, and all terms together are below 2^62.
__device__ __forceinline__ Sums sums_from(const Params& p, void* scratch) {
  Sums sums = {};
#if SCORE_SUMS == 3
  unsigned* shared = static_cast<unsigned*>(scratch);
  if (threadIdx.x == 0)
    for (int n = 0; n < SCORE_SUM_ARRAYS; n++) shared[n] = p.dscore_largest[n];
  __syncthreads();
  const int count = 64 - __clzll(p.rows * p.Nk * SCORE_SUM_TERMS);
#pragma unroll
  for (int n = 0; n < SCORE_SUM_ARRAYS; n++) {
    const int exponent = static_cast<int>(shared[n] >> 23) - 126;
    sums.factor[n] = __longlong_as_double((1023ll + 62 - count - exponent) << 52);
  }
  __syncthreads();
#endif
  return sums;
}

__device__ __forceinline__ void add_score(const Params& p, const PartOfHead& of_head, const PartOfRow& of_row, const PartOfKey& of_key,
                                          float s, const ScoreAt& at, float gradient, Sums& sums) {
  SCORE_SUM_LINES
}

// Adds those of the scores that position lets rows see. Of masked ones the gradient is 0.
//   given, dS (16 x 8 N): scaled scores and gradients, rows row0 + 8 h, columns from col0 on, as in scale_and_mask
template <int N>
__device__ __forceinline__ void add_scores(const Masks& masks, const float (&given)[N][4], const float (&dS)[N][4], int row0, int col0,
                                           int Nq, Sums& sums) {
  const int first = col0 + threadIdx.x % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = row0 + 8 * h, begin = visible_begin(masks, row), end = row < Nq ? visible_end(masks, row) : 0;
    PartOfRow own = {};
    if (row < Nq) own = of_row(masks, row);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int key = first + 8 * n + e;
        if (key < end && (!WINDOW || key >= begin))
          add_score(*masks.p, masks.of_head, own, of_key(masks, key), given[n][2 * h + e], score_at(masks, row, key, Nq), dS[n][2 * h + e], sums);
      }
  }
}

// Adds a thread block's sums of its head, each once, in one order; and its largest sizes. `scratch` has room for a sum of each warp.
template <int WARPS>
__device__ __forceinline__ void finish_sums(const Params& p, const Masks& masks, Sums& sums, int Nq, float* scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (sizeof(SumsOfHead) > 1) {
    constexpr int WORDS = sizeof(SumsOfHead) / sizeof(float);
    float* own = reinterpret_cast<float*>(&sums.of_head);
#pragma unroll
    for (int word = 0; word < WORDS; word++) {
#pragma unroll
      for (int other = 16; other > 0; other /= 2) own[word] += __shfl_xor_sync(~0u, own[word], other);
      if (lane == 0) scratch[warp] = own[word];
      __syncthreads();
      if (threadIdx.x == 0)
        for (int beside = 1; beside < WARPS; beside++) own[word] += scratch[beside];
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      const PartOfHead& of_head = masks.of_head;
      const ScoreAt at = score_at(masks, 0, 0, Nq);
      SCORE_HEAD_SUM_LINES
    }
  }
#if SCORE_SUMS == 2
  unsigned* shared = reinterpret_cast<unsigned*>(scratch);
#pragma unroll
  for (int n = 0; n < SCORE_SUM_ARRAYS; n++) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) sums.largest[n] = max(sums.largest[n], __shfl_xor_sync(~0u, sums.largest[n], other));
    if (lane == 0) shared[warp] = sums.largest[n];
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int beside = 1; beside < WARPS; beside++) sums.largest[n] = max(sums.largest[n], shared[beside]);
      atomicMax(p.dscore_largest + n, sums.largest[n]);
    }
    __syncthreads();
  }
#endif
}
