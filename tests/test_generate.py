"""The example that generates: what it reads from its cache in pages is attention over the whole of each text."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
generate = importlib.import_module("generate")
train_characters = importlib.import_module("train_characters")
PROMPTS = ("So long as men", "Thy")


@pytest.fixture(scope="module")
def parameters() -> Any:
    """The parameters of a model that has learned nothing."""
    return train_characters.initial(np, len(train_characters.ALPHABET), 1, length=32)


@pytest.mark.wide
def test_each_call_is_attention_over_the_whole_text_and_texts_get_pages_as_they_grow(parameters: Any) -> None:
    texts, differences = generate.generate(np, parameters, PROMPTS, 3, seed=2, check=True)
    assert [text[: len(prompt)] for text, prompt in zip(texts, PROMPTS, strict=True)] == list(PROMPTS)
    assert [len(text) for text in texts] == [17, 6]  # the first has a second page by now
    assert len(differences) == 2 + 3 and 0 < max(differences) < 1e-5


def test_a_page_that_is_lost_is_seen(parameters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` compares with numbers that do not come from the cache."""
    attend = generate.Cache.attend

    def forgetful(cache: Any, *arguments: Any) -> Any:
        if cache.lengths[0] == 15:
            cache.k[cache.table[0, 0]] = 0
        return attend(cache, *arguments)

    monkeypatch.setattr(generate.Cache, "attend", forgetful)
    _, differences = generate.generate(np, parameters, PROMPTS, 2, check=True)
    assert [difference < 1e-5 for difference in differences] == [True, True, True, False]


def test_pages_are_handed_out_as_texts_grow(parameters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate.cupyflash, "attention_decode", lambda q, *_, **__: q)
    cache, rows = generate.Cache(np, 2, 48, 5), np.zeros((1, generate.HEADS, 16, generate.HEAD_DIM), np.float32)
    for text, new, free in ((0, 15, 4), (1, 16, 3), (0, 1, 3), (0, 1, 2), (1, 16, 1), (1, 1, 0)):
        cache.attend(rows[:, :, :new], rows[:, :, :new], rows, slice(text, text + 1))
        assert len(cache.free) == free
    handed_out = [*cache.table[0, :2], *cache.table[1, :3]]
    assert sorted(handed_out) == list(range(5)) and cache.lengths.tolist() == [17, 33]


@pytest.mark.parametrize(("prompts", "count"), [(("Thy",), 30), (("Thy",), -1), (("",), 3), (("Zebra",), 3)])
def test_what_cannot_be_written_is_refused(parameters: Any, prompts: tuple[str, ...], count: int) -> None:
    with pytest.raises(ValueError, match="must"):
        generate.generate(np, parameters, prompts, count)


@pytest.mark.wide
def test_the_command_trains_and_tells_the_largest_difference(capsys: pytest.CaptureFixture[str]) -> None:
    generate.main(["--steps", "2", "--count", "4", "--check", "Thou", "And"])
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "the simulated device (NumPy): training on texts of 64 characters"
    assert told[-3].startswith("[0] 'Thou") and told[-2].startswith("[1] 'And")
    found, of = told[-1].split(", the largest difference from attention over the whole text: ")
    assert found == "6 calls" and float(of) < 1e-5
