"""Runs kernels on the GPU: on CuPy's current device and stream, with memory from its pool, without waits.

A warm call, in the order of this page: `read` looks at its arrays' layouts and its options, at no address and no element; `Kept`
has the launch that was prepared for these; `Ready` adds the call's own values, and `Prepared` fills the struct and launches. Calls
that are not prepared yet, and arguments whose values must be checked (NumPy's arrays, lists), go through `cupyflash.launch.cold`.
"""

from __future__ import annotations

import sys
from array import array as words_of
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupyflash.arrays import ArrayLayout, Held, address
from cupyflash.basics import Report, Shape, Values
from cupyflash.request.keywords import SCORE_ARRAYS, SCORE_NUMBERS, Keywords

if TYPE_CHECKING:
    from cupyflash.schedules import Kernel
    from cupyflash.schedules.mask_tiles import MaskTiles

# The kernels' names for the arrays of a call; the others have one name.
TENSORS = {"q": "Q", "k": "K", "v": "V", "out": "O", "lse": "L", "dout": "dO"} | {name: f"score_{name}" for name in SCORE_ARRAYS}
# Those of a call with a cache.
CACHED = {"k_cache": "K", "v_cache": "V", "k": "K_new", "v": "V_new"}
# Options whose value is all of them; others of a call are arrays, functions, tuples of these, or are looked at.
PLAIN = frozenset((bool, int, float, str, type(None), np.bool_, np.int32, np.int64, np.float32, np.float64))
# Numbers that each call brings; whether weights are dropped at all is another matter.
BROUGHT = frozenset(("seed", "offset", "dropout", *SCORE_NUMBERS))
Key = tuple[Any, ...]
# A call's arrays by the struct's names; numbers that are the struct's fields.
NO_NUMBERS: Values = {}
Arrays = dict[str, Any]
Numbers = dict[str, Any]


class PublicCall(NamedTuple):
    """One of the calls: its keywords, the preparation of a first one, and its results.

    `fields`: the struct's names for arrays of a call whose own names differ. `masks`: the kinds that it takes (`tiled_mask.Given`).
    """

    keywords: Keywords
    fields: Mapping[str, str]
    returned: Callable[[Values, Arrays, Report], Any]
    masks: str = "any"

    def __call__(self, given: Values) -> Any:
        """Makes a call: a warm one looks up and launches."""
        key, arrays = read(self, given)
        ready = KEPT.get(key)
        if ready is not None:
            return ready.launch(given, arrays)
        from cupyflash.launch import cold

        return cold.first(self, given)


def read(call: PublicCall, given: Values, looked_at: bool = False) -> tuple[Key | None, Arrays]:
    """(The key, the arrays) of a call. The key has everything that decides how it is prepared; None if a value must be checked
    first.

    `looked_at`: values have been checked. Then NumPy's arrays count among the others, by their layouts.
    """
    cupy = sys.modules.get("cupy")
    ndarray = cupy.ndarray if cupy else ()
    fields, known = call.fields, True
    arrays: Arrays = {}
    key: list[Any] = [call.keywords.call]
    items = list(given.items())
    for name, value in items:
        kind = type(value)
        if kind is ndarray:
            memory = value.data
            arrays[fields.get(name, name)] = value
            key += name, value.shape, value.strides, value.dtype, memory.ptr & 15, memory.device_id
        elif kind in PLAIN:
            key += name, kind, name == "dropout" and not value if name in BROUGHT else value
        elif issubclass(kind, tuple) and PLAIN.issuperset(map(type, value)):
            key += name, kind, value, tuple(map(type, value))  # True, 1 and 1.0 are one to a dictionary
        elif issubclass(kind, Held):
            form, more = value.held()
            key += name, kind, form
            items += more.items()
        elif not looked_at:
            return None, arrays
        elif isinstance(value, (np.ndarray, ndarray)):
            arrays[fields.get(name, name)] = value
            key += name, kind, value.shape, value.strides, value.dtype, address(value) % 16
        else:
            known = False
    return tuple(key) if known else None, arrays


class Kept(dict[Key | None, Any]):
    """The newest prepared calls. `prepared` counts them."""

    most = 1024

    def __init__(self) -> None:
        super().__init__()
        self.prepared = 0

    def keep(self, key: Key, made: Any) -> Any:
        while len(self) >= self.most:
            self.pop(next(iter(self)), None)
        self[key], self.prepared = made, self.prepared + 1
        return made


KEPT = Kept()


class Ready(NamedTuple):
    """A prepared call of some layouts and options: `steps` check or add each call's own values."""

    call: PublicCall
    prepared: Any
    steps: tuple[Callable[[Values, Arrays, Numbers], None], ...]
    device: int | None

    def launch(self, given: Values, arrays: Arrays) -> Any:
        """Launch on the current stream of the arrays' device, which becomes the current one. Returns the call's results."""
        if self.device is not None:
            cuda = sys.modules["cupy"].cuda
            if cuda.runtime.getDevice() != self.device:
                with cuda.Device(self.device):
                    return self.launch(given, arrays)
        numbers: Numbers = {}
        for step in self.steps:
            step(given, arrays, numbers)
        return self.call.returned(given, arrays, self.prepared.launch(arrays, numbers))


class Prepared:
    """Kernels to be launched one after another, all with one struct, in which the arrays' addresses are still to be set.

    `values` are the struct's, with arrays or layouts in place of addresses. It allocates `outputs` and `workspaces`, contiguous.
    Each launch has a struct of its own, so that threads may launch at once. `given_tiles`: the tiles whose states a launch is
    given.
    """

    def __init__(
        self,
        kernels: Sequence[Kernel],
        values: Values,
        outputs: Mapping[str, ArrayLayout] | None = None,
        workspaces: Mapping[str, ArrayLayout] | None = None,
        given_tiles: tuple[MaskTiles, ...] = (),
    ) -> None:
        from cupyflash.launch.driver import EncodedMap
        from cupyflash.launch.tensor_maps import MapPlan

        self.given_tiles = given_tiles
        self._dtype = kernels[0].params.dtype
        words, places = kernels[0].params.packed(values)
        self._template = words_of("Q", words.tobytes())
        self._maps = [
            (EncodedMap(values[name]), values[name].tensor, place)
            for name, place in places.items()
            if isinstance(values[name], MapPlan)
        ]
        made = (outputs or {}, workspaces or {})
        self._outputs, self._workspaces = ([(name, each.shape, each.dtype) for name, each in some.items()] for some in made)
        pointers = {name: place for name, place in places.items() if not isinstance(values[name], MapPlan)}
        self._made_places = [(name, pointers.pop(name)) for some in made for name in some if name in pointers]
        self._places = list(pointers.items())
        self._kernels = tuple(kernel for kernel in kernels if kernel.grid)

    @cached_property
    def _functions(self) -> list[tuple[Any, tuple[int], tuple[int], int]]:
        """The kernels, compiled at the first launch, since a call may still be refused for its arrays' device."""
        from cupyflash.launch.compiler import gpu_kernel

        device_id = sys.modules["cupy"].cuda.runtime.getDevice()
        found = [gpu_kernel(kernel, device_id) for kernel in self._kernels]
        return [(function, (kernel.grid,), (kernel.threads,), kernel.shared_bytes) for kernel, function in found]

    def compile(self) -> None:
        """Do everything that the first launch would do before it launches."""
        self._functions  # noqa: B018

    def launch(self, arrays: Values, numbers: Values = NO_NUMBERS) -> Report:
        """Launch on the current stream of the device that this was prepared for, and return the outputs, by name.

        `arrays` are the other arrays, by their names in the struct; `numbers` fields of it that are this call's own.
        """
        empty, words = sys.modules["cupy"].ndarray, self._template[:]
        made = every = {name: empty(shape, dtype) for name, shape, dtype in self._outputs}
        if self._workspaces:
            workspaces = {name: empty(shape, dtype) for name, shape, dtype in self._workspaces}
            every = made | workspaces
            hold_for_graph(workspaces)
        for name, place in self._made_places:
            words[place] = every[name].data.ptr
        for name, place in self._places:
            words[place] = arrays[name].data.ptr
        for encoded, name, place in self._maps:
            words[place : place + encoded.WORDS] = encoded.of((every if name in every else arrays)[name].data.ptr)
        struct: Any = np.ndarray((), self._dtype, words)[()]  # a view would be checked at length
        for name, number in numbers.items():
            struct[name] = number
        given = (struct,)
        for function, grid, block, shared_bytes in self._functions:
            function(grid, block, given, shared_mem=shared_bytes)
        return made


def refuse_copy(name: str) -> None:
    """ValueError while a CUDA graph is captured, which cannot hold a copy from the host."""
    if capturing():
        raise ValueError(
            f"{name} must be on the GPU while a CUDA graph is captured, since a copy from the host cannot be part of it: "
            f"pass cupy.asarray({name}, dtype=cupy.int32), made before the capture"
        )


def as_contiguous(gpu: bool, array: Any, dtype: type[np.generic]) -> Any:
    """Contiguous and of a dtype, on the device."""
    if not gpu:
        return np.ascontiguousarray(array, dtype)
    converted = sys.modules["cupy"].asarray(array, dtype, order="C")  # of the host's arrays too, which ascontiguousarray refuses
    if converted is not array:
        hold_for_graph(converted)
    return converted


def zeros(gpu: bool, shape: Shape, dtype: type[np.generic]) -> Any:
    """Zeros for kernels to add to. On a GPU they are set in stream order, so that a graph sets them at each replay."""
    if not gpu:
        return np.zeros(shape, dtype)
    made = sys.modules["cupy"].zeros(shape, dtype)
    hold_for_graph(made)
    return made


def capturing() -> bool:
    """True if CuPy's current stream captures a CUDA graph."""
    return bool(sys.modules["cupy"].cuda.get_current_stream().is_capturing())


def hold_for_graph(arrays: Any) -> None:
    """Keep arrays for good while a CUDA graph is captured.

    A graph replays with the addresses of its capture, so the memory pool must not give a captured call's own allocations to anyone
    else, and CuPy does not say when a graph is gone. The caller must keep the returned arrays.
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
