"""Asynchronous stores and reductions into the shared memory of a cluster (PTX ISA, "st.async", "red.async"): plans of both.

An address and its mbarrier are in one block. The access is checked, counted and ordered when it is issued; its bytes move, and
the mbarrier counts them, as late as they may, or with a seed at any moment. Who sees the phase complete is ordered behind it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..memory.mbarriers import MBarriers
from ..memory.ports import element
from ..memory.regions import Spot
from ..state.lane_sets import LaneSet
from ..state.segments import IN_FLIGHT
from ..text.syntax import ELEMENT, SINK, TYPES, Array, Operand, PtxInstruction, Unsupported
from .access import address_arg, address_thunk, make_port, rounds, update
from .registry import Arrays, Frame, Plan, Thunk, args, items, opcode, taken
from .transfers import INTEGER_OPS, reduced_types

MODIFIERS = ("!async", "!shared::cluster", "!mbarrier::complete_tx::bytes")

Put = Callable[[Array, Array, Array], None]
"""Puts data (one a lane) into elements of shared memory: (memory, index, data)."""


@opcode(
    "st.async", forms="{.weak}.shared::cluster.mbarrier::complete_tx::bytes {.v2 .v4} .b32 .b64 .u32-.s64 .f32 .f64, up to 16 bytes"
)
def st_async(i: PtxInstruction) -> Plan:
    vector = taken(i, "v2 v4", *MODIFIERS, "weak", "!b32 b64 u32 u64 s32 s64 f32 f64")[0]
    registers = items(i.operands[1], int(vector[1:] or 1))
    return delivered(i, "cp.async", registers, np.ndarray.__setitem__)


@opcode("red.async", forms=".relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes .add .min .max .inc .dec .and .or .xor")
def red_async(i: PtxInstruction) -> Plan:
    name = taken(i, f"!{' '.join(INTEGER_OPS)}", *MODIFIERS, "!relaxed", "!cluster", "!b32 u32 s32 u64")[0]
    if i.type.name not in reduced_types(name, False).split():
        raise Unsupported(f"red.async.{name} of .{i.type.name}")
    fn = update(name, i.type)

    def put(memory: Array, index: Array, data: Array) -> None:
        for at in rounds(index):
            memory[index[at]] = fn(memory[index[at]], data[at], data[at])

    return delivered(i, "atom", items(i.operands[1], 1), put)


def delivered(i: PtxInstruction, kind: str, registers: tuple[Operand, ...], put: Put) -> Plan:
    """Returns the plan of accesses of this kind whose bytes an mbarrier counts."""
    bits = f"b{i.type.bits}"
    count, size = len(registers), len(registers) * i.type.bytes
    if size > 16:
        raise Unsupported(f"{i.name} of {size} bytes")
    if len(i.operands) != 3 or SINK in registers:
        raise Unsupported("operands that do not fit the modifiers")
    target, offset = address_arg(i.operands[0], "shared::cluster")
    barrier, barrier_offset = address_arg(i.operands[2], "shared::cluster")

    def bind(frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
        address, bars = (address_thunk(frame, *each) for each in ((ins[0], offset), (ins[1], barrier_offset)))
        port = make_port(frame, i, "shared::cluster", size, kind)
        memory, mbarriers, ends = frame.machine.memory, frame.machine.mbarriers, frame.machine.bulks.ends

        def run() -> None:
            lanes, data, index = frame.lanes, np.empty(frame.n, ELEMENT[size]), np.full(frame.n, -1, np.int64)
            columns = data.view(TYPES[bits].dtype).reshape(frame.n, count)
            for column, value in zip(columns.T, ins[2:], strict=True):
                column[:] = value
            to = address()
            for _, elements, positions in port.resolve(lanes, to):
                index[slice(None) if positions is None else positions] = elements
            there = Spot.of(lanes, bars())
            rows = np.flatnonzero((index >= 0) & ends.barriers(lanes, Spot.of(lanes, to), there, i))
            keys = (there.blocks * memory.shared_stride + there.offsets) >> 3
            for key, at in mbarriers.each(keys[rows]) if len(rows) else ():
                some = rows[at]
                issue(mbarriers, lanes.subset(some), key, i, (index[some], data[some]), put)

        return run

    return Plan((), (target, barrier, *args(bits, *registers)), bind, pure=False)


def issue(mbarriers: MBarriers, lanes: LaneSet, key: int, i: PtxInstruction, what: tuple[Array, Array], put: Put) -> None:
    """Starts the accesses of lanes to elements of shared memory, (index, data), that one mbarrier counts."""
    barrier, memory, (index, data) = mbarriers.find(key, lanes, i), mbarriers.memory, what
    if barrier is None:
        return
    size, plain = data.itemsize, i.opcode == "st"
    if plain:
        memory.states[size][index] = element(IN_FLIGHT, size)
        memory.unsettle()
        memory.landing += 1

    def land() -> None:
        put(memory.shared[size], index, data)
        races = mbarriers.races
        if plain:
            barrier.unseen.append((barrier.phase, size, index))
        if races is not None:
            if plain:
                races.landed(lanes, size, index)
            for lane in lanes.index.tolist():
                barrier.told = races.copied_clock(lane, barrier.told)
        mbarriers.brought(key, size * lanes.n, lanes, i)

    mbarriers.defer(lanes, key, land, i)
