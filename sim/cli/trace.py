"""`cupyflash trace`: the tiles that the kernels move, one after the other, as a page that plays them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from cupyflash.attention import ALGORITHMS
from cupyflash.schedules import BACKWARD_ALGORITHMS, TileSchedule
from cupyflash.sim.cli.group import Found
from cupyflash.sim.cli.options import AS_JSON, MAX_SECONDS, NewFile, Request, examples, first_given, problem_options, refuse_longer
from cupyflash.sim.cli.show import NAMES, describe, say, show_table
from cupyflash.words import plural

EXAMPLES = examples(
    "cupyflash trace --seqlen 128 --sram 16KB --causal --html out.html",
    "cupyflash trace --backward --sram 32KB --html backward.html",
    "cupyflash trace --device H100-SXM --algorithms fa2,fa3 --html hopper.html",
    "cupyflash trace --algorithms fa1 --sram 8KB --head-dim 32 --json",
)
SIDE_BY_SIDE = ("standard", "fa1", "fa2")


@click.command(epilog=EXAMPLES)
@problem_options(seqlen=128, head_dim=64, backward=True)
@click.option(
    "--algorithms", metavar="NAME,NAME,...", help="Which to play side by side.  [default: --algorithm, or standard,fa1,fa2]"
)
@click.option("--html", metavar="FILE", type=NewFile((".html", ".htm")), help="Write the page there.")
@click.option(
    "--timeline-block",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Of which thread block of each launch --html and --json have a timeline.",
)
@click.option("--data-seed", default=0, show_default=True, type=click.IntRange(0), help="Draws q, k and v.")
@MAX_SECONDS
@AS_JSON
def trace(
    request: Request,
    algorithms: str | None,
    html: Path | None,
    timeline_block: int,
    data_seed: int,
    max_seconds: float,
    as_json: bool,
) -> None:
    """Play the tiles that kernels move.

    Runs the kernels on the simulated device, notes each access to a tensor, and puts them together to moves of tiles between
    HBM and the chip. --html writes one page, which needs no network, that plays the algorithms side by side with one clock of
    bytes, and has a timeline of one thread block of each launch. Without it, the moves are summed up; --json has all of it.

    Exit status 1 when the moves do not sum to the theory's bytes, or the machine finds a fault.
    """
    from cupyflash.sim import trace as traces
    from cupyflash.sim import trace_page
    from cupyflash.sim.estimate import seconds
    from cupyflash.sim.yardstick import draw_mask, draw_score

    schedules = [schedule_of(request, algorithm) for algorithm in asked_for(algorithms, request)]
    for schedule in schedules:
        schedule.kernels()
        traces.refuse_longer(schedule)
    block = timeline_block if html is not None or as_json else None
    most = max(kernel.grid for schedule in schedules for kernel in schedule.kernels())
    if timeline_block >= max(most, 1):
        why = f"{timeline_block}: no launch has more than {plural(most, 'thread block')}"
        raise click.BadParameter(why, param_hint="--timeline-block")
    refuse_longer(sum(map(seconds, schedules)), max_seconds)
    drawn = request.problem, data_seed, request.functions.given
    score, mask = draw_score(*drawn), draw_mask(*drawn)
    made = []
    for schedule in schedules:
        click.echo(f"executing {NAMES[schedule.algorithm]} on the simulated {request.device.name} ...", err=True)
        made.append(traces.trace(schedule, data_seed, score, mask, block))
    names = {**NAMES, "standard": "standard attention"}
    told = trace_page.report(made, [names[each.schedule.algorithm] for each in made], title_of(request))
    if html is not None:
        html.write_text(trace_page.page(told), encoding="utf-8")
        click.echo(f"wrote {html}", err=True)
    click.echo(json.dumps(told)) if as_json else show(told, request)
    for each in made:
        if not each.agrees:
            raise Found(f"the moves of {each.schedule.algorithm} do not sum to the theory's bytes")
        if each.problems:
            raise Found("; ".join(each.problems))


def asked_for(text: str | None, request: Request) -> list[str]:
    """--algorithms' value. BadParameter for a name that is none."""
    known = [*BACKWARD_ALGORITHMS] if request.backward else [name for name in ALGORITHMS if name != "auto"]
    one = first_given(("algorithm",))
    if text is None:
        return [request.algorithm] if one else [*SIDE_BY_SIDE]
    if one:
        raise click.UsageError("--algorithm and --algorithms cannot go together")
    names = [*dict.fromkeys(name.strip() for name in text.split(","))]
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{', '.join(known)}, with commas between, got {name!r}", param_hint="--algorithms")
    return names


def schedule_of(request: Request, algorithm: str) -> TileSchedule:
    """An algorithm's for the request."""
    return replace(request, algorithm=algorithm).schedule()


def title_of(request: Request) -> str:
    """The problem in one line."""
    return describe(request.problem) + ", backward" * request.backward


def show(told: dict[str, Any], request: Request) -> None:
    """Traces, summed up, as text."""
    say(told["title"], rest="  ")
    say(f"on a simulated {told['device']}: {request.device.sram_per_block:,} bytes of SRAM a block")
    for each in told["players"]:
        click.echo()
        blocks = sum(launch["blocks"] for launch in each["launches"])
        say(
            f"{each['name']} ({each['title']}), Br {each['block_rows']}, Bc {each['block_cols']}: "
            f"{plural(len(each['moves']), 'move')} by {plural(blocks, 'thread block')} of "
            f"{plural(len(each['launches']), 'launch', 'launches')}, {each['total_bytes']:,} bytes"
        )
        rows = []
        for at, tensor in enumerate(each["tensors"]):
            own = [move for move in each["moves"] if move[2] == at]
            counts = (sum(1 for move in own if move[3] == write) for write in (0, 1))
            rows.append((tensor["name"], *(f"{n:,}" for n in counts), f"{tensor['read_bytes']:,}", f"{tensor['write_bytes']:,}"))
        show_table(("tensor", "tiles read", "tiles written", "bytes read", "bytes written"), rows)
