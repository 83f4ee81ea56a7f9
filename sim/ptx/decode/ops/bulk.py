"""cp.async.bulk of plain bytes, and the arrival of cp.async at an mbarrier (PTX ISA, "Data Movement: Bulk copy")."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...state.lanes import Lanes
from ...text.types import TYPES, Array
from ..registry import Frame, Imm, Instruction, Mem, Mods, Plan, Thunk, Unsupported, arg
from .access import address_arg
from .mbarrier import on_objects


def arrive_when_landed(i: Instruction, memory: Mem, counted: bool) -> Plan:
    """cp.async.mbarrier.arrive: arrives when the thread's earlier copies have landed; `counted`: .noinc."""

    def act(frame: Frame, lanes: Lanes, keys: Array, _: Sequence[Array]) -> None:
        machine = frame.machine
        serial = machine.copies.serial
        for key, at in machine.mbarriers.each(keys):
            some = lanes.subset(at)
            barrier = machine.mbarriers.find(key, some, i)
            if barrier is None:
                continue
            if not counted:
                barrier.pending += some.n

            def land(some: Lanes = some, key: int = key) -> None:
                machine.copies.land_before(some, serial)
                machine.mbarriers.arrive(some, np.full(some.n, key), np.ones(some.n, np.int64), False, i)

            machine.mbarriers.defer(some, key, land, i)

    return on_objects(i, memory, "atom", act, None, [])


def bulk(i: Instruction) -> Plan:
    """cp.async.bulk between global memory and the block's shared memory, and its groups."""
    mods = Mods(i, *(m for m in i.mods if m.startswith("L2::")))
    for name in ("async", "bulk"):
        mods.flag(name)
    if action := mods.choice(("commit_group", "wait_group")):
        mods.flag("read")
        mods.done()
        newest = i.operands[0].value if i.operands and isinstance(i.operands[0], Imm) else 0

        def bind_group(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
            if action == "commit_group":
                return lambda: frame.machine.bulks.commit(frame.lanes)
            return lambda: frame.machine.bulks.wait(frame.lanes, newest)

        return Plan((), (), bind_group, pure=False)
    inward = i.mods[2] != "global"
    spaces = ("shared::cluster", "shared::cta", "global")
    mods.flag(*spaces)
    arrives, grouped = mods.flag("mbarrier::complete_tx::bytes"), mods.flag("bulk_group")
    mods.done()
    kinds = [m for m in i.mods if m in spaces]
    if (inward and (not arrives or kinds[1] != "global")) or (not inward and (not grouped or kinds[1] != "shared::cta")):
        raise Unsupported("a bulk copy other than between global memory and the block's shared memory")
    to, source, size, *rest = i.operands
    target, target_offset = address_arg(to, "shared" if inward else "global")
    origin, origin_offset = address_arg(source, "global" if inward else "shared")
    reads = [target, origin, arg(size, TYPES["u32"])]
    barrier_offset = 0
    if inward:
        barrier, barrier_offset = address_arg(rest[0], "shared")
        reads.append(barrier)

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        def run() -> None:
            values = [np.broadcast_to(v, frame.n).astype(np.int64) for v in ins]
            bulks = frame.machine.bulks
            for k in range(frame.n):
                lanes = frame.lanes.subset(np.array([k]))
                there, here, count = (int(v[k]) for v in values[:3])
                if inward:
                    key = int(values[3][k]) + barrier_offset
                    bulks.load(lanes, there + target_offset, here + origin_offset, count, key, i)
                else:
                    bulks.store(lanes, there + target_offset, here + origin_offset, count, i)

        return run

    return Plan((), tuple(reads), bind, pure=False)
