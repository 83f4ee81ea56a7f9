"""The code of a kernel for the machine: memory layout, rows of the register files, straight regions; before it, all functions of
a module as plans.

Statements that the machine does not execute, or that ptxas refuses, are refused here. A decoder takes an instruction apart; the
checks here refuse instructions that ptxas refuses although their opcode is executed: registers of another size or kind than the
instruction's, constants as results, missing modifiers, undeclared names (PTX ISA, "Operand Type Checking", and the syntax of each
instruction). docs/limits.md lists forms that ptxas refuses and the machine takes.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise

import numpy as np

from ..order.shadow import Sharing, is_strong
from ..state.counters import Mix, mix_of
from ..text.parser import is_special
from ..text.syntax import (
    SINK,
    Array,
    Function,
    Imm,
    PtxInstruction,
    PtxProgram,
    Refusal,
    Reg,
    Unsupported,
    UnsupportedPTX,
    Variable,
    brief,
    symbols,
    variable_name,
)
from . import access, control, elementwise, matrices, transfers
from .flow import CONSTANT_REGISTERS, LiveRegisters, callees, in_flight, looks, numbers, reachable, spins
from .provenance import Home, guesses, homes, reached, sharing_of, shuffled
from .registry import FLUSH, KEEP, Arg, Branch, FunctionCall, PhaseWait, Plan, Plans, decode, known

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
    are alive behind it. `tells`: others may see what it writes. `executed` counts the warps that ran it, `threads` their active
    lanes.
    """

    start: int
    end: int
    ends: int | None
    uses: int
    defs: int
    live: int
    tells: bool = False
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

    def __init__(self, program: PtxProgram, kernel: str, plans: Plans):
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
        return frozenset().union(*(plan.read for plan in self.plans))

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
        controls = [plan.control for plan in self.plans]
        waits = any(isinstance(c, PhaseWait) or (isinstance(c, FunctionCall) and not c.builtin) for c in controls)
        return waits or self.polls() or any(map(self.repeats, self.answered))

    @cached_property
    def looks(self) -> frozenset[int]:
        """The branches back to loops that only look at memory."""
        return looks(self)

    def polls(self) -> bool:
        """True if a loop looks at memory that others may write meanwhile: not at what the kernel reads only, plainly."""
        loads = spins(self)
        if not loads:
            return False
        reach = dict(zip(self.instructions, reached(self.plans, self.params), strict=True))
        return any(is_strong(i) or "global" not in i.mods or any(map(self.sharing.writes, reach[i] or "*")) for i in loads)

    @cached_property
    def answered(self) -> frozenset[PtxInstruction]:
        """The atomics whose results are used."""
        atomics = (plan for plan in self.plans if plan.instruction.opcode == "atom")
        return frozenset(plan.instruction for plan in atomics if not self.read_somewhere.isdisjoint(plan.written))

    @cached_property
    def ordered(self) -> frozenset[PtxInstruction]:
        """The atomics for which the order of lanes matters: of those without a use, what each leaves depends on what it finds."""
        chained = {"exch", "cas", "inc", "dec"}
        return self.answered | {i for i in self.instructions if i.opcode in ("atom", "red") and chained & set(i.mods)}

    def repeats(self, i: PtxInstruction) -> bool:
        """True if a branch leads back over an instruction, so that a lane may run it more than once, or later than others."""
        at = self.instructions.index(i)
        targets = ((pc, plan.control) for pc, plan in enumerate(self.plans) if pc >= at and isinstance(plan.control, Branch))
        return any(branch.table or self.target(branch.target) <= at for _, branch in targets)

    @cached_property
    def sharing(self) -> Sharing:
        barriers = tuple(i for i in self.instructions if i.opcode in ("bar", "barrier") and not {"warp", "arrive"} & set(i.mods))
        loops = tuple((self.instructions[first].line, self.instructions[last].line) for first, last in self.loop_spans)
        facts = sharing_of(self.plans, self.params)
        found = replace(facts, barriers=barriers, loops=loops, shuffled=partial(shuffled, self.plans, loops))
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
        tells = any(i.opcode != "ld" and is_strong(i) for i in self.instructions[pc:end])
        region = CodeRegion(pc, end, ends, self.row_mask(used), self.row_mask(defined), self.row_mask(live), tells)
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


# -- all functions of a module ---------------------------------------------------------------------------------------------

# They fill the table of opcodes.
__all__ = ["access", "control", "elementwise", "matrices", "transfers"]

FUNCTION_WINDOW = 3 << 56
"""Addresses of functions, 16 apart in the order of the module."""


BUILTINS: dict[str, tuple[str, str]] = {
    "vprintf": ("Q Q", "i"),
    "__assertfail": ("Q Q I Q Q", ""),
    "malloc": ("Q", "Q"),
    "free": ("Q", ""),
    "cudaGraphSetConditional": ("Q I", ""),
    "__cudaCDP2GetParameterBufferV2": ("Q 3I 3I I", "Q"),
    "__cudaCDP2LaunchDeviceV2": ("Q Q", "i"),
    "__cudaCDP2StreamCreateWithFlags": ("Q I", "i"),
    "__cudaCDP2StreamDestroy": ("Q", "i"),
    "__cudaCDP2StreamWaitEvent": ("Q Q I", "i"),
    "__cudaCDP2EventCreateWithFlags": ("Q I", "i"),
    "__cudaCDP2EventRecord": ("Q Q", "i"),
    "__cudaCDP2EventDestroy": ("Q", "i"),
    "__cudaCDP2Malloc": ("Q Q", "i"),
    "__cudaCDP2Free": ("Q", "i"),
    "__cudaCDP2MemcpyAsync": ("Q Q Q I Q", "i"),
    "__cudaCDP2MemsetAsync": ("Q I Q Q", "i"),
    "__cudaCDP2GetLastError": ("", "i"),
    "__cudaCDP2PeekAtLastError": ("", "i"),
    "__cudaCDP2GetErrorString": ("I", "Q"),
    "__cudaCDP2GetErrorName": ("I", "Q"),
    "__cudaCDP2GetDevice": ("Q", "i"),
    "__cudaCDP2GetDeviceCount": ("Q", "i"),
    "__cudaCDP2DeviceGetAttribute": ("Q I I", "i"),
}
"""Functions without a body that the machine executes: a format of `struct` for each parameter, and that of the result."""


def address_taken(program: PtxProgram) -> set[str]:
    """Returns functions whose address is a value somewhere: a call through a pointer may go to them."""
    taken = {name for v in program.variables.values() for _, name, _, _ in v.pointers}
    for function in program.functions.values():
        taken |= {s.name for i in function.instructions if i.opcode != "call" for s in symbols(i.operands)}
    return {name for name in taken if name in program.functions and program.functions[name].defined}


SHARED_FRAME = "recursion of a function with local arrays"


def has_local_arrays(function: Function) -> bool:
    return any(v.space == "local" for v in function.variables)


def shared_frames(program: PtxProgram, plans: Plans) -> list[tuple[str, Refusal]]:
    """Returns (function, call) within a recursion by functions with local arrays, which all levels would share.

    A call through a pointer may go to many functions, and may be none: it is looked at when it is made.
    """
    return [
        (name, (plan.instruction.line, plan.instruction.text, SHARED_FRAME))
        for name, function in program.functions.items()
        if has_local_arrays(function)
        for plan in plans[name]
        if isinstance(plan.control, FunctionCall)
        and plan.control.function
        and any((name, callee) in reachable(name, plans)[1] for callee in callees(plan.control))
    ]


def function_addresses(program: PtxProgram) -> dict[str, int]:
    return {name: FUNCTION_WINDOW + 16 * number for number, name in enumerate(program.functions)}


MOST_STATIC = 227 << 10
"""Bytes of shared memory that a thread block of any device can have."""


@dataclass(frozen=True)
class Decoded:
    """The plans of all functions, and the statements that are not executed: of each function, of declarations, of the whole module.

    A function with refused statements has empty plans in their place.
    """

    program: PtxProgram
    plans: Plans
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


def decode_all(program: PtxProgram) -> Decoded:
    """Returns plans of all functions. Raises `UnsupportedPTX`, with all refused statements, if no kernel is left to run."""
    plans: Plans = {}
    refused: dict[str, list[Refusal]] = {}
    for function in program.functions.values():
        plans[function.name] = []
        refused[function.name] = bad = [unread(item) for item in function.unsupported]
        for instruction in function.instructions:
            try:
                plan = decode(instruction)
                require_legal(plan)
                require_names(program, function, plan)
                if isinstance(plan.control, FunctionCall):
                    plan = resolve_call(program, function, plan, plan.control)
            except Unsupported as error:
                plan = Plan((), (), instruction=instruction)
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
    return (line, text, f"opcode {match[1]} is not executed") if match and not known(match[1]) else item


def resolve_call(program: PtxProgram, caller: Function, plan: Plan, control: FunctionCall) -> Plan:
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
    own = BUILTINS.get(control.function)
    if own is not None and len(own[0].split()) == len(control.arguments):
        return replace(plan, control=replace(control, function="", builtin=control.function))
    raise Unsupported(f"function {control.function} has no body")


LOOSE = frozenset(
    {"ld", "ldu", "st", "suld", "sust", "cvt", "cvta", "atom", "red", "mma", "wgmma", "wmma", "ldmatrix", "stmatrix", "movmatrix"}
    | {"call"}
)
"""Opcodes whose registers may be wider than their types, or have types of their own."""

ROUNDINGS = frozenset({"rn", "rz", "rm", "rp", "rna", "rs"})
TO_INTEGER = frozenset({"rni", "rzi", "rmi", "rpi"})
SCOPES = frozenset({"cta", "cluster", "gpu", "sys"})
PLAIN = frozenset({"u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f16", "bf16", "f32", "f64"})


def require_legal(plan: Plan) -> None:
    """Raises `Unsupported` for an instruction that ptxas refuses."""
    i = plan.instruction
    for arg in plan.writes:
        if not isinstance(arg.operand, Reg) or is_special(arg.operand.name):
            raise Unsupported("a result needs a register of one's own")
    if i.opcode not in LOOSE:
        for arg in (*plan.writes, *plan.reads):
            fits(i, arg)
    elif i.opcode in ("ld", "st", "suld", "sust"):
        for arg in (*plan.writes, *plan.reads):
            if isinstance(arg.operand, Reg) and arg.operand != SINK and arg.operand.type.bits < 8 * arg.dtype.itemsize:
                raise Unsupported(f"{brief(arg.operand.name)} is .{arg.operand.type.name}, too narrow for this")
    if i.predicate and i.predicate[0].type.name != "pred":
        raise Unsupported(f"{brief(i.predicate[0].name)} is no predicate")
    require_modifiers(i)


def fits(i: PtxInstruction, arg: Arg) -> None:
    """Raises `Unsupported` for a register that is not of the instruction's type."""
    register, whole = arg.operand, bool(i.types) and i.types[-1].kind in "us"
    floating = arg.dtype.kind == "f" and arg.dtype.itemsize > 2  # halves are written as whole numbers
    if isinstance(register, Imm) and ((floating and not register.float_bits) or (whole and register.float_bits)):
        raise Unsupported("a constant of another kind than the instruction's type")
    if not isinstance(register, Reg) or register == SINK or is_special(register.name):
        return
    bits = 1 if arg.dtype.kind == "b" else 8 * arg.dtype.itemsize * (2 if arg.packed else 1)
    kinds = {register.type.kind, "f" if arg.dtype.kind == "f" else "u" if whole else "b"}
    if register.type.bits != bits or kinds >= {"f", "u"} or kinds >= {"f", "s"}:
        raise Unsupported(f"{brief(register.name)} is .{register.type.name}, which is not this instruction's type")


def require_modifiers(i: PtxInstruction) -> None:
    mods = set(i.mods)
    if i.opcode == "fence" and mods & {"acq_rel", "sc"} and not mods & SCOPES:
        raise Unsupported("fence needs a scope")
    if i.opcode in ("ld", "st"):
        meanings = mods & {"weak", "relaxed", "acquire", "release", "volatile", "mmio"}
        if len(meanings - {"mmio"}) > 1 or (i.opcode == "ld" and "release" in mods) or (i.opcode == "st" and "acquire" in mods):
            raise Unsupported(f"{i.opcode} with .{', .'.join(sorted(meanings))}")
        if meanings & {"relaxed", "acquire", "release"} and not mods & SCOPES:
            raise Unsupported(f"{i.opcode}.{min(meanings)} needs a scope")
    if i.opcode == "cvt":
        require_rounding(i, mods)


def require_rounding(i: PtxInstruction, mods: set[str]) -> None:
    """Raises `Unsupported` if a conversion of plain types lacks a rounding where it may lose bits, or has one where it cannot."""
    names = [mod for mod in i.mods if mod in PLAIN]
    if len(names) != 2 or len(i.types) != 2:
        return
    to, source = i.types
    rounded, whole = bool(mods & ROUNDINGS), bool(mods & TO_INTEGER)
    if to.kind == "f":
        needed = source.kind != "f" or to.bits < source.bits or (to.bits == source.bits == 16 and to.name != source.name)
        if needed and not rounded:
            raise Unsupported(f"cvt to .{to.name} from .{source.name} needs a rounding")
        if rounded and source.kind == "f" and to.bits > source.bits:
            raise Unsupported(f"cvt to .{to.name} from .{source.name} rounds nothing")
    elif source.kind == "f" and not whole:
        raise Unsupported(f"cvt to .{to.name} from .{source.name} needs one of .{', .'.join(sorted(TO_INTEGER))}")


def require_names(program: PtxProgram, function: Function, plan: Plan) -> None:
    """Raises `Unsupported` for undeclared names."""
    if isinstance(plan.control, Branch) and plan.control.target and plan.control.target not in function.labels:
        raise Unsupported(f"there is no label {brief(plan.control.target)}")
    if plan.instruction.opcode == "call":
        return  # its operands are functions and prototypes, which `resolve_call` looks up
    own = (function.names, function.labels, function.tables, program.variables, program.functions, program.unreadable)
    for symbol in symbols(plan.instruction.operands):
        if not any(symbol.name in names for names in own):
            raise Unsupported(f"{brief(symbol.name)} is not declared")
