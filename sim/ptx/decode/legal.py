"""What ptxas refuses of statements whose opcode is executed.

Registers of another size or kind than the instruction's, results that are none, modifiers that must be there, undeclared names.
Decoders take an instruction apart; that it may be written so is the PTX ISA's to say ("Operand Type Checking", and the syntax of
each instruction). docs/limits.md has what ptxas refuses and the machine takes.
"""

from __future__ import annotations

from ..text.operands import is_special
from ..text.syntax import SINK, Function, Imm, Instruction, Program, Reg, symbols
from ..text.types import Unsupported, brief
from .registry import Arg, Branch, Plan

LOOSE = frozenset(
    {"ld", "ldu", "st", "cvt", "cvta", "atom", "red", "mma", "wgmma", "wmma", "ldmatrix", "stmatrix", "movmatrix", "call"}
)
"""Whose registers may be wider than their types, or have types of their own."""

ROUNDINGS = frozenset({"rn", "rz", "rm", "rp", "rna", "rs"})
TO_INTEGER = frozenset({"rni", "rzi", "rmi", "rpi"})
APPROXIMATE = frozenset({"approx"})
NEEDED = {
    "fma": ROUNDINGS,
    "div": ROUNDINGS | APPROXIMATE | {"full"},
    "sqrt": ROUNDINGS | APPROXIMATE,
    "rcp": ROUNDINGS | APPROXIMATE,
    **dict.fromkeys(("rsqrt", "ex2", "lg2", "sin", "cos", "tanh"), APPROXIMATE),
}
"""Of which modifiers an instruction on floating-point numbers must have one."""

SCOPES = frozenset({"cta", "cluster", "gpu", "sys"})
PLAIN = frozenset({"u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f16", "bf16", "f32", "f64"})


def require_legal(i: Instruction, plan: Plan) -> None:
    """Raises `Unsupported` for an instruction that ptxas refuses."""
    for arg in plan.writes:
        if not isinstance(arg.operand, Reg) or is_special(arg.operand.name):
            raise Unsupported("a result needs a register of one's own")
    if i.opcode not in LOOSE:
        for arg in (*plan.writes, *plan.reads):
            fits(i, arg)
    elif i.opcode in ("ld", "st"):
        for arg in (*plan.writes, *plan.reads):
            if isinstance(arg.operand, Reg) and arg.operand != SINK and arg.operand.type.bits < 8 * arg.dtype.itemsize:
                raise Unsupported(f"{brief(arg.operand.name)} is .{arg.operand.type.name}, too narrow for this")
    if i.predicate and i.predicate[0].type.name != "pred":
        raise Unsupported(f"{brief(i.predicate[0].name)} is no predicate")
    require_modifiers(i)


def fits(i: Instruction, arg: Arg) -> None:
    """Whether a register is of the instruction's type."""
    register, whole = arg.operand, bool(i.types) and i.types[-1].kind in "us"
    floating = arg.dtype.kind == "f" and arg.dtype.itemsize > 2  # halves are written as whole numbers
    if isinstance(register, Imm) and ((floating and not register.float_bits) or (whole and register.float_bits)):
        raise Unsupported("a constant of another kind than the instruction's type")
    if not isinstance(register, Reg) or register == SINK or is_special(register.name):
        return
    bits = 1 if arg.dtype.kind == "b" else 8 * arg.dtype.itemsize * (2 if arg.packed else 1)
    kinds = {register.type.kind, "f" if arg.dtype.kind == "f" else "u" if whole else "b"}
    if register.type.bits != bits or kinds >= {"f", "u"} or kinds >= {"f", "s"}:
        raise Unsupported(f"{brief(register.name)} is .{register.type.name}, which is not this instruction's type")


def require_modifiers(i: Instruction) -> None:
    mods = set(i.mods)
    floating = bool(i.types) and i.types[-1].kind == "f"
    if floating and i.opcode in NEEDED and not mods & NEEDED[i.opcode]:
        raise Unsupported(f"{i.opcode} of floating-point numbers needs one of .{', .'.join(sorted(NEEDED[i.opcode]))}")
    if not floating and i.opcode in ("mul", "mad") and not mods & {"lo", "hi", "wide"}:
        raise Unsupported(f"{i.opcode} of integers needs .lo, .hi or .wide")
    if i.opcode in ("shl", "and", "or", "xor", "not") and i.types and i.types[-1].kind not in "bp":
        raise Unsupported(f"{i.opcode} has a type of bits, not .{i.types[-1].name}")
    if i.opcode in ("setp", "set") and i.types:
        signed, wrong = {"lo", "ls", "hi", "hs"}, {"equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"}
        kind = i.types[-1].kind
        if (kind == "s" and mods & signed) or (kind != "f" and mods & wrong):
            raise Unsupported(f"this comparison is not for .{i.types[-1].name}")
    if i.opcode == "fence" and mods & {"acq_rel", "sc"} and not mods & SCOPES:
        raise Unsupported("fence needs a scope")
    if i.opcode in ("ld", "st"):
        meanings = mods & {"weak", "relaxed", "acquire", "release", "volatile", "mmio"}
        if len(meanings - {"mmio"}) > 1 or (i.opcode == "ld" and "release" in mods) or (i.opcode == "st" and "acquire" in mods):
            raise Unsupported(f"{i.opcode} with .{', .'.join(sorted(meanings))}")
        if meanings & {"relaxed", "acquire", "release"} and not mods & SCOPES:
            raise Unsupported(f"{i.opcode}.{min(meanings)} needs a scope")
    if i.opcode == "cvt":
        require_rounding(i, mods)


def require_rounding(i: Instruction, mods: set[str]) -> None:
    """Of a conversion between two plain types: a rounding where something may be lost, and none where nothing can be."""
    names = [mod for mod in i.mods if mod in PLAIN]
    if len(names) != 2 or len(i.types) != 2:
        return
    to, source = i.types
    rounded, whole = bool(mods & ROUNDINGS), bool(mods & TO_INTEGER)
    if to.kind == "f":
        needed = source.kind != "f" or to.bits < source.bits or (to.bits == source.bits == 16 and to.name != source.name)
        if needed and not rounded:
            raise Unsupported(f"cvt to .{to.name} from .{source.name} needs a rounding")
        if rounded and source.kind == "f" and to.bits > source.bits:
            raise Unsupported(f"cvt to .{to.name} from .{source.name} rounds nothing")
    elif source.kind == "f" and not whole:
        raise Unsupported(f"cvt to .{to.name} from .{source.name} needs one of .{', .'.join(sorted(TO_INTEGER))}")


def require_names(program: Program, function: Function, i: Instruction, plan: Plan) -> None:
    """Raises `Unsupported` for names that nothing has."""
    if isinstance(plan.control, Branch) and plan.control.target and plan.control.target not in function.labels:
        raise Unsupported(f"there is no label {brief(plan.control.target)}")
    if i.opcode == "call":
        return  # its operands are functions and prototypes, which `resolve_call` looks up
    for symbol in symbols(i.operands):
        name = symbol.name
        known = name in function.names or name in program.variables or name in function.labels or name in function.tables
        if not (known or name in program.functions or name in program.unreadable):
            raise Unsupported(f"{brief(name)} is not declared")
