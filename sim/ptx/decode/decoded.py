"""All functions of a module as plans. Statements that the machine does not execute, or that ptxas refuses, are refused here.

A decoder takes an instruction apart; the checks here refuse instructions that ptxas refuses although their opcode is executed:
registers of another size or kind than the instruction's, constants as results, missing modifiers, undeclared names (PTX ISA,
"Operand Type Checking", and the syntax of each instruction). docs/limits.md lists forms that ptxas refuses and the machine takes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..text.parser import is_special
from ..text.syntax import SINK, Function, Imm, PtxInstruction, PtxProgram, Refusal, Reg, Unsupported, UnsupportedPTX, brief, symbols
from . import access, control, elementwise, made_maps, matrices, transfers, warp
from .flow import callees, reachable
from .registry import Arg, Branch, FunctionCall, Plan, decode, known

__all__ = ["access", "control", "elementwise", "made_maps", "matrices", "transfers", "warp"]  # they fill the table of opcodes

FUNCTION_WINDOW = 3 << 56
"""Addresses of functions, 16 apart in the order of the module."""


BUILTINS: dict[str, tuple[str, str]] = {
    "vprintf": ("Q Q", "i"),
    "__assertfail": ("Q Q I Q Q", ""),
    "malloc": ("Q", "Q"),
    "free": ("Q", ""),
    "cudaGraphSetConditional": ("Q I", ""),
    "__cudaCDP2GetParameterBufferV2": ("Q 3I 3I I", "Q"),
    "__cudaCDP2LaunchDeviceV2": ("Q Q", "i"),
    "__cudaCDP2StreamCreateWithFlags": ("Q I", "i"),
    "__cudaCDP2StreamDestroy": ("Q", "i"),
    "__cudaCDP2StreamWaitEvent": ("Q Q I", "i"),
    "__cudaCDP2EventCreateWithFlags": ("Q I", "i"),
    "__cudaCDP2EventRecord": ("Q Q", "i"),
    "__cudaCDP2EventDestroy": ("Q", "i"),
    "__cudaCDP2Malloc": ("Q Q", "i"),
    "__cudaCDP2Free": ("Q", "i"),
    "__cudaCDP2MemcpyAsync": ("Q Q Q I Q", "i"),
    "__cudaCDP2MemsetAsync": ("Q I Q Q", "i"),
    "__cudaCDP2GetLastError": ("", "i"),
    "__cudaCDP2PeekAtLastError": ("", "i"),
    "__cudaCDP2GetErrorString": ("I", "Q"),
    "__cudaCDP2GetErrorName": ("I", "Q"),
    "__cudaCDP2GetDevice": ("Q", "i"),
    "__cudaCDP2GetDeviceCount": ("Q", "i"),
    "__cudaCDP2DeviceGetAttribute": ("Q I I", "i"),
}
"""Functions without a body that the machine executes: a format of `struct` for each parameter, and that of the result."""


def address_taken(program: PtxProgram) -> set[str]:
    """Returns functions whose address is a value somewhere: a call through a pointer may go to them."""
    taken = {name for v in program.variables.values() for _, name, _, _ in v.pointers}
    for function in program.functions.values():
        taken |= {s.name for i in function.instructions if i.opcode != "call" for s in symbols(i.operands)}
    return {name for name in taken if name in program.functions and program.functions[name].defined}


SHARED_FRAME = "recursion of a function with local arrays"


def has_local_arrays(function: Function) -> bool:
    return any(v.space == "local" for v in function.variables)


def shared_frames(program: PtxProgram, plans: dict[str, list[Plan]]) -> list[tuple[str, Refusal]]:
    """Returns (function, call) within a recursion by functions with local arrays, which all levels would share.

    A call through a pointer may go to many functions, and may be none: it is looked at when it is made.
    """
    return [
        (name, (plan.instruction.line, plan.instruction.text, SHARED_FRAME))
        for name, function in program.functions.items()
        if has_local_arrays(function)
        for plan in plans[name]
        if isinstance(plan.control, FunctionCall)
        and plan.control.function
        and any((name, callee) in reachable(name, plans)[1] for callee in callees(plan.control))
    ]


def function_addresses(program: PtxProgram) -> dict[str, int]:
    return {name: FUNCTION_WINDOW + 16 * number for number, name in enumerate(program.functions)}


MOST_STATIC = 227 << 10
"""Bytes of shared memory that a thread block of any device can have."""


@dataclass(frozen=True)
class Decoded:
    """The plans of all functions, and the statements that are not executed: of each function, of declarations, of the whole module.

    A function with refused statements has empty plans in their place.
    """

    program: PtxProgram
    plans: dict[str, list[Plan]]
    refused: dict[str, list[Refusal]]

    def refusals(self, kernel: str) -> list[Refusal]:
        """Returns the statements that are not executed, of a kernel and of the functions and declarations that it can reach."""
        names = reachable(kernel, self.plans)[0]
        used = {s.name for name in names for i in self.program.functions[name].instructions for s in symbols(i.operands)}
        own = [v for name in names for v in self.program.functions[name].variables]
        static = sum(v.size for v in (*self.program.variables.values(), *own) if v.space == "shared" and v.name in used)
        if static > MOST_STATIC:
            reason = f"{static:,} bytes of static shared memory; a thread block has at most {MOST_STATIC:,}"
            return [(0, brief(kernel), reason)]
        found = {*self.program.unsupported, *(item for name in names for item in self.refused[name])}
        if self.program.unreadable:
            operands = [o for name in names for i in self.program.functions[name].instructions for o in i.operands]
            found |= {item for name, item in self.program.unreadable.items() if any(s.name == name for s in symbols(operands))}
        return sorted(found)


def decode_all(program: PtxProgram) -> Decoded:
    """Returns plans of all functions. Raises `UnsupportedPTX`, with all refused statements, if no kernel is left to run."""
    plans: dict[str, list[Plan]] = {}
    refused: dict[str, list[Refusal]] = {}
    for function in program.functions.values():
        plans[function.name] = []
        refused[function.name] = bad = [unread(item) for item in function.unsupported]
        for instruction in function.instructions:
            try:
                plan = decode(instruction)
                require_legal(plan)
                require_names(program, function, plan)
                if isinstance(plan.control, FunctionCall):
                    plan = resolve_call(program, function, plan, plan.control)
            except Unsupported as error:
                plan = Plan((), (), instruction=instruction)
                bad.append((instruction.line, instruction.text, str(error)))
            plans[function.name].append(plan)
    for name, item in shared_frames(program, plans):
        refused[name].append(item)
    decoded = Decoded(program, plans, refused)
    every = {*program.unsupported, *program.unreadable.values(), *(item for bad in refused.values() for item in bad)}
    if every and all(decoded.refusals(name) for name in program.kernels):
        raise UnsupportedPTX(sorted(every))
    return decoded


def unread(item: Refusal) -> Refusal:
    """Returns the refusal of a statement that the parser could not read: an opcode that is not executed is reason enough."""
    line, text, _ = item
    match = re.match(r"(?:@!?\S+\s+)?([a-z]\w*)", text)
    return (line, text, f"opcode {match[1]} is not executed") if match and not known(match[1]) else item


def resolve_call(program: PtxProgram, caller: Function, plan: Plan, control: FunctionCall) -> Plan:
    """Returns the plan with the functions that the call can reach: one, a builtin, or all that fit a call through a pointer."""
    if not control.function:
        sizes = {v.name: v.size for v in caller.variables}
        undeclared = [name for name in (*control.arguments, *control.results) if name not in sizes]
        if undeclared:
            raise Unsupported(f"{brief(undeclared[0])} is no parameter that is declared here")
        wanted = [[sizes[name] for name in names] for names in (control.arguments, control.results)]
        fit = tuple(
            name
            for name in sorted(address_taken(program))
            if [[v.size for v in part] for part in (program.functions[name].params, program.functions[name].returns)] == wanted
        )
        return replace(plan, control=replace(control, candidates=fit))
    function = program.functions.get(control.function)
    if function is not None and function.defined:
        return plan
    own = BUILTINS.get(control.function)
    if own is not None and len(own[0].split()) == len(control.arguments):
        return replace(plan, control=replace(control, function="", builtin=control.function))
    raise Unsupported(f"function {control.function} has no body")


LOOSE = frozenset(
    {"ld", "ldu", "st", "suld", "sust", "cvt", "cvta", "atom", "red", "mma", "wgmma", "wmma", "ldmatrix", "stmatrix", "movmatrix"}
    | {"call"}
)
"""Opcodes whose registers may be wider than their types, or have types of their own."""

ROUNDINGS = frozenset({"rn", "rz", "rm", "rp", "rna", "rs"})
TO_INTEGER = frozenset({"rni", "rzi", "rmi", "rpi"})
SCOPES = frozenset({"cta", "cluster", "gpu", "sys"})
PLAIN = frozenset({"u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f16", "bf16", "f32", "f64"})


def require_legal(plan: Plan) -> None:
    """Raises `Unsupported` for an instruction that ptxas refuses."""
    i = plan.instruction
    for arg in plan.writes:
        if not isinstance(arg.operand, Reg) or is_special(arg.operand.name):
            raise Unsupported("a result needs a register of one's own")
    if i.opcode not in LOOSE:
        for arg in (*plan.writes, *plan.reads):
            fits(i, arg)
    elif i.opcode in ("ld", "st", "suld", "sust"):
        for arg in (*plan.writes, *plan.reads):
            if isinstance(arg.operand, Reg) and arg.operand != SINK and arg.operand.type.bits < 8 * arg.dtype.itemsize:
                raise Unsupported(f"{brief(arg.operand.name)} is .{arg.operand.type.name}, too narrow for this")
    if i.predicate and i.predicate[0].type.name != "pred":
        raise Unsupported(f"{brief(i.predicate[0].name)} is no predicate")
    require_modifiers(i)


def fits(i: PtxInstruction, arg: Arg) -> None:
    """Raises `Unsupported` for a register that is not of the instruction's type."""
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


def require_modifiers(i: PtxInstruction) -> None:
    mods = set(i.mods)
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


def require_rounding(i: PtxInstruction, mods: set[str]) -> None:
    """Raises `Unsupported` if a conversion of plain types lacks a rounding where it may lose bits, or has one where it cannot."""
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


def require_names(program: PtxProgram, function: Function, plan: Plan) -> None:
    """Raises `Unsupported` for undeclared names."""
    if isinstance(plan.control, Branch) and plan.control.target and plan.control.target not in function.labels:
        raise Unsupported(f"there is no label {brief(plan.control.target)}")
    if plan.instruction.opcode == "call":
        return  # its operands are functions and prototypes, which `resolve_call` looks up
    own = (function.names, function.labels, function.tables, program.variables, program.functions, program.unreadable)
    for symbol in symbols(plan.instruction.operands):
        if not any(symbol.name in names for names in own):
            raise Unsupported(f"{brief(symbol.name)} is not declared")
