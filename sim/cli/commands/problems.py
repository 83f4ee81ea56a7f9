"""The commands about one attention problem, declared: `predict`, `verify`, `trace`, `sweep`, `explain`, `inspect`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cupyflash.basics import LAYOUTS, MOST_RANKS, Report
from cupyflash.sim.cli.help import algorithm_names, command
from cupyflash.sim.cli.options import (
    AS_JSON,
    HTML,
    MAX_SECONDS,
    OUTPUT,
    SEED,
    Command,
    NewFile,
    examples,
    formats,
    from_0,
    options_of,
    problem_options,
    timeline_block,
)
from cupyflash.sim.names import AXES

# -- several devices ------------------------------------------------------------

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


# -- predict ------------------------------------------------------------

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


@command(
    epilog=examples(
        "cupyflash predict --seqlen 4k --head-dim 64",
        "cupyflash predict --seqlen 8192 --head-dim 128 --heads 16 --causal",
        "cupyflash predict --seqlen 4096 --head-dim 64 --algorithm fa1 --sram 8KB",
        "cupyflash predict --seqlen 4096 --head-dim 64 --backward --json",
        "cupyflash predict --seqlen 4096 --head-dim 64 --mask-function 'k < q + 9'",
        "cupyflash predict --seqlen 16384 --head-dim 128 --heads 16 --l2",
        "cupyflash predict --decode --seqlen-k 4096 --page-size 16 --append 1",
        "cupyflash predict --ranks 8 --link 300GB/s --seqlen 65536 --head-dim 128",
    )
)
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


# -- verify ------------------------------------------------------------

SMALL = {"seqlen_k": 192, "head_dim": 64, "batch": 2, "heads": 4, "kv_heads": 2}
"""A cache that is executed in a few seconds."""


@command(
    epilog=examples(
        "cupyflash verify --causal",
        "cupyflash verify --algorithm fa1 --sram 16KB --seqlen 128 --lse",
        "cupyflash verify --backward --seqlen 64 --head-dim 32",
        "cupyflash verify --decode --cache-seqlens 130,47 --page-size 16",
        "cupyflash verify --score 's + near[h, q - k]' --capture near=float16",
        "cupyflash verify --mask-function 'id[q] == id[k]' --capture id=int32",
        "cupyflash verify --dropout 0.1 --backward --seqlen 64",
    )
)
@problem_options(seqlen=256, head_dim=64, backward=True, decode=SMALL)
@SEED
@from_0("--data-seed", "Draws q, k, v, what is captured and dropped.")
@click.option("--l2", is_flag=True, help="With a model of the L2: what reaches DRAM of what the kernels asked for, line by line.")
@MAX_SECONDS
@AS_JSON
def verify(**given: Any) -> None:
    """Execute the kernels, compare counts.

    Runs the real kernels on the simulated device and shows the bytes of theory, replay and execution side by side, and the numbers
    beside float64's.

    Exit status 1, with the difference per tensor, if the counts disagree, if a number is further from float64 than twice the same
    computation done plainly in the low precision, or if the machine finds a fault in a kernel.

    With --decode, `attention_decode`: pages are in random order, and afterwards the caches must be unchanged, to the bit, except
    for the new keys in their places.

    With --l2, the first execution's lines go through a model of the device's L2, beside the model from the schedule alone that
    `predict --l2` has.
    """
    from cupyflash.sim.cli.verify import verify as work

    work(**given)


# -- trace ------------------------------------------------------------

ASKED = "Algorithms to play side by side; fa2-backward plays gradients beside forwards.  [default: --algorithm; standard,fa1,fa2]"


@command(
    epilog=examples(
        "cupyflash trace --seqlen 128 --sram 16KB --causal --html out.html",
        "cupyflash trace --backward --sram 32KB --html backward.html",
        "cupyflash trace --device H100-SXM --seqlen 1k --algorithms fa3 --html h.html",
        "cupyflash trace --algorithms fa2,fa2-backward --sram 32KB --html both.html",
        "cupyflash trace --decode --page-size 16 --append 1 --html decode.html",
        "cupyflash trace --algorithms fa1 --sram 8KB --head-dim 32 --json",
    )
)
@problem_options(seqlen=128, head_dim=64, backward=True, decode={**SMALL, "num_splits": 2})
@click.option("--algorithms", metavar="NAME,NAME,...", shell_complete=algorithm_names, help=ASKED)
@HTML
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


# -- sweep ------------------------------------------------------------

# What --over ranks is about where no sizes are given.
LONG_SEQUENCE = {"seqlen": 131072, "head_dim": 128, "heads": 32, "kv_heads": 8, "causal": True}


def poses(context: click.Context, param: click.Parameter, value: str) -> str:
    """Set the defaults of --over: a cache means decoding, with or without --decode; over ranks there is a long sequence."""
    own: dict[str, Report] = {"cache": {"decode": True}, "ranks": LONG_SEQUENCE}
    context.default_map = {**(context.default_map or {}), **own.get(value, {})}
    return value


def behind_l2(context: click.Context, param: click.Parameter, value: bool) -> bool:
    """Set the defaults of --l2: the model needs kernels, so they are those that run."""
    if value:
        context.default_map = {**(context.default_map or {}), "algorithm": "fa2", "tiling": "fitted"}
    return value


@command(
    epilog=examples(
        "cupyflash sweep --over sram",
        "cupyflash sweep --over seqlen --from 128 --to 16384 --causal --format csv",
        "cupyflash sweep --over sram --seqlen 8192 --plot theorem2.png",
        "cupyflash sweep --over seqlen --head-dim 128 --heads 16 --l2 --plot l2.png",
        "cupyflash sweep --over cache --batch 4 --page-size 16 --device H100-SXM",
        "cupyflash sweep --over ranks --device H100-SXM --plot ranks.png",
    )
)
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


# -- explain ------------------------------------------------------------


@command(
    epilog=examples(
        "cupyflash explain --head-dim 128 --heads 16 --device H100-SXM",
        "cupyflash explain --seqlen 512 --dtype float32 --all",
        "cupyflash explain --tiling 64x32",
        "cupyflash explain --backward --head-dim 128 --heads 16",
        "cupyflash explain --backward --head-dim 128 --device H100-SXM --time",
        "cupyflash explain --decode --batch 4 --seqlen-k 32768 --device H100-SXM",
    )
)
@problem_options(seqlen=4096, head_dim=64, algorithms=("auto", "fa2", "fa3", "decode"), backward=True, decode={})
@click.option(
    "--all", "everything", is_flag=True, help="List every runner-up and every rejected tile, instead of a few and a count."
)
@click.option(
    "--time",
    "with_time",
    is_flag=True,
    help="Time the kernels, by the clock that runs the machine code (some seconds), and tell at which lines warps wait.",
)
@AS_JSON
def explain(**given: Any) -> None:
    """Tell which tile is run, and why.

    `attention` runs FlashAttention-2 by default; on a Hopper FlashAttention-3, if it accepts the call and the model predicts it to
    be faster. The output says which, and why. Neither's tile is the paper's Bc = ceil(M / 4d): both are shown. Every configuration
    of the kernel is a candidate: it is rejected with a reason, or a model of one multiprocessor gives the clocks of its tiles. The
    times are the model's, none measured. Needs neither compiler nor GPU; --time needs the extra `clock`.

    With --backward, the gradients' kernels: blocks in their order of preference, and the cost of dQ by atomics or deterministic.

    With --decode, `attention_decode`: the number of splits of the keys, and the bytes in flight.
    """
    from cupyflash.sim.cli.explain import explain as work

    work(**given)


# -- inspect ------------------------------------------------------------


@command(
    epilog=examples(
        "cupyflash inspect --head-dim 128 --device H100-SXM",
        "cupyflash inspect --head-dim 64 --algorithm fa1 --tiling 64x128",
        "cupyflash inspect --head-dim 64 --backward --deterministic",
    )
)
@problem_options(seqlen=1024, head_dim=64, backward=True)
@AS_JSON
def inspect(**given: Any) -> None:
    """Show registers, spills, occupancy.

    Compiles the kernels to a device's machine code and prints their needs on a multiprocessor: registers, stack, spills, shared
    memory, and the occupancy that these allow.

    Needs the compiler (NVRTC), no GPU. Figures are a thread's (registers, stack, spills) or a block's (shared memory).
    """
    from cupyflash.sim.cli.inspect import inspect as work

    work(**given)
