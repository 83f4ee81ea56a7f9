"""Loads of a loop that goes round until what they read has changed: whoever reads so waits, in whatever order lanes run."""

from __future__ import annotations

from ..text.syntax import Instruction
from .guesses import Flow, read, written
from .registry import Branch


def spins(flow: Flow) -> frozenset[Instruction]:
    """The loads of a kernel on whose values it depends whether a loop around them goes on."""
    found: set[Instruction] = set()
    for last, plan in enumerate(flow.plans):
        if isinstance(plan.control, Branch) and not plan.control.table and (first := flow.jump(plan.control.target)) <= last:
            found |= deciding(flow, first, last)
    return frozenset(found)


def deciding(flow: Flow, first: int, last: int) -> set[Instruction]:
    """The loads of the loop from `first` to `last` that the predicates of the ways out of it are computed from."""
    names: set[str] = set()
    for pc in range(first, last + 1):
        i, control = flow.instructions[pc], flow.plans[pc].control
        if not i.predicate or not isinstance(control, Branch) or control.table:
            continue
        if pc == last or not first <= flow.jump(control.target) <= last:
            names.add(i.predicate[0].name)
    loads: set[Instruction] = set()
    before = -1
    while len(names) != before:
        before = len(names)
        for pc in range(first, last + 1):
            i, plan = flow.instructions[pc], flow.plans[pc]
            if names.isdisjoint(written(plan)):
                continue
            if i.opcode == "ld":
                loads.add(i)
            else:
                names |= read(i, plan)
    return loads
