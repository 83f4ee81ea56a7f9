"""Atomics, one after the other whatever the order of the warps."""

from __future__ import annotations

import numpy as np
import pytest
from test_ptx_harness import integers, pointer_kernel, run


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


ATOMICS = {
    "add.u32": lambda old, v: old + v,
    "min.s32": lambda old, v: min(old, v),
    "max.s32": lambda old, v: max(old, v),
    "min.u32": lambda old, v: min(old, v),
    "and.b32": lambda old, v: old & v,
    "or.b32": lambda old, v: old | v,
    "xor.b32": lambda old, v: old ^ v,
    "exch.b32": lambda old, v: v,
    "inc.u32": lambda old, v: 0 if old >= v else old + 1,
    "dec.u32": lambda old, v: v if old == 0 or old > v else old - 1,
    "add.u64": lambda old, v: old + v,
    "max.u64": lambda old, v: max(old, v),
}


@pytest.mark.parametrize("op", ATOMICS)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics_happen_one_after_the_other(op: str, space: str, rng: np.random.Generator) -> None:
    type_ = op.split(".")[1]
    dtype = np.dtype(f"{'i' if type_[0] == 's' else 'u'}{int(type_[1:]) // 8}")
    size, n = dtype.itemsize, 96
    values = integers(rng, dtype, n)
    if op[:3] in ("inc", "dec"):
        values %= 5
    place = rng.integers(0, 4, n).astype(np.uint32)
    memory = integers(rng, dtype, 16)[:4].copy()
    reg = "%r" if size == 4 else "%rd"
    code = f"""shl.b64 %rd11, %rd10, {size.bit_length() - 1}; add.s64 %rd5, %rd2, %rd11; ld.global.b{8 * size} {reg}12, [%rd5];
    shl.b64 %rd13, %rd10, 2; add.s64 %rd6, %rd3, %rd13; ld.global.u32 %r3, [%rd6]; shl.b32 %r3, %r3, {size.bit_length() - 1};"""
    if space == "global":
        code += f"cvt.u64.u32 %rd7, %r3; add.s64 %rd7, %rd1, %rd7; atom.global.{op} {reg}14, [%rd7], {reg}12;"
    else:
        code = f""".shared .align 8 .b8 s[32]; {code} setp.lt.u32 %p1, %r1, 4; mov.u32 %r5, s;
        shl.b32 %r6, %r1, {size.bit_length() - 1};"""
        code += f"""add.u32 %r5, %r5, %r6; add.s64 %rd8, %rd1, %rd11; @%p1 ld.global.b{8 * size} {reg}15, [%rd8];
        @%p1 st.shared.b{8 * size} [%r5], {reg}15; bar.sync 0; mov.u32 %r7, s; add.u32 %r7, %r7, %r3;
        atom.shared.{op} {reg}14, [%r7], {reg}12; bar.sync 0; @%p1 ld.shared.b{8 * size} {reg}15, [%r5];
        @%p1 st.global.b{8 * size} [%rd8], {reg}15;"""
    code += f"add.s64 %rd9, %rd4, %rd11; st.global.b{8 * size} [%rd9], {reg}14;"
    old = np.zeros(n, dtype)
    want = [int(x) for x in memory]
    want_old = []
    for v, at in zip(values, place, strict=True):
        want_old.append(want[at])
        want[at] = int(np.array(ATOMICS[op](want[at], int(v)) & ((1 << (8 * size)) - 1), f"u{size}").view(dtype))
    launch = run(
        pointer_kernel(code, "memory", "values", "place", "old"),
        {"memory": memory, "values": values, "place": place, "old": old},
        block=n,
    )
    assert launch.findings == ()
    assert [int(x) for x in memory] == want and [int(x) for x in old] == want_old
    if space == "global":
        assert launch.traffic["memory"].read_bytes == launch.traffic["memory"].write_bytes == n * size


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_compare_and_swap_is_a_lock_free_maximum(seed: int | None) -> None:
    x = np.random.default_rng(0).permutation(256).astype(np.uint32)
    best = np.zeros(1, np.uint32)
    body = """shl.b64 %rd11, %rd10, 2; add.s64 %rd3, %rd1, %rd11; ld.global.u32 %r2, [%rd3]; ld.volatile.global.u32 %r3, [%rd2];
    LOOP: setp.ge.u32 %p1, %r3, %r2; @%p1 bra DONE;
    atom.global.cas.b32 %r4, [%rd2], %r3, %r2; setp.eq.u32 %p2, %r4, %r3; mov.u32 %r3, %r4; @!%p2 bra LOOP;
    DONE:"""
    run(pointer_kernel(body, "x", "best"), {"x": x, "best": best}, block=256, seed=seed)
    assert best[0] == 255


@pytest.mark.parametrize("type_", ["f32", "f64", "f16", "f16x2", "bf16"])
def test_float_atomics(type_: str) -> None:
    size = {"f32": 4, "f64": 8, "f16": 2, "f16x2": 4, "bf16": 2}[type_]
    value = {"f32": "0f3F000000", "f64": "0d3FE0000000000000", "f16": "0x3800", "f16x2": "0x3C003800", "bf16": "0x3F00"}[type_]
    memory = np.zeros(size, np.uint8)
    noftz = ".noftz" if size == 2 or "x2" in type_ else ""
    register = {2: "%h1", 4: "%r5", 8: "%rd5"}[size]
    body = f"mov.b{8 * size} {register}, {value}; red.global.add{noftz}.{type_} [%rd1], {register};"
    run(pointer_kernel(body, "memory"), {"memory": memory}, block=32)
    got = memory.view({"f32": np.float32, "f64": np.float64, "bf16": np.uint16}.get(type_, np.float16))
    assert got.tolist() == {"f16x2": [16, 32], "bf16": [0x4180]}.get(type_, [16])


@pytest.mark.parametrize("order", ["add.v4", "v4.add"])
def test_atomics_of_a_vector(order: str) -> None:
    """Each element is one of its own; 16 bytes are read and written, and aligned."""
    memory = np.zeros(8, np.float32)
    body = f"""cvt.rn.f32.u32 %f1, %r1; mov.f32 %f2, 0f3F800000; and.b32 %r2, %r1, 1; mul.wide.u32 %rd3, %r2, 16;
    add.s64 %rd3, %rd1, %rd3; red.global.{order}.f32 [%rd3], {{%f1, %f2, %f1, %f2}};"""
    launch = run(pointer_kernel(body.replace(".v4.add.f32", ".v4.f32.add"), "memory"), {"memory": memory}, block=32)
    assert memory.tolist() == [240, 16, 240, 16, 256, 16, 256, 16]
    assert launch.counters.traffic["memory"].read_bytes == launch.counters.traffic["memory"].write_bytes == 512
