"""`cupyflash time`: how long a kernel takes, by the clock that executes its machine code."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from cupyflash.device import Device
from cupyflash.sim.cli.options import AS_JSON, DEVICE, examples
from cupyflash.sim.cli.profile import ARGS, BLOCK, DEFINES, FILE, GRID, INCLUDES, SHARED, first_reason, preprocessed
from cupyflash.sim.cli.show import say, show_table
from cupyflash.sim.ptx import PtxError

EXAMPLES = examples(
    "cupyflash time k.cu --grid 4 --block 128 --args '[{\"shape\": [512]}, 512]'",
    "cupyflash time k.cu --grid 8 --block 32 --args spec.json --device T4 --json",
)


@click.command(epilog=EXAMPLES)
@FILE
@click.option("--kernel", metavar="NAME", help="The kernel's name, as in the PTX; not needed if there is only one.")
@GRID
@BLOCK
@ARGS
@DEFINES
@INCLUDES
@SHARED
@click.option("--mhz", type=click.FloatRange(0, min_open=True), help="The clock rate; by default the device's boost clock.")
@click.option("--cold", is_flag=True, help="The L2 was emptied before; else it has the arrays that fit into it.")
@DEVICE
@AS_JSON
def time(device: Device, as_json: bool, **given: Any) -> None:
    """Time a kernel on a device that is not there.

    FILE is CUDA C. Its machine code is executed for addresses and branches, and one multiprocessor is run clock by clock over it;
    a long loop is sampled. The result is a model's, never a measurement: docs/clock.md has its error on published kernels.
    Floating-point numbers are not computed: a branch on one is not taken. Needs NVIDIA's disassemblers (the extra `clock`).
    """
    from cupyflash.sim.clock.whole import Clock, launch_of
    from cupyflash.sim.profiling.arguments import read_arguments

    click.echo(f"executing the machine code of {given['file']} ...", err=True)
    try:
        launch = launch_of(
            given["file"],
            given["kernel"],
            (given["grid"], given["block"]),
            read_arguments(given["spec"]).values,
            device,
            shared_bytes=given["shared_bytes"],
            options=preprocessed(given["defines"], given["includes"]),
        )
        found = Clock(launch, device, given["mhz"], cold=given["cold"]).time()
    except PtxError as error:
        raise click.UsageError(f"{given['file']}: {first_reason(error)}") from error
    if as_json:
        report = asdict(found) | {"device": device.name, "kernel": launch.kernel.name, "binds": found.binds}
        click.echo(json.dumps(report | {"tflops": found.tflops}, indent=2))
        return
    say(f"{launch.kernel.name} on {device.name} at {found.mhz:,.0f} MHz, predicted: {found.seconds * 1e6:,.1f} us, "
        f"{found.tflops:,.2f} TFLOP/s; {found.binds} binds")  # fmt: skip
    say(f"{found.residents} blocks a multiprocessor at once, {found.rounds:,.1f} rounds; run: {found.sampled}")
    show_table(("limit", "share of the time"), [(name, f"{share:.0%}") for name, share in found.busy.items()])
