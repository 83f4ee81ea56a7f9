"""Sums of products, bit for bit as a chip's tensor cores make them.

The PTX ISA leaves their order and precision open ("Matrix Multiply-Accumulate Instructions"). By default the machine has NumPy
multiply matrices; a launch with `tensor_cores="H100"` sums as an H100 does (`aligned_sums`), at some twenty times the cost.
"""

from __future__ import annotations

import os

import numpy as np

from ..text.syntax import Array

CHIPS = ("H100",)
"""Chips whose sums are known."""

FACTORS = ("f16", "bf16", "tf32")
"""Types of factors whose sums were recorded."""

BEHIND = 25
"""Binary places that an addend keeps behind the unit of the largest exponent."""
NEVER = -(1 << 12)
"""The exponent of zero, which is never the largest; if all addends are 0, `LOWEST` is: it is below that of any product."""
LOWEST = -500
DROPPED = ~((1 << 29) - 1)
"""Keeps the bits of a float64 that a float32 has."""

AT_ONCE = 1 << 16
"""Products that are computed together: they stay in a cache."""


def tensor_cores_asked(name: str | None) -> str | None:
    """Returns the chip whose sums a launch, or the environment's CUPYFLASH_TENSOR_CORES, asks for; None: NumPy's.

    Raises ValueError for others.
    """
    name = name or os.environ.get("CUPYFLASH_TENSOR_CORES") or None
    if name not in (None, *CHIPS):
        raise ValueError(
            f"tensor_cores (or CUPYFLASH_TENSOR_CORES) must be None or one of {', '.join(map(repr, CHIPS))}, got {name!r}"
        )
    return name


def exponents(x: Array) -> Array:
    """Returns the exponents of numbers as int16: 1 for those from 1 to 2."""
    return np.where(x == 0, NEVER, np.frexp(x)[1]).astype(np.int16)


def aligned_sums(a: Array, b: Array, c: Array, result: str) -> Array:
    """Returns c + the sum over k of a[k, i] b[k, j] as one instruction of an H100 makes it: of type `result`, held as float32.

    a: (k, i, ...), b: (k, j, ...), c: (i, j, ...), all float32. All k products, exact, and c are aligned at the largest exponent
    among them, where a product's exponent is the sum of its factors' exponents (its mantissa may be 2 or more); each is truncated
    to 25 bits behind that exponent's unit; the sum of these is exact, and is truncated to float32, or rounded to the nearest
    float16.

    Recorded on an H100 (sm_90) on 2026-11-27 and reproduced in every bit: mma m16n8k16 and m16n8k8 of f16 and bf16,
    m16n8k8 and m16n8k4 of tf32, wgmma m64n8k16 of f16 and bf16 with float32 sums, mma m16n8k16 with float16 sums (these would be
    the same with more than 25 bits); tests/h100.npz has some. Not recorded, and here as IEEE arithmetic has it: NaN,
    infinities, a float32 sum that overflows, subnormal factors and results, and the sign of a sum that is 0.
    """
    out = np.empty(c.shape, np.float32)
    a_exponents, b_exponents = exponents(a), exponents(b)
    a, b = a.astype(np.float64), b.astype(np.float64)
    rows = max(1, AT_ONCE // (a.shape[0] * c[0].size))
    for first in range(0, len(c), rows):
        here = slice(first, first + rows)
        addend = c[here].astype(np.float64)
        # A fraction of frexp is half of a mantissa, a product of two a quarter.
        largest = (a_exponents[:, here, None] + b_exponents[:, None]).max(axis=0) - 2
        largest = np.maximum(np.maximum(largest, exponents(addend) - 1), LOWEST).astype(np.int64)
        unit = (1023 + BEHIND - largest << 52).view(np.float64)  # its inverse: 2**(BEHIND - largest)
        products = a[:, here, None] * b[:, None]
        np.multiply(products, unit, products)
        np.trunc(products, products)
        total = (products.sum(axis=0) + np.trunc(addend * unit)) / unit
        out[here] = total.astype(np.float16) if result == "f16" else (total.view(np.int64) & DROPPED).view(np.float64)
    return out
