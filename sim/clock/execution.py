"""Executes machine code thread block by thread block: which way each warp goes, and which bytes each access touches.

All threads of a block run together: those at the lowest address go first, so that what diverged meets again. What is executed are
integers, predicates, votes and memory (`opcodes`); floating-point numbers are unknown, and so is what is made of them. A branch on an
unknown predicate is decided by the launch's `decide`.

The PTX machine is the check: it executes what this machine code was made of, and both make the same accesses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupyflash.sim.ptx.parameters import BoundArguments

from . import sass
from .lanes import ALWAYS, Array, Lanes, Mask, neighbour, pair
from .opcodes import WARP, WORD, Launched, Operands, UnknownInstruction, Work, decoded
from .sass import Instruction

SECTOR = 32
FIRST_ADDRESS, APART = 1 << 40, 1 << 36
"""Where tensors lie: so far apart that no offset leads from one into the next."""
PARAMETERS = {7: 0x160, 8: 0x160, 9: 0x210, 10: 0x380, 12: 0x380}
"""Where the parameters begin in constant bank 0, by major compute capability (as cuobjdump shows it of any kernel)."""
SIZES = {9: (0x0, 0xC), 8: (0x0, 0xC), 7: (0x0, 0xC), 10: (0x360, 0x370), 12: (0x360, 0x370)}
"""Where blockDim and gridDim lie there."""
SHARED_AT = {7: 0, 8: 0, 9: 0x400, 10: 0x400, 12: 0x400}
"""Where a block's own shared memory begins: from 9.0 on the first kilobyte is the system's."""

Decide = Callable[[Instruction], bool]
_TERM = re.compile(r"(-?)(?:(U?R(?:\d+|Z))((?:\.\w+)*)|(0x[0-9a-f]+))")


@dataclass
class TensorBytes:
    """What a launch requested of one tensor, and the sectors of 32 bytes that it touched, warp by warp."""

    read_bytes: int = 0
    write_bytes: int = 0
    read_sectors: int = 0
    write_sectors: int = 0


class Space:
    """Memory of one kind: bytes, and which words of 32 bits are unknown."""

    def __init__(self, name: str, data: Array) -> None:
        self.name = name
        padded = np.zeros(-(-data.nbytes // 16) * 16 + 16, np.uint8)
        padded[: data.nbytes] = data.reshape(-1).view(np.uint8)
        self.size = data.nbytes
        self.views = {1: padded, 2: padded.view(np.uint16), 4: padded.view(np.uint32)}
        self.unknown: Array | None = None

    def load(self, offsets: Array, size: int) -> tuple[list[Array], bool]:
        """Returns the words (one for sizes up to 4 bytes) at each offset, and whether all are known."""
        if size < 4:
            return [self.views[size][offsets // size].astype(np.uint32)], self.unknown is None or not self.unknown[offsets >> 2].any()
        at = offsets >> 2
        words = self.views[4]
        known = self.unknown is None or not any(self.unknown[at + k].any() for k in range(size // 4))
        return [words[at + k] for k in range(size // 4)], known

    def store(self, offsets: Array, size: int, values: Sequence[Array] | None) -> None:
        """Stores words; None: unknown ones."""
        if values is None:
            if self.unknown is None:
                self.unknown = np.zeros(len(self.views[4]), np.bool_)
            for k in range(max(size // 4, 1)):
                self.unknown[(offsets >> 2) + k] = True
            return
        if size < 4:
            self.views[size][offsets // size] = values[0]
            return
        for k, value in enumerate(values):
            self.views[4][(offsets >> 2) + k] = value
            if self.unknown is not None:
                self.unknown[(offsets >> 2) + k] = False


@dataclass(frozen=True)
class Event:
    """An instruction that warps of a block issued: its number, which warps, and what it asked of memory."""

    at: int
    warps: tuple[int, ...]
    access: Access | None = None


@dataclass(frozen=True)
class Access:
    """An access by lanes: `space` is "global", "shared" or "local"; addresses of the lanes that make it, a row a warp."""

    space: str
    size: int
    write: bool
    addresses: Array  # (warps, 32), in the space's own addresses
    lanes: Array  # which of them make it

    def sectors(self) -> Array:
        """Returns the sectors of 32 bytes that each warp touches."""
        first = np.where(self.lanes, self.addresses // SECTOR, -1)
        last = np.where(self.lanes, (self.addresses + self.size - 1) // SECTOR, -1)
        both = np.sort(np.concatenate([first, last], axis=1), axis=1) if self.size > 1 else np.sort(first, axis=1)
        new = np.diff(both, axis=1) != 0
        return new.sum(axis=1) + (both[:, 0] >= 0)


@dataclass(frozen=True, eq=False)
class Kernel:
    """Machine code of a kernel for compute capability (major, minor)."""

    instructions: tuple[Instruction, ...]
    capability: tuple[int, int]
    shared_bytes: int = 0
    local_bytes: int = 0
    constants: Mapping[int, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, cubin: bytes, name: str) -> Kernel:
        """Reads a kernel from a cubin. KeyError if the cubin has no kernel of that name; RuntimeError without a disassembler."""
        found = sass.read(cubin)
        needs = found.resources[name]
        capability = divmod(found.architecture, 10)
        return cls(tuple(found.kernels[name]), capability, needs.get("SHARED", 0), needs.get("STACK", 0) + needs.get("LOCAL", 0))


class Launch:
    """A launch of a kernel on arrays of its own (copies): blocks are run one at a time, in any order."""

    def __init__(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: BoundArguments,
        shared_bytes: int = 0,
        decide: Decide | None = None,
    ) -> None:
        self.kernel, self.grid, self.block = kernel, (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
        self.shared_bytes = kernel.shared_bytes + shared_bytes
        self.decide = decide or (lambda i: False)
        self.tensors = [Space(tensor.name, tensor.array) for tensor in arguments.tensors]
        data = bytearray(arguments.data)
        for number, tensor in enumerate(arguments.tensors):
            data[tensor.at : tensor.at + 8] = (FIRST_ADDRESS + number * APART).to_bytes(8, "little")
        major = kernel.capability[0]
        bank = bytearray(PARAMETERS[major] + len(data))
        bank[PARAMETERS[major] :] = data
        for at, sizes in zip(SIZES[major], (self.block, self.grid), strict=True):
            bank[at : at + 12] = np.array(sizes, np.uint32).tobytes()
        self.banks = {0: bytes(bank), **kernel.constants}
        self.traffic = {space.name: TensorBytes() for space in self.tensors}
        self.instructions: Counter[str] = Counter()

    def run(self, index: Sequence[int]) -> list[Event]:
        """Runs the block with this index to its end. Returns what its warps issued, in an order that each warp keeps."""
        return list(Block(self, (*index, 0, 0)[:3]).events())


_CONTROL = frozenset({"BRA", "JMP", "EXIT", "BAR", "CALL", "RET", "KILL", "BRX"})
_MEMORY = {
    **dict.fromkeys(("LDG", "LD", "LDS", "LDL", "LDSM", "LDGSTS", "ATOM", "ATOMG", "ATOMS"), "load"),
    **dict.fromkeys(("STG", "ST", "STS", "STL", "STSM", "RED", "REDG"), "store"),
}


class Block:
    """The run of one block."""

    def __init__(self, launch: Launch, index: tuple[int, int, int]) -> None:
        self.launch = launch
        x, y, z = launch.block
        count = x * y * z
        threads = -(-count // WARP) * WARP
        number = np.arange(threads, dtype=np.uint32)
        self.lanes = Lanes(threads)
        special = {"TID.X": number % x, "TID.Y": number // x % y, "TID.Z": number // (x * y), "LANEID": number % WARP}
        special |= {f"CTAID.{axis}": np.full(threads, at, np.uint32) for axis, at in zip("XYZ", index, strict=True)}
        special |= {f"NCTAID.{axis}": np.full(threads, size, np.uint32) for axis, size in zip("XYZ", launch.grid, strict=True)}
        special["CgaCtaId"] = self.lanes.zero
        self.special = {f"SR_{name}": value for name, value in special.items()}
        self.there = number < count
        self.shared = Space("shared", np.zeros(SHARED_AT[launch.kernel.capability[0]] + launch.shared_bytes, np.uint8))
        self.local = Space("local", np.zeros(max(launch.kernel.local_bytes, 16) * threads, np.uint8))
        self.launched = Launched(launch.banks, self.special)
        code = launch.kernel.instructions
        self.at = {each.address: k for k, each in enumerate(code)}
        self.works: list[Work | None] = [None] * len(code)
        self.guards = [self.guard(each) for each in code]

    def guard(self, i: Instruction) -> Callable[[], Array] | None:
        if not i.guard or i.guard in ALWAYS:
            return None
        name = i.guard.lstrip("!")
        negated = i.guard.startswith("!")
        return lambda: ~self.lanes.predicate(name) if negated else self.lanes.predicate(name)

    def events(self) -> Iterator[Event]:
        """Groups of threads at one address each; the lowest address runs, and groups that meet become one."""
        groups: dict[int, Array] = {0: self.there.copy()}
        waiting: dict[str, tuple[int, Array]] = {}
        alive = self.there.copy()
        code = self.launch.kernel.instructions
        while groups or waiting:
            if not groups:
                waiting_lanes = [lanes for _, lanes in waiting.values()]
                raise RuntimeError(f"{sum(int(each.sum()) for each in waiting_lanes)} threads wait at barriers for ever")
            at = min(groups)
            lanes = groups.pop(at)
            i = code[at]
            count = Counter[int]()
            whole = bool((lanes == alive).all()) and bool(alive.all())
            warps = tuple(np.flatnonzero(lanes.reshape(-1, WARP).any(axis=1)).tolist())
            guard = self.guards[at]
            unknown = self.lanes.lacking([i.guard.lstrip("!")], lanes) is not None if guard else False
            if guard is None:
                active: Array = lanes
            elif unknown and i.opcode in _CONTROL:
                active = lanes if self.launch.decide(i) else np.zeros_like(lanes)
            elif unknown:
                active = lanes
            else:
                active = lanes & guard()
            mask = None if whole and active is lanes and not unknown else active
            access = None
            moved: list[tuple[int, Array]] = [(at + 1, lanes)]
            if i.opcode in _CONTROL:
                moved = self.control(i, at, lanes, active, alive, waiting)
            elif i.opcode in _MEMORY:
                access = self.memory(i, active, unknown)
            elif active.any():
                work = self.works[at]
                if work is None:
                    work = self.works[at] = decoded(i, self.launched)
                if unknown:
                    for name in work.writes:
                        self.lanes.forget(name, active)
                else:
                    work.run(self.lanes, mask)
            self.launch.instructions[i.opcode] += len(warps)
            yield Event(at, warps, access)
            for to, which in moved:
                if which.any():
                    groups[to] = groups[to] | which if to in groups else which
            for barrier, (to, held) in list(waiting.items()):
                if (held == alive).all():
                    del waiting[barrier]
                    groups[to] = groups[to] | held if to in groups else held
            del count

    def control(
        self, i: Instruction, at: int, lanes: Array, active: Array, alive: Array, waiting: dict[str, tuple[int, Array]]
    ) -> list[tuple[int, Array]]:
        """Where the threads of a group go."""
        rest = lanes & ~active
        if i.opcode in ("EXIT", "KILL"):
            alive &= ~active
            return [(at + 1, rest)]
        if i.opcode == "BAR":
            if "ARV" in i.modifiers or not ({"SYNC", "RED"} & set(i.modifiers)):
                return [(at + 1, lanes)]
            if "RED" in i.modifiers or len(i.operands) > 1:
                raise UnknownInstruction(f"{i}: barriers of some warps, and their reductions, are not executed")
            name = i.operands[0] if i.operands else "0x0"
            held = waiting[name][1] | active if name in waiting else active
            waiting[name] = at + 1, held
            return [(at + 1, rest)]
        if i.opcode == "RET":
            name = i.operands[0].split()[0]  # "R10 0x0": no comma stands between them
            if self.lanes.lacking([name], active) is not None:
                raise UnknownInstruction(f"{i}: the address to return to is unknown")
            target = self.lanes.register(name)
            return [(at + 1, rest)] + [(self.at[int(to)], active & (target == to)) for to in np.unique(target[active])]
        if i.opcode == "BRX" or i.target is None:
            raise UnknownInstruction(f"{i}: the target is not in the code")
        if "DIV" in i.modifiers:  # the way of a warp whose lanes are not together; here they always are
            return [(at + 1, lanes)]
        if "CONV" in i.modifiers:  # the way of a warp whose lanes are together
            return [(self.at[i.target], lanes)]
        for condition in i.operands[:-1]:
            name = condition.lstrip("!")
            if self.lanes.lacking([name], active) is not None:
                active = active if self.launch.decide(i) else np.zeros_like(active)
            else:
                held_true = self.lanes.predicate(name)
                active = active & (~held_true if condition.startswith("!") else held_true)
            rest = lanes & ~active
        return [(at + 1, rest), (self.at[i.target], active)]

    # -- memory --------------------------------------------------------------------------------------------------------

    def address(self, text: str, i: Instruction, active: Array) -> Array:
        """Returns an address a lane: the sum of what stands between the brackets. ValueError if it is not known."""
        inner = text[text.rindex("[") + 1 : text.rindex("]")]
        total = np.zeros(self.lanes.threads, np.uint64)
        wide = i.opcode in ("LDG", "STG", "LD", "ST", "ATOM", "ATOMG", "RED", "REDG", "LDGSTS") and "E" in i.modifiers
        wide = wide and not (i.opcode == "LDGSTS" and text == i.operands[0])
        for sign, register, suffix, literal in _TERM.findall(inner):
            if literal:
                value = np.uint64((-1 if sign else 1) * int(literal, 16) % (1 << 64))
                total = total + value
                continue
            names = [register]
            if ".64" in suffix or (wide and "U32" not in suffix and (register[0] == "U" or ".64" not in inner and "U32" not in inner)):
                names.append(neighbour(register))
                found = pair(self.lanes, register)
            else:
                found = self.lanes.register(register).astype(np.uint64)
            if self.lanes.lacking(names, active) is not None:
                raise UnknownInstruction(f"{i}: the address is unknown")
            if scale := re.search(r"\.X(\d+)", suffix):
                found = found * np.uint64(int(scale[1]))
            total = total + found
        return total if wide else total & WORD

    def memory(self, i: Instruction, active: Array, unknown: bool) -> Access | None:
        """Makes the accesses of an instruction; data that are unknown stay so."""
        name, mods = i.opcode, i.modifiers
        size = next((int(m) // 8 for m in mods if m in ("64", "128", "256")), 4)
        size = next(({"U8": 1, "S8": 1, "U16": 2, "S16": 2}[m] for m in mods if m in ("U8", "S8", "U16", "S16")), size)
        operands = list(i.operands)
        results = []
        while operands and "[" not in operands[0] and name in ("LDG", "ATOMG", "ATOM", "ATOMS", "LD"):
            results.append(operands.pop(0))
        if name == "LDGSTS":
            return self.copy(i, active, size)
        if name in ("LDS", "LDL", "LDSM"):
            results = [operands.pop(0)]
        if not active.any():
            for each in results:
                if unknown:
                    self.lanes.forget(each, active)
            return None
        space = "shared" if name in ("LDS", "STS", "LDSM", "STSM", "ATOMS") else "local" if name in ("LDL", "STL") else "global"
        addresses = self.address(operands.pop(0), i, active)
        if space == "local":
            number = np.arange(self.lanes.threads, dtype=np.uint64)
            addresses = addresses % np.uint64(max(self.launch.kernel.local_bytes, 16)) + number * np.uint64(max(self.launch.kernel.local_bytes, 16))
        if name in ("LDSM", "STSM"):
            return self.matrices(i, results, addresses, active)
        registers = [each for each in results if not each.lstrip("!").startswith(("P", "UP"))]
        words = max(size // 4, 1)
        if name in ("STG", "ST", "STS", "STL"):
            value = operands[0].removesuffix(".reuse")
            names = [value if k == 0 else neighbour(value, k) for k in range(words)]
            known = not unknown and self.lanes.lacking(names, active) is None
            data = [self.lanes.register(each)[active] for each in names] if known else None
            self.touch(space, addresses, active, size, data, write=True)
        elif name in ("RED", "REDG", "ATOM", "ATOMG", "ATOMS"):
            self.atomic(i, space, addresses, active, size, registers, operands)
        else:
            loaded, known = self.touch(space, addresses, active, size, None, write=False)
            names = [registers[-1] if k == 0 else neighbour(registers[-1], k) for k in range(words)]
            for each, values in zip(names, loaded, strict=True):
                if "S8" in mods or "S16" in mods:
                    values = values.astype(f"u{size}").view(f"i{size}").astype(np.int32).view(np.uint32)
                whole = np.zeros(self.lanes.threads, np.uint32)
                whole[active] = values
                self.lanes.write(each, whole, None if active.all() else active)
                if unknown or not known:
                    self.lanes.forget(each, active)
        return Access(space, size, name.startswith("ST"), self.rows(addresses), active.reshape(-1, WARP))

    def rows(self, addresses: Array) -> Array:
        return addresses.astype(np.int64).reshape(-1, WARP)

    def touch(
        self, space: str, addresses: Array, active: Array, size: int, data: Sequence[Array] | None, write: bool
    ) -> tuple[list[Array], bool]:
        """Loads or stores for the active lanes, and counts what tensors are asked for."""
        found = addresses[active].astype(np.int64)
        if space != "global":
            own = self.shared if space == "shared" else self.local
            if found.max(initial=0) + size > len(own.views[1]):
                raise UnknownInstruction(f"an address behind {space} memory: {int(found.max())}")
            if write:
                own.store(found, size, data)
                return [], True
            return own.load(found, size)
        numbers = (found - FIRST_ADDRESS) // APART
        words: list[Array] = [np.zeros(len(found), np.uint32) for _ in range(max(size // 4, 1))]
        known = True
        for number in np.unique(numbers):
            here = numbers == number
            if not 0 <= number < len(self.launch.tensors):
                raise UnknownInstruction(f"an address that belongs to no array: {int(found[here][0]):#x}")
            tensor = self.launch.tensors[number]
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

    def count(self, name: str, addresses: Array, active: Array, number: int, size: int, write: bool) -> None:
        rows = self.rows(addresses)
        lanes = active.reshape(-1, WARP) & ((rows - FIRST_ADDRESS) // APART == number)
        sectors = int(Access("global", size, write, rows, lanes).sectors().sum())
        traffic = self.launch.traffic[name]
        if write:
            traffic.write_bytes += int(lanes.sum()) * size
            traffic.write_sectors += sectors
        else:
            traffic.read_bytes += int(lanes.sum()) * size
            traffic.read_sectors += sectors

    def atomic(
        self, i: Instruction, space: str, addresses: Array, active: Array, size: int, results: list[str], operands: list[str]
    ) -> None:
        """Reads and writes; sums of whole numbers are made, lane by lane, everything else is unknown."""
        if any(m in i.modifiers for m in ("F16x2", "BF16_V2", "F16x4", "BF16x4")):
            pass
        values = operands[0].removesuffix(".reuse") if operands else "RZ"
        simple = "ADD" in i.modifiers and size == 4 and not any(m.startswith(("F", "BF")) for m in i.modifiers)
        loaded, known = self.touch(space, addresses, active, size, None, write=False)
        simple = simple and known and self.lanes.lacking([values], active) is None
        data = None
        before = np.zeros(self.lanes.threads, np.uint32)
        if simple:
            added = self.lanes.register(values)[active]
            place = addresses[active]
            current: dict[int, int] = {}
            old = np.empty(len(added), np.uint32)
            for k, (where, more) in enumerate(zip(place.tolist(), added.tolist(), strict=True)):
                old[k] = current.setdefault(where, int(loaded[0][k]))
                current[where] = (current[where] + more) & 0xFFFFFFFF
            data = [np.array([current[where] for where in place.tolist()], np.uint32)]
            before[active] = old
        self.touch(space, addresses, active, size, data, write=True)
        for each in results:
            if simple:
                self.lanes.write(each, before, active)
            else:
                self.lanes.forget(each, active)

    def copy(self, i: Instruction, active: Array, size: int) -> Access | None:
        """LDGSTS: from global to shared memory; lanes whose last operand is false write zeros and read nothing."""
        if not active.any():
            return None
        to = self.address(i.operands[0], i, active)
        reading = active
        if len(i.operands) > 2:
            name = i.operands[2].lstrip("!")
            if self.lanes.lacking([name], active) is not None:
                raise UnknownInstruction(f"{i}: it is unknown which lanes read")
            reading = active & (self.lanes.predicate(name) ^ i.operands[2].startswith("!"))
            nothing = np.zeros(int((active & ~reading).sum()), np.uint32)
            self.touch("shared", to, active & ~reading, size, [nothing] * (size // 4), write=True)
        source = self.address(i.operands[1], i, reading)
        loaded, known = self.touch("global", source, reading, size, None, write=False)
        self.touch("shared", to, reading, size, loaded if known else None, write=True)
        return Access("global", size, False, self.rows(source), reading.reshape(-1, WARP))

    def matrices(self, i: Instruction, results: list[str], addresses: Array, active: Array) -> Access:
        """LDSM, STSM: the first 8, 16 or 32 lanes of a warp have the addresses of rows of 16 bytes."""
        count = next((int(m) for m in i.modifiers if m in ("2", "4")), 1)
        for each in results:
            for k in range(count):
                self.lanes.forget(neighbour(each, k), active)
        asking = active & (np.arange(self.lanes.threads) % WARP < 8 * count)
        if i.opcode == "STSM":
            self.touch("shared", addresses, asking, 16, None, write=True)
        return Access("shared", 16, i.opcode == "STSM", self.rows(addresses), asking.reshape(-1, WARP))


__all__ = ["Access", "Block", "Event", "Kernel", "Launch", "Mask", "Operands", "TensorBytes"]
