"""The output of `cupyflash explain --backward` on FlashAttention-2's backward: its blocks with the reason, and what dQ costs either
way, summed by atomics or by a kernel of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import click

from cupyflash.basics import Report
from cupyflash.schedules import BackwardSchedule, TileSchedule, fa2_backward_tiles, plan
from cupyflash.schedules import fa2_backward_clocks as backward_clocks
from cupyflash.schedules.base import padded_dim
from cupyflash.schedules.fa2_backward import Fa2BackwardSchedule
from cupyflash.schedules.fa2_backward_tiles import BackwardCandidate, launches, main_tiles
from cupyflash.sim import theory
from cupyflash.sim.cli.request import ProblemRequest
from cupyflash.sim.cli.show import say, show_table, taken
from cupyflash.tiling import TileSize
from cupyflash.words import plural

FITTED = "the first that fit"
NEAR = 3  # shown before and behind the chosen one, unless --all
WAYS = {"atomics": False, "deterministic": True}


def explanation(schedule: TileSchedule, request: ProblemRequest) -> Report:
    """The candidates of each kernel with bytes and clocks, and both ways to dQ, for JSON."""
    assert isinstance(schedule, Fa2BackwardSchedule)
    p, device = schedule.problem, schedule.device
    within = None
    if request.tiling is not None:  # the forward's, which the kernels' blocks divide
        forward = plan(p, device, "fa2", request.tiling, lse=True).tiling.used
        within = forward.block_rows, forward.block_cols
    tried = [row(each, schedule) for each in fa2_backward_tiles.candidates(p, device, within)]
    rooms = main_tiles(p, schedule.block_rows, schedule.block_cols, schedule.stages, schedule.warps.beside)
    queries = fa2_backward_tiles.query_candidates(p, device, schedule.mask_blocks) if schedule.deterministic else ()
    return {
        "backward": True,
        "deterministic": schedule.deterministic,
        "launches": [{"dk": each.dk, "dv": each.dv} for each in launches(p)],
        "candidates": with_verdicts(tried),
        "query_candidates": with_verdicts([query_row(each, schedule) for each in queries]),
        "rooms": {room.name: room.nbytes for room in rooms if room.nbytes},
        "ways": {name: way(replace(schedule, deterministic=deterministic)) for name, deterministic in WAYS.items()},
    }


def with_verdicts(rows: list[Report]) -> list[Report]:
    """Candidates with verdicts, in their order: the first that is not rejected is chosen."""
    chosen = next((each for each in rows if "reason" not in each), None)
    return [{"verdict": "rejected" if "reason" in each else "chosen" if each is chosen else "later", **each} for each in rows]


def row(candidate: BackwardCandidate, schedule: Fa2BackwardSchedule) -> Report:
    """Blocks of the main kernel, with the pass's bytes were they taken."""
    p, (rows, cols) = schedule.problem, candidate.size
    if candidate.rejected:
        return needs(candidate)
    made = [(launch, launch.dk and not schedule.deterministic) for launch in launches(p)]
    parts = [backward_clocks.column_parts(p, schedule.device, candidate.size, candidate.warps, *each) for each in made]
    used = replace(schedule, tiling=replace(schedule.tiling, used=TileSize(rows, cols, "")))
    return needs(candidate) | busy(parts) | {"hbm_bytes": theory.traffic(used).total_bytes}


def query_row(candidate: BackwardCandidate, schedule: Fa2BackwardSchedule) -> Report:
    """Blocks of the kernel of dQ."""
    p = schedule.problem
    if candidate.rejected:
        return needs(candidate)
    return needs(candidate) | busy([backward_clocks.query_parts(p, schedule.device, candidate.size, candidate.warps)])


def needs(candidate: BackwardCandidate) -> Report:
    """The resources of blocks, for JSON; `own` are the keys (in dQ's kernel rows) that a warp has for good."""
    known = {
        "block_rows": candidate.block_rows,
        "block_cols": candidate.block_cols,
        "warps": candidate.count,
        "own": candidate.warps.own,
        "at_once": candidate.warps.at_once,
        "beside": candidate.warps.beside,
        "stages": candidate.stages,
        "shared_bytes": candidate.shared_bytes,
    }
    return known | ({"reason": candidate.rejected} if candidate.rejected else {})


def busy(launches: list[dict[str, float]]) -> Report:
    """Clocks that a multiprocessor's parts, each were it alone, take for a tile (Br x Bc) in all launches."""
    clocks = {name: sum(parts[name] for parts in launches) for name in launches[0]}
    return {"tile_clocks": clocks, "bound_by": max(clocks, key=lambda name: clocks[name])}


def cost(schedule: BackwardSchedule, **more: int) -> Report:
    """The bytes, memory and kernels of the pass, for JSON; with `more` between them."""
    return {
        **taken(theory.traffic(schedule), "read_bytes", "write_bytes"),
        "extra_memory_bytes": schedule.workspace_bytes,
        **more,
        "kernels": [kernel.name for kernel in schedule.kernels()],
    }


def way(schedule: Fa2BackwardSchedule) -> Report:
    """The cost of the pass with dQ made so."""
    p = schedule.problem
    dims = padded_dim(p.head_dim), padded_dim(p.head_dim_v)
    products = sum(backward_clocks.main_fmas(*dims, launch, not schedule.deterministic) for launch in launches(p))
    queries = backward_clocks.query_fmas(*dims) if schedule.deterministic else 0
    return cost(schedule, fmas_a_score=products + queries)


def show(report: Report, request: ProblemRequest, everything: bool) -> None:
    """Show the candidates and the chosen one as text."""
    together = len(report["launches"]) == 1
    say(
        "A thread block has K_j and V_j, and Q_i and dO_i pass by: they are read once for each column block that they see"
        + ", dQ's sum too" * (not report["deterministic"])
        + ". So blocks of many columns come first, of as many those of many rows, and the first that shared memory and registers "
        "hold is taken; no model of clocks chooses. dK and dV of a warp's keys are in registers"
        + (", both in one launch. " if together else ": dV in a launch of its own, then dK. ")
        + "tiling=(Br, Bc) is the forward's, whose blocks these then divide."
    )
    click.echo()
    show_tried("Tried, in this order", "keys", report["candidates"], everything)
    click.echo()
    show_rooms(report)
    click.echo()
    if report["query_candidates"]:
        say("dQ has a kernel of its own, whose thread blocks are row blocks: K_j and V_j pass by, and warps have rows.")
        click.echo()
        show_tried("Tried for it, those of warps with 32 rows first", "rows", report["query_candidates"], everything)
        click.echo()
    show_ways(report)


def show_tried(title: str, own: str, rows: list[Report], everything: bool) -> None:
    """Print the chosen candidate and those before and after it, some or all."""
    chosen = next(at for at, each in enumerate(rows) if each["verdict"] == "chosen")
    able = [each for each in rows[chosen + 1 :] if each["verdict"] == "later"]
    shown = rows if everything else [*rows[max(0, chosen - NEAR) : chosen + 1], *able[:NEAR]]
    parts = [*rows[chosen]["tile_clocks"]]
    with_bytes = "hbm_bytes" in rows[chosen]
    say(
        f"{title} ({own}: of a warp; shared: bytes of a block; {', '.join(parts)}: clocks that a tile takes of a multiprocessor's, "
        "each were it alone, by a model" + "; HBM: bytes of the pass by theory" * with_bytes + "):"
    )
    click.echo()
    cells = [
        (
            f"{each['block_rows']:>3} x {each['block_cols']:<3}",
            f"{each['warps']}",
            f"{each['own']}" + f" ({each['beside']} warps)" * (each["beside"] > 1),
            f"{each['stages']}",
            f"{each['shared_bytes']:,}",
            *(f"{each['tile_clocks'][name]:,.0f}" if "tile_clocks" in each else "-" for name in parts),
            *([f"{each['hbm_bytes']:,}" if "hbm_bytes" in each else "-"] if with_bytes else []),
            each["verdict"] + (f": {each['reason'].split(':')[0]}" if "reason" in each else ""),
        )
        for each in shown
    ]
    heads = ("Br x Bc", "warps", own, "stages", "shared", *parts, *["HBM"] * with_bytes, "")
    show_table(heads, cells, left=(0, len(heads) - 1))
    if len(shown) < len(rows):
        say(f"and {len(rows) - len(shown)} more, rejected before or to come later (--all)", first="  ")
    show_reasons(rows if everything else rows[:chosen], everything)


def show_reasons(rows: list[Report], everything: bool) -> None:
    """Show why candidates were rejected: all, or one of each kind with their number."""
    rejected = [each for each in rows if "reason" in each]
    kinds = Counter(each["reason"].split(":")[0] for each in rejected)
    if rejected:
        click.echo()
    for each in rejected:
        kind = each["reason"].split(":")[0]
        if everything or kinds[kind]:
            count = "" if everything else f"{kinds[kind]} for {kind}, as "
            say(f"{count}{each['block_rows']} x {each['block_cols']}: {each['reason']}", first="  ", rest="      ")
            kinds[kind] = 0


def show_rooms(report: Report) -> None:
    """Print the shared memory by contents."""
    best = next(each for each in report["candidates"] if each["verdict"] == "chosen")
    limit = report["device"]["sram_per_block"]
    size = f"{best['block_rows']} x {best['block_cols']}"
    say(
        f"Chosen: {size}, {plural(best['warps'], 'warp')}, bound by {best['bound_by']}. "
        f"Shared memory, {best['shared_bytes']:,} of {limit:,} bytes:"
    )
    click.echo()
    show_table(("held", "bytes"), [(name.replace("_", " "), f"{nbytes:,}") for name, nbytes in report["rooms"].items()])


def show_ways(report: Report) -> None:
    """dQ by atomics and without, side by side."""
    own = "without" if report["deterministic"] else "with"
    say(
        "dQ: summed by float32 atomics, in no order, so that its last bits may differ from call to call; deterministic, by a "
        f"kernel of its own that makes S and dP once more. Here {own} atomics"
        + (":" if report["deterministic"] else " (--deterministic is the other way):")
    )
    ways = report["ways"]
    show_costs({"by atomics": ways["atomics"], "deterministic": ways["deterministic"]}, {"fmas_a_score": "FMAs a score"})


def show_costs(ways: Mapping[str, Report], more: Mapping[str, str]) -> None:
    """Print the costs of the ways to dQ side by side; `more`: the headings of further ones."""
    keys = {"read_bytes": "bytes read", "write_bytes": "bytes written", "extra_memory_bytes": "extra memory", **more}
    click.echo()
    cells = [(name, *(f"{each[key]:,}" for key in keys), str(len(each["kernels"]))) for name, each in ways.items()]
    show_table(("dQ", *keys.values(), "kernels"), cells)
