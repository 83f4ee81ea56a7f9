"""A kernel's argument: one struct by value, described once for C, for NumPy and for the code that fills it.

A field is a number, a pointer, an array with the strides that the kernels need (`Rows` and `Scores` of kernels_cu/params.cuh), or a
tensor map (kernels_cu/tensor_map.cuh). Maps come first, where their alignment needs no gaps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cupyflash.arrays import AnyArray, numpy_dtype
from cupyflash.basics import Array, Report, Values
from cupyflash.launch.tensor_maps import ALIGNMENT, WORDS, MapPlan

MAP = "TensorMap"
NUMBERS: dict[str, type[np.generic]] = {"int": np.int32, "unsigned": np.uint32, "long long": np.int64, "float": np.float32}
# The axes whose strides, in elements, lie beside the pointer of an array: none of one that is contiguous.
POINTER: tuple[str, ...] = ()
ROWS = ("batch", "head", "row")
SCORES = (*ROWS, "col")
TEMPLATES = {ROWS: "Rows", SCORES: "Scores"}
# What an array has in NumPy whose elements are this in C; "Element" is the problem's dtype.
ELEMENTS = {
    "float": "float32",
    "int": "int32",
    "unsigned": "uint32",
    "long long": "int64",
    "unsigned char": "bool",
    "TileState": "uint8",
    "Base": "float32",
}


@dataclass(frozen=True)
class Field:
    """One field: a number of a C type or a tensor map; or, if `axes` is not None, an array, null if a call has none."""

    name: str
    type: str
    axes: tuple[str, ...] | None = None

    @property
    def declaration(self) -> str:
        """The field's declaration in C."""
        if self.axes is None:
            return f"{self.type} {self.name};"
        return f"{TEMPLATES[self.axes]}<{self.type}> {self.name};" if self.axes else f"{self.type}* {self.name};"

    @property
    def dtype(self) -> Any:
        """The field's dtype in NumPy, where a pointer is an address."""
        if self.type == MAP:
            return np.uint64, (WORDS,)
        if self.axes is None:
            return NUMBERS[self.type]
        return [("at", np.uint64), *((axis, np.int64) for axis in self.axes)] if self.axes else np.uint64

    def value(self, given: Any, element: str) -> Any:
        """A number, array or map as the machine takes it. TypeError for an array of another type than the kernel reads."""
        if self.type == MAP:
            return given
        if self.axes is None:
            return NUMBERS[self.type](given)
        if given is not None:
            of = self.type.removeprefix("const ")
            expected = numpy_dtype(element if of == "Element" else ELEMENTS[of])
            if given.dtype != expected:
                raise TypeError(f"{self.name} is {self.declaration!r} of {expected}, got {given.dtype}")
        return {"at": given} | strides(given, self.axes) if self.axes else given


def strides(array: AnyArray | None, axes: tuple[str, ...]) -> dict[str, np.int64]:
    """The strides of an array's axes before its last (of one that is like the scores: of all its axes), in elements, as broadcast.

    An axis that the array lacks, or along which it is broadcast, has stride 0.
    """
    steps: list[int] = []
    if array is not None:
        ndim = array.ndim if "col" in axes else array.ndim - 1
        pairs = zip(array.shape[:ndim], array.strides[:ndim], strict=True)
        steps = [0 if length == 1 else stride // array.dtype.itemsize for length, stride in pairs]
    steps = [0] * (len(axes) - len(steps)) + steps
    return {axis: np.int64(step) for axis, step in zip(axes, steps, strict=True)}


@dataclass(frozen=True)
class CapturedField(Field):
    """An array that a score function reads, with as many strides and lengths as axes (one of each for none)."""

    count: int = 0

    @classmethod
    def of(cls, name: str, element: str, count: int) -> CapturedField:
        """`element` is the C type of an element, `count` the number of axes."""
        axes = range(max(1, count))
        return cls(name, element, (*(f"stride{axis}" for axis in axes), *(f"length{axis}" for axis in axes)), count)

    @property
    def declaration(self) -> str:
        return f"Captured<{self.type}, {self.count}> {self.name};"

    @property
    def dtype(self) -> Any:
        assert self.axes is not None
        return [("at", np.uint64), *((axis, np.int64 if axis.startswith("stride") else np.int32) for axis in self.axes)]

    def value(self, given: Any, element: str) -> Any:
        strides = {f"stride{axis}": np.int64(step // given.dtype.itemsize) for axis, step in enumerate(given.strides)}
        lengths = {f"length{axis}": np.int32(length) for axis, length in enumerate(given.shape)}
        none = {} if self.count else {"stride0": np.int64(0), "length0": np.int32(0)}
        return {"at": given, **strides, **lengths, **none}


@dataclass(frozen=True)
class Params:
    """The struct: fields in order, laid out as C does."""

    fields: tuple[Field, ...]

    @cached_property
    def maps(self) -> tuple[str, ...]:
        """The fields that are tensor maps. ValueError if they are not the first ones."""
        names = tuple(field.name for field in self.fields if field.type == MAP)
        if names != tuple(field.name for field in self.fields[: len(names)]):
            raise ValueError(f"tensor maps come first in a struct, got {', '.join(field.name for field in self.fields)}")
        return names

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The same in NumPy, a field of a structured array each."""
        nested = np.dtype([(field.name, np.dtype(field.dtype, align=True)) for field in self.fields], align=True)
        if not self.maps:
            return nested
        # NumPy aligns to 16 bytes at most, which the places do not feel as maps come first; C's struct is as long as its alignment.
        found: Values = nested.fields or {}
        formats, offsets = ([found[name][part] for name in found] for part in (0, 1))
        size = -(-nested.itemsize // ALIGNMENT) * ALIGNMENT
        return np.dtype({"names": list(found), "formats": formats, "offsets": offsets, "itemsize": size}, align=True)

    @cached_property
    def pointers(self) -> dict[str, np.dtype[Any]]:
        """The arrays that kernels take without strides, contiguous and of one type whatever a call has; and their types."""
        of = {field.name: field.type.removeprefix("const ") for field in self.fields if field.axes == POINTER}
        return {name: numpy_dtype(ELEMENTS[element]) for name, element in of.items() if element in ELEMENTS}

    @cached_property
    def constants(self) -> tuple[tuple[str, str], ...]:
        """The constants for the compiler: the fields, and their places, which must be NumPy's."""
        # NVRTC of CUDA 12 has no __builtin_offsetof.
        places = [f"__INTADDR__(&((Params*)0)->{field.name}) == {self._place(field.name)}" for field in self.fields]
        agree = " && ".join([f"sizeof(Params) == {self.dtype.itemsize}", *places])
        return ("PARAMS", " ".join(field.declaration for field in self.fields)), ("PARAMS_AGREE", agree)

    def _place(self, name: str) -> int:
        found: Values = self.dtype.fields or {}
        return int(found[name][1])

    def values(self, given: Values, element: str) -> Report:
        """The struct's fields from numbers and arrays by name; an array that is not among them is null."""
        there = {field.name: given[field.name] if field.axes is None else given.get(field.name) for field in self.fields}
        return {field.name: field.value(there[field.name], element) for field in self.fields}

    def packed(self, values: Values) -> tuple[Array, dict[str, int]]:
        """The struct in words of 8 bytes, with null for each pointer and map; which words are to be the addresses of which arrays,
        and the first ones of which maps."""
        struct = np.zeros((), self.dtype)
        places = {}
        for name, value in values.items():
            if isinstance(value, dict):
                for axis in value.keys() - {"at"}:
                    struct[name][axis] = value[axis]
                value = value["at"]
            if isinstance(value, np.generic):
                struct[name] = value
            elif value is not None:
                places[name] = self._place(name) // 8
        return np.frombuffer(struct.tobytes(), np.uint64), places


def flat(values: Values) -> Report:
    """The same without structs in the struct, with the same layout: an array has the name of its field."""
    fields: Report = {}
    for name, value in values.items():
        nested = {f"{name}.{axis}": step for axis, step in value.items() if axis != "at"} if isinstance(value, dict) else {}
        fields |= {name: value["at"] if isinstance(value, dict) else value, **nested}
    return fields


def with_arrays(values: Values, arrays: Values) -> Report:
    """The values of a struct with arrays in place of those that it has, or of their layouts."""

    def at(name: str, before: Any) -> Any:
        if isinstance(before, MapPlan):
            return before.over(arrays[before.tensor])
        return before if before is None or isinstance(before, np.generic) else arrays[name]

    return {
        name: value | {"at": at(name, value["at"])} if isinstance(value, dict) else at(name, value)
        for name, value in values.items()
    }


def numbers(type_: str, *names: str) -> tuple[Field, ...]:
    """Fields of one number each."""
    return tuple(Field(name, type_) for name in names)


def arrays(type_: str, axes: tuple[str, ...], names: Iterable[str]) -> tuple[Field, ...]:
    """Fields of one array each."""
    return tuple(Field(name, type_, axes) for name in names)


def maps(*names: str) -> tuple[Field, ...]:
    """Fields of one tensor map each."""
    return tuple(Field(name, MAP) for name in names)
