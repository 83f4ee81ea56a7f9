"""The text of LLVM's vectors of a warp: arithmetic on values of 32 lanes, made from the rows of the opcodes (`decode.table_rows`).

NumPy evaluates the same rows, so both give the same bits. Where they might not, a launch by compiled code gives up: `flagged`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..decode.elementwise import MOVES
from ..decode.registry import DOWN, UP
from ..decode.table_rows import VIEWS, WRITERS, Expression, OperandName, PrimitiveCall, function, result_dtype
from ..state.lane_sets import WARP
from ..text.syntax import TYPES

DType = np.dtype[Any]


class NoCode(Exception):
    """Raised for an instruction that has no translation."""


class LaneValue(NamedTuple):
    """A value of each lane: its name in the text and its dtype."""

    name: str
    dtype: DType


Halves = tuple[LaneValue, LaneValue]
"""The two elements of a packed pair."""

Operands = Mapping[str, LaneValue | Halves]


def scalar(dtype: DType) -> str:
    """Returns LLVM's type of one element."""
    if dtype.kind == "b":
        return "i1"
    if dtype.kind == "f":
        return {2: "half", 4: "float", 8: "double"}[dtype.itemsize]
    return f"i{8 * dtype.itemsize}"


def vector(element: str | DType) -> str:
    """Returns LLVM's type of a value of each lane."""
    return f"<{WARP} x {element if isinstance(element, str) else scalar(element)}>"


def splat(element: str, value: int | str) -> str:
    """Returns a constant that is the same for all lanes."""
    return f"splat ({element} {value})"


class Text:
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

    def op(self, how: str, element: str, a: str, b: str) -> str:
        """Applies an operation to vectors."""
        return self.add(f"{how} {vector(element)} {a}, {b}")

    def test(self, how: str, element: str, a: str, b: str) -> str:
        """Compares vectors."""
        return self.add(f"{'fcmp' if element in ('float', 'double') else 'icmp'} {how} {vector(element)} {a}, {b}")

    def add_to(self, place: str, number: str, how: str = "add", bits: str = "i64") -> None:
        """Changes a number in memory."""
        old = self.add(f"load {bits}, ptr {place}")
        new = self.add(f"{how} {bits} {old}, {number}")
        self.say(f"store {bits} {new}, ptr {place}")

    def label(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names}"

    def begin(self, label: str) -> None:
        self.lines.append(f"{label}:")

    def field(self, table: str, place: int) -> str:
        return self.add(f"getelementptr i64, ptr {table}, i64 {place}")

    def load(self, table: str, place: int) -> str:
        return self.add(f"load i64, ptr {self.field(table, place)}")

    def count(self, table: str, place: int, more: str) -> None:
        """Adds to a number in memory."""
        self.add_to(self.field(table, place), more)

    def bits(self, mask: str) -> str:
        """Returns a mask of lanes as i32."""
        return self.add(f"bitcast {vector('i1')} {mask} to i32")

    def chosen(self, mask: str, a: str, b: str, element: str) -> str:
        return self.add(f"select {vector('i1')} {mask}, {vector(element)} {a}, {vector(element)} {b}")

    def negated(self, mask: str) -> str:
        """Returns a mask, as a vector, of the other lanes."""
        return self.op("xor", "i1", mask, splat("i1", "true"))

    def everywhere(self, element: str, value: str) -> str:
        """Returns a number for all lanes."""
        one = self.add(f"insertelement {vector(element)} poison, {element} {value}, i64 0")
        return self.add(f"shufflevector {vector(element)} {one}, {vector(element)} poison, {vector('i32')} zeroinitializer")


PLAIN = {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "div"}
LOGIC = {"bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor"}
COMPARED = {"equal": "eq", "not_equal": "ne", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"}
ROUNDED = {"rint": "rint", "trunc": "trunc", "floor": "floor", "ceil": "ceil"}
SMALLEST = {4: (0x00800000, 0x7FFFFFFF), 8: (0x0010000000000000, 0x7FFFFFFFFFFFFFFF)}
"""The bits of the smallest normal number, and all but the sign, by width."""


class Arithmetic(Text, ABC):
    """Expressions of rows as vectors. `doubtful` are results that are NaN in some lane if anything went wrong: a NaN's payload
    depends on the order of operands, so that compiled code gives up; a result that goes into another one only is not asked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.doubtful: dict[str, DType] = {}
        self.flushing = False
        """The instruction flushes subnormal numbers."""
        self.known: dict[tuple[PrimitiveCall, int], LaneValue] = {}
        self.half = 0
        """The element of packed pairs that is looked at."""

    @abstractmethod
    def flagged(self, mask: str) -> None:
        """Gives up later if a mask holds for a lane that is active."""

    @abstractmethod
    def needs(self, helper: str) -> None:
        """Notes a function that is called."""

    # -- expressions ----------------------------------------------------------------------------------------------------

    def value(self, e: Expression, operands: Operands) -> LaneValue:
        if isinstance(e, OperandName):
            if e.name not in operands:
                raise NoCode
            found = operands[e.name]
            return found if isinstance(found, LaneValue) else found[self.half]
        if not isinstance(e, PrimitiveCall):
            raise NoCode
        key = e, self.half
        if key not in self.known:
            self.known[key] = self.applied(e, operands)
        return self.known[key]

    def both(self, e: Expression, operands: Operands) -> Halves:
        """Returns the two elements of a packed pair."""
        found = []
        for self.half in range(2):
            found.append(self.value(e, operands))
        self.half = 0
        return found[0], found[1]

    def applied(self, e: PrimitiveCall, operands: Operands) -> LaneValue:
        name, given = e.primitive, e.arguments
        if name == "interleave":
            return self.value(given[self.half], operands)
        if name in VIEWS:
            return self.both(given[0], operands)[int(name == "high")]
        if name in TYPES:
            kind = TYPES[name]
            if (kind.kind == "f") != (kind.dtype.kind == "f"):
                raise NoCode
            if isinstance(given[0], int):
                return LaneValue(splat(scalar(kind.dtype), self.literal(given[0], kind.dtype)), kind.dtype)
            return self.cast(self.value(given[0], operands), kind.dtype)
        if name in ("fused_f32", "fused_f64"):
            return self.called("fma", [self.value(a, operands) for a in given[:3]])
        if name == "extreme":
            a, b = (self.value(x, operands) for x in given[:2])
            return self.extreme(a, b, str(given[2]))
        if name == "multiply" and given[1] == 1 and self.flushing:
            # A product with 1 flushes, and quiets NaN: LLVM leaves it out.
            x = self.value(given[0], operands)
            self.flagged(self.test("uno", scalar(x.dtype), x.name, x.name))
            return self.flushed(x, False)
        if name in OWN:
            values = (a if a == APPROXIMATE or isinstance(a, int | str) else self.value(a, operands) for a in given)
            return OWN[name](self, *values)
        if name in WRITERS or not isinstance(function(name), np.ufunc):
            raise NoCode
        found = [None if isinstance(a, int | float) else self.value(a, operands) for a in given]
        own = next((x.dtype for x in found if x is not None), None)
        if own is None or any(x is not None and x.dtype != own for x in found):
            raise NoCode
        element = scalar(own)
        inputs = [splat(element, self.literal(a, own)) if x is None else x.name for x, a in zip(found, given, strict=True)]
        return LaneValue(self.ufunc(name, inputs, own), result_dtype(name, *[own] * len(inputs)))

    def literal(self, value: Any, dtype: DType) -> str:
        if dtype.kind == "f":
            return f"0x{int(np.array(np.array(value, dtype), np.float64).view(np.uint64)):016X}"
        if dtype.kind == "b":
            raise NoCode
        try:
            return str(int(np.array(value, dtype)))
        except OverflowError:
            raise NoCode from None

    # -- floating point --------------------------------------------------------------------------------------------------

    def result(self, name: str, dtype: DType, *inputs: str) -> str:
        """Notes a result that is NaN if one of its inputs is: only it need be looked at."""
        for one in inputs:
            self.doubtful.pop(one, None)
        self.doubtful[name] = dtype
        return name

    def ask(self) -> None:
        """Gives up later if any doubtful result is NaN."""
        for name, dtype in self.doubtful.items():
            self.flagged(self.add(f"fcmp uno {vector(dtype)} {name}, {name}"))
        self.doubtful.clear()

    def called(self, function: str, inputs: list[LaneValue]) -> LaneValue:
        """Calls a function of LLVM's on floating-point numbers of one type."""
        dtype = inputs[0].dtype
        if dtype.kind != "f" or any(x.dtype != dtype for x in inputs):
            raise NoCode
        of = vector(dtype)
        listed = ", ".join(f"{of} {x.name}" for x in inputs)
        name = self.add(f"call {of} @llvm.{function}.v{WARP}f{8 * dtype.itemsize}({listed})")
        return LaneValue(self.result(name, dtype, *(x.name for x in inputs)), dtype)

    def raw(self, x: LaneValue) -> str:
        """Returns the bits of a value."""
        if x.dtype.kind != "f":
            return x.name
        return self.add(f"bitcast {vector(x.dtype)} {x.name} to {vector(f'i{8 * x.dtype.itemsize}')}")

    def seen(self, bits: str, dtype: DType) -> LaneValue:
        """Returns bits as a value of a dtype as wide."""
        if dtype.kind == "f":
            bits = self.add(f"bitcast {vector(f'i{8 * dtype.itemsize}')} {bits} to {vector(dtype)}")
        return LaneValue(bits, dtype)

    def extreme(self, a: LaneValue, b: LaneValue, name: str) -> LaneValue:
        """Returns the least or greatest number; of zeros, -0 is the lesser. Both are asked to be numbers."""
        dtype = a.dtype
        if dtype.kind != "f" or b.dtype != dtype or name not in ("fmin", "fmax", "minimum", "maximum"):
            raise NoCode
        of, bits = vector(dtype), vector(f"i{8 * dtype.itemsize}")
        for x in (a, b):
            self.flagged(self.add(f"fcmp uno {of} {x.name}, {x.name}"))
        raw = [self.raw(x) for x in (a, b)]
        both = self.add(f"{'and' if 'max' in name else 'or'} {bits} {raw[0]}, {raw[1]}")
        more = self.add(f"fcmp {'ogt' if 'max' in name else 'olt'} {of} {a.name}, {b.name}")
        one = self.chosen(more, raw[0], raw[1], f"i{8 * dtype.itemsize}")
        equal = self.add(f"fcmp oeq {of} {a.name}, {b.name}")
        found = self.seen(self.chosen(equal, both, one, f"i{8 * dtype.itemsize}"), dtype)
        return self.flushed(found, False) if self.flushing else found

    def flushed(self, x: LaneValue, result: bool) -> LaneValue:
        """Returns a float32 with subnormal numbers as zeros of their sign.

        The hardware looks at a result rounded to a wider range of exponents: the smallest normal number may be either.
        """
        if x.dtype.kind != "f":
            return x
        if x.dtype.itemsize != 4:
            raise NoCode
        smallest, all_but_sign = SMALLEST[4]
        bits = self.raw(x)
        size = self.add(f"and {vector('i32')} {bits}, {splat('i32', all_but_sign)}")
        small = self.add(f"icmp ult {vector('i32')} {size}, {splat('i32', smallest)}")
        if result:
            self.flagged(self.add(f"icmp eq {vector('i32')} {size}, {splat('i32', smallest)}"))
        sign = self.add(f"and {vector('i32')} {bits}, {splat('i32', -(1 << 31))}")
        found = self.seen(self.chosen(small, sign, bits, "i32"), x.dtype)
        return LaneValue(self.result(found.name, x.dtype, x.name), x.dtype) if x.name in self.doubtful else found

    def directed(self, e: Expression, operands: Operands, direction: int) -> LaneValue:
        """Returns a sum, product or fused product of float32 numbers, rounded in a direction.

        float64 has a product whole, and a sum in two parts: the nearest number and what is missing.
        """
        match e:
            case PrimitiveCall("f32", (PrimitiveCall("add", (PrimitiveCall("multiply", (a, b)), c)),)):
                product = self.op("fmul", "double", self.double(a, operands), self.double(b, operands))
                total, rest = self.two_parts(product, self.double(c, operands))
            case PrimitiveCall("multiply", (a, b)):
                total, rest = self.op("fmul", "double", self.double(a, operands), self.double(b, operands)), "zeroinitializer"
            case PrimitiveCall("add" | "subtract" as how, (a, b)):
                left, right = self.double(a, operands), self.double(b, operands)
                if how == "subtract":
                    right = self.add(f"fneg {vector('double')} {right}")
                total, rest = self.two_parts(left, right)
            case _:
                raise NoCode
        near = self.add(f"fptrunc {vector('double')} {total} to {vector('float')}")
        again = self.add(f"fpext {vector('float')} {near} to {vector('double')}")
        equal = self.test("oeq", "double", again, total)
        sides = []  # the true value is below the nearest number, or above it
        for side, other in (("ogt", "olt"), ("olt", "ogt")):
            beside = self.op("and", "i1", equal, self.test(other, "double", rest, "zeroinitializer"))
            sides.append(self.op("or", "i1", self.test(side, "double", again, total), beside))
        below, above = sides
        positive = self.test("ogt", "float", near, "zeroinitializer")
        bits = self.add(f"bitcast {vector('float')} {near} to {vector('i32')}")
        lower = self.chosen(positive, splat("i32", -1), splat("i32", 1), "i32")
        upper = self.op("sub", "i32", "zeroinitializer", lower)
        falls = self.chosen(below, lower, "zeroinitializer", "i32")
        rises = self.chosen(above, upper, "zeroinitializer", "i32")
        step = {DOWN: falls, UP: rises}.get(direction) or self.chosen(positive, falls, rises, "i32")
        found = self.add(f"bitcast {vector('i32')} {self.op('add', 'i32', bits, step)} to {vector('float')}")
        # Zeros have signs of their own, numbers beyond the range and subnormal ones other neighbours.
        size = self.add(f"call {vector('float')} @llvm.fabs.v{WARP}f32({vector('float')} {found})")
        smallest, largest = (self.literal(limit, np.dtype(np.float32)) for limit in (2.0**-125, 2.0**127))
        inside = self.test("ogt", "float", size, splat("float", smallest))
        inside = self.op("and", "i1", inside, self.test("olt", "float", size, splat("float", largest)))
        self.flagged(self.negated(inside))
        return LaneValue(found, np.dtype(np.float32))

    def double(self, e: Expression, operands: Operands) -> str:
        """Returns a float32 operand as float64."""
        inner = e.arguments[0] if isinstance(e, PrimitiveCall) and e.primitive == "f64" else e
        found = self.value(inner, operands)
        if found.dtype != np.dtype(np.float32):
            raise NoCode
        return self.add(f"fpext {vector('float')} {found.name} to {vector('double')}")

    def two_parts(self, a: str, b: str) -> tuple[str, str]:
        """Returns the nearest number to a sum, and the rest."""
        total = self.op("fadd", "double", a, b)
        part = self.op("fsub", "double", total, a)
        first = self.op("fsub", "double", a, self.op("fsub", "double", total, part))
        return total, self.op("fadd", "double", first, self.op("fsub", "double", b, part))

    # -- functions of NumPy ------------------------------------------------------------------------------------------------

    def ufunc(self, name: str, x: list[str], dtype: DType) -> str:
        """Adds an instruction with the effect of one of NumPy's functions on operands of one dtype."""
        element, of, kind = scalar(dtype), vector(dtype), dtype.kind
        if name in PLAIN and kind == "f":
            return self.result(self.add(f"f{PLAIN[name]} {of} {x[0]}, {x[1]}"), dtype, *x)
        if name in PLAIN and kind in "iu" and name != "divide":
            return self.add(f"{PLAIN[name]} {of} {x[0]}, {x[1]}")
        if name in ("sqrt", *ROUNDED) and kind == "f":
            return self.called(ROUNDED.get(name, name), [LaneValue(x[0], dtype)]).name
        if name == "negative" and kind in "fiu":
            return self.add(f"fneg {of} {x[0]}" if kind == "f" else f"sub {of} zeroinitializer, {x[0]}")
        if name == "absolute" and kind == "f":
            return self.add(f"call {of} @llvm.fabs.v{WARP}f{8 * dtype.itemsize}({of} {x[0]})")
        if name == "absolute" and kind == "i":
            return self.add(f"call {of} @llvm.abs.v{WARP}{element}({of} {x[0]}, i1 false)")
        if name == "copysign" and kind == "f":
            return self.add(f"call {of} @llvm.copysign.v{WARP}f{8 * dtype.itemsize}({of} {x[0]}, {of} {x[1]})")
        if name in LOGIC and kind in "iub":
            return self.add(f"{LOGIC[name]} {of} {x[0]}, {x[1]}")
        if name == "invert" and kind in "iub":
            return self.add(f"xor {of} {x[0]}, {splat(element, 'true' if kind == 'b' else -1)}")
        if name in COMPARED and kind in "iuf":
            test = COMPARED[name]
            sign = "" if test in ("eq", "ne") else "u" if kind == "u" else "s"
            if kind == "f":
                return self.add(f"fcmp {'une' if test == 'ne' else 'o' + test} {of} {x[0]}, {x[1]}")
            return self.add(f"icmp {sign}{test} {of} {x[0]}, {x[1]}")
        if name in ("minimum", "maximum") and kind in "iu":
            test = ("s" if kind == "i" else "u") + ("lt" if name == "minimum" else "gt")
            return self.chosen(self.add(f"icmp {test} {of} {x[0]}, {x[1]}"), x[0], x[1], element)
        if name in ("left_shift", "right_shift") and kind in "iu":
            bits = 8 * dtype.itemsize
            fits = self.add(f"icmp ult {of} {x[1]}, {splat(element, bits)}")
            amount = self.chosen(fits, x[1], "zeroinitializer", element)
            shift = "shl" if name == "left_shift" else "ashr" if kind == "i" else "lshr"
            full = self.add(f"ashr {of} {x[0]}, {splat(element, bits - 1)}") if shift == "ashr" else "zeroinitializer"
            return self.chosen(fits, self.add(f"{shift} {of} {x[0]}, {amount}"), full, element)
        if name == "bitwise_count" and kind in "iu":
            counted = self.add(f"call {of} @llvm.ctpop.v{WARP}{element}({of} {x[0]})")
            return counted if element == "i8" else self.add(f"trunc {of} {counted} to {vector('i8')}")
        raise NoCode

    def cast(self, value: LaneValue, to: DType) -> LaneValue:
        """Returns a value converted as NumPy does; to integers from floating-point numbers it is undefined there for some."""
        name, dtype = value
        if dtype == to:
            return value
        of, target = vector(dtype), vector(to)
        if dtype.kind == "f" and to.kind == "f":
            if (dtype.itemsize, to.itemsize) == (8, 2):
                raise NoCode
            how = "fpext" if to.itemsize > dtype.itemsize else "fptrunc"
            return LaneValue(self.result(self.add(f"{how} {of} {name} to {target}"), to, name), to)
        if to.kind == "f":
            return LaneValue(self.add(f"{'sitofp' if dtype.kind == 'i' else 'uitofp'} {of} {name} to {target}"), to)
        if dtype.kind == "f" or to.kind == "b":
            raise NoCode
        return LaneValue(self.resized(name, scalar(dtype), scalar(to), dtype.kind == "i"), to)

    def resized(self, bits: str, of: str, to: str, signed: bool) -> str:
        if of == to:
            return bits
        wider = int(to[1:]) > int(of[1:])
        return self.add(f"{('sext' if signed else 'zext') if wider else 'trunc'} {vector(of)} {bits} to {vector(to)}")

    # -- primitives of rows --------------------------------------------------------------------------------------------------

    def select(self, a: LaneValue | int, b: LaneValue, p: LaneValue) -> LaneValue:
        if not isinstance(a, LaneValue):
            a = LaneValue(splat(scalar(b.dtype), a), b.dtype)
        if a.dtype != b.dtype or p.dtype.kind != "b":
            raise NoCode
        return LaneValue(self.chosen(p.name, a.name, b.name, scalar(a.dtype)), a.dtype)

    def quotient(self, a: LaneValue, b: LaneValue) -> LaneValue:
        """Divides as `decode.primitives.quotient` does; by zero: all ones."""
        return self.divided("div", a, b, splat(scalar(a.dtype), -1))

    def remainder(self, a: LaneValue, b: LaneValue) -> LaneValue:
        return self.divided("rem", a, b, a.name)

    def divided(self, how: str, a: LaneValue, b: LaneValue, by_zero: str) -> LaneValue:
        """Divides integers; those of 32 bits through float64, which is exact and has instructions for vectors."""
        dtype, of, element = a.dtype, vector(a.dtype), scalar(a.dtype)
        if dtype.kind not in "iu" or b.dtype != dtype:
            raise NoCode
        zero = self.test("eq", element, b.name, "zeroinitializer")
        divisor = self.chosen(zero, splat(element, 1), b.name, element)
        sign = "s" if dtype.kind == "i" else "u"
        if dtype.itemsize < 8:
            x, y = (self.add(f"{sign}itofp {of} {name} to {vector('double')}") for name in (a.name, divisor))
            found = self.op("fdiv", "double", x, y)
            # The quotient of the lowest number and -1 is outside of the range: through i64 it wraps as NumPy's does.
            wide = self.add(f"fpto{sign}i {vector('double')} {found} to {vector('i64')}")
            found = self.add(f"trunc {vector('i64')} {wide} to {of}")
            if how == "rem":
                found = self.op("sub", element, a.name, self.op("mul", element, found, divisor))
        else:
            if sign == "s":
                lowest = self.test("eq", element, a.name, splat(element, -(1 << 63)))
                both = self.op("and", "i1", lowest, self.test("eq", element, divisor, splat(element, -1)))
                self.flagged(both)
                divisor = self.chosen(both, splat(element, 1), divisor, element)
            found = self.op(f"{sign}{how}", element, a.name, divisor)
        return LaneValue(self.chosen(zero, by_zero, found, element), dtype)

    def high_product(self, a: LaneValue, b: LaneValue) -> LaneValue:
        dtype, bits = a.dtype, 8 * a.dtype.itemsize
        wide = f"i{2 * bits}"
        x, y = (self.resized(v.name, scalar(dtype), wide, dtype.kind == "i") for v in (a, b))
        product = self.add(f"mul {vector(wide)} {x}, {y}")
        high = self.add(f"lshr {vector(wide)} {product}, {splat(wide, bits)}")
        return LaneValue(self.add(f"trunc {vector(wide)} {high} to {vector(dtype)}"), dtype)

    def permute(self, a: LaneValue, b: LaneValue, c: LaneValue) -> LaneValue:
        """prmt without a mode: each selector nibble picks a byte of b:a; its top bit replicates that byte's sign."""
        low, high, chosen = (self.resized(x.name, "i32", "i64", False) for x in (a, b, c))
        pair = self.op("or", "i64", self.op("shl", "i64", high, splat("i64", 32)), low)
        total = "zeroinitializer"
        for n in range(4):
            nibble = self.op("lshr", "i64", chosen, splat("i64", 4 * n))
            place = self.op("shl", "i64", self.op("and", "i64", nibble, splat("i64", 7)), splat("i64", 3))
            byte = self.op("and", "i64", self.op("lshr", "i64", pair, place), splat("i64", 255))
            negative = self.test("ugt", "i64", byte, splat("i64", 127))
            sign = self.chosen(negative, splat("i64", 255), "zeroinitializer", "i64")
            signs = self.test("ne", "i64", self.op("and", "i64", nibble, splat("i64", 8)), "zeroinitializer")
            byte = self.op("shl", "i64", self.chosen(signs, sign, byte, "i64"), splat("i64", 8 * n))
            total = self.op("or", "i64", total, byte)
        return LaneValue(self.resized(total, "i64", "i32", False), np.dtype(np.uint32))

    def top_bit(self, a: LaneValue) -> LaneValue:
        dtype = a.dtype
        zeros = self.add(f"call {vector(dtype)} @llvm.ctlz.v{WARP}{scalar(dtype)}({vector(dtype)} {a.name}, i1 false)")
        found = self.add(f"sub {vector(dtype)} {splat(scalar(dtype), 8 * dtype.itemsize - 1)}, {zeros}")
        return LaneValue(self.resized(found, scalar(dtype), "i64", True), np.dtype(np.int64))

    def reversed_bits(self, a: LaneValue) -> LaneValue:
        of = vector(a.dtype)
        return LaneValue(self.add(f"call {of} @llvm.bitreverse.v{WARP}{scalar(a.dtype)}({of} {a.name})"), a.dtype)

    def limited(self, x: LaneValue, to: str, source: str) -> LaneValue:
        """Converts whole float64 numbers to integers: out of range clamps, NaN is 0 or the highest bit."""
        dtype = TYPES[to].dtype
        if x.dtype.itemsize != 8 or dtype.itemsize > 4:
            raise NoCode
        info, of = np.iinfo(dtype), vector("double")
        self.doubtful.pop(x.name, None)
        self.flagged(self.add(f"fcmp uno {of} {x.name}, {x.name}"))
        low, high = (splat("double", self.literal(v, np.dtype(np.float64))) for v in (info.min, info.max))
        found = self.chosen(self.add(f"fcmp ogt {of} {x.name}, {low}"), x.name, low, "double")
        found = self.chosen(self.add(f"fcmp olt {of} {found}, {high}"), found, high, "double")
        whole = self.add(f"call {vector('i64')} @llvm.fptosi.sat.v{WARP}i64.v{WARP}f64({of} {found})")
        return LaneValue(self.resized(whole, "i64", scalar(dtype), True), dtype)

    def approximated(self, _: object, function: str, kind: str, *values: LaneValue) -> LaneValue:
        """Adds an approximation that is one of IEEE's operations in float64, moved as `decode.primitives.MOVES` has it."""
        x = values[0].name
        if kind == "f32" and function == "lg2":
            return self.logarithm(x)
        if kind != "f32" or function not in MOVED:
            raise NoCode
        root = self.called("sqrt", [values[0]]).name if "sqrt" in function else ""
        if function == "div":
            self.representable(values[1].name)
        if "div" in function:
            exact = self.op("fdiv", "double", x, values[1].name)
        else:
            exact = root if function == "sqrt" else self.op("fdiv", "double", splat("double", "1.0"), root or x)
        for name in (root, *(v.name for v in values)):
            self.doubtful.pop(name, None)
        self.flagged(self.test("uno", "double", exact, exact))
        bits = self.raw(LaneValue(exact, np.dtype(np.float64)))
        moved = self.op("xor", "i64", bits, splat("i64", MOVED[function]))
        ordinary = self.ordinary(exact)
        for value in values:
            ordinary = self.op("and", "i1", ordinary, self.ordinary(value.name))
            ordinary = self.op("and", "i1", ordinary, self.test("one", "double", value.name, "zeroinitializer"))
        return self.seen(self.chosen(ordinary, moved, bits, "i64"), np.dtype(np.float64))

    def logarithm(self, x: str) -> LaneValue:
        """lg2 of float64 numbers: of 0 and infinity what it is, of negative numbers nothing."""
        wide = np.dtype(np.float64)
        self.doubtful.pop(x, None)
        self.flagged(self.test("ult", "double", x, "zeroinitializer"))
        self.needs("logarithm")
        found = self.add(f"call {vector('double')} @logarithm(ptr %launch, {vector('double')} {x})")
        for special, value in ((0.0, -np.inf), (np.inf, np.inf)):
            here = self.test("oeq", "double", x, splat("double", self.literal(special, wide)))
            found = self.chosen(here, splat("double", self.literal(value, wide)), found, "double")
        return LaneValue(found, wide)

    def representable(self, b: str) -> None:
        """Gives up where div.approx has no float32 1 / b to multiply with (`decode.primitives.division`)."""
        size = self.add(f"call {vector('double')} @llvm.fabs.v{WARP}f64({vector('double')} {b})")
        wide = np.dtype(np.float64)
        low, high = (splat("double", self.literal(2.0**power, wide)) for power in (-128, 126))
        inside = self.op("and", "i1", self.test("ogt", "double", size, low), self.test("ole", "double", size, high))
        self.flagged(self.negated(inside))

    def saturated(self, x: LaneValue) -> LaneValue:
        of, element = vector(x.dtype), scalar(x.dtype)
        zero, one = (splat(element, self.literal(limit, x.dtype)) for limit in (0.0, 1.0))
        found = self.chosen(self.test("ogt", element, x.name, zero), x.name, zero, element)
        found = self.chosen(self.test("olt", element, found, one), found, one, element)
        return LaneValue(self.add(f"call {of} @llvm.fabs.v{WARP}f{8 * x.dtype.itemsize}({of} {found})"), x.dtype)

    def ordinary(self, name: str) -> str:
        """Returns a mask of finite numbers."""
        size = self.add(f"call {vector('double')} @llvm.fabs.v{WARP}f64({vector('double')} {name})")
        return self.add(f"fcmp olt {vector('double')} {size}, {splat('double', '0x7FF0000000000000')}")

    def exponential(self, a: LaneValue) -> LaneValue:
        """ex2 in float32: 2 to a power by `@power`, moved by one unit, as rcp is, unless the power is whole."""
        of, single = vector("float"), np.dtype(np.float32)
        self.doubtful.pop(a.name, None)
        self.flagged(self.test("uno", "float", a.name, a.name))
        whole = self.add(f"call {of} @llvm.rint.v{WARP}f32({of} {a.name})")
        moves = self.test("one", "float", whole, a.name)
        self.needs("power")
        exact = self.add(f"call {vector('double')} @power(ptr %launch, {of} {a.name})")
        bits = self.add(f"bitcast {vector('double')} {exact} to {vector('i64')}")
        moved = self.op("xor", "i64", bits, splat("i64", MOVED["rcp"]))
        # Subnormal results are rounded elsewhere.
        below = self.test("olt", "float", a.name, splat("float", self.literal(-125.5, single)))
        above = self.test("ogt", "float", a.name, splat("float", self.literal(-126.5 if self.flushing else -160, single)))
        self.flagged(self.op("and", "i1", self.op("and", "i1", below, above), moves))
        chosen = self.seen(self.chosen(moves, moved, bits, "i64"), np.dtype(np.float64))
        return LaneValue(self.add(f"fptrunc {vector('double')} {chosen.name} to {of}"), single)


MOVED = {
    name: int(MOVES[name.removesuffix(".full"), "f32"](np.zeros(1)).view(np.uint64)[0])
    for name in ("rcp", "sqrt", "rsqrt", "div", "div.full")
}
"""Bits by which the results of an approximation to float32 are moved."""

APPROXIMATE = OperandName("approximate")

OWN: dict[str, Any] = {
    name: getattr(Arithmetic, name)
    for name in (
        *("select", "quotient", "remainder", "high_product", "permute", "top_bit", "reversed_bits", "limited"),
        *("approximated", "exponential", "saturated"),
    )
}
"""Primitives that are written here."""
