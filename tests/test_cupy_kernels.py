"""CuPy's elementwise, reduction and jit kernels without a GPU: results, shapes, types and refusals, findings with their places."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash.sim import ptx
from cupyflash.sim.ptx import KernelFault, Launch

cp = pytest.importorskip("cupy")
cupyx = pytest.importorskip("cupyx")
jit = pytest.importorskip("cupyx.jit")
pytestmark = pytest.mark.filterwarnings("ignore:cupyx.jit.rawkernel is experimental")

EARLY = cp.ElementwiseKernel("T x, T y", "T z", "z = x * 2 + y", "early")
SQUARES = cp.ReductionKernel("T x, T y", "T z", "x * x + y", "a + b", "z = a", "0", "squares")
LARGEST = cp.ReductionKernel("T x", "T z", "x", "max(a, b)", "z = a", "", "largest")


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    with ptx.simulated_cupy(), ptx.simulation() as found:
        yield found


def array(*shape: int, dtype: str = "float32") -> Any:
    return cp.asarray(np.random.default_rng(7).integers(-9, 9, shape).astype(dtype))


def test_elementwise_kernels_broadcast_and_take_any_strides(launches: list[Launch]) -> None:
    x, y = array(3, 4, 5), array(4, 1)
    cases = [(x, y), (x.transpose(2, 1, 0), 3), (x[:, ::-1, ::2], y), (cp.asarray(4.0, cp.float32), np.float32(1))]
    for one, other in cases:
        made = EARLY(one, other)
        assert (made == 2 * one + other).all() and made.shape == np.broadcast(one, other).shape and made.dtype == np.float32
    assert len(launches) == len(cases)
    out = cp.empty((3, 4, 5), cp.float32)
    assert EARLY(x, y, out) is out and (out == 2 * x + y).all()
    assert EARLY(x[:0], y).shape == (0, 4, 5) and len(launches) == len(cases) + 1


def test_raw_arguments_are_indexed_by_the_operation(launches: list[Launch]) -> None:
    reverse = cp.ElementwiseKernel("raw T x, int64 n", "raw T y", "y[i] = x[n - 1 - i]", "reverse")
    x, y = array(10, dtype="float64"), cp.empty(10, cp.float64)
    assert reverse(x, 10, y, size=10, block_size=4) is y and (y == x[::-1]).all()
    launch = launches[0]
    assert {name: counts.read_bytes for name, counts in launch.traffic.items()} == {"x": 80, "y": 0}
    with pytest.raises(ValueError, match="undecided"):
        reverse(x, 10, y)
    rows = cp.ElementwiseKernel("T x, raw T y", "T z", "z = x + y[i % 4]", "rows", loop_prep="", reduce_dims=False)
    assert (rows(array(3, 4), cp.arange(4, dtype=cp.float32)) == array(3, 4) + np.arange(4)).all()


def test_several_outputs_and_none(launches: list[Launch]) -> None:
    both = cp.ElementwiseKernel("T x", "T low, float64 high", "low = x - 1; high = x + 1", "both")
    low, high = both(array(7))
    assert (low == array(7) - 1).all() and (high == array(7) + 1).all() and high.dtype == np.float64
    silent = cp.ElementwiseKernel("T x", "T y", "y = x", "silent", no_return=True)
    assert silent(array(7)) is None


@pytest.mark.parametrize(
    ("args", "error", "said"),
    [
        ((1.0, 2.0), ValueError, "undecided"),
        ((np.zeros(3),), TypeError, "number of arguments"),
        ((np.zeros(3), np.zeros(4)), ValueError, "broadcast"),
        ((np.zeros(3), np.zeros(3, np.float32)), TypeError, "mismatched"),
        ((np.zeros(3), np.zeros(3), np.zeros(1)), ValueError, "Out shape"),
        ((np.zeros(3), "a"), TypeError, "takes arrays and numbers, got str"),
    ],
)
def test_wrong_arguments_are_refused(launches: list[Launch], args: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        EARLY(*args)
    assert not launches


@pytest.mark.wide
def test_reductions_over_axes(launches: list[Launch]) -> None:
    x = array(3, 40, 5)
    for axis in (None, 0, 1, -1, (0, 2)):
        for keepdims in (False, True):
            made = SQUARES(x, 1, axis=axis, keepdims=keepdims)
            wanted = (x * x + 1).sum(axis=axis, keepdims=keepdims)
            assert made.shape == wanted.shape and (made == wanted).all(), axis
    out = cp.empty(40, cp.float32)
    assert LARGEST(x.T[::2], axis=(0, 2), out=out) is out and (out == x[:, :, ::2].max((0, 2))).all()
    with pytest.raises(ValueError, match="no identity"):
        LARGEST(x[:0])


def test_reductions_are_split_over_blocks_as_cupy_does(launches: list[Launch]) -> None:
    x = array(70, 600)
    assert (SQUARES(x, 0, axis=1) == (x * x).sum(1)).all() and (SQUARES(x, 0, axis=0) == (x * x).sum(0)).all()
    # A thread block of 512 for each row; for columns, 32 of them side by side in a block.
    assert [launch.traffic["z"].write_requests for launch in launches] == [70, 19]


@pytest.mark.wide  # NVRTC takes 3 s for each of these programs
def test_kernels_written_in_python(launches: list[Launch]) -> None:
    @jit.rawkernel()  # type: ignore[untyped-decorator]
    def add(x: Any, y: Any, n: Any) -> None:
        i = jit.blockIdx.x * jit.blockDim.x + jit.threadIdx.x
        if i < n:
            y[i] = x[i, 1] + y[i]

    x, y = array(100, 3), cp.ones(100, cp.float32)
    add[1, 128](x[:, ::-1], y, np.int32(100))
    assert (y == x[:, 1] + 1).all()
    with pytest.raises(KernelFault, match=r"add\.cu:\d+: out of bounds: .* of 'x'"):
        add((1,), (128,), (x[:50], y, 100))


def test_functions_in_kernels_written_in_python(launches: list[Launch]) -> None:
    """CuPy's and NumPy's functions, `min` and `max`, and a shuffle without a width, for which CuPy asks the device."""

    @jit.rawkernel()
    def curve(x, y):  # type: ignore[no-untyped-def]
        i = jit.grid(1)
        v = cp.sqrt(cp.abs(x[i])) + np.exp(-x[i]) + max(x[i], 0.5) * min(x[i], 2.0)
        y[i] = v + jit.shfl_xor_sync(0xFFFFFFFF, v, 16)

    x, y = cp.linspace(-3, 3, 32), cp.empty(32)
    curve((1,), (32,), (x, y))
    v = np.sqrt(abs(x)) + np.exp(-x) + np.maximum(x, 0.5) * np.minimum(x, 2)
    assert np.allclose(y, v + np.roll(v, 16))


def test_programs_around_kernels(launches: list[Launch]) -> None:
    """Factories that remember, `cupy.vectorize`, times of events, pools, additions at repeated indices."""

    @cp.memoize(for_each_device=True)  # type: ignore[untyped-decorator]
    def made(function: str) -> Any:
        return cp.ElementwiseKernel("T x", "T y", f"y = {function}(x)", f"k_{function}")

    larger = cp.vectorize(lambda x, y: x * 2 if x > y else y)
    assert np.allclose(made("sin")(cp.ones(3)), np.sin(1)) and made("sin") is made("sin")
    assert (larger(cp.arange(4.0), 2.0) == [2, 2, 2, 6]).all() and len(launches) == 2
    assert cp.cuda.get_elapsed_time(cp.cuda.Event(), cp.cuda.Event()) == cp.get_default_memory_pool().used_bytes() == 0
    sums = cp.zeros(3)
    cupyx.scatter_add(sums, cp.asarray([0, 1, 1]), 1.0)
    assert (sums == [1, 2, 0]).all()


def test_findings_have_the_line_of_the_operation(launches: list[Launch]) -> None:
    beyond = cp.ElementwiseKernel("T x, raw T y", "T z", "z = x + y[i + 1]", "beyond")  # here
    line = next(k for k, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# here"))
    with pytest.raises(KernelFault, match=rf"test_cupy_kernels.py:{line}: out of bounds: .* of 'y'"):
        beyond(array(5), array(5))


def test_memory_that_nobody_wrote_is_a_finding(launches: list[Launch]) -> None:
    for made in (EARLY, SQUARES):
        with pytest.raises(KernelFault, match=r"uninitialised: .* of 'x'"):
            made(cp.empty(5, cp.float32), np.float32(1))
