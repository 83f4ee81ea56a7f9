"""Output that commands share, within the width of the terminal: names, problems, tilings, devices, errors; counted bytes, the
closed form beside its replay and beside the arithmetic; the points of a sweep as a table, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from cupyflash.basics import Array, Report, Values
from cupyflash.device import Device
from cupyflash.request.options import OPTIONS
from cupyflash.request.problem import Problem
from cupyflash.request.score import Form
from cupyflash.schedules import Cache, TileSchedule
from cupyflash.sim import files, text
from cupyflash.sim.cli import terminal
from cupyflash.sim.traffic import Traffic
from cupyflash.sim.two_level import machine
from cupyflash.words import plural

NARROWEST = 40


def width() -> int:
    """Columns that text may take: COLUMNS, else the terminal's, else (in a pipe or a file) 100; at least 40."""
    return text.WIDTH if piped() else max(NARROWEST, shutil.get_terminal_size((text.WIDTH, 24)).columns)


def piped() -> bool:
    """True if nobody says how wide text may be: it goes into a pipe or a file, and COLUMNS is not set."""
    return "COLUMNS" not in os.environ and (sys.stdout is None or not sys.stdout.isatty())


def say(words: str = "", *, first: str = "", rest: str = "") -> None:
    """A paragraph; however wide the terminal is, its lines are no longer than is good to read."""
    terminal.show_lines(text.paragraph(words, first=first, rest=rest, width=min(width(), text.WIDTH)))


def show_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,), titles: Sequence[str] = ()
) -> None:
    """A table that fits the terminal, in several parts if it has to."""
    terminal.show_table(heads, rows, left=left, titles=titles, width=width())


def print_or_write(content: str, output: Path | None) -> None:
    """Print a report, or write it to a file where one is named."""
    if output is None:
        click.echo(content, nl=False)
    else:
        files.write(output, content)
        click.echo(f"wrote {output}", err=True)


def flat(problem: Problem) -> Report:
    """A problem for JSON: its options are fields beside its sizes, as `Problem(...)` takes them."""
    asked = problem.options
    fields = asdict(replace(problem, options=replace(asked, pattern=None, score=None, mask_function=None)))
    options = fields.pop("options")
    del options["pattern"]
    return {**fields, **options, "score": _of_form(asked.score), "mask_function": _of_form(asked.mask_function)}


def _of_form(form: Form | None) -> Report | None:
    """A function for JSON."""
    return None if form is None else {"text": form.text, "captured": {one.name: str(one) for one in form.captured}}


def describe(problem: Problem, swept: Sequence[str] = ()) -> str:
    """A problem in one line, less the sizes in `swept`, fields of `Problem`, which have many values."""
    p = problem
    sizes = {
        "batch": f"batch {p.batch}",
        "heads": f"heads {p.heads}" + (f" ({p.kv_heads} of K and V)" if p.kv_heads != p.heads else ""),
        "seqlen_q": f"Nq {p.seqlen_q:,}",
        "seqlen_k": f"Nk {p.seqlen_k:,}",
        "head_dim": f"d {p.head_dim}",
        "head_dim_v": f"d_v {p.head_dim_v}" if p.head_dim_v != p.head_dim else "",
        "dtype": p.dtype,
    }
    flags = [name for name, each in OPTIONS.items() if each.is_flag and name != "padded"]
    masks = [name for name in flags if getattr(p.options, name)] + ["key lengths"] * p.options.padded
    if p.options.window:
        masks.append("window of {} and {}".format(*("-" if side is None else side for side in p.options.window)))
    if p.options.score:
        masks.append(f"score {p.options.score.text.strip()}")
    if p.options.mask_function:
        masks.append(f"mask {p.options.mask_function.text.strip()}")
    if p.options.bias_dtype:
        masks[masks.index("bias")] += f" in {p.options.bias_dtype}"
    if p.options.score_dtype:
        masks.append(f"S in {p.options.score_dtype}")
    return ", ".join([size for name, size in sizes.items() if size and name not in swept] + masks)


def describe_cache(problem: Problem, cache: Cache, swept: bool = False) -> str:
    """Decoding in one line, without the cache's length if that is `swept`."""
    lengths = set(problem.options.key_lengths or ())
    told = [describe(problem.asking(padded=False, key_lengths=None), ("seqlen_k",) * swept)]
    if lengths and not swept:
        least, most = min(lengths), max(lengths)
        told.append(f"{most:,} keys cached" if least == most else f"{least:,} to {most:,} keys cached")
    if cache.appended:
        told.append(f"{plural(cache.appended, 'new key')} a sequence")
    if cache.page_size:
        told.append(f"pages of {cache.page_size} keys")
    told += ["a tree mask"] * cache.tree
    return ", ".join(told)


def tiling_report(schedule: TileSchedule) -> Report:
    """The three stages of a tiling, for JSON."""
    tiling = schedule.tiling
    stages = {"paper": tiling.paper, "fitted": tiling.fitted, "used": tiling.used}
    return {name: None if size is None else asdict(size) for name, size in stages.items()}


def show_tiling(stages: Values) -> None:
    """Block sizes by name, as the three stages of a tiling, with their reasons."""
    longest = max(map(len, stages))
    before = None
    for name, size in stages.items():
        label = f"  {name:<{longest}}  "
        if size is None:
            click.echo(f"{label}nothing fits")
        else:
            label += f"Br {size['block_rows']:>4}  Bc {size['block_cols']:>5}  "
            reason = "the same" if size == before else size["reason"]
            say(reason, first=label, rest=" " * (len(label) if width() > 2 * len(label) else 4))
        before = size


def taken(thing: object, *names: str) -> Report:
    """Some attributes of a thing by name, for JSON."""
    return {name: getattr(thing, name) for name in names}


def tell(report: Report, as_json: bool, show: Callable[..., None], *given: Any) -> None:
    """Print a report, as JSON or as `show(report, *given)` has it."""
    click.echo(json.dumps(report, indent=2)) if as_json else show(report, *given)


def detected() -> Device | None:
    """The current GPU, or None if there is none, or no CuPy."""
    try:
        return Device.current()
    except (ImportError, RuntimeError):
        return None


def worst_error(out: Array, expected: Array) -> float:
    """The largest absolute difference."""
    return float(np.abs(out.astype(np.float64) - expected).max(initial=0))


def show_held(held: Mapping[str, tuple[str, str]], rooms: Mapping[str, int]) -> None:
    """Shared memory by what is held there: its name, its size in words, bytes."""
    click.echo()
    show_table(("held", "", "bytes"), [(*held[name], f"{nbytes:,}") for name, nbytes in rooms.items()], left=(0, 1))


def show_balance(report: Report) -> None:
    """Show how evenly the work is shared out."""
    say(f"Balance: the busiest place for a thread block has {report['balance']:.3f} times the mean of all, in turns.")


# -- counted bytes -----------------------------------------------------------------------------------------------------------


def counted(schedule: TileSchedule, form: Traffic) -> Report:
    """The bytes of a schedule for JSON, and True if its replay agrees with the closed form."""
    try:
        replayed: machine.Replay | None = machine.run(schedule)
        refused = None
    except (machine.SramOverflow, machine.TooLong) as error:  # the closed form stands by itself: say why
        replayed, refused = None, str(error)
    return {
        "traffic": form.as_dict(),
        "replay_agrees": None if replayed is None else replayed.traffic == form,
        "peak_sram_bytes": None if replayed is None else replayed.peak_sram_bytes,
        "replay_refused": refused,
        "extra_memory_bytes": schedule.workspace_bytes,
    }


def machine_balance(device: Device, dtype: str) -> float | None:
    """FLOP a byte of HBM at which a device's peaks meet; None if one is not known."""
    peak, bandwidth = device.tensor_peak.get(dtype), device.hbm_bandwidth
    return peak / bandwidth if peak and bandwidth else None


def intensities(flops: int, form: Traffic, device: Device, dtype: str) -> Report:
    """The operations for JSON, beside the bytes, and beside what the device balances."""
    by_byte, balance = intensity(flops, form.total_bytes), machine_balance(device, dtype)
    return {"flops": flops, "arithmetic_intensity": by_byte, "machine_balance": balance}


def beside_balance(balance: float | None, more: str = "") -> str:
    """The intensity at which a device balances, in words that follow a report's own."""
    return f"; the device balances at {balance:.0f}{more}" if balance else ""


def intensity(flops: int, nbytes: int) -> float | None:
    """FLOP a byte; None where nothing moves."""
    return flops / nbytes if nbytes else None


def show_traffic(traffic: Mapping[str, Mapping[str, int]]) -> None:
    """Bytes by tensor."""
    rows = [(name, f"{row['read_bytes']:,}", f"{row['write_bytes']:,}") for name, row in traffic.items()]
    show_table(("tensor", "bytes read", "bytes written"), rows)
    click.echo()


def show_replay(report: Values) -> None:
    """Show the replay's verdict, and the memory beside the tensors."""
    if report["replay_refused"]:
        say(f"replay on the SRAM machine refused: {report['replay_refused']}")
    else:
        agrees = "agrees" if report["replay_agrees"] else "DISAGREES"
        say(f"replay on the SRAM machine {agrees}; it held {report['peak_sram_bytes']:,} bytes at most")
    say(f"extra memory: {report['extra_memory_bytes']:,} bytes")


# -- points of a sweep -------------------------------------------------------------------------------------------------------


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

    head: Values
    rows: Sequence[Values]
    title: str
    columns: Mapping[str, Column]
    legends: Sequence[str]
    tail: Values
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
