// The states of a mask's tiles, before all kernels that skip those that are empty. One thread block a tile: it asks the mask for each
// score once. What a condition loads that is one for a head, a row or a column it loads once a tile, or a row, or column, of the tile.
//
// Constants: MASK and what a condition is (mask_function.cuh); BR, BC, rows and columns of a tile; TILES, the struct's field; VARLEN
// where batches are packed sequences: the tiles of row blocks are then one behind the other, as block_mask.cuh has them.
#define SPARSE 0
#ifndef VARLEN
#define VARLEN 0
#endif
#include "block_mask.cuh"
#include "mask_function.cuh"
#include "score_parts.cuh"
#include "sequence.cuh"

constexpr int THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
mask_tiles(__grid_constant__ const Params given) {
  const Params p = given;
  __shared__ PartOfHead room;
  __shared__ PartOfRow of_rows[BR];
  __shared__ PartOfKey of_columns[BC];
  const int heads = p.TILES.head ? p.heads : 1, Tc = (p.Nk + BC - 1) / BC;
  const int Tr = VARLEN ? gridDim.x / Tc / heads : (p.Nq + BR - 1) / BR;  // of all sequences together
  const int j = blockIdx.x % Tc, row_block = blockIdx.x / Tc % Tr, plane = blockIdx.x / Tc / Tr;
  int batch = plane / heads, i = row_block, Nq = p.Nq, Nk = p.Nk;
  const int head = plane % heads;
  if constexpr (VARLEN) {
    __shared__ int bounds[5];
    const Sequence sequence = find_sequence<BR>(p, p.cu_seqlens_q, row_block, bounds);
    batch = sequence.number, i = sequence.block, Nq = sequence.queries, Nk = sequence.keys;
    if (i * BR >= Nq || j * BC >= Nk) return;
  }
  const int row0 = i * BR, col0 = j * BC, rows = min(BR, Nq - row0), cols = min(BC, Nk - col0);
  const PartOfHead of_head = score_of_head(p, batch, head, Nq, Nk, &room);
  if constexpr (MASK == 2) {
    for (int r = threadIdx.x; r < rows; r += THREADS) of_rows[r] = read_of_row(p, of_head, {batch, head, row0 + r, 0, Nq, Nk}, true);
    for (int c = threadIdx.x; c < cols; c += THREADS) of_columns[c] = read_of_key(p, of_head, {batch, head, 0, col0 + c, Nq, Nk}, true);
    __syncthreads();
  }

  bool some = false, all = true;
#pragma unroll 4
  for (int n = threadIdx.x; n < rows * BC; n += THREADS) {
    const int r = n / BC, c = n % BC;
    if (c >= cols) continue;
    bool seen;
    if constexpr (MASK == 2) {
      seen = mask_holds(p, of_head, of_rows[r], of_columns[c], {batch, head, row0 + r, col0 + c, Nq, Nk});
    } else {
      seen = p.mask.of(batch, head)[(row0 + r) * p.mask.row + (col0 + c) * p.mask.col];
    }
    some |= seen;
    all &= seen;
  }
  some = __syncthreads_or(some);
  all = __syncthreads_and(all);
  if (threadIdx.x == 0)
    p.TILES.of(VARLEN ? 0 : batch, head)[row_block * p.TILES.row + j * p.TILES.col] = !some ? EMPTY : all ? WHOLE : MIXED;
}
