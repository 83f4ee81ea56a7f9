"""Prints the table of opcodes that the machine executes:  python -m cupyflash.sim.ptx > docs/opcodes.md"""

from __future__ import annotations

from itertools import groupby

from cupyflash.sim.ptx import coverage


def table() -> str:
    """Returns the coverage as Markdown, a table for each family of opcodes."""
    lines = [
        "# Opcodes that the PTX machine executes",
        "",
        "Made from the code (`python -m cupyflash.sim.ptx`); what is not here is an error at load that lists it with its line.",
    ]
    for family, rows in groupby(coverage(), key=lambda row: row.family):
        lines += ["", f"## {family}", "", "| opcode | forms |", "| --- | --- |"]
        lines += [f"| {row.opcode} | {row.forms.replace('|', chr(92) + '|')} |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
