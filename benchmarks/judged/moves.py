"""Data that moves: transposes, gathers, scans, sorts, histograms."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
from pairs import JudgedPair, by_rows, launch, of_code, over

i32 = np.int32

TRANSPOSE = r"""extern "C" __global__ void k(const float* x, float* y, int m, int n) {
    __shared__ float tile[16][17];
    int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x;
    if (i < m && j < n) tile[threadIdx.y][threadIdx.x] = x[i * n + j];
    __syncthreads();
    i = blockIdx.y * 16 + threadIdx.x; j = blockIdx.x * 16 + threadIdx.y;
    if (i < m && j < n) y[j * m + i] = tile[threadIdx.x][threadIdx.y];
}"""


@of_code
def transpose(code: str, x: "float32[m, n]") -> Any:
    m, n = x.shape
    y = cp.empty((n, m), np.float32)
    launch(code, (over(n, 16), over(m, 16)), (16, 16), x, y, i32(m), i32(n))
    return y


GATHER = r"""extern "C" __global__ void k(const float* x, const INDEX* at, float* y, int n) {
    for (int j = threadIdx.x; j < n; j += 32) y[blockIdx.x * n + j] = x[at[blockIdx.x] * n + j];
}"""


@of_code
def gather(kind: Any, x: "float32[m, n]", at: "int64[r] in range(m)") -> Any:
    y = cp.empty((at.size, x.shape[1]), np.float32)
    name = {np.int64: "long long", np.int8: "signed char"}[kind]
    launch(GATHER.replace("INDEX", name), at.size, 32, x, at.astype(kind), y, i32(x.shape[1]))
    return y


SCATTER = r"""extern "C" __global__ void k(const int* v, const int* at, int* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(y + at[i], v[i]);
}"""


@of_code
def scatter(code: str, v: "int32[n]", at: "int32[n] in range(m)", y: "inout int32[m]") -> None:
    launch(code, over(v.size, 64), 64, v, at, y, i32(v.size))


def scatter_reference(v: Any, at: Any, y: Any) -> None:
    np.add.at(y, at, v)


SCAN = r"""extern "C" __global__ void k(const int* x, int* y, int n) {
    __shared__ int s[256];
    __shared__ int before;
    int t = threadIdx.x;
    if (t == 0) before = 0;
    for (int at = 0; at < n; at += 256) {
        s[t] = at + t < n ? x[blockIdx.x * n + at + t] : 0;
        __syncthreads();
        for (int o = 1; o < 256; o *= 2) {
            int v = t >= o ? s[t - o] : 0;
            __syncthreads();
            s[t] += v;
            __syncthreads();
        }
        if (at + t < n) y[blockIdx.x * n + at + t] = before + s[t];
        __syncthreads();
        if (t == 255) before += s[255];
        __syncthreads();
    }
}"""


def scan_reference(x: Any) -> Any:
    return np.cumsum(x, axis=1, dtype=np.int32)


HISTOGRAM = r"""extern "C" __global__ void k(const unsigned char* x, int* y, int n) {
    __shared__ int s[256];
    s[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) atomicAdd(s + x[i], 1);
    __syncthreads();
    atomicAdd(y + threadIdx.x, s[threadIdx.x]);
}"""


@of_code
def histogram(code: str, x: "uint8[n]") -> Any:
    y = cp.zeros(256, np.int32)
    launch(code, min(over(x.size, 256), 4), 256, x, y, i32(x.size))
    return y


def histogram_reference(x: Any) -> Any:
    return np.bincount(x, minlength=256).astype(np.int32)


REVERSE = r"""extern "C" __global__ void k(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n / 2) { float v = x[i]; x[i] = x[n - 1 - i]; x[n - 1 - i] = v; }
}"""


@of_code
def reverse(code: str, x: "inout float32[n]") -> None:
    launch(code, over(x.size, 64), 64, x, i32(x.size))


def reverse_reference(x: Any) -> None:
    x[:] = x[::-1].copy()


SHIFT = r"""extern "C" __global__ void k(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i + 1 < n ? i + 1 : 0];
}"""


@of_code
def shift(copy: bool, x: "inout float32[n]") -> None:
    launch(SHIFT, over(x.size, 128), 128, x.copy() if copy else x, x, i32(x.size))


def shift_reference(x: Any) -> None:
    x[:] = np.roll(x, -1)


TRIANGLE = r"""extern "C" __global__ void k(const float* x, float* y, int n) {
    for (int j = threadIdx.x; j < n; j += 32) y[blockIdx.x * n + j] = j <= blockIdx.x ? x[blockIdx.x * n + j] : 0.f;
}"""


SORT = r"""extern "C" __global__ void k(const float* x, float* y, int n) {
    __shared__ float s[256];
    int t = threadIdx.x;
    s[t] = t < n ? x[blockIdx.x * n + t] : __int_as_float(0x7f800000);
    __syncthreads();
    for (int size = 2; size <= 256; size *= 2)
        for (int o = size / 2; o; o /= 2) {
            int other = t ^ o;
            if (other > t) {
                bool up = (t & size) == 0;
                float a = s[t], b = s[other];
                if ((a > b) == up) { s[t] = b; s[other] = a; }
            }
            __syncthreads();
        }
    if (t < n) y[blockIdx.x * n + t] = s[t];
}"""


def short_rows(draw: Any) -> Any:
    return draw.array((draw.size("m", most=8), draw.size("n", most=256)), "float32")


PAIRS = (
    JudgedPair.seeded(
        "transpose",
        np.transpose,
        transpose,
        TRANSPOSE,
        ("if (i < m && j < n) y[j", "if (j < m && i < n) y[j"),
        fault="bounds of the other axis: right at square shapes",
        kinds=("unwritten", "out of bounds"),
    ),
    JudgedPair(
        "gather rows",
        lambda x, at: x[at],
        gather(np.int64),
        gather(np.int8),
        "indices as bytes: right up to 127",
        kinds=("out of bounds", "wrong values"),
    ),
    JudgedPair.seeded(
        "scatter-add",
        scatter_reference,
        scatter,
        SCATTER,
        ("atomicAdd(y + at[i], v[i])", "y[at[i]] += v[i]"),
        fault="no atomics where indices meet",
        kinds=("race",),
    ),
    JudgedPair.seeded(
        "scan of rows",
        scan_reference,
        by_rows("int32[m, n]", 256),
        SCAN,
        (": 0;\n            __syncthreads();\n", ": 0;\n"),
        fault="a step reads what others already changed",
        kinds=("race",),
    ),
    JudgedPair.seeded(
        "histogram",
        histogram_reference,
        histogram,
        HISTOGRAM,
        ("s[threadIdx.x] = 0;\n", "\n"),
        fault="counters in shared memory that nobody cleared",
        kinds=("uninitialised",),
    ),
    JudgedPair.seeded(
        "reverse in place",
        reverse_reference,
        reverse,
        REVERSE,
        ("i < n / 2", "i < n"),
        fault="two threads swap each pair",
        kinds=("race",),
    ),
    JudgedPair(
        "shift in place", shift_reference, shift(True), shift(False), "output and input are the same memory", kinds=("race",)
    ),
    JudgedPair.seeded(
        "lower triangle",
        np.tril,
        by_rows("float32[n, n]", 32),
        TRIANGLE,
        (
            "y[blockIdx.x * n + j] = j <= blockIdx.x ? x[blockIdx.x * n + j] : 0.f",
            "if (j <= blockIdx.x) y[blockIdx.x * n + j] = x[blockIdx.x * n + j]",
        ),
        fault="nothing writes the zeros",
        kinds=("unwritten",),
    ),
    JudgedPair.seeded(
        "sort of rows",
        lambda x: np.sort(x, axis=1),
        by_rows("float32[m, n]", 256),
        SORT,
        ("            __syncthreads();\n        }", "            if (o > 16) __syncthreads();\n        }"),
        fault="no barrier among steps within a warp",
        kinds=("race",),
        inputs=short_rows,
    ),
)
