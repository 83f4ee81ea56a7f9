"""Rounding: the host's floating-point environment, roundings that NumPy lacks, arithmetic in half types.

The floating-point environment has the rounding direction and the flushing of subnormals. PTX has both as instruction modifiers
(.rn/.rz/.rm/.rp, .ftz). The host's vector unit has them as control bits of the thread, and NumPy's loops obey them, so `.ftz` and
directed rounding cost nothing per lane. The bits are set through `fesetenv` of the C library, whose `fenv_t` holds them on the
platforms below; elsewhere only the default environment exists: subnormals are kept, and directed rounding is refused.

NumPy has no fused multiply-add, and no correct narrowing to half types. Here they use rounding to odd (Boldo and Melquiond,
"Emulation of FMA and correctly rounded sums", 2008): a sum that is inexact gets an odd last bit, so that rounding it once more to
at most half the precision less two bits is correct.

For arithmetic in float16, bfloat16 and their packed pairs (PTX ISA, "Half Precision Floating Point Instructions") values are
widened to float32, where sums, products and quotients of halves round correctly twice (24 >= 2 * 11 + 2), or for fused
operations to float64 with rounding to odd. A packed register is an array of two elements a lane.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import numpy as np

from ...text.syntax import Array, PtxError, PtxType
from ..registry import Frame, Thunk
from .expressions import primitive, writer

NEAREST, DOWN, UP, ZERO = 0, 1, 2, 3
ROUNDING = {"rn": NEAREST, "rna": NEAREST, "rm": DOWN, "rp": UP, "rz": ZERO}


def mode(rounding: int = NEAREST, flush: bool = False) -> int:
    """Returns the code of an environment: the index in `Environment.setters`."""
    return rounding * 2 + flush


KEEP = mode()
"""Round to nearest, keep subnormals: the environment that everything outside of the run loop expects."""


def _layout() -> tuple[int, int, int, tuple[int, int, int, int], int] | None:
    """Returns (offset of the control word, its bytes, flush bits, rounding bits by direction, mask) inside fenv_t."""
    machine, system = platform.machine(), platform.system()
    if system == "Linux" and machine == "x86_64":  # MXCSR: FTZ, DAZ; RC in bits 13-14
        return 28, 4, 0x8040, (0, 1 << 13, 2 << 13, 3 << 13), 0x8040 | 3 << 13
    if machine in ("aarch64", "arm64"):  # FPCR: FZ; RMode in bits 22-23 counts nearest, up, down, zero
        offset, width = (0, 4) if system == "Linux" else (8, 8)
        return offset, width, 1 << 24, (0, 2 << 22, 1 << 22, 3 << 22), 1 << 24 | 3 << 22
    return None


FLUSH = mode(NEAREST, True)
"""Round to nearest, flush subnormals: the environment of `.ftz`."""


class Environment:
    """`setters[mode]()` switches the calling thread; `native`: True if modes other than `KEEP` exist here."""

    def __init__(self) -> None:
        self.setters: dict[int, Callable[[], object]] = {KEEP: _nothing}
        self.native = False
        layout = _layout()
        if layout is None:
            return
        offset, width, flush_bits, rounding_bits, mask = layout
        libm = ctypes.CDLL(ctypes.util.find_library("m") or None)
        base = (ctypes.c_ubyte * 64)()
        libm.fegetenv(base)
        control = int.from_bytes(bytes(base)[offset : offset + width], "little") & ~mask
        setters: dict[int, Callable[[], object]] = {}
        for rounding in (NEAREST, DOWN, UP, ZERO):
            for flush in (False, True):
                env = (ctypes.c_ubyte * 64).from_buffer_copy(base)
                word = control | rounding_bits[rounding] | (flush_bits if flush else 0)
                env[offset : offset + width] = list(word.to_bytes(width, "little"))
                setters[mode(rounding, flush)] = partial(libm.fesetenv, env)
        tiny = np.full(8, 1e-39, np.float32)
        setters[FLUSH]()
        self.native = not (tiny * np.float32(1)).any()
        setters[KEEP]()
        if self.native:
            self.setters = setters

    def setter(self, code: int) -> Callable[[], object]:
        """Returns the switch to environment `code`; without host support flushing is dropped, directed rounding refused."""
        if code in self.setters:
            return self.setters[code]
        if code == FLUSH:
            return _nothing
        raise PtxError("directed rounding (.rz, .rm, .rp) needs Linux on x86-64, or an ARM64 host")


def _nothing() -> None:
    pass


ENVIRONMENT = Environment()


_MIDPOINT_MASK = np.array((1 << 29) - 1, np.uint64)
_MIDPOINT = np.array(1 << 28, np.uint64)
_TINY = np.array(2.0**-126)
_ONE = np.array(1, np.uint64)


@writer
def fused_f32(frame: Frame, d: Array, a: Array, b: Array, c: Array, flush: int) -> Thunk:
    """Returns the thunk d = a * b + c rounded once (float32, nearest).

    The product is exact in float64. The sum is rounded to float64 and then to float32; that goes wrong only where the
    float64 lies midway between two float32 (or the result is subnormal, unless these `flush`): there it is odd-rounded.
    """
    product, addend, total = (frame.temp(f"fma {k}", d.shape, np.float64) for k in range(3))
    flag, bits = frame.temp("fma flag", d.shape, np.bool_), total.view(np.uint64)

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
    return np.where(result == 0, np.where(plain == 0, plain, result), result)


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


HALF_TYPES = ("f16", "f16x2", "bf16", "bf16x2")


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
    zero = np.array(0, d.dtype)
    merge = np.bitwise_and if "max" in function else np.bitwise_or
    bits = np.dtype(f"u{d.itemsize}")
    canonical = np.array({4: 0x7FFFFFFF, 8: 0x7FF8000000000000}[d.itemsize], bits).view(d.dtype)
    flag, found = frame.temp("extreme flag", d.shape, np.bool_), frame.temp("extreme", d.shape, d.dtype)

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
        np.copyto(d, found)

    return run


@primitive
def signed(x: Array, *factors: Array) -> Array:
    """Gives numbers the sign of the product of others."""
    return np.where(np.logical_xor.reduce(np.broadcast_arrays(*map(np.signbit, factors))), -x, x)


@primitive
def subnormal(a: Array) -> Array:
    size = np.abs(a)
    found: Array = (size < np.finfo(a.dtype).smallest_normal) & (size > 0)
    return found
