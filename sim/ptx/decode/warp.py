"""Communication between the lanes of a warp (PTX ISA, "Parallel Synchronization and Communication": shfl, vote, match,
redux, activemask, elect; "Special registers").

The run loop has made sure that every lane named in the member mask is in the frame. If the frame has whole warps,
arrays over the lanes reshape to (warps, 32); else values go through an array over the wave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..state.lane_sets import WARP, run_starts, warp_bits
from ..text.syntax import Array, Not, Pair, PtxInstruction, Unsupported
from .registry import Arrays, Frame, Plan, Thunk, act, args, opcode, pair, taken

if TYPE_CHECKING:
    from ..state.lane_sets import LaneSet

_LANE = np.arange(WARP)
_NOTHING = np.empty(0, np.int64)


def source_lanes(mode: str, b: Array, c: Array, lane: Array) -> tuple[Array, Array]:
    """Returns (source lane, in range) of shfl, after the pseudo code of the ISA; all arguments broadcast."""
    step, segment, clamp = b & 31, (c >> 8) & 31, c & 31
    last = (lane & segment) | (clamp & ~segment)
    first = lane & segment
    if mode == "up":
        source = lane - step
        inside = source >= last
    elif mode == "down":
        source = lane + step
        inside = source <= last
    elif mode == "bfly":
        source = lane ^ step
        inside = source <= last
    else:
        source = first | (step & ~segment)
        inside = source <= last
    return np.where(inside, source, lane), inside


@opcode("shfl", forms=".sync .up .down .bfly .idx .b32, with d|p")
def shfl(i: PtxInstruction) -> Plan:
    _, mode, _ = taken(i, "!sync", "!up down bfly idx", "!b32")
    target, a, b, c, mask = i.operands

    def bind(frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
        value, by, clamp, member = ins
        d, p = out
        if by.ndim == 0 and clamp.ndim == 0 and frame.n % WARP == 0:
            fixed, inside = source_lanes(mode, np.array(int(by)), np.array(int(clamp)), _LANE)
            flat_source = (np.arange(frame.n) & ~31) + np.tile(fixed, frame.n // WARP)
            flat_inside = np.tile(inside, frame.n // WARP)
        else:
            flat_source, flat_inside = _NOTHING, _NOTHING
        constant = int(member) if member.ndim == 0 else None
        buffer = np.empty(frame.n, np.uint32)

        def run() -> None:
            lanes = frame.lanes
            whole = lanes.whole_warps
            if whole and len(flat_source):
                source, inside = flat_source, flat_inside
            else:
                lane = lanes.lane
                source, inside = source_lanes(mode, by.astype(np.int64), clamp.astype(np.int64), lane)
                source = source + (np.arange(frame.n) & ~31 if whole else 0)
            full = np.broadcast_to(value, frame.n)
            if not whole:
                source, active = partners(lanes, source)
                if not active.all():
                    complain(frame, i, ~active)
            if constant != 0xFFFFFFFF:
                named = np.broadcast_to(member, frame.n)
                place = lanes.lane[source] if not whole else source & 31
                missing = ((named >> place.astype(np.uint32)) & np.uint32(1)) == 0
                if missing.any():
                    complain(frame, i, missing)
            full.take(source, 0, buffer, "clip")
            np.copyto(d, buffer)
            np.copyto(p, inside)

        return run

    reads = args("b32 u32 u32 u32", a, b, c, mask)
    return Plan(args("b32 pred", *pair(target)), reads, bind, collective=3, pure=False)


def partners(lanes: LaneSet, lane: Array) -> tuple[Array, Array]:
    """Returns positions in the set of the lanes `lane` of each one's warp, and a mask of those in the set (else: itself)."""
    wanted = (lanes.warp << 5) + lane
    found = np.minimum(np.searchsorted(lanes.index, wanted), lanes.n - 1)
    active = lanes.index[found] == wanted
    return np.where(active, found, np.arange(lanes.n)), active


def complain(frame: Frame, i: PtxInstruction, bad: Array) -> None:
    message = "shuffle from a lane that does not take part: the value is undefined"
    frame.machine.memory.findings.report("inactive source", message, i, frame.lanes, np.flatnonzero(bad))


def by_warp(fn: Callable[[LaneSet, Array, Array], Array], i: PtxInstruction, result: str, value: str) -> Plan:
    """Returns a plan for d = fn(lanes, value, mask), both arrays over the lanes of the set."""
    d, a, mask = i.operands

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        source, named = (np.broadcast_to(x, frame.n) for x in ins)
        out[0][...] = fn(frame.lanes, ~source if isinstance(a, Not) else source, named)

    return act(run, args(result, d), args(f"{value} u32", a.reg if isinstance(a, Not) else a, mask), collective=1)


def ballot(lanes: LaneSet, p: Array, mask: Array) -> Array:
    """Returns for each lane the bits of the lanes of its warp in the set for which p holds, limited to its mask."""
    member = np.zeros(lanes.wave.size, bool)
    member[lanes.index] = p
    return warp_bits(member)[lanes.warp] & mask


def _everyone(lanes: LaneSet, mask: Array) -> Array:
    return lanes.bits()[lanes.warp] & mask


@opcode("vote", forms=".sync .all .any .uni .pred, .ballot .b32")
def vote(i: PtxInstruction) -> Plan:
    _, mode, _ = taken(i, "!sync", "!all any uni ballot", "!pred b32")
    table: dict[str, Callable[[LaneSet, Array, Array], Array]] = {
        "ballot": ballot,
        "any": lambda lanes, p, mask: ballot(lanes, p, mask) != 0,
        "all": lambda lanes, p, mask: ballot(lanes, p, mask) == _everyone(lanes, mask),
        "uni": lambda lanes, p, mask: (ballot(lanes, p, mask) == 0) | (ballot(lanes, p, mask) == _everyone(lanes, mask)),
    }
    return by_warp(table[mode], i, "b32" if mode == "ballot" else "pred", "pred")


def groups(lanes: LaneSet, mask: Array, value: Array | None = None) -> Array:
    """Returns the number of the group of each lane: same warp, same mask (and same value)."""
    columns = [lanes.warp, mask.astype(np.int64)]
    if value is not None:
        columns.append(value.view(np.int64) if value.itemsize == 8 else value.astype(np.int64))
    _, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return np.asarray(inverse).reshape(-1)


def equal_lanes(lanes: LaneSet, value: Array, mask: Array) -> Array:
    group = groups(lanes, mask, np.ascontiguousarray(value))
    bits = np.zeros(int(group.max()) + 1, np.uint32)
    np.bitwise_or.at(bits, group, np.uint32(1) << lanes.lane.astype(np.uint32))
    return bits[group]


@opcode("match", forms=".any .all .sync .b32 .b64, d|p for .all")
def match(i: PtxInstruction) -> Plan:
    _, mode, _ = taken(i, "!sync", "!any all", "!b32 b64")
    type_ = i.type
    if mode == "any":
        return by_warp(equal_lanes, i, "b32", type_.name)
    target, a, mask = i.operands

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        named = np.broadcast_to(ins[1], frame.n)
        equal = equal_lanes(frame.lanes, np.broadcast_to(ins[0], frame.n), named)
        everyone = _everyone(frame.lanes, named)
        agreed = equal == everyone
        out[0][...] = np.where(agreed, everyone, np.uint32(0))
        out[1][...] = agreed

    return act(run, args("b32 pred", *pair(target)), args(f"{type_.name} u32", a, mask), collective=1)


@opcode("redux", forms=".sync .add .min .max .u32 .s32, .and .or .xor .b32, .min .max {.abs}{.NaN} .f32")
def redux(i: PtxInstruction) -> Plan:
    _, name, magnitude, nan, _ = taken(i, "!sync", "!add min max and or xor", "abs", "NaN", "!u32 s32 b32 f32")
    type_ = i.type
    if ((magnitude or nan) and type_.kind != "f") or (type_.kind == "f" and name not in ("min", "max")):
        raise Unsupported("this redux")
    fn = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[name]
    if type_.kind == "f" and not nan:
        fn = {"min": np.fmin, "max": np.fmax}[name]

    def reduce(lanes: LaneSet, value: Array, mask: Array) -> Array:
        group = groups(lanes, mask)
        order = np.argsort(group, kind="stable")
        starts = run_starts(group[order])
        reduced = fn.reduceat(np.abs(value[order]) if magnitude else value[order], starts, dtype=value.dtype)
        return reduced[group]

    return by_warp(reduce, i, type_.name, type_.name)


@opcode("activemask", forms=".b32")
def activemask(i: PtxInstruction) -> Plan:
    taken(i, "!b32")

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        out[0][...] = frame.lanes.bits()[frame.lanes.warp]

    return act(run, args("b32", *i.operands))


@opcode("elect", forms=".sync d|p")
def elect(i: PtxInstruction) -> Plan:
    taken(i, "!sync")
    target, mask = i.operands
    if not isinstance(target, Pair):
        raise Unsupported("elect")

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        bits = _everyone(frame.lanes, np.broadcast_to(ins[0], frame.n)).astype(np.int64)
        leader = np.frexp((bits & -bits).astype(np.float64))[1] - 1
        out[0][...] = leader
        out[1][...] = frame.lanes.lane == leader

    return act(run, args("b32 pred", *pair(target)), args("u32", mask), collective=0)
