"""The keywords of the calls as docs/reference.md has them: their types and defaults, grouped by purpose, from the signatures."""

from __future__ import annotations

from collections import Counter
from inspect import signature
from itertools import takewhile
from pathlib import Path
from typing import Any

import cupyflash

CALLS = {
    name.replace("attention_", ""): getattr(cupyflash, name)
    for name in (
        *("attention", "attention_backward", "attention_vjp", "attention_jvp", "attention_double_backward"),
        *("attention_varlen", "attention_varlen_backward", "attention_decode"),
    )
}


def rows_of(name: str) -> list[str]:
    """A keyword's rows: one for each default that it has."""
    found: dict[tuple[str, str], list[str]] = {}
    for call, function in CALLS.items():
        one: Any = signature(function).parameters.get(name)
        if one is not None and one.kind is one.KEYWORD_ONLY:
            found.setdefault((one.annotation, repr(one.default)), []).append(call)
    return [
        f"| `{name}` | `{of.replace(' | ', ' or ')}` | `{default}` | {'all' if calls == list(CALLS) else ', '.join(calls)} |"
        for (of, default), calls in found.items()
    ]


def test_the_reference_has_a_row_for_each_keyword_and_default() -> None:
    """In the tables of docs/reference.md, by what they are for."""
    every = {each.name for call in CALLS.values() for each in signature(call).parameters.values() if each.kind is each.KEYWORD_ONLY}
    lines = (Path(__file__).parents[1] / "docs" / "reference.md").read_text().splitlines()
    heads = [n for n, line in enumerate(lines) if line.endswith("| type | default | calls |")]
    rows = [row for head in heads for row in takewhile(bool, lines[head + 2 :])]
    assert Counter(rows) == Counter(row for name in every for row in rows_of(name))
