"""The calls of `cupyflash` in its own words, for tensors, with autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, Unpack

import torch

import cupyflash.torch.ops  # noqa: F401, the operations
from cupyflash.request import keywords
from cupyflash.request.keywords import asks, keywords_of
from cupyflash.torch.functions import functions_in
from cupyflash.torch.memory import TYPES, require_operands

Function = TypeVar("Function", bound=Callable[..., Any])


def complete(function: Function) -> Function:
    """Gives a function all its keywords; an error about one that it does not have has words for who has it from another library."""
    known = keywords_of(function)
    usual = {name: value for name, value in known.defaults.items() if name not in known.required}

    @wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        if not named.keys() <= known.defaults.keys():
            known.complete(named)
        return function(*given, **{**usual, **named})

    return called  # type: ignore[return-value]


@complete
@asks(keywords.TensorsHeads)
def attention(q: Any, k: Any, v: Any, **asked: Unpack[keywords.TensorsHeads]) -> Any:
    """Compute `cupyflash.attention` of tensors, with gradients of q, k, v, bias, sinks and what a score has captured.

    Arguments are that function's. `mask` is a tensor of bool, a `Mask` or a Python function; `score` a `Score` or a Python
    function, whose captured tensors of floats get gradients. The last axis of q, k and v is made contiguous by a copy if it is not.
    Without `seed` `dropout` takes one from PyTorch's generator for CPUs. Gradients are the same bits each time with
    `deterministic`, or `torch.use_deterministic_algorithms`. Autocast applies to q, k, v and bias.

    Returns O, of q's dtype, and with `return_lse` the log-sum-exps, which have no gradient.
    """
    require_operands(q=q, k=k, v=v)
    q, k, v, bias = in_autocast(q, k, v, asked["bias"])
    mask = asked["mask"] if isinstance(asked["mask"], torch.Tensor) else None
    text, captured = functions_in(q, score=asked["score"], mask=None if mask is not None else asked["mask"])
    given = {**asked, "bias": bias, "mask": mask, "functions": text, "captured": captured}
    out, lse = attend(contiguous(q), contiguous(k), contiguous(v), **given)
    return (out, lse) if asked["return_lse"] else out


@complete
@asks(keywords.TensorsVarlen)
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **asked: Unpack[keywords.TensorsVarlen],
) -> Any:
    """Compute `cupyflash.attention_varlen` of tensors, with gradients of q, k, v, sinks and what a score has captured; all else as
    in `attention` here."""
    require_operands(q=q, k=k, v=v)
    q, k, v = in_autocast(q, k, v)
    text, captured = functions_in(q, score=asked["score"], mask=asked["mask"])
    seed = seed_of(asked["dropout"], asked["seed"])
    out, lse = torch.ops.cupyflash.attention_varlen(
        *map(contiguous, (q, k, v)),
        *(asked["sinks"], cu_seqlens_q, cu_seqlens_k, asked["alibi_slopes"], seed, captured),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        deterministic=asked["deterministic"],
        dropout=asked["dropout"],
        **plain_of({**asked, "functions": text}),
    )
    return (out, lse) if asked["return_lse"] else out


@complete
@asks(keywords.TensorsDecode, causal=True)
def attention_decode(q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, **asked: Unpack[keywords.TensorsDecode]) -> Any:
    """Compute `cupyflash.attention_decode` of tensors, which writes k and v into the caches; there are no gradients."""
    k, v = asked["k"], asked["v"]
    require_operands(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    with torch.no_grad():
        text, captured = functions_in(q, score=asked["score"], mask=asked["mask"])
        out, lse = torch.ops.cupyflash.attention_decode(
            *(contiguous(q), k_cache, v_cache, cache_seqlens, contiguous(k), contiguous(v)),
            *(asked["block_table"], asked["sinks"], asked["alibi_slopes"], asked["tree_mask"], captured),
            num_splits=asked["num_splits"],
            layout=asked["layout"],
            **plain_of({**asked, "functions": text}),
        )
    return (out, lse) if asked["return_lse"] else out


def attend(q: Any, k: Any, v: Any, **given: Any) -> tuple[Any, Any]:
    """O and L of the operation of `attention`: `functions` as a text, with their `captured` tensors."""
    beside = (given.get(name) for name in ("bias", "sinks", "mask", "key_lengths", "alibi_slopes"))
    dropout = given.get("dropout", 0.0)
    made: tuple[Any, Any] = torch.ops.cupyflash.attention(
        *(q, k, v, *beside, seed_of(dropout, given.get("seed")), given.get("captured", [])),
        dropout=dropout,
        deterministic=given.get("deterministic", False),
        algorithm=given.get("algorithm", "auto"),
        layout=given.get("layout", "bhnd"),
        **plain_of(given),
    )
    return made


def plain_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that all operations have."""
    left, right = given.get("window") or (None, None)
    plain = {"functions": given.get("functions", ""), "causal": given.get("causal", False), "left": left, "right": right}
    return plain | {name: given.get(name) for name in ("scale", *keywords.SCORE_NUMBERS)}


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
