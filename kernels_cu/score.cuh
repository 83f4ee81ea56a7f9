// The score function of a call, generated from its expression (cupyflash/expressions/), where SCORE is 1:
//   SCORE_OF_HEAD     declarations of what is read once a thread block, since it is one for a whole head
//   SCORE_HEAD_LINES  statements that read it into `of_head`         SCORE_LINES  statements that make `value` of the scaled score s
// Both know the place, `at`, and read what the call has captured through the struct.
#pragma once
#include "params.cuh"
#ifndef SCORE
#define SCORE 0
#define SCORE_OF_HEAD
#define SCORE_HEAD_LINES
#define SCORE_LINES const float value = s;
#endif

struct ScoreOfHead {
  SCORE_OF_HEAD
};

// Which score it is, and how many queries and keys its head has
struct ScoreAt {
  int batch, head, row, key, queries, keys;
};

// An element of a captured array. The load stays where it stands, so that as many are made as the schedule counts.
__device__ __forceinline__ float score_load(const float* at) {
  float value;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(at));
  return value;
}
__device__ __forceinline__ int score_load(const int* at) {
  int value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(at));
  return value;
}
__device__ __forceinline__ long long score_load(const long long* at) {
  long long value;
  asm volatile("ld.global.s64 %0, [%1];" : "=l"(value) : "l"(at));
  return value;
}
template <typename T> __device__ __forceinline__ T score_load(const T* at) {
  if constexpr (sizeof(T) == 1) {
    unsigned value;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(value) : "l"(at));
    return static_cast<T>(value);
  } else {
    unsigned short bits;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(bits) : "l"(at));
    return *reinterpret_cast<T*>(&bits);
  }
}

// Python's %: of the divisor's sign. An int modulo 0 is 0.
__device__ __forceinline__ float score_mod(float a, float b) {
  const float r = fmodf(a, b);
  return r != 0.0f && (r < 0.0f) != (b < 0.0f) ? __fadd_rn(r, b) : r;
}
__device__ __forceinline__ int score_mod(int a, int b) {
  const int r = b == 0 || b == -1 ? 0 : a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

// What is one for all scores of a head: one thread reads it for the block, through `scratch` in shared memory, which is free again
// when this returns.
__device__ __forceinline__ ScoreOfHead score_of_head(const Params& p, int batch, int head, int queries, int keys, void* scratch) {
  ScoreOfHead of_head = {};
#if SCORE
  if constexpr (sizeof(ScoreOfHead) > 1) {
    ScoreOfHead* shared = static_cast<ScoreOfHead*>(scratch);
    if (threadIdx.x == 0) {
      const ScoreAt at = {batch, head, 0, 0, queries, keys};
      SCORE_HEAD_LINES
      *shared = of_head;
    }
    __syncthreads();
    of_head = *shared;
    __syncthreads();
  }
#endif
  return of_head;
}

__device__ __forceinline__ float score_of(const Params& p, const ScoreOfHead& of_head, float s, const ScoreAt& at) {
  SCORE_LINES
  return value;
}
