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
from cupyflash.binding import by_tensor
from cupyflash.dispatch import as_arrays, as_integers
from cupyflash.distributed.asked import Asked, PieceCalls, contiguous
from cupyflash.distributed.communicator import as_communicator
from cupyflash.distributed.opening import Call, Checked, options_asked
from cupyflash.distributed.positions import BATCH, NUMBERS, numbers_of_part, of_part
from cupyflash.distributed.ring import run_forward
from cupyflash.distributed.ring_backward import run_backward
from cupyflash.distributed.varlen_plan import Cut, Packed, VarlenPlan
from cupyflash.gradients import Ways, posed_backward, prepare_varlen_backward, readable, rows_beside
from cupyflash.launcher import vectors_on_device
from cupyflash.options import Options, Window, require_flag
from cupyflash.score import Form, Mask, Score


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
    scale: float | None = None,
    gather_kv: bool = False,
    return_lse: bool = False,
) -> Any:
    """`attention_varlen` of packed sequences whose tokens are cut over the ranks of `comm`, wherever the cuts fall.

    q, k and v are this rank's tokens, (tokens, h, d), as `shard(..., axis=0)` cuts them. cu_seqlens_q and cu_seqlens_k are the
    bounds of all sequences in all tokens, as `attention_varlen` takes them, the same on all ranks; those on a GPU are copied to the
    host, which waits for it. All else as for `ring_attention`, in each sequence. Dropout is not for packed sequences over ranks.

    Returns this rank's O, (tokens, h, d_v), and with `return_lse` L, float32 of shape (h, tokens). Raises as `ring_attention`.
    """
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale}
    options |= {"mask": mask, "score": score, "softcap": softcap, "alibi_slopes": alibi_slopes}

    def check() -> VarlenChecked:
        require_flag("return_lse", return_lse)
        asked = options_asked(layout, gather_kv, **options)
        given = heads_first(q=q, k=k, v=v) | {"sinks": sinks}
        return VarlenChecked.of_sequences(asked, "ring_attention_varlen", (cu_seqlens_q, cu_seqlens_k), given)

    call = Call.opened(as_communicator(comm), check)
    with call.device():
        out, lse = run_forward(call.forward(), call.arrays["q"], call.arrays.get("sinks"))
        out = contiguous(call.xp, out.swapaxes(0, 1))
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
    scale: float | None = None,
    gather_kv: bool = False,
    deterministic: bool = False,
) -> tuple[Any, ...]:
    """dq, dk and dv of this rank's tokens (and its share of dsinks), of what `ring_attention_varlen` returned with `return_lse`.

    All else as there, and as for `ring_attention_backward`.
    """
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale}
    options |= {"mask": mask, "score": score, "softcap": softcap, "alibi_slopes": alibi_slopes}

    def check() -> VarlenChecked:
        asked = options_asked(layout, gather_kv, deterministic, **options)
        given = heads_first(dout=dout, q=q, k=k, v=v, out=out) | {"lse": lse, "sinks": sinks}
        return VarlenChecked.of_sequences(asked, "ring_attention_varlen_backward", (cu_seqlens_q, cu_seqlens_k), given)

    call = Call.opened(as_communicator(comm), check)
    with call.device():
        made = run_backward(call.backward(), call.rows(), call.arrays.get("sinks"))
        return *(contiguous(call.xp, x.swapaxes(0, 1)) for x in made[:3]), *made[3:]


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


# What sequences of a packed call see moved: their numbers; rows and keys by nothing, so that an axis which one of them indexes may
# be as long as the longest of all sequences asks for.
OF_PACKED = ("b", "row", "k")


@dataclass(frozen=True)
class VarlenCalls(PieceCalls):
    """The pieces of a `VarlenPlan`. Arrays have their heads first, as those of `PieceCalls`."""

    plan: Any

    def aligned(self, piece: Any) -> Any:
        """Nothing is dropped, so that a piece may begin anywhere."""
        return piece

    def forward(self, piece: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        if isinstance(piece, Cut):
            return super().forward(piece, q, k, v)
        call, arrays, numbers = self._forward(piece, q, k, v)
        made = call.launch(arrays, numbers)
        return made["O"].swapaxes(0, 1), made["L"]

    def prepare_forward(self, piece: Any, q: Any, k: Any, v: Any) -> None:
        if isinstance(piece, Cut):
            super().prepare_forward(piece, q, k, v)
        else:
            self._forward(piece, q, k, v)[0].compile()

    def _forward(self, piece: Packed, q: Any, k: Any, v: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        arrays, bounds, options, numbers = self._packed(piece, q, k, v)
        functions = varlen.posed, varlen.prepare_varlen
        call = varlen.kept_sequences(functions, self.gpu, arrays, bounds, _longest(piece), options, None, True)
        return call, by_tensor(arrays | vectors_on_device(self.gpu, arrays | bounds)), numbers

    def backward(self, piece: Any, rows: Mapping[str, Any], k: Any, v: Any) -> tuple[Any, Any, Any]:
        if isinstance(piece, Cut):
            return super().backward(piece, rows, k, v)
        call, arrays, numbers = self._backward(piece, rows, k, v)
        arrays |= rows_beside(self.gpu, arrays)
        made = call.launch(by_tensor(arrays), numbers)
        return made["dQ"].swapaxes(0, 1), made["dK"].swapaxes(0, 1), made["dV"].swapaxes(0, 1)

    def prepare_backward(self, piece: Any, rows: Mapping[str, Any], k: Any, v: Any) -> None:
        if isinstance(piece, Cut):
            super().prepare_backward(piece, rows, k, v)
        else:
            self._backward(piece, rows, k, v)[0].compile()

    def _backward(self, piece: Packed, rows: Mapping[str, Any], k: Any, v: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        arrays, bounds, options, numbers = self._packed(piece, rows["q"], k, v)
        own = self._rows(piece, rows)  # type: ignore[arg-type]
        arrays |= own | {name: own[name].swapaxes(0, 1) for name in ("out", "dout")}
        functions = posed_backward, prepare_varlen_backward
        ways = Ways("fa2", None, self.asked.deterministic, False)
        call = varlen.kept_sequences(functions, self.gpu, readable(arrays), bounds, _longest(piece), options, ways)
        return call, arrays | vectors_on_device(self.gpu, arrays | bounds), numbers

    def _packed(self, piece: Packed, q: Any, k: Any, v: Any) -> tuple[dict[str, Any], dict[str, Any], Options, dict[str, Any]]:
        """A call's arrays, the bounds of its sequences, its options, and the fields that a launch brings."""
        rows, keys = (slice(each.start, each.stop) for each in (piece.rows, piece.keys))
        arrays = {"q": q[:, rows].swapaxes(0, 1), "k": k[:, keys].swapaxes(0, 1), "v": v[:, keys].swapaxes(0, 1)}
        bounds = {name: np.array(getattr(piece, name), np.int32) for name in varlen.BOUNDS}
        asked, (forms, numbers) = self.asked, self._forms(piece)
        options = Options(asked.causal, asked.window, asked.scale, packed=True, score=forms["score"], mask_function=forms["mask"])
        return arrays | asked.captured[0], bounds, options, dict(numbers)

    def _function(self, form: Form, piece: Any) -> tuple[Form, dict[str, int]]:
        if isinstance(piece, Packed):
            part, names = of_part(form, OF_PACKED)
            return part, numbers_of_part(names, 0, 0, 0, 0, piece.sequence)
        part, names = of_part(form, (*NUMBERS, *BATCH))
        return part, numbers_of_part(names, piece.row, piece.key, piece.n_q, piece.n_k, piece.sequence)


def _longest(piece: Packed) -> tuple[int, int]:
    queries, keys = (max(b - a for a, b in pairwise(bounds)) for bounds in (piece.cu_seqlens_q, piece.cu_seqlens_k))
    return queries, keys
