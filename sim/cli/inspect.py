"""`cupyflash inspect`: the kernels' needs on a multiprocessor."""

from __future__ import annotations

import click

from cupyflash.basics import Report
from cupyflash.schedules.fa3 import Fa3Schedule
from cupyflash.sim.cli.request import ProblemRequest, requested
from cupyflash.sim.cli.show import say, show_table, show_tiling, taken, tell, tiling_report
from cupyflash.sim.cli.terminal import tracked


@requested
def inspect(request: ProblemRequest, as_json: bool) -> None:
    """Show registers, spills, occupancy."""
    from cupyflash.launch.resources import resources

    schedule, device = request.schedule(), request.device
    kernels = schedule.kernels()
    found = resources(tracked(kernels, "compiling the kernels"), device.compute_capability)
    report: Report = {
        **request.report,
        "device": taken(device, "name", "compute_capability", "sm_count", "registers_per_sm", "sram_per_sm"),
        "tiling": tiling_report(schedule),
        "kernels": [
            needs.report(device) | {"grid": kernel.grid, "source": kernel.source, "constants": dict(kernel.constants)}
            for kernel, needs in zip(kernels, found, strict=True)
        ],
    }
    if isinstance(schedule, Fa3Schedule):
        report["roles"] = schedule.config.roles
    tell(report, as_json, show, request)


def show(report: Report, request: ProblemRequest) -> None:
    """An inspection as text."""
    device = request.device
    say(request.title, rest="  ")
    say(
        f"{device.name}: {device.sm}, {device.registers_per_sm:,} registers and {device.sram_per_sm:,} bytes of SRAM a "
        f"multiprocessor, {device.sm_count} of them"
    )
    click.echo()
    show_tiling(report["tiling"])
    click.echo()
    heads = ("kernel", "blocks", "threads", "registers", "stack", "spills", "shared", "an SM", "occupancy", "limited by")
    rows = [
        (
            row["name"],
            f"{row['grid']:,}",
            f"{row['threads']}",
            f"{row['registers']}",
            f"{row['stack_bytes']}",
            f"{row['spill_bytes']}",
            f"{row['shared_bytes']:,}",
            f"{row['blocks_per_sm']}",
            f"{row['occupancy']:.1%}",
            ", ".join(row["limited_by"]),
        )
        for row in report["kernels"]
    ]
    show_table(heads, rows, left=(0, 9))
    click.echo()
    say("registers, stack and spills (bytes) are a thread's; shared: bytes of a block; an SM: blocks that share a multiprocessor")
    if "roles" in report:
        roles = [f"{role} {each['registers']} ({each['threads']} threads)" for role, each in report["roles"].items()]
        say(f"registers are those at launch, which setmaxnreg then moves between the roles: {', '.join(roles)}")
    if any(row["stack_bytes"] or row["spill_bytes"] for row in report["kernels"]):
        say("stack and spills are local memory: traffic that no count here knows of")
    for remark in dict.fromkeys(remark for row in report["kernels"] for remark in row["remarks"]):
        say(f"the tensor cores wait: {remark}")
