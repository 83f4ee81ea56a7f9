"""A gallery of kernels around the tensor cores and the asynchronous copies that feed them, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gallery import Gallery, Run, check_kernel
from test_ptx_harness import compile_cuda

from suites import sample, wide

F = np.float32
gallery = Gallery()

COPY = r"""
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at(to)), "l"(from));
}
"""

PIPELINED_GEMM = (
    COPY
    + r"""#include <cuda_fp16.h>
// C = A B, 32 x 32 tiles by four warps of 16 x 16, two stages of 16 in k.
extern "C" __global__ void k(const half* A, const half* B, float* C, int n, int l) {
    __shared__ __align__(16) half As[2][32][24], Bs[2][16][40];
    int t = threadIdx.x, warp = t / 32, lane = t % 32, i0 = blockIdx.y * 32, j0 = blockIdx.x * 32;
    auto load = [&](int s, int k0) {
        if (t < 64) copy16(&As[s][t / 2][t % 2 * 8], A + (i0 + t / 2) * l + k0 + t % 2 * 8);
        else copy16(&Bs[s][(t - 64) / 4][t % 4 * 8], B + (k0 + (t - 64) / 4) * n + j0 + t % 4 * 8);
        asm volatile("cp.async.commit_group;");
    };
    float c[2][4] = {};
    load(0, 0);
    for (int k0 = 0; k0 < l; k0 += 16) {
        int s = k0 / 16 % 2;
        if (k0 + 16 < l) { load(1 - s, k0 + 16); asm volatile("cp.async.wait_group 1;"); }
        else asm volatile("cp.async.wait_group 0;");
        __syncthreads();
        unsigned a[4], b[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at(&As[s][warp / 2 * 16 + lane % 16][lane / 16 * 8])));
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at(&Bs[s][lane % 16][warp % 2 * 16 + lane / 16 * 8])));
        for (int h = 0; h < 2; ++h)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                         : "+f"(c[h][0]), "+f"(c[h][1]), "+f"(c[h][2]), "+f"(c[h][3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[2 * h]), "r"(b[2 * h + 1]));
        __syncthreads();
    }
    for (int h = 0; h < 2; ++h) for (int e = 0; e < 4; ++e)
        C[(i0 + warp / 2 * 16 + lane / 4 + e / 2 * 8) * n + j0 + warp % 2 * 16 + h * 8 + lane % 4 * 2 + e % 2] = c[h][e];
}"""
)


@gallery
def pipelined_gemm(rng: np.random.Generator) -> Run:
    a, b = rng.standard_normal((64, 80)).astype(np.float16), rng.standard_normal((80, 96)).astype(np.float16)
    args = {"A": a, "B": b, "C": np.zeros((64, 96), F), "n": 96, "l": 80}
    return Run(PIPELINED_GEMM, (3, 2), 128, args, {"C": a.astype(F) @ b.astype(F)}, 1e-4)


def direct_gemm(kind: str, word: str, shape: str, a: np.ndarray, b: np.ndarray, acc: Any, close: float) -> Run:
    """One warp, fragments straight from memory: rows of A and columns of B are contiguous."""
    m, n, k = (int(v) for v in shape[1:].replace("n", " ").replace("k", " ").split())
    per = 4 // a.dtype.itemsize
    halves = k // (4 * per)
    c_type, code = {"f32": ("float", "f"), "s32": ("int", "r")}[word]
    sums, registers = ", ".join(f"%{i}" for i in range(4)), 2 * halves
    left, right = (
        ", ".join(f"%{i}" for i in part) for part in (range(4, 4 + registers), range(4 + registers, 4 + registers + halves))
    )
    outs = ", ".join(f'"+{code}"(c[{i}])' for i in range(4))
    ins = ", ".join([f'"r"(a[{i}])' for i in range(registers)] + [f'"r"(b[{i}])' for i in range(halves)])
    cuda = f"""extern "C" __global__ void k(const unsigned* A, const unsigned* B, {c_type}* C) {{
        int g = threadIdx.x / 4, t = threadIdx.x % 4;
        unsigned a[{registers}], b[{halves}];
        {c_type} c[4] = {{}};
        for (int h = 0; h < {halves}; ++h) {{
            for (int r = 0; r < 2; ++r) a[2 * h + r] = A[(g + 8 * r) * {k // per} + 4 * h + t];
            b[h] = B[g * {k // per} + 4 * h + t];
        }}
        asm volatile("mma.sync.aligned.{shape}.row.col.{word}.{kind}.{kind}.{word} {{{sums}}}, {{{left}}}, {{{right}}}, {{{sums}}};"
                     : {outs} : {ins});
        for (int i = 0; i < 4; ++i) C[(g + i / 2 * 8) * {n} + 2 * t + i % 2] = c[i];
    }}"""
    want = (a.astype(float) @ b.astype(float).T).astype(acc)
    assert a.shape == (m, k) and b.shape == (n, k)
    # The kernel sees words; the arrays keep their type.
    return Run(cuda, 1, 32, {"A": a, "B": b, "C": np.zeros((m, n), acc)}, {"C": want}, close, options=("-arch=compute_90",))


@gallery
def bfloat16_mma(rng: np.random.Generator) -> Run:
    import ml_dtypes

    a, b = rng.standard_normal((16, 16)).astype(ml_dtypes.bfloat16), rng.standard_normal((8, 16)).astype(ml_dtypes.bfloat16)
    return direct_gemm("bf16", "f32", "m16n8k16", a, b, F, 1e-5)


@gallery
def tf32_mma(rng: np.random.Generator) -> Run:
    a, b = (rng.integers(-99, 99, shape).astype(F) / 8 for shape in ((16, 8), (8, 8)))
    return direct_gemm("tf32", "f32", "m16n8k8", a, b, F, 1e-5)


@gallery
def byte_mma(rng: np.random.Generator) -> Run:
    a, b = rng.integers(-128, 128, (16, 32)).astype(np.int8), rng.integers(-128, 128, (8, 32)).astype(np.int8)
    return direct_gemm("s8", "s32", "m16n8k32", a, b, np.int32, 0)


@gallery
def eight_bit_float_mma(rng: np.random.Generator) -> Run:
    import ml_dtypes

    a, b = (rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn) for shape in ((16, 32), (8, 32)))
    return direct_gemm("e4m3", "f32", "m16n8k32", a, b, F, 1e-5)


@gallery
def matrices_in_fragments(rng: np.random.Generator) -> Run:
    """wmma as <mma.h> makes it (NVRTC's wheels lack a header of it): A by rows, B by columns, C by columns out of shared memory."""
    regs = {name: ", ".join(f"{name}{i}" for i in range(8)) for name in ("a", "b", "c")}
    cuda = rf"""#include <cuda_fp16.h>
    extern "C" __global__ void k(const half* A, const half* B, float* C, int l) {{
        __shared__ float s[16 * 20];
        asm volatile("{{.reg .b32 a<8>, b<8>; .reg .f32 c<8>; .reg .pred p; .reg .u32 k; .reg .u64 A, B;\n"
            "mov.f32 c0, 0f00000000; mov.f32 c1, c0; mov.f32 c2, c0; mov.f32 c3, c0; mov.f32 c4, c0; mov.f32 c5, c0;\n"
            "mov.f32 c6, c0; mov.f32 c7, c0; mov.u32 k, 0; mov.u64 A, %0; mov.u64 B, %1;\n"
            "again: wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {{{regs["a"]}}}, [A], %2;\n"
            "wmma.load.b.sync.aligned.col.m16n16k16.global.f16 {{{regs["b"]}}}, [B], %2;\n"
            "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {{{regs["c"]}}}, {{{regs["a"]}}}, {{{regs["b"]}}}, {{{regs["c"]}}};\n"
            "add.u64 A, A, 32; add.u64 B, B, 32; add.u32 k, k, 16; setp.lt.u32 p, k, %2; @p bra again;\n"
            "wmma.store.d.sync.aligned.col.m16n16k16.shared.f32 [%3], {{{regs["c"]}}}, %4;}}"
            :: "l"(A), "l"(B), "r"(l), "r"((unsigned)__cvta_generic_to_shared(s)), "r"(20) : "memory");
        __syncwarp();
        for (int i = threadIdx.x; i < 256; i += 32) C[i] = s[i % 16 * 20 + i / 16];
    }}"""
    a, b = rng.standard_normal((16, 48)).astype(np.float16), rng.standard_normal((16, 48)).astype(np.float16)
    args = {"A": a, "B": b, "C": np.zeros((16, 16), F), "l": 48}
    return Run(cuda, 1, 32, args, {"C": a.astype(F) @ b.T.astype(F)}, 1e-5)


PRODUCER = r"""#include <cuda/barrier>
#include <cuda/std/utility>
// Warp 0 fills a ring of three buffers, the other warps use it.
extern "C" __global__ void k(const int* x, int* y, int rounds) {
    typedef cuda::barrier<cuda::thread_scope_block> Barrier;
    __shared__ Barrier full[3], empty[3];
    __shared__ int ring[3][32];
    if (threadIdx.x < 3) { init(&full[threadIdx.x], blockDim.x); init(&empty[threadIdx.x], blockDim.x); }
    __syncthreads();
    if (threadIdx.x < 32) {
        for (int r = 0; r < rounds; ++r) {
            if (r >= 3) empty[r % 3].arrive_and_wait();
            ring[r % 3][threadIdx.x] = x[r * 32 + threadIdx.x];
            (void)full[r % 3].arrive();
        }
    } else {
        int s = 0;
        for (int r = 0; r < rounds; ++r) {
            full[r % 3].arrive_and_wait();
            s += ring[r % 3][(threadIdx.x + r) % 32] * (threadIdx.x / 32);
            if (r + 3 < rounds) (void)empty[r % 3].arrive();
        }
        y[threadIdx.x - 32] = s;
    }
}"""


@gallery
def producer_and_consumers(rng: np.random.Generator) -> Run:
    x, t = rng.integers(-99, 99, (8, 32)).astype(np.int32), np.arange(32, 128)
    want = sum(x[r, (t + r) % 32] * (t // 32) for r in range(8))
    return Run(PRODUCER, 1, 128, {"x": x, "y": np.zeros(96, np.int32), "rounds": 8}, {"y": np.asarray(want)})


COPY_PIPELINE = r"""#include <cuda/pipeline>
#include <cooperative_groups.h>
extern "C" __global__ void k(const int4* x, int* y, int rounds) {
    __shared__ int4 s[2][64];
    __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
    auto block = cooperative_groups::this_thread_block();
    auto pipe = cuda::make_pipeline(block, &state);
    int sum = 0, ahead = 0;
    for (int r = 0; r < rounds; ++r) {
        for (; ahead < rounds && ahead < r + 2; ++ahead) {
            pipe.producer_acquire();
            cuda::memcpy_async(block, s[ahead % 2], x + ahead * 64, cuda::aligned_size_t<16>(64 * sizeof(int4)), pipe);
            pipe.producer_commit();
        }
        pipe.consumer_wait();
        int4 v = s[r % 2][63 - threadIdx.x];
        sum += v.x + 2 * v.y - v.z + 3 * v.w;
        pipe.consumer_release();
    }
    y[threadIdx.x] = sum;
}"""


@gallery
def pipeline_of_copies(rng: np.random.Generator) -> Run:
    x = rng.integers(-99, 99, (5, 64, 4)).astype(np.int32)
    want = (x.sum(0) @ np.array([1, 2, -1, 3]))[::-1]
    return Run(COPY_PIPELINE, 1, 64, {"x": x, "y": np.zeros(64, np.int32), "rounds": 5}, {"y": want})


BULK = r"""#include <cuda/ptx>
namespace ptx = cuda::ptx;
extern "C" __global__ void k(const int* x, int* y) {
    __shared__ alignas(16) int in[128], out[128];
    __shared__ alignas(8) unsigned long long bar;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&bar, 1);
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    }
    __syncthreads();
    for (int round = 0; round < 2; ++round) {
        int at = (blockIdx.x * 2 + round) * 128;
        if (threadIdx.x == 0) {
            ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, in, x + at, sizeof in, &bar);
            ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &bar, sizeof in);
        }
        while (!ptx::mbarrier_try_wait_parity(&bar, round)) { }
        out[threadIdx.x] = in[127 - threadIdx.x] * 3;
        ptx::fence_proxy_async(ptx::space_shared);
        __syncthreads();
        if (threadIdx.x == 0) {
            ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, y + at, out, sizeof out);
            ptx::cp_async_bulk_commit_group();
            ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
        }
        __syncthreads();
    }
}"""


@gallery
def bulk_copies(rng: np.random.Generator) -> Run:
    x = rng.integers(-99, 99, (4, 128)).astype(np.int32)
    return Run(BULK, 2, 128, {"x": x, "y": np.zeros_like(x)}, {"y": 3 * x[:, ::-1]}, options=("-arch=compute_90",))


@pytest.mark.parametrize("seed", [wide(None), 1, wide(2)])
@pytest.mark.parametrize("name", sample(gallery.names, {*gallery.names} - {"producer_and_consumers", "pipeline_of_copies"}))
def test_kernel(name: str, seed: int | None) -> None:
    check_kernel(gallery.make(name), seed)


FAULTS = [
    (
        "producer_and_consumers",
        "full[r % 3].arrive_and_wait();\n            s",
        "(void)full[r % 3].arrive();\n            s",
        "race",
    ),
    ("producer_and_consumers", "if (r >= 3) empty[r % 3].arrive_and_wait();", "if (r >= 3) (void)empty[r % 3].arrive();", "race"),
    ("producer_and_consumers", "(void)full[r % 3].arrive();\n        }\n    } else", "}\n    } else", "deadlock"),
    ("bulk_copies", "ptx::mbarrier_init(&bar, 1);", "", "uninitialised"),
    ("producer_and_consumers", "__syncthreads();", "", "race"),
    ("pipeline_of_copies", "pipe.consumer_wait();", "", "in flight"),
    ("bulk_copies", "while (!ptx::mbarrier_try_wait_parity(&bar, round)) { }", "", "in flight"),
    ("bulk_copies", "&bar, sizeof in);\n        }\n        while", "&bar, 4 * sizeof in);\n        }\n        while", "deadlock"),
    ("bulk_copies", "x + at, sizeof in, &bar", "x + at + 1, sizeof in, &bar", "misaligned"),
    ("bulk_copies", "x + at, sizeof in, &bar", "x + 400 + at, sizeof in, &bar", "out of bounds"),
    ("bulk_copies", "ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});", "", "race"),
    ("bulk_copies", "while (!", "if (threadIdx.x == 0) const_cast<int*>(x)[at + 5] = 0;\n        while (!", "race"),
    ("pipelined_gemm", 'asm volatile("cp.async.wait_group 1;");', "", "in flight"),
]


@pytest.mark.parametrize(("name", "old", "new", "kind"), sample(FAULTS, [FAULTS[3], FAULTS[-1]]))
def test_fault_is_found(name: str, old: str, new: str, kind: str) -> None:
    run = gallery.make(name)
    assert run.cuda.count(old) >= 1
    module = compile_cuda(run.cuda.replace(old, new, 1), *run.options)
    for seed in (None, 1):
        launch = module.launch("k", run.grid, run.block, run.args, seed=seed)
        if kind in {f.kind for f in launch.findings}:
            return
    raise AssertionError(launch.findings)


@pytest.mark.wide
def test_bulk_copies_read_and_write_what_nobody_wrote() -> None:
    run = gallery.make("bulk_copies")
    module = compile_cuda(run.cuda, *run.options)
    found = {name: module.launch("k", run.grid, run.block, run.args, unwritten=(name,)).findings for name in ("x", "y")}
    assert {f.kind for f in found["x"]} == {"uninitialised"} and found["y"] == ()
    landed = run.cuda.replace("out[threadIdx.x] = in", "const_cast<int*>(x)[at + threadIdx.x] = 0;\nout[threadIdx.x] = in")
    assert compile_cuda(landed, *run.options).launch("k", run.grid, run.block, run.args).findings == ()
