"""Tables, colours and progress on a terminal, by rich where it is installed (the extra `rich`); pipes and files get plain text."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from cupyflash.sim import text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, Task

LONG_SECONDS = 2.0
"""Work that takes longer has an estimate of its time."""
FIRST_LOOK = 0.5
"""Seconds of a loop from which its time is estimated."""
VERDICTS = {"green": r"\b(agrees|yes)\b", "bold red": r"\b(DISAGREES|NO)\b"}
"""Words of reports by their style."""


def console(err: bool = False) -> Console | None:
    """The console of stdout, or of stderr; None if it is no terminal, one of lines of text only, or rich is not installed."""
    stream = sys.stderr if err else sys.stdout
    if stream is None or not stream.isatty() or os.environ.get("TERM") == "dumb":
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(stderr=err, highlight=False)


def show_lines(lines: Iterable[str], styles: Mapping[str, str] = VERDICTS, err: bool = False) -> None:
    """Print lines of text; on a terminal what matches a pattern has its style."""
    content, shown = "\n".join(lines), console(err)
    if shown is None:
        click.echo(content, err=err)
        return
    from rich.text import Text

    said = Text(content)
    for style, pattern in styles.items():
        said.highlight_regex(pattern, style)
    shown.print(said, soft_wrap=True)


def show_report(content: str, err: bool = False) -> None:
    """Print a report of findings: on a terminal its headings are bold, findings red, mends green."""
    from cupyflash.sim.ptx.state.findings import KINDS

    found = rf"(?<=: )({'|'.join(map(re.escape, KINDS))})(?=: )"
    styles = {"bold": r"(?m)^(?<=\n\n)\S.*$|\A.*$", "bold red": found, "green": r"[Ll]ikely mend: "}
    show_lines(content.splitlines(), styles, err)


def show_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int], titles: Sequence[str], width: int
) -> None:
    """Print a table as `text.table` has it, in several parts if it is wider than `width`."""
    shown = console()
    if shown is None:
        click.echo("\n".join(text.table(heads, rows, left=left, titles=titles, width=width)))
        return
    cells, titles = [list(row) for row in rows], titles or [""] * len(heads)
    widths = [max(len(row[n]) for row in (heads, *cells)) for n in range(len(heads))]
    for number, columns in enumerate(text.stacks(widths, titles, width)):
        if number:
            shown.print()
        shown.print(_grouped(heads, cells, columns, left, titles))


def _grouped(
    heads: Sequence[str], rows: Sequence[Sequence[str]], columns: Sequence[int], left: Sequence[int], titles: Sequence[str]
) -> RenderableType:
    """Some columns as tables of rich beside each other, one for each title."""
    from rich import box
    from rich.padding import Padding
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    parts = []
    for title, group in groupby(columns, key=lambda n: titles[n]):
        numbers = list(group)
        part = Table(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", title_style="bold cyan"
        )
        if any(titles):
            part.title, part.min_width = title or " ", len(title)
        for n in numbers:
            part.add_column(heads[n], justify="left" if n in left else "right", no_wrap=True, style="cyan" if n == 0 else "")
        for row in rows:
            part.add_row(*(row[n] for n in numbers), style="bold" if row[0] == "total" else "")
        parts.append(part)
        grid.add_column()
    grid.add_row(*parts)
    return Padding(grid, (0, 0, 0, len(text.INDENT)), expand=False)


class StepLines:
    """Steps of work, told on stderr: each is a line, the first one with the estimate in seconds of all if that is long."""

    def __init__(self, estimate: float | None):
        self.estimate = estimate

    def begin(self, doing: str) -> None:
        """Tell that a step begins."""
        whole, self.estimate = self.estimate, None
        said = f" (about {whole:,.0f} s in all)" if whole is not None and whole > LONG_SECONDS else ""
        click.echo(f"{doing}{said} ...", err=True)

    def expect(self, seconds: float) -> None:
        """Tell that all will take so long."""
        click.echo(f"about {seconds:,.0f} s in all ...", err=True)


class StepBar(StepLines):
    """The same on one line of a terminal, with a bar by the estimate and the time that has passed."""

    def __init__(self, estimate: float | None, bar: Progress):
        super().__init__(estimate)
        self.bar, self.task = bar, bar.add_task("", total=None, estimate=estimate)

    def begin(self, doing: str) -> None:
        self.bar.update(self.task, description=doing)

    def expect(self, seconds: float) -> None:
        self.bar.update(self.task, estimate=seconds)


@contextmanager
def progress(estimate: float | None = None) -> Iterator[StepLines]:
    """Steps of work that takes `estimate` seconds in all, if that is known: a bar on a terminal with rich, else lines."""
    shown = console(err=True)
    if shown is None:
        yield StepLines(estimate)
        return
    from rich.progress import Progress, ProgressColumn, TextColumn
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    class Passed(ProgressColumn):
        """The share of the estimate that has passed; what takes longer does not reach the end, what has no estimate pulses."""

        def render(self, task: Task) -> ProgressBar:
            passed, whole = task.elapsed or 0.0, task.fields["estimate"]
            known = whole is not None and whole > LONG_SECONDS
            share = passed / max(whole, 1.05 * passed) if known else 0.0
            return ProgressBar(total=1.0, completed=share, width=20, pulse=not known, animation_time=passed)

    class Seconds(ProgressColumn):
        """The seconds that have passed, of those that are expected."""

        def render(self, task: Task) -> Text:
            whole = task.fields["estimate"]
            of = f" of about {whole:,.0f}" if whole is not None and whole > LONG_SECONDS else ""
            return Text(f"{task.elapsed or 0:,.0f}{of} s")

    with Progress(Passed(), Seconds(), TextColumn("{task.description}"), console=shown, transient=True) as bar:
        yield StepBar(estimate, bar)


def tracked(items: Sequence[Any], doing: str) -> Iterator[Any]:
    """The items, one after the other; stderr has an estimate of the time that all take, if that is over `LONG_SECONDS`."""
    shown = console(err=True)
    if shown is not None:
        from rich.progress import track

        yield from track(items, doing, console=shown, transient=True)
        return
    begun, told = time.monotonic(), False
    for done, item in enumerate(items):
        passed = time.monotonic() - begun
        whole = passed / done * len(items) if done else 0.0
        if not told and passed > FIRST_LOOK and whole > LONG_SECONDS:
            told = True
            click.echo(f"{doing}: {done:,} of {len(items):,}, about {whole - passed:,.0f} s left ...", err=True)
        yield item
