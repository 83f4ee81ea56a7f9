// The states of a mask's tiles, before all kernels that skip those that are empty. One thread block a tile: it asks the mask for each
// score once. What a condition loads that is one for a row, or for a column, it loads once a row, or column, of the tile.
//
// Constants: MASK and what a condition is (mask_function.cuh); BR, BC, rows and columns of a tile; TILES, the struct's field.
#define SPARSE 0
#include "block_mask.cuh"
#include "mask_function.cuh"

constexpr int THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
mask_tiles(__grid_constant__ const Params given) {
  const Params p = given;
  __shared__ MaskOfRow of_rows[BR];
  __shared__ MaskOfColumn of_columns[BC];
  const int Tr = (p.Nq + BR - 1) / BR, Tc = (p.Nk + BC - 1) / BC;
  const int j = blockIdx.x % Tc, i = blockIdx.x / Tc % Tr, plane = blockIdx.x / Tc / Tr;
  const int heads = p.TILES.head ? p.heads : 1, batch = plane / heads, head = plane % heads;
  const int row0 = i * BR, col0 = j * BC, rows = min(BR, p.Nq - row0), cols = min(BC, p.Nk - col0);
  if constexpr (MASK == 2) {
    for (int r = threadIdx.x; r < rows; r += THREADS) of_rows[r] = mask_of_row(p, {batch, head, row0 + r, 0, p.Nq, p.Nk});
    for (int c = threadIdx.x; c < cols; c += THREADS) of_columns[c] = mask_of_column(p, {batch, head, 0, col0 + c, p.Nq, p.Nk});
    __syncthreads();
  }

  bool some = false, all = true;
#pragma unroll 4
  for (int n = threadIdx.x; n < rows * BC; n += THREADS) {
    const int r = n / BC, c = n % BC;
    if (c >= cols) continue;
    bool seen;
    if constexpr (MASK == 2) {
      seen = mask_holds(p, of_rows[r], of_columns[c], {batch, head, row0 + r, col0 + c, p.Nq, p.Nk});
    } else {
      seen = p.mask.of(batch, head)[(row0 + r) * p.mask.row + (col0 + c) * p.mask.col];
    }
    some |= seen;
    all &= seen;
  }
  some = __syncthreads_or(some);
  all = __syncthreads_and(all);
  if (threadIdx.x == 0) p.TILES.of(batch, head)[i * p.TILES.row + j * p.TILES.col] = !some ? EMPTY : all ? WHOLE : MIXED;
}
