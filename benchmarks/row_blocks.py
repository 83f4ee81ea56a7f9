"""How long fa3's row blocks take, in the order in which they are taken:  python benchmarks/row_blocks.py [WORD ...]

Needs no GPU. A small model of a whole launch beside the measured times of benchmarks/results, and of other orders and blocks: each
multiprocessor takes the next row block when it has done one, and a turn of it when its K and V are there; these come from an L2 of
which the least recently used tiles leave, or from DRAM, each of which serves one request after another. So it sees what the clock
(docs/clock.md) does not, which runs a few multiprocessors' blocks: when the keys of a head come from DRAM again, and when all
multiprocessors want DRAM at once. WORDs choose calls: causal, full, a head dimension, a length.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import checkout  # noqa: F401

# isort: split
import calls
import numpy as np

from cupyflash import Device, Problem, plan
from cupyflash.basics import Array
from cupyflash.schedules.fa3 import Fa3Schedule

Order = tuple[Array, Array]
Key = tuple[object, ...]

# Of an H100. Clocks of a key in a turn are Nsight Compute's (docs/measured.md), by the columns of a head.
MHZ, KEY_CLOCKS = 1750, {64: 2650 / 128, 128: 3394 / 176}
BEGIN_CLOCKS, END_CLOCKS = 1200, 1500
"""A row block takes these from Q's arrival to its first turn, and from its last turn to where O leaves."""
L2_RATE, L2_LATENCY, DRAM_RATE, DRAM_LATENCY = 9000.0, 400.0, 2400.0, 1000.0
"""Bytes a nanosecond, and nanoseconds."""
LAUNCH, QUEUE, AFTER_O = 2500.0, 5000.0, 400.0
"""Nanoseconds of a launch, of the queue's kernel, and from O's end to where Q's room is free, if O leaves through it."""


@dataclass
class Memory:
    """The half of an L2 that a multiprocessor's requests find things in, and DRAM behind it. Times are nanoseconds."""

    size: int
    held: OrderedDict[Key, int] = field(default_factory=OrderedDict)
    there: dict[Key, float] = field(default_factory=dict)
    bytes_held: int = 0
    dram_bytes: int = 0
    l2_free: float = 0.0
    dram_free: float = 0.0

    def moved(self, tile: Key, nbytes: int, now: float, write: bool = False) -> float:
        """Reads or writes a tile; returns when it is there."""
        self.l2_free = max(self.l2_free, now) + nbytes / L2_RATE
        if tile in self.held:
            self.held.move_to_end(tile)
            if not write:
                return max(self.l2_free + L2_LATENCY, self.there[tile])
        else:
            self.held[tile] = nbytes
            self.bytes_held += nbytes
            while self.bytes_held > self.size:
                self.bytes_held -= self.held.popitem(last=False)[1]
        self.dram_free = max(self.dram_free, now) + nbytes / DRAM_RATE
        self.dram_bytes += nbytes
        self.there[tile] = max(self.dram_free + DRAM_LATENCY, self.l2_free + L2_LATENCY)
        return self.there[tile]


@dataclass
class Place:
    """A multiprocessor: its row block (item, head), the column blocks of it that are left, and when things are there or free."""

    item: int = 0
    head: int = 0
    left: range = range(0)
    turn: int = 0
    Q: float = 0.0
    ready: float = 0.0
    Q_free: float = 0.0
    KV: dict[int, tuple[float, float]] = field(default_factory=dict)


class Run:
    """A launch of a schedule by the model, its row blocks in an order: `microseconds`, and the bytes that DRAM moved."""

    def __init__(self, schedule: Fa3Schedule, order: Order | None = None) -> None:
        self.schedule, self.problem = schedule, schedule.problem
        self.items, self.heads = schedule.order() if order is None else order
        self.memory = Memory(schedule.device.l2_bytes // 2)
        self.row_bytes = schedule.tiling.used.block_rows * self.problem.head_dim * self.problem.itemsize
        self.tile_bytes = schedule.block_cols * self.problem.head_dim * self.problem.itemsize
        self.turn_ns = KEY_CLOCKS[self.problem.head_dim] * schedule.block_cols / MHZ * 1e3
        starts = np.arange(schedule.row_blocks) * schedule.block_rows
        last = np.minimum(starts + schedule.block_rows, self.problem.seqlen_q) - 1
        self.firsts = np.broadcast_to(self.problem.keys_seen(starts, self.problem.seqlen_k)[0], starts.shape)
        self.ends = np.broadcast_to(self.problem.keys_seen(last, self.problem.seqlen_k)[1], starts.shape)
        places, grid = [Place() for _ in range(schedule.grid)], schedule.grid
        waiting = [deque(range(n, len(self.items), grid)) for n in range(grid)]
        if schedule.queued:
            waiting = [deque(range(len(self.items)))] * grid
        self.events: list[tuple[float, int, str]] = [(0.0, n, "take") for n in range(grid)]
        end = 0.0
        while self.events:
            now, n, what = heapq.heappop(self.events)
            if what != "take" or waiting[n]:
                end = max(end, now)
            if what == "take" and waiting[n]:
                self.take(places[n], n, waiting[n].popleft(), now)
            elif what != "take":
                getattr(self, what)(places[n], n, now)
        self.microseconds = (max(end, self.memory.dram_free) + LAUNCH + QUEUE * schedule.queued) / 1e3

    def later(self, now: float, n: int, what: str) -> None:
        heapq.heappush(self.events, (now, n, what))

    def request(self, at: Place, turn: int, now: float) -> None:
        """Asks for the K and V of a turn, of the row block's last column blocks first."""
        if turn < len(at.left):
            kv = self.problem.kv_heads * at.head // self.schedule.items.heads
            tiles = ((name, at.item // self.schedule.row_blocks, kv, at.left[turn]) for name in "KV")
            k, v = (self.memory.moved(tile, self.tile_bytes, now) for tile in tiles)
            at.KV[turn] = k, v

    def take(self, at: Place, n: int, place: int, now: float) -> None:
        at.item, at.head, at.turn, at.KV = int(self.items[place]), int(self.heads[place]), 0, {}
        i, cols = at.item % self.schedule.row_blocks, self.schedule.block_cols
        at.left = range(-(-int(self.ends[i]) // cols) - 1, int(self.firsts[i]) // cols - 1, -1)
        self.request(at, 0, now)
        self.request(at, 1, now)
        self.later(max(now, at.Q_free), n, "load")

    def load(self, at: Place, n: int, now: float) -> None:
        at.Q = self.memory.moved(("Q", at.item, at.head), self.row_bytes, now) + BEGIN_CLOCKS / MHZ * 1e3
        self.later(max(at.ready, at.Q, at.KV[0][0]) if at.left else max(at.ready, now), n, "multiply" if at.left else "store")

    def multiply(self, at: Place, n: int, now: float) -> None:
        done = max(now + self.turn_ns, at.KV[at.turn][1])
        at.turn += 1
        self.request(at, at.turn + 1, now)
        more = at.turn < len(at.left)
        self.later(max(done, at.KV[at.turn][0]) if more else done, n, "multiply" if more else "store")

    def store(self, at: Place, n: int, now: float) -> None:
        """O leaves, while the next row block's tiles come, and its Q if O has room of its own."""
        at.ready = now + END_CLOCKS / MHZ * 1e3
        at.Q_free = now if self.schedule.config.o_apart else at.ready + AFTER_O
        self.memory.moved(("O", at.item, at.head), self.row_bytes, now, write=True)
        self.later(now, n, "take")


def longest_first(schedule: Fa3Schedule) -> Order:
    """All row blocks by length alone."""
    item = np.argsort(-schedule.items.turns, kind="stable")
    return np.repeat(item, schedule.items.heads), np.tile(np.arange(schedule.items.heads), len(item))


def problems() -> Iterator[calls.Call]:
    for n in (512, 1024, 2048, 4096, 16384):
        for d in KEY_CLOCKS:
            for mask in ("full", "causal"):
                yield calls.Call("forward", "fa3", "H100-SXM", d, mask, n)


def lines(call: calls.Call) -> Iterator[tuple[str, Run]]:
    """The name of a way, and the model's run: the call as it is, longest first, or by the widest blocks."""
    problem, device = call.problem, Device.named(call.device)
    made = planned(problem, device)
    yield f"{made.tiling.used.block_rows} x {made.block_cols}", Run(made)
    if made.queued:
        yield "longest first", Run(made, longest_first(made))
    elif call.d == 128:
        wide = planned(problem, device, (128, 176))
        yield f"{wide.tiling.used.block_rows} x {wide.block_cols}", Run(wide)


def planned(problem: Problem, device: Device, tile: tuple[int, int] | None = None) -> Fa3Schedule:
    made = plan(problem, device, "fa3", tile)
    assert isinstance(made, Fa3Schedule)
    return made


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="what the chosen calls have")
    asked = parser.parse_args(words)
    for call in problems():
        if not set(asked.words) <= call.words:
            continue
        taken = calls.measured_seconds(call, of_any_tile=True).get("fa3")
        print(f"{call}{f': measured {taken * 1e6:,.0f} us' if taken else ''}", flush=True)
        for name, run in lines(call):
            print(f"    {name:16}{run.microseconds:8,.0f} us, DRAM {run.memory.dram_bytes / 1e6:6,.0f} MB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
