"""The problems that the benchmarks of the forward and of the backward pass time, the most important first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from cupyflash import Device, Problem

TOKENS, WIDTH = 16384, 2048  # of a batch: B x N, and H x d
# Each in order of importance.
DTYPES, HEAD_DIMS, LENGTHS = ("float16", "bfloat16", "float32"), (128, 64, 256), (4096, 1024, 16384, 2048, 8192, 512)
BFLOAT16_SINCE = (8, 0)  # compute capability


@dataclass(frozen=True)
class Case:
    """B x H heads of N x N scores; d is that of Q, K, V and O."""

    dtype: str
    d: int
    n: int
    causal: bool
    batch: int
    heads: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.n, self.d

    @property
    def scores(self) -> int:
        """Elements of S."""
        return self.batch * self.heads * self.n**2

    @property
    def tensor_bytes(self) -> int:
        """Of one of Q, K, V and O."""
        return self.batch * self.heads * self.n * self.d * self.problem.itemsize

    @property
    def problem(self) -> Problem:
        return Problem(self.batch, self.heads, self.heads, self.n, self.n, self.d, self.dtype, causal=self.causal)

    @property
    def flops(self) -> float:
        """Of a forward pass' two products, as FlashAttention's own benchmarks count them."""
        return 4 * self.scores * self.d / (2 if self.causal else 1)

    def __str__(self) -> str:
        return f"{self.dtype}, d {self.d}, N {self.n}{', causal' if self.causal else ''}"


def grid(dtypes: Sequence[str], head_dims: Sequence[int], lengths: Sequence[int], tokens: int, width: int) -> list[Case]:
    """Cases of the same number of tokens and the same width: first those whose parts come first in what is given."""
    ranked = itertools.product(enumerate(dtypes), enumerate(head_dims), enumerate(lengths), (False, True))
    ordered = sorted(ranked, key=lambda each: each[0][0] + each[1][0] + each[2][0])
    return [Case(dtype, d, n, causal, max(1, tokens // n), max(1, width // d)) for (_, dtype), (_, d), (_, n), causal in ordered]


def chosen(device: Device, quick: bool) -> list[Case]:
    """What a device is timed on; bfloat16 only where it has tensor cores for it."""
    if quick:
        return grid(DTYPES[:1], HEAD_DIMS[:2], LENGTHS[:3], TOKENS, WIDTH)
    dtypes = [dtype for dtype in DTYPES if dtype != "bfloat16" or device.compute_capability >= BFLOAT16_SINCE]
    return grid(dtypes, HEAD_DIMS, LENGTHS, TOKENS, WIDTH)


SMALL = Case("float16", 64, 128, False, 1, 1)  # of which a call's host time is told
TINY = Case("float16", 16, 32, True, 1, 2)  # of a dry run
