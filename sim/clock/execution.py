"""Executes machine code: which way each warp goes, and which bytes each access touches.

All threads of the blocks that run together go in step: those at the lowest address go first, so that what diverged meets again.
Integers, predicates, votes and memory are executed (`opcodes`, `memory`); floating-point numbers are unknown, and so is what is
made of them. A branch on an unknown predicate is decided by the launch's `decide`.

The PTX machine is the check: it executes what this machine code was made of, and both make the same accesses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod
from typing import NamedTuple

import numpy as np

from cupyflash.sim.ptx.parameters import BoundArguments

from . import sass
from .lanes import ALWAYS, Array, Lanes
from .memory import APART, FIRST_ADDRESS, SPACES, Access, Memory, MemoryWork, Space, TensorBytes
from .opcodes import WARP, decoded
from .operands import UnknownInstruction, Work
from .sass import Instruction

PARAMETERS = {7: 0x160, 8: 0x160, 9: 0x210, 10: 0x380, 12: 0x380}
"""Where the parameters begin in constant bank 0, by major compute capability (as cuobjdump shows it of any kernel)."""
SIZES = {9: (0x0, 0xC), 8: (0x0, 0xC), 7: (0x0, 0xC), 10: (0x360, 0x370), 12: (0x360, 0x370)}
"""Where blockDim and gridDim lie there."""
SHARED_AT = {7: 0, 8: 0, 9: 0x400, 10: 0x400, 12: 0x400}
"""Where a block's own shared memory begins: from 9.0 on the first kilobyte is the system's."""
CONTROL = frozenset({"BRA", "JMP", "EXIT", "BAR", "CALL", "RET", "KILL", "BRX"})

Decide = Callable[[Instruction], bool]
Index = tuple[int, int, int]


class Event(NamedTuple):
    """An instruction that warps issued: its number, which warps, and their access to memory."""

    at: int
    warps: tuple[int, ...]
    access: Access | None = None


@dataclass(frozen=True, eq=False)
class Kernel:
    """Machine code of a kernel for compute capability (major, minor), and its needs a thread and a block."""

    name: str
    instructions: tuple[Instruction, ...]
    capability: tuple[int, int]
    registers: int
    shared_bytes: int
    local_bytes: int

    @classmethod
    def of(cls, cubin: bytes, name: str | None = None) -> Kernel:
        """Reads a kernel from a cubin, which has only one if it is not named; RuntimeError without a disassembler."""
        found = sass.read(cubin)
        if name is None and len(found.kernels) == 1:
            name = next(iter(found.kernels))
        if name is None or name not in found.kernels:
            raise ValueError(f"kernel = {name!r}: the machine code has {', '.join(found.kernels)}")
        needs = found.resources[name]
        capability = divmod(found.architecture, 10)
        local = needs.get("STACK", 0) + needs.get("LOCAL", 0)
        return cls(name, tuple(found.kernels[name]), capability, needs.get("REG", 0), needs.get("SHARED", 0), local)


class Launch:
    """A launch of a kernel on arrays of its own (copies): its blocks run in any order, one or several at a time."""

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
        self.banks: Mapping[int, bytes] = {0: bytes(bank)}
        self.traffic = {space.name: TensorBytes() for space in self.tensors}
        self.address = {each.address: k for k, each in enumerate(kernel.instructions)}
        self.works: list[Work | MemoryWork | None] = [None] * len(kernel.instructions)

    @property
    def warps(self) -> int:
        """The warps of a block."""
        return -(-prod(self.block) // WARP)

    def index(self, number: int) -> Index:
        """The index of a block by its place in the launch order."""
        x, y, _ = self.grid
        return number % x, number // x % y, number // (x * y)

    def indices(self) -> Iterator[Index]:
        """All blocks in launch order."""
        x, y, z = self.grid
        return ((i, j, k) for k, j, i in product(range(z), range(y), range(x)))

    def run(self, *blocks: Index) -> Iterator[Event]:
        """Runs blocks together to their ends; warps of the first block come first. Events are in an order that each warp keeps."""
        return Blocks(self, blocks).events()

    def work(self, at: int) -> Work | MemoryWork:
        """Returns the decoded instruction."""
        found = self.works[at]
        if found is None:
            i = self.kernel.instructions[at]
            found = self.works[at] = MemoryWork.of(i) if i.opcode in SPACES else decoded(i, self.banks)
        return found


class Blocks:
    """Blocks that run together, warp by warp behind each other."""

    def __init__(self, launch: Launch, blocks: Sequence[Index]) -> None:
        self.launch, self.count = launch, len(blocks)
        x, y, _ = launch.block
        padded = launch.warps * WARP
        number = np.tile(np.arange(padded, dtype=np.uint32), len(blocks))
        threads = len(number)
        special = {"SR_TID.X": number % x, "SR_TID.Y": number // x % y, "SR_TID.Z": number // (x * y), "SR_LANEID": number % WARP}
        for k, axis in enumerate("XYZ"):
            special[f"SR_CTAID.{axis}"] = np.repeat(np.array([each[k] for each in blocks], np.uint32), padded)
            special[f"SR_NCTAID.{axis}"] = np.full(threads, launch.grid[k], np.uint32)
        special["SR_CgaCtaId"] = special["SR_SWINHI"] = np.zeros(threads, np.uint32)
        self.lanes = Lanes(threads, special)
        self.alive = number < prod(launch.block)
        shared = SHARED_AT[launch.kernel.capability[0]] + launch.shared_bytes
        self.memory = Memory(launch.tensors, len(blocks), threads, shared, launch.kernel.local_bytes)
        self.memory.traffic = launch.traffic
        self.stayed: dict[int, Array] = {}  # by the address of an exit whose condition is unknown, the lanes that went on
        self.waiting: list[tuple[str, int, int, Array]] = []  # barrier, its threads (0: all), the way on, lanes

    def events(self) -> Iterator[Event]:
        """Groups of threads at one address each; the lowest address runs, and groups that meet become one."""
        groups: dict[int, Array] = {0: self.alive.copy()}
        code, whole = self.launch.kernel.instructions, self.lanes.everyone
        while groups:
            at = min(groups)
            group = groups.pop(at)
            end = min(groups, default=inf)
            warps = tuple(np.flatnonzero(group.reshape(-1, WARP).any(axis=1)).tolist())
            if group.all():
                group = whole
            while True:
                i = code[at]
                active, unknown = self.guarded(i, group)
                if i.opcode in CONTROL:
                    yield Event(at, warps)
                    break
                access = self.step(at, active, unknown)
                yield Event(at, warps, access)
                at += 1
                if at == end:
                    break
            moved = self.control(i, at, group, active) if i.opcode in CONTROL else [(at, group)]
            for to, which in [*moved, *self.released()]:
                if which.any():
                    groups[to] = groups[to] | which if to in groups else which
        if self.waiting:
            raise RuntimeError(f"{sum(int(lanes.sum()) for *_, lanes in self.waiting)} threads wait at barriers for ever")

    def guarded(self, i: Instruction, group: Array) -> tuple[Array, bool]:
        """Returns the lanes whose guard is true, and whether that is unknown: then a branch is decided, and all others are made."""
        if not i.guard or i.guard in ALWAYS:
            return group, False
        name = i.guard.lstrip("!")
        if self.lanes.lacking([name], group) is not None:
            taken = i.opcode not in CONTROL or self.launch.decide(i)
            if i.opcode == "EXIT" and not taken:  # threads that come here again are in a loop: they exchanged their number by now
                again = group & self.stayed.get(i.address, self.lanes.no)
                self.stayed[i.address] = self.stayed.get(i.address, self.lanes.no) | group
                return again, True
            return group if taken else self.lanes.no, True
        value = self.lanes.predicate(name)
        return group & (~value if i.guard[0] == "!" else value), False

    def step(self, at: int, active: Array, unknown: bool) -> Access | None:
        """Executes an instruction that is no branch."""
        work = self.launch.work(at)
        if isinstance(work, MemoryWork):
            return work.run(self.lanes, self.memory, active, unknown)
        mask = None if active is self.lanes.everyone and not unknown else active
        if unknown:
            for name in work.writes:
                self.lanes.forget(name, active)
        elif mask is None or mask.any():
            work.run(self.lanes, mask)
        return None

    def control(self, i: Instruction, at: int, group: Array, active: Array) -> list[tuple[int, Array]]:
        """Returns the ways on of a group's threads."""
        rest = group & ~active
        if i.opcode in ("EXIT", "KILL"):
            self.alive = self.alive & ~active
            return [(at + 1, rest)]
        if i.opcode == "BAR":
            if "ARV" in i.modifiers:
                raise UnknownInstruction(f"{i}: arriving at a barrier without waiting is not executed")
            operands = [each for each in i.operands if not each.lstrip("!").startswith(("P", "UP"))]
            threads = int(operands[1], 0) if len(operands) > 1 else 0
            if active.any():
                self.waiting.append((operands[0] if operands else "0x0", threads, at + 1, active))
            return [(at + 1, rest)]
        if i.opcode == "RET":
            name = i.operands[0].split()[0]  # "R10 0x0": no comma stands between them
            if self.lanes.lacking([name], active) is not None:
                raise UnknownInstruction(f"{i}: the address to return to is unknown")
            target = self.lanes.register(name)
            return [(at + 1, rest)] + [
                (self.launch.address[int(to)], active & (target == to)) for to in np.unique(target[active]).tolist()
            ]
        if i.opcode == "BRX" or i.target is None:
            raise UnknownInstruction(f"{i}: the target is not in the code")
        if "DIV" in i.modifiers:  # the way of a warp whose lanes are not together; here they always are
            return [(at + 1, group)]
        conditions = () if "CONV" in i.modifiers else i.operands[:-1]
        for condition in conditions:
            name = condition.lstrip("!")
            if self.lanes.lacking([name], active) is not None:
                active = active if self.launch.decide(i) else self.lanes.no
            else:
                value = self.lanes.predicate(name)
                active = active & (~value if condition.startswith("!") else value)
        return [(at + 1, group & ~active), (self.launch.address[i.target], active)]

    def released(self) -> list[tuple[int, Array]]:
        """Takes the threads whose barrier is complete: all living ones of their block wait at it, or as many as it says."""
        found = []
        for name in {name for name, *_ in self.waiting}:
            here = [each for each in self.waiting if each[0] == name]
            held = np.logical_or.reduce([lanes for *_, lanes in here]).reshape(self.count, -1)
            needed = self.alive.reshape(self.count, -1).sum(axis=1)
            if here[0][1]:
                needed = np.minimum(needed, here[0][1])
            done = np.repeat(held.sum(axis=1) >= needed, held.shape[1])
            if not done.any():
                continue
            found += [(to, lanes & done) for _, _, to, lanes in here]
            left = [(name, threads, to, lanes & ~done) for _, threads, to, lanes in here]
            self.waiting = [each for each in self.waiting if each[0] != name] + [each for each in left if each[3].any()]
        return found
