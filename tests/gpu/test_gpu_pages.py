"""The snippets of the pages that need a GPU: all the calls, and one that is captured once and replayed with other lengths."""

from __future__ import annotations

from typing import Any

from chip import choose

from snippets import pages

TOKENS = choose(100, 3)


def run(page: str, smaller: dict[str, str]) -> dict[str, Any]:
    """The names that a page's snippet for CuPy leaves, which is made smaller for the stand-in."""
    (block,) = (block for block in pages()[f"docs/{page}"] if "import cupy, " in block.text)
    text = block.text
    for shown, here in smaller.items():
        assert shown in text
        text = text.replace(shown, choose(shown, here))
    names: dict[str, Any] = {}
    exec(compile(text, page, "exec"), names)
    return names


def test_the_calls() -> None:
    names = run("calls.md", {"(2, 8, 1024, 64)": "(2, 1, 64, 64)", "1024, 700": "64, 40", "1024": "64"})
    assert all(names[name].shape == names["q"].shape for name in ("out", "dq", "dk", "dv"))


def test_a_captured_call_appends_one_token_after_the_other() -> None:
    names = run("decoding.md", {"range(100)": f"range({TOKENS})"})
    keys = names["k_cache"].get()
    assert names["lengths"].get().tolist() == [1 + TOKENS] * 4
    assert (keys[:, :, : 1 + TOKENS] == 1).all() and (keys[:, :, 1 + TOKENS :] == 0).all()
    assert (names["out"].get() == 1).all()
