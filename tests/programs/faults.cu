// Small programs of the kind that people write, one a function. Each is right; with `wrong` one line is missing or another one.
// tests/test_program_faults.py runs both. `found: NAME` marks the line that the fault is found at, `other: NAME` what it collides with.
#include <cooperative_groups.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define CHECK(call) \
    do { \
        cudaError_t error = (call); \
        if (error != cudaSuccess) { \
            printf("%s: %s\n", #call, cudaGetErrorName(error)); \
            exit(3); \
        } \
    } while (0)

const int N = 2048, BYTES = N * sizeof(int), THREADS = 256, BLOCKS = N / THREADS;

// Memory and streams that all programs have; `host` is pinned and counts from 0.
static int *host, *x, *y;
static cudaStream_t first, second;
static cudaEvent_t event;

__global__ void twice(const int *from, int *to) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    to[i] = 2 * from[i]; // found: missing wait; found: wrong size; found: graph dependency; found: default stream
}

__global__ void increment(int *data) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    data[i] += 1; // other: early copy; other: early free; other: managed memory; found: ping-pong; found: early child
}

static bool all(const int *values, int factor, int plus = 0) {
    for (int i = 0; i < N; i++)
        if (values[i] != factor * i + plus) return false;
    return true;
}

// -- streams and events ---------------------------------------------------------------------------------------------------

static bool missing_wait(bool wrong) {
    CHECK(cudaMemcpyAsync(x, host, BYTES, cudaMemcpyHostToDevice, first)); // other: missing wait
    CHECK(cudaEventRecord(event, first));
    if (!wrong) CHECK(cudaStreamWaitEvent(second, event, 0));
    twice<<<BLOCKS, THREADS, 0, second>>>(x, y);
    CHECK(cudaMemcpyAsync(host, y, BYTES, cudaMemcpyDeviceToHost, second));
    CHECK(cudaStreamSynchronize(second));
    return all(host, 2);
}

// The event is recorded before the kernel, not behind it.
static bool early_copy(bool wrong) {
    CHECK(cudaMemcpy(x, host, BYTES, cudaMemcpyHostToDevice));
    if (wrong) CHECK(cudaEventRecord(event, first));
    increment<<<BLOCKS, THREADS, 0, first>>>(x);
    if (!wrong) CHECK(cudaEventRecord(event, first));
    CHECK(cudaStreamWaitEvent(second, event, 0));
    CHECK(cudaMemcpyAsync(host, x, BYTES, cudaMemcpyDeviceToHost, second)); // found: early copy
    CHECK(cudaStreamSynchronize(second));
    return all(host, 1, 1);
}

static bool early_free(bool wrong) {
    int *scratch;
    CHECK(cudaMallocAsync(&scratch, BYTES, first));
    CHECK(cudaMemsetAsync(scratch, 0, BYTES, first));
    increment<<<BLOCKS, THREADS, 0, first>>>(scratch);
    cudaStream_t last = wrong ? second : first;
    CHECK(cudaFreeAsync(scratch, last)); // found: early free
    CHECK(cudaDeviceSynchronize());
    return true;
}

// Two halves of the work take turns with two buffers; the second one takes the first's.
static bool ping_pong(bool wrong) {
    int *buffers[] = {x, y};
    cudaStream_t streams[] = {first, second};
    for (int turn = 0; turn < 4; turn++) {
        int *buffer = buffers[wrong ? 0 : turn % 2];
        CHECK(cudaMemsetAsync(buffer, 0, BYTES, streams[turn % 2])); // other: ping-pong
        increment<<<BLOCKS, THREADS, 0, streams[turn % 2]>>>(buffer);
    }
    CHECK(cudaDeviceSynchronize());
    return true;
}

// The default stream does not wait for streams that say so, nor they for it.
static bool default_stream(bool wrong) {
    cudaStream_t own;
    CHECK(cudaStreamCreateWithFlags(&own, wrong ? cudaStreamNonBlocking : cudaStreamDefault));
    CHECK(cudaMemset(x, 1, BYTES)); // other: default stream
    twice<<<BLOCKS, THREADS, 0, own>>>(x, y);
    CHECK(cudaStreamSynchronize(own));
    return true;
}

// -- the host -------------------------------------------------------------------------------------------------------------

static bool pinned_buffer(bool wrong) {
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < N; i++)
            host[i] = i + turn; // found: pinned buffer
        CHECK(cudaMemcpyAsync(x, host, BYTES, cudaMemcpyHostToDevice, first)); // other: pinned buffer
        increment<<<BLOCKS, THREADS, 0, first>>>(x);
        if (!wrong) CHECK(cudaStreamSynchronize(first));
    }
    CHECK(cudaMemcpy(host, x, BYTES, cudaMemcpyDeviceToHost));
    return all(host, 1, 2);
}

static bool managed_memory(bool wrong) {
    int *data, sum = 0;
    CHECK(cudaMallocManaged(&data, BYTES));
    for (int i = 0; i < N; i++) data[i] = i;
    increment<<<BLOCKS, THREADS>>>(data);
    if (!wrong) CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < N; i++)
        sum += data[i]; // found: managed memory
    return sum == N * (N + 1) / 2;
}

// -- contents -------------------------------------------------------------------------------------------------------------

static bool wrong_size(bool wrong) {
    CHECK(cudaMemcpy(x, host, wrong ? N : BYTES, cudaMemcpyHostToDevice));
    twice<<<BLOCKS, THREADS>>>(x, y);
    CHECK(cudaMemcpy(host, y, BYTES, cudaMemcpyDeviceToHost));
    return all(host, 2);
}

__global__ void histogram(const int *values, int *bins) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&bins[values[i] % 64], 1); // found: unset bins
}

static bool unset_bins(bool wrong) {
    int bins[64];
    CHECK(cudaMemcpy(x, host, BYTES, cudaMemcpyHostToDevice));
    if (!wrong) CHECK(cudaMemset(y, 0, sizeof bins));
    histogram<<<BLOCKS, THREADS>>>(x, y);
    CHECK(cudaMemcpy(bins, y, sizeof bins, cudaMemcpyDeviceToHost));
    return bins[5] == N / 64;
}

__constant__ int factor;

__global__ void scaled(int *data) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    data[i] = factor * i; // other: stale constant
}

// The factor of the next step is set while the step before may still read its own.
static bool stale_constant(bool wrong) {
    for (int step = 1; step <= 2; step++) {
        if (!wrong) CHECK(cudaStreamWaitEvent(second, event, 0));
        CHECK(cudaMemcpyToSymbolAsync(factor, &step, sizeof step, 0, cudaMemcpyHostToDevice, second)); // found: stale constant
        CHECK(cudaStreamSynchronize(second));
        scaled<<<BLOCKS, THREADS, 0, first>>>(x);
        CHECK(cudaEventRecord(event, first));
    }
    CHECK(cudaMemcpy(host, x, BYTES, cudaMemcpyDeviceToHost));
    return all(host, 2);
}

__global__ void fetch(cudaTextureObject_t image, float *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = tex2D<float>(image, i % 64, i / 64); // found: texture
}

static bool texture(bool wrong) {
    cudaArray_t array;
    cudaChannelFormatDesc form = cudaCreateChannelDesc<float>();
    CHECK(cudaMallocArray(&array, &form, 64, N / 64));
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array;
    cudaTextureDesc sampling = {};
    cudaTextureObject_t image;
    CHECK(cudaCreateTextureObject(&image, &resource, &sampling, nullptr));
    CHECK(cudaMemcpy2DToArrayAsync(array, 0, 0, host, 256, 256, N / 64, cudaMemcpyHostToDevice, first)); // other: texture
    CHECK(cudaEventRecord(event, first));
    if (!wrong) CHECK(cudaStreamWaitEvent(second, event, 0));
    fetch<<<BLOCKS, THREADS, 0, second>>>(image, (float *)x);
    CHECK(cudaMemcpyAsync(host, x, BYTES, cudaMemcpyDeviceToHost, second));
    CHECK(cudaDeviceSynchronize());
    return all(host, 1);
}

// -- graphs ---------------------------------------------------------------------------------------------------------------

static bool graph_dependency(bool wrong) {
    cudaGraph_t graph;
    cudaGraphExec_t run;
    cudaGraphNode_t copy, kernel;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddMemcpyNode1D(&copy, graph, nullptr, 0, x, host, BYTES, cudaMemcpyHostToDevice)); // other: graph dependency
    void *arguments[] = {&x, &y};
    cudaKernelNodeParams launch = {(void *)twice, dim3(BLOCKS), dim3(THREADS), 0, arguments, nullptr};
    CHECK(cudaGraphAddKernelNode(&kernel, graph, &copy, wrong ? 0 : 1, &launch));
    CHECK(cudaGraphInstantiate(&run, graph, 0));
    CHECK(cudaGraphLaunch(run, first));
    CHECK(cudaStreamSynchronize(first));
    CHECK(cudaMemcpy(host, y, BYTES, cudaMemcpyDeviceToHost));
    return all(host, 2);
}

// -- threads --------------------------------------------------------------------------------------------------------------

__global__ void reversed(int *data, bool wrong) {
    __shared__ int tile[THREADS];
    int *own = data + blockIdx.x * blockDim.x;
    tile[threadIdx.x] = own[threadIdx.x]; // other: missing barrier
    if (!wrong) __syncthreads();
    own[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x]; // found: missing barrier
}

static bool missing_barrier(bool wrong) {
    CHECK(cudaMemcpy(x, host, BYTES, cudaMemcpyHostToDevice));
    for (int turn = 0; turn < 2; turn++) reversed<<<BLOCKS, THREADS>>>(x, wrong);
    CHECK(cudaMemcpy(host, x, BYTES, cudaMemcpyDeviceToHost));
    return wrong || all(host, 1);
}

__global__ void mean(const int *values, int *sums, int *out, bool wrong) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32, sum = values[i];
    for (int step = 16; step; step /= 2) sum += __shfl_down_sync(~0u, sum, step);
    if (!lane) sums[i / 32] = sum; // other: grid barrier
    if (!wrong) cooperative_groups::this_grid().sync();
    if (i) return;
    int total = 0;
    for (int warp = 0; warp < gridDim.x * blockDim.x / 32; warp++)
        total += sums[warp]; // found: grid barrier
    *out = total / N;
}

static bool grid_barrier(bool wrong) {
    int *sums = y + 1, *out = y, found;
    CHECK(cudaMemcpy(x, host, BYTES, cudaMemcpyHostToDevice));
    void *arguments[] = {&x, &sums, &out, &wrong};
    CHECK(cudaLaunchCooperativeKernel((void *)mean, BLOCKS, THREADS, arguments, 0, nullptr));
    CHECK(cudaMemcpy(&found, out, sizeof found, cudaMemcpyDeviceToHost));
    return wrong || found == (N - 1) / 2;
}

#ifdef CHILDREN
__global__ void parent(int *data, bool wrong) {
    data[threadIdx.x] = threadIdx.x; // other: early child
    if (!wrong) __syncthreads();
    if (threadIdx.x == 0) increment<<<1, THREADS>>>(data);
}

static bool early_child(bool wrong) {
    parent<<<1, THREADS>>>(x, wrong);
    CHECK(cudaMemcpy(host, x, THREADS * sizeof(int), cudaMemcpyDeviceToHost));
    return wrong || host[5] == 6;
}
#endif

struct Program {
    const char *name;
    bool (*run)(bool wrong);
};

static const Program programs[] = {
    {"missing wait", missing_wait},
    {"early copy", early_copy},
    {"early free", early_free},
    {"ping-pong", ping_pong},
    {"default stream", default_stream},
    {"pinned buffer", pinned_buffer},
    {"managed memory", managed_memory},
    {"wrong size", wrong_size},
    {"unset bins", unset_bins},
    {"stale constant", stale_constant},
    {"texture", texture},
    {"graph dependency", graph_dependency},
    {"missing barrier", missing_barrier},
    {"grid barrier", grid_barrier},
#ifdef CHILDREN
    {"early child", early_child},
#endif
};

int main(int count, char **words) {
    bool wrong = count > 2;
    CHECK(cudaMallocHost(&host, BYTES));
    CHECK(cudaMalloc(&x, BYTES));
    CHECK(cudaMalloc(&y, BYTES));
    CHECK(cudaStreamCreate(&first));
    CHECK(cudaStreamCreate(&second));
    CHECK(cudaEventCreate(&event));
    for (int i = 0; i < N; i++) host[i] = i;
    for (const Program &one : programs)
        if (!strcmp(one.name, words[1])) return !one.run(wrong);
    return 4;
}
