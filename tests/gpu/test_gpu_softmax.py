"""Softmax of CuPy arrays: the numbers, strides, the stream, and agreement with the simulated device."""

from __future__ import annotations

import numpy as np
import pytest
from chip import DTYPES, choose
from test_softmax import check_numbers, definition, rows_of

import cupyflash
from cupyflash import Device
from cupyflash.schedules import plan_softmax
from cupyflash.sim import execute_softmax

ALGORITHMS = ("safe", "online")


SHAPES = choose(((5, 1), (1000, 7), (33, 33), (7, 1024), (3, 1025), (2, 200_000), (100_000, 40)), ((5, 1), (33, 7), (3, 1025)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers(algorithm: str, dtype: str) -> None:
    import cupy

    for shape in SHAPES:
        x = rows_of(shape, dtype)
        for axis in (0, 1):
            check_numbers(cupy.asnumpy(cupyflash.softmax(cupy.asarray(x), algorithm=algorithm, axis=axis)), x, axis)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_simulated_device_computes_the_same(algorithm: str, dtype: str) -> None:
    """Not to the bit: the two round exponentials differently."""
    import cupy

    x = rows_of((9, choose(1500, 300)), dtype)
    ours = cupy.asnumpy(cupyflash.softmax(cupy.asarray(x), algorithm=algorithm))
    simulated = execute_softmax(plan_softmax(9, x.shape[1], dtype, Device.current(), algorithm), x).out
    assert np.abs(ours.astype(np.float64) - simulated.astype(np.float64)).max() <= (5e-4 if dtype == "float16" else 1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_strided_views_and_out_without_copies(algorithm: str) -> None:
    import cupy

    a, b = choose((40, 50), (8, 10))
    room = cupy.asarray(rows_of((6, a, b, 8), "float32"))
    x = room[::2, ::-1, :, 3].swapaxes(0, 2)
    before = cupy.asnumpy(x)
    for axis in range(x.ndim):
        out = cupy.empty((a, b, 3), cupy.float32).swapaxes(0, 1)
        assert cupyflash.softmax(x, algorithm=algorithm, axis=axis, out=out) is out
        check_numbers(cupy.asnumpy(out), before, axis)
    assert cupyflash.softmax(x, algorithm=algorithm, out=x) is x
    check_numbers(cupy.asnumpy(x), before)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("n", [33, 1500])
def test_not_a_numbers(algorithm: str, n: int) -> None:
    import cupy

    x = rows_of((6, n), "float32")
    x[0, 3], x[1, 4], x[2, 5], x[3], x[4] = np.nan, np.inf, -np.inf, -np.inf, 1e4
    y, expected = cupy.asnumpy(cupyflash.softmax(cupy.asarray(x), algorithm=algorithm)), definition(x, -1)
    assert np.allclose(y, expected, rtol=0, atol=1e-6, equal_nan=True) and np.isnan(expected).any(axis=1).sum() == 3


def test_runs_on_the_current_stream_without_waiting() -> None:
    import cupy

    x = cupy.asarray(rows_of((64, choose(3000, 300))))
    cupyflash.softmax(x)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()  # capture refuses any synchronisation and any use of another stream
        out = cupyflash.softmax(x, out=cupy.empty_like(x))
        stream.end_capture().launch(stream)
        stream.synchronize()
    check_numbers(cupy.asnumpy(out), cupy.asnumpy(x))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_bits_every_time(algorithm: str) -> None:
    import cupy

    x = cupy.asarray(rows_of((50, choose(5000, 700))))
    first = cupyflash.softmax(x, algorithm=algorithm).tobytes()
    assert all(cupyflash.softmax(x, algorithm=algorithm).tobytes() == first for _ in range(10))
