// What FlashAttention-2's backward does for each row: before all else D = rowsum(dO * O), dQ's sum = 0 and the gradient of a sink, and
// at the end dQ in its own type.
// Constants: HEAD_DIM, VALUE_DIM, COPY_BYTES, WITH_DQ, SINKS (fa2_backward.cu), ORDERED (fa3_backward.cu).
#pragma once
#include "element.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "query_sum.cuh"
#include "row_piece.cuh"
#include "weight.cuh"

// The first kernel gives a row to so many lanes, a piece each at a time.
__device__ constexpr int lanes_for(int pieces, int lanes = 1) {
  return lanes >= pieces || lanes == 32 ? lanes : lanes_for(pieces, 2 * lanes);
}
constexpr int ROW_LANES = lanes_for((HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM) / PIECE), ROW_THREADS = 128, ROWS = ROW_THREADS / ROW_LANES;

// Which row of which head a thread of the first kernel has
struct RowPlace {
  int pair, batch, head, row;
  long long at;  // in L and D
  __device__ __forceinline__ RowPlace(int total_q, int heads) {
    const int blocks = (total_q + ROWS - 1) / ROWS;
    pair = blockIdx.x / blocks;
    batch = pair / heads;
    head = pair % heads;
    row = blockIdx.x % blocks * ROWS + threadIdx.x / ROW_LANES;
    at = static_cast<long long>(pair) * total_q + row;
  }
  template <typename T> __device__ __forceinline__ T* of(const Rows<T>& tensor) const {
    return tensor.of(batch, head) + row * tensor.row;
  }
};

// D = rowsum(dO * O) of every row, and dQ_acc = 0
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
fa2_backward_rows(__grid_constant__ const Params given) {
  const Params p = given;
  const RowPlace place(p.total_q, p.heads);
  const int first = threadIdx.x % ROW_LANES * PIECE;
  float sum = 0.f;
  if (place.row < p.total_q) {
    const Element *O = place.of(p.O), *dO = place.of(p.dO);
    for (int col = first; col < VALUE_DIM; col += ROW_LANES * PIECE) {
      float o[PIECE], g[PIECE];
      load_piece(o, O + col);
      load_piece(g, dO + col);
#pragma unroll
      for (int c = 0; c < PIECE; c++) sum = fmaf(o[c], g[c], sum);
    }
    if constexpr (WITH_DQ) {
      for (int tile = threadIdx.x % ROW_LANES; tile < SUM_TILES; tile += ROW_LANES)
#pragma unroll
        for (int k = 0; k < 4; k++)
          *four_sums(sums_of(p.dQ_acc, place.pair, p.total_q, place.row, tile), k) = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
#pragma unroll
  for (int other = ROW_LANES / 2; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  if (first == 0 && place.row < p.total_q) p.D[place.at] = sum;
#if ORDERED
  if (first == 0 && place.row < p.total_q) p.turns[place.at] = 0;
#endif
  if (SINKS && first == 0 && place.row < p.total_q)
    p.dsinks[place.at] = -sum * sink_weight(p.sinks[place.head], given_of_rows(p)[place.at], SCALED ? 1.f : p.scale);
}

// dQ = scale dQ_acc: a thread takes 16 columns of a row.
constexpr int FINISH_THREADS = ROW_THREADS < 8 * SUM_TILES ? 2 * ROW_THREADS : ROW_THREADS;
constexpr int PIECES_OF_SUMS = FINISH_THREADS / 8 / SUM_TILES;  // one below the other, of a thread block

extern "C" __global__ void __launch_bounds__(FINISH_THREADS)
fa2_backward_finish(__grid_constant__ const Params given) {
  const Params p = given;
  const int blocks = ((p.total_q + 7) / 8 + PIECES_OF_SUMS - 1) / PIECES_OF_SUMS, pair = blockIdx.x / blocks;
  // Of a single piece, too, all columns are read, as they are of several: what a compiler knows to be padding it would leave out.
  const int tile = SUM_TILES > 1 ? threadIdx.x / 8 % SUM_TILES : unknown(0), below = threadIdx.x / 8 / SUM_TILES;
  const int row = (blockIdx.x % blocks * PIECES_OF_SUMS + below) * 8 + threadIdx.x % 8;
  if (below >= PIECES_OF_SUMS || row >= p.total_q) return;
  float* sums = sums_of(p.dQ_acc, pair, p.total_q, row, tile);
  float dQ_regs[16];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const float4 four = *four_sums(sums, k);
    dQ_regs[column_of_sum(k, 0)] = four.x;
    dQ_regs[column_of_sum(k, 1)] = four.y;
    dQ_regs[column_of_sum(k, 2)] = four.z;
    dQ_regs[column_of_sum(k, 3)] = four.w;
  }
  Element* dQ = p.dQ.of(pair / p.heads, pair % p.heads) + row * p.dQ.row + 16 * tile;
#pragma unroll
  for (int col = 0; col < 16; col += PIECE) {
    float piece[PIECE];
#pragma unroll
    for (int c = 0; c < PIECE; c++) piece[c] = p.scale * dQ_regs[col + c];
    if (16 * tile + col < HEAD_DIM) store_piece(dQ + col, piece);
  }
}
