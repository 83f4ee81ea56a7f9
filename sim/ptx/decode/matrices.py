"""Matrix instructions: ldmatrix, stmatrix, mma, wmma, wgmma (PTX ISA, "Matrix Multiply-Accumulate Instructions").

With g = lane >> 2 and t = lane & 3, a fragment's registers hold, of each eight rows of a matrix, row g, and of each four words of a
row, word t (`fragment`). A of shape m x k: registers (k part, row part); B of shape k x n, by columns: registers (column part,
k part); C and D: registers (column part, row part, element), of columns 2 t + element, float16 both in one register.

wmma: the ISA leaves the layout of its fragments open (PTX ISA, "Matrix multiply-accumulate: wmma"). Here they are those of mma, for
more rows or columns. float16 fragments of A and B have eight registers in every shape, and hold each element as often as there is
room. Memory is accessed in its own order, 32 neighbours at a time.

wgmma: products of a warpgroup, four warps (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"). Here operands are
decoded; `execute.warpgroups` runs them. Of D (64 x N), warp w of the group has rows 16 w to 16 w + 15, in the layout of mma; A from
registers is the m16nNk16 fragment of mma for each warp.

The PTX ISA leaves order and precision of the sums of products open. By default the machine adds the products of float16, bfloat16
and TF32 numbers one after the other, from the lowest k on, in float32 (`products`), and C last; it has NumPy multiply other
matrices. A launch with `tensor_cores="H100"` sums as an H100 does, bit for bit (`aligned_sums`), at some twenty times the cost.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from ..memory.ports import PORTS, Port
from ..state.lane_sets import WARP, LaneSet
from ..text.syntax import ELEMENT, TYPES, UNSIGNED, Array, Imm, PtxInstruction, Unsupported
from .access import SPACES, address_arg, address_thunk, gather, space_of, store
from .primitives import aligned_sums, eight_dtype, half_bits, odd_sum
from .registry import (
    WHOLE_WARP,
    Arg,
    Arrays,
    Bind,
    DType,
    Frame,
    Multiply,
    MultiplyWait,
    Plan,
    Thunk,
    act,
    args,
    items,
    opcode,
    taken,
)

HALF_VALUES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
"""float32 values of all float16 bits."""

# float16 bits, sign-extended and moved to where float32 has its fraction, are the value times 2**-112: four passes of the
# vector unit, several times as fast as NumPy's conversion or a look-up. Infinities and NaN have no such neighbours.
HALF_SHIFT = np.array(13, np.int32)
HALF_MASK = np.array(0x8FFFE000 - (1 << 32), np.int32)
HALF_SCALE = np.array(2.0**112, np.float32)
POSITIVE_INFINITY, NEGATIVE_INFINITY = 0x7C00, 0xFC00

FOUR_LANES: dict[int, np.dtype[Any]] = {4: np.dtype(np.complex128), 8: np.dtype("V32")}
"""One element for the words (of 4 or 8 bytes) of the four lanes that hold a row of a fragment."""


def widen_halves(bits: Array, out: Array) -> None:
    """Converts float16 bits (uint16) to float32; both arrays are contiguous."""
    signed = bits.view(np.int16)
    if np.maximum.reduce(signed, None) >= POSITIVE_INFINITY or np.maximum.reduce(bits, None) >= NEGATIVE_INFINITY:
        HALF_VALUES.take(bits, None, out, "clip")
        return
    words = out.view(np.int32)
    np.copyto(words, signed)
    np.left_shift(words, HALF_SHIFT, words)
    np.bitwise_and(words, HALF_MASK, words)
    np.multiply(out, HALF_SCALE, out)


def whole_warps(frame: Frame, i: PtxInstruction) -> bool:
    """True if the frame has whole warps; else the instruction's result is undefined, and that is a finding."""
    if frame.lanes.whole_warps:
        return True
    message = f"{i.opcode} needs all 32 lanes of the warp; some have exited or never existed"
    frame.machine.memory.findings.report("missing lanes", message, i, frame.lanes, 0)
    return False


def warpwise(bind: Bind, i: PtxInstruction, writes: Sequence[Arg], reads: Sequence[Arg], **options: Any) -> Plan:
    """Returns the plan of an instruction that whole warps run together."""

    def checked(frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
        if frame.n % WARP:
            return lambda: whole_warps(frame, i)
        run = bind(frame, out, ins)
        return lambda: whole_warps(frame, i) and run()

    return Plan(tuple(writes), tuple(reads), checked, collective=WHOLE_WARP, pure=False, **options)


def matrix_mods(i: PtxInstruction) -> tuple[int, bool, str]:
    *_, count, transposed, space, _ = taken(i, "sync", "aligned", "!m8n8", "!x1 x2 x4", "trans", "shared shared::cta", "!b16")
    return int(count[1:]), bool(transposed), space_of(space)


def matrix_rows(
    frame: Frame, i: PtxInstruction, space: str, count: int, base: Array, offset: int
) -> tuple[Port, Callable[[], tuple[LaneSet, Array]]]:
    """Returns the port of `count` matrices' rows, and a function that gives the lanes with their addresses: 8 i to 8 i + 7 for
    matrix i.
    """
    address, every = address_thunk(frame, base, offset), count == 4
    at = frame.lend(("matrix rows", count), lambda: np.flatnonzero(np.arange(frame.n) % WARP < 8 * count))

    def rows() -> tuple[LaneSet, Array]:
        addresses = address()
        return (frame.lanes, addresses) if every else (frame.lanes.subset(at), addresses[at])

    return PORTS[space](frame.machine.memory, i, len(at), 16, i.opcode), rows


@opcode("ldmatrix", forms=".sync.aligned.m8n8 .x1 .x2 .x4 {.trans} .shared.b16")
def ldmatrix(i: PtxInstruction) -> Plan:
    count, transposed, space = matrix_mods(i)
    target, memory = i.operands
    registers = items(target, count)
    base, offset = address_arg(memory, space)

    def bind(frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
        (port, rows), warps = matrix_rows(frame, i, space, count, ins[0], offset), frame.n // WARP
        buffer = frame.temp("ldmatrix", (warps * 8 * count,), np.complex128)
        # (warp, matrix, row, column pair): the lane with number 4 row + pair receives that word.
        words = buffer.view(np.uint32).reshape(warps, count, WARP)
        halves = buffer.view(np.uint16).reshape(warps, count, 8, 8)
        turned = frame.temp("ldmatrix.trans", (count, warps, 8, 8), np.uint16)
        given = turned.view(np.uint32).reshape(count, warps, WARP) if transposed else words.swapaxes(0, 1)
        pairs = [(o.reshape(warps, WARP), each) for o, each in zip(out, given, strict=True)]

        def run() -> None:
            gather(port.resolve(*rows()), buffer)
            if transposed:
                np.copyto(turned, halves.transpose(1, 0, 3, 2))
            for register, each in pairs:
                np.copyto(register, each)

        return run

    return warpwise(bind, i, args("b32", *registers), [base])


@opcode("stmatrix", forms=".sync.aligned.m8n8 .x1 .x2 .x4 {.trans} .shared.b16")
def stmatrix(i: PtxInstruction) -> Plan:
    count, transposed, space = matrix_mods(i)
    memory, source = i.operands
    registers = items(source, count)
    base, offset = address_arg(memory, space)

    def bind(frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
        (port, rows), warps = matrix_rows(frame, i, space, count, ins[0], offset), frame.n // WARP
        words = frame.temp("stmatrix", (warps, count, WARP), np.uint32)

        def run() -> None:
            for k, register in enumerate(ins[1:]):
                words[:, k] = np.broadcast_to(register, frame.n).reshape(warps, WARP)
            data = words
            if transposed:
                halves = words.view(np.uint16).reshape(warps, count, 8, 8)
                data = np.ascontiguousarray(halves.transpose(0, 1, 3, 2)).view(np.uint32)
            store(port, *rows(), data.reshape(-1).view(np.complex128))

        return run

    return warpwise(bind, i, [], [base, *args("b32", *registers)])


@opcode("movmatrix", forms=".sync.aligned.m8n8.trans.b16")
def movmatrix(i: PtxInstruction) -> Plan:
    taken(i, "sync", "aligned", "!m8n8", "!trans", "!b16")
    d, a = i.operands

    def bind(frame: Frame, out: Arrays, ins: Arrays) -> Thunk:

        def run() -> None:
            halves = np.ascontiguousarray(np.broadcast_to(ins[0], frame.n)).view(np.uint16).reshape(-1, 8, 8)
            np.copyto(out[0], np.ascontiguousarray(halves.transpose(0, 2, 1)).view(np.uint32).reshape(-1))

        return run

    return warpwise(bind, i, args("b32", d), args("b32", a))


# -- mma ----------------------------------------------------------------------------------------------------------------

SHAPES = {
    **dict.fromkeys(("f16", "bf16"), ("m16n8k8", "m16n8k16")),
    "tf32": ("m16n8k4", "m16n8k8"),
    **dict.fromkeys(("e4m3", "e5m2"), ("m16n8k32",)),
    **dict.fromkeys(("s8", "u8"), ("m8n8k16", "m16n8k16", "m16n8k32")),
    **dict.fromkeys(("s4", "u4"), ("m8n8k32", "m16n8k32", "m16n8k64")),
    "b1": ("m8n8k128", "m16n8k128", "m16n8k256"),
    "f64": ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"),
}
"""Shapes by type of the factors."""

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1, "f64": 64}
MIXED = ({"s8", "u8"}, {"s4", "u4"}, {"e4m3", "e5m2"})
"""Types of factors that may occur together."""

ACCUMULATORS = {
    **dict.fromkeys(("f16", "e4m3", "e5m2"), ("f32", "f16")),
    **dict.fromkeys(("s8", "u8", "s4", "u4", "b1"), ("s32",)),
    "f64": ("f64",),
}
"""Types of C and D by type of the factors; for all others float32."""

NUMBERS = f"!{' '.join({**TYPES, **SHAPES})}"


def shapes_of(table: dict[str, tuple[str, ...]]) -> str:
    """Returns the shapes of a table as a group of modifiers, one of which an instruction has."""
    return f"!{' '.join({shape for shapes in table.values() for shape in shapes})}"


def lengths(shape: str) -> list[int]:
    """Returns m, n and k of a shape such as m16n8k16."""
    return [int(length) for length in re.findall(r"\d+", shape)]


Decode = Callable[[Array, Array], None]


def alike(a_type: str, b_type: str) -> bool:
    return a_type == b_type or any({a_type, b_type} <= mixed for mixed in MIXED)


def fragment(words: Array, elements: int = 1, of_b: bool = False) -> Array:
    """Returns the words of matrices, (warps, rows, words of a row), as a view by registers: (k or column part, row part, element,
    warp, g, t), for B (row part, k part, ...). `elements`: neighbouring words of a lane.
    """
    w, rows, count = words.shape
    parts = words.reshape(w, rows // 8, 8, count // (4 * elements), 4, elements)
    return parts.transpose(*((1, 3) if of_b else (3, 1)), 5, 0, 2, 4)


class Fragments:
    """The arrays in which the mma of one shape run for `w` warps, lent from one to the next.

    `a_bits`, `b_bits`: the registers' words, put together to rows; `a_rows`, `b_rows`: places in these for each register's words,
    as single words and as the four that are side by side. `product` and its `fragments` are the same numbers; `total`: these by
    register of 32 or 64 bits.
    """

    def __init__(self, w: int, shape: Sequence[int], words: int, word: DType, real: DType):
        m, n, k = shape
        self.row = FOUR_LANES[word.itemsize]
        self.a_bits, self.b_bits = np.empty((w, m, words), word), np.empty((w, n, words), word)
        self.a_rows, self.b_rows = self.places(fragment(self.a_bits)), self.places(fragment(self.b_bits, of_b=True))
        self.a, self.b = np.empty((w, m, k), real), np.empty((w, n, k), real)
        self.b_columns = self.b.transpose(0, 2, 1)
        self.product = np.empty((w, m, n), real)
        self.fragments = fragment(self.product, 2)
        self.total = np.empty((m * n // WARP, w * WARP), real)
        self.sums = self.total.reshape(self.fragments.shape)

    def places(self, registers: Array) -> list[tuple[Array, Array]]:
        words = [registers[at] for at in np.ndindex(registers.shape[:3])]
        return [(each, each.view(self.row)[..., 0]) for each in words]

    def moves(self, rows: list[tuple[Array, Array]], registers: Sequence[Array]) -> list[tuple[Array, Array]]:
        """Returns (target, source) copies that put registers into their rows."""
        out = []
        for (words, together), register in zip(rows, registers, strict=True):
            if register.ndim and register.flags.c_contiguous:
                out.append((together, register.view(self.row).reshape(together.shape)))
            else:
                out.append((words, register.reshape(words.shape) if register.ndim else register))
        return out


def decoder(kind: str) -> Decode:
    """Returns a function that fills a float array from registers' bits (same number of elements, same order)."""
    if kind == "f16":
        return lambda bits, out: widen_halves(bits.view(np.uint16).reshape(out.shape), out)
    if kind == "bf16":

        def widen(bits: Array, out: Array) -> None:
            words = out.view(np.uint32)
            np.copyto(words, bits.view(np.uint16).reshape(out.shape))
            np.left_shift(words, np.uint32(16), words)

        return widen
    if kind == "tf32":
        # The hardware reads 10 bits of fraction.
        return lambda bits, out: np.bitwise_and(bits.reshape(out.shape), 0xFFFFE000, out.view(np.uint32))  # type: ignore[return-value]
    if kind in ("e4m3", "e5m2"):
        eights = np.arange(256, dtype=np.uint8).view(eight_dtype(f"{kind}x2")).astype(np.float32)
        return lambda bits, out: eights.take(bits.view(np.uint8).reshape(out.shape), None, out, "clip")
    if kind in ("s4", "u4"):

        def nibbles(bits: Array, out: Array) -> None:
            pairs = bits.view(np.uint8)
            parts = np.stack((pairs & 15, pairs >> 4), axis=-1).astype(np.int8)
            np.copyto(out, (parts - (parts > 7) * np.int8(16) if kind == "s4" else parts).reshape(out.shape))

        return nibbles
    if kind == "b1":
        return lambda bits, out: np.copyto(out, np.unpackbits(bits.view(np.uint8), bitorder="little").reshape(out.shape))
    dtype = {"s8": np.int8, "u8": np.uint8, "f64": np.float64}[kind]
    return lambda bits, out: np.copyto(out, bits.view(dtype).reshape(out.shape), casting="unsafe")


@opcode(
    "mma",
    forms=".sync.aligned .row.col: m16n8k8 m16n8k16 .f16 .bf16 (f32; f16 accumulators for .f16), m16n8k4 m16n8k8 .tf32, "
    "m16n8k32 .e4m3 .e5m2, m8n8k16 m16n8k16 m16n8k32 .s8 .u8 {.satfinite}, m8n8k32 m16n8k32 m16n8k64 .s4 .u4 {.satfinite}, "
    "m8n8k128 m16n8k128 m16n8k256 .b1 .xor.popc .and.popc, m8n8k4 m16n8k4 m16n8k8 m16n8k16 .f64",
)
def mma(i: PtxInstruction) -> Plan:
    shape, d_type, a_type, b_type, c_type, popc, logic, *_ = taken(
        i, shapes_of(SHAPES), *[NUMBERS] * 4, "popc", "xor and", "satfinite", "!row", "!col", "sync", "aligned", "kind::f8f6f4"
    )
    if shape not in SHAPES.get(a_type, ()) or not alike(a_type, b_type) or d_type != c_type:
        raise Unsupported(f"mma {shape} .{a_type}.{b_type} with .{d_type} and .{c_type} accumulators")
    if {bool(popc), bool(logic)} != {a_type == "b1"} or ("kind::f8f6f4" in i.mods and a_type not in ("e4m3", "e5m2")):
        raise Unsupported(f"this mma of .{a_type}")
    return multiplied(i, shape, (d_type, a_type, b_type, c_type))


def multiplied(i: PtxInstruction, shape: str, types: Sequence[str]) -> Plan:
    """Returns the plan of mma or wmma.mma; `types` of D, A, B and C."""
    m, n, k = lengths(shape)
    d_type, a_type, b_type, c_type = types
    if not {d_type, c_type} <= {*ACCUMULATORS.get(a_type, ("f32",))}:
        raise Unsupported(f".{d_type} accumulators")
    word = "b64" if a_type == "f64" else "b32"
    words = k * BITS[a_type] // TYPES[word].bits
    d, a, b, c = i.operands
    # float16 fragments of wmma hold elements twice or more.
    spare = 8 if i.opcode == "wmma" and a_type == "f16" else 0
    a_args, b_args = (
        args(word, *items(o, spare or count)[:count]) for o, count in ((a, m * words // WARP), (b, n * words // WARP))
    )
    c_items, d_items = (items(o, m * n // WARP // (2 if kind == "f16" else 1)) for o, kind in ((c, c_type), (d, d_type)))
    c_args, d_args = (args("b32" if kind == "f16" else kind, *held) for kind, held in ((c_type, c_items), (d_type, d_items)))
    # A sum must not overwrite a later addend.
    crossed = any(register in c_items[at + 1 :] for at, register in enumerate(d_items))
    a_decode, b_decode = decoder(a_type), decoder(b_type)
    real = np.dtype(np.float64 if a_type == "f64" else np.float32)

    def bind(frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
        a_regs, b_regs, c_regs = ins[: len(a_args)], ins[len(a_args) : -len(c_args)], ins[-len(c_args) :]
        make = partial(Fragments, frame.n // WARP, (m, n, k), words, TYPES[word].dtype, real)
        f: Fragments = frame.lend(("mma", a_type, shape), make)
        a_moves, b_moves, total = f.moves(f.a_rows, a_regs), f.moves(f.b_rows, b_regs), f.total
        kept = frame.kept

        def factors() -> None:
            if not kept:
                for to, register in a_moves:
                    np.copyto(to, register)
                a_decode(f.a_bits, f.a)
            for to, register in b_moves:
                np.copyto(to, register)
            b_decode(f.b_bits, f.b)

        def multiply() -> None:
            if "xor" in i.mods:
                # Bits as 1 and -1: equal ones give 1, different ones -1.
                np.matmul(1 - 2 * f.a, 1 - 2 * f.b_columns, f.product)
                np.copyto(f.product, (k - f.product) / 2)
            elif a_type in FACTORS:
                products(f.a, f.b, f.product)
            else:
                np.matmul(f.a, f.b_columns, f.product)
            np.copyto(f.sums, f.fragments)

        def as_chip(addends: Array) -> Array:
            np.copyto(f.sums, addends.reshape(f.sums.shape))
            np.copyto(f.fragments, f.sums)
            # Warps come last, where there are most of them.
            sums = aligned_sums(
                f.a.transpose(2, 1, 0).copy(), f.b.transpose(2, 1, 0).copy(), f.product.transpose(1, 2, 0).copy(), d_type
            )
            np.copyto(f.product, sums.transpose(2, 0, 1))
            np.copyto(f.sums, f.fragments)
            return total

        chip = frame.machine.tensor_cores is not None and a_type in FACTORS and d_type == c_type
        accumulate = adder(i, (d_type, c_type), out, total, as_chip if chip else None)

        def run() -> None:
            factors()
            if not chip:
                multiply()
            accumulate([np.copy(addend) for addend in c_regs] if crossed else c_regs)

        return run

    return warpwise(bind, i, d_args, [*a_args, *b_args, *c_args], mode=0, flops=2 * m * n * k, keeps=len(a_args))


# From so many warps on rows of one element of each are longer than those of one warp's elements (timed; 4 warps: 42 and 9 us).
MANY_WARPS = 32


@cache
def sums_in_order(m: int, n: int, k: int) -> bool:
    """True if this host's BLAS, which knows other orders, adds the products of each sum one after the other, fused."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((2, rows, k)).astype(np.float32) for rows in (m, n))
    total = np.zeros((2, m, n))
    for left, right in zip(np.moveaxis(a, 2, 0), np.moveaxis(b, 2, 0), strict=True):
        exact = left[:, :, None].astype(np.float64) * right[:, None]
        total = odd_sum(exact, total).astype(np.float32).astype(np.float64)
    return np.array_equal(np.matmul(a, b.transpose(0, 2, 1)), total)


def products(a: Array, b: Array, out: Array) -> None:
    """Multiplies matrices, a (w, m, k) and b (w, n, k) into out (w, m, n), every sum from the lowest k on.

    Products of factors with 11 bits are exact in float32 as far as its range goes, so that a fused sum is the same as one that
    rounds them first.
    """
    if sums_in_order(*a.shape[1:2], *b.shape[1:]):
        np.matmul(a, b.transpose(0, 2, 1), out)
        return
    if len(a) < MANY_WARPS:
        lefts, rights = (factor.transpose(2, 0, 1).copy() for factor in (a, b))
        sums = np.add.reduce(rights[..., None] * lefts[:, :, None], axis=0, initial=np.float32(0))
        np.copyto(out, sums.transpose(0, 2, 1))
        return
    # Warps come last, where there are most of them.
    total = np.zeros((a.shape[1], b.shape[1], len(a)), np.float32)
    for left, right in zip(a.transpose(2, 1, 0).copy(), b.transpose(2, 1, 0).copy(), strict=True):
        total += left[:, None] * right
    np.copyto(out, total.transpose(2, 0, 1))


def adder(
    i: PtxInstruction, types: tuple[str, str], out: Arrays, total: Array, summed: Callable[[Array], Array] | None
) -> Callable[[Arrays], None]:
    """Returns a function that adds C to the products `total` and writes D; `types` of D and C. If `summed` is given, it makes the
    sums from C as float32 (elements, lanes), products and all.
    """
    (d_type, c_type), n = types, total.shape[1]

    def add_integers(addends: Arrays) -> None:
        for register, part, addend in zip(out, total, addends, strict=True):
            value = part.astype(np.int64) + addend
            if "satfinite" in i.mods:
                value = np.clip(value, -(1 << 31), (1 << 31) - 1)
            np.copyto(register, value, casting="unsafe")

    def add_together(addends: Arrays) -> None:
        lanes = [np.broadcast_to(addend, n) for addend in addends]
        if c_type == "f16":
            lanes = [half for pair in lanes for half in pair.copy().view(np.float16).reshape(-1, 2).T.astype(np.float32)]
        both = total + np.stack(lanes) if summed is None else summed(np.stack(lanes))
        if d_type == "f16":
            both = np.ascontiguousarray(half_bits(both).reshape(-1, 2, n).transpose(0, 2, 1)).view(np.uint32)[..., 0]
        for register, value in zip(out, both, strict=True):
            np.copyto(register, value)

    def add_reals(addends: Arrays) -> None:
        for part, addend, register in zip(total, addends, out, strict=True):
            np.add(part, addend, register)

    return add_integers if d_type == "s32" else add_together if "f16" in types or summed else add_reals


WMMA_SHAPES = {
    **dict.fromkeys(("f16", "bf16", "s8", "u8"), ("m16n16k16", "m8n32k16", "m32n8k16")),
    "tf32": ("m16n16k8",),
    "f64": ("m8n8k4",),
}


@opcode(
    "wmma",
    forms=".load.a .load.b .load.c .store.d .mma .sync.aligned .row .col: m16n16k16 m8n32k16 m32n8k16 .f16 (f16, f32) .bf16 .s8 "
    ".u8 {.satfinite}, m16n16k8 .tf32, m8n8k4 .f64",
)
def wmma(i: PtxInstruction) -> Plan:
    if "mma" not in i.mods:
        return transfer(i)
    numbers, layouts = [NUMBERS.removeprefix("!")] * 4, ["row col"] * 2
    shape, *types = taken(i, shapes_of(WMMA_SHAPES), *numbers, "satfinite", "mma", "rn", *layouts, "sync", "aligned")
    d_type, *factors, c_type = [name for name in types[:4] if name]
    a_type, b_type = factors or ("f16", "f16")
    if shape not in WMMA_SHAPES.get(a_type, ()) or a_type != b_type:
        raise Unsupported("this wmma")
    return multiplied(i, shape, (d_type, a_type, b_type, c_type))


def transfer(i: PtxInstruction) -> Plan:
    """Decodes wmma.load and .store of a matrix, B by columns."""
    action, side, layout, shape, named, kind, *_ = taken(
        i, "!load store", "!a b c d", "!row col", shapes_of(WMMA_SHAPES), SPACES, NUMBERS, "sync", "aligned"
    )
    (m, n, k), space, of_b, load = lengths(shape), space_of(named), side == "b", action == "load"
    factors = [f for f in WMMA_SHAPES if shape in WMMA_SHAPES[f]]
    known = factors if side in "ab" else [acc for f in factors for acc in ACCUMULATORS.get(f, ("f32",))]
    if kind not in known or space not in ("global", "shared", "generic"):
        raise Unsupported("this wmma")
    target, memory, *rest = i.operands if load else (i.operands[1], i.operands[0], *i.operands[2:])
    rows, columns = {"a": (m, k), "b": (n, k)}.get(side, (m, n))
    size, word = BITS.get(kind, 32) // 8, "b64" if kind == "f64" else "b32"
    words, elements = columns * size // TYPES[word].bytes, 2 if side in "cd" and kind != "f16" else 1
    registers = items(target, 8 if kind == "f16" and side in "ab" else rows * words // WARP)
    base, offset = address_arg(memory, space)
    strides = args("u32", *rest)
    # The elements' places in memory, and their numbers in the matrix.
    by_rows, number = (layout == "row") != of_b, np.arange(rows * columns).reshape(rows, columns)
    inner, logical = (columns, number.reshape(-1)) if by_rows else (rows, number.T.reshape(-1))
    major, minor = np.divmod(np.arange(rows * columns), inner)

    def bind(frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
        port = PORTS[space](frame.machine.memory, i, frame.n, size, "ld" if load else "st")

        def run() -> None:
            start = np.broadcast_to(ins[0], frame.n) + ins[0].dtype.type(offset)
            stride = np.broadcast_to(ins[1], frame.n).astype(np.int64) if strides else np.full(frame.n, inner)
            rows_of_words = np.empty((frame.n // WARP, rows, words), TYPES[word].dtype)
            parts = fragment(rows_of_words, elements, of_b)
            if not load:
                parts[...] = np.stack([np.broadcast_to(r, frame.n) for r in ins[1 + len(strides) :]]).reshape(parts.shape)
            matrix = rows_of_words.view(UNSIGNED[size]).reshape(-1, rows * columns)
            for first in range(0, rows * columns, WARP):
                here = slice(first, first + WARP)
                steps = stride.reshape(-1, WARP) * major[here] + minor[here]
                addresses = start + (steps.reshape(-1) * size).astype(start.dtype)
                buffer = np.empty(frame.n, ELEMENT[size])
                if load:
                    gather(port.resolve(frame.lanes, addresses), buffer)
                    matrix[:, logical[here]] = buffer.view(UNSIGNED[size]).reshape(-1, WARP)
                else:
                    buffer[:] = matrix[:, logical[here]].reshape(-1)
                    store(port, frame.lanes, addresses, buffer)
            for register, value in zip(out, np.resize(parts.reshape(-1, frame.n), (len(registers), frame.n)), strict=False):
                np.copyto(register, value)

        return run

    held = args(word, *registers)
    return warpwise(bind, i, held if load else (), (base, *strides, *(() if load else held)))


DEPTH = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}
"""K by type: 32 bytes."""

WGMMA_SHAPES = f"!{' '.join(f'm64n{n}k{k}' for n in range(8, 257, 8) for k in {*DEPTH.values()})}"

REGISTERS_OF_A = 4


@opcode(
    "wgmma",
    forms=".mma_async.sync.aligned: m64nNk16 .f16 .bf16, m64nNk8 .tf32, m64nNk32 .e4m3 .e5m2, every N from 8 to 256 by 8; D .f32 "
    "(.f16 for .f16 .e4m3 .e5m2); A of registers or descriptor; scale-d, imm-scale, imm-trans; .fence .commit_group .wait_group",
)
def wgmma(i: PtxInstruction) -> Plan:
    if "mma_async" in i.mods:
        return product(i)
    action, *_ = taken(i, "!fence commit_group wait_group", "!sync", "aligned")
    if action == "wait_group":
        (newest,) = i.operands
        if not isinstance(newest, Imm):
            raise Unsupported("a number of groups that is no constant")
        return Plan((), (), control=MultiplyWait(newest.value), collective=WHOLE_WARP)

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        unit = frame.machine.warpgroups
        (unit.fence if action == "fence" else unit.commit)(i, frame.lanes)

    return act(run, collective=WHOLE_WARP)


def product(i: PtxInstruction) -> Plan:
    if "sp" in i.mods:
        raise Unsupported("sparse wgmma")
    if {"satfinite", "s32", "b1", "s8", "u8"} & set(i.mods):
        raise Unsupported("wgmma of integers")
    shape, d_type, a_type, b_type, *_ = taken(i, WGMMA_SHAPES, *[NUMBERS] * 3, "mma_async", "!sync", "aligned")
    _, columns, depth = lengths(shape)
    if depth != DEPTH.get(a_type):
        raise Unsupported(f"wgmma {shape} .{a_type}")
    if not alike(a_type, b_type) or d_type not in ACCUMULATORS.get(a_type, ("f32",)):
        raise Unsupported(f"wgmma .{d_type}.{a_type}.{b_type}")
    d, a, b, scale, *immediates = i.operands
    # Packed or not, an accumulator is moved as its bits.
    d_args = args("b32", *items(d, columns // (4 if d_type == "f16" else 2)))
    registers = hasattr(a, "items")
    a_args = args("b32", *items(a, REGISTERS_OF_A)) if registers else args("b64", a)
    numbers = [operand.value for operand in immediates if isinstance(operand, Imm)]
    transposable = a_type in ("f16", "bf16")
    wanted = 2 + (0 if not transposable else 1 if registers else 2)
    # The signs of A and B, then flags of the matrices in shared memory that are not K-major.
    signs, majors = numbers[:2], ([0] if registers else []) + numbers[2:]
    if len(numbers) != wanted or len(immediates) != wanted or {*signs} - {1, -1} or {*majors} - {0, 1}:
        raise Unsupported(f"immediates of wgmma .{a_type}: {numbers}")
    majors += [0] * (2 - len(majors))
    control = Multiply(
        columns, depth, d_type, (a_type, b_type), registers, signs[0] * signs[1], (not majors[0], not majors[1]), len(d_args)
    )
    reads = *d_args, *a_args, *args("b64 pred", b, scale)
    flops = 2 * 16 * columns * depth
    return Plan(d_args, reads, control=control, collective=WHOLE_WARP, flops=flops)


CHIPS = ("H100",)
"""Chips whose sums are known."""

FACTORS = ("f16", "bf16", "tf32")
"""Types of factors whose sums were recorded."""


def tensor_cores_asked(name: str | None) -> str | None:
    """Returns the chip whose sums a launch, or the environment's CUPYFLASH_TENSOR_CORES, asks for; None: NumPy's.

    Raises ValueError for others.
    """
    name = name or os.environ.get("CUPYFLASH_TENSOR_CORES") or None
    if name not in (None, *CHIPS):
        raise ValueError(
            f"tensor_cores (or CUPYFLASH_TENSOR_CORES) must be None or one of {', '.join(map(repr, CHIPS))}, got {name!r}"
        )
    return name
