"""Reading what nobody wrote: global memory whose contents a launch does not get, registers."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from cupyflash.sim.ptx import Launch, Module


@cache
def compiled(source: str, *options: str) -> Module:
    return Module.from_source(source, options)


def launch(body: str, options: tuple[str, ...] = (), head: str = "", **more: Any) -> Launch:
    """64 threads of a kernel of (x, y, n): x are 256 zeros, y 256 results that nobody wrote, n the integer 5."""
    source = f'{head}\nextern "C" __global__ void k(float *x, float *y, int n) {{\nint t = threadIdx.x;\n{body}\n}}'
    args = {"x": np.zeros(256, np.float32), "y": np.zeros(256, np.float32), "n": 5}
    return compiled(source, *options).launch("k", 1, 64, args, **{"unwritten": ("y",), **more})


def line_of(body: str, text: str) -> int:
    """The line that `text` is on in the source that `launch` compiles."""
    return 4 + body[: body.index(text)].count("\n")


def told(found: Launch) -> list[tuple[str, int | None, int]]:
    """Kind, line and lane of each finding."""
    return [(f.kind, f.source[1] if f.source else None, f.warp * 32 + f.lane) for f in found.findings]


# -- global memory --------------------------------------------------------------------------------------------------------

COPY = """y[t] = 1;
unsigned s = (unsigned)__cvta_generic_to_shared(sram + 4 * t);
asm volatile("cp.async.%s.shared.global [%%0], [%%1], %s;\\ncp.async.wait_all;" :: "r"(s), "l"(y + 4 * t) : "memory");"""
SRAM = "__shared__ __align__(16) float sram[256];"

# Each reads at its last line, first in thread `lane`, what nobody wrote.
READS = {
    "a load": ("y[t] = 1;\ny[t + 64] = y[t + 1];", 63),
    "a vector load": ("if (t < 8) y[t] = 1;\n__syncthreads();\nif (t < 16) ((float4 *)x)[t] = ((float4 *)y)[t];", 2),
    "an atomic": ("if (t < 9) y[t] = 1;\natomicAdd(y + t, 1.f);", 9),
    "a generic address": (SRAM + "\nsram[t] = 0;\nx[t] = *(t < 7 ? (volatile float *)sram + t : y + t);", 7),
    "an asynchronous copy": (SRAM + COPY % ("cg", "16") + "\n", 16),
    "a short asynchronous copy": (SRAM + COPY % ("ca", "4, 3"), 16),
}


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", READS)
def test_global_memory_that_nobody_wrote(name: str, seed: int | None) -> None:
    body, lane = READS[name]
    last = [line for line in body.split("\n") if line][-1]
    found = launch(body, seed=seed, races=False)
    assert [(kind, line) for kind, line, _ in told(found)] == [("uninitialised", line_of(body, last))], found.findings
    (finding,) = found.findings
    assert finding.tensor == "y" and finding.address is not None and "of 'y', which nobody wrote" in finding.message
    assert seed is not None or told(found)[0][2] == lane
    assert launch(body, unwritten=(), races=False).findings == ()


def test_an_atomic_writes_too() -> None:
    assert launch("atomicExch(y + t, 1.f);", races=False).findings_total == 64
    assert launch("atomicExch(y + t, 1.f);\nx[t] = y[t];", races=False).findings_total == 64


def test_elements_of_a_vector_that_nobody_uses() -> None:
    """A row of three floats, padded to four, is read whole; of a vector's elements the ones that are used count."""
    fill = "y[4 * t] = y[4 * t + 1] = y[4 * t + 2] = 1;\n"
    read = "float4 a = ((float4 *)y)[t];\nx[t] = a.x + a.y + a.z;"
    assert launch(fill + read).findings == ()
    assert launch(fill + read.replace("a.z", "a.w")).findings_total == 64
    shared = SRAM + (fill + read).replace("y[", "sram[").replace("*)y)", "*)sram)")
    assert launch(shared).findings == ()
    assert launch(shared.replace("a.z", "a.w")).findings_total == 64


STRIDED = """extern "C" __global__ void k(float *x, float *y) { x[threadIdx.x] = y[2 * threadIdx.x]; y[2 * threadIdx.x] = 0; }"""


def test_views_share_what_is_written() -> None:
    """The elements of the named array count, not the gaps between them; another view of the same memory is the same bytes."""
    module = compiled(STRIDED)
    memory = np.zeros(256, np.float32)
    x = np.zeros(64, np.float32)
    assert module.launch("k", 1, 64, {"x": x, "y": memory}, unwritten=("y",)).findings_total == 64
    gaps = {"x": memory[1:129:2], "y": memory[:128]}
    # The kernel's x is contiguous: what it stores is seen through y, and y's even elements are no elements of x.
    assert module.launch("k", 1, 1, gaps, unwritten=("x",)).findings == ()
    assert module.launch("k", 1, 1, {"x": x, "y": memory[::-1]}, unwritten=("y",)).findings_total == 1
    (found,) = module.launch("k", 1, 1, {"x": x, "y": memory[:128]}, unwritten=("y", "x")).findings
    assert (found.tensor, found.lane) == ("y", 0)
    # Named through one view, read through the other.
    both = {"x": memory, "y": memory[:128]}
    assert [f.tensor for f in module.launch("k", 1, 64, both, unwritten=("x",), races=False).findings] == ["y"]


def test_unknown_names() -> None:
    for name in ("z", "n"):
        with pytest.raises(ValueError, match=f"unwritten must name arrays among the arguments, got '{name}'; they are x, y"):
            launch("y[t] = x[t];", unwritten=("x", name))
