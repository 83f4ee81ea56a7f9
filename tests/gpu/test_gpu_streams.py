"""Calls on a GPU in streams, graphs, threads, memory pools, on several GPUs, with CuPy's cache and `warmup`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chip import choose, in_a_process_of_its_own, on_gpu, on_host
from test_varlen import check_sequences, packed

import cupyflash
from cupyflash import Device, Problem
from cupyflash.request.options import Options
from cupyflash.schedules import fa3_tiles
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.reference import reference_gradients
from cupyflash.sim.numbers.yardstick import draw_gradient, drawn, measure_gradients
from yardstick import check_numbers, draw, draw_masks

N = choose(512, 40)
PROBLEM = Problem(1, choose(4, 1), choose(4, 1), N, N, 64, "float16", bias=True)


def small() -> tuple[list[np.ndarray], list[Any]]:
    """Host and device copies of one problem that has workspaces."""
    host = list(draw(PROBLEM))
    return host, on_gpu(*host)


def captured(call: Callable[[], Any]) -> tuple[Any, Any, Any]:
    """A call as a graph, with its stream and what it returned; capture refuses any synchronisation and any other stream."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()  # compiles
        stream.synchronize()
        stream.begin_capture()
        try:
            returned = call()
        finally:
            graph = stream.end_capture()
    return graph, stream, returned


def replayed(graph: Any, stream: Any, results: Sequence[Any]) -> list[list[np.ndarray]]:
    """The results of two replays, after whatever memory is free was offered to others, who must keep what they wrote."""
    import cupy

    found = []
    with stream:
        filler = [
            cupy.full(size, 7, cupy.float32) for size in choose([1 << 20, 1 << 16, 1 << 12, 1 << 8], [1 << 8]) for _ in range(8)
        ]
        for _ in range(2):
            for result in results:
                result[...] = 7
            graph.launch(stream)
            found.append(on_host(*results))
        assert all(bool((array == 7).all()) for array in filler)
    return found


@pytest.mark.parametrize("algorithm", choose(["fa2", "fa1", "standard"], ["fa1"]))
def test_a_captured_call_replays_after_its_memory_was_offered_to_others(algorithm: str) -> None:
    host, (q, k, v) = small()
    graph, stream, out = captured(lambda: cupyflash.attention(q, k, v, algorithm=algorithm))
    for (again,) in replayed(graph, stream, [out]):
        check_numbers(again, None, *host)


@pytest.mark.parametrize(
    ("algorithm", "deterministic"), choose([("fa2", False), ("fa2", True), ("fa1", False), ("standard", False)], [("fa2", False)])
)
def test_captured_gradients(algorithm: str, deterministic: bool) -> None:
    host, (q, k, v) = small()
    dout = draw_gradient(PROBLEM)
    (on_chip,) = on_gpu(dout)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    on_host(out)  # there, when another stream looks
    options = {"algorithm": algorithm, "deterministic": deterministic}
    graph, stream, gradients = captured(lambda: cupyflash.attention_backward(on_chip, q, k, v, out, lse, **options))
    for again in replayed(graph, stream, gradients):
        numbers = measure_gradients(dict(zip(("dQ", "dK", "dV"), again, strict=True)), dout, Inputs(*host))
        assert all(each.good for each in numbers.values()), numbers


def test_a_captured_gradient_of_a_bias() -> None:
    """It is a sum: each replay begins with zeros, in memory that is still its own."""
    host, (q, k, v) = small()
    dout, bias = draw_gradient(PROBLEM), draw_masks(PROBLEM)["bias"]
    on_chip, shift = on_gpu(dout, bias)
    out, lse = cupyflash.attention(q, k, v, bias=shift, return_lse=True)
    on_host(out)
    call = lambda: cupyflash.attention_backward(on_chip, q, k, v, out, lse, bias=shift, return_dbias=True)  # noqa: E731
    graph, stream, gradients = captured(call)
    expected = reference_gradients(dout, *host, bias=bias)["dbias"]
    for *_, dbias in replayed(graph, stream, gradients):
        assert np.abs(dbias - expected).max() <= 2e-3 * np.abs(expected).max()


SEQLENS = ((5, 17), (30, 20), (7, 0))


def test_captured_sequences_whose_longest_are_said() -> None:
    q, k, v, cu_q, cu_k = packed(SEQLENS, 2, 2, 64, 64)
    given = on_gpu(q, k, v, cu_q, cu_k)
    graph, stream, out = captured(lambda: cupyflash.attention_varlen(*given, 30, 20, causal=True))
    for (again,) in replayed(graph, stream, [out]):
        check_sequences(again, None, q, k, v, SEQLENS, Options(causal=True))


@pytest.mark.parametrize("on_the_host", [True, False])
def test_captured_sequences_whose_bounds_are_looked_at(on_the_host: bool) -> None:
    """Right, or refused before anything is launched: the capture goes on, and its graph holds nothing of the call."""
    import cupy

    q, k, v, cu_q, cu_k = packed(SEQLENS, 2, 2, 64, 64)
    given, bounds = on_gpu(q, k, v), [cu_q, cu_k] if on_the_host else on_gpu(cu_q, cu_k)
    out = cupy.zeros((*q.shape[:-1], 64), cupy.float16)
    cupyflash.attention_varlen(*given, *bounds, out=out)  # compiles
    out[...] = 7
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        refused = False
        try:
            cupyflash.attention_varlen(*given, *bounds, causal=True, out=out)
        except (ValueError, RuntimeError):
            refused = True
        graph = stream.end_capture()
        graph.launch(stream)
        (found,) = on_host(out)
    if refused:
        assert (found == 7).all()
    else:
        check_sequences(found, None, q, k, v, SEQLENS, Options(causal=True))


def busy(stream: Any) -> None:
    """Have a stream work for a while, so that what is ordered behind it comes late."""
    import cupy

    with stream:
        noise = cupy.full((choose(1 << 26, 8),), 0.5, cupy.float32)
        for _ in range(choose(50, 1)):
            noise = cupy.exp(noise) / 4


def test_every_call_runs_on_the_current_stream() -> None:
    """Inputs that come late on the stream are waited for, which only work on that stream is."""
    import cupy

    host, (q, k, v) = small()
    (scores,) = on_gpu(np.linspace(-3, 3, 64 * 100).reshape(64, 100).astype(np.float32))
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.ptds):
        cupy.cuda.Device().synchronize()
        busy(stream)
        with stream:
            doubled = q * 2
            out, lse = cupyflash.attention(doubled, k, v, scale=1 / 16, return_lse=True)
            merged, _ = cupyflash.merge_states(out, lse, out, lse)
            gradients = cupyflash.attention_backward(out, doubled, k, v, out, lse, scale=1 / 16)
            x = scores * 2
            y = cupyflash.softmax(x)
            found, again, y, *gradients = on_host(out, merged, y, *gradients)
        check_numbers(found, None, *host)
        assert np.allclose(found, again, atol=2e-3) and np.allclose(y.sum(axis=-1), 1, atol=1e-5)
        numbers = measure_gradients(
            dict(zip(("dQ", "dK", "dV"), gradients, strict=True)), found, Inputs.of(2 * host[0], *host[1:], scale=1 / 16)
        )
        assert all(each.good for each in numbers.values()), numbers


def test_results_do_not_depend_on_what_else_runs() -> None:
    import cupy

    _, (q, k, v) = small()
    alone = cupyflash.attention(q, k, v).tobytes()
    other = cupy.cuda.Stream(non_blocking=True)
    busy(other)
    assert cupyflash.attention(q, k, v).tobytes() == alone
    other.synchronize()


def test_workspaces_come_from_the_current_memory_pool() -> None:
    import cupy

    _, (q, k, v) = small()
    pool, out = cupy.cuda.MemoryPool(), cupy.empty_like(q)
    with cupy.cuda.using_allocator(pool.malloc):
        cupyflash.attention(q, k, v, out=out, algorithm="fa1")
    assert pool.total_bytes() >= q.shape[1] * N * (2 + 64) * 4
    on_host(out)  # before the pool goes


def test_arrays_on_a_device_that_is_not_current() -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    host, here = small()
    with cupy.cuda.Device(1):
        there = on_gpu(*host)
    out = cupyflash.attention(*there)
    assert out.device.id == 1 and cupy.cuda.runtime.getDevice() == 0
    with cupy.cuda.Device(1):
        check_numbers(*on_host(out), None, *host)
    with pytest.raises(ValueError, match="one GPU"):
        cupyflash.attention(there[0], *here[1:])


def test_threads_may_make_the_first_call_together() -> None:
    q, k, v = on_gpu(*draw(Problem(1, 1, 1, choose(64, 20), choose(64, 20), 104, "float16")))
    with ThreadPoolExecutor(8) as pool:
        outs = list(pool.map(lambda _: cupyflash.attention(q, k, v).tobytes(), range(8)))
    assert all(out == outs[0] for out in outs)


def test_threads_with_streams_of_their_own() -> None:
    """Each its own problem, over and over: what is kept between calls is shared."""
    import cupy

    def work(number: int) -> None:
        problem = Problem(1, 1, 1, 10 + number, 20 + number, 64, "float16")
        host = draw(problem, number)
        with cupy.cuda.Stream(non_blocking=True):
            q, k, v = on_gpu(*host)
            for _ in range(choose(20, 1)):
                check_numbers(*on_host(cupyflash.attention(q, k, v)), None, *host)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(choose(16, 4))))


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("mode", ["a file", "gone"])
def test_a_cache_that_became_unusable(tmp_path: Path, mode: str, algorithm: str) -> None:
    """CuPy makes its folder when it is imported (before 14, when it compiles). After that it goes, or can no longer be written
    (root may write anywhere, so a file stands in); compiling works all the same. No kernel of CuPy's own is needed, which fails.
    fa3's machine code is cupyflash's own to keep, which makes the folder again where it can.
    """
    if algorithm == "fa3" and (refused := fa3_refusal()):
        pytest.skip(refused)
    spoil = {"gone": "shutil.rmtree(folder)", "a file": "shutil.rmtree(folder); open(folder, 'w').close()"}[mode]
    kept = {
        "fa2": f"""(b"CUPY_CACHE_IN_MEMORY", b"1") in told or cupy.__version__ < "14" and {mode == "gone"}""",
        "fa3": f"os.path.isdir(folder) == {mode == 'gone'}",
    }[algorithm]
    code = f"""
import cupy, cupyflash, numpy, os, shutil
folder, told = os.environ["CUPY_CACHE_DIR"], []
sys.addaudithook(lambda event, values: told.append(values) if event == "os.putenv" else None)
q = cupy.asarray(numpy.ones((32, 64), numpy.float16))
os.makedirs(folder, exist_ok=True)
{spoil}
assert (cupy.asnumpy(cupyflash.attention(q, q, q, algorithm={algorithm!r})) == 1).all()
assert {kept}, "the cache was usable"
assert "CUPY_CACHE_IN_MEMORY" not in os.environ
"""
    in_a_process_of_its_own(code, CUPY_CACHE_DIR=str(tmp_path / "cache"))


def fa3_refusal() -> str | None:
    """The reason why this GPU does not run fa3."""
    return fa3_tiles.refusal(Problem(1, 1, 1, 32, 32, 64, "float16"), Device.current())


@pytest.mark.parametrize(
    "options",
    choose([{}, {"causal": True}, {"mask": True, "padded": True}, {"window": (3, 3)}, {"varlen": True}], [{"varlen": True}]),
)
def test_warmup_compiles_what_a_call_needs(options: dict[str, Any]) -> None:
    import cupy

    cupyflash.warmup(head_dim=88, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy, "RawModule", lambda **_: pytest.fail("something was compiled"))
        if options.get("varlen"):
            q, k, v, cu_q, cu_k = packed(SEQLENS, 1, 1, 88, 88)
            cupyflash.attention_varlen(*on_gpu(q, k, v), cu_q, cu_k)
            return
        shape = {name: value for name, value in options.items() if name != "padded"}
        problem = Problem(1, 1, 1, 64, 64, 88, "float16", **shape, padded="padded" in options)
        masks = draw_masks(problem)
        given = dict(zip(masks, on_gpu(*masks.values()), strict=True))
        cupyflash.attention(*on_gpu(*draw(problem)), **{**drawn(problem).keywords, **given})
