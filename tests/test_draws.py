"""A draw of the tests: deterministic, of the size that was asked for, and another one for each key."""

from __future__ import annotations

import pytest

from suites import place

NAMES = [f"tests/test_some.py::test_it[{n}]" for n in range(2000)]


def drawn(monkeypatch: pytest.MonkeyPatch, key: str, fraction: float) -> set[str]:
    monkeypatch.setenv("CUPYFLASH_TEST_DRAW", key)
    return {name for name in NAMES if place(name) < fraction}


def test_a_draw_has_its_size_and_depends_on_its_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first = drawn(monkeypatch, "a", 0.1)
    assert 150 < len(first) < 250
    assert first == drawn(monkeypatch, "a", 0.1) < drawn(monkeypatch, "a", 0.2)
    assert len(first & drawn(monkeypatch, "b", 0.1)) < 50


def test_every_test_is_in_some_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set().union(*(drawn(monkeypatch, str(key), 0.1) for key in range(150))) == set(NAMES)
