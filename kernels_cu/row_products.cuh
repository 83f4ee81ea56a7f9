// The two products of attention for the rows that a warp owns, 16 M of them: what it loads of K or V is used for M row
// tiles. Results are in the accumulator layout of mma.cuh: element e of column tile n of row tile i is row
// 16 i + g + 8 (e / 2), column 8 n + 2 t + e % 2. Half types run on tensor cores, float in ordinary FMAs.
// Constants: SCARCE (0, or how many steps of a product may be under way at once, since their loads take registers), ELEMENT (element.cuh).
#pragma once
#include "mma.cuh"
#include "swizzled_tile.cuh"

// A warp's rows of Q: in SRAM, and the first 16 KEPT columns, or all if they are to stay IN_REGS, also as first operands of the
// products, 16 columns each.
template <class Tile, int M, bool IN_REGS, int KEPT = 0> struct QueryRows {
  static constexpr int HELD = IN_REGS ? Tile::PAD / 16 : KEPT;
  const Element* smem;  // (16 M x PAD)
  unsigned regs[HELD ? HELD : 1][M][4];

  __device__ __forceinline__ void keep() {
#pragma unroll
    for (int k = 0; k < HELD; k++) load(regs[k], k);
  }

  // Columns 16 k to 16 k + 15
  __device__ __forceinline__ void fragment(unsigned (&Q_frag)[M][4], int k) const {
    if (HELD > 0 && k < HELD) {
#pragma unroll
      for (int i = 0; i < M; i++)
#pragma unroll
        for (int r = 0; r < 4; r++) Q_frag[i][r] = regs[k][i][r];
    } else {
      load(Q_frag, k);
    }
  }

 private:
  __device__ __forceinline__ void load(unsigned (&Q_frag)[M][4], int k) const {
    const int lane = threadIdx.x % 32;
    const unsigned at = Tile::index(lane % 16, lane / 16 * 8) * sizeof(Element);
#pragma unroll
    for (int i = 0; i < M; i++) load_matrices(Q_frag[i], shared_address(smem) + Tile::right(at, 2 * k) + i * 16 * Tile::ROW_BYTES);
  }
};

// Where in a tile of keys a lane loads from, in bytes: alike in all tiles, so that it takes registers once.
template <class Tile> __device__ __forceinline__ unsigned place_of_keys() {
  const int lane = threadIdx.x % 32;
  return Tile::index(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) * sizeof(Element);
}

// S = Q K^T:  Q (16 M x PAD), (8 N x PAD) of K at `K_at`, place_of_keys -> S_regs (16 M x 8 N)
template <class Tile, int STEPS = (SCARCE ? SCARCE : 64), int M, int N, bool IN_REGS, int KEPT>
__device__ __forceinline__ void scores(float (&S_regs)[M][N][4], const QueryRows<Tile, M, IN_REGS, KEPT>& Q, unsigned K_at,
                                       unsigned at) {
  typedef typename Tile::Type T;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) S_regs[i][n][e] = 0.f;
  if constexpr (sizeof(T) == 2) {
#pragma unroll(IN_REGS || KEPT ? Tile::PAD : STEPS)
    for (int k = 0; k < Tile::PAD / 16; k++) {
      unsigned Q_frag[M][4], K_frag[4];
      Q.fragment(Q_frag, k);
#pragma unroll
      for (int n = 0; n < N / 2; n++) {
        load_matrices(K_frag, K_at + Tile::right(at, 2 * k) + n * 16 * Tile::ROW_BYTES);
#pragma unroll
        for (int i = 0; i < M; i++) {
          mma(T(), S_regs[i][2 * n], Q_frag[i], K_frag[0], K_frag[1]);
          mma(T(), S_regs[i][2 * n + 1], Q_frag[i], K_frag[2], K_frag[3]);
        }
      }
    }
  } else {
    const Element* K_smem = static_cast<const Element*>(__cvta_shared_to_generic(K_at));
    const int g = lane / 4, t = lane % 4;
#pragma unroll(SCARCE ? 1 : 2)
    for (int k = 0; k < Tile::PAD; k += 4) {
      float4 q[M][2];
#pragma unroll
      for (int i = 0; i < M; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
          q[i][h] = *reinterpret_cast<const float4*>(Q.smem + Tile::index(g, k) + (16 * i + 8 * h) * Tile::PAD);
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float4 key = *reinterpret_cast<const float4*>(K_smem + Tile::index(2 * t + e, k) + 8 * n * Tile::PAD);
#pragma unroll
          for (int i = 0; i < M; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
              // Four products at a time: a quarter as many roundings of the long sum.
              S_regs[i][n][2 * h + e] +=
                  fmaf(q[i][h].w, key.w, fmaf(q[i][h].z, key.z, fmaf(q[i][h].y, key.y, q[i][h].x * key.x)));
            }
        }
    }
  }
}

template <class Tile, int STEPS = (SCARCE ? SCARCE : 64), int M, int N, bool IN_REGS, int KEPT>
__device__ __forceinline__ void scores(float (&S_regs)[M][N][4], const QueryRows<Tile, M, IN_REGS, KEPT>& Q, const Element* K_smem,
                                       unsigned at = place_of_keys<Tile>()) {
  scores<Tile, STEPS>(S_regs, Q, shared_address(K_smem), at);
}

// O += P V for 16 rows of V, whose weights are first operands:  P_frag (16 M x 16), 16 x 8 C of V at `V_at` -> O_regs (16 M x 8 C)
template <class Tile, int M, int C>
__device__ __forceinline__ void add_sixteen(float (&O_regs)[M][C][4], const unsigned (&P_frag)[M][4], unsigned V_at) {
  typedef typename Tile::Type T;
  const int lane = threadIdx.x % 32;
  const unsigned at = Tile::index(lane % 16, lane / 16 * 8) * sizeof(T);
#pragma unroll
  for (int n = 0; n < C / 2; n++) {
    unsigned V_frag[4];
    if (SCARCE && n % 4 == 0) __syncwarp();  // no fragment is loaded ahead of it
    load_matrices_transposed(V_frag, V_at + Tile::right(at, 2 * n));
#pragma unroll
    for (int i = 0; i < M; i++) {
      mma(T(), O_regs[i][2 * n], P_frag[i], V_frag[0], V_frag[1]);
      mma(T(), O_regs[i][2 * n + 1], P_frag[i], V_frag[2], V_frag[3]);
    }
  }
}

// The same with weights that are accumulators, of columns 16 k to 16 k + 15: those are laid out as the first operand of the next
// product, once rounded.
template <class Tile, int M, int N, int C>
__device__ __forceinline__ void add_sixteen(float (&O_regs)[M][C][4], const float (&P_regs)[M][N][4], unsigned V_at, int k) {
  unsigned P_frag[M][4];
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const float(&p)[4] = P_regs[i][2 * k + r / 2];
      P_frag[i][r] = pack(typename Tile::Type(), p[r % 2 * 2], p[r % 2 * 2 + 1]);
    }
  add_sixteen<Tile>(O_regs, P_frag, V_at);
}

// Products of floats: a lane's part of P V for row 8 n + first + k of V, where `first` is 0 or 4. Rows four apart are permuted alike, but
// for the lowest bit.
template <class Tile> struct FloatProducts {
  const Element* V_smem;
  const int t = threadIdx.x % 4;

  // Weights of that row, for rows 16 i + g and 16 i + g + 8 of P. P[row][8 n + k] is with lane k / 2 of the four.
  template <int M, int N>
  __device__ __forceinline__ void weights(float (&p)[M][2], const float (&P_regs)[M][N][4], int n, int first, int k) const {
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) p[i][h] = __shfl_sync(~0u, P_regs[i][n][2 * h + k % 2], first / 2 + k / 2, 4);
  }

  // sum += p V for columns 8 c + 2 t and the next. They are in chunk 2 c + t / 2, which is permuted by x: its even part is known to
  // the compiler.
  template <int M> __device__ __forceinline__ void add(float (&sum)[M][4], const float (&p)[M][2], int n, int first, int k, int c) const {
    const int x = Tile::permutation(k), odd = x % 2 ^ first / 4;
    const Element* V_row = V_smem + (8 * n + first + k) * Tile::PAD + (t / 2 ^ odd) * 4 + t % 2 * 2;
    const float2 value = *reinterpret_cast<const float2*>(V_row + ((2 * c) ^ (x / 2 * 2)) * 4);
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        sum[i][2 * h] = fmaf(p[i][h], value.x, sum[i][2 * h]);
        sum[i][2 * h + 1] = fmaf(p[i][h], value.y, sum[i][2 * h + 1]);
      }
  }
};

// O += P V:  P_regs (16 M x 8 N), (8 N x 8 C, rows of PAD) of V at `V_at` -> O_regs (16 M x 8 C). Floats are summed eight at a time:
// an eighth as many roundings of the long sum.
template <class Tile, int M, int N, int C>
__device__ __forceinline__ void add_weighted_values(float (&O_regs)[M][C][4], const float (&P_regs)[M][N][4],
                                                    unsigned V_at) {
  if constexpr (sizeof(typename Tile::Type) == 2) {
#pragma unroll
    for (int k = 0; k < N / 2; k++) add_sixteen<Tile>(O_regs, P_regs, V_at + k * 16 * Tile::ROW_BYTES, k);
  } else {
    const FloatProducts<Tile> V = {static_cast<const Element*>(__cvta_shared_to_generic(V_at))};
#pragma unroll
    for (int n = 0; n < N; n++) {
      if (SCARCE) __syncwarp();  // no value is loaded ahead of it
      float p[8][M][2];
#pragma unroll
      for (int k = 0; k < 8; k++) V.weights(p[k], P_regs, n, 0, k);
#pragma unroll
      for (int c = 0; c < C; c++) {
        float sum[M][4] = {};
#pragma unroll
        for (int k = 0; k < 8; k++) V.add(sum, p[k], n, 0, k, c);
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
          for (int e = 0; e < 4; e++) O_regs[i][c][e] += sum[i][e];
      }
    }
  }
}

// The same with floats of all 8 N keys summed before they are added: the long sum is rounded once a tile. Up to 16 tiles of 16 rows x 8
// columns are summed at once; of more, which would take too many registers beside O's, only some, and the weights are fetched again for
// the next.
template <class Tile, int M, int N, int C>
__device__ __forceinline__ void add_tile_of_values(float (&O_regs)[M][C][4], const float (&P_regs)[M][N][4], unsigned V_at) {
  if constexpr (sizeof(typename Tile::Type) == 2) {
    add_weighted_values<Tile>(O_regs, P_regs, V_at);
  } else {
    const FloatProducts<Tile> V = {static_cast<const Element*>(__cvta_shared_to_generic(V_at))};
    constexpr int COLS = M * C <= 16 ? C : (SCARCE ? 4 : 8) / M;
    // Of each eight rows of V the first four, then the others, by the same code. (A loop takes registers, too.)
    constexpr int TURN = SCARCE ? 8 : 4;
#pragma unroll
    for (int c0 = 0; c0 < C; c0 += COLS) {
      float sums[COLS][M][4] = {};
#pragma unroll 1
      for (int first = 0; first < 8; first += TURN)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
          for (int k = 0; k < TURN; k++) {
            if (SCARCE) __syncwarp();  // no value is loaded ahead of it
            float p[M][2];
            V.weights(p, P_regs, n, first, k);
#pragma unroll
            for (int c = 0; c < COLS; c++)
              if (c0 + c < C) V.add(sums[c], p, n, first, k, c0 + c);
          }
#pragma unroll
      for (int c = 0; c < COLS; c++)
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
          for (int e = 0; e < 4; e++)
            if (c0 + c < C) O_regs[i][c0 + c][e] += sums[c][i][e];
    }
  }
}

template <class Tile, int M, int N, int C>
__device__ __forceinline__ void add_weighted_values(float (&O_regs)[M][C][4], const float (&P_regs)[M][N][4],
                                                    const Element* V_smem) {
  add_weighted_values<Tile>(O_regs, P_regs, shared_address(V_smem));
}

// The same with weights in SRAM, of half types: 16 K of them a row, from column `col` on, a multiple of 16 K (a power of two).
//   P_smem (16 M rows of PAD), V_smem (16 K x 8 C, rows of PAD) -> O_regs (16 M x 8 C)
template <class Tile, class ScoreTile, int K, int M, int C>
__device__ __forceinline__ void add_stored_values(float (&O_regs)[M][C][4], const Element* P_smem, int col, const Element* V_smem) {
  const int lane = threadIdx.x % 32;
  const unsigned P_at = ScoreTile::right(shared_address(P_smem + ScoreTile::index(lane % 16, lane / 16 * 8)), col / 8);
#pragma unroll
  for (int k = 0; k < K; k++) {
    unsigned P_frag[M][4];
#pragma unroll
    for (int i = 0; i < M; i++) load_matrices(P_frag[i], ScoreTile::right(P_at, 2 * k) + i * 16 * ScoreTile::ROW_BYTES);
    add_sixteen<Tile>(O_regs, P_frag, shared_address(V_smem) + k * 16 * Tile::ROW_BYTES);
  }
}

template <int M, int C> __device__ __forceinline__ void multiply(float (&regs)[M][C][4], float by) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < C; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) regs[m][n][e] *= by;
}

// A warp's accumulators to a tile in SRAM:  regs (16 M x 8 C) -> 16 M rows of PAD at tile_smem, from column `col` on, a multiple of
// 8 C (a power of two) or 0
template <class Tile, int M, int C>
__device__ __forceinline__ void put_tile(Element* tile_smem, const float (&regs)[M][C][4], int col = 0) {
  typedef typename Tile::Type T;
  constexpr int CHUNKS = 8 * sizeof(T) / 16;  // of 8 columns
  const int lane = threadIdx.x % 32;
  const unsigned at = Tile::right(shared_address(tile_smem + Tile::index(lane / 4, lane % 4 * 2)), col / 8 * CHUNKS);
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < C; n++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        store_two(T(), Tile::right(at, n * CHUNKS) + (16 * m + 8 * h) * Tile::ROW_BYTES, regs[m][n][2 * h],
                  regs[m][n][2 * h + 1]);
}

// dQ = dS K for 16 A rows from `row` on and 16 C columns from tile `tile` of 16 columns on; columns beyond PAD are 0.
//   dS_smem (KEYS x rows of dS, transposed), K_smem (KEYS x PAD) -> dQ_regs (16 A x 16 C)
template <class Tile, class ScoreTile, int KEYS, int A, int C>
__device__ __forceinline__ void transposed_product(float (&dQ_regs)[A][C][2][4], const Element* dS_smem, int row,
                                                   const Element* K_smem, int tile) {
  typedef typename Tile::Type T;
  constexpr int TILES = Tile::PAD / 16;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int a = 0; a < A; a++)
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int e = 0; e < 4; e++) dQ_regs[a][c][half][e] = 0.f;
  if constexpr (sizeof(T) == 2) {
    unsigned dS_at[A], K_at[C];
#pragma unroll
    for (int a = 0; a < A; a++)
      dS_at[a] = shared_address(dS_smem + ScoreTile::index(lane % 8 + lane / 16 * 8, row + 16 * a + lane / 8 % 2 * 8));
#pragma unroll
    for (int c = 0; c < C; c++) K_at[c] = shared_address(K_smem + Tile::index(lane % 16, 16 * (tile + c) + lane / 16 * 8));
#pragma unroll(SCARCE ? (C > 4 ? 2 : 4) : KEYS)
    for (int k = 0; k < KEYS; k += 16) {
      unsigned dS_frag[A][4], K_frag[4];
#pragma unroll
      for (int a = 0; a < A; a++) load_matrices_transposed(dS_frag[a], dS_at[a] + k * ScoreTile::ROW_BYTES);
#pragma unroll
      for (int c = 0; c < C; c++) {
        if (TILES % C != 0 && tile + c >= TILES) continue;  // no break, for which the loop would stay one, with dQ_regs in memory
        load_matrices_transposed(K_frag, K_at[c] + k * Tile::ROW_BYTES);
#pragma unroll
        for (int a = 0; a < A; a++) {
          mma(T(), dQ_regs[a][c][0], dS_frag[a], K_frag[0], K_frag[1]);
          mma(T(), dQ_regs[a][c][1], dS_frag[a], K_frag[2], K_frag[3]);
        }
      }
    }
  } else {
    const int g = lane / 4, t = lane % 4;
#pragma unroll 2
    for (int k = 0; k < KEYS; k++) {
      float s[A][2];
#pragma unroll
      for (int a = 0; a < A; a++)
#pragma unroll
        for (int h = 0; h < 2; h++) s[a][h] = dS_smem[ScoreTile::index(k, row + 16 * a + g + 8 * h)];
#pragma unroll
      for (int c = 0; c < C; c++) {
        if (TILES % C != 0 && tile + c >= TILES) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float2 key = *reinterpret_cast<const float2*>(K_smem + Tile::index(k, 16 * (tile + c) + 8 * half + 2 * t));
#pragma unroll
          for (int a = 0; a < A; a++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
              dQ_regs[a][c][half][2 * h] = fmaf(s[a][h], key.x, dQ_regs[a][c][half][2 * h]);
              dQ_regs[a][c][half][2 * h + 1] = fmaf(s[a][h], key.y, dQ_regs[a][c][half][2 * h + 1]);
            }
        }
      }
    }
  }
}
