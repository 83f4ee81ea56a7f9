"""`cupyflash explain`: which kernel and which tile run a problem by default, and why not another."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from cupyflash.basics import Report
from cupyflash.multiprocessor import Multiprocessor
from cupyflash.request.problem import USUAL_HEAD_DIM, Problem
from cupyflash.schedules import BackwardSchedule, DecodeSchedule, TileSchedule, fa2_tiles, fa3_tiles, plan, plan_backward
from cupyflash.sim import l2, theory
from cupyflash.sim.cli import explain_backward, explain_decode, explain_fa2, explain_fa3, explain_fa3_backward
from cupyflash.sim.cli.models import Timing, show_models
from cupyflash.sim.cli.request import ProblemRequest, requested
from cupyflash.sim.cli.show import flat, say, show_balance, show_tiling, taken, tell, tiling_report
from cupyflash.sim.names import NAMES

WAYS = {"fa2": explain_fa2, "fa3": explain_fa3}
TILES: dict[str, Any] = {"fa2": fa2_tiles, "fa3": fa3_tiles}
BACKWARD_WAYS = {"fa2": explain_backward, "fa3": explain_fa3_backward}


@requested
def explain(request: ProblemRequest, everything: bool, with_time: bool, as_json: bool) -> None:
    """Tell which tile is run, and why."""
    if request.backward and request.algorithm not in BACKWARD_WAYS:
        raise click.BadParameter(f"--backward explains fa2 and fa3, got {request.algorithm!r}", param_hint="--algorithm")
    schedule = request.schedule()
    if isinstance(schedule, DecodeSchedule):
        if with_time:
            raise click.UsageError("--time is not for --decode: `cupyflash predict --decode --time` tells it")
        explain_decode.explain(request, schedule, as_json)
        return
    of, device, problem = way(request), request.device, request.problem
    timed = Timing(with_time, None, None).report_of(request)
    rates = {
        "fmas_a_clock": TILES[request.algorithm].fma_rate(problem, device),
        "float32_fmas_a_clock": Multiprocessor.like(device.compute_capability).fma_lanes,
    }
    report = {
        "problem": flat(problem),
        "algorithm": schedule.algorithm,
        "auto": asdict(request.choice),
        "device": taken(device, "name", "sm_count", "sram_per_block", "sram_per_sm", "registers_per_sm") | rates,
        "tiling": tiling_report(schedule),
        "fa1_tiling": fa1_tiling(schedule),
        **of.explanation(schedule, request),
        "balance": l2.balance(schedule),
        "traffic": theory.traffic(schedule).as_dict(),
        "flops": problem.backward_flops if request.backward else problem.flops,
    }
    report |= {"time": timed} if timed else {}
    tell(report, as_json, show, request, everything)


def way(request: ProblemRequest) -> Any:
    """The module that explains what is asked for."""
    return (BACKWARD_WAYS if request.backward else WAYS)[request.algorithm]


def fa1_tiling(schedule: TileSchedule) -> Report | None:
    """The tile of Algorithm 1's kernel, or Algorithm 4's, by the paper's formula; None if d is too wide, or nothing fits."""
    if is_wide(schedule.problem):
        return None
    try:
        planned = plan_backward if isinstance(schedule, BackwardSchedule) else plan
        return asdict(planned(schedule.problem, schedule.device, "fa1").tiling.used)
    except ValueError:
        return None


def show(report: Report, request: ProblemRequest, everything: bool) -> None:
    """An explanation as text."""
    device = request.device
    say(request.title, rest="  ")
    say(
        f"{device.name}: {device.sm_count} multiprocessors of {device.sram_per_sm:,} bytes of SRAM ({device.sram_per_block:,} a "
        f"block) and {device.registers_per_sm:,} registers; {report['device']['fmas_a_clock']:.0f} FMAs of the products a clock"
    )
    click.echo()
    most = f", up to a d of {USUAL_HEAD_DIM}" if is_wide(request.problem) else ""
    paper = "Algorithm 4" if request.backward else "Algorithm 1"
    say(which(request) + f' that formula is FlashAttention\'s, {paper}, which algorithm="fa1" runs{most}.')
    click.echo()
    show_tilings(report, way(request).FITTED, request.problem)
    click.echo()
    way(request).show(report, request, everything)
    total, passing = report["traffic"]["total"], ("Q and dO", "column") if request.backward else ("K and V", "row")
    click.echo()
    show_balance(report)
    click.echo()
    say(
        f"HBM bytes by theory: {total['read_bytes']:,} read, {total['write_bytes']:,} written (cupyflash predict"
        f"{' --backward' * request.backward} tells them by tensor); {passing[0]} of one head are read by its {passing[1]} "
        f"blocks, each those that it sees, so that most of these are L2's. Arithmetic: {report['flops']:,} FLOP, nothing skipped"
    )
    show_models(report)


def which(request: ProblemRequest) -> str:
    """A sentence that names the algorithm of `attention`, on a Hopper with the reason; the paper's formula is of another tile."""
    formula, auto = "the paper's Bc = ceil(M / 4d), Br = min(Bc, d):", request.choice
    call, what = ("attention_backward", "'s backward") if request.backward else ("attention(q, k, v)", "")
    if request.device.compute_capability != fa3_tiles.COMPUTE_CAPABILITY:
        return f"{call} runs {NAMES[auto.algorithm]}{what} ({auto.algorithm}), whose tile is not {formula}"
    return f"{explain_decode.by_default(request, call.split('(')[0], what)} The tile is not {formula}"


def is_wide(problem: Problem) -> bool:
    """True if only FlashAttention-2's forward takes such a d or d_v."""
    return max(problem.head_dim, problem.head_dim_v) > USUAL_HEAD_DIM


def show_tilings(report: Report, fitted: str, problem: Problem) -> None:
    """The paper's block sizes beside those that are taken."""
    tiling, algorithm = report["tiling"], report["algorithm"]
    stages = {
        "the paper's formula": tiling["paper"],
        "fa1, fitted to its kernel": report["fa1_tiling"],
        f"{algorithm}, {fitted}": tiling["fitted"],
    }
    if report["fa1_tiling"] is None and is_wide(problem):
        del stages["fa1, fitted to its kernel"]
    if tiling["used"] != tiling["fitted"]:
        stages[f"{algorithm}, used here"] = tiling["used"]
    show_tiling(stages)
