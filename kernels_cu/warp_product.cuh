// The products of attention for the 16 rows of one warp. All keep their result in the accumulator layout of
// mma m16n8 (PTX ISA, "Matrix fragments for mma.m16n8k16"): with g = lane / 4 and t = lane % 4, element e of column
// tile n is row g + 8 (e / 2), column 8 n + 2 t + e % 2. Half types run on tensor cores, float in ordinary FMAs.
// Constants: HEAD_DIM, VALUE_DIM, ELEMENT (element.cuh); SUB (columns of S in registers at a time).
#pragma once
#include "mma.cuh"
#include "tile_copy.cuh"

// S = Q K^T:  Q_smem (16 x WIDTH, padded), K_smem (SUB x WIDTH, padded) -> S_regs (16 x SUB)
template <int WIDTH = HEAD_DIM, typename T>
__device__ __forceinline__ void scores(float (&S_regs)[SUB / 8][4], const T* Q_smem, const T* K_smem) {
  constexpr int PAD = padded(WIDTH), ROW = row_elements(WIDTH);
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < SUB / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) S_regs[n][e] = 0.f;
  if constexpr (sizeof(T) == 2) {
#pragma unroll(PAD > 128 ? 4 : PAD / 16)
    for (int k = 0; k < PAD; k += 16) {
      unsigned Q_frag[4], K_frag[4];
      load_matrices(Q_frag, shared_address(Q_smem + lane % 16 * ROW + k + lane / 16 * 8));
#pragma unroll
      for (int n = 0; n < SUB / 16; n++) {
        load_matrices(K_frag, shared_address(K_smem + (16 * n + lane % 8 + lane / 16 * 8) * ROW + k + lane / 8 % 2 * 8));
        mma(T(), S_regs[2 * n], Q_frag, K_frag[0], K_frag[1]);
        mma(T(), S_regs[2 * n + 1], Q_frag, K_frag[2], K_frag[3]);
      }
    }
  } else {
    int g = lane / 4, t = lane % 4;
#pragma unroll(PAD > 128 ? 1 : 2)
    for (int k = 0; k < PAD; k += 4) {
      float4 q[2], key;
#pragma unroll
      for (int h = 0; h < 2; h++) q[h] = *reinterpret_cast<const float4*>(Q_smem + (g + 8 * h) * ROW + k);
#pragma unroll
      for (int n = 0; n < SUB / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          key = *reinterpret_cast<const float4*>(K_smem + (8 * n + 2 * t + e) * ROW + k);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float& s = S_regs[n][2 * h + e];
            // Four products at a time: a quarter as many roundings of the long sum.
            s += fmaf(q[h].w, key.w, fmaf(q[h].z, key.z, fmaf(q[h].y, key.y, q[h].x * key.x)));
          }
        }
    }
  }
}

// O += P V:  P_regs (16 x SUB), V_smem (SUB x 8 TILES, rows of ROW elements) -> O_regs (16 x 8 TILES)
template <int ROW = DV_ROW, int TILES, typename T>
__device__ __forceinline__ void add_weighted_values(float (&O_regs)[TILES][4], const float (&P_regs)[SUB / 8][4],
                                                    const T* V_smem) {
  int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int k = 0; k < SUB / 16; k++) {
      // An accumulator pair is already laid out as A of the next product, once rounded.
      unsigned P_frag[4], V_frag[4];
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const float(&p)[4] = P_regs[2 * k + r / 2];
        P_frag[r] = pack(T(), p[r % 2 * 2], p[r % 2 * 2 + 1]);
      }
#pragma unroll
      for (int n = 0; n < TILES / 2; n++) {
        load_matrices_transposed(V_frag, shared_address(V_smem + (16 * k + lane % 16) * ROW + 16 * n + lane / 16 * 8));
        mma(T(), O_regs[2 * n], P_frag, V_frag[0], V_frag[1]);
        mma(T(), O_regs[2 * n + 1], P_frag, V_frag[2], V_frag[3]);
      }
    }
  } else {
    int t = lane % 4;
    // The products of all SUB keys are summed before they are added: a rounding of the long sum for each sub-tile, not for each key.
    // SUMMED column tiles are at a time, as registers allow; the weights are fetched again for the next.
    constexpr int SUMMED = TILES > 16 ? 8 : TILES;
#pragma unroll
    for (int c0 = 0; c0 < TILES; c0 += SUMMED) {
      float sums[SUMMED][4] = {};
#pragma unroll
      for (int n = 0; n < SUB / 8; n++)
#pragma unroll 1
        for (int holder = 0; holder < 4; holder++)  // of the four lanes that share a row this one has P[row][8 n + 2 holder], and the next
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float p0 = __shfl_sync(~0u, P_regs[n][e], holder, 4), p1 = __shfl_sync(~0u, P_regs[n][2 + e], holder, 4);
#pragma unroll
            for (int c = 0; c < SUMMED; c++) {
              if (c0 + c >= TILES) continue;
              float2 value = *reinterpret_cast<const float2*>(V_smem + (8 * n + 2 * holder + e) * ROW + 8 * (c0 + c) + 2 * t);
              sums[c][0] = fmaf(p0, value.x, sums[c][0]);
              sums[c][1] = fmaf(p0, value.y, sums[c][1]);
              sums[c][2] = fmaf(p1, value.x, sums[c][2]);
              sums[c][3] = fmaf(p1, value.y, sums[c][3]);
            }
          }
#pragma unroll
      for (int c = 0; c < SUMMED; c++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (c0 + c < TILES) O_regs[c0 + c][e] += sums[c][e];
    }
  }
}

// C += A^T B for 16 columns of A and of B:  A_smem (depth x 16, rows of A_ROW elements), B_smem (depth x 16, rows of B_ROW),
// depth a multiple of 16 -> C_regs (16 x 16)
template <int A_ROW, int B_ROW, typename T>
__device__ __forceinline__ void add_transposed_product(float (&C_regs)[2][4], const T* A_smem, const T* B_smem, int depth) {
  int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 2) {
    for (int k = 0; k < depth; k += 16) {
      unsigned A_frag[4], B_frag[4];
      load_matrices_transposed(A_frag, shared_address(A_smem + (k + lane % 8 + lane / 16 * 8) * A_ROW + lane / 8 % 2 * 8));
      load_matrices_transposed(B_frag, shared_address(B_smem + (k + lane % 16) * B_ROW + lane / 16 * 8));
      mma(T(), C_regs[0], A_frag, B_frag[0], B_frag[1]);
      mma(T(), C_regs[1], A_frag, B_frag[2], B_frag[3]);
    }
  } else {
    int g = lane / 4, t = lane % 4;
    for (int k = 0; k < depth; k++) {
      float a0 = A_smem[k * A_ROW + g], a1 = A_smem[k * A_ROW + g + 8];
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float2 b = *reinterpret_cast<const float2*>(B_smem + k * B_ROW + 8 * n + 2 * t);
        C_regs[n][0] = fmaf(a0, b.x, C_regs[n][0]);
        C_regs[n][1] = fmaf(a0, b.y, C_regs[n][1]);
        C_regs[n][2] = fmaf(a1, b.x, C_regs[n][2]);
        C_regs[n][3] = fmaf(a1, b.y, C_regs[n][3]);
      }
    }
  }
}
