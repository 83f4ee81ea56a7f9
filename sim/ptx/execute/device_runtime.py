"""The functions that a device brings along for kernels, besides printf and assert: those of the heap."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..memory.heap import BadCall, Heap
from ..memory.spaces import LaunchMemory
from ..state.lanes import LaneSet
from ..state.segments import Segment
from ..text.syntax import PtxInstruction

PRINTING = frozenset({"vprintf", "__assertfail"})
"""Functions that give no memory; the machine answers them itself."""


@dataclass(frozen=True)
class Caller:
    """A thread that calls a function of the device: the launch's memory, the thread as a set of one lane, the call, and the
    names of the module's functions by address.
    """

    memory: LaunchMemory
    lanes: LaneSet
    instruction: PtxInstruction
    functions: Mapping[int, str]

    def read(self, address: int, size: int) -> bytes:
        """Returns the bytes at a generic address. Raises BadCall if they are not all there."""
        found = self.memory.view(int(self.lanes.index[0]), address, size)
        if len(found) < size:
            raise BadCall(f"{size} bytes at {address:#x} are in no memory of the thread")
        return found.tobytes()

    def write(self, address: int, data: bytes) -> None:
        """Writes bytes at a generic address. Raises BadCall if that is in no memory of the thread."""
        place = self.memory.view(int(self.lanes.index[0]), address, len(data), write=True)
        if len(place) < len(data):
            raise BadCall(f"{len(data)} bytes at {address:#x} are in no memory of the thread")
        place[:] = np.frombuffer(data, np.uint8)


class DeviceRuntime:
    """Answers the calls: the method of a function's name gets the caller and the words of the arguments. It keeps the heap."""

    def __init__(self, heap_bytes: int = 8 << 20):
        self.heap_bytes = heap_bytes
        self.calls = 0

    @cached_property
    def heap(self) -> Heap:
        """The heap, which few kernels ever use."""
        return Heap(self.heap_bytes)

    def segments(self, called: Collection[str]) -> list[Segment]:
        """Returns the memory that kernels were given, or may be given by one that has calls of these functions."""
        given = "heap" in vars(self) and self.heap.top
        return [self.heap.segment] if given or not PRINTING.issuperset(called) else []

    def call(self, name: str, caller: Caller, words: Sequence[int]) -> int:
        """Returns the result of a call. Raises BadCall for arguments with which the launch cannot go on."""
        self.calls += 1
        method = getattr(self, name.replace("__", "_"), None)
        if method is None:
            raise BadCall(f"{name} is answered in whole programs only (cupyflash run)")
        return int(method(caller, *words) or 0)

    def malloc(self, caller: Caller, size: int) -> int:
        return self.heap.allocate(size)

    def free(self, caller: Caller, address: int) -> None:
        self.heap.free(address)
