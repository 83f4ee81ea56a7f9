"""cp.async.bulk: whole ranges between global and shared memory, copied behind the threads' back.

PTX ISA, "Data Movement: Bulk copy". A copy into shared memory tells an mbarrier how many bytes it brought; one into global
memory belongs to a bulk group of its thread. Each is checked, counted and ordered at its issue as one access of one lane,
and its bytes move when somebody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cupyflash.words import plural

from ..order.races import Access
from ..state.lanes import Lanes, Wave
from ..state.patterns import SECTOR
from ..state.segments import IN_FLIGHT, UNWRITTEN, WINDOW_BITS, WRITTEN, Segment
from ..text.syntax import Instruction
from ..text.types import Array
from .memory import Memory
from .phases import MBarriers

UNIT = 16
"""Addresses and sizes are multiples of this."""


@dataclass
class Store:
    """A copy to global memory on its way: its group, and what moves the bytes."""

    lane: int
    group: int
    run: Callable[[], None]


class Bulks:
    """The bulk copies of a wave."""

    def __init__(self, wave: Wave, memory: Memory, mbarriers: MBarriers):
        self.memory = memory
        self.mbarriers = mbarriers
        self.committed = np.zeros(wave.size, np.int64)
        self.stores: list[Store] = []

    def load(self, lanes: Lanes, to: int, source: int, size: int, barrier: int, i: Instruction) -> None:
        """Global to shared memory; `barrier` is the offset of an mbarrier."""
        segment = self.checked(lanes, to, source, size, i)
        key = (int(lanes.block[0]) * self.memory.shared_stride + barrier) >> 3
        mbarriers = self.mbarriers
        if segment is None or mbarriers.find(key, lanes, i) is None:
            return
        start = source - segment.start
        if segment.state is not None and (segment.state[start : start + size] == UNWRITTEN).any():
            message = f"bulk copy of {segment.name!r}, which nobody wrote"
            self.memory.findings.report("uninitialised", message, i, lanes, 0, tensor=segment.name)
        self.count(segment, source, size, False, i)
        self.note("global", segment, lanes, source, size, "ld", i)
        readings = self.readings()
        self.note("shared", None, lanes, to, size, "cp.async", i)
        state, data = self.shared(lanes, self.memory.state_view(1), to, size), segment.window(1)[0]
        state[:] = IN_FLIGHT
        self.memory.settled = False

        def land() -> None:
            self.shared(lanes, self.memory.shared_view(1), to, size)[:] = data[start : start + size]
            state[:] = WRITTEN
            races, found = self.memory.races, mbarriers.objects.get(key)
            if races is not None and found is not None:
                # The copy is over for whoever sees the phase complete.
                races.copied(lanes, readings)
                races.access("shared", None, lanes, np.array([to], np.uint32), size, "cp.async", i)
                told = races.heard.released(lanes)
                found.told = told if found.told is None else np.maximum(found.told, told)
            mbarriers.expect(lanes, np.array([key]), np.array([-size]), i)

        mbarriers.defer(lanes, key, land, i)

    def store(self, lanes: Lanes, to: int, source: int, size: int, i: Instruction) -> None:
        """Shared to global memory."""
        segment = self.checked(lanes, source, to, size, i)
        if segment is None:
            return
        if not segment.writable:
            self.memory.findings.report("read-only", f"bulk copy: {segment.name!r} is read-only", i, lanes, 0)
            return
        if (self.shared(lanes, self.memory.state_view(1), source, size) == UNWRITTEN).any():
            self.memory.findings.report("uninitialised", "bulk copy of shared memory that nobody wrote", i, lanes, 0)
        self.count(segment, to, size, True, i)
        self.note("shared", None, lanes, source, size, "ld", i)
        readings = self.readings()
        self.note("global", segment, lanes, to, size, "st", i)
        start, data = to - segment.start, segment.window(1)[0]
        if segment.state is not None:
            segment.state[start : start + size] = WRITTEN

        def land() -> None:
            data[start : start + size] = self.shared(lanes, self.memory.shared_view(1), source, size)
            if self.memory.races is not None:
                self.memory.races.copied(lanes, readings)

        lane = int(lanes.index[0])
        self.stores.append(Store(lane, int(self.committed[lane]), land))

    def commit(self, lanes: Lanes) -> None:
        self.committed[lanes.index] += 1

    def wait(self, lanes: Lanes, newest: int) -> None:
        """Until at most `newest` of the threads' newest groups are pending (their bytes may still be on the way to others)."""
        members, kept = set(lanes.index.tolist()), []
        for store in self.stores:
            if store.lane in members and store.group < self.committed[store.lane] - newest:
                store.run()
            else:
                kept.append(store)
        self.stores = kept

    def leave(self, lanes: Lanes) -> None:
        members = set(lanes.index.tolist())
        for store in [s for s in self.stores if s.lane in members]:
            store.run()
            self.stores.remove(store)

    # -- checks and counts --------------------------------------------------------------------------------------------------

    def checked(self, lanes: Lanes, shared: int, address: int, size: int, i: Instruction) -> Segment | None:
        """The tensor of a copy whose both ends are in bounds and aligned; else None, and a finding."""
        report = self.memory.findings.report
        segment = self.memory.segments.get(address >> WINDOW_BITS)
        if (shared | address | size) % UNIT:
            report("misaligned", f"bulk copy of {size} bytes: addresses and size are multiples of {UNIT}", i, lanes, 0)
            return None
        if not 0 <= shared <= self.memory.shared_size - size:
            report("out of bounds", f"bulk copy of {size} bytes at {shared:#x} of shared memory", i, lanes, 0)
            return None
        if segment is None or not 0 <= address - segment.start <= segment.size - size:
            name = segment.name if segment else None
            where = f"{name!r}, which has {plural(segment.size, 'byte')}" if segment else "no tensor"
            report("out of bounds", f"bulk copy of {size} bytes at {address:#x} of {where}", i, lanes, 0, tensor=name)
            return None
        return segment

    def shared(self, lanes: Lanes, view: Array, offset: int, size: int) -> Array:
        start = int(lanes.block[0]) * self.memory.shared_stride + offset
        return view[start : start + size]

    def count(self, segment: Segment, address: int, size: int, write: bool, i: Instruction) -> None:
        sectors = (address + size - 1) // SECTOR - address // SECTOR + 1
        traffic, side = self.memory.tally.traffic[i, segment], "write" if write else "read"
        for name, amount in (
            (f"{side}_bytes", size),
            (f"unique_{side}_bytes", size),
            (f"{side}_requests", 1),
            (f"{side}_sectors", sectors),
        ):
            setattr(traffic, name, getattr(traffic, name) + amount)
        counts = self.memory.tally.shared[i, "cp.async.bulk", size]
        counts.requests += 1
        counts.bytes += size
        counts.wavefronts += -(-size // 128)
        counts.ideal_wavefronts += -(-size // 128)

    def readings(self) -> list[Access]:
        """What the copy that was noted just now reads until it lands."""
        return self.memory.races.issued() if self.memory.races is not None else []

    def note(self, space: str, segment: Segment | None, lanes: Lanes, address: int, size: int, kind: str, i: Instruction) -> None:
        if self.memory.races is not None and size:
            addresses = np.array([address], np.uint32 if segment is None else np.uint64)
            width: int | Array = size if segment is None else np.array([size])
            self.memory.races.access(space, segment, lanes, addresses, width, kind, i)
