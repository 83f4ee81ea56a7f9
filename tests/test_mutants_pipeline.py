"""Seeded faults in a kernel that is not ours: a GEMM with three stages of cp.async, swizzled shared memory and split K."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cupyflash.sim.ptx import Launch, Module
from mutants import Mutant
from suites import sample, wide

NAME = "pipelined_gemm.cu"
SOURCE = Path(__file__).parent / "kernels" / NAME
COPY, LDMATRIX, PARTS, READ = "cp.async.cg", "ldmatrix.sync", "parts + blockIdx.z", "part = *"
WAIT, BARRIER = "wait<STAGES - 2>();", "__syncthreads();  // the stage"


def mutant(old: str, new: str, finds: str, *lines: str) -> Mutant:
    return Mutant(NAME, old, new, finds, lines)


MUTANTS = {
    "no barrier in the loop": mutant(BARRIER, "//", "race", COPY, LDMATRIX),
    "the barrier before the wait": mutant(f"{WAIT}\n    {BARRIER}", f"__syncthreads(); {WAIT} //", "race", COPY, LDMATRIX),
    "nobody waits": mutant(WAIT, "", "in flight", LDMATRIX),
    "one group too many is left": mutant(WAIT, "wait<STAGES - 1>();", "in flight", LDMATRIX),
    "no commit in the prologue": mutant("commit();  // prologue", "", "in flight", LDMATRIX),
    "no commit in the loop": mutant("commit();  // loop", "", "in flight", LDMATRIX),
    "a stage is filled one on": mutant(
        "if (step + STAGES - 1 < last) fetch(step + STAGES - 1)",
        "if (step + STAGES < last) fetch(step + STAGES)",
        "race|in flight",
        COPY,
        LDMATRIX,
    ),
    "A is read one stage on": mutant("step % STAGES * A_STAGE", "(step + 1) % STAGES * A_STAGE", "in flight", LDMATRIX),
    "B is read one stage back": mutant(
        "step % STAGES * B_STAGE", "(step + 2) % STAGES * B_STAGE", "race|in flight", COPY, LDMATRIX
    ),
    "the next stage comes before the barrier": mutant(
        f"{BARRIER} is there, and everybody is done with the one before\n"
        "    if (step + STAGES - 1 < last) fetch(step + STAGES - 1);",
        "if (step + STAGES - 1 < last) fetch(step + STAGES - 1);\n__syncthreads();",
        "race",
        COPY,
        LDMATRIX,
    ),
    "two stages for three": mutant(
        "const int stage = step % STAGES", "const int stage = step % 2", "race|in flight", COPY, LDMATRIX
    ),
    "stages overlap": mutant("A_smem + stage * A_STAGE", "A_smem + stage * (A_STAGE - 4)", "race|in flight", COPY, LDMATRIX),
    "A is swizzled when written only": mutant(
        "A_tile + swizzled(warp / 2 * 32 + i * 16 + lane % 16, k * 2 + lane / 16, A_CHUNKS)",
        "A_tile + (warp / 2 * 32 + i * 16 + lane % 16) * A_CHUNKS + k * 2 + lane / 16",
        "numbers",
    ),
    "B is swizzled when read only": mutant("swizzled(row, column, B_CHUNKS)", "row * B_CHUNKS + column", "numbers"),
    "a row of A is read one on": mutant("i * 16 + lane % 16, k", "i * 16 + lane % 16 + 1, k", "in flight|race", LDMATRIX),
    "a row of B is read one on": mutant("k * 16 + lane % 16,", "(k * 16 + lane % 16 + 1) % DEPTH,", "numbers"),
    "a row of A is copied one on": mutant("(long long)(row0 + row) * K", "(long long)(row0 + row + 1) * K", "out of bounds", COPY),
    "rows of A past the end": mutant("row0 + row < M && k < K", "k < K", "out of bounds", COPY),
    "columns of A past the end": mutant("row0 + row < M && k < K", "row0 + row < M", "out of bounds", COPY),
    "rows of B past the end": mutant("k < K && n < N", "n < N", "out of bounds", COPY),
    "columns of B past the end": mutant("k < K && n < N", "k < K", "out of bounds", COPY),
    "rows of C past the end": mutant("row < M && col < N", "col < N", "race|out of bounds", PARTS),
    "columns of C past the end": mutant("row < M && col < N", "row < M", "race|out of bounds", PARTS),
    "nobody begins the accumulator": mutant("acc[2][4][4] = {};", "acc[2][4][4];", "uninitialised", "mma.sync"),
    "the accumulator begins late": mutant(
        "acc[2][4][4] = {};", "acc[2][4][4]; if (first) acc[0][0][0] = 0;", "uninitialised", "mma.sync"
    ),
    "a part goes missing": mutant("blockIdx.z * size + at) =", "0 * size + at) =", "race|uninitialised", PARTS, READ),
    "a part is stored one element on": mutant(
        "blockIdx.z * size + at) =", "blockIdx.z * size + at + 2) =", "race|uninitialised|out of bounds", PARTS, READ
    ),
    "the last step stores no part": mutant(
        "*reinterpret_cast<float2*>(parts", "if (last < steps) *reinterpret_cast<float2*>(parts", "uninitialised", READ
    ),
    "no fence between the visits": mutant("__threadfence();", "", "race", PARTS, READ),
    "a fence for the block only": mutant("__threadfence();", "__threadfence_block();", "race", PARTS, READ),
    "the count goes up before all is stored": mutant("__syncthreads();  // every", "// every", "race", PARTS, READ),
    "who is last is read early": mutant("__syncthreads();  // everybody knows", "// everybody", "race", "atomicInc", "!finishes"),
    "one part too many is added": mutant("z < gridDim.z; z++", "z <= gridDim.z; z++", "out of bounds", READ),
    "the first part is left out": mutant("int z = 0; z <", "int z = 1; z <", "numbers"),
}


def multiplied(module: Module, M: int, N: int, K: int, seed: int | None = None) -> tuple[Launch, bool]:
    """A launch, and whether C is right."""
    random = np.random.default_rng(0)
    A, B = random.standard_normal((M, K)).astype(np.float16), random.standard_normal((K, N)).astype(np.float16)
    C, parts, count = np.empty((M, N), np.float32), np.empty((2, M, N), np.float32), np.zeros(4, np.uint32)
    args = {"A": A, "B": B, "C": C, "parts": parts, "count": count, "M": M, "N": N, "K": K}
    grid = (-(-N // 64), -(-M // 64), 2)
    launch = module.launch("gemm", grid, 128, args, seed=seed, unwritten=("C", "parts"))
    return launch, bool(np.abs(C - A.astype(np.float64) @ B.astype(np.float64)).max() < 1e-4)


@pytest.mark.parametrize("name", sample(MUTANTS, {"nobody waits", "no fence between the visits"}))
def test_the_fault_is_found(name: str, tmp_path: Path) -> None:
    fault = MUTANTS[name]
    (tmp_path / NAME).write_text(SOURCE.read_text())
    fault.apply(tmp_path)
    launch, good = multiplied(Module.from_source((tmp_path / NAME).read_text(), name=NAME), 100, 72, 200)
    if fault.finds == "numbers":
        assert launch.findings == () and not good
    else:
        assert fault.is_found(launch.findings, tmp_path), [str(f) for f in launch.findings]


@pytest.mark.parametrize("orders", [1, wide(20)])
def test_what_is_not_broken_is_clean(orders: int) -> None:
    module = Module.from_source(SOURCE.read_text(), name=NAME)
    for seed in [None, *range(orders)]:
        launch, good = multiplied(module, 40, 24, 200, seed)
        assert launch.findings == () and good
    for seed in (None, 0, 1)[: 1 + orders // 10]:
        launch, good = multiplied(module, 100, 72, 200, seed)
        assert launch.findings == () and good
        counters = launch.counters
        assert all(counters.shared_kind(kind).requests for kind in ("ldmatrix", "cp.async"))
        assert all(counters.shared_kind(kind).conflicts == 0 for kind in ("ldmatrix", "cp.async"))
