"""Textures and surfaces: every fetch is the one that the CUDA C++ Programming Guide's formulas give; wrong uses are findings."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cupyflash.sim import ptx
from cupyflash.sim.ptx.memory.texels import BORDER, CLAMP, MIRROR, WRAP
from cupyflash.sim.ptx.state.segments import UNWRITTEN, WRITTEN
from suites import sample

HANDLE, OTHER = 0x1010, 0x1020
WINDOW = 1 << 48
OUT, PLACES, TEXELS = (number * WINDOW + (1 << 39) for number in (1, 2, 3))

FLOAT = ptx.TexelFormat(1, 32, "f")
FORMATS = [
    ptx.TexelFormat(*one)
    for one in ((1, 32, "f"), (4, 32, "f"), (2, 16, "f"), (4, 8, "u"), (1, 8, "s"), (2, 16, "s"), (1, 16, "u"))
]
INTEGERS = [ptx.TexelFormat(*one) for one in ((1, 32, "s"), (4, 32, "u"), (2, 16, "s"), (4, 8, "u"), (1, 8, "s"))]

KERNEL = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 handle, .param .u64 places, .param .u64 out) {{
  .reg .b64 %rd<8>; .reg .b32 %r<16>; .reg .b16 %rs<4>; .reg .f32 %f<8>; .reg .pred %p<4>;
  ld.param.u64 %rd1, [handle]; ld.param.u64 %rd2, [places]; ld.param.u64 %rd3, [out];
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mad.lo.s32 %r1, %r1, %r2, %r3;
  mul.wide.s32 %rd4, %r1, 16; add.s64 %rd2, %rd2, %rd4; add.s64 %rd3, %rd3, %rd4;
  ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd2];
  mov.b32 %f1, %r4; mov.b32 %f2, %r5; mov.b32 %f3, %r6; mov.b32 %f4, %r7;
  {body}
  ret;
}}
"""
PUT = "st.global.v4.b32 [%rd3], {%r8, %r9, %r10, %r11};"
PLACE = {
    "1d": "{%f1}",
    "2d": "{%f1, %f2}",
    "3d": "{%f1, %f2, %f3, %f3}",
    "a1d": "{%r7, %f1}",
    "a2d": "{%r7, %f1, %f2, %f2}",
    "cube": "{%f1, %f2, %f3, %f3}",
    "acube": "{%r7, %f1, %f2, %f3}",
}


def launched(
    body: str,
    shown: ptx.Texture | ptx.Texels,
    memory: np.ndarray,
    places: np.ndarray,
    *,
    state: np.ndarray | None = None,
    handle: int = HANDLE,
    block: int | None = None,
) -> tuple[np.ndarray, ptx.Launch]:
    """Runs a kernel of this body, a thread for each row of `places`; returns the four words of each thread, and the launch."""
    out = np.zeros((len(places), 4), np.uint32)
    places = np.ascontiguousarray(places).view(np.uint8).reshape(-1)
    raw = memory.view(np.uint8).reshape(-1)
    state = np.full(raw.size, WRITTEN, np.uint8) if state is None else state
    allocations = [
        ptx.Allocation("out", out.view(np.uint8).reshape(-1), OUT),
        ptx.Allocation("places", places, PLACES),
        ptx.Allocation("texels", raw, TEXELS, state),
    ]
    arguments = ptx.RawArguments(struct.pack("<3Q", handle, PLACES, OUT), allocations, {HANDLE: shown})
    block = block or len(out)
    return out, ptx.Module.from_ptx(KERNEL.format(body=body)).launch("k", len(out) // block, block, arguments)


def texels_of(shape: tuple[int, ...], form: ptx.TexelFormat, geometry: str, layers: int = 1) -> ptx.Texels:
    width, height, depth = (*shape, 1, 1)[:3]
    return ptx.Texels(TEXELS, form, geometry, (width, height, depth), width * form.size, width * height * form.size, layers)


def contents(texels: ptx.Texels, random: np.random.Generator) -> np.ndarray:
    """Returns random texels (layers or slices, rows, columns, channels)."""
    form, (width, height, depth) = texels.format, texels.shape
    shape = (max(texels.layers, depth), height, width, form.channels)
    if form.kind == "f":
        return random.normal(size=shape).astype(form.dtype)
    return random.integers(0, 1 << form.bits, shape, np.uint64).astype(f"u{form.bits // 8}").view(form.dtype)


# -- the guide's formulas, a lane at a time ----------------------------------------------------------------------------------


def read(texture: ptx.Texture, values: np.ndarray, index: Sequence[int], layer: int) -> np.ndarray:
    """Returns one texel, wherever its numbers (x, y, z) are, as the four channels of a fetch."""
    form, at = texture.texels.format, []
    for i, n, mode in zip(index, texture.texels.shape, texture.modes, strict=False):
        if mode in (WRAP, MIRROR) and not texture.normalized:
            mode = CLAMP
        if mode == BORDER and not 0 <= i < n:
            return np.array([*texture.border[: form.channels], *(0, 0, 0, 1)[form.channels :]], np.float64)
        turn = math.floor(i / n)
        wrapped = i - turn * n
        at.append({WRAP: wrapped, MIRROR: n - 1 - wrapped if turn % 2 else wrapped}.get(mode, min(max(i, 0), n - 1)))
    x, y, z = (*at, 0, 0)[:3]
    found = values[z if len(at) == 3 else layer, y, x].astype(np.float64)
    if form.kind != "f" and texture.as_float:
        found = np.maximum(found / ((1 << (form.bits - (form.kind == "s"))) - 1), -1)
    return np.array([*found, *(0, 0, 0, 1)[len(found) :]])


def fetch(texture: ptx.Texture, values: np.ndarray, place: Sequence[float], layer: int) -> np.ndarray:
    sizes = texture.texels.shape[: len(place)]
    x = [np.float32(c) * np.float32(n) if texture.normalized else np.float32(c) for c, n in zip(place, sizes, strict=True)]
    if not texture.filtered:
        return read(texture, values, [math.floor(c) for c in x], layer)
    low = [math.floor(c - np.float32(0.5)) for c in x]
    weight = [math.floor((float(c - np.float32(0.5)) - i) * 256 + 0.5) / 256 for c, i in zip(x, low, strict=True)]
    total = np.zeros(4)
    for corner in product((0, 1), repeat=len(x)):
        share = math.prod(w if k else 1 - w for k, w in zip(corner, weight, strict=True))
        if len(x) == 2:  # as an H100 has it: both weights' product has 8 bits, and along each axis the weights are as they were
            last = math.floor(weight[0] * weight[1] * 256 + 0.5) / 256
            share = [1 - sum(weight) + last, weight[1] - last, weight[0] - last, last][2 * corner[0] + corner[1]]
        if share:
            total += share * read(texture, values, [i + k for i, k in zip(low, corner, strict=True)], layer)
    return total


FACE = [("z", -1, "y", -1), ("z", 1, "y", -1), ("x", 1, "z", 1), ("x", 1, "z", -1), ("x", 1, "y", -1), ("x", -1, "y", -1)]
"""The table of the guide's "Cubemap Textures": s and t of each face, with their signs."""


def on_face(place: Sequence[float]) -> tuple[int, float, float]:
    """Returns (face, x, y) of a direction."""
    axis = max(range(3), key=lambda k: (abs(place[k]), k))
    number = 2 * axis + (place[axis] < 0)
    s, s_sign, t, t_sign = FACE[number]
    one = np.float32(1)
    large = np.float32(abs(place[axis]))
    x, y = (np.float32(sign * place["xyz".index(name)]) / large for name, sign in ((s, s_sign), (t, t_sign)))
    return number, (x + one) / np.float32(2), (y + one) / np.float32(2)


# -- fetches ---------------------------------------------------------------------------------------------------------------

SHAPES = {"1d": (7,), "2d": (7, 5), "3d": (5, 4, 3), "a1d": (7,), "a2d": (6, 5), "cube": (4, 4), "acube": (4, 4)}


@pytest.mark.parametrize("seed", sample(range(8), range(3)))
@pytest.mark.parametrize("geometry", SHAPES)
def test_a_fetch_is_that_of_the_guide(geometry: str, seed: int) -> None:
    random = np.random.default_rng([seed, *geometry.encode()])
    cube, layered = geometry.endswith("cube"), geometry.startswith("a")
    layers = (6 if cube else 1) * (3 if layered else 1)
    texels = texels_of(SHAPES[geometry], FORMATS[random.integers(len(FORMATS))], geometry, layers)
    modes = tuple(int(one) for one in random.integers(0, 4, 3))
    border = tuple(float(one) for one in random.normal(size=4).astype(np.float32))
    normalized = cube or bool(random.integers(2))
    texture = ptx.Texture(texels, modes, bool(seed % 2), normalized, True, border)
    values = contents(texels, random)
    if texels.format.kind == "s":
        values.flat[::3] = np.iinfo(values.dtype).min  # as a fraction it is -1, too
    places = random.uniform(-2, 3, (64, 4)).astype(np.float32)
    if cube:  # directions to edges and corners
        places[:27, :3] = [*product((-1, 0, 1), repeat=3)]
        places[13] = 1
    if not normalized:
        places *= np.float32(4)
    if geometry == "2d":  # places between texels and in their middles, where weights are 0 and 1/2
        places[:16] = np.round(places[:16] * 2) / 2
    layer = random.integers(0, 5, 64)
    if layered:
        places[:, 3] = layer.astype(np.uint32).view(np.float32)
    form = "%f5, %f6, %f7, %f0"
    body = f"tex.{geometry}.v4.f32.f32 {{{form}}}, [%rd1, {PLACE[geometry]}]; st.global.v4.f32 [%rd3], {{{form}}};"
    out, launch = launched(body, texture, values, places)
    assert not launch.findings
    for lane, place in enumerate(places):
        here, at = [float(one) for one in place[: len(SHAPES[geometry])]], min(int(layer[lane]), 2) if layered else 0
        if cube:
            number, *here = on_face([float(one) for one in place[:3]])
            at = 6 * at + number
        wanted = fetch(texture, values, here, at)
        np.testing.assert_allclose(out[lane].view(np.float32), wanted, rtol=2e-6, atol=2e-6 * np.abs(values.astype(float)).max())


@pytest.mark.parametrize("form", INTEGERS)
@pytest.mark.parametrize("mode", [CLAMP, BORDER])
def test_integers_are_extended_and_a_border_has_their_bits(form: ptx.TexelFormat, mode: int) -> None:
    random = np.random.default_rng(3)
    texels = texels_of((5, 4), form, "2d")
    color = np.array([7, -1, 9, 11], np.int32)
    texture = ptx.Texture(texels, (mode, mode, mode), border=tuple(color.view(np.float32).tolist()))
    values = contents(texels, random)
    places = random.uniform(-2, 7, (32, 4)).astype(np.float32)
    of = "s32" if form.kind == "s" else "u32"
    out, launch = launched(f"tex.2d.v4.{of}.f32 {{%r8, %r9, %r10, %r11}}, [%rd1, {{%f1, %f2}}]; {PUT}", texture, values, places)
    assert not launch.findings
    for lane, (x, y) in enumerate(np.floor(places[:, :2]).astype(int)):
        inside = 0 <= x < 5 and 0 <= y < 4
        found = color[: form.channels] if mode == BORDER and not inside else values[0, np.clip(y, 0, 3), np.clip(x, 0, 4)]
        wanted = [*(int(one) & 0xFFFFFFFF for one in found), *(0, 0, 0, 1)[form.channels :]]
        assert out[lane].tolist() == wanted


def test_linear_memory_is_read_by_number_and_0_outside() -> None:
    texels = replace(texels_of((10,), FLOAT, "1d"), linear=True)
    values = np.arange(1, 11, dtype=np.float32)
    numbers = np.arange(-3, 13, dtype=np.int32)
    places = np.repeat(numbers[:, None], 4, axis=1)
    body = "tex.1d.v4.f32.s32 {%f5, %f6, %f7, %f0}, [%rd1, {%r4}]; st.global.f32 [%rd3], %f5;"
    out, launch = launched(body, ptx.Texture(texels, (WRAP, WRAP, WRAP), True), values, places)
    assert not launch.findings
    assert out[:, 0].view(np.float32).tolist() == [float(n + 1) if 0 <= n < 10 else 0 for n in numbers]


@pytest.mark.parametrize("channel", range(4))
def test_a_gather_reads_the_four_texels_of_linear_filtering(channel: int) -> None:
    random = np.random.default_rng(channel)
    texels = texels_of((6, 5), ptx.TexelFormat(4, 32, "f"), "2d")
    values, places = contents(texels, random), random.uniform(-1, 7, (32, 4)).astype(np.float32)
    form = "%f5, %f6, %f7, %f0"
    body = f"tld4.{'rgba'[channel]}.2d.v4.f32.f32 {{{form}}}, [%rd1, {{%f1, %f2}}]; st.global.v4.f32 [%rd3], {{{form}}};"
    out, _ = launched(body, ptx.Texture(texels), values, places)
    for lane, place in enumerate(places):
        i, j = (math.floor(float(c) - 0.5) for c in place[:2])
        four = ((i, j + 1), (i + 1, j + 1), (i + 1, j), (i, j))
        assert out[lane].view(np.float32).tolist() == [values[0, np.clip(y, 0, 4), np.clip(x, 0, 5), channel] for x, y in four]


@pytest.mark.parametrize(
    ("filtered", "places", "reads", "unique"),
    [(False, [1.5, 1.5], 1, 1), (True, [1.75, 1.75], 4, 4), (True, [1.5, 1.5], 4, 1), (True, [-5, 1.75], 4, 2)],
)
def test_a_fetch_requests_its_texels(filtered: bool, places: list[float], reads: int, unique: int) -> None:
    """All lanes of two warps at one place: a texel without weight counts as its neighbour."""
    texels = texels_of((8, 8), FLOAT, "2d")
    body = "tex.2d.v4.f32.f32 {%f5, _, _, _}, [%rd1, {%f1, %f2}]; st.global.f32 [%rd3], %f5;"
    where = np.tile(np.array([*places, 0, 0], np.float32), (64, 1))
    _, launch = launched(body, ptx.Texture(texels, filtered=filtered), np.zeros((8, 8), np.float32), where)
    moved = launch.traffic["texels"]
    assert (moved.read_bytes, moved.unique_read_bytes, moved.read_requests) == (64 * 4 * reads, 2 * 4 * unique, 2)
    assert launch.counters.by_class["texture"] == 2


def test_queries_and_a_level_that_is_ignored() -> None:
    texture = ptx.Texture(texels_of((8, 3), FLOAT, "a2d", 5), normalized=True)
    asked = "width", "height", "array_size", "normalized_coords"
    body = "\n".join(f"txq.{name}.b32 %r{8 + k}, [%rd1];" for k, name in enumerate(asked))
    assert launched(body + PUT, texture, np.zeros(1, np.float32), np.zeros((1, 4), np.float32))[0].tolist() == [[8, 3, 5, 1]]
    body = "tex.level.2d.v4.f32.f32 {%f5, _, _, _}|%p1, [%rd1, {%f1, %f2}], %f3; selp.f32 %f5, %f5, 0f00000000, %p1;"
    values = np.arange(12, dtype=np.float32)
    place = np.array([[2.5, 1.5, 3.0, 0]], np.float32)
    out, _ = launched(body + "st.global.f32 [%rd3], %f5;", ptx.Texture(texels_of((4, 3), FLOAT, "2d")), values, place)
    assert out[0, 0].view(np.float32) == 6


# -- surfaces --------------------------------------------------------------------------------------------------------------

VECTORS = {
    "b8": ("{%rs1}", 1),
    "b16": ("{%rs1}", 2),
    "b32": ("{%r8}", 4),
    "v2.b32": ("{%r8, %r9}", 8),
    "v4.b32": ("{%r8, %r9, %r10, %r11}", 16),
}


@pytest.mark.parametrize("width", VECTORS)
@pytest.mark.parametrize("clamp", ["clamp", "zero", "trap"])
def test_surfaces_are_read_and_written_by_bytes(width: str, clamp: str) -> None:
    registers, size = VECTORS[width]
    texels = texels_of((4, 5), ptx.TexelFormat(size // 4 if size > 4 else 1, min(8 * size, 32), "u"), "a2d", 2)
    random = np.random.default_rng(size)
    memory = random.integers(0, 256, 4 * 5 * 2 * size, np.uint64).astype(np.uint8)
    places = random.integers(-1, 6, (40, 4)).astype(np.int32)
    places[:, 0] *= size
    place = "{%r7, %r4, %r5, %r5}"
    zero = "".join(f"mov.b32 %r{k}, 0; " for k in range(8, 12))
    body = f"{zero} suld.b.a2d.{width}.{clamp} {registers}, [%rd1, {place}];"
    body += "cvt.u32.u16 %r8, %rs1;" if size < 4 else ""
    out, launch = launched(body + PUT, texels, memory, places)
    rows = memory.reshape(2, 5, 4, size)
    bad = 0
    for lane, (x, y, _, layer) in enumerate(places):
        x //= size
        inside = 0 <= x < 4 and 0 <= y < 5 and 0 <= layer < 2
        bad += not inside
        found = (
            rows[0 if layer == 0 else 1, np.clip(y, 0, 4), np.clip(x, 0, 3)]
            if inside or clamp == "clamp"
            else np.zeros(size, np.uint8)
        )
        assert out[lane].tobytes()[:size] == found.tobytes()
    assert [one.kind for one in launch.findings] == ["out of bounds"] * (clamp == "trap")
    assert not launch.findings or launch.findings[0].lanes == bad
    # Each thread writes its number to a place of its own, or outside.
    mine = np.array([[4 * (k % 4) * size // 4, k // 4 % 5, 0, k // 20] for k in range(40)] + [[0, -1, 0, 0]], np.int32)
    written = np.zeros_like(memory)
    number = "".join(f"mov.b32 %r{k}, %r1; " for k in range(8, 12)) + "cvt.u16.u32 %rs1, %r1;"
    body = f"{number} sust.b.a2d.{width}.{clamp} [%rd1, {place}], {registers};"
    _, launch = launched(body, texels, written, mine[: 40 if clamp == "clamp" else 41])
    numbers = np.repeat(np.arange(40, dtype=f"u{min(size, 4)}"), max(1, size // 4))
    assert written.tobytes() == numbers.tobytes()
    assert [one.kind for one in launch.findings] == ["out of bounds"] * (clamp == "trap")
    assert launch.traffic["texels"].write_bytes == 40 * size


@pytest.mark.parametrize(
    ("x", "kind", "message"),
    [
        (8, "out of bounds", "at (8, 0), x in bytes: outside of 'texels', which has 3 x 2 texels of 4 bytes"),
        (4, "misaligned", "8 bytes"),
    ],
)
def test_a_surface_access_is_all_inside_and_aligned(x: int, kind: str, message: str) -> None:
    body = "sust.b.2d.v2.b32.trap [%rd1, {%r4, %r5}], {%r1, %r1};"
    _, launch = launched(body, texels_of((3, 2), FLOAT, "2d"), np.zeros(6, np.float32), np.array([[x, 0, 0, 0]], np.int32))
    (finding,) = launch.findings
    assert finding.kind == kind and message in finding.message


# -- faults ----------------------------------------------------------------------------------------------------------------

FETCH = "tex.2d.v4.f32.f32 {%f5, _, _, _}, [%rd1, {%f1, %f2}]; st.global.f32 [%rd3], %f5;"
STORE = "sust.b.2d.b32.trap [%rd1, {%r4, %r5}], {%r1};"
HERE = np.tile(np.array([1.5, 1.5, 0, 0], np.float32), (64, 1))


@pytest.mark.parametrize(
    ("body", "shown", "handle", "message"),
    [
        (FETCH, ptx.Texture(texels_of((8, 8), FLOAT, "2d")), OTHER, "0x1020 is the handle of no texture"),
        (FETCH, texels_of((8, 8), FLOAT, "2d"), HANDLE, "is the handle of no texture"),
        (FETCH, ptx.Texture(texels_of((8, 8), FLOAT, "a2d", 2)), HANDLE, "a texture of a2d, not 2d"),
        (FETCH, ptx.Texture(texels_of((8, 8), ptx.TexelFormat(4, 8, "u"), "2d")), HANDLE, "reads floats of a texture of integers"),
        (STORE, ptx.Texture(texels_of((8, 8), FLOAT, "2d")), HANDLE, "is the handle of no surface"),
        (STORE, texels_of((8, 8), FLOAT, "3d"), HANDLE, "a surface of 3d, not 2d"),
    ],
)
def test_a_wrong_handle_is_a_finding(body: str, shown: ptx.Texture | ptx.Texels, handle: int, message: str) -> None:
    _, launch = launched(body, shown, np.zeros((8, 8), np.float32), HERE, handle=handle)
    (finding,) = launch.findings
    assert finding.kind == "bad texture" and message in finding.message and finding.lanes == 64


def test_texels_that_nobody_wrote_and_freed_ones_are_findings() -> None:
    texture, values = ptx.Texture(texels_of((8, 8), FLOAT, "2d"), filtered=True), np.zeros((8, 8), np.float32)
    state = np.full((8, 8, 4), WRITTEN, np.uint8)
    state[1, 2] = UNWRITTEN
    _, launch = launched(FETCH, texture, values, HERE, state=state.reshape(-1))
    assert not launch.findings  # the texel next to it has no weight
    mixed = HERE.copy()
    mixed[::2, 1] += np.float32(2.25)  # other lanes read two rows, far from there
    assert not launched(FETCH, texture, values, mixed, state=state.reshape(-1))[1].findings
    _, launch = launched(FETCH, texture, values, HERE + np.float32(0.25), state=state.reshape(-1))
    (finding,) = launch.findings
    assert finding.kind == "uninitialised" and "offset 40 of 'texels'" in finding.message
    gone = replace(texture, texels=replace(texture.texels, address=TEXELS + WINDOW))
    (finding,) = launched(FETCH, gone, values, HERE)[1].findings
    assert finding.kind == "out of bounds" and "belongs to no tensor" in finding.message


def test_a_surface_that_two_blocks_write_is_a_race_and_a_read_of_what_the_launch_wrote_is_stale() -> None:
    surface, memory = texels_of((8, 8), FLOAT, "2d"), np.zeros((8, 8), np.float32)
    places = np.zeros((64, 4), np.int32)
    places[:, 0] = np.arange(64) % 8 * 4
    places[:, 1] = np.arange(64) // 8
    assert not launched(STORE, surface, memory, places, block=32)[1].findings
    places[:, 1] %= 4
    (finding,) = launched(STORE, surface, memory, places, block=32)[1].findings
    assert finding.kind == "race" and "'texels'" in finding.message
    places[:, 1] = np.arange(64) // 8
    load = "suld.b.2d.b32.trap {%r8}, [%rd1, {%r4, %r5}]; st.global.b32 [%rd3], %r8;"
    (finding,) = launched(STORE + load, surface, memory, places, block=32)[1].findings
    assert (finding.kind, finding.severity) == ("proxy", "warning")


# -- arguments of a launch ---------------------------------------------------------------------------------------------------

COPY = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .align 8 .b8 both[16]) {
  .reg .b64 %rd<3>; .reg .b32 %r<4>; .reg .f32 %f<6>;
  ld.param.u64 %rd1, [both]; ld.param.u64 %rd2, [both+8];
  mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; cvt.rn.f32.u32 %f1, %r1; cvt.rn.f32.u32 %f2, %r2;
  tex.2d.v4.f32.f32 {%f3, %f4, _, _}, [%rd1, {%f1, %f2}];
  shl.b32 %r3, %r1, 3;
  sust.b.2d.v2.b32.trap [%rd2, {%r3, %r2}], {%f3, %f4};
  ret;
}
"""


def test_arrays_are_arguments_as_textures_and_surfaces() -> None:
    image, out = np.random.default_rng(0).normal(size=(2, 3, 5, 2)).astype(np.float32)
    both = {"image": ptx.Texture(ptx.Texels.of(image, "2d")), "out": ptx.Texels.of(out, "2d")}
    launch = ptx.Module.from_ptx(COPY).launch("k", 1, (5, 3), {"both": both})
    assert not launch.findings and np.array_equal(image, out)
    assert (launch.traffic["image"].read_bytes, launch.traffic["out"].write_bytes) == (image.nbytes, out.nbytes)
    launch = ptx.Module.from_ptx(COPY).launch("k", 1, (5, 4), {"both": both})
    assert "outside of 'out', which has 5 x 3 texels" in launch.findings[0].message


@pytest.mark.parametrize(
    ("array", "geometry", "message"),
    [
        (np.zeros((2, 2)), "2d", "got float64"),
        (np.zeros((4, 4), np.float32)[:, ::2], "2d", "contiguous"),
        (np.zeros((4, 4, 3), np.float32), "2d", "of 1, 2 or 4 channels"),
        (np.zeros((5, 4, 4), np.float32), "cube", "6 square faces"),
        (np.zeros(4, np.float32), "4d", "geometry must be one of"),
    ],
)
def test_an_array_that_has_no_texels_is_refused(array: np.ndarray, geometry: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ptx.Texels.of(array, geometry)


def test_texels_of_no_array_are_no_argument() -> None:
    with pytest.raises(TypeError, match="a texture of no array"):
        ptx.Module.from_ptx(COPY).launch("k", 1, 1, {"both": {"image": ptx.Texture(texels_of((4, 4), FLOAT, "2d")), "out": None}})
