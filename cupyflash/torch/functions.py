"""Score and mask functions as an operation's arguments: a text with expressions and numbers, and the captured tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cupyflash.expressions.trace import traced
from cupyflash.request.score import Mask, Score
from cupyflash.torch.memory import tensor_of

KINDS: dict[str, type[Score | Mask]] = {"score": Score, "mask": Mask}


class TensorFunction(NamedTuple):
    """An expression, and the tensors and numbers that it captures."""

    expression: str
    captured: Mapping[str, Any]

    @classmethod
    def of(cls, kind: str, given: Any) -> TensorFunction:
        """Return the function of a `Score`, a `Mask`, or a Python function in their words. TypeError for anything else."""
        if isinstance(given, KINDS[kind]):
            return cls(given.text, {name: tensor_of(array) for name, array in given.arrays.items()} | given.numbers)
        if not callable(given):
            raise TypeError(f"{kind} must be a cupyflash.{KINDS[kind].__name__} or a Python function, got {type(given).__name__}")
        names = ("b", "h", "kv_h", "row", "k", "q", "n_q", "n_k")
        return cls(*traced(given, ("s", *names) if kind == "score" else names))


def functions_in(q: Any, **given: Any) -> tuple[str, list[Any]]:
    """(The text of the functions among `score` and `mask`, their captured tensors) by `arguments_of`. In a program that is being
    compiled this breaks the graph, since PyTorch's compiler cannot follow a trace of ours."""
    there = {kind: each for kind, each in given.items() if each is not None}
    if not there:
        return "", []
    trace = torch.compiler.disable(_traced_all) if torch.compiler.is_compiling() else _traced_all
    return trace(there, q)


def _traced_all(given: Mapping[str, Any], q: Any) -> tuple[str, list[Any]]:
    return arguments_of({kind: TensorFunction.of(kind, each) for kind, each in given.items()}, q)


def arguments_of(functions: Mapping[str, TensorFunction], q: Any) -> tuple[str, list[Any]]:
    """(The text of functions by kind, their captured tensors, a score's first). ValueError for tensors on another device than
    q."""
    said: dict[str, Any] = {}
    tensors: list[Any] = []
    for kind, (expression, captured) in functions.items():
        there = {name: value for name, value in captured.items() if isinstance(value, torch.Tensor)}
        for name, tensor in there.items():
            if tensor.device != q.device:
                raise ValueError(f"{name}, a captured tensor, must be on the device of the others, {q.device}, got {tensor.device}")
        said[kind] = expression, {name: value for name, value in captured.items() if name not in there}, list(there)
        tensors += there.values() if kind == "score" else (each.detach() for each in there.values())  # a condition has no gradient
    return json.dumps(said) if said else "", tensors


def captured_names(text: str, places: Sequence[int]) -> tuple[str, ...]:
    """The names, in such a text, of a score's captured tensors at some places."""
    return tuple(json.loads(text)["score"][2][at] for at in places)


def functions_of(text: str, captured: Sequence[Any]) -> dict[str, Any]:
    """The Score and the Mask of such a text, by keyword, with their captured arrays."""
    arrays, made = list(captured), {}
    for kind, (expression, numbers, names) in json.loads(text).items() if text else ():
        made[kind] = KINDS[kind](expression, **numbers, **{name: arrays.pop(0) for name in names})
    return made
