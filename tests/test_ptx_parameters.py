"""A parameter's address as it travels: with its window or without, through conversions, sums and memory."""

from __future__ import annotations

import numpy as np
import pytest
from test_ptx_tma import INIT, OUT, WAIT, load, program

from cupyflash.sim.ptx import Launch, Module, TensorMap
from cupyflash.sim.ptx.state.segments import PointerField

HEAD = ".version 8.6\n.target sm_90a\n.address_size 64\n"
REGISTERS = ".reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .pred %p<4>;"

# The parameter's generic address in %rd2.
WAYS = {
    "64 bits": "mov.b64 %rd1, s; cvta.param.u64 %rd2, %rd1;",
    "64 bits, no cvta": "mov.b64 %rd2, s;",
    "the symbol": "cvta.param.u64 %rd2, s;",
    "the entry's": "cvta.param::entry.u64 %rd2, s;",
    "32 bits": "mov.b32 %r1, s; cvt.u64.u32 %rd1, %r1; cvta.param.u64 %rd2, %rd1;",
    "32 bits, a sum": "mov.u32 %r1, s; add.s32 %r1, %r1, 64; sub.s32 %r1, %r1, 64; cvt.u64.u32 %rd1, %r1;"
    "cvta.param.u64 %rd2, %rd1;",
    "there and back": "mov.b32 %r1, s; cvt.u64.u32 %rd1, %r1; cvta.param.u64 %rd3, %rd1; cvta.to.param.u64 %rd4, %rd3;"
    "cvta.param.u64 %rd2, %rd4;",
    "local memory": "mov.b32 %r1, s; cvt.u64.u32 %rd1, %r1; cvta.param.u64 %rd3, %rd1; st.local.u64 [kept], %rd3;"
    "ld.local.u64 %rd2, [kept];",
}


def run(body: str, **options: object) -> tuple[Launch, np.ndarray]:
    """A kernel of (y, s): s are the numbers 0 to 15 of 4 bytes each, y 16 results."""
    text = f"""{HEAD}.visible .entry k(.param .u64 y, .param .align 64 .b8 s[64])\n{{\n{REGISTERS} .local .align 8 .b8 kept[8];
    ld.param.u64 %rd8, [y];\n{body}\nret;\n}}\n"""
    y = np.zeros(16, np.uint32)
    return Module.from_ptx(text).launch("k", 1, 1, {"y": y, "s": np.arange(16, dtype=np.uint32).tobytes()}, **options), y


@pytest.mark.parametrize("way", WAYS)
def test_generic_loads_read_the_parameter(way: str) -> None:
    found, y = run(
        WAYS[way] + "ld.u32 %r2, [%rd2+12]; add.s64 %rd3, %rd2, 20; ld.u32 %r3, [%rd3]; st.global.v2.u32 [%rd8], {%r2, %r3};"
    )
    assert found.findings == () and y[:2].tolist() == [3, 5]


@pytest.mark.parametrize("width", ["32", "64"])
def test_loads_of_param_from_a_register(width: str) -> None:
    register = "%r1" if width == "32" else "%rd1"
    found, y = run(
        f"mov.b{width} {register}, s; add.u{width} {register}, {register}, 16; ld.param.u32 %r2, [{register}+4];"
        f"ld.param::entry.u32 %r3, [{register}]; st.global.v2.u32 [%rd8], {{%r2, %r3}};"
    )
    assert found.findings == () and y[:2].tolist() == [5, 4]


@pytest.mark.parametrize("way", WAYS)
def test_a_store_to_a_parameter_is_a_finding(way: str) -> None:
    found, y = run(WAYS[way] + "mov.u32 %r2, 7; st.u32 [%rd2], %r2; ld.u32 %r3, [%rd2]; st.global.u32 [%rd8], %r3;")
    assert [f.kind for f in found.findings] == ["read-only"] and y[0] == 0


def test_behind_the_parameters_is_out_of_bounds_and_null_stays_null() -> None:
    way = WAYS["32 bits"]
    behind, _ = run(way + "ld.u32 %r2, [%rd2+64]; st.global.u32 [%rd8], %r2;")
    assert [f.kind for f in behind.findings] == ["out of bounds"] and "'parameters'" in behind.findings[0].message
    in_front, _ = run(way + "ld.u32 %r2, [%rd2-256]; st.global.u32 [%rd8], %r2;")
    assert [f.kind for f in in_front.findings] == ["out of bounds"]
    null, _ = run("mov.b64 %rd2, 0; ld.u32 %r2, [%rd2]; st.global.u32 [%rd8], %r2;")
    assert [f.kind for f in null.findings] == ["null pointer"]
    # A parameter's address without its window is no generic address.
    bare, _ = run("mov.b32 %r1, s; cvt.u64.u32 %rd2, %r1; ld.u32 %r2, [%rd2]; st.global.u32 [%rd8], %r2;")
    assert [f.kind for f in bare.findings] == ["null pointer"]


def test_whose_an_address_is() -> None:
    asked = " ".join(
        f"isspacep.{space} %p1, {register}; selp.u32 %r2, 1, 0, %p1; st.global.u32 [%rd8+{4 * k}], %r2;"
        for k, (space, register) in enumerate(
            (s, r) for r in ("%rd2", "%rd8") for s in ("param", "param::entry", "global", "shared")
        )
    )
    found, y = run(WAYS["32 bits"] + asked)
    # PTX ISA, "isspacep": the window of the parameters is within that of .global.
    assert found.findings == () and y[:8].tolist() == [1, 1, 1, 0, 0, 0, 1, 0]


# A tensor map that the host made, by the ways of its address that Triton's versions take.
MAPS = {
    "64 bits": "mov.b64 %rd9, m; cvta.param.u64 %rd1, %rd9;",
    "32 bits": "mov.b32 %r20, m; cvt.u64.u32 %rd9, %r20; cvta.param.u64 %rd1, %rd9;",
    "32 bits, kept": "mov.b32 %r20, m; add.s32 %r21, %r20, 0; cvt.u64.u32 %rd9, %r21; cvta.param.u64 %rd10, %rd9;"
    "mov.b64 %rd1, %rd10;",
}


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("way", MAPS)
def test_a_tensor_map_of_the_host(way: str, seed: int | None) -> None:
    prefetch = "prefetch.tensormap [%rd1]; mov.b32 %r22, m; prefetch.param.tensormap [%r22]; prefetch.param.tensormap [m];"
    body = f"{MAPS[way]} {prefetch} {INIT} mov.u32 %r20, 8; {load(2, '0, %r20', 1024)} {WAIT} {OUT}"
    x = np.arange(32 * 32, dtype=np.float32).reshape(32, 32)
    y = np.zeros((8, 32), np.float32)
    module = Module.from_ptx(program(body, size=1024))
    found = module.launch("k", 1, 64, {"x": TensorMap(x, (32, 8)), "y": y}, seed=seed, unwritten=("y",))
    assert found.findings == () and np.array_equal(y, x[8:16])
    assert found.traffic["x"].read_bytes == 1024


def test_a_generic_load_through_a_field_of_a_parameter_races() -> None:
    """The race detector knows which tensor a pointer is of that came through a generic load of its parameter."""
    body = """mov.b32 %r1, p; cvt.u64.u32 %rd1, %r1; cvta.param.u64 %rd2, %rd1; ld.u64 %rd3, [%rd2+8]; mov.u32 %r2, %tid.x;
    st.global.u32 [%rd3], %r2;"""
    text = f"{HEAD}.visible .entry k(.param .align 8 .b8 p[16])\n{{\n{REGISTERS}\n{body}\nret;\n}}\n"
    x, y = np.zeros(4, np.uint32), np.zeros(4, np.uint32)
    module = Module.from_ptx(text)
    assert module.code("k").sharing.written == {PointerField("p", 8)}
    found = module.launch("k", 1, 64, {"p": {"x": x, "y": y}})
    assert [(f.kind, f.tensor) for f in found.findings] == [("race", "y")]
