"""wmma: whole matrices in fragments whose layout the ISA leaves open (PTX ISA, "Matrix multiply-accumulate: wmma").

Element e of a matrix (row by row) is in lane e % 32, in element e // 32 of the lane's registers; float16 fragments of A and
B have eight registers whatever the shape, and hold each element as often as there is room. Memory is read and written in its own
order, 32 neighbours at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...memory.ports import PORTS
from ...state.lanes import WARP
from ...text.types import ELEMENT, TYPES, UNSIGNED, Array
from ..registry import WHOLE_WARP, Frame, Instruction, Mods, Plan, Thunk, Unsupported, arg, items, opcode
from .access import address_arg, gather, store, take_space
from .half import narrow
from .tensor import BITS, decoder, whole_warps

SHAPES = {
    **dict.fromkeys(("f16", "bf16", "s8", "u8"), ("m16n16k16", "m8n32k16", "m32n8k16")),
    "tf32": ("m16n16k8",),
    "f64": ("m8n8k4",),
}
ACCUMULATORS = {"f16": ("f16", "f32"), "s8": ("s32",), "u8": ("s32",), "f64": ("f64",)}


def shape_of(mods: Mods) -> tuple[str, int, int, int]:
    name = mods.choice({s for shapes in SHAPES.values() for s in shapes})
    m, n, k = (int(x) for x in name[1:].replace("n", " ").replace("k", " ").split())
    return name, m, n, k


def width(kind: str) -> int:
    """Bytes of a register of a fragment."""
    return 8 if kind == "f64" else 4


def element_bytes(kind: str) -> int:
    return BITS.get(kind, 32) // 8


def unpacked(registers: Sequence[Array], n: int, kind: str, elements: int) -> Array:
    """The bits of a fragment's matrices: (warps, elements) unsigned numbers."""
    size, word = element_bytes(kind), width(kind)
    rows = np.stack([np.broadcast_to(r, n) for r in registers]).astype(UNSIGNED[word], copy=False)
    parts = rows.view(UNSIGNED[size]).reshape(len(registers), -1, WARP, word // size)
    return np.ascontiguousarray(parts.transpose(1, 0, 3, 2).reshape(parts.shape[1], -1)[:, :elements])


def pack(values: Array, registers: Sequence[Array], kind: str) -> None:
    """(warps, elements) unsigned numbers into the registers of a fragment."""
    size, word = element_bytes(kind), width(kind)
    per = word // size
    warps, elements = values.shape
    copies = len(registers) * per * WARP // elements
    parts = np.tile(values, (1, copies)).reshape(warps, len(registers), per, WARP).transpose(1, 0, 3, 2)
    words = np.ascontiguousarray(parts).view(UNSIGNED[word]).reshape(len(registers), -1)
    for register, row in zip(registers, words, strict=True):
        np.copyto(register, row)


@opcode(
    "wmma",
    forms=".load.a .load.b .load.c .store.d .mma .sync.aligned .row .col: m16n16k16 m8n32k16 m32n8k16 .f16 (f16, f32) .bf16 .s8 "
    ".u8 {.satfinite}, m16n16k8 .tf32, m8n8k4 .f64",
)
def wmma(i: Instruction) -> Plan:
    mods = Mods(i, "sync", "aligned")
    action = mods.choice(("load", "store", "mma"))
    return multiply(i, mods) if action == "mma" else transfer(i, mods, action)


def transfer(i: Instruction, mods: Mods, action: str) -> Plan:
    side, layout = mods.choice(("a", "b", "c", "d")), mods.choice(("row", "col"))
    shape, m, n, k = shape_of(mods)
    space = take_space(mods)
    kind = mods.rest.pop() if mods.rest else ""
    mods.done()
    factors = [f for f in SHAPES if shape in SHAPES[f]]
    known = factors if side in "ab" else [acc for f in factors for acc in ACCUMULATORS.get(f, ("f32",))]
    if kind not in known or not layout or space not in ("global", "shared", "generic"):
        raise Unsupported("this wmma")
    load = action == "load"
    fragment, memory, *rest = i.operands if load else (i.operands[1], i.operands[0], *i.operands[2:])
    rows, columns = {"a": (m, k), "b": (k, n)}.get(side, (m, n))
    elements, size, word = rows * columns, element_bytes(kind), width(kind)
    inner, outer = (columns, rows) if layout == "row" else (rows, columns)
    registers = items(fragment, 8 if kind == "f16" and side in "ab" else elements // WARP * size // word)
    base, offset = address_arg(memory, space)
    strides = [arg(o, TYPES["u32"]) for o in rest]
    # Where the elements lie in memory, and which elements of the matrix they are.
    major, minor = np.divmod(np.arange(elements), inner)
    number = np.arange(elements).reshape(rows, columns)
    logical = (number if layout == "row" else number.T).reshape(outer, inner)[major, minor]

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        if frame.n % WARP:
            return lambda: whole_warps(frame, i)
        warps = frame.n // WARP
        port = PORTS[space](frame.machine.memory, i, frame.n, size, "ld" if load else "st")
        values = ins[1 + len(strides) :] if not load else ()

        def run() -> None:
            if not whole_warps(frame, i):
                return
            start = np.broadcast_to(ins[0], frame.n) + ins[0].dtype.type(offset)
            stride = np.broadcast_to(ins[1], frame.n).astype(np.int64) if strides else np.full(frame.n, inner)
            matrix = np.empty((warps, elements), UNSIGNED[size]) if load else unpacked(values, frame.n, kind, elements)
            for first in range(0, elements, WARP):
                here = slice(first, first + WARP)
                steps = stride.reshape(warps, WARP) * major[here] + minor[here]
                addresses = start + (steps.reshape(-1) * size).astype(start.dtype)
                buffer = np.empty(frame.n, ELEMENT[size])
                if load:
                    gather(port.resolve(frame.lanes, addresses), buffer)
                    matrix[:, logical[here]] = buffer.view(UNSIGNED[size]).reshape(warps, WARP)
                else:
                    buffer[:] = matrix[:, logical[here]].reshape(-1)
                    store(port, frame.lanes, addresses, buffer)
            if load:
                pack(matrix, out, kind)

        return run

    bits = TYPES[f"b{8 * word}"]
    fragments = tuple(arg(r, bits) for r in registers)
    reads = (base, *strides) if load else (base, *strides, *fragments)
    return Plan(fragments if load else (), reads, bind, collective=WHOLE_WARP, pure=False)


def multiply(i: Instruction, mods: Mods) -> Plan:
    satfinite = mods.flag("satfinite")
    mods.flag("rn", "row", "col")
    shape, m, n, k = shape_of(mods)
    types, mods.rest = mods.rest, []
    if len(types) == 2:
        types = [types[0], "f16", "f16", types[1]]
    if len(types) != 4 or shape not in SHAPES.get(types[1], ()) or types[1] != types[2]:
        raise Unsupported("this wmma")
    d_type, a_type, _, c_type = types
    if not {d_type, c_type} <= set(ACCUMULATORS.get(a_type, ("f32",))):
        raise Unsupported(f".{d_type} accumulators")
    d, a, b, c = (items(o) for o in i.operands)
    real = np.dtype(np.float64 if a_type == "f64" else np.float32)
    decode = decoder(a_type)

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        if frame.n % WARP:
            return lambda: whole_warps(frame, i)
        left, right, addend = ins[: len(a)], ins[len(a) : len(a) + len(b)], ins[len(a) + len(b) :]

        def matrix(registers: Sequence[Array], rows: int, columns: int) -> Array:
            bits = unpacked(registers, frame.n, a_type, rows * columns)
            values = np.empty(bits.shape, real)
            decode(bits, values)
            return values.reshape(-1, rows, columns)

        def run() -> None:
            if not whole_warps(frame, i):
                return
            product = np.matmul(matrix(left, m, k), matrix(right, k, n)).reshape(-1, m * n)
            bits = unpacked(addend, frame.n, c_type, m * n)
            if d_type == "s32":
                total = product.astype(np.int64) + bits.view(np.int32)
                total = np.clip(total, -(1 << 31), (1 << 31) - 1) if satfinite else total
                pack(total.astype(np.uint32), out, d_type)
                return
            old = bits.view(TYPES[c_type].dtype)
            total = product + old.astype(real)
            if d_type == "f16":
                pack(narrow(total.astype(np.float32), TYPES["f16"]).view(np.uint16), out, d_type)
            else:
                pack(total.view(UNSIGNED[total.itemsize]), out, d_type)

        return run

    bits = TYPES["b64" if a_type == "f64" else "b32"]
    reads = tuple(arg(r, bits) for r in (*a, *b, *c))
    writes = tuple(arg(r, bits) for r in d)
    return Plan(writes, reads, bind, mode=0, collective=WHOLE_WARP, pure=False, flops=2 * m * n * k)
