"""The judge: draws inputs, runs the function on the PTX machine, and gives one verdict with its evidence."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupyflash.basics import Array, Values
from cupyflash.sim.ptx.state.findings import ERROR, WARNING, shorten
from cupyflash.sim.ptx.state.segments import never_written

from .draws import Draw, DrawPlan, make, plans
from .problem import JudgedProblem, title
from .reference import Expected, Results, WrongElements, compared, flat, number, scale_of
from .running import run, simulated
from .tensors import compiler_has_shared_memory
from .verdict import Fault, Judgement, Tried

SECONDS = 45.0
"""Seconds of processor time after which no further draw begins."""
HURRY, SMALLEST = 0.5, 0.2
"""Draws become smaller from this share of the time on, down to this factor of sizes."""
ENOUGH = 8.0
"""The same once a fault is found: the verdict is wrong, and further draws only show what else is."""


def check(
    function: Callable[..., Any],
    against: Callable[..., Any],
    inputs: Callable[[Draw], Any] | None = None,
    *,
    seed: int = 0,
    seconds: float = SECONDS,
    strict: bool = False,
    only: int | None = None,
    names: tuple[str, str] | None = None,
) -> Judgement:
    """Judges a function that launches kernels, by a reference on NumPy arrays (docs/judging.md).

    function, against: take the same inputs, whose shapes and types their annotations declare (`declared`), or `inputs(draw)` makes.
    seed: of all draws. seconds: of processor time, after which no further draw begins. strict: conditions are faults. only: the
    number of one draw. names: of both, for the verdict.

    Raises ValueError or TypeError if the inputs are not declared, and what the reference raises.
    """
    began = time.process_time()
    with simulated(function):
        problem = JudgedProblem.of(function, against, inputs)
        chosen = list(enumerate(plans(problem.space, problem.read_only)))
        chosen = [(k, plan) for k, plan in chosen if only is None or k == only]
        if not chosen:
            raise ValueError(f"there is no draw {only}")
        judge = Judge(problem, seed, strict)
        for k, plan in chosen:
            limit = min(seconds, ENOUGH) if judge.faults else seconds
            if judge.tried and time.process_time() - began > limit:
                break
            judge.draw(k, plan)
            judge.hurry((time.process_time() - began) / len(judge.tried) * len(chosen) / seconds)
        judge.finish()
    spent = time.process_time() - began
    called = names or (title(function), title(against))
    counts = len(chosen), sum(plan.demanded for _, plan in chosen)
    return Judgement(*called, seed, tuple(judge.faults), tuple(judge.conditions), tuple(judge.tried), *counts, spent)


def shown(value: Any) -> str:
    """Returns an input's type and shape in words."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}" + ("" if value.flags.c_contiguous else f" strides {value.strides}")
    return f"{number(value)}" if isinstance(value, np.generic) else repr(value)


def bits_of(outputs: Sequence[tuple[str, Any]]) -> list[bytes]:
    return [np.asarray(value).tobytes() for _, value in outputs]


class Judge:
    """The draws of one problem, with the faults and conditions that they found: one for each kind and place."""

    def __init__(self, problem: JudgedProblem, seed: int, strict: bool):
        self.problem, self.seed, self.strict = problem, seed, strict
        self.faults: list[Fault] = []
        self.conditions: list[Fault] = []
        self.tried: list[Tried] = []
        self._compilers = compiler_has_shared_memory(problem.function)
        self._known: set[Any] = set()
        self._scales: dict[str, float] = {}
        self._shrink = 1.0
        self._last: tuple[Results, list[bytes]] | None = None

    def hurry(self, share: float) -> None:
        """Makes further draws smaller if all of them would take this share of the time."""
        if share > HURRY:
            self._shrink = max(self._shrink * 0.7, SMALLEST)

    def finish(self) -> None:
        """Tells if no kernel ran in any draw."""
        if not any(one.launches for one in self.tried):
            text = "no kernel ran on the machine: the results come from elsewhere (CuPy's array functions are NumPy's here)"
            self._demanded = True
            self._tell(self.tried[0].draw, "not launched", text, {})

    def draw(self, k: int, plan: DrawPlan) -> None:
        """Tries one draw."""
        began = time.process_time()
        arguments = make(self.problem.maker, plan, self.problem.space, (self.seed, k), self._shrink)
        before = len(self.faults), len(self.conditions)
        self._demanded = plan.demanded
        self._launches, self._error = 0, 0.0
        self._try(k, plan, arguments)
        found = (*self.faults[before[0] :], *self.conditions[before[1] :])
        inputs = {name: shown(one) for name, one in arguments.items()}
        result = found[0].kind if found else "right"
        spent = round(time.process_time() - began, 3)
        self.tried.append(Tried(k, plan.words, inputs, plan.demanded, result, self._launches, spent, round(self._error, 4)))

    def _tell(self, k: int, kind: str, message: str, evidence: Values, condition: bool = False, key: Any = None) -> None:
        key = (kind, message if key is None else key)
        fault = Fault(kind, message, k, evidence)
        if (condition or not self._demanded) and not self.strict:
            if key not in self._known and (key, "condition") not in self._known:
                self._known.add((key, "condition"))
                self.conditions.append(fault)
        elif key not in self._known:
            self._known.add(key)
            self.faults.append(fault)

    def _run(self, k: int, arguments: Values, order: int | None = None) -> Results | None:
        """Runs the function; tells its findings, and the exception if it raises one: then there are no results."""
        made = run(self.problem.function, arguments, self.problem.outs, self.problem.positional, order)
        self._launches += len(made.launches)
        for launch in made.launches:
            for one in (*launch.findings, *launch.notes):
                if one.severity in (ERROR, WARNING):
                    beyond = self._compilers and one.kind == "race" and "of shared memory" in one.message
                    evidence = {"kernel": one.kernel, "line": list(one.places[0]), "severity": one.severity, "order": order}
                    self._tell(k, one.kind, shorten(one), evidence, one.severity == WARNING or beyond, (one.kernel, one.places[0]))
        if made.results is None:
            kind = type(made.error).__name__
            text = str(made.error).strip().partition("\n")[0]
            self._tell(k, "raised", f"{kind} at {made.where or 'a call'}: {text}", {"exception": kind}, key=(kind, made.where))
        return made.results

    def _try(self, k: int, plan: DrawPlan, arguments: Values) -> None:
        problem = self.problem
        native = problem.reference.native(arguments)
        wanted = problem.outputs(native)
        if not wanted:
            raise ValueError("the reference returns nothing and no parameter is declared 'out' or 'inout'")
        rng = np.random.default_rng((self.seed, k, 1))
        count = len(wanted)
        expected = problem.reference.expected(arguments, native, lambda one: [v for _, v in problem.outputs(one)], rng)
        first = self._run(k, arguments)
        if first is None:
            return
        outputs = problem.outputs(first, count)
        right = self._compare(k, outputs, expected, "wrong values")
        self._unchanged(k, arguments, first, native)
        bits = bits_of(outputs)
        if self._last is not None:
            results, old = self._last
            if bits_of(problem.outputs(results, count)) != old:
                self._tell(k, "overwritten", "this call changed the arrays that an earlier call had returned", {}, key="")
        self._last = first, bits
        if not plan.orders:
            return
        again = self._run(k, arguments)
        if again is None:
            return
        if bits_of(problem.outputs(again, count)) != bits:
            self._tell(k, "state", "a second call with equal inputs gives other bits: something is kept between calls", {})
        for order in plan.orders if right else ():
            other = self._run(k, arguments, order)
            if other is None:
                continue
            outputs = problem.outputs(other, count)
            if self._compare(k, outputs, expected, "order") and bits_of(outputs) != bits:
                text = "warps in another order give other bits, within the bound (as sums by atomics do)"
                self._tell(k, "bits", text, {"order": order}, condition=True, key="")

    def _compare(self, k: int, outputs: Sequence[tuple[str, Any]], expected: Sequence[Expected], kind: str) -> bool:
        """Compares outputs with the expected ones; tells what is wrong, and returns True if nothing is."""
        if len(outputs) != len(expected):
            self._tell(k, "outputs", f"{len(outputs)} outputs, the reference has {len(expected)}", {})
            return False
        right = True
        for (name, value), one in zip(outputs, expected, strict=True):
            if value is None or not hasattr(value, "dtype"):
                value = np.asarray(value)
            if value.dtype.kind not in "biufcV" or value.dtype.hasobject:
                self._tell(k, "type", f"{name} is {value.dtype}, expected {one.native.dtype}", {})
                right = False
                continue
            if np.size(value) == one.native.size == 1 and np.shape(value) != one.native.shape:
                text = f"{name} has shape {list(np.shape(value))}, the reference's {list(one.native.shape)}"
                self._tell(k, "shape", text, {}, condition=True, key=name)
                value = np.asarray(value).reshape(one.native.shape)
            if np.shape(value) != one.native.shape:
                text = f"{name} has shape {list(np.shape(value))}, expected {list(one.native.shape)}"
                self._tell(k, "shape", text, {"got": list(np.shape(value)), "expected": list(one.native.shape)}, key=name)
                right = False
                continue
            if value.dtype != one.native.dtype:
                text = f"{name} is {value.dtype}, the reference's is {one.native.dtype}"
                self._tell(k, "type", text, {}, condition=True, key=name)
            found, error = compared(value, one, name, self._usual(name, one))
            self._error = max(self._error, error if np.isfinite(error) else 0.0)
            if found is None:
                continue
            if found.slight:
                self._tell(k, "accuracy", found.message, found.evidence, condition=True, key=name)
                continue
            right = False
            self._differs(k, kind, name, np.asarray(value), found)
        return right

    def _usual(self, name: str, one: Expected) -> float:
        """Returns the scale of an output for ordinary inputs, those of a draw of the first plan."""
        if one.truth is None:
            return 0.0
        if name not in self._scales:
            arguments = make(self.problem.maker, DrawPlan(), self.problem.space, (self.seed, 0))
            made = self.problem.reference.native(arguments)
            values = [*self.problem.outputs(made), *made.arguments.items()]
            self._scales |= {key: scale_of(flat(value)) for key, value in values if isinstance(value, (np.ndarray, np.generic))}
        return self._scales.get(name, 0.0)

    def _differs(self, k: int, kind: str, name: str, value: Array, found: WrongElements) -> None:
        never = never_written(value)
        if never.any():
            places = np.argwhere(never)
            box = [[int(low), int(high)] for low, high in zip(places.min(0), places.max(0), strict=True)]
            text = f"{int(never.sum()):,} of {never.size:,} elements of {name} were never written"
            self._tell(k, "unwritten", text, {**found.evidence, "unwritten": int(never.sum()), "from_to": box}, key=name)
            return
        self._tell(k, kind, found.message, found.evidence, key=name)

    def _unchanged(self, k: int, arguments: Values, results: Results, native: Results) -> None:
        """Arrays that the reference leaves as they are have to stay so."""
        for name, value in arguments.items():
            if not isinstance(value, np.ndarray) or name in (*self.problem.outs, *self.problem.inouts):
                continue
            theirs = native.arguments.get(name)
            after = results.arguments[name]
            if isinstance(theirs, np.ndarray) and theirs.tobytes() != value.tobytes():
                self._compare(k, [(name, after)], self._moved(arguments, name, native), "wrong values")
            elif np.asarray(after).tobytes() != value.tobytes():
                self._tell(k, "changed input", f"{name} has changed, and the reference leaves it as it is", {}, key=name)

    def _moved(self, arguments: Values, name: str, native: Results) -> list[Expected]:
        """Returns what an argument that the reference changes in place is expected to be."""
        rng = np.random.default_rng((self.seed, 2))
        return self.problem.reference.expected(arguments, native, lambda one: [one.arguments[name]], rng)
