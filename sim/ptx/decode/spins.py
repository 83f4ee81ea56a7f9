"""Loops that go round until what they read has changed: whoever reads so waits, in whatever order lanes run."""

from __future__ import annotations

from ..text.syntax import Instruction
from .guesses import Flow, read, written
from .registry import Branch, PhaseWait

QUIET = frozenset({"nanosleep", "fence", "membar"})
"""What a loop that only waits may do besides arithmetic, its loads and its branches."""


def spins(flow: Flow) -> frozenset[Instruction]:
    """The loads of a kernel on whose values it depends whether a loop around them goes on."""
    found: set[Instruction] = set()
    for last, plan in enumerate(flow.plans):
        if isinstance(plan.control, Branch) and not plan.control.table and (first := flow.jump(plan.control.target)) <= last:
            found |= deciding(flow, first, last)
    return frozenset(found)


def deciding(flow: Flow, first: int, last: int) -> set[Instruction]:
    """The loads of the loop from `first` to `last` that the predicates of the ways out of it are computed from."""
    names = exits(flow, first, last)
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


def exits(flow: Flow, first: int, last: int) -> set[str]:
    """The predicates of the ways out of a loop."""
    names: set[str] = set()
    for pc in range(first, last + 1):
        i, control = flow.instructions[pc], flow.plans[pc].control
        if not i.predicate or not isinstance(control, Branch) or control.table:
            continue
        if pc == last or not first <= flow.jump(control.target) <= last:
            names.add(i.predicate[0].name)
    return names


def waits(flow: Flow) -> dict[int, int]:
    """Loops that only wait, by their heads, with their last instructions: whether they go on depends on memory or an mbarrier
    alone, and a turn leaves nothing behind."""
    found = {}
    for last, plan in enumerate(flow.plans):
        if isinstance(plan.control, Branch) and not plan.control.table:
            first = flow.jump(plan.control.target)
            if first <= last and only_waits(flow, first, last):
                found[first] = last
    return found


def only_waits(flow: Flow, first: int, last: int) -> bool:
    """Whether the loop from `first` to `last` only waits."""
    reads, changed = set[str](), set[str]()
    for pc in range(first, last + 1):
        i, plan = flow.instructions[pc], flow.plans[pc]
        asks = i.opcode == "ld" or isinstance(plan.control, PhaseWait) or (i.opcode == "atom" and {"cas", "exch"} & set(i.mods))
        if asks:
            reads.update(written(plan))
        elif not (plan.pure or isinstance(plan.control, Branch) or i.opcode in QUIET):
            return False
        changed.update(written(plan))
    names = exits(flow, first, last)
    before = -1
    while len(names) != before:
        before = len(names)
        for pc in range(first, last + 1):
            i, plan = flow.instructions[pc], flow.plans[pc]
            if not names.isdisjoint(written(plan)):
                names |= read(i, plan)
    return not names.isdisjoint(reads) and names.isdisjoint(carried(flow, first, last) & changed)


def carried(flow: Flow, first: int, last: int) -> set[str]:
    """Registers that a turn of the loop may read before it writes them."""
    found, done = set[str](), set[str]()
    for pc in range(first, last + 1):
        i, plan = flow.instructions[pc], flow.plans[pc]
        found |= read(i, plan) - done
        if not i.predicate:
            done.update(written(plan))
    return found
