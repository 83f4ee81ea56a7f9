"""`cupyflash profile`: any CUDA kernel on the PTX machine, with the report that a profiler's first page would have."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from click.core import ParameterSource

from cupyflash.device import Device
from cupyflash.sim import files
from cupyflash.sim.cli.options import DEVICE, SEED, NewFile, examples, from_0, gathered, timeline_block
from cupyflash.sim.cli.reporting import FindingsReport, findings_report, watched
from cupyflash.sim.cli.show import piped, width
from cupyflash.sim.formats import CheckedKernels
from cupyflash.sim.ptx import PtxError, Suppression, UnsupportedPTX

EXAMPLES = examples(
    "cupyflash profile k.cu --grid 4 --block 128 --args '[{\"shape\": [512]}, 512]'",
    "cupyflash profile k.cu --grid 8,8 --block 32 --args spec.json --arch sm_90",
    "cupyflash profile k.ptx --kernel k --grid 1 --block 32 --args spec.json",
    "cupyflash profile k.cu --grid 8 --block 32 --args spec.json --html out.html",
    "cupyflash profile k.cu --grid 8 --block 32 --args spec.json --l2 --device T4",
)


def extent(context: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """X, X,Y or X,Y,Z."""
    if value is None:
        return None
    parts = value.split(",")
    if not 1 <= len(parts) <= 3 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{value!r} is not one to three positive whole numbers; 4 or 16,8 would be", context, param)
    return tuple(int(part) for part in parts)


def targets(context: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    """NAME=FILE.npy, each."""
    out = {}
    for value in values:
        tensor, _, file = value.partition("=")
        if not tensor or Path(file).suffix != ".npy":
            raise click.BadParameter(f"{value!r} is not NAME=FILE.npy", context, param)
        out[tensor] = NewFile((".npy",)).convert(file, param, context)
    return out


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

    grid: tuple[int, ...]
    block: tuple[int, ...]
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
    """Behind the L2 of which device."""

    l2: bool
    device: Device


FILE = click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
KERNEL = click.option(
    "--kernel", metavar="NAME", help="The kernel's name, as in the source or in the PTX; not needed if there is only one."
)
GRID = click.option("--grid", callback=extent, metavar="X[,Y,Z]", help="Blocks.  [required]")
BLOCK = click.option("--block", callback=extent, metavar="X[,Y,Z]", help="Threads of a block.  [required]")
ARGS = click.option(
    "--args",
    "spec",
    metavar="SPEC.json",
    help="The arguments: a JSON file, or JSON itself (docs/profile.md). Without it a template to fill in is printed.",
)
DEFINES = click.option("-D", "--define", "defines", multiple=True, metavar="NAME[=VALUE]", help="A macro; may be repeated.")
INCLUDES = click.option("-I", "--include", "includes", multiple=True, type=click.Path(path_type=Path), help="A folder of headers.")
SHARED = from_0("--shared-bytes", "Dynamic shared memory of a block.")


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


@click.command(epilog=EXAMPLES)
@FILE
@KERNEL
@GRID
@BLOCK
@click.option("--cluster", callback=extent, metavar="X[,Y,Z]", help="Blocks of a cluster.")
@ARGS
@click.option("--arch", default="compute_80", show_default=True, help="The architecture to compile for: compute_90, sm_90 or 9.0.")
@DEFINES
@INCLUDES
@SHARED
@SEED
@click.option("--max-instructions", type=click.IntRange(1), help="End a launch that has run so many, of all warps together.")
@click.option(
    "--stall-seconds",
    type=click.FloatRange(0, min_open=True),
    help="End a launch whose loops come no nearer to their ends for this many seconds of processor time (20 by default).",
)
@findings_report
@click.option("--top", default=10, show_default=True, type=click.IntRange(1), help="The number of lines in a table.")
@click.option(
    "--save",
    "saves",
    multiple=True,
    callback=targets,
    metavar="NAME=FILE.npy",
    help="Write an array to a file after the run; may be repeated.",
)
@click.option("--l2", is_flag=True, help="Model the L2: the bytes that reach DRAM, from the exact lines that the kernel requests.")
@DEVICE
@click.option("--html", metavar="FILE", type=NewFile((".html", ".htm")), help="Write it as one page, which needs no network.")
@timeline_block()
@watched(lambda given: [given["file"], *given["includes"], *[Path(given["spec"])] * str(given["spec"]).endswith(".json")])
@gathered(source=Source, launch=LaunchOptions, report=ProfileReport, behind=L2Options, told=FindingsReport)
def profile(source: Source, launch: LaunchOptions, report: ProfileReport, behind: L2Options, told: FindingsReport) -> None:
    """Execute and profile any kernel.

    FILE is CUDA C, or PTX if its name ends in .ptx; its kernel runs on the PTX machine.

    The report has bytes by tensor, coalescing, bank conflicts, instruction mix, divergence, tensor-core work, findings, and the
    most expensive lines of the source. All counts are simulated: of PTX instructions, not of machine code. No GPU is needed. --html
    writes the same as a page, with a heat map of the source and the banks of shared memory. --l2 shows the bytes that reach DRAM on
    --device.

    --format writes the findings as other tools read them (lines as a compiler's, GitHub's annotations, JUnit, SARIF).

    Exit status 1 if the machine finds a fault in the kernel, an error or a warning (or as --fail-on says), after the report; 2,
    with one line, for wrong input.
    """
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
    click.echo(f"executing {source.file} on the PTX machine ...", err=True)
    try:
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
