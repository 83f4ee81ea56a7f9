"""A model of the time of a pass: how long each part of the device is busy, launch order, and DRAM behind the L2.

The clocks of a turn are those by which the planner chooses tiles and splits (`fa2_tiles`, `fa3_tiles`, `decode_tiles`); of the
backward, `fa2_backward_clocks`. Nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from cupyflash.device import Device
from cupyflash.multiprocessor import L2_BYTES, clock_rate
from cupyflash.schedules import (
    BackwardSchedule,
    DecodeSchedule,
    Schedule,
    TileSchedule,
    decode_tiles,
    fa2_tiles,
    fa3_tiles,
    require_schedule,
)
from cupyflash.schedules import fa2_backward_clocks as backward_clocks
from cupyflash.schedules.balance import Pieces
from cupyflash.schedules.decode_tiles import LAUNCH
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa2_backward import Fa2BackwardSchedule, QueriesSchedule
from cupyflash.schedules.fa2_backward_tiles import GradientsLaunch as Gradients
from cupyflash.schedules.fa2_backward_tiles import launches as main_launches
from cupyflash.schedules.fa3 import Fa3Schedule
from cupyflash.sim import l2
from cupyflash.sim.l2.launch import DeviceMemory, PlayedLaunch
from cupyflash.sim.l2.played import PlayedWalk
from cupyflash.sim.l2.reads import Given

DRAM = "DRAM"


@dataclass(frozen=True)
class Work:
    """A launch: the pieces of work of its thread blocks, one each or one after another, the turns of all of them, the clocks of a
    turn by unit, its FLOP, and the seconds that the launch takes in any case."""

    launch: PlayedLaunch
    pieces: int
    turns: int
    parts: Mapping[str, float]
    flops: int
    seconds: float


@dataclass(frozen=True)
class Times:
    """Seconds by a model.

    busy: of each part of the device by itself: all its work at its peak, on all multiprocessors; DRAM's for the bytes behind the
    L2, absent if its bandwidth is not known. kernel: the launches one after another, their thread blocks by the model, with waits,
    waves and the tail. waves: how often the longest launch's blocks fill the device; balance: the busiest of their places over the
    mean, in turns. flops: of the tiles that are computed. peak, bandwidth and l2_bandwidth in FLOP/s and bytes/s, None if not
    known.
    """

    busy: Mapping[str, float]
    kernel: float
    waves: float
    balance: float
    flops: int
    behind: l2.Behind
    peak: float | None
    bandwidth: float | None
    l2_bandwidth: float

    @property
    def seconds(self) -> float:
        """The seconds of the pass: the kernel's, or DRAM's if that takes longer."""
        return max(self.kernel, self.busy.get(DRAM, 0.0))

    @property
    def idle(self) -> float:
        """The share of places that is empty while the longest launch runs."""
        return 1 - 1 / self.balance

    @property
    def bound(self) -> str:
        """The part that is busy longest."""
        return max(self.busy, key=lambda part: self.busy[part])

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self.flops / self.seconds

    @property
    def intensities(self) -> dict[str, float]:
        """FLOP for each byte from and to each memory."""
        moved = {"L2": self.behind.asked.total_bytes, DRAM: self.behind.dram.total_bytes}
        return {name: self.flops / nbytes for name, nbytes in moved.items() if nbytes}

    @property
    def ridge(self) -> float | None:
        """FLOP a byte of DRAM from which on the tensor cores bind."""
        return self.peak / self.bandwidth if self.peak and self.bandwidth else None


def times(schedule: TileSchedule, given: Given | None = None) -> Times:
    """The times of a forward of `fa2` or `fa3`, of decoding, or of `fa2`'s backward if no row has a large L; `given` as for
    `l2.run`.

    ValueError for a schedule that this model or the L2's does not cover.
    """
    require_schedule(schedule, Schedule, "plan")
    if not isinstance(schedule, Fa2Schedule | Fa2BackwardSchedule | DecodeSchedule):
        raise ValueError(
            "times are modelled for the forward of 'fa2' and 'fa3', fa2's backward and decoding, got "
            f"{schedule.algorithm!r}{', backward' * isinstance(schedule, BackwardSchedule)}"
        )
    behind, p, device = l2.run(schedule, given=given), schedule.problem, schedule.device
    works = list(works_of(schedule, given))
    clock, sms = clock_rate(device), device.sm_count
    busy: dict[str, float] = {}
    for work in works:
        for part, clocks in work.parts.items():
            busy[part] = busy.get(part, 0.0) + work.turns * clocks / (sms * clock)
    l2_bandwidth = sms * L2_BYTES * clock
    busy["L2"] = behind.asked.total_bytes / l2_bandwidth
    if device.hbm_bandwidth:
        busy[DRAM] = behind.dram.total_bytes / device.hbm_bandwidth
    most = max(works, key=lambda work: work.seconds)
    longest = most.launch
    return Times(
        busy,
        sum(work.seconds for work in works) + (len(works) - 1) * LAUNCH,
        waves=most.pieces / longest.slots,
        balance=longest.balance,
        flops=sum(work.turns * work.flops for work in works),
        behind=behind,
        peak=device.tensor_peak.get(p.dtype),
        bandwidth=device.hbm_bandwidth,
        l2_bandwidth=l2_bandwidth,
    )


def balance(schedule: TileSchedule, given: Given | None = None) -> float:
    """Turns of the busiest place for a thread block over the mean of all, for the launch with the most turns.

    ValueError for a schedule that the L2's model does not cover.
    """
    l2.require_followed(schedule, "rows")
    launches = l2.launches_of(schedule, "rows", DeviceMemory(), given)
    return max(launches, key=lambda launch: int(launch.turns.sum())).balance


def works_of(schedule: TileSchedule, given: Given | None = None) -> Iterator[Work]:
    """Its launches, in order."""
    gradients = iter(main_launches(schedule.problem))
    for launch in l2.launches_of(schedule, "rows", DeviceMemory(), given):
        kernel = launch.walk.kernel if isinstance(launch, PlayedWalk) else ""
        if isinstance(launch, PlayedWalk) and kernel == "fa2_backward":
            yield columns(launch, next(gradients))
        elif isinstance(launch, PlayedWalk) and kernel in WORKS:
            yield WORKS[kernel](launch)
        elif not isinstance(schedule, DecodeSchedule):  # the seconds of its merge are in those of its splits
            yield Work(launch, launch.grid, 0, {}, 0, passed(launch, schedule.device))


def forward(launch: PlayedWalk) -> Work:
    """A forward of fa2 or fa3: the planner's clocks; of packed sequences, key lengths and known masks by the tiles that are
    visited, of which it knows less."""
    schedule = launch.schedule
    assert isinstance(schedule, Fa2Schedule)
    p, device = schedule.problem, schedule.device
    counted = p.options.packed or p.options.padded or any(part.kept is not None for part in launch.walk.parts)
    if isinstance(schedule, Fa3Schedule):
        best = fa3_tiles.choose(p, device, (schedule.tiling.used.block_rows, schedule.block_cols))
        parts = dict(best.parts)
        clocks = fa3_tiles.spread(best, device, Pieces.listed(launch.visits[: schedule.blocks_there]))
    else:
        found = schedule.candidate
        parts = dict(found.parts)
        clocks = fa2_tiles.spread(found, device, Pieces.listed(launch.visits)) if counted else found.clocks
    tiles, used = int(launch.visits.sum()), schedule.tiling.used
    flops = 2 * used.block_rows * used.block_cols * (p.head_dim + p.head_dim_v)
    return Work(launch, schedule.works, tiles, parts, flops, clocks / clock_rate(device))


def splits(launch: PlayedWalk) -> Work:
    """Decoding, merge included: the model by which the number of splits is chosen, of the keys that there are."""
    schedule = launch.schedule
    p, best = schedule.problem, schedule.candidate
    keys = [each + schedule.cache.appended for each in schedule.cached]
    full = replace(p.asking(key_lengths=None), seqlen_k=max(keys))
    seconds = decode_tiles.times(full, schedule.device, best.config, best.resident, np.array([schedule.splits]))
    seconds["memory"] *= sum(keys) / max(1, len(keys) * max(keys))
    parts = decode_tiles.part_clocks(p, schedule.device, best.config)
    flops = 2 * schedule.block_rows * schedule.block_cols * (p.head_dim + p.head_dim_v)
    return Work(launch, launch.grid, int(launch.visits.sum()), parts, flops, float(decode_tiles.overall(seconds)[0]))


def columns(launch: PlayedWalk, made: Gradients) -> Work:
    """A launch of the main kernel of the backward, which makes these gradients."""
    schedule = launch.schedule
    p, device, blocks = schedule.problem, schedule.device, (schedule.block_rows, schedule.block_cols)
    d, dv, dq = p.head_dim, p.head_dim_v, made.dk and not schedule.deterministic
    parts = backward_clocks.column_parts(p, device, blocks, schedule.warps, made, dq)
    flops = 2 * blocks[0] * blocks[1] * backward_clocks.main_fmas(d, dv, made, dq)
    seconds = in_turns(launch, device, parts, schedule.warps.count(blocks[1]))
    return Work(launch, launch.grid, int(launch.visits.sum()), parts, flops, seconds)


def queries(launch: PlayedWalk) -> Work:
    """The kernel of dQ by itself."""
    schedule = launch.schedule
    assert isinstance(schedule, QueriesSchedule)
    p, device, blocks = schedule.problem, schedule.device, (schedule.block_rows, schedule.block_cols)
    parts = backward_clocks.query_parts(p, device, blocks, schedule.warps)
    flops = 2 * blocks[0] * blocks[1] * backward_clocks.query_fmas(p.head_dim, p.head_dim_v)
    seconds = in_turns(launch, device, parts, schedule.warps.count(blocks[0]))
    return Work(launch, launch.grid, int(launch.visits.sum()), parts, flops, seconds)


WORKS: Mapping[str, Callable[[PlayedWalk], Work]] = {
    "fa2_forward": forward,
    "fa3_forward": forward,
    "decode": splits,
    "fa2_backward_queries": queries,
}


def in_turns(launch: PlayedLaunch, device: Device, parts: Mapping[str, float], warps: int) -> float:
    """Seconds of a launch of the backward, whose thread blocks have so many warps: its turns one after another in lockstep."""
    resident = min(launch.slots // device.sm_count, -(-launch.grid // device.sm_count))
    last = int((launch.starts() + launch.turns).max(initial=0))
    rounds = -(-launch.grid // launch.slots)
    return (last * backward_clocks.turn(parts, warps, resident) + rounds * backward_clocks.BLOCK) / clock_rate(device)


def passed(launch: PlayedLaunch, device: Device) -> float:
    """Seconds of a kernel that only passes over rows: its bytes by DRAM's bandwidth, or the L2's where that is not known."""
    nbytes = sum(int(asked.nbytes @ asked.times) for _, asked in launch.played())
    return nbytes / (device.hbm_bandwidth or device.sm_count * L2_BYTES * clock_rate(device))
