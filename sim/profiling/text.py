"""A kernel's profile as text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cupyflash.sim.ptx import Counts, Traffic
from cupyflash.sim.ptx.report.counters import total
from cupyflash.sim.ptx.report.findings import counted, suppressed_count, told
from cupyflash.sim.ptx.text.syntax import Line, Refusal, base_name
from cupyflash.sim.text import paragraph, table
from cupyflash.words import plural

if TYPE_CHECKING:
    from cupyflash.sim.profiling import Profile


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def profile_text(profile: Profile, top: int, width: int) -> str:
    """The whole profile as text, `width` columns wide, without empty sections."""
    sections = (
        head(profile, width),
        summary(profile, width),
        findings(profile, top, width),
        global_memory(profile, width),
        behind_l2(profile, width),
        shared_memory(profile, width),
        mix(profile, width),
        hot_lines(profile, top, width),
        traffic_lines(profile, top, width),
        conflict_lines(profile, top, width),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def head(profile: Profile, width: int) -> list[str]:
    size = " x ".join
    grid, block = (size(str(n) for n in triple) for triple in (profile.grid, profile.block))
    place = f" ({profile.file})" if profile.file else ""
    what = f"{profile.name}{place}, {profile.target}: grid {grid}, block {block}"
    if profile.cluster:
        what += f", cluster {size(str(n) for n in profile.cluster)}"
    caches = "L1" if profile.l2 else "caches"
    counts = f"Simulated: counts are of PTX instructions; the GPU's machine code, {caches} and time are not modelled."
    others = [f"Not executed: {base_name(kernel)}: {first_refusal(items)}." for kernel, items in profile.refused.items()]
    parts = [paragraph(what, rest="  ", width=width), paragraph(counts, width=width)]
    return [line for part in (*parts, *(paragraph(text, rest="  ", width=width) for text in others)) for line in part]


def first_refusal(items: Sequence[Refusal]) -> str:
    """One line on the statements that the machine does not execute: the first one, and the number of others."""
    line, text, reason = items[0]
    more = f" (and {len(items) - 1} more)" if len(items) > 1 else ""
    return f"line {line} of the PTX, {text}: {reason}{more}"


def summary(profile: Profile, width: int) -> list[str]:
    counters = profile.launch.counters
    on = counters.thread_instructions - counters.predicated_off
    lanes = f"{counters.active_lanes:.1f} of 32 an instruction"
    if counters.predicated_off and counters.instructions:
        lanes += f", {on / counters.instructions:.1f} less those that their predicate switches off"
    moved, conflicts = counters.global_memory, counters.shared_memory
    launch = profile.launch
    found = f"{launch.findings_total:,} ({counted(launch.findings)})" if launch.findings else "none"
    rows = [
        ("warp instructions", f"{counters.instructions:,}"),
        ("active lanes", lanes),
        ("divergent branches", f"{counters.divergent_branches:,} (times that a warp split)"),
        ("global memory", f"{plural(moved.requested_bytes, 'byte')} requested, {plural(moved.sectors, 'sector')}"),
        ("shared memory", f"{plural(profile.static_shared, 'byte')} static + {profile.dynamic_shared:,} dynamic a block"),
        ("bank conflicts", f"{conflicts.conflicts:,} of {plural(conflicts.wavefronts, 'wavefront')}"),
        ("tensor cores", plural(counters.mma_flops, "FLOP")),
        ("barriers", f"{counters.barriers:,} (completed by a block)"),
        ("findings", "; ".join(filter(None, (found, suppressed_count(launch.suppressed))))),
    ]
    label = max(len(name) for name, _ in rows) + 4
    return [line for name, text in rows for line in paragraph(text, first=f"  {name}".ljust(label), rest=" " * label, width=width)]


def findings(profile: Profile, top: int, width: int) -> list[str]:
    found, launch = profile.launch.findings, profile.launch
    lines = [f"Findings: {plural(profile.launch.findings_total, 'lane')} at {plural(len(found), 'place')}"] if found else []
    for finding in found[:top]:
        lines += paragraph(shorten(finding), first="  ", rest="    ", width=width)
    lines += [f"  ... and {len(found) - top} more"] * (len(found) > top)
    others = [*map(shorten, launch.notes), *(shorten(line) for line in told(launch.suppressed, launch.unmatched))]
    return lines + [line for one in others for line in paragraph(one, first="", rest="    ", width=width)]


def shorten(finding: object) -> str:
    """A finding with file names relative to the current folder."""
    return str(finding).replace(os.getcwd() + os.sep, "")


def numbers(one: Traffic) -> list[str]:
    """Bytes, sectors, sectors a request and coalescing of one direction of traffic."""
    return [
        f"{one.requested_bytes:,}",
        f"{one.sectors:,}",
        f"{one.sectors / one.requests:.1f}",
        f"{100 * (one.coalescing or 0):.0f} %",
    ]


def global_memory(profile: Profile, width: int) -> list[str]:
    rows = []
    named = profile.launch.traffic
    others = total(Traffic, (moved for name, moved in profile.launch.counters.traffic.items() if name not in named))
    for name, traffic in [*named.items(), *[("variables of the module", others)] * bool(others.requests)]:
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
        *paragraph("Global memory (sectors of 32 bytes; coalescing: bytes requested / bytes of their sectors)", width=width),
        *table(heads, rows, left=(0, 1), width=width),
    ]


def behind_l2(profile: Profile, width: int) -> list[str]:
    """The section on DRAM's traffic behind the L2."""
    if profile.l2 is None or not profile.l2.found.asked:
        return []
    told, device = profile.l2.to_dict(), profile.l2.device
    rows = []
    for name, row in told["tensors"].items():
        rate = "" if row["hit_rate"] is None else f"{100 * row['hit_rate']:.1f} %"
        rows.append([name, *(f"{row[key]:,}" for key in ("read_bytes", "dram_read_bytes")), rate])
        rows[-1] += [f"{row[key]:,}" for key in ("write_bytes", "dram_write_bytes")]
    registers = "" if profile.l2.registers is None else f" with {plural(profile.l2.registers, 'register')} a thread"
    (slots,), (blocks,) = told["resident_blocks"], told["thread_blocks"]
    about = (
        f"DRAM behind the L2 of {device.name}, by a model: {told['l2_bytes']:,} bytes, {told['ways']} ways, cold at the start; "
        f"{plural(blocks, 'thread block')}, {slots:,} at a time{registers}, in lockstep"
    )
    heads = ("tensor", "asked to read", "from DRAM", "reads hit", "asked to write", "to DRAM")
    return [*paragraph(about, width=width), *table(heads, rows, width=width)]


def shared_memory(profile: Profile, width: int) -> list[str]:
    counters = profile.launch.counters
    own = ("Shared memory (conflicts: wavefronts beyond the ideal)", counters.shared)
    others = ("Distributed shared memory (of other blocks of the cluster)", counters.distributed)
    pages: list[str] = []
    for title, counts in (own, others):
        numbers = {key: (c.bytes, c.requests, c.wavefronts, c.ideal_wavefronts, c.conflicts) for key, c in sorted(counts.items())}
        rows = [(kind, f"{size} B", *(f"{number:,}" for number in found)) for (kind, size), found in numbers.items()]
        heads = ("access", "a lane", "bytes", "requests", "wavefronts", "ideal", "conflicts")
        pages += [*[""] * bool(pages), title, *table(heads, rows, width=width)] if rows else []
    return pages


def mix(profile: Profile, width: int) -> list[str]:
    counters = profile.launch.counters
    rows = [(name, f"{count:,}", share(count, counters.instructions)) for name, count in counters.by_class.items()]
    return ["Instruction mix (warp instructions)", *table(("class", "count", "share"), rows, width=width)] if rows else []


# -- by line ------------------------------------------------------------------------------------------------------------


def label(profile: Profile, line: Line) -> str:
    """A line's number, with the file's name unless it is the kernel's own file."""
    file, number = line
    own = profile.file and os.path.realpath(profile.file) == file
    return str(number) if own else f"{os.path.basename(file)}:{number}"


def source(profile: Profile, line: Line, counts: Counts) -> str:
    """The text of a line; inlined code begins with the kernel's lines that call it."""
    text = " ".join(profile.source_text(line).split())
    if not counts.inlined_at:
        return text
    sites = [label(profile, site) for site in sorted(counts.inlined_at)]
    shown = ", ".join(sites[:3]) + ", ..." * (len(sites) > 3)
    return f"from {shown}: {text}"


def ranked(profile: Profile, weights: dict[Line, float], top: int) -> list[tuple[Line, Counts]]:
    """The `top` lines with the largest weights."""
    lines = profile.launch.counters.lines
    heavy = sorted((line for line in weights if weights[line]), key=lambda line: (-weights[line], line))
    return [(line, lines[line]) for line in heavy[:top]]


def by_line(title: str, profile: Profile, weights: dict[Line, float], top: int) -> tuple[str, list[tuple[Line, Counts]]]:
    """The title with the number of lines shown, and the lines."""
    chosen = ranked(profile, weights, top)
    known = sum(1 for weight in weights.values() if weight)
    return (f"{title}, the first {len(chosen)} of {known} lines" if known > len(chosen) else title), chosen


def hot_lines(profile: Profile, top: int, width: int) -> list[str]:
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
    heads = ("line", "instr.", "share", "lanes", "diverge", "source")
    return [title, *table(heads, rows, left=(0, 5), cut=True, width=width)] if rows else []


def traffic_lines(profile: Profile, top: int, width: int) -> list[str]:
    lines = profile.launch.counters.lines
    title, chosen = by_line("Global memory by line", profile, {line: c.global_memory.sectors for line, c in lines.items()}, top)
    rows = []
    for line, c in chosen:
        text = source(profile, line, c)
        for name, traffic in c.traffic.items():
            sided = ((side, one) for side, one in traffic.sides().items() if one.requests)
            rows += [[label(profile, line), name, side, *numbers(one), text] for side, one in sided]
    heads = ("line", "tensor", "", "bytes", "sectors", "a request", "coalescing", "source")
    return [title, *table(heads, rows, left=(0, 1, 2, 7), cut=True, width=width)] if rows else []


def conflict_lines(profile: Profile, top: int, width: int) -> list[str]:
    lines = profile.launch.counters.lines
    title, chosen = by_line("Bank conflicts by line", profile, {line: c.shared_memory.conflicts for line, c in lines.items()}, top)
    rows = []
    for line, c in chosen:
        for (kind, size), p in sorted(c.shared.items()):
            if p.conflicts:
                numbers = [f"{n:,}" for n in (p.requests, p.wavefronts, p.ideal_wavefronts, p.conflicts)]
                rows.append([label(profile, line), f"{kind} {size} B", *numbers, source(profile, line, c)])
    heads = ("line", "access", "requests", "wavefronts", "ideal", "conflicts", "source")
    return [title, *table(heads, rows, left=(0, 1, 6), cut=True, width=width)] if rows else []
