"""FlexAttention's functions of the kinds that attention-gym collects, each traced to an expression that means the same.

An expression's kernels are beside NumPy's value of it in other tests; here NumPy's value is beside the function itself, called with
the places of all scores at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="functions of PyTorch's tensors, and PyTorch is not installed")
flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="this PyTorch has no flex_attention")
pytestmark = pytest.mark.wide

from beside_torch import close, drawn, plain  # noqa: E402

from cupyflash.expressions.evaluate import evaluate, positions  # noqa: E402
from cupyflash.torch import flex_attention  # noqa: E402
from cupyflash.torch.functions import KINDS, TensorFunction  # noqa: E402

BATCH, HEADS, N = 2, 2, 48
WIDE, HIGH, NEAR = 8, 6, 3  # a picture of N places, and a neighbourhood
HALF, BLOCK, PREFIX = N // 2, 6, 10
bounds = torch.tensor([0, 7, 19, 30, 48])
part = torch.repeat_interleave(torch.arange(4), bounds.diff())
first_of = torch.tensor([0, 0, 0, 3])  # the part that each part begins with
spans = torch.tensor([[0, 9], [4, 30], [30, 48]])
picture = torch.arange(N) // 16
parents = torch.tensor([0, 0, 0, 1, 1, 3])
above = torch.eye(6, dtype=torch.bool)
for node in range(1, 6):
    above[node] |= above[parents[node]]
chosen = torch.rand(BATCH, HEADS, 6, 6, generator=torch.Generator().manual_seed(1)) > 0.5
lengths = torch.tensor([48, 31])
far = torch.randint(0, 5, (BATCH, N, N), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
of_distance, of_edge = drawn((HEADS, 5), (3, HEADS, 5), seed=3)
edges = torch.randint(0, 5, (BATCH, N, N, 3), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
waves = torch.cos(torch.arange(2 * N)[:, None] / 10 ** torch.linspace(0, 2, 5)).sum(-1)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def neighbourhood(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Of a picture; at its edges of the same size, so that a centre is not always the place itself."""
    x, y, other_x, other_y = q % WIDE, q // WIDE, k % WIDE, k // WIDE
    across = x.clamp(NEAR // 2, WIDE - 1 - NEAR // 2) - other_x
    down = y.clamp(min=NEAR // 2, max=HIGH - 1 - NEAR // 2) - other_y
    return (across.abs() <= NEAR // 2) & (torch.abs(down) <= NEAR // 2)


def tiles_of_a_picture(b: Any, h: Any, q: Any, k: Any) -> Any:
    across, down = (q // 4 % 2 - k // 4 % 2), (q // 8 // 2 - k // 8 // 2)
    return torch.logical_and(across.abs() + down.abs() < 2, q < N) | (k >= N - 2)


def blocks_of_noise(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Noised tokens before the clean ones: a block sees itself, and clean blocks before it."""
    noised, other = q < HALF, k < HALF
    block, before = q % HALF // BLOCK, k % HALF // BLOCK
    return ((block == before) & (noised == other)) | (~other & torch.where(noised, block > before, block >= before))


def with_shared_beginnings(b: Any, h: Any, q: Any, k: Any) -> Any:
    own, begins = part[q], first_of[part[q]]
    return (causal(b, h, q, k) & (k >= bounds[own])) | ((own != begins) & (k >= bounds[begins]) & (k < bounds[begins + 1]))


def tree(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k < PREFIX) | ((k < PREFIX + 6) & above[(q % 6), (k - PREFIX).clamp(0, 5)])


def frames(b: Any, h: Any, q: Any, k: Any) -> Any:
    """In one head frames that are near, in the other the same places of all frames."""
    near, same = (q - k).abs() < 13, ((q - 2) % 12 - (k - 2) % 12).abs() < 3
    return (q < 2) | (k < 2) | torch.where(h == 0, near, same)


MASKS: dict[str, Callable[..., Any]] = {
    "sliding window": lambda b, h, q, k: (q - k).abs() <= 9,
    "dilated window": lambda b, h, q, k: ((q - k).abs() <= 12) & ((q - k) % 3 == 0) & (q >= k),
    "prefix": flex.or_masks(causal, lambda b, h, q, k: k < PREFIX),
    "parts of a batch": lambda b, h, q, k: (q // 12 == k // 12) & causal(b, h, q % 12, k % 12),
    "documents": lambda b, h, q, k: (part[q] == part[k]) & causal(b, h, q - bounds[part[q]], k - bounds[part[k]]),
    "shared beginnings": with_shared_beginnings,
    "pictures in a text": lambda b, h, q, k: (q >= spans[picture[k], 0]) & (q < spans[picture[k], 1]),
    "neighbourhood": neighbourhood,
    "tiles of a picture": tiles_of_a_picture,
    "frames of a film": frames,
    "noised and clean blocks": blocks_of_noise,
    "tree": tree,
    "chosen blocks": lambda b, h, q, k: chosen[b, h, q // 8, k // 8],
    "padding": lambda b, h, q, k: (q < lengths[b]) & (k < lengths[b]),
}
SCORES: dict[str, Callable[..., Any]] = {
    "ALiBi": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / HEADS)),
    "soft-cap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "distances": lambda s, b, h, q, k: s + of_distance[h, far[b, q, k]],
    "edges": lambda s, b, h, q, k: s + sum(of_edge[step, h, edges[b, q, k, step]] for step in range(3)) / 3.0,
    "waves": lambda s, b, h, q, k: s + waves[q - k + N] * (HEADS / (8.0 * (h + 1))),
    "another activation": lambda s, b, h, q, k: torch.log(torch.relu(s) + torch.nn.functional.silu(s) + 1),
    "a causal score": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
}


def of_all(function: Callable[..., Any], *first: Any) -> Any:
    """A function's value for all scores at once."""
    places = torch.meshgrid(*(torch.arange(size) for size in (BATCH, HEADS, N, N)), indexing="ij")
    return torch.as_tensor(function(*first, *places))


@pytest.mark.parametrize(("kind", "name"), [*(("mask", name) for name in MASKS), *(("score", name) for name in SCORES)])
def test_a_traced_function_means_the_same(kind: str, name: str) -> None:
    function, S = (MASKS | SCORES)[name], drawn((BATCH, HEADS, N, N))[0]
    if kind == "mask":
        right, found = of_all(function), TensorFunction.of(kind, lambda b, h, row, k: function(b, h, row, k))
    else:
        right, found = of_all(function, S), TensorFunction.of(kind, lambda s, b, h, row, k: function(s, b, h, row, k))
    captured = {name: each.numpy() if isinstance(each, torch.Tensor) else each for name, each in found.captured.items()}
    sizes = {"b": BATCH, "h": HEADS, "kv_h": HEADS, "row": N, "k": N}
    tree = KINDS[kind](found.expression, **captured).form.tree
    ours = np.broadcast_to(evaluate(tree, positions(sizes) | captured | {"s": S.numpy()}, np.float32), S.shape)
    assert np.allclose(ours, right.numpy(), rtol=1e-5, atol=1e-5) and not (kind == "mask" and (ours.all() or not ours.any()))


@pytest.mark.parametrize("name", ["neighbourhood", "shared beginnings"])
def test_kernels_take_them(name: str) -> None:
    """A BlockMask of the function itself, whose blocks decide what is left out."""
    block_mask = flex.create_block_mask(MASKS[name], None, None, N, N, device="cpu", BLOCK_SIZE=16)
    seen = of_all(MASKS[name])
    tensors = drawn(*[(BATCH, HEADS, N, 16)] * 3)
    close(lambda *t: flex_attention(*t, block_mask=block_mask), lambda *t: plain(*t, seen), tensors, gradients=False)


# A product of vectors, a list that is searched, bits of integers, and an activation that no kernel has
(table,) = drawn((N, 4))
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "vectors": (lambda s, b, h, q, k: s + torch.dot(table[q], table[k]), "dot of 2 arguments has no place in an expression"),
    "a search": (lambda s, b, h, q, k: torch.where((part[q] == bounds).any(), s, -s), "bounds is computed with as a whole"),
    "bits": (lambda s, b, h, q, k: torch.where((q ^ k) > 3, s, -s), "an expression has no bits: of conditions write a != b"),
    "shifts": (lambda s, b, h, q, k: torch.where(q >> 3 == k >> 3, s, -s), "x * 8 and x // 8 in place of x << 3 and x >> 3"),
    "an activation": (lambda s, b, h, q, k: torch.nn.functional.gelu(s), "gelu of 1 arguments has no place in an expression"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_place_is_refused_in_words(name: str) -> None:
    function, words = REFUSED[name]
    q = drawn((1, HEADS, N, 16))[0]
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        flex_attention(q, q, q, function)
