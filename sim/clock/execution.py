"""Executes machine code: which way each warp goes, and which bytes each access touches.

All threads of the blocks that run together go in step: those at the lowest address go first, so that what diverged meets again.
Who waits for a barrier, or asks whether a phase of an mbarrier is over that is not, goes on when it is (`waits`).
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

from cupyflash.multiprocessor import Multiprocessor
from cupyflash.sim.ptx.memory.swizzles import MAP_BYTES
from cupyflash.sim.ptx.parameters import BoundArguments

from . import sass
from .bulk import BULK, Bulk, BulkWork
from .lanes import ALWAYS, VOTED, VOTES, Array, Lanes
from .memory import APART, FIRST_ADDRESS, SPACES, Memory, MemoryWork, Space, TensorBytes, WarpAccess
from .opcodes import decoded
from .operands import WARP, OperandWork, UnknownInstruction
from .sass import Instruction
from .synchronization import SyncWork
from .waits import Convergence, Signal, Waits, Ways

INSTRUCTION_BYTES = 16
GENERIC, GENERIC_AT = 1 << 36, 0x198
"""On 9.0 the address of the parameters, for instructions that take no constant, stands at 0x198 of constant bank 0."""
CLUSTER_AT = {9: (0x150, 0x15C, 0x188)}
"""Offsets of the inverses of a cluster's sizes, of the grid in clusters and of a cluster's blocks, as NVRTC's code shows."""
PARAMETERS = {7: 0x160, 8: 0x160, 9: 0x210, 10: 0x380, 12: 0x380}
"""The offset of the parameters in constant bank 0, by major compute capability (as cuobjdump shows it of any kernel)."""
SIZES = {9: (0x0, 0xC), 8: (0x0, 0xC), 7: (0x0, 0xC), 10: (0x360, 0x370), 12: (0x360, 0x370)}
"""The offsets of blockDim and gridDim there."""
SHARED_AT = {7: 0, 8: 0, 9: 0x400, 10: 0x400, 12: 0x400}
"""The begin of a block's own shared memory: from 9.0 on the first kilobyte is the system's."""
CONTROL = frozenset({"BRA", "JMP", "EXIT", "BAR", "CALL", "RET", "KILL", "BRX", "UCGABAR_WAIT"})

Decide = Callable[[Instruction], bool]
Index = tuple[int, int, int]
Signals = tuple[Signal, ...]
Decoded = OperandWork | MemoryWork | SyncWork | BulkWork


class IssueEvent(NamedTuple):
    """An instruction that warps issued: its number, which warps, and their access to memory, signals and bulk copies."""

    at: int
    warps: tuple[int, ...]
    access: WarpAccess | None = None
    signals: tuple[Signal, ...] = ()
    bulk: tuple[Bulk, ...] = ()


@dataclass(frozen=True, eq=False)
class CubinKernel:
    """Machine code of a kernel for compute capability (major, minor), and its needs a thread and a block."""

    name: str
    instructions: tuple[Instruction, ...]
    capability: tuple[int, int]
    registers: int
    shared_bytes: int
    local_bytes: int
    parameters: tuple[tuple[int, int], ...] = ()
    """Offset and size of each parameter; none: as C lays a structure of them out."""
    jump_tables: bytes = b""
    """Constant bank 2."""

    @classmethod
    def of(cls, cubin: bytes, name: str | None = None) -> CubinKernel:
        """Reads a kernel from a cubin, which has only one if it is not named; RuntimeError without a disassembler."""
        found = sass.read(cubin)
        if name is None and len(found.kernels) == 1:
            name = next(iter(found.kernels))
        if name is None or name not in found.kernels:
            raise ValueError(f"kernel = {name!r}: the machine code has {', '.join(found.kernels)}")
        needs = found.resources[name]
        capability = divmod(found.architecture, 10)
        local = needs.get("STACK", 0) + needs.get("LOCAL", 0)
        code, laid = tuple(found.kernels[name]), tuple(sass.parameters(cubin, name))
        tables = sass.jump_tables(cubin, name)
        shared = max(needs.get("SHARED", 0) - SHARED_AT[capability[0]], 0)  # the system's kilobyte is counted there
        return cls(name, code, capability, needs.get("REG", 0), shared, local, laid, tables)


class CodeLaunch:
    """A launch of a kernel on arrays of its own (copies): its blocks run in any order, one or several at a time."""

    def __init__(
        self,
        kernel: CubinKernel,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: BoundArguments,
        shared_bytes: int = 0,
        decide: Decide | None = None,
        cluster: Sequence[int] = (1, 1, 1),
    ) -> None:
        self.kernel, self.grid, self.block = kernel, (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
        self.shared_bytes = kernel.shared_bytes + shared_bytes
        self.decide = decide or (lambda i: False)
        self.cluster = (*cluster, 1, 1)[:3]
        self.together = False
        """True if all blocks run at once: those of them that are executed get an atomic's numbers in turns with the others."""
        self.most = inf
        """The most instructions that a run may take, each of all warps that issue it together."""
        self.tensors = [Space(tensor.name, tensor.array) for tensor in arguments.tensors]
        self.banks: Mapping[int, bytes] = {0: self.constants(arguments), 2: kernel.jump_tables}
        self.traffic = {space.name: TensorBytes() for space in self.tensors}
        self.counters: dict[int, int] = {}
        self.address = {each.address: k for k, each in enumerate(kernel.instructions)}
        self.works: list[Decoded | None] = [None] * len(kernel.instructions)

    def constants(self, arguments: BoundArguments) -> bytes:
        """Returns constant bank 0: sizes of the launch, and its arguments with the addresses of tensors."""
        data, major = bytearray(arguments.data), self.kernel.capability[0]
        begin = PARAMETERS[major]
        for number, tensor in enumerate(arguments.tensors):
            address = FIRST_ADDRESS + number * APART
            if tensor.holder is None:
                data[tensor.at : tensor.at + 8] = address.to_bytes(8, "little")
            else:  # the tensor of a map in global memory
                holder = next(k for k, each in enumerate(arguments.tensors) if each.array is tensor.holder)
                self.tensors[holder].views[1][tensor.at : tensor.at + 8] = np.frombuffer(address.to_bytes(8, "little"), np.uint8)
        laid = self.kernel.parameters or [(0, len(data))]
        bank = bytearray(begin + max((offset + size for offset, size in laid), default=0))
        offsets = list(arguments.offsets.values()) if self.kernel.parameters else [0]
        for (offset, size), at in zip(laid, offsets, strict=True):
            bank[begin + offset : begin + offset + size] = data[at : at + size].ljust(size, b"\0")
        for at, sizes in zip(SIZES[major], (self.block, self.grid), strict=True):
            bank[at : at + 12] = np.array(sizes, np.uint32).tobytes()
        if major in CLUSTER_AT:
            inverses, clusters, count = CLUSTER_AT[major]
            bank[GENERIC_AT : GENERIC_AT + 8] = GENERIC.to_bytes(8, "little")
            bank[inverses : inverses + 12] = (1 / np.array(self.cluster, np.float32)).tobytes()
            grid = [blocks // size for blocks, size in zip(self.grid, self.cluster, strict=True)]
            bank[clusters : clusters + 12] = np.array(grid, np.uint32).tobytes()
            bank[count : count + 4] = np.uint32(prod(self.cluster)).tobytes()
        return bytes(bank)

    def fetch(self, address: int) -> bytes:
        """Returns the 128 bytes of a tensor map, among the arguments or in global memory."""
        if address < FIRST_ADDRESS:
            at = address - GENERIC + PARAMETERS[self.kernel.capability[0]]
            return self.banks[0][at : at + MAP_BYTES]
        number, at = divmod(address - FIRST_ADDRESS, APART)
        return self.tensors[number].views[1][at : at + MAP_BYTES].tobytes()

    @property
    def warps(self) -> int:
        """The warps of a block."""
        return -(-prod(self.block) // WARP)

    def index(self, number: int) -> Index:
        """The index of a block by its place in the launch order: clusters follow each other, and in each of them its blocks."""
        number, rank = divmod(number, prod(self.cluster))
        found, inside = [], []
        for blocks, size in zip(self.grid, self.cluster, strict=True):
            number, at = divmod(number, blocks // size)
            rank, within = divmod(rank, size)
            found.append(at)
            inside.append(within)
        x, y, z = (at * size + within for at, size, within in zip(found, self.cluster, inside, strict=True))
        return x, y, z

    def number(self, index: Index) -> int:
        """The place of a block among all, x first."""
        x, y, z = index
        return x + self.grid[0] * (y + self.grid[1] * z)

    def indices(self) -> Iterator[Index]:
        """All blocks in launch order."""
        x, y, z = self.grid
        return ((i, j, k) for k, j, i in product(range(z), range(y), range(x)))

    def run(self, *blocks: Index) -> Iterator[IssueEvent]:
        """Runs blocks together to their ends; warps of the first block come first. Events are in an order that each warp keeps.

        A cluster's blocks come together, in the order of their ranks.
        """
        for count, event in enumerate(Blocks(self, blocks).events()):
            if count >= self.most:
                raise RuntimeError(f"the machine code runs more than {self.most:,} instructions")
            yield event

    def work(self, at: int) -> Decoded:
        """Returns the decoded instruction."""
        found = self.works[at]
        if found is None:
            i = self.kernel.instructions[at]
            if i.opcode in SPACES:
                found = MemoryWork.of(i)
            elif i.opcode == "SYNCS":
                found = SyncWork.of(i)
            else:
                found = BulkWork.of(i) if i.opcode in BULK else decoded(i, self.banks)
            self.works[at] = found
        return found


class Blocks:
    """Blocks that run together, warp by warp behind each other."""

    def __init__(self, launch: CodeLaunch, blocks: Sequence[Index]) -> None:
        self.launch, self.count = launch, len(blocks)
        x, y, _ = launch.block
        padded = launch.warps * WARP
        number = np.tile(np.arange(padded, dtype=np.uint32), len(blocks))
        threads = len(number)
        special = {"SR_TID.X": number % x, "SR_TID.Y": number // x % y, "SR_TID.Z": number // (x * y), "SR_LANEID": number % WARP}
        for k, axis in enumerate("XYZ"):
            special[f"SR_CTAID.{axis}"] = np.repeat(np.array([each[k] for each in blocks], np.uint32), padded)
            special[f"SR_NCTAID.{axis}"] = np.full(threads, launch.grid[k], np.uint32)
        size = prod(launch.cluster)
        if len(blocks) % size:
            raise ValueError(f"{len(blocks)} blocks run together: a cluster has {size}")
        special["SR_CgaCtaId"] = np.repeat(np.arange(len(blocks), dtype=np.uint32) % size, padded)
        special["SR_SWINHI"] = np.zeros(threads, np.uint32)
        special["SR_LTMASK"] = np.uint32(1) << number % WARP
        special["SR_LTMASK"] -= np.uint32(1)
        self.lanes = Lanes(threads, special)
        self.alive = number < prod(launch.block)
        shared = SHARED_AT[launch.kernel.capability[0]] + launch.shared_bytes
        unit = Multiprocessor.like(launch.kernel.capability).shared_unit
        held = -(-shared // unit) * unit  # so much a block gets: some kernels read behind their arrays
        self.memory = Memory(launch.tensors, len(blocks), threads, held, launch.kernel.local_bytes, size)
        self.memory.traffic, self.memory.counters = launch.traffic, launch.counters
        self.memory.rewind()  # a run before this one took tickets of a queue
        self.votes = self.unsure = self.lanes.no  # of barriers that reduce: each thread's last
        self.stayed: dict[int, Array] = {}  # by the address of an exit whose condition is unknown, the lanes that went on
        if launch.together and len(blocks) < prod(launch.grid):
            self.memory.numbers, self.memory.grid = tuple(launch.number(each) for each in blocks), prod(launch.grid)
        self.waits = Waits(len(blocks), padded, size)
        # Lanes of a warp part for long only where some wait for an mbarrier.
        asks = any(i.opcode == "SYNCS" for i in launch.kernel.instructions)
        self.convergence = Convergence(threads) if asks else None
        self.breaks = [self.is_break(i) for i in launch.kernel.instructions]

    def is_break(self, i: Instruction) -> bool:
        """True for instructions behind which not all threads of a group go on together."""
        if i.opcode in CONTROL:
            return True
        meets = i.opcode in ("BSSY", "BSYNC", "BREAK") or (i.opcode == "WARPSYNC" and "ALL" in i.modifiers)
        return (meets and self.convergence is not None) or (i.opcode == "SYNCS" and i.modifiers[0] == "PHASECHK")

    def events(self) -> Iterator[IssueEvent]:
        """Groups of threads at one address each; the lowest address runs, and groups that meet become one."""
        groups: dict[int, Array] = {0: self.alive.copy()}
        code, whole, breaks = self.launch.kernel.instructions, self.lanes.everyone, self.breaks
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
                if breaks[at]:
                    break
                yield self.step(at, active, unknown, warps)
                at += 1
                if at == end:
                    break
            moved = [(at, group)]
            if at != end:
                moved, signals, passed = self.control(i, at, group, active)
                if passed is not group:
                    warps = tuple(self.waits.warps_of(passed))
                if warps:
                    yield IssueEvent(at, warps, None, signals)
            for to, which in [*moved, *self.released()]:
                if which.any():
                    groups[to] = groups[to] | which if to in groups else which
            if not groups and self.convergence is not None:
                groups = dict(self.convergence.all())
        if self.waits.held:
            raise RuntimeError(f"{self.waits.held} threads wait at barriers for ever")

    def released(self) -> Ways:
        """Takes the threads that have waited, and may go on."""
        found = self.waits.released(self.alive)
        return found + self.convergence.released(self.alive) if self.convergence is not None else found

    def guarded(self, i: Instruction, group: Array) -> tuple[Array, bool]:
        """Returns the lanes whose guard is true, and whether that is unknown: then a branch is decided, and all others are made."""
        if not i.guard or i.guard in ALWAYS:
            return group, False
        if self.lanes.lacking([i.guard.lstrip("!")], group) is not None:
            taken = i.opcode not in CONTROL or self.launch.decide(i)
            if i.opcode == "EXIT" and not taken:  # threads that come here again are in a loop: they exchanged their number by now
                again = group & self.stayed.get(i.address, self.lanes.no)
                self.stayed[i.address] = self.stayed.get(i.address, self.lanes.no) | group
                return again, True
            return group if taken else self.lanes.no, True
        return group & self.lanes.condition(i.guard), False

    def step(self, at: int, active: Array, unknown: bool, warps: tuple[int, ...]) -> IssueEvent:
        """Executes an instruction that is no branch."""
        work = self.launch.work(at)
        if isinstance(work, OperandWork):
            mask = None if active is self.lanes.everyone and not unknown else active
            if unknown:
                for name in work.writes:
                    self.lanes.forget(name, active)
            elif mask is None or mask.any():
                work.run(self.lanes, mask)
            return IssueEvent(at, warps)
        if isinstance(work, MemoryWork):
            return IssueEvent(at, warps, work.run(self.lanes, self.memory, active, unknown))
        if isinstance(work, SyncWork):
            return IssueEvent(at, warps, None, work.run(self.lanes, self.waits, active))
        return IssueEvent(at, warps, None, (), work.run(self.lanes, self.memory, self.waits, self.launch.fetch, active))

    def control(self, i: Instruction, at: int, group: Array, active: Array) -> tuple[Ways, Signals, Array]:
        """Returns the ways on of a group's threads, their signals, and those threads that have issued the instruction."""
        rest = group & ~active
        if i.opcode in ("EXIT", "KILL"):
            self.alive = self.alive & ~active
            return [(at + 1, rest)], (), group
        if i.opcode == "BAR":
            return [(at + 1, rest)], *self.barrier(i, at, group, active)
        if i.opcode == "UCGABAR_WAIT":
            return [(at + 1, rest)], tuple(self.waits.meet_cluster(active, at + 1)), group
        if i.opcode == "SYNCS":
            work = self.launch.work(at)
            assert isinstance(work, SyncWork)
            on, signals = work.ask(self.lanes, self.waits, active, at)
            return [(at + 1, on | rest)], signals, on | rest
        if self.convergence is not None and i.opcode in ("BSSY", "BSYNC", "BREAK", "WARPSYNC"):
            return [*self.converge(self.convergence, i, at, active), (at + 1, rest)], (), group
        return self.branch(i, at, group, active), (), group

    def converge(self, convergence: Convergence, i: Instruction, at: int, active: Array) -> Ways:
        if i.opcode == "BSSY":
            convergence.begin(i.operands[0], active)
        elif i.opcode == "BREAK":
            convergence.leave(i.operands[-1], active)
        else:
            convergence.meet(i.operands[0] if i.operands else "", at + 1, active)
            return []
        return [(at + 1, active)]

    def barrier(self, i: Instruction, at: int, group: Array, active: Array) -> tuple[Signals, Array]:
        """Arrives at a barrier, whose number and threads may stand in registers."""
        operands = [each for each in i.operands if not each.lstrip("!").startswith(("P", "UP"))] or ["0x0"]
        found = []
        for text in operands:
            if text.startswith(("R", "UR")):
                if self.lanes.lacking([text], active) is not None:
                    raise UnknownInstruction(f"{i}: {text} is unknown")
                found.append(self.lanes.register(text))
            else:
                found.append(self.lanes.constant(int(text, 0), 4))
        if "RED" in i.modifiers:
            self.vote(i, active)
        threads = int(found[1][active.argmax()]) if len(found) > 1 else 0
        to = None if "ARV" in i.modifiers else at + 1
        signals = self.waits.meet(found[0], threads, active, to) if active.any() else []
        if to is None:
            self.waits.free.append((at + 1, active))
        return tuple(signals), group

    def vote(self, i: Instruction, active: Array) -> None:
        """Counts a predicate over the threads of each block at a barrier; the last one to come makes the result that B2R reads."""
        condition = i.operands[-1]
        unsure = self.lanes.lacking([condition.lstrip("!")], active)
        self.votes = np.where(active, self.lanes.condition(condition), self.votes)
        self.unsure = np.where(active, False if unsure is None else unsure, self.unsure)
        of_block = (self.alive & self.votes).reshape(self.count, -1).sum(axis=1)
        whole = of_block == self.alive.reshape(self.count, -1).sum(axis=1) if "AND" in i.modifiers else of_block > 0
        each = self.lanes.threads // self.count
        for result, numbers in ((VOTED, whole), (VOTES, of_block)):
            self.lanes.write(result, np.repeat(numbers, each), None)
            self.lanes.forget(result, np.repeat((self.alive & self.unsure).reshape(self.count, -1).any(axis=1), each))

    def branch(self, i: Instruction, at: int, group: Array, active: Array) -> Ways:
        rest = group & ~active
        if i.opcode in ("RET", "BRX"):
            name, *offset = i.operands[0].split()  # "R10 0x0": no comma stands between them
            if self.lanes.lacking([name], active) is not None:
                raise UnknownInstruction(f"{i}: the address to go to is unknown")
            target = self.lanes.register(name)
            if i.opcode == "BRX":  # relative to what follows
                target = target + np.uint32((i.address + INSTRUCTION_BYTES + int(offset[0], 0)) % (1 << 32))
            return [(at + 1, rest)] + [
                (self.launch.address[int(to)], active & (target == to)) for to in np.unique(target[active]).tolist()
            ]
        if i.target is None:
            raise UnknownInstruction(f"{i}: the target is not in the code")
        if "DIV" in i.modifiers:  # the way of a warp whose lanes are not together; here they always are
            return [(at + 1, group)]
        conditions = () if "CONV" in i.modifiers else i.operands[:-1]
        for condition in conditions:
            if self.lanes.lacking([condition.lstrip("!")], active) is not None:
                active = active if self.launch.decide(i) else self.lanes.no
            else:
                active = active & self.lanes.condition(condition)
        if "ANY" in i.modifiers:  # the whole warp goes if one of its lanes does
            active = group & np.repeat(active.reshape(-1, WARP).any(axis=1), WARP)
        return [(at + 1, group & ~active), (self.launch.address[i.target], active)]
