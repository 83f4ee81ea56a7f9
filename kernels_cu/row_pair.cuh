// Two neighbouring elements of a row of O in HBM as floats: one access where the alignment of the rows allows it.
// Constants: DV, COPY_BYTES, ELEMENT (element.cuh).
#pragma once
#include "element.cuh"

// Whether two neighbours of type T from an even column on are one aligned access. Rows of the element type are aligned
// to COPY_BYTES; float rows beside a half type are a workspace of ours, with DV elements a row.
template <typename T> __device__ constexpr bool paired() {
  return DV % 2 == 0 && (sizeof(T) == sizeof(Element) ? COPY_BYTES >= 2 * sizeof(T) : true);
}

// Elements col and col + 1 (col even) of a row of DV; one past the row is 0.
__device__ __forceinline__ float2 load_row_pair(const float* row, int col) {
  if constexpr (paired<float>()) return *reinterpret_cast<const float2*>(row + col);
  return make_float2(row[col], col + 1 < DV ? row[col + 1] : 0.f);
}

template <typename T> __device__ __forceinline__ void store_row_pair(T* row, int col, float x, float y) {
  if (col >= DV) return;
  if constexpr (paired<T>() && sizeof(T) == 4) {
    *reinterpret_cast<float2*>(row + col) = make_float2(x, y);
  } else if constexpr (paired<T>()) {
    *reinterpret_cast<unsigned*>(row + col) = pack(T(), x, y);
  } else {
    row[col] = from_float<T>(x);
    if (col + 1 < DV) row[col + 1] = from_float<T>(y);
  }
}
