"""Packed sequences over ranks: the ring of `ring_attention`, whose pieces are calls of whole sequences and of cut ones."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from cupyflash.arrays import heads_first, require_integers
from cupyflash.basics import Report, Values
from cupyflash.distributed.asked import PieceCalls
from cupyflash.distributed.opening import ARRAYS, Checked
from cupyflash.distributed.varlen_calls import VarlenCalls
from cupyflash.distributed.varlen_plan import VarlenPlan
from cupyflash.launch.dispatch import as_arrays, as_integers
from cupyflash.request import varlen
from cupyflash.request.dropout import MOST_PAIRS
from cupyflash.request.keywords import Keywords
from cupyflash.request.options import VECTORS


@dataclass(frozen=True)
class VarlenChecked(Checked):
    """The checked arguments with the bounds of all sequences; arrays have their heads first."""

    bounds: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    @classmethod
    def of(cls, call: Keywords, given: Values) -> VarlenChecked:
        tokens = as_arrays({name: given[name] for name in ARRAYS if name in given and name not in ("lse", *VECTORS)}, call.required)
        for name, array in tokens.items():
            if array.ndim != 3:
                raise ValueError(f"{name} must be (tokens, h, d), got shape {array.shape}")
        views = {name: heads_first(array) for name, array in tokens.items()}
        checked = Checked.of(call, {**given, **views})
        of_rows, of_keys = (_bounds(name, given[name]) for name in varlen.BOUNDS)
        if len(of_rows) != len(of_keys):
            raise ValueError(f"cu_seqlens_k must have cu_seqlens_q's {len(of_rows)} bounds, got {len(of_keys)}")
        if checked.asked.dropout is not None and len(of_rows) - 1 > MOST_PAIRS:
            raise ValueError(f"dropout is for at most {MOST_PAIRS:,} sequences, got {len(of_rows) - 1:,}")
        return cls(**vars(checked), bounds=(of_rows, of_keys))

    def returned(self, array: Any) -> Any:
        return self.xp.ascontiguousarray(heads_first(array))

    @property
    def said(self) -> Report:
        said = super().said
        said["alike"] |= dict(zip(varlen.BOUNDS, map(_shown, self.bounds), strict=True))
        return said

    def plan(self, n_q: int, n_k: int, ranks: int) -> VarlenPlan:
        for name, bounds, total in zip(varlen.BOUNDS, self.bounds, (n_q, n_k), strict=True):
            if bounds[-1] != total:
                raise ValueError(f"{name} must end with {total}, the tokens of all ranks, got {bounds[-1]}")
        asked = self.asked
        return _plan(n_q, n_k, ranks, asked.layout, asked.causal, asked.window, asked.gather, *self.bounds)

    def calls(self, plan: Any) -> PieceCalls:
        return VarlenCalls(self.asked, plan, self.gpu)

    def whole_sizes(self, plan: Any) -> dict[str, int]:
        lengths = [max((b - a for a, b in pairwise(bounds)), default=0) for bounds in self.bounds]
        return super().whole_sizes(plan) | {"b": len(self.bounds[0]) - 1, "row": lengths[0], "k": lengths[1]}


# Kept, since the backward has the forward's
_plan = lru_cache(maxsize=64)(VarlenPlan)


def _bounds(name: str, given: Any) -> tuple[int, ...]:
    """The bounds as Python's numbers. TypeError or ValueError for what are no bounds of sequences."""
    array = as_integers(name, given)
    require_integers(name, array)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{name} must have shape (b + 1,), a bound more than there are sequences, got {array.shape}")
    found = tuple(array.tolist())
    if found[0] != 0 or any(b < a for a, b in pairwise(found)):
        raise ValueError(f"{name} must begin with 0 and not decrease, got {_shown(found)}")
    return found


def _shown(bounds: tuple[int, ...]) -> str:
    """The bounds in one line, which differs for different bounds."""
    if len(bounds) <= 12:
        return str(list(bounds))
    few, check = ", ".join(map(str, bounds[:6])), zlib.crc32(repr(bounds).encode())
    return f"{len(bounds)} bounds [{few}, ..., {bounds[-1]}] of CRC {check:08x}"
