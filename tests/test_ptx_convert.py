"""Conversions, comparisons, selection and moves."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from test_ptx_floating import DTYPES, FORMATS, finite, raw, rounded
from test_ptx_harness import apply, floats, integers, same

N = 300
INTEGERS: dict[str, Any] = {
    "u8": np.uint8,
    "s8": np.int8,
    "u16": np.uint16,
    "s16": np.int16,
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("target", INTEGERS)
def test_integer_to_integer(source: str, target: str, rng: np.random.Generator) -> None:
    a = integers(rng, INTEGERS[source], N)
    (got,) = apply(f"cvt.{target}.{source} %d0, %a0;", [a], [INTEGERS[target]])
    assert (got == a.astype(INTEGERS[target])).all()
    info, own = np.iinfo(INTEGERS[target]), np.iinfo(INTEGERS[source])
    if info.min <= own.min and own.max <= info.max:
        return  # nothing to clamp: ptxas refuses .sat
    (sat,) = apply(f"cvt.sat.{target}.{source} %d0, %a0;", [a], [INTEGERS[target]])
    assert [int(x) for x in sat] == [max(info.min, min(info.max, int(x))) for x in a]


def test_narrow_results_are_extended_to_the_register() -> None:
    a = np.array([0x180, 0x7F, 0xFFFFFFFF], np.uint32)
    (signed,) = apply("cvt.s8.u32 %d0, %a0;", [a], [np.uint32])
    (unsigned,) = apply("cvt.u8.u32 %d0, %a0;", [a], [np.uint32])
    assert signed.tolist() == [0xFFFFFF80, 0x7F, 0xFFFFFFFF] and unsigned.tolist() == [0x80, 0x7F, 0xFF]


def rounded_integer(x: float, rounding: str) -> int:
    return {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[rounding](x)


@pytest.mark.parametrize("rounding", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("target", INTEGERS)
@pytest.mark.parametrize("source", DTYPES)
def test_float_to_integer_clamps(source: str, target: str, rounding: str, rng: np.random.Generator) -> None:
    if source == "bf16" and target in ("u8", "s8"):
        return  # ptxas has no such conversion
    a = finite(rng, source, N)
    a[:4] = np.array([np.inf, -np.inf, np.nan, 2.5]).astype(a.dtype)
    info = np.iinfo(INTEGERS[target])
    with np.errstate(over="ignore"):
        a[4:8] = np.array([info.max, info.min, info.max / 2, -7.5]).astype(a.dtype)
    (got,) = apply(f"cvt.{rounding}.{target}.{source} %d0, %a0;", [raw(a)], [INTEGERS[target]])
    for x, y in zip(a.astype(np.float64), got, strict=True):
        if math.isnan(x):
            highest = info.min or info.max // 2 + 1
            want = highest if source == "f64" or info.bits == 64 else 0
        elif math.isinf(x):
            want = info.max if x > 0 else info.min
        else:
            want = max(info.min, min(info.max, rounded_integer(float(x), rounding)))
        assert int(y) == want, (x, y)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", ["s8", "u16", "s32", "u32", "s64", "u64"])
def test_integer_to_float(source: str, target: str, mode: str, rng: np.random.Generator) -> None:
    if (source, target) == ("s8", "bf16"):
        return  # ptxas has no such conversion
    a = integers(rng, INTEGERS[source], N)
    (got,) = apply(f"cvt.{mode}.{target}.{source} %d0, %a0;", [a], [raw(np.zeros(1, DTYPES[target])).dtype])
    for x, y in zip(a, got.view(DTYPES[target]).astype(np.float64), strict=True):
        assert y == (rounded(Fraction(int(x)), target, mode) if x else 0), (x, y)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize(("target", "source"), [("f16", "f32"), ("bf16", "f32"), ("f32", "f64"), ("f16", "f64"), ("bf16", "f64")])
def test_narrowing_rounds_once(target: str, source: str, mode: str, rng: np.random.Generator) -> None:
    a = finite(rng, source, N)
    a[:100] = (finite(rng, target, 100).astype(np.float64) * (1 + 2.0 ** -FORMATS[target][0])).astype(a.dtype)
    a = np.where(np.isfinite(a), a, a.dtype.type(1))
    (got,) = apply(f"cvt.{mode}.{target}.{source} %d0, %a0;", [a], [raw(np.zeros(1, DTYPES[target])).dtype])
    for x, y in zip(a, got.view(DTYPES[target]).astype(np.float64), strict=True):
        assert y == (rounded(Fraction(float(x)), target, mode) if x else 0), (float(x), y)


def test_widening_is_exact() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    for kind in ("f16", "bf16"):
        (got,) = apply(f"cvt.f32.{kind} %d0, %a0;", [bits], [np.float32])
        assert same(got, bits.view(DTYPES[kind]).astype(np.float32))
        (wide,) = apply(f"cvt.f64.{kind} %d0, %a0;", [bits], [np.float64])
        with np.errstate(invalid="ignore"):
            assert same(wide, bits.view(DTYPES[kind]).astype(np.float64))


def test_special_values_keep_their_kind() -> None:
    a = np.array([np.inf, -np.inf, np.nan, -0.0], np.float32)
    for kind in ("f16", "bf16"):
        (got,) = apply(f"cvt.rn.{kind}.f32 %d0, %a0;", [a], [np.uint16])
        assert got[2] == 0x7FFF and same(got.view(DTYPES[kind]).astype(np.float32), a)


def test_float_to_integral_float() -> None:
    a = np.array([2.5, -2.5, 0.5, -0.5, 1e30, -1.2, np.inf, np.nan], np.float32)
    for rounding, fn in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        (got,) = apply(f"cvt.{rounding}.f32.f32 %d0, %a0;", [a], [np.float32])
        assert same(got, fn(a))


def test_packing_puts_the_first_source_high(rng: np.random.Generator) -> None:
    a, b = finite(rng, "f32", N), finite(rng, "f32", N)
    for kind in ("f16", "bf16"):
        (got,) = apply(f"cvt.rn.{kind}x2.f32 %d0, %a0, %a1;", [a, b], [np.uint32])
        (high,) = apply(f"cvt.rn.{kind}.f32 %d0, %a0;", [a], [np.uint16])
        (low,) = apply(f"cvt.rn.{kind}.f32 %d0, %a0;", [b], [np.uint16])
        assert (got == (high.astype(np.uint32) << 16 | low)).all()
        (relu,) = apply(f"cvt.rn.relu.{kind}x2.f32 %d0, %a0, %a1;", [a, b], [np.uint32])
        values = relu.view(np.uint16).view(DTYPES[kind]).astype(np.float32)
        assert (values == np.maximum(got.view(np.uint16).view(DTYPES[kind]).astype(np.float32), 0)).all()


@pytest.mark.parametrize(("kind", "both"), [("f16x2", 0x3C004000), ("bf16x2", 0x3F804000)])
def test_packing_takes_constants(kind: str, both: int) -> None:
    (got,) = apply(f"cvt.rn.{kind}.f32 %d0, 0f3F800000, 0f40000000;", [np.zeros(3, np.uint32)], [np.uint32])
    assert got.tolist() == [both] * 3


def test_tf32_rounds_ties_away() -> None:
    step = 2.0**-10
    a = np.array([1 + step / 2, 1 + step / 2 - 2.0**-23, -(1 + step / 2), 1 + 1.5 * step, np.inf], np.float32)
    (got,) = apply("cvt.rna.tf32.f32 %d0, %a0;", [a], [np.float32])
    assert same(got, np.array([1 + step, 1, -(1 + step), 1 + 2 * step, np.inf], np.float32))
    (even,) = apply("cvt.rn.tf32.f32 %d0, %a0;", [a], [np.float32])
    assert same(even, np.array([1, 1, -1, 1 + 2 * step, np.inf], np.float32))


# -- comparison ---------------------------------------------------------------------------------------------------------

ORDER = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


def holds(name: str, x: float, y: float) -> bool:
    unordered = math.isnan(x) or math.isnan(y)
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    if name.endswith("u") and name != "lu" and name[:-1] in ORDER:
        return unordered or bool(eval(f"x {ORDER[name[:-1]]} y"))
    return not unordered and bool(eval(f"x {ORDER[name]} y"))


FLOAT_NAMES = ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_float_comparison(name: str, kind: str) -> None:
    edge = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 2.0])
    a, b = (g.ravel().astype(DTYPES[kind]) for g in np.meshgrid(edge, edge))
    body = f"setp.{name}.{kind} %p, %a0, %a1; selp.b32 %d0, 1, 0, %p; set.{name}.u32.{kind} %d1, %a0, %a1;"
    got, mask = apply(body, [raw(a), raw(b)], [np.uint32, np.uint32], ".reg .pred %p;")
    want = np.array([holds(name, float(x), float(y)) for x, y in zip(a, b, strict=True)])
    assert (got == want).all() and (mask == np.where(want, 0xFFFFFFFF, 0)).all()


@pytest.mark.parametrize("type_", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_integer_comparison(name: str, type_: str, rng: np.random.Generator) -> None:
    a, b = integers(rng, INTEGERS[type_], N), integers(rng, INTEGERS[type_], N)
    b[::4] = a[::4]
    body = f"setp.{name}.{type_} %p, %a0, %a1; selp.b32 %d0, 1, 0, %p;"
    (got,) = apply(body, [a, b], [np.uint32], ".reg .pred %p;")
    assert [bool(x) for x in got] == [holds(name, int(x), int(y)) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("name", ["lo", "ls", "hi", "hs"])
def test_unsigned_comparison_names(name: str, rng: np.random.Generator) -> None:
    a, b = integers(rng, np.uint32, N), integers(rng, np.uint32, N)
    (got,) = apply(f"setp.{name}.u32 %p, %a0, %a1; selp.b32 %d0, 1, 0, %p;", [a, b], [np.uint32], ".reg .pred %p;")
    assert [bool(x) for x in got] == [holds(name, int(x), int(y)) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("combine", ["and", "or", "xor"])
@pytest.mark.parametrize("negated", [False, True])
def test_comparison_combined_with_a_predicate(combine: str, negated: bool, rng: np.random.Generator) -> None:
    a, b, c = (integers(rng, np.int32, N) for _ in range(3))
    body = f"""setp.lt.s32 %c, %a2, 0;
    setp.gt.{combine}.s32 %p|%q, %a0, %a1, {"!" if negated else ""}%c;
    selp.b32 %d0, 1, 0, %p; selp.b32 %d1, 1, 0, %q;
    set.gt.{combine}.u32.s32 %d2, %a0, %a1, {"!" if negated else ""}%c;"""
    p, q, mask = apply(body, [a, b, c], [np.uint32] * 3, ".reg .pred %p, %q, %c;")
    other = (c < 0) != negated
    fn = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[combine]
    assert (p == fn(a > b, other)).all() and (q == fn(~(a > b), other)).all()
    assert ((mask != 0) == p).all()


def test_packed_comparison_gives_two_predicates() -> None:
    a = np.array([1, 2, np.nan, 4], np.float16).view(np.uint32)
    b = np.array([1, 3, 0, 3], np.float16).view(np.uint32)
    body = "setp.lt.f16x2 %p|%q, %a0, %a1; selp.b32 %d0, 1, 0, %p; selp.b32 %d1, 1, 0, %q;"
    low, high = apply(body, [a, b], [np.uint32] * 2, ".reg .pred %p, %q;")
    assert low.tolist() == [0, 0] and high.tolist() == [1, 0]


def test_set_to_float() -> None:
    a = np.array([1.0, 2.0, np.nan], np.float32)
    (got,) = apply("set.ge.f32.f32 %d0, %a0, 0f40000000;", [a], [np.float32])
    assert got.tolist() == [0, 1, 0]


def test_selection_keeps_bits(rng: np.random.Generator) -> None:
    a, b = integers(rng, np.uint32, N), integers(rng, np.uint32, N)
    signaling = np.full(N, 0x7F800001, np.uint32)
    body = "setp.lt.u32 %p, %a0, %a1; selp.f32 %d0, %a2, %a1, %p; @!%p mov.f32 %d1, %a2; @%p mov.f32 %d1, %a0;"
    picked, moved = apply(body, [a, b, signaling], [np.uint32] * 2, ".reg .pred %p;")
    assert (picked == np.where(a < b, signaling, b)).all() and (moved == np.where(a < b, a, signaling)).all()


def test_slct_looks_at_the_sign(rng: np.random.Generator) -> None:
    a, b, c = integers(rng, np.uint32, N), integers(rng, np.uint32, N), integers(rng, np.int32, N)
    (got,) = apply("slct.b32.s32 %d0, %a0, %a1, %a2;", [a, b, c], [np.uint32])
    assert (got == np.where(c >= 0, a, b)).all()
    f = floats(rng, np.float32, N)
    (got,) = apply("slct.b32.f32 %d0, %a0, %a1, %a2;", [a, b, f], [np.uint32])
    assert (got == np.where(f >= 0, a, b)).all()


def test_predicated_arithmetic_keeps_the_rest(rng: np.random.Generator) -> None:
    a, b = integers(rng, np.uint32, N), integers(rng, np.uint32, N)
    halves = floats(rng, np.float16, 2 * N).view(np.uint32)
    body = """setp.lt.u32 %p, %a0, %a1; setp.eq.u32 %q, %a0, %a0;
    mov.b32 %d0, 5; mov.b32 %d1, %a2; mov.b32 %d2, 0; mov.b32 %d3, 1;
    @%p add.u32 %d0, %a0, %a1;
    @!%p neg.f16x2 %d1, %a2;
    @%q add.u32 %d2, %a0, 1;
    @!%q add.u32 %d3, %a0, 1;"""
    d, packed, everyone, nobody = apply(body, [a, b, halves], [np.uint32] * 4, ".reg .pred %p, %q;")
    assert (d == np.where(a < b, a + b, 5)).all()
    flipped = np.where(np.isnan(halves.view(np.float16)), np.uint16(0x7FFF), halves.view(np.uint16) ^ np.uint16(0x8000))
    assert (packed.view(np.uint16) == np.where(np.repeat(a < b, 2), halves.view(np.uint16), flipped)).all()
    assert (everyone == a + 1).all() and (nobody == 1).all()


# -- mov ----------------------------------------------------------------------------------------------------------------


def test_pack_and_unpack(rng: np.random.Generator) -> None:
    a, b = integers(rng, np.uint64, N), integers(rng, np.uint32, N)
    body = """mov.b64 {%lo, %hi}, %a0; mov.b64 %d0, {%hi, %lo};
    mov.b64 {%h0, %h1, %h2, %h3}, %a0; mov.b64 %d1, {%h3, %h2, %h1, %h0};
    mov.b32 {%h0, _}, %a1; mov.b32 %d2, {%h0, %h0}; mov.b32 {_, %h1}, %a1; cvt.u32.u16 %d3, %h1;
    mov.b64 %wide, {%a1, 7}; mov.b64 {%lo, %hi}, %wide; mov.b32 %d4, %hi;"""
    registers = ".reg .b32 %lo, %hi; .reg .b16 %h<4>; .reg .b64 %wide;"
    swapped, reversed_, low, high, seven = apply(body, [a, b], [np.uint64, np.uint64, np.uint32, np.uint32, np.uint32], registers)
    assert (swapped == (a >> np.uint64(32) | a << np.uint64(32))).all()
    assert (reversed_.view(np.uint16).reshape(-1, 4) == a.view(np.uint16).reshape(-1, 4)[:, ::-1]).all()
    assert (low == (b & 0xFFFF) * 0x10001).all() and (high == b >> 16).all() and (seven == 7).all()


def test_pack_into_its_own_source(rng: np.random.Generator) -> None:
    a = integers(rng, np.uint32, N)
    body = "mov.b32 {%x, %y}, %a0; mov.b32 %a0, {%y, %x}; mov.b32 %d0, %a0;"
    (got,) = apply(body, [a], [np.uint32], ".reg .b16 %x, %y;")
    assert (got == (a >> 16 | a << 16)).all()


def test_immediates() -> None:
    n = np.zeros(3, np.uint32)
    body = """mov.u32 %d0, 0x10; add.u32 %d0, %d0, -1; mov.f32 %d1, 0f3FC00000; mov.b32 %d2, 017;
    mov.f64 %d3, 0d4004000000000000;
    mov.f64 %d4, 2.5; mov.u32 %d5, WARP_SZ; add.u32 %d0, %d0, %a0; mov.u32 %d6, 0b101; mov.u32 %d7, 4294967295U;"""
    dtypes = [np.uint32, np.float32, np.uint32, np.float64, np.float64, np.uint32, np.uint32, np.uint32]
    got = apply(body, [n], dtypes)
    assert [float(g[0]) for g in got] == [15, 1.5, 15, 2.5, 2.5, 32, 5, 4294967295]


def test_bfloat_is_ml_dtypes_bfloat() -> None:
    import ml_dtypes

    assert DTYPES["bf16"] is ml_dtypes.bfloat16


def test_saturation_limits_integers_that_become_floats() -> None:
    a = np.array([-7, -1, 0, 1, 2, 2**31 - 1], np.int32)
    (d,) = apply("cvt.rn.sat.f32.s32 %d0, %a0;", [a], [np.float32])
    assert d.tolist() == [0, 0, 0, 1, 1, 1]
