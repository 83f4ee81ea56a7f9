// The score function of a call, generated from its expression (cupyflash/expressions/), where SCORE is 1:
//   SCORE_OF_HEAD     declarations of what is read once a thread block, since it is one for a whole head
//   SCORE_HEAD_LINES  statements that read it into `of_head`
//   SCORE_OF_ROW, SCORE_ROW_LINES, SCORE_OF_KEY, SCORE_KEY_LINES  the same of what is one for a row, or for a key: it is read once for
//                     a tile of them into shared memory, where a kernel has room for it (else there is none)
//   SCORE_ROW_LOADS, SCORE_KEY_LOADS  how many words that are
//   SCORE_LINES       statements that make `value` of the scaled score s and, in a backward kernel, `slope`: the derivative by s
//   SCORE_LOADS       1 where those take something that was read for a row, a key or a score; else they may be computed for scores
//                     that no row sees, without a branch
// All know the place, `at`, and read what the call has captured through the struct.
//
// What a mask function (mask_function.cuh) reads once for a head, a row or a key are parts of the same kind, behind the score's: they are
// MASK_OF_HEAD, MASK_HEAD_LINES and so on. Of keys and rows they are read where a mask is asked.
#pragma once
#include "params.cuh"
#ifndef SCORE
#define SCORE 0
#define SCORE_LOADS 0
#define SCORE_OF_HEAD
#define SCORE_HEAD_LINES
#define SCORE_LINES const float value = s, slope = 1.f;
#endif
#ifndef SCORE_ROW_LOADS
#define SCORE_ROW_LOADS 0
#define SCORE_OF_ROW
#define SCORE_ROW_LINES
#define SCORE_KEY_LOADS 0
#define SCORE_OF_KEY
#define SCORE_KEY_LINES
#endif
#ifndef MASK_OF_HEAD
#define MASK_OF_HEAD
#define MASK_HEAD_LINES
#endif
#ifndef MASK_ROW_LOADS
#define MASK_ROW_LOADS 0
#define MASK_OF_ROW
#define MASK_ROW_LINES
#define MASK_KEY_LOADS 0
#define MASK_OF_KEY
#define MASK_KEY_LINES
#endif
#define ROW_LOADS (SCORE_ROW_LOADS + MASK_ROW_LOADS)
#define KEY_LOADS (SCORE_KEY_LOADS + MASK_KEY_LOADS)
#define OF_HEAD (sizeof(PartOfHead) > 1)  // whether anything is read for a head

struct PartOfHead {
  SCORE_OF_HEAD MASK_OF_HEAD
};
struct PartOfRow {
  SCORE_OF_ROW MASK_OF_ROW
};
struct PartOfKey {
  SCORE_OF_KEY MASK_OF_KEY
};

// Which score it is, and how many queries and keys its head has
struct ScoreAt {
  int batch, head, row, key, queries, keys;
};

// What is one for all scores of a head
__device__ __forceinline__ PartOfHead read_of_head(const Params& p, const ScoreAt& at) {
  PartOfHead of_head = {};
  SCORE_HEAD_LINES
  MASK_HEAD_LINES
  return of_head;
}

// The same: one thread reads it for the block, through `scratch` in shared memory, which is free again
// when this returns.
__device__ __forceinline__ PartOfHead score_of_head(const Params& p, int batch, int head, int queries, int keys, void* scratch) {
  PartOfHead of_head = {};
  if constexpr (OF_HEAD) {
    PartOfHead* shared = static_cast<PartOfHead*>(scratch);
    if (threadIdx.x == 0) *shared = read_of_head(p, {batch, head, 0, 0, queries, keys});
    __syncthreads();
    of_head = *shared;
    __syncthreads();
  }
  return of_head;
}

// The same where the lanes of a warp have rows of several heads, HEADS from that of `at` on: the first lanes read it, of a head each, and
// each lane gets that of its own.
template <int HEADS> __device__ __forceinline__ PartOfHead score_of_heads(const Params& p, ScoreAt at, int own) {
  PartOfHead of_head = {};
  if constexpr (OF_HEAD) {
    const int lane = threadIdx.x % 32;
    at.head += lane;
    if (lane < HEADS) of_head = read_of_head(p, at);
    int* words = reinterpret_cast<int*>(&of_head);
#pragma unroll
    for (int word = 0; word < sizeof(PartOfHead) / sizeof(int); word++) words[word] = __shfl_sync(~0u, words[word], own);
  }
  return of_head;
}

struct Scored {
  float value, slope;
};
__device__ __forceinline__ Scored score_of(const Params& p, const PartOfHead& of_head, const PartOfRow& of_row,
                                           const PartOfKey& of_key, float s, const ScoreAt& at) {
  SCORE_LINES
  return {value, slope};
}

// The gradient of the score that a function is given, from that of what it makes of it, or P from P, by which that is multiplied. Of 0
// it is 0, whatever the slope: what is masked may have an infinite one.
__device__ __forceinline__ float of_given_score(float gradient, float slope) { return gradient == 0.f ? 0.f : gradient * slope; }
template <int N> __device__ __forceinline__ void of_given_scores(float (&gradients)[N][4], const float (&slopes)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) gradients[n][e] = of_given_score(gradients[n][e], slopes[n][e]);
}
