"""Rules of warpgroups: instructions that all four warps must run, registers that products hold, setmaxnreg.

The four warps of a warpgroup must all run wgmma.fence, .mma_async, .commit_group, .wait_group and setmaxnreg: PTX ISA, `.aligned`
of these asks that all threads of the warpgroup run the same instruction. The warps may come to it at any times, so an
instruction that one of them runs is kept until the other three have run one too; then they are compared. And between two
setmaxnreg the warps of a warpgroup must synchronise.

setmaxnreg sets the number of registers that a warp holds (PTX ISA, "Miscellaneous Instructions: setmaxnreg"). A block gets the
registers per thread of its directives (`Function.registers`), times its threads; but no more than the largest count that an .inc
of the kernel asks for, as ptxas 13.0 has it. A warp gives some back (.dec) or takes more (.inc), which waits until the block's
pool has them. Without such directives ptxas ignores the instruction.

Registers of wgmma in flight must not be accessed before the product was waited for, or without a wgmma.fence behind the access.
For each register that `decode.flow` names, and each warp, there are: the product that writes it (a code: the product's number
and the number of its register), the last product that reads it as a fragment of A, and its accesses since the warp's last fence. A
move of a register hands all that on, as compilers rename registers by moves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..decode.code import Code
from ..decode.flow import InFlight
from ..decode.registry import Arg, RegisterCount, Thunk
from ..state.findings import Findings, Stuck, source, source_and_call
from ..state.lane_sets import GROUP, WARP, LaneSet, Wave
from ..text.syntax import Array, PtxInstruction
from .registers import RegisterFiles, RegisterFrame, WaveUnit


class Agreement(WaveUnit):
    """Warpgroups of a wave, by first warp: `ahead`, instructions of each warp that not all have run; `broken`, disagreements."""

    def __init__(self, machine: RegisterFiles):
        super().__init__(machine)
        self.per_block = self.wave.warps_per_block
        self.ahead: dict[int, list[list[PtxInstruction]]] = {}
        self.broken: set[int] = set()
        self.resized: dict[int, list[tuple[int, PtxInstruction]]] = {}
        """The setmaxnreg that each warp has run so far, and when."""
        self._whole: dict[LaneSet, Array | None] = {}

    def whole(self, lanes: LaneSet) -> Array | None:
        """Returns the first warps of the warpgroups that these lanes are, if they are whole ones."""
        if lanes not in self._whole:
            found = None
            if lanes.whole_warps and lanes.warps % GROUP == 0:
                warps = lanes.warp_ids.reshape(-1, GROUP)
                if (self.first_of(warps) == warps[:, :1]).all() and (warps - warps[:, :1] == np.arange(GROUP)).all():
                    found = warps[:, 0].copy()
            self._whole[lanes] = found
        return self._whole[lanes]

    def first_of(self, warps: Array) -> Array:
        """Returns the first warps of the warpgroups that these warps belong to."""
        return warps - warps % self.per_block % GROUP

    def size(self, first: int) -> int:
        """Returns the number of warps of a warpgroup: the last one of a block may have less than four."""
        return min(GROUP, self.per_block - first % self.per_block)

    # -- the same instructions ------------------------------------------------------------------------------------------------

    def come(self, i: PtxInstruction, lanes: LaneSet) -> None:
        """Records that lanes run such an instruction."""
        if not self.ahead and self.whole(lanes) is not None:
            return
        if not lanes.converged:
            self.partial(i, lanes)
            return
        warps = lanes.warp_ids
        for warp, first in zip(warps.tolist(), self.first_of(warps).tolist(), strict=True):
            if first not in self.broken:
                self.ahead.setdefault(first, [[] for _ in range(self.size(first))])[warp - first].append(i)
        for first in np.unique(self.first_of(warps)).tolist():
            if first in self.ahead:
                self.compare(first)

    def compare(self, first: int) -> None:
        """Drops instructions that all warps have run; reports the first in which they differ."""
        logs, alive = self.ahead[first], self.wave.alive_by_warp
        while any(logs) and all(log or not alive[first + k] for k, log in enumerate(logs)):
            # None: exited, without having run what another warp has.
            heads = [log[0] if log else None for log in logs]
            if any(head is not heads[0] for head in heads):
                self.report(first, heads)
                self.broken.add(first)
                break
            for log in logs:
                del log[0]
        if first in self.broken or not any(logs):
            del self.ahead[first]

    def report(self, first: int, heads: list[PtxInstruction | None]) -> None:
        """Reports a disagreement at the first of the instructions in the text: a warp that runs a later one has passed it by."""
        i = next(one for one in self.code.instructions if any(one is head for head in heads))
        here = [k for k, head in enumerate(heads) if head is i]
        other, instead = next((k, head) for k, head in enumerate(heads) if head is not i)
        start = first % self.per_block
        does = "has exited" if instead is None else f"runs {name(instead)} at {source_and_call(instead)} instead"
        message = (
            f"{name(i)} must be run by all warps of a warpgroup: of warps {start} to {start + len(heads) - 1} "
            f"warp {start + other} {does}"
        )
        lanes = self.wave.lanes(np.arange((first + here[0]) * WARP, (first + here[0] + 1) * WARP))
        self.findings.report("disagreement", message, i, lanes, 0, count=WARP * len(here))

    def partial(self, i: PtxInstruction, lanes: LaneSet) -> None:
        """Reports an instruction whose predicate holds for some threads of a warp only."""
        few = np.flatnonzero(np.bincount(lanes.warp)[lanes.warp] < self.wave.alive_by_warp[lanes.warp])
        message = f"{name(i)} must be run by all threads of a warpgroup, but its predicate holds for some threads of a warp only"
        self.findings.report("disagreement", message, i, lanes, few)

    def leave(self) -> None:
        """Ends threads: they will never run what they have not run."""
        for first in list(self.ahead):
            self.compare(first)

    # -- two setmaxnreg -------------------------------------------------------------------------------------------------------

    def resize(self, i: PtxInstruction, lanes: LaneSet) -> None:
        """Checks that warps run a second setmaxnreg only behind the first one of all warps of their warpgroup."""
        self.come(i, lanes)
        races = self.races
        if races is None:
            return
        for warp in lanes.warp_ids.tolist():
            before = self.resized.get(warp)
            if before:
                self.look(i, lanes.where(lanes.warp == warp), warp, before[-1][1], len(before) - 1)
        for warp in lanes.warp_ids.tolist():
            self.resized.setdefault(warp, []).append((races.now, i))
        races.now += 1

    def look(self, i: PtxInstruction, lanes: LaneSet, warp: int, previous: PtxInstruction, last: int) -> None:
        """Reports a warp of the warpgroup that may not have run its setmaxnreg number `last`, before these lanes' next one."""
        races = self.races
        assert races is not None
        known = races.heard.knows(races.groups(lanes))[0].reshape(-1, WARP).max(axis=1)
        first = int(self.first_of(np.array([warp]))[0])
        for other in range(first, first + self.size(first)):
            ran = self.resized.get(other, [])
            behind = last < len(ran) and known[other % len(known)] >= ran[last][0]
            if behind or other == warp or not self.wave.alive_by_warp[other]:
                continue
            message = (
                f"{name(i)} while warp {other % self.per_block} of the warpgroup may not have run the one at "
                f"{source_and_call(previous)}: its warps must synchronise between the two"
            )
            self.findings.report("register budget", message, i, lanes)
            return


def name(i: PtxInstruction) -> str:
    """Returns the name of the instruction: wgmma.fence and the like."""
    return f"{i.opcode}.{i.mods[0]}"


class RegisterPools(WaveUnit):
    """The pools of a wave's blocks. `held`: registers per thread of each warp; `free`: registers of each block."""

    def __init__(self, machine: RegisterFiles, agreement: Agreement):
        super().__init__(machine)
        self.agreement = agreement
        self.launch = self.code.registers
        counts = [p.control.count for p in self.code.plans if isinstance(p.control, RegisterCount) and p.control.more]
        if self.launch is not None and counts:
            self.launch = min(self.launch, max(counts))
        self.per_block = self.wave.warps_per_block
        self.held = np.full(self.wave.size // WARP, self.launch or 0, np.int64)
        self.free = np.zeros(self.wave.blocks, np.int64)
        self.waiting: list[tuple[int, LaneSet]] = []

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def arrive(self, pc: int, control: RegisterCount, lanes: LaneSet) -> None:
        """Takes whole warps that come to a setmaxnreg."""
        self.agreement.resize(self.code.instructions[pc], lanes)
        if self.launch is None:
            self.push(pc + 1, lanes)
            return
        self.waiting += [(pc, part) for _, part in lanes.split(lanes.warp)]
        # Warps that give registers back go first; then the waiting ones, as long as one of them can go on.
        moved = True
        while moved:
            moved = False
            for one in list(self.waiting):
                moved |= self.settle(one)

    def settle(self, one: tuple[int, LaneSet]) -> bool:
        """Runs a warp's setmaxnreg; returns False if the warp must wait."""
        pc, lanes = one
        control = self.code.plans[pc].control
        assert isinstance(control, RegisterCount)
        warp = int(lanes.warp_ids[0])
        block, held = warp // self.per_block, int(self.held[warp])
        more = (control.count - held) * WARP
        if control.more != (more >= 0) and more:
            message = f"setmaxnreg.{'inc' if control.more else 'dec'} to {control.count} registers in a warp that has {held}"
            self.findings.report("register budget", message, self.code.instructions[pc], lanes)
        elif more > self.free[block]:
            return False
        self.free[block] -= more
        self.held[warp] = control.count
        self.waiting.remove(one)
        self.push(pc + 1, lanes)
        return True

    def stuck(self) -> list[Stuck]:
        out = []
        for pc, lanes in self.waiting:
            control = self.code.plans[pc].control
            assert isinstance(control, RegisterCount)
            block = int(lanes.block[0])
            held = self.held[block * self.per_block : (block + 1) * self.per_block]
            pool = (self.launch or 0) * WARP * self.per_block
            shares = ", ".join(f"{np.count_nonzero(held == count)} of {count}" for count in np.unique(held).tolist())
            what = (
                f"for {control.count} registers a thread: of the block's {pool} registers {int(self.free[block])} are free; "
                f"its warps hold, a thread: {shares}"
            )
            out.append(Stuck(self.code.instructions[pc], lanes, what))
        return out


BITS = 8
SLOTS = 1 << BITS
"""A code is a product's number times this, plus the number of its register."""


class Flights:
    """The registers in flight in a wave, arrays of (registers, warps); `done[warp]`: the last product that the warp waited for."""

    def __init__(self, code: Code, findings: Findings):
        self.code = code
        self.findings = findings
        self.facts = code.in_flight or InFlight()
        self.products: list[PtxInstruction] = []
        """The instruction of each product, by its number less one."""
        self.watched = frozenset(self.facts.watched | self.facts.touching)

    def begin_wave(self, wave: Wave) -> None:
        shape = len(self.facts.rows), wave.size >> 5
        self.codes, self.reading = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.touched = np.zeros(shape, np.int64)
        self.done = np.zeros(shape[1], np.int64)
        self.fenced = np.zeros(shape[1], bool)
        self.changes = 0
        """Number of changes of codes."""
        self.products.clear()

    def numbers(self, names: list[str]) -> Array:
        return np.array([self.facts.rows[name] for name in names], np.int64)

    # -- products -------------------------------------------------------------------------------------------------------------

    def fence(self, warps: Array) -> None:
        self.fenced[warps] = True
        if self.facts.touching:
            self.touched[:, warps] = 0

    def issue(self, i: PtxInstruction, lanes: LaneSet, written: Array, read: Array) -> int:
        """Issues a product of these warps, with the registers of D and A (rows); returns its number. Reports missing fences."""
        self.products.append(i)
        number, warps = len(self.products), lanes.warp_ids
        if not self.fenced[warps].all():
            self.report("missing fence", "no wgmma.fence before the first wgmma of the warp", i, lanes, ~self.fenced[warps])
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

    # -- other instructions ---------------------------------------------------------------------------------------------------

    def watch(self, frame: RegisterFrame, pc: int, thunk: Thunk) -> Thunk:
        """Returns an instruction's thunk, preceded by its effect on registers in flight."""
        i, plan, rows = self.code.instructions[pc], self.code.plans[pc], self.facts.rows
        predicate = frame.predicate(i)
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

    def mover(self, pc: int) -> Callable[[PtxInstruction, LaneSet], None]:
        to, origin = self.facts.moves[pc]
        target, start = self.facts.rows.get(to), None if origin is None else self.facts.rows.get(origin)

        def move(i: PtxInstruction, lanes: LaneSet) -> None:
            if target is None:
                return
            warps = lanes.warp_ids
            now = 0 if start is None else self.codes[start, warps]
            before = self.codes[target, warps]
            # Another register has the old contents, if they are still needed; else the product overwrites these.
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

    def toucher(self, pc: int, read: Array, written: Array) -> Callable[[PtxInstruction, LaneSet], None]:
        flying, touching = pc in self.facts.watched, pc in self.facts.touching
        both = np.union1d(read, written)

        def touch(i: PtxInstruction, lanes: LaneSet) -> None:
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

    def complain(self, verb: str, rows: Array, i: PtxInstruction, lanes: LaneSet, bad: Array) -> None:
        """Reports an access to registers in flight; `bad` is (registers, warps)."""
        at, warp = (int(k[0]) for k in np.nonzero(bad))
        row, number = int(rows[at]), int(lanes.warp_ids[warp])
        written = int(self.codes[row, number]) >> BITS > int(self.done[number])
        product = int(self.codes[row, number]) >> BITS if written else int(self.reading[row, number])
        role = "accumulates in" if written else "reads as A"
        name = list(self.facts.rows)[row]
        message = (
            f"{verb} register {name}, which {source(self.products[product - 1])} {role}, with no wgmma.wait_group for it in between"
        )
        self.report("in flight", message, i, lanes, np.asarray(bad.any(axis=0)))

    def report(self, kind: str, message: str, i: PtxInstruction, lanes: LaneSet, bad: Array) -> None:
        """Reports a finding of some of the warps of these lanes."""
        position = int(np.searchsorted(lanes.warp, lanes.warp_ids[int(np.flatnonzero(bad)[0])]))
        self.findings.report(kind, message, i, lanes, position, count=32 * int(np.count_nonzero(bad)))


def accessed(reads: tuple[Arg, ...], writes: tuple[Arg, ...], rows: dict[str, int]) -> tuple[Array, Array]:
    """Returns the rows of the registers among operands that are read, and written."""

    def of(args: tuple[Arg, ...]) -> Array:
        names = dict.fromkeys(getattr(a.operand, "name", "") for a in args)
        return np.array([rows[name] for name in names if name in rows], np.int64)

    return of(reads), of(writes)
