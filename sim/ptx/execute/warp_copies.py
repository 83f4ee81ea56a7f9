"""The text of LLVM's functions for cp.async: copies of a warp's lanes, and their landing when the warp waits.

The copies of a warp wait in a ring of `COPY_SLOTS` records: their lanes, the number of groups that the warp had closed, bytes of a
lane, and their destinations.
"""

from __future__ import annotations

from string import Template

from ..state.lane_sets import WARP
from .warp_tables import COPY_ADDRESSES, COPY_SLOTS, COPY_WORDS, WARP_STATE

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


MATRIX = Template("""
define internal <32 x i32> @rows(i64 %host, ptr %places) alwaysinline {
start:
$LOADS
  %words = bitcast <64 x i16> $LAST to <32 x i32>
  ret <32 x i32> %words
}

define internal <32 x i32> @matrix(i64 %host, ptr %places) noinline {
start:
  %words = call <32 x i32> @rows(i64 %host, ptr %places)
  ret <32 x i32> %words
}

define internal <32 x i32> @matrix_turned(i64 %host, ptr %places) noinline {
start:
  %words = call <32 x i32> @rows(i64 %host, ptr %places)
  %halves = bitcast <32 x i32> %words to <64 x i16>
  %turned = shufflevector <64 x i16> %halves, <64 x i16> poison, <64 x i32> $COLUMNS
  %out = bitcast <64 x i16> %turned to <32 x i32>
  ret <32 x i32> %out
}
""")


def matrix() -> str:
    """Returns the functions that load a matrix of eight rows of eight halves: a lane's word, and a lane's word of the transpose."""
    lines = []
    for k in range(8):
        lines += [
            f"  %p{k} = getelementptr i64, ptr %places, i64 {k}",
            f"  %a{k} = load i64, ptr %p{k}",
            f"  %h{k} = add i64 %a{k}, %host",
            f"  %q{k} = inttoptr i64 %h{k} to ptr",
            f"  %r{k} = load <8 x i16>, ptr %q{k}, align 1",
        ]
    names, width = [f"%r{k}" for k in range(8)], 8
    while len(names) > 1:
        listed = ", ".join(f"i32 {n}" for n in range(2 * width))
        for k in range(len(names) // 2):
            a, b = names[2 * k : 2 * k + 2]
            of = f"<{width} x i16>"
            lines.append(f"  %s{width}.{k} = shufflevector {of} {a}, {of} {b}, <{2 * width} x i32> <{listed}>")
        names = [f"%s{width}.{k}" for k in range(len(names) // 2)]
        width *= 2
    columns = ", ".join(f"i32 {8 * row + column}" for column in range(8) for row in range(8))
    assert width == 2 * WARP
    return MATRIX.substitute(LOADS="\n".join(lines), LAST=names[0], COLUMNS=f"<{columns}>")
