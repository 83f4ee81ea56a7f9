"""A problem with a right function and one that has a seeded fault, for `cupyflash check`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cupy as cp

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


def changed(code: str, *pairs: tuple[str, str]) -> str:
    """Returns the code with its seeded fault."""
    for old, new in pairs:
        assert old in code, old
        code = code.replace(old, new)
    return code


def over(n: int, threads: int) -> int:
    """Returns how many blocks of so many threads cover n."""
    return -(-n // threads)
