"""The tables of docs/performance.md that come from machine code, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from cupyflash import Device, Problem
from cupyflash.schedules import Cache, plan_decode
from machine_code import decoding, hopper, whole
from machine_code.clocks import Effort
from machine_code.costs import REST, Cost, Figure
from machine_code.ours import DEVICES, Ours, Subject, peers

LENGTHS = (1024, 4096, 16384)
# Groups of instructions that stand together: a table's columns.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "MUFU": ("MUFU",),
    "float32": ("FP32", "FMNMX", "F2FP", "SHFL"),
    "shared": ("LDSM", "LDS", "STS"),
    "copies": ("LDGSTS", "LDG/STG"),
    "RED": ("RED/ATOM",),
    "spills": ("LDL/STL",),
    "rest": REST,
}


@cache
def cost(subject: Subject) -> Cost:
    return Ours.of(subject).cost()


@cache
def share(subject: Subject, sensitivity: bool = True) -> Figure:
    found = cost(subject)
    return Figure(found.share(Effort()).tensor, found.sensitivity() if sensitivity else {})


def named(subject: Subject) -> str:
    return f"{subject.direction}, sm_{subject.architecture}, d {subject.d}{', causal' if subject.causal else ''}"


def instructions() -> Iterator[str]:
    """Instructions a HMMA in a turn of the main loop without masks."""
    yield "| | | tile | warps x blocks | registers, stack | all | " + " | ".join(COLUMNS) + " | stalls | binds |"
    yield "| --- | --- | --- | --- | --- | --- |" + " --- |" * (len(COLUMNS) + 2)
    for peer in peers():
        ours, found, facts = Ours.of(peer.subject), cost(peer.subject), peer.facts
        products, held, used = found.counts["HMMA"], ours.main.residents, ours.main.resources
        per = {group: number / products for group, number in found.counts.items()}
        cells = [ours.tile, f"{held.warps} x {held.blocks}", f"{used['REG']}, {used['STACK']}", f"{found.issued / products:.2f}"]
        yield row(named(peer.subject), "ours", *cells, *grouped(per), f"{found.stalls / products:.1f}", found.bound)
        cells = [facts["tile"], f"{facts['warps']} x {facts['blocks']}", f"{facts['registers']}, {facts['stack']}"]
        cells += [f"{facts['instructions_per_hmma']:.2f}", *grouped(facts["per_hmma"])]
        yield row("", "FlashAttention-2", *cells, f"{facts['stalls_per_hmma']:.1f}", facts["bound"])


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def grouped(per: Mapping[str, float]) -> Iterator[str]:
    for groups in COLUMNS.values():
        yield f"{sum(per.get(group, 0) for group in groups):.2f}"


def shares() -> Iterator[str]:
    """The model's share of mma.sync's peak, with its sensitivity, and ours over FlashAttention-2's."""
    yield row("", "all overlap", "warps overlap", "model", "FlashAttention-2", "ours over it")
    yield "| --- |" + " --- |" * 5
    for peer in peers():
        found, ours = cost(peer.subject), share(peer.subject)
        overlaps = f"{found.all_overlap:.2f}", f"{found.warps_overlap:.2f}"
        yield row(named(peer.subject), *overlaps, str(ours), f"{peer.share.value:.2f}", str(ours.over(peer.share)))


def calls() -> Iterator[str]:
    """Whole calls: TFLOP/s in the model, and what the main kernel has of the time."""
    yield "| TFLOP/s (main kernel's part) | " + " | ".join(f"N {n:,}{mask}" for mask in ("", ", causal") for n in LENGTHS) + " |"
    yield "| --- |" + " --- |" * (2 * len(LENGTHS))
    every = {peer.subject: peer for peer in peers()}
    for full in [each for each in every if not each.causal]:
        cells = []
        for peer in (every[full], every[replace(full, causal=True)]):
            for n in LENGTHS:
                ours = Ours.of(peer.subject, n)
                pieces = list(whole.pieces(ours))
                clocks = sum(each.least for each in pieces)
                rate = peer.subject.flops(n) * whole.clock_rate(peer.subject.device) / clocks / 1e12
                main = max(each.least for each in pieces)
                cells.append(f"{rate:.0f}" + (f" ({main / clocks:.0%})" if len(pieces) > 1 else ""))
        yield f"| {named(full)} | " + " | ".join(cells) + " |"


# What stands together in fa3's table.
OF_A_TURN: Mapping[str, tuple[str, ...]] = {
    "MUFU": ("MUFU",),
    "float32": ("float32",),
    "shared": ("shared", "spills"),
    "waits": ("waits",),
    "rest": ("uniform", "integer", "branch", "other"),
}


def fa3() -> Iterator[str]:
    """A consumer's turn of fa3 without masks beside FlashAttention-3's: instructions of a warp, and clocks by stall counts."""
    columns = (*OF_A_TURN, "all", "a key", "exposed", "a tensor clock", "MUFU under a product")
    yield row("", "", "tile", "registers", "stack", *columns)
    yield "| --- |" + " --- |" * (4 + len(columns))
    for pair in hopper.pairs():
        name = f"d {pair.subject.d}{', causal' if pair.subject.causal else ''}"
        yield row(name, "ours", *of_a_turn(pair.ours))
        yield row("", "FlashAttention-3", *of_a_turn(pair.theirs))


def of_a_turn(found: hopper.Figures) -> Iterator[str]:
    yield from (found.tile, found.roles, str(found.stack))
    for kinds in OF_A_TURN.values():
        yield str(sum(found.counts[kind] for kind in kinds))
    yield from (str(found.issued), f"{found.per_key:.2f}", str(found.exposed), f"{found.exposure:.2f}")
    yield f"{found.hidden} of {found.counts['MUFU']}"


def decode_turn(architecture: int, d: int, page: int | None) -> decoding.Turn:
    """The loop of decoding batch 8, 32 query heads, four a key head, against a cache of 16k, in float16."""
    problem = Problem(8, 32, 8, 1, 16384, d, "float16", causal=True, padded=True)
    cache = Cache(page_size=page, pages=0 if page is None else 8 * 16384 // page)
    return decoding.Turn(plan_decode(problem, Device.named(DEVICES[architecture]), cache))


def decode_row(turn: decoding.Turn) -> str:
    s, held, counts, used = turn.schedule, turn.code.residents, turn.counts, turn.code.resources
    name = f"sm_{turn.code.architecture}, d {s.problem.head_dim}{f', pages of {s.cache.page_size}' if s.cache.page_size else ''}"
    addresses = sum(counts[each] for each in decoding.ADDRESSES)
    shared = sum(counts[each] for each in decoding.SHARED)
    cells = f"{held.warps} x {held.blocks}", f"{used['REG']}, {used['STACK']}", str(turn.copies), str(turn.issued)
    cells += f"{turn.issued / turn.copies:.0f}", str(counts["HMMA"]), str(shared), str(addresses), f"{turn.stalls:,}"
    return row(
        name, *cells, f"{turn.issue_clocks:,.0f} of {turn.memory_clocks:,.0f} ({turn.issue_clocks / turn.memory_clocks:.0%})"
    )


def decode_loops() -> Iterator[str]:
    """A steady turn of decoding's main loop: instructions of a warp, and clocks of a multiprocessor's blocks together."""
    columns = "warps x blocks", "registers, stack", "copies", "instructions", "a copy", "HMMA", "shared", "addresses, branches"
    yield row("", *columns, "stalls", "to issue, of memory's clocks")
    yield "| --- |" + " --- |" * (len(columns) + 2)
    for architecture in DEVICES:
        for d in (64, 128, 256):
            for page in (None, 16):
                yield decode_row(decode_turn(architecture, d, page))
