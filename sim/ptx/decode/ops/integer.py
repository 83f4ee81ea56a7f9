"""Integer arithmetic (PTX ISA, "Integer Arithmetic Instructions", "Extended-Precision Integer Arithmetic")."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...text.syntax import TYPES, Array, Instruction, PtxType, Reg, Unsupported
from ..registry import Arg, Mods, Plan, Thunk, arg, opcode, pure

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
CARRY = Reg("%carry", TYPES["pred"])
"""CC.CF, the condition code of extended-precision arithmetic: one a lane."""

WIDER: dict[tuple[int, str], Any] = {(2, "i"): np.int32, (2, "u"): np.uint32, (4, "i"): np.int64, (4, "u"): np.uint64}


def high_product(a: Array, b: Array) -> Array:
    """Returns the upper half of the full product of two 16-, 32- or 64-bit integer arrays."""
    if a.itemsize < 8:
        wide = WIDER[a.itemsize, a.dtype.kind]
        product: Array = a.astype(wide) * b.astype(wide) >> wide(8 * a.itemsize)
        return product.astype(a.dtype)
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.view(np.uint64), b.view(np.uint64)
    middle = (x >> shift) * (y & low) + ((x & low) * (y & low) >> shift)
    other = (x & low) * (y >> shift) + (middle & low)
    high: Array = (x >> shift) * (y >> shift) + (middle >> shift) + (other >> shift)
    if a.dtype.kind == "i":
        # Signed from unsigned: subtract the other factor for each factor that is negative.
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)


def multiply_high(d: Array, a: Array, b: Array) -> Thunk:
    def run() -> None:
        d[...] = high_product(a, b)

    return run


def multiply_wide(d: Array, a: Array, b: Array) -> Thunk:
    return partial(np.multiply, a, b, out=d, dtype=d.dtype, casting="unsafe")


def multiply_add(d: Array, a: Array, b: Array, c: Array) -> Thunk:
    product = np.empty(d.shape, d.dtype)

    def run() -> None:
        np.multiply(a, b, product)
        np.add(product, c, d)

    return run


def multiply_add_wide(d: Array, a: Array, b: Array, c: Array) -> Thunk:
    product = np.empty(d.shape, d.dtype)

    def run() -> None:
        np.multiply(a, b, out=product, dtype=d.dtype, casting="unsafe")
        np.add(product, c, d)

    return run


def multiply_add_high(d: Array, a: Array, b: Array, c: Array) -> Thunk:
    def run() -> None:
        np.add(high_product(a, b), c, d)

    return run


def saturating(fn: np.ufunc, d: Array, a: Array, b: Array) -> Thunk:
    """add.sat.s32, sub.sat.s32: clamp to the range of s32."""

    def run() -> None:
        wide = fn(a.astype(np.int64), b.astype(np.int64))
        d[...] = np.clip(wide, -(1 << 31), (1 << 31) - 1)

    return run


def saturating_multiply_add(d: Array, a: Array, b: Array, c: Array) -> Thunk:
    def run() -> None:
        d[...] = np.clip(high_product(a, b).astype(np.int64) + c.astype(np.int64), -(1 << 31), (1 << 31) - 1)

    return run


def divide(d: Array, a: Array, b: Array) -> Thunk:
    """Divides, truncating; division by zero gives all ones, as on hardware (the ISA leaves it open)."""

    def run() -> None:
        zero = b == 0
        divisor = np.where(zero, b.dtype.type(1), b)
        quotient = np.floor_divide(a - np.fmod(a, divisor), divisor)
        d[...] = np.where(zero, _ones(d), quotient)

    return run


def remainder(d: Array, a: Array, b: Array) -> Thunk:
    """a - (a / b) * b with the truncating quotient, so that its sign is a's; by zero: the dividend."""

    def run() -> None:
        zero = b == 0
        d[...] = np.where(zero, a, np.fmod(a, np.where(zero, b.dtype.type(1), b)))

    return run


def _ones(d: Array) -> Array:
    return np.array(-1 if d.dtype.kind == "i" else np.iinfo(d.dtype).max, d.dtype)


def absolute_difference(d: Array, a: Array, b: Array, c: Array) -> Thunk:
    def run() -> None:
        d[...] = c + (np.maximum(a, b) - np.minimum(a, b))

    return run


def carry_chain(name: str, sets: bool, uses: bool, d: Array, flag: Array, a: Array, b: Array, old: Array) -> Thunk:
    """add/addc/sub/subc; the carry flag holds the carry, or the borrow, of the last .cc instruction."""
    kind = d.dtype.type

    def run() -> None:
        carry = old.astype(d.dtype) if uses else kind(0)
        if name == "add":
            part = a + b
            total = part + carry
            out = (part < a) | (total < part)
        else:
            part = a - b
            total = part - carry
            out = (a < b) | (part < carry)
        d[...] = total
        if sets:
            flag[...] = out

    return run


def _extended(i: Instruction, name: str) -> Plan:
    mods = Mods(i)
    sets, type_ = mods.flag("cc"), mods.type("u32", "s32", "u64", "s64")
    mods.done()
    unsigned = TYPES[f"u{type_.bits}"]
    d, a, b = i.operands
    flag = arg(CARRY, TYPES["pred"])
    fn = partial(carry_chain, name, sets, i.opcode.endswith("c"))
    return pure(fn, [arg(d, unsigned), flag], [arg(a, unsigned), arg(b, unsigned), flag])


def integer_addition(i: Instruction) -> Plan:
    if "cc" in i.mods:
        return _extended(i, i.opcode)
    mods = Mods(i)
    fn = np.add if i.opcode == "add" else np.subtract
    if name := mods.choice(("u16x2", "s16x2")):
        mods.done()
        d, a, b = (Arg(o, TYPES[name[:3]].dtype, packed=True) for o in i.operands)
        return pure(lambda d, a, b: partial(fn, a, b, d), [d], [a, b])
    saturate, type_ = mods.flag("sat"), mods.type(*INTEGERS)
    mods.done()
    d, a, b = (arg(o, type_) for o in i.operands)
    if saturate:
        if type_.name != "s32":
            raise Unsupported(".sat is for .s32")
        return pure(partial(saturating, fn), [d], [a, b])
    return pure(lambda d, a, b: partial(fn, a, b, d), [d], [a, b])


@opcode("addc", "subc", forms="{.cc}.u32 .s32 .u64 .s64")
def add_with_carry(i: Instruction) -> Plan:
    return _extended(i, i.opcode[:3])


def integer_multiplication(i: Instruction) -> Plan:
    mods = Mods(i)
    part, type_ = mods.choice(("lo", "hi", "wide"), "lo"), mods.type(*INTEGERS)
    mods.done()
    d, a, b = i.operands
    if part == "wide":
        return pure(multiply_wide, [arg(d, double_width(type_))], [arg(a, type_), arg(b, type_)])
    args = [arg(d, type_)], [arg(a, type_), arg(b, type_)]
    if part == "hi":
        return pure(multiply_high, *args)
    return pure(lambda d, a, b: partial(np.multiply, a, b, d), *args)


def double_width(type_: PtxType) -> PtxType:
    return TYPES[f"{type_.kind}{2 * type_.bits}"]


def multiply_add_carry(high: bool, sets: bool, uses: bool, d: Array, flag: Array, *rest: Array) -> Thunk:
    a, b, c, old = rest
    product = np.empty(d.shape, d.dtype)
    add = carry_chain("add", sets, uses, d, flag, product, c, old)

    def run() -> None:
        product[...] = high_product(a, b) if high else a * b
        add()

    return run


def integer_multiply_add(i: Instruction) -> Plan:
    mods = Mods(i)
    part, sets, saturate = mods.choice(("lo", "hi", "wide")), mods.flag("cc"), mods.flag("sat")
    type_ = mods.type(*INTEGERS)
    mods.done()
    d, a, b, c = i.operands
    uses = i.opcode == "madc"
    if sets or uses:
        # The product is signed or not by type; the carry is that of the unsigned sum.
        unsigned, flag = TYPES[f"u{type_.bits}"], arg(CARRY, TYPES["pred"])
        if part == "hi" and type_.kind == "s":
            raise Unsupported("signed high product with carry")
        fn = partial(multiply_add_carry, part == "hi", sets, uses)
        return pure(fn, [arg(d, unsigned), flag], [*(arg(o, unsigned) for o in (a, b, c)), flag])
    if part == "wide":
        wide = double_width(type_)
        return pure(multiply_add_wide, [arg(d, wide)], [arg(a, type_), arg(b, type_), arg(c, wide)])
    args = [arg(d, type_)], [arg(a, type_), arg(b, type_), arg(c, type_)]
    if saturate:
        if part != "hi" or type_.name != "s32":
            raise Unsupported(".sat is for .hi.s32")
        return pure(saturating_multiply_add, *args)
    return pure(multiply_add_high if part == "hi" else multiply_add, *args)


@opcode("mul24", "mad24", forms=".lo .hi .u32 .s32")
def mul24(i: Instruction) -> Plan:
    mods = Mods(i)
    part, type_ = mods.choice(("lo", "hi")), mods.type("u32", "s32")
    mods.done()
    shift = np.int64(16 if part == "hi" else 0)

    def run24(d: Array, a: Array, b: Array, *c: Array) -> Thunk:
        def low(x: Array) -> Array:
            bits = x.astype(np.int64) & 0xFFFFFF
            return bits - ((bits >> 23) << 24) if x.dtype.kind == "i" else bits

        def run() -> None:
            product = (low(a) * low(b)) >> shift
            np.copyto(d, (product + c[0]) if c else product, casting="unsafe")

        return run

    d, *rest = (arg(o, type_) for o in i.operands)
    return pure(run24, [d], rest)


def integer_division(i: Instruction) -> Plan:
    mods = Mods(i)
    type_ = mods.type(*INTEGERS)
    mods.done()
    d, a, b = (arg(o, type_) for o in i.operands)
    return pure(divide if i.opcode == "div" else remainder, [d], [a, b])


opcode("rem", forms=".u16-.s64")(integer_division)


@opcode("sad", forms=".u16-.s64")
def sad(i: Instruction) -> Plan:
    mods = Mods(i)
    type_ = mods.type(*INTEGERS)
    mods.done()
    d, a, b, c = (arg(o, type_) for o in i.operands)
    return pure(absolute_difference, [d], [a, b, c])


def integer_unary(i: Instruction) -> Plan:
    """abs, neg. The most negative value stays itself, as in two's complement."""
    mods = Mods(i)
    type_ = mods.type("s16", "s32", "s64")
    mods.done()
    fn = np.absolute if i.opcode == "abs" else np.negative
    d, a = (arg(o, type_) for o in i.operands)
    return pure(lambda d, a: partial(fn, a, d), [d], [a])


def integer_extreme(i: Instruction) -> Plan:
    mods = Mods(i)
    relu = mods.flag("relu")
    packed = [m for m in mods.rest if m in ("u16x2", "s16x2")]
    if packed:
        mods.rest.remove(packed[0])
        dtype = TYPES[packed[0][:3]].dtype
        d, a, b = (Arg(o, dtype, packed=True) for o in i.operands)
    else:
        type_ = mods.type(*INTEGERS)
        d, a, b = (arg(o, type_) for o in i.operands)
    mods.done()
    fn = np.minimum if i.opcode == "min" else np.maximum

    def extreme(d: Array, a: Array, b: Array) -> Thunk:
        if not relu:
            return partial(fn, a, b, out=d)

        def run() -> None:
            fn(a, b, out=d)
            np.maximum(d, 0, out=d)

        return run

    return pure(extreme, [d], [a, b])


def dot_product(a_wide: str, b_wide: str, first: int, d: Array, a: Array, b: Array, c: Array) -> Thunk:
    """d = c + sum of products of the parts of a (dtype `a_wide`) with as many bytes of b from byte `first` on."""
    count = 4 // np.dtype(a_wide).itemsize
    x, y = np.empty(d.shape, np.uint32), np.empty(d.shape, np.uint32)

    def run() -> None:
        np.copyto(x, a)
        np.copyto(y, b)
        left = x.view(a_wide).reshape(-1, count).astype(np.int64)
        right = y.view(b_wide).reshape(-1, 4)[:, first : first + count].astype(np.int64)
        np.copyto(d, c.astype(np.int64) + (left * right).sum(axis=1), casting="unsafe")

    return run


@opcode("vabsdiff4", forms=".u32 .s32 bytes {.add}, without selection of bytes")
def differences_of_bytes(i: Instruction) -> Plan:
    """Decodes absolute differences of four pairs of bytes; with .add their sum and c."""
    mods = Mods(i)
    total = mods.flag("add")
    _, left, right = mods.types("u32", "s32")
    mods.done()
    kinds = ["i1" if t.kind == "s" else "u1" for t in (left, right)]

    def make(d: Array, a: Array, b: Array, c: Array) -> Thunk:
        def parts(x: Array, kind: str) -> Array:
            return np.broadcast_to(x, d.shape).copy().view(kind).reshape(-1, 4).astype(np.int64)

        def run() -> None:
            difference = np.abs(parts(a, kinds[0]) - parts(b, kinds[1]))
            if total:
                np.copyto(d, c + difference.sum(axis=1), casting="unsafe")
            else:
                d[...] = difference.astype(np.uint8).view(np.uint32).reshape(-1)

        return run

    d, *rest = (arg(o, TYPES["u32"]) for o in i.operands)
    return pure(make, [d], rest)


@opcode("dp4a", "dp2a", forms=".u32 .s32 for each factor; dp2a .lo .hi")
def dot(i: Instruction) -> Plan:
    mods = Mods(i)
    half = mods.choice(("lo", "hi"))
    left, right = mods.types("u32", "s32")
    mods.done()
    word = TYPES["u32"]
    parts = "i" if left.kind == "s" else "u"
    fn = partial(
        dot_product,
        parts + ("1" if i.opcode == "dp4a" else "2"),
        "i1" if right.kind == "s" else "u1",
        2 if half == "hi" else 0,
    )
    d, *rest = (arg(o, word) for o in i.operands)
    return pure(fn, [d], rest)
