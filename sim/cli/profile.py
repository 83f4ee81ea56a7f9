"""`cupyflash profile`: any CUDA kernel on the PTX machine, with the report that a profiler's first page would have."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from click.core import ParameterSource

from cupyflash.basics import Shape
from cupyflash.device import Device
from cupyflash.sim import files
from cupyflash.sim.cli.options import gathered
from cupyflash.sim.cli.reporting import FindingsReport
from cupyflash.sim.cli.show import piped, width
from cupyflash.sim.cli.terminal import LONG_SECONDS, progress
from cupyflash.sim.formats import CheckedKernels
from cupyflash.sim.ptx import PtxError, Suppression, UnsupportedPTX


@dataclass(frozen=True)
class Source:
    """A kernel's file, the options of its compilation, and its arguments in JSON."""

    file: Path
    kernel: str | None
    spec: str | None
    arch: str
    defines: tuple[str, ...]
    includes: tuple[Path, ...]


@dataclass(frozen=True)
class LaunchOptions:
    """Options of the launch, by the names of `sim.profile`."""

    grid: Shape
    block: Shape
    shared_bytes: int
    seed: int | None
    cluster: tuple[int, ...] | None
    max_instructions: int | None
    stall_seconds: float | None
    suppressions: Path | tuple[Suppression, ...]


@dataclass(frozen=True)
class ProfileReport:
    """Options of the output."""

    top: int
    saves: dict[str, Path]
    html: Path | None
    timeline_block: int | None


@dataclass(frozen=True)
class L2Options:
    """The L2 that is modelled: of which device, if any."""

    l2: bool
    device: Device


def complete(spec: str | None, options: Mapping[str, object], template: Callable[[], str]) -> str:
    """Returns the arguments' JSON. UsageError where it or one of `options` is missing; then it prints the template of the
    arguments, if the kernel has any."""
    if spec is None:
        text = template()
        if text != "{}":
            click.echo(text)
            raise click.UsageError(
                "the arguments are missing: fill in what is printed and give it with --args, as a file or as text"
            )
    for name, value in options.items():
        if value is None:
            raise click.UsageError(f"Missing option '{name}'.")
    if spec is not None and not spec.strip():
        raise click.BadParameter("'' is neither a file nor JSON", param_hint="--args")
    return spec or "[]"


def preprocessed(defines: Sequence[str], includes: Sequence[Path]) -> list[str]:
    """The compiler's options for macros and folders of headers."""
    return [*(f"-D{name}" for name in defines), *(f"-I{path}" for path in includes)]


@gathered(source=Source, launch=LaunchOptions, report=ProfileReport, behind=L2Options, told=FindingsReport)
def profile(source: Source, launch: LaunchOptions, report: ProfileReport, behind: L2Options, told: FindingsReport) -> None:
    """Execute and profile any kernel."""
    from cupyflash.launch.nvrtc import architecture
    from cupyflash.sim.profiling import load
    from cupyflash.sim.profiling import profile as run
    from cupyflash.sim.profiling.arguments import read_arguments, template_text
    from cupyflash.sim.ptx.parameters import arrays_by_name
    from cupyflash.sim.ptx.text.syntax import find_kernel

    asked = click.get_current_context().get_parameter_source("device")
    if asked is ParameterSource.COMMANDLINE and not behind.l2:
        raise click.UsageError("--device chooses the L2 and needs --l2 (--arch is what to compile for)")
    options = [f"-arch={architecture(source.arch)}", *preprocessed(source.defines, source.includes)]

    def to_fill_in() -> str:
        try:
            module = load(source.file, options)
        except PtxError as error:
            raise click.UsageError(f"{source.file}: {first_reason(error)}") from error
        kernel = find_kernel(module.kernels, source.kernel)
        params = module.program.functions[kernel].params
        return template_text(module.cuda_of(kernel), kernel, params)

    shape = {"--grid": launch.grid, "--block": launch.block}
    arguments = read_arguments(complete(source.spec, shape, to_fill_in))
    arrays = arrays_by_name(arguments.values)
    for name in report.saves:
        if name not in arrays:
            raise ValueError(f"--save {name}: there is no such array among the arguments; there are {', '.join(arrays) or 'none'}")
    try:
        with progress() as steps:
            steps.begin(f"executing {source.file} on the PTX machine")
            found = run(
                source.file,
                source.kernel,
                **vars(launch),
                args=arguments.values,
                options=options,
                unwritten=arguments.unwritten,
                banks=report.html is not None,
                l2=behind.device if behind.l2 else None,
                timeline_block=0 if report.timeline_block is None and report.html is not None else report.timeline_block,
                on_long=lambda estimate: steps.expect(estimate.seconds),
                long_seconds=LONG_SECONDS,
            )
    except PtxError as error:
        raise click.UsageError(f"{source.file}: {first_reason(error)}") from error
    for name, path in report.saves.items():
        saved = io.BytesIO()
        np.save(saved, arrays[name])
        files.write(path, saved.getvalue())
    if report.html is not None:
        files.write(report.html, found.html())
        click.echo(f"wrote {report.html}", err=True)
    done = found.launch
    file = str(source.file) if source.file.suffix == ".ptx" else ""
    checked = CheckedKernels((found.kernel,), (*done.findings, *done.notes), done.suppressed, file)
    told.tell(checked, lambda: found.text(report.top, width(), piped()), found.to_dict, "the kernel")


def first_reason(error: PtxError) -> str:
    """The first thing that the machine cannot execute, in one line."""
    from cupyflash.sim.profiling.text import first_refusal

    return f"the machine does not execute {first_refusal(error.items)}" if isinstance(error, UnsupportedPTX) else str(error)
