"""Registration of a program's code, which the compiler's own code calls before `main`; its kernels and variables by symbol."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from cupyflash.basics import Shape
from cupyflash.sim import ptx
from cupyflash.sim.program import fatbin
from cupyflash.sim.program.copies import Copy, CopyCalls, copies
from cupyflash.sim.program.errors import CudaError, ErrorCode
from cupyflash.sim.program.linking import linked
from cupyflash.sim.program.memory import MANAGED, VARIABLE, Block, ProgramMemory


@dataclass(eq=False)
class Image:
    """The code of a fat binary, or of several that are linked, parsed when something of it is used. Its variables lie in memory of
    the device from then on.
    """

    binaries: list[bytes]
    architecture: int
    memory: ProgramMemory
    managed: dict[str, Block] = field(default_factory=dict)
    variables: dict[str, Block] = field(default_factory=dict)

    @cached_property
    def module(self) -> ptx.Module:
        try:
            found = linked(fatbin.texts(self.binaries, self.architecture))
        except fatbin.NoPtx as error:
            raise CudaError(ErrorCode.INVALID_KERNEL_IMAGE, str(error)) from None
        except (ptx.PtxError, ptx.UnsupportedPTX) as error:
            raise CudaError(ErrorCode.NOT_SUPPORTED, str(error)) from None
        for name, size in found.variables.items():
            block = self.managed.get(name) or self.memory.allocate(size, VARIABLE, name)
            self.variables[name] = block
            found.place(name, block.opened().memory, block.address)
        return found

    def variable(self, name: str) -> Block:
        """Returns a variable's place. Raises CudaError if the code has none of this name."""
        if name not in self.module.variables:
            raise CudaError(ErrorCode.INVALID_SYMBOL)
        return self.variables[name]


@dataclass(frozen=True)
class ProgramKernel:
    """A kernel of an image, by its name in the PTX."""

    image: Image
    name: str


@dataclass(frozen=True)
class LaunchRequest:
    """A launch as the program asks for it; grid and block in (x, y, z)."""

    kernel: ProgramKernel
    grid: Shape
    block: Shape
    shared: int
    data: bytes
    cluster: tuple[int, ...] | None = None
    programmatic: bool = False


@dataclass(frozen=True)
class Symbol:
    """A variable of an image, by its name in the PTX."""

    image: Image
    name: str
    size: int


class SymbolCalls(CopyCalls):
    """Registration, and the functions that take a variable."""

    def __init__(self, *arguments: object):
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.kernels: dict[int, ProgramKernel] = {}
        self.symbols: dict[int, Symbol] = {}
        self.images: dict[int, Image] = {}

    def _cudaRegisterFatBinary(self, wrapper: int) -> int:
        magic, version, data, parts = struct.unpack("<IIQQ", self.channel.read(wrapper, 24))
        if magic != fatbin.WRAPPER:
            raise CudaError(ErrorCode.INVALID_KERNEL_IMAGE)
        places = [data] if version != fatbin.LINKED else [*iter(map(self.channel.read_word, count(parts, 8)).__next__, 0)]
        binaries = []
        for place in places:
            _, _, header, size = struct.unpack("<IHHQ", self.channel.read(place, 16))
            binaries.append(self.channel.read(place, header + size))
        major, minor = self.device.compute_capability
        handle = self.channel.keep(bytes(8))
        self.images[handle] = Image(binaries, 10 * major + minor, self.memory)
        return handle

    def _cudaRegisterFatBinaryEnd(self, handle: int) -> None:
        pass

    def _cudaUnregisterFatBinary(self, handle: int) -> None:
        pass

    def _cudaInitModule(self, handle: int) -> int:
        return 1

    def _cudaRegisterFunction(self, handle: int, function: int, _: int, name: int) -> None:
        self.kernels[function] = ProgramKernel(self.images[handle], self.channel.text(name))

    def _cudaGetKernel(self, out: int, function: int) -> None:
        self.kernel(function)
        self.channel.write_word(out, function)

    def _cudaRegisterVar(self, handle: int, variable: int, _: int, name: int, ext: int, size: int) -> None:
        self.symbols[variable] = Symbol(self.images[handle], self.channel.text(name), size)

    def _cudaRegisterManagedVar(self, handle: int, pointer: int, _: int, name: int, ext: int, size: int) -> None:
        image, text = self.images[handle], self.channel.text(name)
        block = image.managed[text] = self.memory.allocate(size, MANAGED, text)
        self.channel.write_word(pointer, block.address)
        self.symbols[pointer] = Symbol(image, text, size)

    def kernel(self, function: int) -> ProgramKernel:
        """Returns a kernel by the host's function of its name, or by its handle, which is the same."""
        if function not in self.kernels:
            raise CudaError(ErrorCode.INVALID_DEVICE_FUNCTION)
        return self.kernels[function]

    def symbol(self, variable: int) -> Block:
        """Returns the place of the variable that the host's shadow of it stands for. Raises CudaError."""
        found = self.symbols.get(variable)
        if found is None:
            raise CudaError(ErrorCode.INVALID_SYMBOL)
        return found.image.variable(found.name)

    def cudaGetSymbolAddress(self, out: int, variable: int) -> None:
        self.channel.write_word(out, self.symbol(variable).address)

    def cudaGetSymbolSize(self, out: int, variable: int) -> None:
        self.symbol(variable)
        self.channel.write_word(out, self.symbols[variable].size)

    def to_symbol(self, variable: int, source: int, size: int, offset: int, _kind: int) -> Copy:
        target = self.symbol(variable).address + offset
        return lambda: self.memory.copy(target, source, size)

    def from_symbol(self, target: int, variable: int, size: int, offset: int, _kind: int) -> Copy:
        source = self.symbol(variable).address + offset
        return lambda: self.memory.copy(target, source, size)

    cudaMemcpyToSymbol, cudaMemcpyToSymbolAsync = copies(to_symbol, 5)
    cudaMemcpyFromSymbol, cudaMemcpyFromSymbolAsync = copies(from_symbol, 5)
