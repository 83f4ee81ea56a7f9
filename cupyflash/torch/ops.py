"""The custom operations: cupyflash::attention and its backward, with the shapes that PyTorch's compiler asks for.

Tensors that may get a gradient come first, then the others, then all else by keyword. A seed is a tensor, so that a compiled
program draws another one in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

import cupyflash
from cupyflash.torch.functions import functions_of
from cupyflash.torch.memory import array_of, same_stream, tensor_of

Function = TypeVar("Function", bound=Callable[..., Any])
BESIDE = ("bias", "sinks", "mask", "key_lengths", "alibi_slopes", "seed")
_OPTIONAL = ", ".join(f"Tensor? {name}" for name in BESIDE)
_PLAIN = (
    "Tensor[] captured, *, str functions, bool causal, SymInt? left, SymInt? right, float? scale, float? softcap, float dropout, "
    "str algorithm"
)
# Not `torch.library.custom_op`, which imports PyTorch's compiler when it is first called: seconds.
_LIBRARY = torch.library.Library("cupyflash", "DEF")


def operation(schema: str) -> Callable[[Function], Function]:
    """Makes a function the operation of a schema, for CPU and CUDA tensors, by its name in `torch.ops.cupyflash`."""

    def registered(function: Function) -> Function:
        _LIBRARY.define(function.__name__ + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(function.__name__, function, device)
        return function

    return registered


def shapes_of(operation: Callable[..., Any]) -> Callable[[Function], Function]:
    """Makes a function the fake kernel of an operation: tensors of the result's shapes, strides and types."""
    decorate: Any = torch.library.register_fake(f"cupyflash::{operation.__name__}", lib=_LIBRARY)
    return decorate  # type: ignore[no-any-return]


def options_of(named: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a call of ours, from an operation's arguments but the arrays that ours requires."""
    named = dict(named)
    made = functions_of(named.pop("functions"), [array_of(each) for each in named.pop("captured")])
    sides, seed = (named.pop("left"), named.pop("right")), named.pop("seed", None)
    if sides != (None, None):
        made["window"] = sides
    if seed is not None:
        made["seed"] = int(seed)
    given = {name: value for name, value in named.items() if value is not None}
    return made | {name: array_of(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def _named(beside: tuple[Any, ...], plain: dict[str, Any]) -> dict[str, Any]:
    return dict(zip((*BESIDE, "captured"), beside, strict=True)) | plain


@operation(f"(Tensor q, Tensor k, Tensor v, {_OPTIONAL}, {_PLAIN}) -> (Tensor, Tensor)")
def attention(q: Any, k: Any, v: Any, *beside: Any, **plain: Any) -> tuple[Any, Any]:
    """O and L of `cupyflash.attention`."""
    with same_stream(q):
        out, lse = cupyflash.attention(*map(array_of, (q, k, v)), return_lse=True, **options_of(_named(beside, plain)))
        return tensor_of(out), tensor_of(lse)


@shapes_of(attention)
def _(q: Any, k: Any, v: Any, *beside: Any, **plain: Any) -> tuple[Any, Any]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=torch.float32)


_SAVED = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"


@operation(f"({_SAVED}, {_OPTIONAL}, {_PLAIN}, bool dbias) -> Tensor[]")
def attention_backward(*tensors: Any, dbias: bool, **plain: Any) -> list[Any]:
    """dq, dk, dv, then dsinks if there are sinks, then the bias's with `dbias`. It is deterministic when PyTorch is told to be."""
    own, named = tensors[:6], _named(tensors[6:], plain)
    bias, deterministic = named["bias"], torch.are_deterministic_algorithms_enabled()
    if dbias and deterministic:  # a sum along the bias's broadcast axes is then PyTorch's
        named["bias"] = bias.expand(*own[1].shape[:-1], own[2].shape[-2]).contiguous()
    with same_stream(own[0]):
        arrays, options = map(array_of, own), options_of(named)
        made = cupyflash.attention_backward(*arrays, deterministic=deterministic, return_dbias=dbias, **options)
        found = [tensor_of(gradient) for gradient in made]
    return [*found[:-1], found[-1].sum_to_size(bias.shape)] if dbias else found


@shapes_of(attention_backward)
def _(*tensors: Any, dbias: bool, **plain: Any) -> list[Any]:
    like = [*tensors[1:4], *(beside for beside, there in zip(tensors[6:8], (dbias, True), strict=True) if there)]
    dq, dk, dv, *rest = (each.new_empty(each.shape) for each in like if each is not None)
    return [dq, dk, dv, *reversed(rest)]


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, Any]) -> None:
    *tensors, captured = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output, *captured)
    ctx.plain, ctx.tensors = keyword_only_inputs, len(tensors)


def _backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    q, k, v, *beside = ctx.saved_tensors[: ctx.tensors]
    out, lse, *captured = ctx.saved_tensors[ctx.tensors :]
    dbias = ctx.needs_input_grad[3]
    dq, dk, dv, *rest = torch.ops.cupyflash.attention_backward(dout, q, k, v, out, lse, *beside, captured, dbias=dbias, **ctx.plain)
    of_bias = rest.pop() if dbias else None
    of_sinks = rest.pop() if rest else None
    return dq, dk, dv, of_bias, of_sinks, *[None] * (len(BESIDE) - 2), [None] * len(captured)


torch.library.register_autograd("cupyflash::attention", _backward, setup_context=_keep, lib=_LIBRARY)
