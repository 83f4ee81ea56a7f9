"""The pages of the documentation: their Python runs, in one go a page, and its values are those that it claims."""

from __future__ import annotations

import re
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
    "ptx.md",
    "ring_traffic.md",
    "scores.md",
    "trace.md",
}
PAGES = sorted(page.name for page in DOCS.glob("*.md") if page.name not in ELSEWHERE and "```python" in page.read_text())
CLAIM = re.compile(r"^(\S.*?)  # (True|False|\(.*\)|\[.*\]|-?[\d_]+)$", re.MULTILINE)


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


@pytest.mark.parametrize("name", sample(PAGES, ["check_in_ci.md", "index.md", "internals.md"]))
def test_the_snippets_run_and_claim_the_truth(name: str) -> None:
    names: dict[str, Any] = {"__name__": name}
    for block in blocks(name):
        if "import cupy, " in block:  # on a GPU; tests/gpu
            continue
        exec(compile(block, name, "exec"), names)
        for expression, value in CLAIM.findall(block):
            assert eval(expression, names) == eval(value), expression
    tests = [function for each, function in names.items() if each.startswith("test_")]
    for test in tests:
        test()


def test_every_page_is_on_the_site() -> None:
    listed = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.name for page in DOCS.glob("*.md")}
