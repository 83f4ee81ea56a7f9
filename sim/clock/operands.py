"""Operands of machine code as readers of a warp's registers and of constants, and the effect of an instruction on registers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from .lanes import ALWAYS, ZERO, Array, Lanes, Mask, Read, neighbour, pair
from .sass import Instruction

Banks = Mapping[int, bytes]
"""The constant banks of a launch by number."""

REGISTER = re.compile(r"U?R(\d+|Z)$")
PREDICATE = re.compile(r"!?U?P(\d|T)$")
CONSTANT = re.compile(r"cx?\[(\w+)\]\[(?:(U?R\d+|U?RZ)\+?)?(-?0x[0-9a-f]+)?\]$")
SUFFIX = re.compile(r"\.(reuse|64|H0_H0|H1_H1|B\d|S64|U64)\b")


WARP = 32


class UnknownInstruction(ValueError):
    """An instruction that decides an address or a branch and that is not executed here."""


@dataclass(frozen=True)
class OperandWork:
    """The effect of an instruction on registers: `compute` gives the values of `writes` from the state; None makes them unknown.

    `reads` are the registers and predicates that must be known for it.
    """

    writes: tuple[str, ...]
    reads: tuple[str, ...] = ()
    compute: Callable[[Lanes, Mask], Sequence[Array]] | None = None
    across: bool = False  # a lane's result comes from other lanes too
    warps: bool = False  # all lanes of a warp get the first active one's result: the registers are the warp's
    partly: tuple[str, ...] = ()  # predicates that need not be known if the results are alike for both of their values

    def run(self, lanes: Lanes, mask: Mask) -> None:
        if self.compute is None:
            for name in self.writes:
                lanes.forget(name, mask)
            return
        lacks = lanes.lacking(self.reads, mask)
        open_ones = [name for name in dict.fromkeys(self.partly) if lanes.lacking([name], mask) is not None]
        if open_ones:
            self.run_both(lanes, mask, lacks, open_ones)
            return
        if self.warps and mask is not None:
            self.broadcast(lanes, mask, lacks)
            return
        if not (self.across and lacks is not None):
            for name, value in zip(self.writes, self.compute(lanes, mask), strict=True):
                lanes.write(name, value, mask)
            if lacks is None:
                return
        else:
            lacks = mask
        for name in self.writes:
            lanes.forget(name, lacks)

    def run_both(self, lanes: Lanes, mask: Mask, lacks: Array | None, names: Sequence[str]) -> None:
        """Computes with both values of unknown predicates; results that depend on them are unknown."""
        assert self.compute is not None
        found = []
        kept = {name: lanes.predicate(name) for name in names}
        for values in product((lanes.no, lanes.everyone), repeat=len(names)):
            for name, value in zip(names, values, strict=True):
                lanes.predicates[name] = np.where(lanes.unknown[name], value, kept[name])
            found.append(self.compute(lanes, mask))
        lanes.predicates.update(kept)
        for name, first, *others in zip(self.writes, *found, strict=True):
            differ = np.logical_or.reduce([first != other for other in others])
            lanes.write(name, first, mask)
            lanes.forget(name, differ if mask is None else differ & mask)
            if lacks is not None:
                lanes.forget(name, lacks)

    def broadcast(self, lanes: Lanes, mask: Array, lacks: Array | None) -> None:
        assert self.compute is not None
        rows = mask.reshape(-1, WARP)
        first = np.arange(len(rows)) * WARP + rows.argmax(axis=1)
        whole = np.repeat(rows.any(axis=1), WARP)
        for name, value in zip(self.writes, self.compute(lanes, mask), strict=True):
            lanes.write(name, np.repeat(value[first], WARP), whole)
            if lacks is not None:
                lanes.forget(name, np.repeat(lacks[first], WARP) & whole)


class Operands:
    """An instruction's operands as readers of the state and of constants; what has been read is in `reads`."""

    def __init__(self, instruction: Instruction, banks: Banks) -> None:
        self.rest = list(instruction.operands)
        self.banks = banks
        self.reads: list[str] = []

    def take(self) -> str:
        if not self.rest:
            raise UnknownInstruction("an operand is missing")
        return self.rest.pop(0)

    def results(self) -> list[str]:
        """Takes the predicates in front that are results."""
        found = []
        while self.rest and PREDICATE.match(self.rest[0]):
            found.append(self.take())
        return found

    def predicate(self) -> Read:
        return self.predicate_of(self.take()) if self.rest else self.predicate_of("PT")

    def predicate_of(self, text: str) -> Read:
        name = text.lstrip("!")
        if not PREDICATE.match(text):
            raise UnknownInstruction(f"{text} is no predicate")
        if name not in ALWAYS:
            self.reads.append(name)
        return lambda lanes: lanes.condition(text)

    def number(self) -> Read:
        """Takes an operand of 32 bits."""
        return self.number_of(self.take())

    def number_of(self, text: str) -> Read:
        text = SUFFIX.sub("", text)
        if text.startswith("-") and not text.startswith("-0x"):
            inner = self.number_of(text[1:])
            return lambda lanes: np.uint32(0) - inner(lanes)
        if text.startswith("~"):
            inner = self.number_of(text[1:])
            return lambda lanes: ~inner(lanes)
        if text.startswith("|"):
            inner = self.number_of(text.strip("|"))
            return lambda lanes: np.abs(inner(lanes).view(np.int32)).view(np.uint32)
        if text in ZERO:
            return lambda lanes: lanes.zero
        if REGISTER.match(text):
            self.reads.append(text)
            return lambda lanes: lanes.register(text)
        if constant := CONSTANT.match(text):
            return self.constant(constant, 4)
        return self.literal(text, 4)

    def real(self) -> Read:
        """Takes an operand as a float32."""
        return self.real_of(SUFFIX.sub("", self.take()))

    def real_of(self, text: str) -> Read:
        if text.startswith("|"):
            inner = self.real_of(text.strip("|"))
            return lambda lanes: np.abs(inner(lanes))
        try:
            value = np.float32(text.replace("+", "").replace("QNAN", "nan"))
            return lambda lanes: np.full(lanes.threads, value)
        except ValueError:
            pass
        if text.startswith("-"):
            inner = self.real_of(text[1:])
            return lambda lanes: -inner(lanes)
        bits = self.number_of(text)
        return lambda lanes: bits(lanes).view(np.float32)

    def literal(self, text: str, size: int) -> Read:
        if not re.fullmatch(r"-?0x[0-9a-f]+|-?\d+", text):
            raise UnknownInstruction(f"{text} is no whole number")
        value = int(text, 0) % (1 << 8 * size)
        return lambda lanes: lanes.constant(value, size)

    def wide(self) -> Read:
        """Takes an operand of 64 bits: a register and the one behind it, a constant, or a number, sign-extended."""
        text = SUFFIX.sub("", self.take())
        if text.startswith("-") and not text.startswith("-0x"):
            self.rest.insert(0, text[1:])
            inner = self.wide()
            return lambda lanes: np.uint64(0) - inner(lanes)
        if text in ZERO:
            return lambda lanes: lanes.zero.astype(np.uint64)
        if REGISTER.match(text):
            self.reads += [text, neighbour(text)]
            return lambda lanes: pair(lanes, text)
        if constant := CONSTANT.match(text):
            return self.constant(constant, 8)
        return self.literal(text, 8)

    def constant(self, found: re.Match[str], size: int) -> Read:
        bank, index, offset = found[1], found[2], int(found[3] or "0", 0)
        data = self.banks.get(int(bank, 0)) if bank.startswith("0x") else None
        if data is None or index not in (None, *ZERO):
            raise UnknownInstruction(f"the constant {found[0]} is not known")
        value = int.from_bytes((data + bytes(size))[offset : offset + size], "little")
        return lambda lanes: lanes.constant(value, size)

    def indexed(self, bank: str, index: str, offset: int) -> Read:
        """Reads a constant of 32 bits at a register's address, as tables of jumps are; zero behind the bank's end."""
        data = self.banks.get(int(bank, 0)) if bank.startswith("0x") else None
        if data is None:
            raise UnknownInstruction(f"the constant bank {bank} is not known")
        at = self.number_of(index)
        words = np.frombuffer(data + bytes(-len(data) % 4 + 4), np.uint32)
        return lambda lanes: words[np.minimum((at(lanes) + np.uint32(offset % (1 << 32))) // 4, len(words) - 1)]


def signed(value: Array) -> Array:
    return np.ascontiguousarray(value).view(f"i{value.itemsize}")


def is_unsigned(instruction: Instruction) -> bool:
    return "U32" in instruction.modifiers or "U64" in instruction.modifiers


def extended(value: Array, unsigned: bool) -> Array:
    """Returns 32 bits as 64."""
    return value.astype(np.uint64) if unsigned else signed(value).astype(np.int64).view(np.uint64)
