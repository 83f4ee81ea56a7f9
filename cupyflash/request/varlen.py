"""Batches of sequences of different lengths, packed one after the other: the lengths from their bounds, and their problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from cupyflash.arrays import AnyArray, check_keys, heads_first, is_number, require_integers, require_shape
from cupyflash.basics import Values
from cupyflash.launch.launcher import capturing
from cupyflash.request.options import MAX_LENGTH, Options
from cupyflash.request.problem import Problem
from cupyflash.request.score import captured_among, check_captured

BOUNDS = ("cu_seqlens_q", "cu_seqlens_k")
LONGEST = ("max_seqlen_q", "max_seqlen_k")


@dataclass(frozen=True)
class Sequences:
    """The (queries, keys) of each sequence, None if they are on a GPU and need not be read; and of the longest."""

    lengths: tuple[tuple[int, int], ...] | None
    longest: tuple[int, int]

    def of(self, problem: Problem) -> Problem:
        """A problem that is yet to know how long its sequences are."""
        return replace(problem, seqlen_q=self.longest[0], seqlen_k=self.longest[1])


def pose(
    arrays: Values, options: Options, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None
) -> tuple[Problem, Sequences]:
    """The problem of the longest sequence, with the number of sequences as its batch, and the sequences' lengths.

    `arrays` are `attention_varlen`'s by name, and so are the errors.
    """
    problem = posed(arrays, options)
    found = sequences(arrays, len(arrays["q"]), len(arrays["k"]), max_seqlen_q, max_seqlen_k)
    problem = found.of(problem)
    check_captured(problem, captured_among(arrays))
    return problem, found


def posed(arrays: Values, options: Options) -> Problem:
    """The problem with the right number of sequences, before their lengths are checked."""
    check_bounds(arrays)
    views = {name: heads_first(arrays[name]) for name in ("q", "k", "v", "out") if name in arrays}
    known = {*views, *BOUNDS, *captured_among(arrays)}
    beside = {name: array for name, array in arrays.items() if name not in known}
    return replace(Problem.from_arrays(**views, **beside, options=options), batch=arrays[BOUNDS[0]].shape[0] - 1)


def check_bounds(arrays: Values) -> None:
    """TypeError or ValueError for arrays that cannot be those of packed sequences, whatever the bounds say."""
    _check_shapes(**{name: arrays[name] for name in ("q", "k", "v")})
    if "out" in arrays:
        require_shape("out", arrays["out"], (*arrays["q"].shape[:-1], arrays["v"].shape[-1]))
    for name in BOUNDS:
        require_integers(name, arrays[name])
        if arrays[name].ndim != 1 or arrays[name].shape[0] == 0:
            raise ValueError(f"{name} must have shape (b + 1,), a bound more than there are sequences, got {arrays[name].shape}")
    first, second = (arrays[name].shape for name in BOUNDS)
    if second != first:
        raise ValueError(f"cu_seqlens_k must have cu_seqlens_q's shape {first}, got {second}")


def sequences(bounds: Values, total_q: int, total_k: int, max_seqlen_q: int | None, max_seqlen_k: int | None) -> Sequences:
    """The lengths of the sequences, from bounds by name."""
    queries, longest_q = _lengths("q", bounds["cu_seqlens_q"], total_q, max_seqlen_q)
    keys, longest_k = _lengths("k", bounds["cu_seqlens_k"], total_k, max_seqlen_k)
    lengths = None if queries is None or keys is None else tuple(zip(queries, keys, strict=True))
    return Sequences(lengths, (longest_q, longest_k))


def _check_shapes(q: AnyArray, k: AnyArray, v: AnyArray) -> None:
    """Check the axes with the errors that `Problem.from_arrays` would give."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 3:
            batch = ": attention takes a batch of one length" if array.ndim == 4 else ""
            raise ValueError(f"{name} must be (total, h, d), got shape {array.shape}{batch}")
    check_keys(q, k, v)


def _lengths(side: str, cu_seqlens: Any, total: int, longest: int | None) -> tuple[tuple[int, ...] | None, int]:
    """The lengths of the sequences, None if they are on a GPU and `longest` is given; and the longest."""
    if longest is not None:
        if not is_number(longest):
            raise TypeError(f"max_seqlen_{side} must be an integer or None, got {longest!r}")
        if not 0 <= longest <= MAX_LENGTH:
            raise ValueError(f"max_seqlen_{side} must be between 0 and {MAX_LENGTH:,}, got {longest}")
        if not isinstance(cu_seqlens, np.ndarray):
            return None, int(longest)
    if not isinstance(cu_seqlens, np.ndarray) and capturing():
        raise ValueError(
            f"max_seqlen_{side} must be given while a CUDA graph is captured: reading cu_seqlens_{side} would wait for the GPU"
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
