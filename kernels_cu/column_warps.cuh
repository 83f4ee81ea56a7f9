// Where O has more columns than a warp's registers hold, COL_WARPS warps, 1 or 2, share their rows. Each has every second piece of the
// columns: of Q and K, so that S is the sum of what both make, and of V and O. Each product is made once.
// Constants: COL_WARPS; ROW_WARPS, warps that have rows of their own; M and N, tensor core tiles of a warp's rows of S.
#pragma once
#include "column_parts.cuh"

// Which of those that share its rows a warp is, and which rows
__device__ __forceinline__ int col_warp() { return COL_WARPS == 1 ? 0 : threadIdx.x / 32 / ROW_WARPS; }
template <class T> __device__ __forceinline__ T row_warp_of(T warp) { return COL_WARPS == 1 ? warp : warp % ROW_WARPS; }

// The warps that share rows meet, and no others.
__device__ __forceinline__ void meet_partner() {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + row_warp_of(threadIdx.x / 32)), "n"(32 * COL_WARPS) : "memory");
}

// S of all columns of Q and K from a warp's and its partner's: each adds up half of the keys, does `finish` with that (what is read of a
// mask is read once), and gets the other half from its partner. `meanwhile` is done before it is waited for; if it IS_BARRIER, that does.
//   room: of the pair (M x N x 32 float4), finish(half (M x N / 2 x 4))
template <bool IS_BARRIER, class Meanwhile, class Finish>
__device__ __forceinline__ void add_partner(float (&S)[M][N][4], float4* room, Meanwhile meanwhile, Finish finish) {
  const bool second = col_warp();
  float4* own = room + (second ? M * (N / 2) * 32 : 0) + threadIdx.x % 32;  // the sums' half; a lane reads what it writes next
  float4* others = room + (second ? 0 : M * (N / 2) * 32) + threadIdx.x % 32;
  float half[M][N / 2][4];
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N / 2; n++) {
      const float(&first)[4] = S[m][n], (&last)[4] = S[m][N / 2 + n];
      others[(m * (N / 2) + n) * 32] = second ? make_float4(first[0], first[1], first[2], first[3])
                                            : make_float4(last[0], last[1], last[2], last[3]);
#pragma unroll
      for (int e = 0; e < 4; e++) half[m][n][e] = second ? last[e] : first[e];
    }
  meanwhile();
  if constexpr (!IS_BARRIER) meet_partner();
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N / 2; n++) {
      const float4 part = own[(m * (N / 2) + n) * 32];
      half[m][n][0] += part.x, half[m][n][1] += part.y, half[m][n][2] += part.z, half[m][n][3] += part.w;
    }
  finish(half);
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N / 2; n++)
      own[(m * (N / 2) + n) * 32] = make_float4(half[m][n][0], half[m][n][1], half[m][n][2], half[m][n][3]);
  meet_partner();
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N / 2; n++) {
      const float4 got = others[(m * (N / 2) + n) * 32];
      const float other[4] = {got.x, got.y, got.z, got.w};
#pragma unroll
      for (int e = 0; e < 4; e++) {
        S[m][n][e] = second ? other[e] : half[m][n][e];
        S[m][N / 2 + n][e] = second ? half[m][n][e] : other[e];
      }
    }
}

// The first warp's value, lane by lane, for its partner, too. Where the first writes, only it has read since the partner wrote.
__device__ __forceinline__ float of_first(float4* room, float value) {
  float4* at = room + M * (N / 2) * 32 + threadIdx.x % 32;
  if (!col_warp()) at->x = value;
  meet_partner();
  return at->x;
}
