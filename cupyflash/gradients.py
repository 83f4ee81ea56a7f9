"""The backward call: gradients of attention, of CuPy arrays on the GPU or of NumPy arrays on the simulated device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cupyflash import varlen
from cupyflash.arrays import Array, Layout, check_array, check_operand, last_axis_contiguous, row_alignment
from cupyflash.attention import attention, pose
from cupyflash.binding import by_tensor
from cupyflash.device import Device
from cupyflash.dispatch import as_array, as_arrays, as_integers, device_of, placed, target
from cupyflash.dropout import ARGUMENTS, NO_ORIGIN, Dropout
from cupyflash.launcher import (
    Prepared,
    as_contiguous,
    held_for_graph,
    hold_for_graph,
    kept,
    prepare,
    require_lengths,
    vectors_on_device,
    zeros,
)
from cupyflash.named_scores import one_score
from cupyflash.options import ARRAYS, KEYWORDS, Options, require_choice, require_flag
from cupyflash.problem import Problem
from cupyflash.schedules import BACKWARD_ALGORITHMS, BackwardSchedule, plan_backward, plan_varlen_backward
from cupyflash.score import Numbers, Score, captured_among, captured_values, check_captured, of_mask
from cupyflash.simulated import PreparedSimulation
from cupyflash.tiled_mask import Given
from cupyflash.tiling import TilingChoice


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any | None = None,
    bias: Any | None = None,
    key_lengths: Any | None = None,
    block_mask: Any | None = None,
    sinks: Any | None = None,
    score: Score | None = None,
    softcap: float | None = None,
    alibi_slopes: Any | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    dropout_origin: tuple[int, int, int, int] = NO_ORIGIN,
    scale: float | None = None,
    algorithm: str = "auto",
    score_dtype: str | None = None,
    tiling: TilingChoice = None,
    deterministic: bool = False,
    return_dbias: bool = False,
) -> tuple[Any, ...]:
    """dq, dk and dv: what `attention`'s inputs do to sum(dout * O), without a matrix of n_q x n_k in memory.

    `out` and `lse` are what `attention(q, k, v, ..., return_lse=True)` returned; `dout` is the gradient of out, of its shape and
    dtype; where its last axis is not contiguous, as in `broadcast_to(1, out.shape)`, the gradient of `out.sum()`, it is copied.
    All else as for `attention`, and with the values of that call. S and P are computed again, from L. Query heads that share a
    key head add up in its dk and dv; a row that sees no key has a gradient of zero, and so has a key that no row sees. A NaN or
    an infinity in a masked row of k or v makes the dq of rows that share a tile with it NaN, being multiplied by a weight of zero;
    what is behind `key_lengths` is not read. P = exp(S - L) would be off by what float32 rounds off L: in float32 each row goes
    through its scores once more, for m and log(l), and so do, by "fa2", rows of half types whose L is beyond 4096.
    With a `score` function (`softcap` and `alibi_slopes` are two) dq and dk have its derivative by s. That does not enter where a
    score is masked, or its weight is 0, whatever it is. What the function has captured gets no gradient.

    `algorithm`: "fa2" (FlashAttention-2), or "auto", which is "fa2". It sums dq by atomics, in float32 and in no order;
    `deterministic` takes a kernel of its own for dq instead, which gives the same bits each time. "fa1" (FlashAttention's
    Algorithm 4) and "standard" (Algorithm 3, three matrices of n_q x n_k in memory) are here to be measured, up to a d of 256; they
    give the same bits each time as they are. "standard" rounds S as its forward did: `score_dtype` is that call's.

    Returns arrays of q's dtype on q's device, of the shapes of q, k and v;
    with `sinks` their gradient, float32 ("fa2");
    with `return_dbias` also the bias's gradient, of its shape ("fa2"; what is broadcast adds up, by atomics, which `deterministic`
    refuses). Raises as `attention` does.
    """
    score = one_score(score, softcap, alibi_slopes)
    given = Given.of(mask)
    captured, numbers = captured_values(score, given.function)
    dropped = Dropout.asked(dropout, seed, offset, dropout_origin)
    form = None if score is None else score.form
    dropping = dropped is not None
    options = Options.asked(causal=causal, window=window, scale=scale, score=form, dropout=dropping, score_dtype=score_dtype)
    ways = _ways(algorithm, tiling, deterministic=deterministic, dbias=return_dbias, bias=bias)
    beside = {"mask": given.array, "bias": bias, "block_mask": block_mask, "sinks": sinks, **captured}
    arrays = as_arrays(dout=dout, q=q, k=k, v=v, out=out, lse=lse, **beside)
    options = given.asked(options, arrays["q"], arrays["k"])
    lengths = {} if key_lengths is None else {"key_lengths": as_integers("key_lengths", key_lengths)}
    gpu, integers = placed(arrays, lengths)
    with device_of(gpu, **arrays, **integers):
        call = kept(prepare_backward, gpu, readable(arrays | lengths), options, ways, of_mask(numbers))
        require_lengths(gpu, arrays | lengths)
        arrays |= vectors_on_device(gpu, arrays | lengths)
        arrays |= rows_beside(gpu, arrays)
        arrays |= given.states(call.given_tiles, gpu, arrays | dict(numbers))
        if return_dbias:
            arrays["dbias"] = zeros(gpu, arrays["bias"].shape, np.float32)
        made = call.launch(by_tensor(arrays), dict(numbers) if dropped is None else dict(numbers) | dropped.numbers)
    gradients = tuple(_returned(gpu, made))
    return (*gradients, arrays["dbias"].astype(arrays["q"].dtype)) if return_dbias else gradients


class Ways(NamedTuple):
    """How the gradients are made: the choices of a call that change no problem."""

    algorithm: str
    tiling: TilingChoice
    deterministic: bool
    dbias: bool


def _ways(algorithm: str, tiling: TilingChoice, *, deterministic: bool, dbias: bool, bias: Any | None) -> Ways:
    """TypeError or ValueError for choices that are none, whatever the arrays."""
    require_choice("algorithm", algorithm, ("auto", *BACKWARD_ALGORITHMS))
    require_flag("deterministic", deterministic)
    require_flag("return_dbias", dbias)
    if dbias and bias is None:
        raise ValueError("return_dbias is for a call with a bias, and there is none")
    return Ways("fa2" if algorithm == "auto" else algorithm, tiling, bool(deterministic), bool(dbias))


def prepare_backward(
    gpu: bool, arrays: Mapping[str, Array], options: Options, ways: Ways, numbers: Numbers
) -> Prepared | PreparedSimulation:
    problem = pose(gpu, _inputs(arrays), options, numbers)
    problem = _aligned(problem, check_beside(arrays, arrays["q"].shape[:-1]))
    device, simulation = target(gpu)
    schedule = _planned(problem, device, ways, arrays.get("bias"))
    made = _made(arrays) | _of_rows(schedule, arrays)
    sums = {"dbias": Layout.contiguous(arrays["bias"].shape, np.float32)} if ways.dbias else {}
    return prepare(schedule, simulation, by_tensor(arrays) | made | sums | dict(numbers), made)


def _of_rows(schedule: BackwardSchedule, arrays: Mapping[str, Array]) -> dict[str, Layout]:
    """What the kernels make for each row."""
    return {name: Layout.contiguous(arrays["lse"].shape, np.float32) for name in schedule.row_results}


def _returned(gpu: bool, made: Mapping[str, Any]) -> Iterator[Any]:
    """What a call returns: of what the kernels made for each row, the sums over a head's, (h,)."""
    for name, array in made.items():
        if name not in ("dQ", "dK", "dV"):
            if gpu:
                hold_for_graph(array)  # which the caller does not get
            with held_for_graph(gpu):
                array = of_heads(array)
        yield array


def of_heads(rows: Any) -> Any:
    """The sums over each head's rows, (h,), of an array (..., h, n) or (n,) of NumPy or CuPy."""
    heads = rows.shape[-2] if rows.ndim > 1 else 1
    return rows.reshape(math.prod(rows.shape[:-2]), heads, rows.shape[-1]).sum(axis=(0, 2))


def _aligned(problem: Problem, alignment: int) -> Problem:
    """With rows of dout and out, which may be worse aligned than the others."""
    return replace(problem, alignment=min(problem.alignment, alignment))


def readable(arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays as the kernels get them: of a dout that they cannot read, the layout of its copy."""
    dout = arrays["dout"]
    return arrays if last_axis_contiguous(dout) else arrays | {"dout": Layout.contiguous(dout.shape, dout.dtype)}


def rows_beside(gpu: bool, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """lse without strides, and a dout that kernels can read: a broadcast gradient, of `out.sum()` say, has none of its own."""
    dout = arrays["dout"]
    if not last_axis_contiguous(dout):
        dout = as_contiguous(gpu, dout, dout.dtype)
    return {"lse": as_contiguous(gpu, arrays["lse"], np.float32), "dout": dout}


def _made(arrays: Mapping[str, Array]) -> dict[str, Layout]:
    """The gradients, which a call allocates."""
    return {f"d{name.upper()}": Layout.contiguous(arrays[name].shape, arrays[name].dtype) for name in "qkv"}


def attention_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
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
    deterministic: bool = False,
) -> tuple[Any, ...]:
    """dq, dk and dv (and dsinks) of `attention_varlen`, whose out and lse these are; shapes as there, dout as out.

    Else as `attention_backward`.

    On a GPU pass both `max_seqlen`, or the bounds as NumPy arrays, as there.
    """
    score = one_score(score, softcap, alibi_slopes)
    given = Given.of_sequences(mask)
    captured, numbers = captured_values(score, given.function)
    form, dropped = None if score is None else score.form, Dropout.asked(dropout, seed, offset, dropout_origin)
    options = Options.asked(causal=causal, window=window, scale=scale, packed=True, score=form, dropout=dropped is not None)
    ways = _ways("fa2", tiling, deterministic=deterministic, dbias=False, bias=None)
    arrays = as_arrays(dout=dout, q=q, k=k, v=v, out=out, lse=lse, sinks=sinks, **captured)
    gpu, bounds, beside = varlen.bounds_of(arrays, cu_seqlens_q, cu_seqlens_k)
    options = given.asked(options, arrays["q"], arrays["k"], bounds)
    with device_of(gpu, **arrays, **beside):
        longest, functions = (max_seqlen_q, max_seqlen_k), (posed_backward, prepare_varlen_backward)
        call = varlen.kept_sequences(functions, gpu, readable(arrays), bounds, longest, options, ways)
        arrays |= vectors_on_device(gpu, arrays | bounds) | rows_beside(gpu, arrays)
        arrays |= given.states(call.given_tiles, gpu, arrays | dict(numbers))
        made = call.launch(by_tensor(arrays), dict(numbers) if dropped is None else dict(numbers) | dropped.numbers)
    return tuple(_returned(gpu, made))


def posed_backward(gpu: bool, arrays: Mapping[str, Any], options: Options) -> Problem:
    """As many sequences as there are, of lengths that are yet to be looked at."""
    problem = varlen.posed(gpu, _inputs(arrays), options)
    return _aligned(problem, check_beside(arrays, arrays["q"].shape[1::-1]))


def prepare_varlen_backward(
    gpu: bool,
    arrays: Mapping[str, Array],
    sequences: varlen.Sequences,
    options: Options,
    ways: Ways,
) -> Prepared | PreparedSimulation:
    problem = sequences.of(posed_backward(gpu, arrays, options))
    check_captured(problem, captured_among(arrays))
    device, simulation = target(gpu)
    totals, each = (arrays["q"].shape[0], arrays["k"].shape[0]), sequences.lengths
    schedule = plan_varlen_backward(problem, device, each, ways.tiling, deterministic=ways.deterministic, totals=totals)
    made, tensors = _made(arrays) | _of_rows(schedule, arrays), by_tensor(arrays)
    views = {name: varlen.heads_first(array) for name, array in (tensors | made).items() if name in ROWS}
    return prepare(schedule, simulation, tensors | made | views, made)


# Tensors of (total, h, d), which the kernels take with their heads first
ROWS = ("Q", "K", "V", "O", "dO", "dQ", "dK", "dV")


def _inputs(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """What the forward is given: without what it returned and the gradient."""
    return {name: array for name, array in arrays.items() if name not in ("dout", "out", "lse")}


def check_beside(arrays: Mapping[str, Any], rows: tuple[int, ...]) -> int:
    """TypeError or ValueError for a dout, out or lse that does not go with the others; the alignment of the first two's rows."""
    q, v, lse = (arrays[name] for name in ("q", "v", "lse"))
    check_array("lse", lse)
    for name in ("out", "dout"):
        check_operand(name, arrays[name], q)
        if arrays[name].shape != (*q.shape[:-1], v.shape[-1]):
            raise ValueError(f"{name} must have shape {(*q.shape[:-1], v.shape[-1])}, got {arrays[name].shape}")
    if lse.dtype != np.float32:
        raise TypeError(f"lse must be of dtype float32, got {lse.dtype}")
    if lse.shape != rows:
        raise ValueError(f"lse must have shape {rows}, got {lse.shape}")
    return min(row_alignment(arrays[name]) for name in ("out", "dout"))


def _spans(bias: Any, problem: Problem) -> bool:
    """Whether a bias has an element of its own for every score."""
    whole = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    return math.prod(bias.shape) == math.prod(whole) and all(bias.strides[n] for n, size in enumerate(bias.shape) if size > 1)


def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    algorithm: str = "auto",
    tiling: TilingChoice = None,
    deterministic: bool = False,
    return_dbias: bool = False,
    **options: Any,
) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """`attention(q, k, v, ...)` and its pullback, which takes dout and returns what `attention_backward` does: dq, dk, dv, then
    dsinks where there are sinks, then dbias with `return_dbias`.

    The pullback holds q, k, v, out and the log-sum-exps, 4 bytes a row; it may be called as often as one likes. `algorithm` and
    `tiling` are those of both passes ("auto" is what each takes by default); `options` are `attention`'s, but for `return_lse` and
    `out`. Raises as `attention` and `attention_backward` do, for both before anything is computed.
    """
    if unknown := {"return_lse", "out"} & set(options):
        raise TypeError(f"attention_vjp has no {unknown.pop()}")
    ways = _ways(algorithm, tiling, deterministic=deterministic, dbias=return_dbias, bias=options.get("bias"))
    score = one_score(*(options.pop(name, None) for name in ("score", "softcap", "alibi_slopes")))
    mask = Given.of(options.get("mask"))
    captured, numbers = captured_values(score, mask.function)
    as_given = {name: options[name] for name in KEYWORDS if name in options}
    dropped = Dropout.asked(*(options.get(name, default) for name, default in ARGUMENTS.items()))
    asked = Options(**as_given, score=None if score is None else score.form, dropout=dropped is not None)
    beside = {**{name: options.get(name) for name in ARRAYS}, "mask": mask.array, **captured}
    given = {"q": q, "k": k, "v": v} | {name: array for name, array in beside.items() if array is not None}
    lengths = {name: as_integers(name, given.pop(name)) for name in ("key_lengths",) if name in given}
    arrays = {name: as_array(name, array) for name, array in given.items()}
    asked = mask.asked(asked, arrays["q"], arrays["k"])
    gpu, integers = placed(arrays, lengths)
    with device_of(gpu, **arrays, **integers):
        kept(_check_planned, gpu, arrays | lengths, asked, ways, of_mask(numbers))
        out, lse = attention(q, k, v, algorithm=algorithm, tiling=tiling, return_lse=True, score=score, **options)
        if gpu:
            hold_for_graph(lse)  # which nobody but the pullback has
    options |= {
        "score": score,
        "algorithm": algorithm,
        "tiling": tiling,
        "deterministic": deterministic,
        "return_dbias": return_dbias,
    }

    def pullback(dout: Any) -> tuple[Any, ...]:
        return attention_backward(dout, q, k, v, out, lse, **options)

    return out, pullback


def _check_planned(gpu: bool, arrays: Mapping[str, Array], options: Options, ways: Ways, numbers: Numbers) -> None:
    """Refuses what no backward kernel runs."""
    problem = pose(gpu, arrays, options, numbers)
    _planned(problem, target(gpu)[0], ways, arrays.get("bias")).kernels()


def _planned(problem: Problem, device: Device, ways: Ways, bias: Array | None) -> BackwardSchedule:
    if ways.dbias and ways.deterministic and bias is not None and not _spans(bias, problem):
        raise ValueError(f"deterministic has no sum over what a bias is broadcast along, got shape {bias.shape}")
    return plan_backward(problem, device, ways.algorithm, ways.tiling, deterministic=ways.deterministic, dbias=ways.dbias)
