"""The custom operations of `torch.ops.cupyflash`: attention and attention_varlen with their backwards, attention_decode.

Each takes tensors first and all else by keyword, as a call of ours does. A seed is a tensor, so that a compiled program draws
another one in each call. Fake kernels give PyTorch's compiler the shapes, strides and types of results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

import cupyflash
from cupyflash.request.keywords import SCORE_NUMBERS
from cupyflash.torch.functions import captured_names, functions_of
from cupyflash.torch.memory import array_of, same_stream, tensor_of

Function = TypeVar("Function", bound=Callable[..., Any])
_NUMBERS = ", ".join(f"float? {name}" for name in ("scale", *SCORE_NUMBERS))
_PLAIN = f"str functions, bool causal, SymInt? left, SymInt? right, {_NUMBERS}"
_WANTED = "bool dbias, int[] learned"
_DROPPED = f"{_PLAIN}, float dropout, bool deterministic"
# Not `torch.library.custom_op`, which imports PyTorch's compiler when it is first called: seconds.
_LIBRARY = torch.library.Library("cupyflash", "DEF")


def operation(name: str, schema: str) -> Callable[[Function], Function]:
    """Makes a function the operation of a name, for CPU and CUDA tensors."""

    def registered(function: Function) -> Function:
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, device)
        return function

    return registered


def fake(name: str) -> Callable[[Function], Function]:
    """Makes a function the fake kernel of an operation."""
    decorate: Callable[[Function], Function] = torch.library.register_fake(f"cupyflash::{name}", lib=_LIBRARY)
    return decorate


def options_of(named: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a call of ours, arrays among them, from an operation's arguments by name."""
    named = dict(named)
    made = functions_of(named.pop("functions"), [array_of(each) for each in named.pop("captured")])
    sides, seed = (named.pop("left"), named.pop("right")), named.pop("seed", None)
    if sides != (None, None):
        made["window"] = sides
    if seed is not None:
        made["seed"] = int(seed)
    given = {name: value for name, value in named.items() if value is not None}
    return made | {name: array_of(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def differentiable(name: str, beside: str, plain: str) -> None:
    """Defines an operation, its backward and their connection, from the calls of ours of that name.

    `beside`: the schema of the tensors after q, k and v; those named bias and sinks get gradients. The backward returns dq, dk, dv,
    then dsinks if there are sinks, then the bias's with `dbias`, then those of the `learned` captured tensors, by their places; it
    is deterministic if PyTorch has been told to be, too.
    """
    forward, backward = getattr(cupyflash, name), getattr(cupyflash, f"{name}_backward")
    names = (*(each.split()[1] for each in beside.split(", ")), "captured")
    rest = f"{beside}, Tensor[] captured, *, {plain}, {_DROPPED}"

    @operation(name, f"(Tensor q, Tensor k, Tensor v, {rest}) -> (Tensor, Tensor)")
    def attend(q: Any, k: Any, v: Any, *tensors: Any, deterministic: bool, **more: Any) -> tuple[Any, Any]:
        with same_stream(q):
            options = options_of(dict(zip(names, tensors, strict=True)) | more)
            out, lse = forward(*map(array_of, (q, k, v)), return_lse=True, **options)
            return tensor_of(out), tensor_of(lse)

    @fake(name)
    def _(q: Any, k: Any, v: Any, *tensors: Any, layout: str = "bnhd", **more: Any) -> tuple[Any, Any]:
        rows = q.transpose(-3, -2) if layout == "bnhd" and q.dim() > 2 else q
        return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(rows.shape[:-1], dtype=torch.float32)

    @operation(
        f"{name}_backward", f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {rest}, {_WANTED}) -> Tensor[]"
    )
    def differentiate(*tensors: Any, dbias: bool, learned: list[int], deterministic: bool, **more: Any) -> list[Any]:
        own, named = tensors[:6], dict(zip(names, tensors[6:], strict=True)) | more
        q, k, lse = own[1], own[2], own[5]
        bias: Any = named.get("bias")
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        by_name = captured_names(more["functions"], learned)
        asked = {name: value for name, value in (("return_dbias", dbias), ("return_dscore", by_name)) if value}
        if dbias and deterministic:  # a sum along the bias's broadcast axes is then PyTorch's
            n_k = k.shape[-3 if more["layout"] == "bnhd" and q.dim() > 2 else -2]
            named["bias"] = bias.expand(*lse.shape, n_k).contiguous()
        with same_stream(q):
            arrays, options = map(array_of, own), options_of(named)
            made = backward(*arrays, deterministic=deterministic, **asked, **options)
            of_score = made[-1] if by_name else {}
            found = list(map(tensor_of, made[:-1] if by_name else made))
            if dbias:
                found[-1] = found[-1].sum_to_size(bias.shape)
            return [*found, *(tensor_of(of_score[name]) for name in by_name)]

    @fake(f"{name}_backward")
    def _(*tensors: Any, dbias: bool, learned: list[int], **more: Any) -> list[Any]:
        named = dict(zip(names, tensors[6:], strict=True))
        of_score = [named["captured"][at].new_empty(named["captured"][at].shape) for at in learned]
        found = [each.new_empty(each.shape) for each in tensors[1:4]]
        if named["sinks"] is not None:
            found += [named["sinks"].new_empty(named["sinks"].shape, dtype=torch.float32)]
        found += [named["bias"].new_empty(named["bias"].shape)] if dbias else []
        return found + of_score

    def keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, Any]) -> None:
        *tensors, captured = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output, *captured)
        ctx.plain, ctx.tensors = keyword_only_inputs, len(tensors)

    def connect(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once, as checkpoints ask
        tensors, (out, lse, *captured) = saved[: ctx.tensors], saved[ctx.tensors :]
        wanted = dict(zip(names, ctx.needs_input_grad[3:], strict=True))
        call = getattr(torch.ops.cupyflash, f"{name}_backward")
        dbias = bool(wanted.get("bias"))
        learned = [at for at, wants in enumerate(wanted["captured"]) if wants]
        dq, dk, dv, *rest = call(dout, *tensors[:3], out, lse, *tensors[3:], captured, dbias=dbias, learned=learned, **ctx.plain)
        of_captured = {at: rest.pop() for at in reversed(learned)}
        of_name = {"bias": rest.pop() if dbias else None, "sinks": rest.pop() if rest else None}
        return dq, dk, dv, *(of_name.get(each) for each in names[:-1]), [of_captured.get(at) for at in range(len(captured))]

    torch.library.register_autograd(f"cupyflash::{name}", connect, setup_context=keep, lib=_LIBRARY)

    def keep_again(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: list[Any]) -> None:
        *tensors, captured = inputs
        ctx.save_for_backward(*tensors, *captured)
        ctx.plain, ctx.tensors = keyword_only_inputs, len(tensors)

    def connect_again(ctx: Any, dots: list[Any]) -> tuple[Any, ...]:
        """Returns gradients of gradients, by `attention_double_backward`; those by q, k and v include the ways by out and lse."""
        wanted = zip(names, ctx.needs_input_grad[6:], strict=True)
        learned = [each for each, wants in wanted if (any(wants) if isinstance(wants, list | tuple) else wants)]
        if learned:
            raise NotImplementedError(f"gradients of gradients are by dout, q, k and v alone: detach {learned[0]}")
        if name != "attention" or any(each is not None for each in dots[3:]):
            raise NotImplementedError(f"gradients of gradients are of attention's dq, dk and dv alone, and this is one of {name}'s")
        saved = ctx.saved_tensors
        plain = {each: ctx.plain[each] for each in ctx.plain if each not in ("algorithm", "dbias", "learned")}
        second = torch.ops.cupyflash.attention_double_backward
        dout, q, k, v, _, _, *others = saved[: ctx.tensors]
        by_dout, *by_qkv = second(*dots[:3], dout, q, k, v, *others, list(saved[ctx.tensors :]), **plain)
        nothing = [None] * (len(saved) - ctx.tensors)
        return by_dout, *by_qkv, None, None, *([None] * len(others)), nothing

    torch.library.register_autograd(f"cupyflash::{name}_backward", connect_again, setup_context=keep_again, lib=_LIBRARY)


_OF_HEADS = ", ".join(f"Tensor? {name}" for name in ("bias", "sinks", "mask", "key_lengths", "alibi_slopes", "seed"))
_OF_SEQUENCES = "Tensor? sinks, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? alibi_slopes, Tensor? seed"
differentiable("attention", _OF_HEADS, "str algorithm, str layout")
differentiable("attention_varlen", _OF_SEQUENCES, "SymInt max_seqlen_q, SymInt max_seqlen_k")


@operation(
    "attention_double_backward",
    f"(Tensor? q_dot, Tensor? k_dot, Tensor? v_dot, Tensor dout, Tensor q, Tensor k, Tensor v, {_OF_HEADS}, Tensor[] captured, *, "
    f"{_DROPPED}, str layout) -> Tensor[]",
)
def _second(*tensors: Any, **more: Any) -> list[Any]:
    names = (*(each.split()[1] for each in _OF_HEADS.split(", ")), "captured")
    with same_stream(tensors[3]):
        options = options_of(dict(zip(names, tensors[7:], strict=True)) | more)
        arrays = (None if each is None else array_of(each) for each in tensors[:7])
        return list(map(tensor_of, cupyflash.attention_double_backward(*arrays, **options)))


@fake("attention_double_backward")
def _(*tensors: Any, **more: Any) -> list[Any]:
    return [each.new_empty(each.shape) for each in tensors[3:7]]


_CACHED = ("k_cache", "v_cache", "cache_seqlens", "k", "v", "block_table", "sinks", "alibi_slopes", "tree_mask", "captured")


@operation(
    "attention_decode",
    "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_seqlens, Tensor? k, Tensor? v, Tensor? block_table, "
    f"Tensor? sinks, Tensor? alibi_slopes, Tensor? tree_mask, Tensor[] captured, *, {_PLAIN}, SymInt? num_splits, str layout) "
    "-> (Tensor, Tensor)",
)
def _decode(q: Any, *tensors: Any, **more: Any) -> tuple[Any, Any]:
    with same_stream(q):
        options = options_of(dict(zip(_CACHED, tensors, strict=True)) | more)
        out, lse = cupyflash.attention_decode(array_of(q), return_lse=True, **options)
        return tensor_of(out), tensor_of(lse)


@fake("attention_decode")
def _(q: Any, k_cache: Any, v_cache: Any, *tensors: Any, layout: str, **more: Any) -> tuple[Any, Any]:
    rows = q.transpose(1, 2) if layout == "bnhd" else q
    return q.new_empty((*q.shape[:-1], v_cache.shape[-1])), q.new_empty(rows.shape[:-1], dtype=torch.float32)
