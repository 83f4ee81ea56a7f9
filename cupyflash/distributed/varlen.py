"""Packed sequences over ranks: the ring of `ring_attention`, whose pieces are calls of whole sequences and of cut ones."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from cupyflash import varlen
from cupyflash.dispatch import as_arrays, as_integers
from cupyflash.distributed.asked import Asked, PieceCalls
from cupyflash.distributed.communicator import as_communicator
from cupyflash.distributed.opening import Call, Checked, options_asked
from cupyflash.distributed.ring import run_forward
from cupyflash.distributed.ring_backward import run_backward
from cupyflash.distributed.varlen_calls import VarlenCalls
from cupyflash.distributed.varlen_plan import VarlenPlan
from cupyflash.dropout import MOST_PAIRS
from cupyflash.options import Options, Window, require_flag
from cupyflash.score import Mask, Score


def ring_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    comm: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    layout: str = "zigzag",
    mask: Mask | None = None,
    sinks: Any | None = None,
    score: Score | None = None,
    softcap: float | None = None,
    alibi_slopes: Any | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    scale: float | None = None,
    gather_kv: bool = False,
    return_lse: bool = False,
) -> Any:
    """`attention_varlen` of packed sequences whose tokens are cut over the ranks of `comm`, wherever the cuts fall.

    q, k and v are this rank's tokens, (tokens, h, d), as `shard(..., axis=0)` cuts them. cu_seqlens_q and cu_seqlens_k are the
    bounds of all sequences in all tokens, as `attention_varlen` takes them, the same on all ranks; those on a GPU are copied to the
    host, which waits for it. All else as for `ring_attention`, in each sequence. What score and mask functions and dropout see is
    what `attention_varlen` has: b is the sequence's number, row, q and k count from its own beginning, n_q and n_k are its lengths.
    What they have captured is whole on each rank; an axis that row or k indexes has as many elements as the longest sequence.

    Returns this rank's O, (tokens, h, d_v), and with `return_lse` L, float32 of shape (h, tokens). Raises as `ring_attention`.
    """
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "dropout": dropout, "seed": seed}
    options |= {"offset": offset, "mask": mask, "score": score, "softcap": softcap, "alibi_slopes": alibi_slopes}

    def check() -> VarlenChecked:
        require_flag("return_lse", return_lse)
        asked = options_asked(layout, gather_kv, **options)
        given = heads_first(q=q, k=k, v=v) | {"sinks": sinks}
        return VarlenChecked.of_sequences(asked, "ring_attention_varlen", (cu_seqlens_q, cu_seqlens_k), given)

    call = Call.opened(as_communicator(comm), check)
    with call.device():
        out, lse = run_forward(call.forward(), call.arrays["q"], call.arrays.get("sinks"), call.tokens_first)
    return (out, lse) if return_lse else out


def ring_attention_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    comm: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    layout: str = "zigzag",
    mask: Mask | None = None,
    sinks: Any | None = None,
    score: Score | None = None,
    softcap: float | None = None,
    alibi_slopes: Any | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    scale: float | None = None,
    gather_kv: bool = False,
    deterministic: bool = False,
) -> tuple[Any, ...]:
    """dq, dk and dv of this rank's tokens (and its share of dsinks), of what `ring_attention_varlen` returned with `return_lse`.

    All else as there, and as for `ring_attention_backward`.
    """
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "dropout": dropout, "seed": seed}
    options |= {"offset": offset, "mask": mask, "score": score, "softcap": softcap, "alibi_slopes": alibi_slopes}

    def check() -> VarlenChecked:
        asked = options_asked(layout, gather_kv, deterministic, **options)
        given = heads_first(dout=dout, q=q, k=k, v=v, out=out) | {"lse": lse, "sinks": sinks}
        return VarlenChecked.of_sequences(asked, "ring_attention_varlen_backward", (cu_seqlens_q, cu_seqlens_k), given)

    call = Call.opened(as_communicator(comm), check)
    with call.device():
        return run_backward(*call.backward(), call.arrays.get("sinks"), call.tokens_first)


def heads_first(**arrays: Any) -> dict[str, Any]:
    """(tokens, h, d) as (h, tokens, d), views. TypeError or ValueError for what is none."""
    found = as_arrays(**arrays)
    for name, array in found.items():
        if array.ndim != 3:
            raise ValueError(f"{name} must be (tokens, h, d), got shape {array.shape}")
    return {name: varlen.heads_first(array) for name, array in found.items()}


@dataclass(frozen=True)
class VarlenChecked(Checked):
    """With the bounds of all sequences."""

    bounds: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    @classmethod
    def of_sequences(cls, asked: Asked, name: str, bounds: tuple[Any, Any], given: Mapping[str, Any]) -> VarlenChecked:
        checked = Checked.of(asked, name, **given)
        of_rows, of_keys = (_bounds(name, each) for name, each in zip(varlen.BOUNDS, bounds, strict=True))
        if len(of_rows) != len(of_keys):
            raise ValueError(f"cu_seqlens_k must have cu_seqlens_q's {len(of_rows)} bounds, got {len(of_keys)}")
        if asked.dropout is not None and len(of_rows) - 1 > MOST_PAIRS:
            raise ValueError(f"dropout is for at most {MOST_PAIRS:,} sequences, got {len(of_rows) - 1:,}")
        return cls(**vars(checked), bounds=(of_rows, of_keys))

    @property
    def said(self) -> dict[str, Any]:
        said = super().said
        said["alike"] |= dict(zip(varlen.BOUNDS, map(_shown, self.bounds), strict=True))
        return said

    def plan(self, n_q: int, n_k: int, ranks: int) -> VarlenPlan:
        for name, bounds, total in zip(varlen.BOUNDS, self.bounds, (n_q, n_k), strict=True):
            if bounds[-1] != total:
                raise ValueError(f"{name} must end with {total}, the tokens of all ranks, got {bounds[-1]}")
        options = Options(causal=self.asked.causal, window=self.asked.window)
        return _plan(*self.bounds, ranks, self.asked.layout, (options.left, options.right), self.asked.gather)

    def calls(self, plan: Any) -> PieceCalls:
        return VarlenCalls(self.asked, plan, self.gpu)

    def whole_sizes(self, plan: Any) -> dict[str, int]:
        lengths = [max((b - a for a, b in pairwise(bounds)), default=0) for bounds in self.bounds]
        return super().whole_sizes(plan) | {"b": len(self.bounds[0]) - 1, "row": lengths[0], "k": lengths[1]}


@lru_cache(maxsize=64)
def _plan(of_rows: tuple[int, ...], of_keys: tuple[int, ...], ranks: int, layout: str, reach: Window, gather: bool) -> VarlenPlan:
    """Kept, since the backward has that of the forward."""
    return VarlenPlan(of_rows, of_keys, ranks, layout, reach, gather)


def _bounds(name: str, given: Any) -> tuple[int, ...]:
    """As Python's numbers. TypeError or ValueError for what are no bounds of sequences."""
    array = as_integers(name, given)
    if array.dtype != np.int32:
        raise TypeError(f"{name} must be of dtype int32, got {array.dtype}")
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{name} must have shape (b + 1,), a bound more than there are sequences, got {array.shape}")
    found = tuple(array.tolist())
    if found[0] != 0 or any(b < a for a, b in pairwise(found)):
        raise ValueError(f"{name} must begin with 0 and not decrease, got {_shown(found)}")
    return found


def _shown(bounds: tuple[int, ...]) -> str:
    """In a line, which is another for others."""
    if len(bounds) <= 12:
        return str(list(bounds))
    few, check = ", ".join(map(str, bounds[:6])), zlib.crc32(repr(bounds).encode())
    return f"{len(bounds)} bounds [{few}, ..., {bounds[-1]}] of CRC {check:08x}"
