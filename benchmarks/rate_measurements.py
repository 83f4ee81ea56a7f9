"""The measurements of rates.py: each a function that gives constants of rates.toml, and figures beside them, one after another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import rate_steps
from rate_chips import HOPPER, Chip, Launch, span
from rate_steps import Timed

from cupyflash import Device
from cupyflash.basics import Array
from cupyflash.sim.clock.rates import ChipRates, Constant

MB = 1 << 20
ALONE = 29.0  # clocks of a product alone beside its latency, in the clock's own run of that kernel


def a_clock(amount: float, clocks: Iterable[float]) -> list[float]:
    """An amount a clock, over repeats; not a number where the PTX machine's clock stands still."""
    return [amount / each if each else math.nan for each in clocks]


def line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The least-squares line through (x, y): its value at 0 and its slope."""
    slope, value = np.polyfit(*zip(*points, strict=True), 1)
    return float(value), float(slope)


def two_groups(values: Sequence[float] | Array) -> tuple[float, float, float]:
    """The medians of the lower and the upper group of values, and the lower one's share: two means, the highest 2 % left out."""
    kept = np.sort(np.asarray(values, float))[: max(2, int(0.98 * len(values)))]
    low, high = kept[0], kept[-1]
    for _ in range(50):
        lower = abs(kept - low) <= abs(kept - high)
        if lower.all():
            break
        low, high = kept[lower].mean(), kept[~lower].mean()
    upper = kept[~lower] if not lower.all() else kept
    return float(np.median(kept[lower])), float(np.median(upper)), float(lower.mean())


def gaps(blocks: Array) -> list[float]:
    """The clocks from a block's end to the begin of the next one on its multiprocessor; blocks: (multiprocessor, begin, end)."""
    found: list[float] = []
    for number in np.unique(blocks[:, 0]):
        here = blocks[blocks[:, 0] == number]
        here = here[np.argsort(here[:, 1])]
        found += (here[1:, 1] - here[:-1, 2]).tolist()
    return found


@dataclass(frozen=True)
class Found:
    """A constant of rates.toml, or another figure of its unit: values over repeats, and what must be known of them."""

    name: str
    values: Sequence[float]
    note: str = ""

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        return max(self.values) - min(self.values)


Measurement = Callable[[Chip], Iterator[Found]]


def known(device: Device) -> Mapping[str, Constant]:
    """The table's constants of a device; none of one that is not there."""
    try:
        return ChipRates.of(device).constants
    except ValueError:
        return {}


def launches(chip: Chip) -> Iterator[Found]:
    count, empty = chip.size(500, 2), chip.kernels("empty")

    def several() -> None:
        for _ in range(count):
            empty((1,), (32,), ())

    several()
    queued = chip.busy(20_000_000)
    note = f"{count} launches in the queue"
    yield Found("launch.between", [1e6 * chip.seconds(several, queued) / count for _ in range(chip.repeats)], note)
    graph = chip.graph(several)
    graph()
    yield Found(
        "launch.graph", [1e6 * chip.seconds(graph, queued) / count for _ in range(chip.repeats)], f"a graph of {count} kernels"
    )


def blocks(chip: Chip) -> Iterator[Found]:
    empty, mhz = chip.kernels("empty"), chip.mhz(2_000_000)
    few, many, queued = chip.size(1 << 18, 1), chip.size(1 << 20, 3), chip.busy(500_000)
    times = [[chip.seconds(partial(empty, (grid,), (32,), ()), queued) for grid in (few, many)] for _ in range(chip.repeats)]
    yield Found("launch.block", [(long - short) * 1e6 * mhz / (many - few) for short, long in times], f"at {mhz:.0f} MHz")
    rounds, multiprocessors = 6, chip.size(chip.device.sm_count, 2)
    out, shared = chip.out(3 * rounds * multiprocessors), chip.device.sram_per_block - 1024  # one block a multiprocessor
    values: list[float] = []
    for _ in range(chip.repeats):
        chip.kernels("blocks")((rounds * multiprocessors,), (128,), (out, np.int64(chip.size(3000, 1))), shared)
        values.append(statistics.median(gaps(chip.get(out).reshape(-1, 3)) or [math.nan]))
    yield Found(
        "launch.start", values, "from a block's last clock to the next one's first, one block of 128 threads a multiprocessor"
    )
    begins = chip.out(32)
    spreads = []
    for _ in range(chip.repeats):
        chip.kernels("warps")((1,), (1024,), (begins,))
        first = np.sort(chip.get(begins))
        spreads.append(float(first[-1] - first[0]) / 31)
    yield Found("launch.spread", spreads)


def dram(chip: Chip) -> Iterator[Found]:
    grid = chip.size(4 * chip.device.sm_count, 1)
    width = grid * 512
    count = chip.size(28, 1) * 8 * width
    data, copy, sink = chip.zeros(16 * count), chip.zeros(16 * count), chip.zeros(8)
    reads = partial(chip.kernels("read_once"), (grid,), (512,), (data, sink, np.int64(count)))
    copies = partial(chip.kernels("copy_once"), (grid,), (512,), (data, copy, np.int64(count)))
    peak = chip.device.hbm_bandwidth or math.nan
    for name, call, moved in (("dram.read", reads, 16 * count), ("dram.mixed", copies, 32 * count)):
        call()
        rates = [moved / chip.seconds(call, chip.busy(500_000)) for _ in range(2 * chip.repeats)]
        note = f"{statistics.median(rates) / 1e9:.0f} of {peak / 1e9:.0f} GB/s, {16 * count / 1e6:.0f} MB"
        yield Found(name, [rate / peak for rate in rates], note)


def l2_rates(chip: Chip) -> Iterator[Found]:
    grid, threads = chip.size(chip.device.sm_count, 2), chip.size(1024, 32)
    sink = chip.zeros(4 * grid * threads)

    def rate(kernel: str, blocks: int, size: int, turns: int) -> list[float]:
        """Bytes a clock of all blocks together, each by its own clock; size: a multiple of 128 KB."""
        data, clocks = chip.zeros(size), chip.out(blocks)
        args = (data, clocks, np.int32(size // 4)) if kernel == "add_all" else (data, clocks, sink, np.int32(size // 16))
        found = []
        for repeat in range(1 + chip.repeats):
            chip.kernels(kernel)((blocks,), (threads,), (*args, np.int32(turns)))
            if repeat:  # the first one brings the data
                found.append(sum(size * turns / max(1, took) for took in chip.get(clocks).tolist()))
        return found

    whole = partial(chip.size, least=8 * threads * 16)
    megabytes = 8, 12, 16, 24, 32, 40
    by_size = {each: rate("read_all", grid, whole(each * MB), chip.size(2, 1)) for each in megabytes[: chip.size(6, 2)]}
    yield Found("l2.rate", by_size[12], "12 MB")
    for each, values in by_size.items():
        yield Found("l2.far_rate" if each == 32 else f"l2.rate {each} MB", values, f"{each} MB read by all multiprocessors")
    yield Found(
        "l2.atomic", rate("add_all", grid, whole(8 * MB), 1), "red.add of 32 words a warp, 8 MB, each sector once a turn and block"
    )
    yield Found("l1.sm_port", rate("read_all", 1, whole(4 * MB), chip.size(4, 1)), "one multiprocessor alone, 4 MB")
    together = rate("read_l1", grid, whole(MB // 16), chip.size(200, 1))
    yield Found("l1.rate", [value / grid for value in together], "64 KB, all multiprocessors at once")


def latencies_behind_l1(chip: Chip) -> Iterator[Found]:
    count, step = chip.size(1000, 4), 1024 + 16  # cells of 8 bytes: lines 8 KB and a line apart, so that all slices are met
    cells, clocks = chip.zeros(8 * step * count), chip.out(count)
    order = chip.put(np.random.default_rng(0).permutation(count).astype(np.int32))
    chip.kernels("own_addresses")((-(-count // 128),), (128,), (cells, np.int64(step), np.int32(count)))
    emptied = chip.size(4 * chip.device.l2_bytes, 8)

    def each(repeats: int, kernel: str = "load_each") -> Array:
        chip.kernels(kernel)((1,), (1,), (cells, order, clocks, np.int64(step), np.int32(count), np.int32(repeats)))
        return chip.get(clocks).astype(float)

    each(1)  # addresses are translated
    near, far, near_dram, far_dram = ([], [], [], [])  # type: tuple[list[float], list[float], list[float], list[float]]
    for _ in range(chip.repeats):
        chip.zeros(emptied)
        cold, once, often = each(1), each(1), each(17)
        latency = (often - once) / 16
        fixed = float(np.median(once - latency))  # of the readings of the clock
        low, high, share = two_groups(latency)
        near.append(low), far.append(high)
        low, high, dram_share = two_groups(cold - fixed)
        near_dram.append(low), far_dram.append(high)
    yield Found("l2.latency", near, grouped(share, latency))
    yield Found("l2.far_latency", far, grouped(share, latency))
    yield Found("dram.latency", near_dram, grouped(dram_share, cold - fixed))
    yield Found("dram.far_latency", far_dram, grouped(dram_share, cold - fixed))
    strong = [(each(17, "load_each_strong") - each(1, "load_each_strong")) / 16 for _ in range(chip.repeats)]
    yield Found(
        "l2.latency, strong",
        [float(np.median(clocks)) for clocks in strong],
        f"ld.cg; {grouped(two_groups(strong[-1])[2], strong[-1])}",
    )


def grouped(share: float, clocks: Array) -> str:
    """A note on two groups of lines."""
    percentiles = ", ".join(f"{each:.0f}" for each in np.percentile(clocks, (1, 10, 50, 90, 99)))
    return f"the last repeat: {share:.0%} of {len(clocks)} lines in the lower group; 1, 10, 50, 90, 99 % of all: {percentiles}"


def chains(chip: Chip, steps: Iterable[rate_steps.Step], blocks: int = 1) -> dict[str, list[float]]:
    """Clocks of each step in a chain of one warp, by the step's name."""
    wanted = [Timed(step, 1, chip.steps) for step in steps]
    kernels, found = chip.load(rate_steps.source(wanted)), {}
    for timed in wanted:
        found[timed.step.name] = chip.per_step(kernels(timed.name), timed, blocks=blocks)
    return found


def less(values: Sequence[float], *others: Sequence[float]) -> list[float]:
    """Values less the medians of others."""
    return [value - sum(map(statistics.median, others)) for value in values]


def arithmetic(chip: Chip) -> Iterator[Found]:
    found = chains(chip, rate_steps.ARITHMETIC)
    across = [value / 2 for value in found["across"]]
    for name in ("fma", "alu", "double", "special", "shuffle"):
        yield Found(f"latency.{name}", found[name])
    yield Found("latency.across", across, "half of FFMA and LOP3 in turns")
    yield Found("latency.convert", found["convert"], "POPC")
    yield Found("latency.convert FRND", found["round"])
    yield Found("latency.imad", found["imad"])
    yield Found("latency.pack", found["pack"])
    yield Found(
        "latency.half step", found["half"], "ptxas takes HFMA2.MMA and HFMA2 in turns, with stalls of its own: a mean of both"
    )
    yield Found("latency.predicate", less(found["predicate"], found["alu"]), "ISETP and SEL, less alu")
    guard = less(found["guard"], across)
    yield Found("latency.guard", guard, "ISETP and a guarded IMAD, less across")
    yield Found("latency.vote", less(found["vote"], guard), "ISETP and VOTE, less guard")
    yield Found("latency.redux", less(found["redux"], across, found["alu"]), "REDUX, IMAD.U32 and LOP3, less across and alu")


def shared_latencies(chip: Chip) -> Iterator[Found]:
    steps = {step.name: step for step in rate_steps.SHARED}
    found = chains(chip, [step for name, step in steps.items() if name != "barrier"])
    yield Found("latency.lds_32", found["lds_32"])
    address = less(found["lds_32_used"], found["lds_32"])
    yield Found("latency.to_memory", address, "LDS and LOP3, less lds_32")
    yield Found("latency.lds_64", less(found["lds_64_used"], address), "LDS.64 and LOP3, less to_memory")
    yield Found("latency.lds_128", less(found["lds_128_used"], address), "LDS.128 and LOP3, less to_memory")
    yield Found("latency.ldsm_1", found["ldsm_1"])
    yield Found("latency.ldsm_more", [value / 3 for value in less(found["ldsm_4"], found["ldsm_1"])])
    yield Found("latency.atoms", found["atoms"])
    yield Found("latency.fence_block", found["fence_block"], "MEMBAR.ALL.CTA and what ptxas puts behind it")
    yield Found("latency.fence_gpu", found["fence_gpu"], "MEMBAR.ALL.GPU, ERRBAR, CCTL.IVALL")
    timed = Timed(steps["barrier"], 1, chip.steps)
    launch = chip.load(rate_steps.source([timed]))(timed.name)
    points = [(warps, chip.per_step(launch, timed, 32 * warps)) for warps in (1, 2, 4, 8, 16, 32)]
    told_points = ", ".join(f"{warps}: {statistics.median(values):.1f}" for warps, values in points)
    fits = [line([(warps, values[repeat]) for warps, values in points[1:]]) for repeat in range(chip.repeats)]
    yield Found("latency.barrier", [fit[0] for fit in fits], f"a line through 2 to 32 warps, {told_points}")
    yield Found("latency.barrier_warp", [fit[1] for fit in fits])
    out, given, sink = chip.out(2), chip.put(np.array([1, 1, 0], np.float32)), chip.zeros(4 * 32)

    def branches(turns: int) -> float:
        chip.kernels("branches")((1,), (32,), (out, given, sink, np.int32(turns)))
        return span(chip.get(out).reshape(1, 2))

    values = [clocks - (31 * 4 + 1 + 6) for clocks in chip.per_turn(branches, chip.turns)]
    yield Found(
        "latency.branch", values, "a loop of 32 FFMA, less 31 of 4 clocks and the stall counts 1 and 6 of the last one and of BRA"
    )


def l1_latencies(chip: Chip) -> Iterator[Found]:
    found = chains(chip, rate_steps.L1)
    yield Found("latency.ldg_32", found["ldg_32"])
    yield Found("latency.ldg_64", found["ldg_64"])
    yield Found(
        "latency.ldg_128",
        less(found["ldg_128_used"], less(found["ldg_64_used"], found["ldg_64"])),
        "its step less what LOP3 adds to that of 64 bits",
    )
    yield Found("latency.ldgsts", found["ldgsts"], "LDGSTS, LDGDEPBAR and DEPBAR.LE")


# By the names of lanes: the step, and how many of its instructions count.
LANES = {
    "fp32": ("fma", 1),
    "fp16": ("half", 1),
    "fp64": ("double", 1),
    "integer": ("alu", 1),
    "compare": ("compare", 2),
    "imad": ("imad", 1),
    "pack": ("pack", 1),
    "convert": ("convert", 1),
    "convert FRND": ("round", 1),
    "special": ("special", 1),
}


def best(chip: Chip, launch: Launch, timed: Timed, warps: Sequence[int]) -> tuple[list[float], int]:
    """Clocks a step, chain and warp of a multiprocessor in the fastest of several numbers of warps, and that number."""
    tried = {}
    for each in warps[: chip.size(len(warps), 1)]:
        tried[each] = [value / timed.chains / each for value in chip.per_step(launch, timed, 32 * each)]
    chosen = min(tried, key=lambda each: statistics.median(tried[each]))
    return tried[chosen], chosen


def lanes(chip: Chip) -> Iterator[Found]:
    steps = {step.name: step for step in rate_steps.ARITHMETIC}
    wanted = {name: Timed(steps[step], 4, chip.steps // 2) for name, (step, _) in LANES.items()}
    kernels = chip.load(rate_steps.source(wanted.values()))
    for name, timed in wanted.items():
        clocks, warps = best(chip, kernels(timed.name), timed, (16, 32))
        count = LANES[name][1]
        yield Found(f"lanes.{name}", a_clock(8 * count, clocks), f"{timed.step.opcodes[0]}, 4 chains, {warps} warps")


def wavefronts(chip: Chip) -> Iterator[Found]:
    wanted = {step.name: Timed(step, 1, min(chip.steps, rate_steps.STREAMED)) for step in rate_steps.STREAMS}
    kernels = chip.load(rate_steps.source(wanted.values()))
    clocks = {}
    for name, timed in wanted.items():
        clocks[name], warps = best(chip, kernels(timed.name), timed, (16, 32))
        yield Found(f"shared.{name}", clocks[name], f"clocks of a multiprocessor for each instruction, {warps} warps")
    wide = clocks["stream_128"]
    (rate,) = a_clock(4, [statistics.median(wide)])
    yield Found("shared.wavefronts", a_clock(4, wide), "LDS.128 without conflict, 4 wavefronts each")
    yield Found("shared.requests", a_clock(1, clocks["stream_32"]), "LDS, which is a wavefront too")
    for bits in (64, 128):
        values = [value * rate for value in clocks[f"stream_{bits}_merged"]]
        yield Found(f"shared.merged_{bits}", values, "neighbours at one address; in wavefronts of LDS.128")
    alone = chip.per_step(kernels(wanted["stream_128"].name), wanted["stream_128"])
    yield Found("shared.one_warp", a_clock(4, alone), "LDS.128 of one warp")


def tensor(chip: Chip) -> Iterator[Found]:
    wanted = [Timed(step, count, chip.steps // count) for step in rate_steps.TENSOR for count in (1, 4)]
    kernels = chip.load(rate_steps.source(wanted))
    names = {"hmma_16816_f32": "latency_16816", "hmma_1688_f32": "latency_1688", "hmma_1688_tf32": "latency_tf32"}
    for timed in wanted:
        if timed.chains == 1:
            name = names.get(timed.step.name, f"latency {timed.step.name}")
            yield Found(f"tensor.{name}", chip.per_step(kernels(timed.name), timed))
        else:
            clocks, warps = best(chip, kernels(timed.name), timed, (4, 8, 16))
            yield Found(f"tensor.{timed.step.name}", [4 * value for value in clocks], f"4 chains, {warps} warps")


def clock(chip: Chip) -> Iterator[Found]:
    yield Found(
        "clock MHz, one thread",
        [chip.mhz(20_000_000) for _ in range(chip.repeats)],
        "clock64 beside globaltimer, 20 million clocks",
    )
    busy = [chip.mhz(300_000_000, chip.device.sm_count, 1024)]
    yield Found("clock MHz, FFMA on all multiprocessors", busy, "the same, 300 million clocks")


def wgmma(chip: Chip) -> Iterator[Found]:
    widths, groups = (8, 64, 128, 256), chip.size(2, 1)
    few, many = chip.size(8, 1), chip.size(24, 2)

    def clocks(n: int, registers: bool, threads: int) -> list[float]:
        """Clocks from a warpgroup's product to its next, without those of the loop and the wait."""
        steps = [Timed(rate_steps.wgmma(n, registers, False), 1, count) for count in (few, many)]
        kernels = chip.load(rate_steps.source(steps))
        turns = [[value * each.steps for value in chip.per_step(kernels(each.name), each, threads)] for each in steps]
        return [(long - short) / (many - few) for short, long in zip(*turns, strict=True)]

    for n in widths:
        for registers, place in ((False, "shared memory"), (True, "registers")):
            name = "wgmma.least" if (n, registers) == (8, True) else f"wgmma clocks n{n}, A in {place}"
            yield Found(name, clocks(n, registers, 128), f"n{n}, A in {place}, one warpgroup")
    for registers, place in ((False, "shared memory"), (True, "registers")):
        fmas = a_clock(groups * 64 * 256 * 16, clocks(256, registers, 128 * groups))
        yield Found(
            "wgmma.fmas" if registers else "wgmma fmas, A in shared memory", fmas, f"n256, A in {place}, {groups} warpgroups"
        )
    alone: dict[int, list[float]] = {}
    for n in widths:
        timed = Timed(rate_steps.wgmma(n, True, True), 1, chip.size(16, 2))
        alone[n] = chip.per_step(chip.load(rate_steps.source([timed]))(timed.name), timed, 128)
        yield Found(f"wgmma alone n{n}", alone[n], "fence, one product with A in registers, and the wait for it")
    fits = [line([(n / 2, alone[n][repeat]) for n in widths]) for repeat in range(chip.repeats)]
    note = f"a line by registers through n = 8 to 256 of a product alone, less {ALONE:.0f} clocks of fence, issue and wait"
    yield Found("wgmma.latency", [fit[0] - ALONE for fit in fits], note)
    yield Found("wgmma.latency_register", [fit[1] for fit in fits], note)


def mbarriers(chip: Chip) -> Iterator[Found]:
    steps = {step.name: step for step in rate_steps.BARRIERS}
    timed = Timed(steps["mbarrier_arrive"], 1, chip.steps)
    yield Found("copies.mbarrier_arrive", chip.per_step(chip.load(rate_steps.source([timed]))(timed.name), timed, 1))
    out = chip.out(4)

    def there_and_back(turns: int) -> float:
        chip.kernels("ping_pong")((1,), (64,), (out, np.int32(turns)))
        return span(chip.get(out).reshape(2, 2))

    values = [each / 2 for each in chip.per_turn(there_and_back, (chip.size(64, 1), chip.size(576, 2)))]
    yield Found("copies.mbarrier_wait", values, "half of there and back between two warps: SYNCS.ARRIVE to the next one's")


def bulk(chip: Chip) -> Iterator[Found]:
    data, span_bytes = chip.zeros(chip.size(16 * MB, 1 << 16)), chip.size(MB // 8, 1 << 12)
    out = chip.out(1)

    def turn(size: int, copies: int) -> list[float]:
        """Clocks of a turn of bulk copies that one thread begins and waits for; the data are in the L2."""

        def clocks(turns: int) -> float:
            args = (data, out, np.int64(span_bytes), np.int32(size), np.int32(copies), np.int32(turns))
            chip.kernels("bulk_copies")((1,), (32,), args, max(size * copies, 16))
            return float(chip.get(out)[0])

        return chip.per_turn(clocks, (chip.size(8, 1), chip.size(72, 2)))

    one, several = turn(16, 1), turn(16, chip.size(64, 2))
    slope = [(long - short) / (chip.size(64, 2) - 1) for short, long in zip(one, several, strict=True)]
    yield Found("copies.tma_issue", slope, "copies of 16 bytes, 64 against 1 in a turn")
    yield Found(
        "copies alone", one, "a copy of 16 bytes from the L2, from its issue to the issue behind the wait, with the arrival"
    )
    load = known(chip.device).get("l2.latency")
    extra = [value - (load.value if load else math.nan) for value in one]
    yield Found("copies.tma_extra", extra, "the copy alone, less the table's l2.latency: with the wait")
    for size in (2048, 8192):
        for name, grid in (("one", 1), ("all", chip.size(chip.device.sm_count, 2))):
            clocks, copies, places = chip.out(grid), chip.size(256, 6), 4
            rates = []
            for repeat in range(1 + chip.repeats):
                args = (data, clocks, np.int64(chip.size(16 * MB, 1 << 16)), np.int32(size), np.int32(places), np.int32(copies))
                chip.kernels("bulk_stream")((grid,), (32,), args, size * places)
                if repeat:
                    rates.append(statistics.mean(size * copies / max(1, took) for took in chip.get(clocks).tolist()))
            best_name = "copies.tma_rate" if (size, name) == (8192, "one") else f"copies rate of {size} bytes, {name}"
            yield Found(best_name, rates, f"{places} places of {size} bytes, {name} multiprocessor{'s' * (name == 'all')}")


def clusters(chip: Chip) -> Iterator[Found]:
    steps = {step.name: step for step in rate_steps.BARRIERS}
    found = chains(chip, [step for name, step in steps.items() if name.startswith("cluster")], blocks=2)
    yield Found(
        "copies.cluster_load", [value - 7 for value in found["cluster_load"]], "a generic load, less the 7 clocks of its two moves"
    )
    yield Found(
        "copies.cluster_barrier", found["cluster_barrier"], "two blocks of a warp, with the release of the arrival (MEMBAR.ALL.GPU)"
    )
    yield Found("copies.cluster_barrier relaxed", found["cluster_barrier_relaxed"], "the same without")


EVERYWHERE = (
    *(launches, blocks, dram, l2_rates, latencies_behind_l1, arithmetic),
    *(shared_latencies, l1_latencies, lanes, wavefronts, tensor, clock),
)
ON_HOPPER = mbarriers, clusters, wgmma, bulk
MEASUREMENTS: Mapping[str, Measurement] = {each.__name__: each for each in (*EVERYWHERE, *ON_HOPPER)}


def names(device: Device) -> list[str]:
    return [name for name, each in MEASUREMENTS.items() if each not in ON_HOPPER or device.compute_capability == HOPPER]
