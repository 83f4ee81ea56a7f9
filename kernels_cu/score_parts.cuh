// What score and mask functions read for a row or for a key, once for a tile of them: parts, of a word a load, in shared memory. The
// first words of a tile's rows (or keys) are side by side, then the second ones: the score's, then the mask's.
// Constants: SCORE_..., MASK_... (score.cuh), and where there are any parts BR and BC (rows and keys of a tile).
#pragma once
#include "params.cuh"
#include "score.cuh"

// `asks`: whether a mask is asked for any score of it
__device__ __forceinline__ PartOfRow read_of_row(const Params& p, const PartOfHead& of_head, const ScoreAt& at, bool asks) {
  PartOfRow of_row = {};
  SCORE_ROW_LINES
  if (asks) {
    MASK_ROW_LINES
  }
  return of_row;
}
__device__ __forceinline__ PartOfKey read_of_key(const Params& p, const PartOfHead& of_head, const ScoreAt& at, bool asks) {
  PartOfKey of_key = {};
  SCORE_KEY_LINES
  if (asks) {
    MASK_KEY_LINES
  }
  return of_key;
}

// The parts of SIZE rows or keys, on their way to shared memory through registers of THREADS threads: what is read early in a turn is
// stored late.
template <class Part, int WORDS, int SIZE, int THREADS> struct PartsOfTile {
  Part own[(SIZE + THREADS - 1) / THREADS];

  // The first `count`, each as `read` makes it
  template <class Read> __device__ __forceinline__ void load(int count, Read read) {
    if constexpr (WORDS > 0) {
#pragma unroll
      for (int i = 0; i < (SIZE + THREADS - 1) / THREADS; i++) {
        const int n = i * THREADS + threadIdx.x;
        own[i] = {};
        if (n < min(SIZE, count)) own[i] = read(n);
      }
    }
  }
  __device__ __forceinline__ void store(unsigned at) const {
    if constexpr (WORDS > 0) {
#pragma unroll
      for (int i = 0; i < (SIZE + THREADS - 1) / THREADS; i++) {
        const int n = i * THREADS + threadIdx.x;
        if (SIZE % THREADS != 0 && n >= SIZE) continue;
#pragma unroll
        for (int word = 0; word < WORDS; word++)
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + 4 * (word * SIZE + n)), "r"(reinterpret_cast<const unsigned*>(&own[i])[word]) : "memory");
      }
    }
  }
};

// Words FIRST and on of part `n` of SIZE, the first of which is at an address in shared memory. They are read where they stand: kept,
// they would take registers.
template <class Part, int FIRST, int WORDS, int SIZE> __device__ __forceinline__ Part part_at(unsigned at, int n) {
  Part part = {};
  if constexpr (WORDS > 0) {
#pragma unroll
    for (int word = FIRST; word < FIRST + WORDS; word++)
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(reinterpret_cast<unsigned*>(&part)[word]) : "r"(at + 4 * (word * SIZE + n)));
  }
  return part;
}

// The parts of the rows of a tile, from row at.row on, `count` of which there are
template <int SIZE, int THREADS> struct RowParts : PartsOfTile<PartOfRow, ROW_LOADS, SIZE, THREADS> {
  __device__ __forceinline__ void ask(const Params& p, const PartOfHead& of_head, const ScoreAt& at, int count, bool asks) {
    this->load(count, [&](int n) { return read_of_row(p, of_head, {at.batch, at.head, at.row + n, 0, at.queries, at.keys}, asks); });
  }
};
// and of the keys, from at.key on
template <int SIZE, int THREADS> struct KeyParts : PartsOfTile<PartOfKey, KEY_LOADS, SIZE, THREADS> {
  __device__ __forceinline__ void ask(const Params& p, const PartOfHead& of_head, const ScoreAt& at, int count, bool asks) {
    this->load(count, [&](int n) { return read_of_key(p, of_head, {at.batch, at.head, 0, at.key + n, at.queries, at.keys}, asks); });
  }
};

// Those of the keys of a stream of K/V blocks, which have room for two by turns: what is read for the next block while this one is
// at hand, and is stored at the end of its turn, is there behind the next turn's barrier.
template <int SIZE, int THREADS> struct StreamOfParts : KeyParts<SIZE, THREADS> {
  unsigned at, both;  // where those of the block at hand are, and the sum of that and where the others are

  __device__ __forceinline__ void start(unsigned first) {
    at = first + 4 * KEY_LOADS * SIZE;
    both = at + first;
  }
  __device__ __forceinline__ void put() const { this->store(both - at); }
  // Where part 0 of a block that begins at `key` would be
  __device__ __forceinline__ unsigned turn(int key) {
    at = both - at;
    return at - 4 * key;
  }
};
