"""The calls that a rank makes of packed sequences: of whole ones together, and of what is cut by ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from cupyflash import varlen
from cupyflash.binding import by_tensor
from cupyflash.distributed.asked import PieceCalls
from cupyflash.distributed.positions import BATCH, NUMBERS, numbers_of_part, of_part, without_first
from cupyflash.distributed.varlen_plan import Cut, Packed
from cupyflash.dropout import KEY_GROUP, ROW_GROUP
from cupyflash.gradients import Ways, posed_backward, prepare_varlen_backward, readable, rows_beside
from cupyflash.launcher import vectors_on_device
from cupyflash.options import Options
from cupyflash.score import Form, Numbers, as_given, field

# What sequences of a packed call see moved: their numbers; rows and keys by nothing, so that an axis which one of them indexes may
# be as long as the longest of all sequences asks for.
OF_PACKED = ("b", "row", "k")


@dataclass(frozen=True)
class VarlenCalls(PieceCalls):
    """The pieces of a `VarlenPlan`. Arrays have their heads first, as those of `PieceCalls`.

    Dropout's generator goes by groups of 32 rows and 16 keys of a sequence, and a rank's part of one may begin within a group. A
    call then has rows and keys of zeros ahead of its own, as many as the group has before them, which a mask takes out; what it
    makes of them is dropped.
    """

    plan: Any

    def aligned(self, piece: Any) -> Any:
        """As it is: the rows and keys before those of a part are none of the sequence's, or not here."""
        return piece

    def forward(self, piece: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        if isinstance(piece, Cut):
            rows, _ = self._ahead(piece)
            out, lse = super().forward(piece, q, k, v)
            return out[..., rows:, :], lse[..., rows:]
        call, arrays, numbers = self._forward(piece, q, k, v)
        made = call.launch(arrays, self._launched(piece, numbers))
        return made["O"].swapaxes(0, 1), made["L"]

    def prepare_forward(self, piece: Any, q: Any, k: Any, v: Any) -> None:
        if isinstance(piece, Cut):
            super().prepare_forward(piece, q, k, v)
        else:
            self._forward(piece, q, k, v)[0].compile()

    def _forward(self, piece: Packed, q: Any, k: Any, v: Any) -> tuple[Any, dict[str, Any], Numbers]:
        arrays, bounds, options, numbers = self._packed(piece, q, k, v)
        functions = varlen.posed, varlen.prepare_varlen
        call = varlen.kept_sequences(functions, self.gpu, arrays, bounds, _longest(piece), options, None, True)
        return call, by_tensor(arrays | vectors_on_device(self.gpu, arrays | bounds)), numbers

    def backward(self, piece: Any, rows: Mapping[str, Any], k: Any, v: Any) -> tuple[Any, Any, Any]:
        if isinstance(piece, Cut):
            first_row, first_key = self._ahead(piece)
            dq, dk, dv = super().backward(piece, rows, k, v)
            return dq[..., first_row:, :], dk[..., first_key:, :], dv[..., first_key:, :]
        call, arrays, numbers = self._backward(piece, rows, k, v)
        arrays |= rows_beside(self.gpu, arrays)
        made = call.launch(by_tensor(arrays), self._launched(piece, numbers))
        return made["dQ"].swapaxes(0, 1), made["dK"].swapaxes(0, 1), made["dV"].swapaxes(0, 1)

    def prepare_backward(self, piece: Any, rows: Mapping[str, Any], k: Any, v: Any) -> None:
        if isinstance(piece, Cut):
            super().prepare_backward(piece, rows, k, v)
        else:
            self._backward(piece, rows, k, v)[0].compile()

    def _backward(self, piece: Packed, rows: Mapping[str, Any], k: Any, v: Any) -> tuple[Any, dict[str, Any], Numbers]:
        arrays, bounds, options, numbers = self._packed(piece, rows["q"], k, v)
        own = self._rows(piece, rows)
        arrays |= own | {name: own[name].swapaxes(0, 1) for name in ("out", "dout")}
        functions = posed_backward, prepare_varlen_backward
        ways = Ways("fa2", None, self.asked.deterministic, False)
        call = varlen.kept_sequences(functions, self.gpu, readable(arrays), bounds, _longest(piece), options, ways)
        return call, arrays | vectors_on_device(self.gpu, arrays | bounds), numbers

    def _packed(self, piece: Packed, q: Any, k: Any, v: Any) -> tuple[dict[str, Any], dict[str, Any], Options, Numbers]:
        """A call's arrays, the bounds of its sequences, its options, and its captured numbers."""
        rows, keys = (slice(each.start, each.stop) for each in (piece.rows, piece.keys))
        arrays = {"q": q[:, rows].swapaxes(0, 1), "k": k[:, keys].swapaxes(0, 1), "v": v[:, keys].swapaxes(0, 1)}
        bounds = {name: np.array(getattr(piece, name), np.int32) for name in varlen.BOUNDS}
        asked, (forms, numbers) = self.asked, self._forms(piece)
        options = Options(
            causal=asked.causal,
            window=asked.window,
            scale=asked.scale,
            packed=True,
            dropout=asked.dropout is not None,
            score=forms["score"],
            mask_function=forms["mask"],
        )
        return arrays | asked.captured[0], bounds, options, numbers

    def _of(self, piece: Any, q: Any, k: Any, v: Any) -> tuple[dict[str, Any], Options, Numbers]:
        rows, keys = self._ahead(piece)
        if rows == keys == 0:
            return super()._of(piece, q, k, v)
        arrays, options, numbers = super()._of(piece._replace(row=piece.row - rows, key=piece.key - keys), q, k, v)
        mask, names = without_first(options.mask_function)
        numbers += tuple((field(name, "mask"), as_given(number)) for name, number in zip(names, (rows, keys), strict=True))
        arrays |= {name: self._behind(arrays[name], more, 0) for name, more in (("q", rows), ("k", keys), ("v", keys))}
        return arrays, replace(options, mask_function=mask), numbers

    def _rows(self, piece: Any, rows: Mapping[str, Any]) -> dict[str, Any]:
        found, (more, _) = super()._rows(piece, rows), self._ahead(piece)
        if not more:
            return found
        behind = {name: self._behind(found[name], more, 0) for name in ("dout", "out")}
        return behind | {"lse": self._behind(found["lse"][..., None], more, -np.inf)[..., 0]}

    def _ahead(self, piece: Any) -> tuple[int, int]:
        """How many rows and keys a call has ahead of a piece's own."""
        if self.asked.dropout is None or isinstance(piece, Packed):
            return 0, 0
        return piece.row % ROW_GROUP, piece.key % KEY_GROUP

    def _behind(self, array: Any, more: int, value: float) -> Any:
        """An array (h, n, d) behind so many rows of a value."""
        xp = sys.modules["cupy"] if self.gpu else np
        made = xp.full((*array.shape[:-2], more + array.shape[-2], array.shape[-1]), value, array.dtype)
        made[..., more:, :] = array
        return made

    def _origin(self, piece: Any) -> tuple[int, int, int, int]:
        if isinstance(piece, Packed):
            return piece.sequence, 0, 0, 0
        rows, keys = self._ahead(piece)
        return piece.sequence, 0, piece.row - rows, piece.key - keys

    def _function(self, form: Form, piece: Any) -> tuple[Form, dict[str, int]]:
        if isinstance(piece, Packed):
            part, names = of_part(form, OF_PACKED)
            return part, numbers_of_part(names, 0, 0, 0, 0, piece.sequence)
        part, names = of_part(form, (*NUMBERS, *BATCH))
        return part, numbers_of_part(names, piece.row, piece.key, piece.n_q, piece.n_k, piece.sequence)


def _longest(piece: Packed) -> tuple[int, int]:
    queries, keys = (max(b - a for a, b in pairwise(bounds)) for bounds in (piece.cu_seqlens_q, piece.cu_seqlens_k))
    return queries, keys
