"""The attention problem: sizes, dtype and options, checked once, before anything is planned, compiled or launched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np

from cupyflash.arrays import (
    ITEMSIZE,
    MAX_ALIGNMENT,
    AnyArray,
    check_array,
    check_keys,
    check_operand,
    check_scores_like,
    dtype_name,
    is_number,
    require_dtype,
    require_integers,
    require_places,
    require_shape,
    row_alignment,
)
from cupyflash.basics import Array, Shape, Values
from cupyflash.request.options import ARRAYS, MAX_LENGTH, VECTORS, Options

MAX_HEAD_DIM = 512
"""d and d_v of "fa2", of half types."""
USUAL_HEAD_DIM = 256
"""d and d_v of everything else."""


@dataclass(frozen=True, init=False)
class Problem:
    """O = softmax(scale Q K^T + bias) V for `batch` x `heads` independent heads.

    Q is (batch, heads, seqlen_q, head_dim), K (batch, kv_heads, seqlen_k, head_dim), V (batch, kv_heads, seqlen_k, head_dim_v), and
    query head h reads key head h // (heads // kv_heads); `head_dim_v` is `head_dim` if None. For packed sequences seqlen_q and
    seqlen_k are the longest. `alignment` is the number of bytes (a power of two up to 16) that divides the address of every row: it
    limits the width of a copy.

    `options` say which scores count. Fields of `Options` may be given by name instead: `Problem(..., causal=True)`.

    Raises TypeError or ValueError that names the argument, its value and the allowed values.
    """

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str
    options: Options
    head_dim_v: int
    alignment: int

    def __init__(
        self,
        batch: int,
        heads: int,
        kv_heads: int,
        seqlen_q: int,
        seqlen_k: int,
        head_dim: int,
        dtype: str,
        options: Options | None = None,
        head_dim_v: int | None = None,
        alignment: int = MAX_ALIGNMENT,
        **asked: Any,
    ) -> None:
        dims = {"head_dim": head_dim, "head_dim_v": head_dim if head_dim_v is None else head_dim_v}
        sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, **dims}
        for name, value in sizes.items():
            object.__setattr__(self, name, checked_size(name, value))
        if self.heads and (not self.kv_heads or self.heads % self.kv_heads):
            raise ValueError(f"heads must be a multiple of kv_heads, got heads={self.heads} and kv_heads={self.kv_heads}")
        object.__setattr__(self, "dtype", dtype_name(dtype))
        if self.itemsize > 2:
            require_usual_head_dim(self, self.dtype)
        options = _with_asked(options, asked)
        if self.dtype == options.bias_dtype:
            options = replace(options, bias_dtype=None)
        object.__setattr__(self, "options", options.sized(self.batch, self.heads, self.seqlen_q, self.seqlen_k))
        if not isinstance(alignment, Integral) or alignment not in (2, 4, 8, 16) or alignment < self.itemsize:
            raise ValueError(f"alignment must be 2, 4, 8 or 16 bytes and hold one {self.dtype}, got {alignment!r}")
        object.__setattr__(self, "alignment", int(alignment))

    @classmethod
    def from_arrays(
        cls, q: AnyArray, k: AnyArray, v: AnyArray, options: Options | None = None, *, out: AnyArray | None = None, **asked: Any
    ) -> Problem:
        """Return the problem of arrays of shape (n, d), (h, n, d) or (b, h, n, d); `out`, if given, receives O.

        k and v may have fewer heads than q, if their number divides q's; v and out may have another last axis than q and k. The
        last axis of each must be contiguous. `asked` are arrays beside them, and fields of `Options` by name: `mask` (bool) and
        `bias` (q's dtype or float32) must broadcast to (..., n_q, n_k), `key_lengths` (integers) must be (b,), or (1,) without a
        batch axis, `block_mask` (bool) have two to four axes.
        """
        beside = {name: asked.pop(name, None) for name in ARRAYS}
        options = _with_asked(options, asked)
        named = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
        for name, array in named.items():
            check_operand(name, array, q)
        check_keys(q, k, v)
        if q.ndim == 4 and k.shape[0] != q.shape[0]:
            raise ValueError(f"k and v must have q's batch size {q.shape[0]}, got shape {k.shape}")
        if out is not None:
            check_out(out, (*q.shape[:-1], v.shape[-1]))
        _check_beside(q, k, beside)
        heads, kv_heads = (q.shape[-3], k.shape[-3]) if q.ndim > 2 else (1, 1)
        return cls(
            q.shape[0] if q.ndim == 4 else 1,
            heads,
            kv_heads,
            q.shape[-2],
            k.shape[-2],
            q.shape[-1],
            str(q.dtype),
            options.beside(beside),
            head_dim_v=v.shape[-1],
            alignment=min(row_alignment(array) for array in named.values()),
        )

    def asking(self, **asked: Any) -> Problem:
        """The same problem with other options, by the names of `Options`' fields."""
        return replace(self, options=replace(self.options, **asked))

    @property
    def itemsize(self) -> int:
        """Bytes of one element of Q, K, V and O."""
        return ITEMSIZE[self.dtype]

    @property
    def bias_dtype(self) -> str:
        """The dtype of a bias."""
        return self.options.bias_dtype or self.dtype

    @property
    def bias_itemsize(self) -> int:
        """Bytes of one element of a bias."""
        return ITEMSIZE[self.bias_dtype]

    @property
    def score_itemsize(self) -> int:
        """Bytes of one element of an S in memory."""
        return ITEMSIZE[self.options.score_dtype or self.dtype]

    @property
    def softmax_scale(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.options.scale is None else self.options.scale

    @cached_property
    def head_count(self) -> int:
        """B x H: the number of independent (batch, query head) pairs."""
        return self.batch * self.heads

    @property
    def keys_of_each(self) -> tuple[int, ...]:
        """The keys of each sequence of the batch: the longest's where the host does not know them."""
        return self.options.key_lengths or (self.seqlen_k,) * self.batch

    @property
    def group(self) -> int:
        """Query heads that share a key head; 1 if there are none."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def diagonal(self) -> int:
        """The last key column that query row 0 sees under the causal mask; row r sees `diagonal` + r and all before."""
        return self.seqlen_k - self.seqlen_q

    def keys_seen(self, rows: Array, keys: int) -> tuple[Array, Array]:
        """(first, end): the columns first <= c < end of `keys` that each of `rows` sees for its position, first <= end."""
        own = rows + self.diagonal
        end = np.full_like(own, keys) if self.options.right is None else np.clip(own + self.options.right + 1, 0, keys)
        first = np.zeros_like(own) if self.options.left is None else np.clip(own - self.options.left, 0, end)
        return first, end

    def sees(self, rows: Array, keys: int) -> Array:
        """The `keys` columns that each of `rows` sees by its position, (rows, keys) of bool."""
        (first, end), columns = self.keys_seen(rows[:, None], keys), np.arange(keys)
        return (first <= columns) & (columns < end)

    @property
    def flops(self) -> int:
        """Floating point operations of the two products, 2 Nq Nk (d + d_v) a head, nothing skipped or padded."""
        return 2 * self.head_count * self.seqlen_q * self.seqlen_k * (self.head_dim + self.head_dim_v)

    @property
    def backward_flops(self) -> int:
        """The same of the backward's five products, 2 Nq Nk (3 d + 2 d_v) a head: S, dP, dV, dQ and dK."""
        return 2 * self.head_count * self.seqlen_q * self.seqlen_k * (3 * self.head_dim + 2 * self.head_dim_v)


def _with_asked(options: Options | None, asked: Values) -> Options:
    if not isinstance(options, Options | None):
        raise TypeError(f"options must be an Options or None, got {options!r}")
    return replace(options or Options(), **asked)


def checked_size(name: str, value: Any) -> int:
    """A size of a problem as Python's integer. TypeError or ValueError that names it."""
    least, most = (1, MAX_HEAD_DIM) if name.startswith("head_dim") else (0, MAX_LENGTH)
    if not is_number(value):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    size = int(value)
    if not least <= size <= most:
        raise ValueError(f"{name} must be between {least} and {most:,}, got {size}")
    return size


def require_usual_head_dim(problem: Problem, what: str) -> None:
    """ValueError for a d or d_v beyond the limit of most kernels; `what` names the one that does not take it."""
    for name in ("head_dim", "head_dim_v"):
        if (size := getattr(problem, name)) > USUAL_HEAD_DIM:
            takes = f"up to {MAX_HEAD_DIM} are 'fa2' in float16 and bfloat16"
            raise ValueError(f"{name} must be between 1 and {USUAL_HEAD_DIM} for {what}, got {size}; {takes}")


def check_out(out: AnyArray, shape: Shape) -> None:
    """ValueError for an array that O cannot be written to."""
    require_shape("out", out, shape)
    steps = [stride for length, stride in zip(out.shape, out.strides, strict=True) if length > 1]
    if 0 not in out.shape and min(steps, default=1) <= 0:  # the strides of an empty array do not matter
        raise ValueError(f"out must have positive strides, got {out.strides} bytes")
    require_places("out", out)


def _check_beside(q: AnyArray, k: AnyArray, beside: Mapping[str, AnyArray | None]) -> None:
    """TypeError or ValueError for arrays that do not go with q and k. (A block mask is checked by `Options`.)"""
    scores = (*q.shape[:-1], k.shape[-2])
    for name, dtypes in (("mask", ("bool",)), ("bias", (dtype_name(q.dtype), "float32"))):
        if (array := beside[name]) is not None:
            check_scores_like(name, array, scores, dtypes)
    if (lengths := beside["key_lengths"]) is not None:
        require_lengths("key_lengths", lengths, q.shape[0] if q.ndim == 4 else 1)
    check_vectors(q, beside)


def require_lengths(name: str, lengths: AnyArray, batch: int) -> None:
    """TypeError or ValueError unless there is an integer for each of a batch."""
    check_array(name, lengths)
    require_integers(name, lengths)
    require_shape(name, lengths, (batch,), ", a length for each of the batch")


def check_vectors(q: AnyArray, arrays: Mapping[str, AnyArray | None]) -> None:
    """TypeError or ValueError for vectors, among arrays by name, that do not go with q."""
    heads = q.shape[-3:-2] or (1,)
    for name in VECTORS:
        if (given := arrays.get(name)) is not None:
            check_array(name, given)
            if given.shape != heads or given.dtype.name not in ITEMSIZE:
                what = f"{', '.join(ITEMSIZE)} of shape {heads}, a number a head"
                raise ValueError(f"{name} must be {what}, got {given.dtype} of {given.shape}")


def check_rows(arrays: Values, rows: tuple[int, ...]) -> int:
    """TypeError or ValueError for a dout, out or lse that does not go with the others; the alignment of the first two's rows."""
    q, v, lse = (arrays[name] for name in ("q", "v", "lse"))
    check_array("lse", lse)
    for name in ("out", "dout"):
        check_operand(name, arrays[name], q)
        require_shape(name, arrays[name], (*q.shape[:-1], v.shape[-1]))
    require_dtype("lse", lse, np.float32)
    require_shape("lse", lse, rows)
    return min(row_alignment(arrays[name]) for name in ("out", "dout"))
