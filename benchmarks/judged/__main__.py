"""Judges right kernels and ones with seeded faults by `cupyflash check`'s judge:  python benchmarks/judged [NAME ...] [--write]

64 problems, each with a right function and one that has a fault which tolerances miss. --write keeps the results in
results.json beside this file. --seed draws other inputs. The exit status is 1 if a right one is refused or a fault not named.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from checkout import ROOT  # noqa: E402

# isort: split
from pairs import JudgedPair  # noqa: E402

from cupyflash.sim.judging import check  # noqa: E402

SUBJECTS = ("elementwise", "reductions", "rows", "products", "moves", "corners")


def pairs() -> list[JudgedPair]:
    """Returns all problems."""
    return [pair for subject in SUBJECTS for pair in importlib.import_module(subject).PAIRS]


def judged(pair: JudgedPair, seed: int = 0) -> dict[str, Any]:
    """Returns the results of a problem: verdicts on its right and its wrong function, and if they are as they should be."""
    began = time.process_time()
    right = check(pair.right, pair.reference, pair.inputs, seed=seed)
    middle = time.process_time()
    wrong = check(pair.wrong, pair.reference, pair.inputs, seed=seed)
    found = [fault.kind for fault in wrong.faults]
    return {
        "name": pair.name,
        "fault": pair.fault,
        "right": right.verdict,
        "conditions": sorted({one.kind for one in right.conditions}),
        "refused": [str(one) for one in right.faults],
        "wrong": wrong.verdict,
        "found": found,
        "named": any(kind in pair.kinds for kind in found),
        "first": str(wrong.faults[0]) if wrong.faults else "",
        "seconds": [round(middle - began, 1), round(time.process_time() - middle, 1)],
    }


def told(results: Iterable[dict[str, Any]]) -> int:
    """Prints a line for each result as it comes; returns the exit status."""
    right = named = count = 0
    for one in results:
        count += 1
        right += one["right"] == "right"
        named += one["named"]
        seconds = " + ".join(f"{each:.1f}" for each in one["seconds"])
        print(
            f"{one['name']:32} {one['right']:10} {'named' if one['named'] else 'MISSED':7} {seconds:>11} s  {one['first'][:120]}",
            flush=True,
        )
        for line in one["refused"]:
            print(f"    refused: {line}", flush=True)
    print(f"{right} of {count} right functions are right, {named} of {count} faults are named")
    return int(right < count or named < count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only problems whose names have one of these words")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="keep the results in results.json")
    given = parser.parse_args()
    chosen = [pair for pair in pairs() if not given.names or any(word in pair.name for word in given.names)]
    results: list[dict[str, Any]] = []

    def each() -> Iterable[dict[str, Any]]:
        for pair in chosen:
            results.append(judged(pair, given.seed))
            yield results[-1]

    status = told(each())
    if given.write:
        versions = {name: importlib.metadata.version(name) for name in ("numpy", "cupy-cuda13x", "nvidia-cuda-nvrtc")}
        made = {"date": str(datetime.date.today()), "system": platform.machine(), "versions": versions, "seed": given.seed}
        (HERE / "results.json").write_text(json.dumps({**made, "results": results}, indent=1) + "\n")
        print(f"wrote {(HERE / 'results.json').relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
