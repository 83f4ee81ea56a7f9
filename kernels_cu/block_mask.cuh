// Which K/V blocks a row block of Q visits: those in which the masks leave it keys, as far as they say so by tiles. What they say is a
// byte a tile; it is read once and then is one or two bits a tile, in SRAM.
// Constants: SPARSE (0 or 1: whether there is a block mask), TILES, where there are the states of a mask's tiles: the struct's field.
#pragma once
#include "params.cuh"

// How many of a tile's scores a mask leaves: none, some, or all
enum TileState : unsigned char { EMPTY, MIXED, WHOLE };
#ifdef TILES
constexpr bool STATES = true;
#else
constexpr bool STATES = false;
#endif
constexpr bool SKIPS = SPARSE || STATES;  // whether blocks are left out
constexpr int BITS = STATES ? 2 : 1;     // words of SRAM for 32 tiles

// What is said of the tiles of one (batch, head), and the strides
struct BlockMask {
  const unsigned char* kept;  // (Tr x Tc), nonzero where a block is visited
  long long row, col;
  const TileState* state;  // (Tr x Tc)
  long long state_row, state_col;

  // For a column block, whose row blocks it then keeps
  __device__ __forceinline__ BlockMask transposed() const { return {kept, col, row, state, state_col, state_row}; }
};

// Tiles of packed sequences are one behind the other: row block 0 of a sequence is `first_block` of all.
__device__ __forceinline__ BlockMask block_mask_of(const Params& p, int batch, int head, long long first_block = 0) {
#ifdef TILES
  const TileState* state = p.TILES.of(batch, head) + first_block * p.TILES.row;
  return {p.block_mask.of(batch, head), p.block_mask.row, p.block_mask.col, state, p.TILES.row, p.TILES.col};
#else
  return {p.block_mask.of(batch, head), p.block_mask.row, p.block_mask.col};
#endif
}

struct Blocks {
  int begin, end;        // no other blocks are visited
  const unsigned* kept;  // SKIPS: bit j % 32 of word BITS (j / 32) for block j; STATES: in the next word, whether it is mixed

  // The last visited block below j, or begin - 1
  __device__ __forceinline__ int below(int j) const {
    if constexpr (!SKIPS) return j - 1;
    for (j--; j >= begin; j = j / 32 * 32 - 1) {
      const unsigned rest = kept[j / 32 * BITS] << (31 - j % 32);  // block j and those before it of the same word
      if (rest) return j - __clz(rest);
    }
    return begin - 1;
  }

  __device__ __forceinline__ bool visits(int j) const {
    return begin <= j && j < end && (!SKIPS || kept[j / 32 * BITS] >> j % 32 & 1);
  }

  // Whether the mask is to be asked for the scores of visited block j
  __device__ __forceinline__ bool asks(int j) const { return !STATES || kept[j / 32 * BITS + 1] >> j % 32 & 1; }
};

// Reads what is said of row block i, blocks `begin` to `end`, by some of the warps: words `first`, `first + step` and so on of `kept`.
// An element of the block mask is that of SHARE_I x SHARE_J blocks. Returns whether the words that this warp read keep any block.
template <int SHARE_I = 1, int SHARE_J = 1>
__device__ __forceinline__ bool read_block_mask(unsigned* kept, const BlockMask& mask, int i, int begin, int end, int first,
                                                int step) {
  const int lane = threadIdx.x % 32;
  bool any = false;
  for (int word = begin / 32 + first; word * 32 < end; word += step) {
    const int j = word * 32 + lane;
    bool keep = begin <= j && j < end, mixed = false;
    if constexpr (STATES) {
      const TileState state = keep ? mask.state[i * mask.state_row + j * mask.state_col] : EMPTY;
      keep = (!SPARSE || keep && mask.kept[i / SHARE_I * mask.row + j / SHARE_J * mask.col]) && state != EMPTY;
      mixed = state == MIXED;
    } else {
      keep = keep && mask.kept[i / SHARE_I * mask.row + j / SHARE_J * mask.col];
    }
    const unsigned bits = __ballot_sync(~0u, keep);
    if (lane == 0) kept[word * BITS] = bits;
    if constexpr (STATES) {
      const unsigned asked = __ballot_sync(~0u, mixed);
      if (lane == 0) kept[word * BITS + 1] = asked;
    }
    any |= bits != 0;
  }
  return any;
}
