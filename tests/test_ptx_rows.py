"""The table of elementwise opcodes as data: what stands in its rows can be read without running it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np
import pytest

from cupyflash.sim.ptx.decode.table_rows import (
    KINDS,
    PRIMITIVES,
    ROWS,
    SOURCES,
    VIEWS,
    WRITERS,
    Case,
    OpcodeRow,
    OperandName,
    PrimitiveCall,
    meaning,
    parts,
)
from cupyflash.sim.ptx.text.syntax import TYPES, Imm, Unsupported

KNOWN = TYPES.keys() | PRIMITIVES.keys() | WRITERS.keys() | VIEWS.keys()


def texts(row: OpcodeRow) -> Iterator[tuple[str, Case]]:
    """Yields the expressions of a row, for every type and with each of its modifiers."""
    types = [[KINDS[name] for name in names] for names in row.types]
    modifiers = ["", *(name for group in row.optional for name in group)]
    for *chosen, need, mod in product(*types, row.required or [""], modifiers):
        case = Case(row.opcode, frozenset({need, mod} - {""}), tuple(chosen), [Imm(0xB4)] * 5)
        if isinstance(row.text, Mapping):
            yield from ((text, case) for text in row.text.values())
        else:
            try:
                yield row.text if isinstance(row.text, str) else row.text(case), case
            except Unsupported:
                assert row.opcode in ("cvt", "set")  # not every pair of types


@pytest.mark.parametrize("opcode", sorted(ROWS))
def test_rows_name_only_what_there_is(opcode: str) -> None:
    for row in ROWS[opcode]:
        found = list(texts(row))
        assert found
        for text, case in found:
            means = meaning(text, case.types[-1])
            assert len(means.targets) == len(means.values) and {*means.views.values()} <= KINDS.keys() | {"extended"}
            for part in (part for value in means.values for part in parts(value)):
                if isinstance(part, PrimitiveCall):
                    assert (
                        part.primitive in KNOWN
                        or isinstance(getattr(np, part.primitive), np.ufunc)
                        or part.primitive in {"where", "clip"}
                    )
                elif isinstance(part, OperandName):
                    assert part.name in {*SOURCES, "carry", "approximate"}
