"""Races by the letter: those that do no harm, and those that only lockstep hides."""

from __future__ import annotations

import re

import numpy as np
import pytest
from test_ptx_harness import HEAD, compile_cuda, kernel

from cupyflash.sim.ptx import Launch, Module

# -- compare-and-swap with a plain first read -----------------------------------------------------------------------------

SWAPS = """#include <cuda_bf16.h>
#define KERNEL(name, type) extern "C" __global__ void name(type* x, int* y)
__device__ float largest(float* at, float v) {
    int *p = (int*)at, old = *p, assumed;
    do { assumed = old; old = atomicCAS(p, assumed, __float_as_int(fmaxf(v, __int_as_float(assumed)))); } while (assumed != old);
    return __int_as_float(old);
}
KERNEL(pair, __nv_bfloat162) { atomicAdd(x, __floats2bfloat162_rn(1.f, 2.f)); }
KERNEL(returned, __nv_bfloat162) {
    __nv_bfloat162 old = atomicAdd(x, __floats2bfloat162_rn(1.f, 2.f));
    y[blockIdx.x * 20 + threadIdx.x] = *(int*)&old;
}
KERNEL(narrow, __nv_bfloat16) { atomicAdd(x + threadIdx.x % 2, __float2bfloat16(1.f)); }
KERNEL(maximum, float) { largest(x + 1, threadIdx.x); }
KERNEL(local, float) {
    __shared__ float s;
    if (!threadIdx.x) s = 0;
    __syncthreads();
    largest(&s, threadIdx.x);
}
KERNEL(early, int) {
    int old = *x, v = threadIdx.x + 1;
    while (v > old) { int a = old; old = atomicCAS(x, a, v); if (a == old) break; }
}
KERNEL(looked, int) {
    int old = *x, a;
    y[blockIdx.x * 20 + threadIdx.x] = old;
    do { a = old; old = atomicCAS(x, a, a + 1); } while (a != old);
}
KERNEL(elsewhere, int) {
    int old = x[1], a;
    do { a = old; old = atomicCAS(x, a, a + 1); } while (a != old);
    atomicAdd(x + 1, 1);
}
KERNEL(once, int) {
    int old = *x, next = old + 1, a;
    do { a = old; old = atomicCAS(x, a, next); } while (a != old);
}
KERNEL(stored, int) {
    int old = *x, a;
    do { a = old; old = atomicCAS(x, a, a + 1); } while (a != old);
    if (blockIdx.x == 1 && threadIdx.x == 10) *x = 5;
}
"""


@pytest.fixture(scope="module")
def swaps() -> Module:
    return compile_cuda(SWAPS)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize(
    ("name", "line"),
    {
        **dict.fromkeys(("pair", "returned", "narrow", "maximum", "local"), 0),  # the swap alone looks at the plain read
        "early": 22,  # it decides whether there is a swap
        "looked": 26,
        "elsewhere": 31,  # the swap is of another word
        "once": 36,  # what was computed from the first read goes into later swaps
        "stored": 42,  # atomics with a plain write
    }.items(),
)
def test_a_plain_read_that_a_swap_checks_is_no_race(swaps: Module, name: str, line: int, seed: int | None) -> None:
    x, y = np.zeros(4, np.uint32), np.zeros(40, np.uint32)
    launch = swaps.launch(name, 2, 20, [x, y], seed=seed)
    assert {f.kind for f in launch.findings} == ({"race"} if line else set())
    for finding in launch.findings:
        lines = {finding.source[1] if finding.source else 0, *map(int, re.findall(r"\.cu:(\d+)", finding.message))}
        assert line in lines, str(finding)
    if name in ("pair", "returned"):
        assert x.view(np.uint16)[:2].tolist() == [0x4220, 0x42A0]  # 40 and 80
    if name == "returned":
        assert len(np.unique(y)) == 40


SWAP = """ld.param.u64 %rd1, [y]; mov.u32 %r4, %tid.x; LOAD
LOOP: add.u32 %r2, %r1, 1; atom.global.cas.b32 %r3, [%rd1], %r1, %r2; SET mov.u32 %r1, %r3; BRANCH ret;"""
PLAIN = {"LOAD": "ld.global.u32 %r1, [%rd1];", "SET": "setp.ne.u32 %p1, %r1, %r3;", "BRANCH": "@%p1 bra LOOP;"}
VARIANTS = {
    "as compilers write it": ({}, True),
    "equal and negated": ({"SET": "setp.eq.u32 %p1, %r1, %r3;", "BRANCH": "@!%p1 bra LOOP;"}, True),
    "through a copy": ({"LOAD": "ld.global.u32 %r5, [%rd1]; mov.u32 %r1, %r5;"}, True),
    "another address": ({"LOAD": "ld.global.u32 %r1, [%rd1+4]; atom.global.add.u32 %r5, [%rd1+4], 1;"}, False),
    "only some lanes load": ({"LOAD": "mov.u32 %r1, 0; setp.lt.u32 %p1, %r4, 9; @%p1 ld.global.u32 %r1, [%rd1];"}, True),
    "a guess of its own": ({"LOAD": "ld.global.u32 %r1, [%rd1]; add.u32 %r1, %r1, 1;"}, False),
    "compared with something else": ({"SET": "setp.ne.u32 %p1, %r1, %r2;", "BRANCH": "@%p1 bra LOOP;"}, False),
    "no loop": ({"SET": "", "BRANCH": ""}, True),
    "an address": ({"LOAD": "ld.global.u32 %r1, [%rd1]; cvt.u64.u32 %rd2, %r1; st.global.u32 [%rd2], 0;"}, False),
    "shuffled": ({"LOAD": "ld.global.u32 %r1, [%rd1]; shfl.sync.idx.b32 %r5, %r1, 0, 31, -1; st.global.u32 [%rd1+8], %r5;"}, False),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_what_counts_as_a_guess(name: str) -> None:
    parts, guessed = VARIANTS[name]
    body = SWAP
    for key, text in (PLAIN | parts).items():
        body = body.replace(key, text)
    module = Module.from_ptx(kernel(body, (".u64 y",), ".reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .pred %p<3>;"))
    assert {i.opcode for i in module.code("k").sharing.guesses} == ({"ld"} if guessed else set())


# -- volatile, and no barrier ---------------------------------------------------------------------------------------------

VOLATILE = """
__device__ void tail(volatile float* s, int t) {
    s[t] += s[t + 32];
    s[t] += s[t + 16];
    s[t] += s[t + 8];
}
__device__ void tail_in_step(volatile float* s, int t) {
    float v = s[t] + s[t + 32];
    for (int k = 16; k; k /= 2) {
        __syncwarp();
        s[t] = v;
        __syncwarp();
        v += s[t + k];
    }
    s[t] = v;
}
#define REDUCTION(name, rest) extern "C" __global__ void name(const float* x, float* y) { \\
    __shared__ float s[128]; int t = threadIdx.x; s[t] = x[t]; __syncthreads(); \\
    if (t < 64) s[t] += s[t + 64]; __syncthreads(); if (t < 32) rest(s, t); if (!t) *y = s[0]; }
REDUCTION(old, tail)
REDUCTION(in_step, tail_in_step)
extern "C" __global__ void flag(const float* x, float* y) {
    __shared__ volatile int ready;
    __shared__ volatile float value;
    if (!threadIdx.x) ready = 0;
    __syncthreads();
    if (threadIdx.x == 33) { value = x[7]; __threadfence_block(); ready = 1; }
    else { while (!ready); __threadfence_block(); y[threadIdx.x] = value; }
}
extern "C" __global__ void greatest(const float* x, float* y) {
    __shared__ volatile float s[64];
    int t = threadIdx.x % 32;
    s[t] = x[t]; s[t + 32] = 0;
    for (int k = 16; k; k /= 2) if (s[t + k] > s[t]) s[t] = s[t + k];
    y[t] = s[t];
}
"""


def reduced(name: str, seed: int | None, threads: int = 128) -> tuple[Launch, float]:
    y = np.zeros(128, np.float32)
    return compile_cuda(VOLATILE).launch(name, 1, threads, [np.arange(128, dtype=np.float32), y], seed=seed), float(y[0])


@pytest.mark.parametrize("seed", [None, 0])
def test_volatile_without_a_barrier_works_only_in_lockstep(seed: int | None) -> None:
    launch, _ = reduced("old", seed)
    (finding,) = launch.findings  # of one cause
    assert finding.kind == "race" and launch.findings_total == 40 and finding.also
    for finding in launch.findings:
        assert "work only in lockstep" in finding.message and finding.source is not None and finding.source[1] in (4, 5)
        assert re.search(r"write at \S+:[34] \(inlined at \S+:20\) by block 0, warp 0", finding.message)
    launch, _ = reduced("greatest", seed, 32)
    assert launch.findings and all("work only in lockstep" in f.message for f in launch.findings)


@pytest.mark.parametrize("seed", [None, 0])
def test_volatile_with_an_order_is_clean(seed: int | None) -> None:
    launch, total = reduced("in_step", seed)
    assert launch.findings == () and total == np.arange(128).sum()
    launch, first = reduced("flag", seed, 64)
    assert launch.findings == () and first == 7


def test_a_loop_that_waits_for_another_lane_is_clean() -> None:
    """Volatile and without a barrier, but right in whatever order lanes run."""
    body = """.shared .align 4 .b8 s[8]; mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 3; @%p1 bra WAIT;
    st.volatile.shared.u32 [s], 7; ret;
    WAIT: ld.volatile.shared.u32 %r2, [s]; setp.ne.u32 %p2, %r2, 7; @%p2 bra WAIT; ret;"""
    text = HEAD + kernel(body, (), ".reg .b32 %r<9>; .reg .pred %p<3>;").replace(HEAD, "")
    found = Module.from_ptx(text).launch("k", 1, 4, []).findings
    assert {f.kind for f in found} <= {"uninitialised"}
    text = text.replace("@%p2 bra WAIT;", "")
    assert "race" in {f.kind for f in Module.from_ptx(text).launch("k", 1, 4, []).findings}
