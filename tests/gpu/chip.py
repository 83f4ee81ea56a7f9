"""The common part of the GPU tests: sizes for the chip and for its stand-in, and the checks of a problem that is given as data."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import cupyflash
from cupyflash import Device, Problem, Score
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.yardstick import draw_gradient, drawn, measure, measure_gradients

T = TypeVar("T")
STAND_IN = os.environ.get("CUPYFLASH_STAND_IN")
TESTS = Path(__file__).parents[1]
DTYPES = ("float16", "bfloat16", "float32")


def choose(chip: T, stand_in: T) -> T:
    """Sizes and cases for a chip, which has time for them, or for the stand-in, which has none."""
    return stand_in if STAND_IN else chip


def on_gpu(*arrays: np.ndarray) -> list[Any]:
    """Copies on the GPU, there already when another stream looks."""
    import cupy

    copies = [cupy.asarray(array) for array in arrays]
    cupy.cuda.get_current_stream().synchronize()
    return copies


def on_host(*arrays: Any) -> list[np.ndarray]:
    """Copies on the host, waited for on the current stream."""
    import cupy

    return [cupy.asnumpy(array) for array in arrays]


def dtypes() -> Sequence[str]:
    """The dtypes that this GPU has, for tests that loop over them."""
    return DTYPES if Device.current().compute_capability >= (8, 0) else ("float16", "float32")


def needs_cublas() -> None:
    """Skip where CuPy has no cuBLAS, which its products of matrices need and ours do not."""
    import cupy

    try:
        one = cupy.ones((2, 2), cupy.float32)
        one @ one
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"needs cuBLAS: {error}")


def needs_memory(size: int) -> None:
    """Skip where the GPU has fewer free bytes."""
    import cupy

    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < size:
        pytest.skip(f"needs {size / 2**30:.0f} GiB of free memory, this GPU has {free / 2**30:.0f}")


@contextmanager
def skipping_what_has_no_room() -> Iterator[None]:
    """A T4 has too little shared memory for a few kernels, and says so; nothing later has."""
    try:
        yield
    except ValueError as error:
        if "gives a block" not in str(error) or Device.current().compute_capability >= (8, 0):
            raise
        pytest.skip(str(error))


def held_in(algorithm: str, q: np.ndarray) -> Any:
    """The dtype that holds S, which bounds L's error: its elements' type if it goes to HBM."""
    return q.dtype if algorithm == "standard" else np.float32


def check_forward(problem: Problem, algorithm: str = "fa2", tiling: tuple[int, int] | None = None, seed: int = 0) -> None:
    """O and L of random arrays that pose the problem, by the 2x rule."""
    inputs = drawn(problem, seed, 1.0, tiling)
    with skipping_what_has_no_room():
        out, lse = cupyflash.attention(*on_gpu(*inputs.qkv), **call_of(inputs, algorithm, tiling), return_lse=True)
    numbers = measure(*on_host(out, lse), inputs, held_in(algorithm, inputs.q))
    assert all(each.good for each in numbers.values()), (problem, numbers)


def call_of(inputs: Inputs, algorithm: str, tiling: tuple[int, int] | None) -> dict[str, Any]:
    """The arguments of a call on the GPU, by name."""
    beside = dict(zip(inputs.beside, on_gpu(*inputs.beside.values()), strict=True))
    if inputs.score is not None:
        beside["score"] = score_on_gpu(inputs.score)
    return {**inputs.keywords, **beside, "algorithm": algorithm, "tiling": tiling}


def score_on_gpu(score: Score) -> Score:
    """The same with its arrays on the GPU."""
    arrays = dict(zip(score.arrays, on_gpu(*score.arrays.values()), strict=True))
    return Score(score.text, **arrays, **score.numbers)


def check_backward(
    problem: Problem,
    algorithm: str = "fa2",
    tiling: tuple[int, int] | None = None,
    seed: int = 0,
    **flags: bool,
) -> None:
    """dQ, dK, dV (and dbias, if asked for) of random arrays that pose the problem, by the 2x rule."""
    inputs, dout = drawn(problem, seed, 1.0, tiling), draw_gradient(problem, seed)
    with skipping_what_has_no_room():
        _, pullback = cupyflash.attention_vjp(*on_gpu(*inputs.qkv), **call_of(inputs, algorithm, tiling), **flags)
    (d_out,) = on_gpu(dout)
    names = ["dQ", "dK", "dV", *["dsinks"] * problem.options.sinks, "dbias"]
    gradients = dict(zip(names, on_host(*pullback(d_out)), strict=False))
    numbers = measure_gradients(gradients, dout, inputs)
    assert all(each.good for each in numbers.values()), (problem, numbers)


def in_a_process_of_its_own(code: str, **environment: str) -> None:
    """Run Python code that may import cupy, cupyflash and what the tests share."""
    paths = f"import sys; sys.path[:0] = {[str(TESTS.parent), str(TESTS)]}"
    stand_in = f"import stand_in_cupy; stand_in_cupy.install({STAND_IN!r})" if STAND_IN else ""
    ran = subprocess.run(
        [sys.executable, "-c", f"{paths}\n{stand_in}\n{code}"],
        env=os.environ | environment,
        timeout=300,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
