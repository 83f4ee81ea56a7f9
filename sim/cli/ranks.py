"""The request of attention over several devices, which `predict` and `sweep` share."""

from __future__ import annotations

from dataclasses import dataclass

import click

from cupyflash.request.options import not_taken
from cupyflash.sim.cli.options import first_given
from cupyflash.sim.cli.request import ProblemRequest
from cupyflash.sim.clock.ring_model import RingModel, ring_of

# Of the options of a problem, what attention over ranks has not; and what is for it alone.
NOT_OVER_RANKS = ("algorithm", "tiling", "lse", "deterministic", "decode", *not_taken("ring_attention"))
RANKS_ONLY = ("link", "layout", "gather_kv")


@dataclass(frozen=True)
class Split:
    """The split of a sequence over ranks, and the link between them."""

    link: float
    layout: str
    gather_kv: bool

    def model(self, request: ProblemRequest, ranks: int, gather: bool | None = None) -> RingModel:
        """The model of a request over so many ranks."""
        ring = ring_of(request.problem, ranks, self.layout, self.gather_kv if gather is None else gather)
        return RingModel(ring, request.problem, request.device, self.link, request.backward)


def require_over_ranks(option: str) -> None:
    """UsageError for options that cannot be combined with --ranks, or --over ranks."""
    if other := first_given(NOT_OVER_RANKS):
        why = ": each rank's calls are planned as `attention` plans them" if other in ("--algorithm", "--tiling", "--lse") else ""
        raise click.UsageError(f"{other} cannot go with {option}{why}")


def refuse_without_ranks(option: str) -> None:
    """UsageError for options that are for ranks alone."""
    if alone := first_given(RANKS_ONLY):
        raise click.UsageError(f"{alone} is for {option}")
