"""The text of LLVM's functions through which a compiled kernel accesses memory, a warp at a time.

An access looks where its lanes' addresses lie, counts what `state.counters` counts, and follows who has touched what
(`execute.warp_order`). It returns the distance from the addresses to host memory and its form, which is negative if it gives up: at
anything but a plain access without fault. Then lanes' values are moved, or updated.
"""

from __future__ import annotations

from string import Template

from ..state.lane_sets import WARP, bank_columns
from .warp_text import (
    COLLECTIVE,
    COUNTS,
    DISTANCES,
    KINDS,
    KNOWN,
    LAUNCH,
    NOBODY,
    ONE,
    ROW,
    SEGMENT_WORDS,
    SITE,
    STREWN,
    WARP_CROWD,
    WARP_STATE,
    WROTE,
    access_name,
    steps,
)

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
  call void @measure_${SPACE}_$SIZE(ptr %kept, i32 %m, ptr %known)
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
  %form = phi i32 [$ONE, %single], [$ROW, %$INLINE_END], [$STREWN, %measured]
  %crowded = phi i1 [%crowd1, %single], [false, %$INLINE_END], [%alike, %measured]
$CLASH
$FOLLOW
done:
  %r0 = insertvalue {i64, i32} poison, i64 %host, 0
  %r1 = insertvalue {i64, i32} %r0, i32 %form, 1
  ret {i64, i32} %r1
}
""")

# Whether all lanes access bytes that are there: `bytes` of them from `low` on.
BOUNDS = Template("""  %enough = icmp uge i64 %bytes, $SIZE
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
""")

PLACED_GLOBAL = Template("""
  br label %look
look:
  %segment = load ptr, ptr %site
  %low = load i64, ptr %segment
  %s1 = getelementptr i64, ptr %segment, i64 1
  %bytes = load i64, ptr %s1
$BOUNDS  br i1 %inside, label %placed, label %search
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
  %refused = icmp $REFUSED
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
  %bytes = sub i64 %high, %low
$BOUNDS  %at.host = getelementptr i64, ptr %launch, i64 $AT_SHARED
  %host = load i64, ptr %at.host
  %at.counts = getelementptr i64, ptr %site, i64 1
  br i1 %inside, label %aligned, label %fail
""")

SINGLE_GLOBAL = """
  %sum1 = add <2 x i64> %v2, splat (i64 1)
  store <2 x i64> %sum1, ptr %c2, align 8
  %crowd1 = icmp ugt i64 %n, 1
  br label %follow
"""

INLINE_GLOBAL = Template("""
  %run = lshr i32 %m, %first
  %run1 = add i32 %run, 1
  %holes = and i32 %run, %run1
  %hole = icmp ne i32 %holes, 0
  br i1 %hole, label %pattern, label %unbroken
unbroken:
  %length = mul i64 %n, $SIZE
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
  br label %follow
""")

# Lanes at one place or in a row have no bank conflicts.
IN_TURNS = Template("""
  %turns$N = call i64 @turns_$SIZE(i32 %m)
  %t$N = insertelement <2 x i64> poison, i64 %turns$N, i64 0
  %u$N = shufflevector <2 x i64> %t$N, <2 x i64> poison, <2 x i32> zeroinitializer
  %sum$N = add <2 x i64> %v2, %u$N
  store <2 x i64> %sum$N, ptr %c2, align 8
$CROWD  br label %follow
""")

# Turns of an access to shared memory: lanes with 8 or 16 bytes go in halves or quarters of a warp.
TURNS = Template("""
define internal i64 @turns_$SIZE(i32 %m) alwaysinline {
start:
$TURNS
}
""")

MEASURE = Template("""
define internal void @measure_${SPACE}_$SIZE(ptr %addresses, i32 %m, ptr %known) noinline {
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
  %crowd.one = select i1 %crowded, i64 $WARP_CROWD, i64 0
  %crowd = select i1 %single.form, i64 %crowd.one, i64 0
  %at.tag = getelementptr i64, ptr %w, i64 $GLOBAL_TAG
  %tag = load i64, ptr %at.tag
  %at.number = getelementptr i64, ptr %site, i64 $NUMBER
  %number = load i64, ptr %at.number
  %bad = call i1 @follow_global_${KIND}_$SIZE(
    ptr %kept, i32 %who, i64 %tag, i64 %crowd, i64 %number, i64 %shadow, i64 %origin, i64 %state
  )
  br i1 %bad, label %fail, label %done
""")

FOLLOW_SHARED = Template("""
  %at.tag = getelementptr i64, ptr %w, i64 $TAG
  %tag = load i64, ptr %at.tag
  %tag32 = trunc i64 %tag to i32
  %zeros = call i32 @llvm.ctlz.i32(i32 %m, i1 true)
  %top = lshr i32 -2147483648, %zeros
  %topmost = sub i32 31, %zeros
  %single.form = icmp eq i32 %form, $ONE
  %who = select i1 %single.form, i32 %top, i32 %m
  %crowd = select i1 $CROWDED, i32 $WARP_CROWD, i32 0
  %top64 = zext i32 %topmost to i64
  %back = mul i64 %top64, $SIZE
  %rowone = sub i64 %a, %back
  %rowstart = select i1 %single.form, i64 %rowone, i64 %row0
  %strewn.form = icmp eq i32 %form, $STREWN
  br i1 %strewn.form, label %strewn, label %rowly
strewn:
  %bad1 = call i1 @follow_shared_${KIND}_${SIZE}_strewn(
    ptr %launch, i32 %who, i32 %tag32, i32 %crowd, i64 0, <32 x i64> %addresses
  )
  br i1 %bad1, label %fail, label %done
rowly:
  %bad2 = call i1 @follow_shared_${KIND}_${SIZE}_row(
    ptr %launch, i32 %who, i32 %tag32, i32 %crowd, i64 %rowstart, <32 x i64> %addresses
  )
  br i1 %bad2, label %fail, label %done
""")


MOVE = Template("""
define internal $RESULT @${OPCODE}_i$BITS(
  i64 %host, i32 %form, i32 %m, <32 x i64> %addresses, i64 %piece, i64 %size$VALUE
) noinline {
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


UPDATE = Template("""
define internal i32 @update_${HOW}_$TYPE(i64 %host, i32 %m, <32 x i64> %addresses, ptr %given) noinline {
start:
  %kept = alloca <32 x i64>, align 64
  store <32 x i64> %addresses, ptr %kept, align 64
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
  store i$BITS %old, ptr %g
  br label %lane
}
""")


def turns(size: int) -> str:
    """Returns the function that counts the turns of lanes that access so many bytes of shared memory each."""
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
    """Returns the function of an access of so many bytes a lane; `kind`: one of `KINDS`. cp.async reads tensors, and writes shared
    memory.
    """
    shared, reads = space == "shared", kind == "cp.async" and space == "global"
    names = {
        "NAME": access_name(space, kind, size),
        "SPACE": space,
        "SIZE": size,
        "KIND": "ld" if reads else kind,
        "LESS": size - 1,
        "KNOWN": KNOWN,
        "DISTANCES": DISTANCES,
        "COUNTS": COUNTS,
        "STEPS": steps("i64", size),
        "ONE": ONE,
        "ROW": ROW,
        "STREWN": STREWN,
        "SHARED": str(shared).lower(),
        "NUMBER": SITE["number"],
        "REFUSED": REFUSED.get(kind, "eq i64 %writable, 0"),
        "AT_SHARED": LAUNCH["shared"],
        "COUNT_AT": "0" if shared else "%countat",
        "WARP_CROWD": WARP_CROWD,
        "CROWDED": "true" if kind in COLLECTIVE else "%crowded",
        "GLOBAL_TAG": WARP_STATE["global_tag"],
        "TAG": WARP_STATE["tag"],
        # Several lanes of a warp that store to one place race.
        "CLASH": "  br i1 %crowded, label %fail, label %goes\ngoes:" if KINDS[kind] == WROTE and not reads else "",
        "INLINE_END": "inline" if shared else "unbroken",
    }
    if shared:
        single = IN_TURNS.substitute(N=1, SIZE=size, CROWD="  %crowd1 = icmp ugt i64 %n, 1\n")
        names |= {"SINGLE": single, "INLINE": IN_TURNS.substitute(N=3, SIZE=size, CROWD="")}
    else:
        names |= {"SINGLE": SINGLE_GLOBAL, "INLINE": INLINE_GLOBAL.substitute(SIZE=size)}
    names["BOUNDS"] = BOUNDS.substitute(SIZE=size)
    names["PLACED"] = (PLACED_SHARED if shared else PLACED_GLOBAL).substitute(names)
    names["FOLLOW"] = (FOLLOW_SHARED if shared else FOLLOW_GLOBAL).substitute(names)
    return ACCESS.substitute(names)


REFUSED = {"ld": "ne i64 0, 0", "cp.async": "ne i64 %writable, 0"}
"""The segments that an access may not touch; others only those that are not writable."""


def segments() -> str:
    """Returns the function that finds the segment of an address."""
    return SEGMENTS.substitute(SEGMENTS=LAUNCH["segments"], SEGMENT_COUNT=LAUNCH["segment_count"], SEGMENT_WORDS=SEGMENT_WORDS)


def measure(space: str, size: int) -> str:
    """Returns the function that counts sectors, different addresses and wavefronts of addresses anywhere."""
    columns = bank_columns(size)
    return MEASURE.substitute(
        SPACE=space, SIZE=size, UNIT=max(size, 4).bit_length() - 1, TURN=columns.bit_length() - 1, COLUMNS=columns - 1
    )


def move(opcode: str, bits: int) -> str:
    """Returns the function that moves a number of each lane from memory (ld) or to it (st)."""
    of, lanes, width = f"<{WARP} x i{bits}>", f"i32 1, <{WARP} x i1> %lanes", f"v{WARP}i{bits}"
    if opcode == "ld":
        parts = {
            "RESULT": of,
            "NOTHING": f"{of} zeroinitializer",
            "VALUE": "",
            "INLINE": f"  %x = call {of} @llvm.masked.load.{width}.p0(ptr %p, {lanes}, {of} zeroinitializer)\n  ret {of} %x",
            "ONCE": f"""  %y = load i{bits}, ptr %p1, align 1
  %y1 = insertelement {of} poison, i{bits} %y, i64 0
  %ys = shufflevector {of} %y1, {of} poison, <{WARP} x i32> zeroinitializer
  ret {of} %ys""",
            "STREWN": f"""  %z = call {of} @llvm.masked.gather.{width}.v{WARP}p0(<{WARP} x ptr> %ps, {lanes}, {of} zeroinitializer)
  ret {of} %z""",
        }
    else:
        parts = {
            "RESULT": "void",
            "NOTHING": "void",
            "VALUE": f", {of} %value",
            "INLINE": f"  call void @llvm.masked.store.{width}.p0({of} %value, ptr %p, {lanes})\n  ret void",
            "ONCE": f"  %y = extractelement {of} %value, i32 %first1\n  store i{bits} %y, ptr %p1, align 1\n  ret void",
            "STREWN": f"  call void @llvm.masked.scatter.{width}.v{WARP}p0({of} %value, <{WARP} x ptr> %ps, {lanes})\n  ret void",
        }
    return MOVE.substitute(parts, OPCODE=opcode, BITS=bits, BYTES=bits // 8, NOBODY=NOBODY, ROW=ROW, ONE=ONE)


TINY = """  %f{0} = and i32 %{0}, 2147483647
  %g{0} = sub i32 %f{0}, 1
  %tiny{0} = icmp ult i32 %g{0}, 8388607"""

FLUSHED = f"""
{TINY.format("old")}
{TINY.format("x")}
  %sizes = or i32 %fold, %fx
  %all = icmp eq i32 %sizes, 0
  %other = xor i32 %old, -2147483648
  %opposite = icmp eq i32 %other, %x
  %rightly = or i1 %all, %opposite
  %zero = fcmp oeq float %fn, 0.0
  %wrongly = xor i1 %rightly, true
  %lost = and i1 %zero, %wrongly
  %tiny = or i1 %tinyold, %tinyx
  %flushes = or i1 %tiny, %lost"""
"""True if a sum of float32 differs where subnormal numbers are flushed: an addend or the sum is subnormal."""


NEW = {
    "exch": "  %new = select i1 true, i{bits} %x, i{bits} %old",
    "cas": """  %behind = getelementptr i{bits}, ptr %g, i32 32
  %other = load i{bits}, ptr %behind
  %equal = icmp eq i{bits} %old, %x
  %new = select i1 %equal, i{bits} %other, i{bits} %old""",
    "inc": """  %over.limit = icmp uge i{bits} %old, %x
  %next = add i{bits} %old, 1
  %new = select i1 %over.limit, i{bits} 0, i{bits} %next""",
    "dec": """  %less.one = sub i{bits} %old, 1
  %outside = icmp uge i{bits} %less.one, %x
  %new = select i1 %outside, i{bits} %x, i{bits} %less.one""",
}
"""The new value `%new` of an atomic access, from the old one and `%x`."""


def update(how: str, type_name: str, flushing: bool) -> str:
    """Returns the function of an atomic access, lane after lane, of operands that get the old values' place; cas has its second
    operands behind them. It returns 1 if a sum is NaN, or not the one without flushing.
    """
    kind, bits = type_name[0], int(type_name[1:])
    odd = "  %odd2 = or i32 %odd, 0"
    if kind == "f":
        of = "float" if bits == 32 else "double"
        apply = f"""  %ro = bitcast i{bits} %old to {of}
  %rx = bitcast i{bits} %x to {of}
  %fn = fadd {of} %ro, %rx
  %isnan = fcmp uno {of} %fn, %fn{FLUSHED if flushing and bits == 32 else f"{chr(10)}  %flushes = or i1 false, false"}
  %nan = or i1 %isnan, %flushes
  %nan32 = zext i1 %nan to i32
  %odd2 = or i32 %odd, %nan32
  %new = bitcast {of} %fn to i{bits}"""
    elif how in ("min", "max"):
        test = ("s" if kind == "s" else "u") + ("lt" if how == "min" else "gt")
        apply = f"{odd}\n  %less.or.more = icmp {test} i{bits} %x, %old\n  %new = select i1 %less.or.more, i{bits} %x, i{bits} %old"
    else:
        apply = f"{odd}\n{NEW.get(how, '  %new = {how} i{bits} %old, %x').format(how=how, bits=bits)}"
    return UPDATE.substitute(HOW=how, TYPE=type_name, BITS=bits, APPLY=apply)
