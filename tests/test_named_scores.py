"""`softcap=` and `alibi_slopes=`: each call's words for score functions that have names, and what is refused of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import Score
from cupyflash.expressions.evaluate import evaluate, positions
from cupyflash.named_scores import one_score

SLOPES = (2.0 ** -np.arange(1, 5)).astype(np.float32)
EACH = np.stack([SLOPES, 3 * SLOPES])
RNG = np.random.default_rng(18)
Q, K, V = (RNG.standard_normal((2, heads, n, 16)).astype(np.float16) for heads, n in ((4, 20), (2, 50), (2, 50)))


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"softcap": 2.5}, lambda s, far, b, h: 2.5 * np.tanh(s / 2.5)),
        ({"alibi_slopes": SLOPES}, lambda s, far, b, h: s - SLOPES[h] * far),
        ({"softcap": 2, "alibi_slopes": EACH}, lambda s, far, b, h: 2 * np.tanh(s / 2) - EACH[b, h] * far),
    ],
)
def test_each_is_one_line(asked: dict[str, Any], line: Any) -> None:
    """The cap first, as in flash-attention; the distance is that of the places on the keys' axis."""
    score = one_score(None, asked.get("softcap"), asked.get("alibi_slopes"))
    assert score is not None
    at = positions({"b": 2, "h": 4, "kv_h": 2, "row": 3, "k": 5})
    s = np.random.default_rng(1).standard_normal((2, 4, 3, 5)) * 4
    found = evaluate(score.form.tree, at | {"s": s} | score.arrays | score.numbers)
    rows, keys = np.arange(3)[:, None], np.arange(5)
    b, h = np.ogrid[:2, :4]
    np.testing.assert_allclose(found, line(s, abs(rows + 2 - keys), b[..., None, None], h[..., None, None]))


def test_a_call_takes_them() -> None:
    made = cupyflash.attention(Q, K, V, softcap=2.5, alibi_slopes=SLOPES, causal=True)
    line = Score("cap * tanh(s / cap) - slope[h] * abs(q - k)", cap=2.5, slope=SLOPES)
    np.testing.assert_array_equal(made, cupyflash.attention(Q, K, V, score=line, causal=True))


def test_another_cap_is_the_same_kernel() -> None:
    one, other = (one_score(None, cap, None) for cap in (2.5, 30))
    assert one is not None and other is not None and one.form is other.form and one.numbers != other.numbers
    assert one_score(None, 2.5, None) is one and one_score(one, None, None) is one and one_score(None, None, None) is None


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"softcap": 0.0}, ValueError, r"softcap must be between 2\*\*-64 and 2\*\*64, got 0.0"),
        ({"softcap": -3}, ValueError, "softcap must be between .*, got -3"),
        ({"softcap": float("nan")}, ValueError, "softcap must be between .*, got nan"),
        ({"softcap": True}, TypeError, "softcap must be a real number or None, got True"),
        ({"softcap": [3]}, TypeError, r"softcap must be a real number or None, got \[3\]"),
        ({"alibi_slopes": [0.5]}, TypeError, "alibi_slopes must be a NumPy or CuPy array, got list"),
        ({"alibi_slopes": SLOPES.astype(np.float16)}, TypeError, "alibi_slopes must be of dtype float32, got float16"),
        (
            {"alibi_slopes": SLOPES[0:1, None, None]},
            ValueError,
            r"alibi_slopes must have shape \(h,\) or \(b, h\), got \(1, 1, 1\)",
        ),
        ({"alibi_slopes": SLOPES[:3]}, ValueError, "alibi_slopes must have length 4 along axis 0, which h indexes"),
        ({"alibi_slopes": EACH[:1]}, ValueError, "alibi_slopes must have length 2 along axis 0, which b indexes"),
        ({"softcap": 3.0, "score": Score("2 * s")}, ValueError, r"softcap cannot go with score, .*: put it into the line Score"),
        ({"alibi_slopes": SLOPES, "score": Score("2 * s")}, ValueError, "alibi_slopes cannot go with score"),
    ],
)
def test_what_is_refused(asked: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        cupyflash.attention(Q, K, V, **asked)
