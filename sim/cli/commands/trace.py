"""`cupyflash trace`: the tiles that the kernels move, one after the other, as a page that plays them."""

from __future__ import annotations

from typing import Any

import click

from cupyflash.sim.cli.help import algorithm_names, command
from cupyflash.sim.cli.options import AS_JSON, MAX_SECONDS, NewFile, examples, from_0, problem_options, timeline_block

# A cache of which a few thread blocks have all, in more than one split
SMALL = {"seqlen_k": 192, "head_dim": 64, "batch": 2, "heads": 4, "kv_heads": 2, "num_splits": 2}
ASKED = "Algorithms to play side by side; fa2-backward plays gradients beside forwards.  [default: --algorithm; standard,fa1,fa2]"

EXAMPLES = examples(
    "cupyflash trace --seqlen 128 --sram 16KB --causal --html out.html",
    "cupyflash trace --backward --sram 32KB --html backward.html",
    "cupyflash trace --device H100-SXM --seqlen 1k --algorithms fa3 --html h.html",
    "cupyflash trace --algorithms fa2,fa2-backward --sram 32KB --html both.html",
    "cupyflash trace --decode --page-size 16 --append 1 --html decode.html",
    "cupyflash trace --algorithms fa1 --sram 8KB --head-dim 32 --json",
)


@command(epilog=EXAMPLES)
@problem_options(seqlen=128, head_dim=64, backward=True, decode=SMALL)
@click.option("--algorithms", metavar="NAME,NAME,...", shell_complete=algorithm_names, help=ASKED)
@click.option("--html", metavar="FILE", type=NewFile((".html", ".htm")), help="Write the page there.")
@timeline_block("of each launch ")
@from_0("--data-seed", "Draws q, k and v.")
@MAX_SECONDS
@AS_JSON
def trace(**given: Any) -> None:
    """Play the tiles that kernels move.

    Runs the kernels on the simulated device, records each access to a tensor, and joins them to moves of tiles between HBM and the
    chip. --html writes one page, which needs no network. It plays the algorithms side by side by one clock of bytes, and has a
    timeline of one thread block of each launch. Without it, the moves are summed up; --json has all of it.

    With --decode, `attention_decode`: pages are in random order, new keys are appended, splits are merged. Other algorithms play
    `attention` with the same cache beside it.

    Exit status 1 if the moves do not sum to the theory's bytes, or the machine finds a fault.
    """
    from cupyflash.sim.cli.trace import trace as work

    work(**given)
