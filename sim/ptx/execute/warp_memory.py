"""The text of LLVM's functions that every compiled kernel calls: accesses to memory, groups of a warp's lanes, the run of blocks.

An access of a warp (`access`) looks where its lanes' addresses lie, counts what `state.counters` counts, and follows who has touched
which granule and which bytes are written. It gives up, with a negative form, at anything else than a plain access without fault.
"""

from __future__ import annotations

from collections.abc import Iterable
from string import Template
from typing import NamedTuple

from ..decode.code import Code
from ..order.shadow import WIDEST
from ..state.lane_sets import WARP, bank_columns

LAUNCH = {
    name: place
    for place, name in enumerate(
        (
            *("budget", "regions", "offs", "parted", "sites", "constants"),
            *("registers", "warps_memory", "template", "warps", "alive"),
            *("grid_x", "grid_y", "shared", "shared_bytes", "states", "written", "read", "updated", "granules"),
            *("segments", "segment_count", "barriers", "exp2"),
        )
    )
}
"""Places in the table of a launch."""

WARP_STATE = {name: place for place, name in enumerate(("alive", "pending", "tag", "global_tag", "barrier", "whole", "bitmap"))}
"""Places in the memory of a warp: its living lanes, how many groups wait, tags, the number of its barrier and 1, the lanes that it
began with; then bits of the blocks at which groups wait, and their lanes, one number a block.
"""

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
KINDS = {"ld": READ, "st": WROTE, "atom": UPDATED}
CONFLICTS = {READ: (WROTE, UPDATED), WROTE: (WROTE, READ, UPDATED), UPDATED: (WROTE, READ)}
"""The accesses that an access must be ordered behind, by kind."""

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

ATOMICS = {"add": "add", "min": "min", "max": "max", "and": "and", "or": "or", "xor": "xor"}


class ShadowRow(NamedTuple):
    """The shadow of a kernel: bytes of a granule of global and of shared memory; its parts that are kept."""

    granule: int
    shared_granule: int
    atomics: bool
    numbers: bool

    @classmethod
    def of(cls, code: Code, numbers: bool) -> ShadowRow:
        """`numbers`: the launch is one of a history, in which later ones ask for the instructions."""
        sharing = code.sharing
        return cls(min([WIDEST, *sharing.global_granules.values()]), sharing.shared_granule, sharing.atomics, numbers)

    @property
    def words(self) -> int:
        return 4 if self.atomics or self.numbers else 2


def access_name(space: str, kind: str, size: int) -> str:
    return f"access_{space}_{kind}_{size}"


def steps(element: str, step: int) -> str:
    """Returns a constant with a multiple of `step` for each lane."""
    return f"<{', '.join(f'{element} {step * n}' for n in range(WARP))}>"


GROUPS = Template("""
define internal void @push(ptr noalias %w, i64 %block, i32 %lanes) alwaysinline {
start:
  %none = icmp eq i32 %lanes, 0
  br i1 %none, label %end, label %some
some:
  %new = zext i32 %lanes to i64
  %k = add i64 %block, $LANES
  %at = getelementptr i64, ptr %w, i64 %k
  %old = load i64, ptr %at
  %both = or i64 %old, %new
  store i64 %both, ptr %at
  %fresh = icmp eq i64 %old, 0
  br i1 %fresh, label %first, label %end
first:
  %pend = getelementptr i64, ptr %w, i64 $PENDING
  %count = load i64, ptr %pend
  %more = add i64 %count, 1
  store i64 %more, ptr %pend
  %word = lshr i64 %block, 6
  %j = add i64 %word, $BITMAP
  %place = getelementptr i64, ptr %w, i64 %j
  %bits = load i64, ptr %place
  %low = and i64 %block, 63
  %bit = shl i64 1, %low
  %set = or i64 %bits, %bit
  store i64 %set, ptr %place
  br label %end
end:
  ret void
}

define internal {i64, i32} @pop(ptr noalias %w) noinline {
start:
  br label %look
look:
  %k = phi i64 [0, %start], [%next, %on]
  %j = add i64 %k, $BITMAP
  %place = getelementptr i64, ptr %w, i64 %j
  %bits = load i64, ptr %place
  %none = icmp eq i64 %bits, 0
  br i1 %none, label %on, label %found
on:
  %next = add i64 %k, 1
  %over = icmp uge i64 %next, $WORDS
  br i1 %over, label %empty, label %look
empty:
  ret {i64, i32} {i64 -1, i32 0}
found:
  %low = call i64 @llvm.cttz.i64(i64 %bits, i1 true)
  %less = sub i64 %bits, 1
  %rest = and i64 %bits, %less
  store i64 %rest, ptr %place
  %base = shl i64 %k, 6
  %block = add i64 %base, %low
  %m = add i64 %block, $LANES
  %at = getelementptr i64, ptr %w, i64 %m
  %lanes = load i64, ptr %at
  store i64 0, ptr %at
  %pend = getelementptr i64, ptr %w, i64 $PENDING
  %count = load i64, ptr %pend
  %fewer = sub i64 %count, 1
  store i64 %fewer, ptr %pend
  %narrow = trunc i64 %lanes to i32
  %a = insertvalue {i64, i32} poison, i64 %block, 0
  %b = insertvalue {i64, i32} %a, i32 %narrow, 1
  ret {i64, i32} %b
}

define internal void @warp_met(ptr noalias %w) alwaysinline {
start:
  %at = getelementptr i64, ptr %w, i64 $TAG
  %tag = load i64, ptr %at
  %met = and i64 %tag, $LAST_MEETING
  %last = icmp eq i64 %met, $LAST_MEETING
  %more = select i1 %last, i64 0, i64 $ONE_MEETING
  %new = add i64 %tag, %more
  store i64 %new, ptr %at
  ret void
}
""")

EXCHANGED = """
define internal <32 x i32> @exchanged(ptr %values, <32 x i32> %from) {
start:
  %places = getelementptr i32, ptr %values, <32 x i32> %from
  %found = call <32 x i32> @llvm.masked.gather.v32i32.v32p0(<32 x ptr> %places, i32 4, <32 x i1> splat (i1 true), <32 x i32> poison)
  ret <32 x i32> %found
}
"""

ACCESS = Template("""
define internal {i64, i32} @$NAME(ptr noalias %launch, ptr noalias %site, ptr noalias %w, i32 %m, <32 x i64> %addresses) noinline {
start:
  %kept = alloca <32 x i64>, align 64
  %none = icmp eq i32 %m, 0
  br i1 %none, label %nobody, label %some
nobody:
  ret {i64, i32} zeroinitializer
fail:
  ret {i64, i32} {i64 0, i32 -1}
some:
  %first = call i32 @llvm.cttz.i32(i32 %m, i1 true)
  %first64 = zext i32 %first to i64
  %a = extractelement <32 x i64> %addresses, i32 %first
  %lanes = bitcast i32 %m to <32 x i1>
  %n32 = call i32 @llvm.ctpop.i32(i32 %m)
  %n = zext i32 %n32 to i64
$PLACED
aligned:
  %odd = and <32 x i64> %addresses, splat (i64 $LESS)
  %isodd = icmp ne <32 x i64> %odd, zeroinitializer
  %odds = bitcast <32 x i1> %isodd to i32
  %oddly = and i32 %odds, %m
  %skew = icmp ne i32 %oddly, 0
  br i1 %skew, label %fail, label %shape
shape:
  %before = mul i64 %first64, $SIZE
  %row0 = sub i64 %a, %before
  %row1 = insertelement <32 x i64> poison, i64 %row0, i64 0
  %rows = shufflevector <32 x i64> %row1, <32 x i64> poison, <32 x i32> zeroinitializer
  %inrow = sub <32 x i64> %addresses, %rows
  %isrow = icmp eq <32 x i64> %inrow, $STEPS
  %rowbits = bitcast <32 x i1> %isrow to i32
  %outside = xor i32 %rowbits, -1
  %others = and i32 %outside, %m
  %row = icmp eq i32 %others, 0
  %a1 = insertelement <32 x i64> poison, i64 %a, i64 0
  %as = shufflevector <32 x i64> %a1, <32 x i64> poison, <32 x i32> zeroinitializer
  %same = icmp eq <32 x i64> %addresses, %as
  %samebits = bitcast <32 x i1> %same to i32
  %differ = xor i32 %samebits, -1
  %different = and i32 %differ, %m
  %one = icmp eq i32 %different, 0
  %counts = load ptr, ptr %at.counts
  %c0 = getelementptr i64, ptr %counts, i64 $COUNT_AT
  %v0 = load <2 x i64>, ptr %c0, align 8
  %more0 = insertelement <2 x i64> <i64 1, i64 poison>, i64 %n, i64 1
  %w0 = add <2 x i64> %v0, %more0
  store <2 x i64> %w0, ptr %c0, align 8
  %c2 = getelementptr i64, ptr %c0, i64 2
  %v2 = load <2 x i64>, ptr %c2, align 8
  br i1 %one, label %single, label %several
single:
$SINGLE
several:
  br i1 %row, label %inline, label %pattern
inline:
$INLINE
pattern:
  %known = getelementptr i64, ptr %site, i64 $KNOWN
  %distances = getelementptr i64, ptr %site, i64 $DISTANCES
  %relative = sub <32 x i64> %addresses, %as
  %mine = select <32 x i1> %lanes, <32 x i64> %relative, <32 x i64> zeroinitializer
  %last = load <32 x i64>, ptr %distances, align 64
  %moved = icmp ne <32 x i64> %mine, %last
  %movedbits = bitcast <32 x i1> %moved to i32
  %m64 = zext i32 %m to i64
  %lastm = load i64, ptr %known
  %phase = and i64 %a, 31
  %k1 = getelementptr i64, ptr %known, i64 1
  %lastphase = load i64, ptr %k1
  %x1 = xor i64 %lastm, %m64
  %x2 = xor i64 %lastphase, %phase
  %x3 = or i64 %x1, %x2
  %x4 = zext i32 %movedbits to i64
  %x5 = or i64 %x3, %x4
  %news = icmp ne i64 %x5, 0
  br i1 %news, label %measure, label %measured
measure:
  store <32 x i64> %mine, ptr %distances, align 64
  store i64 %m64, ptr %known
  store i64 %phase, ptr %k1
  store <32 x i64> %addresses, ptr %kept, align 64
  call void @measure_$MEASURE(ptr %kept, i32 %m, ptr %known)
  br label %measured
measured:
  %k2 = getelementptr i64, ptr %known, i64 2
  %more2 = load <2 x i64>, ptr %k2, align 8
  %k3 = getelementptr i64, ptr %known, i64 3
  %distinct = load i64, ptr %k3
  %k4 = getelementptr i64, ptr %known, i64 4
  %passes = load <2 x i64>, ptr %k4, align 8
  %addition = select i1 $SHARED, <2 x i64> %passes, <2 x i64> %more2
  %w2 = add <2 x i64> %v2, %addition
  store <2 x i64> %w2, ptr %c2, align 8
  %alike = icmp ult i64 %distinct, %n
  br label %follow
follow:
  %form = phi i32 [$ONE, %single], [$ROW, %inline], [$STREWN, %measured]
  %crowded = phi i1 [%crowd1, %single], [false, %inline], [%alike, %measured]
$CLASH
$FOLLOW
done:
  %r0 = insertvalue {i64, i32} poison, i64 %host, 0
  %r1 = insertvalue {i64, i32} %r0, i32 %form, 1
  ret {i64, i32} %r1
}
""")

PLACED_GLOBAL = Template("""
  br label %look
look:
  %segment = load ptr, ptr %site
  %low = load i64, ptr %segment
  %s1 = getelementptr i64, ptr %segment, i64 1
  %bytes = load i64, ptr %s1
  %enough = icmp uge i64 %bytes, $SIZE
  %room = sub i64 %bytes, $SIZE
  %low1 = insertelement <32 x i64> poison, i64 %low, i64 0
  %lows = shufflevector <32 x i64> %low1, <32 x i64> poison, <32 x i32> zeroinitializer
  %room1 = insertelement <32 x i64> poison, i64 %room, i64 0
  %rooms = shufflevector <32 x i64> %room1, <32 x i64> poison, <32 x i32> zeroinitializer
  %offset = sub <32 x i64> %addresses, %lows
  %in = icmp ule <32 x i64> %offset, %rooms
  %inbits = bitcast <32 x i1> %in to i32
  %outbits = xor i32 %inbits, -1
  %out = and i32 %outbits, %m
  %all = icmp eq i32 %out, 0
  %inside = and i1 %all, %enough
  br i1 %inside, label %placed, label %search
search:
  %found = call ptr @segment(ptr %launch, i64 %a)
  %nowhere = icmp eq ptr %found, null
  br i1 %nowhere, label %fail, label %another
another:
  %again = icmp eq ptr %found, %segment
  br i1 %again, label %fail, label %moves
moves:
  store ptr %found, ptr %site
  br label %look
placed:
  %s2 = getelementptr i64, ptr %segment, i64 2
  %host = load i64, ptr %s2
  %s3 = getelementptr i64, ptr %segment, i64 3
  %state = load i64, ptr %s3
  %s4 = getelementptr i64, ptr %segment, i64 4
  %shadow = load i64, ptr %s4
  %s5 = getelementptr i64, ptr %segment, i64 5
  %origin = load i64, ptr %s5
  %s6 = getelementptr i64, ptr %segment, i64 6
  %index = load i64, ptr %s6
  %s7 = getelementptr i64, ptr %segment, i64 7
  %writable = load i64, ptr %s7
  %refused = icmp ult i64 %writable, $WRITES
  %countat = mul i64 %index, $COUNTS
  %at.counts = getelementptr i64, ptr %site, i64 1
  br i1 %refused, label %fail, label %aligned
""")

SEGMENTS = Template("""
define internal ptr @segment(ptr noalias %launch, i64 %a) noinline {
start:
  %p = getelementptr i64, ptr %launch, i64 $SEGMENTS
  %table = load ptr, ptr %p
  %q = getelementptr i64, ptr %launch, i64 $SEGMENT_COUNT
  %count = load i64, ptr %q
  br label %look
look:
  %k = phi i64 [0, %start], [%next, %on]
  %over = icmp uge i64 %k, %count
  br i1 %over, label %nowhere, label %try
try:
  %at = mul i64 %k, $SEGMENT_WORDS
  %one = getelementptr i64, ptr %table, i64 %at
  %low = load i64, ptr %one
  %b = getelementptr i64, ptr %one, i64 1
  %bytes = load i64, ptr %b
  %offset = sub i64 %a, %low
  %in = icmp ult i64 %offset, %bytes
  br i1 %in, label %here, label %on
on:
  %next = add i64 %k, 1
  br label %look
here:
  ret ptr %one
nowhere:
  ret ptr null
}
""")

PLACED_SHARED = Template("""
  %at.low = getelementptr i64, ptr %site, i64 2
  %low = load i64, ptr %at.low
  %at.high = getelementptr i64, ptr %site, i64 3
  %high = load i64, ptr %at.high
  %low1 = insertelement <32 x i64> poison, i64 %low, i64 0
  %lows = shufflevector <32 x i64> %low1, <32 x i64> poison, <32 x i32> zeroinitializer
  %bytes = sub i64 %high, %low
  %enough = icmp uge i64 %bytes, $SIZE
  %room = sub i64 %bytes, $SIZE
  %room1 = insertelement <32 x i64> poison, i64 %room, i64 0
  %rooms = shufflevector <32 x i64> %room1, <32 x i64> poison, <32 x i32> zeroinitializer
  %offset = sub <32 x i64> %addresses, %lows
  %in = icmp ule <32 x i64> %offset, %rooms
  %inbits = bitcast <32 x i1> %in to i32
  %outbits = xor i32 %inbits, -1
  %out = and i32 %outbits, %m
  %all = icmp eq i32 %out, 0
  %inside = and i1 %all, %enough
  %at.host = getelementptr i64, ptr %launch, i64 $AT_SHARED
  %host = load i64, ptr %at.host
  %at.counts = getelementptr i64, ptr %site, i64 1
  br i1 %inside, label %aligned, label %fail
""")

# Turns of an access to shared memory: lanes with 8 or 16 bytes go in halves or quarters of a warp.
TURNS = Template("""
define internal i64 @turns_$SIZE(i32 %m) alwaysinline {
start:
$TURNS
}
""")

MEASURE = Template("""
define internal void @measure_$MEASURE(ptr %addresses, i32 %m, ptr %known) noinline {
start:
  %units = alloca <32 x i64>, align 64
  %used = alloca [32 x i32], align 64
  %all = load <32 x i64>, ptr %addresses, align 64
  %unit = lshr <32 x i64> %all, splat (i64 $UNIT)
  store <32 x i64> %unit, ptr %units, align 64
  br label %lane
lane:
  %left = phi i32 [%m, %start], [%rest, %on]
  %sectors = phi i64 [0, %start], [%sectors2, %on]
  %distinct = phi i64 [0, %start], [%distinct2, %on]
  %passes = phi i64 [0, %start], [%passes2, %on]
  %ideal = phi i64 [0, %start], [%ideal2, %on]
  %group = phi i32 [-1, %start], [%turn, %on]
  %most = phi i32 [0, %start], [%most2, %on]
  %over = icmp eq i32 %left, 0
  br i1 %over, label %end, label %try
try:
  %l = call i32 @llvm.cttz.i32(i32 %left, i1 true)
  %less = sub i32 %left, 1
  %rest = and i32 %left, %less
  %bit = shl i32 1, %l
  %below = sub i32 %bit, 1
  %earlier = and i32 %below, %m
  %at = getelementptr i64, ptr %addresses, i32 %l
  %a = load i64, ptr %at
  %a1 = insertelement <32 x i64> poison, i64 %a, i64 0
  %as = shufflevector <32 x i64> %a1, <32 x i64> poison, <32 x i32> zeroinitializer
  %eq = icmp eq <32 x i64> %all, %as
  %eqbits = bitcast <32 x i1> %eq to i32
  %seen = and i32 %eqbits, %earlier
  %new = icmp eq i32 %seen, 0
  %new64 = zext i1 %new to i64
  %distinct2 = add i64 %distinct, %new64
  %away = xor <32 x i64> %all, %as
  %insector = icmp ult <32 x i64> %away, splat (i64 32)
  %sectorbits = bitcast <32 x i1> %insector to i32
  %sectorseen = and i32 %sectorbits, %earlier
  %newsector = icmp eq i32 %sectorseen, 0
  %newsector64 = zext i1 %newsector to i64
  %sectors2 = add i64 %sectors, %newsector64
  %turn = lshr i32 %l, $TURN
  %other = icmp ne i32 %turn, %group
  br i1 %other, label %fresh, label %same
fresh:
  call void @llvm.memset.p0.i64(ptr %used, i8 0, i64 128, i1 false)
  br label %same
same:
  %other64 = zext i1 %other to i64
  %ideal2 = add i64 %ideal, %other64
  %most1 = select i1 %other, i32 0, i32 %most
  %start.lane = shl i32 %turn, $TURN
  %start.bit = shl i32 1, %start.lane
  %under = sub i32 %start.bit, 1
  %inturn = xor i32 %under, -1
  %u = getelementptr i64, ptr %units, i32 %l
  %mine = load i64, ptr %u
  %u1 = insertelement <32 x i64> poison, i64 %mine, i64 0
  %us = shufflevector <32 x i64> %u1, <32 x i64> poison, <32 x i32> zeroinitializer
  %every = load <32 x i64>, ptr %units, align 64
  %equ = icmp eq <32 x i64> %every, %us
  %equbits = bitcast <32 x i1> %equ to i32
  %uearlier = and i32 %equbits, %earlier
  %useen = and i32 %uearlier, %inturn
  %unew = icmp eq i32 %useen, 0
  %unew32 = zext i1 %unew to i32
  %column = and i64 %mine, $COLUMNS
  %c = getelementptr i32, ptr %used, i64 %column
  %count = load i32, ptr %c
  %count2 = add i32 %count, %unew32
  store i32 %count2, ptr %c
  %more = icmp ugt i32 %count2, %most1
  %more64 = zext i1 %more to i64
  %most2 = select i1 %more, i32 %count2, i32 %most1
  %passes2 = add i64 %passes, %more64
  br label %on
on:
  br label %lane
end:
  %k2 = getelementptr i64, ptr %known, i64 2
  store i64 %sectors, ptr %k2
  %k3 = getelementptr i64, ptr %known, i64 3
  store i64 %distinct, ptr %k3
  %k4 = getelementptr i64, ptr %known, i64 4
  store i64 %passes, ptr %k4
  %k5 = getelementptr i64, ptr %known, i64 5
  store i64 %ideal, ptr %k5
  ret void
}
""")

FOLLOW_GLOBAL = Template("""
  %followed = or i64 %shadow, %state
  %unfollowed = icmp eq i64 %followed, 0
  br i1 %unfollowed, label %done, label %touching
touching:
  store <32 x i64> %addresses, ptr %kept, align 64
  %zeros = call i32 @llvm.ctlz.i32(i32 %m, i1 true)
  %top = lshr i32 -2147483648, %zeros
  %single.form = icmp eq i32 %form, $ONE
  %who = select i1 %single.form, i32 %top, i32 %m
  %crowd.one = select i1 %crowd1, i64 $WARP_CROWD, i64 0
  %crowd = select i1 %single.form, i64 %crowd.one, i64 0
  %at.tag = getelementptr i64, ptr %w, i64 $GLOBAL_TAG
  %tag = load i64, ptr %at.tag
  %at.number = getelementptr i64, ptr %site, i64 $NUMBER
  %number = load i64, ptr %at.number
  %bad = call i1 @follow_global_$KIND_$SIZE(ptr %kept, i32 %who, i64 %tag, i64 %crowd, i64 %number, i64 %shadow, i64 %origin, i64 %state)
  br i1 %bad, label %fail, label %done
""")

FOLLOWED_GLOBAL = Template("""
define internal i1 @follow_global_$KIND_$SIZE(ptr %addresses, i32 %m, i64 %tag, i64 %crowd, i64 %number, i64 %shadow, i64 %origin, i64 %state) noinline {
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


def touch(kind: int, row: ShadowRow) -> str:
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
        lines += [
            f"%b = getelementptr i64, ptr %r, i64 {BY}",
            f"%by = getelementptr i16, ptr %b, i64 {kind}",
            "%narrow = trunc i64 %number to i16",
            "store i16 %narrow, ptr %by",
        ]
    return "\n".join(f"  {line}" if not line.endswith(":") else line for line in [*lines, "br label %kept"])


FOLLOW_SHARED = Template("""
  %at.tag = getelementptr i64, ptr %w, i64 $TAG
  %tag = load i64, ptr %at.tag
  %tag32 = trunc i64 %tag to i32
  %zeros = call i32 @llvm.ctlz.i32(i32 %m, i1 true)
  %top = lshr i32 -2147483648, %zeros
  %topmost = sub i32 31, %zeros
  %single.form = icmp eq i32 %form, $ONE
  %who = select i1 %single.form, i32 %top, i32 %m
  %crowd = select i1 %crowded, i32 $WARP_CROWD, i32 0
  %top64 = zext i32 %topmost to i64
  %back = mul i64 %top64, $SIZE
  %rowone = sub i64 %a, %back
  %rowstart = select i1 %single.form, i64 %rowone, i64 %row0
  %strewn.form = icmp eq i32 %form, $STREWN
  br i1 %strewn.form, label %strewn, label %rowly
strewn:
  %bad1 = call i1 @follow_shared_$KIND_$SIZE_strewn(ptr %launch, i32 %who, i32 %tag32, i32 %crowd, i64 0, <32 x i64> %addresses)
  br i1 %bad1, label %fail, label %done
rowly:
  %bad2 = call i1 @follow_shared_$KIND_$SIZE_row(ptr %launch, i32 %who, i32 %tag32, i32 %crowd, i64 %rowstart, <32 x i64> %addresses)
  br i1 %bad2, label %fail, label %done
""")


def follow_shared(kind: str, size: int, form: str, row: ShadowRow) -> str:
    """Returns the function that follows an access to shared memory: the tags of its granules, the states of its bytes."""
    word, lanes = "<32 x i32>", "<32 x i1>"
    granule, shift = row.shared_granule, row.shared_granule.bit_length() - 1
    words = (WROTE, READ, UPDATED) if row.atomics else (WROTE, READ)
    arrays = {WROTE: LAUNCH["written"], READ: LAUNCH["read"], UPDATED: LAUNCH["updated"]}
    own = KINDS[kind]
    pieces = max(1, size // granule)
    rowly = form == "row" and pieces == 1
    lines = [
        f"define internal i1 @follow_shared_{kind}_{size}_{form}(ptr noalias %launch, i32 %m, i32 %tag, i32 %crowd, i64 %row, <32 x i64> %addresses) noinline {{",
        "start:",
        f"  %lanes = bitcast i32 %m to {lanes}",
        f"  %t1 = insertelement {word} poison, i32 %tag, i64 0",
        f"  %t2 = shufflevector {word} %t1, {word} poison, {word} zeroinitializer",
        f"  %tags = or {word} %t2, {steps('i32', 1)}",
        f"  %c1 = insertelement {word} poison, i32 %crowd, i64 0",
        f"  %crowds = shufflevector {word} %c1, {word} poison, {word} zeroinitializer",
        f"  %granules = lshr <32 x i64> %addresses, splat (i64 {shift})",
        f"  %granule0 = ashr i64 %row, {shift}",
    ]
    for k in words:
        lines += [f"  %q{k} = getelementptr i64, ptr %launch, i64 {arrays[k]}", f"  %array{k} = load ptr, ptr %q{k}"]
    bad = f"{lanes} zeroinitializer"
    bad_name = "zeroinitializer"
    n = 0

    def add(text: str) -> str:
        nonlocal n
        n += 1
        lines.append(f"  %x{n} = {text}")
        return f"%x{n}"

    for piece in range(pieces):
        places = {}
        others = {}
        for k in words:
            if k != own and k not in CONFLICTS[own]:
                continue
            if rowly:
                places[k] = add(f"getelementptr i32, ptr %array{k}, i64 %granule0")
                others[k] = add(f"call {word} @llvm.masked.load.v32i32.p0(ptr {places[k]}, i32 1, {lanes} %lanes, {word} zeroinitializer)")
            else:
                index = add(f"add <32 x i64> %granules, splat (i64 {piece})")
                places[k] = add(f"getelementptr i32, ptr %array{k}, <32 x i64> {index}")
                others[k] = add(f"call {word} @llvm.masked.gather.v32i32.v32p0(<32 x ptr> {places[k]}, i32 4, {lanes} %lanes, {word} zeroinitializer)")
        facts = {}
        for k, other in others.items():
            differ = add(f"xor {word} {other}, %tags")
            epoch = add(f"icmp ult {word} {differ}, splat (i32 {1 << EPOCH})")
            thread_bits = add(f"and {word} {differ}, splat (i32 {WARP_CROWD - 1})")
            thread = add(f"icmp ne {word} {thread_bits}, zeroinitializer")
            warp_bits = add(f"and {word} {differ}, splat (i32 {WARP_CROWD - WARP})")
            warp = add(f"icmp eq {word} {warp_bits}, zeroinitializer")
            met_bits = add(f"and {word} {differ}, splat (i32 {LAST_MEETING})")
            met = add(f"icmp ne {word} {met_bits}, zeroinitializer")
            ordered = add(f"and {lanes} {warp}, {met}")
            crowd_bits = add(f"and {word} {other}, splat (i32 {WARP_CROWD})")
            crowd = add(f"icmp ne {word} {crowd_bits}, zeroinitializer")
            block_bits = add(f"and {word} {other}, splat (i32 {BLOCK_CROWD})")
            block = add(f"icmp ne {word} {block_bits}, zeroinitializer")
            facts[k] = other, epoch, thread, warp, ordered, crowd, block
        for k in CONFLICTS[own]:
            if k not in facts:
                continue
            _, epoch, thread, _, ordered, crowd, block = facts[k]
            someone = add(f"or {lanes} {thread}, {crowd}")
            unordered = add(f"xor {lanes} {ordered}, splat (i1 true)")
            clash = add(f"and {lanes} {someone}, {unordered}")
            clash = add(f"or {lanes} {clash}, {block}")
            clash = add(f"and {lanes} {clash}, {epoch}")
            bad_name = add(f"or {lanes} {bad_name}, {clash}")
        new = "%tags"
        if own != WROTE:
            other, epoch, thread, warp, ordered, crowd, block = facts[own]
            elsewhere = add(f"xor {lanes} {warp}, splat (i1 true)")
            blocks = add(f"or {lanes} {elsewhere}, {block}")
            blocks = add(f"and {lanes} {blocks}, {epoch}")
            beside = add(f"or {lanes} {thread}, {crowd}")
            now = add(f"xor {lanes} {ordered}, splat (i1 true)")
            beside = add(f"and {lanes} {beside}, {now}")
            beside = add(f"and {lanes} {beside}, {warp}")
            beside = add(f"and {lanes} {beside}, {epoch}")
            b1 = add(f"select {lanes} {blocks}, {word} splat (i32 {BLOCK_CROWD}), {word} zeroinitializer")
            b2 = add(f"select {lanes} {beside}, {word} splat (i32 {WARP_CROWD}), {word} zeroinitializer")
            new = add(f"or {word} %tags, %crowds")
            new = add(f"or {word} {new}, {b1}")
            new = add(f"or {word} {new}, {b2}")
        if rowly:
            lines.append(f"  call void @llvm.masked.store.v32i32.p0({word} {new}, ptr {places[own]}, i32 1, {lanes} %lanes)")
        else:
            lines.append(f"  call void @llvm.masked.scatter.v32i32.v32p0({word} {new}, <32 x ptr> {places[own]}, i32 4, {lanes} %lanes)")
    lines += [f"  %qs = getelementptr i64, ptr %launch, i64 {LAUNCH['states']}", "  %states = load ptr, ptr %qs"]
    width = min(size, 8)
    for piece in range(size // width):
        bits = f"<32 x i{8 * width}>"
        if form == "row" and size == width:
            place = add("getelementptr i8, ptr %states, i64 %row")
            load = f"call {bits} @llvm.masked.load.v32i{8 * width}.p0(ptr {place}, i32 1, {lanes} %lanes, {bits} zeroinitializer)"
            store = f"  call void @llvm.masked.store.v32i{8 * width}.p0({bits} zeroinitializer, ptr {place}, i32 1, {lanes} %lanes)"
        else:
            index = add(f"add <32 x i64> %addresses, splat (i64 {piece * width})")
            place = add(f"getelementptr i8, ptr %states, <32 x i64> {index}")
            load = f"call {bits} @llvm.masked.gather.v32i{8 * width}.v32p0(<32 x ptr> {place}, i32 1, {lanes} %lanes, {bits} zeroinitializer)"
            store = f"  call void @llvm.masked.scatter.v32i{8 * width}.v32p0({bits} zeroinitializer, <32 x ptr> {place}, i32 1, {lanes} %lanes)"
        if kind != "st":
            unwritten = add(f"icmp ne {bits} {add(load)}, zeroinitializer")
            bad_name = add(f"or {lanes} {bad_name}, {unwritten}")
        if kind != "ld":
            lines.append(store)
    del bad
    lines += [
        f"  %wrong.lanes = and {lanes} {bad_name}, %lanes",
        f"  %wrong.bits = bitcast {lanes} %wrong.lanes to i32",
        "  %wrong = icmp ne i32 %wrong.bits, 0",
        "  ret i1 %wrong",
        "}",
    ]
    return "\n".join(lines)


def vector_intrinsics(bits: int) -> str:
    v = f"<32 x i{bits}>"
    return f"""
declare {v} @llvm.masked.load.v32i{bits}.p0(ptr, i32, <32 x i1>, {v})
declare void @llvm.masked.store.v32i{bits}.p0({v}, ptr, i32, <32 x i1>)
declare {v} @llvm.masked.gather.v32i{bits}.v32p0(<32 x ptr>, i32, <32 x i1>, {v})
declare void @llvm.masked.scatter.v32i{bits}.v32p0({v}, <32 x ptr>, i32, <32 x i1>)
"""


MOVE = Template("""
define internal $RESULT @$OPCODE_i$BITS(i64 %host, i32 %form, i32 %m, <32 x i64> %addresses, i64 %piece, i64 %size$VALUE) noinline {
start:
  %lanes = bitcast i32 %m to <32 x i1>
  %base = add i64 %host, %piece
  %whole = icmp eq i64 %size, $BYTES
  switch i32 %form, label %strewn [i32 $NOBODY, label %nobody i32 $ROW, label %row i32 $ONE, label %one]
nobody:
  ret $NOTHING
row:
  br i1 %whole, label %inline, label %strewn
inline:
  %first = call i32 @llvm.cttz.i32(i32 %m, i1 true)
  %first64 = zext i32 %first to i64
  %a = extractelement <32 x i64> %addresses, i32 %first
  %back = mul i64 %first64, $BYTES
  %from = sub i64 %a, %back
  %there = add i64 %base, %from
  %p = inttoptr i64 %there to ptr
$INLINE
one:
  %first1 = call i32 @llvm.cttz.i32(i32 %m, i1 true)
  %a1 = extractelement <32 x i64> %addresses, i32 %first1
  %there1 = add i64 %base, %a1
  %p1 = inttoptr i64 %there1 to ptr
$ONCE
strewn:
  %b1 = insertelement <32 x i64> poison, i64 %base, i64 0
  %bases = shufflevector <32 x i64> %b1, <32 x i64> poison, <32 x i32> zeroinitializer
  %all = add <32 x i64> %addresses, %bases
  %ps = inttoptr <32 x i64> %all to <32 x ptr>
$STREWN
}
""")


def move(opcode: str, bits: int) -> str:
    v = f"<32 x i{bits}>"
    if opcode == "ld":
        inline = f"  %x = call {v} @llvm.masked.load.v32i{bits}.p0(ptr %p, i32 1, <32 x i1> %lanes, {v} zeroinitializer)\n  ret {v} %x"
        once = (
            f"  %y = load i{bits}, ptr %p1, align 1\n  %y1 = insertelement {v} poison, i{bits} %y, i64 0\n"
            f"  %ys = shufflevector {v} %y1, {v} poison, <32 x i32> zeroinitializer\n  ret {v} %ys"
        )
        strewn = f"  %z = call {v} @llvm.masked.gather.v32i{bits}.v32p0(<32 x ptr> %ps, i32 1, <32 x i1> %lanes, {v} zeroinitializer)\n  ret {v} %z"
        result, nothing, value = v, f"{v} zeroinitializer", ""
    else:
        inline = f"  call void @llvm.masked.store.v32i{bits}.p0({v} %value, ptr %p, i32 1, <32 x i1> %lanes)\n  ret void"
        once = f"  %y = extractelement {v} %value, i32 %first1\n  store i{bits} %y, ptr %p1, align 1\n  ret void"
        strewn = f"  call void @llvm.masked.scatter.v32i{bits}.v32p0({v} %value, <32 x ptr> %ps, i32 1, <32 x i1> %lanes)\n  ret void"
        result, nothing, value = "void", "void", f", {v} %value"
    return MOVE.substitute(
        RESULT=result, OPCODE_i=f"{opcode}_i", OPCODE=opcode, BITS=bits, VALUE=value, BYTES=bits // 8, NOBODY=NOBODY, ROW=ROW, ONE=ONE,
        NOTHING=nothing, INLINE=inline, ONCE=once, STREWN=strewn,
    )


UPDATE = Template("""
define internal i32 @update_$HOW_$TYPE(i64 %host, i32 %m, <32 x i64> %addresses, <32 x i$BITS> %values) noinline {
start:
  %kept = alloca <32 x i64>, align 64
  %given = alloca <32 x i$BITS>, align 64
  store <32 x i64> %addresses, ptr %kept, align 64
  store <32 x i$BITS> %values, ptr %given, align 64
  br label %lane
lane:
  %left = phi i32 [%m, %start], [%rest, %go]
  %odd = phi i32 [0, %start], [%odd2, %go]
  %over = icmp eq i32 %left, 0
  br i1 %over, label %end, label %go
end:
  ret i32 %odd
go:
  %l = call i32 @llvm.cttz.i32(i32 %left, i1 true)
  %less = sub i32 %left, 1
  %rest = and i32 %left, %less
  %p = getelementptr i64, ptr %kept, i32 %l
  %a = load i64, ptr %p
  %where = add i64 %a, %host
  %q = inttoptr i64 %where to ptr
  %old = load i$BITS, ptr %q, align 1
  %g = getelementptr i$BITS, ptr %given, i32 %l
  %x = load i$BITS, ptr %g
$APPLY
  store i$BITS %new, ptr %q, align 1
  br label %lane
}
""")


def update(how: str, type_name: str) -> str:
    kind, bits = type_name[0], int(type_name[1:])
    odd = "  %odd2 = or i32 %odd, 0"
    if kind == "f":
        of = "float" if bits == 32 else "double"
        apply = f"""  %fo = bitcast i{bits} %old to {of}
  %fx = bitcast i{bits} %x to {of}
  %fn = fadd {of} %fo, %fx
  %nan = fcmp uno {of} %fn, %fn
  %nan32 = zext i1 %nan to i32
  %odd2 = or i32 %odd, %nan32
  %new = bitcast {of} %fn to i{bits}"""
    elif how in ("min", "max"):
        test = ("s" if kind == "s" else "u") + ("lt" if how == "min" else "gt")
        apply = f"{odd}\n  %less.or.more = icmp {test} i{bits} %x, %old\n  %new = select i1 %less.or.more, i{bits} %x, i{bits} %old"
    else:
        apply = f"{odd}\n  %new = {ATOMICS[how]} i{bits} %old, %x"
    return UPDATE.substitute(HOW=how, HOW_=f"{how}_", TYPE=type_name, BITS=bits, APPLY=apply)


RUN = Template("""
define i64 @stretch(ptr noalias %launch, i64 %first, i64 %count) {
start:
$LOADS
  br label %block
block:
  %b = phi i64 [%first, %start], [%nextb, %ended]
  %bend = add i64 %first, %count
  %finished = icmp uge i64 %b, %bend
  br i1 %finished, label %good, label %begin
good:
  ret i64 0
begin:
  %bx = urem i64 %b, %grid_x
  %b1 = udiv i64 %b, %grid_x
  %by = urem i64 %b1, %grid_y
  %bz = udiv i64 %b1, %grid_y
  %regbytes = mul i64 %warps, $REGISTER_BYTES
  call void @llvm.memcpy.p0.p0.i64(ptr %registers, ptr %template, i64 %regbytes, i1 false)
  call void @llvm.memset.p0.i64(ptr %shared, i8 -1, i64 %shared_bytes, i1 false)
  call void @llvm.memset.p0.i64(ptr %states, i8 1, i64 %shared_bytes, i1 false)
  %granule.bytes = shl i64 %granules, 2
$CLEARED
  %b2 = add i64 %b, 1
  %block.tag = shl i64 %b2, 32
  %tag1 = or i64 %block.tag, $FIRST_EPOCH
  br label %prepare
prepare:
  %pw = phi i64 [0, %begin], [%pw2, %prepare]
  %rb = mul i64 %pw, $REGISTER_BYTES
  %regs = getelementptr i8, ptr %registers, i64 %rb
  %wb = mul i64 %pw, $STATE_WORDS
  %w = getelementptr i64, ptr %warps_memory, i64 %wb
  call void @llvm.memset.p0.i64(ptr %w, i8 0, i64 $STATE_BYTES, i1 false)
  %ap = getelementptr i64, ptr %alive, i64 %pw
  %al = load i64, ptr %ap
  store i64 %al, ptr %w
  %wp = getelementptr i64, ptr %w, i64 $WHOLE
  store i64 %al, ptr %wp
$SPECIAL
  %lane0 = shl i64 %pw, 5
  %t1 = or i64 %lane0, $FIRST_SHARED
  %tp = getelementptr i64, ptr %w, i64 $TAG
  store i64 %t1, ptr %tp
  %g1 = or i64 %tag1, %lane0
  %gp = getelementptr i64, ptr %w, i64 $GLOBAL_TAG
  store i64 %g1, ptr %gp
  %al32 = trunc i64 %al to i32
  call void @push(ptr %w, i64 0, i32 %al32)
  %pw2 = add i64 %pw, 1
  %prepared = icmp eq i64 %pw2, %warps
  br i1 %prepared, label %phase, label %prepare
phase:
  %epoch = phi i64 [1, %prepare], [%epoch2, %met]
  br label %warp
warp:
  %k = phi i64 [0, %phase], [%k2, %ran]
  %waiting = phi i64 [0, %phase], [%waiting2, %ran]
  %barrier = phi i64 [0, %phase], [%barrier2, %ran]
  %kb = mul i64 %k, $STATE_WORDS
  %kw = getelementptr i64, ptr %warps_memory, i64 %kb
  %kr = mul i64 %k, $REGISTER_BYTES
  %kregs = getelementptr i8, ptr %registers, i64 %kr
  %r = call i32 @warp(ptr %launch, ptr %kregs, ptr %kw)
  %failed = icmp eq i32 %r, 2
  br i1 %failed, label %bad, label %run
bad:
  ret i64 1
run:
  %waits = icmp eq i32 %r, 1
  br i1 %waits, label %came, label %ran
came:
  %bp = getelementptr i64, ptr %kw, i64 $BARRIER
  %number = load i64, ptr %bp
  %firstone = icmp eq i64 %waiting, 0
  %sameone = icmp eq i64 %number, %barrier
  %agrees = or i1 %firstone, %sameone
  br i1 %agrees, label %ran, label %bad
ran:
  %barrier2 = phi i64 [%barrier, %run], [%number, %came]
  %one = zext i1 %waits to i64
  %waiting2 = add i64 %waiting, %one
  %k2 = add i64 %k, 1
  %allran = icmp eq i64 %k2, %warps
  br i1 %allran, label %over, label %warp
over:
  %nobody = icmp eq i64 %waiting2, 0
  br i1 %nobody, label %ended, label %meet
meet:
  %every = icmp eq i64 %waiting2, %warps
  br i1 %every, label %together, label %bad
together:
  %epoch2 = add i64 %epoch, 1
  %toomany = icmp uge i64 %epoch2, $LAST_EPOCH
  br i1 %toomany, label %bad, label %tags
tags:
  %t = phi i64 [0, %together], [%t2, %tags]
  %tb = mul i64 %t, $STATE_WORDS
  %tw = getelementptr i64, ptr %warps_memory, i64 %tb
  %tlane = shl i64 %t, 5
  %te = shl i64 %epoch2, $EPOCH
  %tnew = or i64 %te, %tlane
  %ttp = getelementptr i64, ptr %tw, i64 $TAG
  store i64 %tnew, ptr %ttp
  %ge = shl i64 %epoch2, $THREAD_BITS
  %gl = or i64 %ge, %tlane
  %gnew = or i64 %gl, %block.tag
  %tgp = getelementptr i64, ptr %tw, i64 $GLOBAL_TAG
  store i64 %gnew, ptr %tgp
  %t2 = add i64 %t, 1
  %tagged = icmp eq i64 %t2, %warps
  br i1 %tagged, label %met, label %tags
met:
  %mp = getelementptr i64, ptr %launch, i64 $BARRIERS
  %meetings = load i64, ptr %mp
  %meetings2 = add i64 %meetings, 1
  store i64 %meetings2, ptr %mp
  br label %phase
ended:
  %nextb = add i64 %b, 1
  br label %block
}
""")

POINTERS = ("registers", "warps_memory", "template", "alive", "shared", "states", "written", "read", "updated")


def turns(size: int) -> str:
    columns = bank_columns(size)
    if columns >= WARP:
        body = "  ret i64 1"
    else:
        lines, total = [], "0"
        for k in range(WARP // columns):
            mask = ((1 << columns) - 1) << (columns * k)
            mask -= (1 << 32) if mask >= 1 << 31 else 0
            lines += [
                f"  %m{k} = and i32 %m, {mask}",
                f"  %b{k} = icmp ne i32 %m{k}, 0",
                f"  %z{k} = zext i1 %b{k} to i64",
                f"  %s{k} = add i64 {total}, %z{k}",
            ]
            total = f"%s{k}"
        body = "\n".join([*lines, f"  ret i64 {total}"])
    return TURNS.substitute(SIZE=size, TURNS=body)


def access(space: str, kind: str, size: int) -> str:
    shared = space == "shared"
    names = {
        "NAME": access_name(space, kind, size),
        "SIZE": size,
        "LESS": size - 1,
        "STEPS": steps("i64", size),
        "KNOWN": KNOWN,
        "DISTANCES": DISTANCES,
        "MEASURE": f"{space}_{size}",
        "SHARED": str(shared).lower(),
        "ONE": ONE,
        "ROW": ROW,
        "STREWN": STREWN,
        "COUNTS": COUNTS,
        "WRITES": int(kind != "ld"),
        "AT_SHARED": LAUNCH["shared"],
        "COUNT_AT": "0" if shared else "%countat",
        "WARP_CROWD": WARP_CROWD,
        "GLOBAL_TAG": WARP_STATE["global_tag"],
        "TAG": WARP_STATE["tag"],
        "NUMBER": SITE["number"],
        "KIND_": f"{kind}_",
        "KIND": kind,
        "SIZE_strewn": f"{size}_strewn",
        "SIZE_row": f"{size}_row",
        "KIND_SIZE": f"{kind}_{size}",
    }
    if shared:
        single = f"  %turns1 = call i64 @turns_{size}(i32 %m)\n  %t1 = insertelement <2 x i64> poison, i64 %turns1, i64 0\n"
        single += "  %t2 = shufflevector <2 x i64> %t1, <2 x i64> poison, <2 x i32> zeroinitializer\n  %sum1 = add <2 x i64> %v2, %t2\n"
        inline = single.replace("turns1", "turns3").replace("%t1", "%t3").replace("%t2", "%t4").replace("%sum1", "%sum3")
        inline += "  store <2 x i64> %sum3, ptr %c2, align 8\n  br label %follow"
    else:
        single = "  %sum1 = add <2 x i64> %v2, splat (i64 1)\n"
        inline = f"""  %run = lshr i32 %m, %first
  %run1 = add i32 %run, 1
  %holes = and i32 %run, %run1
  %hole = icmp ne i32 %holes, 0
  br i1 %hole, label %pattern, label %unbroken
unbroken:
  %length = mul i64 %n, {size}
  %end = add i64 %a, %length
  %lastbyte = sub i64 %end, 1
  %s.last = lshr i64 %lastbyte, 5
  %s.first = lshr i64 %a, 5
  %s.more = sub i64 %s.last, %s.first
  %s.all = add i64 %s.more, 1
  %t3 = insertelement <2 x i64> poison, i64 %s.all, i64 0
  %t4 = insertelement <2 x i64> %t3, i64 %n, i64 1
  %sum3 = add <2 x i64> %v2, %t4
  store <2 x i64> %sum3, ptr %c2, align 8
  br label %follow"""
    single += "  store <2 x i64> %sum1, ptr %c2, align 8\n  %crowd1 = icmp ugt i64 %n, 1\n  br label %follow"
    names |= {"SINGLE": single, "INLINE": inline}
    # Several lanes of a warp that store to one place race.
    clash = "  br i1 %crowded, label %fail, label %goes\ngoes:" if kind == "st" else ""
    placed = (PLACED_SHARED if shared else PLACED_GLOBAL).substitute(names)
    follow = (FOLLOW_SHARED if shared else FOLLOW_GLOBAL).template
    follow = follow.replace("$KIND_$SIZE", f"{kind}_{size}").replace("$SIZE_", f"{size}_")
    follow = Template(follow).substitute(names)
    text = ACCESS.substitute(names, PLACED=placed, FOLLOW=follow, CLASH=clash)
    if not shared:
        text = text.replace("[2, %inline]" if False else f"[{ROW}, %inline]", f"[{ROW}, %unbroken]").replace("[false, %inline]", "[false, %unbroken]")
        text = text.replace("%crowd.one = select i1 %crowd1,", "%crowd.one = select i1 %crowded,")
    return text


def measure(space: str, size: int) -> str:
    columns = bank_columns(size)
    return MEASURE.substitute(
        MEASURE=f"{space}_{size}", UNIT=max(size, 4).bit_length() - 1, TURN=columns.bit_length() - 1, COLUMNS=columns - 1
    )


def follow_global(kind: str, size: int, row: ShadowRow) -> str:
    bits = 8 * size
    stated = []
    if kind != "st":
        stated += [f"  %s = load i{bits}, ptr %q, align 1", f"  %unwritten = icmp ne i{bits} %s, 0", "  br i1 %unwritten, label %bad, label %known", "known:"]
    if kind != "ld":
        stated.append(f"  store i{bits} 0, ptr %q, align 1")
    stated.append("  br label %on")
    text = FOLLOWED_GLOBAL.template.replace("$KIND_$SIZE", f"{kind}_{size}")
    return Template(text).substitute(
        GRANULE=row.granule.bit_length() - 1, ROW_BYTES=8 * row.words, PIECES=max(1, size // row.granule),
        TOUCH=touch(KINDS[kind], row), STATED="\n".join(stated),
    )


POWER = """
define internal <32 x double> @power(ptr noalias %launch, <32 x float> %x) noinline {{
start:
  %asked = alloca <32 x double>, align 64
  %answer = alloca <32 x double>, align 64
  %low = call <32 x float> @llvm.maxnum.v32f32(<32 x float> %x, <32 x float> splat (float -1000.0))
  %in = call <32 x float> @llvm.minnum.v32f32(<32 x float> %low, <32 x float> splat (float 1000.0))
  %whole = call <32 x float> @llvm.rint.v32f32(<32 x float> %in)
  %xd = fpext <32 x float> %in to <32 x double>
  %wd = fpext <32 x float> %whole to <32 x double>
  %part = fsub <32 x double> %xd, %wd
{steps}
  %n = fptosi <32 x float> %whole to <32 x i32>
  %n64 = sext <32 x i32> %n to <32 x i64>
  %up = shl <32 x i64> %n64, splat (i64 52)
  %bits = bitcast <32 x double> {last} to <32 x i64>
  %scaled = add <32 x i64> %bits, %up
  %found = bitcast <32 x i64> %scaled to <32 x double>
  %shifted = add <32 x i64> %scaled, splat (i64 {near})
  %rest = and <32 x i64> %shifted, splat (i64 {half})
  %close = icmp ult <32 x i64> %rest, splat (i64 {twice})
  %broken = fcmp one <32 x double> %part, zeroinitializer
  %doubt = and <32 x i1> %close, %broken
  %doubts = bitcast <32 x i1> %doubt to i32
  %sure = icmp eq i32 %doubts, 0
  br i1 %sure, label %end, label %ask
end:
  ret <32 x double> %found
ask:
  store <32 x double> %xd, ptr %asked, align 64
  %at = getelementptr i64, ptr %launch, i64 {exp2}
  %numpy = load ptr, ptr %at
  call void %numpy(ptr %asked, ptr %answer)
  %exact = load <32 x double>, ptr %answer, align 64
  ret <32 x double> %exact
}}
"""

NEAR = 8
"""Units in the last place of float64 by which the series may differ from NumPy's exp2: nearer than that to a place where float32
rounds the other way, NumPy is asked.
"""


def power() -> str:
    """Returns the function that raises 2 to float32 powers, in float64, by the series of the exponential."""
    import math
    import struct

    terms = [1.0]
    for k in range(1, 15):
        terms.append(terms[-1] * math.log(2) / k)
    exact = [math.log(2) ** k / math.factorial(k) for k in range(15)]
    hexes = [f"0x{struct.unpack('<Q', struct.pack('<d', term))[0]:016X}" for term in exact]
    lines, name = [], f"splat (double {hexes[14]})"
    for k in range(13, -1, -1):
        lines.append(f"  %h{k} = call <32 x double> @llvm.fma.v32f64(<32 x double> {name}, <32 x double> %part, <32 x double> splat (double {hexes[k]}))")
        name = f"%h{k}"
    return POWER.format(
        steps="\n".join(lines), last=name, near=NEAR, twice=2 * NEAR, half=(1 << 28) - 1, exp2=LAUNCH["exp2"]
    )


def module(warp: str, helpers: Iterable[tuple[str, ...]], row: ShadowRow, words: int, size: int, special: list[tuple[int, int, str]], doubtful: int, blank: Iterable[int]) -> tuple[str, int]:
    """Returns the whole text of a kernel: its own function, the run of blocks, and the functions that it calls.

    `words`: of the bits of its basic blocks; `size`: bytes of a warp's registers; `special`: offset, width and name of the registers
    with the block's place.
    """
    blanks = WARP_STATE["bitmap"] + 65 * words
    state_words = -(-(blanks + doubtful) // 8) * 8
    parts, widths = list[str](), set[int]()
    parts.append(
        GROUPS.substitute(
            LANES=WARP_STATE["bitmap"] + words, PENDING=WARP_STATE["pending"], BITMAP=WARP_STATE["bitmap"], WORDS=words,
            TAG=WARP_STATE["tag"], LAST_MEETING=LAST_MEETING, ONE_MEETING=1 << MEETING,
        )
    )
    seen = set()
    for kind, *rest in sorted(helpers):
        if kind == "access":
            space, opcode, size_ = rest[0], rest[1], int(rest[2])
            parts.append(access(space, opcode, size_))
            for once, make in (
                (("measure", space, size_), lambda space=space, size_=size_: measure(space, size_)),
                (("turns", size_), lambda size_=size_: turns(size_)),
            ):
                if once not in seen and (once[0] != "turns" or space == "shared"):
                    seen.add(once)
                    parts.append(make())
            if space == "shared":
                parts += [follow_shared(opcode, size_, form, row) for form in ("row", "strewn")]
                widths |= {32, 8 * min(size_, 8)}
            else:
                parts.append(follow_global(opcode, size_, row))
                seen.add(("segments",))
        elif kind == "move":
            bits = int(rest[1][1:])
            widths.add(bits)
            parts.append(move(rest[0], bits))
        elif kind == "update":
            parts.append(update(*rest))
        elif kind == "power":
            parts.append(power())
        elif kind == "exchanged":
            parts.append(EXCHANGED)
            widths.add(32)
    if ("segments",) in seen:
        parts.append(SEGMENTS.substitute(SEGMENTS=LAUNCH["segments"], SEGMENT_COUNT=LAUNCH["segment_count"], SEGMENT_WORDS=SEGMENT_WORDS))
    parts += map(vector_intrinsics, sorted(widths))
    loads = "\n".join(
        f"  %at.{name} = getelementptr i64, ptr %launch, i64 {LAUNCH[name]}\n  %{name} = load {'ptr' if name in POINTERS else 'i64'}, ptr %at.{name}"
        for name in (*POINTERS, "warps", "grid_x", "grid_y", "shared_bytes", "granules")
    )
    cleared = "\n".join(
        f"  call void @llvm.memset.p0.i64(ptr %{name}, i8 0, i64 %granule.bytes, i1 false)"
        for name in ("written", "read", *(["updated"] if row.atomics else []))
    )
    axes = {"x": "%bx", "y": "%by", "z": "%bz"}
    stores = []
    for n, (offset, width, name) in enumerate(special):
        bits = f"i{width}"
        value = axes[name[-1]]
        if width < 64:
            stores.append(f"  %sv{n} = trunc i64 {value} to {bits}")
            value = f"%sv{n}"
        stores += [
            f"  %s1{n} = insertelement <32 x {bits}> poison, {bits} {value}, i64 0",
            f"  %s2{n} = shufflevector <32 x {bits}> %s1{n}, <32 x {bits}> poison, <32 x i32> zeroinitializer",
            f"  %sp{n} = getelementptr i8, ptr %regs, i64 {offset}",
            f"  store <32 x {bits}> %s2{n}, ptr %sp{n}, align 64",
        ]
    for k in blank:
        stores += [f"  %bl{k} = getelementptr i64, ptr %w, i64 {blanks + k}", f"  store i64 %al, ptr %bl{k}"]
    parts.append(
        RUN.substitute(
            LOADS=loads, REGISTER_BYTES=size, CLEARED=cleared, FIRST_EPOCH=1 << THREAD_BITS, SPECIAL="\n".join(stores),
            STATE_WORDS=state_words, STATE_BYTES=8 * state_words, WHOLE=WARP_STATE["whole"], FIRST_SHARED=1 << EPOCH,
            TAG=WARP_STATE["tag"], GLOBAL_TAG=WARP_STATE["global_tag"], BARRIER=WARP_STATE["barrier"], EPOCH=EPOCH,
            THREAD_BITS=THREAD_BITS, LAST_EPOCH=1 << (32 - EPOCH), BARRIERS=LAUNCH["barriers"],
        )
    )
    parts.append(warp)
    return "\n".join(parts), state_words
