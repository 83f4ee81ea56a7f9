"""Products of matrices and stencils."""

from __future__ import annotations

from functools import partial
from typing import Any

import cupy as cp
import numpy as np
from pairs import Function, JudgedPair, elementwise, launch, of_code, over

i32 = np.int32

NAIVE = r"""extern "C" __global__ void k(const float* a, const float* b, float* c, int m, int n, int p) {
    int i = blockIdx.y * 8 + threadIdx.y, j = blockIdx.x * 32 + threadIdx.x;
    if (i >= m || j >= n) return;
    float sum = 0;
    for (int q = 0; q < p; ++q) sum += a[i * p + q] * b[q * n + j];
    c[i * n + j] = sum;
}"""

TILED = r"""extern "C" __global__ void k(const float* a, const float* b, float* c, int m, int n, int p) {
    __shared__ float as[16][16], bs[16][17];
    int x = threadIdx.x, y = threadIdx.y, i = blockIdx.y * 16 + y, j = blockIdx.x * 16 + x;
    float sum = 0;
    for (int q = 0; q < p; q += 16) {
        as[y][x] = i < m && q + x < p ? a[i * p + q + x] : 0.f;
        bs[y][x] = q + y < p && j < n ? b[(q + y) * n + j] : 0.f;
        __syncthreads();
        for (int r = 0; r < 16; ++r) sum += as[y][r] * bs[r][x];
        __syncthreads();
    }
    if (i < m && j < n) c[i * n + j] = sum;
}"""

HALF = r"""#include <cuda_fp16.h>
""" + NAIVE.replace("const float*", "const __half*").replace("float* c", "__half* c").replace(
    "a[i * p + q] * b[q * n + j]", "__half2float(a[i * p + q]) * __half2float(b[q * n + j])"
)


def product(code: str, tile: tuple[int, int] = (32, 8), half: bool = False) -> Function:
    def f(a: Any, b: Any) -> Any:
        (m, p), n = a.shape, b.shape[1]
        c = cp.empty((m, n), a.dtype)
        launch(code, (over(n, tile[0]), over(m, tile[1])), tile, a, b, c, i32(m), i32(n), i32(p))
        return c

    kind = "float16" if half else "float32"
    f.__annotations__ = {"a": f"{kind}[m, p]", "b": f"{kind}[p, n]"}
    return f


MATVEC = r"""extern "C" __global__ void k(const float* a, const float* x, float* y, int n) {
    float sum = 0;
    for (int j = threadIdx.x; j < n; j += 32) sum += a[blockIdx.x * n + j] * x[j];
    for (int o = 16; o; o /= 2) sum += __shfl_down_sync(~0u, sum, o);
    if (threadIdx.x == 0) y[blockIdx.x] = sum;
}"""


@of_code
def matvec(code: str, a: "float32[m, n]", x: "float32[n]") -> Any:
    y = cp.empty(a.shape[0], np.float32)
    launch(code, a.shape[0], 32, a, x, y, i32(a.shape[1]))
    return y


GRAM = r"""extern "C" __global__ void k(const double* a, double* c, int m, int n) {
    int i = blockIdx.y * 8 + threadIdx.y, j = blockIdx.x * 8 + threadIdx.x;
    if (i >= n || j >= n) return;
    SUM sum = 0;
    for (int q = 0; q < m; ++q) sum += (SUM)a[q * n + i] * (SUM)a[q * n + j];
    c[i * n + j] = sum;
}"""


@of_code
def gram(kind: str, a: "float64[m, n]") -> Any:
    m, n = a.shape
    c = cp.empty((n, n), np.float64)
    launch(GRAM.replace("SUM", kind), (over(n, 8), over(n, 8)), (8, 8), a, c, i32(m), i32(n))
    return c


STENCIL = r"""extern "C" __global__ void k(const float* x, float* y, int n) {
    __shared__ float s[130];
    int t = threadIdx.x, i = blockIdx.x * 128 + t;
    s[t + 1] = i < n ? x[i] : 0.f;
    if (t == 0) s[0] = i > 0 ? x[i - 1] : 0.f;
    if (t == 127) s[129] = i + 1 < n ? x[i + 1] : 0.f;
    __syncthreads();
    if (i < n) y[i] = 0.25f * s[t] + 0.5f * s[t + 1] + 0.25f * s[t + 2];
}"""


def stencil_reference(x: Any) -> Any:
    wide = np.pad(x, 1)
    return 0.25 * wide[:-2] + 0.5 * wide[1:-1] + 0.25 * wide[2:]


IMAGE = r"""extern "C" __global__ void k(const float* x, const float* w, float* y, int rows, int columns) {
    int j = blockIdx.x * 16 + threadIdx.x, i = blockIdx.y * 4 + threadIdx.y;
    if (i >= rows || j >= columns) return;
    float sum = 0;
    for (int a = -1; a < 2; ++a)
        for (int b = -1; b < 2; ++b)
            if (i + a >= 0 && i + a < rows && j + b >= 0 && j + b < columns)
                sum += w[(a + 1) * 3 + b + 1] * x[(i + a) * columns + j + b];
    y[i * columns + j] = sum;
}"""


@of_code
def image(code: str, x: "float32[rows, columns]", w: "float32[3, 3]") -> Any:
    y = cp.empty_like(x)
    rows, columns = x.shape
    launch(code, (over(columns, 16), over(rows, 4)), (16, 4), x, w, y, i32(rows), i32(columns))
    return y


def image_reference(x: Any, w: Any) -> Any:
    wide = np.pad(x, 1)
    rows, columns = x.shape
    return sum(w[a, b] * wide[a : a + rows, b : b + columns] for a in range(3) for b in range(3))


PAIRS = (
    JudgedPair.seeded(
        "matrix product",
        np.matmul,
        product,
        NAIVE,
        ("b[q * n + j]", "b[q * p + j]"),
        fault="a row length that is right at square shapes",
        kinds=("wrong values", "out of bounds"),
    ),
    JudgedPair.seeded(
        "matrix product, tiled",
        np.matmul,
        partial(product, tile=(16, 16)),
        TILED,
        ("bs[r][x];\n        __syncthreads();", "bs[r][x];"),
        fault="tiles are loaded while others still read",
        kinds=("race",),
    ),
    JudgedPair.seeded(
        "matrix product float16",
        np.matmul,
        partial(product, half=True),
        HALF,
        ("float sum = 0", "__half sum = 0.f"),
        ("__half2float(a[i * p + q]) * __half2float(b[q * n + j])", "a[i * p + q] * b[q * n + j]"),
        fault="the sum is in float16",
    ),
    JudgedPair.seeded(
        "matrix by vector", np.matmul, matvec, MATVEC, ("j < n;", "j < min(n, 1024);"), fault="no more than 1,024 columns"
    ),
    JudgedPair("A^T A in float64", lambda a: a.T @ a, gram("double"), gram("float"), "the sum of a float64 product is in float32"),
    JudgedPair.seeded(
        "three-point stencil",
        stencil_reference,
        elementwise("float32[n]"),
        STENCIL,
        ("if (t == 127) s[129]", "if (t == 128) s[129]"),
        fault="the right halo is not loaded",
        kinds=("uninitialised",),
    ),
    JudgedPair.seeded(
        "3 x 3 convolution",
        image_reference,
        image,
        IMAGE,
        ("j + b < columns", "j + b < rows"),
        fault="height in place of width: right at square shapes",
    ),
)
