"""A timeline of one thread block, for JSON and the page: the work of its warps, copies in flight, products, waits and barriers.

The order of events, and who waits for what, were executed (`ptx.Diary`); the clocks are a model's (`clocks`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import inf
from typing import Any, NamedTuple

from cupyflash.device import Device
from cupyflash.sim.ptx.report.diary import MOST_KEPT, CopySpan, Diary
from cupyflash.sim.ptx.state.lanes import GROUP
from cupyflash.sim.ptx.text.syntax import Line
from cupyflash.sim.timeline.clocks import SHORT, Flight, Played, Span, own_line, play

MOST_SPANS = 20_000
"""The largest number of spans in all rows, which a page draws without delay. A longer block is shown up to some clock."""
MOST_PLAYED = 500_000
"""Instructions: a few seconds. A longer block is played up to some clock."""
MOST_COPIES = 32
"""Rows of copies; more at a time share one more row, which counts them. A page could not draw thousands."""

KINDS = (
    ("works", "runs instructions", "work"),
    ("special", "exponentials and other special functions", "work"),
    ("shared", "loads and stores of shared memory", "work"),
    ("global", "loads and stores of global memory", "work"),
    ("copies", "starts copies", "work"),
    ("products", "starts products", "product"),
    ("waits_operand", "waits for a result of its own", "wait"),
    ("waits_load", "waits for a load from global memory", "wait"),
    ("waits_unit", "waits for its turn, or for a unit", "wait"),
    ("waits_barrier", "waits at a barrier", "wait"),
    ("waits_cluster", "waits at the cluster's barrier", "wait"),
    ("waits_phase", "waits at an mbarrier", "wait"),
    ("waits_memory", "waits for what another warp writes (a loop that asks memory)", "wait"),
    ("waits_copies", "waits for its copies (cp.async)", "wait"),
    ("waits_stores", "waits for its copies out (bulk group)", "wait"),
    ("waits_products", "waits for its products (wgmma)", "wait"),
    ("waits_registers", "waits for registers (setmaxnreg)", "wait"),
    ("stuck", "never goes on: deadlocked, or the launch was stopped", "wait"),
    ("done", "has exited", "done"),
    ("copy_flying", "on its way", "copy"),
    ("copy_there", "there, until somebody has waited for it", "copy"),
    ("product", "a tensor core at work", "product"),
)
"""Of spans: name, label, class."""
NUMBERS = {name: number for number, (name, _, _) in enumerate(KINDS)}
NO_WORK = frozenset(name for name, _, kind in KINDS if kind in ("wait", "done"))

MODEL = (
    "The order, and who waits for what, are those of the execution; the clocks are a model's, of the PTX instructions of one "
    "thread block alone on a multiprocessor of the {device}, and nothing of them is measured."
)


def device_of(target: str) -> Device:
    """A device of the catalogue for the target of some PTX (sm_80, sm_90a): the first of that compute capability, or of the last
    earlier one that it has."""
    digits = "".join(letter for letter in target if letter.isdigit())
    wanted = divmod(int(digits), 10) if digits else (8, 0)
    every = Device.catalogue()
    known = [each.compute_capability for each in every]
    nearest = max((each for each in known if each <= wanted), default=min(known))
    return every[known.index(nearest)]


class TimelineLines:
    """The lines of source that spans are of, each with the kernel's line that called it, as `own_line` has them."""

    def __init__(self, diary: Diary, text: Callable[[Line], str]):
        self.diary, self.text = diary, text
        self.numbers: dict[tuple[Line, int], int] = {}
        self._of: dict[int, int] = {-1: -1}

    def of(self, pc: int) -> int:
        """The number of an instruction's line, -1 for none."""
        found = self._of.get(pc)
        if found is None:
            own = own_line(self.diary.listing.instructions[pc])
            found = self._of[pc] = self.numbers.setdefault(own, len(self.numbers))
        return found

    def told(self) -> list[list[Any]]:
        return [[file.rpartition("/")[2], number, self.text((file, number)), call] for (file, number), call in self.numbers]


class Drawn(NamedTuple):
    """A row of the page: spans as (from, to, kind, line, note)."""

    name: str
    group: str
    role: str
    spans: list[tuple[float, float, str, int, str]]


def timeline(diary: Diary, device: Device, target: str, text: Callable[[Line], str]) -> dict[str, Any]:
    """A diary with clocks, for JSON; `text` gives the text of a line of source. ValueError as `play`."""
    lines = TimelineLines(diary, text)
    played = play(diary, device, most=MOST_PLAYED)
    rows = drawn(diary, played, lines)
    begins = sorted(span[0] for row in rows for span in row.spans)
    shown = played.clocks if len(begins) <= MOST_SPANS else begins[MOST_SPANS]
    if shown < played.clocks and not played.whole:  # sums are of what is shown
        played = play(diary, device, until=shown)
        rows = drawn(diary, played, lines)
    notes: dict[str, int] = {"": -1}
    told = [
        {
            "name": row.name,
            "group": row.group,
            "role": row.role,
            "spans": [
                [round(begin, 2), round(min(end, shown), 2), NUMBERS[kind], line, notes.setdefault(note, len(notes) - 1)]
                for begin, end, kind, line, note in row.spans
                if begin < shown
            ],
        }
        for row in rows
    ]
    return {
        "kernel": diary.kernel,
        "block": diary.block,
        "blocks": diary.blocks,
        "target": target,
        "device": device.name,
        "clocks": round(played.clocks, 2) if played.whole else None,
        "shown": round(shown, 2),
        "model": MODEL.format(device=device.name),
        "kinds": [{"name": name, "label": label, "class": kind} for name, label, kind in KINDS],
        "sources": lines.told(),
        "notes": [note for note in notes if note],
        "rows": told,
        "meetings": [[round(at, 2), number, met] for at, number, met in meetings(played) if at <= shown],
        "shares": [shares(row) for row in rows if row.group == "warps"],
        "busy": {name: round(clocks, 2) for name, clocks in played.busy.items()},
    }


def drawn(diary: Diary, played: Played, lines: TimelineLines) -> list[Drawn]:
    """All rows of the timeline."""
    rows = [
        Drawn(f"warp {number}", "warps", role, joined(spans, lines, played.takes))
        for number, (spans, role) in enumerate(zip(played.rows, roles(diary), strict=True))
    ]
    return rows + copies(diary, played, lines) + products(diary, played, lines)


def why_not(diary: Diary) -> str | None:
    """The reason why a diary has no timeline; None if it has one."""
    if diary.too_long:
        return f"the thread block runs more than {MOST_KEPT:,} stretches of code and accesses"
    return None if any(row.stretches for row in diary.rows) else "the thread block did not run"


def shares(row: Drawn) -> list[float]:
    """A warp's clocks by kind."""
    sums: defaultdict[str, float] = defaultdict(float)
    for begin, end, kind, *_ in row.spans:
        sums[kind] += end - begin
    return [round(sums[name], 2) for name, _, _ in KINDS]


def joined(spans: Sequence[Span], lines: TimelineLines, takes: Mapping[int, float]) -> list[tuple[float, float, str, int, str]]:
    """Spans, joined if they are of one kind and line. Work of less than SHORT clocks joins the work after it: both get the kind and
    line that take their time, or units, longest."""
    out: list[tuple[float, float, str, int, str]] = []
    parts: defaultdict[tuple[str, int], float] = defaultdict(float)
    begin = 0.0

    def close(end: float) -> None:
        if parts:
            kind, line = max(parts, key=lambda part: parts[part])
            if out and out[-1][2:] == (kind, line, "") and out[-1][1] == begin:
                out[-1] = out[-1][0], end, kind, line, ""
            else:
                out.append((begin, end, kind, line, ""))
            parts.clear()

    for start, end, kind, pc, note in spans:
        if kind in NO_WORK:
            close(start)
            out.append((start, end, kind, lines.of(pc), note))
            continue
        key = kind, lines.of(pc)
        if parts and start - begin >= SHORT and parts[key] < max(parts.values()):
            close(start)
        if not parts:
            begin = start
        parts[key] += max(end - start, takes[pc])
    close(spans[-1][1] if spans else 0.0)
    return out


def roles(diary: Diary) -> list[str]:
    """The role of each warp, if only some multiply: consumers multiply, producers are those of the others that start copies into
    shared memory."""
    multiply = []
    for row in diary.rows:
        codes = {stretch.first: stretch for stretch in row.stretches}.values()
        multiply.append(any(diary.listing.flops[pc] for stretch in codes for pc in range(stretch.first, stretch.end)))
    copy = {one.row for one in diary.copies.values() if one.inward}
    if all(multiply) or not any(multiply):
        return [""] * len(diary.rows)
    return ["consumer" if works else "producer" if row in copy else "" for row, works in enumerate(multiply)]


def meetings(played: Played) -> list[tuple[float, int, list[int]]]:
    """The meetings of two or more warps: (time, number, warps); the cluster's barrier is number -1."""
    rows: defaultdict[tuple[float, int, int], set[int]] = defaultdict(set)
    for row, wait, end in played.waits:
        if wait.meeting >= 0:
            number = wait.what.removeprefix("barrier ")
            rows[end, int(number) if number.isdigit() else -1, wait.meeting].add(row)
    return sorted((at, number, sorted(met)) for (at, number, _), met in rows.items() if len(met) > 1)


# -- copies, products -----------------------------------------------------------------------------------------------------


def copies(diary: Diary, played: Played, lines: TimelineLines) -> list[Drawn]:
    """Copies in as many rows as overlap, up to MOST_COPIES; those of cp.async of one tensor that warps have in their n-th groups
    at a time are one."""
    together: defaultdict[tuple[Any, ...], list[list[Flight]]] = defaultdict(list)
    for flight in sorted(played.copies, key=lambda flight: flight.begin):
        copy = diary.copies[flight.number]
        alike = together[(copy.tensor, copy.group) if copy.group >= 0 else (flight.number,)]
        if alike and flight.begin < alike[-1][-1].landed:  # they land in the order in which they begin
            alike[-1].append(flight)
        else:
            alike.append([flight])
    rows: list[list[tuple[float, float, str, int, str]]] = []
    others: list[list[Flight]] = []
    counts: defaultdict[str, int] = defaultdict(int)
    for flights in sorted(chain(*together.values()), key=lambda some: some[0].begin):
        begin, landed = flights[0].begin, max(flight.landed for flight in flights)
        seen, first = min(flight.seen for flight in flights), diary.copies[flights[0].number]
        counts[first.tensor] += 1
        free = next((row for row in rows if row[-1][1] <= begin), None)
        if free is None and len(rows) == MOST_COPIES:
            others.append(flights)
            continue
        note, line = copies_text(diary, flights, counts[first.tensor]), lines.of(first.pc)
        spans = [(begin, landed, "copy_flying", line, note)]
        seen = seen if played.whole else min(seen, played.clocks)
        if landed < seen < inf:
            spans.append((landed, seen, "copy_there", line, note))
        if free is None:
            rows.append(spans)
        else:
            free += spans
    found = [Drawn("copies" if not number else f"copies {number + 1}", "copies", "", spans) for number, spans in enumerate(rows)]
    return found + ([Drawn("more copies", "copies", "", crowd(diary, others, lines))] if others else [])


def crowd(diary: Diary, copies: Sequence[Sequence[Flight]], lines: TimelineLines) -> list[tuple[float, float, str, int, str]]:
    """Spans of copies that have no row of their own, in the order of their begins: those that overlap are one."""
    groups: list[tuple[float, float, list[CopySpan]]] = []
    for flights in copies:
        begin, landed = min(flight.begin for flight in flights), max(flight.landed for flight in flights)
        some = [diary.copies[flight.number] for flight in flights]
        if groups and begin < groups[-1][1]:
            first, last, known = groups[-1]
            groups[-1] = first, max(last, landed), known
            known += some
        else:
            groups.append((begin, landed, some))
    return [
        (begin, end, "copy_flying", lines.of(some[0].pc), f"{len(some):,} more copies: {sum(copy.nbytes for copy in some):,} bytes")
        for begin, end, some in groups
    ]


def copies_text(diary: Diary, flights: Sequence[Flight], number: int) -> str:
    """The copies in words; they are the `number`-th of their tensor."""
    some = [diary.copies[flight.number] for flight in flights]
    one, warps = some[0], sorted({copy.row for copy in some})
    who = f"warp {warps[0]}" if len(warps) == 1 else f"warps {', '.join(map(str, warps))}"
    if len(warps) > 2 and warps[-1] - warps[0] + 1 == len(warps):
        who = f"warps {warps[0]} to {warps[-1]}"
    nbytes, name = sum(copy.nbytes for copy in some), f"{one.tensor or 'shared memory'}, copy {number}"
    if one.how == "cp.async":
        return f"{name}: {nbytes:,} bytes to shared memory, cp.async of {who}"
    way = "to another block's" if one.across else "to" if one.inward else "from"
    return f"{name}: {nbytes:,} bytes {way} shared memory at {one.where}, {one.how} of {who}"


def products(diary: Diary, played: Played, lines: TimelineLines) -> list[Drawn]:
    """The tensor cores at work, by sub-core for mma.sync and by warpgroup for wgmma."""
    found: defaultdict[str, list[tuple[float, float, str, int, str]]] = defaultdict(list)
    every = [(f"tensor core {core}", each) for core, spans in enumerate(played.cores) for each in spans]
    for begin, end, number in sorted(played.products, key=lambda each: diary.products[each[2]].row):
        product = diary.products[number]
        every.append((f"wgmma, warps {product.row} to {product.row + GROUP - 1}", (begin, end, "product", product.pc, "")))
    for name, (begin, end, kind, pc, note) in every:
        spans, what = found[name], (kind, lines.of(pc), note)
        if spans and begin - spans[-1][1] < SHORT and spans[-1][2:] == what:
            spans[-1] = spans[-1][0], end, *what
        else:
            spans.append((begin, end, *what))
    return [Drawn(name, "products", "", spans) for name, spans in found.items()]
