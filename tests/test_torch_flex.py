"""cupyflash.torch's flex_attention beside plain attention under the same functions, called for all scores at once, on CPU tensors.

PyTorch's own on a CPU, without its compiler, looks at mask_mod alone and at no block; tests/test_flex_attention.py is beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="beside flex_attention, which needs PyTorch, which is not installed")
flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="this PyTorch has no flex_attention")
pytestmark = pytest.mark.wide

from beside_torch import close, drawn, plain  # noqa: E402

from cupyflash.torch import flex_attention  # noqa: E402

BATCH, HEADS, N, D = 2, 2, 48, 16
(table,) = drawn((HEADS, 2 * N), seed=1)
offsets = torch.tensor([0, 10, 30, 48])
document = torch.repeat_interleave(torch.arange(3), offsets.diff())
everywhere = torch.rand(N, generator=torch.Generator().manual_seed(2)) > 0.8
states = torch.tensor([[1, 0, 2], [2, 1, 0], [0, 2, 1]])  # of blocks of 16: none, some, all


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() < 9


def within_documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A function of places in a document, which itself is passed on."""
    own = near(b, h, q_idx - offsets[document[q_idx]], kv_idx - offsets[document[kv_idx]])
    return (document[q_idx] == document[kv_idx]) & own


def with_some_everywhere(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return everywhere[q_idx] | everywhere[kv_idx] | ((q_idx // 8 == kv_idx // 8) & ~everywhere[q_idx])


def soft_cap(cap: float, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return cap * torch.tanh(score / cap)


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (kv_idx - q_idx) * torch.exp2(-(h + 1) * 8.0 / HEADS)


SCORES: dict[str, Callable[..., Any]] = {
    "ALiBi": alibi,
    "soft-cap": partial(soft_cap, 2.0),
    "table": lambda s, b, h, q, k: s + table[h, q - k + N],
}
MASKS: dict[str, Callable[..., Any]] = {
    "both": flex.and_masks(causal, near),
    "either": flex.or_masks(causal, near),
    "documents": within_documents,
    "everywhere": with_some_everywhere,
}


def of_all(function: Callable[..., Any], *first: Any) -> Any:
    """A score_mod or mask_mod for all scores at once."""
    places = torch.meshgrid(*(torch.arange(size) for size in (BATCH, HEADS, N, N)), indexing="ij")
    return function(*first, *places)


def right(q: Any, k: Any, v: Any, score_mod: Any = None, seen: Any = None) -> Any:
    """Plain attention: a score_mod as what it adds to the scores."""
    if score_mod is None:
        return plain(q, k, v, seen)
    S = q @ k.transpose(-1, -2) / D**0.5
    return torch.softmax(of_all(score_mod, S), -1) @ v


@pytest.mark.parametrize("name", SCORES)
def test_score_functions(name: str) -> None:
    score_mod = SCORES[name]
    ours, truth = (lambda *t, of=of: of(*t, score_mod=score_mod) for of in (flex_attention, right))
    close(ours, truth, drawn(*[(BATCH, HEADS, N, D)] * 3), gradients=False)


@pytest.mark.parametrize("name", MASKS)
def test_mask_functions_of_block_masks(name: str) -> None:
    block_mask = flex.create_block_mask(MASKS[name], None, HEADS, N, N, device="cpu", BLOCK_SIZE=16)
    close(
        lambda *t: flex_attention(*t, block_mask=block_mask),
        lambda *t: right(*t, seen=of_all(MASKS[name])),
        drawn(*[(BATCH, HEADS, N, D)] * 3),
        gradients=False,
    )


@pytest.mark.parametrize("mask_mod", [None, causal])
def test_blocks_that_a_mask_leaves_out(mask_mod: Any) -> None:
    """Full blocks are seen whole, whatever mask_mod says, others by mask_mod, the rest not."""
    partial_blocks, full_blocks = states == 1, states == 2
    lists = [
        (each.sum(-1)[None, None].int(), each.int().argsort(dim=-1, descending=True, stable=True)[None, None].int())
        for each in (partial_blocks, full_blocks)
    ]
    block_mask = flex.BlockMask.from_kv_blocks(*lists[0], *lists[1], BLOCK_SIZE=16, mask_mod=mask_mod)
    scores = [each.repeat_interleave(16, 0).repeat_interleave(16, 1) for each in (partial_blocks, full_blocks)]
    seen = scores[1] | (scores[0] & (True if mask_mod is None else of_all(mask_mod)))
    tensors = drawn(*[(BATCH, HEADS, N, D)] * 3)
    close(lambda *t: flex_attention(*t, block_mask=block_mask), lambda *t: right(*t, seen=seen), tensors, gradients=False)


def test_captured_tensors_learn() -> None:
    """Beside a mask, whose captured tensors get no gradient, and in PyTorch's deterministic mode."""
    block_mask = flex.create_block_mask(within_documents, None, None, N, N, device="cpu", BLOCK_SIZE=16)

    def ours(q: Any, gain: Any, learned: Any) -> Any:
        return flex_attention(q, q, q, lambda s, b, h, q, k: s * gain[h] + learned[h, q - k + N], block_mask)

    def truth(q: Any, gain: Any, learned: Any) -> Any:
        far = torch.arange(N)[:, None] - torch.arange(N) + N
        S = q @ q.transpose(-1, -2) / D**0.5 * gain[:, None, None] + learned[:, far]
        return torch.softmax(S.masked_fill(~of_all(within_documents), float("-inf")), -1) @ q

    torch.use_deterministic_algorithms(True)
    try:
        close(ours, truth, drawn((BATCH, HEADS, N, D), (HEADS,), (HEADS, 2 * N)))
    finally:
        torch.use_deterministic_algorithms(False)


def test_log_sum_exps_grouped_heads_and_scale() -> None:
    q, k, v = drawn((1, 4, 18, D), (1, 2, 23, D), (1, 2, 23, D))
    out, lse = flex_attention(q, k, v, scale=0.5, enable_gqa=True, return_lse=True)
    S = q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) / 2
    assert lse.dtype == torch.float32 and torch.allclose(lse.double(), torch.logsumexp(S, -1), atol=1e-5)
    again, aux = flex_attention(q, k, v, scale=0.5, enable_gqa=True, return_aux=flex.AuxRequest(lse=True))
    assert torch.equal(out, again) and torch.equal(lse, aux.lse) and aux.max_scores is None


def test_what_is_refused() -> None:
    q, k = drawn((1, 2, 32, D), (1, 1, 32, D))
    other = flex.create_block_mask(causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: flex_attention(q, k, k), "key must have query's 2 heads, got 1: pass enable_gqa=True for fewer"),
        (lambda: flex_attention(q[0], k[0], k[0]), "query must be (B, H, L, E), got shape (2, 32, 16)"),
        (
            lambda: flex_attention(q, q, q, block_mask=other),
            "block_mask must be of query's and key's lengths (32, 32), got (64, 64)",
        ),
        (lambda: flex_attention(q, q, q, return_aux=flex.AuxRequest(max_scores=True)), "return_aux must not ask for max_scores"),
        (lambda: flex_attention(q, q, q, lambda s, b, h, q, k: s if q >= k else -s), "Python cannot decide by it"),
    ]
    for call, message in refused:
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            call()
