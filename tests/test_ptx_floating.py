"""Floating-point arithmetic: rounded once, as exact rational arithmetic says; flushing, NaN, min/max, approximations."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from test_ptx_harness import apply, floats, same

ml_dtypes = pytest.importorskip("ml_dtypes")
N = 300
FORMATS = {"f16": (11, -14, 15), "bf16": (8, -126, 127), "f32": (24, -126, 127), "f64": (53, -1022, 1023)}
DTYPES: dict[str, Any] = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}


def rounded(x: Fraction, kind: str, mode: str = "rn") -> float:
    """A non-zero rational rounded to a format: precision, exponents and direction are all that it uses."""
    precision, low, high = FORMATS[kind]
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, low) - precision + 1)
    steps = x / quantum
    # Python's round takes ties to even.
    whole = {"rn": round, "rz": math.trunc, "rm": math.floor, "rp": math.ceil}[mode](steps)
    largest = (2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** high
    value = whole * quantum
    if abs(value) > largest:
        away = mode == "rn" or (mode == "rp" and x > 0) or (mode == "rm" and x < 0)
        size_out = math.inf if away else float(largest)
    else:
        size_out = float(abs(value))
    return size_out if x > 0 else -size_out


def finite(rng: np.random.Generator, kind: str, n: int) -> np.ndarray:
    if kind == "bf16":
        values = floats(rng, np.float32, n, special=False).astype(ml_dtypes.bfloat16)
        return np.where(np.isfinite(values.astype(np.float32)), values, ml_dtypes.bfloat16(1.25))
    values = floats(rng, DTYPES[kind], n, special=False)
    return np.where(np.isfinite(values), values, DTYPES[kind](0.75))


def raw(x: np.ndarray) -> np.ndarray:
    """Halves travel as their bits: PTX loads them as .u16."""
    return x.view(np.uint16) if x.dtype.itemsize == 2 else x


def check_rounding(body: str, kind: str, inputs: list[np.ndarray], exact: Callable[..., Fraction], mode: str = "rn") -> None:
    (got,) = apply(body, [raw(x) for x in inputs], [raw(np.zeros(1, DTYPES[kind])).dtype])
    values = got.view(DTYPES[kind]).astype(np.float64)
    for k in range(len(values)):
        want = exact(*(Fraction(float(x[k])) for x in inputs))
        if want:  # the sign of an exact zero is tested on its own
            assert same(values[k : k + 1], np.array([rounded(want, kind, mode)])), (body, [float(x[k]) for x in inputs], values[k])
        else:
            assert values[k] == 0


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_arithmetic_rounds_in_every_direction(kind: str, mode: str, rng: np.random.Generator) -> None:
    a, b = finite(rng, kind, N), finite(rng, kind, N)
    b[:50] = np.nextafter(a[:50], DTYPES[kind](0))  # cancellation
    b[50:100] = (a[50:100] * DTYPES[kind](2.0**-20)).astype(b.dtype)
    check_rounding(f"add.{mode}.{kind} %d0, %a0, %a1;", kind, [a, b], lambda x, y: x + y, mode)
    check_rounding(f"sub.{mode}.{kind} %d0, %a0, %a1;", kind, [a, b], lambda x, y: x - y, mode)
    check_rounding(f"mul.{mode}.{kind} %d0, %a0, %a1;", kind, [a, b], lambda x, y: x * y, mode)
    b[b == 0] = 3
    check_rounding(f"div.{mode}.{kind} %d0, %a0, %a1;", kind, [a, b], lambda x, y: x / y, mode)
    check_rounding(f"rcp.{mode}.{kind} %d0, %a1;", kind, [a, b], lambda x, y: 1 / y, mode)


def hard_fma(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float32 operands whose exact sum lies next to the middle of two float32: rounding twice goes wrong there."""
    a = (1 + rng.integers(0, 2**12, n) / 2**12).astype(np.float32)
    b = (1 + (2 * rng.integers(0, 2**11, n) + 1) / 2**12).astype(np.float32)
    scale = np.float32(2.0) ** rng.integers(-60, -30, n).astype(np.float32)
    c = scale * np.where(rng.random(n) < 0.5, 1, -1).astype(np.float32)
    return a, b, c


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_arithmetic_of_some_lanes_rounds_as_that_of_all(mode: str, rng: np.random.Generator) -> None:
    """The first lanes that differ, behind an instruction that rounds another way; what follows rounds to nearest again."""
    a, b = finite(rng, "f32", N), finite(rng, "f32", N)
    body = f"""add.rn.f32 %d0, %a0, %a1; setp.lt.f32 %q, %a0, %a1; mov.b32 %d1, %a0; @%q add.{mode}.f32 %d1, %a0, %a1;
    add.rn.f32 %d2, %a0, %a1; add.{mode}.f32 %d3, %a0, %a1;"""
    near, some, after, all_lanes = (x.view(np.float32) for x in apply(body, [a, b], ["u4"] * 4, ".reg .pred %q;"))
    assert (near != all_lanes).any() and same(after, near)
    assert same(some, np.where(a < b, all_lanes, a))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_fma_f32_rounds_once(mode: str, rng: np.random.Generator) -> None:
    def exact(x: Fraction, y: Fraction, z: Fraction) -> Fraction:
        return x * y + z

    a, b, c = (finite(rng, "f32", N) for _ in range(3))
    with np.errstate(all="ignore"):
        c[:60] = -(a[:60] * b[:60])
    c = np.where(np.isfinite(c), c, np.float32(1))
    check_rounding(f"fma.{mode}.f32 %d0, %a0, %a1, %a2;", "f32", [a, b, c], exact, mode)
    check_rounding(f"fma.{mode}.f32 %d0, %a0, %a1, %a2;", "f32", list(hard_fma(rng, N)), exact, mode)
    tiny = [(x * np.float32(2.0**-70)).astype(np.float32) for x in hard_fma(rng, N)[:2]]
    check_rounding(f"fma.{mode}.f32 %d0, %a0, %a1, %a2;", "f32", [*tiny, np.full(N, 1e-44, np.float32)], exact, mode)
    # A subnormal result just below the middle of two: the product is half a step less 2**-190.
    steps = (2.0**-127 + (2 * rng.integers(0, 2**10, N) + 1) * 2.0**-149).astype(np.float32)
    half = [np.full(N, (1 + s * 2.0**-20) * 2.0**-75, np.float32) for s in (1, -1)]
    check_rounding(f"fma.{mode}.f32 %d0, %a0, %a1, %a2;", "f32", [*half, steps], exact, mode)


def test_hard_fma_operands_are_hard(rng: np.random.Generator) -> None:
    a, b, c = hard_fma(rng, N)
    twice = (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)
    once = [rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), "f32") for x, y, z in zip(a, b, c, strict=True)]
    assert (twice != np.array(once, np.float32)).any()


@pytest.mark.parametrize("kind", ["f64", "f16", "bf16"])
def test_fma_of_other_types_rounds_once(kind: str, rng: np.random.Generator) -> None:
    a, b, c = (finite(rng, kind, N) for _ in range(3))
    with np.errstate(all="ignore"):
        c[:60] = (-(a[:60].astype(np.float64) * b[:60].astype(np.float64))).astype(c.dtype)
    c = np.where(np.isfinite(c.astype(np.float64)), c, c.dtype.type(1))
    with np.errstate(all="ignore"):
        check_rounding(f"fma.rn.{kind} %d0, %a0, %a1, %a2;", kind, [a, b, c], lambda x, y, z: x * y + z)


@pytest.mark.parametrize("op", ["add", "sub", "mul"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_arithmetic_rounds_once(kind: str, op: str, rng: np.random.Generator) -> None:
    a, b = finite(rng, kind, N), finite(rng, kind, N)
    exact = {"add": Fraction.__add__, "sub": Fraction.__sub__, "mul": Fraction.__mul__}[op]
    check_rounding(f"{op}{'.rn' if kind == 'bf16' else ''}.{kind} %d0, %a0, %a1;", kind, [a, b], exact)


def test_packed_halves_are_two_elements(rng: np.random.Generator) -> None:
    a, b, c = (finite(rng, "f16", 2 * N) for _ in range(3))
    pack = [x.view(np.uint32) for x in (a, b, c)]
    (sums,) = apply("add.f16x2 %d0, %a0, %a1;", pack[:2], [np.uint32])
    with np.errstate(all="ignore"):
        assert same(sums.view(np.float16), a + b)
    (packed,) = apply("fma.rn.relu.f16x2 %d0, %a0, %a1, %a2;", pack, [np.uint32])
    (single,) = apply("fma.rn.f16 %d0, %a0, %a1, %a2;", [x.view(np.uint16) for x in (a, b, c)], [np.uint16])
    assert same(packed.view(np.float16), np.maximum(single.view(np.float16), np.float16(0)))
    ones = np.full_like(pack[0], 0x3F803F80)
    (one,) = apply("mul.bf16x2 %d0, %a0, %a1;", [pack[0], ones], [np.uint32])
    fine = ~np.isnan(a.view(ml_dtypes.bfloat16).astype(np.float32))
    assert (one.view(np.uint16)[fine] == a.view(np.uint16)[fine]).all()


def test_ftz_flushes_operands_and_results() -> None:
    tiny, small = np.float32(1e-40), np.float32(1.5e-38)
    a = np.array([tiny, -tiny, small, 1, -small], np.float32)
    b = np.array([1, 1, 0.5, tiny, 0.5], np.float32)
    (kept,) = apply("mul.f32 %d0, %a0, %a1;", [a, b], [np.float32])
    assert same(kept, a * b) and (kept != 0).all()
    (flushed,) = apply("mul.ftz.f32 %d0, %a0, %a1;", [a, b], [np.float32])
    assert same(flushed, np.array([0, -0.0, 0, 0, -0.0], np.float32))
    for body, want in {
        "add.ftz.f32 %d0, %a0, 0f00000000;": [0, 0, small, 1, -small],
        "fma.rn.ftz.f32 %d0, %a0, %a1, 0f80000000;": [0, -0.0, 0, 0, -0.0],
        "max.ftz.f32 %d0, %a0, %a0;": [0, -0.0, small, 1, -small],
        "neg.ftz.f32 %d0, %a0;": [-0.0, 0, -small, -1, small],
        "abs.ftz.f32 %d0, %a0;": [0, 0, small, 1, small],
        "cvt.ftz.f32.f32 %d0, %a0;": [0, -0.0, small, 1, -small],
    }.items():
        (got,) = apply(body, [a, b], [np.float32])
        assert same(got, np.array(want, np.float32)), body


def test_ftz_and_plain_instructions_keep_apart_in_one_kernel() -> None:
    a = np.array([1e-40], np.float32)
    body = "mul.ftz.f32 %d0, %a0, 0f3F800000; mul.f32 %d1, %a0, 0f3F800000; add.ftz.f32 %d2, %a0, %a0;"
    flushed, kept, again = apply(body, [a], [np.float32] * 3)
    assert flushed[0] == 0 and kept[0] == a[0] and again[0] == 0


def test_float64_is_not_flushed_beside_ftz() -> None:
    a, b = np.array([1e-310]), np.array([1e-40], np.float32)
    d, e = apply("mul.ftz.f32 %d1, %a1, %a1; mul.f64 %d0, %a0, 0d3FF0000000000000;", [a, b], [np.float64, np.float32])
    assert d[0] == a[0] and e[0] == 0


def test_environment_is_restored_after_a_launch() -> None:
    apply("add.rz.ftz.f32 %d0, %a0, %a0;", [np.array([1e-40], np.float32)], [np.float32])
    assert np.float32(1e-40) * np.float32(1) != 0
    assert (np.full(9, 1, np.float32) / np.full(9, 3, np.float32)).view(np.uint32)[0] == 0x3EAAAAAB


EDGE = np.array([0.0, -0.0, 1.0, -2.0, np.inf, -np.inf, np.nan, 3.5], np.float32)


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_extremes(op: str, kind: str) -> None:
    a, b = (g.ravel().astype(DTYPES[kind]) for g in np.meshgrid(EDGE, EDGE))
    pick = min if op == "min" else max

    def key(x: float) -> tuple[float, float]:
        return x, math.copysign(1, x)  # -0 is less than +0

    for suffix, nan_wins in (("", False), (".NaN", True))[: 1 if kind == "f64" else 2]:  # no .NaN of .f64
        (got,) = apply(f"{op}{suffix}.{kind} %d0, %a0, %a1;", [raw(a), raw(b)], [raw(a).dtype])
        values = got.view(a.dtype).astype(np.float64)
        for x, y, value in zip(a.astype(float), b.astype(float), values, strict=True):
            if math.isnan(x) or math.isnan(y):
                other = math.nan if nan_wins else y if math.isnan(x) else x
                assert math.isnan(value) if math.isnan(other) else key(value) == key(other)
            else:
                assert key(value) == key(pick(x, y, key=key)), (op, x, y)


def test_nan_results_of_extremes_are_canonical() -> None:
    a = np.array([np.nan, -np.nan], np.float32)
    (d,) = apply("max.f32 %d0, %a0, %a1;", [a, -a], [np.uint32])  # ptxas makes the maximum of one number a move
    assert (d == 0x7FFFFFFF).all()


def test_saturation_clamps_to_one_and_maps_nan_to_zero() -> None:
    a = np.array([-1, -0.0, 0.25, 1, 7, np.inf, -np.inf, np.nan], np.float32)
    want = np.array([0, 0, 0.25, 1, 1, 1, 0, 0], np.float32)
    for body in ("add.sat.f32 %d0, %a0, 0f80000000;", "mul.sat.f32 %d0, %a0, 0f3F800000;", "cvt.sat.f32.f32 %d0, %a0;"):
        (got,) = apply(body, [a], [np.float32])
        assert same(got, want), body
    (got,) = apply("fma.rn.sat.f32 %d0, %a0, 0f3F800000, 0f80000000;", [a], [np.float32])
    assert same(got, want)


@pytest.mark.parametrize(
    ("body", "fn", "low", "high", "tolerance"),
    [
        ("ex2.approx.f32", np.exp2, -120, 120, 2.0**-22),
        ("ex2.approx.ftz.f32", np.exp2, -120, 120, 2.0**-22),
        ("rcp.approx.f32", lambda x: 1 / x, 1e-30, 1e30, 2.0**-23),
        ("sqrt.approx.f32", np.sqrt, 1e-30, 1e30, 2.0**-23),
        ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x), 1e-30, 1e30, 2.0**-22.9),
        ("tanh.approx.f32", np.tanh, -4, 4, 2.0**-11),
    ],
)
def test_approximations_are_within_their_relative_error(
    body: str, fn: Callable[[Any], Any], low: float, high: float, tolerance: float, rng: np.random.Generator
) -> None:
    x = rng.uniform(low, high, 5000).astype(np.float32)
    (got,) = apply(f"{body} %d0, %a0;", [x], [np.float32])
    want = fn(x.astype(np.float64))
    assert np.abs(got / want - 1).max() <= tolerance


def test_absolute_errors_of_sin_cos_lg2(rng: np.random.Generator) -> None:
    x = rng.uniform(-np.pi, np.pi, 5000).astype(np.float32)
    for name, fn in (("sin", np.sin), ("cos", np.cos)):
        (got,) = apply(f"{name}.approx.f32 %d0, %a0;", [x], [np.float32])
        assert np.abs(got - fn(x.astype(np.float64))).max() <= 2.0**-20.5
    x = rng.uniform(0.5, 2, 5000).astype(np.float32)
    (got,) = apply("lg2.approx.f32 %d0, %a0;", [x], [np.float32])
    assert np.abs(got - np.log2(x.astype(np.float64))).max() <= 2.0**-22


def test_special_values_of_approximations() -> None:
    x = np.array([np.inf, -np.inf, 0.0, -0.0, np.nan, -1.0], np.float32)
    for body, want in {
        "ex2.approx.f32": [np.inf, 0, 1, 1, np.nan, 0.5],
        "lg2.approx.f32": [np.inf, np.nan, -np.inf, -np.inf, np.nan, np.nan],
        "rcp.approx.f32": [0, -0.0, np.inf, -np.inf, np.nan, -1],
        "rsqrt.approx.f32": [0, np.nan, np.inf, -np.inf, np.nan, np.nan],
        "sqrt.rn.f32": [np.inf, np.nan, 0, -0.0, np.nan, np.nan],
        "sin.approx.f32": [np.nan, np.nan, 0, -0.0, np.nan, np.sin(np.float32(-1))],
    }.items():
        (got,) = apply(f"{body} %d0, %a0;", [x], [np.float32])
        want_array = np.array(want, np.float32)
        assert np.allclose(got, want_array, rtol=1e-6, equal_nan=True), (body, got)
        assert (np.signbit(got) == np.signbit(want_array))[~np.isnan(want_array)].all(), (body, got)


def test_division_forms() -> None:
    a = np.array([1, 6, np.inf, 5, -3], np.float32)
    b = np.array([3, 2, 2.0**127, 2.0**127, 2.0**127], np.float32)
    (approx,) = apply("div.approx.f32 %d0, %a0, %a1;", [a, b], [np.float32])
    assert np.allclose(approx[:2], [1 / 3, 3]) and np.isnan(approx[2]) and approx[3] == 0 and approx[4] == 0
    (full,) = apply("div.full.f32 %d0, %a0, %a1;", [a, b], [np.float32], approximate=False)
    assert full[3] == np.float32(5 / 2.0**127)


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_square_root_rounds_once(kind: str, rng: np.random.Generator) -> None:
    a = np.abs(finite(rng, kind, N))
    (got,) = apply(f"sqrt.rn.{kind} %d0, %a0;", [a], [DTYPES[kind]])
    for x, root in zip(a, got, strict=True):
        # The nearest number: neither neighbour's midpoint is on the other side of the true root.
        below, above = (Fraction(float(np.nextafter(root, DTYPES[kind](s)))) for s in (-1, np.inf))
        r, v = Fraction(float(root)), Fraction(float(x))
        assert v == 0 or ((below + r) / 2) ** 2 <= v <= ((above + r) / 2) ** 2


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_functions(kind: str) -> None:
    x = np.linspace(-4, 4, 101).astype(DTYPES[kind])
    eps = 2.0 ** -(FORMATS[kind][0] - 1)
    for name, fn in (("ex2.approx" + (".ftz" if kind == "bf16" else ""), np.exp2), ("tanh.approx", np.tanh)):
        (got,) = apply(f"{name}.{kind} %d0, %a0;", [raw(x)], [np.uint16])
        assert np.allclose(got.view(x.dtype).astype(float), fn(x.astype(float)), rtol=eps, atol=eps / 4)
    for name, fn in (("neg", np.negative), ("abs", np.abs)):
        (got,) = apply(f"{name}.{kind} %d0, %a0;", [raw(x)], [np.uint16])
        assert (got.view(x.dtype) == fn(x)).all()


def test_half_ftz_flushes_its_own_subnormals() -> None:
    a = np.array([2.0**-15, -(2.0**-24), 1.0], np.float16)
    ones = np.ones_like(a)
    (got,) = apply("mul.ftz.f16 %d0, %a0, %a1;", [raw(a), raw(ones)], [np.uint16])
    assert same(got.view(np.float16), np.array([0, -0.0, 1], np.float16))
    (kept,) = apply("mul.f16 %d0, %a0, %a1;", [raw(a), raw(ones)], [np.uint16])
    assert same(kept.view(np.float16), a)


def test_copysign_takes_the_first_operands_sign() -> None:
    a, b = (g.ravel() for g in np.meshgrid(EDGE, EDGE))
    (got,) = apply("copysign.f32 %d0, %a0, %a1;", [a, b], [np.float32])
    assert same(got, np.copysign(b, a))


@pytest.mark.parametrize("kind", ["finite", "infinite", "number", "notanumber", "normal", "subnormal"])
def test_testp(kind: str) -> None:
    a = np.array([0, -0.0, 1, 1e-40, -1e-45, np.inf, -np.inf, np.nan], np.float32)
    names = ["zero", "zero", "normal", "subnormal", "subnormal", "infinite", "infinite", "notanumber"]
    truth = {
        "finite": {"zero", "normal", "subnormal"},
        "number": {"zero", "normal", "subnormal", "infinite"},
        "normal": {"zero", "normal"},
    }.get(kind, {kind})
    (got,) = apply(f"testp.{kind}.f32 %p, %a0; selp.u32 %d0, 1, 0, %p;", [a], [np.uint32], ".reg .pred %p;")
    assert [bool(g) for g in got] == [name in truth for name in names]


def test_the_sign_of_a_product_on_an_extreme_magnitude() -> None:
    a, b = np.array([1, -1, 3, -4, -0.0], np.float32), np.array([2, 2, -1, -5, 1], np.float32)
    for op, pick in (("min", np.minimum), ("max", np.maximum)):
        (d,) = apply(f"{op}.xorsign.abs.f32 %d0, %a0, %a1;", [a, b], [np.float32])
        want = np.where(np.signbit(a) ^ np.signbit(b), -1, 1) * pick(np.abs(a), np.abs(b))
        assert d.tolist() == want.tolist() and np.signbit(d).tolist() == np.signbit(want).tolist()


@pytest.mark.parametrize("type_", ["f16", "f32"])
def test_saturation_has_no_negative_zero(type_: str) -> None:
    a = np.array([-0.0, -1.0], np.float32)
    narrow, wide = (
        (f"cvt.rn.{type_}.f32 %h0, %a0;", f"cvt.f32.{type_} %d0, %h1;")
        if type_ != "f32"
        else ("mov.f32 %h0, %a0;", "mov.f32 %d0, %h1;")
    )
    registers = f".reg .{'b16' if type_ != 'f32' else 'f32'} %h<2>;"
    (d,) = apply(f"{narrow} add.sat.{type_} %h1, %h0, %h0; {wide}", [a], [np.float32], registers)
    assert d.view(np.uint32).tolist() == [0, 0]
