"""`cupyflash sweep`: traffic along one axis, as a table, CSV, JSON or a picture."""

from __future__ import annotations

from typing import Any

import click

from cupyflash.sim.cli.commands.ranks import split_options
from cupyflash.sim.cli.help import command
from cupyflash.sim.cli.options import OUTPUT, NewFile, examples, formats, options_of, problem_options
from cupyflash.sim.names import AXES

# What --over ranks is about where no sizes are given.
LONG_SEQUENCE = {"seqlen": 131072, "head_dim": 128, "heads": 32, "kv_heads": 8, "causal": True}

EXAMPLES = examples(
    "cupyflash sweep --over sram",
    "cupyflash sweep --over seqlen --from 128 --to 16384 --causal --format csv",
    "cupyflash sweep --over sram --seqlen 8192 --plot theorem2.png",
    "cupyflash sweep --over seqlen --head-dim 128 --heads 16 --l2 --plot l2.png",
    "cupyflash sweep --over cache --batch 4 --page-size 16 --device H100-SXM",
    "cupyflash sweep --over ranks --device H100-SXM --plot ranks.png",
)


def poses(context: click.Context, param: click.Parameter, value: str) -> str:
    """Set the defaults of --over: a cache means decoding, with or without --decode; over ranks there is a long sequence."""
    own: dict[str, dict[str, Any]] = {"cache": {"decode": True}, "ranks": LONG_SEQUENCE}
    context.default_map = {**(context.default_map or {}), **own.get(value, {})}
    return value


def behind_l2(context: click.Context, param: click.Parameter, value: bool) -> bool:
    """Set the defaults of --l2: the model needs kernels, so they are those that run."""
    if value:
        context.default_map = {**(context.default_map or {}), "algorithm": "fa2", "tiling": "fitted"}
    return value


@command(epilog=EXAMPLES)
@click.option(
    "--l2",
    "with_l2",
    is_flag=True,
    is_eager=True,
    callback=behind_l2,
    help="Model the L2: bytes of DRAM beside the requested ones.  [default then: --algorithm fa2 --tiling fitted]",
)
@click.option(
    "--over",
    required=True,
    type=click.Choice((*AXES, "cache", "ranks")),
    is_eager=True,
    callback=poses,
    help="The axis to vary; block-cols: Bc, and with it M = 4 d Bc; cache: the keys of --decode; ranks: the devices that "
    f"share a sequence.  [default then: {options_of(LONG_SEQUENCE)}]",
)
@click.option("--from", "first", metavar="VALUE", help="The first value; sram takes sizes such as 8KB.")
@click.option("--to", "last", metavar="VALUE", help="The last value.")
@click.option("--points", metavar="N", type=click.IntRange(1, 100_000), help="The largest number of values.")
@click.option(
    "--log/--linear", default=None, help="Space the values evenly in the logarithm, or evenly.  [default: log, head-dim: linear]"
)
@problem_options(seqlen=4096, head_dim=64, algorithm="fa1", tiling="paper", decode={})
@split_options
@formats("table", "csv", "json")
@OUTPUT
@click.option(
    "--plot",
    metavar="FILE",
    type=NewFile((".png", ".svg", ".pdf")),
    help="Also draw a picture: a .png (added to a name without an ending), .svg or .pdf.",
)
def sweep(**given: Any) -> None:
    """Count HBM bytes along one axis.

    By the closed forms, beside standard attention and N^2 d^2 / M. Without --algorithm and --tiling, the algorithm is
    FlashAttention and the tiling the paper's own, the subjects of Theorem 2.

    With --l2, the bytes that a model of the device's L2 passes on to DRAM, for the kernels that run.

    Over cache, `attention_decode`: bytes, splits, thread blocks and partial results by the keys of a full cache, beside
    FlashAttention-2's bytes.

    Over ranks, `cupyflash.distributed`: bytes on the link and in HBM of the busiest rank, its steps' time against their transfers',
    memory and the share of the ideal, for a ring and for gathered keys.
    """
    from cupyflash.sim.cli.sweep import sweep as work

    work(**given)
