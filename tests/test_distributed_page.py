"""docs/distributed.md: its Python runs, and claims the truth."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "distributed.md").read_text()
CLAIM = re.compile(r"^(\S.*?)  # (True|False)$", re.MULTILINE)


@pytest.mark.wide
def test_snippets_run_and_claim_the_truth() -> None:
    names: dict[str, Any] = {}
    claims = []
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "distributed.md", "exec"), names)
        claims += [(expression, bool(eval(expression, names)), value == "True") for expression, value in CLAIM.findall(block)]
    assert len(claims) == 3 and all(found == told for _, found, told in claims), claims
