"""The text of a kernel as LLVM's functions for compiled launches (`execute.compiled`): one runs a warp, one runs blocks.

A warp runs until its end or a barrier. Its registers are vectors of 32 lanes in memory between basic blocks, and LLVM's own values
within one. Lanes that part go on as groups, the one at the lowest instruction first; groups at one instruction go on together: so
does the machine (`execute.scheduler.ReadyLanes`), whose counts of warps must come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..decode.access import WINDOWS, address_arg, moved
from ..decode.code import Code
from ..decode.flow import PER_LANE, calculated, names
from ..decode.registry import FLUSH, KEEP, WHOLE_WARP, Arg, Barrier, Branch, Exit, Plan, Return, WarpBarrier
from ..decode.table_rows import Formula
from ..decode.warp import source_lanes
from ..state.lane_sets import WARP
from ..text.syntax import SINK, Imm, Mem, Operand, PtxInstruction, PtxType, Reg, Sym, Unsupported
from .registers import immediate
from .vectors import Arithmetic, LaneValue, NoCode, scalar, splat, vector
from .warp_run import KernelShape, module
from .warp_tables import ATOMICS, LAUNCH, SITE_WORDS, WARP_STATE, ShadowRow, access_name

WIDTHS = {1: "i32", 16: "i16", 32: "i32", 64: "i64"}
"""Types of a register's rows for a lane, by width; predicates are one i32 for all lanes."""

OPCODES = frozenset({"ld", "st", "atom", "red"})
SPACES = ("global", "shared", "const", "param", "local")


def space_of(i: PtxInstruction) -> str:
    """Returns the space of an access; one with a window is generic."""
    return next((mod.partition("::")[0] for mod in i.mods if mod.partition("::")[0] in SPACES), "generic")


def target(i: PtxInstruction) -> tuple[str, PtxType, tuple[Operand, ...], Arg, int]:
    """Returns space, type, registers, base and offset of a load, a store, or an atomic access without a vector."""
    if i.opcode not in ("atom", "red"):
        return moved(i, *(i.operands[:2] if i.opcode == "ld" else i.operands[1::-1]))
    returns = i.opcode == "atom"
    space = space_of(i)
    return space, i.type, (i.operands[0] if returns else SINK,), *address_arg(i.operands[int(returns)], space)


class RegisterLayout:
    """The registers of a warp in memory: a row of vectors for each row of the machine's files."""

    def __init__(self, code: Code):
        self.starts: dict[int, int] = {}
        at = 0
        for width, rows in code.rows_of_width.items():
            self.starts[width] = at
            at += rows * self.stride(width)
        self.size = -(-at // 64) * 64

    @staticmethod
    def stride(width: int) -> int:
        return 64 if width == 1 else max(64, WARP * width // 8)

    def offset(self, slot: tuple[int, int]) -> int:
        """Returns the place of a register's row in the memory of a warp."""
        return self.starts[slot[0]] + slot[1] * self.stride(slot[0])


class KernelText(Arithmetic):
    """The functions of a kernel. Raises `NoCode` for one that has no translation.

    `constants` are what the launch gives, by place: parameters, addresses and sizes. `sites` are the accesses, `off` the
    instructions with counts of lanes that are off, `parting` the branches with counts of warps that part.
    """

    def __init__(self, code: Code, row: ShadowRow):
        super().__init__()
        self.code, self.row, self.layout = code, row, RegisterLayout(code)
        self.constants: list[tuple[str, Any]] = []
        self.sites: list[PtxInstruction] = []
        self.off: list[PtxInstruction] = []
        self.parting: list[PtxInstruction] = []
        self.helpers: set[tuple[object, ...]] = set()
        self.values: dict[tuple[int, int], str] = {}
        self.dirty: set[tuple[int, int]] = set()
        self.starts = [pc for pc in code.leaders if code.function_at[pc] == code.kernel]
        self.number = {pc: k for k, pc in enumerate(self.starts)}
        self.words = -(-len(self.starts) // 64)
        self.doubted = sorted(code.doubtful.registers)
        self.moved = "0"
        self.blanks_at = self.shape.blanks
        for start in self.starts:
            self.region(start)

    # -- the launch -----------------------------------------------------------------------------------------------------

    def constant(self, kind: str, key: Any) -> str:
        """Loads a number of the launch."""
        if (kind, key) not in self.constants:
            self.constants.append((kind, key))
        table = self.add(f"getelementptr i64, ptr %constants, i64 {self.constants.index((kind, key))}")
        return self.add(f"load i64, ptr {table}")

    def place(self, slot: tuple[int, int]) -> str:
        return self.add(f"getelementptr i8, ptr %regs, i64 {self.layout.offset(slot)}")

    # -- operands -------------------------------------------------------------------------------------------------------

    def register(self, slot: tuple[int, int]) -> str:
        """Returns the bits of a row: a vector, of predicates a mask."""
        if slot not in self.values:
            self.values[slot] = self.stored(slot)
        return self.values[slot]

    def stored(self, slot: tuple[int, int]) -> str:
        element = WIDTHS[slot[0]]
        if slot[0] == 1:
            bits = self.add(f"load i32, ptr {self.place(slot)}")
            return self.add(f"bitcast i32 {bits} to {vector('i1')}")
        return self.add(f"load {vector(element)}, ptr {self.place(slot)}, align 64")

    def read(self, arg: Arg) -> LaneValue:
        operand, dtype = arg.operand, arg.dtype
        element = scalar(dtype)
        if arg.packed:
            raise NoCode
        bits = element if dtype.kind != "f" else f"i{8 * dtype.itemsize}"
        if isinstance(operand, Reg) and operand.name in self.code.slots:
            slot = self.code.slots[operand.name]
            if (dtype.kind == "b") != (slot[0] == 1) or 8 * dtype.itemsize > max(slot[0], 8):
                raise NoCode
            found = self.register(slot)
            return LaneValue(found, dtype) if slot[0] == 1 else self.seen(self.resized(found, WIDTHS[slot[0]], bits, False), dtype)
        if isinstance(operand, Imm):
            raw = immediate(operand, dtype)
            value = str(int(raw.view(f"u{dtype.itemsize}"))) if dtype.kind != "b" else str(bool(raw)).lower()
            return self.seen(splat(bits, value), dtype)
        if isinstance(operand, Sym) or (isinstance(operand, Reg) and operand != SINK):
            one = self.constant("operand", (operand, dtype))
            if bits != "i64":
                one = self.add(f"trunc i64 {one} to {bits}")
            return self.seen(self.everywhere(bits, one), dtype)
        raise NoCode

    def write(self, arg: Arg, value: LaneValue, mask: str | None) -> None:
        """Writes a value of the operand's dtype to its register, where a mask holds."""
        name, dtype = value
        if not isinstance(arg.operand, Reg) or arg.packed or arg.dtype != dtype:
            raise NoCode
        if arg.operand.name == SINK.name:
            return
        slot = self.code.slots[arg.operand.name]
        element = "i1" if slot[0] == 1 else WIDTHS[slot[0]]
        if (dtype.kind == "b") != (slot[0] == 1):
            raise NoCode
        if slot[0] != 1:
            bits = f"i{8 * dtype.itemsize}"
            name = self.raw(value)
            if bits != element:
                kept = self.op("and", element, self.register(slot), splat(element, ~((1 << 8 * dtype.itemsize) - 1)))
                name = self.op("or", element, kept, self.resized(name, bits, element, False))
        if mask is not None:
            name = self.chosen(mask, name, self.register(slot), element)
        self.values[slot] = name
        self.dirty.add(slot)

    def keep(self, live: int) -> None:
        """Stores the registers that a region has changed and something still needs, for the lanes that ran it."""
        for slot in sorted(self.dirty):
            if not live >> (self.code.row_base[slot[0]] + slot[1]) & 1:
                continue
            old, element = self.stored(slot), "i1" if slot[0] == 1 else WIDTHS[slot[0]]
            new = self.chosen(self.active, self.values[slot], old, element)
            if slot[0] == 1:
                self.say(f"store i32 {self.bits(new)}, ptr {self.place(slot)}")
            else:
                self.say(f"store {vector(element)} {new}, ptr {self.place(slot)}, align 64")

    def flagged(self, mask: str) -> None:
        self.add_to("%bad", self.add(f"and i32 {self.bits(mask)}, {self.mask}"), "or", "i32")

    def needs(self, helper: str) -> None:
        self.helpers.add((helper,))

    # -- instructions ---------------------------------------------------------------------------------------------------

    def region(self, start: int) -> None:
        """Adds a basic block."""
        code = self.code
        region = code.region(start, True)
        self.values, self.dirty = {}, set()
        number = self.number[start]
        self.begin(f"block{number}")
        self.mask = self.add("load i32, ptr %mask")
        self.active = self.add(f"bitcast i32 {self.mask} to {vector('i1')}")
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
                self.access(plan, i)
            elif i.opcode in OTHERS:
                OTHERS[i.opcode](self, plan, i)
            elif i.opcode == "mov" and len(plan.reads) + len(plan.writes) > 2:
                self.regrouped(plan, i)
            else:
                self.arithmetic(plan, i)
            if here:
                self.settle(plan, here)
        self.ask()
        self.keep(region.live)
        if region.ends is not None and region.ends in code.doubtful.watched:
            self.written_here(region.ends)
        if region.ends is None:
            if region.end >= len(code.plans) or region.end not in self.number:
                raise NoCode
            self.go(region.end)
        else:
            self.control(region.ends)

    def counted(self, mask: str) -> str:
        """Returns the number of lanes of a mask, as i64."""
        return self.add(f"zext i32 {self.add(f'call i32 @llvm.ctpop.i32(i32 {mask})')} to i64")

    def arithmetic(self, plan: Plan, i: PtxInstruction) -> None:
        """Adds an instruction of a row."""
        formula = getattr(plan.bind, "__self__", None)
        base = self.code.base_mode
        if not isinstance(formula, Formula) or base not in (KEEP, FLUSH):
            raise NoCode
        direction, flushing = divmod(plan.mode or KEEP, 2)
        self.flushing = bool(flushing)
        flushes = self.flushing and base != FLUSH
        if plan.mode == KEEP != base:
            raise NoCode
        operands = {name: self.read(a) for name, a in zip(formula.reads, plan.reads, strict=True)}
        if flushes:
            operands = {name: self.flushed(x, False) for name, x in operands.items()}
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

    def window(self, plan: Plan, i: PtxInstruction) -> None:
        """cvta: adds or subtracts the start of a space's window."""
        space = next(mod.partition("::")[0] for mod in i.mods if mod.partition("::")[0] in WINDOWS)
        if space == "param":
            raise NoCode
        found = self.read(plan.reads[0])
        name = found.name
        if WINDOWS[space]:
            element = scalar(found.dtype)
            name = self.op("sub" if "to" in i.mods else "add", element, name, splat(element, WINDOWS[space]))
        self.write(plan.writes[0], LaneValue(name, found.dtype), self.predicate(i))

    def regrouped(self, plan: Plan, i: PtxInstruction) -> None:
        """mov of several registers to one, or of one to several."""
        mask, bits = self.predicate(i), i.type.bits
        whole, part = f"i{bits}", bits // max(len(plan.reads), len(plan.writes))
        if len(plan.writes) == 1:
            total = "zeroinitializer"
            for k, arg in enumerate(plan.reads):
                wide = self.resized(self.raw(self.read(arg)), f"i{part}", whole, False)
                total = self.op("or", whole, total, self.op("shl", whole, wide, splat(whole, k * part)))
            self.write(plan.writes[0], self.seen(total, plan.writes[0].dtype), mask)
            return
        source = self.raw(self.read(plan.reads[0]))
        for k, arg in enumerate(plan.writes):
            piece = self.resized(self.op("lshr", whole, source, splat(whole, k * part)), whole, f"i{part}", False)
            self.write(arg, self.seen(piece, arg.dtype), mask)

    # -- registers that may be unwritten ----------------------------------------------------------------------------------

    def blanks(self, name: str) -> str:
        """Returns the place of the lanes in which a register is unwritten."""
        return self.field("%w", self.blanks_at + self.doubted.index(name))

    def written_here(self, pc: int) -> str:
        """Gives up if an instruction reads a register that a lane never wrote, unless it moves it as a whole; returns its lanes."""
        plan, i = self.code.plans[pc], self.code.instructions[pc]
        here = self.mask
        if i.predicate is not None:
            register, negated = i.predicate
            self.unblank([register.name], self.mask)
            holds = self.bits(self.read(Arg(register, np.dtype(bool))).name)
            if negated:
                holds = self.add(f"xor i32 {holds}, -1")
            here = self.add(f"and i32 {holds}, {self.mask}")
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
        self.fail_if(self.add(f"icmp ne i32 {self.add(f'and i32 {lanes}, {here}')}, 0"))
        return none

    def unblank(self, registers: list[str], here: str) -> None:
        for name in registers:
            if name in self.doubted:
                blank = self.add(f"load i64, ptr {self.blanks(name)}")
                lanes = self.add(f"trunc i64 {blank} to i32")
                self.fail_if(self.add(f"icmp ne i32 {self.add(f'and i32 {lanes}, {here}')}, 0"))

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

    def predicate(self, i: PtxInstruction) -> str | None:
        """Returns the mask of an instruction's predicate, and counts the lanes that are off; None: it has none."""
        if i.predicate is None:
            return None
        register, negated = i.predicate
        holds = self.read(Arg(register, np.dtype(bool))).name
        if negated:
            holds = self.op("xor", "i1", holds, splat("i1", "true"))
        off = self.add(f"xor i32 {self.bits(holds)}, -1")
        rest = self.add(f"and i32 {self.mask}, {off}")
        self.count("%offs", len(self.off), self.counted(rest))
        self.off.append(i)
        return holds

    def together(self, plan: Plan) -> None:
        """Gives up unless all lanes are there that a warp-wide instruction names, and each is named."""
        if plan.instruction.predicate is not None:
            raise NoCode
        alive = self.add(f"trunc i64 {self.load('%w', WARP_STATE['alive'])} to i32")
        absent = self.add(f"xor i32 {self.mask}, {alive}")
        if plan.collective == WHOLE_WARP:
            self.fail_if(self.add(f"icmp ne i32 {absent}, 0"))
            return
        assert plan.collective is not None
        self.named(self.read(plan.reads[plan.collective]), absent)

    def named(self, member: LaneValue, absent: str) -> None:
        """Gives up unless the lanes name each other and none of those that are absent."""
        others = self.op("and", "i32", member.name, self.everywhere("i32", absent))
        here = self.everywhere("i32", self.mask)
        unnamed = self.op("and", "i32", self.op("xor", "i32", member.name, splat("i32", -1)), here)
        wrong = self.test("ne", "i32", self.op("or", "i32", others, unnamed), "zeroinitializer")
        bits = self.add(f"and i32 {self.bits(wrong)}, {self.mask}")
        self.fail_if(self.add(f"icmp ne i32 {bits}, 0"))

    def fail_if(self, bit: str) -> None:
        go = self.label("fine")
        self.say(f"br i1 {bit}, label %fail, label %{go}")
        self.begin(go)

    def shuffle(self, plan: Plan, i: PtxInstruction) -> None:
        """shfl: the source lanes are those of `decode.warp.source_lanes`."""
        mode = next(mod for mod in i.mods if mod in ("up", "down", "bfly", "idx"))
        by, clamp = i.operands[2:4]
        value = self.read(plan.reads[0]).name
        if isinstance(by, Imm) and isinstance(clamp, Imm):
            lanes, within = source_lanes(mode, np.array(by.value), np.array(clamp.value), np.arange(WARP))
            places = f"<{', '.join(f'i32 {n}' for n in lanes.tolist())}>"
            inside = f"<{', '.join(f'i1 {str(bool(n)).lower()}' for n in within.tolist())}>"
            there, found = (
                self.add(f"shufflevector {vector(of)} {x}, {vector(of)} poison, {vector('i32')} {places}")
                for of, x in (("i1", self.active), ("i32", value))
            )
            if self.moved != "0":
                blank = self.add(f"bitcast i32 {self.add(f'trunc i64 {self.moved} to i32')} to {vector('i1')}")
                blank = self.add(f"shufflevector {vector('i1')} {blank}, {vector('i1')} poison, {vector('i32')} {places}")
                self.moved = self.add(f"zext i32 {self.bits(blank)} to i64")
        else:
            step, segment, last, first = self.segments(plan)
            how = {"up": "sub", "down": "add", "bfly": "xor"}.get(mode)
            source = self.op(how, "i32", LANES, step) if how else self.op("or", "i32", first, segment)
            inside = self.test("sge" if mode == "up" else "sle", "i32", source, last)
            source = self.chosen(inside, source, LANES, "i32")
            bit = self.op("shl", "i32", splat("i32", 1), source)
            there = self.test("ne", "i32", self.op("and", "i32", bit, self.everywhere("i32", self.mask)), "zeroinitializer")
            self.say(f"store {vector('i32')} {value}, ptr %exchanged, align 64")
            self.needs("exchanged")
            found = self.add(f"call {vector('i32')} @exchanged(ptr %exchanged, {vector('i32')} {source})")
        # A lane that does not take part has no value: NumPy says so.
        absent = self.add(f"xor i32 {self.bits(there)}, -1")
        self.fail_if(self.add(f"icmp ne i32 {self.add(f'and i32 {absent}, {self.mask}')}, 0"))
        self.write(plan.writes[0], LaneValue(found, np.dtype(np.uint32)), None)
        self.write(plan.writes[1], LaneValue(inside, np.dtype(bool)), None)

    def segments(self, plan: Plan) -> tuple[str, str, str, str]:
        """Returns the step, its part outside of the segment's bits, the last and the first lane of each lane's segment."""
        step = self.op("and", "i32", self.read(plan.reads[1]).name, splat("i32", 31))
        c = self.read(plan.reads[2]).name
        segment = self.op("and", "i32", self.op("lshr", "i32", c, splat("i32", 8)), splat("i32", 31))
        others = self.op("xor", "i32", segment, splat("i32", -1))
        first = self.op("and", "i32", LANES, segment)
        last = self.op("or", "i32", first, self.op("and", "i32", self.op("and", "i32", c, splat("i32", 31)), others))
        return step, self.op("and", "i32", step, others), last, first

    def vote(self, plan: Plan, i: PtxInstruction) -> None:
        """vote, for lanes that all name each other (`together`)."""
        mode = next(mod for mod in i.mods if mod in ("all", "any", "uni", "ballot"))
        holds = self.read(plan.reads[0]).name
        if not isinstance(i.operands[1], Reg | Imm):
            holds = self.op("xor", "i1", holds, splat("i1", "true"))
        ballot = self.add(f"and i32 {self.bits(holds)}, {self.mask}")
        if mode == "ballot":
            self.write(plan.writes[0], LaneValue(self.everywhere("i32", ballot), np.dtype(np.uint32)), None)
            return
        none, every = (self.add(f"icmp eq i32 {ballot}, {limit}") for limit in ("0", self.mask))
        bit = {"all": every, "any": self.add(f"xor i1 {none}, true"), "uni": self.add(f"or i1 {none}, {every}")}[mode]
        self.write(plan.writes[0], LaneValue(self.everywhere("i1", bit), np.dtype(bool)), None)

    def active_lanes(self, plan: Plan, i: PtxInstruction) -> None:
        if i.predicate is not None:
            raise NoCode
        self.write(plan.writes[0], LaneValue(self.everywhere("i32", self.mask), np.dtype(np.uint32)), None)

    def reduced(self, plan: Plan, i: PtxInstruction) -> None:
        """redux of integers, for lanes that all name each other."""
        name = next(mod for mod in i.mods if mod in REDUCED)
        x = self.read(plan.reads[0])
        if x.dtype.kind == "f" or "abs" in i.mods:
            raise NoCode
        how, neutral = REDUCED[name]
        if name in ("min", "max"):
            how = ("s" if x.dtype.kind == "i" else "u") + name
            info = np.iinfo(x.dtype)
            neutral = int(info.max if name == "min" else info.min)
        some = self.chosen(self.active, x.name, splat("i32", neutral), "i32")
        found = self.add(f"call i32 @llvm.vector.reduce.{how}.v{WARP}i32({vector('i32')} {some})")
        self.write(plan.writes[0], LaneValue(self.everywhere("i32", found), x.dtype), None)

    # -- memory ---------------------------------------------------------------------------------------------------------

    def access(self, plan: Plan, i: PtxInstruction) -> None:
        """Adds a load, store or atomic access."""
        try:
            space, type_, registers, base, offset = target(i)
        except Unsupported:
            raise NoCode from None
        if space == "param":
            self.parameter(plan, i, type_, registers, offset)
            return
        if space in ("const", "generic"):
            space = "global"
        if space not in ("global", "shared"):
            raise NoCode
        size = len(registers) * type_.bytes
        found = self.read(base)
        delta = splat(scalar(found.dtype), offset)
        address = self.resized(self.add(f"add {vector(found.dtype)} {found.name}, {delta}"), scalar(found.dtype), "i64", False)
        mask, here = self.predicate(i), self.mask
        if mask is not None:
            here = self.add(f"and i32 {self.bits(mask)}, {self.mask}")
        kind = "atom" if i.opcode in ("atom", "red") else i.opcode
        self.helpers.add(("access", space, kind, size))
        site = self.field("%sites", SITE_WORDS * len(self.sites))
        self.sites.append(i)
        lanes = vector("i64")
        answer = self.add(
            f"call {{i64, i32}} @{access_name(space, kind, size)}(ptr %launch, ptr {site}, ptr %w, i32 {here}, {lanes} {address})"
        )
        to, form = (self.add(f"extractvalue {{i64, i32}} {answer}, {k}") for k in range(2))
        self.fail_if(self.add(f"icmp slt i32 {form}, 0"))
        if kind == "atom":
            self.update(plan, i, type_, f"i64 {to}, i32 {here}, {lanes} {address}", mask)
            return
        pieces = plan.writes if i.opcode == "ld" else plan.reads[1:]
        for k, (register, arg) in enumerate(zip(registers, pieces, strict=True)):
            bits = f"i{type_.bits}"
            given = f"i64 {to}, i32 {form}, i32 {here}, {lanes} {address}, i64 {k * type_.bytes}, i64 {size}"
            self.helpers.add(("move", i.opcode, type_.bits))
            if i.opcode == "st":
                value = self.read(arg)
                self.say(f"call void @st_{bits}({given}, {vector(bits)} {self.raw(value)})")
            elif register != SINK:
                loaded = self.add(f"call {vector(bits)} @ld_{bits}({given})")
                wide = self.resized(loaded, bits, f"i{8 * arg.dtype.itemsize}", type_.kind == "s")
                self.write(arg, self.seen(wide, arg.dtype), mask)

    def parameter(self, plan: Plan, i: PtxInstruction, type_: PtxType, registers: tuple[Operand, ...], offset: int) -> None:
        """Adds a load of a parameter of the kernel at a fixed place."""
        memory = i.operands[1]
        if i.opcode != "ld" or not isinstance(memory, Mem) or not isinstance(memory.base, Sym) or type_.bytes > 8:
            raise NoCode
        mask = self.predicate(i)
        for k, (register, arg) in enumerate(zip(registers, plan.writes, strict=True)):
            if register == SINK:
                continue
            one = self.constant("parameter", (memory.base, offset + k * type_.bytes, type_.bytes, type_.kind == "s"))
            bits = f"i{8 * arg.dtype.itemsize}"
            if bits != "i64":
                one = self.add(f"trunc i64 {one} to {bits}")
            self.write(arg, self.seen(self.everywhere(bits, one), arg.dtype), mask)

    def update(self, plan: Plan, i: PtxInstruction, type_: PtxType, given: str, mask: str | None) -> None:
        """Adds an atomic access whose order among those of other lanes does not matter."""
        how = next((mod for mod in i.mods if mod in ATOMICS), "")
        used = bool(plan.writes) and plan.writes[0].operand != SINK and set(plan.written) & self.code.read_somewhere
        if not how or used or type_.bits < 32:
            raise NoCode
        if type_.kind == "f" and (how != "add" or not self.once(i)):
            raise NoCode
        bits = f"i{type_.bits}"
        self.helpers.add(("update", how, type_.name))
        value = self.raw(self.read(plan.reads[1]))
        odd = self.add(f"call i32 @update_{how}_{type_.name}({given}, {vector(bits)} {value})")
        self.add_to("%bad", odd, "or", "i32")

    def once(self, i: PtxInstruction) -> bool:
        """True if each lane makes this access at most once, and no other has an order that matters: lanes then come in theirs."""
        sums = [one for one in self.code.instructions if one.opcode in ("atom", "red") and one.types[-1].kind == "f"]
        at = self.code.instructions.index(i)
        return len(sums) == 1 and not any(first <= at <= last for first, last in self.code.loop_spans)

    # -- control --------------------------------------------------------------------------------------------------------

    def control(self, pc: int) -> None:
        plan, i = self.code.plans[pc], self.code.instructions[pc]
        control = plan.control
        taken, rest = self.mask, "0"
        if i.predicate is not None:
            register, negated = i.predicate
            holds = self.bits(self.read(Arg(register, np.dtype(bool))).name)
            if negated:
                holds = self.add(f"xor i32 {holds}, -1")
            taken = self.add(f"and i32 {holds}, {self.mask}")
            rest = self.add(f"xor i32 {taken}, {self.mask}")
            self.count("%offs", len(self.off), self.counted(rest))
            self.off.append(i)
        match control:
            case Branch(table="") as branch:
                self.branch(i, self.code.target(branch.target), pc + 1, taken, rest)
            case Exit(trap=False) | Return():
                self.leave(i, pc + 1, taken, rest)
            case WarpBarrier() if i.predicate is None:
                alive = self.add(f"trunc i64 {self.load('%w', WARP_STATE['alive'])} to i32")
                self.named(self.read(plan.reads[0]), self.add(f"xor i32 {self.mask}, {alive}"))
                self.say("call void @warp_met(ptr %w)")
                self.go(pc + 1)
            case Barrier(counted=False, waits=True, reduction="") if i.predicate is None and isinstance(plan.reads[0].operand, Imm):
                # All of the warp, as it was at its start: else NumPy says who waits for whom.
                alone = self.add(f"icmp eq i64 {self.load('%w', WARP_STATE['pending'])}, 0")
                lanes = self.add(f"trunc i64 {self.load('%w', WARP_STATE['whole'])} to i32")
                all_ = self.add(f"icmp eq i32 {self.mask}, {lanes}")
                apart = self.add(f"xor i1 {self.add(f'and i1 {alone}, {all_}')}, true")
                self.fail_if(apart)
                self.say(f"store i64 {plan.reads[0].operand.value + 1}, ptr {self.field('%w', WARP_STATE['barrier'])}")
                self.push(pc + 1, self.mask)
                self.say("br label %wait")
            case _:
                raise NoCode

    def push(self, pc: int, mask: str) -> None:
        """Makes lanes wait at an instruction, if there are any."""
        if pc not in self.number:
            raise NoCode
        self.say(f"call void @push(ptr %w, i64 {self.number[pc]}, i32 {mask})")

    def go(self, pc: int) -> None:
        """Goes on at an instruction, unless other lanes of the warp are somewhere else."""
        if pc not in self.number:
            raise NoCode
        apart, direct = self.label("apart"), f"block{self.number[pc]}"
        alone = self.add(f"icmp eq i64 {self.load('%w', WARP_STATE['pending'])}, 0")
        self.say(f"br i1 {alone}, label %{direct}, label %{apart}")
        self.begin(apart)
        self.push(pc, self.mask)
        self.say("br label %dispatch")

    def branch(self, i: PtxInstruction, there: int, here: int, taken: str, rest: str) -> None:
        if there not in self.number:
            raise NoCode
        if i.predicate is None:
            self.again(there, i)
            self.go(there)
            return
        if here not in self.number:
            raise NoCode
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
        self.push(there, taken)
        self.push(here, rest)
        self.say("br label %dispatch")

    def again(self, there: int, i: PtxInstruction) -> None:
        """Counts a step back: a launch that makes too many gives up."""
        if there <= self.code.instructions.index(i):
            place = self.field("%launch", LAUNCH["budget"])
            less = self.add(f"sub i64 {self.add(f'load i64, ptr {place}')}, 1")
            self.say(f"store i64 {less}, ptr {place}")
            self.fail_if(self.add(f"icmp slt i64 {less}, 0"))

    def leave(self, i: PtxInstruction, here: int, taken: str, rest: str) -> None:
        alive = self.field("%w", WARP_STATE["alive"])
        stay = self.add(f"xor i32 {taken}, -1")
        self.add_to(alive, self.add(f"zext i32 {stay} to i64"), "and")
        if i.predicate is not None:
            parted = self.add(f"icmp ne i32 {taken}, 0")
            both = self.add(f"and i1 {parted}, {self.add(f'icmp ne i32 {rest}, 0')}")
            self.count("%parted", len(self.parting), self.add(f"zext i1 {both} to i64"))
            self.parting.append(i)
            self.push(here, rest)
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
        return KernelShape(self.words, self.layout.size, places, len(self.doubted), blank)

    def text(self) -> str:
        cases = " ".join(f"i64 {k}, label %block{k}" for k in range(len(self.starts)))
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
  %exchanged = alloca {vector('i32')}, align 64
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
        return module(warp, self.helpers, self.row, self.shape)


LANES = f"<{', '.join(f'i32 {n}' for n in range(WARP))}>"
REDUCED = {"add": ("add", 0), "min": ("", 0), "max": ("", 0), "and": ("and", -1), "or": ("or", 0), "xor": ("xor", 0)}
OTHERS = {
    "cvta": KernelText.window,
    "shfl": KernelText.shuffle,
    "vote": KernelText.vote,
    "activemask": KernelText.active_lanes,
    "redux": KernelText.reduced,
}
