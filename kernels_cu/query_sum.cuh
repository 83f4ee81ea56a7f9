// dQ's sum over the column blocks, in float32 in HBM, in the order in which a warp has it in its accumulators (mma.cuh): pieces of 8
// rows x 16 columns. Of each row of a piece lane t of four has columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. What a warp adds at once
// are neighbours: whole lines of 128 bytes, where rows as they are would be eight parts of lines. Rows are those of a head, rounded up to 8,
// columns d, rounded up to 16; rows that do not exist are not touched.
// Constants: HEAD_DIM (d of Q and K), and those of tile_copy.cuh.
#pragma once
#include "tile_copy.cuh"

constexpr int SUM_TILES = D_PAD / 16, SUM_PIECE = 8 * 16;  // pieces side by side, floats of one
// Floats that one addition adds
#if __CUDA_ARCH__ >= 900
constexpr int ADDED = 4;
#else
constexpr int ADDED = 1;
#endif

__device__ __forceinline__ long long sums_of_a_head(int rows) {
  return static_cast<long long>((rows + 7) / 8) * (SUM_TILES * SUM_PIECE);
}

// Where the first of 16 columns of a row has its sum, or those of lane t of four begin; `head` counts those of all batches, of `rows`
// rows each. 8 rows below are SUM_TILES pieces on.
__device__ __forceinline__ float* sums_of(float* dQ_acc, long long head, int rows, long long row, int tile, int t = 0) {
  return dQ_acc + head * sums_of_a_head(rows) + (row / 8 * SUM_TILES + tile) * SUM_PIECE + (row % 8 * 4 + t) * ADDED;
}

// Adds to a lane's four columns of a row.
__device__ __forceinline__ void add_to_sums(float* sums, float a, float b, float c, float d) {
  const size_t at = __cvta_generic_to_global(sums);
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
#else
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(at), "f"(a) : "memory");
  asm volatile("red.global.add.f32 [%0+128], %1;" ::"l"(at), "f"(b) : "memory");
  asm volatile("red.global.add.f32 [%0+256], %1;" ::"l"(at), "f"(c) : "memory");
  asm volatile("red.global.add.f32 [%0+384], %1;" ::"l"(at), "f"(d) : "memory");
#endif
}

// Four neighbours of a row's 16 sums, which are columns column_of_sum(k, 0) to (k, 3)
__device__ __forceinline__ float4* four_sums(float* sums, int k) {
  return reinterpret_cast<float4*>(sums + (ADDED == 4 ? 4 : 32) * k);
}
__device__ constexpr int column_of_sum(int k, int n) {
  const int t = ADDED == 4 ? k : n, own = ADDED == 4 ? n : k;
  return own / 2 * 8 + 2 * t + own % 2;
}
