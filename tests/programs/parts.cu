// A program of two translation units (nvcc -rdc=true), with parts_far.cu: tests/test_program.py.
#include <cstdio>
#include <vector>
__device__ int shared_counter;
__constant__ int factor = 3;
static __device__ int own = 5;
__device__ int twice(int x);
extern __device__ int table[4];
__global__ void far(int *out);
static __device__ __noinline__ int helper(int x) { return x + own; }
__global__ void near(int *out) {
    int i = threadIdx.x;
    out[i] = twice(helper(i)) + table[i % 4];
    if (i == 0) printf("near %d\n", atomicAdd(&shared_counter, 1));
}
int main() {
    int *out; std::vector<int> host(64);
    cudaMalloc(&out, 64 * 4);
    near<<<1, 32>>>(out);
    far<<<1, 32>>>(out + 32);
    printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
    cudaMemcpy(host.data(), out, 64 * 4, cudaMemcpyDeviceToHost);
    int wrong = 0, counter = 0;
    for (int i = 0; i < 32; i++) wrong += host[i] != 2 * (i + 5) + 10 * (i % 4), wrong += host[32 + i] != 3 * (i + 7);
    cudaMemcpyFromSymbol(&counter, shared_counter, 4);
    printf("%d wrong, counter %d\n", wrong, counter);
    return wrong;
}
