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
    assert claims == 3
    # All of them in one kernel, one a head
    masks = [names[name] for name in PICTURES.MASKS]
    text = " or ".join(f"h == {head} and ({mask.text})" for head, mask in enumerate(masks))
    together = cupyflash.Mask(text, **{name: value for mask in masks for name, value in (mask.arrays | mask.numbers).items()})
    q, k, v = np.random.default_rng(1).standard_normal((3, 1, len(masks), 256, 64)).astype(np.float16)
    out = cupyflash.attention(q, k, v, mask=together)
    for head, mask in enumerate(masks):
        (pattern,) = (PICTURES.schedule_of(mask, n=256).problem.options.pattern,)
        of_head = (x[:, head : head + 1] for x in (q, k, v))
        assert np.allclose(out[:, head : head + 1], reference(*of_head, mask=pattern.kept)[0], atol=4e-3), mask


def table() -> Iterator[str]:
    dense = theory.traffic(PICTURES.schedule_of()).total_bytes
    for name, mask in PICTURES.masks().items():
        schedule = PICTURES.schedule_of(mask)
        counted, array = theory.traffic(schedule), theory.traffic(PICTURES.schedule_of(mask, array=True))
        states = [int((schedule.mask_tiles[0].states == state).sum()) for state in (EMPTY, MIXED, WHOLE)]
        asked = sum(moved.total_bytes for tensor, moved in counted.items() if tensor == "tiles" or tensor.startswith("mask"))
        moved = [f"{each / 1e6:,.0f}" for each in (dense, counted.total_bytes, asked, array.total_bytes)]
        yield f"| {name.replace('_', ' ')} | {' | '.join(f'{each:,}' for each in states)} | {' | '.join(moved)} |"


@pytest.mark.wide
def test_the_table_of_bytes_is_the_closed_form_s() -> None:
    shown = PAGE.split("<!-- bytes -->\n")[1].split("\n<!-- end -->")[0].splitlines()[2:]
    assert shown == list(table())
