// Which K/V blocks a row block of Q visits: those in which the masks leave it keys and, where there is a block mask, that it
// keeps. The block mask is a byte a block; it is read once and then is a bit a block, in SRAM.
// Constants: SPARSE (0 or 1: whether there is one).
#pragma once
#include "params.cuh"

// The block mask of one (batch, head), and its strides
struct BlockMask {
  const unsigned char* kept;  // (Tr x Tc), nonzero where a block is visited
  long long row, col;

  // For a column block, whose row blocks it then keeps
  __device__ __forceinline__ BlockMask transposed() const { return {kept, col, row}; }
};

__device__ __forceinline__ BlockMask block_mask_of(const Params& p, int batch, int head) {
  return {p.block_mask.of(batch, head), p.block_mask.row, p.block_mask.col};
}

struct Blocks {
  int begin, end;        // no other blocks are visited
  const unsigned* kept;  // SPARSE: bit j % 32 of word j / 32 for block j

  // The last visited block below j, or begin - 1
  __device__ __forceinline__ int below(int j) const {
    if constexpr (!SPARSE) return j - 1;
    for (j--; j >= begin; j = j / 32 * 32 - 1) {
      const unsigned rest = kept[j / 32] << (31 - j % 32);  // block j and those before it of the same word
      if (rest) return j - __clz(rest);
    }
    return begin - 1;
  }

  __device__ __forceinline__ bool visits(int j) const {
    return begin <= j && j < end && (!SPARSE || kept[j / 32] >> j % 32 & 1);
  }
};

// Reads what the block mask says of row block i, blocks `begin` to `end`, by some of the warps: words `first`, `first + step`
// and so on of `kept`. SHARE blocks share an element of the mask. Returns whether the words that this warp read keep any block.
template <int SHARE = 1>
__device__ __forceinline__ bool read_block_mask(unsigned* kept, const BlockMask& mask, int i, int begin, int end, int first,
                                                int step) {
  const int lane = threadIdx.x % 32;
  bool any = false;
  for (int word = begin / 32 + first; word * 32 < end; word += step) {
    const int j = word * 32 + lane;
    const bool keep = begin <= j && j < end && mask.kept[i * mask.row + j / SHARE * mask.col];
    const unsigned bits = __ballot_sync(~0u, keep);
    if (lane == 0) kept[word] = bits;
    any |= bits != 0;
  }
  return any;
}
