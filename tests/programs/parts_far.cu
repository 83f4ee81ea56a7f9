// The other part of parts.cu: a kernel, a function, and variables that they share or both call by one name.
#include <cstdio>
extern __device__ int shared_counter;
extern __constant__ int factor;
static __device__ int own = 7;
__device__ int table[4] = {0, 10, 20, 30};
static __device__ __noinline__ int helper(int x) { return x + own; }
__device__ int twice(int x) { return 2 * x; }
__global__ void far(int *out) {
    int i = threadIdx.x;
    out[i] = factor * helper(i);
    if (i == 0) printf("far %d %s\n", atomicAdd(&shared_counter, 1), "end");
}
