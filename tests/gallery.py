"""The common part of the galleries of kernels: a launch as data, a register of them, and the check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from test_ptx_harness import compile_cuda


@dataclass
class Run:
    """A launch of the kernel `k` and what it must leave in its arguments, to a relative and absolute `close` (0: equal)."""

    cuda: str
    grid: Any
    block: Any
    args: dict[str, Any]
    want: dict[str, np.ndarray]
    close: float = 0.0
    shared: int = 0
    options: tuple[str, ...] = ()


class Gallery:
    """Functions that make a `Run` from random numbers, by name."""

    def __init__(self) -> None:
        self.makers: dict[str, Callable[[np.random.Generator], Run]] = {}

    def __call__(self, maker: Callable[[np.random.Generator], Run]) -> Callable[[np.random.Generator], Run]:
        self.makers[maker.__name__] = maker
        return maker

    @property
    def names(self) -> list[str]:
        return list(self.makers)

    def make(self, name: str) -> Run:
        return self.makers[name](np.random.default_rng(5))


def check_kernel(run: Run, seed: int | None) -> None:
    """Launch it with races on: no findings, and the arrays are as wanted."""
    launch = compile_cuda(run.cuda, *run.options).launch("k", run.grid, run.block, run.args, shared_bytes=run.shared, seed=seed)
    assert launch.findings == ()
    for name, want in run.want.items():
        np.testing.assert_allclose(run.args[name].astype(want.dtype), want, rtol=run.close, atol=run.close, err_msg=name)
