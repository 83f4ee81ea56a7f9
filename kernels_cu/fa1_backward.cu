// FlashAttention, Algorithm 4 (arXiv 2205.14135, appendix B.4): backward, one thread block a (batch, key head).
//
// K/V blocks are the outer loop, Q blocks the inner, of each query head that shares the key head: dK~_j and dV~_j stay on chip,
// dQ lives in HBM and is read and written at each visit. dQ is float32 there until the last visit of its row block, which
// writes it in its own type: for float inputs that is one array, else dQ_acc and dQ. For half types L stands for l and m, one float
// a row: diag(l)^-1 exp(S - m) = exp(S - L); float inputs have m and log(l), which row_bases.cu finds before.
// Products are of S^T = K_j Q_i^T, 16 keys a warp at a time, so that P^T and dS^T lie in registers as dV~ += P^T dO and
// dK~ += dS^T Q want them. A sum of dK~ or dV~ belongs to one thread for good, and so does an element of dQ: no atomics, and
// the same bits each time.
//
// Constants, all from the tile schedule:
//   ELEMENT     __half, __nv_bfloat16 or float       HEAD_DIM, VALUE_DIM  d of Q and K, of V and O
//   BR, BC      rows of a Q block, of a K/V block    SUB         queries of S^T held at a time; divides BR
//   COPY_BYTES  width of a copy
//   CAUSAL, WINDOW, MASK, BIAS, SCORE, PADDED, SPARSE, DROPOUT  mask.cuh, mask_function.cuh, score.cuh, block_mask.cuh, dropout.cuh
#include "block_mask.cuh"
#include "dropout.cuh"
#include "element.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "row_pair.cuh"
#include "tile_copy.cuh"
#include "warp_product.cuh"
#include "weight.cuh"

constexpr int WARPS = BR / 16, THREADS = 32 * WARPS;  // a warp for every 16 rows of a Q block, and for every so many 16 keys
constexpr int DS_ROW = row_elements(BR);
// Four of 16 x 16 sums are a lane's, neighbours in shared memory: nobody else reads them.
constexpr int PIECE = 16 * 16;

// sums += A B:  A_regs (16 x SUB), B_smem (SUB x WIDTH, padded); sums_smem (16 x WIDTH, padded), a piece of 16 columns at a time
template <int WIDTH>
__device__ __forceinline__ void add_to_sums(float* sums_smem, const float (&A_regs)[SUB / 8][4], const Element* B_smem) {
#pragma unroll 1
  for (int piece = 0; piece < padded(WIDTH) / 16; piece++) {
    float4* sums = reinterpret_cast<float4*>(sums_smem + piece * PIECE) + threadIdx.x % 32;
    float C_regs[2][4];  // (16 x 16)
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float4 sum = sums[32 * n];
      C_regs[n][0] = sum.x, C_regs[n][1] = sum.y, C_regs[n][2] = sum.z, C_regs[n][3] = sum.w;
    }
    add_weighted_values<row_elements(WIDTH)>(C_regs, A_regs, B_smem + 16 * piece);
#pragma unroll
    for (int n = 0; n < 2; n++) sums[32 * n] = make_float4(C_regs[n][0], C_regs[n][1], C_regs[n][2], C_regs[n][3]);
  }
}

template <int WIDTH> __device__ __forceinline__ void clear_sums(float* sums_smem) {
  for (int n = 0; n < padded(WIDTH) / 8; n++)
    reinterpret_cast<float4*>(sums_smem)[32 * n + threadIdx.x % 32] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// Writes `rows` of 16 rows of sums, times `factor`, to a gradient.
template <int WIDTH>
__device__ __forceinline__ void store_sums(Element* gradient, long long gradient_row, const float* sums_smem, int rows,
                                           float factor) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int n = 0; n < padded(WIDTH) / 8; n++) {
    const float4 sum = reinterpret_cast<const float4*>(sums_smem)[32 * n + lane];
    if (g < rows) store_row_pair<WIDTH>(gradient + g * gradient_row, 8 * n + 2 * t, factor * sum.x, factor * sum.y);
    if (g + 8 < rows) store_row_pair<WIDTH>(gradient + (g + 8) * gradient_row, 8 * n + 2 * t, factor * sum.z, factor * sum.w);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fa1_backward(__grid_constant__ const Params given) {
  const Params p = given;
  extern __shared__ __align__(16) unsigned char sram[];
  float* dK_smem = reinterpret_cast<float*>(sram);                    // (BC x D_PAD), in pieces
  float* dV_smem = dK_smem + BC * D_PAD;                              // (BC x DV_PAD), in pieces
  Element* K_smem = reinterpret_cast<Element*>(dV_smem + BC * DV_PAD);  // (BC x D_ROW)
  Element* V_smem = K_smem + BC * D_ROW;                              // (BC x DV_ROW)
  Element* Q_smem = V_smem + BC * DV_ROW;                             // (BR x D_ROW)
  Element* dO_smem = Q_smem + BR * D_ROW;                             // (BR x DV_ROW)
  Element* dS_smem = dO_smem + BR * DV_ROW;                           // (BC x DS_ROW), transposed
  OfRow* rows_smem = reinterpret_cast<OfRow*>(dS_smem + BC * DS_ROW);  // (BR): L, or m and log(l)
  float* D_smem = reinterpret_cast<float*>(rows_smem + BR);           // (BR)
  unsigned* kept = reinterpret_cast<unsigned*>(D_smem + BR);          // SPARSE: group x Tr rows of `words`

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int Nq = p.Nq, Nk = p.Nk, group = p.group;
  const int kv_heads = p.heads / group, batch = blockIdx.x / kv_heads, kv_head = blockIdx.x % kv_heads;
  const Element *K = p.K.of(batch, kv_head), *V = p.V.of(batch, kv_head);
  Element *dK = p.dK.of(batch, kv_head), *dV = p.dV.of(batch, kv_head);

  const int keys = count_keys(p, batch, Nk, sram);
  const Masks positions = masks_of(p, batch, 0, Nq, Nk, keys);  // where the rows of every head begin and end

  const int Tr = (Nq + BR - 1) / BR;
  const int first_key = visible_begin(positions, 0), end_key = visible_end(positions, Nq - 1);
  const int Tc = Nq > 0 && first_key < end_key ? (end_key + BC - 1) / BC : 0;

  // The K/V blocks that row block i of a query head, counted from the group's first, visits
  const int words = (Tc + 31) / 32;
  auto blocks_of = [&](int member, int i) {
    const int begin = visible_begin(positions, i * BR), end = visible_end(positions, min((i + 1) * BR, Nq) - 1);
    return Blocks{begin / BC, begin < end ? (end + BC - 1) / BC : 0, kept + (member * Tr + i) * words};
  };
  if constexpr (SPARSE) {
    for (int each = warp; each < group * Tr; each += WARPS) {
      const int head = kv_head * group + each / Tr, i = each % Tr;
      const BlockMask keep = block_mask_of(p, batch, head);
      const Blocks blocks = blocks_of(each / Tr, i);
      read_block_mask(kept + each * words, keep, i, blocks.begin, blocks.end, 0, 1);
    }
    __syncthreads();
  }

  // Line 5: dQ = 0, dK = 0, dV = 0 in HBM. A row block that visits nothing has its dQ for good.
  for (int member = 0; member < group; member++) {
    const int head = kv_head * group + member;
    Element* dQ = p.dQ.of(batch, head);
    float* dQ_sums = p.dQ_acc + (static_cast<long long>(batch) * p.heads + head) * Nq * HEAD_DIM;  // not looked at when dQ is float32 itself
    for (int i = 0; i < Tr; i++) {
      const Blocks blocks = blocks_of(member, i);
      const bool seen = blocks.below(blocks.end) >= blocks.begin;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = i * BR + warp * 16 + g + 8 * h;
        if (row >= Nq) continue;
        if (seen) {
          zero_row<HEAD_DIM>(row_sums<HEAD_DIM>(dQ, p.dQ.row, dQ_sums, row), t);
        } else {
          zero_row<HEAD_DIM>(dQ + row * p.dQ.row, t);
        }
      }
    }
  }
  for (int key = threadIdx.x / 4; key < Nk; key += THREADS / 4) {
    zero_row<HEAD_DIM>(dK + key * p.dK.row, t);
    zero_row<VALUE_DIM>(dV + key * p.dV.row, t);
  }

  // Line 6: for each K/V block that any row sees
  for (int j = first_key / BC; j < Tc; j++) {
    if constexpr (SPARSE) {
      bool visited = false;
      for (int each = threadIdx.x; each < group * Tr; each += THREADS) visited |= blocks_of(each / Tr, each % Tr).visits(j);
      if (!__syncthreads_or(visited)) continue;
    }
    // Line 7: load K_j, V_j, zeros past the last key; the first visit waits for them
    const int cols = min(BC, keys - j * BC), whole = (cols + 15) / 16 * 16;
    __syncthreads();  // every warp is done with K_{j-1}, V_{j-1}
    copy_tile<HEAD_DIM>(K_smem, K + static_cast<long long>(j) * BC * p.K.row, p.K.row, whole, cols, threadIdx.x, THREADS);
    copy_tile<VALUE_DIM>(V_smem, V + static_cast<long long>(j) * BC * p.V.row, p.V.row, whole, cols, threadIdx.x, THREADS);
    // Line 8: dK~_j = 0, dV~_j = 0 on chip. The 16 keys from `key` on are those of one warp.
    for (int key = warp * 16; key < cols; key += WARPS * 16) {
      clear_sums<HEAD_DIM>(dK_smem + key * D_PAD);
      clear_sums<VALUE_DIM>(dV_smem + key * DV_PAD);
    }

    // Line 9: for each Q block that sees any of these keys, of each query head
    const int first_row = CAUSAL || WINDOW ? max(0, j * BC - positions.diagonal - (WINDOW ? positions.right : 0)) : 0;
    const int last_row = WINDOW ? min(Nq - 1ll, j * BC + cols - 1ll - positions.diagonal + positions.left) : Nq - 1;
    for (int member = 0; member < group; member++) {
      const int head = kv_head * group + member;
      const long long pair = static_cast<long long>(batch) * p.heads + head;
      Masks masks = masks_of(p, batch, head, Nq, Nk, keys);
      masks.of_head = score_of_head(p, batch, head, Nq, Nk, Q_smem);
      const Dropout dropout = dropout_of(p, batch, head);
      for (int i = first_row / BR; i <= last_row / BR; i++) {
        const Blocks blocks = blocks_of(member, i);
        if (SPARSE && !blocks.visits(j)) continue;
        // Line 10: load Q_i, dO_i and, of each row, L or m and log(l). A warp loads the 16 rows that it owns.
        const int row0 = i * BR + warp * 16, rows = max(0, min(16, Nq - row0));
        const Element* Q_rows = p.Q.of(batch, head) + (rows ? row0 * p.Q.row : 0);
        const Element* dO_rows = p.dO.of(batch, head) + (rows ? row0 * p.dO.row : 0);
        Element* dO_warp = dO_smem + warp * 16 * DV_ROW;  // (16 x DV_ROW)
        copy_tile<HEAD_DIM>(Q_smem + warp * 16 * D_ROW, Q_rows, p.Q.row, 16, rows, lane, 32);
        copy_tile<VALUE_DIM>(dO_warp, dO_rows, p.dO.row, 16, rows, lane, 32);
        wait_for_copies();
        __syncwarp();
        // Lines 10 and 19: D_i = rowsum(dO_i * O_i), with O_i on its way from HBM
        const Element* O_rows = p.O.of(batch, head) + row0 * p.O.row;
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int r = g + 8 * h;
          float sum = 0.f;
          if (r < rows) {
            for (int col = 2 * t; col < VALUE_DIM; col += 8) {
              const float2 o = load_row_pair<VALUE_DIM>(O_rows + r * p.O.row, col);
              sum += o.x * to_float(dO_warp[r * DV_ROW + col]) + o.y * to_float(dO_warp[r * DV_ROW + col + 1]);
            }
          }
          sum = row_sum(sum);
          if (t == 0) {
            const OfRow given = r < rows ? given_of_rows(p)[pair * Nq + row0 + r] : OfRow();
            rows_smem[warp * 16 + r] = where_nothing_is_seen(given);
            D_smem[warp * 16 + r] = sum;
          }
        }
        __syncthreads();  // K_j, V_j, Q_i, dO_i, L and D_i are there for all; all are done with dS of the visit before

        for (int key = warp * 16; key < cols; key += WARPS * 16) {
#pragma unroll 1
          for (int query = 0; query < BR; query += SUB) {
            // Lines 11 to 13: S^T = scale K_j Q_i^T, P^T = diag(l)^-1 exp(S^T - m), 0 where a row does not see a key
            float P_regs[SUB / 8][4], dS_regs[SUB / 8][4], slopes[SUB / 8][4];  // (16 x SUB)
            scores(P_regs, K_smem + key * D_ROW, Q_smem + query * D_ROW);
            const int first = i * BR + query;
            each_score_transposed<SUB / 8>(masks, j * BC + key + g, first, Nq, [&](int n, int e, int row, int col, bool seen) {
              float& s = P_regs[n][e];
              if constexpr (SCORE) {
                Scored scored = {};
                if (seen || !SCORE_LOADS) scored = scored_at(masks, of_row(masks, row), __fmul_rn(s, p.scale), row, col, Nq);
                s = scored.value, slopes[n][e] = scored.slope;
              } else if constexpr (SCALED || !EXACT) {
                s = EXACT ? __fmul_rn(s, p.scale) : s * p.scale;  // float32 is rounded as scale_and_mask does
              }
              if constexpr (BIAS) {
                if (seen) s += load_in_place(masks.bias + row * masks.bias_row + col * masks.bias_col);
              }
              if constexpr (MASK) {
                if (seen) seen = mask_says(masks, {}, row, col, Nq);
              }
              s = seen ? exp_of(exponent_of(rows_smem[row - i * BR], s, SCALED ? 1.f : p.scale)) : 0.f;
            });
            if constexpr (DROPOUT)
              each_weight_transposed<BR % 32 == 0 && SUB % 32 == 0>(P_regs, dropout, j * BC + key, i * BR + query, MarkDropped());
            // Line 16: dV~_j += P^T dO_i
            add_to_sums<VALUE_DIM>(dV_smem + key * DV_PAD, KeptWeights(P_regs).of, dO_smem + query * DV_ROW);
            if constexpr (SCORE && !DROPOUT) of_given_scores(P_regs, slopes);
            // Lines 17 and 20: dP^T = V_j dO_i^T, dS^T = P^T * (dP^T - D_i)
            scores<VALUE_DIM>(dS_regs, V_smem + key * DV_ROW, dO_smem + query * DV_ROW);
#pragma unroll
            for (int n = 0; n < SUB / 8; n++) {
              const float2 d = *reinterpret_cast<const float2*>(D_smem + query + 8 * n + 2 * t);
#pragma unroll
              for (int e = 0; e < 4; e++) {
                dS_regs[n][e] = score_gradient(P_regs[n][e], dS_regs[n][e], e % 2 ? d.y : d.x, dropout.scale);
                if constexpr (SCORE && DROPOUT) dS_regs[n][e] = of_given_score(dS_regs[n][e], slopes[n][e]);
              }
#pragma unroll
              for (int h = 0; h < 2; h++)
                store_two(dS_smem + (key + g + 8 * h) * DS_ROW + query + 8 * n + 2 * t, dS_regs[n][2 * h], dS_regs[n][2 * h + 1]);
            }
            // Line 22: dK~_j += dS^T Q_i, to be scaled once
            add_to_sums<HEAD_DIM>(dK_smem + key * D_PAD, dS_regs, Q_smem + query * D_ROW);
          }
        }
        __syncthreads();  // dS is there for all; all are done with Q_i, dO_i, L and D_i

        // Line 21: dQ_i += scale dS K_j in HBM, the warp's own rows, 16 columns at a time
        const bool last_visit = j == blocks.below(blocks.end);
        Element* dQ = p.dQ.of(batch, head);
#pragma unroll 1
        for (int piece = 0; rows && piece < D_PAD / 16; piece++) {
          float dQ_regs[2][4] = {};  // (16 x 16)
          add_transposed_product<DS_ROW, D_ROW>(dQ_regs, dS_smem + warp * 16, K_smem + 16 * piece, whole);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int row = row0 + g + 8 * h;
            if (row >= Nq) continue;
            float* dQ_i = row_sums<HEAD_DIM>(dQ, p.dQ.row, p.dQ_acc + pair * Nq * HEAD_DIM, row);
#pragma unroll
            for (int n = 0; n < 2; n++) {
              const int col = 16 * piece + 8 * n + 2 * t;
              if (col >= HEAD_DIM) continue;
              const float2 old = load_row_pair<HEAD_DIM>(dQ_i, col);
              const float x = old.x + p.scale * dQ_regs[n][2 * h], y = old.y + p.scale * dQ_regs[n][2 * h + 1];
              if (last_visit) {
                store_row_pair<HEAD_DIM>(dQ + row * p.dQ.row, col, x, y);
              } else {
                store_row_pair<HEAD_DIM>(dQ_i, col, x, y);
              }
            }
          }
        }
      }
    }
    // Line 24: dK_j = dK~_j, dV_j = dV~_j
    for (int key = warp * 16; key < cols; key += WARPS * 16) {
      const long long at = static_cast<long long>(j) * BC + key;
      store_sums<HEAD_DIM>(dK + at * p.dK.row, p.dK.row, dK_smem + key * D_PAD, cols - key, p.scale);
      store_sums<VALUE_DIM>(dV + at * p.dV.row, p.dV.row, dV_smem + key * DV_PAD, cols - key, DROPOUT ? dropout_of(p, 0, 0).scale : 1.f);
    }
  }
}
