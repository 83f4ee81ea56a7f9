"""The text of LLVM's functions that follow the accesses of a compiled launch: who touched which granule, which bytes are
written, which copies are under way.

Granules of tensors have rows with the tags of their last writer, reader and atomic access; those of shared memory have an array
for each, so that a warp looks at all of its granules at once. A function returns true if the launch shall give up: another
thread has touched a granule, of which one writes, with no barrier between; or nobody wrote a byte that is read.

The copies of a warp (cp.async) land when it waits. Until then they are in a ring of `COPY_SLOTS` records: their lanes, the
number of groups that the warp had closed, bytes of a lane, and their destinations.
"""

from __future__ import annotations

from string import Template

from ..state.lane_sets import WARP
from ..state.segments import IN_FLIGHT
from .vectors import Text, splat, vector
from .warp_text import (
    BLOCK_CROWD,
    BY,
    COLLECTIVE,
    CONFLICTS,
    COPY_ADDRESSES,
    COPY_SLOTS,
    COPY_WORDS,
    CROWDS,
    EPOCH,
    GRID_CROWD,
    KINDS,
    LAST_MEETING,
    LAUNCH,
    READ,
    THREAD_BITS,
    UPDATED,
    WARP_CROWD,
    WARP_STATE,
    WROTE,
    ShadowRow,
    steps,
)

# -- granules ----------------------------------------------------------------------------------------------------------------

EACH_BYTE = 0x0101010101010101

FOLLOWED_GLOBAL = Template("""
define internal i1 @follow_global_${KIND}_$SIZE(
  ptr %addresses, i32 %m, i64 %tag, i64 %crowd, i64 %number, i64 %shadow, i64 %origin, i64 %state
) noinline {
start:
  %nothing = icmp eq i64 %shadow, 0
  %nostates = icmp eq i64 %state, 0
  br label %lane
lane:
  %left = phi i32 [%m, %start], [%rest, %on]
  %over = icmp eq i32 %left, 0
  br i1 %over, label %fine, label %go
fine:
  ret i1 false
bad:
  ret i1 true
go:
  %l = call i32 @llvm.cttz.i32(i32 %left, i1 true)
  %less = sub i32 %left, 1
  %rest = and i32 %left, %less
  %l64 = zext i32 %l to i64
  %p = getelementptr i64, ptr %addresses, i64 %l64
  %a = load i64, ptr %p
  br i1 %nothing, label %shadowed, label %touch
touch:
  %mine = or i64 %tag, %l64
  %distance = sub i64 %a, %origin
  %granule = lshr i64 %distance, $GRANULE
  %byte = mul i64 %granule, $ROW_BYTES
  %row = add i64 %shadow, %byte
  br label %piece
piece:
  %k = phi i64 [0, %touch], [%k2, %kept]
  %skip = mul i64 %k, $ROW_BYTES
  %at = add i64 %row, %skip
  %r = inttoptr i64 %at to ptr
$TOUCH
kept:
  %k2 = add i64 %k, 1
  %last = icmp eq i64 %k2, $PIECES
  br i1 %last, label %shadowed, label %piece
shadowed:
  br i1 %nostates, label %on, label %stated
stated:
  %where = add i64 %a, %state
  %q = inttoptr i64 %where to ptr
$STATED
on:
  br label %lane
}
""")


def touched(kind: int, row: ShadowRow) -> str:
    """Returns the text that gives up if another thread has touched a granule, of which one writes, with no barrier between.

    It notes this thread. A reader's tag stands for the readers before it that nothing orders before it, as `order.detector` has it.
    """
    words = (WROTE, READ, UPDATED) if row.atomics else (WROTE, READ)
    lines = []
    for k in words:
        lines += [
            f"%p{k} = getelementptr i64, ptr %r, i64 {k}",
            f"%other{k} = load i64, ptr %p{k}",
            f"%differ{k} = xor i64 %other{k}, %mine",
            f"%fewer{k} = sub i64 %differ{k}, 1",
            f"%near{k} = icmp ult i64 %fewer{k}, {(1 << THREAD_BITS) - 1}",
            f"%far{k} = icmp uge i64 %differ{k}, {1 << 32}",
            f"%some{k} = icmp ne i64 %other{k}, 0",
            f"%either{k} = or i1 %near{k}, %far{k}",
            f"%apart{k} = and i1 %some{k}, %either{k}",
        ]
    clash = "false"
    for k in CONFLICTS[kind]:
        if k in words:
            lines.append(f"%clash{k} = or i1 {clash}, %apart{k}")
            clash = f"%clash{k}"
    if row.numbers:
        lines += [
            f"%b = getelementptr i64, ptr %r, i64 {BY}",
            f"%by = getelementptr i16, ptr %b, i64 {kind}",
            "%narrow = trunc i64 %number to i16",
        ]
    if row.ordered and kind == UPDATED:
        # Lanes come to one atomic in their order, and to different ones in an order that is NumPy's.
        lines += [
            "%before = load i16, ptr %by",
            "%another = icmp ne i16 %before, %narrow",
            f"%clash{kind} = and i1 %another, %apart{kind}",
            f"%disorder = or i1 {clash}, %clash{kind}",
        ]
        clash = "%disorder"
    lines += [f"br i1 {clash}, label %bad, label %note", "note:"]
    new = "%mine"
    if kind != WROTE:
        k = kind
        lines += [
            f"%samelane.bits = and i64 %differ{k}, {WARP_CROWD - 1}",
            "%samelane = icmp eq i64 %samelane.bits, 0",
            f"%samewarp.bits = and i64 %differ{k}, {WARP_CROWD - WARP}",
            "%samewarp = icmp eq i64 %samewarp.bits, 0",
            f"%inblock = select i1 %samewarp, i64 {WARP_CROWD}, i64 {BLOCK_CROWD}",
            "%beside = select i1 %samelane, i64 0, i64 %inblock",
            f"%sameblock = icmp ult i64 %differ{k}, {1 << 32}",
            f"%newcrowd = select i1 %sameblock, i64 %beside, i64 {GRID_CROWD}",
            f"%oldcrowd = and i64 %other{k}, {CROWDS}",
            "%bothcrowds = or i64 %newcrowd, %oldcrowd",
            f"%added = select i1 %apart{k}, i64 %bothcrowds, i64 0",
            "%with = or i64 %mine, %crowd",
            "%new = or i64 %with, %added",
        ]
        new = "%new"
    lines.append(f"store i64 {new}, ptr %p{kind}")
    if row.numbers:
        lines.append("store i16 %narrow, ptr %by")
    return "\n".join(f"  {line}" if not line.endswith(":") else line for line in [*lines, "br label %kept"])


def follow_global(kind: str, size: int, row: ShadowRow) -> str:
    """Returns the function that follows an access to a tensor, lane after lane."""
    bits, stated = 8 * size, list[str]()
    if kind != "st":
        stated += [
            f"  %s = load i{bits}, ptr %q, align 1",
            f"  %unwritten = icmp ne i{bits} %s, 0",
            "  br i1 %unwritten, label %bad, label %known",
            "known:",
        ]
    if kind != "ld":
        stated.append(f"  store i{bits} 0, ptr %q, align 1")
    stated.append("  br label %on")
    return FOLLOWED_GLOBAL.substitute(
        KIND=kind,
        SIZE=size,
        GRANULE=row.granule.bit_length() - 1,
        ROW_BYTES=8 * row.words,
        PIECES=max(1, size // row.granule),
        TOUCH=touched(KINDS[kind], row),
        STATED="\n".join(stated),
    )


class SharedOrder(Text):
    """The function that follows an access of `size` bytes a lane to shared memory. `rowly`: one lane lies behind the other."""

    def __init__(self, kind: str, size: int, rowly: bool, row: ShadowRow):
        super().__init__()
        self.kind, self.size, self.rowly = kind, size, rowly
        self.own, self.granule = KINDS[kind], row.shared_granule
        self.collective = kind in COLLECTIVE
        self.wrong = "zeroinitializer"
        kept = (WROTE, READ, UPDATED) if row.atomics else (WROTE, READ)
        self.words = [k for k in kept if k == self.own or k in CONFLICTS[self.own]]
        self.copies = row.copies

    def begin_all(self) -> None:
        """Adds the tags of the lanes, and the arrays of shared memory."""
        self.lanes = self.add(f"bitcast i32 %m to {vector('i1')}")
        self.tags = self.op("or", "i32", self.everywhere("i32", "%tag"), steps("i32", 1))
        self.crowds = self.everywhere("i32", "%crowd")
        names = {WROTE: "written", READ: "read", UPDATED: "updated"}
        self.arrays = {k: self.pointer(names[k]) for k in self.words}
        shift = self.granule.bit_length() - 1
        self.granules = self.op("lshr", "i64", "%addresses", splat("i64", shift))
        self.first = self.add(f"ashr i64 %row, {shift}")
        self.states = self.pointer("states")

    def text(self) -> str:
        self.begin_all()
        for piece in range(max(1, self.size // self.granule)):
            self.touch(piece)
        width = min(self.size, 8)
        for piece in range(self.size // width):
            self.written(piece * width, width)
        bits = self.bits(self.op("and", "i1", self.wrong, self.lanes))
        body = "\n".join([*self.lines, f"  %wrong = icmp ne i32 {bits}, 0"])
        form = "row" if self.rowly else "strewn"
        return f"""
define internal i1 @follow_shared_{self.kind}_{self.size}_{form}(
  ptr noalias %launch, i32 %m, i32 %tag, i32 %crowd, i64 %row, {vector("i64")} %addresses
) noinline {{
{body}
  ret i1 %wrong
}}
"""

    def landed(self) -> str:
        """Returns the function that makes lanes write what they have copied, at this moment."""
        self.begin_all()
        for piece in range(max(1, self.size // self.granule)):
            self.put(self.tags, self.place(self.arrays[WROTE], "i32", self.first, self.granules, piece, False), 32, 4, False)
        for start in range(0, self.size, 8):
            width = min(self.size, 8)
            bytes_ = self.place(self.states, "i8", "%row", "%addresses", start, False)
            self.put("zeroinitializer", bytes_, 8 * width, 1, False)
        body = "\n".join(self.lines)
        return f"""
define internal void @landed_{self.size}(ptr noalias %launch, i32 %m, i32 %tag, {vector("i64")} %addresses) noinline {{
  %crowd = add i32 0, 0
  %row = add i64 0, 0
{body}
  ret void
}}
"""

    def pointer(self, name: str) -> str:
        return self.add(f"load ptr, ptr {self.field('%launch', LAUNCH[name])}")

    def place(self, array: str, element: str, row: str, index: str, piece: int, rowly: bool) -> str:
        """Returns the place of the first lane in an array, or each lane's."""
        if rowly:
            return self.add(f"getelementptr {element}, ptr {array}, i64 {row}")
        places = self.op("add", "i64", index, splat("i64", piece))
        return self.add(f"getelementptr {element}, ptr {array}, {vector('i64')} {places}")

    def get(self, place: str, bits: int, align: int, rowly: bool) -> str:
        of, rest = vector(f"i{bits}"), f"i32 {align}, {vector('i1')} {self.lanes}"
        how = f"load.v{WARP}i{bits}.p0(ptr" if rowly else f"gather.v{WARP}i{bits}.v{WARP}p0({vector('ptr')}"
        return self.add(f"call {of} @llvm.masked.{how} {place}, {rest}, {of} zeroinitializer)")

    def put(self, value: str, place: str, bits: int, align: int, rowly: bool) -> None:
        of, rest = vector(f"i{bits}"), f"i32 {align}, {vector('i1')} {self.lanes}"
        how = f"store.v{WARP}i{bits}.p0" if rowly else f"scatter.v{WARP}i{bits}.v{WARP}p0"
        self.say(f"call void @llvm.masked.{how}({of} {value}, {'ptr' if rowly else vector('ptr')} {place}, {rest})")

    def touch(self, piece: int) -> None:
        """Looks who has touched a granule of each lane, and notes the lanes."""
        rowly = self.rowly and self.size <= self.granule
        places = {k: self.place(self.arrays[k], "i32", self.first, self.granules, piece, rowly) for k in self.words}
        others = {k: TagFacts(self, self.get(place, 32, 4, rowly)) for k, place in places.items()}
        for k in CONFLICTS[self.own]:
            if k in others:
                self.wrong = self.op("or", "i1", self.wrong, others[k].clashes())
        if self.own == WROTE:
            new = self.op("or", "i32", self.tags, self.crowds) if self.collective else self.tags
        else:
            new = others[self.own].joined(self.crowds)
        self.put(new, places[self.own], 32, 4, rowly)

    def written(self, start: int, width: int) -> None:
        """Looks whether some bytes of each lane are written, or notes that they are."""
        bits, rowly = 8 * width, self.rowly and self.size == width
        place = self.place(self.states, "i8", "%row", "%addresses", start, rowly)
        reads, writes = self.own != WROTE, self.own != READ
        if reads or self.copies:
            found = self.get(place, bits, 1, rowly)
            if not reads:
                found = self.op("and", f"i{bits}", found, splat(f"i{bits}", IN_FLIGHT * EACH_BYTE & (1 << bits) - 1))
            bad = self.test("ne", f"i{bits}", found, "zeroinitializer")
            self.wrong = self.op("or", "i1", self.wrong, bad)
        if writes:
            new = IN_FLIGHT * EACH_BYTE & (1 << bits) - 1 if self.kind == "cp.async" else 0
            self.put(splat(f"i{bits}", new), place, bits, 1, rowly)


class TagFacts:
    """The earlier tags of a warp's granules beside its own: of this epoch of the block, of the warp, ordered by a barrier of the
    warp between; and whether they stand for others of the warp or of the block, too.
    """

    def __init__(self, text: SharedOrder, other: str):
        self.text = text
        differ = text.op("xor", "i32", other, text.tags)
        self.now = text.test("ult", "i32", differ, splat("i32", 1 << EPOCH))
        thread, met, crowd, block = (
            text.test("ne", "i32", text.op("and", "i32", x, splat("i32", mask)), "zeroinitializer")
            for x, mask in ((differ, WARP_CROWD - 1), (differ, LAST_MEETING), (other, WARP_CROWD), (other, BLOCK_CROWD))
        )
        warps = text.op("and", "i32", differ, splat("i32", WARP_CROWD - WARP))
        self.warp = text.test("eq", "i32", warps, "zeroinitializer")
        ordered = text.op("and", "i1", self.warp, met)
        unordered = text.negated(ordered)
        others = splat("i1", "true") if text.collective else text.op("or", "i1", thread, crowd)
        self.beside = text.op("and", "i1", others, unordered)
        self.block = block

    def clashes(self) -> str:
        """Returns a mask of the lanes that are not ordered behind all threads of a tag."""
        return self.text.op("and", "i1", self.text.op("or", "i1", self.beside, self.block), self.now)

    def joined(self, crowds: str) -> str:
        """Returns tags that stand for the warp's lanes and for the threads before, as far as nothing orders these."""
        text = self.text
        elsewhere = text.negated(self.warp)
        block = text.op("and", "i1", text.op("or", "i1", elsewhere, self.block), self.now)
        warp = text.op("and", "i1", text.op("and", "i1", self.beside, self.warp), self.now)
        new = text.op("or", "i32", text.tags, crowds)
        for mask, crowd in ((block, BLOCK_CROWD), (warp, WARP_CROWD)):
            new = text.op("or", "i32", new, text.chosen(mask, splat("i32", crowd), "zeroinitializer", "i32"))
        return new


# -- copies in flight --------------------------------------------------------------------------------------------------------

COPY = Template("""
@nothing.$SIZE = internal constant [$SIZE x i8] zeroinitializer, align 16

define internal i1 @copy_$SIZE(
  ptr noalias %w, i32 %m, i32 %whole, i64 %target, <32 x i64> %to, i64 %origin, <32 x i64> %from
) noinline {
start:
  %none = icmp eq i32 %m, 0
  br i1 %none, label %end, label %some
some:
  %p.head = getelementptr i64, ptr %w, i64 $HEAD
  %head = load i64, ptr %p.head
  %p.tail = getelementptr i64, ptr %w, i64 $TAIL
  %tail = load i64, ptr %p.tail
  %held = sub i64 %tail, %head
  %full = icmp uge i64 %held, $SLOTS
  br i1 %full, label %fail, label %record
fail:
  ret i1 true
end:
  ret i1 false
record:
  %next = add i64 %tail, 1
  store i64 %next, ptr %p.tail
  %p.copies = getelementptr i64, ptr %w, i64 $COPIES
  %copies = load ptr, ptr %p.copies
  %slot = and i64 %tail, $LAST_SLOT
  %skip = mul i64 %slot, $WORDS
  %one = getelementptr i64, ptr %copies, i64 %skip
  %m64 = zext i32 %m to i64
  store i64 %m64, ptr %one
  %p.committed = getelementptr i64, ptr %w, i64 $COMMITTED
  %group = load i64, ptr %p.committed
  %p.group = getelementptr i64, ptr %one, i64 1
  store i64 %group, ptr %p.group
  %p.size = getelementptr i64, ptr %one, i64 2
  store i64 $SIZE, ptr %p.size
  %places = getelementptr i64, ptr %one, i64 $ADDRESSES
  store <32 x i64> %to, ptr %places, align 64
  %sources = alloca <32 x i64>, align 64
  store <32 x i64> %from, ptr %sources, align 64
  br label %lane
lane:
  %left = phi i32 [%m, %record], [%rest, %go]
  %over = icmp eq i32 %left, 0
  br i1 %over, label %end, label %go
go:
  %l = call i32 @llvm.cttz.i32(i32 %left, i1 true)
  %less = sub i32 %left, 1
  %rest = and i32 %left, %less
  %bit = shl i32 1, %l
  %mine = and i32 %bit, %whole
  %there = icmp ne i32 %mine, 0
  %pa = getelementptr i64, ptr %sources, i32 %l
  %a = load i64, ptr %pa
  %ha = add i64 %a, %origin
  %pb = getelementptr i64, ptr %places, i32 %l
  %b = load i64, ptr %pb
  %hb = add i64 %b, %target
  %zeros = ptrtoint ptr @nothing.$SIZE to i64
  %hs = select i1 %there, i64 %ha, i64 %zeros
  %q = inttoptr i64 %hs to ptr
  %x = load i$BITS, ptr %q, align 1
  %r = inttoptr i64 %hb to ptr
  store i$BITS %x, ptr %r, align 1
  br label %lane
}
""")

LAND = Template("""
define internal void @land(ptr noalias %launch, ptr noalias %w, i64 %newest) noinline {
start:
  %p.head = getelementptr i64, ptr %w, i64 $HEAD
  %p.tail = getelementptr i64, ptr %w, i64 $TAIL
  %tail = load i64, ptr %p.tail
  %p.committed = getelementptr i64, ptr %w, i64 $COMMITTED
  %committed = load i64, ptr %p.committed
  %limit = sub i64 %committed, %newest
  %p.copies = getelementptr i64, ptr %w, i64 $COPIES
  %copies = load ptr, ptr %p.copies
  %p.tag = getelementptr i64, ptr %w, i64 $TAG
  %tag64 = load i64, ptr %p.tag
  %tag = trunc i64 %tag64 to i32
  %first = load i64, ptr %p.head
  br label %look
look:
  %head = phi i64 [%first, %start], [%next, %landed]
  %empty = icmp eq i64 %head, %tail
  br i1 %empty, label %end, label %one
one:
  %slot = and i64 %head, $LAST_SLOT
  %skip = mul i64 %slot, $WORDS
  %at = getelementptr i64, ptr %copies, i64 %skip
  %p.group = getelementptr i64, ptr %at, i64 1
  %group = load i64, ptr %p.group
  %due = icmp slt i64 %group, %limit
  br i1 %due, label %lands, label %end
end:
  store i64 %head, ptr %p.head
  ret void
lands:
  %m64 = load i64, ptr %at
  %m = trunc i64 %m64 to i32
  %p.size = getelementptr i64, ptr %at, i64 2
  %size = load i64, ptr %p.size
  %places = getelementptr i64, ptr %at, i64 $ADDRESSES
  %addresses = load <32 x i64>, ptr %places, align 64
  switch i64 %size, label %bytes4 [i64 8, label %bytes8 i64 16, label %bytes16]
bytes4:
  call void @landed_4(ptr %launch, i32 %m, i32 %tag, <32 x i64> %addresses)
  br label %landed
bytes8:
  call void @landed_8(ptr %launch, i32 %m, i32 %tag, <32 x i64> %addresses)
  br label %landed
bytes16:
  call void @landed_16(ptr %launch, i32 %m, i32 %tag, <32 x i64> %addresses)
  br label %landed
landed:
  %next = add i64 %head, 1
  br label %look
}
""")


def places() -> dict[str, int]:
    return {
        **{name.upper(): place for name, place in WARP_STATE.items()},
        "SLOTS": COPY_SLOTS,
        "LAST_SLOT": COPY_SLOTS - 1,
        "WORDS": COPY_WORDS,
        "ADDRESSES": COPY_ADDRESSES,
    }


def copy(size: int) -> str:
    """Returns the function that copies so many bytes a lane, and zeros for those that have none; true if no record is free."""
    return COPY.substitute(places(), SIZE=size, BITS=8 * size)


def land() -> str:
    """Returns the function that lands a warp's copies but those of its newest groups."""
    return LAND.substitute(places())
