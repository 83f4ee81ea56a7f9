"""`cupyflash explain`: which kernel and which tile run a problem by default, and why not another."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from cupyflash.problem import USUAL_HEAD_DIM, Problem
from cupyflash.schedules import DecodeSchedule, TileSchedule, fa3_tiles, plan
from cupyflash.sim import theory
from cupyflash.sim.cli import explain_decode, explain_fa2, explain_fa3
from cupyflash.sim.cli.options import AS_JSON, Request, examples, problem_options
from cupyflash.sim.cli.show import NAMES, flat, say, show_tiling, tiling_report

EXAMPLES = examples(
    "cupyflash explain --head-dim 128 --heads 16 --device H100-SXM",
    "cupyflash explain --seqlen 512 --dtype float32 --all",
    "cupyflash explain --tiling 64x32",
    "cupyflash explain --decode --batch 4 --seqlen-k 32768 --device H100-SXM",
)
WAYS = {"fa2": explain_fa2, "fa3": explain_fa3}


@click.command(epilog=EXAMPLES)
@problem_options(seqlen=4096, head_dim=64, algorithms=("auto", *WAYS, "decode"), decode={})
@click.option("--all", "everything", is_flag=True, help="Every runner-up and every rejected tile, not a few and a count.")
@AS_JSON
def explain(request: Request, everything: bool, as_json: bool) -> None:
    """Tell which tile is run, and why.

    `attention` runs FlashAttention-2 by default, on a Hopper FlashAttention-3 where that takes the call and is predicted to be
    faster: told is which and why. Neither's tile is the paper's Bc = ceil(M / 4d): both are shown.
    Every configuration of the kernel is a candidate: it is rejected with a reason, or a model of one multiprocessor says how
    many clocks its tiles take. The times are the model's, none measured. Needs neither compiler nor GPU.

    With --decode, of `attention_decode`: into how many parts the keys are split, and how many bytes are under way.
    """
    schedule = request.schedule()
    if isinstance(schedule, DecodeSchedule):
        explain_decode.explain(request, schedule, as_json)
        return
    of, device, problem = WAYS[request.algorithm], request.device, request.problem
    found = of.explanation(schedule, request)
    rates = {name: found.pop(name) for name in ("fmas_a_clock", "float32_fmas_a_clock")}
    report = {
        "problem": flat(problem),
        "algorithm": schedule.algorithm,
        "auto": asdict(request.choice),
        "device": {
            "name": device.name,
            "sm_count": device.sm_count,
            "sram_per_block": device.sram_per_block,
            "sram_per_sm": device.sram_per_sm,
            "registers_per_sm": device.registers_per_sm,
            **rates,
        },
        "tiling": tiling_report(schedule),
        "fa1_tiling": fa1_tiling(schedule),
        **found,
        "traffic": theory.traffic(schedule).as_dict(),
        "flops": problem.flops,
    }
    click.echo(json.dumps(report, indent=2)) if as_json else show(report, request, everything)


def fa1_tiling(schedule: TileSchedule) -> dict[str, Any] | None:
    """What Algorithm 1's kernel makes of the paper's formula for the same problem; None where it has none, or nothing fits."""
    try:
        return asdict(plan(schedule.problem, schedule.device, "fa1").tiling.used)
    except ValueError:
        return None


def show(report: dict[str, Any], request: Request, everything: bool) -> None:
    """An explanation as text."""
    device = request.device
    say(request.title, rest="  ")
    say(
        f"{device.name}: {device.sm_count} multiprocessors of {device.sram_per_sm:,} bytes of SRAM ({device.sram_per_block:,} a "
        f"block) and {device.registers_per_sm:,} registers; {report['device']['fmas_a_clock']:.0f} FMAs of the products a clock"
    )
    click.echo()
    most = f", up to a d of {USUAL_HEAD_DIM}" if is_wide(request.problem) else ""
    say(which(request) + f' that formula is FlashAttention\'s, Algorithm 1, which algorithm="fa1" runs{most}.')
    click.echo()
    show_tilings(report, WAYS[request.algorithm].FITTED, request.problem)
    click.echo()
    WAYS[request.algorithm].show(report, request, everything)
    total = report["traffic"]["total"]
    click.echo()
    say(
        f"HBM bytes by theory: {total['read_bytes']:,} read, {total['write_bytes']:,} written (cupyflash predict tells them by "
        "tensor); K and V of one head are read by all of its row blocks, so that most of these are L2's. "
        f"Arithmetic: {report['flops']:,} FLOP, nothing skipped"
    )


def which(request: Request) -> str:
    """Which algorithm `attention` runs, on a Hopper with the reason, and whose tile is none of the paper's formula."""
    auto, formula = request.choice, "the paper's Bc = ceil(M / 4d), Br = min(Bc, d):"
    runs = f"runs {NAMES[auto.algorithm]} ({auto.algorithm})"
    if request.device.compute_capability != fa3_tiles.COMPUTE_CAPABILITY:
        return f"attention(q, k, v) {runs}, whose tile is not {formula}"
    other = "" if auto.algorithm == request.algorithm else f" Asked for is {NAMES[request.algorithm]} ({request.algorithm})."
    return f"By default attention {runs} here: {auto.reason}.{other} The tile is not {formula}"


def is_wide(problem: Problem) -> bool:
    """Whether only FlashAttention-2's forward takes such a d or d_v."""
    return max(problem.head_dim, problem.head_dim_v) > USUAL_HEAD_DIM


def show_tilings(report: dict[str, Any], fitted: str, problem: Problem) -> None:
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
