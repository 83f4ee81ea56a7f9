"""Words that depend on a number."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """A count with its noun: 1 fault, 2 faults, 1,000 faults."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
