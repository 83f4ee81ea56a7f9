"""`cupyflash inspect`: what the kernels take of a multiprocessor."""

from __future__ import annotations

import json
from typing import Any

import click

from cupyflash.sim.cli.options import AS_JSON, Request, problem_options
from cupyflash.sim.cli.show import show_tiling, tiling_report


@click.command()
@problem_options(seqlen=1024, head_dim=64, backward=True)
@AS_JSON
def inspect(request: Request, as_json: bool) -> None:
    """Compile the kernels to a device's machine code: registers, stack, spills, shared memory, occupancy.

    Needs the compiler (NVRTC), no GPU. Figures are a thread's (registers, stack, spills) or a block's (shared memory).
    """
    from cupyflash.resources import resources

    schedule, device = request.schedule(), request.device
    kernels = schedule.kernels()
    found = resources(kernels, device.compute_capability)
    report: dict[str, Any] = {
        **request.report,
        "device": {
            "name": device.name,
            "compute_capability": device.compute_capability,
            "sm_count": device.sm_count,
            "registers_per_sm": device.registers_per_sm,
            "sram_per_sm": device.sram_per_sm,
        },
        "tiling": tiling_report(schedule),
        "kernels": [
            needs.report(device) | {"grid": kernel.grid, "source": kernel.source, "constants": dict(kernel.constants)}
            for kernel, needs in zip(kernels, found, strict=True)
        ],
    }
    click.echo(json.dumps(report, indent=2)) if as_json else show(report, request)


def show(report: dict[str, Any], request: Request) -> None:
    """An inspection as text."""
    device = request.device
    click.echo(request.title)
    click.echo(
        f"{device.name}: {device.sm}, {device.registers_per_sm:,} registers and {device.sram_per_sm:,} bytes of SRAM a "
        f"multiprocessor, {device.sm_count} of them\n"
    )
    show_tiling(report["tiling"])
    click.echo(
        f"\n  {'kernel':<20}{'blocks':>9}{'threads':>9}{'registers':>11}{'stack':>7}{'spills':>8}{'shared':>9}"
        f"{'blocks an SM':>14}{'occupancy':>11}  limited by"
    )
    for row in report["kernels"]:
        click.echo(
            f"  {row['name']:<20}{row['grid']:>9,}{row['threads']:>9}{row['registers']:>11}{row['stack_bytes']:>7}"
            f"{row['spill_bytes']:>8}{row['shared_bytes']:>9,}{row['blocks_per_sm']:>14}{row['occupancy']:>11.1%}  "
            f"{', '.join(row['limited_by'])}"
        )
    if any(row["stack_bytes"] or row["spill_bytes"] for row in report["kernels"]):
        click.echo("\nstack and spills are local memory: traffic that no count here knows of")
