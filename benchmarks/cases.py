"""The problems that the benchmarks of the forward and of the backward pass time, the most important first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cupyflash import Device, Problem
from cupyflash.basics import Shape

TOKENS, WIDTH = 16384, 2048  # of a batch: B x N, and H x d
# Each in order of importance.
DTYPES, HEAD_DIMS, LENGTHS = ("bfloat16", "float16", "float32"), (128, 64, 256), (4096, 1024, 16384, 2048, 8192, 512)
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
    def key_heads(self) -> int:
        """Heads of K and V."""
        return self.heads

    @property
    def queries(self) -> int:
        """Rows of Q and O."""
        return self.n

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.queries, self.d

    @property
    def scores(self) -> int:
        """Elements of S."""
        return self.batch * self.heads * self.queries * self.n

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one of Q and O."""
        return self.batch * self.heads * self.queries * self.d * self.problem.itemsize

    @property
    def problem(self) -> Problem:
        return Problem(self.batch, self.heads, self.key_heads, self.queries, self.n, self.d, self.dtype, causal=self.causal)

    @property
    def flops(self) -> float:
        """FLOPs of a forward pass' two products, as FlashAttention's own benchmarks count them."""
        return 4 * self.scores * self.d / (2 if self.causal and self.queries > 1 else 1)

    def shapes(self, count: int) -> list[Shape]:
        """The shapes of `count` inputs: Q, K, V and dO."""
        keys = self.batch, self.key_heads, self.n, self.d
        return [self.shape, keys, keys, self.shape][:count]

    def read_bytes(self, count: int) -> int:
        """Bytes of `count` inputs."""
        return count * self.tensor_bytes

    def rates(self, cost: float, seconds: float) -> dict[str, float]:
        """The rates of a pass that takes `seconds` and costs `cost` forward passes' FLOPs."""
        return {"tflops": cost * self.flops / seconds / 1e12}

    def __str__(self) -> str:
        return f"{self.dtype}, d {self.d}, N {self.n}{', causal' if self.causal else ''}"


@dataclass(frozen=True)
class GroupedCase(Case):
    """The same with `kv_heads` heads of K and V."""

    kv_heads: int

    @property
    def key_heads(self) -> int:
        return self.kv_heads


class DecodeCase(GroupedCase):
    """One query of each of B sequences, of H heads, against its cache of N keys."""

    queries = 1

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V."""
        return 2 * self.batch * self.kv_heads * self.n * self.d * self.problem.itemsize

    def read_bytes(self, count: int) -> int:
        return self.cache_bytes

    def rates(self, cost: float, seconds: float) -> dict[str, float]:
        """GB/s count K and V once."""
        return {**super().rates(cost, seconds), "gb_s": self.cache_bytes / seconds / 1e9}

    def __str__(self) -> str:
        group = self.heads // self.kv_heads
        return f"{self.dtype}, d {self.d}, batch {self.batch}, cache {self.n}, {group} query heads a key head"


def ranked(*parts: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All combinations of parts: first those whose parts come first in what is given."""
    places = sorted(itertools.product(*(range(len(part)) for part in parts)), key=sum)
    return [tuple(part[at] for part, at in zip(parts, place, strict=True)) for place in places]


def chosen(device: Device, quick: bool) -> list[Case]:
    """The cases on which a device is timed, of the same number of tokens and the same width.

    bfloat16 only if it has tensor cores for it.
    """
    dtypes = [dtype for dtype in DTYPES if dtype != "bfloat16" or device.compute_capability >= BFLOAT16_SINCE]
    parts = (dtypes[:1], HEAD_DIMS[:2], LENGTHS[:3]) if quick else (dtypes, HEAD_DIMS, LENGTHS)
    every = [(case, causal) for case in ranked(*parts) for causal in (False, True)]
    return [Case(dtype, d, n, causal, max(1, TOKENS // n), max(1, WIDTH // d)) for (dtype, d, n), causal in every]


# Of decoding, each in order of importance; 32 query heads.
BATCHES, CACHES, GROUPS = (8, 1, 128, 32, 2, 64), (16384, 4096, 1024, 131072, 32768), (4, 1, 8)
DECODE_HEADS, DECODE_DIM = 32, 128


def decoding(quick: bool, memory: float) -> list[DecodeCase]:
    """The cases on which decoding is timed: all whose K and V take at most `memory` bytes."""
    parts = (GROUPS[:2], CACHES[:3], BATCHES[:3]) if quick else (GROUPS, CACHES, BATCHES)
    every = (
        DecodeCase("float16", DECODE_DIM, n, True, batch, DECODE_HEADS, DECODE_HEADS // group) for group, n, batch in ranked(*parts)
    )
    return [case for case in every if case.cache_bytes <= memory]


SMALL = Case("float16", 64, 128, False, 1, 1)  # of which a call's host time is told
TINY = Case("float16", 16, 32, True, 1, 2)  # of a dry run
TINY_DECODE = DecodeCase("float16", 16, 64, True, 2, 4, 2)
