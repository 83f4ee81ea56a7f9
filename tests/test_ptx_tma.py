"""Tensor maps and bulk tensor copies against a plain NumPy definition; what is wrong with them is found, under every seed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_ptx_harness import run

from cupyflash.sim.ptx import Launch, Module, TensorMap, UnsupportedPTX
from cupyflash.sim.ptx.memory.tensormap import ADDRESS_AT, decode

SEEDS = [None, 0, 1, 2]

HEAD = ".version 8.6\n.target sm_90a\n.address_size 64\n"
REGISTERS = """.shared .align 1024 .b8 t[8192]; .shared .align 8 .b64 bar; .reg .b64 %rd<20>; .reg .b32 %r<30>; .reg .b16 %h<4>;
.reg .pred %p<4>; .reg .v4 .b32 %unused;"""
REGISTERS = REGISTERS.replace("\n.reg .pred %p<4>; .reg .v4 .b32 %unused;", "\n.reg .pred %p<4>;")
START = """mov.u32 %r0, %tid.x; mov.u32 %r1, t; mov.u32 %r2, bar; mov.u64 %rd1, m; setp.eq.u32 %p1, %r0, 0;"""
INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r2], 1; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;"
WAIT = "W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra W;"
OUT = """ld.param.u64 %rd5, [y]; mov.u32 %r10, %ctaid.x; mad.lo.u32 %r10, %r10, NBYTES, 0; cvt.u64.u32 %rd6, %r10; add.u64 %rd5, %rd5, %rd6;
shl.b32 %r11, %r0, 2; L: setp.ge.u32 %p3, %r11, NBYTES; @%p3 bra E; add.u32 %r12, %r1, %r11; ld.shared.u32 %r13, [%r12];
cvt.u64.u32 %rd6, %r11; add.u64 %rd6, %rd5, %rd6; st.global.u32 [%rd6], %r13; add.u32 %r11, %r11, 256; bra L; E:"""


def program(body: str, params: str = ".param .align 64 .b8 m[128], .param .u64 y", size: int = 0) -> str:
    """A kernel with a tile t of shared memory, an mbarrier bar, and a tensor map m; %p1 is thread 0."""
    return f"{HEAD}.visible .entry k({params})\n{{\n{REGISTERS}\n{START}\n{body.replace('NBYTES', str(size))}\nret;\n}}\n"


def load(rank: int, coordinates: str, size: int, space: str = "shared::cluster", more: str = "") -> str:
    return f"""@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {size};
    @%p1 cp.async.bulk.tensor.{rank}d.{space}.global.tile.mbarrier::complete_tx::bytes{more} [%r1], [%rd1, {{{coordinates}}}], [%r2];"""


# -- the definition -----------------------------------------------------------------------------------------------------


def elements(tensor: TensorMap) -> np.ndarray:
    """The tensor of a map as an array, outermost dimension first."""
    d = tensor.description
    dtype = {"bfloat16": "u2", "float32_ftz": "u4", "tfloat32": "u4", "tfloat32_ftz": "u4"}.get(d.dtype, d.dtype)
    flat = tensor.array.reshape(-1).view(dtype) if tensor.array.flags.c_contiguous else tensor.array
    strides = (*d.strides[::-1], np.dtype(dtype).itemsize)
    return np.lib.stride_tricks.as_strided(flat, d.dims[::-1], strides)


def boxed(tensor: TensorMap, coordinates: tuple[int, ...]) -> list[tuple[int, ...] | None]:
    """The index of each element of a box in the order of shared memory, None for those outside."""
    d = tensor.description
    steps = (1, *d.element_strides[1:])
    counts = [d.box[0], *(-(-box // step) for box, step in zip(d.box[1:], steps[1:], strict=True))]
    out: list[tuple[int, ...] | None] = []
    for at in itertools.product(*(range(n) for n in counts[::-1])):
        index = tuple(c + k * s for c, k, s in zip(coordinates[::-1], at, steps[::-1], strict=True))
        inside = all(0 <= k < n for k, n in zip(index, d.dims[::-1], strict=True))
        out.append(index if inside else None)
    return out


def loaded(tensor: TensorMap, coordinates: tuple[int, ...]) -> np.ndarray:
    """The bytes of shared memory, which begin where the swizzle's pattern does; 0xFF where nothing is written."""
    source, swizzle = elements(tensor), tensor.description.swizzle
    fill = {2: 0x7FFF, 4: 0x7FFFFFFF, 8: (1 << 63) - 1}.get(source.itemsize, 0) if tensor.description.fill == "nan" else 0
    raw = source.view(f"u{source.itemsize}") if source.dtype.kind == "f" else source
    data = np.array([fill if i is None else raw[i] for i in boxed(tensor, coordinates)], raw.dtype).view(np.uint8)
    out = np.full(-(-len(data) // 1024) * 1024, 0xFF, np.uint8)
    for at in range(0, len(data), 16):
        bits = {0: 0, 32: at >> 7 & 1, 64: at >> 7 & 3, 128: at >> 7 & 7}[swizzle]
        to = at ^ bits << 4
        out[to : to + 16] = data[at : at + 16]
    return out


def random_map(rng: np.random.Generator, **fixed: Any) -> TensorMap:
    """A map of random rank, sizes, padding, element strides and swizzle; its tile has at most 4 KB."""
    rank = fixed.get("rank") or int(rng.integers(1, 6))
    dtype = fixed.get("dtype") or str(rng.choice(["uint8", "float16", "int32", "float32", "float64", "uint64"]))
    size = np.dtype(dtype).itemsize
    swizzle = int(rng.choice([0, 32, 64, 128]))
    inner = 16 // size * int(rng.integers(1, (swizzle or 128) // 16 + 1))
    dims = [int(rng.integers(1, 2 * inner + 2)), *(int(n) for n in rng.integers(1, 9, rank - 1))]
    steps = [int(rng.integers(1, 9)), *(int(n) for n in rng.integers(1, 4, rank - 1))]
    counts = [int(n) for n in rng.integers(1, 5, rank - 1)]
    while inner * size * int(np.prod(counts, initial=1)) > 4096:
        counts[int(np.argmax(counts))] -= 1
    box = [inner, *(n * s - int(rng.integers(0, s)) for n, s in zip(counts, steps[1:], strict=True))]
    strides, at = [], dims[0] * size
    for n in dims[1:]:
        at = -(-at // 16) * 16 + 16 * int(rng.integers(0, 3))
        strides.append(at)
        at *= n
    array = rng.integers(0, 200, max(at, 16), dtype=np.uint8)
    return TensorMap(array, box, dims=dims, strides=strides, dtype=dtype, element_strides=steps, swizzle=swizzle)


# -- loads and stores against the definition ----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_boxes_are_what_the_definition_says(rank: int) -> None:
    """Loads at coordinates inside, across every border and outside; bytes count in bounds, the mbarrier all of them."""
    names = ", ".join(f"%r{20 + k}" for k in range(rank))
    read = " ".join(f"ld.param.u32 %r{20 + k}, [c{k}];" for k in range(rank))
    params = ".param .align 64 .b8 m[128], .param .u64 y, " + ", ".join(f".param .u32 c{k}" for k in range(rank)) + ", .param .u32 n"
    body = f"""{read} ld.param.u32 %r25, [n]; {INIT} @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], %r25;
    @%p1 cp.async.bulk.tensor.{rank}d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {{{names}}}], [%r2]; {WAIT}
    @!%p1 bra DONE; add.u32 %r26, %r25, 1023; and.b32 %r26, %r26, 0xFFFFFC00;
    ld.param.u64 %rd5, [y]; mov.u32 %r27, 0; L: add.u32 %r12, %r1, %r27; ld.shared.v2.u64 {{%rd6, %rd7}}, [%r12]; cvt.u64.u32 %rd8, %r27;
    add.u64 %rd8, %rd5, %rd8; st.global.v2.u64 [%rd8], {{%rd6, %rd7}}; add.u32 %r27, %r27, 16; setp.lt.u32 %p3, %r27, %r26; @%p3 bra L; DONE:"""
    module = Module.from_ptx(program(body, params))
    rng = np.random.default_rng(rank)
    for case in range(12):
        tensor = random_map(rng, rank=rank)
        d = tensor.description
        coordinates = tuple(int(rng.integers(-b, n + 2)) if case % 3 else 0 for b, n in zip(d.box, d.dims, strict=True))
        y = np.zeros(8192, np.uint8)
        args = {"x": tensor, "y": y, **dict(zip("abcde", coordinates, strict=False)), "n": d.size}
        launch = module.launch("k", 1, 64, args, seed=None if case % 2 else case, races=bool(case % 4))
        expected = loaded(tensor, coordinates)
        assert {f.kind for f in launch.findings} <= {"uninitialised"}, (case, launch.findings)
        assert (y[: len(expected)] == expected).all(), (case, tensor, coordinates)
        inside = [i for i in boxed(tensor, coordinates) if i is not None]
        traffic = launch.traffic["x"]
        assert (traffic.read_bytes, traffic.read_requests) == (len(inside) * d.element, 1)
        start = int(tensor.array.ctypes.data) & 0
        at = {start + sum(k * s for k, s in zip(i, (*d.strides[::-1], d.element), strict=True)) // 32 for i in inside}
        assert traffic.read_sectors == len(at)


OPS: dict[str, tuple[str, Any]] = {
    "": ("float32", lambda old, new: new),
    "add": ("float32", lambda old, new: old + new),
    "min": ("int32", np.minimum),
    "max": ("uint64", np.maximum),
    "inc": ("uint32", lambda old, new: np.where(old >= new, 0, old + 1)),
    "dec": ("uint32", lambda old, new: np.where((old == 0) | (old > new), new, old - 1)),
    "and": ("int32", np.bitwise_and),
    "or": ("uint64", np.bitwise_or),
    "xor": ("uint32", np.bitwise_xor),
}


@pytest.mark.parametrize("op", OPS)
def test_stores_and_reductions_touch_what_is_in_bounds(op: str) -> None:
    """The tile comes from a load of another map with the same box, so that both ways go by the same swizzle."""
    dtype, fn = OPS[op]
    rng = np.random.default_rng(sum(map(ord, op)))
    what = f"cp.reduce.async.bulk.tensor.3d.global.shared::cta.{op}.tile" if op else "cp.async.bulk.tensor.3d.global.shared::cta"
    params = ".param .align 64 .b8 m[128], .param .align 64 .b8 o[128], .param .u32 c0, .param .u32 c1, .param .u32 c2, .param .u32 n"
    body = f"""ld.param.u32 %r20, [c0]; ld.param.u32 %r21, [c1]; ld.param.u32 %r22, [c2]; ld.param.u32 %r25, [n]; {INIT} @!%p1 bra DONE;
    mov.u64 %rd2, o; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], %r25;
    cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {{0, 0, 0}}], [%r2]; {WAIT}
    {what}.bulk_group [%rd2, {{%r20, %r21, %r22}}], [%r1]; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; DONE:"""
    module = Module.from_ptx(program(body, params))
    for case in range(6):
        tensor = random_map(rng, rank=3, dtype=dtype)
        d = tensor.description
        if dtype == "float32":
            tensor.array.view(np.float32)[:] = rng.standard_normal(tensor.array.size // 4)
        other = TensorMap(
            tensor.array[::-1].copy() if dtype != "float32" else tensor.array.view(np.float32)[::-1].copy().view(np.uint8),
            d.box,
            dims=d.dims,
            strides=d.strides,
            dtype=dtype,
            element_strides=d.element_strides,
            swizzle=d.swizzle,
        )
        coordinates = tuple(int(rng.integers(-2, n)) for n in d.dims)
        expected = TensorMap(other.array.copy(), d.box, dims=d.dims, strides=d.strides, dtype=dtype)
        into, source, old = elements(expected), elements(tensor), elements(other).copy()
        for from_, to in zip(boxed(tensor, (0, 0, 0)), boxed(tensor, coordinates), strict=True):
            if to is not None:
                into[to] = fn(old[to], source[from_] if from_ is not None else old.dtype.type(0))
        args = {"x": tensor, "o": other, **dict(zip("abc", coordinates, strict=True)), "n": d.size}
        launch = module.launch("k", 1, 32, args, seed=None if case % 2 else case)
        assert launch.findings == ()
        assert (other.array == expected.array).all(), (case, tensor, coordinates)
        count = sum(i is not None for i in boxed(tensor, coordinates))
        assert launch.traffic["o"].write_bytes == count * d.element and launch.traffic["o"].read_bytes == 0


# -- faults ---------------------------------------------------------------------------------------------------------------

PIPE = f"""{START}
ld.param.u64 %rd2, [g]; mov.u64 %rd3, o;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p1 prefetch.tensormap [%rd1];
mul.wide.u32 %rd6, %r0, 16; add.u64 %rd7, %rd1, %rd6; add.u64 %rd8, %rd2, %rd6; setp.lt.u32 %p2, %r0, 8;
@%p2 ld.param.v2.u64 {{%rd9, %rd10}}, [%rd7];
@%p2 st.global.v2.u64 [%rd8], {{%rd9, %rd10}};
fence.proxy.tensormap::generic.release.gpu;
bar.sync 0;
fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 2048;
@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {{0, -2}}], [%r2];
W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra W;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 2048;
@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd2, {{0, -2}}], [%r2];
V: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 1; @!%p2 bra V;
shl.b32 %r11, %r0, 2; add.u32 %r12, %r1, %r11; ld.shared.u32 %r13, [%r12]; add.u32 %r13, %r13, 1;
st.shared.u32 [%r12], %r13;
fence.proxy.async.shared::cta;
bar.sync 0;
@!%p1 bra J;
cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd3, {{0, 0}}], [%r1];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
J: bar.sync 0;
st.shared.u32 [%r12], 7;
@!%p1 bra DONE;
cp.async.bulk.wait_group 0;
ld.param.u64 %rd5, [q];
ld.global.u32 %r14, [%rd5];
DONE:
"""
PIPE_PARAMS = ".param .align 64 .b8 m[128], .param .align 64 .b8 o[128], .param .u64 g, .param .u64 q"


def pipe(text: str, *, seed: int | None, **given: Any) -> tuple[Launch, str]:
    """The pipeline with a box of 16 rows of 32 floats: loaded twice, by a map of a parameter and by its copy, changed, stored."""
    whole = f"{HEAD}.visible .entry k({PIPE_PARAMS})\n{{\n{REGISTERS}\n{text}\nret;\n}}\n"
    x, y = np.ones((40, 32), np.float32), np.zeros((16, 32), np.float32)
    maps = {"x": TensorMap(x, (32, 16), swizzle=128), "y": TensorMap(y, (32, 16), swizzle=128)}
    args = {**maps, "g": np.zeros(128, np.uint8), "q": y, **given}
    launch = Module.from_ptx(whole).launch("k", 1, 64, args, seed=seed, max_steps=2000)
    return launch, whole


FAULTS: dict[str, tuple[str, str, str, str, str]] = {
    "destination": ("bytes [%r1], [%rd1", "bytes [%r1+64], [%rd1", "misaligned", "bytes [%r1+64]", "no multiple of 128"),
    "beyond shared memory": ("bytes [%r1], [%rd1", "bytes [%r1+7168], [%rd1", "out of bounds", "[%r1+7168]", "it has 8,200 bytes"),
    "mbarrier misaligned": ("-2}], [%r2];\nW", "-2}], [%r2+4];\nW", "misaligned", "[%r2+4]", "mbarrier at 0x2004"),
    "bytes missing": ("[%r2], 2048;\n@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1",
        "[%r2], 2064;\n@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1",
        "deadlock", "W: mb", "phase 0 (parity 0) of the mbarrier at 0x2000 (bar) that lacks 0 arrivals and 16 bytes"),
    "bytes too many": ("[%r2], 2048;\n@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1",
        "[%r2], 2032;\n@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1",
        "deadlock", "W: mb", "(bar) that lacks 0 arrivals and has 16 bytes too many"),
    "more than a phase counts": ("[%r2], 2048;\n@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1",
        "[%r2], 2048; @%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2], 1048575;\n@%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], 1048575;\n@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1",
        "bad arrival", "1048575;", "would count 1,050,623 bytes"),
    "no fence of the mbarrier": ("@%p1 fence.mbarrier_init.release.cluster;", "", "proxy", "bytes [%r1], [%rd1", "no fence.mbarrier_init"),
    "no release of the map": ("fence.proxy.tensormap::generic.release.gpu;", "", "proxy", "[%rd2, {0", "release, after the store"),
    "no acquire of the map": ("fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;", "", "proxy", "[%rd2, {0", "acquire, before the use"),
    "map stored behind its fences": ("128;\n@%p1 mb", "128; @%p2 st.global.v2.u64 [%rd8], {%rd9, %rd10};\n@%p1 mb", "proxy", "[%rd2, {0",
        "release, after the store"),
    "half a map": ("setp.lt.u32 %p2, %r0, 8;", "setp.lt.u32 %p2, %r0, 5;", "bad tensor map", "[%rd2, {0", "offset 0x0 of 'g' are no tensor map"),
    "another rank": ("2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {0, -2}]",
        "1d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {-2}]", "bad tensor map", "[%rd1, {-2}]", "has 2 dimensions, the instruction 1"),
    "map in shared memory": ("[%rd1, {0, -2}]", "[%rd4, {0, -2}]", "bad tensor map", "[%rd4", "in shared memory"),
    "map of nowhere": ("prefetch.tensormap [%rd1]", "prefetch.tensormap [0]", "null pointer", "prefetch", "address is null"),
    "no wait for the tile": ("V: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 1; @!%p2 bra V;", "", "in flight", "ld.shared.u32", "not been waited"),
    "no fence of the proxy": ("fence.proxy.async.shared::cta;", "", "proxy", "[%rd3, {0, 0}]", "no fence.proxy.async behind it"),
    "tile changed while it is stored": ("cp.async.bulk.wait_group.read 0;", "", "race", "st.shared.u32 [%r12], 7", "not ordered"),
    "read of a tensor that is not yet stored": ("cp.async.bulk.wait_group 0;", "", "race", "ld.global.u32 %r14", "not ordered"),
    "stored beyond the box's tensor": ("[%rd3, {0, 0}]", "[%rd1, {0, 39}]", "", "", ""),
}  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_are_found_where_they_are(seed: int | None) -> None:
    shared = "mov.u64 %rd4, t; cvta.shared.u64 %rd4, %rd4;\n"
    launch, _ = pipe(shared + PIPE, seed=seed)
    assert launch.findings == ()
    for name, (before, after, kind, line, message) in FAULTS.items():
        assert PIPE.count(before) == 1, name
        launch, whole = pipe((shared + PIPE).replace(before, after), seed=seed)
        if not kind:
            assert launch.findings == (), name
            continue
        lines = [number for number, text in enumerate(whole.split("\n"), 1) if line in text]
        hits = [f for f in launch.findings if f.kind == kind and f.ptx_line in lines and message in f.message]
        assert hits, (name, launch.findings)
        follow = {"in flight": {"race"}}.get(kind, {"deadlock"})  # of one cause, or because of it
        assert {f.kind for f in launch.findings} <= {kind} | follow, (name, launch.findings)


CLUSTER = f"""{START}
mov.u32 %r20, %cluster_ctarank; mov.u32 %r21, %ctaid.x; setp.eq.u32 %p3, %r20, 0;
{INIT}
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 2048;
and.pred %p3, %p1, %p3;
mov.u16 %h1, MASK;
@%p3 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%r1], [%rd1, {{0, %r21}}], [%r2], %h1, %rd9;
{WAIT}
{OUT.replace("NBYTES", "2048")}
"""


def multicast(text: str, *, seed: int | None) -> tuple[Launch, np.ndarray, np.ndarray]:
    """Two clusters of four blocks, each of which gets 16 rows of 32 floats from its first block."""
    module = Module.from_ptx(program(text))
    x, y = np.arange(40 * 32, dtype=np.float32).reshape(40, 32), np.zeros((8, 16, 32), np.float32)
    launch = module.launch("k", 8, 64, {"x": TensorMap(x, (32, 16)), "y": y}, cluster=4, seed=seed)
    return launch, x, y


@pytest.mark.parametrize("seed", SEEDS)
def test_a_multicast_brings_all_blocks_the_same(seed: int | None) -> None:
    launch, x, y = multicast(CLUSTER.replace("MASK", "15"), seed=seed)
    assert launch.findings == ()
    assert all((y[block] == x[block // 4 * 4 :][:16]).all() for block in range(8))
    assert (launch.traffic["x"].read_bytes, launch.traffic["x"].read_requests) == (2 * 2048, 2)
    assert launch.counters.shared_kind("cp.async.bulk").bytes == 8 * 2048


@pytest.mark.parametrize("seed", SEEDS)
def test_a_multicast_to_who_is_not_there(seed: int | None) -> None:
    some = CLUSTER.replace("MASK", "13").replace("@%p1 mbarrier.arrive", "setp.ne.u32 %p2, %r20, 1; @!%p2 bra DONE; @%p1 mbarrier.arrive")
    launch, x, y = multicast(some + "DONE:", seed=seed)
    assert launch.findings == () and not y[1].any() and (y[3] == x[:16]).all()
    beyond, _, _ = multicast(CLUSTER.replace("MASK", "31"), seed=seed)
    assert {(f.kind, "the cluster has 4 blocks" in f.message) for f in beyond.findings} == {("out of bounds", True)}
    # Block 3 leaves without waiting: it may be gone when the copy comes.
    gone = CLUSTER.replace("MASK", "15").replace("@%p1 mbarrier.arrive", "setp.eq.u32 %p2, %r20, 3; @%p2 bra E; @%p1 mbarrier.arrive")
    left, _, _ = multicast(gone, seed=seed)
    assert {f.kind for f in left.findings} == {"exited block"}, left.findings
    # Nobody has met: the other blocks may not have begun, their mbarriers not be initialised.
    alone = CLUSTER.replace("MASK", "15").replace("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", "")
    early, _, _ = multicast(alone, seed=seed)
    assert "not begun" in {f.kind for f in early.findings}, early.findings


REMOTE = f"""{START}
mov.u32 %r20, %cluster_ctarank; mov.u32 %r21, %cluster_nctarank; shl.b32 %r11, %r0, 2; add.u32 %r12, %r1, %r11; add.u32 %r13, %r0, %r20;
st.shared.u32 [%r12], %r13; st.shared.u32 [%r12+1024], %r0;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1; fence.mbarrier_init.release.cluster; fence.proxy.async;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
mov.u32 %r24, 0; mapa.shared::cluster.u32 %r22, %r1, TARGET; mapa.shared::cluster.u32 %r23, %r2, TARGET;
@%p1 mbarrier.arrive.expect_tx.relaxed.cluster.shared::cta.b64 _, [%r2], EXPECTED;
@%p1 COPY [%r22+1024], [%r1], 256, [%r23];
{WAIT} ld.shared.u32 %r13, [%r12+1024]; ld.param.u64 %rd5, [m]; mad.lo.u32 %r14, %r20, 64, %r0; mul.wide.u32 %rd6, %r14, 4;
add.u64 %rd6, %rd5, %rd6; st.global.u32 [%rd6], %r13;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_and_reductions_into_other_blocks(seed: int | None) -> None:
    tail = "shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    rank, thread = np.arange(4)[:, None], np.arange(64)
    shift = REMOTE.replace("mov.u32 %r24, 0;", "add.u32 %r24, %r20, 1; and.b32 %r24, %r24, 3;")
    for copy, expected in (
        (f"cp.async.bulk.{tail}", (rank - 1) % 4 + thread),
        (f"cp.reduce.async.bulk.{tail}.add.u32", (rank - 1) % 4 + 2 * thread),
    ):
        text = shift.replace("COPY", copy).replace("TARGET", "%r24").replace("EXPECTED", "256")
        y = np.zeros((4, 64), np.uint32)
        launch = Module.from_ptx(program(text, ".param .u64 m")).launch("k", 4, 64, [y], cluster=4, seed=seed)
        assert launch.findings == () and (y == expected).all(), copy
    # All four into the first block: sums; as copies they race.
    for copy, kinds in ((f"cp.reduce.async.bulk.{tail}.add.u32", set()), (f"cp.async.bulk.{tail}", {"race"})):
        text = REMOTE.replace("COPY", copy).replace("TARGET", "%r24").replace("EXPECTED", "%r25")
        text = text.replace("mov.u32 %r24, 0;", "mov.u32 %r24, 0; setp.eq.u32 %p3, %r20, 0; selp.u32 %r25, 1024, 0, %p3;")
        y = np.zeros((4, 64), np.uint32)
        launch = Module.from_ptx(program(text, ".param .u64 m")).launch("k", 4, 64, [y], cluster=4, seed=seed)
        assert {f.kind for f in launch.findings} == kinds, launch.findings
        assert kinds or (y[0] == 6 + 5 * thread).all() and (y[1:] == thread).all()


# -- maps -----------------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"box": (0, 4)}, "box must be from 1 to 256"),
    ({"box": (8, 257)}, "box must be from 1 to 256"),
    ({"box": (8,)}, "box must have 2 numbers"),
    ({"box": (6, 4)}, "multiple of 16 bytes, got 24"),
    ({"box": (64, 4), "swizzle": 128}, "at most the swizzle's 128 bytes, got 256"),
    ({"box": (16, 4), "swizzle": 32}, "at most the swizzle's 32 bytes, got 64"),
    ({"swizzle": 16}, "swizzle must be one of 0, 32, 64, 128"),
    ({"dtype": "float128"}, "dtype must be one of"),
    ({"dims": (0, 4)}, "dims must be from 1 to 4294967296"),
    ({"dims": (64, (1 << 32) + 1)}, "dims must be from 1"),
    ({"dims": (64, 4), "strides": (264,)}, "multiples of 16 bytes"),
    ({"dims": (64, 4), "strides": (1 << 40,)}, "strides must be from 0 to 1099511627775"),
    ({"dims": (64, 4), "strides": ()}, "strides must have 1 numbers"),
    ({"dims": (1,) * 6, "box": (4,) * 6}, "1 to 5 dimensions"),
    ({"element_strides": (1, 9)}, "element_strides must be from 1 to 8"),
    ({"element_strides": (1, 0)}, "element_strides must be from 1 to 8"),
    ({"fill": "ones"}, "fill must be one of"),
    ({"fill": "nan", "dtype": "int32"}, "fill='nan' needs a floating-point dtype"),
    ({"l2_promotion": 32}, "l2_promotion must be one of"),
    ({"interleave": 16}, "3 to 5 dimensions with interleave"),
    ({"interleave": 32, "dims": (8, 4, 4), "box": (8, 4, 4), "strides": (48, 192)}, "multiples of 32 bytes"),
    ({"interleave": 32, "dims": (8, 4, 4), "box": (8, 4, 4)}, "needs a swizzle of 32 bytes"),
    ({"interleave": 16, "dims": (8, 4, 4), "box": (8, 4, 4)}, "no interleaved layouts"),
    ({"strides": (256,)}, "strides without dims"),
    ({"box": (8.0, 4)}, "box must be whole numbers"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_the_driver_refuses_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        TensorMap(np.zeros((16, 64), np.float32), **{"box": (8, 4), **given})
    assert message in str(caught.value)


def test_maps_of_arrays_have_their_strides() -> None:
    x = np.zeros((6, 8, 64), np.float16)
    assert TensorMap(x, (8, 1, 1)).description.strides == (128, 1024)
    view = TensorMap(x[1:, ::2, 8:40], (8, 1, 1), swizzle=64).description
    assert (view.dims, view.strides, view.dtype) == ((32, 4, 5), (256, 1024), "float16")
    with pytest.raises(ValueError, match="last axis must be contiguous"):
        TensorMap(x[:, :, ::2], (8, 1, 1))
    with pytest.raises(ValueError, match="strides must be from 0"):
        TensorMap(x[::-1], (8, 1, 1))
    with pytest.raises(ValueError, match="address must be a multiple of 16"):
        TensorMap(x[:, :, 4:], (8, 1, 1))
    with pytest.raises(ValueError, match="no type for complex64"):
        TensorMap(np.zeros(64, np.complex64), 8)
    assert decode(view.encode(1 << 50)) == (view, 1 << 50)
    for at in range(128):  # whatever byte a kernel spoils; but any address may be a tensor's
        data = bytearray(view.encode(0))
        data[at] ^= 1
        assert (decode(bytes(data)) is None) == (not ADDRESS_AT <= at < ADDRESS_AT + 8)


def test_types_that_convert_and_fill() -> None:
    bits = np.array([0x00000001, 0x807FFFFF, 0x3F800FFF, 0x3F801000, 0x3F803000, 0x7F7FFFFF, 0x7F800000, 0x7FC00001], np.uint32)
    want = {
        "float32": bits,
        "float32_ftz": np.array([0, 0x80000000, *bits[2:]], np.uint32),
        "tfloat32": np.array([0, 0x80800000, 0x3F800000, 0x3F802000, 0x3F804000, 0x7F800000, 0x7F800000, 0x7FC00001], np.uint32),
        "tfloat32_ftz": np.array([0, 0x80000000, 0x3F800000, 0x3F802000, 0x3F804000, 0x7F800000, 0x7F800000, 0x7FC00001], np.uint32),
    }
    module = Module.from_ptx(program(f"{INIT} {load(1, '4', 32)} {WAIT} {OUT}", size=32))
    for dtype, expected in want.items():
        y = np.zeros(8, np.uint32)
        launch = module.launch("k", 1, 64, [TensorMap(bits.view(np.float32), 8, dtype=dtype, fill="nan"), y])
        assert launch.findings == () and (y == [*expected[4:], *[0x7FFFFFFF] * 4]).all(), dtype


def test_forms_that_are_of_other_chips_or_modes() -> None:
    lines = [
        "cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r1, %r1, %r1}], [%r2], {%h1};",
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r1, %r1, %r1, %r1, %r1}], [%r2];",
        "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd1], [%r1], 64, %h1;",
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r1}], [%r2];",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.min.f32 [%rd1], [%r1], 64;",
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.f32 [%r1], [%r1], 64, [%r2];",
        "cp.async.bulk.shared::cta.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r1], 64, [%r2];",
        "tensormap.replace.tile.rank.global.b1024.b32 [%rd1], 1;",
    ]
    with pytest.raises(UnsupportedPTX) as caught:
        Module.from_ptx(program("\n".join(lines)))
    assert len(caught.value.items) == len(lines)
    assert "im2col" in caught.value.items[0][2] and "sm_100" in caught.value.items[2][2]


# -- CUDA C -----------------------------------------------------------------------------------------------------------------

CUDA = r"""
struct alignas(64) CUtensorMap { char bytes[128]; };
struct Params { int rows; CUtensorMap in; float scale; CUtensorMap out; };
typedef unsigned u32;
__device__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void wait(u32 bar, u32 parity) {
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1, %2; @!p bra W; }" :: "r"(bar), "r"(parity), "r"(100) : "memory");
}
__device__ void load(const void* to, const void* map, int x, int y, u32 bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        :: "r"(shared(to)), "l"(map), "r"(x), "r"(y), "r"(bar) : "memory");
}
constexpr int ROWS = 16, STAGES = 2;
// out = scale * in, tiles of 16 rows of 32 floats through two stages; swizzled by 128 bytes both ways.
extern "C" __global__ void scale(PARAMS) {
    __shared__ alignas(1024) float tile[STAGES][ROWS * 32];
    __shared__ alignas(8) unsigned long long full[STAGES];
    const int steps = (p.rows + ROWS - 1) / ROWS;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared(&full[s])));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    auto fetch = [&](int step) {
        u32 bar = shared(&full[step % STAGES]);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "n"(ROWS * 32 * 4) : "memory");
        load(tile[step % STAGES], &p.in, 0, step * ROWS, bar);
    };
    if (threadIdx.x == 0) fetch(0);
    for (int step = 0; step < steps; step++) {
        float* here = tile[step % STAGES];
        if (threadIdx.x == 0 && step + 1 < steps) {
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the next stage has been stored
            fetch(step + 1);
        }
        wait(shared(&full[step % STAGES]), step / STAGES & 1);
        for (int i = threadIdx.x; i < ROWS * 32; i += blockDim.x) here[i] *= p.scale;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (threadIdx.x == 0) {
            asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                :: "l"(&p.out), "r"(0), "r"(step * ROWS), "r"(shared(here)) : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // before the block goes
}
"""

CUDA_FAULTS = {
    "": ("", "", "", ""),
    "not __grid_constant__": ("const __grid_constant__ Params p", "const Params p", "bad tensor map", "tensor.2d.shared::cluster"),
    "a stage loaded while it is stored": (
        'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the next', "//", "race", "tensor.2d.global"
    ),
    "a block that goes too early": (
        'if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // before', "//", "in flight",
        "tensor.2d.global",
    ),
    "no fence of the proxy": ('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', "", "proxy", "tensor.2d.global"),
    "a parity too late": ("step / STAGES & 1)", "1)", "in flight", "here[i] *="),
}  # fmt: skip


@pytest.mark.parametrize("name", CUDA_FAULTS)
def test_a_pipeline_in_cuda_and_its_faults(name: str) -> None:
    before, after, kind, where = CUDA_FAULTS[name]
    text = CUDA.replace("PARAMS", "const __grid_constant__ Params p")
    assert text.count(before) == 1 or not before
    text = text.replace(before, after) if before else text
    module = Module.from_source(text, ["-arch=compute_90a"])
    for seed in SEEDS[: 2 if name else 4]:
        x = np.random.default_rng(0).standard_normal((70, 32)).astype(np.float32)
        y = np.zeros_like(x)
        maps = {"in": TensorMap(x, (32, 16), swizzle=128), "out": TensorMap(y, (32, 16), swizzle=128)}
        args = {"p": {"rows": np.int32(70), "in": maps["in"], "scale": np.float32(2), "out": maps["out"]}}
        launch = module.launch("scale", 1, 64, args, seed=seed, unwritten=["p.out"])
        if not kind:
            assert launch.findings == () and (y == 2 * x).all()
            assert (launch.traffic["in"].read_bytes, launch.traffic["out"].write_bytes) == (x.nbytes, x.nbytes)
            continue
        lines = [number for number, line in enumerate(text.split("\n"), 1) if where in line]
        assert {(f.kind, f.source is not None and f.source[1] in lines) for f in launch.findings} >= {(kind, True)}, launch.findings


def test_maps_in_global_memory_and_what_does_not_fit() -> None:
    body = f"ld.param.u64 %rd1, [m]; add.u64 %rd1, %rd1, 128; {INIT} {load(2, '0, 0', 512)} {WAIT} {OUT}"
    module = Module.from_ptx(program(body, ".param .u64 m, .param .u64 y", 512))
    x, y = np.arange(256, dtype=np.float32).reshape(8, 32), np.zeros(128, np.float32)
    launch = module.launch("k", 1, 64, {"m": [TensorMap(x, (32, 1)), TensorMap(x, (32, 4))], "y": y})
    assert launch.findings == () and (y == x.reshape(-1)[:128]).all()
    assert launch.traffic["m[1]"].read_bytes == 512 and launch.traffic["m[0]"].read_bytes == 0
    fresh = module.launch("k", 1, 64, {"m": np.full(256, 0xFF, np.uint8), "y": y}, unwritten=["m"])
    assert fresh.findings[0].kind == "uninitialised" and "which nobody wrote" in fresh.findings[0].message
    longer = module.launch("k", 1, 64, {"m": [TensorMap(x, (32, 1)), TensorMap(x[:3], (32, 4), dims=(32, 8))], "y": y})
    assert (longer.findings[0].kind, longer.findings[0].tensor) == ("out of bounds", "m[1]")
    with pytest.raises(TypeError, match="1 tensor map of 128 bytes"):
        Module.from_ptx(program("", ".param .u32 m, .param .u64 y")).launch("k", 1, 1, [TensorMap(x, (32, 1)), y])
    stored = program(f"{INIT} st.shared.u64 [%r1], 1; cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd1, {{0}}], [%r1];")
    x.flags.writeable = False
    launch = Module.from_ptx(stored).launch("k", 1, 1, [TensorMap(x.reshape(-1), 4), y])
    assert [f.kind for f in launch.findings] == ["read-only"]
