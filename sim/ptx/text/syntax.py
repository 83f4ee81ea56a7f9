"""What PTX text is made of: operands, instructions, variables, functions, modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from .types import TYPES, PtxError, PtxType

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
class Group:
    """A parenthesised list, as in `call (ret), f, (a, b)`."""

    items: tuple[Operand, ...]


Operand = Reg | Imm | Sym | Mem | Vec | Pair | Not | Group

SINK = Reg("_", TYPES["b32"])
"""The bit bucket `_`: a destination whose value nobody reads."""


@dataclass(frozen=True, eq=False)
class Instruction:
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
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    defined: bool = True
    unsupported: list[Refusal] = field(default_factory=list)
    registers: int | None = None
    """Registers per thread at launch, where the kernel's directives say so: what setmaxnreg begins with."""
    cluster: tuple[int, ...] | None = None
    """Blocks of a cluster in x, y and z (.reqnctapercluster); () if the launch must say it (.explicitcluster alone)."""
    most_blocks: int | None = None
    """Of a cluster (.maxclusterrank)."""
    names: set[str] = field(default_factory=set)
    """Of its parameters, returns and variables."""


@dataclass
class Program:
    """A parsed PTX module. What could not be read: `unsupported` outside of functions, `unreadable` declarations by their names."""

    functions: dict[str, Function]
    variables: dict[str, Variable]
    target: str
    unsupported: list[Refusal]
    unreadable: dict[str, Refusal]

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels (`.entry`), as they stand in the PTX."""
        return tuple(f.name for f in self.functions.values() if f.is_entry)


def symbols(operands: Sequence[Operand]) -> list[Sym]:
    """The names in operands."""
    out: list[Sym] = []
    for operand in operands:
        if isinstance(operand, Sym):
            out.append(operand)
        elif isinstance(operand, Mem) and isinstance(operand.base, Sym):
            out.append(operand.base)
        elif isinstance(operand, Vec | Group):
            out += symbols(operand.items)
    return out
