"""`cupyflash verify`: theory, replay and execution of one problem, and the numbers."""

from __future__ import annotations

from typing import Any

import click

from cupyflash.sim.cli.help import command
from cupyflash.sim.cli.options import AS_JSON, MAX_SECONDS, SEED, examples, from_0, problem_options

# A cache that is executed in a few seconds
SMALL = {"seqlen_k": 192, "head_dim": 64, "batch": 2, "heads": 4, "kv_heads": 2}

EXAMPLES = examples(
    "cupyflash verify --causal",
    "cupyflash verify --algorithm fa1 --sram 16KB --seqlen 128 --lse",
    "cupyflash verify --backward --seqlen 64 --head-dim 32",
    "cupyflash verify --decode --cache-seqlens 130,47 --page-size 16",
    "cupyflash verify --score 's + near[h, q - k]' --capture near=float16",
    "cupyflash verify --mask-function 'id[q] == id[k]' --capture id=int32",
    "cupyflash verify --dropout 0.1 --backward --seqlen 64",
)


@command(epilog=EXAMPLES)
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
