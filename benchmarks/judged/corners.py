"""Corners of values and types: signed zeros, NaN, halves, overflow, empty segments, counters that stay, kernels of `cupyx.jit`."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import pairwise
from typing import Any

import cupy as cp
import numpy as np
from cupyx import jit
from pairs import Function, JudgedPair, changed, elementwise, launch, of_code, over

i32 = np.int32
OF_X = r"""extern "C" __global__ void k(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = isnan(x[i]) ? 0.f : fminf(fmaxf(x[i], -1e4f), 1e4f);
}"""


def clean_reference(x: Any) -> Any:
    return np.clip(np.nan_to_num(x, nan=0.0), -1e4, 1e4)


SIGN = r"""extern "C" __global__ void k(const float* x, const float* s, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = copysignf(x[i], s[i]);
}"""


@of_code
def sign(code: str, x: "float32[n]", s: "float32[n]") -> Any:
    y = cp.empty_like(x)
    launch(code, over(x.size, 128), 128, x, s, y, i32(x.size))
    return y


QUANTIZED = r"""extern "C" __global__ void k(const float* x, const float* s, signed char* y, int n) {
    int i = blockIdx.y, j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j < n) y[i * n + j] = (signed char)fminf(fmaxf(rintf(x[i * n + j] * s[i]), -127.f), 127.f);
}"""


@of_code
def quantized(code: str, x: "float32[m, n]", s: "float32[m] in (0.5, 30)") -> Any:
    y = cp.empty(x.shape, np.int8)
    launch(code, (over(x.shape[1], 64), x.shape[0]), 64, x, s, y, i32(x.shape[1]))
    return y


def quantized_reference(x: Any, s: Any) -> Any:
    return np.clip(np.rint(x * s[:, None]), -127, 127).astype(np.int8)


MIDDLE = r"""extern "C" __global__ void k(const int* a, const int* b, int* y, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = ((long long)a[i] + b[i]) >> 1;
}"""


@of_code
def middle(code: str, a: "int32[n]", b: "int32[n]") -> Any:
    y = cp.empty_like(a)
    launch(code, 8, 128, a, b, y, i32(a.size))
    return y


def middle_reference(a: Any, b: Any) -> Any:
    return ((a.astype(np.int64) + b) >> 1).astype(np.int32)


MEANS = r"""#include <cuda_fp16.h>
extern "C" __global__ void k(const __half* x, __half* y, int n) {
    float s = 0;
    for (int i = threadIdx.x; i < n; i += 32) s += __half2float(x[blockIdx.x * n + i]);
    for (int o = 16; o; o >>= 1) s += __shfl_down_sync(~0u, s, o);
    if (threadIdx.x == 0) y[blockIdx.x] = __float2half(s / n);
}"""


@of_code
def means(code: str, x: "float16[m, n]") -> Any:
    y = cp.empty(x.shape[0], np.float16)
    launch(code, x.shape[0], 32, x, y, i32(x.shape[1]))
    return y


BYTES = r"""extern "C" __global__ void k(const unsigned char* x, unsigned long long* y, int n) {
    unsigned long long s = 0;
    for (int i = threadIdx.x; i < n; i += 128) s += x[i];
    atomicAdd(y, s);
}"""


@of_code
def sum_of_bytes(code: str, x: "uint8[n]") -> Any:
    y = cp.zeros(1, np.uint64)
    launch(code, 1, 128, x, y, i32(x.size))
    return y


COLUMNS = r"""extern "C" __global__ void k(const float* x, float* y, int m, int n) {
    int j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= n) return;
    float most = x[j], sum = 0;
    for (int i = 1; i < m; ++i) most = fmaxf(most, x[i * n + j]);
    for (int i = 0; i < m; ++i) sum += expf(x[i * n + j] - most);
    for (int i = 0; i < m; ++i) y[i * n + j] = expf(x[i * n + j] - most) / sum;
}"""


@of_code
def columns(code: str, x: "float32[m, n]") -> Any:
    y = cp.empty_like(x)
    launch(code, over(x.shape[1], 32), 32, x, y, i32(x.shape[0]), i32(x.shape[1]))
    return y


def columns_reference(x: Any) -> Any:
    e = np.exp(x - x.max(axis=0))
    return e / e.sum(axis=0)


LAST = r"""extern "C" __global__ void k(const float* x, float* part, float* y, unsigned* done, int n) {
    __shared__ float s[128];
    __shared__ bool last;
    int t = threadIdx.x;
    float a = 0;
    for (int i = blockIdx.x * 128 + t; i < n; i += 128 * gridDim.x) a += x[i];
    s[t] = a;
    __syncthreads();
    for (int h = 64; h; h >>= 1) {
        if (t < h) s[t] += s[t + h];
        __syncthreads();
    }
    if (t == 0) {
        part[blockIdx.x] = s[0];
        __threadfence();
        last = atomicAdd(done, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last || t) return;
    __threadfence();
    float b = 0;
    for (int i = 0; i < gridDim.x; ++i) b += part[i];
    *y = b;
    *done = 0;
}"""
DONE = {code: np.zeros(1, np.uint32) for code in ("right", "wrong")}


def last_block(code: str, done: str) -> Function:
    def f(x: "float32[n]") -> Any:
        part, y = cp.empty(16, np.float32), cp.zeros(1, np.float32)
        launch(code, 16, 128, x, part, y, DONE[done], i32(x.size))
        return y

    return f


SEGMENTS = r"""extern "C" __global__ void k(const float* v, const int* starts, float* y, int m) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= m) return;
    float s = 0;
    for (int q = starts[i]; q < starts[i + 1]; ++q) s += v[q];
    y[i] = s;
}"""


@of_code
def segments(code: str, v: Any, starts: Any) -> Any:
    y = cp.empty(starts.size - 1, np.float32)
    launch(code, over(y.size, 64), 64, v, starts, y, i32(y.size))
    return y


def segments_inputs(draw: Any) -> dict[str, Any]:
    n, m = draw.size("n"), draw.size("m")
    starts = np.sort(draw.array(m + 1, "int32", 0, n))
    starts[0], starts[-1] = 0, n
    return {"v": draw.array(n), "starts": starts}


def segments_reference(v: Any, starts: Any) -> Any:
    return np.array([v[a:b].sum() for a, b in pairwise(starts)], v.dtype)


TAKE = r"""extern "C" __global__ void k(const float* x, const int* at, float* y, int m, int n, int r) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < m * r) y[i] = x[i / r * n + (at[i] < 0 ? at[i] + n : at[i])];
}"""


@of_code
def take(code: str, x: "float32[m, n]", at: "int32[m, r] in range(-n, n)") -> Any:
    y = cp.empty(at.shape, np.float32)
    launch(code, over(at.size, 128), 128, x, at, y, i32(x.shape[0]), i32(x.shape[1]), i32(at.shape[1]))
    return y


ADAM = r"""extern "C" __global__ void k(float* p, const float* g, float* m, float* v, float rate, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    m[i] = 0.9f * m[i] + 0.1f * g[i];
    v[i] = 0.999f * v[i] + 0.001f * g[i] * g[i];
    p[i] -= rate * m[i] / (sqrtf(v[i]) + 1e-8f);
}"""


@of_code
def adam(
    code: str,
    p: "inout float32[n]",
    g: "float32[n]",
    m: "inout float32[n]",
    v: "inout float32[n] in (0, 4)",
    rate: "float32 in (0.0001, 0.1)",
) -> None:
    launch(code, over(p.size, 256), 256, p, g, m, v, rate, i32(p.size))


def adam_reference(p: Any, g: Any, m: Any, v: Any, rate: Any) -> None:
    m[...] = 0.9 * m + 0.1 * g
    v[...] = 0.999 * v + 0.001 * g * g
    p[...] = p - rate * m / (np.sqrt(v) + 1e-8)


DISTANCES = r"""extern "C" __global__ void k(const float* a, const float* b, float* y, int m, int n, int d) {
    int j = blockIdx.x * 16 + threadIdx.x, i = blockIdx.y * 16 + threadIdx.y;
    if (i >= m || j >= n) return;
    float s = 0;
    for (int q = 0; q < d; ++q) {
        float u = a[i * d + q], v = b[j * d + q];
        s += (u - v) * (u - v);
    }
    y[i * n + j] = s;
}"""


@of_code
def distances(code: str, a: "float32[m, d]", b: "float32[n, d]") -> Any:
    y = cp.empty((a.shape[0], b.shape[0]), np.float32)
    sizes = i32(a.shape[0]), i32(b.shape[0]), i32(a.shape[1])
    launch(code, (over(b.shape[0], 16), over(a.shape[0], 16)), (16, 16), a, b, y, *sizes)
    return y


def distances_reference(a: Any, b: Any) -> Any:
    return ((a[:, None] - b[None]) ** 2).sum(-1)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # cupyx.jit may change

    @jit.rawkernel()
    def above(x, y, n, k):  # type: ignore[no-untyped-def]
        j = np.int32(jit.grid(1))
        i = np.int32(jit.blockIdx.y)
        if j < n:
            y[i, j] = x[i, j] if j - i >= k else np.float32(0)

    @jit.rawkernel()
    def right_of(x, y, n, k):  # type: ignore[no-untyped-def]
        j = np.int32(jit.grid(1))
        i = np.int32(jit.blockIdx.y)
        if j < n:
            y[i, j] = x[i, j] if j - i > k else np.float32(0)


@of_code
def triangle(kernel: Any, x: "float32[m, n]", k: "int32 in range(-20, 20)") -> Any:
    y = cp.empty_like(x)
    kernel((over(x.shape[1], 64), x.shape[0]), (64,), (x, y, i32(x.shape[1]), k))
    return y


PAIRS = (
    JudgedPair.seeded(
        "NaN to zero", clean_reference, elementwise("float32[n]"), OF_X, ("isnan(x[i]) ? 0.f : ", ""), fault="NaN becomes a bound"
    ),
    JudgedPair.seeded(
        "sign of",
        np.copysign,
        sign,
        SIGN,
        ("copysignf(x[i], s[i])", "s[i] < 0 ? -fabsf(x[i]) : fabsf(x[i])"),
        fault="-0 is not below 0",
    ),
    JudgedPair.seeded(
        "quantized to bytes",
        quantized_reference,
        quantized,
        QUANTIZED,
        ("rintf", "roundf"),
        fault="halves are rounded away from zero",
    ),
    JudgedPair.seeded(
        "middle of integers", middle_reference, middle, MIDDLE, ("(long long)a[i]", "a[i]"), fault="the sum is beyond 32 bits"
    ),
    JudgedPair.seeded(
        "means float16",
        lambda x: x.mean(axis=1),
        means,
        MEANS,
        ("__float2half(s / n)", "__hdiv(__float2half(s), __float2half((float)n))"),
        fault="the sum is beyond float16",
    ),
    JudgedPair.seeded(
        "sum of bytes",
        lambda x: x.sum(dtype=np.uint64, keepdims=True),
        sum_of_bytes,
        BYTES,
        ("unsigned long long s = 0", "unsigned short s = 0"),
        fault="a thread's sum has 16 bits",
    ),
    JudgedPair.seeded(
        "softmax of columns",
        columns_reference,
        columns,
        COLUMNS,
        ("i < m; ++i) most", "i < m - 1; ++i) most"),
        fault="the last row is not in the maximum",
    ),
    JudgedPair(
        "sum by the last block",
        lambda x: x.sum(keepdims=True),
        last_block(LAST, "right"),
        last_block(changed(LAST, ("    *done = 0;\n", "")), "wrong"),
        "the counter stays",
        kinds=("state", "wrong values"),
    ),
    JudgedPair.seeded(
        "sum by the last block, fence",
        lambda x: x.sum(keepdims=True),
        partial(last_block, done="right"),
        LAST,
        ("        __threadfence();\n", ""),
        fault="nothing tells that a block's sum is there",
        kinds=("race",),
    ),
    JudgedPair.seeded(
        "segment sums",
        segments_reference,
        segments,
        SEGMENTS,
        ("    float s = 0;\n", "    if (starts[i] == starts[i + 1]) return;\n    float s = 0;\n"),
        fault="empty segments have no sum",
        kinds=("unwritten",),
        inputs=segments_inputs,
    ),
    JudgedPair.seeded(
        "take along an axis",
        lambda x, at: np.take_along_axis(x, at, 1),
        take,
        TAKE,
        ("+ n :", "+ n - 1 :"),
        fault="indices from the end are one off",
        kinds=("wrong values", "out of bounds"),
    ),
    JudgedPair.seeded(
        "Adam in place",
        adam_reference,
        adam,
        ADAM,
        ("sqrtf(v[i]) + 1e-8f", "sqrtf(v[i] + 1e-8f)"),
        fault="the small number is under the root",
    ),
    JudgedPair.seeded(
        "squared distances",
        distances_reference,
        distances,
        DISTANCES,
        ("(u - v) * (u - v)", "u * u + v * v - 2 * u * v"),
        fault="large numbers cancel",
    ),
    JudgedPair("upper triangle, jit", np.triu, triangle(above), triangle(right_of), "without the diagonal"),
)
