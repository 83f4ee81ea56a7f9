// Events around launches, and around a fill: what `cupyflash run --clock` tells.
#include <cstdio>

__global__ void add(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += x[i];
}

int main() {
    int n = 1 << 18;
    float *x, *y;
    cudaMalloc(&x, n * 4);
    cudaMalloc(&y, n * 4);
    cudaMemset(x, 0, n * 4);
    cudaMemset(y, 0, n * 4);
    cudaEvent_t events[4];
    for (auto& event : events) cudaEventCreate(&event);
    cudaEventRecord(events[0]);
    add<<<n / 256, 256>>>(x, y, n);
    cudaEventRecord(events[1]);
    for (int i = 0; i < 3; i++) add<<<n / 256, 256>>>(x, y, n);
    cudaEventRecord(events[2]);
    cudaMemset(x, 0, n * 4);
    cudaEventRecord(events[3]);
    cudaEventSynchronize(events[3]);
    for (int k = 0; k < 3; k++) {
        float ms;
        cudaEventElapsedTime(&ms, events[k], events[k + 1]);
        printf("%.6f\n", ms);
    }
}
