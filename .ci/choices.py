#!/usr/bin/env python3
"""The choices of schedules and the models' figures for them, as digests: a change is seen where only speed would tell.

    python .ci/choices.py [--write] [--since COMMIT]

planned.txt in .ci/accounts has a line for each kernel and architecture: how the compile gate's programs launch it, and what its
text names of constants and struct. modelled.txt has a line for each of some `cupyflash explain` and `predict`, all they say with
numbers to six digits, and for orders in which FlashAttention-3's queue hands out row blocks. drawn.txt has a line for a few random
problems of a kind each: all that their schedules say (drawn_problems.py). tests/test_drawn_mutants.py holds to them. `--write`
makes them what they are now, where a change of tiles or models is meant, and shows what has changed since a commit, HEAD or that of
`--since`: look at what else that is. `--since` alone only shows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from accounts import given
from click.testing import CliRunner
from compile_gate import jobs
from drawn_problems import problems

from cupyflash import Device, Problem, plan
from cupyflash.schedules import plan_varlen
from cupyflash.schedules.fa3 import Fa3Schedule
from cupyflash.sim.cli import main as command

FOLDER = Path(__file__).parent / "accounts"
SHOWN = 400  # characters of a difference
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
    "--device H100-SXM --algorithm fa3 --seqlen 2000 --head-dim 64 --heads 16 --mask",
    "--device H100-SXM --algorithm fa3 --seqlen 2000 --head-dim 128 --heads 16 --bias --dropout 0.1",
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
# Bytes and the L2 of small ones
PREDICTED = (
    "--decode --seqlen-k 300 --l2",
    "--decode --batch 2 --cache-seqlens 300,40 --page-size 16 --append 1 --l2",
    "--seqlen 300 --head-dim 64 --causal --key-lengths 200 --l2",
    "--seqlen 200 --head-dim 64 --backward --dropout 0.1 --l2",
    "--seqlen 200 --head-dim 64 --backward --deterministic --window 100,20 --l2",
    "--device H100-SXM --algorithm fa3 --seqlen 300 --head-dim 64 --causal --l2",
    "--device H100-SXM --algorithm fa3 --seqlen 300 --head-dim 64 --heads 2 --mask --l2",
)


def six(thing: Any) -> Any:
    """Numbers to six digits: the rest is each processor's own."""
    if isinstance(thing, dict):
        return {name: six(value) for name, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [six(value) for value in thing]
    return f"{thing:.6g}" if isinstance(thing, float) else thing


Choice = tuple[str, str, str]
"""A subject and one of its parts, in words."""


def planned() -> Iterator[Choice]:
    """Each kernel of each program that the compile gate has, by architecture and kernel."""
    found: list[Choice] = []
    for job in jobs():
        for each in job.kernels:
            launch = f"{each.grid} x {each.threads} threads, {each.shared_bytes} bytes"
            found.append((f"{job.device.sm} {each.name}", job.label, f"{launch}, {each.source}, {given(each)}"))
    yield from sorted(found)


def modelled() -> Iterator[Choice]:
    """Each part of what `explain` and `predict` say, by command, and each order of the queue."""
    for line in (*(f"explain {each}" for each in EXPLAINED), *(f"predict {each}" for each in PREDICTED)):
        done = CliRunner().invoke(command, [*line.split(), "--json"])
        if done.exit_code:
            raise RuntimeError(f"{line}: {done.output or done.exception!r}")
        for name, part in json.loads(done.stdout).items():
            if name != "device":
                yield line, name, str(six(part))
    for name, schedule in queues():
        yield "queue", name, str([each.tolist() for each in schedule.order()])


def drawn() -> Iterator[Choice]:
    """Each figure of each schedule of a random problem, by line."""
    for line, number, figures in problems():
        for name, value in figures.items():
            yield line, f"{number} {name}", str(six(value))


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


WRITTEN = {"planned.txt": planned, "modelled.txt": modelled, "drawn.txt": drawn}


def digests(name: str) -> Iterator[str]:
    """The lines of a file as they are now, each as soon as it is known."""
    for group, parts in groupby(WRITTEN[name](), key=itemgetter(0)):
        yield f"{group}: {hashlib.sha256(repr(sorted(part for _, *part in parts)).encode()).hexdigest()[:12]}"


def differences(name: str) -> Iterator[str]:
    """The lines of a file that differ now, each as soon as it is known."""
    then, now = (FOLDER / name).read_text().splitlines(), []
    for line in digests(name):
        now.append(line)
        if line not in then:
            yield f"now: {line}"
    yield from (f"no more: {line}" for line in then if line not in now)


def everything() -> dict[str, list[str]]:
    """All that the digests are of, by its names."""
    found: dict[str, list[str]] = {}
    for choices in WRITTEN.values():
        for group, part, said in choices():
            found.setdefault(f"{group}: {part}", []).append(said)
    return found


def of_commit(commit: str) -> dict[str, list[str]]:
    """The same of a commit, whose tree is checked out beside this one and says it by itself."""
    git = ("git", "-C", str(FOLDER), "worktree")
    with tempfile.TemporaryDirectory(prefix="cupyflash_") as folder:
        subprocess.run([*git, "add", "--quiet", "--detach", folder, commit], check=True)
        try:
            own = (sys.executable, f"{folder}/.ci/choices.py", "--print")
            done = subprocess.run(own, env={**os.environ, "PYTHONPATH": folder}, check=True, stdout=subprocess.PIPE)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def changes(now: dict[str, list[str]], then: dict[str, list[str]]) -> Iterator[str]:
    """Yields the changes in words: the values that differ, before and after."""
    for name in sorted(now.keys() | then.keys()):
        pieces = [re.split(r", (?=[(\['{])", " | ".join(sorted(found.get(name, [])))) for found in (then, now)]
        if pieces[0] != pieces[1]:
            yield name
            for when, own, other in (("was", *pieces), ("now", *reversed(pieces))):
                yield f"    {when}: {', '.join(each for each in own if each not in other)[:SHOWN] or '-'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="make the files what they are now, and show what has changed")
    parser.add_argument("--since", metavar="COMMIT", help="show what has changed since this commit")
    parser.add_argument("--print", action="store_true", help="print all that the digests are of, as JSON")
    arguments = parser.parse_args()
    if arguments.print:
        print(json.dumps(everything()))
        return 0
    if arguments.write or arguments.since:
        print("\n".join(changes(everything(), of_commit(arguments.since or "HEAD"))))
    if arguments.write:
        for name in WRITTEN:
            (FOLDER / name).write_text("".join(f"{line}\n" for line in digests(name)))
    if arguments.write or arguments.since:
        return 0
    found = [line for name in WRITTEN for line in differences(name)]
    print("\n".join([*found, *(["(--since COMMIT shows what has changed, --write accepts it)"] if found else [])]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
