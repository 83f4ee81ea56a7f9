"""A kernel's profile as text."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupyflash.sim.ptx import Counters, Counts, Launch, SharedCounts, Traffic
from cupyflash.sim.ptx.state.counters import total
from cupyflash.sim.ptx.state.findings import counted, shorten, suppressed_count, told
from cupyflash.sim.ptx.text.syntax import Line, Refusal, base_name
from cupyflash.sim.text import paragraph, table
from cupyflash.words import plural

if TYPE_CHECKING:
    from cupyflash.sim.profiling import Profile


COLUMN = 8
"""Wavefronts for each ideal one from which on accesses look like those down a column."""
PAD = "Likely mend: rows that are one element longer, as tile[32][33] for tile[32][32]: a column then has a bank for each row."
L2_KEYS = ("read_bytes", "dram_read_bytes", "write_bytes", "dram_write_bytes")


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


@dataclass(frozen=True)
class ProfileText:
    """A profile as text, `width` columns wide; each table by line shows the `top` lines. `whole_findings`: one line each."""

    profile: Profile
    top: int
    width: int
    whole_findings: bool = False

    def whole(self) -> str:
        """All sections that are not empty."""
        sections = (
            self.head(),
            self.summary(),
            self.findings(),
            self.global_memory(),
            self.behind_l2(),
            self.shared_memory(),
            self.mix(),
            self.hot_lines(),
            self.traffic_lines(),
            self.conflict_lines(),
        )
        return "\n\n".join("\n".join(lines) for lines in sections if lines)

    def paragraph(self, words: str, first: str = "", rest: str = "") -> list[str]:
        return paragraph(words, first=first, rest=rest, width=self.width)

    def table(self, title: list[str], heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
        """A table below its title, nothing without rows; source, in the last column, may be cut."""
        return [*title, *table(heads, rows, left=left, cut=heads[-1] == "source", width=self.width)] if rows else []

    @property
    def launch(self) -> Launch:
        return self.profile.launch

    @property
    def counters(self) -> Counters:
        return self.launch.counters

    def head(self) -> list[str]:
        profile = self.profile
        extents = {"grid": profile.grid, "block": profile.block, "cluster": profile.cluster}
        shown = ", ".join(f"{name} {' x '.join(map(str, extent))}" for name, extent in extents.items() if extent)
        place = f" ({profile.file})" if profile.file else ""
        what = f"{profile.name}{place}, {profile.target}: {shown}"
        caches = "L1" if profile.l2 else "caches"
        counts = f"Simulated: counts are of PTX instructions; the GPU's machine code, {caches} and time are not modelled."
        others = [f"Not executed: {base_name(kernel)}: {first_refusal(items)}." for kernel, items in profile.refused.items()]
        parts = [self.paragraph(what, rest="  "), self.paragraph(counts), *(self.paragraph(text, rest="  ") for text in others)]
        return [line for part in parts for line in part]

    def summary(self) -> list[str]:
        profile, counters, launch = self.profile, self.counters, self.launch
        on = counters.thread_instructions - counters.predicated_off
        lanes = f"{counters.active_lanes:.1f} of 32 an instruction"
        if counters.predicated_off and counters.instructions:
            lanes += f", {on / counters.instructions:.1f} less those that their predicate switches off"
        moved, conflicts = counters.global_memory, counters.shared_memory
        found = f"{launch.findings_total:,} ({counted(launch.findings)})" if launch.findings else "none"
        rows = [
            ("warp instructions", f"{counters.instructions:,}"),
            ("active lanes", lanes),
            ("divergent branches", f"{counters.divergent_branches:,} (times that a warp split)"),
            ("global memory", f"{plural(moved.requested_bytes, 'byte')} requested, {plural(moved.sectors, 'sector')}"),
            (
                "shared memory",
                f"{plural(profile.static_shared, 'byte')} static + {profile.dynamic_shared:,} dynamic a block",
            ),
            ("bank conflicts", f"{conflicts.conflicts:,} of {plural(conflicts.wavefronts, 'wavefront')}"),
            ("tensor cores", plural(counters.mma_flops, "FLOP")),
            ("barriers", f"{counters.barriers:,} (completed by a block)"),
            ("findings", "; ".join(filter(None, (found, suppressed_count(launch.suppressed))))),
        ]
        label = max(len(name) for name, _ in rows) + 4
        return [line for name, text in rows for line in self.paragraph(text, f"  {name}".ljust(label), " " * label)]

    def findings(self) -> list[str]:
        launch = self.launch
        found = launch.findings
        lines = [f"Findings: {plural(launch.findings_total, 'lane')} at {plural(len(found), 'place')}"] if found else []
        for finding in found[: self.top]:
            lines += [f"  {shorten(finding)}"] if self.whole_findings else self.paragraph(shorten(finding), "  ", "    ")
        lines += [f"  ... and {len(found) - self.top} more"] * (len(found) > self.top)
        for other in (*launch.notes, *told(launch.suppressed, launch.unmatched)):
            lines += [shorten(other)] if self.whole_findings else self.paragraph(shorten(other), rest="    ")
        return lines

    def global_memory(self) -> list[str]:
        rows, named = [], self.launch.traffic
        others = total(Traffic, (moved for name, moved in self.counters.traffic.items() if name not in named))
        for name, traffic in [*named.items(), *[("variables of the module", others)] * bool(others.requests)]:
            tensor = self.profile.tensors.get(name)
            about = f"{name} {tensor.dtype}[{', '.join(map(str, tensor.shape))}]" if tensor else name
            if not traffic.requests:
                rows.append([about, "none", *[""] * 7])
            for side, one in traffic.sides().items():
                if one.requests:
                    times = f"{one.requested_bytes / tensor.nbytes:.2f}" if tensor else ""
                    unique = one.unique_read_bytes + one.unique_write_bytes
                    first, *rest = numbers(one)
                    rows.append([about, side, first, times, f"{unique:,}", f"{one.requests:,}", *rest])
        title = self.paragraph("Global memory (sectors of 32 bytes; coalescing: bytes requested / bytes of their sectors)")
        heads = ("tensor", "", "bytes", "/ size", "unique", "requests", "sectors", "a request", "coalescing")
        return self.table(title, heads, rows, left=(0, 1))

    def behind_l2(self) -> list[str]:
        """The section on DRAM's traffic behind the L2."""
        l2 = self.profile.l2
        if l2 is None or not l2.found.asked:
            return []
        told = l2.to_dict()
        rows = []
        for name, row in told["tensors"].items():
            rate = "" if row["hit_rate"] is None else f"{100 * row['hit_rate']:.1f} %"
            read, from_dram, write, to_dram = (f"{row[key]:,}" for key in L2_KEYS)
            rows.append([name, read, from_dram, rate, write, to_dram])
        registers = "" if l2.registers is None else f" with {plural(l2.registers, 'register')} a thread"
        (slots,), (blocks,) = told["resident_blocks"], told["thread_blocks"]
        about = (
            f"DRAM behind the L2 of {l2.device.name}, by a model: {told['l2_bytes']:,} bytes, {told['ways']} ways, "
            f"cold at the start; {plural(blocks, 'thread block')}, {slots:,} at a time{registers}, in lockstep"
        )
        heads = ("tensor", "asked to read", "from DRAM", "reads hit", "asked to write", "to DRAM")
        return self.table(self.paragraph(about), heads, rows)

    def shared_memory(self) -> list[str]:
        own = ("Shared memory (conflicts: wavefronts beyond the ideal)", self.counters.shared)
        others = ("Distributed shared memory (of other blocks of the cluster)", self.counters.distributed)
        heads = ("access", "a lane", "bytes", "requests", "wavefronts", "ideal", "conflicts")
        lines: list[str] = []
        for title, counts in (own, others):
            rows = [(kind, f"{size} B", f"{c.bytes:,}", *passed(c)) for (kind, size), c in sorted(counts.items())]
            lines += self.table([*[""] * bool(lines), title], heads, rows)
        return lines

    def mix(self) -> list[str]:
        rows = [(name, f"{count:,}", share(count, self.counters.instructions)) for name, count in self.counters.by_class.items()]
        return self.table(["Instruction mix (warp instructions)"], ("class", "count", "share"), rows)

    # -- by line --

    def label(self, line: Line) -> str:
        """A line's number, with the file's name unless it is the kernel's own file."""
        file, number = line
        own = self.profile.file and os.path.realpath(self.profile.file) == file
        return str(number) if own else f"{os.path.basename(file)}:{number}"

    def source(self, line: Line, counts: Counts) -> str:
        """The text of a line; inlined code begins with the kernel's lines that call it."""
        text = " ".join(self.profile.source_text(line).split())
        if not counts.inlined_at:
            return text
        sites = [self.label(site) for site in sorted(counts.inlined_at)]
        shown = ", ".join(sites[:3]) + ", ..." * (len(sites) > 3)
        return f"from {shown}: {text}"

    def by_line(self, title: str, weight: Callable[[Counts], float]) -> tuple[list[str], list[tuple[Line, Counts]]]:
        """The title with the number of lines shown, and the lines with the largest weights."""
        lines = self.counters.lines
        heavy = sorted((line for line, counts in lines.items() if weight(counts)), key=lambda line: (-weight(lines[line]), line))
        chosen = [(line, lines[line]) for line in heavy[: self.top]]
        return [f"{title}, the first {len(chosen)} of {len(heavy)} lines" if len(heavy) > len(chosen) else title], chosen

    def hot_lines(self) -> list[str]:
        title, chosen = self.by_line("Instructions by line", lambda c: c.instructions)
        rows = [
            [
                self.label(line),
                f"{c.instructions:,}",
                share(c.instructions, self.counters.instructions),
                f"{c.active_lanes:.1f}",
                f"{c.divergent_branches:,}",
                self.source(line, c),
            ]
            for line, c in chosen
        ]
        return self.table(title, ("line", "instr.", "share", "lanes", "diverge", "source"), rows, left=(0, 5))

    def traffic_lines(self) -> list[str]:
        title, chosen = self.by_line("Global memory by line", lambda c: c.global_memory.sectors)
        rows = [
            [self.label(line), name, side, *numbers(one), self.source(line, c)]
            for line, c in chosen
            for name, traffic in c.traffic.items()
            for side, one in traffic.sides().items()
            if one.requests
        ]
        heads = ("line", "tensor", "", "bytes", "sectors", "a request", "coalescing", "source")
        return self.table(title, heads, rows, left=(0, 1, 2, 7))

    def conflict_lines(self) -> list[str]:
        title, chosen = self.by_line("Bank conflicts by line", lambda c: c.shared_memory.conflicts)
        rows = [
            [self.label(line), f"{kind} {size} B", *passed(each), self.source(line, c)]
            for line, c in chosen
            for (kind, size), each in sorted(c.shared.items())
            if each.conflicts
        ]
        heads = ("line", "access", "requests", "wavefronts", "ideal", "conflicts", "source")
        plain = (each for _, c in chosen for (kind, _), each in c.shared.items() if kind in ("ld", "st"))
        columns = any(each.wavefronts >= COLUMN * each.ideal_wavefronts for each in plain)
        return self.table(title, heads, rows, left=(0, 1, 6)) + (self.paragraph(PAD, rest="  ") if columns else [])


def passed(counts: SharedCounts) -> list[str]:
    """Requests, wavefronts, ideal ones and conflicts of accesses to shared memory."""
    return [f"{n:,}" for n in (counts.requests, counts.wavefronts, counts.ideal_wavefronts, counts.conflicts)]


def first_refusal(items: Sequence[Refusal]) -> str:
    """One line on the statements that the machine does not execute: the first one, and the number of others."""
    line, text, reason = items[0]
    more = f" (and {len(items) - 1} more)" if len(items) > 1 else ""
    return f"line {line} of the PTX, {text}: {reason}{more}"


def numbers(one: Traffic) -> list[str]:
    """Bytes, sectors, sectors a request and coalescing of one direction of traffic."""
    return [
        f"{one.requested_bytes:,}",
        f"{one.sectors:,}",
        f"{one.sectors / one.requests:.1f}",
        f"{100 * (one.coalescing or 0):.0f} %",
    ]
