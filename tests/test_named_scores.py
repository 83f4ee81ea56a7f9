"""`softcap=` and `alibi_slopes=`: each call's words for score functions that have names, and what is refused of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import Problem, Score, plan
from cupyflash.expressions.evaluate import evaluate, positions
from cupyflash.request.named_scores import one_score
from cupyflash.schedules import choose, plan_decode, plan_varlen

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
    score = one_score(asked)
    assert score is not None
    at = positions({"b": 2, "h": 4, "kv_h": 2, "row": 3, "k": 5})
    s = np.random.default_rng(1).standard_normal((2, 4, 3, 5)) * 4
    found = evaluate(score.form.tree, at | {"s": s} | score.arrays | score.numbers)
    rows, keys = np.arange(3)[:, None], np.arange(5)
    b, h = np.ogrid[:2, :4]
    np.testing.assert_allclose(found, line(s, abs(rows + 2 - keys), b[..., None, None], h[..., None, None]))


@pytest.mark.wide
def test_a_call_takes_them() -> None:
    made = cupyflash.attention(Q, K, V, softcap=2.5, alibi_slopes=SLOPES, causal=True)
    line = Score("softcap * tanh(s / softcap) - alibi_slopes[h] * abs(q - k)", softcap=2.5, alibi_slopes=SLOPES)
    np.testing.assert_array_equal(made, cupyflash.attention(Q, K, V, score=line, causal=True))


def test_another_cap_is_the_same_kernel() -> None:
    one, other = (one_score({"softcap": cap}) for cap in (2.5, 30))
    assert one is not None and other is not None and one.form is other.form and one.numbers != other.numbers
    assert one_score({"softcap": 2.5}) is one and one_score({"score": one}) is one and one_score({}) is None


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"softcap": 0.0}, ValueError, r"softcap must be between 2\*\*-64 and 2\*\*64, got 0.0"),
        ({"softcap": -3}, ValueError, "softcap must be between .*, got -3"),
        ({"softcap": float("nan")}, ValueError, "softcap must be between .*, got nan"),
        ({"softcap": True}, TypeError, "softcap must be a real number or None, got True"),
        ({"softcap": [3]}, TypeError, r"softcap must be a real number or None, got \[3\]"),
        ({"alibi_slopes": [0.5]}, TypeError, "alibi_slopes must be a NumPy or CuPy array, got list"),
        ({"alibi_slopes": SLOPES.astype(np.float64)}, TypeError, "alibi_slopes must be of dtype float16, bfloat16, f"),
        (
            {"alibi_slopes": SLOPES[0:1, None, None]},
            ValueError,
            r"alibi_slopes must have shape \(h,\) or \(b, h\), got \(1, 1, 1\)",
        ),
        ({"alibi_slopes": SLOPES[:3]}, ValueError, "alibi_slopes must have length 4 along axis 0, which h indexes"),
        ({"alibi_slopes": EACH[:1]}, ValueError, "alibi_slopes must have length 2 along axis 0, which b indexes"),
        (
            {"softcap": 3.0, "score": Score("2 * s")},
            ValueError,
            r"softcap cannot go with score, .*: write it into the expression Score",
        ),
        ({"alibi_slopes": SLOPES, "score": Score("2 * s")}, ValueError, "alibi_slopes cannot go with score"),
    ],
)
def test_what_is_refused(asked: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        cupyflash.attention(Q, K, V, **asked)


@pytest.mark.parametrize("device", ["A100-40GB", "H100-SXM"])
def test_warmup_compiles_what_calls_run(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels do not depend on the cap, the slopes or their number."""
    compiled: set[Any] = set()
    monkeypatch.setattr("cupyflash.sim.execution.module", lambda kernel, capability: compiled.add((kernel.name, kernel.constants)))
    asked = {"softcap": True, "alibi_slopes": True}
    with cupyflash.simulated_device(device) as chip:
        cupyflash.warmup(head_dim=64, causal=True, **asked)
        cupyflash.warmup(head_dim=64, varlen=True, **asked)
        cupyflash.warmup_decode(batch=2, heads=4, kv_heads=2, head_dim=64, room=96, **asked)
    form = one_score({"softcap": 50.0, "alibi_slopes": SLOPES}).form  # type: ignore[union-attr]
    problem = Problem(2, 4, 2, 500, 500, 64, "float16", causal=True, score=form)
    packed = problem.asking(causal=False)
    cached = Problem(2, 4, 2, 1, 96, 64, "float16", causal=True, padded=True, score=form)
    run = [plan(problem, chip, choose(problem, chip).algorithm), plan_varlen(packed, chip), plan_decode(cached, chip)]
    kernels = {(kernel.name, kernel.constants) for schedule in run for kernel in schedule.kernels()}
    assert kernels <= compiled
    assert all(("SCORE", 1) in constants for _, constants in compiled)


def test_warmup_takes_a_score_with_whatever_values() -> None:
    for wrong, error, says in (
        ({"score": "s"}, TypeError, "score must be a cupyflash.Score"),
        ({"softcap": 30.0}, TypeError, "softcap must be True or False, got 30.0"),
        ({"alibi_slopes": SLOPES}, TypeError, "alibi_slopes must be True or False"),
        ({"score": Score("2 * s"), "softcap": True}, ValueError, "softcap cannot go with score"),
    ):
        with pytest.raises(error, match=says):
            cupyflash.warmup(head_dim=64, **wrong)
        with pytest.raises(error, match=says):
            cupyflash.warmup_decode(batch=1, heads=2, head_dim=64, room=64, **wrong)


@pytest.mark.wide
def test_decoding_and_packed_sequences_take_them() -> None:
    """A sequence's newest row is the same among all rows, packed, and against a cache."""
    asked: dict[str, Any] = {"softcap": 2.5, "alibi_slopes": SLOPES}
    whole = cupyflash.attention(Q, K, V, causal=True, **asked)
    newest = cupyflash.attention_decode(Q[:, :, -1:], K, V, [50, 50], **asked)
    np.testing.assert_allclose(newest.astype(np.float32), whole[:, :, -1:].astype(np.float32), atol=2e-3)
    rows, keys = (np.concatenate([array[b].swapaxes(0, 1) for b in range(2)]) for array in (Q, K))
    values = np.concatenate([V[b].swapaxes(0, 1) for b in range(2)])
    asked["alibi_slopes"] = EACH
    packed = cupyflash.attention_varlen(rows, keys, values, [0, 20, 40], [0, 50, 100], causal=True, **asked)
    apart = cupyflash.attention(Q, K, V, causal=True, **asked)
    np.testing.assert_allclose(packed.astype(np.float32), np.concatenate(apart.swapaxes(1, 2)).astype(np.float32), atol=2e-3)
