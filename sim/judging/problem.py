"""A problem: a function to judge, its reference, and the inputs of both, from annotations or from `inputs(draw)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupyflash.basics import Report, Values

from .declared import GRAMMAR, Declaration, declaration
from .draws import Draw, DrawPlan, DrawSpace, make
from .reference import Reference, Results
from .tensors import minds_nan

Function = Callable[..., Any]


@dataclass
class JudgedProblem:
    """The function, its reference, and what makes their inputs.

    outs: parameters that arrive unwritten. inouts: those that the function changes.
    """

    function: Function
    reference: Reference
    maker: Callable[[Draw], Report]
    positional: bool
    outs: tuple[str, ...] = ()
    inouts: tuple[str, ...] = ()
    space: DrawSpace = field(default_factory=DrawSpace)
    read_only: int = 0
    """The number of arrays that are only read."""

    @classmethod
    def of(cls, function: Function, reference: Function, inputs: Callable[[Draw], Any] | None) -> JudgedProblem:
        """Returns the problem. Raises ValueError or TypeError where its inputs are not declared, or wrongly."""
        ours, theirs = parameters(function), parameters(reference)
        declared = {} if inputs is not None else declarations(ours, theirs)

        def made(draw: Draw) -> Report:
            if inputs is None:
                return {name: draw.declared(one) for name, one in declared.items()}
            values = inputs(draw)
            given = dict(values) if isinstance(values, Mapping) else named(values, ours, theirs)
            space.roles |= {name: draw.roles[id(one)] for name, one in given.items() if id(one) in draw.roles}
            return given

        roles = {name: one.role for name, one in declared.items() if one.role != "in"}
        space = DrawSpace(roles=roles, nan=minds_nan(reference))
        first = make(made, DrawPlan("small"), space, (0,))
        outs = tuple(name for name, role in space.roles.items() if role == "out")
        inouts = tuple(name for name, role in space.roles.items() if role == "inout")
        needed = [name for name, one in theirs.items() if one.default is inspect.Parameter.empty]
        same = set(needed) <= set(first)
        given = first if same else {name: one for name, one in first.items() if name not in outs}
        if not same and not len(needed) <= len(given) <= len(theirs):
            raise TypeError(
                f"{title(reference)} takes {', '.join(theirs) or 'nothing'}, the inputs are {', '.join(first) or 'none'}: "
                "give its parameters the same names, or as many (those that are declared 'out' may be left out)"
            )

        def takes(arguments: Values) -> Report:
            if same:
                return {name: one for name, one in arguments.items() if name in theirs}
            return {name: one for name, one in arguments.items() if name not in outs}

        required = {name for name, one in ours.items() if one.default is inspect.Parameter.empty}
        by_name = required <= set(first) <= set(ours)
        if not by_name and not len(required) <= len(first) <= len(ours):
            raise TypeError(f"{title(function)} takes {', '.join(ours) or 'nothing'}, the inputs are {', '.join(first) or 'none'}")
        arrays = sum(isinstance(one, np.ndarray) for name, one in first.items() if name not in (*outs, *inouts))
        return cls(function, Reference(reference, not same, takes), made, not by_name, outs, inouts, space, arrays)

    def outputs(self, results: Results, count: int | None = None) -> list[tuple[str, Any]]:
        """Returns the outputs with their names: the returned ones, or else the arguments that are declared to be written."""
        written = [(name, results.arguments[name]) for name in (*self.outs, *self.inouts) if name in results.arguments]
        if results.returned and (count is None or len(results.returned) == count or not written):
            returned = results.returned
            return [("the result" if len(returned) == 1 else f"result {k}", one) for k, one in enumerate(returned)]
        return written


def title(function: Function) -> str:
    return getattr(function, "__name__", str(function))


def parameters(function: Function) -> dict[str, inspect.Parameter]:
    """Returns a function's parameters. Raises TypeError for one that takes any number of them."""
    found = dict(inspect.signature(function).parameters)
    for name, one in found.items():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            raise TypeError(f"{title(function)} takes any number of arguments (*{name}): its inputs have to have names")
    return found


def declarations(ours: Mapping[str, inspect.Parameter], theirs: Mapping[str, inspect.Parameter]) -> dict[str, Declaration]:
    """Returns the declaration of each parameter: the function's own, or the reference's of that name (or place, if no name is
    the same)."""
    own = {name: declaration(one.annotation) for name, one in ours.items()}
    others = {name: declaration(one.annotation) for name, one in theirs.items()}
    if not any(own.values()) and not set(ours) & set(theirs):
        own = dict(zip(ours, others.values(), strict=False))
    out = {}
    for name, parameter in ours.items():
        one = own.get(name) or others.get(name)
        if one is not None:
            out[name] = one
        elif parameter.default is inspect.Parameter.empty:
            said = "" if parameter.annotation is parameter.empty else f" by {parameter.annotation!r}"
            raise ValueError(
                f"parameter {name!r} is not declared{said}: annotate it, here or in the reference, as {GRAMMAR}; "
                "or write a function inputs(draw) that returns the arguments"
            )
    missing = [name for name, one in others.items() if one and name not in out and set(theirs) & set(ours)]
    if missing:
        raise ValueError(f"the reference declares {', '.join(missing)}, which the function does not take")
    return out


def named(values: Any, ours: Values, theirs: Values) -> Report:
    """Returns the values of `inputs(draw)` by the function's parameters."""
    listed = list(values) if isinstance(values, (tuple, list)) else [values]
    names = list(ours) if len(listed) <= len(ours) else list(theirs)
    if len(listed) > len(names):
        raise TypeError(f"inputs(draw) returned {len(listed)} values, the function takes {len(names)}")
    return dict(zip(names, listed, strict=False))
