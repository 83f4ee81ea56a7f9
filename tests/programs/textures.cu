// Arrays, textures and surfaces in parts, one by argument: tests/test_program.py runs each on the simulated device.
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

enum { WIDTH = 8, HEIGHT = 4, DEPTH = 3 };

__global__ void plain(cudaTextureObject_t from, float *to, float step) {
    int x = threadIdx.x, y = threadIdx.y;
    to[y * WIDTH + x] = tex2D<float>(from, x + step, y + 0.5f);
}
__global__ void fraction(cudaTextureObject_t from, float *to) { to[threadIdx.x] = tex2D<float>(from, (threadIdx.x + 0.5f) / WIDTH, 1.f); }
__global__ void linear(cudaTextureObject_t from, int *to) { to[threadIdx.x] = tex1Dfetch<int>(from, (int)threadIdx.x - 1); }
__global__ void layered(cudaTextureObject_t from, float *to) {
    int x = threadIdx.x, layer = threadIdx.y;
    to[layer * WIDTH + x] = tex2DLayered<float>(from, x + 0.5f, 1.5f, layer);
}
__global__ void rise(cudaSurfaceObject_t at, float by, int beyond) {
    int x = threadIdx.x, y = threadIdx.y + beyond;
    surf2Dwrite(surf2Dread<float>(at, x * 4, y) + by, at, x * 4, y);
}

static cudaArray_t filled(const std::vector<float> &values, unsigned flags) {
    cudaArray_t array;
    cudaChannelFormatDesc kind = cudaCreateChannelDesc<float>();
    CHECK(cudaMallocArray(&array, &kind, WIDTH, HEIGHT, flags));
    CHECK(cudaMemcpy2DToArray(array, 0, 0, values.data(), WIDTH * 4, WIDTH * 4, HEIGHT, cudaMemcpyHostToDevice));
    return array;
}

static cudaTextureObject_t texture(const cudaResourceDesc &shown, cudaTextureFilterMode filter, bool normalized, cudaTextureReadMode mode) {
    cudaTextureDesc how = {};
    how.addressMode[0] = how.addressMode[1] = cudaAddressModeClamp;
    how.filterMode = filter;
    how.readMode = mode;
    how.normalizedCoords = normalized;
    cudaTextureObject_t found;
    CHECK(cudaCreateTextureObject(&found, &shown, &how, nullptr));
    return found;
}

static cudaResourceDesc of(cudaArray_t array) {
    cudaResourceDesc shown = {};
    shown.resType = cudaResourceTypeArray;
    shown.res.array.array = array;
    return shown;
}

static float *room(int count) {
    float *found;
    CHECK(cudaMalloc(&found, count * sizeof(float)));
    return found;
}

static std::vector<float> numbers(int count) {
    std::vector<float> found(count);
    for (int i = 0; i < count; i++) found[i] = i * i;
    return found;
}

static std::vector<float> back(const float *from, int count) {
    std::vector<float> found(count);
    CHECK(cudaMemcpy(found.data(), from, count * sizeof(float), cudaMemcpyDeviceToHost));
    return found;
}

static int array() {
    std::vector<float> values = numbers(WIDTH * HEIGHT), copy(WIDTH * HEIGHT);
    cudaArray_t array = filled(values, cudaArrayDefault);
    float *out = room(WIDTH * HEIGHT);
    cudaTextureObject_t from = texture(of(array), cudaFilterModeLinear, false, cudaReadModeElementType);
    plain<<<1, dim3(WIDTH, HEIGHT)>>>(from, out, 0.75f);
    std::vector<float> found = back(out, WIDTH * HEIGHT);
    bool right = true;
    for (int i = 0; i < WIDTH * HEIGHT; i++) {
        float next = i % WIDTH < WIDTH - 1 ? values[i + 1] : values[i];
        right &= found[i] == 0.75f * values[i] + 0.25f * next;
    }
    CHECK(cudaMemcpy2DFromArray(copy.data(), WIDTH * 4, array, 0, 0, WIDTH * 4, HEIGHT, cudaMemcpyDeviceToHost));
    cudaChannelFormatDesc kind;
    cudaExtent size;
    unsigned flags;
    cudaResourceDesc shown;
    CHECK(cudaArrayGetInfo(&kind, &size, &flags, array));
    CHECK(cudaGetTextureObjectResourceDesc(&shown, from));
    right &= copy == values && kind.x == 32 && size.width == WIDTH && size.height == HEIGHT && !size.depth && shown.res.array.array == array;
    CHECK(cudaDestroyTextureObject(from));
    CHECK(cudaFreeArray(array));
    return !right;
}

static int memory() {
    // Rows of bytes as fractions of 255, and a list of int.
    unsigned char *rows, bytes[HEIGHT][WIDTH];
    size_t pitch;
    int *list, own[4] = {5, -6, 7, -8};
    for (int i = 0; i < WIDTH * HEIGHT; i++) bytes[i / WIDTH][i % WIDTH] = 7 * i;
    CHECK(cudaMallocPitch(&rows, &pitch, WIDTH, HEIGHT));
    CHECK(cudaMemcpy2D(rows, pitch, bytes, WIDTH, WIDTH, HEIGHT, cudaMemcpyHostToDevice));
    CHECK(cudaMalloc(&list, sizeof own));
    CHECK(cudaMemcpy(list, own, sizeof own, cudaMemcpyHostToDevice));
    cudaResourceDesc shown = {};
    shown.resType = cudaResourceTypePitch2D;
    shown.res.pitch2D.devPtr = rows;
    shown.res.pitch2D.desc = cudaCreateChannelDesc<unsigned char>();
    shown.res.pitch2D.width = WIDTH;
    shown.res.pitch2D.height = HEIGHT;
    shown.res.pitch2D.pitchInBytes = pitch;
    float *out = room(6);
    fraction<<<1, 6>>>(texture(shown, cudaFilterModePoint, true, cudaReadModeNormalizedFloat), out);
    std::vector<float> found = back(out, 6);
    bool right = true;
    for (int i = 0; i < 6; i++) right &= found[i] == bytes[HEIGHT - 1][i] / 255.f;
    shown.resType = cudaResourceTypeLinear;
    shown.res.linear.devPtr = list;
    shown.res.linear.desc = cudaCreateChannelDesc<int>();
    shown.res.linear.sizeInBytes = sizeof own;
    linear<<<1, 6>>>(texture(shown, cudaFilterModePoint, false, cudaReadModeElementType), (int *)out);
    int wanted[6] = {0, 5, -6, 7, -8, 0}, got[6];
    CHECK(cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost));
    return !right || memcmp(wanted, got, sizeof got);
}

static int layers() {
    std::vector<float> values = numbers(WIDTH * HEIGHT * DEPTH);
    cudaArray_t array;
    cudaChannelFormatDesc kind = cudaCreateChannelDesc<float>();
    CHECK(cudaMalloc3DArray(&array, &kind, make_cudaExtent(WIDTH, HEIGHT, DEPTH), cudaArrayLayered));
    cudaMemcpy3DParms copy = {};
    copy.srcPtr = make_cudaPitchedPtr(values.data(), WIDTH * 4, WIDTH, HEIGHT);
    copy.dstArray = array;
    copy.extent = make_cudaExtent(WIDTH, HEIGHT, DEPTH);
    copy.kind = cudaMemcpyHostToDevice;
    CHECK(cudaMemcpy3D(&copy));
    float *out = room(WIDTH * DEPTH);
    layered<<<1, dim3(WIDTH, DEPTH)>>>(texture(of(array), cudaFilterModePoint, false, cudaReadModeElementType), out);
    std::vector<float> found = back(out, WIDTH * DEPTH);
    for (int i = 0; i < WIDTH * DEPTH; i++)
        if (found[i] != values[(i / WIDTH * HEIGHT + 1) * WIDTH + i % WIDTH]) return 1;
    return 0;
}

__global__ void turned(cudaTextureObject_t from, cudaSurfaceObject_t to) {
    int x = threadIdx.x, y = threadIdx.y, z = threadIdx.z;
    float at = tex3D<float>(from, (x + 0.5f) / WIDTH, (y + 0.5f) / HEIGHT, (z + 0.5f) / DEPTH);
    surf3Dwrite(at, to, x * 4, HEIGHT - 1 - y, DEPTH - 1 - z);
}

static int volume() {
    // From the host to pitched memory, from there to an array, through a kernel to another, and back.
    std::vector<float> values = numbers(WIDTH * HEIGHT * DEPTH), found(values.size());
    cudaExtent bytes = make_cudaExtent(WIDTH * 4, HEIGHT, DEPTH), texels = make_cudaExtent(WIDTH, HEIGHT, DEPTH);
    cudaPitchedPtr room, host = make_cudaPitchedPtr(values.data(), WIDTH * 4, WIDTH, HEIGHT);
    cudaArray_t from, to;
    cudaChannelFormatDesc kind = cudaCreateChannelDesc<float>();
    CHECK(cudaMalloc3D(&room, bytes));
    CHECK(cudaMalloc3DArray(&from, &kind, texels));
    CHECK(cudaMalloc3DArray(&to, &kind, texels, cudaArraySurfaceLoadStore));
    cudaMemcpy3DParms copy = {};
    copy.srcPtr = host;
    copy.dstPtr = room;
    copy.extent = bytes;
    copy.kind = cudaMemcpyHostToDevice;
    CHECK(cudaMemcpy3D(&copy));
    copy = {};
    copy.srcPtr = room;
    copy.dstArray = from;
    copy.extent = texels;
    copy.kind = cudaMemcpyDeviceToDevice;
    CHECK(cudaMemcpy3D(&copy));
    copy.extent.depth++;
    if (cudaMemcpy3D(&copy) != cudaErrorInvalidValue) return 1;
    cudaResourceDesc shown = of(to);
    cudaSurfaceObject_t at;
    CHECK(cudaCreateSurfaceObject(&at, &shown));
    turned<<<1, dim3(WIDTH, HEIGHT, DEPTH)>>>(texture(of(from), cudaFilterModeLinear, true, cudaReadModeElementType), at);
    copy = {};
    copy.srcArray = to;
    copy.srcPos = make_cudaPos(1, 0, 0);
    copy.dstPtr = make_cudaPitchedPtr(found.data(), WIDTH * 4, WIDTH, HEIGHT);
    copy.extent = make_cudaExtent(WIDTH - 1, HEIGHT, DEPTH);
    copy.kind = cudaMemcpyDeviceToHost;
    CHECK(cudaMemcpy3D(&copy));
    for (int i = 0; i < WIDTH * HEIGHT * DEPTH; i++) {
        int x = i % WIDTH, row = HEIGHT * DEPTH - 1 - i / WIDTH;
        if (x < WIDTH - 1 && found[i] != values[row * WIDTH + x + 1]) return 2;
    }
    return 0;
}

static int surface(int beyond) {
    std::vector<float> values = numbers(WIDTH * HEIGHT), found(WIDTH * HEIGHT);
    cudaArray_t array = filled(values, cudaArraySurfaceLoadStore);
    cudaResourceDesc shown = of(array);
    cudaSurfaceObject_t at;
    CHECK(cudaCreateSurfaceObject(&at, &shown));
    rise<<<1, dim3(WIDTH, HEIGHT)>>>(at, 1.5f, beyond);
    printf("%s\n", cudaGetErrorName(cudaDeviceSynchronize()));
    if (beyond) return 0;
    CHECK(cudaMemcpyFromArray(found.data(), array, 0, 0, WIDTH * HEIGHT * 4, cudaMemcpyDeviceToHost));
    for (int i = 0; i < WIDTH * HEIGHT; i++)
        if (found[i] != values[i] + 1.5f) return 1;
    return 0;
}

static int errors() {
    cudaArray_t array = filled(numbers(WIDTH * HEIGHT), cudaArrayDefault), none = nullptr;
    cudaMipmappedArray_t levels;
    cudaChannelFormatDesc kind = cudaCreateChannelDesc<int>(), odd = {32, 8, 0, 0, cudaChannelFormatKindSigned};
    cudaResourceDesc shown = of(array);
    cudaTextureDesc how = {};
    cudaTextureObject_t found;
    cudaSurfaceObject_t at;
    char bytes[WIDTH * 4];
    printf("%s\n", cudaGetErrorName(cudaMallocArray(&none, &odd, 4, 4)));
    printf("%s\n", cudaGetErrorName(cudaMalloc3DArray(&none, &kind, make_cudaExtent(4, 5, 6), cudaArrayCubemap)));
    printf("%s\n", cudaGetErrorName(cudaMemcpy2DToArray(array, 4, 0, bytes, WIDTH * 4, WIDTH * 4, 1, cudaMemcpyHostToDevice)));
    printf("%s\n", cudaGetErrorName(cudaCreateSurfaceObject(&at, &shown)));
    printf("%s\n", cudaGetErrorName(cudaMallocArray(&none, &kind, 1 << 20, 4)));
    CHECK(cudaMallocArray(&none, &kind, 4, 4));
    shown = of(none);
    how.filterMode = cudaFilterModeLinear;
    printf("%s\n", cudaGetErrorName(cudaCreateTextureObject(&found, &shown, &how, nullptr)));
    how.readMode = cudaReadModeNormalizedFloat;
    printf("%s\n", cudaGetErrorName(cudaCreateTextureObject(&found, &shown, &how, nullptr)));
    CHECK(cudaFreeArray(none));
    printf("%s\n", cudaGetErrorName(cudaFreeArray(none)));
    printf("%s\n", cudaGetErrorName(cudaCreateTextureObject(&found, &shown, &how, nullptr)));
    printf("%s\n", cudaGetErrorName(cudaMallocMipmappedArray(&levels, &kind, make_cudaExtent(4, 4, 0), 2)));
    return 0;
}

static int freed() {
    cudaArray_t array = filled(numbers(WIDTH * HEIGHT), cudaArrayDefault);
    cudaTextureObject_t from = texture(of(array), cudaFilterModePoint, false, cudaReadModeElementType);
    CHECK(cudaFreeArray(array));
    plain<<<1, dim3(WIDTH, HEIGHT)>>>(from, room(WIDTH * HEIGHT), 0);
    printf("%s\n", cudaGetErrorName(cudaDeviceSynchronize()));
    return 0;
}

static int streams(bool ordered) {
    cudaArray_t array = filled(numbers(WIDTH * HEIGHT), cudaArraySurfaceLoadStore);
    cudaResourceDesc shown = of(array);
    cudaSurfaceObject_t at;
    CHECK(cudaCreateSurfaceObject(&at, &shown));
    cudaTextureObject_t from = texture(shown, cudaFilterModePoint, false, cudaReadModeElementType);
    float *out = room(WIDTH * HEIGHT);
    cudaStream_t first, second;
    CHECK(cudaStreamCreate(&first));
    CHECK(cudaStreamCreate(&second));
    rise<<<1, dim3(WIDTH, HEIGHT), 0, first>>>(at, 1.f, 0);
    if (ordered) CHECK(cudaStreamSynchronize(first));
    plain<<<1, dim3(WIDTH, HEIGHT), 0, second>>>(from, out, 0.5f);
    CHECK(cudaDeviceSynchronize());
    return back(out, 1)[0] != 1;
}

int main(int count, char **words) {
    const char *part = count > 1 ? words[1] : "";
    if (!strcmp(part, "array")) return array();
    if (!strcmp(part, "memory")) return memory();
    if (!strcmp(part, "layers")) return layers();
    if (!strcmp(part, "volume")) return volume();
    if (!strcmp(part, "surface")) return surface(count > 2 ? atoi(words[2]) : 0);
    if (!strcmp(part, "errors")) return errors();
    if (!strcmp(part, "race")) return streams(false);
    if (!strcmp(part, "ordered")) return streams(true);
    if (!strcmp(part, "freed")) return freed();
    return 4;
}
