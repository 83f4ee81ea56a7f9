"""Classes of instructions, as a profiler's instruction mix names them."""

from __future__ import annotations

from ..text.syntax import Instruction
from ..text.types import TYPES

_OPCODES = {
    "tensor core": "mma wmma wgmma",
    "atomic": "atom red",
    "async copy": "cp",
    "load shared": "ldmatrix",
    "store shared": "stmatrix",
    "barrier, fence": "bar barrier mbarrier membar fence",
    "control": "bra brx exit ret call trap brkpt",
    "warp exchange": "shfl vote match redux activemask elect movmatrix",
    "compare, select": "setp set selp slct testp",
    "conversion": "cvt",
    "move": "mov cvta isspacep createpolicy mapa",
    "special function": "rcp sqrt rsqrt ex2 lg2 sin cos tanh",
    "other": "prefetch prefetchu discard applypriority nanosleep pmevent setmaxnreg griddepcontrol",
}
_BY_OPCODE = {name: kind for kind, names in _OPCODES.items() for name in names.split()}
_FLOATS = {"f32": "fp32", "f32x2": "fp32", "tf32": "fp32", "f64": "fp64", "f16": "fp16, bf16", "bf16": "fp16, bf16"}
_FLOATS |= {"f16x2": "fp16, bf16", "bf16x2": "fp16, bf16"}
_SPACES = ("global", "shared", "local", "const", "param")


def instruction_class(instruction: Instruction) -> str:
    """The class of an instruction.

    Loads and stores, those of wmma too, go by their state space ("load global", "store shared", "load generic", ...),
    arithmetic by its last type: "fp32", "fp16, bf16", "fp64", "integer" (logic and shifts among them). "special function" are
    reciprocals, roots, exponentials, logarithms, sines and floating-point divisions below fp64; those of fp64 are "fp64".
    `ldmatrix` loads and `stmatrix` stores shared memory. `cp.async` and its groups are "async copy", whose memory is counted
    as shared and global.
    """
    types = [mod for mod in instruction.mods if mod in TYPES]
    last = types[-1] if types else ""
    arithmetic = _FLOATS.get(last, "integer" if types else "other")
    moves = instruction.opcode == "wmma" and bool({"load", "store"} & set(instruction.mods))
    if instruction.opcode in ("ld", "ldu", "st") or moves:
        named = (mod.partition("::")[0] for mod in instruction.mods)
        space = next((name for name in named if name in _SPACES), "generic")
        stores = instruction.opcode == "st" or "store" in instruction.mods
        return f"{'store' if stores else 'load'} {space}"
    if instruction.opcode == "div" and last in _FLOATS:
        found = "special function"
    else:
        found = _BY_OPCODE.get(instruction.opcode, arithmetic)
    return "fp64" if found == "special function" and last == "f64" else found


def copies_by_lanes(i: Instruction) -> bool:
    """Whether it is a cp.async: no bulk copy, nothing of groups, and no arrival at an mbarrier."""
    return i.opcode == "cp" and "global" in i.mods and "bulk" not in i.mods
