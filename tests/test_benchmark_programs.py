"""The benchmark that runs other people's programs: what it makes of a report, and the results on file."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "programs"
spec = importlib.util.spec_from_file_location("benchmark_programs", FOLDER / "__main__.py")
assert spec is not None and spec.loader is not None
benchmark = sys.modules["benchmark_programs"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)

FAULT = {"source": ["a/b.cu", 3], "ptx_line": 7, "kind": "race", "message": "two writes"}


def report(status: int, findings: Any = (), missing: Any = (), failed: Any = (), cut: bool = False) -> dict[str, Any]:
    kernel = {"kernel": "_Z1fi", "launches": 2, "repeated": 1, "unfinished": cut, "seconds": 9.0, "findings": list(findings)}
    kernel["estimate"] = {"seconds": 123.4, "done": 2, "waves": 1000, "at_least": False} if cut else None
    told = [{"function": function, "error": error} for function, error in failed]
    return {"status": status, "kernels": [kernel], "missing": list(missing), "failed": told, "cut": cut, "memory": ""}


@pytest.mark.parametrize(
    ("result", "text", "late", "state"),
    [
        (report(0), "", False, "passes"),
        (report(1), "", False, "wrong"),
        (report(2), "", False, "waived"),
        (report(0, [FAULT]), "", False, "finding"),
        (report(1, cut=True), "", False, "too large"),
        (report(1, missing=["cudaMallocArray"]), "", False, "refused"),
        (report(0, failed=[("__cudaLaunchKernel", "cudaErrorInvalidKernelImage: machine code only")]), "", False, "refused"),
        (report(1, [FAULT], failed=[("__cudaLaunchKernel", "cudaErrorNotSupported: malloc")]), "", False, "refused"),
        (None, "", True, "too large"),
        (None, "Error: not enough memory: 2 GiB", False, "too large"),
        (None, "Segmentation fault", False, "wrong"),
    ],
)
def test_a_state_for_each_end(result: Any, text: str, late: bool, state: str) -> None:
    program = benchmark.Program("p", Path(), ())
    outcome = benchmark.judged(program, result, 0, text, late)
    assert outcome.state == state and outcome.findings in ([], ["b.cu:3: race: two writes"])
    small = "f: 0 run to the end, 1 repeated, in 9.0 s; a launch: 123 s, by 2 of its 1,000 groups of blocks"
    assert outcome.arithmetic == ([small] if result is not None and state == "too large" else [])


def test_results_on_file_are_of_the_list() -> None:
    listed = tomllib.loads((FOLDER / "samples.toml").read_text())["programs"]
    results = json.loads((FOLDER / "samples-results.json").read_text())
    assert {one["name"] for one in results["programs"]} <= set(listed)
    assert results["states"] == Counter(one["state"] for one in results["programs"])
    assert "wrong" not in results["states"]
