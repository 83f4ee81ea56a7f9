"""One output element for each input element."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
from pairs import Function, JudgedPair, elementwise, launch, of_code, over

i32 = np.int32

AXPY = r"""extern "C" __global__ void k(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}"""


@of_code
def axpy(blocks: Function, a: "float32", x: "float32[n]", y: "inout float32[n]") -> None:
    launch(AXPY, blocks(x.size), 256, a, x, y, i32(x.size))


def axpy_reference(a: Any, x: Any, y: Any) -> None:
    y += a * x


GELU = r"""extern "C" __global__ void k(const float* x, float* y, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) {
        float v = x[i];
        y[i] = 0.5f * v * (1.f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v)));
    }
}"""


def gelu_reference(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))


MAP = r"""extern "C" __global__ void k(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = EXPRESSION;
}"""


def of(expression: str) -> Function:
    return elementwise("float32[...]")(MAP.replace("EXPRESSION", expression))


def relu(x: Any) -> Any:
    return np.maximum(x, 0)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def softplus(x: Any) -> Any:
    return np.logaddexp(x, 0)


CLIP = r"""extern "C" __global__ void k(const float* x, float low, float high, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = fminf(fmaxf(x[i], low), high);
}"""


@of_code
def clip(code: str, x: "float32[m, n]", low: "float32 in (-1, 0)", high: "float32 in (0, 1)") -> Any:
    y = cp.empty_like(x)
    launch(code, over(x.size, 64), 64, x, low, high, y, i32(x.size))
    return y


def clip_reference(x: Any, low: Any, high: Any) -> Any:
    return np.clip(x, low, high)


WHERE = r"""extern "C" __global__ void k(const bool* c, const float* x, const float* y, float* z, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) z[i] = c[i] ? x[i] : y[i];
}"""


@of_code
def where(code: str, c: "bool[n]", x: "float32[n]", y: "float32[n]") -> Any:
    z = np.empty_like(x)
    launch(code, over(x.size, 128), 128, c.view(np.uint8), x, y, z, i32(x.size))
    return z


HASH = r"""extern "C" __global__ void k(const unsigned* x, unsigned* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned h = x[i];
    h ^= h >> 16; h *= 0x85ebca6bu;
    h ^= h >> 13; h *= 0xc2b2ae35u;
    y[i] = h ^ h >> 16;
}"""


def mix_reference(x: Any) -> Any:
    h = x ^ x >> np.uint32(16)
    h = h * np.uint32(0x85EBCA6B)
    h = (h ^ h >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return h ^ h >> np.uint32(16)


SILU_HALF = r"""#include <cuda_fp16.h>
extern "C" __global__ void k(const __half* x, __half* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { float v = __half2float(x[i]); y[i] = __float2half(v / (1.f + __expf(-v))); }
}"""


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


ADD4 = r"""extern "C" __global__ void k(const float* x, const float* y, float* z, int n) {
    int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 3 < n) {
        float4 a = *(const float4*)(x + i), b = *(const float4*)(y + i);
        *(float4*)(z + i) = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    } else {
        for (; i < n; ++i) z[i] = x[i] + y[i];
    }
}"""


@of_code
def add4(code: str, x: "float32[n]", y: "float32[n]") -> Any:
    z = cp.empty_like(x)
    launch(code, over(x.size, 512), 128, x, y, z, i32(x.size))
    return z


SINCOS = r"""extern "C" __global__ void k(const float* x, float* s, float* c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) sincosf(x[i], s + i, c + i);
}"""


@of_code
def sincos(shared: bool, x: "float32[n]") -> Any:
    both = cp.empty((1 if shared else 2, x.size), np.float32)
    launch(SINCOS, over(x.size, 128), 128, x, both[0], both[-1], i32(x.size))
    return both[0], both[-1]


DIVIDE = r"""extern "C" __global__ void k(const int* x, const int* y, int* q, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int a = x[i], b = y[i];
    q[i] = a / b - (a % b != 0 && (a < 0) != (b < 0));
}"""


@of_code
def divide(code: str, x: "int32[n] in range(-1000, 1000)", y: "int32[n] in range(1, 50)") -> Any:
    q = cp.empty_like(x)
    launch(code, over(x.size, 128), 128, x, y, q, i32(x.size))
    return q


def fused(x: "float32[m, n]", y: "float32[n]") -> Any:
    return cp.ElementwiseKernel("T x, T y", "T z", "z = (x - y) * (x - y)", "fused")(x, y)


def fused_raw(x: "float32[m, n]", y: "float32[n]") -> Any:
    operation = "T d = x - y[i % n]; z = d * d"
    return cp.ElementwiseKernel("T x, raw T y, int32 n", "T z", operation, "fused")(x, y, x.shape[0])


def fused_reference(x: Any, y: Any) -> Any:
    return (x - y) * (x - y)


PAIRS = (
    JudgedPair(
        "axpy in place",
        axpy_reference,
        axpy(lambda n: over(n, 256)),
        axpy(lambda n: n // 256),
        "the last block is missing where n is no multiple of 256",
    ),
    JudgedPair.seeded(
        "gelu", gelu_reference, elementwise("float32[...]"), GELU, ("0.044715f", "0.0447f"), fault="a constant of three digits"
    ),
    JudgedPair(
        "relu",
        relu,
        of("fmaxf(x[i], 0.f)"),
        of("x[i] * (x[i] > 0.f)"),
        "minus infinity times zero is NaN",
    ),
    JudgedPair(
        "sigmoid",
        sigmoid,
        of("1.f / (1.f + expf(-x[i]))"),
        of("expf(x[i]) / (1.f + expf(x[i]))"),
        "infinity by infinity for large arguments",
    ),
    JudgedPair(
        "softplus",
        softplus,
        of("fmaxf(x[i], 0.f) + log1pf(expf(-fabsf(x[i])))"),
        of("logf(1.f + expf(x[i]))"),
        "exp overflows for large arguments",
    ),
    JudgedPair.seeded(
        "clip by scalars",
        clip_reference,
        clip,
        CLIP,
        ("fmaxf(x[i], low)", "fmaxf(x[i], (int)low)"),
        fault="a bound is rounded to an integer",
    ),
    JudgedPair.seeded(
        "where",
        np.where,
        where,
        WHERE,
        ("const bool* c", "const unsigned char* c"),
        ("c[i] ?", "c[i / 4] ?"),
        fault="a mask's element serves four",
    ),
    JudgedPair.seeded(
        "integer hash",
        mix_reference,
        elementwise("uint32[n]", 256),
        HASH,
        ("unsigned h = x[i]", "int h = x[i]"),
        fault="a signed shift: right for small values only",
    ),
    JudgedPair.seeded(
        "silu float16",
        silu,
        elementwise("float16[m, n]"),
        SILU_HALF,
        ("float v = __half2float(x[i]);", "__half v = x[i];"),
        ("__float2half(v / (1.f + __expf(-v)))", "v * hrcp(__half(1.f) + hexp(-v))"),
        fault="half arithmetic: exp overflows and 0 by infinity loses the result, or its infinity",
    ),
    JudgedPair.seeded(
        "add by float4",
        np.add,
        add4,
        ADD4,
        ("for (; i < n; ++i) z[i] = x[i] + y[i];", ";"),
        fault="no elements after the last whole vector",
        kinds=("unwritten",),
    ),
    JudgedPair(
        "sine and cosine", lambda x: (np.sin(x), np.cos(x)), sincos(False), sincos(True), "both outputs are the same memory"
    ),
    JudgedPair.seeded(
        "floor division",
        np.floor_divide,
        divide,
        DIVIDE,
        (" - (a % b != 0 && (a < 0) != (b < 0))", ""),
        fault="C truncates where Python rounds down",
    ),
    JudgedPair(
        "ElementwiseKernel, broadcast",
        fused_reference,
        fused,
        fused_raw,
        "a raw argument is indexed by the wrong axis",
        kinds=("wrong values", "out of bounds"),
    ),
)
