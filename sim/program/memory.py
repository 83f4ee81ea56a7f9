"""The memory of the simulated device as a program sees it: allocations in windows of addresses, all in one file that the program
maps, too.

Each allocation has a window of its own (`ptx.state.segments`), so that a stray access is found. Memory of the device has addresses
that no host memory can have: a host that follows such a pointer crashes, as it would beside a GPU. Managed and pinned memory has
the same addresses on both sides, in windows that a Linux process leaves free.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

import numpy as np

from cupyflash.basics import Array
from cupyflash.sim.program.channel import Channel
from cupyflash.sim.program.errors import CudaError, ErrorCode
from cupyflash.sim.ptx import Allocation
from cupyflash.sim.ptx.memory.spaces import HEAP_WINDOW
from cupyflash.sim.ptx.order.past import READ, WRITE
from cupyflash.sim.ptx.state.segments import UNWRITTEN, WINDOW_BITS, WRITTEN

TOTAL = 16 << 30
"""Bytes of the device's memory; they take memory of this machine once they are touched."""
PAGE = 4096
DEVICE_WINDOWS = range(256, 1 << 14)
HOST_WINDOWS = (*range(2, 85), *range(88, 126))
"""Beside the addresses at which Linux places programs, heaps and libraries (0x55..., 0x56..., and around 0x7f...)."""

DEVICE, MANAGED, HOST, VARIABLE, ARRAY = "device", "managed", "host", "variable", "array"
HIDDEN = (DEVICE, ARRAY)
"""Memory that is written by calls and launches only: managed and pinned memory the host may write at any time, and a module holds
its variables' memory open."""


@dataclass(frozen=True)
class Contents:
    """The bytes of a block at one moment, the states of these bytes, and a digest of both."""

    data: Array
    state: Array | None
    digest: bytes


@dataclass
class Block:
    """An allocation with its place in the device's file; `kind` is DEVICE, MANAGED, HOST (pinned), VARIABLE or ARRAY.

    The arrays of `allocation` are only for reading. `opened` gives those to write to: nobody else does, so that a digest is good
    until then.
    """

    kind: str
    allocation: Allocation
    offset: int
    size: int
    stretch: int
    registered: bool = False
    """True for the program's own memory."""

    _digest: bytes | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._open = self.allocation
        memory, state = self._open.memory, self._open.state
        self.allocation = replace(self._open, memory=read_only(memory), state=None if state is None else read_only(state))

    @property
    def address(self) -> int:
        return self.allocation.address

    def opened(self) -> Allocation:
        """Returns the allocation to write to, at once or in a launch that begins now."""
        self._digest = None
        return self._open

    def digest(self) -> bytes:
        """Returns a digest of the bytes and their state."""
        if self._digest is not None:
            return self._digest
        found = hashlib.blake2b(self.allocation.memory.data)
        if self.allocation.state is not None:
            found.update(self.allocation.state.data)
        self._digest = found.digest() if self.kind in HIDDEN else None
        return found.digest()

    def contents(self) -> Contents:
        """Returns a copy of the bytes and their state."""
        state = self.allocation.state
        return Contents(self.allocation.memory.copy(), None if state is None else state.copy(), self.digest())

    def restore(self, contents: Contents) -> None:
        """Makes the bytes and their state what they were."""
        if self._digest == contents.digest:
            return
        to = self.opened()
        to.memory[:] = contents.data
        if to.state is not None:
            to.state[:] = contents.state
        self._digest = contents.digest if self.kind in HIDDEN else None


def read_only(array: Array) -> Array:
    """Returns a view of an array through which nothing can be written."""
    view = array.view()
    view.flags.writeable = False
    return view


class MovedRange(NamedTuple):
    """Bytes of a block that a copy, a fill or a product reads or writes, or which are freed: `verb` is READ, WRITE or FREE."""

    block: Block
    verb: str
    start: int
    end: int


@dataclass
class ProgramMemory:
    """All allocations of a program, by the number of their window."""

    channel: Channel
    forget: Callable[[Block], None] = lambda block: None
    """Is called with an allocation that is freed."""
    file: int = field(init=False)
    blocks: dict[int, Block] = field(default_factory=dict)
    moves: list[MovedRange] | None = None
    """A list, if somebody keeps one, to which all is added that no kernel reads and writes."""

    def __post_init__(self) -> None:
        self.file = os.memfd_create("cupyflash device memory")
        os.ftruncate(self.file, TOTAL)
        self.map = mmap.mmap(self.file, TOTAL)
        self._free: dict[int, list[int]] = {}
        self._windows = {True: count(), False: count()}
        self._end = self.used = self._count = 0

    def allocate(self, size: int, kind: str = DEVICE, name: str | None = None, at: int | None = None) -> Block:
        """Returns new memory of `size` bytes. Raises CudaError if there is none left.

        `at`: the program's own memory that it registers, page by page; it keeps its contents.
        """
        stretch = -(-max(size, 1) // PAGE) * PAGE
        if self.used + stretch > TOTAL:
            raise CudaError(ErrorCode.MEMORY_ALLOCATION)
        offset = self._place(stretch)
        address = self._address(kind) if at is None else at
        if kind in (MANAGED, HOST) and not self.channel.map(address, stretch, offset, at is not None):
            raise CudaError(ErrorCode.MEMORY_ALLOCATION)
        self._count += 1
        self.used += stretch
        memory = np.frombuffer(self.map, np.uint8, size, offset)
        # The host may write what it can see at any time, without a call that would say so.
        state = np.full(size, UNWRITTEN, np.uint8) if kind in HIDDEN else None
        allocation = Allocation(name or f"{kind} allocation {self._count}", memory, address, state)
        block = self.blocks[address >> WINDOW_BITS] = Block(kind, allocation, offset, size, stretch, at is not None)
        return block

    def _place(self, stretch: int) -> int:
        """Returns the offset of free pages in the file; those of freed memory of this size first."""
        if self._free.get(stretch):
            return self._free[stretch].pop()
        if self._end + stretch > TOTAL:
            raise CudaError(ErrorCode.MEMORY_ALLOCATION)
        self._end += stretch
        return self._end - stretch

    def _address(self, kind: str) -> int:
        # Round and round, so that a pointer that is used soon after its memory was freed finds nothing.
        shared = kind in (MANAGED, HOST)
        windows: Sequence[int] = HOST_WINDOWS if shared else DEVICE_WINDOWS
        for _ in windows:
            number = windows[next(self._windows[shared]) % len(windows)]
            if number not in self.blocks:
                return (number << WINDOW_BITS) + (1 << (WINDOW_BITS - 1))
        raise CudaError(ErrorCode.MEMORY_ALLOCATION)

    def free(self, address: int, kinds: tuple[str, ...]) -> None:
        """Frees the allocation that begins at an address; none at 0. Raises CudaError for any other address."""
        if not address:
            return
        block = self.blocks.get(address >> WINDOW_BITS)
        if block is None or block.address != address or block.kind not in kinds:
            raise CudaError(ErrorCode.INVALID_VALUE)
        if block.registered:
            raise CudaError(ErrorCode.INVALID_VALUE)
        if block.kind in (MANAGED, HOST):
            self.channel.unmap(address, block.stretch)
        self._forget(block)

    def unregister(self, address: int) -> None:
        """Ends the registration of the program's own memory around an address; it stays where it is."""
        block = self.find(address)
        if block is None or not block.registered:
            raise CudaError(ErrorCode.INVALID_VALUE)
        del self.blocks[block.address >> WINDOW_BITS]

    def taken(self, address: int) -> bool:
        """True if the window of an address has an allocation already."""
        return address >> WINDOW_BITS in self.blocks

    def _forget(self, block: Block) -> None:
        del self.blocks[block.address >> WINDOW_BITS]
        self.used -= block.stretch
        self.forget(block)
        self._free.setdefault(block.stretch, []).append(block.offset)

    def close(self) -> None:
        """Gives all memory back."""
        self.blocks.clear()
        os.close(self.file)

    def find(self, address: int) -> Block | None:
        """Returns the allocation that an address is in, or just behind."""
        block = self.blocks.get(address >> WINDOW_BITS)
        return block if block is not None and 0 <= address - block.address <= block.size else None

    def named(self, names: Collection[str]) -> dict[str, Block]:
        """Returns the allocations that have these names."""
        return {block.allocation.name: block for block in self.blocks.values() if block.allocation.name in names}

    def owns(self, address: int) -> bool:
        """True for addresses of the device, allocated or not, and of host memory that it has in common with the program."""
        block = self.blocks.get(address >> WINDOW_BITS)
        window = address >> WINDOW_BITS
        if window in DEVICE_WINDOWS or window == HEAP_WINDOW:
            return True
        return block is not None and 0 <= address - block.address < block.size

    def part(self, address: int, size: int) -> tuple[Block, slice]:
        """Returns the allocation and the bytes of a range. Raises CudaError if it is not all in one."""
        block = self.find(address)
        if block is None or address - block.address + size > block.size:
            raise CudaError(ErrorCode.INVALID_VALUE)
        return block, slice(address - block.address, address - block.address + size)

    def read(self, address: int, size: int) -> bytes:
        block, where = self.part(address, size)
        return block.allocation.memory[where].tobytes()

    def note(self, block: Block, verb: str, where: slice) -> None:
        if self.moves is not None:
            self.moves.append(MovedRange(block, verb, where.start, where.stop))

    def copied(self, address: int, size: int) -> bytes:
        """Returns bytes that are copied to elsewhere."""
        block, where = self.part(address, size)
        self.note(block, READ, where)
        return self.read(address, size)

    def write(self, address: int, data: bytes | Array) -> None:
        block, where = self.part(address, len(data))
        self.put(block, where, np.frombuffer(data, np.uint8))

    def fill(self, address: int, value: int, size: int) -> None:
        block, where = self.part(address, size)
        self.put(block, where, value & 0xFF)

    def put(self, block: Block, where: slice, data: Array | int, states: Array | int = WRITTEN) -> None:
        """Writes bytes of an allocation, and their state."""
        self.note(block, WRITE, where)
        to = block.opened()
        to.memory[where] = data
        if to.state is not None:
            to.state[where] = states

    def copy(self, target: int, source: int, size: int) -> None:
        """Copies between any two places, of the device or of the program; bytes that nobody wrote stay unwritten."""
        if not size:
            return
        if not self.owns(target):
            self.channel.write(target, self.copied(source, size) if self.owns(source) else self.channel.read(source, size))
        elif not self.owns(source):
            self.part(target, size)
            self.write(target, self.channel.read(source, size))
        else:
            (to, here), (from_, there) = self.part(target, size), self.part(source, size)
            self.note(from_, READ, there)
            state = from_.allocation.state
            states = WRITTEN if state is None else state[there].copy()
            self.put(to, here, from_.allocation.memory[there].copy(), states)
