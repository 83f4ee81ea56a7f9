"""Control flow: the code of a kernel with the functions that it calls, its basic blocks, and its loops.

Loops are found in two ways. One gives their bodies and the comparisons that decide their exits, for the machine's limits. The
other takes the code between a branch and its target behind it: of such loops it finds the loads that they spin on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..text.syntax import Imm, PtxError, PtxInstruction, PtxProgram, Reg
from .registry import Arg, Branch, Exit, FunctionCall, Plan, Return

MOST_TESTS = 64
"""Most comparisons of a kernel that are followed, those of the largest loops first."""


def callees(control: FunctionCall) -> tuple[str, ...]:
    return () if control.builtin else (control.function,) if control.function else control.candidates


def reachable(kernel: str, plans: dict[str, list[Plan]]) -> tuple[list[str], set[tuple[str, str]]]:
    """Returns the kernel and the functions it may call, and the (caller, callee) pairs of these that are part of a recursion."""
    order, calls = [kernel], dict[str, set[str]]()
    for name in order:
        calls[name] = {c for plan in plans[name] if isinstance(plan.control, FunctionCall) for c in callees(plan.control)}
        order += [callee for callee in sorted(calls[name]) if callee not in order]
    beyond = {name: set(direct) for name, direct in calls.items()}
    for middle in order:
        for name in order:
            if middle in beyond[name]:
                beyond[name] |= beyond[middle]
    return order, {(name, callee) for name in order for callee in calls[name] if name in beyond[callee]}


class ControlFlow:
    """The instructions of a kernel and of all functions that it may call, one function behind the other, and their successors.

    `leaders` are the first instructions of basic blocks: targets of branches, and instructions behind a control instruction.
    """

    def __init__(self, program: PtxProgram, kernel: str, plans: dict[str, list[Plan]]):
        self.kernel = kernel
        self.instructions: list[PtxInstruction] = []
        self.plans: list[Plan] = []
        self.labels: dict[str, int] = {}
        self.starts: dict[str, int] = {}
        self.function_at: list[str] = []
        names, self.cycles = reachable(kernel, plans)
        self.functions = [program.functions[name] for name in names]
        for function in self.functions:
            base = self.starts[function.name] = len(self.instructions)
            self.instructions += function.instructions
            self.plans += plans[function.name]
            self.function_at += [function.name] * len(function.instructions)
            self.labels |= {name: base + at for name, at in function.labels.items()}
            # A function may end without a ret: nothing runs behind its end.
        self.tables = {n: [self.target(t) for t in targets] for f in self.functions for n, targets in f.tables.items()}
        self.return_sites: dict[str, list[int]] = defaultdict(list)
        for pc, plan in enumerate(self.plans):
            for name in callees(plan.control) if isinstance(plan.control, FunctionCall) else ():
                self.return_sites[name].append(pc + 1)
        behind = (pc + 1 for pc, plan in enumerate(self.plans) if plan.control is not None)
        leaders = {0, *self.starts.values(), *self.labels.values(), *behind}
        self.leaders = sorted(pc for pc in leaders if pc < len(self.plans))
        self._next_leader = np.searchsorted(self.leaders, np.arange(len(self.plans)), side="right")

    def target(self, label: str) -> int:
        if label not in self.labels:
            raise PtxError(f"{self.kernel}: no label {label}")
        return self.labels[label]

    def successors(self, pc: int) -> list[int]:
        plan = self.plans[pc]
        control = plan.control
        after = [pc + 1] if pc + 1 < len(self.plans) else []
        stay = after if plan.instruction.predicate else []
        if isinstance(control, Branch):
            return (self.tables[control.table] if control.table else [self.target(control.target)]) + stay
        if isinstance(control, Exit):
            return stay
        if isinstance(control, FunctionCall):
            # A recursive call overwrites registers that the restored lanes will need: they are alive at the call.
            again = any((self.function_at[pc], name) in self.cycles for name in callees(control))
            return [self.starts[name] for name in callees(control)] + (after if control.builtin or again else stay)
        if isinstance(control, Return):
            return self.return_sites.get(self.function_at[pc], []) + stay
        return after

    def block_end(self, pc: int) -> int:
        """Returns the end (exclusive) of the basic block of an instruction."""
        at = int(self._next_leader[pc])
        return self.leaders[at] if at < len(self.leaders) else len(self.plans)

    @cached_property
    def blocks(self) -> dict[int, range]:
        """The instructions of each basic block, by the first one."""
        return {start: range(start, self.block_end(start)) for start in self.leaders}

    @cached_property
    def after(self) -> dict[int, list[int]]:
        """The successors of each basic block."""
        return {start: self.successors(block[-1]) for start, block in self.blocks.items()}

    @cached_property
    def loops(self) -> list[CodeLoop]:
        """The loops, the largest first."""
        before: dict[int, list[int]] = defaultdict(list)
        ends: dict[int, list[int]] = defaultdict(list)  # of each loop, by its head, the blocks that go back to it
        for start, nexts in self.after.items():
            branches = isinstance(self.plans[self.blocks[start][-1]].control, Branch)
            for head in nexts:
                before[head].append(start)
                if branches and head <= start:
                    ends[head].append(start)
        found = []
        for head, todo in ends.items():
            body = {head}
            while todo:
                block = todo.pop()
                if block not in body:
                    body.add(block)
                    todo += before[block]
            found.append(CodeLoop(head, frozenset(body)))
        return sorted(found, key=lambda loop: (-len(loop.body), loop.head))

    @cached_property
    def exit_tests(self) -> tuple[ExitTest, ...]:
        """The comparisons in each loop that decide its exits, through all predicates computed from them."""
        found: list[ExitTest] = []
        for loop in self.loops:
            inside = [self.plans[pc] for start in sorted(loop.body) for pc in self.blocks[start]]
            makers = [plan for plan in inside if any(arg.dtype.kind == "b" for arg in plan.writes)]
            leaving = (start for start in loop.body if not loop.body.issuperset(self.after[start]))
            names = computed_from(makers, predicates(self.plans[self.blocks[start][-1]] for start in leaving))
            for plan in makers:
                if plan.instruction.opcode == "setp" and not names.isdisjoint(plan.written) and not plan.reads[0].packed:
                    found.append(ExitTest(loop, *counted(inside, *plan.reads[:2])))
        return tuple(found[:MOST_TESTS])


@dataclass(frozen=True)
class CodeLoop:
    """Blocks, by their first instructions, that come to `head` again without leaving the others; what they call is among them."""

    head: int
    body: frozenset[int]


@dataclass(frozen=True)
class ExitTest:
    """A comparison of `left` and `right`, on which it depends whether a loop goes on."""

    loop: CodeLoop
    left: Arg
    right: Arg

    def encloses(self, other: ExitTest) -> bool:
        return other.loop.body < self.loop.body

    @property
    def registers(self) -> list[Reg]:
        return [arg.operand for arg in (self.left, self.right) if isinstance(arg.operand, Reg)]


def counted(inside: Sequence[Plan], left: Arg, right: Arg) -> tuple[Arg, Arg]:
    """Returns a comparison of the number that a loop counts, where it compares some of its bits: compilers make x & -1024 == 0 of
    x < 1024, whose left side does not change until the last turn.
    """
    makers = [plan for plan in inside if isinstance(left.operand, Reg) and left.operand.name in plan.written]
    if len(makers) != 1 or makers[0].instruction.opcode not in ("and", "shr") or not isinstance(right.operand, Imm):
        return left, right
    number, bits = makers[0].reads[:2]
    if not isinstance(number.operand, Reg) or not isinstance(bits.operand, Imm):
        return left, right
    if makers[0].instruction.opcode == "shr":
        end = right.operand.value << bits.operand.value
    else:
        end = bits.operand.value & -bits.operand.value  # the first number that has any of these bits
        if right.operand.value or (bits.operand.value + end) & bits.operand.value:
            return left, right
    return number, Arg(Imm(end), number.dtype)


def predicates(plans: Iterable[Plan]) -> set[str]:
    return {plan.instruction.predicate[0].name for plan in plans if plan.instruction.predicate}


def computed_from(plans: Sequence[Plan], names: set[str]) -> set[str]:
    """Returns registers with all those from which these instructions compute them."""
    found, before = set(names), -1
    while len(found) != before:
        before = len(found)
        for plan in plans:
            if not found.isdisjoint(plan.written):
                found |= plan.read
    return found


# -- loops as stretches of code -----------------------------------------------------------------------------------------


def stretches(flow: ControlFlow) -> Iterator[tuple[int, int, list[Plan], set[str]]]:
    """Yields the first and last instruction of each loop, its plans and the predicates of its exits, by the last instruction."""
    targets = [flow.target(c.target) if isinstance(c := p.control, Branch) and not c.table else None for p in flow.plans]
    for last, first in enumerate(targets):
        if first is not None and first <= last:
            inside = range(first, last + 1)
            exits = [pc for pc in inside if (to := targets[pc]) is not None and (pc == last or to not in inside)]
            yield first, last, flow.plans[first : last + 1], predicates(flow.plans[pc] for pc in exits)


def spins(flow: ControlFlow) -> frozenset[PtxInstruction]:
    """Returns the loads of a kernel whose values decide whether a loop around them goes on."""
    found: set[PtxInstruction] = set()
    for _, _, plans, exits in stretches(flow):
        loads = [plan for plan in plans if plan.instruction.opcode == "ld"]
        names = computed_from([plan for plan in plans if plan.instruction.opcode != "ld"], exits)
        found.update(load.instruction for load in loads if not names.isdisjoint(load.written))
    return frozenset(found)
