"""The call on CuPy arrays: the numbers, the stream, no copies, and agreement with the simulated device."""

from __future__ import annotations

import numpy as np
import pytest

import cupyflash
from cupyflash import Device, Problem, plan
from cupyflash.sim import execute
from yardstick import check_numbers, draw

CASES = [
    (algorithm, dtype, d, lengths, causal)
    for algorithm in ("fa1", "standard")
    for dtype in ("float16", "bfloat16", "float32")
    for d in (16, 40, 64, 128, 256)
    for lengths in ((128, 128), (97, 1025), (1025, 97), (1, 300))
    for causal in (False, True)
]


@pytest.mark.parametrize(("algorithm", "dtype", "d", "lengths", "causal"), CASES)
def test_numbers(algorithm: str, dtype: str, d: int, lengths: tuple[int, int], causal: bool) -> None:
    import cupy

    q, k, v = draw(Problem(2, 4, 2, *lengths, d, dtype, causal), v_mean=1.0)
    out, lse = cupyflash.attention(*map(cupy.asarray, (q, k, v)), causal=causal, algorithm=algorithm, return_lse=True)
    check_numbers(cupy.asnumpy(out), cupy.asnumpy(lse), q, k, v, causal=causal)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_simulated_device_computes_the_same(dtype: str) -> None:
    """Not to the bit: the two round exponentials and accumulate in the tensor core differently."""
    import cupy

    problem = Problem(1, 2, 1, 200, 300, 64, dtype, causal=True)
    q, k, v = draw(problem, v_mean=1.0)
    ours = cupy.asnumpy(cupyflash.attention(*map(cupy.asarray, (q, k, v)), causal=True))
    simulated = execute(plan(problem, Device.current()), q, k, v).out
    assert np.abs(ours.astype(np.float64) - simulated.astype(np.float64)).max() <= (4e-3 if dtype == "float16" else 2e-6)


def test_runs_on_the_current_stream_without_waiting() -> None:
    import cupy

    q, k, v = map(cupy.asarray, draw(Problem(1, 4, 4, 512, 512, 64, "float16")))
    cupyflash.attention(q, k, v)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()  # capture refuses any synchronisation and any use of another stream
        out = cupyflash.attention(q, k, v, out=cupy.empty_like(q))
        stream.end_capture().launch(stream)
        stream.synchronize()
    check_numbers(cupy.asnumpy(out), None, *(cupy.asnumpy(array) for array in (q, k, v)))


def test_strided_views_and_out_without_copies() -> None:
    import cupy

    arrays = [cupy.asarray(array) for array in draw(Problem(2, 30, 30, 4, 4, 64, "float16"))]
    q, k, v = (array.swapaxes(1, 2) for array in arrays)
    out = cupy.empty((2, 30, 4, 64), cupy.float16).swapaxes(1, 2)
    assert cupyflash.attention(q, k, v, out=out) is out
    check_numbers(cupy.asnumpy(out), None, *(cupy.asnumpy(array) for array in (q, k, v)))


@pytest.mark.parametrize(("start", "row"), [(0, 64), (4, 72), (2, 68), (1, 65)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_any_alignment(dtype: str, start: int, row: int) -> None:
    import cupy

    arrays = draw(Problem(1, 1, 1, 40, 50, row + 8, dtype))
    q, k, v = (cupy.asarray(array[0, 0])[:, start : start + 48] for array in arrays)
    out = cupyflash.attention(q, k, v)
    check_numbers(cupy.asnumpy(out), None, *(cupy.asnumpy(array) for array in (q, k, v)))


def test_the_same_bits_every_time() -> None:
    import cupy

    q, k, v = map(cupy.asarray, draw(Problem(1, 8, 8, 700, 700, 64, "float16")))
    first = cupyflash.attention(q, k, v).tobytes()
    assert all(cupyflash.attention(q, k, v).tobytes() == first for _ in range(10))


def test_numpy_and_cupy_do_not_mix() -> None:
    import cupy

    q, k, v = draw(Problem(1, 1, 1, 16, 16, 64, "float16"))
    with pytest.raises(TypeError, match="all CuPy's"):
        cupyflash.attention(cupy.asarray(q), k, v)


def test_the_detected_device_is_plausible() -> None:
    device = Device.current()
    assert device.sram_per_block >= 48 * 1024 and device.sm_count > 0 and device.compute_capability >= (7, 5)
