"""Seeded faults: our kernels with one thing broken. Every fault is found, by its kind and, where it is one of memory or
synchronisation, by its line; what is not broken is clean under any order of execution."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cupyflash import Device, Problem, TileSchedule, plan
from cupyflash.schedules import SoftmaxSchedule, plan_softmax
from cupyflash.sim import execute, execute_softmax
from cupyflash.sim.execution import Execution
from cupyflash.sim.numbers.yardstick import drawn, measure
from cupyflash.sim.verification import score_dtype
from mutants import Mutant, check_mutant, check_unbroken
from suites import sample, wide

A100 = Device.named("A100-40GB")
AnySchedule = TileSchedule | SoftmaxSchedule
SYNC, WAIT = "__syncthreads();", "wait_for_copies();"

ATTENTION = Problem(1, 2, 1, 70, 90, 32, "float16", alignment=16)
"""Ragged both ways; two warps a block, three row blocks, three column blocks."""


COPY, LDMATRIX, MMA = "cp.async.cg.shared.global", "ldmatrix.sync", "mma.sync"
FA1, STD, SOFT = "fa1_forward.cu", "standard.cu", "softmax.cu"
PRODUCT, TILED = "warp_product.cuh", "tiled_products.cuh"
MOVED = (COPY, LDMATRIX)

FA1_MUTANTS = {
    "K and V are overwritten early": Mutant(FA1, SYNC + "  // every warp", "// every warp", "race", MOVED),
    "K and V are read early": Mutant(FA1, f"{WAIT}\n    {SYNC}", WAIT, "race", MOVED),
    "nobody waits for K and V": Mutant(FA1, f"{WAIT}\n    {SYNC}", SYNC, "race|in flight", MOVED),
    "Q is overwritten early": Mutant(FA1, "__syncwarp();                  ", "", "race", MOVED),
    "Q is read early": Mutant(FA1, f"{WAIT}\n      __syncwarp();", WAIT, "race", MOVED),
    "nobody waits for Q": Mutant(FA1, f"{WAIT}\n      __syncwarp();", "__syncwarp();", "in flight", MOVED),
    "warps share a row of Q": Mutant(FA1, "Q_smem + warp * 16 * D_ROW", "Q_smem + warp * 15 * D_ROW", "race", MOVED),
    "Q lies in the last row of V": Mutant(FA1, "V_smem + BC * DV_ROW", "V_smem + (BC - 1) * DV_ROW", "race", MOVED),
    "V lies in the last row of K": Mutant(FA1, "K_smem + BC * D_ROW", "K_smem + (BC - 1) * D_ROW", "race", MOVED),
    "rows past the end are initialised": Mutant(
        FA1,
        "if (row >= Nq) continue;\n      if (seen)",
        "if (seen)",
        "out of bounds",
        ("*reinterpret_cast<float2*>", "l[row] = 0.f", "m[row] = NEG"),
    ),
    "rows past the end are stored": Mutant(
        FA1, "if (row >= Nq) continue;\n        // Line 11", "// Line 11", "out of bounds", ("l[row] = l_new", "reinterpret_cast<")
    ),
    "l and m are read past the end": Mutant(FA1, "t == 0 && row < Nq", "t == 0", "out of bounds", ("l_i = l[row]", "m_i = m[row]")),
    "l goes one row on": Mutant(FA1, "l[row] = l_new", "l[row + 1] = l_new", "race", ("l[row + 1] = l_new", "l_i = l[row]")),
    "every lane reads l and m": Mutant(FA1, "t == 0 && row < Nq", "row < Nq", "race", ("l[row] = l_new", "l_i = l[row]", "m[row]")),
    "K is read past its end": Mutant(
        FA1, "p.K.row, whole, cols, threadIdx.x", "p.K.row, whole, whole, threadIdx.x", "out of bounds", (COPY,)
    ),
    "no zeros behind the last key": Mutant(
        FA1,
        "p.V.row, whole, cols, threadIdx.x",
        "p.V.row, cols, cols, threadIdx.x",
        "uninitialised",
        (LDMATRIX,),
        "one column block",
    ),
    "the last visit is not seen": Mutant(
        FA1, "last_visit = j == blocks.below(blocks.end)", "last_visit = j + 1 == blocks.below(blocks.end)", "numbers"
    ),
    "l is not initialised": Mutant(FA1, "l[row] = 0.f;", "", "uninitialised", ("l_i = l[row]",)),
    "m is not initialised": Mutant(FA1, "m[row] = NEG_INF;", "", "uninitialised", ("m_i = m[row]",)),
    "O is not initialised": Mutant(
        FA1, "zero_row<VALUE_DIM>(row_sums<VALUE_DIM>(O, p.O.row, O_acc, row), t);", "", "uninitialised", ("<const float2*>(row",)
    ),
    "O~ is not initialised": Mutant(
        FA1, "O_tilde[DV_PAD / 8][4] = {}", "O_tilde[DV_PAD / 8][4]", "uninitialised", ("O_tilde[n][", MMA)
    ),
    "m~ is not initialised": Mutant(
        FA1, "m_tilde[2] = {NEG_INF, NEG_INF}", "m_tilde[2]", "uninitialised", ("fmaxf(largest", "exp_of(m_tilde", "return exp")
    ),
    "l~ is not initialised": Mutant(
        FA1, "l_tilde[2] = {}", "l_tilde[2]", "uninitialised", ("l_tilde[h] *= rescale", "l_tilde[h] += S_regs")
    ),
    "O is not rescaled": Mutant(FA1, "old_weight * old.x", "old.x", "numbers"),
    "the scale is forgotten": Mutant("mask.cuh", "SCORE ? masks.p->scale : scale)", "1.f)", "numbers"),
    "the row sum misses two lanes": Mutant("mma.cuh", "return x + __shfl_xor_sync(~0u, x, 2);", "return x;", "numbers"),
    "a row of V is read one on": Mutant(FA1, "V_smem + col * DV_ROW)", "V_smem + (col + 1) * DV_ROW)", "numbers"),
}

STORED = ("out[row * out_row",)
STANDARD_MUTANTS = {
    "scores: Q and K are read early": Mutant(
        TILED, f"{WAIT}\n  {SYNC}\n\n  const int warp", f"{WAIT}\n  const int warp", "race", MOVED
    ),
    "scores: nobody waits": Mutant(TILED, f"{WAIT}\n  {SYNC}\n\n  const int warp", f"{SYNC}\n  const int warp", "in flight", MOVED),
    "scores: K lies in the last row of Q": Mutant(TILED, "A_smem + BR * ROW", "A_smem + (BR - 1) * ROW", "race", MOVED),
    "scores: a row is read one on": Mutant(TILED, "A_smem + warp * 16 * ROW, B", "A_smem + (warp * 16 + 1) * ROW, B", "numbers"),
    "scores: columns past the end are stored": Mutant(
        TILED, "row < rows && col < cols", "row < rows", "race|out of bounds", STORED
    ),
    "scores: rows past the end are stored": Mutant(TILED, "row < rows && col < cols", "col < cols", "race|out of bounds", STORED),
    "scores: a tile stores one column on": Mutant(
        TILED, "out_row + col] = from_float", "out_row + col + 1] = from_float", "out of bounds", STORED
    ),
    "scores: no zeros behind the last key": Mutant(
        TILED, "B.row, (cols + SUB - 1) / SUB * SUB", "B.row, cols", "uninitialised", (LDMATRIX,)
    ),
    "scores: nobody begins a sum": Mutant(PRODUCT, "S_regs[n][e] = 0.f;", ";", "uninitialised", (MMA,)),
    "scores: Q is read past its end": Mutant(TILED, "BR, rows, threadIdx.x", "BR, BR, threadIdx.x", "out of bounds", (COPY,)),
    "scores: K is read past its end": Mutant(STD, "at, keys, p.S", "at, p.Nk + BC, p.S", "out of bounds", (COPY,)),
    "scores: a tile stores one row on": Mutant(
        TILED, "out[row * out_row", "out[(row + 1) * out_row", "race|out of bounds", ("out[(row + 1) * out_row",)
    ),
    "scores: tiles of S overlap": Mutant(TILED, "* p.Nk + j * BC;", "* p.Nk + j * (BC - 1);", "race", STORED),
    "softmax: nobody begins m": Mutant(
        STD, "float m = NEG_INF, l", "float m, l", "uninitialised", ("fmaxf(m, s)", "expf(m - safe)")
    ),
    "softmax: nobody begins l": Mutant(STD, "l = 0.f;  // of", "l;  // of", "uninitialised", ("l = l * expf",)),
    "softmax: P is read for S": Mutant(STD, "to_float(S[col]) - safe", "to_float(P[col]) - safe", "uninitialised", ("P[col] =",)),
    "softmax: two warps have one row": Mutant(
        STD, "SOFTMAX_WARPS + threadIdx.x / 32", "SOFTMAX_WARPS + threadIdx.x / 64", "race", ("P[col] =", "L[row] =")
    ),
    "softmax: every lane stores L": Mutant(STD, "L && lane == 0", "L", "bytes"),
    "softmax: L without its maximum": Mutant(STD, "m + logf(l)", "logf(l)", "numbers"),
    "softmax: l is not rescaled": Mutant(STD, "l * expf(m - safe) + expf", "l + expf", "numbers"),
    "softmax: another lane's l is not rescaled": Mutant(STD, "l_other * expf(m_other - safe)", "l_other", "numbers"),
    "softmax: rows past the end": Mutant(
        STD, "if (row >= p.rows) return;", "", "out of bounds", ("S[col]", "P[col]", "L[row]"), "one column block"
    ),
    "softmax: P goes one column on": Mutant(STD, ") P[col] =", ") P[col + 1] =", "out of bounds", ("P[col + 1]",)),
    "softmax: one lane's columns are left out": Mutant(
        STD, "col = lane; col < Nk; col += 32) P", "col = lane + 1; col < Nk; col += 32) P", "bytes"
    ),
    "softmax: half a warp is merged": Mutant(STD, "other = 16; other > 0", "other = 8; other > 0", "numbers"),
    "values: V is overwritten early": Mutant(TILED, SYNC + "  // every warp", "// every warp", "race", MOVED),
    "values: V is read early": Mutant(TILED, f"{WAIT}\n    {SYNC}\n    for", f"{WAIT}\n    for", "race", MOVED),
    "values: nobody waits": Mutant(TILED, f"{WAIT}\n    {SYNC}\n    for", f"{SYNC}\n    for", "in flight", MOVED),
    "values: nobody begins the accumulator": Mutant(
        STD, "O_regs[DV_PAD / 8][4] = {};", "O_regs[DV_PAD / 8][4];", "uninitialised", (MMA,)
    ),
    "values: V is read past its end": Mutant(TILED, "valid - first, thr", "TILE, thr", "out of bounds", (COPY,)),
    "values: a row of V is copied one on": Mutant(
        TILED, "B.at + first * B.row", "B.at + (first + 1) * B.row", "out of bounds", (COPY,)
    ),
    "values: a row of V is read one on": Mutant(TILED, "B_smem + k * row_el", "B_smem + (k + 1) * row_el", "numbers"),
    "values: O goes one row on": Mutant(
        TILED,
        "out.at + row * out.row, 8",
        "out.at + (row + 1) * out.row, 8",
        "race|out of bounds",
        ("reinterpret_cast<unsigned*>(row",),
    ),
    "values: P is read past its rows": Mutant(
        TILED, "row < rows && at < depth ?", "at < depth ?", "out of bounds", ("to_float(A[",)
    ),
    "values: P is read past its columns": Mutant(
        TILED, "row < rows && at < depth ?", "row < rows ?", "out of bounds", ("to_float(A[",)
    ),
    "values: rows past the end are stored": Mutant(
        TILED, "if (row >= rows) continue;", "", "race|out of bounds", ("reinterpret_cast<unsigned*>(row",)
    ),
    "values: no zeros behind the last key": Mutant(
        TILED, "B.row, (extent + SUB - 1) / SUB * SUB", "B.row, extent", "uninitialised", (LDMATRIX,), "one column block"
    ),
    "values: the accumulator starts again": Mutant(
        TILED,
        "const int extent = min(TILE, depth - first);",
        "const int extent = min(TILE, depth - first); sum_regs[0][0] = 0.f;",
        "numbers",
    ),
}

PART = ("part_smem[threadIdx.x / 32] = part", "part = part_smem[")
BOTH_SOFTMAX_MUTANTS = {
    "parts are read early": Mutant(SOFT, f"    {SYNC}\n", "", "race", PART, "block"),
    "every warp has the same room": Mutant(
        SOFT, "part_smem[threadIdx.x / 32] = part", "part_smem[0] = part", "race", ("part_smem[0] = part",), "block"
    ),
    "a part is read past the last one": Mutant(
        SOFT,
        "part_smem[threadIdx.x % WARPS]",
        "part_smem[threadIdx.x % WARPS + WARPS]",
        "uninitialised|out of bounds",
        PART[1:],
        "block",
    ),
    "rows past the end": Mutant(SOFT, "row < p.rows ? p.n : 0", "p.n", "race|out of bounds", ("row.x[", "row.y[i"), "warp"),
    "y goes one element on": Mutant(
        SOFT, "row.y[i * p.y_step] =", "row.y[(i + 1) * p.y_step] =", "race|out of bounds", ("row.y[(i + 1)",), "warp"
    ),
    "y is read for x": Mutant(SOFT, "row.x[i * p.x_step]", "row.y[i * p.y_step]", "uninitialised", ("row.y[i",), "warp"),
    "nobody begins m": Mutant(SOFT, "float m = LOWEST;", "float m;", "uninitialised", ("fmaxf(m, ",), "warp"),
    "nobody begins d": Mutant(SOFT, "float d = 0.f;", "float d;", "uninitialised", ("d += exp_of", "d = d * exp_of"), "warp"),
    "half the warps are merged": Mutant(SOFT, "other = WARPS / 2;", "other = WARPS / 4;", "numbers", (), "block"),
}
SOFTMAX_MUTANTS = {
    "safe": {
        **BOTH_SOFTMAX_MUTANTS,
        "m and d share their room": Mutant(SOFT, "part_smem + WARPS)", "part_smem)", "race", PART, "block"),
        "elements are done twice": Mutant(SOFT, "j += LANES) d +=", "j += LANES / 2) d +=", "bytes", (), "warp"),
        "m is not subtracted": Mutant(
            SOFT, "to_float(row.x[j * p.x_step]) - m)", "to_float(row.x[j * p.x_step]))", "numbers", (), "warp"
        ),
    },
    "online": {
        **BOTH_SOFTMAX_MUTANTS,
        "x is read one element on": Mutant(
            SOFT, "x_j = to_float(row.x[j", "x_j = to_float(row.x[(j + 1)", "out of bounds", ("x_j = to",), "warp"
        ),
        "d is not rescaled": Mutant(SOFT, "d * exp_of(m - m_new)", "d", "numbers", (), "warp"),
        "a part's d is not rescaled": Mutant(SOFT, "__fmul_rn(i.d, exp_of(i.m - m))", "i.d", "numbers", (), "block"),
    },
}


def attention(algorithm: str, problem: str = "") -> TileSchedule:
    one = Problem(1, 1, 1, 70, 25, 32, "float16", alignment=16)
    return plan(one if problem else ATTENTION, A100, algorithm, (32, 32), lse=True)


def forward_or_softmax(schedule: AnySchedule, seed: int | None = None) -> tuple[Execution, bool]:
    """An execution, and whether its numbers are right."""
    if isinstance(schedule, SoftmaxSchedule):
        x = np.random.default_rng(0).standard_normal((schedule.rows, schedule.cols)).astype(np.float32) * 3
        found = execute_softmax(schedule, x, seed=seed)
        e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
        good = np.abs(found.out - e / e.sum(axis=1, keepdims=True)).max() < 1e-6
        return found, bool(good)
    assert isinstance(schedule, TileSchedule)
    inputs = drawn(schedule.problem, v_mean=1.0, blocks=(schedule.block_rows, schedule.block_cols))
    inputs = replace(inputs, q=2 * inputs.q)
    found = execute(schedule, *inputs.qkv, **inputs.beside, seed=seed)
    numbers = measure(found.out, found.lse, inputs, score_dtype(schedule))
    return found, all(each.good for each in numbers.values())


@pytest.mark.parametrize("name", sample(FA1_MUTANTS, {"Q is overwritten early", "the scale is forgotten"}))
def test_flash_attention(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_mutant(FA1_MUTANTS[name], attention("fa1", FA1_MUTANTS[name].problem), forward_or_softmax, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", sample(STANDARD_MUTANTS, {"softmax: every lane stores L", "values: V is read past its end"}))
def test_standard(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_mutant(
        STANDARD_MUTANTS[name], attention("standard", STANDARD_MUTANTS[name].problem), forward_or_softmax, tmp_path, monkeypatch
    )


SOFTMAX_SCHEDULES = {"warp": (5, 100), "block": (2, 3000)}


@pytest.mark.parametrize(
    ("algorithm", "name"),
    sample([(a, name) for a, mutants in SOFTMAX_MUTANTS.items() for name in mutants], [("online", "nobody begins d")]),
)
def test_softmax(algorithm: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = SOFTMAX_MUTANTS[algorithm][name]
    rows, cols = SOFTMAX_SCHEDULES[mutant.problem]
    check_mutant(mutant, plan_softmax(rows, cols, "float32", A100, algorithm), forward_or_softmax, tmp_path, monkeypatch)


@pytest.mark.parametrize("algorithm", ["fa1", "standard"])
@pytest.mark.parametrize("orders", [1, wide(20)])
def test_small_ones_that_are_not_broken_are_clean(algorithm: str, orders: int) -> None:
    check_unbroken(
        plan(Problem(1, 1, 1, 20, 40, 16, "float16", alignment=16), A100, algorithm, (32, 32), lse=True),
        forward_or_softmax,
        range(orders),
    )


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", ["fa1", "standard"])
def test_what_is_not_broken_is_clean(algorithm: str) -> None:
    check_unbroken(attention(algorithm), forward_or_softmax, range(2))
    check_unbroken(
        plan(Problem(1, 1, 1, 128, 128, 64, "float32", causal=True), A100, algorithm, (64, 64), lse=True),
        forward_or_softmax,
        range(1),
    )


@pytest.mark.parametrize("algorithm", ["safe", "online"])
@pytest.mark.parametrize("orders", [1, wide(20)])
def test_softmax_that_is_not_broken_is_clean(algorithm: str, orders: int) -> None:
    for rows, cols in SOFTMAX_SCHEDULES.values():
        check_unbroken(plan_softmax(rows, cols, "float32", A100, algorithm), forward_or_softmax, range(min(orders, 6)))
    check_unbroken(plan_softmax(2, 1100, "float32", A100, algorithm), forward_or_softmax, range(orders))
