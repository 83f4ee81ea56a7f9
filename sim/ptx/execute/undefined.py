"""What instructions that move bits about make of bits that nobody wrote, as memcheck of Valgrind follows them.

Such an instruction runs on shadows, words with ones where nobody wrote: shifts, selections of bytes and insertions do to the
shadows what they do to the values. Of `and`, `or`, `xor`, `not` and `lop3` a bit is known where the bits that are known decide it:
what a mask clears is, whatever was there. Other shadows have ones where there is anything in a bit that somebody wrote: not
where constants have cleared, set or shifted in what is there.
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


def on_shadows(plan: Plan, i: Instruction, written: bool) -> Plan:
    """The plan for shadows in place of the operands that are copied, of what is `written` or of what is not. If it is another plan,
    its reads also end with the values of these operands."""
    if i.opcode == "cvt" and "sat" in i.mods:
        return replace(plan, bind=lambda frame, out, ins: partial(spread, out[0], ins[0]))
    table = table_of(i)
    if table is None:
        return plan
    copies, reads = copied(plan, i), len(plan.reads)
    constant = [isinstance(plan.reads[k].operand, Imm) for k in copies]

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        shadows, values = ins[: len(copies)], ins[reads : reads + len(copies)]
        if not written:
            return partial(undecided, table, out[0], shadows, values)
        found = [(k, shadow) for k, shadow in enumerate(shadows) if not constant[k]]
        fixed = {k: value for k, value in enumerate(values) if constant[k]}
        # A mask that is not constant takes away, and puts nothing in.
        return partial(brought, table, out[0], found, fixed, np.bitwise_and if i.opcode == "and" else np.bitwise_or)

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


def brought(table: int, out: Array, shadows: Sequence[tuple[int, Array]], fixed: dict[int, Array], join: np.ufunc) -> None:
    """The bits into which operands `shadows` bring something, given the constants among the operands."""
    count = len(shadows) + len(fixed)
    parts = []
    for k, shadow in shadows:
        place = 1 << (count - 1 - k)
        matters = np.zeros_like(out)
        for row in range(1 << count):
            if not row & place and (table >> row ^ table >> (row | place)) & 1:
                may = ~np.zeros_like(out)
                for other, value in fixed.items():
                    may &= value if row >> (count - 1 - other) & 1 else ~value
                matters |= may
        parts.append(shadow & matters)
    out[...] = join.reduce(parts) if parts else 0


def spread(out: Array, source: Array) -> None:
    """What a conversion that saturates makes of a number of which some bit is not known: none is."""
    unsigned = UNSIGNED[out.itemsize]
    out[...] = np.where(source != 0, np.iinfo(unsigned).max, 0).astype(unsigned).view(out.dtype)
