"""PyTorch's tensors for functions that use `torch`: on the CPU, in the memory of the drawn arrays."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from cupyflash.basics import Report, Values


def packages(function: Callable[..., Any]) -> set[str]:
    """Returns the names of packages whose modules, or objects of whose types, the names that a function sees stand for."""
    return set().union(*map(package, visible(function).values()))


def visible(function: Callable[..., Any]) -> Report:
    """Returns the values that a function sees by name: its module's, and those of functions around it."""
    known = dict(getattr(function, "__globals__", {}))
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    for name, cell in zip(names, cells, strict=True):
        with suppress(ValueError):  # not assigned yet
            known[name] = cell.cell_contents
    return known


def package(value: Any) -> set[str]:
    """Returns the package of a module, or of an object's type."""
    return {(value.__name__ if isinstance(value, ModuleType) else str(type(value).__module__)).partition(".")[0]}


def compiler_has_shared_memory(function: Callable[..., Any]) -> bool:
    """True if a function's kernels are Triton's, whose compiler alone decides what is in shared memory (in Gluon people do)."""
    kinds = {str(type(value).__module__) for value in visible(function).values()}
    return any(kind.startswith("triton.runtime") for kind in kinds) and not any("gluon" in kind for kind in kinds)


def own_names(function: Callable[..., Any]) -> set[str]:
    """Returns the names in a function's code, and in that of functions inside it."""
    codes = [function.__code__] if hasattr(function, "__code__") else []
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names |= {*code.co_names, *code.co_freevars}
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
    return names


def used(function: Callable[..., Any]) -> list[Any]:
    """Returns the values that a function's code names."""
    known = visible(function)
    return [known[name] for name in own_names(function) if name in known]


def called(function: Callable[..., Any], seen: frozenset[int]) -> list[Callable[..., Any]]:
    """Returns the functions of a function's module that its code names, but for those already seen."""
    module = getattr(function, "__globals__", {})
    return [
        value
        for value in used(function)
        if isinstance(value, FunctionType) and value.__globals__ is module and id(value) not in seen
    ]


def takes_tensors(function: Callable[..., Any], seen: frozenset[int] = frozenset()) -> bool:
    """True if a function gets PyTorch's tensors in place of arrays: its annotations, its code, or that of functions of its module
    that it calls, name them."""
    if "Tensor" in str(getattr(function, "__annotations__", "")):
        return True
    if any(isinstance(value, ModuleType) and package(value) == {"torch"} for value in used(function)):
        return True
    return any(takes_tensors(value, seen | {id(value)}) for value in called(function, seen))


MIND_NAN = {"isnan", "isfinite", "fmax", "fmin"}


def minds_nan(function: Callable[..., Any], seen: frozenset[int] = frozenset()) -> bool:
    """True if a reference says what becomes of NaN: it, or a function of its module that it calls, is or names one of NumPy's
    functions that do (`isnan`, `nansum`, `nan_to_num`, `fmax`, ...)."""
    names = {*own_names(function), getattr(function, "__name__", "")}
    if names & MIND_NAN or any(name.startswith("nan") and name != "nan" for name in names):
        return True
    return any(minds_nan(value, seen | {id(value)}) for value in called(function, seen))


def tensor(value: Any) -> Any:
    """Returns an array as a tensor in the same memory; anything else as it is."""
    if not isinstance(value, np.ndarray):
        return value
    torch = importlib.import_module("torch")
    array = np.asarray(value)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an array that may only be read
        return torch.from_numpy(array)


def array(value: Any) -> Any:
    """Returns a tensor as an array in the same memory; anything else as it is."""
    if not type(value).__module__.startswith("torch") or not hasattr(value, "detach"):
        return value
    plain = value.detach().cpu()
    if str(plain.dtype) == "torch.bfloat16":
        import ml_dtypes

        return plain.view(importlib.import_module("torch").int16).numpy().view(ml_dtypes.bfloat16)
    return plain.numpy()


def tensors(arguments: Values) -> Report:
    """Returns arguments with tensors in place of arrays."""
    return {name: tensor(value) for name, value in arguments.items()}


@contextmanager
def poisoned_tensors() -> Iterator[None]:
    """Makes `torch.empty` fill its memory with NaN, or the largest integer."""
    torch = importlib.import_module("torch")
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
