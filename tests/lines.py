"""Score functions for random problems: what each reads, if anything, is drawn with the problem (`draw_score`)."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from cupyflash import Mask, Score
from cupyflash.request.score import Form


def one(axes: int, dtype: str = "float32") -> np.ndarray:
    """An array of so many axes, in whose place one of the problem's sizes is drawn."""
    return np.ones((1,) * axes, dtype)


LINES = (
    Score("c * tanh(s / c)", c=2.5).form,
    Score("s - a[b, h] * abs(q - k) / n_k", a=one(2)).form,
    Score("s + t[h % 2, q - k + 9] * (row % 3 + kv_h) * w[h]", t=one(2, "float16"), w=one(1)).form,
    # Documents: of some rows all keys of a block, or all, are masked by the line.
    Score("where(d[b, k] == d[b, q], s, log(row - row)) + x[k]", d=one(2, "int32"), x=one(1, "bool")).form,
)
some: st.SearchStrategy[Form | None] = st.none() | st.sampled_from(LINES)

# Masks, of which some rows see nothing, or a block of keys is none's.
MASKS = (
    Mask("k <= q and (q - k) % 7 < c or k < p[b]", c=4, p=one(1, "int32")).form,
    Mask("d[b, k] == d[b, q] and x[h, row]", d=one(2, "int64"), x=one(2, "bool")).form,
    Mask("(k < 40) == (row % 2 == 0)").form,
)
masks: st.SearchStrategy[Form | None] = st.none() | st.sampled_from(MASKS)
