"""Accesses of machine code to memory: which bytes each lane touches, and what is known of what it loads."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .lanes import Array, Lanes, neighbour
from .opcodes import WORD
from .operands import WARP, UnknownInstruction
from .sass import Instruction

SECTOR = 32
FIRST_ADDRESS, APART = 1 << 40, 1 << 36
"""The distance of tensors: so far apart that no offset leads from one into the next."""
SHARED_OFFSET, RANK_AT = 0xFFFFFF, 24
"""The bits of an address in shared memory that are its offset; where the rank of the block in its cluster stands."""
SPACES = {
    **dict.fromkeys(("LDG", "LD", "STG", "ST", "ATOM", "ATOMG", "RED", "REDG", "LDGSTS"), "global"),
    **dict.fromkeys(("LDS", "STS", "LDSM", "STSM", "ATOMS"), "shared"),
    **dict.fromkeys(("LDL", "STL"), "local"),
}
"""Opcodes of memory, and the memory that they reach."""
GENERICS = ("LD", "ST")
"""Opcodes whose addresses may be those of shared memory, too, which lie below all tensors."""
STORES = ("STG", "ST", "STS", "STL", "STSM")
ATOMICS = ("ATOM", "ATOMG", "ATOMS", "RED", "REDG")
SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32, "F32x2": 8, "F32x4": 16, "F16x4": 8, "BF16x4": 8}
_TERM = re.compile(r"(-?)(?:(U?R(?:\d+|Z))((?:\.\w+)*)|(0x[0-9a-f]+))")


def tensor_of(address: int) -> int:
    """Returns the number of the tensor at an address."""
    return (int(address) - FIRST_ADDRESS) // APART


@dataclass
class TensorBytes:
    """The bytes that a launch requested of one tensor, and the sectors of 32 bytes that it touched, warp by warp."""

    read_bytes: int = 0
    write_bytes: int = 0
    read_sectors: int = 0
    write_sectors: int = 0


@dataclass(frozen=True)
class WarpAccess:
    """An access by lanes: addresses of the lanes that make it, a row for every warp that runs.

    `space` is "global", "shared" or "local"; addresses are the space's own. A copy from global to shared memory has the addresses
    that it writes in `to`.
    """

    space: str
    size: int
    write: bool
    addresses: Array  # (warps, 32)
    lanes: Array  # which of them make it
    to: WarpAccess | None = None

    def of(self, warps: Sequence[int]) -> WarpAccess:
        """Returns the rows of some warps."""
        if len(warps) == len(self.addresses):
            return self
        rows = list(warps)
        return WarpAccess(self.space, self.size, self.write, self.addresses[rows], self.lanes[rows], self.to and self.to.of(warps))

    def sectors(self) -> Array:
        """Returns the number of sectors of 32 bytes that each warp touches."""
        first = np.where(self.lanes, self.addresses // SECTOR, -1)
        last = np.where(self.lanes, (self.addresses + self.size - 1) // SECTOR, -1)
        both = np.sort(np.concatenate([first, last], axis=1), axis=1) if self.size > 1 else np.sort(first, axis=1)
        count: Array = (np.diff(both, axis=1) != 0).sum(axis=1) + (both[:, 0] >= 0)
        return count


class Space:
    """Memory of one kind: bytes, and which words of 32 bits are unknown."""

    def __init__(self, name: str, data: Array) -> None:
        self.name = name
        padded = np.zeros(-(-data.nbytes // 16) * 16 + 16, np.uint8)
        if data.any():  # zeros take no memory before they are written
            padded[: data.nbytes] = data.reshape(-1).view(np.uint8)
        self.size = data.nbytes
        self.views: dict[int, Array] = {1: padded, 2: padded.view(np.uint16), 4: padded.view(np.uint32)}
        self.unknown: Array | None = None

    def load(self, offsets: Array, size: int) -> tuple[list[Array], bool]:
        """Returns the words (one for sizes up to 4 bytes) at each offset, and whether all are known."""
        at = offsets >> 2
        known = self.unknown is None or not any(self.unknown[at + k].any() for k in range(max(size // 4, 1)))
        if size < 4:
            return [self.views[size][offsets // size].astype(np.uint32)], known
        return [self.views[4][at + k] for k in range(size // 4)], known

    def store(self, offsets: Array, size: int, values: Sequence[Array] | None) -> None:
        """Stores words; None: unknown ones."""
        at = offsets >> 2
        if self.unknown is None and values is None:
            self.unknown = np.zeros(len(self.views[4]), np.bool_)
        if self.unknown is not None and (size >= 4 or values is None):
            for k in range(max(size // 4, 1)):
                self.unknown[at + k] = values is None
        if values is None:
            return
        if size < 4:
            self.views[size][offsets // size] = values[0]
            return
        for k, value in enumerate(values):
            self.views[4][at + k] = value


class Memory:
    """The memory that a launch's blocks reach: tensors, and each block's own shared and local memory."""

    def __init__(
        self, tensors: Sequence[Space], blocks: int, threads: int, shared_bytes: int, local_bytes: int, cluster: int = 1
    ) -> None:
        self.tensors = tensors
        self.numbers: tuple[int, ...] = ()
        """Numbers of the blocks that run, where others of a grid of `grid` blocks take tickets in turns with them, by atomics."""
        self.grid = 0
        self.traffic = {space.name: TensorBytes() for space in tensors}
        self.counters: dict[int, int] = {}
        """Whole numbers in global memory that atomics add to: their addresses, and what they were before."""
        self.strides = {"shared": -(-shared_bytes // 16) * 16, "local": max(-(-local_bytes // 16) * 16, 16)}
        number = np.arange(threads, dtype=np.int64)
        self.own = {
            "shared": Space("shared", np.zeros(self.strides["shared"] * blocks, np.uint8)),
            "local": Space("local", np.zeros(self.strides["local"] * threads, np.uint8)),
        }
        block = number // (threads // blocks)
        self.begins = {"shared": block * self.strides["shared"], "local": number * self.strides["local"]}
        self.clusters = block // cluster * cluster * self.strides["shared"]

    def rewind(self) -> None:
        """Gives counters the numbers that they had."""
        for address, value in self.counters.items():
            number, offset = divmod(address - FIRST_ADDRESS, APART)
            self.tensors[number].store(np.array([offset]), 4, [np.array([value], np.uint32)])

    def touch(
        self, space: str, addresses: Array, active: Array, size: int, data: Sequence[Array] | None, write: bool
    ) -> tuple[list[Array], bool]:
        """Loads or stores for the active lanes, and counts what tensors are asked for. `space` "cluster": generic addresses of
        shared memory, which say of which block of the cluster."""
        found = addresses[active]
        if space != "global":
            begins = self.begins.get(space, self.clusters + (addresses >> RANK_AT) * self.strides["shared"])
            space = "local" if space == "local" else "shared"
            found = found % self.strides[space] if space == "local" else found & SHARED_OFFSET
            if found.max(initial=0) + size > self.strides[space]:
                raise UnknownInstruction(f"an address behind {space} memory: {int(found.max())}")
            own, found = self.own[space], found + begins[active]
            if write:
                own.store(found, size, data)
                return [], True
            return own.load(found, size)
        numbers = (found - FIRST_ADDRESS) // APART
        words: list[Array] = [np.zeros(len(found), np.uint32) for _ in range(max(size // 4, 1))]
        known = True
        for number in np.unique(numbers).tolist():
            here = numbers == number
            if not 0 <= number < len(self.tensors):
                raise UnknownInstruction(f"an address that belongs to no array: {int(found[here][0]):#x}")
            tensor = self.tensors[number]
            offsets = found[here] - FIRST_ADDRESS - number * APART
            if offsets.min() < 0 or offsets.max() + size > tensor.size:
                raise UnknownInstruction(f"an access outside of {tensor.name}: byte {int(offsets.max())} of {tensor.size}")
            self.count(tensor.name, addresses, active, number, size, write)
            if write:
                tensor.store(offsets, size, None if data is None else [each[here] for each in data])
            else:
                loaded, sure = tensor.load(offsets, size)
                known = known and sure
                for word, value in zip(words, loaded, strict=True):
                    word[here] = value
        return words, known

    def forget_shared(self, block: int, offset: int, size: int) -> None:
        """Makes bytes of a block's shared memory unknown."""
        if offset + size > self.strides["shared"]:
            raise UnknownInstruction(f"an address behind shared memory: {offset + size}")
        space = self.own["shared"]
        if space.unknown is None:
            space.unknown = np.zeros(len(space.views[4]), np.bool_)
        begin = block * self.strides["shared"] + offset
        space.unknown[begin >> 2 : begin + size >> 2] = True

    def count(self, name: str, addresses: Array, active: Array, number: int, size: int, write: bool) -> None:
        rows = addresses.reshape(-1, WARP)
        lanes = active.reshape(-1, WARP) & ((rows - FIRST_ADDRESS) // APART == number)
        sectors = int(WarpAccess("global", size, write, rows, lanes).sectors().sum())
        traffic = self.traffic[name]
        if write:
            traffic.write_bytes += int(lanes.sum()) * size
            traffic.write_sectors += sectors
        else:
            traffic.read_bytes += int(lanes.sum()) * size
            traffic.read_sectors += sectors


AddressOf = Callable[[Lanes, Array], Array]


def address_of(i: Instruction, text: str) -> AddressOf:
    """Returns what computes an address a lane: the sum of what stands between the brackets. It refuses unknown registers."""
    inner = text[text.rindex("[") + 1 : text.rindex("]")]
    wide = SPACES.get(i.opcode) == "global" and "E" in i.modifiers and not (i.opcode == "LDGSTS" and text == i.operands[0])
    fixed, terms, needed = 0, [], []
    for sign, register, suffix, literal in _TERM.findall(inner):
        if literal:
            fixed += (-1 if sign else 1) * int(literal, 16)
            continue
        double = ".64" in suffix or (
            wide and "U32" not in suffix and (register[0] == "U" or (".64" not in inner and "U32" not in inner))
        )
        scale = re.search(r"\.X(\d+)", suffix)
        terms.append((register, double, int(scale[1]) if scale else 1))
        needed += [register, neighbour(register)] if double else [register]

    def compute(lanes: Lanes, active: Array) -> Array:
        if lanes.lacking(needed, active) is not None:
            raise UnknownInstruction(f"{i}: the address is unknown")
        total = np.full(lanes.threads, fixed, np.int64)
        for register, double, scale in terms:
            value = lanes.register(register).astype(np.int64)
            if double:
                value = value | lanes.register(neighbour(register)).astype(np.int64) << 32
            total = total + value * scale
        return total if wide else total & int(WORD)

    return compute


@dataclass(frozen=True)
class MemoryWork:
    """A decoded instruction of memory: where, how many bytes a lane, which registers it fills and which it stores."""

    instruction: Instruction
    space: str
    size: int
    address: AddressOf
    results: tuple[str, ...] = ()  # registers, and predicates of atomics
    data: tuple[str, ...] = ()
    source: AddressOf | None = None  # of LDGSTS
    condition: str = ""  # of LDGSTS: the lanes that read

    @classmethod
    def of(cls, i: Instruction) -> MemoryWork:
        size = next((SIZES[m] for m in i.modifiers if m in SIZES), 4)
        at = next(k for k, each in enumerate(i.operands) if "[" in each)
        before, behind = i.operands[:at], tuple(each.removesuffix(".reuse") for each in i.operands[at + 1 :])
        address, space = address_of(i, i.operands[at]), SPACES[i.opcode]
        if i.opcode == "LDGSTS":
            return cls(i, "shared", size, address, source=address_of(i, behind[0]), condition=(*behind, "")[1])
        words = max(size // 4, 1)
        if i.opcode in ("LDSM", "STSM"):
            count = next((int(m) for m in i.modifiers if m in ("2", "4")), 1)
            names = tuple(neighbour(before[0], k) for k in range(count)) if before else ()
            return cls(i, space, 16, address, names, behind)
        if i.opcode in STORES:
            return cls(i, space, size, address, (), tuple(neighbour(behind[0], k) for k in range(words)))
        if i.opcode in ATOMICS:
            return cls(i, space, size, address, before, behind[:1])
        return cls(i, space, size, address, tuple(neighbour(before[-1], k) for k in range(words)))

    @property
    def write(self) -> bool:
        return self.instruction.opcode in STORES

    @property
    def words(self) -> int:
        return max(self.size // 4, 1)

    def run(self, lanes: Lanes, memory: Memory, active: Array, guard_unknown: bool) -> WarpAccess | None:
        """Makes the accesses of the active lanes; data that are unknown stay so. One is not made, as a branch is not taken, if both
        its guard and its address are unknown: that was computed under the same guard."""
        i = self.instruction
        if not active.any():
            return None
        if self.source is not None:
            return self.copy(lanes, memory, active)
        try:
            addresses = self.address(lanes, active)
        except UnknownInstruction:
            if not guard_unknown:
                raise
            for name in self.results:
                lanes.forget(name, active)
            return None
        if i.opcode in ("LDSM", "STSM"):
            return self.matrices(lanes, memory, addresses, active)
        space = "cluster" if i.opcode in GENERICS and (addresses[active] < FIRST_ADDRESS).all() else self.space
        if i.opcode in ATOMICS:
            self.atomic(lanes, memory, addresses, active)
        elif self.write:
            known = not guard_unknown and lanes.lacking(self.data, active) is None
            values = [lanes.register(each)[active] for each in self.data] if known else None
            memory.touch(space, addresses, active, self.size, values, write=True)
        else:
            self.load(lanes, memory, space, addresses, active, guard_unknown)
        return self.access(space, addresses, active)

    def access(self, space: str, addresses: Array, active: Array, to: WarpAccess | None = None) -> WarpAccess:
        space = "shared" if space == "cluster" else space
        return WarpAccess(space, self.size, self.write, addresses.reshape(-1, WARP), active.reshape(-1, WARP), to)

    def load(self, lanes: Lanes, memory: Memory, space: str, addresses: Array, active: Array, guard_unknown: bool) -> None:
        loaded, known = memory.touch(space, addresses, active, self.size, None, write=False)
        everyone = bool(active.all())
        for name, values in zip(self.results, loaded, strict=True):
            if guard_unknown or not known:
                lanes.forget(name, active)
                continue
            if "S8" in self.instruction.modifiers or "S16" in self.instruction.modifiers:
                values = values.astype(f"u{self.size}").view(f"i{self.size}").astype(np.int32).view(np.uint32)
            whole = values
            if not everyone:
                whole = np.zeros(lanes.threads, np.uint32)
                whole[active] = values
            lanes.write(name, whole, None if everyone else active)

    def atomic(self, lanes: Lanes, memory: Memory, addresses: Array, active: Array) -> None:
        """Reads and writes; sums of whole numbers are made, lane by lane, everything else is unknown."""
        mods = self.instruction.modifiers
        loaded, known = memory.touch(self.space, addresses, active, self.size, None, write=False)
        simple = known and "ADD" in mods and self.size == 4 and not any(m.startswith(("F", "BF")) for m in mods)
        simple = simple and bool(self.data) and lanes.lacking(self.data, active) is None
        data = None
        before = np.zeros(lanes.threads, np.uint32)
        if simple and self.space == "global":
            for where, value in zip(addresses[active].tolist(), loaded[0].tolist(), strict=True):
                memory.counters.setdefault(where, value)
        ticket = simple and bool(memory.numbers) and self.space == "global" and len(np.unique(addresses[active])) == 1
        if ticket and (lanes.register(self.data[0])[active] == 1).all():
            taken = int(loaded[0][0]) + np.arange(len(loaded[0]))
            numbers = np.array(memory.numbers)[taken % len(memory.numbers)]
            before[active] = taken // len(memory.numbers) * memory.grid + numbers
            data = [np.full(len(taken), taken[-1] + 1, np.uint32)]
        elif simple:
            added, place = lanes.register(self.data[0])[active], addresses[active].tolist()
            current: dict[int, int] = {}
            old = np.empty(len(added), np.uint32)
            for k, (where, more) in enumerate(zip(place, added.tolist(), strict=True)):
                old[k] = current.setdefault(where, int(loaded[0][k]))
                current[where] = (current[where] + more) & 0xFFFFFFFF
            data = [np.array([current[where] for where in place], np.uint32)]
            before[active] = old
        memory.touch(self.space, addresses, active, self.size, data, write=True)
        for each in self.results:
            if simple and "P" not in each:
                lanes.write(each, before, active)
            else:
                lanes.forget(each, active)

    def copy(self, lanes: Lanes, memory: Memory, active: Array) -> WarpAccess:
        """Copies from global to shared memory; lanes whose condition is false write zeros and read nothing."""
        assert self.source is not None
        to, reading = self.address(lanes, active), active
        if self.condition:
            name = self.condition.lstrip("!")
            if lanes.lacking([name], active) is not None:
                raise UnknownInstruction(f"{self.instruction}: it is unknown which lanes read")
            reading = active & lanes.condition(self.condition)
            nothing = np.zeros(int((active & ~reading).sum()), np.uint32)
            memory.touch("shared", to, active & ~reading, self.size, [nothing] * self.words, write=True)
        source = self.source(lanes, reading)
        loaded, known = memory.touch("global", source, reading, self.size, None, write=False)
        memory.touch("shared", to, reading, self.size, loaded if known else None, write=True)
        written = WarpAccess("shared", self.size, True, to.reshape(-1, WARP), active.reshape(-1, WARP))
        return self.access("global", source, reading, written)

    def matrices(self, lanes: Lanes, memory: Memory, addresses: Array, active: Array) -> WarpAccess:
        """LDSM, STSM: the first 8, 16 or 32 lanes of a warp have the addresses of rows of 16 bytes."""
        for each in self.results:
            lanes.forget(each, active)
        count = next((int(m) for m in self.instruction.modifiers if m in ("2", "4")), 1)
        asking = active & (np.arange(lanes.threads) % WARP < 8 * count)
        if self.write:
            memory.touch("shared", addresses, asking, 16, None, write=True)
        return self.access("shared", addresses, asking)
