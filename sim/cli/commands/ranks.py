"""The options of attention over several devices, which `predict` and `sweep` share."""

from __future__ import annotations

import re
from collections.abc import Callable

import click

from cupyflash.basics import LAYOUTS, MOST_RANKS
from cupyflash.sim.cli.options import Command

UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
DEFAULT_LINK = "450GB/s"


def bytes_a_second(rate: str) -> float:
    """Bytes a second of a rate such as 450GB/s, or 400Gb/s in bits. ValueError for what is no rate."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([kMGT]?)(B|b|bit)/s", rate)
    each = float(found[1]) * UNITS[found[2]] / (1 if found[3] == "B" else 8) if found else 0.0
    if not each:
        raise ValueError(f"a rate above zero such as 450GB/s, or in bits 400Gb/s, got {rate!r}")
    return each


def bandwidth(context: click.Context, param: click.Parameter, value: str) -> float:
    """--link in bytes a second."""
    try:
        return bytes_a_second(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, param) from error


LINK = click.option(
    "--link",
    metavar="RATE",
    callback=bandwidth,
    default=DEFAULT_LINK,
    show_default=True,
    help="The rate at which a rank sends, and at the same time receives: 450GB/s, NVLink of an H100; a network's 400Gb/s.",
)
LAYOUT = click.option(
    "--layout",
    type=click.Choice(LAYOUTS),
    default=LAYOUTS[0],
    show_default=True,
    help="The positions of a rank: two chunks, one from each end inwards, or one chunk.",
)
GATHER = click.option("--gather-kv", is_flag=True, help="Gather K and V of all ranks first, instead of passing them round.")
RANKS = click.option("--ranks", metavar="P", type=click.IntRange(1, MOST_RANKS), help="Split the sequence over this many devices.")


def split_options(command: Command) -> Command:
    """Add the options of a split sequence."""
    decorators: tuple[Callable[[Command], Command], ...] = (LINK, LAYOUT, GATHER)
    for option in reversed(decorators):
        command = option(command)
    return command
