"""The commands for a first tour, declared: `demo`, `learn`, `paper`, `devices`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cupyflash.sim.cli.help import command
from cupyflash.sim.cli.options import AS_JSON, DEVICE, HTML, MAX_SECONDS, OUTPUT, SRAM, Count, examples, formats
from cupyflash.sim.names import FIGURES, NAMES

# -- demo ------------------------------------------------------------

FLASH = tuple(name for name in NAMES if name != "standard")


@command(
    epilog=examples(
        "cupyflash demo",
        "cupyflash demo --seqlen 200 --heads 2 --device T4 --sram 16KB",
        "cupyflash demo --algorithm fa3 --device H100-SXM",
    )
)
@click.option("--seqlen", metavar="N", default=512, show_default=True, type=Count(1), help="Queries and keys a head.")
@click.option("--heads", metavar="N", default=4, show_default=True, type=click.IntRange(1), help="Heads of Q, K and V.")
@click.option(
    "--algorithm",
    default="fa1",
    show_default=True,
    type=click.Choice(FLASH),
    help="The FlashAttention to show beside standard attention; fa3 needs a Hopper.",
)
@DEVICE
@SRAM
@MAX_SECONDS
@AS_JSON
def demo(**given: Any) -> None:
    """Run the kernels, count their bytes.

    A causal problem (d 64, float16), forward and backward, on a simulated device: standard attention and FlashAttention side by
    side, with the counts of theory, replay and execution. Without --algorithm this is the paper's FlashAttention, the subject of
    Theorem 2; `attention` runs FlashAttention-2 by default, on a Hopper FlashAttention-3. If there is a GPU, the forward runs
    there, too.
    """
    from cupyflash.sim.cli.demo import demo as work

    work(**given)


# -- learn ------------------------------------------------------------


@command(
    epilog=examples("cupyflash learn --html out.html", "cupyflash learn --html out.html --language zh", "cupyflash learn --json")
)
@HTML
@click.option("--language", type=click.Choice(("en", "zh")), help="Its language at first.  [default: the browser's]")
@AS_JSON
def learn(**given: Any) -> None:
    """Write a page that explains FlashAttention.

    One file, which needs no network: drag the size of the SRAM and watch the bytes, step through online softmax, exchange
    the loops. Its numbers are those of `predict`, from the same closed forms; --json has those that it begins with.
    """
    from cupyflash.sim.cli.learn import learn as work

    work(**given)


# -- paper ------------------------------------------------------------


@command(epilog=examples("cupyflash paper", "cupyflash paper training block_size", "cupyflash paper --plot ."))
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


# -- devices ------------------------------------------------------------


@command(epilog=examples("cupyflash devices", "cupyflash devices --json", "CUPYFLASH_DEVICE=H100-SXM cupyflash devices"))
@AS_JSON
def devices(**given: Any) -> None:
    """List devices, and the GPU at hand.

    The catalogue has the figures that limit a kernel on a device, and the peaks of its data sheet. NumPy arrays run on a simulated
    device: CUPYFLASH_DEVICE names it, also for the --device of commands.
    """
    from cupyflash.sim.cli.devices import devices as work

    work(**given)
