// Two neighbouring elements of a row in HBM as floats: one access where the alignment of the rows allows it.
// Constants: COPY_BYTES, ELEMENT (element.cuh).
#pragma once
#include "element.cuh"

// Whether two neighbours of type T, from an even column of a row of WIDTH on, are one aligned access. Rows of the element
// type are aligned to COPY_BYTES; float rows beside a half type are a workspace of ours, with WIDTH elements a row.
template <typename T, int WIDTH> __device__ constexpr bool paired() {
  return WIDTH % 2 == 0 && (sizeof(T) == sizeof(Element) ? COPY_BYTES >= 2 * sizeof(T) : true);
}

// Elements col and col + 1 (col even, below WIDTH) of a row of WIDTH; one past the row is 0.
template <int WIDTH, typename T> __device__ __forceinline__ float2 load_row_pair(const T* row, int col) {
  if constexpr (paired<T, WIDTH>() && sizeof(T) == 4) {
    return *reinterpret_cast<const float2*>(row + col);
  } else if constexpr (paired<T, WIDTH>()) {
    const unsigned bits = *reinterpret_cast<const unsigned*>(row + col);
    const T* two = reinterpret_cast<const T*>(&bits);
    return make_float2(to_float(two[0]), to_float(two[1]));
  }
  return make_float2(to_float(row[col]), col + 1 < WIDTH ? to_float(row[col + 1]) : 0.f);
}

template <int WIDTH, typename T> __device__ __forceinline__ void store_row_pair(T* row, int col, float x, float y) {
  if (col >= WIDTH) return;
  if constexpr (paired<T, WIDTH>() && sizeof(T) == 4) {
    *reinterpret_cast<float2*>(row + col) = make_float2(x, y);
  } else if constexpr (paired<T, WIDTH>()) {
    *reinterpret_cast<unsigned*>(row + col) = pack(T(), x, y);
  } else {
    row[col] = from_float<T>(x);
    if (col + 1 < WIDTH) row[col + 1] = from_float<T>(y);
  }
}

// Zeros to the columns 2 t, 2 t + 1, 2 t + 8, ... of a row of WIDTH
template <int WIDTH, typename T> __device__ __forceinline__ void zero_row(T* row, int t) {
  for (int col = 2 * t; col < WIDTH; col += 8) store_row_pair<WIDTH>(row, col, 0.f, 0.f);
}

// Row `row` of what is summed in HBM from visit to visit, in float32: an output of float itself, or beside one of a half type
// a workspace, `sums`, with WIDTH elements a row.
template <int WIDTH> __device__ __forceinline__ float* row_sums(Element* out, long long out_row, float* sums, int row) {
  if constexpr (sizeof(Element) == 4) {
    return reinterpret_cast<float*>(out + row * out_row);
  } else {
    return sums + static_cast<long long>(row) * WIDTH;
  }
}
