// What a kernel is given: one struct, by value. Its fields come from the tile schedule, which fills it (cupyflash/launch/params.py); a pointer
// is null where a call has no such array, strides are in elements, and 0 along what an array is broadcast.
// A kernel takes a copy of it first: what is read of the parameter itself is read again behind asm statements that may write to
// memory (fa1 at d 256 in float32: 91 loads of parameters in its PTX and spills, for 23 and none).
// Constants: PARAMS (the fields), PARAMS_AGREE (that they lie where Python has them).
#pragma once
#include "captured.cuh"
#include "element.cuh"
#include "tensor_map.cuh"

// Rows of d elements, of one head
template <typename T> struct Matrix {
  T* at;
  long long row;

  __device__ __forceinline__ Matrix from(long long first) const { return {at + first * row, row}; }
};

// Rows of d elements: (batch, head, row, d)
template <typename T> struct Rows {
  T* at;
  long long batch, head, row;

  __device__ __forceinline__ T* of(long long which_batch, long long which_head) const {
    return at + which_batch * batch + which_head * head;
  }
  __device__ __forceinline__ Matrix<T> matrix(long long which_batch, long long which_head) const {
    return {of(which_batch, which_head), row};
  }
};

// What has an element a score: (batch, head, row of Q, row of K)
template <typename T> struct Scores {
  T* at;
  long long batch, head, row, col;

  __device__ __forceinline__ T* of(long long which_batch, long long which_head) const {
    return at + which_batch * batch + which_head * head;
  }
};

struct Base;                    // weight.cuh
enum TileState : unsigned char;  // block_mask.cuh

struct Params {
  PARAMS
};
static_assert(PARAMS_AGREE, "C and Python lay the struct out differently");
