"""The output of `cupyflash explain` on FlashAttention-2's tile: what could be run, why the rest could not, and which is fastest."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict

import click

from cupyflash.basics import Report
from cupyflash.schedules import TileSchedule, fa2_tiles
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa2_tiles import Fa2Candidate
from cupyflash.sim.cli.request import ProblemRequest
from cupyflash.sim.cli.show import say, show_table
from cupyflash.words import plural

RUNNERS_UP = 5  # shown, unless --all
FITTED = "by the model below"


def explanation(schedule: TileSchedule, request: ProblemRequest) -> Report:
    """The table with all that was to be chosen from, for JSON: bytes, clocks, scores a clock."""
    assert isinstance(schedule, Fa2Schedule)
    problem, device, chosen = schedule.problem, schedule.device, schedule.candidate
    blocks = None if request.tiling is None else (schedule.block_rows, schedule.block_cols)
    return {
        "candidates": [row(each, verdict(each, chosen)) for each in fa2_tiles.candidates(problem, device, blocks)],
    }


def verdict(candidate: Fa2Candidate, chosen: Fa2Candidate) -> str:
    """The verdict on a candidate: chosen, slower for this problem, slower for any of its kind, or rejected."""
    if candidate.rejected:
        return "rejected"
    if candidate.config == chosen.config:
        return "chosen"
    return "finalist" if candidate.clocks < math.inf else "slower"


def row(candidate: Fa2Candidate, verdict: str) -> Report:
    """A candidate for JSON, with no more than is known of it."""
    known: Report = {
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


def show(report: Report, request: ProblemRequest, everything: bool) -> None:
    """Show the verdict on every candidate as text."""
    by: dict[str, list[Report]] = {verdict: [] for verdict in ("chosen", "finalist", "slower", "rejected")}
    for each in report["candidates"]:
        by[each["verdict"]].append(each)
    (best,) = by["chosen"]
    say(
        "Algorithm 1's O goes to memory and back at each visit: large blocks save bytes. FlashAttention-2's O stays in registers, "
        "Q is read once, and the size of K and V's blocks changes no byte: registers and occupancy decide. tiling=(Br, Bc) fixes "
        "both, in steps of 16; the rest of the tile is then chosen as below."
    )
    if best["col_warps"] > 1:
        say(
            f"{best['col_warps']} warps share their rows, since O has more columns than a warp's registers: each has half of d and "
            "d_v. S is the sum of what both make, which they exchange through shared memory: each product is made once, "
            "exponentials twice."
        )
    click.echo()
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


def show_finalists(rows: list[Report]) -> None:
    """Print the fastest of each Br with their needs, and the clocks of one of their tiles by unit."""
    heads = ("Br x Bc", "clocks", "waves", "warps", "rows", "stages", "Q in", "blocks", "shared", "registers", "bound by")
    cells = [
        (
            _sizes(each),
            f"{each['clocks']:,.0f}",
            f"{each['waves']:.2f}",
            f"{each['warps']}",
            f"{each['warp_rows']}",
            f"{each['stages']}",
            "regs" if each["q_in_regs"] else "SRAM",
            f"{each['blocks']}",
            f"{each['shared_bytes']:,}",
            f"{each['registers']}",
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


def show_rejected(rows: list[Report], everything: bool) -> None:
    """Show rejected candidates: a count and an example of each reason, or all of them."""
    click.echo(f"\nRejected ({len(rows)}):\n")
    if everything:
        for each in rows:
            say(f"{_held(each)}: {each['reason']}", first=f"  {_sizes(each)}  ", rest=" " * 8)
        return
    for reason, count in Counter(each["reason"].split(":")[0] for each in rows).most_common():
        example = next(each for each in rows if each["reason"].startswith(reason))
        told = f"{count} for {reason}, as {_sizes(example).strip()} ({_held(example)}): {example['reason']}"
        say(told, first="  ", rest=" " * 6)


def _sizes(each: Report) -> str:
    return f"{each['block_rows']:>4} x {each['block_cols']:<4}"


def _held(each: Report) -> str:
    """A configuration beside its block sizes."""
    resident = f", {plural(each['blocks'], 'block')} an SM" if "blocks" in each else ""
    q = ", Q in registers" if each["q_in_regs"] else ""
    shared = f", {each['col_warps']} to the same" if each["col_warps"] > 1 else ""
    return f"{plural(each['warps'], 'warp')} of {each['warp_rows']} rows{shared}, {plural(each['stages'], 'stage')}{q}{resident}"


def _what(best: Report) -> str:
    return f"{_sizes(best).strip()}, {_held(best)}, bound by {best['bound_by']}"


def _why(best: Report, others: list[Report]) -> str:
    """The next fastest, and how much slower it is."""
    second = min(others, key=lambda each: each["clocks"])
    slower = second["clocks"] / best["clocks"] - 1 if best["clocks"] else 0.0
    waves = f"{best['waves']:.2f} waves against {second['waves']:.2f}"
    rates = f"{best['scores_a_clock']:.2f} scores a clock against {second['scores_a_clock']:.2f}"
    return f"{_sizes(second).strip()} is {slower:.0%} slower here: {waves}, {rates} of a full multiprocessor."
