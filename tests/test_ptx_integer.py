"""Integer arithmetic, logic and bit fields against their definitions in the PTX ISA, in Python's integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_ptx_harness import apply, integers

N = 200
TYPES = {"u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64}


def wrap(value: int, dtype: Any) -> int:
    """The value of an integer cut to a type."""
    bits = 8 * np.dtype(dtype).itemsize
    value &= (1 << bits) - 1
    return value - (1 << bits) if np.dtype(dtype).kind == "i" and value >> (bits - 1) else value


def check_integers(body: str, inputs: list[np.ndarray], out: Any, reference: Callable[..., int]) -> None:
    (got,) = apply(body, inputs, [out])
    want = [wrap(reference(*(int(x) for x in row)), out) for row in zip(*inputs, strict=True)]
    wrong = [(row, int(g), w) for row, g, w in zip(zip(*inputs, strict=True), got, want, strict=True) if int(g) != w]
    assert not wrong, f"{body}: {wrong[:3]}"


def trunc_div(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


BINARY: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": trunc_div,
    "rem": lambda a, b: a - trunc_div(a, b) * b,
}


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("op", BINARY)
def test_binary(op: str, type_: str, rng: np.random.Generator) -> None:
    a, b = integers(rng, TYPES[type_], N), integers(rng, TYPES[type_], N)
    if op in ("div", "rem"):
        b[b == 0] = 3
    check_integers(f"{op}.{type_} %d0, %a0, %a1;", [a, b], TYPES[type_], BINARY[op])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_division_by_zero_does_not_stop_the_machine(rng: np.random.Generator) -> None:
    a = integers(rng, np.int32, N)
    (d,) = apply("div.s32 %d0, %a0, 0;", [a], [np.int32])
    assert (d == -1).all()


@pytest.mark.parametrize("type_", TYPES)
def test_high_and_wide_products(type_: str, rng: np.random.Generator) -> None:
    dtype = TYPES[type_]
    bits = 8 * np.dtype(dtype).itemsize
    a, b, c = (integers(rng, dtype, N) for _ in range(3))
    check_integers(f"mul.hi.{type_} %d0, %a0, %a1;", [a, b], dtype, lambda x, y: x * y >> bits)
    check_integers(f"mad.lo.{type_} %d0, %a0, %a1, %a2;", [a, b, c], dtype, lambda x, y, z: x * y + z)
    check_integers(f"mad.hi.{type_} %d0, %a0, %a1, %a2;", [a, b, c], dtype, lambda x, y, z: (x * y >> bits) + z)
    if bits < 64:
        wide = np.dtype(f"{np.dtype(dtype).kind}{bits // 4}")
        w = integers(rng, wide, N)
        check_integers(f"mul.wide.{type_} %d0, %a0, %a1;", [a, b], wide, lambda x, y: x * y)
        check_integers(f"mad.wide.{type_} %d0, %a0, %a1, %a2;", [a, b, w], wide, lambda x, y, z: x * y + z)


def clamp(x: int) -> int:
    return max(-(1 << 31), min((1 << 31) - 1, x))


def test_saturating_s32(rng: np.random.Generator) -> None:
    a, b, c = (integers(rng, np.int32, N) for _ in range(3))
    check_integers("add.sat.s32 %d0, %a0, %a1;", [a, b], np.int32, lambda x, y: clamp(x + y))
    check_integers("sub.sat.s32 %d0, %a0, %a1;", [a, b], np.int32, lambda x, y: clamp(x - y))
    check_integers("mad.hi.sat.s32 %d0, %a0, %a1, %a2;", [a, b, c], np.int32, lambda x, y, z: clamp((x * y >> 32) + z))


@pytest.mark.parametrize("type_", ["s16", "s32", "s64"])
def test_unary(type_: str, rng: np.random.Generator) -> None:
    a = integers(rng, TYPES[type_], N)
    check_integers(f"neg.{type_} %d0, %a0;", [a], TYPES[type_], lambda x: -x)
    check_integers(f"abs.{type_} %d0, %a0;", [a], TYPES[type_], abs)


@pytest.mark.parametrize("type_", TYPES)
def test_sum_of_absolute_differences(type_: str, rng: np.random.Generator) -> None:
    a, b, c = (integers(rng, TYPES[type_], N) for _ in range(3))
    check_integers(f"sad.{type_} %d0, %a0, %a1, %a2;", [a, b, c], TYPES[type_], lambda x, y, z: z + abs(x - y))


def test_24_bit_products(rng: np.random.Generator) -> None:
    a, b, c = (integers(rng, np.uint32, N) for _ in range(3))

    def low(x: int) -> int:
        return x & 0xFFFFFF

    def signed(x: int) -> int:
        return low(x) - (low(x) >> 23 << 24)

    check_integers("mul24.lo.u32 %d0, %a0, %a1;", [a, b], np.uint32, lambda x, y: low(x) * low(y))
    check_integers("mul24.hi.s32 %d0, %a0, %a1;", [a, b], np.uint32, lambda x, y: signed(x) * signed(y) >> 16)
    check_integers("mad24.lo.s32 %d0, %a0, %a1, %a2;", [a, b, c], np.uint32, lambda x, y, z: signed(x) * signed(y) + z)


def test_carry_chain_adds_and_subtracts_128_bits(rng: np.random.Generator) -> None:
    a, b = ([integers(rng, np.uint32, N) for _ in range(4)] for _ in range(2))
    body = "add.cc.u32 %d0, %a0, %a4; addc.cc.u32 %d1, %a1, %a5; addc.cc.u32 %d2, %a2, %a6; addc.u32 %d3, %a3, %a7;"
    join = lambda words: sum(int(w) << (32 * k) for k, w in enumerate(words))  # noqa: E731
    for operation, text in ((int.__add__, body), (int.__sub__, body.replace("add", "sub"))):
        got = apply(text, [*a, *b], [np.uint32] * 4)
        for k in range(N):
            want = operation(join([x[k] for x in a]), join([x[k] for x in b])) % (1 << 128)
            assert join([g[k] for g in got]) == want


def test_multiply_add_with_carry_is_a_64_bit_product(rng: np.random.Generator) -> None:
    a, b, lo, hi = (integers(rng, np.uint32, N) for _ in range(4))
    body = "mad.lo.cc.u32 %d0, %a0, %a1, %a2; madc.hi.u32 %d1, %a0, %a1, %a3;"
    low, high = apply(body, [a, b, lo, hi], [np.uint32] * 2)
    for k in range(N):
        want = (int(a[k]) * int(b[k]) + int(lo[k]) + (int(hi[k]) << 32)) % (1 << 64)
        assert int(low[k]) | int(high[k]) << 32 == want


# -- logic --------------------------------------------------------------------------------------------------------------

UNSIGNED = {"b16": np.uint16, "b32": np.uint32, "b64": np.uint64}


@pytest.mark.parametrize("type_", UNSIGNED)
def test_bitwise(type_: str, rng: np.random.Generator) -> None:
    dtype = UNSIGNED[type_]
    a, b = integers(rng, dtype, N), integers(rng, dtype, N)
    check_integers(f"and.{type_} %d0, %a0, %a1;", [a, b], dtype, lambda x, y: x & y)
    check_integers(f"or.{type_} %d0, %a0, %a1;", [a, b], dtype, lambda x, y: x | y)
    check_integers(f"xor.{type_} %d0, %a0, %a1;", [a, b], dtype, lambda x, y: x ^ y)
    check_integers(f"not.{type_} %d0, %a0;", [a], dtype, lambda x: ~x)
    check_integers(f"cnot.{type_} %d0, %a0;", [a], dtype, lambda x: int(x == 0))


@pytest.mark.parametrize("type_", ["b16", "b32", "b64", "s16", "s32", "s64", "u32"])
@pytest.mark.parametrize("amount", ["%a1", "0", "1", "31", "40", "64", "200"])
def test_shifts_lose_everything_beyond_the_width(type_: str, amount: str, rng: np.random.Generator) -> None:
    dtype = {**TYPES, **UNSIGNED}[type_]
    a, b = integers(rng, dtype, N), integers(rng, np.uint32, N)
    b[::2] %= 80
    pick = (lambda y: y) if amount == "%a1" else (lambda y: int(amount))
    check_integers(f"shr.{type_} %d0, %a0, {amount};", [a, b], dtype, lambda x, y: x >> min(pick(y), 64))
    if type_[0] == "b":
        check_integers(f"shl.{type_} %d0, %a0, {amount};", [a, b], dtype, lambda x, y: x << min(pick(y), 64))


def test_funnel_shifts(rng: np.random.Generator) -> None:
    a, b, c = (integers(rng, np.uint32, N) for _ in range(3))
    c[::2] %= 70
    for wrapping, amount in (("wrap", lambda n: n & 31), ("clamp", lambda n: min(n, 32))):
        check_integers(
            f"shf.l.{wrapping}.b32 %d0, %a0, %a1, %a2;",
            [a, b, c],
            np.uint32,
            lambda x, y, n, f=amount: ((y << 32 | x) << f(n)) >> 32,
        )
        check_integers(
            f"shf.r.{wrapping}.b32 %d0, %a0, %a1, %a2;",
            [a, b, c],
            np.uint32,
            lambda x, y, n, f=amount: (y << 32 | x) >> f(n),
        )


@pytest.mark.parametrize("table", [0xC0, 0x3C, 0xFC, 0x80, 0x96, 0xFE, 0xF8, 0xEA, 0x6A, 0xE2, 0xCA, 0x00, 0x1B, 0xD8, 0xFF])
def test_lop3(table: int, rng: np.random.Generator) -> None:
    a, b, c = (integers(rng, np.uint32, N) for _ in range(3))

    def reference(x: int, y: int, z: int) -> int:
        return sum((table >> ((x >> k & 1) << 2 | (y >> k & 1) << 1 | z >> k & 1) & 1) << k for k in range(32))

    check_integers(f"lop3.b32 %d0, %a0, %a1, %a2, {table};", [a, b, c], np.uint32, reference)


def prmt(x: int, y: int, selectors: list[int]) -> int:
    pair, out = y << 32 | x, 0
    for n, s in enumerate(selectors):
        byte = pair >> (8 * (s & 7)) & 0xFF
        out |= ((0xFF if byte >> 7 else 0) if s & 8 else byte) << (8 * n)
    return out


def test_prmt(rng: np.random.Generator) -> None:
    a, b, c = (integers(rng, np.uint32, N) for _ in range(3))
    nibbles = lambda s: [s >> (4 * n) & 15 for n in range(4)]  # noqa: E731
    check_integers("prmt.b32 %d0, %a0, %a1, %a2;", [a, b, c], np.uint32, lambda x, y, s: prmt(x, y, nibbles(s)))
    for constant in (0x5410, 0x7632, 0x3210, 0x9180, 0x0123):
        check_integers(f"prmt.b32 %d0, %a0, %a1, {constant};", [a, b], np.uint32, lambda x, y, s=constant: prmt(x, y, nibbles(s)))


# PTX ISA, prmt, selection by mode: source bytes of d.b3 d.b2 d.b1 d.b0 for selector 0..3.
PRMT_TABLE = {
    "f4e": ["3210", "4321", "5432", "6543"],
    "b4e": ["5670", "6701", "7012", "0123"],
    "rc8": ["0000", "1111", "2222", "3333"],
    "ecl": ["3210", "3211", "3222", "3333"],
    "ecr": ["0000", "1110", "2210", "3210"],
    "rc16": ["1010", "3232", "1010", "3232"],
}


@pytest.mark.parametrize("mode", PRMT_TABLE)
def test_prmt_modes(mode: str, rng: np.random.Generator) -> None:
    a, b, c = (integers(rng, np.uint32, N) for _ in range(3))
    check_integers(
        f"prmt.b32.{mode} %d0, %a0, %a1, %a2;",
        [a, b, c],
        np.uint32,
        lambda x, y, s: prmt(x, y, [int(k) for k in reversed(PRMT_TABLE[mode][s & 3])]),
    )


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
def test_bit_field_extract(type_: str, rng: np.random.Generator) -> None:
    dtype = TYPES[type_]
    msb = 8 * np.dtype(dtype).itemsize - 1
    a, position, length = integers(rng, dtype, N), integers(rng, np.uint32, N), integers(rng, np.uint32, N)
    if msb == 63:  # ptxas' own code for 64 bits does not take the low byte alone, as the ISA has it
        position, length = position & 0xFF, length & 0xFF
    position[::2] %= msb + 1
    length[::3] %= msb + 2

    def reference(x: int, b: int, c: int) -> int:
        pos, size = b & 0xFF, c & 0xFF
        sign = 0 if type_[0] == "u" or size == 0 else x >> min(pos + size - 1, msb) & 1
        return sum(((x >> (pos + i) & 1) if i < size and pos + i <= msb else sign) << i for i in range(msb + 1))

    check_integers(f"bfe.{type_} %d0, %a0, %a1, %a2;", [a, position, length], dtype, reference)
    check_integers(f"bfe.{type_} %d0, %a0, 5, 9;", [a], dtype, lambda x: reference(x, 5, 9))


@pytest.mark.parametrize("type_", ["b32", "b64"])
def test_bit_field_insert(type_: str, rng: np.random.Generator) -> None:
    dtype = UNSIGNED[type_]
    bits = 8 * np.dtype(dtype).itemsize
    a, b = integers(rng, dtype, N), integers(rng, dtype, N)
    position, length = integers(rng, np.uint32, N) % (bits + 8), integers(rng, np.uint32, N) % (bits + 8)

    def reference(x: int, y: int, pos: int, size: int) -> int:
        for i in range(min(size, max(0, bits - pos))):
            y = y & ~(1 << (pos + i)) | (x >> i & 1) << (pos + i)
        return y

    check_integers(
        f"bfi.{type_} %d0, %a0, %a1, %a2, %a3;", [a, b, position.astype(np.uint32), length.astype(np.uint32)], dtype, reference
    )


@pytest.mark.parametrize("type_", ["b32", "b64"])
def test_bit_counts(type_: str, rng: np.random.Generator) -> None:
    dtype = UNSIGNED[type_]
    bits = 8 * np.dtype(dtype).itemsize
    a = integers(rng, dtype, N)
    check_integers(f"popc.{type_} %d0, %a0;", [a], np.uint32, lambda x: x.bit_count())
    check_integers(f"clz.{type_} %d0, %a0;", [a], np.uint32, lambda x: bits - x.bit_length())
    check_integers(f"brev.{type_} %d0, %a0;", [a], dtype, lambda x: int(f"{x:0{bits}b}"[::-1], 2))


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
def test_find_leading_bit(type_: str, rng: np.random.Generator) -> None:
    dtype = TYPES[type_]
    msb = 8 * np.dtype(dtype).itemsize - 1
    a = integers(rng, dtype, N)
    top = lambda x: (~x if x < 0 else x).bit_length() - 1  # noqa: E731
    check_integers(f"bfind.{type_} %d0, %a0;", [a], np.uint32, top)
    check_integers(f"bfind.shiftamt.{type_} %d0, %a0;", [a], np.uint32, lambda x: -1 if top(x) < 0 else msb - top(x))


def test_find_nth_set(rng: np.random.Generator) -> None:
    mask = integers(rng, np.uint32, N)
    base = rng.integers(0, 32, N, dtype=np.uint32)
    offset = rng.integers(-6, 7, N, dtype=np.int32)

    def reference(m: int, b: int, o: int) -> int:
        if o == 0:
            return b if m >> b & 1 else -1
        count, pos = abs(o), b
        while 0 <= pos < 32:
            if m >> pos & 1:
                count -= 1
                if count == 0:
                    return pos
            pos += 1 if o > 0 else -1
        return -1

    check_integers("fns.b32 %d0, %a0, %a1, %a2;", [mask, base, offset], np.uint32, reference)


def bytes_of(x: int, signed: bool) -> list[int]:
    return [wrap(x >> (8 * k), np.int8 if signed else np.uint8) for k in range(4)]


def halves_of(x: int, signed: bool) -> list[int]:
    return [wrap(x >> (16 * k), np.int16 if signed else np.uint16) for k in range(2)]


@pytest.mark.parametrize(("ta", "tb"), [("u32", "u32"), ("s32", "u32"), ("s32", "s32")])
def test_dot_products_of_bytes(ta: str, tb: str, rng: np.random.Generator) -> None:
    a, b, c = (integers(rng, np.uint32, N) for _ in range(3))
    sa, sb = ta[0] == "s", tb[0] == "s"
    check_integers(
        f"dp4a.{ta}.{tb} %d0, %a0, %a1, %a2;",
        [a, b, c],
        np.uint32,
        lambda x, y, z: z + sum(p * q for p, q in zip(bytes_of(x, sa), bytes_of(y, sb), strict=True)),
    )
    for part, skip in (("lo", 0), ("hi", 2)):
        check_integers(
            f"dp2a.{part}.{ta}.{tb} %d0, %a0, %a1, %a2;",
            [a, b, c],
            np.uint32,
            lambda x, y, z, k=skip: z + sum(p * q for p, q in zip(halves_of(x, sa), bytes_of(y, sb)[k : k + 2], strict=True)),
        )


def test_masks_and_sign_extension(rng: np.random.Generator) -> None:
    a, b = integers(rng, np.uint32, N), integers(rng, np.uint32, N)
    a[::2] %= 40
    b[::2] %= 40

    def mask(position: int, width: int) -> int:
        return (((1 << width) - 1) << position) & 0xFFFFFFFF

    check_integers("bmsk.clamp.b32 %d0, %a0, %a1;", [a, b], np.uint32, lambda x, y: mask(min(x, 32), min(y, 32)))
    check_integers("bmsk.wrap.b32 %d0, %a0, %a1;", [a, b], np.uint32, lambda x, y: mask(x & 31, y & 31))

    def extend(x: int, n: int, signed: bool) -> int:
        if n == 0:
            return 0
        n = min(n, 32)
        value = x & ((1 << n) - 1)
        return value - (1 << n) if signed and value >> (n - 1) else value

    check_integers("szext.clamp.s32 %d0, %a0, %a1;", [a, b], np.int32, lambda x, y: extend(x, y, True))
    check_integers("szext.wrap.u32 %d0, %a0, %a1;", [a, b], np.uint32, lambda x, y: extend(x, y & 31, False))


def test_packed_16_bit_extremes(rng: np.random.Generator) -> None:
    a, b = integers(rng, np.uint32, N), integers(rng, np.uint32, N)
    for kind, dtype in (("u16x2", np.uint16), ("s16x2", np.int16)):
        (d,) = apply(f"max.{kind} %d0, %a0, %a1;", [a, b], [np.uint32])
        assert (d.view(dtype) == np.maximum(a.view(dtype), b.view(dtype))).all()


def test_source_may_be_destination(rng: np.random.Generator) -> None:
    a, b = integers(rng, np.uint32, N), integers(rng, np.uint32, N)
    body = "mad.lo.u32 %a0, %a0, %a1, %a0; prmt.b32 %a0, %a0, %a0, 0x0123; bfi.b32 %a1, %a0, %a1, 4, 8; mov.b32 %d0, %a1;"
    check_integers(
        body,
        [a, b],
        np.uint32,
        lambda x, y: y & ~0xFF0 | (int.from_bytes(wrap(x * y + x, np.uint32).to_bytes(4, "little"), "big") & 0xFF) << 4,
    )


def test_a_sum_that_sets_no_carry_leaves_it_to_the_lanes_where_its_predicate_holds_not(rng: np.random.Generator) -> None:
    a, b = integers(rng, np.uint32, N), integers(rng, np.uint32, N)
    body = "setp.lt.s32 %p1, %a1, 0; add.cc.u32 %d0, %a0, %a1; @%p1 addc.u32 %d0, %a0, %a0; addc.u32 %d1, 0, 0;"
    _, carry = apply(body, [a, b], [np.uint32, np.uint32], ".reg .pred %p1;")
    assert carry.tolist() == [int(x) + int(y) >> 32 for x, y in zip(a, b, strict=True)]
