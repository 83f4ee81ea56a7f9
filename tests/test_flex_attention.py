"""Score and mask functions beside PyTorch's own: flex_attention on the CPU in float64, where PyTorch is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import Mask, Score
from cupyflash.expressions.evaluate import evaluate, positions

torch = pytest.importorskip("torch", reason="beside flex_attention, which needs PyTorch, which is not installed")
flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="this PyTorch has no flex_attention")
pytestmark = pytest.mark.wide

BATCH, HEADS, N, D = 2, 2, 48, 16
RNG = np.random.default_rng(0)
SLOPES = np.exp2(-np.arange(1, HEADS + 1, dtype=np.float32))
TABLE = RNG.standard_normal((HEADS, 2 * N)).astype(np.float32)
BIAS = RNG.standard_normal((BATCH, HEADS, N, N)).astype(np.float32)
DOCUMENT = np.sort(RNG.integers(0, 4, (BATCH, N))).astype(np.int32)
PREFIX = np.array([5, 20], np.int32)

slopes, table, bias, document, prefix = (torch.from_numpy(each) for each in (SLOPES, TABLE, BIAS, DOCUMENT, PREFIX))
SCORES: dict[str, tuple[Callable[..., Any], Score]] = {
    "relative position": (lambda s, b, h, q, k: s + (q - k) / 8, Score("s + (row - k) / 8")),
    "ALiBi": (lambda s, b, h, q, k: s + slopes[h] * (k - q), Score("s + slope[h] * (k - q)", slope=SLOPES)),
    "soft-cap": (lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0), Score("cap * tanh(s / cap)", cap=2.0)),
    "table": (lambda s, b, h, q, k: s + table[h, q - k + N], Score("s + table[h, row - k + n]", table=TABLE, n=N)),
    "pairs": (lambda s, b, h, q, k: s * torch.sigmoid(bias[b, h, q, k]), Score("s / (1 + exp(-x[b, h, row, k]))", x=BIAS)),
    "causal": (lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")), Score("s if k <= q else -far", far=np.inf)),
}
MASKS: dict[str, tuple[Callable[..., Any], Mask]] = {
    "causal": (lambda b, h, q, k: q >= k, Mask("k <= row")),
    "window": (lambda b, h, q, k: (q >= k) & (q - k <= 9), Mask("0 <= q - k <= w", w=9)),
    "prefix": (lambda b, h, q, k: (k < prefix[b]) | (q >= k), Mask("k < prefix[b] or k <= q", prefix=PREFIX)),
    "documents": (
        lambda b, h, q, k: (document[b, q] == document[b, k]) & (q >= k),
        Mask("document[b, q] == document[b, k] and k <= q", document=DOCUMENT),
    ),
    "by head": (lambda b, h, q, k: torch.where(h % 2 == 0, q >= k, q - k < 20), Mask("where(h % 2 == 0, k <= q, q - k < 20)")),
}


def of_all(function: Callable[..., Any], *first: Any) -> Any:
    """A score_mod or mask_mod for all scores at once."""
    places = torch.meshgrid(*(torch.arange(size) for size in (BATCH, HEADS, N, N)), indexing="ij")
    return function(*first, *places)


def check(asked: dict[str, Any], score_mod: Any = None, mask_mod: Any = None) -> None:
    """O against flex_attention's in float64; which has no gradients on a CPU: those against autograd's of the same functions."""
    inputs = RNG.standard_normal((3, BATCH, HEADS, N, D)).astype(np.float32)
    dout = RNG.standard_normal((BATCH, HEADS, N, D)).astype(np.float32)
    exact = [torch.from_numpy(each.astype(np.float64)) for each in inputs]
    block_mask = None if mask_mod is None else flex.create_block_mask(mask_mod, BATCH, HEADS, N, N, device="cpu")
    right = flex.flex_attention(*exact, score_mod=score_mod, block_mask=block_mask)

    q, k, v = (each.clone().requires_grad_() for each in exact)
    S = q @ k.transpose(-1, -2) / D**0.5
    S = S if score_mod is None else of_all(score_mod, S)
    S = S if mask_mod is None else S.masked_fill(~of_all(mask_mod), -float("inf"))
    (torch.softmax(S, -1) @ v).backward(torch.from_numpy(dout.astype(np.float64)))
    out, pullback = cupyflash.attention_vjp(*inputs, **asked)
    for found, wanted in zip((out, *pullback(dout)), (right, q.grad, k.grad, v.grad), strict=True):
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", SCORES)
def test_score_functions_agree(name: str) -> None:
    score_mod, score = SCORES[name]
    check({"score": score}, score_mod=score_mod)


@pytest.mark.parametrize(("theirs", "ours"), [*SCORES.values(), *MASKS.values()])
def test_their_functions_are_traced_to_what_ours_are(theirs: Callable[..., Any], ours: Score | Mask) -> None:
    """With torch's functions and tensors, whose memory is taken as it is; queries count from 0 there, which is `row`."""
    of_score, of_mask = (lambda s, b, h, row, k: theirs(s, b, h, row, k)), (lambda b, h, row, k: theirs(b, h, row, k))
    traced = Score(of_score) if isinstance(ours, Score) else Mask(of_mask)
    at = positions({"b": BATCH, "h": HEADS, "kv_h": HEADS, "row": N, "k": N}) | {"s": RNG.standard_normal((BATCH, HEADS, N, N))}
    found, wanted = (evaluate(each.form.tree, at | each.arrays | each.numbers) for each in (traced, ours))
    np.testing.assert_allclose(np.broadcast_to(found, at["s"].shape), np.broadcast_to(wanted, at["s"].shape), rtol=1e-6)
    sources = (SLOPES, TABLE, BIAS, DOCUMENT, PREFIX)
    assert all(any(np.shares_memory(array, source) for source in sources) for array in traced.arrays.values())


def test_gradients_of_captured_tensors_agree() -> None:
    """A table by distance, with a factor for each head: autograd's of the same function in float64."""
    gain, near = (RNG.standard_normal(shape).astype(np.float32) for shape in ((HEADS,), (HEADS, 17)))
    leaves = {name: torch.tensor(each, dtype=torch.float64, requires_grad=True) for name, each in (("gain", gain), ("near", near))}
    q, k, v, dout = RNG.standard_normal((4, BATCH, HEADS, N, D)).astype(np.float32)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * leaves["gain"][h] + leaves["near"][h, torch.clamp(q - k + 8, 0, 16)]

    Q, K, V, dO = (torch.from_numpy(each.astype(np.float64)) for each in (q, k, v, dout))
    S = of_all(score_mod, Q @ K.transpose(-1, -2) / D**0.5)
    (torch.softmax(S, -1) @ V).backward(dO)
    ours = Score(lambda s, h, row, k: s * gain[h] + near[h, row - k + 8])
    *_, dscore = cupyflash.attention_vjp(q, k, v, score=ours, return_dscore=True)[1](dout)
    for name, leaf in leaves.items():
        np.testing.assert_allclose(dscore[name], leaf.grad.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MASKS)
def test_mask_functions_agree(name: str) -> None:
    mask_mod, mask = MASKS[name]
    check({"mask": mask}, mask_mod=mask_mod)
