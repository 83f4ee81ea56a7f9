"""SYNCS, the instruction of mbarriers: setting one up, arriving with bytes to come, asking whether a phase is over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .bulk import first_of_warps
from .lanes import Array, Lanes, neighbour
from .memory import AddressOf, address_of
from .operands import WARP, UnknownInstruction
from .sass import Instruction
from .waits import Key, Signal, Waits

PARITY_AT = 31
"""The bit of a phase's parity, in the operand of a question and in the second word that an arrival returns."""
PARAMETERS = ("A1TR", "A1T0", "A0T1", "A0TR", "A0TX", "ART0")
"""The sources of an arrival's count (A) and bytes (T): 0, 1, a register (R) or a constant (X); A1TR is not written."""


@dataclass(frozen=True)
class SyncWork:
    """A decoded SYNCS. `kind`: EXCH, ARRIVE, PHASECHK, or another one that does nothing here."""

    instruction: Instruction
    kind: str
    address: AddressOf | None
    result: str
    operand: str
    parameter: str

    @classmethod
    def of(cls, i: Instruction) -> SyncWork:
        kind = i.modifiers[0]
        if kind not in ("EXCH", "ARRIVE", "PHASECHK"):
            return cls(i, kind, None, "", "", "")
        at = next(k for k, each in enumerate(i.operands) if "[" in each)
        parameter = next((each for each in i.modifiers if each in PARAMETERS), "A1TR")
        return cls(i, kind, address_of(i, i.operands[at]), i.operands[0], i.operands[at + 1].removesuffix(".reuse"), parameter)

    @property
    def asks(self) -> bool:
        return self.kind == "PHASECHK"

    def numbers(self, lanes: Lanes, active: Array) -> Array:
        if lanes.lacking([self.operand], active) is not None:
            raise UnknownInstruction(f"{self.instruction}: {self.operand} is unknown")
        return lanes.register(self.operand)

    def run(self, lanes: Lanes, waits: Waits, active: Array) -> tuple[Signal, ...]:
        """Sets up an mbarrier or arrives at some; returns a signal for each warp and mbarrier."""
        if self.address is None or not active.any():
            return ()
        numbers = self.numbers(lanes, active)
        if self.kind == "EXCH":
            one = np.zeros_like(active)
            one[first_of_warps(active)] = True
            addresses = self.address(lanes, one)
            for place, at in waits.places(addresses, one):
                waits.begin(place, int(numbers[at[0]]))
            return ()
        signals = []
        addresses = self.address(lanes, active)
        counts, bytes_ = self.parameter[1], self.parameter[3]
        token = np.zeros(lanes.threads, np.uint32)
        for place, at in waits.places(addresses, active):
            token[at] = (waits.find(place).phase & 1) << PARITY_AT
            given = numbers[at]
            arrivals = int(given.sum()) if counts == "R" else len(at) * int(counts)
            tx = int(given.view(np.int32).sum()) if bytes_ == "R" else 0 if bytes_ == "X" else len(at) * int(bytes_)
            key = waits.arrive(place, arrivals, tx)
            signals += [Signal(warp, key, True, False) for warp in np.unique(at // WARP).tolist()]
        if self.result != "RZ":
            lanes.write(neighbour(self.result), token, active)
        return tuple(signals)

    def ask(self, lanes: Lanes, waits: Waits, active: Array, at: int) -> tuple[Array, tuple[Signal, ...]]:
        """Returns the lanes whose phase is over; the others wait, and come back to this instruction."""
        assert self.address is not None
        parity = self.numbers(lanes, active) >> np.uint32(PARITY_AT)
        on = active.copy()
        signals = []
        for place, which in waits.places(self.address(lanes, active), active):
            key: Key | None = waits.passes(place, int(parity[which[0]]))
            if key is None:
                held = np.zeros_like(active)
                held[which] = True
                on &= ~held
                waits.find(place).waiting.append((at, held))
                continue
            signals += [Signal(warp, key, False, True) for warp in np.unique(which // WARP).tolist()]
        if on.any():
            lanes.write(self.result, lanes.everyone, on)
        return on, tuple(signals)
