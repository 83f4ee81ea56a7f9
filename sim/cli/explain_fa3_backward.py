"""The output of `cupyflash explain --backward` on the Hopper's gradients: their blocks, shared memory, roles and grid, and both
orders in which dQ can be summed."""

from __future__ import annotations

from dataclasses import replace

import click

from cupyflash.basics import Report
from cupyflash.schedules import TileSchedule, fa3_backward, fa3_tiles
from cupyflash.schedules.fa3_backward import Fa3BackwardSchedule
from cupyflash.sim.cli.explain_backward import cost, show_costs
from cupyflash.sim.cli.request import ProblemRequest
from cupyflash.sim.cli.show import say, show_table

FITTED = "the only ones that its registers hold"
WAYS = {"in any order": False, "deterministic": True}


def explanation(schedule: TileSchedule, request: ProblemRequest) -> Report:
    """The blocks' rooms, roles and grid, and both ways to sum dQ, for JSON."""
    assert isinstance(schedule, Fa3BackwardSchedule)
    consumer, producer, queries = schedule.tile.registers
    return {
        "backward": True,
        "deterministic": schedule.deterministic,
        "rooms": {room.name: room.nbytes for room in fa3_backward.rooms(schedule.problem, schedule.tile) if room.nbytes},
        "roles": {
            "producers": {"threads": fa3_tiles.WARPGROUP, "registers": producer},
            "consumers": {"threads": fa3_backward.CONSUMERS * fa3_tiles.WARPGROUP, "registers": consumer},
            **({"dQ": {"threads": fa3_tiles.WARPGROUP, "registers": queries}} if queries else {}),
        },
        "grid": {
            "thread_blocks": schedule.grid * schedule.cluster,
            "cluster": schedule.cluster,
            "heads_that_alternate": schedule.alternate,
        },
        "ways": {name: cost(replace(schedule, deterministic=deterministic)) for name, deterministic in WAYS.items()},
    }


def show(report: Report, request: ProblemRequest, everything: bool) -> None:
    """Show the blocks and how they are run as text."""
    used, grid, limit = report["tiling"]["used"], report["grid"], report["device"]["sram_per_block"]
    keys, consumers, wide = (
        fa3_tiles.WARPGROUP_ROWS,
        fa3_backward.CONSUMERS,
        used["block_cols"] == fa3_tiles.WARPGROUP_ROWS * grid["cluster"],
    )
    owned = (
        f"{keys} keys, of whose gradients each of {consumers} consumer warpgroups has half of the columns in registers, beside"
        if wide
        else f"{keys} keys for each of {consumers} consumer warpgroups, whose registers hold dK and dV of them,"
    )
    say(
        f"A thread block has K_j and V_j, {owned} S and dP of a turn; Q_i and dO_i pass by. Registers decide Br: 128 "
        f"where d and d_v are at most {fa3_tiles.SLAB} and nothing is asked for each score (a mask, a bias, a score function, "
        "dropout), else 64."
    )
    if grid["cluster"] > 1:
        say(
            f"{grid['cluster']} thread blocks are a cluster, with the same Q_i and dO_i, which come to both at once. Each sends "
            "its dS to the other one and makes half of the columns of dQ over the keys of both: half of the additions."
        )
    click.echo()
    say(
        f"{used['block_rows']} x {used['block_cols']}: {report['roles']['consumers']['threads']} consumer threads of "
        f"{report['roles']['consumers']['registers']} registers, {report['roles']['producers']['threads']} producer threads of "
        f"{report['roles']['producers']['registers']}. Shared memory, {sum(report['rooms'].values()):,} of {limit:,} bytes:"
    )
    click.echo()
    show_table(("held", "bytes"), [(name, f"{nbytes:,}") for name, nbytes in report["rooms"].items()])
    click.echo()
    turns = f"; those of {grid['heads_that_alternate']} key heads alternate" if grid["heads_that_alternate"] > 1 else ""
    say(f"{grid['thread_blocks']:,} thread blocks, one a multiprocessor, {report['device']['sm_count']} at a time{turns}.")
    click.echo()
    say(
        f"dQ is summed in HBM by additions of float32 from {'registers' if wide else 'shared memory, in bulk'}: in no order, so "
        "that its last bits may differ from "
        "call to call; deterministic, thread blocks of a head add one after the other, by their keys. Here "
        + ("deterministic:" if report["deterministic"] else "in any order (--deterministic is the other way):")
    )
    show_costs(report["ways"], {})
