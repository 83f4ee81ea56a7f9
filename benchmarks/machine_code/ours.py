"""The kernels that cupyflash plans, compiled for a device and read; and FlashAttention-2's, whose figures are kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from cupyflash import Device, Problem, plan
from cupyflash.launch import cubins
from cupyflash.launch.compiler import program
from cupyflash.launch.nvrtc import remarks
from cupyflash.multiprocessor import WARP, occupancy
from cupyflash.schedules import Kernel, plan_backward
from cupyflash.schedules.base import TileSchedule
from cupyflash.sim.clock import sass
from machine_code.clocks import Residents
from machine_code.costs import Cost, Figure
from machine_code.flow import Loop, Trace, Tracer
from machine_code.rates import SPECIALISED, Rates, products

PEERS = Path(__file__).with_name("flash_attention_2.json")
DEVICES = {80: "A100-40GB", 90: "H100-SXM"}
BATCH, HEADS = 4, 16
MAIN = {"forward": "fa2_forward", "backward": "fa2_backward"}
MOST_TURNS, MOST_INNER_LOOPS = 8, 4
PRODUCTS = {"forward": 2, "backward": 5}


@dataclass(frozen=True)
class Subject:
    """The subject of a comparison: pass, architecture, head dimension, mask."""

    direction: str
    architecture: int
    d: int
    causal: bool

    def __str__(self) -> str:
        return f"{self.direction} sm_{self.architecture}, d {self.d}, {'causal' if self.causal else 'full'}"

    @property
    def words(self) -> set[str]:
        """The words that choose it on the command line."""
        return {self.direction, str(self.architecture), str(self.d), "causal" if self.causal else "full"}

    @property
    def device(self) -> Device:
        return Device.named(DEVICES[self.architecture])

    def problem(self, n: int = 4096) -> Problem:
        return Problem(BATCH, HEADS, HEADS, n, n, self.d, "float16", causal=self.causal)

    def flops(self, n: int) -> float:
        """FLOPs of a call, half when causal, as FlashAttention's benchmarks count them."""
        problem = self.problem(n)
        return (problem.flops if self.direction == "forward" else problem.backward_flops) / (2 if self.causal else 1)


def architecture(device: Device) -> int:
    """80 for sm_80."""
    major, minor = device.compute_capability
    return 10 * major + minor


@dataclass(frozen=True, eq=False)
class Code:
    """A kernel's machine code with its launch, and the compiler's remarks on it."""

    name: str
    instructions: tuple[sass.Instruction, ...]
    resources: Mapping[str, int]
    threads: int
    shared_bytes: int
    device: Device
    remarks: tuple[str, ...] = ()

    @property
    def architecture(self) -> int:
        return architecture(self.device)

    @property
    def residents(self) -> Residents:
        """Blocks that share a multiprocessor."""
        shared = self.shared_bytes + self.resources.get("SHARED", 0)
        held = occupancy(self.device, self.threads, self.resources["REG"], shared)
        return Residents(self.threads // WARP, held.blocks)

    def tracer(self, turns: tuple[int, ...] = ()) -> Tracer:
        strange = {each.opcode for each in self.instructions} & set(SPECIALISED)
        if strange:
            raise ValueError(f"{self.name} has {', '.join(sorted(strange))}: the model is of kernels whose warps all do the same")
        return Tracer(self.instructions, turns)

    def cost(self, turns: tuple[int, ...] = (), loop: Loop | None = None) -> Cost:
        """The cost of the steady turn of the main loop, or of another. `turns`: those of inner loops whose number is not in the
        code."""
        return Cost(self.tracer(turns).steady(loop), Rates.of(self.architecture), self.residents)


@cache
def _read(program: cubins.Program) -> tuple[sass.Cubin, tuple[str, ...]]:
    made = cubins.compiled(program)
    return sass.read(made.code), remarks(made.log)


@cache
def _code(name: str, program: cubins.Program, launch: tuple[int, int], device: Device) -> Code:
    found, remarked = _read(program)
    return Code(name, tuple(found.kernels[name]), found.resources[name], *launch, device, remarked)


def read(kernel: Kernel, device: Device) -> Code:
    """Compiles a planned kernel and reads its machine code; the same one again for the same binary and block."""
    return _code(kernel.name, program(kernel, device.compute_capability), (kernel.threads, kernel.shared_bytes), device)


@dataclass(frozen=True)
class Ours:
    """A schedule of fa2 with its main kernel's machine code; `direction` is forward or backward."""

    direction: str
    schedule: TileSchedule

    @classmethod
    def of(cls, subject: Subject, n: int = 4096) -> Ours:
        """Return the kernels that cupyflash plans for rows of N."""
        make = plan if subject.direction == "forward" else plan_backward
        return cls(subject.direction, make(subject.problem(n), subject.device, "fa2"))

    @cached_property
    def main(self) -> Code:
        kernel = next(each for each in self.schedule.kernels() if each.name == MAIN[self.direction])
        return read(kernel, self.schedule.device)

    @property
    def tile(self) -> str:
        return f"{self.schedule.block_rows}x{self.schedule.block_cols}"

    def products(self, code: Code, scores: int) -> int:
        """FMAs of a warp in a turn of a loop that takes a tile of so many scores."""
        return PRODUCTS[self.direction] * scores * self.schedule.problem.head_dim // (code.threads // WARP)

    def cost(self, turns: tuple[int, ...] = ()) -> Cost:
        """The cost of the main loop's steady turn."""
        return self.main.cost(turns or self.turns)

    @property
    def scores(self) -> int:
        """The scores of a tile."""
        return self.schedule.block_rows * self.schedule.block_cols

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """The turns of inner loops whose number depends on the warp, such that the products are a tile's; none if no number is
        right."""
        return self.turns_of(self.main, self.scores) or ()

    def turns_of(self, code: Code, scores: int) -> tuple[int, ...] | None:
        """The same of other code for tiles of so many scores; None where nothing does."""
        for each in range(1, MOST_TURNS + 1):
            turns = (each,) * MOST_INNER_LOOPS
            try:
                if made(code.tracer(turns).steady()) == self.products(code, scores):
                    return turns
            except ValueError:
                break
        return None

    def doubt(self, trace: Trace) -> str | None:
        """The reason to doubt a trace, if its products are not a tile's."""
        found, wanted = made(trace), self.products(self.main, self.scores)
        if found == wanted:
            return None
        return f"the trace makes {found:,} products, a turn should make {wanted:,}: give --turns, or look at --list"


def made(trace: Trace) -> int:
    """FMAs of a trace's products."""
    return sum(products(each) for each in trace.instructions if each.opcode == "HMMA")


@dataclass(frozen=True)
class Peer:
    """FlashAttention-2's kernel for a subject: its figures as they were counted from cubins built of its source."""

    subject: Subject
    facts: Mapping[str, Any]

    @property
    def share(self) -> Figure:
        """The clock model's share of mma.sync's peak."""
        return Figure(self.facts["clock_model"], {name: tuple(each) for name, each in self.facts.get("varied", {}).items()})


def peers() -> Iterator[Peer]:
    """All peers on file."""
    for facts in json.loads(PEERS.read_text())["kernels"]:
        yield Peer(Subject(facts["direction"], facts["architecture"], facts["d"], facts["causal"]), facts)
