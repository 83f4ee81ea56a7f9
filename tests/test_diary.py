"""The diary of one thread block: what waits wait for, and what copies are copies."""

from __future__ import annotations

import numpy as np
import pytest
from test_ptx_harness import kernel
from test_timeline import check, instructions, run, waits

from cupyflash import Device
from cupyflash.multiprocessor import BARRIER_LATENCY
from cupyflash.sim.ptx import Diary, Launch, Module
from cupyflash.sim.timeline import KINDS, timeline

A100, H100 = Device.named("A100-40GB"), Device.named("H100-SXM")


@pytest.mark.parametrize("counted", ["", ".noinc"])
def test_an_arrival_for_copies_that_have_landed_is_no_copy(counted: str) -> None:
    count = 32 if counted else 1
    body = f""".shared .align 16 .b8 s[512]; .shared .align 8 .b64 bar; .reg .b32 %r<3>; .reg .b64 %rd<3>, %s; .reg .pred %p0, %d;
    ld.param.u64 %rd0, [x]; mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0; @%p0 mbarrier.init.shared.b64 [bar], {count}; bar.sync 0;
    mul.wide.u32 %rd1, %r0, 16; add.u64 %rd0, %rd0, %rd1; shl.b32 %r1, %r0, 4; mov.u32 %r2, s; add.u32 %r1, %r1, %r2;
    cp.async.cg.shared.global [%r1], [%rd0], 16; cp.async.mbarrier.arrive{counted}.shared.b64 [bar];
    {"" if counted else "@%p0 mbarrier.arrive.shared.b64 %s, [bar];"}
    W: mbarrier.test_wait.parity.shared.b64 %d, [bar], 0; @!%d bra W;"""
    diary, _ = run(Module.from_ptx(kernel(body, [".u64 x"])), "k", 32, {"x": np.zeros(128, np.float32)})
    played = check(diary, A100)
    assert [(copy.tensor, copy.nbytes) for copy in diary.copies.values()] == [("x", 512)]
    (flight,) = played.copies
    ((_, wait, end),) = (each for each in played.waits if each[1].kind == "phase")
    assert end == flight.landed + BARRIER_LATENCY and wait.on


STUCK = {
    "barriers": ("@%p0 bar.sync 1, 64; @!%p0 bar.sync 2, 96;", "at barrier 1: 32 of 64"),
    "mbarrier": (
        "@%p1 mbarrier.init.shared.b64 [bar], 1; bar.sync 0; W: mbarrier.try_wait.parity.shared.b64 %d, [bar], 0; @!%d bra W;",
        "for phase 0",
    ),
    "warp": ("setp.lt.u32 %p1, %r1, 9; @%p1 bar.sync 1, 64; bar.warp.sync -1;", "bar.warp.sync"),
    "cluster": ("@%p0 barrier.cluster.arrive; @%p0 barrier.cluster.wait; @!%p0 bar.sync 1, 96;", "at the barrier of the cluster"),
    "trap": ("bar.sync 0; @%p1 trap; bar.sync 0;", "the launch was stopped"),
}


@pytest.mark.parametrize("name", STUCK)
def test_who_never_goes_on_is_not_drawn_as_gone(name: str) -> None:
    body, says = STUCK[name]
    head = """.shared .align 8 .b64 bar; .reg .b32 %r<2>; .reg .pred %p<2>, %d; mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 31;
    setp.lt.u32 %p0, %r0, 32; setp.eq.u32 %p1, %r0, 0;"""
    diary = Diary(0)
    launch = Module.from_ptx(kernel(f"{head}\n{body}").replace("sm_80", "sm_90")).launch("k", 1, 96, {}, diary=diary)
    assert launch.findings
    check(diary, H100)
    told = timeline(diary, H100, "sm_90", lambda line: "")
    ends = [row["spans"][-1] for row in told["rows"] if row["group"] == "warps"]
    assert [told["kinds"][kind]["name"] for _, _, kind, _, _ in ends] == ["stuck"] * 3
    assert all(end == told["clocks"] and line >= 0 for _, end, _, line, _ in ends)
    assert says in told["notes"][ends[0][-1]] and all(note >= 0 for *_, note in ends)


COPIES = """.shared .align 16 .b8 s[1024]; .reg .b32 %r<5>; .reg .b64 %rd<3>; .reg .pred %p<2>; ld.param.u64 %rd0, [x];
mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 32; shl.b32 %r1, %r0, 4; mov.u32 %r2, s; add.u32 %r2, %r2, %r1;
cvt.u64.u32 %rd1, %r1; add.u64 %rd0, %rd0, %rd1; mov.u32 %r3, 0;"""
COPY = "cp.async.cg.shared.global [%r2], [%rd0], 16;"


@pytest.mark.parametrize(
    "body, count, drawn",
    [
        (f"{COPY} cp.async.commit_group; cp.async.wait_group 0;", 2, 1),  # of both warps together
        (f"L: {COPY} cp.async.wait_all; add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 4; @%p1 bra L;", 8, 4),
        (f"@!%p0 bar.sync 1, 64; {COPY} cp.async.commit_group; cp.async.wait_group 0; @%p0 bar.sync 1, 64;", 2, 2),
    ],
)
def test_copies_of_groups_that_are_under_way_together_are_one(body: str, count: int, drawn: int) -> None:
    diary, _ = run(Module.from_ptx(kernel(f"{COPIES} {body}", [".u64 x"])), "k", 64, {"x": np.zeros(256, np.float32)})
    check(diary, A100)
    assert [copy.nbytes for copy in diary.copies.values()] == [512] * count
    (row,) = (row for row in timeline(diary, A100, "", lambda line: "")["rows"] if row["group"] == "copies")
    spans = [(begin, end) for begin, end, kind, *_ in row["spans"] if KINDS[kind][0] == "copy_flying"]
    assert len(spans) == drawn and all(end - begin < 600 for begin, end in spans)


def test_a_wait_behind_an_exit_has_its_line_and_nobody_waits_for_itself() -> None:
    body = """.reg .b32 %r<2>; .reg .pred %p<2>; mov.u32 %r0, %tid.x; setp.ge.u32 %p0, %r0, 40; @%p0 ret; bar.sync 0;"""
    diary = Diary(0)
    Module.from_ptx(kernel(body)).launch("k", 1, 64, {}, diary=diary)
    told = timeline(diary, A100, "", lambda line: "")
    notes = []
    for number, row in enumerate(told["rows"]):
        ((*_, line, note),) = (span for span in row["spans"] if KINDS[span[2]][0] == "waits_barrier")
        notes.append(told["notes"][note])
        assert line >= 0 and f"last came warp {number}" not in notes[-1]
    assert sorted("last came" in note for note in notes) == [False, True]


def test_bytes_to_another_block_s_shared_memory_are_not_from_the_l2_and_make_no_producer() -> None:
    body = """.shared .align 16 .b8 s[2048]; .shared .align 8 .b64 bar; .reg .b32 %r<12>; .reg .b64 %rd1, %s;
    .reg .pred %p0, %p1, %d; mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 32; setp.lt.u32 %p1, %r0, 32; shl.b32 %r1, %r0, 4;
    mov.u32 %r2, s; mov.u32 %r3, bar; add.u32 %r1, %r1, %r2; mov.u32 %r4, 0; st.shared.v4.u32 [%r1], {%r4, %r4, %r4, %r4};
    @%p0 mbarrier.init.shared.b64 [bar], 1; @%p0 fence.mbarrier_init.release.cluster;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 %s, [bar], 1024; fence.proxy.async.shared::cta;
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 %r5, %cluster_ctarank; xor.b32 %r5, %r5, 1; add.u32 %r6, %r2, 1024; mapa.shared::cluster.u32 %r7, %r6, %r5;
    mapa.shared::cluster.u32 %r8, %r3, %r5;
    @%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r7], [%r2], 1024, [%r8];
    W: mbarrier.try_wait.parity.shared.b64 %d, [bar], 0; @!%d bra W;
    mov.u32 %r9, 1; mov.u32 %r10, 1; @!%p1 bra E;
    mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r9, %r10}, {%r9, %r9, %r9, %r9}, {%r9, %r9}, {%r9, %r10};
    E: barrier.cluster.arrive; barrier.cluster.wait;"""
    diary, _ = run(Module.from_ptx(kernel(body).replace("sm_80", "sm_90")), "k", 64, {}, grid=2, cluster=2)
    played = check(diary, H100)
    assert "L2" not in played.busy
    told = timeline(diary, H100, "sm_90", lambda line: "")
    assert [row["role"] for row in told["rows"] if row["group"] == "warps"] == ["consumer", ""]
    assert any("1,024 bytes to another block's shared memory" in note for note in told["notes"])


def test_only_turns_that_stay_count_against_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = """.reg .b32 %r<4>; .reg .b64 %rd<2>; .reg .pred %p<2>; ld.param.u64 %rd0, [y]; mov.u32 %r0, %tid.x;
    setp.lt.u32 %p0, %r0, 32; @%p0 bra W; mov.u32 %r2, 0; S: add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 9; @%p1 bra S;
    st.release.gpu.global.u32 [%rd0], 1; bra E; W: ld.acquire.gpu.global.u32 %r1, [%rd0]; setp.eq.u32 %p1, %r1, 0; @%p1 bra W; E:"""
    module = Module.from_ptx(kernel(asks, [".u64 y"]))

    def made(y: np.ndarray) -> tuple[Diary, Launch]:
        diary = Diary(0)
        return diary, module.launch("k", 1, 64, {"y": y}, seed=1, diary=diary)

    diary, launch = made(np.zeros(1, np.int32))
    kept = sum(1 + len(stretch.acts) for row in diary.rows for stretch in row.stretches)
    assert launch.counters.instructions - sum(map(instructions, diary.rows)) > 30  # some ten turns are dropped
    monkeypatch.setattr("cupyflash.sim.ptx.report.diary.MOST_KEPT", kept + 4)
    assert not made(np.zeros(1, np.int32))[0].too_long


# -- loops that ask memory ------------------------------------------------------------------------------------------------------

DELAY = "mov.u32 %r2, 0; S: add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 50; @%p1 bra S;"
FLAGS = {
    "shared": f"""mov.u32 %r3, 0; @%p2 st.volatile.shared.u32 [s], %r3; bar.sync 0; @!%p0 bra W; {DELAY} mov.u32 %r3, 1;
    @%p2 st.volatile.shared.u32 [s], %r3; bra E; W: ld.volatile.shared.u32 %r1, [s]; setp.eq.u32 %p1, %r1, 0; @%p1 bra W; E:""",
    "global": f"""@!%p0 bra W; {DELAY} @%p2 st.release.gpu.global.u32 [%rd0], 1; bra E;
    W: ld.acquire.gpu.global.u32 %r1, [%rd0]; setp.eq.u32 %p1, %r1, 0; @%p1 bra W; E:""",
    "lock": f"""@!%p2 bra B; atom.exch.b32 %r1, [%rd0], 1; B: bar.sync 0; @!%p0 bra W; {DELAY}
    @%p2 atom.exch.b32 %r1, [%rd0], 0; bra E;
    W: atom.cas.b32 %r1, [%rd0], 0, 0; setp.ne.u32 %p1, %r1, 0; @%p1 bra W; E:""",
}
FLAG_HEAD = """.shared .b32 s; .reg .b32 %r<4>; .reg .b64 %rd<2>; .reg .pred %p<3>; ld.param.u64 %rd0, [y]; mov.u32 %r0, %tid.x;
setp.lt.u32 %p0, %r0, 32; setp.eq.u32 %p2, %r0, 0;"""


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("name", FLAGS)
def test_a_loop_that_asks_memory_waits_for_who_wrote_there_last(name: str, seed: int | None) -> None:
    module, diary, y = Module.from_ptx(kernel(f"{FLAG_HEAD} {FLAGS[name]}", [".u64 y"])), Diary(0), np.zeros(1, np.int32)
    module.launch("k", 1, 64, {"y": y}, seed=seed, diary=diary)
    played = check(diary, A100)
    ((_, wait, end),) = (each for each in played.waits if each[1].kind == "memory")
    assert {diary.signs[number] for number in wait.on} == {0} and not wait.outside
    assert end == max(played.signs[number] for number in wait.on) > 500  # behind fifty turns
    *_, last = (span for span in played.rows[1] if span[2] == "waits_memory")
    assert last[1] == end and "last came warp 0" in last[4]


def test_a_counter_is_of_all_who_counted_and_of_other_blocks() -> None:
    body = """.reg .b32 %r<4>; .reg .b64 %rd<2>; .reg .pred %p<3>; ld.param.u64 %rd0, [y]; mov.u32 %r0, %tid.x;
    and.b32 %r1, %r0, 31; setp.eq.u32 %p0, %r1, 0; @%p0 red.release.gpu.global.add.u32 [%rd0], 1; @!%p0 bra E;
    W: ld.acquire.gpu.global.u32 %r1, [%rd0]; setp.lt.u32 %p1, %r1, 8; @%p1 bra W; E:"""
    for seed in (None, 1):
        diary, _ = run(Module.from_ptx(kernel(body, [".u64 y"])), "k", 128, {"y": np.zeros(1, np.int32)}, grid=2, seed=seed)
        check(diary, A100)
        for row in diary.rows:
            *_, wait = waits(row)  # of its last turn: where lanes part, there may be one before
            assert sorted(diary.signs[number] for number in wait.on) == [0, 1, 2, 3] and wait.outside
        assert any("another thread block" in note for note in timeline(diary, A100, "", lambda line: "")["notes"])
