// Whether a row sees a key, for all that position says: MASK is 1 for a boolean array, 2 for a condition, generated from its expression
// (cupyflash/expressions/):
//   MASK_LINES  statements that make `value` of the place, `at`, and of what was read for the head, the row and the key (score.cuh)
#pragma once
#include "params.cuh"
#include "score.cuh"
#if MASK != 2
#define MASK_LINES const bool value = true;
#endif

// What the condition says of a score
__device__ __forceinline__ bool mask_holds(const Params& p, const PartOfHead& of_head, const PartOfRow& of_row, const PartOfKey& of_key,
                                           const ScoreAt& at) {
  MASK_LINES
  return value;
}
