"""cupyflash.torch's scaled_dot_product_attention beside PyTorch's, on CPU tensors."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="beside PyTorch, which is not installed")
biases = pytest.importorskip("torch.nn.attention.bias", reason="this PyTorch has no causal biases")
pytestmark = pytest.mark.wide

from beside_torch import close, drawn, leaves  # noqa: E402

from cupyflash.torch import scaled_dot_product_attention  # noqa: E402

theirs = torch.nn.functional.scaled_dot_product_attention
SEEN = torch.rand(2, 1, 18, 23, generator=torch.Generator().manual_seed(5)) > 0.3

# (query, key, value), dtype, arguments
CASES: dict[str, tuple[tuple[tuple[int, ...], ...], Any, dict[str, Any]]] = {
    "(L, E)": (((18, 16), (23, 16), (23, 16)), torch.float32, {}),
    "(h, L, E)": (((2, 18, 16), (2, 23, 16), (2, 23, 16)), torch.float32, {"scale": 0.4}),
    "five axes, broadcast": (((2, 1, 2, 18, 16), (1, 2, 2, 23, 16), (2, 2, 2, 23, 16)), torch.float32, {}),
    "one head for all": (((1, 4, 18, 16), (1, 1, 23, 16), (1, 1, 23, 16)), torch.float32, {}),
    "grouped heads": (((2, 4, 18, 16), (2, 2, 23, 16), (2, 2, 23, 8)), torch.bfloat16, {"enable_gqa": True}),
    "causal": (((2, 2, 20, 16), (2, 2, 20, 16), (2, 2, 20, 16)), torch.float32, {"is_causal": True}),
    "causal, more keys": (((1, 2, 18, 16), (1, 2, 23, 16), (1, 2, 23, 16)), torch.float32, {"is_causal": True}),
    "causal, fewer keys": (((1, 2, 23, 16), (1, 2, 18, 16), (1, 2, 18, 16)), torch.float32, {"is_causal": True}),
    "bool mask": (((2, 2, 18, 16), (2, 2, 23, 16), (2, 2, 23, 16)), torch.float32, {"attn_mask": SEEN}),
    "a row that sees nothing": (((18, 16), (23, 16), (23, 16)), torch.float32, {"attn_mask": torch.arange(18)[:, None] > 3}),
}

# Others have the same kernels, or are views
WITH_GRADIENTS = ("five axes, broadcast", "grouped heads", "causal, more keys", "causal, fewer keys")


@pytest.mark.parametrize("name", CASES)
def test_it_computes_pytorch_s(name: str) -> None:
    shapes, dtype, asked = CASES[name]
    ours, right = (lambda *t, of=of: of(*t, **asked) for of in (scaled_dot_product_attention, theirs))
    close(ours, right, drawn(*shapes, dtype=dtype), gradients=name in WITH_GRADIENTS)


def test_a_float_mask_is_added_and_gets_its_gradient() -> None:
    """A bias with fewer axes than the scores, too: its gradient is a sum."""
    close(scaled_dot_product_attention, theirs, drawn((2, 2, 18, 16), (2, 2, 23, 16), (2, 2, 23, 16), (18, 23)))


def test_a_float32_mask_beside_half_types_is_not_rounded() -> None:
    """Its numbers need more than float16's digits; its gradient is float32."""
    q, k, v, mask = (*drawn((2, 2, 18, 16), (2, 2, 23, 16), (2, 2, 23, 16), dtype=torch.float16), drawn((2, 1, 23))[0] + 2048)
    mask.requires_grad_()
    found = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    right, rounded = (theirs(q.double(), k.double(), v.double(), attn_mask=each.double()) for each in (mask, mask.half()))
    assert float((found - right).detach().abs().max()) < 4e-3 < float((rounded - right).detach().abs().max())
    (ours,), (other,) = (torch.autograd.grad(out.sum() + (out * out).sum(), mask) for out in (found.double(), right))
    assert ours.dtype == torch.float32 and torch.allclose(ours, other, atol=0.05)


def test_deterministic_gradients_have_the_same_bits_each_time() -> None:
    """The mask's, too, and they are those without the switch."""
    tensors = leaves(drawn((2, 2, 18, 16), (2, 2, 23, 16), (2, 2, 23, 16), (18, 23)))
    out = scaled_dot_product_attention(*tensors)
    made = []
    for deterministic in (True, True, False):
        torch.use_deterministic_algorithms(deterministic)
        try:
            made += [torch.autograd.grad(out.sum(), tensors, retain_graph=True)]
        finally:
            torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(*made[:2], strict=True))
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*made[1:], strict=True))


@pytest.mark.parametrize("bias", ["causal_lower_right", "causal_upper_left"])
def test_causal_biases_of_pytorch(bias: str) -> None:
    mask = getattr(biases, bias)(18, 23)
    close(
        lambda *t: scaled_dot_product_attention(*t, attn_mask=mask),
        lambda *t: theirs(*t, attn_mask=mask),
        drawn((2, 18, 16), (2, 23, 16), (2, 23, 16)),
        gradients=False,
    )


def test_tensors_of_other_strides() -> None:
    """(b, n, h, d) by transpose, one that is not contiguous along its last axis, and one that is expanded."""
    q, k, v = drawn((2, 18, 2, 16), (2, 2, 16, 23), (1, 1, 23, 16))
    close(
        lambda q, k, v: scaled_dot_product_attention(q.transpose(1, 2), k.transpose(2, 3), v.expand(2, 2, 23, 16)),
        lambda q, k, v: theirs(q.transpose(1, 2), k.transpose(2, 3), v.expand(2, 2, 23, 16)),
        [q, k, v],
    )


def test_dropout_follows_the_generator() -> None:
    """The same seed gives the same weights, the next call others; kept ones are scaled, so that the mean stays."""
    q, k, v = drawn((4, 40, 16), (4, 40, 16), (4, 40, 16))
    v = torch.ones_like(v)
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made += [scaled_dot_product_attention(q, k, v, dropout_p=0.25)]
    made += [scaled_dot_product_attention(q, k, v, dropout_p=0.25)]
    assert torch.equal(made[0], made[1]) and not torch.equal(made[1], made[2]) and not torch.equal(made[2], made[3])
    assert abs(float(made[0].mean()) - 1) < 0.05 and float(made[0].std()) > 0.05


def test_autocast() -> None:
    q, k, v = drawn((2, 18, 16), (2, 23, 16), (2, 23, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = scaled_dot_product_attention(q, k, v), theirs(q, k, v)
        assert scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(18, 23)).dtype == torch.bfloat16
    assert found.dtype == expected.dtype == torch.bfloat16 and torch.allclose(found.float(), expected.float(), atol=0.02)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "float64": (((18, 16), (18, 16)), {"dtype": torch.float64}, "query must be of float16, bfloat16 or float32, got torch.float64"),
    "heads": (((4, 18, 16), (2, 18, 16)), {}, "(2, 18, 16): with fewer heads in key and value pass enable_gqa"),
    "uneven heads": (((4, 18, 16), (3, 18, 16)), {"enable_gqa": True}, "heads must be a multiple of kv_heads, got heads=4"),
    "one axis": (((16,), (16,)), {}, "query must have two axes or more, (..., L, E), got shape (16,)"),
    "two masks": (
        ((18, 16), (18, 16)),
        {"attn_mask": torch.ones(18, 18), "is_causal": True},
        "attn_mask must be None with is_causal",
    ),
    "mask's dtype": (
        ((18, 16), (18, 16)),
        {"attn_mask": torch.ones(18, 18).int()},
        "attn_mask must be of bool, float32 or query's",
    ),
    "no probability": (((18, 16), (18, 16)), {"dropout_p": 1.5}, "dropout must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused(name: str) -> None:
    (q, k), asked, message = REFUSED[name]
    dtype = asked.pop("dtype", torch.float32)
    q, k = drawn(q, k, dtype=dtype)
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        scaled_dot_product_attention(q, k, k, **asked)
