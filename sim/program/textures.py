"""CUDA arrays, textures and surfaces: the runtime's functions of them (CUDA Runtime API: "Memory Management", "Texture Object
Management", "Surface Object Management").

An array's texels lie in rows without gaps, in an allocation that no pointer of the program reaches.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from cupyflash.sim import ptx
from cupyflash.sim.program.copies import Copy, CopyCalls, Side, copies
from cupyflash.sim.program.errors import CudaError, ErrorCode
from cupyflash.sim.program.memory import ARRAY, Block
from cupyflash.sim.program.properties import TEXTURES, values

KINDS = "suf"
"""cudaChannelFormatKind: signed, unsigned, float."""
LAYERED, LOAD_STORE, CUBEMAP, GATHER = 1, 2, 4, 8
"""cudaArray flags."""
OF_ARRAY, OF_MIPMAPPED_ARRAY, OF_LINEAR, OF_PITCH = range(4)
"""cudaResourceType."""
RESOURCE_BYTES, TEXTURE_BYTES = 144, 72
LINEAR_FILTER, NORMALIZED_FLOAT = 1, 1
MOST = {
    "1d": ("maxTexture1D",),
    "2d": ("maxTexture2D",),
    "3d": ("maxTexture3D", "maxTexture3DAlt"),
    "a1d": ("maxTexture1DLayered",),
    "a2d": ("maxTexture2DLayered",),
    "cube": ("maxTextureCubemap",),
    "acube": ("maxTextureCubemapLayered",),
}
"""Properties that limit an array of a geometry; one of them must let it pass."""


def fits(sizes: tuple[int, ...], limit: str) -> bool:
    """True if sizes, in texels and layers, are within a property of the device."""
    most = TEXTURES[limit]
    return all(size <= one for size, one in zip(sizes, most if isinstance(most, tuple) else (most,), strict=False))


@dataclass(frozen=True, eq=False)
class ProgramArray:
    """A CUDA array; `extent` and `channels` are as the program gave them."""

    block: Block
    texels: ptx.Texels
    extent: tuple[int, int, int]
    channels: bytes
    flags: int

    @property
    def row(self) -> int:
        """Bytes of a row."""
        return self.texels.pitch

    @property
    def rows(self) -> int:
        """The number of rows of all slices or layers together."""
        return self.block.size // self.row


@dataclass(frozen=True, eq=False)
class ProgramTexture:
    """A texture or surface object, with the descriptions that it was made of."""

    shown: ptx.Texture | ptx.Texels
    resource: bytes
    sampling: bytes = b""


def format_of(channels: bytes) -> ptx.TexelFormat:
    """Returns the format of a cudaChannelFormatDesc. Raises CudaError for one that CUDA, or the simulator, does not have."""
    *bits, kind = struct.unpack("<5i", channels)
    count = sum(one > 0 for one in bits)
    if not 0 <= kind < len(KINDS):
        raise CudaError(ErrorCode.NOT_SUPPORTED, f"channel format kind {kind} is not simulated: signed, unsigned and float are")
    if count not in (1, 2, 4) or bits != [bits[0]] * count + [0] * (4 - count):
        raise CudaError(ErrorCode.INVALID_VALUE, f"a channel format of {bits} bits")
    if bits[0] not in (8, 16, 32) or (KINDS[kind] == "f" and bits[0] == 8):
        raise CudaError(ErrorCode.INVALID_VALUE, f"a channel format of {bits[0]} bits")
    return ptx.TexelFormat(count, bits[0], KINDS[kind])


class ArrayCalls(CopyCalls):
    """CUDA arrays and their copies, texture and surface objects."""

    # -- arrays ---------------------------------------------------------------------------------------------------------

    def cudaCreateChannelDesc(self, out: int, x: int, y: int, z: int, w: int, kind: int) -> int:
        self.channel.write(out, struct.pack("<5I", *(one & 0xFFFFFFFF for one in (x, y, z, w, kind))))
        return out

    def cudaGetChannelDesc(self, out: int, array: int) -> None:
        self.channel.write(out, self.array(array).channels)

    def cudaMallocArray(self, out: int, channels: int, width: int, height: int, flags: int) -> None:
        self.give_array(out, channels, (width, height, 0), flags)

    def cudaMalloc3DArray(self, out: int, channels: int, flags: int, *words: int) -> None:
        self.give_array(out, channels, (words[3], words[4], words[5]), flags)

    def give_array(self, out: int, channels: int, extent: tuple[int, int, int], flags: int) -> None:
        self.check_sticky()
        flags &= 0xFFFFFFFF
        unknown = flags & ~(LAYERED | LOAD_STORE | CUBEMAP | GATHER)
        if unknown:
            raise CudaError(ErrorCode.NOT_SUPPORTED, f"arrays with flags {unknown:#x} are not simulated")
        words = self.channel.read(channels, 20)
        form, (width, height, depth) = format_of(words), extent
        layered, cube = bool(flags & LAYERED), bool(flags & CUBEMAP)
        layers = depth if layered or cube else 0
        faces = width == height and (layers and layers % 6 == 0 if layered else layers == 6)
        if not width or (depth and not height and not layered) or (layered and not layers) or (cube and not faces):
            raise CudaError(ErrorCode.INVALID_VALUE, f"an array of {width} x {height} x {depth} texels with flags {flags:#x}")
        plain = "3d" if depth and not layers else "2d" if height else "1d"
        geometry = ("acube" if layered else "cube") if cube else f"a{plain}" if layered else plain
        shape = width, max(height, 1), 1 if layers else max(depth, 1)
        sizes = (width, depth) if geometry in ("a1d", "acube") else (width, height, depth)
        if not any(fits(sizes, limit) for limit in MOST[geometry]):
            raise CudaError(ErrorCode.INVALID_VALUE, f"an array of {' x '.join(map(str, filter(None, extent)))} texels")
        row = width * form.size
        block = self.memory.allocate(row * shape[1] * max(depth, 1), ARRAY)
        texels = ptx.Texels(block.address, form, geometry, shape, row, row * shape[1], max(layers, 1))
        self.channel.write_word(out, self.handle(ProgramArray(block, texels, extent, words, flags)))

    def array(self, handle: int) -> ProgramArray:
        """Returns an array by its handle. Raises CudaError if there is none."""
        found = self.handles.get(handle)
        if not isinstance(found, ProgramArray):
            raise CudaError(ErrorCode.INVALID_VALUE)
        return found

    def cudaFreeArray(self, array: int) -> None:
        if array:
            self.memory.free(self.array(array).block.address, (ARRAY,))
            del self.handles[array]
            self.wait_for_all()

    def cudaArrayGetInfo(self, channels: int, extent: int, flags: int, array: int) -> None:
        one = self.array(array)
        for out, data in (
            (channels, one.channels),
            (extent, struct.pack("<3Q", *one.extent)),
            (flags, struct.pack("<I", one.flags)),
        ):
            if out:
                self.channel.write(out, data)

    # -- copies ---------------------------------------------------------------------------------------------------------

    def place(self, array: int, x: int, y: int, size: int) -> int:
        """Returns the address of byte x of a row, from which `size` bytes are in the array. Raises CudaError if they are not."""
        one = self.array(array)
        at = y * one.row + x
        if x >= one.row or at + size > one.block.size:
            raise CudaError(ErrorCode.INVALID_VALUE)
        return one.block.address + at

    def box_in(self, array: int, x: int, y: int, width: int, height: int) -> tuple[int, int]:
        """Returns the address and the pitch of rows of an array. Raises CudaError if they are not all in it."""
        one = self.array(array)
        if x + width > one.row or y + height > one.rows:
            raise CudaError(ErrorCode.INVALID_VALUE)
        return one.block.address + y * one.row + x, one.row

    def row_to_array(self, array: int, x: int, y: int, source: int, size: int) -> Copy:
        return self.plain(self.place(array, x, y, size), source, size)

    def row_from_array(self, target: int, array: int, x: int, y: int, size: int) -> Copy:
        return self.plain(target, self.place(array, x, y, size), size)

    def cudaMemcpyArrayToArray(self, to: int, x: int, y: int, array: int, from_x: int, from_y: int, size: int) -> None:
        self.now(self.plain(self.place(to, x, y, size), self.place(array, from_x, from_y, size), size))

    def to_array(self, array: int, x: int, y: int, source: int, pitch: int, width: int, height: int) -> Copy:
        return self.rows(*self.box_in(array, x, y, width, height), source, pitch, width, height)

    def from_array(self, target: int, pitch: int, array: int, x: int, y: int, width: int, height: int) -> Copy:
        return self.rows(target, pitch, *self.box_in(array, x, y, width, height), width, height)

    cudaMemcpyToArray, cudaMemcpyToArrayAsync = copies(row_to_array, 6)
    cudaMemcpyFromArray, cudaMemcpyFromArrayAsync = copies(row_from_array, 6)
    cudaMemcpy2DToArray, cudaMemcpy2DToArrayAsync = copies(to_array, 8)
    cudaMemcpy2DFromArray, cudaMemcpy2DFromArrayAsync = copies(from_array, 8)

    def cudaMemcpy2DArrayToArray(self, *words: int) -> None:
        to, x, y, array, from_x, from_y, width, height = words[:8]
        self.now(
            self.rows(*self.box_in(to, x, y, width, height), *self.box_in(array, from_x, from_y, width, height), width, height)
        )

    def side(self, array: int) -> Side:
        """Returns an array as one end of a copy of a box."""
        one = self.array(array)
        return Side(one.block.address, one.row, one.texels.shape[1], one.texels.format.size, max(one.extent[2], 1))

    # -- objects --------------------------------------------------------------------------------------------------------

    def shown_by(self, resource: bytes) -> ptx.Texels:
        """Returns the texels that a cudaResourceDesc describes. Raises CudaError."""
        (kind,) = struct.unpack_from("<i", resource)
        (address,) = struct.unpack_from("<Q", resource, 8)
        if kind == OF_ARRAY:
            return self.array(address).texels
        if kind == OF_MIPMAPPED_ARRAY:
            raise CudaError(ErrorCode.NOT_SUPPORTED, "mipmapped arrays are not simulated")
        if kind not in (OF_LINEAR, OF_PITCH):
            raise CudaError(ErrorCode.INVALID_VALUE)
        form = format_of(resource[16:36])
        width, height, pitch = struct.unpack_from("<3Q", resource, 40)
        if kind == OF_LINEAR:
            width, height, pitch = width // form.size, 1, width
        size = (height - 1) * pitch + width * form.size
        aligned = address % 512 == 0 and (kind == OF_LINEAR or pitch % 32 == 0)
        linear = kind == OF_LINEAR
        small = fits((width,), "maxTexture1DLinear") if linear else fits((width, height, pitch), "maxTexture2DLinear")
        if not aligned or not width or not height or not small or width * form.size > pitch:
            raise CudaError(ErrorCode.INVALID_VALUE)
        self.memory.part(address, size)
        return ptx.Texels(address, form, "1d" if linear else "2d", (width, height, 1), pitch, 0, linear=linear)

    def cudaCreateTextureObject(self, out: int, resource: int, sampling: int, view: int) -> None:
        described, words = self.channel.read(resource, RESOURCE_BYTES), self.channel.read(sampling, TEXTURE_BYTES)
        if view:
            raise CudaError(ErrorCode.NOT_SUPPORTED, "resource views of textures are not simulated")
        texels = self.shown_by(described)
        *modes, linear, mode, srgb = struct.unpack_from("<6i", words)
        border = struct.unpack_from("<4f", words, 24)
        (normalized,) = struct.unpack_from("<i", words, 40)
        (seamless,) = struct.unpack_from("<i", words, 68)
        if srgb or seamless:
            raise CudaError(ErrorCode.NOT_SUPPORTED, f"{'sRGB' if srgb else 'seamlessCubemap'} is not simulated")
        if not all(0 <= one <= 3 for one in modes) or linear not in (0, 1) or mode not in (0, 1):
            raise CudaError(ErrorCode.INVALID_VALUE)
        as_float = mode == NORMALIZED_FLOAT and texels.format.kind != "f"
        if as_float and texels.format.bits == 32:
            raise CudaError(ErrorCode.INVALID_NORM_SETTING)
        texture = ptx.Texture(texels, tuple(modes), linear == LINEAR_FILTER, bool(normalized), as_float, border)
        if texture.filtered and not texture.floats:
            raise CudaError(ErrorCode.INVALID_FILTER_SETTING)
        self.channel.write_word(out, self.handle(ProgramTexture(texture, described, words)))

    def cudaCreateSurfaceObject(self, out: int, resource: int) -> None:
        described = self.channel.read(resource, RESOURCE_BYTES)
        kind, array = struct.unpack_from("<i4xQ", described)
        if kind != OF_ARRAY or not self.array(array).flags & LOAD_STORE:
            raise CudaError(ErrorCode.INVALID_VALUE, "a surface needs an array that was made with cudaArraySurfaceLoadStore")
        self.channel.write_word(out, self.handle(ProgramTexture(self.array(array).texels, described)))

    def object(self, handle: int, kind: type[ptx.Texture] | type[ptx.Texels]) -> ProgramTexture:
        """Returns a texture or surface object. Raises CudaError if the handle is of none."""
        found = self.handles.get(handle)
        if not isinstance(found, ProgramTexture) or not isinstance(found.shown, kind):
            raise CudaError(ErrorCode.INVALID_VALUE)
        return found

    def objects(self) -> Mapping[int, ptx.Texture | ptx.Texels]:
        """Returns all textures and surfaces, as a launch knows them."""
        return {handle: one.shown for handle, one in self.handles.items() if isinstance(one, ProgramTexture)}

    def cudaDestroyTextureObject(self, texture: int) -> None:
        self.object(texture, ptx.Texture)
        del self.handles[texture]

    def cudaDestroySurfaceObject(self, surface: int) -> None:
        self.object(surface, ptx.Texels)
        del self.handles[surface]

    def cudaGetTextureObjectResourceDesc(self, out: int, texture: int) -> None:
        self.channel.write(out, self.object(texture, ptx.Texture).resource)

    def cudaGetTextureObjectTextureDesc(self, out: int, texture: int) -> None:
        self.channel.write(out, self.object(texture, ptx.Texture).sampling)

    def cudaGetSurfaceObjectResourceDesc(self, out: int, surface: int) -> None:
        self.channel.write(out, self.object(surface, ptx.Texels).resource)

    def cudaDeviceGetTexture1DLinearMaxWidth(self, out: int, channels: int, device: int) -> None:
        format_of(self.channel.read(channels, 20))
        self.channel.write_word(out, values(self.device)["maxTexture1DLinear"])
