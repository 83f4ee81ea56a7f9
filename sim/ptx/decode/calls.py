"""The call graph: what a kernel may call, recursion, the addresses of functions, and the functions that the device brings along."""

from __future__ import annotations

from ..text.syntax import Program, Refusal
from .registry import Call, Plan

FUNCTION_WINDOW = 3 << 56
"""Addresses of functions, 16 apart in the order of the module."""


BUILTINS = {"vprintf": 2, "__assertfail": 5}
"""Functions without a body that the machine executes, with the number of their parameters."""


def address_taken(program: Program) -> set[str]:
    """Functions whose address is a value somewhere: a call through a pointer may go to them."""
    taken = {name for v in program.variables.values() for _, name, _, _ in v.pointers}
    for function in program.functions.values():
        for instruction in function.instructions:
            if instruction.opcode != "call":
                taken |= {o.name for o in instruction.operands if hasattr(o, "name")}
    return {name for name in taken if name in program.functions and program.functions[name].defined}


def callees(control: Call) -> tuple[str, ...]:
    return () if control.builtin else (control.function,) if control.function else control.candidates


def reachable(kernel: str, plans: dict[str, list[Plan]]) -> tuple[list[str], set[tuple[str, str]]]:
    """The kernel and the functions it may call, and which (caller, callee) of them are part of a recursion."""
    order, calls = [kernel], dict[str, set[str]]()
    for name in order:
        calls[name] = {c for plan in plans[name] if isinstance(plan.control, Call) for c in callees(plan.control)}
        order += [callee for callee in sorted(calls[name]) if callee not in order]
    beyond = {name: set(direct) for name, direct in calls.items()}
    for middle in order:
        for name in order:
            if middle in beyond[name]:
                beyond[name] |= beyond[middle]
    return order, {(name, callee) for name in order for callee in calls[name] if name in beyond[callee]}


def shared_frames(program: Program, plans: dict[str, list[Plan]]) -> list[tuple[str, Refusal]]:
    """(function, call) within a recursion by functions with local arrays: all levels would have the same ones."""
    return [
        (name, (function.instructions[pc].line, function.instructions[pc].text, "recursion of a function with local arrays"))
        for name, function in program.functions.items()
        if any(v.space == "local" for v in function.variables)
        for pc, plan in enumerate(plans[name])
        if isinstance(plan.control, Call) and any((name, callee) in reachable(name, plans)[1] for callee in callees(plan.control))
    ]


def function_addresses(program: Program) -> dict[str, int]:
    return {name: FUNCTION_WINDOW + 16 * number for number, name in enumerate(program.functions)}
