// Tiles of Q, K and V from HBM to SRAM. A tile row is d elements padded with zeros to a multiple of 16, then 16 unused
// bytes, so that eight neighbouring rows start in different banks.
// Constants: HEAD_DIM (d of Q and K), VALUE_DIM (d of V and O), COPY_BYTES (width of one copy).
#pragma once
#include "element.cuh"

__device__ constexpr int padded(int d) { return (d + 15) / 16 * 16; }

// Elements from one row of a tile to the next
__device__ constexpr int row_elements(int d) { return padded(d) + 16 / sizeof(Element); }

constexpr int D_PAD = padded(HEAD_DIM), DV_PAD = padded(VALUE_DIM);
constexpr int D_ROW = row_elements(HEAD_DIM), DV_ROW = row_elements(VALUE_DIM);

// Starts one copy of COPY_BYTES, or of that many zeros when `inside` is false.
__device__ __forceinline__ void copy_chunk(Element* to_smem, const Element* from_gmem, bool inside) {
#if __CUDA_ARCH__ >= 800
  if constexpr (COPY_BYTES >= 4) {
    unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(to_smem));
    int bytes = inside ? COPY_BYTES : 0;
    if constexpr (COPY_BYTES == 16) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from_gmem), "r"(bytes) : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from_gmem), "r"(bytes), "n"(COPY_BYTES)
                   : "memory");
    }
    return;
  }
#endif
  if constexpr (COPY_BYTES == 16) {
    *reinterpret_cast<uint4*>(to_smem) = inside ? *reinterpret_cast<const uint4*>(from_gmem) : make_uint4(0, 0, 0, 0);
  } else if constexpr (COPY_BYTES == 8) {
    *reinterpret_cast<uint2*>(to_smem) = inside ? *reinterpret_cast<const uint2*>(from_gmem) : make_uint2(0, 0);
  } else if constexpr (COPY_BYTES == 4) {
    *reinterpret_cast<unsigned*>(to_smem) = inside ? *reinterpret_cast<const unsigned*>(from_gmem) : 0u;
  } else {
    *reinterpret_cast<unsigned short*>(to_smem) = inside ? *reinterpret_cast<const unsigned short*>(from_gmem) : 0;
  }
}

// The same to an address of shared memory, if it is `wanted` at all: no branch, so that copies may stand among other work.
__device__ __forceinline__ void copy_chunk(unsigned to, const Element* from_gmem, bool inside, bool wanted) {
#if __CUDA_ARCH__ >= 800
  if constexpr (COPY_BYTES >= 4) {
    const int bytes = inside ? COPY_BYTES : 0, go = wanted;
    if constexpr (COPY_BYTES == 16) {
      asm volatile("{.reg .pred p; setp.ne.s32 p, %3, 0; @p cp.async.cg.shared.global [%0], [%1], 16, %2;}" ::"r"(to), "l"(from_gmem),
                   "r"(bytes), "r"(go) : "memory");
    } else {
      asm volatile("{.reg .pred p; setp.ne.s32 p, %3, 0; @p cp.async.ca.shared.global [%0], [%1], %4, %2;}" ::"r"(to),
                   "l"(from_gmem), "r"(bytes), "r"(go), "n"(COPY_BYTES) : "memory");
    }
    return;
  }
#endif
  if (wanted) copy_chunk(static_cast<Element*>(__cvta_shared_to_generic(to)), from_gmem, inside);
}

// Starts the copy of one float or of a pair, or of zeros when `inside` is false.
template <typename T> __device__ __forceinline__ void copy_floats(T* to_smem, const T* from_gmem, bool inside) {
#if __CUDA_ARCH__ >= 800
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(to_smem));
  const int bytes = inside ? sizeof(T) : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from_gmem), "r"(bytes), "n"(sizeof(T)) : "memory");
#else
  *to_smem = inside ? *from_gmem : T();
#endif
}

// Starts the copy of `rows` tile rows of WIDTH elements by `threads` threads, of which this is `thread`. Rows from `valid`
// on are not read: they become zeros, as does the padding of WIDTH.
//   tile_smem (rows x padded(WIDTH)), tile_gmem (valid x WIDTH, row_stride elements apart)
template <int WIDTH>
__device__ __forceinline__ void copy_tile(Element* tile_smem, const Element* tile_gmem, long long row_stride, int rows,
                                          int valid, int thread, int threads) {
  constexpr int CHUNK = COPY_BYTES / sizeof(Element);
  constexpr int CHUNKS = padded(WIDTH) / CHUNK, ROW = row_elements(WIDTH);
  // Wide rows leave no registers for several copies in hand.
#pragma unroll(WIDTH > 128 ? 1 : 4)
  for (int c = thread; c < rows * CHUNKS; c += threads) {
    int row = c / CHUNKS, col = c % CHUNKS * CHUNK;
    bool inside = row < valid && col < WIDTH;
    copy_chunk(tile_smem + row * ROW + col, inside ? tile_gmem + row * row_stride + col : tile_gmem, inside);
  }
}

// Waits for this thread's own copies; what other threads copied is visible only after a barrier.
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// The copies that this thread has started since the last call are a group; `wait_for_groups` leaves at most PENDING of the
// newest groups under way.
__device__ __forceinline__ void close_group() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int PENDING> __device__ __forceinline__ void wait_for_groups() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Writes one copy of COPY_BYTES to HBM.
__device__ __forceinline__ void store_chunk(Element* to_gmem, const Element* from_smem) {
  if constexpr (COPY_BYTES == 16) {
    *reinterpret_cast<uint4*>(to_gmem) = *reinterpret_cast<const uint4*>(from_smem);
  } else if constexpr (COPY_BYTES == 8) {
    *reinterpret_cast<uint2*>(to_gmem) = *reinterpret_cast<const uint2*>(from_smem);
  } else if constexpr (COPY_BYTES == 4) {
    *reinterpret_cast<unsigned*>(to_gmem) = *reinterpret_cast<const unsigned*>(from_smem);
  } else {
    *to_gmem = *from_smem;
  }
}
