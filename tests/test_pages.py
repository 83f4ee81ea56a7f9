"""The pages of the documentation: their Python runs, in one go a page, and its values are those that it claims."""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from suites import sample

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# Of these a test of their own says more, or their snippets are parts of programs.
ELSEWHERE = {
    "decoding.md",
    "distributed.md",
    "l2.md",
    "masks.md",
    "profile.md",
    "ring_traffic.md",
    "scores.md",
    "trace.md",
}
PAGES = sorted(page.name for page in DOCS.glob("*.md") if page.name not in ELSEWHERE and "```python" in page.read_text())
# What snippets that say how something is written take for granted: the kernels and arrays of ptx.md's, each before its snippet.
BEFORE = {
    "ptx.md": (
        """
import numpy as np
from cupyflash.sim import ptx

cuda = 'extern "C" __global__ void k(const float* x, float* out) { out[threadIdx.x] = 2 * x[threadIdx.x]; }'
kernel, grid, block, args = "k", 1, 128, {"x": np.ones(128, np.float32), "out": np.zeros(128, np.float32)}
""",
        """
module = ptx.Module.from_source('''
struct Box { float* x; char m; };
struct P { float* Q; float* O; float* rows[2]; float* mask; int n; Box box; };
extern "C" __global__ void k(P p) { p.O[threadIdx.x] = p.Q[threadIdx.x] + p.rows[1][threadIdx.x] + p.n; }
''')
q, o, x, a, b = np.zeros((5, 128), np.float32)
""",
        """
module = ptx.Module.from_source('''
struct alignas(64) CUtensorMap { char bytes[128]; };
struct P { CUtensorMap B; int n; };
struct Maps { CUtensorMap of[2]; };
#define BY_VALUE const __grid_constant__
extern "C" __global__ void k(BY_VALUE CUtensorMap A, BY_VALUE P p, BY_VALUE Maps maps) {}
''', options=("-arch=compute_90",))
a, b = np.zeros((128, 64), np.float16), np.zeros((256, 256), np.uint16)
""",
    )
}
CLAIM = re.compile(r"^(\S.*?)  # (True|False|\(.*\)|\[.*\]|-?[\d_]+)$", re.MULTILINE)


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


@pytest.mark.parametrize("name", sample(PAGES, ["check_in_ci.md", "index.md", "internals.md"]))
def test_the_snippets_run_and_claim_the_truth(name: str) -> None:
    names: dict[str, Any] = {"__name__": name}
    for block, before in zip_longest(blocks(name), BEFORE.get(name, ()), fillvalue=""):
        if "import cupy, " in block:  # on a GPU; tests/gpu
            continue
        exec(compile(before + block, name, "exec"), names)
        for expression, value in CLAIM.findall(block):
            assert eval(expression, names) == eval(value), expression
    tests = [function for each, function in names.items() if each.startswith("test_")]
    for test in tests:
        test()


def test_every_page_is_on_the_site() -> None:
    listed = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.name for page in DOCS.glob("*.md")}
