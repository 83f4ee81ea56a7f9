// The two products of attention for the 16 rows of one warp. Both keep their result in the accumulator layout of
// mma m16n8 (PTX ISA, "Matrix fragments for mma.m16n8k16"): with g = lane / 4 and t = lane % 4, element e of column
// tile n is row g + 8 (e / 2), column 8 n + 2 t + e % 2. Half types run on tensor cores, float in ordinary FMAs.
// Constants: D, DV, ELEMENT (element.cuh); SUB (columns of S in registers at a time).
#pragma once
#include "tile_copy.cuh"

__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const Element* row_smem) {
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row_smem));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], const Element* row_smem) {
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row_smem));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

// C += A B with A (16 x 16), B (16 x 8), C (16 x 8) spread over the warp.
__device__ __forceinline__ void mma(__half, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else  // Turing multiplies half as deep
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

__device__ __forceinline__ void mma(__nv_bfloat16, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// S = Q K^T:  Q_smem (16 x D_PAD), K_smem (SUB x D_PAD) -> S_regs (16 x SUB)
template <typename T> __device__ __forceinline__ void scores(float (&S_regs)[SUB / 8][4], const T* Q_smem, const T* K_smem) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < SUB / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) S_regs[n][e] = 0.f;
  if constexpr (sizeof(T) == 2) {
#pragma unroll(D_PAD > 128 ? 4 : D_PAD / 16)
    for (int k = 0; k < D_PAD; k += 16) {
      unsigned Q_frag[4], K_frag[4];
      load_matrices(Q_frag, Q_smem + lane % 16 * D_ROW + k + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < SUB / 16; n++) {
        load_matrices(K_frag, K_smem + (16 * n + lane % 8 + lane / 16 * 8) * D_ROW + k + lane / 8 % 2 * 8);
        mma(T(), S_regs[2 * n], Q_frag, K_frag[0], K_frag[1]);
        mma(T(), S_regs[2 * n + 1], Q_frag, K_frag[2], K_frag[3]);
      }
    }
  } else {
    int g = lane / 4, t = lane % 4;
#pragma unroll(D_PAD > 128 ? 1 : 2)
    for (int k = 0; k < D_PAD; k += 4) {
      float4 q[2], key;
#pragma unroll
      for (int h = 0; h < 2; h++) q[h] = *reinterpret_cast<const float4*>(Q_smem + (g + 8 * h) * D_ROW + k);
#pragma unroll
      for (int n = 0; n < SUB / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          key = *reinterpret_cast<const float4*>(K_smem + (8 * n + 2 * t + e) * D_ROW + k);
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

// O += P V:  P_regs (16 x SUB), V_smem (SUB x DV_PAD) -> O_regs (16 x DV_PAD)
template <typename T>
__device__ __forceinline__ void add_weighted_values(float (&O_regs)[DV_PAD / 8][4], const float (&P_regs)[SUB / 8][4],
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
      for (int n = 0; n < DV_PAD / 16; n++) {
        load_matrices_transposed(V_frag, V_smem + (16 * k + lane % 16) * DV_ROW + 16 * n + lane / 16 * 8);
        mma(T(), O_regs[2 * n], P_frag, V_frag[0], V_frag[1]);
        mma(T(), O_regs[2 * n + 1], P_frag, V_frag[2], V_frag[3]);
      }
    }
  } else {
    int t = lane % 4;
#pragma unroll
    for (int n = 0; n < SUB / 8; n++)
#pragma unroll
      for (int k = 0; k < 8; k++) {
        // P[row][8 n + k] is with lane k / 2 of the four that share the row.
        float p0 = __shfl_sync(~0u, P_regs[n][k % 2], k / 2, 4), p1 = __shfl_sync(~0u, P_regs[n][2 + k % 2], k / 2, 4);
#pragma unroll
        for (int c = 0; c < DV_PAD / 8; c++) {
          float2 value = *reinterpret_cast<const float2*>(V_smem + (8 * n + k) * DV_ROW + 8 * c + 2 * t);
          O_regs[c][0] = fmaf(p0, value.x, O_regs[c][0]);
          O_regs[c][1] = fmaf(p0, value.y, O_regs[c][1]);
          O_regs[c][2] = fmaf(p1, value.x, O_regs[c][2]);
          O_regs[c][3] = fmaf(p1, value.y, O_regs[c][3]);
        }
      }
  }
}

// Largest and sum over the four lanes that share a row.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
