"""The call for batches of sequences of different lengths, packed one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Integral
from typing import Any

import numpy as np

from cupyflash.arrays import Array, Layout
from cupyflash.binding import by_tensor
from cupyflash.dispatch import as_array, as_arrays, as_integers, device_of, placed, refuse_out, target
from cupyflash.dropout import NO_ORIGIN, Dropout
from cupyflash.launcher import Prepared, capturing, kept, prepare, vectors_on_device
from cupyflash.named_scores import one_score
from cupyflash.options import MAX_LENGTH, Options, require_flag
from cupyflash.problem import Problem
from cupyflash.schedules import choose, plan_varlen
from cupyflash.score import Score, captured_among, captured_values, check_captured
from cupyflash.simulated import PreparedSimulation
from cupyflash.tensor_maps import first_refusal
from cupyflash.tiled_mask import Given
from cupyflash.tiling import TilingChoice

BOUNDS = ("cu_seqlens_q", "cu_seqlens_k")


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any | None = None,
    score: Score | None = None,
    softcap: float | None = None,
    alibi_slopes: Any | None = None,
    scale: float | None = None,
    sinks: Any | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    dropout_origin: tuple[int, int, int, int] = NO_ORIGIN,
    tiling: TilingChoice = None,
    return_lse: bool = False,
    out: Any | None = None,
) -> Any:
    """O = softmax(scale Q K^T) V of each sequence of a batch without padding, by FlashAttention-2 or 3; as `attention` otherwise.

    Shapes: q (total_q, h, d), k (total_k, h_kv, d), v (total_k, h_kv, d_v). Sequence b has the rows cu_seqlens_q[b] to
    cu_seqlens_q[b + 1] - 1 of q, and those of k and v that cu_seqlens_k says: both are int32 of shape (b + 1,) or lists, begin
    with 0, do not decrease, and end with total_q and total_k. `causal` and `window` are aligned bottom-right in each sequence. A
    sequence may have no queries, or no keys: its rows are then zeros with a log-sum-exp of -inf. `mask` is a `Mask`, or a
    `block_mask` of one and of these bounds. In its line, and in a `score`'s, b is the sequence's number, row, q and k count from
    its own beginning, and n_q and n_k are its own lengths; an axis that row or k indexes has as many elements as the longest
    sequence has (`max_seqlen`). `alibi_slopes` are (h,) or (sequences, h). For `dropout` a sequence's number is its batch, and rows
    and keys count from its own beginning, too.

    `max_seqlen_q` and `max_seqlen_k` are the lengths of the longest sequences, or more. Without them the bounds are looked at;
    where those are on a GPU that waits for the GPU, so pass both there, or pass the bounds as lists or NumPy arrays. (While a
    CUDA graph is captured, pass bounds on the GPU and both lengths.) What is not looked
    at is taken as given: bounds on a GPU, beside which max_seqlen is given, must be right, or the result and what is read and
    written are undefined.

    Returns O in q's dtype, of shape (total_q, h, d_v); with `return_lse` also L, float32 of shape (h, total_q), as
    flash-attention's `flash_attn_varlen_func` lays it out. Raises as `attention` does.
    """
    score = one_score(score, softcap, alibi_slopes)
    given = Given.of_sequences(mask)
    captured, numbers = captured_values(score, given.function)
    dropped = Dropout.asked(dropout, seed, offset, dropout_origin)
    form = None if score is None else score.form
    options = Options.asked(causal=causal, window=window, scale=scale, packed=True, score=form, dropout=dropped is not None)
    require_flag("return_lse", return_lse)
    inputs = as_arrays(q=q, k=k, v=v, sinks=sinks, **captured)
    arrays = inputs if out is None else inputs | {"out": as_array("out", out)}
    gpu, bounds, beside = bounds_of(arrays, cu_seqlens_q, cu_seqlens_k)
    options = given.asked(options, inputs["q"], inputs["k"], bounds)
    with device_of(gpu, **arrays, **beside):
        longest = max_seqlen_q, max_seqlen_k
        call = kept_sequences((posed, prepare_varlen), gpu, arrays, bounds, longest, options, tiling, bool(return_lse))
        if out is not None:
            refuse_out(arrays["out"], **inputs, **beside)
        arrays |= vectors_on_device(gpu, arrays | bounds)
        arrays |= given.states(call.given_tiles, gpu, arrays | dict(numbers))
        made = call.launch(by_tensor(arrays), dict(numbers) if dropped is None else dict(numbers) | dropped.numbers)
    o = made["O"] if out is None else out
    return (o, made["L"]) if return_lse else o


def prepare_varlen(
    gpu: bool,
    arrays: Mapping[str, Array],
    sequences: Sequences,
    options: Options,
    tiling: TilingChoice,
    lse: bool,
) -> Prepared | PreparedSimulation:
    problem = sequences.of(posed(gpu, arrays, options))
    check_captured(problem, captured_among(arrays))
    device, simulation = target(gpu)
    q, k, v = (arrays[name] for name in "qkv")
    made = {} if "out" in arrays else {"O": Layout.contiguous((*q.shape[:-1], v.shape[-1]), q.dtype)}
    views = {name: heads_first(array) for name, array in (by_tensor(arrays) | made).items() if name in "QKVO"}
    if lse:
        made["L"] = Layout.contiguous(q.shape[1::-1], np.float32)
    by_name = by_tensor(arrays) | made | views
    algorithm = choose(problem, device, tiling, first_refusal({tensor: by_name[tensor] for tensor in "QKVO"})).algorithm
    totals = q.shape[0], k.shape[0]
    schedule = plan_varlen(problem, device, sequences.lengths, tiling, lse=lse, totals=totals, algorithm=algorithm)
    return prepare(schedule, simulation, by_name, made)


def bounds_of(arrays: Mapping[str, Array], cu_seqlens_q: Any, cu_seqlens_k: Any) -> tuple[bool, dict[str, Array], dict[str, Array]]:
    """Whether the arrays are on a GPU; the bounds by name; and those of them that must be where the arrays are.

    NumPy's bounds of sequences on a GPU may stay behind on the host, where they can be looked at.
    """
    bounds = {name: as_integers(name, array) for name, array in zip(BOUNDS, (cu_seqlens_q, cu_seqlens_k), strict=True)}
    gpu, beside = placed(arrays, bounds)
    return gpu, bounds, beside


@dataclass(frozen=True)
class Sequences:
    """The (queries, keys) of each sequence, None where they are on a GPU and need not be looked at; and of the longest."""

    lengths: tuple[tuple[int, int], ...] | None
    longest: tuple[int, int]

    def of(self, problem: Problem) -> Problem:
        """A problem that is yet to know how long its sequences are."""
        return replace(problem, seqlen_q=self.longest[0], seqlen_k=self.longest[1])


def kept_sequences(
    functions: tuple[Callable[..., Problem], Callable[..., Prepared | PreparedSimulation]],
    gpu: bool,
    arrays: Mapping[str, Array],
    bounds: Mapping[str, Array],
    longest: tuple[int | None, int | None],
    *options: Any,
) -> Prepared | PreparedSimulation:
    """The call, prepared for sequences of which `longest` may say how long they are at most (`max_seqlen`).

    The first of the `functions` looks at the arrays but not into the bounds, which may have to come from a GPU; the second is
    given what they say.
    """
    (check, prepare), every = functions, {**arrays, **bounds}
    kept(check, gpu, every, options[0])  # refuses what no bounds could mend
    found = sequences(bounds, arrays["q"].shape[0], arrays["k"].shape[0], *longest)
    call: Prepared | PreparedSimulation = kept(prepare, gpu, every, replace(found, lengths=None) if gpu else found, *options)
    return call


def heads_first(array: Any) -> Any:
    """(total, h, d) as the kernels' (h, total, d), a view."""
    return array.swapaxes(0, 1)


def pose(
    arrays: Mapping[str, Any], options: Options, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None
) -> tuple[Problem, Sequences]:
    """The problem of the longest sequence, as often as there are sequences, and what the sequences' bounds say.

    `arrays` are `attention_varlen`'s by name, and so is what this raises.
    """
    problem = posed(False, arrays, options)
    found = sequences(arrays, len(arrays["q"]), len(arrays["k"]), max_seqlen_q, max_seqlen_k)
    problem = found.of(problem)
    check_captured(problem, captured_among(arrays))
    return problem, found


def posed(gpu: bool, arrays: Mapping[str, Any], options: Options) -> Problem:
    """As many sequences as there are, of lengths that are yet to be looked at."""
    bounds = {name: arrays[name] for name in BOUNDS}
    heads = {name: array for name, array in arrays.items() if name in ("q", "k", "v", "out")}
    _check_shapes(**heads)
    for name, cu_seqlens in bounds.items():
        if cu_seqlens.dtype != np.int32:
            raise TypeError(f"{name} must be of dtype int32, got {cu_seqlens.dtype}")
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
            raise ValueError(f"{name} must have shape (b + 1,), a bound more than there are sequences, got {cu_seqlens.shape}")
    first, second = (cu_seqlens.shape for cu_seqlens in bounds.values())
    if second != first:
        raise ValueError(f"cu_seqlens_k must have cu_seqlens_q's shape {first}, got {second}")
    views = {name: heads_first(array) for name, array in heads.items()}
    known = heads.keys() | bounds.keys() | captured_among(arrays).keys()
    beside = {name: array for name, array in arrays.items() if name not in known}
    return replace(Problem.from_arrays(**views, **beside, options=options), batch=first[0] - 1)


def sequences(
    bounds: Mapping[str, Any], total_q: int, total_k: int, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> Sequences:
    """What bounds by name say."""
    queries, longest_q = _lengths("q", bounds["cu_seqlens_q"], total_q, max_seqlen_q)
    keys, longest_k = _lengths("k", bounds["cu_seqlens_k"], total_k, max_seqlen_k)
    lengths = None if queries is None or keys is None else tuple(zip(queries, keys, strict=True))
    return Sequences(lengths, (longest_q, longest_k))


def _check_shapes(q: Array, k: Array, v: Array, out: Array | None = None) -> None:
    """What `Problem.from_arrays` would say of other axes."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 3:
            raise ValueError(f"{name} must be (total, h, d), got shape {array.shape}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have q's head dimension {q.shape[-1]}, got shape {k.shape}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v must have k's shape {k.shape} but for the last axis, got {v.shape}")
    if out is not None and out.shape != (*q.shape[:-1], v.shape[-1]):
        raise ValueError(f"out must have shape {(*q.shape[:-1], v.shape[-1])}, got {out.shape}")


def _lengths(side: str, cu_seqlens: Any, total: int, longest: int | None) -> tuple[tuple[int, ...] | None, int]:
    """The lengths of the sequences, None where they are on a GPU and `longest` is given; and the longest."""
    if longest is not None:
        if isinstance(longest, bool) or not isinstance(longest, Integral):
            raise TypeError(f"max_seqlen_{side} must be an integer or None, got {longest!r}")
        if not 0 <= longest <= MAX_LENGTH:
            raise ValueError(f"max_seqlen_{side} must be between 0 and {MAX_LENGTH:,}, got {longest}")
        if not isinstance(cu_seqlens, np.ndarray):
            return None, int(longest)
    if not isinstance(cu_seqlens, np.ndarray) and capturing():
        raise ValueError(
            f"max_seqlen_{side} must be given while a CUDA graph is captured: to look into cu_seqlens_{side} waits for the GPU"
        )
    found = cu_seqlens.tolist()  # from a GPU, this waits
    lengths = tuple(end - begin for begin, end in pairwise(found))
    if found[0] != 0 or found[-1] != total or min(lengths, default=0) < 0:
        raise ValueError(
            f"cu_seqlens_{side} must begin with 0, not decrease, and end with {total}, the length of {side}, "
            f"got {_shortened(found)}"
        )
    if longest is not None and longest < max(lengths, default=0):
        raise ValueError(f"max_seqlen_{side} must be at least the longest sequence's {max(lengths)}, got {longest}")
    return lengths, max(lengths, default=0) if longest is None else int(longest)


def _shortened(numbers: list[int]) -> str:
    """A list in one line."""
    return str(numbers) if len(numbers) <= 12 else f"[{', '.join(map(str, numbers[:6]))}, ..., {', '.join(map(str, numbers[-3:]))}]"
