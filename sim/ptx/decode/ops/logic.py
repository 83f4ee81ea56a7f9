"""Comparison, selection, logic, shifts and bit fields (PTX ISA, "Comparison and Selection", "Logic and Shift Instructions")."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ...text.syntax import SINK, TYPES, Array, Imm, Instruction, Not, Operand, Pair, PtxType, Unsupported
from ..registry import Arg, Mods, Plan, Thunk, arg, opcode, pure
from . import rounding
from .rounding import wide

ORDERED: dict[str, np.ufunc] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
UNORDERED = ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
COMPARED = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64", "f16", "f16x2", "bf16", "bf16x2")


def comparison(name: str, type_: PtxType) -> Callable[[Array, Array, Array], Thunk]:
    """Returns the maker of the thunk d = a <name> b. An ordered float comparison with NaN is false, an unordered one is true."""
    floating = type_.kind == "f"
    halves = type_.bits == 16 or type_.name.endswith("x2")

    def make(d: Array, a: Array, b: Array) -> Thunk:
        if not floating:
            return partial(ORDERED[name], a, b, d)
        if name in ORDERED and name != "ne" and not halves:
            return partial(ORDERED[name], a, b, d)
        if name == "neu" and not halves:
            return partial(np.not_equal, a, b, d)

        def run() -> None:
            x, y = (wide(a, type_), wide(b, type_)) if halves else (a, b)
            unordered = np.isnan(x) | np.isnan(y)
            if name == "nan":
                d[...] = unordered
            elif name == "num":
                d[...] = ~unordered
            elif name in ORDERED:
                d[...] = ORDERED[name](x, y) & ~unordered
            else:
                d[...] = ORDERED[name[:-1]](x, y) | unordered

        return run

    return make


def _condition(i: Instruction) -> tuple[str, str, bool, Mods]:
    mods = Mods(i)
    name = mods.choice((*ORDERED, *UNORDERED))
    combine = mods.choice(tuple(COMBINE))
    flush = mods.flag("ftz")
    if not name:
        raise Unsupported("no comparison")
    return name, combine, flush, mods


@opcode("setp", forms="all comparisons, ordered and unordered, {.and .or .xor}{.ftz}, p|q; integers, floats, halves")
def setp(i: Instruction) -> Plan:
    name, combine, flush, mods = _condition(i)
    type_ = mods.type(*COMPARED)
    mods.done()
    target, a, b, *rest = i.operands
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, SINK)
    compare, predicate = comparison(name, type_), TYPES["pred"]
    packed = type_.name.endswith("x2")
    code = rounding.mode(rounding.NEAREST, flush) if type_.kind == "f" else None
    if not combine and not packed and second == SINK:
        return pure(compare, [arg(first, predicate)], [arg(a, type_), arg(b, type_)], code)

    def make(p: Array, q: Array, a: Array, b: Array, *c: Array) -> Thunk:
        result = np.empty((*p.shape, 2) if packed else p.shape, np.bool_)
        thunk = compare(result.reshape(-1), a, b)
        negated = bool(rest) and isinstance(rest[0], Not)

        def run() -> None:
            thunk()
            other = (~c[0] if negated else c[0]) if c else None
            low, high = (result[..., 0], result[..., 1]) if packed else (result, ~result)
            if other is not None:
                low, high = COMBINE[combine](low, other), COMBINE[combine](high, other)
            p[...] = low
            q[...] = high

        return run

    extra = [Arg(strip(o), predicate.dtype) for o in rest]
    return pure(make, [arg(first, predicate), arg(second, predicate)], [arg(a, type_), arg(b, type_), *extra], code)


def strip(operand: Operand) -> Operand:
    return operand.reg if isinstance(operand, Not) else operand


@opcode("set", forms="all comparisons, {.and .or .xor}{.ftz} to .u32 .s32 .f32 .f16 .bf16 .f16x2")
def set_(i: Instruction) -> Plan:
    name, combine, flush, mods = _condition(i)
    types = mods.types()
    mods.done()
    if len(types) != 2:
        raise Unsupported("expected two types")
    result, type_ = types
    d, a, b, *rest = i.operands
    compare = comparison(name, type_)
    # True is all ones for integers and 1.0 for floating point.
    if result.kind == "f":
        true = np.uint16(0x3F80) if result.name.startswith("bf") else np.dtype(arg(d, result).dtype).type(1)
    else:
        true = np.array(-1, f"i{result.bytes}").view(result.dtype)[()]

    def make(d: Array, a: Array, b: Array, *c: Array) -> Thunk:
        flag = np.empty(d.shape, np.bool_)
        thunk = compare(flag, a, b)
        negated = bool(rest) and isinstance(rest[0], Not)

        def run() -> None:
            thunk()
            other = (~c[0] if negated else c[0]) if c else None
            value = flag if other is None else COMBINE[combine](flag, other)
            d[...] = np.where(value, true, d.dtype.type(0))

        return run

    extra = [Arg(strip(o), TYPES["pred"].dtype) for o in rest]
    code = rounding.mode(rounding.NEAREST, flush) if type_.kind == "f" else None
    return pure(make, [arg(d, result)], [arg(a, type_), arg(b, type_), *extra], code)


def select(d: Array, a: Array, b: Array, p: Array) -> Thunk:
    if not (a.ndim or b.ndim):
        # Two constants: pick from a table of both.
        table = np.array([b, a], d.dtype)
        return lambda: table.take(p.view(np.uint8), 0, d, "clip")
    chosen = np.empty_like(d)

    def run() -> None:
        np.copyto(chosen, b)
        np.copyto(chosen, a, where=p)
        np.copyto(d, chosen)

    return run


@opcode("selp", forms=".b16-.b64 .u16-.s64 .f32 .f64")
def selp(i: Instruction) -> Plan:
    mods = Mods(i)
    type_ = mods.type()
    mods.done()
    d, a, b, p = i.operands
    if isinstance(p, Not):
        a, b, p = b, a, p.reg
    # Values are moved as bits: a NaN must not be quieted on its way.
    bits = TYPES[f"b{type_.bits}"]
    return pure(select, [arg(d, bits)], [arg(a, bits), arg(b, bits), arg(p, TYPES["pred"])])


@opcode("slct", forms="{.ftz} any type, by the sign of .s32 or .f32")
def slct(i: Instruction) -> Plan:
    mods = Mods(i)
    flush = mods.flag("ftz")
    types = mods.types()
    mods.done()
    d, a, b, c = i.operands
    value, by = types

    def make(d: Array, a: Array, b: Array, c: Array) -> Thunk:
        def run() -> None:
            d[...] = np.where(c >= 0, a, b)

        return run

    bits = TYPES[f"b{value.bits}"]
    code = rounding.mode(rounding.NEAREST, flush) if by.kind == "f" else None
    return pure(make, [arg(d, bits)], [arg(a, bits), arg(b, bits), arg(c, by)], code)


BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@opcode("and", "or", "xor", forms=".pred .b16 .b32 .b64")
def bitwise(i: Instruction) -> Plan:
    mods = Mods(i)
    type_ = mods.type("pred", "b16", "b32", "b64")
    mods.done()
    fn = BITWISE[i.opcode]
    d, a, b = (arg(o, type_) for o in i.operands)
    return pure(lambda d, a, b: partial(fn, a, b, d), [d], [a, b])


@opcode("not", "cnot", forms=".pred .b16 .b32 .b64")
def inverse(i: Instruction) -> Plan:
    mods = Mods(i)
    type_ = mods.type("pred", "b16", "b32", "b64")
    mods.done()
    d, a = (arg(o, type_) for o in i.operands)
    if i.opcode == "cnot":
        zero = np.array(0, type_.dtype)
        return pure(lambda d, a: partial(np.equal, a, zero, out=d, casting="unsafe"), [d], [a])
    return pure(lambda d, a: partial(np.invert, a, d), [d], [a])


def shift(fn: np.ufunc, d: Array, a: Array, amount: Array) -> Thunk:
    """Shifts by NumPy, which shifts out everything if the amount is at least the width, as PTX does."""
    if amount.ndim == 0:
        return partial(fn, a, np.array(min(int(amount), 64), d.dtype), d)
    if d.itemsize == 4:
        # As a signed number a huge amount is negative, which NumPy also shifts out.
        return partial(fn, a, amount.view(d.dtype), d)
    clamped = np.empty(amount.shape, d.dtype)

    def run() -> None:
        np.minimum(amount, 64, out=clamped, casting="unsafe")
        fn(a, clamped, d)

    return run


@opcode("shl", "shr", forms=".b16 .b32 .b64; shr .u16-.s64")
def shifts(i: Instruction) -> Plan:
    mods = Mods(i)
    type_ = mods.type("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64")
    mods.done()
    fn = np.left_shift if i.opcode == "shl" else np.right_shift
    d, a, amount = i.operands
    return pure(partial(shift, fn), [arg(d, type_)], [arg(a, type_), arg(amount, TYPES["u32"])])


def funnel(left: bool, wrap: bool, d: Array, a: Array, b: Array, c: Array) -> Thunk:
    """Shifts the pair b:a; left keeps the upper word, right the lower one. `c` wraps at 32 or is clamped to it."""

    def run() -> None:
        pair = (b.astype(np.uint64) << np.uint64(32)) | a
        amount = (c & np.uint32(31) if wrap else np.minimum(c, np.uint32(32))).astype(np.uint64)
        d[...] = (pair << amount) >> np.uint64(32) if left else (pair >> amount) & np.uint64(0xFFFFFFFF)

    return run


@opcode("shf", forms=".l .r .clamp .wrap .b32")
def funnel_shift(i: Instruction) -> Plan:
    mods = Mods(i)
    side, edge, type_ = mods.choice(("l", "r")), mods.choice(("clamp", "wrap")), mods.type("b32")
    mods.done()
    d, *rest = (arg(o, type_) for o in i.operands)
    return pure(partial(funnel, side == "l", edge == "wrap"), [d], rest)


def lookup(table: int, d: Array, a: Array, b: Array, c: Array) -> Thunk:
    """lop3: bit 4a + 2b + c of the table, for each bit. The usual tables are one or two NumPy calls."""
    ones = np.array(0xFFFFFFFF, np.uint32)
    known = {
        0xC0: lambda: np.bitwise_and(a, b, d),
        0x3C: lambda: np.bitwise_xor(a, b, d),
        0xFC: lambda: np.bitwise_or(a, b, d),
        0x80: lambda: np.bitwise_and(a & b, c, d),
        0x96: lambda: np.bitwise_xor(a ^ b, c, d),
        0xFE: lambda: np.bitwise_or(a | b, c, d),
        0xF8: lambda: np.bitwise_or(b & c, a, d),
        0xEA: lambda: np.bitwise_or(a & b, c, d),
        0x6A: lambda: np.bitwise_xor(a & b, c, d),
        0xE2: lambda: np.bitwise_xor((a ^ c) & b, c, d),
        0xCA: lambda: np.bitwise_xor((b ^ c) & a, c, d),
    }
    if table in known:
        return known[table]

    def run() -> None:
        total = np.zeros(d.shape, np.uint32)
        for row in range(8):
            if table >> row & 1:
                term = (a if row & 4 else a ^ ones) & (b if row & 2 else b ^ ones) & (c if row & 1 else c ^ ones)
                total |= term
        d[...] = total

    return run


@opcode("lop3", forms=".b32")
def lop3(i: Instruction) -> Plan:
    mods = Mods(i)
    type_ = mods.type("b32")
    mods.done()
    d, a, b, c, table = i.operands
    if not isinstance(table, Imm):
        raise Unsupported("the table must be constant")
    return pure(partial(lookup, table.value & 0xFF), [arg(d, type_)], [arg(o, type_) for o in (a, b, c)])


PRMT_MODES: dict[str, Callable[[int, int], int]] = {
    "f4e": lambda i, n: (i + n) & 7,
    "b4e": lambda i, n: (i - n) & 7,
    "rc8": lambda i, n: i,
    "ecl": lambda i, n: max(i, n),
    "ecr": lambda i, n: min(i, n),
    "rc16": lambda i, n: 2 * (i & 1) + (n & 1),
}
"""Source byte of result byte n, from the two low bits i of the selector (PTX ISA, prmt, table of modes)."""


def permute(d: Array, a: Array, b: Array, c: Array) -> Thunk:
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


def permute_by_mode(mode: str, d: Array, a: Array, b: Array, c: Array) -> Thunk:
    # Selector value to the selector nibbles of the plain form.
    table = np.array([sum(PRMT_MODES[mode](s, n) << (4 * n) for n in range(4)) for s in range(4)], np.uint32)
    nibbles = np.empty(d.shape, np.uint32)
    plain = permute(d, a, b, nibbles)

    def run() -> None:
        nibbles[...] = table[c & np.uint32(3)]
        plain()

    return run


@opcode("prmt", forms=".b32 {.f4e .b4e .rc8 .ecl .ecr .rc16}")
def prmt(i: Instruction) -> Plan:
    mods = Mods(i)
    type_, mode = mods.type("b32"), mods.choice(tuple(PRMT_MODES))
    mods.done()
    d, *rest = (arg(o, type_) for o in i.operands)
    return pure(partial(permute_by_mode, mode) if mode else permute, [d], rest)


def extract(d: Array, a: Array, position: Array, length: Array) -> Thunk:
    """bfe. The field may reach past the msb: there it is filled with zeros, or with the sign for signed types."""
    bits = 8 * d.itemsize
    unsigned = np.dtype(f"u{d.itemsize}")

    def run() -> None:
        pos = np.broadcast_to(position & np.uint32(0xFF), d.shape).astype(np.int64)
        size = np.broadcast_to(length & np.uint32(0xFF), d.shape).astype(np.int64)
        wide = np.broadcast_to(a, d.shape)
        field = np.right_shift(
            wide.view(unsigned) if wide.flags.c_contiguous else wide.astype(unsigned), np.minimum(pos, bits).astype(unsigned)
        )
        mask = np.where(
            size >= bits,
            unsigned.type(2**bits - 1),
            (unsigned.type(1) << np.minimum(size, bits - 1).astype(unsigned)) - unsigned.type(1),
        )
        result = field & mask
        if d.dtype.kind == "i":
            top = np.minimum(pos + size - 1, bits - 1)
            sign = (wide.astype(unsigned) >> np.maximum(top, 0).astype(unsigned)) & unsigned.type(1)
            fill = np.where((sign != 0) & (size > 0), ~mask, unsigned.type(0))
            # If the field reaches past the msb, only existing bits come from it.
            kept = np.maximum(bits - pos, 0)
            real = np.where(
                kept >= bits,
                unsigned.type(2**bits - 1),
                (unsigned.type(1) << np.minimum(kept, bits - 1).astype(unsigned)) - unsigned.type(1),
            )
            fill = np.where((sign != 0) & (size > 0), fill | ~real, fill)
            result = result | fill
        d[...] = result.view(d.dtype)

    return run


@opcode("bfe", forms=".u32 .s32 .u64 .s64")
def bfe(i: Instruction) -> Plan:
    mods = Mods(i)
    type_ = mods.type("u32", "s32", "u64", "s64")
    mods.done()
    d, a, position, length = i.operands
    word = TYPES["u32"]
    return pure(extract, [arg(d, type_)], [arg(a, type_), arg(position, word), arg(length, word)])


def insert(d: Array, a: Array, b: Array, position: Array, length: Array) -> Thunk:
    """bfi: `length` low bits of a into b at `position`; what reaches past the msb is dropped."""
    bits, kind = 8 * d.itemsize, d.dtype.type

    def run() -> None:
        pos = (position & np.uint32(0xFF)).astype(np.int64)
        size = (length & np.uint32(0xFF)).astype(np.int64)
        mask = np.where(size >= bits, kind(2**bits - 1), (kind(1) << np.minimum(size, bits - 1).astype(d.dtype)) - kind(1))
        amount = np.minimum(pos, bits).astype(d.dtype)
        mask = np.left_shift(mask, amount)
        d[...] = (b & ~mask) | (np.left_shift(a, amount) & mask)

    return run


@opcode("bfi", forms=".b32 .b64")
def bfi(i: Instruction) -> Plan:
    mods = Mods(i)
    type_ = mods.type("b32", "b64")
    mods.done()
    d, a, b, position, length = i.operands
    word = TYPES["u32"]
    return pure(insert, [arg(d, type_)], [arg(a, type_), arg(b, type_), arg(position, word), arg(length, word)])


def top_bit(a: Array) -> Array:
    """Returns the number of the highest set bit, -1 for zero, of an unsigned array (exact: halves are below 2**53)."""
    high = (a.astype(np.uint64) >> np.uint64(32)).astype(np.float64)
    low = (a.astype(np.uint64) & np.uint64(0xFFFFFFFF)).astype(np.float64)
    found = np.where(high > 0, np.frexp(high)[1] + 32, np.frexp(low)[1])
    return found.astype(np.int64) - 1


def population(d: Array, a: Array) -> Thunk:
    return partial(np.bitwise_count, a, out=d, casting="unsafe")


def leading_zeros(d: Array, a: Array) -> Thunk:
    bits = 8 * a.itemsize

    def run() -> None:
        d[...] = bits - 1 - top_bit(a)

    return run


def leading(shift_amount: bool, d: Array, a: Array) -> Thunk:
    """bfind: highest bit that is not the sign; .shiftamt counts the shift that brings it to the top; else all ones."""
    bits = 8 * a.itemsize

    def run() -> None:
        value = np.where(a < 0, ~a, a).astype(f"u{a.itemsize}") if a.dtype.kind == "i" else a
        found = top_bit(value)
        answer = np.where(found < 0, -1, bits - 1 - found if shift_amount else found)
        np.copyto(d, answer & 0xFFFFFFFF, casting="unsafe")

    return run


def reverse_bits(d: Array, a: Array) -> Thunk:
    def run() -> None:
        swapped = np.atleast_1d(a).byteswap()
        bits = np.unpackbits(swapped.view(np.uint8), bitorder="little").reshape(-1, 8)[:, ::-1]
        d[...] = np.packbits(bits, axis=1, bitorder="little").reshape(-1).view(a.dtype)

    return run


@opcode("popc", "clz", "brev", forms=".b32 .b64")
def bit_count(i: Instruction) -> Plan:
    mods = Mods(i)
    type_ = mods.type("b32", "b64")
    mods.done()
    d, a = i.operands
    fn = {"popc": population, "clz": leading_zeros, "brev": reverse_bits}[i.opcode]
    return pure(fn, [arg(d, type_ if i.opcode == "brev" else TYPES["u32"])], [arg(a, type_)])


@opcode("bfind", forms="{.shiftamt} .u32 .s32 .u64 .s64")
def bfind(i: Instruction) -> Plan:
    mods = Mods(i)
    amount, type_ = mods.flag("shiftamt"), mods.type("u32", "s32", "u64", "s64")
    mods.done()
    d, a = i.operands
    return pure(partial(leading, amount), [arg(d, TYPES["u32"])], [arg(a, type_)])


def nth_set_bit(d: Array, mask: Array, base: Array, offset: Array) -> Thunk:
    """fns: the |offset|-th set bit from `base`, upwards for a positive offset; offset 0 is the bit at base itself."""

    def run() -> None:
        shape = d.shape
        bits = (np.broadcast_to(mask, shape)[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
        place = np.arange(32)
        start = np.broadcast_to(base, shape).astype(np.int64)[:, None]
        count = np.broadcast_to(offset, shape).astype(np.int64)[:, None]
        upward = np.cumsum(bits * (place >= start), axis=1) * (bits * (place >= start))
        masked = bits * (place <= start)
        downward = np.cumsum(masked[:, ::-1], axis=1)[:, ::-1] * masked
        rank = np.where(count > 0, upward, np.where(count < 0, downward, bits * (place == start)))
        hit = (rank == np.where(count == 0, 1, np.abs(count))) & (rank > 0)
        d[...] = np.where(hit.any(axis=1), hit.argmax(axis=1), 0xFFFFFFFF).astype(np.uint32)

    return run


@opcode("fns", forms=".b32")
def fns(i: Instruction) -> Plan:
    mods = Mods(i)
    type_ = mods.type("b32")
    mods.done()
    d, mask, base, offset = i.operands
    return pure(nth_set_bit, [arg(d, type_)], [arg(mask, type_), arg(base, type_), arg(offset, TYPES["s32"])])


def bit_mask(clamp: bool, d: Array, a: Array, b: Array) -> Thunk:
    """bmsk: ones from bit a, b of them, as far as the word reaches."""

    def run() -> None:
        start, width = (x.astype(np.uint64) for x in (a, b))
        if clamp:
            start, width = np.minimum(start, np.uint64(32)), np.minimum(width, np.uint64(32))
        else:
            start, width = start & np.uint64(31), width & np.uint64(31)
        ones = (np.uint64(1) << width) - np.uint64(1)
        d[...] = (ones << start) & np.uint64(0xFFFFFFFF)

    return run


@opcode("bmsk", forms=".clamp .wrap .b32")
def bmsk(i: Instruction) -> Plan:
    mods = Mods(i)
    edge, type_ = mods.choice(("clamp", "wrap")), mods.type("b32")
    mods.done()
    d, a, b = (arg(o, type_) for o in i.operands)
    return pure(partial(bit_mask, edge == "clamp"), [d], [a, b])


def extend(clamp: bool, d: Array, a: Array, b: Array) -> Thunk:
    """szext: the low b bits of a, sign- or zero-extended; no bits give 0."""

    def run() -> None:
        width = np.minimum(b, np.uint32(32)) if clamp else b & np.uint32(31)
        spare = np.broadcast_to(np.uint32(32) - width, d.shape).astype(np.uint32)
        top = np.left_shift(np.broadcast_to(a, d.shape).astype(np.uint32), spare)
        # The arithmetic shift of a signed word brings the sign along; by 32 (no bits) the word is 0 already.
        d[...] = np.right_shift(top.view(d.dtype), spare.view(d.dtype))

    return run


@opcode("szext", forms=".clamp .wrap .u32 .s32")
def szext(i: Instruction) -> Plan:
    mods = Mods(i)
    edge, type_ = mods.choice(("clamp", "wrap")), mods.type("u32", "s32")
    mods.done()
    d, a, b = i.operands
    word = TYPES["u32"]
    return pure(partial(extend, edge == "clamp"), [arg(d, type_)], [arg(a, word), arg(b, word)])
