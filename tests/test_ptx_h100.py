"""Sums of products and filtered fetches as an H100 made them (h100.py)."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from h100 import FETCHES, FILE, SHAPE, SUMS
from test_ptx_harness import compile_cuda

from cupyflash.sim import ptx
from cupyflash.sim.ptx.decode.primitives import aligned_sums

RECORDED = dict(np.load(FILE))
F = np.float32

MMA = r"""
#define K(NAME, TYPE) extern "C" __global__ void NAME(const TYPE* A, const TYPE* B, const float* C, float* D)
#define KERNEL(NAME, NA, NB, SHAPE, TYPE) K(NAME, unsigned) { \
    int t = blockIdx.x * 32 + threadIdx.x; \
    const unsigned *a = A + t * NA, *b = B + t * NB; const float* c = C + t * 4; float* d = D + t * 4; \
    asm("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, " OPERANDS(NA) ", {%4,%5,%6,%7};" \
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]), INPUTS(NA)); }
#define OPERANDS(N) OPERANDS##N
#define INPUTS(N) INPUTS##N
#define OPERANDS2 "{%8,%9}, {%10}"
#define OPERANDS4 "{%8,%9,%10,%11}, {%12,%13}"
#define INPUTS2 "r"(a[0]), "r"(a[1]), "r"(b[0])
#define INPUTS4 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])
KERNEL(f16_k16, 4, 2, "m16n8k16", "f16")
KERNEL(bf16_k16, 4, 2, "m16n8k16", "bf16")
KERNEL(f16_k8, 2, 1, "m16n8k8", "f16")
KERNEL(bf16_k8, 2, 1, "m16n8k8", "bf16")
KERNEL(tf32_k8, 4, 2, "m16n8k8", "tf32")
KERNEL(tf32_k4, 2, 1, "m16n8k4", "tf32")
extern "C" __global__ void f16_acc16(const unsigned* A, const unsigned* B, const unsigned* C, unsigned* D) {
    int t = blockIdx.x * 32 + threadIdx.x; const unsigned *a = A + t * 4, *b = B + t * 2, *c = C + t * 2;
    asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%4,%5,%6,%7}, {%8,%9}, {%2,%3};"
        : "=r"(D[t * 2]), "=r"(D[t * 2 + 1]) : "r"(c[0]), "r"(c[1]), INPUTS4);
}
// A (64 x 16) and B (8 x 16) in shared memory without a swizzle: matrices of 8 rows of 16 bytes.
#define WARPGROUP(NAME, TYPE) K(NAME, unsigned short) { \
    __shared__ alignas(128) unsigned short a[64 * 16], b[8 * 16]; \
    for (int i = threadIdx.x; i < 1024; i += 128) a[i / 128 * 128 + i % 16 / 8 * 64 + i / 16 % 8 * 8 + i % 8] = A[i]; \
    b[threadIdx.x % 16 / 8 * 64 + threadIdx.x / 16 * 8 + threadIdx.x % 8] = B[threadIdx.x]; \
    asm volatile("fence.proxy.async.shared::cta;"); \
    __syncthreads(); \
    unsigned long long layout = 8ull << 16 | 16ull << 32, at_a = __cvta_generic_to_shared(a), at_b = __cvta_generic_to_shared(b); \
    int at = (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * 8 + threadIdx.x % 4 * 2; \
    float c0 = C[at], c1 = C[at + 1], c2 = C[at + 64], c3 = C[at + 65]; \
    asm volatile("wgmma.fence.sync.aligned;\n" \
        "wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPE "." TYPE " {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;\n" \
        "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" \
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3) : "l"(at_a >> 4 | layout), "l"(at_b >> 4 | layout) : "memory"); \
    D[at] = c0; D[at + 1] = c1; D[at + 64] = c2; D[at + 65] = c3; }
WARPGROUP(wg_f16, "f16")
WARPGROUP(wg_bf16, "bf16")
"""


@pytest.mark.parametrize("name", SUMS)
def test_sums_have_the_bits_of_an_h100(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, threads = compile_cuda(MMA, "-arch=compute_90a"), 128 if name.startswith("wg") else 32
    a, b, c, d = (RECORDED[f"{name}_{matrix}"] for matrix in "ABCD")
    grid = len(d) // (threads * (2 if name == "f16_acc16" else 4))

    def sums(**options: str) -> np.ndarray:
        out = np.zeros_like(d)
        launch = module.launch(name, grid, threads, {"A": a, "B": b, "C": c, "D": out}, **options)
        assert not launch.findings
        return out.view(np.uint32)

    assert (sums(tensor_cores="H100") == d.view(np.uint32)).all()
    assert name == "f16_acc16" or (sums() != d.view(np.uint32)).any()  # it is no accident
    monkeypatch.setenv("CUPYFLASH_TENSOR_CORES", "H100")
    assert (sums() == d.view(np.uint32)).all()


def one_sum(a: list[float], b: list[float], c: float, result: str = "f32") -> float:
    with np.errstate(all="ignore"):
        return float(aligned_sums(*(np.array(x, F).reshape(-1, 1) for x in (a, b)), np.full((1, 1), c, F), result)[0, 0])


def test_an_addend_keeps_25_places_behind_the_largest_exponent() -> None:
    ones = [1.0] * 8
    assert one_sum([2.0**-25] * 8, ones, 1) == 1 + 2.0**-22
    assert one_sum([2.0**-26] * 8, ones, 1) == 1  # each of them is cut off, although they add up to 2**-23
    assert one_sum([1.75 * 2.0**-25] * 8, ones, 1) == 1 + 2.0**-22
    assert one_sum([-(2.0**-26)] * 8, ones, 1) == 1  # towards zero
    assert one_sum([2.0**-25], [1], 1) == 1 and one_sum([-(2.0**-25)], [1], 1) == 1 - 2.0**-24  # so is the sum
    # The exponent of 1.5 * 1.5 is 0; that of 2.25 is 1.
    assert one_sum([1.5, -1.5, 2.0**-25], [1.5, 1.5, 1], 0) == 2.0**-25
    assert one_sum([1.5, 2.0**-25], [1.5, 1], -2.25) == 0


def test_a_float16_sum_is_rounded_once_to_nearest() -> None:
    assert one_sum([2.0**-11, 2.0**-25], [1, 1], 1, "f16") == 1 + 2.0**-10
    assert one_sum([2.0**-11, 2.0**-26], [1, 1], 1, "f16") == 1
    assert one_sum([300.0], [300], 0, "f16") == np.inf


@pytest.mark.parametrize("seed", range(5))
def test_sums_do_not_depend_on_the_order_and_are_exact_where_all_fits(seed: int) -> None:
    random = np.random.default_rng(seed)
    a, b = (
        random.normal(size=(16, n, 3)).astype(np.float16).astype(F) * F(2) ** random.integers(-6, 6, (16, n, 3)) for n in (4, 5)
    )
    c, order = random.normal(size=(4, 5, 3)).astype(F), random.permutation(16)
    assert (aligned_sums(a[order], b[order], c, "f32") == aligned_sums(a, b, c, "f32")).all()
    a, b, c = (random.integers(-99, 100, shape).astype(F) for shape in ((16, 4, 3), (16, 5, 3), (4, 5, 3)))
    assert (aligned_sums(a, b, c, "f32") == np.einsum("kiw,kjw->ijw", a, b) + c).all()


def test_special_values_and_scales() -> None:
    assert one_sum([np.inf], [1], 1) == np.inf and np.isnan(one_sum([np.inf, 1], [0, 1], 1)) and np.isnan(one_sum([1], [1], np.nan))
    assert one_sum([0, 0], [1, 0], 0) == 0
    assert one_sum([2.0**120], [2.0**-120], 0) == 1 and one_sum([2.0**-120], [2.0**-6], 0) == 2.0**-126


def test_other_chips_are_refused() -> None:
    module = ptx.Module.from_ptx(".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k() { ret; }")
    with pytest.raises(ValueError, match=r"tensor_cores .*'H100', got 'A100'"):
        module.launch("k", 1, 32, {}, tensor_cores="A100")


FETCH = r"""
extern "C" __global__ void fetch(cudaTextureObject_t image, const float* u, const float* v, float* y) {
    y[threadIdx.x] = tex2D<float>(image, u[threadIdx.x], v[threadIdx.x]);
}
"""


@pytest.mark.parametrize(("filtered", "normalized", "mode"), [*product(*map(range, SHAPE))])
def test_fetches_have_the_values_of_an_h100(filtered: int, normalized: int, mode: int) -> None:
    texture = ptx.Texture(ptx.Texels.of(RECORDED["image"], "2d"), (mode,) * 3, bool(filtered), bool(normalized))
    u, v, y = (RECORDED[name][filtered, normalized, mode] for name in "uvy")
    out = np.zeros(FETCHES, F)
    module = compile_cuda(FETCH, "-arch=compute_90")
    assert not module.launch("fetch", 1, FETCHES, {"image": texture, "u": u, "v": v, "y": out}).findings
    if filtered:  # up to the last bit of a sum
        np.testing.assert_allclose(out, y, rtol=2.0**-23, atol=2.0**-24)
    else:
        assert (out == y).all()
