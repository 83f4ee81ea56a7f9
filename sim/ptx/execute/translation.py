"""The text of a kernel as LLVM's functions for compiled launches (`execute.compiled`): one runs a warp, one runs blocks.

A warp runs until its end or a barrier. Its registers are vectors of 32 lanes in memory between basic blocks, and LLVM's own values
within one. Lanes that part go on as groups, the one at the lowest instruction first; groups at one instruction go on together: so
does the machine (`execute.scheduler.ReadyLanes`), whose counts of warps must come out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..decode.code import Code
from ..decode.flow import PER_LANE, calculated, names
from ..decode.registry import FLUSH, KEEP, Barrier, Branch, Exit, FunctionCall, Plan, Return, WarpBarrier
from ..decode.table_rows import Formula
from ..text.syntax import Imm, PtxInstruction, Reg
from .vectors import Halves, LaneValue, NoCode, Operands, vector
from .warp_instructions import OPCODES, OTHERS, access, regrouped
from .warp_run import KernelShape, texts
from .warp_text import LAUNCH, REDUCED_BARRIER, WARP_STATE, ShadowRow, WarpText


class KernelText(WarpText):
    """The functions of a kernel; `parting` are the branches with counts of warps that part. Raises `NoCode` if it has no
    translation.
    """

    def __init__(self, code: Code, row: ShadowRow):
        super().__init__(code, row)
        self.parting: list[PtxInstruction] = []
        self.starts = [pc for pc in code.leaders if code.function_at[pc] == code.kernel]
        reduced = [pc for pc, plan in enumerate(code.plans) if isinstance(plan.control, Barrier) and plan.control.reduction]
        self.number = {pc: k for k, pc in enumerate(self.starts)}
        self.behind = {pc: k for k, pc in enumerate(reduced, len(self.starts))}
        """The numbers of blocks: of basic blocks by their starts, of those behind barriers that reduce by the barriers."""
        self.words = -(-(len(self.number) + len(self.behind)) // 64)
        self.doubted = sorted(code.doubtful.registers)
        self.moved = "0"
        self.blanks_at = self.shape.blanks
        for start in self.starts:
            self.region(start)
        for pc in reduced:
            self.reduced_barrier(pc)

    # -- instructions ---------------------------------------------------------------------------------------------------

    def open(self, number: int) -> None:
        """Begins a block, whose lanes are those that `@pop` gave."""
        self.values, self.dirty = {}, set()
        self.begin(f"block{number}")
        self.mask = self.add("load i32, ptr %mask")
        self.active = self.add(f"bitcast i32 {self.mask} to {vector('i1')}")

    def region(self, start: int) -> None:
        """Adds a basic block."""
        code = self.code
        region = code.region(start, True)
        number = self.number[start]
        self.open(number)
        self.count("%regions", 2 * number, "1")
        self.count("%regions", 2 * number + 1, self.counted(self.mask))
        for pc in range(region.start, region.end):
            plan, i = code.plans[pc], code.instructions[pc]
            self.known = {}
            here = self.written_here(pc) if pc in code.doubtful.watched else ""
            if plan.collective is not None:
                self.together(plan)
            self.now = i
            if i.opcode in OPCODES:
                access(self, plan, i)
            elif i.opcode in OTHERS:
                OTHERS[i.opcode](self, plan, i)
            elif i.opcode == "mov" and len(plan.reads) + len(plan.writes) > 2:
                regrouped(self, plan, i)
            else:
                self.arithmetic(plan, i)
            if here:
                self.settle(plan, here)
        self.ask()
        self.keep(region.live)
        if region.ends is not None and region.ends in code.doubtful.watched:
            self.written_here(region.ends)
        if region.ends is None:
            self.go(region.end)
        else:
            self.control(region.ends)

    def arithmetic(self, plan: Plan, i: PtxInstruction) -> None:
        """Adds an instruction of a row."""
        formula = getattr(plan.bind, "__self__", None)
        base = self.code.base_mode
        if not isinstance(formula, Formula) or base not in (KEEP, FLUSH):
            raise NoCode
        direction, flushing = divmod(plan.mode or KEEP, 2)
        self.flushing = bool(flushing)
        flushes = self.flushing and base != FLUSH
        if plan.mode == KEEP != base and not keeps(i):
            raise NoCode
        operands: dict[str, LaneValue | Halves] = {
            name: self.halves(a) if a.packed else self.read(a) for name, a in zip(formula.reads, plan.reads, strict=True)
        }
        if flushes:
            if any(not isinstance(x, LaneValue) for x in operands.values()):
                raise NoCode
            operands = {name: self.flushed(x, False) for name, x in operands.items() if isinstance(x, LaneValue)}
        if any(a.packed for a in plan.writes):
            self.paired(plan, formula, operands, bool(direction) or flushes)
            return
        if direction:
            found = [self.directed(e, operands, direction) for e in formula.values]
        else:
            found = [self.value(e, operands) for e in formula.values]
        if flushes:
            found = [self.flushed(self.cast(x, to.dtype), True) for x, to in zip(found, plan.writes, strict=True)]
        found = [self.cast(x, to.dtype) for x, to in zip(found, plan.writes, strict=True)]
        mask = self.predicate(i)
        for to, value in zip(plan.writes, found, strict=True):
            self.write(to, value, mask)

    def paired(self, plan: Plan, formula: Formula, operands: Operands, special: bool) -> None:
        """Adds an instruction on packed pairs."""
        if special or len(plan.writes) != 1:
            raise NoCode
        to = plan.writes[0]
        mask = self.predicate(plan.instruction)
        low, high = (self.cast(x, to.dtype) for x in self.both(formula.values[0], operands))
        self.write_halves(to, (low, high), mask)

    # -- registers that may be unwritten ----------------------------------------------------------------------------------

    def blanks(self, name: str) -> str:
        """Returns the place of the lanes in which a register is unwritten."""
        return self.field("%w", self.blanks_at + self.doubted.index(name))

    def written_here(self, pc: int) -> str:
        """Gives up if an instruction reads a register that a lane never wrote, unless it moves it as a whole; returns its lanes."""
        plan, i = self.code.plans[pc], self.code.instructions[pc]
        here = self.mask
        if i.predicate is not None:
            self.unblank([i.predicate[0].name], self.mask)
            here = self.running(self.holding(i))
        read = [a.operand.name for a in plan.reads if isinstance(a.operand, Reg) and a.operand.name in self.doubted]
        if i.opcode == "mov" and len(plan.reads) == len(plan.writes) == 1 and read:
            self.moved = self.add(f"load i64, ptr {self.blanks(read[0])}")
        elif read and names(calculated(plan)) == read:
            self.moved = self.blank_together(read, here)
        elif read and i.opcode == "shfl" and all(isinstance(operand, Imm) for operand in i.operands[2:4]):
            self.moved = self.add(f"load i64, ptr {self.blanks(read[0])}")
        else:
            self.moved = "0"
            self.unblank(read, here)
        return here

    def blank_together(self, read: Sequence[str], here: str) -> str:
        """Gives up if a lane wrote some of these registers, but not all; returns the lanes that wrote none."""
        every, none = "0", "-1"
        for name in read:
            blank = self.add(f"load i64, ptr {self.blanks(name)}")
            every, none = self.add(f"or i64 {every}, {blank}"), self.add(f"and i64 {none}, {blank}")
        lanes = self.add(f"trunc i64 {self.add(f'xor i64 {every}, {none}')} to i32")
        self.fail_for(self.add(f"and i32 {lanes}, {here}"))
        return none

    def unblank(self, registers: list[str], here: str) -> None:
        for name in registers:
            if name in self.doubted:
                blank = self.add(f"load i64, ptr {self.blanks(name)}")
                lanes = self.add(f"trunc i64 {blank} to i32")
                self.fail_for(self.add(f"and i32 {lanes}, {here}"))

    def settle(self, plan: Plan, here: str) -> None:
        """Notes what an instruction has written for these lanes."""
        for arg in plan.writes:
            if not isinstance(arg.operand, Reg) or arg.operand.name not in self.doubted:
                continue
            if 8 * arg.dtype.itemsize < self.code.slots[arg.operand.name][0]:
                continue
            place, lanes = self.blanks(arg.operand.name), self.add(f"zext i32 {here} to i64")
            old = self.add(f"load i64, ptr {place}")
            kept = self.add(f"and i64 {old}, {self.add(f'xor i64 {lanes}, -1')}")
            brought = self.add(f"and i64 {self.moved}, {lanes}")
            self.say(f"store i64 {self.add(f'or i64 {kept}, {brought}')}, ptr {place}")

    # -- control --------------------------------------------------------------------------------------------------------

    def control(self, pc: int) -> None:
        plan, i = self.code.plans[pc], self.code.instructions[pc]
        control = plan.control
        taken, rest = self.mask, "0"
        if i.predicate is not None:
            taken = self.running(self.predicate(i))
            rest = self.add(f"xor i32 {taken}, {self.mask}")
        match control:
            case Branch(table="") as branch:
                self.branch(i, self.code.target(branch.target), pc + 1, taken, rest)
            case Exit(trap=False) | Return():
                self.leave(i, pc + 1, taken, rest)
            case FunctionCall(builtin="__assertfail"):
                self.fail_for(taken)
                self.go(pc + 1)
            case WarpBarrier() if i.predicate is None:
                alive = self.add(f"trunc i64 {self.load('%w', WARP_STATE['alive'])} to i32")
                self.named(self.read(plan.reads[0]), self.add(f"xor i32 {self.mask}, {alive}"))
                self.say("call void @warp_met(ptr %w)")
                self.go(pc + 1)
            case Barrier(counted=False, waits=True) as barrier if i.predicate is None and isinstance(plan.reads[0].operand, Imm):
                # All of the warp, as it was at its start: else NumPy says who waits for whom.
                alone = self.add(f"icmp eq i64 {self.load('%w', WARP_STATE['pending'])}, 0")
                lanes = self.add(f"trunc i64 {self.load('%w', WARP_STATE['whole'])} to i32")
                all_ = self.add(f"icmp eq i32 {self.mask}, {lanes}")
                apart = self.add(f"xor i1 {self.add(f'and i1 {alone}, {all_}')}, true")
                self.fail_if(apart)
                number = plan.reads[0].operand.value + 1
                if barrier.reduction:
                    number += REDUCED_BARRIER
                    holds = self.read(plan.reads[-1]).name
                    found = self.counted(self.running(self.negated(holds) if barrier.negated else holds))
                    self.say(f"store i64 {found}, ptr {self.field('%w', WARP_STATE['vote'])}")
                self.say(f"store i64 {number}, ptr {self.field('%w', WARP_STATE['barrier'])}")
                self.push(self.behind[pc] if barrier.reduction else self.block_at(pc + 1), self.mask)
                self.say("br label %wait")
            case _:
                raise NoCode

    def reduced_barrier(self, pc: int) -> None:
        """Adds the block in which a warp gets what a barrier has reduced, and goes on behind it."""
        plan = self.code.plans[pc]
        (to,) = plan.writes
        if isinstance(to.operand, Reg) and to.operand.name in self.doubted:
            raise NoCode
        self.open(self.behind[pc])
        votes, threads = (self.load("%launch", LAUNCH[name]) for name in ("votes", "threads"))
        control = plan.control
        assert isinstance(control, Barrier)
        if control.reduction == "popc":
            found = LaneValue(self.everywhere("i32", self.add(f"trunc i64 {votes} to i32")), np.dtype(np.uint32))
        else:
            test = f"icmp eq i64 {votes}, {threads}" if control.reduction == "and" else f"icmp ne i64 {votes}, 0"
            found = LaneValue(self.everywhere("i1", self.add(test)), np.dtype(bool))
        self.write(to, found, None)
        self.keep(-1)
        self.go(pc + 1)

    def push(self, number: int, mask: str) -> None:
        """Makes lanes wait at a block, if there are any."""
        self.say(f"call void @push(ptr %w, i64 {number}, i32 {mask})")

    def block_at(self, pc: int) -> int:
        """Returns the number of the basic block that starts at an instruction."""
        if pc not in self.number:
            raise NoCode
        return self.number[pc]

    def go(self, pc: int) -> None:
        """Goes on at an instruction, unless other lanes of the warp are somewhere else."""
        number, apart = self.block_at(pc), self.label("apart")
        alone = self.add(f"icmp eq i64 {self.load('%w', WARP_STATE['pending'])}, 0")
        self.say(f"br i1 {alone}, label %block{number}, label %{apart}")
        self.begin(apart)
        self.push(number, self.mask)
        self.say("br label %dispatch")

    def branch(self, i: PtxInstruction, there: int, here: int, taken: str, rest: str) -> None:
        if i.predicate is None:
            self.again(there, i)
            self.go(there)
            return
        go, stay, some, both = (self.label(kind) for kind in ("go", "stay", "some", "both"))
        self.again(there, i)
        none = self.add(f"icmp eq i32 {taken}, 0")
        self.say(f"br i1 {none}, label %{stay}, label %{some}")
        self.begin(stay)
        self.go(here)
        self.begin(some)
        self.say(f"br i1 {self.add(f'icmp eq i32 {rest}, 0')}, label %{go}, label %{both}")
        self.begin(go)
        self.go(there)
        self.begin(both)
        self.count("%parted", len(self.parting), "1")
        self.parting.append(i)
        self.push(self.block_at(there), taken)
        self.push(self.block_at(here), rest)
        self.say("br label %dispatch")

    def again(self, there: int, i: PtxInstruction) -> None:
        """Counts a step back: a launch that makes too many gives up."""
        if there <= self.code.instructions.index(i):
            place = self.field("%launch", LAUNCH["budget"])
            less = self.add(f"sub i64 {self.add(f'load i64, ptr {place}')}, 1")
            self.say(f"store i64 {less}, ptr {place}")
            self.fail_if(self.add(f"icmp slt i64 {less}, 0"))

    def leave(self, i: PtxInstruction, here: int, taken: str, rest: str) -> None:
        if self.row.copies:
            # Nobody would wait for the copies of a lane that leaves.
            head, tail = (self.load("%w", WARP_STATE[name]) for name in ("head", "tail"))
            self.fail_if(self.add(f"icmp ne i64 {head}, {tail}"))
        alive = self.field("%w", WARP_STATE["alive"])
        stay = self.add(f"xor i32 {taken}, -1")
        self.add_to(alive, self.add(f"zext i32 {stay} to i64"), "and")
        if i.predicate is not None:
            parted = self.add(f"icmp ne i32 {taken}, 0")
            both = self.add(f"and i1 {parted}, {self.add(f'icmp ne i32 {rest}, 0')}")
            self.count("%parted", len(self.parting), self.add(f"zext i1 {both} to i64"))
            self.parting.append(i)
            self.push(self.block_at(here), rest)
        self.say("br label %dispatch")

    # -- the whole ------------------------------------------------------------------------------------------------------

    def special(self) -> list[tuple[str, tuple[int, int]]]:
        """Returns the special registers that differ between blocks, and their rows."""
        names = [f"%{kind}.{axis}" for kind in ("ctaid", "clusterid") for axis in "xyz"]
        return [(name, self.code.slots[name]) for name in names if name in self.code.slots]

    def within(self) -> list[tuple[str, tuple[int, int]]]:
        """Returns the special registers that are the same in each block, and their rows."""
        differing = {name for name, _ in self.special()}
        return [(name, slot) for name, slot in self.code.slots.items() if name in PER_LANE and name not in differing]

    @property
    def shape(self) -> KernelShape:
        places = [(self.layout.offset(slot), slot[0], name[-1]) for name, slot in self.special()]
        blank = [self.doubted.index(name) for name in self.code.doubtful.blank]
        return KernelShape(self.words, self.layout.size, places, len(self.doubted), blank, self.local_bytes)

    def texts(self) -> tuple[str, Sequence[str], str]:
        """Returns the texts from which `compiled.Compiler.function` makes the kernel."""
        cases = " ".join(f"i64 {k}, label %block{k}" for k in (*self.number.values(), *self.behind.values()))
        body = "\n".join(self.lines)
        sizes = {name: LAUNCH[name] for name in ("regions", "offs", "parted", "sites", "constants")}
        tables = "\n".join(
            f"  %at.{name} = getelementptr i64, ptr %launch, i64 {place}\n  %{name} = load ptr, ptr %at.{name}"
            for name, place in sizes.items()
        )
        warp = f"""
define internal i32 @warp(ptr noalias %launch, ptr noalias %regs, ptr noalias %w) {{
start:
  %mask = alloca i32
  %bad = alloca i32
  %exchanged = alloca {vector("i32")}, align 64
  %rows = alloca {vector("i64")}, align 64
  %pairs = alloca [2 x {vector("i64")}], align 64
  %factors = alloca [12 x {vector("i32")}], align 64
  %sums = alloca [8 x {vector("i32")}], align 64
  store i32 0, ptr %bad
  store i32 0, ptr %mask
{tables}
  br label %dispatch
dispatch:
  %next = call {{i64, i32}} @pop(ptr %w)
  %at = extractvalue {{i64, i32}} %next, 0
  %lanes = extractvalue {{i64, i32}} %next, 1
  store i32 %lanes, ptr %mask
  switch i64 %at, label %over [{cases}]
{body}
over:
  %found = load i32, ptr %bad
  %fine = icmp eq i32 %found, 0
  br i1 %fine, label %end, label %fail
end:
  ret i32 0
wait:
  %met = load i32, ptr %bad
  %well = icmp eq i32 %met, 0
  br i1 %well, label %waits, label %fail
waits:
  ret i32 1
fail:
  ret i32 2
}}
"""
        return texts(warp, self.helpers, self.row, self.shape)


def keeps(i: PtxInstruction) -> bool:
    """True if subnormal float32 make no difference to an instruction: float16 has none, and conversions of halves look at bits."""
    names = {type_.name.removesuffix("x2") for type_ in i.types}
    return names == {"f16"} or (i.opcode == "cvt" and not names <= {"f32", "f64"})
