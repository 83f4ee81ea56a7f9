"""Ports: they resolve the addresses of a bound memory instruction, one kind for each address space.

A port turns the addresses of the lanes into element indices, after it has checked bounds, alignment, permission and (in
shared memory) that somebody wrote the bytes that are read. Lanes that fail are reported and left out.

Addresses of shared::cluster make one window of the shared memory of all blocks of a cluster (PTX ISA, "State Spaces: Shared State
Space", "mapa"). Such an address is FLAG | rank of a block in its cluster << RANK_SHIFT | offset in that block's shared memory. A
plain offset, the address of shared::cta, is one too: it means the lane's own block. A generic address to shared memory is
SHARED_WINDOW + either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from cupyflash.words import plural

from ..state.lane_sets import LaneSet, by_value
from ..state.segments import IN_FLIGHT, UNWRITTEN, WINDOW_BITS, WRITTEN, Access, Segment
from ..text.syntax import ELEMENT, UNSIGNED, Array, PtxInstruction
from .spaces import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, SPACE_BITS, STORES, LaunchMemory

RANK_SHIFT, RANK_BITS = 24, 5
FLAG = 1 << 30
"""Set in an address that names a rank, the own one included."""

OFFSET = (1 << RANK_SHIFT) - 1
RANKS = (1 << RANK_BITS) - 1
"""More ranks than any cluster has: from here on no block has the rank."""
NOBODY = -1


def names_rank(addresses: Array) -> Array:
    """Returns a mask of the shared::cluster addresses (of any integer type, less SHARED_WINDOW) that name a rank."""
    return addresses >> addresses.dtype.type(RANK_SHIFT + RANK_BITS) == FLAG >> RANK_SHIFT + RANK_BITS


def cluster_address(rank: Array, addresses: Array) -> Array:
    """mapa: returns `addresses` (less SHARED_WINDOW) moved to the blocks of these ranks, in the type of `addresses`."""
    kind = addresses.dtype.type
    offset = np.where(names_rank(addresses), addresses & kind(OFFSET), addresses)
    address = (kind(FLAG) | (np.minimum(rank, RANKS).astype(addresses.dtype) << kind(RANK_SHIFT)) | offset).astype(addresses.dtype)
    return address


def rank_of(lanes: LaneSet, addresses: Array) -> Array:
    """getctarank (int64): returns the rank that each address names, else that of the lane's own block."""
    named = addresses.astype(np.int64)
    own = lanes.block % lanes.wave.cluster
    return np.where(names_rank(named), named >> RANK_SHIFT & RANKS, own)


def targets(lanes: LaneSet, addresses: Array) -> tuple[Array, Array]:
    """Returns (block of the wave, offset in its shared memory), int64, one a lane, of shared::cluster addresses less SHARED_WINDOW.

    The block is NOBODY where the cluster has no such rank. Offsets are not checked.
    """
    cluster = lanes.wave.cluster
    rank = rank_of(lanes, addresses)
    named = addresses.astype(np.int64)
    offset = np.where(names_rank(named), named & OFFSET, named)
    return np.where(rank < cluster, lanes.block - lanes.block % cluster + rank, NOBODY), offset


ALL = slice(None)
"""All bytes of an element."""

Check = tuple[str, Array, str]
"""A fault: kind, mask of the lanes that have it, end of the message."""

Part = tuple[Array, Array, Array | None]
"""(elements, index of each lane's element, positions of those lanes or None for all): the result of a port."""


class Port(ABC):
    """A resolver of the addresses of one bound instruction: `resolve(lanes, addresses)` gives the valid parts.

    `size`: bytes a lane accesses; `kind`: as in `Access`; `used`: the bytes of these that the kernel uses once they are read. Lanes
    with an invalid address are reported and left out.
    """

    def __init__(self, memory: LaunchMemory, instruction: PtxInstruction, n: int, size: int, kind: str, used: Array | slice = ALL):
        self.memory = memory
        self.used = used
        self.instruction = instruction
        self.size = size
        self.kind = kind
        self.write = kind in STORES or kind == "atom"
        self.read = kind not in STORES
        self.verb = "atomic access" if kind == "atom" else "write" if self.write else "read"
        self.shift = size.bit_length() - 1
        self.prepare(n)

    def prepare(self, n: int) -> None:  # noqa: B027 - optional
        """Makes what resolving for `n` lanes needs: here nothing."""

    @abstractmethod
    def resolve(self, lanes: LaneSet, addresses: Array) -> list[Part]:
        """Returns the parts of memory that the lanes with a valid address reach."""

    def judged(
        self, lanes: LaneSet, addresses: Array, checks: Sequence[Check], good: Array | None = None, tensor: str | None = None
    ) -> Array:
        """Returns a mask of the lanes, among the `good` ones, that have no fault; each other one has a finding, its first fault."""
        good = np.ones(lanes.n, bool) if good is None else good
        for kind, wrong, message in checks:
            bad = good & wrong
            if bad.any():
                self.report(kind, message, lanes, bad, addresses, tensor)
                good = good & ~bad
        return good

    def report(self, kind: str, message: str, lanes: LaneSet, bad: Array, addresses: Array, tensor: str | None = None) -> None:
        positions = np.flatnonzero(bad)
        first = int(positions[0])
        address = int(addresses[first])
        where = self.memory.shared_name(address) if message.startswith(" of shared memory") else f"{address:#x}"
        message = f"{self.verb} of {plural(self.size, 'byte')} at {where}{message}"
        if kind == "uninitialised" and self.kind == "ldmatrix":
            # A tile is loaded whole, even if the algorithm masks away the results of some rows.
            i = self.instruction
            self.memory.findings.doubt(kind, message, i, lanes.place(first), len(positions), address)
            return
        self.memory.findings.report(kind, message, self.instruction, lanes, positions, address=address, tensor=tensor)


class GlobalPort(Port):
    """Named tensors, constant and parameter memory."""

    def prepare(self, n: int) -> None:
        self.bad = self.memory.lend("bad", n, np.dtype(bool))
        self.relative = np.empty(n, np.uint64)
        self.scratch = self.memory.lend("low bits", n, np.dtype(np.uint64))
        self.index = self.relative.view(np.int64)
        self.low = np.array(self.size - 1, np.uint64)
        self.bits = np.array(self.shift, np.uint64)
        self.segment: Segment | None = None

    def resolve(self, lanes: LaneSet, addresses: Array) -> list[Part]:
        segment = self.segment
        if segment is not None:
            view, first, limit = segment.window(self.size)
            np.subtract(addresses, first, self.relative)
            np.greater(self.relative, limit, self.bad)
            np.bitwise_and(self.relative, self.low, self.scratch)
            if not np.count_nonzero(self.bad) and not np.count_nonzero(self.scratch):
                self.accessed(segment, lanes, addresses, self.size)
                np.right_shift(self.relative, self.bits, self.relative)
                return [(view, self.index, None)]
        return self.search(lanes, addresses)

    def search(self, lanes: LaneSet, addresses: Array, sizes: Array | None = None) -> list[Part]:
        """Sorts the lanes by tensor; reports those that hit none, or hit it wrongly. With `sizes` (cp.async), one a lane, each less
        than `size`, the parts index single bytes.
        """
        parts: list[Part] = []
        owner = addresses >> np.uint64(WINDOW_BITS)
        for number in np.unique(owner).tolist():
            mine, segment = owner == number, self.memory.segments.get(number)
            if segment is None:
                kind, message = (
                    ("out of bounds", ": it belongs to no tensor") if number else ("null pointer", ": the pointer is null")
                )
                self.report(kind, message, lanes, mine, addresses)
                continue
            relative = addresses - np.uint64(segment.start)
            width = np.uint64(self.size) if sizes is None else sizes.astype(np.uint64)
            outside = (relative > segment.size) | (relative + width > segment.size)
            first = int(addresses[np.argmax(mine & outside)]) - segment.start
            where = f": offset {first} of" if sizes is None else ": it ends outside of"
            checks = (
                ("out of bounds", outside, f"{where} {segment.name!r}, which has {plural(segment.size, 'byte')}"),
                ("misaligned", addresses & self.low != 0, f" in {segment.name!r} is not aligned to {self.size} bytes"),
            )
            good = self.judged(lanes, addresses, checks, mine, segment.name)
            if self.write and not segment.writable:
                self.report("read-only", f": {segment.name!r} is read-only", lanes, mine, addresses, segment.name)
                continue
            positions = np.flatnonzero(good)
            if not len(positions):
                continue
            subset, at = lanes if len(positions) == lanes.n else lanes.subset(positions), addresses[positions]
            if sizes is not None:
                self.accessed(segment, subset, at, sizes[positions])
                parts.append((segment.window(1)[0], relative[positions].astype(np.int64), positions))
                continue
            view, start, _ = segment.window(self.size)
            self.accessed(segment, subset, at, self.size)
            parts.append((view, ((at - start) >> self.bits).view(np.int64), None if subset is lanes else positions))
            self.segment = segment
        return parts

    def accessed(self, segment: Segment, lanes: LaneSet, addresses: Array, size: int | Array) -> None:
        sums = self.memory.sums
        if sums is not None and self.instruction not in sums.own:
            sums.finish(segment)
        if segment.state is not None:
            self.initialised(segment, lanes, addresses, size)
        self.memory.accessed(Access(lanes, segment.space, segment, addresses, size, self.kind, self.write, self.instruction))

    def initialised(self, segment: Segment, lanes: LaneSet, addresses: Array, size: int | Array) -> None:
        """Checks that somebody in this launch has written the bytes that are read of a tensor without initial contents."""
        alive: Array | slice = slice(None)
        if segment.heap is not None and (lost := segment.heap.unallocated(addresses, size)).any():
            message = segment.heap.place(int(addresses[np.argmax(lost)]))
            self.report("out of bounds", message, lanes, lost, addresses, segment.name)
            alive = ~lost
        if isinstance(size, int):
            states, (_, first, _) = segment.states(size), segment.window(size)
            index = ((addresses - first) >> self.bits).view(np.int64)
            fresh = np.zeros(lanes.n, bool)
            if self.read:
                found = states.take(index).view(np.uint8)
                if np.count_nonzero(found):  # not all are WRITTEN
                    fresh = (found.reshape(lanes.n, size)[:, self.used] == UNWRITTEN).any(axis=1)
            if self.write:
                states[index[alive]] = element(WRITTEN, size)
        else:
            start = (addresses - np.uint64(segment.start)).view(np.int64)
            inside = np.arange(self.size) < size[:, None]
            found = segment.states(1)[np.where(inside, start[:, None] + np.arange(self.size), start[:, None])]
            fresh = ((found == UNWRITTEN) & inside).any(axis=1)
        if fresh.any():
            offset = int(addresses[np.flatnonzero(fresh)[0]]) - segment.start
            message = f": offset {offset} of {segment.name!r}, which nobody wrote"
            self.report("uninitialised", message, lanes, fresh, addresses, segment.name)


class ParamPort(GlobalPort):
    """The kernel's parameters, by addresses of .param."""

    def resolve(self, lanes: LaneSet, addresses: Array) -> list[Part]:
        return super().resolve(lanes, addresses.astype(np.uint64) | np.uint64(PARAM_WINDOW))


class _BlockPort(Port):
    """Memory with a copy for each block or lane: 32-bit offsets, one base a lane."""

    space = ""

    @abstractmethod
    def capacity(self) -> int:
        """Returns the bytes of one copy."""

    @abstractmethod
    def base(self, lanes: LaneSet) -> Callable[[int], Array]:
        """Returns a function that gives the start of each lane's copy, in elements of 1 << argument bytes."""

    @abstractmethod
    def elements(self) -> Array:
        """Returns all copies, as elements of the access's size."""

    def elsewhere(self, outside: Array) -> str:
        """Returns the end of the message about addresses that are out of bounds."""
        return ""

    def astray(self, lanes: LaneSet, offsets: Array, inside: Array) -> Array:
        """Returns a mask of the accesses in bounds that belong to another variable; they are a finding."""
        return np.zeros(lanes.n, bool)

    def checked(self, lanes: LaneSet, offsets: Array, index: Array) -> None:
        """Makes the checks of a space on an access that is in bounds and aligned: here none."""

    def room(self) -> tuple[int, int]:
        """Returns the start and end of the bytes in a copy that the instruction may access."""
        return 0, self.capacity()

    def resolve(self, lanes: LaneSet, addresses: Array) -> list[Part]:
        first, pattern = lanes.pattern(addresses, self.size)
        start, end = self.room()
        if not pattern.fits(first, end, start):
            return self.search(lanes, addresses)
        if addresses.itemsize == 8:
            addresses = addresses.astype(np.uint32)
        return [(self.elements(), self.found(lanes, addresses, pattern.index(self.space, self.base(lanes), first)), None)]

    def found(self, lanes: LaneSet, offsets: Array, index: Array) -> Array:
        """Checks and counts an access that is in bounds and aligned; returns its index."""
        self.checked(lanes, offsets, index)
        self.memory.accessed(Access(lanes, self.space, None, offsets, self.size, self.kind, self.write, self.instruction))
        return index

    def search(self, lanes: LaneSet, addresses: Array) -> list[Part]:
        capacity = self.capacity()
        outside = addresses > max(capacity - self.size, 0) if capacity >= self.size else np.ones(lanes.n, bool)
        elsewhere = self.elsewhere(addresses[outside]) if outside.any() else ""
        checks = (
            ("out of bounds", outside, f": {self.space} memory has {plural(capacity, 'byte')}{elsewhere}"),
            ("misaligned", addresses % self.size != 0, f" of {self.space} memory is not aligned to {self.size} bytes"),
        )
        good = self.judged(lanes, addresses, checks)
        return self.parts(lanes, addresses, np.flatnonzero(good & ~self.astray(lanes, addresses, good)))

    def parts(self, lanes: LaneSet, offsets: Array, positions: Array) -> list[Part]:
        """Returns the lanes at these positions, whose accesses are in bounds and aligned, as a part."""
        if not len(positions):
            return []
        subset, at = lanes.subset(positions), offsets[positions].astype(np.uint32)
        index = (at >> self.shift).astype(np.int64) + self.base(subset)(self.shift)
        return [(self.elements(), self.found(subset, at, index), positions)]


class SharedPort(_BlockPort):
    """Shared memory of the lane's block, which remembers what was written."""

    space = "shared"

    def prepare(self, n: int) -> None:
        self.state = self.memory.lend("states", n, ELEMENT[self.size])
        self.words = self.state.view(np.uint64) if self.size > 8 else self.state
        self.written = pattern(WRITTEN, min(self.size, 8))
        self.home = self.memory.homes.get(self.instruction)

    def capacity(self) -> int:
        return self.memory.shared_size

    def room(self) -> tuple[int, int]:
        if self.home is None:
            return 0, self.memory.shared_size
        return self.home[1], self.memory.shared_size if self.home[2] is None else self.home[2]

    def astray(self, lanes: LaneSet, offsets: Array, inside: Array) -> Array:
        if self.home is None:
            return np.zeros(lanes.n, bool)
        bad = inside & self.memory.strays(self.instruction, offsets.astype(np.int64), self.size)
        if bad.any():
            message = self.memory.strayed(self.instruction, int(offsets[bad][0]))
            self.report("out of bounds", message, lanes, bad, offsets)
        return bad

    def elements(self) -> Array:
        return self.memory.shared[self.size]

    def base(self, lanes: LaneSet) -> Callable[[int], Array]:
        return lanes.shared_base

    def elsewhere(self, outside: Array) -> str:
        return ", and the address is one of shared::cluster" if names_rank(outside).any() else ""

    def checked(self, lanes: LaneSet, offsets: Array, index: Array) -> None:
        memory = self.memory
        if self.read and not memory.settled:
            state = memory.states[self.size]
            words = self.words
            if len(index) == len(self.state):
                state.take(index, 0, self.state, "clip")
            else:
                words = state[index].view(words.dtype)
            if np.count_nonzero(words != self.written):
                self.complain(lanes, offsets, index, words)
            memory.settle()
        if self.write and (memory.flying or memory.landing) and memory.races is not None:
            states = memory.states[self.size][index].view(np.uint8).reshape(len(index), self.size)
            self.complain_of_flight(lanes, offsets, index, (states == IN_FLIGHT).any(axis=1))
        if self.write and self.kind != "cp.async":
            memory.states[self.size][index] = element(WRITTEN, self.size)

    def complain(self, lanes: LaneSet, offsets: Array, index: Array, words: Array) -> None:
        states = np.ascontiguousarray(words).view(np.uint8).reshape(len(offsets), self.size)
        flying = (states == IN_FLIGHT).any(axis=1)
        unwritten = (states[:, self.used] == UNWRITTEN).any(axis=1) & ~flying
        self.complain_of_flight(lanes, offsets, index, flying)
        if unwritten.any():
            message = " of shared memory that nobody wrote"
            early = self.memory.early.get(self.instruction)
            if early is not None:
                where = self.memory.shared_name(int(offsets[np.argmax(unwritten)]))
                early.found = unwritten, f"{plural(self.size, 'byte')} at {where}{message}"
                return
            self.report("uninitialised", message, lanes, unwritten, offsets)

    def complain_of_flight(self, lanes: LaneSet, offsets: Array, index: Array, flying: Array) -> None:
        races = self.memory.races
        if flying.any() and races is not None:
            # A lane that is not even ordered behind the issue of the copy races with it, with or without a wait.
            flying = flying & races.issue_ordered(lanes, self.size, index)
        if flying.any():
            message = " of shared memory: its asynchronous copy has not been waited for by the thread that issued it"
            self.report("in flight", message, lanes, flying, offsets)


class ClusterPort(SharedPort):
    """Shared memory of all blocks of the cluster: addresses of shared::cluster, of which plain offsets mean the own block."""

    def search(self, lanes: LaneSet, addresses: Array) -> list[Part]:
        named = names_rank(addresses)
        if not named.any():
            return super().search(lanes, addresses)
        blocks, offsets = targets(lanes, addresses)
        capacity, nobody = self.capacity(), blocks == NOBODY
        checks = (
            ("out of bounds", nobody, f": the cluster has {plural(lanes.wave.cluster, 'block')}"),
            (
                "out of bounds",
                (offsets < 0) | (offsets > capacity - self.size),
                f": the shared memory of a block has {plural(capacity, 'byte')}",
            ),
            ("misaligned", offsets % self.size != 0, f" of shared memory is not aligned to {self.size} bytes"),
            ("exited block", lanes.wave.alive_by_block[blocks] == 0, " of the shared memory of another block, which has exited"),
        )
        good = self.judged(lanes, np.where(nobody, addresses.astype(np.int64), offsets), checks)
        good &= ~self.astray(lanes, offsets, good)
        parts = self.parts(lanes, offsets, np.flatnonzero(good & (blocks == lanes.block)))
        remote = np.flatnonzero(good & (blocks != lanes.block))
        if len(remote):
            subset, there = lanes.subset(remote), blocks[remote]
            places = there * lanes.wave.shared_stride + offsets[remote]
            self.checked(subset, offsets[remote], places >> self.shift)
            reach = Access(subset, "shared::cluster", None, places, self.size, self.kind, self.write, self.instruction)
            self.memory.reached(reach, there)
            parts.append((self.elements(), places >> self.shift, remote))
        return parts


class LocalPort(_BlockPort):
    """Local memory: each thread's own."""

    space = "local"

    def capacity(self) -> int:
        return self.memory.local_size

    def elements(self) -> Array:
        return self.memory.local[self.size]

    def base(self, lanes: LaneSet) -> Callable[[int], Array]:
        return lanes.local_base


class GenericPort(Port):
    """Generic addresses: shared and local memory are windows in the space that the tensors live in."""

    def prepare(self, n: int) -> None:
        self.ports: dict[tuple[int, int], Port] = {}
        self.whole = self.port(0, n)
        self.base = 0

    def port(self, base: int, n: int) -> Port:
        found = self.ports.get((base, n))
        if found is None:
            maker = {SHARED_WINDOW: ClusterPort, LOCAL_WINDOW: LocalPort}.get(base, GlobalPort)
            found = self.ports[base, n] = maker(self.memory, self.instruction, n, self.size, self.kind, self.used)
        return found

    def resolve(self, lanes: LaneSet, addresses: Array) -> list[Part]:
        spaces = addresses >> np.uint64(SPACE_BITS)
        first = int(spaces[0]) << SPACE_BITS
        if not np.count_nonzero(spaces != spaces[0]):
            if first != self.base:
                self.base, self.whole = first, self.port(first, lanes.n)
            return self.whole.resolve(lanes, addresses - np.uint64(first) if self.is_window(first) else addresses)
        parts: list[Part] = []
        for space, positions in by_value(spaces):
            base = space << SPACE_BITS
            at = addresses[positions] - np.uint64(base if self.is_window(base) else 0)
            for view, index, inner in self.port(base, len(positions)).resolve(lanes.subset(positions), at):
                parts.append((view, index, positions if inner is None else positions[inner]))
        return parts

    @staticmethod
    def is_window(base: int) -> bool:
        return base in (SHARED_WINDOW, LOCAL_WINDOW)


PORTS: dict[str, type[Port]] = {
    "global": GlobalPort,
    "const": GlobalPort,
    "param": ParamPort,
    "shared": SharedPort,
    "shared::cluster": ClusterPort,
    "local": LocalPort,
    "generic": GenericPort,
}


def pattern(state: int, size: int) -> Array:
    """Returns an element of 1..8 bytes that are all `state`."""
    return np.array(int.from_bytes(bytes([state]) * size, "little"), UNSIGNED[size])


def element(state: int, size: int) -> Array:
    """Returns an element of 1..32 bytes that are all `state`, in the dtype that moves such elements."""
    return np.frombuffer(bytes([state]) * size, ELEMENT[size])[0]
