"""Launches of one history: what streams, events and griddepcontrol order, and the races between launches that nothing orders."""

from __future__ import annotations

import gc
import mmap
import re
import weakref
from functools import cache
from typing import Any

import numpy as np
import pytest
from test_ptx_tma import HEAD, REGISTERS
from test_ptx_tma_faults import MAP_STORE, PIPE, PIPE_PARAMS

from cupyflash.sim import ptx
from cupyflash.sim.ptx.order import past as tables_of_past
from cupyflash.sim.ptx.order.moments import LaunchClock, OrderedLaunch
from suites import sample

SEEDS = sample([None, 0, 1, 2], [0])

SOURCE = r"""
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
#define GO asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
#define I (blockIdx.x * blockDim.x + threadIdx.x)
#define KERNEL(name) extern "C" __global__ void name
KERNEL(plain)(const float* a, float* b) { b[I] = a[I] + 1; }
KERNEL(waits)(const float* a, float* b) { WAIT; b[I] = a[I] + 1; }
KERNEL(early)(const float* a, float* b) { GO; WAIT; b[I] = a[I] + 1; }
KERNEL(never)(const float* a, float* b) { GO; b[I] = a[I] + 1; }
KERNEL(late)(const float* a, float* b) { b[I] = a[I] + 1; GO; }
KERNEL(fenced)(const float* a, float* b) { b[I] = a[I] + 1; __threadfence(); __syncthreads(); GO; }
KERNEL(fenced_block)(const float* a, float* b) { b[I] = a[I] + 1; __threadfence_block(); __syncthreads(); GO; }
KERNEL(fenced_alone)(const float* a, float* b) { if (threadIdx.x < 32) GO; b[I] = a[I] + 1; __threadfence(); GO; }
KERNEL(fenced_early)(const float* a, float* b) { b[I] = 0; __threadfence(); __syncthreads(); GO; b[I] = a[I] + 1; }
KERNEL(fenced_warp)(const float* a, float* b) { b[I] = a[I] + 1; __threadfence(); GO; }
KERNEL(fenced_copy)(const float* a, float* b) {
    __shared__ float tile[64];
    unsigned to = (unsigned)__cvta_generic_to_shared(tile + threadIdx.x);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(a + I) : "memory");
    __threadfence();
    __syncthreads();
    GO;
}
KERNEL(one_warp_early)(const float* a, float* b) { if (threadIdx.x < 32) { WAIT; GO; } else { GO; b[I] = a[I] + 1; } }
KERNEL(one_block_waits)(const float* a, float* b) { if (blockIdx.x == 0) WAIT; b[I] = a[I] + 1; }
KERNEL(reads_volatile)(const float* a, float* b) { b[I] = *(const volatile float*)(a + I); }
KERNEL(one_waits)(const float* a, float* b) { if (threadIdx.x == 0) WAIT; __syncthreads(); b[I] = a[I] + 1; }
KERNEL(one_waits_for_phase)(const float* a, float* b) {
    __shared__ __align__(8) unsigned long long phase;
    unsigned at = (unsigned)__cvta_generic_to_shared(&phase), done = 0;
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at) : "memory");
    __syncthreads();
    if (threadIdx.x == 32) { WAIT; asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at) : "memory"); }
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(at) : "memory");
    b[I] = a[I] + 1;
}
KERNEL(one_waits_for_grid)(const float* a, float* b, int* flag) {
    if (I == 0) { WAIT; __threadfence(); atomicExch(flag, 1); }
    if (threadIdx.x == 0) { while (atomicAdd(flag, 0) == 0); __threadfence(); }
    __syncthreads();
    b[I] = a[I] + 1;
}
KERNEL(one_waits_alone)(const float* a, float* b) { if (threadIdx.x == 0) WAIT; b[I] = a[I] + 1; }
KERNEL(reads_early)(const float* a, float* b) { float x = a[I]; WAIT; b[I] = x; }
KERNEL(writes_early)(const float* a, float* b) { b[I] = 1; WAIT; b[I] += a[I]; }
KERNEL(counts)(const float* a, float* b) { atomicAdd(b + I, a[I]); }
KERNEL(counts_block)(const float* a, float* b) { atomicAdd_block(b + I, a[I]); }
KERNEL(sends)(const float* a, float* b, int* flag) {
    b[I] = a[I];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicExch(flag + blockIdx.x, 1);
}
KERNEL(sends_unfenced)(const float* a, float* b, int* flag) {
    b[I] = a[I];
    __syncthreads();
    if (threadIdx.x == 0) atomicExch(flag + blockIdx.x, 1);
}
KERNEL(sends_early)(const float* a, float* b, int* flag) {
    b[I] = 0;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicExch(flag + blockIdx.x, 1);
    b[I] = a[I];
}
#define RECEIVES(name, load, then) KERNEL(name)(const float* a, float* b, int* flag) { \
    if (threadIdx.x == 0) { \
        int there = 0; \
        while (there == 0) asm volatile("ld." load ".global.s32 %0, [%1];" : "=r"(there) : "l"(flag + blockIdx.x) : "memory"); \
        then; \
    } \
    __syncthreads(); \
    b[I] = a[I]; \
}
RECEIVES(acquires, "acquire.gpu", )
RECEIVES(acquires_for_block, "acquire.cta", )
RECEIVES(relaxed, "relaxed.gpu", )
RECEIVES(relaxed_and_fenced, "relaxed.gpu", __threadfence())
KERNEL(receives_alone)(const float* a, float* b, int* flag) {
    __shared__ volatile int there;
    there = 0;
    __syncthreads();
    if (threadIdx.x == 0) { while (atomicAdd(flag + blockIdx.x, 0) == 0); there = 1; }
    if (threadIdx.x >= 32) { while (there == 0); b[I] = a[I]; }  // volatile: hears of nothing
}
KERNEL(receives)(const float* a, float* b, int* flag) {
    if (threadIdx.x == 0) { while (atomicAdd(flag + blockIdx.x, 0) == 0); __threadfence(); }
    __syncthreads();
    b[I] = a[I];
}
KERNEL(copies_asynchronously)(const float* a, float* b) {
    __shared__ float tile[64];
    unsigned to = (unsigned)__cvta_generic_to_shared(tile + threadIdx.x);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4; cp.async.wait_all;" :: "r"(to), "l"(a + I) : "memory");
    WAIT;
    b[I] = tile[threadIdx.x];
}
KERNEL(reduces_in_bulk)(const float* a, float* b) {
    __shared__ __align__(128) float tile[64];
    tile[threadIdx.x] = 1;
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned from = (unsigned)__cvta_generic_to_shared(tile);
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 256;" :: "l"(b + I), "r"(from));
        asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
KERNEL(stores_in_bulk)(const float* a, float* b) {
    __shared__ __align__(128) float tile[64];
    tile[threadIdx.x] = 1;
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned from = (unsigned)__cvta_generic_to_shared(tile);
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;" :: "l"(b + I), "r"(from));
        asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;" ::: "memory");
        __threadfence();
        GO;
    }
}
KERNEL(halves)(const short* a, short* b) { b[I] = a[I]; }
KERNEL(one_half)(const short* a, short* b) { if (I == 0) b[1] = a[0]; }
KERNEL(quads)(const float4* a, float4* b) { b[I] = a[I]; }

// FlashAttention's backward pass, as it was: the layer behind writes dO, a first kernel sums O * dO by row, a second needs it.
KERNEL(output_projection)(const float* dY, float* dO) { GO; dO[I] = 0.5f * dY[I]; }
template <bool waits> __device__ void preprocess(const float* O, const float* dO, float* dPsum) {
    __shared__ float part[64];
    if (waits) WAIT;
    part[threadIdx.x] = O[I] * dO[I];
    GO;
    __syncthreads();
    for (int step = 32; step; step /= 2) {
        if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) dPsum[blockIdx.x] = part[0];
}
KERNEL(bwd_preprocess)(const float* O, const float* dO, float* dPsum) { preprocess<false>(O, dO, dPsum); }
KERNEL(bwd_preprocess_mended)(const float* O, const float* dO, float* dPsum) { preprocess<true>(O, dO, dPsum); }
KERNEL(bwd)(const float* P, const float* dP, const float* dPsum, float* dS) {
    float p = P[I];
    WAIT;
    dS[I] = p * (dP[I] - dPsum[blockIdx.x]);
}
"""

BLOCKS, THREADS = 2, 64
COUNT = BLOCKS * THREADS


@cache
def module() -> ptx.Module:
    return ptx.Module.from_source(SOURCE, ("-arch=compute_90", "-default-device"), name="streams.cu")


def floats(value: float = 1) -> np.ndarray:
    return np.full(COUNT, value, np.float32)


def run(kernel: str, *args: Any, **options: Any) -> ptx.Launch:
    """A launch of all blocks; its findings are races only."""
    launch = module().launch(kernel, BLOCKS, THREADS, args, **options)
    assert {one.kind for one in launch.findings} <= {"race"}, launch.findings
    return launch


def pair(first: str, second: str, seed: int | None = None, programmatic: bool = True) -> tuple[ptx.Finding, ...]:
    """The findings of the second kernel, which reads and writes on, after the first one in a stream."""
    x, y, z = floats(), floats(), floats()
    stream = ptx.Stream()
    assert not run(first, x, y, stream=stream, seed=seed).findings
    return run(second, y, z, stream=stream, programmatic=programmatic, seed=seed).findings


@pytest.mark.parametrize("seed", SEEDS)
def test_a_dependent_launch_must_wait_for_what_it_reads(seed: int | None) -> None:
    (finding,) = pair("late", "plain", seed)
    assert finding.kernel == "plain" and finding.tensor == "arg0" and finding.lanes == COUNT
    assert "read at offset 0x" in finding.message and re.search(r"write at \S*streams.cu:", finding.message)
    assert "by an earlier launch, of late, block" in finding.message and "no griddepcontrol.wait" in finding.message
    block, warp = finding.block, finding.warp
    assert (
        f"offset {4 * (block * THREADS + warp * 32):#x} of" in finding.message and f"block {block}, warp {warp}," in finding.message
    )
    lines = SOURCE.splitlines()
    assert (
        finding.source and finding.other and "(plain)" in lines[finding.source[1] - 1] and "(late)" in lines[finding.other[1] - 1]
    )
    assert not pair("late", "plain", seed, programmatic=False)
    assert not pair("late", "waits", seed)
    # Nor does it help that the launch in front never lets it go before its end.
    assert pair("plain", "plain", seed) and not pair("plain", "waits", seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_hears_of_a_wait_is_behind_it(seed: int | None) -> None:
    assert not pair("plain", "one_waits", seed) and not pair("plain", "one_waits_for_phase", seed)
    x, y, stream = floats(), floats(), ptx.Stream()
    run("plain", x, y, stream=stream, seed=seed)
    flag = np.zeros(1, np.int32)
    assert not run("one_waits_for_grid", y, x, flag, stream=stream, programmatic=True, seed=seed).findings
    (finding,) = pair("plain", "one_waits_alone", seed)
    assert finding.lanes == COUNT - BLOCKS


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_accessed_before_the_wait_races(seed: int | None) -> None:
    assert pair("plain", "reads_early", seed) and pair("plain", "copies_asynchronously", seed)
    x, y = floats(), floats()
    stream = ptx.Stream()
    run("plain", x, y, stream=stream, seed=seed)
    (finding,) = run("writes_early", y, x, stream=stream, programmatic=True, seed=seed).findings
    assert "write at offset" in finding.message and re.search(r"read at \S*streams.cu:", finding.message)
    # The next one is behind the first of the three, whose end all blocks of the second one have waited for, but not behind that.
    (finding,) = run("writes_early", floats(), y, stream=stream, programmatic=True, seed=seed).findings
    assert (
        "write at offset" in finding.message
        and re.search(r"and read at \S*streams.cu:", finding.message)
        and "of writes_early" in finding.message
    )


def test_a_fence_before_the_launch_of_dependents_orders_what_was_written() -> None:
    """PTX ISA, "griddepcontrol": a release fence before launch_dependents synchronizes with the start of the dependent grid."""
    assert not pair("fenced", "plain")
    assert pair("late", "plain") and pair("fenced_block", "plain")
    # Only the first of a block's calls counts, and what is written before the fence.
    assert pair("fenced_alone", "plain") and pair("fenced_early", "plain")
    # It says nothing of the launch in front of the one that fenced.
    assert chain(("plain", "fenced", "plain"))
    # Who begins behind a launch that began behind the fence is behind it, too.
    assert not chain(("fenced", "never", "plain")) and not chain(("fenced", "never", "waits"))
    x, y, stream = floats(), floats(), ptx.Stream()
    module().launch("fenced_warp", 4, 32, (x, y), stream=stream)
    assert not module().launch("plain", 4, 32, (y, x), stream=stream, programmatic=True).findings
    # Nor of a larger grid.
    large, stream = np.zeros((3, 4 * COUNT), np.float32), ptx.Stream()
    module().launch("plain", 4 * BLOCKS, THREADS, (large[0], large[1]), stream=stream)
    run("fenced", x, y, stream=stream, programmatic=True)
    assert module().launch("plain", 4 * BLOCKS, THREADS, (large[1], large[2]), stream=stream, programmatic=True).findings
    # A copy that nobody waits for reads until the end.
    launch = module().launch("fenced_copy", BLOCKS, THREADS, (x, y), stream=stream)
    (finding,) = run("plain", y, x, stream=stream, programmatic=True).findings
    assert not launch.findings and "read at" in finding.message


def chain(kernels: tuple[str, str, str]) -> tuple[ptx.Finding, ...]:
    """The third launch reads what the first one wrote; the second one has nothing to do with either."""
    x, y, z = floats(), floats(), floats()
    stream = ptx.Stream()
    run(kernels[0], x, y, stream=stream)
    assert not run(kernels[1], floats(), floats(), stream=stream, programmatic=True).findings
    return run(kernels[2], y, z, stream=stream, programmatic=True).findings


def test_a_wait_is_for_the_launch_in_front_and_what_that_has_waited_for() -> None:
    assert not chain(("plain", "waits", "waits"))
    (finding,) = chain(("plain", "never", "waits"))
    assert "the launch between them, of never, may be over before that one is" in finding.message
    # Who begins once all blocks of the second one have waited is behind the first one; who begins before that is not.
    assert not chain(("plain", "waits", "plain"))
    assert chain(("plain", "early", "plain")) and not chain(("plain", "early", "waits"))
    assert chain(("plain", "one_warp_early", "plain")) and chain(("plain", "one_block_waits", "plain"))


def test_an_ordinary_launch_is_behind_everything_in_its_stream() -> None:
    x, y, z = floats(), floats(), floats()
    stream = ptx.Stream()
    run("plain", x, y, stream=stream)
    run("never", z, floats(), stream=stream, programmatic=True)
    assert not run("plain", y, z, stream=stream).findings
    np.testing.assert_array_equal(z, 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_streams_are_ordered_by_events_only(seed: int | None) -> None:
    x, y, z = floats(), floats(), floats()
    one = ptx.Stream()
    other, third = one.history.stream(), one.history.stream()
    before = one.record()
    run("plain", x, y, stream=one, seed=seed)
    other.wait(before)
    (finding,) = run("plain", y, z, stream=other, seed=seed).findings
    assert "in another stream" in finding.message and "read at" in finding.message and "write at" in finding.message
    (finding,) = run("plain", z, x, stream=one, seed=seed).findings[:1]
    third.wait(one.record())
    third.wait(other.record())
    assert not run("plain", x, y, stream=third, seed=seed).findings
    one.wait(third.record())
    assert not run("plain", y, x, stream=one, seed=seed).findings
    # A dependent launch need not wait for what an event has ordered.
    run("plain", floats(), z, stream=other, seed=seed)
    run("plain", floats(), floats(), stream=one, seed=seed)
    one.wait(other.record())
    assert not run("plain", z, floats(), stream=one, programmatic=True, seed=seed).findings


def test_readers_of_several_streams_all_count() -> None:
    for left_out in (1, 2, 3, None):
        x = floats()
        streams = [ptx.Stream()]
        streams += [streams[0].history.stream() for _ in range(3)]
        for stream in streams:
            assert not run("plain", x, floats(), stream=stream).findings
        for number, stream in enumerate(streams):
            if number != left_out:
                streams[0].wait(stream.record())
        found = run("plain", floats(), x, stream=streams[0]).findings
        assert [bool(re.search(r"read at \S*streams.cu:", one.message)) for one in found] == ([] if left_out is None else [True])


def test_the_host_orders_what_it_has_waited_for() -> None:
    for wait in ("stream", "event", "history"):
        x, y = floats(), floats()
        one = ptx.Stream()
        other = one.history.stream()
        run("plain", x, y, stream=one)
        event = one.record()
        {"stream": one.synchronize, "event": event.synchronize, "history": one.history.synchronize}[wait]()
        assert not run("plain", y, floats(), stream=other).findings
        assert not run("plain", y, x, stream=one, programmatic=True).findings


def test_atomics_of_the_whole_device_do_not_race_with_each_other() -> None:
    def both(first: str, second: str) -> bool:
        total, one = floats(), ptx.Stream()
        run(first, floats(), total, stream=one)
        return bool(run(second, floats(), total, stream=one.history.stream()).findings)

    assert not both("counts", "counts") and not both("counts", "reduces_in_bulk")
    assert both("counts", "counts_block") and both("counts_block", "counts")
    assert both("counts", "plain") and both("plain", "counts")
    # Loads do not race with each other, whatever they are.
    for first, second in (("plain", "reads_volatile"), ("reads_volatile", "plain"), ("reads_volatile", "reads_volatile")):
        x, one = floats(), ptx.Stream()
        assert not run(first, x, floats(), stream=one).findings
        assert not run(second, x, floats(), stream=one.history.stream()).findings
        assert run("plain", floats(), x, stream=one.history.stream()).findings


def test_bulk_copies_go_through_the_same_tables() -> None:
    x, y = floats(), floats()
    one = ptx.Stream()
    run("stores_in_bulk", x, y, stream=one)
    other = one.history.stream()
    assert run("plain", y, x, stream=other).findings and run("reduces_in_bulk", x, y, stream=other).findings
    # The store was not waited for: it may be written after the fence.
    y = floats()
    run("stores_in_bulk", x, y, stream=one)
    assert run("plain", y, floats(), stream=one, programmatic=True).findings
    total = floats()
    run("reduces_in_bulk", x, total, stream=one)
    (finding,) = run("stores_in_bulk", x, total, stream=other).findings
    assert "cp.async.bulk" in finding.message or "write at" in finding.message


@pytest.mark.parametrize("seed", SEEDS)
def test_what_one_launch_releases_another_one_may_acquire(seed: int | None) -> None:
    def told(sender: str, receiver: str = "receives") -> bool:
        x, y, z, flag = floats(), floats(), floats(), np.zeros(BLOCKS, np.int32)
        one = ptx.Stream()
        run(sender, x, y, flag, stream=one, seed=seed)
        launch = run(receiver, y, z, flag, stream=one.history.stream(), seed=seed)
        found = {finding.tensor for finding in launch.findings}
        assert not run("counts", floats(), floats(), stream=one.history.stream(), seed=seed).findings
        assert found <= {"arg0", *({"arg2"} if receiver == "acquires_for_block" else ())}
        return "arg0" not in found

    assert told("sends") and not told("sends_unfenced") and not told("sends_early")
    assert told("sends", "acquires") and told("sends", "relaxed_and_fenced")
    assert not told("sends", "acquires_for_block") and not told("sends", "relaxed") and not told("sends", "receives_alone")


def test_what_was_acquired_is_handed_on() -> None:
    """Later launches of the stream get it, and with a flag of its own a third stream; and so they do for what was over before a
    launch."""
    for sender, ordered in (("sends", True), ("sends_unfenced", False)):
        x, y, z = floats(), floats(), floats()
        first, second = np.zeros((2, BLOCKS), np.int32)
        one = ptx.Stream()
        other, third = one.history.stream(), one.history.stream()
        run("plain", floats(), x, stream=one)
        run(sender, x, y, first, stream=one)
        run("receives", floats(), floats(), first, stream=other)
        assert bool(run("plain", y, floats(), stream=other).findings) != ordered
        assert bool(run("plain", x, floats(), stream=other).findings) != ordered
        run("sends", floats(), z, second, stream=other)
        assert not run("receives", z, floats(), second, stream=third).findings
        assert bool(run("plain", y, floats(), stream=third).findings) != ordered
        assert run("plain", z, floats(), stream=one).findings


def test_accesses_of_different_widths_meet() -> None:
    for first, second in (("plain", "halves"), ("halves", "plain"), ("quads", "halves"), ("halves", "quads")):
        memory, out = np.zeros(16 * COUNT, np.uint8), np.zeros(16 * COUNT, np.uint8)
        kind = {"plain": np.float32, "halves": np.int16, "quads": np.float32}

        def part(kernel: str, of: np.ndarray, start: int = 0, kind: dict[str, Any] = kind) -> np.ndarray:
            return of[start * 1024 :][: COUNT * {"plain": 4, "halves": 2, "quads": 16}[kernel]].view(kind[kernel])

        one = ptx.Stream()
        other = one.history.stream()
        run(first, part(first, out), part(first, memory), stream=one)
        assert run(second, part(second, memory), np.zeros_like(part(second, out)), stream=other).findings
        if first == "halves":
            # It wrote 256 bytes: what lies behind them is free.
            assert not run("plain", floats(), part("plain", memory, 1), stream=other).findings


def test_neighbours_in_one_granule_of_another_launch_do_not_meet() -> None:
    memory, out = np.zeros(16 * COUNT + 1024, np.uint8), np.zeros(16 * COUNT, np.uint8)
    one = ptx.Stream()
    run("quads", out.view(np.float32), memory[1024:].view(np.float32), stream=one)
    run("halves", out[: 2 * COUNT].view(np.int16), memory[2 : 2 + 2 * COUNT].view(np.int16), stream=one)
    other = one.history.stream()
    assert not run("halves", memory[2 + 2 * COUNT :][: 2 * COUNT].view(np.int16), np.zeros(COUNT, np.int16), stream=other).findings
    # One element of two bytes meets the sixteen bytes that it is among.
    memory, out = np.zeros_like(memory), np.zeros_like(memory)
    run("one_half", out.view(np.int16), memory.view(np.int16), stream=one)
    (finding,) = run("quads", memory.view(np.float32), np.zeros_like(out).view(np.float32), stream=other).findings
    assert finding.lanes == 1


def test_views_of_one_array_meet_and_freed_memory_is_forgotten() -> None:
    gc.freeze()  # what other tests have left is not to be looked through
    whole = np.zeros(3 * COUNT, np.float32)
    one = ptx.Stream()
    other = one.history.stream()
    run("plain", floats(), whole[COUNT : 2 * COUNT], stream=one)
    assert run("plain", whole[2 * COUNT - 1 :][:COUNT], floats(), stream=other).findings
    assert not run("plain", whole[:COUNT], floats(), stream=other).findings
    with mmap.mmap(-1, 4 * COUNT) as mapped:
        run("plain", floats(), np.frombuffer(mapped, np.float32), stream=one)
        assert run("plain", np.frombuffer(mapped, np.float32), floats(), stream=other).findings
        one.history.synchronize()
        gc.collect()

    class Buffer(bytearray):
        pass

    # Arrays on the same memory of others may begin and end anywhere.
    memory = bytearray(8 * COUNT)
    run("plain", floats(), np.frombuffer(memory, np.float32, offset=4 * COUNT), stream=one)
    assert not run("plain", np.frombuffer(memory, np.float32), floats(), stream=other).findings
    assert run("plain", np.frombuffer(memory, np.float32)[1:], floats(), stream=other).findings
    # Memory of others is held until nobody asks for it any more: it could become another array's.
    buffer = Buffer(4 * COUNT)
    held = weakref.ref(buffer)
    run("plain", floats(), np.frombuffer(buffer, np.float32), stream=one)
    del buffer
    gc.collect()
    assert held() is not None
    one.history.synchronize()
    gc.collect()
    assert held() is None
    run("plain", floats(), whole[:COUNT], stream=one)
    assert one.history.past.regions
    del whole
    gc.collect()
    assert not one.history.past.regions


def test_a_history_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that comes after another one stands for it: many launches take the tables of one, and few sites."""
    monkeypatch.setattr(tables_of_past, "MANY_SITES", 2)
    gc.freeze()  # what other tests have left is not to be looked through
    x, y = floats(), floats()
    for kernels in (("plain", False), ("waits", True), ("early", True)):
        stream = ptx.Stream()
        past = stream.history.past
        for _ in range(12):
            assert not run(kernels[0], x, y, stream=stream, programmatic=kernels[1]).findings
        assert sorted(len(tables) for one in past.regions.values() for tables in one.kinds) == [0, 0, 0, 0, 1, 1]
        assert len(past.sites) < 16
        gc.collect()
        runs = [one for one in gc.get_objects() if isinstance(one, OrderedLaunch) and one.kernel == kernels[0]]
        assert len(runs) < 8 and sum(bool(one.done.first) for one in runs) == 1 + kernels[1]
        past.drop(LaunchClock())
        assert len(past.sites) == 1 + 2
        stream.synchronize()
        assert not past.regions and len(past.sites) == 1
    for synchronize in (False, True):
        flag = np.zeros(BLOCKS, np.int32)
        run("sends", x, y, flag, stream=stream)
        assert past.messages
        if synchronize:
            stream.synchronize()
        else:
            del flag
            gc.collect()
        assert not past.messages


def test_flash_attention_sums_rows_of_a_gradient_that_is_still_being_written() -> None:
    """Dao-AILab/flash-attention, pull request 2481: bwd_preprocess was launched programmatically and did not wait."""

    def backward(preprocess: str) -> tuple[list[ptx.Launch], np.ndarray]:
        rng = np.random.default_rng(0)
        dY, out, P, dP = rng.standard_normal((4, COUNT), np.float32)
        dO, dS, sums = np.zeros(COUNT, np.float32), np.zeros(COUNT, np.float32), np.zeros(BLOCKS, np.float32)
        stream = ptx.Stream()
        calls = (
            ("output_projection", {"dY": dY, "dO": dO}),
            (preprocess, {"O": out, "dO": dO, "dPsum": sums}),
            ("bwd", {"P": P, "dP": dP, "dPsum": sums, "dS": dS}),
        )
        launches = [
            module().launch(kernel, BLOCKS, THREADS, args, stream=stream, programmatic=k > 0)
            for k, (kernel, args) in enumerate(calls)
        ]
        return launches, dS - P * (dP - np.repeat((out * dO).reshape(BLOCKS, -1).sum(axis=1), THREADS))

    launches, error = backward("bwd_preprocess")
    assert [len(one.findings) for one in launches] == [0, 1, 0]
    (finding,) = launches[1].findings
    assert finding.tensor == "dO" and "of output_projection" in finding.message
    # The numbers are right all the same: the machine ran one after the other, as mostly a GPU does.
    assert np.abs(error).max() < 1e-5
    launches, error = backward("bwd_preprocess_mended")
    assert not any(one.findings for one in launches) and np.abs(error).max() < 1e-5


def test_outside_of_a_stream_it_is_of_no_effect() -> None:
    x, y = floats(), floats()
    for kernel in ("waits", "early", "never", "fenced"):
        assert not run(kernel, x, y).findings
        np.testing.assert_array_equal(y, 2)
        assert not run(kernel, x, y, stream=ptx.Stream(), programmatic=True).findings
        assert not run(kernel, x, y, stream=ptx.Stream(), races=False).findings


def test_a_map_that_another_launch_stores_must_be_waited_for() -> None:
    x, y, g = np.ones((40, 32), np.float32), np.zeros((16, 32), np.float32), np.zeros(128, np.uint8)
    maps = {"x": ptx.TensorMap(x, (32, 16), swizzle=128), "y": ptx.TensorMap(y, (32, 16), swizzle=128)}
    heads = f"{HEAD}.visible .entry k({PIPE_PARAMS})\n{{\n{REGISTERS}\n"
    stores, uses = (
        ptx.Module.from_ptx(f"{heads}{text}\nret;\n}}\n") for text in (PIPE, PIPE.replace(MAP_STORE, "mov.u64 %rd10, 0;"))
    )
    one = ptx.Stream()
    for module, stream, found in ((stores, one, False), (uses, one, False), (uses, one.history.stream(), True)):
        launch = module.launch("k", 1, 64, {**maps, "g": g, "q": y}, stream=stream)
        assert ("g" in {finding.tensor for finding in launch.findings}) == found


def test_waves_of_a_launch_in_a_stream_stay_in_one_process() -> None:
    x, y = np.zeros((2, 128 * 64), np.float32)
    one = ptx.Stream()
    for stream, found in ((one, 0), (one.history.stream(), 1)):
        assert len(module().launch("plain", 128, 64, (x, y), stream=stream, processes=2).findings) == found


def test_a_raw_kernel_takes_a_stream() -> None:
    kernel = ptx.RawKernel('extern "C" __global__ void k(float* x) { x[threadIdx.x] = 1; }', "k")
    x, stream = floats(), ptx.Stream()
    with ptx.simulation(findings="keep") as launches:
        for each in (stream, stream, stream.history.stream(), None):
            kernel((1,), (32,), (x,), stream=each)
    assert [len(launch.findings) for launch in launches] == [0, 0, 1, 0]


def test_what_is_no_stream_is_refused() -> None:
    x, y = floats(), floats()
    with pytest.raises(TypeError, match=r"stream must be a ptx\.Stream or None, got int"):
        run("plain", x, y, stream=3)
    with pytest.raises(ValueError, match="programmatic needs a stream"):
        run("plain", x, y, programmatic=True)
    with pytest.raises(TypeError, match="history must be a History"):
        ptx.Stream(ptx.Stream())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="event must be one that a stream of the same history recorded"):
        ptx.Stream().wait(ptx.Stream().record())
