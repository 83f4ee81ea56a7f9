"""The table of opcodes: each decoder turns one instruction into a `Plan`, or refuses it if the machine does not take it.

The host's floating-point environment: PTX has the rounding direction and the flushing of subnormals as instruction modifiers
(.rn/.rz/.rm/.rp, .ftz). The host's vector unit has them as control bits of the thread, and NumPy's loops obey them, so `.ftz` and
directed rounding cost nothing per lane. The bits are set through `fesetenv` of the C library, whose `fenv_t` holds them on the
platforms below; elsewhere only the default environment exists: subnormals are kept, and directed rounding is refused.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np

from ..memory.async_copies import Bulks, Copies
from ..memory.mbarriers import MBarriers
from ..memory.spaces import LaunchMemory
from ..memory.texels import Textures
from ..state.lane_sets import LaneSet
from ..text.syntax import (
    SINK,
    TYPES,
    UNDECODED,
    Array,
    Imm,
    Not,
    Operand,
    Pair,
    PtxError,
    PtxInstruction,
    PtxType,
    Reg,
    Sym,
    Unsupported,
    Vec,
    leaves,
)

Thunk = Callable[[], object]
"""A bound instruction: running it does the work for all lanes of its frame."""

DType = np.dtype[Any]


class WarpgroupUnit(Protocol):
    """The warpgroups' products in flight (`execute.warpgroups`)."""

    def fence(self, i: PtxInstruction, lanes: LaneSet) -> None:
        """Runs wgmma.fence of whole warps."""

    def commit(self, i: PtxInstruction, lanes: LaneSet) -> None:
        """Runs wgmma.commit_group of whole warps."""


class Surroundings(Protocol):
    """The machine, as an instruction sees it. `approximate`: approximate instructions have errors; `tensor_cores`: the chip
    whose sums of products they make (`decode.matrices`).
    """

    memory: LaunchMemory
    copies: Copies
    bulks: Bulks
    mbarriers: MBarriers
    textures: Textures
    approximate: bool
    tensor_cores: str | None

    @property
    def warpgroups(self) -> WarpgroupUnit: ...

    def parameter(self, symbol: Sym, offset: int, size: int) -> bytes | None:
        """Returns bytes of a kernel parameter; None if the symbol is a parameter of a call."""

    def is_call_param(self, instruction: PtxInstruction) -> bool:
        """True if a .param access of the instruction is to a variable of a call, not to a kernel parameter."""

    def clock(self) -> int:
        """Returns a count of cycles since the start."""


class Frame:
    """The `n` lanes for which instructions are bound, and arrays to work in; `lanes` are the current ones.

    `read_somewhere` are the registers that some instruction reads. `kept` is set while an instruction with `Plan.keeps` is bound:
    its converted operands are still in the lent buffer.
    """

    kept = False
    lanes: LaneSet

    def __init__(self, machine: Surroundings, n: int, read_somewhere: frozenset[str]):
        self.machine, self.n, self.read_somewhere = machine, n, read_somewhere
        self._lent: dict[tuple[Any, ...], Any] = {}

    def temp(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Lends an array that an instruction may use while it runs; the next one with the same name gets the same array."""
        return self.lend((name, shape, dtype), lambda: np.empty(shape, dtype))

    def lend(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Lends, like `temp`, a bundle of arrays and views that `make` builds."""
        found = self._lent.get(key)
        if found is None:
            found = self._lent[key] = make()
        return found


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
class FunctionCall:
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
Control = Branch | Exit | Return | FunctionCall | Multiply | Waits

Arrays = Sequence[Array]
Bind = Callable[[Frame, Arrays, Arrays], Thunk]

WHOLE_WARP = -1
"""`Plan.collective` of an instruction that all living lanes of the warp run together (.aligned)."""


def _unbound(frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
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
    `instruction`: the one that was decoded.
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
    instruction: PtxInstruction = UNDECODED

    @cached_property
    def written(self) -> list[str]:
        """Names of the registers that it writes."""
        return [a.operand.name for a in self.writes if isinstance(a.operand, Reg)]

    @cached_property
    def read(self) -> frozenset[str]:
        """Names of the registers that it reads, its predicate among them."""
        predicate = self.instruction.predicate
        return named(*(a.operand for a in self.reads), *(predicate[:1] if predicate else ()))


Plans = dict[str, list[Plan]]
"""The plans of a program's functions, by their names."""


def named(*operands: Operand) -> frozenset[str]:
    """Returns the names of the registers in operands."""
    return frozenset(leaf.name for operand in operands for leaf in leaves(operand) if isinstance(leaf, Reg))


Decoder = Callable[[PtxInstruction], Plan]


@dataclass(frozen=True)
class Coverage:
    """A row of the opcode table: the forms of one opcode that the machine executes."""

    opcode: str
    family: str
    forms: str


_DECODERS: dict[str, Decoder] = {}
_FORMS: dict[str, tuple[str, str | Callable[[], str]]] = {}


def opcode(*names: str, forms: str | Callable[[], str], family: str = "") -> Callable[[Decoder], Decoder]:
    """Registers a decoder for opcodes. `forms` describes, in the coverage table, the forms that are executed."""

    def add(decoder: Decoder) -> Decoder:
        for name in names:
            assert name not in _DECODERS, name
            _DECODERS[name] = decoder
            _FORMS[name] = family or decoder.__module__.rpartition(".")[2], forms
        return decoder

    return add


def coverage() -> list[Coverage]:
    """Returns every opcode that the machine executes, by family and name."""
    rows = [Coverage(name, family, forms if isinstance(forms, str) else forms()) for name, (family, forms) in _FORMS.items()]
    return sorted(rows, key=lambda row: (row.family, row.opcode))


def known(opcode: str) -> bool:
    """True if some form of an opcode is executed."""
    return opcode in _DECODERS


def decode(instruction: PtxInstruction) -> Plan:
    """Returns the plan of an instruction. Raises `Unsupported` if opcode, modifier or operands are not executed."""
    name = instruction.opcode
    if "async" in instruction.mods and f"{name}.async" in _DECODERS:
        name += ".async"
    decoder = _DECODERS.get(name)
    if decoder is None:
        raise Unsupported(f"opcode {instruction.opcode} is not executed")
    try:
        return replace(decoder(instruction), instruction=instruction)
    except PtxError as error:
        raise Unsupported(str(error)) from error
    except (ValueError, IndexError, KeyError, AttributeError) as error:
        # A decoder unpacks the operands of the forms that it knows; if they do not fit, the form is unknown.
        raise Unsupported(f"unknown operand form: {error}") from error


def taken(i: PtxInstruction, *groups: str, ignored: Collection[str] = ()) -> list[str]:
    """Returns the modifier that an instruction has of each group of names, "" for none; one of a group that begins with "!" must be
    there. Raises `Unsupported` for all other modifiers.
    """
    rest, found = [m for m in i.mods if m not in ignored], list[str]()
    for group in groups:
        names = group.removeprefix("!").split()
        found.append(next((m for m in rest if m in names), ""))
        if found[-1]:
            rest.remove(found[-1])
        elif group.startswith("!"):
            raise Unsupported(f"{i.opcode} needs one of .{', .'.join(names)}")
    if rest:
        raise Unsupported(f"{'type' if rest[0] in TYPES else 'modifier'} .{rest[0]} is not executed here")
    return found


ANY_TYPE = f"!{' '.join(TYPES)}"


def pure(fn: Callable[..., Thunk], writes: Sequence[Arg], reads: Sequence[Arg]) -> Plan:
    """Returns a plan whose thunk is `fn(*writes, *reads)` of the arrays: arithmetic without memory or neighbours."""
    return Plan(tuple(writes), tuple(reads), lambda frame, out, ins: fn(*out, *ins))


def act(
    run: Callable[[Frame, Arrays, Arrays], object], writes: Sequence[Arg] = (), reads: Sequence[Arg] = (), **options: Any
) -> Plan:
    """Returns the plan of an instruction whose thunk is `run(frame, out, ins)`, which may look at lanes and memory."""
    return Plan(tuple(writes), tuple(reads), lambda *bound: partial(run, *bound), pure=False, **options)


PACKED = {"f16x2": np.float16, "bf16x2": np.uint16, "f32x2": np.float32, "u16x2": np.uint16, "s16x2": np.int16}
"""Element dtypes of packed types."""


def arg(operand: Operand, type_: PtxType) -> Arg:
    """Returns an operand seen as a PTX type. Packed halves are two elements a lane."""
    if not isinstance(operand, (Reg, Imm, Sym, Not)):
        raise Unsupported(f"operand {operand} is not executed here")
    if type_.name == "f32x2" and not isinstance(operand, Reg):
        raise Unsupported("a constant pair")
    if type_.name in PACKED:
        return Arg(operand, np.dtype(PACKED[type_.name]), packed=True)
    return Arg(operand, type_.dtype)


def args(types: str, *operands: Operand) -> tuple[Arg, ...]:
    """Returns operands seen as PTX types: the name of one for all, or of one for each."""
    names = types.split() * (1 if " " in types else len(operands))
    return tuple(arg(operand, TYPES[name]) for operand, name in zip(operands, names, strict=True))


def pair(operand: Operand) -> tuple[Operand, Operand]:
    """Returns the two destinations of `a|b`, or one and none."""
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, SINK)


def items(operand: Operand, count: int | None = None) -> tuple[Operand, ...]:
    """Returns the elements of a brace list, or the operand itself."""
    found = operand.items if isinstance(operand, Vec) else (operand,)
    if count is not None and len(found) != count:
        raise Unsupported(f"expected {count} registers, got {len(found)}")
    return found


# -- the host's floating-point environment ------------------------------------------------------------------------

NEAREST, DOWN, UP, ZERO = 0, 1, 2, 3
ROUNDING = {"rn": NEAREST, "rna": NEAREST, "rm": DOWN, "rp": UP, "rz": ZERO}


def mode(rounding: int = NEAREST, flush: bool = False) -> int:
    """Returns the code of an environment: the index in `Environment.setters`."""
    return rounding * 2 + flush


KEEP = mode()
"""Round to nearest, keep subnormals: the environment that everything outside of the run loop expects."""


def _layout() -> tuple[int, int, int, tuple[int, int, int, int], int] | None:
    """Returns (offset of the control word, its bytes, flush bits, rounding bits by direction, mask) inside fenv_t."""
    machine, system = platform.machine(), platform.system()
    if system == "Linux" and machine == "x86_64":  # MXCSR: FTZ, DAZ; RC in bits 13-14
        return 28, 4, 0x8040, (0, 1 << 13, 2 << 13, 3 << 13), 0x8040 | 3 << 13
    if machine in ("aarch64", "arm64"):  # FPCR: FZ; RMode in bits 22-23 counts nearest, up, down, zero
        offset, width = (0, 4) if system == "Linux" else (8, 8)
        return offset, width, 1 << 24, (0, 2 << 22, 1 << 22, 3 << 22), 1 << 24 | 3 << 22
    return None


FLUSH = mode(NEAREST, True)
"""Round to nearest, flush subnormals: the environment of `.ftz`."""


class Environment:
    """`setters[mode]()` switches the calling thread; `native`: True if modes other than `KEEP` exist here."""

    def __init__(self) -> None:
        self.setters: dict[int, Callable[[], object]] = {KEEP: _nothing}
        self.native = False
        layout = _layout()
        if layout is None:
            return
        offset, width, flush_bits, rounding_bits, mask = layout
        libm = ctypes.CDLL(ctypes.util.find_library("m") or None)
        base = (ctypes.c_ubyte * 64)()
        libm.fegetenv(base)
        control = int.from_bytes(bytes(base)[offset : offset + width], "little") & ~mask
        setters: dict[int, Callable[[], object]] = {}
        for rounding in (NEAREST, DOWN, UP, ZERO):
            for flush in (False, True):
                env = (ctypes.c_ubyte * 64).from_buffer_copy(base)
                word = control | rounding_bits[rounding] | (flush_bits if flush else 0)
                env[offset : offset + width] = list(word.to_bytes(width, "little"))
                setters[mode(rounding, flush)] = partial(libm.fesetenv, env)
        tiny = np.full(8, 1e-39, np.float32)
        setters[FLUSH]()
        self.native = not (tiny * np.float32(1)).any()
        setters[KEEP]()
        if self.native:
            self.setters = setters

    def setter(self, code: int) -> Callable[[], object]:
        """Returns the switch to environment `code`; without host support flushing is dropped, directed rounding refused."""
        if code in self.setters:
            return self.setters[code]
        if code == FLUSH:
            return _nothing
        raise PtxError("directed rounding (.rz, .rm, .rp) needs Linux on x86-64, or an ARM64 host")


def _nothing() -> None:
    pass


ENVIRONMENT = Environment()
