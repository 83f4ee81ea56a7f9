"""`cupyflash devices`: the catalogue, and the GPU at hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from cupyflash.device import Device
from cupyflash.sim.cli.options import AS_JSON
from cupyflash.sim.cli.show import detected
from cupyflash.simulated import DEFAULT_DEVICE


@click.command()
@AS_JSON
def devices(as_json: bool) -> None:
    """List the catalogue, and the GPU that is detected."""
    catalogue, gpu = Device.catalogue(), detected()
    if as_json:
        rows = [device_report(device) for device in catalogue]
        click.echo(json.dumps({"catalogue": rows, "detected": device_report(gpu) if gpu else None}, indent=2))
        return
    click.echo(
        f"{'device':<12}{'cc':>5}{'SRAM a block':>14}{'SRAM an SM':>12}{'SMs':>5}{'L2 MB':>7}{'HBM GB/s':>10}{'f16 TFLOP/s':>13}"
    )
    for device in (*catalogue, *([gpu] if gpu else [])):
        bandwidth = f"{device.hbm_bandwidth / 1e9:.0f}" if device.hbm_bandwidth else "-"
        peak = f"{device.tensor_peak['float16'] / 1e12:.0f}" if "float16" in device.tensor_peak else "-"
        click.echo(
            f"{device.name:<12}{'{}.{}'.format(*device.compute_capability):>5}{device.sram_per_block:>14,}"
            f"{device.sram_per_sm:>12,}{device.sm_count:>5}{device.l2_bytes / 2**20:>7.0f}{bandwidth:>10}{peak:>13}"
        )
    click.echo(f"\ndetected: {gpu.name if gpu else 'no GPU; NumPy arrays run on the simulated ' + DEFAULT_DEVICE}")


def device_report(device: Device) -> dict[str, Any]:
    return asdict(device) | {"tensor_peak": dict(device.tensor_peak)}
