"""Many input elements for each output element."""

from __future__ import annotations

from functools import partial
from typing import Any

import cupy as cp
import numpy as np
from pairs import Function, JudgedPair, changed, launch, of_code, over

i32 = np.int32

TREE = r"""extern "C" __global__ void k(const float* x, float* y, int n) {
    __shared__ float part[128];
    int t = threadIdx.x;
    float sum = 0;
    for (int i = t; i < n; i += 128) sum += x[blockIdx.x * n + i];
    part[t] = sum;
    __syncthreads();
    for (int half = 64; half; half /= 2) {
        if (t < half) part[t] += part[t + half];
        __syncthreads();
    }
    if (t == 0) y[blockIdx.x] = part[0];
}"""


def rows(code: str, threads: int = 128, kind: Any = None) -> Function:
    def f(x: "float32[m, n]") -> Any:
        y = cp.empty(x.shape[0], kind or x.dtype)
        launch(code, x.shape[0], threads, x, y, i32(x.shape[1]))
        return y

    return f


def row_sums(x: Any) -> Any:
    return x.sum(axis=1)


PARTIAL = r"""extern "C" __global__ void k(const float* x, float* y, int n) {
    __shared__ float part[256];
    int t = threadIdx.x, i = blockIdx.x * 256 + t;
    part[t] = i < n ? x[i] : 0.f;
    for (int half = 128; half; half /= 2) {
        __syncthreads();
        if (t < half) part[t] += part[t + half];
    }
    if (t == 0) y[blockIdx.x] = part[0];
}"""


@of_code
def total(stages: int, x: "float32[n]") -> Any:
    done = 0
    while x.size > 1 or not done:
        parts = cp.empty(over(x.size, 256), np.float32)
        launch(PARTIAL, parts.size, 256, x, parts, i32(x.size))
        x, done = parts, done + 1
        if done == stages:
            break
    return x[0].reshape(())


ATOMIC = r"""extern "C" __global__ void k(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(y, x[i]);
}"""


@of_code
def atomic(allocate: Function, x: "float32[n]") -> Any:
    y = allocate((), np.float32)
    launch(ATOMIC, over(x.size, 128), 128, x, y, i32(x.size))
    return y


KEPT = np.zeros((), np.float32)


def kept(x: "float32[n]") -> Any:
    launch(ATOMIC, over(x.size, 128), 128, x, KEPT, i32(x.size))
    return KEPT.copy()


MAXIMUM = changed(
    TREE,
    ("float sum = 0", "float sum = __int_as_float(0xff800000)"),
    ("sum += x[blockIdx.x * n + i]", "sum = fmaxf(sum, x[blockIdx.x * n + i])"),
    ("part[t] += part[t + half]", "part[t] = fmaxf(part[t], part[t + half])"),
)

ARGMAX = r"""#include <cuda_fp16.h>
#define INDEX int
#define STORED(i) (i)
#define LOADED(i) (i)
extern "C" __global__ void k(const float* x, long long* y, int n) {
    __shared__ float best[64];
    __shared__ INDEX place[64];
    int t = threadIdx.x, at = n;
    float most = __int_as_float(0xff800000);
    for (int i = t; i < n; i += 64) {
        float v = x[blockIdx.x * n + i];
        if (v > most || at == n) { most = v; at = i; }
    }
    best[t] = most; place[t] = STORED(at);
    __syncthreads();
    for (int half = 32; half; half /= 2) {
        if (t < half) {
            float a = best[t], b = best[t + half];
            if (b > a || (b == a && LOADED(place[t + half]) < LOADED(place[t]))) { best[t] = b; place[t] = place[t + half]; }
        }
        __syncthreads();
    }
    if (t == 0) y[blockIdx.x] = LOADED(place[0]);
}"""

HALF_INDEX = (
    ("INDEX int", "INDEX __half"),
    ("STORED(i) (i)", "STORED(i) __int2half_rn(i)"),
    ("LOADED(i) (i)", "LOADED(i) __half2int_rn(i)"),
)

COLUMNS = r"""extern "C" __global__ void k(const float* x, float* y, int m, int n) {
    int j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= n) return;
    float sum = 0;
    for (int i = 0; i < m; ++i) sum += x[i * n + j];
    y[j] = sum / m;
}"""


@of_code
def columns(code: str, x: "float32[m, n]") -> Any:
    y = cp.empty(x.shape[1], np.float32)
    launch(code, over(x.shape[1], 64), 64, x, y, i32(x.shape[0]), i32(x.shape[1]))
    return y


VARIANCE = r"""extern "C" __global__ void k(const float* x, float* y, int n) {
    const float* row = x + blockIdx.x * n;
    float mean = 0, sum = 0;
    for (int i = threadIdx.x; i < n; i += 32) mean += row[i];
    for (int o = 16; o; o /= 2) mean += __shfl_xor_sync(~0u, mean, o);
    mean /= n;
    for (int i = threadIdx.x; i < n; i += 32) sum += (row[i] - mean) * (row[i] - mean);
    for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
    if (threadIdx.x == 0) y[blockIdx.x] = sum / n;
}"""


def norm(squares: str = "x * x") -> Function:
    def f(x: "float32[...]") -> Any:
        return cp.ReductionKernel("T x", "T y", squares, "a + b", "y = sqrtf(a)", "0", "l2_norm")(x)

    return f


def norm_reference(x: Any) -> Any:
    return np.asarray(np.sqrt((x * x).sum()))


COUNT = r"""extern "C" __global__ void k(const int* x, int* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && x[i] > 0) atomicAdd(y, 1);
}"""


@of_code
def count(code: str, x: "int32[n]") -> Any:
    y = cp.zeros((), np.int32)
    launch(code, over(x.size, 128), 128, x, y, i32(x.size))
    return y


def count_reference(x: Any) -> Any:
    return np.asarray((x > 0).sum(), np.int32)


DOT = r"""extern "C" __global__ void k(const float* x, const float* y, float* z, int n) {
    __shared__ float part[32];
    int t = threadIdx.x, lane = t % 32;
    float sum = 0;
    for (int i = t; i < n; i += blockDim.x) sum += x[i] * y[i];
    for (int o = 16; o; o /= 2) sum += __shfl_down_sync(~0u, sum, o);
    if (lane == 0) part[t / 32] = sum;
    __syncthreads();
    if (t < 32) {
        sum = t < blockDim.x / 32 ? part[t] : 0.f;
        for (int o = 16; o; o /= 2) sum += __shfl_down_sync(~0u, sum, o);
        if (t == 0) *z = sum;
    }
}"""


@of_code
def dot(code: str, x: "float32[n]", y: "float32[n]") -> Any:
    z = cp.empty((), np.float32)
    launch(code, 1, 256, x, y, z, i32(x.size))
    return z


LOGSUMEXP = r"""extern "C" __global__ void k(const float* x, float* y, int n) {
    const float* row = x + blockIdx.x * n;
    float most = __int_as_float(0xff800000), sum = 0;
    for (int i = threadIdx.x; i < n; i += 32) most = fmaxf(most, row[i]);
    for (int o = 16; o; o /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
    for (int i = threadIdx.x; i < n; i += 32) sum += expf(row[i] - most);
    for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
    if (threadIdx.x == 0) y[blockIdx.x] = most + logf(sum);
}"""


def logsumexp(x: Any) -> Any:
    most = x.max(axis=1)
    return most + np.log(np.exp(x - most[:, None]).sum(axis=1))


HALF_SUM = r"""#include <cuda_fp16.h>
extern "C" __global__ void k(const __half* x, __half* y, int m, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= m) return;
    float sum = 0;
    for (int j = 0; j < n; ++j) sum += __half2float(x[i * n + j]);
    y[i] = __float2half(sum);
}"""


@of_code
def half_sum(code: str, x: "float16[m, n]") -> Any:
    y = cp.empty(x.shape[0], np.float16)
    launch(code, over(x.shape[0], 32), 32, x, y, i32(x.shape[0]), i32(x.shape[1]))
    return y


PAIRS = (
    JudgedPair.seeded(
        "row sums",
        row_sums,
        rows,
        TREE,
        ("half];\n        __syncthreads();", "half];\n        if (half > 32) __syncthreads();"),
        fault="no barrier among the last warp's steps, as kernels for old chips have it",
        kinds=("race",),
    ),
    JudgedPair("sum in stages", lambda x: np.asarray(x.sum()), total(9), total(2), "two stages: enough for 65,536 elements"),
    JudgedPair(
        "sum by atomics",
        lambda x: np.asarray(x.sum()),
        atomic(lambda *of: cp.zeros(*of)),
        atomic(lambda *of: cp.empty(*of)),
        "the sum begins with unwritten memory",
        kinds=("uninitialised",),
    ),
    JudgedPair(
        "sum, called again",
        lambda x: np.asarray(x.sum()),
        atomic(np.zeros),
        kept,
        "an accumulator is not cleared between calls",
        kinds=("state", "wrong values"),
    ),
    JudgedPair.seeded(
        "row maxima",
        lambda x: x.max(axis=1),
        rows,
        MAXIMUM,
        ("__int_as_float(0xff800000)", "0.f"),
        fault="the maximum begins with 0",
    ),
    JudgedPair.seeded(
        "argmax of rows",
        lambda x: x.argmax(axis=1),
        partial(rows, threads=64, kind=np.int64),
        ARGMAX,
        *HALF_INDEX,
        fault="indices in float16: right up to 2,048",
    ),
    JudgedPair.seeded(
        "column means",
        lambda x: x.mean(axis=0),
        columns,
        COLUMNS,
        ("x[i * n + j]", "x[i * m + j]"),
        fault="the wrong row length: right at square shapes",
        kinds=("wrong values", "out of bounds"),
    ),
    JudgedPair.seeded(
        "row variances",
        lambda x: x.var(axis=1),
        partial(rows, threads=32),
        VARIANCE,
        ("sum / n;", "sum / (n - 1);"),
        fault="divided by n - 1: nearly right for long rows",
    ),
    JudgedPair(
        "ReductionKernel, norm",
        norm_reference,
        norm(),
        norm("__int_as_float(__float_as_int(x * x) & 0xffffe000)"),
        "squares keep ten bits, as float16 does",
    ),
    JudgedPair.seeded(
        "count of integers",
        count_reference,
        count,
        COUNT,
        ("atomicAdd(y, 1)", "*y += 1"),
        fault="threads add to one counter without atomics",
        kinds=("race",),
    ),
    JudgedPair.seeded(
        "dot product",
        lambda x, y: np.asarray((x * y).sum()),
        dot,
        DOT,
        ("t < blockDim.x / 32 ? part[t] : 0.f", "part[t]"),
        fault="sums of warps that do not exist",
        kinds=("uninitialised",),
    ),
    JudgedPair.seeded(
        "logsumexp of rows",
        logsumexp,
        partial(rows, threads=32),
        LOGSUMEXP,
        ("expf(row[i] - most)", "expf(row[i])"),
        ("most + logf", "logf"),
        fault="exp without the maximum taken off",
    ),
    JudgedPair.seeded(
        "row sums float16",
        row_sums,
        half_sum,
        HALF_SUM,
        ("float sum = 0", "__half sum = 0.f"),
        ("__half2float(x[i * n + j])", "x[i * n + j]"),
        ("__float2half(sum)", "sum"),
        fault="the sum is in float16",
    ),
)
