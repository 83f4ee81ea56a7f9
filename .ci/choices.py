#!/usr/bin/env python3
"""What schedules choose and what the models say of it, written down: a change of either is then seen, where only speed would tell.

    python .ci/choices.py [--write]

planned.txt in .ci/accounts has how each kernel of the compile gate's is launched, and a digest of its constants; modelled.txt has
digests of what `cupyflash explain` and `predict` say of some problems, part by part, numbers to six digits, and of the order in
which FlashAttention-3's queue hands out row blocks. tests/test_drawn_mutants.py holds to them. `--write` makes them what they are
now: run it where a change of tiles or models is meant, and look at what else has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from click.testing import CliRunner
from compile_gate import jobs

from cupyflash import Device, Problem, kernels_cu, plan
from cupyflash.launch import compiler
from cupyflash.schedules import Kernel, plan_varlen
from cupyflash.schedules.fa3 import Fa3Schedule
from cupyflash.sim.cli import main as command

FOLDER = Path(__file__).parent / "accounts"
H100 = Device.named("H100-SXM")
# On each kind of chip, short and long, with what takes registers or leaves blocks out
EXPLAINED = (
    "--seqlen 4096 --head-dim 128 --heads 16 --causal",
    "--seqlen 700 --head-dim 64 --heads 8 --kv-heads 2 --batch 2 --device T4",
    "--seqlen 2048 --head-dim 96 --heads 8 --window 300,20 --dtype float32 --device B200",
    "--seqlen 1024 --seqlen-k 3000 --head-dim 272 --head-dim-v 264 --heads 4 --bias --mask",
    "--seqlen 1024 --head-dim 64 --heads 8 --dropout 0.1 --key-lengths 1024,300 --batch 2 --device L4",
    "--seqlen 1000 --head-dim 40 --heads 8 --softcap 30 --sinks --dtype bfloat16",
    "--seqlen 1000 --head-dim 64 --heads 4 --score s+near[h,q-k]+far[k] --capture near=float16 --capture far=float32",
    "--seqlen 20 --seqlen-k 9000 --head-dim 128 --heads 4",
    "--seqlen 100 --seqlen-k 1000 --head-dim 128 --heads 16",
    "--seqlen 2000 --head-dim 64 --heads 8 --backward --causal",
    "--seqlen 1500 --head-dim 128 --heads 8 --kv-heads 2 --backward --device H100-SXM",
    "--seqlen 1500 --head-dim 128 --heads 8 --backward --deterministic --window 200,0",
    "--seqlen 900 --head-dim 128 --heads 4 --backward --deterministic --tiling 64x64 --device H100-SXM",
    "--seqlen 900 --head-dim 40 --heads 4 --backward --deterministic --dtype float32 --device T4",
    "--seqlen 900 --head-dim 320 --heads 2 --backward --bias",
    "--seqlen 900 --head-dim 320 --heads 2 --backward --deterministic --dropout 0.1",
    "--seqlen 900 --head-dim 64 --heads 4 --backward --alibi --dtype bfloat16",
    "--device H100-SXM --algorithm fa3 --seqlen 3000 --head-dim 128 --heads 16 --causal",
    "--device H100-SXM --algorithm fa3 --seqlen 5000 --head-dim 64 --heads 8 --kv-heads 1 --batch 3 --key-lengths 5000,100,3000",
    "--device H100-SXM --algorithm fa3 --seqlen 2000 --head-dim 256 --heads 16 --window 300,0 --softcap 20",
    "--device H100-SXM --seqlen 300 --head-dim 96 --heads 32 --batch 4",
    "--seqlen 1000 --head-dim 36 --heads 4",
    "--seqlen 1000 --head-dim 164 --heads 4 --causal --window 300,0",
    "--seqlen 1000 --head-dim 228 --heads 4 --mask --device T4",
    "--seqlen 1000 --head-dim 126 --heads 4 --causal",
    "--seqlen 1000 --head-dim 33 --heads 4 --bias",
    "--seqlen 1000 --head-dim 100 --heads 4 --backward",
    "--seqlen 1000 --head-dim 60 --heads 4 --backward --deterministic",
    "--decode --head-dim 36",
    "--decode",
    "--decode --device H100-SXM --batch 8 --cache-seqlens 8000,100,20,3000,70,8000,1,900 --page-size 64 --append 1",
    "--decode --seqlen 20 --heads 16 --kv-heads 2 --head-dim 64 --window 900,0 --sinks --softcap 30",
    "--decode --dtype float32 --device T4 --batch 2 --seqlen-k 3000 --head-dim 256 --num-splits 7",
)
# Bytes, times and the L2 of small ones
PREDICTED = (
    "--decode --seqlen-k 300 --l2 --time",
    "--decode --batch 2 --cache-seqlens 300,40 --page-size 16 --append 1 --l2 --time",
    "--seqlen 300 --head-dim 64 --causal --key-lengths 200 --l2 --time",
    "--seqlen 200 --head-dim 64 --backward --dropout 0.1 --l2 --time",
    "--seqlen 200 --head-dim 64 --backward --deterministic --window 100,20 --l2 --time",
    "--device H100-SXM --algorithm fa3 --seqlen 300 --head-dim 64 --causal --l2 --time",
)


def digest(thing: Any) -> str:
    return hashlib.sha256(repr(thing).encode()).hexdigest()[:12]


def six(thing: Any) -> Any:
    """Numbers to six digits: the rest is each processor's own."""
    if isinstance(thing, dict):
        return {name: six(value) for name, value in thing.items()}
    if isinstance(thing, list):
        return [six(value) for value in thing]
    return f"{thing:.6g}" if isinstance(thing, float) else thing


def constants(kernel: Kernel) -> list[str]:
    """What a kernel is compiled with, but for where its sources are and what is in them."""
    ours = f"-DCUPYFLASH_SOURCES=0x{kernels_cu.fingerprint()}", f"-I{kernels_cu.DIRECTORY}"
    return [option for option in compiler.options(kernel) if option not in ours]


def planned() -> Iterator[str]:
    """A line for each kernel that the compile gate would compile."""
    for job in jobs():
        for each in job.kernels:
            launch = f"{each.grid} x {each.threads} threads, {each.shared_bytes} bytes"
            yield f"{job.device.sm} {job.label}: {each.name}, {launch}, {digest((each.source, constants(each)))}"


def modelled() -> Iterator[str]:
    """A line for each part of what `explain` and `predict` say, and for each order of the queue."""
    for line in (*(f"explain {each}" for each in EXPLAINED), *(f"predict {each}" for each in PREDICTED)):
        done = CliRunner().invoke(command, [*line.split(), "--json"])
        if done.exit_code:
            raise RuntimeError(f"{line}: {done.output or done.exception!r}")
        for name, part in json.loads(done.stdout).items():
            if name != "device":
                yield f"{line}: {name} {digest(six(part))}"
    for name, schedule in queues():
        yield f"queue {name}: {digest([each.tolist() for each in schedule.order()])}"


def queues() -> Iterator[tuple[str, Fa3Schedule]]:
    """Schedules whose row blocks come from a queue: all alike, and not; few of a thread block, and many."""
    for batch, heads, kv_heads, n in ((1, 16, 16, 2000), (2, 8, 2, 9000), (3, 64, 8, 5000), (1, 8, 8, 30_000), (16, 8, 8, 1000)):
        problem = Problem(batch, heads, kv_heads, n, n, 128, "bfloat16", causal=True)
        alike = plan(problem, H100, "fa3")
        lengths = tuple((each + 2) * 7919 % n + 1 for each in range(batch))
        unlike = plan(problem.asking(padded=True, key_lengths=lengths), H100, "fa3")
        each = tuple((length, length) for length in (n, *lengths, n // 7))
        packed = plan_varlen(Problem(len(each), heads, kv_heads, n, n, 128, "bfloat16", causal=True), H100, each, algorithm="fa3")
        for kind, made in (("causal", alike), ("lengths", unlike), ("packed", packed)):
            assert isinstance(made, Fa3Schedule)
            if made.queued:
                yield f"{kind}, {batch} x {heads} heads of {n:,}", made


WRITTEN = {"planned.txt": planned, "modelled.txt": modelled}


def differences(name: str) -> Iterator[str]:
    """What of a file is not as it is now, and what is now and not there."""
    now, then = Counter(WRITTEN[name]()), Counter((FOLDER / name).read_text().splitlines())
    yield from (f"now: {line}" for line in now - then)
    yield from (f"no more: {line}" for line in then - now)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="make the files what they are now")
    if parser.parse_args().write:
        for name, lines in WRITTEN.items():
            (FOLDER / name).write_text("".join(f"{line}\n" for line in sorted(lines())))
        return 0
    found = [line for name in WRITTEN for line in differences(name)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
