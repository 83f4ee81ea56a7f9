// Which keys a query row sees. Causal is aligned bottom-right: row r sees columns up to r + Nk - Nq.
// Constants: CAUSAL (0 or 1), SUB.
#pragma once

__device__ __forceinline__ int visible_end(int row, int Nq, int Nk) {
  return CAUSAL ? max(0, min(Nk, row + 1 + Nk - Nq)) : Nk;
}

// Scales S and sets what a row does not see to -inf.
//   S_regs (16 x SUB): rows row0 + 8 h, columns from col0 on, in the accumulator layout of warp_product.cuh
__device__ __forceinline__ void scale_and_mask(float (&S_regs)[SUB / 8][4], float scale, int row0, int col0, int Nq, int Nk) {
  int t = threadIdx.x % 4;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int end = visible_end(row0 + 8 * h, Nq, Nk);
#pragma unroll
    for (int n = 0; n < SUB / 8; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& s = S_regs[n][2 * h + e];
        s = col0 + 8 * n + 2 * t + e < end ? s * scale : NEG_INF;
      }
  }
}
