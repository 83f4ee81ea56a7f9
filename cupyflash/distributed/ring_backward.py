"""Gradients over ranks: dK and dV follow K and V round the ring, in float32, and end with their owner; dQ stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from cupyflash.arrays import of_heads
from cupyflash.basics import Values
from cupyflash.distributed.communicator import Request
from cupyflash.distributed.plan import RingStep
from cupyflash.distributed.ring import Buffers, RingSide


class KeySums:
    """dK and dV of the keys that are there, on their way round.

    A rank keeps the results for its own keys at the first step; from the second step on the sums of others arrive, and are passed
    on.
    """

    def __init__(self, ring: RingSide) -> None:
        self.ring = ring
        self.own = [ring.xp.zeros(x.shape, np.float32) for x in (ring.k, ring.v)]
        self.travelling = Buffers(ring, np.float32, 2 if len(ring.steps) > 1 else 0)
        self.request: Request | None = None
        self.held: Sequence[Any] = self.own

    def at(self, number: int, source: int) -> Sequence[Any]:
        """The sums to which step `number` adds, once they are there."""
        if number:
            self.held = self.travelling.part(number % 2, source)
            if self.request is None:
                self.ring.watch.run(lambda: [array.fill(0) for array in self.held])
            else:
                self.request.wait()
        return self.held

    def pass_on(self, number: int) -> None:
        """After step `number`: on to the next rank, or home."""
        ring, last = self.ring, len(self.ring.steps) - 1
        if 0 < number < last:
            coming = self.travelling.part((number + 1) % 2, ring.steps[number + 1].source)
            self.request = ring.pass_on(number, self.held, coming)
        elif number:
            home = self.travelling.part((number + 1) % 2, ring.comm.rank)
            ring.exchange(-ring.plan.shifts[-1], self.held, home).wait()
            ring.watch.run(partial(add, self.own, home))


class GatheredSums:
    """dK and dV of all keys, whose parts go to their owners at the end."""

    def __init__(self, ring: RingSide) -> None:
        self.ring, self.travelling = ring, Buffers(ring, np.float32, 2)
        self.held = [ring.xp.zeros(x.shape, np.float32) for x in ring.gathered]
        self.own = [ring.xp.empty(x.shape, np.float32) for x in (ring.k, ring.v)]

    def at(self, number: int, source: int) -> Sequence[Any]:
        return self.held

    def pass_on(self, number: int) -> None:
        ring, rank, size = self.ring, self.ring.comm.rank, self.ring.comm.size
        ring.watch.run(partial(self.take, rank, self.own))
        coming = self.travelling.part(0, rank)
        for shift in range(1, size):
            to = (rank + shift) % size
            going = self.travelling.part(1, to)
            ring.watch.run(partial(self.take, to, going))
            ring.exchange(shift, going, coming).wait()
            ring.watch.run(partial(add, self.own, coming))

    def take(self, rank: int, arrays: Sequence[Any]) -> None:
        """Copy what belongs to a rank's part."""
        for whole, part in self.ring.chunks(rank, self.held, arrays):
            part[...] = whole


def add(sums: Sequence[Any], more: Sequence[Any]) -> None:
    """Add each of `more`, of any type, to its sum in float32, in place."""
    for array, other in zip(sums, more, strict=True):
        array += other.astype(np.float32, copy=False)


class BackwardPass:
    """dQ of a rank's rows and dK and dV of its keys, in float32, which are 0 yet. `rows` are its q, dout, out and lse."""

    def __init__(self, ring: RingSide, rows: Values) -> None:
        """Do all that can go wrong before the ring begins."""
        self.ring, self.rows = ring, rows
        ring.ready(ring.calls.prepare_backward, rows)
        self.dq = ring.xp.zeros(rows["q"].shape, np.float32)
        self.of_keys: KeySums | GatheredSums = GatheredSums(ring) if ring.plan.gather else KeySums(ring)

    def run(self, sinks: Any | None, shaped: Callable[[Any], Any] = lambda gradient: gradient) -> tuple[Any, ...]:
        """dQ, dK and dV, in their dtypes and `shaped` as they are returned; with sinks what the rows give of their gradient."""
        ring, rows = self.ring, self.rows

        def gradients() -> tuple[Any, ...]:
            typed = self.dq.astype(rows["q"].dtype), *(x.astype(ring.k.dtype) for x in self.of_keys.own)
            return *map(shaped, typed), *(() if sinks is None else (of_sinks(ring.xp, rows, sinks),))

        ring.each_step(self.compute)
        return ring.watch.close(ring.comm, gradients)

    def compute(self, number: int, step: RingStep, k: Any, v: Any) -> None:
        calls, watch = self.ring.calls, self.ring.watch
        made: list[Any] = []
        for piece in step.pieces:
            watch.run(lambda piece=piece: made.append((calls.aligned(piece), calls.backward(piece, self.rows, k, v))))  # type: ignore[misc]
        held = self.of_keys.at(number, step.source)
        for piece, gradients in made:
            watch.run(partial(self.place, piece, gradients, held))
        self.of_keys.pass_on(number)

    def place(self, piece: Any, gradients: Sequence[Any], held: Sequence[Any]) -> None:
        at, keys = slice(piece.rows.start, piece.rows.stop), slice(piece.keys.start, piece.keys.stop)
        add((self.dq[..., at, :], *(x[..., keys, :] for x in held)), gradients)


def of_sinks(xp: Any, rows: Values, sinks: Any) -> Any:
    """The share of this rank's rows: a sink's weight in a row, times what its value, 0, lacks against the row's O."""
    products = (rows["dout"].astype(np.float32) * rows["out"].astype(np.float32)).sum(axis=-1)
    column = sinks[:, None] if products.ndim > 1 else sinks
    weights = xp.exp(xp.where(xp.isneginf(rows["lse"]), np.float32(-np.inf), column - rows["lse"]))
    return of_heads(-weights * products)
