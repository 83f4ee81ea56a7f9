// The element types of Q, K, V and O: conversions to and from float, and exp in the precision that each deserves.
// Constants: ELEMENT (__half, __nv_bfloat16 or float), COPY_BYTES (2, 4, 8, 16: what divides every row's address).
#pragma once
#include <cuda_fp16.h>
#include <cuda_bf16.h>

typedef ELEMENT Element;

#define NEG_INF __int_as_float(0xff800000)

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// The same number, about which the compiler can find nothing out. Where a loop inside a loop ends at a minimum of maxima, it
// otherwise takes three times as long, for the same code.
__device__ __forceinline__ int unknown(int x) {
  asm("" : "+r"(x));
  return x;
}
__device__ __forceinline__ unsigned unknown(unsigned x) {
  asm("" : "+r"(x));
  return x;
}
// The same place: what is some constant from it is then addressed by that, not by a sum of its own.
template <typename T> __device__ __forceinline__ T* unknown(T* at) {
  asm("" : "+l"(at));
  return at;
}

// Two neighbours in one 32-bit register, the first in the low half.
__device__ __forceinline__ unsigned pack(__half, float lo, float hi) {
  __half2 pair = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<unsigned*>(&pair);
}
__device__ __forceinline__ unsigned pack(__nv_bfloat16, float lo, float hi) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<unsigned*>(&pair);
}

// P is rounded to the element type before P V, so a half type needs no more than the fast exp; float gets the exact one.
__device__ __forceinline__ float exp_of(float x) { return sizeof(Element) == 4 ? expf(x) : __expf(x); }
// With denormals flushed, as everything here is compiled, this is one instruction.
__device__ __forceinline__ float exp2_of(float x) { return exp2f(x); }

// Two neighbours to an even place in shared memory. NVRTC 13.5 makes two stores of a float2, which have bank conflicts.
__device__ __forceinline__ void store_two(float, unsigned to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}
template <typename T> __device__ __forceinline__ void store_two(T, unsigned to, float x, float y) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(pack(T(), x, y)) : "memory");
}
template <typename T> __device__ __forceinline__ void store_two(T* to_smem, float x, float y) {
  store_two(T(), static_cast<unsigned>(__cvta_generic_to_shared(to_smem)), x, y);
}
