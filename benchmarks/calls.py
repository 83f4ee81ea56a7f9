"""Whole calls by the clock (docs/clock.md): our kernels beside FlashAttention's own. No GPU.

    python benchmarks/calls.py [WORD ...] [--tile ROWSxCOLS | --designs | --programs FOLDER] [--write]

A call has 16,384 tokens in rows of 4,096, and 2,048 / d heads, in float16. Words choose: forward or backward, a device's name, fa2
or fa3, full or causal, 64 or 128. --tile 128x64 plans ours with other blocks; --designs times each design of fa3's gradients
(cupyflash/schedules/fa3_backward.py). With --programs FlashAttention's kernels are timed instead of ours: FOLDER has a program for
each pass, as fa3_forward_128_causal, which makes the launches of a call BATCH HEADS N (docs/run.md says how to compile it); none
of its kernels is run. Beside each stand the times of benchmarks/results, and the figure over them. --write keeps the figures in
calls.json, of which docs/performance.md has the table.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import checkout  # noqa: F401

# isort: split
import numpy as np
from records import read_rows, write_rows

from cupyflash import Device, Problem, plan
from cupyflash.basics import Array, Values
from cupyflash.schedules import TileSchedule, fa3_backward, plan_backward
from cupyflash.sim import ptx
from cupyflash.sim.clock.execution import CodeLaunch, CubinKernel
from cupyflash.sim.clock.known import KnownError, error_of, kind_of
from cupyflash.sim.clock.loaded import of_ptx
from cupyflash.sim.clock.measured import RESULTS, files, implements, same_chip
from cupyflash.sim.clock.measured import read as lines_of
from cupyflash.sim.clock.memory import APART, FIRST_ADDRESS
from cupyflash.sim.clock.planned import clocks
from cupyflash.sim.clock.whole import RULES, Clock
from cupyflash.sim.program.launches import LaunchRequest
from cupyflash.sim.program.runtime import Runtime
from cupyflash.sim.program.session import run_program
from cupyflash.sim.ptx.parameters import BoundArguments, BoundTensor, parameter_offsets
from cupyflash.sim.ptx.text.syntax import Variable
from cupyflash.tiling import TilingChoice

KEPT = Path(__file__).with_suffix(".json")
TOKENS, WIDTH = 16384, 2048
OURS, THEIRS = "ours", "FlashAttention-{}"
LENGTH = 4096
HALF_TYPES = "float16", "bfloat16"
TORCH, CUDNN = "torch flash", "torch cudnn"  # PyTorch's FlashAttention-2, and cuDNN by PyTorch
ROWS = (
    ("forward", "fa2", ("A100-40GB", "H100-SXM", "RTX 5090")),
    ("forward", "fa3", ("H100-SXM", "H200")),
    ("backward", "fa2", ("A100-40GB", "H100-SXM")),
    ("backward", "fa3", ("H100-SXM",)),
)


@dataclass(frozen=True)
class Call:
    """A call: "forward" or "backward", the family of kernels, and the problem."""

    direction: str
    algorithm: str
    device: str
    d: int
    mask: str
    n: int

    def __str__(self) -> str:
        return ", ".join(map(str, asdict(self).values()))

    @property
    def words(self) -> set[str]:
        return {str(each) for each in asdict(self).values()}

    @property
    def problem(self) -> Problem:
        heads = WIDTH // self.d
        return Problem(TOKENS // self.n, heads, heads, self.n, self.n, self.d, "float16", causal=self.mask == "causal")

    @property
    def flops(self) -> float:
        """FLOPs as FlashAttention's benchmarks count them: half of all when causal."""
        p = self.problem
        return (p.flops if self.direction == "forward" else p.backward_flops) / (2 if self.mask == "causal" else 1)

    @property
    def has_designs(self) -> bool:
        """True if the kernel has designs to choose from, those of `fa3_backward.designs`."""
        return (self.direction, self.algorithm) == ("backward", "fa3")

    def schedule(self, tile: TilingChoice = None) -> TileSchedule:
        """The schedule of ours."""
        make = plan if self.direction == "forward" else plan_backward
        return make(self.problem, Device.named(self.device), self.algorithm, tile)

    def clocks(self, programs: Path | None, tile: TilingChoice) -> Iterator[Clock]:
        """The clocks of our launches, or of a program's."""
        if programs is None:
            return clocks(self.schedule(tile))
        program = programs / f"{self.algorithm}_{self.direction}_{self.d}_{self.mask}"
        return iter(clocks_of_program(program, self.problem, Device.named(self.device)))


def calls() -> Iterator[Call]:
    """All calls of the table."""
    for direction, algorithm, devices in ROWS:
        for device in devices:
            for d in (64, 128):
                for mask in ("full", "causal"):
                    yield Call(direction, algorithm, device, d, mask, LENGTH)


@dataclass(frozen=True)
class Figure:
    """A call's time: whose kernels, its seconds and TFLOP/s, what binds its longest launch and the class of that one; `rules`: the
    number of the clock's rules (`whole.RULES`)."""

    call: Call
    whose: str
    seconds: float
    tflops: float
    binds: str
    kind: str
    rules: int = 0

    @property
    def error(self) -> KnownError:
        return error_of(self.kind)

    def beside(self, folder: Path = RESULTS) -> str:
        """Measured times of such a call, and the figure over that of the same kernels (FlashAttention-2's: PyTorch's); or ""."""
        found, own = measured_seconds(self.call, folder), self.call.algorithm
        if self.whose != OURS:
            own = TORCH if own == "fa2" else ""
        times = [f"{name} {seconds * 1e6:,.0f} us" for name, seconds in found.items()]
        times += [f"the figure is {self.seconds / found[own]:.2f} of {own}'s"] if own in found else []
        return f"measured: {', '.join(times)}" if times else ""


def measured_seconds(call: Call, folder: Path = RESULTS, of_any_tile: bool = False) -> dict[str, float]:
    """The newest measured seconds of a call in either half type: of our kernels, of today's tile unless `of_any_tile`, of PyTorch's
    FlashAttention-2 and of cuDNN."""
    schedule = call.schedule()
    p, device, names = call.problem, Device.named(call.device), (call.algorithm, TORCH, CUDNN)
    case = {"pass": call.direction, "d": call.d, "n": call.n, "causal": p.options.causal, "batch": p.batch, "heads": p.heads}
    found: dict[str, tuple[str, float]] = {}
    for path in files(folder):
        run: Values = {}
        for line in lines_of(path):
            run = line if line["kind"] == "run" else run
            name = line.get("implementation", "")
            ours = of_any_tile or name != call.algorithm or implements(schedule, line)
            same = name in names and ours and case.items() <= line.items() and line["dtype"] in HALF_TYPES
            good = "seconds" in line and "invalid" not in line and line.get("right") is not False and not run.get("simulated", True)
            if same and good and same_chip(device, run["device"]) and str(run["date"]) >= found.get(name, ("", 0.0))[0]:
                found[name] = str(run["date"]), line["seconds"]
    return {name: found[name][1] for name in names if name in found}


def figure(call: Call, programs: Path | None = None, tile: TilingChoice = None) -> Figure:
    timed = [(clock, clock.time()) for clock in call.clocks(programs, tile)]
    clock, longest = max(timed, key=lambda pair: pair[1].seconds)
    seconds = sum(time.seconds for _, time in timed)
    whose = OURS if programs is None else THEIRS.format(call.algorithm[-1])
    return Figure(call, whose, seconds, call.flops / seconds / 1e12, longest.binds, kind_of(clock, longest), RULES)


@cache
def assembled(text: str, device: Device) -> bytes:
    return of_ptx(text, device).cubin


def clocks_of_program(program: Path, problem: Problem, device: Device) -> list[Clock]:
    """Runs a program up to its launches, none of which is run."""
    found = []

    class Timing(Runtime):
        def run(self, request: LaunchRequest, stream: ptx.Stream) -> None:
            kernel = CubinKernel.of(assembled(request.kernel.image.module.text, device), request.kernel.name)
            params = request.kernel.image.module.code(request.kernel.name).params
            pairs = [(block.allocation, block.allocation.memory) for block in self.memory.blocks.values()]
            bound, cluster = arguments(request.data, params, pairs), request.cluster or (1, 1, 1)
            found.append(Clock(CodeLaunch(kernel, request.grid, request.block, bound, request.shared, cluster=cluster), device))

    shape = [str(each) for each in (problem.batch, problem.heads, problem.seqlen_q)]
    done = run_program(program, shape, device=device, runtime=Timing)
    if done.status or done.failed or not found:
        raise RuntimeError(f"{program.name} ended with {done.status}, {dict(done.failed)} and {len(found)} launches")
    return found


def arguments(given: bytes, params: Sequence[Variable], pairs: Iterable[tuple[ptx.Allocation, Array]]) -> BoundArguments:
    """Lays a launch's arguments out; what points into an allocation, in tensor maps too, points to the pair's array."""
    data, tensors = bytearray(given), []
    words = np.frombuffer(given, np.int64, len(data) // 8).copy()
    for each, memory in pairs:
        inside = (words >= each.address) & (words < each.address + max(each.memory.size, 1))
        if inside.any():
            words[inside] += FIRST_ADDRESS + len(tensors) * APART - each.address
            tensors.append(BoundTensor(each.name, each.name, memory, each.name, len(data) + 8 * len(tensors)))
    data[: words.nbytes] = words.tobytes()
    offsets, _ = parameter_offsets(params)
    return BoundArguments(data + bytes(8 * len(tensors)), offsets, tensors)


def read(path: Path | None = None) -> list[Figure]:
    """The figures on file."""
    return [Figure(**{**each, "call": Call(**each["call"])}) for each in read_rows(path or KEPT)]


def keep(one: Figure) -> None:
    """Puts a figure into the file, in place of an older one of the same call."""
    others = [each for each in read() if (each.call, each.whose) != (one.call, one.whose)]
    order = list(calls())
    write_rows(KEPT, sorted([*others, one], key=lambda each: (order.index(each.call), each.whose != OURS)))


def table() -> Iterator[str]:
    """The table of docs/performance.md."""
    figures = {(each.call, each.whose): each for each in read()}
    names = "ours", "FlashAttention's", "ours over it", "binds", "known error", "measured: ours", "ours over it", TORCH, CUDNN
    yield f"| | {' | '.join(names)} |"
    yield "| --- |" + " --- |" * len(names)
    for call in calls():
        ours, theirs = figures.get((call, OURS)), figures.get((call, THEIRS.format(call.algorithm[-1])))
        if ours is None:
            continue
        name = f"{call.direction}, `{call.algorithm}`, {call.device}, d {call.d}{', causal' if call.mask == 'causal' else ''}"
        beside = (f"{theirs.tflops:.0f}", f"{theirs.seconds / ours.seconds:.2f}") if theirs else ("", "")
        error = f"{ours.error.median:.0%}" if ours.error.figures else "not known"
        taken = measured_seconds(call)
        own, *peers = (f"{call.flops / taken[each] / 1e12:.0f}" if each in taken else "" for each in (call.algorithm, TORCH, CUDNN))
        over = f"{taken[call.algorithm] / ours.seconds:.2f}" if own else ""
        cells = (f"{ours.tflops:.0f}", *beside, ours.binds, error, own, over, *peers)
        yield f"| {name} | {' | '.join(cells)} |"


def tile_of(text: str) -> tuple[int, int]:
    rows, cols = text.split("x")
    return int(rows), int(cols)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="what the chosen calls have")
    parser.add_argument("--programs", type=Path, metavar="FOLDER", help="FlashAttention's launches, as programs")
    parser.add_argument("--tile", type=tile_of, metavar="ROWSxCOLS", help="blocks of ours, which --write leaves out")
    parser.add_argument("--designs", action="store_true", help="each design of fa3's gradients, which --write leaves out")
    parser.add_argument("--write", action="store_true", help="keep the figures in calls.json")
    asked = parser.parse_args(words)
    chosen = [each for each in calls() if set(asked.words) <= each.words]
    tiles: Iterator[tuple[Call, TilingChoice]] = ((call, asked.tile) for call in chosen)
    if asked.designs:
        tiles = ((call, each) for call in chosen if call.has_designs for each in fa3_backward.designs(call.problem))
    for call, tile in tiles:
        begun = time.process_time()
        try:
            one = figure(call, asked.programs, tile)
        except (OSError, RuntimeError, ValueError) as error:
            print(f"{call}: {error}", flush=True)
            continue
        took = time.process_time() - begun
        rate = f"{one.seconds * 1e6:,.0f} us, {one.tflops:.0f} TFLOP/s"
        name = f"{call}: {tile.label}" if isinstance(tile, fa3_backward.Fa3BackwardTile) else f"{call}"
        print(f"{name}: {one.whose} {rate}; {one.binds} binds; {one.error} ({took:.0f} s)", flush=True)
        if beside := one.beside():
            print(f"    {beside}", flush=True)
        if asked.write and not tile:
            keep(one)
    return 0


if __name__ == "__main__":
    sys.exit(main())
