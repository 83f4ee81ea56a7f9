"""The constants of a device's clock: cupyflash/rates.toml, each with its source, looked up by group and name."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from cupyflash.device import Device

ASSUMED = "assumed"


@dataclass(frozen=True)
class Constant:
    """A value and where it was read; one that a compute capability takes from another is assumed."""

    value: float
    source: str

    @property
    def assumed(self) -> bool:
        return self.source.startswith(ASSUMED)


@dataclass(frozen=True)
class ChipRates:
    """The constants of a device: `rates["latency.fma"]` is a number, yes is 1."""

    device: Device
    constants: Mapping[str, Constant]

    @classmethod
    def of(cls, device: Device) -> ChipRates:
        """Looks up each constant: the device's own, its compute capability's, every one's, that of the capability it is like; an
        optional one only where the device or its capability has it.

        A device that CUDA names has those of the catalogue's of that name. ValueError if the table does not know the compute
        capability or lacks a constant for it.
        """
        table, chip, capability = _table(), catalogue_name(device.name), ".".join(map(str, device.compute_capability))
        if capability not in table:
            known = ", ".join(name for name in table if name[0].isdigit())
            raise ValueError(f"compute_capability = {capability}: rates are known for {known}")
        constants = {}
        for group, names in table["meanings"].items():
            for name, meaning in names.items():
                own = any(name in table.get(place, {}).get(group, {}) for place in (chip, capability))
                if capability in meaning.get("only", [capability]) and (own or not meaning.get("optional")):
                    constants[f"{group}.{name}"] = _constant(table, chip, capability, group, name)
        return cls(device, constants)

    def __getitem__(self, name: str) -> float:
        return self.constants[name].value

    def slower(self, factor: float) -> ChipRates:
        """Returns the rates with every assumed latency, a block's start among them, multiplied."""
        constants = dict(self.constants)
        for name, each in self.constants.items():
            if each.assumed and (name == "launch.start" or name.startswith("latency.") or name.endswith("latency")):
                constants[name] = Constant(each.value * factor, each.source)
        return ChipRates(self.device, constants)

    def apart(self, factor: float) -> ChipRates:
        """Returns the rates with other clocks between the launches of two blocks."""
        block = self.constants["launch.block"]
        return ChipRates(self.device, {**self.constants, "launch.block": Constant(block.value * factor, block.source)})


def catalogue_name(name: str) -> str:
    """The catalogue's name of a device that may have CUDA's; the same name where the catalogue has no such device."""
    try:
        return Device.named(name).name
    except (OSError, ValueError):
        return name


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads(resources.files("cupyflash").joinpath("rates.toml").read_text())


def _constant(table: Mapping[str, Any], device: str, capability: str, group: str, name: str) -> Constant:
    for place in (device, capability, "every"):
        found = table.get(place, {}).get(group, {}).get(name)
        if found is not None:
            return Constant(float(found["value"]), found["source"])
    like = table[capability].get("like")
    if like is None:
        raise ValueError(f"{group}.{name}: no value for {device} of compute capability {capability}")
    found = _constant(table, device, like, group, name)
    return Constant(found.value, f"{ASSUMED}: as {like}, {found.source}")
