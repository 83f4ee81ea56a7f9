"""Cuts arrays into ranks' parts, and joins them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.arrays import is_number
from cupyflash.basics import Report
from cupyflash.distributed.agreement import require_alike, shown, together
from cupyflash.distributed.communicator import Communicator, as_communicator, taking_part
from cupyflash.distributed.layout import Part, parts, placed
from cupyflash.distributed.opening import require_parts
from cupyflash.distributed.streams import array_module
from cupyflash.launch.dispatch import as_array, device_of, on_gpu


def shard(x: Any, comm: Any, layout: str = "zigzag", axis: int = -2) -> Any:
    """Return this rank's part of an array that all ranks have whole: the positions that `parts` lists, along `axis`; a copy.

    Nothing is sent. Raises TypeError or ValueError for a wrong array, layout or axis.
    """
    array, at = _checked(x, axis)
    communicator = as_communicator(comm)
    part = parts(array.shape[at], communicator.size, layout)[communicator.rank]
    before = (slice(None),) * at
    with device_of(on_gpu(x=array), x=array):
        return _module(array).concatenate([array[*before, slice(chunk.start, chunk.stop)] for chunk in part], axis=at)


def unshard(x: Any, comm: Any, layout: str = "zigzag", axis: int = -2) -> Any:
    """Return the whole array, on each rank, from the parts that `shard` cut: each rank gives its own.

    A mistake on one rank is a ValueError on all, before anything is sent.
    """
    communicator = as_communicator(comm)
    with taking_part(communicator):
        return _joined(x, communicator, layout, axis)


def _joined(x: Any, communicator: Communicator, layout: str, axis: int) -> Any:
    def check() -> tuple[Any, int]:
        array, at = _checked(x, axis)
        parts(0, communicator.size, layout)
        return array, at

    def say(checked: tuple[Any, int]) -> Report:
        array, at = checked
        kind = "NumPy's" if isinstance(array, np.ndarray) else "CuPy's"
        alike = {"the call": "unshard", "layout": layout, "axis": str(at), "arrays": kind, "x": shown(array, at)}
        return {"alike": alike, "length": array.shape[at]}

    (array, at), told = together(communicator, check, say)
    require_alike([each["alike"] for each in told])
    lengths = [each["length"] for each in told]
    require_parts("x", lengths, layout)
    rank, size, xp = communicator.rank, communicator.size, _module(array)
    with device_of(on_gpu(x=array), x=array):
        whole = xp.empty((*array.shape[:at], sum(lengths), *array.shape[at + 1 :]), array.dtype)
        own, places = xp.ascontiguousarray(array), parts(sum(lengths), size, layout)
        _put(whole, own, places[rank], at)
        for shift in range(1, size):
            source = (rank - shift) % size
            coming = xp.empty((*array.shape[:at], lengths[source], *array.shape[at + 1 :]), array.dtype)
            communicator.exchange([own], (rank + shift) % size, [coming], source).wait()
            _put(whole, coming, places[source], at)
    return whole


def _put(whole: Any, array: Any, part: Part, axis: int) -> None:
    before = (slice(None),) * axis
    for chunk in placed(part):
        whole[*before, chunk.there] = array[*before, chunk.here]


def _module(array: Any) -> Any:
    return array_module(not isinstance(array, np.ndarray))


def _checked(x: Any, axis: Any) -> tuple[Any, int]:
    """The array, and its axis from 0 on."""
    array = as_array("x", x)
    if array.dtype.hasobject:
        raise TypeError(f"x must be of numbers or other plain bytes, got dtype {array.dtype}")
    if not is_number(axis):
        raise TypeError(f"axis must be an integer, got {axis!r}")
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(f"axis must be between {-array.ndim} and {array.ndim - 1} for shape {array.shape}, got {axis}")
    return array, int(axis) % array.ndim
