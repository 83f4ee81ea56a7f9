"""Runs kernels on the GPU: CuPy's current device and stream, memory from its pool, nothing waited for.

A call is prepared, then launched. What is prepared depends on the arrays' layouts and the call's options, on no address and no
element, so that it is kept: the next call of the same layouts and options only brings its arrays.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from cupyflash import driver
from cupyflash.arrays import Array, Layout, numpy_dtype
from cupyflash.binding import argument_values
from cupyflash.compiler import gpu_kernel
from cupyflash.options import check_key_lengths
from cupyflash.schedules import Kernel, TileSchedule
from cupyflash.schedules.mask_tiles import MaskTiles
from cupyflash.simulated import PreparedSimulation, Simulation
from cupyflash.tensor_maps import ALIGNMENT, TensorMap

# What all calls alike have
NO_NUMBERS: Mapping[str, Any] = {}
# What the kernels are given contiguous and of one type, whatever a call has
VECTORS: dict[str, type[np.generic]] = {
    "key_lengths": np.int32,
    "cu_seqlens_q": np.int32,
    "cu_seqlens_k": np.int32,
    "sinks": np.float32,
    "cache_seqlens": np.int32,
    "block_table": np.int32,
}


class Prepared:
    """Kernels to be launched one after another, all given one struct, in which the arrays' addresses are yet to be set.

    `values` are the struct's, with arrays or layouts in place of addresses. It makes `outputs` and `workspaces`, contiguous. Each
    launch has a struct of its own, so that threads may launch at once. `given_tiles`: of which a launch is given the states.
    """

    def __init__(
        self,
        kernels: Sequence[Kernel],
        values: Mapping[str, Any],
        outputs: Mapping[str, Layout] | None = None,
        workspaces: Mapping[str, Layout] | None = None,
        given_tiles: tuple[MaskTiles, ...] = (),
    ) -> None:
        self.given_tiles = given_tiles
        self._params = kernels[0].params
        words, places = self._params.packed(values)
        self._maps = [(8 * place, values[name]) for name, place in places.items() if isinstance(values[name], TensorMap)]
        self._places = {name: place for name, place in places.items() if not isinstance(values[name], TensorMap)}
        self._template = words, not self._maps  # and whether its maps are encoded
        self._kernels = tuple(kernel for kernel in kernels if kernel.grid)
        self._outputs, self._workspaces = outputs or {}, workspaces or {}

    @cached_property
    def _functions(self) -> list[tuple[Kernel, Any]]:
        """Compiled at the first launch, since a call may still be refused for where its arrays lie."""
        device_id = sys.modules["cupy"].cuda.runtime.getDevice()
        return [gpu_kernel(kernel, device_id) for kernel in self._kernels]

    def compile(self) -> None:
        """What else the first launch would do."""
        self._functions  # noqa: B018

    def launch(self, arrays: Mapping[str, Any], numbers: Mapping[str, Any] = NO_NUMBERS) -> dict[str, Any]:
        """Launch on the current stream of the device that this was prepared for, and return the outputs, by name.

        `arrays` are the other arrays, by their names in the struct; `numbers` fields of it that are this call's own.
        """
        empty = sys.modules["cupy"].empty
        outputs = {name: empty(made.shape, made.dtype) for name, made in self._outputs.items()}
        workspaces = {name: empty(made.shape, made.dtype) for name, made in self._workspaces.items()}
        if workspaces:
            hold_for_graph(workspaces)
        every = {**arrays, **outputs, **workspaces}
        struct = (np.ndarray((), self._params.dtype, self._words(every))[()],)  # a view would be checked at length
        for name, number in numbers.items():
            struct[0][name] = number
        for kernel, function in self._functions:
            function((kernel.grid,), (kernel.threads,), struct, shared_mem=kernel.shared_bytes)
        return outputs

    def _words(self, arrays: Mapping[str, Any]) -> np.ndarray:
        """The struct's words of one call. Tensor maps are encoded at the first one; later ones bring their addresses."""
        template, encoded = self._template
        if not self._maps:
            words = template.copy()
        else:
            words, start = aligned_copy(template)
            set_map = driver.replace_address if encoded else driver.encode
            for offset, tensor_map in self._maps:
                set_map(tensor_map, arrays[tensor_map.tensor].data.ptr, start + offset)
            if not encoded:
                self._template = words.copy(), True
        for name, place in self._places.items():
            words[place] = arrays[name].data.ptr
        return words


def aligned_copy(words: np.ndarray) -> tuple[np.ndarray, int]:
    """A copy of words of 8 bytes that lies where tensor maps may begin, and its address."""
    room: Any = (ctypes.c_uint64 * (len(words) + ALIGNMENT // 8))()  # its address costs a tenth of what that of NumPy's array does
    start = ctypes.addressof(room)
    skipped = -start % ALIGNMENT
    copy: np.ndarray = np.ndarray(words.shape, words.dtype, room, skipped)
    copy[:] = words
    return copy, start + skipped


def prepare(
    schedule: TileSchedule, simulation: Simulation | None, arrays: Mapping[str, Array], outputs: Mapping[str, Layout]
) -> Prepared | PreparedSimulation:
    """A schedule's kernels for arrays of such layouts, by the kernels' names, on the GPU or in a simulation.

    `outputs`, which are among the arrays, and the schedule's workspaces are made by each launch. ValueError when no kernel runs
    the schedule.
    """
    workspaces = {name: Layout.contiguous(space.shape, numpy_dtype(space.dtype)) for name, space in schedule.workspaces().items()}
    vectors = {name: Layout.contiguous(arrays[name].shape, kind) for name, kind in VECTORS.items() if arrays.get(name) is not None}
    kernels = schedule.kernels()  # refuses what no kernel runs
    tiles = {each.field: Layout.contiguous(each.shape, np.uint8) for each in schedule.given_tiles}
    values = argument_values(schedule, {**arrays, **vectors, **workspaces, **tiles})
    if simulation is None:
        return Prepared(kernels, values, outputs, workspaces, schedule.given_tiles)
    return PreparedSimulation(simulation, schedule, values, outputs, workspaces)


def kept(prepare: Callable[..., Any], gpu: bool, arrays: Mapping[str, Array], *options: Any) -> Any:
    """What `prepare(gpu, arrays, *options)` gives; for arrays on the current GPU it is kept for the next call.

    `prepare` is given the layouts of arrays on a GPU, and has to depend on nothing else. Options that cannot be hashed are
    prepared for anew, and so are NumPy arrays, whose contents may decide too. What `prepare` raises is not kept.
    """
    if not gpu:
        return prepare(gpu, arrays, *options)
    layouts = tuple([(name, Layout.of(array)) for name, array in arrays.items()])
    # True, 1 and 1.0 are one to a cache and may not be one to `prepare`.
    types = _types(options)
    look_up: Callable[..., Any] = _kept
    try:
        hash(options)
    except TypeError:
        look_up = _kept.__wrapped__
    return look_up(prepare, sys.modules["cupy"].cuda.runtime.getDevice(), layouts, options, types)


def _types(option: Any) -> object:
    return tuple([_types(part) for part in option]) if isinstance(option, tuple) else type(option)


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


def vectors_on_device(gpu: bool, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `VECTORS` among the arrays, as the kernels take them.

    ValueError while a CUDA graph is captured for NumPy's, whose copy cannot be part of the graph.
    """
    vectors = {name: arrays[name] for name in VECTORS if name in arrays}
    on_host = [name for name, array in vectors.items() if isinstance(array, np.ndarray)]
    if gpu and on_host and capturing():
        raise ValueError(
            f"{on_host[0]} must be on the GPU while a CUDA graph is captured, since a copy from the host cannot be part of it: "
            f"pass cupy.asarray({on_host[0]}, dtype=cupy.int32), made before the capture"
        )
    return {name: as_contiguous(gpu, array, VECTORS[name]) for name, array in vectors.items()}


def require_lengths(gpu: bool, arrays: Mapping[str, Any]) -> None:
    """ValueError for `key_lengths` on the host, of arrays on a GPU, that are longer than k."""
    lengths = arrays.get("key_lengths")
    if gpu and isinstance(lengths, np.ndarray):
        check_key_lengths(lengths.tolist(), len(lengths), arrays["k"].shape[-2])


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
