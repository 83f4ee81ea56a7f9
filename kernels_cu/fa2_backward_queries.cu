// dQ of FlashAttention-2's backward by itself, in a fixed order: one thread block a row block of Q, which streams the K/V blocks
// that it sees, as the forward does. It computes S and dP once more, and needs no atomics and no float32 dQ in HBM.
//
// Where two warps share their rows (COL_WARPS), each goes through half of the keys, and at the end half of dQ's columns is summed by
// each of them. Where dQ has more columns than a warp's registers hold (d above 256) each owns half of them from the beginning, and
// gets the other's dS through SRAM; of blocks of 16 keys one of the two makes all dS.
//
// Constants, all from the tile schedule:
//   ELEMENT     __half, __nv_bfloat16 or float       HEAD_DIM, VALUE_DIM  d of Q and K, of V and O
//   BR, BC      rows of a Q block, of a K/V block    STAGES     K/V blocks that there is room for: 1 or 2; 0, where the V block has
//               to go before the K block comes
//   WARP_ROWS   rows that a warp has                 WARP_COLS  columns of S and dP that it makes at once
//   COL_WARPS   warps that share their rows: 1 or 2  COPY_BYTES width of a copy
//   CAUSAL, WINDOW, MASK, BIAS, SCORE, PADDED, SPARSE, TILES  mask.cuh, mask_function.cuh, score.cuh, block_mask.cuh
//   DROPOUT     whether weights are dropped: dropout.cuh
//   SCORE_SUMS  whether a launch makes, in place of dQ, the gradients of what the score function has captured: score_sums.cuh
//   KEPT_ROWS, KEPT_COLS  row blocks and column blocks that share an element of the block mask
//   VARLEN      whether batches are sequences of their own lengths, packed one behind the other: sequence.cuh
#define SUB WARP_COLS
constexpr int SCARCE = WARP_ROWS == 16 ? 2 : 0;  // registers are, where there are not many rows a warp and so fewer loads
#include "block_mask.cuh"
#include "dropout.cuh"
#include "element.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "row_products.cuh"
#include "score_sums.cuh"
#include "sequence.cuh"
#include "weight.cuh"

constexpr int ROW_WARPS = BR / WARP_ROWS, WARPS = ROW_WARPS * COL_WARPS, THREADS = 32 * WARPS;
constexpr int M = WARP_ROWS / 16, N = WARP_COLS / 8;  // tensor core tiles of a warp's part of S
constexpr bool WIDE = COL_WARPS > 1 && HEAD_DIM > 256, ALONE = WIDE && WARP_COLS == BC;
constexpr int PARTS = ALONE ? 1 : BC / (COL_WARPS * WARP_COLS);
static_assert(!WIDE || PARTS == 1, "dS has room for one part");
constexpr bool BY_TURNS = STAGES == 0;  // dP is made before S
static_assert(!BY_TURNS || (ALONE && BR == BC), "the least blocks of wide heads");
#include "column_warps.cuh"

typedef SwizzledTile<HEAD_DIM, Element, 16 * COL_WARPS> KeyTile;         // of Q, K and dQ
typedef SwizzledTile<VALUE_DIM> ValueTile;                               // of V and dO
typedef SwizzledTile<BC> ScoreTile;                                      // of dS
typedef PartOf<KeyTile, WIDE ? COL_WARPS : 1, ROW_WARPS> KeyPart;  // a warp's columns of dQ

// The stream of the visited K/V blocks, from the last one down, through STAGES slots. Only the last block may be short.
struct Stream {
  const Element *K, *V;  // the last rows that this thread copies: of block 0 where blocks are left out, else of the block to be fetched next
  const Element* anywhere;  // can be read, as rows that there are not cannot
  long long K_row, V_row;
  int keys;
  unsigned slot, both;  // where the block at hand is in shared memory, and the sum of that and where the other slot is

  static constexpr int K_BYTES = BC * KeyTile::PAD * sizeof(Element), SLOT = K_BYTES + BC * ValueTile::PAD * sizeof(Element);
  static constexpr int V_BEYOND = BY_TURNS ? 0 : K_BYTES;

  __device__ __forceinline__ void start(const Element* ring, int j) {
    const unsigned first = unknown(shared_address(ring));  // or it would be found anew in each turn
    slot = first + (STAGES == 2 ? SLOT : 0);
    both = 2 * first + (STAGES == 2 ? SLOT : 0);
    if constexpr (!SKIPS) {
      K += static_cast<long long>(j) * BC * K_row;
      V += static_cast<long long>(j) * BC * V_row;
    }
    fetch<false, !BY_TURNS>(j, true);
    close_group();
  }

  // Block j to the other slot, or the only one, if it is `wanted`: K_j, V_j, or both
  template <bool WHOLE, bool KEYS = true, bool VALUES = true> __device__ __forceinline__ void fetch(int j, bool wanted) {
    const unsigned to = both - slot;
    const Element *K_j = K, *V_j = V;
    if constexpr (SKIPS) {
      K_j += static_cast<long long>(j) * BC * K_row;
      V_j += static_cast<long long>(j) * BC * V_row;
    }
    if constexpr (KEYS) KeyTile::load_back<BC, THREADS, WHOLE>(to, K_j, anywhere, K_row, keys - j * BC, threadIdx.x, wanted);
    if constexpr (VALUES) ValueTile::load_back<BC, THREADS, WHOLE>(to + V_BEYOND, V_j, anywhere, V_row, keys - j * BC, threadIdx.x, wanted);
    if constexpr (!SKIPS) K = K_j, V = V_j;
  }
};

constexpr bool IN_REGS = WARP_ROWS == 32 && COL_WARPS == 1 && KeyTile::PAD <= 64;  // Q and dO, beside dQ, S and dP
// Fragments of Q that are loaded before a turn's barrier, so that fewer are asked for at once behind it
constexpr int EARLY = WARP_ROWS == 32 && !IN_REGS ? 2 : 0;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fa2_backward_queries(__grid_constant__ const Params given) {
  const Params p = given;
  extern __shared__ __align__(128) unsigned char sram[];
  Element* Q_smem = reinterpret_cast<Element*>(sram);  // (BR x d), at the end dQ
  Element* dO_smem = Q_smem + BR * KeyTile::PAD;       // (BR x d_v)
  Element* ring = dO_smem + BR * ValueTile::PAD;       // STAGES x (BC x d), (BC x d_v); at the end sums of dQ
  constexpr int RING = STAGES * BC * (KeyTile::PAD + ValueTile::PAD), ONE = BC * (KeyTile::PAD > ValueTile::PAD ? KeyTile::PAD : ValueTile::PAD);
  Element* dS_smem = ring + (BY_TURNS ? ONE : RING);                                     // (BR x BC), where dQ is wide
  OfRow* rows_smem = reinterpret_cast<OfRow*>(dS_smem + (WIDE ? BR * ScoreTile::PAD : 0));  // (BR): L, or what weights are relative to
  float* D_smem = reinterpret_cast<float*>(rows_smem + BR);                                 // (BR)
  unsigned* row_parts = reinterpret_cast<unsigned*>(D_smem + BR);  // score_parts.cuh
  unsigned* key_parts = row_parts + ROW_LOADS * BR;          // two blocks'
  unsigned* kept = key_parts + 2 * KEY_LOADS * BC;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int own_rows = warp % ROW_WARPS * WARP_ROWS, col_warp = warp / ROW_WARPS;
  const RowBlock place = find_row_block<BR>(p, sram);
  if (!place.exists) return;
  const int Nq = place.Nq, row_block = place.i * BR, rows = min(BR, Nq - row_block);
  const long long row0 = place.L_row + row_block;
  const int keys = count_keys(p, place.batch, place.Nk, sram);
  Masks masks = masks_of(p, place.batch, place.head, Nq, place.Nk, keys);
  masks.batch = place.sequence;
  masks.of_head = score_of_head(p, place.sequence, place.head, Nq, place.Nk, sram);
  const Dropout dropout = dropout_of(p, place.sequence, place.head);
  Sums sums = sums_from(p, sram);

  // The K/V blocks that some row sees
  const int last_row = row_block + rows - 1;
  const int first_key = visible_begin(masks, row_block), end_key = visible_end(masks, last_row);
  const Blocks blocks = {first_key / BC, first_key < end_key ? (end_key + BC - 1) / BC : 0, kept};
  if constexpr (SKIPS) {
    const BlockMask keep = block_mask_of(p, place.batch, place.head, place.first_block<BR>());
    read_block_mask<KEPT_ROWS, KEPT_COLS>(kept, keep, place.i, blocks.begin, blocks.end, warp, WARPS);
    __syncthreads();
  }
  Stream stream = {place.keys(p.K) + KeyTile::begin<THREADS>(p.K.row, threadIdx.x) + KeyTile::last_rows(BC, THREADS) * p.K.row,
                   place.keys(p.V) + ValueTile::begin<THREADS>(p.V.row, threadIdx.x) + ValueTile::last_rows(BC, THREADS) * p.V.row,
                   p.K.at, p.K.row, p.V.row, keys};
  StreamOfParts<BC, THREADS> parts;
  auto ask_for_parts = [&](int j) {
    const bool wanted = j >= blocks.begin;
    parts.ask(p, masks.of_head, score_at(masks, 0, j * BC, Nq), wanted ? keys - j * BC : 0, MASK && wanted && blocks.asks(j));
  };
  int j = blocks.below(blocks.end);

  const int warp_row = row_block + own_rows;
  Base base[M][2] = {};  // of rows 16 m + g and 8 below
  float D_i[M][2] = {};
  bool large = false;
  QueryRows<KeyTile, M, IN_REGS, EARLY> Q_rows;
  QueryRows<ValueTile, M, IN_REGS> dO_rows;
  Q_rows.smem = Q_smem + own_rows * KeyTile::PAD;
  dO_rows.smem = dO_smem + own_rows * ValueTile::PAD;
  if (j >= blocks.begin) {
    KeyTile::load<BR, THREADS, false>(Q_smem, place.query(p.Q, row_block), p.Q.row, rows, threadIdx.x);
    ValueTile::load<BR, THREADS, false>(dO_smem, place.query(p.dO, row_block), p.dO.row, rows, threadIdx.x);
    for (int r = threadIdx.x; r < BR; r += THREADS) {
      const bool inside = r < rows;
      const OfRow* given = given_of_rows(p);
      copy_floats(rows_smem + r, inside ? given + row0 + r : given, inside);
      copy_floats(D_smem + r, inside ? p.D + row0 + r : p.D, inside);
    }
    close_group();
    stream.start(ring, j);
    if constexpr (KEY_LOADS > 0) {
      parts.start(shared_address(key_parts));
      ask_for_parts(j);
      parts.put();
    }
    if constexpr (ROW_LOADS > 0) {
      RowParts<BR, THREADS> own;
      own.ask(p, masks.of_head, score_at(masks, row_block, 0, Nq), rows, true);
      own.store(shared_address(row_parts));
      masks.of_rows = shared_address(row_parts) - 4 * row_block;
    }
    wait_for_groups<1>();
    __syncthreads();  // Q, dO, L and D are there for all
    if constexpr (IN_REGS) {
      Q_rows.keep();
      dO_rows.keep();
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = own_rows + 16 * m + g + 8 * h;
        large |= is_large(rows_smem[row]);
        base[m][h] = base_of(rows_smem[row], p.bases, row0 + row);
        D_i[m][h] = D_smem[row];
      }
    large = __any_sync(~0u, large);
  }

  float dQ_regs[M][KeyPart::PAD / 8][4] = {};
  // By shuffles: ptxas would else find them anew in each turn.
  const unsigned at_keys = __shfl_sync(~0u, place_of_keys<KeyTile>(), lane);
  const unsigned at_values = KeyTile::PAD == ValueTile::PAD ? at_keys : __shfl_sync(~0u, place_of_keys<ValueTile>(), lane);
  while (j >= blocks.begin) {
    const int next = blocks.below(j);
    if constexpr (EARLY > 0) Q_rows.keep();
    wait_for_groups<0>();
    __syncthreads();  // K_j and V_j are there for all; all are done with the blocks before
    stream.slot = stream.both - stream.slot;
    if constexpr (KEY_LOADS > 0) {
      masks.of_keys = parts.turn(j * BC);
      ask_for_parts(next);
    }
    auto ask_for_next = [&] {
      if constexpr (STAGES == 2) {
        stream.fetch<true>(next, next >= blocks.begin);
        close_group();
      }
    };
    const unsigned K_at = stream.slot, V_at = K_at + Stream::V_BEYOND;
    float dP[M][N][4];  // where V_j has to go
    if constexpr (BY_TURNS) {
      if (col_warp == 0) scores<ValueTile, 2>(dP, dO_rows, V_at, at_values);
      __syncthreads();  // all are done with V_j
      stream.fetch<false, true, false>(j, true);
      close_group();
      wait_for_groups<0>();
      __syncthreads();  // K_j is there for all
    }
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const int col = (part * COL_WARPS + col_warp) * WARP_COLS, first = j * BC + col, end = first + WARP_COLS;
      const int last = min(warp_row + WARP_ROWS, Nq) - 1;
      const bool own = !ALONE || col_warp == 0;
      const bool seen = own && warp_row < Nq && first < visible_end(masks, last) && end > visible_begin(masks, warp_row);
      if (!seen) {
        if constexpr (WIDE && !SCORE_SUMS) {
          const float zeros[M][N][4] = {};
          if (own) put_tile<ScoreTile>(dS_smem + own_rows * ScoreTile::PAD, zeros, col);
        }
        if (part == PARTS - 1) ask_for_next();
        continue;
      }
      // S = Q K_j^T, P = exp(S - L)
      float P[M][N][4], made[M][N][4], slopes[M][N][4];
      float(&dS)[M][N][4] = BY_TURNS ? dP : made;
      scores(P, Q_rows, K_at + col * KeyTile::ROW_BYTES, at_keys);
      const bool asks = MASK && blocks.asks(j);
      const bool whole = !asks && !SCALED && end <= visible_end(masks, warp_row) && first >= visible_begin(masks, last);
      const float factor = SCALED ? 1.f : p.scale * UNIT;
      float given[M][N][4];  // to the score function
      if constexpr (SCORE_SUMS) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
          for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) given[m][n][e] = __fmul_rn(P[m][n][e], p.scale);
      }
      if (whole && !large) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
          for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) P[m][n][e] = EXACT ? base[m][e / 2].exponent(P[m][n][e], factor) : fmaf(P[m][n][e], factor, -base[m][e / 2].log_sum);
      } else {
#pragma unroll
        for (int m = 0; m < M; m++) {
          scale_and_mask<SCORE>(P[m], SCALED ? p.scale * UNIT : 1.f, UNIT, masks, warp_row + 16 * m + g, first, Nq, asks, slopes[m]);
#pragma unroll
          for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) P[m][n][e] = P[m][n][e] == NEG_INF ? NEG_INF : base[m][e / 2].exponent(P[m][n][e], factor);
        }
      }
      // Nothing branches from here on, so that weights are made beside products.
      to_weights(P);
      if constexpr (DROPOUT) {
#pragma unroll
        for (int n = 0; n < N; n += 2)  // the row is unknown, or some of the first rounds would be kept in all turns
          each_weight(P, dropout, n, unknown(warp_row), first + 8 * n, MarkDropped());
      }
      if constexpr (SCORE && !DROPOUT && !SCORE_SUMS) {
#pragma unroll
        for (int m = 0; m < M; m++) of_given_scores(P[m], slopes[m]);
      }
      // dP = dO V_j^T, dS = P * (dP - D), dQ += dS K_j
      if constexpr (!BY_TURNS) scores<ValueTile, 2>(dS, dO_rows, V_at + col * ValueTile::ROW_BYTES, at_values);
      if (part == PARTS - 1) ask_for_next();
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) dS[m][n][e] = score_gradient(P[m][n][e], dS[m][n][e], D_i[m][e / 2], dropout.scale);
      if constexpr (SCORE_SUMS) {
#pragma unroll
        for (int m = 0; m < M; m++) add_scores(masks, given[m], dS[m], warp_row + 16 * m + g, first, Nq, sums);
        continue;
      }
      if constexpr (SCORE && DROPOUT) {
#pragma unroll
        for (int m = 0; m < M; m++) of_given_scores(dS[m], slopes[m]);
      }
      if constexpr (WIDE) put_tile<ScoreTile>(dS_smem + own_rows * ScoreTile::PAD, dS, col);
      add_weighted_values<KeyPart>(dQ_regs, dS, K_at + col * KeyTile::ROW_BYTES);
    }
    if constexpr (WIDE && !SCORE_SUMS) {
      meet_partner();
      // dQ += dS K_j for the other warp's keys
      const int col = (1 - col_warp) * WARP_COLS;
      const Element* K_others = static_cast<const Element*>(__cvta_shared_to_generic(K_at)) + col * KeyTile::PAD;
      if (!ALONE || col_warp > 0)
        add_stored_values<KeyPart, ScoreTile, N / 2>(dQ_regs, dS_smem + own_rows * ScoreTile::PAD, col, K_others);
    }
    if constexpr (STAGES < 2) {
      __syncthreads();  // all are done with K_j and V_j
      stream.fetch<true, !BY_TURNS>(next, next >= blocks.begin);
      close_group();
    }
    parts.put();
    j = next;
  }

  if constexpr (SCORE_SUMS) {
    __syncthreads();
    finish_sums<WARPS>(p, masks, sums, Nq, reinterpret_cast<float*>(sram));
    return;
  }

  // dQ goes through the room of Q.
  __syncthreads();
  constexpr int COLS = KeyTile::PAD / COL_WARPS;
  const int own_col = WIDE ? 0 : col_warp * COLS;
  float own[M][COLS / 8][4];
  if constexpr (COL_WARPS == 1 || WIDE) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < COLS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) own[m][n][e] = dQ_regs[m][n][e];
  } else {
    // The other's columns to the other warp, and from it its sum of ours: four a lane at a time
    float4* room = reinterpret_cast<float4*>(ring);  // (WARPS x M x COLS / 8 x 32)
    constexpr int OF_A_WARP = M * (COLS / 8) * 32;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < COLS / 8; n++) {
        float other[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float left = dQ_regs[m][n][e], right = dQ_regs[m][n + COLS / 8][e];
          own[m][n][e] = col_warp ? right : left;
          other[e] = col_warp ? left : right;
        }
        room[warp * OF_A_WARP + (m * (COLS / 8) + n) * 32 + lane] = make_float4(other[0], other[1], other[2], other[3]);
      }
    __syncthreads();
    const int beside = (1 - col_warp) * ROW_WARPS + warp % ROW_WARPS;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < COLS / 8; n++) {
        const float4 sum = room[beside * OF_A_WARP + (m * (COLS / 8) + n) * 32 + lane];
        own[m][n][0] += sum.x;
        own[m][n][1] += sum.y;
        own[m][n][2] += sum.z;
        own[m][n][3] += sum.w;
      }
  }
  multiply(own, p.scale);
  put_tile<KeyPart>(Q_smem + own_rows * KeyTile::PAD + own_col, own);
  __syncthreads();
  constexpr int LEAVING = BR / WARPS;  // rows that a warp takes to HBM
  const RowBlock end = VARLEN ? place : find_row_block<BR>(p, sram);  // what `place` is: kept through the loop, it would take registers
  const int row = warp * LEAVING, end_row = end.i * BR + row;
  KeyTile::store<LEAVING>(end.query(p.dQ, end_row), Q_smem + row * KeyTile::PAD, p.dQ.row, end.Nq - end_row, lane);
}
