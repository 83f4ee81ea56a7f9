"""Parse one Python expression to a tree. Python's own parser reads it; anything not listed here is refused, with its place."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import NamedTuple, NoReturn

import numpy as np

from cupyflash.expressions.tree import FUNCTIONS, OPERATIONS, Load, Node, Number, Type, apply, children, convert, depends_on
from cupyflash.words import QUOTED, cut, plural

ARITHMETIC = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"}
COMPARISONS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
ALLOWED = (
    "+ - * / // %, comparisons, and, or, not, 'a if c else b', "
    f"{', '.join(FUNCTIONS)}, numbers, names, and array[i, j] with an index an axis"
)
# Deeper nesting would exceed Python's recursion limit.
MAX_DEPTH = 64
# Characters of a text, and parts of its tree, in which the middle of a < b < c is there twice.
MAX_LENGTH, MAX_PARTS = 10_000, 10_000
LARGEST = float(np.finfo(np.float32).max)


class ArrayType(NamedTuple):
    """The type and number of axes of an array whose elements may be loaded."""

    type: Type
    axes: int


def parse(text: str, names: Mapping[str, Node | ArrayType]) -> Node:
    """The tree of an expression in which `names` mean these trees and arrays.

    Raises ValueError that shows the place in the text and says what is allowed there.
    """
    text = re.sub(r"\r\n?", "\n", text.strip())
    if len(text) > MAX_LENGTH:
        raise ValueError(f"an expression may have {MAX_LENGTH:,} characters, got {len(text):,}: {cut(text)!r}")
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise _refusal(f"not a Python expression: {error.msg}", text, error.lineno or 1, error.offset or len(text) + 1) from None
    except (RecursionError, MemoryError):
        raise _refusal("nested too deeply", text, 1, 1) from None
    return _Reader(text, names).read(tree.body)


class _Reader:
    def __init__(self, text: str, names: Mapping[str, Node | ArrayType]):
        self.text, self.names, self.depth = text, names, 0
        self.sizes: dict[int, tuple[Node, int]] = {}  # by identity: comparing trees takes time in proportion to their size

    def read(self, node: ast.expr) -> Node:
        """The tree of a part of the text."""
        if self.depth >= MAX_DEPTH:
            self.refuse(node, f"nested deeper than {MAX_DEPTH} levels")
        self.depth += 1
        try:
            tree = self.tree(node)
        except TypeError as error:
            self.refuse(node, str(error))
        if self.size(tree) > MAX_PARTS:
            self.refuse(node, f"larger than {MAX_PARTS:,} parts, as the middle of a < b < c counts twice")
        self.depth -= 1
        return tree

    def size(self, tree: Node) -> int:
        if id(tree) not in self.sizes:
            self.sizes[id(tree)] = tree, 1 + sum(map(self.size, children(tree)))
        return self.sizes[id(tree)][1]

    def tree(self, node: ast.expr) -> Node:
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return self.number(node, value)
            case ast.Name(id=name):
                return self.name(node, name)
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                return self.load(node, name, index.elts if isinstance(index, ast.Tuple) else [index])
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return apply("negate", self.read(operand))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return apply("not", self.read(operand))
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
                return apply(ARITHMETIC[type(operator)], self.read(left), self.read(right))
            case ast.BoolOp(op=operator, values=values):
                return _joined("and" if isinstance(operator, ast.And) else "or", self.row(values))
            case ast.Compare(left=left, ops=ops, comparators=others) if all(type(one) in COMPARISONS for one in ops):
                sides = self.row([left, *others])
                pairs = zip(ops, sides, sides[1:], strict=False)
                return _joined("and", [apply(COMPARISONS[type(one)], a, b) for one, a, b in pairs])
            case ast.IfExp(test=test, body=body, orelse=other):
                return apply("where", self.read(test), self.read(body), self.read(other))
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
                return self.call(node, name, self.row(arguments))
        self.refuse(node, f"{self.piece(node)} is not allowed; allowed are {ALLOWED}")

    def row(self, nodes: list[ast.expr]) -> list[Node]:
        """Read parts that are joined two by two: n parts make a tree n deep, which counts towards the limit."""
        deeper = max(0, len(nodes) - 2)
        self.depth += deeper
        trees = [self.read(node) for node in nodes]
        self.depth -= deeper
        return trees

    def number(self, node: ast.expr, value: int | float) -> Node:
        reason = out_of_range(value)
        if reason or value in (np.inf, -np.inf):
            self.refuse(node, reason or f"{self.piece(node)} is infinite: capture such a number by a name")
        return Number("int" if isinstance(value, int) else "float", value)

    def name(self, node: ast.expr, name: str) -> Node:
        match self.names.get(name):
            case None if name in FUNCTIONS:
                self.refuse(node, f"{name} is a function: {name}(...)")
            case None:
                known = ", ".join(self.names)
                self.refuse(node, f"{cut(name)!r} is not a name here; names are {known}, others are captured: {cut(name)}=...")
            case ArrayType(type, 0):
                return Load(type, name, ())
            case ArrayType(type, axes):
                self.refuse(node, f"{name} is an array: an element of it is {name}[{', '.join('ijlm'[:axes])}]")
            case tree:
                return tree

    def load(self, node: ast.expr, name: str, indices: list[ast.expr]) -> Node:
        match self.names.get(name):
            case ArrayType(type, axes):
                pass
            case _:
                self.refuse(node, f"{cut(name)!r} is not a captured array, so it has no elements")
        if len(indices) != axes:
            self.refuse(node, f"{name} takes an index for each of its axes, {axes}, got {len(indices)}")
        return Load(type, name, tuple(self.index(one) for one in indices))

    def index(self, node: ast.expr) -> Node:
        tree = self.read(node)
        if tree.type == "float":
            self.refuse(node, f"an index is an integer, {self.piece(node)} is a float")
        if "score" in depends_on(tree):
            self.refuse(node, f"an index may not depend on the score, as {self.piece(node)} does")
        if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
            self.refuse(node, f"an index counts from the beginning, {self.piece(node)} would be clamped to 0")
        return convert(tree, "int")

    def call(self, node: ast.expr, name: str, arguments: list[Node]) -> Node:
        wanted, several = OPERATIONS[name].arity, name in ("min", "max")
        if len(arguments) != wanted and not (several and len(arguments) > wanted):
            self.refuse(node, f"{name} takes {plural(wanted, 'argument')}{' or more' if several else ''}, got {len(arguments)}")
        return _joined(name, arguments) if several else apply(name, *arguments)

    def piece(self, node: ast.expr) -> str:
        return repr(cut(ast.get_source_segment(self.text, node) or ast.unparse(node)))

    def refuse(self, node: ast.expr, reason: str) -> NoReturn:
        """Raise a ValueError with the line of the text and a mark below the node."""
        line = self.text.split("\n")[node.lineno - 1].encode()
        first = len(line[: node.col_offset].decode())
        last = len(line[: node.end_col_offset].decode()) if node.end_lineno == node.lineno else len(line.decode())
        raise _refusal(reason, self.text, node.lineno, first + 1, last - first) from None


def _joined(operation: str, nodes: Sequence[Node]) -> Node:
    return reduce(lambda a, b: apply(operation, a, b), nodes)


def _refusal(reason: str, text: str, line: int, column: int, length: int = 1) -> ValueError:
    """The error with its reason and its place in the text; lines and columns count from 1."""
    lines = text.split("\n")
    place = f"column {column}" if len(lines) == 1 else f"line {line}, column {column}"
    whole = lines[min(line, len(lines)) - 1]
    first = max(0, min(column - 1 - QUOTED // 2, len(whole) - QUOTED))
    shown, at = whole[first : first + QUOTED], column - 1 - first
    before, behind = "..." if first else "", "..." if first + QUOTED < len(whole) else ""
    mark = " " * (len(before) + at) + "^" * max(1, min(length, len(shown) - at))
    return ValueError(f"at {place}: {reason}\n    {before}{shown}{behind}\n    {mark}")


def out_of_range(value: int | float) -> str:
    """The reason why a kernel cannot use a number; empty if it can."""
    if isinstance(value, int):
        shown = f"{value}" if value.bit_length() <= 128 else f"a number of {value.bit_length():,} bits"
        return "" if -(2**31) <= value < 2**31 else f"{shown} is no integer of 32 bits, from {-(2**31)} to {2**31 - 1}"
    return "" if not np.isfinite(value) or abs(value) <= LARGEST else f"{value} is beyond the range of float32"
