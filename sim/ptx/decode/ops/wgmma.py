"""wgmma: products of a warpgroup, four warps (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions").

Here operands are read; `execute.warpgroups` acts. Of D (64 x N), warp w of the group has rows 16 w to 16 w + 15, with
g = lane >> 2, t = lane & 3: float32 register 4 j + 2 h + e has row g + 8 h, column 8 j + 2 t + e; with float16, register 2 j + h
has the two columns. A from registers is the m16nNk16 fragment of `ops.tensor` for each warp.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...text.types import TYPES, Array
from ..registry import (
    WHOLE_WARP,
    Arg,
    Frame,
    Imm,
    Instruction,
    Mods,
    Multiply,
    MultiplyWait,
    Plan,
    Thunk,
    Unsupported,
    arg,
    items,
    opcode,
)

DEPTH = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}
"""K by type: 32 bytes."""

ACCUMULATORS = {"f16": ("f32", "f16"), "e4m3": ("f32", "f16"), "e5m2": ("f32", "f16")}
"""Types of D by type of A; for all others float32."""

MIXED = {"e4m3", "e5m2"}
REGISTERS_OF_A = 4


@opcode(
    "wgmma",
    forms=".mma_async.sync.aligned: m64nNk16 .f16 .bf16, m64nNk8 .tf32, m64nNk32 .e4m3 .e5m2, every N from 8 to 256 by 8; D .f32 "
    "(.f16 for .f16 .e4m3 .e5m2); A of registers or descriptor; scale-d, imm-scale, imm-trans; .fence .commit_group .wait_group",
)
def wgmma(i: Instruction) -> Plan:
    mods = Mods(i, "aligned")
    action = mods.choice(("mma_async", "fence", "commit_group", "wait_group"))
    if not mods.flag("sync") or not action:
        raise Unsupported("this form of wgmma")
    if action == "mma_async":
        return product(i, mods)
    mods.done()
    if action == "wait_group":
        (newest,) = i.operands
        if not isinstance(newest, Imm):
            raise Unsupported("a number of groups that is no constant")
        return Plan((), (), control=MultiplyWait(newest.value), collective=WHOLE_WARP)

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        if action == "fence":
            return lambda: frame.machine.warpgroups.fence(i, frame.lanes)
        return lambda: frame.machine.warpgroups.commit(i, frame.lanes)

    return Plan((), (), bind, collective=WHOLE_WARP, pure=False)


def product(i: Instruction, mods: Mods) -> Plan:
    if mods.flag("sp"):
        raise Unsupported("sparse wgmma")
    names = [m for m in mods.rest if m in TYPES or m in DEPTH]
    for name in names:
        mods.rest.remove(name)
    shape = mods.rest.pop(0) if mods.rest else ""
    if "satfinite" in mods.rest or {"s32", "b1", "s8", "u8"} & set(names):
        raise Unsupported("wgmma of integers")
    mods.done()
    if len(names) != 3:
        raise Unsupported("expected three types")
    d_type, a_type, b_type = names
    depth = DEPTH.get(a_type)
    head, _, k = shape.rpartition("k")
    columns = int(head.removeprefix("m64n")) if head.startswith("m64n") else 0
    if depth is None or int(k) != depth or columns % 8 or not 8 <= columns <= 256:
        raise Unsupported(f"wgmma {shape} .{a_type}")
    if (a_type != b_type and not {a_type, b_type} <= MIXED) or d_type not in ACCUMULATORS.get(a_type, ("f32",)):
        raise Unsupported(f"wgmma .{d_type}.{a_type}.{b_type}")
    d, a, b, scale, *immediates = i.operands
    word = TYPES["b32"]
    # Packed or not, an accumulator is moved as its bits.
    d_args = [arg(r, word) for r in items(d, columns // (4 if d_type == "f16" else 2))]
    registers = hasattr(a, "items")
    a_args = [arg(r, word) for r in items(a, REGISTERS_OF_A)] if registers else [arg(a, TYPES["b64"])]
    numbers = [operand.value for operand in immediates if isinstance(operand, Imm)]
    transposable = a_type in ("f16", "bf16")
    wanted = 2 + (0 if not transposable else 1 if registers else 2)
    # The signs of A and B, then which of the matrices in shared memory are not K-major.
    signs, majors = numbers[:2], ([0] if registers else []) + numbers[2:]
    if len(numbers) != wanted or len(immediates) != wanted or {*signs} - {1, -1} or {*majors} - {0, 1}:
        raise Unsupported(f"immediates of wgmma .{a_type}: {numbers}")
    majors += [0] * (2 - len(majors))
    control = Multiply(
        columns, depth, d_type, (a_type, b_type), registers, signs[0] * signs[1], (not majors[0], not majors[1]), len(d_args)
    )
    reads: list[Arg] = [*d_args, *a_args, arg(b, TYPES["b64"]), arg(scale, TYPES["pred"])]
    flops = 2 * 16 * columns * depth
    return Plan(tuple(d_args), tuple(reads), control=control, collective=WHOLE_WARP, flops=flops)
