"""The points of a sweep as a table, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cupyflash.sim import text
from cupyflash.sim.cli.show import say, show_table, width


class Column(NamedTuple):
    """A column of the table: its heading, and how a value is written, as a multiple of a unit of 1 / `scale`."""

    heading: str
    form: str = ","
    scale: float = 1

    def cell(self, value: Any) -> str:
        """A value's text; "-" for none."""
        return "-" if value is None else value if isinstance(value, str) else f"{value * self.scale:{self.form}}"


@dataclass(frozen=True)
class Points:
    """The points of a sweep, `rows` with names for their columns, and what is said of them.

    `head` and `tail` surround them in JSON. The table has a title, and a column for each of `columns`, by the names of the rows;
    `legends` explain them. `folded`: columns of one value, but for the first, are told in words.
    """

    head: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    title: str
    columns: Mapping[str, Column]
    legends: Sequence[str]
    tail: Mapping[str, Any]
    folded: bool = False

    def printed(self, kind: str) -> str:
        """All of it: `kind` is table, csv or json."""
        return {"table": self.table, "csv": self.csv, "json": self.json}[kind]()

    def json(self) -> str:
        return json.dumps({**self.head, "points": self.rows, **self.tail}, indent=2) + "\n"

    def csv(self) -> str:
        file = io.StringIO()
        writer = csv.DictWriter(file, list(self.rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return file.getvalue()

    def show(self) -> None:
        """Print the table, with what is said of it."""
        heads, rows, legends = self._table
        say(self.title, rest="  ")
        say()
        show_table(heads, rows, left=())
        say()
        for words in legends:
            say(words)

    def table(self) -> str:
        """Text with a heading, aligned."""
        heads, rows, legends = self._table
        across = width()
        return "\n".join(
            [
                *text.paragraph(self.title, rest="  ", width=min(across, text.WIDTH)),
                "",
                *text.table(heads, rows, left=(), width=across),
                "",
                *(line for words in legends for line in text.paragraph(words, width=min(across, text.WIDTH))),
                "",
            ]
        )

    @property
    def _table(self) -> tuple[list[str], list[tuple[str, ...]], list[str]]:
        """Heads, rows and legends."""
        cells = {name: [column.cell(row[name]) for row in self.rows] for name, column in self.columns.items()}
        same = [name for name in list(cells)[1:] if self.folded and len(self.rows) > 1 and len(set(cells[name])) == 1]
        shown = [name for name in cells if name not in same]
        told = "; ".join(f"{self.columns[name].heading} {cells[name][0]}" for name in same)
        legends = [*self.legends, *[f"the same at every point: {told}"] * bool(same)]
        return [self.columns[name].heading for name in shown], [*zip(*(cells[name] for name in shown), strict=True)], legends
