"""Seeded faults in FlashAttention-2's kernel: each is found, and what is not broken is clean under any order of execution."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_varlen
from test_mutants import forward_or_softmax

from cupyflash import Device, Problem, TileSchedule, plan
from cupyflash.request.options import BlockMask
from cupyflash.schedules import plan_varlen
from cupyflash.sim import execute
from mutants import Mutant, check_mutant, check_unbroken
from suites import sample, wide
from yardstick import draw

A100, H100, T4 = (Device.named(name) for name in ("A100-40GB", "H100-SXM", "T4"))
FA2, TILE, PRODUCTS, SOFTMAX = "fa2_forward.cu", "swizzled_tile.cuh", "row_products.cuh", "online_softmax.cuh"
COPY, LDMATRIX = "cp.async.cg.shared.global", "ldmatrix.sync"
MOVED = (COPY, LDMATRIX)
PARTS, PAIRS = "column_parts.cuh", "column_warps.cuh"
SHARED = ("numbers", (), "shared rows")
PLACED = ("float4", "others[", "own[", *MOVED)

KEPT = BlockMask.of(np.array([[1, 0, 1], [1, 1, 0]], bool))
PROBLEMS = {
    "": Problem(1, 2, 1, 70, 90, 64, "float16"),
    "causal": Problem(1, 2, 1, 70, 90, 64, "float16", causal=True),
    "window": Problem(1, 2, 1, 70, 150, 64, "float16", window=(40, 20)),
    "blocks": Problem(1, 2, 1, 70, 90, 64, "float16", block_mask=KEPT),
    "values are wider": Problem(1, 2, 1, 70, 90, 64, "float16", head_dim_v=80),
    "one slot": Problem(1, 2, 1, 70, 90, 64, "float16"),
    "shared rows": Problem(1, 1, 1, 70, 90, 40, "float16", head_dim_v=280, window=(30, 20), sinks=True),
    "shared rows, one slot": Problem(1, 1, 1, 70, 90, 72, "float16", head_dim_v=264, causal=True),
}
SMALL = {"one slot": Device.named("A100-40GB", sram="20KB"), "shared rows, one slot": Device.named("A100-40GB", sram="85KB")}
"""Ragged both ways, two row blocks of several warps, three column blocks."""

MUTANTS = {
    "a slot is overwritten early": Mutant(FA2, "    __syncthreads();\n    slot =", "    slot =", "race", MOVED),
    "nobody waits for a block": Mutant(
        FA2, "wait_for_groups<0>();\n    __syncthreads();\n    slot", "__syncthreads();\n    slot", "in flight|race", MOVED
    ),
    "a block is waited for one too late": Mutant(
        FA2,
        "wait_for_groups<0>();\n    __syncthreads();\n    slot",
        "wait_for_groups<1>();\n    __syncthreads();\n    slot",
        "in flight|race",
        MOVED,
    ),
    "blocks are not committed": Mutant(
        FA2, "next >= blocks.begin);\n      close_group();", "next >= blocks.begin);", "in flight|race", MOVED
    ),
    "a block is asked for behind the last": Mutant(
        FA2, "fetch_values<true>(next, next >= blocks.begin)", "fetch_values<true>(next, true)", "out of bounds", (COPY,)
    ),
    "Q is read before it is there": Mutant(
        FA2, "    wait_for_groups<1>();\n    __syncthreads();\n", "    __syncthreads();\n", "in flight|race", MOVED
    ),
    "the ring has a slot too many": Mutant(FA2, "both - slot", "slot + SLOT", "race|uninitialised|out of bounds|in flight", MOVED),
    "the next block goes to the slot at hand": Mutant(
        FA2, "WHOLE>(j, other_slot(), K", "WHOLE>(j, slot, K", "race|in flight|uninitialised", MOVED
    ),
    "slots overlap": Mutant(FA2, "SLOT = 2 * BC", "SLOT = 2 * (BC - 8)", "race|in flight", MOVED),
    "with one slot V_j takes K_j's": Mutant(FA2, "+ SLOT / 2, V", ", V", "race|in flight|uninitialised", MOVED, "one slot"),
    "with one slot nobody waits for V_j": Mutant(
        FA2, "      wait_for_groups<0>();\n      __syncthreads();", "      __syncthreads();", "in flight|race", MOVED, "one slot"
    ),
    "with one slot K_j is overwritten early": Mutant(
        FA2,
        "      wait_for_groups<0>();\n      __syncthreads();",
        "      wait_for_groups<0>();",
        "race|in flight",
        MOVED,
        "one slot",
    ),
    "the last rows of a tile come first": Mutant(TILE, "BACK ? LAST - turn : turn", "turn", "numbers", (), "causal"),
    "O takes the room of Q's other rows early": Mutant(
        FA2, "    } else {\n      __syncthreads();\n    }", "    }", "race", (*MOVED, "store_two", "st.shared"), "values are wider"
    ),
    "the ring begins in Q's last row": Mutant(
        FA2, "Q_smem + BR * ROW_SIZE", "Q_smem + (BR - 1) * ROW_SIZE", "race|in flight", MOVED
    ),
    "V is read without its permutation": Mutant(
        PRODUCTS,
        "Tile::index(lane % 16, lane / 16 * 8) * sizeof(T)",
        "(lane % 16 * Tile::PAD + lane / 16 * 8) * sizeof(T)",
        "numbers",
    ),
    "K's chunks are permuted by another row": Mutant(
        PRODUCTS, "Tile::index(lane % 8 + lane / 16 * 8, lane", "Tile::index(lane % 8 + lane / 16 * 8 + 1, lane", "numbers"
    ),
    "a step to the right is an addition": Mutant(TILE, "(at ^ (chunks % GROUP * 16))", "(at + (chunks % GROUP * 16))", "numbers"),
    "K is read past its end": Mutant(TILE, "WHOLE || row < valid", "WHOLE || row <= valid", "out of bounds", (COPY,)),
    "rows past the end of Q are read": Mutant(FA2, "p.Q.row, rows, thread", "p.Q.row, BR, thread", "out of bounds", (COPY,)),
    "rows past the end of O are stored": Mutant(
        FA2, "end_rows - first, lane)", "WARP_ROWS, lane)", "out of bounds|race|uninitialised", ("reinterpret_cast<uint4*>",)
    ),
    "L is written past the end": Mutant(FA2, "t == own && own_row < end_rows", "t == own", "out of bounds|race", ("L[end.L_row",)),
    "O leaves before the warp has put it down": Mutant(
        FA2, "  __syncwarp();\n", "", "race|uninitialised", ("store_two", "uint4*>")
    ),
    "half of the rows have no L": Mutant(FA2, "own = t % (2 * M)", "own = t % 2", "bytes"),
    "a row has another's sum": Mutant(FA2, "if (own == 2 * m + h)", "if (own != 2 * m + h)", "numbers"),
    "a warp that sees nothing copies nothing": Mutant(
        FA2,
        "stream.next_values(j);\n    stream.ask_for_next(j);",
        "stream.next_values(j);",
        "uninitialised|in flight|race",
        MOVED,
        "causal",
    ),
    "a warp that sees nothing goes on": Mutant(
        FA2,
        "work.pass(j, stream, masks);\n  for",
        "continue;\n  for",
        "race|in flight|uninitialised|divergent|deadlock",
        MOVED,
        "causal",
    ),
    "masks are forgotten": Mutant(FA2, "!ALL_MASKED && masked, mask", "false, mask", "numbers", (), "causal"),
    "O is not rescaled": Mutant(SOFTMAX, "state.O[i][n][2 * h] *= rescale;", "", "numbers"),
    "l is not rescaled": Mutant(SOFTMAX, "state.l[i][h] *= rescale;", "", "numbers"),
    "the maximum is forgotten": Mutant(SOFTMAX, "state.minus_m[i][h] = -m_new;", "", "numbers"),
    "the maximum is a lane's": Mutant(SOFTMAX, "row_max(largest)", "largest", "numbers"),
    "the first weights are not made again": Mutant(SOFTMAX, "    weigh(S, factor, offset, P, sum);\n  }", "  }", "numbers"),
    "the first weights have no sum": Mutant(SOFTMAX, "state.l[i][h] += sum[i][h];", "{}", "numbers"),
    "O begins with what is there": Mutant(FA2, "State state = {};", "State state;", "uninitialised|numbers", ("",)),
    "the diagonal is taken for whole": Mutant(
        FA2, "visible_end(masks, row_block) / BC;", "(visible_end(masks, row_block) + BC) / BC;", "numbers", (), "causal"
    ),
    "the window's left edge is taken for whole": Mutant(
        FA2, "(visible_begin(masks, last_row) + BC - 1) / BC", "visible_begin(masks, row_block) / BC", "numbers", (), "window"
    ),
    "the block mask is used before it is there": Mutant(
        FA2, "warp, WARPS);\n    __syncthreads();", "warp, WARPS);", "race|uninitialised", ("kept[",), "blocks"
    ),
    "the block mask's rows are one off": Mutant(
        "block_mask.cuh", "mask.kept[i / SHARE_I", "mask.kept[(1 - i / SHARE_I)", "numbers", (), "blocks"
    ),
    "the second warp's columns are the first's": Mutant(PARTS, " ^ own() * PIECE * int(16", " ^ 0 * PIECE * int(16", *SHARED),
    "the second warp's columns are shifted": Mutant(PARTS, "own() * PIECE * int(16", "own() * int(16", *SHARED),
    "a warp's pieces lie side by side": Mutant(PARTS, "chunks / PIECE * Whole::GROUP", "chunks / PIECE * PIECE", *SHARED),
    "both warps write L": Mutant(FA2, "end_rows && col_warp() == 0", "end_rows", "bytes", (), "shared rows"),
    "both warps have the first keys": Mutant(FA2, "col_warp() * SUB", "0 * SUB", *SHARED),
    "the sums are not the partner's": Mutant(PAIRS, "half[m][n][0] += part.x", "half[m][n][0] += 0 * part.x", *SHARED),
    "the halves of S are exchanged": Mutant(PAIRS, "second ? other[e] : half[m][n][e]", "half[m][n][e]", *SHARED),
    "the second warp has no sink": Mutant(FA2, "inverse = of_first(", "of_first(", *SHARED),
    "the rooms of S overlap": Mutant(FA2, "32) * (M * N * 32)", "32) * (M * N * 16)", "race", PLACED, "shared rows"),
    "the room of S is in the ring": Mutant(
        FA2, "(BR + STAGES * 2 * BC) * ROW_SIZE", "(BR + STAGES * 2 * BC - 1) * ROW_SIZE", "race|in flight", PLACED, "shared rows"
    ),
    "two slots are taken for one": Mutant(
        FA2, "add_partner<STAGES == 1>", "add_partner<true>", "race|uninitialised", PLACED, "shared rows"
    ),
    "the sums are taken before they are there": Mutant(
        PAIRS, "  meet_partner();\n#pragma", "#pragma", "race|uninitialised", PLACED, "shared rows, one slot"
    ),
    "O leaves before the partner has put its part down": Mutant(
        FA2,
        "    meet_partner();\n  }\n  constexpr int STORED",
        "  }\n  constexpr int STORED",
        "race|uninitialised",
        ("store_two", "uint4*>"),
        "shared rows",
    ),
    "both warps store the first rows": Mutant(
        FA2, "const int first = col_warp() * STORED", "const int first = 0", "race", ("uint4*>",), "shared rows"
    ),
}


def schedule(problem: str) -> TileSchedule:
    return plan(PROBLEMS[problem], SMALL.get(problem, A100), "fa2", (64, 32), lse=True)


@pytest.mark.parametrize("name", sample(MUTANTS, {"nobody waits for a block"}))
def test_mutant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_mutant(MUTANTS[name], schedule(MUTANTS[name].problem), forward_or_softmax, tmp_path, monkeypatch)


@pytest.mark.wide
@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_is_not_broken_is_clean(problem: str) -> None:
    assert schedule(problem).kernels()[-1].threads >= 64  # several warps
    check_unbroken(schedule(problem), forward_or_softmax, range(3))


ORDERED: dict[str, tuple[Device, tuple[int, int], dict[str, Any]]] = {
    "one warp": (A100, (16, 16), {"causal": True}),
    "causal": (A100, (32, 16), {"causal": True}),
    "float": (A100, (32, 16), {"dtype": "float32", "causal": True}),
    "bfloat": (H100, (32, 16), {"dtype": "bfloat16", "window": (20, 5)}),
    "without asynchronous copies": (T4, (32, 16), {"causal": True}),
    "narrow copies": (A100, (32, 16), {"alignment": 2, "causal": True}),
    "masks": (A100, (32, 16), {"mask": True, "bias": True, "padded": True, "key_lengths": (35,)}),
    "blocks": (A100, (32, 16), {"block_mask": BlockMask.of(np.array([[1, 0, 1], [0, 1, 1]], bool))}),
    "shared rows": (A100, (32, 16), {"head_dim_v": 288, "causal": True, "sinks": True}),
    "odd widths": (A100, (32, 16), {"head_dim": 8, "head_dim_v": 17, "alignment": 2}),
}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "orders"),
    [("masks", 2), ("without asynchronous copies", 2), *(wide(name, 8 if name == "shared rows" else 20) for name in ORDERED)],
)
def test_many_orders(name: str, orders: int) -> None:
    """Small problems in many orders of execution."""
    device, tiling, options = ORDERED[name]
    posed: dict[str, Any] = {"seqlen_q": 34, "seqlen_k": 40, "head_dim": 16, "dtype": "float16"} | options
    check_unbroken(
        plan(Problem(batch=1, heads=1, kv_heads=1, **posed), device, "fa2", tiling, lse=True), forward_or_softmax, range(orders)
    )


@pytest.mark.parametrize("orders", [2, wide(20)])
def test_many_orders_of_packed_sequences(orders: int) -> None:
    schedule = plan_varlen(Problem(3, 1, 1, 20, 40, 16, "float16", causal=True), A100, ((20, 40), (0, 3), (17, 9)), (32, 32))
    for seed in range(orders):
        test_varlen.check_packed(schedule, seed=seed)


@pytest.mark.parametrize(("d", "device"), sample([*product([32, 64, 80, 128, 256], [A100, H100, T4]), (320, H100)], [(80, A100)]))
def test_no_bank_conflicts(d: int, device: Device) -> None:
    """Fragments, copies and O's way through shared memory take as many wavefronts as their bytes need."""
    problem = Problem(1, 1, 1, 128, 256, d, "float16")
    one = plan(problem, device, "fa2")
    counters = execute(one, *draw(problem)).counters["fa2_forward"]
    conflicts = {kind: counts.wavefronts - counts.ideal_wavefronts for kind, counts in counters.shared.items()}
    assert set(conflicts.values()) == {0}, conflicts
