"""docs/masks.md: its Python runs, its values are what it claims, each of its masks is executed, its table is the closed form's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_pictures import DOCS, script

import cupyflash
from cupyflash.options import EMPTY, MIXED, WHOLE
from cupyflash.sim import theory
from cupyflash.sim.reference import reference

PAGE = (DOCS / "masks.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CLAIM = re.compile(r"^(\S.*?)  # (True|False)$", re.MULTILINE)
PICTURES = script()


def small() -> Iterator[str]:
    """The page's Python, for fewer tokens."""
    for block in BLOCKS:
        yield block.replace("n = 4096", "n = 256")


def test_every_mask_has_a_picture_and_every_picture_a_mask() -> None:
    assert set(PICTURES.masks()) == set(PICTURES.MASKS) == set(re.findall(r"\(masks_(\w+)\.png\)", PAGE))


@pytest.mark.wide
def test_the_snippets_run_and_claim_the_truth() -> None:
    names: dict[str, Any] = {}
    claims = 0
    for block in small():
        exec(compile(block, "masks.md", "exec"), names)
        for expression, value in CLAIM.findall(block):
            assert bool(eval(expression, names)) == eval(value), expression
            claims += 1
    assert claims == 2
    q, k, v = names["q"], names["k"], names["v"]
    for name in PICTURES.MASKS:
        (pattern,) = (PICTURES.schedule_of(names[name], n=256).problem.options.pattern,)
        out = cupyflash.attention(q, k, v, mask=names[name])
        assert np.allclose(out, reference(q, k, v, mask=pattern.kept)[0], atol=4e-3), name


def table() -> Iterator[str]:
    dense = theory.traffic(PICTURES.schedule_of()).total_bytes
    for name, mask in PICTURES.masks().items():
        schedule = PICTURES.schedule_of(mask)
        counted, array = theory.traffic(schedule), theory.traffic(PICTURES.schedule_of(mask, array=True))
        states = [int((schedule.mask_tiles[0].states == state).sum()) for state in (EMPTY, MIXED, WHOLE)]
        asked = sum(moved.total_bytes for tensor, moved in counted.items() if tensor == "tiles" or tensor.startswith("mask"))
        moved = [f"{each / 1e6:,.0f}" for each in (dense, counted.total_bytes, asked, array.total_bytes)]
        yield f"| {name.replace('_', ' ')} | {' | '.join(f'{each:,}' for each in states)} | {' | '.join(moved)} |"


def test_the_table_of_bytes_is_the_closed_form_s() -> None:
    shown = PAGE.split("<!-- bytes -->\n")[1].split("\n<!-- end -->")[0].splitlines()[2:]
    assert shown == list(table())
