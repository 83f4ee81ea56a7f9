"""Registers of wgmma on their way: who touches them before the product was waited for, or with no wgmma.fence behind it.

For each register that `decode.flight` names, and each warp: which product writes it (a code: the product's number and which of
its registers), which product last reads it as a fragment of A, and who accessed it since the warp's last fence. A move of a
register hands all that on, as it is how compilers rename.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..decode.code import Code
from ..decode.registry import Arg, Thunk
from ..report.findings import Findings, source
from ..state.lanes import Lanes, Wave
from ..text.syntax import Instruction
from ..text.types import TYPES, Array
from .registers import Frame

BITS = 8
SLOTS = 1 << BITS
"""A code is a product's number times this, plus the number of its register."""


class Flights:
    """The state of a wave: (registers, warps) each; `done[warp]` is the last product that the warp has waited for."""

    def __init__(self, code: Code, findings: Findings):
        self.code = code
        self.findings = findings
        self.facts = code.in_flight
        self.products: list[Instruction] = []
        """The instruction of each product, by its number less one."""
        watched = self.facts.watched | self.facts.touching if self.facts else set()
        self.watched = frozenset(watched)

    def begin_wave(self, wave: Wave) -> None:
        if self.facts is None:
            return
        shape = len(self.facts.rows), wave.size >> 5
        self.codes, self.reading = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.touched = np.zeros(shape, np.int64)
        self.done = np.zeros(shape[1], np.int64)
        self.fenced = np.zeros(shape[1], np.bool_)
        self.changes = 0
        """How often codes were changed."""
        self.products.clear()

    def numbers(self, names: list[str]) -> Array:
        assert self.facts is not None
        return np.array([self.facts.rows[name] for name in names], np.int64)

    # -- what a product does --------------------------------------------------------------------------------------------------

    def fence(self, warps: Array) -> None:
        self.fenced[warps] = True
        assert self.facts is not None
        if self.facts.touching:
            self.touched[:, warps] = 0

    def issue(self, i: Instruction, lanes: Lanes, written: Array, read: Array) -> int:
        """A product of these warps, with the registers of D and A (rows); its number. Reports what had to be fenced before."""
        self.products.append(i)
        number, warps = len(self.products), lanes.warp_ids
        if not self.fenced[warps].all():
            self.report("missing fence", "no wgmma.fence before the first wgmma of the warp", i, lanes, ~self.fenced[warps])
        assert self.facts is not None
        if self.facts.touching:
            rows = np.concatenate((written, read))
            found = self.touched[rows[:, None], warps]
            if found.any():
                at, warp = (int(k[0]) for k in np.nonzero(found))
                name = list(self.facts.rows)[int(rows[at])]
                other = self.code.instructions[int(found[at, warp]) - 1]
                message = f"no wgmma.fence between {source(other)}, which accesses register {name}, and the wgmma that uses it"
                self.report("missing fence", message, i, lanes, (found != 0).any(axis=0))
        self.changes += 1
        self.codes[written[:, None], warps] = (number * SLOTS + np.arange(len(written)))[:, None]
        if len(read):
            self.reading[read[:, None], warps] = number
        return number

    # -- what everybody else does ---------------------------------------------------------------------------------------------

    def watch(self, frame: Frame, pc: int, thunk: Thunk) -> Thunk:
        """An instruction's thunk with what it does to registers on their way before it."""
        assert self.facts is not None
        i, plan, rows = self.code.instructions[pc], self.code.plans[pc], self.facts.rows
        predicate = None if i.predicate is None else frame.array(Arg(i.predicate[0], TYPES["pred"].dtype))
        negated = i.predicate is not None and i.predicate[1]
        act = self.mover(pc) if pc in self.facts.moves else self.toucher(pc, *accessed(plan.reads, plan.writes, rows))

        def run() -> None:
            lanes = frame.lanes
            if predicate is not None:
                holds = np.flatnonzero(~predicate if negated else predicate)
                if not len(holds):
                    thunk()
                    return
                lanes = lanes.subset(holds)
            act(i, lanes)
            thunk()

        return run

    def mover(self, pc: int) -> Callable[[Instruction, Lanes], None]:
        assert self.facts is not None
        to, origin = self.facts.moves[pc]
        target, start = self.facts.rows.get(to), None if origin is None else self.facts.rows.get(origin)

        def move(i: Instruction, lanes: Lanes) -> None:
            if target is None:
                return
            warps = lanes.warp_ids
            now = 0 if start is None else self.codes[start, warps]
            before = self.codes[target, warps]
            # Another register has the old contents, if anybody still wants them; or nobody does, and the product writes over these.
            lost = (before >> BITS > self.done[warps]) & (before != now)
            if lost.any():
                lost &= (self.codes[:, warps] == before).sum(axis=0) == 1
            lost |= self.reading[target, warps] > self.done[warps]
            if lost.any():
                self.complain("writes", np.array([target]), i, lanes, lost[None])
            self.changes += 1
            self.codes[target, warps] = now
            self.touched[target, warps] = 0 if start is None else self.touched[start, warps]

        return move

    def toucher(self, pc: int, read: Array, written: Array) -> Callable[[Instruction, Lanes], None]:
        assert self.facts is not None
        flying, touching = pc in self.facts.watched, pc in self.facts.touching
        both = np.union1d(read, written)

        def touch(i: Instruction, lanes: Lanes) -> None:
            warps = lanes.warp_ids
            for rows, verb in ((written, "writes"), (read, "reads")) if flying else ():
                if len(rows):
                    bad = (self.codes[rows[:, None], warps] >> BITS > self.done[warps]) | (
                        self.reading[rows[:, None], warps] > self.done[warps]
                    )
                    if bad.any():
                        self.complain(verb, rows, i, lanes, bad)
            if flying and len(written):
                self.changes += 1
                self.codes[written[:, None], warps] = 0
            if touching:
                self.touched[both[:, None], warps] = pc + 1

        return touch

    # -- findings -------------------------------------------------------------------------------------------------------------

    def complain(self, verb: str, rows: Array, i: Instruction, lanes: Lanes, bad: Array) -> None:
        """An access to registers on their way; `bad` is (registers, warps)."""
        at, warp = (int(k[0]) for k in np.nonzero(bad))
        row, number = int(rows[at]), int(lanes.warp_ids[warp])
        assert self.facts is not None
        written = int(self.codes[row, number]) >> BITS > int(self.done[number])
        product = int(self.codes[row, number]) >> BITS if written else int(self.reading[row, number])
        role = "accumulates in" if written else "reads as A"
        name = list(self.facts.rows)[row]
        message = (
            f"{verb} register {name}, which {source(self.products[product - 1])} {role}, with no wgmma.wait_group for it in between"
        )
        self.report("in flight", message, i, lanes, np.asarray(bad.any(axis=0)))

    def report(self, kind: str, message: str, i: Instruction, lanes: Lanes, bad: Array) -> None:
        """A finding of some of the warps of these lanes."""
        position = int(np.searchsorted(lanes.warp, lanes.warp_ids[int(np.flatnonzero(bad)[0])]))
        self.findings.report(kind, message, i, lanes, position, count=32 * int(np.count_nonzero(bad)))


def accessed(reads: tuple[Arg, ...], writes: tuple[Arg, ...], rows: dict[str, int]) -> tuple[Array, Array]:
    """The rows of the registers among operands that are read, and written."""

    def of(args: tuple[Arg, ...]) -> Array:
        names = dict.fromkeys(getattr(a.operand, "name", "") for a in args)
        return np.array([rows[name] for name in names if name in rows], np.int64)

    return of(reads), of(writes)
