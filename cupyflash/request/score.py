"""Score and mask functions: one expression that is compiled into the kernels, a score's with its derivative."""

from __future__ import annotations

import dataclasses
import keyword
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from numbers import Integral, Real
from types import FunctionType, MethodType
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from cupyflash.arrays import Held, check_array, check_strides
from cupyflash.basics import Array, Report, Shape, Values
from cupyflash.expressions.c import ELEMENTS, Statements
from cupyflash.expressions.cost import require_affordable
from cupyflash.expressions.derivative import derivative
from cupyflash.expressions.evaluate import evaluate, positions
from cupyflash.expressions.parse import ArrayType, out_of_range, parse
from cupyflash.expressions.tree import FUNCTIONS, POSITIONS, Load, Name, Node, Type, convert, counted, depends_on, loads, walk
from cupyflash.words import cut

MAX_AXES = 4
Kind = Literal["score", "mask"]


class Captured(NamedTuple):
    """The properties of a captured array that kernels are compiled for, or of a captured number if `axes` is None.

    `dtype` is an array's NumPy name, one of `ELEMENTS`; a number's is "bool", "int" or "float".
    """

    name: str
    dtype: str
    axes: int | None = None

    @property
    def type(self) -> Type:
        """The type of the number, or of an element, in the expression."""
        return "bool" if self.dtype == "bool" else "float" if "float" in self.dtype else "int"

    def __str__(self) -> str:
        return f"a number, {self.dtype}" if self.axes is None else f"{self.dtype}, ndim {self.axes}"


@dataclass(frozen=True)
class Form:
    """A score or mask function without the captured values, as a kernel is compiled for it. Equal for equal texts and types."""

    tree: Node
    captured: tuple[Captured, ...] = ()
    kind: Kind = "score"
    text: str = dataclasses.field(default="", compare=False)

    def __repr__(self) -> str:
        return f"Form({cut(self.text)!r}, captured={self.captured})"

    @cached_property
    def _hash(self) -> int:
        return hash((self.tree, self.captured, self.kind))

    def __hash__(self) -> int:
        """Computed once, since each warm call looks up by it."""
        return self._hash

    @cached_property
    def derivative(self) -> Node | None:
        """The derivative by s, a tree too; None if it is 0 for every s."""
        return derivative(self.tree)

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """The loads of the value, equal ones once. The derivative has no others."""
        return loads(self.tree)

    def check(self, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> None:
        """Raise ValueError unless captured arrays of these shapes fit a problem; `shapes` may lack some.

        `sizes` are the lengths of "b" (batch), "h" (heads), "kv_h" (heads of K and V), "row" (n_q) and "k" (n_k). An axis that
        one of these indexes alone must have exactly its length, so that the kernel need not clamp it (leave out an axis, or use
        `broadcast_to`, for values that are the same along it); any other axis may have 1 to 2**31 - 1 elements (any number, if
        there are no rows).
        """
        there = all(sizes[name] for name in ("b", "h", "row"))
        for load in self.loads:
            shape = shapes.get(load.name, ())
            for axis, (index, length) in enumerate(zip(load.indices, shape, strict=bool(shape))):
                position = counted(index)
                if position and length != sizes[position]:
                    wanted = f"length {sizes[position]:,} along axis {axis}, which {position} indexes"
                    raise ValueError(f"{load.name} must have {wanted}, got shape {shape}")
                if there and not 1 <= length < 2**31:
                    raise ValueError(f"{load.name} must have a length from 1 to {2**31 - 1:,} along axis {axis}, got shape {shape}")


class _Function(Held):
    """An expression as text, and the values that it has captured."""

    kind: ClassVar[Kind]
    text: str
    form: Form
    numbers: dict[str, bool | int | float]
    arrays: Report

    def __init__(self, text: str | Callable[..., Any], /, **captured: Any) -> None:
        if isinstance(text, FunctionType | MethodType | partial):
            text, captured = _traced(text, self.kind, captured)
        if not isinstance(text, str):
            raise TypeError(f"a {self.kind} is an expression in a str, or a Python function, got {type(text).__name__}")
        for name in captured:
            if name == "s" or name in POSITIONS or name in FUNCTIONS or keyword.iskeyword(name):
                raise ValueError(f"{name} already has a meaning in an expression: capture it by another name")
            if not name.isascii():
                raise ValueError(f"{name} has letters that CUDA C may not know: capture it by a name of ASCII letters")
        numbers: dict[str, bool | int | float] = {}
        arrays: Report = {}
        for name, value in captured.items():
            if hasattr(value, "shape") and not isinstance(value, np.generic):
                _check_captured(name, value)
                arrays[name] = value
            else:
                numbers[name] = _number(name, value)
        kinds = [Captured(name, _dtype_name(array.dtype), array.ndim) for name, array in arrays.items()]
        kinds += [Captured(name, type(number).__name__) for name, number in numbers.items()]
        self._set(_form(text, tuple(sorted(kinds, key=lambda one: one.name)), self.kind), arrays, numbers)

    def _set(self, form: Form, arrays: Report, numbers: dict[str, bool | int | float]) -> None:
        self.text, self.form, self.arrays, self.numbers = form.text, form, arrays, numbers
        self._held = form, {field(name, self.kind): array for name, array in arrays.items()}

    @classmethod
    def of(cls, form: Form, arrays: Report, numbers: dict[str, bool | int | float]) -> Self:
        """The function of a form that has captured these."""
        made = cls.__new__(cls)
        made._set(form, arrays, numbers)
        return made

    def over(self, arrays: Values) -> Self:
        """The same function with a call's arrays in place of those that it has captured."""
        return self.of(self.form, {name: arrays[field(name, self.kind)] for name in self.arrays}, self.numbers)

    def held(self) -> tuple[Form, Values]:
        """The form, and the arrays by the names of the kernels' struct."""
        return self._held

    @property
    def fields(self) -> Report:
        """The numbers by the names of the kernels' struct, and as that has them."""
        return {field(name, self.kind): as_given(number) for name, number in self.numbers.items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join([repr(cut(self.text)), *(f'{one.name}=...' for one in self.form.captured)])})"


class Score(_Function):
    """A function of the scaled score s, before bias and masks: one expression, compiled into the kernels with its derivative.

        Score("s + slope[h] * (k - q)", slope=slopes)
        Score(lambda s, h, q, k: s + slopes[h] * (k - q))

    text: one Python expression of `+ - * / // %`, comparisons (chained too), `and or not`, `where(c, a, b)` or `a if c else b`,
        abs, min, max, floor, exp, log, sqrt, sin, cos, tanh, numbers, and names: s, the score times scale; the positions q and k on
        the keys' axis (q = row + n_k - n_q: rows are aligned with the last keys), row, b (batch), h (head), kv_h (head of K and V),
        and the lengths n_q and n_k. Or a Python function whose parameters are some of these names: it is called once, with symbols,
        to write that expression; its operations are Python's, with & | ~ for and, or, not, and NumPy's functions (PyTorch's too).
        It captures the arrays and numbers of its closure, globals and defaults by their names.
    captured: further names. Numbers, Python's or NumPy's, infinite or NaN too. NumPy or CuPy arrays of up to four axes and any
        strides: of floats (float16, bfloat16, float32), conditions (bool) or integers (int8, uint8, int16, int32, int64, whose
        elements are taken modulo 2**32: those that fit 32 bits are what they are). An element is `array[i, j]`, with an integer for
        each axis that does not depend on s; an array without axes is its element. An index outside an axis is clamped into it.

    Types are int (32 bits, wrapping around), float (float32, numbers in the text too) and bool. Where they meet, the later of bool,
    int, float is taken, True as 1. / gives a float (1 / 2 is 0.5), floor too. % has the sign of the divisor, as in Python; an int
    modulo 0 is 0. and, or, not, where and if take conditions (comparisons, bool arrays), never numbers. min and max ignore a NaN
    beside a number. Both sides of where are computed, one is taken. An integer result becomes a float; a condition is no score.

    The derivative by s: at a tie min and max have their first argument's; abs has 1 at 0; floor and comparisons have 0. Parts that
    do not depend on s, or are not chosen, do not enter it, even if they are infinite or NaN.

    form: tree and types, hashable; arrays, numbers: the captured values by name.

    Raises ValueError, with the place in the text, for anything not allowed there, and for captured names that the text does not
    use; TypeError for a text that is no str, captured values of other types, and a function that cannot be traced.
    """

    kind: ClassVar[Kind] = "score"


class Mask(_Function):
    """A mask function: one condition that says which keys a row sees, compiled into the kernels.

        Mask("document[q] == document[k] and k <= q", document=ids)

    text, captured: a condition, or a function that returns one, in `Score`'s language and with its names, but for s: a comparison,
        an element of a bool array, and what and, or, not and where make of them.

    A first pass classifies tiles: those in which no row sees any key are neither loaded nor computed, those in which every row
    sees every key take the unmasked path, and the condition is evaluated in the others only. `block_mask` keeps the result for
    further calls.

    form, arrays, numbers and errors: as in `Score`.
    """

    kind: ClassVar[Kind] = "mask"


def _traced(function: Callable[..., Any], kind: Kind, captured: Values) -> tuple[str, Report]:
    """The text of a function, and what it has captured, arrays of other libraries as views."""
    from cupyflash.expressions.trace import traced
    from cupyflash.launch.dispatch import as_array

    if captured:
        raise TypeError(f"{next(iter(captured))} is given beside a function, which captures what it names itself")
    text, found = traced(function, (*(("s",) if kind == "score" else ()), *POSITIONS))
    return text, {name: as_array(name, value) if hasattr(value, "shape") else value for name, value in found.items()}


@lru_cache(maxsize=256)
def _form(text: str, captured: tuple[Captured, ...], kind: Kind) -> Form:
    names: dict[str, Node | ArrayType] = {"s": Name("float", "s")} if kind == "score" else {}
    names |= {name: Name("int", name) for name in POSITIONS}
    names |= {one.name: Name(one.type, one.name) if one.axes is None else ArrayType(one.type, one.axes) for one in captured}
    tree, shown = parse(text, names), cut(text)
    require_affordable(tree, f"the {kind} {shown!r}")
    if kind == "score" and tree.type == "bool":
        raise ValueError(f"a score is a number, {shown!r} is a condition: where({shown.strip()}, s, ...), say")
    if kind == "mask" and tree.type != "bool":
        raise ValueError(f"a mask is a condition, {shown!r} is a number: ({shown.strip()}) != 0, say")
    used = {node.name for node in walk(tree) if isinstance(node, Name | Load)}
    for one in captured:
        if one.name not in used:
            raise ValueError(f"{one.name} is captured, but {shown!r} does not use it")
    return Form(tree if kind == "mask" else convert(tree, "float"), captured, kind, text=text)


@lru_cache(maxsize=256)
def _dtype_name(dtype: Any) -> str:
    """The name of a dtype, cached: NumPy takes as long for it as a warm call takes for the rest of a Score."""
    return str(dtype.name)


def _check_captured(name: str, array: Any) -> None:
    """Raise TypeError or ValueError unless the kernels can load elements of an array."""
    check_array(name, array)
    if _dtype_name(array.dtype) not in ELEMENTS:
        raise TypeError(f"{name} must be of dtype {', '.join(ELEMENTS)}, got {array.dtype}")
    if array.ndim > MAX_AXES:
        raise ValueError(f"{name} must have at most {MAX_AXES} axes, got shape {array.shape}")
    check_strides(name, array)


def _number(name: str, value: Any) -> bool | int | float:
    """Convert a captured number to Python's type."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, or a NumPy or CuPy array, got {type(value).__name__}")
    number = int(value) if isinstance(value, Integral) else float(value)
    reason = out_of_range(number)
    if reason:
        raise ValueError(f"{name} must be a number that a kernel can have: {reason}")
    return number


class Lines(NamedTuple):
    """A score function in C: the statements, and the names of value and derivative (None if not requested)."""

    lines: tuple[str, ...]
    value: str
    derivative: str | None


def statements(
    form: Form, names: Mapping[str, str], with_derivative: bool = False, known: Mapping[Node, str] | None = None
) -> Lines:
    """Write a form in C; `names` and `known` as in `Statements`. The derivative is "0.0f" if it is 0 for every s."""
    written = Statements(names, known=known)
    value = written.value(form.tree)
    if not with_derivative:
        return Lines(tuple(written.lines), value, None)
    slope = "0.0f" if form.derivative is None else written.value(form.derivative)
    return Lines(tuple(written.lines), value, slope)


# The names that every expression may use, in the kernels' C (score.cuh).
PLACES = {
    "s": "s",
    "b": "at.batch",
    "h": "at.head",
    "kv_h": "(at.head / p.group)",
    "row": "at.row",
    "q": "(at.row + at.keys - at.queries)",
    "k": "at.key",
    "n_q": "at.queries",
    "n_k": "at.keys",
}
C_TYPES = {"bool": "int", "int": "int", "float": "float"}


def field(name: str, kind: Kind = "score") -> str:
    """The name in the kernels' struct of an array or number that a function of a kind has captured."""
    return f"{kind}_{name}"


class Parts(NamedTuple):
    """A form's loads by how often they are made: once a head, a row of a tile, a key of a tile, or a score."""

    head: tuple[Load, ...]
    row: tuple[Load, ...]
    key: tuple[Load, ...]
    score: tuple[Load, ...]


# The most loads for a row, and for a key, that shared memory has room for. Further ones are made for each score.
MOST_PARTS = 16


@lru_cache(maxsize=256)
def parts(form: Form, by_tiles: bool = True) -> Parts:
    """The loads that a kernel makes at each of these places; without `by_tiles` it has none for rows and keys."""
    of_head, of_row, of_key = {"batch", "head"}, {"batch", "head", "row"}, {"batch", "head", "column"}
    found: dict[str, list[Load]] = {name: [] for name in Parts._fields}
    for load in form.loads:
        along = depends_on(load)
        of_tile = "row" if along <= of_row else "key" if along <= of_key else "score"
        room = by_tiles and len(found[of_tile]) < MOST_PARTS
        found["head" if along <= of_head else of_tile if room else "score"].append(load)
    return Parts(**{name: tuple(loads) for name, loads in found.items()})


def of_head(form: Form) -> tuple[Load, ...]:
    """The loads that are made once a head."""
    return parts(form).head


Constants = tuple[tuple[str, int | str], ...]


def named(**constants: int | str) -> Constants:
    """Compile-time constants by the names that the kernels have for them."""
    return tuple(constants.items())


@lru_cache(maxsize=256)
def constants(form: Form, with_derivative: bool = False, by_tiles: bool = False) -> Constants:
    """The compile-time constants of a score function: score.cuh. The slope is 0 unless `with_derivative`; `by_tiles` makes the
    loads of a row or a key once for a tile."""
    names, made, known = parts_in_c(form, by_tiles)
    lines = statements(form, names, with_derivative, known)
    results = f"const float value = {lines.value}, slope = {lines.derivative or '0.0f'};"
    loads = named(SCORE=1, SCORE_LOADS=int(len(parts(form).head) < len(form.loads)))
    return (*loads, *made, *named(SCORE_LINES=" ".join([*lines.lines, results])))


@lru_cache(maxsize=256)
def mask_constants(form: Form, by_tiles: bool = False) -> Constants:
    """The same for a mask function: mask_function.cuh."""
    names, made, known = parts_in_c(form, by_tiles)
    lines = statements(form, names, known=known)
    return (*made, ("MASK_LINES", " ".join([*lines.lines, f"const bool value = {lines.value};"])))


def parts_in_c(form: Form, by_tiles: bool) -> tuple[Mapping[str, str], Constants, Mapping[Node, str]]:
    """A form's names in C, the constants for its loads once a head, a row or a key, and the names of the loaded values.
    A mask's have names of their own, since a kernel may have a score function too."""
    names = PLACES | {one.name: f"p.{field(one.name, form.kind)}" for one in form.captured}
    found, own, prefix = parts(form, by_tiles), form.kind.upper(), "" if form.kind == "score" else f"{form.kind}_"
    known: dict[Node, str] = {}
    made: list[tuple[str, int | str]] = []
    for place in ("head", "row", "key") if by_tiles else ("head",):
        loads: tuple[Load, ...] = getattr(found, place)
        written = Statements(names, f"{prefix}{place}_", known)
        called = [f"of_{place}.{prefix}load_{number}" for number in range(len(loads))]
        kept = [f"{name} = {written.value(load)};" for name, load in zip(called, loads, strict=True)]
        fields = [f"{C_TYPES[load.type]} {prefix}load_{number};" for number, load in enumerate(loads)]
        made.append((f"{own}_OF_{place.upper()}", " ".join(fields)))
        made.append((f"{own}_{place.upper()}_LINES", " ".join([*written.lines, *kept])))
        if by_tiles and place != "head":
            made.append((f"{own}_{place.upper()}_LOADS", len(loads)))
        known |= dict(zip(loads, called, strict=True))
    return names, tuple(made), known


def itemsize(form: Form, load: Load) -> int:
    """The bytes that a load reads."""
    dtype = next(one.dtype for one in form.captured if one.name == load.name)
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


# Captured numbers, by the names of the kernels' struct and as that has them: ints and conditions have 32 bits there
Numbers = tuple[tuple[str, Any], ...]


def to_be_made(kind: str, given: Any) -> str:
    """Words for a text or a Python function in the place of a Score or Mask; "" for anything else."""
    return f": pass cupyflash.{kind.capitalize()}({kind})" if isinstance(given, str) or callable(given) else ""


def captured_values(score: Score | None, mask: Mask | None = None) -> tuple[Report, Numbers]:
    """A call's captured arrays and numbers, by the names of the kernels' struct. TypeError unless given a Score and a Mask."""
    if not isinstance(score, Score | None):
        raise TypeError(f"score must be a cupyflash.Score or None, got {type(score).__name__}{to_be_made('score', score)}")
    if not isinstance(mask, Mask | None):
        raise TypeError(f"mask must be a cupyflash.Mask or None, got {type(mask).__name__}")
    given = [each for each in (score, mask) if each is not None]
    arrays = {name: array for each in given for name, array in each.held()[1].items()}
    return arrays, tuple(number for each in given for number in each.fields.items())


def as_given(number: float) -> np.generic:
    """Convert a captured number to its type in the kernels' struct."""
    return np.float32(number) if isinstance(number, float) else np.int32(number)


def no_numbers(*forms: Form | None) -> dict[str, int]:
    """Zeros in place of the captured numbers, which each launch supplies."""
    return {field(one.name, form.kind): 0 for form in forms if form for one in form.captured if one.axes is None}


def is_captured(name: str) -> bool:
    """True if the call's score or mask function has captured this array."""
    return name.startswith((field("", "score"), field("", "mask")))


def captured_among(arrays: Values) -> Report:
    """The arrays of a call that its score function has captured."""
    return {name: array for name, array in arrays.items() if is_captured(name)}


def check_captured(problem: Any, arrays: Values) -> None:
    """Raise ValueError unless captured arrays, by the struct's names, fit a problem."""
    for form in (problem.options.score, problem.options.mask_function):
        if form is not None:
            form.check({name: array.shape for name, array in captured_by(form, arrays).items()}, sizes_of(problem))


def check_value(one: Captured, name: str, value: Any) -> None:
    """Raise TypeError or ValueError, with `name`, if a value's type is not that of the captured one that it replaces."""
    if one.axes is not None:
        _check_captured(name, value)
        found = str(Captured(one.name, _dtype_name(value.dtype), value.ndim))
    else:
        number = _number(name, value) if isinstance(value, Real | np.bool_) else None
        # The kernels' struct has 1 for True
        fits = {"bool": number in (0, 1), "int": isinstance(number, int), "float": number is not None}[one.dtype]
        found = str(one) if fits else repr(value) if number is not None else type(value).__name__
    if found != str(one):
        raise TypeError(f"{name} must be {one}, as it was captured, got {found}")


def captured_by(form: Form, arrays: Values) -> Report:
    """The arrays of a call that a function has captured, by the function's own names."""
    prefix = field("", form.kind)
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


# Scores for which NumPy evaluates a mask function at a time
AT_A_TIME = 1 << 22


def seen_by(form: Form, problem: Any, values: Values, sequence: int = 0) -> Array:
    """Evaluate a mask function for each score of a problem, in float32 as the kernels do; the result broadcasts to S's shape.

    `values` are the captured NumPy arrays and numbers, by the function's names. If the problem is one of several sequences,
    `sequence` is its number, b in the expression.
    """
    at = positions(sizes_of(problem))
    at |= {"b": at["b"] + sequence, **values}

    def of_rows(rows: slice) -> Array:
        """The mask of a few rows at a time, since each operation makes an array of 32 bits a score."""
        found: Array = evaluate(form.tree, at | {name: at[name][..., rows, :] for name in ("row", "q")}, np.float32)
        return found

    step, along = max(1, AT_A_TIME // max(1, problem.head_count * problem.seqlen_k)), depends_on(form.tree)
    if "row" not in along or problem.seqlen_q <= step:
        return of_rows(slice(None))
    return np.concatenate([of_rows(slice(row, row + step)) for row in range(0, problem.seqlen_q, step)], axis=-2)


def sizes_of(problem: Any) -> dict[str, int]:
    """A problem's lengths, each by the position that runs over it."""
    p = problem
    return {"b": p.batch, "h": p.heads, "kv_h": p.kv_heads, "row": p.seqlen_q, "k": p.seqlen_k}
