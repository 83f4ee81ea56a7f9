"""The barrier of a cluster (PTX ISA, "barrier.cluster"): all its threads arrive, which does not block, and wait.

A phase is complete when all threads of the cluster that have not exited have arrived. Nobody can arrive at the next phase
before it has waited for this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..decode.registry import ClusterBarrier
from ..order.order import Released, highest
from ..report.findings import Stuck, crowd
from ..state.lanes import WARP, Lanes
from ..text.types import Array
from .host import Host

ALL = np.zeros(1, np.int64)
"""Lanes as one group: where it begins."""


@dataclass
class Told:
    """What the arrivals of a phase hand on: those of whole warps, and of the other lanes the moments (`order.order`)."""

    warps: list[Released] = field(default_factory=list)
    lanes: Array | None = None
    relaxed: bool = False
    split: bool = False
    """Somebody may have done something between its arrival and its wait."""


@dataclass
class Phases:
    """The barrier of one cluster: how many phases are complete, what this one's arrivals and the last one's released."""

    completed: int = 0
    told: Told = field(default_factory=Told)
    heard: Told = field(default_factory=Told)


class ClusterBarriers:
    """The barriers of the clusters of a wave."""

    def __init__(self, machine: Host):
        self.machine = machine
        wave = machine.wave
        self.per = wave.cluster * wave.lanes_per_block
        self.phases: dict[int, Phases] = {}
        self.owed = np.full(wave.size, -1, np.int64)
        """The phase that each lane has arrived at and not yet waited for."""
        self.waiting: list[tuple[int, Lanes]] = []

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def come(self, pc: int, control: ClusterBarrier, lanes: Lanes) -> None:
        clusters = lanes.index // self.per
        for cluster in np.unique(clusters).tolist():
            some = lanes.subset(np.flatnonzero(clusters == cluster))
            phases = self.phases.setdefault(cluster, Phases())
            arrived = self.owed[some.index] >= 0
            wrong = arrived != control.waits
            if wrong.any():
                self.complain(pc, some, wrong, control.waits)
            if not wrong.all():
                right = some.subset(np.flatnonzero(~wrong))
                if control.waits:
                    self.wait(pc, phases, right)
                else:
                    self.arrive(pc, phases, right, control.relaxed)
                    self.check(cluster)
        if not control.waits:
            self.machine.push(pc + 1, lanes)

    def complain(self, pc: int, lanes: Lanes, wrong: Array, waits: bool) -> None:
        """Threads that wait without having arrived go on at once; an arrival that is one too many is not counted."""
        machine = self.machine
        message = (
            "wait at the barrier of the cluster without an arrival before"
            if waits
            else ("second arrival at the barrier of the cluster without a wait for the first")
        )
        i, first = machine.code.instructions[pc], int(np.flatnonzero(wrong)[0])
        machine.memory.findings.report("cluster barrier", message, i, lanes, first, count=int(wrong.sum()))
        if waits:
            machine.push(pc + 1, lanes.subset(np.flatnonzero(wrong)))

    def arrive(self, pc: int, phases: Phases, lanes: Lanes, relaxed: bool) -> None:
        self.owed[lanes.index] = phases.completed
        if self.machine.diary is not None:
            self.machine.diary.came("cluster", phases.completed, lanes, pc)
        if not relaxed:
            # A release for the cluster, so no less than fence.mbarrier_init.
            self.machine.mbarriers.fence(lanes)
        races, told, code = self.machine.memory.races, phases.told, self.machine.code
        if races is None:
            return
        then = code.plans[pc + 1].control if code.instructions[pc + 1].predicate is None else None
        told.split |= not (isinstance(then, ClusterBarrier) and then.waits)
        if not relaxed and lanes.converged:
            told.warps.append(races.arrive(races.heard.groups(lanes, ALL)))
            return
        told.relaxed |= relaxed
        released = races.fenced(lanes) if relaxed else races.heard.released(lanes)
        told.lanes = released if told.lanes is None else np.maximum(told.lanes, released)

    def wait(self, pc: int, phases: Phases, lanes: Lanes) -> None:
        over = self.owed[lanes.index] < phases.completed
        if over.any():
            self.go(pc, phases, lanes.subset(np.flatnonzero(over)))
        if not over.all():
            self.waiting.append((pc, lanes.subset(np.flatnonzero(~over))))

    def go(self, pc: int, phases: Phases, lanes: Lanes) -> None:
        """The phase that these lanes wait for is over."""
        self.owed[lanes.index] = -1
        if self.machine.diary is not None:
            self.machine.diary.met("cluster", phases.completed - 1, [(lanes, pc)], self.machine.wave.cluster > 1)
        races, heard = self.machine.memory.races, phases.heard
        if races is not None:
            # Whatever is ordered or not: all threads of the cluster have begun.
            begun = np.full((1, races.warps), races.start)
            moments = [*heard.warps, Released(begun, None)]
            if lanes.converged:
                races.depart(races.heard.groups(lanes, ALL), moments)
            else:
                races.heard.hear(lanes, np.repeat(highest([each.moments[0] for each in moments]), WARP))
                for each in heard.warps:
                    if each.rows is not None:
                        races.heard.hear(lanes, each.rows[0])
                    if each.fenced is not None and races.proxy is not None:
                        races.proxy.hear(lanes, each.fenced[0])
            if heard.lanes is not None:
                races.heard.hear(lanes, heard.lanes)
        self.machine.push(pc + 1, lanes)

    def missing(self, cluster: int) -> Array:
        """Which lanes of the cluster the phase still waits for."""
        part = slice(cluster * self.per, (cluster + 1) * self.per)
        found: Array = self.machine.wave.alive[part] & (self.owed[part] != self.phases[cluster].completed)
        return found

    def check(self, cluster: int) -> None:
        phases = self.phases[cluster]
        if self.missing(cluster).any():
            return
        phases.completed += 1
        phases.heard, phases.told = phases.told, Told()
        races = self.machine.memory.races
        if races is not None:
            races.cluster_barrier(cluster, phases.heard.relaxed, phases.heard.split)
        ready = [one for one in self.waiting if int(one[1].index[0]) // self.per == cluster]
        self.waiting = [one for one in self.waiting if int(one[1].index[0]) // self.per != cluster]
        for pc, lanes in ready:
            self.go(pc, phases, lanes)

    def recheck(self) -> None:
        """Threads have exited: phases that somebody waits for may be complete without them."""
        for cluster in {int(lanes.index[0]) // self.per for _, lanes in self.waiting}:
            self.check(cluster)

    def stuck(self) -> list[Stuck]:
        out = []
        for pc, lanes in self.waiting:
            cluster = int(lanes.index[0]) // self.per
            missing = self.machine.wave.lanes(np.flatnonzero(self.missing(cluster)) + cluster * self.per)
            what = f"at the barrier of the cluster, at which {crowd(missing)} have not arrived"
            out.append(Stuck(self.machine.code.instructions[pc], lanes, what))
        return out
