"""`cupyflash paper`: the papers' own figures from our counts, beside the papers' statements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cupyflash.sim.cli.help import command
from cupyflash.sim.cli.options import OUTPUT, examples, formats
from cupyflash.sim.names import FIGURES

EXAMPLES = examples("cupyflash paper", "cupyflash paper training block_size", "cupyflash paper --plot .")


@command(epilog=EXAMPLES)
@click.argument("names", metavar="[FIGURE]...", type=click.Choice(FIGURES), nargs=-1)
@formats("text", "markdown", "json")
@OUTPUT
@click.option(
    "--plot",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Also draw each figure, as paper_FIGURE.png in this folder.",
)
def paper(**given: Any) -> None:
    """Show the papers' figures anew.

    Each is a table of our counts, with the paper's statement and an explanation of the difference.

    FlashAttention's Figure 2 (left: training, middle: block_size, right: block_sparse) and its Theorem 2 (sram), the passes of
    online softmax (softmax), and FlashAttention-2's operations besides the products (operations). Without a name, all of them.
    """
    from cupyflash.sim.cli.paper import paper as work

    work(**given)
