"""A launch as Triton asks for it: its parameters by name, packed for the machine or for the clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash.basics import Array, Report, Shape
from cupyflash.sim.ptx import Launch, Module, RawArguments, TensorMap
from cupyflash.sim.ptx.memory.swizzles import CHOICES
from cupyflash.sim.ptx.parameters import parameter_offsets
from cupyflash.sim.ptx.rawkernel import settings
from cupyflash.sim.ptx.text.syntax import Variable

from .memory import Addresses


class NumPyPointer:
    """A NumPy array as Triton takes an argument."""

    def __init__(self, array: Array, addresses: Addresses):
        self.array, self.dtype = array, str(array.dtype)
        self._addresses = addresses

    def data_ptr(self) -> int:
        return self._addresses.of(self.array)


@dataclass(frozen=True)
class KernelCall:
    """A kernel with grid (in blocks), block, dynamic shared memory in bytes, cluster, and its parameters: (name, value)."""

    kernel: str
    module: Module
    grid: Shape
    block: Shape
    shared: int
    cluster: tuple[int, ...] | None
    values: Sequence[tuple[str, Any]]

    def run(self, addresses: Addresses, **other: Any) -> Launch:
        """Runs the call on the machine; `other` are arguments of `Module.launch` in the place of the call's own."""
        how, params = settings(), self.params
        offsets, size = parameter_offsets(params)
        data, pointers = bytearray(size), []
        for (name, value), param in zip(self.values, params, strict=True):
            at = offsets[param.name]
            base = base_of(value)
            if base is not None:
                address = addresses.of(base)
                pointers.append((name, address))
                described = isinstance(value, DescribedTensor)
                value = value.map(addresses.memory(address)).description.encode(address) if described else address
            data[at : at + param.size] = encoded(value, param)
        more: Report = {"seed": how.seed, "races": bool(how.races), "suppressions": how.suppressions or ()}
        more = {"grid": self.grid, "shared_bytes": self.shared, "cluster": self.cluster, **more, **other}
        return self.module.launch(
            self.kernel, block=self.block, args=RawArguments(bytes(data), addresses.allocations(pointers)), **more
        )

    @property
    def params(self) -> Sequence[Variable]:
        """The kernel's parameters in its PTX. Raises TypeError if their number is another one than that of the values."""
        params = self.module.code(self.kernel).params
        if len(params) != len(self.values):
            raise TypeError(f"{self.kernel} has {len(params)} parameters in its PTX, Triton passes {len(self.values)}")
        return params

    def arguments(self, addresses: Addresses) -> list[Any]:
        """Returns the arguments with arrays for pointers, as the clock takes them."""
        found: list[Any] = []
        for (_, value), param in zip(self.values, self.params, strict=True):
            base = base_of(value)
            if base is None:
                found.append(encoded(value, param))
                continue
            memory = addresses.memory(addresses.of(base))
            found.append(value.map(memory) if isinstance(value, DescribedTensor) else memory)
        return found


def base_of(value: Any) -> Any:
    """Returns the tensor or array of a parameter; None for a number."""
    if isinstance(value, DescribedTensor):
        value = value.base
    if isinstance(value, NumPyPointer):
        value = value.array
    return value if isinstance(value, np.ndarray) or hasattr(value, "data_ptr") else None


def encoded(value: Any, param: Variable) -> bytes:
    """Returns a number as the bytes of its parameter."""
    if isinstance(value, bytes):
        return value
    if value is None:
        return bytes(param.size)
    if isinstance(value, float) or param.type.kind == "f":
        return np.array(value, f"f{param.size}").tobytes()
    return (int(value) & ((1 << 8 * param.size) - 1)).to_bytes(param.size, "little")


def flat(name: str, kind: Any, value: Any, descriptions: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yields an argument's parameters."""
    if isinstance(kind, tuple):
        fields = getattr(value, "_fields", None) or range(len(kind))
        for field, inner, part in zip(fields, kind, value, strict=True):
            yield from flat(f"{name}.{field}" if isinstance(field, str) else f"{name}[{field}]", inner, part, descriptions)
    elif isinstance(kind, str) and kind.startswith("tensordesc"):
        shape, strides = list(value.shape), list(value.strides)
        if descriptions:
            yield name, DescribedTensor(value.base, value, descriptions.pop(0))
        else:
            rounds = [value.round_f32_to_tf32] if hasattr(value, "round_f32_to_tf32") else []
            yield name, value.base
            yield from ((name, each) for each in (*shape, *strides, value.padding == "nan", *rounds))
        yield from ((name, each) for each in (*shape, *strides))
    elif kind != "constexpr":
        yield name, value


ON_HOST = {8: 10, 9: 8, 10: 9}
"""Types of elements whose number in a map made on the host differs from that in one made by a kernel."""


@dataclass(frozen=True)
class DescribedTensor:
    """A tensor with the descriptor that the host makes of it; `meta` is the kernel's: the box, the swizzle, the type."""

    base: Any
    descriptor: Any
    meta: dict[str, Any]

    def map(self, array: Array) -> TensorMap:
        """Returns the map that the driver would make; `array`: the memory from the tensor's first byte on."""
        value, meta = self.descriptor, self.meta
        if meta.get("is_im2col"):
            raise NotImplementedError("tensor descriptors of images (im2col) that the host makes are not simulated")
        dims, size, kinds = list(value.shape), meta["elem_size"], CHOICES["dtype"]
        if meta["fp4_padded"]:
            dims[-1] *= 2
        kind = ON_HOST.get(meta["elem_type"], meta["elem_type"])
        if getattr(value, "round_f32_to_tf32", False):
            kind = kinds.index("tfloat32")
        if kind >= len(kinds):
            raise NotImplementedError(f"tensor maps of type {kind} (packed 4-bit numbers) are not simulated")
        return TensorMap(
            array,
            tuple(meta["block_size"])[::-1],
            dims=dims[::-1],
            strides=[stride * size for stride in value.strides[-2::-1]],
            dtype=kinds[kind],
            swizzle=CHOICES["swizzle"][meta["swizzle"]],
            fill="nan" if value.padding == "nan" else "zeros",
        )
