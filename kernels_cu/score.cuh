// The score function of a call, where SCORE is 1: SCORE_LINES, generated from its expression, make `value` of the scaled score `s` and
// of its place. They read what the call has captured through the struct.
#pragma once
#include "params.cuh"
#ifndef SCORE
#define SCORE 0
#endif

// Which score it is, and how many queries and keys its head has
struct ScoreAt {
  int batch, head, row, key, queries, keys;
};

__device__ __forceinline__ float score_of(const Params& p, float s, const ScoreAt& at) {
#if SCORE
  SCORE_LINES
  return value;
#else
  return s;
#endif
}
