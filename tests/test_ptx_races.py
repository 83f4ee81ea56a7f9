"""Races by happens-before: a clean kernel and its racy twin for each rule, the same whatever the order of execution."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from cupyflash.sim.ptx import Launch, Module
from suites import sample

ORDERS = [None, 0, 1, 2, 3, 4, 5]
SEEDS = sample(ORDERS, [None, 0])


@cache
def compiled(source: str) -> Module:
    return Module.from_source(source)


def launch(body: str, grid: int = 1, block: int = 64, seed: int | None = None, head: str = "", **options: Any) -> Launch:
    """A kernel of (x, y, n): x are 4096 zeros that the kernel may write, y 4096 results, n 4 zeros, all unsigned."""
    source = f'{head}\nextern "C" __global__ void k(unsigned *x, unsigned *y, unsigned *n) {{\nint t = threadIdx.x;\n{body}\n}}'
    x, y, n = np.zeros(4096, np.uint32), np.zeros(4096, np.uint32), np.zeros(4, np.uint32)
    return compiled(source).launch("k", grid, block, {"x": x, "y": y, "n": n}, seed=seed, **options)


def line_of(body: str, text: str) -> int:
    """The line that `text` is on in the source that `launch` compiles."""
    return 4 + body[: body.index(text)].count("\n")


def races(found: Launch) -> set[int]:
    """CUDA lines of the races; every other finding but reads of what has not been written is an error here."""
    assert {f.kind for f in found.findings} <= {"race", "uninitialised"}
    return {f.source[1] for f in found.findings if f.kind == "race" and f.source}


SHARED = "__shared__ unsigned s[256];\n"

# For each rule: the kernel with its order, what is taken away to make it race, the texts of the two lines, blocks, threads.
PAIRS = {
    "read after write, warps": (
        SHARED + "s[t] = t;\n__syncthreads();\ny[t] = s[t ^ 32];",
        "__syncthreads();",
        "s[t] = t",
        "s[t ^ 32]",
        1,
        64,
    ),
    "write after read, warps": (
        SHARED + "s[t] = t;\n__syncthreads();\ny[t] = s[t ^ 32];\n__syncthreads();;\ns[t] = 7;",
        "__syncthreads();;",
        "s[t ^ 32]",
        "s[t] = 7",
        1,
        64,
    ),
    "write after write, warps": (
        SHARED + "s[t] = t;\n__syncthreads();\ns[t ^ 32] = 7;\n__syncthreads();\ny[t] = s[t];",
        "__syncthreads();",
        "s[t] = t",
        "s[t ^ 32] = 7",
        1,
        64,
    ),
    "read after write, lanes": (
        SHARED + "s[t] = t;\n__syncwarp();\ny[t] = s[t ^ 1];",
        "__syncwarp();",
        "s[t] = t",
        "s[t ^ 1]",
        1,
        64,
    ),
    "write after read, lanes": (
        SHARED + "s[t] = t;\n__syncwarp();\nunsigned a = s[t ^ 1];\n__syncwarp();;\ns[t] = a;",
        "__syncwarp();;",
        "s[t ^ 1]",
        "s[t] = a",
        1,
        64,
    ),
    "a broadcast that is overwritten by one of its readers": (
        SHARED + "if (t == 0) s[0] = 3;\n__syncwarp();\nunsigned a = s[0];\n__syncwarp();;\nif (t == 31) s[0] = a + 1;\ny[t] = a;",
        "__syncwarp();;",
        "= s[0]",
        "s[0] = a",
        1,
        32,
    ),
    "a shuffle orders nothing": (
        SHARED + "s[t] = t;\nunsigned a = __shfl_xor_sync(~0u, t, 1);\n__syncwarp();\ny[t] = s[t ^ 1] + a;",
        "__syncwarp();",
        "s[t] = t",
        "s[t ^ 1]",
        1,
        32,
    ),
    "parts of a warp": (
        SHARED + "unsigned m = t & 16 ? 0xffff0000u : 0xffffu;\ns[t] = t;\n__syncwarp(m);\ny[t] = s[t ^ 1];",
        "__syncwarp(m);",
        "s[t] = t",
        "s[t ^ 1]",
        1,
        32,
    ),
    "global memory, warps": ("x[t] = t;\n__syncthreads();\ny[t] = x[t ^ 32];", "__syncthreads();", "x[t] = t", "x[t ^ 32]", 1, 64),
    "global memory, write after read": (
        "y[t] = x[t ^ 32];\n__syncthreads();\nx[t] = t;",
        "__syncthreads();",
        "x[t ^ 32]",
        "x[t] = t",
        1,
        64,
    ),
    "an atomic and a plain initialisation": (
        SHARED + "if (t == 0) s[0] = 0;\n__syncthreads();\natomicAdd(s, 1u);\n__syncthreads();;\ny[t] = s[0];",
        "__syncthreads();",
        "s[0] = 0",
        "atomicAdd",
        1,
        64,
    ),
    "an atomic and a plain reading": (
        SHARED + "if (t == 0) s[0] = 0;\n__syncthreads();\natomicAdd(s, 1u);\n__syncthreads();;\ny[t] = s[0];",
        "__syncthreads();;",
        "atomicAdd",
        "= s[0]",
        1,
        64,
    ),
    "the last block": (
        """x[blockIdx.x * 64 + t] = t;
__threadfence();
__syncthreads();
__shared__ bool last;
if (t == 0) last = atomicInc(n, gridDim.x - 1) == gridDim.x - 1;
__syncthreads();
if (last) for (int b = 0; b < gridDim.x; b++) y[t] += x[b * 64 + (t ^ 40)];""",
        "__threadfence();",
        "x[blockIdx.x * 64 + t] = t",
        "y[t] += x[",
        5,
        64,
    ),
    "the last block, one lane to a block": (
        """if (t == 0) x[blockIdx.x] = 5;
if (t == 0) __threadfence();
bool last = false;
if (t == 0) last = atomicAdd(n, 1u) == gridDim.x - 1;
if (last) for (int b = 0; b < gridDim.x; b++) y[0] += x[b];""",
        "if (t == 0) __threadfence();",
        "x[blockIdx.x] = 5",
        "y[0] += x[b]",
        5,
        32,
    ),
    "a flag": (
        """volatile unsigned *flag = n;
if (t == 0) {
x[0] = 7;
__threadfence();
*flag = 1;
} else if (t == 32) {
while (*flag == 0) {}
__threadfence();
y[0] = x[0];
}""",
        "__threadfence();\n*flag",
        "x[0] = 7",
        "y[0] = x[0]",
        1,
        64,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_orders_and_what_races_without_it(name: str) -> None:
    clean, removed, one, two, grid, block = PAIRS[name]
    assert clean.count(removed) >= 1
    racy = clean.replace(removed, "*flag" if removed.endswith("*flag") else "", 1)
    if name == "parts of a warp":
        racy = racy.replace("unsigned m", "[[maybe_unused]] unsigned m")
    lines = {line_of(racy, one), line_of(racy, two)}
    for seed in ORDERS:
        found = launch(clean, grid, block, seed)
        assert found.findings == (), (seed, found.findings)
        found = launch(racy, grid, block, seed)
        assert races(found) and races(found) <= lines, (seed, found.findings)
        for finding in found.findings:
            if finding.kind == "race":
                assert f"kernel.cu:{min(lines)}" in finding.message or f"kernel.cu:{max(lines)}" in finding.message


@pytest.mark.parametrize("seed", SEEDS)
def test_a_finding_says_who_and_where(seed: int | None) -> None:
    body = SHARED + "if (t == 3) s[*n + 5] = t;\nif (t == 40) y[t] = s[*n + 5];"
    (found,) = [f for f in launch(body, 1, 64, seed).findings if f.kind == "race"]
    assert (found.block, found.warp, found.lane, found.address, found.tensor) == (0, 1, 8, 20, None)
    assert found.source is not None and found.source[1] == line_of(body, "if (t == 40)")
    assert found.message == (
        f"read at offset 0x14 (s + 20) of shared memory and write at {found.source[0]}:{line_of(body, 's[*n + 5] = t')} "
        "by block 0, warp 0, lane 3 are not ordered"
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks(seed: int | None) -> None:
    (found,) = launch("if (t == 0) x[9] = blockIdx.x;", 40, 256, seed).findings
    assert (found.kind, found.tensor) == ("race", "x") and found.address is not None and "offset 0x24 of 'x'" in found.message
    assert launch("x[blockIdx.x * 32 + t] = t; y[blockIdx.x * 32 + t] = x[blockIdx.x * 32 + t];", 40, 32, seed).findings == ()
    # Also between blocks that the machine does not hold at the same time, whoever comes first.
    assert races(launch("if (blockIdx.x == 0) x[t] = 1;\nif (blockIdx.x == 39) y[t] = x[t];", 40, 256, seed))
    assert races(launch("if (blockIdx.x == 39) x[t] = 1;\ny[t] = x[t];", 40, 256, seed))
    # A barrier orders a block, not the grid.
    assert races(launch("x[t] = 1;\n__syncthreads();\ny[t] = x[t];", 2, 32, seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_atomics_do_not_race_with_each_other(seed: int | None) -> None:
    assert launch("atomicAdd(x + t % 8, 1u); atomicMax(x + 9, t);", 8, 64, seed).findings == ()
    assert races(launch("atomicAdd(x, 1u);\nif (t == 0) x[0] = 0;", 2, 32, seed))


def test_lanes_of_one_warp_may_write_one_word_at_once() -> None:
    """One of them wins, which the kernel may rely on; warps may not."""
    assert launch(SHARED + "s[*n] = t;\n__syncthreads();\ny[t] = s[*n];", 1, 32).findings == ()
    assert races(launch(SHARED + "s[*n] = t;\n__syncthreads();\ny[t] = s[*n];", 1, 64))


def test_narrow_accesses_are_told_apart() -> None:
    """Neighbouring bytes of one word are no conflict; a word and one of its bytes are."""
    head = "extern __shared__ unsigned char b[];"
    assert launch("b[t] = t; y[t] = b[t];", 1, 64, head=head, shared_bytes=256).findings == ()
    body = "((unsigned *)b)[t] = t;\ny[t] = b[4 * (t ^ 32) + 3];"
    assert races(launch(body, 1, 64, head=head, shared_bytes=256))


NAMED = """__shared__ unsigned s[64];
if (t < 32) {
for (int k = 0; k < 4; k++) {
asm volatile("bar.sync 1, 96;" ::: "memory");
s[t] = k;
asm volatile("bar.arrive 2, 96;" ::: "memory");
}
} else {
for (int k = 0; k < 4; k++) {
asm volatile("bar.arrive 1, 96;" ::: "memory");
asm volatile("bar.sync 2, 96;" ::: "memory");
y[t + k * 64] = s[t & 31];
}
}"""


@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers(seed: int | None) -> None:
    """A warp that fills a buffer for two others, which say when they have read it."""
    assert launch(NAMED, 1, 96, seed).findings == ()
    arrive = 'asm volatile("bar.arrive 2, 96;" ::: "memory");'
    early = NAMED.replace(f"s[t] = k;\n{arrive}", f"{arrive}\ns[t] = k;")
    assert races(launch(early, 1, 96, seed))
    # The readers say so before they have read.
    arrive, wait = (f'asm volatile("bar.{name}, 96;" ::: "memory");\n' for name in ("arrive 1", "sync 2"))
    late = NAMED.replace(arrive + wait, wait + arrive).replace("} else {\n", "} else {\n" + arrive)
    assert races(launch(late, 1, 96, seed))


def test_named_barriers_order_only_who_takes_part() -> None:
    body = """__shared__ unsigned s[128];
s[t] = t;
if (t < 64) asm volatile("bar.sync 1, 64;" ::: "memory"); else asm volatile("bar.sync 2, 64;" ::: "memory");
y[t] = s[t ^ %d];"""
    for seed in ORDERS:
        assert launch(body % 32, 1, 128, seed).findings == ()
        assert races(launch(body % 64, 1, 128, seed))


LOCK = """if (blockIdx.x < 2) {
x[blockIdx.x * 128 + t] = t;
__threadfence();
asm volatile("bar.sync 1, 128;" ::: "memory");
if (t == 0) atomicAdd(n, 1);
} else {
if (t < 64) {
if (t == 0) while (atomicAdd(n, 0) < 2) {}
asm volatile("bar.sync 1, 64;" ::: "memory");
//
y[t] = x[t + 64] + x[t + 128];
}
}"""


@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers_hand_on_what_atomics_told(seed: int | None) -> None:
    """Split-K does so: one thread waits for the other blocks and meets some warps of its block."""
    assert launch(LOCK, 3, 128, seed).findings == ()
    # Once more, so that those who know already are told more.
    again = LOCK.replace("//", 'if (t == 32) atomicAdd(n, 0);\nasm volatile("bar.sync 1, 64;" ::: "memory");')
    assert launch(again, 3, 128, seed).findings == ()
    # Without the barrier, and in a warp that has not met the one that knows.
    assert races(launch(LOCK.replace('"bar.sync 1, 64;"', '""'), 3, 128, seed)) == {line_of(LOCK, "y[t]")}
    alone = 'if (t < 32) asm volatile("bar.sync 1, 32;" ::: "memory");'
    part = LOCK.replace('asm volatile("bar.sync 1, 64;" ::: "memory");', alone)
    assert races(launch(part, 3, 128, seed)) == {line_of(LOCK, "y[t]")}


PIPELINE = """__shared__ __align__(16) unsigned s[2][128];
unsigned to = (unsigned)__cvta_generic_to_shared(&s[0][t]), sum = 0;
asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\\ncp.async.commit_group;" :: "r"(to), "l"(x + t) : "memory");
for (int j = 0; j < 6; j++) {
if (j < 5) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to + (j + 1) % 2 * 512), "l"(x + t + 128 * j) : "memory");
asm volatile("cp.async.commit_group;\\ncp.async.wait_group 1;" ::: "memory");
__syncthreads();
sum += s[j % 2][t ^ 64];
__syncthreads();;
}
y[t] = sum;"""


@pytest.mark.parametrize("seed", SEEDS)
def test_asynchronous_copies(seed: int | None) -> None:
    """Two stages: read too early, overwritten too early, not waited for."""
    assert launch(PIPELINE, 1, 128, seed).findings == ()
    read = line_of(PIPELINE, "sum += ")
    overwritten = launch(PIPELINE.replace("__syncthreads();;", ""), 1, 128, seed)
    assert races(overwritten) and races(overwritten) <= {read, line_of(PIPELINE, "if (j < 5)")}
    early = launch(PIPELINE.replace("__syncthreads();\n", "\n", 1), 1, 128, seed)
    # Whether another thread's copy has been waited for meanwhile is a matter of luck.
    assert read in {f.source[1] for f in early.findings if f.source and f.kind in ("race", "in flight")}
    weak = launch(PIPELINE.replace("wait_group 1", "wait_group 2"), 1, 128, seed)
    assert {(f.kind, f.source[1]) for f in weak.findings if f.source} >= {("in flight", read)}


@pytest.mark.parametrize("seed", SEEDS)
def test_writing_where_a_copy_is_to_land(seed: int | None) -> None:
    """Even by the thread that issued it: the copy may come later than the store."""
    body = """__shared__ __align__(16) unsigned s[128];
unsigned to = (unsigned)__cvta_generic_to_shared(&s[t]);
asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(x + t) : "memory");
s[t] = 1;
asm volatile("cp.async.wait_all;" ::: "memory");
y[t] = s[t];"""
    assert [(f.kind, f.message[:5]) for f in launch(body, 1, 64, seed).findings] == [("in flight", "write")]


def test_views_of_the_same_memory_are_one() -> None:
    source = 'extern "C" __global__ void k(const float *x, float *y) { y[threadIdx.x] = x[threadIdx.x ^ 32]; }'
    both = np.zeros(128, np.float32)
    module = compiled(source)
    assert module.launch("k", 1, 64, {"x": both[:64], "y": both[64:]}).findings == ()
    (found,) = module.launch("k", 1, 64, {"x": both[:64], "y": both[:64]}).findings
    assert found.kind == "race"
    assert module.launch("k", 1, 64, {"x": both[:64], "y": both[:64]}, races=False).findings == ()


# The source of a copy is read at any time until its thread has waited: what may be stored to it in `HERE`, and in `BEHIND`.
SOURCE = """__shared__ __align__(16) unsigned s[128];
unsigned to = (unsigned)__cvta_generic_to_shared(&s[t]);
asm volatile("cp.async.ca.shared.global [%%0], [%%1], 4;\\ncp.async.commit_group;" :: "r"(to), "l"(x + t) : "memory");
asm volatile("cp.async.ca.shared.global [%%0], [%%1], 4, 2;\\ncp.async.commit_group;" :: "r"(to + 256), "l"(n) : "memory");
__syncthreads();
%s // HERE
asm volatile("cp.async.wait_group 1;" ::: "memory");
%s // BEFORE
__syncthreads();
%s // BEHIND
asm volatile("cp.async.wait_all;" ::: "memory");
y[t] = s[t];"""


@pytest.mark.parametrize("seed", SEEDS)
def test_the_source_of_a_copy_is_not_overwritten_before_its_wait(seed: int | None) -> None:
    def racy(*stores: str) -> set[int]:
        body = SOURCE % stores
        return {number - line_of(body, stores[0] + " // HERE") for number in races(launch(body, 1, 64, seed))}

    copy = {-3, -2}  # either line of an asm statement
    assert racy("", "", "x[t ^ 40] = 1;") == set()
    for store in ("x[t ^ 40] = 1;", "x[t] = 1;", "atomicAdd(x + 3, 1u);"):
        (line,) = racy(store, "", "")
        assert line in {0, *copy}
    (line,) = racy("", "x[t ^ 40] = 1;", "")
    assert line in {2, *copy}
    assert racy("", "x[t] = 1;", "") == set()
    assert racy("", "", "if (t == 0) n[0] = 1;") and not racy("", "", "if (t == 0) n[1] = 1;")
