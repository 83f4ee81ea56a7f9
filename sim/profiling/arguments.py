"""The arguments of a kernel, described in JSON: numbers, null pointers, and arrays that are made or read.

    {"x": {"shape": [1024, 64], "dtype": "float16", "fill": "normal"}, "y": {"shape": [1024], "fill": "empty"}, "n": 1024}
    {"p": {"fields": {"x": {"shape": [1024]}, "n": {"value": 1024, "dtype": "int32"}}}}
    {"A": {"map": {"shape": [256, 64], "dtype": "float16", "fill": "normal"}, "box": [64, 128], "swizzle": 128}}

docs/profile.md has the whole table.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cupyflash.basics import Array, Report, Values
from cupyflash.sim.ptx.memory.swizzles import TensorMap
from cupyflash.sim.ptx.parameters import dtype_of, is_float, type_of
from cupyflash.sim.ptx.text.syntax import Variable, parameters

FILLS = ("zeros", "ones", "normal", "uniform", "arange", "empty")


@dataclass(frozen=True)
class Arguments:
    """Values by name in the order of the kernel's parameters, as `ptx.Module.launch` takes them.

    `unwritten` are the paths ("y", "p.y") of the arrays with "fill": "empty": nobody wrote them, their bytes are 0xFF (NaN in
    every float type).
    """

    values: Report
    unwritten: tuple[str, ...] = ()


@dataclass(frozen=True)
class Around:
    """The surroundings of a description: the `folder` of relative file names, and the arrays of earlier arguments."""

    folder: Path
    values: Values


def read_arguments(text: str) -> Arguments:
    """Read arguments from a JSON file's path, or from JSON itself (text that starts with a brace or bracket).

    An object names its values; a list's values are named arg0, arg1, ... File names are relative to the JSON file's folder.
    Raises ValueError that names the argument and what is wrong with it.
    """
    inline = text.lstrip().startswith(("{", "["))
    path = Path("." if inline else text)
    where = "the arguments" if inline else str(path)
    try:
        spec = json.loads(text if inline else path.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{where} are not valid JSON: {error}" if inline else f"{where} is not valid JSON: {error}") from error
    return make_arguments(spec, Path() if inline else path.parent)


def _object(pairs: list[tuple[str, Any]]) -> Report:
    out = dict(pairs)
    if len(out) < len(pairs):
        twice = next(name for n, (name, _) in enumerate(pairs) if name in [before for before, _ in pairs[:n]])
        raise ValueError(f"{twice!r} occurs twice in one object")
    return out


def make_arguments(spec: Any, folder: Path) -> Arguments:
    """Arguments from parsed JSON; `folder` is where relative file names start. Raises ValueError as `read_arguments`."""
    if isinstance(spec, list):
        spec = {f"arg{n}": value for n, value in enumerate(spec)}
    if not isinstance(spec, dict):
        raise ValueError(f"arguments are an object (name to value) or a list, got {json.dumps(spec)}")
    values: Report = {}
    unwritten: list[str] = []
    for position, (name, value) in enumerate(spec.items()):
        try:
            values[name] = make_value(value, Around(folder, values), (position,))
        except (ValueError, TypeError, OSError, OverflowError, MemoryError) as error:
            raise ValueError(f"argument {name!r}: {error}") from error
        unwritten += empty_arrays(name, value)
    return Arguments(values, tuple(unwritten))


def empty_arrays(path: str, spec: Any) -> list[str]:
    """The paths of the arrays with "fill": "empty" in an argument."""
    if isinstance(spec, list):
        return [found for k, part in enumerate(spec) for found in empty_arrays(f"{path}[{k}]", part)]
    if isinstance(spec, dict) and "fields" in spec:
        return [found for name, part in spec["fields"].items() for found in empty_arrays(f"{path}.{name}", part)]
    if isinstance(spec, dict) and "map" in spec:
        return empty_arrays(path, spec["map"])
    return [path] if isinstance(spec, dict) and spec.get("fill") == "empty" else []


Position = tuple[int, ...]
"""An argument's number, behind it those of the fields that lead to a part of it: the seed of random fills that have none."""


def make_value(spec: Any, around: Around, position: Position) -> Any:
    """Make one argument. `position` seeds the random fills without a seed of their own, so that no two arrays are equal."""
    if spec is None or isinstance(spec, (bool, int, float)):
        return spec
    if isinstance(spec, dict):
        for key, (make, allowed) in _MAKERS.items():
            if key in spec:
                strange = set(spec) - allowed - {key}
                if strange:
                    beside = f"there may be {', '.join(sorted(allowed))}" if allowed else "there is nothing"
                    raise ValueError(f"unknown key {min(strange)!r}; beside {key!r} {beside}")
                return make(spec, around, position)
    forms = 'a number, null, or an object with "shape", "file", "value", "bytes", "fields" or "map"'
    raise ValueError(f"must be {forms}, got {json.dumps(spec)}")


def _fields(spec: Values, around: Around, position: Position) -> Report:
    fields = spec["fields"]
    if not isinstance(fields, dict):
        raise ValueError(f'"fields" must be an object, got {json.dumps(fields)}')
    return {name: _field(name, part, around, (*position, k)) for k, (name, part) in enumerate(fields.items())}


def _field(name: str, spec: Any, around: Around, position: Position) -> Any:
    """A field of a structure, or an element of one that is an array."""
    if isinstance(spec, list):
        return [_field(f"{name}[{k}]", part, around, (*position, k)) for k, part in enumerate(spec)]
    if isinstance(spec, (bool, int, float)):
        raise ValueError(f'field {name!r}: a number needs its type: {{"value": {json.dumps(spec)}, "dtype": "int32"}}, say')
    try:
        return make_value(spec, around, position)
    except (ValueError, TypeError, OSError, OverflowError, MemoryError) as error:
        raise ValueError(f"field {name!r}: {error}") from error


def _array(spec: Values, around: Around, position: Position) -> Array:
    shape, dtype = spec["shape"], dtype_of(spec.get("dtype", "float32"))
    fill = spec.get("fill", "zeros")
    lengths = [shape] if isinstance(shape, int) else shape
    if not isinstance(lengths, list) or not all(type(n) is int and n >= 0 for n in lengths):
        raise ValueError(f'"shape" must be a list of lengths, got {json.dumps(shape)}')
    seed = spec.get("seed", 0)
    if type(seed) is not int or seed < 0:
        raise ValueError(f'"seed" must be a whole number from 0, got {json.dumps(seed)}')
    if {"low", "high"} & set(spec) and fill != "uniform":
        raise ValueError('"low" and "high" belong to "fill": "uniform"')
    if "seed" in spec and fill not in ("uniform", "normal"):
        raise ValueError('"seed" belongs to "fill": "uniform" and "normal"')
    if isinstance(fill, (bool, int, float)):
        return np.full(lengths, scalar(dtype, fill))
    rng = np.random.default_rng(seed if "seed" in spec else position)
    if fill == "zeros":
        return np.zeros(lengths, dtype)
    if fill == "ones":
        return np.ones(lengths, dtype)
    if fill == "empty":
        # Copied into NumPy's own memory, so that it starts at an aligned address, as on a device.
        return np.full(math.prod(lengths) * dtype.itemsize, 0xFF, np.uint8).view(dtype).reshape(lengths)
    if fill == "arange":
        return np.arange(math.prod(lengths)).reshape(lengths).astype(dtype)
    if fill == "normal":
        if not is_float(dtype):
            raise ValueError(f'"fill": "normal" is for floating-point types; for {dtype} take "uniform" with "low" and "high"')
        return rng.standard_normal(lengths).astype(dtype)
    if fill == "uniform":
        low, high = spec.get("low", 0), spec.get("high", 1 if is_float(dtype) else 2)
        if not all(isinstance(bound, (int, float)) for bound in (low, high)) or not low < high:
            raise ValueError(f'"low" must be a number below "high", got {json.dumps(low)} and {json.dumps(high)}')
        if is_float(dtype):
            return rng.uniform(low, high, lengths).astype(dtype)
        scalar(dtype, low), scalar(dtype, high - 1)
        return rng.integers(int(low), int(high), lengths, np.uint64 if high > 1 << 63 else np.int64).astype(dtype)
    raise ValueError(f'"fill" must be a number or one of {", ".join(FILLS)}, got {json.dumps(fill)}')


def scalar(dtype: np.dtype[Any], value: Any) -> Any:
    """Convert a number to a NumPy scalar of `dtype`. Raises ValueError if it does not fit."""
    if not isinstance(value, (bool, int, float)):
        raise ValueError(f"must be a number, got {json.dumps(value)}")
    if dtype.kind in "iu":
        if value != int(value) or not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            raise ValueError(f"{value} does not fit {dtype}")
        value = int(value)
    return np.array(value).astype(dtype)[()]


def _file(spec: Values, around: Around, position: Position) -> Array:
    if not isinstance(spec["file"], str):
        raise ValueError(f'"file" must be a path, got {json.dumps(spec["file"])}')
    path = around.folder / spec["file"]
    if not path.is_file():
        raise ValueError(f"no file {path}")
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a .npy file of numbers: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} has several arrays: a .npy file has one")
    if "dtype" in spec:
        # NumPy's files do not know bfloat16: they return it as two bytes without a type.
        dtype = dtype_of(spec["dtype"])
        if array.dtype.itemsize != dtype.itemsize or array.dtype.kind not in ("V", dtype.kind):
            raise ValueError(f"{path} has {array.dtype}, not {dtype}")
        array = array.view(dtype)
    return array


def _value(spec: Values, around: Around, position: Position) -> Any:
    return scalar(dtype_of(spec.get("dtype", "int32")), spec["value"])


def _bytes(spec: Values, around: Around, position: Position) -> bytes:
    if not isinstance(spec["bytes"], str):
        raise ValueError(f'"bytes" must be hexadecimal digits, got {json.dumps(spec["bytes"])}')
    try:
        return bytes.fromhex(spec["bytes"])
    except ValueError as error:
        raise ValueError(f'"bytes" must be hexadecimal digits, two a byte: {error}') from error


def _map(spec: Values, around: Around, position: Position) -> TensorMap:
    """A tensor map of an array described here, or of an earlier argument by its name."""
    of = spec["map"]
    if isinstance(of, str):
        array = around.values.get(of)
        array = array.array if isinstance(array, TensorMap) else array
        if not isinstance(array, np.ndarray):
            arrays = [name for name, value in around.values.items() if isinstance(value, (np.ndarray, TensorMap))]
            raise ValueError(f'"map": no array {of!r} among the arguments before; there are {", ".join(arrays) or "none"}')
    elif isinstance(of, dict) and {"shape", "file"} & set(of):
        array = make_value(of, around, position)
    else:
        raise ValueError(f'"map" must be an array or the name of an argument before, got {json.dumps(of)}')
    if "box" not in spec:
        raise ValueError('"map" needs "box", the elements of a copy along each dimension, the innermost first')
    return TensorMap(array, spec["box"], **{key: value for key, value in spec.items() if key not in ("map", "box")})


_MAP_KEYS = {"box", "dims", "strides", "dtype", "element_strides", "interleave", "swizzle", "l2_promotion", "fill"}

_MAKERS = {
    "map": (_map, _MAP_KEYS),
    "shape": (_array, {"dtype", "fill", "seed", "low", "high"}),
    "file": (_file, {"dtype"}),
    "value": (_value, {"dtype"}),
    "bytes": (_bytes, set[str]()),
    "fields": (_fields, set[str]()),
}
"""The kinds of objects by the key that each must have: its maker and the further keys."""


def template(cuda: str, kernel: str, params: Sequence[Variable]) -> Report:
    """Returns arguments of a kernel to fill in: arrays of 1,024 elements for pointers, zeros for numbers and structures."""
    out: Report = {}
    for (kind, name), param in zip(parameters(cuda, kernel, len(params)), params, strict=True):
        wanted, _ = type_of(kind)
        if "*" in kind or (not kind and param.type.bits == 64 and param.type.kind != "f" and not param.is_array):
            floats = wanted.startswith(("float", "bfloat")) or not wanted
            fill = "normal" if floats and re.search(r"\bconst\b", kind) else "zeros"
            out[name] = {"shape": [1024], "dtype": wanted or "float32", "fill": fill}
        elif param.is_array:
            out[name] = {"bytes": "00" * param.size}
        elif param.type.kind == "f" and wanted not in ("float16", "bfloat16"):
            out[name] = 0.0
        else:
            out[name] = 0
    return out


def template_text(cuda: str, kernel: str, params: Sequence[Variable]) -> str:
    """Returns `template` as JSON, an argument a line."""
    rows = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in template(cuda, kernel, params).items()]
    return "{\n" + ",\n".join(rows) + "\n}" if rows else "{}"
