"""The text of LLVM's functions for compiled launches (`execute.compiled`): runs of arithmetic, a load or a store.

Arithmetic is made from the rows of the opcodes (`decode.table_rows`), as NumPy's evaluation is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

import numpy as np

from ..decode.access import address_arg, moved
from ..decode.code import Code
from ..decode.registry import KEEP, Arg, Plan
from ..decode.table_rows import VIEWS, WRITERS, Expression, Formula, OperandName, PrimitiveCall, function, result_dtype
from ..order.shadow import WIDEST
from ..state.lane_sets import WARP, bank_columns
from ..text.syntax import SINK, TYPES, Imm, Operand, PtxInstruction, PtxType, Reg, Sym
from .registers import RegisterFrame, immediate

FIRST, LAST, HOST, SHADOWED_FROM, SHADOW, STATE, RELATIVE, DISTINCT, LIST, NUMBER = range(10)
"""Places in the table of an access: the first lane's smallest and largest address, distance from addresses to host memory, address
of granule 0 of the shadow, the shadow (0: nobody writes there), distance to the states of bytes (0: none), relative addresses, the
number and the list of distinct ones (distance from the first address, position of the last lane, crowd of the others), the
instruction's number.
"""

STREWN, LOWEST, HIGHEST, ADDRESSES, ACTIVE, STREWN_LIST = range(10, 16)
"""The same for accesses without a pattern: they are expected (1 or 0), the smallest and largest address of any lane, the addresses
(-1: the lane does not take part), the number of lanes that take part, and a list as above with one for each of these.
"""

WARPS, LANES, PASSES, IDEAL, SECTORS, UNIQUE = range(16, 22)
"""Counts of those: warps, lanes, wavefronts, those without bank conflicts, sectors, distinct addresses."""

COUNTS, PHASES = 22, 32
"""Executions with the pattern, by `first % PHASES`."""

WROTE, READ, UPDATED, BY = range(4)
"""Words of a granule's row in the shadow: the last writer, reader and atomic access as tags, and 16 bits for the number of the
instruction of each of them. A tag is block + 1, epoch of the block (the number of its barriers), crowd and thread. The last two
words are there only if something needs them.
"""

KINDS = {"ld": READ, "st": WROTE, "atom": UPDATED, "red": UPDATED}
CONFLICTS = {READ: (WROTE, UPDATED), WROTE: (WROTE, READ, UPDATED), UPDATED: (WROTE, READ)}
"""The accesses that an access must be ordered behind, by kind."""

ATOMICS = {
    "add": "add",
    "min": "minimum",
    "max": "maximum",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    **dict.fromkeys(("exch", "cas", "inc", "dec"), ""),
}
"""NumPy's functions of atomic operations; those without one are written here."""

THREAD_BITS, EPOCH_BITS = 12, 20
"""A tag's lower bits; the topmost of THREAD_BITS are crowds."""
WARP_CROWD, BLOCK_CROWD, GRID_CROWD = 1 << 10, 1 << 11, -(1 << 63)
"""Other lanes that a reader's tag stands for: of its warp, of its block, or of other blocks."""
CROWDS = GRID_CROWD | BLOCK_CROWD | WARP_CROWD


class NoCode(Exception):
    """Raised for an instruction that has no translation."""


def type_name(dtype: np.dtype[Any]) -> str:
    if dtype.kind == "b":
        return "i1"
    if dtype.kind == "f":
        if dtype.itemsize == 2:
            raise NoCode
        return "float" if dtype.itemsize == 4 else "double"
    return f"i{8 * dtype.itemsize}"


Value = tuple[str, np.dtype[Any]]


class ShadowRow(NamedTuple):
    """The shadow of a kernel: bytes of a granule of global and of shared memory; its parts that are kept."""

    granule: int
    shared_granule: int
    atomics: bool
    numbers: bool

    @classmethod
    def of(cls, code: Code, numbers: bool) -> ShadowRow:
        """`numbers`: the launch is one of a history, in which later ones ask for the instructions."""
        sharing = code.sharing
        return cls(min([WIDEST, *sharing.global_granules.values()]), sharing.shared_granule, sharing.atomics, numbers)

    @property
    def words(self) -> int:
        return 4 if self.atomics or self.numbers else 2


class TextLines:
    """Lines of a function's text."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names = 0

    def add(self, text: str) -> str:
        self.names += 1
        self.lines.append(f"  %v{self.names} = {text}")
        return f"%v{self.names}"

    def say(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def label(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names}"

    def begin(self, label: str) -> None:
        self.lines.append(f"{label}:")

    def field(self, table: str, place: str | int) -> str:
        return self.add(f"getelementptr i64, ptr {table}, i64 {place}")

    def load(self, place: str) -> str:
        return self.add(f"load i64, ptr {place}")

    def change(self, place: str, how: str, value: str) -> None:
        """Applies an operation to a number in memory."""
        old = self.load(place)
        self.say(f"store i64 {self.add(f'{how} i64 {old}, {value}')}, ptr {place}")

    @contextmanager
    def when(self, bit: str) -> Iterator[None]:
        """Runs what is added if a bit is set."""
        then, after = self.label("then"), self.label("after")
        self.say(f"br i1 {bit}, label %{then}, label %{after}")
        self.begin(then)
        yield
        self.say(f"br label %{after}")
        self.begin(after)

    @contextmanager
    def times(self, index: str, count: str) -> Iterator[str]:
        """Runs what is added so many times; the turn's number is in memory at `index`, too."""
        head, body, after = self.label("head"), self.label("body"), self.label("after")
        self.say(f"store i64 0, ptr {index}")
        self.say(f"br label %{head}")
        self.begin(head)
        turn = self.load(index)
        self.say(f"br i1 {self.add(f'icmp ult i64 {turn}, {count}')}, label %{body}, label %{after}")
        self.begin(body)
        yield turn
        self.change(index, "add", "1")
        self.say(f"br label %{head}")
        self.begin(after)


class StrewnText(TextLines):
    """The text of a function, `i32 @stretch(n, table of an access, tags, shared bases)`, that checks an access without a pattern.

    It counts it, and lists the lanes that take part. Not 0: some address is out of bounds or not aligned.
    """

    def __init__(self, space: str, size: int):
        super().__init__()
        self.shared, self.size = space == "shared", size
        self.columns = bank_columns(size)
        self.list()
        self.count()

    def of(self, array: str, place: str) -> str:
        return self.load(self.field(array, place))

    def list(self) -> None:
        low, high, addresses, found = (self.of("%table", str(k)) for k in (LOWEST, HIGHEST, ADDRESSES, STREWN_LIST))
        self.addresses, self.found = (self.add(f"inttoptr i64 {x} to ptr") for x in (addresses, found))
        with self.times("%i", "%n") as lane:
            at = self.of(self.addresses, lane)
            with self.when(self.add(f"icmp ne i64 {at}, -1")):
                bad = [f"icmp slt i64 {at}, {low}", f"icmp sgt i64 {at}, {high}"]
                bad.append(f"icmp ne i64 {self.add(f'and i64 {at}, {self.size - 1}')}, 0")
                for test in bad:
                    self.change("%bad", "or", self.add(f"zext i1 {self.add(test)} to i64"))
                if self.shared:
                    at = self.add(f"add i64 {at}, {self.of('%bases', lane)}")
                row = self.add(f"mul i64 {self.load('%m')}, 3")
                for k, value in enumerate((at, lane, "0")):
                    self.say(f"store i64 {value}, ptr {self.field(self.found, self.add(f'add i64 {row}, {k}'))}")
                self.change("%m", "add", "1")
        fine = self.label("fine")
        none = self.add(f"icmp eq i64 {self.load('%bad')}, 0")
        self.say(f"br i1 {none}, label %{fine}, label %fail")
        self.begin(fine)

    def count(self) -> None:
        active = self.load("%m")
        self.say(f"store i64 {active}, ptr {self.field('%table', ACTIVE)}")
        self.change(self.field("%table", LANES), "add", active)
        # Lanes that go together: of a warp, or of a turn at the banks of shared memory.
        together = self.columns.bit_length() - 1 if self.shared else WARP.bit_length() - 1
        with self.times("%i", active) as number:
            lane = self.of(self.found, self.add(f"add i64 {self.add(f'mul i64 {number}, 3')}, 1"))
            tag, at = self.of("%tags", lane), self.of(self.addresses, lane)
            self.tell_apart(tag, 5, "%warp", WARPS)
            group = self.tell_apart(tag, together, "%group", IDEAL)
            with self.when(group):
                self.say("store i64 0, ptr %k")
                self.say("store i64 0, ptr %most")
                self.say("call void @llvm.memset.p0.i64(ptr %used, i8 0, i64 256, i1 false)")
            others = self.load("%k")
            unit = self.add(f"lshr i64 {at}, {(max(self.size, 4) if self.shared else 1).bit_length() - 1}")
            sector = self.add(f"lshr i64 {at}, 5")
            self.say("store i64 1, ptr %new")
            self.say("store i64 1, ptr %fresh")
            with self.times("%j", others) as other:
                for array, mine, bit in (("%units", unit, "%new"), ("%sectors", sector, "%fresh")):
                    differ = self.add(f"icmp ne i64 {self.of(array, other)}, {mine}")
                    self.change(bit, "and", self.add(f"zext i1 {differ} to i64"))
            self.say(f"store i64 {unit}, ptr {self.field('%units', others)}")
            self.say(f"store i64 {sector}, ptr {self.field('%sectors', others)}")
            self.change("%k", "add", "1")
            new = self.load("%new")
            self.change(self.field("%table", UNIQUE), "add", new)
            self.change(self.field("%table", SECTORS), "add", self.load("%fresh"))
            column = self.field("%used", self.add(f"and i64 {unit}, {self.columns - 1}"))
            self.change(column, "add", new)
            # The wavefronts of a group are those of its fullest bank.
            most, mine = self.load("%most"), self.load(column)
            more = self.add(f"icmp ugt i64 {mine}, {most}")
            with self.when(more):
                self.say(f"store i64 {mine}, ptr %most")
                self.change(self.field("%table", PASSES), "add", "1")

    def tell_apart(self, tag: str, shift: int, last: str, counter: int) -> str:
        """Returns a bit: the tag's lanes are not those of the last tag. Counts them."""
        key = self.add(f"lshr i64 {tag}, {shift}")
        differ = self.add(f"icmp ne i64 {key}, {self.load(last)}")
        self.say(f"store i64 {key}, ptr {last}")
        self.change(self.field("%table", counter), "add", self.add(f"zext i1 {differ} to i64"))
        return differ

    def text(self) -> str:
        numbers = ["i", "j", "k", "m", "bad", "warp", "group", "new", "fresh", "most"]
        slots = "\n".join([*(f"  %{name} = alloca i64\n  store i64 0, ptr %{name}" for name in numbers)])
        arrays = "\n".join(f"  %{name} = alloca i64, i64 32" for name in ("units", "sectors", "used"))
        body = "\n".join(self.lines)
        return f"""
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
define i32 @stretch(i64 %n, ptr %table, ptr %tags, ptr %bases) {{
start:
{slots}
{arrays}
{body}
  ret i32 0
fail:
  ret i32 1
}}
"""


def target(i: PtxInstruction) -> tuple[str, PtxType, tuple[Operand, ...], Arg, int]:
    """Returns space, type, registers, base and offset of a load, a store, or an atomic access without a vector."""
    if i.opcode not in ("atom", "red"):
        return moved(i, *(i.operands[:2] if i.opcode == "ld" else i.operands[1::-1]))
    space = next((mod.partition("::")[0] for mod in i.mods if mod.partition("::")[0] in ("global", "shared")), "generic")
    returns = i.opcode == "atom"
    return space, i.type, (i.operands[0] if returns else SINK,), *address_arg(i.operands[int(returns)], space)


class FunctionText(TextLines):
    """The text of one function, `i32 @stretch(n, table, tags, shared bases, counts of lanes that are off)`; not 0: it gave up."""

    def __init__(self, frame: RegisterFrame, row: ShadowRow):
        super().__init__()
        self.frame = frame
        self.code = frame.code
        self.shadow_row = row
        self.table: list[tuple[str, Any]] = []
        """The kinds and keys of the table's pointers and numbers."""
        self.values: dict[tuple[int, int], str] = {}
        self.dirty: set[tuple[int, int]] = set()
        self.inside = False
        self.off: list[PtxInstruction] = []
        self.accessed: PtxInstruction | None = None

    def entry(self, kind: str, key: Any) -> int:
        """Returns the place in the table of a row, a number or an access."""
        if (kind, key) not in self.table:
            self.table.append((kind, key))
        return self.table.index((kind, key))

    def loaded(self, kind: str, key: Any) -> str:
        """Loads an entry of the table."""
        at = self.add(f"getelementptr i64, ptr %table, i64 {self.entry(kind, key)}")
        return self.add(f"load i64, ptr {at}, !invariant.load !0")

    def flag(self, bit: str) -> None:
        """Gives up later if a bit is set."""
        self.change("%bad", "or", self.add(f"zext i1 {bit} to i64"))

    # -- loops ----------------------------------------------------------------------------------------------------------

    def open(self, count: str = "%n") -> None:
        """Begins a loop over the lanes, or so many times."""
        if self.inside:
            return
        self.inside, self.count = True, count
        self.loop, self.exit = self.label("loop"), self.label("after")
        self.say("store i64 0, ptr %index")
        self.say(f"br label %{self.loop}")
        self.begin(self.loop)
        self.lane = self.add("load i64, ptr %index")
        self.values, self.dirty = {}, set()

    def close(self, parallel: bool = True) -> None:
        """Ends it, and stores the registers that it changed."""
        if not self.inside:
            return
        for width, row in sorted(self.dirty):
            self.say(
                f"store {self.storage(width)} {self.values[width, row]}, ptr {self.place(width, row)}{', !llvm.access.group !2'}"
            )
        following = self.add(f"add i64 {self.lane}, 1")
        self.say(f"store i64 {following}, ptr %index")
        again = self.add(f"icmp ult i64 {following}, {self.count}")
        self.say(f"br i1 {again}, label %{self.loop}, label %{self.exit}" + (", !llvm.loop !3" if parallel else ""))
        self.begin(self.exit)
        self.inside = False

    @staticmethod
    def storage(width: int) -> str:
        return f"i{max(width, 8)}"

    def place(self, width: int, row: int) -> str:
        base = self.add(f"inttoptr i64 {self.loaded('row', (width, row))} to ptr")
        return self.add(f"getelementptr {self.storage(width)}, ptr {base}, i64 {self.lane}")

    def row(self, slot: tuple[int, int]) -> str:
        """Returns the bits of a row of the register files."""
        if slot not in self.values:
            self.values[slot] = self.add(f"load {self.storage(slot[0])}, ptr {self.place(*slot)}, !llvm.access.group !2")
        return self.values[slot]

    # -- operands -------------------------------------------------------------------------------------------------------

    def read(self, arg: Arg) -> Value:
        operand, dtype = arg.operand, arg.dtype
        type_name(dtype)
        if arg.packed:
            raise NoCode
        if isinstance(operand, Reg) and operand.name in self.code.slots:
            slot = self.code.slots[operand.name]
            if 8 * dtype.itemsize > max(slot[0], 8):
                raise NoCode
            bits, name = self.row(slot), self.storage(slot[0])
            return self.seen(self.resized(bits, name, f"i{8 * dtype.itemsize}", False), dtype), dtype
        if isinstance(operand, Imm):
            raw = immediate(operand, dtype)
            bits = str(int(raw.view(f"u{dtype.itemsize}") if dtype.kind != "b" else raw))
        elif isinstance(operand, (Sym, Reg)) and not (isinstance(operand, Reg) and operand == SINK):
            wide = self.loaded("constant", (operand, dtype))
            bits = self.resized(wide, "i64", f"i{8 * dtype.itemsize}", False)
        else:
            raise NoCode
        return self.seen(bits, dtype), dtype

    def seen(self, bits: str, dtype: np.dtype[Any]) -> str:
        """Returns bits as a value of a dtype."""
        if dtype.kind == "b":
            return self.add(f"icmp ne i8 {bits}, 0")
        return self.add(f"bitcast i{8 * dtype.itemsize} {bits} to {type_name(dtype)}") if dtype.kind == "f" else bits

    def resized(self, bits: str, of: str, to: str, signed: bool) -> str:
        if of == to:
            return bits
        wider = int(to[1:]) > int(of[1:])
        return self.add(f"{('sext' if signed else 'zext') if wider else 'trunc'} {of} {bits} to {to}")

    def write(self, arg: Arg, value: Value, mask: str | None) -> None:
        """Writes a value of the operand's dtype to its register, where a mask holds."""
        name, dtype = value
        if not isinstance(arg.operand, Reg) or arg.packed or arg.dtype != dtype:
            raise NoCode
        if arg.operand.name == SINK.name:
            return
        slot = self.code.slots[arg.operand.name]
        bits = f"i{8 * dtype.itemsize}"
        if dtype.kind == "b":
            name = self.add(f"zext i1 {name} to i8")
        elif dtype.kind == "f":
            name = self.add(f"bitcast {type_name(dtype)} {name} to {bits}")
        whole = self.storage(slot[0])
        if bits != whole:
            old = self.row(slot)
            kept = self.add(f"and {whole} {old}, {~((1 << 8 * dtype.itemsize) - 1)}")
            name = self.add(f"or {whole} {kept}, {self.resized(name, bits, whole, False)}")
        if mask is not None:
            name = self.add(f"select i1 {mask}, {whole} {name}, {whole} {self.row(slot)}")
        self.values[slot] = name
        self.dirty.add(slot)

    # -- expressions ----------------------------------------------------------------------------------------------------

    def arithmetic(self, plan: Plan, instruction: PtxInstruction) -> None:
        """Adds an instruction of a row. Raises `NoCode`."""
        formula = getattr(plan.bind, "__self__", None)
        if not isinstance(formula, Formula) or plan.mode not in (None, KEEP) or self.code.base_mode != KEEP:
            raise NoCode
        self.open()
        operands = {name: self.read(a) for name, a in zip(formula.reads, plan.reads, strict=True)}
        self.known: dict[PrimitiveCall, Value] = {}
        found = [self.cast(self.value(e, operands), to.dtype) for e, to in zip(formula.values, plan.writes, strict=True)]
        mask = None
        if instruction.predicate is not None:
            mask = self.predicate(instruction)
            self.count_off(mask, instruction)
        for to, value in zip(plan.writes, found, strict=True):
            self.write(to, value, mask)

    def predicate(self, instruction: PtxInstruction) -> str:
        assert instruction.predicate is not None
        register, negated = instruction.predicate
        holds, _ = self.read(Arg(register, np.dtype(bool)))
        return self.add(f"xor i1 {holds}, true") if negated else holds

    def count_off(self, mask: str, instruction: PtxInstruction) -> None:
        at = self.add(f"getelementptr i64, ptr %offs, i64 {len(self.off)}")
        self.off.append(instruction)
        old = self.add(f"load i64, ptr {at}, !llvm.access.group !2")
        off = self.add(f"zext i1 {self.add(f'xor i1 {mask}, true')} to i64")
        self.say(f"store i64 {self.add(f'add i64 {old}, {off}')}, ptr {at}")

    def value(self, e: Expression, operands: dict[str, Value]) -> Value:
        if isinstance(e, OperandName):
            if e.name not in operands:
                raise NoCode
            return operands[e.name]
        if not isinstance(e, PrimitiveCall):
            raise NoCode
        if e not in self.known:
            self.known[e] = self.applied(e, operands)
        return self.known[e]

    def applied(self, e: PrimitiveCall, operands: dict[str, Value]) -> Value:
        name = e.primitive
        if name in TYPES:
            kind = TYPES[name]
            if (kind.kind == "f") != (kind.dtype.kind == "f") or isinstance(e.arguments[0], int | float | str):
                raise NoCode
            return self.cast(self.value(e.arguments[0], operands), kind.dtype)
        if (name == "fused_f32" and e.arguments[3] == 0) or name == "fused_f64":
            return self.fused([self.value(a, operands) for a in e.arguments[:3]])
        if name == "extreme":
            a, b = (self.value(x, operands) for x in e.arguments[:2])
            return self.extreme(a, b, str(e.arguments[2]))
        if name == "select":
            a, b, p = (self.value(x, operands) for x in e.arguments)
            if a[1] != b[1] or p[1].kind != "b":
                raise NoCode
            of = type_name(a[1])
            return self.add(f"select i1 {p[0]}, {of} {a[0]}, {of} {b[0]}"), a[1]
        if name in VIEWS or name in WRITERS or not isinstance(function(name), np.ufunc):
            raise NoCode
        found = [None if isinstance(a, int | float) else self.value(a, operands) for a in e.arguments]
        own = next((x[1] for x in found if x is not None), None)
        if own is None or any(x is not None and x[1] != own for x in found):
            raise NoCode
        inputs = [self.literal(a, own) if x is None else x[0] for x, a in zip(found, e.arguments, strict=True)]
        return self.ufunc(name, inputs, own), result_dtype(name, *[own] * len(inputs))

    def literal(self, value: Any, dtype: np.dtype[Any]) -> str:
        if dtype.kind == "f":
            as_double = np.array(np.array(value, dtype), np.float64).view(np.uint64)
            return f"0x{int(as_double):016X}"
        if dtype.kind == "b":
            raise NoCode
        try:
            return str(int(np.array(value, dtype)))
        except OverflowError:
            raise NoCode from None

    def checked(self, name: str, dtype: np.dtype[Any]) -> str:
        """Gives up if a result is NaN: its payload depends on the order of operands."""
        self.flag(self.add(f"fcmp uno {type_name(dtype)} {name}, {name}"))
        return name

    def fused(self, inputs: list[Value]) -> Value:
        dtype = inputs[0][1]
        of = type_name(dtype)
        if dtype.kind != "f" or any(x[1] != dtype for x in inputs):
            raise NoCode
        listed = ", ".join(f"{of} {x[0]}" for x in inputs)
        return self.checked(self.add(f"call {of} @llvm.fma.f{8 * dtype.itemsize}({listed})"), dtype), dtype

    def extreme(self, a: Value, b: Value, name: str) -> Value:
        """Returns the least or greatest number; of zeros, -0 is the lesser."""
        dtype = a[1]
        if dtype.kind != "f" or b[1] != dtype or name not in ("fmin", "fmax", "minimum", "maximum"):
            raise NoCode
        of, bits = type_name(dtype), f"i{8 * dtype.itemsize}"
        x, y = self.checked(a[0], dtype), self.checked(b[0], dtype)
        raw = [self.add(f"bitcast {of} {z} to {bits}") for z in (x, y)]
        both = self.add(f"{'and' if 'max' in name else 'or'} {bits} {raw[0]}, {raw[1]}")
        more = self.add(f"fcmp {'ogt' if 'max' in name else 'olt'} {of} {x}, {y}")
        one = self.add(f"select i1 {more}, {bits} {raw[0]}, {bits} {raw[1]}")
        equal = self.add(f"fcmp oeq {of} {x}, {y}")
        return self.add(f"bitcast {bits} {self.add(f'select i1 {equal}, {bits} {both}, {bits} {one}')} to {of}"), dtype

    def ufunc(self, name: str, x: list[str], dtype: np.dtype[Any]) -> str:
        """Adds an instruction with the effect of one of NumPy's functions on operands of one dtype."""
        of, kind = type_name(dtype), dtype.kind
        plain = {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "div"}
        logic = {"bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor"}
        compared = {"equal": "eq", "not_equal": "ne", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"}
        if name in plain and kind == "f":
            return self.checked(self.add(f"f{plain[name]} {of} {x[0]}, {x[1]}"), dtype)
        if name in plain and kind in "iu" and name != "divide":
            return self.add(f"{plain[name]} {of} {x[0]}, {x[1]}")
        if name == "sqrt" and kind == "f":
            return self.checked(self.add(f"call {of} @llvm.sqrt.f{8 * dtype.itemsize}({of} {x[0]})"), dtype)
        if name == "negative" and kind in "fiu":
            return self.add(f"fneg {of} {x[0]}" if kind == "f" else f"sub {of} 0, {x[0]}")
        if name == "absolute" and kind == "f":
            return self.add(f"call {of} @llvm.fabs.f{8 * dtype.itemsize}({of} {x[0]})")
        if name in logic and kind in "iub":
            return self.add(f"{logic[name]} {of} {x[0]}, {x[1]}")
        if name == "invert" and kind in "iub":
            return self.add(f"xor {of} {x[0]}, {'true' if kind == 'b' else -1}")
        if name in compared and kind in "iuf":
            test = compared[name]
            sign = "" if test in ("eq", "ne") else "u" if kind == "u" else "s"
            if kind == "f":
                return self.add(f"fcmp {'une' if test == 'ne' else 'o' + test} {of} {x[0]}, {x[1]}")
            return self.add(f"icmp {sign}{test} {of} {x[0]}, {x[1]}")
        if name in ("minimum", "maximum") and kind in "iu":
            test = ("s" if kind == "i" else "u") + ("lt" if name == "minimum" else "gt")
            return self.add(f"select i1 {self.add(f'icmp {test} {of} {x[0]}, {x[1]}')}, {of} {x[0]}, {of} {x[1]}")
        if name in ("left_shift", "right_shift") and kind in "iu":
            bits = 8 * dtype.itemsize
            fits = self.add(f"icmp ult {of} {x[1]}, {bits}")
            amount = self.add(f"select i1 {fits}, {of} {x[1]}, {of} 0")
            shift = "shl" if name == "left_shift" else "ashr" if kind == "i" else "lshr"
            full = self.add(f"ashr {of} {x[0]}, {bits - 1}") if shift == "ashr" else "0"
            return self.add(f"select i1 {fits}, {of} {self.add(f'{shift} {of} {x[0]}, {amount}')}, {of} {full}")
        raise NoCode

    def cast(self, value: Value, to: np.dtype[Any]) -> Value:
        """Returns a value converted as NumPy does; to integers from floating-point numbers it is undefined there for some."""
        name, dtype = value
        if dtype == to:
            return value
        of, target = type_name(dtype), type_name(to)
        if dtype.kind == "f" and to.kind == "f":
            return self.checked(self.add(f"{'fpext' if to.itemsize == 8 else 'fptrunc'} {of} {name} to {target}"), to), to
        if to.kind == "f":
            return self.add(f"{'sitofp' if dtype.kind == 'i' else 'uitofp'} {of} {name} to {target}"), to
        if dtype.kind == "f" or to.kind == "b":
            raise NoCode
        return self.resized(name, of, target, dtype.kind == "i"), to

    # -- memory ---------------------------------------------------------------------------------------------------------

    def followed(self, plan: Plan, i: PtxInstruction) -> FunctionText:
        """Returns the function with an instruction of a row behind it. Raises `NoCode`, and is as it was."""
        longer = copy(self)
        for name in ("lines", "table", "values", "dirty", "off"):
            setattr(longer, name, getattr(self, name).copy())
        longer.arithmetic(plan, i)
        return longer

    def access(self, plan: Plan, i: PtxInstruction) -> None:
        """Adds a load, store or atomic access of global or shared memory."""
        space, type_, registers, base, offset = target(i)
        size = len(registers) * type_.bytes
        self.close()
        table = self.add(f"inttoptr i64 {self.loaded('access', None)} to ptr")
        check, strewn, located, hit, go, done = map(self.label, ("check", "strewn", "located", "hit", "go", "done"))

        def called(what: int) -> str:
            """Calls Python's side of the access: to resolve it (0), or to find the memory of strewn addresses (1)."""
            resolve = self.add(f"inttoptr i64 {self.loaded('resolve', None)} to ptr")
            return self.add(f"call i32 {resolve}(i64 {what})")

        def address() -> str:
            found, dtype = self.read(base)
            bits = type_name(dtype)
            delta = self.resized(self.loaded("number", offset & ((1 << 8 * dtype.itemsize) - 1)), "i64", bits, False)
            return self.resized(self.add(f"add {bits} {found}, {delta}"), bits, "i64", False)

        if i.predicate is None:
            self.say(f"br label %{check}")
        else:
            self.off_or_on(i, check, strewn, done)
        # The first lane's address, and whether the others are where they were last time.
        self.begin(check)
        relative = self.add(f"inttoptr i64 {self.load(self.field(table, RELATIVE))} to ptr")
        self.lane, self.values, self.dirty = "0", {}, set()
        first = address()
        self.say(f"store i64 {first}, ptr %first")
        self.say("store i64 0, ptr %moved")
        self.open()
        apart = self.add(f"sub i64 {address()}, {first}")
        known = self.add(f"load i64, ptr {self.add(f'getelementptr i64, ptr {relative}, i64 {self.lane}')}, !llvm.access.group !2")
        self.change("%moved", "or", self.add(f"xor i64 {apart}, {known}"))
        self.close()
        low, high = (self.load(self.field(table, k)) for k in (FIRST, LAST))
        wrong = [
            self.add(f"icmp ne i64 {self.load('%moved')}, 0"),
            self.add(f"icmp slt i64 {first}, {low}"),
            self.add(f"icmp sgt i64 {first}, {high}"),
            self.add(f"icmp ne i64 {self.add(f'and i64 {first}, {size - 1}')}, 0"),
        ]
        for one in wrong[1:]:
            wrong[0] = self.add(f"or i1 {wrong[0]}, {one}")
        miss, resolve, asked = self.label("miss"), self.label("resolve"), self.label("asked")
        self.say(f"br i1 {wrong[0]}, label %{miss}, label %{hit}")
        self.begin(miss)
        expected = self.load(self.field(table, STREWN))
        self.say(f"br i1 {self.add(f'icmp ne i64 {expected}, 0')}, label %{strewn}, label %{resolve}")
        self.begin(resolve)
        answer = called(0)
        self.say(f"br i1 {self.add(f'icmp eq i32 {answer}, 0')}, label %{hit}, label %{asked}")
        self.begin(asked)
        self.say(f"br i1 {self.add(f'icmp eq i32 {answer}, 2')}, label %{strewn}, label %fail")

        self.begin(hit)
        phase = self.add(f"and i64 {first}, {PHASES - 1}")
        self.change(self.field(table, self.add(f"add i64 {phase}, {COUNTS}")), "add", "1")
        for field, kept in ((DISTINCT, "%count"), (LIST, "%list")):
            self.say(f"store i64 {self.load(self.field(table, field))}, ptr {kept}")
        self.say(f"br label %{go}")

        # Addresses anywhere: each lane's, and -1 where the predicate does not hold.
        self.begin(strewn)
        places = self.add(f"inttoptr i64 {self.load(self.field(table, ADDRESSES))} to ptr")
        self.open()
        at = address()
        if i.predicate is not None:
            at = self.add(f"select i1 {self.predicate(i)}, i64 {at}, i64 -1")
        self.say(f"store i64 {at}, ptr {self.field(places, self.lane)}, !llvm.access.group !2")
        self.close()

        def listed(fine: str, else_: str) -> None:
            function = self.add(f"inttoptr i64 {self.loaded('strewn', (space, size))} to ptr")
            failed = self.add(f"call i32 {function}(i64 %n, ptr {table}, ptr %tags, ptr %bases)")
            self.say(f"br i1 {self.add(f'icmp eq i32 {failed}, 0')}, label %{fine}, label %{else_}")

        elsewhere, again = self.label("elsewhere"), self.label("again")
        listed(located, elsewhere)
        self.begin(elsewhere)
        self.say(f"br i1 {self.add(f'icmp eq i32 {called(1)}, 0')}, label %{again}, label %fail")
        self.begin(again)
        listed(located, "fail")
        self.begin(located)
        self.say("store i64 0, ptr %first")
        for field, kept in ((ACTIVE, "%count"), (STREWN_LIST, "%list")):
            self.say(f"store i64 {self.load(self.field(table, field))}, ptr {kept}")
        self.say(f"br label %{go}")

        self.begin(go)
        first, count = self.load("%first"), self.load("%count")
        wanted = HOST, SHADOWED_FROM, SHADOW, STATE, NUMBER
        host, origin, shadow, state, number = (self.load(self.field(table, k)) for k in wanted)
        entries = self.add(f"inttoptr i64 {self.load('%list')} to ptr")
        alone = self.label("alone")
        if space == "global":
            followed = self.label("followed")
            nothing = self.add(f"icmp eq i64 {self.add(f'or i64 {shadow}, {state}')}, 0")
            self.say(f"br i1 {nothing}, label %{alone}, label %{followed}")
            self.begin(followed)
        self.open(count)
        start = self.add(f"mul i64 {self.lane}, 3")
        apart, lane, crowd = (self.load(self.field(entries, self.add(f"add i64 {start}, {k}"))) for k in range(3))
        at = self.add(f"add i64 {first}, {apart}")
        tag = self.load(self.field("%tags", lane))
        granule = self.shadow_row.shared_granule if space == "shared" else self.shadow_row.granule
        row = self.add(f"lshr i64 {self.add(f'sub i64 {at}, {origin}')}, {granule.bit_length() - 1}")
        passed = self.label("passed")
        if space == "global":
            noted = self.label("noted")
            self.say(f"br i1 {self.add(f'icmp eq i64 {shadow}, 0')}, label %{passed}, label %{noted}")
            self.begin(noted)
        for k in range(max(1, size // granule)):
            which = number if space == "global" else ""
            self.shadowed(shadow, self.add(f"add i64 {row}, {k}"), tag, crowd, KINDS[i.opcode], which)
        # Only tensors that were given with their contents have no states.
        if space == "global":
            self.say(f"br label %{passed}")
            self.begin(passed)
            known, stated = self.label("known"), self.label("stated")
            self.say(f"br i1 {self.add(f'icmp eq i64 {state}, 0')}, label %{known}, label %{stated}")
            self.begin(stated)
        there = self.add(f"inttoptr i64 {self.add(f'add i64 {at}, {state}')} to ptr")
        if i.opcode != "st":
            self.flag(self.add(f"icmp ne i{8 * size} {self.add(f'load i{8 * size}, ptr {there}, align 1')}, 0"))
        if i.opcode != "ld":
            self.say(f"store i{8 * size} 0, ptr {there}, align 1")
        if space == "global":
            self.say(f"br label %{known}")
            self.begin(known)
        self.close(parallel=False)
        if space == "global":
            self.say(f"br label %{alone}")
            self.begin(alone)
        self.open()
        at = address()
        if space == "shared":
            block = self.add(f"load i64, ptr {self.field('%bases', self.lane)}, !llvm.access.group !2")
            at = self.add(f"add i64 {at}, {block}")
        source, mask = self.add(f"inttoptr i64 {self.add(f'add i64 {at}, {host}')} to ptr"), None
        if i.predicate is not None:
            mask = self.predicate(i)
            self.count_off(mask, i)
            source = self.add(f"select i1 {mask}, ptr {source}, ptr %nowhere")
        if i.opcode in ("atom", "red"):
            self.update(plan, i, type_, source, mask)
        else:
            self.move(plan, i, type_, registers, source, mask)
        self.close(parallel=i.opcode in ("ld", "st"))
        self.accessed = i
        self.say(f"br label %{done}")
        self.begin(done)

    def move(
        self, plan: Plan, i: PtxInstruction, type_: PtxType, registers: tuple[Operand, ...], source: str, mask: str | None
    ) -> None:
        """Adds a lane's part of a load or store."""
        bits = f"i{type_.bits}"
        pieces = plan.writes if i.opcode == "ld" else plan.reads[1:]
        for k, (register, arg) in enumerate(zip(registers, pieces, strict=True)):
            place = self.add(f"getelementptr i8, ptr {source}, i64 {k * type_.bytes}")
            if i.opcode == "st":
                self.say(f"store {bits} {self.raw(self.read(arg))}, ptr {place}, align 1, !llvm.access.group !2")
            elif register != SINK:
                value = self.add(f"load {bits}, ptr {place}, align 1, !llvm.access.group !2")
                self.write(arg, (self.resized(value, bits, f"i{8 * arg.dtype.itemsize}", type_.kind == "s"), arg.dtype), mask)

    def raw(self, value: Value) -> str:
        """Returns the bits of a value."""
        name, dtype = value
        return self.add(f"bitcast {type_name(dtype)} {name} to i{8 * dtype.itemsize}") if dtype.kind == "f" else name

    def update(self, plan: Plan, i: PtxInstruction, type_: PtxType, source: str, mask: str | None) -> None:
        """Adds a lane's part of an atomic access; lanes go in their order."""
        bits, how = f"i{type_.bits}", next(mod for mod in i.mods if mod in ATOMICS)
        first, *more = (self.raw(self.read(arg)) for arg in plan.reads[1:])
        old = self.add(f"load {bits}, ptr {source}, align 1")
        if how == "cas":
            new = self.add(f"select i1 {self.add(f'icmp eq {bits} {old}, {first}')}, {bits} {more[0]}, {bits} {old}")
        elif how == "exch":
            new = first
        elif how in ("inc", "dec"):
            past = self.add(f"icmp ug{'e' if how == 'inc' else 't'} {bits} {old}, {first}")
            if how == "dec":
                past = self.add(f"or i1 {past}, {self.add(f'icmp eq {bits} {old}, 0')}")
            next_ = self.add(f"add {bits} {old}, {1 if how == 'inc' else -1}")
            new = self.add(f"select i1 {past}, {bits} {0 if how == 'inc' else first}, {bits} {next_}")
        elif type_.kind == "f":
            of = type_name(type_.dtype)
            a, b = (self.add(f"bitcast {bits} {x} to {of}") for x in (old, first))
            new = self.add(f"fadd {of} {a}, {b}")
            wrong = self.add(f"fcmp uno {of} {new}, {new}")
            self.flag(wrong if mask is None else self.add(f"and i1 {wrong}, {mask}"))
            new = self.add(f"bitcast {of} {new} to {bits}")
        else:
            signed = type_.kind == "s"
            dtype = np.dtype(f"{'i' if signed else 'u'}{type_.bytes}")
            new = self.ufunc(ATOMICS[how], [old, first], dtype)
        self.say(f"store {bits} {new}, ptr {source}, align 1")
        if plan.writes and plan.writes[0].operand != SINK:
            self.write(plan.writes[0], (old, plan.writes[0].dtype), mask)

    def off_or_on(self, i: PtxInstruction, everywhere: str, somewhere: str, nowhere: str) -> None:
        """Goes on where the predicate of an access holds for all lanes, for some, or for none."""
        self.say("store i64 0, ptr %moved")
        self.open()
        self.change("%moved", "add", self.add(f"zext i1 {self.predicate(i)} to i64"))
        self.close()
        holds = self.load("%moved")
        skip, some = self.label("skip"), self.label("some")
        self.say(f"br i1 {self.add(f'icmp eq i64 {holds}, %n')}, label %{everywhere}, label %{some}")
        self.begin(some)
        self.say(f"br i1 {self.add(f'icmp eq i64 {holds}, 0')}, label %{skip}, label %{somewhere}")
        self.begin(skip)
        at = self.add(f"getelementptr i64, ptr %offs, i64 {len(self.off)}")
        self.off.append(i)
        self.change(at, "add", "%n")
        self.say(f"br label %{nowhere}")

    def shadowed(self, shadow: str, row: str, tag: str, crowd: str, kind: int, number: str) -> None:
        """Gives up if another thread has touched a granule, of which one writes, with no barrier between; notes this thread.

        A reader's tag stands for the readers before it that nothing orders before it, as `order.detector` has it.
        """
        kept = self.shadow_row
        distance = self.add(f"mul i64 {row}, {8 * kept.words}")
        start = self.add(f"inttoptr i64 {self.add(f'add i64 {shadow}, {distance}')} to ptr")
        others = {k: self.load(self.field(start, k)) for k in ((WROTE, READ, UPDATED) if kept.atomics else (WROTE, READ))}
        apart = {k: self.unordered(other, tag) for k, other in others.items()}
        for k in CONFLICTS[kind]:
            if k in apart:
                self.flag(apart[k])
        mine = tag if kind == WROTE else self.crowded(others[kind], tag, crowd, apart[kind])
        self.say(f"store i64 {mine}, ptr {self.field(start, kind)}")
        if kept.numbers and number:
            place = self.add(f"getelementptr i16, ptr {self.field(start, BY)}, i64 {kind}")
            self.say(f"store i16 {self.add(f'trunc i64 {number} to i16')}, ptr {place}")

    def crowded(self, before: str, tag: str, crowd: str, apart: str) -> str:
        """Returns the tag of a reader that stands for the one before it, too, if that is `apart`."""
        differ = self.add(f"xor i64 {before}, {tag}")
        same_lane = self.add(f"icmp eq i64 {self.add(f'and i64 {differ}, {WARP_CROWD - 1}')}, 0")
        same_warp = self.add(f"icmp eq i64 {self.add(f'and i64 {differ}, {WARP_CROWD - WARP}')}, 0")
        near = self.add(f"select i1 {same_warp}, i64 {WARP_CROWD}, i64 {BLOCK_CROWD}")
        near = self.add(f"select i1 {same_lane}, i64 0, i64 {near}")
        same_block = self.add(f"icmp ult i64 {differ}, {1 << 32}")
        new = self.add(f"select i1 {same_block}, i64 {near}, i64 {GRID_CROWD}")
        added = self.add(f"or i64 {new}, {self.add(f'and i64 {before}, {CROWDS}')}")
        added = self.add(f"select i1 {apart}, i64 {added}, i64 0")
        return self.add(f"or i64 {self.add(f'or i64 {tag}, {crowd}')}, {added}")

    def unordered(self, other: str, tag: str) -> str:
        """True if there is an access `other` that is neither the thread's own nor behind a barrier of its block."""
        differ = self.add(f"xor i64 {other}, {tag}")
        in_epoch = self.add(f"icmp ult i64 {self.add(f'sub i64 {differ}, 1')}, {(1 << THREAD_BITS) - 1}")
        elsewhere = self.add(f"icmp uge i64 {differ}, {1 << 32}")
        somebody = self.add(f"icmp ne i64 {other}, 0")
        return self.add(f"and i1 {somebody}, {self.add(f'or i1 {in_epoch}, {elsewhere}')}")

    def text(self) -> str:
        self.close()
        body = "\n".join(self.lines)
        return f"""
declare float @llvm.fma.f32(float, float, float)
declare double @llvm.fma.f64(double, double, double)
declare float @llvm.sqrt.f32(float)
declare double @llvm.sqrt.f64(double)
declare float @llvm.fabs.f32(float)
declare double @llvm.fabs.f64(double)
define i32 @stretch(i64 %n, ptr %table, ptr %tags, ptr %bases, ptr %offs) {{
start:
  %bad = alloca i64
  %moved = alloca i64
  %index = alloca i64
  %first = alloca i64
  %count = alloca i64
  %list = alloca i64
  %nowhere = alloca i64, i64 2
  store i64 0, ptr %bad
{body}
  %wrong = load i64, ptr %bad
  %gives = trunc i64 %wrong to i32
  ret i32 %gives
fail:
  ret i32 1
}}
!0 = !{{}}
!2 = distinct !{{}}
!3 = distinct !{{!3, !4}}
!4 = !{{!"llvm.loop.parallel_accesses", !2}}
"""
