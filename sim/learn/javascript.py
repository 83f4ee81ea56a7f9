"""Python functions of plain numbers as JavaScript, so that a page computes by the formulas that the simulator uses.

The part of Python that is translated: arithmetic, comparisons, conditions, loops over `range` and lists, lists, dicts with names
as keys (`|` joins two), comprehensions with one `for`, `min`, `max`, `abs`, `len`, `sum`, `divmod`, `math`, numbers that a module
names, and functions of these. All else is refused with its line. Numbers are JavaScript's: whole ones are exact up to 2^53.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import textwrap
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

# Python's floor division and remainder, and sums of lists; the page's scripts may use them, too.
PRELUDE = """\
const floordiv = (a, b) => Math.floor(a / b);
const modulo = (a, b) => a - b * Math.floor(a / b);
const divmod = (a, b) => [floordiv(a, b), modulo(a, b)];
const total_of = list => list.reduce((all, each) => all + each, 0);
const range = (begin, end) => Array.from({ length: Math.max(0, end - begin) }, (_, n) => begin + n);
"""
BINARY = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}
COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "===", ast.NotEq: "!=="}
RESERVED = {"new", "let", "const", "var", "function", "this", "switch", "case", "default", "do", "delete"}
MATH = {"sqrt", "exp", "log", "log2", "ceil", "floor"}


class Untranslatable(ValueError):
    """Python for which there is no JavaScript here; the message has the function and its line."""


def translated(space: str, *functions: Callable[..., Any]) -> str:
    """A JavaScript object `space` with these functions by name; all that they call is translated, too.

    Raises Untranslatable for anything outside the part of Python above, and for two functions of one name.
    """
    asked, made = list(functions), dict[str, tuple[Any, str]]()
    while asked:
        function = asked.pop()
        name = function.__name__
        if name in made:
            if made[name][0] is not function:
                raise Untranslatable(f"two functions are called {name}")
            continue
        one = _Translation(function)
        made[name] = function, one.text
        asked += one.called
    names = ", ".join(sorted(function.__name__ for function in functions))
    texts = [made[name][1] for name in sorted(made)]
    return "".join([f"const {space} = (() => {{\n", PRELUDE, *texts, f"return {{ {names} }};\n}})();\n"])


class _Translation:
    """One function's JavaScript, and the functions that it calls."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.called: list[Any] = []
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        assert isinstance(tree, ast.FunctionDef)
        self.parameters = [each.arg for each in tree.args.args]
        optional = dict(zip(self.parameters[::-1], tree.args.defaults[::-1], strict=False))
        parts = [*ast.walk(tree)]
        inner = {each for part in parts if isinstance(part, ast.comprehension) for each in ast.walk(part.target)}
        stored = [each for each in parts if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
        outer = {each.id for each in stored if each not in inner}
        self.local = {*self.parameters, *(each.id for each in stored)}
        body = tree.body[1:] if ast.get_docstring(tree) else tree.body
        if words := self.local & RESERVED:
            raise self.refused(tree, f"JavaScript keeps {', '.join(sorted(words))} for itself")
        variables = sorted(outer - {*self.parameters})
        given = [f"{name} = {self.value(optional[name])}" if name in optional else name for name in self.parameters]
        lines = [f"  let {', '.join(variables)};"] * bool(variables) + self.block(body)
        self.text = "\n".join([f"function {tree.name}({', '.join(given)}) {{", *lines, "}\n"])

    def refused(self, node: ast.AST, why: str) -> Untranslatable:
        return Untranslatable(f"{self.function.__qualname__}, its line {getattr(node, 'lineno', '?')}: {why}")

    # -- statements

    def statement(self, node: ast.stmt) -> list[str]:
        match node:
            case ast.Assign(targets=[target]):
                return [f"{self.target(target)} = {self.value(node.value)};"]
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                return [f"{self.target(target)} = {self.value(value)};"]
            case ast.AugAssign(target=target):
                operation = ast.BinOp(ast.parse(ast.unparse(target), mode="eval").body, node.op, node.value, lineno=node.lineno)
                return [f"{self.target(target)} = {self.value(operation)};"]
            case ast.If():
                rest = ["} else {", *self.block(node.orelse)] if node.orelse else []
                return [f"if ({self.value(node.test)}) {{", *self.block(node.body), *rest, "}"]
            case ast.For(orelse=[]):
                return [f"for ({self.target(node.target)} of {self.iterated(node.iter)}) {{", *self.block(node.body), "}"]
            case ast.While(orelse=[]):
                return [f"while ({self.value(node.test)}) {{", *self.block(node.body), "}"]
            case ast.Return(value=ast.expr() as value):
                return [f"return {self.value(value)};"]
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr="append"), args=[added])):
                return [f"{self.value(owner)}.push({self.value(added)});"]
        raise self.refused(node, f"no JavaScript for {ast.unparse(node)}")

    def block(self, body: list[ast.stmt]) -> list[str]:
        return [f"  {line}" for each in body for line in self.statement(each)]

    def target(self, node: ast.expr) -> str:
        match node:
            case ast.Name():
                return node.id
            case ast.Tuple():
                return f"[{', '.join(map(self.target, node.elts))}]"
            case ast.Subscript():
                return self.value(node)
        raise self.refused(node, f"nothing is assigned to {ast.unparse(node)}")

    # -- expressions

    def value(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=value) if value is None or isinstance(value, (bool, int, float, str)):
                return json.dumps(value)
            case ast.Name():
                return node.id if node.id in self.local else self.constant(node, self.known(node))
            case ast.BinOp():
                return self.binary(node)
            case ast.UnaryOp(op=ast.USub()):
                return f"(-{self.value(node.operand)})"
            case ast.UnaryOp(op=ast.Not()):
                return f"(!{self.value(node.operand)})"
            case ast.BoolOp():
                return f"({(' && ' if isinstance(node.op, ast.And) else ' || ').join(map(self.value, node.values))})"
            case ast.Compare() if all(type(op) in COMPARED for op in node.ops):
                sides = [self.value(each) for each in (node.left, *node.comparators)]
                pairs = zip(sides, node.ops, sides[1:], strict=False)
                return f"({' && '.join(f'{left} {COMPARED[type(op)]} {right}' for left, op, right in pairs)})"
            case ast.IfExp():
                return f"({self.value(node.test)} ? {self.value(node.body)} : {self.value(node.orelse)})"
            case ast.Tuple() | ast.List():
                return f"[{', '.join(map(self.value, node.elts))}]"
            case ast.Starred():
                return f"...{self.value(node.value)}"
            case ast.Dict():
                return f"({{ {', '.join(map(self.entry, node.keys, node.values))} }})"
            case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper, step=None)):
                ends = [self.value(lower) if lower else "0", *([self.value(upper)] if upper else [])]
                return f"{self.value(node.value)}.slice({', '.join(ends)})"
            case ast.Subscript():
                return f"{self.value(node.value)}[{self.value(node.slice)}]"
            case ast.ListComp() | ast.GeneratorExp():
                return f"{self.iterated(node.generators[0].iter)}.map({self.arrow(node, self.value(node.elt))})"
            case ast.DictComp():
                pair = f"[{self.value(node.key)}, {self.value(node.value)}]"
                return f"Object.fromEntries({self.iterated(node.generators[0].iter)}.map({self.arrow(node, pair)}))"
            case ast.Attribute(value=ast.Name(id="math"), attr="inf"):
                return "Infinity"
            case ast.Call(keywords=[]):
                return self.call(node)
        raise self.refused(node, f"no JavaScript for {ast.unparse(node)}")

    def binary(self, node: ast.BinOp) -> str:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.FloorDiv):
            return f"floordiv({left}, {right})"
        if isinstance(node.op, ast.Mod):
            return f"modulo({left}, {right})"
        if isinstance(node.op, ast.BitOr):
            return f"({{ ...{left}, ...{right} }})"
        if type(node.op) not in BINARY:
            raise self.refused(node, f"no JavaScript for {ast.unparse(node)}")
        return f"({left} {BINARY[type(node.op)]} {right})"

    def entry(self, key: ast.expr | None, value: ast.expr) -> str:
        if key is None:
            return f"...{self.value(value)}"
        return f"[{self.value(key)}]: {self.value(value)}"

    def arrow(self, node: ast.ListComp | ast.GeneratorExp | ast.DictComp, made: str) -> str:
        first, *more = node.generators
        if more or first.ifs:
            raise self.refused(node, "a comprehension has one `for` and no `if`")
        return f"({self.target(first.target)}) => {made}"

    def iterated(self, node: ast.expr) -> str:
        match node:
            case ast.Call(func=ast.Name(id="range"), args=[end], keywords=[]):
                return f"range(0, {self.value(end)})"
            case ast.Call(func=ast.Name(id="range"), args=[begin, end], keywords=[]):
                return f"range({self.value(begin)}, {self.value(end)})"
            case ast.Call(func=ast.Attribute(value=owner, attr="items"), args=[], keywords=[]):
                return f"Object.entries({self.value(owner)})"
        return self.value(node)

    def call(self, node: ast.Call) -> str:
        given = [self.value(each) for each in node.args]
        match node.func:
            case ast.Name(id="max" | "min" | "abs" as name):
                spread = "..." if len(given) == 1 and name != "abs" else ""
                return f"Math.{name}({spread}{', '.join(given)})"
            case ast.Name(id="len"):
                return f"{given[0]}.length"
            case ast.Name(id="sum"):
                return f"total_of({given[0]})"
            case ast.Name(id="divmod"):
                return f"divmod({', '.join(given)})"
            case ast.Attribute(value=ast.Name(id="math"), attr=name) if name in MATH:
                return f"Math.{name}({', '.join(given)})"
            case ast.Attribute(value=ast.Name(id="dict"), attr="fromkeys") if len(given) == 2:
                return f"Object.fromEntries({given[0]}.map(name => [name, {given[1]}]))"
            case ast.Attribute(value=owner, attr="get") if len(given) == 2:
                return f"({self.value(owner)}[{given[0]}] ?? {given[1]})"
            case ast.Attribute(value=ast.Name() as owner, attr="values") if not given:
                return f"Object.values({self.value(owner)})"
        function = self.known(node.func)
        if not isinstance(function, FunctionType):
            raise self.refused(node, f"{ast.unparse(node.func)} is no function of Python's text")
        self.called.append(function)
        return f"{function.__name__}({', '.join(given)})"

    # -- names of the module

    def known(self, node: ast.expr) -> Any:
        match node:
            case ast.Name() if node.id in self.function.__globals__:
                return self.function.__globals__[node.id]
            case ast.Attribute() if isinstance(owner := self.known(node.value), ModuleType):
                return getattr(owner, node.attr)
        raise self.refused(node, f"{ast.unparse(node)} is not known")

    def constant(self, node: ast.expr, value: Any) -> str:
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.refused(node, f"{ast.unparse(node)} is no number")
        return json.dumps(value)
