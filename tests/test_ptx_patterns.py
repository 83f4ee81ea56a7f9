"""Patterns of addresses are worked out once: each access gets the result that it would get by itself; memory of a launch."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_ptx_harness import compile_cuda

from cupyflash import Device, Problem, plan
from cupyflash.sim.execution import allocate, run
from cupyflash.sim.ptx.decode.matrices import HALF_VALUES, widen_halves
from cupyflash.sim.ptx.order.shadow import Shadow
from cupyflash.sim.ptx.state.lane_sets import REMEMBERED_LANES, Grid, LaneSet, Wave, wavefronts
from cupyflash.sim.ptx.state.segments import PAGE, Pages
from suites import wide

SIZES = [1, 2, 4, 8, 16]


def some_lanes(wave: Wave, rng: np.random.Generator) -> LaneSet:
    chosen = rng.random(wave.size) < rng.choice([0.1, 0.5, 1.0])
    chosen[rng.integers(wave.size)] = True
    return wave.lanes(np.flatnonzero(chosen))


def passes(lanes: LaneSet, addresses: np.ndarray, size: int) -> tuple[int, int]:
    """(wavefronts, ideal ones) by definition: in each turn of 128 bytes the most distinct words of a column; one a turn."""
    turns: dict[int, list[list[int]]] = {}
    unit = max(size, 4)
    columns = 128 // unit
    for lane, address in zip(lanes.index.tolist(), addresses.tolist(), strict=True):
        word = address // unit
        turns.setdefault(lane // columns, [[] for _ in range(columns)])[word % columns].append(word)
    return sum(max(len(set(words)) for words in banks) for banks in turns.values()), len(turns)


@given(st.integers(0, 1000), st.sampled_from(SIZES))
def test_a_pattern_moved_counts_as_its_accesses(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    wave = Wave(0, 3, 70, 4096, 16)
    lanes = some_lanes(wave, rng)
    relative = rng.integers(0, rng.choice([2, 40, 400]), lanes.n) * size
    for start in (0, 3 * size, 1024, 1024 + size):
        addresses = (relative + start).astype(np.uint32)
        first, pattern = lanes.pattern(addresses, size)
        assert first == addresses[0] and pattern.aligned
        assert wavefronts(lanes, addresses, size) == passes(lanes, addresses, size)
        pairs = set(zip(lanes.warp.tolist(), addresses.tolist(), strict=True))
        assert pattern.unique_bytes == size * len(pairs)
        assert pattern.sectors(first) == len({(warp, address // 32) for warp, address in pairs})
        index = pattern.index("shared", lanes.shared_base, first)
        assert (index == addresses // size + lanes.block * (4096 // size)).all()
        end = int(addresses.max()) + size
        assert pattern.fits(first, end) and not pattern.fits(first, end - 1)
        assert size == 1 or not pattern.fits(first + 1, end + size)


def test_patterns_are_told_apart_and_forgotten() -> None:
    """More patterns, and more lanes, than are remembered: each access gets its own counts all the same."""
    wave = Wave(0, 64, 128, 16, 16)
    lanes = wave.lanes(np.arange(wave.size))
    for k in [*range(1, 40), *range(1, 40)]:
        addresses = (lanes.lane * 4 * k).astype(np.uint32)
        assert wavefronts(lanes, addresses, 4)[0] == wave.size // 32 * math.gcd(k, 32)
        assert wave.patterns._lanes <= REMEMBERED_LANES


def test_every_half_is_widened_exactly() -> None:
    """Finite halves by the arithmetic of bits, also next to infinities and NaN, which go by the table."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    finite = bits[(bits & 0x7C00) != 0x7C00]
    for some in (finite, bits, finite[:64], bits[31700:31800], bits[64000:64640]):
        out = np.empty(some.shape, np.float32)
        widen_halves(some, out)
        assert (out.view(np.uint32) == HALF_VALUES[some].view(np.uint32)).all()
        numbers = ~np.isnan(out)
        assert (out[numbers] == some.view(np.float16).astype(np.float32)[numbers]).all()


# -- memory -------------------------------------------------------------------------------------------------------------


def test_shadows_go_with_their_launch() -> None:
    """Objects of a launch refer to each other: the shadows, most of its memory, do not wait for the garbage collector."""
    source = """extern "C" __global__ void k(float* x) {
        __shared__ float s[64];
        s[threadIdx.x] = 1;
        x[threadIdx.x] += s[63 - threadIdx.x];
    }"""
    module, shadows = compile_cuda(source), []
    made = Shadow.__init__

    def kept(shadow: Shadow, *args: Any) -> None:
        made(shadow, *args)
        shadows.append(shadow)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPYFLASH_ENGINE", "numpy")
        patch.setattr(Shadow, "__init__", kept)
        assert module.launch(None, 2, 64, [np.zeros(64, np.float32)]).findings
    left = [shadow for shadow in shadows if vars(shadow) and shadow.writes.rows]
    assert len(shadows) == 3 and not left  # one before the first wave, one of shared memory, one of x


def peak(call: object) -> int:
    assert callable(call)
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.wide
@pytest.mark.parametrize("masked", [False, True])
def test_memory_of_attention_is_that_of_its_tensors_and_of_one_wave(masked: bool) -> None:
    """With the tensors themselves it is at most four times the tensors; the memory of one wave is the growth from a single further
    wave."""
    rng = np.random.default_rng(0)
    peaks, tensors = [], []
    for heads in (32, 128):
        problem = Problem(1, heads, heads, 64, 64, 64, "float16", mask=masked)
        schedule = plan(problem, Device.named("A100-40GB"), "fa1", lse=True)
        q, k, v = (rng.standard_normal((1, heads, 64, 64)).astype(np.float16) for _ in range(3))
        out, lse, spaces = np.empty_like(q), np.empty((1, heads, 64), np.float32), allocate(schedule)
        tensors.append(sum(x.nbytes for x in (q, k, v, out, lse, *spaces.values())))
        arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "mask": np.ones((1, 1, 64, 64), np.bool_) if masked else None}
        call = lambda: run(schedule, arrays, workspaces=spaces)  # noqa: B023, E731
        call()  # compiled and decoded
        peaks.append(peak(call))
    assert peaks[1] - peaks[0] < 3 * (tensors[1] - tensors[0])


@given(st.integers(0, 50), st.lists(st.integers(1, 4), min_size=3, max_size=3), st.lists(st.integers(0, 5), min_size=3, max_size=3))
def test_lanes_at_equal_distances_are_a_grid(first: int, counts: list[int], gaps: list[int]) -> None:
    """Columns of an array by the grid of their numbers are the columns; a set with one lane moved is no grid, or that one."""
    inner, middle, outer = counts
    step = inner + gaps[0]
    jump = middle * step + gaps[1]
    index = (first + np.arange(outer)[:, None, None] * jump + np.arange(middle)[:, None] * step + np.arange(inner)).reshape(-1)
    rows = np.arange(3 * (int(index[-1]) + 9)).reshape(3, -1)
    for chosen in (index, np.append(index, index[-1] + 1 + gaps[2]), np.setdiff1d(index, index[len(index) // 2])):
        grid = Grid.find(chosen) if len(chosen) else None
        assert grid is not None or chosen is not index
        if grid is not None:
            assert (grid.of(rows).reshape(3, -1) == rows[:, chosen]).all()


@given(st.integers(8, 40), st.integers(1, 4), st.integers(0, 2**16), st.integers(1, 24))
def test_pages_of_ranges(lines: int, blocks: int, draw: int, units: int) -> None:
    """Every byte of a range is in a page of it, pages are of one block, and whole ranges are all bytes of their pages."""
    stride, size = 128 * lines, 16 * units
    pages, block = Pages(stride, blocks), draw % blocks
    start = block * stride + draw * 16 % max(16, stride - size)
    if start + size > (block + 1) * stride:
        return
    (found,), whole = pages.of_ranges(np.array([start]), size)
    every = pages.of(np.arange(blocks * stride))
    assert set(found.tolist()) == set(every[start : start + size].tolist())
    assert (every.reshape(blocks, -1) // pages.per_block == np.arange(blocks)[:, None]).all()
    assert whole == (int(np.isin(every, found).sum()) == size and size % PAGE == 0)
    assert (every[pages.start(found)] == found).all() and (np.bincount(every)[found] == PAGE)[pages.whole(found)].all()


@pytest.mark.parametrize("seed", range(8))
def test_sets_of_lanes_meet(seed: int) -> None:
    rng = np.random.default_rng(seed)
    wave = Wave(0, 3, 96, 128, 32)
    for _ in range(20):
        some, others = some_lanes(wave, rng), some_lanes(wave, rng)
        assert wave.meet(some, others) == bool(np.isin(some.index, others.index).any())
        assert (some.warp_ids == np.unique(some.warp)).all()


COPY = """extern "C" __global__ void copy(const TYPE* x, TYPE* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];
}"""


@pytest.mark.parametrize("kind", ["float", wide("float4"), wide("unsigned long long")])
def test_memory_does_not_grow_with_the_grid(kind: str) -> None:
    """A grid of many waves: what is added to the tensors is the shadow of the one that is written, and one wave."""
    size = {"float": 4, "float4": 16}.get(kind, 8)
    module = compile_cuda(COPY.replace("TYPE", kind))
    peaks = []
    for n in (1 << 16, 1 << 18):
        x, y = np.ones(n * size, np.uint8), np.zeros(n * size, np.uint8)
        call = lambda: module.launch("copy", n // 256, 256, [x, y, n])  # noqa: B023, E731
        assert call().findings == () and (x == y).all() and call().counters.waves == n // 4096
        peaks.append(peak(call) + x.nbytes + y.nbytes)
    assert peaks[1] - peaks[0] < 4 * 2 * size * ((1 << 18) - (1 << 16))
