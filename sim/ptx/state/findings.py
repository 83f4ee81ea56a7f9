"""Findings: the faults of a kernel, their place and severity, and the suppressions that let some of them pass.

A suppression is an entry of a file, or a comment in the source.

A file has an entry a line, kind, kernel, place and reason; `#` begins a comment:

    race           histogram*   hist.cu:17       every thread writes the same zero
    out-of-bounds  *            vendor/scan.cuh  its tail is masked away

Patterns are the shell's (`*`, `?`). A kernel's name is that of the PTX or of the source. A place is FILE, FILE:LINE or
FILE:FIRST-LAST, of any line that a finding names: its own, the calls that it is inlined at, a race's other side. In the source,
on such a line or alone on the one before: `// cupyflash: allow race: every thread writes the same zero`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupyflash.sim.names import ERROR as ERROR
from cupyflash.sim.names import FAIL_ON as FAIL_ON
from cupyflash.sim.names import NOTE as NOTE
from cupyflash.sim.names import SEVERITIES as SEVERITIES
from cupyflash.sim.names import WARNING as WARNING
from cupyflash.words import plural

from ..text.syntax import Array, Line, PtxInstruction, base_name, source_name
from .lane_sets import LaneSet

LIMIT = 100
"""Most findings that a launch keeps; further ones are only counted."""

KINDS = {
    "bad arrival": "at an mbarrier",
    "bad call": "through a pointer to no suitable function, or free for what is not allocated",
    "bad rank": "mapa to a rank that the cluster does not have",
    "bad texture": "a handle of no texture or surface, or a wrong use of one (`memory.texels`)",
    "bad tensor map": "an invalid map, or a wrong use of one (`memory.regions`)",
    "budget": "all instructions that the launch may run are spent",
    "cluster barrier": "barrier.cluster.wait without an arrival before, or two arrivals without a wait between",
    "deadlock": "threads wait for an event that can never come",
    "disagreement": "between wgmma's descriptors, or between the warps of a warpgroup",
    "endless": "no loop comes nearer to its end",
    "exited block": "shared memory of a block that has exited, or may have",
    "in flight": "shared memory whose asynchronous copy, or registers whose wgmma, nobody waited for",
    "inactive source": "a shuffle from a lane that does not take part",
    "misaligned": "an address that is no multiple of the access's alignment",
    "missing fence": "no wgmma.fence between accesses to a product's registers",
    "missing lanes": "a warp-wide instruction without all lanes that it names",
    "not begun": "shared memory of a block that may not run yet",
    "null pointer": "an access near address 0",
    "out of bounds": "an access outside of the memory that its address belongs to",
    "partial barrier": "threads had exited before a barrier of the whole block",
    "proxy": "no fence between two ways to memory (`order.moments`)",
    "race": "two accesses that nothing orders (`order.races`)",
    "read-only": "a store to memory that may only be read",
    "register budget": "a setmaxnreg that the warp or its warpgroup may not run",
    "stack overflow": "calls too deep",
    "swizzle": "of a wgmma descriptor, other than that of the copy that wrote the tile",
    "trap": "the kernel's own, or a failed assertion",
    "uninitialised": "memory or a register that nobody wrote",
}
"""All kinds of findings, with their meanings."""

MENDS = {
    "cluster barrier": "one barrier.cluster.arrive and one wait of each thread (cluster.sync())",
    "in flight": "a wait for it (cp.async.wait_group, the mbarrier's phase, wgmma.wait_group), and a barrier if others read it",
    "missing fence": "wgmma.fence before the first wgmma that uses the registers",
    "missing lanes": "a mask of just the lanes that come there",
    "partial barrier": "no return before the barrier: put the work, not the barrier, under the condition",
    "proxy": "fence.proxy.async by the threads that wrote, before the barrier that the reader waits at",
}
"""Likely mends of kinds that have one."""
WARP_ONLY = "__syncwarp()"
"""The mend of a race within a warp."""


@dataclass(frozen=True)
class Finding:
    """One fault of a kernel, at the first lane that has it.

    `kind` is one of `KINDS`, `severity` of `SEVERITIES`.
    `source` is (file, line) of the CUDA source if the PTX has line information; if that is in an inlined function,
    `inlined_at` has the lines of the calls, the kernel's own last. `ptx_line` is 0 for a copy or the like, whose `kernel` is
    the name of its function. `block` is the linear block index, `warp` counts within the block, `lane` within the warp.
    `address` is the virtual address (shared: the offset). `instructions` counts the PTX instructions of this line with the
    fault (an unrolled loop has copies), `lanes` the lanes, each as often as it had it.
    `other`: the other side's line of a race and the like, as in `Counters.lines` (the PTX's if there is no other).
    `hazard`: a race's, such as read after write; `mend`: the likely mend, "" if none is known. `also`: the lines of others that
    have the same cause, which are not findings of their own.
    """

    kind: str
    message: str
    kernel: str
    source: Line | None
    ptx_line: int
    block: int
    warp: int
    lane: int
    address: int | None = None
    tensor: str | None = None
    inlined_at: tuple[Line, ...] = ()
    instructions: int = 1
    lanes: int = 1
    other: Line | None = None
    severity: str = ERROR
    hazard: str = ""
    mend: str = ""
    also: tuple[Line, ...] = ()

    def __str__(self) -> str:
        place = (
            f"{self.source[0]}:{self.source[1]}" if self.source else f"PTX line {self.ptx_line}" if self.ptx_line else self.kernel
        )
        if self.inlined_at:
            place += " (inlined at {}:{})".format(*self.inlined_at[-1])
        less = f"{self.severity}: " if self.severity != ERROR else ""
        copies = f"; {self.instructions} PTX instructions" if self.instructions > 1 and self.ptx_line else ""
        who = f", {thread_name((self.block, self.warp, self.lane))}" if self.ptx_line else ""
        who = f"[{source_name(self.kernel)}{who}{copies}]"
        hazard, mend = f" ({self.hazard})" * bool(self.hazard), f"; likely mend: {self.mend}" * bool(self.mend)
        lines = list(dict.fromkeys(at_line(line) for line in self.also if line != self.places[0]))
        elsewhere = f", at {', '.join(lines[:MOST_LINES])}{' and elsewhere' if len(lines) > MOST_LINES else ''}" if lines else ""
        also = f"; {len(self.also)} more of this cause{elsewhere}" if self.also else ""
        return f"{place}: {less}{self.kind}: {self.message}{hazard}{also}{mend} {who}"

    def called(self, name: str) -> Finding:
        """Returns the finding with a tensor's name in the source in front of its own."""
        if self.tensor is None or name == self.tensor:
            return self
        return replace(self, message=self.message.replace(repr(self.tensor), f"{name!r} ({self.tensor})", 1))

    @property
    def places(self) -> tuple[Line, ...]:
        """Returns all lines that the finding names: its own (the PTX's if there is no other), the calls, the other side."""
        return (self.source or ("PTX", self.ptx_line), *self.inlined_at, *([self.other] if self.other else []))


def shorten(finding: object) -> str:
    """Returns the text of a finding with file names relative to the current folder."""
    return str(finding).replace(os.getcwd() + os.sep, "")


MOST_LINES = 4
"""Most lines of other findings of a cause that a text names."""


def by_cause(findings: Iterable[Finding], alike: Callable[[Finding], Hashable]) -> tuple[Finding, ...]:
    """Returns one finding for all that are `alike`, the first, with the lines of the others and their counts."""
    groups: dict[Hashable, list[Finding]] = {}
    for one in findings:
        groups.setdefault(alike(one), []).append(one)
    out = []
    for first, *others in groups.values():
        lines = [line for one in others for line in (one.places[0], *one.also)]
        counts = {name: sum(getattr(one, name) for one in (first, *others)) for name in ("instructions", "lanes")}
        out.append(replace(first, **counts, also=(*first.also, *lines)) if others else first)
    return tuple(out)


LOCKSTEP = "work only in lockstep"
"""The words of races within a warp that its lanes' own steps hide."""


STRAY = re.compile(r"of (\d+) bytes? at 0x[0-9a-f]+: (?:offset )?(\d+) (of|before) ")
"""The width and the offset of an access to global memory that is out of bounds."""


def stray(finding: Finding) -> re.Match[str] | None:
    return STRAY.search(finding.message) if finding.kind == "out of bounds" else None


def of_line(finding: Finding) -> Hashable:
    """Returns a key that findings of one cause share: accesses out of bounds of one line, as behind one guard; races of code that
    relies on lockstep, as in a reduction's steps; races in inlined functions which one barrier between their calls would order.
    """
    if LOCKSTEP in finding.message:
        return finding.severity, LOCKSTEP, finding.inlined_at, finding.tensor
    if finding.source and stray(finding):
        return finding.severity, finding.source, finding.inlined_at
    if finding.kind == "race" and finding.inlined_at and " between " in finding.mend:
        return finding.severity, finding.hazard, finding.mend, finding.inlined_at[-1], finding.tensor
    return id(finding)


def of_thread(finding: Finding) -> Hashable:
    """Returns a key that findings of one cause share: the unwritten registers of a thread, as a variable without a value is used in
    many places; the accesses out of bounds of a thread to one element of several arrays, as behind one guard.
    """
    thread = finding.severity, finding.block, finding.warp, finding.lane
    if found := stray(finding):
        return *thread, int(found[2]) / int(found[1]), found[3]
    if finding.kind == "uninitialised" and finding.message.startswith("register "):
        return thread
    return id(finding)


def of_program(finding: Finding) -> Hashable:
    """Returns a key that the same fault has in each launch of a program, whatever the addresses, threads and allocations."""
    words = re.sub(r"0x[0-9a-f]+|\d+", "", finding.message)
    return finding.kernel, finding.source or finding.ptx_line, finding.inlined_at, finding.other, finding.severity, words


def counted(findings: Sequence[Finding]) -> str:
    """Returns the number of findings of each severity, for a message: 2 errors and 1 warning."""
    numbers = [sum(one.severity == severity for one in findings) for severity in SEVERITIES]
    return " and ".join(plural(number, severity) for number, severity in zip(numbers, SEVERITIES, strict=True) if number)


class Verdict(NamedTuple):
    """The kind of a fault, its severity, hazard and likely mend."""

    kind: str
    severity: str
    hazard: str = ""
    mend: str = ""


Key = tuple[object, ...]
"""The key by which findings count as the same: a launch keeps the first of each key."""


@dataclass
class Record:
    """A finding and its later copies: their PTX lines and lanes."""

    finding: Finding
    number: int
    ptx_lines: set[int]
    lanes: int

    def closed(self) -> Finding:
        return replace(self.finding, instructions=len(self.ptx_lines), lanes=self.lanes)


@dataclass
class Findings:
    """The findings of a launch: the first of each kind, place in the source and tensor; `total` counts all lanes.

    `doubts` become findings or a note only at the end of the launch (`settle`). A finding that one of `allowed` matches is in
    `suppressed` only, by the number of that suppression.
    """

    kernel: str
    allowed: Sequence[Suppression] = ()
    total: int = 0
    found: dict[Key, Record] = field(default_factory=dict)
    doubts: dict[Key, Record] = field(default_factory=dict)
    suppressed: dict[int, dict[Key, Record]] = field(default_factory=dict)
    begun: int = 0
    """Records so far."""

    def report(
        self,
        what: str | Verdict,
        message: str,
        i: PtxInstruction,
        lanes: LaneSet,
        at: Array | int | None = None,
        *,
        count: int | None = None,
        address: int | None = None,
        tensor: str | None = None,
    ) -> None:
        """Records a finding, by its kind an error, of the lanes at these positions in `lanes` (None: all); the first one is named.
        `count`: how many lanes did the same in this execution, if not these.
        """
        positions = np.arange(lanes.n) if at is None else np.atleast_1d(at)
        count = len(positions) if count is None else count
        kind = what if isinstance(what, str) else what.kind
        # Waiting lanes have a finding for each instruction, even on one line.
        key = (kind, (i.line, i.text) if kind == "deadlock" else place_of(i), tensor)
        place = lanes.place(int(positions[0]))
        self.record(what, message, (i,), place, key, count=count, address=address, tensor=tensor)

    def record(
        self,
        what: str | Verdict,
        message: str,
        sides: tuple[PtxInstruction, ...],
        place: tuple[int, int, int],
        key: Key,
        *,
        count: int,
        address: int | None,
        tensor: str | None,
    ) -> None:
        """Records a finding of (block, warp, lane) `place`, the first with this key; `sides`: the instruction, a race's other."""
        kind, severity, hazard, mend = Verdict(what, ERROR) if isinstance(what, str) else what
        assert kind in KINDS, kind
        i, *others = sides
        theirs = others[0].place if others else None
        of_place = self.kernel, i.source, i.line, *place
        more: dict[str, Any] = {"severity": severity, "hazard": hazard, "mend": mend or MENDS.get(kind, "")}
        finding = Finding(kind, message, *of_place, address, tensor, i.inlined_at, other=theirs, **more)
        if self.note(self.found, key, finding, count):
            self.total += count

    def doubt(self, kind: str, message: str, i: PtxInstruction, place: tuple[int, int, int], count: int, address: int) -> None:
        """Records a possible fault; `settle` decides whether it is one."""
        finding = Finding(kind, message, self.kernel, i.source, i.line, *place, address, None, i.inlined_at)
        self.note(self.doubts, (kind, place_of(i), None), finding, count)

    def note(self, records: dict[Key, Record], key: Key, finding: Finding, count: int) -> bool:
        """Enters a finding; False if it is suppressed. Of several with one key the first of the worst severity stays."""
        by = next((number for number, one in enumerate(self.allowed) if one.matches(finding)), None)
        if by is not None:
            records = self.suppressed.setdefault(by, {})
        known = records.get(key)
        if known is not None:
            known.ptx_lines.add(finding.ptx_line)
            known.lanes += count
            if finding.severity == ERROR != known.finding.severity:
                known.finding = finding
            if known.finding.mend.startswith(WARP_ONLY):  # other warps may be in it, too
                known.finding = replace(known.finding, mend=finding.mend)
            return by is None
        if len(records) >= LIMIT and by is None and finding.severity == ERROR:
            # An error replaces a warning.
            lesser = [each for each, record in records.items() if record.finding.severity != ERROR]
            if lesser:
                del records[lesser[-1]]
        if len(records) < LIMIT or by is not None:
            records[key] = Record(finding, self.begun, {finding.ptx_line}, count)
            self.begun += 1
        return by is None

    @property
    def clean(self) -> bool:
        """True if there is nothing to report so far."""
        return not (self.found or self.doubts or self.suppressed)

    @staticmethod
    def closed(records: dict[Key, Record]) -> tuple[Finding, ...]:
        return tuple(record.closed() for record in records.values())

    def settle(self, matters: bool) -> list[Finding]:
        """Turns doubts into findings if `matters`, else all of them together into one note, which it returns."""
        doubts, self.doubts = self.doubts, {}
        if matters:
            self.total += sum(record.lanes for record in doubts.values())
            merged = sorted({**doubts, **self.found}.items(), key=lambda item: (item[1].finding.severity != ERROR, item[1].number))
            self.found = dict(sorted(merged[:LIMIT], key=lambda item: item[1].number))
            return []
        if not doubts:
            return []
        records = list(doubts.values())
        lines, lanes = set().union(*(r.ptx_lines for r in records)), sum(r.lanes for r in records)
        first = records[0].finding
        told = f"{first.message}; nothing came of it"
        return [replace(first, message=told, instructions=len(lines), lanes=lanes, severity=NOTE)]


def place_of(i: PtxInstruction) -> tuple[object, ...]:
    """Returns what an instruction's copies in an unrolled loop share: line, calls, opcode; without line information, the PTX's."""
    return (i.opcode, i.source, i.inlined_at) if i.source else (i.line, i.text)


@dataclass(frozen=True)
class Stuck:
    """Lanes that cannot go on at an instruction, and what they wait for: the end of "32 threads wait ..."."""

    instruction: PtxInstruction
    lanes: LaneSet
    what: str


MOST_GROUPS = 6
"""Most other waiting groups that a deadlock's message names."""


def report_deadlock(findings: Findings, groups: list[Stuck]) -> None:
    """Reports a deadlock: a finding for each group, with the places of the others."""
    places: dict[tuple[PtxInstruction, str], list[LaneSet]] = {}
    for group in groups:
        places.setdefault((group.instruction, group.what), []).append(group.lanes)
    for group in groups:
        others = [
            f"{crowd(*lanes)} at {source(i)} {what}"
            for (i, what), lanes in places.items()
            if (i, what) != (group.instruction, group.what)
        ]
        more = [f"and {len(others) - MOST_GROUPS} groups more"] if len(others) > MOST_GROUPS else []
        elsewhere = "".join(f"; {other}" for other in [*others[:MOST_GROUPS], *more])
        message = f"{stuck(group.lanes.n)} {group.what}{elsewhere}"
        findings.report("deadlock", message, group.instruction, group.lanes, 0, count=group.lanes.n)


def crowd(*sets: LaneSet) -> str:
    """Returns a short name of threads: warps 0-3 of block 1."""
    where: dict[tuple[int, ...], list[int]] = {}
    by_block: dict[int, set[int]] = {}
    for lanes in sets:
        for warp in lanes.warp_ids.tolist():
            block, local = divmod(warp, lanes.wave.warps_per_block)
            by_block.setdefault(lanes.wave.number(lanes.wave.first_block + block), set()).add(local)
    for block, warps in sorted(by_block.items()):
        where.setdefault(tuple(sorted(warps)), []).append(block)
    parts = [f"{ranges('warp', list(warps))} of {ranges('block', blocks)}" for warps, blocks in where.items()]
    return ", ".join(parts[:4]) + (f" and of {len(parts) - 4} blocks more" if len(parts) > 4 else "")


def ranges(noun: str, numbers: list[int]) -> str:
    """Returns numbers as text: warp 3; warps 0-3, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {text}"


def stuck(threads: int) -> str:
    """Returns the subject and verb of a message about waiting threads: 1 thread waits, 2 threads wait."""
    return f"{plural(threads, 'thread')} {'waits' if threads == 1 else 'wait'}"


def source(i: PtxInstruction) -> str:
    """Returns an instruction's place: file:line of the CUDA source if the PTX has it, else the PTX line."""
    return at_line(i.source) if i.source else f"PTX line {i.line} ({i.text})"


def source_and_call(i: PtxInstruction) -> str:
    """Returns `source`, and for inlined code the kernel's line that calls it."""
    return source(i) + (f" (inlined at {at_line(i.inlined_at[-1])})" if i.inlined_at else "")


def thread_name(place: tuple[int, int, int]) -> str:
    """Returns a thread's (block, warp, lane) as text."""
    return "block {}, warp {}, lane {}".format(*place)


def at_line(line: Line) -> str:
    return f"{line[0]}:{line[1]}"


def kernel_line(i: PtxInstruction) -> Line:
    """Returns the line of the kernel itself that an instruction belongs to."""
    return i.inlined_at[-1] if i.inlined_at else i.place


ENTRY = re.compile(r"(\S+)\s+(\S+)\s+(\S+?)(?::(\d+)(?:-(\d+))?)?\s+(\S.*)")
COMMENT = re.compile(r"(?://|/\*)\s*cupyflash:\s*allow\b\s*(.*?)\s*(?=//\s*cupyflash:|\*/|$)")
BY_LENGTH = sorted(KINDS, key=len, reverse=True)
MOST = 1 << 24
"""Most bytes of a source file that is read for its comments."""


@dataclass(frozen=True)
class Suppression:
    """A rule that lets findings of a kind pass in matching kernels and places, for a reason. `written`: its file and line."""

    kind: str
    kernel: str
    file: str
    lines: tuple[int, int] | None
    reason: str
    written: Line

    @staticmethod
    def read(path: str | os.PathLike[str]) -> tuple[Suppression, ...]:
        """Returns the entries of a file. Raises OSError, and ValueError for a line that is not an entry."""
        return tuple(entries(Path(path).read_text(encoding="utf-8"), os.fspath(path)))

    def covers(self, kernel: str) -> bool:
        """True if it is for a kernel, by its name in the PTX."""
        return any(fnmatchcase(name, self.kernel) for name in (kernel, base_name(kernel)))

    def matches(self, finding: Finding) -> bool:
        return finding.kind == self.kind and self.covers(finding.kernel) and any(map(self.at, finding.places))

    def at(self, place: Line) -> bool:
        """True if a line is one of those that it is for."""
        file, line = place
        if self.lines is not None and not self.lines[0] <= line <= self.lines[1]:
            return False
        return fnmatchcase(file, self.file) or fnmatchcase(file, f"*/{self.file}")

    def __str__(self) -> str:
        return f"{self.written[0]}:{self.written[1]} ({self.kind}: {self.reason})"


@dataclass(frozen=True)
class Suppressed:
    """The findings of a launch that one suppression let pass."""

    by: Suppression
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        return f"{counted(self.findings)} suppressed by {self.by}"


def asked(given: str | os.PathLike[str] | Sequence[Suppression]) -> tuple[Suppression, ...]:
    """Returns the suppressions of an argument: a file, or the result of `Suppression.read`. Raises as that, and TypeError."""
    if isinstance(given, (str, os.PathLike)):
        return Suppression.read(given)
    found = tuple(given) if isinstance(given, Sequence) else (None,)
    if not all(isinstance(one, Suppression) for one in found):
        raise TypeError(f"suppressions must be a file, or a sequence of Suppression, got {given!r}")
    return found  # type: ignore[return-value]


def entries(text: str, file: str) -> Iterator[Suppression]:
    """Yields the entries of a file of suppressions. Raises ValueError."""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        found = ENTRY.fullmatch(line)
        if found is None:
            raise ValueError(f"{file}:{number}: a suppression is KIND KERNEL FILE[:LINE[-LINE]] REASON, got {line[:100]!r}")
        kind, kernel, place, first, last, reason = found.groups()
        lines = None if first is None else (int(first), int(last or first))
        yield Suppression(known(kind.replace("-", " "), (file, number)), kernel, place, lines, reason, (file, number))


@dataclass(frozen=True)
class Comment:
    """A comment that lets findings pass, not yet read: the line that it is for, its own place, the text after `allow`."""

    at: Line
    written: Line
    what: str

    def read(self) -> Suppression:
        """Returns the suppression, which holds in any kernel. Raises ValueError if it has no known kind, or no reason."""
        what = self.what.replace("-", " ", 2)
        kind = next((kind for kind in BY_LENGTH if re.match(rf"{kind}\b", what)), "")
        known(kind or what.partition(":")[0], self.written)
        reason = self.what[len(kind) :].strip(" :,;-")
        if not reason:
            place = f"{self.written[0]}:{self.written[1]}"
            raise ValueError(f"{place}: a comment that allows {kind} gives a reason: // cupyflash: allow {kind}: WHY")
        return Suppression(kind, "*", literal(self.at[0]), (self.at[1], self.at[1]), reason, self.written)


def comments(text: str, file: str) -> Iterator[Comment]:
    """Yields the comments of a source file."""
    for number, line in enumerate(text.splitlines(), 1) if "cupyflash:" in text else ():
        alone = re.match(r"\s*(//|/\*.*\*/\s*$)", line) is not None
        for found in COMMENT.finditer(line):
            yield Comment((file, number + alone), (file, number), found[1])


def literal(text: str) -> str:
    """Returns a pattern that only this text matches."""
    return re.sub(r"([*?\[])", r"[\1]", text)


def known(kind: str, written: Line) -> str:
    """Returns a kind of finding. Raises ValueError for an unknown one."""
    if kind not in KINDS:
        allowed = ", ".join(one.replace(" ", "-") for one in KINDS)
        raise ValueError(f"{written[0]}:{written[1]}: a suppression's kind is one of {allowed}, got {kind[:100]!r}")
    return kind


def source_text(file: str) -> str:
    """Returns the text of a source file, "" if it cannot be read any more."""
    try:
        path = Path(file)
        if not path.is_file() or path.stat().st_size > MOST:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def told(suppressed: Sequence[Suppressed], unmatched: Sequence[Suppression]) -> list[str]:
    """Returns lines that list the suppressed findings, and the suppressions that let nothing pass."""
    return [*map(str, suppressed), *(f"nothing to suppress for {one}" for one in unmatched)]


def suppressed_count(suppressed: Sequence[Suppressed]) -> str:
    """Returns the number of suppressed findings as text, "" for none."""
    number = sum(len(one.findings) for one in suppressed)
    return f"{plural(number, 'finding')} suppressed" if number else ""
