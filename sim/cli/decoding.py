"""Decoding: the output of `predict --decode` (bytes by tensor, how often K and V are read, what else moves, and fa2's beside it)
and of `sweep --over cache` (bytes, splits and thread blocks along the length of the cache)."""

from __future__ import annotations

from pathlib import Path

import click

from cupyflash.basics import Report
from cupyflash.schedules import DecodeSchedule
from cupyflash.sim import theory
from cupyflash.sim.cli.group import Found
from cupyflash.sim.cli.models import show_models
from cupyflash.sim.cli.request import ProblemRequest
from cupyflash.sim.cli.show import (
    Column,
    Points,
    beside_balance,
    counted,
    describe_cache,
    intensities,
    say,
    show_replay,
    show_table,
    show_traffic,
    taken,
    tell,
)
from cupyflash.sim.names import NAMES
from cupyflash.sim.numbers.gathered import KEYS, PAGES, PARTS, bytes_of, gathered, together
from cupyflash.sim.pictures.sweep_decode import CachePoint, sweep_cache
from cupyflash.sim.traffic import Traffic
from cupyflash.words import plural


def predict(request: ProblemRequest, as_json: bool, models: Report) -> None:
    """Print it, as text or as JSON, with what `models` of the L2 and of times say, where that was asked; `Found` where replay and
    closed form disagree."""
    schedule = request.decode_schedule()
    form = theory.traffic(schedule)
    report = prediction(request, schedule, form) | models
    tell(report, as_json, show, request, schedule)
    if not as_json:
        show_models(models)
    if report["replay_agrees"] is False:
        raise Found("the replay disagrees with the closed form")


def prediction(request: ProblemRequest, schedule: DecodeSchedule, form: Traffic) -> Report:
    """The prediction for JSON."""
    device, bandwidth = request.device, request.device.hbm_bandwidth
    return {
        **request.report,
        "device": {"name": device.name, "sram_bytes": device.sram_per_block, "hbm_bandwidth": bandwidth},
        "splits": schedule.splits,
        "thread_blocks": schedule.grid,
        "configuration": str(schedule.config),
        **counted(schedule, form),
        "keys": {"once_bytes": theory.key_bytes(schedule), "read_bytes": sum(form[name].read_bytes for name in KEYS)},
        "apart": {
            name: {"bytes": moved, "share": moved / form.total_bytes if form.total_bytes else 0.0}
            for name, moved in (("partial_results", bytes_of(form, PARTS)), ("pages", bytes_of(form, PAGES)))
        },
        **intensities(operations(schedule), form, device, request.problem.dtype),
        "hbm_seconds": form.total_bytes / bandwidth if bandwidth else None,
        "beside": {"decode": moved(form, bandwidth), "fa2": of_fa2(schedule, bandwidth)},
    }


def operations(schedule: DecodeSchedule) -> int:
    """Floating point operations of the two products of all queries with every key that some query sees."""
    p = schedule.problem
    return 2 * p.seqlen_q * schedule.group * theory.key_bytes(schedule) // p.itemsize


def moved(form: Traffic, bandwidth: float | None) -> Report:
    """The bytes of one way, for JSON."""
    return {
        "key_bytes": sum(form[name].read_bytes for name in KEYS),
        **taken(form, "read_bytes", "write_bytes", "total_bytes"),
        "hbm_seconds": form.total_bytes / bandwidth if bandwidth else None,
    }


def of_fa2(schedule: DecodeSchedule, bandwidth: float | None) -> Report:
    """The bytes of fa2's calls for the same queries, on keys that are gathered first."""
    try:
        schedules = gathered(schedule)
    except ValueError as error:  # its blocks do not fit the SRAM
        return {"refused": str(error)}
    return moved(together(schedules), bandwidth)


def show(report: Report, request: ProblemRequest, schedule: DecodeSchedule) -> None:
    """A prediction as text."""
    device = request.device
    say(request.title, rest="  ")
    say(
        f"{device.name}: {plural(schedule.splits, 'split')} of the keys, {plural(schedule.grid, 'thread block')} for "
        f"{device.sm_count} multiprocessors; {schedule.config} (cupyflash explain --decode says why)"
    )
    click.echo()
    show_traffic(report["traffic"])
    show_replay(report)
    click.echo()
    say(of_keys(report["keys"], schedule))
    shown = {"partial_results": "partial results (O_part, m_part, l_part)", "pages": "pages (block_table)"}
    for name, what in shown.items():
        apart = report["apart"][name]
        if apart["bytes"]:
            say(f"{what}: {apart['bytes']:,} bytes, {apart['share']:.2%} of all", first="  ", rest="    ")
    intensity, balance, bandwidth = report["arithmetic_intensity"], report["machine_balance"], device.hbm_bandwidth
    if intensity is not None:
        bound = ": the memory takes the time" if balance and intensity < balance else ""
        say(f"arithmetic intensity: {intensity:.1f} FLOP a byte{beside_balance(balance, bound)}")
    if bandwidth:
        say(
            f"time of the memory, a model: {report['hbm_seconds'] * 1e6:,.2f} us, all bytes at {bandwidth / 1e9:,.0f} GB/s "
            "(as if the L2 had none of them; nothing is measured)"
        )
    click.echo()
    show_beside(report, request, schedule)


def of_keys(keys: dict[str, int], schedule: DecodeSchedule) -> str:
    """A sentence on how often K and V are read."""
    once, read = keys["once_bytes"], keys["read_bytes"]
    told = f"K and V: {once:,} bytes that queries see, {read:,} read: "
    if not once:
        return f"{told}there are no keys."
    if schedule.row_tiles > 1:
        return (
            f"{told}{read / once:.2f} times, since the {schedule.rows} rows of a key head are {schedule.row_tiles} tiles of "
            f"{schedule.block_rows} at most, which each read the keys that their rows see."
        )
    if read == once:
        several = f", not once for each of its {schedule.group} query heads" if schedule.group > 1 else ""
        return f"{told}each row once a key head{several}."
    return f"{told}each once a key head, and the rest of the blocks that a window begins or ends in."


def show_beside(report: Report, request: ProblemRequest, schedule: DecodeSchedule) -> None:
    """Decoding's bytes beside a call of fa2."""
    ours, theirs = report["beside"]["decode"], report["beside"]["fa2"]
    if "refused" in theirs:
        say(f"A call of {NAMES['fa2']} on the same problem: {theirs['refused']}")
        return
    say(f"Beside it what `attention` would move by {NAMES['fa2']} for the same queries, of keys that are gathered in one array:")
    click.echo()

    sums = ("key_bytes", "read_bytes", "write_bytes", "total_bytes")
    ratios = [f"{theirs[name] / ours[name]:.2f}" if ours[name] else "-" for name in sums]

    def cells(label: str, row: Report) -> tuple[str, ...]:
        model = "-" if row["hbm_seconds"] is None else f"{row['hbm_seconds'] * 1e6:,.2f}"
        return (label, *(f"{row[name]:,}" for name in sums), model)

    rows = [
        cells(NAMES["decode"], ours),
        cells(NAMES["fa2"], theirs),
        ("fa2 / decode", *ratios, ratios[-1] if request.device.hbm_bandwidth else "-"),
    ]
    show_table(("", "K and V read", "bytes read", "bytes written", "bytes", "us, model"), rows)
    click.echo()
    told = f"fa2 reads K and V for each block of rows of each query head: {schedule.group} query heads share a key head here. "
    if schedule.group == 1:
        told = "fa2 reads K and V for each block of rows of each query head; here each has a key head of its own. "
    if schedule.cache.page_size:
        told += "It takes no pages: these would be read and written once more to be gathered, which is not counted. "
    if schedule.cache.tree:
        told += "It has no tree mask, without which it is counted. "
    say(told.rstrip())


# -- sweep --over cache ------------------------------------------------------------------------------------------------------

OVER = "cache"
COLUMNS = {
    "cache": Column("keys"),
    "splits": Column("splits"),
    "thread_blocks": Column("blocks"),
    "read_bytes": Column("bytes read"),
    "write_bytes": Column("bytes written"),
    "total_bytes": Column("bytes"),
    "partial_share": Column("partial", ".2%"),
    "fa2_ratio": Column("fa2", ".2f"),
    "model_seconds": Column("us, model", ",.2f", 1e6),
}
LEGEND = (
    "keys: of a full cache, a sequence; blocks: thread blocks; partial: what share of all bytes the splits' results are, "
    "written and read again; fa2: how many times as many bytes FlashAttention-2 would move for the same queries, of keys that "
    "are gathered in one array; us, model: the planner's microseconds, nothing is measured"
)


def points_of(request: ProblemRequest, values: list[int], plot: Path | None) -> Points:
    """The points; a picture is drawn on the way."""
    assert request.cache is not None
    device, told = request.device, describe_cache(request.problem, request.cache, swept=True)
    points = sweep_cache(request.problem, device, request.cache, values, num_splits=request.num_splits, lse=request.lse)
    if plot is not None:
        from cupyflash.sim.pictures.plot import plot_cache

        plot_cache(plot, points, told, device.name)
    head = request.report
    head |= {  # what varies with the length is null
        "problem": head["problem"] | {"seqlen_k": None, "key_lengths": None},
        "cache": head["cache"] | {"pages": None},
        "device": taken(device, "name", "sm_count"),
    }
    title = f"{NAMES[request.algorithm]}: {told}; {device.name}, {device.sm_count} multiprocessors"
    return Points({"over": OVER, **head}, rows(points), title, COLUMNS, (LEGEND,), {})


def rows(points: tuple[CachePoint, ...]) -> list[Report]:
    """The points with names for their columns."""
    return [
        {
            "cache": point.value,
            **taken(point, "splits", "thread_blocks", "read_bytes", "write_bytes", "total_bytes"),
            "partial_bytes": point.part_bytes,
            "partial_share": point.part_share,
            "page_bytes": point.page_bytes,
            "fa2_bytes": point.fa2_bytes,
            "fa2_ratio": point.fa2_ratio,
            "model_seconds": point.seconds,
        }
        for point in points
    ]
