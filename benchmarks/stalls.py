"""Tells where a kernel's clocks go on the GPU at hand, instruction by instruction, by Nsight Compute's samples:

    python benchmarks/stalls.py [--algorithm fa3] [--d 128] [--n 4096] [--causal] [--backward] [--kernel NAME] [--least SHARE]
    python benchmarks/stalls.py --page FILE.csv [--kernel NAME] [--least SHARE]

16,384 tokens in rows of N, 2,048 / d heads, float16. Needs `ncu` on the PATH; `--page` reads what it wrote elsewhere (`ncu -i
REPORT --page source --csv --print-source sass`). The share of an instruction is of all samples of its kernel.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from checkout import environment

KERNEL, SAMPLES, EXECUTED, STALL = "Kernel Name", "# Samples", "Instructions Executed", "stall_"
CALL = """
import cupy, cupyflash
b, h, d, n = {batch}, {heads}, {d}, {n}
numbers = (cupy.sin(cupy.arange(b * h * n * d, dtype=cupy.float32) * (i + 1)) for i in range(4))
q, k, v, dout = (each.reshape(b, h, n, d).astype(cupy.float16) for each in numbers)
out, lse = cupyflash.attention(q, k, v, causal={causal}, algorithm={algorithm!r}, return_lse=True)
if {backward}:
    cupyflash.attention_backward(dout, q, k, v, out, lse, causal={causal})
cupy.cuda.Device().synchronize()
"""


@dataclass(frozen=True)
class Line:
    """An instruction: its text, samples, warps that executed it, and samples by what the warp waited for."""

    text: str
    samples: int
    executed: int
    reasons: Mapping[str, int]


def kernels(page: str) -> Iterator[tuple[str, list[Line]]]:
    """The kernels of a source page as CSV, in the order of their launches, with their instructions."""
    name, rows = "", list[str]()
    for row in [*takewhile(lambda row: not row.startswith('"ID"'), page.splitlines()), f'"{KERNEL}",""']:  # another page may follow
        if row.startswith(f'"{KERNEL}"'):
            if name:
                yield name, [_line(each) for each in csv.DictReader(rows)]
            name, rows = next(csv.reader([row]))[1], []
        elif row.startswith('"'):
            rows.append(row)


def _line(row: Mapping[str, str]) -> Line:
    waits = (key for key in row if key.startswith(STALL) and "Not Issued" not in key)
    return Line(
        row["Source"].strip(), int(row[SAMPLES]), int(row[EXECUTED]), {key.removeprefix(STALL): int(row[key]) for key in waits}
    )


def table(lines: Sequence[Line], least: float) -> Iterator[str]:
    """All reasons together, then the instructions with at least a share of the samples."""
    every = max(1, sum(line.samples for line in lines))
    together = {reason: sum(line.reasons[reason] for line in lines) for reason in lines[0].reasons}
    yield f"{every:,} samples: " + told(together, every, 8)
    for number, line in enumerate(lines):
        if line.samples >= least * every:
            waits = told(line.reasons, line.samples, 3)
            yield f"{number:5} {line.samples / every:6.2%} {line.executed:12,} {line.text[:64]:64} {waits}"


def told(reasons: Mapping[str, int], every: int, most: int) -> str:
    """The largest reasons and their shares."""
    first = sorted(reasons.items(), key=lambda each: -each[1])[:most]
    return ", ".join(f"{reason} {samples / every:.0%}" for reason, samples in first if samples)


def profiled(given: argparse.Namespace) -> str:
    """The source page of a call under ncu. RuntimeError with what ncu says if there is none."""
    code = CALL.format(batch=16384 // given.n, heads=2048 // given.d, **vars(given))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "call.ncu-rep"
        asked = ["--section", "SourceCounters", "--clock-control", "none", "--kernel-name", "regex:^fa[123]_"]
        command = ["ncu", "-o", str(report), *asked, sys.executable, "-c", code]
        ran = subprocess.run(command, env=environment(), capture_output=True, text=True)
        if not report.exists():
            raise RuntimeError((ran.stdout + ran.stderr)[-500:])
        shown = ["ncu", "-i", str(report), "--page", "source", "--csv", "--print-source", "sass"]
        return subprocess.run(shown, capture_output=True, text=True, check=True).stdout


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="fa3", help="of the forward")
    parser.add_argument("--d", type=int, default=128)
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--backward", action="store_true", help="the gradients', too")
    parser.add_argument("--kernel", default="", help="only kernels with this in their names")
    parser.add_argument("--least", type=float, default=0.004, help="the share of samples from which on an instruction is shown")
    parser.add_argument("--page", type=Path, help="a source page as CSV, instead of a call")
    given = parser.parse_args(argv)
    page = given.page.read_text() if given.page else profiled(given)
    for name, lines in kernels(page):
        if given.kernel in name:
            print(f"\n{name}: {len(lines)} instructions", *table(lines, given.least), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
