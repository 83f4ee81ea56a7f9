"""cupyflash.torch's calls in our own words beside the calls of arrays, and their gradients beside attention_vjp's."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import Mask, Score

torch = pytest.importorskip("torch", reason="beside PyTorch, which is not installed")
pytestmark = pytest.mark.wide

from beside_torch import drawn, leaves, plain  # noqa: E402

from cupyflash.torch import attention, attention_decode, attention_varlen  # noqa: E402

SLOPES = np.float32([0.5, 0.25])
slopes = torch.from_numpy(SLOPES)


def test_the_same_bits_as_arrays_give() -> None:
    """O, L and the gradients of everything that has one; functions as objects and as Python's, with tensors."""
    tensors = leaves(drawn((2, 18, 2, 16), (2, 23, 2, 16), (2, 23, 2, 16), (18, 23), (2,)))
    q, k, v, bias, sinks = (each.detach().numpy() for each in tensors)
    given: dict[str, Any] = {"causal": True, "scale": 0.3, "dropout": 0.25, "seed": 7, "layout": "bnhd"}
    score = Score("s + slope[h] * (k - q)", slope=SLOPES)
    out, pullback = cupyflash.attention_vjp(
        q, k, v, bias=bias, sinks=sinks, score=score, deterministic=True, return_dbias=False, **given
    )
    found = []
    for function in (score, lambda s, h, q, k: s + slopes[h] * (k - q)):
        one, lse = attention(
            *tensors[:3], bias=tensors[3], sinks=tensors[4], score=function, deterministic=True, return_lse=True, **given
        )
        assert np.array_equal(one.detach().numpy(), out) and lse.shape == (2, 2, 18) and not lse.requires_grad
        found += [torch.autograd.grad(one, tensors, torch.ones_like(one))]
    for ours, other, expected in zip(found[0], found[1], pullback(np.ones_like(out)), strict=False):
        assert torch.equal(ours, other) and (ours.dim() == 2 or np.allclose(ours.numpy(), expected, atol=1e-5))


def test_packed_sequences_and_masks_as_functions() -> None:
    tensors = leaves(drawn((20, 2, 16), (20, 1, 16), (20, 1, 16)))
    cu = torch.tensor([0, 7, 20])
    out = attention_varlen(*tensors, cu, cu, 13, 13, mask=lambda q, k: (k <= q) & (q - k < 5))
    arrays = [each.detach().numpy() for each in tensors]
    expected = cupyflash.attention_varlen(*arrays, cu.numpy(), cu.numpy(), mask=Mask("k <= q and q - k < 5"))
    assert np.array_equal(out.detach().numpy(), expected)
    assert all(each is not None for each in torch.autograd.grad(out.sum(), tensors))


def test_what_scores_of_packed_sequences_have_captured_learns() -> None:
    """As in PyTorch, of each sequence by itself."""
    q, k, v, table = leaves(drawn((12, 2, 16), (12, 2, 16), (12, 2, 16), (2, 7)))
    bounds = torch.tensor([0, 5, 12])
    out = attention_varlen(q, k, v, bounds, bounds, 7, 7, causal=True, score=lambda s, h, q, k: s + table[h, q - k])
    right = []
    for rows in (slice(5), slice(5, 12)):
        one, other, values = (each[rows].double().transpose(0, 1) for each in (q, k, v))
        far = torch.arange(one.shape[1])[:, None] - torch.arange(one.shape[1])
        scores = one @ other.transpose(-1, -2) / 4 + table[:, far.clamp(0)]
        right.append(scores.masked_fill(far < 0, -torch.inf).softmax(-1) @ values)
    expected = torch.autograd.grad(torch.cat(right, 1).square().sum(), (q, table))
    for ours, other in zip(torch.autograd.grad(out.square().sum(), (q, table)), expected, strict=True):
        assert torch.allclose(ours, other, atol=1e-4) and float(ours.abs().max()) > 0.01


def test_gradients_of_gradients() -> None:
    """As PyTorch's own in float64, by all inputs; a penalty on gradients is what asks for them."""
    tensors = drawn((6, 4), (8, 4), (8, 4))

    def penalty(function: Any, dtype: Any) -> tuple[Any, ...]:
        sides = leaves(tensors, dtype)
        first = torch.autograd.grad(function(*sides).square().sum(), sides, create_graph=True)
        return torch.autograd.grad(sum((each * each).sum() for each in first), sides)

    found = penalty(lambda *t: attention(*t, causal=True), torch.float32)
    seen = torch.ones(6, 8, dtype=torch.bool).tril(2)
    for one, right in zip(found, penalty(lambda *t: plain(*t, seen), torch.float64), strict=True):
        assert torch.allclose(one.double(), right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))


def test_what_has_no_second_order_or_forward_mode_says_so() -> None:
    """And does not give zeros, as PyTorch would for an operation that it does not know."""
    q, bias = leaves(drawn((2, 18, 16), (18, 18)))
    rows, bounds = leaves(drawn((18, 2, 16)))[0], torch.tensor([0, 18])
    for out, by, words in (
        (attention(q, q, q, bias=bias), q, "gradients of gradients are by dout, q, k and v alone: detach bias"),
        (attention_varlen(rows, rows, rows, bounds, bounds, 18, 18), rows, "and this is one of attention_varlen's"),
    ):
        (first,) = torch.autograd.grad(out.square().sum(), by, create_graph=True)
        with pytest.raises(NotImplementedError, match=re.escape(words)):
            torch.autograd.grad(first.sum(), by)
    with pytest.raises(NotImplementedError, match="k has a tangent, and the operations have no forward mode"):
        torch.func.jvp(lambda k: attention(q.detach(), k, k), (q.detach(),), (q.detach(),))


def test_activations_are_computed_again_by_checkpoints() -> None:
    (q,) = leaves(drawn((2, 18, 16)))
    again = torch.utils.checkpoint.checkpoint(lambda q: attention(q, q, q, causal=True), q, use_reentrant=False)
    one, other = (torch.autograd.grad(out.square().sum(), q)[0] for out in (again, attention(q, q, q, causal=True)))
    assert torch.allclose(one, other, atol=1e-5)


def test_a_keyword_of_another_library_names_ours() -> None:
    (q,) = drawn((2, 18, 16))
    with pytest.raises(TypeError, match=r"attention\(\) got an unexpected keyword argument 'is_causal': here it is causal"):
        attention(q, q, q, is_causal=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("call", [attention, attention_varlen, attention_decode])
def test_every_keyword_reaches_the_operation(call: Callable[..., Any]) -> None:
    """Of a call's keywords a window is two numbers of its operation, a score and a mask may be texts; L comes always."""
    operation = getattr(torch.ops.cupyflash, call.__name__).default._schema.arguments
    taken = {each.name for each in operation} | {"score", "mask", "window", "return_lse"}
    assert {"left", "right", "functions", "captured"} < taken
    named = [each.name for each in inspect.signature(call).parameters.values() if each.kind is each.KEYWORD_ONLY]
    assert len(named) > 10 and taken.issuperset(named)


def test_decoding_has_no_gradient() -> None:
    q, cache = leaves(drawn((2, 2, 1, 16), (2, 2, 32, 16)))
    found = attention_decode(q, cache.detach(), cache.detach(), torch.tensor([9, 20]))
    arrays = q.detach().numpy(), cache.detach().numpy(), cache.detach().numpy()
    assert not found.requires_grad and np.array_equal(found.numpy(), cupyflash.attention_decode(*arrays, [9, 20]))


def test_what_is_refused() -> None:
    (q,) = drawn((2, 18, 16))
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: attention(q, q, q, score="s"), "score must be a cupyflash.Score or a Python function, got str"),
        (lambda: attention(q, q, q, layout="nhd"), "layout must be one of bhnd, bnhd, got 'nhd'"),
        (
            lambda: attention(q, q, q, window=(-1, -1)),
            "window must be (left, right) of at least 0, None for no limit, got (-1, -1)",
        ),
    ]
    for call, message in refused:
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            call()
