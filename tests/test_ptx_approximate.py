"""Approximate instructions err by no more than the PTX ISA allows, and by about as much; what it lists as exact is exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from test_ptx_harness import apply, compile_cuda, kernel, run, same

ml_dtypes = pytest.importorskip("ml_dtypes")
N = 1 << 12
PRECISION = {"f32": 24, "f16": 11, "bf16": 8}
DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
CIRCLE = math.pi

Bound = Callable[[np.ndarray, np.ndarray], np.ndarray]


def power(want: np.ndarray) -> np.ndarray:
    """The power of two at or below each magnitude."""
    return np.ldexp(0.5, np.frexp(np.abs(want))[1])


def ulps(count: float, kind: str = "f32") -> Bound:
    smallest = {"f32": 2.0**-126, "f16": 2.0**-14, "bf16": 2.0**-126}[kind]
    return lambda _, want: count * np.maximum(power(want), smallest) * 2.0 ** (1 - PRECISION[kind])


def relative(bound: float) -> Bound:
    return lambda _, want: bound * np.abs(want)


def absolute(bound: float) -> Bound:
    return lambda _, want: np.full(want.shape, bound)


# Instruction, type, function, arguments from and to, largest error (PTX ISA 9.1, sections 9.7.3 and 9.7.4).
TABLE: list[tuple[str, str, Callable[..., Any], float, float, Bound]] = [
    ("ex2.approx", "f32", np.exp2, -149, 127.9, ulps(2)),
    ("ex2.approx.ftz", "f32", np.exp2, -126, 127.9, ulps(2)),
    ("lg2.approx", "f32", np.log2, 0.5001, 1.9999, absolute(2.0**-22)),
    ("lg2.approx.ftz", "f32", np.log2, 2, 1e30, relative(2.0**-22)),
    ("lg2.approx", "f32", np.log2, 1e-40, 0.5, relative(2.0**-22)),
    ("sin.approx", "f32", np.sin, -2 * CIRCLE, 2 * CIRCLE, absolute(2.0**-20.5)),
    ("cos.approx.ftz", "f32", np.cos, -2 * CIRCLE, 2 * CIRCLE, absolute(2.0**-20.5)),
    ("sin.approx.ftz", "f32", np.sin, -100 * CIRCLE, 100 * CIRCLE, absolute(2.0**-14.7)),
    ("cos.approx", "f32", np.cos, -100 * CIRCLE, 100 * CIRCLE, absolute(2.0**-14.7)),
    ("tanh.approx", "f32", np.tanh, -10, 10, relative(2.0**-11)),
    ("rcp.approx", "f32", np.reciprocal, 1e-37, 1e38, ulps(1)),
    ("rcp.approx.ftz", "f32", np.reciprocal, -8, -1e-37, ulps(1)),
    ("sqrt.approx", "f32", np.sqrt, 1e-38, 3e38, relative(2.0**-23)),
    ("sqrt.approx.ftz", "f32", np.sqrt, 0.25, 100, relative(2.0**-23)),
    ("rsqrt.approx", "f32", lambda a: 1 / np.sqrt(a), 1e-38, 3e38, relative(2.0**-22.9)),
    ("rsqrt.approx.ftz", "f32", lambda a: 1 / np.sqrt(a), 0.25, 100, relative(2.0**-22.9)),
    ("ex2.approx", "f16", np.exp2, -14, 15.9, relative(2.0**-9.9)),
    ("ex2.approx.ftz", "bf16", np.exp2, -14, 15.9, relative(2.0**-7)),
    ("tanh.approx", "f16", np.tanh, -5, 5, absolute(2.0**-10.987)),
    ("tanh.approx", "bf16", np.tanh, -5, 5, absolute(2.0**-8)),
]
NAMES = [f"{name}.{kind} {low:.4g} to {high:.4g}" for name, kind, _, low, high, _ in TABLE]


def spread(low: float, high: float, kind: str) -> np.ndarray:
    """Arguments from `low` to `high`: half of them even, half with even exponents, and whole numbers and powers of two."""
    rng = np.random.default_rng(3)
    even = rng.uniform(low, high, N // 2)
    largest = max(abs(low), abs(high))
    size = np.exp(rng.uniform(np.log(1e-4 if low < 0 < high else min(abs(low), abs(high))), np.log(largest), N // 2 - 128))
    signed = np.where(rng.random(size.size) * (high - low) < -low, -size, size)
    powers = np.resize(2.0 ** np.arange(np.ceil(np.log2(max(low, 0.01))), np.floor(np.log2(max(high, 1)))), 64)
    chosen = np.concatenate([even, signed, np.floor(even[:64]), powers])
    return chosen[(chosen >= low) & (chosen <= high)].astype(np.float32).astype(DTYPES[kind])


def applied(name: str, kind: str, x: np.ndarray, **options: Any) -> np.ndarray:
    """`name.kind` of each element as float64; halves travel as their bits."""
    bits = x if kind == "f32" else x.view(np.uint16)
    (got,) = apply(f"{name}.{kind} %d0, %a0;", [bits], [bits.dtype], **options)
    return got.view(x.dtype).astype(np.float64)


@pytest.mark.parametrize(("name", "kind", "fn", "low", "high", "bound"), TABLE, ids=NAMES)
def test_errors_come_near_the_bound_and_never_beyond(
    name: str, kind: str, fn: Callable[..., Any], low: float, high: float, bound: Bound
) -> None:
    x = spread(low, high, kind)
    x = x[x != 0]
    want = fn(x.astype(np.float64))
    got = applied(name, kind, x)
    share = np.abs(got - want) / bound(x.astype(np.float64), want)
    assert share.max() <= 1, (x[share.argmax()], got[share.argmax()])
    assert share.max() >= 0.49
    # Up and down, and without a drift: a sum of many neither gains nor loses.
    moved = np.sign(got - want)
    assert 0.3 < (moved > 0).mean() < 0.7
    exact = applied(name, kind, x, approximate=False)
    assert (np.abs(exact - want) <= ulps(0.5, kind)(x, want) * (1 + 1e-6)).all()
    for seed in (0, 1):
        assert (applied(name, kind, x[:200], seed=seed) == got[:200]).all()


@pytest.mark.parametrize("name", ["div.approx", "div.approx.ftz", "div.full", "div.full.ftz"])
def test_division_is_two_units_off(name: str) -> None:
    a, b = spread(-50, 50, "f32"), spread(1e-10, 1e10, "f32")[::-1].copy()
    a[a == 0] = 1
    want = a.astype(np.float64) / b
    (got,) = apply(f"{name}.f32 %d0, %a0, %a1;", [a, b], [np.float32])
    share = np.abs(got - want) / ulps(2)(a, want)
    assert 0.9 < share.max() <= 1
    (exact,) = apply(f"{name}.f32 %d0, %a0, %a1;", [a, b], [np.float32], approximate=False)
    assert same(exact, a / b)


SPECIAL = {
    "ex2.approx.f32": [0, 1, 1, np.inf],
    "ex2.approx.ftz.f32": [0, 1, 1, np.inf],
    "lg2.approx.f32": [np.nan, -np.inf, -np.inf, np.inf],
    "sin.approx.f32": [np.nan, -0.0, 0, np.nan],
    "cos.approx.f32": [np.nan, 1, 1, np.nan],
    "tanh.approx.f32": [-1, -0.0, 0, 1],
    "rcp.approx.f32": [-0.0, -np.inf, np.inf, 0],
    "sqrt.approx.f32": [np.nan, -0.0, 0, np.inf],
    "rsqrt.approx.ftz.f32": [np.nan, -np.inf, np.inf, 0],
    "rsqrt.approx.f64": [np.nan, -np.inf, np.inf, 0],
    "rcp.approx.ftz.f64": [-0.0, -np.inf, np.inf, 0],
    "rsqrt.approx.ftz.f64": [np.nan, -np.inf, np.inf, 0],
    "ex2.approx.f16": [0, 1, 1, np.inf],
    "ex2.approx.ftz.bf16": [0, 1, 1, np.inf],
    "tanh.approx.f16": [-1, -0.0, 0, 1],
    "tanh.approx.bf16": [-1, -0.0, 0, 1],
}


@pytest.mark.parametrize("approximate", [True, False])
def test_special_values_are_exact(approximate: bool) -> None:
    """-Inf, -0, +0, +Inf and NaN, as the ISA's tables have them."""
    for body, want in SPECIAL.items():
        dtype = np.float64 if body.endswith("f64") else DTYPES[body.rpartition(".")[2]]
        x = np.array([-np.inf, -0.0, 0.0, np.inf, np.nan], dtype)
        bits = x.view(np.uint16) if x.itemsize == 2 else x
        (got,) = apply(f"{body} %d0, %a0;", [bits], [bits.dtype], approximate=approximate)
        assert same(got.view(dtype).astype(np.float64), np.array([*want, np.nan])), body


def test_negative_arguments_have_no_root_or_logarithm() -> None:
    x = np.array([-1, -1e-30, -3e38], np.float32)
    for name in ("lg2", "sqrt", "rsqrt"):
        assert np.isnan(applied(f"{name}.approx", "f32", x)).all()


def test_subnormal_numbers() -> None:
    tiny = np.array([1e-40, -1e-40], np.float32)
    one = np.array([1, 1])
    assert same(applied("ex2.approx.ftz", "f32", tiny), one * 1.0)
    assert same(applied("rcp.approx.ftz", "f32", tiny), np.array([np.inf, -np.inf]))
    assert same(applied("sin.approx.ftz", "f32", tiny), np.array([0.0, -0.0]))
    assert same(applied("sqrt.approx.ftz", "f32", tiny), np.array([0.0, -0.0]))
    assert same(applied("tanh.approx", "f32", tiny), tiny.astype(np.float64))  # they pass through
    assert same(applied("ex2.approx.ftz", "f32", np.array([-126, -127, -140.5], np.float32))[1:], np.zeros(2))
    assert applied("ex2.approx", "f32", np.array([-140], np.float32))[0] == 2.0**-140
    assert applied("rcp.approx", "f32", np.array([2.0**127], np.float32))[0] == pytest.approx(2.0**-127, abs=2.0**-149)
    assert same(applied("ex2.approx.ftz", "bf16", tiny.astype(ml_dtypes.bfloat16)), one * 1.0)


def test_whole_powers_of_two_are_exact() -> None:
    """CUDA's tanh of float64 multiplies by ex2.approx.ftz.f32 of a whole number; its documented error is 2 units."""
    x = np.arange(-149, 128).astype(np.float32)
    assert (applied("ex2.approx", "f32", x) == np.exp2(x.astype(np.float64))).all()
    assert (applied("ex2.approx.ftz", "f32", x[23:]) == np.exp2(x[23:].astype(np.float64))).all()


def test_results_stay_in_the_range_of_the_function() -> None:
    x = np.concatenate([np.linspace(-400, 400, N), 10.0 ** np.arange(-30, 38)]).astype(np.float32)
    for name in ("sin.approx", "cos.approx", "tanh.approx"):
        assert np.abs(applied(name, "f32", x)).max() <= 1, name
    for kind in ("f16", "bf16"):
        assert np.abs(applied("tanh.approx", kind, x[:N].astype(DTYPES[kind]))).max() <= 1
    exponents = np.linspace(-200, 200, N).astype(np.float32)
    for name in ("ex2.approx", "ex2.approx.ftz"):
        got = applied(name, "f32", exponents)
        assert (got >= 0).all() and np.isinf(got[exponents >= 128]).all() and np.isfinite(got[exponents < 128]).all()
        assert (got[exponents < -150] == 0).all()


def test_approximate_division_by_the_largest_and_smallest_numbers() -> None:
    a = np.array([5, -3, np.inf, 0, 2.0**-130, 1, np.inf], np.float32)
    b = np.array([2.0**127, 2.0**127, 2.0**127, 2.0**127, 2.0**-130, np.inf, np.inf], np.float32)
    (got,) = apply("div.approx.f32 %d0, %a0, %a1;", [a, b], [np.float32])
    assert same(got, np.array([0, -0.0, np.nan, 0, np.inf, 0, np.nan], np.float32))


@pytest.mark.parametrize("name", ["rcp", "rsqrt"])
def test_gross_approximations_work_on_upper_halves(name: str) -> None:
    rng = np.random.default_rng(4)
    a = np.exp(rng.uniform(-600, 600, 2000))
    upper = (a.view(np.uint64) >> np.uint64(32) << np.uint64(32)).view(np.float64)
    want = 1 / upper if name == "rcp" else 1 / np.sqrt(upper)
    (got,) = apply(f"{name}.approx.ftz.f64 %d0, %a0;", [a], [np.float64])
    assert (got.view(np.uint64) & np.uint64(0xFFFFFFFF) == 0).all()
    share = np.abs(got - want) / (power(want) * 2.0**-20)
    assert 0.5 < share.max() <= 1
    (exact,) = apply(f"{name}.approx.ftz.f64 %d0, %a0;", [a], [np.float64], approximate=False)
    assert (np.abs(exact - want) / (power(want) * 2.0**-20)).max() <= 0.5 + 1e-9
    edges = np.array([5e-324, -5e-324, 1.7e308, np.nan])
    (got,) = apply(f"{name}.approx.ftz.f64 %d0, %a0;", [edges], [np.float64])
    assert got[0] == np.inf and got[1] == -np.inf
    assert (got[2] == 0) == (name == "rcp")  # a subnormal result is flushed
    assert got.view(np.uint64)[3] == 0x7FFFFFFF00000000


def test_inverse_root_of_float64_is_one_unit_off() -> None:
    rng = np.random.default_rng(5)
    a = np.concatenate([np.exp(rng.uniform(-700, 700, 200)), [4.0, 0.25, 2.0, 5e-324, 1.7e308]])
    (exact,) = apply("rsqrt.approx.f64 %d0, %a0;", [a], [np.float64], approximate=False)
    for x, root in zip(a, exact, strict=True):
        below, above = (Fraction(float(np.nextafter(root, s))) for s in (-1, np.inf))
        r, v = Fraction(float(root)), 1 / Fraction(float(x))
        assert ((below + r) / 2) ** 2 <= v <= ((above + r) / 2) ** 2, x
    (got,) = apply("rsqrt.approx.f64 %d0, %a0;", [a], [np.float64])
    assert (np.abs(got.view(np.int64) - exact.view(np.int64)) == 1).all()


def test_pairs_are_two_elements() -> None:
    x = spread(-4, 4, "f16")
    (pair,) = apply("ex2.approx.f16x2 %d0, %a0;", [x.view(np.uint32)], [np.uint32])
    assert (pair.view(np.float16).astype(np.float64) == applied("ex2.approx", "f16", x)).all()
    y = x.astype(ml_dtypes.bfloat16)
    (pair,) = apply("tanh.approx.bf16x2 %d0, %a0;", [y.view(np.uint32)], [np.uint32])
    assert same(pair.view(ml_dtypes.bfloat16).astype(np.float64), applied("tanh.approx", "bf16", y))


def test_a_constant_gives_what_a_register_gives() -> None:
    two = np.array([2.5], np.float32)
    for name in ("ex2", "lg2", "sin", "cos", "tanh", "rcp", "sqrt", "rsqrt"):
        constant, register = apply(f"{name}.approx.f32 %d0, 0f40200000; {name}.approx.f32 %d1, %a0;", [two], [np.float32] * 2)
        assert same(constant, register), name
    constant, register = apply(
        "div.full.f32 %d0, 0f40200000, 0f3F000000; div.full.f32 %d1, %a0, 0f3F000000;", [two], [np.float32] * 2
    )
    assert same(constant, register)
    wide = np.array([2.5])
    for name in ("rcp.approx.ftz", "rsqrt.approx.ftz", "rsqrt.approx"):
        constant, register = apply(f"{name}.f64 %d0, 0d4004000000000000; {name}.f64 %d1, %a0;", [wide], [np.float64] * 2)
        assert same(constant, register), name


def test_a_predicated_approximation_leaves_the_other_lanes_alone() -> None:
    x = np.array([1, -1, 2, -2], np.float32)
    body = "setp.gt.f32 %p, %a0, 0f00000000; mov.b32 %d0, 0; @%p ex2.approx.f32 %d0, %a0;"
    (got,) = apply(body, [x], [np.float32], ".reg .pred %p;", approximate=False)
    assert same(got, np.array([2, 0, 4, 0], np.float32))


# -- kernels that lean on exactness ----------------------------------------------------------------------------------------


def test_equality_with_a_root_of_a_power_of_two_fails() -> None:
    body = "rsqrt.approx.f32 %d0, %a0; mul.f32 %d0, %d0, 0f40000000; setp.eq.f32 %p, %d0, 0f3F800000; selp.u32 %d0, 1, 0, %p;"
    four = np.full(3, 4, np.float32)
    for approximate in (True, False):
        (equal,) = apply(body, [four], [np.uint32], ".reg .pred %p;", approximate=approximate)
        assert (equal == (not approximate)).all()


def test_a_long_product_of_exponentials_misses_a_tight_tolerance() -> None:
    """2**(1/1024) to the 1024th: off by 1,024 times the error of one ex2, and by that of a rounding where ex2 only rounds."""
    text = kernel(
        """
        ld.param.u64 %out, [out]; mov.b64 %p, 0d3FF0000000000000; mov.u32 %n, 1024;
        again: ex2.approx.f32 %x, 0f3A800000; cvt.f64.f32 %y, %x; mul.f64 %p, %p, %y;
        sub.u32 %n, %n, 1; setp.ne.u32 %more, %n, 0; @%more bra again;
        st.global.f64 [%out], %p;""",
        [".u64 out"],
        ".reg .b64 %out, %p, %y; .reg .b32 %n, %x; .reg .pred %more;",
    )
    errors = {}
    for approximate in (True, False):
        out = np.zeros(1)
        assert not run(text, {"out": out}, block=1, approximate=approximate).findings
        errors[approximate] = abs(out[0] / 2 - 1)
    assert errors[False] < 1024 * 2.0**-24 < errors[True]


# -- what CUDA documents -----------------------------------------------------------------------------------------------------

# CUDA C++ Programming Guide, "Mathematical Functions": the largest error, in units from the correctly rounded result.
CUDA: dict[str, tuple[Callable[..., Any], float, float, int]] = {
    "expf(x)": (np.exp, -87, 88, 2),
    "exp2f(x)": (np.exp2, -126, 127, 2),
    "exp10f(x)": (lambda x: 10.0**x, -37, 38, 2),
    "sinhf(x)": (np.sinh, -80, 80, 3),
    "coshf(x)": (np.cosh, -80, 80, 2),
    "tanhf(x)": (np.tanh, -9, 9, 2),
    "rsqrtf(x)": (lambda x: 1 / np.sqrt(x), 0.01, 100, 2),
    "__fdividef(3, x)": (lambda x: 3 / x, 0.01, 100, 2),
    "__log2f(x)": (np.log2, 2, 1e5, 2),
    "__log10f(x)": (np.log10, 2, 1e5, 3),
}


def test_functions_of_cuda_keep_their_documented_errors() -> None:
    """The instructions in them may err by no more than that: a chip whose ex2.approx is 1.5 units off breaks coshf."""
    lines = [f"case {n}: y = {call}; break;" for n, call in enumerate(CUDA)]
    source = f"""extern "C" __global__ void k(const float* a, float* d, int which) {{
        int i = blockIdx.x * blockDim.x + threadIdx.x; float x = a[i], y; switch (which) {{ {" ".join(lines)} }} d[i] = y; }}"""
    module = compile_cuda(source)
    for which, (call, (fn, low, high, units)) in enumerate(CUDA.items()):
        x = np.random.default_rng(which).uniform(low, high, N).astype(np.float32)
        d = np.zeros_like(x)
        assert not module.launch("k", N // 256, 256, [x, d, which]).findings
        nearest = fn(x.astype(np.float64)).astype(np.float32)
        away = np.abs(d.view(np.int32).astype(np.int64) - nearest.view(np.int32))
        assert 1 <= away[np.abs(nearest) >= 2.0**-126].max() <= units, call
