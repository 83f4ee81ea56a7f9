"""wgmma against its definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from test_ptx_harness import kernel, run

from cupyflash.sim.ptx import Launch, UnsupportedPTX

ml_dtypes = pytest.importorskip("ml_dtypes")

SEEDS = [None, 0, pytest.param(1, marks=pytest.mark.wide)]
BYTES = 1 << 16
DTYPES: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
SWIZZLES = {16: 0, 128: 1, 64: 2, 32: 3}
"""The descriptor's bits by the bytes of a row of the pattern; 16: not swizzled."""


@dataclass(frozen=True)
class Matrix:
    """The layout of a matrix of M or N x K in shared memory: bytes of a pattern's row, the contiguous axis, the first byte."""

    swizzle: int = 128
    k_major: bool = True
    start: int = 0
    leading: int = 0
    stride: int = 1024
    base: int = 0

    def place(self, rows: int, columns: int, size: int) -> np.ndarray:
        """The address of each element, rows along M or N, columns along K: as CuTe's canonical layouts put them."""
        i, k = np.arange(rows)[:, None], np.arange(columns)
        width = self.swizzle
        if self.k_major:
            along = k * size
            if width == 16:
                at = i // 8 * self.stride + along // 16 * self.leading + i % 8 * 16 + along % 16
            else:
                at = i // 8 * self.stride + i % 8 * width + along
        else:
            along = i * size
            inner, outer = (self.leading, self.stride) if width == 16 else (self.stride, self.leading)
            at = along // width * outer + k // 8 * inner + k % 8 * width + along % width
        at = at + self.start
        return at ^ (((at >> 7) - self.base & width // 16 - 1) << 4)

    @property
    def bits(self) -> int:
        offsets = (self.start >> 4) | (self.leading >> 4 << 16) | (self.stride >> 4 << 32)
        return offsets | (self.base << 49) | (SWIZZLES[self.swizzle] << 62)


@dataclass(frozen=True)
class Case:
    """One product: D = sign A B + C, or without C."""

    n: int = 64
    types: tuple[str, str] = ("f16", "f16")
    result: str = "f32"
    a: Matrix | None = Matrix()
    b: Matrix = Matrix(start=32768)
    adds: bool = True
    signs: tuple[int, int] = (1, 1)

    @property
    def k(self) -> int:
        return 32 // np.dtype(DTYPES[self.types[0]]).itemsize

    @property
    def registers(self) -> int:
        return self.n // (2 if self.result == "f32" else 4)

    def instruction(self, a: str = "%rd5", d: str = "%d") -> str:
        immediates = [*map(str, self.signs)]
        if self.types[0] in ("f16", "bf16"):
            immediates += [str(int(not m.k_major)) for m in (self.a, self.b) if m is not None]
        registers = ", ".join(f"{d}{r}" for r in range(self.registers))
        left = a if self.a is not None else "{%a0, %a1, %a2, %a3}"
        kinds = ".".join((self.result, *self.types))
        return f"""wgmma.mma_async.sync.aligned.m64n{self.n}k{self.k}.{kinds} {{{registers}}}, {left}, %rd6, %adds,
        {", ".join(immediates)};"""


FENCE = "wgmma.fence.sync.aligned;"
COMMIT, WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"
PROXY = "fence.proxy.async;"


def program(case: Case, body: str, *, shared: int = BYTES) -> str:
    """x: what shared memory holds, y: D's registers by thread, z: A's; da and db: descriptors; adds: scale-d."""
    count = case.registers
    registers = f""".shared .align 1024 .b8 s[{shared}]; .reg .b64 %rd<20>; .reg .b32 %r<20>; .reg .pred %p<4>; .reg .pred %adds;
    .reg .b32 %d<{count}>; .reg .b32 %e<{count}>; .reg .b32 %a<4>; .reg .b32 %t;"""
    load = "".join(f"ld.global.u32 %d{r}, [%rd2+{4 * r}];" for r in range(count))
    store = "".join(f"st.global.u32 [%rd2+{4 * r}], %d{r};" for r in range(count))
    text = f"""ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.u64 %rd3, [z];
    ld.param.u64 %rd5, [da]; ld.param.u64 %rd6, [db];
    ld.param.u32 %r1, [adds]; setp.ne.u32 %adds, %r1, 0; mov.u32 %t, %tid.x; mov.u32 %r3, s;
    mul.wide.u32 %rd7, %t, {4 * count}; add.s64 %rd2, %rd2, %rd7; mul.wide.u32 %rd7, %t, 16; add.s64 %rd3, %rd3, %rd7;
    ld.global.v4.u32 {{%a0, %a1, %a2, %a3}}, [%rd3]; {load}
    add.s64 %rd8, %rd1, %rd7; shl.b32 %r5, %t, 4; add.u32 %r5, %r5, %r3; add.u32 %r6, %r3, {shared};
    mov.u32 %r13, %ntid.x; shl.b32 %r13, %r13, 4;
    cvt.u64.u32 %rd9, %r13;
    FILL: setp.ge.u32 %p1, %r5, %r6; @%p1 bra FILLED; ld.global.v4.u32 {{%r8, %r9, %r10, %r11}}, [%rd8];
    st.shared.v4.u32 [%r5], {{%r8, %r9, %r10, %r11}}; add.s64 %rd8, %rd8, %rd9; add.u32 %r5, %r5, %r13; bra FILL; FILLED:
    {body} {store}"""
    return kernel(text, [".u64 x", ".u64 y", ".u64 z", ".u64 da", ".u64 db", ".u32 adds"], registers)


def accumulators(d: np.ndarray, result: str) -> np.ndarray:
    """D (64 x N) as (threads, registers): register 4 j + 2 h + e (of float16: half e of register 2 j + h)."""
    t = np.arange(128)
    word = np.float32 if result == "f32" else np.float16
    row = 16 * (t // 32) + t % 32 // 4
    j, h, e = (x.reshape(-1) for x in np.meshgrid(np.arange(d.shape[1] // 8), [0, 1], [0, 1], indexing="ij"))
    found = d[row[:, None] + 8 * h, 8 * j + 2 * (t % 4)[:, None] + e].astype(word)
    return np.ascontiguousarray(found).view(np.uint32)


def fragments(a: np.ndarray) -> np.ndarray:
    """A (64 x K) as (threads, 4 registers): register r is word t + 4 (r / 2) of row g + 8 (r % 2)."""
    words = np.ascontiguousarray(a).view(np.uint32)
    t, r = np.arange(128)[:, None], np.arange(4)
    return np.ascontiguousarray(words[16 * (t // 32) + t % 32 // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)])


@dataclass
class Data:
    """Matrices of a case and the arrays that the kernel gets."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    args: dict[str, Any]


def values(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    found = rng.standard_normal(shape).astype(DTYPES[kind])
    return (found.view(np.uint32) & 0xFFFFE000).view(np.float32) if kind == "tf32" else found


def data(case: Case, seed: int = 0, shared: int = BYTES) -> Data:
    rng = np.random.default_rng(seed)
    a, b = values(rng, case.types[0], (64, case.k)), values(rng, case.types[1], (case.n, case.k))
    c = rng.standard_normal((64, case.n)).astype(np.float32 if case.result == "f32" else np.float16)
    image = rng.integers(0, 255, shared, dtype=np.uint8)
    for matrix, layout in ((a, case.a), (b, case.b)):
        if layout is not None:
            size = matrix.itemsize
            at = layout.place(*matrix.shape, size)
            image[at[..., None] + np.arange(size)] = matrix.view(np.uint8).reshape(*matrix.shape, size)
    args = {
        "x": image.view(np.uint32),
        "y": accumulators(c.astype(np.float32), case.result),
        "z": fragments(a),
        "da": np.uint64(0 if case.a is None else case.a.bits),
        "db": np.uint64(case.b.bits),
        "adds": np.uint32(case.adds),
    }
    return Data(a, b, c, args)


def right(case: Case, found: Data, times: int = 1) -> bool:
    """True if the kernel's D is that of float64."""
    product = case.signs[0] * case.signs[1] * (found.a.astype(np.float64) @ found.b.astype(np.float64).T)
    want = product + (found.c.astype(np.float64) if case.adds else 0)
    for _ in range(times - 1):
        want = want + product
    word = np.float32 if case.result == "f32" else np.float16
    got = found.args["y"].view(word).astype(np.float64)
    t = np.arange(128)
    j, h, e = (x.reshape(-1) for x in np.meshgrid(np.arange(case.n // 8), [0, 1], [0, 1], indexing="ij"))
    laid = want[(16 * (t // 32) + t % 32 // 4)[:, None] + 8 * h, 8 * j + 2 * (t % 4)[:, None] + e]
    bound = 1e-5 if word is np.float32 else 4e-3 * times
    return bool((abs(got - laid) <= bound * (np.abs(laid) + 8)).all())


WHOLE = f"{PROXY} bar.sync 0; {FENCE} MMA {COMMIT} {WAIT}"


def execute(case: Case, body: str = WHOLE, *, seed: int | None = None, block: int = 128, **others: Any) -> tuple[Launch, Data]:
    """Run a body in which MMA stands for the case's instruction."""
    found = data(case, **others)
    launch = run(program(case, body.replace("MMA", case.instruction()), **others), found.args, block=block, seed=seed)
    return launch, found


def check(case: Case, seed: int | None = None) -> None:
    launch, found = execute(case, seed=seed)
    assert launch.findings == () and right(case, found), case
    assert launch.counters.mma_flops == 2 * 64 * case.n * case.k


# -- the product --------------------------------------------------------------------------------------------------------------

FORMS = [
    *((kind, kind, "f32") for kind in DTYPES),
    ("f16", "f16", "f16"),
    ("e4m3", "e5m2", "f32"),
    ("e5m2", "e4m3", "f16"),
]


def of_form(form: tuple[str, str, str], n: int, in_registers: bool) -> Case:
    return Case(n, form[:2], form[2], None if in_registers else Matrix(), Matrix(start=32768))


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_types_and_widths(form: tuple[str, str, str]) -> None:
    for n, in_registers in ((8, False), (40, True), (256, False)):
        check(of_form(form, n, in_registers))


@pytest.mark.wide
@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_every_width(form: tuple[str, str, str]) -> None:
    """All of float16, of the others every fourth, together all."""
    step = 8 if form == ("f16", "f16", "f32") else 32
    for n in range(8 + FORMS.index(form) % 4 * 8 % step, 257, step):
        check(of_form(form, n, n % 16 == 0), seed=n if n % 24 == 0 else None)


def layouts(rows: int, start: int) -> list[Matrix]:
    """Canonical layouts of `rows` x 16 halves with all swizzles and both axes contiguous, with odd strides."""
    found = []
    for width in SWIZZLES:
        step = 0 if width == 16 else 32 * (width // 64)
        found.append(Matrix(width, True, start + step, 128 if width == 16 else 0, 8 * width if width > 16 else 256))
        groups = -(-rows * 2 // width)
        if width == 16:
            found.append(Matrix(16, False, start, leading=128 * groups + 128, stride=128))
        else:
            found.append(Matrix(width, False, start, leading=8 * width * 2, stride=8 * width))
    # Rows of eight further apart, and a pattern that begins in the middle of an aligned one.
    return [*found, Matrix(128, True, start + 96, 0, 2048), Matrix(128, True, start + 256, 0, 1024, base=2)]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_every_swizzle_and_axis(kind: str) -> None:
    for a, b in zip(layouts(64, 0), reversed(layouts(72, 32768)), strict=True):
        check(Case(72, (kind, kind), "f32", a, b))
    check(Case(72, (kind, kind), "f32", None, Matrix(64, False, 32768, 1024, 512)))


@pytest.mark.wide
@pytest.mark.parametrize("n", [8, 104])
def test_every_pair_of_layouts(n: int) -> None:
    for a in layouts(64, 0):
        for b in layouts(n, 16384):
            check(Case(n, a=a, b=b))


@pytest.mark.parametrize("kind", ["tf32", "e4m3"])
def test_swizzles_of_words_and_bytes(kind: str) -> None:
    for a, b in zip(layouts(64, 0), layouts(72, 32768), strict=True):
        if a.k_major:
            check(Case(72, (kind, kind), "f32", a, b))


def test_signs_and_no_addend() -> None:
    for signs in ((1, -1), (-1, 1), (-1, -1)):
        for adds in (True, False):
            for result in ("f32", "f16"):
                check(Case(signs=signs, adds=adds, result=result))
    check(Case(types=("tf32", "tf32"), signs=(-1, 1), a=None))


def test_subnormal_factors_count_where_others_are_flushed() -> None:
    """.ftz is of the instructions that have it: a kernel that has hardly any others multiplies subnormal halves all the same."""
    case = Case(a=None, adds=False)
    found = data(case)
    small = (found.a * 2.0**-18).astype(np.float16)
    found.args["z"], found.a = fragments(small), small.astype(np.float64) * 2.0**18
    flushing = "add.ftz.f32 %e0, %d0, %d1; mul.ftz.f32 %e1, %d0, %d1;"
    launch = run(program(case, flushing + WHOLE.replace("MMA", case.instruction())), found.args, block=128)
    found.args["y"] = found.args["y"].view(np.float32) * np.float32(2.0**18)
    assert launch.findings == () and right(case, found)


@pytest.mark.parametrize("seed", SEEDS)
def test_products_of_a_chain_run_in_order(seed: int | None) -> None:
    """Four to the same registers in two groups, of all of which only the last is waited for; two more behind a fence."""
    body = f"{PROXY} bar.sync 0; {FENCE} MMA MMA {COMMIT} MMA {COMMIT} MMA {COMMIT} {WAIT} {FENCE} MMA MMA {COMMIT} {WAIT}"
    for case in (Case(), Case(a=None), Case(result="f16"), Case(signs=(1, -1))):
        launch, found = execute(case, body, seed=seed)
        assert launch.findings == () and right(case, found, times=6)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_product_that_adds_nothing_ends_what_was_before(seed: int | None) -> None:
    case = Case()
    alone = case.instruction().replace("%adds", "%p3")
    body = f"setp.ne.u32 %p3, %r3, %r3; {PROXY} bar.sync 0; {FENCE} MMA MMA {COMMIT} {alone} MMA {COMMIT} {WAIT}"
    launch, found = execute(case, body, seed=seed)
    found.c[:] = 0
    assert launch.findings == () and right(case, found, times=2)


@pytest.mark.parametrize("seed", SEEDS)
def test_several_warpgroups_and_blocks(seed: int | None) -> None:
    case, found = Case(), data(Case())
    found.args |= {name: np.concatenate([found.args[name]] * 3) for name in "yz"}
    text = program(case, WHOLE.replace("MMA", case.instruction()))
    launch = run(text, found.args, block=384, seed=seed)
    parts = found.args["y"].reshape(3, 128, -1)
    assert launch.findings == ()
    for part in parts:
        found.args["y"] = part
        assert right(case, found)


@pytest.mark.parametrize("seed", SEEDS)
def test_warpgroups_that_issue_in_turn_and_wait_together(seed: int | None) -> None:
    """One wait for the older groups of both, when the newer group of the first is older than that of the second."""
    case, found = Case(), data(Case())
    found.args |= {name: np.concatenate([found.args[name]] * 2) for name in "yz"}
    other = case.instruction(d="%e").replace("%adds", "%p3")
    body = f"""setp.lt.u32 %p2, %t, 128; setp.ne.u32 %p3, %r3, %r3; {PROXY} bar.sync 0; @!%p2 bar.sync 1, 256;
    {FENCE} {other} {COMMIT} {case.instruction()} {COMMIT} @%p2 bar.arrive 1, 256;
    {WAIT.replace("0;", "1;")} {WAIT}"""
    launch = run(program(case, body), found.args, block=256, seed=seed)
    assert launch.findings == ()
    for part in found.args["y"].reshape(2, 128, -1):
        found.args["y"] = part
        assert right(case, found)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("m64n64k32.s32.s8.s8 {D}, %rd5, %rd6, %adds", "integers"),
        ("sp.m64n64k32.f32.f16.f16 {D}, %rd5, %rd6, %t, 0, %adds, 1, 1, 0, 0", "sparse"),
        ("m64n60k16.f32.f16.f16 {D}, %rd5, %rd6, %adds, 1, 1, 0, 0", "m64n60k16"),
        ("m64n264k16.f32.f16.f16 {D}, %rd5, %rd6, %adds, 1, 1, 0, 0", "m64n264k16"),
        ("m64n64k16.f16.bf16.bf16 {D}, %rd5, %rd6, %adds, 1, 1, 0, 0", "f16.bf16.bf16"),
        ("m64n64k8.f32.tf32.tf32 {D}, %rd5, %rd6, %adds, 1, 1, 1, 0", "immediates"),
        ("m64n64k16.f32.f16.f16 {D}, %rd5, %rd6, %adds, 2, 1, 0, 0", "immediates"),
        ("m64n72k16.f32.f16.f16 {D}, %rd5, %rd6, %adds, 1, 1, 0, 0", "expected 36 registers"),
    ],
)
def test_other_forms_are_refused(text: str, reason: str) -> None:
    registers = ", ".join(f"%d{r}" for r in range(32))
    with pytest.raises(UnsupportedPTX, match=reason):
        run(program(Case(), "wgmma.mma_async.sync.aligned." + text.replace("{D}", f"{{{registers}}}") + ";"), {})
