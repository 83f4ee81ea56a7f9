"""A problem with a right function and one that has a seeded fault, for `cupyflash check`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cupy as cp
import numpy as np

Function = Callable[..., Any]


@dataclass(frozen=True)
class JudgedPair:
    """`fault` says what is wrong with `wrong`; a verdict names it if one of its faults is of one of `kinds`."""

    name: str
    reference: Function
    right: Function
    wrong: Function
    fault: str
    kinds: tuple[str, ...] = ("wrong values",)
    inputs: Function | None = None

    @classmethod
    def seeded(
        cls, name: str, reference: Function, make: Callable[[str], Function], code: str, *changes: tuple[str, str], **more: Any
    ) -> JudgedPair:
        """Returns the pair of the functions that `make` makes of CUDA C and of the same with `changes`."""
        return cls(name, reference, make(code), make(changed(code, *changes)), **more)


def launch(code: str, grid: Any, block: Any, *args: Any) -> None:
    """Launches the kernel `k` of CUDA C, as CuPy's users do."""
    triple = [each if isinstance(each, tuple) else (max(int(each), 1),) for each in (grid, block)]
    cp.RawKernel(code, "k")(*triple, args)


def of_code(launcher: Function) -> Callable[..., Function]:
    """Returns a maker: of CUDA C, or of what else `launcher` takes first, it makes the function of the other arguments."""
    return partial(partial, launcher)


def elementwise(kind: str, threads: int = 128) -> Callable[[str], Function]:
    """Returns a maker of functions of an array of this declared kind, to one like it: a thread makes an element."""

    def launcher(code: str, x: Any) -> Any:
        y = cp.empty_like(x)
        launch(code, over(x.size, threads), threads, x, y, np.int32(x.size))
        return y

    launcher.__annotations__["x"] = kind
    return of_code(launcher)


def by_rows(kind: str, threads: int) -> Callable[[str], Function]:
    """Returns a maker of functions of a matrix of this declared kind, to one like it: a block makes a row."""

    def launcher(code: str, x: Any) -> Any:
        y = cp.empty_like(x)
        launch(code, x.shape[0], threads, x, y, np.int32(x.shape[1]))
        return y

    launcher.__annotations__["x"] = kind
    return of_code(launcher)


def changed(code: str, *pairs: tuple[str, str]) -> str:
    """Returns the code with its seeded fault."""
    for old, new in pairs:
        assert old in code, old
        code = code.replace(old, new)
    return code


def over(n: int, threads: int) -> int:
    """Returns how many blocks of so many threads cover n."""
    return -(-n // threads)
