// Which weights are dropped: by numbers of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), whose
// counter is made of batch, head, row and key, so that it is the same weights in every kernel, tile and order.
//
// A call gives eight numbers of 16 bits, for rows r, r + 8, r + 16, r + 24 and keys k, k + 8, where r % 32 < 8 and k % 16 < 8. One lane
// has those weights in the accumulator layout of 32 rows of S, and of 32 columns of S^T: forward and backward both use all of a call. It
// takes 20 wide multiplications and as many xors; with what it takes to compare and choose, 8 instructions a weight. By the clock model
// A100's forward in float16 then has 0.64 of mma.sync's peak for 0.81 at d 64, 0.72 for 0.87 at d 128, the backward 0.64 for 0.73 and
// 0.64 for 0.69. Numbers of 32 bits would take twice the calls; of 8 bits half as many, where a warp has 32 rows and 32 keys, but make
// p = 0.1 a p of 0.1016, and have none below 0.004.
// Constants: DROPOUT (whether the call drops weights).
#pragma once
#include "params.cuh"
#ifndef DROPOUT
#define DROPOUT 0
#endif

// Of rows r + 8 i word i, of key k its low half and of key k + 8 its high half
struct RandomWords {
  unsigned of[4];
};

__device__ __forceinline__ RandomWords philox(unsigned c0, unsigned c1, unsigned c2, unsigned c3, unsigned k0, unsigned k1) {
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const unsigned long long a = 0xD2511F53ull * c0, b = 0xCD9E8D57ull * c2;
    c0 = static_cast<unsigned>(b >> 32) ^ c1 ^ (k0 + round * 0x9E3779B9u);
    c2 = static_cast<unsigned>(a >> 32) ^ c3 ^ (k1 + round * 0xBB67AE85u);
    c1 = static_cast<unsigned>(b);
    c3 = static_cast<unsigned>(a);
  }
  return {{c0, c1, c2, c3}};
}

// What decides over the weights of one (batch, head)
struct Dropout {
  unsigned row, key, pair;  // the first of the call's: groups of rows and keys, and the (batch, head)
  unsigned offset, seed_low, seed_high;
  unsigned threshold;  // numbers below this are dropped; in the high half
  float scale;         // of the weights that are kept: 1 / (1 - p)

  // Of the rows and keys like these
  __device__ __forceinline__ RandomWords words(unsigned row, unsigned key) const {
    return philox(this->row + row / 32 * 8 + row % 8, this->key + key / 16 * 8 + key % 8, pair, offset, seed_low, seed_high);
  }
  // Of key k (`upper` 0) or k + 8 (1)
  __device__ __forceinline__ bool keeps(unsigned word, int upper) const { return (upper ? word : word << 16) >= threshold; }

  // One weight by itself
  __device__ __forceinline__ bool keeps_at(unsigned row, unsigned key) const {
    const RandomWords words = this->words(row, key);
    const unsigned low = row / 8 % 2 ? words.of[1] : words.of[0], high = row / 8 % 2 ? words.of[3] : words.of[2];
    return keeps(row / 16 % 2 ? high : low, key / 8 % 2);
  }
};

__device__ __forceinline__ Dropout dropout_of(const Params& p, int batch, int head) {
#if DROPOUT
  const unsigned pair = p.dropout_pair + (static_cast<unsigned>(batch) << 16) + static_cast<unsigned>(head);
  return {p.dropout_row,      p.dropout_key,       pair,                p.dropout_offset,
          p.dropout_seed_low, p.dropout_seed_high, p.dropout_threshold, p.dropout_scale};
#else
  return {};
#endif
}

// Calls visit(weight, kept) for each weight of 16 keys from `key0` on, a multiple of 16; M is 1 or 2.
//   P (16 M x 8 N), of which tiles n and n + 1 are these keys: rows from `row0` on, a multiple of 16 M, in the layout of mma.cuh
template <int M, int N, class Visit>
__device__ __forceinline__ void each_weight(float (&P)[M][N][4], const Dropout& dropout, int n, unsigned row0, unsigned key0,
                                            Visit visit) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const RandomWords words = dropout.words(row0 + g, key0 + 2 * t + e);
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const unsigned word = M == 1 && row0 / 16 % 2 ? words.of[2 + h] : words.of[2 * i + h];
#pragma unroll
        for (int upper = 0; upper < 2; upper++) visit(P[i][n + upper][2 * h + e], dropout.keeps(word, upper));
      }
  }
}
template <int N, class Visit>
__device__ __forceinline__ void each_weight(float (&P)[N][4], const Dropout& dropout, unsigned row0, unsigned key0, Visit visit) {
  auto& one = reinterpret_cast<float(&)[1][N][4]>(P);
#pragma unroll
  for (int n = 0; n < N; n += 2) each_weight(one, dropout, n, row0, key0 + 8 * n, visit);
}

// The same of S^T:  P (16 x 8 N): keys from `key0` on, rows from `row0` on, both multiples of 16; of 32 where rows are WHOLE
template <bool WHOLE, int N, class Visit>
__device__ __forceinline__ void each_weight_transposed(float (&P)[N][4], const Dropout& dropout, unsigned key0, unsigned row0,
                                                       Visit visit) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  constexpr int TILES = WHOLE ? 4 : 2;  // that a call is for
#pragma unroll
  for (int n = 0; n < N; n += TILES)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const unsigned row = row0 + 8 * n;
      const RandomWords words = dropout.words(row + 2 * t + e, key0 + g);
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        const unsigned word = !WHOLE && row / 16 % 2 ? words.of[2 + i] : words.of[i];
#pragma unroll
        for (int h = 0; h < 2; h++) visit(P[n + i][2 * h + e], dropout.keeps(word, h));
      }
    }
}

// What a forward multiplies with V, but for the scale
struct Drop {
  __device__ __forceinline__ void operator()(float& weight, bool kept) const { weight = kept ? weight : 0.f; }
};
// A backward needs both, the weight and whether it is kept: one that is dropped gets a sign.
struct MarkDropped {
  __device__ __forceinline__ void operator()(float& weight, bool kept) const { weight = kept ? weight : -weight; }
};
// dS = P * (Z dP / (1 - p) - D), of a weight that may be marked
__device__ __forceinline__ float score_gradient(float weight, float dP, float D, float scale) {
  if constexpr (!DROPOUT) return weight * (dP - D);
  return fabsf(weight) * fmaf(dP, weight < 0.f ? 0.f : scale, -D);
}
// Those of P, which may be marked, that V was multiplied by
template <class Weights> struct KeptWeights {
#if DROPOUT
  Weights of;
  __device__ __forceinline__ explicit KeptWeights(const Weights& P) {
    float* to = reinterpret_cast<float*>(&of);
#pragma unroll
    for (int n = 0; n < static_cast<int>(sizeof(Weights) / sizeof(float)); n++) to[n] = fmaxf(reinterpret_cast<const float*>(&P)[n], 0.f);
  }
#else
  const Weights& of;
  __device__ __forceinline__ explicit KeptWeights(const Weights& P) : of(P) {}
#endif
};
