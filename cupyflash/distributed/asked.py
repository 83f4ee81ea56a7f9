"""The options of a call over ranks, and the ordinary call that each of its pieces is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cupyflash.basics import Report, Values
from cupyflash.calls import BACKWARD, FORWARD
from cupyflash.distributed.plan import Piece, RingPlan, plan_ring
from cupyflash.distributed.positions import BATCH, NUMBERS, by_position, numbers_of_part, of_part
from cupyflash.distributed.streams import array_module
from cupyflash.launch.cold import compile_first
from cupyflash.launch.launcher import PublicCall
from cupyflash.request.dropout import KEY_GROUP, ROW_GROUP, Dropout
from cupyflash.request.options import Band, Window
from cupyflash.request.score import Form, Mask, Score


@dataclass(frozen=True)
class RingOptions:
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

    @property
    def functions(self) -> tuple[Score | Mask, ...]:
        return tuple(each for each in (self.score, self.mask) if each is not None)

    @property
    def by_position(self) -> bool:
        """True if scores depend on positions beyond the causal mask and the window."""
        return self.dropout is not None or any(by_position(each.form) for each in self.functions)

    def plan(self, n_q: int, n_k: int, ranks: int) -> RingPlan:
        return plan_ring(n_q, n_k, ranks, self.layout, self.causal, self.window, self.gather, self.by_position)

    @property
    def text(self) -> dict[str, str]:
        """All options as text, for other ranks to compare."""
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


@dataclass(frozen=True)
class PieceCalls:
    """The pieces of a plan as calls on this machine: `gpu` or the simulated device."""

    asked: RingOptions
    plan: RingPlan
    gpu: bool

    @property
    def xp(self) -> Any:
        """CuPy or NumPy."""
        return array_module(self.gpu)

    def aligned(self, piece: Piece) -> Piece:
        """The piece, from where dropout's generator can begin. Its mask leaves out the rows and keys that this adds in front."""
        before = piece.row % ROW_GROUP, piece.key % KEY_GROUP
        if self.asked.dropout is None or before == (0, 0):
            return piece
        n_q, n_k, (left, right) = self.plan.n_q, self.plan.n_k, self.plan.reach
        rows, keys = (range(each.start - more, each.stop) for each, more in zip((piece.rows, piece.keys), before, strict=True))
        row, key = piece.row - before[0], piece.key - before[1]
        beyond = (row + len(rows) + n_k - n_q) - (key + len(keys))  # from the last key there to the last row's own
        window = None if left is None else left - beyond, None if right is None else right + beyond
        reach = None if window == (None, None) else window
        return piece._replace(rows=rows, keys=keys, row=row, key=key, causal=False, window=reach)

    def forward(self, piece: Piece, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        """O and L of a piece's rows over its keys, given a part's rows and the keys of its source."""
        return self._own(piece, self._calls(piece)[0](self._forward(piece, q, k, v)))

    def prepare_forward(self, piece: Piece, q: Any, k: Any, v: Any) -> None:
        """Plan and compile for it; of the arrays only the layouts count, and what functions have captured."""
        compile_first(self._calls(piece)[0], self._forward(piece, q, k, v))

    def backward(self, piece: Piece, rows: Values, k: Any, v: Any) -> tuple[Any, ...]:
        """dQ of a piece's rows and dK and dV of its keys. `rows` are a part's q, dout, out and lse."""
        return self._own(piece, self._calls(piece)[1](self._backward(piece, rows, k, v)))

    def prepare_backward(self, piece: Piece, rows: Values, k: Any, v: Any) -> None:
        compile_first(self._calls(piece)[1], self._backward(piece, rows, k, v))

    def _calls(self, piece: Piece) -> tuple[PublicCall, PublicCall]:
        """The forward and the backward that a piece is."""
        return FORWARD, BACKWARD

    def _own(self, piece: Piece, made: tuple[Any, ...]) -> tuple[Any, ...]:
        """The piece's own part of its call's results."""
        return made

    def _forward(self, piece: Piece, q: Any, k: Any, v: Any) -> Report:
        return self._of(piece, q, k, v) | {"return_lse": True}

    def _backward(self, piece: Piece, rows: Values, k: Any, v: Any) -> Report:
        own = self._of(piece, rows["q"], k, v) | self._rows(piece, rows)
        return own | {"deterministic": self.asked.deterministic}

    def _rows(self, piece: Piece, rows: Values) -> Report:
        stretch = self.aligned(piece).rows
        found = {name: rows[name][..., stretch.start : stretch.stop, :] for name in ("dout", "out")}
        return found | {"lse": rows["lse"][..., stretch.start : stretch.stop]}

    def _of(self, piece: Piece, q: Any, k: Any, v: Any) -> Report:
        """The arguments of a piece's call."""
        piece = self.aligned(piece)
        cut = {"q": q[..., piece.rows.start : piece.rows.stop, :]}
        cut |= {name: array[..., piece.keys.start : piece.keys.stop, :] for name, array in (("k", k), ("v", v))}
        window = None if piece.window is None else Band(*piece.window)
        return cut | {"causal": piece.causal, "window": window} | self._said(piece)

    def _said(self, piece: Any) -> Report:
        """The arguments that change scores: the scale, the piece's functions, the dropout."""
        said: Report = {"scale": self.asked.scale}
        for each in self.asked.functions:
            form, own = self._function(each.form, piece)
            said[each.kind] = each.of(form, each.arrays, each.numbers | own)
        dropped = self.asked.dropout
        return said | ({} if dropped is None else replace(dropped, origin=self._origin(piece)).keywords)

    def _function(self, form: Form, piece: Any) -> tuple[Form, dict[str, int]]:
        """A score or mask function as a piece has it, and the numbers that this captures besides."""
        part, names = of_part(form, tuple(NUMBERS) if piece.sequence is None else (*NUMBERS, *BATCH))
        return part, numbers_of_part(names, piece.row, piece.key, piece.n_q, piece.n_k, piece.sequence or 0)

    def _origin(self, piece: Any) -> tuple[int, int, int, int]:
        """The batch, head, row and key at which dropout's generator begins a call."""
        piece = self.aligned(piece)
        return 0, 0, piece.row, piece.key
