"""Followers of registers that must not be read: those that nobody wrote, and those that products of wgmma hold.

Registers that nobody wrote are followed bit by bit, as memcheck of Valgrind follows memory.

Liveness finds the registers of a kernel that may be read before they are written: mostly none, and then nothing here runs. For
the others, and for all that they may be copied into, the wave keeps a shadow: a row of bits a lane, set where nobody wrote.
Instructions that move bits about run a second time on the shadows. Any other read of a value of which nobody wrote a bit is a
finding; compilers copy, merge and shuffle such values freely as long as nothing depends on them, and build bytes in a register
of which they clear the rest with a mask.

Shifts, selections of bytes and insertions do to the shadows what they do to the values. After `and`, `or`, `xor`, `not` and
`lop3` a bit is known where known bits decide it: a bit that a mask clears is known, whatever was there. A second kind of
shadow has ones where a bit holds anything that somebody wrote: not where constants have cleared, set or shifted in the bit.

Registers of wgmma in flight must not be accessed before the product was waited for, or without a wgmma.fence behind the access.
For each register that `decode.flow` names, and each warp, there are: the product that writes it (a code: the product's number
and the number of its register), the last product that reads it as a fragment of A, and its accesses since the warp's last fence. A
move of a register hands all that on, as compilers rename registers by moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ..decode.code import Code
from ..decode.flow import InFlight, calculated, conditions, copied, merged, names, results, touched
from ..decode.registry import Arg, Frame, Multiply, Plan, Thunk
from ..memory.spaces import EarlyLoad
from ..state.findings import ERROR, Findings, Verdict, source
from ..state.lane_sets import LaneSet, Wave
from ..text.syntax import TYPES, UNSIGNED, Array, Imm, PtxInstruction, Reg
from .registers import RegisterFrame

MEND = "a value for the variable on each path, also for the items behind the end of a partial tile"
TABLES = {"and": 0b1000, "or": 0b1110, "xor": 0b0110, "not": 0b01}
"""Truth tables by opcode: the result for all values of one bit of each operand, the first operand's the highest, as for `lop3`."""


def on_shadows(plan: Plan, i: PtxInstruction, written: bool) -> Plan:
    """Returns the plan for shadows in place of the copied operands, of the bits that are `written` or of those that are not. If
    it is another plan, its reads also end with the values of these operands.
    """
    if i.opcode == "cvt" and "sat" in i.mods:
        return replace(plan, bind=lambda frame, out, ins: partial(spread, out[0], ins[0]))
    table = table_of(i)
    if table is None:
        return plan
    copies, reads = copied(plan), len(plan.reads)
    constant = [isinstance(plan.reads[k].operand, Imm) for k in copies]

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        shadows, values = ins[: len(copies)], ins[reads : reads + len(copies)]
        if not written:
            return partial(undecided, table, out[0], shadows, values)
        found = [(k, shadow) for k, shadow in enumerate(shadows) if not constant[k]]
        fixed = {k: value for k, value in enumerate(values) if constant[k]}
        # A mask that is not constant clears bits, and contributes none.
        return partial(brought, table, out[0], found, fixed, np.bitwise_and if i.opcode == "and" else np.bitwise_or)

    return replace(plan, bind=bind)


def table_of(i: PtxInstruction) -> int | None:
    """Returns the truth table of an instruction that works on each bit position alone; else None."""
    if i.opcode == "lop3":
        last = i.operands[-1]
        assert isinstance(last, Imm)
        return last.value & 0xFF
    return TABLES.get(i.opcode)


def undecided(table: int, out: Array, unknown: Sequence[Array], values: Sequence[Array]) -> None:
    """Computes the bits that may come out as either, given the unknown bits of the values."""
    found: list[Array] = [np.zeros_like(out), np.zeros_like(out)]
    for row in range(1 << len(values)):
        may = ~np.zeros_like(out)
        for k, (blank, value) in enumerate(zip(unknown, values, strict=True)):
            may &= blank | (value if row >> (len(values) - 1 - k) & 1 else ~value)
        found[table >> row & 1] |= may
    np.bitwise_and(found[0], found[1], out=out)


def brought(table: int, out: Array, shadows: Sequence[tuple[int, Array]], fixed: dict[int, Array], join: np.ufunc) -> None:
    """Computes the bits to which operands `shadows` contribute, given the constants among the operands."""
    count = len(shadows) + len(fixed)
    parts = []
    for k, shadow in shadows:
        place = 1 << (count - 1 - k)
        matters = np.zeros_like(out)
        for row in range(1 << count):
            if not row & place and (table >> row ^ table >> (row | place)) & 1:
                may = ~np.zeros_like(out)
                for other, value in fixed.items():
                    may &= value if row >> (count - 1 - other) & 1 else ~value
                matters |= may
        parts.append(shadow & matters)
    out[...] = join.reduce(parts) if parts else 0


def spread(out: Array, source: Array) -> None:
    """Marks all bits as unknown after a conversion that saturates, if some bit of its number is."""
    unsigned = UNSIGNED[out.itemsize]
    out[...] = np.where(source != 0, np.iinfo(unsigned).max, 0).astype(unsigned).view(out.dtype)


ADDRESSED = frozenset({"ld", "ldu", "st", "atom", "red"})
"""Instructions whose first operand that is read is an address."""


class Shadows:
    """The shadows of a wave's doubtful registers, one row of their width each: all ones where nobody wrote.

    `open` names those in which some lane has unwritten bits: most are written by all before the first loop is over, and from then
    on cost nothing.
    """

    def __init__(self, code: Code, findings: Findings, early: dict[PtxInstruction, EarlyLoad]):
        self.code = code
        self.findings = findings
        self.early = early
        early |= {code.instructions[pc]: EarlyLoad() for pc in code.doubtful.loads}
        self.rows: dict[str, Array] = {}
        self.written: dict[str, Array] = {}
        """The bits with anything that somebody wrote: not those that a mask has cleared of a blank register, either. They matter
        only in lanes in which `rows` has a bit.
        """
        self.open: set[str] = set()
        self.watched = code.doubtful.watched
        # By set of lanes: registers without such bits in these lanes, though others have some (mostly warps of other roles).
        self.clean: dict[LaneSet, set[str]] = {}
        self.origins: dict[str, str] = {}
        """The name of what has no value, by the registers that depend on it: a register, or a place in shared memory."""
        self._touched: dict[int, set[str]] = {}
        """Registers with a shadow that a control instruction names."""

    def begin_wave(self, wave: Wave) -> None:
        code = self.code
        for name in code.doubtful.registers:
            width = code.slots[name][0]
            row = np.zeros(wave.size, bool if width == 1 else UNSIGNED[width // 8])
            self.rows[name] = ~row if name in code.doubtful.blank else row
            self.rows[name][~wave.alive] = 0
            self.written[name] = ~self.rows[name]
        self.open = set(code.doubtful.blank)
        self.clean = {}

    def changed(self, name: str, lanes: LaneSet) -> None:
        """Records that the row of a register has changed for these lanes."""
        if self.rows[name][lanes.index].any():
            for names_of in self.clean.values():
                names_of.discard(name)
        else:
            self.clean.setdefault(lanes, set()).add(name)
        if self.rows[name].any():
            self.open.add(name)
        else:
            self.open.discard(name)

    def judge(self, pc: int, lanes: LaneSet, predicate: Array | None) -> tuple[Array, Array]:
        """Reports unwritten registers that instruction `pc` uses under its predicate; returns masks of the lanes that mix them, and
        of those whose result is as blank as all operands."""
        plan, i = self.code.plans[pc], self.code.instructions[pc]
        used = [a for k, a in enumerate(plan.reads) if k not in copied(plan)]
        stored: list[Arg] = []
        if isinstance(plan.control, Multiply):
            used = used[plan.control.registers :]
        if i.opcode == "st":
            # A vector may be stored whole though only some of its elements matter, and an argument may be passed on to a shuffle.
            used, stored = used[:1], used[1:] if "param" not in i.mods else []
        everywhere = np.ones(lanes.n, bool)
        holds = everywhere if predicate is None or i.predicate is None else ~predicate if i.predicate[1] else predicate
        if i.predicate is not None:
            self.report(i, lanes, everywhere, [Arg(i.predicate[0], TYPES["pred"].dtype)])
        if pc in self.code.doubtful.early or pc in self.code.doubtful.carrying:
            return np.zeros(lanes.n, bool), holds & self.compared(plan, used, lanes)
        blank = holds & self.all_blank(plan, lanes)
        holds = holds & ~blank
        # Each bit of an address or of a compared value matters; numbers may be packed with others that are never used.
        whole = len(used) if i.opcode == "setp" else 1 if i.opcode in ADDRESSED else 0
        for k, arg in enumerate(used):
            self.report(i, lanes, holds, [arg], any_bit=k < whole and not arg.packed)
        if stored:
            self.report(i, lanes, holds, stored)
        return self.mixed(pc, lanes, holds), blank

    def compared(self, plan: Plan, used: Sequence[Arg], lanes: LaneSet) -> Array:
        """Returns a mask of the lanes in which an instruction reads bits that nobody wrote."""
        found = np.zeros(lanes.n, bool)
        for arg in used:
            bad = self.blank(arg, lanes) if arg.packed else self.bits(arg, lanes)[0] != 0
            if bad.any():
                found |= bad
                self.hand_on([arg], plan)
        return found

    def hand_on(self, given: Iterable[Arg], plan: Plan) -> None:
        """Records that the predicates that an instruction writes depend on the first of these registers with unwritten bits; all
        its results do if that is of an early load."""
        doubtful = [name for name in names(given) if name in self.open]
        if doubtful:
            origin = self.origins.get(doubtful[0])
            made = names(plan.writes) if origin else conditions(plan.writes)
            self.origins |= dict.fromkeys(made, origin or f"register {doubtful[0]}, which the thread never wrote")

    def all_blank(self, plan: Plan, lanes: LaneSet) -> Array:
        """Returns a mask of the lanes in which nobody wrote any of the registers that arithmetic reads."""
        read = calculated(plan)
        if not read or any(name not in self.rows for name in names(read)):
            return np.zeros(lanes.n, bool)
        return np.logical_and.reduce([self.blank(arg, lanes) for arg in read])

    def mixed(self, pc: int, lanes: LaneSet, holds: Array) -> Array:
        """Reports written and unwritten registers that an instruction mixes bit by bit; returns a mask of the lanes that do so."""
        plan, i = self.code.plans[pc], self.code.instructions[pc]
        every = [plan.reads[k] for k in merged(plan)]
        others = [self.blank(plan.reads[k], lanes) for k in copied(plan) if isinstance(plan.reads[k].operand, Reg)]
        found = np.zeros(lanes.n, bool)
        for arg in every:
            blank, low = self.bits(arg, lanes)
            bad = holds & ~found & ~np.logical_and.reduce(others) & (blank == low)
            if bad.any():
                self.report(i, lanes, bad, [arg])
            found |= bad
        return found

    def report(self, i: PtxInstruction, lanes: LaneSet, holds: Array, args: list[Arg], any_bit: bool = False) -> None:
        """Reports the operands of a group, if nobody wrote any bit of them, or `any_bit` of one."""
        doubtful = [name for name in names(args) if name in self.rows]
        if len(doubtful) < len(args):
            return
        told = (self.bits(arg, lanes)[0] != 0 if any_bit else self.blank(arg, lanes) for arg in args)
        bad = np.logical_and.reduce([holds, *told])
        if bad.any():
            origin = self.origins.get(doubtful[0])
            message = f"register {doubtful[0]}, which the thread never wrote, in {i.text!r}"
            message = f"{origin} and which decides {i.text!r}" if origin else message
            self.findings.report(Verdict("uninitialised", ERROR, mend=MEND), message, i, lanes, np.flatnonzero(bad))

    def bits(self, arg: Arg, lanes: LaneSet) -> tuple[Array, Array]:
        """Returns the bits of an operand that nobody wrote, one word a lane, and a word of all its bits."""
        row = self.rows.get(arg.operand.name) if isinstance(arg.operand, Reg) else None
        if row is None:
            return np.zeros(lanes.n, np.uint8), np.array(0xFF, np.uint8)
        mine = row[lanes.index]
        if mine.dtype == bool:
            return mine, np.array(True)
        bits = 8 * min(mine.itemsize, arg.dtype.itemsize * (2 if arg.packed else 1))
        low = np.array((1 << bits) - 1, mine.dtype)
        return mine & low, low

    def blank(self, arg: Arg, lanes: LaneSet) -> Array:
        """Returns a mask of the lanes in which an operand has unwritten bits and, besides, at most bits made by constants."""
        found, low = self.bits(arg, lanes)
        if not isinstance(arg.operand, Reg) or arg.operand.name not in self.rows:
            return np.zeros(lanes.n, bool)
        nothing = self.written[arg.operand.name][lanes.index] & low == 0
        return (found == low) | ((found != 0) & nothing)

    def watch(self, frame: RegisterFrame, pc: int, thunk: Thunk) -> Thunk:
        """Returns an instruction's thunk, preceded by its effect on the shadows."""
        plan, i = self.code.plans[pc], self.code.instructions[pc]
        read = [n for n in names((*plan.reads, *plan.writes)) if n in self.rows]
        targets = [n for n in names(plan.writes) if n in read]
        predicate = frame.predicate(i)
        named = frozenset(read).union([i.predicate[0].name] if i.predicate else [])

        def twins() -> tuple[dict[str, Array], dict[str, Array], list[Thunk]]:
            rows, written = ({n: np.empty(frame.n, self.rows[n].dtype) for n in read} for _ in range(2))
            return rows, written, [self.twin(frame, pc, rows, False), self.twin(frame, pc, written, True)]

        effect = frame.later(twins)

        def run() -> None:
            lanes = frame.lanes
            if self.open.isdisjoint(named) or self.known(lanes, named):
                thunk()
                return
            told, blank = self.judge(pc, lanes, predicate)
            if targets:
                rows, written, changes = effect()
                for name, row in rows.items():
                    row[:] = self.rows[name][lanes.index]
                    # A lane may have written all of a register unwatched.
                    written[name][:] = np.where(row == 0, ~np.zeros_like(row), self.written[name][lanes.index])
                for change in changes:
                    change()
                if pc not in self.code.doubtful.early:
                    self.hand_on(plan.reads, plan)
                for name in targets:
                    rows[name][told] = 0
                    rows[name][blank] = ~rows[name].dtype.type(0)
                    self.rows[name][lanes.index] = rows[name]
                    # Zeros that come with a byte do not decide the bits above it.
                    self.written[name][lanes.index] = written[name] & ~rows[name]
                    self.changed(name, lanes)
            thunk()

        early = self.early.get(i)
        if early is None:
            return run

        def load() -> None:
            run()
            found = early.take()
            if found is not None:
                self.load(targets, frame.lanes, *found)

        return load

    def load(self, targets: Iterable[str], lanes: LaneSet, bad: Array, origin: str) -> None:
        """Records that an early load read what nobody wrote, for some of these lanes."""
        for name in targets:
            self.rows[name][lanes.index[bad]] = ~self.rows[name].dtype.type(0)
            self.written[name][lanes.index[bad]] = 0
            self.origins[name] = origin
            self.changed(name, lanes)

    def twin(self, frame: RegisterFrame, pc: int, rows: dict[str, Array], written: bool) -> Thunk:
        """Returns an instruction's effect on shadows in `rows`: of bits that somebody has `written`, or that nobody has."""
        plan, i = self.code.plans[pc], self.code.instructions[pc]
        copies, kept = copied(plan), results(plan)

        def shadow(arg: Arg) -> Array:
            if isinstance(arg.operand, Reg) and arg.operand.name in rows:
                return frame.view(arg.operand, rows[arg.operand.name], arg)
            bits = np.full(frame.n * arg.dtype.itemsize * (2 if arg.packed else 1), 0xFF if written else 0, np.uint8)
            return bits != 0 if arg.dtype == bool else bits.view(arg.dtype)

        targets = [rows[n] for n in names(plan.writes) if n in rows]
        if not copies:
            plain = replace(plan, bind=lambda frame, out, ins: lambda: fill(out, written), pure=True)
            return frame.guarded(plain, i, targets, [], defaultdict(int))
        out = [shadow(a) if a in kept else np.empty(frame.n, a.dtype) for a in plan.writes]
        ins = [shadow(a) if k in copies else frame.array(a) for k, a in enumerate(plan.reads)]
        twin = on_shadows(plan, i, written)
        if twin is not plan:
            ins += [frame.array(plan.reads[k]) for k in copies]
        change = frame.guarded(twin, i, out, ins, defaultdict(int))
        others = [rows[n] for n in names(plan.writes) if n in rows and n not in names(kept)]

        def run() -> None:
            change()
            fill(others, written)

        return run

    def known(self, lanes: LaneSet, named: Iterable[str]) -> bool:
        """True if these lanes have written all of these registers."""
        clean = self.clean.setdefault(lanes, set())
        for name in self.open.intersection(named):
            if name not in clean:
                if self.rows[name][lanes.index].any():
                    return False
                clean.add(name)
        return True

    def control(self, pc: int, lanes: LaneSet, frame: RegisterFrame) -> None:
        """Checks a control instruction to which the lanes come."""
        if not self.open:
            return
        plan, i = self.code.plans[pc], self.code.instructions[pc]
        named = self._touched.get(pc)
        if named is None:
            named = self._touched[pc] = self.rows.keys() & set(touched(plan))
        if self.known(lanes, named):
            return
        self.judge(pc, lanes, frame.predicate(i))
        if isinstance(plan.control, Multiply):
            # The accumulator matters only if the product adds to it.
            adds = np.broadcast_to(frame.array(plan.reads[-1]), lanes.n)
            for one in plan.reads[: plan.control.registers]:
                self.report(i, lanes, adds, [one])
        for name in names(plan.writes):
            if name in self.rows:
                self.rows[name][lanes.index] = 0
                self.changed(name, lanes)


def fill(rows: Sequence[Array], written: bool) -> None:
    """Sets the shadows of an instruction's results."""
    for row in rows:
        row[:] = ~np.zeros_like(row) if written else 0


# -- registers in flight ----------------------------------------------------------------------------------------------------

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
    """Returns the rows of the registers that operands read, and of those that they write."""

    def of(args: tuple[Arg, ...]) -> Array:
        names = dict.fromkeys(getattr(a.operand, "name", "") for a in args)
        return np.array([rows[name] for name in names if name in rows], np.int64)

    return of(reads), of(writes)
