"""Attention of JAX's arrays, with gradients: a callback from the compiled program to the kernels.

    from cupyflash.jax import attention, dot_product_attention

JAX hands arrays to the host, from where CuPy takes them to the GPU if JAX runs on one; on a CPU the simulated device runs the
kernels. It works under `jax.jit` and `jax.grad`, and is for comparing and learning, not for speed. JAX is imported here and nowhere
else.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cupyflash
from cupyflash.request.keywords import SCORE_NUMBERS

Asked = tuple[tuple[str, Any], ...]
# Arrays that get a gradient, beside q, k and v; and those that get none
LEARNED, GIVEN = ("bias", "sinks"), ("mask", "key_lengths", "alibi_slopes")
OPTIONS = (
    "causal",
    "window",
    "scale",
    *SCORE_NUMBERS,
    "score",
    "dropout",
    "seed",
    "offset",
    "algorithm",
    "layout",
    "deterministic",
)


def attention(q: Any, k: Any, v: Any, *, return_lse: bool = False, **asked: Any) -> Any:
    """Compute `cupyflash.attention` of JAX's arrays, with gradients of q, k, v, bias and sinks.

    The keywords are that function's: the arrays `bias`, `sinks`, `mask` (of bool, or a `Mask`), `key_lengths` and `alibi_slopes`;
    all others are constants of the compiled program (`causal`, `window`, `scale`, `softcap`, `score`, `dropout`, `seed`, `offset`,
    `algorithm`, `layout`), and `deterministic` gradients. L of `return_lse` has no gradient. Raises TypeError for other keywords,
    and in the call what `cupyflash.attention` raises.
    """
    constants = {name: asked.pop(name) for name in OPTIONS if name in asked}
    if isinstance(asked.get("mask"), cupyflash.Mask):
        constants["mask"] = asked.pop("mask")
    arrays = {name: asked.pop(name, None) for name in (*LEARNED, *GIVEN)}
    if asked:
        raise TypeError(f"attention() got an unexpected keyword argument {next(iter(asked))!r}")
    learned, given = ({name: jnp.asarray(arrays[name]) for name in names if arrays[name] is not None} for names in (LEARNED, GIVEN))
    out, lse = _attention(tuple(constants.items()), *map(jnp.asarray, (q, k, v)), learned, given)
    return (out, jax.lax.stop_gradient(lse)) if return_lse else out


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """Compute attention as `jax.nn.dot_product_attention` does: arrays (b, n, h, d) or (n, h, d), the causal mask aligned top-left.

    `key_value_seq_lengths` are the numbers of keys; `query_seq_lengths` and, for other numbers of queries than of keys,
    `local_window_size` are refused. `implementation` changes nothing. Returns O, and with `return_residual` also the log-sum-exps,
    (b, n, h).
    """
    if query_seq_lengths is not None:
        raise ValueError("query_seq_lengths must be None: rows beyond a sequence's end are computed as all others")
    n_q, n_k = query.shape[-3], key.shape[-3]
    window = (local_window_size, local_window_size) if isinstance(local_window_size, int) else local_window_size
    if window is not None and n_q != n_k:
        raise ValueError(f"local_window_size must be None for {n_q} queries and {n_k} keys: here a window is aligned bottom-right")
    if is_causal and n_q != n_k:
        top_left = np.arange(n_k) <= np.arange(n_q)[:, None]
        mask, is_causal = top_left if mask is None else mask & top_left, False
    if is_causal and window is not None:
        window = window[0], 0
    if bias is not None and jnp.asarray(bias).dtype not in (query.dtype, jnp.float32):
        bias = jnp.asarray(bias, jnp.float32)
    arrays = {"bias": bias, "mask": mask, "key_lengths": key_value_seq_lengths}
    asked: dict[str, Any] = {"causal": is_causal, "window": window, "scale": scale, "layout": "bnhd"}
    out, lse = attention(query, key, value, return_lse=True, **asked, **arrays)
    return (out, jnp.swapaxes(lse, -1, -2)) if return_residual else out


def _ours(*arrays: Any) -> list[Any]:
    """Arrays of JAX on the host, or on the GPU, for a call of ours."""
    found = [None if each is None else np.asarray(each) for each in arrays]
    if jax.default_backend() != "gpu":
        return found
    import cupy

    return [None if each is None else cupy.asarray(each) for each in found]


def _theirs(arrays: Any) -> tuple[np.ndarray, ...]:
    return tuple(each if isinstance(each, np.ndarray) else each.get() for each in arrays)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(asked: Asked, q: Any, k: Any, v: Any, learned: dict[str, Any], given: dict[str, Any]) -> Any:
    options = {name: value for name, value in asked if name != "deterministic"}
    rows = jnp.swapaxes(q, -3, -2) if options.get("layout") == "bnhd" and q.ndim > 2 else q
    results = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype), jax.ShapeDtypeStruct(rows.shape[:-1], jnp.float32)

    def call(q: Any, k: Any, v: Any, beside: dict[str, Any]) -> Any:
        arrays = dict(zip(beside, _ours(*beside.values()), strict=True))
        q, k, v = _ours(q, k, v)
        return _theirs(cupyflash.attention(q, k, v, return_lse=True, **options, **arrays))

    return jax.pure_callback(call, results, q, k, v, learned | given)


def _forward(asked: Asked, q: Any, k: Any, v: Any, learned: dict[str, Any], given: dict[str, Any]) -> Any:
    out, lse = _attention(asked, q, k, v, learned, given)
    return (out, lse), (q, k, v, out, lse, learned, given)


def _backward(asked: Asked, kept: Any, cotangents: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, learned, given = kept
    options = dict(asked) | ({"return_dbias": True} if "bias" in learned else {})
    like = [q, k, v, *(learned[name] for name in ("sinks", "bias") if name in learned)]
    results = [jax.ShapeDtypeStruct(each.shape, jnp.float32 if each is learned.get("sinks") else each.dtype) for each in like]

    def call(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, beside: dict[str, Any]) -> Any:
        arrays = dict(zip(beside, _ours(*beside.values()), strict=True))
        dout, q, k, v, out, lse = _ours(dout, q, k, v, out, lse)
        return list(_theirs(cupyflash.attention_backward(dout, q, k, v, out, lse, **options, **arrays)))

    dq, dk, dv, *rest = jax.pure_callback(call, results, cotangents[0], q, k, v, out, lse, learned | given)
    found = {name: rest.pop(0).astype(learned[name].dtype) for name in ("sinks", "bias") if name in learned}
    return dq, dk, dv, found, None


_attention.defvjp(_forward, _backward)
