"""Rows that are normalised: softmax and its like."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
from pairs import JudgedPair, by_rows, changed, launch, of_code

i32 = np.int32

BLOCK = r"""
#define MINUS_INFINITY __int_as_float(0xff800000)
__device__ float block_reduce(float v, bool largest, float* s) {
    int t = threadIdx.x;
    s[t] = v;
    __syncthreads();
    for (int half = blockDim.x / 2; half; half /= 2) {
        if (t < half) s[t] = largest ? fmaxf(s[t], s[t + half]) : s[t] + s[t + half];
        __syncthreads();
    }
    float all = s[0];
    __syncthreads();
    return all;
}
"""

SOFTMAX = (
    BLOCK
    + r"""extern "C" __global__ void k(const float* x, float* y, int n) {
    __shared__ float s[64];
    const float* row = x + blockIdx.x * n;
    float most = MINUS_INFINITY, sum = 0;
    for (int i = threadIdx.x; i < n; i += 64) most = fmaxf(most, row[i]);
    most = block_reduce(most, true, s);
    for (int i = threadIdx.x; i < n; i += 64) sum += expf(row[i] - most);
    sum = block_reduce(sum, false, s);
    for (int i = threadIdx.x; i < n; i += 64) y[blockIdx.x * n + i] = expf(row[i] - most) / sum;
}"""
)


by_blocks = by_rows("float32[m, n]", 64)


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


LOG_SOFTMAX = changed(SOFTMAX, ("expf(row[i] - most) / sum;", "row[i] - most - logf(sum);"))


def log_softmax(x: Any) -> Any:
    shifted = x - x.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


NORM = (
    BLOCK
    + r"""extern "C" __global__ void k(const float* x, const float* g, const float* b, float* y, int n, float eps) {
    __shared__ float s[64];
    const float* row = x + blockIdx.x * n;
    float mean = 0, square = 0;
    for (int i = threadIdx.x; i < n; i += 64) mean += row[i];
    mean = block_reduce(mean, false, s) / n;
    for (int i = threadIdx.x; i < n; i += 64) square += (row[i] - mean) * (row[i] - mean);
    float scale = rsqrtf(block_reduce(square, false, s) / n + eps);
    for (int i = threadIdx.x; i < n; i += 64) y[blockIdx.x * n + i] = (row[i] - mean) * scale * g[i] + b[i];
}"""
)


@of_code
def layer_norm(code: str, x: "float32[m, n]", g: "float32[n]", b: "float32[n]", eps: float = 1e-5) -> Any:
    y = cp.empty_like(x)
    launch(code, x.shape[0], 64, x, g, b, y, i32(x.shape[1]), np.float32(eps))
    return y


def layer_norm_reference(x: Any, g: Any, b: Any, eps: float = 1e-5) -> Any:
    centred = x - x.mean(axis=1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + eps) * g + b


RMS = (
    BLOCK
    + r"""extern "C" __global__ void k(const float* x, const float* g, float* y, int n) {
    __shared__ float s[64];
    const float* row = x + blockIdx.x * n;
    float square = 0;
    for (int i = threadIdx.x; i < n; i += 64) square += row[i] * row[i];
    float scale = 1.f / sqrtf(block_reduce(square, false, s) / n + 1e-6f);
    for (int i = threadIdx.x; i < n; i += 64) y[blockIdx.x * n + i] = row[i] * scale * g[i];
}"""
)


@of_code
def rms_norm(code: str, x: "float32[m, n]", g: "float32[n]") -> Any:
    y = cp.empty_like(x)
    launch(code, x.shape[0], 64, x, g, y, i32(x.shape[1]))
    return y


def rms_norm_reference(x: Any, g: Any) -> Any:
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6) * g


ONLINE = r"""extern "C" __global__ void k(const float* x, float* y, int n) {
    const float* row = x + blockIdx.x * n;
    float most = __int_as_float(0xff800000), sum = 0;
    for (int i = threadIdx.x; i < n; i += 32) {
        float larger = fmaxf(most, row[i]);
        float keep = larger == most ? 1.f : expf(most - larger);
        sum = sum * keep + (row[i] == larger ? 1.f : expf(row[i] - larger));
        most = larger;
    }
    for (int o = 16; o; o /= 2) {
        float other = __shfl_xor_sync(~0u, most, o), more = __shfl_xor_sync(~0u, sum, o), larger = fmaxf(most, other);
        sum = sum * (most == larger ? 1.f : expf(most - larger)) + more * (other == larger ? 1.f : expf(other - larger));
        most = larger;
    }
    for (int i = threadIdx.x; i < n; i += 32) y[blockIdx.x * n + i] = expf(row[i] - most) / sum;
}"""
ALWAYS_EXP = (
    ("larger == most ? 1.f : expf(most - larger)", "expf(most - larger)"),
    ("(row[i] == larger ? 1.f : expf(row[i] - larger))", "expf(row[i] - larger)"),
)

ZEROS = "    for (int i = n + threadIdx.x; i < columns; i += 64) y[blockIdx.x * columns + i] = 0;\n}"
CAUSAL = (
    changed(
        SOFTMAX,
        ("int n) {", "int n, int columns) {"),
        ("blockIdx.x * n", "blockIdx.x * columns"),
        ("__shared__ float s[64];", "__shared__ float s[64];\n    n = blockIdx.x + 1;"),
    ).removesuffix("}")
    + ZEROS
)


@of_code
def causal(code: str, x: "float32[n, n]") -> Any:
    y = cp.empty_like(x)
    launch(code, x.shape[0], 64, x, y, i32(0), i32(x.shape[1]))
    return y


def causal_reference(x: Any) -> Any:
    e = np.where(np.tri(len(x), dtype=bool), x, -np.inf)
    e = np.exp(e - e.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


LOSS = (
    BLOCK
    + r"""extern "C" __global__ void k(const float* x, const LABEL* label, float* y, int n) {
    __shared__ float s[64];
    const float* row = x + blockIdx.x * n;
    float most = MINUS_INFINITY, sum = 0;
    for (int i = threadIdx.x; i < n; i += 64) most = fmaxf(most, row[i]);
    most = block_reduce(most, true, s);
    for (int i = threadIdx.x; i < n; i += 64) sum += expf(row[i] - most);
    sum = block_reduce(sum, false, s);
    if (threadIdx.x == 0) y[blockIdx.x] = logf(sum) + most - row[label[blockIdx.x]];
}"""
)


@of_code
def loss(kind: str, x: "float32[m, n]", label: "int32[m] in range(n)") -> Any:
    y = cp.empty(x.shape[0], np.float32)
    labels = label.view(np.uint8) if kind == "unsigned char" else label
    launch(LOSS.replace("LABEL", kind), x.shape[0], 64, x, labels, y, i32(x.shape[1]))
    return y


def loss_reference(x: Any, label: Any) -> Any:
    most = x.max(axis=1)
    return np.log(np.exp(x - most[:, None]).sum(axis=1)) + most - x[np.arange(len(x)), label]


UNIT = (
    BLOCK
    + r"""extern "C" __global__ void k(const float* x, float* y, int n) {
    __shared__ float s[64];
    const float* row = x + blockIdx.x * n;
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += 64) sum += fabsf(row[i]);
    sum = fmaxf(block_reduce(sum, false, s), 1e-12f);
    for (int i = threadIdx.x; i < n; i += 64) y[blockIdx.x * n + i] = row[i] / sum;
}"""
)


def unit(x: Any) -> Any:
    return x / np.maximum(np.abs(x).sum(axis=1, keepdims=True), 1e-12)


PAIRS = (
    JudgedPair.seeded(
        "softmax",
        softmax,
        by_blocks,
        SOFTMAX,
        ("    float all = s[0];\n    __syncthreads();\n", "    float all = s[0];\n"),
        fault="the next use of shared memory does not wait for the last reader",
        kinds=("race",),
    ),
    JudgedPair(
        "log-softmax",
        log_softmax,
        by_blocks(LOG_SOFTMAX),
        by_blocks(changed(SOFTMAX, ("expf(row[i] - most) / sum;", "logf(expf(row[i] - most) / sum);"))),
        "log of a quotient that is 0 for large arguments",
    ),
    JudgedPair.seeded(
        "layer norm",
        layer_norm_reference,
        layer_norm,
        NORM,
        ("/ n + eps)", "/ n) + eps * 0"),
        fault="no eps: right for ordinary rows",
    ),
    JudgedPair.seeded(
        "rms norm",
        rms_norm_reference,
        rms_norm,
        RMS,
        ("sqrtf(block_reduce(square, false, s) / n + 1e-6f)", "(sqrtf(block_reduce(square, false, s) / n) + 1e-6f)"),
        fault="eps is added to the root",
    ),
    JudgedPair.seeded(
        "softmax, online",
        softmax,
        by_rows("float32[m, n]", 32),
        ONLINE,
        *ALWAYS_EXP,
        fault="minus infinity less minus infinity where a row begins with masked elements",
    ),
    JudgedPair.seeded(
        "causal softmax",
        causal_reference,
        causal,
        CAUSAL,
        ("n = blockIdx.x + 1;", "n = min(blockIdx.x + 2, columns);"),
        fault="the mask lets one column too many pass",
    ),
    JudgedPair("cross-entropy", loss_reference, loss("int"), loss("unsigned char"), "labels are read as bytes"),
    JudgedPair.seeded(
        "rows by their sums",
        unit,
        by_blocks,
        UNIT,
        ("fmaxf(block_reduce(sum, false, s), 1e-12f)", "block_reduce(sum, false, s)"),
        fault="0 by 0 for rows of zeros",
    ),
)
