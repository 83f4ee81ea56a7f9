"""docs/coming_from.md: its blocks of PyTorch run in their order, and what they claim is so."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest

from snippets import Block, Session, pages

torch = pytest.importorskip("torch", reason="the page's blocks need PyTorch, which is not installed")
pytest.importorskip("torch.nn.attention.flex_attention", reason="this PyTorch has no flex_attention")
pytestmark = pytest.mark.wide

MARK = "run by"


def here() -> list[Block]:
    return [block for block in pages()["docs/coming_from.md"] if block.marks.get(MARK) == "tests/test_torch_page.py"]


def test_the_blocks_run_and_claim_the_truth() -> None:
    *blocks, wrong = here()
    session = Session()
    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", torch.nn.functional.scaled_dot_product_attention):
        for block in blocks:
            session.run(Block(block.page, block.line, block.language, block.text, {}))
    assert len(blocks) == 4 and session.names["out"].shape == (1, 4, 64, 32)
    call, said = wrong.text.splitlines()
    names: dict[str, Any] = {**session.names, "cupyflash": __import__("cupyflash")}
    with pytest.raises(TypeError, match=re.escape(said.removeprefix("# TypeError: "))):
        exec(call, names)
