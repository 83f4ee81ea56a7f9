"""`cupyflash check`: a generated kernel judged by a reference, without a GPU."""

from __future__ import annotations

from typing import Any

import click

from cupyflash.sim.cli.help import command
from cupyflash.sim.cli.options import NewFile, a_number, examples

EXAMPLES = examples(
    "cupyflash check kernel.py::f --against reference.py::g",
    "cupyflash check kernel.py::f --against reference.py::g --json",
    "cupyflash check kernel.py::f --against reference.py::g --only 7",
)


@command(epilog=EXAMPLES)
@click.argument("function", metavar="FILE.py::NAME")
@click.option("--against", "reference", required=True, metavar="FILE.py::NAME", help="The reference, a function of NumPy arrays.")
@click.option(
    "--inputs",
    metavar="FILE.py::NAME",
    help="The function that makes the inputs; without it, `inputs` of either file if there is one, else the annotations.",
)
@click.option("--arch", default="compute_80", show_default=True, help="The architecture to compile for: compute_90, sm_90 or 9.0.")
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
