"""Control flow: divergence, loops, calls, barriers, deadlocks, schedules, waves."""

from __future__ import annotations

import numpy as np
import pytest
from test_ptx_harness import HEAD, apply, compile_cuda, kernel, run

from cupyflash.sim.ptx import Module, UnsupportedPTX
from cupyflash.sim.ptx.execute import ptx_machine
from suites import sample, wide

REGISTERS = ".reg .b64 %rd<20>; .reg .b32 %r<20>; .reg .pred %p<6>;"
ORDERS = [None, *range(8)]
SEEDS = sample(ORDERS, ORDERS[:3])


def y_kernel(body: str, *, head: str = "", parameters: tuple[str, ...] = (".u64 y",)) -> str:
    """%r1 is the thread in its block, %r2 the block, %r3 the global thread, %rd1 the place of its u32 in y."""
    prologue = """ld.param.u64 %rd1, [y]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r4, %ntid.x;
    mad.lo.u32 %r3, %r2, %r4, %r1; mad.wide.u32 %rd1, %r3, 4, %rd1;
    """
    return kernel(prologue + body, parameters, REGISTERS).replace(HEAD, HEAD + head)


@pytest.mark.parametrize("seed", SEEDS)
def test_loops_with_trip_counts_of_their_own(seed: int | None) -> None:
    body = """and.b32 %r5, %r3, 31; mov.u32 %r6, 0; mov.u32 %r7, 0;
    HEAD: setp.ge.u32 %p1, %r6, %r5; @%p1 bra DONE; add.u32 %r6, %r6, 1;
    and.b32 %r8, %r6, 1; setp.eq.u32 %p2, %r8, 0; @%p2 bra EVEN; add.u32 %r7, %r7, 100; bra HEAD;
    EVEN: add.u32 %r7, %r7, 1; bra.uni HEAD;
    DONE: st.global.u32 [%rd1], %r7;"""
    y = np.zeros(96 * 3, np.uint32)
    run(y_kernel(body), {"y": y}, grid=3, block=96, seed=seed)
    n = np.arange(96 * 3) % 32
    assert (y == (n + 1) // 2 * 100 + n // 2).all()


def test_diverged_lanes_meet_again() -> None:
    # If they did not run together after the join, the rest would count more than once a warp.
    body = (
        """setp.lt.u32 %p1, %r1, 7; @%p1 bra A; add.u32 %r5, %r1, 1; bra B; A: add.u32 %r5, %r1, 2;
        B: """
        + "add.u32 %r5, %r5, 1;" * 50
    )
    y = np.zeros(32, np.uint32)
    launch = run(y_kernel(body + "st.global.u32 [%rd1], %r5;"), {"y": y})
    assert launch.counters.by_opcode["add"] == 52 and launch.traffic["y"].write_requests == 1
    assert (y == np.arange(32) + 51 + (np.arange(32) < 7)).all()


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_predicated_write_on_a_diverged_path_keeps_the_old_value(seed: int | None) -> None:
    body = """add.u32 %r5, %r1, 1000; setp.lt.u32 %p1, %r1, 9; setp.lt.u32 %p2, %r1, 4; @!%p1 bra END;
    @%p2 add.u32 %r5, %r1, 2000; END: st.global.u32 [%rd1], %r5;"""
    y = np.zeros(32, np.uint32)
    run(y_kernel(body), {"y": y}, seed=seed)
    lane = np.arange(32)
    assert (y == lane + np.where(lane < 4, 2000, 1000)).all()


def test_early_exit_and_partial_warps() -> None:
    y = np.full(130, 9, np.uint32)
    run(y_kernel("setp.gt.u32 %p1, %r1, 40; @%p1 exit; st.global.u32 [%rd1], %r1;"), {"y": y}, grid=2, block=65)
    lane = np.arange(65)
    assert (y == np.tile(np.where(lane > 40, 9, lane), 2)).all()


def test_branch_table() -> None:
    body = """rem.u32 %r5, %r1, 3; TABLE: .branchtargets A, B, C; brx.idx %r5, TABLE;
    A: mov.u32 %r6, 10; bra D; B: mov.u32 %r6, 20; bra D; C: mov.u32 %r6, 30; D: st.global.u32 [%rd1], %r6;"""
    y = np.zeros(32, np.uint32)
    run(y_kernel(body), {"y": y})
    assert (y == 10 * (np.arange(32) % 3 + 1)).all()


def test_scoped_registers_and_labels() -> None:
    body = """mov.u32 %r5, 1;
    { .reg .b32 t; .reg .pred p; mov.u32 t, 5; setp.eq.u32 p, %r1, 3; @p bra OUT; add.u32 %r5, %r5, t; OUT: }
    { .reg .b64 t; .reg .pred p; mov.u64 t, 7; cvt.u32.u64 %r6, t; setp.eq.u32 p, %r1, 4; @p bra OUT;
    add.u32 %r5, %r5, %r6; OUT: }
    st.global.u32 [%rd1], %r5;"""
    y = np.zeros(32, np.uint32)
    run(y_kernel(body), {"y": y})
    lane = np.arange(32)
    assert (y == 1 + 5 * (lane != 3) + 7 * (lane != 4)).all()


def test_grids_and_blocks_of_three_dimensions() -> None:
    names = [f"%{n}.{a}" for n in ("tid", "ntid", "ctaid", "nctaid") for a in "xyz"]
    body = "".join(f"mov.u32 %r{5 + k % 2}, {n}; st.global.u32 [%rd2+{4 * k}], %r{5 + k % 2};" for k, n in enumerate(names))
    prologue = """mov.u32 %r10, %tid.z; mov.u32 %r11, %ntid.y; mov.u32 %r12, %tid.y; mad.lo.u32 %r10, %r10, %r11, %r12;
    mov.u32 %r11, %ntid.x; mov.u32 %r12, %tid.x; mad.lo.u32 %r10, %r10, %r11, %r12;
    mov.u32 %r13, %ctaid.z; mov.u32 %r14, %nctaid.y; mov.u32 %r15, %ctaid.y; mad.lo.u32 %r13, %r13, %r14, %r15;
    mov.u32 %r14, %nctaid.x; mov.u32 %r15, %ctaid.x; mad.lo.u32 %r13, %r13, %r14, %r15; mad.lo.u32 %r13, %r13, 30, %r10;
    ld.param.u64 %rd3, [y]; mad.wide.u32 %rd2, %r13, 48, %rd3;"""
    y = np.zeros((2, 3, 4, 2, 3, 5, 12), np.uint32)
    run(y_kernel(prologue + body), {"y": y}, grid=(4, 3, 2), block=(5, 3, 2))
    for at in np.ndindex(y.shape[:-1]):
        cz, cy, cx, tz, ty, tx = at
        assert y[at].tolist() == [tx, ty, tz, 5, 3, 2, cx, cy, cz, 4, 3, 2]


def test_lane_and_warp_registers() -> None:
    names = ["laneid", "warpid", "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_gt", "lanemask_ge"]
    y = np.zeros((len(names), 64), np.uint32)
    body = "".join(f"mov.u32 %r5, %{n}; st.global.u32 [%rd1+{256 * k}], %r5;" for k, n in enumerate(names))
    run(y_kernel(body), {"y": y}, block=64)
    lane = np.arange(64) % 32
    bit = 1 << lane
    full = 0xFFFFFFFF
    want = [lane, np.arange(64) // 32, bit, bit - 1, 2 * bit - 1, full & ~(2 * bit - 1), full & ~(bit - 1)]
    assert (y == np.array(want)).all()


def test_clock_only_grows() -> None:
    body = """mov.u32 %r5, %clock; mov.u64 %rd5, %clock64; mov.u64 %rd6, %clock64; sub.u64 %rd6, %rd6, %rd5;
        st.global.u32 [%rd1], %rd6;"""
    y = np.zeros(32, np.uint32)
    run(y_kernel(body), {"y": y})
    assert (y > 0).all() and (y < 1 << 31).all()


# -- functions ----------------------------------------------------------------------------------------------------------

FUNCTIONS = """.func (.param .b32 result) inner (.param .b32 x, .param .align 8 .b8 pair[8])
{ .reg .b32 %r<4>; .reg .pred %p1; ld.param.b32 %r1, [x]; ld.param.b32 %r2, [pair+4]; setp.lt.u32 %p1, %r1, 10; @%p1 bra SMALL;
add.u32 %r3, %r1, %r2; st.param.b32 [result], %r3; ret;
SMALL: st.param.b32 [result], 1000; ret; }
.func (.param .b32 result) outer (.param .b32 x)
{ .reg .b32 %r<4>; ld.param.b32 %r1, [x];
{ .param .b32 a; .param .align 8 .b8 b[8]; .param .b32 r; st.param.b32 [a], %r1; st.param.v2.b32 [b], {%r1, 50};
call.uni (r), inner, (a, b); ld.param.b32 %r2, [r]; }
add.u32 %r2, %r2, %r1; st.param.b32 [result], %r2; ret; }
"""


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_calls_of_device_functions(seed: int | None) -> None:
    call = "{{ .param .b32 a; .param .b32 r; st.param.b32 [a], {x}; call (r), outer, (a); ld.param.b32 {d}, [r]; }}"
    body = f"""mov.u32 %r3, %r1; setp.lt.u32 %p1, %r1, 16; @%p1 bra A;
    {call.format(x="%r3", d="%r5")} bra B;
    A: add.u32 %r6, %r3, 100; {call.format(x="%r6", d="%r5")}
    B: add.u32 %r5, %r5, %r3; st.global.u32 [%rd1], %r5;"""
    y = np.zeros(32, np.uint32)
    assert run(y_kernel(body, head=FUNCTIONS), {"y": y}, seed=seed).findings == ()

    def outer(x: int) -> int:
        return (1000 if x < 10 else x + 50) + x

    assert y.tolist() == [outer(k + 100) + k if k < 16 else outer(k) + k for k in range(32)]


def test_endless_recursion_overflows_the_stack() -> None:
    loop = ".func loop () { call.uni loop; ret; }\n"
    launch = run(y_kernel("call.uni loop;", head=loop), {"y": np.zeros(32, np.uint32)})
    assert [f.kind for f in launch.findings] == ["stack overflow"]


def test_recursion_with_local_arrays_and_unknown_functions_are_refused() -> None:
    loop = ".func loop () { .local .b8 own[8]; call.uni loop; ret; }\n"
    with pytest.raises(UnsupportedPTX, match="recursion of a function with local arrays"):
        run(y_kernel("call.uni loop;", head=loop), {"y": np.zeros(32, np.uint32)})
    with pytest.raises(UnsupportedPTX, match="vprintf has no body"):
        Module.from_ptx(y_kernel("call.uni vprintf;", head=".extern .func vprintf ();\n"))


SHAPES = """struct Shape { __device__ virtual int area(int* found, int depth) const = 0; };
struct Square : Shape { int a; __device__ Square(int a) : a(a) {}
    __device__ int area(int* found, int depth) const override { found[a & 7] += a * a; return a * a; } };
struct List : Shape { const Shape* parts[2];
    __device__ int area(int* found, int depth) const override {
        int own[8] = {}, sum = 0;
        for (int k = 0; k < 2; k++) sum += parts[k]->area(own, depth + 1);
        for (int k = 0; k < 8; k++) found[(k + sum) & 7] += own[k];
        return sum; } };
extern "C" __global__ void k(int* y, int nested) {
    Square one(threadIdx.x), two(3); List list, around; int found[8] = {};
    list.parts[0] = &one; list.parts[1] = &two; around.parts[0] = &one; around.parts[1] = &list;
    const Shape* shape = nested ? (const Shape*)&around : &list;
    int sum = shape->area(found, 0);
    for (int k = 0; k < 8; k++) sum += found[k] << k;
    y[threadIdx.x] = sum; }"""


def test_a_call_through_a_pointer_may_go_to_its_own_function_but_does_not() -> None:
    """A list of shapes is a shape: only one that has a list in it would need its local array twice, and is refused by name."""
    module, y = compile_cuda(SHAPES), np.zeros(32, np.int32)
    assert not module.launch("k", 1, 32, [y, 0]).findings

    def area(a: int) -> int:
        own = [0] * 8
        own[a & 7] += a * a
        own[3] += 9
        sum_ = a * a + 9
        return sum_ + sum(own[k] << ((k + sum_) & 7) for k in range(8))

    assert y.tolist() == [area(a) for a in range(32)]
    with pytest.raises(UnsupportedPTX, match="recursion of a function with local arrays"):
        module.launch("k", 1, 32, [y, 1])


def test_recursion_writes_to_an_array_of_its_caller() -> None:
    source = """__device__ __noinline__ int fill(volatile int* a, int n) {
        if (n == 0) return 1;
        a[n - 1] = n;
        int below = fill(a, n - 1);
        return below + a[n - 1]; }
    extern "C" __global__ void k(int* y, int n) {
        volatile int own[8] = {};
        int sum = fill(own, n);
        for (int j = 0; j < 8; j++) sum += 100 * own[j];
        y[threadIdx.x] = sum; }"""
    y = np.zeros(32, np.int32)
    assert not compile_cuda(source).launch("k", 1, 32, [y, 5]).findings
    assert (y == 1 + 15 + 1500).all()


def test_trap_stops_the_launch() -> None:
    y = np.zeros(64, np.uint32)
    launch = run(y_kernel("setp.eq.u32 %p1, %r3, 40; @%p1 trap; st.global.u32 [%rd1], 1;"), {"y": y}, grid=2)
    assert [(f.kind, f.block, f.lane) for f in launch.findings] == [("trap", 1, 8)]


# -- barriers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_barrier_orders_warps(seed: int | None) -> None:
    """Each round every thread writes its slot and reads its neighbour's in the next warp, with two barriers a round."""
    body = """.shared .align 4 .b8 s[512]; shl.b32 %r5, %r1, 2; mov.u32 %r6, s; add.u32 %r7, %r6, %r5;
    add.u32 %r8, %r1, 32; and.b32 %r8, %r8, 127; shl.b32 %r8, %r8, 2; add.u32 %r8, %r6, %r8; mov.u32 %r9, 0; mov.u32 %r10, %r3;
    LOOP: st.shared.u32 [%r7], %r10; bar.sync 0; ld.shared.u32 %r11, [%r8]; bar.sync 0; add.u32 %r10, %r11, 1;
    add.u32 %r9, %r9, 1; setp.lt.u32 %p1, %r9, 5; @%p1 bra LOOP; st.global.u32 [%rd1], %r10;"""
    y = np.zeros(256, np.uint32)
    launch = run(y_kernel(body), {"y": y}, grid=2, block=128, seed=seed)
    start = np.arange(256).reshape(2, 128)
    assert launch.findings == () and (y.reshape(2, 128) == np.roll(start, -160, axis=1) + 5).all()
    assert launch.counters.barriers == 20


def test_a_missing_barrier_shows_under_some_seed() -> None:
    body = """.shared .align 4 .b8 s[512]; shl.b32 %r5, %r1, 2; mov.u32 %r6, s; add.u32 %r7, %r6, %r5;
    add.u32 %r8, %r1, 32; and.b32 %r8, %r8, 127; shl.b32 %r8, %r8, 2; add.u32 %r8, %r6, %r8;
    st.shared.u32 [%r7], %r1; ld.shared.u32 %r11, [%r8]; st.global.u32 [%rd1], %r11;"""
    kinds = set()
    for seed in range(8):
        launch = run(y_kernel(body), {"y": np.zeros(128, np.uint32)}, block=128, seed=seed)
        assert "race" in {f.kind for f in launch.findings}
        kinds |= {f.kind for f in launch.findings}
    assert kinds == {"uninitialised", "race"}


@pytest.mark.parametrize("seed", SEEDS)
def test_producer_and_consumer_with_named_barriers(seed: int | None) -> None:
    """Warp 0 produces, warp 1 consumes: barrier 1 says full, barrier 2 says empty (the ISA's own example)."""
    body = """.shared .align 4 .b8 s[128]; and.b32 %r5, %r1, 31; shl.b32 %r5, %r5, 2; mov.u32 %r6, s; add.u32 %r6, %r6, %r5;
    mov.u32 %r7, 0; mov.u32 %r8, 0; setp.ge.u32 %p1, %r1, 32; @%p1 bra CONSUMER;
    PRODUCER: add.u32 %r9, %r7, %r1; st.shared.u32 [%r6], %r9; bar.arrive 1, 64; bar.sync 2, 64;
    add.u32 %r7, %r7, 1; setp.lt.u32 %p2, %r7, 6; @%p2 bra PRODUCER; ret;
    CONSUMER: bar.sync 1, 64; ld.shared.u32 %r9, [%r6]; add.u32 %r8, %r8, %r9; bar.arrive 2, 64;
    add.u32 %r7, %r7, 1; setp.lt.u32 %p2, %r7, 6; @%p2 bra CONSUMER; st.global.u32 [%rd1], %r8;"""
    y = np.zeros(64, np.uint32)
    launch = run(y_kernel(body), {"y": y}, block=64, seed=seed)
    assert launch.findings == () and (y[32:] == 15 + 6 * np.arange(32)).all() and not y[:32].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_warp_that_arrives_and_then_waits_counts_twice(seed: int | None) -> None:
    """Two warps take turns; the first gives itself its first turn, as ping-pong kernels do."""
    body = """.shared .align 4 .b8 s[4]; mov.u32 %r7, 0; setp.ge.u32 %p1, %r1, 32; @%p1 bra SECOND;
    st.shared.u32 [s], 0; bar.arrive 1, 64;
    FIRST: bar.sync 1, 64; ld.shared.u32 %r5, [s]; bar.warp.sync -1; add.u32 %r5, %r5, 1; st.shared.u32 [s], %r5; bar.arrive 2, 64;
    add.u32 %r7, %r7, 1; setp.lt.u32 %p2, %r7, 3; @%p2 bra FIRST; bra OUT;
    SECOND: bar.sync 2, 64; ld.shared.u32 %r5, [s]; bar.warp.sync -1; mul.lo.u32 %r5, %r5, 10;
    st.shared.u32 [s], %r5; bar.arrive 1, 64;
    add.u32 %r7, %r7, 1; setp.lt.u32 %p2, %r7, 3; @%p2 bra SECOND;
    OUT: st.global.u32 [%rd1], %r5;"""
    y = np.zeros(64, np.uint32)
    launch = run(y_kernel(body), {"y": y}, block=64, seed=seed)
    assert launch.findings == () and (y[:32] == 111).all() and (y[32:] == 1110).all(), (launch.findings, y)


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_barrier_reductions(seed: int | None) -> None:
    body = """setp.lt.u32 %p1, %r1, 50; bar.red.popc.u32 %r5, 0, %p1; bar.red.and.pred %p2, 0, !%p1;
    bar.red.or.pred %p3, 0, %p1;
    selp.u32 %r6, 1000, 0, %p2; selp.u32 %r7, 2000, 0, %p3; add.u32 %r5, %r5, %r6; add.u32 %r5, %r5, %r7;
    st.global.u32 [%rd1], %r5;"""
    y = np.zeros(192, np.uint32)
    run(y_kernel(body), {"y": y}, grid=2, block=96, seed=seed)
    assert (y == 2050).all()


def test_on_barrier_sees_memory_between_the_steps() -> None:
    body = "st.global.u32 [%rd1], 1; bar.sync 0; st.global.u32 [%rd1], 2; barrier.cta.sync.aligned 0; st.global.u32 [%rd1], 3;"
    y = np.zeros(128, np.uint32)
    seen: list[tuple[int, int, list[int]]] = []
    run(
        y_kernel(body),
        {"y": y},
        grid=2,
        block=64,
        on_barrier=lambda b, n: seen.append((b, n, sorted(set(y[64 * b : 64 * b + 64].tolist())))),
    )
    assert seen == [(0, 1, [1]), (1, 1, [1]), (0, 2, [2]), (1, 2, [2])]


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_barrier_that_can_never_complete(seed: int | None) -> None:
    body = ".loc 1 7 1\nsetp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 1; ret; A: bar.sync 2; ret;"
    launch = run(y_kernel(body) + '.file 1 "d.cu"\n', {"y": np.zeros(64, np.uint32)}, block=64, seed=seed)
    assert {(f.kind, f.source, f.warp) for f in launch.findings} == {("deadlock", ("d.cu", 7), 0), ("deadlock", ("d.cu", 7), 1)}
    assert "32 of 64 have arrived" in launch.findings[0].message


@pytest.mark.parametrize("seed", SEEDS)
def test_a_warp_counts_when_all_of_its_lanes_have_arrived(seed: int | None) -> None:
    """Half of warp 0 comes late, and writes before it arrives; warp 1 reads behind the barrier."""
    body = """.shared .align 4 .b8 s[4]; setp.ge.u32 %p1, %r1, 32; @%p1 bra READER; setp.ge.u32 %p2, %r1, 16; @%p2 bra LATE;
    barrier.sync 1, 64; ret;
    READER: barrier.sync 1, 64; ld.shared.u32 %r5, [s]; st.global.u32 [%rd1], %r5; ret;
    LATE: mov.u32 %r6, 0; WORK: add.u32 %r6, %r6, 1; setp.lt.u32 %p3, %r6, 50; @%p3 bra WORK;
    st.shared.u32 [s], %r6; barrier.sync 1, 64;"""
    y = np.zeros(64, np.uint32)
    launch = run(y_kernel(body), {"y": y}, block=64, seed=seed)
    assert launch.findings == () and (y[32:] == 50).all()


def test_counted_barrier_that_waits_for_too_many() -> None:
    launch = run(y_kernel("bar.sync 3, 128;"), {"y": np.zeros(64, np.uint32)}, block=64)
    assert [f.kind for f in launch.findings] == ["deadlock"] and "barrier 3: 64 of 128" in launch.findings[0].message


@pytest.mark.parametrize(("threads", "words"), [(1, "1 thread waits at"), (2, "2 threads wait at")])
def test_findings_count_in_words_that_fit(threads: int, words: str) -> None:
    launch = run(kernel("bar.sync 3, 64;"), {}, block=threads)
    assert [f.kind for f in launch.findings] == ["deadlock"] and launch.findings[0].message.startswith(words)
    text = kernel("ld.param.u64 %at, [x]; ld.global.u8 %v, [%at+1];", [".u64 x"], ".reg .b64 %at; .reg .b16 %v;")
    (finding,) = run(text, {"x": np.zeros(1, np.uint8)}, block=1).findings
    assert "read of 1 byte at" in finding.message and finding.message.endswith("which has 1 byte")


def test_barrier_after_others_have_exited_completes_with_a_finding() -> None:
    body = "setp.ge.u32 %p1, %r1, 40; @%p1 ret; bar.sync 0; st.global.u32 [%rd1], 1;"
    y = np.zeros(64, np.uint32)
    launch = run(y_kernel(body), {"y": y}, block=64)
    assert [f.kind for f in launch.findings] == ["partial barrier"] and "24 of 64" in launch.findings[0].message
    assert y.sum() == 40


def test_barriers_that_others_wait_in_complete_when_the_missing_threads_exit() -> None:
    """The waiting side stands first, so that it has arrived before the others leave."""
    for wait, kinds in (("bar.sync 0;", ["partial barrier"]), ("bar.warp.sync 0xffffffff;", [])):
        body = f"""setp.ge.u32 %p1, %r1, 20; @%p1 bra LEAVE; {wait} st.global.u32 [%rd1], 1; ret;
        LEAVE: mov.u32 %r6, 0; WORK: add.u32 %r6, %r6, 1; setp.lt.u32 %p3, %r6, 9; @%p3 bra WORK; ret;"""
        y = np.zeros(32, np.uint32)
        launch = run(y_kernel(body), {"y": y})
        assert [f.kind for f in launch.findings] == kinds and y.sum() == 20


@pytest.mark.parametrize("seed", SEEDS)
def test_warp_barrier_orders_lanes_of_a_warp_on_different_paths(seed: int | None) -> None:
    body = """.shared .align 4 .b8 s[4]; setp.eq.u32 %p1, %r1, 5; @%p1 bra WRITER; bar.warp.sync 0xffffffff; bra JOIN;
    WRITER: st.shared.u32 [s], 77; bar.warp.sync 0xffffffff; JOIN: ld.shared.u32 %r5, [s]; st.global.u32 [%rd1], %r5;"""
    y = np.zeros(32, np.uint32)
    launch = run(y_kernel(body), {"y": y}, seed=seed)
    assert launch.findings == () and (y == 77).all()


def test_warp_barrier_for_lanes_that_never_come() -> None:
    body = "setp.lt.u32 %p1, %r1, 16; @%p1 bra A; bar.warp.sync 0xffffffff; ret; A: bar.sync 0; ret;"
    launch = run(y_kernel(body), {"y": np.zeros(32, np.uint32)})
    assert {f.kind for f in launch.findings} == {"deadlock"} and any("0xffffffff" in f.message for f in launch.findings)


# -- schedules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [wide(None), 0, wide(1), wide(2)])
def test_spin_on_a_flag_of_another_warp(seed: int | None) -> None:
    body = """.shared .align 4 .b8 s[8]; setp.ne.u32 %p1, %r1, 0; @%p1 bra A; st.shared.u32 [s], 0; A: bar.sync 0;
    setp.ge.u32 %p1, %r1, 32; @%p1 bra SETTER;
    SPIN: ld.volatile.shared.u32 %r5, [s]; setp.eq.u32 %p2, %r5, 0; @%p2 bra SPIN; st.global.u32 [%rd1], %r5; ret;
    SETTER: mov.u32 %r6, 0; WORK: add.u32 %r6, %r6, 1; setp.lt.u32 %p3, %r6, 200; @%p3 bra WORK;
    st.volatile.shared.u32 [s], %r6;"""
    y = np.zeros(64, np.uint32)
    run(y_kernel(body), {"y": y}, block=64, seed=seed)
    assert (y[:32] == 200).all()


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_lock_between_lanes_of_one_warp(seed: int | None) -> None:
    body = """ld.param.u64 %rd2, [lock];
    TRY: atom.global.cas.b32 %r5, [%rd2], 0, 1; setp.ne.u32 %p1, %r5, 0; @%p1 bra TRY;
    ld.volatile.global.u32 %r6, [%rd2+4]; add.u32 %r6, %r6, %r1; st.volatile.global.u32 [%rd2+4], %r6;
    atom.global.exch.b32 %r5, [%rd2], 0;"""
    lock = np.zeros(2, np.uint32)
    run(y_kernel(body, parameters=(".u64 y", ".u64 lock")), {"y": np.zeros(16, np.uint32), "lock": lock}, block=16, seed=seed)
    assert lock[1] == sum(range(16))


def test_waves_of_blocks() -> None:
    body = """.shared .align 4 .b8 s[4]; atom.shared.inc.u32 %r5, [s], 1000; bar.sync 0; mov.u32 %r5, %r2;
    st.global.u32 [%rd1], %r5;"""
    init = "setp.ne.u32 %p1, %r1, 0; @%p1 bra GO; st.shared.u32 [s], 0; GO: bar.sync 0;"
    body = body.replace("atom", init + "atom", 1)
    y = np.zeros(1000 * 32, np.uint32)
    launch = run(y_kernel(body), {"y": y}, grid=1000)
    assert launch.findings == () and (y == np.repeat(np.arange(1000), 32)).all()
    assert launch.counters.waves == -(-1000 * 32 // ptx_machine.WAVE_LANES) > 1


def test_blocks_that_may_wait_for_each_other_are_resident_together() -> None:
    """The first block waits for a flag of the last one, far beyond the ordinary size of a wave."""
    body = """ld.param.u64 %rd2, [y]; setp.eq.u32 %p1, %r2, 0; @%p1 bra SPIN; setp.ne.u32 %p1, %r2, 299; @%p1 bra END;
    st.volatile.global.u32 [%rd2], 7; ret;
    SPIN: ld.volatile.global.u32 %r5, [%rd2]; setp.eq.u32 %p2, %r5, 0; @%p2 bra SPIN; st.global.u32 [%rd1+128], %r5; END:"""
    y = np.zeros(300 * 32, np.uint32)
    launch = run(y_kernel(body), {"y": y}, grid=300)
    assert launch.counters.waves == 1 and (y[32:64] == 7).all() and ptx_machine.WAVE_LANES < 300 * 32


def test_a_body_may_end_without_a_return() -> None:
    text = y_kernel(
        "setp.eq.u32 %p1, %r1, 3; @%p1 bra END; call.uni other; st.global.u32 [%rd1], %r1; END:", head=".func other () { }\n"
    )
    text = text.replace("ret;\n}", "}")
    y = np.zeros(32, np.uint32)
    assert run(text, {"y": y}).findings == () and (y == np.where(np.arange(32) == 3, 0, np.arange(32))).all()


def test_callback_runs_in_the_ordinary_floating_point_environment() -> None:
    seen = []
    tiny = np.full(8, 1e-40, np.float32)
    body = """.reg .f32 %f1; mov.f32 %f1, 0f3F800000; add.ftz.f32 %f1, %f1, %f1; bar.sync 0;
    add.ftz.f32 %f1, %f1, 0f00000001; st.global.f32 [%rd1], %f1;"""
    y = np.zeros(32, np.float32)
    run(y_kernel(body), {"y": y}, on_barrier=lambda block, count: seen.append((tiny * np.float32(1)).any()))
    assert seen == [True] and (y == 2).all()


def test_shared_memory_is_fresh_in_every_wave() -> None:
    body = "bar.sync 0; ld.shared.u32 %r5, [s]; bar.sync 0; st.shared.u32 [s], 1;"
    launch = run(y_kernel(".shared .align 4 .b8 s[4];" + body), {"y": np.zeros(1, np.uint32)}, grid=1000)
    assert launch.findings_total == 32000


SUM = """extern "C" __global__ void total(const float* x, float* y, int n) {
    __shared__ float part[8];
    float s = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) s += x[blockIdx.x * n + i];
    for (int k = 16; k; k /= 2) s += __shfl_xor_sync(~0u, s, k);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
    __syncthreads();
    if (threadIdx.x == 0) { float t = 0; for (int w = 0; w < blockDim.x / 32; ++w) t += part[w]; y[blockIdx.x] = t; }
}"""


def test_kernels_without_atomics_give_the_same_bits_for_every_seed() -> None:
    module = compile_cuda(SUM)
    x = np.random.default_rng(0).standard_normal((5, 1000)).astype(np.float32)
    results = []
    for seed in ORDERS:
        y = np.zeros(5, np.float32)
        launch = module.launch("total", 5, 256, [x, y, 1000], seed=seed)
        assert launch.findings == () and launch.traffic["arg0"].read_bytes == x.nbytes
        results.append(y.tobytes())
    assert len(set(results)) == 1
    assert np.allclose(np.frombuffer(results[0], np.float32), x.sum(axis=1), atol=1e-3)


def test_counters_do_not_depend_on_the_seed() -> None:
    module = compile_cuda(SUM)
    x, y = np.ones((5, 1000), np.float32), np.zeros(5, np.float32)
    plain, seeded = (module.launch("total", 5, 256, [x, y, 1000], seed=s) for s in (None, 1))
    assert plain.traffic == seeded.traffic and plain.counters.barriers == seeded.counters.barriers


def test_harness_runs_under_seeds_too() -> None:
    x = np.arange(200, dtype=np.uint32)
    assert (apply("add.u32 %d0, %a0, 1;", [x], [np.uint32], seed=4)[0] == x + 1).all()
