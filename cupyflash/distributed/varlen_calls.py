"""The calls that a rank makes of packed sequences: whole sequences together, and cut ones."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from cupyflash.basics import Report, Values
from cupyflash.calls import BACKWARD, FORWARD, VARLEN, VARLEN_BACKWARD
from cupyflash.distributed.asked import PieceCalls
from cupyflash.distributed.plan import PackedPiece
from cupyflash.distributed.positions import numbers_of_part, of_part, without_first
from cupyflash.launch.launcher import PublicCall
from cupyflash.request import varlen
from cupyflash.request.dropout import KEY_GROUP, ROW_GROUP
from cupyflash.request.score import Form, Mask

# What sequences of a packed call see moved: their numbers; rows and keys by nothing, so that an axis which one of them indexes may
# be as long as the longest of all sequences asks for.
OF_PACKED = ("b", "row", "k")


@dataclass(frozen=True)
class VarlenCalls(PieceCalls):
    """The pieces of a `VarlenPlan`. Arrays have their heads first, as those of `PieceCalls`.

    Dropout's generator works on groups of 32 rows and 16 keys of a sequence, and a rank's part of a sequence may begin within a
    group. A call then has rows and keys of zeros before its own, as many as the group has before them. A mask removes them, and
    their results are dropped.
    """

    plan: Any

    def aligned(self, piece: Any) -> Any:
        """The piece as it is: the rows and keys before those of a part are none of the sequence's, or not here."""
        return piece

    def _calls(self, piece: Any) -> tuple[PublicCall, PublicCall]:
        return (VARLEN, VARLEN_BACKWARD) if isinstance(piece, PackedPiece) else (FORWARD, BACKWARD)

    def _own(self, piece: Any, made: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the results with heads first, without the rows and keys ahead."""
        if isinstance(piece, PackedPiece):
            return tuple(array.swapaxes(0, 1) if array.ndim == 3 else array for array in made)
        rows, keys = self._ahead(piece)
        if len(made) == 2:
            return made[0][..., rows:, :], made[1][..., rows:]
        return tuple(array[..., more:, :] for array, more in zip(made, (rows, keys, keys), strict=True))

    def _of(self, piece: Any, q: Any, k: Any, v: Any) -> Report:
        if isinstance(piece, PackedPiece):
            cuts = (("q", q, piece.rows), ("k", k, piece.keys), ("v", v, piece.keys))
            arrays = {name: array[:, cut.start : cut.stop].swapaxes(0, 1) for name, array, cut in cuts}
            bounds = {name: np.array(getattr(piece, name), np.int32) for name in varlen.BOUNDS}
            asked = {"causal": self.asked.causal, "window": self.asked.window}
            return arrays | bounds | dict(zip(varlen.LONGEST, _longest(piece), strict=True)) | asked | self._said(piece)
        first = rows, keys = self._ahead(piece)
        if first == (0, 0):
            return super()._of(piece, q, k, v)
        given = super()._of(piece._replace(row=piece.row - rows, key=piece.key - keys), q, k, v)
        mask: Mask | None = given.get("mask")
        form, names = without_first(None if mask is None else mask.form)
        captured, numbers = ({}, {}) if mask is None else (mask.arrays, mask.numbers)
        given |= {name: self._behind(given[name], more, 0) for name, more in (("q", rows), ("k", keys), ("v", keys))}
        return given | {"mask": Mask.of(form, captured, numbers | dict(zip(names, first, strict=True)))}

    def _rows(self, piece: Any, rows: Values) -> Report:
        found, (more, _) = super()._rows(piece, rows), self._ahead(piece)
        if isinstance(piece, PackedPiece):
            return found | {name: found[name].swapaxes(0, 1) for name in ("out", "dout")}
        if not more:
            return found
        behind = {name: self._behind(found[name], more, 0) for name in ("dout", "out")}
        return behind | {"lse": self._behind(found["lse"][..., None], more, -np.inf)[..., 0]}

    def _ahead(self, piece: Any) -> tuple[int, int]:
        """The number of rows and keys that a call has ahead of a piece's own."""
        if self.asked.dropout is None or isinstance(piece, PackedPiece):
            return 0, 0
        return piece.row % ROW_GROUP, piece.key % KEY_GROUP

    def _behind(self, array: Any, more: int, value: float) -> Any:
        """An array (h, n, d) behind so many rows of a value."""
        made = self.xp.full((*array.shape[:-2], more + array.shape[-2], array.shape[-1]), value, array.dtype)
        made[..., more:, :] = array
        return made

    def _origin(self, piece: Any) -> tuple[int, int, int, int]:
        if isinstance(piece, PackedPiece):
            return piece.sequence, 0, 0, 0
        rows, keys = self._ahead(piece)
        return piece.sequence, 0, piece.row - rows, piece.key - keys

    def _function(self, form: Form, piece: Any) -> tuple[Form, dict[str, int]]:
        if isinstance(piece, PackedPiece):
            part, names = of_part(form, OF_PACKED)
            return part, numbers_of_part(names, 0, 0, 0, 0, piece.sequence)
        return super()._function(form, piece)


def _longest(piece: PackedPiece) -> tuple[int, int]:
    queries, keys = (max(b - a for a, b in pairwise(bounds)) for bounds in (piece.cu_seqlens_q, piece.cu_seqlens_k))
    return queries, keys
