"""Timelines of one thread block: what its warps did and waited for, as executed, under a model's clocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from test_ptx_gallery import gallery
from test_ptx_gallery_tensor import gallery as tensor_gallery
from test_ptx_harness import compile_cuda, kernel

from cupyflash import Device, Problem, plan
from cupyflash.multiprocessor import L2_BYTES, L2_LATENCY, PARTITIONS
from cupyflash.sim.cli import main
from cupyflash.sim.ptx import Diary, Launch, Module
from cupyflash.sim.ptx.report.diary import CodeSpan, CopySpan, MultiplyIssue, ProductSpan, Promise, Row, Sign, Start, WaitSpan
from cupyflash.sim.timeline import KINDS, MOST_COPIES, MOST_SPANS, device_of, timeline, why_not
from cupyflash.sim.timeline.clocks import Played, ReplayedTurns, play
from cupyflash.sim.timeline.order import Orders
from cupyflash.sim.timeline.units import UnitRates
from cupyflash.sim.trace import trace
from suites import sample, wide

pytest.importorskip("cupy")
A100, H100, T4 = Device.named("A100-40GB"), Device.named("H100-SXM"), Device.named("T4")


def run(module: Module, name: str, block: Any, args: Any, **how: Any) -> tuple[Diary, Launch]:
    """A launch of one thread block, with its diary."""
    diary = Diary(0)
    launch = module.launch(name, how.pop("grid", 1), block, args, diary=diary, **how)
    assert launch.findings == ()
    return diary, launch


def attention(algorithm: str, device: Device, block: int = 0, **sizes: int) -> tuple[Diary, dict[str, Any]]:
    """A forward pass of one head on the simulated device: the diary of its launch, and the bytes of each tensor."""
    asked = {"seqlen_q": 64, "seqlen_k": 400, "head_dim": 64} | sizes
    problem = Problem(1, 1, 1, asked["seqlen_q"], asked["seqlen_k"], asked["head_dim"], "float16")
    made = trace(plan(problem, device, algorithm), timeline_block=block)
    assert made.agrees and not made.problems and made.diaries[0] is not None
    return made.diaries[0], {name: made.executed[name] for name in made.executed}


def instructions(row: Row) -> int:
    return sum(stretch.end - stretch.first for stretch in row.stretches)


def waits(row: Row) -> Iterator[WaitSpan]:
    return (act for stretch in row.stretches for _, act in stretch.acts if isinstance(act, WaitSpan))


def check(diary: Diary, device: Device) -> Played:
    """Check everything that holds for every diary and device."""
    played = play(diary, device)
    for spans in played.rows:
        ends = [0.0, *(end for _, end, *_ in spans)]
        assert [begin for begin, *_ in spans] == ends[:-1] and ends[-1] == played.clocks and ends == sorted(set(ends))
    assert all(clocks <= played.clocks for clocks in played.busy.values())
    assert len(played.waits) == sum(1 for row in diary.rows for _ in waits(row))
    read = {flight.number: flight.read for flight in played.copies}
    left: dict[int, set[float]] = {}
    for _, wait, end in played.waits:
        assert all(end >= (read if wait.read else played.signs)[number] for number in wait.on)
        if wait.kind == "barrier":
            left.setdefault(wait.meeting, set()).add(end)
    assert all(len(ends) == 1 for ends in left.values())  # who met goes on together
    assert {flight.number for flight in played.copies} == set(diary.copies)
    for flight in played.copies:
        on_the_way = diary.copies[flight.number].nbytes / L2_BYTES
        assert flight.begin + on_the_way <= flight.read <= flight.seen and flight.landed == flight.read + L2_LATENCY
    assert {number for _, _, number in played.products} == set(diary.products)
    return played


# -- kernels --------------------------------------------------------------------------------------------------------------


@cache
def attention_cases(name: str) -> tuple[Diary, dict[str, Any], Device]:
    algorithm, device = {"fa2": ("fa2", A100), "fa2 without cp.async": ("fa2", T4), "fa3": ("fa3", H100)}[name]
    return *attention(algorithm, device, seqlen_q=16 if algorithm == "fa2" else 64), device


@pytest.mark.parametrize("name", ["fa2", "fa2 without cp.async", "fa3"])
def test_a_block_of_attention_has_its_copies_products_and_waits(name: str) -> None:
    diary, moved, device = attention_cases(name)
    played = check(diary, device)
    assert diary.blocks == 1  # so that all bytes of the launch are this block's
    inward, outward = (sum(copy.nbytes for copy in diary.copies.values() if copy.inward == way) for way in (True, False))
    asked = sum(tensor.read_bytes for tensor in moved.values())
    assert inward == (0 if device is T4 else asked) and outward == (moved["O"].write_bytes if name == "fa3" else 0)
    told = timeline(diary, device, "sm", lambda line: "")
    kinds = {KINDS[kind][0] for row in told["rows"] for _, _, kind, _, _ in row["spans"]}
    assert {"fa2": "waits_copies", "fa2 without cp.async": "waits_load", "fa3": "waits_phase"}[name] in kinds
    assert ("copy_flying" in kinds) == (device is not T4) and "product" in kinds and "waits_barrier" in kinds
    roles = [row["role"] for row in told["rows"] if row["group"] == "warps"]
    assert roles.count("producer") == (name == "fa3")
    if name == "fa3":
        assert {copy.row for copy in diary.copies.values() if copy.inward} == {roles.index("producer")}
        assert len([row for row in told["rows"] if row["group"] == "products"]) == len({p.row for p in diary.products.values()})
        assert any(waits_for_copies(diary, wait) for row in diary.rows[4:] for wait in waits(row))
        asked = {
            (row, n) for row, warp in enumerate(diary.rows) for wait in waits(warp) if wait.kind == "products" for n in wait.on
        }
        assert asked == {(product.row + k, number) for number, product in diary.products.items() for k in range(4)}
    assert played.clocks > 1000


def waits_for_copies(diary: Diary, wait: WaitSpan) -> bool:
    return wait.kind == "phase" and any(number in diary.copies for number in wait.on)


FEW = ["pipelined_gemm", "producer_and_consumers", "pipeline_of_copies", "bulk_copies"]


@pytest.mark.parametrize("seed", [None, wide(3)])
@pytest.mark.parametrize("name", sample([*tensor_gallery.names, *gallery.names], FEW))
def test_kernels_of_others_play(name: str, seed: int | None) -> None:
    one = (tensor_gallery if name in tensor_gallery.names else gallery).make(name)
    module = compile_cuda(one.cuda, *one.options)
    diary, launch = run(module, "k", one.block, one.args, grid=one.grid, shared_bytes=one.shared, seed=seed)
    check(diary, device_of(module.program.target))
    if diary.blocks == 1 and not diary.listing.spins:
        assert sum(map(instructions, diary.rows)) == launch.counters.instructions
        read = sum(copy.nbytes for copy in diary.copies.values() if copy.inward)
        lines = [counts for counts in launch.counters.lines.values() if "cp" in counts.by_opcode]
        assert read == sum(counts.global_memory.read_bytes for counts in lines)


STAGES = r"""
// y = the sum over tiles of A's products with themselves, a tile of 16 x 16 halfs a turn, STAGES of them in shared memory.
extern "C" __global__ void k(const unsigned short* x, float* y, int turns) {
    __shared__ __align__(16) unsigned short tile[STAGES][8][16][16];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto at = [](const void* p) { return (unsigned)__cvta_generic_to_shared(p); };
    auto fetch = [&](int turn) {
        if (turn < turns)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at(&tile[turn % STAGES][warp][lane / 2][lane % 2 * 8])),
                         "l"(x + (turn * 8 + warp) * 256 + lane * 8) : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    float c[4] = {};
    for (int turn = 0; turn < STAGES - 1; ++turn) fetch(turn);
    for (int turn = 0; turn < turns; ++turn) {
        fetch(turn + STAGES - 1);
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
        __syncwarp();
        unsigned a[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                     : "r"(at(&tile[turn % STAGES][warp][lane % 16][lane / 16 * 8])) : "memory");
        for (int again = 0; again < 8; ++again)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%4,%5}, {%0,%1,%2,%3};"
                         : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
        __syncwarp();
    }
    for (int e = 0; e < 4; ++e) y[threadIdx.x * 4 + e] = c[e];
}"""


def staged(stages: int) -> tuple[Diary, Played]:
    x, turns = np.zeros(12 * 8 * 256, np.uint16), 12
    diary, _ = run(compile_cuda(STAGES, f"-DSTAGES={stages}"), "k", 256, [x, np.zeros(1024, np.float32), turns])
    return diary, check(diary, A100)


def test_a_second_stage_hides_copies_under_products() -> None:
    def share(played: Played) -> float:
        """The share of the clocks in which products run, that has a copy in flight."""
        products = [(a, b) for spans in played.cores for a, b, *_ in spans]
        under = sum(any(flight.begin < b and a < flight.landed for flight in played.copies) for a, b in products)
        return under / len(products)

    def waited(played: Played) -> float:
        return sum(end - begin for spans in played.rows for begin, end, kind, *_ in spans if kind == "waits_copies")

    (_, one), (_, three) = staged(1), staged(3)
    assert share(three) > 0.7 > 0.3 > share(one)
    assert waited(one) > 2 * waited(three) and one.clocks > 1.5 * three.clocks


SPIN = r"""
extern "C" __global__ void k(int* y, int n) {
    __shared__ unsigned long long bar;
    const unsigned at = (unsigned)__cvta_generic_to_shared(&bar);
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(at));
    __syncthreads();
    if (threadIdx.x < 32) {
        int sum = 0;
        for (int i = 0; i < n; ++i) { sum += y[i]; __syncwarp(); }
        y[64] = sum;
        if (threadIdx.x == 0) asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" :: "r"(at) : "memory");
    } else {
        asm volatile("{.reg .pred p;\nW: mbarrier.test_wait.parity.shared.b64 p, [%0], 0;\n@p bra D;\nnanosleep.u32 2;\nbra W;\nD:}"
                     :: "r"(at) : "memory");
        y[threadIdx.x] = 1;
    }
}"""


@pytest.mark.parametrize("seed", [None, 1])
def test_a_loop_that_only_waits_is_one_wait(seed: int | None) -> None:
    found = []
    for n in (1, 40):
        diary, _ = run(compile_cuda(SPIN, "-arch=compute_80"), "k", 64, [np.zeros(65, np.int32), n], seed=seed)
        played = check(diary, A100)
        found.append(instructions(diary.rows[1]))
        (phase,) = (wait for wait in waits(diary.rows[1]) if wait.kind == "phase")
        assert {diary.signs[number] for number in phase.on} == {0}  # for warp 0's arrival, which is behind its loads
    assert found[0] == found[1]
    longest = max(played.rows[1], key=lambda span: span[1] - span[0])
    assert longest[2] == "waits_phase" and "last came warp 0" in longest[4]


def test_turns_of_a_loop_that_asks_memory_are_one() -> None:
    asks = """.reg .b32 %r<4>; .reg .b64 %rd<2>; .reg .pred %p<2>; ld.param.u64 %rd0, [y]; mov.u32 %r0, %tid.x;
    setp.lt.u32 %p0, %r0, 32; @%p0 bra W; mov.u32 %r2, 0; S: add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 50; @%p1 bra S;
    st.release.gpu.global.u32 [%rd0], 1; bra E; W: ld.acquire.gpu.global.u32 %r1, [%rd0]; setp.eq.u32 %p1, %r1, 0; @%p1 bra W; E:"""
    counts = set()
    for seed in (None, 0, 1, 2):
        diary = Diary(0)
        Module.from_ptx(kernel(asks, [".u64 y"])).launch("k", 1, 64, {"y": np.zeros(1, np.int32)}, seed=seed, diary=diary)
        check(diary, A100)
        counts.add(instructions(diary.rows[0]))
        assert instructions(diary.rows[1]) > 150  # a loop that counts has all its turns
    assert len(counts) == 1


def test_lanes_that_part_share_a_row() -> None:
    body = """.reg .b32 %r<3>; .reg .pred %p0; mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 31; setp.lt.u32 %p0, %r1, 7; @%p0 bra A;
    add.u32 %r2, %r1, 1; add.u32 %r2, %r2, %r1; barrier.sync 1, 64; bra E;
    A: barrier.sync 1, 64; sub.u32 %r2, %r1, 1; E: bar.warp.sync -1;"""
    for seed in (None, 1, 2):
        diary, launch = run(Module.from_ptx(kernel(body)), "k", 64, {}, seed=seed)
        played = check(diary, A100)
        assert sum(map(instructions, diary.rows)) == launch.counters.instructions
        told = timeline(diary, A100, "sm_80", lambda line: "")
        assert [met for _, _, met in told["meetings"]] == [[0, 1]] and played.clocks < 100


def test_what_another_block_of_the_cluster_does_is_taken_to_be_there() -> None:
    body = """.shared .align 8 .b64 bar; .reg .b32 %r<4>; .reg .b64 %s; .reg .pred %p0, %d; mov.u32 %r0, %tid.x;
    setp.eq.u32 %p0, %r0, 0; @%p0 mbarrier.init.shared.b64 [bar], 2; barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 %r1, %cluster_ctarank;
    @%p0 mbarrier.arrive.shared.b64 %s, [bar]; xor.b32 %r1, %r1, 1; mov.u32 %r2, bar; mapa.shared::cluster.u32 %r3, %r2, %r1;
    @%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];
    W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %d, [bar], 0; @!%d bra W;
    barrier.cluster.arrive; barrier.cluster.wait;"""
    diary, _ = run(Module.from_ptx(kernel(body).replace("sm_80", "sm_90")), "k", 64, {}, grid=2, cluster=2)
    check(diary, H100)
    assert [wait.outside for wait in waits(diary.rows[1])] == [True] * 3
    (phase,) = (wait for wait in waits(diary.rows[1]) if wait.kind == "phase")
    assert [diary.signs[number] for number in phase.on] == [0]  # of two arrivals, the block's own
    told = timeline(diary, H100, "sm_90", lambda line: "")
    assert [meeting[1:] for meeting in told["meetings"]] == [[-1, [0, 1]]] * 2
    assert any("another thread block" in note for note in told["notes"])


SUMS = "{%f0, %f1, %f2, %f3}"
FOUR = "{%r0, %r1, %r2, %r3}"
EIGHT = "{%f0, %f1, %f2, %f3, %f0, %f1, %f2, %f3}"
HALVES = "{%r0, %r1, %r2, %r3, %r0, %r1, %r2, %r3}"


@pytest.mark.parametrize(
    ("instruction", "fmas"),  # FMAs of a warp, and a clock of an A100, an H100 (0.63 of its tensor cores' 2,048), an A10
    [
        (f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {SUMS}, {FOUR}, {{%r0, %r1}}, {SUMS}", (2048, 1024, 1290, 512)),
        (f"wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {EIGHT}, {HALVES}, {HALVES}, {EIGHT}", (4096, 1024, 1290, 512)),
        (f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {SUMS}, {FOUR}, {{%r0, %r1}}, {SUMS}", (1024, 512, 645, 256)),
        ("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d0, %d1}, {%d0}, {%d0}, {%d0, %d1}", (256, 64, 128, 2)),
        ("fma.rn.f64 %d0, %d1, %d0, %d1", (32, 32, 64, 2)),
        ("fma.rn.f32 %f0, %f1, %f0, %f1", (32, 64, 128, 128)),
    ],
)
def test_rates_go_by_the_types_of_the_operands(instruction: str, fmas: tuple[int, ...]) -> None:
    registers = ".reg .f32 %f<4>; .reg .b32 %r<4>; .reg .f64 %d<2>;"
    listing = Module.from_ptx(kernel(f"{instruction};", registers=registers)).code("k").listing
    needed, *rates = fmas
    for device, rate in zip((A100, H100, Device.named("A10")), rates, strict=True):
        assert UnitRates.of(device).step(listing, 0).clocks == pytest.approx(PARTITIONS * needed / rate, rel=0.01)


# -- random diaries -----------------------------------------------------------------------------------------------------------

CODE = """.reg .f32 %f<6>; .reg .b32 %r<12>; .reg .b64 %rd<3>; .shared .b32 s[64]; ld.param.u64 %rd0, [y]; mov.u32 %r0, %tid.x;
ld.global.f32 %f0, [%rd0]; ex2.approx.f32 %f1, %f0; fma.rn.f32 %f2, %f1, %f0, %f0; ld.shared.f32 %f3, [s]; add.f32 %f4, %f3, %f2;
st.shared.f32 [s+4], %f4; mov.u32 %r1, 1; mov.u32 %r2, 1; mov.b32 %r3, %f4; mov.b32 %r4, %f1;
mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r5, %r6}, {%r1, %r2, %r3, %r4}, {%r1, %r2}, {%r3, %r4};
add.u32 %r7, %r5, %r6; shl.b32 %r8, %r7, 2; cvt.rn.f32.u32 %f5, %r8; st.global.f32 [%rd0], %f5;"""


def random_diary(rng: np.random.Generator) -> Diary:
    """Anything that could be executed: every act waits for what was noted before it."""
    diary, warps = Diary(0), int(rng.integers(1, 11))
    diary.listing = Module.from_ptx(kernel(CODE, [".u64 y"])).code("k").listing
    diary.rows = [Row() for _ in range(warps)]
    past: list[int] = []
    out: list[int] = []

    def step(row: int) -> int:
        first, end = sorted(rng.choice(len(diary.listing.instructions), 2, replace=False).tolist())
        diary.rows[row].stretches.append(CodeSpan(first, end))
        return end - 1

    def number(where: list[int]) -> int:
        where.append(diary.number())
        return where[-1]

    for turn in range(int(rng.integers(5, 120))):
        row, some = int(rng.integers(warps)), rng.permutation(warps)[: int(rng.integers(1, warps + 1))].tolist()
        kind = rng.choice(["sign", "copy", "product", "promise", "wait", "barrier", "out"])
        pc = step(row)
        known = tuple(rng.choice(past, min(len(past), 3), replace=False).tolist()) if past else ()
        if kind == "copy" or kind == "out":
            one = number(past if kind == "copy" else out)
            diary.copies[one] = CopySpan(row, pc, "TMA", "x", "", int(rng.integers(1, 9999)), -1, kind == "copy")
            diary.note(row, pc, Start(one))
            if kind == "out":
                diary.note(row, pc, WaitSpan("stores", "", tuple(out[-2:]), read=bool(rng.integers(2))))
        elif kind == "product" and warps >= 4:
            first = 4 * int(rng.integers(warps // 4))
            one = number(past)
            diary.products[one] = ProductSpan(first, pc, 64 * 64 * 16, 16)
            for each in range(first, first + 4):
                diary.note(each, step(each), MultiplyIssue(one))
        elif kind == "promise":
            mine = tuple(n for n, copy in diary.copies.items() if copy.row == row)
            one = number(past)
            diary.signs[one] = row
            diary.note(row, pc, Promise(one, mine))
        elif kind == "wait":
            diary.note(row, pc, WaitSpan(str(rng.choice(["phase", "copies", "products", "registers"])), "", known))
        elif kind == "barrier":
            places = {each: step(each) for each in some}
            signs = [number(past) for _ in some]
            for one, each in zip(signs, some, strict=True):
                diary.signs[one] = each
                diary.note(each, places[each], Sign(one))
            for each in some[: int(rng.integers(1, len(some) + 1))]:
                diary.note(each, places[each], WaitSpan("barrier", "barrier 0", tuple(signs), turn))
        elif kind == "sign":
            one = number(past)
            diary.signs[one] = row
            diary.note(row, pc, Sign(one))
    return diary


@pytest.mark.parametrize("few", [25, wide(150)])
def test_no_diary_that_could_be_executed_deadlocks_the_model(few: int) -> None:
    for seed in range(few):
        diary = random_diary(np.random.default_rng(seed))
        check(diary, (A100, H100, T4)[seed % 3])


def test_straight_code_is_put_in_an_order_that_registers_and_memory_allow() -> None:
    diary, _, device = attention_cases("fa2")
    listing, step = diary.listing, ReplayedTurns(diary, device).step
    pieces = {(stretch.first, stretch.end) for row in diary.rows for stretch in row.stretches}
    moved = 0
    for first, end in pieces:
        order = Orders(listing, step).of(first, end)
        assert sorted(order) == list(range(first, end))
        moved += sum(pc != at for at, pc in enumerate(order, first))
        place = {pc: at for at, pc in enumerate(order)}
        writer: dict[int, int] = {}
        for pc in range(first, end):
            for register in step(pc).reads:
                assert place[writer.get(register, pc)] <= place[pc]
            writer |= dict.fromkeys(step(pc).writes, pc)
    assert moved > 100


# -- the report -----------------------------------------------------------------------------------------------------------------


def test_a_timeline_is_json_whose_spans_are_apart_and_whose_shares_are_the_rows() -> None:
    for name in ("fa2", "fa3"):
        diary, _, device = attention_cases(name)
        told = timeline(diary, device, "sm_90a", lambda line: f"{line[1]}")
        assert told == json.loads(json.dumps(told)) == timeline(diary, device, "sm_90a", lambda line: f"{line[1]}")
        assert told["shown"] == told["clocks"] and all(text == str(number) for _, number, text, _ in told["sources"])
        assert {file for file, *_ in told["sources"]} == {f"{diary.kernel}.cu"}  # the kernel's own lines
        for row in told["rows"]:
            flat = [clock for begin, end, *_ in row["spans"] for clock in (begin, end)]
            assert flat == sorted(flat) and flat[-1] <= told["clocks"]
            assert all(-1 <= line < len(told["sources"]) and -1 <= note < len(told["notes"]) for *_, line, note in row["spans"])
        warps = [row for row in told["rows"] if row["group"] == "warps"]
        for row, shares in zip(warps, told["shares"], strict=True):
            assert sum(shares) == pytest.approx(told["clocks"], abs=0.1) and len(shares) == len(told["kinds"])
            for number, share in enumerate(shares):
                drawn = sum(end - begin for begin, end, kind, *_ in row["spans"] if kind == number)
                assert drawn == pytest.approx(share, abs=0.1)
        assert any(shares[[name for name, *_ in KINDS].index("special")] > 0.02 * told["clocks"] for shares in told["shares"])


def test_a_long_timeline_is_shown_up_to_some_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    diary, _, device = attention_cases("fa2")
    whole = timeline(diary, device, "", lambda line: "")
    monkeypatch.setattr("cupyflash.sim.timeline.MOST_SPANS", 50)
    told = timeline(diary, device, "", lambda line: "")
    assert told["clocks"] == whole["clocks"] > told["shown"] and told["shares"] == whole["shares"]
    spans = [span for row in told["rows"] for span in row["spans"]]
    assert 40 <= len(spans) <= 50 < MOST_SPANS and max(end for _, end, *_ in spans) == told["shown"]


@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_what_is_not_played_to_its_end_is_the_beginning_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    diary, _, device = attention_cases(name)
    whole = play(diary, device)
    for most in (100, 1000):
        part = play(diary, device, most=most)
        assert not part.whole and 0 < part.clocks < whole.clocks and part.busy["issue"] <= most
        assert max(part.busy.values()) <= part.clocks
        for mine, all_of in zip(part.rows, whole.rows, strict=True):
            ends = [0.0, *(end for _, end, *_ in mine)]
            assert [begin for begin, *_ in mine] == ends[:-1] and ends[-1] == part.clocks
            assert [span[:4] for span in mine[:-2]] == [span[:4] for span in all_of[: max(0, len(mine) - 2)]]
        assert play(diary, device, until=part.clocks).rows == part.rows
    monkeypatch.setattr("cupyflash.sim.timeline.MOST_PLAYED", 2000)
    for most in (MOST_SPANS, 50):
        monkeypatch.setattr("cupyflash.sim.timeline.MOST_SPANS", most)
        told = timeline(diary, device, "", lambda line: "")
        assert told["clocks"] is None and sum(len(row["spans"]) for row in told["rows"]) <= most + len(diary.rows)
        assert all(sum(shares) == pytest.approx(told["shown"], abs=0.1) for shares in told["shares"])


def test_more_copies_at_a_time_than_a_page_has_rows_for_are_counted() -> None:
    diary = Diary(0)
    diary.listing, diary.rows = Module.from_ptx(kernel(CODE, [".u64 y"])).code("k").listing, [Row([CodeSpan(0, 1)])]
    for turn in range(2):
        for number in range(1000 * turn, 1000 * turn + 200):
            diary.copies[number] = CopySpan(0, 0, "bulk", "x", "s", 16, -1, True)
            diary.note(0, 0, Start(number))
        diary.note(0, 0, WaitSpan("copies", "", tuple(diary.copies)))
    told = timeline(diary, A100, "", lambda line: "")
    rows = [row for row in told["rows"] if row["group"] == "copies"]
    assert len(rows) == MOST_COPIES + 1
    notes = [told["notes"][note] for *_, note in rows[-1]["spans"]]
    assert notes == [f"{200 - MOST_COPIES} more copies: {16 * (200 - MOST_COPIES):,} bytes"] * 2


def test_a_wait_for_a_load_ends_when_it_is_there_and_that_for_a_unit_begins() -> None:
    body = """.reg .b64 %rd0; .reg .f32 %f<2>; ld.param.u64 %rd0, [y]; ld.global.f32 %f0, [%rd0]; sin.approx.f32 %f1, %f0;"""
    diary, _ = run(Module.from_ptx(kernel(body, [".u64 y"])), "k", 1024, {"y": np.zeros(1, np.float32)})
    sine = [i.opcode for i in diary.listing.instructions].index("sin")
    ends = [{kind: end for _, end, kind, pc, _ in spans if pc == sine} for spans in play(diary, A100).rows]
    assert all(end["waits_load"] < L2_LATENCY + 60 for end in ends)
    assert sum(end.get("waits_unit", 0) > end["waits_load"] for end in ends) > 4


# An instruction that needs the one before it, by threads, and the clocks from one to the next: docs/performance.md's assumptions.
# Beside the latency a warp takes a clock of shared memory, a sector half a clock on its way from the L2, a branch a clock to issue.
CHAINS = {
    "float32": (32, "add.f32 %f0, %f0, %f0;", 4),
    "exponentials": (32, "ex2.approx.f32 %f0, %f0;", 18),
    "shared memory": (32, "ld.shared.u32 %s, [%s];", 29 + 1),
    "shuffles": (32, "shfl.sync.idx.b32 %s, %s, 0, 31, -1;", 29 + 1),
    "tensor cores": (
        32,
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0,%f1,%f2,%f3}, {%r0,%r1,%r2,%r3}, {%r4,%r5}, {%f0,%f1,%f2,%f3};",
        24,
    ),
    "L2": (1, "ld.global.u64 %a, [%a];", 450 + 0.5),
    "barriers": (64, "bar.sync 0;", 15),
    "branches": (32, "bra ON; mov.u32 %r0, 1; ON: mov.u32 %r0, 0;", 6 + 1),
}


@pytest.mark.parametrize("name", CHAINS)
def test_an_instruction_waits_for_the_one_before_as_long_as_the_page_says(name: str) -> None:
    threads, one, clocks = CHAINS[name]
    begin = """.shared .align 4 .b32 s; .reg .b32 %s, %r<6>; .reg .f32 %f<4>; .reg .b64 %a; .reg .pred %p;
    mov.u32 %s, s; ld.param.u64 %a, [y]; mov.u32 %r0, %tid.x; setp.eq.u32 %p, %r0, 0;
    @%p st.shared.u32 [%s], %s; @%p st.global.u64 [%a], %a; bar.sync 0;"""
    begin += "".join(f"mov.u32 %r{i}, 0;" for i in range(6)) + "".join(f"mov.f32 %f{i}, 0f00000000;" for i in range(4))
    ends = []
    for length in (8, 9):
        chain = "".join(one.replace("ON", f"ON{place}") for place in range(length))
        module = Module.from_ptx(kernel(f"{begin} {chain} bar.sync 0;", [".u64 y"]))
        diary, _ = run(module, "k", threads, {"y": np.zeros(1, np.uint64)})
        ends.append(play(diary, A100).clocks)
    assert ends[1] - ends[0] == clocks


def test_accesses_are_of_the_memory_that_they_went_to() -> None:
    body = """.shared .b32 s[32]; .reg .b32 %r<4>; .reg .b64 %rd<4>; ld.param.u64 %rd0, [y]; mov.u64 %rd1, s;
    cvta.shared.u64 %rd2, %rd1; st.u32 [%rd2], 1; ld.u32 %r0, [%rd2];
    atom.add.u32 %r1, [%rd2], %r0; atom.shared.add.u32 %r2, [s], %r1; ld.u32 %r3, [%rd0];
    st.u32 [%rd0], %r3;"""
    diary, _ = run(Module.from_ptx(kernel(body, [".u64 y"])), "k", 1, {"y": np.zeros(1, np.uint32)})
    replay, codes = ReplayedTurns(diary, A100), diary.listing.instructions
    orders = Orders(diary.listing, replay.step)
    played = replay.run()
    memory = [pc for pc, i in enumerate(codes) if i.opcode in ("ld", "st", "atom") and "param" not in i.mods]
    kinds = [kind for _, _, kind, pc, _ in played.rows[0] if pc in memory and not kind.startswith("waits")]
    assert kinds == ["shared"] * 4 + ["global"] * 2
    loads = [orders.latency(pc) for pc, i in enumerate(codes) if i.opcode == "ld" and "param" not in i.mods]
    assert loads[0] < L2_LATENCY == loads[1]


INLINED = r"""__device__ float twice(const float* x, int at) {
  float value = x[at];
  return value + value;
}
extern "C" __global__ void k(const float* x, float* y) {
  float first = twice(x, 0);
  y[0] = first;
  __syncthreads();
  y[1] = twice(x, threadIdx.x) + first;
}"""


def test_span_and_note_name_the_same_line_of_an_inlined_function_and_its_call() -> None:
    diary, _ = run(compile_cuda(INLINED, "-arch=compute_80"), "k", 1, [np.ones(1, np.float32), np.zeros(2, np.float32)])
    told = timeline(diary, A100, "", lambda line: INLINED.splitlines()[line[1] - 1])
    assert {tuple(number) for _, *number in told["sources"]} == {
        (line, INLINED.splitlines()[line - 1], call)
        for line, call in [(2, 6), (2, 9), (3, 6), (3, 9), (7, -1), (8, -1), (9, -1), (10, -1)]
    }
    loads = {told["notes"][note] for _, _, kind, _, note in told["rows"][0]["spans"] if KINDS[kind][0] == "waits_load"}
    assert loads == {f"for what ld of line 2 (called at line {call}) gives" for call in (6, 9)}


def test_the_default_order_makes_the_same_diary_each_time() -> None:
    (one, _), (other, _) = (staged(2) for _ in range(2))
    assert one.rows == other.rows and one.copies == other.copies


def test_what_a_diary_is_not_of() -> None:
    module = Module.from_ptx(kernel("bar.sync 0;"))
    for block in (-1, 1.5, True):
        with pytest.raises(ValueError, match="whole number from 0"):
            Diary(block)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="block 3 of the diary is not in the grid: k has 3"):
        module.launch("k", 3, 32, {}, diary=Diary(3))
    diary, last = Diary(0), Diary(199)
    module.launch("k", 200, 32, {}, diary=diary)
    with pytest.raises(ValueError, match="a new one for each launch"):
        module.launch("k", 200, 32, {}, diary=diary)
    module.launch("k", 200, 32, {}, diary=last, processes=2)
    assert last.rows == diary.rows and len(diary.rows) == 1
    with pytest.raises(ValueError, match="of no launch"):
        play(Diary(0), A100)


def test_a_diary_that_grows_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    module, args = compile_cuda(STAGES, "-DSTAGES=2"), [np.zeros(24576, np.uint16), np.zeros(1024, np.float32), 12]
    diary, _ = run(module, "k", 256, args)
    stretches = sum(len(row.stretches) for row in diary.rows)
    kept = stretches + sum(len(stretch.acts) for row in diary.rows for stretch in row.stretches)
    monkeypatch.setattr("cupyflash.sim.ptx.report.diary.MOST_KEPT", kept)
    assert kept > 2 * stretches and why_not(run(module, "k", 256, args)[0]) is None
    monkeypatch.setattr("cupyflash.sim.ptx.report.diary.MOST_KEPT", kept // 2)
    diary, _ = run(module, "k", 256, args)
    assert "more than" in str(why_not(diary))
    assert not (diary.copies or diary.signs or any(row.stretches for row in diary.rows))
    with pytest.raises(ValueError, match="too long"):
        play(diary, A100)


def test_devices_for_what_is_compiled_for() -> None:
    names: Mapping[str, str] = {"sm_75": "T4", "sm_80": "A100-40GB", "sm_90a": "H100-SXM", "sm_88": "A10", "sm_60": "T4"}
    assert {target: device_of(target).name for target in names} == names


def test_the_commands_have_it(tmp_path: Any) -> None:
    path, ptx = tmp_path / "k.ptx", ["--grid", "2,2", "--block", "64", "--json"]
    path.write_text(kernel("bar.sync 0;"))
    found = json.loads(CliRunner().invoke(main, ["profile", str(path), *ptx, "--timeline-block", "3"]).stdout)["timeline"]
    assert (found["block"], found["blocks"], found["target"], found["device"]) == (3, 4, "sm_80", "A100-40GB")
    assert found["sources"][0][2] == "bar.sync 0;" and found["meetings"][0][1:] == [0, [0, 1]]
    wrong = CliRunner().invoke(main, ["profile", str(path), *ptx, "--timeline-block", "4"])
    assert wrong.exit_code == 2 and "the grid's 4 thread blocks" in wrong.output
    small = ["trace", "--seqlen", "64", "--head-dim", "16", "--tiling", "16x16", "--algorithms", "fa2"]
    wrong = CliRunner().invoke(main, [*small, "--timeline-block", "4"])
    assert wrong.exit_code == 2 and "no launch has more than 4 thread blocks" in wrong.output
    (player,) = json.loads(CliRunner().invoke(main, [*small, "--timeline-block", "3", "--json"]).stdout)["players"]
    made = player["launches"][0]["timeline"]
    assert (made["kernel"], made["block"], made["device"]) == ("fa2_forward", 3, "A100-40GB")
    assert any("K" in note for note in made["notes"]) and any("find_row_block" in text for _, _, text, _ in made["sources"])
