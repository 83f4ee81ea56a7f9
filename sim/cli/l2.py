"""`predict --l2`: the DRAM traffic behind the device's L2, beside the requests of thread blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa3 import Fa3Schedule
from cupyflash.sim import l2
from cupyflash.sim.cli.counts import beside_balance, intensity, machine_balance
from cupyflash.sim.cli.request import ProblemRequest
from cupyflash.sim.cli.show import say, show_table
from cupyflash.sim.cli.terminal import tracked

ORDERS = {
    "rows": "row blocks, heads, batch (the kernels')",
    "batch": "row blocks, batch, heads (flash-attention 2's)",
    "heads": "heads, batch, row blocks",
}


def report_of(request: ProblemRequest) -> dict[str, Any]:
    """The model's result for JSON. Raises ValueError where it does not follow the schedule."""
    schedule, device, given = request.schedule(), request.device, request.functions.fields
    found = l2.run(schedule, given=given)
    report: dict[str, Any] = {**l2.L2.of(device).as_dict(), **found.as_dict(), "dram_bytes": found.dram.total_bytes}
    if isinstance(schedule, Fa2Schedule) and not isinstance(schedule, Fa3Schedule):
        orders = tracked([order for order in l2.ORDERS if order != "rows"], "following the requests in other orders of the grid")
        others = {order: l2.run(schedule, order=order, given=given).dram for order in orders}
        totals = {order: others.get(order, found.dram) for order in l2.ORDERS}
        report["grid_orders"] = {order: dram.total_bytes for order, dram in totals.items()}
    if request.cache is None:
        flops = request.problem.backward_flops if request.backward else request.problem.flops
        report["intensity_behind_l2"] = intensity(flops, found.dram.total_bytes)
        report["machine_balance"] = machine_balance(device, request.problem.dtype)
    return report


def show(report: dict[str, Any]) -> None:
    """Show a report as text."""
    rates = {name: "-" if row["hit_rate"] is None else f"{row['hit_rate']:.1%}" for name, row in report["tensors"].items()}
    columns = ("read_bytes", "dram_read_bytes", "write_bytes", "dram_write_bytes")
    rows = [(name, *(f"{row[key]:,}" for key in columns), rates[name]) for name, row in report["tensors"].items()]
    say(said_of(report, report["resident_blocks"], report["thread_blocks"]))
    click.echo()
    show_table(("tensor", "asked to read", "from DRAM", "asked to write", "to DRAM", "reads hit"), rows)
    click.echo()
    if report.get("intensity_behind_l2") is not None:
        beside = beside_balance(report["machine_balance"])
        say(f"arithmetic intensity behind the L2: {report['intensity_behind_l2']:.1f} FLOP a byte of DRAM{beside}")
    if "grid_orders" in report:
        least = report["grid_orders"]["rows"]
        click.echo()
        cells = [
            (ORDERS[order], f"{nbytes:,}", f"{nbytes / least:.2f}" if least else "-")
            for order, nbytes in report["grid_orders"].items()
        ]
        show_table(("grid, the fastest axis first", "bytes of DRAM", "ratio"), cells)


def show_executed(report: dict[str, Any]) -> None:
    """Show an execution beside its schedule as text."""
    executed, schedule = report["executed"], report["schedule"]
    say(said_of(report, executed["resident_blocks"], executed["thread_blocks"]))
    click.echo()
    witnesses = {"executed": executed, **({"schedule": schedule} if schedule else {})}
    none = dict.fromkeys(("dram_read_bytes", "dram_write_bytes"), 0)
    rows = []
    for name, row in executed["tensors"].items():
        dram = [f"{one['tensors'].get(name, none)[side]:,}" for side in none for one in witnesses.values()]
        n = len(witnesses)
        hits = "-" if row["hit_rate"] is None else f"{row['hit_rate']:.1%}"
        rows.append((name, f"{row['read_bytes']:,}", *dram[:n], f"{row['write_bytes']:,}", *dram[n:], hits))
    titles = ("", "asked to", *("from DRAM" for _ in witnesses), "asked to", *("to DRAM" for _ in witnesses), "reads")
    show_table(("tensor", "read", *witnesses, "write", *witnesses, "hit"), rows, titles=titles)
    if report["not_followed"]:
        click.echo()
        say(report["not_followed"])


def said_of(cache: dict[str, Any], slots: Sequence[int], grids: Sequence[int]) -> str:
    """The model's assumptions: the cache, and how many of each kernel's thread blocks run at a time."""
    return (
        f"Behind the L2, by a model: {cache['l2_bytes']:,} bytes, {cache['ways']} ways, lines of {cache['line_bytes']} bytes in "
        f"sectors of {cache['sector_bytes']}, least recently used; thread blocks in launch order and in lockstep, "
        + ", then ".join(f"{running:,} at a time of {number:,}" for running, number in zip(slots, grids, strict=True))
    )
