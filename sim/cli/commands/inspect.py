"""`cupyflash inspect`: the kernels' needs on a multiprocessor."""

from __future__ import annotations

from typing import Any

from cupyflash.sim.cli.help import command
from cupyflash.sim.cli.options import AS_JSON, examples, problem_options

EXAMPLES = examples(
    "cupyflash inspect --head-dim 128 --device H100-SXM",
    "cupyflash inspect --head-dim 64 --algorithm fa1 --tiling 64x128",
    "cupyflash inspect --head-dim 64 --backward --deterministic",
)


@command(epilog=EXAMPLES)
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
