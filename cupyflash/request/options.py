"""The options of a call: which scores count, and how they are transformed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from cupyflash.arrays import check_array, is_number
from cupyflash.basics import FLAGS, Array, Report, Values
from cupyflash.request.dropout import MOST_PAIRS
from cupyflash.request.score import Form
from cupyflash.words import listed, plural

# Of a scale but 0: as float32's normal numbers have it, and so that it stays finite times log2(e). Kernels take smaller ones for 0.
SCALES = (2.0**-126, 2.0**127)
# The kernels count rows and columns in 32 bits, with room for a block more.
MAX_LENGTH = 2**31 - 2**20


@dataclass(frozen=True)
class BlockMask:
    """The blocks of S that are visited: (batch or 1, heads or 1, Tr, Tc), by the schedule's block sizes.

    `bits` are the packed booleans in C order; None if the host does not know them: counts are then of a mask that keeps every
    block.
    """

    shape: tuple[int, int, int, int]
    bits: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, array: Any) -> BlockMask:
        """Return the block mask of an array of bool with two to four axes; a block mask as it is. TypeError or ValueError for other
        arrays."""
        if isinstance(array, BlockMask):
            return array
        check_array("block_mask", array)
        if array.dtype.name != "bool":
            raise TypeError(f"block_mask must be of dtype bool, got {array.dtype}")
        if not 2 <= array.ndim <= 4:
            raise ValueError(f"block_mask must be (Tr, Tc), (h, Tr, Tc) or (b, h, Tr, Tc), got shape {array.shape}")
        shape = (1,) * (4 - array.ndim) + tuple(array.shape)
        known = isinstance(array, np.ndarray)
        return cls(shape, np.packbits(np.ascontiguousarray(array)).tobytes() if known else None)

    def require(self, pairs: tuple[int, int]) -> None:
        """ValueError unless this can be the mask of (batches, heads) `pairs`."""
        if any(length not in (1, whole) for length, whole in zip(self.shape[:2], pairs, strict=True)):
            given = self.shape if self.shape[0] > 1 else self.shape[1:]
            raise ValueError(f"block_mask must be (b or 1, h or 1, Tr, Tc) with (b, h) = {pairs}, got shape {given}")

    @cached_property
    def kept(self) -> Array:
        """The booleans, of shape `shape`."""
        size = math.prod(self.shape)
        if self.bits is None:
            return np.ones(self.shape, bool)
        return np.unpackbits(np.frombuffer(self.bits, np.uint8), count=size).astype(bool).reshape(self.shape)


@dataclass(frozen=True)
class Pattern(BlockMask):
    """The scores that a mask keeps: (batch or 1, heads or 1, n_q or 1, n_k or 1), to be broadcast.

    `bits` None: the host does not know them; counts are then of a mask that leaves no tile empty or whole.
    """

    @classmethod
    def of(cls, array: Any) -> Pattern:
        """Return the pattern of a mask that broadcasts to the shape of S; an axis of stride 0 becomes one of length 1."""
        empty = 0 in array.shape  # then strides mean nothing
        sides = zip(array.shape, array.strides, strict=True)
        shape = tuple(min(length, 1) if empty or stride == 0 else length for length, stride in sides)
        shape = (1,) * (4 - array.ndim) + shape
        if not isinstance(array, np.ndarray):
            return cls((*shape[:2], 1, 1))
        first = array[tuple(slice(1) if stride == 0 else slice(None) for stride in array.strides)]
        return cls(shape, np.packbits(np.ascontiguousarray(first)).tobytes())

    def require_scores(self, shape: tuple[int, int, int, int]) -> None:
        """ValueError unless this broadcasts to S of that shape."""
        if any(length not in (1, whole) for length, whole in zip(self.shape, shape, strict=True)):
            raise ValueError(f"pattern must broadcast to (b, h, n_q, n_k) = {shape}, got shape {self.shape}")

    def states(self, lengths: tuple[int, int], blocks: tuple[int, int]) -> Array:
        """EMPTY, MIXED or WHOLE of each tile, (batch or 1, heads or 1, Tr, Tc) of uint8, for n_q, n_k and tiles of (Br, Bc)."""
        return _states(self, lengths, blocks)


# How many of a tile's scores a mask leaves; the kernels' TileState (block_mask.cuh).
EMPTY, MIXED, WHOLE = range(3)


@lru_cache(maxsize=32)
def _states(pattern: Pattern, lengths: tuple[int, int], blocks: tuple[int, int]) -> Array:
    planes, tiles = pattern.shape[:2], tuple(-(-length // size) for length, size in zip(lengths, blocks, strict=True))
    if pattern.bits is None or 0 in tiles:
        return np.full((*planes, *tiles), MIXED, np.uint8)
    some = every = np.broadcast_to(pattern.kept, (*planes, *lengths))
    for axis, length, size in ((2, lengths[0], blocks[0]), (3, lengths[1], blocks[1])):
        starts = np.arange(0, length, size)
        some, every = np.logical_or.reduceat(some, starts, axis), np.logical_and.reduceat(every, starts, axis)
    return np.where(every, WHOLE, np.where(some, MIXED, EMPTY)).astype(np.uint8)


# (left, right): how far from its own key a row sees, None for no limit.
Window = tuple[int | None, int | None]


class Band(NamedTuple):
    """A window of a part of a larger problem, in which a row's own key may be in another part: either side may be negative."""

    left: int | None
    right: int | None


class Option(NamedTuple):
    """A field of `Options`: its words, its kind, the algorithms and calls that take it, and its value if nothing is requested.

    Kinds: a "value" is used as a call has it; an "array" comes beside q, k and v by this name; a "vector" is an array too, float32
    with a number for each head; "found" follows from other options. Takers: an algorithm, its backward, a call that is planned in
    another way. All others refuse it. `flag`: the help of the commands' flag for it, "" if they have none. `in_scores`: True if
    it changes the scores themselves, by whose size L's error is measured.
    """

    words: str
    kind: str
    takers: tuple[str, ...]
    default: Any
    flag: str = ""
    in_scores: bool = False

    @property
    def is_flag(self) -> bool:
        """True if the option is True or False."""
        return self.default is False


def option(words: str, kind: str, takers: tuple[str, ...], default: Any = None, **more: Any) -> Any:
    """A field of `Options`."""
    return field(default=default, metadata={"option": Option(words, kind, takers, default, **more)})


_BACKWARD = ("standard backward", "fa1 backward", "fa2 backward")
_EVERY = ("standard", "fa1", "fa2", "fa3", "decode", *_BACKWARD, "attention_decode", "attention_varlen", "ring_attention")
_BY_POSITION = (*_EVERY, "fa3 backward")
_BY_SCORE = ("standard", "fa1", "fa2", "fa3", *_BACKWARD, "fa3 backward")
_MASKED = (*_BY_SCORE, "decode", "attention_decode")
_PADDED = (*_BY_SCORE, "attention_decode")
_WITH_SINKS = tuple(by for by in _BY_POSITION if by not in ("standard backward", "fa1 backward"))
_OBJECTS = (("score", Form, "a Score's form"), ("mask_function", Form, "a Mask's form"), ("pattern", Pattern, "a Pattern"))


@dataclass(frozen=True)
class Options:
    """The options of a call: which scores count, and how they are transformed.

    A query row sees these keys. With `causal`, aligned bottom-right, row r sees key column c if c <= r + seqlen_k - seqlen_q.
    With `window` = (left, right): if r + seqlen_k - seqlen_q - left <= c <= r + seqlen_k - seqlen_q + right, None for no limit
    (beside `causal` right is 0 or None, and then 0; a window of (None, 0) is kept as `causal`). With `padded`, batch b sees its
    first `key_lengths[b]` keys (None if the host does not know the lengths: counts are then of full length). With `mask`, each
    (row, column) has a boolean; with `bias`, each score has a number that is added to it, of q's dtype or, by `bias_dtype`,
    "float32"; with `block_mask`, only blocks of S that it keeps are visited. Scores are multiplied by `scale`, 1 /
    sqrt(head_dim) if None. `packed`: batches are sequences of their own lengths, one after the other (`plan_varlen`). `score`
    is the form of a score function, which transforms each scaled score before the bias is added. `mask_function` is the form of
    a mask function, which replaces `mask`. `pattern` is the scores that either keeps, if these are known; else the numbers of
    batches and heads for which it differs (None: all). `tiles_given`: the empty and whole tiles of the mask are known before
    (`block_mask`). `sinks`: each head has a number that joins the softmax of its rows as one more score, without a value.
    `score_dtype`: "float32" if algorithm "standard" keeps S in float32 in memory, None if in q's dtype. `dropout`: weights of
    the softmax are dropped at random (`request.dropout.Dropout` defines which); there are then at most 65,536 batches and
    65,536 heads.

    Raises TypeError or ValueError that names the argument, its value and the allowed values.
    """

    causal: bool = option("a causal mask", "value", _BY_POSITION, False)
    window: Window | None = option("a window", "value", _BY_POSITION)
    scale: float | None = option("a scale", "value", _BY_POSITION, in_scores=True)
    mask: bool = option("a mask of bool", "array", _BY_SCORE, False, flag=FLAGS["mask"])
    bias: bool = option("a bias", "array", _BY_SCORE, False, flag=FLAGS["bias"], in_scores=True)
    bias_dtype: str | None = option("a bias of float32 beside half types", "found", _BY_SCORE)
    padded: bool = option("key lengths", "found", _PADDED, False)
    key_lengths: tuple[int, ...] | None = option("key lengths", "array", _PADDED)
    block_mask: BlockMask | None = option("a block mask", "array", ("fa1", "fa2", "fa1 backward", "fa2 backward"))
    packed: bool = option("packed sequences", "found", ("fa2", "fa3", "fa2 backward", "fa3 backward", "attention_varlen"), False)
    sinks: bool = option("sinks", "vector", _WITH_SINKS, False, flag=FLAGS["sinks"])
    dropout: bool = option("dropout", "found", (*_BY_SCORE, "attention_varlen", "ring_attention"), False)
    score_dtype: str | None = option("score_dtype, the dtype of an S in memory", "value", ("standard", "standard backward"))
    score: Form | None = option("a score function", "found", _BY_POSITION, in_scores=True)
    mask_function: Form | None = option("a mask function", "found", (*_MASKED, "attention_varlen", "ring_attention"))
    pattern: Pattern | None = option("a mask's pattern", "found", _MASKED)
    tiles_given: bool = option("a mask's tiles", "found", (*_BY_SCORE, "decode", "attention_varlen"), False)

    def __post_init__(self) -> None:
        for name in (name for name, each in OPTIONS.items() if each.is_flag):
            require_flag(name, getattr(self, name))
            object.__setattr__(self, name, bool(getattr(self, name)))
        if self.window is not None:
            window, causal = _checked_window(self.window, self.causal)
            object.__setattr__(self, "window", window)
            object.__setattr__(self, "causal", causal)
        if self.scale is not None:
            object.__setattr__(self, "scale", _checked_scale(self.scale))
        if self.key_lengths is not None and not self.padded:
            raise ValueError(f"key_lengths are those of a padded problem, got {self.key_lengths!r} with padded=False")
        if self.block_mask is not None:
            object.__setattr__(self, "block_mask", BlockMask.of(self.block_mask))
        for name in ("bias_dtype", "score_dtype"):
            if getattr(self, name) is not None:
                require_choice(name, getattr(self, name), ("float32",))
        if self.bias_dtype is not None and not self.bias:
            raise ValueError(f"bias_dtype is that of a bias, got {self.bias_dtype!r} with bias=False")
        for name, kind, words in _OBJECTS:
            if not isinstance(getattr(self, name), kind | None):
                raise TypeError(f"{name} must be {words} or None, got {getattr(self, name)!r}")
        if self.mask and self.mask_function is not None:
            raise ValueError("mask and mask_function are one mask: a problem has one of them")
        if self.pattern is not None and not self.masked:
            raise ValueError("pattern is that of a mask, got one with mask=False")
        if self.tiles_given and not self.masked:
            raise ValueError("tiles_given is for a mask, got it with mask=False")

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, name) for name in OPTIONS))

    def __hash__(self) -> int:
        """Plans are looked up by it again and again: it is gone through once."""
        return self._hash

    @property
    def keywords(self) -> Report:
        """The options that a call takes as they are, by name."""
        return {name: getattr(self, name) for name in VALUES}

    def beside(self, arrays: Values) -> Options:
        """The same with the arrays that come beside q, k and v, by name: the contents of NumPy's key lengths and block mask are
        known."""
        lengths = arrays.get("key_lengths")
        said: Report = {name: arrays.get(name) is not None for name in ARRAYS if OPTIONS[name].is_flag}
        said |= {"padded": lengths is not None, "block_mask": arrays.get("block_mask")}
        said["bias_dtype"] = "float32" if said["bias"] and arrays["bias"].dtype == np.float32 else None
        said["pattern"] = Pattern.of(arrays["mask"]) if said["mask"] else self.pattern if self.mask_function else None
        return replace(self, **said, key_lengths=tuple(lengths.tolist()) if isinstance(lengths, np.ndarray) else None)

    def sized(self, batch: int, heads: int, queries: int, keys: int) -> Options:
        """The same for these sizes. TypeError or ValueError for key lengths, a block mask or a pattern of other sizes."""
        if self.block_mask is not None:
            self.block_mask.require((batch, heads))
        if self.pattern is not None:
            self.pattern.require_scores((batch, heads, queries, keys))
        if self.dropout and max(batch, heads) > MOST_PAIRS:
            raise ValueError(f"dropout is for at most {MOST_PAIRS:,} batches and heads, got {batch:,} and {heads:,}")
        if self.key_lengths is None:
            return self
        return replace(self, key_lengths=check_key_lengths(self.key_lengths, batch, keys))

    @property
    def masked(self) -> bool:
        """True if a mask, an array or a function, decides on each score."""
        return self.mask or self.mask_function is not None

    @property
    def of_scores(self) -> bool:
        """True if each score has something of its own: a mask, a bias, a score function."""
        return self.masked or self.bias or self.transformed

    @property
    def transformed(self) -> bool:
        """True if a score function transforms scaled scores before bias and masks."""
        return self.score is not None

    @property
    def left(self) -> int | None:
        """The number of keys that a row sees before its own (r + seqlen_k - seqlen_q); None for all."""
        return self.window[0] if self.window else None

    @property
    def right(self) -> int | None:
        """The number of keys that a row sees after its own; None for all."""
        return 0 if self.causal else self.window[1] if self.window else None


# Each field's description; what a call has as it is; arrays beside q, k and v, and those among them with a number for each head.
OPTIONS: dict[str, Option] = {each.name: each.metadata["option"] for each in fields(Options)}
VALUES, ARRAYS, VECTORS = (
    tuple(name for name, each in OPTIONS.items() if each.kind in kinds) for kinds in (("value",), ("array", "vector"), ("vector",))
)


@lru_cache(maxsize=64)
def not_taken(by: str) -> tuple[str, ...]:
    """The fields that an algorithm, its backward or a call does not take."""
    assert by in _BY_POSITION, by
    return tuple(name for name, each in OPTIONS.items() if by not in each.takers)


def refused(options: Options, by: str) -> str | None:
    """The first requested field that is not taken; None if all are."""
    return next((name for name in not_taken(by) if getattr(options, name) != OPTIONS[name].default), None)


def require_taken(options: Options, by: str) -> None:
    """ValueError for options that an algorithm, its backward or a call does not take."""
    name = refused(options, by)
    if name is None:
        return
    words, takers = OPTIONS[name].words, OPTIONS[name].takers
    algorithm, _, backward = by.partition(" ")
    whose = f"the backward of {algorithm!r}" if backward else by if "_" in by else f"algorithm {by!r}"
    alike = [each for each in takers if each.endswith("backward") == bool(backward)]
    others = [each if "_" in each else repr(each.removesuffix(" backward")) for each in alike]
    have = f": {listed(others)} {'has' if len(others) == 1 else 'have'}" if others else ""
    raise ValueError(f"{whose} has no place for {words}{have}")


def require_flag(name: str, value: object) -> None:
    """TypeError unless a value is True or False, Python's or NumPy's."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """ValueError unless a value is one of some words."""
    if not (isinstance(value, str) and value in choices):
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_key_lengths(lengths: Any, batch: int, keys: int) -> tuple[int, ...]:
    """The lengths, from a sequence or an array, as a tuple of Python's integers. TypeError or ValueError for wrong ones."""
    numbers = lengths.tolist() if isinstance(lengths, np.ndarray) else lengths
    if not isinstance(numbers, Iterable) or isinstance(numbers, str | bytes):
        raise TypeError(f"key_lengths must be a sequence of integers, got {lengths!r}")
    numbers = tuple(numbers)
    for number in numbers:
        if not is_number(number):
            raise TypeError(f"key_lengths must be integers, got {number!r} among them")
    if len(numbers) != batch or not all(0 <= number <= keys for number in numbers):
        what = f"{plural(batch, 'length')} between 0 and {keys:,}"
        raise ValueError(f"key_lengths must be {what} of a padded problem, got {numbers}")
    return tuple(int(number) for number in numbers)


def _checked_scale(scale: Any) -> float:
    if not is_number(scale, Real):
        raise TypeError(f"scale must be a real number or None, got {scale!r}")
    number = float(scale)
    if number != 0 and not SCALES[0] <= abs(number) <= SCALES[1]:
        least, most = SCALES
        raise ValueError(f"scale must be 0 or of a magnitude from {least:.2g} to {most:.2g}, got {scale!r}")
    return number


def _checked_window(window: object, causal: bool) -> tuple[Window | None, bool]:
    """A window and `causal` in the one form that both have together."""
    sides = tuple(window) if isinstance(window, (tuple, list)) else ()
    if len(sides) != 2 or not all(side is None or is_number(side) for side in sides):
        raise TypeError(f"window must be (left, right), integers or None, got {window!r}")
    if not isinstance(window, Band) and any(side is not None and side < 0 for side in sides):
        raise ValueError(f"window must be (left, right) of at least 0, None for no limit, got {window!r}")
    left, right = (None if side is None else max(-MAX_LENGTH, min(int(side), MAX_LENGTH)) for side in sides)
    if left is not None and right is not None and left + right < 0:
        raise ValueError(f"window must leave each row a key of its own: left + right of at least 0, got {window!r}")
    if causal:
        if right not in (None, 0):
            allowed = "(left, None) or (left, 0) beside causal, which ends each row at its own key"
            raise ValueError(f"window must be {allowed}, got {window!r}")
        right = 0
    if left is None and (right is None or right == 0):
        return None, right == 0
    return (Band(left, right) if isinstance(window, Band) else (left, right)), False
