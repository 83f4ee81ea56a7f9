// Whether a row sees a key, for all that position says: MASK is 1 for a boolean array, 2 for a condition, generated from its expression
// (cupyflash/expressions/):
//   MASK_LINES      statements that make `value` of the place, `at`
//   MASK_OF_ROW, MASK_OF_COLUMN        declarations of what is loaded once a row, or column, of a tile
//   MASK_ROW_LINES, MASK_COLUMN_LINES  statements that load it into `of_row` and `of_column`
#pragma once
#include "params.cuh"
#include "score.cuh"
#if MASK != 2
#define MASK_LINES const bool value = true;
#define MASK_OF_ROW
#define MASK_OF_COLUMN
#define MASK_ROW_LINES
#define MASK_COLUMN_LINES
#endif

struct MaskOfRow {
  MASK_OF_ROW
};
struct MaskOfColumn {
  MASK_OF_COLUMN
};

__device__ __forceinline__ MaskOfRow mask_of_row(const Params& p, const ScoreAt& at) {
  MaskOfRow of_row = {};
  MASK_ROW_LINES
  return of_row;
}
__device__ __forceinline__ MaskOfColumn mask_of_column(const Params& p, const ScoreAt& at) {
  MaskOfColumn of_column = {};
  MASK_COLUMN_LINES
  return of_column;
}

// What the condition says of a score
__device__ __forceinline__ bool mask_holds(const Params& p, const MaskOfRow& of_row, const MaskOfColumn& of_column, const ScoreAt& at) {
  MASK_LINES
  return value;
}
