"""Draws: the inputs of one call, by a plan that says its sizes, values and layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import declared
from .values import drawn, is_half

ELEMENTS = 2400
"""Elements of an ordinary array."""
MOST = 1 << 17
"""Most elements of an array of any draw."""
LONG = 2100
"""A size that no block of threads covers at once."""
HUGE = 70_001
"""A size beyond 65,535 and beyond 256 blocks of 256 threads."""


class TooLarge(Exception):
    """An array of a draw would be too large: the draw is made again with smaller sizes."""


@dataclass(frozen=True)
class DrawPlan:
    """The kinds of a draw: sizes, values, layout. `demanded`: a failure is a fault; else it is a condition.

    orders: seeds of further runs in random order of warps. types: which of the declared types, by number.
    """

    sizes: str = "odd"
    values: str = "normal"
    layout: str = "contiguous"
    demanded: bool = True
    orders: tuple[int, ...] = ()
    types: int = 0

    @property
    def words(self) -> str:
        return f"{self.sizes} sizes, {self.values} values, {self.layout} arrays"


@dataclass
class DrawSpace:
    """Facts of a problem, by a first, small draw: the names of sizes in the order of their first use, the most axes of an array,
    the kinds of numbers, the number of types to choose from."""

    names: list[str] = field(default_factory=list)
    rank: int = 1
    kinds: set[str] = field(default_factory=set)
    nan: bool = False
    """True if NaN is an input: the reference names it."""
    types: int = 1
    arrays: int = 0
    roles: dict[str, str] = field(default_factory=dict)
    """The parameters that a function writes: out or inout."""


class Draw:
    """The source of one call's inputs, as a function `inputs(draw)` gets it."""

    def __init__(self, plan: DrawPlan, space: DrawSpace, seed: Sequence[int], shrink: float = 1.0):
        self.plan, self.space, self.shrink = plan, space, shrink
        self.rng = np.random.default_rng(seed)
        self.sizes: dict[str, int] = {}
        self.roles: dict[int, str] = {}
        self._same: dict[object, np.ndarray] = {}
        self._leading: tuple[int, ...] | None = None
        self._spread = 0

    def size(self, name: str, *, multiple: int = 1, least: int = 1, most: int = 1 << 30) -> int:
        """Returns the size of that name: the same in the whole draw, a multiple of `multiple`, from `least` to `most`."""
        if name not in self.space.names:
            self.space.names.append(name)
        if name not in self.sizes:
            wanted = self._wanted(name)
            whole = max(1, -(-wanted // multiple)) * multiple if wanted else 0
            self.sizes[name] = min(max(whole, least), most // multiple * multiple)
        return self.sizes[name]

    def _wanted(self, name: str) -> int:
        kind, _, which = self.plan.sizes.partition(" ")
        index, count = self.space.names.index(name), len(self.space.names)
        base = ELEMENTS ** (1 / max(self.space.rank, 1)) * self.shrink
        if kind == "one":
            return 1
        if kind in ("long", "huge", "empty"):
            # Odd, or twice an odd number: rising values then have their largest at an odd place.
            odd = 2 * int(self.rng.integers(LONG // 4, LONG // 4 + 40)) + 1
            chosen = {"long": 2 * odd if self.plan.values == "rising" else 2 * odd - 1, "huge": HUGE, "empty": 0}[kind]
            least = 0.53 if self.shrink > 0.1 else 0.0  # still longer than the largest block
            small = 3 + index if kind == "empty" else 2 + index % 2
            return max(1, int(chosen * max(self.shrink, least))) if name == which and chosen else 0 if name == which else small
        if kind == "small":
            return (3, 2, 5, 4)[index % 4]
        if kind == "square":
            return max(1, int(base)) | 1
        if kind == "even":
            step = 64 if base >= 48 else 16 if base >= 12 else 4
            return int(max(1, round(base / step)) * step * (1 + index % 2))
        # Odd, and no two alike.
        factors = np.linspace(0.75, 1.3, max(count, 2))
        return max(1, int(base * factors[(index * 2 + 1) % count if count > 2 else index] + self.rng.integers(0, 3))) | 1

    def leading(self) -> tuple[int, ...]:
        """Returns the axes that `...` stands for in this draw."""
        if self._leading is None:
            rank = {"one": 2, "small": 3, "square": 2, "even": 1}.get(self.plan.sizes, 1 + int(self.rng.integers(0, 3)))
            rank = 1 if self.plan.sizes.startswith(("long", "huge")) else rank
            self.space.rank = max(self.space.rank, rank)
            self._leading = tuple(self.size(f"...{axis}") for axis in range(rank))
        return self._leading

    def shape(self, dims: Sequence[str]) -> tuple[int, ...]:
        """Returns the shape that declared sizes are."""
        out: list[int] = []
        for each in dims:
            if each == "...":
                axes = self.leading()
                if self.plan.layout == "broadcast" and self._spread:
                    axes = tuple(1 if (axis + self._spread) % 2 else size for axis, size in enumerate(axes))
                self._spread += 1
                out += axes
            else:
                text, most = declared.limited(each)
                if most is not None:
                    self.size(text, most=most)
                out.append(int(declared.value(text, self.size)))
        return tuple(out)

    def array(
        self,
        shape: int | Sequence[int],
        dtype: str | Sequence[str] = "float32",
        low: float | None = None,
        high: float | None = None,
        role: str = "in",
    ) -> np.ndarray:
        """Returns an array of the plan's values and layout, of one of the types, from `low` to `high`."""
        wanted = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(each) for each in shape)
        if math.prod(wanted) > MOST:
            raise TooLarge
        kind = self._type((dtype,) if isinstance(dtype, str) else dtype)
        self.space.arrays += 1
        self.space.rank = max(self.space.rank, len(wanted))
        self.space.kinds |= {"f" if kind.kind in "fcV" else kind.kind, "half" if is_half(kind) else ""}
        if self.plan.layout == "same" and role == "in":
            key = wanted, kind, low, high
            if key not in self._same:
                self._same[key] = drawn(self.plan.values, wanted, kind, self.rng, low, high)
            return self._same[key]
        values = drawn(self.plan.values, wanted, kind, self.rng, low, high)
        return laid_out(self.plan.layout if role == "in" or self.plan.layout != "broadcast" else "contiguous", values)

    def out(self, shape: int | Sequence[int], dtype: str | Sequence[str] = "float32") -> np.ndarray:
        """Returns an array for the function to write: it arrives unwritten, and is a result."""
        return self._written("out", self.array(shape, dtype, role="out"))

    def inout(
        self,
        shape: int | Sequence[int],
        dtype: str | Sequence[str] = "float32",
        low: float | None = None,
        high: float | None = None,
    ) -> np.ndarray:
        """Returns an array as `array` does that the function changes, and that is a result."""
        return self._written("inout", self.array(shape, dtype, low, high, "inout"))

    def _written(self, role: str, made: np.ndarray) -> np.ndarray:
        self.roles[id(made)] = role
        return made

    def number(self, dtype: str | Sequence[str] = "float32", low: float | None = None, high: float | None = None) -> Any:
        """Returns one number, a NumPy scalar."""
        kind = self._type((dtype,) if isinstance(dtype, str) else dtype)
        values = self.plan.values if self.plan.values in ("normal", "zeros", "negative", "positive") else "normal"
        return drawn(values, (), kind, self.rng, low, high)[()]

    def choice(self, options: Sequence[Any]) -> Any:
        """Returns one of the options."""
        return options[int(self.rng.integers(len(options)))]

    def _type(self, names: Sequence[str]) -> np.dtype[Any]:
        self.space.types = max(self.space.types, len(names))
        return declared.dtype(names[self.plan.types % len(names)])

    def declared(self, one: declared.Declaration) -> Any:
        """Returns the value of a declared parameter."""
        if one.size:
            return int(declared.value(one.size, self.size))
        low, high = (None, None) if one.within is None else declared.bounds(one.within, self.size)
        if one.dims is None:
            made = self.number(one.types, low, high)
            return made.item() if one.python else made
        return self.array(self.shape(one.dims), one.types, low, high, one.role)


def laid_out(layout: str, values: np.ndarray) -> np.ndarray:
    """Returns the values in an array of that layout."""
    if not values.ndim or layout == "contiguous" or (not values.size and layout != "contiguous"):
        return values
    if layout == "strided":
        wide = np.empty((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)
        wide[..., 1::2] = np.roll(values, 1)
        wide[..., ::2] = values
        return wide[..., ::2]
    if layout == "transposed":
        return np.asfortranarray(values) if values.ndim > 1 else laid_out("strided", values)
    if layout == "shifted":  # contiguous, its first element at no multiple of 16 bytes
        memory = np.empty(values.size + 1, values.dtype)
        memory[:1] = values.reshape(-1)[:1]
        out = memory[1:].reshape(values.shape)
        out[...] = values
        return out
    if layout == "broadcast":
        return np.broadcast_to(values[:1], values.shape)
    return values


def plans(space: DrawSpace, inputs: int) -> list[DrawPlan]:
    """Returns all plans for a problem, the most telling first. `inputs`: arrays that are only read."""
    floats = "f" in space.kinds
    names = space.names
    types = min(space.types, 4)
    out = [DrawPlan(orders=(1, 2)), DrawPlan("one"), DrawPlan("small"), DrawPlan("even", orders=(3,)), DrawPlan("square")]
    out += [DrawPlan(f"long {name}", values) for name in names[:4] for values in ("positive", "rising")]
    kinds = ["negative", "positive", "zeros", "constant", "wide", "large", "tiny"]
    kinds += ["offset", "minus infinity", "infinite", "subnormal", "signed zeros", "halves"] if floats else []
    kinds += ["NaN"] if space.nan else []
    out += [DrawPlan("odd", values) for values in kinds]
    out += [DrawPlan("small", "large"), DrawPlan("small", "steep")] if floats else [DrawPlan("small", "large")]
    out += [DrawPlan("odd", "normal", "same")] if inputs > 1 else []
    out += [DrawPlan(f"long {name}", "high") for name in names[:4] if "half" in space.kinds]
    out += [DrawPlan(f"huge {name}", "normal" if floats else "wide") for name in names[: 1 if space.rank == 1 else 0]]
    layouts = ["shifted", "strided", "transposed", "broadcast"] if space.arrays else []
    out += [DrawPlan("odd", "normal", layout, demanded=False) for layout in layouts]
    out += [DrawPlan("odd", values, demanded=False) for values in (["far", "extreme"] if floats else []) + ["ties"]]
    out += [DrawPlan(f"empty {name}", demanded=False) for name in names[:2]]
    if not names:
        out = list({(plan.values, plan.layout): plan for plan in reversed(out)}.values())[::-1]
    return [DrawPlan(one.sizes, one.values, one.layout, one.demanded, one.orders, number) for one in out for number in range(types)]


Maker = Callable[[Draw], "dict[str, Any]"]


def make(maker: Maker, plan: DrawPlan, space: DrawSpace, seed: Sequence[int], shrink: float = 1.0) -> dict[str, Any]:
    """Returns the inputs of a draw; sizes shrink until no array has more than `MOST` elements."""
    least = shrink * 1e-4
    while True:
        draw = Draw(plan, space, seed, shrink)
        try:
            return maker(draw)
        except TooLarge:
            shrink *= 0.6
            if shrink < least:
                raise ValueError(f"an array has more than {MOST:,} elements at any size ({plan.words})") from None
