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


def test_what_one_launch_leaves_unwritten_the_next_may_not_read() -> None:
    x, y = np.zeros(256, np.float32), np.zeros(256, np.float32)
    module, args = compiled(STRIDED), {"x": x, "y": y}
    first = module.launch("k", 1, 64, {"x": y[:64], "y": x}, unwritten=("x",))
    assert first.findings == () and first.unwritten == {}
    first = module.launch("k", 1, 48, {"x": y, "y": x}, unwritten=("x",))
    assert np.array_equal(first.unwritten["x"], np.repeat(np.arange(256) >= 48, 4).reshape(256, 4))
    second = module.launch("k", 1, 64, args, unwritten={"y": first.unwritten["x"]})
    assert second.findings_total == 64 - 24 and second.findings[0].lane == 24
    # It stores every second element.
    assert np.flatnonzero(second.unwritten["y"][:, 0]).tolist() == [n for n in range(48, 256) if n % 2 or n >= 128]


def test_unknown_names() -> None:
    for name in ("z", "n"):
        with pytest.raises(ValueError, match=f"unwritten must name arrays among the arguments, got '{name}'; they are x, y"):
            launch("y[t] = x[t];", unwritten=("x", name))


# -- registers --------------------------------------------------------------------------------------------------------------

DEBUG = ("--device-debug",)
# In one line: the versions of NVRTC do not agree on which line of an asm statement is its own.
PREDICATED = (
    "float v = 0;\n"
    'asm volatile("{.reg .pred p; .reg .f32 f; setp.lt.s32 p, %%1, %%2; @p ld.global.f32 f, [%%3]; %s }" '
    ': "+f"(v) : "r"(t), "r"(n), "l"(x + t));\n'
    "y[t] = v;"
)

# Bytes that are built one by one in the registers of a word, as bitsandbytes' 4-bit product has the last of a row.
BYTES = """unsigned char b[16];
if (16 * t + 16 <= 200 * n) *(int4 *)b = ((const int4 *)x)[t];
else
#pragma unroll
for (int j = 0; j < 16; j++)
if (16 * t + j < 200 * n) b[j] = ((const unsigned char *)x)[16 * t + j];
else b[j] = 0x77;
float s = 0;
#pragma unroll
for (int j = 0; j < 16; j++)
s += (b[j] >> 4) * x[j] + (b[j] & 15);
y[t] = s;"""

# Each warp's part, and what the first thread makes of those of {more} - 1 warps, of which there are 2.
PARTS = """__shared__ float part[32];
if (t % 32 == 0) part[t / 32] = x[t];
if (t % 32 == 1 && t / 32 == 1) part[2] = x[t];
__syncthreads();
float s = part[0];
if (t == 0) {{
if ({more} > 1) s = fmaxf(s, part[1]);
if ({more} > 2) s = fmaxf(s, part[2]);
if ({more} > 4)
s = {op};
}}
y[t] = s;"""

# Each uses at the given line, first in the given thread, what it never wrote; where it shows only without optimisation, DEBUG.
UNWRITTEN = {
    "a sum": ("float s;\nfor (int i = 0; i < n; i++)\ns += x[i * t];\ny[t] = s;", "s +=", 0, ()),
    "a sum that is never begun": ("float s;\nfor (int i = 9; i < n; i++)\ns += x[i * t];\ny[t] = s;", "y[t]", 0, ()),
    "sums": (
        "float s[2];\nfor (int i = 0; i < n; i++)\nfor (int j = 0; j < 2; j++)\ns[j] += x[i * t + j];\ny[t] = s[0] + s[1];",
        "s[j] +=",
        0,
        (),
    ),
    "a loop": ("int i;\nfor (;\ni < n; i++) y[i] = t;", "i < n", 0, DEBUG),
    "one branch": ("float v;\nif (t < n) v = x[t];\ny[t] = v * 2;", "y[t]", 5, DEBUG),
    "from a thread that wrote nothing": (
        "float v;\nif (t % 32 == 3) v = x[t];\nv = __shfl_xor_sync(~0u, v, 1);\nif (t % 4 > 1)\ny[t] = v + 1;",
        "y[t]",
        3,
        (),
    ),
    "a pointer": ("float *p;\nfor (int i = 0; i < n; i++) if (x[i] == i + t) p = x + i;\n*p = 1;", "*p = 1", 1, DEBUG),
    "under a predicate": (PREDICATED % "@p mov.f32 %0, f; @!p neg.f32 %0, f;", "asm", 5, ()),
    "bytes of a word": (BYTES.replace("else b[j] = 0x77;\n", ""), "s +=", 63, ()),
    "the part of a warp that is not there": (PARTS.format(more="n", op="fmaxf(s, part[3])"), "s = fmaxf(s, part[3])", 0, ()),
    "stored": (PREDICATED % "st.global.f32 [%3], f;", "asm", 5, ()),
    "a sum of nothing": (PREDICATED % "add.f32 f, f, f; mov.f32 %0, f;", "y[t]", 5, ()),
    "mixed with a sum of nothing": (PREDICATED % "add.f32 f, f, f; add.f32 %0, %0, f;", "asm", 5, ()),
}

# These only copy, merge and hand round what nobody wrote.
HARMLESS = {
    "two branches": "float v;\nif (t < n) v = x[t];\n__syncthreads();\nif (t < n) y[t] = v * 2;",
    "from the thread that wrote": "float v;\nif (t % 32 == 3) v = x[t];\nv = __shfl_sync(~0u, v, 3);\ny[t] = v + 1;",
    "once there is one": """int v;
bool have = false;
for (int i = 0; i < n; i++) {
if (have) y[i] = v;
if (x[i] >= 0) { v = i; have = true; }
}""",
    "a vector": "float4 v, w;\nv.x = x[t];\nif (t < n) v.y = 1;\nw = v;\n((float4 *)x)[t] = w;",
    "compared where it counts": "float v;\nif (t < n) v = x[t];\n__syncthreads();\nif (t < n && v < 1) y[t] = v;",
    "a part of a pair": "ushort2 v;\nv.x = t;\nif (t < n) v.y = 1;\n((ushort2 *)y)[t] = v;\ny[t + 64] = v.x;",
    "bytes of a word": BYTES,
    "the largest part of the warps that are there": PARTS.format(more="n - 1", op="fmaxf(s, part[3])"),
    "a sum of the parts that are there": PARTS.format(more="n - 1", op="s + part[3]"),
    "under a predicate": PREDICATED % "@p mov.f32 %0, f;",
    "a sum in all lanes of which some count": PREDICATED % "add.f32 f, f, f; fma.rn.f32 f, f, f, f; @p mov.f32 %0, f;",
    "under either predicate": PREDICATED % "@!p mov.f32 f, 0f3F800000; add.f32 %0, f, f;",
    "selected": PREDICATED % "selp.f32 f, f, %0, p; add.f32 %0, f, f;",
}


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", UNWRITTEN)
def test_registers_that_nobody_wrote(name: str, seed: int | None) -> None:
    body, text, lane, options = UNWRITTEN[name]
    found = [one for one in told(launch(body, options, seed=seed, races=False)) if one[0] != "null pointer"]
    assert found and {(kind, line) for kind, line, _ in found} == {("uninitialised", line_of(body, text))}
    assert seed is not None or found[0][2] == lane


@pytest.mark.parametrize("options", [(), DEBUG], ids=["", "debug"])
@pytest.mark.parametrize("name", HARMLESS)
def test_copying_what_nobody_wrote_is_no_use_of_it(name: str, options: tuple[str, ...]) -> None:
    for seed in (None, 0, 1):
        assert launch(HARMLESS[name], options, seed=seed, races=False).findings == ()


def ptx(body: str) -> Launch:
    text = f""".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 p)
{{.reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>;
mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [p]; setp.lt.u32 %p1, %r1, 7;\n{body}\nret; }}"""
    return Module.from_ptx(text).launch("k", 2, 48, {"p": np.zeros(256, np.uint32)}, races=False)


W = ".shared .align 4 .b8 w[16]; mov.f32 %f2, 0f3F800000; ld.shared.f32 %f1, [w+4]; "

# What an instruction makes of %r2, %r3 or %h2, that nobody wrote: how many of the 96 threads are told of it.
INSTRUCTIONS = {
    "mov.u32 %r4, %r2;": 0,
    "mov.u32 %r4, %r2; add.u32 %r5, %r4, 1;": 96,
    "@%p1 mov.u32 %r2, 1; add.u32 %r5, %r2, 1;": 82,
    "@%p1 add.u32 %r5, %r2, 1;": 14,
    "@!%p1 add.u32 %r5, %r2, 1;": 82,
    "mov.b32 %r4, {%h1, %h2}; mov.b32 {%h3, %h4}, %r4; cvt.u32.u16 %r5, %h4; add.u32 %r6, %r5, 1;": 96,
    "mov.u16 %h1, 1; mov.b32 %r4, {%h1, %h2}; mov.b32 {%h3, %h4}, %r4; cvt.u32.u16 %r5, %h3; add.u32 %r6, %r5, 1;": 0,
    "mov.u16 %h1, 1; mov.b32 %r4, {%h1, %h2}; and.b32 %r5, %r4, 65535;": 0,
    "selp.u32 %r4, 1, %r2, %p1; add.u32 %r5, %r4, 1;": 82,
    "selp.u32 %r4, 1, 2, %p2;": 96,
    "prmt.b32 %r4, %r2, %r3, 0x3340; prmt.b32 %r5, %r1, %r4, 0x5410; and.b32 %r6, %r5, 65535;": 0,
    "prmt.b32 %r4, %r2, %r3, 0x3340; prmt.b32 %r5, %r1, %r4, 0x5410; dp2a.lo.u32.u32 %r6, %r1, %r5, %r1;": 0,
    "prmt.b32 %r4, %r1, %r2, 0x7654; add.u32 %r5, %r4, 1;": 96,
    "prmt.b32 %r4, %r1, %r1, %r2;": 96,
    "@%p2 mov.u32 %r4, 1;": 96,
    "@%p2 bra L; L:": 96,
    "shfl.sync.idx.b32 %r4|%p3, %r2, 0, 31, -1; @%p3 add.u32 %r5, %r4, 1;": 96,
    "mov.u32 %r3, 1; shfl.sync.idx.b32 %r4|%p3, %r3, 0, 31, -1; add.u32 %r5, %r4, 1; add.u32 %r6, %r2, 1;": 96,
    "st.global.u32 [%rd1], %r2;": 96,
    "st.global.v2.u32 [%rd1], {%r1, %r2};": 0,
    "st.global.v2.u32 [%rd1], {%r3, %r2};": 96,
    "ld.global.u32 %r4, [%rd2];": 96 + 96,  # and it is no address
    "bar.red.popc.u32 %r4, 0, %p2;": 96,
    "bar.red.popc.u32 %r2, 0, %p1; add.u32 %r4, %r2, 1;": 0,
    "ld.global.u32 %r2, [%rd1]; add.u32 %r4, %r2, 1;": 0,
    "@%p1 bra L; mov.u32 %r2, 5; L: add.u32 %r4, %r2, 1;": 14,
    "vote.sync.ballot.b32 %r4, %p2, -1;": 96,
    # What a mask clears is known; what it leaves of a register that nobody wrote is still what nobody wrote.
    "and.b32 %r4, %r2, 0; add.u32 %r5, %r4, 1;": 0,
    "and.b32 %r4, %r2, 31; add.u32 %r5, %r4, 1;": 96,
    "and.b32 %r4, %r2, 255; add.u32 %r5, %r4, 1;": 96,
    "and.b32 %r4, %r2, -256; cvt.u64.u32 %rd3, %r4; add.u64 %rd4, %rd1, %rd3; st.global.u32 [%rd1], %r1;": 96,
    "mov.u32 %r4, -256; and.b32 %r5, %r2, %r4; add.u32 %r6, %r5, 1;": 96,
    "or.b32 %r4, %r2, -1; add.u32 %r5, %r4, 1;": 0,
    "or.b32 %r4, %r2, 1; add.u32 %r5, %r4, 1;": 96,
    "not.b32 %r4, %r2; shr.u32 %r5, %r4, 3; add.u32 %r6, %r5, 1;": 96,
    "shl.b32 %r4, %r2, 8; shr.s32 %r5, %r4, 24; add.u32 %r6, %r5, 1;": 96,
    "shl.b32 %r4, %r2, 32; add.u32 %r5, %r4, 1;": 0,
    "bfe.u32 %r4, %r2, 4, 4; add.u32 %r5, %r4, 1;": 96,
    "lop3.b32 %r4, %r2, 255, 0, 0xC0; add.u32 %r5, %r4, 1;": 96,
    "lop3.b32 %r4, %r2, %r3, 0, 0xFF; add.u32 %r5, %r4, 1;": 0,
    "cvt.u32.u8 %r4, %h2; add.u32 %r5, %r4, 1;": 96,
    "shf.l.wrap.b32 %r4, %r2, %r3, 7; add.u32 %r5, %r4, 1;": 96,
    # Bytes that are built in a register, by the ways that compilers take.
    "and.b32 %r4, %r2, -256; or.b32 %r5, %r4, %r1; st.global.u32 [%rd1], %r5;": 0,
    "and.b32 %r4, %r2, -256; or.b32 %r5, %r4, %r1; and.b32 %r6, %r5, 255; add.u32 %r7, %r6, 1;": 0,
    "and.b32 %r4, %r2, -256; or.b32 %r5, %r4, %r1; cvt.u16.u32 %h1, %r5; st.global.u8 [%rd1], %h1;": 0,
    "and.b32 %r4, %r2, -256; or.b32 %r5, %r4, %r1; shr.u32 %r6, %r5, 8; add.u32 %r7, %r6, 1;": 96,
    "and.b32 %r4, %r2, -256; or.b32 %r5, %r4, %r1; shr.u32 %r6, %r5, 4; add.u32 %r7, %r6, 1;": 0,
    "and.b32 %r4, %r2, -256; or.b32 %r5, %r4, %r1; cvt.u64.u32 %rd3, %r5; ld.global.u32 %r6, [%rd3];": 96 + 96,
    "and.b32 %r4, %r2, -256; or.b32 %r5, %r4, %r1; setp.eq.u32 %p3, %r5, 3;": 96,
    "bfi.b32 %r4, %r1, %r2, 0, 8; bfe.u32 %r5, %r4, 0, 8; add.u32 %r6, %r5, 1; setp.eq.u32 %p3, %r5, 3;": 0,
    "bfi.b32 %r4, %r1, %r2, 0, 8; bfe.u32 %r5, %r4, 4, 8; setp.eq.u32 %p3, %r5, 3;": 96,
    "bfi.b32 %r4, %r2, %r1, 0, 8;": 96,
    "prmt.b32 %r4, %r1, %r2, 0x7650; and.b32 %r5, %r4, 255; setp.eq.u32 %p3, %r5, 3;": 0,
    "lop3.b32 %r4, %r2, -256, %r1, 0xEA; and.b32 %r5, %r4, 255; setp.eq.u32 %p3, %r5, 3;": 0,
    "lop3.b32 %r4, %r2, -256, %r1, 0xEA; setp.eq.u32 %p3, %r4, 3;": 96,
    "and.b16 %h1, %h2, -256; mov.u16 %h3, 7; or.b16 %h4, %h1, %h3; and.b16 %h5, %h4, 255; setp.eq.s16 %p3, %h5, 3;": 0,
    "mov.u16 %h1, 7; shl.b16 %h3, %h2, 8; or.b16 %h4, %h3, %h1; mov.b32 %r4, {%h4, %h2}; cvt.u16.u32 %h5, %r4; "
    "and.b16 %h6, %h5, 255; setp.eq.s16 %p3, %h6, 3;": 0,
    "mov.u32 %r3, 255; and.b32 %r4, %r2, 255; xor.b32 %r5, %r4, %r3; setp.eq.u32 %p3, %r5, 3;": 96,
    "bfi.b32 %r4, %r1, %r2, 0, 8; and.b32 %r5, %r4, -256; add.u32 %r6, %r5, 1;": 96,
    "bfi.b32 %r4, %r1, %r2, 0, 8; cvt.sat.s16.s32 %h1, %r4; mul.lo.s16 %h3, %h1, 3;": 96,
    # A register that held nothing but constants is written meanwhile.
    "and.b32 %r4, %r2, 0; mov.u32 %r4, %r1; and.b32 %r5, %r2, -256; or.b32 %r6, %r5, %r4; st.global.u32 [%rd1], %r6;": 0,
    # What is mixed with what is written, and not cleared before, is used there.
    "or.b32 %r4, %r2, %r1;": 96,
    "xor.b32 %r4, %r1, %r2; add.u32 %r5, %r4, 1;": 96,
    "lop3.b32 %r4, %r1, %r2, %r1, 0x96;": 96,
    # A comparison whose result is joined with another condition decides only where that one does not.
    "or.pred %p3, %p2, %p1;": 0,
    "or.pred %p3, %p2, %p1; @%p3 mov.u32 %r4, 1;": 96 - 14,
    "setp.lt.u32 %p2, %r2, 3; or.pred %p3, %p1, %p2; @%p3 mov.u32 %r4, 1;": 96 - 14,
    "setp.lt.u32 %p2, %r2, 3; and.pred %p3, %p1, %p2; @%p3 bra L; L:": 14,
    "setp.lt.u32 %p2, %r2, 3; not.pred %p4, %p2; and.pred %p3, %p1, %p4; selp.u32 %r4, 1, 2, %p3;": 14,
    "@%p1 mov.u32 %r2, 5; setp.lt.u32 %p2, %r2, 3; and.pred %p3, %p1, %p2; @%p3 bra L; L:": 0,
    "@!%p1 mov.u32 %r2, 5; setp.lt.u32 %p2, %r2, 3; and.pred %p3, %p1, %p2; @%p3 bra L; L:": 14,
    "setp.lt.u32 %p2, %r2, 3; and.pred %p3, %p1, %p2; @%p2 bra L; L:": 96,
    "setp.lt.and.u32 %p2, %r1, 3, %p4; or.pred %p3, %p1, %p2; @%p3 bra L; L:": 96 - 14,
    "and.pred %p3, %p2, %p1; @%p3 mov.u32 %r4, 1;": 14,
    # Compilers load from fixed places in shared memory before they know that the value counts; there it is used.
    W + "setp.gt.f32 %p2, %f1, %f2; and.pred %p3, %p1, %p2; selp.f32 %f3, %f1, %f2, %p3; st.global.f32 [%rd1], %f3;": 14,
    W + "add.f32 %f3, %f1, %f2; add.f32 %f4, %f3, %f3; selp.f32 %f5, %f4, %f2, %p1; st.global.f32 [%rd1], %f5;": 14,
    W + "add.f32 %f3, %f1, %f2; selp.f32 %f5, %f3, %f2, %p1;": 0,
    W + "add.f32 %f3, %f1, %f2; st.global.f32 [%rd1], %f3; selp.f32 %f5, %f3, %f2, %p1;": 96,
    W + "add.f32 %f3, %f1, %f2; st.global.f32 [%rd1], %f3;": 96,
    W + "setp.gt.f32 %p2, %f1, %f2; selp.f32 %f3, %f1, %f2, %p2;": 96,
}


@pytest.mark.parametrize("body", INSTRUCTIONS)
def test_instructions_on_registers_that_nobody_wrote(body: str) -> None:
    found = ptx(body)
    assert found.findings_total == INSTRUCTIONS[body], found.findings
    assert {f.kind for f in found.findings} <= {"uninitialised", "null pointer", "out of bounds"}


def test_a_condition_names_the_register_that_it_depends_on() -> None:
    found = ptx("setp.lt.u32 %p2, %r2, 3; not.pred %p4, %p2; and.pred %p3, %p1, %p4; @%p3 bra L; L:")
    assert found.findings[0].message == "register %r2, which the thread never wrote and which decides '@%p3 bra L'"


def test_watching_registers_counts_nothing() -> None:
    assert ptx("@%p1 mov.u32 %r2, 1; add.u32 %r5, %r2, 1;").counters.predicated_off == 96 - 14
