"""What instructions that move bits about make of bits that nobody wrote, as memcheck of Valgrind follows them.

Such an instruction runs on shadows, words with ones where nobody wrote: shifts, selections of bytes and insertions do to the
shadows what they do to the values. Of `and`, `or`, `xor`, `not` and `lop3` a bit is known where the bits that are known decide it:
what a mask clears is, whatever was there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ..decode.doubtful import copied
from ..decode.registry import Frame, Plan, Thunk
from ..text.syntax import Imm, Instruction
from ..text.types import UNSIGNED, Array

TABLES = {"and": 0b1000, "or": 0b1110, "xor": 0b0110, "not": 0b01}
"""By opcode the result for all values of one bit of each operand, the first operand's the highest: as `lop3` has its tables."""


def on_shadows(plan: Plan, i: Instruction) -> Plan:
    """The plan for shadows in place of the operands that are copied. If it is another one, its reads also end with their values."""
    if i.opcode == "cvt" and "sat" in i.mods:
        return replace(plan, bind=lambda frame, out, ins: partial(spread, out[0], ins[0]))
    table = table_of(i)
    if table is None:
        return plan
    count, reads = len(copied(plan, i)), len(plan.reads)

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        return partial(undecided, table, out[0], ins[:count], ins[reads : reads + count])

    return replace(plan, bind=bind)


def table_of(i: Instruction) -> int | None:
    """What an instruction makes of the bits at one place, if it works on each place alone."""
    if i.opcode == "lop3":
        last = i.operands[-1]
        assert isinstance(last, Imm)
        return last.value & 0xFF
    return TABLES.get(i.opcode)


def undecided(table: int, out: Array, unknown: Sequence[Array], values: Sequence[Array]) -> None:
    """The bits that may come out as either, given what is not known of the values."""
    found: list[Array] = [np.zeros_like(out), np.zeros_like(out)]
    for row in range(1 << len(values)):
        may = ~np.zeros_like(out)
        for k, (blank, value) in enumerate(zip(unknown, values, strict=True)):
            may &= blank | (value if row >> (len(values) - 1 - k) & 1 else ~value)
        found[table >> row & 1] |= may
    np.bitwise_and(found[0], found[1], out=out)


def spread(out: Array, source: Array) -> None:
    """What a conversion that saturates makes of a number of which some bit is not known: none is."""
    unsigned = UNSIGNED[out.itemsize]
    out[...] = np.where(source != 0, np.iinfo(unsigned).max, 0).astype(unsigned).view(out.dtype)
