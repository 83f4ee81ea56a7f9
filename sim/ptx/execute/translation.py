"""The text of LLVM's functions for compiled launches (`execute.compiled`): runs of arithmetic, a load or a store.

Arithmetic is made from the rows of the opcodes (`decode.rows`), as NumPy's evaluation is.
"""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

import numpy as np

from ..decode.access import moved
from ..decode.code import Code
from ..decode.registry import KEEP, Arg, Plan
from ..decode.rows import VIEWS, WRITERS, Expression, Formula, OperandName, PrimitiveCall, function, result_dtype
from ..order.accesses import WIDEST
from ..state.lanes import WARP
from ..text.syntax import SINK, TYPES, Imm, PtxInstruction, Reg, Sym
from .registers import RegisterFrame, immediate

FIRST, LAST, HOST, SHADOWED_FROM, SHADOW, STATE, RELATIVE, DISTINCT, LIST, NUMBER, COUNTS = range(11)
PHASES = 32
"""Places in the table of an access: the first lane's smallest and largest address, distance from addresses to host memory, address
of granule 0 of the shadow, the shadow (0: nobody writes there), distance to the states of bytes (0: none), relative addresses, the
number and the list of distinct ones (distance from the first address, position of the last lane, crowd of the others), the
instruction's number, executions by `first % PHASES`.
"""

WROTE, READ, UPDATED, BY = range(4)
"""Words of a granule's row in the shadow: the last writer, reader and atomic access as tags, and 16 bits for the number of the
instruction of each of them. A tag is block + 1, epoch of the block (the number of its barriers), crowd and thread. The last two
words are there only if something needs them.
"""

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


class FunctionText:
    """The text of one function, `i32 @stretch(n, table, tags, shared bases, counts of lanes that are off)`; not 0: it gave up."""

    def __init__(self, frame: RegisterFrame, row: ShadowRow):
        self.frame = frame
        self.code = frame.code
        self.shadow_row = row
        self.lines: list[str] = []
        self.names = 0
        self.table: list[tuple[str, Any]] = []
        """The kinds and keys of the table's pointers and numbers."""
        self.values: dict[tuple[int, int], str] = {}
        self.dirty: set[tuple[int, int]] = set()
        self.inside = False
        self.off: list[PtxInstruction] = []
        self.accessed: PtxInstruction | None = None

    # -- text -----------------------------------------------------------------------------------------------------------

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

    def entry(self, kind: str, key: Any) -> int:
        """Returns the place in the table of a row, a number or an access."""
        if (kind, key) not in self.table:
            self.table.append((kind, key))
        return self.table.index((kind, key))

    def loaded(self, kind: str, key: Any) -> str:
        """Loads an entry of the table."""
        at = self.add(f"getelementptr i64, ptr %table, i64 {self.entry(kind, key)}")
        return self.add(f"load i64, ptr {at}, !invariant.load !0")

    def field(self, table: str, place: str | int) -> str:
        return self.add(f"getelementptr i64, ptr {table}, i64 {place}")

    def flag(self, bit: str) -> None:
        """Gives up later if a bit is set."""
        self.change("%bad", "or", self.add(f"zext i1 {bit} to i64"))

    def change(self, place: str, how: str, value: str) -> None:
        """Applies an operation to a number in memory."""
        old = self.add(f"load i64, ptr {place}")
        self.say(f"store i64 {self.add(f'{how} i64 {old}, {value}')}, ptr {place}")

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
        """Adds a load or store of global or shared memory."""
        space, type_, registers, base, offset = moved(i, *(i.operands[:2] if i.opcode == "ld" else i.operands[1::-1]))
        size = len(registers) * type_.bytes
        self.close()
        done = self.label("done")
        if i.predicate is not None:
            self.off_or_on(i, done)
        table = self.add(f"inttoptr i64 {self.loaded('access', None)} to ptr")
        fields = {k: self.add(f"load i64, ptr {self.field(table, k)}") for k in (RELATIVE,)}
        relative = self.add(f"inttoptr i64 {fields[RELATIVE]} to ptr")

        def address() -> str:
            found, dtype = self.read(base)
            bits = type_name(dtype)
            delta = self.resized(self.loaded("number", offset & ((1 << 8 * dtype.itemsize) - 1)), "i64", bits, False)
            return self.resized(self.add(f"add {bits} {found}, {delta}"), bits, "i64", False)

        # The first lane's address, and whether the others are where they were last time.
        self.lane, self.values, self.dirty = "0", {}, set()
        first = address()
        self.say("store i64 0, ptr %moved")
        self.open()
        apart = self.add(f"sub i64 {address()}, {first}")
        known = self.add(f"load i64, ptr {self.add(f'getelementptr i64, ptr {relative}, i64 {self.lane}')}, !llvm.access.group !2")
        self.change("%moved", "or", self.add(f"xor i64 {apart}, {known}"))
        self.close()
        low, high = (self.add(f"load i64, ptr {self.field(table, k)}") for k in (FIRST, LAST))
        wrong = [
            self.add(f"icmp ne i64 {self.add('load i64, ptr %moved')}, 0"),
            self.add(f"icmp slt i64 {first}, {low}"),
            self.add(f"icmp sgt i64 {first}, {high}"),
            self.add(f"icmp ne i64 {self.add(f'and i64 {first}, {size - 1}')}, 0"),
        ]
        for one in wrong[1:]:
            wrong[0] = self.add(f"or i1 {wrong[0]}, {one}")
        miss, go = self.label("miss"), self.label("go")
        self.say(f"br i1 {wrong[0]}, label %{miss}, label %{go}")
        self.begin(miss)
        resolve = self.add(f"inttoptr i64 {self.loaded('resolve', None)} to ptr")
        failed = self.add(f"icmp ne i32 {self.add(f'call i32 {resolve}(i64 0)')}, 0")
        self.say(f"br i1 {failed}, label %fail, label %{go}")
        self.begin(go)
        counter = self.field(table, self.add(f"add i64 {self.add(f'and i64 {first}, {PHASES - 1}')}, {COUNTS}"))
        self.change(counter, "add", "1")
        host, origin, shadow, state, count, list_, number = (
            self.add(f"load i64, ptr {self.field(table, k)}") for k in (HOST, SHADOWED_FROM, SHADOW, STATE, DISTINCT, LIST, NUMBER)
        )
        entries = self.add(f"inttoptr i64 {list_} to ptr")
        alone = self.label("alone")
        if space == "global":
            followed = self.label("followed")
            nothing = self.add(f"icmp eq i64 {self.add(f'or i64 {shadow}, {state}')}, 0")
            self.say(f"br i1 {nothing}, label %{alone}, label %{followed}")
            self.begin(followed)
        self.open(count)
        start = self.add(f"mul i64 {self.lane}, 3")
        apart, lane, crowd = (self.add(f"load i64, ptr {self.field(entries, self.add(f'add i64 {start}, {k}'))}") for k in range(3))
        at = self.add(f"add i64 {first}, {apart}")
        tag = self.add(f"load i64, ptr {self.field('%tags', lane)}")
        granule = self.shadow_row.shared_granule if space == "shared" else self.shadow_row.granule
        row = self.add(f"lshr i64 {self.add(f'sub i64 {at}, {origin}')}, {granule.bit_length() - 1}")
        passed = self.label("passed")
        if space == "global":
            noted = self.label("noted")
            self.say(f"br i1 {self.add(f'icmp eq i64 {shadow}, 0')}, label %{passed}, label %{noted}")
            self.begin(noted)
        for k in range(max(1, size // granule)):
            which = number if space == "global" else ""
            self.shadowed(shadow, self.add(f"add i64 {row}, {k}"), tag, crowd, i.opcode == "st", which)
        # Only tensors that were given with their contents have no states.
        if space == "global":
            self.say(f"br label %{passed}")
            self.begin(passed)
            known, stated = self.label("known"), self.label("stated")
            self.say(f"br i1 {self.add(f'icmp eq i64 {state}, 0')}, label %{known}, label %{stated}")
            self.begin(stated)
        there = self.add(f"inttoptr i64 {self.add(f'add i64 {at}, {state}')} to ptr")
        if i.opcode == "st":
            self.say(f"store i{8 * size} 0, ptr {there}, align 1")
        else:
            self.flag(self.add(f"icmp ne i{8 * size} {self.add(f'load i{8 * size}, ptr {there}, align 1')}, 0"))
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
        source = self.add(f"inttoptr i64 {self.add(f'add i64 {at}, {host}')} to ptr")
        bits = f"i{type_.bits}"
        pieces = plan.writes if i.opcode == "ld" else plan.reads[1:]
        for k, (register, arg) in enumerate(zip(registers, pieces, strict=True)):
            place = self.add(f"getelementptr i8, ptr {source}, i64 {k * type_.bytes}")
            if i.opcode == "st":
                value, dtype = self.read(arg)
                if dtype.kind == "f":
                    value = self.add(f"bitcast {type_name(dtype)} {value} to {bits}")
                self.say(f"store {bits} {value}, ptr {place}, align 1, !llvm.access.group !2")
            elif register != SINK:
                value = self.add(f"load {bits}, ptr {place}, align 1, !llvm.access.group !2")
                self.write(arg, (self.resized(value, bits, f"i{8 * arg.dtype.itemsize}", type_.kind == "s"), arg.dtype), None)
        self.close()
        self.accessed = i
        self.say(f"br label %{done}")
        self.begin(done)

    def off_or_on(self, i: PtxInstruction, done: str) -> None:
        """Skips an access whose predicate holds nowhere; gives up if it holds for some lanes only."""
        self.say("store i64 0, ptr %moved")
        self.open()
        self.change("%moved", "add", self.add(f"zext i1 {self.predicate(i)} to i64"))
        self.close()
        holds = self.add("load i64, ptr %moved")
        skip, go, some = self.label("skip"), self.label("go"), self.label("some")
        self.say(f"br i1 {self.add(f'icmp eq i64 {holds}, %n')}, label %{go}, label %{some}")
        self.begin(some)
        self.say(f"br i1 {self.add(f'icmp eq i64 {holds}, 0')}, label %{skip}, label %fail")
        self.begin(skip)
        at = self.add(f"getelementptr i64, ptr %offs, i64 {len(self.off)}")
        self.off.append(i)
        self.change(at, "add", "%n")
        self.say(f"br label %{done}")
        self.begin(go)

    def shadowed(self, shadow: str, row: str, tag: str, crowd: str, write: bool, number: str) -> None:
        """Gives up if another thread has touched a granule, of which one writes, with no barrier between; notes this thread.

        A reader's tag stands for the readers before it that nothing orders before it, as `order.detector` has it.
        """
        kept = self.shadow_row
        distance = self.add(f"mul i64 {row}, {8 * kept.words}")
        start = self.add(f"inttoptr i64 {self.add(f'add i64 {shadow}, {distance}')} to ptr")
        wrote, read = (self.add(f"load i64, ptr {self.field(start, k)}") for k in (WROTE, READ))
        self.flag(self.unordered(wrote, tag))
        apart = self.unordered(read, tag)
        if kept.atomics:
            self.flag(self.unordered(self.add(f"load i64, ptr {self.field(start, UPDATED)}"), tag))
        if write:
            self.flag(apart)
            self.say(f"store i64 {tag}, ptr {self.field(start, WROTE)}")
        else:
            self.say(f"store i64 {self.crowded(read, tag, crowd, apart)}, ptr {self.field(start, READ)}")
        if kept.numbers and number:
            place = self.add(f"getelementptr i16, ptr {self.field(start, BY)}, i64 {WROTE if write else READ}")
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
