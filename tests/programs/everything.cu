// A program of many small parts, one by argument: tests/test_program.py runs each on the simulated device.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define CHECK(call) \
    do { \
        cudaError_t error = (call); \
        if (error != cudaSuccess) { \
            printf("%s: %s\n", #call, cudaGetErrorName(error)); \
            exit(3); \
        } \
    } while (0)

__device__ int counter;
__constant__ float factor[2];
__managed__ int managed;

__global__ void scale(const float *x, float *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = factor[1] * x[i];
    if (i == 0) atomicAdd(&counter, n);
}

__global__ void await(volatile int *flag) {
    while (*flag == 0) {
    }
}

__global__ void add(int *x, int n, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += value;
}

__global__ void set(int *x, int n, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = value;
}

__global__ void gather(int **rows, int *out) { out[threadIdx.x] = rows[threadIdx.x][threadIdx.x]; }
__global__ void say(int number) { printf("device %d\n", number + (int)threadIdx.x); }
__global__ void touch() { managed += 1; }

static int vector(int n, int extra) {
    std::vector<float> x(n), y(n);
    for (int i = 0; i < n; i++) x[i] = i;
    float *dx, *dy, values[2] = {0, 3};
    CHECK(cudaMalloc(&dx, n * sizeof(float)));
    CHECK(cudaMalloc(&dy, n * sizeof(float)));
    CHECK(cudaMemcpy(dx, x.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpyToSymbol(factor, values, sizeof values));
    scale<<<(n + extra + 127) / 128, 128>>>(dx, dy, n + extra);
    printf("%s\n", cudaGetErrorName(cudaDeviceSynchronize()));
    if (extra) return 0;
    CHECK(cudaMemcpy(y.data(), dy, n * sizeof(float), cudaMemcpyDeviceToHost));
    int count;
    CHECK(cudaMemcpyFromSymbol(&count, counter, sizeof count));
    bool right = count == n;
    for (int i = 0; i < n; i++) right &= y[i] == 3 * x[i];
    CHECK(cudaFree(dx));
    CHECK(cudaFree(dy));
    return !right;
}

static int shared_memory() {
    int *x, *pinned, *view;
    CHECK(cudaMallocManaged(&x, 100 * sizeof(int)));
    CHECK(cudaMallocHost(&pinned, 100 * sizeof(int)));
    CHECK(cudaHostGetDevicePointer(&view, pinned, 0));
    std::vector<int> own(5000);
    CHECK(cudaHostRegister(own.data() + 1000, 400, cudaHostRegisterDefault));
    for (int i = 0; i < 100; i++) x[i] = pinned[i] = own[1000 + i] = i;
    add<<<1, 128>>>(x, 100, 1);
    add<<<1, 128>>>(view, 100, 2);
    add<<<1, 128>>>(own.data() + 1000, 100, 3);
    touch<<<1, 1>>>();
    CHECK(cudaDeviceSynchronize());
    bool right = managed == 1;
    for (int i = 0; i < 100; i++) right &= x[i] == i + 1 && pinned[i] == i + 2 && own[1000 + i] == i + 3;
    CHECK(cudaHostUnregister(own.data() + 1000));
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFree(x));
    return !right;
}

static int pointers() {
    int *rows[32], **list, *out, found[32];
    for (int i = 0; i < 32; i++) {
        CHECK(cudaMalloc(&rows[i], 32 * sizeof(int)));
        CHECK(cudaMemset(rows[i], i, 32 * sizeof(int)));
    }
    CHECK(cudaMalloc(&list, sizeof rows));
    CHECK(cudaMalloc(&out, sizeof found));
    CHECK(cudaMemcpy(list, rows, sizeof rows, cudaMemcpyHostToDevice));
    gather<<<1, 32>>>(list, out);
    CHECK(cudaMemcpy(found, out, sizeof found, cudaMemcpyDefault));
    for (int i = 0; i < 32; i++)
        if (found[i] != i * 0x01010101) return 1;
    return 0;
}

static int streams(bool ordered) {
    int *x;
    cudaStream_t first, second;
    cudaEvent_t done;
    CHECK(cudaMalloc(&x, 1024 * sizeof(int)));
    CHECK(cudaStreamCreate(&first));
    CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&done));
    set<<<8, 128, 0, first>>>(x, 1024, 1);
    CHECK(cudaEventRecord(done, first));
    if (ordered) CHECK(cudaStreamWaitEvent(second, done, 0));
    add<<<8, 128, 0, second>>>(x, 1024, 1);
    CHECK(cudaDeviceSynchronize());
    return 0;
}

static void CUDART_CB called(void *data) { *(int *)data += 1; }

static int graph() {
    int *x, calls = 0, found;
    cudaStream_t stream;
    cudaGraph_t captured;
    cudaGraphExec_t run;
    CHECK(cudaMalloc(&x, 256 * sizeof(int)));
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMemset(x, 0, 256 * sizeof(int)));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    add<<<2, 128, 0, stream>>>(x, 256, 1);
    add<<<2, 128, 0, stream>>>(x, 256, 10);
    CHECK(cudaLaunchHostFunc(stream, called, &calls));
    CHECK(cudaStreamEndCapture(stream, &captured));
    CHECK(cudaGraphInstantiate(&run, captured, 0));
    for (int i = 0; i < 3; i++) CHECK(cudaGraphLaunch(run, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(&found, x + 255, sizeof found, cudaMemcpyDeviceToHost));
    printf("%d %d\n", found, calls);
    return found != 33 || calls != 3;
}

static int repeats() {
    int *x, found;
    CHECK(cudaMalloc(&x, 512 * sizeof(int)));
    for (int i = 0; i < 50; i++) set<<<4, 128>>>(x, 512, 7);
    set<<<4, 128>>>(x, 512, 8);
    set<<<4, 128>>>(x, 512, 7);
    for (int i = 0; i < 5; i++) add<<<4, 128>>>(x, 512, 1);
    CHECK(cudaMemcpy(&found, x + 511, sizeof found, cudaMemcpyDeviceToHost));
    return found != 12;
}

static int errors() {
    int *x, *nothing = nullptr;
    CHECK(cudaMalloc(&x, 4));
    printf("%s\n", cudaGetErrorName(cudaMemcpy(x, &x, 8, cudaMemcpyHostToDevice)));
    set<<<1, 2048>>>(x, 1, 1);
    printf("%s\n", cudaGetErrorName(cudaGetLastError()));
    printf("%s\n", cudaGetErrorString(cudaGetLastError()));
    printf("%s\n", cudaGetErrorName(cudaFree(x + 1)));
    printf("%s\n", cudaGetErrorName(cudaSetDevice(1)));
    cudaMipmappedArray_t levels;
    cudaChannelFormatDesc kind = {32, 0, 0, 0, cudaChannelFormatKindFloat};
    printf("%s\n", cudaGetErrorName(cudaMallocMipmappedArray(&levels, &kind, make_cudaExtent(4, 4, 0), 2)));
    set<<<1, 1>>>(nothing, 1, 1);
    printf("%s\n", cudaGetErrorName(cudaDeviceSynchronize()));
    printf("%s\n", cudaGetErrorName(cudaMalloc(&x, 4)));
    return 0;
}

static int device() {
    cudaDeviceProp found;
    int most, blocks;
    CHECK(cudaGetDeviceProperties(&found, 0));
    CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, set, 256, 0));
    printf("%s %d.%d %d %d %d %d\n", found.name, found.major, found.minor, found.multiProcessorCount, found.maxGridSize[0], most, blocks);
    say<<<1, 2>>>(4);
    CHECK(cudaDeviceSynchronize());
    printf("host\n");
    return 0;
}

// A kernel that ends once the host has written: not here.
static int await_host() {
    int *flag;
    CHECK(cudaMallocHost(&flag, sizeof(int)));
    *flag = 0;
    await<<<1, 32>>>(flag);
    printf("%s\n", cudaGetErrorName(cudaGetLastError()));
    *flag = 1;
    return cudaDeviceSynchronize() != cudaSuccess;
}

int main(int count, char **words) {
    const char *part = count > 1 ? words[1] : "";
    if (!strcmp(part, "vector")) return vector(count > 2 ? atoi(words[2]) : 1000, count > 3 ? atoi(words[3]) : 0);
    if (!strcmp(part, "shared")) return shared_memory();
    if (!strcmp(part, "pointers")) return pointers();
    if (!strcmp(part, "race")) return streams(false);
    if (!strcmp(part, "ordered")) return streams(true);
    if (!strcmp(part, "graph")) return graph();
    if (!strcmp(part, "repeats")) return repeats();
    if (!strcmp(part, "errors")) return errors();
    if (!strcmp(part, "device")) return device();
    if (!strcmp(part, "await")) return await_host();
    return 4;
}
