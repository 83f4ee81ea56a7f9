"""Helpers of the PTX tests: run a snippet of PTX on arrays, one element a thread. The tests here test the helpers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from cupyflash.launch.nvrtc import compile_to_ptx
from cupyflash.sim.ptx import Launch, Module

TARGET = "sm_80"
HEAD = f".version 8.3\n.target {TARGET}\n.address_size 64\n"

POINTER_REGISTERS = ".reg .b64 %rd<20>; .reg .b32 %r<20>; .reg .b16 %h<4>; .reg .f32 %f<8>; .reg .f64 %fd<4>; .reg .pred %p<4>;"
REGISTER = {1: ".b16", 2: ".b16", 4: ".b32", 8: ".b64"}


def memory_type(dtype: np.dtype[Any]) -> str:
    return ("s" if dtype.kind == "i" else "u") + str(8 * dtype.itemsize)


def kernel(body: str, parameters: Sequence[str] = (), registers: str = "", name: str = "k") -> str:
    """A module with one kernel; parameters are `.u64 x` and so on."""
    params = ", ".join(f".param {p}" for p in parameters)
    return f"{HEAD}.visible .entry {name}({params})\n{{\n{registers}\n{body}\nret;\n}}\n"


def elementwise(body: str, inputs: Sequence[np.ndarray], outputs: Sequence[Any], registers: str = "") -> str:
    """A kernel that loads %a0, %a1, ... runs `body` and stores %d0, %d1, ... at its global thread number."""
    out = [np.dtype(o) for o in outputs]
    params = [f".u64 a{i}" for i in range(len(inputs))] + [f".u64 d{i}" for i in range(len(out))] + [".u32 n"]
    lines = [".reg .b64 %at, %base; .reg .b32 %i, %t, %b, %w, %n; .reg .pred %outside;"]
    lines += [f".reg {REGISTER[x.dtype.itemsize]} %a{i};" for i, x in enumerate(inputs)]
    lines += [f".reg {REGISTER[o.itemsize]} %d{i};" for i, o in enumerate(out)]
    lines += [registers, "mov.u32 %t, %tid.x; mov.u32 %b, %ctaid.x; mov.u32 %w, %ntid.x; mad.lo.u32 %i, %b, %w, %t;"]
    lines += ["ld.param.u32 %n, [n]; setp.ge.u32 %outside, %i, %n; @%outside ret;"]
    for i, x in enumerate(inputs):
        lines.append(f"ld.param.u64 %base, [a{i}]; mad.wide.u32 %at, %i, {x.dtype.itemsize}, %base;")
        lines.append(f"ld.global.{memory_type(x.dtype)} %a{i}, [%at];")
    lines.append(body)
    for i, o in enumerate(out):
        lines.append(f"ld.param.u64 %base, [d{i}]; mad.wide.u32 %at, %i, {o.itemsize}, %base;")
        lines.append(f"st.global.{memory_type(o)} [%at], %d{i};")
    return kernel("\n".join(lines), params)


def apply(
    body: str, inputs: Sequence[Any], outputs: Sequence[Any], registers: str = "", target: str = TARGET, **options: Any
) -> list[np.ndarray]:
    """Run `body` on every element; the arrays of %d0, %d1, ... Fails on any finding. `target`: the first to have its opcodes."""
    arrays = [np.ascontiguousarray(x) for x in inputs]
    n = len(arrays[0])
    results = [np.zeros(n, o) for o in outputs]
    module = Module.from_ptx(elementwise(body, arrays, outputs, registers).replace(TARGET, target, 1))
    launch = module.launch("k", -(-n // 64), 64, [*arrays, *results, n], **options)
    assert launch.findings == ()
    return results


def pointer_kernel(body: str, *names: str, extra: str = "") -> str:
    """%rd1, %rd2, ... are the pointer arguments, %r1 the thread, %rd10 the thread as 64 bits."""
    loads = "".join(f"ld.param.u64 %rd{k}, [{n}];\n" for k, n in enumerate(names, 1))
    text = kernel(loads + "mov.u32 %r1, %tid.x; cvt.u64.u32 %rd10, %r1;\n" + body, [f".u64 {n}" for n in names], POINTER_REGISTERS)
    return text.replace(HEAD, HEAD + extra)


COPY = pointer_kernel(
    """shl.b64 %rd11, %rd10, 2; add.s64 %rd3, %rd1, %rd11; add.s64 %rd4, %rd2, %rd11;
    ld.global.u32 %r2, [%rd3]; st.global.u32 [%rd4], %r2;""",
    "x",
    "y",
)


def run(text: str, args: Mapping[str, Any], *, grid: Any = 1, block: Any = 32, **options: Any) -> Launch:
    """Launch the only kernel of a PTX text."""
    module = Module.from_ptx(text)
    return module.launch(module.kernels[0], grid, block, args, **options)


@functools.cache
def ptx_of(source: str, options: tuple[str, ...]) -> str:
    return compile_to_ptx(source, options, "kernel.cu")


def compile_cuda(source: str, *options: str) -> Module:
    """A module from CUDA C; the test is skipped where CuPy is not installed."""
    pytest.importorskip("cupy")
    return Module.from_ptx(ptx_of(source, options))


def integers(rng: np.random.Generator, dtype: Any, n: int) -> np.ndarray:
    """Random integers of all magnitudes, with the edges of the type among them."""
    info = np.iinfo(dtype)
    bits = rng.integers(0, 2**64, n, dtype=np.uint64) >> rng.integers(0, 64, n).astype(np.uint64)
    values = bits.astype(np.dtype(dtype).str.replace("i", "u")).view(dtype)
    edges = [0, 1, 2, info.max, info.min, info.max - 1, info.min + 1, info.max // 2]
    if info.min < 0:
        edges += [-1, -2]
        values[::3] = np.invert(values[::3])
    values[: len(edges)] = edges
    return rng.permutation(values)


def floats(rng: np.random.Generator, dtype: Any, n: int, special: bool = True) -> np.ndarray:
    """Random floats over the whole range of exponents, with zeros, infinities, NaN, subnormals and ties among them."""
    info = np.finfo(dtype)
    unsigned = np.dtype(f"u{np.dtype(dtype).itemsize}")
    values = rng.integers(0, np.iinfo(unsigned).max, n, dtype=unsigned, endpoint=True).view(dtype)
    values = np.where(np.isnan(values), np.dtype(dtype).type(1.5), values)
    half = n // 2
    values[:half] = (rng.standard_normal(half) * 4).astype(dtype)
    edges = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, float(info.max), float(info.smallest_normal)]
    edges += [float(info.smallest_subnormal), float(info.smallest_normal) / 2, 3 * float(info.smallest_subnormal)]
    if special:
        edges += [np.inf, -np.inf, np.nan]
    values[: len(edges)] = edges
    return rng.permutation(values)


def same(got: np.ndarray, want: np.ndarray) -> bool:
    """Equal bits, except that any NaN equals any NaN."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    if got.dtype.kind != "f":
        return bool((got == want).all())
    bits = f"u{got.dtype.itemsize}"
    return bool(((got.view(bits) == want.view(bits)) | (np.isnan(got) & np.isnan(want))).all())


def test_apply_runs_every_element_and_keeps_the_rest() -> None:
    x = np.arange(100, dtype=np.uint32)
    (d,) = apply("add.u32 %d0, %a0, 7;", [x], [np.uint32])
    assert (d == x + 7).all()


def test_same_tells_zeros_apart() -> None:
    assert not same(np.array([0.0], np.float32), np.array([-0.0], np.float32))
    assert same(np.array([np.nan], np.float32), np.array([np.nan], np.float32))
