"""Calls of tensors beside plain attention by PyTorch's operations: O and gradients by the 2x rule, float64 for the truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

torch.set_num_threads(1)


def plain(q: Any, k: Any, v: Any, seen: Any = None, bias: Any = None, scale: float | None = None) -> Any:
    """softmax(scale q k^T + bias) v of (..., h, n, d), heads of k and v repeated; rows that see no key are zeros."""
    if q.dim() > 2 and k.shape[-3] != q.shape[-3]:
        k, v = (each.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for each in (k, v))
    S = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    S = S if bias is None else S + bias
    S = S if seen is None else S.masked_fill(~seen, float("-inf"))
    return torch.softmax(S, -1).nan_to_num() @ v


def drawn(*shapes: tuple[int, ...], dtype: Any = torch.float32, seed: int = 0) -> list[Any]:
    """Normal numbers of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def leaves(tensors: Sequence[Any], dtype: Any = None) -> list[Any]:
    """Copies in a dtype that get a gradient."""
    return [each.detach().to(dtype or each.dtype).clone().requires_grad_() for each in tensors]


def close(
    ours: Callable[..., Any],
    truth: Callable[..., Any],
    tensors: Sequence[Any],
    rounded: Callable[..., Any] | None = None,
    gradients: bool = True,
) -> None:
    """Compares O and the gradients of `ours` with those of `truth` in float64.

    An error may be twice that of `rounded` (`truth`, if None) in the tensors' own dtype, and a few roundings.
    """
    found, allowed, exact = leaves(tensors), leaves(tensors), leaves(tensors, torch.float64)
    outs = [function(*each) for function, each in ((ours, found), (rounded or truth, allowed), (truth, exact))]
    assert outs[0].shape == outs[2].shape and outs[0].dtype == tensors[0].dtype
    rows: list[tuple[Any, ...]] = [tuple(outs)]
    if gradients:
        dout = drawn(tuple(outs[0].shape), dtype=outs[0].dtype, seed=9)[0]
        for each in outs:
            each.backward(dout.to(each.dtype))
        rows += [(a.grad, b.grad, c.grad) for a, b, c in zip(found, allowed, exact, strict=True)]
    for name, (one, other, right) in zip(("O", *(f"gradient {at}" for at in range(len(tensors)))), rows, strict=gradients):
        error, limit = ((each.double() - right).detach().abs().max() for each in (one, other))
        room = 4 * torch.finfo(one.dtype).eps * right.detach().abs().max()
        assert error <= 2 * limit + room, f"{name}: {error:.2e}, allowed are 2 x {limit:.2e} + {room:.2e}"
