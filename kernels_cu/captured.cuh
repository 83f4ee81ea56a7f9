// What a score function has captured, and what its lines call (cupyflash/expressions/c.py).
#pragma once

// An array; strides are in elements.
template <typename T, int AXES> struct Captured {
  const T* at;
  long long stride[AXES > 0 ? AXES : 1];
  int length[AXES > 0 ? AXES : 1];
};

// An element of a captured array. The load stays where it stands, so that as many are made as the schedule counts.
__device__ __forceinline__ float score_load(const float* at) {
  float value;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(at));
  return value;
}
__device__ __forceinline__ int score_load(const int* at) {
  int value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(at));
  return value;
}
__device__ __forceinline__ long long score_load(const long long* at) {
  long long value;
  asm volatile("ld.global.s64 %0, [%1];" : "=l"(value) : "l"(at));
  return value;
}
template <typename T> __device__ __forceinline__ T score_load(const T* at) {
  if constexpr (sizeof(T) == 1) {
    unsigned value;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(value) : "l"(at));
    return static_cast<T>(value);
  } else {
    unsigned short bits;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(bits) : "l"(at));
    return *reinterpret_cast<T*>(&bits);
  }
}

// What CUDA makes of / and sqrtf branches to a function at each score. These do not: they are good to a unit in the last place, and a
// divisor beyond 2^126 is taken for infinite.
__device__ __forceinline__ float score_divide(float a, float b) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
  const float quotient = __fmul_rn(a, inverse), better = fmaf(fmaf(-quotient, b, a), inverse, quotient);
  return better == better ? better : quotient;  // of an infinity, or of one by 0, there is nothing to be made better
}
__device__ __forceinline__ float score_sqrt(float a) {
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(a));
  return root;
}

// Python's %: of the divisor's sign. An int modulo 0 is 0.
__device__ __forceinline__ float score_mod(float a, float b) {
  const float r = fmodf(a, b);
  return r != 0.0f && (r < 0.0f) != (b < 0.0f) ? __fadd_rn(r, b) : r;
}
__device__ __forceinline__ int score_mod(int a, int b) {
  const int r = b == 0 || b == -1 ? 0 : a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
