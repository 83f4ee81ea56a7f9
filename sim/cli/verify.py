"""`cupyflash verify`: theory, replay and execution of one problem, and the numbers."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from cupyflash.schedules import TileSchedule
from cupyflash.sim.cli.options import AS_JSON, Request, problem_options
from cupyflash.sim.cli.show import show_tiling, tiling_report
from cupyflash.sim.estimate import seconds
from cupyflash.simulated import DEFAULT_SECONDS

if TYPE_CHECKING:
    from cupyflash.sim.verification import Verification


@click.command()
@problem_options(seqlen=256, head_dim=64, backward=True)
@click.option("--seed", type=click.IntRange(0), help="Run warps one by one in a random order drawn from this.")
@click.option("--data-seed", default=0, show_default=True, type=click.IntRange(0), help="Draws q, k and v.")
@click.option(
    "--max-seconds",
    default=DEFAULT_SECONDS,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Refuse what is estimated to take longer.",
)
@AS_JSON
def verify(request: Request, seed: int | None, data_seed: int, max_seconds: float, as_json: bool) -> None:
    """Execute the real kernels on the simulated device: the bytes of theory, replay and execution, and the numbers.

    Exit status 1, with the difference per tensor, when the counts disagree, when a number is further from float64 than
    twice the same computation done plainly in the low precision, or when the machine finds a fault in a kernel.
    """
    from cupyflash.sim import verification

    schedule = request.schedule()
    schedule.kernels()  # refuses what no kernel runs
    estimate = len(verification.V_MEANS) * seconds(schedule, seeded=seed is not None)
    if estimate > max_seconds:
        raise click.ClickException(
            f"this is estimated to take {estimate:,.0f} s, over --max-seconds {max_seconds:g}: make it smaller, or allow it"
        )

    def progress(doing: str) -> None:
        click.echo(f"{doing} on the simulated {request.device.name} (about {estimate:.1f} s in all) ...", err=True)

    found = verification.verify(schedule, seed=seed, data_seed=data_seed, progress=progress)
    report = report_of(request, schedule, found, seed)
    click.echo(json.dumps(report, indent=2)) if as_json else show(report, request, found)
    if not found.good:
        raise click.ClickException("; ".join(faults(found)))


def report_of(request: Request, schedule: TileSchedule, found: Verification, seed: int | None) -> dict[str, Any]:
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
        "good": found.good,
    }


def show(report: dict[str, Any], request: Request, found: Verification) -> None:
    """A verification as text."""
    device = request.device
    click.echo(request.title)
    click.echo(f"on a simulated {device.name}: {device.sram_per_block:,} bytes of SRAM a block\n")
    show_tiling(report["tiling"])
    counts = report["traffic"]
    width = 16 * len(counts)
    click.echo(f"\n  {'':8}{'bytes read':>{width}}  {'bytes written':>{width}}")
    names = "".join(f"{witness:>16}" for witness in counts)
    click.echo(f"  {'tensor':8}{names}  {names}")
    nothing = {"read_bytes": 0, "write_bytes": 0}
    tensors = dict.fromkeys(tensor for traffic in counts.values() for tensor in traffic if tensor != "total")
    for tensor in (*tensors, "total"):
        rows = [traffic.get(tensor, nothing) for traffic in counts.values()]
        cells = ("".join(f"{row[side]:>16,}" for row in rows) for side in nothing)
        click.echo(f"  {tensor:8}" + "  ".join(cells))
    click.echo(
        f"\n  {'largest error against float64':<32}" + "".join(f"{tensor:>12}{'allowed':>12}" for tensor in found.numbers[0])
    )
    for v_mean, run in groupby(report["numbers"], key=lambda row: row["v_mean"]):
        click.echo(f"  V about {v_mean:<24g}" + "".join(f"{row['error']:>12.2e}{row['allowed']:>12.2e}" for row in run))
    for difference in found.differences:
        click.echo(
            f"\n  {difference.tensor}: {difference.witness} has {difference.read_bytes:+,} bytes read and "
            f"{difference.write_bytes:+,} bytes written beside the theory"
        )
    for finding in found.findings:
        click.echo(f"\n  {finding}")
    if found.good:
        click.echo("\ntheory == replay == executed, tensor by tensor; the numbers hold; the machine found nothing wrong")


def faults(found: Verification) -> list[str]:
    """What is wrong, in a few words each."""
    told = []
    if found.differences:
        tensors = dict.fromkeys(difference.tensor for difference in found.differences)
        told.append(f"the counts disagree in {', '.join(tensors)}")
    if found.wrong_tensors:
        told.append(f"the numbers are further off than allowed in {', '.join(found.wrong_tensors)}")
    if found.findings:
        told.append(f"the machine found {len(found.findings)} faults in the kernels")
    return told
