// What the weights of a row are relative to in a backward pass, which makes P again. float32 rounds L, and P = exp(S - L) is off by that:
// by a unit of L where P has none. In float32 each row therefore goes through the keys once more, for the m and l that the paper's
// Algorithm 4 has. Half types do where L is so large that their digits would notice; where no row is, they read L and are done.
// One thread block a row block of Q.
//
// Constants, all from the tile schedule:
//   ELEMENT     __half, __nv_bfloat16 or float       HEAD_DIM, VALUE_DIM  d of Q and K, of V
//   BR, BC      rows of a Q block, of a K block      COPY_BYTES width of a copy
//   CAUSAL, WINDOW, MASK, BIAS, SCORE, PADDED, SPARSE, TILES, SINKS  mask.cuh, mask_function.cuh, score.cuh, block_mask.cuh, sinks.cuh
//   KEPT_ROWS, KEPT_COLS  row blocks and column blocks that share an element of the block mask
//   VARLEN      whether batches are sequences of their own lengths, packed one behind the other: sequence.cuh
#define SUB BC
constexpr int SCARCE = 2;  // of half types seldom run: as little code as may be
#include "block_mask.cuh"
#include "element.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "row_products.cuh"
#include "sequence.cuh"
#include "sinks.cuh"
#include "weight.cuh"

constexpr int WARPS = BR / 16, THREADS = 32 * WARPS, N = BC / 8;
// L may have been merged from parts of the keys, each time rounded, or come from scores that were summed in another order. What it
// differs by from our own m + log(l), beyond this part of the largest score or of either, are keys that are not here.
constexpr float ROUNDED = 1.f / (1 << 20);

typedef SwizzledTile<HEAD_DIM> KeyTile;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
row_bases(__grid_constant__ const Params given) {
  const Params p = given;
  extern __shared__ __align__(128) unsigned char sram[];
  Element* Q_smem = reinterpret_cast<Element*>(sram);  // (BR x d)
  Element* K_smem = Q_smem + BR * KeyTile::PAD;        // (BC x d)
  unsigned* kept = reinterpret_cast<unsigned*>(K_smem + BC * KeyTile::PAD);

  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const RowBlock place = find_row_block<BR>(p, sram);
  if (!place.exists) return;
  const int Nq = place.Nq, row_block = place.i * BR, rows = min(BR, Nq - row_block);
  const long long row0 = place.L_row + row_block;
  if constexpr (!EXACT) {
    bool large = false;
    for (int r = threadIdx.x; r < rows; r += THREADS) large |= is_large(p.L[row0 + r]);
    if (!__syncthreads_or(large)) return;
  }

  const int keys = count_keys(p, place.batch, place.Nk, sram);
  Masks masks = masks_of(p, place.batch, place.head, Nq, place.Nk, keys);
  masks.batch = place.sequence;
  masks.of_head = score_of_head(p, place.sequence, place.head, Nq, place.Nk, sram);
  const int first_key = visible_begin(masks, row_block), end_key = visible_end(masks, row_block + rows - 1);
  const Blocks blocks = {first_key / BC, first_key < end_key ? (end_key + BC - 1) / BC : 0, kept};
  if constexpr (SKIPS) {
    const BlockMask keep = block_mask_of(p, place.batch, place.head, place.first_block<BR>());
    read_block_mask<KEPT_ROWS, KEPT_COLS>(kept, keep, place.i, blocks.begin, blocks.end, warp, WARPS);
    __syncthreads();
  }
  int j = blocks.below(blocks.end);
  if (j >= blocks.begin) KeyTile::load<BR, THREADS, false>(Q_smem, place.query(p.Q, row_block), p.Q.row, rows, threadIdx.x);
  const Element* K = place.keys(p.K);

  // The largest S factor is that of the largest S sign, where S is not scaled as it is.
  const float factor = SCALED ? 1.f : p.scale * UNIT, sign = factor < 0.f ? -1.f : 1.f, size = sign * factor;
  const QueryRows<KeyTile, 1, false> Q_rows = {Q_smem + warp * 16 * KeyTile::PAD};
  float m[2] = {NEG_INF, NEG_INF}, l[2] = {};  // of rows g and g + 8, for the columns of this lane
  float largest[2] = {};                       // |S| of all keys that come by, seen or not: sums of that size round off as much
  for (; j >= blocks.begin; j = blocks.below(j)) {
    KeyTile::load<BC, THREADS, false>(K_smem, K + static_cast<long long>(j) * BC * p.K.row, p.K.row, keys - j * BC, threadIdx.x);
    close_group();
    wait_for_groups<0>();
    __syncthreads();
    float S[1][N][4];
    scores(S, Q_rows, K_smem);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) largest[e / 2] = fmaxf(largest[e / 2], fabsf(S[0][n][e]));
    scale_and_mask(S[0], SCALED ? p.scale * UNIT : sign, UNIT, masks, row_block + warp * 16 + g, j * BC, Nq, MASK && blocks.asks(j));
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float m_new = m[h];
#pragma unroll
      for (int n = 0; n < N; n++) m_new = fmaxf(m_new, fmaxf(S[0][n][2 * h], S[0][n][2 * h + 1]));
      if (m_new == NEG_INF) continue;  // nothing is seen
      float sum = 0.f;  // of this block by itself: a few roundings of the long sum
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; e++) sum += S[0][n][e] == NEG_INF ? 0.f : weight_of((S[0][n][e] - m_new) * size);
      l[h] = m[h] == NEG_INF ? sum : fmaf(l[h], weight_of((m[h] - m_new) * size), sum);
      m[h] = m_new;
    }
    __syncthreads();  // all are done with K_j
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = warp * 16 + g + 8 * h;
    const bool own_row = t == 0 && row < rows;
    const float m_all = row_max(m[h]), S_all = fabsf(p.scale * UNIT) * row_max(largest[h]), sink = sink_of(p, place.head, own_row);
    float l_all = row_sum(m[h] == NEG_INF ? 0.f : l[h] * weight_of((m[h] - m_all) * size));
    if (!own_row) continue;
    const float L = p.L[row0 + row];
    if (!EXACT && !is_large(L)) continue;
    if (m_all == NEG_INF || L == NEG_INF) {  // no weight is anything
      p.bases[row0 + row] = {0.f, -NEG_INF};
      continue;
    }
    if constexpr (SINKS) l_all += weight_of(fmaf(-m_all, size, sink * UNIT));
    const float log_sum = fmaf(-m_all, size, L * UNIT), own = UNIT == 1.f ? logf(l_all) : log2f(l_all);
    const bool others = fabsf(log_sum - own) > fmaxf(S_all, fmaxf(fabsf(L * UNIT), fabsf(m_all * size))) * ROUNDED;
    p.bases[row0 + row] = {sign * m_all, others ? log_sum : own};
  }
}
