"""The tables of docs/performance.md that come from machine code, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from machine_code import whole
from machine_code.clocks import Effort
from machine_code.costs import REST, Cost, Figure
from machine_code.ours import Ours, Peer, Subject, peers

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


def pairs() -> Iterator[tuple[Peer, Peer]]:
    """FlashAttention-2's kernel without a mask and with a causal one, where ours is one kernel."""
    found = {peer.subject: peer for peer in peers()}
    for subject, full in found.items():
        if not subject.causal:
            yield full, found[Subject(subject.direction, subject.architecture, subject.d, True)]


def named(subject: Subject) -> str:
    return f"{subject.direction}, sm_{subject.architecture}, d {subject.d}"


def instructions() -> Iterator[str]:
    """Instructions a HMMA in a turn of the main loop without masks."""
    yield "| | | tile | warps x blocks | registers, stack | all | " + " | ".join(COLUMNS) + " | stalls | binds |"
    yield "| --- | --- | --- | --- | --- | --- |" + " --- |" * (len(COLUMNS) + 2)
    for full, causal in pairs():
        ours, found = Ours.of(full.subject), cost(full.subject)
        products, held = found.counts["HMMA"], ours.main.residents
        used = ours.main.resources["REG"], ours.main.resources["STACK"]
        per = {group: number / products for group, number in found.counts.items()}
        yield f"| {named(full.subject)} | ours | " + " | ".join(
            [
                *(ours.tile.replace("x", " x "), f"{held.warps} x {held.blocks}", f"{used[0]}, {used[1]}"),
                *(f"{found.issued / products:.2f}", *grouped(per), f"{found.stalls / products:.1f}", found.bound + " |"),
            ]
        )
        for peer, name in ((full, "FlashAttention-2"), (causal, "causal")):
            facts = peer.facts
            yield f"| | {name} | " + " | ".join(
                [
                    *(facts["tile"].replace("x", " x "), f"{facts['warps']} x {facts['blocks']}"),
                    *(f"{facts['registers']}, {facts['stack']}", f"{facts['instructions_per_hmma']:.2f}"),
                    *(*grouped(facts["per_hmma"]), f"{facts['stalls_per_hmma']:.1f}", facts["bound"] + " |"),
                ]
            )


def grouped(per: Mapping[str, float]) -> Iterator[str]:
    for groups in COLUMNS.values():
        yield f"{sum(per.get(group, 0) for group in groups):.2f}"


def shares() -> Iterator[str]:
    """The model's share of mma.sync's peak, with its sensitivity, and ours over FlashAttention-2's."""
    yield "| | all overlap | warps overlap | model | FlashAttention-2 | ours over it | its causal one | ours over that |"
    yield "| --- |" + " --- |" * 7
    for full, causal in pairs():
        found, ours = cost(full.subject), share(full.subject)
        quotients = [f"{peer.share.value:.2f} | {ours.over(peer.share)}" for peer in (full, causal)]
        yield (
            f"| {named(full.subject)} | {found.all_overlap:.2f} | {found.warps_overlap:.2f} | {ours} | {' | '.join(quotients)} |"
        )


def calls() -> Iterator[str]:
    """Whole calls: TFLOP/s in the model, and what the main kernel has of the time."""
    yield "| TFLOP/s (main kernel's part) | " + " | ".join(f"N {n:,}{mask}" for mask in ("", ", causal") for n in LENGTHS) + " |"
    yield "| --- |" + " --- |" * (2 * len(LENGTHS))
    for full, causal in pairs():
        cells = []
        for peer in (full, causal):
            for n in LENGTHS:
                ours = Ours.of(peer.subject, n)
                pieces = list(whole.pieces(ours))
                clocks = sum(each.least for each in pieces)
                rate = peer.subject.flops(n) * whole.clock_rate(peer.subject.device) / clocks / 1e12
                main = max(each.least for each in pieces)
                cells.append(f"{rate:.0f}" + (f" ({main / clocks:.0%})" if len(pieces) > 1 else ""))
        yield f"| {named(full.subject)} | " + " | ".join(cells) + " |"
