"""The table of opcodes: each decoder turns one instruction into a `Plan`, or refuses it if the machine or ptxas does not take it.

A decoder takes an instruction apart; the checks here refuse instructions that ptxas refuses although their opcode is executed:
registers of another size or kind than the instruction's, constants as results, missing modifiers, undeclared names (PTX ISA,
"Operand Type Checking", and the syntax of each instruction). docs/limits.md lists forms that ptxas refuses and the machine takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from ..memory.asynccopy import Copies
from ..memory.bulkcopy import Bulks
from ..memory.mbarriers import MBarriers
from ..memory.memory import Memory
from ..state.lanes import Lanes
from ..text.parser import is_special
from ..text.syntax import (
    SINK,
    TYPES,
    Array,
    Function,
    Group,
    Imm,
    Instruction,
    Mem,
    Not,
    Operand,
    Pair,
    Program,
    PtxError,
    PtxType,
    Reg,
    Sym,
    Unsupported,
    Vec,
    brief,
    symbols,
)

Thunk = Callable[[], object]
"""A bound instruction: running it does the work for all lanes of its frame."""

DType = np.dtype[Any]

Temp = Callable[[str, tuple[int, ...], Any], Array]
"""`Frame.temp`: lends an array by name, shape and dtype."""


class WarpgroupUnit(Protocol):
    """The warpgroups' products in flight (`execute.warpgroups`)."""

    def fence(self, i: Instruction, lanes: Lanes) -> None:
        """Runs wgmma.fence of whole warps."""

    def commit(self, i: Instruction, lanes: Lanes) -> None:
        """Runs wgmma.commit_group of whole warps."""


class Surroundings(Protocol):
    """The machine, as an instruction sees it."""

    @property
    def memory(self) -> Memory: ...

    @property
    def copies(self) -> Copies: ...

    @property
    def bulks(self) -> Bulks: ...

    @property
    def mbarriers(self) -> MBarriers: ...

    @property
    def warpgroups(self) -> WarpgroupUnit: ...

    @property
    def approximate(self) -> bool:
        """True if approximate instructions have errors."""

    def parameter(self, symbol: Sym, offset: int, size: int) -> bytes | None:
        """Returns bytes of a kernel parameter; None if the symbol is a parameter of a call."""

    def is_call_param(self, instruction: Instruction) -> bool:
        """True if a .param access of the instruction is to a variable of a call, not to a kernel parameter."""

    def clock(self) -> int:
        """Returns a count of cycles since the start."""


class Frame(Protocol):
    """The lanes for which an instruction is bound (`execute.registers`): their number, the current ones, and arrays to work in."""

    n: int
    lanes: Lanes

    @property
    def kept(self) -> bool: ...

    @property
    def machine(self) -> Surroundings: ...

    @property
    def read_somewhere(self) -> frozenset[str]:
        """Names of the registers that some instruction reads."""

    def temp(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Lends an array that an instruction may use while it runs; the next one with the same name gets the same array."""

    def lend(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Lends, like `temp`, a bundle of arrays and views that `make` builds."""


@dataclass(frozen=True, eq=False)
class Arg:
    """A value that an instruction reads or writes, seen as `dtype`. `packed`: two `dtype` elements in each lane."""

    operand: Operand
    dtype: DType
    packed: bool = False


# -- ends of straight code: the machine acts on these, not a thunk ------------------------------------------------------


@dataclass(frozen=True)
class Branch:
    """Go to a label; `table` and the index in reads[0] for brx.idx."""

    target: str = ""
    table: str = ""


@dataclass(frozen=True)
class Exit:
    """The threads end (exit, or ret of a kernel); `trap` also ends the launch."""

    trap: bool = False


@dataclass(frozen=True)
class Return:
    """ret: back to the caller, or the end of the thread in a kernel."""


@dataclass(frozen=True)
class Call:
    """A call with the names of result and argument variables of the caller.

    `function` is a device function; empty for a call of the address in reads[0], which is that of one of `candidates`,
    and for one of a function that the device brings along, `builtin`.
    """

    function: str
    results: tuple[str, ...]
    arguments: tuple[str, ...]
    candidates: tuple[str, ...] = ()
    builtin: str = ""


@dataclass(frozen=True)
class Barrier:
    """bar/barrier: reads[0] is the id, reads[1] (if `counted`) the number of threads.

    `waits` is False for .arrive. `reduction` ("and", "or", "popc") reduces the predicate in the last read into writes[0].
    """

    counted: bool
    waits: bool
    reduction: str = ""
    negated: bool = False


@dataclass(frozen=True)
class WarpBarrier:
    """bar.warp.sync: reads[0] is the member mask; the named lanes may come from different instructions."""


@dataclass(frozen=True)
class ClusterBarrier:
    """barrier.cluster.arrive, or .wait if it `waits`; `relaxed` orders no accesses."""

    waits: bool
    relaxed: bool = False


@dataclass(frozen=True)
class PhaseWait:
    """mbarrier.test_wait or, `blocking`, try_wait: at the object at reads[0] + offset for the state or `parity` in reads[1]."""

    space: str
    offset: int
    parity: bool
    blocking: bool


@dataclass(frozen=True)
class Multiply:
    """wgmma.mma_async: reads are the registers of D, A (registers or one descriptor), B's descriptor, scale-d.

    D is 64 x `columns` of type `result` in `registers` registers; A and B are of type `types`, `depth` along K. `sign` is that of
    the product. `k_major`: the layouts of A and B in shared memory.
    """

    columns: int
    depth: int
    result: str
    types: tuple[str, str]
    a_in_registers: bool
    sign: int
    k_major: tuple[bool, bool]
    registers: int


@dataclass(frozen=True)
class MultiplyWait:
    """wgmma.wait_group: until at most `newest` of the warp's newest groups are pending."""

    newest: int


@dataclass(frozen=True)
class RegisterCount:
    """setmaxnreg: to `count` registers a thread; `more`: .inc, which waits until the block's pool has them."""

    count: int
    more: bool


Waits = Barrier | WarpBarrier | ClusterBarrier | PhaseWait | MultiplyWait | RegisterCount
Control = Branch | Exit | Return | Call | Multiply | Waits

Bind = Callable[[Frame, Sequence[Array], Sequence[Array]], Thunk]

WHOLE_WARP = -1
"""`Plan.collective` of an instruction that all living lanes of the warp run together (.aligned)."""


def _unbound(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
    raise AssertionError("a control instruction has no thunk")


@dataclass(frozen=True)
class Plan:
    """The execution of one instruction, independent of any launch.

    `bind(frame, out, ins)` gets the arrays of `writes` and `reads` (0-d for constants) and returns the thunk. A thunk
    reads everything before it writes, unless it is elementwise: registers may be source and destination at once.
    `mode`: the floating-point environment it needs (None: any). `collective`: None, WHOLE_WARP, or the index in
    `reads` of its member mask. `pure`: works on the arrays only, without access to lanes or memory.
    `flops` per warp count as tensor-core work. `keeps`: the first so many reads are converted into a lent buffer that
    stays valid for the next such instruction, if that reads the same registers and nobody wrote them (`Frame.kept`).
    """

    writes: tuple[Arg, ...]
    reads: tuple[Arg, ...]
    bind: Bind = _unbound
    mode: int | None = None
    collective: int | None = None
    control: Control | None = None
    pure: bool = True
    flops: int = 0
    keeps: int = 0


Decoder = Callable[[Instruction], Plan]


@dataclass(frozen=True)
class Coverage:
    """A row of the opcode table: the forms of one opcode that the machine executes."""

    opcode: str
    family: str
    forms: str


_DECODERS: dict[str, Decoder] = {}
_COVERAGE: list[Coverage] = []


def opcode(*names: str, forms: str) -> Callable[[Decoder], Decoder]:
    """Registers a decoder for opcodes. `forms` describes, in the coverage table, the forms that are executed."""

    def add(decoder: Decoder) -> Decoder:
        family = decoder.__module__.rpartition(".")[2]
        for name in names:
            assert name not in _DECODERS, name
            _DECODERS[name] = decoder
            _COVERAGE.append(Coverage(name, family, forms))
        return decoder

    return add


def coverage() -> list[Coverage]:
    """Returns every opcode that the machine executes, by family and name."""
    return sorted(_COVERAGE, key=lambda row: (row.family, row.opcode))


def known(opcode: str) -> bool:
    """True if some form of an opcode is executed."""
    return opcode in _DECODERS


def decode(instruction: Instruction) -> Plan:
    """Returns the plan of an instruction. Raises `Unsupported` if opcode, modifier or operands are not executed."""
    decoder = _DECODERS.get(instruction.opcode)
    if decoder is None:
        raise Unsupported(f"opcode {instruction.opcode} is not executed")
    try:
        return decoder(instruction)
    except PtxError as error:
        raise Unsupported(str(error)) from error
    except (ValueError, IndexError, KeyError, AttributeError) as error:
        # A decoder unpacks the operands of the forms that it knows; if they do not fit, the form is unknown.
        raise Unsupported(f"unknown operand form: {error}") from error


class Mods:
    """The modifiers of an instruction, taken one by one; a modifier that no decoder takes is unsupported."""

    def __init__(self, instruction: Instruction, *ignored: str):
        self.rest = [m for m in instruction.mods if m not in ignored]

    def flag(self, *names: str) -> bool:
        found = [m for m in self.rest if m in names]
        for name in found:
            self.rest.remove(name)
        return bool(found)

    def choice(self, names: Collection[str], default: str = "") -> str:
        for mod in self.rest:
            if mod in names:
                self.rest.remove(mod)
                return mod
        return default

    def types(self, *allowed: str) -> tuple[PtxType, ...]:
        found = [m for m in self.rest if m in TYPES]
        for name in found:
            if allowed and name not in allowed:
                raise Unsupported(f"type .{name} is not executed here")
            self.rest.remove(name)
        return tuple(TYPES[m] for m in found)

    def type(self, *allowed: str) -> PtxType:
        found = self.types(*allowed)
        if len(found) != 1:
            raise Unsupported(f"expected one type, got {len(found)}")
        return found[0]

    def done(self) -> None:
        if self.rest:
            raise Unsupported(f"modifier .{self.rest[0]} is not executed here")


def pure(
    fn: Callable[..., Thunk],
    writes: Sequence[Arg],
    reads: Sequence[Arg],
    mode: int | None = None,
    *,
    scratch: bool = False,
) -> Plan:
    """Returns a plan whose thunk is `fn(*writes, *reads)` of the arrays: arithmetic without memory or neighbours.

    With `scratch`, `fn` first gets `Frame.temp`, which lends arrays that hold nothing from one instruction to the next.
    """

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        return fn(frame.temp, *out, *ins) if scratch else fn(*out, *ins)

    return Plan(tuple(writes), tuple(reads), bind, mode)


def arg(operand: Operand, type_: PtxType) -> Arg:
    """Returns an operand seen as a PTX type. Packed halves are two elements a lane."""
    if not isinstance(operand, (Reg, Imm, Sym, Not)):
        raise Unsupported(f"operand {operand} is not executed here")
    if type_.name == "f16x2":
        return Arg(operand, np.dtype(np.float16), packed=True)
    if type_.name == "bf16x2":
        return Arg(operand, np.dtype(np.uint16), packed=True)
    if type_.name == "f32x2":
        if not isinstance(operand, Reg):
            raise Unsupported("a constant pair")
        return Arg(operand, np.dtype(np.float32), packed=True)
    return Arg(operand, type_.dtype)


def items(operand: Operand, count: int | None = None) -> tuple[Operand, ...]:
    """Returns the elements of a brace list, or the operand itself."""
    found = operand.items if isinstance(operand, (Vec, Group)) else (operand,)
    if count is not None and len(found) != count:
        raise Unsupported(f"expected {count} registers, got {len(found)}")
    return found


__all__ = [
    "SINK",
    "WHOLE_WARP",
    "Arg",
    "Barrier",
    "Bind",
    "Branch",
    "Call",
    "ClusterBarrier",
    "Control",
    "Coverage",
    "DType",
    "Exit",
    "Frame",
    "Group",
    "Imm",
    "Instruction",
    "Mem",
    "Mods",
    "Multiply",
    "MultiplyWait",
    "Not",
    "Operand",
    "Pair",
    "PhaseWait",
    "Plan",
    "Reg",
    "RegisterCount",
    "Return",
    "Sym",
    "Temp",
    "Thunk",
    "Unsupported",
    "Vec",
    "WarpBarrier",
    "arg",
    "coverage",
    "decode",
    "items",
    "opcode",
    "pure",
    "replace",
]


LOOSE = frozenset(
    {"ld", "ldu", "st", "cvt", "cvta", "atom", "red", "mma", "wgmma", "wmma", "ldmatrix", "stmatrix", "movmatrix", "call"}
)
"""Opcodes whose registers may be wider than their types, or have types of their own."""

ROUNDINGS = frozenset({"rn", "rz", "rm", "rp", "rna", "rs"})
TO_INTEGER = frozenset({"rni", "rzi", "rmi", "rpi"})
APPROXIMATE = frozenset({"approx"})
NEEDED = {
    "fma": ROUNDINGS,
    "div": ROUNDINGS | APPROXIMATE | {"full"},
    "sqrt": ROUNDINGS | APPROXIMATE,
    "rcp": ROUNDINGS | APPROXIMATE,
    **dict.fromkeys(("rsqrt", "ex2", "lg2", "sin", "cos", "tanh"), APPROXIMATE),
}
"""Modifiers, by opcode, of which a floating-point instruction must have one."""

SCOPES = frozenset({"cta", "cluster", "gpu", "sys"})
PLAIN = frozenset({"u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f16", "bf16", "f32", "f64"})


def require_legal(i: Instruction, plan: Plan) -> None:
    """Raises `Unsupported` for an instruction that ptxas refuses."""
    for arg in plan.writes:
        if not isinstance(arg.operand, Reg) or is_special(arg.operand.name):
            raise Unsupported("a result needs a register of one's own")
    if i.opcode not in LOOSE:
        for arg in (*plan.writes, *plan.reads):
            fits(i, arg)
    elif i.opcode in ("ld", "st"):
        for arg in (*plan.writes, *plan.reads):
            if isinstance(arg.operand, Reg) and arg.operand != SINK and arg.operand.type.bits < 8 * arg.dtype.itemsize:
                raise Unsupported(f"{brief(arg.operand.name)} is .{arg.operand.type.name}, too narrow for this")
    if i.predicate and i.predicate[0].type.name != "pred":
        raise Unsupported(f"{brief(i.predicate[0].name)} is no predicate")
    require_modifiers(i)


def fits(i: Instruction, arg: Arg) -> None:
    """Raises `Unsupported` for a register that is not of the instruction's type."""
    register, whole = arg.operand, bool(i.types) and i.types[-1].kind in "us"
    floating = arg.dtype.kind == "f" and arg.dtype.itemsize > 2  # halves are written as whole numbers
    if isinstance(register, Imm) and ((floating and not register.float_bits) or (whole and register.float_bits)):
        raise Unsupported("a constant of another kind than the instruction's type")
    if not isinstance(register, Reg) or register == SINK or is_special(register.name):
        return
    bits = 1 if arg.dtype.kind == "b" else 8 * arg.dtype.itemsize * (2 if arg.packed else 1)
    kinds = {register.type.kind, "f" if arg.dtype.kind == "f" else "u" if whole else "b"}
    if register.type.bits != bits or kinds >= {"f", "u"} or kinds >= {"f", "s"}:
        raise Unsupported(f"{brief(register.name)} is .{register.type.name}, which is not this instruction's type")


def require_modifiers(i: Instruction) -> None:
    mods = set(i.mods)
    floating = bool(i.types) and i.types[-1].kind == "f"
    if floating and i.opcode in NEEDED and not mods & NEEDED[i.opcode]:
        raise Unsupported(f"{i.opcode} of floating-point numbers needs one of .{', .'.join(sorted(NEEDED[i.opcode]))}")
    if not floating and i.opcode in ("mul", "mad") and not mods & {"lo", "hi", "wide"}:
        raise Unsupported(f"{i.opcode} of integers needs .lo, .hi or .wide")
    if i.opcode in ("shl", "and", "or", "xor", "not") and i.types and i.types[-1].kind not in "bp":
        raise Unsupported(f"{i.opcode} has a type of bits, not .{i.types[-1].name}")
    if i.opcode in ("setp", "set") and i.types:
        signed, wrong = {"lo", "ls", "hi", "hs"}, {"equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"}
        kind = i.types[-1].kind
        if (kind == "s" and mods & signed) or (kind != "f" and mods & wrong):
            raise Unsupported(f"this comparison is not for .{i.types[-1].name}")
    if i.opcode == "fence" and mods & {"acq_rel", "sc"} and not mods & SCOPES:
        raise Unsupported("fence needs a scope")
    if i.opcode in ("ld", "st"):
        meanings = mods & {"weak", "relaxed", "acquire", "release", "volatile", "mmio"}
        if len(meanings - {"mmio"}) > 1 or (i.opcode == "ld" and "release" in mods) or (i.opcode == "st" and "acquire" in mods):
            raise Unsupported(f"{i.opcode} with .{', .'.join(sorted(meanings))}")
        if meanings & {"relaxed", "acquire", "release"} and not mods & SCOPES:
            raise Unsupported(f"{i.opcode}.{min(meanings)} needs a scope")
    if i.opcode == "cvt":
        require_rounding(i, mods)


def require_rounding(i: Instruction, mods: set[str]) -> None:
    """Raises `Unsupported` if a conversion of plain types lacks a rounding where it may lose bits, or has one where it cannot."""
    names = [mod for mod in i.mods if mod in PLAIN]
    if len(names) != 2 or len(i.types) != 2:
        return
    to, source = i.types
    rounded, whole = bool(mods & ROUNDINGS), bool(mods & TO_INTEGER)
    if to.kind == "f":
        needed = source.kind != "f" or to.bits < source.bits or (to.bits == source.bits == 16 and to.name != source.name)
        if needed and not rounded:
            raise Unsupported(f"cvt to .{to.name} from .{source.name} needs a rounding")
        if rounded and source.kind == "f" and to.bits > source.bits:
            raise Unsupported(f"cvt to .{to.name} from .{source.name} rounds nothing")
    elif source.kind == "f" and not whole:
        raise Unsupported(f"cvt to .{to.name} from .{source.name} needs one of .{', .'.join(sorted(TO_INTEGER))}")


def require_names(program: Program, function: Function, i: Instruction, plan: Plan) -> None:
    """Raises `Unsupported` for undeclared names."""
    if isinstance(plan.control, Branch) and plan.control.target and plan.control.target not in function.labels:
        raise Unsupported(f"there is no label {brief(plan.control.target)}")
    if i.opcode == "call":
        return  # its operands are functions and prototypes, which `resolve_call` looks up
    for symbol in symbols(i.operands):
        name = symbol.name
        known = name in function.names or name in program.variables or name in function.labels or name in function.tables
        if not (known or name in program.functions or name in program.unreadable):
            raise Unsupported(f"{brief(name)} is not declared")
