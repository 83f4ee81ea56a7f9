"""The call on CuPy arrays: the numbers, the stream, no copies, and agreement with the simulated device."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import cupyflash
from cupyflash import Device, Problem, plan
from cupyflash.schedules import fa2_tiles
from cupyflash.sim import execute
from yardstick import check_numbers, draw, draw_masks

CASES = [
    (algorithm, dtype, d, lengths, causal)
    for algorithm in ("fa2", "fa1", "standard")
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("d", [40, 64, 128, 256])
def test_each_tile_that_lengths_choose_between(dtype: str, d: int) -> None:
    import cupy

    problem = Problem(2, 4, 2, 300, 1025, d, dtype, causal=True)
    q, k, v = draw(problem, v_mean=1.0)
    for each in fa2_tiles.finalists(problem, Device.current()):
        tiling = (each.tile.block_rows, each.tile.block_cols)
        arrays = map(cupy.asarray, (q, k, v))
        out, lse = cupyflash.attention(*arrays, causal=True, algorithm="fa2", tiling=tiling, return_lse=True)
        check_numbers(cupy.asnumpy(out), cupy.asnumpy(lse), q, k, v, causal=True)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("algorithm", ["fa2", "fa1"])
def test_the_simulated_device_computes_the_same(dtype: str, algorithm: str) -> None:
    """Not to the bit: the two round exponentials and accumulate in the tensor core differently."""
    import cupy

    problem = Problem(1, 2, 1, 200, 300, 64, dtype, causal=True)
    q, k, v = draw(problem, v_mean=1.0)
    ours = cupy.asnumpy(cupyflash.attention(*map(cupy.asarray, (q, k, v)), causal=True, algorithm=algorithm))
    simulated = execute(plan(problem, Device.current(), algorithm), q, k, v).out
    assert np.abs(ours.astype(np.float64) - simulated.astype(np.float64)).max() <= (4e-3 if dtype == "float16" else 2e-6)


def small() -> tuple[list[np.ndarray], list[object]]:
    """Host and device copies of one problem that has workspaces."""
    import cupy

    host = list(draw(Problem(1, 4, 4, 512, 512, 64, "float16")))
    return host, [cupy.asarray(array) for array in host]


@pytest.mark.parametrize("algorithm", ["fa2", "fa1"])
def test_a_captured_call_replays_after_its_memory_was_offered_to_others(algorithm: str) -> None:
    import cupy

    host, (q, k, v) = small()
    out = cupy.zeros_like(q)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupyflash.attention(q, k, v, out=out, algorithm=algorithm)
        stream.synchronize()
        out[...] = 0
        stream.begin_capture()  # capture refuses any synchronisation and any use of another stream
        cupyflash.attention(q, k, v, out=out, algorithm=algorithm)
        graph = stream.end_capture()
        filler = [cupy.full(1 << 20, 7, cupy.float32) for _ in range(8)]
        for _ in range(2):
            graph.launch(stream)
        stream.synchronize()
        assert all(bool((array == 7).all()) for array in filler)
    check_numbers(cupy.asnumpy(out), None, *host)


def test_runs_on_the_current_stream() -> None:
    import cupy

    host, (q, k, v) = small()
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.ptds):
        cupy.cuda.Device().synchronize()
        with stream:
            doubled = q * 2  # in order on this stream only
            out = cupyflash.attention(doubled, k, v, scale=1 / 16)
            stream.synchronize()
        check_numbers(cupy.asnumpy(out), None, *host)


def test_workspaces_come_from_the_current_memory_pool() -> None:
    import cupy

    _, (q, k, v) = small()
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        cupyflash.attention(q, k, v, out=cupy.empty_like(q), algorithm="fa1")
    assert pool.total_bytes() >= 4 * 512 * (2 + 64) * 4


def test_arrays_on_a_device_that_is_not_current() -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    host, _ = small()
    with cupy.cuda.Device(1):
        arrays = [cupy.asarray(array) for array in host]
    out = cupyflash.attention(*arrays)
    assert out.device.id == 1
    check_numbers(cupy.asnumpy(out), None, *host)


def test_threads_may_make_the_first_call_together() -> None:
    import cupy

    q, k, v = (cupy.asarray(array) for array in draw(Problem(1, 1, 1, 64, 64, 104, "float16")))
    with ThreadPoolExecutor(8) as pool:
        outs = list(pool.map(lambda _: cupyflash.attention(q, k, v).get(), range(8)))
    assert all(out.tobytes() == outs[0].tobytes() for out in outs)


@pytest.mark.parametrize("mode", ["missing", "read-only"])
def test_without_a_usable_cache_directory(tmp_path: Path, mode: str) -> None:
    """In a process of its own, since CuPy looks at the directory when it starts. Root writes anywhere, so a file stands in."""
    directory = tmp_path / "cache"
    if mode == "read-only":
        directory.write_text("not a directory")
    code = "import cupy, cupyflash; q = cupy.ones((32, 64), cupy.float16);assert bool((cupyflash.attention(q, q, q) == 1).all())"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"CUPY_CACHE_DIR": str(directory)}, timeout=120)


def test_warmup_compiles_what_a_call_needs() -> None:
    import cupy

    cupyflash.warmup(head_dim=88, causal=True)
    q, k, v = (cupy.asarray(array) for array in draw(Problem(1, 1, 1, 64, 64, 88, "float16")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy, "RawModule", lambda **_: pytest.fail("something was compiled"))
        cupyflash.attention(q, k, v, causal=True)


def test_results_do_not_depend_on_what_else_runs() -> None:
    import cupy

    _, (q, k, v) = small()
    alone = cupyflash.attention(q, k, v).get()
    busy = cupy.cuda.Stream(non_blocking=True)
    with busy:
        noise = cupy.random.standard_normal((4096, 4096), dtype=cupy.float32)
        for _ in range(20):
            noise = noise @ noise / 4096
    assert cupyflash.attention(q, k, v).get().tobytes() == alone.tobytes()
    busy.synchronize()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("algorithm", ["fa2", "fa1", "standard"])
def test_masks(dtype: str, algorithm: str) -> None:
    import cupy

    problem = Problem(2, 4, 2, 100, 150, 64, dtype, head_dim_v=48, mask=True, bias=True, padded=True, key_lengths=(150, 70))
    q, k, v = draw(problem, v_mean=1.0)
    masks = draw_masks(problem)
    on_gpu = {name: cupy.asarray(array) for name, array in masks.items()}
    for causal in (False, True):
        out = cupyflash.attention(*map(cupy.asarray, (q, k, v)), causal=causal, algorithm=algorithm, **on_gpu)
        check_numbers(cupy.asnumpy(out), None, q, k, v, causal=causal, **masks)


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


@pytest.mark.parametrize("algorithm", ["fa2", "fa1"])
def test_the_same_bits_every_time(algorithm: str) -> None:
    import cupy

    q, k, v = map(cupy.asarray, draw(Problem(1, 8, 8, 700, 700, 64, "float16")))
    first = cupyflash.attention(q, k, v, algorithm=algorithm).tobytes()
    assert all(cupyflash.attention(q, k, v, algorithm=algorithm).tobytes() == first for _ in range(10))


def test_numpy_and_cupy_do_not_mix() -> None:
    import cupy

    q, k, v = draw(Problem(1, 1, 1, 16, 16, 64, "float16"))
    with pytest.raises(TypeError, match="all CuPy's"):
        cupyflash.attention(cupy.asarray(q), k, v)


def test_the_detected_device_is_plausible() -> None:
    device = Device.current()
    assert device.sram_per_block >= 48 * 1024 and device.sm_count > 0 and device.compute_capability >= (7, 5)
