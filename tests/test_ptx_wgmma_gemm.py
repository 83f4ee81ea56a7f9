"""A GEMM as Hopper's are: one warp loads by TMA, two warpgroups multiply, stages go round by mbarriers; and its faults."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from test_ptx_harness import compile_cuda

from cupyflash.sim.ptx import Launch, Module, TensorMap
from cupyflash.sim.ptx.execute.ptx_machine import PtxMachine
from cupyflash.sim.ptx.state.lane_sets import LaneSet

SEEDS = [None, 0, 1]


def product(columns: int, transposed: int) -> str:
    """A device function for wgmma m64nNk16 of halves, A and B of descriptors, B N-major if `transposed`."""
    count = columns // 2
    names = ", ".join(f"%{r}" for r in range(count))
    bound = ", ".join(f'"+f"(d[{r}])' for r in range(count))
    return f"""__device__ __forceinline__ void multiply(float* d, u64 a, u64 b, int adds) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + 2}, 0; "
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 {{{names}}}, %{count}, %{count + 1}, p, 1, 1, 0, {transposed};}}"
        : {bound} : "l"(a), "l"(b), "r"(adds));
}}
"""


GEMM = r"""
// C (M x N) = A (M x K) B (K x N): a block has 128 x 64 of C, a stage 128 x 64 of A and 64 x 64 of B.
typedef unsigned long long u64;
typedef unsigned u32;
struct alignas(64) Map { char bytes[128]; };
constexpr int STAGES = 3, A_BYTES = 128 * 64 * 2, B_BYTES = 64 * 64 * 2;
PRODUCT
__device__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ u64 descriptor(u32 at, u64 leading) {
    return (at & 0x3FFFF) >> 4 | leading / 16 << 16 | 1024ull / 16 << 32 | SWIZZLE << 62;
}
__device__ void init(u64* bar, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(bar)), "r"(n)); }
__device__ void expect(u64* bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(bar)), "r"(bytes) : "memory");
}
__device__ void arrive(u64* bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(bar)) : "memory"); }
__device__ void wait(u64* bar, int parity) {
    asm volatile("{.reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra L;}"
                 ::"r"(address(bar)), "r"(parity) : "memory");
}
__device__ void load(void* to, const Map* map, int x, int y, u64* bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(address(to)), "l"(map), "r"(x), "r"(y), "r"(address(bar)) : "memory");
}
template <int n> __device__ void finish() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory"); }

extern "C" __global__ void __launch_bounds__(384)
gemm(const __grid_constant__ Map A, const __grid_constant__ Map B, float* C, int K) {
    extern __shared__ __align__(1024) char stages[];
    __shared__ u64 full[STAGES], empty[STAGES];
    int group = threadIdx.x / 128, steps = K / 64, row = blockIdx.y * 128, column = blockIdx.x * 64;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) init(&full[s], 1), init(&empty[s], 2);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0)
            for (int k = 0; k < steps; ++k) {
                int s = k % STAGES;
                wait(&empty[s], k / STAGES % 2 ^ 1);
                char* to = stages + s * (A_BYTES + B_BYTES);
                expect(&full[s], A_BYTES + B_BYTES);
                load(to, &A, k * 64, row, &full[s]);
                load(to + A_BYTES, &B, column, k * 64, &full[s]);
            }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float d[32];
    for (int k = 0; k < steps; ++k) {
        int s = k % STAGES;
        u32 at = address(stages) + s * (A_BYTES + B_BYTES);
        wait(&full[s], k / STAGES % 2);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        for (int j = 0; j < 4; ++j) {  // 16 of K: 32 bytes along a row of A, 16 rows of B
            u32 a = at + (group - 1) * A_BYTES / 2 + 32 * j, b = at + A_BYTES + 2048 * j;
            multiply(d, descriptor(a, 16), descriptor(b, 16), k + j > 0);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        finish<1>();  // the step before is over: its stage goes back
        if (k > 0 && threadIdx.x % 128 == 32) arrive(&empty[(k - 1) % STAGES]);
    }
    finish<0>();
    int t = threadIdx.x % 128, at = row + (group - 1) * 64 + t / 32 * 16 + t % 32 / 4, N = gridDim.x * 64;
    for (int r = 0; r < 32; ++r) C[(at + r / 2 % 2 * 8) * N + column + r / 4 * 8 + t % 4 * 2 + r % 2] = d[r];
}
""".replace("PRODUCT", product(64, 1))


@functools.cache
def module(*changes: tuple[str, str]) -> Module:
    source = GEMM
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    return compile_cuda(source.replace("SWIZZLE", "1ull"), "-arch=compute_90a", "-lineinfo")


def launch(kernel: Module, sizes: tuple[int, int, int], seed: int | None) -> tuple[Launch, float]:
    """Runs the kernel for M, N, K; the largest error."""
    m, n, k = sizes
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((k, n)).astype(np.float16)
    c = np.zeros((m, n), np.float32)
    args = [TensorMap(a, (64, 128), swizzle=128), TensorMap(b, (64, 64), swizzle=128), c, np.int32(k)]
    found = kernel.launch("gemm", (n // 64, m // 128), 384, args, shared_bytes=3 * 24576, seed=seed, unwritten=("arg2",))
    return found, float(abs(c - a.astype(np.float64) @ b.astype(np.float64)).max())


@pytest.mark.parametrize("seed", [None, 0, pytest.param(1, marks=pytest.mark.wide)])
def test_gemm(seed: int | None) -> None:
    m, n, k = (256, 128, 384) if seed is None else (128, 64, 256)
    found, error = launch(module(), (m, n, k), seed)
    assert found.findings == () and error < 1e-4
    assert found.counters.mma_flops == 2 * m * n * k
    # Every block reads its rows of A and its columns of B once.
    assert found.traffic["arg0"].read_bytes == n // 64 * m * k * 2 and found.traffic["arg1"].read_bytes == m // 128 * n * k * 2


def test_a_random_order_takes_a_few_times_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch costs by its steps, each for all warps that are together: of sixteen blocks many must stay so."""
    steps = {None: 0, 2: 0}
    step = PtxMachine.step
    for seed in steps:

        def counted(machine: PtxMachine, pc: int, lanes: LaneSet, seed: int | None = seed) -> None:
            steps[seed] += 1
            step(machine, pc, lanes)

        monkeypatch.setattr(PtxMachine, "step", counted)
        found, _ = launch(module(), (512, 256, 192), seed)
        assert found.findings == ()
    assert steps[None] < steps[2] < 7 * steps[None], steps


@pytest.mark.wide
def test_gemm_of_512() -> None:
    found, error = launch(module(), (512, 512, 512), None)
    assert found.findings == () and error < 1e-4


Change = tuple[str, str]
FAULTS: dict[str, tuple[Change, set[str], str]] = {
    "a swizzle other than the tile's": (("SWIZZLE << 62", "2ull << 62"), {"swizzle"}, "wgmma.mma_async"),
    "a stage given back before the wait": (
        (
            "finish<1>();  // the step before is over: its stage goes back\n        if (k > 0 && threadIdx.x % 128 == 32)"
            " arrive(&empty[(k - 1)",
            "if (threadIdx.x % 128 == 32) arrive(&empty[k",
        ),
        {"race"},
        "cp.async.bulk",
    ),
    "no wait for a stage to be free": (
        ("wait(&empty[s], k / STAGES % 2 ^ 1);", ""),
        # If the loads run far enough ahead their arrivals are too many, and nobody is told of them.
        {"race", "bad arrival", "deadlock"},
        "",
    ),
    "no wait for a stage to be full": (
        ("wait(&full[s], k / STAGES % 2);", ""),
        {"in flight", "uninitialised", "race", "deadlock", "bad arrival"},
        "wgmma.mma_async",
    ),
    "no wait before the results": (("finish<0>();", ""), {"in flight"}, "C[(at"),
    "no fence": (('asm volatile("wgmma.fence.sync.aligned;" ::: "memory");', ""), {"missing fence"}, "wgmma.mma_async"),
    "more registers than the block has": (("aligned.u32 232", "aligned.u32 240"), {"deadlock"}, "aligned.u32 240"),
}
QUICK = ("a stage given back before the wait",)


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.wide) for name in FAULTS])
def test_fault_of_the_gemm(name: str) -> None:
    change, kinds, part = FAULTS[name]
    kernel = module(change)
    lines = GEMM.replace(*change).splitlines()
    for seed in SEEDS:
        found, _ = launch(kernel, (128, 64, 320), seed)
        assert found.findings and {f.kind for f in found.findings} <= kinds, (seed, [str(f) for f in found.findings])
        places = [f.source[1] for f in found.findings if f.source]
        assert any(part in " ".join(lines[line - 2 : line + 2]) for line in places), (seed, places)
