"""The time of a call: its launches by the clock, or all of it by the planner's formulas where the clock cannot run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cupyflash.multiprocessor import clock_rate
from cupyflash.schedules import BackwardSchedule, DecodeSchedule, TileSchedule
from cupyflash.schedules.formulas import FORMULAS, backward_seconds
from cupyflash.schedules.formulas import clocks as forward_clocks
from cupyflash.sim.numbers.yardstick import NOTHING_GIVEN
from cupyflash.sim.theory.visits import scores_of

from .known import CLOCK, PLANNER, KnownError, known_error, own_error
from .lines import TimedLine
from .loaded import LoadedLaunch
from .planned import loaded_clocks
from .timed import lines_at
from .whole import Clock, Time

MOST_RUN = 3_000_000
"""The most instructions of machine code that a run of some blocks takes, of all warps that go together: one to two minutes."""


@dataclass(frozen=True)
class LaunchTime:
    """A launch of a call. `known`: the error of predictions of such kernels."""

    kernel: str
    time: Time
    known: KnownError


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a call, with its `known` errors: on our calls that were measured; by the clock, first that of its
    longest launch's class.

    `launches`: none by the planner; then `why` says why not by the clock. `flops`: of the products of all scores that position
    leaves. `lines`: those at which warps of the longest launch spend its time, the longest first.
    """

    seconds: float
    flops: int
    known: Sequence[KnownError]
    launches: Sequence[LaunchTime] = ()
    why: str = ""
    lines: Sequence[TimedLine] = ()

    @property
    def source(self) -> str:
        return CLOCK if self.launches else PLANNER

    @property
    def longest(self) -> LaunchTime | None:
        """The launch that takes longest."""
        return max(self.launches, key=lambda each: each.time.seconds, default=None)

    @property
    def binds(self) -> str | None:
        """The limit that is nearest in the longest launch; None by the planner."""
        return self.longest.time.binds if self.longest else None

    @property
    def busy(self) -> dict[str, float]:
        """Each limit's share of the call."""
        names = self.launches[0].time.busy if self.launches else ()
        return {name: sum(each.time.busy[name] * each.time.seconds for each in self.launches) / self.seconds for name in names}

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self.flops / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """The prediction for JSON."""
        launches = [
            {"kernel": each.kernel, **asdict(each.time), "binds": each.time.binds, "known_error": asdict(each.known)}
            for each in self.launches
        ]
        head = {"modelled": True, "source": self.source, "why": self.why, "seconds": self.seconds, "binds": self.binds}
        rates = {"busy": self.busy, "flops": self.flops, "flops_a_second": self.rate}
        known, lines = [asdict(each) for each in self.known], [line.to_dict() for line in self.lines]
        return {**head, **rates, "known_errors": known, "launches": launches, "lines": lines}


def predicted(schedule: TileSchedule, given: Mapping[str, Any] = NOTHING_GIVEN) -> Prediction:
    """Predicts a call; `given` as for `planned.clocks`.

    By the planner's formulas, which look at neither masks nor lengths, where NVRTC or a disassembler is missing, or machine code is
    not executed here, or for too long. ValueError, with the clock's reason, if the algorithm has none; and for a call that computes
    nothing.
    """
    flops = require_work(schedule)
    try:
        launches = []
        longest: tuple[Clock, LoadedLaunch] | None = None
        for clock, loaded in loaded_clocks(schedule, given=given):
            clock.launch.most = MOST_RUN
            time = clock.time()
            launches.append(LaunchTime(clock.launch.kernel.name, time, known_error(clock, time)))
            if longest is None or time.seconds > longest[0].time().seconds:
                longest = clock, loaded
        assert longest is not None
        lines = lines_at(*longest)
    except (ImportError, RuntimeError, ValueError) as error:
        return formula_of(schedule, flops, str(error))
    known = known_error(longest[0], longest[0].time()), own_error(CLOCK, direction_of(schedule))
    return Prediction(sum(each.time.seconds for each in launches), flops, known, launches, lines=lines)


def formula_of(schedule: TileSchedule, flops: int, why: str) -> Prediction:
    """Returns a prediction by the planner's formulas."""
    p, device, known = schedule.problem, schedule.device, (own_error(PLANNER, direction_of(schedule)),)
    if schedule.algorithm not in FORMULAS:
        raise ValueError(f"no time for {schedule.algorithm!r}: {why}")
    if isinstance(schedule, BackwardSchedule):
        return Prediction(backward_seconds(p, device), flops, known, why=why)
    blocks = None if isinstance(schedule, DecodeSchedule) else (schedule.tiling.used.block_rows, schedule.block_cols)
    seconds = forward_clocks(p, device, schedule.algorithm, blocks) / clock_rate(device)
    return Prediction(seconds, flops, known, why=why)


def direction_of(schedule: TileSchedule) -> str:
    """The direction by which errors on our calls are known."""
    if isinstance(schedule, DecodeSchedule):
        return "decoding"
    return "backward" if isinstance(schedule, BackwardSchedule) else "forward"


def require_work(schedule: TileSchedule) -> int:
    """Returns a call's FLOP; ValueError if it computes nothing, or no kernel runs it."""
    schedule.kernels()
    flops = flops_of(schedule)
    if not flops:
        raise ValueError("a time needs a problem in which rows see keys: this one computes nothing")
    return flops


def flops_of(schedule: TileSchedule) -> int:
    """FLOP of the products of all scores that position and lengths leave: two a score, five of gradients."""
    p = schedule.problem
    each = 3 * p.head_dim + 2 * p.head_dim_v if isinstance(schedule, BackwardSchedule) else p.head_dim + p.head_dim_v
    if isinstance(schedule, DecodeSchedule):
        plain, new = p.asking(padded=False, key_lengths=None), schedule.cache.appended
        scores = sum(scores_of(replace(plain, seqlen_k=keys + new), keys + new) for keys in schedule.cached)
    else:
        scores = sum(scores_of(p, keys) for keys in p.keys_of_each)
    return 2 * p.heads * scores * each
