"""A whole call's clocks from the machine code of its kernels: before the loop, its turns with and without masks, behind it.

A block's time is a fixed part and so much for each turn. A turn's is the loop's by itself; the fixed part is what blocks of a few
turns, run one after another on the model's multiprocessor, take beyond that, so that a block's beginning and end overlap with its
neighbours' work. Blocks are handed to multiprocessors in launch order, each to the first place that is free.
Not modelled: the last blocks' having a multiprocessor to themselves, the launches themselves, L2 misses.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from cupyflash import Device, Problem
from cupyflash.multiprocessor import Multiprocessor as Limits
from cupyflash.sim.clock.sass import Instruction
from machine_code import clocks
from machine_code.clocks import Effort, Residents, Step
from machine_code.flow import EXIT, Loop, Tracer
from machine_code.ours import MAIN, Code, Ours, architecture, read
from machine_code.rates import Rates

FEW = 3
SEEDS = 4
EFFORT = Effort(seeds=8)
WAVES = 3
# Reads and writes of a kernel in tensors of N x d half floats: what device memory moves at least.
TENSORS = {"fa2_forward": 4, "fa2_backward_rows": 4, "fa2_backward": 8, "fa2_backward_finish": 3}


@dataclass(frozen=True)
class BlockClocks:
    """The clocks of one block, if as many as possible share a multiprocessor: fixed part, a turn without masks, a turn with."""

    fixed: float
    turn: float
    masked: float
    beside: int

    def of(self, turns: np.ndarray, masked: np.ndarray) -> np.ndarray:
        return np.where(turns + masked > 0, self.fixed + turns * self.turn + masked * self.masked, self.fixed)


@dataclass(frozen=True)
class Piece:
    """A kernel of a call: its clocks, and the least that device memory needs for what it reads and writes once."""

    name: str
    clocks: float
    memory: float
    blocks: int

    @property
    def least(self) -> float:
        return max(self.clocks, self.memory)


def clock_rate(device: Device) -> float:
    """Clocks a second at which the device has its peak of float32."""
    lanes = device.sm_count * Limits.like(device.compute_capability).fma_lanes
    return device.tensor_peak["float32"] / 2 / lanes


@cache
def block_clocks(code: Code, inner: tuple[int, ...], rates: Rates) -> BlockClocks:
    """The clocks from the machine code of a kernel with a main loop. `inner`: turns of loops in it whose number is not in
    the code."""
    tracer, residents = code.tracer(inner), code.residents
    loops = tracer.main_loops()
    main, others = loops[0], [each for each in loops[1:] if each.head > loops[0].tail or each.tail < loops[0].head]
    before = outside(tracer, tracer.path(0, main.head).instructions, others)
    turn = tracer.steady(main).instructions
    behind = outside(tracer, tracer.leaving(main).instructions, others)
    parts = [clocks.steps(trace, rates) for trace in (before, turn, behind)]
    few = a_block(parts[0] + parts[1] * (FEW - 1) + parts[2], rates, residents)
    masks = tracer.steady(others[0]) if others else replace(tracer, masked=True).steady(main)
    each, masked = (clocks.steady(trace, rates, residents, EFFORT).clocks for trace in (turn, masks.instructions))
    return BlockClocks(max(0.0, few - FEW * each), each, masked, residents.blocks)


def outside(tracer: Tracer, trace: Sequence[Instruction], loops: Sequence[Loop]) -> tuple[Instruction, ...]:
    """A trace without what lies in other loops over blocks: their turns are counted apart."""
    return tuple(each for each in trace if not any(tracer.place[each.address] in loop for loop in loops))


def a_block(program: Sequence[Step], rates: Rates, residents: Residents) -> float:
    """Clocks from one block's end to the next one's in the same place, when all places are taken."""
    found = 0.0
    queue = replace(residents, queued=(WAVES - 1) * residents.blocks)
    length = sum(step.stall for step in program)
    for seed in range(SEEDS):
        chance = random.Random(seed)
        starts = [chance.uniform(0, length) for _ in range(residents.blocks)]
        ends = sorted(clocks.Multiprocessor(program, rates, queue, chance).run(starts).ends)
        found += (sum(ends[-residents.blocks :]) - sum(ends[: residents.blocks])) / residents.blocks / (WAVES - 1)
    return found / SEEDS


def visits(problem: Problem, rows: int, cols: int, direction: str) -> tuple[np.ndarray, np.ndarray]:
    """Turns without and with masks of each thread block of a head: of row blocks, or for the backward of column blocks."""
    starts = np.arange(0, problem.seqlen_q, rows)
    lasts = np.minimum(starts + rows, problem.seqlen_q) - 1
    _, of_first = problem.keys_seen(starts, problem.seqlen_k)
    _, of_last = problem.keys_seen(lasts, problem.seqlen_k)
    if direction == "forward":
        seen, whole = -(-of_last // cols), of_first // cols
        return np.minimum(whole, seen), seen - np.minimum(whole, seen)
    columns = np.arange(0, problem.seqlen_k, cols)
    seen = (of_last[None, :] > columns[:, None]).sum(1)
    whole = (of_first[None, :] >= columns[:, None] + cols).sum(1)
    return whole, seen - whole


def makespan(times: np.ndarray, places: int) -> float:
    """The time at which all are done if each, in order, goes to the first of `places` that is free."""
    free = [0.0] * min(places, len(times))
    for each in times.tolist():
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def pieces(ours: Ours, slower: float = 1.0) -> Iterator[Piece]:
    """Each kernel of a call, with all latencies `slower` by that factor."""
    schedule, problem, device = ours.schedule, ours.schedule.problem, ours.schedule.device
    rates = Rates.of(architecture(device)).slower(slower)
    tensor = problem.head_count * problem.seqlen_q * problem.head_dim * problem.itemsize
    bytes_a_clock = (device.hbm_bandwidth or math.inf) / clock_rate(device)
    for kernel in schedule.kernels():
        moved = TENSORS.get(kernel.name, 0) * tensor / bytes_a_clock
        if kernel.name != MAIN[ours.direction]:
            code = read(kernel, device)
            trace = replace(code.tracer(), early=True).path(0, EXIT)
            places = device.sm_count * code.residents.blocks
            each = a_block(clocks.steps(trace.instructions, rates), rates, code.residents)
            yield Piece(kernel.name, -(-kernel.grid // places) * each, moved, kernel.grid)
            continue
        per_block = block_clocks(ours.main, ours.turns, rates)
        turns = visits(problem, schedule.block_rows, schedule.block_cols, ours.direction)
        order = np.argsort(-(turns[0] + turns[1]), kind="stable")  # the heaviest of a head come first
        times = np.tile(per_block.of(*turns)[order], problem.head_count)
        yield Piece(kernel.name, makespan(times, device.sm_count * per_block.beside), moved, len(times))


def seconds(ours: Ours, slower: float = 1.0) -> float:
    """The seconds of a call, by the model, at the clock rate at which the device has its peak."""
    return sum(each.least for each in pieces(ours, slower)) / clock_rate(ours.schedule.device)


def predictions(named: Callable[[], Iterable[tuple[Mapping[str, Any], Ours]]], budget: float) -> list[dict[str, Any]]:
    """The named subjects with their `model_seconds`, as many as can be computed in `budget` seconds.

    RuntimeError without NVIDIA's disassemblers.
    """
    found, begun = [], time.monotonic()
    for name, ours in named():
        if time.monotonic() - begun > budget:
            break
        found.append({**name, "model_seconds": seconds(ours)})
    return found
