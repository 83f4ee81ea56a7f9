"""The keywords of the calls as docs/reference.md has them: their types and defaults, grouped by purpose, from the signatures."""

from __future__ import annotations

from inspect import signature
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
PURPOSES = {
    "Which scores count": "causal window mask key_lengths block_mask tree_mask",
    "What scores become": "scale score softcap alibi_slopes bias sinks",
    "Dropout": "dropout seed offset dropout_origin",
    "Arrays": "layout out return_lse",
    "Gradients": "return_dbias return_dscore deterministic",
    "A cache": "k v block_table",
    "Kernels": "algorithm tiling num_splits score_dtype",
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


def written() -> str:
    """The tables."""
    lines = []
    for purpose, names in PURPOSES.items():
        lines += [f"| {purpose} | type | default | calls |", "| --- | --- | --- | --- |"]
        lines += [row for name in names.split() for row in rows_of(name)] + [""]
    return "\n".join(lines)


def test_every_keyword_has_a_purpose() -> None:
    every = {each.name for call in CALLS.values() for each in signature(call).parameters.values() if each.kind is each.KEYWORD_ONLY}
    names = " ".join(PURPOSES.values()).split()
    assert set(names) == every and len(names) == len(every)


def test_the_reference_has_the_tables() -> None:
    assert written() in (Path(__file__).parents[1] / "docs" / "reference.md").read_text(), written()
