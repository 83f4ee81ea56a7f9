"""What a call over ranks asks for besides q, k and v, and the ordinary calls that one of its pieces is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from cupyflash.attention import prepare_forward
from cupyflash.binding import by_tensor
from cupyflash.distributed.plan import Piece, RingPlan, plan_ring
from cupyflash.distributed.positions import by_position, numbers_of_part, of_part
from cupyflash.dropout import KEY_GROUP, ROW_GROUP, Dropout
from cupyflash.gradients import Ways, prepare_backward, readable, rows_beside
from cupyflash.launcher import Prepared, kept
from cupyflash.options import Band, Options, Window
from cupyflash.score import Form, Mask, Numbers, Score, as_given, captured_values, field, of_mask
from cupyflash.simulated import PreparedSimulation


@dataclass(frozen=True)
class Asked:
    """The options of a call over ranks, checked. `captured` are the arrays of its functions, by the kernels' names."""

    causal: bool
    window: Window | None
    scale: float | None
    layout: str
    gather: bool
    score: Score | None
    mask: Mask | None
    dropout: Dropout | None
    deterministic: bool = False

    @cached_property
    def captured(self) -> tuple[dict[str, Any], Numbers]:
        return captured_values(self.score, self.mask)

    @property
    def functions(self) -> tuple[Score | Mask, ...]:
        return tuple(each for each in (self.score, self.mask) if each is not None)

    @property
    def by_position(self) -> bool:
        """Whether anything is said of a score's position but what causal mask and window say."""
        return self.dropout is not None or any(by_position(each.form) for each in self.functions)

    def plan(self, n_q: int, n_k: int, ranks: int) -> RingPlan:
        return plan_ring(n_q, n_k, ranks, self.layout, self.causal, self.window, self.gather, self.by_position)

    @property
    def text(self) -> dict[str, str]:
        """All of it, for other ranks to compare."""
        said = {name: str(getattr(self, name)) for name in ("causal", "window", "scale", "layout", "deterministic")}
        said |= {"gather_kv": str(self.gather), "score": _text(self.score), "mask": _text(self.mask)}
        dropped = self.dropout
        named = {"dropout": None, "seed": None, "offset": None} if dropped is None else vars(dropped) | {"dropout": dropped.p}
        return said | {name: str(named[name]) for name in ("dropout", "seed", "offset")}


def _text(function: Score | Mask | None) -> str:
    if function is None:
        return "None"
    arrays = {name: f"{array.dtype} {array.shape}" for name, array in function.arrays.items()}
    values = ", ".join(f"{name}={value}" for name, value in sorted((arrays | function.numbers).items()))
    return f"{type(function).__name__}({function.text!r}{', ' if values else ''}{values})"


class Stretch(Protocol):
    """What a call of some rows against some keys has of a `Piece`."""

    @property
    def rows(self) -> range: ...
    @property
    def keys(self) -> range: ...
    @property
    def row(self) -> int: ...
    @property
    def key(self) -> int: ...
    @property
    def causal(self) -> bool: ...
    @property
    def window(self) -> Window | None: ...


@dataclass(frozen=True)
class PieceCalls:
    """The pieces of a plan as calls on this machine: `gpu` or the simulated device."""

    asked: Asked
    plan: RingPlan
    gpu: bool

    def aligned(self, piece: Stretch) -> Stretch:
        """A piece that begins where dropout's generator may be cut. The rows and keys before see nothing, for their position."""
        before = piece.row % ROW_GROUP, piece.key % KEY_GROUP
        if self.asked.dropout is None or before == (0, 0):
            return piece
        n_q, n_k, (left, right) = self.plan.n_q, self.plan.n_k, self.plan.reach
        rows, keys = (range(each.start - more, each.stop) for each, more in zip((piece.rows, piece.keys), before, strict=True))
        row, key = piece.row - before[0], piece.key - before[1]
        beyond = (row + len(rows) + n_k - n_q) - (key + len(keys))  # from the last key there to the last row's own
        window = None if left is None else left - beyond, None if right is None else right + beyond
        return Piece(rows, keys, row, key, False, None if window == (None, None) else window)

    def forward(self, piece: Stretch, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """O and L of a piece's rows over its keys, given a part's rows and the keys of its source."""
        arrays, options, numbers = self._of(piece, q, k, v)
        made = self._prepared_forward(arrays, options, numbers).launch(by_tensor(arrays), self._launched(piece, numbers))
        return made["O"], made["L"]

    def prepare_forward(self, piece: Stretch, q: Any, k: Any, v: Any) -> None:
        """Plan and compile for it; of the arrays only the layouts count, and what functions have captured."""
        self._prepared_forward(*self._of(piece, q, k, v)).compile()

    def _prepared_forward(self, arrays: Mapping[str, Any], options: Options, numbers: Numbers) -> Prepared | PreparedSimulation:
        found: Prepared | PreparedSimulation = kept(
            prepare_forward, self.gpu, arrays, options, "auto", None, True, of_mask(numbers)
        )
        return found

    def backward(self, piece: Stretch, rows: Mapping[str, Any], k: Any, v: Any) -> tuple[Any, Any, Any]:
        """dQ of a piece's rows and dK and dV of its keys. `rows` are a part's q, dout, out and lse."""
        arrays, options, numbers = self._of(piece, rows["q"], k, v)
        arrays |= self._rows(piece, rows)
        call = self._prepared_backward(arrays, options, numbers)
        arrays |= rows_beside(self.gpu, arrays)
        made = call.launch(by_tensor(arrays), self._launched(piece, numbers))
        return made["dQ"], made["dK"], made["dV"]

    def prepare_backward(self, piece: Stretch, rows: Mapping[str, Any], k: Any, v: Any) -> None:
        arrays, options, numbers = self._of(piece, rows["q"], k, v)
        self._prepared_backward(arrays | self._rows(piece, rows), options, numbers).compile()

    def _prepared_backward(self, arrays: dict[str, Any], options: Options, numbers: Numbers) -> Prepared | PreparedSimulation:
        ways = Ways("fa2", None, self.asked.deterministic, False)
        found: Prepared | PreparedSimulation = kept(prepare_backward, self.gpu, readable(arrays), options, ways, of_mask(numbers))
        return found

    def _rows(self, piece: Stretch, rows: Mapping[str, Any]) -> dict[str, Any]:
        stretch = self.aligned(piece).rows
        found = {name: rows[name][..., stretch.start : stretch.stop, :] for name in ("dout", "out")}
        return found | {"lse": rows["lse"][..., stretch.start : stretch.stop]}

    def _of(self, piece: Stretch, q: Any, k: Any, v: Any) -> tuple[dict[str, Any], Options, Numbers]:
        """A call's arrays, options and captured numbers."""
        piece = self.aligned(piece)
        cut = {"q": q[..., piece.rows.start : piece.rows.stop, :]}
        cut |= {name: array[..., piece.keys.start : piece.keys.stop, :] for name, array in (("k", k), ("v", v))}
        forms, numbers = self._forms(piece)
        options = Options(
            causal=piece.causal,
            window=None if piece.window is None else Band(*piece.window),
            scale=self.asked.scale,
            dropout=self.asked.dropout is not None,
            score=forms["score"],
            mask_function=forms["mask"],
        )
        return cut | self.asked.captured[0], options, numbers

    def _forms(self, piece: Any) -> tuple[dict[str, Form | None], Numbers]:
        """The functions by kind as a piece has them, and all numbers that are captured."""
        forms: dict[str, Form | None] = {"score": None, "mask": None}
        numbers = self.asked.captured[1]
        for each in self.asked.functions:
            forms[each.kind], own = self._function(each.form, piece)
            numbers += tuple((field(name, each.kind), as_given(number)) for name, number in own.items())
        return forms, numbers

    def _function(self, form: Form, piece: Any) -> tuple[Form, dict[str, int]]:
        """A score or mask function as a piece has it, and the numbers that this captures besides."""
        part, names = of_part(form)
        return part, numbers_of_part(names, piece.row, piece.key, self.plan.n_q, self.plan.n_k)

    def _launched(self, piece: Any, numbers: Numbers) -> dict[str, Any]:
        """The fields of the kernels' struct that a launch brings."""
        dropped = self.asked.dropout
        return dict(numbers) | ({} if dropped is None else replace(dropped, origin=self._origin(piece)).numbers)

    def _origin(self, piece: Any) -> tuple[int, int, int, int]:
        """Where dropout has a call's first batch, head, row and key."""
        piece = self.aligned(piece)
        return 0, 0, piece.row, piece.key


def contiguous(xp: Any, array: Any) -> Any:
    return np.ascontiguousarray(array) if xp is np else xp.ascontiguousarray(array)
