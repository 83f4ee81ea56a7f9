"""Operands of PTX statements: registers by name and brace level, numbers, special registers, addresses, vectors.

Grammar: PTX ISA, "Syntax" ("Constants", "Identifiers") and "Instruction Operands".
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from .syntax import SINK, Function, Group, Imm, Mem, Not, Operand, Pair, Reg, Sym, Vec
from .types import TYPES, PtxError, PtxType

NAME = r"[A-Za-z_$%][\w$]*"
SPLIT = re.compile(r"[,\s]+")
_DELIMITER = re.compile(r"[,{}\[\]()]")
FLOAT = re.compile(r"0([fFdD])([0-9a-fA-F]{8,16})$")
INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
DECIMAL = re.compile(r"-?\d+\.\d*(?:[eE][-+]?\d+)?$")
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


def integer(text: str) -> int:
    """An integer constant; a leading 0 means octal as in C."""
    text = text.rstrip("U")
    sign, body = (-1, text[1:]) if text.startswith("-") else (1, text)
    if re.fullmatch(r"0[0-7]+", body):
        return sign * int(body, 8)
    return sign * int(body, 0)


class Scope:
    """Names of one brace level of a function body; inner levels may redeclare registers and labels."""

    def __init__(self, parent: Scope | None, suffix: str):
        self.parent = parent
        self.suffix = suffix
        self.registers: dict[str, PtxType] = {}
        self.ranges: dict[str, tuple[PtxType, int]] = {}
        self.labels: set[str] = set()
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
        for name in SPLIT.split(names.strip()):
            if ranged := re.fullmatch(r"(.*)<(\d+)>", name):
                self.ranges[ranged[1]] = (kind, int(ranged[2]))
            else:
                self.registers[name] = kind

    def find(self, name: str) -> Reg | None:
        scope: Scope | None = self
        while scope is not None:
            found = scope.registers.get(name)
            if found is None and (match := re.fullmatch(r"(.*?)(0|[1-9]\d*)", name)):
                prefix = scope.ranges.get(match[1])
                if prefix and int(match[2]) < prefix[1]:
                    found = prefix[0]
            if found is not None:
                return Reg(name + scope.suffix, found)
            scope = scope.parent
        return None


def operand(function: Function, scope: Scope, text: str) -> Operand:
    """What stands between two commas. Raises `PtxError` on a form that is not executed and on names that are not declared."""
    if (reg := scope.register(text)) is not None:
        return reg

    def sub(part: str) -> Operand:
        return operand(function, scope, part)

    if text.startswith("{"):
        return Vec(tuple(sub(t) for t in split_operands(text[1:-1])))
    if text.startswith("("):
        return Group(tuple(sub(t) for t in split_operands(text[1:-1])))
    if text.startswith("["):
        address, *rest = split_operands(text[1:-1])
        coordinates = sub(rest[0]) if len(rest) == 1 else Vec(())
        if len(rest) > 1 or not isinstance(coordinates, Vec):
            raise PtxError(f"address {text} has a form that is not executed")
        found = memory(function, scope, address)
        return Mem(found.base, found.offset, coordinates.items)
    if "|" in text:
        first, second = text.split("|")
        return Pair(sub(first.strip()), sub(second.strip()))
    if text.startswith("!"):
        inner = sub(text[1:].strip())
        assert isinstance(inner, Reg)
        return Not(inner)
    if text == "_":
        return SINK
    if match := FLOAT.match(text):
        return Imm(int(match[2], 16), 32 if match[1] in "fF" else 64)
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
                raise PtxError(f"special register {text} is not executed")
            raise PtxError(f"register {text} is not declared" if _NUMBERED.match(text) else f"unknown special register {text}")
        return Sym(symbol(function, scope, match[1]), integer((match[2] or "0").replace(" ", "").lstrip("+")))
    raise PtxError(f"operand {text} has a form that is not executed")


def symbol(function: Function, scope: Scope, name: str) -> str:
    at: Scope | None = scope
    names = {v.name for v in (*function.variables, *function.params, *function.returns)}
    while at is not None:
        if name in at.labels or name + at.suffix in names:
            return name + at.suffix
        at = at.parent
    return name


def memory(function: Function, scope: Scope, text: str) -> Mem:
    match = re.fullmatch(r"(.+?)\s*(?:\+\s*(-?\s*\w+)|(-\s*\d\w*))?", text, re.S)
    assert match is not None
    base = operand(function, scope, match[1].strip())
    offset = integer((match[2] or match[3] or "0").replace(" ", ""))
    if isinstance(base, Sym):
        return Mem(Sym(base.name), base.offset + offset)
    if not isinstance(base, (Reg, Imm)):
        raise PtxError(f"address [{text}] has a form that is not executed")
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
