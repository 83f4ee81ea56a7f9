"""Seeded faults in FlashAttention-2's backward kernels: each is found, and what is not broken is clean under any order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cases_backward import (
    A100,
    ATOMIC,
    BWD,
    COPY,
    COPY_FLOAT,
    DS,
    H100,
    LDMATRIX,
    LEFT,
    MASK,
    MMA,
    MOVED,
    PLANNED,
    PROBLEMS,
    PRODUCTS,
    RED,
    ROWS,
    SEQUENCE,
    STORE_TILE,
    STORE_TWO,
    SUM,
    SYNC,
    T4,
    backward,
    schedule,
)
from cupyflash import Device, Problem
from cupyflash.launch.binding import argument_values
from cupyflash.schedules import plan_backward
from cupyflash.schedules.fa2_backward import Fa2BackwardSchedule
from cupyflash.sim.execution import execute_backward, run_kernels
from cupyflash.sim.numbers.yardstick import draw_gradient
from mutants import Mutant, check_mutant, check_unbroken
from suites import sample, wide
from yardstick import draw

MUTANTS = {
    # Synchronisation
    "wide heads' Q and dO are overwritten early": Mutant(
        BWD, SYNC + "  // all are done with Q_i", ";  // all", "race", MOVED, "wide"
    ),
    "Q comes before dO has gone": Mutant(BWD, SYNC + "  // all are done with dO_i", "// all", "race", MOVED, "wide, by turns"),
    "Q and dO are read early": Mutant("weight.cuh", "return __syncthreads_or(large);", "return large;", "race", MOVED),
    "nobody waits for Q and dO": Mutant(BWD, "wait_for_groups<0>();\n", "", "in flight|race", MOVED),
    "Q and dO are waited for one too late": Mutant(BWD, "wait_for_groups<0>", "wait_for_groups<1>", "in flight|race", MOVED),
    "the first blocks are not committed": Mutant(
        BWD, "fetch(i, slot_at(which));\n    close_group();", "fetch(i, slot_at(which));", "in flight|race", MOVED
    ),
    "dS is read early": Mutant(BWD, SYNC + "  // dS is there", "// dS", "race", DS),
    "Q and dO are overwritten early": Mutant(BWD, SYNC + "  // dS is there", "// dS", "race", MOVED, "one stage: "),
    "one stage is not committed": Mutant(
        BWD,
        "fetch(next, slot_at(which));\n        close_group();",
        "fetch(next, slot_at(which));",
        "in flight|race",
        MOVED,
        "one stage: ",
    ),
    "a barrier that not all warps reach": Mutant(
        BWD,
        SYNC + "  // dS is there",
        "if (warp_key + 16 <= i * BR) __syncthreads();  // dS is there",
        "race|barrier",
        DS,
        "causal",
    ),
    "dK is put down early": Mutant(BWD, SYNC + "\n  if constexpr (WITH_DK) {", "if constexpr (WITH_DK) {", "race", DS),
    "dK and dV leave before they are put down": Mutant(BWD, "dV_regs);\n  __syncthreads();", "dV_regs);", "race", LEFT),
    "the block mask is used before it is there": Mutant(
        BWD, "__syncthreads_or(any)", "true", "race|uninitialised", ("kept[",), "blocks"
    ),
    # Room
    "the ring has one slot": Mutant(BWD, "which = STAGES == 2 ? 1 - which : 0;", "", "race|in flight", MOVED),
    "the ring that shared keys go round has one slot": Mutant(
        BWD, "which = STAGES == 2 ? 1 - which : 0;", "", "race|in flight", MOVED, "shared keys"
    ),
    "shared keys' next blocks are not committed": Mutant(
        BWD,
        "fetch(next, slot_at(which));\n        close_group();",
        "fetch(next, slot_at(which));",
        "in flight|race",
        MOVED,
        "shared keys",
    ),
    "slots overlap": Mutant(BWD, "ring + s * SLOT", "ring + s * (SLOT / BR) * (BR - 1)", "race|in flight", MOVED),
    "slots of L and D overlap": Mutant(
        BWD,
        "row_ring + s * ROW_SLOT;",
        "row_ring + s * (ROW_SLOT / 2);",
        "race|in flight",
        MOVED,
    ),
    "dO lies in Q's last row": Mutant(BWD, "at + BR * KeyTile::PAD", "at + (BR - 1) * KeyTile::PAD", "race|in flight", MOVED),
    "D lies in L": Mutant(BWD, "of_rows + ROW_SLOT - BR}", "of_rows + ROW_SLOT - BR - 1}", "race|in flight", (COPY_FLOAT,)),
    "V lies in K's last row": Mutant(BWD, "K_smem + BC *", "K_smem + (BC - 1) *", "race", MOVED),
    "dS lies in V's last row": Mutant(BWD, "V_smem + BC *", "V_smem + (BC - 1) *", "race", (*DS, COPY)),
    "the ring begins in dS's last row": Mutant(BWD, "WIDE ? 0 : BC *", "WIDE ? 0 : (BC - 1) *", "race|in flight", (*DS, COPY)),
    "L and D begin in the last slot": Mutant(
        BWD, "ring + SLOTS * SLOT", "ring + (SLOTS * BR - 1) * (SLOT / BR)", "race|in flight", MOVED
    ),
    "the block mask begins in the last slot": Mutant(
        BWD,
        "row_ring + SLOTS * ROW_SLOT)",
        "row_ring + SLOTS * ROW_SLOT - 1)",
        "race|in flight|uninitialised",
        ("kept[", COPY_FLOAT),
        "blocks",
    ),
    "warps share a row of dK": Mutant(
        BWD, "put_tile<KeyPart>(K_smem + own_keys", "put_tile<KeyPart>(K_smem + warp * (WARP_KEYS - 1)", "race", LEFT
    ),
    # Bounds
    "Q is read past its end": Mutant(BWD, "p.Q.row, rows, threadIdx.x", "p.Q.row, BR, threadIdx.x", "out of bounds", (COPY,)),
    "L and D are read past their end": Mutant(BWD, "inside = r < rows", "inside = r < BR", "out of bounds", (COPY_FLOAT,)),
    "K is read past its end": Mutant(BWD, "p.K.row, cols, threadIdx.x", "p.K.row, BC, threadIdx.x", "out of bounds", (COPY,)),
    "rows past the end are added to dQ": Mutant(
        BWD, "if (first + 16 * a + 8 * h >= Nq) continue;", "", "out of bounds|uninitialised", (RED,)
    ),
    "columns past d are added to dQ": Mutant(
        BWD, "SUM_TILES % C != 0 && item.tile + c >= SUM_TILES", "false", "bytes", (), "odd width"
    ),
    "keys past the end have a dK": Mutant(
        BWD, "rows = Nk - place.j * BC - key", "rows = LEAVING", "out of bounds|race", (STORE_TILE,)
    ),
    "D is written past its end": Mutant(
        ROWS, "if (first == 0 && place.row < p.total_q)", "if (first == 0)", "out of bounds|race", ("p.D[place.at] = sum",)
    ),
    "dQ is written past its end": Mutant(
        ROWS,
        " || row >= p.total_q) return;",
        ") return;",
        "out of bounds|uninitialised",
        ("reinterpret_cast<", "four_sums(sums, k)"),
    ),
    "the mask is read past its end": Mutant(
        BWD, "if (seen && asks) seen = mask", "seen = mask", "out of bounds", ("ld.global.u8",), "mask"
    ),
    "the bias is read past its end": Mutant(BWD, "if (seen) s = fmaf", "s = fmaf", "out of bounds", ("ld.global.u16",), "bias"),
    "the bias's gradient is summed past its end": Mutant(
        BWD, "if (seen) atomicAdd", "atomicAdd", "out of bounds", (ATOMIC,), "bias"
    ),
    # Atomics
    "dQ is summed by plain additions": Mutant(
        SUM, 'asm volatile("red.global.add.f32 [%0], %1;" ::"l"(at), "f"(a) : "memory");', "*sums += a;", "race", ("*sums +=",)
    ),
    "dQ is stored": Mutant(SUM, "red.global.add.f32 [%0], %1;", "st.global.f32 [%0], %1;", "race", ("st.global.f32",)),
    "the bias's gradient is summed by plain additions": Mutant(
        BWD,
        "atomicAdd(sum + row * p.dbias.row + key * p.dbias.col, dS[m][n][e])",
        "sum[row * p.dbias.row + key * p.dbias.col] += dS[m][n][e]",
        "race",
        ("sum[row",),
        "bias",
    ),
    # What nobody has begun
    "dQ does not begin with zeros": Mutant(ROWS, " = make_float4(0.f, 0.f, 0.f, 0.f);", ";", "uninitialised", (RED,)),
    "D is not there": Mutant(ROWS, "p.D[place.at] = sum;", "{}", "uninitialised", (COPY_FLOAT,)),
    "dK does not begin with zeros": Mutant(
        BWD,
        "dK_regs[WITH_DK ? M : 1][KEY_COLS / 8][4] = {}",
        "dK_regs[WITH_DK ? M : 1][KEY_COLS / 8][4]",
        "uninitialised",
        (MMA,),
    ),
    "dS of keys that no row sees is not zero": Mutant(
        BWD,
        "const float zeros[M][N][4] = {};",
        "float zeros[M][N][4];",
        "uninitialised",
        (STORE_TWO, "pack", "if (i < blocks.begin) continue;"),
        "causal",
    ),
    "dQ of a block does not begin with zeros": Mutant(PRODUCTS, "dQ_regs[a][c][half][e] = 0.f;", ";", "uninitialised", (MMA,)),
    # Numbers
    "D is forgotten": Mutant(BWD, "e % 2 ? d.y : d.x, dropout", "0.f, dropout", "numbers"),
    "D is another row's": Mutant(BWD, "e % 2 ? d.y : d.x, dropout", "e / 2 ? d.y : d.x, dropout", "numbers"),
    "a lane's part of D is forgotten": Mutant(ROWS, "other = ROW_LANES / 2", "other = ROW_LANES / 4", "numbers"),
    "every second element of D is forgotten": Mutant(
        ROWS, "sum = fmaf(o[c], g[c], sum)", "sum = c % 2 ? sum : fmaf(o[c], g[c], sum)", "numbers"
    ),
    "every lane stores D": Mutant(ROWS, "if (first == 0 && place.row < p.total_q)", "if (place.row < p.total_q)", "bytes"),
    "dK is not scaled": Mutant(BWD, "multiply(dK_regs, p.scale);", "", "numbers"),
    "dV is scaled": Mutant(
        BWD, "if constexpr (WITH_DV) put_tile", "multiply(dV_regs, p.scale);\n  if constexpr (WITH_DV) put_tile", "numbers"
    ),
    "dQ is not scaled": Mutant(ROWS, "p.scale * dQ_regs", "dQ_regs", "numbers"),
    "a group has its neighbour's heads": Mutant(BWD, "kv_head * p.group", "kv_head", "numbers", (), "groups"),
    "heads of a group share L and D": Mutant(BWD, ", row0 += p.total_q", "", "numbers", (), "groups"),
    "heads of a group share dQ's sum": Mutant(BWD, ", sums += sums_of_a_head(unknown(p.total_q))", "", "numbers", (), "groups"),
    "dQ's sum has the columns of other lanes": Mutant(SUM, "own / 2 * 8 + 2 * t + own % 2", "4 * t + own", "numbers"),
    "a group begins with its second head": Mutant(
        BWD,
        "for (int h = 0; h < p.group; h++, Q +=",
        "for (int h = 1; h < p.group; h++, Q +=",
        "bytes",
    ),
    "rows without keys have L = -inf": Mutant(
        "weight.cuh", "if (L_smem[r] == NEG_INF) L_smem[r] = 0.f;", "", "numbers", (), "bias"
    ),
    "the bias is in the wrong base": Mutant(BWD, "fmaf(UNIT, load", "fmaf(1.f, load", "numbers", (), "bias"),
    "the diagonal is taken for whole": Mutant(
        BWD, "warp_key + WARP_KEYS <= visible_end(masks, first)", "warp_key < visible_end(masks, first)", "numbers", (), "causal"
    ),
    "the diagonal's last keys are left out": Mutant(
        BWD, "&& warp_key < visible_end(masks, last)", "&& warp_key < visible_end(masks, first)", "numbers", (), "causal"
    ),
    "the first row block is left out": Mutant(
        BWD, "first_block = first_row / BR", "first_block = first_row / BR + 1", "numbers", (), "causal"
    ),
    "one key too many": Mutant(
        MASK, "(WINDOW ? masks.right : 0) - first", "(WINDOW ? masks.right : 0) - first - 1", "numbers", (), "causal"
    ),
    "one key past a batch's length": Mutant(MASK, "key >= masks.keys ?", "key > masks.keys ?", "numbers", (), "lengths"),
    "lower keys of a tile have the upper ones' mask": Mutant(
        MASK, "const int key = key0 + 8 * h,", "const int key = key0,", "numbers", (), "causal"
    ),
    "one key too few at the window's left": Mutant(MASK, "own + masks.left)", "own + masks.left - 1)", "numbers", (), "window"),
    "the window's left edge is taken for whole": Mutant(
        BWD, "&& warp_key >= visible_begin(masks, last);", ";", "numbers", (), "window"
    ),
    "the window's last row block is left out": Mutant(
        BWD, "- 1ll - diagonal + p.left", "- 1ll - diagonal + p.left - BR", "numbers", (), "window"
    ),
    "the window's right side is forgotten": Mutant(BWD, "(WINDOW ? p.right : 0)", "0", "numbers", (), "window"),
    "the mask is the row before's": Mutant(
        MASK,
        "masks.mask + row * masks.mask_row + key",
        "masks.mask + max(row - 1, 0) * masks.mask_row + key",
        "numbers",
        (),
        "mask",
    ),
    "heads share the block mask's words": Mutant(BWD, "KEPT_ROWS>(kept + h * words", "KEPT_ROWS>(kept", "numbers", (), "blocks"),
    "row blocks have the block mask's elements each": Mutant(
        BWD, "<KEPT_COLS, KEPT_ROWS>", "<KEPT_COLS, 1>", "out of bounds", ("mask.kept[",), "blocks"
    ),
    "column blocks have the block mask's elements each": Mutant(
        BWD, "<KEPT_COLS, KEPT_ROWS>", "<1, KEPT_ROWS>", "out of bounds", ("mask.kept[",), "blocks"
    ),
    "the block mask is not transposed": Mutant(
        BWD,
        ".transposed()",
        "",
        "numbers",
        (),
        "blocks",
    ),
    "dS's chunks are another matrix's": Mutant(
        PRODUCTS,
        "ScoreTile::index(lane % 8 + lane / 16 * 8, row + 16 * a + lane / 8 % 2 * 8)",
        "ScoreTile::index(lane % 16, row + 16 * a + lane / 16 * 8)",
        "numbers",
    ),
    "dK's rows are put down twice": Mutant(PRODUCTS, "(16 * m + 8 * h) * Tile::ROW_BYTES", "16 * m * Tile::ROW_BYTES", "numbers"),
    "sequences are looked for one too late": Mutant(
        SEQUENCE, "/ SIZE + b <= index", "/ SIZE + b < index", "out of bounds", ("bound = (lane < 2",), "packed"
    ),
    "bounds are read before they are there": Mutant(
        SEQUENCE,
        "found[4] = first;\n  }\n  __syncthreads();",
        "found[4] = first;\n  }",
        "race|uninitialised",
        ("found[",),
        "packed",
    ),
    "the room of the bounds is used early": Mutant(
        SEQUENCE, "found[2]};\n  __syncthreads();", "found[2]};", "race", ("found[", COPY), "packed"
    ),
    "K is the first sequence's": Mutant(BWD, "row = first_key + static_cast", "row = static_cast", "numbers", (), "packed"),
    "L and D are the first sequence's": Mutant(
        BWD,
        "row0 = pair * p.total_q + first_query;",
        "row0 = pair * p.total_q;",
        "numbers",
        (),
        "packed",
    ),
    "dK goes to the first sequence": Mutant(
        BWD, "to = first_key + place.j * BC", "to = place.j * BC", "race", (STORE_TILE,), "packed"
    ),
    "dQ's sum is the first sequence's": Mutant(BWD, "p.total_q, first_query + g", "p.total_q, g", "numbers", (), "packed"),
    # Warps of 32 keys
    "the second half of the rows is the first": Mutant(BWD, "(part * ROW_WARPS + row_warp)", "row_warp", "numbers", (), "32 keys"),
    "the second row tile of dQ is the first": Mutant(
        PRODUCTS, "row + 16 * a + lane / 8 % 2 * 8", "row + lane / 8 % 2 * 8", "numbers", (), "32 keys"
    ),
    "P lies in dS's last row": Mutant(BWD, "WIDE ? 0 : BC *", "WIDE ? 0 : (BC - 1) *", "race", DS, "shared keys"),
    "the ring begins in P's last row": Mutant(
        BWD,
        "ROW_WARPS - 1) * BC * ScoreTile",
        "ROW_WARPS - 1) * (BC - 1) * ScoreTile",
        "race|in flight",
        (*DS, COPY),
        "shared keys",
    ),
    "a warp takes its own rows twice": Mutant(
        BWD, "(1 - row_warp) * WARP_ROWS", "row_warp * WARP_ROWS", "numbers", (), "shared keys"
    ),
    "warps with the same keys have the same columns of dK": Mutant(
        BWD, "key_col = WIDE ? 0 : row_warp * KEY_COLS", "key_col = 0", "race", LEFT, "shared keys"
    ),
    "P of the other warp's rows is forgotten": Mutant(
        BWD,
        "if constexpr (ROW_WARPS > 1 && WITH_DV) put_tile<ScoreTile>(P_smem",
        "if (false) put_tile<ScoreTile>(P_smem",
        "uninitialised",
        (LDMATRIX,),
        "shared keys",
    ),
}


@pytest.mark.parametrize("name", sample(MUTANTS, {"dS is read early"}))
def test_mutant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_mutant(MUTANTS[name], schedule(MUTANTS[name].problem), backward, tmp_path, monkeypatch)


FIXED = ("", "causal rows", "window of rows", "blocks", "packed", *PLANNED)  # what its mutants break
WIDE = tuple(name for name in PROBLEMS if name.startswith("wide"))  # clean in test_wide_gradients.py
FEATURES = ("one stage: ", *(name for name in PROBLEMS if name not in WIDE), *(f"fixed: {name}" for name in FIXED))


@pytest.mark.wide
@pytest.mark.parametrize("problem", FEATURES)
def test_what_is_not_broken_is_clean(problem: str) -> None:
    assert all(kernel.threads >= 64 for kernel in schedule(problem).kernels())  # several warps
    check_unbroken(schedule(problem), backward, range(1))


ORDERED: dict[str, dict[str, Any]] = {
    "window": {"window": (20, 5)},
    "masks": {"causal": True, "mask": True, "bias": True, "padded": True, "key_lengths": (36,)},
}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "fixed", "orders"), [("window", True, 1), *(wide(name, fixed, 6) for name in ORDERED for fixed in (False, True))]
)
def test_many_orders(name: str, fixed: bool, orders: int) -> None:
    """Small problems in many orders of execution."""
    posed: dict[str, Any] = {"seqlen_q": 24, "seqlen_k": 40, "head_dim": 16, "dtype": "float16"} | ORDERED[name]
    problem = Problem(batch=1, heads=2, kv_heads=1, **posed)
    check_unbroken(plan_backward(problem, A100, "fa2", (16, 32), deterministic=fixed), backward, range(orders))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("d", "device"),
    sample([(32, A100), (64, A100), (64, T4), (80, A100), (128, A100), (128, T4), (256, A100), (256, H100)], [(32, A100)]),
)
def test_no_bank_conflicts(d: int, device: Device) -> None:
    """Fragments, copies, dS, L and D, and the gradients' way through shared memory take the wavefronts that their bytes need."""
    no_conflicts(Problem(1, 1, 1, 128, 128, d, "float16"), device)


@pytest.mark.parametrize("d", [wide(16), wide(48), wide(64)])
def test_no_bank_conflicts_of_float(d: int) -> None:
    no_conflicts(Problem(1, 1, 1, 32, 64, d, "float32"), A100)


def no_conflicts(p: Problem, device: Device) -> None:
    """No launch has conflicts; dQ's kernel is run by itself."""
    (q, k, v), dout, rows = draw(p), draw_gradient(p), np.zeros((1, 1, p.seqlen_q), np.float32)
    free, fixed = (plan_backward(p, device, "fa2", deterministic=each) for each in (False, True))
    found = execute_backward(free, dout, q, k, v, dout, rows).counters
    assert isinstance(fixed, Fa2BackwardSchedule) and fixed.queries is not None
    arrays = {"Q": q, "K": k, "V": v, "O": dout, "L": rows, "dO": dout, "dQ": np.empty_like(q), "dK": k, "dV": v}
    arrays |= {"D": rows, "bases": np.zeros((*rows.shape, 2), np.float32)}
    found |= run_kernels(fixed.queries, argument_values(fixed, arrays), ("dQ",))[1]
    assert {"fa2_backward", "fa2_backward_queries"} < found.keys()
    conflicts = {(name, *access): counts.conflicts for name, each in found.items() for access, counts in each.shared.items()}
    assert set(conflicts.values()) == {0}, conflicts
