"""Matrices, asynchronous copies and halves by compiled code equal NumPy's: bytes, traffic, counters and findings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import test_ptx_functions
import test_ptx_warp

from cupyflash.sim import ptx
from cupyflash.sim.ptx import module as launches
from cupyflash.sim.ptx.decode import matrices
from cupyflash.sim.ptx.decode.matrices import products, sums_in_order
from cupyflash.sim.ptx.execute import warp_instructions

pytest.importorskip("llvmlite", reason="the extra sim brings it")

FOLDER = Path(__file__).parent / "kernels"
RNG = np.random.default_rng(2)
HEAD = ".version 8.8\n.target sm_90\n.address_size 64\n"

MMA = [
    *((shape, c, "f16") for shape in ("m16n8k8", "m16n8k16") for c in ("f32", "f16")),
    *((shape, "f32", "bf16") for shape in ("m16n8k8", "m16n8k16")),
    *((shape, "f32", "tf32") for shape in ("m16n8k4", "m16n8k8")),
    *((shape, "s32", kind) for shape in ("m16n8k16", "m16n8k32") for kind in ("s8", "u8")),
]


def both(
    module: ptx.Module, monkeypatch: pytest.MonkeyPatch, name: str, grid: int, block: int, args: list, clean: bool
) -> tuple[list, int]:
    """Runs a launch by NumPy and by compiled code, and compares all there is; returns the arguments behind it, and the findings."""
    ran, found, own = [], [], launches.run_compiled
    monkeypatch.setattr(launches, "run_compiled", lambda *given: ran.append(own(*given)) or ran[-1])
    for engine in ("numpy", "llvm"):
        monkeypatch.setenv("CUPYFLASH_ENGINE", engine)
        mine = [each.copy() if isinstance(each, np.ndarray) else each for each in args]
        launch = module.launch(name, grid, block, mine)
        memory = [each.tobytes() if isinstance(each, np.ndarray) else each for each in mine]
        found.append((memory, launch.counters, launch.traffic, launch.findings, launch.findings_total))
    assert found[0] == found[1]
    assert ran == [clean]
    return mine, len(found[0][3])


def product(shape: str, c: str, kind: str, flushing: bool) -> tuple[str, list[int]]:
    """Returns a kernel that multiplies matrices in registers of 32 bits, one array each, and the number of these of A, B and C."""
    m, n, k = matrices.lengths(shape)
    bits = matrices.BITS[kind]
    counts = [m * k * bits // 1024, n * k * bits // 1024, m * n // (64 if c == "f16" else 32)]
    registers, loads = [], []
    for letter, count in zip("abc", counts, strict=True):
        for at in range(count):
            name = f"%{letter}{at}"
            registers.append(name)
            loads += ["add.u64 %x, %x, %step;", f"ld.global.b32 {name}, [%x];"]
    listed = ["{" + ", ".join(r for r in registers if r[1] == letter) + "}" for letter in "abc"]
    results = [f"%d{at}" for at in range(counts[2])]
    stores = [line for r in results for line in ("add.u64 %x, %x, %step;", f"st.global.b32 [%x], {r};")]
    more = ["mov.f32 %f, 0f3F800000;", *["add.ftz.f32 %f, %f, %f;"] * 3] if flushing else []
    types = f"{c}.{kind}.{kind}.{c}"
    text = "\n".join(
        [
            HEAD + ".visible .entry k(.param .u64 P, .param .u64 Q) {",
            f".reg .b32 %t, {', '.join([*registers, *results])};\n.reg .f32 %f;\n.reg .b64 %x, %step, %o;",
            *("mov.u32 %t, %tid.x;", "mul.wide.u32 %o, %t, 4;", "mov.u64 %step, 256;", "ld.param.u64 %x, [P];"),
            *("add.u64 %x, %x, %o;", "sub.u64 %x, %x, %step;", *loads, *more),
            f"mma.sync.aligned.{shape}.row.col.{types} {{{', '.join(results)}}}, {', '.join(listed)};",
            *("ld.param.u64 %x, [Q];", "add.u64 %x, %x, %o;", "sub.u64 %x, %x, %step;", *stores, "ret;\n}"),
        ]
    )
    return text, counts


def words(kind: str, count: int, small: bool) -> np.ndarray:
    """`count` rows of 64 words with elements of a type; some are tiny, or so small that products are subnormal."""
    size = matrices.BITS.get(kind, 32)
    if kind in ("s8", "u8", "s32"):
        return RNG.integers(0, 2**32, (count, 64)).astype(np.uint32)
    values = RNG.standard_normal((count, 64 * 32 // size)) * 2.0 ** RNG.integers(-12, 4, (count, 64 * 32 // size))
    if small:
        values *= 1e-3 if kind == "f16" else 2.0**-66
    bits = values.astype(np.float16 if kind == "f16" else np.float32)
    if kind == "bf16":
        bits = (bits.view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(bits).view(np.uint32).reshape(count, 64)


@pytest.mark.parametrize(("shape", "c", "kind"), MMA)
def test_products_of_a_warp(monkeypatch: pytest.MonkeyPatch, shape: str, c: str, kind: str) -> None:
    """In a kernel that flushes, too, which mma does not."""
    for flushing in (False, True):
        text, counts = product(shape, c, kind, flushing)
        module = ptx.Module.from_ptx(text)
        for small in (False, True):
            factors = [words(kind, counts[0], small), words(kind, counts[1], small), words(c, counts[2], small and c == "f32")]
            out = both(module, monkeypatch, "k", 1, 64, [np.concatenate(factors), np.zeros((counts[2], 64), np.uint32)], True)
            assert out[0][1].any()


def test_nan_is_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    text, counts = product("m16n8k16", "f32", "f16", False)
    factors = words("f16", sum(counts[:2]), False)
    factors[1, 40] = 0x7E00
    args = [np.concatenate([factors, np.zeros((counts[2], 64), np.uint32)]), np.zeros((counts[2], 64), np.uint32)]
    monkeypatch.setenv("CUPYFLASH_ENGINE", "llvm")
    given_up = ptx.Module.from_ptx(text)
    given_up.launch("k", 1, 64, args)
    assert np.isnan(args[1].view(np.float32)).any() and given_up.code("k").gave_up


def test_what_compiled_code_lacks_is_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warp without some lanes, which is a finding; products of 8-bit floats and of single bits; pairs of float32."""
    monkeypatch.setenv("CUPYFLASH_ENGINE", "llvm")
    test_ptx_warp.test_ldmatrix_wants_whole_warps()
    for shape, kind, accumulator in (("m16n8k32", "e4m3", "f32"), ("m8n8k128", "b1.xor", "s32")):
        test_ptx_warp.test_mma_fragments(shape, kind, accumulator, np.random.default_rng(5))
    test_ptx_functions.test_pairs_of_numbers(np.random.default_rng(5))


@pytest.mark.parametrize("warps", [1, 9, 40])
def test_sums_begin_at_the_lowest_k(monkeypatch: pytest.MonkeyPatch, warps: int) -> None:
    """However many warps there are: equal to a plain loop in the bits, signs of zeros included."""
    a, b = (RNG.standard_normal((warps, rows, 16)).astype(np.float16).astype(np.float32) for rows in (16, 8))
    a[:, 3], b[:, 5] = -0.0, 0
    expected, out = np.zeros((2, warps, 16, 8), np.float32)
    for k in range(16):
        expected += a[:, :, None, k] * b[:, None, :, k]
    for own in (sums_in_order, lambda *_: False):
        monkeypatch.setattr(matrices, "sums_in_order", own)
        products(a, b, out)
        assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))


def test_sums_have_one_order_on_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy adds the products one after the other if BLAS has another order; compiled code likewise."""
    a, b = (RNG.standard_normal((9, rows, 16)).astype(np.float16).astype(np.float32) for rows in (16, 8))
    found = []
    for own in (sums_in_order, lambda *_: False):
        monkeypatch.setattr(matrices, "sums_in_order", own)
        monkeypatch.setattr(warp_instructions, "sums_in_order", own)
        out = np.empty((9, 16, 8), np.float32)
        products(a, b, out)
        text, counts = product("m16n8k16", "f32", "f16", False)
        rng = np.random.default_rng(3)
        factors = rng.standard_normal((sum(counts), 128)).astype(np.float16).view(np.uint32).reshape(-1, 64)
        module, results = ptx.Module.from_ptx(text), np.zeros((counts[2], 64), np.uint32)
        monkeypatch.setenv("CUPYFLASH_ENGINE", "llvm")
        module.launch("k", 1, 64, [factors, results])
        assert not module.code("k").gave_up
        found.append((out.tobytes(), results.tobytes()))
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def copies() -> ptx.Module:
    return ptx.Module.from_source((FOLDER / "copies.cu").read_text(), ["-arch=compute_80"])


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("fault", range(7))
def test_copies_in_stages(copies: ptx.Module, monkeypatch: pytest.MonkeyPatch, fault: int) -> None:
    copies.code("stages").gave_up = False
    args = [floats(3 * 64 * 5, 4), np.zeros((3 * 64, 4), np.float32), np.int32(5), np.int32(fault)]
    _, findings = both(copies, monkeypatch, "stages", 3, 64, args, fault == 0)
    assert bool(findings) == (fault in (1, 2, 3, 5, 6))


@pytest.mark.parametrize(("name", "grid", "clean"), [("words", 3, True), ("inplace", 1, False)])
def test_copies_of_words(copies: ptx.Module, monkeypatch: pytest.MonkeyPatch, name: str, grid: int, clean: bool) -> None:
    both(copies, monkeypatch, name, grid, 128, [floats(128 * grid), np.zeros(128 * grid, np.float32), np.int32(300)], clean)


@pytest.mark.parametrize("fault", range(3))
def test_matrices_of_shared_memory(copies: ptx.Module, monkeypatch: pytest.MonkeyPatch, fault: int) -> None:
    args = [RNG.integers(0, 2**32, (192, 4)).astype(np.uint32), np.zeros(192, np.uint32), np.int32(fault)]
    _, findings = both(copies, monkeypatch, "matrices", 3, 64, args, fault == 0)
    assert bool(findings) == (fault > 0)


def test_the_sums_of_a_chip_are_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that asks for them leaves the kernel to compiled code in others."""
    text, counts = product("m16n8k16", "f32", "f16", False)
    module, ran, own = ptx.Module.from_ptx(text), [], launches.run_compiled
    monkeypatch.setattr(launches, "run_compiled", lambda *given: ran.append(own(*given)) or ran[-1])
    monkeypatch.setenv("CUPYFLASH_ENGINE", "llvm")
    for chip in ("H100", None):
        module.launch("k", 1, 64, [words("f16", sum(counts), False), np.zeros((counts[2], 64), np.uint32)], tensor_cores=chip)
    assert ran == [False, True]
