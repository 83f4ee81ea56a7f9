"""The ring itself: K and V of the next step travel while this one computes, and the results are summed in float32."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from cupyflash.distributed.agreement import Watch
from cupyflash.distributed.asked import PieceCalls
from cupyflash.distributed.communicator import Communicator, Request
from cupyflash.distributed.layout import part_length
from cupyflash.distributed.plan import RingPlan, Step
from cupyflash.distributed.sums import add_state
from cupyflash.merge import merged

Made = TypeVar("Made")


class Buffers:
    """Buffers for one part of each of some tensors, several times: one receives while another is used."""

    def __init__(self, xp: Any, like: Sequence[Any], dtypes: Sequence[Any], lengths: Sequence[int], slots: int) -> None:
        self._shapes, self._lengths = [array.shape for array in like], lengths
        sizes = [math.prod(self._shape(shape, max(lengths))) for shape in self._shapes]
        self._room = [[xp.empty(size, dtype) for size, dtype in zip(sizes, dtypes, strict=True)] for _ in range(slots)]

    @staticmethod
    def _shape(shape: tuple[int, ...], length: int) -> tuple[int, ...]:
        return (*shape[:-2], length, shape[-1])

    def part(self, slot: int, rank: int) -> list[Any]:
        """Contiguous arrays of the shapes that a rank's part has."""
        shapes = [self._shape(shape, self._lengths[rank]) for shape in self._shapes]
        return [room[: math.prod(shape)].reshape(shape) for room, shape in zip(self._room[slot], shapes, strict=True)]


@dataclass
class Ring:
    """A rank's side of one call. `k` and `v` are its own part, contiguous."""

    comm: Communicator
    plan: RingPlan
    calls: PieceCalls
    k: Any
    v: Any
    watch: Watch = field(default_factory=Watch)
    _made: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], Made]) -> Made:
        """The result of the first `make` of this name. The first time comes before the ring begins, while an error is still raised
        on all ranks."""
        if name not in self._made:
            self._made[name] = make()
        found: Made = self._made[name]
        return found

    @cached_property
    def xp(self) -> Any:
        return sys.modules["cupy"] if self.calls.gpu else np

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        return self.plan.steps(self.comm.rank)

    @cached_property
    def lengths(self) -> list[int]:
        """Keys of each rank."""
        return [part_length(part) for part in self.plan.k_parts]

    @cached_property
    def travelling(self) -> Buffers:
        """The buffers for K and V that come from the rank on the left."""
        slots = min(2, len(self.steps) - 1)
        return Buffers(self.xp, (self.k, self.v), (self.k.dtype, self.v.dtype), self.lengths, slots)

    @cached_property
    def gathered(self) -> list[Any]:
        """The arrays for K and V of the whole sequence."""
        return [self.xp.empty((*x.shape[:-2], self.plan.n_k, x.shape[-1]), x.dtype) for x in (self.k, self.v)]

    @cached_property
    def arriving(self) -> dict[int, list[Any]]:
        """The arrays for other ranks' K and V on their way to `gathered`, by rank."""
        like, others = (self.k, self.v), [rank for rank in range(self.comm.size) if rank != self.comm.rank]
        return {rank: Buffers(self.xp, like, [x.dtype for x in like], self.lengths, 1).part(0, rank) for rank in others}

    def ready(self, prepare: Callable[..., None], q: Any) -> None:
        """Make the buffers and prepare the calls of all pieces, so that little is left that can go wrong."""
        if self.plan.gather:
            self.arriving  # noqa: B018
        for number, step in enumerate(self.steps):
            keys = self.gathered if self.plan.gather else self.travelling.part(0, step.source) if number else [self.k, self.v]
            for piece in step.pieces:
                prepare(piece, q, *keys)

    def pass_on(self, number: int, arrays: Sequence[Any], coming: Sequence[Any]) -> Request:
        """Start the exchange from step `number` to the next: send `arrays` to one rank, receive `coming` from another."""
        hop, rank, size = self.plan.shifts[number + 1] - self.plan.shifts[number], self.comm.rank, self.comm.size
        return self.comm.exchange(arrays, (rank + hop) % size, coming, (rank - hop) % size)

    def each_step(self, compute: Callable[[int, Step, Any, Any], None]) -> None:
        """Call `compute` at each step with the K and V that are there, while the next step's come."""
        if self.plan.gather:
            self.gather()
            compute(0, self.steps[0], *self.gathered)
            return
        held = [self.k, self.v]
        for number, step in enumerate(self.steps):
            request = None
            if number + 1 < len(self.steps):
                coming = self.travelling.part(number % 2, self.steps[number + 1].source)
                request = self.pass_on(number, held, coming)
            compute(number, step, *held)
            if request is not None:
                request.wait()
                held = coming

    def gather(self) -> None:
        """K and V of all ranks, each to its positions."""
        own, rank, size = [self.k, self.v], self.comm.rank, self.comm.size
        self.watch.run(lambda: self.put(rank, own))
        under_way = []
        for shift in range(1, size):
            source = (rank - shift) % size
            under_way.append((source, self.comm.exchange(own, (rank + shift) % size, self.arriving[source], source)))
        for source, request in under_way:
            request.wait()
            self.watch.run(lambda source=source: self.put(source, self.arriving[source]))  # type: ignore[misc]

    def put(self, rank: int, arrays: Sequence[Any]) -> None:
        """Put a rank's part of K and V at its place among all keys."""
        start = 0
        for chunk in self.plan.k_parts[rank]:
            for whole, array in zip(self.gathered, arrays, strict=True):
                whole[..., chunk.start : chunk.stop, :] = array[..., start : start + len(chunk), :]
            start += len(chunk)


def row_sums(ring: Ring, q: Any) -> tuple[Any, Any]:
    """O and L of this rank's rows, which have seen nothing yet."""
    xp = ring.xp
    return ring.once(
        "rows",
        lambda: (xp.zeros((*q.shape[:-1], ring.v.shape[-1]), np.float32), xp.full(q.shape[:-1], -np.inf, np.float32)),
    )


def run_forward(ring: Ring, q: Any, sinks: Any | None, shaped: Callable[[Any], Any] = lambda out: out) -> tuple[Any, Any]:
    """O, in q's dtype and made by `shaped`, and L of this rank's rows."""
    xp, watch = ring.xp, ring.watch
    out, lse = row_sums(ring, q)

    def compute(number: int, step: Step, k: Any, v: Any) -> None:
        for piece in step.pieces:
            watch.run(lambda piece=piece: merge(piece, k, v))  # type: ignore[misc]

    def merge(piece: Any, k: Any, v: Any) -> None:
        rows = ring.calls.aligned(piece).rows
        at = slice(rows.start, rows.stop)
        o, own = ring.calls.forward(piece, q, k, v)
        add_state(ring.calls.gpu, out[..., at, :], lse[..., at], o, own)

    ring.each_step(compute)
    if sinks is not None:
        watch.run(lambda: join_sinks(xp, out, lse, sinks))
    return watch.close(ring.comm, lambda: (shaped(out.astype(q.dtype)), lse))


def join_sinks(xp: Any, out: Any, lse: Any, sinks: Any) -> None:
    """Add one more score to each row, without a value, and return O and L with it."""
    column = sinks[:, None] if lse.ndim > 1 else sinks
    nothing = xp.zeros(out.shape, np.float32)
    out[...], lse[...] = merged(xp, out, lse, nothing, xp.broadcast_to(column, lse.shape))
