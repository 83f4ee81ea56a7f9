// The columns of a tile that warps share: of PARTS warps each has every second piece (or all, where it is one).
#pragma once
#include "swizzled_tile.cuh"

// A warp's columns of a tile, as if there were no others between them: half of each group of chunks that are permuted among each other,
// so that the two warps' addresses differ in one bit. The first EACH warps have the first part, the others the second.
template <class Whole, int PARTS, int EACH> struct PartOf : Whole {
  static constexpr int PAD = Whole::PAD / PARTS, PIECE = Whole::GROUP / PARTS;
  static_assert(Whole::PAD % (16 * PARTS) == 0, "the parts are equally wide");
  static __device__ __forceinline__ int own() { return threadIdx.x / 32 / EACH; }
  static __device__ __forceinline__ int index(int row, int col) {
    return Whole::index(row, col) ^ own() * PIECE * int(16 / sizeof(Element));
  }
  static __device__ __forceinline__ unsigned right(unsigned at, int chunks) {
    return Whole::right(at, chunks / PIECE * Whole::GROUP + chunks % PIECE);
  }
};
template <class Whole, int EACH> struct PartOf<Whole, 1, EACH> : Whole {};
