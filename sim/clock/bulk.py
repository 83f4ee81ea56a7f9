"""Bulk copies (TMA) of machine code: the rows of a tensor, or the bytes, that one moves, its shared memory and its mbarrier."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from cupyflash.sim.ptx.memory.swizzles import Description
from cupyflash.sim.ptx.memory.swizzles import decode as decode_map

from .lanes import Array, Lanes, neighbour
from .memory import RANK_AT, SECTOR, SHARED_OFFSET, Memory, tensor_of
from .operands import WARP, UnknownInstruction
from .sass import Instruction
from .waits import Key, Waits

BULK = ("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED")
"""Opcodes of bulk copies."""
CHUNK = 16  # the unit of a plain copy's length
MASK_AT = 16  # the mask of a multicast stands in the upper half of its register
_REGISTER = re.compile(r"U?R(?:\d+|Z)")


@dataclass(frozen=True, eq=False)
class Bulk:
    """A bulk copy: the addresses of rows of `length` bytes in global memory, all within the tensor; `size` bytes of shared memory.

    `keys`: by block that gets the bytes, the meeting that they count for; none for a store.
    """

    warp: int
    rows: Array
    length: int
    size: int
    write: bool
    keys: Mapping[int, Key]

    def sectors(self, sector: int = SECTOR) -> Array:
        """Returns the different sectors that it touches."""
        first, last = self.rows // sector, (self.rows + self.length - 1) // sector
        count = int((last - first).max(initial=-1)) + 1
        if not count:
            return first
        each = first[:, None] + np.arange(count)
        found: Array = np.unique(each[each <= last[:, None]])
        return found


@dataclass(frozen=True)
class BulkWork:
    """A decoded bulk copy. `block`: the first uniform register of its shared memory and coordinates, `other`: that of the map or of
    the address in global memory, `third`: the mask of a multicast or the length of a plain copy."""

    instruction: Instruction
    block: str
    other: str
    third: str | None

    @classmethod
    def of(cls, i: Instruction) -> BulkWork:
        if "IM2COL" in i.modifiers:
            raise UnknownInstruction(f"{i}: im2col is not executed")
        names = [found[0] for each in i.operands if not each.startswith("desc") and (found := _REGISTER.search(each))]
        return cls(i, names[0], names[1], names[2] if len(names) > 2 else None)

    @property
    def loads(self) -> bool:
        return self.instruction.opcode == "UTMALDG" or self.instruction.modifiers[:2] in (("S", "G"), ("S", "S"))

    def run(self, lanes: Lanes, memory: Memory, waits: Waits, fetch: Callable[[int], bytes], active: Array) -> tuple[Bulk, ...]:
        """Copies once for each warp that has an active lane; `fetch` reads the 128 bytes of a tensor map."""
        return tuple(self.one(lanes, memory, waits, fetch, lane) for lane in first_of_warps(active))

    def one(self, lanes: Lanes, memory: Memory, waits: Waits, fetch: Callable[[int], bytes], lane: int) -> Bulk:
        def word(name: str, by: int = 0) -> int:
            name = neighbour(name, by)
            if name in lanes.unknown and lanes.unknown[name][lane]:
                raise UnknownInstruction(f"{self.instruction}: {name} is unknown")
            return int(lanes.register(name)[lane])

        def wide(name: str) -> int:
            return word(name) | word(name, 1) << 32

        tensor = self.instruction.opcode.startswith("UTMA")
        shared = word(self.other if not tensor and not self.loads else self.block)
        if tensor:
            found = decode_map(fetch(wide(self.other)))
            if found is None:
                raise UnknownInstruction(f"{self.instruction}: no tensor map at its address")
            description, begin = found
            first = 2 if self.loads else 1
            at = [word(self.block, first + k) for k in range(description.rank)]
            rows, length = rows_of(description, begin, [c - (c >> 31 << 32) for c in at])
            size = description.size
        else:
            assert self.third is not None
            length = size = word(self.third) * CHUNK
            within = self.instruction.modifiers[:2] == ("S", "S")  # from one block of a cluster to another
            rows = np.array([] if within else [wide(self.other if self.loads else self.block)], np.int64)
        self.count(memory, rows, length)
        keys = {}
        if self.loads:
            targets = self.targets(lane // waits.threads, word, shared, waits)
            barrier = word(self.block, 1) & SHARED_OFFSET
            for block in targets:
                memory.forget_shared(block, shared & SHARED_OFFSET, size)
                keys[block] = waits.arrive((block, barrier), 0, -size)
        return Bulk(lane // WARP, rows, length, size, not self.loads, keys)

    def targets(self, own: int, word: Callable[[str], int], shared: int, waits: Waits) -> list[int]:
        """Returns the blocks that get the bytes."""
        if waits.cluster == 1:
            return [own]
        begin = own // waits.cluster * waits.cluster
        if "MULTICAST" not in self.instruction.modifiers:
            return [begin + (shared >> RANK_AT)]
        assert self.third is not None
        mask = word(self.third) >> MASK_AT
        return [begin + rank for rank in range(waits.cluster) if mask >> rank & 1]

    def count(self, memory: Memory, rows: Array, length: int) -> None:
        """Counts the bytes and sectors of the tensor."""
        if not rows.size or not length:
            return
        number = tensor_of(rows[0])
        if not 0 <= number < len(memory.tensors):
            raise UnknownInstruction(f"{self.instruction}: an address that belongs to no array: {int(rows[0]):#x}")
        traffic = memory.traffic[memory.tensors[number].name]
        sectors = int(((rows + length - 1) // SECTOR - rows // SECTOR + 1).sum())
        reduces = self.instruction.opcode in ("UTMAREDG", "UBLKRED")
        if self.loads or reduces:
            traffic.read_bytes += rows.size * length
            traffic.read_sectors += sectors
        if not self.loads:
            traffic.write_bytes += rows.size * length
            traffic.write_sectors += sectors


def first_of_warps(active: Array) -> list[int]:
    """Returns the first active lane of each warp that has one."""
    rows = active.reshape(-1, WARP)
    warps = np.flatnonzero(rows.any(axis=1))
    found: list[int] = (warps * WARP + rows[warps].argmax(axis=1)).tolist()
    return found


def rows_of(d: Description, begin: int, at: list[int]) -> tuple[Array, int]:
    """Returns the addresses of a box's rows that lie in the tensor, and the bytes of each that do."""
    low, high = max(at[0], 0), min(at[0] + d.box[0], d.dims[0])
    rows = np.array([begin + low * d.element], np.int64)
    for axis in range(1, d.rank):
        index = at[axis] + np.arange(d.counts[axis]) * d.element_strides[axis]
        index = index[(index >= 0) & (index < d.dims[axis])]
        rows = (index[:, None] * d.strides[axis - 1] + rows).ravel()
    return (rows, (high - low) * d.element) if high > low else (rows[:0], 0)
