"""Control flow, barriers and mbarriers, communication between the lanes of a warp (PTX ISA, "Control Flow Instructions",
"Parallel Synchronization and Communication").

The scheduler acts on the former; here they are only decoded. Of the lanes of a warp (shfl, vote, match, redux, activemask, elect)
the run loop has made sure that every lane named in the member mask is in the frame. If the frame has whole warps, arrays over the
lanes reshape to (warps, 32); else values go through an array over the wave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..memory.ports import PORTS
from ..memory.swizzles import MAP_BYTES
from ..order.shadow import BLOCK, scope_of
from ..state.lane_sets import WARP, LaneSet, run_starts, warp_bits
from ..text.syntax import SINK, Array, Group, Imm, Mem, Not, Operand, Pair, PtxInstruction, Sym, Unsupported
from .access import address_arg, address_thunk
from .registry import (
    WHOLE_WARP,
    Arg,
    Arrays,
    Barrier,
    Branch,
    ClusterBarrier,
    Exit,
    Frame,
    FunctionCall,
    PhaseWait,
    Plan,
    RegisterCount,
    Return,
    Thunk,
    WarpBarrier,
    act,
    args,
    opcode,
    pair,
    pure,
    taken,
)

MOST_BARRIERS = 16
"""Most barriers of a thread block."""


@opcode("bra", forms="{.uni} label")
def bra(i: PtxInstruction) -> Plan:
    taken(i, "uni")
    (target,) = i.operands
    if not isinstance(target, Sym):
        raise Unsupported("branch to something that is no label")
    return Plan((), (), control=Branch(target.name))


@opcode("brx", forms=".idx{.uni} through .branchtargets")
def brx(i: PtxInstruction) -> Plan:
    taken(i, "!idx", "uni")
    index, table = i.operands
    if not isinstance(table, Sym):
        raise Unsupported("no table")
    return Plan((), args("u32", index), control=Branch(table=table.name))


@opcode("exit", "trap", "brkpt", forms="ends the threads; trap also ends the launch")
def leave(i: PtxInstruction) -> Plan:
    taken(i)
    return Plan((), (), control=Exit(trap=i.opcode != "exit"))


@opcode("ret", forms="{.uni}")
def ret(i: PtxInstruction) -> Plan:
    taken(i, "uni")
    return Plan((), (), control=Return())


def names(operand: object) -> tuple[str, ...]:
    if not isinstance(operand, Group):
        raise Unsupported("expected a parenthesised list")
    out = []
    for item in operand.items:
        if not isinstance(item, Sym):
            raise Unsupported("register or constant arguments")
        out.append(item.name)
    return tuple(out)


@opcode(
    "call",
    forms="{.uni} (result), function or register, (arguments){, prototype}; recursion without local arrays; vprintf, malloc, free",
)
def call(i: PtxInstruction) -> Plan:
    taken(i, "uni")
    operands = list(i.operands)
    results = names(operands.pop(0)) if isinstance(operands[0], Group) else ()
    function = operands.pop(0)
    arguments = names(operands.pop(0)) if operands and isinstance(operands[0], Group) else ()
    if isinstance(function, Sym):
        return Plan((), (), control=FunctionCall(function.name, results, arguments))
    # The prototype or the list of targets follows: the functions that fit are found without it.
    return Plan((), args("u64", function), control=FunctionCall("", results, arguments))


@opcode(
    "bar",
    "barrier",
    forms="{.cta}{.sync .arrive .red.popc .red.and .red.or}{.aligned}; bar.warp.sync; "
    "barrier.cluster{.arrive{.release .relaxed} .wait{.acquire}}{.aligned}",
)
def bar(i: PtxInstruction) -> Plan:
    if i.opcode == "barrier" and "cluster" in i.mods:
        waits = "wait" in i.mods
        *_, order = taken(i, "cluster", "!arrive wait", "aligned", "acquire" if waits else "release relaxed")
        if i.operands:
            raise Unsupported("this barrier.cluster")
        return Plan((), (), control=ClusterBarrier(waits, order == "relaxed"))
    if "warp" in i.mods:
        taken(i, "warp", "sync", "aligned")
        return Plan((), args("u32", i.operands[0]), control=WarpBarrier())
    action, reduction, *_ = taken(i, "!sync arrive red", "!popc and or" if "red" in i.mods else "", "cta", "aligned", "pred u32")
    operands = list(i.operands)
    writes = args("u32" if reduction == "popc" else "pred", operands.pop(0)) if reduction else ()
    predicate = operands.pop() if reduction else SINK
    negated = isinstance(predicate, Not)
    reads = args("u32", *operands)
    if reduction:
        reads += args("pred", predicate.reg if isinstance(predicate, Not) else predicate)
    counted = len(operands) == 2
    if operands and isinstance(operands[0], Imm) and not 0 <= operands[0].value < MOST_BARRIERS:
        raise Unsupported(f"a barrier's number is from 0 to {MOST_BARRIERS - 1}")
    if counted and isinstance(operands[1], Imm) and operands[1].value % WARP:
        raise Unsupported("whole warps take part in a barrier")
    if action == "arrive" and not counted:
        raise Unsupported("arrive without a number of threads")
    return Plan(writes, reads, control=Barrier(counted, action != "arrive", reduction, negated))


@opcode("membar", "fence", forms="orders accesses for the race detector: execution is sequentially consistent anyway")
def fence(i: PtxInstruction) -> Plan:
    if "tensormap::generic" in i.mods:
        return map_fence(i)
    scope = scope_of(i.mods)
    inits = "mbarrier_init" in i.mods
    proxy = any(m.startswith("proxy") for m in i.mods) and any("async" in m for m in i.mods)
    # fence.mbarrier_init.release.cluster is the part of such a fence that concerns mbarrier.init.
    releases = scope != BLOCK and "proxy" not in i.mods and "acquire" not in i.mods

    def bind(frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
        machine = frame.machine
        races = machine.memory.races

        def announce() -> None:
            machine.mbarriers.fence(frame.lanes)
            if inits and races is not None:
                races.fence_inits(frame.lanes)
            # A fence that orders ordinary accesses behind asynchronous ones has no effect on that proxy.
            if races is not None and proxy and "acquire" not in i.mods:
                races.fence_proxy(frame.lanes, i)

        def order() -> None:
            if releases:
                machine.mbarriers.fence(frame.lanes)
            if races is not None:
                races.fence(frame.lanes, scope)
            if machine.mbarriers.relaxed and "release" not in i.mods:
                machine.mbarriers.acquire(frame.lanes)

        if inits or proxy:
            return announce
        return _pass if "proxy" in i.mods else order

    return Plan((), (), bind, pure=False)


@opcode("setmaxnreg", forms=".inc .dec .sync.aligned.u32, 24 to 256 registers by 8")
def setmaxnreg(i: PtxInstruction) -> Plan:
    action, *_ = taken(i, "!inc dec", "sync", "aligned", "!u32")
    (count,) = i.operands
    if not isinstance(count, Imm) or count.value % 8 or not 24 <= count.value <= 256:
        raise Unsupported("setmaxnreg takes .inc or .dec and a multiple of 8 from 24 to 256")
    return Plan((), (), control=RegisterCount(count.value, action == "inc"), collective=WHOLE_WARP)


def map_fence(i: PtxInstruction) -> Plan:
    """fence.proxy.tensormap::generic: .release of stores of the threads into tensor maps, .acquire of the 128 bytes of one."""
    acquires = "acquire" in i.mods
    base, offset = address_arg(i.operands[0], "generic") if acquires else (None, 0)
    if acquires and i.operands[1] != Imm(MAP_BYTES):
        raise Unsupported(f"the size must be {MAP_BYTES}")

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        maps = frame.machine.bulks.maps
        if acquires:
            maps.acquire(np.broadcast_to(ins[0], frame.n).astype(np.int64) + offset)
        else:
            maps.release(frame.lanes)

    return act(run, (), (base,) if base else ())


@opcode("griddepcontrol", forms=".wait .launch_dependents: order launches of one stream, else of no effect")
def griddepcontrol(i: PtxInstruction) -> Plan:
    (action,) = taken(i, "!wait launch_dependents")
    if i.operands:
        raise Unsupported("griddepcontrol takes .wait or .launch_dependents")

    def bind(frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
        races = frame.machine.memory.races
        launches = None if races is None else races.launches
        if launches is None:
            return _pass
        act = launches.wait if action == "wait" else launches.let_go
        return lambda: act(frame.lanes)

    return Plan((), (), bind, pure=False)


@opcode("nanosleep", "pmevent", forms="no effect")
def nothing(i: PtxInstruction) -> Plan:
    return Plan((), (), lambda frame, out, ins: _pass)


def _pass() -> None:
    pass


Act = Callable[["Frame", LaneSet, Array, Sequence[Array]], Array | None]
"""The operation for lanes at objects (int64, one a lane), given the other operands; the result is one a lane."""


def on_objects(
    i: PtxInstruction, memory: Operand, kind: str, act: Act, result: tuple[Arg, ...] = (), others: tuple[Arg, ...] = ()
) -> Plan:
    """Returns a plan that calls `act` for the lanes whose address is good."""
    space = object_space(i)
    base, offset = address_arg(memory, space)

    def bind(frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
        address = address_thunk(frame, ins[0], offset)
        port = PORTS[space](frame.machine.memory, i, frame.n, 8, kind)

        def run() -> None:
            values = [np.broadcast_to(v, frame.n) for v in ins[1:]]
            if kind == "st":
                # The content is the machine's own: the count, so that barriers with equal initialisation have equal bytes.
                port.memory.storing(frame.lanes, values[0].astype(np.uint64))
            for _, index, positions in port.resolve(frame.lanes, address()):
                lanes = frame.lanes if positions is None else frame.lanes.subset(positions)
                chosen = [v.copy() if positions is None else v[positions] for v in values]
                found = act(frame, lanes, index.astype(np.int64), chosen)
                if found is not None and out:
                    out[0][positions if positions is not None else slice(None)] = found
            port.memory.stored()

        return run

    return Plan(result, (base, *others), bind, pure=False)


def object_space(i: PtxInstruction) -> str:
    if "shared::cluster" in i.mods and i.opcode == "mbarrier":
        if i.operands[0] != SINK and not isinstance(i.operands[0], Mem):
            raise Unsupported("only arrivals without a result reach other blocks")
        return "shared::cluster"
    return "shared" if {"shared", "shared::cta", "shared::cluster"} & set(i.mods) else "generic"


HINTS = ("release acquire relaxed", "cta cluster", "shared shared::cta shared::cluster", "b64")
WAITS = dict.fromkeys(("test_wait", "try_wait"), ("parity",))
ARRIVALS = dict.fromkeys(("arrive", "arrive_drop"), ("expect_tx", "noComplete"))
MBARRIER: dict[str, tuple[str, ...]] = {**dict.fromkeys(("init", "inval", "pending_count"), ()), **WAITS, **ARRIVALS}
"""Modifiers of mbarrier by action; without one it counts bytes."""

ONE = Imm(1)


@opcode(
    "mbarrier",
    forms="{.shared{::cta}}.b64: .init .inval, .arrive .arrive_drop {.expect_tx .noComplete}, .expect_tx .complete_tx, "
    ".test_wait .try_wait {.parity}, .pending_count; .shared::cluster: .arrive{.expect_tx} to _, .expect_tx .complete_tx",
)
def mbarrier(i: PtxInstruction) -> Plan:
    action = next((name for name in MBARRIER if name in i.mods), "")
    taken(i, action, *MBARRIER.get(action, ("!expect_tx complete_tx",)), *HINTS)
    expects, parity = "expect_tx" in i.mods, "parity" in i.mods
    if action in WAITS:
        done, memory, state = i.operands[:3]
        space = object_space(i)
        base, offset = address_arg(memory, space)
        control = PhaseWait(space, offset, parity, action == "try_wait")
        return Plan(args("pred", done), (base, *args("u32" if parity else "u64", state)), control=control)
    if action == "pending_count":
        d, state = i.operands
        low = lambda d, s: lambda: np.copyto(d, s & np.uint64(0xFFFFFFFF), casting="unsafe")  # noqa: E731
        return pure(low, args("u32", d), args("u64", state))
    if action == "init":
        memory, count = i.operands

        def init(frame: Frame, lanes: LaneSet, keys: Array, values: Sequence[Array]) -> None:
            frame.machine.mbarriers.init(lanes, keys, values[0], i)
            frame.machine.memory.shared[8].view(np.uint64)[keys] = values[0]

        return on_objects(i, memory, "st", init, (), args("u32", count))
    if action == "inval":
        (memory,) = i.operands
        return on_objects(i, memory, "atom", lambda f, lanes, keys, v: f.machine.mbarriers.invalidate(lanes, keys, i))
    if not action:
        memory, amount = i.operands

        def transact(frame: Frame, lanes: LaneSet, keys: Array, values: Sequence[Array]) -> None:
            amounts = values[0].astype(np.int64)
            frame.machine.mbarriers.expect(lanes, keys, amounts if expects else -amounts, i)

        return on_objects(i, memory, "atom", transact, (), args("u32", amount))
    state, memory, *rest = i.operands if not isinstance(i.operands[0], Mem) else (SINK, *i.operands)

    def arrive(frame: Frame, lanes: LaneSet, keys: Array, values: Sequence[Array]) -> Array:
        barriers, number = frame.machine.mbarriers, values[0].astype(np.int64)
        if expects:
            barriers.expect(lanes, keys, number, i)
        if "noComplete" in i.mods:
            barriers.must_stay(lanes, keys, number, i)
        return barriers.arrive(lanes, keys, np.ones_like(number) if expects else number, action == "arrive_drop", i)

    return on_objects(i, memory, "atom", arrive, args("u64", state), args("u32", *rest[:1] or [ONE]))


# -- lanes of a warp -------------------------------------------------------------------------------------------------------

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
