"""`cupyflash verify`: theory, replay and execution of one problem, and the numbers."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from cupyflash.basics import Report
from cupyflash.schedules import DecodeSchedule, TileSchedule
from cupyflash.sim.cli.group import Found
from cupyflash.sim.cli.models import show_executed
from cupyflash.sim.cli.request import ProblemRequest, refuse_longer, requested
from cupyflash.sim.cli.show import say, show_table, show_tiling, tell, tiling_report
from cupyflash.sim.cli.terminal import progress
from cupyflash.sim.l2 import L2
from cupyflash.words import plural

if TYPE_CHECKING:
    from cupyflash.sim.verification import Verification


@requested
def verify(request: ProblemRequest, seed: int | None, data_seed: int, l2: bool, max_seconds: float, as_json: bool) -> None:
    """Execute the kernels, compare counts."""
    from cupyflash.sim import verification
    from cupyflash.sim.numbers.yardstick import DROPPED, draw_mask, draw_score

    schedule = request.schedule()
    schedule.kernels()  # refuses what no kernel runs
    estimate = verification.estimated_seconds(schedule, seed)
    refuse_longer(estimate, max_seconds)

    score, mask = (draw(schedule.problem, data_seed, request.functions.given) for draw in (draw_score, draw_mask))
    drawn: Any = {"data_seed": data_seed, "score": score, "mask": mask, "dropped": request.dropout or DROPPED}
    with progress(estimate) as steps:
        on = f"on the simulated {request.device.name}"
        found = verification.verify(schedule, seed=seed, **drawn, l2=l2, progress=lambda doing: steps.begin(f"{doing} {on}"))
    report = report_of(request, schedule, found, seed)
    tell(report, as_json, show, request, found)
    if not found.good:
        raise Found("; ".join(faults(found)))


def report_of(request: ProblemRequest, schedule: TileSchedule, found: Verification, seed: int | None) -> Report:
    """A verification for JSON."""
    from cupyflash.sim.verification import V_MEANS

    return {
        **request.report,
        "device": {"name": request.device.name, "sram_bytes": request.device.sram_per_block},
        "tiling": tiling_report(schedule),
        "seed": seed,
        "traffic": {witness: traffic.as_dict() for witness, traffic in found.witnesses.items()},
        "differences": [asdict(difference) for difference in found.differences],
        "numbers": [
            {"v_mean": v_mean, "tensor": tensor} | asdict(numbers) | {"good": numbers.good}
            for v_mean, run in zip(V_MEANS, found.numbers, strict=True)
            for tensor, numbers in run.items()
        ],
        "findings": list(found.findings),
        **(
            {"splits": schedule.splits, "caches": list(found.caches)}
            if isinstance(schedule, DecodeSchedule) and request.cache
            else {}
        ),
        **({"l2": L2.of(request.device).as_dict() | found.l2.as_dict()} if found.l2 else {}),
        "good": found.good,
    }


def show(report: Report, request: ProblemRequest, found: Verification) -> None:
    """A verification as text."""
    device = request.device
    say(request.title, rest="  ")
    say(f"on a simulated {device.name}: {device.sram_per_block:,} bytes of SRAM a block")
    click.echo()
    if request.cache is None:
        show_tiling(report["tiling"])
    else:
        say(f"the keys of a sequence in {plural(report['splits'], 'split')}; {report['tiling']['used']['reason'].split(';')[0]}")
    click.echo()
    counts, sides = report["traffic"], {"read_bytes": "bytes read", "write_bytes": "bytes written"}
    tensors = dict.fromkeys(tensor for traffic in counts.values() for tensor in traffic if tensor != "total")
    rows = [
        (tensor, *(f"{traffic.get(tensor, {}).get(side, 0):,}" for side in sides for traffic in counts.values()))
        for tensor in (*tensors, "total")
    ]
    titles = ("", *(title for title in sides.values() for _ in counts))
    show_table(("tensor", *counts, *counts), rows, titles=titles)
    click.echo()
    heads = [name for tensor in found.numbers[0] for name in (tensor, "allowed")]
    runs = groupby(report["numbers"], key=lambda row: row["v_mean"])
    errors = [(f"V about {v_mean:g}", *(f"{row[one]:.2e}" for row in run for one in ("error", "allowed"))) for v_mean, run in runs]
    show_table(("largest error against float64", *heads), errors)
    if found.l2:
        click.echo()
        show_executed(report["l2"])
    for difference in found.differences:
        click.echo()
        say(
            f"{difference.tensor}: {difference.witness} has {difference.read_bytes:+,} bytes read and "
            f"{difference.write_bytes:+,} bytes written beside the theory",
            first="  ",
            rest="    ",
        )
    for finding in (*found.findings, *found.caches):
        click.echo()
        say(finding, first="  ", rest="    ")
    if found.good:
        click.echo()
        caches = "" if request.cache is None else "the caches are, bit for bit, as they should be; "
        say(f"theory == replay == executed, tensor by tensor; the numbers hold; {caches}the machine found nothing wrong")


def faults(found: Verification) -> list[str]:
    """The faults, in a few words each."""
    told = []
    if found.differences:
        tensors = dict.fromkeys(difference.tensor for difference in found.differences)
        told.append(f"the counts disagree in {', '.join(tensors)}")
    if found.wrong_tensors:
        told.append(f"the numbers are further off than allowed in {', '.join(found.wrong_tensors)}")
    if found.findings:
        told.append(f"the machine found {plural(len(found.findings), 'fault')} in the kernels")
    if found.caches:
        told.append("the caches are not as they should be")
    return told
