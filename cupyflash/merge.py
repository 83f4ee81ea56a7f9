"""Merges attention over disjoint keys: the partial results of split keys, of a ring of devices, of a shared prefix."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cupyflash.arrays import address, array_dtype, heads_first, require_dtype, require_places, require_shape
from cupyflash.launch.dispatch import as_array, device_of, on_gpu, refuse_written
from cupyflash.launch.launcher import held_for_graph
from cupyflash.request.keywords import LAYOUTS
from cupyflash.request.options import require_choice


def merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, *, out: Any | None = None, layout: str = "bhnd") -> tuple[Any, Any]:
    """Merge attention over the keys of a and of b: O = (e^La O_a + e^Lb O_b) / (e^La + e^Lb), L = log(e^La + e^Lb).

    o_a and o_b, of shape (..., n, d) and one dtype (float16, bfloat16 or float32), and lse_a and lse_b, float32 of shape (..., n),
    are the results of `attention` with `return_lse` for the same queries and two disjoint sets of keys. With `layout` "bnhd" o_a,
    o_b and out are (..., n, h, d) beside lse of (..., h, n), as `attention` and `attention_varlen` return them. A log-sum-exp of
    -inf means that no key was seen: the other side is then the result, exactly; if both are -inf, zeros and -inf. Commutative, and
    associative up to rounding.

    Computed in float32. Returns O in its dtype and L in float32; `out`, if given, receives O: o_a or o_b itself, or memory that no
    input shares, with a place for every element. NumPy and CuPy arrays alike, of any strides; CuPy arrays on their device and the
    current stream.

    Raises TypeError or ValueError for arrays that do not go together.
    """
    given = {"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b} | ({} if out is None else {"out": out})
    require_choice("layout", layout, LAYOUTS)
    arrays = {name: as_array(name, array) for name, array in given.items()}
    if layout == "bnhd":
        arrays |= {name: heads_first(arrays[name]) for name in ("o_a", "o_b", "out") if name in arrays}
    gpu = on_gpu(**arrays)
    _check(**arrays)
    if out is not None:
        _check_out(**arrays)
    with device_of(gpu, **arrays), held_for_graph(gpu):
        o, lse = merged(sys.modules["cupy"] if gpu else np, *(arrays[name] for name in ("o_a", "lse_a", "o_b", "lse_b")))
        if out is None:
            return (heads_first(o) if layout == "bnhd" else o), lse
        arrays["out"][...] = o
        return out, lse


def merged(xp: Any, o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[Any, Any]:
    m = xp.maximum(lse_a, lse_b)
    base = xp.where(xp.isneginf(m), np.float32(0), m)  # -inf less -inf is no number
    weight_a, weight_b = xp.exp(lse_a - base), xp.exp(lse_b - base)
    total = weight_a + weight_b
    total = xp.where(total == 0, np.float32(1), total)  # where neither saw a key
    # A side of no weight may hold anything.
    a, b = (
        xp.where(weight == 0, np.float32(0), weight * o.astype(np.float32))
        for weight, o in (((weight_a / total)[..., None], o_a), ((weight_b / total)[..., None], o_b))
    )
    return (a + b).astype(o_a.dtype), m + xp.log(total)


def _check(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, out: Any | None = None) -> None:
    array_dtype("o_a", o_a)
    if o_a.ndim < 2:
        raise ValueError(f"o_a must be (..., n, d), got shape {o_a.shape}")
    for name, array, shape, dtype in (
        ("lse_a", lse_a, o_a.shape[:-1], np.dtype(np.float32)),
        ("o_b", o_b, o_a.shape, o_a.dtype),
        ("lse_b", lse_b, o_a.shape[:-1], np.dtype(np.float32)),
        *((("out", out, o_a.shape, o_a.dtype),) if out is not None else ()),
    ):
        require_dtype(name, array, dtype)
        require_shape(name, array, shape)


def _check_out(out: Any, **inputs: Any) -> None:
    """ValueError for an out that cannot hold the result, or of which an input, o_a and o_b themselves apart, has a part."""
    require_places("out", out)
    refuse_written({"out": out} | {name: array for name, array in inputs.items() if not _same(array, out)}, ("out",))


def _same(a: Any, b: Any) -> bool:
    """True if two arrays are the same elements."""
    strides = [[stride for length, stride in zip(x.shape, x.strides, strict=True) if length > 1] for x in (a, b)]
    return bool(address(a) == address(b) and a.shape == b.shape and a.dtype == b.dtype and strides[0] == strides[1])
