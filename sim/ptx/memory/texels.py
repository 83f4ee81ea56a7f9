"""Textures and surfaces: texels in memory, the places that a fetch reads, and the value that it makes of them.

The formulas are those of the CUDA C++ Programming Guide, "Texture Fetching" and "Texture and Surface Memory"; the instructions
those of the PTX ISA, "Texture Instructions" and "Surface Instructions". N is a texture's size along an axis.

- A coordinate x is that of a texel's corner: point sampling reads texel floor(x). If coordinates are normalized, x is multiplied by
  N first.
- Linear filtering reads texels i = floor(x - 0.5) and i + 1, with weights 1 - a and a, where a is the fraction of x - 0.5, rounded
  to 8 bits behind the point. So are the weights along two axes (`corners`), as an H100's fetches show; sums are rounded once.
- A texel i outside of 0 to N - 1 is, by the address mode of the axis, i modulo N (wrap), the nearest one (clamp), its mirror image
  (mirror) or the border's color (border).
- A cubemap's coordinates (x, y, z) choose the face of the largest of |x|, |y|, |z|, m, and the place (s / m + 1) / 2,
  (t / m + 1) / 2 on it.

A texture of linear memory, which tex1Dfetch reads, gives 0 outside. A surface is addressed by the byte along its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from cupyflash.words import plural

from ..state.findings import ERROR, WARNING, Verdict
from ..state.lane_sets import SECTOR, LaneSet, by_value, distinct
from ..state.segments import WINDOW_BITS, Access, Segment
from ..text.syntax import ELEMENT, Array, PtxInstruction
from .ports import ALL, GlobalPort, Part
from .spaces import LaunchMemory, MemoryUnit

WRAP, CLAMP, MIRROR, BORDER = range(4)
"""Address modes, by the numbers of cudaTextureAddressMode."""

AXES = {"1d": 1, "2d": 2, "3d": 3, "a1d": 1, "a2d": 2, "cube": 2, "acube": 2}
"""Axes of a texture that are filtered and addressed, by its geometry."""
LAYERED = ("a1d", "a2d", "acube")
CUBES = ("cube", "acube")
FACES = 6

FARTHEST = np.float32(1 << 24)
"""Coordinates beyond this are treated as this: a float32 has no fraction there, and no texture is as large."""
Positions = Array | slice
"""Positions in a set of lanes; ALL are all of them."""

FRACTION = np.float32(256)
"""Steps of a weight of linear filtering."""


@dataclass(frozen=True)
class TexelFormat:
    """The format of a texel: 1, 2 or 4 `channels` of 8, 16 or 32 `bits`; `kind`: s(igned), u(nsigned) or f(loat)."""

    channels: int
    bits: int
    kind: str

    @property
    def size(self) -> int:
        """Bytes of a texel."""
        return self.channels * self.bits // 8

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype of a channel."""
        return np.dtype({"s": "i", "u": "u", "f": "f"}[self.kind] + str(self.bits // 8))


@dataclass(frozen=True)
class Texels:
    """Texels in memory from `address` on: those of a CUDA array, or others that a texture shows. As such, it is a surface.

    `geometry` is PTX's: 1d, 2d, 3d, a1d and a2d (arrays of layers), cube, acube. `shape`: texels along x, y, z. Rows begin `pitch`
    bytes apart; slices along z, layers and faces of a cube `plane` bytes, and there are `layers` of the latter (a cube: 6).
    `linear`: linear memory, whose outside reads as 0. `array` has them where they are an argument of a launch (`of`).
    """

    address: int
    format: TexelFormat
    geometry: str
    shape: tuple[int, int, int]
    pitch: int
    plane: int
    layers: int = 1
    linear: bool = False
    array: Array | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, array: Array, geometry: str, *, linear: bool = False) -> Texels:
        """Returns the texels of an array, to be passed to a kernel as a surface, or in a `Texture`.

        Its axes are those of the geometry, the slowest first: layers or faces (6 for each cube), z, y, x, and 1, 2 or 4 channels if
        there is one more. It is contiguous, of integers of 8, 16 or 32 bits, or floats of 16 or 32. Raises ValueError.
        """
        if geometry not in AXES:
            raise ValueError(f"geometry must be one of {', '.join(AXES)}, got {geometry!r}")
        stacked, axes = geometry in (*LAYERED, *CUBES), AXES[geometry]
        count = axes + stacked
        channels = array.shape[-1] if array.ndim == count + 1 else 1
        if array.ndim not in (count, count + 1) or channels not in (1, 2, 4) or not array.size or not array.flags.c_contiguous:
            needed = f"a contiguous array of {plural(count, 'axis', 'axes')}, and one of 1, 2 or 4 channels if there are more"
            raise ValueError(f"texels of geometry {geometry} are {needed}, got shape {array.shape}, strides {array.strides}")
        kind, bits = array.dtype.kind, 8 * array.itemsize
        if (kind, bits) not in [("f", 16), ("f", 32), *((k, b) for k in "iu" for b in (8, 16, 32))]:
            raise ValueError(f"texels are integers of 8, 16 or 32 bits, or floats of 16 or 32, got {array.dtype}")
        if linear and geometry != "1d":
            raise ValueError(f"linear memory is of geometry 1d, got {geometry!r}")
        layers = array.shape[0] if stacked else 1
        x, y, z = (*array.shape[stacked:count][::-1], 1, 1)[:3]
        if geometry in CUBES and (x != y or layers % FACES or (geometry == "cube" and layers != FACES)):
            raise ValueError(f"a cube has {FACES} square faces, got shape {array.shape}")
        form = TexelFormat(channels, bits, {"i": "s"}.get(kind, kind))
        return cls(0, form, geometry, (x, y, z), x * form.size, x * y * form.size, layers, linear, array)


@dataclass(frozen=True)
class Texture:
    """Texels and the way to sample them.

    `modes`: address modes along x, y, z; wrap and mirror need `normalized` coordinates, else they are clamp. `filtered`: linear
    filtering. `as_float`: integers of 8 and 16 bits are read as fractions of the largest, floats from 0 or -1 to 1. `border`: the
    color outside, whose bits are integers where integers are read.
    """

    texels: Texels
    modes: tuple[int, int, int] = (CLAMP, CLAMP, CLAMP)
    filtered: bool = False
    normalized: bool = False
    as_float: bool = False
    border: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    @property
    def floats(self) -> bool:
        """True if a fetch gives floats."""
        return self.texels.format.kind == "f" or (self.as_float and self.texels.format.bits < 32)

    def mode(self, axis: int) -> int:
        """Returns the address mode that an axis has."""
        if self.texels.linear:
            return BORDER
        mode = self.modes[axis]
        return CLAMP if mode in (WRAP, MIRROR) and not self.normalized else mode

    @property
    def outside(self) -> Array:
        """Returns the color outside, float32, or uint32 where integers are read."""
        color = np.array((0, 0, 0, 0) if self.texels.linear else self.border, np.float32)
        return color if self.floats else color.view(np.uint32)


def texels_of(shown: Texture | Texels) -> Texels:
    """Returns the texels of a texture or a surface."""
    return shown.texels if isinstance(shown, Texture) else shown


def placed(shown: Texture | Texels, address: int) -> Texture | Texels:
    """Returns a texture or surface with its texels at an address."""
    if isinstance(shown, Texture):
        return replace(shown, texels=replace(shown.texels, address=address))
    return replace(shown, address=address)


class Tap(NamedTuple):
    """The texels along one axis that lanes read: their numbers, a mask of those inside (None: all), and their weights.

    `times`: 2 if it stands for both texels of linear filtering, because no lane gives the second one a weight.
    """

    texel: Array
    inside: Array | None
    weight: Array | None = None
    times: int = 1


def along(index: Array, size: int, mode: int) -> tuple[Array, Array | None]:
    """Returns texel numbers (int64) as an address mode moves them into 0 to `size` - 1, and a mask of those that were inside."""
    if mode == WRAP:
        return index % size, None
    if mode == MIRROR:
        folded = index % (2 * size)
        return np.where(folded < size, folded, 2 * size - 1 - folded), None
    return np.minimum(np.maximum(index, 0), size - 1), (index >= 0) & (index < size) if mode == BORDER else None


def whole(values: Array) -> Array:
    """Returns floor(x) as int64; NaN is a place far away, and so is what is farther away."""
    return np.floor(np.clip(values, -FARTHEST, FARTHEST)).astype(np.int64)


def scaled(texture: Texture, axis: int, coordinate: Array) -> Array:
    """Returns coordinates, float32, that count texels."""
    return coordinate * np.float32(texture.texels.shape[axis]) if texture.normalized else coordinate


def nearest(texture: Texture, axis: int, coordinate: Array) -> list[Tap]:
    """Returns the texel at coordinates, which are float32, or numbers of texels."""
    numbers = coordinate.dtype.kind == "i"
    texel = coordinate.astype(np.int64) if numbers else whole(scaled(texture, axis, coordinate))
    return [Tap(*along(texel, texture.texels.shape[axis], texture.mode(axis)))]


def both(texture: Texture, axis: int, coordinate: Array) -> list[Tap]:
    """Returns the two texels of linear filtering, without weights."""
    first = whole(scaled(texture, axis, coordinate) - np.float32(0.5))
    return [Tap(*along(first + k, texture.texels.shape[axis], texture.mode(axis))) for k in (0, 1)]


def weighted(texture: Texture, axis: int, coordinate: Array) -> list[Tap]:
    """Returns the two texels of linear filtering with their weights. One of weight 0 is not read, but the other one."""
    x, size, mode = scaled(texture, axis, coordinate) - np.float32(0.5), texture.texels.shape[axis], texture.mode(axis)
    below = np.floor(np.clip(x, -FARTHEST, FARTHEST))
    first = below.astype(np.int64)
    one = Tap(*along(first, size, mode))
    part = np.floor((x - below) * FRACTION + np.float32(0.5))
    if not np.count_nonzero(part):
        return [one._replace(times=2)]
    # Outside of 0 to 1 is only what is not finite, or too far away.
    weight = np.where((part >= 0) & (part <= FRACTION), part / FRACTION, np.float32(0))
    return [one._replace(weight=1 - weight), Tap(*along(first + (weight != 0), size, mode), weight)]


def corners(a: Array, b: Array) -> list[Array]:
    """Returns the weights of texels (i, j), (i, j + 1), (i + 1, j), (i + 1, j + 1) for fractions a along i and b along j.

    The last one is a b rounded to 8 bits, halves up; along each axis they add up to the fractions. The guide has exact products;
    32,768 fetches of an H100 have these (tests/h100.npz has some), but for 14 whose coordinate it rounded to the next step.
    """
    last = np.floor(a * b * FRACTION + np.float32(0.5)) / FRACTION
    return [1 - a - b + last, b - last, a - last, last]


def weights(axes: Sequence[list[Tap]]) -> list[Array | None]:
    """Returns the weights of all combinations of taps, in the order of `itertools.product`; None: 1, there is but one texel."""
    fractions = [taps[1].weight for taps in axes if len(taps) > 1]
    if len(axes) == len(fractions) == 2:
        a, b = fractions
        assert a is not None and b is not None
        return list(corners(a, b))
    out: list[Array | None] = [None]
    for taps in axes:
        out = [
            before if tap.weight is None else tap.weight if before is None else before * tap.weight
            for before in out
            for tap in taps
        ]
    return out


Sampling = Callable[[Texture, int, Array], list[Tap]]
"""(texture, axis, coordinates) to the texels that are read along this axis: `nearest`, `both` or `weighted`."""


def face(x: Array, y: Array, z: Array) -> tuple[Array, Array, Array]:
    """Returns (face, x, y) of a direction, float32: faces are +x, -x, +y, -y, +z, -z; x and y go from 0 to 1.

    Where two of them are equally large, z comes before y and y before x.
    """
    sizes = [np.abs(one) for one in (x, y, z)]
    of_z = (sizes[2] >= sizes[0]) & (sizes[2] >= sizes[1])
    of_y = ~of_z & (sizes[1] >= sizes[0])
    choice = [of_z, of_y]
    major = np.select(choice, [z, y], x)
    negative = major < 0
    s = np.select(choice, [np.where(negative, -x, x), x], np.where(negative, z, -z))
    t = np.select(choice, [-y, np.where(negative, -z, z)], -y)
    number = np.select(choice, [np.int64(4), np.int64(2)], np.int64(0)) + negative
    half, size = np.float32(0.5), np.abs(major)
    return number, (s / size + 1) * half, (t / size + 1) * half


class TexturePort(GlobalPort):
    """Texels in global memory. What one instruction reads of them counts as one request."""

    def prepare(self, n: int) -> None:
        super().prepare(n)
        self.n = n
        self.times = 1
        """Texels of a fetch that the next read stands for."""
        self.pieces: list[tuple[Segment, LaneSet, Array, int]] = []

    def resolve(self, lanes: LaneSet, addresses: Array) -> list[Part]:
        return super().resolve(lanes, addresses) if lanes.n == self.n else self.search(lanes, addresses)

    def accessed(self, segment: Segment, lanes: LaneSet, addresses: Array, size: int | Array) -> None:
        if segment.state is not None:
            self.initialised(segment, lanes, addresses, size)
        self.stale(segment, lanes, addresses)
        self.pieces.append((segment, lanes, addresses, self.times))
        self.memory.show(Access(lanes, segment.space, segment, addresses, size, self.kind, self.write, self.instruction))

    def stale(self, segment: Segment, lanes: LaneSet, addresses: Array) -> None:
        """Reports reads of what this launch wrote before: the texture cache may have older bytes, whatever orders the two."""
        races = self.memory.races
        area = races.area(segment) if races is not None and self.read and segment.space == "global" else None
        if area is None or not area.shadow.writes.used:
            return
        rows = (addresses.astype(np.int64) + (segment.address - segment.start - area.low)) >> area.shift
        granules = np.arange(max(1, self.size >> area.shift))
        wrote = area.shadow.writes.entries[rows[:, None] + granules].any(axis=(1, 2))
        if wrote.any():
            at = np.flatnonzero(wrote)
            address = int(addresses[at[0]])
            surface = self.instruction.opcode == "suld"
            verdict = Verdict("proxy", WARNING if surface else ERROR, mend="read it in a later kernel, or through a pointer")
            message = (
                f"{'surface' if surface else 'texture'} read at offset {address - segment.start} of {segment.name!r}, which this "
                "launch wrote: the cache of textures and surfaces may have older bytes"
            )
            self.memory.findings.report(verdict, message, self.instruction, lanes, at, address=address, tensor=segment.name)

    def count(self) -> None:
        """Counts the pieces since the last time as one request of each tensor."""
        pieces, self.pieces = self.pieces, []
        tally, i, size = self.memory.tally.traffic, self.instruction, self.size
        if len(pieces) == 1:
            segment, lanes, addresses, times = pieces[0]
            first, pattern = lanes.pattern(addresses, size)
            requested = times * lanes.n * size
            tally[i, segment].count_side(self.write, requested, lanes.warps, pattern.sectors(first), pattern.unique_bytes)
            return
        for segment in {id(one): one for one, *_ in pieces}.values():
            mine = [piece[1:] for piece in pieces if piece[0] is segment]
            warp = np.concatenate([lanes.warp for lanes, _, _ in mine])
            place = (warp << 48) + np.concatenate([addresses.astype(np.int64) - segment.start for _, addresses, _ in mine])
            requested = size * sum(times * lanes.n for lanes, _, times in mine)
            unique = distinct(place) * size  # which sorts them
            sectors = distinct(place + (segment.start & SECTOR - 1) >> 5)
            tally[i, segment].count_side(self.write, requested, distinct(warp), sectors, unique)


class Textures(MemoryUnit):
    """The textures and surfaces of a launch, by their handles."""

    def __init__(self, memory: LaunchMemory, objects: Mapping[int, Texture | Texels]):
        super().__init__(memory)
        self.objects = objects

    def textures(self, lanes: LaneSet, handles: Array, i: PtxInstruction, geometry: str) -> Iterator[tuple[Positions, Texture]]:
        """Yields the textures of a geometry ("": any) at handles, each with the positions of its lanes; others are a finding."""
        for handle, at in by_handle(handles):
            found = self.objects.get(handle)
            if isinstance(found, Texture) and geometry in ("", found.texels.geometry):
                yield at, found
                continue
            texels = found.texels if isinstance(found, Texture) else None
            self.bad("texture", handle, at, lanes, i, None if texels is None else f"a texture of {texels.geometry}, not {geometry}")

    def surfaces(self, lanes: LaneSet, handles: Array, i: PtxInstruction, geometry: str) -> Iterator[tuple[Positions, Texels]]:
        """Yields the surfaces at handles as `textures` does; the faces of a cube are layers."""
        for handle, at in by_handle(handles):
            found = self.objects.get(handle)
            own = {"cube": "a2d", "acube": "a2d"}.get(found.geometry, found.geometry) if isinstance(found, Texels) else ""
            if isinstance(found, Texels) and geometry in ("", own):
                yield at, found
                continue
            self.bad("surface", handle, at, lanes, i, f"a surface of {own}, not {geometry}" if own else None)

    def bad(self, kind: str, handle: int, at: Positions, lanes: LaneSet, i: PtxInstruction, is_: str | None) -> None:
        message = f"{handle:#x} is {is_ or f'the handle of no {kind}'}"
        self.findings.report("bad texture", message, i, lanes, np.arange(lanes.n)[at])

    def same_kind(self, texture: Texture, floats: bool, lanes: LaneSet, i: PtxInstruction) -> bool:
        """True if a fetch of floats, or of integers, is one of what the texture gives; else it is a finding."""
        if texture.floats == floats:
            return True
        kinds = ("integers", "floats")
        message = f"{i.opcode} reads {kinds[floats]} of a texture of {kinds[texture.floats]} (cudaTextureDesc's readMode)"
        self.findings.report("bad texture", message, i, lanes, np.arange(lanes.n))
        return False

    def places(
        self, texture: Texture, geometry: str, coordinates: Sequence[Array], sampling: Sampling
    ) -> tuple[list[list[Tap]], Array]:
        """Returns the texels that lanes read along each axis, x first, and the byte offset of each lane's layer or face."""
        texels, layer = texture.texels, np.zeros((), np.int64)
        if geometry in LAYERED:
            # The number of a layer is unsigned, and clamped.
            most = texels.layers // (FACES if geometry in CUBES else 1) - 1
            layer = np.minimum(coordinates[0].astype(np.int64) & 0xFFFFFFFF, most)
            coordinates = coordinates[1:]
        if geometry in CUBES:
            number, *place = face(*coordinates[:3])
            layer = layer * FACES + number
            x, y = place
            # A place on a face counts from 0 to 1, as a normalized coordinate does.
            scale = [np.float32(1 if texture.normalized else size) for size in texels.shape[:2]]
            coordinates = (x * scale[0], y * scale[1])
        axes = [sampling(texture, axis, coordinates[axis]) for axis in range(AXES[geometry])]
        return axes, np.asarray(layer * texels.plane)

    def read(self, port: TexturePort, lanes: LaneSet, texture: Texture, chosen: Sequence[Tap], start: Array) -> Array:
        """Returns the texels (lanes, channels) at one place along each axis, as the texture gives them; does not count them."""
        texels = texture.texels
        form = texels.format
        address: Array = np.full(lanes.n, texels.address, np.int64) + start
        inside: Array | None = None
        for tap, step in zip(chosen, (form.size, texels.pitch, texels.plane), strict=False):
            address = address + tap.texel * step
            if tap.inside is not None:
                inside = tap.inside if inside is None else inside & tap.inside
        address = address.view(np.uint64)
        buffer = np.zeros(lanes.n, ELEMENT[form.size])
        if inside is None or inside.all():
            take(port.resolve(lanes, address), buffer, ALL)
            return colors(texture, buffer)
        at = np.flatnonzero(inside)
        if len(at):
            take(port.resolve(lanes.subset(at), address[at]), buffer, at)
        found = colors(texture, buffer)
        found[~inside] = texture.outside[: form.channels]
        return found

    def fetch(self, port: TexturePort, lanes: LaneSet, texture: Texture, geometry: str, coordinates: Sequence[Array]) -> Array:
        """Returns the values (lanes, channels) of a fetch, float32 or uint32."""
        pairs = texture.filtered and not texture.texels.linear and coordinates[-1].dtype.kind == "f"
        axes, start = self.places(texture, geometry, coordinates, weighted if pairs else nearest)
        total: Array | None = None
        for chosen, weight in zip(product(*axes), weights(axes), strict=True):
            port.times = math.prod(tap.times for tap in chosen)
            value = self.read(port, lanes, texture, chosen, start)
            if weight is not None:
                value = value * weight[:, None].astype(np.float64)
            total = value if total is None else total + value
        port.count()
        assert total is not None
        return total if total.dtype.kind == "u" else total.astype(np.float32, copy=False)

    def gather(self, port: TexturePort, lanes: LaneSet, texture: Texture, coordinates: Sequence[Array], channel: int) -> Array:
        """Returns one channel (lanes, 4) of the four texels that linear filtering would read, counterclockwise from the lower left
        one (tld4)."""
        axes, start = self.places(texture, "2d", coordinates, both)
        found = []
        for x, y in ((0, 1), (1, 1), (1, 0), (0, 0)):
            value = self.read(port, lanes, texture, (axes[0][x], axes[1][y]), start)
            found.append(padded(value)[channel])
        port.count()
        return np.stack(np.broadcast_arrays(*found), axis=1)

    def byte_places(
        self, lanes: LaneSet, texels: Texels, coordinates: Sequence[Array], size: int, i: PtxInstruction, clamp: str
    ) -> tuple[Array, Array]:
        """Returns the addresses of accesses of `size` bytes to a surface, and a mask of those that are inside.

        By `clamp` an outer one is a finding (trap), the nearest inside, or none (zero).
        """
        *layer, x, y, z = [*coordinates, 0, 0, 0][: 4 if i_layered(i) else 3]
        width = texels.shape[0] * texels.format.size
        limits = [width - size, texels.shape[1] - 1, texels.shape[2] - 1, texels.layers - 1]
        places = [np.broadcast_to(np.asarray(one).astype(np.int64), lanes.n) for one in (x, y, z, *(layer or [0]))]
        inside = np.logical_and.reduce([(one >= 0) & (one <= most) for one, most in zip(places, limits, strict=True)])
        if clamp == "clamp":
            limits[0] -= limits[0] % size
            places = [np.clip(one, 0, most) for one, most in zip(places, limits, strict=True)]
            inside = np.ones(lanes.n, bool)
        elif clamp == "trap" and not inside.all():
            bad = np.flatnonzero(~inside)
            where = ", ".join(str(int(one[bad[0]])) for one in [*places[3:], *places[: AXES[texels.geometry]]][not layer :])
            verb = "write" if i.opcode == "sust" else "read"
            shape = " x ".join(str(one) for one in texels.shape[: AXES[texels.geometry]])
            layers = f", {plural(texels.layers, 'layer')}" if layer else ""
            segment = self.memory.segments.get(texels.address >> WINDOW_BITS)
            name = repr(segment.name) if segment is not None else "freed memory"
            message = (
                f"surface {verb} of {plural(size, 'byte')} at ({where}), x in bytes: outside of {name}, which has {shape} texels "
                f"of {plural(texels.format.size, 'byte')}{layers}"
            )
            self.findings.report("out of bounds", message, i, lanes, bad, tensor=segment.name if segment else None)
        steps = (1, texels.pitch, texels.plane, texels.plane)
        address = sum(one * step for one, step in zip(places, steps, strict=True)) + texels.address
        return np.asarray(address).astype(np.uint64), inside


def i_layered(i: PtxInstruction) -> bool:
    """True if an instruction's first coordinate is a layer."""
    return bool(set(LAYERED) & set(i.mods))


def some(lanes: LaneSet, at: Positions) -> LaneSet:
    """Returns the lanes at these positions."""
    return lanes if isinstance(at, slice) else lanes.subset(at)


def by_handle(handles: Array) -> Iterator[tuple[int, Positions]]:
    """Yields each handle with the positions of its lanes; mostly there is one handle."""
    first = handles[0]
    if np.count_nonzero(handles != first):
        yield from by_value(handles)
    else:
        yield int(first), ALL


def take(parts: Sequence[Part], buffer: Array, at: Positions) -> None:
    """Reads the elements of parts into the places `at` of a buffer."""
    for view, index, positions in parts:
        if positions is None:
            buffer[at] = view.take(index)
        elif isinstance(at, slice):
            buffer[positions] = view[index]
        else:
            buffer[at[positions]] = view[index]


def colors(texture: Texture, raw: Array) -> Array:
    """Returns texels (lanes, channels) as a fetch gives them: float32, or integers extended to uint32."""
    form = texture.texels.format
    values = raw.view(form.dtype).reshape(len(raw), form.channels)
    if not texture.floats:
        return values.astype(np.uint32)  # extended by its sign if it has one
    if form.kind == "f":
        return values.astype(np.float32)
    most = np.float32((1 << (form.bits - (form.kind == "s"))) - 1)
    return np.maximum(values.astype(np.float32) / most, np.float32(-1))


def padded(values: Array) -> list[Array]:
    """Returns the four channels of values (lanes, channels): those that a texel lacks are 0, alpha is 1."""
    missing = [np.zeros((), values.dtype)] * 3 + [np.ones((), values.dtype)]
    return [values[:, k] if k < values.shape[1] else missing[k] for k in range(4)]
