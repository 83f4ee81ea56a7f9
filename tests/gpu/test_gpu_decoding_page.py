"""The snippet of docs/decoding.md that needs a GPU: a call captured once, replayed with other lengths."""

from __future__ import annotations

import re
from typing import Any

from chip import TESTS, choose

BLOCKS = re.findall(r"```python\n(.*?)```", (TESTS.parent / "docs" / "decoding.md").read_text(), re.DOTALL)
TOKENS = choose(100, 3)


def test_a_captured_call_appends_one_token_after_the_other() -> None:
    (block,) = (block for block in BLOCKS if "import cupy," in block)
    assert "range(100)" in block
    names: dict[str, Any] = {}
    exec(compile(block.replace("range(100)", f"range({TOKENS})"), "decoding.md", "exec"), names)
    keys = names["k_cache"].get()
    assert names["lengths"].get().tolist() == [1 + TOKENS] * 4
    assert (keys[:, :, : 1 + TOKENS] == 1).all() and (keys[:, :, 1 + TOKENS :] == 0).all()
    assert (names["out"].get() == 1).all()
