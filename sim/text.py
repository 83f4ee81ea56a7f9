"""Text of a given width: aligned tables, stacked where their columns do not fit beside each other, and paragraphs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

WIDTH = 100
"""Columns of text that no terminal is to show."""
INDENT = "  "
LEAST_CUT = 20
"""Columns that a cut text has at least."""


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[int] = (0,),
    titles: Sequence[str] = (),
    cut: bool = False,
    width: int = WIDTH,
) -> list[str]:
    """Aligned columns, numbers to the right, the columns `left` to the left.

    `titles` has one for each column, shown once over neighbours that have the same. Where all columns together are wider than
    `width`, they are shown in several tables one below the other, each with the first column; columns of one title stay
    together where they can. `cut` says that of the last column, lines of source say, the beginning is enough.
    """
    titles = titles or [""] * len(heads)
    cells = [list(heads), *(list(row) for row in rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(heads))]
    if cut:
        beside = _span(range(len(widths) - 1), widths) + 2
        widths[-1] = min(widths[-1], max(width - beside, LEAST_CUT))
        cells = [[*row[:-1], shortened(row[-1], widths[-1])] for row in cells]
    lines: list[str] = []
    for columns in stacks(widths, titles, width):
        lines += [""] * bool(lines)
        if any(titles):
            lines.append(_titles(columns, widths, titles))
        for row in cells:
            padded = (row[n].ljust(widths[n]) if n in left else row[n].rjust(widths[n]) for n in columns)
            lines.append((INDENT + "  ".join(padded)).rstrip())
    return lines


def stacks(widths: Sequence[int], titles: Sequence[str], width: int) -> list[list[int]]:
    """The columns of each of the tables that a table is shown as: all in one where `width` holds them."""
    if _span(range(len(widths)), widths) <= width:
        return [list(range(len(widths)))]
    stacked = [[0]]
    keyed = [(title, [n for n, _ in group]) for title, group in groupby(enumerate(titles[1:], 1), key=lambda item: item[1])]
    for title, group in keyed:
        # Columns without a title go one by one, as do those of a group that no table has room for.
        whole = title and _span([0, *group], widths) <= width
        for some in [group] if whole else [[n] for n in group]:
            if len(stacked[-1]) > 1 and _span([*stacked[-1], *some], widths) > width:
                stacked.append([0])
            stacked[-1] += some
    return stacked


def _span(columns: Sequence[int] | range, widths: Sequence[int]) -> int:
    """The width of a table of these columns."""
    return len(INDENT) + sum(widths[n] for n in columns) + 2 * (len(columns) - 1)


def _titles(columns: Sequence[int], widths: Sequence[int], titles: Sequence[str]) -> str:
    """The line of titles, each in the middle of its columns."""
    spans = []
    for title, group in groupby(columns, key=lambda n: titles[n]):
        spans.append(f"{title:^{sum(widths[n] + 2 for n in group) - 2}}")
    return (INDENT + "  ".join(spans)).rstrip()


def in_units(amount: float, units: Sequence[tuple[str, float]], form: str, least: str) -> str:
    """An amount in the largest of `units` (name, size) of which there is one, written by `form`; else by `least`."""
    for unit, size in units:
        if amount >= size:
            return f"{amount / size:{form}} {unit}"
    return least


DECIMAL = (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
BINARY = (("GB", 2**30), ("MB", 2**20), ("KB", 2**10))


def shortened(text: str, width: int) -> str:
    """The beginning of a text that is too long."""
    return text if len(text) <= width else text[: width - 3] + "..."


def paragraph(text: str, *, first: str = "", rest: str = "", width: int = WIDTH) -> list[str]:
    """Lines of at most `width`, broken between words, the first behind `first`, the others behind `rest`."""
    whole = re.sub(" ([=/+]) ", "\0\\1\0", text)  # a formula is not broken at its signs
    lines = textwrap.wrap(
        whole, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )
    return [line.replace("\0", " ") for line in lines]
