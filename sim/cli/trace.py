"""`cupyflash trace`: the tiles that the kernels move, one after the other, as a page that plays them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from cupyflash.basics import Report
from cupyflash.device import Device
from cupyflash.request.problem import Problem
from cupyflash.schedules import ALGORITHMS, BACKWARD_ALGORITHMS, TileSchedule
from cupyflash.sim import files
from cupyflash.sim.cli.group import Found
from cupyflash.sim.cli.options import first_given
from cupyflash.sim.cli.request import ProblemRequest, refuse_longer, requested
from cupyflash.sim.cli.show import describe, describe_cache, say, show_table
from cupyflash.sim.cli.terminal import progress
from cupyflash.sim.names import NAMES
from cupyflash.sim.numbers.gathered import one_call
from cupyflash.words import plural

BACKWARD, DETERMINISTIC = "backward", "deterministic"  # behind an algorithm's name
SIDE_BY_SIDE = ("standard", "fa1", "fa2")


@requested
def trace(
    request: ProblemRequest,
    algorithms: str | None,
    html: Path | None,
    timeline_block: int | None,
    data_seed: int,
    max_seconds: float,
    as_json: bool,
) -> None:
    """Play the tiles that kernels move."""
    from cupyflash.sim import trace as traces
    from cupyflash.sim.estimate import seconds
    from cupyflash.sim.host_memory import require_room, verified
    from cupyflash.sim.numbers.yardstick import draw_mask, draw_score
    from cupyflash.sim.trace import page

    asked = asked_for(algorithms, request)
    schedules = [each.schedule() for each in asked]
    for schedule in schedules:
        schedule.kernels()
        traces.refuse_longer(schedule)
    block = 0 if timeline_block is None and html is not None else timeline_block
    most = max(kernel.grid for schedule in schedules for kernel in schedule.kernels())
    if (block or 0) >= max(most, 1):
        why = f"{block}: no launch has more than {plural(most, 'thread block')}"
        raise click.BadParameter(why, param_hint="--timeline-block")
    estimate = sum(map(seconds, schedules))
    refuse_longer(estimate, max_seconds)
    require_room(max(map(verified, schedules)), "this")
    names, made = names_of(asked), []
    with progress(estimate) as steps:
        for name, schedule in zip(names, schedules, strict=True):
            steps.begin(f"executing {name} on the simulated {request.device.name}")
            drawn = schedule.problem, data_seed, request.functions.given
            made.append(traces.trace(schedule, data_seed, draw_score(*drawn), draw_mask(*drawn), block))
    told = page.report(made, names, title_of(request, asked))
    if html is not None:
        files.write(html, page.page(told, choices_of(request, asked, names)))
        click.echo(f"wrote {html}", err=True)
    click.echo(json.dumps(told)) if as_json else show(told, request)
    for name, each in zip(names, made, strict=True):
        if not each.agrees:
            raise Found(f"the moves of {name} do not sum to the theory's bytes")
        if each.problems:
            raise Found("; ".join(each.problems))


def choices_of(request: ProblemRequest, asked: Sequence[ProblemRequest], names: Sequence[str]) -> Report | None:
    """Other sizes for the page, None if there are none."""
    from cupyflash.sim.trace.choices import choices

    if request.cache is not None or any(each.backward for each in asked):
        return None

    def planner(number: int, problem: Problem, device: Device) -> TileSchedule:
        return replace(asked[number], problem=problem, device=device).schedule()

    return choices(request.problem, request.device, names, planner, describe)


def asked_for(text: str | None, request: ProblemRequest) -> list[ProblemRequest]:
    """--algorithms' value, each as a request of its own. BadParameter for a name that is none."""
    one = first_given(("algorithm",))
    if text is None:
        if one or request.cache is not None:
            return [request_of(request.algorithm, request)]
        return able([request_of(name, request) for name in SIDE_BY_SIDE])
    if one:
        raise click.UsageError("--algorithm and --algorithms cannot go together")
    known, found = known_names(request), dict[tuple[str, bool, bool], ProblemRequest]()
    for name in (name.strip() for name in text.split(",")):
        if name not in known:
            raise click.BadParameter(f"{', '.join(known)}, with commas between, got {name!r}", param_hint="--algorithms")
        own = request_of(name, request)
        found.setdefault((own.algorithm, own.backward, own.deterministic), own)
    if request.lse and all(each.backward for each in found.values()):
        raise click.UsageError("--lse is for the forward pass: a backward reads L")
    return [*found.values()]


def able(requests: list[ProblemRequest]) -> list[ProblemRequest]:
    """The requests that have kernels for the problem; stderr has the reason of others. ValueError where none has."""
    found, reasons = [], []
    for each in requests:
        try:
            each.schedule().kernels()
            found.append(each)
        except ValueError as error:
            reasons.append(error)
    if not found:
        raise reasons[-1]
    for reason in reasons:
        click.echo(f"left out: {reason}", err=True)
    return found


def known_names(request: ProblemRequest) -> list[str]:
    """The names that --algorithms may have. A cache has no gradients; with --backward, names without it are backwards too."""
    forward = list(ALGORITHMS)
    if request.cache is not None:
        return forward
    backward = [*(f"{name}-{BACKWARD}" for name in BACKWARD_ALGORITHMS), f"fa2-{BACKWARD}-{DETERMINISTIC}"]
    return [*(BACKWARD_ALGORITHMS if request.backward else forward), *backward]


def request_of(name: str, request: ProblemRequest) -> ProblemRequest:
    """An algorithm's. ValueError for one that cannot do what decoding does."""
    algorithm, *how = name.split("-")
    if request.cache is not None:
        if algorithm == "decode":
            return request
        return replace(request, algorithm=algorithm, problem=one_call(request.decode_schedule()), cache=None, num_splits=None)
    backward = request.backward or BACKWARD in how
    deterministic = request.deterministic or DETERMINISTIC in how
    return replace(request, algorithm=algorithm, backward=backward, deterministic=deterministic, lse=request.lse and not backward)


def names_of(asked: Sequence[ProblemRequest]) -> list[str]:
    """The players' names; a backward says that it is one where others are not."""
    names, mixed = {**NAMES, "standard": "standard attention"}, len({each.backward for each in asked}) > 1
    return [
        "deterministic " * each.deterministic + names[each.algorithm] + "'s backward" * (mixed and each.backward) for each in asked
    ]


def title_of(request: ProblemRequest, asked: Sequence[ProblemRequest]) -> str:
    """The problem in one line."""
    if request.cache is not None:
        return describe_cache(request.problem, request.cache)
    return describe(request.problem) + ", backward" * all(each.backward for each in asked)


def show(told: Report, request: ProblemRequest) -> None:
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
