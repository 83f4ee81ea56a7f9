"""Words that depend on a number."""

from __future__ import annotations

from collections.abc import Sequence


def plural(count: int, noun: str, many: str | None = None) -> str:
    """A count with its noun: 1 fault, 2 faults, 1,000 faults; `many` is the plural if it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else many or f'{noun}s'}"


QUOTED = 100
"""Characters that a message has of a text that somebody gave."""


def cut(text: str) -> str:
    """A text, or its beginning and dots."""
    return text if len(text) <= QUOTED else f"{text[: QUOTED - 3]}..."


def listed(words: Sequence[str]) -> str:
    """One or more names in a sentence: a, b and c."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
