// A row in HBM a piece at a time, as wide as the alignment of the rows allows.
// Constants: COPY_BYTES, ELEMENT (element.cuh).
#pragma once
#include "element.cuh"

constexpr int PIECE = COPY_BYTES > sizeof(Element) ? COPY_BYTES / sizeof(Element) : 1;  // elements; they divide a row

template <int BYTES> struct Bits;
template <> struct Bits<2> { typedef unsigned short Type; };
template <> struct Bits<4> { typedef unsigned Type; };
template <> struct Bits<8> { typedef uint2 Type; };
template <> struct Bits<16> { typedef uint4 Type; };

// PIECE elements of a row of ours (floats, whose row is as long as one of elements) or of a user's
template <typename T> __device__ __forceinline__ void load_piece(float (&x)[PIECE], const T* from) {
  constexpr int PART = PIECE * sizeof(T) > 16 ? 16 / sizeof(T) : PIECE;  // of one access
#pragma unroll
  for (int c = 0; c < PIECE; c += PART) {
    typedef typename Bits<PART * sizeof(T)>::Type Access;
    const Access bits = *reinterpret_cast<const Access*>(from + c);
    const T* part = reinterpret_cast<const T*>(&bits);
#pragma unroll
    for (int k = 0; k < PART; k++) x[c + k] = to_float(part[k]);
  }
}

template <typename T> __device__ __forceinline__ void store_piece(T* to, const float (&x)[PIECE]) {
  constexpr int PART = PIECE * sizeof(T) > 16 ? 16 / sizeof(T) : PIECE;
#pragma unroll
  for (int c = 0; c < PIECE; c += PART) {
    typedef typename Bits<PART * sizeof(T)>::Type Access;
    Access bits;
    T* part = reinterpret_cast<T*>(&bits);
#pragma unroll
    for (int k = 0; k < PART; k++) part[k] = from_float<T>(x[c + k]);
    *reinterpret_cast<Access*>(to + c) = bits;
  }
}
