"""Seeded faults in the kernel that sums dQ by itself, for the same bits each time: each is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases_backward import (
    COPY,
    COPY_FLOAT,
    DQ,
    DS,
    LEFT,
    MMA,
    MOVED,
    MOVED_ROWS,
    SEQUENCE,
    STORE_TILE,
    SYNC,
    backward,
    schedule,
)
from mutants import Mutant, check_mutant

MUTANTS = {
    "K and V are read early": Mutant(DQ, SYNC + "  // K_j and V_j are", "// K_j", "race", MOVED, "rows"),
    "nobody waits for K and V": Mutant(DQ, "wait_for_groups<0>();\n", "", "in flight|race", MOVED, "rows"),
    "K and V are waited for one too late": Mutant(DQ, "wait_for_groups<0>", "wait_for_groups<1>", "in flight|race", MOVED, "rows"),
    "Q and dO are read early": Mutant(DQ, SYNC + "  // Q, dO, L and D are", "// Q, dO", "race", MOVED_ROWS, "rows"),
    "nobody waits for Q and dO": Mutant(DQ, "wait_for_groups<1>();\n", "", "in flight|race", MOVED_ROWS, "rows"),
    "the first K and V are not committed": Mutant(
        DQ,
        "fetch<false, !BY_TURNS>(j, true);\n    close_group();",
        "fetch<false, !BY_TURNS>(j, true);",
        "in flight|race",
        MOVED_ROWS,
        "rows",
    ),
    "the ring has one slot": Mutant(
        DQ, "stream.slot = stream.both - stream.slot;", "", "race|in flight|uninitialised", MOVED, "rows"
    ),
    "a block is asked for before the first": Mutant(
        DQ,
        "stream.fetch<true>(next, next >= blocks.begin);\n        close",
        "stream.fetch<true>(next, true);\n        close",
        "out of bounds",
        (COPY,),
        "rows",
    ),
    "dQ leaves before it is put down": Mutant(DQ, "own_col, own);\n  __syncthreads();", "own_col, own);", "race", LEFT, "rows"),
    "the block mask is used before it is there": Mutant(
        DQ, "warp, WARPS);\n    __syncthreads();", "warp, WARPS);", "race|uninitialised", ("kept[",), "blocks"
    ),
    "dO lies in Q's last row": Mutant(DQ, "Q_smem + BR *", "Q_smem + (BR - 1) *", "race", MOVED, "rows"),
    "the ring begins in dO's last row": Mutant(DQ, "dO_smem + BR *", "dO_smem + (BR - 1) *", "race|in flight", MOVED, "rows"),
    "V lies in K's last row": Mutant(DQ, "K_BYTES = BC *", "K_BYTES = (BC - 1) *", "race|in flight", MOVED, "rows"),
    "L begins in the first slot": Mutant(
        DQ, "ring + (BY_TURNS ? ONE : RING)", "ring + RING / STAGES / BC * (BC - 1)", "race|in flight", MOVED_ROWS, "rows"
    ),
    "D lies in L": Mutant(DQ, "(rows_smem + BR);", "(rows_smem + BR) - 1;", "race|in flight", (COPY_FLOAT,), "rows"),
    "the block mask begins in D": Mutant(
        DQ, "D_smem + BR)", "D_smem + BR - 1)", "race|in flight|uninitialised", ("kept[", COPY_FLOAT), "blocks"
    ),
    "warps share a row of dQ": Mutant(
        DQ, "put_tile<KeyPart>(Q_smem + own_rows", "put_tile<KeyPart>(Q_smem + warp * (WARP_ROWS - 1)", "race", LEFT, "rows"
    ),
    "Q is read past its end": Mutant(
        DQ, "p.Q.row, rows, threadIdx.x", "p.Q.row, BR, threadIdx.x", "out of bounds", (COPY,), "rows"
    ),
    "V is read past its end": Mutant(
        DQ, "V_row, keys - j * BC, threadIdx.x", "V_row, BC, threadIdx.x", "out of bounds", (COPY,), "rows"
    ),
    "L and D are read past their end": Mutant(DQ, "inside = r < rows", "inside = r < BR", "out of bounds", (COPY_FLOAT,), "rows"),
    "rows past the end are stored": Mutant(
        DQ, "end.Nq - end_row, lane", "LEAVING, lane", "out of bounds|race", (STORE_TILE,), "rows"
    ),
    "dQ does not begin with zeros": Mutant(
        DQ, "dQ_regs[M][KeyPart::PAD / 8][4] = {}", "dQ_regs[M][KeyTile::PAD / 8][4]", "uninitialised", (MMA,), "rows"
    ),
    "D is forgotten": Mutant(DQ, "D_i[m][e / 2], dropout", "0.f, dropout", "numbers", (), "rows"),
    "D is another row's": Mutant(DQ, "D_i[m][e / 2], dropout", "D_i[m][e % 2], dropout", "numbers", (), "rows"),
    "dQ is not scaled": Mutant(DQ, "multiply(own, p.scale);", "", "numbers", (), "rows"),
    "K is another group's": Mutant(
        SEQUENCE, "head, head / p.group, p.Nq", "head, head % p.group, p.Nq", "numbers", (), "rows of groups"
    ),
    "the diagonal is taken for whole": Mutant(
        DQ, "end <= visible_end(masks, warp_row)", "end <= visible_end(masks, last)", "numbers", (), "causal rows"
    ),
    "the diagonal's last keys are left out": Mutant(
        DQ, "&& first < visible_end(masks, last)", "&& first < visible_end(masks, warp_row)", "numbers", (), "causal rows"
    ),
    "the window's left edge is taken for whole": Mutant(
        DQ, "&& first >= visible_begin(masks, last);", ";", "numbers", (), "window of rows"
    ),
    "row blocks have the block mask's elements each": Mutant(
        DQ, "<KEPT_ROWS, KEPT_COLS>", "<1, KEPT_COLS>", "out of bounds", ("mask.kept[",), "blocks"
    ),
    "column blocks have the block mask's elements each": Mutant(
        DQ, "<KEPT_ROWS, KEPT_COLS>", "<KEPT_ROWS, 1>", "out of bounds", ("mask.kept[",), "blocks"
    ),
    "dQ goes to the first sequence": Mutant(
        DQ,
        "end.query(p.dQ, end_row)",
        "p.dQ.of(end.batch, end.head) + end_row * p.dQ.row",
        "race",
        (STORE_TILE,),
        "packed",
    ),
    "L and D are the first sequence's": Mutant(
        SEQUENCE,
        "static_cast<long long>(p.total_q) + sequence.first_query;",
        "static_cast<long long>(p.total_q);",
        "numbers",
        (),
        "packed",
    ),
    "wide dS is read early": Mutant(DQ, "meet_partner();\n", "\n", "race", DS, "wide dQ"),
    # Warps of 32 rows
    "the second half of the keys is the first": Mutant(DQ, "(part * COL_WARPS + col_warp)", "col_warp", "numbers", (), "32 keys"),
    "dQ's sums are put down early": Mutant(
        DQ, SYNC + "\n  constexpr int COLS", "constexpr int COLS", "race", ("room[",), "shared keys"
    ),
    "dQ's sums are read early": Mutant(DQ, SYNC + "\n    const int beside", "const int beside", "race", ("room[",), "shared keys"),
    "a warp gets its own sums": Mutant(DQ, "(1 - col_warp) * ROW_WARPS", "col_warp * ROW_WARPS", "numbers", (), "shared keys"),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_mutant(MUTANTS[name], schedule("fixed: " + MUTANTS[name].problem), backward, tmp_path, monkeypatch)
