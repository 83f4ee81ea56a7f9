"""mbarrier in all its forms: counts of arrivals and bytes, states and parities; what is wrong with them is found."""

from __future__ import annotations

import numpy as np
import pytest
from test_ptx_tma import program

from cupyflash.sim.ptx import Module
from cupyflash.sim.ptx.order.moments import LaneClocks

SEEDS = [None, 0, 1]
CTA, CLUSTER = "shared::cta.b64", "shared::cluster.b64"

# 8 arrivals complete phase 0: %r5 counts down what the states before say is pending.
ARRIVALS = [
    f"mbarrier.arrive.{CTA} %rd9, [%r2];",
    "mbarrier.arrive.release.cta.b64 %rd9, [%rd4];",
    f"mbarrier.arrive.noComplete.{CTA} %rd9, [%r2], 2;",
    f"mbarrier.arrive.expect_tx.release.cta.{CTA} %rd9, [%r2], 48;",
    f"mbarrier.arrive_drop.relaxed.cluster.{CTA} %rd9, [%r2];",
    f"mbarrier.arrive_drop.expect_tx.{CTA} %rd9, [%r2], 16;",
    f"mbarrier.arrive.relaxed.cluster.{CTA} %rd9, [%r2];",
]
PENDING = [8, 7, 6, 4, 3, 2, 1]

WAITS = [
    "mbarrier.test_wait.b64 %p2, [%rd4], %rd10;",
    f"mbarrier.test_wait.acquire.cluster.{CTA} %p2, [%r2], %rd10;",
    f"mbarrier.test_wait.parity.relaxed.cta.{CTA} %p2, [%r2], 0;",
    f"mbarrier.try_wait.{CTA} %p2, [%r2], %rd10, 100;",
    f"mbarrier.try_wait.relaxed.cluster.{CTA} %p2, [%r2], %rd10, %r6;",
    f"mbarrier.try_wait.parity.{CTA} %p2, [%r2], %r7;",
    f"mbarrier.try_wait.parity.acquire.cluster.{CTA} %p2, [%r2], 0, %r6;",
]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_form_counts(seed: int | None) -> None:
    """States count down; bytes are expected by three forms and completed; then all waits say yes, of both ways to ask."""
    put = "st.global.u32 [%rd5], %r5; add.u64 %rd5, %rd5, 4;"
    states = " ".join(f"{arrive} mbarrier.pending_count.b64 %r5, %rd9; {put}" for arrive in ARRIVALS)
    early = f"mbarrier.test_wait.{CTA} %p2, [%r2], %rd10; selp.u32 %r5, 1, 0, %p2; {put}"
    asked = " ".join(f"W{k}: {wait} @!%p2 bra W{k}; selp.u32 %r5, 1, 0, %p2; {put}" for k, wait in enumerate(WAITS))
    body = f"""@!%p1 bra DONE; ld.param.u64 %rd5, [y]; cvt.u64.u32 %rd4, %r2; cvta.shared.u64 %rd4, %rd4;
    mov.u32 %r6, 50; mov.u32 %r7, 0;
    mbarrier.init.{CTA} [%r2], 8; mbarrier.expect_tx.relaxed.cta.{CTA} [%r2], 64;
    mbarrier.arrive.noComplete.{CTA} %rd10, [%r2], 1; mbarrier.complete_tx.relaxed.cluster.{CLUSTER} [%r2], 64;
    mbarrier.inval.{CTA} [%r2]; mbarrier.init.b64 [%rd4], 8;
    {states.replace("%rd9", "%rd10", 1).replace("b64 %r5, %rd9", "b64 %r5, %rd10", 1)} {early}
    mbarrier.complete_tx.relaxed.cta.{CTA} [%r2], 40; {early} mbarrier.expect_tx.relaxed.cluster.{CLUSTER} [%r2], 8;
    mbarrier.complete_tx.relaxed.cta.{CTA} [%r2], 32; {asked}
    mbarrier.arrive.{CTA} %rd9, [%r2], 6; mbarrier.arrive.{CTA} _, [%r2], 6; DONE:"""
    y = np.zeros(16, np.uint32)
    launch = Module.from_ptx(program(body, ".param .u64 m, .param .u64 y")).launch("k", 1, 32, [None, y], seed=seed)
    assert launch.findings == ()
    assert y.tolist() == [*PENDING, 0, 0, *[1] * len(WAITS)]


INIT = "mbarrier.init.shared.b64 [%r2],"
ARRIVE = "mbarrier.arrive.shared.b64 %rd9, [%r2]"
EXPECT = "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2],"
STUCK = "mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r2], 32; W: mbarrier.try_wait.shared.b64 %p2, [%r2], %rd9; @!%p2 bra W;"

FAULTS = [
    ("mbarrier.init.shared.b64 [%r2-4], 1;", "misaligned", "not aligned to 8 bytes"),
    (f"{INIT} 0;", "bad arrival", "mbarrier for 0 arrivals"),
    (f"{INIT} 1048576;", "bad arrival", "it counts 1 to 1048575"),
    (f"{INIT} 1; {EXPECT} 1048576;", "bad arrival", "1,048,576 bytes"),
    (f"{INIT} 2; {ARRIVE.replace('arrive', 'arrive.noComplete')}, 2;", "bad arrival", ".noComplete at the"),
    (f"{INIT} 2; {ARRIVE}, 3;", "bad arrival", "phase waits for 2"),
    (f"{ARRIVE};", "uninitialised", "nobody wrote"),
    (f"{INIT} 1; mbarrier.inval.shared.b64 [%r2]; {ARRIVE};", "uninitialised", "nobody has initialised"),
    (f"{INIT} 3; {STUCK}", "deadlock", "phase 0 of the mbarrier at 0x2000 (bar) that lacks 2 arrivals and 32 bytes"),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_of_one_thread(seed: int | None) -> None:
    for text, kind, message in FAULTS:
        body = program(f"@!%p1 bra DONE; {text} DONE:", ".param .u64 m")
        found = Module.from_ptx(body).launch("k", 1, 32, [None], seed=seed).findings
        assert [(f.kind, message in f.message) for f in found] == [(kind, True)], (text, found)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_mbarrier_is_used_before_its_thread_is_known_to_have_made_it(seed: int | None) -> None:
    """Thread 0 initialises, thread 32 arrives; a fence alone orders nobody."""
    for between, kinds in (("bar.sync 0;", set()), ("@%p1 fence.mbarrier_init.release.cluster;", {"race"})):
        body = f"""@%p1 mbarrier.init.shared.b64 [%r2], 1; {between} setp.eq.u32 %p3, %r0, 32;
        @%p3 mbarrier.arrive.shared.b64 %rd9, [%r2];"""
        launch = Module.from_ptx(program(body, ".param .u64 m")).launch("k", 1, 64, [None], seed=seed)
        assert {f.kind for f in launch.findings} - {"uninitialised"} == kinds  # where the arrival comes first there is none yet


# -- relaxed --------------------------------------------------------------------------------------------------------------

FENCES = "fence.acq_rel.cta;"
MESSAGES = {
    # What the arrival is, what the waiter does, and what is found.
    "plain": ("ARRIVE.shared::cta.b64 _, [%r2];", "WAIT.shared::cta.b64", "", ""),
    "relaxed arrival": ("ARRIVE.relaxed.cta.shared::cta.b64 _, [%r2];", "WAIT.shared::cta.b64", "", "race"),
    "relaxed wait": ("ARRIVE.shared::cta.b64 _, [%r2];", "WAIT.relaxed.cta.shared::cta.b64", "", "race"),
    "relaxed wait of a cluster": (
        "ARRIVE.release.cluster.shared::cta.b64 _, [%r2];",
        "WAIT.relaxed.cluster.shared::cta.b64",
        "",
        "race",
    ),
    "fenced arrival": (f"{FENCES} ARRIVE.relaxed.cta.shared::cta.b64 _, [%r2];", "WAIT.shared::cta.b64", "", ""),
    "fenced wait": ("ARRIVE.shared::cta.b64 _, [%r2];", "WAIT.relaxed.cta.shared::cta.b64", FENCES, ""),
    "fenced by somebody else": ("ARRIVE.shared::cta.b64 _, [%r2];", "WAIT.relaxed.cta.shared::cta.b64", f"@%p1 {FENCES}", "race"),
    "both fenced": (f"{FENCES} ARRIVE.relaxed.cta.shared::cta.b64 _, [%r2];", "WAIT.relaxed.cta.shared::cta.b64", FENCES, ""),
    "the fence before the store": (
        f"{FENCES} st.shared.u32 [%r1], %r0; ARRIVE.relaxed.cta.shared::cta.b64 _, [%r2];",
        "WAIT.shared::cta.b64",
        "",
        "race",
    ),
}
WAYS = [("mbarrier.arrive", "mbarrier.try_wait.parity"), ("mbarrier.arrive_drop", "mbarrier.test_wait.parity")]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("way", WAYS)
def test_relaxed_orders_nothing_without_a_fence(way: tuple[str, str], seed: int | None) -> None:
    """Thread 0 stores and arrives, thread 32 waits and loads."""
    for name, (arrive, wait, then, kind) in MESSAGES.items():
        body = f"""@%p1 mbarrier.init.shared.b64 [%r2], 1; bar.sync 0; setp.eq.u32 %p3, %r0, 32; @%p3 bra OTHER; @!%p1 bra DONE;
        st.shared.u32 [%r1], %r0; {arrive.replace("ARRIVE", way[0])} bra DONE;
        OTHER: W: {wait.replace("WAIT", way[1])} %p2, [%r2], 0; @!%p2 bra W; {then} ld.shared.u32 %r5, [%r1]; DONE:"""
        launch = Module.from_ptx(program(body, ".param .u64 m")).launch("k", 1, 64, [None], seed=seed)
        assert [f.kind for f in launch.findings] == [kind] * bool(kind), (name, launch.findings)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_is_not_there_for_a_relaxed_wait(seed: int | None) -> None:
    """The tile of a bulk copy is read behind the wait of the thread that issued it, and of another one."""
    x = np.arange(64, dtype=np.uint32)
    for reader in (0, 32):
        early = "race" if reader else "in flight"
        for wait, then, kinds in (("", "", []), (".relaxed.cta", "", [early]), (".relaxed.cta", FENCES, [])):
            body = f"""ld.param.u64 %rd1, [m]; @%p1 mbarrier.init.shared.b64 [%r2], 1; @%p1 fence.mbarrier_init.release.cluster;
            bar.sync 0; @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
            @%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 256, [%r2];
            setp.ne.u32 %p3, %r0, {reader}; @%p3 bra DONE;
            W: mbarrier.try_wait.parity{wait}.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra W;
            {then} ld.shared.u32 %r5, [%r1]; DONE:"""
            launch = Module.from_ptx(program(body, ".param .u64 m")).launch("k", 1, 64, [x], seed=seed)
            assert [f.kind for f in launch.findings] == kinds, (reader, wait, then)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_relaxed_arrival_at_another_block(seed: int | None) -> None:
    """It says that its block has begun; what it wrote is told by a fence for the cluster, not for the block."""
    for fence, kinds in (("fence.acq_rel.cluster;", []), (FENCES, ["race"]), ("", ["race"])):
        body = f"""mov.u32 %r5, %cluster_ctarank; setp.eq.u32 %p3, %r5, 0; and.pred %p2, %p1, %p3;
        @%p2 mbarrier.init.shared.b64 [%r2], 1; barrier.cluster.arrive; barrier.cluster.wait; @!%p1 bra OVER;
        mapa.shared::cluster.u32 %r6, %r2, 0;
        @%p3 bra FIRST; st.shared.u32 [%r1], %r0; {fence}
        mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r6]; bra OVER;
        FIRST: W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra W;
        mapa.shared::cluster.u32 %r6, %r1, 1; ld.shared::cluster.u32 %r7, [%r6];
        OVER: barrier.cluster.arrive; barrier.cluster.wait;"""
        launch = Module.from_ptx(program(body, ".param .u64 m")).launch("k", 2, 32, [None], seed=seed, cluster=(2, 1, 1))
        assert [f.kind for f in launch.findings] == kinds, fence


def test_lanes_of_a_warp_that_wait_apart_hear_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lane 0 waits at another place than the others of its warp: the moments that they hear take a row a warp, not one a lane."""
    alone: list[int] = []
    slots = LaneClocks.slots

    def counted(clocks: LaneClocks, index: np.ndarray) -> np.ndarray:
        alone.append(len(index))
        return slots(clocks, index)

    monkeypatch.setattr(LaneClocks, "slots", counted)
    ask = f"mbarrier.try_wait.{CTA} %p2, [%r2], %rd10;"
    body = f"""@%p1 mbarrier.init.{CTA} [%r2], 128; bar.sync 0; mov.u32 %r5, %laneid; setp.eq.u32 %p3, %r5, 0; @%p1 bra LAST;
    mbarrier.arrive.{CTA} %rd10, [%r2]; @%p3 bra LONE; W0: {ask} @!%p2 bra W0; bra DONE; LONE: {ask} @!%p2 bra LONE; bra DONE;
    LAST: mbarrier.arrive.{CTA} %rd10, [%r2]; W1: {ask} @!%p2 bra W1; DONE:"""
    launch = Module.from_ptx(program(body, ".param .u64 m")).launch("k", 1, 128, [None])
    assert launch.findings == () and sum(alone) == 32  # the first warp, whose lane 0 arrives last
