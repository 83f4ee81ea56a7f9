"""The reference's results and the errors that a kernel may have beside them.

The truth is the reference in float64. The plain computation is the reference in the kernel's own types, for half types in float32.
A right kernel adds in another order, so a bound by magnitudes joins twice the plain error: an element's magnitude is the larger of
its own and of the change that relative changes of all inputs by random signs make in it (the condition of the problem, measured in
float64).
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cupyflash.basics import Array, Report, Values

from .tensors import array, takes_tensors, tensors
from .values import is_half, limits

STEP = 2.0**-22
"""The relative change of inputs that measures the condition."""
CHANGES = 6
"""The number of random changes."""
SLIGHT = 8.0
"""An error is slight up to so many times the bound, if it is that of one element in 200 at most."""


@dataclass(frozen=True)
class Results:
    """A call's results: what it returned, as a list, and its arguments afterwards, by name."""

    returned: list[Any]
    arguments: Values


def call(function: Callable[..., Any], arguments: Values, positional: bool) -> Results:
    """Calls a function with arguments by name, or by place if its parameters have other names."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        given = tensors(arguments) if takes_tensors(function) else arguments
        made = function(*given.values()) if positional else function(**given)
    several = isinstance(made, (tuple, list)) and not hasattr(made, "dtype")
    returned = [] if made is None else list(made) if several else [made]
    return Results([array(one) for one in returned], arguments)


def copied(value: Any) -> Any:
    """Returns a copy of an argument with the same strides."""
    if not isinstance(value, np.ndarray):
        return value
    if 0 in value.strides and value.size > 1:
        return np.broadcast_to(value[tuple(slice(1) if not step else slice(None) for step in value.strides)].copy(), value.shape)
    made = np.empty_like(value, order="K", subok=False)
    if made.strides != value.strides and value.size:
        start, stop = np.lib.array_utils.byte_bounds(value)
        memory = np.zeros(stop - start, np.uint8)
        offset = value.__array_interface__["data"][0] - start
        made = np.ndarray(value.shape, value.dtype, memory, offset, value.strides)
    np.copyto(made, value)
    return made


def is_float(kind: np.dtype[Any]) -> bool:
    """True for floating-point and complex types, those of ml_dtypes too."""
    return kind.kind in "fc" or "float" in kind.name


def promoted(value: Any, to: str) -> Any:
    """Returns a floating-point argument as float64 (or float32 for half types); others as they are."""
    kind = getattr(value, "dtype", None)
    if kind is None or not is_float(kind):
        return copied(value)
    if to == "float32" and not is_half(kind):
        return copied(value)
    wide = np.dtype("complex128") if kind.kind == "c" else np.dtype(to)
    return value.astype(wide) if isinstance(value, np.ndarray) else wide.type(value)


def changed(value: Any, rng: Any) -> Any:
    """Returns a float64 argument with each element changed by `STEP` of itself, up or down."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "fc":
        return value * (1 + STEP * rng.choice((-1.0, 1.0), value.shape))
    return copied(value)


def flushed(value: Any) -> Any:
    """Returns a float64 argument with numbers that are subnormal in float32 replaced by zero, as CuPy's options do (-ftz=true)."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return np.where(np.abs(value) < 2.0**-126, np.copysign(0.0, value), value)
    return copied(value)


def unit(kind: np.dtype[Any]) -> float:
    """Returns the unit roundoff of a floating-point type, 0 for integers."""
    if not is_float(kind):
        return 0.0
    return float(limits(kind).eps) / 2


def smallest(kind: np.dtype[Any]) -> float:
    """Returns the least distance that counts in a type: its smallest normal number where subnormals may be flushed, else twice its
    smallest number."""
    info = limits(kind)
    return float(info.smallest_normal) if info.bits == 32 else 2 * float(info.smallest_subnormal)


@dataclass(frozen=True)
class Expected:
    """An output's expected values: `native`, the reference's own, and `others` that are right too.

    Floating-point outputs have `truth`, `plain` and `magnitude`, all as float64 (complex numbers as two).
    """

    native: Array
    others: tuple[Array, ...] = ()
    truth: Array | None = None
    plain: Array | None = None
    magnitude: Array | None = None
    inputs: tuple[float, int] = (0.0, 1)
    """The unit roundoff to compute with, and the number of elements of the largest input."""


def flat(value: Any) -> Array:
    """Returns an output as float64, complex numbers as two."""
    wide = np.asarray(value)
    if wide.dtype.kind == "c":
        wide = np.ascontiguousarray(wide.astype(np.complex128)).view(np.float64).reshape(*wide.shape, 2)
    return wide.astype(np.float64)


@dataclass
class Reference:
    """A reference function with the way to call it."""

    function: Callable[..., Any]
    positional: bool
    takes: Callable[[Values], Report]

    def native(self, arguments: Values) -> Results:
        """Returns the reference's results in the arguments' own types. Raises ValueError if it raises anything."""
        try:
            return call(self.function, {name: copied(one) for name, one in self.takes(arguments).items()}, self.positional)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            raise ValueError(f"the reference raises {type(error).__name__} at {place}: {error}") from error

    def expected(self, arguments: Values, native: Results, pick: Callable[[Results], list[Any]], rng: Any) -> list[Expected]:
        """Returns the expected outputs; `pick` takes the outputs out of results."""
        own = [np.asarray(one) for one in pick(native)]
        given = self.takes(arguments)
        kinds = [one.dtype for one in given.values() if hasattr(one, "dtype")]
        floats = [kind for kind in kinds if is_float(kind)]
        largest = max((one.size for one in given.values() if isinstance(one, np.ndarray)), default=1)

        def run(make: Callable[[Any], Any], base: Values) -> list[Array]:
            made = call(self.function, {name: make(one) for name, one in base.items()}, self.positional)
            return [np.asarray(one) for one in pick(made)]

        wide = {name: promoted(one, "float64") for name, one in given.items()}
        try:
            truth = run(copied, wide)
        except Exception:  # a reference that takes its own types only
            truth = own
        several = [run(lambda one: changed(one, rng), wide) for _ in range(CHANGES)] if floats and truth is not own else []
        plain = run(lambda one: promoted(one, "float32"), given) if any(map(is_half, floats)) else own
        zeroed = run(flushed, wide) if any(kind.itemsize == 4 and kind.kind == "f" for kind in floats) and truth is not own else []
        ours = [unit(kind) if kind.itemsize == 8 or kind.kind == "c" else unit(np.dtype("float32")) for kind in floats]
        compute = max(ours, default=unit(np.dtype("float64")))
        out = []
        for k, one in enumerate(own):
            if not is_float(one.dtype) and not is_float(truth[k].dtype):
                out.append(Expected(one, tuple(each[k] for each in (truth, *several, *([zeroed] if zeroed else [])))))
                continue
            exact = flat(truth[k])
            with np.errstate(all="ignore"):
                change = [np.abs(flat(each[k]) - exact) / STEP for each in several]
                condition = np.sqrt(np.mean(np.square(change), axis=0)) if change else np.zeros_like(exact)
                condition = np.where(np.isnan(condition), 0.0, condition)
                magnitude = np.maximum(np.abs(exact), condition)
            others = tuple(flat(each[k]) for each in (zeroed,) if each)
            out.append(Expected(one, others, exact, flat(plain[k]), magnitude, (compute, largest)))
        return out


@dataclass(frozen=True)
class WrongElements:
    """An output's elements that are wrong: their number and box, and the worst with its value, the expected one and the bound.

    slight: only accuracy is wanting: few elements, by little, or errors that are none beside ordinary results.
    """

    message: str
    evidence: Report
    slight: bool = False


def bound(expected: Expected, kind: np.dtype[Any], usual: float) -> Array:
    """Returns the error that each element of an output of that type may have; usual: the scale of ordinary outputs."""
    assert expected.truth is not None and expected.plain is not None and expected.magnitude is not None
    compute, largest = expected.inputs
    rounding = unit(kind)
    compute = max(compute, rounding if kind.itemsize >= 4 else 0.0)
    with np.errstate(all="ignore"):
        plain = np.abs(expected.plain - expected.truth)
        plain = np.where(np.isfinite(plain), plain, 0.0)
        if is_half(kind):
            own = np.abs(flat(expected.native) - expected.truth)
            own = np.where(np.isfinite(own), own, 0.0)
            plain = np.maximum(plain, np.minimum(own, 8 * rounding * expected.magnitude))
        else:
            plain = np.full_like(plain, plain.max(initial=0.0))
        other_order = (16 + 4 * np.sqrt(largest)) * compute * (expected.magnitude + min(scale_of(expected.truth), usual or np.inf))
        return np.asarray(2 * plain + other_order + 2 * rounding * expected.magnitude + smallest(kind))


def scale_of(values: Array) -> float:
    """Returns the largest finite size among values."""
    return float(np.max(np.where(np.isfinite(values), np.abs(values), 0.0), initial=0.0))


def compared(got: Any, expected: Expected, name: str, usual: float) -> tuple[WrongElements | None, float]:
    """Returns the difference of an output from the expected one, None if it is right; and its largest error, as a part of the
    bound. usual: the scale of the output for ordinary inputs."""
    own = np.asarray(got)
    if expected.truth is None:
        wrong = np.ones(own.shape, bool)
        for one in (expected.native, *expected.others):
            wrong &= own != np.asarray(one).astype(own.dtype)
        return (difference(own, expected.native, wrong, name, None), float("inf")) if wrong.any() else (None, 0.0)
    kind = own.dtype if is_float(own.dtype) else np.dtype("float64")
    values, truth = flat(own), expected.truth
    allowed = bound(expected, kind, usual)
    largest = float(limits(kind).max)
    with np.errstate(all="ignore"):
        right = near(values, truth, allowed, largest)
        for other in (expected.plain, *expected.others):
            assert other is not None
            unlike = (np.isfinite(other) != np.isfinite(truth)) | (other != truth) & ~np.isfinite(truth)
            elsewhere = unlike if other is expected.plain else np.ones(truth.shape, bool)
            right |= elsewhere & near(values, other, allowed, largest)
        assert expected.plain is not None
        right |= np.isnan(truth) | np.isnan(expected.plain) & ~np.isfinite(values)
        error = np.abs(values - truth) / allowed
    share = float(np.nanmax(np.where(np.isfinite(error), error, 0.0), initial=0.0))
    if right.all():
        return None, min(share, 1.0)
    wrong = ~right
    error = np.where(np.isfinite(error), error, np.inf)
    off = np.abs(np.where(np.isfinite(values), values, np.inf) - np.where(np.isfinite(truth), truth, 0.0))[wrong].max()
    few = wrong.sum() <= wrong.size / 200 and error[wrong].max() <= SLIGHT
    compute, count = expected.inputs
    small = off <= (16 + 4 * np.sqrt(count)) * compute * usual
    found = difference(values, truth, wrong, name, allowed, error)
    return replace(found, slight=bool(few or small)), share


def near(values: Array, wanted: Array, allowed: Array, largest: float) -> Array:
    """Returns which values are within the bound of the wanted ones; infinities count as numbers beyond the type's largest."""
    same = (np.abs(values - wanted) <= allowed) & np.isfinite(values)
    over = np.isinf(values) & (np.sign(values) == np.sign(wanted)) & (np.abs(wanted) + allowed >= largest)
    return np.asarray(same | over)


def difference(
    got: Array, wanted: Array, wrong: Array, name: str, allowed: Array | None, error: Array | None = None
) -> WrongElements:
    """Describes wrong elements."""
    count = int(wrong.sum())
    places = np.argwhere(wrong)
    score = np.where(wrong, 1.0 if error is None else error, -1.0)
    at = tuple(int(each) for each in np.unravel_index(int(np.argmax(score)), wrong.shape))
    box = [[int(low), int(high)] for low, high in zip(places.min(0), places.max(0), strict=True)] if wrong.ndim else []
    evidence: Report = {"output": name, "index": list(at), "got": number(got[at]), "expected": number(wanted[at])}
    if allowed is not None:
        evidence |= {"error": number(abs(float(got[at]) - float(wanted[at]))), "allowed": number(allowed[at])}
    evidence |= {"wrong": count, "elements": int(wrong.size), "from_to": box, "shape": list(wrong.shape)}
    whole = "every element" if count == wrong.size and count > 1 else f"{count:,} of {wrong.size:,} elements"
    where = f"[{', '.join(map(str, at))}]" if at else ""
    within = f", allowed is an error of {number(allowed[at]):.3g}" if allowed is not None and np.isfinite(allowed[at]) else ""
    spot = f"{name}{where} is {_short(got[at])}, expected {_short(wanted[at])}{within}"
    return WrongElements(f"{whole} of {name} {'is' if whole[0] == 'e' or count == 1 else 'are'} wrong: {spot}", evidence)


def _short(value: Any) -> str:
    return f"{float(value):.7g}" if np.asarray(value).dtype.kind == "f" else str(value)


def number(value: Any) -> Any:
    """Returns a number for JSON: infinities and NaN are texts there."""
    if np.asarray(value).dtype.kind in "biu":
        return np.asarray(value).item()
    made = float(value)
    return made if np.isfinite(made) else str(made)
