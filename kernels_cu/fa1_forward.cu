// FlashAttention, Algorithm 1 (arXiv 2205.14135): forward, one thread block a (batch, query head).
//
// K/V blocks are the outer loop, Q blocks the inner; O, l and m live in HBM and are read and written at each visit.
// S_ij (Br x Bc) is made SUB columns at a time in registers, with a running maximum. O is float32 in HBM until the last
// visit of its row block, which writes it in the output's type: for float inputs that is one array, else O_acc and O.
//
// Constants, all from the tile schedule:
//   ELEMENT     __half, __nv_bfloat16 or float       HEAD_DIM, VALUE_DIM  d of Q and K, of V and O
//   BR, BC      rows of a Q block, of a K/V block    SUB         columns of S held at a time; divides BC
//   COPY_BYTES  width of a copy
//   CAUSAL, WINDOW, MASK, BIAS, PADDED, SPARSE, SINKS, DROPOUT  mask.cuh, mask_function.cuh, block_mask.cuh, sinks.cuh, dropout.cuh
#include "block_mask.cuh"
#include "dropout.cuh"
#include "element.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "row_pair.cuh"
#include "sinks.cuh"
#include "tile_copy.cuh"
#include "warp_product.cuh"

constexpr int THREADS = BR / 16 * 32;  // a warp for every 16 rows of a Q block

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fa1_forward(__grid_constant__ const Params given) {
  const Params p = given;
  extern __shared__ __align__(16) unsigned char sram[];
  Element* K_smem = reinterpret_cast<Element*>(sram);  // (BC x D_ROW)
  Element* V_smem = K_smem + BC * D_ROW;               // (BC x DV_ROW)
  Element* Q_smem = V_smem + BC * DV_ROW;              // (BR x D_ROW)
  unsigned* kept = reinterpret_cast<unsigned*>(Q_smem + BR * D_ROW);  // SPARSE: Tr rows of `words`

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int Nq = p.Nq, batch = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
  const long long first = static_cast<long long>(blockIdx.x) * Nq;  // row 0 in O_acc, l, m and L
  const Element *Q = p.Q.of(batch, head), *K = p.K.of(batch, head / p.group), *V = p.V.of(batch, head / p.group);
  Element* O = p.O.of(batch, head);
  float *O_acc = p.O_acc + first * VALUE_DIM, *l = p.l + first, *m = p.m + first;  // O_acc is not looked at when O is float32 itself

  const int keys = count_keys(p, batch, p.Nk, sram);
  Masks masks = masks_of(p, batch, head, Nq, p.Nk, keys);
  masks.of_head = score_of_head(p, batch, head, Nq, p.Nk, sram);
  const Dropout dropout = dropout_of(p, batch, head);

  const int Tr = (Nq + BR - 1) / BR;
  const int first_key = visible_begin(masks, 0), end_key = visible_end(masks, Nq - 1);
  const int Tc = first_key < end_key ? (end_key + BC - 1) / BC : 0;

  // The K/V blocks that row block i visits
  const int words = (Tc + 31) / 32;
  auto blocks_of = [&](int i) {
    const int begin = visible_begin(masks, i * BR), end = visible_end(masks, min((i + 1) * BR, Nq) - 1);
    return Blocks{begin / BC, begin < end ? (end + BC - 1) / BC : 0, kept + i * words};
  };
  if constexpr (SPARSE) {
    const BlockMask keep = block_mask_of(p, batch, head);
    for (int i = warp; i < Tr; i += BR / 16) {
      const Blocks blocks = blocks_of(i);
      read_block_mask(kept + i * words, keep, i, blocks.begin, blocks.end, 0, 1);
    }
    __syncthreads();
  }

  // Line 2: O = 0, l = 0, m = -inf in HBM. A row block that visits nothing has its O and L for good.
  for (int i = 0; i < Tr; i++) {
    const Blocks blocks = blocks_of(i);
    const bool seen = blocks.below(blocks.end) >= blocks.begin;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = i * BR + warp * 16 + g + 8 * h;
      const float sink = sink_of(p, head, !seen && row < Nq);
      if (row >= Nq) continue;
      if (seen) {
        zero_row<VALUE_DIM>(row_sums<VALUE_DIM>(O, p.O.row, O_acc, row), t);
      } else {
        zero_row<VALUE_DIM>(O + row * p.O.row, t);
      }
      if (t == 0) {
        l[row] = 0.f;
        m[row] = NEG_INF;
        if (p.L && !seen) p.L[first + row] = sink;
      }
    }
  }

  // Line 5: for each K/V block that any row sees
  for (int j = first_key / BC; j < Tc; j++) {
    if constexpr (SPARSE) {
      bool visited = false;
      for (int i = threadIdx.x; i < Tr; i += THREADS) visited |= blocks_of(i).visits(j);
      if (!__syncthreads_or(visited)) continue;
    }
    // Line 6: load K_j, V_j. The last block may be short: as many rows as whole sub-tiles need, zeros past the end.
    const int cols = min(BC, keys - j * BC), whole = (cols + SUB - 1) / SUB * SUB;
    __syncthreads();  // every warp is done with K_{j-1}, V_{j-1}
    copy_tile<HEAD_DIM>(K_smem, K + static_cast<long long>(j) * BC * p.K.row, p.K.row, whole, cols, threadIdx.x, THREADS);
    copy_tile<VALUE_DIM>(V_smem, V + static_cast<long long>(j) * BC * p.V.row, p.V.row, whole, cols, threadIdx.x, THREADS);
    wait_for_copies();
    __syncthreads();

    // Line 7: for each Q block that sees any of these keys
    const int first_row = CAUSAL || WINDOW ? max(0, j * BC - masks.diagonal - (WINDOW ? masks.right : 0)) : 0;
    const int last_row = WINDOW ? min(Nq - 1ll, j * BC + cols - 1ll - masks.diagonal + masks.left) : Nq - 1;
    for (int i = first_row / BR; i <= last_row / BR; i++) {
      const Blocks blocks = blocks_of(i);
      if (SPARSE && !blocks.visits(j)) continue;
      // Line 8: load Q_i. A warp loads the 16 rows that it owns, and waits for nobody else.
      const int row0 = i * BR + warp * 16, rows = max(0, min(16, Nq - row0));
      Element* Q_warp = Q_smem + warp * 16 * D_ROW;  // (16 x D_ROW)
      __syncwarp();                                  // every lane is done with the rows before
      copy_tile<HEAD_DIM>(Q_warp, rows ? Q + static_cast<long long>(row0) * p.Q.row : Q, p.Q.row, 16, rows, lane, 32);
      wait_for_copies();
      __syncwarp();

      // Lines 9 and 10, a sub-tile at a time: S = scale Q_i K_j^T, m~ = rowmax(S), P = exp(S - m~), l~ = rowsum(P),
      // O~ = P V_j, the earlier sub-tiles' part rescaled to the larger maximum.
      float O_tilde[DV_PAD / 8][4] = {}, m_tilde[2] = {NEG_INF, NEG_INF}, l_tilde[2] = {};
      // The keys that the warp sees
      const int end = unknown(rows ? min(cols, visible_end(masks, row0 + rows - 1) - j * BC) : 0);
      for (int col = max(0, visible_begin(masks, row0) - j * BC) / SUB * SUB; col < end; col += SUB) {
        float S_regs[SUB / 8][4];  // (16 x SUB)
        scores(S_regs, Q_warp, K_smem + col * D_ROW);
        scale_and_mask(S_regs, p.scale, 1.f, masks, row0 + g, j * BC + col, Nq);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float largest = m_tilde[h];
#pragma unroll
          for (int n = 0; n < SUB / 8; n++) largest = fmaxf(largest, fmaxf(S_regs[n][2 * h], S_regs[n][2 * h + 1]));
          largest = row_max(largest);
          const float safe = largest == NEG_INF ? 0.f : largest;  // nothing seen yet: exp(-inf - 0) = 0
          const float rescale = exp_of(m_tilde[h] - safe);
          m_tilde[h] = largest;
          l_tilde[h] *= rescale;
#pragma unroll
          for (int n = 0; n < SUB / 8; n++)
#pragma unroll
            for (int e = 2 * h; e < 2 * h + 2; e++) {
              S_regs[n][e] = exp_of(S_regs[n][e] - safe);
              l_tilde[h] += S_regs[n][e];
            }
#pragma unroll
          for (int n = 0; n < DV_PAD / 8; n++) {
            O_tilde[n][2 * h] *= rescale;
            O_tilde[n][2 * h + 1] *= rescale;
          }
        }
        if constexpr (DROPOUT) each_weight(S_regs, dropout, row0, j * BC + col, Drop());
        add_weighted_values(O_tilde, S_regs, V_smem + col * DV_ROW);
      }

      const bool last_visit = j == blocks.below(blocks.end);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = row0 + g + 8 * h;
        const float l_block = row_sum(l_tilde[h]);
        // Line 8: load l_i, m_i: one of the four lanes that share a row reads them.
        float l_i = 0.f, m_i = NEG_INF;
        if (t == 0 && row < Nq) {
          l_i = l[row];
          m_i = m[row];
        }
        l_i = __shfl_sync(~0u, l_i, 0, 4);
        m_i = __shfl_sync(~0u, m_i, 0, 4);
        const float sink = sink_of(p, head, last_visit && row < Nq);
        if (row >= Nq) continue;
        // Line 11: m_new = max(m_i, m~), l_new = e^(m_i - m_new) l_i + e^(m~ - m_new) l~
        const float m_new = fmaxf(m_i, m_tilde[h]);
        const float safe = m_new == NEG_INF ? 0.f : m_new;
        const float old_weight = exp_of(m_i - safe) * l_i, block_weight = exp_of(m_tilde[h] - safe);
        const float l_new = old_weight + block_weight * l_block;
        // Line 12: O_i = diag(l_new)^-1 (diag(l_i) e^(m_i - m_new) O_i + e^(m~ - m_new) O~); a row that saw nothing is 0
        float L_i = m_new + logf(l_new), inverse = l_new == 0.f ? 0.f : 1.f / l_new;
        inverse *= join_sink(L_i, sink);
        const float values_weight = DROPOUT ? block_weight * dropout.scale : block_weight;
        float* O_i = row_sums<VALUE_DIM>(O, p.O.row, O_acc, row);
#pragma unroll
        for (int n = 0; n < DV_PAD / 8; n++) {
          const int col = 8 * n + 2 * t;
          if (col >= VALUE_DIM) continue;
          const float2 old = load_row_pair<VALUE_DIM>(O_i, col);
          const float x = (old_weight * old.x + values_weight * O_tilde[n][2 * h]) * inverse;
          const float y = (old_weight * old.y + values_weight * O_tilde[n][2 * h + 1]) * inverse;
          if (last_visit) {
            store_row_pair<VALUE_DIM>(O + row * p.O.row, col, x, y);
          } else {
            store_row_pair<VALUE_DIM>(O_i, col, x, y);
          }
        }
        // Line 13: l_i = l_new, m_i = m_new
        if (t == 0) {
          l[row] = l_new;
          m[row] = m_new;
          if (p.L && last_visit) p.L[first + row] = L_i;
        }
      }
    }
  }
}
