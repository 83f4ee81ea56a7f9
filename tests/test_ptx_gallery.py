"""A gallery of kernels in the styles that people write them, against NumPy: races on, in lock step and in random order."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from gallery import Gallery, Run, check_kernel

from suites import sample, wide

F = np.float32
gallery = Gallery()


@gallery
def naive_matmul(rng: np.random.Generator) -> Run:
    cuda = r"""extern "C" __global__ void k(const float* A, const float* B, float* C, int m, int n, int l) {
        int i = blockIdx.y * blockDim.y + threadIdx.y, j = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= m || j >= n) return;
        float s = 0;
        for (int t = 0; t < l; ++t) s += A[i * l + t] * B[t * n + j];
        C[i * n + j] = s;
    }"""
    a, b = rng.standard_normal((19, 40)).astype(F), rng.standard_normal((40, 21)).astype(F)
    args = {"A": a, "B": b, "C": np.zeros((19, 21), F), "m": 19, "n": 21, "l": 40}
    return Run(cuda, (2, 3), (16, 8), args, {"C": a @ b}, 1e-5)


@gallery
def warp_reduction(rng: np.random.Generator) -> Run:
    cuda = r"""extern "C" __global__ void k(const float* x, float* y, int n) {
        float s = 0;
        for (int i = threadIdx.x; i < n; i += 32) s += __ldg(x + blockIdx.x * n + i);
        for (int d = 16; d; d >>= 1) s += __shfl_down_sync(~0u, s, d);
        if (threadIdx.x == 0) y[blockIdx.x] = s;
    }"""
    x = rng.standard_normal((7, 133)).astype(F)
    return Run(cuda, 7, 32, {"x": x, "y": np.zeros(7, F), "n": 133}, {"y": x.sum(axis=1)}, 1e-5)


@gallery
def block_scan(rng: np.random.Generator) -> Run:
    cuda = r"""extern "C" __global__ void k(const int* x, int* y, int n) {   // Hillis and Steele, two buffers
        extern __shared__ int s[];
        int t = threadIdx.x, in = 0;
        s[t] = t < n ? x[t] : 0;
        __syncthreads();
        for (int d = 1; d < blockDim.x; d *= 2) {
            s[(1 - in) * blockDim.x + t] = s[in * blockDim.x + t] + (t >= d ? s[in * blockDim.x + t - d] : 0);
            in = 1 - in;
            __syncthreads();
        }
        if (t < n) y[t] = s[in * blockDim.x + t];
    }"""
    x = rng.integers(-50, 50, 200).astype(np.int32)
    return Run(cuda, 1, 256, {"x": x, "y": np.zeros_like(x), "n": 200}, {"y": np.cumsum(x)}, shared=2048)


@gallery
def transpose_with_padding(rng: np.random.Generator) -> Run:
    cuda = r"""template <class T, int B> __device__ void tile(const T* x, T* y, int h, int w) {
        __shared__ T s[B][B + 1];
        int i = blockIdx.y * B, j = blockIdx.x * B;
        for (int r = threadIdx.y; r < B; r += blockDim.y)
            if (i + r < h && j + threadIdx.x < w) s[r][threadIdx.x] = x[(i + r) * w + j + threadIdx.x];
        __syncthreads();
        for (int r = threadIdx.y; r < B; r += blockDim.y)
            if (j + r < w && i + threadIdx.x < h) y[(j + r) * h + i + threadIdx.x] = s[threadIdx.x][r];
    }
    extern "C" __global__ void k(const double* x, double* y, int h, int w) { tile<double, 32>(x, y, h, w); }"""
    x = rng.standard_normal((45, 70))
    return Run(cuda, (3, 2), (32, 8), {"x": x, "y": np.zeros((70, 45)), "h": 45, "w": 70}, {"y": x.T})


@gallery
def layer_norm(rng: np.random.Generator) -> Run:
    cuda = r"""__device__ float sum(float v, float* part) {
        for (int d = 16; d; d /= 2) v += __shfl_xor_sync(~0u, v, d);
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
        __syncthreads();
        v = threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : 0;
        for (int d = 16; d; d /= 2) v += __shfl_xor_sync(~0u, v, d);
        __syncthreads();
        return v;
    }
    extern "C" __global__ void k(const float4* x, const float4* g, const float4* b, float4* y, int n) {
        __shared__ float part[32];
        const float4* row = x + (size_t)blockIdx.x * n;
        float s = 0, q = 0;
        for (int i = threadIdx.x; i < n; i += blockDim.x) { float4 v = row[i]; s += v.x + v.y + v.z + v.w; }
        float m = sum(s, part) / (4 * n);
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            float4 v = row[i];
            q += (v.x - m) * (v.x - m) + (v.y - m) * (v.y - m) + (v.z - m) * (v.z - m) + (v.w - m) * (v.w - m);
        }
        float r = rsqrtf(sum(q, part) / (4 * n) + 1e-5f);
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            float4 v = row[i], w = g[i], c = b[i];
            y[blockIdx.x * n + i] = make_float4((v.x - m) * r * w.x + c.x, (v.y - m) * r * w.y + c.y,
                                                (v.z - m) * r * w.z + c.z, (v.w - m) * r * w.w + c.w);
        }
    }"""
    x, g, b = (rng.standard_normal(s).astype(F) for s in ((5, 200), 200, 200))
    wide = x.astype(float)
    want = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5) * g + b
    return Run(cuda, 5, 64, {"x": x, "g": g, "b": b, "y": np.zeros_like(x), "n": 50}, {"y": want}, 1e-5)


@gallery
def grid_stride_loop(rng: np.random.Generator) -> Run:
    cuda = r"""extern "C" __global__ void k(int n, double a, const double* x, double* y) {
        for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
            y[i] = fma(a, x[i], y[i]);
    }"""
    x, y = rng.standard_normal((2, 1001))
    return Run(cuda, 3, 96, {"n": 1001, "a": 2.5, "x": x, "y": y}, {"y": 2.5 * x + y}, 1e-15)


@gallery
def stencil_in_three_dimensions(rng: np.random.Generator) -> Run:
    cuda = r"""extern "C" __global__ void k(const float* u, float* v, int nx, int ny, int nz) {
        __shared__ float s[6][10];
        int tx = threadIdx.x + 1, ty = threadIdx.y + 1, x = blockIdx.x * 8 + tx, y = blockIdx.y * 4 + ty;
        bool in = x < nx - 1 && y < ny - 1;
        auto at = [&](int i, int j, int k) { return u[(k * ny + j) * nx + i]; };
        float below = in ? at(x, y, 0) : 0, here = in ? at(x, y, 1) : 0;
        for (int z = 1; z < nz - 1; ++z) {
            float above = in ? at(x, y, z + 1) : 0;
            if (in) s[ty][tx] = here;
            if (in && tx == 1) s[ty][0] = at(x - 1, y, z);
            if (in && (tx == 8 || x == nx - 2)) s[ty][tx + 1] = at(x + 1, y, z);
            if (in && ty == 1) s[0][tx] = at(x, y - 1, z);
            if (in && (ty == 4 || y == ny - 2)) s[ty + 1][tx] = at(x, y + 1, z);
            __syncthreads();
            if (in) v[(z * ny + y) * nx + x] = s[ty][tx - 1] + s[ty][tx + 1] + s[ty - 1][tx] + s[ty + 1][tx] + below + above
                                             - 6 * here;
            __syncthreads();
            below = here; here = above;
        }
    }"""
    u = rng.integers(-9, 9, (6, 11, 19)).astype(F)
    want = np.zeros_like(u)
    c = (slice(1, -1),) * 3
    want[c] = -6 * u[c] + sum(np.roll(u, s, a)[c] for a in range(3) for s in (1, -1))
    args = {"u": u, "v": np.zeros_like(u), "nx": 19, "ny": 11, "nz": 6}
    return Run(cuda, (3, 3), (8, 4), args, {"v": want})


@gallery
def radix_sort_pass(rng: np.random.Generator) -> Run:
    """A stable partition by two bits: ranks from match and ballot, offsets through shared memory."""
    cuda = r"""extern "C" __global__ void k(const unsigned* x, unsigned* y, int shift) {
        __shared__ unsigned count[8][4], before[8][4];
        unsigned v = x[threadIdx.x], digit = v >> shift & 3, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (lane < 4) count[warp][lane] = 0;
        __syncwarp();
        unsigned same = __match_any_sync(~0u, digit), rank = __popc(same & ((1u << lane) - 1));
        if (rank == 0) count[warp][digit] = __popc(same);
        unsigned odd = __ballot_sync(~0u, digit & 1), high = __ballot_sync(~0u, digit & 2);
        if (same != ((digit & 1 ? odd : ~odd) & (digit & 2 ? high : ~high))) __trap();
        __syncthreads();
        if (threadIdx.x == 0) {
            unsigned s = 0;
            for (int d = 0; d < 4; ++d) for (int w = 0; w < 8; ++w) { before[w][d] = s; s += count[w][d]; }
        }
        __syncthreads();
        y[before[warp][digit] + rank] = v;
    }"""
    x = rng.integers(0, 1 << 32, 256, dtype=np.uint32)
    want = x[np.argsort(x >> 5 & 3, kind="stable")]
    return Run(cuda, 1, 256, {"x": x, "y": np.zeros_like(x), "shift": 5}, {"y": want})


@gallery
def mandelbrot(rng: np.random.Generator) -> Run:
    cuda = r"""extern "C" __global__ void k(int* out, int w, int h, int most) {
        int px = blockIdx.x * blockDim.x + threadIdx.x, py = blockIdx.y * blockDim.y + threadIdx.y;
        if (px >= w || py >= h) return;
        double cx = -2.0 + 3.0 * px / w, cy = -1.0 + 2.0 * py / h, x = 0, y = 0;
        int n = 0;
        while (n < most && __dadd_rn(__dmul_rn(x, x), __dmul_rn(y, y)) <= 4) {
            double t = __dadd_rn(__dsub_rn(__dmul_rn(x, x), __dmul_rn(y, y)), cx);
            y = __dadd_rn(__dmul_rn(__dmul_rn(2.0, x), y), cy); x = t; ++n;
        }
        out[py * w + px] = n;
    }"""
    w, h, most = 30, 22, 40
    c = (
        (-2.0 + 3.0 * np.arange(w) / w)[None] + 0 * np.arange(h)[:, None],
        (-1.0 + 2.0 * np.arange(h) / h)[:, None] + 0 * np.arange(w),
    )
    x, y, n = np.zeros((h, w)), np.zeros((h, w)), np.zeros((h, w), np.int32)
    for _ in range(most):
        go = x * x + y * y <= 4
        x, y, n = np.where(go, x * x - y * y + c[0], x), np.where(go, 2 * x * y + c[1], y), n + go
    return Run(cuda, (2, 3), (16, 8), {"out": np.zeros((h, w), np.int32), "w": w, "h": h, "most": most}, {"out": n})


@gallery
def n_body(rng: np.random.Generator) -> Run:
    cuda = r"""extern "C" __global__ void k(const float4* p, float3* a, int n) {
        extern __shared__ float4 tile[];
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        float4 me = i < n ? p[i] : make_float4(0, 0, 0, 0);
        float3 s = make_float3(0, 0, 0);
        for (int t = 0; t < n; t += blockDim.x) {
            tile[threadIdx.x] = t + threadIdx.x < n ? p[t + threadIdx.x] : make_float4(0, 0, 0, 0);
            __syncthreads();
            #pragma unroll 4
            for (int j = 0; j < blockDim.x; ++j) {
                float dx = tile[j].x - me.x, dy = tile[j].y - me.y, dz = tile[j].z - me.z;
                float r = rsqrtf(dx * dx + dy * dy + dz * dz + 0.01f), f = tile[j].w * r * r * r;
                s.x += f * dx; s.y += f * dy; s.z += f * dz;
            }
            __syncthreads();
        }
        if (i < n) a[i] = s;
    }"""
    p = rng.standard_normal((100, 4)).astype(F)
    d = (p[None, :, :3] - p[:, None, :3]).astype(float)
    want = (d * (p[:, 3] * ((d**2).sum(2) + 0.01) ** -1.5)[..., None]).sum(1)
    return Run(cuda, 4, 32, {"p": p, "a": np.zeros((100, 3), F), "n": 100}, {"a": want}, 1e-3, shared=512)


@gallery
def philox(rng: np.random.Generator) -> Run:
    cuda = r"""extern "C" __global__ void k(uint4* out, unsigned seed) {
        uint4 c = make_uint4(blockIdx.x * blockDim.x + threadIdx.x, 0, 0, 0);
        uint2 key = make_uint2(seed, 0);
        for (int r = 0; r < 10; ++r) {
            unsigned h0 = __umulhi(0xD2511F53u, c.x), h1 = __umulhi(0xCD9E8D57u, c.z);
            c = make_uint4(h1 ^ c.y ^ key.x, 0xCD9E8D57u * c.z, h0 ^ c.w ^ key.y, 0xD2511F53u * c.x);
            key.x += 0x9E3779B9u; key.y += 0xBB67AE85u;
        }
        out[blockIdx.x * blockDim.x + threadIdx.x] = c;
    }"""
    key = np.uint64(0x1234ABCD)
    c = [np.arange(96, dtype=np.uint64), *(np.zeros(96, np.uint64) for _ in range(3))]
    low, k0, k1 = np.uint64(0xFFFFFFFF), key, np.uint64(0)
    for _ in range(10):
        p, q = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [q >> np.uint64(32) ^ c[1] ^ k0, q & low, p >> np.uint64(32) ^ c[3] ^ k1, p & low]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return Run(cuda, 3, 32, {"out": np.zeros((96, 4), np.uint32), "seed": int(key)}, {"out": np.stack(c, 1).astype(np.uint32)})


@gallery
def sparse_matrix_vector(rng: np.random.Generator) -> Run:
    """CSR, a warp a row, with rows of very different lengths."""
    cuda = r"""extern "C" __global__
    void k(const int* start, const int* column, const float* value, const float* x, float* y, int rows) {
        int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
        if (row >= rows) return;
        float s = 0;
        for (int i = start[row] + lane; i < start[row + 1]; i += 32) s += value[i] * x[column[i]];
        for (int d = 16; d; d /= 2) s += __shfl_xor_sync(0xffffffff, s, d);
        if (lane == 0) y[row] = s;
    }"""
    lengths = rng.integers(0, 90, 13)
    start = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    column, value = rng.integers(0, 50, start[-1]).astype(np.int32), rng.integers(-9, 9, start[-1]).astype(F)
    x = rng.integers(-9, 9, 50).astype(F)
    want = [value[a:b] @ x[column[a:b]] for a, b in pairwise(start)]
    args: dict[str, Any] = {"start": start, "column": column, "value": value, "x": x, "y": np.zeros(13, F), "rows": 13}
    return Run(cuda, 4, 128, args, {"y": np.array(want, F)})


@gallery
def reduction_by_the_last_block(rng: np.random.Generator) -> Run:
    cuda = r"""__device__ unsigned done = 0;
    extern "C" __global__ void k(const int* x, int* part, int* total, int n) {
        __shared__ int s[64];
        __shared__ bool last;
        int v = 0;
        for (int i = blockIdx.x * 64 + threadIdx.x; i < n; i += gridDim.x * 64) v += x[i];
        for (int pass = 0; ; ++pass) {
            s[threadIdx.x] = v;
            __syncthreads();
            for (int d = 32; d; d /= 2) { if (threadIdx.x < d) s[threadIdx.x] += s[threadIdx.x + d]; __syncthreads(); }
            if (pass) break;
            if (threadIdx.x == 0) {
                part[blockIdx.x] = s[0];
                __threadfence();
                last = atomicInc(&done, gridDim.x - 1) == gridDim.x - 1;
            }
            __syncthreads();
            if (!last) return;
            v = threadIdx.x < gridDim.x ? ((volatile int*)part)[threadIdx.x] : 0;
        }
        if (threadIdx.x == 0) *total = s[0];
    }"""
    x = rng.integers(-99, 99, 3000).astype(np.int32)
    args = {"x": x, "part": np.zeros(9, np.int32), "total": np.zeros(1, np.int32), "n": 3000}
    return Run(cuda, 9, 64, args, {"total": x.sum(keepdims=True)})


@gallery
def histogram_with_global_atomics(rng: np.random.Generator) -> Run:
    cuda = r"""extern "C" __global__ void k(const unsigned char* x, unsigned* bins, float* mass, unsigned long long* most, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        atomicAdd(&bins[x[i] & 15], 1);
        atomicAdd(&mass[x[i] & 3], 0.5f);
        atomicMax(most, (unsigned long long)x[i] << 32 | i);
    }"""
    x = rng.integers(0, 256, 700, dtype=np.uint8)
    most = int(np.max((x.astype(np.uint64) << np.uint64(32)) | np.arange(700, dtype=np.uint64)))
    args = {"x": x, "bins": np.zeros(16, np.uint32), "mass": np.zeros(4, F), "most": np.zeros(1, np.uint64), "n": 700}
    want = {"bins": np.bincount(x & 15, minlength=16), "mass": np.bincount(x & 3) / 2, "most": np.array([most], np.uint64)}
    return Run(cuda, 6, 128, args, want)


@gallery
def dot_product_of_bytes(rng: np.random.Generator) -> Run:
    cuda = r"""extern "C" __global__ void k(const int* A, const int* B, int* C, int n, int words) {   // rows of A times rows of B
        int i = threadIdx.y + blockIdx.y * blockDim.y, j = threadIdx.x + blockIdx.x * blockDim.x, s = 0;
        for (int w = 0; w < words; ++w) s = __dp4a(A[i * words + w], B[j * words + w], s);
        C[i * n + j] = s;
    }"""
    a, b = rng.integers(-128, 128, (16, 40)).astype(np.int8), rng.integers(-128, 128, (24, 40)).astype(np.int8)
    args = {"A": a, "B": b, "C": np.zeros((16, 24), np.int32), "n": 24, "words": 10}
    return Run(cuda, (3, 2), (8, 8), args, {"C": a.astype(np.int32) @ b.T.astype(np.int32)})


@gallery
def convolution_with_constant_memory(rng: np.random.Generator) -> Run:
    cuda = r"""__constant__ float taps[7] = {1, -2, 3, 0.5f, 3, -2, 1};
    extern "C" __global__ void k(const float* x, float* y, int n) {
        __shared__ float s[64 + 6];
        int i = blockIdx.x * 64 + threadIdx.x;
        for (int t = threadIdx.x; t < 70; t += 64) { int g = blockIdx.x * 64 + t - 3; s[t] = g >= 0 && g < n ? x[g] : 0; }
        __syncthreads();
        float sum = 0;
        for (int t = 0; t < 7; ++t) sum += taps[t] * s[threadIdx.x + t];
        if (i < n) y[i] = sum;
    }"""
    x = rng.integers(-9, 9, 150).astype(F)
    want = np.convolve(x, np.array([1, -2, 3, 0.5, 3, -2, 1], F), "same")
    return Run(cuda, 3, 64, {"x": x, "y": np.zeros_like(x), "n": 150}, {"y": want})


@gallery
def interpreter(rng: np.random.Generator) -> Run:
    """A switch in a loop over a stack that is a local array, in a function of its own."""
    cuda = r"""__device__ __noinline__ int run(const unsigned char* code, int n, int x) {
        int stack[8], top = 0;
        for (int pc = 0; pc < n; ++pc) switch (code[pc]) {
            case 0: stack[top++] = x; break;
            case 1: stack[top++] = pc; break;
            case 2: --top; stack[top - 1] += stack[top]; break;
            case 3: --top; stack[top - 1] *= stack[top]; break;
            case 4: { int t = stack[top - 1]; stack[top - 1] = stack[top - 2]; stack[top - 2] = t; break; }
            case 5: stack[top - 1] = -stack[top - 1]; break;
            default: stack[top - 1] >>= 1;
        }
        return stack[0];
    }
    extern "C" __global__ void k(const unsigned char* code, int n, int* y) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        y[i] = run(code + i % 2 * n, n, i) + run(code, 3, 2 * i);
    }"""
    code = np.array([[0, 1, 3, 0, 4, 5, 2], [0, 0, 3, 6, 1, 4, 2]], np.uint8)

    def execute(program: np.ndarray, x: int) -> int:
        stack: list[int] = []
        for pc, op in enumerate(program.tolist()):
            if op < 2:
                stack.append((x, pc)[op])
            elif op < 4:
                b, a = stack.pop(), stack.pop()
                stack.append(a + b if op == 2 else a * b)
            elif op == 4:
                stack[-1], stack[-2] = stack[-2], stack[-1]
            else:
                stack[-1] = -stack[-1] if op == 5 else stack[-1] >> 1
        return stack[0]

    want = np.array([execute(code[i % 2], i) + execute(code[0, :3], 2 * i) for i in range(96)], np.int32)
    return Run(cuda, 2, 48, {"code": code, "n": 7, "y": np.zeros(96, np.int32)}, {"y": want})


@gallery
def cub_blocks_and_warps(rng: np.random.Generator) -> Run:
    cuda = r"""#include <cub/block/block_reduce.cuh>
    #include <cub/block/block_scan.cuh>
    #include <cub/warp/warp_reduce.cuh>
    extern "C" __global__ void k(const int* x, int* scan, int* total, int* most) {
        typedef cub::BlockScan<int, 128> Scan; typedef cub::BlockReduce<int, 128> Reduce; typedef cub::WarpReduce<int> Warp;
        __shared__ union { Scan::TempStorage scan; Reduce::TempStorage reduce; Warp::TempStorage warp[4]; } s;
        int i = blockIdx.x * 128 + threadIdx.x, v = x[i], out;
        Scan(s.scan).ExclusiveSum(v, out);
        scan[i] = out;
        __syncthreads();
        int sum = Reduce(s.reduce).Sum(v);
        if (threadIdx.x == 0) total[blockIdx.x] = sum;
        __syncthreads();
        int m = Warp(s.warp[threadIdx.x / 32]).Reduce(v, cuda::maximum<>{});
        if (threadIdx.x % 32 == 0) most[i / 32] = m;
    }"""
    x = rng.integers(-99, 99, 256).astype(np.int32)
    blocks = x.reshape(2, 128)
    args = {"x": x, "scan": np.zeros_like(x), "total": np.zeros(2, np.int32), "most": np.zeros(8, np.int32)}
    want = {"scan": (np.cumsum(blocks, 1) - blocks).reshape(-1), "total": blocks.sum(1), "most": x.reshape(8, 32).max(1)}
    return Run(cuda, 2, 128, args, want)


@gallery
def standard_library(rng: np.random.Generator) -> Run:
    cuda = r"""#include <cuda/std/array>
    #include <cuda/std/complex>
    #include <cuda/std/tuple>
    #include <cuda/atomic>
    extern "C" __global__ void k(const float2* x, float2* y, int* count) {
        cuda::std::complex<float> z(x[threadIdx.x].x, x[threadIdx.x].y);
        cuda::std::array<cuda::std::complex<float>, 3> powers{z, z * z, z * z * z};
        auto [a, b] = cuda::std::make_tuple(powers[threadIdx.x % 3], cuda::std::conj(z));
        y[threadIdx.x] = make_float2((a + b).real(), (a + b).imag());
        if (a.real() > 0) cuda::atomic_ref<int, cuda::thread_scope_device>(*count).fetch_add(1, cuda::std::memory_order_relaxed);
    }"""
    x = (rng.integers(-4, 5, 96) + 1j * rng.integers(-4, 5, 96)).astype(np.complex64)
    power = np.stack([x, x * x, x * x * x])[np.arange(96) % 3, np.arange(96)]
    args = {"x": x, "y": np.zeros_like(x), "count": np.zeros(1, np.int32)}
    return Run(cuda, 1, 96, args, {"y": power + x.conj(), "count": np.array([(power.real > 0).sum()])})


@gallery
def intrinsics_of_a_warp(rng: np.random.Generator) -> Run:
    cuda = r"""extern "C" __global__ void k(const unsigned* x, uint4* y) {
        unsigned v = __ldg(x + threadIdx.x), half = threadIdx.x & 16 ? 0xffff0000u : 0xffffu;
        y[threadIdx.x] = make_uint4(__reduce_add_sync(half, v), __match_any_sync(half, v % 3), __byte_perm(v, ~v, 0x2705),
                                    __reduce_max_sync(~0u, v) + __vabsdiffu4(v, x[0]) + __vadd2(v, v));
    }"""
    x = rng.integers(0, 1 << 32, 32, dtype=np.uint32)
    sums = np.repeat(x.reshape(2, 16).sum(1, dtype=np.uint32), 16)
    match = [sum(1 << j for j in range(32) if j // 16 == i // 16 and x[j] % 3 == x[i] % 3) for i in range(32)]
    parts = np.concatenate((x.view(np.uint8).reshape(-1, 4), (~x).view(np.uint8).reshape(-1, 4)), axis=1)
    perm = np.ascontiguousarray(parts[:, [5, 0, 7, 2]]).view(np.uint32).reshape(-1)
    b = x.view(np.uint8).reshape(-1, 4).astype(np.int16)
    away = np.abs(b - b[0]).astype(np.uint8).view(np.uint32).reshape(-1)
    twice = (x.view(np.uint16) * np.uint16(2)).view(np.uint32)
    want = np.stack([sums, np.array(match, np.uint32), perm, x.max() + away + twice], axis=1)
    return Run(cuda, 1, 32, {"x": x, "y": np.zeros((32, 4), np.uint32)}, {"y": want})


@gallery
def shapes_with_virtual_functions(rng: np.random.Generator) -> Run:
    """Calls through tables of functions, some of them recursive."""
    cuda = r"""struct Shape { __device__ virtual int area(int n) const = 0; };
    struct Square : Shape { __device__ int area(int n) const override { return n * n; } };
    struct Tree : Shape { __device__ static __noinline__ int grow(int n) { return n < 2 ? 1 : grow(n - 1) + 2 * grow(n - 2); }
                          __device__ int area(int n) const override { return grow(n); } };
    typedef int (*Op)(int, int);
    __device__ __noinline__ int add(int a, int b) { return a + b; }
    __device__ __noinline__ int sub(int a, int b) { return a - b; }
    __device__ Op ops[2] = {add, sub};
    extern "C" __global__ void k(const int* which, int* y) {
        Square s; Tree t;
        const Shape* shape = which[threadIdx.x] & 1 ? (const Shape*)&s : &t;
        y[threadIdx.x] = ops[which[threadIdx.x] >> 1](shape->area(threadIdx.x % 7), threadIdx.x);
    }"""
    which, i = rng.integers(0, 4, 64).astype(np.int32), np.arange(64)
    tree = [1, 1]
    for _ in range(5):
        tree.append(tree[-1] + 2 * tree[-2])
    area = np.where(which & 1, (i % 7) ** 2, np.array(tree)[i % 7])
    return Run(cuda, 1, 64, {"which": which, "y": np.zeros(64, np.int32)}, {"y": np.where(which >> 1, area - i, area + i)})


@gallery
def grid_wide_synchronisation(rng: np.random.Generator) -> Run:
    cuda = r"""#include <cooperative_groups.h>
    extern "C" __global__ void k(const int* x, int* part, int* y) {
        auto grid = cooperative_groups::this_grid();
        int i = grid.thread_rank(), s = 0;
        part[i] = x[i] * x[i];
        grid.sync();
        for (int j = 0; j < grid.size(); j += 32) s += part[(i + j) % grid.size()];
        y[i] = s;
    }"""
    x = rng.integers(-9, 9, 192).astype(np.int32)
    want = np.array([(x * x)[(i + np.arange(0, 192, 32)) % 192].sum() for i in range(192)])
    return Run(cuda, 4, 48, {"x": x, "part": np.zeros_like(x), "y": np.zeros_like(x)}, {"y": want})


@gallery
def eight_bit_floats(rng: np.random.Generator) -> Run:
    import ml_dtypes

    cuda = r"""#include <cuda_fp8.h>
    extern "C" __global__ void k(const float2* x, __nv_fp8x2_e4m3* a, __nv_fp8x2_e5m2* b, float2* c) {
        a[threadIdx.x] = __nv_fp8x2_e4m3(x[threadIdx.x]);
        b[threadIdx.x] = __nv_fp8x2_e5m2(x[threadIdx.x]);
        c[threadIdx.x] = float2(a[threadIdx.x]);
    }"""
    x = (rng.standard_normal((64, 2)) * 10.0 ** rng.integers(-4, 4, (64, 2))).astype(F)
    x[0], x[1, 0] = [np.inf, -np.inf], np.nan
    a = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    b = np.clip(x, -57344, 57344).astype(ml_dtypes.float8_e5m2)
    bits_a, bits_b = a.view(np.uint8).copy(), b.view(np.uint8).copy()
    bits_a[np.isnan(x)] = bits_b[np.isnan(x)] = 0x7F
    args = {"x": x, "a": np.zeros((64, 2), np.uint8), "b": np.zeros((64, 2), np.uint8), "c": np.zeros((64, 2), F)}
    return Run(cuda, 1, 64, args, {"a": bits_a, "b": bits_b, "c": a.astype(F)}, options=("-arch=compute_90",))


@gallery
def wide_vectors(rng: np.random.Generator) -> Run:
    cuda = r"""struct alignas(32) Eight { float v[8]; };
    extern "C" __global__ void k(const Eight* x, Eight* y) { y[threadIdx.x ^ 1] = x[threadIdx.x]; }"""
    x = rng.standard_normal((64, 8)).astype(F)
    want = x[np.arange(64) ^ 1]
    return Run(cuda, 1, 64, {"x": x, "y": np.zeros_like(x)}, {"y": want}, options=("-arch=compute_100",))


# To compile these takes long: headers of CUDA's libraries.
LIBRARIES = {"cub_blocks_and_warps", "standard_library", "grid_wide_synchronisation"}


@pytest.mark.parametrize("seed", [None, wide(1)])
@pytest.mark.parametrize("name", sample(gallery.names, {*gallery.names} - LIBRARIES))
def test_kernel(name: str, seed: int | None) -> None:
    check_kernel(gallery.make(name), seed)
