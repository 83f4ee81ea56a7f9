"""Register files and frames: the arrays that instructions are bound to; the machine as its units see it.

A file has one row a register and one column a lane. The full frame is the files of the whole wave. A smaller set of
lanes runs in a compact frame, whose files have a column for each of its lanes only: the rows that a region needs are
gathered from the full frame on demand, and those it wrote and somebody still needs are scattered back when another
set of lanes takes over. So every instruction is written once, for arrays of all lanes, and never sees an index.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol

import numpy as np

from ..decode.code import Code, CodeRegion
from ..decode.flow import CONSTANT_REGISTERS
from ..decode.registry import ENVIRONMENT, Arg, Frame, Plan, Thunk, WarpgroupUnit
from ..memory.async_copies import Bulks, Copies
from ..memory.mbarriers import MBarriers
from ..memory.spaces import DeviceRuntime, LaunchMemory, MemoryUnit
from ..memory.texels import Texels, Texture, Textures
from ..state.lane_sets import WARP, Geometry, LaneSet, Wave
from ..state.segments import Segment
from ..text.syntax import Array, Imm, Mem, PtxError, PtxInstruction, Reg, Sym
from .scheduler import Limits, ReadyLanes

FILE_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(bool),
    16: np.dtype(np.uint16),
    32: np.dtype(np.uint32),
    64: np.dtype(np.uint64),
}

MANY = 256
"""Lanes from which on registers are copied run by run, if the lanes are a grid."""


COMPACT_LANES = 1 << 16
"""Most lanes of all compact frames together that keep their registers and bound code."""


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
    """A follower of registers that may be read unwritten or in flight (`execute.register_followers`)."""

    watched: frozenset[int]
    """The instructions to follow."""

    def watch(self, frame: RegisterFrame, pc: int, thunk: Thunk) -> Thunk:
        """Returns an instruction's thunk, preceded by its effect on what is followed."""


class RegisterFrame(Frame):
    """The registers of `n` lanes."""

    def __init__(self, machine: RegisterFiles, n: int):
        super().__init__(machine, n, machine.code.read_somewhere)
        self.machine: RegisterFiles = machine
        self.code = machine.code
        self.files = {width: np.zeros((rows, n), FILE_DTYPES[width]) for width, rows in self.code.rows_of_width.items()}
        self.valid = 0
        self.dirty = 0
        self.live = 0
        self.mode = self.code.base_mode
        self._views: dict[tuple[tuple[int, int], int, bool], Array] = {}
        self._thunks: dict[tuple[int, int], list[Thunk]] = {}

    # -- operands ---------------------------------------------------------------------------------------------------

    def predicate(self, i: PtxInstruction) -> Array | None:
        """Returns the register of an instruction's predicate as an array over the lanes, if it has one."""
        return None if i.predicate is None else self.array(Arg(i.predicate[0], FILE_DTYPES[1]))

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
            found = self._thunks[key] = self.plain(*key)
        return found

    def plain(self, start: int, end: int) -> list[Thunk]:
        """Binds these instructions to NumPy's functions."""
        found: list[Thunk] = []
        self.mode = base = self.code.base_mode
        held: tuple[str, ...] = ()
        for pc in range(start, end):
            plan, instruction = self.code.plans[pc], self.code.instructions[pc]
            if plan.keeps:
                names = (*instruction.mods, *(register_name(a) for a in plan.reads[: plan.keeps]))
                self.kept = names == held and instruction.predicate is None
                held = names if instruction.predicate is None else ()
            if plan.mode is not None and plan.mode != self.mode:
                self.mode = plan.mode
                found.append(ENVIRONMENT.setter(self.mode))
            out, ins = [self.array(a) for a in plan.writes], [self.array(a) for a in plan.reads]
            thunk = self.guarded(plan, instruction, out, ins, self.machine.memory.tally.predicated_off)
            for follower in self.machine.followers:
                if pc in follower.watched:
                    thunk = follower.watch(self, pc, thunk)
            found.append(thunk)
            if held and any(register_name(a) in held for a in plan.writes):
                held = ()
        if self.mode != base:
            found.append(ENVIRONMENT.setter(base))
        return found

    def later(self, make: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a function that returns what `make` binds, at its first call: beside an instruction, for what is rarely needed.

        It binds as `plain` does: in the floating-point environment of the code's beginning, no operand of a product kept.
        """
        mode, made = self.mode, list[Any]()

        def found() -> Any:
            if not made:
                ENVIRONMENT.setter(self.code.base_mode)()
                self.kept, kept = False, self.kept
                made.append(make())
                self.kept = kept
                ENVIRONMENT.setter(mode)()
            return made[0]

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
        some = self.later(partial(self._merged if plan.pure else self._selected, plan, out, ins))
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
                some()(~predicate if negated else predicate)

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
            elif self.lanes.whole_warps:
                by_warp(target)[rows] = by_warp(source)[rows[:, None], self.lanes.warp_ids]
            else:
                for row in rows.tolist():
                    source[row].take(self.lanes.index, 0, target[row], "clip")
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
            elif self.lanes.whole_warps:
                by_warp(target)[rows[:, None], self.lanes.warp_ids] = by_warp(source)[rows]
            else:
                for row in rows.tolist():
                    target[row][self.lanes.index] = source[row]
        self.dirty = 0


def by_warp(file: Array) -> Array:
    """Returns a file as (rows, warps, 32): NumPy moves whole warps ten times as fast as lanes."""
    return file.reshape(len(file), -1, WARP)


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


@dataclass
class Setup:
    """The inputs of a launch besides code: memory, parameters, and scheduling."""

    geometry: Geometry
    parameters: bytes
    parameter_segment: Segment
    shared_bytes: int
    symbols: dict[str, int]
    seed: int | None = None
    on_barrier: Callable[[int, int], None] | None = None
    limits: Limits = field(default_factory=Limits)
    workspace: int = 0
    approximate: bool = True
    tensor_cores: str | None = None
    textures: Mapping[int, Texture | Texels] = field(default_factory=dict)
    runtime: DeviceRuntime = field(default_factory=DeviceRuntime)


class Stop(Exception):
    """Raised when the launch cannot go on; a finding says why."""


class RegisterFiles:
    """The registers of a launch, and all else of it that units of the machine use."""

    wave: Wave
    ready: ReadyLanes
    parked: dict[int, LaneSet]
    copies: Copies
    bulks: Bulks
    mbarriers: MBarriers
    textures: Textures
    warpgroups: WarpgroupUnit
    full: RegisterFrame
    """The registers of the whole wave."""
    frame: RegisterFrame
    """The registers of the lanes that run now."""
    current: LaneSet | None
    followers: Sequence[Follower]

    def __init__(self, code: Code, setup: Setup, memory: LaunchMemory):
        self.code, self.setup, self.memory, self.findings = code, setup, memory, memory.findings
        self.approximate, self.tensor_cores, self.on_barrier = setup.approximate, setup.tensor_cores, setup.on_barrier
        self._compact: dict[int, RegisterFrame] = {}
        self._full_frames: dict[int, RegisterFrame] = {}
        self._clock = 0
        geometry = setup.geometry
        clusters = [g // c for g, c in zip(geometry.grid, geometry.cluster, strict=True)]
        sizes = {"ntid": geometry.block, "nctaid": geometry.grid, "cluster_nctaid": geometry.cluster, "nclusterid": clusters}
        start = memory.shared_size - memory.reserved
        self.constants = {
            **dict.fromkeys(CONSTANT_REGISTERS, 0),
            **{f"%{name}.{axis}": size for name, each in sizes.items() for axis, size in zip("xyz", each, strict=True)},
            "%cluster_nctarank": geometry.cluster_blocks,
            "%is_explicit_cluster": int(geometry.explicit),
            "%nwarpid": max(-(-geometry.threads // WARP), 32),
            "%nsmid": 1,
            "%gridid": 1,
            "%dynamic_smem_size": setup.shared_bytes,
            "%total_smem_size": start,
            "%aggr_smem_size": memory.shared_size,
            # The memory, placed by the driver, through which the blocks of a cooperative launch meet.
            "%envreg1": setup.workspace >> 32,
            "%envreg2": setup.workspace & 0xFFFFFFFF,
            **dict.fromkeys((f"%reserved_smem_offset_{name}" for name in ("begin", "0", "1")), start),
            "%reserved_smem_offset_end": memory.shared_size,
            "%reserved_smem_offset_cap": memory.reserved,
        }

    # -- addresses and parameters ---------------------------------------------------------------------------------------

    def address_of(self, symbol: Sym) -> int:
        """Returns the address of a variable or parameter: an offset in shared or local memory, else a virtual address."""
        for layout in (self.code.shared, self.code.local):
            if symbol.name in layout.offsets:
                return layout.offsets[symbol.name] + symbol.offset
        if symbol.name in self.setup.symbols:
            return self.setup.symbols[symbol.name] + symbol.offset
        raise PtxError(f"{self.code.kernel}: unknown symbol {symbol.name}")

    def number(self, arg: Arg) -> int:
        """Returns the bits of a symbol's address, or of a special register that is the same for every lane."""
        operand = arg.operand
        assert isinstance(operand, Sym | Reg)
        value = self.address_of(operand) if isinstance(operand, Sym) else self.constants[operand.name]
        raw = immediate(Imm(value), arg.dtype)
        return int(raw.view(f"u{raw.itemsize}"))

    def parameter(self, symbol: Sym, offset: int, size: int) -> bytes | None:
        """Returns bytes of a kernel parameter; None if the symbol is a parameter of a call."""
        if symbol.name in self.code.call_params:
            return None
        start = self.address_of(symbol) - self.setup.parameter_segment.start + offset
        return self.setup.parameters[start : start + size]

    def is_call_param(self, instruction: PtxInstruction) -> bool:
        """True if a .param access of the instruction is to a variable of a call, not to a kernel parameter."""
        for operand in instruction.operands:
            if isinstance(operand, Mem) and isinstance(operand.base, Sym):
                return operand.base.name in self.code.call_params
        return False

    @property
    def asked_time(self) -> bool:
        """True if any instruction has read a clock."""
        return self._clock > 0

    def clock(self) -> int:
        self._clock += 1
        return self._clock * 16

    # -- frames ---------------------------------------------------------------------------------------------------------

    def activate(self, lanes: LaneSet) -> RegisterFrame:
        """Returns the frame in which `lanes` run; the one before gives back its registers."""
        if self.current is lanes:
            return self.frame
        self.deactivate()
        if lanes.full:
            frame = self.full
        else:
            found = self._compact.get(lanes.n)
            if found is None:
                while sum(self._compact) > COMPACT_LANES:
                    self._compact.pop(next(iter(self._compact))).release()
                found = self._compact[lanes.n] = RegisterFrame(self, lanes.n)
                found.lanes = lanes
            frame = found
            if frame.lanes is not lanes:
                frame.valid = 0
            frame.dirty = 0
        for other in self._compact.values():
            if other.valid and other is not frame and self.wave.meet(other.lanes, lanes):
                other.valid = 0
        frame.lanes = lanes
        self.current, self.frame = lanes, frame
        return frame

    def deactivate(self) -> None:
        if self.current is not None and self.frame is not self.full:
            self.frame.store(self.full)
        self.current = None

    def rewritten(self, mask: int) -> None:
        """Marks these rows (bits) of the full frame as written: copies of them in compact frames are old."""
        for frame in self._compact.values():
            frame.valid &= ~mask

    def flush(self) -> None:
        """Copies the current frame's writes to the full frame; the current frame goes on."""
        if self.current is not None and self.frame is not self.full:
            self.frame.store(self.full)

    def read(self, lanes: LaneSet, arg: Arg) -> Array:
        """Returns an operand for `lanes`, one value a lane."""
        frame = self.activate(lanes)
        if frame is not self.full and isinstance(arg.operand, Reg) and arg.operand.name in self.code.slots:
            frame.load(self.code.row_bit(arg.operand), self.full)
        return np.broadcast_to(frame.array(arg), lanes.n)

    def write(self, lanes: LaneSet, arg: Arg, values: object) -> None:
        """Writes a register of the full frame while no frame is active."""
        assert isinstance(arg.operand, Reg)
        self.full.array(arg)[lanes.index] = values
        self.rewritten(self.code.row_bit(arg.operand))

    def everywhere(self, arg: Arg) -> Array:
        """Returns an operand as the lanes of the wave had it last, also those that run elsewhere now."""
        self.flush()
        return np.broadcast_to(self.full.array(arg), self.wave.size)

    # -- lanes --------------------------------------------------------------------------------------------------------

    def push(self, pc: int, lanes: LaneSet) -> None:
        waiting = self.parked.pop(pc, None)
        if waiting is not None:
            self.ready.push(pc, waiting)
        self.ready.push(pc, lanes)

    def stop(self, kind: str, message: str, pc: int, lanes: LaneSet) -> NoReturn:
        """Reports a finding that ends the launch."""
        self.findings.report(kind, message, self.code.instructions[pc], lanes)
        raise Stop


class WaveUnit(MemoryUnit):
    """A unit of the machine that lives as long as a wave."""

    def __init__(self, machine: RegisterFiles):
        super().__init__(machine.memory)
        self.machine, self.code, self.wave, self.push = machine, machine.code, machine.wave, machine.push
