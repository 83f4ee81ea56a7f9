"""`cupyflash check`: a generated kernel judged by a reference, without a GPU."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from cupyflash.basics import Report
from cupyflash.sim import files
from cupyflash.sim.cli import terminal
from cupyflash.sim.cli.group import Found
from cupyflash.sim.cli.options import gathered
from cupyflash.sim.ptx import simulated_cupy, simulation


@dataclass(frozen=True)
class Judged:
    """The function, its reference and what makes their inputs, each as FILE.py::NAME."""

    function: str
    reference: str
    inputs: str | None


@dataclass(frozen=True)
class DrawOptions:
    """Options of the draws, by the names of `judging.check`, and the architecture to compile for."""

    arch: str
    seed: int
    strict: bool
    only: int | None
    max_seconds: float


@gathered(judged=Judged, how=DrawOptions)
def check(judged: Judged, how: DrawOptions, as_json: bool, output: Path | None) -> None:
    """Judge a function that launches kernels."""
    from cupyflash.sim.judging import check as judge

    modules: dict[Path, ModuleType] = {}
    with simulated_cupy(), simulation(arch=how.arch):
        ours, theirs = found(judged.function, modules, "FUNCTION"), found(judged.reference, modules, "--against")
        maker = found(judged.inputs, modules, "--inputs") if judged.inputs else None
        for module in modules.values() if maker is None else ():
            maker = maker or getattr(module, "inputs", None)
        options: Report = {"seed": how.seed, "seconds": how.max_seconds, "strict": how.strict, "only": how.only}
        verdict = judge(ours, theirs, maker, **options, names=(judged.function, judged.reference))
    text = json.dumps(verdict.to_dict(), indent=2)
    if output is not None:
        files.write(output, text + "\n")
    if as_json:
        click.echo(text)
    else:
        terminal.show_report(verdict.text() + "\n")
    if verdict.verdict != "right":
        raise Found(f"the verdict on {judged.function} is {verdict.verdict}")


def found(text: str, modules: dict[Path, ModuleType], where: str) -> Callable[..., Any]:
    """Returns the function that FILE.py::NAME names. Raises BadParameter if there is none."""
    from cupyflash.sim.judging.running import load

    file, _, name = text.partition("::")
    path = Path(file)
    if not name or path.suffix != ".py":
        raise click.BadParameter(f"{text!r} is not FILE.py::NAME", param_hint=where)
    if not path.is_file():
        raise click.BadParameter(f"{file}: no such file", param_hint=where)
    if path.resolve() not in modules:
        try:
            modules[path.resolve()] = load(path)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            raise click.BadParameter(f"{file} raises {type(error).__name__} at {place}: {error}", param_hint=where) from error
    function = getattr(modules[path.resolve()], name, None)
    if not callable(function):
        raise click.BadParameter(f"{file} has no function {name}", param_hint=where)
    return function  # type: ignore[no-any-return]
