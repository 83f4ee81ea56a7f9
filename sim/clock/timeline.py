"""A timeline of one thread block, for JSON and the page: the clock's own run of its machine code, in spans (`spans`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf, prod
from typing import Any, NamedTuple

from cupyflash.device import Device

from .bulk import BULK
from .lines import NOWHERE, Place, calls
from .loaded import LoadedLaunch
from .spans import SHORT, BlockSpans, Flight, WarpSpan
from .stalls import NOBODY
from .steps import Unit
from .whole import Clock

MOST_SPANS = 20_000
"""The largest number of spans in all rows, which a page draws without delay. A longer block is shown up to some clock."""
MOST_RUN = 200_000
"""The most instructions of machine code that a run takes, of all warps that go together: some seconds. A spin loop ends there."""
MOST_COPIES = 32
"""Rows of copies; more at a time share one more row, which counts them. A page could not draw thousands."""

KINDS = (
    ("works", "runs instructions", "work"),
    ("special", "exponentials and other special functions", "work"),
    ("shared", "loads and stores of shared memory", "work"),
    ("global", "loads and stores of global memory", "work"),
    ("copies", "starts copies", "work"),
    ("products", "starts products", "product"),
    ("waits_fixed", "waits the fixed clocks behind an instruction", "wait"),
    ("waits_operand", "waits for a result of its own", "wait"),
    ("waits_shared", "waits for a load from shared memory", "wait"),
    ("waits_load", "waits for a load from global memory", "wait"),
    ("waits_unit", "waits for a unit or a queue that is busy", "wait"),
    ("waits_turn", "could go on, but another warp is issued", "wait"),
    ("waits_barrier", "waits at a barrier", "wait"),
    ("waits_cluster", "waits at the cluster's barrier", "wait"),
    ("waits_phase", "waits at an mbarrier", "wait"),
    ("waits_copies", "waits for its copies (cp.async)", "wait"),
    ("waits_stores", "waits for its copies out (bulk group)", "wait"),
    ("waits_products", "waits for its products (wgmma)", "wait"),
    ("done", "has exited", "done"),
    ("copy_flying", "on its way", "copy"),
    ("copy_there", "there, until somebody has waited for it", "copy"),
    ("product", "a tensor core at work", "product"),
)
"""The kinds of spans: name, label, class."""
NUMBERS = {name: number for number, (name, _, _) in enumerate(KINDS)}
NO_WORK = frozenset(name for name, _, kind in KINDS if kind in ("wait", "done"))

MODEL = (
    "The run is a model's, of the kernel's machine code on one multiprocessor of the {device} with {blocks} at once; "
    "nothing of it is measured.{left}"
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


def told(make: Callable[[], LoadedLaunch], device: Device, block: int, text: Callable[[Place], str]) -> dict[str, Any]:
    """A launch's "timeline" of a thread block, for JSON; or null and "timeline_why", in one sentence, if it has none.

    `make` returns the launch. Its RuntimeError (a tool is missing) and ValueError (machine code that is not executed here) are
    reasons, as are those of the clock.
    """
    try:
        return {"timeline": timeline(make(), device, block, text)}
    except (RuntimeError, ValueError) as error:
        return {"timeline": None, "timeline_why": str(error)}


def timeline(loaded: LoadedLaunch, device: Device, block: int, text: Callable[[Place], str]) -> dict[str, Any]:
    """The timeline of a thread block (its linear index in the grid) of a launch, for JSON; docs/trace.md has the keys.

    `text` gives the text of a line of source. The multiprocessor has the blocks that the launch gives it beside this one; of a
    cluster, the first block is shown. Raises as `Clock` does; RuntimeError for a block that runs more than MOST_RUN instructions.
    """
    launch = loaded.launch
    launch.most = MOST_RUN
    clock = Clock(launch, device)
    clock.begin = next(n for n in range(clock.blocks) if launch.number(launch.index(n)) == block)
    lines = TimelineLines(calls(loaded.cubin, launch.kernel.name), [each.address for each in launch.kernel.instructions], text)
    run = BlockSpans(clock, lines.words)
    run.run(clock.traces, clock.apart)
    return TimelineReport(clock, run, lines).to_dict()


class TimelineLines:
    """The lines of the kernel's own file that instructions are of, each with the kernel's line that called it, -1 for none.

    `frames`: the lines of each address, each called from the next.
    """

    def __init__(self, frames: Mapping[int, Sequence[Place]], addresses: Sequence[int], text: Callable[[Place], str]):
        self.frames, self.addresses, self.text = frames, addresses, text
        self.numbers: dict[tuple[Place, int], int] = {}

    def own(self, at: int) -> tuple[Place, int]:
        frames = self.frames.get(self.addresses[at], (NOWHERE,))
        file, last = frames[-1]
        line = next(each for each in frames if each[0] == file)
        return line, -1 if line == frames[-1] else last

    def of(self, at: int) -> int:
        """The number of an instruction's line, -1 for none."""
        own = (NOWHERE, -1) if at == NOBODY else self.own(at)
        return -1 if own[0] == NOWHERE else self.numbers.setdefault(own, len(self.numbers))

    def words(self, at: int) -> str:
        """The place of an instruction, behind its name."""
        (file, number), call = self.own(at)
        return "" if not file else f" of line {number}" + (f" (called at line {call})" if call >= 0 else "")

    def told(self) -> list[list[Any]]:
        return [[file.rpartition("/")[2], number, self.text((file, number)), call] for (file, number), call in self.numbers]


Spans = list[tuple[float, float, str, int, str]]
"""Spans of a row of the page: (from, to, kind, line, note)."""


class Drawn(NamedTuple):
    """A row of the page."""

    name: str
    group: str
    role: str
    spans: Spans


@dataclass(frozen=True)
class TimelineReport:
    """A block's run for JSON."""

    clock: Clock
    run: BlockSpans
    lines: TimelineLines

    def to_dict(self) -> dict[str, Any]:
        clock, run = self.clock, self.run
        rows = [*self.warps(), *self.copies(), *self.products()]
        begins = sorted(span[0] for row in rows for span in row.spans)
        shown = run.end if len(begins) <= MOST_SPANS else begins[MOST_SPANS]
        notes: dict[str, int] = {"": -1}
        drawn = [
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
        launch, gaps = clock.launch, self.gaps()
        left = "" if not gaps else f" Left out, since they repeat: {' and '.join(text for _, text in gaps)}."
        blocks = f"{len(clock.traces)} block{'s' * (len(clock.traces) > 1)}"
        block = clock.begin // prod(launch.cluster) * prod(launch.cluster)
        return {
            "kernel": launch.kernel.name,
            "block": launch.number(launch.index(block)),
            "blocks": clock.blocks,
            "target": "sm_{}{}".format(*launch.kernel.capability),
            "device": clock.device.name,
            "clocks": round(run.end, 2),
            "shown": round(shown, 2),
            "model": MODEL.format(device=clock.device.name, blocks=blocks, left=left),
            "kinds": [{"name": name, "label": label, "class": kind} for name, label, kind in KINDS],
            "sources": self.lines.told(),
            "notes": [note for note in notes if note],
            "rows": drawn,
            "meetings": [[round(at, 2), number, warps] for at, number, warps in run.met() if at <= shown],
            "gaps": [[round(at, 2), text] for at, text in gaps if at <= shown],
            "shares": [shares(row) for row in rows if row.group == "warps"],
            "busy": {name: round(clocks, 2) for name, clocks in self.busy().items() if clocks},
        }

    def gaps(self) -> list[tuple[float, str]]:
        """Returns the clocks at which turns are left out, and how many."""
        turns = [at for at, _ in self.run.result.turns]
        if self.clock.roles:
            cuts = self.clock.shortened[0].cuts
            return [(turns[cut.mark], f"{cut.revolutions} turns of a ring") for cut in cuts if cut.mark < len(turns)]
        loop = self.clock.tracer.loop
        at = loop.left_out.start if loop else len(turns)
        return [(turns[at], f"{len(loop.left_out)} turns of the loop")] if loop and at < len(turns) else []

    def busy(self) -> dict[str, float]:
        """Returns the clocks of each limit that the block itself takes."""
        return self.clock.taken((issue, 1) for trace in self.clock.traces[0] for issue in trace)

    def warps(self) -> list[Drawn]:
        takes = [step.clocks for step in self.clock.steps]
        rows = []
        for number, (spans, role) in enumerate(zip(self.run.rows, self.roles(), strict=True)):
            found = joined(spans, self.lines, takes)
            end = self.run.lives[number][1]
            if end < self.run.end:
                found.append((end, self.run.end, "done", -1, ""))
            rows.append(Drawn(f"warp {number}", "warps", role, found))
        return rows

    def roles(self) -> list[str]:
        """The role of each warp, if only some multiply: these are consumers; others that start copies into shared memory are
        producers."""
        used = [{issue.at for issue in trace} for trace in self.clock.traces[0]]
        multiply = [any(self.clock.steps[at].unit in (Unit.TENSOR, Unit.PRODUCT) for at in those) for those in used]
        copy = {flight.warp for flight in self.run.flights if flight.inward}
        if all(multiply) or not any(multiply):
            return [""] * len(used)
        return ["consumer" if works else "producer" if row in copy else "" for row, works in enumerate(multiply)]

    # -- copies and products

    def copies(self) -> list[Drawn]:
        """Copies in as many rows as overlap, up to MOST_COPIES; cp.async of one tensor in the n-th groups of warps, at a time, are
        one."""
        together: defaultdict[tuple[int, ...], list[list[Flight]]] = defaultdict(list)
        flights = sorted(self.run.flights, key=lambda flight: flight.begin)
        for number, flight in enumerate(flights):
            apart = flight.group is None or self.opcode(flight.at) in BULK
            alike = together[(-1, number) if apart else (flight.tensor, flight.group or 0)]
            if alike and flight.begin < max(each.landed for each in alike[-1]):
                alike[-1].append(flight)
            else:
                alike.append([flight])
        rows: list[Spans] = []
        others: list[list[Flight]] = []
        counts: defaultdict[int, int] = defaultdict(int)
        for some in sorted(chain(*together.values()), key=lambda some: some[0].begin):
            begin, landed = some[0].begin, max(flight.landed for flight in some)
            seen = min(flight.seen for flight in some)
            counts[some[0].tensor] += 1
            free = next((row for row in rows if row[-1][1] <= begin), None)
            if free is None and len(rows) == MOST_COPIES:
                others.append(some)
                continue
            note, line = self.copies_text(some, counts[some[0].tensor]), self.lines.of(some[0].at)
            spans = [(begin, landed, "copy_flying", line, note)]
            if landed < seen < inf:
                spans.append((landed, seen, "copy_there", line, note))
            if free is None:
                rows.append(spans)
            else:
                free += spans
        found = [Drawn("copies" if not n else f"copies {n + 1}", "copies", "", spans) for n, spans in enumerate(rows)]
        return found + ([Drawn("more copies", "copies", "", self.crowd(others))] if others else [])

    def crowd(self, copies: Sequence[Sequence[Flight]]) -> Spans:
        """Spans of copies that have no row of their own, in the order of their begins: those that overlap are one."""
        groups: list[tuple[float, float, list[Flight]]] = []
        for some in copies:
            begin, landed = some[0].begin, max(flight.landed for flight in some)
            if groups and begin < groups[-1][1]:
                first, last, known = groups[-1]
                groups[-1] = first, max(last, landed), [*known, *some]
            else:
                groups.append((begin, landed, list(some)))
        return [
            (begin, end, "copy_flying", self.lines.of(some[0].at), f"{len(some):,} more copies: {sizes(some)}")
            for begin, end, some in groups
        ]

    def copies_text(self, some: Sequence[Flight], number: int) -> str:
        """Copies in words; they are the `number`-th of their tensor."""
        one, warps = some[0], sorted({flight.warp for flight in some})
        who = f"warp {warps[0]}" if len(warps) == 1 else f"warps {', '.join(map(str, warps))}"
        if len(warps) > 2 and warps[-1] - warps[0] + 1 == len(warps):
            who = f"warps {warps[0]} to {warps[-1]}"
        name = self.clock.launch.tensors[one.tensor].name if one.tensor >= 0 else "shared memory"
        how = "cp.async" if self.opcode(one.at) not in BULK else "TMA" if self.opcode(one.at).startswith("UTMA") else "bulk"
        return f"{name}, copy {number}: {sizes(some)} {'to' if one.inward else 'from'} shared memory, {how} of {who}"

    def opcode(self, at: int) -> str:
        return self.clock.launch.kernel.instructions[at].opcode

    def products(self) -> list[Drawn]:
        """The tensor cores at work, by sub-core for mma.sync and by warpgroup for wgmma."""
        found = []
        for name, products in sorted(self.run.tensor.items()):
            spans: Spans = []
            for begin, end, kind, at, note in products:
                what = kind, self.lines.of(at), note
                if spans and begin - spans[-1][1] < SHORT and spans[-1][2:] == what:
                    spans[-1] = spans[-1][0], end, *what
                else:
                    spans.append((begin, end, *what))
            found.append(Drawn(name, "products", "", spans))
        return found


def sizes(some: Sequence[Flight]) -> str:
    return f"{sum(flight.nbytes for flight in some):,} bytes"


def shares(row: Drawn) -> list[float]:
    """A warp's clocks by kind."""
    sums: defaultdict[str, float] = defaultdict(float)
    for begin, end, kind, *_ in row.spans:
        sums[kind] += end - begin
    return [round(sums[name], 2) for name, _, _ in KINDS]


def joined(spans: Sequence[WarpSpan], lines: TimelineLines, takes: Sequence[float]) -> Spans:
    """Spans, joined if they are of one kind and line. Work of less than SHORT clocks joins the work after it: both get the kind and
    line that take their time, or units, longest."""
    out: Spans = []
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

    for start, end, kind, at, note in spans:
        if kind in NO_WORK:
            close(start)
            out.append((start, end, kind, lines.of(at), note))
            continue
        key = kind, lines.of(at)
        if parts and start - begin >= SHORT and parts[key] < max(parts.values()):
            close(start)
        if not parts:
            begin = start
        parts[key] += max(end - start, takes[at])
    close(spans[-1][1] if spans else 0.0)
    return out
