// The kernels of rates.py that are no repeated instruction: launches, the L2, DRAM, bulk copies and mbarriers.
// Constants: HOPPER, 1 where bulk copies and mbarriers are compiled.
typedef unsigned long long u64;

__device__ unsigned of_shared(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ uint4 load(const uint4* p) {  // past the L1, but no strong load, which would go to the line's own half of the L2
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}

__device__ uint4 load_l1(const uint4* p) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}

__device__ unsigned folded(uint4 x) { return x.x ^ x.y ^ x.z ^ x.w; }

extern "C" __global__ void empty() {}

// Keeps multiprocessors busy with FFMA for some clocks; out: the first block's clocks, nanoseconds.
extern "C" __global__ void busy(u64* out, long long clocks) {
    const u64 begin = clock64(), from = nanoseconds();
    float x[4] = {(float)threadIdx.x, 1, 2, 3};
    while ((long long)(clock64() - begin) < clocks)
        #pragma unroll
        for (int i = 0; i < 256; ++i) asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(x[i % 4]) : "f"(x[(i + 1) % 4]));
    const u64 end = clock64(), to = nanoseconds();
    if (blockIdx.x == 0 && threadIdx.x == 0 && x[0] + x[1] + x[2] + x[3] != 0.5f) {
        out[0] = end - begin;
        out[1] = to - from;
    }
}

// The multiprocessor and the first and last clock of each block, which lasts some clocks.
extern "C" __global__ void blocks(u64* out, long long clocks) {
    const u64 begin = clock64();
    unsigned multiprocessor;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
    while ((long long)(clock64() - begin) < clocks) {
    }
    if (threadIdx.x == 0) {
        out[3 * blockIdx.x] = multiprocessor;
        out[3 * blockIdx.x + 1] = begin;
        out[3 * blockIdx.x + 2] = clock64();
    }
}

// The first clock of each warp of a block.
extern "C" __global__ void warps(u64* out) {
    const u64 begin = clock64();
    if (threadIdx.x % 32 == 0) out[threadIdx.x / 32] = begin;
}

// Makes `count` cells of 8 bytes, `step` cells apart, hold their own addresses.
extern "C" __global__ void own_addresses(u64* cells, long long step, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) cells[i * step] = (u64)(cells + i * step);
}

// One thread: the clocks of `repeats` loads past the L1, one after another, of each cell that order names.
#define LOAD_EACH(NAME, LOAD) \
    extern "C" __global__ void NAME(u64* cells, const int* order, u64* clocks, long long step, int count, int repeats) { \
        for (int i = 0; i < count; ++i) { \
            u64* const cell = cells + order[i] * step; \
            u64 address = (u64)cell; \
            const u64 begin = clock64(); \
            _Pragma("unroll 1") for (int repeat = 0; repeat < repeats; ++repeat) asm volatile(LOAD " %0, [%0];" : "+l"(address)); \
            if (address != (u64)cell) return; /* waits for it */ \
            clocks[i] = clock64() - begin; \
        } \
    }
LOAD_EACH(load_each, "ld.global.L1::no_allocate.u64")
LOAD_EACH(load_each_strong, "ld.global.cg.u64")

// Every block reads all of `count` vectors `turns` times, each from a place of its own on; its clocks.
extern "C" __global__ void __launch_bounds__(1024) read_all(const uint4* data, u64* clocks, unsigned* sink, int count, int turns) {
    const int width = blockDim.x;
    int at = (int)((long long)count / width * blockIdx.x / gridDim.x) * width;
    unsigned sum = 0;
    __syncthreads();
    const u64 begin = clock64();
    for (int turn = 0; turn < turns; ++turn)
        for (int done = 0; done < count; done += 8 * width) {
            uint4 x[8];
            #pragma unroll
            for (int i = 0; i < 8; ++i) {
                x[i] = load(data + at + threadIdx.x);
                at = at + width < count ? at + width : 0;
            }
            #pragma unroll
            for (int i = 0; i < 8; ++i) sum ^= folded(x[i]);
        }
    __syncthreads();
    if (threadIdx.x == 0) clocks[blockIdx.x] = clock64() - begin;
    sink[blockIdx.x * width + threadIdx.x] = sum;
}

// The same of the L1, from which `count` vectors come after the first turn.
extern "C" __global__ void __launch_bounds__(1024) read_l1(const uint4* data, u64* clocks, unsigned* sink, int count, int turns) {
    const int width = blockDim.x;
    unsigned sum = 0;
    __syncthreads();
    const u64 begin = clock64();
    for (int turn = 0; turn < turns; ++turn)
        for (int at = threadIdx.x; at < count; at += 4 * width) {
            uint4 x[4];
            #pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = load_l1(data + at + i * width);
            #pragma unroll
            for (int i = 0; i < 4; ++i) sum ^= folded(x[i]);
        }
    __syncthreads();
    if (threadIdx.x == 0) clocks[blockIdx.x] = clock64() - begin;
    sink[blockIdx.x * width + threadIdx.x] = sum;
}

// Every block adds to all of `count` words, a sector of 8 after another, each from a place of its own on; its clocks.
extern "C" __global__ void __launch_bounds__(1024) add_all(unsigned* data, u64* clocks, int count, int turns) {
    const int width = blockDim.x;
    int at = (int)((long long)count / width * blockIdx.x / gridDim.x) * width;
    __syncthreads();
    const u64 begin = clock64();
    for (int turn = 0; turn < turns; ++turn)
        for (int done = 0; done < count; done += width) {
            asm volatile("red.global.add.u32 [%0], 1;" ::"l"(data + at + threadIdx.x) : "memory");
            at = at + width < count ? at + width : 0;
        }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) clocks[blockIdx.x] = clock64() - begin;
}

// The grid reads `count` vectors once.
extern "C" __global__ void __launch_bounds__(512) read_once(const uint4* data, unsigned* sink, long long count) {
    const long long width = (long long)gridDim.x * blockDim.x;
    unsigned sum = 0;
    for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += 8 * width) {
        uint4 x[8];
        #pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = load(data + at + i * width);
        #pragma unroll
        for (int i = 0; i < 8; ++i) sum ^= folded(x[i]);
    }
    if (sum == 0x9E3779B9) sink[0] = sum;
}

// The grid copies `count` vectors.
extern "C" __global__ void __launch_bounds__(512) copy_once(const uint4* data, uint4* out, long long count) {
    const long long width = (long long)gridDim.x * blockDim.x;
    for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += 4 * width) {
        uint4 x[4];
        #pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = load(data + at + i * width);
        #pragma unroll
        for (int i = 0; i < 4; ++i) out[at + i * width] = x[i];
    }
}

// One warp: `turns` turns of a chain of 32 FFMA and the branch behind it.
extern "C" __global__ void branches(u64* stamps, const float* given, float* sink, int turns) {
    float x = given[0];
    const float y = given[1], z = given[2];
    const u64 begin = clock64();
    #pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        #pragma unroll
        for (int i = 0; i < 32; ++i) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x) : "f"(y), "f"(z));
    }
    stamps[0] = begin;
    stamps[1] = clock64();
    sink[threadIdx.x] = x;
}

#if HOPPER
__device__ void make(unsigned barrier, unsigned count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory"); }

__device__ void expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ void arrive(unsigned barrier) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory"); }

__device__ void wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ void bulk(unsigned into, const void* from, unsigned bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(into), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Two warps, a thread of each: they arrive for each other in turns.
extern "C" __global__ void ping_pong(u64* stamps, int turns) {
    __shared__ __align__(8) u64 barriers[2];
    const unsigned mine = threadIdx.x / 32, own = of_shared(barriers + mine), other = of_shared(barriers + 1 - mine);
    if (threadIdx.x % 32 == 0) make(own, 1);
    __syncthreads();
    if (threadIdx.x % 32) return;
    const u64 begin = clock64();
    for (int turn = 0; turn < turns; ++turn) {
        if (mine == 0) arrive(other);
        wait(own, turn & 1);
        if (mine == 1) arrive(other);
    }
    stamps[2 * mine] = begin;
    stamps[2 * mine + 1] = clock64();
}

// One thread a block: `turns` times, `copies` bulk copies of `bytes` each into places of their own, and the wait for all of them.
// Block b reads from its own b-th part of `span` bytes, again and again.
extern "C" __global__ void bulk_copies(const char* data, u64* clocks, long long span, int bytes, int copies, int turns) {
    extern __shared__ __align__(128) char places[];
    __shared__ __align__(8) u64 barrier;
    if (threadIdx.x) return;
    make(of_shared(&barrier), 1);
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
    const char* const part = data + blockIdx.x * span;
    long long at = 0;
    const u64 begin = clock64();
    for (int turn = 0; turn < turns; ++turn) {
        expect(of_shared(&barrier), bytes * copies);
        for (int i = 0; i < copies; ++i) {
            bulk(of_shared(places + i * bytes), part + at, bytes, of_shared(&barrier));
            at = at + bytes < span ? at + bytes : 0;
        }
        wait(of_shared(&barrier), turn & 1);
    }
    clocks[blockIdx.x] = clock64() - begin;
}

// One thread a block: bulk copies of `bytes` through two places, one under way while the other is waited for.
extern "C" __global__ void bulk_stream(const char* data, u64* clocks, long long span, int bytes, int places_count, int copies) {
    extern __shared__ __align__(128) char places[];
    __shared__ __align__(8) u64 barriers[8];
    if (threadIdx.x) return;
    for (int i = 0; i < places_count; ++i) make(of_shared(barriers + i), 1);
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
    long long at = span / gridDim.x / bytes * bytes * blockIdx.x;
    const u64 begin = clock64();
    for (int i = 0; i < copies + places_count; ++i) {
        const int place = i % places_count;
        if (i >= places_count) wait(of_shared(barriers + place), (i / places_count - 1) & 1);
        if (i < copies) {
            expect(of_shared(barriers + place), bytes);
            bulk(of_shared(places + place * bytes), data + at, bytes, of_shared(barriers + place));
            at = at + bytes < span ? at + bytes : 0;
        }
    }
    clocks[blockIdx.x] = clock64() - begin;
}
#endif
