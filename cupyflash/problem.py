"""The attention problem: sizes, dtype and masking, checked once, before anything is planned, compiled or launched."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any, Protocol

# Bytes of one element. The input types of the paper's M: shared memory is counted in elements of these.
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
MAX_HEAD_DIM = 256
# The widest copy between HBM and SRAM, in bytes.
MAX_ALIGNMENT = 16


class Array(Protocol):
    """What NumPy and CuPy arrays have in common, as far as a problem needs it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def ndim(self) -> int: ...


@dataclass(frozen=True)
class Problem:
    """O = softmax(scale Q K^T) V for `batch` x `heads` independent heads.

    Q is (batch, heads, seqlen_q, head_dim); K and V are (batch, kv_heads, seqlen_k, head_dim), query head h reading
    key head h // (heads // kv_heads). `causal` is aligned bottom-right: query row r sees key column c when
    c <= r + seqlen_k - seqlen_q. `scale` is 1 / sqrt(head_dim) when None. `alignment` is the number of bytes (a power of
    two up to 16) that divides the address of every row: it bounds the width of a copy.

    Raises TypeError or ValueError that names the argument, its value and what is allowed.
    """

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str
    causal: bool = False
    scale: float | None = None
    alignment: int = MAX_ALIGNMENT

    def __post_init__(self) -> None:
        for name, least in (
            ("batch", 0),
            ("heads", 0),
            ("kv_heads", 0),
            ("seqlen_q", 0),
            ("seqlen_k", 0),
            ("head_dim", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
            object.__setattr__(self, name, int(value))
        if self.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim must be between 1 and {MAX_HEAD_DIM}, got {self.head_dim}")
        if self.heads and (not self.kv_heads or self.heads % self.kv_heads):
            raise ValueError(f"heads must be a multiple of kv_heads, got heads={self.heads} and kv_heads={self.kv_heads}")
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if not isinstance(self.causal, bool) and type(self.causal).__name__ not in ("bool", "bool_"):
            raise TypeError(f"causal must be True or False, got {self.causal!r}")
        object.__setattr__(self, "causal", bool(self.causal))
        if self.scale is not None:
            if isinstance(self.scale, bool) or not isinstance(self.scale, Real):
                raise TypeError(f"scale must be a real number or None, got {self.scale!r}")
            if not math.isfinite(self.scale):
                raise ValueError(f"scale must be finite, got {self.scale!r}")
            object.__setattr__(self, "scale", float(self.scale))
        if self.alignment not in (2, 4, 8, 16) or self.alignment < self.itemsize:
            raise ValueError(f"alignment must be 2, 4, 8 or 16 bytes and hold one {self.dtype}, got {self.alignment!r}")

    @classmethod
    def from_arrays(
        cls,
        q: Array,
        k: Array,
        v: Array,
        *,
        causal: bool = False,
        scale: float | None = None,
        out: Array | None = None,
    ) -> Problem:
        """The problem that arrays of shape (n, d), (h, n, d) or (b, h, n, d) pose; `out`, if given, is where O goes.

        k and v may have fewer heads than q, if their number divides q's. The last axis of each must be contiguous.
        """
        named = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
        for name, array in named.items():
            if not all(hasattr(array, attribute) for attribute in ("shape", "dtype", "strides", "ndim")):
                raise TypeError(f"{name} must be a NumPy or CuPy array, got {type(array).__name__}")
        for name, array in named.items():
            if array.ndim not in (2, 3, 4):
                raise ValueError(f"{name} must be (n, d), (h, n, d) or (b, h, n, d), got shape {array.shape}")
            if array.ndim != q.ndim:
                raise ValueError(f"{name} must have as many axes as q, got shape {array.shape} beside q's {q.shape}")
            if dtype_name(array.dtype, name) != dtype_name(q.dtype, "q"):
                raise TypeError(f"{name} must have q's dtype {q.dtype}, got {array.dtype}")
            if array.shape[-1] != q.shape[-1]:
                raise ValueError(f"{name} must have q's head dimension {q.shape[-1]}, got shape {array.shape}")
            if array.shape[-1] > 1 and array.strides[-1] != array.dtype.itemsize and 0 not in array.shape:
                raise ValueError(
                    f"{name} must be contiguous along its last axis, got strides {array.strides} bytes for {array.dtype}"
                )
            if any(stride % array.dtype.itemsize for stride in array.strides):
                raise ValueError(f"{name} must have strides in whole elements, got {array.strides} bytes for {array.dtype}")
        if k.shape != v.shape:
            raise ValueError(f"v must have k's shape {k.shape}, got {v.shape}")
        if q.ndim == 4 and k.shape[0] != q.shape[0]:
            raise ValueError(f"k and v must have q's batch size {q.shape[0]}, got shape {k.shape}")
        if out is not None and out.shape != q.shape:
            raise ValueError(f"out must have q's shape {q.shape}, got {out.shape}")
        batch = q.shape[0] if q.ndim == 4 else 1
        heads, kv_heads = (q.shape[-3], k.shape[-3]) if q.ndim > 2 else (1, 1)
        return cls(
            batch,
            heads,
            kv_heads,
            q.shape[-2],
            k.shape[-2],
            q.shape[-1],
            str(q.dtype),
            causal,
            scale,
            alignment=min(row_alignment(array) for array in named.values()),
        )

    @property
    def itemsize(self) -> int:
        """Bytes of one element of Q, K, V and O."""
        return ITEMSIZE[self.dtype]

    @property
    def softmax_scale(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @cached_property
    def head_count(self) -> int:
        """B x H: the number of independent (batch, query head) pairs."""
        return self.batch * self.heads

    @property
    def diagonal(self) -> int:
        """The last key column that query row 0 sees under the causal mask; row r sees `diagonal` + r and all before."""
        return self.seqlen_k - self.seqlen_q

    @property
    def flops(self) -> int:
        """Floating point operations of the two products, 4 Nq Nk d a head, nothing skipped or padded."""
        return 4 * self.head_count * self.seqlen_q * self.seqlen_k * self.head_dim


def dtype_name(dtype: Any, argument: str = "dtype") -> str:
    """The name of a supported dtype, from a name, a NumPy dtype or a scalar type."""
    name = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype)
    if name not in ITEMSIZE:
        raise TypeError(f"{argument} must be one of {', '.join(ITEMSIZE)}, got {name}")
    return name


def row_alignment(array: Any) -> int:
    """The largest power of two, up to 16 bytes, that divides the address of every row of an (..., n, d) array."""
    address = array.data.ptr if hasattr(array, "device") and hasattr(array.data, "ptr") else array.ctypes.data
    bits = address | array.shape[-1] * array.dtype.itemsize | MAX_ALIGNMENT
    for length, stride in zip(array.shape[:-1], array.strides[:-1], strict=True):
        if length > 1:
            bits |= abs(stride)
    return int(bits & -bits)
