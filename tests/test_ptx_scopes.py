"""Scopes: what orders and is atomic between blocks, and what only within one or within a cluster of them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from cupyflash.sim.ptx import Launch, Module
from cupyflash.sim.ptx.order.moments import GridClock
from suites import sample

SEEDS = sample([None, 0, 1], [0])

HEAD = ".version 8.6\n.target sm_90a\n.address_size 64\n"
REGISTERS = ".reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .pred %p<4>;"
START = """ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [n]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
shr.u32 %r3, %r1, 5; or.b32 %r3, %r3, %r2; and.b32 %r4, %r1, 31; setp.ne.u32 %p1, %r4, 0; @%p1 bra DONE; setp.ne.u32 %p1, %r3, 0;
@%p1 bra READ;"""


@cache
def compiled(text: str) -> Module:
    return Module.from_ptx(text)


def passed(send: str, receive: str, apart: str, seed: int | None = None) -> Launch:
    """One thread writes x[0] and sends a flag n[0], another waits for that and reads x[0]: of two warps or of two blocks."""
    body = f"""{START} mov.u32 %r5, 7; st.global.u32 [%rd1], %r5; mov.u32 %r5, 1; {send} bra DONE;
    READ: {receive} setp.eq.u32 %p2, %r6, 0; @%p2 bra READ;
    {AFTER.get(receive, "")} ld.global.u32 %r7, [%rd1]; st.global.u32 [%rd1+64], %r7;
    DONE: ret;"""
    text = f"{HEAD}.visible .entry k(.param .u64 x, .param .u64 n)\n{{\n{REGISTERS}\n{body}\n}}\n"
    x, n = np.zeros(32, np.uint32), np.zeros(4, np.uint32)
    grid, block, cluster = {"warps": (1, 64, None), "blocks": (2, 32, None), "a cluster": (2, 32, 2)}[apart]
    found = compiled(text).launch("k", grid, block, {"x": x, "n": n}, seed=seed, cluster=cluster)
    assert x[16] == 7
    return found


def raced(found: Launch) -> set[str | None]:
    """The tensors with races, the flag left out: an access to it may be one itself, if its scope is too narrow."""
    assert {f.kind for f in found.findings} <= {"race"}, found.findings
    return {f.tensor for f in found.findings} - {"n"}


SENDS = {
    "release": "st.release.{}.global.u32 [%rd2], %r5;",
    "fence, relaxed": "fence.acq_rel.{}; st.relaxed.{}.global.u32 [%rd2], %r5;",
    "fence.sc, atomic": "fence.sc.{}; atom.exch.relaxed.{}.global.b32 %r5, [%rd2], %r5;",
    "atomic": "red.release.{}.global.or.b32 [%rd2], %r5;",
    "membar, volatile": "membar.{}; st.volatile.global.u32 [%rd2], %r5;",
}
RECEIVES = {
    "acquire": "ld.acquire.{}.global.u32 %r6, [%rd2];",
    "relaxed, fence": "ld.relaxed.{}.global.u32 %r6, [%rd2];",
    "atomic": "atom.or.acquire.{}.global.b32 %r6, [%rd2], 0;",
}
AFTER = {RECEIVES["relaxed, fence"].format(scope): f"fence.acq_rel.{scope};" for scope in ("cta", "cluster", "gpu", "sys")}
REACHES = {"cta": {"warps"}, "cluster": {"warps", "a cluster"}, "gpu": {"warps", "a cluster", "blocks"}}


def text_of(form: str, scope: str) -> str:
    """A way to send with a scope; membar has names of its own, and none for the cluster."""
    return form.replace("membar.{}", {"cta": "membar.cta", "cluster": "fence.acq_rel.cluster", "gpu": "membar.gl"}[scope]).replace(
        "{}", scope
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("apart", ["warps", "a cluster", "blocks"])
@pytest.mark.parametrize("scope", REACHES)
@pytest.mark.parametrize("send", SENDS)
def test_a_message_is_heard_in_its_scope(send: str, scope: str, apart: str, seed: int | None) -> None:
    for receive in RECEIVES.values():
        found = passed(text_of(SENDS[send], scope), receive.format("gpu"), apart, seed)
        assert raced(found) == (set() if apart in REACHES[scope] else {"x"}), (receive, found.findings)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("apart", ["warps", "a cluster", "blocks"])
@pytest.mark.parametrize("scope", REACHES)
@pytest.mark.parametrize("receive", RECEIVES)
def test_a_message_is_heard_by_the_scope_of_who_reads_it(receive: str, scope: str, apart: str, seed: int | None) -> None:
    text = RECEIVES[receive].format(scope)
    found = passed(SENDS["release"].format("gpu"), text, apart, seed)
    assert raced(found) == (set() if apart in REACHES[scope] else {"x"}), found.findings


def test_a_wide_fence_does_not_widen_what_follows_it_nor_a_wide_store_its_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    for fence, store in (("gpu", "cta"), ("cta", "gpu")):
        send = f"fence.acq_rel.{fence}; st.relaxed.{store}.global.u32 [%rd2], %r5;"
        assert raced(passed(send, RECEIVES["acquire"].format("gpu"), "blocks")) == {"x"}
        assert passed(send, RECEIVES["acquire"].format("gpu"), "warps").findings == ()
    narrow = "ld.relaxed.gpu.global.u32 %r6, [%rd2];"
    monkeypatch.setitem(AFTER, narrow, "fence.acq_rel.cta;")  # other tests of this process have the wide one
    assert raced(passed(SENDS["release"].format("gpu"), narrow, "blocks")) == {"x"}


def counted(add: str, grid: int, cluster: int | None = None, seed: int | None = None) -> Launch:
    """Every thread of `grid` blocks of 64 adds 1 to n[0]."""
    text = f"""{HEAD}.visible .entry k(.param .u64 n)\n{{\n{REGISTERS} ld.param.u64 %rd2, [n]; mov.u32 %r5, 1;
    mov.u32 %r2, %ctaid.x; {add} ret;\n}}\n"""
    return compiled(text).launch("k", grid, 64, {"n": np.zeros(64, np.uint32)}, cluster=cluster, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("add", ["red.relaxed{}.global.add.u32 [%rd2], %r5;", "atom.add.acq_rel{}.u32 %r6, [%rd2], %r5;"])
def test_atomics_are_atomic_in_their_scope(add: str, seed: int | None) -> None:
    for scope, grid, cluster, races in (
        (".cta", 1, None, False),
        (".cta", 4, None, True),
        (".cta", 4, 2, True),
        (".cluster", 2, 2, False),
        (".cluster", 4, 2, True),
        (".gpu", 4, None, False),
        (".sys", 4, None, False),
        ("", 4, None, False),
    ):
        found = counted(add.format(scope), grid, cluster, seed)
        assert {f.kind for f in found.findings} == ({"race"} if races else set()), (scope, grid, cluster, found.findings)
        if races:
            (finding,) = found.findings
            assert "the scope of one of them leaves out" in finding.message and finding.tensor == "n"


def test_one_narrow_access_is_enough() -> None:
    """Of a pair one atomic of the block races with those of other blocks, unless both only read."""
    mixed = "setp.eq.u32 %p1, %r2, 0; @%p1 {} @!%p1 {} setp.eq.u32 %p2, %r2, 9; @%p2 st.global.u32 [%rd2], %r5;"
    wide, narrow = "red.global.add.u32 [%rd2], %r5;", "red.relaxed.cta.global.add.u32 [%rd2], %r5;"
    read = "ld.relaxed.cta.global.u32 %r6, [%rd2];"
    for one, other, races in (
        (wide, narrow, True),
        (narrow, wide, True),
        (wide, read, True),
        (read, wide, True),
        (read, read, False),
    ):
        found = counted(mixed.format(one, other), 2)
        assert {f.kind for f in found.findings} == ({"race"} if races else set()), (one, other, found.findings)
    assert counted(f"{read} setp.eq.u32 %p2, %r2, 9; @%p2 st.global.u32 [%rd2], %r5;", 4).findings == ()
    # The narrower of two scopes counts, be it of who came first or last.
    near = "red.relaxed.cluster.global.add.u32 [%rd2], %r5;"
    for one, other, races in ((narrow, near, True), (near, narrow, True), (near, wide, False), (wide, near, False)):
        found = counted(mixed.format(one, other), 2, 2)
        assert {f.kind for f in found.findings} == ({"race"} if races else set()), (one, other, found.findings)


def test_shared_memory_of_another_block() -> None:
    """Atomics of the block on a word in shared memory are atomic within it, not towards those of the cluster's other blocks."""
    text = f"""{HEAD}.visible .entry k(.param .u64 n)\n{{\n{REGISTERS} .shared .b32 s; mov.u32 %r0, s; mov.u32 %r1, %tid.x;
    mov.u32 %r5, 1; mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.u32 [%r0], %r2;
    barrier.cluster.arrive; barrier.cluster.wait; WHOSE mapa.shared::cluster.u32 %r4, %r0, %r3;
    red.relaxed.SCOPE.shared::cluster.add.u32 [%r4], %r5; barrier.cluster.arrive; barrier.cluster.wait; ret;\n}}\n"""
    for whose, kinds in (
        ("mov.u32 %r3, %r2;", {"cta": set(), "cluster": set()}),
        ("mov.u32 %r3, 0;", {"cta": {"race"}, "cluster": set()}),
    ):
        for scope, expected in kinds.items():
            module = compiled(text.replace("WHOSE", whose).replace("SCOPE", scope))
            found = module.launch("k", 2, 64, {"n": np.zeros(1, np.uint32)}, cluster=2)
            assert {f.kind for f in found.findings} == expected, (whose, scope, found.findings)


def test_an_atomic_of_several_blocks_and_then_a_narrow_one_of_the_last() -> None:
    """The thread that came last does not stand for all that came at once."""
    both = "red.global.add.u32 [%rd2], %r5; setp.eq.u32 %p1, %r2, {}; @%p1 red.relaxed.cta.global.add.u32 [%rd2], %r5;"
    for block in (0, 1):
        assert {f.kind for f in counted(both.format(block), 2).findings} == {"race"}


def test_counters_of_a_block_each_are_its_own() -> None:
    own = "mul.wide.u32 %rd3, %r2, 4; add.u64 %rd2, %rd2, %rd3; red.relaxed.cta.global.add.u32 [%rd2], %r5;"
    assert counted(own, 8).findings == ()
    # Handed on in order they may also be others': what is ordered needs no scope.
    text = f"""{HEAD}.visible .entry k(.param .u64 n)\n{{\n{REGISTERS} ld.param.u64 %rd2, [n]; mov.u32 %r5, 1;
    mov.u32 %r2, %ctaid.x;
    TURN: ld.acquire.gpu.global.u32 %r6, [%rd2+4]; setp.ne.u32 %p1, %r6, %r2; @%p1 bra TURN;
    red.relaxed.cta.global.add.u32 [%rd2], %r5; add.u32 %r6, %r6, 1; st.release.gpu.global.u32 [%rd2+4], %r6; ret;\n}}\n"""
    n = np.zeros(2, np.uint32)
    assert Module.from_ptx(text).launch("k", 4, 1, {"n": n}).findings == () and n.tolist() == [4, 4]


LIBCU = """#include <cuda/atomic>
extern "C" __global__ void k(unsigned *x, unsigned *n) {
    cuda::atomic_ref<unsigned, cuda::thread_scope_%s> flag(*n);
    if (threadIdx.x) return;
    if (blockIdx.x == 0) { x[0] = 7; flag.store(1, cuda::memory_order_release); }
    else { while (!flag.load(cuda::memory_order_acquire)); x[16] = x[0]; }
}"""


@pytest.mark.parametrize(
    ("scope", "kinds"), [("block", {"race"}), ("device", set()), pytest.param("system", set(), marks=pytest.mark.wide)]
)
def test_scopes_of_libcu(scope: str, kinds: set[str]) -> None:
    x, n = np.zeros(32, np.uint32), np.zeros(1, np.uint32)
    found = Module.from_source(LIBCU % scope).launch("k", 2, 32, {"x": x, "n": n})
    assert {f.kind for f in found.findings} == kinds and x[16] == 7, found.findings


# -- clocks of a whole grid -----------------------------------------------------------------------------------------------------


def test_clocks_of_a_grid_say_what_arrays_of_all_its_lanes_would() -> None:
    """Joined at random, 6 clusters of 2 blocks of 64 lanes: moments of lanes, of warps, of blocks, of all."""
    rng, clusters, per = np.random.default_rng(5), 6, 128
    clocks: list[GridClock] = []
    dense: list[np.ndarray] = []
    for _ in range(40):
        mine = {int(one): rng.integers(1, 9, per) for one in rng.permutation(clusters)[: rng.integers(0, 3)]}
        whole = np.zeros((clusters, per), np.int64)
        for cluster, row in mine.items():
            whole[cluster] = row
        heard = rng.integers(0, len(clocks), 2).tolist() if clocks else []
        joined = GridClock.joined([GridClock(clusters, mine), None, *(clocks[one] for one in heard)])
        assert joined is not None
        clocks.append(joined)
        dense.append(np.maximum.reduce([whole.reshape(-1), *(dense[one] for one in heard)]))
        lanes = rng.integers(0, clusters * per, 50)
        for size in (1, 32, 64):
            assert (joined.at(lanes, per, size) == dense[-1].reshape(-1, size).min(axis=1)[lanes // size]).all()
        assert joined.least() == dense[-1].min()
        assert all((joined.row(one, per) == dense[-1].reshape(-1, per)[one]).all() for one in range(clusters))
    assert GridClock.joined([None]) is None and GridClock.joined([None, clocks[0]]) is clocks[0]


def test_a_chain_of_blocks_shares_what_all_have_heard() -> None:
    """As in a scan with look-back: each block hears of the one before, and so of all before that."""
    clock, count, rows = None, 300, set()
    for block in range(count):
        clock = GridClock.joined([GridClock(count, {block: np.full(32, block + 1)}), clock])
        assert clock is not None
        rows |= set(map(id, clock.rows.values()))
    assert clock is not None and len(clock.rows) == len(rows) == count
