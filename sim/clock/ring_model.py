"""A model of a ring, from the planner's formulas for its pieces and a link's bandwidth: time, memory, how well transfers hide.

Nothing is measured. A step's products take the time of the planner's formulas for its pieces: a ring of some ranks has several
shapes of pieces, and the clock would take up to a minute for each. Summing their results takes its bytes at the memory's bandwidth.
A transfer takes its bytes at the link's, in each direction, for the rank that sends or receives most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np

from cupyflash.device import Device
from cupyflash.distributed.layout import part_length
from cupyflash.distributed.plan import RingPlan, RingStep, plan_ring
from cupyflash.distributed.positions import by_position
from cupyflash.multiprocessor import clock_rate
from cupyflash.request.options import require_taken
from cupyflash.request.problem import Problem
from cupyflash.schedules import choose, decode_tiles, formulas
from cupyflash.sim.clock.known import PLANNER, KnownError, own_error
from cupyflash.sim.ring import PieceWork, hbm_bytes
from cupyflash.sim.theory.forward import add_state_traffic
from cupyflash.sim.theory.ring import FLOAT32, link_bytes, row_elements, scores
from cupyflash.sim.traffic import Traffic


def ring_of(problem: Problem, ranks: int, layout: str = "zigzag", gather: bool = False) -> RingPlan:
    """The plan of a problem over `ranks` ranks. ValueError for options that `ring_attention` does not have."""
    asked = problem.options
    require_taken(asked, "ring_attention")
    placed = asked.dropout or by_position(asked.score) or by_position(asked.mask_function)
    return plan_ring(problem.seqlen_q, problem.seqlen_k, ranks, layout, asked.causal, asked.window, gather, placed)


@lru_cache(maxsize=4096)
def seconds(problem: Problem, device: Device, backward: bool) -> float:
    """The seconds that the planner's formulas give one call on one device."""
    p = problem
    if not (p.head_count and p.seqlen_q and p.seqlen_k):
        return 0.0
    if backward:
        return formulas.backward_seconds(p, device)
    return formulas.clocks(p, device, choose(p, device).algorithm) / clock_rate(device)


# Rows of a step than which no longer one is faster.
LONG = 1 << 16


class StepTime(NamedTuple):
    """Seconds of one step: of its products, of adding them to the sums, and of its transfers."""

    products: float
    sums: float
    transfer: float

    @property
    def seconds(self) -> float:
        return max(self.products + self.sums, self.transfer)


class Hidden(NamedTuple):
    """The length from which transfers hide: while n / P rows compute with the n / P keys that are there, as many keys arrive.

    `carried`: b, transferred bytes of a position. `flops`: f, of a score in all heads. `rate`: F, in a second, of long steps (short
    ones are slower, and may hide transfers at slightly smaller lengths). `share`: w, the visible share of a step's scores. `link`:
    B. b (n / P) / B <= f w (n / P)^2 / F.
    """

    carried: int
    flops: int
    rate: float
    share: float
    ranks: int
    link: float

    @property
    def length(self) -> float:
        """P b F / (f w B)."""
        return self.ranks * self.carried * self.rate / (self.flops * self.share * self.link)


@dataclass(frozen=True)
class RingModel:
    """A ring on devices with a link of `link` bytes a second each way: `problem` is the whole one."""

    ring: RingPlan
    problem: Problem
    device: Device
    link: float
    backward: bool = False

    @property
    def known(self) -> KnownError:
        """The known error of the formulas for its products."""
        return own_error(PLANNER, "backward" if self.backward else "forward")

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Scores of each rank, of one head."""
        return scores(self.ring)

    @cached_property
    def busiest(self) -> int:
        """The rank with the most scores: the last of several, which adds up most."""
        return max(range(self.ring.ranks), key=lambda rank: (self.work[rank], rank))

    @cached_property
    def balance(self) -> float:
        """The mean rank's scores over the busiest one's."""
        most = self.work[self.busiest]
        return sum(self.work) / (self.ring.ranks * most) if most else 1.0

    @cached_property
    def link_bytes(self) -> tuple[tuple[int, int], ...]:
        """(sent, received) of each rank."""
        every = link_bytes(self.ring, self.problem, backward=self.backward).values()
        sent, received = (np.sum(each, axis=0).tolist() for each in zip(*every, strict=True))
        return tuple(zip(sent, received, strict=True))

    def hbm(self, rank: int) -> Traffic:
        """The bytes that a rank's pieces move in its memory."""
        return hbm_bytes(self.ring, self.problem, self.device, rank, backward=self.backward)

    def position_bytes(self, gradients: bool) -> int:
        """Bytes of K and V of one position, or of their gradients."""
        return sum(row_elements(self.problem).values()) * (FLOAT32 if gradients else self.problem.itemsize)

    def products(self, step: RingStep) -> float:
        """Seconds of a step's pieces."""
        return sum(seconds(PieceWork.of(piece).problem(self.problem), self.device, self.backward) for piece in step.pieces)

    def sum_bytes(self, step: RingStep) -> int:
        """Bytes that adding a step's results to the float32 sums moves: each result once, each sum read and written."""
        p = self.problem
        rows = p.batch * p.heads * sum(len(piece.rows) for piece in step.pieces)
        if not self.backward:
            return add_state_traffic(rows, p.head_dim_v, p.dtype).total_bytes
        keys = p.batch * p.kv_heads * sum(len(piece.keys) for piece in step.pieces)
        return (rows * p.head_dim + keys * (p.head_dim + p.head_dim_v)) * (p.itemsize + 2 * FLOAT32)

    @cached_property
    def timeline(self) -> tuple[StepTime, ...]:
        """The busiest rank's steps.

        While one computes, the next one's K and V come, and the gradients of the step before go on; at the end they go home.
        Gathered keys come before all else, and their gradients go at the end.
        """
        ring, rank = self.ring, self.busiest
        steps = ring.steps(rank)
        lengths = [part_length(part) for part in ring.k_parts]
        keys, gradients = (self.position_bytes(each) / self.link for each in (False, True))
        if ring.gather:
            most = max((ring.ranks - 1) * lengths[rank], ring.n_k - lengths[rank])
            computed = StepTime(self.products(steps[0]), self.sum_bytes(steps[0]) / self._bandwidth, 0.0)
            return (StepTime(0, 0, most * keys), computed, *[StepTime(0, 0, most * gradients)] * self.backward)
        held = [lengths[step.source] for step in steps]
        hops = [max(pair) for pair in pairwise(held)] + [0]
        found = []
        for i, step in enumerate(steps):
            transfer = hops[i] * keys + (hops[i - 1] * gradients if self.backward and i > 1 else 0.0)
            found.append(StepTime(self.products(step), self.sum_bytes(step) / self._bandwidth, transfer))
        if self.backward and len(steps) > 1:
            found.append(StepTime(0, 0, max(held[-1], lengths[rank]) * gradients))
        return tuple(found)

    @property
    def _bandwidth(self) -> float:
        return self.device.hbm_bandwidth or decode_tiles.BANDWIDTH

    @cached_property
    def seconds(self) -> float:
        """The seconds of the busiest rank, for which the others wait."""
        return sum(step.seconds for step in self.timeline)

    @cached_property
    def one_device(self) -> float:
        """Seconds of the whole problem on one device."""
        return seconds(self.problem.asking(sinks=False), self.device, self.backward)

    @cached_property
    def efficiency(self) -> float | None:
        """One device's time over the time of all ranks together, by the models."""
        return self.one_device / (self.ring.ranks * self.seconds) if self.seconds else None

    @cached_property
    def efficiency_by_count(self) -> float | None:
        """The same by work and transfers alone: every score takes as long as on one device, and sums take nothing."""
        all_scores = sum(self.work)
        if not all_scores:
            return None
        each = self.one_device / all_scores
        done = [sum(piece.scores for piece in step.pieces) for step in self.ring.steps(self.busiest)]
        if self.ring.gather:
            done = [0, *done]
        times = zip_longest(done, (step.transfer for step in self.timeline), fillvalue=0)
        return each * all_scores / self.ring.ranks / sum(max(work * each, transfer) for work, transfer in times)

    @cached_property
    def waits(self) -> tuple[float, float]:
        """Seconds in which the busiest rank only waits for transfers: during its steps, and before or after them all."""
        waiting = [(step.products > 0, max(0.0, step.transfer - (step.products + step.sums))) for step in self.timeline]
        return sum(x for computes, x in waiting if computes), sum(x for computes, x in waiting if not computes)

    @cached_property
    def hidden_from(self) -> Hidden | None:
        """The length from which transfers hide behind products. None if there are no transfers, or if length does not matter: all
        keys are gathered before, or a window bounds the work of a row."""
        p, ring, rank = self.problem, self.ring, self.busiest
        steps, bounded = len(ring.shifts), ring.window is not None and None not in ring.window
        if ring.gather or steps == 1 or bounded or not self.work[rank]:
            return None
        flops = (p.backward_flops if self.backward else p.flops) // (p.seqlen_q * p.seqlen_k)  # of a score, all heads
        share = self.work[rank] * ring.ranks / (part_length(ring.q_parts[rank]) * ring.n_k * steps)
        carried = self.position_bytes(False) + (self.position_bytes(True) if self.backward else 0)
        keys = max(1, round(share * LONG))
        alone = seconds(PieceWork(LONG, keys, False, None).problem(p), self.device, self.backward)
        return Hidden(carried, flops, LONG * keys * flops / alone, share, ring.ranks, self.link)

    def memory(self, rank: int) -> dict[str, int]:
        """Bytes of the arrays that a rank has at a time, by kind, without scratch memory of calls."""
        p, ring = self.problem, self.ring
        rows, own = part_length(ring.q_parts[rank]) * p.batch * p.heads, part_length(ring.k_parts[rank])
        longest = max(map(part_length, ring.k_parts))
        keys, gradients = self.position_bytes(False), self.position_bytes(True)
        slots = min(2, len(ring.shifts) - 1)
        size, d, dv = p.itemsize, p.head_dim, p.head_dim_v
        held = {"Q": rows * d * size, "K and V": own * keys, "O and L": rows * (dv * size + FLOAT32)}
        if ring.gather:
            held["gathered K and V"] = ring.n_k * keys + (ring.n_k - own) * keys  # as they come, and in order
        else:
            held["travelling K and V"] = slots * longest * keys
        if not self.backward:
            return held | {"sums of O": rows * dv * FLOAT32}
        held |= {"dO": rows * dv * size, "dQ and its sums": rows * d * (size + FLOAT32), "dK and dV": own * (keys + gradients)}
        of_others = ring.n_k if ring.gather else slots * longest
        return held | {"sums of dK and dV of others": of_others * gradients}
