"""Declarations: the texts by which a function's annotations say its inputs, such as `x: "float32[m, n]"`.

float32[m, n]                an array; a size is a name, a number or a sum or product of both: 16*k, n+1
float32[m, n<=1024]          a size with its largest value
float16|float32[...]         of either type; `...` are any axes, the same for all arrays that have them
int32[n] in range(m)         integers from 0 to below m; range(1, m+1); floating-point numbers: in (0, 1)
float32                      a NumPy scalar; int and float: Python's numbers; `in` as above
n                            the size n, as a Python int
out float32[m]               an array that the function writes: it arrives unwritten
inout float32[m]             one that it reads and changes
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_FORM = re.compile(
    r"(?:(?P<role>out|inout)\s+)?(?P<types>\w+(?:\s*\|\s*\w+)*)\s*(?:\[(?P<dims>[^\]]*)\])?\s*(?:\bin\s+(?P<within>.+))?"
)
PYTHON = {"int": "int64", "float": "float64", "bool": "bool"}
"""Types of Python's own numbers."""
GRAMMAR = "'float32[m, n]', 'int32[n] in range(m)', 'float32 in (0, 1)', 'n' (a size), 'out float32[n]'"


@dataclass(frozen=True)
class Declaration:
    """One parameter's declaration.

    types: names of its types, () for a size, whose text is `size`. dims: texts of sizes, None for a scalar. role: in, out, inout.
    """

    types: tuple[str, ...]
    dims: tuple[str, ...] | None = None
    within: str | None = None
    role: str = "in"
    size: str = ""

    @property
    def python(self) -> bool:
        """True for Python's own numbers."""
        return self.dims is None and self.types[0] in PYTHON


def dtype(name: str) -> np.dtype[Any]:
    """Returns a NumPy type by its name, `bfloat16` and the small floats of ml_dtypes too. Raises TypeError."""
    try:
        found: np.dtype[Any] = np.dtype(PYTHON.get(name, name))
    except TypeError:
        import ml_dtypes

        known = getattr(ml_dtypes, name, None)
        if known is None:
            raise TypeError(f"{name!r} is no type of NumPy's or ml_dtypes'") from None
        found = np.dtype(known)
    return found


_TYPE = re.compile(r"bool|u?int\d*|float\d*\w*|complex\d+|bfloat16")


def is_type(name: str) -> bool:
    """True for a name of a number's type (`n` and `d` are sizes, though NumPy has types of those names)."""
    try:
        return bool(_TYPE.fullmatch(name)) and bool(dtype(name))
    except TypeError:
        return False


def declaration(annotation: Any) -> Declaration | None:
    """Returns the declaration that an annotation is, None for any other annotation. Raises ValueError for a wrong declaration."""
    if isinstance(annotation, type):
        known = annotation in (int, float, bool) or issubclass(annotation, np.number)
        return Declaration((annotation.__name__,)) if known else None
    if not isinstance(annotation, str):
        return None
    text = annotation.strip()
    if text[:1] in "'\"":
        text = str(ast.literal_eval(text)).strip()
    found = _FORM.fullmatch(re.sub(r"^(np|numpy)\.(?=\w+$)", "", text))
    if found is None or not all(map(is_type, types := [one.strip() for one in found["types"].split("|")])):
        return _size(text)
    dims = None if found["dims"] is None else tuple(one.strip() for one in found["dims"].split(",") if one.strip())
    if found["role"] and dims is None:
        raise ValueError(f"{text!r}: only an array can be {found['role']}")
    for each in dims or ():
        if each != "...":
            names(limited(each)[0])
    if found["within"]:
        _within(found["within"])
    return Declaration(tuple(types), dims, found["within"], found["role"] or "in")


def limited(text: str) -> tuple[str, int | None]:
    """Returns a size's text without its limit, and the limit. Raises ValueError for one of more than a name."""
    size, sign, most = (part.strip() for part in text.partition("<="))
    if not sign:
        return text, None
    if not (size.isidentifier() and most.isdecimal() and int(most)):
        raise ValueError(f"{text!r} is no size: a limit is NAME<=NUMBER")
    return size, int(most)


_NAME = re.compile(r"[a-z_]\w*|[A-Z][A-Z0-9_]*")


def _size(text: str) -> Declaration | None:
    """Returns the declaration of a size; None where the text is an annotation of another meaning, such as `np.ndarray` or `str`."""
    try:
        used = names(text)
    except ValueError:
        return None
    known = all(_NAME.fullmatch(name) and not hasattr(builtins, name) for name in used)
    return Declaration((), size=text) if known else None


_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Div, ast.Pow, ast.USub)
_NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Name, ast.Load, ast.Constant, *_OPERATORS)


def _tree(text: str) -> ast.Expression:
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        raise ValueError(f"{text!r} is no size: names, numbers, + - * // ** and brackets are") from None
    for node in ast.walk(tree):
        if not isinstance(node, _NODES) or (isinstance(node, ast.Constant) and not isinstance(node.value, (int, float))):
            raise ValueError(f"{text!r} is no size: names, numbers, + - * // ** and brackets are")
    return tree


def names(text: str) -> list[str]:
    """Returns the names in an expression of sizes. Raises ValueError for anything else."""
    return [node.id for node in ast.walk(_tree(text)) if isinstance(node, ast.Name)]


def value(text: str, sizes: Mapping[str, int] | Callable[[str], int]) -> Any:
    """Returns the number that an expression of sizes is."""
    get = sizes.__getitem__ if isinstance(sizes, Mapping) else sizes
    return eval(compile(_tree(text), "<size>", "eval"), {"__builtins__": {}}, {name: get(name) for name in names(text)})


def _within(text: str) -> tuple[bool, list[str]]:
    """Returns (is a range of integers, texts of its bounds). Raises ValueError."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        node = ast.Constant(None)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range" and len(node.args) in (1, 2):
        parts = [ast.unparse(each) for each in node.args]
        bounds = ["0", *parts][-2:]
    elif isinstance(node, (ast.Tuple, ast.List)) and len(node.elts) == 2:
        bounds = [ast.unparse(each) for each in node.elts]
    else:
        raise ValueError(f"in {text}: write in range(n), in range(1, n) or in (0.0, 1.0)")
    for each in bounds:
        names(each)
    return isinstance(node, ast.Call), bounds


def bounds(text: str, sizes: Callable[[str], int]) -> tuple[float, float]:
    """Returns the least and the largest value of `in TEXT`; integers to the last one."""
    whole, (low, high) = _within(text)
    least, most = value(low, sizes), value(high, sizes)
    return least, most - 1 if whole else most
