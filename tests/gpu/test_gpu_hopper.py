"""Machine code of ours and tensor maps on a Hopper GPU: the cache's cubins load and run, maps find each call's arrays."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from chip import choose, in_a_process_of_its_own, on_gpu, on_host
from tile_copy import doubled, prepared

from cupyflash import Device

ROWS = choose(1000, 37)


@pytest.fixture(autouse=True)
def _hopper() -> None:
    capability = Device.current().compute_capability
    if capability != (9, 0):
        pytest.skip("machine code for sm_90a needs compute capability 9.0, this GPU has {}.{}".format(*capability))


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize("name", ["contiguous", "(b, n, h, d)", "packed", "one head", "narrow", "one row"])
def test_a_kernel_copies_by_maps(name: str) -> None:
    shapes = {"contiguous": (2, 3, ROWS, 64), "(b, n, h, d)": (2, ROWS, 3, 64), "packed": (ROWS, 3, 64), "one head": (ROWS, 64)}
    host = drawn(*shapes.get(name, (2, 3, 1 if name == "one row" else ROWS, 64)))
    (q,) = on_gpu(host)
    if name in ("(b, n, h, d)", "packed"):
        q, host = q.swapaxes(-3, -2), host.swapaxes(-3, -2)
    if name == "narrow":
        q, host = q[..., :40], host[..., :40]
    (out,) = on_host(doubled(q))
    assert np.array_equal(out, 2 * host)


def test_each_call_of_a_layout_has_its_own_addresses() -> None:
    """From threads with streams of their own, one of which makes the first call."""
    import cupy

    hosts = [drawn(ROWS, 64) + turn for turn in range(choose(64, 4))]
    (first,) = on_gpu(hosts[0])
    copy = prepared(first)

    def work(host: np.ndarray) -> bool:
        with cupy.cuda.Stream(non_blocking=True):
            (q,) = on_gpu(host)
            return all(np.array_equal(*on_host(doubled(q, copy)), 2 * host) for _ in range(choose(20, 1)))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, hosts))


def test_a_graph_keeps_the_maps_of_its_calls() -> None:
    import cupy

    hosts = [drawn(ROWS, 64) + turn for turn in range(3)]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        arrays = on_gpu(*hosts)
        copy = prepared(arrays[0])
        doubled(arrays[2], copy)  # compiles
        stream.begin_capture()
        outs = [doubled(q, copy) for q in arrays]
        graph = stream.end_capture()
        doubled(arrays[1], copy)
        for turn in (1, 2):
            graph.launch()
            assert all(np.array_equal(out, 2 * turn * host) for out, host in zip(on_host(*outs), hosts, strict=True))
            for q in arrays:
                q[...] = q + q


def test_every_gpu_has_functions_and_maps_of_its_own() -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    host = drawn(ROWS, 64)
    for ordinal in (0, 1, 0):
        with cupy.cuda.Device(ordinal):
            if Device.current().compute_capability == (9, 0):
                assert np.array_equal(*on_host(doubled(*on_gpu(host))), 2 * host)


CALL = """
import cupy, numpy
from tile_copy import doubled
from cupyflash.launch import cubins
made, compiled = [], cubins.compiled
cubins.compiled = lambda program: made.append(program) or compiled(program)
q = cupy.asarray(numpy.ones((37, 64), numpy.float16))
assert (cupy.asnumpy(doubled(q)) == 2).all()
"""


def test_a_process_finds_what_another_compiled_and_needs_no_folder(tmp_path: Path) -> None:
    cache = {"CUPY_CACHE_DIR": str(tmp_path / "cache")}
    in_a_process_of_its_own(f"{CALL}\nassert len(made) == 1", **cache)
    in_a_process_of_its_own(f"{CALL}\nassert not made", **cache)
    (cubin,) = (tmp_path / "cache").glob("cupyflash_*.cubin")
    cubin.write_bytes(cubin.read_bytes()[:-100])
    in_a_process_of_its_own(f"{CALL}\nassert len(made) == 1", **cache)
    in_a_process_of_its_own(f"{CALL}\nassert len(made) == 1", CUPY_CACHE_IN_MEMORY="1", **cache)
