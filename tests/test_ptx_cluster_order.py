"""The order between the blocks of a cluster: its barrier, mbarriers and flags of other blocks; begin and exit of blocks; races."""

from __future__ import annotations

import numpy as np
import pytest
from test_ptx_cluster import EXCHANGE, FIRST, OUT, SEEDS, SYNC, found, launch, line
from test_ptx_harness import compile_cuda

from cupyflash.sim.ptx import Launch


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("between", "kinds"),
    [
        (SYNC, set()),
        ("barrier.cluster.arrive;\nbarrier.cluster.wait;", set()),
        ("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;", set()),
        ("fence.acq_rel.cluster;\nbarrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;", set()),
        ("fence.acq_rel.gpu;\nbarrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;", set()),
        ("fence.acq_rel.cta;\nbarrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;", {"race"}),
        ("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;", {"race"}),
        ("bar.sync 0;", {"race", "not begun"}),
        # Only the half of the threads that waits is behind the barrier; a block barrier after it is enough for the others.
        ("barrier.cluster.arrive;\nsetp.lt.u32 %p3, %r1, 32;\n@%p3 barrier.cluster.wait;\nbar.sync 0;", set()),
        ("barrier.cluster.arrive;\nsetp.lt.u32 %p3, %r1, 32;\n@%p3 barrier.cluster.wait;", {"race", "not begun"}),
        ("bar.sync 0;\nbarrier.cluster.arrive;\nbarrier.cluster.wait;\nst.shared.u32 [%r12], %r1;", {"race"}),
        ("barrier.cluster.arrive;\nst.shared.u32 [%r12], %r10;\nbarrier.cluster.wait;", {"race"}),
    ],
)
def test_the_barrier_of_the_cluster_orders_its_blocks(between: str, kinds: set[str], seed: int | None) -> None:
    body = EXCHANGE.format(between=between)
    if "@%p3" in between:
        body = body.replace(SYNC + OUT, "@!%p3 barrier.cluster.wait;\n" + SYNC + OUT)
    result, y = launch(body, grid=4, block=64, seed=seed)
    kinds_found = {(f.kind, f.ptx_line - FIRST) for f in result.findings} - {("uninitialised", line(body, "ld.shared::cluster"))}
    assert kinds_found == {(kind, line(body, "ld.shared::cluster")) for kind in kinds}
    if not kinds:
        assert (y.reshape(2, 2, 64)[:, ::-1].reshape(-1) == np.arange(256)).all() and result.findings_total == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("last", "kinds"), [(SYNC, []), ("barrier.cluster.arrive;", [("exited block", 3)]), ("bar.sync 0;", [("exited block", 3)])]
)
def test_a_block_stays_until_the_others_are_done_with_it(last: str, kinds: list[tuple[str, int]], seed: int | None) -> None:
    """Two lines of the barrier, then line 3 is the access; without a wait at the end its block may be gone."""
    body = f"st.shared.u32 [%r12], %r10;\n{SYNC}ld.shared::cluster.u32 %r20, [%r13];\n{last}"
    assert found(body, seed=seed) == kinds


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_remote_arrival_wants_a_block_that_is_still_there(seed: int | None) -> None:
    """Rank 1 tells rank 0 that it is done with a stage: rank 0 must wait for that, though it needs nothing more."""
    body = f"""@%p1 mbarrier.init.shared::cta.b64 [%r6], 32;
    {SYNC.replace(chr(10), " ")}
    @!%p2 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7];
    """
    assert found(body, seed=seed) == [("exited block", 2)]
    assert found(body + "@!%p2 exit;\nW: mbarrier.try_wait.parity.shared.b64 %p3, [%r6], 0; @!%p3 bra W;", seed=seed) == []


@pytest.mark.parametrize("races", [False, True])
def test_the_memory_of_a_block_that_has_exited_is_gone(races: bool) -> None:
    body = f"@%p2 exit;\n{SYNC}mov.u32 %r20, 9;\nld.shared::cluster.u32 %r20, [%r5];\n{OUT}"
    result, y = launch(body, races=races)
    assert [f.kind for f in result.findings] == ["exited block"] and not y.any()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_relaxed_barrier_says_that_blocks_have_begun_and_a_fence_that_mbarriers_are_there(seed: int | None) -> None:
    """The start of many kernels: initialise, fence.mbarrier_init, arrive relaxed; then arrivals from the other block."""
    body = (
        """@%p1 mbarrier.init.shared::cta.b64 [%r6], 32;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.acquire.aligned;
    st.shared::cluster.u32 [%r13], %r10;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7];
    WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r6], 0;
    @!%p3 bra WAIT;
    ld.shared.u32 %r20, [%r12];
    """
        + OUT
    )
    result, y = launch(body, seed=seed)
    assert result.findings == () and (y == np.roll(np.arange(64), 32)).all()
    unfenced = body.replace("fence.mbarrier_init.release.cluster;", "")
    assert {kind for kind, _ in found(unfenced, seed=seed)} - {"uninitialised", "deadlock", "bad arrival"} == {"race"}


PASS_ON = """@%p1 mbarrier.init.shared.b64 [%r6], 1;
{SYNC}
@%p2 bra RECEIVE;
st.shared::cluster.u32 [%r13], %r10;
{before}
@%p1 {arrive} [%r7];
bra DONE;
RECEIVE: mbarrier.try_wait.parity.shared.b64 %p3, [%r6], 0;
@!%p3 bra RECEIVE;
ld.shared.u32 %r20, [%r12];
{OUT}DONE:
{after}
"""
"""Rank 1 writes to rank 0 and tells it by one arrival; rank 0 waits, and reads."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("before", "arrive", "after", "kinds"),
    [
        ("bar.warp.sync -1;", "mbarrier.arrive.release.cluster.shared::cluster.b64 _,", "", []),
        ("bar.sync 0;", "mbarrier.arrive.shared::cluster.b64 _,", "", []),
        ("barrier.cta.sync.aligned 0;", "mbarrier.arrive.shared::cluster.b64 _,", "", []),
        ("", "mbarrier.arrive.release.cluster.shared::cluster.b64 _,", SYNC, ["race"]),
        ("", "mbarrier.arrive.release.cluster.shared::cluster.b64 _,", "", ["exited block", "race"]),
    ],
)
def test_a_remote_arrival_hands_on_what_its_thread_knows(
    before: str, arrive: str, after: str, kinds: list[str], seed: int | None
) -> None:
    body = PASS_ON.format(SYNC=SYNC.replace("\n", " "), OUT=OUT, before=before, arrive=arrive, after=after)
    result, y = launch(body, grid=4, seed=seed)
    assert sorted({f.kind for f in result.findings}) == kinds
    if not kinds:
        assert (y.reshape(2, 2, 32)[:, 0] == np.arange(128).reshape(2, 2, 32)[:, 1]).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("meet", "kinds"), [("bar.sync 0;", set()), ("bar.sync 7, 64;", set()), ("", {"race"})])
def test_what_one_warp_heard_of_another_block_its_own_block_may_hear(meet: str, kinds: set[str], seed: int | None) -> None:
    """Rank 0's first warp waits for rank 1's message, and the second one reads what came with it."""
    body = f"""@%p1 mbarrier.init.shared.b64 [%r6], 64;
    {SYNC.replace(chr(10), " ")}
    @%p2 bra RECEIVE;
    st.shared::cluster.u32 [%r13], %r10; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7];
    bra DONE;
    RECEIVE: setp.ge.u32 %p4, %r1, 32; @%p4 bra MEET;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r6], 0; @!%p3 bra WAIT;
    MEET: {meet}
    @%p4 ld.shared.u32 %r20, [%r12];
    DONE: {SYNC}"""
    assert {f.kind for f in launch(body, block=64, seed=seed)[0].findings} - {"uninitialised"} == kinds


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("meet", "kinds"), [(SYNC, set()), ("", {"race"})])
def test_what_one_block_heard_of_another_cluster_its_own_cluster_may_hear(meet: str, kinds: set[str], seed: int | None) -> None:
    """Block 0 writes a word and raises a flag, block 2 waits for it, block 3 of its cluster reads the word."""
    body = f"""setp.eq.and.u32 %p3, %r8, 0, %p1; @%p3 st.global.u32 [%rd1], 7; @%p3 st.release.gpu.global.u32 [%rd1+4], 1;
    setp.eq.and.u32 %p3, %r8, 2, %p1; @!%p3 bra MEET;
    WAIT: ld.acquire.gpu.global.u32 %r21, [%rd1+4]; setp.ne.u32 %p4, %r21, 1; @%p4 bra WAIT;
    MEET: {meet}
    setp.eq.and.u32 %p3, %r8, 3, %p1; @%p3 ld.global.u32 %r22, [%rd1];
    """
    assert {f.kind for f in launch(body, grid=4, seed=seed)[0].findings} == kinds


@pytest.mark.parametrize("seed", SEEDS)
def test_a_remote_arrival_may_bring_bytes_that_are_expected(seed: int | None) -> None:
    arrive = "mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%r7], 8; @%p1 mbarrier.arrive.shared::cluster.b64 _,"
    body = PASS_ON.format(SYNC=SYNC.replace("\n", " "), OUT=OUT, before="bar.sync 0;", arrive=arrive, after="")
    tell = "@%p1 mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r7], 8;\nbra DONE;"
    assert found(body.replace("bra DONE;", tell, 1), seed=seed) == []
    joined = body.replace("@%p1 mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%r7], 8; ", "").replace(
        "mbarrier.arrive.shared::cluster.b64 _, [%r7]", "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r7], 8"
    )
    assert found(joined.replace("bra DONE;", tell, 1), seed=seed) == []
    (finding,) = launch(body, seed=seed)[0].findings
    assert finding.kind == "deadlock" and "0 arrivals and 8 bytes" in finding.message


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scope", ["cluster", "gpu", "cta"])
def test_flags_in_shared_memory_of_another_block(scope: str, seed: int | None) -> None:
    """Release and acquire on a word of another block's memory order as far as their scope reaches."""
    body = f"""@%p1 st.shared.u32 [%r4+512], 0;
    {SYNC.replace(chr(10), " ")}
    @%p2 bra RECEIVE;
    st.shared::cluster.u32 [%r13], %r10;
    bar.sync 0;
    fence.acq_rel.{scope};
    @%p1 st.relaxed.{scope}.shared::cluster.u32 [%r5+512], 1;
    bra DONE;
    RECEIVE: @!%p1 bra MEET;
    SPIN: ld.relaxed.{scope}.shared.u32 %r21, [%r4+512];
    setp.ne.u32 %p3, %r21, 1;
    @%p3 bra SPIN;
    fence.acq_rel.{scope};
    MEET: bar.sync 0;
    ld.shared.u32 %r20, [%r12];
    DONE: {SYNC}"""
    result, _ = launch(body, seed=seed)
    assert {f.kind for f in result.findings} == ({"race"} if scope == "cta" else set())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_barrier_of_the_cluster_orders_global_memory_in_it_and_not_beyond(seed: int | None) -> None:
    """All blocks read a word, then one writes it: enough in one cluster, a race with the readers of the next."""
    body = f"ld.global.u32 %r21, [%rd1];\n{SYNC}setp.eq.u32 %p3, %r10, 0;\n@%p3 st.global.u32 [%rd1], 7;"
    assert found(body, grid=4, cluster=4, block=64, seed=seed) == []
    assert found(body, grid=4, cluster=2, block=64, seed=seed) == [("race", 4)]
    assert found(body.replace(SYNC, "bar.sync 0;\nbar.sync 0;\n"), grid=4, cluster=4, block=64, seed=seed) == [("race", 4)]


@pytest.mark.parametrize("seed", SEEDS)
def test_several_warps_that_read_global_memory_are_behind_a_block_barrier(seed: int | None) -> None:
    body = "mad.wide.u32 %rd3, %r8, 4, %rd1; ld.global.u32 %r21, [%rd3];\nbar.sync 0;\n@%p1 st.global.u32 [%rd3], 7;"
    assert found(body, block=96, seed=seed) == []
    assert found(body.replace("bar.sync 0;", ""), block=96, seed=seed) == [("race", 2)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_barrier_in_a_cluster_orders_its_block(seed: int | None) -> None:
    body = (
        """st.shared.u32 [%r12], %r10;
    bar.sync 0;
    mov.u32 %r21, 63; sub.u32 %r21, %r21, %r1; shl.b32 %r21, %r21, 2; add.u32 %r21, %r21, %r4;
    ld.shared.u32 %r20, [%r21];
    bar.sync 0;
    st.shared.u32 [%r12], 0;
    """
        + OUT
    )
    result, y = launch(body, block=64, seed=seed)
    assert result.findings == () and (y.reshape(2, 64) == np.arange(128).reshape(2, 64)[:, ::-1]).all()
    assert found(body.replace("bar.sync 0;", "", 1), block=64, seed=seed) in ([("race", 3)], [("race", 3), ("uninitialised", 3)])
    second = body.replace("bar.sync 0;\n    st.shared", "st.shared")
    assert found(second, block=64, seed=seed) == [("race", 4)]


# -- a kernel in CUDA C -----------------------------------------------------------------------------------------------------------


PIPELINE = """
#define SHARED(p) ((unsigned)__cvta_generic_to_shared(p))
__device__ unsigned there(unsigned address, unsigned rank) {
  unsigned out;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(rank));
  return out;
}
__device__ void wait(unsigned bar, unsigned parity) {
  asm volatile("{.reg .pred p; W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1; @!p bra W;}"
               :: "r"(bar), "r"(parity) : "memory");
}
__device__ void arrive(unsigned bar) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(bar) : "memory");
}
// Rank 0 sends tiles of x through a ring of two stages in rank 1's memory, which doubles them into y.
extern "C" __global__ void __cluster_dims__(2, 1, 1) ring(const float* x, float* y, int tiles) {
  __shared__ float stage[2][64];
  __shared__ unsigned long long full[2], empty[2];
  unsigned rank, t = threadIdx.x;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (t == 0)
    for (int s = 0; s < 2; s++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(SHARED(full + s)), "r"(64));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(SHARED(empty + s)), "r"(64));
    }
  INIT
  START
  for (int i = 0; i < tiles; i++) {
    int s = i % 2, at = (blockIdx.x / 2 * tiles + i) * 64 + t;
    if (rank == 0) {
      if (i >= 2) wait(SHARED(empty + s), i / 2 + 1 & 1); // EMPTY
      asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(there(SHARED(&stage[s][t]), 1)), "f"(x[at]) : "memory"); // SEND
      arrive(there(SHARED(full + s), 1)); // FULL
    } else {
      wait(SHARED(full + s), i / 2 & 1); // ARRIVED
      y[at] = 2 * stage[s][63 - t]; // READ
      arrive(there(SHARED(empty + s), 0)); // FREE
    }
  }
  END
}
"""
INIT = 'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");'
MEET = 'asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" ::: "memory");'
END = MEET.replace(".relaxed", "")


def ring(seed: int | None, change: tuple[str, str] = ("", "")) -> tuple[Launch, bool, list[str]]:
    """The launch, whether y is right, and the source's lines."""
    source = PIPELINE.replace("  INIT\n", f"  {INIT}\n").replace("  START\n", f"  {MEET}\n").replace("  END\n", f"  {END}\n")
    assert change[0] in source
    source = source.replace(*change) if change[0] else source
    module = compile_cuda(source, "-arch=compute_90", "-lineinfo")
    x = np.random.default_rng(0).random((2, 5, 64), np.float32)
    y = np.zeros_like(x)
    result = module.launch("ring", 4, 64, [x, y, 5], seed=seed)
    return result, bool((y == 2 * x[:, :, ::-1]).all()), source.splitlines()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_ring_between_two_blocks(seed: int | None) -> None:
    result, right, _ = ring(seed)
    assert result.findings == () and right
    assert result.counters.distributed[("st", 4)].bytes == 2 * 5 * 64 * 4
    assert result.counters.distributed[("atom", 8)].requests == 2 * 2 * 5 * 2


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("change", "kinds", "at"),
    [
        ((f"  {INIT}\n", ""), {"race"}, {"mbarrier.arrive", "mbarrier.try_wait"}),
        (("if (i >= 2) wait(SHARED(empty + s), i / 2 + 1 & 1);", ""), {"race"}, {"// SEND", "// READ"}),
        (
            ("arrive(there(SHARED(full + s), 1));", "if (t < 32) arrive(there(SHARED(full + s), 1));"),
            {"deadlock"},
            {"mbarrier.try_wait"},
        ),
        (("// FREE", "stage[s][t] = 0; // FREE"), {"race"}, {"// SEND", "// READ", "// FREE"}),
        (("arrive(there(SHARED(empty + s), 0)); // FREE", "if (i < 3) arrive(there(SHARED(empty + s), 0)); // FREE"), set(), set()),
    ],
)
def test_faults_of_the_ring_are_found_at_their_lines(
    change: tuple[str, str], kinds: set[str], at: set[str], seed: int | None
) -> None:
    result, _, lines = ring(seed, change)
    # Who overtakes may leave the other one waiting for a phase that is over. If all is sent before anything is read, the
    # first tile is behind all that were sent to its stage, the second is never read, and nothing races.
    found = {f.kind for f in result.findings}
    if found == {"deadlock"} and result.traffic["arg1"].write_requests <= 2 * 2:
        kinds = kinds - {"race"}
    assert kinds <= found <= kinds | ({"deadlock", "uninitialised"} if result.findings else set()), result.findings
    for finding in result.findings:
        if finding.kind in kinds:
            assert finding.source is not None and any(text in lines[finding.source[1] - 1] for text in at), finding
    if kinds == {"deadlock"}:
        assert any("(full" in f.message and "lacks 32 arrivals" in f.message for f in result.findings)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_ring_s_last_messages(seed: int | None) -> None:
    """Without a barrier at the end rank 0 may exit before it is told that its last tiles were read."""
    result, right, lines = ring(seed, (f"  {END}\n", ""))
    assert right and {f.kind for f in result.findings} == {"exited block"}
    assert all(f.source is not None and "mbarrier.arrive" in lines[f.source[1] - 1] for f in result.findings)
