"""Rows of the table of elementwise opcodes: (opcode, form, expression); an instruction's plan is made from its row.

A form lists types and modifiers as PTX ISA does. `{.rn .rz}{.ftz}.f32 .f64` has two optional modifiers, the first of them one of
two, and takes either type; what is not in braces and no type is required. `.u32 from .f32` are the types of result and sources.

An expression is written in Python's syntax over the operands d, a, b, c, e (in the order of the instruction; p and q are a pair of
predicates), with operators and primitives: `d.wide = wide(a) * wide(b) + c`. Without a target it is d's value. The attribute of an
operand is the type that it is seen as, by default the instruction's: a PTX type, or one of `RELATIVE`. A function with the name of
a type converts. All other functions are primitives: NumPy's ufuncs, or those that `primitive` and `writer` register.

What many opcodes have in common is no part of their expressions: `.sat` and `.relu` limit the result, the rounding and `.ftz` are
bits of the host's floating-point environment (`rounding`), and halves are widened to float32 and their result is narrowed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, TypeVar

import numpy as np

from ...text.syntax import SINK, TYPES, Array, Imm, Instruction, Not, Operand, Pair, PtxType, Reg, Unsupported
from ..registry import Arg, Arrays, Bind, DType, Frame, Plan, Thunk, arg, known, opcode
from .rounding import KEEP, NEAREST, ROUNDING, mode

# -- expressions --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Name:
    """An operand of the instruction; `view`: the type that it is seen as, if that is not the instruction's."""

    name: str
    view: str = ""


@dataclass(frozen=True)
class Apply:
    """A primitive applied to expressions. Texts among these are names of types or functions."""

    primitive: str
    arguments: tuple[Expression, ...]


Expression = Name | Apply | int | float | str

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


@dataclass(frozen=True)
class Meaning:
    """The effect of an instruction: `targets` get `values`. `views`: the types of operands that are not seen as usual."""

    targets: tuple[str, ...]
    values: tuple[Expression, ...]
    views: Mapping[str, str]

    @cached_property
    def reads(self) -> list[str]:
        """The names of the operands that it reads, in the order of the instruction."""
        return sorted({part.name for e in self.values for part in parts(e) if isinstance(part, Name)} - {"approximate"})


def parts(e: Expression) -> Iterator[Expression]:
    """Yields an expression and all that it consists of."""
    yield e
    if isinstance(e, Apply):
        for argument in e.arguments:
            yield from parts(argument)


def substitute(e: Expression, change: Callable[[Name], Expression]) -> Expression:
    """Returns an expression with other expressions in place of its operands."""
    if isinstance(e, Apply):
        return Apply(e.primitive, tuple(substitute(argument, change) for argument in e.arguments))
    return change(e) if isinstance(e, Name) else e


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
                return Name(name)
            case ast.Attribute(value=ast.Name(id=name), attr=view):
                return Name(name, resolve(view))
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
                return Apply(OPERATORS[type(op)], (expression(left), expression(right)))
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
                return -value
            case ast.UnaryOp(op=op, operand=operand):
                return Apply(OPERATORS[type(op)], (expression(operand),))
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return Apply(resolve(name), tuple(map(expression, arguments)))
        raise SyntaxError(ast.unparse(node))

    def several(node: ast.AST) -> list[Expression]:
        return [expression(each) for each in (node.elts if isinstance(node, ast.Tuple) else [node])]

    (statement,) = ast.parse(text).body
    assert isinstance(statement, ast.Assign | ast.Expr)
    targets = several(statement.targets[0]) if isinstance(statement, ast.Assign) else [Name("d")]
    values = several(statement.value)
    operands = [part for e in (*targets, *values) for part in parts(e) if isinstance(part, Name)]
    return Meaning(
        tuple(target.name for target in targets if isinstance(target, Name)),
        tuple(substitute(e, lambda operand: Name(operand.name)) for e in values),
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


class Evaluation:
    """The `steps` that evaluate expressions over bound operands; equal ones are evaluated once. Constants are folded."""

    def __init__(self, frame: Frame, operands: Mapping[str, Array]):
        self.frame, self.operands = frame, operands
        self.steps: list[Thunk] = []
        self.buffers = 0
        self.known: dict[Apply, Array] = {}

    def size(self, e: Expression) -> int:
        """Returns the number of elements of an expression's value; 0 if it is constant."""
        if isinstance(e, Name):
            value = self.array(e)
            return value.size if isinstance(value, np.ndarray) and value.ndim else 0
        if not isinstance(e, Apply):
            return 0
        most = max(map(self.size, e.arguments), default=0)
        return most // 2 if e.primitive in VIEWS else most * WRITERS[e.primitive][1] if e.primitive in WRITERS else most

    def buffer(self, e: Expression, dtype: DType) -> Array:
        self.buffers += 1
        return self.frame.temp(f"value {self.buffers}", (self.size(e) or self.frame.n,), dtype)

    def array(self, e: Expression) -> Any:
        """Returns the array that holds an expression's value after the steps; numbers and texts as they are."""
        if isinstance(e, Name):
            return self.frame.machine.approximate if e.name == "approximate" else self.operands[e.name]
        if not isinstance(e, Apply):
            return e
        if e not in self.known:
            self.known[e] = self.apply(e, None)
        return self.known[e]

    def write(self, d: Array, e: Expression) -> None:
        """Adds the steps that write an expression's value into d."""
        value = self.apply(e, d) if isinstance(e, Apply) else self.array(e)
        if value is not d:
            self.steps.append(partial(np.copyto, d, value, casting="unsafe"))

    def apply(self, e: Apply, d: Array | None) -> Array:
        """Adds the steps of a primitive; returns the array with its value, which is d if that is given and fits."""
        name, arguments = e.primitive, e.arguments
        if name in VIEWS:
            return VIEWS[name](self.array(arguments[0]))
        if name in TYPES:
            return self.convert(arguments[0], TYPES[name].dtype, d)
        if name in WRITERS:
            inputs = [self.array(a) for a in arguments]
            dtype = next(x.dtype for x in inputs if isinstance(x, np.ndarray))
            out = d if d is not None and d.dtype == dtype else self.buffer(e, dtype)
            self.steps.append(WRITERS[name][0](self.frame, out, *inputs))
            return out
        return self.ufunc(e, d) if isinstance(function(name), np.ufunc) else self.call(e, d)

    def convert(self, e: Expression, dtype: DType, d: Array | None) -> Array:
        if not self.size(e):
            return np.asarray(self.array(e)).astype(dtype)
        if d is None or d.dtype != dtype:
            if isinstance(e, Name) and self.operands[e.name].dtype == dtype:
                return self.operands[e.name]
            d = self.buffer(e, dtype)
        self.write(d, e)
        return d

    def ufunc(self, e: Apply, d: Array | None) -> Array:
        """Adds a step of NumPy's own, which converts its operands in passing if they are to be of the type of the result."""
        fn, options = function(e.primitive), dict[str, Any]()
        inner = [(a.arguments[0], TYPES[a.primitive].dtype) for a in e.arguments if isinstance(a, Apply) and a.primitive in TYPES]
        dtypes = [dtype for _, dtype in inner]
        if len(inner) == len(e.arguments) and {*dtypes, result_dtype(e.primitive, *dtypes)} == {dtypes[0]}:
            options = {"dtype": dtypes[0], "casting": "unsafe"}
            inputs, dtype = [np.asarray(self.array(x)) for x, _ in inner], dtypes[0]
        else:
            found = [self.array(a) for a in e.arguments]
            own = next(x.dtype for x in found if isinstance(x, np.ndarray))
            inputs = [x if isinstance(x, np.ndarray) else np.array(x, own) for x in found]
            dtype = result_dtype(e.primitive, *(x.dtype for x in inputs))
        if not any(x.ndim for x in inputs):
            return np.asarray(fn(*inputs, **options))
        if d is None:
            d = self.buffer(e, dtype)
        elif d.dtype != dtype:
            options["casting"] = "unsafe"
        self.steps.append(partial(fn, *inputs, out=d, **options))
        return d

    def call(self, e: Apply, d: Array | None) -> Array:
        """Adds a step that copies the array that a function returns."""
        fn, inputs = function(e.primitive), [self.array(a) for a in e.arguments]
        if not any(x.ndim for x in inputs if isinstance(x, np.ndarray)):
            return np.asarray(fn(*inputs))
        if d is None:
            d = self.buffer(e, result_dtype(e.primitive, *(x.dtype if isinstance(x, np.ndarray) else x for x in inputs)))
        out = d
        self.steps.append(lambda: np.copyto(out, fn(*inputs), casting="unsafe"))
        return d


def evaluate(values: Sequence[Expression], frame: Frame, out: Sequence[Array], operands: Mapping[str, Array]) -> Thunk:
    """Returns the thunk that writes values into `out`."""
    evaluation = Evaluation(frame, operands)
    if len(out) == 1:
        evaluation.write(out[0], values[0])
    else:
        found = [evaluation.array(e) for e in values]
        evaluation.steps += [partial(np.copyto, d, value, casting="unsafe") for d, value in zip(out, found, strict=True)]
    steps = tuple(evaluation.steps)
    if len(steps) == 1:
        return steps[0]

    def run() -> None:
        for step in steps:
            step()

    return run


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


@dataclass
class Case:
    """An instruction's modifiers, types and operands, for expressions that depend on them."""

    opcode: str
    mods: frozenset[str]
    types: tuple[PtxType, ...]
    operands: list[Operand]
    unused: int = 0
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
class Row:
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
ROWS: dict[str, list[Row]] = {}


def row(opcodes: str, form: str, text: Text, count: int = 1) -> None:
    """Adds a row for each of `opcodes`."""
    for short, types in RANGES.items():
        form = form.replace(short, types)
    for name in opcodes.split():
        if not known(name):
            opcode(name, forms=partial(forms, name), family="elementwise")(decode)
        ROWS.setdefault(name, []).append(Row(name, form, text, count))


def forms(name: str) -> str:
    """Returns the forms of an opcode, as the list of opcodes shows them."""
    text = "; ".join(one.described for one in ROWS[name])
    for short, types in RANGES.items():
        text = text.replace(types, short)
    return text


@cache
def choose(name: str, mods: tuple[str, ...]) -> tuple[Row, str]:
    """Returns the row of an instruction, and the key of its text. Raises `Unsupported` for the row that fits best."""
    checks = [(*one.check(mods), one) for one in ROWS[name]]
    passed, answer, best = max(checks, key=lambda check: check[0])
    if passed < DONE:
        raise Unsupported(answer)
    return best, answer


def decode(i: Instruction) -> Plan:
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
    first, second = (to.first, to.second) if isinstance(to, Pair) else (to, SINK)
    operands = dict(zip(SOURCES, sources, strict=False)) | {"d": to, "p": first, "q": second, "carry": CARRY}
    own = {"d": case.types[0]} | dict.fromkeys(SOURCES, case.types[-1])
    types = {name: KINDS.get(found.views.get(name, "")) or own[name] for name in (*found.targets, *reads)}
    negated = {name for name, type_ in types.items() if type_ == TYPES["pred"] != case.types[-1]} & {
        name for name, operand in operands.items() if isinstance(operand, Not)
    }

    def seen(name: str) -> Arg:
        operand = operands[name]
        if found.views.get(name) == "extended":
            return extended(operand, types[name])
        return arg(operand.reg if isinstance(operand, Not) and name in negated else operand, types[name])

    def source(name: Name) -> Expression:
        if name.name not in types:
            return name
        return Apply("invert", (name,)) if name.name in negated else widened(name, types[name.name], case)

    written = [k for k, name in enumerate(found.targets) if operands[name] != SINK] or [0]
    targets = [found.targets[k] for k in written]
    values = [result(substitute(found.values[k], source), types[name], case) for k, name in zip(written, targets, strict=True)]

    def bind(frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
        return evaluate(values, frame, out, dict(zip(reads, ins, strict=True)))

    writes, read = tuple(map(seen, targets)), tuple(map(seen, reads))
    quick = shortcut(values[0], writes[0].dtype, {name: one.dtype for name, one in zip(reads, read, strict=True)})
    return Plan(writes, read, quick if quick and len(values) == 1 else bind, environment(case, list(types.values())))


def shortcut(e: Expression, target: DType, dtypes: Mapping[str, DType]) -> Bind | None:
    """Returns the binding of one operand, or of one primitive on operands (and then literals), if it has the target's dtype."""
    arguments = e.arguments if isinstance(e, Apply) else (e,)
    names = [a.name for a in arguments if isinstance(a, Name)]
    literals = arguments[len(names) :]
    if not names or not set(names) <= dtypes.keys() or any(isinstance(a, Apply | Name) for a in literals):
        return None
    places, first = [list(dtypes).index(name) for name in names], dtypes[names[0]]
    if isinstance(e, Name):
        return (lambda frame, out, ins: partial(np.copyto, out[0], ins[places[0]])) if first == target else None
    assert isinstance(e, Apply)
    if e.primitive in WRITERS:
        make = WRITERS[e.primitive][0]
        return (lambda frame, out, ins: make(frame, out[0], *[ins[k] for k in places], *literals)) if first == target else None
    if e.primitive in VIEWS or e.primitive in TYPES or literals:
        return None
    fn = function(e.primitive)
    if not isinstance(fn, np.ufunc) or result_dtype(e.primitive, *(dtypes[name] for name in names)) != target:
        return None
    return lambda frame, out, ins: partial(fn, *[ins[k] for k in places], out=out[0])


def flushes(case: Case) -> bool:
    """True if halves are flushed here. A conversion flushes float32 only."""
    return "ftz" in case.mods and len(case.types) == 1


def widened(name: Name, type_: PtxType, case: Case) -> Expression:
    """Returns an operand as a number to work with: halves as float32."""
    if type_.name not in HALF_TYPES:
        return name
    element = type_.name.removesuffix("x2")
    value = Apply("f32" if element == "f16" else "bfloat_value", (name,))
    return Apply("flushed", (value, element)) if flushes(case) else value


def result(e: Expression, type_: PtxType, case: Case) -> Expression:
    """Returns a value as the destination gets it: limited by .sat and .relu, and narrowed to halves unless it is one."""
    element = type_.name.removesuffix("x2")
    halves = type_.name in HALF_TYPES
    if halves and isinstance(e, Apply) and e.primitive == element:
        return e
    if "sat" in case.mods and type_.kind == "f":
        e = Apply("saturated", (e,))
    if "relu" in case.mods and type_.kind != "b":
        e = Apply("maximum", (e, 0))
    if not halves:
        return e
    if flushes(case):
        e = Apply("flushed", (e, element))
    return Apply(f"{element}_bits", (e, case.one_of(ROUNDING, "rn")))


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
