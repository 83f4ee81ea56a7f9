"""The parts of PTX text: types, operands, instructions, variables, functions, names of kernels."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyflash.words import plural

Array = NDArray[Any]


@dataclass(frozen=True)
class PtxType:
    """One fundamental type. `kind`: b(its), u, s, f(loat) or p(redicate); `dtype` views the bits (halves as float16)."""

    name: str
    bits: int
    kind: str
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        return max(1, self.bits // 8)


def _table() -> dict[str, PtxType]:
    types = {"pred": PtxType("pred", 1, "p", np.dtype(bool))}
    for bits in (8, 16, 32, 64):
        for kind, code in (("b", "u"), ("u", "u"), ("s", "i")):
            name = f"{kind}{bits}"
            types[name] = PtxType(name, bits, kind, np.dtype(f"{code}{bits // 8}"))
    for bits in (16, 32, 64):
        types[f"f{bits}"] = PtxType(f"f{bits}", bits, "f", np.dtype(f"f{bits // 8}"))
    # NumPy has no bfloat16 and no packed types: their bits are kept as unsigned integers.
    types["bf16"] = PtxType("bf16", 16, "f", np.dtype(np.uint16))
    types["f16x2"] = PtxType("f16x2", 32, "f", np.dtype(np.uint32))
    types["bf16x2"] = PtxType("bf16x2", 32, "f", np.dtype(np.uint32))
    types["f32x2"] = PtxType("f32x2", 64, "f", np.dtype(np.uint64))
    types["tf32"] = PtxType("tf32", 32, "f", np.dtype(np.uint32))
    return types


TYPES = _table()

UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
"""Unsigned dtype of a width in bytes."""

ELEMENT: dict[int, np.dtype[Any]] = {**UNSIGNED, 16: np.dtype(np.complex128), 32: np.dtype("V32")}
"""Dtype that moves a memory element of 1..32 bytes as raw bits."""


class PtxError(RuntimeError):
    """Base of the errors that this package raises about a PTX text or its execution."""


QUOTED = 100
"""Most characters of a text that a message repeats."""

MOST_LISTED = 10
"""Most statements that a message names one by one."""


def brief(text: str) -> str:
    """Returns a text as a message repeats it."""
    return text if len(text) <= QUOTED else f"{text[: QUOTED - 3]}..."


class UnsupportedPTX(PtxError):
    """Raised for a kernel with statements that the machine does not execute (opcodes, modifiers, directives).

    `items` lists all as (line, text, reason); the message has the first ten.
    """

    def __init__(self, items: list[tuple[int, str, str]], kernel: str = ""):
        self.items = items
        self.kernel = kernel
        lines = "\n".join(f"  line {line}: {brief(text)}  ({reason})" for line, text, reason in items[:MOST_LISTED])
        if len(items) > MOST_LISTED:
            lines += f"\n  and {len(items) - MOST_LISTED:,} more"
        super().__init__(f"{kernel + ': ' if kernel else ''}{plural(len(items), 'unsupported PTX statement')}:\n{lines}")


class Unsupported(Exception):
    """Raised by a decoder for one instruction; collected into `UnsupportedPTX` at load."""


Line = tuple[str, int]
"""A line of source: (file, line). Where the PTX has no line information the file is "PTX" and the line is the PTX's."""


Refusal = tuple[int, str, str]
"""A statement that is not executed: (line of the PTX, text, reason)."""

SPACES = {"global", "shared", "local", "param", "const"}
"""State spaces, as modifiers name them."""


@dataclass(frozen=True)
class Reg:
    """A virtual register (unique name within its function) or a special register such as `%tid.x`."""

    name: str
    type: PtxType


@dataclass(frozen=True)
class Imm:
    """An immediate: an integer, or the bits of a `0f...`/`0d...` constant of `float_bits` width."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Sym:
    """A variable, parameter, function or label, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Mem:
    """A memory operand `[base + offset]`; with `coordinates`, `[base + offset, {a, b, ...}]`, a place in a tensor map's tensor."""

    base: Reg | Sym | Imm
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Vec:
    """A brace list `{a, b, ...}`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """Two destinations `a|b`."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Not:
    """A negated predicate source `!p`."""

    reg: Reg


@dataclass(frozen=True)
class Group(Vec):
    """A parenthesised list, as in `call (ret), f, (a, b)`."""


Operand = Reg | Imm | Sym | Mem | Vec | Pair | Not

SINK = Reg("_", TYPES["b32"])
"""The bit bucket `_`: a destination whose value nobody reads."""


@dataclass(frozen=True, eq=False)
class PtxInstruction:
    """One PTX instruction, equal to itself only. `predicate` is (register, negated); `source` is (file, line) from `.loc`.

    `inlined_at`: where `source` lies in an inlined function, the lines of the calls, the kernel's own last.
    """

    opcode: str
    mods: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: tuple[Reg, bool] | None
    line: int
    source: tuple[str, int] | None
    text: str
    inlined_at: tuple[Line, ...] = ()

    @property
    def name(self) -> str:
        """Opcode and modifiers, up to a state space: cp.async.bulk.tensor.2d, wgmma.fence.sync.aligned."""
        names = (self.opcode, *self.mods)
        return ".".join(takewhile(lambda one: one.partition("::")[0] not in SPACES, names))

    @property
    def place(self) -> Line:
        """The line that this instruction is counted for."""
        return self.source or ("PTX", self.line)

    @property
    def type(self) -> PtxType:
        """The instruction type: its last modifier that names one."""
        for mod in reversed(self.mods):
            if mod in TYPES:
                return TYPES[mod]
        raise PtxError(f"line {self.line}: no type in {self.text!r}")

    @property
    def types(self) -> tuple[PtxType, ...]:
        return tuple(TYPES[m] for m in self.mods if m in TYPES)


UNDECODED = PtxInstruction("", (), (), None, 0, None, "")
"""No instruction."""


@dataclass
class Variable:
    """A variable of a state space or a parameter. `size` bytes (0: extern, size given at launch); `init` its bytes.

    `pointers` lists (byte offset, symbol, byte offset in the symbol, width) of initialisers that are addresses.
    """

    name: str
    space: str
    type: PtxType
    align: int
    size: int
    init: bytes = b""
    pointers: list[tuple[int, str, int, int]] = field(default_factory=list)
    is_array: bool = False


@dataclass
class Function:
    """A kernel (`.entry`) or a device function (`.func`). `unsupported`: its statements that could not be read."""

    name: str
    is_entry: bool
    params: list[Variable]
    returns: list[Variable]
    variables: list[Variable] = field(default_factory=list)
    instructions: list[PtxInstruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    defined: bool = True
    unsupported: list[Refusal] = field(default_factory=list)
    registers: int | None = None
    """Registers per thread at launch, if the kernel's directives give them: the count before any setmaxnreg."""
    block: tuple[int, ...] | None = None
    """Threads of a block in x, y and z, if the kernel runs with these alone (.reqntid)."""
    most_threads: int | None = None
    """Most threads of a block (.maxntid, __launch_bounds__)."""
    cluster: tuple[int, ...] | None = None
    """Blocks of a cluster in x, y and z (.reqnctapercluster); () if the launch must say it (.explicitcluster alone)."""
    most_blocks: int | None = None
    """Most blocks of a cluster (.maxclusterrank)."""
    names: set[str] = field(default_factory=set)
    """Names of its parameters, returns and variables."""


@dataclass
class PtxProgram:
    """A parsed PTX module. `unsupported`: unreadable statements outside of functions; `unreadable`: such declarations, by name."""

    functions: dict[str, Function]
    variables: dict[str, Variable]
    target: str
    unsupported: list[Refusal]
    unreadable: dict[str, Refusal]

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels (`.entry`), as they stand in the PTX."""
        return tuple(f.name for f in self.functions.values() if f.is_entry)


def leaves(operand: Operand) -> Iterator[Reg | Sym | Imm]:
    """Yields the registers, names and constants of an operand; of a place in a tensor map's tensor, those of the map's address."""
    if isinstance(operand, Mem | Not):
        yield operand.base if isinstance(operand, Mem) else operand.reg
    elif isinstance(operand, Vec):
        for item in operand.items:
            yield from leaves(item)
    elif not isinstance(operand, Pair):
        yield operand


def symbols(operands: Iterable[Operand]) -> list[Sym]:
    """Returns the names in operands."""
    return [leaf for operand in operands for leaf in leaves(operand) if isinstance(leaf, Sym)]


_SOURCE_NAME = re.compile(r"L?(\d+)")


def base_name(mangled: str) -> str:
    """Returns the name in the source, with its namespaces, without template arguments and parameters.

    `_ZN3cub6KernelIfEEvPT_` is `cub::Kernel`. A name that C++ did not mangle is itself. Unnamed namespaces are left out.
    """
    if not mangled.startswith("_Z"):
        return mangled
    nested = mangled.startswith("_ZN")
    at, parts = 3 if nested else 2, list[str]()
    while match := _SOURCE_NAME.match(mangled, at):
        at = match.end() + int(match[1])
        parts.append(mangled[match.end() : at])
        if not nested:
            break
    named = [part for part in parts if not part.startswith(("_GLOBAL__N_", "_INTERNAL_"))]
    return "::".join(named) or mangled


@functools.cache
def _runtime_library() -> ctypes.CDLL | None:
    """Returns the C++ runtime library, which has a demangler; None if there is none."""
    for name in ("libstdc++.so.6", ctypes.util.find_library("stdc++"), ctypes.util.find_library("c++abi")):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(name or "")
            library.__cxa_demangle.restype = ctypes.c_void_p
            return library
    return None


def demangled(mangled: str) -> str:
    """Returns a mangled name as C++ has it, "" if it is no such name or there is no demangler."""
    library = _runtime_library()
    if library is None or not mangled.startswith("_Z"):
        return ""
    found = library.__cxa_demangle(mangled.encode(), None, None, None)
    if not found:
        return ""
    text = ctypes.string_at(found).decode(errors="replace")
    ctypes.CDLL(None).free(ctypes.c_void_p(found))
    return text


MOST_SHOWN = 120
"""Most characters of a kernel's name in a message."""


@functools.lru_cache(1024)
def source_name(mangled: str) -> str:
    """Returns a kernel's name in the source with its template arguments, without its parameters: `k<float, 4>`.

    Long names, as CUB's, are cut. It needs the C++ runtime library; without it the name is `base_name`.
    """
    shown = in_source(mangled)[0] or base_name(mangled)
    return shown if len(shown) <= MOST_SHOWN else f"{shown[: MOST_SHOWN - 3]}..."


def in_source(mangled: str) -> tuple[str, str]:
    """Returns a kernel's name with its template arguments, and its parameters' types in parentheses; both "" if it has none."""
    name = demangled(mangled)
    at = len(name)
    if name.endswith(")"):
        depth = 0
        while at and not (name[at - 1] == "(" and depth == 1):
            at -= 1
            depth += {")": 1, "(": -1}.get(name[at], 0)
        at = max(at - 1, 0)
    return name[:at].removeprefix("void ").replace("(anonymous namespace)::", ""), name[at:]


def variable_name(mangled: str) -> str:
    """Returns the name of a variable in the source; that of one in a function (`_ZZ1kvE4tile`) is `tile`."""
    if mangled.startswith("_ZZ"):
        for match in re.finditer(r"E(\d+)(?=[A-Za-z_])", mangled):
            name, rest = mangled[match.end() : match.end() + int(match[1])], mangled[match.end() + int(match[1]) :]
            if re.fullmatch(r"(_\d+)?", rest):
                return name
    return base_name(mangled)


def find_kernel(kernels: Sequence[str], name: str | None) -> str:
    """Returns the kernel with this name in the PTX, else the only one with this name in the source; None: the only kernel.

    Raises ValueError that lists the kernels.
    """
    listed = ", ".join(k if base_name(k) == k else f"{base_name(k)} ({k})" for k in kernels) or "none"
    if name is None:
        if len(kernels) == 1:
            return kernels[0]
        raise ValueError(f"say which kernel: this module has {listed}")
    if name in kernels:
        return name
    found = [k for k in kernels if name in (base_name(k), base_name(k).rpartition("::")[2])]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"kernel {name!r} is not unique: take one of {', '.join(found)}")
    raise ValueError(f"kernel {name!r} is not in this module; it has {listed}")


_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
QUALIFIERS = re.compile(r"\b(const|volatile|__restrict__|__restrict|restrict|__grid_constant__)\b")
_LAST_WORD = re.compile(r"([A-Za-z_]\w*)\s*(?:\[[^\]]*\]\s*)*$")


def parameters(cuda: str, kernel: str, count: int) -> list[tuple[str, str]]:
    """Returns (type, name) of a kernel's `count` parameters; `kernel` is its name in the PTX.

    Names are those of the last function in CUDA C with its name and so many parameters, else arg0, arg1, ... Types are those of
    a mangled name, which knows the template arguments (`float const*`), else the source's; "" if nothing says them, or if
    several such functions differ (under `#if`, say).
    """
    found, differ = [("", f"arg{n}") for n in range(count)], [set[str]() for _ in range(count)]
    text = _COMMENTS.sub(" ", cuda)
    for match in re.finditer(rf"\b{re.escape(base_name(kernel).rpartition('::')[2])}\s*\(", text):
        parts = [part.partition("=")[0].strip() for part in top_level(text, match.end())]
        words = [word for part in parts if (word := _LAST_WORD.search(part))]
        before = text[: match.start()].rstrip()[-1:]
        if len({word[1] for word in words}) == len(parts) == count and (before.isalnum() or before in "_)>&*"):
            each = list(zip(parts, words, strict=True))
            kinds = [part[: word.start()].strip() + "*" * part[word.start() :].count("[") for part, word in each]
            found = [(kind, word[1]) for kind, (_, word) in zip(kinds, each, strict=True)]
            for known, kind in zip(differ, kinds, strict=True):
                known.add("".join(QUALIFIERS.sub("", kind).split()))
    kinds = [kind.strip() for kind in top_level(in_source(kernel)[1], 1)]
    if len(kinds) != count:
        kinds = ["" if len(known) > 1 else kind for (kind, _), known in zip(found, differ, strict=True)]
    return [(kind, name) for kind, (_, name) in zip(kinds, found, strict=True)]


def top_level(text: str, start: int) -> list[str]:
    """Splits at commas the text from `start`, behind a parenthesis, to the parenthesis that closes it."""
    depth, parts, at = 0, [""], start
    while at < len(text) and depth >= 0:
        letter = text[at]
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and depth == 0:
            parts.append("")
        elif depth >= 0:
            parts[-1] += letter
        at += 1
    return [] if parts == [""] else parts
