"""Host time of calls without a GPU:  python benchmarks/host.py [--runs N]

The arrays are CuPy's own, at addresses that nobody reads, and so is `cupy.empty`, but for where its memory comes from. Device
(an H100), stream, kernels and what makes tensor maps are stand-ins that do nothing: what is left out is the driver (and CuPy's
memory pool). `forward.py` times the
whole call where there is a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import timeit
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

from checkout import environment

# isort: split
import cupy
import numpy as np
from cupy.cuda import function

from cupyflash.basics import Shape

DEVICES, HEAD_DIMS = ("A100-40GB", "H100-SXM"), (64, 128)
SHAPE = (4, 16, 1024, 64)
CACHE, PAGES = (8, 8, 4096, 128), (2048, 8, 16, 128)
CALLS = 200  # in a run, of which the fastest counts: other processes lengthen many, not all
GIB = 1 << 30


def memory(size: int, address: int = GIB) -> cupy.cuda.MemoryPointer:
    """A stand-in for memory of GPU 0."""
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, size, None, 0), 0)


def array(number: int, shape: Shape = SHAPE, dtype: Any = np.float16) -> cupy.ndarray:
    """One of several arrays that do not overlap."""
    return cupy.ndarray(shape, dtype, memptr=memory(GIB, (2 + number) * GIB))


class Idle:
    """A kernel that does nothing but keep its last arguments."""

    arguments: tuple[Any, ...] = ()
    max_dynamic_shared_size_bytes = local_size_bytes = 0

    def __call__(self, grid: Shape, block: Shape, arguments: tuple[Any, ...], *, shared_mem: int) -> None:
        self.arguments = arguments


class WithoutGpu(types.ModuleType):
    """CuPy less what needs a driver: one device, one stream, one idle kernel."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.kernel = Idle()
        self.ndarray, self.empty = cupy.ndarray, cupy.empty
        self.ascontiguousarray = lambda array, dtype: array
        self.RawModule = lambda **_: types.SimpleNamespace(compile=lambda: None, get_function=lambda name: self.kernel)
        stream = types.SimpleNamespace(is_capturing=lambda: False)
        runtime = types.SimpleNamespace(getDevice=lambda: 0)
        self.cuda = types.SimpleNamespace(runtime=runtime, Device=nullcontext, get_current_stream=lambda: stream)


def without_gpu() -> WithoutGpu:
    """Put this stand-in in CuPy's place, and an H100 in the current GPU's, for all further calls of cupyflash."""
    from cupyflash import Device
    from cupyflash.launch import cubins, dispatch, driver

    cupy.cuda.set_allocator(memory)
    sys.modules["cupy"] = stand_in = WithoutGpu()
    device = Device.named("H100-SXM")
    dispatch.current_gpu = lambda ordinal: device
    cubins.function = lambda program, name: (stand_in.kernel, ())
    driver.functions = lambda: driver.Functions(lambda *map: 0, lambda *map: 0)
    return stand_in


def microseconds(call: Callable[[], Any], runs: int) -> float:
    call()
    return min(timeit.repeat(call, number=CALLS, repeat=runs)) / CALLS * 1e6


def warm(runs: int) -> Iterator[str]:
    """Calls that were made before, and what of them is CuPy's allocation."""
    from cupyflash import Score, attention, attention_backward, attention_decode, attention_varlen

    q, k, v, out = (array(number) for number in range(4))
    packed = [array(number, (4096, 16, 64)) for number in range(3)]
    bounds = [array(4 + number, (5,), np.int32) for number in range(2)]
    slopes, line = array(6, (SHAPE[1],), np.float32), "s + slope[h] * (k - q)"
    score = Score(line, slope=slopes)
    rows, lse = [array(number) for number in range(5)], array(6, SHAPE[:-1], np.float32)
    cached, pages = ([array(7, (8, 32, 1, 128)), *(array(number, shape) for number in (8, 9))] for shape in (CACHE, PAGES))
    new = {name: array(number, (8, 8, 1, 128)) for name, number in (("k", 10), ("v", 11))}
    written = array(14, (8, 32, 1, 128))
    lengths, table = array(12, (8,), np.int32), array(13, (8, 256), np.int32)
    yield f"{'a warm call, us of the host':<34}{'all':>7}"
    for name, call in {
        "causal": lambda: attention(q, k, v, causal=True),
        "causal, out given": lambda: attention(q, k, v, causal=True, out=out),
        "fa2, causal": lambda: attention(q, k, v, causal=True, algorithm="fa2"),
        "causal, with log-sum-exp": lambda: attention(q, k, v, causal=True, return_lse=True),
        "fa2, causal, softcap": lambda: attention(q, k, v, causal=True, algorithm="fa2", softcap=30.0),
        "fa2, causal, alibi_slopes": lambda: attention(q, k, v, causal=True, algorithm="fa2", alibi_slopes=slopes),
        "fa2, causal, Score(...)": lambda: attention(q, k, v, causal=True, algorithm="fa2", score=Score(line, slope=slopes)),
        "fa2, causal, the same Score": lambda: attention(q, k, v, causal=True, algorithm="fa2", score=score),
        "fa1, causal": lambda: attention(q, k, v, causal=True, algorithm="fa1"),
        "backward, causal": lambda: attention_backward(*rows, lse, causal=True),
        "decode": lambda: attention_decode(*cached, lengths),
        "decode, append": lambda: attention_decode(*cached, lengths, **new),
        "paged, append, out given": lambda: attention_decode(*pages, lengths, **new, block_table=table, out=written),
        "varlen, causal": lambda: attention_varlen(*packed, *bounds, 1024, 1024, causal=True),
        "cupy.empty alone": lambda: cupy.empty(SHAPE, np.float16),
    }.items():
        yield f"{name:<34}{microseconds(call, runs):>7.1f}"


def arguments(stand_in: WithoutGpu, runs: int) -> str:
    """The time in which CuPy converts a kernel's arguments, before it calls the driver: here that call fails, and its time is
    subtracted."""
    from cupyflash import attention

    attention(*(array(number) for number in range(3)))
    kernel, stream = function.Function.__new__(function.Function), types.SimpleNamespace(ptr=0)

    def launch(given: tuple[Any, ...]) -> float:
        def call() -> None:
            with suppress(RuntimeError):  # CUDA's
                kernel((1,), (1,), given, stream=stream)

        return microseconds(call, runs)

    converted = stand_in.kernel.arguments
    (struct,) = converted
    return f"CuPy {cupy.__version__}'s conversion of a struct of {struct.nbytes} bytes: {launch(converted) - launch(()):.1f} us"


def cold() -> Iterator[str]:
    """NVRTC's time for the kernels of plain calls, to machine code."""
    from cupyflash import Device, Problem, plan
    from cupyflash.launch import cubins
    from cupyflash.launch.compiler import program

    for name in DEVICES:
        for d in HEAD_DIMS:
            device = Device.named(name)
            (kernel,) = plan(Problem(4, 16, 16, 1024, 1024, d, "float16"), device).kernels()
            start = time.perf_counter()
            cubins.compiled(program(kernel, device.compute_capability))
            yield f"compiling for {device.sm}, d {d}: {time.perf_counter() - start:.2f} s"


def first_call() -> dict[str, float]:
    """Milliseconds, in a new process: importing cupyflash behind CuPy, and all of a first call but CuPy's and the driver's part."""
    start = time.perf_counter()
    import cupyflash

    imported = time.perf_counter()
    without_gpu()
    arrays = [array(number) for number in range(3)]
    begin = time.perf_counter()
    cupyflash.attention(*arrays)
    return {"import": (imported - start) * 1e3, "first_call": (time.perf_counter() - begin) * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300, help=f"runs of {CALLS} calls")
    parser.add_argument("--first-call", action="store_true", help="only print a first call's milliseconds as JSON")
    given = parser.parse_args()
    if given.first_call:
        print(json.dumps(first_call()))
        return
    command = [sys.executable, __file__, "--first-call"]
    told = [subprocess.run(command, env=environment(), capture_output=True, check=True) for _ in range(3)]
    first = min((json.loads(each.stdout) for each in told), key=lambda each: sum(each.values()))
    for line in cold():
        print(line)
    print(f"in a new process: importing cupyflash {first['import']:.0f} ms, a first call {first['first_call']:.0f} ms")
    stand_in = without_gpu()
    for line in warm(given.runs):
        print(line)
    print(arguments(stand_in, given.runs))


if __name__ == "__main__":
    main()
