"""A mask whose tiles are found once, for many calls."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cupyflash.arrays import ArrayLayout, Held
from cupyflash.basics import Report, Values
from cupyflash.launch.binding import prepare
from cupyflash.launch.dispatch import as_array, as_integers, target
from cupyflash.launch.launcher import capturing, hold_for_graph
from cupyflash.launch.params import Params
from cupyflash.request.options import Options
from cupyflash.request.score import Mask, to_be_made
from cupyflash.schedules.base import Kernel, TileSchedule, attention_params
from cupyflash.schedules.mask_tiles import MaskTiles
from cupyflash.schedules.moves import Walk
from cupyflash.schedules.packed import Packed
from cupyflash.tiling import TileSize, Tiling


class TiledMask(Held):
    """`mask`, as it was given, with the states of its tiles (empty, mixed or whole), for calls of one shape of q and k, and with
    the same `bounds` by name for packed sequences.

    The first call that needs the states finds them, for each size of tiles, on that call's stream; other streams must wait for it,
    as for any array. A CUDA graph finds for itself the states that were not found before its capture, and reads the others: keep
    this object as long as the graph lives. The mask's values must not change.
    """

    def __init__(self, mask: Any, q: Any, k: Any, bounds: Values) -> None:
        self.mask = mask
        self.shapes = q.shape[:-1], k.shape[:-1]
        self.bounds = {name: array.copy() if isinstance(array, np.ndarray) else array for name, array in bounds.items()}
        self._found: dict[tuple[object, ...], Any] = {}

    def held(self) -> tuple[str, Values]:
        """The mask; the states of its tiles belong to each call."""
        return "tiled", {"mask": self.mask}

    def require(self, q: Any, k: Any, arrays: Values) -> None:
        """ValueError for arrays of other shapes, and for other bounds of sequences as far as the host can look at them."""
        if ("cu_seqlens_q" in arrays) != bool(self.bounds):
            other = "packed sequences" if self.bounds else "a call without packed sequences (cu_seqlens)"
            raise ValueError(f"mask is a block_mask for {other}, which this call is not")
        for name, mine in self.bounds.items():
            given, known = arrays[name], isinstance(mine, np.ndarray) and isinstance(arrays[name], np.ndarray)
            if mine.shape != given.shape or (known and not np.array_equal(mine, given)):
                raise ValueError(f"mask is a block_mask for another {name} than this call's")
        if (q.shape[:-1], k.shape[:-1]) != self.shapes:
            mine, given = ([(*shape, "d") for shape in shapes] for shapes in (self.shapes, (q.shape[:-1], k.shape[:-1])))
            raise ValueError(
                f"mask is a block_mask for q of shape {_text(mine[0])} and k {_text(mine[1])}, got {_text(given[0])} and "
                f"{_text(given[1])}"
            )

    def states(self, tiles: Iterable[MaskTiles], gpu: bool, arrays: Values) -> Report:
        """The states of some tiles, by the kernels' names for them; `arrays` are the call's, and its captured numbers."""
        found = {}
        for each in tiles:
            key = each.blocks, each.shape, sys.modules["cupy"].cuda.runtime.getDevice() if gpu else None
            states = self._found.get(key)
            if states is None:
                states = _find(each, gpu, arrays)
                if gpu and capturing():
                    hold_for_graph(states)
                else:
                    self._found[key] = states
            found[each.field] = states
        return found


def _text(shape: Iterable[object]) -> str:
    return f"({', '.join(map(str, shape))})"


def block_mask(mask: Any, q: Any, k: Any, cu_seqlens_q: Any | None = None, cu_seqlens_k: Any | None = None) -> TiledMask:
    """Find the tiles of a mask once: pass the result as `mask` to calls with q and k of these shapes.

    mask: a `Mask`, or an array of bool, as `attention` takes it. q, k: arrays of the calls' shapes; only the shapes matter.
    cu_seqlens_q, cu_seqlens_k: for `attention_varlen` and its backward, the bounds of the calls; those on a GPU are not compared
    with a call's, and must be the same.

    By tiles, a mask is empty, mixed or whole; each call finds these states anew, by a kernel that evaluates the mask for every
    score. With the result of this function only the first call does, or the first ones if calls have tiles of other sizes. The
    mask's values must not change. Raises TypeError for a wrong mask, and a call ValueError for other shapes.
    """
    if isinstance(mask, TiledMask):
        raise TypeError("mask is a block_mask already")
    bounds = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    there = {name: as_integers(name, array) for name, array in bounds.items() if array is not None}
    if len(there) == 1:
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must be given together, got {next(iter(there))} alone")
    if there:
        require_function(mask)
    given = mask if isinstance(mask, Mask) else as_array("mask", mask, " or a cupyflash.Mask")
    return TiledMask(given, as_array("q", q), as_array("k", k), there)


def require_function(mask: Any, others: str = "") -> None:
    """TypeError unless a mask is a function; `others` are words for the other kinds that the caller takes."""
    if not isinstance(mask, Mask):
        what = f"a cupyflash.Mask{others} here, which speaks of each sequence by itself"
        raise TypeError(f"mask must be {what}, got {type(mask).__name__}{to_be_made('mask', mask)}")


class Given(NamedTuple):
    """The mask of a call in its three forms: an array, a function, and the known states of its tiles."""

    array: Any | None
    function: Mask | None
    tiled: TiledMask | None

    @classmethod
    def of(cls, mask: Any, taken: str = "any") -> Given:
        """Return the mask of an argument. TypeError for a wrong mask, or one that the call does not take: "any", of "sequences" a
        function or a `block_mask` of one, or a "function"."""
        tiled = mask if isinstance(mask, TiledMask) and taken != "function" else None
        inner = mask if tiled is None else tiled.mask
        if inner is not None and not isinstance(inner, Mask) and taken != "any":
            if taken == "function":
                raise TypeError(f"mask must be a cupyflash.Mask or None, got {type(mask).__name__}{to_be_made('mask', mask)}")
            require_function(inner, " or a block_mask of one")
        if isinstance(inner, Mask) or inner is None:
            return cls(None, inner, tiled)
        others = ", a cupyflash.Mask or a block_mask"
        if words := to_be_made("mask", inner):
            raise TypeError(f"mask must be a NumPy or CuPy array{others}, got {type(inner).__name__}{words}")
        return cls(as_array("mask", inner, others), None, tiled)

    def asked(self, options: Options, arrays: Values) -> Options:
        """The options of a call with such a mask. ValueError for arrays of other shapes than its tiles were found for, or other
        bounds of sequences."""
        if self.tiled is not None:
            self.tiled.require(arrays["q"], arrays["k"], arrays)
        if self.function is None and self.tiled is None:
            return options
        form = None if self.function is None else self.function.form
        return replace(options, mask=form is None, mask_function=form, tiles_given=self.tiled is not None)


@dataclass(frozen=True)
class StatesSchedule(TileSchedule):
    """The schedule that finds the states of one size of tiles, and nothing else."""

    algorithm: ClassVar[str] = "mask"
    results: ClassVar[tuple[str, ...]] = ("tiles",)
    params: ClassVar[Params] = attention_params()

    packed: Packed | None = None

    @property
    def together(self) -> Packed | None:
        return self.packed

    @property
    def state_words(self) -> int:
        return 0

    def walks(self) -> Iterator[Walk]:
        return self.tile_walks(self.parts)

    def kernels(self) -> tuple[Kernel, ...]:
        return self.tile_kernels()


def _find(tiles: MaskTiles, gpu: bool, arrays: Values) -> Any:
    device, simulation = target(gpu)
    size = TileSize(*tiles.blocks, reason="of the calls")
    schedule = StatesSchedule(tiles.problem.asking(tiles_given=False), device, Tiling(size, size, size), packed=tiles.packed)
    made = {"tiles": ArrayLayout.contiguous(tiles.shape, "uint8")}
    return prepare(schedule, simulation, {**arrays, **made}, made).launch(arrays)["tiles"]
