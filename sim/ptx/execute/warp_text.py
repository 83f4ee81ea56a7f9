"""A warp in compiled code: the tables that a compiled launch and its functions share (places, tags, forms of accesses), and the
text of the warp's registers and masks, on which the translations of instructions stand (`execute.translation`).

Registers are vectors of 32 lanes in memory between basic blocks, and LLVM's own values within one. Arithmetic on float16 and
bfloat16 is as `decode.primitives` has it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..decode.code import Code
from ..decode.registry import WHOLE_WARP, Arg, Plan
from ..order.shadow import WIDEST
from ..state.lane_sets import WARP
from ..text.syntax import SINK, Imm, PtxInstruction, Reg, Sym
from .registers import immediate
from .vectors import OWN, Arithmetic, Halves, LaneValue, NoCode, scalar, splat, vector

# -- tables ------------------------------------------------------------------------------------------------------------------

LAUNCH = {
    name: place
    for place, name in enumerate(
        (
            *("budget", "regions", "offs", "parted", "sites", "constants"),
            *("registers", "warps_memory", "template", "warps", "alive"),
            *("grid_x", "grid_y", "shared", "shared_bytes", "states", "written", "read", "updated", "granules"),
            *("segments", "segment_count", "barriers", "exp2", "log2", "copies"),
            *("votes", "threads", "local"),
        )
    )
}
"""Places in the table of a launch."""

WARP_STATE = {
    name: place
    for place, name in enumerate(
        (
            *("alive", "pending", "tag", "global_tag", "barrier", "whole"),
            *("copies", "head", "tail", "committed"),
            *("local", "vote", "bitmap"),
        )
    )
}
"""Places in the memory of a warp: its living lanes, how many groups wait, tags, the number of its barrier and 1, the lanes that it
began with; its records of asynchronous copies, the numbers of the oldest one and of the next, the groups that it has closed; its
local memory; the number of lanes that hold at a barrier that reduces; then bits of the blocks at which groups wait, and their
lanes, one number a block.
"""

REDUCED_BARRIER = 1 << 8
"""A barrier that reduces has its number and this."""

COPY_SLOTS, COPY_WORDS, COPY_ADDRESSES = 256, 40, 8
"""Asynchronous copies of a warp that may be pending at once, a power of two; numbers of a record, the first of its addresses."""

SEGMENT_WORDS = 8
"""A segment: start, bytes, distance to host memory, distance to the states of its bytes (0: none), shadow (0: nobody writes there),
address of the shadow's granule 0, number, whether it may be written.
"""

SITE_WORDS = 64
"""An access: segment, counts, start and end in shared memory, the instruction's number; then the last addresses without a pattern:
their mask, place in a sector, sectors, different addresses, wavefronts, those without conflicts; then the addresses.
"""
SITE = {name: place for place, name in enumerate(("segment", "counts", "low", "high", "number"))}
KNOWN = 8
DISTANCES = 16

COUNTS = 4
"""Counts of a segment at a site: requests, lanes, sectors and different addresses; of shared memory requests, lanes, wavefronts and
those without bank conflicts."""

WROTE, READ, UPDATED, BY = range(4)
"""Words of a granule's row in the shadow: the last writer, reader and atomic access as tags, and 16 bits for the number of the
instruction of each of them. A tag is block + 1, epoch of the block (the number of its barriers), crowd and thread. The last two
words are there only if something needs them.
"""
KINDS = {"ld": READ, "ldmatrix": READ, "st": WROTE, "stmatrix": WROTE, "cp.async": WROTE, "atom": UPDATED}
CONFLICTS = {READ: (WROTE, UPDATED), WROTE: (WROTE, READ, UPDATED), UPDATED: (WROTE, READ)}
"""The accesses that an access must be ordered behind, by kind."""

COLLECTIVE = ("ldmatrix", "stmatrix")
"""Accesses for all lanes of a warp together."""

THREAD_BITS, EPOCH_BITS = 12, 20
"""A tag's lower bits; the topmost of THREAD_BITS are crowds."""
WARP_CROWD, BLOCK_CROWD, GRID_CROWD = 1 << 10, 1 << 11, -(1 << 63)
"""Other lanes that a reader's tag stands for: of its warp, of its block, or of other blocks."""
CROWDS = GRID_CROWD | BLOCK_CROWD | WARP_CROWD

MEETING, EPOCH = 12, 18
"""The first bit of a tag in shared memory that counts barriers of the warp, and the first that counts those of the block."""
LAST_MEETING = ((1 << (EPOCH - MEETING)) - 1) << MEETING

NOBODY, ROW, ONE, STREWN = range(4)
"""Forms of an access: no lane, one lane behind the other, one address, any. Negative: it gave up."""

ATOMICS = frozenset({"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"})


class ShadowRow(NamedTuple):
    """The shadow of a kernel: bytes of a granule of global and of shared memory; its parts that are kept."""

    granule: int
    shared_granule: int
    atomics: bool
    numbers: bool
    copies: bool
    """Bytes may be in flight."""
    ordered: bool
    """The order of atomics matters."""

    @classmethod
    def of(cls, code: Code, numbers: bool) -> ShadowRow:
        """`numbers`: the launch is one of a history, in which later ones ask for the instructions."""
        sharing = code.sharing
        copies = any(i.opcode == "cp" for i in code.instructions)
        # Nobody asks for the granules of what is only read, unless other launches may write it.
        widths = (width for place, width in sharing.global_granules.items() if numbers or place == "*" or sharing.writes(place))
        ordered = bool(code.ordered)
        return cls(min([WIDEST, *widths]), sharing.shared_granule, sharing.atomics, numbers or ordered, copies, ordered)

    @property
    def words(self) -> int:
        return 4 if self.atomics or self.numbers else 2


def access_name(space: str, kind: str, size: int) -> str:
    return f"access_{space}_{kind}_{size}"


def steps(element: str, step: int) -> str:
    """Returns a constant with a multiple of `step` for each lane."""
    return f"<{', '.join(f'{element} {step * n}' for n in range(WARP))}>"


# -- arithmetic with halves --------------------------------------------------------------------------------------------------


class HalfArithmetic(Arithmetic):
    """Arithmetic with halves, which are widened to float32, or to float64 where that rounds to odd, and then narrowed."""

    def bfloat_value(self, a: LaneValue) -> LaneValue:
        wide = self.op("shl", "i32", self.resized(a.name, "i16", "i32", False), splat("i32", 16))
        return self.noted(self.seen(wide, np.dtype(np.float32)))

    def noted(self, x: LaneValue) -> LaneValue:
        """Notes a value that may be NaN."""
        return LaneValue(self.result(x.name, x.dtype), x.dtype)

    def narrowed(self, x: LaneValue) -> LaneValue:
        """Returns a float64 as float32, rounded to odd, which can be rounded once more."""
        if x.dtype.itemsize != 8:
            return x
        near = self.cast(x, np.dtype(np.float32))
        wide = self.add(f"fpext {vector('float')} {near.name} to {vector('double')}")
        size, other = (self.add(f"call {vector('double')} @llvm.fabs.v{WARP}f64({vector('double')} {v})") for v in (x.name, wide))
        more, inexact = self.test("ogt", "double", size, other), self.test("one", "double", x.name, wide)
        found = self.seen(self.odd(self.raw(near), "i32", more, inexact), near.dtype)
        # Beyond float32's range the nearest number is none.
        self.flagged(self.negated(self.ordinary(wide)))
        self.doubtful.pop(near.name, None)
        return found

    def odd(self, bits: str, element: str, more: str, inexact: str) -> str:
        """Returns bits of numbers nearest to a value as those of the odd one of its two neighbours; `more`: it is larger."""
        even = self.test("eq", element, self.op("and", element, bits, splat(element, 1)), "zeroinitializer")
        step = self.chosen(more, splat(element, 1), splat(element, -1), element)
        moved = self.op("and", "i1", even, inexact)
        return self.op("add", element, bits, self.chosen(moved, step, "zeroinitializer", element))

    def fused_odd(self, a: LaneValue, b: LaneValue, c: LaneValue) -> LaneValue:
        """Returns a * b + c of halves as float64, rounded to odd."""
        wide = np.dtype(np.float64)
        x, y, z = (self.cast(v, wide) for v in (a, b, c))
        product = self.op("fmul", "double", x.name, y.name)
        total, rest = self.two_parts(product, z.name)
        for v in (x, y, z):
            self.doubtful.pop(v.name, None)
        self.flagged(self.negated(self.ordinary(total)))
        raw = self.add(f"bitcast {vector('double')} {total} to {vector('i64')}")
        other = self.add(f"bitcast {vector('double')} {rest} to {vector('i64')}")
        more = self.test("sge", "i64", self.op("xor", "i64", raw, other), "zeroinitializer")
        return self.seen(self.odd(raw, "i64", more, self.test("one", "double", rest, "zeroinitializer")), wide)

    def f16_bits(self, x: LaneValue, rounding: str) -> LaneValue:
        if rounding != "rn":
            raise NoCode
        return self.cast(self.narrowed(x), np.dtype(np.float16))

    def bf16_bits(self, x: LaneValue, rounding: str) -> LaneValue:
        x = self.narrowed(x)
        if rounding != "rn" or x.dtype != np.dtype(np.float32):
            raise NoCode
        self.flagged(self.test("uno", "float", x.name, x.name))
        self.doubtful.pop(x.name, None)
        bits = self.raw(x)
        last = self.op("and", "i32", self.op("lshr", "i32", bits, splat("i32", 16)), splat("i32", 1))
        up = self.op("add", "i32", bits, self.op("add", "i32", last, splat("i32", 0x7FFF)))
        return LaneValue(self.resized(self.op("lshr", "i32", up, splat("i32", 16)), "i32", "i16", False), np.dtype(np.uint16))

    def flushed_half(self, x: LaneValue, element: str) -> LaneValue:
        if x.dtype.itemsize == 8:
            raise NoCode
        kind = scalar(x.dtype)
        size = self.add(f"call {vector(kind)} @llvm.fabs.v{WARP}f32({vector(kind)} {x.name})")
        small = self.test("olt", kind, size, splat(kind, self.literal(2.0**-14 if element == "f16" else 2.0**-126, x.dtype)))
        zero = self.seen(self.op("and", "i32", self.raw(x), splat("i32", -(1 << 31))), x.dtype)
        return LaneValue(self.result(self.chosen(small, zero.name, x.name, kind), x.dtype, x.name), x.dtype)


OWN |= {name: getattr(HalfArithmetic, name) for name in ("bfloat_value", "fused_odd", "f16_bits", "bf16_bits")}
OWN["flushed"] = HalfArithmetic.flushed_half


# -- registers and masks -----------------------------------------------------------------------------------------------------

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
        self.local_bytes = -(-code.local.size // 32) * 32
        """Bytes of a lane's local memory; lanes lie one behind the other."""
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
        """Returns the two elements of a register with a packed pair of halves."""
        if arg.dtype.itemsize != 2:
            raise NoCode
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
        self.add_to("%bad", self.running(mask), "or", "i32")

    def needs(self, helper: str) -> None:
        self.helpers.add((helper,))

    # -- masks ---

    def counted(self, mask: str) -> str:
        """Returns the number of lanes of a mask, as i64."""
        return self.add(f"zext i32 {self.add(f'call i32 @llvm.ctpop.i32(i32 {mask})')} to i64")

    def holding(self, i: PtxInstruction) -> str | None:
        """Returns the mask of an instruction's predicate; None: it has none."""
        if i.predicate is None:
            return None
        register, negated = i.predicate
        holds = self.read(Arg(register, np.dtype(bool))).name
        return self.negated(holds) if negated else holds

    def running(self, mask: str | None) -> str:
        """Returns the lanes, as i32, that run an instruction with this predicate."""
        return self.mask if mask is None else self.add(f"and i32 {self.bits(mask)}, {self.mask}")

    def predicate(self, i: PtxInstruction) -> str | None:
        """Returns the mask of an instruction's predicate, and counts the lanes that are off; None: it has none."""
        holds = self.holding(i)
        if holds is None:
            return None
        off = self.add(f"xor i32 {self.bits(holds)}, -1")
        rest = self.add(f"and i32 {self.mask}, {off}")
        self.count("%offs", len(self.off), self.counted(rest))
        self.off.append(i)
        return holds

    def together(self, plan: Plan) -> None:
        """Gives up unless all lanes are there that a warp-wide instruction names, and each is named."""
        if plan.instruction.predicate is not None:
            raise NoCode
        if plan.collective == WHOLE_WARP:  # without lanes that have exited its result is undefined, which is a finding
            self.fail_if(self.add(f"icmp ne i32 {self.mask}, -1"))
            return
        alive = self.add(f"trunc i64 {self.load('%w', WARP_STATE['alive'])} to i32")
        absent = self.add(f"xor i32 {self.mask}, {alive}")
        assert plan.collective is not None
        self.named(self.read(plan.reads[plan.collective]), absent)

    def named(self, member: LaneValue, absent: str) -> None:
        """Gives up unless the lanes name each other and none of those that are absent."""
        others = self.op("and", "i32", member.name, self.everywhere("i32", absent))
        here = self.everywhere("i32", self.mask)
        unnamed = self.op("and", "i32", self.op("xor", "i32", member.name, splat("i32", -1)), here)
        wrong = self.test("ne", "i32", self.op("or", "i32", others, unnamed), "zeroinitializer")
        self.fail_for(self.running(wrong))

    def fail_for(self, lanes: str) -> None:
        """Gives up if there are any lanes in a mask, as i32."""
        self.fail_if(self.add(f"icmp ne i32 {lanes}, 0"))

    def fail_if(self, bit: str) -> None:
        go = self.label("fine")
        self.say(f"br i1 {bit}, label %fail, label %{go}")
        self.begin(go)
