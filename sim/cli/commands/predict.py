"""`cupyflash predict`: the closed form, and the schedule replayed, beside the other algorithms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cupyflash.sim.cli.commands.ranks import RANKS, split_options
from cupyflash.sim.cli.help import command
from cupyflash.sim.cli.options import AS_JSON, Command, NewFile, examples, problem_options

EXAMPLES = examples(
    "cupyflash predict --seqlen 4k --head-dim 64",
    "cupyflash predict --seqlen 8192 --head-dim 128 --heads 16 --causal",
    "cupyflash predict --seqlen 4096 --head-dim 64 --algorithm fa1 --sram 8KB",
    "cupyflash predict --seqlen 4096 --head-dim 64 --backward --json",
    "cupyflash predict --seqlen 4096 --head-dim 64 --mask-function 'k < q + 9'",
    "cupyflash predict --seqlen 16384 --head-dim 128 --heads 16 --l2",
    "cupyflash predict --decode --seqlen-k 4096 --page-size 16 --append 1",
    "cupyflash predict --ranks 8 --link 300GB/s --seqlen 65536 --head-dim 128",
)


L2 = click.option(
    "--l2", "with_l2", is_flag=True, help="Model the L2: bytes of DRAM beside the requested ones, hit rates, orders of the grid."
)


def time_options(command: Command) -> Command:
    """--time, --roofline and --results."""
    drawn = "Draw the device's roofs and this problem below them: a .png, .svg or .pdf."
    file = click.option("--roofline", metavar="FILE", type=NewFile((".png", ".svg", ".pdf")), help=drawn)
    told = "Predict the time, by the clock that runs the machine code (some seconds), beside measured ones."
    timed = click.option("--time", "with_time", is_flag=True, help=told)
    folder = click.option(
        "--results",
        metavar="FOLDER",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="The folder of benchmark results that --time shows beside the model.  [default: benchmarks/results of a checkout]",
    )
    return timed(file(folder(command)))


@command(epilog=EXAMPLES)
@problem_options(seqlen=4096, head_dim=64, backward=True, decode={})
@L2
@time_options
@RANKS
@split_options
@AS_JSON
def predict(**given: Any) -> None:
    """Predict HBM reads and writes.

    The bytes of each tensor by the closed form, beside a replay of the schedule on an SRAM of M bytes; then FlashAttention-3 (on a
    Hopper), FlashAttention-2, FlashAttention (the paper's, the subject of Theorem 2) and standard attention side by side.

    With --decode, `attention_decode`: how often K and V are read, the bytes of partial results and pages, and FlashAttention-2's
    bytes instead.

    With --l2, by a model of the device's L2: the bytes from and to DRAM, and the best order of FlashAttention-2's grid. With
    --time, by the clock that runs the machine code (some seconds): the time, what binds, the known error, and benchmark
    measurements; without the extra `clock`, by the planner's formulas.

    With --ranks, `cupyflash.distributed`: bytes on the link and in HBM by rank, the time of steps against that of transfers, the
    length from which transfers are hidden, memory, and whether passing K and V round or gathering them is better.
    """
    from cupyflash.sim.cli.predict import predict as work

    work(**given)
