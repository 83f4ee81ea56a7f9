"""A kernel's profile as text, 100 columns wide."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cupyflash.sim.ptx import Counts, Traffic
from cupyflash.sim.ptx.syntax import Line

if TYPE_CHECKING:
    from cupyflash.sim.profiling import Profile

WIDTH = 100


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Aligned columns, numbers to the right, the columns `left` to the left; what is too wide at the end is cut."""
    cells = [list(heads), *(list(row) for row in rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(heads))]
    lines = []
    for row in cells:
        padded = (
            cell.ljust(width) if n in left else cell.rjust(width) for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        line = "  " + "  ".join(padded).rstrip()
        lines.append(line if len(line) <= WIDTH else line[: WIDTH - 3] + "...")
    return lines


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def profile_text(profile: Profile, top: int) -> str:
    """The whole page; sections without anything to say are left out."""
    sections = (
        head(profile),
        summary(profile),
        findings(profile, top),
        global_memory(profile),
        shared_memory(profile),
        mix(profile),
        hot_lines(profile, top),
        traffic_lines(profile, top),
        conflict_lines(profile, top),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def head(profile: Profile) -> list[str]:
    size = " x ".join
    grid, block = (size(str(n) for n in triple) for triple in (profile.grid, profile.block))
    place = f" ({profile.file})" if profile.file else ""
    return [
        f"{profile.name}{place}, {profile.target}: grid {grid}, block {block}",
        "Simulated: counts are of PTX instructions; the GPU's machine code, caches and time are not modelled.",
    ]


def summary(profile: Profile) -> list[str]:
    counters = profile.launch.counters
    on = counters.thread_instructions - counters.predicated_off
    lanes = f"{counters.active_lanes:.1f} of 32 an instruction"
    if counters.predicated_off and counters.instructions:
        lanes += f", {on / counters.instructions:.1f} less those that their predicate switches off"
    conflicts = counters.shared_memory
    rows = [
        ("warp instructions", f"{counters.instructions:,}"),
        ("active lanes", lanes),
        ("divergent branches", f"{counters.divergent_branches:,} (times that a warp split)"),
        (
            "global memory",
            f"{counters.global_memory.requested_bytes:,} bytes requested, {counters.global_memory.sectors:,} sectors",
        ),
        ("shared memory", f"{profile.static_shared:,} bytes static + {profile.dynamic_shared:,} dynamic a block"),
        ("bank conflicts", f"{conflicts.conflicts:,} of {plural(conflicts.wavefronts, 'wavefront')}"),
        ("tensor cores", f"{counters.mma_flops:,} FLOPs"),
        ("barriers", f"{counters.barriers:,} (completed by a block)"),
        ("findings", str(profile.launch.findings_total) if profile.launch.findings else "none"),
    ]
    return table(("", ""), rows, (0, 1))[1:]


def findings(profile: Profile, top: int) -> list[str]:
    found = profile.launch.findings
    if not found:
        return []
    lines = [f"Findings: {plural(profile.launch.findings_total, 'lane')} at {plural(len(found), 'place')}"]
    for finding in found[:top]:
        lines += textwrap.wrap(shorten(finding), WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return lines + [f"  ... and {len(found) - top} more"] * (len(found) > top)


def shorten(finding: object) -> str:
    """A finding with file names as seen from here."""
    return str(finding).replace(os.getcwd() + os.sep, "")


def numbers(one: Traffic) -> list[str]:
    """Bytes, sectors, sectors a request and coalescing of one side of some traffic."""
    return [
        f"{one.requested_bytes:,}",
        f"{one.sectors:,}",
        f"{one.sectors / one.requests:.1f}",
        f"{100 * (one.coalescing or 0):.0f} %",
    ]


def global_memory(profile: Profile) -> list[str]:
    rows = []
    for name, traffic in profile.launch.traffic.items():
        tensor = profile.tensors.get(name)
        about = f"{name} {tensor.dtype}[{', '.join(map(str, tensor.shape))}]" if tensor else name
        if not traffic.requests:
            rows.append([about, "none", *[""] * 7])
        for side, one in traffic.sides().items():
            if one.requests:
                times = f"{one.requested_bytes / tensor.nbytes:.2f}" if tensor else ""
                unique = one.unique_read_bytes + one.unique_write_bytes
                first, *rest = numbers(one)
                rows.append([about, side, first, times, f"{unique:,}", f"{one.requests:,}", *rest])
    if not rows:
        return []
    heads = ("tensor", "", "bytes", "/ size", "unique", "requests", "sectors", "a request", "coalescing")
    return [
        "Global memory (sectors of 32 bytes; coalescing: bytes requested / bytes of their sectors)",
        *table(heads, rows, (0, 1)),
    ]


def shared_memory(profile: Profile) -> list[str]:
    rows = [
        (kind, f"{width} B", f"{c.bytes:,}", f"{c.requests:,}", f"{c.wavefronts:,}", f"{c.ideal_wavefronts:,}", f"{c.conflicts:,}")
        for (kind, width), c in sorted(profile.launch.counters.shared.items())
    ]
    if not rows:
        return []
    return [
        "Shared memory (conflicts: wavefronts beyond the ideal)",
        *table(("access", "a lane", "bytes", "requests", "wavefronts", "ideal", "conflicts"), rows),
    ]


def mix(profile: Profile) -> list[str]:
    counters = profile.launch.counters
    rows = [(name, f"{count:,}", share(count, counters.instructions)) for name, count in counters.by_class.items()]
    return ["Instruction mix (warp instructions)", *table(("class", "count", "share"), rows)] if rows else []


# -- by line ------------------------------------------------------------------------------------------------------------


def label(profile: Profile, line: Line) -> str:
    """The number of a line of the kernel's own file; with the file's name where it is another."""
    file, number = line
    own = profile.file and os.path.realpath(profile.file) == file
    return str(number) if own else f"{os.path.basename(file)}:{number}"


def source(profile: Profile, line: Line, counts: Counts) -> str:
    """The text of a line; for inlined code first the kernel's lines that call it."""
    text = " ".join(profile.source_text(line).split())
    if not counts.inlined_at:
        return text
    sites = [label(profile, site) for site in sorted(counts.inlined_at)]
    shown = ", ".join(sites[:3]) + ", ..." * (len(sites) > 3)
    return f"from {shown}: {text}"


def ranked(profile: Profile, weights: dict[Line, float], top: int) -> list[tuple[Line, Counts]]:
    """The lines that weigh most."""
    lines = profile.launch.counters.lines
    heavy = sorted((line for line in weights if weights[line]), key=lambda line: (-weights[line], line))
    return [(line, lines[line]) for line in heavy[:top]]


def by_line(title: str, profile: Profile, weights: dict[Line, float], top: int) -> tuple[str, list[tuple[Line, Counts]]]:
    """The title with how many lines are shown, and the lines."""
    chosen = ranked(profile, weights, top)
    known = sum(1 for weight in weights.values() if weight)
    return (f"{title}, the first {len(chosen)} of {known} lines" if known > len(chosen) else title), chosen


def hot_lines(profile: Profile, top: int) -> list[str]:
    lines = profile.launch.counters.lines
    title, chosen = by_line("Instructions by line", profile, {line: c.instructions for line, c in lines.items()}, top)
    rows = [
        [
            label(profile, line),
            f"{c.instructions:,}",
            share(c.instructions, profile.launch.counters.instructions),
            f"{c.active_lanes:.1f}",
            f"{c.divergent_branches:,}",
            source(profile, line, c),
        ]
        for line, c in chosen
    ]
    return [title, *table(("line", "instr.", "share", "lanes", "diverge", "source"), rows, (0, 5))] if rows else []


def traffic_lines(profile: Profile, top: int) -> list[str]:
    lines = profile.launch.counters.lines
    title, chosen = by_line("Global memory by line", profile, {line: c.global_memory.sectors for line, c in lines.items()}, top)
    rows = []
    for line, c in chosen:
        text = source(profile, line, c)
        for name, traffic in c.traffic.items():
            sided = ((side, one) for side, one in traffic.sides().items() if one.requests)
            rows += [[label(profile, line), name, side, *numbers(one), text] for side, one in sided]
    heads = ("line", "tensor", "", "bytes", "sectors", "a request", "coalescing", "source")
    return [title, *table(heads, rows, (0, 1, 2, 7))] if rows else []


def conflict_lines(profile: Profile, top: int) -> list[str]:
    lines = profile.launch.counters.lines
    title, chosen = by_line("Bank conflicts by line", profile, {line: c.shared_memory.conflicts for line, c in lines.items()}, top)
    rows = []
    for line, c in chosen:
        for (kind, width), p in sorted(c.shared.items()):
            if p.conflicts:
                numbers = [f"{n:,}" for n in (p.requests, p.wavefronts, p.ideal_wavefronts, p.conflicts)]
                rows.append([label(profile, line), f"{kind} {width} B", *numbers, source(profile, line, c)])
    heads = ("line", "access", "requests", "wavefronts", "ideal", "conflicts", "source")
    return [title, *table(heads, rows, (0, 1, 6))] if rows else []
