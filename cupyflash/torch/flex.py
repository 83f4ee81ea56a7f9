"""PyTorch's `flex_attention`, by its own arguments: score_mod and mask_mod are traced to expressions, once in each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxOutput, noop_mask

from cupyflash.torch.calls import attend, contiguous, in_autocast
from cupyflash.torch.functions import TensorFunction, arguments_of
from cupyflash.torch.memory import require_operands

# A block size that stands for no blocks at all
WHOLE = 1 << 30
# The states of a block of scores: no score counts, mask_mod says which, all count
EMPTY, PARTIAL, FULL = range(3)


def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Compute attention as `torch.nn.attention.flex_attention.flex_attention` does, on CPU tensors too, with their gradients.

    Shapes: query (B, Hq, L, E), key (B, Hkv, S, E), value (B, Hkv, S, Ev); fewer key heads with `enable_gqa`. `score_mod`(score, b,
    h, q_idx, kv_idx) and the mask_mod of a `BlockMask` are traced: Python functions of arithmetic, comparisons, & | ~ and PyTorch's
    elementwise functions, which index captured tensors, as `cupyflash.Score` describes; what cannot be traced raises a TypeError
    that says what to write. Blocks that a BlockMask leaves out are not seen, full ones are seen whole, mask_mod decides in the
    others. A row that sees no key gives zeros and a log-sum-exp of -inf. `kernel_options` change nothing: tiles are the planner's.

    Returns O (B, Hq, L, Ev); with `return_lse` also the log-sum-exps (B, Hq, L), float32; with `return_aux` O and an AuxOutput. A
    score_mod's captured tensors of floats get gradients, log-sum-exps none; max_scores are refused. torch.compile breaks the graph
    where the functions are traced, and has the attention in the next one.
    """
    if return_lse and return_aux is not None:
        raise ValueError("return_lse must be False beside return_aux, which replaces it")
    if return_aux is not None and return_aux.max_scores:
        raise ValueError("return_aux must not ask for max_scores: kernels keep no row's largest score")
    require_operands(query=query, key=key, value=value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be (B, H, L, E), got shape {tuple(tensor.shape)}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"key must have query's {query.shape[1]} heads, got {key.shape[1]}: pass enable_gqa=True for fewer")
    text, captured = _traced(query, key, score_mod, block_mask)
    operands = map(contiguous, in_autocast(query, key, value))
    out, lse = attend(*operands, functions=text, captured=captured, scale=scale)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


@torch.compiler.disable
def _traced(query: Any, key: Any, score_mod: Any, block_mask: Any) -> tuple[str, list[Any]]:
    """The functions as an operation gets them."""
    functions = {}
    if score_mod is not None:
        functions["score"] = TensorFunction.of("score", lambda s, b, h, row, k: score_mod(s, b, h, row, k))
    if block_mask is not None and (mask := _mask_of(block_mask, query, key)) is not None:
        functions["mask"] = mask
    return arguments_of(functions, query)


def _mask_of(block_mask: Any, query: Any, key: Any) -> TensorFunction | None:
    """The condition of a BlockMask, and what it captures; None if every score counts. ValueError for other lengths."""
    rows, keys = block_mask.BLOCK_SIZE
    function = block_mask.mask_mod
    mask = None
    if function is not None and function is not noop_mask:
        mask = TensorFunction.of("mask", lambda b, h, row, k: function(b, h, row, k))
    if rows == keys == WHOLE:
        return mask
    if tuple(block_mask.seq_lengths) != (query.shape[-2], key.shape[-2]):
        lengths = (query.shape[-2], key.shape[-2])
        raise ValueError(f"block_mask must be of query's and key's lengths {lengths}, got {tuple(block_mask.seq_lengths)}")
    states = _states(block_mask)
    names = [name for name, length in zip("bh", states.shape, strict=False) if length > 1]
    states = states.squeeze(1) if states.shape[1] == 1 else states
    states = states.squeeze(0) if states.shape[0] == 1 else states
    expression, values = mask or ("", {})
    state = "block_states"
    while state in values:
        state += "_"
    of_block = f"{state}[{', '.join([*names, f'row // {rows}', f'k // {keys}'])}]"
    decided = f"{of_block} == {FULL} or {of_block} == {PARTIAL} and ({expression})" if expression else f"{of_block} != {EMPTY}"
    return TensorFunction(decided, {**values, state: states})


def _states(block_mask: Any) -> Any:
    """EMPTY, PARTIAL or FULL of each block, (B or 1, H or 1, Tr, Tc) of int8."""
    count, width = block_mask.kv_indices.shape[-2:]
    leading = block_mask.kv_indices.shape[:-2]
    states = torch.zeros((*leading, count, width + 1), dtype=torch.int8, device=block_mask.kv_indices.device)
    for numbers, indices, state in (
        (block_mask.kv_num_blocks, block_mask.kv_indices, PARTIAL),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, FULL),
    ):
        if numbers is not None:
            there = torch.arange(width, device=indices.device) < numbers[..., None]
            states.scatter_(-1, torch.where(there, indices, width).long(), state)  # what is not there goes to a column of its own
    return states[..., :width].contiguous()
