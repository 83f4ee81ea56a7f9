"""Counted bytes in reports: the closed form beside its replay, and beside the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from cupyflash.device import Device
from cupyflash.schedules import TileSchedule
from cupyflash.sim.cli.show import say, show_table
from cupyflash.sim.traffic import Traffic
from cupyflash.sim.two_level import machine


def counted(schedule: TileSchedule, form: Traffic) -> dict[str, Any]:
    """The bytes of a schedule for JSON, with what its replay says of the closed form."""
    try:
        replayed: machine.Replay | None = machine.run(schedule)
        refused = None
    except (machine.SramOverflow, machine.TooLong) as error:  # the closed form stands by itself: say why
        replayed, refused = None, str(error)
    return {
        "traffic": form.as_dict(),
        "replay_agrees": None if replayed is None else replayed.traffic == form,
        "peak_sram_bytes": None if replayed is None else replayed.peak_sram_bytes,
        "replay_refused": refused,
        "extra_memory_bytes": schedule.workspace_bytes,
    }


def machine_balance(device: Device, dtype: str) -> float | None:
    """FLOP a byte of HBM at which a device's peaks meet; None if one is not known."""
    peak, bandwidth = device.tensor_peak.get(dtype), device.hbm_bandwidth
    return peak / bandwidth if peak and bandwidth else None


def intensities(flops: int, form: Traffic, device: Device, dtype: str) -> dict[str, Any]:
    """The operations for JSON, beside the bytes, and beside what the device balances."""
    by_byte, balance = intensity(flops, form.total_bytes), machine_balance(device, dtype)
    return {"flops": flops, "arithmetic_intensity": by_byte, "machine_balance": balance}


def beside_balance(balance: float | None, more: str = "") -> str:
    """The intensity at which a device balances, in words that follow a report's own."""
    return f"; the device balances at {balance:.0f}{more}" if balance else ""


def intensity(flops: int, nbytes: int) -> float | None:
    """FLOP a byte; None where nothing moves."""
    return flops / nbytes if nbytes else None


def show_traffic(traffic: Mapping[str, Mapping[str, int]]) -> None:
    """Bytes by tensor."""
    rows = [(name, f"{row['read_bytes']:,}", f"{row['write_bytes']:,}") for name, row in traffic.items()]
    show_table(("tensor", "bytes read", "bytes written"), rows)
    click.echo()


def show_replay(report: Mapping[str, Any]) -> None:
    """Show the replay's verdict, and the memory beside the tensors."""
    if report["replay_refused"]:
        say(f"replay on the SRAM machine refused: {report['replay_refused']}")
    else:
        agrees = "agrees" if report["replay_agrees"] else "DISAGREES"
        say(f"replay on the SRAM machine {agrees}; it held {report['peak_sram_bytes']:,} bytes at most")
    say(f"extra memory: {report['extra_memory_bytes']:,} bytes")
