"""Seeds: warps run apart in orders drawn at random, and that costs a few times what running together does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import numpy as np
import pytest
from test_ptx_harness import kernel, run

from cupyflash.sim.ptx.execute.ptx_machine import PtxMachine
from cupyflash.sim.ptx.execute.scheduler import SeededReady
from cupyflash.sim.ptx.state.lane_sets import LaneSet, Wave

REGISTERS = ".reg .b64 %rd<20>; .reg .b32 %r<20>; .reg .pred %p<6>;"
PLACES = """ld.param.u64 %rd1, [y]; ld.param.u64 %rd2, [ticket]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r4, %ntid.x;
    mad.lo.u32 %r3, %r2, %r4, %r1; mad.wide.u32 %rd1, %r3, 4, %rd1; and.b32 %r5, %r1, 31;"""
TICKET = "setp.eq.u32 %p1, %r5, 0; @%p1 atom.global.add.u32 %r6, [%rd2], 1; @%p1 st.global.u32 [%rd1], %r6;"
"""The first lane of each warp stores how many came before it."""


def tickets(seed: int, blocks: int, warps: int) -> np.ndarray:
    """(blocks, warps): when each warp came."""
    y, ticket = np.zeros(32 * blocks * warps, np.uint32), np.zeros(1, np.uint32)
    text = kernel(PLACES + TICKET, (".u64 y", ".u64 ticket"), REGISTERS)
    run(text, {"y": y, "ticket": ticket}, grid=blocks, block=32 * warps, seed=seed)
    return y[::32].reshape(blocks, warps)


def test_warps_of_a_block_come_in_every_order() -> None:
    assert {tuple(tickets(seed, 1, 3)[0].argsort().tolist()) for seed in range(40)} == set(permutations(range(3)))


def test_blocks_come_in_every_order() -> None:
    assert {tuple(tickets(seed, 3, 1)[:, 0].argsort().tolist()) for seed in range(40)} == set(permutations(range(3)))


def test_any_warp_may_come_before_any_other() -> None:
    before = sum((t := tickets(seed, 1, 9)[0])[:, None] < t for seed in range(40))
    assert np.asarray(before)[~np.eye(9, dtype=bool)].min() > 0


def test_blocks_of_one_launch_have_orders_of_their_own() -> None:
    assert len({tuple(one.argsort().tolist()) for one in tickets(0, 200, 3)}) == 6


def test_an_order_is_the_seeds() -> None:
    assert all((tickets(seed, 7, 5) == tickets(seed, 7, 5)).all() for seed in (0, 1))
    assert (tickets(0, 7, 5) != tickets(1, 7, 5)).any()


def test_a_warp_runs_ahead_as_far_as_a_barrier_allows() -> None:
    """Every warp counts its rounds: where nobody waits, one is through before another has begun, with barriers never."""
    body = (
        PLACES
        + """shr.u32 %r7, %r1, 5; mov.u32 %r8, 0; cvta.to.global.u64 %rd2, %rd2; mul.wide.u32 %rd3, %r7, 4;
        add.u64 %rd3, %rd2, %rd3; xor.b32 %r9, %r7, 1; mul.wide.u32 %rd4, %r9, 4; add.u64 %rd4, %rd2, %rd4; mov.u32 %r10, 0;
        LOOP: add.u32 %r8, %r8, 1; st.volatile.global.u32 [%rd3], %r8; WAIT; ld.volatile.global.u32 %r11, [%rd4];
        sub.s32 %r11, %r8, %r11; max.s32 %r10, %r10, %r11; setp.lt.u32 %p1, %r8, 8; @%p1 bra LOOP; st.global.u32 [%rd1], %r10;"""
    )
    ahead = {}
    for wait in ("mov.u32 %r12, 0", "bar.sync 0"):
        text = kernel(body.replace("WAIT", wait), (".u64 y", ".u64 ticket"), REGISTERS)
        found = []
        for seed in range(12):
            y = np.zeros(64, np.uint32)
            run(text, {"y": y, "ticket": np.zeros(2, np.uint32)}, block=64, seed=seed)
            found.append(int(y.max()))
        ahead[wait] = max(found)
    assert ahead == {"mov.u32 %r12, 0": 8, "bar.sync 0": 0}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The lanes of every stretch of code that machines run from now on."""
    seen: list[int] = []
    step = PtxMachine.step

    def counted(self: PtxMachine, pc: int, lanes: LaneSet) -> None:
        seen.append(lanes.n)
        step(self, pc, lanes)

    monkeypatch.setattr(PtxMachine, "step", counted)
    yield seen


ROUNDS = """.shared .align 4 .b8 s[1024]; shl.b32 %r6, %r1, 2; mov.u32 %r7, s; add.u32 %r7, %r7, %r6; mov.u32 %r8, 0; TRIPS
    LOOP: st.shared.u32 [%r7], %r8; bar.sync 0; add.u32 %r8, %r8, 1; setp.lt.u32 %p1, %r8, %r9; @%p1 bra LOOP;
    st.global.u32 [%rd1], %r8;"""
"""A loop with a barrier, of %r9 rounds."""


@pytest.mark.parametrize(("trips", "most"), [("mov.u32 %r9, 20;", 4.5), ("and.b32 %r9, %r2, 15; add.u32 %r9, %r9, 8;", 6)])
def test_a_seed_takes_a_few_times_the_steps(steps: list[int], trips: str, most: float) -> None:
    """32 blocks of 8 warps: each of the 256 by itself would take 256 times as many."""
    text = kernel(PLACES + ROUNDS.replace("TRIPS", trips), (".u64 y", ".u64 ticket"), REGISTERS)
    counts = []
    for seed in (None, 0, 1, 2):
        steps.clear()
        y = np.zeros(32 * 256, np.uint32)
        launch = run(text, {"y": y, "ticket": None}, grid=32, block=256, seed=seed)
        rounds = np.full(32, 20) if "20" in trips else np.arange(32) % 16 + 8
        assert launch.findings == () and (y.reshape(32, 256) == rounds[:, None]).all()
        assert launch.counters.barriers == rounds.sum()
        counts.append(len(steps))
    assert max(counts[1:]) <= most * counts[0], counts


@pytest.mark.parametrize("blocks", [1, 16])
def test_with_wgmma_three_of_four_blocks_keep_their_warpgroups_together(blocks: int) -> None:
    wave = Wave(0, blocks, 12 * 32, 0, 0)
    for seed in range(8):
        ready = SeededReady(np.random.default_rng(seed), wave, warpgroups=True)
        chosen = set()
        for _ in range(3):
            teams = ready.team_of.reshape(blocks, 3, 4)
            whole = (teams == teams[:, :, :1]).all(axis=(1, 2))
            assert whole.sum() == blocks * 3 // 4
            assert all(len(set(groups)) == 3 for groups in teams[whole, :, 0].tolist())
            assert (np.sort(teams[~whole].reshape(-1, 12)) == np.repeat(np.arange(4), 3)).all()
            # Blocks that are spread alike stay in step; who that is stays so.
            assert len(np.unique(teams, axis=0)) <= 4
            chosen.add(tuple(whole.tolist()))
            ready.draw()
        assert len(chosen) == 1
