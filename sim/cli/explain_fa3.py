"""The output of `cupyflash explain` on FlashAttention-3's tile: what was tried, what the chosen one takes, and how it is run."""

from __future__ import annotations

import click

from cupyflash.basics import Report
from cupyflash.schedules import TileSchedule, fa3_tiles
from cupyflash.schedules.fa3 import L2_SHARE, LEAST_ROUNDS, Fa3Schedule
from cupyflash.schedules.fa3_tiles import Fa3Candidate
from cupyflash.sim.cli.request import ProblemRequest
from cupyflash.sim.cli.show import say, show_held, show_table
from cupyflash.words import plural

FITTED = "the widest that fits"
UNEVEN = 1.05
"""The balance above which the output says why no row block is cut in two."""


def explanation(schedule: TileSchedule, request: ProblemRequest) -> Report:
    """The candidates, and the chosen one's rooms, roles, clocks of a turn and grid, for JSON."""
    assert isinstance(schedule, Fa3Schedule)
    problem, device = schedule.problem, schedule.device
    blocks = schedule.tiling.used.block_rows, schedule.block_cols
    chosen = fa3_tiles.choose(problem, device, blocks)
    tried = fa3_tiles.candidates(problem, device, None if request.tiling is None else blocks)
    return {
        "candidates": [row(each, chosen) for each in tried],
        "clocks": fa3_tiles.clocks(problem, device, chosen),
        "rooms": dict(chosen.rooms),
        "launch_registers": chosen.config.team.launch_registers,
        "roles": chosen.config.roles,
        "grid": {
            "row_blocks": schedule.works,
            "thread_blocks": schedule.grid,
            "heads_a_row_block": schedule.pack,
            "heads_at_a_time": schedule.pack * schedule.grouping.section,
            "last_heads": schedule.last_heads,
            "queued": schedule.queued,
            "products_in_turns": chosen.config.ping_pong,
        },
    }


def row(candidate: Fa3Candidate, chosen: Fa3Candidate) -> Report:
    """A candidate for JSON, with no more than is known of it."""
    config = candidate.config
    verdict = "rejected" if candidate.rejected else "chosen" if candidate == chosen else "later"
    known = {
        "verdict": verdict,
        "block_rows": config.team.block_rows,
        "block_cols": config.block_cols,
        "consumers": config.team.consumers,
        "stages": config.stages,
        "shared_bytes": candidate.shared_bytes,
        "registers": candidate.registers,
        "most_registers": candidate.most_registers,
    }
    if candidate.rejected:
        return known | {"reason": candidate.rejected}
    return known | {"turn_clocks": dict(candidate.parts), "bound_by": candidate.bound, "scores_a_clock": candidate.rate}


def show(report: Report, request: ProblemRequest, everything: bool) -> None:
    """Show the candidates and the chosen one as text."""
    (best,) = (each for each in report["candidates"] if each["verdict"] == "chosen")
    say(
        "O, S and P are a consumer's registers, Q and the slots of K and V shared memory. The widest blocks that both hold are "
        "taken, since a turn has instructions that do not depend on its columns: first three warpgroups of 64 rows, where head "
        f"dimensions are at most {fa3_tiles.SLAB}, then two. Bc is at most {fa3_tiles.WIDEST}, which leaves O room of its own and "
        'computes little in vain of a last block. tiling=(Br, Bc) with algorithm="fa3" fixes both. Arrays with '
        f"addresses or strides that are no multiples of {fa3_tiles.ALIGNMENT} bytes, which TMA does not take, are fa2's."
    )
    click.echo()
    show_tried(report["candidates"], everything)
    click.echo()
    show_rooms(report, best)
    click.echo()
    show_roles(report, best)
    click.echo()
    say("Clocks that one turn of the block (Br x Bc, both products) takes of a multiprocessor, by a model's parts:")
    click.echo()
    parts = best["turn_clocks"]
    cells = (_sizes(best), *(f"{clocks:,.0f}" for clocks in parts.values()), f"{best['scores_a_clock']:.2f}")
    show_table(("Br x Bc", *parts, "scores a clock"), [cells])
    click.echo()
    say(f"Bound by {best['bound_by']}; {report['clocks']:,.0f} clocks in all, by the model. {order(report, request)}")


def show_tried(rows: list[Report], everything: bool) -> None:
    """Show the candidates up to the chosen tile, with reasons, and the widest later one; or all of them."""
    chosen = next(at for at, each in enumerate(rows) if each["verdict"] == "chosen")
    later = rows[chosen + 1 :]
    shown = later if everything else [each for each in later if each["verdict"] == "later"][:1]
    say("Tried, in this order (registers of a consumer's thread for O, S and P; bytes of a block; by the model):")
    click.echo()
    cells = [
        (
            _sizes(each),
            f"{each['registers']} of {each['most_registers']}",
            f"{each['shared_bytes']:,}",
            f"{each['scores_a_clock']:.2f}" if "scores_a_clock" in each else "-",
            f"rejected: {each['reason'].split(':')[0]}" if "reason" in each else each["verdict"],
        )
        for each in (*rows[: chosen + 1], *shown)
    ]
    show_table(("Br x Bc", "registers", "shared", "scores a clock", ""), cells, left=(0, 4))
    if len(shown) < len(later):
        say(f"and {len(later) - len(shown)} more that would have come later (--all)", first="  ")


def show_rooms(report: Report, best: Report) -> None:
    """Print the shared memory by contents."""
    p, rows, cols, slots = report["problem"], best["block_rows"], best["block_cols"], best["stages"]
    held = {
        "Q": ("Q", f"{rows} x {p['head_dim']}")
        if "O" in report["rooms"]
        else ("Q, which O leaves through", f"{rows} x {max(p['head_dim'], p['head_dim_v'])}"),
        "O": ("O, which leaves as the next Q comes", f"{rows} x {p['head_dim_v']}"),
        "K": ("K", f"{slots} slots of {cols} x {p['head_dim']}"),
        "V": ("V", f"{slots} slots of {cols} x {p['head_dim_v']}"),
        "barriers": ("barriers", ""),
    }
    say(
        f"Shared memory, {best['shared_bytes']:,} of {report['device']['sram_per_block']:,} bytes; rows are in slabs of "
        f"{fa3_tiles.SLAB} elements, the last filled with zeros:"
    )
    show_held(held, report["rooms"])


def show_roles(report: Report, best: Report) -> None:
    """Threads and registers by role."""
    say(
        f"Registers: {report['launch_registers']} a thread at launch, which setmaxnreg then moves between the roles. The "
        "producer is one warp of a warpgroup, which copies by TMA; "
        f"{plural(best['consumers'], 'consumer warpgroup')} of {fa3_tiles.WARPGROUP_ROWS} rows do all else. Of "
        f"{report['device']['registers_per_sm']:,} they have:"
    )
    click.echo()
    rows = [
        (role, str(threads), str(each), f"{threads * each:,}")
        for role, (threads, each) in ((role, found.values()) for role, found in report["roles"].items())
    ]
    show_table(("role", "threads", "a thread", "together"), rows)


def order(report: Report, request: ProblemRequest) -> str:
    """The order in which row blocks come to thread blocks, and products to the tensor cores."""
    p, grid = request.problem, report["grid"]
    megabytes = grid["heads_at_a_time"] * p.kv_heads // p.heads * p.seqlen_k * (p.head_dim + p.head_dim_v) * p.itemsize / 2**20
    turns = (
        "Warpgroups issue their products in turns: one takes exponentials while another multiplies"
        if grid["products_in_turns"]
        else "Each warpgroup issues its products when it can"
    )
    heads = grid["heads_a_row_block"]
    together = f" A row block has rows of {heads} heads, which share K and V: queries are few." if heads > 1 else ""
    whole = (
        " Keys of a row block are not split, which would even it out: parts are written, read again and merged, and that costs "
        "more than it gains where there are twice as many row blocks as multiprocessors (docs/performance.md)."
        if report["balance"] > UNEVEN
        else ""
    )
    taken = (
        "which take the next from a queue when they have done one, the longest first"
        if grid["queued"]
        else "each of which has those that are a grid apart: all are alike, or no more than thread blocks"
    )
    share = f"1/{L2_SHARE} of the L2 ({request.device.l2_bytes / 2**20:.0f} MB)"
    why = (
        "several such sections are under way at once, short row blocks too; those of the last "
        f"{plural(grid['last_heads'], 'head')} are sorted together, to even out what was before"
        if grid["last_heads"]
        else f"about as many as take {share}, or as have {LEAST_ROUNDS} row blocks for each multiprocessor"
    )
    return (
        f"{plural(grid['row_blocks'], 'row block')} of all heads on {plural(grid['thread_blocks'], 'thread block')}, one a "
        f"multiprocessor, {taken}: {grid['row_blocks'] / grid['thread_blocks']:.2f} each. "
        f"{plural(grid['heads_at_a_time'], 'head')} at a time, whose K and V are {megabytes:,.1f} MB: {why}.{together} "
        f"{turns}.{whole}"
    )


def _sizes(each: Report) -> str:
    return f"{each['block_rows']:>3} x {each['block_cols']:<3}"
