"""Gradients over ranks: dK and dV follow K and V round the ring, in float32, and end with their owner; dQ stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cupyflash.arrays import of_heads
from cupyflash.distributed.communicator import Request
from cupyflash.distributed.plan import Step
from cupyflash.distributed.ring import Buffers, Ring


class KeySums:
    """dK and dV of the keys that are there, on their way round.

    A rank keeps the results for its own keys at the first step; from the second step on the sums of others arrive, and are passed
    on.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring, like = ring, (ring.k, ring.v)
        self.own = [ring.xp.zeros(x.shape, np.float32) for x in like]
        self.travelling = Buffers(ring.xp, like, (np.float32, np.float32), ring.lengths, 2 if len(ring.steps) > 1 else 0)
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
            shift, rank, size = ring.plan.shifts[-1], ring.comm.rank, ring.comm.size
            home = self.travelling.part((number + 1) % 2, rank)
            ring.comm.exchange(self.held, (rank - shift) % size, home, (rank + shift) % size).wait()
            ring.watch.run(lambda: add(self.own, home))


class GatheredSums:
    """dK and dV of all keys, whose parts go to their owners at the end."""

    def __init__(self, ring: Ring) -> None:
        self.ring, like, types = ring, (ring.k, ring.v), (np.float32, np.float32)
        self.held = [ring.xp.zeros(x.shape, np.float32) for x in ring.gathered]
        self.own = [ring.xp.empty(x.shape, np.float32) for x in like]
        self.travelling = Buffers(ring.xp, like, types, ring.lengths, 2)

    def at(self, number: int, source: int) -> Sequence[Any]:
        return self.held

    def pass_on(self, number: int) -> None:
        ring, rank, size = self.ring, self.ring.comm.rank, self.ring.comm.size
        ring.watch.run(lambda: self.take(rank, self.own))
        coming = self.travelling.part(0, rank)
        for shift in range(1, size):
            to, source = (rank + shift) % size, (rank - shift) % size
            going = self.travelling.part(1, to)
            ring.watch.run(lambda to=to, going=going: self.take(to, going))  # type: ignore[misc]
            ring.comm.exchange(going, to, coming, source).wait()
            ring.watch.run(lambda: add(self.own, coming))

    def take(self, rank: int, part: Sequence[Any]) -> None:
        """Copy the rows of a rank's part into `part`."""
        start = 0
        for chunk in self.ring.plan.k_parts[rank]:
            for array, whole in zip(part, self.held, strict=True):
                array[..., start : start + len(chunk), :] = whole[..., chunk.start : chunk.stop, :]
            start += len(chunk)


def add(sums: Sequence[Any], more: Sequence[Any]) -> None:
    """Add each of `more`, of any type, to its sum in float32, in place."""
    for array, other in zip(sums, more, strict=True):
        array += other.astype(np.float32, copy=False)


def sums(ring: Ring, q: Any) -> tuple[Any, KeySums | GatheredSums]:
    """dQ of this rank's rows, and dK and dV, which are 0 yet."""
    return ring.once(
        "sums", lambda: (ring.xp.zeros(q.shape, np.float32), GatheredSums(ring) if ring.plan.gather else KeySums(ring))
    )


def run_backward(
    ring: Ring, rows: Mapping[str, Any], sinks: Any | None, shaped: Callable[[Any], Any] = lambda gradient: gradient
) -> tuple[Any, ...]:
    """dQ, dK and dV of this rank's parts, in their dtypes and made by `shaped`; with sinks also the part of their gradient from its
    rows."""
    xp, watch = ring.xp, ring.watch
    dq, of_keys = sums(ring, rows["q"])

    def compute(number: int, step: Step, k: Any, v: Any) -> None:
        made: list[Any] = []
        for piece in step.pieces:
            watch.run(lambda piece=piece: made.append((ring.calls.aligned(piece), ring.calls.backward(piece, rows, k, v))))  # type: ignore[misc]
        held = of_keys.at(number, step.source)
        for piece, gradients in made:
            watch.run(lambda piece=piece, gradients=gradients: place(piece, gradients, held))  # type: ignore[misc]
        of_keys.pass_on(number)

    def place(piece: Any, gradients: Sequence[Any], held: Sequence[Any]) -> None:
        at, keys = slice(piece.rows.start, piece.rows.stop), slice(piece.keys.start, piece.keys.stop)
        add((dq[..., at, :], *(x[..., keys, :] for x in held)), gradients)

    def gradients() -> tuple[Any, ...]:
        typed = dq.astype(rows["q"].dtype), *(x.astype(ring.k.dtype) for x in of_keys.own)
        return *map(shaped, typed), *(() if sinks is None else (of_sinks(xp, rows, sinks),))

    ring.each_step(compute)
    return watch.close(ring.comm, gradients)


def of_sinks(xp: Any, rows: Mapping[str, Any], sinks: Any) -> Any:
    """The gradient of sinks from this rank's rows: a sink's weight in a row, times the difference between its value, 0, and the
    row's O."""
    products = (rows["dout"].astype(np.float32) * rows["out"].astype(np.float32)).sum(axis=-1)
    column = sinks[:, None] if products.ndim > 1 else sinks
    weights = xp.exp(xp.where(xp.isneginf(rows["lse"]), np.float32(-np.inf), column - rows["lse"]))
    return of_heads(-weights * products)
