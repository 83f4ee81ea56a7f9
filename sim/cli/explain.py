"""`cupyflash explain`: which tile FlashAttention-2's kernel runs a problem in, and why not another."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click

from cupyflash.multiprocessor import Multiprocessor
from cupyflash.schedules import fa2_tiles
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa2_tiles import Candidate
from cupyflash.sim import theory
from cupyflash.sim.cli.options import AS_JSON, Request, problem_options
from cupyflash.sim.cli.show import NAMES, describe, show_tiling, tiling_report

RUNNERS_UP = 5  # shown, unless --all


@click.command()
@problem_options(seqlen=4096, head_dim=64, only="fa2")
@click.option("--all", "everything", is_flag=True, help="Every runner-up and every rejected tile, not a few and a count.")
@AS_JSON
def explain(request: Request, everything: bool, as_json: bool) -> None:
    """Tell which tile FlashAttention-2's kernel takes, by which model, and why not another.

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
        "problem": asdict(problem),
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
        "candidates": [row(each, verdict(each, chosen)) for each in found],
        "traffic": traffic.as_dict(),
        "flops": problem.flops,
    }


def verdict(candidate: Candidate, chosen: Candidate) -> str:
    """What became of a candidate: chosen, slower for this problem, slower for any of its kind, or rejected."""
    if candidate.rejected:
        return "rejected"
    if candidate.tile == chosen.tile:
        return "chosen"
    return "finalist" if candidate.clocks < math.inf else "slower"


def row(candidate: Candidate, verdict: str) -> dict[str, Any]:
    """A candidate for JSON, with no more than is known of it."""
    known: dict[str, Any] = {
        "verdict": verdict,
        **asdict(candidate.tile),
        "warps": candidate.tile.warps,
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
    problem, device = request.problem, request.device
    by: dict[str, list[dict[str, Any]]] = {verdict: [] for verdict in ("chosen", "finalist", "slower", "rejected")}
    for each in report["candidates"]:
        by[each["verdict"]].append(each)
    (best,) = by["chosen"]
    click.echo(f"{NAMES[request.algorithm]}: {describe(problem)}")
    click.echo(
        f"{device.name}: {device.sm_count} multiprocessors of {device.sram_per_sm:,} bytes of SRAM ({device.sram_per_block:,} a "
        f"block) and {device.registers_per_sm:,} registers; {report['device']['fmas_a_clock']:.0f} FMAs of the products a clock\n"
    )
    show_tiling(report["tiling"])
    click.echo(
        "\nThe paper's sizes are for Algorithm 1, whose O goes to memory and back at each visit: large blocks save bytes. Here O\n"
        "stays in registers, Q is read once, and the size of K and V's blocks changes no byte: registers and occupancy decide.\n"
        "tiling=(Br, Bc) fixes both, in steps of 16; the rest of the tile is then chosen as below.\n"
    )
    finalists = by["chosen"] + by["finalist"]
    click.echo("The fastest of each Br, by a model's clocks (nothing is measured; lengths and heads choose between these):\n")
    click.echo("\n".join(_finalists(finalists, device.sm_count)))
    click.echo("\nClocks that one tile of the block (Br x Bc) takes of a multiprocessor, by part:\n")
    click.echo("\n".join(_parts(finalists)))
    click.echo(f"\nChosen: {_why(best, by['finalist'])}")
    shown = by["slower"] if everything else by["slower"][:RUNNERS_UP]
    if shown:
        click.echo(
            f"\nSlower on any length, or no faster with smaller blocks ({len(by['slower'])}), scores a clock of a multiprocessor:\n"
        )
        click.echo(
            "\n".join(f"  {_sizes(each)}  {each['scores_a_clock']:6.2f}  {_held(each)}; {each['bound_by']}" for each in shown)
        )
        if len(shown) < len(by["slower"]):
            click.echo(f"  and {len(by['slower']) - len(shown)} more (--all)")
    if by["rejected"]:
        click.echo(f"\nRejected ({len(by['rejected'])}):\n")
        if everything:
            click.echo("\n".join(f"  {_sizes(each)}  {_held(each)}: {each['reason']}" for each in by["rejected"]))
        else:
            reasons = Counter(each["reason"].split(":")[0] for each in by["rejected"])
            for reason, count in reasons.most_common():
                example = next(each for each in by["rejected"] if each["reason"].startswith(reason))
                click.echo(f"  {count:>4} for {reason}, as {_sizes(example).strip()} ({_held(example)}): {example['reason']}")
    total = report["traffic"]["total"]
    click.echo(
        f"\nHBM bytes by theory: {total['read_bytes']:,} read, {total['write_bytes']:,} written (cupyflash predict --algorithm fa2 "
        f"tells them by tensor);\nK and V of one head are read by all of its row blocks, so that most of these are L2's. "
        f"Arithmetic: {report['flops']:,} FLOP, nothing skipped"
    )


def _sizes(each: dict[str, Any]) -> str:
    return f"{each['block_rows']:>4} x {each['block_cols']:<4}"


def _held(each: dict[str, Any]) -> str:
    """A configuration beside its block sizes."""
    resident = f", {each['blocks']} blocks an SM" if "blocks" in each else ""
    q = ", Q in registers" if each["q_in_regs"] else ""
    return f"{each['warps']} warps of {each['warp_rows']} rows, {each['stages']} stages{q}{resident}"


def _finalists(rows: list[dict[str, Any]], sm_count: int) -> Iterator[str]:
    yield (
        f"  {'Br x Bc':<12}{'clocks':>13}{'waves':>8}{'warps':>7}{'rows':>6}{'stages':>8}{'Q in':>11}{'blocks/SM':>11}{'shared':>9}"
        f"{'registers':>11}  bound by"
    )
    for each in sorted(rows, key=lambda each: each["clocks"]):
        yield (
            f"  {_sizes(each):<12}{each['clocks']:>13,.0f}{each['waves']:>8.2f}{each['warps']:>7}{each['warp_rows']:>6}"
            f"{each['stages']:>8}{'registers' if each['q_in_regs'] else 'SRAM':>11}{each['blocks']:>11}{each['shared_bytes']:>9,}"
            f"{each['registers']:>11}  {each['bound_by']}"
        )


def _parts(rows: list[dict[str, Any]]) -> Iterator[str]:
    names = list(rows[0]["tile_clocks"])
    yield f"  {'Br x Bc':<12}" + "".join(f"{name:>10}" for name in names) + f"{'scores a clock':>17}"
    for each in sorted(rows, key=lambda each: each["clocks"]):
        clocks = "".join(f"{each['tile_clocks'][name]:>10,.0f}" for name in names)
        yield f"  {_sizes(each):<12}{clocks}{each['scores_a_clock']:>17.2f}"


def _why(best: dict[str, Any], others: list[dict[str, Any]]) -> str:
    what = f"{_sizes(best).strip()}, {_held(best)}, bound by {best['bound_by']}"
    if not others:
        return f"{what}: no other Br can be run."
    second = min(others, key=lambda each: each["clocks"])
    slower = second["clocks"] / best["clocks"] - 1 if best["clocks"] else 0.0
    waves = f"{best['waves']:.2f} waves against {second['waves']:.2f}"
    rates = f"{best['scores_a_clock']:.2f} scores a clock against {second['scores_a_clock']:.2f}"
    return f"{what}.\n{_sizes(second).strip()} is {slower:.0%} slower here: {waves}, {rates} of a full multiprocessor."
