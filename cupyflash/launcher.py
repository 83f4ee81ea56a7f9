"""Runs kernels on the GPU: CuPy's current device and stream, memory from its pool, nothing waited for.

A call is prepared, then launched. What is prepared depends on the arrays' layouts and the call's options, on no address and no
element, so that it is kept: the next call of the same layouts and options only brings its arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from cupyflash.binding import Masks, argument_values, gradient_values, kernel_arguments
from cupyflash.compiler import gpu_function
from cupyflash.problem import Array, Layout, check_key_lengths, numpy_dtype
from cupyflash.schedules import BackwardSchedule, Kernel, TileSchedule
from cupyflash.simulated import PreparedSimulation, Simulation

NULL = np.uint64(0)


class Prepared:
    """Kernels to be launched one after another, with all their arguments but the arrays.

    `values` has a value for each parameter name of `kernels`: a scalar of the kernel's own type, None for a null pointer, or
    anything else for an array that each launch is given or makes. It makes `outputs` and `workspaces`, contiguous.
    """

    def __init__(
        self,
        kernels: Sequence[Kernel],
        values: Mapping[str, Any],
        outputs: Mapping[str, Layout] | None = None,
        workspaces: Mapping[str, Layout] | None = None,
    ) -> None:
        self._kernels = tuple(kernel for kernel in kernels if kernel.grid)
        self._arguments = [_template(kernel, values) for kernel in self._kernels]
        self._outputs, self._workspaces = outputs or {}, workspaces or {}

    @cached_property
    def _functions(self) -> list[Any]:
        """Compiled at the first launch, since a call may still be refused for where its arrays lie."""
        device_id = sys.modules["cupy"].cuda.runtime.getDevice()
        return [gpu_function(kernel, device_id) for kernel in self._kernels]

    def launch(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Launch on the current stream of the device that this was prepared for, and return the outputs, by name.

        `arrays` are the other arrays, by the names of the kernels' parameters.
        """
        empty = sys.modules["cupy"].empty
        outputs = {name: empty(made.shape, made.dtype) for name, made in self._outputs.items()}
        workspaces = {name: empty(made.shape, made.dtype) for name, made in self._workspaces.items()}
        if workspaces:
            hold_for_graph(workspaces)
        every = {**arrays, **outputs, **workspaces}
        for kernel, function, (template, places) in zip(self._kernels, self._functions, self._arguments, strict=True):
            arguments = template.copy()
            for place, name in places:
                arguments[place] = every[name]
            function((kernel.grid,), (kernel.threads,), tuple(arguments), shared_mem=kernel.shared_bytes)
        return outputs


def _template(kernel: Kernel, values: Mapping[str, Any]) -> tuple[list[Any], tuple[tuple[int, str], ...]]:
    """A kernel's arguments in order, and the places and names of those that are arrays."""
    arguments = kernel_arguments(kernel, values)
    template = [NULL if value is None else value for value in arguments.values()]
    named = enumerate(zip(arguments, template, strict=True))
    return template, tuple((place, name) for place, (name, value) in named if not isinstance(value, np.generic))


def prepare_attention(
    schedule: TileSchedule,
    simulation: Simulation | None,
    tensors: Sequence[Array],
    masks: Masks,
    outputs: Mapping[str, Layout],
) -> Prepared | PreparedSimulation:
    """A schedule's kernels for such `tensors` (Q, K, V, O) and `masks`, on the GPU or in a simulation.

    `outputs` are to be made, and L where the schedule has it. ValueError when no kernel runs the schedule.
    """
    q, k, v, out = tensors
    lse = Layout.contiguous(q.shape[:-1], np.float32) if schedule.lse else None
    workspaces = _layouts(schedule)
    values = argument_values(schedule, q, k, v, out, lse, workspaces, masks)
    return _prepared(schedule, simulation, values, {**outputs, "L": lse} if lse else outputs, workspaces)


def prepare_gradients(
    schedule: BackwardSchedule,
    simulation: Simulation | None,
    tensors: Mapping[str, Array | None],
    masks: Masks,
    outputs: Mapping[str, Layout],
) -> Prepared | PreparedSimulation:
    """The same for a backward pass; `tensors` as for `gradient_values`."""
    workspaces = _layouts(schedule)
    values = gradient_values(schedule, tensors, workspaces, masks)
    return _prepared(schedule, simulation, values, outputs, workspaces)


def _layouts(schedule: TileSchedule) -> dict[str, Layout]:
    """Of a schedule's workspaces."""
    return {name: Layout.contiguous(space.shape, numpy_dtype(space.dtype)) for name, space in schedule.workspaces().items()}


def _prepared(
    schedule: TileSchedule,
    simulation: Simulation | None,
    values: Mapping[str, Any],
    outputs: Mapping[str, Layout],
    workspaces: Mapping[str, Layout],
) -> Prepared | PreparedSimulation:
    kernels = schedule.kernels()  # refuses what no kernel runs
    if simulation is None:
        return Prepared(kernels, values, outputs, workspaces)
    return PreparedSimulation(simulation, schedule, values, outputs, workspaces)


def prepared(prepare: Callable[..., Any], gpu: bool, arrays: Mapping[str, Array], *options: Any) -> Any:
    """What `prepare(gpu, arrays, *options)` gives; for arrays on the current GPU it is kept for the next call.

    `prepare` is given the layouts of arrays on a GPU, and has to depend on nothing else. Options that cannot be hashed are
    prepared for anew, and so are NumPy arrays, whose contents may decide too. What `prepare` raises is not kept.
    """
    if not gpu:
        return prepare(gpu, arrays, *options)
    layouts = tuple([(name, Layout.of(array)) for name, array in arrays.items()])
    # True, 1 and 1.0 are one to a cache and may not be one to `prepare`.
    types = tuple([tuple(map(type, option)) if isinstance(option, tuple) else type(option) for option in options])
    look_up: Callable[..., Any] = _kept
    try:
        hash(options)
    except TypeError:
        look_up = _kept.__wrapped__
    return look_up(prepare, sys.modules["cupy"].cuda.runtime.getDevice(), layouts, options, types)


@lru_cache(maxsize=1024)
def _kept(
    prepare: Callable[..., Any], device_id: int, layouts: tuple[tuple[str, Layout], ...], options: tuple[Any, ...], types: object
) -> Any:
    return prepare(True, dict(layouts), *options)


def as_contiguous(gpu: bool, array: Any, dtype: type[np.generic]) -> Any:
    """Contiguous and of a dtype, on the device."""
    if not gpu:
        return np.ascontiguousarray(array, dtype)
    converted = sys.modules["cupy"].ascontiguousarray(array, dtype)
    if converted is not array:
        hold_for_graph(converted)
    return converted


def integers_on_device(gpu: bool, integers: Mapping[str, Any]) -> dict[str, Any]:
    """Integers as the kernels take them, contiguous and of int32.

    ValueError while a CUDA graph is captured for NumPy's, whose copy cannot be part of the graph.
    """
    on_host = [name for name, array in integers.items() if isinstance(array, np.ndarray)]
    if gpu and on_host and capturing():
        raise ValueError(
            f"{on_host[0]} must be on the GPU while a CUDA graph is captured, since a copy from the host cannot be part of it: "
            f"pass cupy.asarray({on_host[0]}, dtype=cupy.int32), made before the capture"
        )
    return {name: as_contiguous(gpu, array, np.int32) for name, array in integers.items()}


def lengths_on_device(gpu: bool, lengths: Mapping[str, Any], keys: int) -> dict[str, Any]:
    """The same of `key_lengths`, if given; NumPy's, of arrays on a GPU, are looked at first: ValueError above `keys`."""
    for array in lengths.values():
        if gpu and isinstance(array, np.ndarray):
            check_key_lengths(array.tolist(), len(array), keys)
    return integers_on_device(gpu, lengths)


def zeros(gpu: bool, shape: tuple[int, ...], dtype: type[np.generic]) -> Any:
    """Zeros for kernels to add to. On a GPU they are set in stream order, so that a graph sets them at each replay."""
    if not gpu:
        return np.zeros(shape, dtype)
    made = sys.modules["cupy"].zeros(shape, dtype)
    hold_for_graph(made)
    return made


def capturing() -> bool:
    """Whether CuPy's current stream captures a CUDA graph."""
    return bool(sys.modules["cupy"].cuda.get_current_stream().is_capturing())


def hold_for_graph(arrays: Any) -> None:
    """While a CUDA graph is captured, keep arrays for good.

    A graph replays with the addresses that it was captured with, so the memory pool must not hand what a captured call
    allocated for itself to anyone else, and CuPy does not say when a graph is gone. What a call returns is its caller's to keep.
    """
    if capturing():
        _held_for_graphs.append(arrays)


@contextmanager
def held_for_graph(gpu: bool) -> Iterator[None]:
    """The same for all that CuPy's own functions allocate in this context, temporaries too."""
    if not gpu or not capturing():
        yield
        return
    cuda = sys.modules["cupy"].cuda
    allocate = cuda.get_allocator()

    def hold(size: int) -> Any:
        memory = allocate(size)
        _held_for_graphs.append(memory)
        return memory

    with cuda.using_allocator(hold):
        yield


_held_for_graphs: list[Any] = []
