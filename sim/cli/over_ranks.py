"""Attention over several devices: the request, and the output of `predict --ranks` and `sweep --over ranks`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from cupyflash.basics import Report
from cupyflash.request.options import not_taken
from cupyflash.sim import text
from cupyflash.sim.cli.options import first_given
from cupyflash.sim.cli.request import ProblemRequest
from cupyflash.sim.cli.show import Column, Points, describe, flat, say, show_table, taken, tell
from cupyflash.sim.cli.terminal import tracked
from cupyflash.sim.clock.ring_model import RingModel, ring_of
from cupyflash.sim.theory.ring import link_bytes
from cupyflash.words import plural

# Of the options of a problem, what attention over ranks has not; and what is for it alone.
NOT_OVER_RANKS = ("algorithm", "tiling", "lse", "deterministic", "decode", *not_taken("ring_attention"))
RANKS_ONLY = ("link", "layout", "gather_kv")


@dataclass(frozen=True)
class Split:
    """The split of a sequence over ranks, and the link between them."""

    link: float
    layout: str
    gather_kv: bool

    def model(self, request: ProblemRequest, ranks: int, gather: bool | None = None) -> RingModel:
        """The model of a request over so many ranks."""
        ring = ring_of(request.problem, ranks, self.layout, self.gather_kv if gather is None else gather)
        return RingModel(ring, request.problem, request.device, self.link, request.backward)


def require_over_ranks(option: str) -> None:
    """UsageError for options that cannot be combined with --ranks, or --over ranks."""
    if other := first_given(NOT_OVER_RANKS):
        why = ": each rank's calls are planned as `attention` plans them" if other in ("--algorithm", "--tiling", "--lse") else ""
        raise click.UsageError(f"{other} cannot go with {option}{why}")


def refuse_without_ranks(option: str) -> None:
    """UsageError for options that are for ranks alone."""
    if alone := first_given(RANKS_ONLY):
        raise click.UsageError(f"{alone} is for {option}")


# -- predict --ranks ---------------------------------------------------------------------------------------------------------

# All ranks are shown up to so many; of more, some.
MOST_SHOWN = 8


def predict(request: ProblemRequest, ranks: int, split: Split, as_json: bool) -> None:
    """Print it, as text or as JSON."""
    require_over_ranks("--ranks")
    model = split.model(request, ranks)
    report = prediction(request, model, split.model(request, ranks, gather=not split.gather_kv))
    tell(report, as_json, show, request, model)


def prediction(request: ProblemRequest, model: RingModel, other: RingModel) -> Report:
    """The prediction for JSON; `other` passes K and V round where this one gathers them, or the other way round."""
    ring, hidden = model.ring, model.hidden_from
    return {
        "problem": flat(request.problem),
        **({"backward": True} if model.backward else {}),
        "device": taken(request.device, "name", "hbm_bandwidth"),
        "ranks": ring.ranks,
        "layout": ring.layout,
        "gather_kv": ring.gather,
        "link_bytes_a_second": model.link,
        "steps": len(ring.shifts),
        "balance": model.balance,
        "busiest_rank": model.busiest,
        "by_rank": [of_rank(model, rank) for rank in shown(model)],
        "known_error": asdict(model.known),
        "timeline": [step._asdict() | {"seconds": step.seconds} for step in model.timeline],
        **times(model),
        "hidden_from": hidden and hidden._asdict() | {"length": hidden.length},
        "beside": {"gather_kv": other.ring.gather, **times(other), "memory_bytes": sum(other.memory(other.busiest).values())},
        "better": better(model, other),
    }


def times(model: RingModel) -> Report:
    """Modelled times, and their share of the ideal."""
    during, apart = model.waits
    return {
        "seconds": model.seconds,
        "waiting_seconds": {"in_steps": during, "before_or_after": apart},
        "one_device_seconds": model.one_device,
        "efficiency": model.efficiency,
        "efficiency_by_count": model.efficiency_by_count,
    }


def shown(model: RingModel) -> list[int]:
    """The ranks to print: all, or of many the first, the middle one, the busiest and the last ones."""
    ranks = model.ring.ranks
    return list(range(ranks)) if ranks <= MOST_SHOWN else sorted({0, 1, ranks // 2, model.busiest, ranks - 2, ranks - 1})


def of_rank(model: RingModel, rank: int) -> Report:
    """Returns a rank's counts."""
    hbm, memory = model.hbm(rank), model.memory(rank)
    carried = link_bytes(model.ring, model.problem, backward=model.backward)
    return {
        "rank": rank,
        "scores": model.work[rank] * model.problem.head_count,
        "calls": sum(len(step.pieces) for step in model.ring.steps(rank)),
        "link": {name: {"sent_bytes": int(t.sent[rank]), "received_bytes": int(t.received[rank])} for name, t in carried.items()},
        "hbm": hbm.as_dict(),
        "memory_bytes": sum(memory.values()),
        "memory": memory,
    }


def better(model: RingModel, other: RingModel) -> dict[str, str]:
    """The better of the two ways, with the reason: the faster one by the models, the smaller one if they are as fast."""
    ring, gather = (other, model) if model.ring.gather else (model, other)
    more = sum(gather.memory(gather.busiest).values()) - sum(ring.memory(ring.busiest).values())
    if ring.ring.ranks == 1:
        return {"way": "ring", "why": "of one rank both are one call"}
    if ring.seconds <= gather.seconds:
        waits = gather.waits[1] - ring.waits[1]
        reason = f"gathering waits {shown_time(waits)} more for what a ring hides, and holds {shown_bytes(more)} more"
        if waits <= 0:
            reason = f"it is no slower, and gathering holds {shown_bytes(more)} more"
        return {"way": "ring", "why": reason}
    waits, saved = sum(ring.waits) - sum(gather.waits), ring.seconds - gather.seconds
    calls, fewer = (sum(len(step.pieces) for step in each.ring.steps(each.busiest)) for each in (ring, gather))
    why = (
        f"the ring's steps wait {shown_time(ring.waits[0])} for transfers"
        if waits > 0
        else f"{plural(fewer, 'call')}, not {calls:,}"
    )
    return {"way": "gather", "why": f"{why}: it takes {shown_time(saved)} less time, and {shown_bytes(more)} more of memory"}


def shown_time(seconds: float) -> str:
    """Returns a time in the largest unit of which it has some."""
    return text.in_units(seconds, (("s", 1), ("ms", 1e-3)), ",.2f", f"{seconds * 1e6:,.1f} us")


def shown_bytes(count: float) -> str:
    """Returns a number of bytes with K = 1,000, as in rates of links."""
    return text.in_units(count, text.DECIMAL[1:], ",.2f", f"{count:,.0f} bytes")


def show(report: Report, request: ProblemRequest, model: RingModel) -> None:
    """A prediction as text."""
    ring, device = model.ring, request.device
    way = "K and V gathered" if ring.gather else plural(report["steps"], "step")
    say(
        f"{plural(ring.ranks, 'rank')}, {ring.layout}, {way}{', backward' * model.backward}: {describe(request.problem)}", rest="  "
    )
    say(f"{device.name} each, {shown_bytes(model.link)} a second each way between them")
    if request.problem.options.masked:
        say("What a mask leaves out is not counted over ranks: every score that position leaves is, and that the mask is asked.")
    click.echo()
    show_by_rank(report)
    click.echo()
    show_steps(report, model)
    click.echo()
    show_whole(report, model)


def show_by_rank(report: Report) -> None:
    """Show what each rank computes, sends, receives, moves and holds."""
    rows = []
    for row in report["by_rank"]:
        sent, received = (sum(each[way] for each in row["link"].values()) for way in ("sent_bytes", "received_bytes"))
        hbm = row["hbm"]["total"]
        cells = (row["scores"], row["calls"], sent, received, hbm["read_bytes"], hbm["write_bytes"], row["memory_bytes"])
        rows.append((f"{row['rank']}", *(f"{cell:,}" for cell in cells)))
    heads = ("rank", "scores", "calls", "sent", "received", "read", "written", "memory")
    show_table(heads, rows, left=(), titles=("", "", "", *["bytes of the link"] * 2, *["bytes of HBM"] * 2, ""))
    click.echo()
    tensors = [name for name, each in report["by_rank"][0]["link"].items() if each["sent_bytes"] or each["received_bytes"]]
    if tensors:
        say(f"On the link: {', '.join(tensors)}. HBM: what the calls move by the closed forms, without adding their results up.")
    say(f"The mean rank has {report['balance']:.1%} of the busiest one's scores (rank {report['busiest_rank']}).")


def show_steps(report: Report, model: RingModel) -> None:
    """The busiest rank's steps, equal ones together."""
    rows: list[list[Any]] = []
    for number, step in enumerate(report["timeline"]):
        cells = [f"{step[name] * 1e6:,.1f}" for name in ("products", "sums", "transfer", "seconds")]
        if rows and rows[-1][1:] == cells:
            rows[-1][0] = (rows[-1][0][0], number)
        else:
            rows.append([(number, number), *cells])
    if len(rows) > MOST_SHOWN + 2:  # ragged chunks make steps differ: the first and the last ones say enough
        rows = [*rows[: MOST_SHOWN // 2], ["..."] * 5, *rows[-MOST_SHOWN // 2 :]]
    named = [(label(row[0]), *row[1:]) for row in rows]
    say("The busiest rank's steps in microseconds, by models: while one computes, the next one's keys travel.")
    say(f"Products are those of the planner's formulas: {model.known}.")
    click.echo()
    show_table(("step", "products", "sums", "transfer", "step takes"), named)


def label(steps: Any) -> str:
    if isinstance(steps, str):
        return steps
    first, last = steps
    return f"{first}" if first == last else f"{first} to {last}"


def show_whole(report: Report, model: RingModel) -> None:
    """Time of all, the share of the ideal, the length from which transfers hide, and the better way."""
    during, apart = model.waits
    waiting = [f"{shown_time(during)} in steps"] * (during > 0) + [f"{shown_time(apart)} before or after them"] * (apart > 0)
    say(f"all steps: {shown_time(model.seconds)}, of which {' and '.join(waiting) or 'none'} waiting for transfers")
    if model.efficiency is not None and model.efficiency_by_count is not None:
        say(
            f"share of ideal: {model.efficiency_by_count:.1%} by count of work and transfers, {model.efficiency:.1%} by the "
            f"models, which count ends of tiles and sums too; one device would take {shown_time(model.one_device)}"
        )
    hidden = model.hidden_from
    if hidden is not None:
        say(
            f"transfers hide from N = P b F / (f w B) = {hidden.length:,.0f} on: b = {hidden.carried:,} bytes travel of a "
            f"position, f = {hidden.flops:,} FLOP a score of all heads, w = {hidden.share:.3f} of a step's scores are seen, "
            f"F = {hidden.rate / 1e12:,.0f} TFLOP/s by the model, B = {model.link / 1e9:,.0f} GB/s"
        )
    elif model.ring.ranks > 1 and not model.ring.gather and len(model.ring.shifts) > 1:
        say("a window bounds what a row computes: a longer sequence hides transfers no better")
    held = report["by_rank"][0]["memory"]
    say(f"memory of rank 0: {', '.join(f'{name} {shown_bytes(size)}' for name, size in held.items() if size)}")
    beside, best = report["beside"], report["better"]
    other = "gathering K and V" if beside["gather_kv"] else "a ring"
    say(
        f"{other} would take {shown_time(beside['seconds'])} and {shown_bytes(beside['memory_bytes'])} of the busiest rank's memory"
    )
    say(f"better: {best['way']}: {best['why']}")


# -- sweep --over ranks ------------------------------------------------------------------------------------------------------

OVER = "ranks"
DEFAULT_RANGE = (1, 1024, 11, True)
COLUMNS = {
    "ranks": Column("ranks"),
    "steps": Column("steps"),
    "sent_bytes": Column("sent"),
    "received_bytes": Column("received"),
    "hbm_bytes": Column("HBM"),
    "memory_bytes": Column("memory"),
    "step_seconds": Column("step, us", ",.1f", 1e6),
    "transfer_seconds": Column("transfer, us", ",.1f", 1e6),
    "seconds": Column("all, ms", ",.3f", 1e3),
    "efficiency_by_count": Column("count", ".1%"),
    "efficiency": Column("model", ".1%"),
    "other_efficiency": Column("other", ".1%"),
    "better": Column("better"),
}


def points_of(request: ProblemRequest, values: list[int], split: Split, plot: Path | None) -> Points:
    """The points; a picture is drawn on the way."""
    require_over_ranks("--over ranks")
    counting = tracked(values, "counting the points")
    rows = [row(split.model(request, ranks), split.model(request, ranks, gather=not split.gather_kv)) for ranks in counting]
    told, device = describe(request.problem), request.device
    link = f"{device.name}, {split.link / 1e9:g} GB/s each way"
    if plot is not None:
        from cupyflash.sim.pictures.plot_ring import plot_ranks

        plot_ranks(plot, request.problem, device, split.link, values, f"{told}; {link}, by models")
    head = {
        "over": OVER,
        "problem": flat(request.problem),
        "device": taken(device, "name", "hbm_bandwidth"),
        "layout": split.layout,
        "gather_kv": split.gather_kv,
        "link_bytes_a_second": split.link,
    }
    way, other = ("K and V gathered", "of a ring") if split.gather_kv else ("a ring", "of gathered keys")
    legend = (
        "of the busiest rank; sent, received: bytes of the link; HBM: bytes that its calls move; memory: bytes of what it holds; "
        "step: the longest one's products (by the planner's formulas) and sums, transfer: the longest one, us and all by models, "
        "nothing is measured; count, "
        "model: share of ideal by count of work and transfers, and by the models, which count ends of tiles and sums too; other: "
        f"the latter {other}"
    )
    return Points(head, rows, f"{told} over ranks, {split.layout}, {way}; {link}", COLUMNS, (legend,), {})


def row(model: RingModel, other: RingModel) -> Report:
    """One number of ranks: the counts of the busiest rank, the seconds of its longest step."""
    rank, steps = model.busiest, model.timeline
    sent, received = model.link_bytes[rank]
    return {
        "ranks": model.ring.ranks,
        "steps": len(model.ring.shifts),
        "sent_bytes": sent,
        "received_bytes": received,
        "hbm_bytes": model.hbm(rank).total_bytes,
        "memory_bytes": sum(model.memory(rank).values()),
        "step_seconds": max(step.products + step.sums for step in steps),
        "transfer_seconds": max(step.transfer for step in steps),
        "seconds": model.seconds,
        "balance": model.balance,
        "efficiency_by_count": model.efficiency_by_count,
        "efficiency": model.efficiency,
        "other_efficiency": other.efficiency,
        "hidden_from": model.hidden_from and model.hidden_from.length,
        "better": better(model, other)["way"],
    }
