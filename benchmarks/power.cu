// Loads of a chip, each of which keeps one kind of unit busy for some time, on all multiprocessors: benchmarks/power.py.
//
// A block works for `chunks` chunks, pauses for `pause` clocks, and so on until `duration` nanoseconds are over. Block 0 writes down
// clocks and nanoseconds before and behind such a stretch, at most each `apart` nanoseconds.

typedef unsigned long long u64;
constexpr int ROOM = HOPPER ? 196608 : 98304;  // bytes of shared memory that hold numbers

struct Given {
    u64* series;       // samples of four: clock and nanosecond before a stretch, clock and nanosecond behind it
    u64* stretches;    // of all blocks together
    const uint4* data;
    unsigned* sink;
    long long lines;   // of 16 bytes that a block reads of `data`
    u64 duration;
    int chunks, pause, samples, apart;
};

__device__ unsigned of_shared(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ u64 nanoseconds() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

template <class Load>
__device__ __forceinline__ void run(Given g) {
    extern __shared__ __align__(1024) uint4 words[];
    __shared__ int more;
    for (int i = threadIdx.x; i < ROOM / 16; i += blockDim.x) words[i] = g.data[i];
#if HOPPER
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    Load load;
    load.begin(words);
    const u64 start = nanoseconds();
    u64 count = 0, last = 0;
    int sample = 0;
    bool taken = false;
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0) {
            const u64 now = nanoseconds();
            more = now - start < g.duration;
            taken = blockIdx.x == 0 && sample < g.samples && now - last >= (u64)g.apart;
            if (taken) g.series[4 * sample] = clock64(), g.series[4 * sample + 1] = last = now;
        }
        __syncthreads();
        if (!more) break;
        for (int i = 0; i < g.chunks; ++i) load.chunk(g, words);
        ++count;
        if (g.pause) __syncthreads();
        if (threadIdx.x == 0) {
            if (taken) g.series[4 * sample + 2] = clock64(), g.series[4 * sample + 3] = nanoseconds(), ++sample;
            const u64 from = clock64();
            while (clock64() - from < g.pause) __nanosleep(500);
        }
    }
    if (threadIdx.x == 0) atomicAdd(g.stretches, count);
    g.sink[blockIdx.x * blockDim.x + threadIdx.x] = load.end();
}

struct Nothing {  // one thread waits for 2,000 clocks
    __device__ void begin(const uint4*) {}
    __device__ void chunk(Given, const uint4*) {
        const u64 from = clock64();
        while (threadIdx.x == 0 && clock64() - from < 2000) {}
    }
    __device__ unsigned end() { return 0; }
};

struct Fma {  // 1,024 FFMA a warp
    float x[8], a, b;
    __device__ void begin(const uint4* words) {
        for (int i = 0; i < 8; ++i) x[i] = 1e-9f * (int)words[threadIdx.x + 512 * i].x;
        a = 0.9f + 1e-11f * (int)words[threadIdx.x].y, b = 1e-9f * (int)words[threadIdx.x].z;
    }
    __device__ void chunk(Given, const uint4*) {
#pragma unroll 8
        for (int i = 0; i < 128; ++i)
#pragma unroll
            for (int k = 0; k < 8; ++k) asm volatile("fma.rn.ftz.f32 %0, %0, %1, %2;" : "+f"(x[k]) : "f"(a), "f"(b));
    }
    __device__ unsigned end() {
        float sum = 0;
        for (int i = 0; i < 8; ++i) sum += x[i];
        return __float_as_uint(sum);
    }
};

struct Special {  // 512 MUFU and 1,024 FMUL a warp
    float x[8];
    __device__ void begin(const uint4* words) {
        for (int i = 0; i < 8; ++i) x[i] = 1e-9f * (int)words[threadIdx.x + 512 * i].x;
    }
    __device__ void chunk(Given, const uint4*) {
#pragma unroll 8
        for (int i = 0; i < 64; ++i)
#pragma unroll
            for (int k = 0; k < 8; ++k)
                asm volatile("mul.ftz.f32 %0, %0, 0f42140000; cos.approx.ftz.f32 %0, %0;" : "+f"(x[k]));
    }
    __device__ unsigned end() {
        float sum = 0;
        for (int i = 0; i < 8; ++i) sum += x[i];
        return __float_as_uint(sum);
    }
};

__device__ void add(uint4& sum, uint4 more) { sum.x ^= more.x, sum.y ^= more.y, sum.z ^= more.z, sum.w ^= more.w; }

struct Shared {  // 64 loads of 16 bytes a lane: 256 wavefronts a warp
    uint4 sum;
    __device__ void begin(const uint4* words) { sum = words[threadIdx.x]; }
    __device__ void chunk(Given, const uint4* words) {
#pragma unroll 16
        for (int i = 0; i < 64; ++i) {
            uint4 y;
            const unsigned at = of_shared(words) + 16 * ((threadIdx.x + 192 * i) % (ROOM / 16));
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w) : "r"(at));
            add(sum, y);
        }
    }
    __device__ unsigned end() { return sum.x + sum.y + sum.z + sum.w; }
};

struct Global {  // 64 loads of 16 bytes a lane past the L1, of the block's own lines
    uint4 sum;
    long long at = 0;
    __device__ void begin(const uint4* words) { sum = words[threadIdx.x]; }
    __device__ void chunk(Given g, const uint4*) {
        const uint4* from = g.data + g.lines * blockIdx.x + threadIdx.x;
#pragma unroll 16
        for (int i = 0; i < 64; ++i) {
            uint4 y;
            asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
                         : "l"(from + at));
            at += blockDim.x;
            if (at + blockDim.x > g.lines) at = 0;
            add(sum, y);
        }
    }
    __device__ unsigned end() { return sum.x + sum.y + sum.z + sum.w; }
};

struct Mma {  // 64 products of 16 x 8 x 16 a warp, in 8 sums; each is added and taken away again, so none grows
    float d[8][4];
    unsigned a[8], b[4];
    __device__ void begin(const uint4* words) {
        const uint4 p = words[threadIdx.x], q = words[threadIdx.x + 512], r = words[threadIdx.x + 1024];
        a[0] = p.x, a[1] = p.y, a[2] = p.z, a[3] = p.w;
        for (int k = 0; k < 4; ++k) a[4 + k] = a[k] ^ 0x80008000u;
        // Sums that begin alike would be one: ptxas made 16 products of the 64.
        for (int i = 0; i < 8; ++i)
            for (int k = 0; k < 4; ++k) d[i][k] = 1e-3f * (int)(q.x >> 16) + i;
        b[0] = r.x, b[1] = r.y, b[2] = r.z, b[3] = r.w;
    }
    __device__ void chunk(Given, const uint4*) {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            float(&s)[4] = d[i % 8];
            const int p = 4 * (i / 8 % 2), q = 2 * (i % 2);
            asm volatile(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
                : "r"(a[p]), "r"(a[p + 1]), "r"(a[p + 2]), "r"(a[p + 3]), "r"(b[q]), "r"(b[q + 1]));
        }
    }
    __device__ unsigned end() {
        float sum = 0;
        for (int i = 0; i < 8; ++i)
            for (int k = 0; k < 4; ++k) sum += d[i][k];
        return __float_as_uint(sum);
    }
};

#define LOAD(NAME, KIND, THREADS)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                    \
        NAME(u64* series, u64* stretches, const uint4* data, unsigned* sink, long long lines, u64 duration, int chunks,      \
             int pause, int samples, int apart) {                                                                            \
        run<KIND>(Given{series, stretches, data, sink, lines, duration, chunks, pause, samples, apart});                     \
    }
LOAD(nothing, Nothing, 512)
LOAD(ffma, Fma, 512)
LOAD(special, Special, 512)
LOAD(shared_reads, Shared, 512)
LOAD(global_reads, Global, 512)
LOAD(mma, Mma, 512)

#if HOPPER
__device__ u64 described(unsigned at) { return (u64)(at >> 4 & 0x3fff) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62; }

template <bool REGISTERS>
struct Wgmma {  // 16 products of 64 x 256 x 16 a warpgroup; PRODUCT is power.py's
    float d[128] = {};
    unsigned a[4], at;
    __device__ void begin(const uint4* words) {
        const uint4 own = words[threadIdx.x];
        a[0] = own.x, a[1] = own.y, a[2] = own.z, a[3] = own.w, at = of_shared(words);
    }
    __device__ void chunk(Given, const uint4*) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            const u64 factor = described(at + 32768 * (k / 4) + 32 * (k % 4));
            const u64 own = described(at + 131072 + 8192 * (threadIdx.x / 128 * 4 + k / 4) + 32 * (k % 4));
            if constexpr (REGISTERS) {
                PRODUCT_OF_REGISTERS(d, a, factor, k);
            } else {
                PRODUCT(d, own, factor, k);
            }
        }
        asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    __device__ unsigned end() {
        float sum = 0;
        for (int i = 0; i < 128; ++i) sum += d[i];
        return __float_as_uint(sum);
    }
};
LOAD(wgmma, Wgmma<false>, 256)
LOAD(wgmma_registers, Wgmma<true>, 256)
#endif
