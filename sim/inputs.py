"""One call on NumPy arrays, as the simulator hands it on: q, k and v, what comes beside them, and what is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from cupyflash.options import ARRAYS, Options
from cupyflash.problem import Problem

NOTHING = Options()


@dataclass(frozen=True, eq=False)
class Inputs:
    """Arrays as `cupyflash.attention` takes them: q, k, v and, by name, those `beside` them (`cupyflash.options.ARRAYS`).

    `blocks` (Br, Bc) are a block mask's. `options` need not say which arrays there are.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: Options = NOTHING
    beside: Mapping[str, np.ndarray] = field(default_factory=dict)
    blocks: tuple[int, int] | None = None

    @classmethod
    def of(cls, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, blocks: tuple[int, int] | None = None, **asked: Any) -> Inputs:
        """From `attention`'s keywords. TypeError or ValueError for what is none of them."""
        beside = {name: asked.pop(name) for name in ARRAYS if name in asked}
        return cls(q, k, v, Options(**asked), {name: array for name, array in beside.items() if array is not None}, blocks)

    @property
    def qkv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.q, self.k, self.v

    @property
    def keywords(self) -> dict[str, Any]:
        """What `attention` is to be given by name."""
        return {**self.beside, **{name: getattr(self.options, name) for name in ("causal", "window", "scale")}}

    @cached_property
    def problem(self) -> Problem:
        """What the arrays pose. Raises as `Problem.from_arrays` does."""
        return Problem.from_arrays(self.q, self.k, self.v, self.options, **self.beside)
