"""Parses PTX text into functions, variables and instructions, each instruction with its predicate, PTX line and CUDA source line.

Operands are registers by name and brace level, numbers, special registers, addresses, vectors. Nothing is executed or checked
for support here except directives, which have no decoder of their own.

Grammar: PTX ISA, chapters "Syntax" ("Constants", "Identifiers"), "State Spaces, Types, and Variables", "Instruction Operands".
"""

from __future__ import annotations

import bisect
import math
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from .syntax import (
    SINK,
    TYPES,
    Function,
    Group,
    Imm,
    Mem,
    Not,
    Operand,
    Pair,
    PtxError,
    PtxInstruction,
    PtxProgram,
    PtxType,
    Refusal,
    Reg,
    Sym,
    Variable,
    Vec,
    brief,
)

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
"""Names that compilers give to the registers that they declare."""

_ANY_SPECIAL = re.compile(
    r"%(n?(tid|ctaid|clusterid)|cluster_n?cta(id|rank)|is_explicit_cluster|laneid|n?(warpid|smid)|gridid|lanemask_\w\w|clock\w*"
    r"|globaltimer\w*|pm\d\w*|envreg\d+|reserved_smem_offset_\w+|(total|aggr|dynamic)_smem_size|current_graph_exec)(\.[xyzw])?$"
)
"""All registers in the PTX ISA's "Special Registers", executed or not."""


LONGEST = 68
"""Characters of an integer constant: a sign and 64 binary digits with what goes before and behind them."""

DEEPEST = 200
"""Most braces around a statement."""

NESTED = 8
"""Most brackets of an operand in one another: PTX has three."""


def integer(text: str) -> int:
    """Parses an integer constant; a leading 0 means octal as in C. Raises `PtxError` if it is none, or takes more than 64 bits."""
    if len(text) <= LONGEST and INTEGER.match(text):
        digits = text.rstrip("U").lstrip("-")
        found = int(digits, 8) if re.fullmatch(r"0[0-7]+", digits) else int(digits, 0)
        if found < 1 << 64:
            return -found if text.startswith("-") else found
    raise PtxError(f"{brief(text)!r} is no integer constant of 64 bits")


def float_bits(text: str) -> tuple[int, int] | None:
    """Returns the bits of a 0f or 0d constant and their number, 32 or 64."""
    match = FLOAT.match(text)
    if not match:
        return None
    return (int(match[2], 16), 32) if match[1] else (int(match[4], 16), 64)


def is_special(name: str) -> bool:
    """True for a register that only the machine writes."""
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
        """Returns the register that a name means here, as long as `declare` does not change that."""
        found = self._seen.get(name)
        if found is None and (register := self.find(name)) is not None:
            found = self._seen[name] = register
        return found

    def own(self, name: str, variables: Collection[str] = ()) -> str:
        """Returns the name of a label, or of one of these variables, with the suffix of the innermost level that has it."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels or name + scope.suffix in variables:
                return name + scope.suffix
            scope = scope.parent
        return name

    def declare(self, names: str, kind: PtxType) -> None:
        """Declares registers as `.reg` lists them: names with commas between, name<n> for name0 to name(n - 1)."""
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
    """Parses the text between two commas. Raises `PtxError` for a form that is not executed and for undeclared names."""
    if (reg := scope.register(text)) is not None:
        return reg

    unknown = PtxError(f"operand {brief(text)} has a form that is not executed")
    if depth > NESTED:
        raise unknown

    def sub(part: str) -> Operand:
        return operand(function, scope, part, depth + 1)

    if text.startswith("{") and text.endswith("}"):
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
        return Sym(scope.own(match[1], function.names), integer((match[2] or "0").replace(" ", "").lstrip("+")))
    raise unknown


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
    """Splits at commas outside of brackets; drops empty parts."""
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


_COMMENT = re.compile(r"//[^\n]*|/\*.*?(?:\*/|\Z)", re.S)
_LABEL = re.compile(rf"({NAME})\s*:(?!:)")
_PREDICATE = re.compile(rf"@(!?)\s*({NAME})\s*")
_OPCODE = re.compile(r"([a-z][\w.:]*)\s*")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:[^\n]*\binlined_at\s+(\d+)\s+(\d+)\s+(\d+))?[^\n]*")
_FILE = re.compile(r'\.file\s+(\d+)\s+"((?:[^"\\]|\\.)*)"[^\n]*')
_VARIABLE = re.compile(
    rf"\.(?P<space>global|const|shared|local|param|reg)\b(?P<quals>(?:\s*\.\w+(?:\s+\d+|\(\.managed\))?)*?)\s*\.(?P<type>\w+)"
    rf"(?P<quals2>(?:\s+\.ptr(?:\s*\.\w+)?(?:\s*\.align\s+\d+)?)?)\s+(?P<name>{NAME})(?P<rest>.*)",
    re.S,
)
_ALIGN = re.compile(r"\.align\s+(\d+)")
_MARK = re.compile(rf"[{{}}]|(?:^|(?<=[;{{}}\n]))[^\S\n]*({NAME})\s*:(?!:)")
_BLANK = re.compile(r"\s*")


def file_name(text: str) -> str:
    """Returns the name between the quotes of a .file, in which compilers write bytes beyond ASCII in octal: \\303\\251 is é."""
    escaped = re.compile(rb"\\([0-7]{1,3})|\\(.)")
    try:
        octets = text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # half a character, which is in no file
        octets = text.encode(errors="replace")
    name = escaped.sub(lambda m: bytes([int(m[1], 8) & 0xFF]) if m[1] else m[2], octets)
    return name.decode(errors="surrogateescape")


class _Parser:
    def __init__(self, text: str):
        # Comments become blanks, so that offsets (and with them line numbers) stay those of the given text.
        self.text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
        self.newlines = [m.start() for m in re.finditer("\n", text)]
        self.functions: dict[str, Function] = {}
        self.variables: dict[str, Variable] = {}
        self.files = {m[1].lstrip("0"): file_name(m[2]) for m in _FILE.finditer(self.text)}
        self.bad: list[Refusal] = []
        self.unreadable: dict[str, Refusal] = {}
        self.function_now: Function | None = None
        self.target = ""
        self.source: tuple[str, int] | None = None
        self.inlined_at: tuple[tuple[str, int], ...] = ()
        # The calls, innermost first, of each (file, line, column) of a .loc in an inlined function.
        self.calls: dict[tuple[str, ...], tuple[tuple[str, int], ...]] = {}
        self.scopes = 0

    def line(self, pos: int) -> int:
        return bisect.bisect_left(self.newlines, pos) + 1

    def fail(self, pos: int, reason: str) -> None:
        end = self.text.find("\n", pos)
        self.refuse((self.line(pos), brief(self.text[pos : min(end, pos + 200) if end >= 0 else pos + 200].strip()), reason))

    def refuse(self, item: Refusal, name: str = "") -> None:
        """Refuses an unreadable statement: for its function, for uses of the declaration `name`, or for the whole module."""
        if self.function_now is not None:
            self.function_now.unsupported.append(item)
        elif name:
            self.unreadable[name] = item
        else:
            self.bad.append(item)

    def wrong(self, pos: int, reason: object) -> PtxError:
        """Returns the error for text that is not PTX."""
        return PtxError(f"line {self.line(pos)}: {reason}")

    def integer(self, pos: int, text: str, least: int = 0, most: int = (1 << 64) - 1) -> int:
        """Parses an integer constant in a declaration or directive."""
        try:
            found = integer(text)
        except PtxError as error:
            raise self.wrong(pos, error) from None
        if not least <= found <= most:
            raise self.wrong(pos, f"{found} is not {f'{least} to {most}' if most < 1 << 63 else f'at least {least}'}")
        return found

    def skip(self, pos: int) -> int:
        match = _BLANK.match(self.text, pos)
        return match.end() if match else pos

    def until(self, pos: int, mark: str) -> int:
        end = self.text.find(mark, pos)
        if end < 0:
            raise self.wrong(pos, f"no {mark!r} after {self.text[pos : pos + 40]!r}")
        return end

    def close(self, pos: int) -> int:
        """Returns the position after the brace that closes the one at `pos`."""
        depth = 0
        for match in re.compile(r"[{}]").finditer(self.text, pos):
            depth += 1 if match[0] == "{" else -1
            if depth == 0:
                return match.end()
        raise self.wrong(pos, "brace is never closed")

    # -- module level -------------------------------------------------------------------------------------------

    def parse(self) -> PtxProgram:
        pos = self.skip(0)
        while pos < len(self.text):
            pos = self.skip(self.statement(pos))
        constant = sum(variable.size for variable in self.variables.values() if variable.space == "const")
        if constant > MOST_CONSTANT:
            raise PtxError(f"{constant:,} bytes of constant memory; a module has at most {MOST_CONSTANT:,}")
        return PtxProgram(self.functions, self.variables, self.target, self.bad, self.unreadable)

    def statement(self, pos: int) -> int:
        text = self.text
        if match := re.compile(r"\.(version|address_size|target)\s+([^\n]*)").match(text, pos):
            if match[1] == "target":
                self.target = match[2].strip()
            if match[1] == "address_size" and match[2].strip() != "64":
                self.fail(pos, "only 64-bit addresses")
            return match.end()
        if match := _FILE.match(text, pos):
            return match.end()
        if text.startswith(".section", pos):
            return self.close(self.until(pos, "{"))
        if text.startswith(".pragma", pos) or text.startswith(".alias", pos):
            return self.until(pos, ";") + 1
        if match := re.compile(r"(?:\.(?:visible|extern|weak|common)\s+)*").match(text, pos):
            linkage, body = match[0], match.end()
            if re.compile(r"\.(entry|func)\b").match(text, body):
                return self.function(body)
            if re.compile(r"\.(global|const|shared)\b").match(text, body):
                end = self.until(body, ";")
                if variable := self.variable(body, text[body:end], "extern" in linkage):
                    if variable.name in self.variables and "extern" not in linkage:
                        raise self.wrong(pos, f"{brief(variable.name)} is declared twice")
                    self.variables[variable.name] = variable
                return end + 1
        self.fail(pos, "unknown directive")
        end = text.find("\n", pos)
        return len(text) if end < 0 else end

    def variable(self, pos: int, text: str, extern: bool = False) -> Variable | None:
        match = _VARIABLE.match(text)
        if not match or match["type"] not in TYPES:
            words = text.partition("=")[0].partition("[")[0].split()
            self.refuse((self.line(pos), brief(" ".join(text.split())), "this declaration is not read"), words[-1] if words else "")
            return None
        elem = TYPES[match["type"]]
        quals = match["quals"] + match["quals2"]
        vector = re.search(r"\.v(\d)", quals)
        width = elem.bytes * (int(vector[1]) if vector else 1)
        align = _ALIGN.search(match["quals"])
        alignment = self.integer(pos, align[1], 1) if align else width
        if alignment & (alignment - 1):
            raise self.wrong(pos, f".align {alignment} is no power of two")
        dims, _, init = match["rest"].partition("=")
        sizes = [self.integer(pos, d.strip()) if d.strip() else 0 for d in re.findall(r"\[([^\]]*)\]", dims)]
        size = width * math.prod(sizes)
        if size >= 1 << 63:
            raise self.wrong(pos, f"{brief(match['name'])} has {size:,} bytes")
        variable = Variable(match["name"], match["space"], elem, alignment, size, is_array=bool(sizes))
        if init.strip():
            self.initialise(pos, variable, elem, init.strip())
            if variable.size and len(variable.init) > variable.size:
                raise self.wrong(pos, f"{brief(variable.name)} of {variable.size} bytes has initialisers for {len(variable.init)}")
            variable.size = max(variable.size, len(variable.init))
        if not extern and variable.size == 0 and match["space"] != "param":
            raise self.wrong(pos, f"{brief(variable.name)} has no size")
        if extern and match["space"] != "shared" and variable.size == 0:
            item = (self.line(pos), brief(" ".join(text.split())), "extern variable without a size")
            self.refuse(item, variable.name)
        return variable

    def initialise(self, pos: int, variable: Variable, elem: PtxType, init: str) -> None:
        data, width = bytearray(), elem.bytes
        for item in SPLIT.split(re.sub(r"[{}]", " ", init).strip()):
            bits = float_bits(item)
            if bits is not None and bits[1] == 8 * width:
                data += bits[0].to_bytes(width, "little")
            elif bits is not None and (bits[1], width) == (64, 4):
                data += np.array(bits[0], np.uint64).view(np.float64).astype("<f4").tobytes()
            elif INTEGER.match(item) and elem.kind != "f":
                data += (self.integer(pos, item, -(1 << 64)) & ((1 << (8 * width)) - 1)).to_bytes(width, "little")
            elif DECIMAL.match(item) and elem.kind in "fb" and width in (4, 8):
                data += np.dtype(f"<f{width}").type(item).tobytes()
            elif match := re.fullmatch(rf"(?:generic\()?({NAME})\)?(?:\+(\w+))?\)?", item):
                variable.pointers.append((len(data), match[1], self.integer(pos, match[2] or "0"), width))
                data += bytes(width)
            else:
                raise self.wrong(pos, f"{brief(item)!r} is no initialiser of .{elem.name}")
        variable.init = bytes(data)

    # -- functions ----------------------------------------------------------------------------------------------

    def params(self, text: str, pos: int) -> list[Variable]:
        found = (self.variable(pos, part.strip()) for part in text.split(",") if part.strip())
        return [variable for variable in found if variable]

    def function(self, pos: int) -> int:
        head = re.compile(
            rf"\.(entry|func)\s*(?:\((?P<ret>[^(){{}};]*)\)\s*)?(?P<name>{NAME})\s*(?:\((?P<params>[^(){{}};]*)\))?"
            r"(?P<attrs>[^{;]*)(?P<end>[{;])"
        ).match(self.text, pos)
        if not head:
            raise self.wrong(pos, "cannot read this function header")
        self.function_now = function = Function(head["name"], head[1] == "entry", [], [])
        function.params += self.params(head["params"] or "", pos)
        function.returns += self.params(head["ret"] or "", pos)
        if head["end"] == ";":
            function.defined = False
            self.functions.setdefault(function.name, function)
            self.function_now = None
            return head.end()
        if function.name in self.functions and self.functions[function.name].defined:
            raise self.wrong(pos, f"{brief(function.name)} has two bodies")
        self.functions[function.name] = function
        limits = {
            name: [self.integer(pos, n, 1, MOST_THREADS) for n in SPLIT.split(text)] for name, text in _LIMIT.findall(head["attrs"])
        }
        function.registers = registers_at_launch(limits)
        function.block = (*limits["reqntid"], 1, 1)[:3] if "reqntid" in limits else None
        function.most_threads = math.prod(limits["maxntid"]) if "maxntid" in limits else None
        self.directives(function, head["attrs"], pos)
        self.source, self.inlined_at, self.calls = None, (), {}
        if not function.is_entry:
            # All device functions call their result func_retval0.
            for variable in function.params + function.returns:
                if variable.space == "param":
                    variable.name += f"@{function.name}"
        own = function.params + function.returns
        function.names = {variable.name for variable in own}
        if len(function.names) < len(own):
            raise self.wrong(pos, f"two parameters of {brief(function.name)} have one name")
        if function.is_entry and sum(variable.size for variable in own) > MOST_PARAMETERS:
            raise self.wrong(pos, f"{brief(function.name)} has more than {MOST_PARAMETERS:,} bytes of parameters")
        end = self.body(function, head.end())
        self.function_now = None
        return end

    def directives(self, function: Function, text: str, pos: int) -> None:
        """Reads the directives between a kernel's parameters and its body that a launch needs."""
        if ".explicitcluster" in text:
            function.cluster = ()
        if match := re.search(r"\.reqnctapercluster\s+(\d+(?:\s*,\s*\d+)*)", text):
            x, y, z = (*(self.integer(pos, each.strip(), 0, MOST_THREADS) for each in match[1].split(",")), 1, 1)[:3]
            function.cluster = x, y, z
        if match := re.search(r"\.maxclusterrank\s+(\d+)", text):
            function.most_blocks = self.integer(pos, match[1], 0, MOST_THREADS)

    def body(self, function: Function, pos: int) -> int:
        # Kernels keep their names; those of device functions are told apart, for a call runs in the same registers.
        scope: Scope | None = Scope(None, "" if function.is_entry else f"@{function.name}")
        assert scope is not None
        for variable in function.params + function.returns:
            if variable.space == "reg":
                scope.registers[variable.name] = variable.type
        labels = self.labels(pos)
        scope.labels = labels.get(pos, ())
        while True:
            pos = self.skip(pos)
            if pos >= len(self.text):
                raise PtxError(f"function {brief(function.name)} is never closed")
            assert scope is not None
            if self.text[pos] == "{":
                self.scopes += 1
                scope = Scope(scope, f"#{self.scopes}")
                pos += 1
                scope.labels = labels.get(pos, ())
                if scope.depth > DEEPEST:
                    raise self.wrong(pos, f"braces lie in one another more than {DEEPEST} deep")
            elif self.text[pos] == "}":
                scope = scope.parent
                pos += 1
                if scope is None:
                    # The end of the body is a return, also for a label there.
                    line = self.line(pos - 1)
                    function.instructions.append(PtxInstruction("ret", (), (), None, line, self.source, "}"))
                    return pos
            elif match := _LABEL.match(self.text, pos):
                table = re.compile(r"\s*\.branchtargets\s+([^;]*);").match(self.text, match.end())
                if table:
                    targets = [scope.own(t) for t in SPLIT.split(table[1].strip())]
                    function.tables[match[1] + scope.suffix] = targets
                    pos = table.end()
                elif proto := re.compile(r"\s*\.(callprototype|calltargets)\b[^;]*;").match(self.text, match.end()):
                    pos = proto.end()
                else:
                    if match[1] + scope.suffix in function.labels:
                        raise self.wrong(pos, f"there are two labels {brief(match[1])}")
                    function.labels[match[1] + scope.suffix] = len(function.instructions)
                    pos = match.end()
            elif self.text[pos] == ".":
                pos = self.directive(function, scope, pos)
            elif self.text[pos] == ";":
                pos += 1
            else:
                end = self.until(pos, ";")
                try:
                    self.instruction(function, scope, pos, end)
                except PtxError as error:
                    self.refuse((self.line(pos), brief(" ".join(self.text[pos:end].split())), str(error)))
                pos = end + 1

    def labels(self, pos: int) -> dict[int, set[str]]:
        """Returns the labels of each brace level of a function by its first position, in advance: branches may go forward."""
        levels = [pos]
        found: dict[int, set[str]] = {pos: set()}
        for match in _MARK.finditer(self.text, pos):
            if match[0] == "{":
                levels.append(match.end())
                found[match.end()] = set()
            elif match[0] != "}":
                found[levels[-1]].add(match[1])
            elif len(levels) == 1:
                break
            else:
                levels.pop()
        return found

    def directive(self, function: Function, scope: Scope, pos: int) -> int:
        if match := _LOC.match(self.text, pos):
            if match[2].strip("0"):
                self.source = self.place(match[1], match[2])
                self.inlined_at = ()
                if match[4]:
                    self.inlined_at = (self.place(match[4], match[5]), *self.calls.get(match.group(4, 5, 6), ()))
                self.calls[match.group(1, 2, 3)] = self.inlined_at
            return match.end()
        end = self.until(pos, ";")
        text = self.text[pos:end]
        if text.startswith(".pragma"):
            return end + 1
        if text.startswith(".reg"):
            match = re.match(r"\.reg\s*\.(\w+)\s+(.*)", text, re.S)
            if not match or match[1] not in TYPES:
                self.fail(pos, "register type is not executed")
                return end + 1
            try:
                scope.declare(match[2], TYPES[match[1]])
            except PtxError as error:
                raise self.wrong(pos, error) from None
            return end + 1
        if re.match(r"\.(local|shared|param|global|const)\b", text):
            variable = self.variable(pos, text)
            if variable:
                # One name can stand in two brace levels (call sequences do that): the later one has its own storage.
                variable.name += scope.suffix
                if variable.name in function.names:
                    raise self.wrong(pos, f"{brief(variable.name)} is declared twice")
                function.names.add(variable.name)
                function.variables.append(variable)
            return end + 1
        self.fail(pos, "unknown directive")
        return end + 1

    def place(self, file: str, line: str) -> tuple[str, int]:
        return self.files.get(file.lstrip("0"), "?"), min(int(line[:18]), MOST_LINES)

    def instruction(self, function: Function, scope: Scope, pos: int, end: int) -> None:
        text = self.text[pos:end]
        at, predicate = 0, None
        if match := _PREDICATE.match(text):
            reg = scope.register(match[2])
            if reg is None:
                raise PtxError(f"predicate {brief(match[2])} is not declared")
            predicate, at = (reg, match[1] == "!"), match.end()
        match = _OPCODE.match(text, at)
        if not match:
            raise PtxError("this is no instruction")
        opcode, *mods = match[1].split(".")
        operands = tuple(operand(function, scope, t) for t in split_operands(text[match.end() :]))
        clean = " ".join(text.split())
        line = self.line(pos)
        function.instructions.append(
            PtxInstruction(opcode, tuple(mods), operands, predicate, line, self.source, clean, self.inlined_at)
        )


def parse(text: str) -> PtxProgram:
    """Parses a PTX module. Raises `PtxError` on text that is not PTX; unreadable statements are in `PtxProgram.unsupported`."""
    return _Parser(text).parse()


MOST_CONSTANT = 64 << 10
"""Bytes of a module's constant memory."""

MOST_PARAMETERS = 32764
"""Bytes of a kernel's parameters."""

REGISTERS_OF_SM = 65536


def registers_at_launch(limits: Mapping[str, Sequence[int]]) -> int | None:
    """Returns registers per thread by .maxnreg, else the most, rounded to 8, that .maxntid or .reqntid and .minnctapersm allow."""
    if "maxnreg" in limits:
        return -(-limits["maxnreg"][0] // 8) * 8
    sizes = limits.get("reqntid", limits.get("maxntid"))
    if sizes is None:
        return None
    threads = -(-math.prod(sizes) // 128) * 128 * limits.get("minnctapersm", [1])[0]
    return min(256, REGISTERS_OF_SM // threads // 8 * 8)


MOST_THREADS = (1 << 31) - 1
"""Largest value in a directive, such as the threads of a block in one direction."""

MOST_LINES = (1 << 31) - 1

_LIMIT = re.compile(r"\.(maxnreg|maxntid|reqntid|minnctapersm)\s+(\d+(?:\s*,\s*\d+)*)")
