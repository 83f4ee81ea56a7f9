"""`cupyflash predict`: the closed form, and the schedule replayed, beside the other algorithms."""

from __future__ import annotations

from dataclasses import replace

import click

from cupyflash.basics import Report
from cupyflash.request.options import EMPTY, MIXED, WHOLE
from cupyflash.schedules import TileSchedule, fa3_tiles
from cupyflash.sim import theory
from cupyflash.sim.cli import decoding, over_ranks
from cupyflash.sim.cli.group import Found
from cupyflash.sim.cli.models import Timing, l2_report, show_models
from cupyflash.sim.cli.options import gathered
from cupyflash.sim.cli.over_ranks import Split, refuse_without_ranks
from cupyflash.sim.cli.request import MOST_SCORES, ProblemRequest, requested
from cupyflash.sim.cli.show import (
    beside_balance,
    counted,
    intensities,
    say,
    show_replay,
    show_table,
    show_tiling,
    show_traffic,
    taken,
    tell,
    tiling_report,
)
from cupyflash.sim.names import NAMES
from cupyflash.sim.traffic import Traffic

IDEAL = "standard, each input read once"


@requested
@gathered(timing=Timing, split=Split)
def predict(request: ProblemRequest, with_l2: bool, timing: Timing, ranks: int | None, split: Split, as_json: bool) -> None:
    """Predict HBM reads and writes."""
    if ranks is not None:
        if with_l2 or timing.asked or timing.results is not None:
            raise click.UsageError("--l2, --time, --roofline and --results are of one device: they cannot go with --ranks")
        over_ranks.predict(request, ranks, split, as_json)
        return
    refuse_without_ranks("--ranks")
    timed = timing.report_of(request)  # refuses what has no times before the L2 is played
    asked = {"l2": l2_report(request) if with_l2 else None, "time": timed}
    models = {name: told for name, told in asked.items() if told is not None}
    if request.cache is not None:
        decoding.predict(request, as_json, models)
        return
    problem, device, schedule = request.problem, request.device, request.schedule()
    form = theory.traffic(schedule)
    standard = (theory.standard_backward_ideal if request.backward else theory.standard_ideal)(problem)
    flops, theorem = (problem.backward_flops, 5) if request.backward else (problem.flops, 2)
    elements = device.sram_per_block // problem.itemsize
    N, d = problem.seqlen_q, problem.head_dim
    flash, bound = (f(N, d, elements) for f in (theory.theorem2_flash, theory.lower_bound))
    report = {
        **request.report,
        "device": {"name": device.name, "sram_bytes": device.sram_per_block, "sram_elements": elements},
        "tiling": tiling_report(schedule),
        "mask_tiles": tiles_of(schedule),
        **counted(schedule, form),
        **intensities(flops, form, device, problem.dtype),
        "standard_ideal_bytes": standard.total_bytes,
        "ratio_to_standard": ratio(form, standard),
        "algorithms": side_by_side(request, schedule, standard),
        **models,
        f"theorem{theorem}_elements": {
            "flash N^2 d^2 / M": problem.head_count * flash,
            "standard N d + N^2": problem.head_count * theory.theorem2_standard(N, d),
            "in_range d <= M <= N d": theory.theorem2_holds_for(N, d, elements),
            "lower_bound_shape": problem.head_count * bound,
        },
    }
    tell(report, as_json, show_prediction, request)
    if report["replay_agrees"] is False:
        raise Found("the replay disagrees with the closed form")


def tiles_of(schedule: TileSchedule) -> dict[str, int] | None:
    """The number of tiles that a mask leaves empty, mixed and whole, over the heads for which it differs; None if not known."""
    states = [each.states for each in schedule.mask_tiles[:1]]
    if not states or states[0] is None:
        return None
    return {name: int((states[0] == state).sum()) for name, state in (("empty", EMPTY), ("mixed", MIXED), ("whole", WHOLE))}


def ratio(form: Traffic, standard: Traffic) -> float | None:
    """The bytes over standard attention's; None if that moves nothing."""
    return form.total_bytes / standard.total_bytes if standard.total_bytes else None


def side_by_side(request: ProblemRequest, asked: TileSchedule, standard: Traffic) -> dict[str, Report]:
    """The algorithms for one problem, by name: the one that was asked for as it was, the others in their fitted tiling.

    FlashAttention-3 is included on devices that have its instructions, and decoding if it was requested.
    """
    told: dict[str, Report] = {}
    hopper = request.device.compute_capability == fa3_tiles.COMPUTE_CAPABILITY
    split = request.algorithm == "decode"
    for algorithm in (*["decode"] * split, *["fa3"] * hopper, "fa2", "fa1", "standard"):
        try:
            own = algorithm == request.algorithm
            schedule = asked if own else other_schedule(request, algorithm)
        except ValueError as error:  # its blocks do not fit the SRAM, or it has no such mask
            told[algorithm] = {"refused": str(error)}
            continue
        form = theory.traffic(schedule)
        used = schedule.tiling.used
        blocks = {"block_rows": used.block_rows, "block_cols": used.block_cols}
        told[algorithm] = blocks | moved(form, standard)
    return told | {"standard_ideal": moved(standard, standard)}


def other_schedule(request: ProblemRequest, algorithm: str) -> TileSchedule:
    """Another algorithm's for the same problem: in float32 only that of standard attention has S in memory."""
    problem = request.problem if algorithm == "standard" else request.problem.asking(score_dtype=None)
    return replace(request, problem=problem, algorithm=algorithm, tiling=None).schedule()


def moved(form: Traffic, standard: Traffic) -> Report:
    """One algorithm's bytes, for JSON."""
    return taken(form, "read_bytes", "write_bytes", "total_bytes") | {"ratio_to_standard": ratio(form, standard)}


def show_prediction(report: Report, request: ProblemRequest) -> None:
    """A prediction as text."""
    device = report["device"]
    theorem, count = (5, 10) if request.backward else (2, 4)
    say(request.title, rest="  ")
    say(f"{device['name']}: M = {device['sram_bytes']:,} bytes = {device['sram_elements']:,} elements")
    click.echo()
    show_tiling(report["tiling"])
    click.echo()
    show_traffic(report["traffic"])
    if request.problem.options.masked:
        tiles = report["mask_tiles"]
        if tiles:
            say(f"tiles of the mask: {', '.join(f'{count:,} {state}' for state, count in tiles.items())}")
        else:
            say(
                "counted is that the mask is asked for every score: what it says is not known, is of more scores than are looked "
                f"through here ({MOST_SCORES:,}), or this algorithm skips no tiles"
            )
    show_replay(report)
    if report["arithmetic_intensity"] is not None:
        beside = beside_balance(report["machine_balance"])
        say(f"arithmetic intensity: {report['arithmetic_intensity']:.1f} FLOP a byte ({count} N^2 d, nothing skipped){beside}")
    show_models(report)
    show_side_by_side(report["algorithms"], request, "l2" in report)
    shapes = report[f"theorem{theorem}_elements"]
    note = "" if shapes["in_range d <= M <= N d"] else " (M is outside d <= M <= N d: the theorem does not speak)"
    say(
        f"Theorem {theorem}, of FlashAttention, in elements, up to constants: N^2 d^2 / M = {shapes['flash N^2 d^2 / M']:,.0f} "
        f"against N d + N^2 = {shapes['standard N d + N^2']:,.0f}{note}"
    )
    say(f"lower bound for any exact algorithm, its shape only: {shapes['lower_bound_shape']:,.0f}")


def show_side_by_side(algorithms: dict[str, Report], request: ProblemRequest, followed: bool) -> None:
    """The algorithms for one problem, as text; `followed`: the L2 was, and there is no need to say that it was not."""
    what, standard = ("backward", "standard attention's backward") if request.backward else ("forward", "standard attention")
    click.echo()
    say(f"The {what} of each algorithm, and its bytes beside those of {standard}:")
    click.echo()
    rows = []
    for name, row in algorithms.items():
        label = IDEAL if name == "standard_ideal" else f"{NAMES[name]} (--algorithm {name})"
        if "refused" in row:
            rows.append((label, "-", "-", "-", "-", "-"))
            continue
        blocks = f"{row['block_rows']} x {row['block_cols']}" if "block_rows" in row else ""
        quotient = "-" if row["ratio_to_standard"] is None else f"{row['ratio_to_standard']:.3f}"
        rows.append((label, blocks, f"{row['read_bytes']:,}", f"{row['write_bytes']:,}", f"{row['total_bytes']:,}", quotient))
    show_table(("", "Br x Bc", "bytes read", "bytes written", "bytes", "ratio"), rows)
    click.echo()
    refused = [row["refused"] for row in algorithms.values() if "refused" in row]
    if "fa3" not in algorithms:
        refused.append("FlashAttention-3 (fa3) needs compute capability {}.{}".format(*fa3_tiles.COMPUTE_CAPABILITY))
    for reason in refused:
        say(reason)
    if refused:
        click.echo()
    problem, device = request.problem, request.device
    if not request.backward and "refused" not in algorithms["fa2"] and not followed:
        keys = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.itemsize
        read = "FlashAttention-2 and 3 read" if "fa3" in algorithms else "FlashAttention-2 reads"
        say(
            f"{read} K and V once for each block of Br rows, and each time is counted here as HBM's. A chip's L2 "
            f"({device.l2_bytes / 2**20:.0f} MB; K and V of one head take {keys / 2**20:,.1f} MB) serves what blocks that run "
            "together read again, which no count here knows of: --l2 has a model of it."
        )
        click.echo()
