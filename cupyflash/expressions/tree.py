"""The nodes of an expression, and each operation's definition: types, NumPy, C, derivative.

Types: an int has 32 bits and wraps around; a float has 32 bits in the kernels, 64 in the reference; a bool is a condition. Where
types meet, the operands become the latest of bool, int and float; an int beyond 2**24 is rounded by that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

Type = Literal["bool", "int", "float"]
TYPES: tuple[Type, ...] = ("bool", "int", "float")

# The names that every expression may use, each with what it depends on. q is on the keys' axis: q = row + n_k - n_q.
POSITIONS = {"b": "batch", "h": "head", "kv_h": "head", "row": "row", "q": "row", "k": "column", "n_q": "", "n_k": ""}
# The positions that count from 0 to a length; an axis that one of them indexes alone has that length.
COUNTED = ("b", "h", "kv_h", "row", "k")


@dataclass(frozen=True)
class Number:
    """A number in the text."""

    type: Type
    value: int | float


@dataclass(frozen=True)
class Name:
    """The score s, a position, or a captured number."""

    type: Type
    name: str


@dataclass(frozen=True)
class Load:
    """An element of a captured array, with an int for each axis. An index outside is clamped into the axis."""

    type: Type
    name: str
    indices: tuple[Node, ...]


@dataclass(frozen=True)
class Apply:
    """An operation of the table below, of operands that have the types it takes."""

    type: Type
    operation: str
    operands: tuple[Node, ...]


Node = Number | Name | Load | Apply
ONE = Number("float", 1.0)


class Operation(NamedTuple):
    """The one definition of an operation.

    `kind`: the types of operands and result. "number": ints or floats, the result is of the same type; "float": floats; "compare":
    numbers, the result is a condition; "condition": conditions; "choice": a condition and two values of one type, the result is one
    of these; or the type to which it converts. `c` has {0}, {1}, ... in the operands' places; `c_int` replaces it for ints.

    The derivative is written in the language itself: a and b are operands, y is the value. `terms` are added up, one for each
    operand that has a derivative, d; `choice` selects da or db, so that the other may be infinite.
    """

    kind: str
    arity: int
    numpy: Callable[..., Any]
    c: str
    c_int: str = ""
    terms: tuple[str, ...] = ()
    choice: str = ""


def _same(x: Any) -> Any:
    return x


# Towards minus infinity, as in Python; 0 for a divisor of 0.
_FLOOR_DIVIDE = (
    "({1}) == 0 ? 0 : ({1}) == -1 ? int(0u - unsigned({0})) : ({0}) / ({1}) - int(({0}) % ({1}) != 0 && (({0}) ^ ({1})) < 0)"
)
# Sums and products are rounded as they are written here, whatever stands around them, so that a score is the same number in every
# kernel (`c` makes an FMA of a sum with a product). Ints are unsigned to C, which may then assume nothing of an overflow. fminf and
# fmaxf give the other operand for a NaN. At a tie, min and max have their first operand's derivative; abs has 1 at 0.
OPERATIONS = {
    "+": Operation("number", 2, np.add, "__fadd_rn({0}, {1})", "int(unsigned({0}) + unsigned({1}))", ("d", "d")),
    "-": Operation("number", 2, np.subtract, "__fsub_rn({0}, {1})", "int(unsigned({0}) - unsigned({1}))", ("d", "-d")),
    "*": Operation("number", 2, np.multiply, "__fmul_rn({0}, {1})", "int(unsigned({0}) * unsigned({1}))", ("d * b", "d * a")),
    "/": Operation("float", 2, np.divide, "score_divide({0}, {1})", "", ("d / b", "-d * y / b")),
    "%": Operation("number", 2, np.remainder, "score_mod({0}, {1})", "score_mod({0}, {1})", ("d", "-d * floor(a / b)")),
    "//": Operation("number", 2, np.floor_divide, "rintf(score_divide(__fsub_rn({0}, score_mod({0}, {1})), {1}))", _FLOOR_DIVIDE),
    "negate": Operation("number", 1, np.negative, "-{0}", "int(0u - unsigned({0}))", ("-d",)),
    "abs": Operation("number", 1, np.abs, "fabsf({0})", "{0} < 0 ? int(0u - unsigned({0})) : {0}", ("where(a < 0, -d, d)",)),
    "min": Operation("number", 2, np.fmin, "fminf({0}, {1})", "min({0}, {1})", (), "where(a == y, da, db)"),
    "max": Operation("number", 2, np.fmax, "fmaxf({0}, {1})", "max({0}, {1})", (), "where(a == y, da, db)"),
    "floor": Operation("float", 1, np.floor, "floorf({0})"),
    "exp": Operation("float", 1, np.exp, "expf({0})", "", ("d * y",)),
    "log": Operation("float", 1, np.log, "logf({0})", "", ("d / a",)),
    "sqrt": Operation("float", 1, np.sqrt, "score_sqrt({0})", "", ("d * 0.5 / y",)),
    "sin": Operation("float", 1, np.sin, "sinf({0})", "", ("d * cos(a)",)),
    "cos": Operation("float", 1, np.cos, "cosf({0})", "", ("-d * sin(a)",)),
    "tanh": Operation("float", 1, np.tanh, "tanhf({0})", "", ("d * (1 - y * y)",)),
    "<": Operation("compare", 2, np.less, "{0} < {1}"),
    "<=": Operation("compare", 2, np.less_equal, "{0} <= {1}"),
    ">": Operation("compare", 2, np.greater, "{0} > {1}"),
    ">=": Operation("compare", 2, np.greater_equal, "{0} >= {1}"),
    "==": Operation("compare", 2, np.equal, "{0} == {1}"),
    "!=": Operation("compare", 2, np.not_equal, "{0} != {1}"),
    "and": Operation("condition", 2, np.logical_and, "{0} && {1}"),
    "or": Operation("condition", 2, np.logical_or, "{0} || {1}"),
    "not": Operation("condition", 1, np.logical_not, "!{0}"),
    "where": Operation("choice", 3, np.where, "{0} ? {1} : {2}", "", (), "where(c, da, db)"),
    "int": Operation("int", 1, _same, "int({0})"),
    "float": Operation("float", 1, _same, "float({0})"),
}
# The operations that the text calls by name.
FUNCTIONS = ("where", "abs", "min", "max", "floor", "exp", "log", "sqrt", "sin", "cos", "tanh")


def apply(operation: str, *operands: Node) -> Node:
    """Apply an operation to operands of any type, after conversion. TypeError for a number in place of a condition."""
    kind = OPERATIONS[operation].kind
    conditions, values = {"condition": (operands, ()), "choice": (operands[:1], operands[1:])}.get(kind, ((), operands))
    if any(one.type != "bool" for one in conditions):
        wanted = "a condition" if kind == "choice" else "conditions"
        raise TypeError(f"{operation} takes {wanted} (a comparison, say), not a number")
    if kind == "condition":
        return Apply("bool", operation, conditions)
    least: Type = "bool" if kind == "choice" else "float" if kind == "float" else "int"
    common = max(least, *(one.type for one in values), key=TYPES.index)
    converted = tuple(convert(one, common) for one in values)
    if operation == "*" and ONE in converted:
        return converted[converted[0] == ONE]
    return Apply("bool" if kind == "compare" else common, operation, (*conditions, *converted))


def convert(node: Node, to: Type) -> Node:
    """Convert a node to its own type or a later one."""
    if node.type == to:
        return node
    if isinstance(node, Number):
        return Number(to, float(node.value) if to == "float" else int(node.value))
    return Apply(to, to, (node,))


def children(node: Node) -> tuple[Node, ...]:
    """The nodes directly below a node."""
    return node.operands if isinstance(node, Apply) else node.indices if isinstance(node, Load) else ()


def counted(index: Node) -> str | None:
    """The position that an index names alone, which needs no clamping; None for other indices."""
    return index.name if isinstance(index, Name) and index.name in COUNTED else None


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes below it, the parts first."""
    for child in children(node):
        yield from walk(child)
    yield node


def loads(*trees: Node) -> tuple[Load, ...]:
    """The loads of trees, equal ones once, each after those that its indices need."""
    return tuple(dict.fromkeys(node for tree in trees for node in walk(tree) if isinstance(node, Load)))


def depends_on(node: Node) -> frozenset[str]:
    """The axes along which a value changes: "batch", "head", "row", "column"; and "score" if it contains s.

    A load depends on what its indices depend on: once for each of these is enough. n_q and n_k count as constant.
    """
    names = {part.name for part in walk(node) if isinstance(part, Name)}
    return frozenset("score" if name == "s" else POSITIONS.get(name, "") for name in names) - {""}
