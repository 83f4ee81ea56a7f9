"""The arguments of a launch: the bytes of the kernel's parameters, and the arrays that their pointers point to.

A parameter is a value or a structure of values. A structure is a mapping from field names to values, laid out as C does: each
field at the next multiple of its alignment, the whole padded to a multiple of the largest. Or it is a NumPy structured scalar,
which brings its own offsets, and whose fields of objects are pointers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cupyflash.words import plural

from .memory.swizzles import ADDRESS_AT, MAP_ALIGN, MAP_BYTES, TensorMap
from .memory.texels import Texels, Texture, texels_of
from .state.segments import Place, PointerField, Segment
from .text.syntax import QUALIFIERS, Array, Variable, parameters, source_name

POINTER_BYTES = 8


@dataclass(frozen=True)
class BoundTensor:
    """An array that a parameter points to.

    `name` is its name in counts and findings, `path` leads to it from its parameter ("p.x[2]"). `place` is the parameter or its
    field, `at` the pointer's offset in the bytes of all parameters, or in `holder`, an array of tensor maps in global memory.
    `shown`: the texture or surface whose handle the address is.
    """

    name: str
    path: str
    array: Array
    place: Place
    at: int
    holder: Array | None = None
    shown: Texture | Texels | None = None


@dataclass
class BoundArguments:
    """The arguments of a launch: `data`, the bytes of all parameters without the pointers; `offsets`, by parameter."""

    data: bytearray = field(default_factory=bytearray)
    offsets: dict[str, int] = field(default_factory=dict)
    tensors: list[BoundTensor] = field(default_factory=list)


@dataclass(frozen=True)
class Allocation:
    """Memory that a program has allocated: `memory` (uint8, one dimension) at a virtual address in a window of its own
    (`state.segments`), with a name for reports. `state` says for each byte if anybody has written it; launches keep it up.
    """

    name: str
    memory: Array
    address: int
    state: Array | None = None


@dataclass(frozen=True)
class RawArguments:
    """A launch's arguments as a driver is given them: the bytes of all parameters, in which pointers are addresses, and all
    allocations that these, or pointers in memory, may point into. `textures`: textures and surfaces (`Texels`) by their handles.
    """

    data: bytes
    allocations: Sequence[Allocation]
    textures: Mapping[int, Texture | Texels] = field(default_factory=dict)

    def bound(self, kernel: str, params: Sequence[Variable]) -> BoundArguments:
        """Returns the bytes with each parameter's offset. Raises TypeError for too few or too many bytes."""
        offsets, size = parameter_offsets(params)
        if len(self.data) != size:
            raise TypeError(f"{kernel}: its parameters have {plural(size, 'byte')}, got {len(self.data)}")
        return BoundArguments(bytearray(self.data), offsets)

    def segments(self, params: Sequence[Variable]) -> list[Segment]:
        """Returns the allocations as segments that know which parameters point to them."""
        offsets, _ = parameter_offsets(params)
        texels = {handle: texels_of(one) for handle, one in self.textures.items()}
        held: list[tuple[int, Place]] = []
        for param in params:
            at = offsets[param.name]
            words = np.frombuffer(self.data, np.uint64, param.size // POINTER_BYTES, at).tolist()
            words = [texels[word].address if word in texels else word for word in words]
            held += [(word, PointerField(param.name, 8 * k) if param.is_array else param.name) for k, word in enumerate(words)]
        found = []
        for one in self.allocations:
            segment = Segment(one.name, 0, one.memory, start=one.address)
            segment.state = one.state
            segment.places = (*(place for word, place in held if 0 <= word - one.address <= segment.size), "*")
            shown = [each.format.size for each in texels.values() if 0 <= each.address - one.address < segment.size]
            segment.narrowest = min(shown, default=segment.narrowest)
            found.append(segment)
        return found


def parameter_offsets(params: Sequence[Variable]) -> tuple[dict[str, int], int]:
    """Returns each parameter's offset in the bytes of all of them, and the number of those."""
    offsets, size = {}, 0
    for param in params:
        offsets[param.name] = aligned(size, param.align)
        size = offsets[param.name] + param.size
    return offsets, size


@dataclass(frozen=True)
class Pointer:
    """A pointer to an array at an offset of its piece, or of `holder`, an array of tensor maps that another pointer points to.

    `own` is the field's name, `path` that with all around it. `shown`: the texture or surface, if it is the handle of one.
    """

    offset: int
    own: str
    path: str
    array: Array
    holder: Array | None = None
    shown: Texture | Texels | None = None

    def moved(self, by: int) -> Pointer:
        return self if self.holder is not None else replace(self, offset=self.offset + by)


@dataclass
class ParameterPiece:
    """The bytes of a value with their alignment, the pointers in them, and (path, offset) of each value that has no parts."""

    data: bytearray
    align: int
    pointers: list[Pointer] = field(default_factory=list)
    leaves: list[tuple[str, int]] = field(default_factory=list)

    def add(self, part: ParameterPiece, at: int) -> None:
        """Places a part at an offset, behind the others or in a gap between them."""
        self.data += bytes(max(0, at + len(part.data) - len(self.data)))
        self.data[at : at + len(part.data)] = part.data
        self.pointers += [pointer.moved(at) for pointer in part.pointers]
        self.leaves += [(path, at + offset) for path, offset in part.leaves]

    def append(self, part: ParameterPiece) -> None:
        """Places a part behind all others, at the next multiple of its alignment."""
        self.align = max(self.align, part.align)
        self.add(part, aligned(len(self.data), part.align))

    def pad(self, align: int) -> None:
        self.data += bytes(-len(self.data) % align)


def aligned(offset: int, align: int) -> int:
    return -(-offset // align) * align


def bind(
    kernel: str, params: Sequence[Variable], args: Mapping[str, Any] | Sequence[Any], taken: Collection[str]
) -> BoundArguments:
    """Returns the arguments of a launch in the order of the kernel's parameters; `taken` are names that no field may have alone.

    A tensor in a structure has its field's name where no other tensor of the launch has it, else its path. Raises TypeError for
    values that do not fit the parameters, and where two tensors would have one name.
    """
    names, values = name_arguments(kernel, params, args)
    bound = BoundArguments()
    found: list[tuple[Pointer, Variable, int]] = []
    for name, value, param in zip(names, values, params, strict=True):
        bound.data += bytes(-len(bound.data) % param.align)
        at = bound.offsets[param.name] = len(bound.data)
        piece = argument(kernel, name, value, param)
        bound.data += piece.data
        found += [(pointer, param, at) for pointer in piece.pointers]
    owners = dict.fromkeys(taken, 1)
    for pointer, _, _ in found:
        owners[pointer.own] = owners.get(pointer.own, 0) + 1
    for pointer, param, at in found:
        name = pointer.own if owners[pointer.own] == 1 else pointer.path
        if any(tensor.name == name for tensor in bound.tensors):
            raise TypeError(f"{kernel}: two tensors would be named {name!r}; give the arguments other names")
        if pointer.holder is not None:  # a pointer that comes out of memory
            bound.tensors.append(BoundTensor(name, pointer.path, pointer.array, "*", pointer.offset, pointer.holder))
            continue
        place = PointerField(param.name, pointer.offset) if param.is_array else param.name
        bound.tensors.append(BoundTensor(name, pointer.path, pointer.array, place, at + pointer.offset, shown=pointer.shown))
    return bound


def name_arguments(kernel: str, params: Sequence[Variable], args: Mapping[str, Any] | Sequence[Any]) -> tuple[list[str], list[Any]]:
    if isinstance(args, Mapping):
        names, values = list(args), list(args.values())
    else:
        values = list(args)
        names = [f"arg{n}" for n in range(len(values))]
    if len(values) != len(params):
        raise TypeError(f"{kernel} takes {plural(len(params), 'argument')}, got {len(values)}: {', '.join(names)}")
    return names, values


def argument(kernel: str, name: str, value: Any, param: Variable) -> ParameterPiece:
    """Returns one argument, as many bytes as its parameter has."""
    value = unwrapped(value)
    if is_maps(value):
        return tensor_maps(kernel, name, value, param)
    if isinstance(value, np.ndarray | Texture | Texels):
        if param.size != POINTER_BYTES or param.type.kind == "f":
            what, other = ("an array", "pointer") if isinstance(value, np.ndarray) else ("a texture or surface", "handle")
            raise TypeError(f"{kernel}: argument {name!r} is {what}, parameter {param.name} is no {other}")
        return leaf(f"{kernel}: argument", name, name, value)
    if not isinstance(value, Mapping) and not (isinstance(value, np.void) and value.dtype.hasobject):
        return ParameterPiece(bytearray(pack_scalar(kernel, name, value, param)), param.align)
    piece = structure(f"{kernel}: argument", name, value)
    if isinstance(value, Mapping) and aligned(len(piece.data), param.align) == param.size:
        piece.pad(param.align)  # the structure is declared to be aligned to more than its fields are
    if len(piece.data) != param.size:
        layout = ", ".join(f"{path} at {offset}" for path, offset in piece.leaves)
        raise TypeError(
            f"{kernel}: argument {name!r} has {plural(len(piece.data), 'byte')}, parameter {param.name} has {param.size}: "
            f"{layout}; a layout that is not C's is given as a NumPy structured scalar"
        )
    return piece


def arrays_by_name(args: Mapping[str, Any]) -> dict[str, Array]:
    """Returns the arrays among arguments and in their structures, by path and, where only one has it, by their own name."""
    pointers: list[Pointer] = []
    for name, value in args.items():
        value = unwrapped(value)
        arrays = isinstance(value, np.ndarray | Mapping | Texture | Texels)
        if arrays or is_maps(value) or (isinstance(value, np.void) and value.dtype.hasobject):
            pointers += member("argument", name, name, value).pointers
    many = Counter(pointer.own for pointer in pointers)
    short = {pointer.own: pointer.array for pointer in pointers if many[pointer.own] == 1}
    return {pointer.path: pointer.array for pointer in pointers} | short


def is_maps(value: Any) -> bool:
    """True if a value is a tensor map or a list of them."""
    return isinstance(value, TensorMap) or (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(each, TensorMap) for each in value)
    )


def tensor_maps(kernel: str, name: str, value: TensorMap | Sequence[TensorMap], param: Variable) -> ParameterPiece:
    """Packs tensor maps by value, or in global memory where the parameter is a pointer."""
    maps = [value] if isinstance(value, TensorMap) else list(value)
    if param.size == POINTER_BYTES and param.type.kind != "f":
        holder = np.zeros((len(maps), MAP_BYTES), np.uint8)
        own = [name] if isinstance(value, TensorMap) else [f"{name}[{k}]" for k in range(len(maps))]
        piece = ParameterPiece(
            bytearray(POINTER_BYTES), POINTER_BYTES, [Pointer(0, f"{name}.map", f"{name}.map", holder)], [(name, 0)]
        )
        for k, each in enumerate(maps):
            holder[k] = np.frombuffer(each.description.encode(0), np.uint8)
            piece.pointers.append(Pointer(k * MAP_BYTES + ADDRESS_AT, own[k], own[k], each.array, holder))
        return piece
    if param.size != MAP_BYTES * len(maps) or param.align % MAP_ALIGN:
        raise TypeError(
            f"{kernel}: argument {name!r} is {plural(len(maps), 'tensor map')} of {MAP_BYTES} bytes, aligned to {MAP_ALIGN}, "
            f"parameter {param.name} has {plural(param.size, 'byte')}, aligned to {param.align}"
        )
    return member(f"{kernel}: argument", name, name, value)


def unwrapped(value: Any) -> Any:
    """Returns the single structure of an array without dimensions as a value, any other array as it is."""
    return value[()] if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.names is not None else value


def structure(where: str, path: str, value: Mapping[str, Any] | np.void) -> ParameterPiece:
    """Packs a structure: in C's layout, or at a structured type's own offsets."""
    piece = ParameterPiece(bytearray(), 1)
    if isinstance(value, Mapping):
        for name, part in value.items():
            if not isinstance(name, str):
                raise TypeError(f"{where} {path!r}: the names of fields are text, got {name!r}")
            piece.append(member(where, f"{path}.{name}", name, part))
        piece.pad(piece.align)
        return piece
    for name in value.dtype.names or ():
        part, kind = value[name], value.dtype[name]
        several = kind.subdtype is not None
        if kind.base == np.dtype(object):
            for one in part.flat if several else [part]:
                if one is not None and not isinstance(one, np.ndarray):
                    raise TypeError(f"{where} '{path}.{name}': a field of objects is a pointer, an array or None, got {one!r}")
        part = unrolled(part) if several else part
        assert value.dtype.fields is not None
        piece.add(member(where, f"{path}.{name}", name, part), value.dtype.fields[name][1])
    piece.data += bytes(value.dtype.itemsize - len(piece.data))
    piece.align = value.dtype.alignment
    return piece


def unrolled(array: Array, index: tuple[int, ...] = ()) -> Any:
    """Returns an array's elements as nested lists; elements that are arrays stay as they are."""
    if len(index) == array.ndim:
        return array[index]
    return [unrolled(array, (*index, k)) for k in range(array.shape[len(index)])]


def member(where: str, path: str, own: str, value: Any) -> ParameterPiece:
    """Packs one field, or one element of a field that is an array."""
    value = unwrapped(value)
    if isinstance(value, Mapping) or (isinstance(value, np.void) and value.dtype.names is not None):
        return structure(where, path, value)
    if isinstance(value, (list, tuple)):
        parts = [member(where, f"{path}[{k}]", f"{own}[{k}]", part) for k, part in enumerate(value)]
        if len({(len(part.data), part.align) for part in parts}) > 1:
            sizes = [len(part.data) for part in parts]
            raise TypeError(f"{where} {path!r}: the elements of an array are of one type, got {sizes} bytes")
        piece = ParameterPiece(bytearray(), 1)
        for part in parts:
            piece.append(part)
        return piece
    return leaf(where, path, own, value)


def leaf(where: str, path: str, own: str, value: Any) -> ParameterPiece:
    """Packs a pointer, a number or a tensor map."""
    if isinstance(value, TensorMap):
        data = bytearray(value.description.encode(0))
        return ParameterPiece(data, MAP_ALIGN, [Pointer(ADDRESS_AT, own, path, value.array)], [(path, 0)])
    if isinstance(value, Texture | Texels):
        array = texels_of(value).array
        if array is None:
            raise TypeError(f"{where} {path!r}: a texture of no array; ptx.Texels.of makes texels of one")
        return ParameterPiece(bytearray(POINTER_BYTES), POINTER_BYTES, [Pointer(0, own, path, array, shown=value)], [(path, 0)])
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"{where} {path!r}: an array of objects cannot be a tensor")
        return ParameterPiece(bytearray(POINTER_BYTES), POINTER_BYTES, [Pointer(0, own, path, value)], [(path, 0)])
    if value is None:
        return ParameterPiece(bytearray(POINTER_BYTES), POINTER_BYTES, leaves=[(path, 0)])
    if isinstance(value, (bytes, bytearray)) and not isinstance(value, np.generic):
        return ParameterPiece(bytearray(value), 1, leaves=[(path, 0)])
    if isinstance(value, np.generic) and value.dtype.kind not in "OUMm":
        return ParameterPiece(bytearray(value.tobytes()), value.dtype.alignment, leaves=[(path, 0)])
    if isinstance(value, (bool, int, float)):
        kind = "bool_" if isinstance(value, bool) else "int32" if isinstance(value, int) else "float32"
        raise TypeError(f"{where} {path!r}: the type of {value!r} in the structure is not known; pass np.{kind}({value!r}), say")
    raise TypeError(f"{where} {path!r}: cannot pass {type(value).__name__} {value!r}")


def pack_scalar(kernel: str, name: str, value: Any, param: Variable) -> bytes:
    """Returns the bytes of a by-value argument."""
    where = f"{kernel}: argument {name!r} for parameter {param.name} (.{param.type.name}, {plural(param.size, 'byte')})"
    if value is None:
        if param.size != 8 or param.type.kind == "f":
            raise TypeError(f"{where}: None is a null pointer, and this is no pointer")
        return bytes(8)
    if isinstance(value, (bytes, bytearray, np.void)) or (param.is_array and isinstance(value, np.generic)):
        data = value.tobytes() if isinstance(value, np.generic) else bytes(value)
        if len(data) != param.size:
            raise TypeError(f"{where}: got {plural(len(data), 'byte')}")
        return data
    if param.is_array:
        raise TypeError(f"{where}: a structure is given as bytes or as a NumPy structured scalar, got {value!r}")
    if isinstance(value, (bool, int, np.bool_, np.integer)):
        if param.type.kind == "f":
            return np.array(float(value), param.type.dtype).tobytes()
        number = int(value)
        if not -(1 << (8 * param.size - 1)) <= number < 1 << (8 * param.size):
            raise TypeError(f"{where}: {number} does not fit")
        return (number & ((1 << (8 * param.size)) - 1)).to_bytes(param.size, "little")
    if isinstance(value, (float, np.floating)):
        if param.type.kind not in "fb":
            raise TypeError(f"{where}: got the floating-point number {value!r}")
        return np.array(float(value), f"f{param.size}").tobytes()
    raise TypeError(f"{where}: cannot pass {type(value).__name__} {value!r}")


# -- the types of arrays ----------------------------------------------------------------------------------------------------


def dtype_of(name: Any) -> np.dtype[Any]:
    """A NumPy type by name; bfloat16 and the small floats come from ml_dtypes. ImportError if that is missing."""
    try:
        if isinstance(name, str):
            found = np.dtype(_small_float(name) if re.fullmatch(r"bfloat16|float[468]_\w+", name) else name)
            if found.kind in "biufcV" and found.itemsize and found.names is None and found.subdtype is None:
                return found
    except (TypeError, AttributeError):
        pass
    raise ValueError(f"unknown dtype {name!r}: bool, int8 to int64, uint8 to uint64, float16, bfloat16, float32, float64, ...")


def _small_float(name: str) -> Any:
    """A floating-point type that NumPy lacks; AttributeError if ml_dtypes lacks it too."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(f"{name} needs ml_dtypes ({error}): pip install ml_dtypes", name="ml_dtypes") from error
    return getattr(ml_dtypes, name)


def is_float(dtype: np.dtype[Any]) -> bool:
    """True for a floating-point type of NumPy or ml_dtypes."""
    return dtype.kind == "f" or (dtype.kind == "V" and "float" in dtype.name)


_C_TYPES = {
    "float": "float32",
    "double": "float64",
    "bool": "bool",
    **dict.fromkeys(("half", "__half"), "float16"),
    **dict.fromkeys(("__nv_bfloat16", "nv_bfloat16"), "bfloat16"),
    **dict.fromkeys(("char", "signed char"), "int8"),
    **{f"{sign}{name}": f"{sign[:1]}int{bits}" for sign in ("", "unsigned ") for name, bits in (("short", 16), ("int", 32))},
    **{f"{sign}{name}": f"{sign[:1]}int64" for sign in ("", "unsigned ") for name in ("long", "long long")},
    "unsigned char": "uint8",
    "unsigned": "uint32",
    "size_t": "uint64",
    **{f"{sign}int{bits}_t": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
"""NumPy's types of C's."""


def type_of(text: str) -> tuple[str, bool]:
    """Returns NumPy's name of a C type ("" if it has none) and True for a pointer to it."""
    bare = " ".join(QUALIFIERS.sub(" ", text).replace("std::", "").replace("*", " ").split())
    return _C_TYPES.get(bare, ""), text.count("*") == 1


def ask_about_types(cuda: str, kernel: str, args: Mapping[str, Any] | Sequence[Any]) -> None:
    """Raises TypeError for an array of another type than the one that its parameter points to, if the source or the kernel's
    mangled name says it. Unsigned integers may be bits of anything, and integers those of others of their size: they pass.
    """
    given = list(args.items()) if isinstance(args, Mapping) else list(enumerate(args))
    for (kind, own), (name, value) in zip(parameters(cuda, kernel, len(given)), given, strict=True):
        wanted, pointer = type_of(kind)
        if not (isinstance(value, np.ndarray) and pointer and wanted):
            continue
        have, want = value.dtype, dtype_of(wanted)
        bits = have.kind in "uc" or (have.kind == "V" and not is_float(have))
        whole = not is_float(have) or want.kind == "u" or have.itemsize <= 2  # halves pass as shorts
        if have != want and not bits and not (have.itemsize == want.itemsize and not is_float(want) and whole):
            raise TypeError(
                f"{source_name(kernel)}: argument {name!r} is an array of {have}, its parameter is {kind} {own}: did you mean "
                f"{want}? (as unsigned integers, the bytes pass as they are)"
            )
