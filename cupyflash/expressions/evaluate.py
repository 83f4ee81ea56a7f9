"""The reference: NumPy evaluates an expression for all scores at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyflash.basics import Report, Values
from cupyflash.expressions.tree import OPERATIONS, Load, Name, Node, Number


def positions(sizes: Mapping[str, int]) -> Report:
    """The positions of every score, by name, as arrays that broadcast to (batch, heads, n_q, n_k).

    `sizes` are the lengths of "b", "h", "kv_h", "row" and "k", as `Form.check` takes them.
    """
    b, h, row, k = np.ogrid[: sizes["b"], : sizes["h"], : sizes["row"], : sizes["k"]]
    n_q, n_k = sizes["row"], sizes["k"]
    kv_h = h // (sizes["h"] // sizes["kv_h"])
    return {"b": b, "h": h, "kv_h": kv_h, "row": row, "q": row + n_k - n_q, "k": k, "n_q": n_q, "n_k": n_k}


def evaluate(tree: Node, values: Values, dtype: type[np.floating[Any]] = np.float64) -> Any:
    """The value of a tree, with floats in `dtype`; the values of its names broadcast to its shape.

    `values` has, by name, s and the positions (arrays that broadcast with each other), captured numbers and captured NumPy arrays.
    """
    types = {"bool": np.bool_, "int": np.int32, "float": dtype}
    with np.errstate(all="ignore"):
        return _value(tree, values, types, {})


def _value(node: Node, values: Values, types: Mapping[str, Any], known: dict[Node, Any]) -> Any:
    """A node's value, from `known` where it is there; no closure, whose cycle would keep all arrays until they are collected."""
    if node not in known:
        known[node] = np.asarray(_computed(node, values, types, known)).astype(types[node.type])
    return known[node]


def _computed(node: Node, values: Values, types: Mapping[str, Any], known: dict[Node, Any]) -> Any:
    if isinstance(node, Number):
        return node.value
    if isinstance(node, Name):
        return values[node.name]
    if isinstance(node, Load):
        array = np.asarray(values[node.name])
        places = zip((_value(index, values, types, known) for index in node.indices), array.shape, strict=True)
        return array[tuple(np.clip(index, 0, length - 1) for index, length in places)]
    return OPERATIONS[node.operation].numpy(*(_value(operand, values, types, known) for operand in node.operands))
