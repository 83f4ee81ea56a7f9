"""Register files and frames: the arrays that instructions are bound to.

A file has one row a register and one column a lane. The full frame is the files of the whole wave. A smaller set of
lanes runs in a compact frame, whose files have a column for each of its lanes only: the rows that a region needs are
gathered from the full frame on demand, and those it wrote and somebody still needs are scattered back when another
set of lanes takes over. So every instruction is written once, for arrays of all lanes, and never sees an index.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, Protocol

import numpy as np

from ..decode.code import Code, CodeRegion
from ..decode.registry import ENVIRONMENT, Arg, Frame, Plan, Surroundings, Thunk
from ..memory.spaces import MemoryUnit
from ..report.diary import Diary
from ..state.lanes import LaneSet, Wave
from ..text.syntax import Array, Imm, PtxError, PtxInstruction, Reg, Sym

FILE_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(bool),
    16: np.dtype(np.uint16),
    32: np.dtype(np.uint32),
    64: np.dtype(np.uint64),
}

MANY = 256
"""Lanes from which on registers are copied run by run, if the lanes are a grid."""


def immediate(value: Imm, dtype: np.dtype[Any]) -> Array:
    """Returns a constant as a 0-d array of `dtype`; floating constants may be written wider than they are used."""
    if dtype.kind == "b":
        return np.array(value.value != 0)
    if value.float_bits == 64 and dtype.itemsize == 4:
        return np.array(np.uint64(value.value).view(np.float64)).astype(np.float32).view(dtype)
    if value.float_bits == 32 and dtype.itemsize == 8:
        return np.array(np.uint32(value.value).view(np.float32)).astype(np.float64).view(dtype)
    bits = value.value & ((1 << (8 * dtype.itemsize)) - 1)
    return np.array(bits, f"u{dtype.itemsize}").view(dtype)


def register_name(arg: Arg) -> str:
    """Returns the register of an operand, or a text that no register has."""
    return arg.operand.name if isinstance(arg.operand, Reg) else str(arg.operand)


class Follower(Protocol):
    """A follower of registers that may be read unwritten (`execute.unwritten`) or in flight (`execute.warpgroup_rules`)."""

    watched: frozenset[int]
    """The instructions to follow."""

    def watch(self, frame: RegisterFrame, pc: int, thunk: Thunk) -> Thunk:
        """Returns an instruction's thunk, preceded by its effect on what is followed."""


class FrameHome(Surroundings, Protocol):
    """The machine, as a frame sees it: also its code, addresses, and the special registers that are the same for all lanes."""

    code: Code
    constants: dict[str, int]
    followers: list[Follower]

    def address_of(self, symbol: Sym) -> int:
        """Returns the address of a variable or parameter: an offset in shared or local memory, else a virtual address."""


class RegisterFrame(Frame):
    """The registers of `n` lanes."""

    def __init__(self, machine: FrameHome, n: int):
        super().__init__(machine, n, machine.code.read_somewhere)
        self.machine: FrameHome = machine
        self.code = machine.code
        self.files = {width: np.zeros((rows, n), FILE_DTYPES[width]) for width, rows in self.code.rows_of_width.items()}
        self.valid = 0
        self.dirty = 0
        self.live = 0
        self._views: dict[tuple[tuple[int, int], int, bool], Array] = {}
        self._thunks: dict[tuple[int, int], list[Thunk]] = {}

    # -- operands ---------------------------------------------------------------------------------------------------

    def array(self, arg: Arg) -> Array:
        """Returns the operand as an array over the lanes, or 0-d if it is a constant."""
        operand, dtype = arg.operand, arg.dtype
        if isinstance(operand, Reg):
            if operand.name == "_":
                return self.temp("sink", (self.n, 2) if arg.packed else (self.n,), dtype).reshape(-1)
            slot = self.code.slots.get(operand.name)
            if slot is None:
                return self.constant(self.machine.constants[operand.name], arg)
            key = (slot, dtype.num, arg.packed)
            found = self._views.get(key)
            if found is None:
                found = self._views[key] = self.view(operand, self.files[slot[0]][slot[1]], arg)
            return found
        if isinstance(operand, Imm):
            if arg.packed:
                return self.constant(int(immediate(operand, np.dtype(np.uint32))), arg)
            return immediate(operand, dtype)
        if isinstance(operand, Sym):
            return self.constant(self.machine.address_of(operand), arg)
        raise PtxError(f"operand {operand} cannot be read")

    def view(self, register: Reg, row: Array, arg: Arg) -> Array:
        """Returns a row of the register's width as the operand's dtype."""
        if arg.packed or row.itemsize == arg.dtype.itemsize:
            return row.view(arg.dtype)
        if row.itemsize < arg.dtype.itemsize:
            raise PtxError(f"register {register.name} is narrower than its use as {arg.dtype}")
        # The low part of a wider register.
        return row.view(arg.dtype)[:: row.itemsize // arg.dtype.itemsize]

    def constant(self, value: int, arg: Arg) -> Array:
        if arg.packed:
            return np.full(self.n, value, np.uint32).view(arg.dtype)
        return immediate(Imm(value), arg.dtype)

    # -- code -------------------------------------------------------------------------------------------------------

    def thunks(self, region: CodeRegion) -> list[Thunk]:
        """Returns the bound instructions of a region, with the switches of the floating-point environment between them."""
        key = (region.start, region.end)
        found = self._thunks.get(key)
        if found is None:
            found = []
            mode = base = self.code.base_mode
            held: tuple[str, ...] = ()
            for pc in range(region.start, region.end):
                plan, instruction = self.code.plans[pc], self.code.instructions[pc]
                if plan.keeps:
                    names = (*instruction.mods, *(register_name(a) for a in plan.reads[: plan.keeps]))
                    self.kept = names == held and instruction.predicate is None
                    held = names if instruction.predicate is None else ()
                if plan.mode is not None and plan.mode != mode:
                    mode = plan.mode
                    found.append(ENVIRONMENT.setter(mode))
                out, ins = [self.array(a) for a in plan.writes], [self.array(a) for a in plan.reads]
                thunk = self.guarded(plan, instruction, out, ins, self.machine.memory.tally.predicated_off)
                for follower in self.machine.followers:
                    if pc in follower.watched:
                        thunk = follower.watch(self, pc, thunk)
                found.append(thunk)
                if held and any(register_name(a) in held for a in plan.writes):
                    held = ()
            if mode != base:
                found.append(ENVIRONMENT.setter(base))
            self._thunks[key] = found
        return found

    def guarded(
        self, plan: Plan, instruction: PtxInstruction, out: list[Array], ins: list[Array], off: defaultdict[PtxInstruction, int]
    ) -> Thunk:
        """Binds a plan to arrays, for the lanes in which the instruction's predicate holds; `off` counts the other ones."""
        thunk = plan.bind(self, out, ins)
        if instruction.predicate is None:
            return thunk
        register, negated = instruction.predicate
        predicate = self.array(Arg(register, FILE_DTYPES[1]))
        some = self._merged(plan, out, ins) if plan.pure else self._selected(plan, out, ins)
        n = self.n

        def run() -> None:
            count = np.count_nonzero(predicate)
            if negated:
                count = n - count
            if count == n:
                thunk()
                return
            off[instruction] += n - int(count)
            if count:
                some(~predicate if negated else predicate)

        return run

    def _merged(self, plan: Plan, out: list[Array], ins: list[Array]) -> Any:
        """Binds arithmetic under a mixed predicate: it computes for every lane, and keeps results where the predicate holds."""
        temporary = [np.empty_like(o) for o in out]
        thunk = plan.bind(self, temporary, ins)

        def run(mask: Array) -> None:
            thunk()
            for register, value in zip(out, temporary, strict=True):
                where = mask if len(register) == len(mask) else np.repeat(mask, len(register) // len(mask))
                np.copyto(register, value, where=where)

        return run

    def _selected(self, plan: Plan, out: list[Array], ins: list[Array]) -> Any:
        """Binds any other instruction: in a frame of its own for the lanes where the predicate holds."""
        frames: dict[int, SubFrame] = {}

        def run(mask: Array) -> None:
            positions = np.flatnonzero(mask)
            sub = frames.get(len(positions))
            if sub is None:
                if len(frames) >= 64:
                    frames.clear()
                sub = frames[len(positions)] = SubFrame(self, plan, len(positions), out, ins)
            sub.run(self.lanes.subset(positions), positions)

        return run

    def release(self) -> None:
        """Forgets bound code and arrays."""
        self._thunks.clear()
        self._lent.clear()
        self._views.clear()
        self.files.clear()

    # -- exchange with the full frame -----------------------------------------------------------------------------------

    def load(self, mask: int, full: RegisterFrame) -> None:
        """Copies the rows of `mask` from the full frame."""
        missing = mask & ~self.valid
        if not missing:
            return
        grid = self.lanes.grid if self.n >= MANY else None
        for width, rows, runs in self.code.rows(missing):
            source, target = full.files[width], self.files[width]
            if grid is not None:
                there = grid.of(source)
                for run in runs:
                    target[run].reshape(-1, *grid.counts)[...] = there[run]
            elif self.lanes.slice:
                target[rows] = source[rows, self.lanes.slice]
            else:
                target[rows] = source[rows[:, None], self.lanes.index]
        self.valid |= missing

    def store(self, full: RegisterFrame) -> None:
        """Copies the rows that were written and are still alive to the full frame."""
        grid = self.lanes.grid if self.n >= MANY else None
        for width, rows, runs in self.code.rows(self.dirty & self.live):
            source, target = self.files[width], full.files[width]
            if grid is not None:
                there = grid.of(target)
                for run in runs:
                    there[run] = source[run].reshape(-1, *grid.counts)
            elif self.lanes.slice:
                target[rows, self.lanes.slice] = source[rows]
            else:
                target[rows[:, None], self.lanes.index] = source[rows]
        self.dirty = 0


class SubFrame(Frame):
    """The lanes for which one predicated instruction holds: only its operands, gathered and scattered around it."""

    def __init__(self, parent: RegisterFrame, plan: Plan, n: int, out: list[Array], ins: list[Array]):
        super().__init__(parent.machine, n, parent.read_somewhere)
        assert all(len(o) == parent.n for o in out), "packed operands belong to pure instructions"
        self.targets = out
        self.out = [np.empty(n, o.dtype) for o in out]
        arguments = [np.empty(n, x.dtype) if x.ndim else x for x in ins]
        self.moves = [partial(np.take, x, out=mine, mode="clip") for x, mine in zip(ins, arguments, strict=True) if x.ndim]
        self.thunk = plan.bind(self, self.out, arguments)

    def run(self, lanes: LaneSet, positions: Array) -> None:
        self.lanes = lanes
        for move in self.moves:
            move(positions)
        self.thunk()
        for target, value in zip(self.targets, self.out, strict=True):
            target[positions] = value


class Host(FrameHome, Protocol):
    """The machine, as barriers and calls see it."""

    wave: Wave
    full: RegisterFrame
    """The registers of the whole wave."""

    diary: Diary | None
    """The diary of a block of the wave, if one was requested."""
    on_barrier: Callable[[int, int], None] | None
    """Callback with a block and the number of barriers that it has completed."""

    def push(self, pc: int, lanes: LaneSet) -> None:
        """Makes lanes ready to go on at an instruction."""

    def read(self, lanes: LaneSet, arg: Arg) -> Array:
        """Returns an operand for lanes, one value a lane."""

    def write(self, lanes: LaneSet, arg: Arg, values: object) -> None:
        """Writes a register of `full` while no frame is active."""

    def deactivate(self) -> None:
        """Moves all registers to `full`."""

    def rewritten(self, mask: int) -> None:
        """Marks these rows (bits; -1: any) of `full`, written while no frame was active: no frame has them any more."""

    def flush(self) -> None:
        """Copies all registers to `full`; the frame that runs keeps its copies."""

    def stop(self, kind: str, message: str, pc: int, lanes: LaneSet) -> NoReturn:
        """Reports a finding that ends the launch."""


class WaveUnit(MemoryUnit):
    """A unit of the machine that lives as long as a wave."""

    def __init__(self, machine: Host):
        super().__init__(machine.memory)
        self.machine, self.code, self.wave, self.push = machine, machine.code, machine.wave, machine.push
