"""How long a forward pass takes, by a model: what each part of the device is busy for, launch order, and DRAM behind the L2.

The clocks of a tile are those by which the planner chooses tiles (`fa2_tiles`, `fa3_tiles`); nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cupyflash.multiprocessor import L2_BYTES, clock_rate
from cupyflash.schedules import Schedule, TileSchedule, fa2_tiles, fa3_tiles, require_schedule
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa3 import Fa3Schedule
from cupyflash.sim import l2
from cupyflash.sim.l2.launch import Memory
from cupyflash.sim.l2.reads import Given
from cupyflash.sim.l2.rows import RowBlocks

DRAM = "DRAM"


@dataclass(frozen=True)
class Times:
    """Seconds by a model.

    busy: of each part of the device, were it alone: all its work at its peak, on all multiprocessors; DRAM's of the bytes behind
    the L2, absent where its bandwidth is not known. kernel: the thread blocks by the planner's model, with what they wait for,
    waves and the tail. waves: how often they fill the device; idle: the share of their places that is empty meanwhile, in turns.
    flops: of the tiles that are computed. peak, bandwidth and l2_bandwidth in FLOP/s and bytes/s, None where not known.
    """

    busy: Mapping[str, float]
    kernel: float
    waves: float
    idle: float
    flops: int
    behind: l2.Behind
    peak: float | None
    bandwidth: float | None
    l2_bandwidth: float

    @property
    def seconds(self) -> float:
        """Of the pass: the kernel, or DRAM where that takes longer."""
        return max(self.kernel, self.busy.get(DRAM, 0.0))

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
        """FLOP a byte of what each memory gives and takes."""
        moved = {"L2": self.behind.asked.total_bytes, DRAM: self.behind.dram.total_bytes}
        return {name: self.flops / nbytes for name, nbytes in moved.items() if nbytes}

    @property
    def ridge(self) -> float | None:
        """FLOP a byte of DRAM from which on the tensor cores bind."""
        return self.peak / self.bandwidth if self.peak and self.bandwidth else None


def times(schedule: TileSchedule, given: Given | None = None) -> Times:
    """Of a forward pass of `fa2` or `fa3`, `given` as `l2.run` takes it. What finds the states of a mask's tiles is in DRAM's time
    only. ValueError for what the model has not, or what the L2's does not follow."""
    require_schedule(schedule, Schedule, "plan")
    if not isinstance(schedule, Fa2Schedule):
        raise ValueError(
            f"times are modelled of the forward of 'fa2' and 'fa3', got {schedule.algorithm!r} ({type(schedule).__name__})"
        )
    behind, p, device = l2.run(schedule, given=given), schedule.problem, schedule.device
    launch = l2.launches_of(schedule, "rows", Memory(), given)[-1]
    assert isinstance(launch, RowBlocks)
    clock, sms = clock_rate(device), device.sm_count
    counted = p.options.packed or any(part.kept is not None for part in launch.parts)  # visits, of which the planner knows less
    if isinstance(schedule, Fa3Schedule):
        best = fa3_tiles.choose(p, device, (schedule.tiling.used.block_rows, schedule.block_cols))
        parts = dict(best.parts)
        clocks = fa3_tiles.spread(best, device, schedule.works, launch.visits) if counted else fa3_tiles.clocks(p, device, best)
    else:
        found = schedule.candidate
        parts = dict(found.parts)
        clocks = fa2_tiles.spread(found, device, schedule.works, float(launch.visits.mean())) if counted else found.clocks
    tiles = int(launch.visits.sum())
    busy = {part: tiles * of_tile / (sms * clock) for part, of_tile in parts.items() if part != "L2"}
    l2_bandwidth = sms * L2_BYTES * clock
    busy["L2"] = behind.asked.total_bytes / l2_bandwidth
    if device.hbm_bandwidth:
        busy[DRAM] = behind.dram.total_bytes / device.hbm_bandwidth
    end = int((launch.starts() + launch.turns).max())
    used = schedule.tiling.used
    return Times(
        busy,
        clocks / clock,
        waves=schedule.works / launch.slots,
        idle=1 - int(launch.turns.sum()) / (launch.slots * end),
        flops=2 * tiles * used.block_rows * used.block_cols * (p.head_dim + p.head_dim_v),
        behind=behind,
        peak=device.tensor_peak.get(p.dtype),
        bandwidth=device.hbm_bandwidth,
        l2_bandwidth=l2_bandwidth,
    )
