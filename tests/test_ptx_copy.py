"""cp.async: groups, waits, source sizes, what is counted and found."""

from __future__ import annotations

import numpy as np
import pytest
from test_ptx_harness import kernel, run

REGISTERS = ".reg .b64 %rd<20>; .reg .b32 %r<20>; .reg .pred %p<4>;"
SEEDS = [None, 0, 1, 2, 3]


def copy_kernel(body: str, size: int = 16) -> str:
    """%r3: this thread's `size` bytes of s, %rd3 of x, %rd4 of y; %r1 the thread. Bytes of y are stored at the end."""
    register = {4: "%r9", 8: "{%r9, %r10}", 16: "{%r9, %r10, %r11, %r12}"}[size]
    vector = {4: "", 8: ".v2", 16: ".v4"}[size]
    text = f"""ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd5, %r1, {size}; mul.lo.u32 %r2, %r1, {size};
    add.s64 %rd3, %rd1, %rd5; add.s64 %rd4, %rd2, %rd5; mov.u32 %r3, s; add.u32 %r3, %r3, %r2;
    {body}
    ld.shared{vector}.u32 {register}, [%r3]; st.global{vector}.u32 [%rd4], {register};"""
    return kernel(text, [".u64 x", ".u64 y"], ".shared .align 16 .b8 s[4096];" + REGISTERS)


def data(n: int = 64, size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(0).integers(1, 256, n * size, dtype=np.uint8), np.zeros(n * size, np.uint8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("size", "cache"), [(4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")])
@pytest.mark.parametrize("wait", ["cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;"])
def test_a_copy_has_landed_after_its_wait(size: int, cache: str, wait: str, seed: int | None) -> None:
    x, y = data(64, size)
    launch = run(
        copy_kernel(f"cp.async.{cache}.shared.global.L2::128B [%r3], [%rd3], {size}; {wait}", size),
        {"x": x, "y": y},
        block=64,
        seed=seed,
    )
    assert launch.findings == () and (y == x).all()
    traffic = launch.traffic["x"]
    assert (traffic.read_bytes, traffic.read_requests) == (64 * size, 2)
    assert launch.counters.shared_kind("cp.async").bytes == 64 * size


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_wait_is_found(seed: int | None) -> None:
    x, y = data()
    body = "cp.async.ca.shared.global [%r3], [%rd3], 16; cp.async.commit_group;"
    launch = run(copy_kernel(body), {"x": x, "y": y}, block=64, seed=seed)
    assert [f.kind for f in launch.findings] == ["in flight"] and launch.findings_total == 64


def test_without_a_seed_a_copy_lands_as_late_as_allowed() -> None:
    x, y = data()
    launch = run(
        copy_kernel(
            "st.shared.v4.u32 [%r3], {%r1, %r1, %r1, %r1}; cp.async.ca.shared.global [%r3], [%rd3], 16; cp.async.commit_group;"
        ),
        {"x": x, "y": y},
        block=64,
    )
    assert (y.view(np.uint32).reshape(64, 4) == np.arange(64)[:, None]).all() and launch.findings


def test_under_seeds_a_copy_lands_now_and_then_before_its_wait() -> None:
    x, y = data()
    spin = "mov.u32 %r5, 0; SPIN: add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 20; @%p1 bra SPIN;"
    body = f"st.shared.v4.u32 [%r3], {{%r1, %r1, %r1, %r1}}; cp.async.ca.shared.global [%r3], [%rd3], 16; {spin}"
    landed = set()
    for seed in range(6):
        run(copy_kernel(body), {"x": x, "y": y}, block=64, seed=seed)
        landed |= set((y.reshape(64, 16) == x.reshape(64, 16)).all(axis=1).tolist())
    assert landed == {True, False}


@pytest.mark.parametrize("seed", SEEDS)
def test_wait_group_leaves_the_newest_groups_pending(seed: int | None) -> None:
    """Three groups to three places; after wait_group 1 the first two may be read, the third may not."""
    issue = "".join(f"cp.async.ca.shared.global [%r3+{1024 * k}], [%rd3], 16; cp.async.commit_group;" for k in range(3))
    x, y = data()
    for place, kinds in ((0, []), (1, []), (2, ["in flight"])):
        body = issue + f"cp.async.wait_group 1; add.u32 %r3, %r3, {1024 * place};"
        launch = run(copy_kernel(body), {"x": x, "y": y}, block=64, seed=seed)
        assert [f.kind for f in launch.findings] == kinds
        if not kinds:
            assert (y == x).all()


def test_wait_group_does_not_wait_for_what_was_not_committed() -> None:
    x, y = data()
    body = "cp.async.ca.shared.global [%r3], [%rd3], 16; cp.async.wait_group 0;"
    assert [f.kind for f in run(copy_kernel(body), {"x": x, "y": y}, block=64).findings] == ["in flight"]


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_are_counted_for_each_thread(seed: int | None) -> None:
    """After wait_group 1 the first copy has landed for the threads that committed a second group, and for no others."""
    body = """cp.async.ca.shared.global [%r3], [%rd3], 16; cp.async.commit_group; setp.lt.u32 %p1, %r1, 40; @%p1 bra NEXT;
    cp.async.ca.shared.global [%r3+1024], [%rd3], 16; cp.async.commit_group; NEXT: cp.async.wait_group 1;"""
    x, y = data()
    launch = run(copy_kernel(body), {"x": x, "y": y}, block=64, seed=seed)
    assert [f.kind for f in launch.findings] == ["in flight"] and launch.findings_total == 40
    assert (y.reshape(64, 16)[40:] == x.reshape(64, 16)[40:]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_source_size_fills_with_zeros_and_is_what_counts(seed: int | None) -> None:
    x, y = data()
    body = """shr.u32 %r4, %r1, 1; and.b32 %r4, %r4, 31; min.u32 %r4, %r4, 16; cp.async.cg.shared.global [%r3], [%rd3], 16, %r4;
    cp.async.wait_all;"""
    launch = run(copy_kernel(body), {"x": x, "y": y}, block=64, seed=seed)
    sizes = np.minimum(np.arange(64) // 2, 16)
    want = np.where(np.arange(16) < sizes[:, None], x.reshape(64, 16), 0)
    assert launch.findings == () and (y.reshape(64, 16) == want).all()
    assert launch.traffic["x"].read_bytes == sizes.sum() == launch.traffic["x"].unique_read_bytes
    assert launch.counters.shared_kind("cp.async").bytes == 64 * 16


def test_bounds_are_checked_at_issue_by_the_source_size() -> None:
    x, _y = data(40)
    body = "mov.u32 %r4, 16; {size} cp.async.cg.shared.global [%r3], [%rd3], 16, %r4; cp.async.wait_all;"
    whole = np.zeros(1024, np.uint8)
    launch = run(copy_kernel(body.format(size="")), {"x": x, "y": whole}, block=64)
    assert [(f.kind, f.warp, f.lane, f.tensor) for f in launch.findings] == [("out of bounds", 1, 8, "x")]
    assert (whole[:640] == x).all() and not whole[640:].any() and launch.traffic["x"].read_bytes == 640
    # Rows past the end with source size 0 touch nothing, wherever they point.
    guarded = body.format(size="setp.ge.u32 %p1, %r1, 40; @%p1 mov.u32 %r4, 0;")
    launch = run(copy_kernel(guarded), {"x": x, "y": whole}, block=64)
    assert launch.findings == () and launch.traffic["x"].read_bytes == 640
    partial = body.format(size="setp.ge.u32 %p1, %r1, 39; @%p1 mov.u32 %r4, 12;")
    launch = run(copy_kernel(partial), {"x": x[:-4], "y": whole}, block=40)
    assert launch.findings == () and launch.traffic["x"].read_bytes == 636


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_of_threads_that_exit_land_but_were_not_waited_for(seed: int | None) -> None:
    """Warp 0 copies and leaves; warp 1 looks long after."""
    x, y = data()
    body = """setp.ge.u32 %p1, %r1, 32; @%p1 bra LOOK; cp.async.ca.shared.global [%r3+512], [%rd3], 16; cp.async.commit_group; ret;
    LOOK: barrier.sync 0; mov.u32 %r5, 0; SPIN: add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 20; @%p2 bra SPIN;"""
    launch = run(copy_kernel(body), {"x": x, "y": y}, block=64, seed=seed)
    assert {f.kind for f in launch.findings} == {"in flight", "partial barrier"}
    assert (y[512:] == x[:512]).all() and not y[:512].any()


def test_misaligned_and_shared_bounds() -> None:
    x, y = data()
    kinds = {f.kind for f in run(copy_kernel("cp.async.ca.shared.global [%r3], [%rd3+4], 8;"), {"x": x, "y": y}, block=8).findings}
    assert "misaligned" in kinds
    launch = run(
        copy_kernel("cp.async.ca.shared.global [%r3+4000], [%rd3], 16; cp.async.wait_all; ret;"), {"x": x, "y": y}, block=64
    )
    assert [(f.kind, f.lane) for f in launch.findings] == [("out of bounds", 6)]


def test_predicated_copies() -> None:
    x, y = data()
    body = """setp.lt.u32 %p1, %r1, 20; st.shared.v4.u32 [%r3], {0, 0, 0, 0};
    @%p1 cp.async.cg.shared.global [%r3], [%rd3], 16; cp.async.wait_all;"""
    launch = run(copy_kernel(body), {"x": x, "y": y}, block=64)
    assert (y.reshape(64, 16) == np.where(np.arange(64)[:, None] < 20, x.reshape(64, 16), 0)).all()
    assert launch.traffic["x"].read_bytes == 320 and launch.findings == ()


@pytest.mark.parametrize("seed", SEEDS)
def test_double_buffering(seed: int | None) -> None:
    """Sums eight tiles, each copied while the one before is summed: the shape of every pipelined kernel."""
    body = """mov.u32 %r5, 0; mov.u32 %r6, 0; cp.async.ca.shared.global [%r3], [%rd3], 4; cp.async.commit_group;
    LOOP: cp.async.wait_group 0; bar.sync 0; add.u32 %r5, %r5, 1; setp.ge.u32 %p1, %r5, 8; @%p1 bra SUM;
    and.b32 %r7, %r5, 1; shl.b32 %r7, %r7, 9; add.u32 %r7, %r3, %r7; add.s64 %rd3, %rd3, 512;
    cp.async.ca.shared.global [%r7], [%rd3], 4; cp.async.commit_group;
    SUM: sub.u32 %r7, %r5, 1; and.b32 %r7, %r7, 1; shl.b32 %r7, %r7, 9; xor.b32 %r8, %r2, 256; mov.u32 %r14, s;
    add.u32 %r8, %r14, %r8;
    add.u32 %r7, %r8, %r7; ld.shared.u32 %r9, [%r7]; add.u32 %r6, %r6, %r9; bar.sync 0; setp.lt.u32 %p1, %r5, 8; @%p1 bra LOOP;
    st.global.u32 [%rd4], %r6; ret;"""
    x = np.random.default_rng(1).integers(0, 1000, (8, 128)).astype(np.uint32)
    y = np.zeros(128, np.uint32)
    launch = run(copy_kernel(body, 4), {"x": x, "y": y}, block=128, seed=seed)
    assert launch.findings == () and (y == x[:, np.arange(128) ^ 64].sum(axis=0)).all()
    assert launch.traffic["x"].read_bytes == x.nbytes
