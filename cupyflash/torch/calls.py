"""The calls of `cupyflash` in its own words, for tensors, with autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

import cupyflash.torch.ops  # noqa: F401, the operations
from cupyflash.request.keywords import keywords_of
from cupyflash.torch.functions import functions_in
from cupyflash.torch.memory import TYPES, require_operands

Function = TypeVar("Function", bound=Callable[..., Any])


def hinting(function: Function) -> Function:
    """Gives an error about a keyword that the function does not have words for who has it from another library."""
    keywords = keywords_of(function)

    @wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        if not named.keys() <= keywords.defaults.keys():
            keywords.complete(named)
        return function(*given, **named)

    return called  # type: ignore[return-value]


@hinting
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    bias: Any = None,
    key_lengths: Any = None,
    sinks: Any = None,
    score: Any = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    deterministic: bool = False,
    algorithm: str = "auto",
    layout: str = "bhnd",
    return_lse: bool = False,
) -> Any:
    """Compute `cupyflash.attention` of tensors, with gradients of q, k, v, bias, sinks and what a score has captured.

    Arguments are that function's. `mask` is a tensor of bool, a `Mask` or a Python function; `score` a `Score` or a Python
    function, whose captured tensors of floats get gradients. The last axis of q, k and v is made contiguous by a copy if it is not.
    Without `seed` `dropout` takes one from PyTorch's generator for CPUs. Gradients are the same bits each time with
    `deterministic`, or `torch.use_deterministic_algorithms`. Autocast applies to q, k, v and bias.

    Returns O, of q's dtype, and with `return_lse` the log-sum-exps, which have no gradient.
    """
    require_operands(q=q, k=k, v=v)
    q, k, v, bias = in_autocast(q, k, v, bias)
    function, mask = (None, mask) if isinstance(mask, torch.Tensor) else (mask, None)
    text, captured = functions_in(q, score=score, mask=function)
    arrays = {"bias": bias, "sinks": sinks, "mask": mask, "key_lengths": key_lengths, "alibi_slopes": alibi_slopes}
    choices = {"deterministic": deterministic, "algorithm": algorithm, "layout": layout}
    plain = {"causal": causal, "window": window, "scale": scale, "softcap": softcap, "dropout": dropout, "seed": seed}
    out, lse = attend(contiguous(q), contiguous(k), contiguous(v), functions=text, captured=captured, **arrays, **choices, **plain)
    return (out, lse) if return_lse else out


@hinting
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    sinks: Any = None,
    score: Any = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Compute `cupyflash.attention_varlen` of tensors, with gradients of q, k, v, sinks and what a score has captured; all else as
    in `attention` here."""
    require_operands(q=q, k=k, v=v)
    q, k, v = in_autocast(q, k, v)
    text, captured = functions_in(q, score=score, mask=mask)
    out, lse = torch.ops.cupyflash.attention_varlen(
        *map(contiguous, (q, k, v)),
        *(sinks, cu_seqlens_q, cu_seqlens_k, alibi_slopes, seed_of(dropout, seed), captured),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        deterministic=deterministic,
        dropout=dropout,
        **plain_of(text, causal, window, scale, softcap),
    )
    return (out, lse) if return_lse else out


@hinting
def attention_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    cache_seqlens: Any,
    *,
    k: Any = None,
    v: Any = None,
    block_table: Any = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    tree_mask: Any = None,
    mask: Any = None,
    sinks: Any = None,
    score: Any = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    scale: float | None = None,
    num_splits: int | None = None,
    layout: str = "bhnd",
    return_lse: bool = False,
) -> Any:
    """Compute `cupyflash.attention_decode` of tensors, which writes k and v into the caches; there are no gradients."""
    require_operands(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    with torch.no_grad():
        text, captured = functions_in(q, score=score, mask=mask)
        out, lse = torch.ops.cupyflash.attention_decode(
            *(contiguous(q), k_cache, v_cache, cache_seqlens, contiguous(k), contiguous(v)),
            *(block_table, sinks, alibi_slopes, tree_mask, captured),
            num_splits=num_splits,
            layout=layout,
            **plain_of(text, causal, window, scale, softcap),
        )
    return (out, lse) if return_lse else out


def attend(q: Any, k: Any, v: Any, **given: Any) -> tuple[Any, Any]:
    """O and L of the operation of `attention`: `functions` as a text, with their `captured` tensors."""
    beside = (given.get(name) for name in ("bias", "sinks", "mask", "key_lengths", "alibi_slopes"))
    dropout = given.get("dropout", 0.0)
    plain = (given.get(name) for name in ("window", "scale", "softcap"))
    made: tuple[Any, Any] = torch.ops.cupyflash.attention(
        *(q, k, v, *beside, seed_of(dropout, given.get("seed")), given.get("captured", [])),
        dropout=dropout,
        deterministic=given.get("deterministic", False),
        algorithm=given.get("algorithm", "auto"),
        layout=given.get("layout", "bhnd"),
        **plain_of(given.get("functions", ""), given.get("causal", False), *plain),
    )
    return made


def plain_of(functions: str, causal: bool, window: Any, scale: float | None, softcap: float | None) -> dict[str, Any]:
    """The keywords that all operations have."""
    left, right = window or (None, None)
    return {"functions": functions, "causal": causal, "left": left, "right": right, "scale": scale, "softcap": softcap}


def contiguous(tensor: Any) -> Any:
    """A tensor whose last axis is contiguous."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def seed_of(dropout: float, seed: int | None = None) -> Any:
    """A seed as a tensor: the given one, or one from PyTorch's generator for CPUs; None if nothing is dropped."""
    if not dropout > 0:
        return None
    return torch.randint(2**63 - 1, ()) if seed is None else torch.tensor(seed)


def in_autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in autocast's dtype, where it is enabled."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(each.to(dtype) if each is not None and each.dtype in TYPES else each for each in tensors)
