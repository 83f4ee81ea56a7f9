"""Running the function to be judged: modules loaded under the simulation, fresh memory where it allocates, launches collected."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from cupyflash.basics import Report, Values
from cupyflash.sim.numba import simulated_numba
from cupyflash.sim.ptx import Launch, simulated_cupy, simulation
from cupyflash.sim.ptx.rawkernel import DeviceArray
from cupyflash.sim.ptx.state.segments import empty, empty_like, filled
from cupyflash.sim.triton import simulated_triton

from .reference import Results, call, copied
from .tensors import packages, poisoned_tensors


class FreshNumpy(ModuleType):
    """NumPy for the judged module: `empty` and `empty_like` return fresh memory, all else is NumPy's own."""

    empty, empty_like = staticmethod(empty), staticmethod(empty_like)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


FRESH = FreshNumpy("numpy")
INSTEAD: dict[int, Any] = {id(np): FRESH, id(np.empty): empty, id(np.empty_like): empty_like}


def load(path: Path) -> ModuleType:
    """Loads a Python file as a module, fresh memory in NumPy's place. Raises what the file raises."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = f"judged_{abs(hash(str(path.resolve())))}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def fresh_numpy(function: Callable[..., Any]) -> Iterator[None]:
    """Gives the module of a function fresh memory from NumPy."""
    names = getattr(function, "__globals__", {})
    mine = {name: INSTEAD[id(value)] for name, value in names.items() if id(value) in INSTEAD}
    old = {name: names[name] for name in mine}
    names.update(mine)
    try:
        yield
    finally:
        names.update(old)


@contextmanager
def simulated(function: Callable[..., Any]) -> Iterator[None]:
    """The contexts in which a judged function runs without a GPU: CuPy's, and Triton's or Numba's if its module uses them."""
    with ExitStack() as stack:
        stack.enter_context(simulated_cupy())
        stack.enter_context(fresh_numpy(function))
        uses = packages(function)
        if "torch" in uses:
            stack.enter_context(poisoned_tensors())
        if "triton" in uses:
            stack.enter_context(simulated_triton())
        if "numba" in uses:
            stack.enter_context(simulated_numba())
        yield


@dataclass
class FunctionRun:
    """One call of the function: its results, or the exception, with the launches."""

    results: Results | None
    launches: Sequence[Launch]
    error: BaseException | None = None
    where: str = ""


def run(function: Callable[..., Any], arguments: Values, outs: Sequence[str], positional: bool, order: int | None) -> FunctionRun:
    """Calls the function with copies of the arguments, as CuPy's arrays; those of `outs` are fresh."""
    given: Report = {}
    shared: dict[int, Any] = {}
    for name, value in arguments.items():
        mine = shared.setdefault(id(value), copied(value)) if isinstance(value, np.ndarray) else value
        given[name] = (filled(mine) if name in outs else mine).view(DeviceArray) if isinstance(mine, np.ndarray) else mine
    with simulation(findings="keep", seed=order) as launches:
        try:
            results = call(function, given, positional)
        except Exception as error:
            frames = [one for one in traceback.extract_tb(error.__traceback__) if "cupyflash" not in one.filename]
            last = frames[-1] if frames else None
            return FunctionRun(None, launches, error, f"{Path(last.filename).name}:{last.lineno}" if last else "")
    return FunctionRun(results, launches)
