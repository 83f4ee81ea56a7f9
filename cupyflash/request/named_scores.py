"""Score functions that calls have names for: a soft-cap, ALiBi's slopes. Each is a step of one expression."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from numbers import Real
from typing import Any

import numpy as np

from cupyflash.arrays import ITEMSIZE, is_number
from cupyflash.basics import Values
from cupyflash.launch.dispatch import as_array
from cupyflash.request.keywords import SCORE_NUMBERS
from cupyflash.request.score import Score, as_given, field

# So that s / softcap and what is made of it stay in float32's range.
SOFTCAPS = (2.0**-64, 2.0**64)


def one_score(asked: Values) -> Score | None:
    """The one score function of a call, from all of its arguments about scores: a soft-cap comes before the slopes, as in
    flash-attention.

    Raises TypeError or ValueError for a wrong cap or wrong slopes, and for either beside `score`.
    """
    score, given = asked.get("score"), {name: asked[name] for name in STEPS if asked.get(name) is not None}
    if not given:
        return score
    if score is not None:
        whole = f"score, which is the whole function of a score: write it into the expression {score!r}"
        raise ValueError(f"{next(iter(given))} cannot go with {whole}")
    text = "s"
    for name, value in given.items():
        text, given[name] = STEPS[name](text, value)
    return (_of_numbers if given.keys() <= {*SCORE_NUMBERS} else Score)(text, **given)


def named_numbers(asked: Values) -> dict[str, np.generic]:
    """The numbers among a call's named scores, checked, by the struct's names."""
    given = [(name, asked[name]) for name in SCORE_NUMBERS if asked.get(name) is not None]
    return {field(name): as_given(STEPS[name]("s", value)[1]) for name, value in given}


def _capped(s: str, softcap: Any) -> tuple[str, float]:
    if not is_number(softcap, Real):
        raise TypeError(f"softcap must be a real number or None, got {softcap!r}")
    least, most = SOFTCAPS
    if not least <= float(softcap) <= most:
        raise ValueError(f"softcap must be between 2**-64 and 2**64, got {softcap!r}: None is no cap")
    return f"softcap * tanh({s} / softcap)", float(softcap)


def _less_slopes(s: str, alibi_slopes: Any) -> tuple[str, Any]:
    slopes = as_array("alibi_slopes", alibi_slopes)
    if slopes.dtype.name not in ITEMSIZE:
        raise TypeError(f"alibi_slopes must be of dtype {', '.join(ITEMSIZE)}, got {slopes.dtype}")
    if slopes.ndim not in (1, 2):
        raise ValueError(f"alibi_slopes must have shape (h,) or (b, h), got {slopes.shape}")
    return f"{s} - alibi_slopes[{'h' if slopes.ndim == 1 else 'b, h'}] * abs(q - k)", slopes


# By keyword, in the order in which they are taken: each makes an expression of the one before, and its value of the call's.
STEPS: Mapping[str, Callable[[str, Any], tuple[str, Any]]] = {"softcap": _capped, "alibi_slopes": _less_slopes}
_of_numbers = lru_cache(maxsize=256)(Score)
