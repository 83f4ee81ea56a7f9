"""Control flow, barriers and mbarriers (PTX ISA, "Control Flow Instructions", "Parallel Synchronization and Communication").

The scheduler acts on these; here they are only decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..memory.ports import PORTS
from ..memory.swizzles import MAP_BYTES
from ..order.shadow import BLOCK, scope_of
from ..state.lane_sets import WARP, LaneSet
from ..text.syntax import SINK, Array, Group, Imm, Mem, Not, Operand, PtxInstruction, Sym, Unsupported
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
        return on_objects(i, memory, "atom", lambda f, lanes, keys, v: f.machine.mbarriers.invalidate(keys))
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
