"""Words that depend on a number."""

from __future__ import annotations


def plural(count: int, noun: str, many: str | None = None) -> str:
    """A count with its noun: 1 fault, 2 faults, 1,000 faults; `many` where that is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else many or f'{noun}s'}"
