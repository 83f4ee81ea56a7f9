"""Score functions that calls have names for: a soft-cap, ALiBi's slopes. Each is one line, and so are both together."""

from __future__ import annotations

from functools import lru_cache
from numbers import Real
from typing import Any

import numpy as np

from cupyflash.arrays import require_dtype
from cupyflash.launch.dispatch import as_array
from cupyflash.request.score import Score

# So that s / softcap and what is made of it stay in float32's range.
SOFTCAPS = (2.0**-64, 2.0**64)


def one_score(score: Score | None, softcap: float | None, alibi_slopes: Any | None) -> Score | None:
    """The one score function of a call, from all of its arguments about scores: a soft-cap comes before the slopes, as in
    flash-attention.

    Raises TypeError or ValueError for a wrong cap or wrong slopes, and for either beside `score`.
    """
    if softcap is None and alibi_slopes is None:
        return score
    if score is not None:
        other = "softcap" if softcap is not None else "alibi_slopes"
        raise ValueError(
            f"{other} cannot go with score, which is the whole function of a score: write it into the expression {score!r}"
        )
    capped = None if softcap is None else _softcap(_checked_softcap(softcap))
    if alibi_slopes is None:
        return capped
    slopes = as_array("alibi_slopes", alibi_slopes)
    require_dtype("alibi_slopes", slopes, np.float32)
    if slopes.ndim not in (1, 2):
        raise ValueError(f"alibi_slopes must have shape (h,) or (b, h), got {slopes.shape}")
    text = f"{'s' if capped is None else capped.text} - alibi_slopes[{'h' if slopes.ndim == 1 else 'b, h'}] * abs(q - k)"
    return Score(text, alibi_slopes=slopes, **({} if capped is None else capped.numbers))


def _checked_softcap(softcap: Any) -> float:
    if isinstance(softcap, bool) or not isinstance(softcap, Real):
        raise TypeError(f"softcap must be a real number or None, got {softcap!r}")
    least, most = SOFTCAPS
    if not least <= float(softcap) <= most:
        raise ValueError(f"softcap must be between 2**-64 and 2**64, got {softcap!r}")
    return float(softcap)


@lru_cache(maxsize=256)
def _softcap(softcap: float) -> Score:
    return Score("softcap * tanh(s / softcap)", softcap=softcap)
