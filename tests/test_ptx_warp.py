"""Instructions of a warp: shuffles, votes, matches, reductions; ldmatrix, stmatrix and mma fragments.

The fragment layouts are written down once more here, from the formulas of the PTX ISA (DESIGN.md), element by element.
"""

from __future__ import annotations

import numpy as np
import pytest
from test_ptx_harness import apply, integers, kernel, run

REGISTERS = ".reg .b64 %rd<40>; .reg .b32 %r<60>; .reg .f64 %fd<20>; .reg .pred %p<6>;"
LANE = np.arange(32)
N = 128


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(9)


# -- shuffles -----------------------------------------------------------------------------------------------------------


def shuffle(mode: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pseudo code of the ISA, lane by lane, for each warp of 32."""
    out, inside = np.zeros_like(a), np.zeros(len(a), bool)
    for k in range(len(a)):
        lane = k % 32
        bval, cval, mask = int(b[k]) & 31, int(c[k]) & 31, int(c[k]) >> 8 & 31
        max_lane = lane & mask | cval & ~mask & 31
        min_lane = lane & mask
        j = {"up": lane - bval, "down": lane + bval, "bfly": lane ^ bval, "idx": min_lane | bval & ~mask & 31}[mode]
        good = j >= max_lane if mode == "up" else j <= max_lane
        out[k] = a[k - lane + (j if good else lane)]
        inside[k] = good
    return out, inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("clamp", [0x1F, 0x0, 0x181F, 0x1C07, 0x1C00])
def test_shuffle(mode: str, clamp: int, rng: np.random.Generator) -> None:
    a = integers(rng, np.uint32, N)
    registers = ".reg .pred %p;"
    for step in (0, 1, 3, 16, 31):
        body = f"shfl.sync.{mode}.b32 %d0|%p, %a0, {step}, {clamp}, 0xffffffff; selp.u32 %d1, 1, 0, %p;"
        d, p = apply(body, [a], [np.uint32] * 2, registers)
        want, inside = shuffle(mode, a, np.full(N, step), np.full(N, clamp))
        assert (d == want).all() and (p == inside).all(), step
    b = rng.integers(0, 32, N, dtype=np.uint32)
    (d,) = apply(f"shfl.sync.{mode}.b32 %d0, %a0, %a1, {clamp}, -1;", [a, b], [np.uint32])
    assert (d == shuffle(mode, a, b, np.full(N, clamp))[0]).all()


def test_shuffle_within_a_partial_warp_and_a_diverged_one() -> None:
    body = """setp.ge.u32 %p1, %r1, 24; @%p1 bra HIGH;
    shfl.sync.bfly.b32 %r5, %r1, 1, 0x1f, 0x00ffffff; bra STORE; HIGH: shfl.sync.bfly.b32 %r5, %r1, 2, 0x1f, 0xff000000;
    STORE: shfl.sync.idx.b32 %r6, %r5, 7, 0x1f, 0xffffffff; mul.lo.u32 %r6, %r6, 100; add.u32 %r5, %r5, %r6;
    st.global.u32 [%rd1], %r5;"""
    for seed in (None, 0, 1, 2, 3):
        y = np.zeros(48, np.uint32)
        launch = run(thread_kernel(body), {"y": y}, block=48, seed=seed)
        # Warp 0 splits at lane 24; warp 1 has 16 threads, which all go the second way, and name lanes that are not theirs.
        thread = np.arange(48)
        want = np.where(thread < 24, thread ^ 1, thread ^ 2)
        assert (y == want + 100 * want[thread // 32 * 32 + 7]).all()
        assert {f.kind for f in launch.findings} == {"inactive source"} and all(f.warp == 1 for f in launch.findings)


def thread_kernel(body: str, *parameters: str) -> str:
    prologue = "ld.param.u64 %rd1, [y]; mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 4, %rd1;\n"
    return kernel(prologue + body, [".u64 y", *parameters], REGISTERS)


def test_shuffle_from_a_lane_that_does_not_take_part() -> None:
    body = "setp.ge.u32 %p1, %r1, 8; @%p1 ret; shfl.sync.bfly.b32 %r5, %r1, 8, 0x1f, 0xff; st.global.u32 [%rd1], %r5;"
    launch = run(thread_kernel(body), {"y": np.zeros(32, np.uint32)})
    assert [(f.kind, f.lane) for f in launch.findings] == [("inactive source", 0)] and launch.findings_total >= 8


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
def test_a_warp_waits_for_its_lanes_before_it_shuffles(seed: int | None) -> None:
    """Lanes reach the shuffle after loops of different lengths."""
    body = """mov.u32 %r5, 0; HEAD: setp.ge.u32 %p1, %r5, %r1; @%p1 bra DONE; add.u32 %r5, %r5, 1; bra HEAD;
    DONE: shfl.sync.down.b32 %r6, %r5, 1, 0x1f, 0xffffffff; st.global.u32 [%rd1], %r6;"""
    y = np.zeros(64, np.uint32)
    launch = run(thread_kernel(body), {"y": y}, block=64, seed=seed)
    lane = np.arange(64)
    assert launch.findings == () and (y == np.where(lane % 32 == 31, lane, lane + 1)).all()


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
def test_a_warp_does_not_wait_for_lanes_that_have_exited(seed: int | None) -> None:
    """The upper half is named, and exits only after the lower half has come to the shuffle."""
    body = """setp.ge.u32 %p1, %r1, 16; @%p1 bra LEAVE; shfl.sync.bfly.b32 %r6, %r1, 1, 0x1f, 0xffffffff;
    st.global.u32 [%rd1], %r6; ret;
    LEAVE: mov.u32 %r5, 0; WORK: add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 20; @%p2 bra WORK; ret;"""
    y = np.zeros(32, np.uint32)
    launch = run(thread_kernel(body), {"y": y}, seed=seed)
    assert launch.findings == () and (y[:16] == LANE[:16] ^ 1).all()


def test_lanes_named_but_waiting_elsewhere_deadlock() -> None:
    body = "setp.lt.u32 %p1, %r1, 8; @%p1 bra A; shfl.sync.bfly.b32 %r5, %r1, 1, 0x1f, -1; ret; A: bar.warp.sync 0xffff; ret;"
    launch = run(thread_kernel(body), {"y": np.zeros(32, np.uint32)})
    assert {f.kind for f in launch.findings} == {"deadlock"} and any("shfl.sync" in f.message for f in launch.findings)


# -- votes --------------------------------------------------------------------------------------------------------------


def test_votes(rng: np.random.Generator) -> None:
    a = rng.integers(0, 2, N, dtype=np.uint32)
    a[32:64], a[64:96] = 1, 0
    body = """setp.ne.u32 %p, %a0, 0; vote.sync.ballot.b32 %d0, %p, 0xffffffff; vote.sync.all.pred %q, %p, -1;
    selp.u32 %d1, 1, 0, %q;
    vote.sync.any.pred %q, %p, -1; selp.u32 %d2, 1, 0, %q; vote.sync.uni.pred %q, %p, -1; selp.u32 %d3, 1, 0, %q;
    vote.sync.any.pred %q, !%p, -1; selp.u32 %d4, 1, 0, %q; activemask.b32 %d5;"""
    ballot, every, some, uniform, other, active = apply(body, [a], [np.uint32] * 6, ".reg .pred %p, %q;")
    warps = a.reshape(-1, 32).astype(bool)
    assert (ballot.reshape(-1, 32) == (warps * (1 << LANE)).sum(axis=1, keepdims=True)).all()
    assert (every.reshape(-1, 32) == warps.all(axis=1, keepdims=True)).all()
    assert (some.reshape(-1, 32) == warps.any(axis=1, keepdims=True)).all()
    assert (uniform.reshape(-1, 32) == (warps.all(axis=1) | ~warps.any(axis=1))[:, None]).all()
    assert (other.reshape(-1, 32) == (~warps).any(axis=1, keepdims=True)).all() and (active == 0xFFFFFFFF).all()


def test_votes_of_a_part_of_the_warp() -> None:
    body = """setp.lt.u32 %p1, %r1, 12; setp.lt.u32 %p2, %r1, 4; mov.u32 %r5, 0; @!%p1 bra END;
    vote.sync.ballot.b32 %r5, %p2, 0xfff;
    activemask.b32 %r6; add.u32 %r5, %r5, %r6; END: st.global.u32 [%rd1], %r5;"""
    y = np.zeros(32, np.uint32)
    launch = run(thread_kernel(body), {"y": y})
    assert launch.findings == () and (y == np.where(LANE < 12, 0xF + 0xFFF, 0)).all()


def test_match(rng: np.random.Generator) -> None:
    a = rng.integers(0, 4, N, dtype=np.uint32)
    a[32:64] = 3
    body = """match.any.sync.b32 %d0, %a0, -1; match.all.sync.b32 %d1|%p, %a0, -1; selp.u32 %d2, 1, 0, %p;
    cvt.u64.u32 %wide, %a0; shl.b64 %wide, %wide, 40; match.any.sync.b64 %d3, %wide, -1;"""
    anyone, everyone, flag, wide = apply(body, [a], [np.uint32] * 4, ".reg .pred %p; .reg .b64 %wide;")
    rows = a.reshape(-1, 32)
    want = ((rows[:, :, None] == rows[:, None, :]) * (1 << LANE)).sum(axis=2)
    assert (anyone.reshape(-1, 32) == want).all() and (wide == anyone).all()
    same = (rows == rows[:, :1]).all(axis=1)
    assert (flag.reshape(-1, 32) == same[:, None]).all()
    assert (everyone.reshape(-1, 32) == np.where(same, 0xFFFFFFFF, 0)[:, None]).all()


@pytest.mark.parametrize("op", ["add.u32", "min.s32", "max.s32", "min.u32", "max.u32", "and.b32", "or.b32", "xor.b32"])
def test_redux(op: str, rng: np.random.Generator) -> None:
    name, type_ = op.split(".")
    a = integers(rng, np.uint32, N)
    typed = a.view(np.int32) if type_ == "s32" else a
    fn = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[
        name
    ]
    (d,) = apply(f"redux.sync.{op} %d0, %a0, 0xffffffff;", [a], [np.uint32])
    want = fn.reduce(typed.reshape(-1, 32), axis=1, dtype=typed.dtype)
    assert (d.view(typed.dtype).reshape(-1, 32) == want[:, None]).all()


def test_redux_by_halves_of_the_warp() -> None:
    body = """setp.lt.u32 %p1, %r1, 16; selp.b32 %r5, 0xffff, 0xffff0000, %p1;
    redux.sync.add.u32 %r6, %r1, %r5; st.global.u32 [%rd1], %r6;"""
    y = np.zeros(32, np.uint32)
    run(thread_kernel(body), {"y": y})
    assert (y == np.where(LANE < 16, sum(range(16)), sum(range(16, 32)))).all()


def test_elect() -> None:
    body = """sub.u32 %r7, %r1, 4; setp.lt.u32 %p2, %r7, 8; @!%p2 bra OUT; elect.sync %r5|%p1, 0xff0; selp.u32 %r6, 100, 0, %p1;
    add.u32 %r5, %r5, %r6; st.global.u32 [%rd1], %r5; OUT:"""
    y = np.zeros(32, np.uint32)
    run(thread_kernel(body), {"y": y})
    assert (y == np.where((LANE >= 4) & (LANE < 12), 4 + 100 * (LANE == 4), 0)).all()


# -- ldmatrix, stmatrix ---------------------------------------------------------------------------------------------------


def matrix_kernel(body: str) -> str:
    """Shared memory holds `x` (2 KB a block); %r3 is the address given by this lane, from `rows`."""
    prologue = """.shared .align 16 .b8 s[2048]; ld.param.u64 %rd2, [x]; ld.param.u64 %rd3, [rows];
    mov.u32 %r2, s; mov.u32 %r4, 0;
    shl.b32 %r5, %r1, 2; cvt.u64.u32 %rd4, %r5; add.s64 %rd3, %rd3, %rd4; ld.global.u32 %r3, [%rd3]; add.u32 %r3, %r3, %r2;
    FILL: cvt.u64.u32 %rd5, %r5; add.s64 %rd6, %rd2, %rd5; ld.global.u32 %r6, [%rd6]; add.u32 %r7, %r2, %r5;
    st.shared.u32 [%r7], %r6;
    mov.u32 %r8, %ntid.x; shl.b32 %r8, %r8, 2; add.u32 %r5, %r5, %r8; setp.lt.u32 %p1, %r5, 2048; @%p1 bra FILL; bar.sync 0;
    """
    return thread_kernel(prologue + body, ".u64 x", ".u64 rows")


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(count: int, transposed: bool, rng: np.random.Generator) -> None:
    x = rng.integers(0, 1 << 16, 1024, dtype=np.uint16)
    rows = (rng.permutation(128)[:64] * 16).astype(np.uint32)
    registers = ", ".join(f"%r{20 + k}" for k in range(count))
    stores = "".join(f"st.global.u32 [%rd1+{256 * k}], %r{20 + k};" for k in range(count))
    body = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if transposed else ''}.shared.b16 {{{registers}}}, [%r3]; {stores}"
    y = np.zeros((count, 64), np.uint32)
    launch = run(matrix_kernel(body), {"y": y, "x": x, "rows": rows}, block=64)
    got = y.view(np.uint16).reshape(count, 2, 32, 2)
    for warp in range(2):
        for i in range(count):
            matrix = np.stack([x[rows[32 * warp + 8 * i + r] // 2 :][:8] for r in range(8)])
            if transposed:
                matrix = matrix.T
            for lane in range(32):
                assert (got[i, warp, lane] == matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]).all()
    counts = launch.counters.shared_kind("ldmatrix")
    assert launch.findings == () and (counts.requests, counts.bytes) == (2, 2 * count * 128)


def test_wavefronts_of_ldmatrix_with_and_without_a_swizzle() -> None:
    x, y = np.zeros(1024, np.uint16), np.zeros((4, 32), np.uint32)
    body = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r3];"
    row = LANE % 8
    for stride, swizzle, passes in ((128, 0, 32), (16, 0, 4), (128, 1, 4), (144, 0, 4)):
        rows = (row * stride + (row * 16 if swizzle else 0)).astype(np.uint32)
        launch = run(matrix_kernel(body), {"y": y, "x": x, "rows": rows})
        counts = launch.counters.shared_kind("ldmatrix")
        assert (counts.wavefronts, counts.ideal_wavefronts) == (passes, 4)


def test_ldmatrix_wants_whole_warps() -> None:
    x, y, rows = np.zeros(1024, np.uint16), np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    body = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r20}, [%r3];"
    launch = run(matrix_kernel("setp.eq.u32 %p1, %r1, 3; @%p1 ret;" + body), {"y": y, "x": x, "rows": rows})
    assert [f.kind for f in launch.findings] == ["missing lanes"]
    launch = run(matrix_kernel(body.replace("[%r3]", "[%r3+8]")), {"y": y, "x": x, "rows": rows})
    assert [f.kind for f in launch.findings] == ["misaligned"]


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_undoes_ldmatrix(transposed: bool, rng: np.random.Generator) -> None:
    x = rng.integers(0, 1 << 16, 1024, dtype=np.uint16)
    rows = (np.arange(32) * 16).astype(np.uint32)
    trans = ".trans" if transposed else ""
    body = f"""ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r3]; bar.sync 0;
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r3+1024], {{%r20, %r21, %r22, %r23}}; bar.sync 0;
    shl.b32 %r9, %r1, 4; add.u32 %r9, %r9, %r2; ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r9+1024];
    mul.wide.u32 %rd7, %r1, 12; add.s64 %rd1, %rd1, %rd7; st.global.v4.u32 [%rd1], {{%r10, %r11, %r12, %r13}};
    movmatrix.sync.aligned.m8n8.trans.b16 %r14, %r20; st.global.u32 [%rd1+512], %r14;"""
    y = np.zeros(512 // 4 + 1024, np.uint32)
    run(matrix_kernel(body), {"y": y, "x": x, "rows": rows})
    matrices = x[:256].reshape(4, 8, 8)
    want = matrices.transpose(0, 2, 1) if transposed else matrices
    assert (y[:128].view(np.uint16).reshape(4, 8, 8) == want).all()
    moved = y[128:256:4].copy()
    assert (moved.view(np.uint16).reshape(8, 8) == matrices[0].T).all()


# -- mma ----------------------------------------------------------------------------------------------------------------


def fragment_places(shape: tuple[int, int], registers: int, per: int, transposed: bool) -> list[list[list[tuple[int, int]]]]:
    """places[lane][register][element] of A (m x k), or of B (k x n) if `transposed`, from the formulas of the ISA.

    `per` elements fill a register. A, register r: row g + 8 (r % 2), column per t + e + 4 per (r // 2);
    B, register r: row per t + e + 4 per r, column g.
    """
    places = []
    for lane in range(32):
        g, t = lane >> 2, lane & 3
        of_lane = []
        for r in range(registers):
            if transposed:
                of_lane.append([(per * t + e + 4 * per * r, g) for e in range(per)])
            else:
                halves = shape[0] // 8
                of_lane.append([(g + 8 * (r % halves), per * t + e + 4 * per * (r // halves)) for e in range(per)])
        places.append(of_lane)
    return places


def accumulator_places(m: int) -> list[list[tuple[int, int]]]:
    """places[lane][i] of C and D: row g + 8 (i // 2), column 2 t + i % 2."""
    return [[((lane >> 2) + 8 * (i // 2), 2 * (lane & 3) + i % 2) for i in range(m // 4)] for lane in range(32)]


def fragments(matrix: np.ndarray, places: list[list[list[tuple[int, int]]]], word: int, bits: int = 8) -> np.ndarray:
    """(register, lane) words of a matrix of raw elements."""
    elements = np.array([[[matrix[p] for p in register] for register in lane] for lane in places])
    if bits < 8:
        # Elements narrower than a byte: the first one is in the lowest bits.
        groups = elements.reshape(*elements.shape[:-1], -1, 8 // bits).astype(np.uint8)
        elements = np.bitwise_or.reduce(groups << np.arange(0, 8, bits, dtype=np.uint8), axis=-1)
    return np.ascontiguousarray(elements).view(f"u{word}").reshape(32, -1).T.copy()


CASES = [
    ("m16n8k16", "f16", "f32"),
    ("m16n8k8", "f16", "f32"),
    ("m16n8k16", "f16", "f16"),
    ("m16n8k8", "f16", "f16"),
    ("m16n8k16", "bf16", "f32"),
    ("m16n8k8", "bf16", "f32"),
    ("m16n8k8", "tf32", "f32"),
    ("m16n8k4", "tf32", "f32"),
    ("m16n8k16", "s8", "s32"),
    ("m16n8k32", "s8", "s32"),
    ("m16n8k32", "u8", "s32"),
    ("m8n8k16", "s8", "s32"),
    ("m8n8k4", "f64", "f64"),
    ("m16n8k8", "f64", "f64"),
    ("m16n8k32", "e4m3", "f32"),
    ("m16n8k32", "e5m2", "f32"),
    ("m16n8k32", "e4m3", "f16"),
    ("m8n8k32", "s4", "s32"),
    ("m16n8k32", "u4", "s32"),
    ("m16n8k64", "s4", "s32"),
    ("m8n8k128", "b1.xor", "s32"),
    ("m16n8k128", "b1.and", "s32"),
    ("m16n8k256", "b1.xor", "s32"),
]
ELEMENT_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "s8": 8, "u8": 8, "f64": 64, "e4m3": 8, "e5m2": 8, "s4": 4, "u4": 4, "b1": 1}
SMALL = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "bf16": "bfloat16"}  # in ml_dtypes


def random_matrix(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(raw elements, values)."""
    if kind in ("s8", "u8"):
        values = rng.integers(-128 if kind == "s8" else 0, 128, shape)
        return values.astype(np.int8).view(np.uint8), values.astype(np.float64)
    if kind in ("s4", "u4", "b1"):
        values = rng.integers(*{"s4": (-8, 8), "u4": (0, 16), "b1": (0, 2)}[kind], shape)
        return values.astype(np.int8).view(np.uint8) & 15, values.astype(np.float64)
    x = rng.standard_normal(shape)
    if kind in SMALL:
        import ml_dtypes

        small = x.astype(getattr(ml_dtypes, SMALL[kind]))
        return small.view(f"u{small.itemsize}"), small.astype(np.float64)
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16), x.astype(np.float16).astype(np.float64)
    if kind == "tf32":
        f = x.astype(np.float32)
        # The low 13 bits are there to be ignored.
        return f.view(np.uint32), (f.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64)
    return x.view(np.uint64), x


@pytest.mark.parametrize(("shape", "kind", "accumulator"), CASES)
def test_mma_fragments(shape: str, kind: str, accumulator: str, rng: np.random.Generator) -> None:
    m, n, k = (int(v) for v in shape[1:].replace("n", " ").replace("k", " ").split())
    word = 8 if kind == "f64" else 4
    kind, _, logic = kind.partition(".")
    bits = ELEMENT_BITS[kind]
    per = 8 * word // bits
    a_raw, a = random_matrix(rng, kind, (m, k))
    b_raw, b = random_matrix(rng, kind, (k, n))
    a_frag = fragments(a_raw, fragment_places((m, k), m * k // 32 // per, per, False), word, bits)
    b_frag = fragments(b_raw, fragment_places((k, n), k * n // 32 // per, per, True), word, bits)
    acc_dtype = {"f32": np.float32, "f16": np.float16, "s32": np.int32, "f64": np.float64}[accumulator]
    c = (rng.standard_normal((m, n)) * 10).astype(acc_dtype)
    places = accumulator_places(m)
    c_elements = np.array([[c[p] for p in lane] for lane in places])
    c_frag = np.ascontiguousarray(c_elements).view(f"u{word}").reshape(32, -1).T.copy()
    reg = "%rd2" if word == 8 else "%r2"
    base, body = 0, f"ld.param.u64 %rd1, [x]; mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, {word}, %rd1;\n"
    names: list[list[str]] = []
    for frag in (a_frag, b_frag, c_frag):
        group = []
        for _ in range(len(frag)):
            group.append(f"{reg[:-1]}{20 + base}")
            body += f"ld.global.b{8 * word} {group[-1]}, [%rd1+{32 * word * base}];\n"
            base += 1
        names.append(group)
    lists = ["{" + ", ".join(g) + "}" for g in names]
    types = f"{accumulator}.{kind}.{kind}.{accumulator}" + (f".{logic}.popc" if logic else "")
    body += f"mma.sync.aligned.{shape}.row.col.{types} {lists[2]}, {lists[0]}, {lists[1]}, {lists[2]};\n"
    body += f"ld.param.u64 %rd1, [y]; mad.wide.u32 %rd1, %r1, {word}, %rd1;\n"
    body += "".join(f"st.global.b{8 * word} [%rd1+{32 * word * i}], {r};\n" for i, r in enumerate(names[2]))
    x = np.concatenate([a_frag, b_frag, c_frag])
    y = np.zeros_like(c_frag)
    launch = run(kernel(body, [".u64 x", ".u64 y"], REGISTERS), {"x": x, "y": y})
    got_elements = np.ascontiguousarray(y.T).view(acc_dtype).reshape(32, -1)
    got = np.zeros((m, n))
    for lane in range(32):
        for i, p in enumerate(places[lane]):
            got[p] = got_elements[lane, i]
    want = a @ b + c.astype(np.float64)
    if logic == "xor":
        want = a @ (1 - b) + (1 - a) @ b + c
    tolerance = {"f32": 2e-5, "f16": 2e-2, "s32": 0, "f64": 1e-13}[accumulator]
    assert np.abs(got - want).max() <= tolerance and launch.counters.mma_flops == 2 * m * n * k


def test_mma_mixed_signs_and_saturation() -> None:
    body = """mov.u32 %r10, 0xffffffff; mov.u32 %r11, 0x7fffffff; mov.u32 %r12, 0;
    mma.sync.aligned.m16n8k16.row.col.s32.s8.u8.s32 {%r20, %r21, %r22, %r23}, {%r10, %r10}, {%r10}, {%r12, %r12, %r12, %r12};
    mma.sync.aligned.m16n8k16.row.col.satfinite.s32.u8.u8.s32 {%r24, %r25, %r26, %r27}, {%r10, %r10}, {%r10},
    {%r11, %r11, %r11, %r11};
    mma.sync.aligned.m16n8k16.row.col.s32.u8.u8.s32 {%r28, %r29, %r30, %r31}, {%r10, %r10}, {%r10}, {%r11, %r11, %r11, %r11};
    st.global.u32 [%rd1], %r20; st.global.u32 [%rd1+128], %r24; st.global.u32 [%rd1+256], %r31;"""
    y = np.zeros((3, 32), np.int32)
    run(thread_kernel(body), {"y": y})
    wrapped = (0x7FFFFFFF + 16 * 255 * 255) - (1 << 32)
    assert (y == np.array([-16 * 255, 0x7FFFFFFF, wrapped])[:, None]).all()


def test_consecutive_mma_with_the_same_a_and_a_changed_one() -> None:
    """A fragment that is converted once may not be reused after it was written."""
    body = """mov.u32 %r10, 0x3C003C00; mov.u32 %r11, 0x3C003C00; mov.f32 %r12, 0f00000000;
    mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r20, %r21, %r22, %r23}, {%r10, %r10}, {%r11}, {%r12, %r12, %r12, %r12};
    mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r24, %r25, %r26, %r27}, {%r10, %r10}, {%r11}, {%r20, %r21, %r22, %r23};
    mov.u32 %r10, 0x40004000;
    mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r28, %r29, %r30, %r31}, {%r10, %r10}, {%r11}, {%r24, %r25, %r26, %r27};
    st.global.f32 [%rd1], %r20; st.global.f32 [%rd1+128], %r24; st.global.f32 [%rd1+256], %r28;"""
    y = np.zeros((3, 32), np.float32)
    run(thread_kernel(body), {"y": y})
    assert (y == np.array([8, 16, 32])[:, None]).all()


@pytest.mark.parametrize(
    ("shape", "types", "sums"),
    [
        ("m16n8k8", "f16.f16.f16.f16", "{%r20, %r21}, {%r10, %r10}, {%r10}, {%r21, %r20}"),
        ("m16n8k16", "s32.s8.s8.s32", "{%r20, %r21, %r22, %r23}, {%r10, %r10}, {%r10}, {%r21, %r20, %r23, %r22}"),
        ("m16n8k8", "f32.f16.f16.f32", "{%r20, %r21, %r22, %r23}, {%r10, %r10}, {%r10}, {%r21, %r20, %r23, %r22}"),
    ],
)
def test_sums_in_registers_of_other_addends(shape: str, types: str, sums: str) -> None:
    """All of C is read before D is written: products of zeros exchange the registers."""
    body = f"""mov.u32 %r10, 0; mov.u32 %r20, 0x3C003C00; mov.u32 %r21, 0x40004000; mov.u32 %r22, 0; mov.u32 %r23, 0;
    mma.sync.aligned.{shape}.row.col.{types} {sums};
    st.global.u32 [%rd1], %r20; st.global.u32 [%rd1+128], %r21;"""
    y = np.zeros((2, 32), np.uint32)
    run(thread_kernel(body), {"y": y})
    assert (y == np.array([0x40004000, 0x3C003C00])[:, None]).all()
