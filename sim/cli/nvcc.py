"""`cupyflash nvcc`: the CUDA compiler, with the flags that make a program run under `cupyflash run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click


def nvcc(arguments: tuple[str, ...], as_json: bool) -> None:
    """Compile a program for `cupyflash run`."""
    from cupyflash.sim.program import build

    try:
        program = build.nvcc()
    except build.BuildError as error:
        raise click.UsageError(str(error)) from error
    command = [program, *arguments, *build.NVCC_FLAGS, *build.linking(program, arguments)]
    if not as_json:
        os.execv(program, command)
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    click.echo(json.dumps({"command": command, "exit_status": ended.returncode, "output": ended.stdout}, indent=2))
    sys.exit(ended.returncode)
