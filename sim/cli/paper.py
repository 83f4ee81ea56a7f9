"""`cupyflash paper`: the papers' own figures from our counts, beside the papers' statements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from cupyflash.basics import Report
from cupyflash.sim import files, text
from cupyflash.sim.cli.options import kind_of
from cupyflash.sim.cli.show import print_or_write, say, show_table, width
from cupyflash.sim.pictures.paper import FIGURES, Figure, markdown


def paper(names: Sequence[str], form: str | None, as_json: bool, output: Path | None, plot: Path | None) -> None:
    """Show the papers' figures anew."""
    form = kind_of(form, as_json) or "text"
    figures = [FIGURES[name]() for name in dict.fromkeys(names or FIGURES)]
    if plot is not None:
        from cupyflash.sim.pictures.plot_paper import draw

        for figure in figures:
            path = plot / f"paper_{figure.name}.png"
            files.save(draw(figure), path)
            click.echo(f"wrote {path}", err=True)
    if form == "text" and output is None:
        for number, figure in enumerate(figures):
            click.echo("\n" * bool(number), nl=False)
            show(figure)
        return
    if form == "text":
        content = "\n\n".join(shown(figure) for figure in figures) + "\n"
    else:
        content = markdown(figures) if form == "markdown" else json.dumps([report(figure) for figure in figures], indent=2) + "\n"
    print_or_write(content, output)


def report(figure: Figure) -> Report:
    """A figure for JSON: the table's rows by their heads, and the points that are drawn."""
    said = {"name": figure.name, "title": figure.title, "paper": figure.paper, "explained": figure.explained}
    rows = [dict(zip(figure.heads, row, strict=True)) for row in figure.rows]
    return {**said, "rows": rows, "lines": {line.label: [*map(list, line.points)] for line in figure.picture.lines}}


def show(figure: Figure) -> None:
    """Print a figure as text."""
    say(figure.title)
    say(figure.paper, first="the paper: ")
    say()
    show_table(figure.heads, figure.rows)
    say()
    say(figure.explained)


def shown(figure: Figure) -> str:
    """A figure as text, for a file."""
    columns = min(width(), text.WIDTH)
    said = text.paragraph(figure.paper, first="the paper: ", width=columns)
    table = text.table(figure.heads, figure.rows, width=width())
    return "\n".join([figure.title, *said, "", *table, "", *text.paragraph(figure.explained, width=columns)])
