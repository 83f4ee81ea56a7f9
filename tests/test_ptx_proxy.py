"""fence.proxy.async: what ordinary instructions wrote and the asynchronous proxy reads."""

from __future__ import annotations

import numpy as np
import pytest
from test_ptx_harness import kernel, run

from cupyflash.sim.ptx import Launch

REGISTERS = ".shared .align 16 .b8 s[1024]; .shared .align 8 .b64 bar; .reg .b64 %rd<20>; .reg .b32 %r<20>; .reg .pred %p<4>;"
SEEDS = [None, 0, 1, 2]
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 256; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
FENCE = "fence.proxy.async.shared::cta;"


def stored(write: str, between: str, *, block: int = 64, seed: int | None = None) -> tuple[Launch, bool]:
    """64 words are written to shared memory by `write`, thread 0 (%p1) copies them out in bulk; whether they came."""
    body = f"""ld.param.u64 %rd1, [y]; mov.u32 %r1, %tid.x; mov.u32 %r2, s; shl.b32 %r3, %r1, 2; add.u32 %r4, %r2, %r3;
    setp.eq.u32 %p1, %r1, 0; {write} {between} @!%p1 bra DONE; {STORE} DONE:"""
    y = np.zeros(64, np.uint32)
    launch = run(kernel(body, [".u64 y"], REGISTERS), {"y": y}, block=block, seed=seed)
    return launch, bool((y == np.arange(64)).all())


WRITES = {
    "st": "st.shared.u32 [%r4], %r1;",
    "atomic": "st.shared.u32 [%r4], 0; fence.proxy.async; atom.shared.add.u32 %r5, [%r4], %r1;",
}
ORDERS = {
    "by the writers": f"{FENCE} bar.sync 0;",
    "of both spaces": "fence.proxy.async; bar.sync 0;",
    "of a cluster": "fence.proxy.async.shared::cluster; bar.sync 0;",
    "of one direction": "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster; bar.sync 0;",
    "by the reader behind the barrier": f"bar.sync 0; @%p1 {FENCE}",
    "by another thread on the way": f"bar.sync 0; setp.eq.u32 %p2, %r1, 40; @%p2 {FENCE} bar.sync 0;",
    "named barrier": f"{FENCE} bar.sync 1, 64;",
}
MISSING = {
    "nowhere": "bar.sync 0;",
    "by one writer only": f"@%p1 {FENCE} bar.sync 0;",
    "of global memory only": "fence.proxy.async.global; bar.sync 0;",
    "of another proxy": "fence.proxy.alias; bar.sync 0;",
    "of the other direction": "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster; bar.sync 0;",
    "behind the barrier, by somebody else": f"bar.sync 0; setp.eq.u32 %p2, %r1, 40; @%p2 {FENCE}",
    "an ordinary one": "fence.acq_rel.cta; membar.gl; bar.sync 0;",
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("write", WRITES)
def test_a_fence_anywhere_on_the_way_is_enough(write: str, seed: int | None) -> None:
    for name, between in ORDERS.items():
        launch, right = stored(WRITES[write], between, seed=seed)
        assert launch.findings == () and right, name


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("write", WRITES)
def test_a_missing_fence_is_found(write: str, seed: int | None) -> None:
    for name, between in MISSING.items():
        launch, _ = stored(WRITES[write], between, seed=seed)
        assert [f.kind for f in launch.findings] == ["proxy"], name
        assert "cp.async.bulk reads shared memory" in launch.findings[0].message


@pytest.mark.parametrize("seed", SEEDS)
def test_a_write_behind_the_fence_is_not_covered(seed: int | None) -> None:
    launch, _ = stored(f"{FENCE} st.shared.u32 [%r4], %r1;", "bar.sync 0;", seed=seed)
    assert [f.kind for f in launch.findings] == ["proxy"]


def test_what_is_not_ordered_at_all_is_a_race_only() -> None:
    assert {f.kind for f in stored(WRITES["st"], FENCE)[0].findings} == {"race"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("fence", "kinds"), [(FENCE, []), ("", ["proxy"])])
def test_mbarriers_hand_fences_on(fence: str, kinds: list[str], seed: int | None) -> None:
    between = f"""mov.u32 %r7, bar; @%p1 mbarrier.init.shared.b64 [%r7], 64; bar.sync 0; {WRITES["st"]}
    {fence} mbarrier.arrive.shared.b64 %rd9, [%r7];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r7], 0; @!%p3 bra WAIT;"""
    launch, right = stored("", between, seed=seed)
    assert [f.kind for f in launch.findings] == kinds and right


LOAD = """cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 256, [%r7];
mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r7], 256;"""
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r7], 0; @!%p3 bra WAIT;"


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_bulk_copy_wrote_needs_no_fence(seed: int | None) -> None:
    """In by one copy, out by the next; and ordinary reads of it need none either."""
    body = f"""ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; mov.u32 %r1, %tid.x; mov.u32 %r2, s; mov.u32 %r7, bar;
    setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared.b64 [%r7], 1; @%p1 {FENCE} bar.sync 0; @!%p1 bra WAIT; {LOAD} {WAIT}
    shl.b32 %r3, %r1, 2; add.u32 %r4, %r2, %r3; ld.shared.u32 %r5, [%r4]; @!%p1 bra DONE; mov.b64 %rd1, %rd2; {STORE} DONE:"""
    x, y = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    launch = run(kernel(body, [".u64 x", ".u64 y"], REGISTERS), {"x": x, "y": y}, block=64, seed=seed)
    assert launch.findings == () and (y == x).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("fence", "kinds"), [("fence.proxy.async;", []), (FENCE, ["proxy"]), ("", ["proxy"])])
def test_global_memory_that_the_kernel_wrote(fence: str, kinds: list[str], seed: int | None) -> None:
    body = f"""ld.param.u64 %rd1, [x]; mov.u32 %r1, %tid.x; mov.u32 %r2, s; mov.u32 %r7, bar;
    setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared.b64 [%r7], 1; @%p1 fence.proxy.async.shared::cta;
    mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd1, %rd3; st.global.u32 [%rd4], %r1; {fence} bar.sync 0;
    @!%p1 bra WAIT; {LOAD} {WAIT}"""
    x = np.zeros(64, np.uint32)
    launch = run(kernel(body, [".u64 x"], REGISTERS), {"x": x}, block=64, seed=seed)
    assert [f.kind for f in launch.findings] == kinds


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_over_what_was_read_needs_no_fence(seed: int | None) -> None:
    """Ordinary reads, a barrier, and a bulk copy into the same bytes: as pipelines that refill a stage do."""
    body = f"""ld.param.u64 %rd1, [x]; mov.u32 %r1, %tid.x; mov.u32 %r2, s; mov.u32 %r7, bar; shl.b32 %r3, %r1, 2;
    setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared.b64 [%r7], 1; @%p1 {FENCE}
    add.u32 %r4, %r2, %r3; st.shared.u32 [%r4], %r1; ld.shared.u32 %r5, [%r4]; bar.sync 0; @!%p1 bra WAIT; {LOAD} {WAIT}
    ld.shared.u32 %r5, [%r4];"""
    launch = run(kernel(body, [".u64 x"], REGISTERS), {"x": np.zeros(64, np.uint32)}, block=64, seed=seed)
    assert launch.findings == ()


def test_findings_name_the_whole_instruction() -> None:
    """A copy is what it is called in the PTX, also where another instruction's finding speaks of it."""
    for write, between, part in (
        ("", "bar.sync 0;", "cp.async.bulk reads shared memory that nobody wrote"),
        (WRITES["st"], "bar.sync 0; @%p1 add.u32 %r2, %r2, 4;", "cp.async.bulk of 256 bytes at 0x4 of shared memory: "),
        (WRITES["st"], f"{FENCE} bar.sync 0; add.u64 %rd1, %rd1, 16;", "cp.async.bulk of 256 bytes, some at offset 0x10 of 'y'"),
    ):
        launch, _ = stored(write, between)
        assert any(part in f.message for f in launch.findings), launch.findings
    late = STORE.replace("cp.async.bulk.wait_group 0;", "") + "st.shared.u32 [%r4], 7;"
    body = f"""ld.param.u64 %rd1, [y]; mov.u32 %r1, %tid.x; mov.u32 %r2, s; shl.b32 %r3, %r1, 2; add.u32 %r4, %r2, %r3;
    setp.eq.u32 %p1, %r1, 0; {WRITES["st"]} {FENCE} bar.sync 0; @!%p1 bra DONE; {late} DONE:"""
    launch = run(kernel(body, [".u64 y"], REGISTERS), {"y": np.zeros(64, np.uint32)}, block=64)
    messages = sorted(f.message for f in launch.findings)
    late = "has read shared memory: a cp.async.bulk.wait_group.read is missing"
    assert messages[0] == f"the thread exits before its cp.async.bulk {late}"
    assert messages[1].startswith("write at offset 0x0 (s) of shared memory and cp.async.bulk at PTX line")
