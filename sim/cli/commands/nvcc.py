"""`cupyflash nvcc`: the CUDA compiler, with the flags that make a program run under `cupyflash run`."""

from __future__ import annotations

from typing import Any

import click

from cupyflash.sim.cli.help import command, completing
from cupyflash.sim.cli.options import examples

EXAMPLES = examples("cupyflash nvcc -o program main.cu", "cupyflash nvcc -arch=sm_90 -c kernels.cu -o kernels.o")


@command(epilog=EXAMPLES, no_args_is_help=True, add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.help_option("--help")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="ARGUMENT...", shell_complete=completing("file"))
@click.option("--json", "as_json", is_flag=True, help="Print the command, its exit status and its output as JSON.")
def nvcc(**given: Any) -> None:
    """Compile a program for `cupyflash run`.

    The arguments go to nvcc, and behind them its flags `-cudart shared -no-compress -lineinfo`: the program loads the CUDA
    runtime as a library, in whose place the simulator is, its PTX can be read, and findings have lines of the source. It takes
    PTX: an -arch=sm_XX brings it, a -gencode with code=sm_XX only does not. In a build: make NVCC='cupyflash nvcc'.
    """
    from cupyflash.sim.cli.nvcc import nvcc as work

    work(**given)
