"""Correct rounding where NumPy has no instruction for it: fused multiply-add, and narrowing to half types.

The tool is rounding to odd (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008): a sum that is
inexact gets an odd last bit, so that rounding it once more to at most half the precision less two bits is correct.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from ...text.types import Array

_MIDPOINT_MASK = np.array((1 << 29) - 1, np.uint64)
_MIDPOINT = np.array(1 << 28, np.uint64)
_TINY = np.array(2.0**-126)
_ONE = np.array(1, np.uint64)


def fused_f32(a: Array, b: Array, c: Array, d: Array, work: tuple[Array, Array, Array, Array], tiny: bool) -> None:
    """d = a * b + c rounded once (float32, nearest). `work`: three float64 arrays and a boolean one, shaped like d.

    The product is exact in float64. The sum is rounded to float64 and then to float32; that goes wrong only where the
    float64 lies midway between two float32 (or the result is subnormal, looked for if `tiny`): there it is odd-rounded.
    """
    product, addend, total, flag = work
    np.copyto(product, a)
    np.copyto(addend, b)
    np.multiply(product, addend, product)
    np.copyto(addend, c)
    np.add(product, addend, total)
    bits = total.view(np.uint64)
    np.equal(np.bitwise_and(bits, _MIDPOINT_MASK), _MIDPOINT, flag)
    if tiny:
        np.logical_or(flag, np.abs(total) < _TINY, flag)
    if np.count_nonzero(flag):
        at = np.flatnonzero(flag)
        total[at] = odd_sum(product[at], addend[at])
    np.copyto(d, total, casting="same_kind")


def odd_sum(x: Array, y: Array) -> Array:
    """x + y of float64 arrays, rounded to odd."""
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    inexact = (error != 0) & np.isfinite(total) & np.isfinite(error)
    even = (total.view(np.uint64) & _ONE) == 0
    toward = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(inexact & even, toward, total)


def fused_f64(a: Array, b: Array, c: Array, d: Array) -> None:
    """d = a * b + c rounded once (float64, nearest), exact in every range: the rare hard lanes use rationals."""
    a, b, c = (np.broadcast_to(x, d.shape) for x in (a, b, c))
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
    for at in np.flatnonzero(hard):
        exact = Fraction(float(a[at])) * Fraction(float(b[at])) + Fraction(float(c[at]))
        if exact:
            try:
                result[at] = exact.numerator / exact.denominator
            except OverflowError:
                result[at] = np.inf if exact > 0 else -np.inf
        else:
            result[at] = plain[at]
    # An exact zero takes its sign from the plain expression.
    d[...] = np.where(result == 0, np.where(plain == 0, plain, result), result)


def product(a: Array, b: Array) -> tuple[Array, Array]:
    """a * b of float64 arrays far from the ends of their range, and what it lacks of the exact product (Veltkamp, Dekker)."""
    split = 134217729.0  # 2**27 + 1
    ah, bh = (split * x - (split * x - x) for x in (a, b))
    al, bl = a - ah, b - bh
    high = a * b
    return high, ((ah * bh - high) + ah * bl + al * bh) + al * bl


def inverse_root(a: Array) -> Array:
    """1 / sqrt(a) of float64, rounded to nearest: one Newton step from the rounded quotient, its residual exact."""
    fraction, exponent = np.frexp(a)
    fraction = np.where(exponent % 2, fraction * 2, fraction)
    root = 1 / np.sqrt(fraction)
    square, lacks = product(root, root)
    whole, less = product(fraction, square)
    step = root * (((1 - whole) - less - fraction * lacks) / 2)
    return np.where(np.isfinite(step), np.ldexp(root + step, -(exponent // 2)), 1 / np.sqrt(a))


def fused_odd(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of half-precision values (float32 or float16 arrays) as float64, rounded to odd."""
    return odd_sum(a.astype(np.float64) * b.astype(np.float64), np.asarray(c, np.float64))


def odd_float32(x: Array) -> Array:
    """float64 to float32, rounded to odd: to be narrowed further."""
    near = x.astype(np.float32)
    wide = near.astype(np.float64)
    inexact = (wide != x) & np.isfinite(x) & np.isfinite(near)
    even = (near.view(np.uint32) & np.uint32(1)) == 0
    toward = np.nextafter(near, np.where(x > wide, np.float32(np.inf), np.float32(-np.inf)))
    overflow = np.isinf(near) & np.isfinite(x)
    near = np.where(inexact & even, toward, near)
    return np.where(overflow, np.copysign(np.float32(3.4028235e38), near), near)


def bfloat_bits(x: Array) -> Array:
    """float32 to bfloat16 bits (uint16), nearest even; NaN is the canonical 0x7fff."""
    bits = x.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def bfloat_value(bits: Array) -> Array:
    """bfloat16 bits (uint16) to float32."""
    return (np.asarray(bits, np.uint32) << np.uint32(16)).view(np.float32)


def half_bits(x: Array) -> Array:
    """float32 or float64 to float16 bits, nearest even; NaN is the canonical 0x7fff."""
    bits = x.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits)


def directed(x: Array, bits: Array, value: Array, rounding: str) -> Array:
    """From half `bits` (uint16) rounded to nearest, with their `value`, to the half that `rounding` asks for.

    Magnitude and bits grow together, so that the neighbour is one bit pattern away.
    """
    up = np.uint16(1)
    if rounding == "rz":
        return np.where(np.abs(value) > np.abs(x), bits - up, bits)
    wrong = value > x if rounding == "rm" else value < x
    # Downwards a positive value shrinks and a negative one grows; upwards the other way round.
    grows = np.signbit(value) == (rounding == "rm")
    return np.where(wrong, np.where(grows, bits + up, bits - up), bits)
