"""`cupyflash devices`: the catalogue, the GPU at hand, and the device on which NumPy arrays run."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from cupyflash.basics import Report
from cupyflash.device import Device
from cupyflash.launch.simulated import default_device
from cupyflash.sim.cli.show import detected, say, show_table

HEADS = ("device", "cc", "SRAM a block", "SRAM an SM", "SMs", "L2 MB", "HBM GB/s", "f16 TFLOP/s")


def devices(as_json: bool) -> None:
    """List devices, and the GPU at hand."""
    catalogue, gpu = Device.catalogue(), detected()
    wrong: ValueError | None = None
    try:
        simulated = default_device()
    except ValueError as error:  # then the list of what is allowed is wanted all the more
        wrong = error
    if as_json:
        if wrong:
            raise wrong
        report = {
            "catalogue": [device_report(device) for device in catalogue],
            "detected": device_report(gpu) if gpu else None,
            "simulated": device_report(simulated),
        }
        click.echo(json.dumps(report, indent=2))
        return
    own = [] if wrong or simulated in catalogue else [simulated]
    show_table(HEADS, [cells(device) for device in (*catalogue, *own, *([gpu] if gpu else []))])
    click.echo()
    say(f"detected: {gpu.name if gpu else 'no GPU'}")
    if wrong:
        raise wrong
    say(f"NumPy arrays run on the simulated {simulated.name}")


def device_report(device: Device) -> Report:
    return asdict(device) | {"tensor_peak": dict(device.tensor_peak)}


def cells(device: Device) -> tuple[str, ...]:
    """A device's line of the table."""
    return (
        device.name,
        "{}.{}".format(*device.compute_capability),
        f"{device.sram_per_block:,}",
        f"{device.sram_per_sm:,}",
        str(device.sm_count),
        f"{device.l2_bytes / 2**20:.0f}",
        f"{device.hbm_bandwidth / 1e9:.0f}" if device.hbm_bandwidth else "-",
        f"{device.tensor_peak['float16'] / 1e12:.0f}" if "float16" in device.tensor_peak else "-",
    )
