"""Plans of all functions of a program, with what each call may reach, and what of them is not executed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..text.syntax import Function, Program, Refusal, symbols
from ..text.types import Unsupported, UnsupportedPTX, brief
from . import ops
from .calls import BUILTINS, address_taken, reachable, shared_frames
from .legal import require_legal, require_names
from dataclasses import replace

from .registry import Call, Plan

MOST_STATIC = 227 << 10
"""Bytes of shared memory that a thread block of any device can have."""


@dataclass(frozen=True)
class Decoded:
    """The plans of all functions, and what of each function, of the declarations and of the whole module is not executed.

    A function with refused statements has plans that stand for nothing in their place.
    """

    program: Program
    plans: dict[str, list[Plan]]
    refused: dict[str, list[Refusal]]

    def refusals(self, kernel: str) -> list[Refusal]:
        """What is not executed of a kernel and of the functions and declarations that it can reach."""
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


def decode_all(program: Program) -> Decoded:
    """Plans of all functions. Raises `UnsupportedPTX`, with everything that is not executed, where no kernel is left to run."""
    plans: dict[str, list[Plan]] = {}
    refused: dict[str, list[Refusal]] = {}
    for function in program.functions.values():
        plans[function.name] = []
        refused[function.name] = bad = [unread(item) for item in function.unsupported]
        for instruction in function.instructions:
            try:
                plan = ops.decode(instruction)
                require_legal(instruction, plan)
                require_names(program, function, instruction, plan)
                if isinstance(plan.control, Call):
                    plan = resolve_call(program, function, plan, plan.control)
            except Unsupported as error:
                plan = Plan((), ())
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
    """A statement that the parser could not read: of an opcode that is not executed it does not matter why."""
    line, text, _ = item
    match = re.match(r"(?:@!?\S+\s+)?([a-z]\w*)", text)
    return (line, text, f"opcode {match[1]} is not executed") if match and not ops.known(match[1]) else item


def resolve_call(program: Program, caller: Function, plan: Plan, control: Call) -> Plan:
    """The plan with what the call can reach: one function, one of the device, or all that fit a call through a pointer."""
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
    if BUILTINS.get(control.function) == len(control.arguments):
        return replace(plan, control=replace(control, function="", builtin=control.function))
    raise Unsupported(f"function {control.function} has no body")
