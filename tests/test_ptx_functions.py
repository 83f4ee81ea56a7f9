"""Functions of the device, calls that go wrong, limits of a launch, and small opcodes that foreign kernels bring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_ptx_harness import HEAD, apply, compile_cuda, kernel, run

from cupyflash.sim.ptx import Module
from cupyflash.sim.ptx.memory.spaces import Heap

PRINTS = [
    ("%d %i %u", "-3, 7, 4000000000u", "-3 7 4000000000"),
    ("[%5d|%-5d|%05d|%+d]", "42, 42, 42, 42", "[   42|42   |00042|+42]"),
    ("%x %X %#x %o %#o", "255, 255, 255, 8, 8", "ff FF 0xff 10 010"),
    ("%ld %lld %llu %zu", "-5L, 1LL << 40, ~0ULL, sizeof(int)", "-5 1099511627776 18446744073709551615 4"),
    ("%hd %hhu", "70000, 300", "4464 44"),
    ("%f %.2f %8.3f|%e %g", "1.5, 2.675f, 3.14159, 12345.678, 1e-7", "1.500000 2.67    3.142|1.234568e+04 1e-07"),
    ("%s and %5s|%-5s|%.2s", '"one", "two", "two", "three"', "one and   two|two  |th"),
    ("%c%c %p %%", "'h', 'i', (void*)4096", "hi 0x1000 %"),
    ("%*d|%.*f", "6, 42, 1, 2.25", "    42|2.2"),
]


@pytest.mark.parametrize(("form", "values", "want"), PRINTS)
def test_printf(form: str, values: str, want: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = f'extern "C" __global__ void k(int n) {{ if (threadIdx.x < n) printf("{form}\\n", {values}); }}'
    assert compile_cuda(source).launch("k", 1, 32, {"n": 2}).findings == ()
    assert capsys.readouterr().out == f"{want}\n" * 2


def test_a_failed_assertion_says_which() -> None:
    source = """extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, size_t);
    extern "C" __global__ void k(const int* x) { if (x[threadIdx.x] < 0) __assertfail("x >= 0", "mine.cu", 12, "k", 1); }"""
    module = compile_cuda(source)
    assert module.launch("k", 1, 32, [np.zeros(32, np.int32)]).findings == ()
    (finding,) = module.launch("k", 1, 32, [np.arange(-1, 31).astype(np.int32)]).findings
    assert finding.kind == "trap" and "assertion `x >= 0` failed at mine.cu:12" in finding.message and finding.lane == 0


CALLED = HEAD + (
    ".func (.param .b32 r) twice (.param .b32 x) { .reg .b32 %r<2>; ld.param.b32 %r0, [x]; add.u32 %r0, %r0, %r0;"
    " st.param.b32 [r], %r0; ret; }\n.func other (.param .b64 x) { ret; }\n"
    ".global .u64 table[3] = {twice, other, 0};\n"
    ".visible .entry k(.param .u32 which, .param .u64 y) { .reg .b32 %r<4>; .reg .b64 %rd<4>; ld.param.u32 %r0, [which];"
    " mul.wide.u32 %rd0, %r0, 8; mov.u64 %rd1, table; add.u64 %rd1, %rd1, %rd0; ld.global.u64 %rd2, [%rd1];"
    " { .param .b32 a; .param .b32 d; st.param.b32 [a], 21; p: .callprototype (.param .b32 _) _ (.param .b32 _);"
    " call (d), %rd2, (a), p; ld.param.b32 %r1, [d]; } ld.param.u64 %rd3, [y]; st.global.u32 [%rd3], %r1; ret; }\n"
)


@pytest.mark.parametrize(("which", "said"), [(0, ""), (1, "other with other parameters"), (2, "no function")])
def test_calls_through_pointers(which: int, said: str) -> None:
    y = np.zeros(1, np.uint32)
    findings = Module.from_ptx(CALLED).launch("k", 1, 1, {"which": which, "y": y}).findings
    if said:
        assert [f.kind for f in findings] == ["bad call"] and said in findings[0].message
    else:
        assert findings == () and y[0] == 42


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


LIMITS: list[tuple[Any, Any, str]] = [
    ("a", 32, "grid must be one to three positive whole numbers, got 'a'"),
    ((1, 2.5), 32, "grid must be"),
    ((1, 65536), 32, "grid y is at most 65535"),
    (1 << 31, 32, "grid x is at most 2147483647"),
    (1, (1, 1, 65), "block z is at most 64"),
    (1, 1025, "block x is at most 1024"),
    (1, (64, 32), "at most 1024 threads"),
    (0, 32, "grid must be"),
]


@pytest.mark.parametrize(("grid", "block", "message"), LIMITS)
def test_geometry_beyond_a_device_is_refused(grid: Any, block: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Module.from_ptx(kernel("")).launch("k", grid, block, [])


@pytest.mark.parametrize(
    ("directives", "block", "message"),
    [
        (".maxntid 64", (8, 8), None),
        (".maxntid 64", 65, r"a block of k has at most 64 threads \(.maxntid, __launch_bounds__\), got \(65, 1, 1\)"),
        (".maxntid 8, 4", (4, 8), None),
        (".maxntid 8, 4", (4, 9), "at most 32 threads"),
        (".reqntid 32, 2", (32, 2, 1), None),
        (".reqntid 32, 2", 64, r"block must be \(32, 2, 1\), as k is compiled for \(.reqntid\), got \(64, 1, 1\)"),
    ],
)
def test_a_kernel_may_limit_the_threads_of_its_blocks(directives: str, block: Any, message: str | None) -> None:
    module = Module.from_ptx(kernel("").replace("()", f"() {directives}"))
    if message is None:
        assert module.launch("k", 1, block, []).findings == ()
    else:
        with pytest.raises(ValueError, match=message):
            module.launch("k", 1, block, [])


def test_more_arrivals_than_a_phase_waits_for() -> None:
    body = """.shared .align 8 .b64 bar; .reg .b32 %r<2>; .reg .b64 %s; .reg .pred %p; mov.u32 %r0, %tid.x; setp.eq.u32 %p, %r0, 0;
    @%p mbarrier.init.shared.b64 [bar], 3; bar.sync 0; @%p mbarrier.arrive.shared.b64 %s, [bar], 5;"""
    assert [f.kind for f in run(kernel(body), {}).findings] == ["bad arrival"]


@pytest.mark.parametrize("seed", [None, 3])
def test_phases_count_arrivals_and_who_drops_out_is_not_waited_for(seed: int | None) -> None:
    """32 arrivals complete phase 0, of which lanes 16 to 31 leave for good: 16 complete phase 1."""
    body = """.shared .align 8 .b64 bar; .reg .b32 %r<4>; .reg .b64 %s, %at; .reg .pred %p, %q, %d; mov.u32 %r0, %tid.x;
    setp.eq.u32 %p, %r0, 0; @%p mbarrier.init.shared.b64 [bar], 32; bar.sync 0; setp.ge.u32 %q, %r0, 16;
    @%q mbarrier.arrive_drop.shared.b64 %s, [bar]; @!%q mbarrier.arrive.shared.b64 %s, [bar];
    mbarrier.pending_count.b64 %r1, %s; W: mbarrier.try_wait.shared.b64 %d, [bar], %s; @!%d bra W;
    @!%q mbarrier.arrive.shared.b64 %s, [bar]; V: mbarrier.test_wait.parity.shared.b64 %d, [bar], 1; @!%d bra V;
    ld.param.u64 %at, [y]; mad.wide.u32 %at, %r0, 4, %at; st.global.u32 [%at], %r1;"""
    y = np.zeros(32, np.uint32)
    assert run(kernel(body, [".u64 y"]), {"y": y}, seed=seed).findings == ()
    assert sorted(y) == list(range(1, 33))


def test_pairs_of_numbers(rng: np.random.Generator) -> None:
    a, b = rng.integers(0, 1 << 32, (2, 100), dtype=np.uint32)
    body = "add.u16x2 %d0, %a0, %a1; max.s16x2 %d1, %a0, %a1; vabsdiff4.u32.u32.u32.add %d2, %a0, %a1, %a2;"
    d = apply(body, [a, b, np.full_like(a, 7)], [np.uint32] * 3)
    x, y = a.view(np.uint16), b.view(np.uint16)
    away = np.abs(a.view(np.uint8).astype(int) - b.view(np.uint8)).reshape(-1, 4).sum(1) + 7
    assert (
        (d[0] == (x + y).view(np.uint32)).all()
        and (d[1] == np.maximum(x.view(np.int16), y.view(np.int16)).view(np.uint32)).all()
        and (d[2] == away).all()
    )
    body = "vabsdiff2.u32.u32.u32.add %d0, %a0, %a1, %a2; vabsdiff2.u32.s32.s32 %d1, %a0, %a1, %a2;"
    d = apply(body, [a, b, d[2]], [np.uint32] * 2)
    assert (d[0] == np.abs(x.astype(int) - y).reshape(-1, 2).sum(1) + away).all()
    halves = np.abs(x.view(np.int16).astype(int) - y.view(np.int16)).astype(np.uint16)
    assert (d[1] == halves.view(np.uint32)).all()
    p, q, r = (rng.standard_normal((3, 100, 2)).astype(np.float32)).view(np.uint64).reshape(3, 100)
    (out,) = apply("add.rn.f32x2 %d0, %a0, %a1; fma.rn.f32x2 %d0, %d0, %a2, %a0;", [p, q, r], [np.uint64], target="sm_100")
    u, v, w = (z.view(np.float32).astype(float) for z in (p, q, r))
    want = (u.astype(np.float32) + v.astype(np.float32)).astype(float) * w + u
    assert np.abs(out.view(np.float32) - want).max() < 1e-6


def test_reduction_of_floats(rng: np.random.Generator) -> None:
    x = rng.standard_normal(64).astype(np.float32)
    x[3] = np.nan
    body = "redux.sync.max.f32 %d0, %a0, 0xffffffff; redux.sync.min.abs.NaN.f32 %d1, %a0, 0xffffffff;"
    most, least = (d.view(np.float32) for d in apply(body, [x], [np.uint32, np.uint32], target="sm_100a"))
    halves = x.reshape(2, 32)
    assert (most == np.repeat(np.nanmax(halves, 1), 32)).all()
    assert np.isnan(least[:32]).all() and (least[32:] == np.abs(halves[1]).min()).all()


HEAP = """
extern "C" __global__ void grow(int** list, int n) {
    int* mine = list[threadIdx.x] = new int[n];
    for (int i = 0; mine && i < n; i++) mine[i] = i;
}
extern "C" __global__ void sum(int** list, int* out, int first, int end) {
    for (int i = first; i < end; i++) out[threadIdx.x] += list[threadIdx.x][i];
}
extern "C" __global__ void drop(int** list) { delete[] list[threadIdx.x]; }
extern "C" __global__ void bare(int** list, int n) { list[threadIdx.x] = (int*)malloc(n); }
"""


def test_the_heap_stays_between_launches_and_its_faults_are_found() -> None:
    module = compile_cuda(HEAP)
    pointers, out = np.zeros(32, np.uint64), np.zeros(32, np.int32)

    def found(first: int, end: int) -> list[tuple[str, str]]:
        findings = module.launch("sum", 1, 32, [pointers, out, np.int32(first), np.int32(end)]).findings
        return [(one.kind, one.message.partition(": ")[2]) for one in findings]

    assert not module.launch("grow", 1, 32, [pointers, np.int32(10)]).findings
    assert not found(0, 10) and (out == 45).all()
    assert found(10, 11) == [("out of bounds", "offset 40 of 40 bytes that were allocated in 'heap'")]
    assert not module.launch("drop", 1, 32, [pointers]).findings
    assert found(2, 3) == [("out of bounds", "offset 8 of 40 bytes of 'heap' that were freed")]
    (again,) = module.launch("drop", 1, 32, [pointers]).findings
    assert again.kind == "bad call" and "was freed before" in again.message
    assert not module.launch("bare", 1, 32, [pointers, np.int32(4)]).findings
    assert [kind for kind, _ in found(0, 1)] == ["uninitialised"]
    assert not module.launch("bare", 1, 1, [pointers, np.int32(1 << 23)]).findings and pointers[0] == 0


def test_a_heap_uses_its_bytes_again() -> None:
    heap = Heap(1 << 12, spare=1 << 12)
    for _ in range(100):
        places = [heap.allocate(1 << 10) for _ in range(5)]
        assert len({*places}) == 5 and places[4] == 0 and not any(at % 16 for at in places)
        for at in places:
            heap.free(at)
