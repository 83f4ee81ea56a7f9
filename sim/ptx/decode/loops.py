"""The loops of a kernel, and what they compare to know whether to go on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..text.syntax import Instruction, Reg
from .guesses import read, written
from .registry import Arg, Branch, Plan

MOST_TESTS = 64
"""Comparisons of a kernel that are looked at, those of the largest loops first."""


@dataclass(frozen=True)
class Blocks:
    """Straight code of a kernel by its first instructions: `end` of each (exclusive), and `after`, where it may go on."""

    instructions: Sequence[Instruction]
    plans: Sequence[Plan]
    end: dict[int, int]
    after: dict[int, list[int]]

    @classmethod
    def of(
        cls,
        instructions: Sequence[Instruction],
        plans: Sequence[Plan],
        leaders: Sequence[int],
        successors: Callable[[int], list[int]],
    ) -> Blocks:
        end = dict(zip(leaders, [*leaders[1:], len(plans)], strict=True))
        return cls(instructions, plans, end, {start: successors(end[start] - 1) for start in leaders})


@dataclass(frozen=True)
class Loop:
    """Blocks, by their first instructions, that come to `head` again without leaving the others; what they call is among them."""

    head: int
    body: frozenset[int]


@dataclass(frozen=True)
class ExitTest:
    """A comparison of `left` and `right`, on which it depends whether a loop goes on."""

    loop: Loop
    left: Arg
    right: Arg

    def encloses(self, other: ExitTest) -> bool:
        return other.loop.body < self.loop.body

    @property
    def registers(self) -> list[Reg]:
        return [arg.operand for arg in (self.left, self.right) if isinstance(arg.operand, Reg)]


def loops(blocks: Blocks) -> list[Loop]:
    """The largest first."""
    before: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)  # of each loop, by its head, the blocks that go back to it
    for start, nexts in blocks.after.items():
        control = blocks.plans[blocks.end[start] - 1].control
        for head in nexts:
            before[head].append(start)
            if isinstance(control, Branch) and head <= start:
                ends[head].append(start)
    found = []
    for head, backs in ends.items():
        body, todo = {head}, list(backs)
        while todo:
            block = todo.pop()
            if block not in body:
                body.add(block)
                todo += before[block]
        found.append(Loop(head, frozenset(body)))
    return sorted(found, key=lambda loop: (-len(loop.body), loop.head))


def exit_tests(blocks: Blocks, loops: Sequence[Loop]) -> tuple[ExitTest, ...]:
    """What the exits of each loop compare in it, through whatever their predicates are made of."""
    makers = {pc for pc, plan in enumerate(blocks.plans) if any(arg.dtype.kind == "b" for arg in plan.writes)}
    found: list[ExitTest] = []
    for loop in loops:
        names, before = predicates_of_exits(blocks, loop), -1
        inside = [pc for start in loop.body for pc in range(start, blocks.end[start]) if pc in makers]
        while len(names) != before:
            before = len(names)
            for pc in inside:
                if not names.isdisjoint(written(blocks.plans[pc])):
                    names |= read(blocks.instructions[pc], blocks.plans[pc])
        for pc in sorted(inside):
            plan = blocks.plans[pc]
            if blocks.instructions[pc].opcode == "setp" and not names.isdisjoint(written(plan)) and not plan.reads[0].packed:
                found.append(ExitTest(loop, *plan.reads[:2]))
    return tuple(found[:MOST_TESTS])


def predicates_of_exits(blocks: Blocks, loop: Loop) -> set[str]:
    """The predicates of the branches that leave a loop, or stay in it."""
    leaving = (start for start in loop.body if not loop.body.issuperset(blocks.after[start]))
    last = (blocks.instructions[blocks.end[start] - 1] for start in leaving)
    return {i.predicate[0].name for i in last if i.predicate}
