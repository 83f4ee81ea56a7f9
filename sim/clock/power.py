"""The power that a device takes by the shares of time for which its units are busy, and the clock rate that its limit leaves.

Energy a clock goes with the square of the rate, as the voltage goes with the rate; that of DRAM, which has its own clock, does not.
"""

from __future__ import annotations

from collections.abc import Mapping

from cupyflash.device import Device

from .rates import ChipRates

UNITS = {"FMA": "fma", "half": "half", "ALU": "alu", "MUFU": "special", "tensor": "tensor", "shared memory and L1": "shared"}
"""The limits that are units of a multiprocessor, by their constant's name."""
STEPS = 30
"""Halvings of the interval in which the rate lies."""


class Power:
    """The watts of a device. `known`: whether its constants are."""

    def __init__(self, device: Device, rates: ChipRates) -> None:
        self.device, self.rates = device, rates
        self.known = "power.idle" in rates.constants

    def watts(self, busy: Mapping[str, float], at: float, mhz: float) -> float:
        """Returns the watts at a rate where the limits are busy for these shares of the time at the rate `at`: work then takes as
        many clocks, and DRAM is busy for a share that goes with the rate."""
        rates, bandwidth = self.rates, self.device.hbm_bandwidth or 0.0
        units = sum(busy[limit] * rates[f"power.{name}"] for limit, name in UNITS.items()) * self.device.sm_count
        l2 = busy["L2"] * rates["l2.rate"] * rates["power.at"] * 1e6 * rates["power.l2"] * 1e-12
        dram = busy["DRAM"] * mhz / at * bandwidth * rates["dram.read"] * rates["power.dram"] * 1e-12
        return rates["power.idle"] + (units + l2) * (mhz / rates["power.at"]) ** 3 + dram

    def kept(self, busy: Mapping[str, float], mhz: float) -> float:
        """Returns the highest rate up to `mhz` at which the device takes no more than its limit; `busy` as at `mhz`."""
        if self.watts(busy, mhz, mhz) <= self.rates["clock.power"]:
            return mhz
        low, high = 0.0, mhz
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.watts(busy, mhz, middle) <= self.rates["clock.power"] else (low, middle)
        return low
