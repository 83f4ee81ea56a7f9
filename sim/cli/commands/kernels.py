"""The commands that run CUDA kernels of any kind, declared: `profile`, `time`, `check`, `run`, `nvcc`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cupyflash.sim.cli.help import command, completing
from cupyflash.sim.cli.options import AS_JSON, DEVICE, SEED, NewFile, a_number, examples, from_0, timeline_block
from cupyflash.sim.cli.reporting import findings_report, watched

# -- profile ------------------------------------------------------------


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
    shell_complete=completing("file"),
    help="The arguments: a JSON file, or JSON itself (docs/profile.md). Without it a template to fill in is printed.",
)
DEFINES = click.option("-D", "--define", "defines", multiple=True, metavar="NAME[=VALUE]", help="A macro; may be repeated.")
INCLUDES = click.option(
    "-I",
    "--include",
    "includes",
    multiple=True,
    type=click.Path(path_type=Path),
    shell_complete=completing("dir"),
    help="A folder of headers.",
)
ARCH = click.option(
    "--arch", default="compute_80", show_default=True, help="The architecture to compile for: compute_90, sm_90 or 9.0."
)
SHARED = from_0("--shared-bytes", "Dynamic shared memory of a block.")


@command(
    epilog=examples(
        "cupyflash profile k.cu --grid 4 --block 128 --args '[{\"shape\": [512]}, 512]'",
        "cupyflash profile k.cu --grid 8,8 --block 32 --args spec.json --arch sm_90",
        "cupyflash profile k.ptx --kernel k --grid 1 --block 32 --args spec.json",
        "cupyflash profile k.cu --grid 8 --block 32 --args spec.json --html out.html",
        "cupyflash profile k.cu --grid 8 --block 32 --args spec.json --l2 --device T4",
    )
)
@FILE
@KERNEL
@GRID
@BLOCK
@click.option("--cluster", callback=extent, metavar="X[,Y,Z]", help="Blocks of a cluster.")
@ARGS
@ARCH
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
def profile(**given: Any) -> None:
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
    from cupyflash.sim.cli.profile import profile as work

    work(**given)


# -- time ------------------------------------------------------------


@command(
    epilog=examples(
        "cupyflash time k.cu --grid 4 --block 128 --args '[{\"shape\": [512]}, 512]'",
        "cupyflash time k.cu --grid 8 --block 32 --args a.json --json",
        "cupyflash time k.cu --grid 8 --block 32 --args a.json --against before.json",
        "cupyflash time k.cubin --grid 8 --block 32 --args a.json --lines 5",
    )
)
@FILE
@KERNEL
@GRID
@BLOCK
@ARGS
@DEFINES
@INCLUDES
@SHARED
@click.option(
    "--mhz", type=click.FloatRange(0, min_open=True), help="The most that the clock rate is; by default the device's boost clock."
)
@click.option("--cold", is_flag=True, help="The L2 was emptied before; else it has the arrays that fit into it.")
@DEVICE
@click.option("--lines", default=10, show_default=True, type=click.IntRange(1), help="The number of lines in a table.")
@click.option(
    "--against",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="RUN.json",
    help="An earlier run's --json: which lines cost more or less than there.",
)
@AS_JSON
def time(**given: Any) -> None:
    """Time a kernel on a device that is not there.

    FILE is CUDA C, PTX (.ptx, which needs ptxas) or machine code (.cubin). The machine code is executed for addresses and branches,
    and one multiprocessor is run clock by clock over it; a long loop is sampled. The result is a model's, never a measurement: the
    error that is known of kernels of its class stands beside it (docs/clock.md). Floating-point numbers are not computed: a branch
    on one is not taken. The lines of the source are those at which warps spend their time, with the reasons for which they wait.
    Needs NVIDIA's disassemblers (the extra `clock`).

    Exit status 2, with one line, for wrong input or a tool that is missing.
    """
    from cupyflash.sim.cli.time import time as work

    work(**given)


# -- check ------------------------------------------------------------


@command(
    epilog=examples(
        "cupyflash check kernel.py::f --against reference.py::g",
        "cupyflash check kernel.py::f --against reference.py::g --json",
        "cupyflash check kernel.py::f --against reference.py::g --only 7",
    )
)
@click.argument("function", metavar="FILE.py::NAME")
@click.option("--against", "reference", required=True, metavar="FILE.py::NAME", help="The reference, a function of NumPy arrays.")
@click.option(
    "--inputs",
    metavar="FILE.py::NAME",
    help="The function that makes the inputs; without it, `inputs` of either file if there is one, else the annotations.",
)
@ARCH
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Other inputs for each number.")
@click.option("--strict", is_flag=True, help="Conditions are faults.")
@click.option("--only", type=click.IntRange(0), metavar="DRAW", help="Try this draw alone, by the number that a report gives.")
@click.option(
    "--max-seconds",
    default=45.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    callback=a_number,
    help="Begin no further draw after so many seconds of processor time.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict with its evidence as JSON.")
@click.option("--output", type=NewFile((".json",)), metavar="FILE.json", help="Write that JSON to a file.")
def check(**given: Any) -> None:
    """Judge a function that launches kernels.

    The function takes NumPy arrays (PyTorch's tensors if it uses those) and launches kernels by the calls of CuPy, Triton or
    Numba: all run on the PTX machine, without a GPU. It is called with drawn inputs, and its results are compared with the
    reference in float64. Sizes, values, layouts of arrays and orders of warps are drawn; races, addresses out of bounds and
    unwritten memory are found; outputs arrive poisoned.

    Inputs are declared by annotations of either function:

    \b
      x: "float32[m, n]"             an array; sizes are names, numbers, 16*k, n+1
      x: "float32[m, n<=1024]"       a size with its largest value
      x: "float16|float32[...]"      of either type, of any axes
      i: "int32[n] in range(m)"      integers from 0 to below m
      p: "float32[n] in (0, 1)"      numbers from 0 to 1
      a: "float32"                   a NumPy scalar (float, int: Python's)
      n: "n"                         the size n
      y: "out float32[m]"            written by the function, unwritten before
      y: "inout float32[m]"          read and changed

    Or a function inputs(draw) returns them: draw.size("n", multiple=16), draw.array((m, n), "float32", low, high),
    draw.number("float32"), draw.choice([...]), draw.out((m,), "float32"), draw.inout((m,), "float32"). Results are what a
    function returns, else its out and inout arrays.

    Faults make the verdict "wrong". Conditions do not: arrays that are not contiguous, empty or broadcast ones, bits that depend
    on the order, numbers far from 1, warnings. Exit status 1 if the verdict is not "right"; 2, with one line, for wrong input.
    """
    from cupyflash.sim.cli.check import check as work

    work(**given)


# -- run ------------------------------------------------------------

SOURCES = (".cu", ".cpp", ".cc", ".c", ".cxx")


def divided(files: tuple[str, ...]) -> tuple[list[Path], list[str]]:
    """Returns the sources or the binary, and the program's arguments."""
    paths = [Path(files[0])]
    rest = list(files[1:])
    while rest and paths[0].suffix in SOURCES and Path(rest[0]).suffix in SOURCES:
        paths.append(Path(rest.pop(0)))
    for path in paths:
        if not path.is_file():
            raise click.UsageError(f"{path}: there is no such file")
    return paths, rest


@command(
    epilog=examples(
        "cupyflash run program.cu",
        "cupyflash run main.cu kernels.cu -I include -- --size 1024",
        "cupyflash run ./program",
    ),
    context_settings={"ignore_unknown_options": True},
)
@click.argument("files", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=completing("file"))
@DEFINES
@INCLUDES
@click.option("--flag", "flags", multiple=True, metavar="FLAG", help="Another flag for nvcc; may be repeated.")
@DEVICE
@SEED
@click.option(
    "--max-seconds",
    type=click.FloatRange(0, min_open=True),
    help="End the program when its kernels have taken this processor time.",
)
@click.option(
    "--clock/--no-clock",
    default=True,
    show_default=True,
    help="Events tell the time that the clock predicts for the device, where it knows the kernels (docs/clock.md).",
)
@findings_report
@watched(lambda given: [*divided(given["files"])[0], *given["includes"]])
def run(**given: Any) -> None:
    """Run a whole CUDA program without a GPU, and check its kernels.

    FILES are the program's sources (CUDA C++, compiled by nvcc), or one binary that loads the CUDA runtime library (nvcc
    -cudart shared -no-compress). Arguments of the program stand behind `--`.

    The program runs as it is; its calls of the CUDA runtime are answered by the simulated device, and its kernels run on the PTX
    machine, which checks every access. Times of events are a model's where it knows the kernels, else the simulation's; the
    report says which. It goes to stderr, and before it an estimate of each launch that takes 10 s or more.

    Exit status 1 if the machine finds a fault in a kernel; else the program's own.
    """
    from cupyflash.sim.cli.run import run as work

    work(**given)


# -- nvcc ------------------------------------------------------------


@command(
    epilog=examples("cupyflash nvcc -o program main.cu", "cupyflash nvcc -arch=sm_90 -c kernels.cu -o kernels.o"),
    no_args_is_help=True,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
)
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
