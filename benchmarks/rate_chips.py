"""The device of rates.py: the GPU at hand through CuPy alone, or the PTX machine, on which every line is rehearsed."""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from checkout import ROOT

# isort: split
from machine import Nvml, stand_in
from rate_steps import Timed

from cupyflash import Device
from cupyflash.basics import Array, Report, Shape
from cupyflash.launch import cubins

REPEATS, STEPS, TURNS = 5, 128, (4, 20)
HOPPER = (9, 0)


def span(stamps: Array) -> float:
    """The clocks from the first warp's begin to the last one's end; stamps: (warps, 2)."""
    return float(stamps[:, 1].max() - stamps[:, 0].min())


Launch = Callable[..., None]


class Chip(ABC):
    """A device on which kernels are launched. `repeats`, `steps` and `turns` of a loop: few where nothing is measured."""

    device: Device
    simulated: bool
    repeats, steps, turns = REPEATS, STEPS, TURNS

    @abstractmethod
    def load(self, source: str) -> Callable[[str], Launch]:
        """Compiles CUDA C; gives the function from a kernel's name to its launch by (grid, block, args, shared bytes)."""

    @abstractmethod
    def zeros(self, size: int) -> Any:
        """An array of bytes, zero."""

    @abstractmethod
    def put(self, array: Array) -> Any: ...

    @abstractmethod
    def get(self, array: Any) -> Array: ...

    @abstractmethod
    def seconds(self, call: Callable[[], Any], before: Callable[[], Any]) -> float:
        """The device's seconds for what `call` queues, behind what `before` does: it keeps the device busy until all is queued."""

    @abstractmethod
    def graph(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The launch of a graph of what `call` queues."""

    def size(self, whole: int, least: int) -> int:
        """A size on a GPU, and where nothing is measured."""
        return least if self.simulated else whole

    @property
    def options(self) -> tuple[str, ...]:
        major, minor = self.device.compute_capability
        suffix = "a" if (major, minor) == HOPPER else ""
        return f"-arch=sm_{major}{minor}{suffix}", f"-DHOPPER={int((major, minor) == HOPPER)}"

    @cached_property
    def kernels(self) -> Callable[[str], Launch]:
        """The kernels of rates.cu."""
        return self.load((ROOT / "benchmarks" / "rates.cu").read_text())

    def out(self, count: int) -> Any:
        """An array of 64-bit numbers."""
        return self.put(np.zeros(count, np.int64))

    def mhz(self, clocks: int, blocks: int = 1, threads: int = 1) -> float:
        """The clock rate while a kernel runs for so many clocks."""
        out = self.out(2)
        self.kernels("busy")((self.size(blocks, 1),), (self.size(threads, 1),), (out, np.int64(self.size(clocks, 1))))
        took, nanoseconds = self.get(out)
        return 1e3 * float(took) / max(1.0, float(nanoseconds))

    def busy(self, clocks: int) -> Callable[[], Any]:
        """The launch of a kernel that takes so many clocks."""
        return partial(self.kernels("busy"), (1,), (1,), (self.out(2), np.int64(self.size(clocks, 1))))

    def stamps(self, launch: Launch, timed: Timed, threads: int, blocks: int, turns: int) -> Array:
        """The begin and end of each warp of a repeated instruction."""
        warps = blocks * -(-threads // 32)
        out, cells = self.out(2 * warps), self.zeros(16 * 1024)
        values = self.put(np.array(timed.values, np.uint64))
        launch((blocks,), (threads,), (cells, values, out, self.zeros(8 * 1024), np.int32(turns)))
        return self.get(out).reshape(warps, 2)

    def per_turn(self, clocks: Callable[[int], float], turns: tuple[int, int]) -> list[float]:
        """Clocks of a turn, over repeats: what a long loop takes more than a short one, by the difference of their turns."""
        short, long = turns
        clocks(long)  # into the caches
        found = [(clocks(short), clocks(long)) for _ in range(self.repeats)]
        return [(last - first) / (long - short) for first, last in found]

    def per_step(self, launch: Launch, timed: Timed, threads: int = 32, blocks: int = 1) -> list[float]:
        """Clocks of a step of all chains, over repeats."""
        clocks = self.per_turn(lambda turns: span(self.stamps(launch, timed, threads, blocks, turns)), self.turns)
        return [each / timed.steps for each in clocks]


class Gpu(Chip):
    """The current CUDA device, on a stream of its own."""

    simulated = False

    def __init__(self) -> None:
        import cupy

        self.cupy, self.device = cupy, Device.current()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self._events = cupy.cuda.Event(), cupy.cuda.Event()

    def load(self, source: str) -> Callable[[str], Launch]:
        architecture, *options = self.options
        program = cubins.Program(source, "rates.cu", tuple(options), architecture.removeprefix("-arch=sm_"))
        with tempfile.TemporaryDirectory() as folder:  # CuPy keeps a module by its path: each has its own
            path = Path(folder) / "rates.cubin"
            path.write_bytes(cubins.compiled(program).code)
            module = self.cupy.RawModule(path=str(path))
            module.compile()

        @cache
        def launch(name: str) -> Launch:
            function = module.get_function(name)

            def call(grid: Shape, block: Shape, args: tuple[Any, ...], shared: int = 0) -> None:
                if shared > 48 * 1024:
                    function.max_dynamic_shared_size_bytes = shared
                function(grid, block, args, shared_mem=shared)

            return call

        return launch

    def zeros(self, size: int) -> Any:
        return self.cupy.zeros(size, np.uint8)

    def put(self, array: Array) -> Any:
        return self.cupy.asarray(array)

    def get(self, array: Any) -> Array:
        return array.get()  # type: ignore[no-any-return]

    def seconds(self, call: Callable[[], Any], before: Callable[[], Any]) -> float:
        start, end = self._events
        before()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(start, end)) / 1e3

    def graph(self, call: Callable[[], Any]) -> Callable[[], Any]:
        self.stream.begin_capture()
        call()
        graph = self.stream.end_capture()
        return lambda: graph.launch(self.stream)

    def check(self) -> None:
        """Raises where the device does not answer any more."""
        self.stream.synchronize()

    def clocks(self) -> Report:
        return Nvml(self.cupy.cuda.Device().pci_bus_id).read()


class Simulated(Chip):
    """The PTX machine, which has no clocks: figures of no meaning, every line run."""

    simulated = True
    repeats, steps, turns = 1, 4, (1, 2)

    def __init__(self) -> None:
        self.device = stand_in()

    def load(self, source: str) -> Callable[[str], Launch]:
        from cupyflash.sim import ptx

        architecture, *others = self.options
        with ptx.simulation(arch=architecture.removeprefix("-arch=")):
            module = ptx.RawModule(code=source, options=tuple(others))
            module.compile()

        def launch(name: str) -> Launch:
            def call(grid: Shape, block: Shape, args: tuple[Any, ...], shared: int = 0) -> None:
                with ptx.simulation(arch=architecture.removeprefix("-arch="), findings="keep", races=False) as launches:
                    function = module.get_function(name)
                    if shared > 48 * 1024:
                        function.max_dynamic_shared_size_bytes = shared
                    function(grid, block, args, shared_mem=shared)
                if faults := [each for launched in launches for each in launched.findings]:
                    raise RuntimeError(f"{name}: {faults[0]}")

            return call

        return launch

    def zeros(self, size: int) -> Any:
        return np.zeros(size, np.uint8)

    def put(self, array: Array) -> Any:
        return array

    def get(self, array: Any) -> Array:
        return np.asarray(array)

    def seconds(self, call: Callable[[], Any], before: Callable[[], Any]) -> float:
        before()
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun

    def graph(self, call: Callable[[], Any]) -> Callable[[], Any]:
        return call

    def check(self) -> None:
        pass

    def clocks(self) -> Report:
        return {}
