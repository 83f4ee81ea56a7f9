"""Clocks of a turn of fa2's main loop, one thread block alone on a multiprocessor: of a timeline's model, and of its machine code.

    python benchmarks/timeline.py [80|90] ...

PTX under `cupyflash.sim.timeline` beside machine code under `benchmarks/machine_code`'s clock model: the same tile, and the same
rates and latencies. Needs NVRTC and NVIDIA's disassemblers, as that does; no GPU. A block's clocks for 2,048 keys less those for
1,024 are so many turns.
"""

from __future__ import annotations

import sys

import checkout  # noqa: F401

# isort: split
from machine_code.clocks import Residents, steady
from machine_code.ours import Ours, Subject

from cupyflash import Problem, plan
from cupyflash.sim.timeline.clocks import play
from cupyflash.sim.trace import trace

LONG, SHORT = 2048, 1024
DIMS = 64, 128


def of_machine_code(ours: Ours) -> float:
    """A turn by the clock model of machine code."""
    cost = ours.cost()
    return steady(cost.trace.instructions, cost.rates, Residents(cost.residents.warps, 1)).clocks


def of_timeline(ours: Ours) -> float:
    """A turn by a timeline's."""
    schedule = ours.schedule
    tile, device = schedule.blocks, schedule.device
    clocks = []
    for seqlen in (LONG, SHORT):
        problem = Problem(1, 1, 1, tile[0], seqlen, schedule.problem.head_dim, "float16")
        (diary,) = trace(plan(problem, device, "fa2", tile), timeline_block=0).diaries
        assert diary is not None
        clocks.append(play(diary, device).clocks)
    return (clocks[0] - clocks[1]) / ((LONG - SHORT) / tile[1])


def main(words: list[str]) -> None:
    print("  sm   d  tile     warps  timeline  machine code  ratio")
    for architecture in map(int, words or ["80"]):
        for d in DIMS:
            ours = Ours.of(Subject("forward", architecture, d, False))
            mine, theirs = of_timeline(ours), of_machine_code(ours)
            warps = ours.main.threads // 32
            print(f"  {architecture} {d:4}  {ours.tile:8} {warps:4} {mine:9,.0f} {theirs:13,.0f} {mine / theirs:6.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
