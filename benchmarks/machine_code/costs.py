"""The cost of one turn of a loop: its instructions by group, the limits, the model's share of the peak and its sensitivity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cupyflash.multiprocessor import PARTITIONS
from machine_code import clocks
from machine_code.clocks import Effort, Residents, Share
from machine_code.flow import Trace
from machine_code.rates import GROUPS, Rates, Unit, group, unit

ROUGH = Effort(seeds=3, turns=8, warm=2)
# What is not the algorithm's: addresses, predicates, moves, branches, barriers.
REST = ("integer", "uniform", "branch", "BAR", "other")


@dataclass(frozen=True)
class Cost:
    """A trace on a multiprocessor's resident blocks."""

    trace: Trace
    rates: Rates
    residents: Residents

    @cached_property
    def counts(self) -> dict[str, int]:
        """Instructions of a warp by group."""
        found = Counter(group(each) for each in self.trace.instructions)
        return {name: found[name] for name in GROUPS}

    @property
    def issued(self) -> int:
        return len(self.trace.instructions)

    @property
    def rest(self) -> float:
        """The fraction of instructions that are addresses, predicates, moves, branches, barriers."""
        return sum(self.counts[name] for name in REST) / self.issued

    @cached_property
    def stalls(self) -> int:
        """Clocks of a warp by itself by its stall counts alone."""
        return sum(max(each.control.stall, 1) for each in self.trace.instructions)

    @cached_property
    def parts(self) -> dict[str, float]:
        """Clocks that a warp's turn takes of each unit of its sub-core; of shared memory as much as if it had a quarter."""
        found = {kind.name.lower(): 0.0 for kind in Unit if kind < Unit.MEMORY}
        for each in self.trace.instructions:
            if unit(each) < Unit.MEMORY:
                found[unit(each).name.lower()] += self.rates.sub_core_clocks(each)
        found["issue"] = float(self.issued)
        found["shared"] = PARTITIONS * sum(self.rates.shared_clocks(each) for each in self.trace.instructions)
        return found

    @property
    def bound(self) -> str:
        """The busiest unit."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def all_overlap(self) -> float:
        """Share of mma.sync's peak if everything overlapped: what the busiest unit leaves."""
        return self.parts["tensor"] / max(self.parts.values())

    @property
    def warps_overlap(self) -> float:
        """The same if a warp's stall counts came one after another, HMMAs at the tensor core's rate, warps beside each other."""
        a_core = self.residents.warps * self.residents.blocks / PARTITIONS
        products = sum(max(each.control.stall, 1) for each in self.trace.instructions if each.opcode == "HMMA")
        alone = max(self.stalls, self.stalls - products + self.parts["tensor"])
        return self.parts["tensor"] * a_core / max(alone, a_core * max(self.parts.values()))

    def share(self, effort: Effort | None = None) -> Share:
        """The clock model's."""
        return clocks.steady(self.trace.instructions, self.rates, self.residents, effort or Effort())

    def sensitivity(self, effort: Effort = ROUGH) -> Mapping[str, tuple[float, ...]]:
        """The model's share with each assumption varied by itself, x 0.7 then x 1.4 (a choice: the other one)."""
        return varied(self.rates, lambda rates: Cost(self.trace, rates, self.residents).share(effort).tensor)


def varied(rates: Rates, figure: Callable[[Rates], float]) -> Mapping[str, tuple[float, ...]]:
    """A figure with each assumption varied by itself."""
    found: dict[str, tuple[float, ...]] = {}
    for name, _, other in rates.variations():
        found[name] = (*found.get(name, ()), figure(other))
    return found


@dataclass(frozen=True)
class Figure:
    """A figure of the model and what it is sensitive to: its value with each assumption varied."""

    value: float
    by: Mapping[str, tuple[float, ...]]

    @property
    def low(self) -> float:
        return min(self.value, *(each for values in self.by.values() for each in values))

    @property
    def high(self) -> float:
        return max(self.value, *(each for values in self.by.values() for each in values))

    @property
    def most(self) -> str:
        """The assumption that moves it furthest."""
        return max(self.by, key=lambda name: max(abs(each - self.value) for each in self.by[name]))

    def over(self, other: Figure) -> Figure:
        """The quotient, each assumption varied in both; where the other one's sensitivity is not known, in this one alone."""
        by = {
            name: tuple(
                value / divisor for value, divisor in zip(values, other.by.get(name, (other.value,) * len(values)), strict=True)
            )
            for name, values in self.by.items()
        }
        return Figure(self.value / other.value, by)

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f}, most by {self.most})" if self.by else f"{self.value:.2f}"

    def record(self) -> dict[str, Any]:
        """The cost for JSON."""
        spread = {"low": round(self.low, 4), "high": round(self.high, 4)} if self.by else {}
        return {
            "value": round(self.value, 4),
            **spread,
            "varied": {name: [round(each, 4) for each in values] for name, values in self.by.items()},
        }


def lines(cost: Cost) -> Iterator[str]:
    """Counts and bounds, for a reader."""
    products = cost.counts["HMMA"]
    each = (
        f"{products} HMMA, {cost.issued / products:.2f} instructions and {cost.stalls / products:.1f} stalls each"
        if products
        else "no HMMA"
    )
    yield f"a turn: {cost.issued} instructions, {each}, {cost.rest:.0%} rest"
    per = f"{'a HMMA' if products else 'in all'}: "
    yield per + ", ".join(
        f"{name} {number / (products or 1):.2f}" for name, number in cost.counts.items() if number and name != "HMMA"
    )
    yield "clocks of a warp: " + ", ".join(f"{name} {value:,.0f}" for name, value in cost.parts.items() if value)
