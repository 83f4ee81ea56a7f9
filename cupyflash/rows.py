"""Arrays of any rank and strides as rows along one axis, for kernels that work row by row."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cupyflash.arrays import Array
from cupyflash.schedules.softmax import PARAMS

OUTER_AXES = ("outer", "middle", "inner")


@dataclass(frozen=True)
class Rows:
    """x and y, of one shape, as `rows` rows of `cols` elements.

    `steps` are x's and y's strides from one element of a row to the next, `outer` the (length, x's stride, y's stride) of
    the three axes that the rows themselves are laid out on, the widest stride first. Strides are in elements.
    """

    rows: int
    cols: int
    steps: tuple[int, int]
    outer: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, x: Array, y: Array, axis: int) -> Rows:
        """The rows of x and y along `axis` (0 to x.ndim - 1).

        The other axes are taken in the order of x's strides, and two that are one in memory, in x and in y, are merged.
        Raises ValueError when more than three are left.
        """
        itemsize = x.dtype.itemsize
        axes = [
            (length, x_bytes // itemsize, y_bytes // itemsize) if length > 1 else (length, 0, 0)
            for length, x_bytes, y_bytes in zip(x.shape, x.strides, y.strides, strict=True)
        ]
        cols, *steps = axes.pop(axis)
        outer = _merged(sorted(axes, key=lambda one: (-abs(one[1]), -abs(one[2]))))
        if len(outer) > len(OUTER_AXES):
            raise ValueError(
                f"x and out must have at most {len(OUTER_AXES)} axes beside axis {axis} once those that are one in memory are "
                f"merged, got {len(outer)} from shape {x.shape} and strides {x.strides} bytes: pass x.copy()"
            )
        padding = [(1, 0, 0)] * (len(OUTER_AXES) - len(outer))
        return cls(math.prod(length for length, _, _ in axes), cols, (steps[0], steps[1]), (*padding, *outer))

    @property
    def adjacent(self) -> bool:
        """Whether neighbouring rows are closer in memory than neighbouring elements of a row."""
        return 0 < abs(self.outer[-1][1]) < abs(self.steps[0])


def _merged(axes: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The axes, outermost first, less those of length 1 and those that continue the one inside them."""
    merged: list[tuple[int, int, int]] = []
    for length, x, y in axes:
        if length == 1:
            continue
        if merged and merged[-1][1:] == (length * x, length * y):
            length *= merged.pop()[0]
        merged.append((length, x, y))
    return merged


def softmax_values(x: Array, y: Array, rows: Rows) -> dict[str, Any]:
    """What the softmax kernels' struct holds, with the arrays in place of their addresses."""
    sizes = {"rows": rows.rows, "n": rows.cols, "x_step": rows.steps[0], "y_step": rows.steps[1]}
    for name, (length, x_stride, y_stride) in zip(OUTER_AXES, rows.outer, strict=True):
        sizes |= {name: length, f"x_{name}": x_stride, f"y_{name}": y_stride}
    return PARAMS.values({"x": x, "y": y, **sizes}, x.dtype.name)
