"""Plans of all functions of a program, with what each call may reach."""

from __future__ import annotations

from ..text.syntax import Function, Program
from ..text.types import Unsupported, UnsupportedPTX
from . import ops
from .calls import BUILTINS, address_taken, refuse_shared_frames
from .registry import Call, Plan, replace


def decode_all(program: Program) -> dict[str, list[Plan]]:
    """Plans of all functions. Raises `UnsupportedPTX` with every instruction that has none."""
    plans: dict[str, list[Plan]] = {}
    bad = list(program.unsupported)
    for function in program.functions.values():
        plans[function.name] = []
        for instruction in function.instructions:
            try:
                plan = ops.decode(instruction)
                if isinstance(plan.control, Call):
                    plan = resolve_call(program, function, plan, plan.control)
                plans[function.name].append(plan)
            except Unsupported as error:
                bad.append((instruction.line, instruction.text, str(error)))
    if not bad:
        bad += refuse_shared_frames(program, plans)
    if bad:
        raise UnsupportedPTX(sorted(bad))
    return plans


def resolve_call(program: Program, caller: Function, plan: Plan, control: Call) -> Plan:
    """The plan with what the call can reach: one function, one of the device, or all that fit a call through a pointer."""
    if not control.function:
        sizes = {v.name: v.size for v in caller.variables}
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
