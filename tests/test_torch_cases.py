"""The cases of PyTorch's own tests of scaled_dot_product_attention, small: what holds there of its fused kernels against plain
attention holds here of ours. Names and sizes are ours; test_torch_sdpa.py has the meaning of each argument.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="beside PyTorch, which is not installed")
pytestmark = pytest.mark.wide

from beside_torch import close, drawn, plain  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash.torch import scaled_dot_product_attention  # noqa: E402

theirs = torch.nn.functional.scaled_dot_product_attention
HALF, BRAIN = torch.float16, torch.bfloat16
HEADS, D = 2, 8


def split(x: Any) -> list[Any]:
    """q, k and v of (b, h, n, d), as a model's one projection of (b, n, 3 h d) has them."""
    return [each.unflatten(-1, (HEADS, D)).transpose(1, 2) for each in x.split(HEADS * D, dim=-1)]


@pytest.mark.parametrize(("dtype", "causal"), [(BRAIN, True), (HALF, False)])
def test_one_projection_and_its_gradient(dtype: Any, causal: bool) -> None:
    """Views of it, and copies of these; short rows, and rows of more than a block."""
    for n, contiguous in ((4, True), (37, False)):

        def of(function: Callable[..., Any], contiguous: bool = contiguous) -> Callable[[Any], Any]:
            return lambda x: function(*(each.contiguous() if contiguous else each for each in split(x)), is_causal=causal)

        close(of(scaled_dot_product_attention), of(theirs), drawn((2, n, 3 * HEADS * D), dtype=dtype, seed=n))


@pytest.mark.parametrize(("dtype", "scale", "value_dim"), [(HALF, 1 / D, D), (BRAIN, None, 24)])
def test_lengths_scales_and_other_values(dtype: Any, scale: float | None, value_dim: int) -> None:
    """More keys than queries and fewer; d_v that is not d."""
    for n_q, n_k in ((8, 31), (31, 8)):
        ours, right = (lambda *t, of=of: of(*t, scale=scale) for of in (scaled_dot_product_attention, theirs))
        close(ours, right, drawn((1, HEADS, n_q, D), (1, HEADS, n_k, D), (1, HEADS, n_k, value_dim), dtype=dtype, seed=n_q))


SHAPES = [*product((2, 1), (HEADS, 1), (18, 1), (23, 1)), (18, 23), (1, 23), (18, 1), (23,), (HEADS, 18, 23)]


@pytest.mark.parametrize(("dtype", "of_mask"), [(HALF, torch.bool), (HALF, HALF), (BRAIN, torch.float32)])
def test_masks_of_every_shape_that_broadcasts(dtype: Any, of_mask: Any) -> None:
    """Masks of bool, of numbers, of float32 beside half types; rows that see no key are zeros."""
    tensors = drawn(*[(2, HEADS, n, D) for n in (18, 23, 23)], dtype=dtype)
    for seed, shape in enumerate(SHAPES if of_mask == torch.bool else SHAPES[::3]):
        (mask,) = drawn(shape, seed=seed)
        mask = mask > 0 if of_mask == torch.bool else mask.to(of_mask)

        def right(q: Any, k: Any, v: Any, mask: Any = mask) -> Any:
            return plain(q, k, v, mask) if mask.dtype == torch.bool else plain(q, k, v, bias=mask.to(q.dtype))

        close(lambda *t, mask=mask: scaled_dot_product_attention(*t, attn_mask=mask), right, tensors, gradients=False)


def test_masks_of_other_strides() -> None:
    """One row for all by a stride of 0, columns apart, an expanded head of keys, and one query beside lengths of a batch."""
    q, k, v = drawn((3, HEADS, 1, D), (3, 1, 14, D), (3, 1, 14, D))
    (mask,) = drawn((3, 1, 1, 28))
    k, v = (each.expand(3, HEADS, 14, D) for each in (k, v))
    for each in (mask[..., ::2], mask[..., :14].expand(3, HEADS, 1, 14), torch.as_strided(mask, (3, HEADS, 1, 14), (0, 0, 0, 1))):
        one, other = (of(q, k, v, attn_mask=each) for of in (scaled_dot_product_attention, theirs))
        assert torch.allclose(one, other, atol=1e-5)


def test_a_mask_that_learns_beside_dropout() -> None:
    """Gradients of all four, where the dropped weights are those of the seed that the generator gave."""
    tensors = drawn(*[(1, HEADS, n, D) for n in (18, 23, 23)], (18, 23))

    def ours(*t: Any) -> Any:
        torch.manual_seed(42)
        return scaled_dot_product_attention(*t, dropout_p=0.25)

    torch.manual_seed(42)
    seed = int(torch.randint(2**63 - 1, ()))
    kept = torch.from_numpy(cupyflash.dropout_mask((1, HEADS, 18, 23), 0.25, seed=seed))

    def right(q: Any, k: Any, v: Any, mask: Any) -> Any:
        weights = torch.softmax(q @ k.transpose(-1, -2) / D**0.5 + mask, -1)
        return (weights * kept / 0.75) @ v

    close(ours, right, tensors)
    assert 0.6 < float(kept.float().mean()) < 0.9


def test_extremes() -> None:
    """A band of -inf about each row's own key; a large negative scale; products beyond a half type's range; one column."""
    q, k, v = drawn(*[(1, HEADS, 40, D)] * 3)
    full = torch.full((40, 40), -torch.inf)
    band = full.triu(1) + full.tril(-10)
    assert torch.allclose(*(of(q, k, v, attn_mask=band) for of in (scaled_dot_product_attention, theirs)), atol=1e-5)
    (x,) = drawn((1, 3, 20, 64))
    assert torch.allclose(*(of(x, x, x, scale=-1e4) for of in (scaled_dot_product_attention, theirs)), atol=1e-4)
    large = torch.full((1, 1, 1, 64), 133120.0, dtype=BRAIN)
    assert torch.equal(scaled_dot_product_attention(large, large, large), large)
    column = torch.tensor([[[[1, 2]]]], dtype=HALF).transpose(-1, -2)
    one = torch.ones((1, 1, 1, 1), dtype=HALF)
    assert torch.equal(scaled_dot_product_attention(column, one, one), torch.ones_like(column))


def test_nothing_to_see_and_nobody_who_looks() -> None:
    q, k = drawn((2, HEADS, 5, D), (2, HEADS, 0, D))
    assert not scaled_dot_product_attention(q, k, k).any() and scaled_dot_product_attention(k, q, q).shape == k.shape
    x = k.clone().requires_grad_()
    scaled_dot_product_attention(x, q, q).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


def nested() -> Any:
    return torch.nested.nested_tensor([torch.ones(HEADS, 4, D), torch.ones(HEADS, 6, D)])


OF_TYPES = "query must be of float16, bfloat16 or float32, got "
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "dtypes": (lambda: (torch.ones(1, 4, 8, 16), torch.ones(1, 4, 8, 16).half()), "k must have q's dtype float32, got float16"),
    "devices": (lambda: (torch.ones(4, 8), torch.ones(4, 8, device="meta")), "key must be on query's device cpu, got meta"),
    "one axis": (lambda: (torch.ones(4), torch.ones(1, 4)), "query must have two axes or more, (..., L, E), got shape (4,)"),
    "nested": (lambda: (nested(), nested()), "query must be a dense tensor, got a nested one; attention_varlen takes sequences"),
    "sparse": (lambda: (torch.ones(4, 8), torch.ones(4, 8).to_sparse()), "key must be a dense tensor, got a sparse one"),
    "float8": (lambda: (torch.ones(4, 8).to(torch.float8_e4m3fn),) * 2, OF_TYPES + "torch.float8_e4m3fn"),
    "float64": (lambda: (torch.ones(4, 8).double(),) * 2, OF_TYPES + "torch.float64: pass query.to(torch.float32)"),
    "integers": (lambda: (torch.ones(4, 8).int(),) * 2, OF_TYPES + "torch.int32"),
    "arrays": (lambda: (torch.ones(4, 8).numpy(),) * 2, "query must be a torch.Tensor, got ndarray: cupyflash's own calls take"),
    "wide heads": (lambda: (torch.ones(2, 2, 3, 257),) * 2, "head_dim must be between 1 and 256 for float32, got 257"),
    "other heads": (lambda: (torch.ones(4, 8), torch.ones(4, 9)), "k must have q's head dimension 8, got shape (4, 9)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_in_words(name: str) -> None:
    made, words = REFUSED[name]
    q, k = made()
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        scaled_dot_product_attention(q, k, k)
