// Standard attention's products, whose factors and results all lie in HBM: a tile of A B^T a thread block, and 16 rows of A B a
// warp. Tiles of SRAM are laid out as in tile_copy.cuh, sums in registers as in warp_product.cuh.
// Constants: BR, BC (rows and columns of a tile), SUB (columns of A B^T, or depth of A B, in registers at a time; divides BC, and
// TILE), COPY_BYTES, ELEMENT (element.cuh).
#pragma once
#include "element.cuh"
#include "params.cuh"
#include "row_pair.cuh"
#include "tile_copy.cuh"
#include "warp_product.cuh"

constexpr int THREADS = BR / 16 * 32;  // a warp for every 16 rows of a tile

// Which BR x BC tile of which query head a thread block of a product A B^T has
struct Place {
  int batch, head, kv_head, i, j, rows, cols;  // rows and columns that there are
  long long row0, score;                       // its first row, among those of all heads, and its first score

  __device__ __forceinline__ Place(const Params& p) {
    const int Tr = (p.Nq + BR - 1) / BR, Tc = (p.Nk + BC - 1) / BC;
    j = blockIdx.x % Tc, i = blockIdx.x / Tc % Tr;
    const int pair = blockIdx.x / Tc / Tr;
    batch = pair / p.heads, head = pair % p.heads, kv_head = head / p.group;
    rows = min(BR, p.Nq - i * BR), cols = min(BC, p.Nk - j * BC);
    row0 = static_cast<long long>(pair) * p.Nq + i * BR;
    score = row0 * p.Nk + j * BC;
  }
  // Its rows of Q and what is like it, its columns' of K and V
  template <typename T> __device__ __forceinline__ Matrix<T> query(const Rows<T>& tensor) const {
    return tensor.matrix(batch, head).from(static_cast<long long>(i) * BR);
  }
  template <typename T> __device__ __forceinline__ Matrix<T> keys(const Rows<T>& tensor) const {
    return tensor.matrix(batch, kv_head).from(static_cast<long long>(j) * BC);
  }
};

// Which `size` rows of which head a thread block has of a product whose results are a head's rows of `length`
struct Band {
  int batch, head, row0;  // row0: the first of this warp's 16 rows
  long long pair;

  __device__ __forceinline__ Band(int length, int size, int heads) {
    const int blocks = (length + size - 1) / size;
    pair = blockIdx.x / blocks;
    batch = pair / heads, head = pair % heads;
    row0 = blockIdx.x % blocks * size + threadIdx.x / 32 * 16;
  }
};

// The tile of A B^T at a place, by THREADS threads. finish(C_regs, row, col) makes of (16 x SUB) of it what is stored: this thread's
// rows are `row` and row + 8, the columns begin at `col`. No barrier is before the copies: `sram` must be free.
//   A (rows x WIDTH), B (cols x WIDTH) -> out (rows x cols); rows of B behind a head's `keys` are not read: they are 0
template <int WIDTH, typename Out, class Finish>
__device__ __forceinline__ void tile_product(unsigned char* sram, Matrix<const Element> A, Matrix<const Element> B, const Place& place,
                                             int keys, Out* out, long long out_row, Finish finish) {
  const int rows = place.rows, cols = place.cols;
  constexpr int ROW = row_elements(WIDTH);
  Element* A_smem = reinterpret_cast<Element*>(sram);  // (BR x ROW)
  Element* B_smem = A_smem + BR * ROW;                 // (BC x ROW)
  copy_tile<WIDTH>(A_smem, A.at, A.row, BR, rows, threadIdx.x, THREADS);
  copy_tile<WIDTH>(B_smem, B.at, B.row, (cols + SUB - 1) / SUB * SUB, keys - place.j * BC, threadIdx.x, THREADS);
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
          if (row < rows && col < cols) out[row * out_row + col] = from_float<Out>(C_regs[n][2 * h + e]);
        }
  }
}

struct AsStored {
  __device__ __forceinline__ void operator()(float (&)[SUB / 8][4], int) const {}
};

// sum += A B for the 16 rows of this warp, from `row0` on, by a block of `threads`; TILE rows of B at a time are in B_smem.
// prepare(A_regs, col) may change what is taken of (16 x SUB) of A, whose columns begin at `col`.
//   A (rows x depth), element (row, k) at A[row * A_row + k * A_col]; B (depth x WIDTH), whose rows from `valid` on, depth at most,
//   are not read: they are 0; sum_regs (16 x padded(WIDTH))
template <int WIDTH, int TILE, class Prepare = AsStored>
__device__ __forceinline__ void add_tiled_product(float (&sum_regs)[padded(WIDTH) / 8][4], Element* B_smem, const Element* A,
                                                  long long A_row, long long A_col, int row0, int rows, int depth,
                                                  Matrix<const Element> B, int valid, int threads, Prepare prepare = {}) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int first = 0; first < depth; first += TILE) {
    const int extent = min(TILE, depth - first);
    __syncthreads();  // every warp is done with the tile before
    copy_tile<WIDTH>(B_smem, B.at + first * B.row, B.row, (extent + SUB - 1) / SUB * SUB, valid - first, threadIdx.x, threads);
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
      prepare(A_regs, first + k);
      add_weighted_values<row_elements(WIDTH)>(sum_regs, A_regs, B_smem + k * row_elements(WIDTH));
    }
  }
}

// Stores `factor` times the 16 rows of this warp, from `row0` on, in out (rows x WIDTH).
template <int WIDTH>
__device__ __forceinline__ void store_product(Matrix<Element> out, int row0, int rows,
                                              const float (&sum_regs)[padded(WIDTH) / 8][4], float factor) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = row0 + g + 8 * h;
    if (row >= rows) continue;
#pragma unroll
    for (int n = 0; n < padded(WIDTH) / 8; n++)
      store_row_pair<WIDTH>(out.at + row * out.row, 8 * n + 2 * t, factor * sum_regs[n][2 * h], factor * sum_regs[n][2 * h + 1]);
  }
}
