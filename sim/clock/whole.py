"""The whole launch: blocks on multiprocessors in launch order, waves and tails, the L2 and DRAM behind them, and the clock rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod

from cupyflash.device import Device
from cupyflash.multiprocessor import occupancy

from .engines import GROUP_WARPS
from .execution import CodeLaunch
from .memory import STORES
from .multiprocessor import ClockedMultiprocessor, Issue, Outside, Run
from .power import Power
from .rates import ChipRates
from .recorded import Cut, RevolutionRecorder, Shortened
from .steps import TraceStep, Unit, flops_of, of_halves, step_of
from .traces import TURNS_BEFORE, WARM, Loop, Tracer, longest_loop, wave
from .unequal import ALIKE, Work, counted, exchanges, longer

LIMITS: Mapping[int, str] = {
    Unit.FMA: "FMA",
    Unit.HEAVY: "FMA",
    Unit.ALU: "ALU",
    Unit.HALF: "half",
    Unit.DOUBLE: "double",
    Unit.SPECIAL: "MUFU",
    Unit.TENSOR: "tensor",
    Unit.PRODUCT: "tensor",
}
"""The names of a sub-core's units in a result."""

RULES = 1
"""The number of the rules and constants by which times are made: raised by each change of either that changes times, so that
predictions on file say whether they are stale (benchmarks/published)."""
VARIED = (0.7, 1.4)
"""Factors of assumed latencies for a spread, and of the clocks between the launches of two blocks."""
PHASES = (0, 3)
ENOUGH, MOST_ROUNDS, MANY = 60_000, 8, 16
"""Instructions of warps behind which no round of blocks is run, the most rounds, and rounds of which the last is only a share."""


@dataclass(frozen=True)
class Time:
    """The time of a launch, in seconds, and each limit's share of it: 1 is a limit that is reached all the time.

    `rounds`: blocks of the busiest multiprocessor over those that it holds at once. `watts`: what the device takes while all of it
    works, where the model knows; the rate is then one at which that is no more than its limit.
    """

    seconds: float
    mhz: float
    residents: int
    rounds: float
    flops: float
    busy: Mapping[str, float]
    sampled: str
    watts: float | None = None

    @property
    def tflops(self) -> float:
        return self.flops / self.seconds / 1e12

    @property
    def binds(self) -> str:
        """The limit that is nearest, or "latency" if none is reached for half of the time."""
        name = max(self.busy, key=lambda each: self.busy[each])
        return name if self.busy[name] >= 0.5 else "latency"


@dataclass(frozen=True)
class Sample:
    """A run of some resident blocks with a shortened loop: its clocks, and those of the turns that were left out."""

    run: Run
    left: float

    @property
    def clocks(self) -> float:
        return self.run.clocks + self.left


class Clock:
    """A launch on a device, of which one multiprocessor is run clock by clock.

    `cold`: the L2 was emptied before; else arrays that fit into it are there, from a launch before this one. `period`: the number
    of blocks after which their work repeats itself, by default the grid's x if it has y or z. `dram`: by tensor the share of the
    launch's bytes that come from DRAM, where it is known; else it is that of the blocks that the chip has first.

    Attributes to set: `series`, the seconds for which such launches follow each other without a pause (in the first milliseconds
    power lowers the rate less), `locked`, True if the rate is held at `mhz`, whatever the power, `warm`, the bytes of its
    arrays that a cold launch finds in the L2 nevertheless, and `queued`, whether blocks take their work from a queue, by default if
    the code has atomics that return something.
    """

    series: float = inf
    locked: bool = False
    warm: float = 0.0
    queued: bool | None = None

    def __init__(
        self,
        launch: CodeLaunch,
        device: Device,
        mhz: float | None = None,
        *,
        cold: bool = False,
        rates: ChipRates | None = None,
        period: int | None = None,
        dram: Mapping[str, float] | None = None,
    ) -> None:
        self.launch, self.device, self.cold, self.dram = launch, device, cold, dram or {}
        self.rates = rates or ChipRates.of(device)
        self.mhz = mhz or self.rates["clock.boost"]
        if "clock.tensor" in self.rates.constants and any(of_halves(each) for each in launch.kernel.instructions):
            self.mhz = min(self.mhz, self.rates["clock.tensor"])
        (made_for, least), (major, minor) = launch.kernel.capability, device.compute_capability
        if made_for != major or least > minor:
            raise ValueError("device = {}: its compute capability is {}.{}, the machine code is for {}.{}".format(
                device.name, *device.compute_capability, *launch.kernel.capability))  # fmt: skip
        if device.hbm_bandwidth is None:
            raise ValueError(f"device = {device.name}: its hbm_bandwidth is not known")
        threads = launch.warps * 32
        self.blocks = prod(launch.grid)
        self.period = period or (launch.grid[0] if launch.grid[0] < self.blocks else self.blocks)
        self.begin, self.step = 0, device.sm_count  # of the blocks that one multiprocessor has
        self.residents = occupancy(device, threads, launch.kernel.registers, launch.shared_bytes).blocks
        if not self.residents:
            raise ValueError(f"block = {launch.block}: no multiprocessor of {device.name} holds one")
        launch.together = self.blocks <= device.sm_count * self.residents
        self.footprint = sum(space.size for space in launch.tensors)
        self.fits = self.footprint <= device.l2_bytes
        self.runs: dict[tuple[int, int], Run] = {}

    @cached_property
    def steps(self) -> list[TraceStep]:
        return [step_of(each, self.rates) for each in self.launch.kernel.instructions]

    @cached_property
    def outside(self) -> Outside:
        """The L2 and DRAM for one of the multiprocessors that have blocks."""
        rates, active = self.rates, min(self.device.sm_count, self.blocks)
        # Lines of the other half are kept in both: only what fits the whole L2, but no half, comes from far again and again; and
        # that once for all blocks that ask for it at a time.
        far = self.first if self.fits and self.footprint > self.device.l2_bytes / rates["l2.halves"] else 0.0
        l2_rate = 1 / (far / rates["l2.far_rate"] + (1 - far) / rates["l2.rate"])
        assert self.device.hbm_bandwidth is not None
        dram_rate = self.device.hbm_bandwidth * rates["dram.read"] / (self.mhz * 1e6)
        halves = rates["l2.halves"] > 1
        return Outside(
            rates["l1.sm_port"],
            min(rates["l1.sm_port"], l2_rate / active),
            min(rates["l1.sm_port"], rates["l2.atomic"] / active),
            min(rates["copies.reduce_rate"], rates["l2.bulk_atomic"] / active) if "l2.bulk_atomic" in rates.constants else 0.0,
            dram_rate / active,
            (rates["l2.latency"] + rates["l2.far_latency"]) / 2 if halves else rates["l2.latency"],
            (rates["dram.latency"] + rates["dram.far_latency"]) / 2 if halves else rates["dram.latency"],
        )

    @cached_property
    def roles(self) -> bool:
        """True if warps wait for mbarriers: then they may have roles, and rings instead of a loop."""
        return any(each.opcode == "SYNCS" for each in self.launch.kernel.instructions)

    @cached_property
    def first(self) -> float:
        """The share of the L2's bytes that no other block of those that the chip has at once has asked for before."""
        costs = [issue for block in self.traces for trace in block for issue in trace if issue.cost is not None]
        asked = sum(each.cost.l2_bytes for each in costs if each.cost)
        return sum(each.cost.l2_bytes * self.tracer.news.get(each.at, 1.0) for each in costs if each.cost) / max(asked, 1.0)

    @cached_property
    def ways(self) -> tuple[Loop | None, bool]:
        """The loop of the first block, and whether others have other work; with roles no loop, and blocks that run all at once are
        taken to be alike."""
        if self.roles and self.launch.together:
            return None, False
        some = sorted({self.begin, self.period // 2, self.period - 1} if self.begin == 0 else {self.begin})
        issued, _, path = counted(self.launch, some)
        return None if self.roles else longest_loop(path), bool(issued.max() > ALIKE * issued.min())

    @cached_property
    def work(self) -> Work | None:
        """The blocks' work, if they differ in it."""
        return Work.of(self.launch, self.period) if self.ways[1] else None

    @cached_property
    def shares(self) -> tuple[Mapping[int, float], Mapping[int, float]]:
        return self.reach(self.ways[0])

    @cached_property
    def tracer(self) -> Tracer:
        """Traces of blocks, after some blocks' ways through the code and a wave's first turns were run."""
        return Tracer(self.launch, self.rates, self.ways[0], *self.shares, self.residents)

    @cached_property
    def alike(self) -> tuple[Clock, Clock]:
        """Clocks of multiprocessors that have only longest blocks, and only short ones."""
        assert self.work is not None
        found = []
        for first in (self.work.longest, self.work.short):
            other = Clock(self.launch, self.device, self.mhz, cold=self.cold, rates=self.rates, period=self.period)
            other.begin, other.step, other.shares, other.work = first, self.period, self.shares, None
            found.append(other)
        return found[0], found[1]

    def reach(self, loop: Loop | None) -> tuple[Mapping[int, float], Mapping[int, float]]:
        """Returns the share of each instruction's bytes that come from DRAM, and of those that no block has asked for before."""
        code = self.launch.kernel.instructions
        stays = self.fits and not self.cold and self.footprint <= self.device.l2_bytes / self.rates["l2.halves"]
        if stays and "l2.merged" not in self.rates.constants:
            return dict.fromkeys(range(len(code)), 0.0), {}  # nothing has to leave the L2, and it has all of it before
        size = prod(self.launch.cluster)
        count = min(self.blocks, self.device.sm_count * self.residents) // size * size
        blocks = [self.launch.index(number) for number in range(count)]
        news, tensors = wave(self.launch, blocks, loop, int(self.rates["l1.sector"]))
        if not self.fits:
            names = {at: self.launch.tensors[number].name for at, number in tensors.items()}
            return {at: self.dram.get(names.get(at, ""), share) for at, share in news.items()}, news
        # It has all of it before, unless it was emptied, or has a part only.
        lost = max(1 - self.warm / self.footprint, 0.0) if self.cold else 0.0
        missing = {at: share * lost for at, share in news.items() if lost and code[at].opcode not in STORES}
        return dict.fromkeys(range(len(code)), 0.0) | missing, news

    @cached_property
    def stands(self) -> int:
        """The block that stands for all where all run at once: the longer of the first and the last, or one in the middle where
        they take work from a queue, longest first: it has a mean block's."""
        if not self.launch.together or self.blocks < 2:
            return 0
        if any(each.opcode == "ATOMG" for each in self.launch.kernel.instructions) if self.queued is None else self.queued:
            return min(self.blocks, self.device.sm_count) // 2
        return longer(self.launch, (0, self.blocks - 1)) if prod(self.launch.cluster) == 1 else 0

    @cached_property
    def shortened(self) -> list[Shortened]:
        """The recordings of the blocks that the first multiprocessor has at once, without their rings' middle."""
        size = prod(self.launch.cluster)
        count, apart = min(self.blocks, self.device.sm_count * self.residents), self.device.sm_count // size * size
        begin = (self.begin or self.stands) // size * size
        firsts = (begin + k * (self.step // size * size) for k in range(-(-count // apart)))
        blocks = [self.launch.index((first + rank) % self.blocks) for first in firsts for rank in range(size)]
        return RevolutionRecorder(self.tracer, size).shortened(blocks)

    @cached_property
    def traces(self) -> list[list[list[Issue]]]:
        """Traces of the blocks that the first multiprocessor has at once."""
        if self.roles:
            return [each.traces for each in self.shortened]
        count = min(self.residents, -(-self.blocks // self.device.sm_count))
        blocks = [self.launch.index((self.begin + k * self.step) % self.blocks) for k in range(count)]
        found = self.tracer.traces(blocks)
        if self.tracer.loop is not None and any(_turns(trace) < TURNS_BEFORE for block in found for trace in block):
            # It is a loop of some warps alone: nothing is left out.
            self.tracer = Tracer(self.launch, self.rates, None, *self.shares, self.residents)
            found = self.tracer.traces(blocks)
        return found

    @property
    def apart(self) -> float:
        """Clocks from the launch of one block to that of the next one on the same multiprocessor, while all are empty."""
        return self.rates["launch.block"] * min(self.blocks, self.device.sm_count)

    @cached_property
    def followed(self) -> int:
        """Rounds of blocks that are run to see how fast they follow each other, once they are in step no more."""
        return max(2, min(MOST_ROUNDS, ENOUGH // sum(len(trace) for block in self.traces for trace in block)))

    def run(self, blocks: int, residents: int) -> Run:
        """Runs so many blocks, of which some are resident at once."""
        found = self.runs.get((blocks, residents))
        if found is None:
            traces = [self.traces[k % residents] for k in range(blocks)]
            found = ClockedMultiprocessor(self.steps, self.rates, self.outside, residents).run(traces, self.apart)
            self.runs[blocks, residents] = found
        return found

    def sample(self, count: int, rounds: int = 1) -> Sample:
        """Runs so many resident blocks, several times one after another."""
        made = self.run(count * rounds, count)
        loop = self.tracer.loop
        if self.roles:
            return Sample(made, rounds * left_clocks(made, self.shortened[0].cuts))
        if loop is None:
            return Sample(made, 0.0)
        (begin, before), (end, behind) = made.turns[WARM], made.turns[loop.left_out.start - 1]
        turn = sum(len(_turn(trace)) for block in self.traces[:count] for trace in block)
        return Sample(made, (end - begin) * turn / (behind - before) * len(loop.left_out) * rounds)

    def time(self) -> Time:
        """Times the launch at the clock's rate, or at the lower one that the device's power limit leaves."""
        return self.limited

    @cached_property
    def limited(self) -> Time:
        found, power = self.unlimited(), Power(self.device, self.rates)
        if not power.known or self.locked:
            return found
        active = min(self.blocks, self.device.sm_count)  # some multiprocessors alone do not reach the L2's rate
        shares = {"L2": active * self.outside.l2_bytes / self.rates["l2.rate"], "DRAM": 1.0}
        busy = {name: each * shares.get(name, active / self.device.sm_count) for name, each in found.busy.items()}
        kept = power.kept(busy, self.mhz)
        if self.brief:
            kept = max(kept, min(self.mhz, self.rates["clock.burst"]))
        if kept < self.mhz:
            found = self.again(mhz=kept).unlimited()
        return replace(found, watts=power.watts(busy, self.mhz, kept))

    @property
    def brief(self) -> bool:
        """True if the launches are over before power has lowered the rate of wgmma's products as far as it will."""
        known = "clock.burst" in self.rates.constants and self.series * 1e3 <= self.rates["clock.burst_ms"]
        return known and any(step.unit == Unit.PRODUCT for step in self.steps)

    def unlimited(self) -> Time:
        """Times the busiest multiprocessor: full rounds of blocks that follow each other, and a last one of what is left."""
        if self.work is not None:
            return self.unequal(self.work)
        sms, residents = self.device.sm_count, self.residents
        own = -(-self.blocks // sms)
        rounds, rest = divmod(own, residents)
        full = self.sample(min(own, residents))
        clocks = full.clocks
        if rounds > 1:
            run = min(rounds, self.followed)
            clocks += (rounds - 1) * (self.sample(residents, run).clocks - full.clocks) / (run - 1)
        if rest and rounds:
            clocks += self.exposed(rest, rounds) * self.sample(rest).clocks
        busy = self.busy(full)
        # The window in which a multiprocessor may get more than its share is for once, not for each round.
        clocks = max(clocks, max(busy["L2"], busy["DRAM"]) * full.clocks * own / len(self.traces))
        clocks = self.behind_swaps(clocks)
        return Time(self.seconds(clocks), self.mhz, residents, own / residents, self.flops(), busy, self.sampled)

    def behind_swaps(self, clocks: float) -> float:
        """Returns a launch's clocks with the swaps of a number that its blocks share: one at a time succeeds, a way to the L2 and
        back behind the one before; the first one's way is in its block's own time."""
        together, every = (
            max(count * self.swaps - 1, 0) for count in (min(self.period, self.device.sm_count * self.residents), self.period)
        )
        return max(clocks + together * self.outside.l2_latency, every * self.outside.l2_latency)

    @cached_property
    def swaps(self) -> int:
        """The threads of a block that swap a number which all blocks of a period swap."""
        return exchanges(self.launch, sorted({0, self.period // 2, self.period - 1})) if self.period > 1 else 0

    def seconds(self, clocks: float) -> float:
        return (clocks + self.rates["launch.start"]) / (self.mhz * 1e6) + self.rates["launch.between"] * 1e-6

    def unequal(self, work: Work) -> Time:
        """Times a launch whose blocks differ: who is free takes the next one."""
        longest, short = self.alike
        count = len(longest.traces)
        places = self.device.sm_count * count
        full, each = longest.sample(count), (longest.following, short.following)
        clocks, mean = work.busiest(each, self.blocks, places)
        busy = {name: share * full.clocks / each[0] * mean / clocks for name, share in longest.busy(full).items()}
        clocks = self.behind_swaps(clocks + max(full.clocks - each[0], 0.0))
        rounds = self.blocks / places
        return Time(self.seconds(clocks), self.mhz, count, rounds, work.flops * self.blocks, busy, longest.sampled)

    @property
    def following(self) -> float:
        """Clocks that a round of blocks takes behind others."""
        count, run = len(self.traces), self.followed
        return (self.sample(count, run).clocks - self.sample(count).clocks) / (run - 1)

    def exposed(self, rest: int, rounds: int) -> float:
        """Returns the share of the last blocks' own time that a launch takes longer for them, since they begin one by one as
        others end: as behind two rounds, or one, of shortened blocks."""
        if rounds >= MANY:
            return rest / self.residents
        before = min(rounds, 2) * self.residents
        alone, added = self.run(rest, rest).clocks, self.run(before + rest, self.residents).clocks
        return min(max(added - self.run(before, self.residents).clocks, 0.0) / alone, 1.0)

    def spread(self) -> tuple[float, float]:
        """Returns the least and the most seconds where all assumed latencies are 0.7, 1 and 1.4 times as long, and blocks begin all
        at once or further apart; at the rate that power leaves."""
        found = self.time()
        varied = [self.rates.slower(factor).apart(phase) for factor, phase in zip(VARIED, PHASES, strict=True)]
        times = [found.seconds] + [self.again(found.mhz, rates).unlimited().seconds for rates in varied]
        return min(times), max(times)

    def again(self, mhz: float | None = None, rates: ChipRates | None = None) -> Clock:
        """Returns a clock of the same traces at another rate or with other constants."""
        other = Clock(self.launch, self.device, mhz or self.mhz, cold=self.cold, rates=rates or self.rates, period=self.period)
        other.series, other.locked = self.series, self.locked
        other.tracer, other.traces, other.work = self.tracer, self.traces, self.work
        if self.work is not None:
            longest, short = (each.again(mhz, rates) for each in self.alike)
            other.alike = longest, short
        if self.roles:
            other.shortened = self.shortened
        return other

    @property
    def sampled(self) -> str:
        loop, text = self.tracer.loop, f"{len(self.traces)} of {self.blocks} blocks"
        if self.roles:
            left = sum(cut.revolutions for cut in self.shortened[0].cuts)
            return f"{text}, without {left} turns of their rings" if left else text
        return f"{text}, {loop.turns - len(loop.left_out)} of {loop.turns} turns of their loop" if loop else text

    def busy(self, sample: Sample) -> dict[str, float]:
        """Returns each limit's share of a sample's clocks."""
        return {name: clocks / sample.clocks for name, clocks in self.taken(self.issues()).items()}

    def taken(self, issues: Iterable[tuple[Issue, int]]) -> dict[str, float]:
        """Returns the clocks that some issues, each so often, take of each limit; of a sub-core's the mean."""
        rates, cores = self.rates, self.rates["issue.sub_cores"]
        found = dict.fromkeys(("issue", *LIMITS.values(), "shared memory and L1", "L2", "DRAM"), 0.0)
        halves = 2 if rates["lanes.fp32"] > 16 else 1
        for issue, times in issues:
            step = self.steps[issue.at]
            found["issue"] += times / cores
            if name := LIMITS.get(step.unit):
                found[name] += step.clocks * times / cores / (halves if name == "FMA" else 1)
            found["shared memory and L1"] += step.fetched * times / GROUP_WARPS
            if issue.cost is not None:
                found["shared memory and L1"] += issue.cost.pipe * times
                found["L2"] += issue.cost.given / self.outside.rate(step) * times
                found["DRAM"] += issue.cost.dram_bytes / self.outside.dram_bytes * times
        return found

    def flops(self) -> float:
        """Returns the floating-point operations of the launch, as those of the sampled blocks."""
        code = self.launch.kernel.instructions
        found = sum(times * flops_of(code[issue.at]) for issue, times in self.issues())
        return found / len(self.traces) * self.blocks

    def issues(self) -> Iterator[tuple[Issue, int]]:
        """Yields what the sampled blocks issue, and how often: those of a turn as often as turns are left out too."""
        loop = self.tracer.loop
        for trace in (trace for block in self.traces for trace in block):
            yield from ((issue, 1) for issue in trace)
            if loop is not None:
                yield from ((issue, len(loop.left_out)) for issue in _turn(trace))
        for each in self.shortened if self.roles else ():
            yield from each.left


def left_clocks(run: Run, cuts: Sequence[Cut]) -> float:
    """Returns the clocks of the revolutions that were left out: each as long as the last ones before them."""
    turns = [at for at, _ in run.turns]
    return sum(cut.revolutions * (turns[cut.mark] - turns[cut.mark - cut.measured]) / cut.measured for cut in cuts)


def _turns(trace: Sequence[Issue]) -> int:
    return sum(issue.mark for issue in trace)


def _turn(trace: Sequence[Issue]) -> Sequence[Issue]:
    """Returns the last turn of the loop before those that are left out."""
    begins = [k for k, issue in enumerate(trace) if issue.mark]
    return trace[begins[TURNS_BEFORE - 2] : begins[TURNS_BEFORE - 1]]
