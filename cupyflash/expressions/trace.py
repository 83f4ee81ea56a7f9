"""A Python function as an expression: it is called once, with symbols that write what is computed with them as text.

Captured values are those that the function finds under a name: in its closure, in globals, as defaults. Arrays become `Elements`,
of which an index makes a symbol; numbers stay numbers, which symbols write by their names. Functions that it calls are traced too.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NoReturn

import numpy as np

from cupyflash.basics import Report, Shape, Values
from cupyflash.expressions.parse import MAX_LENGTH
from cupyflash.expressions.tree import FUNCTIONS, POSITIONS
from cupyflash.words import cut

# What an operation of Python, NumPy, CuPy or PyTorch writes, by the name that each has for it.
OPERATIONS = {
    **dict.fromkeys(("add",), "({} + {})"),
    **dict.fromkeys(("subtract", "sub"), "({} - {})"),
    **dict.fromkeys(("multiply", "mul"), "({} * {})"),
    **dict.fromkeys(("divide", "div", "true_divide"), "({} / {})"),
    **dict.fromkeys(("floor_divide",), "({} // {})"),
    **dict.fromkeys(("remainder",), "({} % {})"),
    **dict.fromkeys(("less", "lt"), "({} < {})"),
    **dict.fromkeys(("less_equal", "le"), "({} <= {})"),
    **dict.fromkeys(("greater", "gt"), "({} > {})"),
    **dict.fromkeys(("greater_equal", "ge"), "({} >= {})"),
    **dict.fromkeys(("equal", "eq"), "({} == {})"),
    **dict.fromkeys(("not_equal", "ne"), "({} != {})"),
    **dict.fromkeys(("logical_and", "bitwise_and"), "({} and {})"),
    **dict.fromkeys(("logical_or", "bitwise_or"), "({} or {})"),
    **dict.fromkeys(("logical_not", "bitwise_not", "invert"), "(not {})"),
    **dict.fromkeys(("negative", "neg"), "(-{})"),
    **dict.fromkeys(("absolute", "abs"), "abs({})"),
    **dict.fromkeys(("minimum", "fmin"), "min({}, {})"),
    **dict.fromkeys(("maximum", "fmax"), "max({}, {})"),
    **dict.fromkeys(("clip", "clamp"), "min(max({}, {}), {})"),
    **{name: f"{name}({{}})" for name in ("floor", "exp", "log", "sqrt", "sin", "cos", "tanh")},
    "where": "where({}, {}, {})",
    "square": "({0} * {0})",
    "exp2": f"exp({{}} * {math.log(2)})",
    "sigmoid": "(1.0 / (1.0 + exp(-{})))",
    "relu": "max({}, 0.0)",
    "silu": "({0} / (1.0 + exp(-{0})))",
}
KNOWN = f"arithmetic, comparisons, & | ~, and NumPy's or PyTorch's {', '.join(dict.fromkeys(FUNCTIONS))}, minimum, maximum, clip"
DECIDE = (
    "so Python cannot decide by it: write (a) & (b), (a) | (b) and ~(a) in place of and, or and not; (a < b) & (b < c) in place of "
    "a < b < c; np.where(condition, a, b) in place of if and else; np.minimum and np.maximum in place of min and max"
)
CONVERT = "so it cannot become a number of Python's: write np.tanh in place of math.tanh, and the like"
NAMED = "capture each array by a name of its own, in the function's closure or globals, not in a list or as an attribute"


class Untraceable(TypeError):
    """The reason why a function has no expression, and what to write instead."""


class _Int(int):
    """A captured number: Python computes with it as ever, and a symbol writes its name."""

    name: str


class _Float(float):
    name: str


def traced(function: Callable[..., Any], names: tuple[str, ...]) -> tuple[str, Report]:
    """The text of a function whose parameters are among the language's `names`, and the values that it has captured, by name.

    TypeError that says what to write instead for what cannot be traced; what the function itself raises goes through.
    """
    parameters = inspect.signature(function).parameters
    for each in parameters.values():
        named = each.name in names and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        if not named and each.default is each.empty:
            wrapped = ", ".join(name for name in ("s", "b", "h", "row", "k") if name in names)
            raise TypeError(
                f"a function's parameters are named {', '.join(names)}, as many as it uses, got {str(each)!r}: for other names in "
                f"FlexAttention's order pass lambda {wrapped}: function({wrapped})"
            )
    trace = Tracing()
    try:
        found = trace.seen(function)(**{name: Symbolic(trace, name) for name in parameters if name in names})
    except IndexError as error:
        raise Untraceable(f"{error}: if an array is indexed by {', '.join(POSITIONS)} here, {NAMED}") from error
    if found is None:
        raise Untraceable("the function returned None, and not an expression")
    tree = ast.parse(trace.text(found), mode="eval")
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return ast.unparse(tree), {name: value for name, value in trace.captured.items() if name in used}


class Tracing:
    """One call of a function with symbols.

    captured: the arrays and numbers that the function has found, by the names that the text has for them.
    """

    def __init__(self) -> None:
        self.captured: Report = {}

    def seen(self, value: Any, name: str = "captured") -> Any:
        """A value as a traced function sees it: arrays, numbers and functions are replaced, all else is itself."""
        if is_array(value):
            return Elements(self, value, name) if len(value.shape) else Symbolic(self, self.captured_as(name, value))
        if type(value) in (int, float):
            number = (_Int if type(value) is int else _Float)(value)
            number.name = name
            return number
        if isinstance(value, partial):
            beside = {key: self.seen(each, key) for key, each in value.keywords.items()}
            return partial(self.seen(value.func), *(self.seen(each) for each in value.args), **beside)
        if isinstance(value, tuple) and value and all(map(callable, value)):
            return tuple(self.seen(each) for each in value)
        if isinstance(value, MethodType):
            return partial(self.seen(value.__func__), value.__self__)
        if isinstance(value, FunctionType):
            return lambda *arguments, **beside: self._rebuilt(value)(*arguments, **beside)
        return value

    def _rebuilt(self, function: FunctionType) -> FunctionType:
        """The function with what it has captured as a traced function sees it."""
        code = function.__code__
        named = {name for each in _codes(code) for name in each.co_names} & function.__globals__.keys()
        inside = function.__globals__ | {name: self.seen(function.__globals__[name], name) for name in named}
        cells = tuple(map(self._cell, code.co_freevars, function.__closure__ or ()))
        made = FunctionType(code, inside, function.__name__, function.__defaults__, cells)
        first = code.co_argcount - len(function.__defaults__ or ())
        defaults = zip(code.co_varnames[first : code.co_argcount], function.__defaults__ or (), strict=True)
        made.__defaults__ = tuple(self.seen(value, name) for name, value in defaults)
        made.__kwdefaults__ = {name: self.seen(value, name) for name, value in (function.__kwdefaults__ or {}).items()}
        return made

    def _cell(self, name: str, cell: CellType) -> CellType:
        try:
            return CellType(self.seen(cell.cell_contents, name))
        except ValueError:  # nothing is in it yet
            return cell

    def captured_as(self, name: str, value: Any) -> str:
        """The name of a captured value in the text: its own, if that has no other meaning."""
        name = name if name.isascii() else "captured"
        for number in count():
            one = f"{name}_{number}" if number else name
            free = one.isascii() and one not in ("s", *POSITIONS, *FUNCTIONS)
            if free and _same(self.captured.setdefault(one, value), value):
                return one
        raise AssertionError("names never end")

    def text(self, value: Any) -> str:
        """The text of a symbol or number."""
        if isinstance(value, Symbolic):
            return value.text
        if isinstance(value, _Int | _Float):
            return self.captured_as(value.name, (int if isinstance(value, _Int) else float)(value))
        value = value.item() if isinstance(value, np.generic) else value
        if isinstance(value, bool):  # of these and infinite numbers the language has none but captured ones
            return self.captured_as("true" if value else "false", value)
        if isinstance(value, float) and not math.isfinite(value):
            name = "nan" if math.isnan(value) else "inf"
            return ("(-{})" if value < 0 else "{}").format(self.captured_as(name, getattr(math, name)))
        if isinstance(value, int | float):
            return repr(value) if value >= 0 else f"({value!r})"
        if isinstance(value, Elements) or is_array(value):
            name = value._name if isinstance(value, Elements) else "an array"
            raise Untraceable(f"{name} is computed with as a whole: compute with one element of it, array[i, j]")
        raise Untraceable(f"an expression has numbers, positions and elements of arrays, got {type(value).__name__}")

    def symbol(self, written: str, *values: Any) -> Symbolic:
        """The symbol of an operation."""
        text = written.format(*map(self.text, values))
        if len(text) > MAX_LENGTH:
            raise Untraceable(f"an expression may have {MAX_LENGTH:,} characters, this one has more: {cut(text)!r}")
        return Symbolic(self, text)

    def called(self, name: str, values: Sequence[Any], beside: Values) -> Any:
        """The symbol of a call of NumPy's, CuPy's or PyTorch's function of a name."""
        if name == "__getitem__":
            return Elements(self, values[0], "captured")[values[1]]
        if name in ("clip", "clamp"):
            limits = dict(zip(("min", "max"), values[1:], strict=False)) | dict(beside)
            return self._clipped(values[0], limits.pop("min", None), limits.pop("max", None))
        if name not in OPERATIONS or beside or len(values) != arity(name):
            raise Untraceable(f"{name} of {len([*values, *beside])} arguments has no place in an expression: {KNOWN} have")
        return self.symbol(OPERATIONS[name], *values)

    def _clipped(self, value: Any, low: Any, high: Any) -> Any:
        value = value if low is None else self.symbol(OPERATIONS["maximum"], value, low)
        return value if high is None else self.symbol(OPERATIONS["minimum"], value, high)


def arity(name: str) -> int:
    """The number of values of an operation."""
    return 1 if "{0}" in OPERATIONS[name] else OPERATIONS[name].count("{}")


def is_array(value: Any) -> bool:
    """True for arrays and tensors of any library."""
    shaped = isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype")
    return shaped and not isinstance(value, np.generic | Traced)


def _same(one: Any, other: Any) -> bool:
    """True for one object, or equal numbers of one type."""
    return one is other or (isinstance(one, int | float) and type(one) is type(other) and one == other)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _unary(name: str) -> Callable[[Any], Any]:
    return lambda self: self._trace.called(name, (self,), {})


def _binary(name: str) -> Any:
    return lambda self, other: self._trace.called(name, (self, other), {})


def _reflected(name: str) -> Any:
    return lambda self, other: self._trace.called(name, (other, self), {})


class Traced:
    """A value that takes part in a trace: NumPy, CuPy and PyTorch hand their functions of it on to the trace."""

    _trace: Tracing

    def __array_ufunc__(self, ufunc: Any, method: str, *values: Any, **beside: Any) -> Any:
        return self._trace.called(ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}", values, beside)

    def __array_function__(self, function: Any, types: Any, values: Any, beside: Any) -> Any:
        return self._trace.called(function.__name__, values, beside)

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *values: Any, **beside: Any) -> Any:
        return self._trace.called(kernel.name.removeprefix("cupy_"), values, beside)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, values: Any = (), beside: Any = None) -> Any:
        flat = [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
        trace: Tracing = next(each for each in flat if isinstance(each, Traced))._trace
        named = {name: value for name, value in (beside or {}).items() if name != "inplace"}  # an activation makes a value anew
        return trace.called(function.__name__, values, named)


class Symbolic(Traced):
    """A value that is known only in the kernel, as the text that computes it."""

    def __init__(self, trace: Tracing, text: str):
        self._trace, self.text = trace, text

    __add__, __radd__ = _binary("add"), _reflected("add")
    __sub__, __rsub__ = _binary("sub"), _reflected("sub")
    __mul__, __rmul__ = _binary("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _binary("div"), _reflected("div")
    __floordiv__, __rfloordiv__ = _binary("floor_divide"), _reflected("floor_divide")
    __mod__, __rmod__ = _binary("remainder"), _reflected("remainder")
    __and__, __rand__ = _binary("logical_and"), _reflected("logical_and")
    __or__, __ror__ = _binary("logical_or"), _reflected("logical_or")
    __lt__, __le__, __gt__, __ge__ = _binary("lt"), _binary("le"), _binary("gt"), _binary("ge")
    __eq__, __ne__ = _binary("eq"), _binary("ne")
    __neg__, __abs__, __invert__ = _unary("neg"), _unary("abs"), _unary("logical_not")
    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        """Methods of arrays and tensors: x.abs(), x.clamp(0, 3)."""
        if name not in OPERATIONS:
            raise AttributeError(f"a traced value has no {name}: {KNOWN} have a place in an expression")
        return lambda *values, **beside: self._trace.called(name, (self, *values), beside)

    def new_ones(self, *shape: Any, dtype: Any = None, **beside: Any) -> bool | int:
        """Returns one, with which functions begin that join others."""
        return True if str(dtype).endswith("bool") else 1

    def new_zeros(self, *shape: Any, dtype: Any = None, **beside: Any) -> bool | int:
        """Zero, likewise."""
        return False if str(dtype).endswith("bool") else 0

    def __bool__(self) -> bool:
        self._refuse(DECIDE)

    def __float__(self) -> float:
        self._refuse(CONVERT)

    __int__ = __index__ = __complex__ = __float__

    def __pow__(self, other: Any) -> Any:
        self._refuse("and an expression has no **: write x * x, or np.exp(np.log(x) * y)")

    __rpow__ = __pow__

    def __xor__(self, other: Any) -> Any:
        self._refuse("and an expression has no bits: of conditions write a != b; x * 8 and x // 8 in place of x << 3 and x >> 3")

    __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __xor__

    def _refuse(self, reason: str) -> NoReturn:
        raise Untraceable(f"{cut(_shown(self.text))} is known only in the kernel, {reason}")


class Elements(Traced):
    """A captured array: an index for each axis makes a symbol, `array[i, j]` or `array[i][j]`."""

    def __init__(self, trace: Tracing, array: Any, name: str, indices: tuple[Any, ...] = ()):
        self._trace, self._array, self._name, self._indices = trace, array, name, indices

    def __getitem__(self, index: Any) -> Any:
        indices = (*self._indices, *(index if isinstance(index, tuple) else (index,)))
        if len(indices) < len(self._array.shape):
            return Elements(self._trace, self._array, self._name, indices)
        name = self._trace.captured_as(self._name, self._array)
        return self._trace.symbol(f"{name}[{', '.join('{}' for _ in indices)}]", *indices)

    @property
    def shape(self) -> Shape:
        return tuple(self._array.shape[len(self._indices) :])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self._array.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        raise Untraceable(f"{self._name}.{name} is no element of {self._name}: compute arrays before, capture the result")


def _shown(text: str) -> str:
    return ast.unparse(ast.parse(text, mode="eval"))
