"""`cupyflash explain`: which tile FlashAttention-2's kernel runs a problem in, and why not another."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict
from typing import Any

import click

from cupyflash.multiprocessor import Multiprocessor
from cupyflash.schedules import fa2_tiles, plan
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa2_tiles import Candidate
from cupyflash.sim import theory
from cupyflash.sim.cli.options import AS_JSON, Request, examples, problem_options
from cupyflash.sim.cli.show import flat, say, show_table, show_tiling, tiling_report
from cupyflash.tiling import DoesNotFit
from cupyflash.words import plural

RUNNERS_UP = 5  # shown, unless --all

EXAMPLES = examples(
    "cupyflash explain --head-dim 128 --heads 16 --device H100-SXM",
    "cupyflash explain --seqlen 512 --dtype float32 --all",
    "cupyflash explain --tiling 64x32",
)


@click.command(epilog=EXAMPLES)
@problem_options(seqlen=4096, head_dim=64, algorithm=None)
@click.option("--all", "everything", is_flag=True, help="Every runner-up and every rejected tile, not a few and a count.")
@AS_JSON
def explain(request: Request, everything: bool, as_json: bool) -> None:
    """Tell which tile is run, and why.

    `attention` runs FlashAttention-2 by default, whose tile is not the paper's Bc = ceil(M / 4d): both are shown.
    Every configuration of the kernel is a candidate: it is rejected with a reason, or a model of one multiprocessor says how
    many clocks its tiles take. The times are the model's, none measured. Needs neither compiler nor GPU.
    """
    schedule = request.schedule()
    assert isinstance(schedule, Fa2Schedule)
    chosen = schedule.candidate
    blocks = None if request.tiling is None else (schedule.block_rows, schedule.block_cols)
    found = fa2_tiles.candidates(request.problem, request.device, blocks)
    report = explanation(schedule, chosen, found)
    click.echo(json.dumps(report, indent=2)) if as_json else show(report, request, everything)


def explanation(schedule: Fa2Schedule, chosen: Candidate, found: tuple[Candidate, ...]) -> dict[str, Any]:
    """The table with all that was to be chosen from, for JSON: bytes, clocks, scores a clock."""
    problem, device = schedule.problem, schedule.device
    traffic, sm = theory.traffic(schedule), Multiprocessor.like(device.compute_capability)
    return {
        "problem": flat(problem),
        "algorithm": schedule.algorithm,
        "device": {
            "name": device.name,
            "sm_count": device.sm_count,
            "sram_per_block": device.sram_per_block,
            "sram_per_sm": device.sram_per_sm,
            "registers_per_sm": device.registers_per_sm,
            "fmas_a_clock": fa2_tiles.fma_rate(problem, device),
            "float32_fmas_a_clock": sm.fma_lanes,
        },
        "tiling": tiling_report(schedule),
        "fa1_tiling": fa1_tiling(schedule),
        "candidates": [row(each, verdict(each, chosen)) for each in found],
        "traffic": traffic.as_dict(),
        "flops": problem.flops,
    }


def fa1_tiling(schedule: Fa2Schedule) -> dict[str, Any] | None:
    """What Algorithm 1's kernel makes of the paper's formula for the same problem; None where nothing fits."""
    try:
        return asdict(plan(schedule.problem, schedule.device, "fa1").tiling.used)
    except DoesNotFit:
        return None


def verdict(candidate: Candidate, chosen: Candidate) -> str:
    """What became of a candidate: chosen, slower for this problem, slower for any of its kind, or rejected."""
    if candidate.rejected:
        return "rejected"
    if candidate.config == chosen.config:
        return "chosen"
    return "finalist" if candidate.clocks < math.inf else "slower"


def row(candidate: Candidate, verdict: str) -> dict[str, Any]:
    """A candidate for JSON, with no more than is known of it."""
    known: dict[str, Any] = {
        "verdict": verdict,
        **asdict(candidate.config),
        "warps": candidate.config.warps,
        "shared_bytes": candidate.shared_bytes,
        "registers": candidate.registers,
    }
    if candidate.rejected:
        del known["blocks"]  # which come after
        return known | {"reason": candidate.rejected}
    known |= {"tile_clocks": dict(candidate.parts), "bound_by": candidate.bound, "scores_a_clock": candidate.rate}
    if candidate.clocks < math.inf:
        known |= {"clocks": candidate.clocks, "waves": candidate.waves}
    return known


def show(report: dict[str, Any], request: Request, everything: bool) -> None:
    """An explanation as text."""
    device = request.device
    by: dict[str, list[dict[str, Any]]] = {verdict: [] for verdict in ("chosen", "finalist", "slower", "rejected")}
    for each in report["candidates"]:
        by[each["verdict"]].append(each)
    (best,) = by["chosen"]
    say(request.title, rest="  ")
    say(
        f"{device.name}: {device.sm_count} multiprocessors of {device.sram_per_sm:,} bytes of SRAM ({device.sram_per_block:,} a "
        f"block) and {device.registers_per_sm:,} registers; {report['device']['fmas_a_clock']:.0f} FMAs of the products a clock"
    )
    show_tilings(report)
    finalists = sorted(by["chosen"] + by["finalist"], key=lambda each: each["clocks"])
    say("The fastest of each Br, by a model's clocks (nothing is measured; lengths and heads choose between these):")
    show_finalists(finalists)
    click.echo()
    say(f"Chosen: {_what(best)}.")
    if by["finalist"]:
        say(_why(best, by["finalist"]))
    shown = by["slower"] if everything else by["slower"][:RUNNERS_UP]
    if shown:
        click.echo()
        say(f"Slower on any length, or no faster with smaller blocks ({len(by['slower'])}), scores a clock of a multiprocessor:")
        click.echo()
        for each in shown:
            say(f"{_held(each)}; {each['bound_by']}", first=f"  {_sizes(each)}  {each['scores_a_clock']:6.2f}  ", rest=" " * 8)
        if len(shown) < len(by["slower"]):
            say(f"and {len(by['slower']) - len(shown)} more (--all)", first="  ")
    if by["rejected"]:
        show_rejected(by["rejected"], everything)
    total = report["traffic"]["total"]
    click.echo()
    say(
        f"HBM bytes by theory: {total['read_bytes']:,} read, {total['write_bytes']:,} written (cupyflash predict tells them by "
        "tensor); K and V of one head are read by all of its row blocks, so that most of these are L2's. "
        f"Arithmetic: {report['flops']:,} FLOP, nothing skipped"
    )


def show_tilings(report: dict[str, Any]) -> None:
    """The paper's block sizes beside those that are taken, and why they are others."""
    tiling = report["tiling"]
    stages = {
        "the paper's formula": tiling["paper"],
        "fa1, fitted to its kernel": report["fa1_tiling"],
        "fa2, by the model below": tiling["fitted"],
    }
    if tiling["used"] != tiling["fitted"]:
        stages["fa2, used here"] = tiling["used"]
    click.echo()
    say(
        "attention(q, k, v) runs FlashAttention-2 (fa2), whose tile is not the paper's Bc = ceil(M / 4d), Br = min(Bc, d): that "
        'formula is FlashAttention\'s, Algorithm 1, which algorithm="fa1" runs.'
    )
    click.echo()
    show_tiling(stages)
    click.echo()
    say(
        "Algorithm 1's O goes to memory and back at each visit: large blocks save bytes. FlashAttention-2's O stays in registers, "
        "Q is read once, and the size of K and V's blocks changes no byte: registers and occupancy decide. tiling=(Br, Bc) fixes "
        "both, in steps of 16; the rest of the tile is then chosen as below."
    )
    click.echo()


def show_finalists(rows: list[dict[str, Any]]) -> None:
    """The fastest of each Br with what they take, and the clocks of one of their tiles by part."""
    heads = ("Br x Bc", "clocks", "waves", "warps", "rows", "stages", "Q in", "blocks", "shared", "registers", "bound by")
    cells = [
        (
            _sizes(each),
            f"{each['clocks']:,.0f}",
            f"{each['waves']:.2f}",
            str(each["warps"]),
            str(each["warp_rows"]),
            str(each["stages"]),
            "regs" if each["q_in_regs"] else "SRAM",
            str(each["blocks"]),
            f"{each['shared_bytes']:,}",
            str(each["registers"]),
            each["bound_by"],
        )
        for each in rows
    ]
    click.echo()
    show_table(heads, cells, left=(0, 10))
    click.echo()
    say("rows: of a warp; blocks: on a multiprocessor; shared: bytes of a block; registers: of a thread", first="  ", rest="  ")
    click.echo()
    say("Clocks that one tile of the block (Br x Bc) takes of a multiprocessor, by part:")
    click.echo()
    names = list(rows[0]["tile_clocks"])
    parts = [
        (_sizes(each), *(f"{each['tile_clocks'][name]:,.0f}" for name in names), f"{each['scores_a_clock']:.2f}") for each in rows
    ]
    show_table(("Br x Bc", *names, "scores a clock"), parts)


def show_rejected(rows: list[dict[str, Any]], everything: bool) -> None:
    """What was rejected, and why: a count and an example of each reason, or all of it."""
    click.echo(f"\nRejected ({len(rows)}):\n")
    if everything:
        for each in rows:
            say(f"{_held(each)}: {each['reason']}", first=f"  {_sizes(each)}  ", rest=" " * 8)
        return
    for reason, count in Counter(each["reason"].split(":")[0] for each in rows).most_common():
        example = next(each for each in rows if each["reason"].startswith(reason))
        told = f"{count} for {reason}, as {_sizes(example).strip()} ({_held(example)}): {example['reason']}"
        say(told, first="  ", rest=" " * 6)


def _sizes(each: dict[str, Any]) -> str:
    return f"{each['block_rows']:>4} x {each['block_cols']:<4}"


def _held(each: dict[str, Any]) -> str:
    """A configuration beside its block sizes."""
    resident = f", {plural(each['blocks'], 'block')} an SM" if "blocks" in each else ""
    q = ", Q in registers" if each["q_in_regs"] else ""
    return f"{plural(each['warps'], 'warp')} of {each['warp_rows']} rows, {plural(each['stages'], 'stage')}{q}{resident}"


def _what(best: dict[str, Any]) -> str:
    return f"{_sizes(best).strip()}, {_held(best)}, bound by {best['bound_by']}"


def _why(best: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """The next fastest, and how much slower it is."""
    second = min(others, key=lambda each: each["clocks"])
    slower = second["clocks"] / best["clocks"] - 1 if best["clocks"] else 0.0
    waves = f"{best['waves']:.2f} waves against {second['waves']:.2f}"
    rates = f"{best['scores_a_clock']:.2f} scores a clock against {second['scores_a_clock']:.2f}"
    return f"{_sizes(second).strip()} is {slower:.0%} slower here: {waves}, {rates} of a full multiprocessor."
