// Standard attention's products, whose factors and results all lie in HBM: a tile of A B^T a thread block, and 16 rows of A B a
// warp. Tiles of SRAM are laid out as in tile_copy.cuh, sums in registers as in warp_product.cuh.
// Constants: BR, BC (rows and columns of a tile), SUB (columns of A B^T, or depth of A B, in registers at a time; divides BC, and
// TILE), COPY_BYTES, ELEMENT (element.cuh).
#pragma once
#include "element.cuh"
#include "row_pair.cuh"
#include "tile_copy.cuh"
#include "warp_product.cuh"

constexpr int THREADS = BR / 16 * 32;  // a warp for every 16 rows of a tile

// Which BR x BC tile of which query head a thread block of a product A B^T has
struct Place {
  int batch, head, i, j, rows, cols;  // rows and columns that there are
  long long pair;

  __device__ Place(int Nq, int Nk, int heads) {
    const int Tr = (Nq + BR - 1) / BR, Tc = (Nk + BC - 1) / BC;
    j = blockIdx.x % Tc, i = blockIdx.x / Tc % Tr;
    pair = blockIdx.x / Tc / Tr;
    batch = pair / heads, head = pair % heads;
    rows = min(BR, Nq - i * BR), cols = min(BC, Nk - j * BC);
  }
};

// A tile of A B^T by THREADS threads. finish(C_regs, row, col) makes of (16 x SUB) of it what is stored: this thread's rows are
// `row` and row + 8, the columns begin at `col`. No barrier is before the copies: `sram` must be free.
//   A_gmem (rows x WIDTH), B_gmem (keys x WIDTH) -> out (rows x cols); rows of B from `keys` on are not read: they are 0
template <int WIDTH, class Finish>
__device__ __forceinline__ void tile_product(unsigned char* sram, const Element* A_gmem, long long A_row, const Element* B_gmem,
                                             long long B_row, int rows, int cols, int keys, Element* out, long long out_row,
                                             Finish finish) {
  constexpr int ROW = row_elements(WIDTH);
  Element* A_smem = reinterpret_cast<Element*>(sram);  // (BR x ROW)
  Element* B_smem = A_smem + BR * ROW;                 // (BC x ROW)
  copy_tile<WIDTH>(A_smem, A_gmem, A_row, BR, rows, threadIdx.x, THREADS);
  copy_tile<WIDTH>(B_smem, B_gmem, B_row, (cols + SUB - 1) / SUB * SUB, keys, threadIdx.x, THREADS);
  wait_for_copies();
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int first = 0; first < cols; first += SUB) {
    float C_regs[SUB / 8][4];  // (16 x SUB)
    scores<WIDTH>(C_regs, A_smem + warp * 16 * ROW, B_smem + first * ROW);
    finish(C_regs, warp * 16 + g, first);
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int n = 0; n < SUB / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int row = warp * 16 + g + 8 * h, col = first + 8 * n + 2 * t + e;
          if (row < rows && col < cols) out[row * out_row + col] = from_float<Element>(C_regs[n][2 * h + e]);
        }
  }
}

// sum += A B for the 16 rows of this warp, from `row0` on, by a block of `threads`; TILE rows of B at a time are in B_smem.
//   A (rows x depth), element (row, k) at A[row * A_row + k * A_col]; B (depth x WIDTH), whose rows from `valid` on, depth at most,
//   are not read: they are 0; sum_regs (16 x padded(WIDTH))
template <int WIDTH, int TILE>
__device__ __forceinline__ void add_tiled_product(float (&sum_regs)[padded(WIDTH) / 8][4], Element* B_smem, const Element* A,
                                                  long long A_row, long long A_col, int row0, int rows, int depth,
                                                  const Element* B, long long B_row, int valid, int threads) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int first = 0; first < depth; first += TILE) {
    const int extent = min(TILE, depth - first);
    __syncthreads();  // every warp is done with the tile before
    copy_tile<WIDTH>(B_smem, B + first * B_row, B_row, (extent + SUB - 1) / SUB * SUB, valid - first, threadIdx.x, threads);
    wait_for_copies();
    __syncthreads();
    for (int k = 0; k < extent; k += SUB) {
      float A_regs[SUB / 8][4];  // (16 x SUB)
#pragma unroll
      for (int n = 0; n < SUB / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int row = row0 + g + e / 2 * 8, at = first + k + 8 * n + 2 * t + e % 2;
          A_regs[n][e] = row < rows && at < depth ? to_float(A[row * A_row + at * A_col]) : 0.f;
        }
      add_weighted_values<row_elements(WIDTH)>(sum_regs, A_regs, B_smem + k * row_elements(WIDTH));
    }
  }
}

// Stores `factor` times the 16 rows of this warp, from `row0` on, in out (rows x WIDTH).
template <int WIDTH>
__device__ __forceinline__ void store_product(Element* out, long long out_row, int row0, int rows,
                                              const float (&sum_regs)[padded(WIDTH) / 8][4], float factor) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = row0 + g + 8 * h;
    if (row >= rows) continue;
#pragma unroll
    for (int n = 0; n < padded(WIDTH) / 8; n++)
      store_row_pair<WIDTH>(out + row * out_row, 8 * n + 2 * t, factor * sum_regs[n][2 * h], factor * sum_regs[n][2 * h + 1]);
  }
}
