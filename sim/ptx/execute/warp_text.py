"""The text of a warp's registers and masks, on which the translations of instructions stand (`execute.translation`).

Registers are vectors of 32 lanes in memory between basic blocks, and LLVM's own values within one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..decode.code import Code
from ..decode.registry import WHOLE_WARP, Arg, Plan
from ..state.lane_sets import WARP
from ..text.syntax import SINK, Imm, PtxInstruction, Reg, Sym
from .halves import HalfArithmetic
from .registers import immediate
from .vectors import Halves, LaneValue, NoCode, scalar, splat, vector
from .warp_tables import WARP_STATE, ShadowRow

WIDTHS = {1: "i32", 16: "i16", 32: "i32", 64: "i64"}
"""Types of a register's rows for a lane, by width; predicates are one i32 for all lanes."""


class AccessSite(NamedTuple):
    """An access of an instruction: `kind` as the counters have it, bytes of each lane."""

    instruction: PtxInstruction
    space: str
    kind: str
    size: int


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


class WarpText(HalfArithmetic):
    """The text of a function that runs a warp: its registers, masks and counters. Raises `NoCode` for what has no translation.

    `constants` are what the launch gives, by place: parameters, addresses and sizes. `sites` are the accesses, `off` the
    instructions with counts of lanes that are off.
    """

    mask: str
    """The lanes that run, as i32; `active`: as a vector."""
    active: str
    moved: str
    """The lanes whose result is unwritten, as i64: they move a register that they never wrote."""

    def __init__(self, code: Code, row: ShadowRow):
        super().__init__()
        self.code, self.row, self.layout = code, row, RegisterLayout(code)
        self.constants: list[tuple[str, Any]] = []
        self.sites: list[AccessSite] = []
        self.off: list[PtxInstruction] = []
        self.helpers: set[tuple[object, ...]] = set()
        self.values: dict[tuple[int, int], str] = {}
        self.dirty: set[tuple[int, int]] = set()

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
        if arg.packed:
            raise NoCode
        element = scalar(dtype)
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

    def halves(self, arg: Arg) -> Halves:
        """Returns the two elements of a register with a packed pair."""
        whole = self.read(Arg(arg.operand, np.dtype(np.uint32))).name
        low = self.resized(whole, "i32", "i16", False)
        high = self.resized(self.op("lshr", "i32", whole, splat("i32", 16)), "i32", "i16", False)
        return self.seen(low, arg.dtype), self.seen(high, arg.dtype)

    def write_halves(self, arg: Arg, pair: Halves, mask: str | None) -> None:
        """Writes a packed pair to its register, where a mask holds."""
        low, high = (self.resized(self.raw(x), "i16", "i32", False) for x in pair)
        whole = self.op("or", "i32", low, self.op("shl", "i32", high, splat("i32", 16)))
        self.write(Arg(arg.operand, np.dtype(np.uint32)), LaneValue(whole, np.dtype(np.uint32)), mask)

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

    # -- masks ---

    def counted(self, mask: str) -> str:
        """Returns the number of lanes of a mask, as i64."""
        return self.add(f"zext i32 {self.add(f'call i32 @llvm.ctpop.i32(i32 {mask})')} to i64")

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
