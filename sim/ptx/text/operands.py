"""Operands of PTX statements: registers by name and brace level, numbers, special registers, addresses, vectors.

Grammar: PTX ISA, "Syntax" ("Constants", "Identifiers") and "Instruction Operands".
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterator

from .syntax import SINK, Function, Group, Imm, Mem, Not, Operand, Pair, Reg, Sym, Vec
from .types import TYPES, PtxError, PtxType, brief

NAME = r"[A-Za-z_$%][\w$]*"
SPLIT = re.compile(r"[,\s]+")
_DELIMITER = re.compile(r"[,{}\[\]()]")
FLOAT = re.compile(r"0(?:([fF])([0-9a-fA-F]{8})|([dD])([0-9a-fA-F]{16}))\Z")
INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?\Z")
DECIMAL = re.compile(r"-?\d+(?:\.\d*(?:[eE][-+]?\d+)?|[eE][-+]?\d+)\Z")
_SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]$|%(laneid|warpid|nwarpid|smid|nsmid|gridid|clock|clock_hi|clock64|globaltimer"
    r"|globaltimer_lo|globaltimer_hi|lanemask_(eq|le|lt|ge|gt)|envreg([0-9]|[12][0-9]|3[01])|dynamic_smem_size|total_smem_size|aggr_smem_size"
    r"|cluster_ctarank|cluster_nctarank|is_explicit_cluster|reserved_smem_offset_(begin|end|cap|0|1)|current_graph_exec)$"
)
_NUMBERED = re.compile(r"%[A-Za-z]{1,2}\d+$")
"""What compilers call the registers that they declare."""

_ANY_SPECIAL = re.compile(
    r"%(n?(tid|ctaid|clusterid)|cluster_n?cta(id|rank)|is_explicit_cluster|laneid|n?(warpid|smid)|gridid|lanemask_\w\w|clock\w*"
    r"|globaltimer\w*|pm\d\w*|envreg\d+|reserved_smem_offset_\w+|(total|aggr|dynamic)_smem_size|current_graph_exec)(\.[xyzw])?$"
)
"""All that the PTX ISA has, "Special Registers", executed or not."""


LONGEST = 68
"""Characters of an integer constant: a sign and 64 binary digits with what goes before and behind them."""

DEEPEST = 200
"""Most braces around a statement."""

NESTED = 8
"""Most brackets of an operand in one another: PTX has three."""


def integer(text: str) -> int:
    """An integer constant; a leading 0 means octal as in C. Raises `PtxError` for what is none, or takes more than 64 bits."""
    if len(text) <= LONGEST and INTEGER.match(text):
        digits = text.rstrip("U").lstrip("-")
        found = int(digits, 8) if re.fullmatch(r"0[0-7]+", digits) else int(digits, 0)
        if found < 1 << 64:
            return -found if text.startswith("-") else found
    raise PtxError(f"{brief(text)!r} is no integer constant of 64 bits")


def float_bits(text: str) -> tuple[int, int] | None:
    """The bits of a 0f or 0d constant and their number, 32 or 64."""
    match = FLOAT.match(text)
    if not match:
        return None
    return (int(match[2], 16), 32) if match[1] else (int(match[4], 16), 64)


def is_special(name: str) -> bool:
    """Whether it is a register that only the machine writes."""
    return _ANY_SPECIAL.match(name) is not None or name == "%dynamic_smem_size"


class Scope:
    """Names of one brace level of a function body; inner levels may redeclare registers and labels."""

    def __init__(self, parent: Scope | None, suffix: str):
        self.parent = parent
        self.suffix = suffix
        self.registers: dict[str, PtxType] = {}
        self.ranges: dict[str, tuple[PtxType, int]] = {}
        self.labels: Collection[str] = ()
        self.depth: int = parent.depth + 1 if parent else 0
        self._seen: dict[str, Reg] = {}

    def register(self, name: str) -> Reg | None:
        """The register that a name means here, until `declare` may change that."""
        found = self._seen.get(name)
        if found is None and (register := self.find(name)) is not None:
            found = self._seen[name] = register
        return found

    def declare(self, names: str, kind: PtxType) -> None:
        """Registers as `.reg` has them: names with commas between, name<n> for name0 to name(n - 1)."""
        self._seen.clear()
        for name in map(str.strip, names.split(",")):
            ranged = re.fullmatch(rf"({NAME})(?:<(\d+)>)?", name)
            if not ranged:
                raise PtxError(f"{brief(name)!r} is no name of a register")
            if ranged[1] in (self.ranges if ranged[2] else self.registers):
                raise PtxError(f"{brief(ranged[1])} is declared twice")
            if ranged[2]:
                self.ranges[ranged[1]] = (kind, integer(ranged[2].lstrip("0") or "0"))
            else:
                self.registers[name] = kind

    def find(self, name: str) -> Reg | None:
        digits = name[len(name.rstrip("0123456789")) :].lstrip("0") or ("0" if name.endswith("0") else "")
        number = int(digits) if 0 < len(digits) <= LONGEST else None
        scope: Scope | None = self
        while scope is not None:
            found = scope.registers.get(name)
            if found is None and number is not None:
                prefix = scope.ranges.get(name[: -len(digits)])
                if prefix and number < prefix[1]:
                    found = prefix[0]
            if found is not None:
                return Reg(name + scope.suffix, found)
            scope = scope.parent
        return None


def operand(function: Function, scope: Scope, text: str, depth: int = 0) -> Operand:
    """What stands between two commas. Raises `PtxError` on a form that is not executed and on names that are not declared."""
    if (reg := scope.register(text)) is not None:
        return reg

    unknown = PtxError(f"operand {brief(text)} has a form that is not executed")
    if depth > NESTED:
        raise unknown

    def sub(part: str) -> Operand:
        return operand(function, scope, part, depth + 1)

    if text.startswith("{"):
        return Vec(tuple(sub(t) for t in split_operands(text[1:-1])))
    if text.startswith("("):
        return Group(tuple(sub(t) for t in split_operands(text[1:-1])))
    if text.startswith("["):
        address, *rest = [*split_operands(text[1:-1])] or [""]
        coordinates = sub(rest[0]) if len(rest) == 1 else Vec(())
        if len(rest) > 1 or not isinstance(coordinates, Vec):
            raise PtxError(f"address {brief(text)} has a form that is not executed")
        found = memory(function, scope, address, depth)
        return Mem(found.base, found.offset, coordinates.items)
    if "|" in text:
        first, _, second = text.partition("|")
        return Pair(sub(first.strip()), sub(second.strip()))
    if text.startswith("!"):
        inner = sub(text[1:].strip())
        if not isinstance(inner, Reg):
            raise unknown
        return Not(inner)
    if text == "_":
        return SINK
    if (bits := float_bits(text)) is not None:
        return Imm(*bits)
    if INTEGER.match(text):
        return Imm(integer(text))
    if DECIMAL.match(text):
        return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
    if match := _SPECIAL.match(text):
        wide = text in ("%clock64", "%globaltimer", "%current_graph_exec")
        return Reg(text, TYPES["u64" if wide else "pred" if text == "%is_explicit_cluster" else "u32"])
    if text == "WARP_SZ":
        return Imm(32)
    if match := re.fullmatch(rf"({NAME})\s*([+-]\s*\d+)?", text):
        if text.startswith("%"):
            if _ANY_SPECIAL.match(text):
                raise PtxError(f"special register {brief(text)} is not executed")
            what = brief(text)
            raise PtxError(f"register {what} is not declared" if _NUMBERED.match(text) else f"unknown special register {what}")
        return Sym(symbol(function, scope, match[1]), integer((match[2] or "0").replace(" ", "").lstrip("+")))
    raise unknown


def symbol(function: Function, scope: Scope, name: str) -> str:
    at: Scope | None = scope
    names = function.names
    while at is not None:
        if name in at.labels or name + at.suffix in names:
            return name + at.suffix
        at = at.parent
    return name


def memory(function: Function, scope: Scope, text: str, depth: int) -> Mem:
    match = re.fullmatch(r"(.+?)(?:\+(-?\w+)|(-\d\w*))?", "".join(text.split()))
    unknown = PtxError(f"address [{brief(text)}] has a form that is not executed")
    if match is None:
        raise unknown
    base = operand(function, scope, match[1], depth + 1)
    offset = integer(match[2] or match[3] or "0")
    if isinstance(base, Sym):
        return Mem(Sym(base.name), base.offset + offset)
    if not isinstance(base, (Reg, Imm)):
        raise unknown
    return Mem(base, offset)


def split_operands(text: str) -> Iterator[str]:
    """Split at commas outside of brackets; empty parts are dropped."""
    depth, start = 0, 0
    for match in _DELIMITER.finditer(text):
        char = match[0]
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif depth == 0:
            if part := text[start : match.start()].strip():
                yield part
            start = match.end()
    if part := text[start:].strip():
        yield part
