"""Other sizes of a traced problem that its page can play: N, d and M around the traced ones, by the schedules."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from cupyflash.basics import Report
from cupyflash.device import Device
from cupyflash.request.problem import Problem
from cupyflash.schedules import TileSchedule
from cupyflash.sim.trace import refuse_longer
from cupyflash.sim.trace.page import report
from cupyflash.sim.trace.planned import planned

MOST_MOVES = 2500
"""Moves of an algorithm that another choice may have."""
FACTORS = {"N": (0.5, 1, 2), "d": (0.5, 1, 2), "M": (0.5, 1, 2, 4)}
LEAST, MOST_D, MOST_SRAM = {"N": 16, "d": 16, "M": 4096}, 256, 1 << 20

Planner = Callable[[int, Problem, Device], TileSchedule]


def choices(
    problem: Problem, device: Device, names: Sequence[str], planner: Planner, title: Callable[[Problem], str]
) -> Report | None:
    """The choices for a page, or None if the problem has none: more than one head, arrays beside Q, K and V, or another kernel.

    `planner` returns the schedule of the player of that number for a problem on a device, `title` the words of a problem. "axes"
    has the values of N, d and M (bytes), "chosen" the traced ones, "refused" by "N,d,M" the reason where there is none, "packed"
    all reports (`page.report`) by "N,d,M", as JSON, gzip and base64.
    """
    if problem.seqlen_q != problem.seqlen_k or problem.head_dim != problem.head_dim_v:
        return None
    try:
        for number in range(len(names)):
            planned(planner(number, problem, device))
    except ValueError:
        return None
    chosen = {"N": problem.seqlen_q, "d": problem.head_dim, "M": device.sram_per_block}
    axes = {axis: sorted({*_values(axis, chosen[axis])}) for axis in chosen}
    reports: Report = {}
    refused: dict[str, str] = {}
    for n, d, sram in product(*axes.values()):
        if (n, d, sram) == tuple(chosen.values()):
            continue
        key = f"{n},{d},{sram}"
        try:
            sized = replace(problem, seqlen_q=n, seqlen_k=n, head_dim=d, head_dim_v=d)
            schedules = [planner(number, sized, device.with_sram(sram)) for number in range(len(names))]
            for schedule in schedules:
                refuse_longer(schedule, MOST_MOVES)
            reports[key] = report([*map(planned, schedules)], names, title(sized))
        except ValueError as error:
            refused[key] = str(error)
    packed = base64.b64encode(gzip.compress(json.dumps(reports, separators=(",", ":")).encode(), mtime=0)).decode()
    return {"axes": axes, "chosen": chosen, "refused": refused, "packed": packed}


def _values(axis: str, chosen: int) -> list[int]:
    """The values of an axis around the chosen one, which is one of them."""
    most = {"N": 1 << 20, "d": MOST_D, "M": MOST_SRAM}[axis]
    found = [int(chosen * factor) for factor in FACTORS[axis]]
    return [chosen, *(value for value in found if LEAST[axis] <= value <= most)]
