"""Calls on NumPy arrays, as the simulator passes them on: q, k, v, further arrays, and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from cupyflash.basics import Array, Report, Values
from cupyflash.request.dropout import ARGUMENTS, Dropout
from cupyflash.request.named_scores import STEPS, one_score
from cupyflash.request.options import ARRAYS, VECTORS, Options
from cupyflash.request.problem import Problem
from cupyflash.request.score import Mask, Score, seen_by

NOTHING = Options()
NEWEST = Options(causal=True)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Arrays as `cupyflash.attention` takes them: q, k, v and, by name, those `beside` them (`cupyflash.request.options.ARRAYS`).

    `blocks` (Br, Bc) are a block mask's. `options` need not list the arrays; their score function is `score`'s form. `dropout` says
    which weights are dropped, if the options have it. If the call is one of several sequences, `sequence` is its number, b in the
    score's expression.
    """

    q: Array
    k: Array
    v: Array
    options: Options = NOTHING
    beside: Mapping[str, Array] = field(default_factory=dict)
    blocks: tuple[int, int] | None = None
    score: Score | None = None
    sequence: int = 0
    dropout: Dropout | None = None

    @classmethod
    def of(cls, q: Array, k: Array, v: Array, *, blocks: tuple[int, int] | None = None, **asked: Any) -> Inputs:
        """Make inputs from `attention`'s keywords. TypeError or ValueError for other keywords."""
        beside = {name: array for name in ARRAYS if (array := asked.pop(name, None)) is not None}
        dropout = Dropout.asked(asked)
        score, options = _score_and_options({name: value for name, value in asked.items() if name not in ARGUMENTS})
        return cls(q, k, v, replace(options, dropout=dropout is not None), beside, blocks, score, dropout=dropout)

    @property
    def qkv(self) -> tuple[Array, Array, Array]:
        return self.q, self.k, self.v

    @property
    def keywords(self) -> Report:
        """The keyword arguments for `attention`."""
        own: Report = {} if self.score is None else {"score": self.score}
        own |= {} if self.dropout is None else self.dropout.keywords
        return {**self.beside, **own, **self.options.keywords}

    @cached_property
    def problem(self) -> Problem:
        """The problem that the arrays pose. Raises as `Problem.from_arrays` does."""
        options = self.options if self.score is None else replace(self.options, score=self.score.form)
        return Problem.from_arrays(self.q, self.k, self.v, options, **self.beside)


@dataclass(frozen=True, eq=False)
class Decoding:
    """Arrays as `cupyflash.attention_decode` takes them, by its names, and its options; None means not given.

    A tree mask is (n_q, n_q) or (b, n_q, n_q). `mask` is a function.
    """

    arrays: Mapping[str, Array]
    options: Options = NEWEST
    score: Score | None = None
    mask: Mask | None = None

    @classmethod
    def of(cls, q: Array, k_cache: Array, v_cache: Array, cache_seqlens: Any, **asked: Any) -> Decoding:
        """Make it from `attention_decode`'s arguments. TypeError for other arguments."""
        names = "k", "v", "block_table", "tree_mask", *VECTORS
        beside = {name: array for name in names if (array := asked.pop(name, None)) is not None}
        mask = asked.pop("mask", None)
        score, options = _score_and_options({"causal": True, **asked})
        arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": np.asarray(cache_seqlens)}
        return cls(arrays | beside, options, score, mask)

    def rows(self, name: str, sequence: int) -> Array:
        """All rows of `k_cache` or `v_cache` that a sequence has room for, (h_kv, n, d): its pages one after the other."""
        cache, table = self.arrays[name], self.arrays.get("block_table")
        if table is None:
            own: Array = cache[sequence]
            return own
        pages = cache[np.clip(table[sequence], 0, len(cache) - 1)]  # (pages of the sequence, h_kv, page_size, d)
        behind: Array = np.moveaxis(pages, 1, 0).reshape(cache.shape[1], -1, cache.shape[3])
        return behind

    def appended(self, name: str) -> Array:
        """`k_cache` or `v_cache` with the new keys in their places."""
        cache: Array = self.arrays[name].copy()
        new, table = self.arrays.get(name[0]), self.arrays.get("block_table")
        if new is None:
            return cache
        for b, length in enumerate(self.arrays["cache_seqlens"]):
            for row, key in enumerate(range(length, length + new.shape[2])):
                page, place = (b, key) if table is None else (table[b, key // cache.shape[2]], key % cache.shape[2])
                cache[page, :, place] = new[b, :, row]
        return cache

    @cached_property
    def sequences(self) -> tuple[Inputs, ...]:
        """Each sequence as an ordinary call of a batch of one, with its new keys after the keys cached before the call."""
        return tuple(self._sequence(b, int(length)) for b, length in enumerate(self.arrays["cache_seqlens"]))

    def _sequence(self, b: int, length: int) -> Inputs:
        q, tree = self.arrays["q"][b : b + 1], self.arrays.get("tree_mask")
        both = []
        for cache, new in (("k_cache", "k"), ("v_cache", "v")):
            rows = self.rows(cache, b)[:, :length]
            both.append(np.concatenate([rows, self.arrays[new][b]], axis=1) if new in self.arrays else rows)
        k, v = (rows[None].copy() for rows in both)
        beside = {name: self.arrays[name] for name in VECTORS if name in self.arrays}
        n_q, keys = q.shape[2], k.shape[2]
        if tree is not None:
            seen = np.ones((n_q, keys), bool)
            newest = min(n_q, keys)  # a sequence may have fewer keys than queries: the mask's last columns are its newest keys
            seen[:, keys - newest :] = (tree if tree.ndim == 2 else tree[b])[:, n_q - newest :]
            beside["mask"] = seen
        if self.mask is not None:
            own = Problem(1, q.shape[1], k.shape[1], n_q, keys, q.shape[3], str(q.dtype), head_dim_v=v.shape[3])
            said = seen_by(self.mask.form, own, self.mask.arrays | self.mask.numbers, b)
            beside["mask"] = np.broadcast_to(said & beside.get("mask", np.True_), (1, q.shape[1], n_q, keys))
        options = replace(self.options, mask_function=None)  # the array has its values now
        return Inputs(q, k, v, options, beside, score=self.score, sequence=b)


def _score_and_options(asked: Values) -> tuple[Score | None, Options]:
    """Split a call's keywords into score function and options."""
    score, options = one_score(asked), {name: each for name, each in asked.items() if name not in STEPS}
    return score, Options(**options | {"score": score.form if score else None})
