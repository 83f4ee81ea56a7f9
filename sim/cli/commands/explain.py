"""`cupyflash explain`: which kernel and which tile run a problem by default, and why not another."""

from __future__ import annotations

from typing import Any

import click

from cupyflash.sim.cli.help import command
from cupyflash.sim.cli.options import AS_JSON, examples, problem_options

EXAMPLES = examples(
    "cupyflash explain --head-dim 128 --heads 16 --device H100-SXM",
    "cupyflash explain --seqlen 512 --dtype float32 --all",
    "cupyflash explain --tiling 64x32",
    "cupyflash explain --backward --head-dim 128 --heads 16",
    "cupyflash explain --decode --batch 4 --seqlen-k 32768 --device H100-SXM",
)


@command(epilog=EXAMPLES)
@problem_options(seqlen=4096, head_dim=64, algorithms=("auto", "fa2", "fa3", "decode"), backward=True, decode={})
@click.option(
    "--all", "everything", is_flag=True, help="List every runner-up and every rejected tile, instead of a few and a count."
)
@AS_JSON
def explain(**given: Any) -> None:
    """Tell which tile is run, and why.

    `attention` runs FlashAttention-2 by default; on a Hopper FlashAttention-3, if it accepts the call and the model predicts it to
    be faster. The output says which, and why. Neither's tile is the paper's Bc = ceil(M / 4d): both are shown. Every configuration
    of the kernel is a candidate: it is rejected with a reason, or a model of one multiprocessor gives the clocks of its tiles. The
    times are the model's, none measured. Needs neither compiler nor GPU.

    With --backward, the gradients' kernels: blocks in their order of preference, and the cost of dQ by atomics or deterministic.

    With --decode, `attention_decode`: the number of splits of the keys, and the bytes in flight.
    """
    from cupyflash.sim.cli.explain import explain as work

    work(**given)
