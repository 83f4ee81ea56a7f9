"""Traces for people: as JSON, and as one page that plays them side by side, with one clock of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cupyflash.basics import Array, Report
from cupyflash.request.problem import Problem
from cupyflash.schedules import BackwardSchedule
from cupyflash.schedules.moves import VISIT
from cupyflash.sim.numbers.inputs import Decoding
from cupyflash.sim.numbers.reference import visible
from cupyflash.sim.page import filled
from cupyflash.sim.trace import HeldTensor, Trace, axes_of, inner_of, rooms_of
from cupyflash.sim.trace.lines import BACKWARD, FORWARD, MASK_TILES, Algorithm, AlgorithmStep, reasons_of
from cupyflash.sim.traffic import TENSORS, TensorTraffic, Traffic
from cupyflash.sim.two_level.machine import replay

COLUMNS = ("launch", "block", "tensor", "write", "slab", "row", "row_end", "col", "col_end", "bytes", "line", "source", "scores")
"""The columns of the rows of moves in a report: tensor, line and source are places in the player's lists (line -1: none), and
each of the scores is (head, row, row_end, col, col_end)."""
# Runs of keys that are drawn as masked out, their ends
MOST_PIECES = 40_000


def algorithm_of(trace: Trace) -> Algorithm:
    """The paper's algorithm of a trace; one that is not known here has its name alone."""
    name = trace.schedule.algorithm
    return (BACKWARD if isinstance(trace.schedule, BackwardSchedule) else FORWARD).get(name, Algorithm(name, (), {}))


def step_of(trace: Trace, launch: int) -> AlgorithmStep:
    """The step of the algorithm that a launch does."""
    return algorithm_of(trace).steps.get(trace.kernels[launch].name, MASK_TILES)


def report(traces: Sequence[Trace], names: Sequence[str], title: str) -> Report:
    """Traces of one problem, for JSON; `names` are the players'."""
    one = next((each for each in traces if each.decoding is not None), traces[0])
    p, device = one.schedule.problem, one.schedule.device
    return {
        "title": title,
        "columns": list(COLUMNS),
        "device": device.name,
        "rows": p.seqlen_q,
        "cols": p.seqlen_k if one.decoding is None else longest(one.decoding),
        "heads": p.heads,
        "key_heads": p.kv_heads,
        "batch": p.batch,
        **masked(partial(seen, p) if one.decoding is None else partial(seen_by_sequence, one.decoding)),
        "players": [player(each, name) for each, name in zip(traces, names, strict=True)],
    }


def masked(seen: Callable[[bool], Array]) -> Report:
    """The keys that rows do not see, "masks": for each row the left-out keys first <= k < end, as a flat list of ends; and
    "mask_of", the index of each head's mask.

    `seen` (heads of the batch, n_q, n_k) is called with masks or, if these have too many pieces to draw, by position and lengths
    alone.
    """
    found = distinct(seen(True))
    if sum(len(row) for mask in found[0] for row in mask) > MOST_PIECES:
        found = distinct(seen(False))
    return {"masks": found[0], "mask_of": found[1]}


def seen(p: Problem, with_mask: bool) -> Array:
    """The keys that the rows of a problem's heads see, (heads of the batch, n_q, n_k)."""
    rows, pattern = np.arange(p.seqlen_q), p.options.pattern
    kept = np.zeros((p.batch, p.heads, p.seqlen_q, p.seqlen_k), bool)
    for batch, length in enumerate(p.keys_of_each):
        kept[batch, :, :, :length] = p.sees(rows, length)
    if with_mask and pattern is not None and pattern.bits is not None:
        kept &= pattern.kept
    return kept.reshape(p.head_count, p.seqlen_q, p.seqlen_k)


def seen_by_sequence(decoding: Decoding, with_mask: bool) -> Array:
    """The same of decoding, of as many keys as the longest sequence has."""
    batch, heads, n_q, _ = decoding.arrays["q"].shape
    kept = np.zeros((batch, heads, n_q, longest(decoding)), bool)
    for own, inputs in zip(kept, decoding.sequences, strict=True):
        keys = inputs.k.shape[2]
        told = inputs if with_mask else replace(inputs, beside={})
        own[..., :keys] = visible(told, (1, heads, n_q, keys))[0]
    return kept.reshape(batch * heads, n_q, -1)


def longest(decoding: Decoding) -> int:
    """Keys of the sequence that has the most, the new ones among them."""
    return max(int(inputs.k.shape[2]) for inputs in decoding.sequences)


def distinct(kept: Array) -> tuple[list[list[list[int]]], list[int]]:
    """Different ones among (heads, n_q, n_k) as the ends of what each row leaves out, and which of them is each head's."""
    numbers = {each.tobytes(): each for each in kept}
    order = list(numbers)
    edges = [[np.flatnonzero(np.diff(~row, prepend=False, append=False)).tolist() for row in each] for each in numbers.values()]
    return edges, [order.index(each.tobytes()) for each in kept]


def player(trace: Trace, name: str) -> Report:
    """One trace, its `moves` as rows of COLUMNS; `lines` are (number, depth, text)."""
    algorithm, schedule = algorithm_of(trace), trace.schedule
    lines = algorithm.lines_with(trace.tensors)
    places = {number: place for place, (number, _, _) in enumerate(lines)}
    form, sources = replay(schedule), list(dict.fromkeys(move.source for move in trace.moves))
    tensors = sorted(trace.tensors, key=lambda name: TENSORS.index(name) if name in TENSORS else len(TENSORS))
    rows: list[list[Any]] = []
    begun: set[tuple[int, int]] = set()
    for move in trace.moves:
        block = move.launch, move.block
        line = step_of(trace, move.launch).line(move.tensor, move.write, block not in begun)
        if not move.write:
            begun.add(block)
        made = [[each.head, *each.rows, *each.cols] for each in move.scores]
        at = [move.launch, move.block, tensors.index(move.tensor), int(move.write), move.slab, *move.rows, *move.cols]
        rows.append([*at, move.nbytes, places.get(line, -1) if line is not None else -1, sources.index(move.source), made])
    return {
        "algorithm": schedule.algorithm,
        "backward": isinstance(schedule, BackwardSchedule),
        "name": name,
        "title": algorithm.title,
        "block_rows": schedule.block_rows,
        "block_cols": schedule.block_cols,
        "sram_bytes": schedule.device.sram_per_block,
        "total_bytes": form.total_bytes,
        "lines": [list(line) for line in lines],
        "launches": [launch(trace, number, places) for number in range(len(trace.kernels))],
        "tensors": [tensor(held, form) for held in map(trace.tensors.__getitem__, tensors)],
        "sources": sources,
        "moves": rows,
    }


def tensor(held: HeldTensor, form: Traffic) -> Report:
    """A tensor. Where its rows are not a sequence's keys in their order, it has `pages` of so many `page_rows`: (sequence, first
    key), or null where they are nobody's."""
    moved = form.get(held.name, TensorTraffic())
    slabs, rows, cols = held.shape
    of_pages = {"page_rows": held.page_rows, "pages": [page and list(page) for page in held.pages]} if held.pages else {}
    return {
        "name": held.name,
        "slabs": slabs,
        "rows": rows,
        "cols": cols,
        "bytes": held.nbytes,
        "axes": axes_of(held.name),
        "read_bytes": moved.read_bytes,
        "write_bytes": moved.write_bytes,
        **of_pages,
    }


def launch(trace: Trace, number: int, places: dict[int, int]) -> Report:
    """A launch: its kernel, and what the SRAM of one of its thread blocks holds."""
    kernel, step = trace.kernels[number], step_of(trace, number)
    constants, (rooms, inside) = dict(kernel.constants), rooms_of(trace, number)
    walk, stages = trace.walk(number), int(constants.get("STAGES", 1))
    # As many tiles of each are held as the kernel has stages.
    ring = {move.tensor.name for move in walk.moves if inner_of(walk) and move.when == VISIT}
    return {
        "kernel": kernel.name,
        "does": step.does,
        "blocks": kernel.grid,
        "threads": kernel.threads,
        "shared_bytes": kernel.shared_bytes,
        "block_rows": int(constants.get("BR", trace.schedule.tiling.used.block_rows)),
        "block_cols": int(constants.get("BC", trace.schedule.tiling.used.block_cols)),
        "rooms": [[room.name, room.nbytes] for room in rooms],
        "inside": {tensor: [room, stages if tensor in ring else 1] for tensor, room in inside.items()},
        "registers": step.registers,
        "reasons": reasons(trace, number),
        "scores": [places[line] for line in step.scores],
        **(trace.timelines[number] if trace.timelines else {"timeline": None, "timeline_why": "it was not asked for"}),
    }


def reasons(trace: Trace, number: int) -> Report:
    """The reasons of a launch's moves: by side and tensor, and of its writes before any read."""
    moved = {(move.tensor, move.write) for move in trace.moves if move.launch == number}
    told = reasons_of(trace.kernels[number].name)
    sides = {"read": False, "write": True}
    known = {side: {name: why for name, why in told[side].items() if (name, write) in moved} for side, write in sides.items()}
    return known | {"first": told["first"]}


def page(told: Report, choices: Report | None = None) -> str:
    """A report as one HTML page that needs nothing else, and `choices` of other sizes. ValueError if an algorithm moves nothing."""
    if still := [each["name"] for each in told["players"] if not each["moves"]]:
        raise ValueError(f"{still[0]} moves nothing for {told['title']}: there is nothing to play")
    return filled("trace", told if choices is None else told | {"choices": choices}, "sizes.js", "compare.js")
