"""The output of `cupyflash explain --decode`: which tile has the rows of a key head, into how many parts the keys go, and why."""

from __future__ import annotations

from dataclasses import asdict

import click
import numpy as np

from cupyflash.basics import Report
from cupyflash.schedules import DecodeSchedule, decode_tiles
from cupyflash.schedules.base import GRANULE
from cupyflash.schedules.decode_tiles import DecodeCandidate, DecodeConfig
from cupyflash.sim import l2, theory
from cupyflash.sim.cli.request import ProblemRequest
from cupyflash.sim.cli.show import say, show_balance, show_held, show_table, taken, tell
from cupyflash.sim.names import NAMES
from cupyflash.words import plural


def explain(request: ProblemRequest, schedule: DecodeSchedule, as_json: bool) -> None:
    """Print it, as text or as JSON."""
    report = explanation(request, schedule)
    tell(report, as_json, show, request)


def explanation(request: ProblemRequest, schedule: DecodeSchedule) -> Report:
    """All that was to be chosen from and what it comes to, for JSON; seconds are the model's."""
    problem, device, chosen = schedule.problem, schedule.device, schedule.candidate
    found = [row(schedule, each) for each in decode_tiles.candidates(problem, device, request.num_splits)]
    return {
        **request.report,
        **({"auto": asdict(request.choice)} if request.cache is None else {}),
        "device": taken(device, "name", "sm_count", "sram_per_block", "sram_per_sm", "registers_per_sm", "hbm_bandwidth"),
        "rows": {
            "group": schedule.group,
            "queries": problem.seqlen_q,
            "rows": schedule.rows,
            "tile_rows": schedule.block_rows,
            "row_tiles": schedule.row_tiles,
        },
        "candidates": found,
        "rooms": dict(chosen.rooms),
        "splits": [split_row(schedule, splits) for splits in splits_to_show(schedule, request.num_splits)],
        "in_flight": {
            "bytes": decode_tiles.under_way(problem, device, chosen),
            "needed_bytes": decode_tiles.needed_in_flight(device),
            "cache_bytes": schedule.repeats * problem.seqlen_k * decode_tiles.key_bytes(problem),
            "thread_blocks": decode_tiles.at_a_time(problem, device, chosen),
            "latency_seconds": decode_tiles.LATENCY,
            "times_latency": decode_tiles.BUSY,
            "bandwidth": device.hbm_bandwidth or decode_tiles.BANDWIDTH,
        },
        "notes": notes(schedule),
        "balance": l2.balance(schedule),
        "traffic": theory.traffic(schedule).as_dict(),
    }


def row(schedule: DecodeSchedule, candidate: DecodeCandidate) -> Report:
    """A candidate for JSON, with no more than is known of it."""
    config, device, problem = candidate.config, schedule.device, schedule.problem
    known: Report = {
        "verdict": verdict(schedule, candidate),
        **taken(config, "block_rows", "block_cols", "row_warps", "key_warps", "stages"),
        "shared_bytes": candidate.shared_bytes,
    }
    if candidate.rejected:
        return known | {"reason": candidate.rejected}
    grid = decode_tiles.works(problem, config) * candidate.splits
    return known | {
        "splits": candidate.splits,
        "thread_blocks": grid,
        "blocks": candidate.resident,
        "waves": grid / (candidate.resident * device.sm_count),
        "in_flight_bytes": decode_tiles.under_way(problem, device, candidate),
        "seconds": candidate.seconds,
    }


def verdict(schedule: DecodeSchedule, candidate: DecodeCandidate) -> str:
    """The verdict on a candidate."""
    if candidate.rejected:
        return "rejected"
    if candidate == schedule.candidate:
        return "chosen"
    if decode_tiles.works(schedule.problem, candidate.config) * candidate.splits < min(schedule.grid, schedule.device.sm_count):
        return "fewer blocks"
    # The chosen one may itself be slower than the fastest, by less than NOISE.
    return "slower" if candidate.seconds > schedule.candidate.seconds * (1 + decode_tiles.NOISE) else "about as fast"


def most_splits(schedule: DecodeSchedule, config: DecodeConfig) -> int:
    """The most splits: one for each block of keys, if the merging kernel has room for them."""
    return max(1, min(decode_tiles.MOST_SPLITS, -(-schedule.problem.seqlen_k // config.block_cols)))


def least_splits(schedule: DecodeSchedule) -> int:
    """The smallest number of splits with which each multiprocessor has a thread block, if there are enough blocks of keys."""
    every = decode_tiles.works(schedule.problem, schedule.config)
    return min(most_splits(schedule, schedule.config), -(-schedule.device.sm_count // max(1, every)))


def splits_to_show(schedule: DecodeSchedule, asked: int | None) -> list[int]:
    """The numbers of splits to show for the chosen configuration: one, the least useful one, the chosen one, and more."""
    most, own = most_splits(schedule, schedule.config), schedule.splits
    tried = {1, least_splits(schedule), own, min(2 * own, most), most}
    return sorted(tried if asked is None else tried | {asked})


def split_row(schedule: DecodeSchedule, splits: int) -> Report:
    """The chosen configuration with `splits` splits, for JSON."""
    problem, device, candidate = schedule.problem, schedule.device, schedule.candidate
    grid = decode_tiles.works(problem, candidate.config) * splits
    asked = problem, device, candidate.config, candidate.resident, np.array([splits])
    return {
        "splits": splits,
        "chosen": splits == schedule.splits,
        "keys": decode_tiles.split_keys(problem, candidate.config, splits),
        "thread_blocks": grid,
        "idle_multiprocessors": max(0, device.sm_count - grid),
        "waves": grid / (candidate.resident * device.sm_count),
        "parts": {name: float(part[0]) for name, part in decode_tiles.times(*asked).items()},
        "seconds": float(decode_tiles.seconds(*asked)[0]),
    }


def notes(schedule: DecodeSchedule) -> list[str]:
    """Remarks on what is not as one would have it, with reasons."""
    p, told = schedule.problem, []
    if not p.seqlen_k:
        return ["The cache has room for no keys."]
    if schedule.row_tiles > 1:
        told.append(
            f"A key head is read {schedule.row_tiles} times: it has {schedule.rows} rows ({plural(schedule.group, 'query head')} x "
            f"{plural(p.seqlen_q, 'query', 'queries')}), and a tile {schedule.block_rows} at most."
        )
    if schedule.grid < schedule.device.sm_count:
        told.append(why_so_few(schedule))
    working = theory.splits_with_keys(schedule)
    if working < schedule.grid:
        told.append(
            f"Of the {plural(schedule.grid, 'thread block')}, {working:,} have keys to read, by lengths and window; the others "
            "leave at once."
        )
    return told


def why_so_few(schedule: DecodeSchedule) -> str:
    """The reason for fewer thread blocks than multiprocessors."""
    p, most, cols = schedule.problem, most_splits(schedule, schedule.config), schedule.block_cols
    key_heads = schedule.repeats
    heads = f"{'is' if key_heads == 1 else 'are'} {plural(key_heads, 'key head')}" + " of all sequences" * (p.batch > 1)
    few = f"{plural(schedule.grid, 'thread block')} for {schedule.device.sm_count} multiprocessors"
    if schedule.splits < most:
        by_model = schedule.splits == decode_tiles.choose(p.asking(key_lengths=None), schedule.device).splits
        why = "more would be slower by the model" if by_model else "they are asked for"
        return f"{few}, since there are {plural(schedule.splits, 'split')} of each ({why}) and there {heads}."
    limit = f"{p.seqlen_k:,} keys are {plural(most, 'block')} of {cols}, of which a split has at least one"
    if most == decode_tiles.MOST_SPLITS:
        limit = f"a sequence's keys are split into {most} parts at most"
    return f"{few}, since the cache has no more to share out: {limit}, and there {heads}."


def show(report: Report, request: ProblemRequest) -> None:
    """An explanation as text."""
    device, rows = request.device, report["rows"]
    (best,) = (each for each in report["candidates"] if each["verdict"] == "chosen")
    say(request.title, rest="  ")
    bandwidth = f"{device.hbm_bandwidth / 1e9:,.0f} GB/s" if device.hbm_bandwidth else "no bandwidth known"
    say(
        f"{device.name}: {device.sm_count} multiprocessors of {device.sram_per_sm:,} bytes of SRAM ({device.sram_per_block:,} a "
        f"block) and {device.registers_per_sm:,} registers; memory: {bandwidth}"
    )
    click.echo()
    if request.cache is None:
        say(by_default(request, "attention(q, k, v)"))
        click.echo()
    show_rows(rows, best)
    click.echo()
    say(
        "With few queries K and V are most of what moves: they are to be read once, and what can be chosen is how many thread "
        "blocks share that, and how much each has under way. All that was tried, the widest first; the times are a model's, none "
        f"is measured, and those that differ by less than {decode_tiles.NOISE:.0%} count as the same:"
    )
    click.echo()
    show_candidates(report["candidates"])
    click.echo()
    show_rooms(report, best)
    click.echo()
    show_splits(report, request)
    click.echo()
    show_in_flight(report, request, best)
    for note in report["notes"]:
        click.echo()
        say(note)
    click.echo()
    total = report["traffic"]["total"]
    show_balance(report)
    click.echo()
    say(
        f"HBM bytes by theory: {total['read_bytes']:,} read, {total['write_bytes']:,} written (cupyflash predict"
        f"{' --decode' * (request.cache is not None)} tells them by tensor)"
    )


def by_default(request: ProblemRequest, call: str, what: str = "") -> str:
    """The algorithm that a call runs, with the reason; `what` follows its name."""
    auto = request.choice
    other = "" if auto.algorithm == request.algorithm else f" Asked for is {NAMES[request.algorithm]} ({request.algorithm})."
    return f"By default {call} runs {NAMES[auto.algorithm]}{what} ({auto.algorithm}) here: {auto.reason}.{other}"


def show_rows(rows: dict[str, int], best: Report) -> None:
    """Show a tile's rows, and how a thread block's warps share them."""
    group, queries, tiles = rows["group"], rows["queries"], rows["row_tiles"]
    several = f"in {tiles} tiles of {rows['tile_rows']}" if tiles > 1 else f"in one tile of {rows['tile_rows']}"
    once = "once for all of them" if tiles == 1 else f"once for each tile, {tiles} times"
    say(
        f"Rows: a key head is read by {plural(group, 'query head')} x {plural(queries, 'query', 'queries')} = "
        f"{plural(rows['rows'], 'row')}, which go together {several}: K and V are read {once}. (A tensor core's product takes "
        f"{GRANULE} rows, filled or not.)"
    )
    warps = best["row_warps"] * best["key_warps"]
    over = {"rows": best["row_warps"], "the keys of a block": best["key_warps"]}
    shared = [f"{number} over {what}" for what, number in over.items() if number > 1]
    slots = best["stages"]
    filled = f", of which {slots - 1} {'is' if slots == 2 else 'are'} being filled" if slots > 1 else ", filled and used in turns"
    say(
        f"Thread block: {plural(warps, 'warp')}{', ' * bool(shared)}{' x '.join(shared)}; {best['block_cols']} keys a block, K and "
        f"V in a ring of {plural(slots, 'slot')}{filled}."
    )


def show_candidates(rows: list[Report]) -> None:
    """Print the candidates that could run, and those that could not."""
    shown = [each for each in rows if "reason" not in each]
    heads = ("keys", "slots", "warps", "splits", "thread blocks", "an SM", "waves", "in flight", "shared", "model", "")
    cells = [
        (
            f"{each['block_cols']}",
            f"{each['stages']}",
            f"{each['row_warps']} x {each['key_warps']}",
            f"{each['splits']}",
            f"{each['thread_blocks']:,}",
            f"{each['blocks']}",
            f"{each['waves']:.2f}",
            f"{each['in_flight_bytes']:,}",
            f"{each['shared_bytes']:,}",
            microseconds(each["seconds"]),
            each["verdict"],
        )
        for each in shown
    ]
    show_table(heads, cells, left=(10,))
    click.echo()
    fewer = any(each["verdict"] == "fewer blocks" for each in shown)
    say(
        "keys: of a block; slots: of the ring that K and V come into; warps: over rows x keys; an SM: thread blocks that a "
        "multiprocessor (SM) has room for; waves: thread blocks over as many as run at a time; in flight: bytes of K and V under "
        "way in a multiprocessor; shared: bytes of shared memory of a thread block; model: microseconds"
        + "; fewer blocks: fewer than there are multiprocessors, or than others have"
        * fewer,
        first="  ",
        rest="  ",
    )
    for each in rows:
        if "reason" in each:
            told = f"{each['block_cols']} keys, {plural(each['stages'], 'slot')}: rejected for {each['reason']}"
            say(told, first="  ", rest="    ")


def show_rooms(report: Report, best: Report) -> None:
    """Print the shared memory by contents."""
    p, pages = report["problem"], "cache" in report and report["cache"]["page_size"]
    held = {
        "Q": ("Q", f"{best['block_rows']} rows of {p['head_dim']}"),
        "K, V": (
            "K and V",
            f"{plural(best['stages'], 'slot')} of {best['block_cols']} rows of {p['head_dim']} and {p['head_dim_v']}",
        ),
        "pages": ("pages' places", f"{decode_tiles.KNOWN_PAGES} at a time") if pages else ("the sequence's length", ""),
        "of_head": ("what a function reads once a head", f"for each of {best['block_rows']} rows"),
    }
    say(f"Shared memory, {best['shared_bytes']:,} of {report['device']['sram_per_block']:,} bytes:")
    show_held(held, report["rooms"])


def show_splits(report: Report, request: ProblemRequest) -> None:
    """Show the number of splits with its reason, and the cost of fewer and more."""
    rows = report["splits"]
    (own,) = (each for each in rows if each["chosen"])
    say(f"Splits: {splits_of(own, request)} The same configuration with fewer and more, in the model's microseconds:")
    click.echo()
    heads = ("splits", "keys", "blocks", "idle", "waves", "memory", "loads", "arithmetic", "start", "partial", "model", "")
    cells = [
        (
            f"{each['splits']}",
            f"{each['keys']:,}",
            f"{each['thread_blocks']:,}",
            f"{each['idle_multiprocessors']}",
            f"{each['waves']:.2f}",
            *(microseconds(part) for part in each["parts"].values()),
            microseconds(each["seconds"]),
            "chosen" if each["chosen"] else "",
        )
        for each in rows
    ]
    show_table(heads, cells, left=(11,))
    click.echo()
    say(
        "keys: of a split, at most; blocks: thread blocks; idle: multiprocessors without one; memory: all that is read of K and V, "
        "at the bandwidth; loads: the multiprocessor with the most keys, as fast as what it has under way and twice its share of "
        "the bandwidth let it; arithmetic: its products and exponentials; the longest of these three counts, and start: of thread "
        "blocks; partial: O, m and l of each split, written and read again, and the launch of the kernel that merges them",
        first="  ",
        rest="  ",
    )


def splits_of(own: Report, request: ProblemRequest) -> str:
    """The number of splits and thread blocks, with the reason."""
    count, alone, asked = request.device.sm_count, own["thread_blocks"] // own["splits"], request.num_splits is not None
    without = f"{plural(alone, 'thread block')} for {count} multiprocessors"
    waves = f"{own['waves']:.2f} waves of as many as run at a time"
    by_room = " They are chosen by the cache's room, not by lengths, which only the device may know."
    room = by_room * (request.cache is not None and not asked)
    if own["splits"] == 1:
        why = "asked for" if asked else "no more are needed" if alone >= count else "as the model has it"
        return f"1 ({why}): {without}, {waves}.{room}"
    why = (
        "asked for"
        if asked
        else (
            "the fastest, by the model, of those that give each multiprocessor a thread block, if any do; "
            "fewer must be a tenth faster"
        )
    )
    return (
        f"{own['splits']} ({why}). Without a split there would be {without}; with {own['splits']} there are "
        f"{own['thread_blocks']:,}, {waves}.{room}"
    )


def show_in_flight(report: Report, request: ProblemRequest, best: Report) -> None:
    """Little's law: what has to be under way, and what is."""
    flight = report["in_flight"]
    assumed = "" if request.device.hbm_bandwidth else " (assumed)"
    (of_split,) = (each["keys"] for each in report["splits"] if each["chosen"])
    keys = min(max(1, best["stages"] - 1) * best["block_cols"], of_split)
    say(
        f"In flight: memory gives its bandwidth only while latency x bandwidth bytes are under way (Little's law): "
        f"{flight['times_latency']} x {flight['latency_seconds'] * 1e6:g} us x {flight['bandwidth'] / 1e9:,.0f} GB/s{assumed} / "
        f"{request.device.sm_count} = {flight['needed_bytes']:,.0f} bytes a multiprocessor; the {flight['times_latency']} is for a "
        f"memory that is busy. Here are {flight['bytes']:,}: {plural(flight['thread_blocks'], 'thread block')} at a time, "
        f"{keys:,} keys of K and V each. {enough(report, best)}"
    )


def enough(report: Report, best: Report) -> str:
    """The verdict on the bytes in flight, with the reason if they are too few."""
    flight = report["in_flight"]
    if flight["bytes"] >= flight["needed_bytes"]:
        return "That is enough."
    share = report["in_flight"]["cache_bytes"]
    busy = min(best["thread_blocks"], report["device"]["sm_count"])
    if not share:
        return "There are no keys."
    if share < 4 * flight["needed_bytes"] * busy:
        return (
            f"That is less, for the cache is short: all of its K and V are {share:,} bytes, {share // busy:,} for each "
            "multiprocessor in use."
        )
    (parts,) = (each["parts"] for each in report["splits"] if each["chosen"])
    longest = max(("loads", "memory", "arithmetic"), key=lambda name: parts[name])
    if longest == "loads":
        return "That is less, and loads are what takes the time, by the model."
    return f"That is less; by the model the {longest} takes longer than loads do."


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.2f}"
