"""Compiles ahead of the first call."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from cupyflash.arrays import MAX_ALIGNMENT
from cupyflash.device import Device
from cupyflash.launch.simulated import current_simulation
from cupyflash.request.keywords import SCORE_ARRAYS, SCORE_NUMBERS
from cupyflash.request.named_scores import one_score
from cupyflash.request.options import Options, require_choice, require_flag
from cupyflash.request.problem import Problem, checked_size
from cupyflash.request.score import Form, Mask, Score, captured_values
from cupyflash.schedules import (
    ALGORITHMS,
    VARLEN_ALGORITHMS,
    Cache,
    Kernel,
    TileSchedule,
    fa2_tiles,
    plan,
    plan_decode,
    plan_varlen,
)
from cupyflash.schedules.fa3 import Fa3Schedule
from cupyflash.tiling import TilingChoice


def warmup(
    *,
    head_dim: int,
    dtype: str = "float16",
    head_dim_v: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: bool | Mask = False,
    bias: bool | str = False,
    padded: bool = False,
    sinks: bool = False,
    score: Score | None = None,
    softcap: bool = False,
    alibi_slopes: bool = False,
    dropout: bool = False,
    varlen: bool = False,
    algorithm: str = "auto",
    tiling: TilingChoice = None,
) -> None:
    """Compile the kernels of calls in advance, so that the first call is as quick as the others.

    `score` has the text and the types of the calls'; the captured values, the lengths of their axes and the arrays' memory do not
    matter. So does `mask`, if it is a `Mask`; else True if calls will have an array. `softcap`, `alibi_slopes` (of shape (h,)),
    `bias`, `padded` and `dropout` are True if calls will have these: `padded` stands for key lengths; `bias` is "float32" for one
    of that dtype beside half types. `varlen` is for `attention_varlen`, which has no mask but a `Mask`, no bias and no key lengths.
    Sizes (of a window too) do not matter, since no kernel is compiled for one size: if sizes choose between kernels, and on a
    Hopper between "fa3" and "fa2", all of those are compiled (except "fa3" with rows of several heads in a block, for few queries
    and grouped heads, and "decode", for few queries against many keys). Contiguous arrays are assumed. On the current GPU the
    kernels are loaded too; without a GPU the simulated device's kernels are compiled and parsed. Raises as `attention` does.
    """
    require_flag("varlen", varlen)
    require_choice("algorithm", algorithm, ("auto", *ALGORITHMS))
    of_float32 = {"bias": True, "bias_dtype": bias} if isinstance(bias, str) else {"bias": bias}
    asked = Options(causal=causal, window=window, padded=padded, packed=varlen, sinks=sinks, **of_float32)
    asked = replace(asked, mask_function=mask.form) if isinstance(mask, Mask) else replace(asked, mask=mask)
    options = replace(asked, score=_form(score, softcap=softcap, alibi_slopes=alibi_slopes), dropout=dropout)
    problem = _contiguous(Problem(1, 1, 1, 1, 1, head_dim, dtype, options, head_dim_v))
    device, simulated = _here()
    if varlen and algorithm not in ("auto", *VARLEN_ALGORITHMS):
        raise ValueError(f"algorithm must be one of auto, {', '.join(VARLEN_ALGORITHMS)} for varlen, got {algorithm!r}")
    schedules = list(_schedules(problem, device, algorithm, tiling))
    queues = [schedule.queue_kernel for schedule in schedules if isinstance(schedule, Fa3Schedule) and schedule.unlike]
    _compile([*queues, *(kernel for schedule in schedules for kernel in schedule.kernels())], device, simulated)


def warmup_decode(
    *,
    batch: int | Iterable[int],
    heads: int,
    head_dim: int,
    room: int,
    kv_heads: int | None = None,
    queries: int = 1,
    dtype: str = "float16",
    head_dim_v: int | None = None,
    page_size: int | None = None,
    append: bool = False,
    tree_mask: bool = False,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    mask: Mask | None = None,
    score: Score | None = None,
    softcap: bool = False,
    alibi_slopes: bool = False,
    sinks: bool = False,
    num_splits: int | None = None,
) -> None:
    """Compile the kernels of `attention_decode` in advance, so that the first call is as quick as the others.

    The model that chooses kernels and splits uses sizes, so they are arguments: `batch`, one number or all that will occur, as
    range(1, 65); `heads` and `kv_heads` (None: as many); `queries` of each sequence; `room`, the keys for which a sequence has
    room: a cache's n, or `page_size` times the pages in a row of the block table. `append`, `tree_mask` and `sinks` are True if
    calls will have new keys, the mask, sinks; `mask`, `score`, `softcap` and `alibi_slopes` are `warmup`'s. Lengths, the number of
    new keys and a window's size do not matter. A positive scale and contiguous arrays, or views of such, are assumed. On the
    current GPU the kernels are loaded too; without a GPU the simulated device's kernels are compiled and parsed. Nothing is run.
    Raises as `attention_decode` does.
    """
    for name, value in (("append", append), ("tree_mask", tree_mask)):
        require_flag(name, value)
    every: Iterable[Any] = [batch] if isinstance(batch, str | bytes | np.ndarray) or not isinstance(batch, Iterable) else batch
    batches = [checked_size("batch", each) for each in every]
    if not batches:
        raise ValueError(f"batch must be an integer or some integers, got {batch!r}")
    for name, least in (("batch", min(batches)), ("heads", heads), ("queries", queries), ("room", room)):
        if not checked_size(name, least):
            raise ValueError(f"{name} must be at least 1, got 0")
    options = Options(
        causal=causal, window=window, padded=True, sinks=sinks, score=_form(score, softcap=softcap, alibi_slopes=alibi_slopes)
    )
    if not isinstance(mask, Mask | None):
        raise TypeError(f"mask must be a cupyflash.Mask or None, got {type(mask).__name__}")
    options = replace(options, mask_function=None if mask is None else mask.form)
    cache = Cache(int(append), page_size, 0, tree_mask)
    if page_size is not None and room % page_size:
        raise ValueError(f"room must be whole pages of {page_size} keys (page_size), got {room}")
    device, simulated = _here()
    found: dict[tuple[str, object], Kernel] = {}
    for each in batches:
        sizes = each, heads, heads if kv_heads is None else kv_heads, queries, room
        problem = _contiguous(Problem(*sizes, head_dim, dtype, options, head_dim_v))
        for kernel in plan_decode(problem, device, cache, num_splits=num_splits).kernels():
            found[kernel.name, kernel.constants] = kernel
    _compile(found.values(), device, simulated)


def _form(score: Score | None, **named: bool) -> Form | None:
    """The form of the score function for which kernels are compiled."""
    for name, value in named.items():
        require_flag(name, value)
    captured_values(score)  # refuses what is no Score
    values = dict.fromkeys(SCORE_NUMBERS, 1.0) | dict.fromkeys(SCORE_ARRAYS, np.ones(1, np.float32))
    found = one_score({"score": score} | {name: values[name] for name, asked in named.items() if asked})
    return None if found is None else found.form


def _contiguous(problem: Problem) -> Problem:
    """The problem of arrays whose rows are whole, one after the other."""
    bits = problem.head_dim * problem.itemsize | problem.head_dim_v * problem.itemsize | MAX_ALIGNMENT
    return replace(problem, alignment=bits & -bits)


def _here() -> tuple[Device, bool]:
    """The current GPU, or the simulated device; and whether it is that."""
    try:
        return Device.current(), False
    except (ImportError, RuntimeError):
        return current_simulation().device, True


def _compile(kernels: Iterable[Kernel], device: Device, simulated: bool) -> None:
    for kernel in kernels:
        if simulated:
            from cupyflash.sim.execution import module

            module(kernel, device.compute_capability)
        else:
            from cupyflash.launch.compiler import gpu_kernel

            gpu_kernel(kernel, sys.modules["cupy"].cuda.runtime.getDevice())


def _schedules(problem: Problem, device: Device, algorithm: str, tiling: TilingChoice) -> Iterator[TileSchedule]:
    """The schedules of calls that differ in lengths and heads."""

    def planned(algorithm: str, tiling: TilingChoice) -> TileSchedule:
        if problem.options.packed:
            return plan_varlen(problem, device, None, tiling, algorithm=algorithm)
        return plan(problem, device, algorithm, tiling)

    if algorithm == "auto" and tiling is None:
        with suppress(ValueError):  # where it does not run such calls
            yield planned("fa3", None)
    if algorithm in ("auto", "fa2") and tiling is None:
        for each in fa2_tiles.finalists(problem, device):
            yield planned("fa2", (each.config.block_rows, each.config.block_cols))
    else:
        yield planned("fa2" if algorithm == "auto" else algorithm, tiling)
