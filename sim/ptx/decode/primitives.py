"""Primitives that expressions of the table name: on floating-point numbers (roundings that NumPy lacks, half types, conversions),
on integers, and on words of bits.

NumPy has no fused multiply-add, and no correct narrowing to half types. Here they use rounding to odd (Boldo and Melquiond,
"Emulation of FMA and correctly rounded sums", 2008): a sum that is inexact gets an odd last bit, so that rounding it once more to
at most half the precision less two bits is correct. Sums, products and quotients of halves in float32 round correctly twice (24
>= 2 * 11 + 2); fused operations are made in float64 with rounding to odd.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from ..text.syntax import TYPES, Array, PtxType
from .registry import Frame, Thunk
from .table_rows import Case, primitive, writer

# -- sums, halves -----------------------------------------------------------------------------------------------------------

_MIDPOINT_MASK = np.array((1 << 29) - 1, np.uint64)
_MIDPOINT = np.array(1 << 28, np.uint64)
_TINY = np.array(2.0**-126)
_ONE = np.array(1, np.uint64)


def lent(frame: Frame, name: str, shape: tuple[int, ...], *dtypes: Any) -> list[Array]:
    """Lends arrays for an instruction to work in."""
    found: list[Array] = frame.lend((name, shape, *dtypes), lambda: [np.empty(shape, dtype) for dtype in dtypes])
    return found


@writer
def fused_f32(frame: Frame, d: Array, a: Array, b: Array, c: Array, flush: int) -> Thunk:
    """Returns the thunk d = a * b + c rounded once (float32, nearest).

    The product is exact in float64. The sum is rounded to float64 and then to float32; that goes wrong only where the
    float64 lies midway between two float32 (or the result is subnormal, unless these `flush`): there it is odd-rounded.
    """
    product, addend, total, flag = lent(frame, "fma", d.shape, np.float64, np.float64, np.float64, bool)
    bits = total.view(np.uint64)

    def run() -> None:
        np.copyto(product, a)
        np.copyto(addend, b)
        np.multiply(product, addend, product)
        np.copyto(addend, c)
        np.add(product, addend, total)
        np.equal(np.bitwise_and(bits, _MIDPOINT_MASK), _MIDPOINT, flag)
        if not flush:
            np.logical_or(flag, np.abs(total) < _TINY, flag)
        if np.count_nonzero(flag):
            at = np.flatnonzero(flag)
            total[at] = odd_sum(product[at], addend[at])
        np.copyto(d, total, casting="same_kind")

    return run


def odd_sum(x: Array, y: Array) -> Array:
    """Returns x + y of float64 arrays, rounded to odd."""
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    inexact = (error != 0) & np.isfinite(total) & np.isfinite(error)
    even = (total.view(np.uint64) & _ONE) == 0
    toward = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(inexact & even, toward, total)


@primitive
def fused_f64(a: Array, b: Array, c: Array) -> Array:
    """Returns a * b + c rounded once (float64, nearest), exact in every range: the rare hard lanes use rationals."""
    a, b, c = np.broadcast_arrays(a, b, c)
    plain = a * b + c
    high, low = product(a, b)
    # Boldo and Melquiond: exact product high + low; sum the parts, the smaller pair to odd.
    th = c + low
    part = th - c
    tl = (c - (th - part)) + (low - part)
    vh = high + th
    part = vh - high
    vl = (high - (vh - part)) + (th - part)
    total = vh + odd_sum(tl, vl)
    # Beyond these magnitudes the splitting overflows or the errors are subnormal.
    size = np.maximum(np.maximum(np.abs(a), np.abs(b)), np.maximum(np.abs(c), np.abs(high)))
    small = (np.abs(high) < 1e-250) & (high != 0) | (np.abs(total) < 1e-250) & (a != 0) & (b != 0)
    hard = ((size > 1e150) | small | ((high == 0) & (a != 0) & (b != 0))) & np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    result = np.where(np.isfinite(a) & np.isfinite(b) & np.isfinite(c), total, plain)
    # An exact zero takes its sign from the plain expression; a number too small for the format keeps its own.
    result = np.where((result == 0) & (plain == 0), plain, result)
    for at in np.flatnonzero(hard):
        exact = Fraction(float(a[at])) * Fraction(float(b[at])) + Fraction(float(c[at]))
        if exact:
            try:
                result[at] = exact.numerator / exact.denominator
            except OverflowError:
                result[at] = np.inf if exact > 0 else -np.inf
        else:
            result[at] = plain[at]
    return result


def product(a: Array, b: Array) -> tuple[Array, Array]:
    """Returns a * b of float64 arrays far from the ends of their range, and its rounding error (Veltkamp, Dekker)."""
    split = 134217729.0  # 2**27 + 1
    ah, bh = (split * x - (split * x - x) for x in (a, b))
    al, bl = a - ah, b - bh
    high = a * b
    return high, ((ah * bh - high) + ah * bl + al * bh) + al * bl


def inverse_root(a: Array) -> Array:
    """Returns 1 / sqrt(a) of float64, rounded to nearest: one Newton step from the rounded quotient, its residual exact."""
    fraction, exponent = np.frexp(a)
    fraction = np.where(exponent % 2, fraction * 2, fraction)
    root = 1 / np.sqrt(fraction)
    square, lacks = product(root, root)
    whole, less = product(fraction, square)
    step = root * (((1 - whole) - less - fraction * lacks) / 2)
    return np.where(np.isfinite(step), np.ldexp(root + step, -(exponent // 2)), 1 / np.sqrt(a))


@primitive
def fused_odd(a: Array, b: Array, c: Array) -> Array:
    """Returns a * b + c of half-precision values (float32 or float16 arrays) as float64, rounded to odd."""
    return odd_sum(a.astype(np.float64) * b.astype(np.float64), np.asarray(c, np.float64))


def odd_float32(x: Array) -> Array:
    """Converts float64 to float32, rounded to odd, for further narrowing."""
    near = x.astype(np.float32)
    wide = near.astype(np.float64)
    inexact = (wide != x) & np.isfinite(x) & np.isfinite(near)
    even = (near.view(np.uint32) & np.uint32(1)) == 0
    toward = np.nextafter(near, np.where(x > wide, np.float32(np.inf), np.float32(-np.inf)))
    overflow = np.isinf(near) & np.isfinite(x)
    near = np.where(inexact & even, toward, near)
    return np.where(overflow, np.copysign(np.float32(3.4028235e38), near), near)


def bfloat_bits(x: Array) -> Array:
    """Converts float32 to bfloat16 bits (uint16), nearest even; NaN is the canonical 0x7fff."""
    bits = x.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


@primitive
def bfloat_value(bits: Array) -> Array:
    """Converts bfloat16 bits (uint16) to float32."""
    return (np.asarray(bits, np.uint32) << np.uint32(16)).view(np.float32)


def half_bits(x: Array) -> Array:
    """Converts float32 or float64 to float16 bits, nearest even; NaN is the canonical 0x7fff."""
    bits = x.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits)


def directed(x: Array, bits: Array, value: Array, rounding: str) -> Array:
    """Returns the half that `rounding` asks for, given half `bits` (uint16) rounded to nearest, and their `value`.

    Magnitude and bits grow together, so that the neighbour is one bit pattern away.
    """
    up = np.uint16(1)
    if rounding == "rz":
        return np.where(np.abs(value) > np.abs(x), bits - up, bits)
    wrong = value > x if rounding == "rm" else value < x
    # Downwards a positive value shrinks and a negative one grows; upwards the other way round.
    grows = np.signbit(value) == (rounding == "rm")
    return np.where(wrong, np.where(grows, bits + up, bits - up), bits)


def wide(x: Array, type_: PtxType) -> Array:
    """Returns half values (float16, or bfloat16 bits) as float32."""
    return bfloat_value(x) if type_.name.startswith("b") else x.astype(np.float32)


def narrow(value: Array, type_: PtxType) -> Array:
    """Converts float32 (or odd-rounded float64) to the array that stores the half type."""
    return bf16_bits(value, "rn") if type_.name.startswith("b") else f16_bits(value, "rn")


@primitive
def f16_bits(value: Array, rounding: str) -> Array:
    """Converts float32 or float64 to float16."""
    bits = half_bits(value)
    if rounding != "rn":
        bits = directed(value, bits, bits.view(np.float16).astype(np.float64), rounding)
    return bits.view(np.float16)


@primitive
def bf16_bits(value: Array, rounding: str) -> Array:
    """Converts float32 or float64 to the bits of bfloat16."""
    bits = bfloat_bits(odd_float32(value) if value.dtype == np.float64 else np.asarray(value))
    return bits if rounding == "rn" else directed(value, bits, bfloat_value(bits).astype(np.float64), rounding)


@primitive
def flushed(x: Array, element: str) -> Array:
    """.ftz of halves: subnormals become zeros of their sign."""
    tiny = np.float32(2.0**-14 if element == "f16" else 2.0**-126)
    return np.where(np.abs(x) < tiny, np.copysign(x.dtype.type(0), x), x)


@writer
def saturated(_: Frame, d: Array, x: Array) -> Thunk:
    """.sat: the thunk that limits to [0, 1]; NaN becomes +0."""
    zero, one = np.array(0, d.dtype), np.array(1, d.dtype)

    def run() -> None:
        np.fmax(x, zero, out=d)
        np.minimum(d, one, out=d)
        np.absolute(d, out=d)

    return run


@writer
def extreme(frame: Frame, d: Array, a: Array, b: Array, function: str) -> Thunk:
    """Returns the thunk of min and max by one of NumPy's functions, with -0 < +0 and canonical NaN."""
    fn: np.ufunc = getattr(np, function)
    zero, one = np.array(0, d.dtype), np.array(1, d.dtype)
    merge = np.bitwise_and if "max" in function else np.bitwise_or
    bits = np.dtype(f"u{d.itemsize}")
    canonical = np.array({4: 0x7FFFFFFF, 8: 0x7FF8000000000000}[d.itemsize], bits).view(d.dtype)
    flag, found = lent(frame, "extreme", d.shape, bool, d.dtype)

    def run() -> None:
        fn(a, b, out=found)
        np.equal(found, zero, flag)
        if np.count_nonzero(flag):
            # Equal values have equal bits except for the zeros; there the sign bits decide.
            x, y = np.broadcast_to(a, d.shape), np.broadcast_to(b, d.shape)
            both = flag & (x == y)
            merged = merge(np.ascontiguousarray(x).view(bits), np.ascontiguousarray(y).view(bits)).view(d.dtype)
            np.copyto(found, merged, where=both)
        np.not_equal(found, found, flag)
        if np.count_nonzero(flag):
            np.copyto(found, canonical, where=flag)
        np.multiply(found, one, d)  # under .ftz a product flushes

    return run


@primitive
def signed(x: Array, *factors: Array) -> Array:
    """Gives numbers the sign of the product of others."""
    return np.where(np.logical_xor.reduce(np.broadcast_arrays(*map(np.signbit, factors))), -x, x)


@primitive
def subnormal(a: Array) -> Array:
    size = np.abs(a)
    return (size < np.finfo(a.dtype).smallest_normal) & (size > 0)


# -- sums of products ---------------------------------------------------------------------------------------------------

BEHIND = 25
"""Binary places that an addend keeps behind the unit of the largest exponent."""
NEVER = -(1 << 12)
"""The exponent of zero, which is never the largest; if all addends are 0, `LOWEST` is: it is below that of any product."""
LOWEST = -500
DROPPED = ~((1 << 29) - 1)
"""Keeps the bits of a float64 that a float32 has."""

AT_ONCE = 1 << 16
"""Products that are computed together: they stay in a cache."""


def exponents(x: Array) -> Array:
    """Returns the exponents of numbers as int16: 1 for those from 1 to 2."""
    return np.where(x == 0, NEVER, np.frexp(x)[1]).astype(np.int16)


def aligned_sums(a: Array, b: Array, c: Array, result: str) -> Array:
    """Returns c + the sum over k of a[k, i] b[k, j] as one instruction of an H100 makes it: of type `result`, held as float32.

    a: (k, i, ...), b: (k, j, ...), c: (i, j, ...), all float32. All k products, exact, and c are aligned at the largest exponent
    among them, where a product's exponent is the sum of its factors' exponents (its mantissa may be 2 or more); each is truncated
    to 25 bits behind that exponent's unit; the sum of these is exact, and is truncated to float32, or rounded to the nearest
    float16.

    Recorded on an H100 (sm_90) on 2026-11-27 and reproduced in every bit: mma m16n8k16 and m16n8k8 of f16 and bf16,
    m16n8k8 and m16n8k4 of tf32, wgmma m64n8k16 of f16 and bf16 with float32 sums, mma m16n8k16 with float16 sums (these would be
    the same with more than 25 bits); tests/h100.npz has some. Not recorded, and here as IEEE arithmetic has it: NaN,
    infinities, a float32 sum that overflows, subnormal factors and results, and the sign of a sum that is 0.
    """
    out = np.empty(c.shape, np.float32)
    a_exponents, b_exponents = exponents(a), exponents(b)
    a, b = a.astype(np.float64), b.astype(np.float64)
    rows = max(1, AT_ONCE // (a.shape[0] * c[0].size))
    for first in range(0, len(c), rows):
        here = slice(first, first + rows)
        addend = c[here].astype(np.float64)
        # A fraction of frexp is half of a mantissa, a product of two a quarter.
        largest = (a_exponents[:, here, None] + b_exponents[:, None]).max(axis=0) - 2
        largest = np.maximum(np.maximum(largest, exponents(addend) - 1), LOWEST).astype(np.int64)
        unit = (1023 + BEHIND - largest << 52).view(np.float64)  # its inverse: 2**(BEHIND - largest)
        products = a[:, here, None] * b[:, None]
        np.multiply(products, unit, products)
        np.trunc(products, products)
        total = (products.sum(axis=0) + np.trunc(addend * unit)) / unit
        out[here] = total.astype(np.float16) if result == "f16" else (total.view(np.int64) & DROPPED).view(np.float64)
    return out


# -- conversions --------------------------------------------------------------------------------------------------------------


@primitive
def limited(x: Array, to: str, source: str) -> Array:
    """Converts whole numbers of the type `source`, as float64, to integers: out of range clamps.

    NaN becomes 0 by the conversions of 32 bits, and the integer whose only bit is the highest by those from .f64 or to 64 bits
    (PTX ISA, cvt, notes; an H100 does so).
    """
    dtype = TYPES[to].dtype
    info = np.iinfo(dtype)
    # The largest float64 that fits: for 64-bit targets the limit itself is not representable.
    top = float(np.nextafter(2.0 ** (info.bits - (info.min < 0)), 0)) if info.bits == 64 else float(info.max)
    value = np.clip(np.where(np.isnan(x), 0.0, x), float(info.min), top).astype(dtype)
    if info.bits == 64:
        value = np.where(x > top, dtype.type(info.max), value)
    if info.bits == 64 or source == "f64":
        value = np.where(np.isnan(x), np.array(1 << (info.bits - 1), f"u{dtype.itemsize}").view(dtype), value)
    return value


@partial(writer, width=2)
def interleave(_: Frame, d: Array, low: Array, high: Array) -> Thunk:
    """Returns the thunk that makes pairs."""
    pairs = d.reshape(-1, 2)

    def run() -> None:
        pairs[:, 0] = low
        pairs[:, 1] = high

    return run


@primitive
def to_tf32(a: Array, direction: str) -> Array:
    """Rounds float32 to 10 bits of fraction: rna rounds ties away from zero, rn to even."""
    bits = a.view(np.uint32)
    if direction == "rz":
        rounded = bits
    elif direction == "rn":
        rounded = bits + (np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1)))
    else:
        rounded = bits + np.uint32(0x1000)
    return np.where(np.isfinite(a), rounded & np.uint32(0xFFFFE000), np.where(np.isnan(a), np.uint32(0x7FFFFFFF), bits))


EIGHTS = {"e4m3x2": ("float8_e4m3fn", 448.0), "e5m2x2": ("float8_e5m2", 57344.0)}
"""Pairs of 8-bit floats: their name in ml_dtypes, largest number."""


def eight_dtype(name: str) -> Any:
    """Returns the dtype of one of a pair. ml_dtypes is imported here, since nothing else of the machine needs it."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(f"8-bit floats need ml_dtypes ({error}): pip install ml_dtypes", name="ml_dtypes") from error
    return getattr(ml_dtypes, EIGHTS[name][0])


@primitive
def eight(x: Array, name: str, relu: int) -> Array:
    """cvt.rn.satfinite to 8-bit floats: too large values become the largest number, NaN 0x7f."""
    top = EIGHTS[name][1]
    value = np.clip(x.astype(np.float32), 0 if relu else -top, top)
    bits = value.astype(eight_dtype(name)).view(np.uint8)
    return np.where(np.isnan(value), np.uint8(0x7F), bits & np.uint8(0x7F) if relu else bits)


@primitive
def from_eight(bits: Array, name: str, relu: int) -> Array:
    """Converts 8-bit floats to float16, which is exact."""
    table = np.arange(256, dtype=np.uint8).view(eight_dtype(name)).astype(np.float16)
    table[np.isnan(table)] = np.uint16(0x7FFF).view(np.float16)
    return np.where(table < 0, np.float16(0), table)[bits] if relu else table[bits]


# -- integers and bits ---------------------------------------------------------------------------------------------------

WIDER: dict[tuple[int, str], Any] = {(2, "i"): np.int32, (2, "u"): np.uint32, (4, "i"): np.int64, (4, "u"): np.uint64}


@primitive
def high_product(a: Array, b: Array) -> Array:
    """Returns the upper half of the full product of two 16-, 32- or 64-bit integer arrays."""
    if a.itemsize < 8:
        wide = WIDER[a.itemsize, a.dtype.kind]
        product = a.astype(wide) * b.astype(wide) >> wide(8 * a.itemsize)
        return product.astype(a.dtype)
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.view(np.uint64), b.view(np.uint64)
    middle = (x >> shift) * (y & low) + ((x & low) * (y & low) >> shift)
    other = (x & low) * (y >> shift) + (middle & low)
    high = (x >> shift) * (y >> shift) + (middle >> shift) + (other >> shift)
    if a.dtype.kind == "i":
        # Signed from unsigned: subtract the other factor for each factor that is negative.
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)


@primitive
def quotient(a: Array, b: Array) -> Array:
    """Divides, truncating; division by zero gives all ones, as on hardware (the ISA leaves it open)."""
    zero = b == 0
    divisor = np.where(zero, b.dtype.type(1), b)
    return np.where(zero, ~b.dtype.type(0), np.floor_divide(a - np.fmod(a, divisor), divisor))


@primitive
def remainder(a: Array, b: Array) -> Array:
    """Returns a - (a / b) * b with the truncating quotient, so that its sign is a's; by zero: the dividend."""
    zero = b == 0
    return np.where(zero, a, np.fmod(a, np.where(zero, b.dtype.type(1), b)))


def pieces(x: Array, kind: str) -> Array:
    """Returns the parts of words, one row a word, of the dtype `kind`."""
    return np.ascontiguousarray(x).view(kind).reshape(-1, 4 // np.dtype(kind).itemsize)


@primitive
def dot(a: Array, b: Array, left: str, right: str, first: int) -> Array:
    """Returns the sum of the products of the parts of a with as many bytes of b from byte `first` on."""
    x = pieces(a, left).astype(np.int64)
    return (x * pieces(b, right)[:, first : first + x.shape[1]]).sum(axis=1)


@primitive
def differences_of_parts(a: Array, b: Array, left: str, right: str) -> Array:
    """Returns the absolute differences of pairs of parts (bytes or halves), as such parts."""
    difference = np.abs(pieces(a, left).astype(np.int64) - pieces(b, right))
    return difference.astype(f"u{left[1]}").view(np.uint32).reshape(-1)


@primitive
def sum_of_parts(x: Array, part: str) -> Array:
    return pieces(x, part).sum(axis=1)


@writer
def select(frame: Frame, d: Array, a: Array | int, b: Array, p: Array) -> Thunk:
    """Returns the thunk d = a where p holds, else b."""
    if not (np.ndim(a) or b.ndim):
        # Two constants: pick from a table of both.
        table = np.array([b, a], d.dtype)
        return lambda: table.take(p.view(np.uint8), 0, d, "clip")
    chosen = frame.temp("chosen", d.shape, d.dtype)

    def run() -> None:
        np.copyto(chosen, b)
        np.copyto(chosen, a, where=p)
        np.copyto(d, chosen)

    return run


USUAL = {
    0xC0: "a & b",
    0x3C: "a ^ b",
    0xFC: "a | b",
    0x80: "a & b & c",
    0x96: "a ^ b ^ c",
    0xFE: "a | b | c",
    0xF8: "b & c | a",
    0xEA: "a & b | c",
    0x6A: "a & b ^ c",
    0xE2: "(a ^ c) & b ^ c",
    0xCA: "(b ^ c) & a ^ c",
}
"""Tables of lop3 as one or two operations."""


def lookup(case: Case) -> str:
    """Returns the expression of lop3: bit 4a + 2b + c of the table, for each bit."""
    table = case.constant() & 0xFF
    ones = [row for row in range(8) if table >> row & 1]
    terms = [" & ".join("~" * (not row & bit) + name for name, bit in (("a", 4), ("b", 2), ("c", 1))) for row in ones]
    text = USUAL.get(table) or " | ".join(terms) or "a & ~a & b & c"
    case.unused = int("c" not in text)
    return text


PRMT_MODES = {
    "f4e": lambda i, n: (i + n) & 7,
    "b4e": lambda i, n: (i - n) & 7,
    "rc8": lambda i, n: i,
    "ecl": lambda i, n: max(i, n),
    "ecr": lambda i, n: min(i, n),
    "rc16": lambda i, n: 2 * (i & 1) + (n & 1),
}
"""Source byte of result byte n, from the two low bits i of the selector (PTX ISA, prmt, table of modes)."""


@primitive
def selector(c: Array, mode: str) -> Array:
    """Returns the selector of the plain form of prmt."""
    table = np.array([sum(PRMT_MODES[mode](s, n) << (4 * n) for n in range(4)) for s in range(4)], np.uint32)
    return table[c & np.uint32(3)]


@writer
def permute(frame: Frame, d: Array, a: Array, b: Array, c: Array) -> Thunk:
    """prmt without a mode: each selector nibble picks a byte of b:a; its top bit replicates that byte's sign."""
    if c.ndim == 0 and not int(c) & 0x8888 and a.ndim and b.ndim:
        chosen = [(int(c) >> (4 * n)) & 7 for n in range(4)]
        pair, out = np.empty((2, len(d)), np.uint32), np.empty(len(d), np.uint32)
        source = pair.view(np.uint8).reshape(2, -1, 4)
        target = out.view(np.uint8).reshape(-1, 4)

        def fixed() -> None:
            pair[0], pair[1] = a, b
            for n, byte in enumerate(chosen):
                target[:, n] = source[byte >> 2, :, byte & 3]
            d[...] = out

        return fixed

    def run() -> None:
        pair = (b.astype(np.uint64) << np.uint64(32)) | a
        total = np.zeros(d.shape, np.uint32)
        for n in range(4):
            nibble = (c >> np.uint32(4 * n)) & np.uint32(15)
            byte = (pair >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(0xFF)
            sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            byte = np.where(nibble & np.uint32(8), sign, byte)
            total |= byte.astype(np.uint32) << np.uint32(8 * n)
        d[...] = total

    return run


@primitive
def top_bit(a: Array) -> Array:
    """Returns the number of the highest set bit, -1 for zero (exact: halves are below 2**53)."""
    high = (a.astype(np.uint64) >> np.uint64(32)).astype(np.float64)
    low = (a.astype(np.uint64) & np.uint64(0xFFFFFFFF)).astype(np.float64)
    found = np.where(high > 0, np.frexp(high)[1] + 32, np.frexp(low)[1])
    return found.astype(np.int64) - 1


@primitive
def reversed_bits(a: Array) -> Array:
    bits = np.unpackbits(np.atleast_1d(a).byteswap().view(np.uint8), bitorder="little").reshape(-1, 8)[:, ::-1]
    return np.packbits(bits, axis=1, bitorder="little").reshape(-1).view(a.dtype)


@primitive
def nth_set_bit(mask: Array, base: Array, offset: Array) -> Array:
    """fns: the |offset|-th set bit from `base`, upwards for a positive offset; offset 0 is the bit at base itself."""
    bits = (np.atleast_1d(mask)[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    place = np.arange(32)
    start, count = (np.atleast_1d(x).astype(np.int64)[:, None] for x in (base, offset))
    upward = np.cumsum(bits * (place >= start), axis=1) * (bits * (place >= start))
    masked = bits * (place <= start)
    downward = np.cumsum(masked[:, ::-1], axis=1)[:, ::-1] * masked
    rank = np.where(count > 0, upward, np.where(count < 0, downward, bits * (place == start)))
    hit = (rank == np.where(count == 0, 1, np.abs(count))) & (rank > 0)
    return np.where(hit.any(axis=1), hit.argmax(axis=1), 0xFFFFFFFF).astype(np.uint32)
