"""Rows of the table of elementwise opcodes: (opcode, form, expression); an instruction's plan is made from its row.

A form lists types and modifiers as PTX ISA does. `{.rn .rz}{.ftz}.f32 .f64` has two optional modifiers, the first of them one of
two, and takes either type; what is not in braces and no type is required. `.u32 from .f32` are the types of result and sources.

An expression is written in Python's syntax over the operands d, a, b, c, e (in the order of the instruction; p and q are a pair of
predicates), with operators and primitives: `d.wide = wide(a) * wide(b) + c`. Without a target it is d's value. The attribute of an
operand is the type that it is seen as, by default the instruction's: a PTX type, or one of `RELATIVE`. A function with the name of
a type converts. All other functions are primitives: NumPy's ufuncs, or those that `primitive` and `writer` register.

What many opcodes have in common is no part of their expressions: `.sat` and `.relu` limit the result, the rounding and `.ftz` are
bits of the host's floating-point environment (`registry`), and halves are widened to float32 and their result is narrowed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..text.syntax import SINK, TYPES, Array, Imm, Not, Operand, PtxInstruction, PtxType, Reg, Unsupported
from .registry import KEEP, NEAREST, ROUNDING, Arg, Arrays, DType, Frame, Plan, Thunk, arg, known, mode, opcode, pair

# -- expressions --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OperandName:
    """An operand of the instruction; `view`: the type that it is seen as, if that is not the instruction's."""

    name: str
    view: str = ""


@dataclass(frozen=True)
class PrimitiveCall:
    """A primitive applied to expressions. Texts among these are names of types or functions."""

    primitive: str
    arguments: tuple[Expression, ...]


Expression = OperandName | PrimitiveCall | int | float | str

OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
    ast.BitAnd: "bitwise_and",
    ast.BitOr: "bitwise_or",
    ast.BitXor: "bitwise_xor",
    ast.LShift: "left_shift",
    ast.RShift: "right_shift",
    ast.Invert: "invert",
    ast.USub: "negative",
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
}

RELATIVE: dict[str, Callable[[PtxType], str]] = {
    "own": lambda type_: type_.name,
    "wide": lambda type_: f"{type_.kind}{2 * type_.bits}",
    "unsigned": lambda type_: f"u{type_.bits}",
    "bits": lambda type_: "pred" if type_.name == "pred" else f"b{type_.bits}",
}
"""Types that depend on the instruction's."""


@dataclass(frozen=True, eq=False)
class Meaning:
    """The effect of an instruction: `targets` get `values`. `views`: the types of operands that are not seen as usual."""

    targets: tuple[str, ...]
    values: tuple[Expression, ...]
    views: Mapping[str, str]

    @cached_property
    def reads(self) -> list[str]:
        """The names of the operands that it reads, in the order of the instruction."""
        return sorted({part.name for e in self.values for part in parts(e) if isinstance(part, OperandName)} - {"approximate"})


def parts(e: Expression) -> Iterator[Expression]:
    """Yields an expression and all that it consists of."""
    yield e
    if isinstance(e, PrimitiveCall):
        for argument in e.arguments:
            yield from parts(argument)


def substitute(e: Expression, change: Callable[[OperandName], Expression]) -> Expression:
    """Returns an expression with other expressions in place of its operands."""
    if isinstance(e, PrimitiveCall):
        return PrimitiveCall(e.primitive, tuple(substitute(argument, change) for argument in e.arguments))
    return change(e) if isinstance(e, OperandName) else e


@cache
def meaning(text: str, type_: PtxType) -> Meaning:
    """Parses `[target, ... =] value, ...` of an instruction with a type."""

    def resolve(name: str) -> str:
        return RELATIVE[name](type_) if name in RELATIVE else name

    def expression(node: ast.AST) -> Expression:
        match node:
            case ast.Constant(value=int() | float() | str() as value):
                return value
            case ast.Name(id=name):
                return OperandName(name)
            case ast.Attribute(value=ast.Name(id=name), attr=view):
                return OperandName(name, resolve(view))
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
                return PrimitiveCall(OPERATORS[type(op)], (expression(left), expression(right)))
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
                return -value
            case ast.UnaryOp(op=op, operand=operand):
                return PrimitiveCall(OPERATORS[type(op)], (expression(operand),))
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return PrimitiveCall(resolve(name), tuple(map(expression, arguments)))
        raise SyntaxError(ast.unparse(node))

    def several(node: ast.AST) -> list[Expression]:
        return [expression(each) for each in (node.elts if isinstance(node, ast.Tuple) else [node])]

    (statement,) = ast.parse(text).body
    assert isinstance(statement, ast.Assign | ast.Expr)
    targets = several(statement.targets[0]) if isinstance(statement, ast.Assign) else [OperandName("d")]
    values = several(statement.value)
    operands = [part for e in (*targets, *values) for part in parts(e) if isinstance(part, OperandName)]
    return Meaning(
        tuple(target.name for target in targets if isinstance(target, OperandName)),
        tuple(substitute(e, lambda operand: OperandName(operand.name)) for e in values),
        {operand.name: operand.view for operand in operands if operand.view},
    )


# -- evaluation by NumPy -------------------------------------------------------------------------------------------------

Writer = Callable[..., Thunk]
Function = TypeVar("Function", bound=Callable[..., Any])

PRIMITIVES: dict[str, Callable[..., Any]] = {}
WRITERS: dict[str, tuple[Writer, int]] = {}
VIEWS: dict[str, Callable[[Array], Array]] = {"low": lambda pairs: pairs[::2], "high": lambda pairs: pairs[1::2]}
"""Primitives that look at every second element: of packed pairs the first or the second ones."""


def primitive(fn: Function) -> Function:
    """Registers a function that returns an array: `fn(a, ...)`."""
    PRIMITIVES[fn.__name__] = fn
    return fn


def writer(fn: Writer, width: int = 1) -> Writer:
    """Registers a function that is bound to arrays: `fn(frame, d, a, ...)` returns the thunk that writes d, of a's type.

    d has `width` elements for each of a.
    """
    WRITERS[fn.__name__] = fn, width
    return fn


def function(name: str) -> Callable[..., Any]:
    """Returns a primitive that is no writer."""
    found: Callable[..., Any] = PRIMITIVES.get(name) or getattr(np, name)
    return found


@cache
def result_dtype(name: str, *arguments: object) -> DType:
    """Returns the dtype of a primitive's value by trying it: `arguments` are dtypes, or values that are no arrays."""
    found: DType = np.asarray(function(name)(*(np.ones(1, x) if isinstance(x, np.dtype) else x for x in arguments))).dtype
    return found


class Value(NamedTuple):
    """A value in an evaluation: its place among the arrays, dtype (None: a `literal`), and elements for each lane; 0: constant."""

    place: int
    dtype: DType | None
    width: int
    literal: object = None


class Step(NamedTuple):
    """A step of an evaluation: `make(frame, arrays[out], *inputs)` returns the thunk that writes an array. Without `out` the step
    adds an array: `make(*inputs)`, or one of `width` elements for each lane that the frame lends.
    """

    make: Callable[..., Any] | None
    inputs: Sequence[Value] = ()
    out: int | None = None
    dtype: DType | None = None
    width: int = 0


class Evaluation:
    """The steps that evaluate expressions over operands and write results; equal ones are evaluated once. Constants are folded.

    They are made once for the dtypes and widths of the operands, and then bound to arrays.
    """

    def __init__(self, values: Sequence[Expression], operands: Mapping[str, tuple[DType, int]], results: Sequence[DType]):
        self.steps: list[Step] = []
        self.operands = {name: Value(place, *kind) for place, (name, kind) in enumerate(operands.items())}
        self.operands["approximate"] = Value(len(operands), None, 0, True)
        self.known: dict[PrimitiveCall, Value] = {}
        targets = [Value(place, dtype, 1) for place, dtype in enumerate(results, len(self.operands))]
        self.count = len(self.operands) + len(targets)
        if len(targets) == 1:
            self.write(targets[0], values[0])
        else:
            for target, found in zip(targets, [self.value(e) for e in values], strict=True):
                self.copy(target, found)

    def bind(self, frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
        arrays: list[Any] = [*ins, frame.machine.approximate, *out]
        thunks: list[Thunk] = []
        for make, inputs, to, dtype, width in self.steps:
            if make is None:
                arrays.append(frame.temp(f"value {len(arrays)}", (width * frame.n,), dtype))
            elif to is None:
                arrays.append(make(*[arrays[x.place] for x in inputs]))
            else:
                thunks.append(make(frame, arrays[to], *[arrays[x.place] for x in inputs]))
        if len(thunks) == 1:
            return thunks[0]

        def run() -> None:
            for thunk in thunks:
                thunk()

        return run

    def added(self, step: Step, dtype: DType | None, width: int = 0, literal: object = None) -> Value:
        """Adds a step that adds an array; returns that."""
        self.steps.append(step)
        self.count += 1
        return Value(self.count - 1, dtype, width, literal)

    def written(self, make: Callable[..., Thunk], inputs: Sequence[Value], d: Value) -> Value:
        """Adds a step that writes d; returns that."""
        self.steps.append(Step(make, inputs, d.place))
        return d

    def copy(self, d: Value, found: Value) -> None:
        self.written(lambda frame, d, x: partial(np.copyto, d, x, casting="unsafe"), [found], d)

    def buffer(self, dtype: DType, width: int) -> Value:
        return self.added(Step(None, dtype=dtype, width=width), dtype, width)

    def width(self, e: Expression) -> int:
        """Returns the number of elements of an expression's value for each lane; 0 if it is constant."""
        if isinstance(e, OperandName):
            return self.operands[e.name].width
        if not isinstance(e, PrimitiveCall):
            return 0
        most = max(map(self.width, e.arguments), default=0)
        return most // 2 if e.primitive in VIEWS else (most or 1) * WRITERS[e.primitive][1] if e.primitive in WRITERS else most

    def value(self, e: Expression) -> Value:
        """Returns the value that an expression has after the steps."""
        if isinstance(e, OperandName):
            return self.operands[e.name]
        if not isinstance(e, PrimitiveCall):
            return self.added(Step(lambda: e), None, literal=e)
        if e not in self.known:
            self.known[e] = self.apply(e, None)
        return self.known[e]

    def write(self, d: Value, e: Expression) -> None:
        """Adds the steps that write an expression's value into d."""
        found = self.apply(e, d) if isinstance(e, PrimitiveCall) else self.value(e)
        if found is not d:
            self.copy(d, found)

    def apply(self, e: PrimitiveCall, d: Value | None) -> Value:
        """Adds the steps of a primitive; returns its value, which is d if that is given and fits."""
        name = e.primitive
        if name in TYPES:
            return self.convert(e.arguments[0], TYPES[name].dtype, d)
        if name not in VIEWS and name not in WRITERS and isinstance(function(name), np.ufunc):
            return self.ufunc(e, d)
        inputs, width = [self.value(a) for a in e.arguments], self.width(e)
        if name in VIEWS:
            return self.added(Step(VIEWS[name], inputs), inputs[0].dtype, width)
        if name in WRITERS:
            dtype = next(x.dtype for x in inputs if x.dtype is not None)
            return self.written(WRITERS[name][0], inputs, d if d is not None and d.dtype == dtype else self.buffer(dtype, width))
        fn, dtype = function(name), result_dtype(name, *(x.literal if x.dtype is None else x.dtype for x in inputs))
        if not width:
            return self.added(Step(lambda *x: np.asarray(fn(*x)), inputs), dtype)
        copied = lambda frame, d, *x: lambda: np.copyto(d, fn(*x), casting="unsafe")  # noqa: E731
        return self.written(copied, inputs, self.buffer(dtype, width) if d is None else d)

    def convert(self, e: Expression, dtype: DType, d: Value | None) -> Value:
        if not self.width(e):
            return self.added(Step(lambda x: np.asarray(x).astype(dtype), [self.value(e)]), dtype)
        if d is None or d.dtype != dtype:
            if isinstance(e, OperandName) and self.operands[e.name].dtype == dtype:
                return self.operands[e.name]
            d = self.buffer(dtype, self.width(e))
        self.write(d, e)
        return d

    def ufunc(self, e: PrimitiveCall, d: Value | None) -> Value:
        """Adds a step of NumPy's own, which converts its operands in passing if they are to be of the type of the result."""
        fn, options = function(e.primitive), dict[str, Any]()
        inner = [
            (a.arguments[0], TYPES[a.primitive].dtype) for a in e.arguments if isinstance(a, PrimitiveCall) and a.primitive in TYPES
        ]
        dtypes = [dtype for _, dtype in inner]
        if len(inner) == len(e.arguments) and {*dtypes, result_dtype(e.primitive, *dtypes)} == {dtypes[0]}:
            options = {"dtype": dtypes[0], "casting": "unsafe"}
            inputs, dtype = [self.value(x) for x, _ in inner], dtypes[0]
        else:
            found = [self.value(a) for a in e.arguments]
            own = next(x.dtype for x in found if x.dtype is not None)
            inputs = [x if x.dtype is not None else self.added(Step(partial(np.array, x.literal, own)), own) for x in found]
            dtype = result_dtype(e.primitive, *(x.dtype for x in inputs))
        if not self.width(e):
            return self.added(Step(lambda *x: np.asarray(fn(*x, **options)), inputs), dtype)
        if d is None:
            d = self.buffer(dtype, self.width(e))
        elif d.dtype != dtype:
            options["casting"] = "unsafe"
        return self.written(lambda frame, d, *x: partial(fn, *x, out=d, **options), inputs, d)


# -- rows ---------------------------------------------------------------------------------------------------------------------

HALF_TYPES = ("f16", "f16x2", "bf16", "bf16x2")
RANGES = {".u16-.s64": ".u16 .s16 .u32 .s32 .u64 .s64", "halves": ".f16 .f16x2 .bf16 .bf16x2"}
"""Short names of several types in forms."""

KINDS = {
    **TYPES,
    **{name: PtxType(name, 32, name[0], np.dtype(np.uint32)) for name in ("u16x2", "s16x2")},
    **{name: PtxType(name, 16, "b", np.dtype(np.uint16)) for name in ("e4m3x2", "e5m2x2")},
}
"""The types that an elementwise instruction may name."""

CARRY = Reg("%carry", TYPES["pred"])
"""CC.CF, the condition code of extended-precision arithmetic: one a lane."""


@dataclass(unsafe_hash=True)
class Case:
    """An instruction's modifiers, types and operands, for expressions that depend on them. Equal ones may have other operands."""

    opcode: str
    mods: frozenset[str]
    types: tuple[PtxType, ...]
    operands: list[Operand] = field(compare=False)
    unused: int = field(default=0, compare=False)
    """The number of operands that are there, but not in the expression."""

    def one_of(self, names: Iterable[str], default: str = "") -> str:
        """Returns the modifier that is one of `names`."""
        return next((name for name in names if name in self.mods), default)

    def constant(self) -> int:
        """Takes the last operand, a constant, away."""
        last = self.operands.pop()
        if not isinstance(last, Imm):
            raise Unsupported("the table must be constant")
        return last.value


Text = str | Mapping[str, str] | Callable[[Case], str]
SOURCES = "abce"
"""The operands behind the result."""

DONE = 4
"""The number of checks of a form."""


def words(text: str) -> list[str]:
    return re.findall(r"[\w:]+", text)


@dataclass(frozen=True, eq=False)
class OpcodeRow:
    """One form of an opcode, and what it does. `count`: the number of types that an instruction names."""

    opcode: str
    form: str
    text: Text
    count: int

    @cached_property
    def described(self) -> str:
        """The form, with the modifiers that choose a text."""
        if not isinstance(self.text, Mapping):
            return self.form
        names = " ".join(f".{name}" for name in self.text if name)
        return f"{{{names}}}{self.form}" if "" in self.text else f"{names} {self.form}"

    @cached_property
    def optional(self) -> list[list[str]]:
        """Groups of optional modifiers, of each of which an instruction has at most one."""
        return [words(group) for group in re.findall(r"\{(.*?)\}", self.form)]

    @cached_property
    def types(self) -> list[list[str]]:
        """The types that an instruction may name first, second, ..."""
        lists = [[name for name in words(part) if name in KINDS] for part in re.sub(r"\{.*?\}", "", self.form).split(" from ")]
        return lists * self.count if len(lists) == 1 else lists

    @cached_property
    def required(self) -> list[str]:
        """Modifiers of which an instruction must have one, if there are any."""
        return [name for name in words(re.sub(r"\{.*?\}| from ", " ", self.form)) if name not in KINDS]

    def check(self, mods: Sequence[str]) -> tuple[int, str]:
        """Returns (DONE, the key of the text), or (number of passed checks, the reason of the refusal)."""
        types, rest = [m for m in mods if m in KINDS], [m for m in mods if m not in KINDS]
        for name, allowed in zip(types, self.types, strict=False):
            if name not in allowed:
                return 0, f"type .{name} is not executed here"
        if len(types) != self.count:
            return 1, f"expected {COUNTS[self.count]}, got {len(types)}"
        keys = self.text if isinstance(self.text, Mapping) else [""]
        key = max((key for key in keys if set(words(key)) <= set(rest)), key=len, default=None)
        if key is None or (self.required and not set(self.required) & set(rest)):
            return 2, f"{self.opcode} needs one of .{', .'.join(self.required or keys)}"
        for group in [*([word] for word in words(key)), *self.optional, self.required]:
            for name in [name for name in rest if name in group][:1]:
                rest.remove(name)
        return (3, f"modifier .{rest[0]} is not executed here") if rest else (DONE, key)


COUNTS = {1: "one type", 2: "two types", 3: "three types"}
ROWS: dict[str, list[OpcodeRow]] = {}


def row(opcodes: str, form: str, text: Text, count: int = 1) -> None:
    """Adds a row for each of `opcodes`."""
    for short, types in RANGES.items():
        form = form.replace(short, types)
    for name in opcodes.split():
        if not known(name):
            opcode(name, forms=partial(forms, name), family="elementwise")(decode)
        ROWS.setdefault(name, []).append(OpcodeRow(name, form, text, count))


def forms(name: str) -> str:
    """Returns the forms of an opcode, as the list of opcodes shows them."""
    text = "; ".join(one.described for one in ROWS[name])
    for short, types in RANGES.items():
        text = text.replace(types, short)
    return text


@cache
def choose(name: str, mods: tuple[str, ...]) -> tuple[OpcodeRow, str]:
    """Returns the row of an instruction, and the key of its text. Raises `Unsupported` for the row that fits best."""
    checks = [(*one.check(mods), one) for one in ROWS[name]]
    passed, answer, best = max(checks, key=lambda check: check[0])
    if passed < DONE:
        raise Unsupported(answer)
    return best, answer


def decode(i: PtxInstruction) -> Plan:
    """Returns the plan of an instruction with a row."""
    found, key = choose(i.opcode, i.mods)
    case = Case(i.opcode, frozenset(i.mods), tuple(KINDS[m] for m in i.mods if m in KINDS), list(i.operands))
    text = found.text[key] if isinstance(found.text, Mapping) else found.text if isinstance(found.text, str) else found.text(case)
    return plan(case, meaning(text, case.types[-1]))


# -- plans ----------------------------------------------------------------------------------------------------------------


def extended(operand: Operand, type_: PtxType) -> Arg:
    """Returns a destination that may be wider than the type: it is then seen whole, to be sign- or zero-extended."""
    if isinstance(operand, Reg) and operand.type.bits > type_.bits:
        return Arg(operand, TYPES[f"{'s' if type_.kind == 's' else 'u'}{operand.type.bits}"].dtype)
    return arg(operand, type_)


def plan(case: Case, found: Meaning) -> Plan:
    """Returns the plan of an instruction with this meaning."""
    to, *sources = case.operands
    reads = [*SOURCES[: len(sources)], *(["carry"] if "carry" in found.reads else [])]
    if len(sources) != len([name for name in found.reads if name in SOURCES]) + case.unused:
        raise Unsupported(f"unknown operand form: {len(sources)} operands behind the result")
    first, second = pair(to)
    operands = dict(zip(SOURCES, sources, strict=False)) | {"d": to, "p": first, "q": second, "carry": CARRY}
    own = {"d": case.types[0]} | dict.fromkeys(SOURCES, case.types[-1])
    types = {name: KINDS.get(found.views.get(name, "")) or own[name] for name in (*found.targets, *reads)}
    negated = frozenset(
        name for name, type_ in types.items() if type_ == TYPES["pred"] != case.types[-1] and isinstance(operands[name], Not)
    )

    def seen(name: str) -> Arg:
        operand = operands[name]
        if found.views.get(name) == "extended":
            return extended(operand, types[name])
        return arg(operand.reg if isinstance(operand, Not) and name in negated else operand, types[name])

    written = tuple(k for k, name in enumerate(found.targets) if operands[name] != SINK) or (0,)
    formula = formula_of(found, case, tuple(types.items()), tuple(reads), negated, written)
    return Plan(tuple(seen(found.targets[k]) for k in written), tuple(map(seen, reads)), formula.bind, formula.mode)


class Formula:
    """The expressions of equal instructions over the operands `reads`, and their evaluations by what the operands are."""

    def __init__(self, values: Sequence[Expression], reads: Sequence[str], mode: int | None):
        self.values, self.reads, self.mode = values, reads, mode
        self.evaluations: dict[tuple[int, ...], Evaluation] = {}

    def bind(self, frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
        key = (*[x.ndim for x in ins], *[d.dtype.num for d in out])
        found = self.evaluations.get(key)
        if found is None:
            operands = {name: (x.dtype, x.size // frame.n if x.ndim else 0) for name, x in zip(self.reads, ins, strict=True)}
            found = self.evaluations[key] = Evaluation(self.values, operands, [d.dtype for d in out])
        return found.bind(frame, out, ins)


@cache
def formula_of(
    found: Meaning,
    case: Case,
    types: tuple[tuple[str, PtxType], ...],
    reads: tuple[str, ...],
    negated: frozenset[str],
    written: tuple[int, ...],
) -> Formula:
    """Returns the formula of instructions with this meaning; `written`: the numbers of the targets that are registers."""
    seen = dict(types)

    def source(name: OperandName) -> Expression:
        if name.name not in seen:
            return name
        return PrimitiveCall("invert", (name,)) if name.name in negated else widened(name, seen[name.name], case)

    values = [result(substitute(found.values[k], source), seen[found.targets[k]], case) for k in written]
    return Formula(values, reads, environment(case, list(seen.values())))


def flushes(case: Case) -> bool:
    """True if halves are flushed here. A conversion flushes float32 only."""
    return "ftz" in case.mods and len(case.types) == 1


def widened(name: OperandName, type_: PtxType, case: Case) -> Expression:
    """Returns an operand as a number to work with: halves as float32."""
    if type_.name not in HALF_TYPES:
        return name
    element = type_.name.removesuffix("x2")
    value = PrimitiveCall("f32" if element == "f16" else "bfloat_value", (name,))
    return PrimitiveCall("flushed", (value, element)) if flushes(case) else value


def result(e: Expression, type_: PtxType, case: Case) -> Expression:
    """Returns a value as the destination gets it: limited by .sat and .relu, and narrowed to halves unless it is one."""
    element = type_.name.removesuffix("x2")
    halves = type_.name in HALF_TYPES
    if halves and isinstance(e, PrimitiveCall) and e.primitive == element:
        return e
    if "sat" in case.mods and type_.kind == "f":
        e = PrimitiveCall("saturated", (e,))
    if "relu" in case.mods and type_.kind != "b":
        e = PrimitiveCall("maximum", (e, 0))
    if not halves:
        return e
    if flushes(case):
        e = PrimitiveCall("flushed", (e, element))
    return PrimitiveCall(f"{element}_bits", (e, case.one_of(ROUNDING, "rn")))


def environment(case: Case, types: Sequence[PtxType]) -> int | None:
    """Returns the floating-point environment: the instruction's, if a float32 or float64 is its result (the first of `types`)."""
    if not any(type_.kind == "f" for type_ in types):
        return None
    halves = [type_.name in HALF_TYPES for type_ in types]
    if any(halves) and len(case.types) == 1:
        return KEEP
    directed = types[0].kind == "f" and not (halves[0] and types[-1].kind == "f")
    direction = ROUNDING[case.one_of(ROUNDING, "rn")] if directed else NEAREST
    return mode(direction, "ftz" in case.mods)
