// Which keys a query row sees, and what is added to their scores. Causal is aligned bottom-right: row r sees columns up to
// r + diagonal, where diagonal = Nk - Nq; a window those from r + diagonal - left to r + diagonal + right; keys from `keys` on
// do not exist; a mask and a bias speak for each score.
// Constants: CAUSAL, WINDOW, BIAS, PADDED (0 or 1: what is 0 is compiled out), MASK (0; or as in mask_function.cuh), SUB; PACK, where
// it is not 1: the query heads whose rows are in one tile, so that row r is query r / PACK; SCORE (score.cuh).
#pragma once
#include "element.cuh"
#include "mask_function.cuh"
#include "params.cuh"
#include "score.cuh"
#include "score_parts.cuh"
#ifndef PACK
#define PACK 1
#endif
// Whether what is added to scores, or made of them, takes them scaled
#define SCALED (BIAS || SCORE)

using Bias = decltype(((Params*)nullptr)->bias.at);  // const Element*, or const float* beside half types

// The masks of one (batch, head).
struct Masks {
  const Params* p;
  PartOfHead of_head;
  unsigned of_rows, of_keys;  // score_parts.cuh: where in shared memory the functions' parts of row 0 and key 0 would be
  int batch, head, keys, diagonal, left, right;
  const unsigned char* mask;  // (Nq x Nk), nonzero where row and column go together
  long long mask_row, mask_col;
  Bias bias;  // (Nq x Nk)
  long long bias_row, bias_col;
};

// Where the columns that a row sees begin and end, for all that the boolean mask says.
__device__ __forceinline__ int visible_begin(const Masks& masks, int row) {
  return WINDOW ? max(0, row + masks.diagonal - masks.left) : 0;
}
__device__ __forceinline__ int visible_end(const Masks& masks, int row) {
  const int end = row + 1 + masks.diagonal + (WINDOW ? masks.right : 0);
  return CAUSAL || WINDOW ? max(0, min(masks.keys, end)) : masks.keys;
}

// Those of a (batch, head) with so many queries, and of Nk keys `keys` that there are.
__device__ __forceinline__ Masks masks_of(const Params& p, int batch, int head, int Nq, int Nk, int keys) {
  return {&p,         {},         0,          0,
          batch,      head,       keys,       Nk - Nq,
          p.left,     p.right,    p.mask.of(batch, head),
          p.mask.row, p.mask.col, p.bias.of(batch, head),
          p.bias.row, p.bias.col};
}

// How many of its Nk keys a batch has. One thread reads it for the block, through 4 bytes of `scratch` in shared memory, which
// is free again when this returns.
__device__ __forceinline__ int count_keys(const Params& p, int batch, int Nk, void* scratch) {
  if constexpr (!PADDED) return Nk;
  int* keys = static_cast<int*>(scratch);
  if (threadIdx.x == 0) *keys = max(0, min(Nk, p.key_lengths[batch]));
  __syncthreads();
  int found = *keys;
  __syncthreads();
  return found;
}

// One element of a mask or bias. The loads stay where they stand: batched ahead of their use, as a compiler likes them,
// they take registers that the wide head dimensions do not have.
__device__ __forceinline__ bool load_in_place(const unsigned char* at) {
  unsigned value;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(value) : "l"(at));
  return value != 0;
}
__device__ __forceinline__ float load_in_place(const float* at) {
  float value;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(at));
  return value;
}
template <typename T> __device__ __forceinline__ float load_in_place(const T* at) {
  unsigned short bits;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(bits) : "l"(at));
  return to_float(*reinterpret_cast<T*>(&bits));
}

// Where a score is, for a score function; what that has for its row and its key; and what it makes of the scaled score.
__device__ __forceinline__ ScoreAt score_at(const Masks& masks, int row, int key, int Nq) {
  return {masks.batch, masks.head, row, key, Nq, Nq + masks.diagonal};
}
#if ROW_LOADS || KEY_LOADS
#define PART_ROWS BR
#define PART_KEYS BC
#else
#define PART_ROWS 0
#define PART_KEYS 0
#endif
// The score's words, and the mask's
__device__ __forceinline__ PartOfRow of_row(const Masks& masks, int row) {
  return part_at<PartOfRow, 0, SCORE_ROW_LOADS, PART_ROWS>(masks.of_rows, row);
}
__device__ __forceinline__ PartOfKey of_key(const Masks& masks, int key) {
  return part_at<PartOfKey, 0, SCORE_KEY_LOADS, PART_KEYS>(masks.of_keys, key);
}
__device__ __forceinline__ PartOfRow asked_of_row(const Masks& masks, int row) {
  return part_at<PartOfRow, SCORE_ROW_LOADS, MASK_ROW_LOADS, PART_ROWS>(masks.of_rows, row);
}
__device__ __forceinline__ PartOfKey asked_of_key(const Masks& masks, int key) {
  return part_at<PartOfKey, SCORE_KEY_LOADS, MASK_KEY_LOADS, PART_KEYS>(masks.of_keys, key);
}
__device__ __forceinline__ Scored scored_at(const Masks& masks, const PartOfRow& of_row, float s, int row, int key, int Nq) {
  return score_of(*masks.p, masks.of_head, of_row, of_key(masks, key), s, score_at(masks, row, key, Nq));
}

// What the mask says of a score that position leaves; a condition is given what it has for the row.
__device__ __forceinline__ bool mask_says(const Masks& masks, const PartOfRow& asked_row, int row, int key, int Nq) {
#if MASK == 2
  return mask_holds(*masks.p, masks.of_head, asked_row, asked_of_key(masks, key), score_at(masks, row, key, Nq));
#else
  return load_in_place(masks.mask + row * masks.mask_row + key * masks.mask_col);
#endif
}

// Scales S, adds `bias_scale` times the bias, and sets what a row does not see to -inf. Each step rounds, so that a score is the
// same number in every kernel: of a large one the last digits count. Where there is a score function, S is scaled as that takes it,
// and what becomes of it is multiplied by `bias_scale`, too; with SLOPES `slopes` has its derivative where a row sees it.
// The mask is asked unless the tile is known to be whole.
//   S_regs (16 x SUB): rows (row0 + 8 h) / PACK, columns from col0 on, in the accumulator layout of warp_product.cuh
template <bool SLOPES = false>
__device__ __forceinline__ void scale_and_mask(float (&S_regs)[SUB / 8][4], float scale, float bias_scale, const Masks& masks,
                                               int row0, int col0, int Nq, bool asks = true, float (*slopes)[4] = nullptr) {
  const int first = col0 + threadIdx.x % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = (row0 + 8 * h) / PACK, begin = visible_begin(masks, row), end = row < Nq ? visible_end(masks, row) : 0;
    PartOfRow own = {}, asked = {};
    if (row < Nq) own = of_row(masks, row);
    if (row < Nq && asks) asked = asked_of_row(masks, row);
    const unsigned char* mask = masks.mask + row * masks.mask_row + first * masks.mask_col;
    Bias bias = masks.bias + row * masks.bias_row + first * masks.bias_col;
#pragma unroll
    for (int n = 0; n < SUB / 8; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        bool seen = first + 8 * n + e < end && (!WINDOW || first + 8 * n + e >= begin);
        float s = __fmul_rn(S_regs[n][2 * h + e], SCORE ? masks.p->scale : scale);
        if constexpr (SCORE) {
          Scored scored = {};
          if (seen || !SCORE_LOADS) scored = scored_at(masks, own, s, row, first + 8 * n + e, Nq);
          s = bias_scale * scored.value;
          if constexpr (SLOPES) slopes[n][2 * h + e] = scored.slope;
        }
        if constexpr (BIAS) {
          if (seen) s = fmaf(bias_scale, load_in_place(bias + e * masks.bias_col), s);
        }
        if constexpr (MASK == 2) {
          if (seen && asks) seen = mask_says(masks, asked, row, first + 8 * n + e, Nq);
        } else if constexpr (MASK) {
          if (seen && asks) seen = load_in_place(mask + e * masks.mask_col);
        }
        S_regs[n][2 * h + e] = seen ? s : NEG_INF;
      }
      mask += 8 * masks.mask_col;
      bias += 8 * masks.bias_col;
    }
  }
}

// Calls visit(n, e, row, key, seen) for each element S_regs[n][e] of S^T, whose rows are keys; `seen` is what the positions say.
//   S_regs (16 x 8 N): keys key0 + 8 h, queries from query0 on
template <int N, class Visit>
__device__ __forceinline__ void each_score_transposed(const Masks& masks, int key0, int query0, int Nq, Visit visit) {
  const int first = query0 + threadIdx.x % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    // The queries that see a key, counted from the first of this lane's
    const int key = key0 + 8 * h, own = key - masks.diagonal;
    const int begin = CAUSAL || WINDOW ? own - (WINDOW ? masks.right : 0) - first : 0;
    const int last = key >= masks.keys ? -1 : (WINDOW ? min(Nq - 1, own + masks.left) : Nq - 1) - first;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = 8 * n + e;
        visit(n, 2 * h + e, first + row, key, row <= last && (!(CAUSAL || WINDOW) || row >= begin));
      }
  }
}
