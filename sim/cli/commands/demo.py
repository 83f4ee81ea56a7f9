"""`cupyflash demo`: the main job end to end, forward and backward."""

from __future__ import annotations

from typing import Any

import click

from cupyflash.sim.cli.help import command
from cupyflash.sim.cli.options import AS_JSON, DEVICE, MAX_SECONDS, SRAM, Count, examples
from cupyflash.sim.names import NAMES

EXAMPLES = examples(
    "cupyflash demo",
    "cupyflash demo --seqlen 200 --heads 2 --device T4 --sram 16KB",
    "cupyflash demo --algorithm fa3 --device H100-SXM",
)


FLASH = tuple(name for name in NAMES if name != "standard")


@command(epilog=EXAMPLES)
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
