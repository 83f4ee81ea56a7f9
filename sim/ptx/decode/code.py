"""The code of a kernel for the machine: calls, control flow, liveness, register slots, memory layout."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from ..order.sharing import Sharing
from ..report.counters import Mix, mix_of
from ..report.diary import Listing
from ..text.syntax import (
    SINK,
    Array,
    Function,
    Instruction,
    Program,
    PtxError,
    Refusal,
    Reg,
    Unsupported,
    UnsupportedPTX,
    Variable,
    brief,
    symbols,
    variable_name,
)
from . import ops
from .flow import BasicBlocks, ControlFlow, Doubtful, exit_tests, guesses, in_flight, loops, spins, waits
from .ops.rounding import FLUSH, KEEP
from .provenance import Home, homes, sharing_of
from .registry import Branch, Call, Exit, Plan, Return, require_legal, require_names

FUNCTION_WINDOW = 3 << 56
"""Addresses of functions, 16 apart in the order of the module."""


BUILTINS = {"vprintf": 2, "__assertfail": 5}
"""Functions without a body that the machine executes, with the number of their parameters."""


def address_taken(program: Program) -> set[str]:
    """Returns functions whose address is a value somewhere: a call through a pointer may go to them."""
    taken = {name for v in program.variables.values() for _, name, _, _ in v.pointers}
    for function in program.functions.values():
        for instruction in function.instructions:
            if instruction.opcode != "call":
                taken |= {o.name for o in instruction.operands if hasattr(o, "name")}
    return {name for name in taken if name in program.functions and program.functions[name].defined}


def callees(control: Call) -> tuple[str, ...]:
    return () if control.builtin else (control.function,) if control.function else control.candidates


def reachable(kernel: str, plans: dict[str, list[Plan]]) -> tuple[list[str], set[tuple[str, str]]]:
    """Returns the kernel and the functions it may call, and the (caller, callee) pairs of these that are part of a recursion."""
    order, calls = [kernel], dict[str, set[str]]()
    for name in order:
        calls[name] = {c for plan in plans[name] if isinstance(plan.control, Call) for c in callees(plan.control)}
        order += [callee for callee in sorted(calls[name]) if callee not in order]
    beyond = {name: set(direct) for name, direct in calls.items()}
    for middle in order:
        for name in order:
            if middle in beyond[name]:
                beyond[name] |= beyond[middle]
    return order, {(name, callee) for name in order for callee in calls[name] if name in beyond[callee]}


def shared_frames(program: Program, plans: dict[str, list[Plan]]) -> list[tuple[str, Refusal]]:
    """Returns (function, call) within a recursion by functions with local arrays, which all levels would share."""
    return [
        (name, (function.instructions[pc].line, function.instructions[pc].text, "recursion of a function with local arrays"))
        for name, function in program.functions.items()
        if any(v.space == "local" for v in function.variables)
        for pc, plan in enumerate(plans[name])
        if isinstance(plan.control, Call) and any((name, callee) in reachable(name, plans)[1] for callee in callees(plan.control))
    ]


def function_addresses(program: Program) -> dict[str, int]:
    return {name: FUNCTION_WINDOW + 16 * number for number, name in enumerate(program.functions)}


MOST_STATIC = 227 << 10
"""Bytes of shared memory that a thread block of any device can have."""


@dataclass(frozen=True)
class Decoded:
    """The plans of all functions, and the statements that are not executed: of each function, of declarations, of the whole module.

    A function with refused statements has empty plans in their place.
    """

    program: Program
    plans: dict[str, list[Plan]]
    refused: dict[str, list[Refusal]]

    def refusals(self, kernel: str) -> list[Refusal]:
        """Returns the statements that are not executed, of a kernel and of the functions and declarations that it can reach."""
        names = reachable(kernel, self.plans)[0]
        used = {s.name for name in names for i in self.program.functions[name].instructions for s in symbols(i.operands)}
        own = [v for name in names for v in self.program.functions[name].variables]
        static = sum(v.size for v in (*self.program.variables.values(), *own) if v.space == "shared" and v.name in used)
        if static > MOST_STATIC:
            reason = f"{static:,} bytes of static shared memory; a thread block has at most {MOST_STATIC:,}"
            return [(0, brief(kernel), reason)]
        found = {*self.program.unsupported, *(item for name in names for item in self.refused[name])}
        if self.program.unreadable:
            operands = [o for name in names for i in self.program.functions[name].instructions for o in i.operands]
            found |= {item for name, item in self.program.unreadable.items() if any(s.name == name for s in symbols(operands))}
        return sorted(found)


def decode_all(program: Program) -> Decoded:
    """Returns plans of all functions. Raises `UnsupportedPTX`, with all refused statements, if no kernel is left to run."""
    plans: dict[str, list[Plan]] = {}
    refused: dict[str, list[Refusal]] = {}
    for function in program.functions.values():
        plans[function.name] = []
        refused[function.name] = bad = [unread(item) for item in function.unsupported]
        for instruction in function.instructions:
            try:
                plan = ops.decode(instruction)
                require_legal(instruction, plan)
                require_names(program, function, instruction, plan)
                if isinstance(plan.control, Call):
                    plan = resolve_call(program, function, plan, plan.control)
            except Unsupported as error:
                plan = Plan((), ())
                bad.append((instruction.line, instruction.text, str(error)))
            plans[function.name].append(plan)
    for name, item in shared_frames(program, plans):
        refused[name].append(item)
    decoded = Decoded(program, plans, refused)
    every = {*program.unsupported, *program.unreadable.values(), *(item for bad in refused.values() for item in bad)}
    if every and all(decoded.refusals(name) for name in program.kernels):
        raise UnsupportedPTX(sorted(every))
    return decoded


def unread(item: Refusal) -> Refusal:
    """Returns the refusal of a statement that the parser could not read: an opcode that is not executed is reason enough."""
    line, text, _ = item
    match = re.match(r"(?:@!?\S+\s+)?([a-z]\w*)", text)
    return (line, text, f"opcode {match[1]} is not executed") if match and not ops.known(match[1]) else item


def resolve_call(program: Program, caller: Function, plan: Plan, control: Call) -> Plan:
    """Returns the plan with the functions that the call can reach: one, a builtin, or all that fit a call through a pointer."""
    if not control.function:
        sizes = {v.name: v.size for v in caller.variables}
        undeclared = [name for name in (*control.arguments, *control.results) if name not in sizes]
        if undeclared:
            raise Unsupported(f"{brief(undeclared[0])} is no parameter that is declared here")
        wanted = [[sizes[name] for name in names] for names in (control.arguments, control.results)]
        fit = tuple(
            name
            for name in sorted(address_taken(program))
            if [[v.size for v in part] for part in (program.functions[name].params, program.functions[name].returns)] == wanted
        )
        return replace(plan, control=replace(control, candidates=fit))
    function = program.functions.get(control.function)
    if function is not None and function.defined:
        return plan
    if BUILTINS.get(control.function) == len(control.arguments):
        return replace(plan, control=replace(control, function="", builtin=control.function))
    raise Unsupported(f"function {control.function} has no body")


WIDTHS = (1, 16, 32, 64)
"""Register files by width in bits; 1 holds predicates."""

PER_LANE = {
    *(f"%{name}.{axis}" for name in ("tid", "ctaid", "clusterid", "cluster_ctaid") for axis in "xyz"),
    "%cluster_ctarank",
    "%laneid",
    "%warpid",
    *(f"%lanemask_{name}" for name in ("eq", "le", "lt", "ge", "gt")),
}
"""Special registers that differ between lanes: they live in register slots that are filled at the start of a wave."""


INTEGERS = frozenset({"s8", "u8", "s4", "u4", "b1"})
"""Types of the integers that tensor cores multiply."""


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


class Code:
    """One kernel with the device functions it calls, ready to run.

    `slots` maps a register to (width, row) in the register file of its width; registers that are never alive together
    share a row (linear scan over live ranges), so that the files stay small enough for the host's caches.
    """

    def __init__(self, program: Program, kernel: str, plans: dict[str, list[Plan]]):
        self.kernel = kernel
        self.params = program.functions[kernel].params
        self.registers = program.functions[kernel].registers
        self.instructions: list[Instruction] = []
        self.plans: list[Plan] = []
        self.labels: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.starts: dict[str, int] = {}
        self.function_at: list[str] = []
        names, self.cycles = reachable(kernel, plans)
        self.functions = [program.functions[name] for name in names]
        self.function_names = {address: name for name, address in function_addresses(program).items()}
        tables: dict[str, list[str]] = {}
        for function in self.functions:
            base = len(self.instructions)
            self.starts[function.name] = base
            self.instructions += function.instructions
            self.plans += plans[function.name]
            self.function_at += [function.name] * len(function.instructions)
            self.labels |= {name: base + at for name, at in function.labels.items()}
            tables |= function.tables
            # A function may end without a ret: nothing runs behind its end.
        self.tables = {name: [self.target(t) for t in targets] for name, targets in tables.items()}
        self.lay_out(program)
        self.blocks()
        self.liveness()
        blocks = BasicBlocks.of(self.instructions, self.plans, self.leaders, self.successors)
        self.loops = loops(blocks)
        self.exit_tests = exit_tests(blocks, self.loops)
        self.in_flight = in_flight(self)
        self.allocate()
        # The floating-point environment between regions: of the two that round to nearest, the one that more instructions need.
        modes = Counter(plan.mode for plan in self.plans if plan.mode in (KEEP, FLUSH))
        self.base_mode: int = modes.most_common(1)[0][0] if modes else KEEP
        self.communicates = any(may_wait_for_other_blocks(i) for i in self.instructions)
        self._regions: dict[tuple[int, bool], CodeRegion] = {}
        self._mixes: dict[tuple[int, int], Mix] = {}
        self._rows: dict[int, list[tuple[int, Array, list[slice]]]] = {0: []}

    @cached_property
    def read_somewhere(self) -> frozenset[str]:
        """Names of the registers that some instruction reads."""
        read = {a.operand.name for plan in self.plans for a in plan.reads if isinstance(a.operand, Reg)}
        return frozenset(read | {i.predicate[0].name for i in self.instructions if i.predicate})

    @cached_property
    def integer_products(self) -> bool:
        """True if tensor cores multiply integers, none of which is NaN."""
        return any(i.opcode in ("mma", "wmma", "wgmma") and INTEGERS & set(i.mods) for i in self.instructions)

    @cached_property
    def doubtful(self) -> Doubtful:
        alive = self.block_in[self.starts[self.kernel]]
        # Every step of a carry chain has the flag as an operand, also the first, which does not use it.
        known = {*PER_LANE, "%carry"}
        blank = {r.name for n, r in enumerate(self.types) if alive >> n & 1 and r.name not in known}
        return Doubtful.of(self.plans, self.instructions, blank)

    @cached_property
    def reserves(self) -> bool:
        """True if it uses the shared memory that the system reserves (cooperative groups do)."""
        mentioned = (o for i in self.instructions for o in i.operands if isinstance(o, Reg))
        return any(o.name.startswith("%reserved_smem_offset") for o in mentioned)

    @cached_property
    def flow(self) -> ControlFlow:
        return ControlFlow(self.instructions, self.plans, self.successors, self.target)

    @cached_property
    def sharing(self) -> Sharing:
        found = sharing_of(self.instructions, self.plans, self.params)
        if not found.atomics:
            return found
        lockstep = {i for i in self.instructions if i.opcode in ("ld", "st") and "volatile" in i.mods} - spins(self.flow)
        return replace(found, guesses=guesses(self.flow), lockstep=frozenset(lockstep))

    @cached_property
    def homes(self) -> dict[Instruction, Home]:
        """The accesses that may only be of one variable of shared memory, each with that variable."""
        return homes(self.instructions, self.plans, self.shared.homes)

    @cached_property
    def listing(self) -> Listing:
        """The code in the form that a diary keeps."""
        return Listing(self.instructions, self.reads, self.writes, [plan.flops for plan in self.plans], waits(self.flow))

    def target(self, label: str) -> int:
        if label not in self.labels:
            raise PtxError(f"{self.kernel}: no label {label}")
        return self.labels[label]

    # -- memory -----------------------------------------------------------------------------------------------------

    def lay_out(self, program: Program) -> None:
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

    # -- control flow -------------------------------------------------------------------------------------------------

    def successors(self, pc: int) -> list[int]:
        control = self.plans[pc].control
        after = [pc + 1] if pc + 1 < len(self.plans) else []
        if control is None:
            return after
        stay = after if self.instructions[pc].predicate else []
        if isinstance(control, Branch):
            targets = self.tables[control.table] if control.table else [self.target(control.target)]
            return targets + stay
        if isinstance(control, Exit):
            return stay
        if isinstance(control, Call):
            # A recursive call overwrites registers that the restored lanes will need: they are alive at the call.
            again = any((self.function_at[pc], name) in self.cycles for name in callees(control))
            return [self.starts[name] for name in callees(control)] + (after if control.builtin or again else stay)
        if isinstance(control, Return):
            return self.return_sites.get(self.function_at[pc], []) + stay
        return after

    def blocks(self) -> None:
        """Finds the leaders of basic blocks: targets of branches, and instructions behind a control instruction."""
        self.return_sites: dict[str, list[int]] = {}
        for pc, plan in enumerate(self.plans):
            if isinstance(plan.control, Call):
                for name in callees(plan.control):
                    self.return_sites.setdefault(name, []).append(pc + 1)
        leaders = {0, *self.starts.values(), *self.labels.values()}
        for pc, plan in enumerate(self.plans):
            if plan.control is not None:
                leaders.add(pc + 1)
        self.leaders = sorted(pc for pc in leaders if pc < len(self.plans))
        self._next_leader = np.searchsorted(self.leaders, np.arange(len(self.plans)), side="right")

    def block_end(self, pc: int) -> int:
        at = int(self._next_leader[pc])
        return self.leaders[at] if at < len(self.leaders) else len(self.plans)

    # -- liveness -----------------------------------------------------------------------------------------------------

    def registers_of(self, pc: int) -> tuple[list[Reg], list[Reg]]:
        """Returns (read, written) registers. A predicated instruction also reads its results: some lanes keep their old values."""
        plan, predicate = self.plans[pc], self.instructions[pc].predicate
        reads = [a.operand for a in plan.reads if isinstance(a.operand, Reg)]
        writes = [a.operand for a in plan.writes if isinstance(a.operand, Reg) and a.operand != SINK]
        if predicate:
            reads = [*reads, predicate[0], *writes]
        return [r for r in reads if r != SINK and not is_constant(r)], writes

    def liveness(self) -> None:
        self.ids: dict[str, int] = {}
        self.types: list[Reg] = []
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.mentions: list[list[int]] = []  # of each register, the first and the last instruction that names it
        for pc in range(len(self.plans)):
            masks = []
            for registers in self.registers_of(pc):
                mask = 0
                for register in registers:
                    number = self.ids.setdefault(register.name, len(self.ids))
                    if number == len(self.types):
                        self.types.append(register)
                        self.mentions.append([pc, pc])
                    self.mentions[number][1] = pc
                    mask |= 1 << number
                masks.append(mask)
            self.reads.append(masks[0])
            self.writes.append(masks[1])
        ends = {start: self.block_end(start) for start in self.leaders}
        use: dict[int, int] = {}
        define: dict[int, int] = {}
        follow: dict[int, list[int]] = {}
        for start, end in ends.items():
            used = defined = 0
            for pc in range(start, end):
                used |= self.reads[pc] & ~defined
                defined |= self.writes[pc]
            use[start], define[start], follow[start] = used, defined, self.successors(end - 1)
        self.block_in = dict.fromkeys(self.leaders, 0)
        self.block_out = dict.fromkeys(self.leaders, 0)
        changed = True
        while changed:
            changed = False
            for start in reversed(self.leaders):
                out = 0
                for nxt in follow[start]:
                    out |= self.block_in[nxt]
                into = use[start] | (out & ~define[start])
                if out != self.block_out[start] or into != self.block_in[start]:
                    self.block_out[start], self.block_in[start] = out, into
                    changed = True

    def allocate(self) -> None:
        """Assigns rows by linear scan: a register holds its row from the first to the last place where it is alive."""
        first, last = [first for first, _ in self.mentions], [last for _, last in self.mentions]

        def extend(mask: int, position: int) -> None:
            while mask:
                low = mask & -mask
                number = low.bit_length() - 1
                first[number] = min(first[number], position)
                last[number] = max(last[number], position)
                mask ^= low

        for start in self.leaders:
            extend(self.block_in[start], start)
            extend(self.block_out[start], self.block_end(start))
        # Registers that a product of wgmma writes at its wait keep their rows until then.
        for number, (start, end) in self.in_flight.spans.items() if self.in_flight else ():
            first[number], last[number] = min(first[number], start), max(last[number], end)
        # Registers that a loop compares keep their rows in the whole loop, so that `Budgets` can see how near its end it is.
        self.compared = 0
        for test in self.exit_tests:
            for register in test.registers:
                if not is_constant(register):
                    mask = 1 << self.ids[register.name]
                    self.compared |= mask
                    extend(mask, min(test.loop.body))
                    extend(mask, self.block_end(max(test.loop.body)))
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
        while registers:
            low = registers & -registers
            width, row = self.slots[self.types[low.bit_length() - 1].name]
            mask |= 1 << (self.row_base[width] + row)
            registers ^= low
        return mask

    def rows(self, mask: int) -> list[tuple[int, Array, list[slice]]]:
        """Returns a mask of rows as (width, row numbers, the same as runs) for each file that has some."""
        found = self._rows.get(mask)
        if found is None:
            found = []
            for width in WIDTHS:
                part = (mask >> self.row_base[width]) & ((1 << self.rows_of_width[width]) - 1)
                if part:
                    numbers = np.array([n for n in range(part.bit_length()) if part >> n & 1])
                    found.append((width, numbers, [run for _, run in runs(numbers)]))
            self._rows[mask] = found
        return found

    def live_after(self, end: int) -> int:
        """Returns the registers alive before instruction `end`, the first behind a region."""
        if end >= len(self.plans):
            return 0
        stop = self.block_end(end)
        start = max(s for s in self.leaders if s <= end)
        live = self.block_out[start]
        for pc in range(stop - 1, end - 1, -1):
            live = (live & ~self.writes[pc]) | self.reads[pc]
        return live

    # -- regions --------------------------------------------------------------------------------------------------------

    def region(self, pc: int, converged: bool) -> CodeRegion:
        """Returns the straight code from `pc`. If warps are not converged it stops before the next warp-wide instruction."""
        found = self._regions.get((pc, converged))
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
        used = defined = 0
        for at in range(pc, end):
            used |= self.reads[at] & ~defined
            defined |= self.writes[at]
        live = self.live_after(end) | self.compared
        if ends is not None:
            used |= self.reads[ends] & ~defined
            live |= self.writes[ends]
            for nxt in self.successors(ends):
                live |= self.block_in[nxt]
        region = CodeRegion(pc, end, ends, self.row_mask(used), self.row_mask(defined), self.row_mask(live))
        self._regions[pc, converged] = region
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

    def regions(self) -> dict[tuple[int, bool], CodeRegion]:
        """Returns all regions, by (start, converged)."""
        return self._regions

    def forget_counts(self) -> None:
        for region in self._regions.values():
            region.executed = region.threads = 0

    def executed(self) -> Iterator[tuple[Mix, int, int]]:
        """Yields the regions that ran: the instructions of each, and the numbers of warps and threads that ran it."""
        return ((self.mix(one), one.executed, one.threads) for one in self._regions.values() if one.executed)


def runs(numbers: Array) -> list[tuple[slice, slice]]:
    """Returns runs of `numbers` that go up by one: the positions of each run, and its numbers."""
    ends = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1] + 1) + 1).tolist(), len(numbers)]
    pairs = [(a, b, int(numbers[a])) for a, b in pairwise(ends) if b > a]
    return [(slice(a, b), slice(first, first + b - a)) for a, b, first in pairs]


def is_constant(register: Reg) -> bool:
    """True for special registers that are the same for every lane of a launch."""
    return register.name in CONSTANT_REGISTERS


def may_wait_for_other_blocks(instruction: Instruction) -> bool:
    """True for global atomics and loads that see other threads' stores: a block might spin on them until another block acts."""
    if instruction.opcode == "atom":
        return not any(mod.startswith("shared") for mod in instruction.mods)
    strong = {"volatile", "relaxed", "acquire", "mmio"} & set(instruction.mods)
    return instruction.opcode == "ld" and bool(strong) and not any(mod.startswith("shared") for mod in instruction.mods)


CONSTANT_REGISTERS = {
    *(f"%{name}.{axis}" for name in ("ntid", "nctaid", "nclusterid", "cluster_nctaid") for axis in "xyz"),
    "%cluster_nctarank",
    "%is_explicit_cluster",
    "%current_graph_exec",
    *(f"%reserved_smem_offset_{name}" for name in ("begin", "end", "cap", "0", "1")),
    "%nwarpid",
    "%smid",
    "%nsmid",
    "%gridid",
    "%dynamic_smem_size",
    "%total_smem_size",
    "%aggr_smem_size",
    *(f"%envreg{n}" for n in range(32)),
}
