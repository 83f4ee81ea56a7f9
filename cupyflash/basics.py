"""Names and numbers that need no NumPy: the command line has them for its help, without what computes with them."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

if TYPE_CHECKING:
    import numpy as np

Array: TypeAlias = "np.ndarray"
"""An array of NumPy's. (`AnyArray` in arrays.py is one of NumPy's or CuPy's.)"""
Shape = tuple[int, ...]
"""Sizes along axes: an array's, a grid's in blocks, a block's in threads."""
Values = Mapping[str, Any]
"""Values by name, to be read."""
Report = dict[str, Any]
"""Values by name that somebody makes: a report for JSON, the arguments of a call."""

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes of one element. The input types of the paper's M: shared memory is counted in elements of these."""

DEFAULT_DEVICE = "A100-40GB"
"""The simulated device for NumPy arrays, and"""
DEFAULT_SECONDS = 60.0
"""the longest estimate in seconds that work on it may have."""

LAYOUTS = ("zigzag", "contiguous")
"""The ways to split a sequence over ranks: two chunks a rank, one from each end inwards, or one chunk."""
MOST_RANKS = 65_536

FLAGS = {
    "mask": "Use a boolean mask; counts assume that it leaves no tile empty or whole.",
    "bias": "Add a number to each score.",
    "sinks": "Add a score for each head, which joins each row's softmax and has no value.",
}
"""The help of the commands' flags for fields of `Options`."""


def is_number(value: object, kind: Any = Integral) -> TypeGuard[Any]:
    """True for a number of a kind; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)
