"""Our machine code beside FlashAttention's, fa2's by counts and a clock model, fa3's by counts; no GPU.

    python benchmarks/machine_code [forward|backward] [80|90] [64|128] [causal|full] [--quick] [--whole] [--list] [--json]
    python benchmarks/machine_code fa3 [64|128|256] [causal|full] [--list] [--json]
    python benchmarks/machine_code tiles [80|90] [64|128] [causal|full] [--json]
    python benchmarks/machine_code --cubin FILE [--kernel NAME] [--threads N] [--shared BYTES]
    python benchmarks/machine_code --assumptions

Needs NVRTC and NVIDIA's disassemblers: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm (the `test` extra has them). The
words choose what is compared. Every figure of the model has its range beside it, when each assumption varies by itself, x 0.7 and x
1.4; for whole calls, when all latencies vary together. docs/performance.md says how to read it, and how far to trust it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from cupyflash import Device  # noqa: E402
from cupyflash.sim.clock import sass  # noqa: E402
from machine_code import choices, costs, hopper, rates, whole  # noqa: E402
from machine_code.clocks import Effort  # noqa: E402
from machine_code.costs import Cost, Figure  # noqa: E402
from machine_code.ours import DEVICES, Code, Ours, Peer, peers  # noqa: E402
from machine_code.tables import LENGTHS  # noqa: E402


def figure(cost: Cost, effort: Effort, quick: bool) -> tuple[Figure, tuple[float, float]]:
    """The model's share with its sensitivity, and its spread over random starts."""
    share = cost.share(effort)
    scale = share.tensor * share.clocks
    return Figure(share.tensor, {} if quick else cost.sensitivity()), (scale / share.high, scale / share.low)


def described(code: Code, cost: Cost, given: argparse.Namespace) -> tuple[dict[str, Any], Figure, list[str]]:
    """One kernel's main loop: (for JSON, the model's share, lines for a reader)."""
    share, spread = figure(cost, Effort(seeds=given.seeds), given.quick)
    record = {
        "kernel": code.name,
        "architecture": code.architecture,
        "warps": cost.residents.warps,
        "blocks": cost.residents.blocks,
        "registers": code.resources["REG"],
        "stack": code.resources["STACK"],
        "instructions": cost.issued,
        "counts": cost.counts,
        "stalls": cost.stalls,
        "rest": round(cost.rest, 4),
        "bound": cost.bound,
        "all_overlap": round(cost.all_overlap, 4),
        "warps_overlap": round(cost.warps_overlap, 4),
        "clock_model": share.record() | {"seeds": [round(each, 4) for each in spread]},
    }
    text = [
        f"{cost.residents.warps} warps x {cost.residents.blocks} blocks, {code.resources['REG']} registers, "
        f"{code.resources['STACK']} bytes of stack; bound by {cost.bound}",
        *costs.lines(cost),
        f"of mma.sync's peak: all overlap {cost.all_overlap:.2f}, warps overlap {cost.warps_overlap:.2f}, "
        f"model {share}, over random starts {spread[0]:.2f} to {spread[1]:.2f}",
    ]
    if given.list:
        text += [str(each) for each in cost.trace.instructions]
    return record, share, text + [f"branch {each}" for each in cost.trace.decisions if given.list]


def beside(peer: Peer, given: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Our kernel beside FlashAttention-2's."""
    ours = Ours.of(peer.subject)
    cost = ours.cost(given.turns)
    record, share, text = described(ours.main, cost, given)
    facts, doubt = peer.facts, ours.doubt(cost.trace)
    ratio = share.over(peer.share)
    copies = cost.counts["LDGSTS"] / cost.counts["HMMA"] / facts["per_hmma"]["LDGSTS"]
    record = {"subject": str(peer.subject), "tile": ours.tile, **record, "doubt": doubt, "flash_attention_2": facts["clock_model"]}
    record |= {"ratio": ratio.record(), "copies": round(copies, 3)}
    theirs = ", ".join(f"{name} {number:.2f}" for name, number in facts["per_hmma"].items() if name != "HMMA")
    lines = [
        f"{peer.subject}: FlashAttention-2 {facts['clock_model']:.2f}, ours over it {ratio}; copies a product {copies:.2f} of its",
        *(f"    {each}" for each in [f"ours: {ours.tile}, {text[0]}", *text[1:]]),
        f"    FlashAttention-2: {facts['tile']}, {facts['warps']} warps x {facts['blocks']} blocks, "
        f"{facts['registers']} registers, {facts['stack']} bytes of stack; bound by {facts['bound']}",
        f"    a HMMA: {facts['instructions_per_hmma']:.2f} instructions, {facts['stalls_per_hmma']:.1f} stalls, {theirs}",
    ]
    return record, [*lines, *([f"    DOUBT: {doubt}"] if doubt else [])]


def warpgroups(code: Code, given: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """A kernel whose warpgroups have roles: for JSON, and lines for a reader."""
    figures, turn = hopper.figures(code), hopper.steady(code)
    record = {"kernel": code.name, "architecture": code.architecture, **figures.record(), "remarks": code.remarks}
    text = [*figures.lines(), *turn.stretches(), *code.remarks]
    if given.list:
        text += [f"{' '.join(held) or '-':10} {each}" for each, held in zip(turn.instructions, turn.flight, strict=True)]
    return record, text


def beside_3(pair: hopper.Pair, given: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Our kernel beside FlashAttention-3's."""
    record, text = warpgroups(pair.code, given)
    record |= {"subject": str(pair), "causal": pair.subject.causal, "flash_attention_3": pair.theirs.record()}
    record |= {"instructions_over_its": round(pair.issue, 3), "exposed_over_its": round(pair.exposure, 3)}
    return record, [
        f"{pair}: instructions a key {pair.issue:.2f} of FlashAttention-3's, exposed clocks a tensor clock {pair.exposure:.2f}",
        *(f"    {each}" for each in text),
        *(f"    FlashAttention-3: {each}" for each in pair.theirs.lines()),
    ]


def of_cubin(given: argparse.Namespace) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """The kernels of a cubin that have tensor cores' instructions."""
    found = sass.read(given.cubin.read_bytes())
    device = Device.named(DEVICES[found.architecture])
    for name, instructions in found.kernels.items():
        products = {each.opcode for each in instructions} & {"HMMA", "HGMMA"}
        if given.kernel in name and products:
            code = Code(name, tuple(instructions), found.resources[name], given.threads, given.shared, device)
            if "HGMMA" in products:
                record, text = warpgroups(code, given)
            else:
                record, _, text = described(code, code.cost(given.turns), given)
            yield record, [name, *(f"    {each}" for each in text)]


def whole_calls(peer: Peer, quick: bool) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Clocks of a call by kernel, and the TFLOP/s that they come to; with all latencies x 1.4 and x 0.7 too, unless `quick`."""
    subject = peer.subject
    for n in LENGTHS:
        ours, work = Ours.of(subject, n), subject.flops(n) / 1e12
        found = list(whole.pieces(ours))
        rate = work * whole.clock_rate(subject.device) / sum(each.least for each in found)
        spread = [] if quick else sorted(work / whole.seconds(ours, factor) for factor in rates.VARIED)
        record = {"subject": str(subject), "n": n, "pieces": [asdict(each) for each in found], "tflops": rate, "spread": spread}
        parts = ", ".join(f"{each.name} {each.least:,.0f} clocks ({each.blocks:,} blocks)" for each in found)
        told = f"{rate:.0f}" + (f" ({spread[0]:.0f} to {spread[1]:.0f})" if spread else "")
        yield record, [f"{subject}, N {n:,}: {told} TFLOP/s in the model; {parts}"]


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = "forward or backward, 80 or 90, 64 or 128, causal or full; fa3, 64, 128 or 256, causal or full; tiles and the first"
    parser.add_argument("words", nargs="*", help=known)
    parser.add_argument("--cubin", type=Path, help="another kernel's machine code")
    parser.add_argument("--kernel", default="", help="of a cubin: part of the kernel's name")
    parser.add_argument("--threads", type=int, default=128, help="of a cubin: threads a block")
    parser.add_argument("--shared", type=int, default=0, help="of a cubin: dynamic shared memory of a block, bytes")
    parser.add_argument("--turns", default="", help="2,2: of the inner loops whose number of turns is not in the code, in order")
    parser.add_argument("--seeds", type=int, default=16, help="random starts")
    parser.add_argument("--quick", action="store_true", help="without the sensitivity")
    parser.add_argument("--whole", action="store_true", help="whole calls for N of 1k, 4k, 16k, instead of the loop")
    parser.add_argument("--list", action="store_true", help="the trace with its control codes, and the branches that rules decided")
    parser.add_argument("--json", action="store_true", help="a line of JSON a kernel")
    parser.add_argument("--assumptions", action="store_true", help="the model's assumptions with their sources, and nothing else")
    given = parser.parse_args(argv)
    given.turns = tuple(int(each) for each in given.turns.split(",") if each)
    return given


def main(argv: Sequence[str] | None = None) -> int:
    given = parsed(argv)
    if given.assumptions:
        print("\n".join(rates.markdown()))
        return 0
    chosen = [peer for peer in peers() if set(given.words) <= peer.subject.words]
    if given.cubin:
        found = of_cubin(given)
    elif "fa3" in given.words:
        found = (beside_3(pair, given) for pair in hopper.pairs() if set(given.words) <= pair.words)
    elif "tiles" in given.words:
        subjects = [peer.subject for peer in peers() if peer.subject.direction == "forward"]
        asked = set(given.words) - {"tiles"}
        found = (choices.judged(each) for each in subjects if asked <= each.words)
    elif given.whole:
        found = itertools.chain.from_iterable(whole_calls(peer, given.quick) for peer in chosen)
    else:
        found = (beside(peer, given) for peer in chosen)
    for record, lines in found:
        print(json.dumps(record) if given.json else "\n".join(lines), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
