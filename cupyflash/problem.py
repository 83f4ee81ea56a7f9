"""The attention problem: sizes, dtype and masking, checked once, before anything is planned, compiled or launched."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

import numpy as np

# Bytes of one element. The input types of the paper's M: shared memory is counted in elements of these.
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
MAX_HEAD_DIM = 256
# Of a scale but 0: as float32's normal numbers have it, and so that it stays finite times log2(e). Kernels take smaller ones for 0.
SCALES = (2.0**-126, 2.0**127)
# The kernels count rows and columns in 32 bits, with room for a block more.
MAX_LENGTH = 2**31 - 2**20
# The widest copy between HBM and SRAM, in bytes.
MAX_ALIGNMENT = 16


@dataclass(frozen=True)
class BlockMask:
    """Which blocks of S are visited: (batch or 1, heads or 1, Tr, Tc), by the schedule's block sizes.

    `bits` are the packed booleans in C order; None where they are not known to the host: counts are then of a mask that keeps
    every block.
    """

    shape: tuple[int, int, int, int]
    bits: bytes | None = None

    @classmethod
    def of(cls, array: Any) -> BlockMask:
        """From an array of two to four axes."""
        shape = (1,) * (4 - array.ndim) + tuple(array.shape)
        known = isinstance(array, np.ndarray)
        return cls(shape, np.packbits(np.ascontiguousarray(array)).tobytes() if known else None)

    @cached_property
    def kept(self) -> np.ndarray:
        """The booleans, of shape `shape`."""
        size = math.prod(self.shape)
        if self.bits is None:
            return np.ones(self.shape, bool)
        kept: np.ndarray = np.unpackbits(np.frombuffer(self.bits, np.uint8), count=size).astype(bool).reshape(self.shape)
        return kept


# (left, right): how far from its own key a row sees, None for no limit.
Window = tuple[int | None, int | None]


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


class Layout(NamedTuple):
    """All of an array but its memory, of whose address `offset` is the remainder modulo `MAX_ALIGNMENT`: what a problem needs.

    Arrays of equal layouts pose equal problems, so that what was chosen for one may be launched on the other.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    offset: int = 0

    @classmethod
    def of(cls, array: Any) -> Layout:
        """Of a NumPy or CuPy array."""
        return cls(array.shape, array.strides, array.dtype, address(array) % MAX_ALIGNMENT)

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: Any) -> Layout:
        """Of an array in C order, as it is allocated."""
        dtype = np.dtype(dtype)
        return cls(shape, tuple(math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))), dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def swapaxes(self, one: int, other: int) -> Layout:
        """As of `array.swapaxes(one, other)`."""
        axes = list(range(self.ndim))
        axes[one], axes[other] = axes[other], axes[one]
        return self._replace(shape=tuple(self.shape[a] for a in axes), strides=tuple(self.strides[a] for a in axes))


@dataclass(frozen=True)
class Problem:
    """O = softmax(scale Q K^T + bias) V for `batch` x `heads` independent heads.

    Q is (batch, heads, seqlen_q, head_dim), K (batch, kv_heads, seqlen_k, head_dim), V (batch, kv_heads, seqlen_k,
    head_dim_v), query head h reading key head h // (heads // kv_heads). `head_dim_v` is `head_dim` when None, `scale`
    1 / sqrt(head_dim).

    What a query row sees: under `causal`, aligned bottom-right, row r sees key column c when c <= r + seqlen_k - seqlen_q;
    with `window` = (left, right), when r + seqlen_k - seqlen_q - left <= c <= r + seqlen_k - seqlen_q + right, None for no
    limit (`causal` and a window together have right = 0; a window of (None, 0) is kept as `causal`);
    with `padded`, batch b sees its first `key_lengths[b]` keys (None where the lengths are not known to the host: counts
    are then of full length); with `mask`, a boolean a (row, column) says so too; with `bias`, a number is added to each
    score; with `block_mask`, only blocks of S that it keeps are visited. `packed`: batches are sequences of their own lengths, of
    which seqlen_q and seqlen_k are the longest (`plan_varlen`). `alignment` is the number of bytes (a power of two up to 16)
    that divides the address of every row: it bounds the width of a copy.

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
    head_dim_v: int | None = None
    mask: bool = False
    bias: bool = False
    padded: bool = False
    key_lengths: tuple[int, ...] | None = None
    alignment: int = MAX_ALIGNMENT
    window: Window | None = None
    block_mask: BlockMask | None = None
    packed: bool = False

    def __post_init__(self) -> None:
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        for name in ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"):
            value = getattr(self, name)
            least, most = (1, MAX_HEAD_DIM) if name.startswith("head_dim") else (0, MAX_LENGTH)
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            size = int(value)
            if not least <= size <= most:
                raise ValueError(f"{name} must be between {least} and {most:,}, got {size}")
            object.__setattr__(self, name, size)
        if self.heads and (not self.kv_heads or self.heads % self.kv_heads):
            raise ValueError(f"heads must be a multiple of kv_heads, got heads={self.heads} and kv_heads={self.kv_heads}")
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        for name in ("causal", "mask", "bias", "padded", "packed"):
            require_flag(name, getattr(self, name))
            object.__setattr__(self, name, bool(getattr(self, name)))
        if self.window is not None:
            window, causal = _checked_window(self.window, self.causal)
            object.__setattr__(self, "window", window)
            object.__setattr__(self, "causal", causal)
        if self.key_lengths is not None:
            if not self.padded:
                raise ValueError(f"key_lengths are those of a padded problem, got {self.key_lengths!r} with padded=False")
            object.__setattr__(self, "key_lengths", check_key_lengths(self.key_lengths, self.batch, self.seqlen_k))
        if self.block_mask is not None:
            object.__setattr__(self, "block_mask", _checked_block_mask(self.block_mask, (self.batch, self.heads)))
        if self.scale is not None:
            if isinstance(self.scale, bool) or not isinstance(self.scale, Real):
                raise TypeError(f"scale must be a real number or None, got {self.scale!r}")
            if self.scale != 0 and not SCALES[0] <= abs(self.scale) <= SCALES[1]:
                least, most = SCALES
                raise ValueError(f"scale must be 0 or of a magnitude from {least:.2g} to {most:.2g}, got {self.scale!r}")
            object.__setattr__(self, "scale", float(self.scale))
        if not isinstance(self.alignment, Integral) or self.alignment not in (2, 4, 8, 16) or self.alignment < self.itemsize:
            raise ValueError(f"alignment must be 2, 4, 8 or 16 bytes and hold one {self.dtype}, got {self.alignment!r}")

    @classmethod
    def from_arrays(
        cls,
        q: Array,
        k: Array,
        v: Array,
        *,
        causal: bool = False,
        window: Window | None = None,
        scale: float | None = None,
        mask: Array | None = None,
        bias: Array | None = None,
        key_lengths: Array | None = None,
        block_mask: Array | None = None,
        out: Array | None = None,
    ) -> Problem:
        """The problem that arrays of shape (n, d), (h, n, d) or (b, h, n, d) pose; `out`, if given, is where O goes.

        k and v may have fewer heads than q, if their number divides q's; v and out may have another last axis than q and k.
        The last axis of each must be contiguous. `mask` (bool) and `bias` (q's dtype) must broadcast to (..., n_q, n_k),
        `key_lengths` (integers) must be (b,), or (1,) without a batch axis.
        """
        named = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
        for name, array in named.items():
            check_operand(name, array, q)
        if k.shape[-1] != q.shape[-1]:
            raise ValueError(f"k must have q's head dimension {q.shape[-1]}, got shape {k.shape}")
        if k.shape[:-1] != v.shape[:-1]:
            raise ValueError(f"v must have k's shape {k.shape} but for the last axis, got {v.shape}")
        if q.ndim == 4 and k.shape[0] != q.shape[0]:
            raise ValueError(f"k and v must have q's batch size {q.shape[0]}, got shape {k.shape}")
        if out is not None:
            if out.shape != (*q.shape[:-1], v.shape[-1]):
                raise ValueError(f"out must have shape {(*q.shape[:-1], v.shape[-1])}, got {out.shape}")
            filled = 0 not in out.shape  # the strides of an empty array do not matter
            if filled and any(stride <= 0 for length, stride in zip(out.shape, out.strides, strict=True) if length > 1):
                raise ValueError(f"out must have positive strides, got {out.strides} bytes")
            if filled and overlaps_itself(out):
                raise ValueError(f"out must have a place for every element, got strides {out.strides} bytes for shape {out.shape}")
        batch = q.shape[0] if q.ndim == 4 else 1
        heads, kv_heads = (q.shape[-3], k.shape[-3]) if q.ndim > 2 else (1, 1)
        scores = (*q.shape[:-1], k.shape[-2])
        if mask is not None:
            _check_scores_like("mask", mask, scores, "bool")
        if bias is not None:
            _check_scores_like("bias", bias, scores, dtype_name(q.dtype))
        if key_lengths is not None:
            check_array("key_lengths", key_lengths)
            if key_lengths.dtype.kind not in "iu":
                raise TypeError(f"key_lengths must be of an integer dtype, got {key_lengths.dtype}")
            if key_lengths.shape != (batch,):
                raise ValueError(f"key_lengths must have shape {(batch,)}, a length for each of the batch, got {key_lengths.shape}")
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
            head_dim_v=v.shape[-1],
            mask=mask is not None,
            bias=bias is not None,
            padded=key_lengths is not None,
            key_lengths=tuple(key_lengths.tolist()) if isinstance(key_lengths, np.ndarray) else None,
            alignment=min(row_alignment(array) for array in named.values()),
            window=window,
            block_mask=None if block_mask is None else _checked_block_mask(block_mask, (batch, heads)),
        )

    @property
    def value_dim(self) -> int:
        """d of V and O."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

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
    def left(self) -> int | None:
        """How many keys before its own (r + `diagonal`) a row sees; None for all."""
        return self.window[0] if self.window else None

    @property
    def right(self) -> int | None:
        """How many keys behind its own a row sees; None for all."""
        return 0 if self.causal else self.window[1] if self.window else None

    def keys_seen(self, rows: np.ndarray, keys: int) -> tuple[np.ndarray, np.ndarray]:
        """(first, end): the columns first <= c < end of `keys` that each of `rows` sees for its position, first <= end."""
        own = rows + self.diagonal
        end = np.full_like(own, keys) if self.right is None else np.clip(own + self.right + 1, 0, keys)
        first = np.zeros_like(own) if self.left is None else np.clip(own - self.left, 0, end)
        return first, end

    @property
    def flops(self) -> int:
        """Floating point operations of the two products, 2 Nq Nk (d + d_v) a head, nothing skipped or padded."""
        return 2 * self.head_count * self.seqlen_q * self.seqlen_k * (self.head_dim + self.value_dim)

    @property
    def backward_flops(self) -> int:
        """The same of the backward's five products, 2 Nq Nk (3 d + 2 d_v) a head: S, dP, dV, dQ and dK."""
        return 2 * self.head_count * self.seqlen_q * self.seqlen_k * (3 * self.head_dim + 2 * self.value_dim)


def check_key_lengths(lengths: Any, batch: int, keys: int) -> tuple[int, ...]:
    """Lengths, in a sequence or an array, as a tuple of Python's integers. TypeError or ValueError for what are none."""
    numbers = lengths.tolist() if isinstance(lengths, np.ndarray) else lengths
    if not isinstance(numbers, Iterable) or isinstance(numbers, str | bytes):
        raise TypeError(f"key_lengths must be a sequence of integers, got {lengths!r}")
    numbers = tuple(numbers)
    for number in numbers:
        if isinstance(number, bool | np.bool_) or not isinstance(number, Integral):
            raise TypeError(f"key_lengths must be integers, got {number!r} among them")
    if len(numbers) != batch or not all(0 <= number <= keys for number in numbers):
        raise ValueError(f"key_lengths must be {batch} lengths between 0 and {keys:,} of a padded problem, got {numbers}")
    return tuple(int(number) for number in numbers)


def _checked_block_mask(array: Any, pairs: tuple[int, int]) -> BlockMask:
    """From an array of bool, or as it is; TypeError or ValueError for what cannot be that of so many (batches, heads)."""
    if isinstance(array, BlockMask):
        _check_block_mask_shape(array.shape, pairs)
        return array
    check_array("block_mask", array)
    if array.dtype.name != "bool":
        raise TypeError(f"block_mask must be of dtype bool, got {array.dtype}")
    if not 2 <= array.ndim <= 4:
        raise ValueError(f"block_mask must be (Tr, Tc), (h, Tr, Tc) or (b, h, Tr, Tc), got shape {array.shape}")
    _check_block_mask_shape(array.shape, pairs)
    return BlockMask.of(array)


def _check_block_mask_shape(shape: tuple[int, ...], pairs: tuple[int, int]) -> None:
    leading = (1,) * (4 - len(shape)) + tuple(shape[:-2])
    if any(length not in (1, whole) for length, whole in zip(leading, pairs, strict=True)):
        raise ValueError(f"block_mask must be (b or 1, h or 1, Tr, Tc) with (b, h) = {pairs}, got shape {shape}")


def _checked_window(window: object, causal: bool) -> tuple[Window | None, bool]:
    """A window and `causal` in the one form that both have together."""
    sides = tuple(window) if isinstance(window, (tuple, list)) else ()
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, (Integral, type(None))) for side in sides):
        raise TypeError(f"window must be (left, right), integers or None, got {window!r}")
    if any(side is not None and side < 0 for side in sides):
        raise ValueError(f"window must be (left, right) of at least 0, None for no limit, got {window!r}")
    left, right = (None if side is None else min(int(side), MAX_LENGTH) for side in sides)
    if causal:
        right = 0
    if left is None and (right is None or right == 0):
        return None, right == 0
    return (left, right), False


def dtype_name(dtype: Any, argument: str = "dtype") -> str:
    """The name of a supported dtype, from a name, a NumPy dtype or a scalar type."""
    name = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype)
    if name not in ITEMSIZE:
        raise TypeError(f"{argument} must be one of {', '.join(ITEMSIZE)}, got {name}")
    return name


def array_dtype(name: str, array: Any) -> str:
    """The name of an array's dtype; TypeError for one that is not supported, with what helps."""
    try:
        return dtype_name(array.dtype, name)
    except TypeError as error:
        if array.dtype.kind not in "fiu":
            raise
        library = "numpy" if isinstance(array, np.ndarray) else "cupy"
        raise TypeError(f"{error}: pass {name}.astype({library}.float32), or float16") from None


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of a name in `ITEMSIZE`; bfloat16 is that of ml_dtypes, which nothing else needs. ImportError without it."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(f"bfloat16 needs ml_dtypes ({error}): pip install ml_dtypes", name="ml_dtypes") from error
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


def address(array: Any) -> int:
    """Where an array's first element is; of a layout, as far as it says."""
    if isinstance(array, Layout):
        return array.offset
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def row_alignment(array: Any) -> int:
    """The largest power of two, up to 16 bytes, that divides the address of every row of an (..., n, d) array."""
    bits = address(array) | array.shape[-1] * array.dtype.itemsize | MAX_ALIGNMENT
    for length, stride in zip(array.shape[:-1], array.strides[:-1], strict=True):
        if length > 1:
            bits |= abs(stride)
    return int(bits & -bits)


def overlaps_itself(array: Array) -> bool:
    """Whether elements may share bytes: each stride, in order of size, has to step over all that the smaller ones reach."""
    reach = array.dtype.itemsize
    for stride, length in sorted((abs(stride), length) for length, stride in zip(array.shape, array.strides, strict=True)):
        if length > 1:
            if stride < reach:
                return True
            reach += (length - 1) * stride
    return False


def require_flag(name: str, value: object) -> None:
    """TypeError unless a value is True or False, Python's or NumPy's."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """ValueError unless a value is one of some words."""
    if not (isinstance(value, str) and value in choices):
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_operand(name: str, array: Any, q: Array) -> None:
    """TypeError or ValueError unless an array has q's number of axes and dtype, and strides that the kernels take."""
    check_array(name, array)
    if array.ndim not in (2, 3, 4):
        raise ValueError(f"{name} must be (n, d), (h, n, d) or (b, h, n, d), got shape {array.shape}")
    if array.ndim != q.ndim:
        raise ValueError(f"{name} must have as many axes as q, got shape {array.shape} beside q's {q.shape}")
    if array_dtype(name, array) != array_dtype("q", q):
        raise TypeError(f"{name} must have q's dtype {q.dtype}, got {array.dtype}")
    if not last_axis_contiguous(array):
        raise ValueError(f"{name} must be contiguous along its last axis, got strides {array.strides} bytes for {array.dtype}")
    _check_strides(name, array)


def last_axis_contiguous(array: Array) -> bool:
    """Whether neighbours along the last axis are neighbours in memory, or there are none."""
    return not (array.ndim and array.shape[-1] > 1 and array.strides[-1] != array.dtype.itemsize and 0 not in array.shape)


def check_array(name: str, array: Any) -> None:
    there = all(hasattr(array, attribute) for attribute in ("shape", "dtype", "strides", "ndim"))
    if not there or isinstance(array, np.generic):
        raise TypeError(f"{name} must be a NumPy or CuPy array, got {type(array).__name__}")
    if not getattr(array.dtype, "isnative", True):
        raise TypeError(f"{name} must have its bytes in the machine's own order, got dtype {array.dtype.str}")


def _check_strides(name: str, array: Array) -> None:
    size = array.dtype.itemsize
    if any(stride % size for stride in array.strides):
        raise ValueError(f"{name} must have strides in whole elements, got {array.strides} bytes for {array.dtype}")
    if address(array) % size and 0 not in array.shape:
        raise ValueError(f"{name} must be aligned to its elements of {size} bytes, got one {address(array) % size} bytes off")


def _check_scores_like(name: str, array: Array, scores: tuple[int, ...], dtype: str) -> None:
    """An array of `dtype` that broadcasts to the shape of S."""
    check_array(name, array)
    if array.dtype.name != dtype:
        raise TypeError(f"{name} must be of dtype {dtype}, got {array.dtype}")
    _check_strides(name, array)
    tail = scores[len(scores) - array.ndim :] if array.ndim <= len(scores) else None
    if tail is None or any(length not in (1, whole) for length, whole in zip(array.shape, tail, strict=True)):
        raise ValueError(f"{name} must broadcast to (..., n_q, n_k) = {scores}, got shape {array.shape}")
