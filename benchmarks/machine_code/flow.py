"""The way of a warp through machine code: the loops, and the trace of one steady turn of a loop.

A branch on known values is decided by computing: constants are followed through moves, additions and comparisons, so that a loop
with a fixed number of turns inside the main one makes exactly those. Values that depend on a kernel's arguments or data are not
known there; `Tracer.decide` has a rule for each such case, and the trace says at which branch which rule was used.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from cupyflash.sim.clock.sass import Instruction

LONGEST = 20_000
# Rules that decide a branch where no other does.
NOTHING_MASKED, STRAIGHT_ON = "nothing is masked", "no rule: straight on"
EXIT = -1
"""The end of a path that goes on until the kernel's."""
WORD = 1 << 32
_REGISTER = re.compile(r"^(U?R)(\d+)")
_PREDICATE = re.compile(r"^!?(U?P)(\d|T)$")
_INTEGER = re.compile(r"^-?0x[0-9a-f]+$|^-?\d+$")
ZERO = ("RZ", "URZ", "SRZ")
# Opcodes that write no register.
STORES = (
    *("STS", "STG", "STL", "ST", "STSM", "RED", "REDG", "LDGSTS", "LDGDEPBAR"),
    *("BAR", "DEPBAR", "BRA", "EXIT", "NOP", "BSSY", "BSYNC"),
)
# Scores that a turn with masks chooses between, each with -inf, at least
FEWEST_MASKED = 16
VOTES = ("VOTE", "VOTEU", "B2R")
HANDED_ON = ("ISETP", "UISETP", "PLOP3", "UPLOP3", "R2UR", "MOV", "UMOV", "IMAD", "LOP3")
MOVES = ("MOV", "UMOV", "MOV32I")
SUMS = ("IADD3", "UIADD3", "VIADD", "IADD", "UIADD", "VIADD3")
COMPARISONS = {"EQ": "__eq__", "NE": "__ne__", "LT": "__lt__", "LE": "__le__", "GT": "__gt__", "GE": "__ge__"}


class Known:
    """Registers and predicates with a known value, from a warp's point of view; whatever else is written becomes unknown.

    `voted` are those that say what a vote of the warp, or of the block at a barrier, came to.
    """

    def __init__(self) -> None:
        self._registers: dict[str, int] = {}
        self._predicates: dict[str, bool] = {}
        self.voted: set[str] = set()

    def value(self, operand: str) -> int | None:
        """The value of an operand, modulo 2^32: a register, or a literal."""
        operand = operand.removesuffix(".reuse")
        if operand in ZERO:
            return 0
        if _INTEGER.match(operand):
            return int(operand, 0) % WORD
        if operand.startswith("-") and (negated := self.value(operand[1:])) is not None:
            return -negated % WORD
        return self._registers.get(operand)

    def holds(self, operand: str) -> bool | None:
        """A predicate, as "!P0"; "" is always true. None where it is not known."""
        name = operand.removeprefix("!")
        truth = True if name in ("", "PT", "UPT") else self._predicates.get(name)
        return None if truth is None else truth != operand.startswith("!")

    def execute(self, instruction: Instruction) -> None:
        """Apply an instruction to the known values."""
        holds = self.holds(instruction.guard)
        if holds is False:
            return
        compared, result = (None, None) if holds is None else (self._compared(instruction), self._result(instruction))
        results = list(written(instruction))
        sources = {each.lstrip("!-") for each in instruction.operands} - set(results)
        votes = instruction.opcode in VOTES or (instruction.opcode in HANDED_ON and bool(sources & self.voted))
        for name in results:
            self._registers.pop(name, None)
            self._predicates.pop(name, None)
            self.voted.discard(name)
            if votes:
                self.voted.add(name)
        if compared is not None:
            first, second = (each.removeprefix("!") for each in instruction.operands[:2])
            self._predicates |= {first: compared} | ({} if second in ("PT", "UPT") else {second: not compared})
        if result is not None:
            self._registers |= result

    def _result(self, instruction: Instruction) -> dict[str, int] | None:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "CS2R":
            return dict.fromkeys(written(instruction), 0) if operands[-1] in ZERO else None
        terms: Sequence[str] = ()
        if opcode in MOVES:
            terms = operands[1:2]
        elif opcode in SUMS and "X" not in instruction.modifiers:
            terms = [each for each in operands[1:] if not _PREDICATE.match(each)]
        elif opcode == "IMAD" and instruction.modifiers[:1] == ("MOV",):
            terms = operands[3:4]
        elif opcode == "IMAD" and instruction.modifiers[:1] == ("IADD",):
            terms = (operands[1], operands[3])
        values = [self.value(each) for each in terms]
        if not values or None in values:
            return None
        return {operands[0]: sum(each for each in values if each is not None) % WORD}

    def _compared(self, instruction: Instruction) -> bool | None:
        """The result of an ISETP with one comparison, whose other input predicate is PT."""
        if instruction.opcode not in ("ISETP", "UISETP") or "EX" in instruction.modifiers:
            return None
        values = [self.value(each) for each in instruction.operands[2:4]]
        relation = next((each for each in instruction.modifiers if each in COMPARISONS), None)
        if relation is None or None in values or instruction.operands[4:5] not in [("PT",), ("UPT",)]:
            return None
        left, right = (
            each if "U32" in instruction.modifiers or each < WORD // 2 else each - WORD for each in values if each is not None
        )
        return bool(getattr(left, COMPARISONS[relation])(right))


def width(instruction: Instruction) -> int:
    """Registers of its result."""
    modifiers = instruction.modifiers
    if instruction.opcode == "HMMA":
        return 4
    if instruction.opcode == "CS2R":
        return 1 if "32" in modifiers else 2
    if instruction.opcode in ("LDSM", "LDS", "LDG", "LDL", "LDC", "LD", "ULDC", "LDCU", "MOV"):
        return 4 if "128" in modifiers or "4" in modifiers else 2 if "64" in modifiers or "2" in modifiers else 1
    return 2 if "WIDE" in modifiers or "64" in modifiers else 1


def written(instruction: Instruction) -> Iterator[str]:
    """Names of the registers and predicates that it writes: leading predicates, the first register, a carry or vote behind it."""
    if instruction.opcode in STORES:
        return
    operands = list(instruction.operands)
    while operands and _PREDICATE.match(operands[0]):
        if (name := operands.pop(0)) not in ("PT", "UPT"):
            yield name
    if instruction.opcode.endswith(("SETP", "PLOP3")) or not operands:
        return
    if register := _REGISTER.match(operands[0]):
        yield from (f"{register[1]}{int(register[2]) + more}" for more in range(width(instruction)))
    for operand in operands[1 : 2 if instruction.opcode in VOTES else 3]:
        if not _PREDICATE.match(operand):
            return
        if re.fullmatch(r"U?P\d", operand):
            yield operand


@dataclass(frozen=True)
class Loop:
    """A loop by its first instruction and its branch back, as indices."""

    head: int
    tail: int

    def __contains__(self, at: int) -> bool:
        return self.head <= at <= self.tail


@dataclass(frozen=True)
class Decision:
    """A branch that could not be computed: where it stands, whether it was taken, by which rule, and what was left out by it."""

    address: int
    taken: bool
    rule: str
    skipped: int

    def __str__(self) -> str:
        return f"{self.address:05x} {'taken' if self.taken else 'not taken'}: {self.rule} ({self.skipped} instructions left out)"


@dataclass(frozen=True)
class Trace:
    """Instructions as one warp issues them, and the branches that rules decided."""

    instructions: tuple[Instruction, ...]
    decisions: tuple[Decision, ...] = ()


@dataclass
class Tracer:
    """Follows a warp through a kernel's code.

    `turns`: of inner loops with products whose number of turns is not in the code, in order. `masked`: in a loop that
    looks at masks in some of its turns, one of those. `early`: wherever there is less to do, that.
    """

    code: Sequence[Instruction]
    turns: Sequence[int] = ()
    masked: bool = False
    early: bool = False

    @cached_property
    def place(self) -> dict[int, int]:
        return {each.address: at for at, each in enumerate(self.code)}

    @cached_property
    def loops(self) -> list[Loop]:
        """The shortest loop of each head, in the order of the code."""
        found: dict[int, Loop] = {}
        for at, each in enumerate(self.code):
            head = self.place.get(each.target) if each.opcode == "BRA" and each.target is not None else None
            if head is not None and head < at:  # what branches to itself stands behind a kernel's end
                found.setdefault(head, Loop(head, at))
        return [found[head] for head in sorted(found)]

    def main_loops(self) -> list[Loop]:
        """Loops over blocks, shortest first: with products, barriers and exponentials; else with products; else any.

        The shortest is the one in which no mask is looked at.
        """
        loops = self.loops
        for wanted in (("HMMA", "BAR", "MUFU"), ("HMMA", "BAR"), ("HMMA",), ()):
            found = [loop for loop in loops if all(self._has(loop, opcode) for opcode in wanted)]
            if found:
                return sorted(found, key=lambda loop: loop.tail - loop.head)
        raise ValueError("no loop in the machine code")

    def _has(self, loop: Loop, opcode: str) -> bool:
        return any(each.opcode == opcode for each in self.code[loop.head : loop.tail + 1])

    def successors(self, at: int) -> Iterator[int]:
        """The instructions to which a warp may go from this one."""
        each = self.code[at]
        branches = jumps(each) and each.target in self.place
        ends = each.opcode in ("EXIT", "RET", "BRX", "BRA", "JMP")
        if (not ends or conditional(each)) and at + 1 < len(self.code):
            yield at + 1
        if branches and each.target is not None:
            yield self.place[each.target]

    def reach(self, start: int, stop: int, floor: int = 0) -> set[int]:
        """The instructions that can be reached from `start` without passing `stop`, or any before the `floor`."""
        seen, todo = {start}, [start]
        while todo:
            for each in self.successors(todo.pop()):
                if each not in seen and each != stop and each >= floor:
                    seen.add(each)
                    todo.append(each)
        return seen

    def steady(self, loop: Loop | None = None) -> Trace:
        """One turn of a loop, by default the main one, after some turns."""
        head = (loop or self.main_loops()[0]).head
        return self.path(head, head)

    def leaving(self, loop: Loop) -> Trace:
        """A loop's last turn, and all that comes behind it."""
        return self.path(loop.head, EXIT, avoid=loop.head)

    def path(self, start: int, end: int, avoid: int | None = None) -> Trace:
        """The way from one instruction to another or to EXIT; if one branch leads to `avoid` and the other does not, the other.

        Raises ValueError if the way does not end.
        """
        found: list[Instruction] = []
        decisions: list[Decision] = []
        known, seen, left = Known(), set(), Counter[int]()
        turns, at = list(self.turns), start
        while True:
            each = self.code[at]
            found.append(each)
            seen.add(at)
            if len(found) > LONGEST:
                raise ValueError(f"no end to the trace from {self.code[start].address:x}: give the turns of inner loops")
            if each.opcode in ("EXIT", "RET") and not each.guard:
                if end != EXIT:
                    raise ValueError(f"the trace from {self.code[start].address:x} leaves the kernel at {each.address:x}")
                return Trace(tuple(found), tuple(decisions))
            taken = False
            if jumps(each) and each.target in self.place:
                target = self.place[each.target]
                truth = condition(each, known)
                if truth is None and target in seen and target <= at and target != end:
                    if at not in left:  # an inner loop with an unknown number of turns: one, unless it makes products
                        left[at] = turns.pop(0) if turns and self._has_products(set(range(target, at))) else 1
                    left[at] -= 1
                    truth = left[at] > 0
                if truth is None and self._leaves(at, target, seen - {start, end, avoid}):
                    truth = True  # once round
                if truth is None:
                    decision = self.decide(at, end, avoid, known.voted)
                    decisions.append(decision)
                    truth = decision.taken
                taken = truth
            known.execute(each)
            at = self.place[each.target] if taken else at + 1  # type: ignore[index]
            if at == end:
                return Trace(tuple(found), tuple(decisions))

    def decide(self, at: int, end: int, avoid: int | None, voted: Collection[str]) -> Decision:
        """A branch on what is not known, in the steady state of a long problem without ragged ends."""
        branch = self.code[at]
        target = self.place[branch.target]  # type: ignore[index]
        first = {False: at + 1, True: target}
        through, beyond = self.reach(at + 1, end), self.reach(target, end)
        only = {False: through - beyond, True: beyond - through}

        def decision(taken: bool, rule: str) -> Decision:
            return Decision(branch.address, taken, rule, len(only[not taken]))

        if "DIV" in branch.modifiers:
            return decision(False, "lanes stay together")
        for goal, wanted in ((end, True), (avoid, False)):
            if goal is not None and goal != EXIT:
                # Not by another turn of a loop around this one.
                floor = goal if at >= goal else 0
                ways = [side for side in first if self._comes_to(first[side], goal, floor) is wanted]
                if len(ways) == 1:
                    return decision(ways[0], "the other way does not come back" if wanted else "the other way goes round again")

        def copies(side: bool) -> list[bool]:
            """True, for each copy on one side only, if it moves 16 bytes."""
            return ["128" in self.code[each].modifiers for each in only[side] if self.code[each].opcode == "LDGSTS"]

        lesser = len(only[True]) <= len(only[False])
        if self.early:
            return decision(lesser, "there is nothing to do")
        for side in first:
            if self._has_products(only[side]) and not self._has_products(only[not side]):
                return decision(side, "products are made")
            if copies(side) and not copies(not side):
                wide = any(copies(side))
                return decision(side == wide, "the next block is copied" if wide else "narrow copies are other warps'")
        for side in first:
            if any(self.code[each].opcode == "CALL" and not jumps(self.code[each]) for each in only[side]):
                return decision(not side, "subroutines are for rare arguments")
        if any(each.lstrip("!") in voted for each in (branch.guard, *branch.operands)):
            if self.masked and sum(self.code[each].opcode == "FSEL" for each in only[not lesser]) >= FEWEST_MASKED:
                return decision(not lesser, "this turn is masked")
            return decision(lesser, "a vote skips what is rare")
        if any(_PREDICATE.match(each) for each in branch.operands):
            return decision(lesser != self.masked, "this turn is masked" if self.masked else NOTHING_MASKED)
        return decision(False, STRAIGHT_ON)

    def _leaves(self, at: int, target: int, seen: Collection[int]) -> bool:
        """True if a branch leaves a loop that would else never end, and whose head was passed: an inner one."""
        if "DIV" in self.code[at].modifiers:
            return False
        within = [loop for loop in self.loops if at in loop and loop.head in seen]
        return any(target not in loop and not conditional(self.code[loop.tail]) for loop in within)

    def _has_products(self, places: set[int]) -> bool:
        return any(self.code[each].opcode == "HMMA" for each in places)

    def _comes_to(self, start: int, end: int, floor: int) -> bool:
        """True if a way leads from one instruction to another, without any before the `floor`."""
        return start == end or (start >= floor and any(end in self.successors(each) for each in self.reach(start, end, floor)))


def jumps(instruction: Instruction) -> bool:
    """True if the warp goes elsewhere for good: the assembler sometimes leaves a loop by a call with a guard."""
    return instruction.opcode in ("BRA", "JMP") or (instruction.opcode == "CALL" and bool(instruction.guard))


def conditional(branch: Instruction) -> bool:
    """True if it may fall through."""
    return (
        bool(branch.guard)
        or any(_PREDICATE.match(each) and each not in ("PT", "UPT") for each in branch.operands)
        or "DIV" in branch.modifiers
    )


def condition(branch: Instruction, known: Known) -> bool | None:
    """True if a branch is taken, None if that cannot be computed."""
    if "DIV" in branch.modifiers:
        return None
    if not conditional(branch):
        return True
    truths = [known.holds(each) for each in (branch.guard, *branch.operands) if not each or _PREDICATE.match(each)]
    return False if False in truths else None if None in truths else True
