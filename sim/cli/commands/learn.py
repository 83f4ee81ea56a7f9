"""`cupyflash learn`: an explanation of FlashAttention as a page whose pictures can be moved."""

from __future__ import annotations

from typing import Any

import click

from cupyflash.sim.cli.help import command
from cupyflash.sim.cli.options import AS_JSON, NewFile, examples

EXAMPLES = examples("cupyflash learn --html out.html", "cupyflash learn --html out.html --language zh", "cupyflash learn --json")


@command(epilog=EXAMPLES)
@click.option("--html", metavar="FILE", type=NewFile((".html", ".htm")), help="Write the page there.")
@click.option("--language", type=click.Choice(("en", "zh")), help="Its language at first.  [default: the browser's]")
@AS_JSON
def learn(**given: Any) -> None:
    """Write a page that explains FlashAttention.

    One file, which needs no network: drag the size of the SRAM and watch the bytes, step through online softmax, exchange
    the loops. Its numbers are those of `predict`, from the same closed forms; --json has those that it begins with.
    """
    from cupyflash.sim.cli.learn import learn as work

    work(**given)
