"""Bytes between HBM and the chip, per tensor, reads and writes apart: what theory, replay and execution are compared in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

# The order in which tensors are shown.
TENSORS = (
    *("Q", "K", "V", "S", "P", "O", "O_acc", "l", "m", "L"),
    *("dO", "D", "dP", "dS", "dQ", "dQ_acc", "dK", "dV"),
    *("mask", "bias", "dbias", "key_lengths", "block_mask", "tiles", "query_tiles", "cu_seqlens_q", "cu_seqlens_k", "x", "y"),
    *("K_new", "V_new", "O_part", "m_part", "l_part", "block_table", "cache_seqlens", "tree_mask"),
)
PLACES = {name: place for place, name in enumerate(TENSORS)}


class TensorTraffic(NamedTuple):
    """Bytes of one tensor that were read from and written to HBM, counted as the accesses asked for them."""

    read_bytes: int = 0
    write_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.read_bytes + self.write_bytes


TOTAL = "total"
"""The row of the sum of all tensors."""


def row_of(name: str) -> str:
    """A tensor's row: an array of somebody's kernel may be called as the sum is."""
    return f"{TOTAL} (array)" if name == TOTAL else name


class Traffic(Mapping[str, TensorTraffic]):
    """TensorTraffic by tensor name; a tensor that moved no bytes is equal to one that is not named."""

    def __init__(self, tensors: Mapping[str, TensorTraffic]) -> None:
        moved = [name for name, each in tensors.items() if any(each)]
        self._tensors = {name: tensors[name] for name in sorted(moved, key=lambda name: (PLACES.get(name, 99), name))}

    @classmethod
    def of(cls, read: Mapping[str, int], written: Mapping[str, int]) -> Traffic:
        """The traffic of bytes read and bytes written by tensor."""
        return cls({name: TensorTraffic(read.get(name, 0), written.get(name, 0)) for name in {**read, **written}})

    @classmethod
    def summed(cls, parts: Iterable[tuple[int, Traffic]]) -> Traffic:
        """The sum of parts, each with how often it counts."""
        read: Counter[str] = Counter()
        written: Counter[str] = Counter()
        for times, part in parts:
            for name, moved in part._tensors.items():
                read[name] += times * moved.read_bytes
                written[name] += times * moved.write_bytes
        return cls.of(read, written)

    def __getitem__(self, name: str) -> TensorTraffic:
        """The tensor's bytes: zero for one of the algorithms' tensors that did not move."""
        if name in TENSORS:
            return self._tensors.get(name, TensorTraffic())
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __eq__(self, other: object) -> bool:
        return self._tensors == other._tensors if isinstance(other, Traffic) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._tensors.items()))

    def __repr__(self) -> str:
        rows = ", ".join(f"{name}: {t.read_bytes} read, {t.write_bytes} written" for name, t in self._tensors.items())
        return f"Traffic({rows})"

    @property
    def read_bytes(self) -> int:
        return sum(tensor.read_bytes for tensor in self._tensors.values())

    @property
    def write_bytes(self) -> int:
        return sum(tensor.write_bytes for tensor in self._tensors.values())

    @property
    def total_bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    def as_dict(self) -> dict[str, dict[str, int]]:
        """The traffic for JSON: {tensor: {"read_bytes": ..., "write_bytes": ...}} with a "total" row."""
        rows = {row_of(name): {"read_bytes": t.read_bytes, "write_bytes": t.write_bytes} for name, t in self._tensors.items()}
        return rows | {TOTAL: {"read_bytes": self.read_bytes, "write_bytes": self.write_bytes}}
