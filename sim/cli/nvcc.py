"""`cupyflash nvcc`: the CUDA compiler, with the flags that make a program run under `cupyflash run`."""

from __future__ import annotations

import os

import click

from cupyflash.sim.cli.options import examples

EXAMPLES = examples("cupyflash nvcc -o program main.cu", "cupyflash nvcc -arch=sm_90 -c kernels.cu -o kernels.o")


@click.command(epilog=EXAMPLES, no_args_is_help=True, add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.help_option("--help")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="ARGUMENT...")
def nvcc(arguments: tuple[str, ...]) -> None:
    """Compile a program for `cupyflash run`.

    The arguments go to nvcc, and behind them its flags `-cudart shared -no-compress -lineinfo`: the program loads the CUDA
    runtime as a library, in whose place the simulator is, its PTX can be read, and findings have lines of the source. It takes
    PTX: an -arch=sm_XX brings it, a -gencode with code=sm_XX only does not. In a build: make NVCC='cupyflash nvcc'.
    """
    from cupyflash.sim.program import build

    try:
        program = build.nvcc()
    except build.BuildError as error:
        raise click.UsageError(str(error)) from error
    os.execv(program, [program, *arguments, *build.NVCC_FLAGS, *build.linking(program, arguments)])
