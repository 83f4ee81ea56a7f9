"""The clock rate that a chip keeps: what its units take at the boost clock against the power at which the driver lowers it."""

from __future__ import annotations

from collections.abc import Mapping

from .rates import ChipRates

FOLLOWING = {"issue": "issue", "shared memory and L1": "shared", "L2": "l2"}
"""Limits whose watts follow the clock rate, beside tensor cores, and their names in the table."""


def kept(rates: ChipRates, busy: Mapping[str, float], warpgroups: bool) -> float:
    """Returns the share of the boost clock at which units that are busy for these shares of the time take the chip's power; 1 where
    they take less, or the table has no watts for the chip. `warpgroups`: products are wgmma's.

    Watts are those of numbers drawn at random, for a call that is repeated for long; zeros take less, and a short call may be over
    before the driver lowers the rate.
    """
    if "power.idle" not in rates.constants:
        return 1.0
    follows = sum(busy[limit] * rates[f"power.{name}"] for limit, name in FOLLOWING.items())
    follows += busy["tensor"] * rates["power.wgmma" if warpgroups else "power.mma"]
    left = rates["clock.power"] - rates["power.idle"] - busy["DRAM"] * rates["power.dram"]
    return min(1.0, (left / follows) ** (1 / rates["power.exponent"])) if follows > 0 else 1.0
