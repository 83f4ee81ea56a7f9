"""Primitives on integers and words of bits (PTX ISA, "Integer Arithmetic Instructions", "Logic and Shift Instructions")."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..text.syntax import Array
from .registry import Frame, Thunk
from .rows import Case, primitive, writer

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
def clipped(x: Array) -> Array:
    """Limits numbers to the range of s32."""
    return np.clip(x, -(1 << 31), (1 << 31) - 1)


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


@primitive
def low24(x: Array) -> Array:
    """Returns the number in the lower 24 bits."""
    bits = x.astype(np.int64) & 0xFFFFFF
    return bits - ((bits >> 23) << 24) if x.dtype.kind == "i" else bits


def pieces(x: Array, kind: str) -> Array:
    """Returns the parts of words, one row a word, of the dtype `kind`."""
    return np.ascontiguousarray(x).view(kind).reshape(-1, 4 // np.dtype(kind).itemsize)


@primitive
def dot(a: Array, b: Array, left: str, right: str, first: int) -> Array:
    """Returns the sum of the products of the parts of a with as many bytes of b from byte `first` on."""
    x = pieces(a, left).astype(np.int64)
    return (x * pieces(b, right)[:, first : first + x.shape[1]]).sum(axis=1)


@primitive
def differences_of_bytes(a: Array, b: Array, left: str, right: str) -> Array:
    """Returns the absolute differences of four pairs of bytes, as bytes."""
    difference = np.abs(pieces(a, left).astype(np.int64) - pieces(b, right))
    return difference.astype(np.uint8).view(np.uint32).reshape(-1)


@primitive
def sum_of_bytes(x: Array) -> Array:
    return pieces(x, "u1").sum(axis=1)


@writer
def select(frame: Frame, d: Array, a: Array, b: Array, p: Array) -> Thunk:
    """Returns the thunk d = a where p holds, else b."""
    if not (a.ndim or b.ndim):
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
