"""Tensor maps and bulk tensor copies against a plain NumPy definition; what is wrong with them is found, under every seed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cupyflash.sim.ptx import Launch, Module, TensorMap, UnsupportedPTX
from cupyflash.sim.ptx.memory.swizzles import ADDRESS_AT, decode

SEEDS = [None, 0, 1, 2]

HEAD = ".version 8.6\n.target sm_90a\n.address_size 64\n"
REGISTERS = """.shared .align 1024 .b8 t[8192]; .shared .align 8 .b64 bar; .reg .b64 %rd<20>; .reg .b32 %r<30>; .reg .b16 %h<4>;
.reg .pred %p<4>;"""
BYTES = "mbarrier::complete_tx::bytes"
START = """mov.u32 %r0, %tid.x; mov.u32 %r1, t; mov.u32 %r2, bar; mov.u64 %rd1, m; setp.eq.u32 %p1, %r0, 0;"""
INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r2], 1; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;"
WAIT = "W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra W;"
OUT = """ld.param.u64 %rd5, [y]; mov.u32 %r10, %ctaid.x; mul.wide.u32 %rd6, %r10, NBYTES; add.u64 %rd5, %rd5, %rd6;
shl.b32 %r11, %r0, 2; L: setp.ge.u32 %p3, %r11, NBYTES; @%p3 bra E; add.u32 %r12, %r1, %r11; ld.shared.u32 %r13, [%r12];
cvt.u64.u32 %rd6, %r11; add.u64 %rd6, %rd5, %rd6; st.global.u32 [%rd6], %r13; add.u32 %r11, %r11, 256; bra L; E:"""


def program(body: str, params: str = ".param .align 64 .b8 m[128], .param .u64 y", size: int = 0) -> str:
    """A kernel with a tile t of shared memory, an mbarrier bar, and a tensor map m; %p1 is thread 0."""
    return f"{HEAD}.visible .entry k({params})\n{{\n{REGISTERS}\n{START}\n{body.replace('NBYTES', str(size))}\nret;\n}}\n"


def load(rank: int, coordinates: str, size: int) -> str:
    return f"""@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {size};
    @%p1 cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.{BYTES} [%r1], [%rd1, {{{coordinates}}}], [%r2];"""


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


RANKS = [1, 2, 3, 4, 5]


@pytest.mark.parametrize("rank", RANKS)
def test_boxes_are_what_the_definition_says(rank: int) -> None:
    loads(rank, np.random.default_rng(rank), 12)


@pytest.mark.wide
@pytest.mark.parametrize("rank", RANKS)
def test_many_boxes(rank: int) -> None:
    loads(rank, np.random.default_rng(100 + rank), 100)


def loads(rank: int, rng: np.random.Generator, cases: int) -> None:
    """Loads at coordinates inside, across every border and outside; bytes count in bounds, the mbarrier all of them."""
    names = ", ".join(f"%r{20 + k}" for k in range(rank))
    read = " ".join(f"ld.param.u32 %r{20 + k}, [c{k}];" for k in range(rank))
    params = ", ".join([".param .align 64 .b8 m[128], .param .u64 y", *(f".param .u32 c{k}" for k in range(rank)), ".param .u32 n"])
    body = f"""{read} ld.param.u32 %r25, [n]; {INIT} @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], %r25;
    @%p1 cp.async.bulk.tensor.{rank}d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {{{names}}}], [%r2]; {WAIT}
    @!%p1 bra DONE; add.u32 %r26, %r25, 1023; and.b32 %r26, %r26, 0xFFFFFC00;
    ld.param.u64 %rd5, [y]; mov.u32 %r27, 0; L: add.u32 %r12, %r1, %r27; ld.shared.v2.u64 {{%rd6, %rd7}}, [%r12];
    cvt.u64.u32 %rd8, %r27; add.u64 %rd8, %rd5, %rd8; st.global.v2.u64 [%rd8], {{%rd6, %rd7}};
    add.u32 %r27, %r27, 16; setp.lt.u32 %p3, %r27, %r26; @%p3 bra L; DONE:"""
    module = Module.from_ptx(program(body, params))
    for case in range(cases):
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
        at = {sum(k * s for k, s in zip(i, (*d.strides[::-1], d.element), strict=True)) // 32 for i in inside}
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
    stores(op, np.random.default_rng(sum(map(ord, op))), 6)


@pytest.mark.wide
@pytest.mark.parametrize("op", OPS)
def test_many_stores_and_reductions(op: str) -> None:
    stores(op, np.random.default_rng(1000 + sum(map(ord, op))), 40)


def stores(op: str, rng: np.random.Generator, cases: int) -> None:
    """The tile comes from a load of another map with the same box, so that both ways go by the same swizzle."""
    dtype, fn = OPS[op]
    what = f"cp.reduce.async.bulk.tensor.3d.global.shared::cta.{op}.tile" if op else "cp.async.bulk.tensor.3d.global.shared::cta"
    params = ", ".join([f".param .align 64 .b8 {name}[128]" for name in "mo"] + [f".param .u32 {name}" for name in "abcn"])
    body = f"""ld.param.u32 %r20, [a]; ld.param.u32 %r21, [b]; ld.param.u32 %r22, [c];
    ld.param.u32 %r25, [n]; {INIT} @!%p1 bra DONE; mov.u64 %rd2, o; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], %r25;
    cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {{0, 0, 0}}], [%r2]; {WAIT}
    {what}.bulk_group [%rd2, {{%r20, %r21, %r22}}], [%r1]; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; DONE:"""
    module = Module.from_ptx(program(body, params))
    for case in range(cases):
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
        read = count * d.element if op else 0  # a reduction reads what it adds to, as an atomic does
        assert launch.traffic["o"].write_bytes == count * d.element and launch.traffic["o"].read_bytes == read


# -- several blocks ----------------------------------------------------------------------------------------------------------

CLUSTER = f"""{START}
mov.u32 %r20, %cluster_ctarank; mov.u32 %r21, %ctaid.x; setp.eq.u32 %p3, %r20, 0;
{INIT}
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 2048;
and.pred %p3, %p1, %p3;
mov.u16 %h1, MASK;
mov.b64 %rd9, 0;
@%p3 cp.async.bulk.tensor.2d.shared::cluster.global.{BYTES}.multicast::cluster.L2::cache_hint
    [%r1], [%rd1, {{0, %r21}}], [%r2], %h1, %rd9;
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
    arrive, all_met = "@%p1 mbarrier.arrive", "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
    some = CLUSTER.replace("MASK", "13").replace(arrive, f"setp.ne.u32 %p2, %r20, 1; @!%p2 bra DONE; {arrive}")
    launch, x, y = multicast(some + "DONE:", seed=seed)
    assert launch.findings == () and not y[1].any() and (y[3] == x[:16]).all()
    beyond, _, _ = multicast(CLUSTER.replace("MASK", "31"), seed=seed)
    assert {(f.kind, "the cluster has 4 blocks" in f.message) for f in beyond.findings} == {("out of bounds", True)}
    # Block 3 leaves without waiting: it may be gone when the copy comes.
    gone = CLUSTER.replace("MASK", "15").replace(arrive, f"setp.eq.u32 %p2, %r20, 3; @%p2 bra E; {arrive}")
    left, _, _ = multicast(gone, seed=seed)
    assert {f.kind for f in left.findings} == {"exited block"}, left.findings
    # Nobody has met: the other blocks may not have begun, their mbarriers not be initialised.
    alone = CLUSTER.replace("MASK", "15").replace(all_met, "")
    early, _, _ = multicast(alone, seed=seed)
    assert "not begun" in {f.kind for f in early.findings}, early.findings


def test_barriers_of_the_blocks_do_not_do_for_a_multicast() -> None:
    """Without fence.mbarrier_init they do for a copy to the own block, which is a warning: another block's is an error."""
    relaxed = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned; bar.sync 0;"
    released = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
    unfenced = CLUSTER.replace("@%p1 fence.mbarrier_init.release.cluster;", "").replace(released, relaxed, 1).replace("MASK", "15")
    found, _, _ = multicast(unfenced, seed=None)
    assert [f.severity for f in found.findings if f.kind == "proxy" and "mbarrier_init" in f.message] == ["error"], found.findings


REMOTE = f"""{START}
mov.u32 %r20, %cluster_ctarank; shl.b32 %r11, %r0, 2; add.u32 %r12, %r1, %r11; add.u32 %r13, %r0, %r20;
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
        assert kinds or ((y[0] == 6 + 5 * thread).all() and (y[1:] == thread).all())


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
    ({"interleave": 16, "dims": (8, 4, 4), "box": (8, 4, 4)}, "names NC/8HWC8, but has no stride"),
    ({"interleave": 32, "dims": (8, 4, 4), "box": (8, 4, 4), "swizzle": 32}, "names NC/16HWC16"),
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
    rounded = [0x3F800000, 0x3F802000, 0x3F804000, 0x7F800000, 0x7F800000, 0x7FC00001]
    want = {
        "float32": bits,
        "float32_ftz": np.array([0, 0x80000000, *bits[2:]], np.uint32),
        "tfloat32": np.array([0, 0x80800000, *rounded], np.uint32),
        "tfloat32_ftz": np.array([0, 0x80000000, *rounded], np.uint32),
    }
    for at in (0, 4):
        module = Module.from_ptx(program(f"{INIT} {load(1, str(at), 32)} {WAIT} {OUT}", size=32))
        for dtype, expected in want.items():
            y = np.zeros(8, np.uint32)
            launch = module.launch("k", 1, 64, [TensorMap(bits.view(np.float32), 8, dtype=dtype, fill="nan"), y])
            assert launch.findings == () and (y == [*expected[at:], *[0x7FFFFFFF] * at]).all(), dtype


def test_forms_that_are_of_other_chips_or_modes() -> None:
    lines = [
        f"cp.async.bulk.tensor.3d.shared::cta.global.im2col.{BYTES} [%r1], [%rd1, {{%r1, %r1, %r1}}], [%r2], {{%h1}};",
        f"cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.{BYTES} [%r1], [%rd1, {{%r1, %r1, %r1, %r1, %r1}}], [%r2];",
        "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd1], [%r1], 64, %h1;",
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r1}], [%r2];",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.min.f32 [%rd1], [%r1], 64;",
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.f32 [%r1], [%r1], 64, [%r2];",
        "cp.async.bulk.shared::cta.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r1], 64, [%r2];",
        "tensormap.replace.tile.swizzle_atomicity.global.b1024.b32 [%rd1], 1;",
    ]
    with pytest.raises(UnsupportedPTX) as caught:
        Module.from_ptx(program("\n".join(lines)))
    assert len(caught.value.items) == len(lines)
    assert "im2col" in caught.value.items[0][2] and "sm_100" in caught.value.items[2][2]


# -- plain bytes ----------------------------------------------------------------------------------------------------------

TYPES = {
    **{f"{kind}{bits}": np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}") for kind in "bus" for bits in (32, 64)},
    "f16": np.dtype("f2"),
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
}
BY_TYPE = {
    "add": ("u32", "s32", "u64", "f32", "f64", "noftz.f16", "noftz.bf16"),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64", "f16", "bf16")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64")),
}
"""What ptxas takes of cp.reduce.async.bulk to global memory."""


@pytest.mark.parametrize("op", BY_TYPE)
def test_reductions_of_bytes(op: str) -> None:
    rng = np.random.default_rng(len(op))
    for name in BY_TYPE[op]:
        body = f"""{INIT} @!%p1 bra DONE; ld.param.u64 %rd2, [x]; ld.param.u64 %rd3, [y]; mov.b64 %rd4, 0;
        cp.async.bulk.prefetch.L2.global.L2::cache_hint [%rd2], 256, %rd4;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
        cp.async.bulk.shared::cta.global.{BYTES}.L2::cache_hint [%r1], [%rd2], 256, [%r2], %rd4; {WAIT}
        cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.{op}.{name} [%rd3], [%r1], 256, %rd4;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; DONE:"""
        kind = name.removeprefix("noftz.")
        if kind in ("bf16", "f16"):
            x, y = (rng.standard_normal(128).astype(np.float32) for _ in range(2))
            halves = [a.view(np.uint32) + 0x8000 >> 16 << 16 for a in (x, y)]
            x, y = (h.astype(np.uint32).view(np.float32) for h in halves) if kind == "bf16" else (x.astype("f2"), y.astype("f2"))
            given = [(a.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else a for a in (x, y)]
        else:
            dtype = TYPES[kind]
            draw = rng.standard_normal((2, 256 // dtype.itemsize)) * 1000
            x, y = given = list(draw.astype(dtype) if dtype.kind == "f" else draw.astype("i8").astype(dtype))
        old = y.copy()
        launch = Module.from_ptx(program(body, ".param .u64 m, .param .u64 x, .param .u64 y")).launch("k", 1, 32, [None, *given])
        assert launch.findings == () and launch.traffic["arg1"].read_bytes == 256, name
        want = OPS[op][1](old, x) if kind != "bf16" else OPS[op][1](old.astype(float), x.astype(float))
        found = (given[1].astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else given[1]
        assert np.allclose(found, want, rtol=2**-8 if kind == "bf16" else 2**-10 if kind == "f16" else 0, atol=0), name


def test_prefetches_are_checked_and_not_counted() -> None:
    body = f"""{INIT} @!%p1 bra DONE; ld.param.u64 %rd2, [x]; cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd1, {{4, 2}}];
    cp.async.bulk.prefetch.L2.global [%rd2], SIZE; DONE:"""
    for size, kinds in ((256, []), (272, ["out of bounds"]), (8, ["misaligned"])):
        module = Module.from_ptx(program(body.replace("SIZE", str(size)), ".param .align 64 .b8 m[128], .param .u64 x"))
        x = np.zeros((8, 8), np.float32)
        launch = module.launch("k", 1, 32, {"m": TensorMap(x, (8, 8)), "x": x})
        assert [f.kind for f in launch.findings] == kinds and launch.traffic["m"].read_bytes == launch.traffic["x"].read_bytes == 0
