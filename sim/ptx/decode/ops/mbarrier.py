"""mbarrier (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier"): reads operands; `memory.phases` acts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...memory.ports import PORTS
from ...order.agreeing import Stored
from ...state.lanes import Lanes
from ...text.types import TYPES, Array
from ..registry import (
    SINK,
    Arg,
    Frame,
    Imm,
    Instruction,
    Mem,
    Mods,
    Operand,
    PhaseWait,
    Plan,
    Thunk,
    Unsupported,
    arg,
    opcode,
    pure,
)
from .access import address_arg, address_thunk

Act = Callable[["Frame", Lanes, Array, Sequence[Array]], Array | None]
"""What to do for lanes at objects (int64, one a lane), given the other operands; the result is one a lane."""


def on_objects(i: Instruction, memory: Operand, kind: str, act: Act, result: Arg | None, others: Sequence[Arg]) -> Plan:
    """A plan that calls `act` for the lanes whose address is good."""
    space = object_space(i)
    base, offset = address_arg(memory, space)

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        address = address_thunk(frame, ins[0], offset)
        port = PORTS[space](frame.machine.memory, i, frame.n, 8, kind)

        def run() -> None:
            values = [np.broadcast_to(v, frame.n) for v in ins[1:]]
            if kind == "st":
                # What lies there is the machine's own: the count, so that barriers which are made alike are alike.
                port.memory.storing = Stored(frame.lanes, values[0].astype(np.uint64))
            for _, index, positions in port.resolve(frame.lanes, address()):
                lanes = frame.lanes if positions is None else frame.lanes.subset(positions)
                chosen = [v.copy() if positions is None else v[positions] for v in values]
                found = act(frame, lanes, index.astype(np.int64), chosen)
                if found is not None and out:
                    out[0][positions if positions is not None else slice(None)] = found
            port.memory.storing = None

        return run

    return Plan((result,) if result else (), (base, *others), bind, pure=False)


def object_space(i: Instruction) -> str:
    if "shared::cluster" in i.mods and i.opcode == "mbarrier":
        if i.operands[0] != SINK and not isinstance(i.operands[0], Mem):
            raise Unsupported("only arrivals without a result reach other blocks")
        return "shared::cluster"
    return "shared" if {"shared", "shared::cta", "shared::cluster"} & set(i.mods) else "generic"


HINTS = ("release", "acquire", "relaxed", "cta", "cluster", "shared", "shared::cta", "shared::cluster", "b64")
ONE = Imm(1)


@opcode(
    "mbarrier",
    forms="{.shared{::cta}}.b64: .init .inval, .arrive .arrive_drop {.expect_tx .noComplete}, .expect_tx .complete_tx, "
    ".test_wait .try_wait {.parity}, .pending_count; .shared::cluster: .arrive{.expect_tx} to _, .expect_tx .complete_tx",
)
def mbarrier(i: Instruction) -> Plan:
    mods = Mods(i, *HINTS)
    word, long = TYPES["u32"], TYPES["u64"]
    action = mods.choice(("init", "inval", "arrive", "arrive_drop", "test_wait", "try_wait", "pending_count"))
    if action in ("test_wait", "try_wait"):
        parity = mods.flag("parity")
        mods.done()
        done, memory, state = i.operands[:3]
        space = object_space(i)
        base, offset = address_arg(memory, space)
        control = PhaseWait(space, offset, parity, action == "try_wait")
        return Plan((arg(done, TYPES["pred"]),), (base, arg(state, word if parity else long)), control=control)
    if action == "pending_count":
        mods.done()
        d, state = i.operands
        return pure(
            lambda d, s: lambda: np.copyto(d, s & np.uint64(0xFFFFFFFF), casting="unsafe"), [arg(d, word)], [arg(state, long)]
        )
    if action == "init":
        mods.done()
        memory, count = i.operands

        def init(frame: Frame, lanes: Lanes, keys: Array, values: Sequence[Array]) -> None:
            frame.machine.mbarriers.init(lanes, keys, values[0], i)
            frame.machine.memory.shared_view(8).view(np.uint64)[keys] = values[0]

        return on_objects(i, memory, "st", init, None, [arg(count, word)])
    if action == "inval":
        mods.done()
        (memory,) = i.operands
        return on_objects(i, memory, "atom", lambda f, lanes, keys, v: f.machine.mbarriers.invalidate(keys), None, [])
    expects, completes = mods.flag("expect_tx"), mods.flag("complete_tx")
    incomplete = mods.flag("noComplete")
    mods.done()
    if not action:
        if expects == completes:
            raise Unsupported("this mbarrier instruction")
        memory, amount = i.operands

        def transact(frame: Frame, lanes: Lanes, keys: Array, values: Sequence[Array]) -> None:
            amounts = values[0].astype(np.int64)
            frame.machine.mbarriers.expect(lanes, keys, amounts if expects else -amounts, i)

        return on_objects(i, memory, "atom", transact, None, [arg(amount, word)])
    state, memory, *rest = i.operands if not isinstance(i.operands[0], Mem) else (SINK, *i.operands)

    def arrive(frame: Frame, lanes: Lanes, keys: Array, values: Sequence[Array]) -> Array:
        barriers, number = frame.machine.mbarriers, values[0].astype(np.int64)
        if expects:
            barriers.expect(lanes, keys, number, i)
        if incomplete:
            barriers.must_stay(lanes, keys, number, i)
        return barriers.arrive(lanes, keys, np.ones_like(number) if expects else number, action == "arrive_drop", i)

    return on_objects(i, memory, "atom", arrive, arg(state, long), [arg(rest[0] if rest else ONE, word)])
