"""The simulated device's addresses: each array that a kernel may reach has a window of its own.

Tensors of PyTorch that share a storage share its window, so that views alias as on a device; a NumPy array's memory is that of the
array which owns it. Addresses are multiples of 4096, as an allocation's on a device are multiples of 256, and no host address.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from cupyflash.basics import Array
from cupyflash.sim.ptx import Allocation
from cupyflash.sim.ptx.state.segments import WINDOW_BITS, owner_of

WINDOWS = range(256, 1 << 14)
"""Above those of a module's variables, below the heap's."""


@dataclass
class HostBlock:
    """Memory with a place: `where` gives its first byte and its size at this moment, `gone` is True once nobody holds it."""

    address: int
    where: Callable[[], tuple[int, int]]
    gone: Callable[[], bool]
    writeable: bool = True

    def memory(self) -> Array:
        """Returns the bytes as an array."""
        start, size = self.where()
        raw = (ctypes.c_ubyte * size).from_address(start)
        found = np.frombuffer(memoryview(raw), np.uint8) if size else np.empty(0, np.uint8)
        found.flags.writeable = self.writeable
        return found


class Addresses:
    """The windows of the arrays whose address somebody has taken."""

    def __init__(self) -> None:
        self._blocks: dict[Any, HostBlock] = {}
        self._next = 0

    def of(self, value: Any) -> int:
        """Returns the device's address of the first element of a tensor or a NumPy array; 0 if it has no memory."""
        return self._of_array(value) if isinstance(value, np.ndarray) else self._of_tensor(value)

    def _of_array(self, array: Array) -> int:
        root = owner_of(array)
        low, high = byte_bounds(root)
        block = self._blocks.get(("numpy", low, high))
        if block is None:
            keeper = weakref.ref(root)
            bounds = low, high - low
            block = HostBlock(self._window(), lambda: bounds, lambda: keeper() is None)
            self._blocks["numpy", low, high] = block
        block.writeable = array.flags.writeable
        return block.address + int(array.__array_interface__["data"][0]) - low

    def _of_tensor(self, tensor: Any) -> int:
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return 0
        # A weak reference keeps the number of a storage from being used again, and its size may change.
        number = storage._cdata
        block = self._blocks.get(number)
        if block is None:
            weak = StorageWeakRef(storage)
            block = HostBlock(self._window(), lambda: storage_place(weak), weak.expired)
            self._blocks[number] = block
        return block.address + int(tensor.storage_offset() * tensor.element_size())

    def _window(self) -> int:
        """Returns an address in a window that no array has; the places of arrays that are gone are the last to be used again."""
        if len(self._blocks) % 256 == 255:
            self._blocks = {key: block for key, block in self._blocks.items() if not block.gone()}
        taken = {block.address >> WINDOW_BITS for block in self._blocks.values()}
        for _ in WINDOWS:
            window = WINDOWS[self._next % len(WINDOWS)]
            self._next += 1
            if window not in taken:
                return (window << WINDOW_BITS) + (1 << (WINDOW_BITS - 1))
        raise MemoryError(f"{len(taken):,} arrays have addresses of the simulated device: no window is left")

    def memory(self, address: int) -> Array:
        """Returns the bytes from an address to the end of its window's array; none at 0."""
        block = next((one for one in self._blocks.values() if one.address >> WINDOW_BITS == address >> WINDOW_BITS), None)
        return np.empty(0, np.uint8) if block is None else block.memory()[address - block.address :]

    def alive(self) -> list[HostBlock]:
        """Returns the memory of all arrays that are still there."""
        return [block for block in self._blocks.values() if not block.gone()]

    def allocations(self, pointers: list[tuple[str, int]]) -> list[Allocation]:
        """Returns all arrays that are still there and whose address was taken, each named by the arguments that point into it:
        (name, address)."""
        found, unnamed = [], 0
        for block in self.alive():
            memory = block.memory()
            names = [name for name, address in pointers if address >> WINDOW_BITS == block.address >> WINDOW_BITS]
            unnamed += not names
            found.append(Allocation(", ".join(names) or f"tensor {unnamed}", memory, block.address))
        return found


def storage_place(weak: Any) -> tuple[int, int]:
    """Returns where the bytes of a storage are, and their number."""
    torch = sys.modules["torch"]
    storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return (0, 0) if storage is None else (storage.data_ptr(), storage.nbytes())
