"""The code of a kernel for the machine: memory layout, rows of the register files, straight regions."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from ..order.shadow import Sharing
from ..state.counters import Mix, mix_of
from ..text.syntax import Array, PtxInstruction, PtxProgram, Reg, Variable, symbols, variable_name
from .decoded import function_addresses
from .flow import CONSTANT_REGISTERS, LiveRegisters, in_flight, numbers, spins
from .provenance import Home, guesses, homes, sharing_of
from .registry import FLUSH, KEEP, FunctionCall, PhaseWait, Plan

WIDTHS = (1, 16, 32, 64)
"""Register files by width in bits; 1 holds predicates."""

INTEGERS = frozenset({"s8", "u8", "s4", "u4", "b1"})
"""Types of the integers that tensor cores multiply."""


TEXELS = frozenset({"tex", "tld4", "suld", "sust", "sured"})
"""Opcodes that look at memory through textures and surfaces."""


@dataclass
class CodeRegion:
    """Straight code from `start` to `end` (exclusive) without a branch; `ends` is the control instruction behind it, or None.

    `uses`, `defs`, `live`: rows of the register files (as bit masks) that it reads before writing, writes, and that
    are alive behind it. `executed` counts the warps that ran it, `threads` their active lanes.
    """

    start: int
    end: int
    ends: int | None
    uses: int
    defs: int
    live: int
    executed: int = 0
    threads: int = 0


@dataclass
class FrameLayout:
    """Offsets of the variables of one address space, and its size in bytes."""

    offsets: dict[str, int] = field(default_factory=dict)
    size: int = 0
    homes: dict[str, Home] = field(default_factory=dict)

    def add(self, variable: Variable) -> None:
        self.size = -(-self.size // variable.align) * variable.align
        self.offsets[variable.name] = self.size
        self.homes[variable.name] = Home(variable_name(variable.name), self.size, self.size + variable.size)
        self.size += variable.size


class Code(LiveRegisters):
    """One kernel with the device functions it calls, ready to run.

    `slots` maps a register to (width, row) in the register file of its width; registers that are never alive together
    share a row (linear scan over live ranges), so that the files stay small enough for the host's caches.
    """

    def __init__(self, program: PtxProgram, kernel: str, plans: dict[str, list[Plan]]):
        super().__init__(program, kernel, plans)
        self.params = program.functions[kernel].params
        self.registers = program.functions[kernel].registers
        self.function_names = {address: name for name, address in function_addresses(program).items()}
        self.lay_out(program)
        self.in_flight = in_flight(self)
        self.allocate()
        # The floating-point environment between regions: of the two that round to nearest, the one that more instructions need.
        modes = Counter(plan.mode for plan in self.plans if plan.mode in (KEEP, FLUSH))
        self.base_mode: int = modes.most_common(1)[0][0] if modes else KEEP
        self.communicates = any(may_wait_for_other_blocks(i) for i in self.instructions)
        self.regions: dict[tuple[int, bool], CodeRegion] = {}
        """The regions so far, by (start, converged)."""
        self.seconds_of_wave = 0.0
        """Processor time of a wave in the last launch by NumPy; 0: there was none."""
        self.compiled_seconds_of_wave = 0.0
        """The same of the last launch by compiled code that was compiled before."""
        self.was_compiled = self.gave_up = False
        """Compiled code has run it (`execute.compiled`); and could not, or gave up."""
        self._mixes: dict[tuple[int, int], Mix] = {}
        self._rows: dict[int, list[tuple[int, Array, list[slice]]]] = {0: []}

    @cached_property
    def open_sums(self) -> frozenset[PtxInstruction]:
        """Atomic additions of floating-point numbers to global memory whose results nobody uses, and whose order is therefore open;
        none if the kernel looks at memory otherwise than by loads, stores, atomics and cp.async.
        """
        if any(i.opcode in TEXELS or "bulk" in i.mods for i in self.instructions):
            return frozenset()
        found = []
        for plan in self.plans:
            i = plan.instruction
            float_sum = i.opcode in ("atom", "red") and "add" in i.mods and i.type.name in ("f32", "f64")
            others = {"shared", "shared::cta", "shared::cluster", "v2", "v4", "v8"} & set(i.mods)
            if float_sum and not others and not set(plan.written) & self.read_somewhere:
                found.append(i)
        return frozenset(found)

    @cached_property
    def read_somewhere(self) -> frozenset[str]:
        """Names of the registers that some instruction reads."""
        read = {a.operand.name for plan in self.plans for a in plan.reads if isinstance(a.operand, Reg)}
        return frozenset(read | {i.predicate[0].name for i in self.instructions if i.predicate})

    @cached_property
    def builtins(self) -> frozenset[str]:
        """Names of the functions that it calls and the device brings along."""
        return frozenset(p.control.builtin for p in self.plans if isinstance(p.control, FunctionCall) and p.control.builtin)

    @property
    def whole_grid(self) -> bool:
        """True if the blocks of the grid meet, as those of a cooperative launch may: it asks for their common memory."""
        return bool(self.read_somewhere & {"%envreg1", "%envreg2"})

    @cached_property
    def integer_products(self) -> bool:
        """True if tensor cores multiply integers, none of which is NaN."""
        return any(i.opcode in ("mma", "wmma", "wgmma") and INTEGERS & set(i.mods) for i in self.instructions)

    @cached_property
    def reserves(self) -> bool:
        """True if it uses the shared memory that the system reserves (cooperative groups do)."""
        mentioned = (o for i in self.instructions for o in i.operands if isinstance(o, Reg))
        return any(o.name.startswith("%reserved_smem_offset") for o in mentioned)

    @cached_property
    def spins(self) -> bool:
        """True if lanes may wait in a loop for what others do: by loads, by atomics whose results are used, at mbarriers."""
        used = (plan for plan in self.plans if plan.instruction.opcode == "atom")
        waits = any(isinstance(plan.control, PhaseWait | FunctionCall) for plan in self.plans)
        return waits or bool(spins(self)) or any(not self.read_somewhere.isdisjoint(plan.written) for plan in used)

    @cached_property
    def sharing(self) -> Sharing:
        barriers = tuple(i for i in self.instructions if i.opcode in ("bar", "barrier") and not {"warp", "arrive"} & set(i.mods))
        loops = tuple((self.instructions[first].line, self.instructions[last].line) for first, last in self.loop_spans)
        found = replace(sharing_of(self.plans, self.params), barriers=barriers, loops=loops)
        if not found.atomics:
            return found
        lockstep = {i for i in self.instructions if i.opcode in ("ld", "st") and "volatile" in i.mods} - spins(self)
        return replace(found, guesses=guesses(self), lockstep=frozenset(lockstep))

    @cached_property
    def loop_spans(self) -> list[tuple[int, int]]:
        """The first and last instruction of each loop; those of an inner one are in the outer one's, too."""
        return [(min(loop.body), self.block_end(max(loop.body)) - 1) for loop in self.loops]

    @cached_property
    def homes(self) -> dict[PtxInstruction, Home]:
        """The accesses that may only be of one variable of shared memory, each with that variable."""
        return homes(self.plans, self.shared.homes)

    # -- memory -----------------------------------------------------------------------------------------------------

    def lay_out(self, program: PtxProgram) -> None:
        """Lays out shared and local variables; call parameters are local memory. Dynamic shared memory comes last."""
        used = {o.name for i in self.instructions for o in symbols(i.operands)}
        self.shared, self.local = FrameLayout(), FrameLayout()
        dynamic: list[Variable] = []
        own = [v for f in self.functions for v in f.variables]
        for variable in [*(v for v in program.variables.values() if v.name in used), *own]:
            if variable.space == "shared" and variable.name in used:
                if variable.size:
                    self.shared.add(variable)
                else:
                    dynamic.append(variable)
            elif variable.space in ("local", "param"):
                self.local.add(variable)
        for function in self.functions[1:]:
            for variable in function.params + function.returns:
                if variable.space == "param":
                    self.local.add(variable)
        self.call_params = {v.name for v in own if v.space == "param"}
        self.call_params |= {v.name for f in self.functions[1:] for v in f.params + f.returns}
        if dynamic:
            align = max(v.align for v in dynamic)
            self.shared.size = -(-self.shared.size // align) * align
            self.shared.offsets |= {v.name: self.shared.size for v in dynamic}
            self.shared.homes |= {v.name: Home(variable_name(v.name), self.shared.size, None) for v in dynamic}

    # -- rows of the register files -------------------------------------------------------------------------------------------

    def allocate(self) -> None:
        """Assigns rows by linear scan: a register holds its row from the first to the last place where it is alive."""
        first, last = [first for first, _ in self.mentions], [last for _, last in self.mentions]

        def extend(registers: Iterable[int], *places: int) -> None:
            for number in registers:
                first[number], last[number] = min(first[number], *places), max(last[number], *places)

        for start in self.leaders:
            extend(numbers(self.block_in[start]), start)
            extend(numbers(self.block_out[start]), self.block_end(start))
        # Registers that a product of wgmma writes at its wait keep their rows until then.
        for number, span in self.in_flight.spans.items() if self.in_flight else ():
            extend((number,), *span)
        # Registers that a loop compares keep their rows in the whole loop, so that `Budgets` can see how near its end it is.
        self.compared = 0
        for test in self.exit_tests:
            mask = self.mask(register for register in test.registers if register.name not in CONSTANT_REGISTERS)
            self.compared |= mask
            extend(numbers(mask), min(test.loop.body), self.block_end(max(test.loop.body)))
        self.slots: dict[str, tuple[int, int]] = {}
        self.rows_of_width = dict.fromkeys(WIDTHS, 1)  # row 0 is the bit bucket
        free: dict[int, list[int]] = {width: [] for width in WIDTHS}
        busy: list[tuple[int, int, int]] = []
        for number in sorted(range(len(self.types)), key=lambda n: first[n]):
            while busy and busy[0][0] < first[number]:
                _, width, row = heapq.heappop(busy)
                heapq.heappush(free[width], row)
            register = self.types[number]
            width = register.type.bits if register.type.bits != 8 else 16
            if free[width]:
                row = heapq.heappop(free[width])
            else:
                row = self.rows_of_width[width]
                self.rows_of_width[width] += 1
            self.slots[register.name] = (width, row)
            heapq.heappush(busy, (last[number], width, row))
        base = 0
        self.row_base = {}
        for width in WIDTHS:
            self.row_base[width] = base
            base += self.rows_of_width[width]

    def row_mask(self, registers: int) -> int:
        """Converts registers (bits by id) to rows of the files (bits by row)."""
        mask = 0
        for number in numbers(registers):
            mask |= self.row_bit(self.types[number])
        return mask

    def row_bit(self, register: Reg) -> int:
        """Returns the row of a register as a bit; 0: it has none."""
        width, row = self.slots.get(register.name, (0, 0))
        return 1 << (self.row_base[width] + row) if width else 0

    def rows(self, mask: int) -> list[tuple[int, Array, list[slice]]]:
        """Returns a mask of rows as (width, row numbers, the same as runs) for each file that has some."""
        found = self._rows.get(mask)
        if found is None:
            found = []
            for width in WIDTHS:
                part = (mask >> self.row_base[width]) & ((1 << self.rows_of_width[width]) - 1)
                if part:
                    rows = np.array(list(numbers(part)))
                    found.append((width, rows, [run for _, run in runs(rows)]))
            self._rows[mask] = found
        return found

    # -- regions --------------------------------------------------------------------------------------------------------

    def region(self, pc: int, converged: bool) -> CodeRegion:
        """Returns the straight code from `pc`. If warps are not converged it stops before the next warp-wide instruction."""
        found = self.regions.get((pc, converged))
        if found is not None:
            return found
        end = self.block_end(pc)
        ends = end - 1 if self.plans[end - 1].control is not None else None
        if ends is not None:
            end -= 1
        if not converged:
            for at in range(pc + 1, end):
                if self.plans[at].collective is not None:
                    end, ends = at, None
                    break
        used, defined = self.effects(range(pc, end))
        live = self.live_after(end) | self.compared
        if ends is not None:
            used |= self.reads[ends] & ~defined
            live |= self.writes[ends]
            for nxt in self.successors(ends):
                live |= self.block_in[nxt]
        region = CodeRegion(pc, end, ends, self.row_mask(used), self.row_mask(defined), self.row_mask(live))
        self.regions[pc, converged] = region
        return region

    def mix(self, region: CodeRegion) -> Mix:
        """Returns the counts of one warp's execution of a region, by line."""
        end = region.end + (region.ends is not None)
        found = self._mixes.get((region.start, end))
        if found is None:
            instructions, plans = self.instructions[region.start : end], self.plans[region.start : end]
            found = mix_of((i, plan.flops) for i, plan in zip(instructions, plans, strict=True))
            self._mixes[region.start, end] = found
        return found

    def forget_counts(self) -> None:
        for region in self.regions.values():
            region.executed = region.threads = 0

    def executed(self) -> Iterator[tuple[Mix, int, int]]:
        """Yields the regions that ran: the instructions of each, and the numbers of warps and threads that ran it."""
        return ((self.mix(one), one.executed, one.threads) for one in self.regions.values() if one.executed)


def runs(numbers: Array) -> list[tuple[slice, slice]]:
    """Returns runs of `numbers` that go up by one: the positions of each run, and its numbers."""
    ends = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1] + 1) + 1).tolist(), len(numbers)]
    pairs = [(a, b, int(numbers[a])) for a, b in pairwise(ends) if b > a]
    return [(slice(a, b), slice(first, first + b - a)) for a, b, first in pairs]


def may_wait_for_other_blocks(instruction: PtxInstruction) -> bool:
    """True for global atomics and loads that see other threads' stores: a block might spin on them until another block acts."""
    if instruction.opcode == "atom":
        return not any(mod.startswith("shared") for mod in instruction.mods)
    strong = {"volatile", "relaxed", "acquire", "mmio"} & set(instruction.mods)
    return instruction.opcode == "ld" and bool(strong) and not any(mod.startswith("shared") for mod in instruction.mods)
