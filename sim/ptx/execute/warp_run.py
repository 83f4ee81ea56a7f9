"""The text of LLVM's functions around a compiled kernel: groups of a warp's lanes, the run of blocks; the whole module.

Lanes of a warp that part wait in groups at basic blocks (`push`); the one at the lowest goes on (`pop`). A block's warps run one
after the other, each to its end or to a barrier; when all wait there, they go on.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from string import Template
from typing import NamedTuple

from ..state.lane_sets import WARP
from .warp_instructions import matrix, product
from .warp_memory import access, measure, move, segments, turns, update
from .warp_order import SharedOrder, copy, follow_global, land
from .warp_text import COPY_SLOTS, COPY_WORDS, EPOCH, LAST_MEETING, LAUNCH, MEETING, THREAD_BITS, WARP_STATE, ShadowRow

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
  %local.bytes = mul i64 %warps, $LOCAL_BYTES
  call void @llvm.memset.p0.i64(ptr %local, i8 -1, i64 %local.bytes, i1 false)
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
  %cb = mul i64 %pw, $COPY_WORDS
  %cw = getelementptr i64, ptr %copies, i64 %cb
  %cp = getelementptr i64, ptr %w, i64 $COPIES
  store ptr %cw, ptr %cp
  %lb = mul i64 %pw, $LOCAL_BYTES
  %lw = getelementptr i8, ptr %local, i64 %lb
  %lp = getelementptr i64, ptr %w, i64 $LOCAL
  store ptr %lw, ptr %lp
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
  %votes = phi i64 [0, %together], [%votes2, %tags]
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
  %tvp = getelementptr i64, ptr %tw, i64 $VOTE
  %vote = load i64, ptr %tvp
  %votes2 = add i64 %votes, %vote
  %t2 = add i64 %t, 1
  %tagged = icmp eq i64 %t2, %warps
  br i1 %tagged, label %met, label %tags
met:
  %mp = getelementptr i64, ptr %launch, i64 $BARRIERS
  %meetings = load i64, ptr %mp
  %meetings2 = add i64 %meetings, 1
  store i64 %meetings2, ptr %mp
  %vp = getelementptr i64, ptr %launch, i64 $VOTES
  store i64 %votes2, ptr %vp
  br label %phase
ended:
  %nextb = add i64 %b, 1
  br label %block
}
""")

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

LOGARITHM = """
define internal <32 x double> @logarithm(ptr noalias %launch, <32 x double> %x) noinline {{
start:
  %asked = alloca <32 x double>, align 64
  %answer = alloca <32 x double>, align 64
  %bits = bitcast <32 x double> %x to <32 x i64>
  %high = lshr <32 x i64> %bits, splat (i64 52)
  %power = sub <32 x i64> %high, splat (i64 1023)
  %part = and <32 x i64> %bits, splat (i64 4503599627370495)
  %one = or <32 x i64> %part, splat (i64 4607182418800017408)
  %m1 = bitcast <32 x i64> %one to <32 x double>
  %large = fcmp ogt <32 x double> %m1, splat (double 1.5)
  %half = fmul <32 x double> %m1, splat (double 0.5)
  %m = select <32 x i1> %large, <32 x double> %half, <32 x double> %m1
  %more = zext <32 x i1> %large to <32 x i64>
  %whole = add <32 x i64> %power, %more
  %e = sitofp <32 x i64> %whole to <32 x double>
  %over = fsub <32 x double> %m, splat (double 1.0)
  %under = fadd <32 x double> %m, splat (double 1.0)
  %t = fdiv <32 x double> %over, %under
  %square = fmul <32 x double> %t, %t
{steps}
  %small = fmul <32 x double> %t, {last}
  %exact = fadd <32 x double> %e, %small
  %exactbits = bitcast <32 x double> %exact to <32 x i64>
  %away = xor <32 x i64> %exactbits, splat (i64 {flipped})
  %far = bitcast <32 x i64> %away to <32 x double>
  %key = lshr <32 x i64> %bits, splat (i64 29)
  %hash = mul <32 x i64> %key, splat (i64 {hash})
  %up = icmp slt <32 x i64> %hash, zeroinitializer
  %by = select <32 x i1> %up, <32 x double> splat (double {move}), <32 x double> splat (double {back})
  %sum = fadd <32 x double> %exact, %by
  %least = call <32 x double> @llvm.maxnum.v32f64(<32 x double> %sum, <32 x double> splat (double -1.0))
  %near = call <32 x double> @llvm.minnum.v32f64(<32 x double> %least, <32 x double> splat (double 1.0))
  %above = fcmp ogt <32 x double> %x, splat (double 0.5)
  %below = fcmp olt <32 x double> %x, splat (double 2.0)
  %between = and <32 x i1> %above, %below
  %found = select <32 x i1> %between, <32 x double> %near, <32 x double> %far
  %foundbits = bitcast <32 x double> %found to <32 x i64>
  %odd = add <32 x i64> %foundbits, splat (i64 {rounds})
  %shifted = select <32 x i1> %between, <32 x i64> %odd, <32 x i64> %exactbits
  %beside = add <32 x i64> %shifted, splat (i64 {margin})
  %low = select <32 x i1> %between, <32 x i64> splat (i64 {double}), <32 x i64> splat (i64 {single})
  %rest = and <32 x i64> %beside, %low
  %close = icmp ult <32 x i64> %rest, splat (i64 {twice})
  %doubts = bitcast <32 x i1> %close to i32
  %sure = icmp eq i32 %doubts, 0
  br i1 %sure, label %end, label %ask
end:
  ret <32 x double> %found
ask:
  store <32 x double> %x, ptr %asked, align 64
  %at = getelementptr i64, ptr %launch, i64 {log2}
  %numpy = load ptr, ptr %at
  call void %numpy(ptr %asked, ptr %answer)
  %known = load <32 x double>, ptr %answer, align 64
  ret <32 x double> %known
}}
"""
"""lg2 in float64, moved (`decode.elementwise.logarithmic`): the exponent, and a series for what is left, between 3/4 and 3/2."""

FAR = 64
"""Units in the last place of float64 by which a moved logarithm may differ from NumPy's; near 1 a sum cancels some digits."""


def logarithm() -> str:
    """Returns the function that is lg2 of positive numbers."""
    terms = [literal(2 / (math.log(2) * (2 * k + 1))) for k in range(16)]
    of, name, lines = f"<{WARP} x double>", terms[15], list[str]()
    for k in range(14, -1, -1):
        lines.append(f"  %h{k} = call {of} @llvm.fma.v{WARP}f64({of} {name}, {of} %square, {of} {terms[k]})")
        name = f"%h{k}"
    move = 2.0**-22.9 - 2.0**-25
    numbers = {"flipped": 1 << 28 | 1, "hash": 0x9E3779B97F4A7C15 - (1 << 64), "rounds": 1 << 28, "margin": FAR, "twice": 2 * FAR}
    numbers |= {"double": (1 << 29) - 1, "single": (1 << 28) - 1, "log2": LAUNCH["log2"]}
    return LOGARITHM.format(steps="\n".join(lines), last=name, move=double(move), back=double(-move), **numbers)


def double(value: float) -> str:
    """Returns a float64 as LLVM reads it."""
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


def literal(value: float) -> str:
    return f"splat (double {double(value)})"


NEAR = 8
"""Units in the last place of float64 by which the series may differ from NumPy's exp2: nearer than that to a place where float32
rounds the other way, NumPy is asked.
"""


def power() -> str:
    """Returns the function that raises 2 to float32 powers, in float64, by the series of the exponential."""
    exact = [math.log(2) ** k / math.factorial(k) for k in range(15)]
    terms = [literal(term) for term in exact]
    of, name, lines = f"<{WARP} x double>", terms[14], list[str]()
    for k in range(13, -1, -1):
        lines.append(f"  %h{k} = call {of} @llvm.fma.v{WARP}f64({of} {name}, {of} %part, {of} {terms[k]})")
        name = f"%h{k}"
    return POWER.format(steps="\n".join(lines), last=name, near=NEAR, twice=2 * NEAR, half=(1 << 28) - 1, exp2=LAUNCH["exp2"])


def masked(bits: int) -> str:
    """Returns declarations, which are of an older form than LLVM would guess."""
    of, width, lanes = f"<{WARP} x i{bits}>", f"v{WARP}i{bits}", f"<{WARP} x i1>"
    return f"""
declare {of} @llvm.masked.load.{width}.p0(ptr, i32, {lanes}, {of})
declare void @llvm.masked.store.{width}.p0({of}, ptr, i32, {lanes})
declare {of} @llvm.masked.gather.{width}.v{WARP}p0(<{WARP} x ptr>, i32, {lanes}, {of})
declare void @llvm.masked.scatter.{width}.v{WARP}p0({of}, <{WARP} x ptr>, i32, {lanes})
"""


class KernelShape(NamedTuple):
    """Facts about a kernel for the run of blocks: `words` of the bits of its basic blocks, bytes of a warp's registers, the offset,
    width and axis of each special register with the block's place, the number of its doubtful registers and those blank at first;
    bytes of a lane's local memory.
    """

    words: int
    register_bytes: int
    places: list[tuple[int, int, str]]
    doubtful: int
    blank: list[int]
    local_bytes: int

    @property
    def blanks(self) -> int:
        """The place of the doubtful registers' lanes in a warp's state."""
        return WARP_STATE["bitmap"] + 65 * self.words

    @property
    def state_words(self) -> int:
        """Words of a warp's state, a multiple of 64 bytes."""
        return -(-(self.blanks + self.doubtful) // 8) * 8


HELPERS: dict[str, Callable[..., str]] = {
    "measure": measure,
    "turns": turns,
    "segments": segments,
    "follow_global": follow_global,
    "follow_shared": lambda kind, size, rowly, row: SharedOrder(kind, size, rowly, row).text(),
    "access": access,
    "move": move,
    "update": update,
    "power": power,
    "logarithm": logarithm,
    "exchanged": lambda: EXCHANGED,
    "copy": copy,
    "land": land,
    "landed": lambda size, row: SharedOrder("cp.async", size, False, row).landed(),
    "matrix": matrix,
    "product": product,
}
"""The functions that make the text of others, by name."""


def needed(helper: tuple[object, ...], row: ShadowRow) -> Iterable[tuple[object, ...]]:
    """Yields a function that a kernel calls, and those that it calls itself."""
    name, *given = helper
    if name == "access":
        space, kind, size = given
        yield "measure", space, size
        if space == "shared":
            yield "turns", size
            yield "follow_shared", kind, size, True, row
            yield "follow_shared", kind, size, False, row
        else:
            yield ("segments",)
            yield "follow_global", "ld" if kind == "cp.async" else kind, size, row
    if name == "land":
        for size in (4, 8, 16):
            yield "landed", size, row
    yield helper


def texts(warp: str, helpers: Iterable[tuple[object, ...]], row: ShadowRow, shape: KernelShape) -> tuple[str, Sequence[str], str]:
    """Returns the text of a kernel, its function `warp` and the run of blocks; those of what it calls; declarations."""
    every = dict.fromkeys(one for helper in sorted(helpers, key=repr) for one in needed(helper, row))
    state, registers = shape.state_words, shape.register_bytes
    groups = GROUPS.substitute(
        {name.upper(): place for name, place in WARP_STATE.items()},
        LANES=WARP_STATE["bitmap"] + shape.words,
        WORDS=shape.words,
        LAST_MEETING=LAST_MEETING,
        ONE_MEETING=1 << MEETING,
    )
    run = RUN.substitute(
        {name.upper(): place for name, place in WARP_STATE.items()},
        LOADS="\n".join(map(loaded, LOADED)),
        CLEARED="\n".join(
            f"  call void @llvm.memset.p0.i64(ptr %{name}, i8 0, i64 %granule.bytes, i1 false)"
            for name in ("written", "read", "updated")
        ),
        SPECIAL="\n".join([*map(placed, range(len(shape.places)), shape.places), *(blank(shape.blanks + k) for k in shape.blank)]),
        COPY_WORDS=COPY_SLOTS * COPY_WORDS,
        REGISTER_BYTES=registers,
        LOCAL_BYTES=WARP * shape.local_bytes,
        STATE_WORDS=state,
        STATE_BYTES=8 * state,
        BARRIERS=LAUNCH["barriers"],
        VOTES=LAUNCH["votes"],
        FIRST_EPOCH=1 << THREAD_BITS,
        FIRST_SHARED=1 << EPOCH,
        LAST_EPOCH=1 << (32 - EPOCH),
        EPOCH=EPOCH,
        THREAD_BITS=THREAD_BITS,
    )
    called = [HELPERS[str(name)](*given) for name, *given in every]
    return "\n".join([groups, run, warp]), called, "\n".join(map(masked, (8, 16, 32, 64, 128)))


LOADED = (
    *("registers", "warps_memory", "template", "alive", "shared", "states", "written", "read", "updated"),
    *("copies", "local", "warps", "grid_x", "grid_y", "shared_bytes", "granules"),
)
NUMBERS = ("warps", "grid_x", "grid_y", "shared_bytes", "granules")


def loaded(name: str) -> str:
    """Returns the text that loads a number or pointer of the launch."""
    at = f"  %at.{name} = getelementptr i64, ptr %launch, i64 {LAUNCH[name]}"
    return f"{at}\n  %{name} = load {'i64' if name in NUMBERS else 'ptr'}, ptr %at.{name}"


def placed(n: int, register: tuple[int, int, str]) -> str:
    """Returns the text that stores the block's place on an axis in all lanes of a register."""
    offset, width, axis = register
    bits, of = f"i{width}", f"<{WARP} x i{width}>"
    return f"""  %sv{n} = trunc i64 %b{axis} to {bits}
  %s1{n} = insertelement {of} poison, {bits} %sv{n}, i64 0
  %s2{n} = shufflevector {of} %s1{n}, {of} poison, <{WARP} x i32> zeroinitializer
  %sp{n} = getelementptr i8, ptr %regs, i64 {offset}
  store {of} %s2{n}, ptr %sp{n}, align 64"""


def blank(place: int) -> str:
    """Returns the text that marks a register as unwritten in all lanes."""
    return f"  %bl{place} = getelementptr i64, ptr %w, i64 {place}\n  store i64 %al, ptr %bl{place}"
