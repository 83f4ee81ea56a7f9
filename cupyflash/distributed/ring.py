"""The ring itself: K and V of the next step travel while this one computes, and the results are summed in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from cupyflash.basics import Shape, Values
from cupyflash.distributed.agreement import Watch
from cupyflash.distributed.asked import PieceCalls
from cupyflash.distributed.communicator import Communicator, Request
from cupyflash.distributed.layout import part_length, placed
from cupyflash.distributed.plan import RingPlan, RingStep
from cupyflash.distributed.streams import array_module
from cupyflash.distributed.sums import add_state
from cupyflash.merge import merged


class Buffers:
    """Buffers for a part like K's and one like V's, of a dtype, several times: one receives while another is used."""

    def __init__(self, ring: RingSide, dtype: Any, slots: int) -> None:
        self._shapes, self._lengths = [array.shape for array in (ring.k, ring.v)], ring.lengths
        sizes = [math.prod(self._shape(shape, max(ring.lengths))) for shape in self._shapes]
        self._room = [[ring.xp.empty(size, dtype) for size in sizes] for _ in range(slots)]

    @staticmethod
    def _shape(shape: Shape, length: int) -> Shape:
        return (*shape[:-2], length, shape[-1])

    def part(self, slot: int, rank: int) -> list[Any]:
        """Contiguous arrays of the shapes that a rank's part has."""
        shapes = [self._shape(shape, self._lengths[rank]) for shape in self._shapes]
        return [room[: math.prod(shape)].reshape(shape) for room, shape in zip(self._room[slot], shapes, strict=True)]


@dataclass
class RingSide:
    """A rank's side of one call. `k` and `v` are its own part, contiguous."""

    comm: Communicator
    plan: RingPlan
    calls: PieceCalls
    k: Any
    v: Any
    watch: Watch = field(default_factory=Watch)

    @cached_property
    def xp(self) -> Any:
        return array_module(self.calls.gpu)

    @cached_property
    def steps(self) -> tuple[RingStep, ...]:
        return self.plan.steps(self.comm.rank)

    @cached_property
    def lengths(self) -> list[int]:
        """The number of keys of each rank."""
        return [part_length(part) for part in self.plan.k_parts]

    @cached_property
    def travelling(self) -> Buffers:
        """The buffers for K and V that come from the rank on the left."""
        return Buffers(self, self.k.dtype, min(2, len(self.steps) - 1))

    @cached_property
    def gathered(self) -> list[Any]:
        """The arrays for K and V of the whole sequence."""
        return [self.xp.empty((*x.shape[:-2], self.plan.n_k, x.shape[-1]), x.dtype) for x in (self.k, self.v)]

    @cached_property
    def arriving(self) -> dict[int, list[Any]]:
        """The buffers for gathered K and V, by rank."""
        return {rank: Buffers(self, self.k.dtype, 1).part(0, rank) for rank in range(self.comm.size) if rank != self.comm.rank}

    def ready(self, prepare: Callable[..., None], q: Any) -> None:
        """Make the buffers and prepare the calls of all pieces, so that little is left that can go wrong."""
        if self.plan.gather:
            self.arriving  # noqa: B018
        for number, step in enumerate(self.steps):
            keys = self.gathered if self.plan.gather else self.travelling.part(0, step.source) if number else [self.k, self.v]
            for piece in step.pieces:
                prepare(piece, q, *keys)

    def pass_on(self, number: int, arrays: Sequence[Any], coming: Sequence[Any]) -> Request:
        """Begin the exchange after step `number`: what this rank holds goes to one rank, what it needs comes from another."""
        return self.exchange(self.plan.shifts[number + 1] - self.plan.shifts[number], arrays, coming)

    def exchange(self, hop: int, arrays: Sequence[Any], coming: Sequence[Any]) -> Request:
        """Begin to send arrays to the rank `hop` ranks on, while others come from the rank as many before."""
        rank, size = self.comm.rank, self.comm.size
        return self.comm.exchange(arrays, (rank + hop) % size, coming, (rank - hop) % size)

    def each_step(self, compute: Callable[[int, RingStep, Any, Any], None]) -> None:
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
        self.watch.run(partial(self.put, rank, own))
        sources = [(rank - shift) % size for shift in range(1, size)]
        under_way = [self.exchange(shift, own, self.arriving[source]) for shift, source in enumerate(sources, 1)]
        for source, request in zip(sources, under_way, strict=True):
            request.wait()
            self.watch.run(partial(self.put, source, self.arriving[source]))

    def put(self, rank: int, arrays: Sequence[Any]) -> None:
        """A rank's part of K and V to where it belongs among all keys."""
        for whole, part in self.chunks(rank, self.gathered, arrays):
            whole[...] = part

    def chunks(self, rank: int, wholes: Sequence[Any], parts: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Views of the chunks of a rank's part, in arrays of all keys and in arrays of the part."""
        for chunk in placed(self.plan.k_parts[rank]):
            for whole, part in zip(wholes, parts, strict=True):
                yield whole[..., chunk.there, :], part[..., chunk.here, :]


class ForwardPass:
    """O and L of a rank's rows, in float32, which have seen nothing yet."""

    def __init__(self, ring: RingSide, rows: Values) -> None:
        """Do all that can go wrong before the ring begins."""
        self.ring, self.q = ring, rows["q"]
        ring.ready(ring.calls.prepare_forward, self.q)
        self.out = ring.xp.zeros((*self.q.shape[:-1], ring.v.shape[-1]), np.float32)
        self.lse = ring.xp.full(self.q.shape[:-1], -np.inf, np.float32)

    def run(self, sinks: Any | None, shaped: Callable[[Any], Any] = lambda out: out) -> tuple[Any, Any]:
        """O, in q's dtype and `shaped` as it is returned, and L."""
        ring = self.ring
        ring.each_step(self.compute)
        if sinks is not None:
            ring.watch.run(lambda: join_sinks(ring.xp, self.out, self.lse, sinks))
        return ring.watch.close(ring.comm, lambda: (shaped(self.out.astype(self.q.dtype)), self.lse))

    def compute(self, number: int, step: RingStep, k: Any, v: Any) -> None:
        for piece in step.pieces:
            self.ring.watch.run(partial(self.merge, piece, k, v))

    def merge(self, piece: Any, k: Any, v: Any) -> None:
        calls = self.ring.calls
        rows = calls.aligned(piece).rows
        at = slice(rows.start, rows.stop)
        add_state(calls.gpu, self.out[..., at, :], self.lse[..., at], *calls.forward(piece, self.q, k, v))


def join_sinks(xp: Any, out: Any, lse: Any, sinks: Any) -> None:
    """Add one more score to each row, without a value, and return O and L with it."""
    column = sinks[:, None] if lse.ndim > 1 else sinks
    nothing = xp.zeros(out.shape, np.float32)
    out[...], lse[...] = merged(xp, out, lse, nothing, xp.broadcast_to(column, lse.shape))
