"""Kernels in CUDA C, as people write them, against NumPy; compiled by NVRTC for several architectures."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from test_ptx_harness import compile_cuda

from cupyflash.launch.nvrtc import CompileError
from cupyflash.sim.ptx import Module, coverage
from suites import wide

SEEDS = [None, wide(0), wide(1)]

MATMUL = r"""
#define T 16
extern "C" __global__ void matmul(const float* A, const float* B, float* C, int m, int n, int k) {
    __shared__ float As[T][T], Bs[T][T];
    int row = blockIdx.y * T + threadIdx.y, col = blockIdx.x * T + threadIdx.x;
    float sum = 0;
    for (int t = 0; t < k; t += T) {
        As[threadIdx.y][threadIdx.x] = row < m && t + threadIdx.x < k ? A[row * k + t + threadIdx.x] : 0.f;
        Bs[threadIdx.y][threadIdx.x] = t + threadIdx.y < k && col < n ? B[(t + threadIdx.y) * n + col] : 0.f;
        __syncthreads();
        for (int i = 0; i < T; ++i) sum += As[threadIdx.y][i] * Bs[i][threadIdx.x];
        __syncthreads();
    }
    if (row < m && col < n) C[row * n + col] = sum;
}"""


@pytest.mark.parametrize("seed", SEEDS)
def test_tiled_matmul(seed: int | None) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((37, 50)).astype(np.float32), rng.standard_normal((50, 29)).astype(np.float32)
    c = np.zeros((37, 29), np.float32)
    module = compile_cuda(MATMUL)
    launch = module.launch("matmul", (2, 3), (16, 16), {"A": a, "B": b, "C": c, "m": 37, "n": 29, "k": 50}, seed=seed)
    assert launch.findings == () and np.allclose(c, a @ b, atol=1e-4)
    # Each of the two columns of blocks reads all of A, each of the three rows all of B.
    assert launch.traffic["A"].read_bytes == 2 * a.nbytes and launch.traffic["B"].read_bytes == 3 * b.nbytes
    assert launch.traffic["C"].write_bytes == c.nbytes


def test_forgotten_barrier_is_found_with_its_source_line() -> None:
    source = MATMUL.replace("__syncthreads();\n        for", "for", 1)
    a = np.ones((16, 16), np.float32)
    kinds = set()
    for seed in range(6):
        launch = compile_cuda(source).launch("matmul", (1, 1), (16, 16), [a, a, a.copy(), 16, 16, 16], seed=seed)
        kinds |= {(f.kind, f.source[1]) for f in launch.findings if f.source}
    line = source[: source.index("sum += As")].count("\n") + 1
    assert kinds == {("uninitialised", line), ("race", line)}


SOFTMAX = r"""
__device__ float block_reduce(float x, float* part, bool maximum) {
    for (int k = 16; k; k /= 2) { float y = __shfl_xor_sync(0xffffffff, x, k); x = maximum ? fmaxf(x, y) : x + y; }
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    x = part[0];
    for (int w = 1; w < blockDim.x / 32; ++w) x = maximum ? fmaxf(x, part[w]) : x + part[w];
    __syncthreads();
    return x;
}
extern "C" __global__ void softmax(const float* x, float* y, int n) {
    extern __shared__ float part[];
    x += (long long)blockIdx.x * n; y += (long long)blockIdx.x * n;
    float m = -1e30f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) m = fmaxf(m, x[i]);
    m = block_reduce(m, part, true);
    float s = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) s += expf(x[i] - m);
    s = block_reduce(s, part, false);
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = expf(x[i] - m) / s;
}"""


@pytest.mark.parametrize(
    "options", [(), ("--use_fast_math",), ("-arch=compute_75",), ("-arch=compute_90",), ("-ftz=true",), ("-G",)]
)
def test_softmax_by_architecture_and_options(options: tuple[str, ...]) -> None:
    x = (np.random.default_rng(1).standard_normal((3, 300)) * 5).astype(np.float32)
    y = np.zeros_like(x)
    module = compile_cuda(SOFTMAX, *options)
    launch = module.launch("softmax", 3, 128, {"x": x, "y": y, "n": 300}, shared_bytes=16)
    want = np.exp(x - x.max(axis=1, keepdims=True, initial=-np.inf).astype(np.float64))
    assert launch.findings == () and np.allclose(y, want / want.sum(axis=1, keepdims=True), rtol=3e-6)
    assert launch.traffic["x"].read_bytes == 3 * x.nbytes


HISTOGRAM = r"""
extern "C" __global__ void histogram(const unsigned char* x, unsigned* bins, int n) {
    __shared__ unsigned mine[64];
    for (int i = threadIdx.x; i < 64; i += blockDim.x) mine[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&mine[x[i] % 64], 1u);
    __syncthreads();
    for (int i = threadIdx.x; i < 64; i += blockDim.x) if (mine[i]) atomicAdd(&bins[i], mine[i]);
}"""


@pytest.mark.parametrize("seed", SEEDS)
def test_histogram(seed: int | None) -> None:
    x = np.random.default_rng(2).integers(0, 256, 5000, dtype=np.uint8)
    bins = np.zeros(64, np.uint32)
    launch = compile_cuda(HISTOGRAM).launch("histogram", 5, 96, [x, bins, 5000], seed=seed)
    assert launch.findings == () and (bins == np.bincount(x % 64, minlength=64)).all()


SORT = r"""
extern "C" __global__ void bitonic(int* x) {   // one block sorts blockDim.x numbers
    __shared__ int s[256];
    unsigned t = threadIdx.x;
    s[t] = x[t];
    for (unsigned k = 2; k <= blockDim.x; k *= 2)
        for (unsigned j = k / 2; j; j /= 2) {
            __syncthreads();
            unsigned p = t ^ j;
            if (p > t) { int a = s[t], b = s[p]; if ((t & k) == 0 ? a > b : a < b) { s[t] = b; s[p] = a; } }
        }
    __syncthreads();
    x[t] = s[t];
}
struct Pair { int a; float b; };
__device__ __noinline__ float area(Pair p, int depth) { return depth > 1 ? p.a * p.b : p.a + p.b; }
extern "C" __global__ void called(Pair p, float* out) {
    out[threadIdx.x] = area(p, threadIdx.x % 3) + area(Pair{(int)threadIdx.x, 2.f}, 2);
}
extern "C" __global__ void local_array(const int* x, int* out, int n) {
    int stack[16];
    for (int i = 0; i < 16; ++i) stack[i] = x[(threadIdx.x + i) % n];
    int s = 0;
    for (int i = 0; i < n; ++i) s = s * 3 + stack[(x[i] + threadIdx.x) % 16];
    out[threadIdx.x] = s;
}
__constant__ int table[4] = {5, 6, 7, 8};
extern "C" __global__ void chosen(const int* x, int* out) {
    switch (x[threadIdx.x]) {
        case 0: out[threadIdx.x] = table[threadIdx.x % 4]; break;
        case 1: out[threadIdx.x] = 11 * threadIdx.x; break;
        case 2: out[threadIdx.x] = -3; break;
        case 3: out[threadIdx.x] = __popc(threadIdx.x); break;
        case 4: out[threadIdx.x] = threadIdx.x / 7 % 5; break;
        default: __trap();
    }
}"""


def test_several_kernels_of_one_module() -> None:
    module = compile_cuda(SORT)
    assert set(module.kernels) == {"bitonic", "called", "local_array", "chosen"}
    rng = np.random.default_rng(3)
    for seed in (None, 0, 1):
        x = rng.integers(-1000, 1000, 256).astype(np.int32)
        want = np.sort(x)
        assert module.launch("bitonic", 1, 256, [x], seed=seed).findings == () and (x == want).all()

        out = np.zeros(64, np.float32)
        pair = np.array([(3, 1.5)], np.dtype([("a", np.int32), ("b", np.float32)]))[0]
        assert module.launch("called", 1, 64, {"p": pair, "out": out}, seed=seed).findings == ()
        assert (out == np.where(np.arange(64) % 3 > 1, 4.5, 4.5) + 2 * np.arange(64)).all()

        numbers, sums = rng.integers(0, 100, 16).astype(np.int32), np.zeros(40, np.int32)
        assert module.launch("local_array", 1, 40, [numbers, sums, 16], seed=seed).findings == ()
        for t in range(40):
            stack, s = [int(numbers[(t + i) % 16]) for i in range(16)], 0
            for i in range(16):
                s = (s * 3 + stack[(int(numbers[i]) + t) % 16]) & 0xFFFFFFFF
            assert int(sums[t]) & 0xFFFFFFFF == s

        cases, out_i = rng.integers(0, 5, 128).astype(np.int32), np.zeros(128, np.int32)
        assert module.launch("chosen", 1, 128, [cases, out_i], seed=seed).findings == ()
        t = np.arange(128)
        assert (out_i == np.choose(cases, [5 + t % 4, 11 * t, -3 + 0 * t, [int(k).bit_count() for k in t], t // 7 % 5])).all()


HALVES = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void halves(const __half2* a, const __half2* b, __half2* sum, float* dot, __nv_bfloat16* rounded, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    sum[i] = __hfma2(a[i], b[i], __float2half2_rn(1.f));
    float2 x = __half22float2(a[i]), y = __half22float2(b[i]);
    dot[i] = x.x * y.x + x.y * y.y;
    rounded[i] = __float2bfloat16(dot[i]);
}"""


@pytest.mark.parametrize("arch", ["compute_75", "compute_80", "compute_90"])
def test_half_types(arch: str) -> None:
    import ml_dtypes

    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((2, 100, 2)).astype(np.float16)
    out, dot, rounded = np.zeros((100, 2), np.float16), np.zeros(100, np.float32), np.zeros(100, ml_dtypes.bfloat16)
    module = compile_cuda(HALVES, f"-arch={arch}")
    launch = module.launch("halves", 2, 64, {"a": a, "b": b, "sum": out, "dot": dot, "rounded": rounded, "n": 100})
    wide = a.astype(np.float64) * b.astype(np.float64)
    assert launch.findings == () and (out == (wide + 1).astype(np.float16)).all()
    assert np.allclose(dot, wide.sum(axis=1), atol=1e-6) and (rounded == dot.astype(ml_dtypes.bfloat16)).all()


DOUBLES = r"""
extern "C" __global__ void doubles(const double* x, double* y, long long* z, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    y[i] = exp(x[i]) * sin(x[i]) + sqrt(fabs(x[i])) / (1 + x[i] * x[i]);
    z[i] = llrint(x[i] * 1e12) / 7 + (long long)i * 1000003 % 17;
}"""


def test_double_precision_library_functions() -> None:
    x = np.linspace(-9, 9, 200)
    y, z = np.zeros(200), np.zeros(200, np.int64)
    launch = compile_cuda(DOUBLES).launch("doubles", 4, 64, [x, y, z, 200])
    want = np.exp(x) * np.sin(x) + np.sqrt(np.abs(x)) / (1 + x * x)
    assert launch.findings == () and np.allclose(y, want, rtol=1e-13, atol=1e-13)
    scaled = [int(v) for v in np.rint(x * 1e12)]
    assert z.tolist() == [(abs(v) // 7) * (1 if v >= 0 else -1) + k * 1000003 % 17 for k, v in enumerate(scaled)]


FUNCTIONS = [
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "exp2", "expm1", "log"),
    *("log2", "log10", "log1p", "sqrt", "cbrt", "erf", "erfc", "tgamma", "floor", "ceil", "rint", "trunc", "fabs"),
]


def reference(name: str, x: float) -> float:
    table = {"tgamma": math.gamma, "rint": round, "cbrt": lambda v: math.copysign(abs(v) ** (1 / 3), v), "exp2": lambda v: 2.0**v}
    try:
        return float(table.get(name, getattr(math, name, None))(x))
    except (ValueError, OverflowError):
        return math.nan


@pytest.mark.parametrize(
    ("c_type", "suffix", "dtype", "tolerance"), [("float", "f", np.float32, 4e-6), ("double", "", np.float64, 1e-14)]
)
def test_the_whole_math_library(c_type: str, suffix: str, dtype: type, tolerance: float) -> None:
    rng = np.random.default_rng(6)
    x = np.concatenate([rng.uniform(-1, 1, 100), rng.uniform(-30, 30, 100)]).astype(dtype)
    lines = "".join(f"y[{k} * n + i] = {name}{suffix}(x[i]);" for k, name in enumerate(FUNCTIONS))
    source = f"""extern "C" __global__ void all(const {c_type}* x, {c_type}* y, int n)
    {{ int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) {{ {lines} }} }}"""
    y = np.zeros((len(FUNCTIONS), 200), dtype)
    assert compile_cuda(source).launch("all", 2, 128, [x, y, 200]).findings == ()
    for name, row in zip(FUNCTIONS, y.astype(np.float64), strict=True):
        want = np.array([reference(name, float(v)) for v in x])
        usual = np.isfinite(want) & (np.abs(want) < 1e37) & (np.abs(want) > 1e-30)
        assert usual.sum() > 40 and np.abs(row[usual] / want[usual] - 1).max() < tolerance, name


GROUPS = r"""
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
extern "C" __global__ void groups(const int* x, int* y, int* ticket) {
    auto tile = cg::tiled_partition<16>(cg::this_thread_block());
    int a = x[threadIdx.x], s = cg::reduce(tile, a, cg::plus<int>());
    if (a % 3 == 0) {
        auto some = cg::coalesced_threads();
        int first = some.thread_rank() == 0 ? atomicAdd(ticket, some.size()) : 0;
        s += 100000 * (some.shfl(first, 0) + some.thread_rank() + 1);
    }
    __syncwarp();
    y[threadIdx.x] = s;
}"""


@pytest.mark.wide
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_cooperative_groups(seed: int | None) -> None:
    x = np.random.default_rng(7).integers(0, 100, 128).astype(np.int32)
    y, ticket = np.zeros(128, np.int32), np.zeros(1, np.int32)
    launch = compile_cuda(GROUPS).launch("groups", 1, 128, [x, y, ticket], seed=seed)
    third = x % 3 == 0
    assert launch.findings == () and (y % 100000 == np.repeat(x.reshape(-1, 16).sum(axis=1), 16)).all()
    assert ticket[0] == third.sum() and sorted(y[third] // 100000) == list(range(1, third.sum() + 1))


CUB = r"""
#include <cub/block/block_radix_sort.cuh>
extern "C" __global__ void cub_sort(const int* x, int* y) {
    typedef cub::BlockRadixSort<int, 128, 2> Sort;
    __shared__ typename Sort::TempStorage storage;
    int v[2] = {x[threadIdx.x], x[128 + threadIdx.x]};
    Sort(storage).Sort(v);
    y[2 * threadIdx.x] = v[0]; y[2 * threadIdx.x + 1] = v[1];
}"""


@pytest.mark.wide
def test_a_kernel_of_a_real_library() -> None:
    x = np.random.default_rng(8).integers(-1000, 1000, 256).astype(np.int32)
    module = compile_cuda(CUB)
    for seed in (None, 3):
        y = np.zeros(256, np.int32)
        launch = module.launch("cub_sort", 1, 128, [x, y], seed=seed)
        assert launch.findings == () and (y == np.sort(x)).all()


SCAN = r"""
extern "C" __global__ void scan(const int* x, int* y, int* flags, int* sums, int n) {   // decoupled look-back, one tile a block
    __shared__ int warp_sum[4]; __shared__ int before;
    int t = threadIdx.x, i = blockIdx.x * 128 + t, v = i < n ? x[i] : 0, s = v;
    for (int k = 1; k < 32; k *= 2) { int u = __shfl_up_sync(~0u, s, k); if (t % 32 >= k) s += u; }
    if (t % 32 == 31) warp_sum[t / 32] = s;
    __syncthreads();
    for (int w = 0; w < t / 32; ++w) s += warp_sum[w];
    if (t == 127) {
        if (blockIdx.x) while (atomicAdd(&flags[blockIdx.x - 1], 0) == 0) { }
        before = blockIdx.x ? atomicAdd(&sums[blockIdx.x - 1], 0) : 0;
        atomicExch(&sums[blockIdx.x], before + s);
        __threadfence();
        atomicExch(&flags[blockIdx.x], 1);
    }
    __syncthreads();
    if (i < n) y[i] = s + before;
}"""


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_that_wait_for_each_other(seed: int | None) -> None:
    x = np.random.default_rng(5).integers(0, 100, 1000).astype(np.int32)
    y, flags, sums = np.zeros(1000, np.int32), np.zeros(8, np.int32), np.zeros(8, np.int32)
    launch = compile_cuda(SCAN).launch("scan", 8, 128, [x, y, flags, sums, 1000], seed=seed)
    assert launch.findings == () and (y == np.cumsum(x)).all()


def test_compile_error_carries_the_log() -> None:
    pytest.importorskip("cupy")
    with pytest.raises(CompileError, match="undefined_name") as caught:
        Module.from_source('extern "C" __global__ void k(int* x) { *x = undefined_name; }', name="broken.cu")
    assert "broken.cu" in str(caught.value) and "undefined_name" in caught.value.log


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(ImportError, match=r"pip install 'cupyflash\[sim\]'"):
        Module.from_source("")


def test_coverage_lists_every_opcode_once() -> None:
    rows = coverage()
    names = [row.opcode for row in rows]
    assert len(names) == len(set(names)) and {"add", "mma", "cp", "ldmatrix", "shfl", "bar", "atom"} <= set(names)
    assert all(row.forms and row.family for row in rows)


def test_a_structure_as_a_zero_dimensional_array_is_passed_by_value() -> None:
    """Eight bytes, as many as a pointer has."""
    cuda = """struct P { float a; int n; };
    extern "C" __global__ void scale(const P p, float* y, const float* x) {
      if (threadIdx.x < p.n) y[threadIdx.x] = p.a * x[threadIdx.x];
    }"""
    x, y = np.arange(10, dtype=np.float32), np.zeros(10, np.float32)
    p = np.array((2.0, 7), [("a", "f4"), ("n", "i4")])
    launch = Module.from_source(cuda).launch("scale", 1, 32, {"p": p, "y": y, "x": x})
    assert launch.findings == () and np.array_equal(y, np.where(x < 7, 2 * x, 0))
