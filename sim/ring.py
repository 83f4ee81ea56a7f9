"""A ring replayed over simulated ranks, step by step through its plan: what goes over the link, and what its pieces move in HBM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from cupyflash.device import Device
from cupyflash.distributed.layout import part_length
from cupyflash.distributed.plan import Piece, RingPlan
from cupyflash.request.problem import Problem
from cupyflash.schedules import TileSchedule, choose, plan, plan_backward
from cupyflash.sim import theory
from cupyflash.sim.theory.ring import FLOAT32, Carried
from cupyflash.sim.traffic import Traffic

KEYS, GRADIENTS = ("K", "V"), ("dK", "dV")


class Link:
    """A link between simulated ranks that counts bytes by tensor."""

    def __init__(self, ring: RingPlan, problem: Problem, tensors: Iterable[str]) -> None:
        self.sent = {name: np.zeros(ring.ranks, np.int64) for name in tensors}
        self.received = {name: np.zeros(ring.ranks, np.int64) for name in tensors}
        positions = [part_length(part) for part in ring.k_parts]
        shapes = {"K": (problem.head_dim, problem.itemsize), "V": (problem.head_dim_v, problem.itemsize)}
        shapes |= {"dK": (problem.head_dim, FLOAT32), "dV": (problem.head_dim_v, FLOAT32)}
        heads = problem.batch * problem.kv_heads
        self.part_bytes = {name: [heads * n * d * size for n in positions] for name, (d, size) in shapes.items()}

    def send(self, names: Iterable[str], owner: int, rank: int, to: int) -> None:
        """Rank `rank` sends what it has of `owner`'s tensors."""
        for name in names:
            self.sent[name][rank] += self.part_bytes[name][owner]
            self.received[name][to] += self.part_bytes[name][owner]

    def hand_on(self, names: Iterable[str], owners: list[int], distance: int) -> list[int]:
        """Send what each rank has so far on; return whose tensors each rank has then."""
        ranks = len(owners)
        for rank, owner in enumerate(owners):
            self.send(names, owner, rank, (rank + distance) % ranks)
        return [owners[(rank - distance) % ranks] for rank in range(ranks)]

    @property
    def carried(self) -> dict[str, Carried]:
        """The bytes that each rank sent and received, by tensor."""
        return {name: Carried(self.sent[name], self.received[name]) for name in self.sent}


def replay(ring: RingPlan, problem: Problem, *, backward: bool = False) -> dict[str, Carried]:
    """Count what each rank sends and receives as all go through their steps: `problem` is the whole one.

    ValueError if a step needs keys, or gradients, of another rank than it has.
    """
    link = Link(ring, problem, (*KEYS, *GRADIENTS) if backward else KEYS)
    _replay_gathered(link, ring.ranks, backward) if ring.gather else _replay_ring(link, ring, backward)
    return link.carried


def _replay_gathered(link: Link, ranks: int, backward: bool) -> None:
    for rank in range(ranks):
        for other in range(ranks):
            if other != rank:
                link.send(KEYS, rank, rank, other)
                link.send(GRADIENTS if backward else (), other, rank, other)


def _replay_ring(link: Link, ring: RingPlan, backward: bool) -> None:
    steps, own = [ring.steps(rank) for rank in range(ring.ranks)], list(range(ring.ranks))
    keys, sums = own, None  # whose K and V, and whose sums of dK and dV that are under way, each rank has
    for i in range(len(steps[0])):
        if i:
            distance = (keys[0] - steps[0][i].source) % ring.ranks
            keys = link.hand_on(KEYS, keys, distance)
            if backward:  # the first sums are begun where the second step is: an owner's own never leave it
                sums = keys if sums is None else link.hand_on(GRADIENTS, sums, distance)
        wanted = [each[i].source for each in steps]
        if keys != wanted or sums not in (None, wanted):
            raise ValueError(f"step {i} wants keys of ranks {wanted}, there are those of {keys} and gradients of {sums}")
    if sums is not None and link.hand_on(GRADIENTS, sums, sums[0]) != own:
        raise ValueError(f"gradients of ranks {sums} do not come home together")


@dataclass(frozen=True)
class PieceWork:
    """A piece of a ring as a call by itself; many pieces are the same one, however many ranks there are."""

    rows: int
    keys: int
    causal: bool
    window: tuple[int | None, int | None] | None

    @classmethod
    def of(cls, piece: Piece) -> PieceWork:
        return cls(len(piece.rows), len(piece.keys), piece.causal, piece.window)

    def problem(self, whole: Problem) -> Problem:
        """The piece as a problem. Sinks join once, not in each piece."""
        return replace(whole, seqlen_q=self.rows, seqlen_k=self.keys).asking(causal=self.causal, window=self.window, sinks=False)


@lru_cache(maxsize=4096)
def schedule(work: PieceWork, problem: Problem, device: Device, backward: bool = False) -> TileSchedule:
    """The schedule of a piece of a problem, as `attention` runs it by default."""
    own = work.problem(problem)
    if backward:
        return plan_backward(own, device)
    return plan(own, device, choose(own, device).algorithm, lse=True)


@lru_cache(maxsize=4096)
def _traffic(work: PieceWork, problem: Problem, device: Device, backward: bool) -> Traffic:
    return theory.traffic(schedule(work, problem, device, backward))


def hbm_bytes(ring: RingPlan, problem: Problem, device: Device, rank: int, *, backward: bool = False) -> Traffic:
    """The bytes that all pieces of a rank move in its HBM, by the closed forms, without the addition of their results."""
    works = Counter(PieceWork.of(piece) for step in ring.steps(rank) for piece in step.pieces)
    return Traffic.summed((times, _traffic(work, problem, device, backward)) for work, times in works.items())
