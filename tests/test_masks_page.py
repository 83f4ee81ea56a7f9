"""docs/masks.md: each of its masks has a picture and is executed, its table is the closed form's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_pictures import DOCS, script

import cupyflash
from cupyflash.request.options import EMPTY, MIXED, WHOLE
from cupyflash.sim import theory
from cupyflash.sim.numbers.reference import reference
from snippets import pages

PAGE = (DOCS / "masks.md").read_text()
PICTURES = script()


def test_every_mask_has_a_picture_and_every_picture_a_mask() -> None:
    assert set(PICTURES.masks()) == set(PICTURES.MASKS) == set(re.findall(r"\(masks_(\w+)\.png\)", PAGE))


@pytest.mark.wide
def test_each_mask_is_what_is_computed() -> None:
    """All masks in one kernel, one for each head."""
    names: dict[str, Any] = {}
    for block in pages()["docs/masks.md"]:
        if block.language == "python" and "cupyflash.attention" not in block.text:
            exec(compile(block.here, "masks.md", "exec"), names)
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
