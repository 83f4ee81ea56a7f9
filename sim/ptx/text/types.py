"""PTX fundamental types (PTX ISA, "Type Systems"): width, kind and the NumPy dtype that holds the bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyflash.words import plural

Array = NDArray[Any]


@dataclass(frozen=True)
class PtxType:
    """One fundamental type. `kind`: b(its), u, s, f(loat) or p(redicate); `dtype` views the bits (halves as float16)."""

    name: str
    bits: int
    kind: str
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        return max(1, self.bits // 8)


def _table() -> dict[str, PtxType]:
    types = {"pred": PtxType("pred", 1, "p", np.dtype(np.bool_))}
    for bits in (8, 16, 32, 64):
        for kind, code in (("b", "u"), ("u", "u"), ("s", "i")):
            name = f"{kind}{bits}"
            types[name] = PtxType(name, bits, kind, np.dtype(f"{code}{bits // 8}"))
    for bits in (16, 32, 64):
        types[f"f{bits}"] = PtxType(f"f{bits}", bits, "f", np.dtype(f"f{bits // 8}"))
    # NumPy has no bfloat16 and no packed types: their bits are kept as unsigned integers.
    types["bf16"] = PtxType("bf16", 16, "f", np.dtype(np.uint16))
    types["f16x2"] = PtxType("f16x2", 32, "f", np.dtype(np.uint32))
    types["bf16x2"] = PtxType("bf16x2", 32, "f", np.dtype(np.uint32))
    types["f32x2"] = PtxType("f32x2", 64, "f", np.dtype(np.uint64))
    types["tf32"] = PtxType("tf32", 32, "f", np.dtype(np.uint32))
    return types


TYPES = _table()

UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
"""Unsigned dtype of a width in bytes."""

ELEMENT: dict[int, np.dtype[Any]] = {**UNSIGNED, 16: np.dtype(np.complex128), 32: np.dtype("V32")}
"""Dtype that moves a memory element of 1..32 bytes as raw bits."""


class PtxError(RuntimeError):
    """Base of the errors that this package raises about a PTX text or its execution."""


QUOTED = 100
"""Most characters of a text that a message repeats."""

MOST_LISTED = 10
"""Statements that a message names one by one."""


def brief(text: str) -> str:
    """A text as a message repeats it."""
    return text if len(text) <= QUOTED else f"{text[: QUOTED - 3]}..."


class UnsupportedPTX(PtxError):
    """A kernel uses what the machine does not execute (opcodes, modifiers, directives): `items`, all as (line, text, reason).

    The message has the first ten.
    """

    def __init__(self, items: list[tuple[int, str, str]], kernel: str = ""):
        self.items = items
        self.kernel = kernel
        lines = "\n".join(f"  line {line}: {brief(text)}  ({reason})" for line, text, reason in items[:MOST_LISTED])
        if len(items) > MOST_LISTED:
            lines += f"\n  and {len(items) - MOST_LISTED:,} more"
        super().__init__(f"{kernel + ': ' if kernel else ''}{plural(len(items), 'unsupported PTX statement')}:\n{lines}")


class Unsupported(Exception):
    """Raised by a decoder for one instruction; collected into `UnsupportedPTX` at load."""
