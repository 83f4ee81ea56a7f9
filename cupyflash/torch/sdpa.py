"""PyTorch's `scaled_dot_product_attention`, by its own arguments."""

from __future__ import annotations

from typing import Any

import torch

from cupyflash.torch.calls import attend, contiguous, in_autocast
from cupyflash.torch.memory import require_operands

# The mask of PyTorch's `is_causal`, aligned top-left, as an operation gets it
TOP_LEFT = '{"mask": ["k <= row", {}, []]}'


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute softmax(query key^T scale + attn_mask) value, as `torch.nn.functional.scaled_dot_product_attention` does.

    Shapes: query (..., h, L, E), key (..., h, S, E), value (..., h, S, E_v), with any leading axes, which are broadcast; with
    `enable_gqa` key and value may have fewer heads. All are float16, bfloat16 or float32, of one dtype. `attn_mask` broadcasts to
    (..., h, L, S): bool, true where the row sees the key, or floating point, which is added to the scores and may have a gradient.
    `is_causal` is aligned top-left: row r sees key c if c <= r. `causal_lower_right` of torch.nn.attention.bias, as `attn_mask`, is
    aligned bottom-right. `dropout_p` is applied whenever it is above 0, with a seed from PyTorch's generator for CPUs
    (`torch.manual_seed`). A row that sees no key gives zeros. Autocast, `torch.use_deterministic_algorithms` and
    `torch.compile` work as with PyTorch's own; the gradient itself has no gradient.

    Returns a tensor (..., h, L, E_v). Raises TypeError or ValueError for arguments that do not go together.
    """
    require_operands(query=query, key=key, value=value)
    query, key, value, attn_mask = in_autocast(query, key, value, attn_mask)
    causal, attn_mask = _aligned(attn_mask, is_causal)
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask must be None with is_causal=True, as in PyTorch: write both into one mask")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise ValueError(f"{name} must have two axes or more, (..., L, E), got shape {tuple(tensor.shape)}")
    leading = _leading(query, key, value, enable_gqa)
    q, k, v = (_four_axes(tensor, leading, tensor.shape[-3:-2] if enable_gqa else leading[-1:]) for tensor in (query, key, value))
    n_q, n_k, functions = q.shape[-2], k.shape[-2], ""
    if is_causal:
        if n_q > n_k:
            functions = TOP_LEFT
        else:  # no row sees a key beyond the last row's
            k, v, causal = k.narrow(-2, 0, n_q), v.narrow(-2, 0, n_q), True
    arrays = _of_mask(attn_mask, q, (*leading, n_q, n_k))
    out, _ = attend(q, k, v, **arrays, functions=functions, causal=causal, scale=scale, dropout=dropout_p)
    return out.reshape(*leading, n_q, v.shape[-1])


def _aligned(attn_mask: Any, is_causal: bool) -> tuple[bool, Any]:
    """(True for `causal_lower_right`, the mask that remains)."""
    kind = getattr(attn_mask, "variant", None)
    if kind is None:
        return False, attn_mask
    if kind.name == "LOWER_RIGHT" and not is_causal:
        return True, None
    return False, attn_mask._materialize(attn_mask.device)


def _leading(query: Any, key: Any, value: Any, enable_gqa: bool) -> tuple[int, ...]:
    """The axes before L, of the result; heads are query's with `enable_gqa`."""
    if not enable_gqa:
        try:
            return tuple(torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in (query, key, value))))
        except RuntimeError:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
            raise ValueError(
                f"query, key and value must have axes before the last two that broadcast, got shapes {shapes}: "
                "with fewer heads in key and value pass enable_gqa=True"
            ) from None
    if min(tensor.dim() for tensor in (query, key, value)) < 3:
        raise ValueError(f"enable_gqa is for tensors with heads, (..., h, L, E), got shape {tuple(query.shape)}")
    batches = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in (query, key, value)))
    return (*batches, query.shape[-3])


def _four_axes(tensor: Any, leading: tuple[int, ...], heads: tuple[int, ...]) -> Any:
    """A tensor as (b, h, n, d), or with fewer axes if it has fewer, contiguous along its last axis."""
    wanted = (*leading[:-1], *heads, *tensor.shape[-2:])
    tensor = tensor if tuple(tensor.shape) == wanted else tensor.expand(wanted)
    tensor = tensor.flatten(0, -4) if tensor.dim() > 4 else tensor
    return contiguous(tensor)


def _of_mask(attn_mask: Any, q: Any, scores: tuple[int, ...]) -> dict[str, Any]:
    """The argument for a mask: `mask` or `bias`."""
    if attn_mask is None:
        return {}
    if attn_mask.dtype not in (torch.bool, q.dtype, torch.float32):
        raise TypeError(f"attn_mask must be of bool, float32 or query's dtype {q.dtype}, got {attn_mask.dtype}")
    if len(scores) > 4:
        attn_mask = attn_mask.expand(scores).flatten(0, -4)
    return {"mask" if attn_mask.dtype == torch.bool else "bias": attn_mask}
