"""Dropout of attention's weights: the options of a call, and the numbers that its kernels get."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any

import numpy as np

from cupyflash.arrays import is_number
from cupyflash.basics import Report, Values
from cupyflash.launch.params import numbers
from cupyflash.request.keywords import NO_ORIGIN

# A weight is dropped where a number of so many bits (kernels_cu/dropout.cuh) is below p times 2 to this.
BITS = 16
# Batch and head are the two halves of one word of the counter.
MOST_PAIRS = 2**16
# Rows and keys that a call of the generator is for are in groups of so many, which an origin must not cut.
ROW_GROUP, KEY_GROUP = 32, 16
UNSIGNED = tuple(f"dropout_{name}" for name in ("threshold", "seed_low", "seed_high", "offset", "pair", "row", "key"))
FIELDS = (*numbers("unsigned", *UNSIGNED), *numbers("float", "dropout_scale"))


@dataclass(frozen=True)
class Dropout:
    """The dropout of a call: each weight of the softmax is dropped with a probability of `p`, 0 < p < 1, or kept and multiplied by
    1 / (1 - p).

    p is rounded to a multiple of 2**-16, at least 2**-16 and at most 1 - 2**-16: `probability` is the rounded value. `seed` (0 to
    2**64 - 1), `offset` (0 to 2**32 - 1) and a weight's position decide whether it is dropped: batch, head, row and key, counted
    from `origin`, whose row must be a multiple of 32 and whose key one of 16.

    Source: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), with the key (seed % 2**32, seed
    >> 32) and the counter (row // 32 * 8 + row % 8, key // 16 * 8 + key % 8, batch * 2**16 + head, offset). Of the four words of a
    call, word row // 8 % 4 is this row's; key // 8 % 2 chooses its half, 0 the lower one.

    Raises TypeError or ValueError that names the argument, its value and the allowed values.
    """

    p: float
    seed: int
    offset: int = 0
    origin: tuple[int, int, int, int] = NO_ORIGIN

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", checked_probability(self.p))
        if self.p == 0:
            raise ValueError(f"dropout must be above 0 and below 1 where weights are dropped, got {self.p!r}")
        object.__setattr__(self, "seed", _integer("seed", self.seed, 2**64))
        object.__setattr__(self, "offset", _integer("offset", self.offset, 2**32))
        if self.origin is not NO_ORIGIN:
            object.__setattr__(self, "origin", _checked_origin(self.origin))

    @classmethod
    def asked(cls, given: Values) -> Dropout | None:
        """The dropout among a call's arguments; None if nothing is dropped. ValueError for a dropout without a seed."""
        dropout, seed, offset, origin = (given.get(name, usual) for name, usual in ARGUMENTS.items())
        plain = type(dropout) in (int, float) and type(offset) is int and origin is NO_ORIGIN
        if plain and not (dropout or offset or seed is not None):  # as most have it
            return None
        p = checked_probability(dropout)
        if p and seed is None:
            raise ValueError("dropout needs a seed: with the same seed and offset the same weights are dropped again")
        made = cls(p or 0.5, 0 if seed is None else seed, offset, origin)  # what is given is checked, used or not
        return made if p else None

    @property
    def threshold(self) -> int:
        """Numbers of `BITS` bits below this drop a weight."""
        return min(max(int(self.p * (1 << BITS) + 0.5), 1), (1 << BITS) - 1)

    @property
    def probability(self) -> float:
        """The probability that the kernels apply: p, rounded to a multiple of 2**-16."""
        return self.threshold / float(1 << BITS)

    @property
    def scale(self) -> float:
        """The factor of kept weights: 1 / (1 - p)."""
        return 1 / (1 - self.probability)

    @property
    def keywords(self) -> Report:
        """The arguments of a call with this dropout, by name."""
        return dict(zip(ARGUMENTS, (self.p, self.seed, self.offset, self.origin), strict=True))

    @property
    def numbers(self) -> Report:
        """The generator's numbers, by the fields of the kernels' struct."""
        words = {"low": self.seed % 2**32, "high": self.seed >> 32}
        of_call = {f"dropout_seed_{half}": np.uint32(word) for half, word in words.items()}
        return _same_numbers(self.p, self.origin) | of_call | {"dropout_offset": np.uint32(self.offset)}


@lru_cache(maxsize=256)
def _same_numbers(p: float, origin: tuple[int, int, int, int]) -> Report:
    """The numbers that the calls of a training share."""
    asked, (batch, head, row, key) = Dropout(p, 0, 0, origin), origin
    # The threshold is compared with the upper half of a word; rows and keys are counted as the counter does.
    words = {"threshold": asked.threshold << 32 - BITS, "pair": batch << 16 | head, "row": row // 4, "key": key // 2}
    return {f"dropout_{name}": np.uint32(word) for name, word in words.items()} | {"dropout_scale": np.float32(asked.scale)}


# A call's arguments, with what they are by default
ARGUMENTS: Values = {"dropout": 0.0, "seed": None, "offset": 0, "dropout_origin": NO_ORIGIN}
# In place of a call's, which a launch brings.
NO_NUMBERS: Values = dict.fromkeys((*UNSIGNED, "dropout_scale"), 0)


def checked_probability(dropout: Any) -> float:
    """0 <= dropout < 1 as Python's number. TypeError or ValueError for anything else."""
    if type(dropout) is not float and not is_number(dropout, Real):
        raise TypeError(f"dropout must be a real number, got {dropout!r}")
    if not 0 <= float(dropout) < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout!r}")
    return float(dropout)


def _checked_origin(origin: Any) -> tuple[int, int, int, int]:
    if not isinstance(origin, tuple | list) or len(origin) != 4:
        raise TypeError(f"dropout_origin must be (batch, head, row, key), got {origin!r}")
    limits = (MOST_PAIRS, MOST_PAIRS, 2**31, 2**31)
    batch, head, row, key = (_integer("dropout_origin", one, most) for one, most in zip(origin, limits, strict=True))
    if row % ROW_GROUP or key % KEY_GROUP:
        raise ValueError(f"dropout_origin must have a row in steps of {ROW_GROUP}, a key of {KEY_GROUP}, got {origin!r}")
    return batch, head, row, key


def _integer(name: str, value: Any, end: int) -> int:
    if type(value) is not int and not is_number(value):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not 0 <= int(value) < end:
        raise ValueError(f"{name} must be at least 0 and below {end:,}, got {value}")
    return int(value)
